//! The rotation's protocol (DESIGN §7) as a model: every state that it can reach is visited, and none may lose a value.
//!
//! **Modelled**, one step at a time and in every order:
//! - two applications that cache which key seals, seal a value, and store it at any later time: after the count, after
//!   the proof, after the destruction. Where the fence refuses it they seal it again. They clear rows, too;
//! - the token: who may wrap, who may unwrap, and the proof in its record;
//! - the database: two rows, the fence, and its own record of the proof. Rows are sealed without bound: only which
//!   versions of a value are the same is kept, so that what is explored is finite and nothing is cut short;
//! - the rotator of `src/keeper/rotate.rs` and `src/rotation/walk.rs`, online and atomic, which reads a front, and
//!   writes it later. It crashes between any two steps, and is resumed at any time, or never;
//! - retirement and destruction of `src/keeper/retire.rs`: the gates first, the act later; a retired key comes back;
//! - a backup, taken at any time and restored as often as one likes while it is younger than the horizon; and time.
//!
//! **Left out**, and why that is sound:
//! - *the write that is late only at its commit*: SQLite lets one writer in at a time, so a store and its trigger are
//!   one step, and nothing comes between the steps of the atomic transaction, which is one step here;
//! - *a second rotator*: the lease keeps it out, and every write of the walk asks for it (`tests/rotation.rs`);
//! - *a restore under a running command*: it ends the command here, for what uses the database is stopped first, as
//!   `src/docs/rotation.md` says. SQLite does not see to that: `.restore` goes under an open connection, and a rotation
//!   that had raised its fence would prove without it;
//! - *columns, pages, rotators of the application, other databases*: they are walked and counted one after the other,
//!   as rows are here; a gate asks for the proof of each database;
//! - *the ledger*: what cannot be re-wrapped keeps a rotation from its proof, or was given up by the operator;
//! - *more keys*: a fence, a proof and a destruction are about one old key, whichever seals;
//! - *whoever may write to token or database past hardwrap*: who gives a key its permission back, or drops a trigger,
//!   is found by the gates, but nothing keeps him from storing what he likes meanwhile;
//! - *a second backup*: with two, one of a database that was restored from before the proof can outlive a third restore,
//!   of a later one, and nobody knows that it was made. So: after a restore, `rotate --resume` before the next backup.
//!
//! Each rule taken out must give a counterexample: only so is it known that the model can see a loss at all.
//! With HARDWRAP_LONG there are three rows.
#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout, reason = "tests")]

use std::collections::{HashSet, VecDeque};
use std::env;
use std::fmt;
use std::hash::{BuildHasherDefault, Hasher};

#[test]
fn the_protocol_loses_nothing() {
    let rows = if env::var_os("HARDWRAP_LONG").is_some() { 3 } else { 2 };
    for mode in [Mode::Online, Mode::Atomic] {
        let explored = Model { mode, rows, ..SOUND }.explore(|_| true);
        println!("{mode:?}: {explored}");
        assert!(explored.loss.is_none());
        let mut must = vec![
            Event::Proved,
            Event::ProvedAfterCrash,
            Event::Withdrew,
            Event::RestoredAfterProof,
            Event::Refused,
            Event::RefusedAfterDestruction,
            Event::Retired,
            Event::BroughtBack,
            Event::Destroyed,
            Event::DroppedFence,
        ];
        must.extend((mode == Mode::Online).then_some(Event::WriterWon));
        for event in must {
            assert!(explored.has_reached(event), "{mode:?}: never {event:?}");
        }
    }
}

/// A value that was wrapped before the fence on the token is stored after the last count.
#[test]
fn without_the_database_fence_a_late_value_is_lost() {
    for mode in [Mode::Online, Mode::Atomic] {
        Model { mode, database_fence: false, ..SOUND }.must_break(Broken::UnderDestroyedKey);
    }
}

