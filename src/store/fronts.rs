//! The walk over stored fronts: what stands before the first dot of every value that names another key than the target,
//! read in pages by key, and replaced only where it is still, byte for byte, what was read.

use diesel::prelude::*;
use diesel::sql_types::{BigInt, Binary, Bool, Nullable};

use super::key::KeyParts;
use super::sql::{self, Query};
use super::stored::RowParts;
use super::{BadRow, Db, Error, Key, RotationLease, Spot};
use crate::column::{Column, Row};
use crate::envelope::{Front, Marker};
use crate::provider::KeyId;

impl Db {
    /// The next `limit` values of ours behind `after`, or the first ones, that name another key than `target` or none
    /// that can be read; in the order of the keys, whatever the state of their rows.
    ///
    /// # Errors
    /// [`Error::NoTable`], [`Error::NoColumn`], [`Error::Unavailable`].
    pub fn fronts(
        &self,
        column: &Column,
        target: KeyId,
        after: Option<&Key>,
        limit: u32,
    ) -> Result<Vec<StoredFront>, Error> {
        let key = sql::exactly(column.key());
        let value = sql::of_t(column.name());
        let query = select_front(column).sql(&format!(" WHERE {} AND {key}", not_under(&value, target)));
        let query = match after {
            Some(after) => after.bind(query.sql(" > ")),
            None => query.sql(" IS NOT NULL"),
        };
        let query = query.sql(&format!(" ORDER BY {key} LIMIT ")).integer(limit.into());
        let rows: Vec<FrontParts> = self.read_with(|connection| query.load(connection))?;
        let bound = column.row().is_some();
        Ok(rows.into_iter().map(|parts| parts.front(bound)).collect())
    }

    /// How many values of ours name another key than `target`, or none that can be read, with the statement that says so;
    /// and how many of them stand in rows without a key, which no walk reaches.
    ///
    /// # Errors
    /// [`Error::NoTable`], [`Error::NoColumn`], [`Error::Unavailable`].
    pub fn count_fronts(&self, column: &Column, target: KeyId) -> Result<(u64, u64), Error> {
        let sql = format!(
            "SELECT COUNT(*) AS total, COUNT(*) - COUNT({}) AS keyless FROM {} WHERE {}",
            sql::of_t(column.key()),
            sql::from(column),
            not_under(&sql::of_t(column.name()), target)
        );
        let rows: Vec<Waiting> = self.read_with(|connection| Query::new(sql).load(connection))?;
        Ok(rows.first().map_or((0, 0), |row| (row.total.unsigned_abs(), row.keyless.unsigned_abs())))
    }

    /// Replaces fronts, one statement for each row, in one transaction. A front that is not what was read any more is
    /// left as its writer made it: the answer says, in order, which were replaced. The lease is renewed, and the
    /// rotation's count goes up, in the same transaction.
    ///
    /// # Errors
    /// [`Error::LeaseLost`], [`Error::Fenced`], [`Error::KeyNotUnique`], [`Error::Unavailable`]; then none was replaced.
    pub fn replace_fronts(
        &self,
        column: &Column,
        fronts: &[NewFront<'_>],
        lease: &RotationLease,
        target: KeyId,
    ) -> Result<Vec<bool>, Error> {
        let (name, value) = (sql::quote(column.name()), sql::of_t(column.name()));
        let bytes = sql::as_bytes(&value);
        // What follows the front is carried over byte for byte, and a BLOB stays one.
        let whole = |cast: &str| format!("CAST(CAST(? AS BLOB) || substr({bytes}, ?) AS {cast})");
        let update = format!(
            "UPDATE {} SET {name} = CASE typeof({value}) WHEN 'blob' THEN {} ELSE {} END WHERE substr({bytes}, 1, ?) = ? AND {} = ",
            sql::from(column),
            whole("BLOB"),
            whole("TEXT"),
            sql::exactly(column.key()),
        );
        let parts: Vec<&str> = update.split('?').collect();
        self.write(|connection| {
            let mut replaced = Vec::with_capacity(fronts.len());
            for front in fronts {
                let old = format!("{}.", front.old);
                let from = i64::try_from(front.old.len() + 1).unwrap_or(i64::MAX);
                let [a, b, c, d, e, f, g] = parts[..] else { return Err(Error::Unfit("a statement has lost a place")) };
                let query =
                    Query::new(a).text(front.new).sql(b).integer(from).sql(c).text(front.new).sql(d).integer(from);
                let query = query.sql(e).integer(from).sql(f).bytes(old.as_bytes()).sql(g);
                match front.key.bind(query).execute(connection)? {
                    0 => replaced.push(false),
                    1 => replaced.push(true),
                    // An error rolls the transaction back.
                    _ => return Err(Error::KeyNotUnique(format!("{}.{}", column.table(), column.key()))),
                }
            }
            lease.renew_in(connection)?;
            let moved = replaced.iter().filter(|replaced| **replaced).count();
            Query::new("UPDATE hardwrap_rotation SET moved = moved + ")
                .integer(i64::try_from(moved).unwrap_or(i64::MAX))
                .sql(" WHERE target = ")
                .text(&target.to_string())
                .execute(connection)?;
            Ok(replaced)
        })
    }

    /// How many values at `spot` name `kid`: as the key that wraps them, or among their further keys (`also`), whose
    /// headers are decoded one by one.
    ///
    /// # Errors
    /// [`Error::NoTable`], [`Error::NoColumn`], [`Error::Unavailable`].
    pub fn count_naming(&self, spot: &Spot, kid: KeyId) -> Result<Naming, Error> {
        let (value, table) = (sql::of_t(&spot.column), sql::table(&spot.table));
        let sql =
            format!("SELECT COUNT(*) AS total FROM {table} WHERE CAST({value} AS TEXT) GLOB '{}{kid}:*'", Marker::HW1);
        let dot = format!("instr({}, x'2e')", sql::as_bytes(&value));
        // A front of another length than those without further keys may have some.
        let longer = format!(
            "SELECT substr({}, 1, CASE {dot} WHEN 0 THEN {LONGEST_FRONT} ELSE {dot} - 1 END) AS front FROM {table} WHERE {} AND {dot} NOT IN (306, 310)",
            sql::as_bytes(&value),
            sql::names_a_key(&value)
        );
        self.read_with(|connection| {
            let total: Vec<Total> = Query::new(sql.as_str()).load(connection)?;
            let own = total.first().map_or(0, |row| row.total.unsigned_abs());
            let mut also = 0;
            for Longer { front } in Query::new(longer).load::<Longer>(connection)? {
                let front = std::str::from_utf8(&front).ok().and_then(|front| front.parse::<Front>().ok());
                also += u64::from(front.is_some_and(|front| front.also.iter().any(|further| further.key == kid)));
            }
            Ok(Naming { own, also, sql })
        })
    }
}

/// How many values of one column name a key.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Naming {
    /// As the key that wraps them.
    pub own: u64,
    /// As a further key.
    pub also: u64,
    /// The statement that repeats the first count.
    pub sql: String,
}

