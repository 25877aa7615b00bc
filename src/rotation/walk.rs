//! The walk: page by page over every value that is not under the target, the token at work on one page while the
//! database takes the last and gives the next.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::{Control, Progress, Rewrapper, Rotator};
use crate::codec::{self, Codec};
use crate::column::Column;
use crate::provider::KeyId;
use crate::spread::spread;
use crate::store::{BadValue, Db, Error, FrontPage, KEYLESS, Key, NewFront, StoredFront, WorkLease};

/// Moves the values of one database to the key that seals.
#[derive(Debug)]
pub struct Walk<'a> {
    /// Where they stand.
    pub db: &'a Db,
    /// What re-wraps them.
    pub codec: &'a Codec,
    /// The key that they are moved to: the one that seals.
    pub target: KeyId,
    /// The right to do it.
    pub lease: WorkLease<'a>,
    /// How many values are read, moved and written at once.
    pub batch: u32,
    /// How many values a second at most.
    pub rate: Option<u32>,
    /// How many threads ask the token.
    pub workers: usize,
    /// Who watches, and can end it.
    pub control: &'a Control,
}

/// What one pass did.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Passed {
    /// Values moved.
    pub moved: u64,
    /// Values that a concurrent writer changed meanwhile: another pass looks at them.
    pub changed: u64,
    /// Values that could not be moved, and stand in the ledger.
    pub bad: u64,
    /// Whether somebody asked to stop before the end.
    pub stopped: bool,
}

impl Passed {
    /// Both together.
    pub fn and(self, other: Self) -> Self {
        Self {
            moved: self.moved + other.moved,
            changed: self.changed + other.changed,
            bad: self.bad + other.bad,
            stopped: self.stopped || other.stopped,
        }
    }
}

/// How far workers are together.
#[derive(Debug)]
pub(super) struct Rows {
    pub(super) done: AtomicU64,
    pub(super) total: u64,
}

type Outcome = Result<Option<String>, Error>;

