//! What must be true of a run for a transition to happen, checked in the UPDATE itself.

use diesel::prelude::*;
use diesel::sql_types::{BigInt, Binary, Nullable};

use super::{RunId, Status, Worker};
use crate::store::connection::AnyConnection;
use crate::store::query::Query;
use crate::store::sql::Sql;
use crate::store::{Db, Error};

/// What became of a transition. Only [`Answer::Moved`] changed anything.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[must_use]
pub enum Answer {
    /// It happened.
    Moved,
    /// There is no such run.
    NoSuchRun,
    /// The run stands elsewhere.
    InState(Status),
    /// Another worker has the run, or nobody.
    NotYours,
    /// The run has no lease, or one that has not ended.
    NotStale,
    /// The state that was opened is not the one stored any more: look again.
    Changed,
}

/// The conditions of one transition.
pub(super) struct Guard<'a> {
    /// Where the run must stand.
    pub(super) from: &'a [Status],
    /// Who must have it.
    pub(super) worker: Option<&'a Worker>,
    /// Before when a lease must have ended.
    pub(super) stale_before: Option<i64>,
    /// A column, and the bytes it must still hold.
    pub(super) unchanged: Option<(&'static str, Option<&'a [u8]>)>,
}

impl<'a> Guard<'a> {
    pub(super) fn from(from: &'a [Status]) -> Self {
        Self { from, worker: None, stale_before: None, unchanged: None }
    }

    /// The run is running, and this worker has it.
    pub(super) fn mine(worker: &'a Worker) -> Self {
        Self { worker: Some(worker), ..Self::from(&[Status::Running]) }
    }

    /// The run is running, and its lease has ended.
    pub(super) fn stale(now: i64) -> Self {
        Self { stale_before: Some(now), ..Self::from(&[Status::Running]) }
    }

    fn conditions(&self, sql: Sql) -> Query<'a> {
        let mut query = Query::new(" AND ").append(status_in(sql, self.from));
        if let Some(worker) = self.worker {
            query = sql.is_text(query.sql(" AND "), "t.claimed_by", worker.as_str());
        }
        if let Some(now) = self.stale_before {
            query = query.sql(" AND ").append(lease_ended(now));
        }
        if let Some((column, bytes)) = self.unchanged {
            query = query.sql(&format!(" AND {}{}", sql.as_bytes(&sql.of_t(column)), sql.same()));
            query = query.optional_bytes(bytes);
        }
        query
    }
}

/// Sets what `set` says if the guard allows it, and else says why not, both in one transaction.
pub(super) fn transit<'a>(db: &Db, id: &'a RunId, set: Query<'a>, guard: &Guard<'a>) -> Result<Answer, Error> {
    let sql = db.sql();
    let update = Query::new(format!("UPDATE {} SET ", sql.table("tx_nrllm_agentrun"))).append(set).sql(" WHERE ");
    let update = sql.is_text(update, "t.uuid", id.as_str()).append(guard.conditions(sql));
    db.write(|connection| match update.execute(connection)? {
        1 => Ok(Answer::Moved),
        0 => why(connection, id, guard),
        _ => Err(Error::KeyNotUnique("tx_nrllm_agentrun.uuid".to_owned())),
    })
}

/// `t.status IN (..)`, byte for byte; on a server by the index first.
pub(super) fn status_in<'a>(sql: Sql, statuses: &[Status]) -> Query<'a> {
    let listed = |query: Query<'a>| {
        let list = statuses.iter().enumerate().fold(query.sql(" IN ("), |query, (index, status)| {
            if index > 0 { query.sql(", ").text(status.name()) } else { query.text(status.name()) }
        });
        list.sql(")")
    };
    match sql {
        Sql::Sqlite => listed(Query::new(sql.exactly("t.status"))),
        _ => listed(listed(Query::new("(t.status")).sql(&format!(" AND {}", sql.exactly("t.status")))).sql(")"),
    }
}

/// A lease was given and has ended.
pub(super) fn lease_ended<'a>(now: i64) -> Query<'a> {
    Query::new("t.lease_expires > 0 AND t.lease_expires < ").integer(now)
}

fn why(connection: &mut AnyConnection, id: &RunId, guard: &Guard<'_>) -> Result<Answer, Error> {
    let Some(standing) = standing(connection, id)? else { return Ok(Answer::NoSuchRun) };
    let status = standing.status(id)?;
    if !guard.from.contains(&status) {
        return Ok(Answer::InState(status));
    }
    if guard.worker.is_some_and(|worker| standing.claimed_by.as_deref() != Some(worker.as_str().as_bytes())) {
        return Ok(Answer::NotYours);
    }
    if guard.stale_before.is_some_and(|now| {
        let lease = standing.lease_expires.unwrap_or(0);
        lease <= 0 || lease >= now
    }) {
        return Ok(Answer::NotStale);
    }
    Ok(Answer::Changed)
}

/// Where a run stands, without its states: one read by an index, and no key is asked.
pub(super) fn standing(connection: &mut AnyConnection, id: &RunId) -> Result<Option<Standing>, Error> {
    let sql = connection.sql();
    let query = Query::new(format!(
        "SELECT {} AS status, {} AS claimed_by, {} AS lease_expires FROM {} WHERE ",
        sql.as_bytes("t.status"),
        sql.as_bytes("t.claimed_by"),
        sql.integer("t.lease_expires"),
        sql.table("tx_nrllm_agentrun")
    ));
    let rows: Vec<Standing> = sql.is_text(query, "t.uuid", id.as_str()).load(connection)?;
    Ok(rows.into_iter().next())
}

#[derive(QueryableByName)]
pub(super) struct Standing {
    #[diesel(sql_type = Nullable<Binary>)]
    status: Option<Vec<u8>>,
    #[diesel(sql_type = Nullable<Binary>)]
    claimed_by: Option<Vec<u8>>,
    #[diesel(sql_type = Nullable<BigInt>)]
    lease_expires: Option<i64>,
}

impl Standing {
    pub(super) fn status(&self, id: &RunId) -> Result<Status, Error> {
        self.status
            .as_deref()
            .and_then(|bytes| std::str::from_utf8(bytes).ok())
            .and_then(Status::from_name)
            .ok_or_else(|| Error::UnknownStatus(id.to_string()))
    }
}
