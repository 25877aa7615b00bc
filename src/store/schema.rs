//! Our own tables: made, upgraded, checked, and what stands in them.
//!
//! Not diesel_migrations, on purpose: it keeps its list in `__diesel_schema_migrations`, and an application that uses
//! it in the same database would find our migrations among its own. Everything of ours is called `hardwrap_*`.

use diesel::prelude::*;
use diesel::sql_types::{BigInt, Nullable, Text};

use super::connection::AnyConnection;
use super::query::Query;
use super::sql::Sql;
use super::url::Place;
use super::{DatabaseUrl, Db, Error};
use crate::provider::{Alg, KeyId, random};

impl Db {
    /// Makes or upgrades our own tables: each migration that is missing, in one transaction each. Run again, it does
    /// nothing. Two programs may do it at once.
    ///
    /// # Errors
    /// [`Error::NewerTables`] and [`Error::NewerNeeded`] if a newer hardwrap was here, and nothing was changed;
    /// [`Error::Unavailable`].
    pub fn upgrade(&self) -> Result<Vec<Applied>, Error> {
        self.keep_log()?;
        let mut applied = Vec::new();
        for migration in &MIGRATIONS {
            let done = self.write(|connection| {
                alone(connection)?;
                let found = installed(connection)?.unwrap_or(0);
                usable_by_this(connection, found)?;
                if found >= migration.version {
                    return Ok(false);
                }
                connection.run(migration.sql(self.sql()))?;
                // MariaDB keeps each statement above for itself, so two programs may come here at once.
                Query::new(match self.sql() {
                    Sql::Mariadb => "INSERT IGNORE INTO hardwrap_migration (version, applied) VALUES (",
                    _ => "INSERT INTO hardwrap_migration (version, applied) VALUES (",
                })
                .integer(migration.version)
                .sql(", ")
                .text(&now())
                .sql(")")
                .execute(connection)?;
                Ok(true)
            })?;
            if done {
                applied.push(Applied { version: migration.version, name: migration.name });
            }
        }
        self.write(|connection| {
            alone(connection)?;
            if identity(connection)?.is_some() {
                return Ok(());
            }
            let mut drawn = [0; 16];
            random(&mut drawn).map_err(|error| Error::Unavailable(Box::new(error)))?;
            Query::new(match self.sql() {
                Sql::Mariadb => "INSERT IGNORE INTO hardwrap_database (identity, made, oldest_version) VALUES (",
                _ => "INSERT INTO hardwrap_database (identity, made, oldest_version) VALUES (",
            })
            .text(&format!("{:032x}", u128::from_be_bytes(drawn)))
            .sql(", ")
            .text(&now())
            .sql(", ")
            .text(OLDEST)
            .sql(")")
            .execute(connection)?;
            Ok(())
        })?;
        Ok(applied)
    }

    /// Checks that this program may use the database: our tables are there, and neither older nor newer than it.
    ///
    /// # Errors
    /// [`Error::NotInitialised`], [`Error::Outdated`], [`Error::NewerTables`], [`Error::NewerNeeded`].
    pub fn ready(&self) -> Result<Identity, Error> {
        self.read_with(|connection| {
            let found = installed(connection)?.ok_or(Error::NotInitialised)?;
            usable_by_this(connection, found)?;
            if found < NEWEST {
                return Err(Error::Outdated { found, wanted: NEWEST });
            }
            identity(connection)?.ok_or(Error::NotInitialised)
        })
    }