/// The walk writes over what an application stored since it read.
#[test]
fn without_the_front_comparison_an_update_is_lost() {
    Model { front_comparison: false, ..SOUND }.must_break(Broken::LostUpdate);
}

/// The walk writes where an application cleared the row since it read.
#[test]
fn without_the_front_comparison_a_value_is_resurrected() {
    Model { front_comparison: false, ..SOUND }.must_break(Broken::Resurrected);
}

/// A backup from before the proof is restored after the destruction.
#[test]
fn without_the_horizon_a_backup_is_lost() {
    for mode in [Mode::Online, Mode::Atomic] {
        Model { mode, horizon_rule: false, ..SOUND }.must_break(Broken::UnderDestroyedKey);
    }
}

/// The horizon begins at a proof that the fence was not yet there for: a backup younger than that holds a late value.
#[test]
fn with_the_proof_before_the_fence_a_backup_is_lost() {
    Model { fence_before_proof: false, ..SOUND }.must_break(Broken::UnderDestroyedKey);
}

/// The horizon goes on from a proof that a restore has undone: a backup of what was restored is younger than that.
#[test]
fn without_a_new_proof_a_backup_is_lost() {
    Model { proof_anew: false, ..SOUND }.must_break(Broken::UnderDestroyedKey);
}

/// As above, and the values are gone again before anybody counts: only the database's own record tells.
#[test]
fn with_the_proof_on_the_token_alone_a_backup_is_lost() {
    for mode in [Mode::Online, Mode::Atomic] {
        Model { mode, database_knows: false, ..SOUND }.must_break(Broken::UnderDestroyedKey);
    }
}

/// Values that a restore brought back are there when the key goes.
#[test]
fn without_a_last_count_a_restored_value_is_lost() {
    Model { counts_again: false, database_knows: false, ..SOUND }.must_break(Broken::UnderDestroyedKey);
}

/// The fence is dropped with the key, and then a value comes that somebody has held since before the rotation.
#[test]
fn without_the_write_grace_a_late_value_is_lost() {
    Model { write_grace: false, ..SOUND }.must_break(Broken::UnderDestroyedKey);
}

/// What is explored: how much of everything, and which rules hold.
#[derive(Clone, Copy, Debug)]
struct Model {
    mode: Mode,
    rows: u8,
    /// How many ticks after it was taken a backup is not restored any more.
    horizon: u8,
    /// Triggers refuse a new value under the old key, and retirement asks for them.
    database_fence: bool,
    /// The walk writes only where what it read still stands.
    front_comparison: bool,
    /// Destruction waits until no backup from before the proof is restored any more.
    horizon_rule: bool,
    /// Retirement and destruction count again.
    counts_again: bool,
    /// The fence is raised before the proof.
    fence_before_proof: bool,
    /// Where values came back, the horizon begins anew.
    proof_anew: bool,
    /// A proof holds only where the database knows of it, too.
    database_knows: bool,
    /// The fence stays until nobody holds a value from before it.
    write_grace: bool,
}

const SOUND: Model = Model {
    mode: Mode::Online,
    rows: 2,
    horizon: 2,
    database_fence: true,
    front_comparison: true,
    horizon_rule: true,
    counts_again: true,
    fence_before_proof: true,
    proof_anew: true,
    database_knows: true,
    write_grace: true,
};

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Mode {
    Online,
    Atomic,
}

/// What must never happen.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Broken {
    /// A value names a key that is retired, and no backup brought it there.
    Unreadable,
    LostUpdate,
    Resurrected,
    UnderDestroyedKey,
}

#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
enum Key {
    Old,
    New,
}

/// What stands in a row, or is to: which version of its value, 0 for none, under which key.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
struct Value {
    version: u8,
    key: Key,
}

