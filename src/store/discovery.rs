//! Discovery: envelopes, ours and the ancestor's, wherever they stand, registered or not.

use std::fmt;

use diesel::prelude::*;
use diesel::sql_types::{BigInt, Text};

use super::connection::AnyConnection;
use super::query::Query;
use super::sql::{Kept, Sql};
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
            let sql = connection.sql();
            let mut columns = every_column(connection)?;
            let is = |known: &Spot, column: &AnyColumn| {
                [&column.table, &column.root].iter().any(|table| known.is_named(sql, table, &column.name))
            };
            columns.retain(|column| !known.iter().any(|known| is(known, column)));
            let searched = columns.len();
            let mut found = Vec::new();
            for column in columns {
                let count: Vec<Total> = Query::new(format!(
                    "SELECT COUNT(*) AS total FROM {} WHERE {}",
                    column.from(sql),
                    sql.holds_envelope(&sql.of_t(&column.name), column.kept())
                ))
                .load(connection)?;
                let count = count.iter().map(|row| row.total.unsigned_abs()).sum();
                if count > 0 {
                    found.push(Found { table: column.table, column: column.name, count });
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
    /// [`Error::Hidden`], [`Error::Unavailable`].
    pub fn names(&self, kid: KeyId) -> Result<bool, Error> {
        self.read_with(|connection| {
            let sql = connection.sql();
            for column in every_column(connection)? {
                let any = format!(
                    "EXISTS (SELECT 1 FROM {} WHERE {})",
                    column.from(sql),
                    sql.names_anywhere(&sql.of_t(&column.name), column.kept(), kid)
                );
                let found: Vec<Total> = Query::new(format!("SELECT {} AS total", sql.truth(&any))).load(connection)?;
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
    /// Whether this is the column `column` of `table`, whatever the case of either.
    pub fn is(&self, table: &str, column: &str) -> bool {
        let same = |one: &str, other: &str| one.eq_ignore_ascii_case(other);
        same(super::sql::bare(&self.table), super::sql::bare(table)) && same(&self.column, column)
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
    /// As the register may name it.
    #[diesel(sql_type = Text)]
    table: String,
    /// That of which it is a partition, or itself.
    #[diesel(sql_type = Text)]
    root: String,
    #[diesel(sql_type = Text)]
    name: String,
    /// `text`, `bytes`, or why it cannot be read.
    #[diesel(sql_type = Text)]
    kept: String,
    /// Whether old rows are kept beside those that are.
    #[diesel(sql_type = BigInt)]
    versioned: i64,
}

impl AnyColumn {
    fn from(&self, sql: Sql) -> String {
        match self.versioned {
            0 => sql.table(&self.table),
            _ => format!("{} FOR SYSTEM_TIME ALL AS t", sql.name(&self.table)),
        }
    }

    fn kept(&self) -> Kept {
        if self.kept == "bytes" { Kept::Bytes } else { Kept::Text }
    }
}

/// Every column in which a text can stand. Refuses where one cannot be read, or may stand where this account cannot look.
fn every_column(connection: &mut AnyConnection) -> Result<Vec<AnyColumn>, Error> {
    let columns: Vec<AnyColumn> = match connection.sql() {
        Sql::Sqlite => Query::new(SQLITE).load(connection)?,
        Sql::Postgres => Query::new(POSTGRES).load(connection)?,
        Sql::Mariadb => {
            let all: Vec<Total> = Query::new(MARIADB_SEES_ALL).load(connection)?;
            if all.iter().all(|all| all.total == 0) {
                return Err(Error::Hidden(
                    "the database".to_owned(),
                    "it has no SELECT on the whole database, and would not see a table without a grant",
                ));
            }
            Query::new(MARIADB).load(connection)?
        }
    };
    for column in &columns {
        let why = match column.kept.as_str() {
            "denied" => "it has no SELECT there",
            "policy" => "row-level security hides rows",
            _ => continue,
        };
        return Err(Error::Hidden(format!("table {}", Plain(&column.table)), why));
    }
    Ok(columns)
}

#[derive(QueryableByName)]
struct Total {
    #[diesel(sql_type = BigInt)]
    total: i64,
}

/// Shadow tables are where virtual ones keep their rows; views and virtual tables show what stands elsewhere.
const SQLITE: &str = "SELECT l.name AS \"table\", l.name AS root, c.name AS name, 'text' AS kept, 0 AS versioned \
    FROM pragma_table_list AS l JOIN pragma_table_xinfo(l.name, 'main') AS c \
    WHERE l.schema = 'main' AND l.type IN ('table', 'shadow') AND c.hidden <> 1 \
    AND lower(l.name) NOT GLOB 'sqlite_*' AND lower(l.name) NOT GLOB 'hardwrap_*' \
    ORDER BY l.name, c.cid";

/// Tables, partitions and materialised views of every schema, whoever owns them. Numbers, times and the like hold no
/// text.
const POSTGRES: &str = "SELECT CASE WHEN pg_table_is_visible(c.oid) THEN c.relname ELSE n.nspname || '.' || c.relname END \
    AS \"table\", CASE WHEN pg_table_is_visible(p.oid) THEN p.relname ELSE o.nspname || '.' || p.relname END AS root, \
    a.attname AS name, CASE WHEN NOT (has_schema_privilege(n.oid, 'USAGE') AND \
    has_column_privilege(c.oid, a.attnum, 'SELECT')) THEN 'denied' WHEN row_security_active(c.oid) THEN 'policy' \
    WHEN b.typname = 'bytea' THEN 'bytes' ELSE 'text' END AS kept, 0::int8 AS versioned \
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace \
    JOIN pg_class p ON p.oid = COALESCE(pg_partition_root(c.oid)::oid, c.oid) JOIN pg_namespace o ON o.oid = p.relnamespace \
    JOIN pg_attribute a ON a.attrelid = c.oid JOIN pg_type t ON t.oid = a.atttypid \
    JOIN pg_type b ON b.oid = CASE WHEN t.typtype = 'd' THEN t.typbasetype ELSE t.oid END \
    WHERE c.relkind IN ('r', 'm') AND a.attnum > 0 AND NOT a.attisdropped \
    AND n.nspname NOT IN ('pg_catalog', 'information_schema') AND n.nspname !~ '^pg_(toast|temp)' \
    AND left(c.relname, 9) <> 'hardwrap_' AND b.typcategory NOT IN ('B', 'D', 'E', 'G', 'I', 'N', 'R', 'T', 'V') \
    AND b.typname NOT IN ('uuid', 'tsvector', 'tsquery', 'pg_lsn', 'macaddr', 'macaddr8') \
    ORDER BY n.nspname, c.relname, a.attnum";

/// Whether this account may read every table of the database, those to come included: MariaDB does not show the others.
const MARIADB_SEES_ALL: &str = "SELECT COUNT(*) AS total FROM (\
    SELECT GRANTEE FROM information_schema.USER_PRIVILEGES WHERE PRIVILEGE_TYPE = 'SELECT' \
    UNION ALL SELECT GRANTEE FROM information_schema.SCHEMA_PRIVILEGES WHERE PRIVILEGE_TYPE = 'SELECT' \
    AND DATABASE() LIKE TABLE_SCHEMA) g WHERE BINARY g.GRANTEE IN (\
    CONCAT(CHAR(39), REPLACE(CURRENT_USER(), '@', CONCAT(CHAR(39), '@', CHAR(39))), CHAR(39)), \
    CONCAT(CHAR(39), CURRENT_ROLE(), CHAR(39)), CONCAT(CHAR(39), CURRENT_ROLE(), CHAR(39), '@', CHAR(39), CHAR(39)), \
    CURRENT_ROLE())";

const MARIADB: &str = "SELECT c.TABLE_NAME AS `table`, c.TABLE_NAME AS root, c.COLUMN_NAME AS name, \
    CASE WHEN c.CHARACTER_SET_NAME IS NULL THEN 'bytes' ELSE 'text' END AS kept, \
    CAST(t.TABLE_TYPE = 'SYSTEM VERSIONED' AS SIGNED) AS versioned \
    FROM information_schema.COLUMNS c JOIN information_schema.TABLES t \
    ON t.TABLE_SCHEMA = c.TABLE_SCHEMA AND t.TABLE_NAME = c.TABLE_NAME \
    WHERE c.TABLE_SCHEMA = DATABASE() AND t.TABLE_TYPE IN ('BASE TABLE', 'SYSTEM VERSIONED') \
    AND LEFT(c.TABLE_NAME, 9) <> 'hardwrap_' AND c.DATA_TYPE IN ('char', 'varchar', 'tinytext', 'text', 'mediumtext', \
    'longtext', 'binary', 'varbinary', 'tinyblob', 'blob', 'mediumblob', 'longblob', 'json') \
    ORDER BY c.TABLE_NAME, c.ORDINAL_POSITION";
