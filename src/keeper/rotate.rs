//! The rotation: a new key, the fence on the token, the walk, the fence in the database, the proof, the announcement.
//!
//! The order of these steps is what keeps every value readable, whoever crashes or commits late; the model in
//! `tests/rotation_model.rs` explores it.
//!
//! - *Online*: fence on the token; walk; fence in the database; proof, and where that is not zero yet, walk again.
//! - *Atomic*: fence on the token; fence in the database; walk and proof in one transaction.
//!
//! Whatever is cut off is finished by [`Rotation::resume`], from what stands on the token and in the database alone.

use std::collections::HashMap;
use std::ops::ControlFlow;

use jiff::Timestamp;

use super::{Error, Keeper, check};
use crate::column::Column;
use crate::hsm::{Choice, KeyFact, KeyReport, Report, Route, State};
use crate::provider::KeyId;
use crate::rotation::{Control, MasterKeyRotated, Passed, Shared, Walk};
use crate::store::{self, Counts, Db, Found, Key, LedgerEntry, RotationFact, RotationLease, Spot, WorkLease};

/// How to move all values of a database to another key; [`Rotation::run`] does it.
#[derive(Clone, Debug)]
pub struct Rotation<'a> {
    keeper: &'a Keeper,
    online: bool,
    batch: u32,
    rate: Option<u32>,
    workers: usize,
    choice: Option<Choice>,
    to_token: Option<String>,
    control: Control,
}

/// What a rotation did.
#[derive(Clone, Debug, Default)]
pub struct Rotated {
    /// The key that everything is under, or moves to.
    pub target: Option<KeyId>,
    /// The keys that values were moved from.
    pub from: Vec<KeyId>,
    /// Those of them that are retired already.
    pub retired: Vec<KeyId>,
    /// How many values were moved by this run.
    pub moved: u64,
    /// Values that could not be moved and were not given up: while there are any, nothing is proven or announced.
    pub open: Vec<LedgerEntry>,
    /// Whether it is proven that no value names an old key.
    pub proven: bool,
    /// Whether it is so without the database's fence, because this account may make no trigger.
    pub weaker: bool,
    /// Whether there was nothing to do, and nothing was written.
    pub nothing: bool,
    /// Listeners that failed, and why: they will hear the event again.
    pub unheard: Vec<String>,
}

/// What a rotation would do, and what stands in its way.
#[derive(Debug)]
pub struct Plan {
    /// The key that seals now.
    pub current: KeyId,
    /// Whether an earlier rotation is unfinished.
    pub unfinished: Option<String>,
    /// Every registered column.
    pub columns: Vec<ColumnPlan>,
    /// The application's rotators, and how many values each would move.
    pub rotators: Vec<(String, u64)>,
    /// Envelopes in columns that nobody registered: a rotation refuses.
    pub unregistered: Vec<Found>,
    /// Triggers of others on registered tables: one that keeps history would bring values under an old key back.
    pub triggers: Vec<String>,
}

/// One column of a [`Plan`].
#[derive(Debug)]
pub struct ColumnPlan {
    /// The column.
    pub column: Column,
    /// What its values are.
    pub counts: Counts,
    /// How many data keys were unwrapped, where that was tried, ...
    pub tried: Option<u64>,
    /// ... which could not be: key of the row, kind of error, ...
    pub bad: Vec<(String, &'static str)>,
    /// ... and how many more could not, and were given up.
    pub given_up: u64,
}

impl Plan {
    /// Whether a rotation would run to its end.
    pub fn is_clear(&self) -> bool {
        let moves =
            |plan: &ColumnPlan| plan.bad.is_empty() && plan.counts.damaged <= plan.given_up && plan.counts.keyless == 0;
        self.unregistered.is_empty() && self.columns.iter().all(moves)
    }
}

impl<'a> Rotation<'a> {
    pub(super) fn new(keeper: &'a Keeper) -> Self {
        Self {
            keeper,
            online: false,
            batch: 500,
            rate: None,
            workers: std::thread::available_parallelism().map_or(1, usize::from),
            choice: None,
            to_token: None,
            control: Control::default(),
        }
    }

    /// In short batches that others can write between, instead of one transaction.
    #[must_use]
    pub fn online(mut self, online: bool) -> Self {
        self.online = online;
        self
    }

    /// How many values are read, moved and written at once; 500 else.
    #[must_use]
    pub fn batch(mut self, batch: u32) -> Self {
        self.batch = batch.max(1);
        self
    }

    /// How many values a second at most.
    #[must_use]
    pub fn rate(mut self, rate: Option<u32>) -> Self {
        self.rate = rate;
        self
    }

