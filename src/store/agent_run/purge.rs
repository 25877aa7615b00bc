//! Retention: old runs go, with their events, and never under a worker's hands.

use diesel::prelude::*;
use diesel::sql_types::BigInt;

use super::guard::status_in;
use super::{AgentRuns, Status};
use crate::store::connection::AnyConnection;
use crate::store::query::Query;
use crate::store::sql::Sql;
use crate::store::{Db, Error};

/// After how many days runs are deleted, counted from when they were made. 0 means no window of its own: such runs
/// are kept. It never means now.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Retention {
    /// Days for runs that have ended.
    pub finished: u32,
    /// Days for runs that have not: queued, running, waiting.
    pub unfinished: u32,
}

/// What was deleted.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Purged {
    /// Runs that had ended.
    pub finished: u64,
    /// Runs that had not.
    pub unfinished: u64,
    /// Events of both.
    pub events: u64,
}

impl AgentRuns {
    /// Deletes the runs that are older than their window, 500 to a transaction, their events first. A run whose
    /// lease has not ended is never deleted, nor one that has changed sides since it was found: the DELETE looks again.
    ///
    /// # Errors
    /// [`Error::Unavailable`]; the transactions done until then stay done.
    pub fn purge(&self, retention: Retention, now: i64) -> Result<Purged, Error> {
        Self::purge_in(&self.db, retention, now)
    }

    /// [`AgentRuns::purge`] where no key is at hand.
    ///
    /// # Errors
    /// [`Error::Unavailable`], [`Error::NoTable`]; the transactions done until then stay done.
    pub fn purge_in(db: &Db, retention: Retention, now: i64) -> Result<Purged, Error> {
        let (finished, events_of_finished) = Self::purge_side(db, Side::Finished, retention.finished, now)?;
        let (unfinished, events_of_unfinished) = Self::purge_side(db, Side::Unfinished, retention.unfinished, now)?;
        Ok(Purged { finished, unfinished, events: events_of_finished + events_of_unfinished })
    }

    /// What [`AgentRuns::purge`] would delete now, by the same conditions.
    ///
    /// # Errors
    /// [`Error::Unavailable`], [`Error::NoTable`].
    pub fn due(db: &Db, retention: Retention, now: i64) -> Result<Purged, Error> {
        let mut purged = Purged::default();
        for (side, days) in [(Side::Finished, retention.finished), (Side::Unfinished, retention.unfinished)] {
            if days == 0 {
                continue;
            }
            let sql = db.sql();
            let due = || due(sql, side, before(days, now), now);
            let runs = sql.table("tx_nrllm_agentrun");
            let count = |query: Query<'_>| -> Result<u64, Error> {
                let rows: Vec<Uid> = db.read_with(|connection| query.load(connection))?;
                Ok(rows.first().map_or(0, |row| row.uid.unsigned_abs()))
            };
            let found = count(Query::new(format!("SELECT COUNT(*) AS uid FROM {runs} WHERE ")).append(due()))?;
            match side {
                Side::Finished => purged.finished = found,
                Side::Unfinished => purged.unfinished = found,
            }
            let events = format!(
                "SELECT COUNT(*) AS uid FROM {} WHERE run IN (SELECT t.uid FROM {runs} WHERE ",
                sql.name("tx_nrllm_agentrun_event")
            );
            purged.events += count(Query::new(events).append(due()).sql(")"))?;
        }
        Ok(purged)
    }

    fn purge_side(db: &Db, side: Side, days: u32, now: i64) -> Result<(u64, u64), Error> {
        let (mut runs, mut events) = (0, 0);
        if days == 0 {
            return Ok((runs, events));
        }
        let before = before(days, now);
        let mut after = i64::MIN;
        loop {
            let chunk = db.write(|connection| chunk(connection, side, before, now, after))?;
            let Some(chunk) = chunk else { return Ok((runs, events)) };
            runs += chunk.runs as u64;
            events += chunk.events as u64;
            after = chunk.last;
        }
    }
}

fn before(days: u32, now: i64) -> i64 {
    now.saturating_sub(i64::from(days) * DAY)
}

#[derive(Clone, Copy)]
enum Side {
    Finished,
    Unfinished,
}

struct Chunk {
    runs: usize,
    events: usize,
    last: i64,
}

#[derive(QueryableByName)]
struct Uid {
    #[diesel(sql_type = BigInt)]
    uid: i64,
}

fn chunk(
    connection: &mut AnyConnection,
    side: Side,
    before: i64,
    now: i64,
    after: i64,
) -> Result<Option<Chunk>, Error> {
    let sql = connection.sql();
    let runs = sql.table("tx_nrllm_agentrun");
    let uids: Vec<Uid> = Query::new(format!("SELECT {} AS uid FROM {runs} WHERE t.uid > ", sql.integer("t.uid")))
        .integer(after)
        .sql(" AND ")
        .append(due(sql, side, before, now))
        .sql(" ORDER BY t.uid LIMIT ")
        .integer(CHUNK)
        .load(connection)?;
    let Some(Uid { uid: last }) = uids.last() else { return Ok(None) };
    let again = || {
        let listed = uids.iter().enumerate().fold(Query::new("t.uid IN ("), |query, (index, row)| {
            if index > 0 { query.sql(", ").integer(row.uid) } else { query.integer(row.uid) }
        });
        listed.sql(") AND ").append(due(sql, side, before, now))
    };
    let events = sql.name("tx_nrllm_agentrun_event");
    let events = Query::new(format!("DELETE FROM {events} WHERE run IN (SELECT t.uid FROM {runs} WHERE "))
        .append(again())
        .sql(")")
        .execute(connection)?;
    // MariaDB wants to be told from which table, where that has a name of its own.
    let delete = if sql == Sql::Mariadb { "DELETE t FROM" } else { "DELETE FROM" };
    let runs = Query::new(format!("{delete} {runs} WHERE ")).append(again()).execute(connection)?;
    Ok(Some(Chunk { runs, events, last: *last }))
}

/// A run of this side, made before the cutoff, whose lease, if it has one, ended before now, whatever its status. A
/// status that this version does not know counts as unfinished.
fn due<'a>(sql: Sql, side: Side, before: i64, now: i64) -> Query<'a> {
    let side = match side {
        Side::Finished => status_in(sql, &Status::FINISHED),
        Side::Unfinished => Query::new("NOT ").append(status_in(sql, &Status::FINISHED)),
    };
    side.sql(" AND t.crdate < ").integer(before).sql(" AND COALESCE(t.lease_expires, 0) < ").integer(now)
}

const CHUNK: i64 = 500;
const DAY: i64 = 86_400;
