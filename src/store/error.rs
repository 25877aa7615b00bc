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

    /// The server has no database of this name.
    #[error("the server has no such database: have it created, or correct database.url")]
    NoServerDatabase(#[source] Box<dyn StdError + Send + Sync>),

    /// The server knows no such account, or its password is another.
    #[error("the server refused the login")]
    Login(#[source] Box<dyn StdError + Send + Sync>),

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

    /// The row column cannot be bound to: the database may store there something else than it was given.
    #[error(
        "row column {column} is declared {declared:?}, {why} and may change what is stored there: values are bound to \
         columns of integers, texts and UUIDs only"
    )]
    NotBindable {
        /// `TABLE.COLUMN` of the row column.
        column: String,
        /// Its declared type.
        declared: String,
        /// What the database makes of that type.
        why: String,
    },

    /// The sealed column is of a type that does not keep a text as it is.
    #[error("column {column} is declared {declared:?}, where no sealed text can stand: make it {wanted}")]
    NotForText {
        /// `TABLE.COLUMN`.
        column: String,
        /// Its declared type.
        declared: String,
        /// What it should be.
        wanted: &'static str,
    },

    /// The key column is of a type that a walk cannot go by.
    #[error("key column {column} is declared {declared:?}: keys are integers, texts, bytes or UUIDs")]
    NotAKey {
        /// `TABLE.COLUMN` of the key column.
        column: String,
        /// Its declared type.
        declared: String,
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

    /// Another transaction was in the way (deadlock, serialization failure, certification conflict); try again. Nothing
    /// was changed.
    #[error("another transaction was in the way")]
    Conflict(#[source] Box<dyn StdError + Send + Sync>),

    /// This account may not do it.
    #[error("the database account may not do this: grant it what the page `servers` lists for the command")]
    Denied(#[source] Box<dyn StdError + Send + Sync>),

    /// Rows or tables may stand there that this account cannot see, so nothing can be proven.
    #[error("{0} cannot be read whole by this account ({1}): what it holds is unknown, so nothing is proven")]
    Hidden(String, &'static str),

    /// This account may not make the triggers of the fence.
    #[error("this account may not create triggers on {0}")]
    MayNotFence(String),

    /// The fence could not be put up, because a transaction holds the table.
    #[error(
        "a transaction that is open or prepared holds {0}, and the fence has to wait for it: end it, then run `hardwrap rotate --resume`"
    )]
    FenceBlocked(String),

    /// Transactions are prepared that may still store values under an old key.
    #[error(
        "{0} prepared XA transactions may still store values under an old key: commit or roll them back (XA RECOVER), then run `hardwrap rotate --resume`"
    )]
    Prepared(usize),

    /// A read replica proves nothing: it may be behind, and cannot be written.
    #[error("the database is a read replica or read-only: nothing is proven there; use the primary")]
    Replica,

    /// The table's engine cannot roll back, so an atomic rotation is not one.
    #[error("the engine of table {0} cannot roll back: use `--online`, or ALTER TABLE {0} ENGINE=InnoDB")]
    NotTransactional(String),

    /// One transaction would be larger than the cluster takes.
    #[error(
        "an atomic rotation would write {wanted} {unit} in one transaction, and {setting} is {most}: use `--online`"
    )]
    WriteSet {
        /// The cluster's setting.
        setting: &'static str,
        /// What it says.
        most: u64,
        /// What it would take.
        wanted: u64,
        /// Of what.
        unit: &'static str,
    },

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

impl Error {
    /// An insert that found its row there already lost a race: worth another try.
    pub(super) fn in_the_way(self) -> Self {
        match self {
            Self::Refused(source) => Self::Conflict(source),
            error => error,
        }
    }
}