    /// How many threads ask the token; as many as the machine has processors else, and no more than there are sessions.
    #[must_use]
    pub fn workers(mut self, workers: usize) -> Self {
        self.workers = workers.max(1);
        self
    }

    /// How the new key is to wrap; as the one that seals now does else.
    #[must_use]
    pub fn mechanism(mut self, choice: Choice) -> Self {
        self.choice = Some(choice);
        self
    }

    /// On which token the new key is made, by its name in the configuration; where the key is that seals now else.
    #[must_use]
    pub fn to_token(mut self, name: Option<String>) -> Self {
        self.to_token = name;
        self
    }

    /// Who watches, and can end it.
    #[must_use]
    pub fn control(mut self, control: Control) -> Self {
        self.control = control;
        self
    }

    /// What a rotation would do: counts, discovery, the rotators' own counts. With `unwrap` every data key that would be
    /// moved is unwrapped. Writes nothing.
    ///
    /// # Errors
    /// Whatever would keep the rotation from starting, but what the [`Plan`] names.
    pub fn plan(&self, unwrap: bool) -> Result<Plan, Error> {
        let keeper = self.keeper;
        keeper.check()?;
        keeper.usable()?;
        let report = keeper.report()?;
        let current = keeper.sealing(&report)?.fact.kid;
        let lease = RotationLease::none();
        // Everything is due when a new key is made; after an unfinished rotation, what is not under the one that seals.
        let unfinished = self.unfinished(&report)?;
        let target = if unfinished.is_some() { current } else { KeyId::from([0; 8]) };
        let walk = self.walk(keeper.db(), target, &lease);
        let mut columns = Vec::new();
        for column in keeper.columns().map(|(column, _)| column) {
            let mut failed = Vec::new();
            let counts = keeper.db().count(column)?;
            let mut tried = None;
            if unwrap {
                let mut met = 0;
                walk.try_column(column, |key, kind| {
                    met += 1;
                    failed.extend(kind.map(|kind| (key.clone(), kind)));
                    ControlFlow::Continue(())
                })?;
                tried = Some(met);
            }
            let (mut bad, mut given_up) = (Vec::new(), 0);
            for (key, kind) in failed {
                match keeper.db().is_given_up(column, &key)? {
                    true => given_up += 1,
                    false => bad.push((key.to_string(), kind)),
                }
            }
            columns.push(ColumnPlan { column: column.clone(), counts, tried, bad, given_up });
        }
        let mut rotators = Vec::new();
        for rotator in keeper.rotators() {
            rotators.push((rotator.name().to_owned(), keeper.counted(rotator.as_ref(), target)?));
        }
        let mut triggers = Vec::new();
        for spot in keeper.spots() {
            triggers.extend(keeper.db().other_triggers(&spot.table)?);
        }
        triggers.sort();
        triggers.dedup();
        Ok(Plan { current, unfinished, columns, rotators, unregistered: keeper.unregistered(keeper.db())?.1, triggers })
    }

    /// Makes a new key, or takes the one that `key generate` made, and moves everything to it.
    ///
    /// # Errors
    /// [`Error::Unfinished`] if an earlier rotation is; [`Error::Unregistered`]; [`Error::RolledBack`];
    /// [`Error::CutOff`]; [`Error::Stopped`]; [`Error::NotZero`]; what keeps token or database from working. Whatever it
    /// is, every value that was readable still is.
    pub fn run(&self) -> Result<Rotated, Error> {
        self.keeper.check()?;
        self.keeper.usable()?;
        let lease = self.keeper.db().lease_rotation()?;
        let done = self.run_leased(&lease);
        self.keeper.db().end_lease(&lease);
        done
    }

    fn run_leased(&self, lease: &RotationLease) -> Result<Rotated, Error> {
        let keeper = self.keeper;
        let report = keeper.report()?;
        if let Some(unfinished) = self.unfinished(&report)? {
            return Err(Error::Unfinished(unfinished));
        }
        self.refuse_unregistered(keeper.db(), true)?;
        for rotator in keeper.rotators() {
            keeper.counted(rotator.as_ref(), KeyId::from([0; 8]))?;
        }
        let current = keeper.sealing(&report)?;
        if let Some(away) = report.unreachable.first() {
            return Err(Error::TokenAway(away.clone()));
        }
        if let Some(name) = self.to_token.as_ref().filter(|name| keeper.parts.tokens.named(name).is_none()) {
            return Err(Error::NoSuchToken(name.clone()));
        }
        let new = match self.waiting(&report, current)? {
            Some(waiting) => waiting,
            None => self.generate(&report, current)?,
        };
        keeper.holder(new)?.activate(new)?;
        self.move_all(lease)
    }