    /// Makes the table of agent runs and that of their events, each only where it is missing. Says whether any was.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    pub fn create_agent_run_table(&self) -> Result<bool, Error> {
        self.write(|connection| {
            let mut made = false;
            for (table, sql) in agent_run(self.sql()) {
                if !is_there(connection, table)? {
                    connection.run(sql)?;
                    made = true;
                }
            }
            Ok(made)
        })
    }

    /// Notes that a master key was seen in this state, as the keyring names it. Noted already, it changes nothing: the
    /// time stays that of the first sight. Which of two states is the higher is for the caller to know: what was noted
    /// last stands.
    ///
    /// # Errors
    /// [`Error::Unavailable`], [`Error::NoTable`] before [`Db::upgrade`].
    pub fn note_key(&self, kid: KeyId, alg: Alg, state: &str) -> Result<(), Error> {
        self.write(|connection| {
            let kid = kid.to_string();
            let noted: Vec<KeySeen> = Query::new("SELECT kid, alg, state, seen FROM hardwrap_key_seen WHERE kid = ")
                .text(&kid)
                .load(connection)?;
            if noted.iter().any(|noted| noted.state == state && noted.alg == alg.name()) {
                return Ok(());
            }
            Query::new("DELETE FROM hardwrap_key_seen WHERE kid = ").text(&kid).execute(connection)?;
            Query::new("INSERT INTO hardwrap_key_seen (kid, alg, state, seen) VALUES (")
                .text(&kid)
                .sql(", ")
                .text(alg.name())
                .sql(", ")
                .text(state)
                .sql(", ")
                .text(&now())
                .sql(")")
                .execute(connection)?;
            Ok(())
        })
    }

    /// Forgets every master key noted: for a database that holds no envelope and changes to another keyring.
    ///
    /// # Errors
    /// [`Error::Unavailable`], [`Error::NoTable`] before [`Db::upgrade`].
    pub fn forget_keys(&self) -> Result<(), Error> {
        self.write(|connection| Query::new("DELETE FROM hardwrap_key_seen").execute(connection).map(drop))
    }

    /// Every master key noted, by id.
    ///
    /// # Errors
    /// [`Error::Unavailable`], [`Error::NoTable`] before [`Db::upgrade`].
    pub fn keys_seen(&self) -> Result<Vec<KeySeen>, Error> {
        self.read_with(|connection| {
            Query::new("SELECT kid, alg, state, seen FROM hardwrap_key_seen ORDER BY kid").load(connection)
        })
    }
}

/// All SQL that makes our tables and what stands in them, and those of the preset `nr-llm`, for the database of `url`, in
/// the order in which it is run. [`Db::upgrade`] finds nothing left to do after it.
pub fn schema_sql(url: &DatabaseUrl) -> String {
    let (sql, now, drawn) = match url.place() {
        Place::Sqlite(_) => (Sql::Sqlite, "strftime('%Y-%m-%dT%H:%M:%SZ', 'now')", "lower(hex(randomblob(16)))"),
        Place::Postgres(_) => (
            Sql::Postgres,
            "to_char(now() AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS\"Z\"')",
            "replace(gen_random_uuid()::text, '-', '')",
        ),
        Place::Mariadb(_) => {
            (Sql::Mariadb, "DATE_FORMAT(UTC_TIMESTAMP(), '%Y-%m-%dT%H:%i:%sZ')", "LOWER(HEX(RANDOM_BYTES(16)))")
        }
    };
    let mut all = String::new();
    for migration in &MIGRATIONS {
        all.push_str(migration.sql(sql));
        let version = migration.version;
        all.push_str(&format!("INSERT INTO hardwrap_migration (version, applied) VALUES ({version}, {now});\n"));
    }
    // Where there is an identity already, the statements above fail, and no second one may come in.
    all.push_str(&format!(
        "INSERT INTO hardwrap_database (identity, made, oldest_version)\n    \
         SELECT {drawn}, {now}, '{OLDEST}' WHERE NOT EXISTS (SELECT 1 FROM hardwrap_database);\n"
    ));
    agent_run(sql).iter().for_each(|(_, sql)| all.push_str(sql));
    all
}

/// A migration that was applied.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Applied {
    /// Its number, from 1.
    pub version: i64,
    /// What it is called.
    pub name: &'static str,
}

/// Who a database is.
#[derive(Clone, Debug, Eq, PartialEq, QueryableByName)]
pub struct Identity {
    /// 32 hex digits, drawn when our tables were made.
    #[diesel(sql_type = Text)]
    pub identity: String,
    /// When that was, RFC 3339 in UTC.
    #[diesel(sql_type = Text)]
    pub made: String,
    /// The oldest hardwrap that may use the database.
    #[diesel(sql_type = Text)]
    pub oldest_version: String,
}

/// A master key as this database saw it last.
#[derive(Clone, Debug, Eq, PartialEq, QueryableByName)]
pub struct KeySeen {
    /// Its id, 16 hex digits.
    #[diesel(sql_type = Text)]
    pub kid: String,
    /// How it wraps.
    #[diesel(sql_type = Text)]
    pub alg: String,
    /// Its state.
    #[diesel(sql_type = Text)]
    pub state: String,
    /// When it was noted, RFC 3339 in UTC.
    #[diesel(sql_type = Text)]
    pub seen: String,
}

struct Migration {
    version: i64,
    name: &'static str,
    sqlite: &'static str,
    postgres: &'static str,
    mariadb: &'static str,
}

impl Migration {
    fn sql(&self, sql: Sql) -> &'static str {
        match sql {
            Sql::Sqlite => self.sqlite,
            Sql::Postgres => self.postgres,
            Sql::Mariadb => self.mariadb,
        }
    }
}

/// One program at a time makes tables in a PostgreSQL database: two that made one at once would fail.
fn alone(connection: &mut AnyConnection) -> Result<(), Error> {
    match connection.sql() {
        Sql::Postgres => connection.run("SELECT pg_advisory_xact_lock(7525354)"),
        Sql::Sqlite | Sql::Mariadb => Ok(()),
    }
}

