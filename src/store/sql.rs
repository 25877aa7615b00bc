//! The SQL that differs between databases, in one place: names, placeholders, and SQLite's ways to say things.

use diesel::deserialize::FromSqlRow;
use diesel::prelude::*;
use diesel::query_builder::{AstPass, QueryFragment, QueryId};
use diesel::sql_types::{BigInt, Binary, Double, Nullable, Text, Untyped};
use diesel::sqlite::Sqlite;

use super::Error;
use crate::column::Column;
use crate::envelope::Marker;
use crate::provider::KeyId;

/// A statement and what is bound to its places, put together from left to right.
pub(super) struct Query<'a> {
    text: String,
    /// Each with the place in the text that it stands at.
    binds: Vec<(usize, Bind<'a>)>,
    /// Whether the connection keeps the prepared statement.
    kept: bool,
}

enum Bind<'a> {
    Integer(i64),
    Real(f64),
    Text(&'a str),
    Bytes(&'a [u8]),
    Null,
}

impl<'a> Query<'a> {
    pub(super) fn new(text: impl Into<String>) -> Self {
        Self { text: text.into(), binds: Vec::new(), kept: false }
    }

    /// For a statement that runs again and again, and whose text depends on nothing but the schema: the connection
    /// prepares it once and forgets it never.
    pub(super) fn kept(text: impl Into<String>) -> Self {
        Self { kept: true, ..Self::new(text) }
    }

    pub(super) fn sql(mut self, text: &str) -> Self {
        self.text.push_str(text);
        self
    }

    pub(super) fn integer(self, value: i64) -> Self {
        self.bind(Bind::Integer(value))
    }

    pub(super) fn real(self, value: f64) -> Self {
        self.bind(Bind::Real(value))
    }

    pub(super) fn text(self, value: &'a str) -> Self {
        self.bind(Bind::Text(value))
    }

    pub(super) fn bytes(self, value: &'a [u8]) -> Self {
        self.bind(Bind::Bytes(value))
    }

    pub(super) fn optional_bytes(self, value: Option<&'a [u8]>) -> Self {
        self.bind(value.map_or(Bind::Null, Bind::Bytes))
    }

    /// Binds the bytes of a text that is not UTF-8. SQLite then compares it with a column as it would any text.
    pub(super) fn raw_text(self, value: &'a [u8]) -> Self {
        self.sql("CAST(").bytes(value).sql(" AS TEXT)")
    }

    /// Appends another statement's text and binds.
    pub(super) fn append(mut self, other: Query<'a>) -> Self {
        let at = self.text.len();
        self.text.push_str(&other.text);
        self.binds.extend(other.binds.into_iter().map(|(place, bind)| (at + place, bind)));
        self
    }

    pub(super) fn execute(self, connection: &mut SqliteConnection) -> Result<usize, Error> {
        Ok(RunQueryDsl::execute(self, connection)?)
    }

    pub(super) fn load<T>(self, connection: &mut SqliteConnection) -> Result<Vec<T>, Error>
    where
        T: FromSqlRow<Untyped, Sqlite> + 'static,
    {
        Ok(RunQueryDsl::load(self, connection)?)
    }

    fn bind(mut self, bind: Bind<'a>) -> Self {
        self.binds.push((self.text.len(), bind));
        self
    }
}

impl QueryFragment<Sqlite> for Query<'_> {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Sqlite>) -> QueryResult<()> {
        if !self.kept {
            out.unsafe_to_cache_prepared();
        }
        let mut from = 0;
        for (place, bind) in &self.binds {
            out.push_sql(&self.text[from..*place]);
            from = *place;
            match bind {
                Bind::Integer(value) => out.push_bind_param::<BigInt, _>(value)?,
                Bind::Real(value) => out.push_bind_param::<Double, _>(value)?,
                Bind::Text(value) => out.push_bind_param::<Text, str>(value)?,
                Bind::Bytes(value) => out.push_bind_param::<Binary, [u8]>(value)?,
                Bind::Null => out.push_bind_param::<Nullable<Binary>, Option<&[u8]>>(&None)?,
            }
        }
        out.push_sql(&self.text[from..]);
        Ok(())
    }
}

impl QueryId for Query<'_> {
    type QueryId = ();
    const HAS_STATIC_QUERY_ID: bool = false;
}

impl diesel::query_builder::Query for Query<'_> {
    type SqlType = Untyped;
}

impl RunQueryDsl<SqliteConnection> for Query<'_> {}