    /// The key that `key generate` made, or a rotation that did not come further; but for where another token is asked
    /// for.
    fn waiting(&self, report: &Report, current: &KeyReport) -> Result<Option<KeyId>, Error> {
        let waits = |key: &&KeyReport| key.fact.state == State::PreActive && key.fact.kid > current.fact.kid;
        let Some(waiting) = report.keys.iter().rev().find(waits).filter(|_| self.to_token.is_none()) else {
            return Ok(None);
        };
        let kid = waiting.fact.kid;
        Ok((waiting.works || self.keeper.holder(kid)?.finish(kid)?).then_some(kid))
    }

    /// Makes the key that everything moves to, on the token that was asked for.
    fn generate(&self, report: &Report, current: &KeyReport) -> Result<KeyId, Error> {
        let tokens = &self.keeper.parts.tokens;
        let keyring = match &self.to_token {
            Some(name) => tokens.named(name).ok_or_else(|| Error::NoSuchToken(name.clone()))?,
            None => tokens.holder(current.fact.kid)?,
        };
        // Whoever uses the other tokens will use this one: the destruction of the new key asks them all.
        for database in &report.databases {
            keyring.note_database(database)?;
        }
        let choice = self.choice.unwrap_or(match &self.to_token {
            Some(_) => Choice::Auto,
            None => Choice::Route(current.fact.route),
        });
        Ok(keyring.generate_after(choice, newest(report))?.0)
    }

    /// Finishes what is unfinished: an earlier rotation that was cut off, or one of another database on the same keyring.
    /// Makes no key. With nothing left it writes nothing.
    ///
    /// # Errors
    /// As [`Rotation::run`].
    pub fn resume(&self) -> Result<Rotated, Error> {
        self.keeper.check()?;
        self.keeper.usable()?;
        let report = self.keeper.report()?;
        if let Some(nothing) = self.nothing_left(&report)? {
            return Ok(nothing);
        }
        let lease = match self.keeper.db().lease_rotation() {
            Err(store::Error::Leased(..)) if self.online && self.keeper.db().is_server() => return self.take_part(),
            lease => lease?,
        };
        let done = self.refuse_unregistered(self.keeper.db(), true).and_then(|()| self.move_all(&lease));
        self.keeper.db().end_lease(&lease);
        done
    }

    /// What an earlier rotation left undone, if anything.
    fn unfinished(&self, report: &Report) -> Result<Option<String>, Error> {
        let identity = self.keeper.db().ready()?.identity;
        let old = self.keeper.old_keys(report)?;
        let active = old.iter().find(|old| old.state == State::Active);
        if let Some(active) = active {
            return Ok(Some(format!("key {} is still active beside the one that seals", active.kid)));
        }
        for kid in old.iter().map(|old| old.kid) {
            if !report.proofs.contains_key(&(identity.clone(), kid)) || !self.keeper.knows_proof(report, kid)? {
                return Ok(Some(format!("nothing proves yet that no value names key {kid}")));
            }
        }
        Ok(None)
    }

    /// What a resumed rotation would say if there is nothing it could do. Only reads.
    fn nothing_left(&self, report: &Report) -> Result<Option<Rotated>, Error> {
        let keeper = self.keeper;
        let target = keeper.sealing(report)?.fact.kid;
        let from: Vec<KeyId> = keeper.old_keys(report)?.iter().map(|old| old.kid).collect();
        let unfinished = self.unfinished(report)?.is_some();
        let ledger = keeper.db().ledger()?;
        let open: Vec<LedgerEntry> = ledger.iter().filter(|entry| entry.accepted.is_none()).cloned().collect();
        if unfinished && open.is_empty() || !keeper.listeners.is_empty() && !keeper.db().outbox()?.is_empty() {
            return Ok(None);
        }
        for kid in &from {
            if !keeper.db().missing_fences(*kid, &keeper.spots())?.is_empty() {
                return Ok(None);
            }
        }
        // What is left is what could not be moved before, and cannot be now.
        let lease = RotationLease::none();
        let walk = self.walk(keeper.db(), target, &lease);
        let mut left = 0;
        for column in &keeper.register_now() {
            let mut moves = false;
            let of_column = ledger.iter().filter(|entry| entry.is_of(column));
            let noted: HashMap<&Key, &LedgerEntry> = of_column.map(|entry| (&entry.key, entry)).collect();
            walk.try_column(column, |key, kind| {
                let known = |kind| noted.get(key).is_some_and(|entry| entry.error == kind || entry.accepted.is_some());
                if kind.is_some_and(known) {
                    left += 1;
                    return ControlFlow::Continue(());
                }
                moves = true;
                ControlFlow::Break(())
            })?;
            if moves {
                return Ok(None);
            }
            left += usize::from(keeper.db().count_keyless(column, target)? > 0);
        }
        for rotator in keeper.rotators() {
            if keeper.counted(rotator.as_ref(), target)? > 0 {
                return Ok(None);
            }
        }
        if left != ledger.len() || !keeper.unregistered(keeper.db())?.1.is_empty() {
            return Ok(None);
        }
        let proven = !unfinished;
        let retired = retired(report, &from);
        Ok(Some(Rotated { target: Some(target), from, retired, open, proven, nothing: true, ..Rotated::default() }))
    }

