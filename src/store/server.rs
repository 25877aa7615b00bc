//! PostgreSQL and MariaDB: their connections, and what each session is told so that it sees everything, waits within
//! bounds, and stores nothing that it had to change.

use diesel::prelude::*;
use diesel::sql_types::{BigInt, Text};

use super::Error;
use super::connection::AnyConnection;
use super::query::Query;
use super::url::Server;

/// Connects to PostgreSQL 15 or newer.
#[cfg(feature = "postgres")]
pub(super) fn postgres(server: &Server) -> Result<AnyConnection, Error> {
    let mut connection = AnyConnection::Postgres(Box::new(PgConnection::establish(&server.connect_by("postgres"))?));
    let about: Vec<About> = Query::new(
        "SELECT current_setting('server_version') AS version, current_setting('server_version_num')::int8 AS number, \
         current_setting('server_encoding') AS encoding",
    )
    .load(&mut connection)?;
    let about = about.into_iter().next().ok_or(Error::Unfit("it does not say what it is"))?;
    if about.number < 150_000 {
        return Err(Error::Unfit("it is older than PostgreSQL 15"));
    }
    if about.encoding != "UTF8" {
        return Err(Error::Unfit("its text is not stored as UTF-8"));
    }
    connection.run(POSTGRES)?;
    // Messages in English can be told apart; not every account may ask for them.
    let _ = connection.run("SELECT set_config('lc_messages', 'C', false)");
    Ok(connection)
}

/// Connects to MariaDB 10.11 or newer.
#[cfg(feature = "mariadb")]
pub(super) fn mariadb(server: &Server) -> Result<AnyConnection, Error> {
    let mut connection = AnyConnection::Mariadb(Box::new(MysqlConnection::establish(&server.connect_by("mysql"))?));
    let about: Vec<About> = Query::new(
        "SELECT VERSION() AS version, CAST(@@character_set_database = 'utf8mb4' AS SIGNED) AS number, \
         (SELECT VARIABLE_VALUE FROM information_schema.SESSION_STATUS WHERE VARIABLE_NAME = 'SSL_CIPHER') AS encoding",
    )
    .load(&mut connection)?;
    let about = about.into_iter().next().ok_or(Error::Unfit("it does not say what it is"))?;
    if !about.version.contains("MariaDB") || release(&about.version) < (10, 11) {
        return Err(Error::Unfit("it is no MariaDB 10.11 or newer"));
    }
    // The client library of MariaDB knows no ssl_mode, and goes on in clear where the server has no TLS.
    let wanted = server.parameter("ssl_mode").is_some_and(|mode| !matches!(mode, "disabled" | "preferred"));
    if wanted && about.encoding.is_empty() {
        return Err(Error::Unfit("it takes no TLS, and its URL asks for it (ssl_mode)"));
    }
    connection.run(MARIADB)?;
    Ok(connection)
}

/// The release of a server's version, `5.5.5-` before it or not.
#[cfg(feature = "mariadb")]
fn release(version: &str) -> (u32, u32) {
    let mut numbers = version.trim_start_matches("5.5.5-").split(['.', '-']).map(|part| part.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

/// Rows hidden by a policy are an error, never left out. Each statement sees what is committed when it begins. Nothing
/// waits for ever, and counting may take its time. What is committed is on the disk.
#[cfg(feature = "postgres")]
const POSTGRES: &str = "SET row_security = off; SET default_transaction_isolation = 'read committed'; \
    SET statement_timeout = 0; SET lock_timeout = '10s'; SET idle_in_transaction_session_timeout = 0; \
    SET standard_conforming_strings = on; SET client_encoding = 'UTF8'; SET DateStyle = 'ISO'; SET IntervalStyle = 'postgres'; \
    SET bytea_output = 'hex'; SET client_min_messages = warning; SET application_name = 'hardwrap'; \
    SELECT set_config('synchronous_commit', CASE current_setting('synchronous_commit') WHEN 'off' THEN 'on' \
    ELSE current_setting('synchronous_commit') END, false)";

/// A value that does not fit is an error, never cut. Each statement sees what is committed when it begins, on every node
/// of a cluster, and all of it. Messages are English, so that they can be told apart.
#[cfg(feature = "mariadb")]
const MARIADB: &str = "SET NAMES utf8mb4; SET SESSION sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION', \
    tx_isolation = 'READ-COMMITTED', lc_messages = 'en_US', autocommit = 1, innodb_lock_wait_timeout = 10, \
    lock_wait_timeout = 10, max_statement_time = 0, sql_select_limit = DEFAULT, sql_safe_updates = 0, sql_auto_is_null = 0, \
    foreign_key_checks = 1, time_zone = '+00:00', system_versioning_asof = DEFAULT, wsrep_sync_wait = 7";

#[derive(QueryableByName)]
struct About {
    #[diesel(sql_type = Text)]
    #[cfg_attr(not(feature = "mariadb"), allow(dead_code))]
    version: String,
    #[diesel(sql_type = BigInt)]
    #[cfg_attr(not(feature = "postgres"), allow(dead_code))]
    number: i64,
    #[diesel(sql_type = Text)]
    encoding: String,
}
