//! The walk over stored fronts: what stands before the first dot of every value that names another key than the target,
//! read in pages by key, and replaced only where it is still, byte for byte, what was read.

use diesel::prelude::*;
use diesel::sql_types::{BigInt, Binary, Nullable};

use super::connection::AnyConnection;
use super::key::KeyParts;
use super::lease::WorkLease;
use super::query::Query;
use super::shape::{self, Cell, Shape};
use super::sql::{HEAD, Sql};
use super::stored::RowParts;
use super::{BadRow, Db, Error, Key, Spot};
use crate::column::{Column, Row};
use crate::envelope::{Front, Marker, front_length};
use crate::provider::{Alg, KeyId};

impl Db {
    /// The rows behind `after`, or the first ones, up to the row `until`, or to the last: `limit` of them, in the order of
    /// the keys, whatever their state. Of those whose value is ours and names another key than `target`, or none that can
    /// be read, the fronts.
    ///
    /// # Errors
    /// [`Error::NoTable`], [`Error::NoColumn`], [`Error::Unavailable`].
    pub fn fronts(
        &self,
        column: &Column,
        target: KeyId,
        after: Option<&Key>,
        until: Option<&Key>,
        limit: u32,
    ) -> Result<FrontPage, Error> {
        let shape = self.shape(column)?;
        let key = shape.key.ordered();
        let lost = || Error::Unfit("the type of a key column has changed");
        let query = select_head(&shape, target).sql(&format!(" WHERE {key}"));
        let query = match after {
            Some(after) => shape.key.bind(query.sql(" > "), after).ok_or_else(lost)?,
            None => query.sql(" IS NOT NULL"),
        };
        let query = match until {
            Some(until) => shape.key.bind(query.sql(&format!(" AND {key} <= ")), until).ok_or_else(lost)?,
            None => query,
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

    /// The key `rows` rows behind `after`, or from the first one on; none if there are not so many.
    ///
    /// # Errors
    /// [`Error::NoTable`], [`Error::NoColumn`], [`Error::Unavailable`].
    pub(super) fn key_behind(&self, column: &Column, after: Option<&Key>, rows: u64) -> Result<Option<Key>, Error> {
        let shape = self.shape(column)?;
        let key = shape.key.ordered();
        let query = Query::new(format!("SELECT {} FROM {} WHERE {key}", shape.key.select_key(), shape.table));
        let query = match after {
            Some(after) => {
                shape.key.bind(query.sql(" > "), after).ok_or(Error::Unfit("the type of a key column has changed"))?
            }
            None => query.sql(" IS NOT NULL"),
        };
        let query = query.sql(&format!(" ORDER BY {key} LIMIT 1 OFFSET "));
        let query = query.integer(i64::try_from(rows.saturating_sub(1)).unwrap_or(i64::MAX));
        let found: Vec<KeyParts> = self.read_with(|connection| query.load(connection))?;
        Ok(found.into_iter().next().map(Key::from))
    }

    /// How many rows there are.
    ///
    /// # Errors
    /// [`Error::NoTable`], [`Error::Unavailable`].
    pub fn count_rows(&self, column: &Column) -> Result<u64, Error> {
        self.total(&format!("SELECT COUNT(*) AS total FROM {}", self.shape(column)?.table))
    }

    /// How many values of ours that name another key than `target`, or none that can be read, stand in rows without a
    /// key, which no walk reaches.
    ///
    /// # Errors
    /// [`Error::NoTable`], [`Error::NoColumn`], [`Error::Unavailable`].
    pub fn count_keyless(&self, column: &Column, target: KeyId) -> Result<u64, Error> {
        let shape = self.shape(column)?;
        self.total(&format!(
            "SELECT COUNT(*) AS total FROM {} WHERE {} IS NULL AND {}",
            shape.table,
            shape.key.of,
            not_under(shape.sql, &shape.value.of, target)
        ))
    }

    /// Replaces fronts in one transaction: on a server by one statement, which takes the rows in the order of their
    /// keys, so that no two workers wait for each other. A front that is not what was read any more is left as its
    /// writer made it: the answer says, in order, which were replaced. The lease is renewed, and the count of what was
    /// moved goes up, in the same transaction.
    ///
    /// # Errors
    /// [`Error::LeaseLost`], [`Error::Fenced`], [`Error::KeyNotUnique`], [`Error::Conflict`], [`Error::Unavailable`];
    /// then none was replaced, but for a connection that was lost at the end, where nobody knows.
    pub fn replace_fronts(
        &self,
        column: &Column,
        fronts: &[NewFront<'_>],
        lease: &WorkLease<'_>,
        target: KeyId,
    ) -> Result<Vec<bool>, Error> {
        if fronts.is_empty() {
            return Ok(Vec::new());
        }
        let shape = self.shape(column)?;
        if shape.sql == Sql::Sqlite {
            return self.replace_one_by_one(column, &shape, fronts, lease, target);
        }
        let mut replaced = Vec::with_capacity(fronts.len());
        for part in packets(fronts) {
            replaced.extend(self.write(|connection| {
                let part = replace_together(connection, &shape, part)?;
                lease.renew_in(connection, target, part.iter().filter(|replaced| **replaced).count())?;
                Ok(part)
            })?);
        }
        Ok(replaced)
    }

    /// SQLite has no round trips to save.
    fn replace_one_by_one(
        &self,
        column: &Column,
        shape: &Shape,
        fronts: &[NewFront<'_>],
        lease: &WorkLease<'_>,
        target: KeyId,
    ) -> Result<Vec<bool>, Error> {
        let (name, value) = (&shape.value.name, &shape.value.of);
        let bytes = shape.sql.as_bytes(value);
        // What follows the front is carried over byte for byte, and a BLOB stays one.
        let whole = |cast: &str| format!("CAST(CAST(? AS BLOB) || substr({bytes}, ?) AS {cast})");
        let update = format!(
            "UPDATE {} SET {name} = CASE typeof({value}) WHEN 'blob' THEN {} ELSE {} END WHERE substr({bytes}, 1, ?) = ? AND {} = ",
            shape.table,
            whole("BLOB"),
            whole("TEXT"),
            shape.key.ordered(),
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
            lease.renew_in(connection, target, replaced.iter().filter(|replaced| **replaced).count())?;
            Ok(replaced)
        })
    }

    /// Whether a value at `spot` may name one of `kids`: no more than one look at each. Where this says yes,
    /// [`Db::count_naming`] says how many do.
    ///
    /// # Errors
    /// [`Error::NoTable`], [`Error::NoColumn`], [`Error::Unavailable`].
    pub fn may_name(&self, spot: &Spot, kids: &[KeyId]) -> Result<bool, Error> {
        let Looked { sql, whole, value } = self.looked(spot)?;
        let names = kids.iter().map(|kid| format!("{} OR ", sql.names(&value, *kid))).collect::<String>();
        let any = format!("EXISTS (SELECT 1 FROM {whole} WHERE {names}({}))", may_name_more(sql, &value));
        Ok(self.total(&format!("SELECT {} AS total", sql.truth(&any)))? > 0)
    }

    /// How many values at `spot` name `kid`: as the key that wraps them, or among their further keys (`also`), whose
    /// headers are decoded one by one.
    ///
    /// # Errors
    /// [`Error::NoTable`], [`Error::NoColumn`], [`Error::Unavailable`].
    pub fn count_naming(&self, spot: &Spot, kid: KeyId) -> Result<Naming, Error> {
        let Looked { sql: says, whole, value } = self.looked(spot)?;
        let sql = format!("SELECT COUNT(*) AS total FROM {whole} WHERE {}", says.names(&value, kid));
        let longer = format!(
            "SELECT {} AS front FROM {whole} WHERE {}",
            says.head(&value, &LONGEST_FRONT.to_string()),
            may_name_more(says, &value)
        );
        self.read_with(|connection| {
            let total: Vec<Total> = Query::new(sql.as_str()).load(connection)?;
            let own = total.first().map_or(0, |row| row.total.unsigned_abs());
            let mut also = 0;
            for Longer { front } in Query::new(longer).load::<Longer>(connection)? {
                let front = front.split(|byte| *byte == b'.').next().unwrap_or_default();
                let front = std::str::from_utf8(front).ok().and_then(|front| front.parse::<Front>().ok());
                also += u64::from(front.is_some_and(|front| front.also.iter().any(|further| further.key == kid)));
            }
            Ok(Naming { own, also, sql })
        })
    }

    /// A column by its names, whatever its type, as statements look at its texts.
    pub(super) fn looked(&self, spot: &Spot) -> Result<Looked, Error> {
        let sql = self.sql();
        if sql == Sql::Sqlite {
            return Ok(Looked { sql, whole: sql.table(&spot.table), value: sql.of_t(&spot.column) });
        }
        let table = self.server_table(&spot.table)?.ok_or_else(|| Error::NoTable(spot.table.clone()))?;
        let column = table.columns.iter().find(|found| sql.same_column(&found.name, &spot.column));
        let column = column.ok_or_else(|| Error::NoColumn(spot.to_string()))?;
        let whole = sql.table(&table.name);
        Ok(Looked {
            sql,
            whole: if table.versioned { whole.replacen(" AS t", " FOR SYSTEM_TIME ALL AS t", 1) } else { whole },
            value: match (sql, column.form.kept()) {
                // Every byte that is ASCII and printable stays itself.
                (Sql::Postgres, super::sql::Kept::Bytes) => format!("encode({}, 'escape')", sql.of_t(&column.name)),
                _ => sql.of_t(&column.name),
            },
        })
    }

    fn total(&self, sql: &str) -> Result<u64, Error> {
        let rows: Vec<Total> = self.read_with(|connection| Query::new(sql).load(connection))?;
        Ok(rows.first().map_or(0, |row| row.total.unsigned_abs()))
    }
}

/// A column as statements look at its texts.
pub(super) struct Looked {
    pub(super) sql: Sql,
    /// Its table with every row it keeps, called `t`.
    pub(super) whole: String,
    pub(super) value: String,
}

/// Replaces fronts by one statement, which looks at each again. Says, in order, which it replaced.
fn replace_together(
    connection: &mut AnyConnection,
    shape: &Shape,
    fronts: &[NewFront<'_>],
) -> Result<Vec<bool>, Error> {
    let names: Vec<String> = fronts.iter().map(|front| key_text(front.key)).collect();
    let rows = fronts
        .iter()
        .zip(&names)
        .map(|(front, key)| serde_json::json!({ "k": key, "o": format!("{}.", front.old), "n": front.new }));
    let rows = serde_json::Value::Array(rows.collect()).to_string();
    let (value, table) = (&shape.value, &shape.table);
    let moves: String = shape.moves.iter().map(|moves| format!("t.{moves} = t.{moves}, ")).collect();
    let replaced: Vec<Replaced> = match shape.sql {
        Sql::Postgres => Query::new(format!(
            "UPDATE {table} SET {name} = n.n || substr(({of})::text, length(n.o)) \
             FROM json_to_recordset(CAST(",
            name = value.name,
            of = value.of,
        ))
        .text(&rows)
        .sql(&format!(
            " AS json)) AS n(k text, o text, n text) WHERE {} = {} AND left({}, length(n.o)) = n.o RETURNING n.k AS k",
            shape.key.of,
            key_of_json(&shape.key),
            shape.sql.exactly(&value.of),
        ))
        .load(connection)?,
        _ => {
            let listed = |query: Query<'static>| {
                (
                    query,
                    format!(
                        ", '$[*]' COLUMNS ({})) AS n STRAIGHT_JOIN {table} ON {} = {}",
                        json_columns(shape),
                        shape.key.of,
                        key_of_json(&shape.key)
                    ),
                )
            };
            let starts = |what: &str| {
                format!("CAST(LEFT({}, CHAR_LENGTH({what})) AS BINARY) = CAST({what} AS BINARY)", value.of)
            };
            let (query, join) = listed(Query::new("UPDATE JSON_TABLE("));
            let set = format!(
                " SET {moves}{of} = CONCAT(n.n, SUBSTR({of}, CHAR_LENGTH(n.o))) WHERE {}",
                starts("n.o"),
                of = value.of
            );
            let count = query.text(&rows).sql(&join).sql(&set).execute(connection)?;
            if count == fronts.len() {
                return Ok(vec![true; count]);
            }
            // There is no UPDATE that says which: a new front is random, so a row that begins with it is one that was
            // written just now.
            let (query, join) = listed(Query::new("SELECT CAST(n.k AS CHAR) AS k FROM JSON_TABLE("));
            query.text(&rows).sql(&join).sql(&format!(" WHERE {}", starts("n.n"))).load(connection)?
        }
    };
    let replaced: std::collections::HashSet<String> = replaced.into_iter().map(|row| row.k).collect();
    Ok(names.iter().map(|name| replaced.contains(name)).collect())
}

/// A key as it goes into JSON.
fn key_text(key: &Key) -> String {
    match key {
        Key::Integer(number) => number.to_string(),
        Key::Text(text) => text.clone(),
        Key::Odd(odd) => odd.bytes().map(hex::encode).unwrap_or_default(),
    }
}

/// What it is compared with when it comes out again.
fn key_of_json(key: &Cell) -> String {
    use super::catalog::Form;
    match (key.sql, &key.form) {
        (Sql::Postgres, Form::Integer) => "CAST(n.k AS int8)".to_owned(),
        (Sql::Postgres, Form::Text(cast)) => format!("CAST(n.k AS {cast})"),
        (Sql::Postgres, Form::Padded) => "CAST(n.k AS bpchar)".to_owned(),
        (Sql::Postgres, Form::Uuid) => "CAST(n.k AS uuid)".to_owned(),
        (Sql::Postgres, Form::Bytes) => "decode(n.k, 'hex')".to_owned(),
        (_, Form::Bytes) => "UNHEX(n.k)".to_owned(),
        _ => "n.k".to_owned(),
    }
}

/// The columns of MariaDB's JSON_TABLE: each of the type and collation that it meets.
fn json_columns(shape: &Shape) -> String {
    use super::catalog::Form;
    let collated = |cell: &Cell, what: &str| match &cell.collation {
        Some((charset, collation)) => format!("{what} CHARACTER SET {charset} COLLATE {collation}"),
        None => format!("{what} CHARACTER SET utf8mb4"),
    };
    let key = match shape.key.form {
        Form::Integer => "BIGINT".to_owned(),
        Form::Unsigned => "BIGINT UNSIGNED".to_owned(),
        Form::Bytes => "VARCHAR(6144) CHARACTER SET ascii".to_owned(),
        Form::Uuid => "UUID".to_owned(),
        _ => collated(&shape.key, "VARCHAR(3072)"),
    };
    let text = collated(&shape.value, "TEXT");
    format!("k {key} PATH '$.k', o {text} PATH '$.o', n {text} PATH '$.n'")
}

/// The fronts in parts that a statement takes.
fn packets<'f, 'a>(fronts: &'f [NewFront<'a>]) -> Vec<&'f [NewFront<'a>]> {
    let mut packets = Vec::new();
    let (mut start, mut bytes) = (0, 0);
    for (at, front) in fronts.iter().enumerate() {
        let next = front.old.len() + front.new.len() + 2 * key_text(front.key).len() + 40;
        if at > start && bytes + next > PACKET {
            packets.push(&fronts[start..at]);
            (start, bytes) = (at, 0);
        }
        bytes += next;
    }
    packets.push(&fronts[start..]);
    packets
}

/// How many bytes of fronts go into one statement: less than the smallest `max_allowed_packet` in use, 1 MiB.
const PACKET: usize = 768 << 10;

#[derive(QueryableByName)]
struct Replaced {
    #[diesel(sql_type = diesel::sql_types::Text)]
    k: String,
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
fn not_under(sql: Sql, value: &str, target: KeyId) -> String {
    format!("{} AND NOT ({})", sql.starts(value, Marker::HW1), sql.names(value, target))
}

/// The condition that a value of ours may name further keys: its front has another length than those that name one.
fn may_name_more(sql: Sql, value: &str) -> String {
    let [kw, gcm] = [Alg::A256Kw, Alg::A256GcmKw].map(|alg| front_length(alg) + 1);
    format!("{} AND {} NOT IN ({kw}, {gcm})", sql.names_a_key(value), sql.dot(value))
}

/// Selects the key of each row, and as much of its value as may be the front: on a server only what is to be moved.
fn select_head(shape: &Shape, target: KeyId) -> Query<'static> {
    let (sql, value) = (shape.sql, &shape.value.of);
    let (dot, longest) = (sql.dot(value), sql.head(value, &LONGEST_FRONT.to_string()));
    let (length, head) = match sql {
        Sql::Sqlite => {
            let short = sql.head(value, &HEAD.to_string());
            let head = format!("CASE instr({short}, x'2e') WHEN 0 THEN {longest} ELSE {short} END");
            (sql.length(value), head)
        }
        _ => {
            let due = not_under(sql, value, target);
            let head = format!(
                "CASE WHEN NOT ({due}) THEN NULL WHEN {dot} = 0 THEN {longest} ELSE {} END",
                sql.head(value, &dot)
            );
            (format!("CASE WHEN {due} THEN {} END", sql.length(value)), head)
        }
    };
    Query::new(format!(
        "SELECT {}, {}, {length} AS length, {head} AS head FROM {}",
        shape.key.select_key(),
        shape.row.as_ref().map_or_else(|| shape::no_row(sql), Cell::select_row),
        shape.table
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

/// No front is longer: marker, key id, and a header of 8 KiB as base64. Bytes.
const LONGEST_FRONT: usize = 21 + 4 * crate::envelope::LONGEST_HEADER.div_ceil(3) + 1;
