//! What can go wrong with a database, by what a caller can do about it.

use std::error::Error as StdError;
use std::path::PathBuf;

use diesel::result::{DatabaseErrorKind, Error as Diesel};

use super::fence;
use super::stored::BadRow;
use crate::codec;
use crate::column::{Misplaced, Unknown};
use crate::provider::KeyId;

/// Why the store did not do what was asked. No variant shows a value, a key or a password.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is no such database file.
    #[error("no database {0}: run `hardwrap init`")]
    NoDatabase(PathBuf),

    /// A database cannot be made there: its directory is missing.
    #[error("cannot make database {0}: no such directory")]
    NoPlace(PathBuf),

    /// Our tables are not there.
    #[error("the database has no tables of hardwrap: run `hardwrap init`")]
    NotInitialised,

    /// Our tables are older than this program.
    #[error("the tables of hardwrap are of version {found}, and this hardwrap wants {wanted}: run `hardwrap init`")]
    Outdated {
        /// The version found.
        found: i64,
        /// The version this program knows.
        wanted: i64,
    },

    /// Our tables are newer than this program.
    #[error("the tables of hardwrap are of version {found}, and this hardwrap knows {known}: use a newer hardwrap")]
    NewerTables {
        /// The version found.
        found: i64,
        /// The version this program knows.
        known: i64,
    },

    /// The database asks for a newer program.
    #[error("the database wants hardwrap {oldest} or newer, and this is {this}")]
    NewerNeeded {
        /// The oldest hardwrap that may use the database.
        oldest: String,
        /// This program's version.
        this: &'static str,
    },

    /// The database is locked, or its file cannot be reached; try again. Nothing is known about what was asked.
    #[error("the database is unavailable")]
    Unavailable(#[source] Box<dyn StdError + Send + Sync>),

    /// The database was open when this process was forked off, and SQLite cannot be used over a fork: neither that
    /// connection nor a new one to the same file.
    #[error(
        "the database was open when this process was forked: SQLite cannot be used over a fork; fork before it is \
         opened, or start a new program"
    )]
    Forked,

    /// The file, or its directory, cannot be written; nothing was changed.
    #[error("the database is read-only")]
    ReadOnly,

    /// The write-ahead log could not be emptied, because another connection uses it; try again.
    #[error("the write-ahead log is in use by another connection and was not truncated")]
    WalInUse,

    /// The file is no SQLite database.
    #[error("{0} is not a SQLite database")]
    NotADatabase(PathBuf),

    /// The database does not work the way values need it to.
    #[error("the database cannot be used: {0}")]
    Unfit(&'static str),

    /// Two registered columns are one column of the database, or are written alike once spelt as the schema does.
    #[error("{first} and {second} are one column to the database: register it once")]
    RegisteredTwice {
        /// The one, as it was registered.
        first: String,
        /// The other.
        second: String,
    },

    /// A table is missing.
    #[error("no table {0}: make it, or correct the register")]
    NoTable(String),

    /// Something that is no ordinary table stands where a table should.
    #[error("{table} is a {kind}, not a table")]
    NotATable {
        /// Its name.
        table: String,
        /// What it is.
        kind: &'static str,
    },

    /// A column is missing.
    #[error("no column {0}: add it, or correct the register")]
    NoColumn(String),

    /// A column computes its value: nothing can be stored there.
    #[error("column {0} is generated: nothing can be stored there")]
    Generated(String),

    /// The row column cannot be bound to: SQLite may store there something else than it was given.
    #[error(
        "row column {column} is declared {declared:?}, which has {affinity} affinity and may change what is stored \
         there: values are bound to INTEGER and TEXT only"
    )]
    NotBindable {
        /// `TABLE.COLUMN` of the row column.
        column: String,
        /// Its declared type.
        declared: String,
        /// What SQLite makes of that type.
        affinity: &'static str,
    },

    /// The key does not tell rows apart; nothing was changed.
    #[error("{0} is not unique: more than one row has the same key")]
    KeyNotUnique(String),

    /// The row column of one row holds nothing that a value can be bound to.
    #[error(transparent)]
    BadRow(#[from] BadRow),

    /// One stored value is not UTF-8.
    #[error("the stored value is not UTF-8 text")]
    NotText,

    /// One value could not be sealed or opened.
    #[error(transparent)]
    Codec(#[from] codec::Error),

    /// A value was given a row it does not need, or none where it needs one.
    #[error(transparent)]
    Misplaced(#[from] Misplaced),

    /// A column of agent runs is not in the register.
    #[error(transparent)]
    Unregistered(#[from] Unknown),

    /// A column of agent runs is registered, but not bound to `uuid`.
    #[error("column {0} is not bound to the row column uuid")]
    NotBoundToUuid(String),

    /// What should be sealed is not JSON; nothing was sealed.
    #[error("not JSON: line {line}, column {column}")]
    NotJson {
        /// Line of the first fault, from 1.
        line: usize,
        /// Column of the first fault, from 1.
        column: usize,
    },

    /// A run with this uuid is there already.
    #[error("there is a run {0} already")]
    RunExists(String),

    /// A run has a status that this version does not know.
    #[error("run {0} has a status that this hardwrap does not know")]
    UnknownStatus(String),

    /// The database's fence refused a new value under a key that is being rotated away: seal it again.
    #[error("the database is fenced against key {0}: seal the value again, which takes the key that seals now")]
    Fenced(KeyId),

    /// Somebody else rotates or destroys here.
    #[error("{0} is at work on this database: wait for it, or for its lease to end ({1} s)")]
    Leased(String, i64),

    /// The ledger has no such entry.
    #[error("the ledger has no entry {0}: `hardwrap ledger list` shows them")]
    NoLedgerEntry(i64),

    /// The lease of a rotation ran out or was taken while it worked; nothing more was written.
    #[error("the lease of this rotation was lost: run `hardwrap rotate --resume`")]
    LeaseLost,

    /// The database refused for another reason; the source says why.
    #[error("the database refused")]
    Refused(#[source] Box<dyn StdError + Send + Sync>),
}

impl Error {
    /// What is wrong with one value or its row, by a stable name for programs; none where the error is about something
    /// else, above all where token or database is out of reach.
    pub fn value_kind(&self) -> Option<&'static str> {
        match self {
            Self::Codec(codec::Error::Unavailable(_)) => None,
            Self::Codec(error) => Some(error.kind()),
            Self::BadRow(_) => Some("BadRow"),
            Self::NotText => Some("NotText"),
            _ => None,
        }
    }
}

impl From<Diesel> for Error {
    fn from(error: Diesel) -> Self {
        if let Some(kid) = fenced(&error) {
            return Self::Fenced(kid);
        }
        let Diesel::DatabaseError(DatabaseErrorKind::Unknown, information) = &error else {
            return Self::Refused(Box::new(error));
        };
        let message = information.message();
        // diesel gives no code for these, so SQLite's fixed texts have to do (sqlite3ErrStr and sqlite3LocateTable).
        if let Some(table) = message.strip_prefix("no such table: ") {
            return Self::NoTable(table.strip_prefix("main.").unwrap_or(table).to_owned());
        }
        if let Some(column) = message.strip_prefix("no such column: ") {
            return Self::NoColumn(column.strip_prefix("t.").unwrap_or(column).to_owned());
        }
        if message.contains("attempt to write a readonly database") {
            return Self::ReadOnly;
        }
        if OUT_OF_REACH.iter().any(|text| message.contains(text)) {
            return Self::Unavailable(Box::new(error));
        }
        Self::Refused(Box::new(error))
    }
}

/// The key that the database's fence refused, if that is what `error` is: for an application that stores values with
/// diesel itself. It seals the value again, which takes the key that seals now, and stores that.
pub fn fenced(error: &Diesel) -> Option<KeyId> {
    match error {
        Diesel::DatabaseError(_, information) => fence::refused_key(information.message()),
        _ => None,
    }
}

impl From<diesel::ConnectionError> for Error {
    fn from(error: diesel::ConnectionError) -> Self {
        Self::Unavailable(Box::new(error))
    }
}

/// SQLITE_CANTOPEN
pub(super) const CANNOT_OPEN: &str = "unable to open database file";

const OUT_OF_REACH: [&str; 5] = [
    "is locked", // SQLITE_BUSY, SQLITE_LOCKED
    CANNOT_OPEN,
    "disk I/O error",
    "database or disk is full",
    "locking protocol",
];
