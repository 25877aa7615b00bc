//! The database fence: triggers that refuse a new value under a fenced key. The token's fence stops wrapping; this one
//! stops a value that was wrapped before, and is stored late. A value that stays as it is passes.

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel::sql_types::Text;
use sha2::{Digest, Sha256};

use super::sql::{self, Query};
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
    /// Whether this is where `column` stands.
    pub fn is(&self, column: &Column) -> bool {
        self.is_named(column.table(), column.name())
    }

    /// Whether this is the column `column` of `table`, by SQLite's rules for names: `main.` may stand before the table,
    /// and case does not count.
    pub(super) fn is_named(&self, table: &str, column: &str) -> bool {
        sql::bare(&self.table).eq_ignore_ascii_case(sql::bare(table)) && self.column.eq_ignore_ascii_case(column)
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
        self.write(|connection| {
            for trigger in spots.iter().flat_map(|spot| Trigger::both(kid, spot)) {
                if trigger.stands(connection)? {
                    continue;
                }
                connection.batch_execute(&format!("DROP TRIGGER IF EXISTS main.{}", sql::quote(&trigger.name)))?;
                connection.batch_execute(&trigger.sql)?;
            }
            Ok(true)
        })
    }

    /// Those of `spots` where the fence for `kid` is not there, or not as it must be.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    pub fn missing_fences(&self, kid: KeyId, spots: &[Spot]) -> Result<Vec<Spot>, Error> {
        self.read_with(|connection| {
            let mut missing = Vec::new();
            for spot in spots {
                for trigger in Trigger::both(kid, spot) {
                    if !trigger.stands(connection)? && !missing.contains(spot) {
                        missing.push(spot.clone());
                    }
                }
            }
            Ok(missing)
        })
    }

    /// Takes every fence for `kid` away: once the key is destroyed, nothing can come under it again.
    ///
    /// # Errors
    /// [`Error::ReadOnly`], [`Error::Unavailable`].
    pub fn drop_fence(&self, kid: KeyId) -> Result<(), Error> {
        self.write(|connection| {
            let names: Vec<Name> =
                Query::new("SELECT name AS value FROM main.sqlite_schema WHERE type = 'trigger' AND name GLOB ")
                    .text(&format!("{PREFIX}{kid}_*"))
                    .load(connection)?;
            for Name { value } in names {
                connection.batch_execute(&format!("DROP TRIGGER main.{}", sql::quote(&value)))?;
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
            let names: Vec<Name> = Query::new(
                "SELECT name AS value FROM main.sqlite_schema WHERE type = 'trigger' AND tbl_name COLLATE NOCASE = ",
            )
            .text(sql::bare(table))
            .sql(&format!(" AND name NOT GLOB '{PREFIX}*' ORDER BY name"))
            .load(connection)?;
            Ok(names.into_iter().map(|name| name.value).collect())
        })
    }
}

/// The key that a fence of ours refused, if this is its refusal: the value has to be sealed again.
pub(super) fn refused_key(message: &str) -> Option<KeyId> {
    message.strip_prefix(REFUSAL)?.get(..16)?.parse().ok()
}

struct Trigger {
    name: String,
    sql: String,
}

impl Trigger {
    fn both(kid: KeyId, spot: &Spot) -> [Self; 2] {
        let value = sql::quote(&spot.column);
        let names = |row: &str| sql::names(&format!("{row}.{value}"), kid);
        let changed = format!("CAST(OLD.{value} AS BLOB) IS NOT CAST(NEW.{value} AS BLOB)");
        let event = |letter: &str, event: &str, when: String| {
            // The name says which column, whatever that is called.
            let place = Sha256::digest(format!("{}\0{}", spot.table, spot.column).to_lowercase());
            let name = format!("{PREFIX}{kid}_{}_{letter}", hex::encode(&place[..6]));
            let sql = format!(
                "CREATE TRIGGER main.{} BEFORE {event} ON {} WHEN {when} BEGIN SELECT RAISE(ABORT, '{REFUSAL}{kid}: seal the value again'); END",
                sql::quote(&name),
                sql::quote(sql::bare(&spot.table)),
            );
            Self { name, sql }
        };
        [
            event("i", "INSERT", names("NEW")),
            event("u", &format!("UPDATE OF {value}"), format!("{} AND {changed}", names("NEW"))),
        ]
    }

    /// Whether it is there, word for word.
    fn stands(&self, connection: &mut SqliteConnection) -> Result<bool, Error> {
        let found: Vec<Name> =
            Query::new("SELECT sql AS value FROM main.sqlite_schema WHERE type = 'trigger' AND name = ")
                .text(&self.name)
                .load(connection)?;
        // SQLite keeps the text but for the schema's name before that of the trigger.
        let kept = |sql: &str| sql.replacen("CREATE TRIGGER main.", "CREATE TRIGGER ", 1);
        Ok(found.iter().any(|found| kept(&found.value) == kept(&self.sql)))
    }
}

#[derive(QueryableByName)]
struct Name {
    #[diesel(sql_type = Text)]
    value: String,
}

const PREFIX: &str = "hardwrap_fence_";
const REFUSAL: &str = "hardwrap: the database is fenced against key ";
