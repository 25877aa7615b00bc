//! The repository of agent runs: every transition with its guard, and the look-ups.

use std::sync::Arc;

use serde::de::IgnoredAny;

use super::guard::{self, Guard, lease_ended, status_in, transit};
use super::run::RunParts;
use super::{Answer, Lease, NewRun, Outcome, Run, RunId, Settled, StaleRun, Status, Waiting, Worker};
use crate::codec::Codec;
use crate::column::{Column, Register};
use crate::store::query::Query;
use crate::store::stored::StoredText;
use crate::store::{Db, Error};

/// The agent runs of one database.
#[derive(Clone, Debug)]
pub struct AgentRuns {
    pub(super) db: Arc<Db>,
    pub(super) codec: Codec,
    pub(super) request: Column,
    pub(super) state: Column,
}

impl AgentRuns {
    /// Works on `db`, with the two columns as they are registered and as the schema describes them.
    ///
    /// # Errors
    /// [`Error::Unregistered`], [`Error::NotBoundToUuid`]; what [`ColumnFacts::usable`](crate::store::ColumnFacts)
    /// says of the table.
    pub fn new(db: Arc<Db>, codec: Codec, register: &Register) -> Result<Self, Error> {
        let mut columns = Vec::with_capacity(2);
        for name in [QUEUED_REQUEST, SUSPENDED_STATE] {
            let column = register.find(&format!("{TABLE}.{name}"))?;
            if column.row() != Some("uuid") {
                return Err(Error::NotBoundToUuid(column.to_string()));
            }
            columns.push(column.clone());
        }
        let mut described = Register::new(columns).map_err(|_| Error::Unfit("its agent runs are registered twice"))?;
        for facts in db.describe(&mut described)? {
            facts.usable()?;
        }
        let column = |name: &str| described.find(&format!("{TABLE}.{name}")).cloned();
        Ok(Self { request: column(QUEUED_REQUEST)?, state: column(SUSPENDED_STATE)?, db, codec })
    }

    /// Queues a new run with its request, sealed.
    ///
    /// # Errors
    /// [`Error::NotJson`], [`Error::Codec`], [`Error::RunExists`]; nothing was stored.
    pub fn enqueue(&self, new: &NewRun, request: &str, now: i64) -> Result<RunId, Error> {
        is_json(request)?;
        let id = new.id.clone().unwrap_or_else(RunId::random);
        again_if_fenced(|| {
            let sealed = self.seal(&self.request, &id, request)?;
            let columns = "status, queued_request";
            self.insert(new, &id, columns, Query::new("").text(Status::Queued.name()).sql(", ").text(&sealed), now)
        })?;
        Ok(id)
    }

    /// Starts a new run at once, under a lease, with nothing to seal.
    ///
    /// # Errors
    /// [`Error::RunExists`], [`Error::Unavailable`].
    pub fn start(&self, new: &NewRun, lease: &Lease, now: i64) -> Result<RunId, Error> {
        let id = new.id.clone().unwrap_or_else(RunId::random);
        let values = Query::new("")
            .text(Status::Running.name())
            .sql(", ")
            .text(lease.worker.as_str())
            .sql(", ")
            .integer(lease.expires)
            .sql(", ")
            .integer(now);
        self.insert(new, &id, "status, claimed_by, lease_expires, started_at", values, now)?;
        Ok(id)
    }

    /// Takes a queued run: queued → running. Both states stay.
    ///
    /// # Errors
    /// [`Error::Unavailable`], [`Error::UnknownStatus`].
    pub fn claim(&self, id: &RunId, lease: &Lease, now: i64) -> Result<Answer, Error> {
        transit(&self.db, id, claimed(lease, now), &Guard::from(&[Status::Queued]))
    }

    /// Takes a run whose human has answered: waiting → running. Both states stay.
    ///
    /// # Errors
    /// [`Error::Unavailable`], [`Error::UnknownStatus`].
    pub fn claim_for_resume(&self, id: &RunId, waiting: Waiting, lease: &Lease, now: i64) -> Result<Answer, Error> {
        transit(&self.db, id, claimed(lease, now), &Guard::from(&[waiting.status()]))
    }

