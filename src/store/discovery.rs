//! Discovery: envelopes, ours and the ancestor's, wherever they stand, registered or not.

use std::fmt;

use diesel::prelude::*;
use diesel::sql_types::{BigInt, Text};

use super::sql::{self, Query};
use super::{Db, Error, Plain, Spot};
use crate::provider::KeyId;

impl Db {
    /// Looks for envelopes in every column of every table but SQLite's own and `hardwrap_*`, whatever the column is
    /// declared as: values that begin like one of ours, of another version or of the ancestor, and texts that hold one
    /// of ours somewhere inside, as a history that keeps whole rows does. Columns without any are left out.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    pub fn find_envelopes(&self) -> Result<Vec<Found>, Error> {
        Ok(self.discover(&[])?.1)
    }

    /// [`Db::find_envelopes`] in every column but those of `known`, and how many were searched.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    pub fn discover(&self, known: &[Spot]) -> Result<(usize, Vec<Found>), Error> {
        self.read_with(|connection| {
            let mut columns: Vec<AnyColumn> = Query::new(EVERY_COLUMN).load(connection)?;
            columns.retain(|column| !known.iter().any(|known| known.is_named(&column.table, &column.name)));
            let searched = columns.len();
            let mut found = Vec::new();
            for AnyColumn { table, name } in columns {
                let count: Vec<Total> = Query::new(format!(
                    "SELECT COUNT(*) AS total FROM main.{} AS t WHERE {}",
                    sql::quote(&table),
                    sql::holds_envelope(&sql::of_t(&name))
                ))
                .load(connection)?;
                let count = count.iter().map(|row| row.total.unsigned_abs()).sum();
                if count > 0 {
                    found.push(Found { table, column: name, count });
                }
            }
            Ok((searched, found))
        })
    }
}

impl Db {
    /// Whether a value anywhere in the database, in a registered column or not, names this key.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    pub fn names(&self, kid: KeyId) -> Result<bool, Error> {
        self.read_with(|connection| {
            let columns: Vec<AnyColumn> = Query::new(EVERY_COLUMN).load(connection)?;
            for AnyColumn { table, name } in columns {
                let found: Vec<Total> = Query::new(format!(
                    "SELECT EXISTS (SELECT 1 FROM main.{} AS t WHERE {}) AS total",
                    sql::quote(&table),
                    sql::names(&sql::of_t(&name), kid)
                ))
                .load(connection)?;
                if found.iter().any(|row| row.total > 0) {
                    return Ok(true);
                }
            }
            Ok(false)
        })
    }
}

/// A column in which envelopes stand.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Found {
    /// Its table.
    pub table: String,
    /// Its name.
    pub column: String,
    /// How many envelopes.
    pub count: u64,
}

impl Found {
    /// Whether this is the column `column` of `table`, by the database's rules for names.
    pub fn is(&self, table: &str, column: &str) -> bool {
        Spot { table: table.to_owned(), column: column.to_owned() }.is_named(&self.table, &self.column)
    }
}

/// `TABLE.COLUMN`, as [`Plain`] shows them.
impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", Plain(&self.table), Plain(&self.column))
    }
}

#[derive(QueryableByName)]
struct AnyColumn {
    #[diesel(sql_type = Text)]
    table: String,
    #[diesel(sql_type = Text)]
    name: String,
}

#[derive(QueryableByName)]
struct Total {
    #[diesel(sql_type = BigInt)]
    total: i64,
}

/// Shadow tables are where virtual ones keep their rows; views and virtual tables show what stands elsewhere.
const EVERY_COLUMN: &str = "SELECT l.name AS \"table\", c.name AS name \
    FROM pragma_table_list AS l JOIN pragma_table_xinfo(l.name, 'main') AS c \
    WHERE l.schema = 'main' AND l.type IN ('table', 'shadow') AND c.hidden <> 1 \
    AND lower(l.name) NOT GLOB 'sqlite_*' AND lower(l.name) NOT GLOB 'hardwrap_*' \
    ORDER BY l.name, c.cid";
