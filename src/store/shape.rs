//! A registered column as statements need it: its names, quoted, and how its key, row and value are read, compared and
//! bound.

use super::catalog::{Form, ServerColumn, ServerTable};
use super::query::Query;
use super::sql::Sql;
use super::{Error, Key};
use crate::column::Column;

/// A registered column as statements need it.
#[derive(Clone, Debug)]
pub(super) struct Shape {
    pub(super) sql: Sql,
    /// Its table, quoted and called `t`, with all the rows that a table keeps.
    pub(super) table: String,
    pub(super) key: Cell,
    pub(super) row: Option<Cell>,
    pub(super) value: Cell,
    /// What moves by itself when a row is written, quoted.
    pub(super) moves: Vec<String>,
    /// Whether old rows are kept, which nothing can write.
    pub(super) versioned: bool,
}

/// A column of `t`.
#[derive(Clone, Debug)]
pub(super) struct Cell {
    pub(super) sql: Sql,
    /// `t."name"`.
    pub(super) of: String,
    /// The name, quoted.
    pub(super) name: String,
    pub(super) form: Form,
    /// Of MariaDB's texts: character set and collation.
    pub(super) collation: Option<(String, String)>,
}

impl Shape {
    /// In SQLite every cell says itself what it is.
    pub(super) fn of_sqlite(column: &Column) -> Self {
        let cell = |name: &str| Cell {
            sql: Sql::Sqlite,
            of: Sql::Sqlite.of_t(name),
            name: Sql::Sqlite.quote(name),
            form: Form::Any,
            collation: None,
        };
        Self {
            sql: Sql::Sqlite,
            table: Sql::Sqlite.table(column.table()),
            key: cell(column.key()),
            row: column.row().map(cell),
            value: cell(column.name()),
            moves: Vec::new(),
            versioned: false,
        }
    }

    /// As the server's catalogue describes it.
    pub(super) fn of_server(sql: Sql, column: &Column, table: &ServerTable) -> Result<Self, Error> {
        let find = |name: &str| {
            let found = table.columns.iter().find(|found| sql.same_column(&found.name, name));
            found.ok_or_else(|| Error::NoColumn(format!("{}.{name}", column.table())))
        };
        let cell = |found: &ServerColumn| Cell {
            sql,
            of: sql.of_t(&found.name),
            name: sql.quote(&found.name),
            form: found.form.clone(),
            collation: found.collation.clone(),
        };
        let moves = table.columns.iter().filter(|found| found.moves && !sql.same_column(&found.name, column.name()));
        Ok(Self {
            sql,
            table: sql.table(&table.name),
            key: cell(find(column.key())?),
            row: column.row().map(find).transpose()?.map(cell),
            value: cell(find(column.name())?),
            moves: moves.map(|found| sql.quote(&found.name)).collect(),
            versioned: table.versioned,
        })
    }

    /// The table with every row it keeps, those that are history included.
    pub(super) fn whole(&self) -> String {
        if self.versioned { self.table.replacen(" AS t", " FOR SYSTEM_TIME ALL AS t", 1) } else { self.table.clone() }
    }
}

impl Cell {
    /// The column as a key is compared and ordered: in SQLite byte for byte, for a key column that ignores case would
    /// skip rows at the edge of a page; on a server as its unique index has it, in which no two rows are the same.
    pub(super) fn ordered(&self) -> String {
        match self.sql {
            Sql::Sqlite => self.sql.exactly(&self.of),
            _ => self.of.clone(),
        }
    }

    /// Binds a key as the column holds it. None where no row can have that key.
    pub(super) fn bind<'a>(&self, query: Query<'a>, key: &'a Key) -> Option<Query<'a>> {
        match (&self.form, key) {
            (Form::Any, key) => Some(key.bind(query)),
            (Form::Integer, Key::Integer(number)) => Some(query.integer(*number)),
            (Form::Integer, Key::Text(text)) => Some(query.integer(canonical(text)?)),
            (Form::Unsigned, Key::Integer(number)) => Some(query.integer(*number)),
            (Form::Unsigned, Key::Text(text)) => {
                text.parse::<u64>().ok().filter(|number| number.to_string() == *text)?;
                Some(query.sql("CAST(").text(text).sql(" AS UNSIGNED)"))
            }
            (Form::Text(cast), Key::Text(text)) => Some(self.text(query, text.clone(), cast)),
            (Form::Text(cast), Key::Integer(number)) => Some(self.text(query, number.to_string(), cast)),
            (Form::Padded, Key::Text(text)) => Some(self.text(query, text.clone(), "bpchar")),
            (Form::Uuid, Key::Text(text)) => {
                uuid::Uuid::try_parse(text).ok().filter(|uuid| uuid.to_string() == *text)?;
                Some(self.text(query, text.clone(), "uuid"))
            }
            (Form::Bytes, Key::Odd(odd)) => Some(query.bytes(odd.bytes()?)),
            _ => None,
        }
    }

