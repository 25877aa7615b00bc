//! What a worker does with runs, in the order that loses nothing: seal before anything is stored, open before anything
//! is claimed.

use super::runs::{QUEUED_REQUEST, SUSPENDED_STATE};
use super::{AgentRuns, Answer, Lease, NewRun, RunId, Status, Waiting, Worker};
use crate::secret::Plaintext;
use crate::store::{Error, Run, StoredText};

/// Agent runs as a worker needs them. A key outage leaves no trace on a run: it is an error to try again on, told
/// apart from a run that is not there and from a value that does not authenticate. No method panics.
#[derive(Clone, Debug)]
pub struct Persister {
    runs: AgentRuns,
}

impl Persister {
    /// Works on `runs`.
    pub fn new(runs: AgentRuns) -> Self {
        Self { runs }
    }

    /// The repository below.
    pub fn runs(&self) -> &AgentRuns {
        &self.runs
    }

    /// Queues a new run. If its request cannot be sealed, nothing is stored and the reason is returned.
    ///
    /// # Errors
    /// [`Error::NotJson`], [`Error::Codec`], [`Error::RunExists`], [`Error::Unavailable`].
    pub fn enqueue(&self, new: &NewRun, request: &str, now: i64) -> Result<RunId, Error> {
        self.runs.enqueue(new, request, now)
    }

    /// Suspends a run. If its state cannot be sealed, the run still runs, its old state untouched, and the reason is
    /// returned: prolong the lease and try again.
    ///
    /// # Errors
    /// [`Error::NotJson`], [`Error::Codec`], [`Error::Unavailable`], [`Error::UnknownStatus`].
    pub fn suspend(
        &self,
        id: &RunId,
        worker: &Worker,
        waiting: Waiting,
        state: &str,
        now: i64,
    ) -> Result<Answer, Error> {
        self.runs.suspend(id, worker, waiting, state, now)
    }

    /// Opens the request of a queued run, then claims the run, if it is still the request that was opened. If it
    /// cannot be opened, the run stays queued as it was.
    ///
    /// # Errors
    /// [`Error::Codec`], [`Error::NotText`], [`Error::BadRow`], [`Error::Unavailable`], [`Error::UnknownStatus`].
    pub fn take(&self, id: &RunId, lease: &Lease, now: i64) -> Result<Taken, Error> {
        self.open_then_claim(id, Status::Queued, QUEUED_REQUEST, lease, now)
    }

    /// Opens the state of a waiting run, then claims the run, if it is still the state that was opened. If it cannot
    /// be opened, the run waits on as it was.
    ///
    /// # Errors
    /// As [`Persister::take`].
    pub fn take_for_resume(&self, id: &RunId, waiting: Waiting, lease: &Lease, now: i64) -> Result<Taken, Error> {
        self.open_then_claim(id, waiting.status(), SUSPENDED_STATE, lease, now)
    }

    fn open_then_claim(
        &self,
        id: &RunId,
        from: Status,
        column: &'static str,
        lease: &Lease,
        now: i64,
    ) -> Result<Taken, Error> {
        let mut opened_before: Option<Run> = None;
        for _ in 0..OPENINGS {
            let Some(run) = self.runs.find(id)? else { return Ok(Taken::Refused(Answer::NoSuchRun)) };
            let status = run.status.ok_or_else(|| Error::UnknownStatus(id.to_string()))?;
            if status != from {
                return Ok(Taken::Refused(Answer::InState(status)));
            }
            // A rotation wraps the state's key anew, between the opening and the claim as well: then both are done again.
            // Any other change is another's.
            let payload = |run: &Run| state_of(run, column).map(StoredText::payload).map(<[u8]>::to_vec);
            if opened_before.is_some_and(|before| payload(&before) != payload(&run)) {
                break;
            }
            match self.open_and_claim(run, id, column, lease, now)? {
                Ok(taken) => return Ok(taken),
                Err(changed) => opened_before = Some(*changed),
            }
        }
        Ok(Taken::Refused(Answer::Changed))
    }

    /// Gives the run back as it was opened, if it changed meanwhile.
    fn open_and_claim(
        &self,
        mut run: Run,
        id: &RunId,
        column: &'static str,
        lease: &Lease,
        now: i64,
    ) -> Result<Result<Taken, Box<Run>>, Error> {
        let from = run.status.ok_or_else(|| Error::UnknownStatus(id.to_string()))?;
        let opened = match column {
            QUEUED_REQUEST => run.queued_request(&self.runs)?,
            _ => run.suspended_state(&self.runs)?,
        };
        match self.runs.claim_opened(id, from, (column, state_of(&run, column)), lease, now)? {
            Answer::Moved => {
                run.status = Some(Status::Running);
                lease.worker.as_str().clone_into(&mut run.claimed_by);
                run.lease_expires = lease.expires;
                if run.started_at == 0 {
                    run.started_at = now;
                }
                Ok(Ok(Taken::Work(Box::new(Work { run, opened }))))
            }
            Answer::Changed => Ok(Err(Box::new(run))),
            refused => Ok(Ok(Taken::Refused(refused))),
        }
    }
}

fn state_of<'r>(run: &'r Run, column: &'static str) -> Option<&'r StoredText> {
    if column == QUEUED_REQUEST { run.queued_request.as_ref() } else { run.suspended_state.as_ref() }
}

/// How often a state that changes while it is opened is opened again.
const OPENINGS: usize = 4;

/// What became of taking a run.
#[derive(Debug)]
#[must_use]
pub enum Taken {
    /// The worker has it.
    Work(Box<Work>),
    /// The worker does not; nothing was changed.
    Refused(Answer),
}

/// A run that a worker has.
#[derive(Debug)]
pub struct Work {
    /// The run as it stands now. Its other state is opened when it is asked for.
    pub run: Run,
    /// What was opened before the claim: the request of [`Persister::take`], the state of
    /// [`Persister::take_for_resume`]; none where there is none.
    pub opened: Option<Plaintext>,
}