impl From<Diesel> for Error {
    fn from(error: Diesel) -> Self {
        if let Some(kid) = fenced(&error) {
            return Self::Fenced(kid);
        }
        let Diesel::DatabaseError(kind, information) = &error else {
            // A transaction that ended by itself cannot be gone on with.
            let gone = matches!(error, Diesel::BrokenTransactionManager | Diesel::RollbackErrorOnCommit { .. });
            return if gone { Self::Unavailable(Box::new(error)) } else { Self::Refused(Box::new(error)) };
        };
        match kind {
            DatabaseErrorKind::SerializationFailure => return Self::Conflict(Box::new(error)),
            DatabaseErrorKind::ReadOnlyTransaction => return Self::ReadOnly,
            DatabaseErrorKind::ClosedConnection => return Self::Unavailable(Box::new(error)),
            DatabaseErrorKind::Unknown => {}
            _ => return Self::Refused(Box::new(error)),
        }
        let message = information.message();
        // diesel gives no code for these, so the fixed texts have to do: SQLite's (sqlite3ErrStr, sqlite3LocateTable),
        // and those of the servers, which our connections ask for in English.
        let named = |before: &str, after: &str| {
            let rest = &message[message.find(before)? + before.len()..];
            rest.find(after).map(|end| rest[..end].to_owned())
        };
        if let Some(table) = message.strip_prefix("no such table: ") {
            return Self::NoTable(table.strip_prefix("main.").unwrap_or(table).to_owned());
        }
        if let Some(column) = message.strip_prefix("no such column: ") {
            return Self::NoColumn(column.strip_prefix("t.").unwrap_or(column).to_owned());
        }
        if message.ends_with("does not exist")
            && let Some(table) = named("relation \"", "\"")
        {
            return Self::NoTable(table);
        }
        if message.ends_with("does not exist")
            && let Some(column) = named("column ", " does")
        {
            return Self::NoColumn(column.strip_prefix("t.").unwrap_or(&column).to_owned());
        }
        if message.ends_with("doesn't exist")
            && let Some(table) = named("Table '", "'")
        {
            return Self::NoTable(table.split_once('.').map_or(table.clone(), |(_, table)| table.to_owned()));
        }
        if let Some(column) = named("Unknown column '", "'") {
            return Self::NoColumn(column.strip_prefix("t.").unwrap_or(&column).to_owned());
        }
        let says = |texts: &[&str]| texts.iter().any(|text| message.contains(text));
        if says(&READ_ONLY) {
            return Self::ReadOnly;
        }
        if says(&IN_THE_WAY) {
            return Self::Conflict(Box::new(error));
        }
        if says(&OUT_OF_REACH) {
            return Self::Unavailable(Box::new(error));
        }
        if says(&DENIED) {
            return Self::Denied(Box::new(error));
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
        let text = error.to_string();
        let says = |texts: &[&str]| texts.iter().any(|one| text.contains(one));
        // MariaDB refuses a database that the account may not use as it refuses a login.
        if says(&["authentication failed", "no password supplied", "no pg_hba.conf entry", "Access denied"])
            || text.contains("role \"") && text.contains("does not exist")
        {
            return Self::Login(Box::new(error));
        }
        if says(&["Unknown database"]) || text.contains("database \"") && text.contains("does not exist") {
            return Self::NoServerDatabase(Box::new(error));
        }
        Self::Unavailable(Box::new(error))
    }
}

/// SQLITE_CANTOPEN
pub(super) const CANNOT_OPEN: &str = "unable to open database file";

const OUT_OF_REACH: [&str; 17] = [
    "is locked", // SQLITE_BUSY, SQLITE_LOCKED
    CANNOT_OPEN,
    "disk I/O error",
    "database or disk is full",
    "locking protocol",
    "server closed the connection unexpectedly",
    "terminating connection",
    "no connection to the server",
    "the database system is",
    "could not extend file",
    "No space left on device",
    "server has gone away",
    "Lost connection to",
    "Connection was killed",
    "Server shutdown in progress",
    "WSREP has not yet prepared node", // 1047
    "is full",                         // 1114
];

/// Deadlock (40P01, 1213), lock time-out (55P03, 1205), certification conflict at COMMIT, a table whose definition
/// changed under a statement.
const IN_THE_WAY: [&str; 7] = [
    "deadlock detected",
    "Deadlock found",
    "Deadlock: wsrep aborted",
    "canceling statement due to lock timeout",
    "Lock wait timeout exceeded",
    "could not serialize access",
    "Record has changed since last read",
];

const READ_ONLY: [&str; 4] =
    ["attempt to write a readonly database", "read-only transaction", "--read-only option", "is read only"];

const DENIED: [&str; 5] =
    ["permission denied", "must be owner of", "command denied to user", "Access denied", "you need (at least one of)"];