    /// Takes a run only if the state that was opened is still the one stored.
    pub(super) fn claim_opened(
        &self,
        id: &RunId,
        from: Status,
        opened: (&'static str, Option<&StoredText>),
        lease: &Lease,
        now: i64,
    ) -> Result<Answer, Error> {
        let unchanged = Some((opened.0, opened.1.map(StoredText::bytes)));
        transit(&self.db, id, claimed(lease, now), &Guard { unchanged, ..Guard::from(&[from]) })
    }

    /// Suspends a run until a human allows what it wants to do: its state is sealed first, then running → waiting.
    ///
    /// # Errors
    /// [`Error::NotJson`], [`Error::Codec`]; the run still runs and its old state is untouched.
    pub fn suspend_for_approval(&self, id: &RunId, worker: &Worker, state: &str, now: i64) -> Result<Answer, Error> {
        self.suspend(id, worker, Waiting::Approval, state, now)
    }

    /// Suspends a run until a human answers: its state is sealed first, then running → waiting.
    ///
    /// # Errors
    /// [`Error::NotJson`], [`Error::Codec`]; the run still runs and its old state is untouched.
    pub fn suspend_for_input(&self, id: &RunId, worker: &Worker, state: &str, now: i64) -> Result<Answer, Error> {
        self.suspend(id, worker, Waiting::Input, state, now)
    }

    pub(super) fn suspend(
        &self,
        id: &RunId,
        worker: &Worker,
        waiting: Waiting,
        state: &str,
        now: i64,
    ) -> Result<Answer, Error> {
        is_json(state)?;
        again_if_fenced(|| {
            let sealed = self.seal(&self.state, id, state)?;
            let set = status(waiting.status(), now).sql(RELEASED).sql(", suspended_state = ").text(&sealed);
            transit(&self.db, id, set, &Guard::mine(worker))
        })
    }

    /// Prolongs the lease of a run that the worker has.
    ///
    /// # Errors
    /// [`Error::Unavailable`], [`Error::UnknownStatus`].
    pub fn renew_lease(&self, id: &RunId, lease: &Lease, now: i64) -> Result<Answer, Error> {
        let set = Query::new("lease_expires = ").integer(lease.expires).sql(", tstamp = ").integer(now);
        transit(&self.db, id, set, &Guard::mine(&lease.worker))
    }

    /// Notes that something is under way that must not be done twice, or that it is done.
    ///
    /// # Errors
    /// [`Error::Unavailable`], [`Error::UnknownStatus`].
    pub fn mark_pending_effect(&self, id: &RunId, worker: &Worker, pending: bool, now: i64) -> Result<Answer, Error> {
        let set = Query::new("pending_effect = ").integer(pending.into()).sql(", tstamp = ").integer(now);
        transit(&self.db, id, set, &Guard::mine(worker))
    }

    /// Gives a run back: running → queued. Its request and state stay.
    ///
    /// # Errors
    /// [`Error::Unavailable`], [`Error::UnknownStatus`].
    pub fn requeue(&self, id: &RunId, worker: &Worker, now: i64) -> Result<Answer, Error> {
        transit(&self.db, id, requeued(now), &Guard::mine(worker))
    }

    /// Takes a run back from a worker whose lease ended before `now`: running → queued. Its request and state stay.
    ///
    /// # Errors
    /// [`Error::Unavailable`], [`Error::UnknownStatus`].
    pub fn requeue_stale(&self, id: &RunId, now: i64) -> Result<Answer, Error> {
        transit(&self.db, id, requeued(now), &Guard::stale(now))
    }

    /// Gives up a run whose worker's lease ended before `now`: running → failed. Both states are emptied.
    ///
    /// # Errors
    /// [`Error::Unavailable`], [`Error::UnknownStatus`].
    pub fn dead_letter_stale(&self, id: &RunId, reason: &str, now: i64) -> Result<Answer, Error> {
        let set = ended(Status::Failed, now).sql(", termination_reason = ").text(cut(reason, 64));
        transit(&self.db, id, set, &Guard::stale(now))
    }

    /// Ends a run: unfinished → completed or failed, by the worker that has it where one is given. Both states are
    /// emptied, for good: never call this because a state could not be opened *now*.
    ///
    /// # Errors
    /// [`Error::Unavailable`], [`Error::UnknownStatus`].
    pub fn finish(&self, id: &RunId, worker: Option<&Worker>, outcome: &Outcome, now: i64) -> Result<Answer, Error> {
        let status = match outcome.settled {
            Settled::Completed => Status::Completed,
            Settled::Failed => Status::Failed,
        };
        let totals = &outcome.totals;
        #[expect(clippy::cast_precision_loss, reason = "the column has ten digits, a float has fifteen")]
        let cost = totals.cost_micros as f64 / 1_000_000.0;
        let set = ended(status, now)
            .sql(", error_class = ")
            .text(cut(&outcome.error_class, 255))
            .sql(", termination_reason = ")
            .text(cut(&outcome.termination_reason, 64))
            .sql(", iterations = ")
            .integer(totals.iterations)
            .sql(", truncated = ")
            .integer(totals.truncated.into())
            .sql(", total_prompt_tokens = ")
            .integer(totals.prompt_tokens)
            .sql(", total_completion_tokens = ")
            .integer(totals.completion_tokens)
            .sql(", total_tokens = ")
            .integer(totals.tokens)
            .sql(", estimated_cost = ")
            .real(cost);
        transit(&self.db, id, set, &Guard { worker, ..Guard::from(&Status::UNFINISHED) })
    }

    /// Calls a run off, wherever it stands and whoever has it. Asks no key: an unreadable run can be called off too.
    /// Both states are emptied.
    ///
    /// # Errors
    /// [`Error::Unavailable`], [`Error::UnknownStatus`].
    pub fn cancel(&self, id: &RunId, reason: &str, now: i64) -> Result<Answer, Error> {
        Self::cancel_in(&self.db, id, reason, now)
    }

    /// [`AgentRuns::cancel`] where no key is at hand.
    ///
    /// # Errors
    /// [`Error::Unavailable`], [`Error::UnknownStatus`], [`Error::NoTable`].
    pub fn cancel_in(db: &Db, id: &RunId, reason: &str, now: i64) -> Result<Answer, Error> {
        let set = ended(Status::Cancelled, now).sql(", termination_reason = ").text(cut(reason, 64));
        transit(db, id, set, &Guard::from(&Status::UNFINISHED))
    }

    /// Where a run stands, without reading its states; none if there is no such run.
    ///
    /// # Errors
    /// [`Error::Unavailable`], [`Error::UnknownStatus`].
    pub fn status(&self, id: &RunId) -> Result<Option<Status>, Error> {
        let standing = self.db.read_with(|connection| guard::standing(connection, id))?;
        standing.map(|standing| standing.status(id)).transpose()
    }

    /// One run, its states still sealed; none if there is no such run.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    pub fn find(&self, id: &RunId) -> Result<Option<Run>, Error> {
        let sql = self.db.sql();
        let query = sql.is_text(Query::new(RunParts::select(sql, true, "")).sql(" WHERE "), "t.uuid", id.as_str());
        Ok(self.load(&query)?.into_iter().next().map(Run::from))
    }