    /// Moves everything to the key that seals, proves it, and announces it.
    fn move_all(&self, lease: &RotationLease) -> Result<Rotated, Error> {
        let keeper = self.keeper;
        let report = keeper.report()?;
        let target = keeper.sealing(&report)?.fact.kid;
        let identity = keeper.db().ready()?.identity;
        for old in keeper.old_keys(&report)?.iter().filter(|old| old.state == State::Active) {
            keeper.holder(old.kid)?.fence(old.kid, true)?;
        }
        let report = keeper.report()?;
        check::note(keeper.db(), &report, &keeper.db().keys_seen()?)?;
        keeper.drop_old_fences(&report)?;
        let old: Vec<KeyId> = keeper.old_keys(&report)?.iter().map(|old| old.kid).collect();
        let mut begun = Begun { target, old, moved: 0, anew: Vec::new(), weaker: false };
        // A proof that does not hold must not let another database destroy the key meanwhile, nor be there again after
        // a crash.
        let proven = |kid: &KeyId| report.proofs.contains_key(&(identity.clone(), *kid));
        let proven: Vec<KeyId> = begun.old.iter().copied().filter(proven).collect();
        let left = keeper.rows_left(keeper.db(), &proven)?;
        for kid in proven {
            let fenced = keeper.db().missing_fences(kid, &keeper.spots())?.is_empty();
            if !fenced || !keeper.knows_proof(&report, kid)? || left.iter().any(|left| left.kid == kid) {
                keeper.holder(kid)?.withdraw_proof(&identity, kid)?;
                begun.anew.push(kid);
            }
        }
        keeper.db().begin_rotation(target, self.mode())?;
        let open = match self.online {
            true => self.move_online(lease, &mut begun)?,
            false => self.move_atomically(lease, &mut begun)?,
        };
        let mut done = Rotated {
            target: Some(target),
            retired: retired(&report, &begun.old),
            from: begun.old.clone(),
            moved: begun.moved,
            proven: open.is_empty(),
            weaker: begun.weaker,
            open,
            ..Rotated::default()
        };
        if done.proven {
            let now = Timestamp::now();
            for kid in &begun.old {
                keeper.holder(*kid)?.note_proof(&identity, *kid, now, begun.anew.contains(kid))?;
            }
            done.unheard = keeper.announce()?;
        }
        Ok(done)
    }

    fn move_online(&self, lease: &RotationLease, begun: &mut Begun) -> Result<Vec<LedgerEntry>, Error> {
        let db = self.keeper.db();
        let walk = self.walk(db, begun.target, lease);
        let mut moved = || {
            db.fenced_since(begun.target)?;
            while self.pass(&walk, begun, lease)?.changed > 0 {}
            match self.raise_fences(begun) {
                Err(Error::Store(store::Error::MayNotFence(table))) => self.wait_instead(&table, begun, lease)?,
                outcome => outcome.and_then(|()| Ok(db.note_weaker(begun.target, None)?))?,
            }
            self.to_proof(&walk, begun, lease)
        };
        moved().map_err(|error| match error {
            // These say themselves what to do next.
            Error::Stopped { .. } | Error::NotZero { .. } | Error::FenceGone(_) | Error::AnotherSeals(_) => error,
            error => Error::CutOff(Box::new(error)),
        })
    }

