//! The database fence: triggers that refuse a new value under a fenced key. The token's fence stops wrapping; this one
//! stops a value that was wrapped before, and is stored late. A value that stays as it is passes.

use diesel::prelude::*;
use diesel::sql_types::Text;
use sha2::{Digest, Sha256};

use super::connection::AnyConnection;
use super::fronts::Looked;
use super::query::Query;
use super::sql::Sql;
use super::{Db, Error};
use crate::column::Column;
use crate::provider::KeyId;

/// A column by its names, as the schema spells them: what is fenced, counted and searched, registered or a rotator's.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct Spot {
    /// Its table.
    pub table: String,
    /// Its name.
    pub column: String,
}

impl Spot {
    /// Whether this is where `column` stands, both as the schema spells them.
    pub fn is(&self, column: &Column) -> bool {
        self.table == column.table() && self.column == column.name()
    }

    /// Whether this is the column `column` of `table`, by the database's rules for names: in SQLite `main.` may stand
    /// before the table, and case does not count.
    pub(super) fn is_named(&self, sql: Sql, table: &str, column: &str) -> bool {
        sql.same_table(&self.table, table) && sql.same_column(&self.column, column)
    }
}

impl std::fmt::Display for Spot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", super::Plain(&self.table), super::Plain(&self.column))
    }
}

impl Db {
    /// Puts the fence for `kid` on every one of `spots`, where it is not there or not as it must be. Says whether any
    /// was missing.
    ///
    /// # Errors
    /// [`Error::NoTable`], [`Error::NoColumn`], [`Error::ReadOnly`], [`Error::Unavailable`]; then none is new.
    pub fn raise_fence(&self, kid: KeyId, spots: &[Spot]) -> Result<bool, Error> {
        if self.missing_fences(kid, spots)?.is_empty() {
            return Ok(false);
        }
        for spot in spots {
            self.fence(kid, spot)?;
        }
        Ok(true)
    }

    /// Puts the fence on one column. Triggers wait for every transaction that has written to the table, and every later
    /// writer waits for them, so each try is short.
    fn fence(&self, kid: KeyId, spot: &Spot) -> Result<(), Error> {
        let triggers = self.triggers(kid, spot)?;
        self.may_fence(spot)?;
        let mut tries = 0;
        loop {
            let done = self.write_once(|connection| {
                match connection.sql() {
                    Sql::Sqlite => {}
                    Sql::Postgres => connection.run("SET LOCAL lock_timeout = '2s'")?,
                    Sql::Mariadb => connection.run("SET SESSION lock_wait_timeout = 2")?,
                }
                for trigger in &triggers {
                    if trigger.stands(connection)? {
                        continue;
                    }
                    trigger.make(connection)?;
                }
                Ok(())
            });
            match done {
                Err(Error::Conflict(_)) if tries < FENCE_TRIES => tries += 1,
                Err(Error::Conflict(_)) => return Err(Error::FenceBlocked(spot.table.clone())),
                Err(Error::Denied(_)) => return Err(Error::MayNotFence(spot.table.clone())),
                outcome => return outcome,
            }
            std::thread::sleep(std::time::Duration::from_millis(200));
        }
    }

    /// Whether PostgreSQL lets this account make a trigger and its function; MariaDB says it when it is made.
    fn may_fence(&self, spot: &Spot) -> Result<(), Error> {
        if self.sql() != Sql::Postgres {
            return Ok(());
        }
        let may = Query::new("SELECT CASE WHEN has_table_privilege(to_regclass(")
            .owned(self.sql().name(&spot.table))
            .sql(
                ")::oid, 'TRIGGER') AND has_schema_privilege(current_schema(), 'CREATE') THEN 'yes' ELSE 'no' END AS value",
            );
        let may: Vec<Name> = self.read_with(|connection| may.load(connection))?;
        if may.iter().any(|may| may.value == "yes") { Ok(()) } else { Err(Error::MayNotFence(spot.table.clone())) }
    }