/// The version of our tables; none if they are not there.
fn installed(connection: &mut AnyConnection) -> Result<Option<i64>, Error> {
    if !is_there(connection, "hardwrap_migration")? {
        return Ok(None);
    }
    let newest: Vec<Newest> = Query::new("SELECT MAX(version) AS version FROM hardwrap_migration").load(connection)?;
    Ok(newest.into_iter().next().and_then(|newest| newest.version))
}

fn usable_by_this(connection: &mut AnyConnection, found: i64) -> Result<(), Error> {
    if found > NEWEST {
        return Err(Error::NewerTables { found, known: NEWEST });
    }
    let oldest = if found == 0 { None } else { identity(connection)? };
    match oldest.map(|identity| identity.oldest_version) {
        Some(oldest) if release(&oldest).is_none_or(|oldest| Some(oldest) > release(THIS)) => {
            Err(Error::NewerNeeded { oldest, this: THIS })
        }
        _ => Ok(()),
    }
}

fn identity(connection: &mut AnyConnection) -> Result<Option<Identity>, Error> {
    let rows: Vec<Identity> =
        Query::new("SELECT identity, made, oldest_version FROM hardwrap_database").load(connection)?;
    Ok(rows.into_iter().next())
}

pub(super) fn is_there(connection: &mut AnyConnection, name: &str) -> Result<bool, Error> {
    let query = match connection.sql() {
        Sql::Sqlite => {
            Query::new("SELECT name FROM sqlite_schema WHERE type IN ('table', 'view') AND name COLLATE NOCASE = ")
                .text(name)
        }
        Sql::Postgres => {
            Query::new("SELECT relname::text AS name FROM pg_class WHERE oid = to_regclass(").text(name).sql(")")
        }
        Sql::Mariadb => Query::new(
            "SELECT TABLE_NAME AS name FROM information_schema.TABLES WHERE TABLE_SCHEMA = DATABASE() AND BINARY TABLE_NAME = ",
        )
        .text(name),
    };
    let rows: Vec<Name> = query.load(connection)?;
    Ok(!rows.is_empty())
}

/// `1.2.3` as numbers; what follows a hyphen or plus does not count.
fn release(version: &str) -> Option<[u64; 3]> {
    let plain = version.split(['-', '+']).next()?;
    let numbers: Vec<u64> = plain.split('.').map(|part| part.parse().ok()).collect::<Option<_>>()?;
    numbers.try_into().ok()
}

/// Now, RFC 3339 in UTC, whole seconds.
pub(super) fn now() -> String {
    jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

#[derive(QueryableByName)]
struct Newest {
    #[diesel(sql_type = Nullable<BigInt>)]
    version: Option<i64>,
}

#[derive(QueryableByName)]
struct Name {
    #[diesel(sql_type = Text)]
    #[allow(dead_code, reason = "that the row is there says it all")]
    name: String,
}

macro_rules! migration {
    ($version:literal, $name:literal, $file:literal) => {
        Migration {
            version: $version,
            name: $name,
            sqlite: include_str!(concat!("migrations/sqlite/", $file)),
            postgres: include_str!(concat!("migrations/postgres/", $file)),
            mariadb: include_str!(concat!("migrations/mariadb/", $file)),
        }
    };
}

const MIGRATIONS: [Migration; 3] = [
    migration!(1, "hardwrap", "0001_hardwrap.sql"),
    migration!(2, "rotation", "0002_rotation.sql"),
    migration!(3, "servers", "0003_servers.sql"),
];
const NEWEST: i64 = MIGRATIONS[MIGRATIONS.len() - 1].version;

/// The tables of the preset, each with what makes it.
fn agent_run(sql: Sql) -> [(&'static str, &'static str); 2] {
    let [run, event] = match sql {
        Sql::Sqlite => {
            [include_str!("migrations/sqlite/agentrun.sql"), include_str!("migrations/sqlite/agentrun_event.sql")]
        }
        Sql::Postgres => {
            [include_str!("migrations/postgres/agentrun.sql"), include_str!("migrations/postgres/agentrun_event.sql")]
        }
        Sql::Mariadb => {
            [include_str!("migrations/mariadb/agentrun.sql"), include_str!("migrations/mariadb/agentrun_event.sql")]
        }
    };
    [("tx_nrllm_agentrun", run), ("tx_nrllm_agentrun_event", event)]
}

const THIS: &str = env!("CARGO_PKG_VERSION");
/// The oldest hardwrap that understands the tables as they are now.
const OLDEST: &str = "0.1.0";