    fn move_atomically(&self, lease: &RotationLease, begun: &mut Begun) -> Result<Vec<LedgerEntry>, Error> {
        self.keeper.db().fenced_since(begun.target)?;
        self.keeper.db().takes_at_once(&self.keeper.register_now(), begun.target)?;
        self.raise_fences(begun)?;
        let mut tries = 0;
        let rows = loop {
            let rows = self.keeper.db().exclusively(|db| -> Result<_, Error> {
                let walk = self.walk(db, begun.target, lease);
                self.pass(&walk, begun, lease)?;
                self.to_proof(&walk, begun, lease)
            });
            match rows {
                // Everything was taken back, and is done once more.
                Err(Error::Store(store::Error::Conflict(_))) if tries < ATOMIC_TRIES => {
                    tries += 1;
                    begun.moved = 0;
                }
                rows => break rows,
            }
        };
        rows.map_err(|error| match error {
            Error::Stopped { .. } => Error::RolledBack(Box::new(Error::Stopped { moved: 0 })),
            error => Error::RolledBack(Box::new(error)),
        })
    }

    fn raise_fences(&self, begun: &mut Begun) -> Result<(), Error> {
        for kid in &begun.old {
            if self.keeper.db().raise_fence(*kid, &self.keeper.spots())? && !begun.anew.contains(kid) {
                begun.anew.push(*kid);
            }
        }
        Ok(())
    }

    /// Where this account may make no trigger: waits until nothing is open that began before the token's fence, and nothing
    /// is held any more that was wrapped before it. Every report calls this weaker.
    fn wait_instead(&self, table: &str, begun: &mut Begun, lease: &RotationLease) -> Result<(), Error> {
        let db = self.keeper.db();
        let since = db.fenced_since(begun.target)?;
        let grace = i64::try_from(self.keeper.parts.config.policy.write_grace.as_secs()).unwrap_or(i64::MAX);
        tracing::warn!(target: "hardwrap::keeper", table, "no trigger may be made: waiting for older transactions");
        // Said at once where it cannot be seen.
        let mut open = db.open_since(since)?;
        let mut renewed = std::time::Instant::now();
        while open > 0 || db.clock()? <= since.saturating_add(grace) {
            if self.control.is_stopped() {
                return Err(Error::Stopped { moved: begun.moved });
            }
            std::thread::sleep(std::time::Duration::from_millis(200));
            if renewed.elapsed() > std::time::Duration::from_secs(10) {
                db.renew_lease(lease)?;
                renewed = std::time::Instant::now();
            }
            open = db.open_since(since)?;
        }
        db.note_weaker(begun.target, Some("waited"))?;
        begun.weaker = true;
        Ok(())
    }

    /// Behind both fences: proves that nothing is left; where something is, walks again, until nothing more can be moved.
    /// What is left then stands in the open ledger, which this gives.
    fn to_proof(&self, walk: &Walk<'_>, begun: &mut Begun, lease: &RotationLease) -> Result<Vec<LedgerEntry>, Error> {
        let mut idle = false;
        let mut stands = None;
        loop {
            walk.db.settle_ledger(&self.keeper.register_now(), begun.target)?;
            let open = open(walk.db)?;
            if open.is_empty() {
                match self.prove(walk.db, begun) {
                    // A rotator may say that it moved what still stands there.
                    Err(Error::NotZero { column, kid, count }) if !idle && stands != Some((column.clone(), count)) => {
                        tracing::debug!(target: "hardwrap::keeper", %column, %kid, count, "the walk comes again");
                        stands = Some((column, count));
                    }
                    outcome => return outcome.map(|()| open),
                }
            } else if idle {
                return Ok(open);
            }
            let passed = self.pass(walk, begun, lease)?;
            idle = passed.moved == 0 && passed.changed == 0;
        }
    }

    /// One pass over everything.
    fn pass(&self, walk: &Walk<'_>, begun: &mut Begun, lease: &RotationLease) -> Result<Passed, Error> {
        let mut passed = Passed::default();
        let columns = self.keeper.register_now();
        if self.online && walk.db.is_server() {
            passed = self.shared_pass(walk, &columns, lease)?;
            begun.moved += passed.moved;
            if passed.stopped || walk.control.is_stopped() {
                return Err(Error::Stopped { moved: begun.moved });
            }
        }
        for column in columns.iter().filter(|_| !(self.online && walk.db.is_server())) {
            let pass = walk.column(column)?;
            begun.moved += pass.moved;
            passed = passed.and(pass);
            if passed.stopped || walk.control.is_stopped() {
                return Err(Error::Stopped { moved: begun.moved });
            }
        }
        for rotator in self.keeper.rotators() {
            let failed = |error| match error {
                crate::store::Error::Refused(source) => Error::Rotator(rotator.name().to_owned(), source),
                error => error.into(),
            };
            let moved = walk.rotator(rotator.as_ref()).map_err(failed)?;
            begun.moved += moved;
            passed.moved += moved;
        }
        if passed.moved > 0 {
            begun.anew.clone_from(&begun.old);
        }
        // Nothing is moved to a key that is not the target: somebody activated another.
        if self.keeper.sealing(&self.keeper.report()?)?.fact.kid != begun.target {
            return Err(Error::AnotherSeals(begun.target));
        }
        Ok(passed)
    }