    fn triggers(&self, kid: KeyId, spot: &Spot) -> Result<Vec<Trigger>, Error> {
        Ok(match self.sql() {
            Sql::Sqlite => Trigger::of_sqlite(kid, spot).into(),
            Sql::Postgres => vec![Trigger::of_postgres(kid, spot, &self.looked(spot)?)],
            Sql::Mariadb => Trigger::of_mariadb(kid, spot).into(),
        })
    }

    /// Those of `spots` where the fence for `kid` is not there, or not as it must be.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    pub fn missing_fences(&self, kid: KeyId, spots: &[Spot]) -> Result<Vec<Spot>, Error> {
        let mut missing = Vec::new();
        for spot in spots {
            let triggers = self.triggers(kid, spot)?;
            let stand = self.read_with(|connection| {
                for trigger in &triggers {
                    if !trigger.stands(connection)? {
                        return Ok(false);
                    }
                }
                Ok(true)
            })?;
            if !stand {
                missing.push(spot.clone());
            }
        }
        Ok(missing)
    }

    /// Takes every fence for `kid` away: once the key is destroyed, nothing can come under it again.
    ///
    /// # Errors
    /// [`Error::ReadOnly`], [`Error::Unavailable`].
    pub fn drop_fence(&self, kid: KeyId) -> Result<(), Error> {
        self.write(|connection| {
            let query = match connection.sql() {
                Sql::Sqlite => Query::new(
                    "SELECT 'DROP TRIGGER main.\"' || name || '\"' AS value FROM main.sqlite_schema WHERE type = 'trigger' \
                     AND name GLOB ",
                )
                .owned(format!("{PREFIX}{kid}_*")),
                Sql::Postgres => Query::new(
                    "SELECT 'DROP TRIGGER ' || quote_ident(g.tgname) || ' ON ' || g.tgrelid::regclass || '; DROP FUNCTION ' || \
                     g.tgfoid::regprocedure AS value FROM pg_trigger g WHERE NOT g.tgisinternal AND g.tgparentid = 0 AND \
                     left(g.tgname, 32) = ",
                )
                .owned(format!("{PREFIX}{kid}_")),
                Sql::Mariadb => Query::new(
                    "SELECT CONCAT('DROP TRIGGER `', TRIGGER_NAME, '`') AS value FROM information_schema.TRIGGERS \
                     WHERE TRIGGER_SCHEMA = DATABASE() AND LEFT(TRIGGER_NAME, 32) = ",
                )
                .owned(format!("{PREFIX}{kid}_")),
            };
            let drops: Vec<Name> = query.load(connection)?;
            for Name { value } in drops {
                connection.run(&value)?;
            }
            Ok(())
        })
    }

    /// Triggers of others that fire when a value of this table changes: one that keeps history would bring values
    /// under an old key back.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    pub fn other_triggers(&self, table: &str) -> Result<Vec<String>, Error> {
        self.read_with(|connection| {
            let query = match connection.sql() {
                Sql::Sqlite => Query::new(
                    "SELECT name AS value FROM main.sqlite_schema WHERE type = 'trigger' AND tbl_name COLLATE NOCASE = ",
                )
                .text(super::sql::bare(table))
                .sql(&format!(" AND name NOT GLOB '{PREFIX}*' ORDER BY name")),
                Sql::Postgres => Query::new(
                    "SELECT tgname::text AS value FROM pg_trigger WHERE NOT tgisinternal AND tgrelid = to_regclass(",
                )
                .owned(Sql::Postgres.name(table))
                .sql(&format!(") AND left(tgname, {}) <> '{PREFIX}' ORDER BY tgname", PREFIX.len())),
                Sql::Mariadb => Query::new(
                    "SELECT TRIGGER_NAME AS value FROM information_schema.TRIGGERS WHERE EVENT_OBJECT_SCHEMA = DATABASE() \
                     AND BINARY EVENT_OBJECT_TABLE = ",
                )
                .text(table)
                .sql(&format!(" AND LEFT(TRIGGER_NAME, {}) <> '{PREFIX}' ORDER BY TRIGGER_NAME", PREFIX.len())),
            };
            let names: Vec<Name> = query.load(connection)?;
            Ok(names.into_iter().map(|name| name.value).collect())
        })
    }
}

