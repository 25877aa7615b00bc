//! What the database keeps of rotations: which began, how far they came, what listeners are to hear, and when the whole
//! database was searched.

use diesel::prelude::*;
use diesel::sql_types::{BigInt, Nullable, Text};

use super::query::Query;
use super::schema::now;
use super::{Db, Error};
use crate::provider::KeyId;

impl Db {
    /// Notes that values are being moved to `target`. Noted before, it changes nothing.
    ///
    /// # Errors
    /// [`Error::ReadOnly`], [`Error::Unavailable`].
    pub fn begin_rotation(&self, target: KeyId, mode: &str) -> Result<(), Error> {
        let now = now();
        self.write(|connection| {
            let known = Query::new("SELECT target AS id, mode AS event FROM hardwrap_rotation WHERE target = ");
            let known: Vec<Event> = known.text(&target.to_string()).load(connection)?;
            if !known.is_empty() {
                return Ok(());
            }
            Query::new("INSERT INTO hardwrap_rotation (target, mode, started, moved) VALUES (")
                .text(&target.to_string())
                .sql(", ")
                .text(mode)
                .sql(", ")
                .text(&now)
                .sql(", 0)")
                .execute(connection)
                .map(drop)
        })
    }

    /// Notes that the rotation to `target` is proven, and puts `event` into the outbox, in one transaction. Noted
    /// before, it changes nothing, and says so.
    ///
    /// # Errors
    /// [`Error::ReadOnly`], [`Error::Unavailable`].
    pub fn prove_rotation(&self, target: KeyId, id: &str, event: &str) -> Result<bool, Error> {
        let now = now();
        self.write(|connection| {
            let proven = Query::new("UPDATE hardwrap_rotation SET proven = ")
                .text(&now)
                .sql(" WHERE proven IS NULL AND target = ")
                .text(&target.to_string())
                .execute(connection)?;
            if proven == 0 {
                return Ok(false);
            }
            Query::new("INSERT INTO hardwrap_outbox (id, event, made) VALUES (")
                .text(id)
                .sql(", ")
                .text(event)
                .sql(", ")
                .text(&now)
                .sql(")")
                .execute(connection)?;
            Ok(true)
        })
    }

    /// Every rotation, oldest first.
    ///
    /// # Errors
    /// [`Error::NoTable`] before [`Db::upgrade`], [`Error::Unavailable`].
    pub fn rotations(&self) -> Result<Vec<RotationFact>, Error> {
        self.read_with(|connection| {
            Query::new(
                "SELECT target, mode, started, moved, proven, weaker FROM hardwrap_rotation ORDER BY started, target",
            )
            .load(connection)
        })
    }

    /// The events that no listener has heard yet: id and JSON.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    pub fn outbox(&self) -> Result<Vec<(String, String)>, Error> {
        let rows: Vec<Event> = self.read_with(|connection| {
            Query::new("SELECT id, event FROM hardwrap_outbox WHERE delivered IS NULL").load(connection)
        })?;
        Ok(rows.into_iter().map(|row| (row.id, row.event)).collect())
    }

    /// Notes that every listener has heard the event `id`.
    ///
    /// # Errors
    /// [`Error::ReadOnly`], [`Error::Unavailable`].
    pub fn note_delivered(&self, id: &str) -> Result<(), Error> {
        let now = now();
        self.write(|connection| {
            Query::new("UPDATE hardwrap_outbox SET delivered = ")
                .text(&now)
                .sql(" WHERE id = ")
                .text(id)
                .execute(connection)
                .map(drop)
        })
    }

    /// Notes that the whole database was searched now, and what was found.
    ///
    /// # Errors
    /// [`Error::ReadOnly`], [`Error::Unavailable`].
    pub fn note_discovery(&self, columns: usize, unregistered: usize) -> Result<(), Error> {
        let now = now();
        let count = |number: usize| i64::try_from(number).unwrap_or(i64::MAX);
        self.write(|connection| {
            Query::new("DELETE FROM hardwrap_discovery").execute(connection)?;
            Query::new("INSERT INTO hardwrap_discovery (id, searched, columns, unregistered) VALUES (1, ")
                .text(&now)
                .sql(", ")
                .integer(count(columns))
                .sql(", ")
                .integer(count(unregistered))
                .sql(")")
                .execute(connection)
                .map(drop)
        })
    }

    /// When the whole database was searched last, and what was found.
    ///
    /// # Errors
    /// [`Error::NoTable`] before [`Db::upgrade`], [`Error::Unavailable`].
    pub fn last_discovery(&self) -> Result<Option<LastDiscovery>, Error> {
        let rows: Vec<LastDiscovery> = self.read_with(|connection| {
            Query::new("SELECT searched, columns, unregistered FROM hardwrap_discovery").load(connection)
        })?;
        Ok(rows.into_iter().next())
    }
}

/// One rotation.
#[derive(Clone, Debug, Eq, PartialEq, QueryableByName)]
pub struct RotationFact {
    /// The key that values were moved to.
    #[diesel(sql_type = Text)]
    pub target: String,
    /// `online` or `atomic`.
    #[diesel(sql_type = Text)]
    pub mode: String,
    /// When it began, RFC 3339 in UTC.
    #[diesel(sql_type = Text)]
    pub started: String,
    /// How many values were moved.
    #[diesel(sql_type = BigInt)]
    pub moved: i64,
    /// When nothing was left under any other key, if that was proven.
    #[diesel(sql_type = Nullable<Text>)]
    pub proven: Option<String>,
    /// What stood in for the database's fence where this account could make no trigger: `waited`.
    #[diesel(sql_type = Nullable<Text>)]
    pub weaker: Option<String>,
}

/// The last search of the whole database.
#[derive(Clone, Debug, Eq, PartialEq, QueryableByName)]
pub struct LastDiscovery {
    /// When, RFC 3339 in UTC.
    #[diesel(sql_type = Text)]
    pub searched: String,
    /// How many columns were searched.
    #[diesel(sql_type = BigInt)]
    pub columns: i64,
    /// In how many unregistered ones envelopes stood.
    #[diesel(sql_type = BigInt)]
    pub unregistered: i64,
}

#[derive(QueryableByName)]
struct Event {
    #[diesel(sql_type = Text)]
    id: String,
    #[diesel(sql_type = Text)]
    event: String,
}