    /// The runs of one status, oldest first, their states still sealed: one bad run hides no other.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    pub fn in_status(&self, status: Status) -> Result<Vec<Run>, Error> {
        self.list(&[status])
    }

    /// The runs that wait for a worker, oldest first, their states still sealed.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    pub fn queued(&self) -> Result<Vec<Run>, Error> {
        self.list(&[Status::Queued])
    }

    /// The runs that wait for a human, oldest first, their states still sealed.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    pub fn waiting(&self) -> Result<Vec<Run>, Error> {
        self.list(&[Status::WaitingForApproval, Status::WaitingForInput])
    }

    /// The running runs whose lease ended before `now`, without their states.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    pub fn stale(&self, now: i64) -> Result<Vec<StaleRun>, Error> {
        let query = Query::new(RunParts::select(self.db.sql(), false, ""))
            .sql(" WHERE ")
            .append(status_in(self.db.sql(), &[Status::Running]))
            .sql(" AND ")
            .append(lease_ended(now))
            .sql(" ORDER BY t.uid");
        Ok(self.load(&query)?.into_iter().map(RunParts::stale).collect())
    }

    fn list(&self, statuses: &[Status]) -> Result<Vec<Run>, Error> {
        let query = Query::new(RunParts::select(self.db.sql(), true, ""))
            .sql(" WHERE ")
            .append(status_in(self.db.sql(), statuses))
            .sql(" ORDER BY t.crdate, t.uid");
        Ok(self.load(&query)?.into_iter().map(Run::from).collect())
    }

    fn load(&self, query: &Query<'_>) -> Result<Vec<RunParts>, Error> {
        self.db.read_with(|connection| query.load(connection))
    }

    fn seal(&self, column: &Column, id: &RunId, json: &str) -> Result<String, Error> {
        let row = id.row()?;
        Ok(self.codec.seal(&column.at(Some(&row))?, json.as_bytes())?)
    }

    fn insert(&self, new: &NewRun, id: &RunId, columns: &str, values: Query<'_>, now: i64) -> Result<(), Error> {
        let sql = self.db.sql();
        let insert = Query::new(format!(
            "INSERT INTO {} (uuid, pid, configuration_uid, configuration_identifier, be_user, crdate, \
             tstamp, {columns}) SELECT ",
            sql.name(TABLE)
        ))
        .text(id.as_str())
        .sql(", ")
        .integer(new.pid)
        .sql(", ")
        .integer(new.configuration_uid)
        .sql(", ")
        .text(&new.configuration_identifier)
        .sql(", ")
        .integer(new.be_user)
        .sql(", ")
        .integer(now)
        .sql(", ")
        .integer(now)
        .sql(", ")
        .append(values)
        // TYPO3's own table has no unique index on uuid, so the statement itself looks.
        .sql(&format!(" WHERE NOT EXISTS (SELECT 1 FROM {} WHERE ", sql.table(TABLE)));
        let insert = sql.is_text(insert, "t.uuid", id.as_str()).sql(")");
        self.db.write(|connection| match insert.execute(connection)? {
            0 => Err(Error::RunExists(id.to_string())),
            _ => Ok(()),
        })
    }
}