/// The key that a fence of ours refused, if this is its refusal: the value has to be sealed again.
pub(super) fn refused_key(message: &str) -> Option<KeyId> {
    message[message.find(REFUSAL)?..].get(REFUSAL.len()..)?.get(..16)?.parse().ok()
}

struct Trigger {
    name: String,
    /// The table as the schema spells it.
    table: String,
    /// What makes it.
    make: Vec<String>,
    /// What the database keeps of it, word for word.
    kept: String,
}

impl Trigger {
    /// A name that says which column, whatever that is called.
    fn name(kid: KeyId, place: &str) -> String {
        format!("{PREFIX}{kid}_{}", hex::encode(&Sha256::digest(place)[..6]))
    }

    fn of_sqlite(kid: KeyId, spot: &Spot) -> [Self; 2] {
        let sql = Sql::Sqlite;
        let value = sql.quote(&spot.column);
        let names = |row: &str| sql.names(&format!("{row}.{value}"), kid);
        let changed = format!("CAST(OLD.{value} AS BLOB) IS NOT CAST(NEW.{value} AS BLOB)");
        let event = |letter: &str, event: &str, when: String| {
            let place = format!("{}\0{}", spot.table, spot.column).to_lowercase();
            let name = format!("{}_{letter}", Self::name(kid, &place));
            let kept = format!(
                "CREATE TRIGGER main.{} BEFORE {event} ON {} WHEN {when} BEGIN SELECT RAISE(ABORT, '{REFUSAL}{kid}: seal the value again'); END",
                sql.quote(&name),
                sql.quote(super::sql::bare(&spot.table)),
            );
            let drop = format!("DROP TRIGGER IF EXISTS main.{}", sql.quote(&name));
            Self { name, table: spot.table.clone(), make: vec![drop, kept.clone()], kept }
        };
        [
            event("i", "INSERT", names("NEW")),
            event("u", &format!("UPDATE OF {value}"), format!("{} AND {changed}", names("NEW"))),
        ]
    }

    /// One trigger and its function, which fires in replication as well.
    fn of_postgres(kid: KeyId, spot: &Spot, looked: &Looked) -> Self {
        let sql = Sql::Postgres;
        let name = Self::name(kid, &format!("{}\0{}", spot.table, spot.column));
        let of = |row: &str| looked.value.replacen("t.", &format!("{row}."), 1);
        let kept = format!(
            "BEGIN\n  IF {} AND (TG_OP = 'INSERT' OR ({})::text COLLATE \"C\" IS DISTINCT FROM ({})::text COLLATE \"C\") THEN\n    \
             RAISE EXCEPTION '{REFUSAL}{kid}: seal the value again';\n  END IF;\n  RETURN NEW;\nEND",
            sql.names(&of("NEW"), kid),
            of("OLD"),
            of("NEW"),
        );
        let (quoted, table) = (sql.quote(&name), sql.name(&spot.table));
        let make = vec![
            format!("DROP TRIGGER IF EXISTS {quoted} ON {table}"),
            format!(
                "CREATE OR REPLACE FUNCTION {quoted}() RETURNS trigger LANGUAGE plpgsql AS $hardwrap${kept}$hardwrap$"
            ),
            format!(
                "CREATE TRIGGER {quoted} BEFORE INSERT OR UPDATE ON {table} FOR EACH ROW EXECUTE FUNCTION {quoted}()"
            ),
            format!("ALTER TABLE {table} ENABLE ALWAYS TRIGGER {quoted}"),
        ];
        Self { name, table: spot.table.clone(), make, kept }
    }