    /// One pass over the registered columns that other processes may take part in. What was left of an earlier one is
    /// done first.
    fn shared_pass(&self, walk: &Walk<'_>, columns: &[Column], lease: &RotationLease) -> Result<Passed, Error> {
        let mut passed = Passed::default();
        for column in columns {
            passed = passed.and(walk.keyless(column)?);
        }
        let shared = self.shared(walk.target, columns, Some(lease));
        shared.divide()?;
        shared.work()?;
        if self.control.is_stopped() {
            return Ok(Passed { stopped: true, ..passed });
        }
        let (moved, changed, bad) = walk.db.settle_parts(walk.target)?;
        Ok(passed.and(Passed { moved, changed, bad, stopped: false }))
    }

    fn shared<'w>(&'w self, target: KeyId, columns: &'w [Column], lease: Option<&'w RotationLease>) -> Shared<'w> {
        Shared {
            db: self.keeper.db(),
            codec: self.keeper.codec(),
            target,
            columns,
            lease,
            batch: self.batch,
            rate: self.rate,
            workers: self.workers,
            control: &self.control,
        }
    }

    /// Takes part in the walk of a rotation that another process leads, until that is over or has nobody who leads it:
    /// then this process leads.
    fn take_part(&self) -> Result<Rotated, Error> {
        let keeper = self.keeper;
        let mut mine = 0;
        loop {
            match keeper.db().lease_rotation() {
                Ok(lease) => {
                    let done = match self.nothing_left(&keeper.report()?)? {
                        Some(nothing) => Ok(Rotated { nothing: false, ..nothing }),
                        None => self.move_all(&lease),
                    };
                    keeper.db().end_lease(&lease);
                    return done.map(|done| Rotated { moved: done.moved + mine, ..done });
                }
                Err(store::Error::Leased(..)) => {}
                Err(error) => return Err(error.into()),
            }
            if self.control.is_stopped() {
                return Err(Error::Stopped { moved: mine });
            }
            let target = keeper.sealing(&keeper.report()?)?.fact.kid;
            if keeper.db().parts(target)?.1 == 0 {
                std::thread::sleep(std::time::Duration::from_millis(200));
                continue;
            }
            let columns = keeper.register_now();
            let moved = self.shared(target, &columns, None).work();
            mine += moved.map_err(|error| Error::CutOff(Box::new(error.into())))?;
        }
    }

    /// Proves that no value names an old key, and notes it with the event, in the transaction it was proven in.
    fn prove(&self, db: &Db, begun: &Begun) -> Result<(), Error> {
        db.is_primary()?;
        self.outwait_prepared(db)?;
        self.refuse_unregistered(db, false)?;
        // A proof without the fence says nothing of what is stored after it.
        for kid in begun.old.iter().filter(|_| !begun.weaker) {
            if !db.missing_fences(*kid, &self.keeper.spots())?.is_empty() {
                return Err(Error::FenceGone(*kid));
            }
        }
        if let Some(Left { spot, kid, count }) = self.keeper.rows_left(db, &begun.old)?.into_iter().next() {
            return Err(Error::NotZero { column: spot.to_string(), kid, count });
        }
        for rotator in self.keeper.rotators() {
            let count = self.keeper.counted_in(db, rotator.as_ref(), begun.target)?;
            if let (true, Some(kid)) = (count > 0, begun.old.first()) {
                return Err(Error::NotZero { column: format!("rotator {}", rotator.name()), kid: *kid, count });
            }
        }
        let target = begun.target.to_string();
        let rotation = db.rotations()?.into_iter().find(|one| one.target == target);
        let event = MasterKeyRotated {
            event: MasterKeyRotated::NAME.to_owned(),
            id: uuid::Uuid::new_v4().to_string(),
            database: db.ready()?.identity,
            environment: self.keeper.parts.config.environment.clone(),
            keyring: self.keeper.keyring().label().to_owned(),
            from: begun.old.iter().map(ToString::to_string).collect(),
            to: target,
            moved: rotation.map_or(0, |one| one.moved.unsigned_abs()),
            mode: self.mode().to_owned(),
            weaker: begun.weaker,
            at: Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
        };
        let text = serde_json::to_string(&event).map_err(|error| crate::store::Error::Refused(Box::new(error)))?;
        db.prove_rotation(begun.target, &event.id, &text)?;
        Ok(())
    }

    /// Waits until every transaction that is prepared now has ended: a trigger does not wait for them, and they may have
    /// written before it.
    fn outwait_prepared(&self, db: &Db) -> Result<(), Error> {
        let before = db.prepared()?;
        let patience = std::time::Instant::now() + std::time::Duration::from_secs(10);
        loop {
            let now = db.prepared()?;
            let left = before.iter().filter(|one| now.contains(one)).count();
            if left == 0 {
                return Ok(());
            }
            if std::time::Instant::now() > patience || self.control.is_stopped() {
                return Err(store::Error::Prepared(left).into());
            }
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
    }

    fn refuse_unregistered(&self, db: &Db, note: bool) -> Result<(), Error> {
        let (searched, found) = self.keeper.unregistered(db)?;
        if note {
            db.note_discovery(searched, found.len())?;
        }
        if found.is_empty() { Ok(()) } else { Err(Error::Unregistered(found)) }
    }

    fn mode(&self) -> &'static str {
        if self.online { "online" } else { "atomic" }
    }

    fn walk<'w>(&'w self, db: &'w Db, target: KeyId, lease: &'w RotationLease) -> Walk<'w> {
        Walk {
            db,
            codec: self.keeper.codec(),
            target,
            lease: WorkLease::Rotation(lease),
            batch: self.batch,
            rate: self.rate,
            workers: self.workers.min(self.keeper.keyring().sessions()),
            control: &self.control,
        }
    }
}

