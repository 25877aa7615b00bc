//! A walk that several workers share: threads of this process, and other processes on this machine and others. Each has
//! a connection of its own, takes a part of a column by a lease in the database, walks it, and takes the next.

use std::sync::Mutex;
use std::sync::atomic::AtomicU64;
use std::thread;
use std::time::{Duration, Instant};

use super::walk::Rows;
use super::{Control, Walk};
use crate::codec::Codec;
use crate::column::Column;
use crate::provider::KeyId;
use crate::store::{Db, Error, RotationLease, WorkLease};

/// What the workers of one process share.
#[derive(Debug)]
pub struct Shared<'a> {
    /// Where the values stand.
    pub db: &'a Db,
    /// What re-wraps them.
    pub codec: &'a Codec,
    /// The key that they are moved to: the one that seals.
    pub target: KeyId,
    /// The registered columns.
    pub columns: &'a [Column],
    /// The right to rotate, where this process leads; it is kept alive meanwhile.
    pub lease: Option<&'a RotationLease>,
    /// How many values are read, moved and written at once.
    pub batch: u32,
    /// How many values a second at most, all workers of this process together.
    pub rate: Option<u32>,
    /// How many workers.
    pub workers: usize,
    /// Who watches, and can end it.
    pub control: &'a Control,
}

impl Shared<'_> {
    /// Divides the columns into parts, for whoever takes them.
    ///
    /// # Errors
    /// [`Error::NoTable`], [`Error::NoColumn`], [`Error::Unavailable`].
    pub fn divide(&self) -> Result<(), Error> {
        let rows = u64::from(self.batch) * BATCHES;
        self.columns.iter().try_for_each(|column| self.db.divide(column, self.target, rows))
    }

    /// Works until no part is left, or somebody asks to stop. Says how many values this process moved.
    ///
    /// # Errors
    /// Whatever is about more than one value and does not pass within twenty tries: what was written stays.
    pub fn work(&self) -> Result<u64, Error> {
        let mut total = 0;
        for column in self.columns {
            total += self.db.count_rows(column)?;
        }
        let rows = Rows { done: AtomicU64::new(0), total };
        let moved = AtomicU64::new(0);
        let failed: Mutex<Option<Error>> = Mutex::new(None);
        let has_failed = || failed.lock().is_ok_and(|failed| failed.is_some());
        let fail = |error: Error| {
            if let Ok(mut failed) = failed.lock() {
                failed.get_or_insert(error);
            }
        };
        thread::scope(|threads| {
            let worker = || {
                if let Err(error) = self.worker(&rows, &moved, &has_failed) {
                    fail(error);
                }
            };
            let workers: Vec<_> = (0..self.workers.max(1)).map(|_| threads.spawn(worker)).collect();
            let mut renewed = Instant::now();
            while !workers.iter().all(thread::ScopedJoinHandle::is_finished) {
                thread::sleep(WAIT);
                if let Some(lease) = self.lease.filter(|_| renewed.elapsed() > RENEWED) {
                    match self.db.renew_lease(lease) {
                        Ok(()) => renewed = Instant::now(),
                        Err(error @ Error::LeaseLost) => fail(error),
                        // The lease lasts longer than this, and the workers meet the same trouble.
                        Err(error) => {
                            tracing::debug!(target: "hardwrap::rotation", %error, "the lease was not renewed")
                        }
                    }
                }
            }
        });
        match failed.into_inner() {
            Ok(Some(error)) => Err(error),
            _ => Ok(moved.into_inner()),
        }
    }

    fn worker(&self, rows: &Rows, moved: &AtomicU64, has_failed: &impl Fn() -> bool) -> Result<(), Error> {
        let mut failures = 0;
        let mut db: Option<Db> = None;
        loop {
            if self.control.is_stopped() || has_failed() {
                return Ok(());
            }
            match self.step(&mut db, rows, moved) {
                Ok(Step::Walked) => failures = 0,
                Ok(Step::Wait) => thread::sleep(WAIT),
                Ok(Step::Done) => return Ok(()),
                // The part is another worker's by now.
                Err(Error::LeaseLost) => {}
                Err(error @ (Error::Unavailable(_) | Error::Conflict(_))) if failures < PATIENCE => {
                    failures += 1;
                    tracing::warn!(target: "hardwrap::rotation", %error, failures, "a worker tries again");
                    db = None;
                    thread::sleep(Duration::from_millis(50 << failures.min(6)));
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn step(&self, at: &mut Option<Db>, rows: &Rows, moved: &AtomicU64) -> Result<Step, Error> {
        let db = match at {
            Some(db) => db,
            None => at.insert(self.db.another()?),
        };
        let Some(part) = db.take_part(self.target)? else {
            // Others are at work on what is left; if one of them dies, its part is free again.
            return Ok(if db.parts(self.target)?.1 == 0 { Step::Done } else { Step::Wait });
        };
        let Some(column) = self.columns.iter().find(|column| part.is_of(column)) else {
            // Not registered any more: discovery looks after what stands there. To who only takes part it may be somebody
            // else's register.
            if self.lease.is_some() {
                db.end_part(&part, 0, 0)?;
                return Ok(Step::Walked);
            }
            db.return_part(&part);
            return Ok(Step::Wait);
        };
        let walk = Walk {
            db,
            codec: self.codec,
            target: self.target,
            lease: WorkLease::Part(&part),
            batch: self.batch,
            rate: self.rate.map(|rate| (rate / u32::try_from(self.workers.max(1)).unwrap_or(u32::MAX)).max(1)),
            workers: 1,
            control: self.control,
        };
        let passed = match walk.range(column, part.from.as_ref(), part.to.as_ref(), rows, moved) {
            Ok(passed) if passed.stopped => {
                db.return_part(&part);
                return Ok(Step::Walked);
            }
            Ok(passed) => passed,
            Err(error) => {
                if !matches!(error, Error::LeaseLost | Error::Unavailable(_)) {
                    db.return_part(&part);
                }
                return Err(error);
            }
        };
        db.end_part(&part, passed.changed, passed.bad)?;
        Ok(Step::Walked)
    }
}

enum Step {
    Walked,
    Wait,
    Done,
}

/// How many batches a part has: what a worker that dies leaves to be looked at again.
const BATCHES: u64 = 4;

/// How long a worker waits that finds no part free.
const WAIT: Duration = Duration::from_millis(50);

/// How often the lease of the rotation is renewed.
const RENEWED: Duration = Duration::from_secs(10);

/// How often in a row a worker tries again that lost the server or had others in its way: most of a minute.
const PATIENCE: u32 = 20;