    fn of_mariadb(kid: KeyId, spot: &Spot) -> [Self; 2] {
        let sql = Sql::Mariadb;
        let value = sql.quote(&spot.column);
        let event = |letter: &str, event: &str, changed: String| {
            let place = format!("{}\0{}", spot.table, spot.column.to_lowercase());
            let name = format!("{}_{letter}", Self::name(kid, &place));
            let kept = format!(
                "IF {}{changed} THEN SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = '{REFUSAL}{kid}: seal the value again'; END IF",
                sql.names(&format!("NEW.{value}"), kid),
            );
            let make = format!(
                "CREATE OR REPLACE TRIGGER {} BEFORE {event} ON {} FOR EACH ROW {kept}",
                sql.quote(&name),
                sql.name(&spot.table)
            );
            Self { name, table: spot.table.clone(), make: vec![make], kept }
        };
        let changed = format!(" AND NOT (CAST(OLD.{value} AS BINARY) <=> CAST(NEW.{value} AS BINARY))");
        [event("i", "INSERT", String::new()), event("u", "UPDATE", changed)]
    }

    fn make(&self, connection: &mut AnyConnection) -> Result<(), Error> {
        self.make.iter().try_for_each(|statement| connection.run(statement))
    }

    /// Whether it is there, word for word, and fires.
    fn stands(&self, connection: &mut AnyConnection) -> Result<bool, Error> {
        let query = match connection.sql() {
            Sql::Sqlite => Query::new("SELECT sql AS value FROM main.sqlite_schema WHERE type = 'trigger' AND name = ")
                .text(&self.name),
            // Row, before, insert and update; always; no condition, no arguments. A partition has its own of each.
            Sql::Postgres => Query::new(
                "SELECT p.prosrc AS value FROM pg_trigger g JOIN pg_proc p ON p.oid = g.tgfoid \
                 JOIN pg_language l ON l.oid = p.prolang WHERE g.tgenabled = 'A' AND g.tgtype = 23 AND g.tgqual IS NULL \
                 AND g.tgnargs = 0 AND g.tgattr::text = '' AND l.lanname = 'plpgsql' AND p.proconfig IS NULL AND g.tgname = ",
            )
            .text(&self.name)
            .sql(" AND g.tgrelid = to_regclass(")
            .owned(Sql::Postgres.name(&self.table))
            .sql(
                ") AND NOT EXISTS (SELECT 1 FROM pg_partition_tree(g.tgrelid) x WHERE x.relid <> g.tgrelid AND NOT EXISTS \
                 (SELECT 1 FROM pg_trigger o WHERE o.tgrelid = x.relid AND o.tgfoid = g.tgfoid AND o.tgenabled = 'A'))",
            ),
            Sql::Mariadb => Query::new(
                "SELECT ACTION_STATEMENT AS value FROM information_schema.TRIGGERS WHERE ACTION_TIMING = 'BEFORE' \
                 AND TRIGGER_SCHEMA = DATABASE() AND TRIGGER_NAME = ",
            )
            .text(&self.name)
            .sql(" AND BINARY EVENT_OBJECT_TABLE = ")
            .text(&self.table)
            .sql(" AND EVENT_MANIPULATION = ")
            .text(if self.name.ends_with("_i") { "INSERT" } else { "UPDATE" }),
        };
        let found: Vec<Name> = query.load(connection)?;
        // SQLite keeps the text but for the schema's name before that of the trigger.
        let plain = |sql: &str| sql.replacen("CREATE TRIGGER main.", "CREATE TRIGGER ", 1);
        Ok(found.iter().any(|found| plain(&found.value) == plain(&self.kept)))
    }
}

#[derive(QueryableByName)]
struct Name {
    #[diesel(sql_type = Text)]
    value: String,
}

/// How often the fence is tried where a transaction holds the table.
const FENCE_TRIES: u32 = 5;

const PREFIX: &str = "hardwrap_fence_";
const REFUSAL: &str = "hardwrap: the database is fenced against key ";
