//! The ledger: values that a rotation could not move, by table, column and key, until they are moved, gone or given up.

use diesel::prelude::*;
use diesel::sql_types::{BigInt, Nullable, Text};
use sha2::{Digest, Sha256};

use super::connection::AnyConnection;
use super::query::Query;
use super::schema::now;
use super::{Db, Error, Key, Spot};
use crate::column::Column;
use crate::envelope::Marker;
use crate::provider::KeyId;

impl Db {
    /// Notes values that could not be moved, and why, in one transaction. Noted before, its reason is renewed; one that
    /// was given up stays so while the value is the same.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    pub fn note_in_ledger(&self, column: &Column, bad: &[BadValue]) -> Result<(), Error> {
        if bad.is_empty() {
            return Ok(());
        }
        let digests = bad.iter().map(|one| self.digest_at(column, &one.key)).collect::<Result<Vec<_>, _>>()?;
        self.write(|connection| {
            for (one, digest) in bad.iter().zip(&digests) {
                note(connection, column, one, digest)?;
            }
            Ok(())
        })
    }

    /// Every entry of the ledger, in the order they were noted.
    ///
    /// # Errors
    /// [`Error::NoTable`] before [`Db::upgrade`], [`Error::Unavailable`].
    pub fn ledger(&self) -> Result<Vec<LedgerEntry>, Error> {
        let rows: Vec<LedgerRow> = self.read_with(|connection| {
            Query::new(format!("SELECT {LEDGER} FROM hardwrap_ledger ORDER BY id")).load(connection)
        })?;
        Ok(rows.into_iter().map(LedgerEntry::from).collect())
    }

    /// Drops entries whose value is not there any more, or names `target` by now, or is no value of ours: they need
    /// nothing more. Says how many.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    pub fn settle_ledger(&self, columns: &[Column], target: KeyId) -> Result<usize, Error> {
        let mut settled = 0;
        for entry in self.ledger()? {
            let column = columns.iter().find(|column| entry.is_of(column));
            let stands = match column {
                Some(column) => self.stands(column, &entry, target)?,
                // Not registered any more: discovery looks after what stands there.
                None => false,
            };
            if !stands {
                self.write(|connection| {
                    Query::new("DELETE FROM hardwrap_ledger WHERE id = ").integer(entry.id).execute(connection)
                })?;
                settled += 1;
            }
        }
        Ok(settled)
    }

    fn stands(&self, column: &Column, entry: &LedgerEntry, target: KeyId) -> Result<bool, Error> {
        if entry.key == Key::from(KEYLESS) {
            return Ok(self.count_keyless(column, target)? > 0);
        }
        let Some(stored) = self.read_key(column, &entry.key)? else { return Ok(false) };
        let Some(value) = stored.value else { return Ok(false) };
        let under = format!("{}{target}:", Marker::HW1);
        Ok(value.bytes().starts_with(Marker::HW1.as_bytes()) && !value.bytes().starts_with(under.as_bytes()))
    }

    /// Gives up the value of one entry, with a reason: it keeps no key from being destroyed any more, while it stays as
    /// it is.
    ///
    /// # Errors
    /// [`Error::NoLedgerEntry`], [`Error::Unavailable`].
    pub fn accept_in_ledger(&self, id: i64, reason: &str) -> Result<(), Error> {
        let now = now();
        let accepted = self.write(|connection| {
            Query::new("UPDATE hardwrap_ledger SET accepted = ")
                .text(&now)
                .sql(", reason = ")
                .text(reason)
                .sql(" WHERE id = ")
                .integer(id)
                .execute(connection)
        })?;
        if accepted == 1 { Ok(()) } else { Err(Error::NoLedgerEntry(id)) }
    }

    /// Whether the value of a row was given up, and is still what it was then.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    pub fn is_given_up(&self, column: &Column, key: &Key) -> Result<bool, Error> {
        let standing = Query::new(format!("SELECT {LEDGER} FROM hardwrap_ledger"));
        let standing: Vec<LedgerRow> = self
            .read_with(|connection| at_row(standing, column, key).sql(" AND accepted IS NOT NULL").load(connection))?;
        if standing.is_empty() {
            return Ok(false);
        }
        let digest = self.digest_at(column, key)?;
        Ok(standing.iter().any(|one| one.digest == digest))
    }

    /// What tells the value of a row from another; empty where there is none.
    fn digest_at(&self, column: &Column, key: &Key) -> Result<String, Error> {
        let value = self.read_key(column, key)?.and_then(|row| row.value);
        Ok(value.map(|value| digest_of(value.bytes())).unwrap_or_default())
    }

    /// How many values at `spot` that name `kid` were given up, and are still what they were then.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    pub fn given_up(&self, columns: &[Column], spot: &Spot, kid: KeyId) -> Result<u64, Error> {
        let Some(column) = columns.iter().find(|column| spot.is(column)) else { return Ok(0) };
        let mut count = 0;
        for entry in self.ledger()?.iter().filter(|entry| entry.accepted.is_some() && entry.is_of(column)) {
            let stored = self.read_key(column, &entry.key)?;
            let value = stored.as_ref().and_then(|row| row.value.as_ref());
            let names = format!("{}{kid}:", Marker::HW1);
            count += u64::from(value.is_some_and(|value| {
                value.bytes().starts_with(names.as_bytes()) && digest_of(value.bytes()) == entry.digest
            }));
        }
        Ok(count)
    }
}