impl Naming {
    /// Both.
    pub fn total(&self) -> u64 {
        self.own + self.also
    }
}

/// What stands before the first dot of one value.
#[derive(Clone, Debug)]
pub struct StoredFront {
    /// What its row is found by.
    pub key: Key,
    /// What the value is bound to.
    pub row: Result<Option<Row>, BadRow>,
    /// The front; none where there is no dot within the length of a header.
    pub front: Option<Vec<u8>>,
    /// How many bytes follow it, the dot included.
    pub rest: u64,
}

impl StoredFront {
    /// The key that the value says it is wrapped under, if it can be read: 16 hex digits, else nothing.
    pub fn kid(&self) -> Option<KeyId> {
        let front = self.front.as_deref().and_then(|front| std::str::from_utf8(front).ok())?;
        front.strip_prefix(Marker::HW1)?.get(..16)?.parse().ok()
    }
}

/// A front to be put in place of another.
#[derive(Clone, Copy, Debug)]
pub struct NewFront<'a> {
    /// What the row is found by.
    pub key: &'a Key,
    /// What stood there when it was read.
    pub old: &'a str,
    /// What is to stand there.
    pub new: &'a str,
}

/// The condition that a value is ours and does not name `target`.
fn not_under(value: &str, target: KeyId) -> String {
    let hw1 = Marker::HW1;
    format!("CAST({value} AS TEXT) GLOB '{hw1}*' AND CAST({value} AS TEXT) NOT GLOB '{hw1}{target}:*'")
}

fn select_front(column: &Column) -> Query<'static> {
    let bytes = sql::as_bytes(&sql::of_t(column.name()));
    let dot = format!("instr({bytes}, x'2e')");
    Query::new(format!(
        "SELECT {}, {}, {dot} BETWEEN 1 AND {LONGEST_FRONT} AS whole, \
         CASE WHEN {dot} BETWEEN 1 AND {LONGEST_FRONT} THEN substr({bytes}, 1, {dot} - 1) ELSE substr({bytes}, 1, 24) END AS front, \
         length({bytes}) AS length FROM {}",
        KeyParts::select(&sql::of_t(column.key())),
        RowParts::select(&column.row().map_or_else(|| "NULL".to_owned(), sql::of_t)),
        sql::from(column)
    ))
}

#[derive(QueryableByName)]
struct FrontParts {
    #[diesel(embed)]
    key: KeyParts,
    #[diesel(embed)]
    bound_to: RowParts,
    #[diesel(sql_type = Bool)]
    whole: bool,
    #[diesel(sql_type = Nullable<Binary>)]
    front: Option<Vec<u8>>,
    #[diesel(sql_type = BigInt)]
    length: i64,
}

impl FrontParts {
    fn front(self, bound: bool) -> StoredFront {
        let rest = self.length.unsigned_abs().saturating_sub(self.front.as_ref().map_or(0, |front| front.len() as u64));
        StoredFront {
            key: self.key.into(),
            row: if bound { self.bound_to.row().map(Some) } else { Ok(None) },
            front: self.front.filter(|_| self.whole),
            rest,
        }
    }
}

#[derive(QueryableByName)]
struct Waiting {
    #[diesel(sql_type = BigInt)]
    total: i64,
    #[diesel(sql_type = BigInt)]
    keyless: i64,
}

#[derive(QueryableByName)]
struct Total {
    #[diesel(sql_type = BigInt)]
    total: i64,
}

#[derive(QueryableByName)]
struct Longer {
    #[diesel(sql_type = Binary)]
    front: Vec<u8>,
}

/// No front is longer: marker, key id, and a header of 8 KiB as base64. Bytes.
const LONGEST_FRONT: usize = 21 + 4 * crate::envelope::LONGEST_HEADER.div_ceil(3) + 1;