impl Walk<'_> {
    /// One pass over a column: every value that is not under the target, in the order of the keys.
    ///
    /// # Errors
    /// Whatever is about more than one value: [`codec::Error::Unavailable`], [`Error::LeaseLost`], ... What was written
    /// before stays, unless the caller's transaction is rolled back.
    pub fn column(&self, column: &Column) -> Result<Passed, Error> {
        let mut passed = self.keyless(column)?;
        let rows = Rows { done: AtomicU64::new(0), total: self.db.count_rows(column)? };
        passed = passed.and(self.range(column, None, None, &rows, &AtomicU64::new(0))?);
        Ok(passed)
    }

    /// Notes where values stand in rows without a key, which no walk reaches.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    pub fn keyless(&self, column: &Column) -> Result<Passed, Error> {
        let mut passed = Passed::default();
        if self.db.count_keyless(column, self.target)? > 0 {
            self.db.note_in_ledger(column, &[BadValue { key: KEYLESS.into(), kid: None, error: "NoKey" }])?;
            passed.bad += 1;
        }
        Ok(passed)
    }

    /// One pass over the rows behind `from`, up to `to`. Counts what it moves in `moved` as well, at once.
    ///
    /// # Errors
    /// As [`Walk::column`].
    pub(super) fn range(
        &self,
        column: &Column,
        from: Option<&Key>,
        to: Option<&Key>,
        rows: &Rows,
        moved: &AtomicU64,
    ) -> Result<Passed, Error> {
        let mut passed = Passed::default();
        let began = Instant::now();
        let mut renewed = began;
        let mut page = self.page(column, from, to)?;
        let mut rewrapped: Option<(FrontPage, Vec<Outcome>)> = None;
        while page.last.is_some() || rewrapped.is_some() {
            // The token works on this page while the database takes the last one and gives the next.
            let (outcomes, next) = thread::scope(|threads| -> Result<_, Error> {
                let token = threads.spawn(|| self.rewrap(column, &page.fronts));
                let mut db = || -> Result<_, Error> {
                    if let Some((page, outcomes)) = rewrapped.take() {
                        let done = rows.done.fetch_add(page.rows, Ordering::Relaxed) + page.rows;
                        let written = self.write(column, &page.fronts, outcomes)?;
                        moved.fetch_add(written.moved, Ordering::Relaxed);
                        passed = passed.and(written);
                        if !page.fronts.is_empty() {
                            renewed = Instant::now();
                        } else if renewed.elapsed() > SILENCE {
                            self.renew()?;
                            renewed = Instant::now();
                        }
                        let total = rows.total.max(done);
                        self.control.tell(&Progress { column: column.to_string(), done, total });
                        self.slow_down(began, passed.moved);
                    }
                    match &page.last {
                        Some(last) if !self.control.is_stopped() => self.page(column, Some(last), to),
                        _ => Ok(FrontPage::default()),
                    }
                };
                let next = db();
                let outcomes = token.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                Ok((outcomes, next?))
            })?;
            passed.stopped |= self.control.is_stopped();
            if page.last.is_some() && !passed.stopped {
                rewrapped = Some((page, outcomes));
            }
            page = next;
        }
        Ok(passed)
    }

    /// Unwraps the DEK of every value that would be moved, and writes nothing: tells `each` its key and, if it does not
    /// unwrap, why; until `each` says that it is enough.
    ///
    /// # Errors
    /// As [`Walk::column`].
    pub fn try_column(
        &self,
        column: &Column,
        mut each: impl FnMut(&Key, Option<&'static str>) -> ControlFlow<()>,
    ) -> Result<(), Error> {
        let total = self.db.count_rows(column)?;
        let mut done = 0;
        let mut page = self.page(column, None, None)?;
        while let Some(last) = page.last {
            let outcomes = spread(&page.fronts, self.workers, |front| {
                let place = column.at(front.row.as_ref().map_err(|bad| *bad)?.as_ref())?;
                Ok::<_, Error>(self.codec.try_front(&place, text(front)?)?)
            });
            for (front, outcome) in page.fronts.iter().zip(outcomes) {
                let bad = match outcome {
                    Ok(()) => None,
                    Err(error) => Some(self.kind(column, front, error)?),
                };
                if each(&front.key, bad).is_break() {
                    return Ok(());
                }
            }
            if self.control.is_stopped() {
                return Ok(());
            }
            done += page.rows;
            self.control.tell(&Progress { column: column.to_string(), done, total: total.max(done) });
            page = self.page(column, Some(&last), None)?;
        }
        Ok(())
    }

    /// Lets a rotator of the application move what it keeps.
    ///
    /// # Errors
    /// Whatever it fails with, as [`Error::Refused`]; then nothing of it was kept.
    pub fn rotator(&self, rotator: &dyn Rotator) -> Result<u64, Error> {
        let context = Rewrapper::new(self.codec, self.target);
        self.db.transact(|connection| rotator.rewrap(connection, &context).map_err(Error::Refused))
    }

    fn page(&self, column: &Column, after: Option<&Key>, until: Option<&Key>) -> Result<FrontPage, Error> {
        self.db.fronts(column, self.target, after, until, self.batch)
    }

    fn renew(&self) -> Result<(), Error> {
        match self.lease {
            WorkLease::Rotation(lease) => self.db.renew_lease(lease),
            WorkLease::Part(part) => self.db.renew_part(part),
        }
    }

    fn rewrap(&self, column: &Column, page: &[StoredFront]) -> Vec<Outcome> {
        spread(page, self.workers, |front| {
            let place = column.at(front.row.as_ref().map_err(|bad| *bad)?.as_ref())?;
            Ok(self.codec.rewrap_front(&place, text(front)?, front.rest)?)
        })
    }

    fn write(&self, column: &Column, fronts: &[StoredFront], outcomes: Vec<Outcome>) -> Result<Passed, Error> {
        let mut passed = Passed::default();
        let mut made = Vec::with_capacity(fronts.len());
        let mut bad = Vec::new();
        for (front, outcome) in fronts.iter().zip(outcomes) {
            match outcome {
                Ok(Some(new)) => made.push((front, new)),
                // Under the key that seals by now, which is not the target: somebody activated another.
                Ok(None) => passed.changed += 1,
                Err(error) => {
                    let error = self.kind(column, front, error)?;
                    bad.push(BadValue { key: front.key.clone(), kid: front.kid(), error });
                }
            }
        }
        let new: Vec<NewFront<'_>> = made
            .iter()
            .filter_map(|(front, new)| Some(NewFront { key: &front.key, old: text(front).ok()?, new }))
            .collect();
        let replaced = self.db.replace_fronts(column, &new, &self.lease, self.target)?;
        let moved = replaced.iter().filter(|replaced| **replaced).count() as u64;
        passed.moved += moved;
        passed.changed += new.len() as u64 - moved;
        self.db.note_in_ledger(column, &bad)?;
        passed.bad += bad.len() as u64;
        Ok(passed)
    }

    /// What is wrong with one value. One that was given up is stepped over, also where its key is retired.
    fn kind(&self, column: &Column, front: &StoredFront, error: Error) -> Result<&'static str, Error> {
        match error.value_kind() {
            Some(kind) => Ok(kind),
            None if self.db.is_given_up(column, &front.key)? => Ok("GivenUp"),
            None => Err(error),
        }
    }

    fn slow_down(&self, began: Instant, moved: u64) {
        let Some(rate) = self.rate else { return };
        let due = Duration::from_secs_f64(moved as f64 / f64::from(rate.max(1)));
        while let Some(wait) = due.checked_sub(began.elapsed()).filter(|_| !self.control.is_stopped()) {
            thread::sleep(wait.min(Duration::from_millis(200)));
        }
    }
}

/// How long a walk over rows that need nothing writes nothing, not even that the lease lasts.
const SILENCE: Duration = Duration::from_secs(10);

fn text(front: &StoredFront) -> Result<&str, Error> {
    let bytes = front.front.as_deref().ok_or(codec::Error::Malformed("no dot"))?;
    std::str::from_utf8(bytes).map_err(|_| Error::NotText)
}
