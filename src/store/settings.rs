//! How a database is set up, for people who have to know.

use diesel::prelude::*;
use diesel::sql_types::{BigInt, Text};
use serde::Serialize;

use super::query::Query;
use super::sql::Sql;
use super::{Db, Error};

/// How a database is set up, as our connections find it.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Settings {
    /// SQLite.
    Sqlite(SqliteSettings),
    /// A server.
    Server(ServerSettings),
}

/// How a server's database is set up.
#[derive(Clone, Debug, Eq, PartialEq, QueryableByName, Serialize)]
pub struct ServerSettings {
    /// What it calls itself, and its version.
    #[diesel(sql_type = Text)]
    pub server: String,
    /// The account that we are.
    #[diesel(sql_type = Text)]
    pub account: String,
    /// How the connection is encrypted; empty where it is not.
    #[diesel(sql_type = Text)]
    pub tls: String,
    /// `yes` where it can be written, and is no replica.
    #[diesel(sql_type = Text)]
    pub writable: String,
    /// How many nodes the cluster has; 0 where it is none.
    #[diesel(sql_type = BigInt)]
    pub nodes: i64,
}

/// How a SQLite database is set up.
#[derive(Clone, Debug, Eq, PartialEq, QueryableByName, Serialize)]
pub struct SqliteSettings {
    /// The version of SQLite compiled in.
    #[diesel(sql_type = Text)]
    pub sqlite: String,
    /// `wal` in a database of ours.
    #[diesel(sql_type = Text)]
    pub journal_mode: String,
    /// Bytes of a page.
    #[diesel(sql_type = BigInt)]
    pub page_size: i64,
    /// All pages.
    #[diesel(sql_type = BigInt)]
    pub pages: i64,
    /// Pages that are free: what other programs deleted may still stand there.
    #[diesel(sql_type = BigInt)]
    pub free_pages: i64,
}

impl Db {
    /// How the database is set up.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    pub fn settings(&self) -> Result<Settings, Error> {
        let missing = || Error::Unfit("it does not say how it is set up");
        self.read_with(|connection| match connection.sql() {
            Sql::Sqlite => {
                let rows: Vec<SqliteSettings> = Query::new(SQLITE).load(connection)?;
                rows.into_iter().next().map(Settings::Sqlite).ok_or_else(missing)
            }
            server => {
                let query = if server == Sql::Postgres { POSTGRES } else { MARIADB };
                let rows: Vec<ServerSettings> = Query::new(query).load(connection)?;
                rows.into_iter().next().map(Settings::Server).ok_or_else(missing)
            }
        })
    }
}

const SQLITE: &str = "SELECT sqlite_version() AS sqlite, j.journal_mode AS journal_mode, s.page_size AS page_size, \
    c.page_count AS pages, f.freelist_count AS free_pages \
    FROM pragma_journal_mode AS j, pragma_page_size AS s, pragma_page_count AS c, pragma_freelist_count AS f";

const POSTGRES: &str = "SELECT 'PostgreSQL ' || current_setting('server_version') AS server, current_user::text AS account, \
    COALESCE((SELECT version || ' ' || cipher FROM pg_stat_ssl WHERE pid = pg_backend_pid() AND ssl), '') AS tls, \
    CASE WHEN pg_is_in_recovery() OR current_setting('transaction_read_only') = 'on' THEN 'no' ELSE 'yes' END AS writable, \
    0::int8 AS nodes";

const MARIADB: &str = "SELECT CONCAT('MariaDB ', VERSION()) AS server, CURRENT_USER() AS account, \
    (SELECT VARIABLE_VALUE FROM information_schema.SESSION_STATUS WHERE VARIABLE_NAME = 'SSL_CIPHER') AS tls, \
    CASE WHEN @@read_only THEN 'no' ELSE 'yes' END AS writable, \
    COALESCE((SELECT CAST(VARIABLE_VALUE AS SIGNED) FROM information_schema.GLOBAL_STATUS \
    WHERE VARIABLE_NAME = 'WSREP_CLUSTER_SIZE'), 0) AS nodes";