    fn text<'a>(&self, query: Query<'a>, text: String, cast: &str) -> Query<'a> {
        match self.sql {
            Sql::Postgres => query.sql("CAST(").owned(text).sql(&format!(" AS {cast})")),
            _ => query.owned(text),
        }
    }

    /// The condition that the column holds exactly this key: found by its index, then compared byte for byte.
    pub(super) fn is<'a>(&self, query: Query<'a>, key: &'a Key) -> Option<Query<'a>> {
        let query = self.bind(query.sql(&format!("{} = ", self.ordered())), key)?;
        Some(match (&self.form, key) {
            (Form::Text(_) | Form::Padded, Key::Text(text)) => {
                query.sql(&format!(" AND {} = ", self.sql.exactly(&self.of))).text(text)
            }
            _ => query,
        })
    }

    /// Selects the cell as [`super::key::KeyParts`] reads it.
    pub(super) fn select_key(&self) -> String {
        let (of, sql) = (&self.of, self.sql);
        let parts = |kind: &str, integer: &str, bytes: &str| {
            let real = match sql {
                Sql::Postgres => "NULL::float8",
                _ => "CAST(NULL AS DOUBLE)",
            };
            format!(
                "CASE WHEN {of} IS NULL THEN 'null' ELSE '{kind}' END AS key_kind, {integer} AS key_integer, \
                 {real} AS key_real, {bytes} AS key_bytes"
            )
        };
        let no_integer = sql.integer("NULL");
        match (&self.form, sql) {
            (Form::Any, _) => super::key::KeyParts::select(of),
            (Form::Integer, _) => parts("integer", &sql.integer(of), sql.null_bytes()),
            (Form::Bytes, Sql::Postgres) => parts("blob", &no_integer, of),
            (Form::Bytes, _) => parts("blob", &no_integer, &sql.as_bytes(of)),
            (_, Sql::Mariadb) => parts("text", &no_integer, &format!("CAST(CAST({of} AS CHAR) AS BINARY)")),
            _ => parts("text", &no_integer, &sql.as_bytes(of)),
        }
    }

    /// Selects the cell as [`super::stored::RowParts`] reads it.
    pub(super) fn select_row(&self) -> String {
        let (of, sql) = (&self.of, self.sql);
        let parts = |kind: &str, integer: &str, bytes: &str| {
            format!(
                "CASE WHEN {of} IS NULL THEN 'null' ELSE '{kind}' END AS row_kind, {integer} AS row_integer, \
                 {bytes} AS row_bytes"
            )
        };
        let no_integer = sql.integer("NULL");
        match (&self.form, sql) {
            (Form::Any, _) => super::stored::RowParts::select(of),
            (Form::Integer, _) => parts("integer", &sql.integer(of), sql.null_bytes()),
            (Form::Text(_) | Form::Uuid | Form::Unsigned, Sql::Mariadb) => {
                parts("text", &no_integer, &format!("CAST(CAST({of} AS CHAR) AS BINARY)"))
            }
            (Form::Text(_) | Form::Uuid, _) => parts("text", &no_integer, &sql.as_bytes(of)),
            _ => parts("blob", &no_integer, sql.null_bytes()),
        }
    }

    /// The condition that the row column still holds `row`.
    pub(super) fn is_row<'a>(&self, query: Query<'a>, row: &'a str) -> Query<'a> {
        match self.sql {
            Sql::Sqlite => query.sql(&format!("CAST({} AS TEXT) COLLATE BINARY = ", self.of)).text(row),
            Sql::Postgres => query.sql(&format!("({})::text COLLATE \"C\" = ", self.of)).text(row),
            Sql::Mariadb => query.sql(&format!("CAST(CAST({} AS CHAR) AS BINARY) = ", self.of)).text(row),
        }
    }
}

/// What selects nothing where a column is not bound to rows.
pub(super) fn no_row(sql: Sql) -> String {
    match sql {
        Sql::Sqlite => super::stored::RowParts::select("NULL"),
        _ => format!("'null' AS row_kind, {} AS row_integer, {} AS row_bytes", sql.integer("NULL"), sql.null_bytes()),
    }
}

/// The number that a text is, if it is written as a number is.
fn canonical(text: &str) -> Option<i64> {
    text.parse::<i64>().ok().filter(|number| number.to_string() == text)
}