/// An identifier, quoted: the only place where names become SQL.
pub(super) fn quote(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// A column of the table called `t`. Always with the table's name before it: SQLite takes a quoted name alone that is
/// no column for a string.
pub(super) fn of_t(name: &str) -> String {
    format!("t.{}", quote(name))
}

/// A column of `t`, compared and ordered byte for byte whatever its collation: a key column that ignores case would
/// otherwise skip rows at the edge of a page.
pub(super) fn exactly(name: &str) -> String {
    format!("{} COLLATE BINARY", of_t(name))
}

/// A table of the register, quoted and called `t`. `main.` is SQLite's one schema here, in any case; other dots belong to the name.
pub(super) fn table(name: &str) -> String {
    format!("main.{} AS t", quote(bare(name)))
}

/// The name of a table without its schema.
pub(super) fn bare(table: &str) -> &str {
    match table.split_at_checked("main.".len()) {
        Some((schema, name)) if schema.eq_ignore_ascii_case("main.") => name,
        _ => table,
    }
}

/// A table of the schema as the register names it, so that [`bare`] gives its name again.
pub(super) fn registrable(name: &str) -> String {
    if bare(name) == name { name.to_owned() } else { format!("main.{name}") }
}

/// The table of a registered column, called `t`.
pub(super) fn from(column: &Column) -> String {
    table(column.table())
}

/// The bytes of a stored text, whatever it is stored as.
pub(super) fn as_bytes(expression: &str) -> String {
    format!("CAST({expression} AS BLOB)")
}

/// The condition that a stored text is one of ours with a well-formed key id.
pub(super) fn names_a_key(expression: &str) -> String {
    format!("CAST({expression} AS TEXT) GLOB '{}{}:*'", Marker::HW1, "[0-9a-f]".repeat(16))
}

/// The condition that a stored text is one of ours under `kid`.
pub(super) fn names(expression: &str, kid: KeyId) -> String {
    format!("CAST({expression} AS TEXT) GLOB '{}{kid}:*'", Marker::HW1)
}

/// The condition that a text is an envelope, ours or the ancestor's, or holds one of ours.
///
/// Headers are JSON objects in base64, so they begin with `eyJ`, and ours with `eyJhbGciOi` (`{"alg":`).
pub(super) fn holds_envelope(expression: &str) -> String {
    let text = format!("CAST({expression} AS TEXT)");
    let starts = |pattern: String| format!("{text} GLOB '{pattern}'");
    let patterns = [
        format!("*{}{}:eyJhbGciOi*", Marker::HW1, "[0-9a-f]".repeat(16)),
        format!("hw[0-9]:{}:eyJ*", "[0-9a-f]".repeat(16)),
        format!("hw[0-9][0-9]:{}:eyJ*", "[0-9a-f]".repeat(16)),
    ];
    let foreign = Marker::FOREIGN.map(|marker| format!("{marker}eyJ*"));
    let any = patterns.into_iter().chain(foreign).map(starts).collect::<Vec<_>>().join(" OR ");
    format!("({} OR {any})", names_a_key(expression))
}

/// What [`Marker::of`] says of a stored text, and the key id of well-formed ones, as SQL: `null`, `empty`, 16 hex
/// digits, `damaged`, `foreign`, `other_version` or `cleartext`.
///
/// GLOB sees a text up to its first NUL. No marker holds one, so a text cut there matches no other pattern; only the
/// digits of another version need their lengths compared as well, for `hw2` NUL `:` is no marker.
pub(super) fn kind_of(expression: &str) -> String {
    let text = format!("CAST({expression} AS TEXT)");
    let bytes = as_bytes(expression);
    let key = names_a_key(expression);
    let starts = |marker: &str| format!("{text} GLOB '{marker}*'");
    let version = format!("substr({bytes}, 3, instr({bytes}, x'3a') - 3)");
    format!(
        "CASE WHEN {expression} IS NULL THEN 'null' \
         WHEN length({bytes}) = 0 THEN 'empty' \
         WHEN {key} THEN substr({text}, 5, 16) \
         WHEN {ours} THEN 'damaged' \
         WHEN {foreign} THEN 'foreign' \
         WHEN {text} GLOB 'hw[0-9]*' AND instr({bytes}, x'3a') > 3 \
         AND CAST({version} AS TEXT) NOT GLOB '*[^0-9]*' \
         AND length(CAST({version} AS TEXT)) = length({version}) THEN 'other_version' \
         ELSE 'cleartext' END",
        ours = starts(Marker::HW1),
        foreign = Marker::FOREIGN.map(starts).join(" OR "),
    )
}

/// The condition, to be followed by a bind, that two values are the same, NULL included.
pub(super) const SAME: &str = " IS ";

/// What every connection is told first: the wait for locks, in milliseconds, before anything can need one.
pub(super) const BUSY: &str = "PRAGMA busy_timeout = 10000";

/// What every connection is told. Deleted content is overwritten, commits reach the disk, references hold, and what is
/// sorted or set aside never becomes a file in the directory for temporary ones.
pub(super) const SETTINGS: &str = "PRAGMA secure_delete = ON; PRAGMA synchronous = FULL; PRAGMA foreign_keys = ON; \
    PRAGMA temp_store = MEMORY;";

/// A write transaction takes its lock at the start, so that it waits there and never fails half-way.
pub(super) const BEGIN: &str = "BEGIN IMMEDIATE";

/// A statement that takes the write lock, changes nothing and fails where nothing can be written, which a BEGIN does
/// not: SQLite then only reads. It frees one page of a database that is vacuumed page by page, and none of others.
pub(super) const TRY_WRITING: &str = "PRAGMA incremental_vacuum(1)";