const NONE: Value = Value { version: 0, key: Key::Old };
/// The version of what was only just sealed: one more than [`State::settle`] gives out.
const FRESH: u8 = 6;
const MOST_ROWS: usize = 3;

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct State {
    database: Database,
    backup: Option<Backup>,
    applications: [Application; 2],
    old: OldKey,
    new: NewKey,
    /// Ticks since the proof that the token's record holds; no more than the horizon.
    proof: Option<u8>,
    rotator: Rotator,
    /// A backup was restored since the old key was retired: a retired key can be needed, and be brought back.
    restored: bool,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Database {
    rows: [Value; MOST_ROWS],
    fence: bool,
    /// Its own record of the proof.
    proven: bool,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Backup {
    database: Database,
    age: u8,
}

#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
struct Application {
    /// The key that it takes for the one that seals.
    cached: Key,
    /// What it has sealed and not stored, and where that goes.
    row: u8,
    hand: Value,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum OldKey {
    Active,
    Deactivated,
    Retired,
    Destroyed,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum NewKey {
    Missing,
    PreActive,
    Active,
}

/// Whoever has the lease, and what is next: a rotation, a retirement, a destruction.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Rotator {
    step: Step,
    row: u8,
    /// The front that was read and is to be written.
    read: Value,
    resumed: bool,
    /// The fence is raised: passes go on to the proof.
    fenced: bool,
    /// What the pass under way did, ...
    moved: bool,
    changed: bool,
    /// ... and whether the last one behind the fence did nothing.
    idle: bool,
    /// The horizon is to begin anew.
    anew: bool,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Step {
    Nothing,
    Generate,
    Activate,
    FenceToken,
    Doubt,
    Read,
    Write,
    FenceDatabase,
    Prove,
    Transaction,
    Note,
    Retire,
    Destroy,
}

const NOBODY: Rotator = Rotator {
    step: Step::Nothing,
    row: 0,
    read: NONE,
    resumed: false,
    fenced: false,
    moved: false,
    changed: false,
    idle: false,
    anew: false,
};

/// What a step was.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Event {
    Refreshed,
    Sealed,
    Stored,
    Refused,
    RefusedAfterDestruction,
    Cleared,
    Tick,
    BackedUp,
    Restored,
    RestoredAfterProof,
    Rotate,
    Resume,
    Crashed,
    /// The rotator did what was next.
    Did,
    WriterWon,
    Withdrew,
    Proved,
    ProvedAfterCrash,
    RetireBegun,
    Retired,
    BroughtBack,
    DestroyBegun,
    Destroyed,
    DroppedFence,
}

impl State {
    fn start() -> Self {
        let mut rows = [NONE; MOST_ROWS];
        rows[0].version = 1;
        let application = Application { cached: Key::Old, row: 0, hand: NONE };
        Self {
            database: Database { rows, fence: false, proven: false },
            backup: None,
            applications: [application; 2],
            old: OldKey::Active,
            new: NewKey::Missing,
            proof: None,
            rotator: NOBODY,
            restored: false,
        }
    }

    fn sealing(&self) -> Key {
        if self.new == NewKey::Active { Key::New } else { Key::Old }
    }

    fn may_wrap(&self, key: Key) -> bool {
        match key {
            Key::Old => self.old == OldKey::Active,
            Key::New => self.new == NewKey::Active,
        }
    }

    fn broken(&self) -> Option<Broken> {
        match self.old {
            OldKey::Destroyed if self.database.names_old() => Some(Broken::UnderDestroyedKey),
            OldKey::Retired if self.database.names_old() && !self.restored => Some(Broken::Unreadable),
            _ => None,
        }
    }

    /// The same state by fewer names: which application is which does not matter, nor how often a row was sealed, only
    /// which versions are the same.
    fn settle(&mut self) {
        self.applications.sort_unstable();
        for row in 0..MOST_ROWS {
            let mut names = [0; 1 + FRESH as usize];
            let mut last = 0;
            let mut rename = |value: &mut Value| {
                let name = &mut names[usize::from(value.version)];
                if value.version != 0 && *name == 0 {
                    last += 1;
                    *name = last;
                }
                value.version = *name;
            };
            rename(&mut self.database.rows[row]);
            if usize::from(self.rotator.row) == row {
                rename(&mut self.rotator.read);
            }
            if let Some(backup) = &mut self.backup {
                rename(&mut backup.database.rows[row]);
            }
            for application in &mut self.applications {
                if usize::from(application.row) == row {
                    rename(&mut application.hand);
                }
            }
        }
    }

    /// As a number of its own.
    fn packed(&self) -> u64 {
        let mut packed = 0;
        let mut digit = |digit: u64, radix: u64| {
            assert!(digit < radix);
            packed = packed * radix + digit; // checked: tests have overflow checks
        };
        let value = |value: Value| 2 * u64::from(value.version) + value.key as u64;
        let backup = self.backup.map(|backup| (backup.database, 1 + u64::from(backup.age)));
        digit(backup.map_or(0, |(_, age)| age), 4);
        for database in [Some(self.database), backup.map(|(database, _)| database)].into_iter().flatten() {
            for row in database.rows {
                digit(value(row), 2 * u64::from(FRESH));
            }
            digit(database.fence.into(), 2);
            digit(database.proven.into(), 2);
        }
        for application in self.applications {
            digit(application.cached as u64, 2);
            digit(application.row.into(), 4);
            digit(value(application.hand), 2 * u64::from(FRESH));
        }
        digit(self.old as u64, 4);
        digit(self.new as u64, 3);
        digit(self.proof.map_or(0, |age| 1 + u64::from(age)), 4);
        digit(self.rotator.step as u64, 13);
        digit(self.rotator.row.into(), 4);
        digit(value(self.rotator.read), 2 * u64::from(FRESH));
        let Rotator { resumed, fenced, moved, changed, idle, anew, .. } = self.rotator;
        for flag in [resumed, fenced, moved, changed, idle, anew, self.restored] {
            digit(flag.into(), 2);
        }
        packed
    }
}

impl Database {
    fn names_old(&self) -> bool {
        self.rows.iter().any(is_old)
    }
}

fn is_old(value: &Value) -> bool {
    *value != NONE && value.key == Key::Old
}

type Tell<'a> = &'a mut dyn FnMut(Event, State, Option<Broken>);

impl Model {
    /// Every state that can come next, and by what.
    fn next(&self, state: &State, tell: Tell<'_>) {
        let mut told = |event, mut next: State, broken: Option<Broken>| {
            next.settle();
            tell(event, next, broken.or_else(|| next.broken()));
        };
        self.applications(state, &mut told);
        self.world(state, &mut told);
        match state.rotator.step {
            Step::Nothing => self.operator(state, &mut told),
            _ => self.rotator(state, &mut told),
        }
    }

    fn applications(&self, state: &State, tell: Tell<'_>) {
        let sealing = state.sealing();
        for (at, application) in state.applications.iter().enumerate() {
            let with = |application| {
                let mut next = *state;
                next.applications[at] = application;
                next
            };
            if application.cached != sealing {
                tell(Event::Refreshed, with(Application { cached: sealing, ..*application }), None);
            }
            let hand = application.hand;
            if hand == NONE {
                // Where the token refuses the key, the application reads the keyring again.
                let key = if state.may_wrap(application.cached) { application.cached } else { sealing };
                for row in 0..self.rows {
                    let hand = Value { version: FRESH, key };
                    tell(Event::Sealed, with(Application { cached: key, row, hand }), None);
                }
            } else if self.database_fence && state.database.fence && hand.key == Key::Old {
                let destroyed = state.old == OldKey::Destroyed;
                let event = if destroyed { Event::RefusedAfterDestruction } else { Event::Refused };
                let hand = Value { key: sealing, ..hand };
                tell(event, with(Application { cached: sealing, hand, ..*application }), None);
            } else {
                let mut next = with(Application { row: 0, hand: NONE, ..*application });
                next.database.rows[usize::from(application.row)] = hand;
                tell(Event::Stored, next, None);
            }
        }
        for (row, _) in state.database.rows.iter().enumerate().filter(|(_, value)| **value != NONE) {
            let mut next = *state;
            next.database.rows[row] = NONE;
            tell(Event::Cleared, next, None);
        }
    }

    /// Time, backups and crashes.
    fn world(&self, state: &State, tell: Tell<'_>) {
        let mut next = *state;
        next.proof = state.proof.map(|age| self.horizon.min(age + 1));
        let older = state.backup.map(|backup| Backup { age: backup.age + 1, ..backup });
        next.backup = older.filter(|backup| backup.age < self.horizon);
        if next != *state {
            tell(Event::Tick, next, None);
        }
        let backup = Some(Backup { database: state.database, age: 0 });
        if state.backup != backup {
            tell(Event::BackedUp, State { backup, ..*state }, None);
        }
        if let Some(backup) = state.backup {
            let event = if state.proof.is_some() { Event::RestoredAfterProof } else { Event::Restored };
            let restored = state.restored || state.old == OldKey::Retired;
            tell(event, State { database: backup.database, rotator: NOBODY, restored, ..*state }, None);
        }
        if state.rotator.step != Step::Nothing {
            tell(Event::Crashed, State { rotator: NOBODY, ..*state }, None);
        }
    }

    /// What may be begun while nobody has the lease.
    fn operator(&self, state: &State, tell: Tell<'_>) {
        let begin = |step| State { rotator: Rotator { step, ..NOBODY }, ..*state };
        let left = state.proof.is_none() || !self.holds(state) || state.database.names_old();
        match state.new {
            NewKey::Missing => tell(Event::Rotate, begin(Step::Generate), None),
            NewKey::PreActive => tell(Event::Rotate, begin(Step::Activate), None),
            NewKey::Active if state.old != OldKey::Destroyed && left => {
                let rotator = Rotator { step: Step::FenceToken, resumed: true, ..NOBODY };
                tell(Event::Resume, State { rotator, ..*state }, None);
            }
            NewKey::Active => {}
        }
        let counted = !self.counts_again || !state.database.names_old();
        let open = state.proof.is_some() && self.holds(state) && counted;
        match state.old {
            OldKey::Deactivated if open => {
                tell(Event::RetireBegun, State { restored: false, ..begin(Step::Retire) }, None);
            }
            OldKey::Retired => {
                tell(Event::BroughtBack, State { old: OldKey::Deactivated, restored: false, ..*state }, None);
                if open && (state.proof == Some(self.horizon) || !self.horizon_rule) {
                    tell(Event::DestroyBegun, begin(Step::Destroy), None);
                }
            }
            OldKey::Destroyed if state.database.fence => {
                let held = state.applications.iter().any(|application| is_old(&application.hand));
                if !held || !self.write_grace {
                    let database = Database { fence: false, ..state.database };
                    tell(Event::DroppedFence, State { database, ..*state }, None);
                }
            }
            _ => {}
        }
    }

    /// Whether a proof on the token holds, as far as the database shows.
    fn holds(&self, state: &State) -> bool {
        (state.database.fence || !self.database_fence) && (state.database.proven || !self.database_knows)
    }

    fn rotator(&self, state: &State, tell: Tell<'_>) {
        let rotator = state.rotator;
        let row = usize::from(rotator.row);
        let mut next = *state;
        let mut event = Event::Did;
        let mut broken = None;
        match rotator.step {
            Step::Nothing => return,
            Step::Generate => {
                next.new = NewKey::PreActive;
                next.rotator.step = Step::Activate;
            }
            Step::Activate => {
                next.new = NewKey::Active;
                next.rotator.step = Step::FenceToken;
            }
            Step::FenceToken => {
                if state.old == OldKey::Active {
                    next.old = OldKey::Deactivated;
                }
                next.rotator.step = Step::Doubt;
            }
            Step::Doubt => {
                let doubtful = state.database.names_old() || self.database_knows && !self.holds(state);
                if self.proof_anew && state.proof.is_some() && doubtful {
                    next.proof = None;
                    next.rotator.anew = true;
                    event = Event::Withdrew;
                }
                next.rotator.step = if self.mode == Mode::Online { Step::Read } else { Step::FenceDatabase };
            }
            Step::Read if rotator.row == self.rows => {
                next.rotator.idle = rotator.fenced && !rotator.moved && !rotator.changed;
                (next.rotator.row, next.rotator.moved, next.rotator.changed) = (0, false, false);
                next.rotator.step = match (rotator.fenced, rotator.changed) {
                    (false, true) => Step::Read,
                    (false, false) if self.fence_before_proof => Step::FenceDatabase,
                    _ => Step::Prove,
                };
            }
            Step::Read if is_old(&state.database.rows[row]) => {
                next.rotator.read = state.database.rows[row];
                next.rotator.step = Step::Write;
            }
            Step::Read => next.rotator.row += 1,
            // A retired key does not unwrap: the rotation is cut off.
            Step::Write if state.old != OldKey::Deactivated => next.rotator = NOBODY,
            Step::Write => {
                let stands = state.database.rows[row];
                if self.front_comparison && stands != rotator.read {
                    next.rotator.changed = true;
                    event = Event::WriterWon;
                } else {
                    next.database.rows[row] = Value { key: Key::New, ..rotator.read };
                    (next.rotator.moved, next.rotator.anew) = (true, true);
                    broken = match stands.version {
                        version if version == rotator.read.version => None,
                        0 => Some(Broken::Resurrected),
                        _ => Some(Broken::LostUpdate),
                    };
                }
                (next.rotator.step, next.rotator.read) = (Step::Read, NONE);
                next.rotator.row += 1;
            }
            Step::FenceDatabase => {
                (next.database.fence, next.rotator.fenced) = (true, true);
                next.rotator.anew |= !state.database.fence;
                match self.mode {
                    Mode::Online if self.fence_before_proof => next.rotator.step = Step::Prove,
                    Mode::Online => next.rotator = NOBODY,
                    Mode::Atomic => next.rotator.step = Step::Transaction,
                }
            }
            Step::Prove if !state.database.names_old() => {
                next.database.proven = true;
                next.rotator.step = Step::Note;
            }
            Step::Prove if rotator.idle => next.rotator = NOBODY,
            Step::Prove => next.rotator.step = Step::Read,
            Step::Transaction if state.database.names_old() && state.old != OldKey::Deactivated => {
                next.rotator = NOBODY;
            }
            Step::Transaction => {
                for value in next.database.rows.iter_mut().filter(|value| is_old(value)) {
                    value.key = Key::New;
                    next.rotator.anew = true;
                }
                next.database.proven = true;
                next.rotator.step = Step::Note;
            }
            Step::Note => {
                next.proof = state.proof.filter(|_| !(rotator.anew && self.proof_anew)).or(Some(0));
                event = if rotator.resumed { Event::ProvedAfterCrash } else { Event::Proved };
                if self.fence_before_proof || self.mode == Mode::Atomic {
                    next.rotator = NOBODY;
                } else {
                    next.rotator.step = Step::FenceDatabase;
                }
            }
            Step::Retire => {
                (next.old, next.rotator) = (OldKey::Retired, NOBODY);
                event = Event::Retired;
            }
            Step::Destroy => {
                (next.old, next.rotator) = (OldKey::Destroyed, NOBODY);
                event = Event::Destroyed;
            }
        }
        tell(event, next, broken);
    }

    /// Visits every state, the nearest first, until something `ends` it.
    fn explore(&self, ends: impl Fn(Broken) -> bool) -> Explored {
        let mut known: HashSet<u64, BuildHasherDefault<Spread>> = HashSet::default();
        let mut queue = VecDeque::from([State::start()]);
        // How each state was first come to: from which, by which of the ways on.
        let mut ways = vec![(0, 0)];
        known.insert(State::start().packed());
        let mut reached = 0;
        let mut loss = None;
        let mut at = 0;
        while let (Some(state), None) = (queue.pop_front(), &loss) {
            let mut way = 0;
            self.next(&state, &mut |event, next, broken| {
                reached |= 1 << event as u32;
                if known.insert(next.packed()) {
                    queue.push_back(next);
                    ways.push((at, way));
                }
                if let (Some(broken), None) = (broken.filter(|broken| ends(*broken)), &loss) {
                    loss = Some((broken, way));
                }
                way += 1;
            });
            if loss.is_none() {
                at += 1;
            }
        }
        let loss = loss.map(|(broken, way)| (broken, self.trace(&ways, at, way)));
        Explored { states: known.len(), reached, loss }
    }

    /// The way from the start to the state `at`, and one step on.
    fn trace(&self, ways: &[(u32, u8)], at: u32, last: u8) -> Trace {
        let mut path = vec![last];
        let mut at = at;
        while at != 0 {
            let (before, way) = ways[at as usize];
            path.push(way);
            at = before;
        }
        let mut trace = Vec::new();
        let mut state = State::start();
        while let Some(way) = path.pop() {
            let mut on = Vec::new();
            self.next(&state, &mut |event, next, _| on.push((event, next)));
            let (event, next) = on[usize::from(way)];
            trace.push((state, event, next));
            state = next;
        }
        trace
    }

    fn must_break(&self, expected: Broken) {
        let explored = self.explore(|broken| broken == expected);
        println!("{:?}: {explored}", self.mode);
        assert!(explored.loss.is_some(), "{expected:?} was not found: {self:?}");
    }
}

/// Where each step began, what it was, and where it led.
type Trace = Vec<(State, Event, State)>;

struct Explored {
    states: usize,
    /// A bit for each [`Event`].
    reached: u32,
    /// The first loss, and the shortest way to it.
    loss: Option<(Broken, Trace)>,
}

impl Explored {
    fn has_reached(&self, event: Event) -> bool {
        self.reached & 1 << event as u32 != 0
    }
}

impl fmt::Display for Explored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} states", self.states)?;
        let Some((broken, trace)) = &self.loss else { return Ok(()) };
        write!(f, ", {broken:?} after {} steps", trace.len())?;
        for (before, event, after) in trace {
            let said = match event {
                Event::Did => format!("{:?}", before.rotator.step),
                event => format!("{event:?}"),
            };
            write!(f, "\n  {said:<24}{after}")?;
        }
        Ok(())
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "old key {:?}, rows {}", self.old, self.database)?;
        for application in self.applications.iter().filter(|application| application.hand != NONE) {
            write!(f, "; held for row {}: {}", application.row, application.hand)?;
        }
        if let Some(age) = self.proof {
            write!(f, "; proof of age {age}")?;
        }
        match &self.backup {
            Some(Backup { database, age }) => write!(f, "; backup of age {age}: {database}"),
            None => Ok(()),
        }
    }
}

impl fmt::Display for Database {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for row in self.rows {
            write!(f, "{row} ")?;
        }
        f.write_str(if self.fence { "fenced" } else { "open" })
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            NONE => f.write_str("-"),
            Value { version, key: Key::Old } => write!(f, "v{version}/old"),
            Value { version, key: Key::New } => write!(f, "v{version}/new"),
        }
    }
}

/// Spreads a packed state over a table; nobody chooses states to make them meet.
#[derive(Default)]
struct Spread(u64);

impl Hasher for Spread {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(self.0 ^ u64::from(*byte)));
    }

    fn write_u64(&mut self, packed: u64) {
        let mixed = packed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0 = mixed ^ mixed >> 32;
    }
}