/// A value that cannot be moved.
#[derive(Clone, Debug)]
pub struct BadValue {
    /// What its row is found by.
    pub key: Key,
    /// The key it names, where that can be read.
    pub kid: Option<KeyId>,
    /// Why: the kind of error.
    pub error: &'static str,
}

fn note(connection: &mut AnyConnection, column: &Column, bad: &BadValue, digest: &str) -> Result<(), Error> {
    let (kid, shown) = (bad.kid.map(|kid| kid.to_string()).unwrap_or_default(), bad.key.to_string());
    let standing = Query::new(format!("SELECT {LEDGER} FROM hardwrap_ledger"));
    let standing: Vec<LedgerRow> = at_row(standing, column, &bad.key).load(connection)?;
    let same = |one: &LedgerRow| one.digest == digest && one.kid == kid;
    if standing.iter().any(|one| same(one) && (one.error == bad.error || one.accepted.is_some())) {
        return Ok(());
    }
    at_row(Query::new("DELETE FROM hardwrap_ledger"), column, &bad.key).execute(connection)?;
    let now = now();
    let insert =
        Query::new("INSERT INTO hardwrap_ledger (tbl, col, shown, kid, error, digest, noted, row_key) VALUES (")
            .text(column.table())
            .sql(", ")
            .text(column.name())
            .sql(", ")
            .text(&shown)
            .sql(", ")
            .text(&kid)
            .sql(", ")
            .text(bad.error)
            .sql(", ")
            .text(digest)
            .sql(", ")
            .text(&now)
            .sql(", ")
            .owned(bad.key.encoded())
            .sql(")");
    insert.execute(connection)?;
    Ok(())
}

/// An entry of the ledger: a value that could not be moved.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct LedgerEntry {
    /// Its number, by which it is accepted.
    pub id: i64,
    /// Its table.
    pub table: String,
    /// Its column.
    pub column: String,
    /// What its row is found by.
    pub key: Key,
    /// The key it names: 16 hex digits, or empty where that cannot be read.
    pub kid: String,
    /// Why it could not be moved: the kind of error.
    pub error: String,
    /// When it was noted, RFC 3339 in UTC.
    pub noted: String,
    /// When it was given up, if it was, ...
    pub accepted: Option<String>,
    /// ... and why.
    pub reason: Option<String>,
    digest: String,
}

impl LedgerEntry {
    /// Whether this is about a value of that column.
    pub fn is_of(&self, column: &Column) -> bool {
        self.table == column.table() && self.column == column.name()
    }
}

fn digest_of(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
}

/// Appends the condition that a row of the ledger is that of this value.
fn at_row<'a>(query: Query<'a>, column: &'a Column, key: &Key) -> Query<'a> {
    let query = query.sql(" WHERE tbl = ").text(column.table()).sql(" AND col = ").text(column.name());
    query.sql(" AND row_key = ").owned(key.encoded())
}

#[derive(QueryableByName)]
struct LedgerRow {
    #[diesel(sql_type = BigInt)]
    id: i64,
    #[diesel(sql_type = Text)]
    tbl: String,
    #[diesel(sql_type = Text)]
    col: String,
    #[diesel(sql_type = Text)]
    row_key: String,
    #[diesel(sql_type = Text)]
    kid: String,
    #[diesel(sql_type = Text)]
    error: String,
    #[diesel(sql_type = Text)]
    digest: String,
    #[diesel(sql_type = Text)]
    noted: String,
    #[diesel(sql_type = Nullable<Text>)]
    accepted: Option<String>,
    #[diesel(sql_type = Nullable<Text>)]
    reason: Option<String>,
}

impl From<LedgerRow> for LedgerEntry {
    fn from(row: LedgerRow) -> Self {
        Self {
            id: row.id,
            table: row.tbl,
            column: row.col,
            key: Key::decoded(&row.row_key),
            kid: row.kid,
            error: row.error,
            noted: row.noted,
            accepted: row.accepted,
            reason: row.reason,
            digest: row.digest,
        }
    }
}

/// Stands for the rows of a column whose key is NULL: nothing else names them.
pub(crate) const KEYLESS: &str = "(rows without a key)";

const LEDGER: &str = "id, tbl, col, row_key, kid, error, digest, noted, accepted, reason";