/// A value that was sealed before a rotation fenced its key, and is stored after, is sealed again under the new one.
fn again_if_fenced<T>(seal_and_store: impl Fn() -> Result<T, Error>) -> Result<T, Error> {
    match seal_and_store() {
        Err(Error::Fenced(_)) => seal_and_store(),
        outcome => outcome,
    }
}

/// That a text is JSON (RFC 8259). It is never parsed into values: what is stored is the text, byte for byte.
fn is_json(text: &str) -> Result<(), Error> {
    // The error may quote the text, so only its place is kept.
    serde_json::from_str::<IgnoredAny>(text)
        .map(|_| ())
        .map_err(|error| Error::NotJson { line: error.line(), column: error.column() })
}

fn status<'a>(status: Status, now: i64) -> Query<'a> {
    Query::new("status = ").text(status.name()).sql(", tstamp = ").integer(now)
}

fn claimed(lease: &Lease, now: i64) -> Query<'_> {
    status(Status::Running, now)
        .sql(", claimed_by = ")
        .text(lease.worker.as_str())
        .sql(", lease_expires = ")
        .integer(lease.expires)
        .sql(", started_at = CASE WHEN t.started_at = 0 THEN ")
        .integer(now)
        .sql(" ELSE t.started_at END")
}

fn requeued<'a>(now: i64) -> Query<'a> {
    status(Status::Queued, now).sql(RELEASED).sql(", requeue_count = t.requeue_count + 1")
}

fn ended<'a>(end: Status, now: i64) -> Query<'a> {
    status(end, now)
        .sql(RELEASED)
        .sql(", queued_request = '', suspended_state = '', pending_effect = 0, finished_at = ")
        .integer(now)
}

/// The first `most` characters.
fn cut(text: &str, most: usize) -> &str {
    text.char_indices().nth(most).map_or(text, |(end, _)| &text[..end])
}

const TABLE: &str = "tx_nrllm_agentrun";
pub(super) const QUEUED_REQUEST: &str = "queued_request";
pub(super) const SUSPENDED_STATE: &str = "suspended_state";
const RELEASED: &str = ", claimed_by = '', lease_expires = 0";