/// A rotation under way.
struct Begun {
    target: KeyId,
    old: Vec<KeyId>,
    moved: u64,
    /// Keys whose proof begins anew: their fence was down, or values were under them.
    anew: Vec<KeyId>,
    /// Whether no trigger may be made, and it was waited instead.
    weaker: bool,
}

/// How often an atomic rotation that another transaction was in the way of is tried again.
const ATOMIC_TRIES: u32 = 3;

/// Values that still name a key.
#[derive(Debug)]
pub(super) struct Left {
    pub(super) spot: Spot,
    pub(super) kid: KeyId,
    pub(super) count: u64,
}

/// Whether a database, of which these are the rotations, knows that one away from `kid` was proven. One that was restored
/// from before does not, whatever the token's record says: values under the key came back, and may be in backups made
/// since.
pub(super) fn knows_proof(rotations: &[RotationFact], report: &Report, kid: KeyId) -> bool {
    let sealing = report.current().map(|current| current.fact.kid);
    let away = |target: KeyId| target > kid || Some(target) == sealing;
    rotations.iter().any(|one| one.proven.is_some() && one.target.parse().is_ok_and(away))
}

/// Whether the last proof that nothing names `kid` goes without the database's fence, because no trigger could be made.
pub(super) fn without_fence(rotations: &[RotationFact], kid: KeyId) -> bool {
    let away = |one: &&RotationFact| one.proven.is_some() && one.target.parse().is_ok_and(|target: KeyId| target > kid);
    rotations.iter().filter(away).max_by_key(|one| &one.target).is_some_and(|one| one.weaker.is_some())
}

fn retired(report: &Report, kids: &[KeyId]) -> Vec<KeyId> {
    let retired = |kid: &KeyId| report.key(*kid).is_some_and(|key| key.fact.state == State::Retired);
    kids.iter().copied().filter(retired).collect()
}

/// The generation of the newest key.
fn newest(report: &Report) -> u16 {
    report.keys.iter().map(|key| key.fact.kid.generation()).max().unwrap_or(0)
}

fn open(db: &Db) -> Result<Vec<LedgerEntry>, Error> {
    Ok(db.ledger()?.into_iter().filter(|entry| entry.accepted.is_none()).collect())
}

impl Keeper {
    /// Makes a key that may not wrap yet, on the token where the key is that seals now; [`Rotation::run`] takes it.
    ///
    /// # Errors
    /// [`Error::TokenAway`], for its key may be newer; whatever keeps token or database from working.
    pub fn generate(&self, choice: Choice) -> Result<(KeyId, Route), Error> {
        let report = self.report()?;
        if let Some(away) = report.unreachable.first() {
            return Err(Error::TokenAway(away.clone()));
        }
        let keyring = match report.current() {
            Some(current) => self.holder(current.fact.kid)?,
            None => self.keyring(),
        };
        Ok(keyring.generate_after(choice, newest(&report))?)
    }

    /// Every registered column can be walked.
    pub(super) fn usable(&self) -> Result<(), Error> {
        for (_, facts) in self.columns() {
            facts.usable()?;
        }
        Ok(())
    }

