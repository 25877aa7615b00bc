//! The walk over stored fronts: what stands before the first dot of every value that names another key than the target,
//! read in pages by key, and replaced only where it is still, byte for byte, what was read.

use diesel::prelude::*;
use diesel::sql_types::{BigInt, Binary, Nullable};

use super::key::KeyParts;
use super::sql::{self, Query};
use super::stored::RowParts;
use super::{BadRow, Db, Error, Key, RotationLease, Spot};
use crate::column::{Column, Row};
use crate::envelope::{Front, Marker, front_length};
use crate::provider::{Alg, KeyId};

impl Db {
    /// The rows behind `after`, or the first ones: `limit` of them, in the order of the keys, whatever their state. Of
    /// those whose value is ours and names another key than `target`, or none that can be read, the fronts.
    ///
    /// # Errors
    /// [`Error::NoTable`], [`Error::NoColumn`], [`Error::Unavailable`].
    pub fn fronts(&self, column: &Column, target: KeyId, after: Option<&Key>, limit: u32) -> Result<FrontPage, Error> {
        let key = sql::exactly(column.key());
        let query = select_head(column).sql(&format!(" WHERE {key}"));
        let query = match after {
            Some(after) => after.bind(query.sql(" > ")),
            None => query.sql(" IS NOT NULL"),
        };
        let query = query.sql(&format!(" ORDER BY {key} LIMIT ")).integer(limit.into());
        let rows: Vec<HeadParts> = self.read_with(|connection| query.load(connection))?;
        let (done, bound) = (format!("{}{target}:", Marker::HW1), column.row().is_some());
        let mut page = FrontPage { rows: rows.len() as u64, last: None, fronts: Vec::new() };
        for parts in rows {
            let (key, front) = parts.front(done.as_bytes(), bound);
            page.fronts.extend(front);
            page.last = Some(key);
        }
        Ok(page)
    }

    /// How many rows there are.
    ///
    /// # Errors
    /// [`Error::NoTable`], [`Error::Unavailable`].
    pub fn count_rows(&self, column: &Column) -> Result<u64, Error> {
        self.total(&format!("SELECT COUNT(*) AS total FROM {}", sql::from(column)))
    }