    /// The key that seals.
    pub(super) fn sealing<'r>(&self, report: &'r Report) -> Result<&'r KeyReport, Error> {
        report.current().ok_or_else(|| Error::NoActiveKey(self.keyring().label().to_owned()))
    }

    /// The keys that values may be under and are to leave: older than the one that seals, and not destroyed.
    pub(super) fn old_keys<'r>(&self, report: &'r Report) -> Result<Vec<&'r KeyFact>, Error> {
        let sealing = self.sealing(report)?.fact.kid;
        let old = |fact: &&KeyFact| {
            fact.kid != sealing && matches!(fact.state, State::Active | State::Deactivated | State::Retired)
        };
        Ok(report.keys.iter().map(|key| &key.fact).filter(old).collect())
    }

    /// Whether this database knows that a rotation away from `kid` was proven.
    pub(super) fn knows_proof(&self, report: &Report, kid: KeyId) -> Result<bool, Error> {
        Ok(knows_proof(&self.db().rotations()?, report, kid))
    }

    /// The registered columns, as the schema describes them now.
    pub(super) fn register_now(&self) -> Vec<Column> {
        self.columns().map(|(column, _)| column.clone()).collect()
    }

    /// Where values of ours stand: the registered columns, and those of the application's rotators.
    pub(super) fn spots(&self) -> Vec<Spot> {
        let registered = self
            .columns()
            .map(|(column, _)| Spot { table: column.table().to_owned(), column: column.name().to_owned() });
        let mut spots: Vec<Spot> =
            registered.chain(self.rotators().iter().flat_map(|rotator| rotator.columns())).collect();
        spots.sort();
        spots.dedup();
        spots
    }

    /// Where envelopes stand that nobody registered and the configuration does not ignore; and how many other columns
    /// were searched.
    pub(super) fn unregistered(&self, db: &Db) -> Result<(usize, Vec<Found>), Error> {
        let ignored = self.parts.config.ignore.iter();
        let ignored = ignored.map(|ignore| Spot { table: ignore.table.clone(), column: ignore.column.clone() });
        let known: Vec<Spot> = self.spots().into_iter().chain(ignored).collect();
        Ok(db.discover(&known)?)
    }

    /// Where values name one of `kids` that were not given up, and how many.
    pub(super) fn rows_left(&self, db: &Db, kids: &[KeyId]) -> Result<Vec<Left>, Error> {
        let columns = self.register_now();
        let mut left = Vec::new();
        for spot in self.spots() {
            if kids.is_empty() || !db.may_name(&spot, kids)? {
                continue;
            }
            for kid in kids {
                let naming = db.count_naming(&spot, *kid)?.total();
                let count = naming.saturating_sub(db.given_up(&columns, &spot, *kid)?);
                if count > 0 {
                    left.push(Left { spot: spot.clone(), kid: *kid, count });
                }
            }
        }
        Ok(left)
    }

    fn counted(&self, rotator: &dyn crate::rotation::Rotator, target: KeyId) -> Result<u64, Error> {
        self.counted_in(self.db(), rotator, target)
    }

    fn counted_in(&self, db: &Db, rotator: &dyn crate::rotation::Rotator, target: KeyId) -> Result<u64, Error> {
        let count = db.look(|connection| Ok(rotator.count(connection, target)))?;
        count.map_err(|error| Error::Rotator(rotator.name().to_owned(), error))
    }

    /// Tells the listeners every event that they have not heard. Says which failed.
    pub(super) fn announce(&self) -> Result<Vec<String>, Error> {
        let mut unheard = Vec::new();
        if self.listeners.is_empty() {
            return Ok(unheard);
        }
        let parsed = |(id, text): (String, String)| Ok((id, serde_json::from_str::<MasterKeyRotated>(&text)?));
        let events: Result<Vec<_>, serde_json::Error> = self.db().outbox()?.into_iter().map(parsed).collect();
        let mut events = events.map_err(|error| crate::store::Error::Refused(Box::new(error)))?;
        // In the order of the keys, which is that of the rotations, whatever the clocks said.
        events.sort_by(|(_, one), (_, other)| one.to.cmp(&other.to));
        for (id, event) in events {
            let failed: Vec<String> = self
                .listeners
                .iter()
                .filter_map(|listener| {
                    let heard = listener.master_key_rotated(&event);
                    heard.err().map(|error| format!("{}: {error}", listener.name()))
                })
                .collect();
            if failed.is_empty() {
                self.db().note_delivered(&id)?;
            }
            unheard.extend(failed);
        }
        Ok(unheard)
    }
}