    /// How many values of ours that name another key than `target`, or none that can be read, stand in rows without a
    /// key, which no walk reaches.
    ///
    /// # Errors
    /// [`Error::NoTable`], [`Error::NoColumn`], [`Error::Unavailable`].
    pub fn count_keyless(&self, column: &Column, target: KeyId) -> Result<u64, Error> {
        self.total(&format!(
            "SELECT COUNT(*) AS total FROM {} WHERE {} IS NULL AND {}",
            sql::from(column),
            sql::of_t(column.key()),
            not_under(&sql::of_t(column.name()), target)
        ))
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
        if fronts.is_empty() {
            return Ok(Vec::new());
        }
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
        let [a, b, c, d, e, f, g] = parts[..] else { return Err(Error::Unfit("a statement has lost a place")) };
        self.write(|connection| {
            let mut replaced = Vec::with_capacity(fronts.len());
            for front in fronts {
                let old = format!("{}.", front.old);
                let from = i64::try_from(front.old.len() + 1).unwrap_or(i64::MAX);
                let query =
                    Query::kept(a).text(front.new).sql(b).integer(from).sql(c).text(front.new).sql(d).integer(from);
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

    /// Whether a value at `spot` may name one of `kids`: no more than one look at each. Where this says yes,
    /// [`Db::count_naming`] says how many do.
    ///
    /// # Errors
    /// [`Error::NoTable`], [`Error::NoColumn`], [`Error::Unavailable`].
    pub fn may_name(&self, spot: &Spot, kids: &[KeyId]) -> Result<bool, Error> {
        let value = sql::of_t(&spot.column);
        let names = kids.iter().map(|kid| format!("{} OR ", sql::names(&value, *kid))).collect::<String>();
        let total = self.total(&format!(
            "SELECT EXISTS (SELECT 1 FROM {} WHERE {names}({})) AS total",
            sql::table(&spot.table),
            may_name_more(&value)
        ))?;
        Ok(total > 0)
    }

    /// How many values at `spot` name `kid`: as the key that wraps them, or among their further keys (`also`), whose
    /// headers are decoded one by one.
    ///
    /// # Errors
    /// [`Error::NoTable`], [`Error::NoColumn`], [`Error::Unavailable`].
    pub fn count_naming(&self, spot: &Spot, kid: KeyId) -> Result<Naming, Error> {
        let (value, table) = (sql::of_t(&spot.column), sql::table(&spot.table));
        let sql = format!("SELECT COUNT(*) AS total FROM {table} WHERE {}", sql::names(&value, kid));
        let longer = format!(
            "SELECT substr({}, 1, CASE {dot} WHEN 0 THEN {LONGEST_FRONT} ELSE {dot} - 1 END) AS front FROM {table} WHERE {}",
            sql::as_bytes(&value),
            may_name_more(&value),
            dot = dot(&value)
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

    fn total(&self, sql: &str) -> Result<u64, Error> {
        let rows: Vec<Total> = self.read_with(|connection| Query::new(sql).load(connection))?;
        Ok(rows.first().map_or(0, |row| row.total.unsigned_abs()))
    }
}

/// A part of the walk.
#[derive(Clone, Debug, Default)]
pub struct FrontPage {
    /// How many rows it went over.
    pub rows: u64,
    /// The last of them; none behind the end.
    pub last: Option<Key>,
    /// The values among them that are to be moved.
    pub fronts: Vec<StoredFront>,
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
    format!("CAST({value} AS TEXT) GLOB '{}*' AND NOT {}", Marker::HW1, sql::names(value, target))
}

/// The condition that a value of ours may name further keys: its front has another length than those that name one.
fn may_name_more(value: &str) -> String {
    let [kw, gcm] = [Alg::A256Kw, Alg::A256GcmKw].map(|alg| front_length(alg) + 1);
    format!("{} AND {} NOT IN ({kw}, {gcm})", sql::names_a_key(value), dot(value))
}

/// Where the first dot is, from 1; 0 without one.
fn dot(value: &str) -> String {
    format!("instr({}, x'2e')", sql::as_bytes(value))
}

/// Selects the key of each row, and as much of its value as may be the front.
fn select_head(column: &Column) -> Query<'static> {
    let bytes = sql::as_bytes(&sql::of_t(column.name()));
    Query::new(format!(
        "SELECT {}, {}, length({bytes}) AS length, \
         CASE instr(substr({bytes}, 1, {HEAD}), x'2e') WHEN 0 THEN substr({bytes}, 1, {LONGEST_FRONT}) ELSE substr({bytes}, 1, {HEAD}) END AS head FROM {}",
        KeyParts::select(&sql::of_t(column.key())),
        RowParts::select(&column.row().map_or_else(|| "NULL".to_owned(), sql::of_t)),
        sql::from(column)
    ))
}

#[derive(QueryableByName)]
struct HeadParts {
    #[diesel(embed)]
    key: KeyParts,
    #[diesel(embed)]
    bound_to: RowParts,
    #[diesel(sql_type = Nullable<BigInt>)]
    length: Option<i64>,
    #[diesel(sql_type = Nullable<Binary>)]
    head: Option<Vec<u8>>,
}

impl HeadParts {
    /// The key of the row, and the front of its value if that is ours and not under the target, whose marker and key id
    /// are `done`.
    fn front(self, done: &[u8], bound: bool) -> (Key, Option<StoredFront>) {
        let key = Key::from(self.key);
        let due = |head: &Vec<u8>| head.starts_with(Marker::HW1.as_bytes()) && !head.starts_with(done);
        let front = self.head.filter(due).map(|mut head| {
            let front = head.iter().position(|byte| *byte == b'.').map(|dot| {
                head.truncate(dot);
                head
            });
            let length = self.length.unwrap_or_default().unsigned_abs();
            StoredFront {
                key: key.clone(),
                row: if bound { self.bound_to.row().map(Some) } else { Ok(None) },
                rest: length - front.as_ref().map_or(0, |front| front.len() as u64),
                front,
            }
        });
        (key, front)
    }
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

/// Most fronts and their dots are within this. Bytes.
const HEAD: usize = 320;

/// No front is longer: marker, key id, and a header of 8 KiB as base64. Bytes.
const LONGEST_FRONT: usize = 21 + 4 * crate::envelope::LONGEST_HEADER.div_ceil(3) + 1;
