//! A keyring: the master keys with one label on one token, as one process uses them.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use cryptoki::error::RvError;
use cryptoki::mechanism::Mechanism;
use cryptoki::object::{Attribute, KeyType, ObjectClass, ObjectHandle};
use jiff::Timestamp;

use super::counted::Counted;
use super::error::Recovery;
use super::forks::forks;
use super::keyset::{Found, KeySet, Leftover, Seen, key_id, making};
use super::module::lock;
use super::pool::{Lease, Pool};
use super::record::{self, Canary, Record};
use super::route::{Access, NO_RANDOM};
use super::uses::Uses;
use super::{
    Choice, Ckr, DatabaseFact, Error, Health, KeyFact, PinSource, Probe, Proof, Route, RouteTrial, State, Stranger,
    TokenInfo, TokenUri, custody,
};
use crate::process::Own;
use crate::provider::{Aad, Alg, KeyId, KeyProvider, MasterKey, ProviderError, WrappedDek, random};
use crate::secret::Dek;

/// Which keyring on which token, and how to reach it.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The token.
    pub uri: TokenUri,
    /// Where the PIN comes from; `None` for tokens with a keypad of their own, or without a PIN.
    pub pin_source: Option<PinSource>,
    /// The label of the keys.
    pub keyring: String,
    /// What the module wants in `pReserved` of `C_Initialize` (NSS).
    pub module_arguments: Option<String>,
    /// How many sessions to open at most. One is enough.
    pub sessions: usize,
}

impl Settings {
    /// The keyring `hardwrap` on the token of `uri`, with the PIN source the URI names, in up to eight sessions.
    pub fn new(uri: TokenUri) -> Self {
        let pin_source = uri.pin_source.clone();
        Self { uri, pin_source, keyring: "hardwrap".to_owned(), module_arguments: None, sessions: 8 }
    }
}

/// The master keys with one label on one token. Connects when it is first used, and again when it has to.
pub struct Keyring {
    pub(super) pool: Pool,
    memory: Own<Memory>,
}

/// What a process remembers for itself. A forked child starts with nothing: wraps that its parent reserved are the
/// parent's.
#[derive(Default)]
struct Memory {
    uses: Uses,
    missed: Mutex<Missed>,
    /// When each key that the record names was first looked for in vain.
    silences: Mutex<BTreeMap<KeyId, Instant>>,
}

/// Which ids the keyring was read for in this second and did not hold.
#[derive(Default)]
struct Missed {
    since: Option<Instant>,
    absent: BTreeSet<KeyId>,
}

/// What [`Keyring::init`] did.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Made {
    /// It made this key.
    Key(KeyId, Route),
    /// It finished what a crash had left: this key was recorded and not yet relabelled.
    Finished(KeyId, Route),
    /// This key was there, active and working.
    Nothing(KeyId, Route),
}

/// What stands on the token, for people and programs.
#[derive(Clone, Debug)]
pub struct Report {
    /// The token.
    pub token: TokenInfo,
    /// The keys the record names, oldest first.
    pub keys: Vec<KeyReport>,
    /// Objects with our label that do not count.
    pub strangers: Vec<Stranger>,
    /// Ids, in hex, of keys that a crash left in the making, and whether the record names them.
    pub leftovers: Vec<(String, bool)>,
    /// Identities of the databases that use this keyring.
    pub databases: Vec<String>,
    /// All databases that do or did.
    pub all_databases: BTreeMap<String, DatabaseFact>,
    /// What is proven, by the identity of a database and the id of a key.
    pub proofs: BTreeMap<(String, KeyId), Proof>,
    /// Tokens, by name, that are part of this and could not be asked.
    pub unreachable: Vec<String>,
}

impl KeyReport {
    /// Whether it is as the record says: it opens, or is retired, or was destroyed.
    pub fn is_well(&self) -> bool {
        self.works || matches!(self.health, Health::Asleep | Health::Gone)
    }
}

impl Report {
    /// The key that new values are sealed under.
    pub fn current(&self) -> Option<&KeyReport> {
        self.keys.iter().find(|key| key.current)
    }

    /// Takes in what stands on another token: of all active keys the one made last seals.
    pub(crate) fn add(&mut self, other: Self) {
        self.keys.extend(other.keys);
        self.keys.sort_by_key(|key| key.fact.kid);
        let newest = self.keys.iter().filter(|key| key.current).map(|key| key.fact.kid).next_back();
        self.keys.iter_mut().for_each(|key| key.current = Some(key.fact.kid) == newest);
        self.strangers.extend(other.strangers);
        self.leftovers.extend(other.leftovers);
        for database in other.databases {
            if !self.databases.contains(&database) {
                self.databases.push(database);
            }
        }
        for (identity, fact) in other.all_databases {
            self.all_databases.entry(identity).or_insert(fact);
        }
        self.proofs.extend(other.proofs);
    }

    /// The key of this id.
    pub fn key(&self, kid: KeyId) -> Option<&KeyReport> {
        self.keys.iter().find(|key| key.fact.kid == kid)
    }
}

/// One key of a [`Report`].
#[derive(Clone, Debug)]
pub struct KeyReport {
    /// What the record says.
    pub fact: KeyFact,
    /// Whether the key was found on the token, alone, with the right attributes, and its canary unwrapped: it opens.
    pub works: bool,
    /// How it is.
    pub health: Health,
    /// Whether new values are sealed under it.
    pub current: bool,
    /// How many wraps are reserved, where the algorithm counts them.
    pub reserved: Option<u64>,
}

impl Keyring {
    /// Loads the module. The token is not asked before the first use.
    ///
    /// # Errors
    /// [`Error::Load`].
    pub fn new(settings: Settings) -> Result<Self, Error> {
        Ok(Self { pool: Pool::new(settings)?, memory: Own::new(forks, Memory::default()) })
    }

    /// The label of the keys.
    pub fn label(&self) -> &str {
        &self.pool.settings().keyring
    }

    /// How many sessions are opened at most.
    pub fn sessions(&self) -> usize {
        self.pool.settings().sessions
    }

    /// Closes this process's sessions on the token, once the calls in progress have ended; it logs the process out
    /// where nobody else in it has a session there. From then on every call is [`Error::Closed`]. The module stays
    /// initialised: finalising it at exit crashes more modules than it helps.
    pub fn close(&self) {
        self.pool.close();
    }

    fn memory(&self) -> &Memory {
        self.memory.get(|_| Memory::default())
    }

    /// Connects now, if that is not done: finds token and keys, and checks attributes and canaries.
    ///
    /// # Errors
    /// Whatever keeps the keyring from working.
    pub fn connect(&self) -> Result<(), Error> {
        self.pool.with(|_| Ok(()))
    }

    /// What stands on the token now.
    ///
    /// # Errors
    /// Whatever keeps the token from answering.
    pub fn report(&self) -> Result<Report, Error> {
        self.pool.refresh()?;
        self.pool.with(|lease| {
            let keys = lease.keys();
            let current = keys.current().map(|key| key.id);
            let report = |fact: &KeyFact| KeyReport {
                fact: fact.clone(),
                works: matches!(keys.health(fact), Health::Works | Health::MayNotWrap | Health::MayWrap),
                health: keys.health(fact),
                current: current == Some(fact.kid),
                reserved: (fact.route.alg() == Alg::A256GcmKw).then(|| keys.record.reserved(fact.kid)),
            };
            Ok(Report {
                token: lease.token().clone(),
                keys: keys.record.keys.values().map(report).collect(),
                strangers: keys.strangers.clone(),
                leftovers: keys.leftovers.iter().map(|left| (hex::encode(&left.id), left.recorded.is_some())).collect(),
                databases: keys.record.users().cloned().collect(),
                all_databases: keys.record.databases.clone(),
                proofs: keys.record.proofs(),
                unreachable: Vec::new(),
            })
        })
    }

    /// Makes sure that the keyring has an active key: finishes one that a crash left, or makes one by the first route
    /// of `choice` that works here. Run again, it changes nothing.
    ///
    /// # Errors
    /// [`Error::Silent`] if the record names an active key that is not there; [`Error::NoDataObjects`],
    /// [`Error::NoRoute`], [`Error::Untrusted`], and whatever keeps the token from answering.
    pub fn init(&self, choice: Choice) -> Result<Made, Error> {
        self.pool.refresh()?;
        if let Some(made) = self.pool.with(|lease| Ok(active(lease).map(|(kid, route)| Made::Nothing(kid, route))))? {
            return Ok(made);
        }
        let finished = self.pool.once(|lease| finish_recorded(lease, |fact| fact.state == State::Active))?;
        let made = match finished {
            Some((kid, route)) => Made::Finished(kid, route),
            None => {
                let keyring = &self.pool.settings().keyring;
                let (kid, route) = self.pool.once(|lease| make_key(lease, keyring, choice, State::Active, 0))?;
                Made::Key(kid, route)
            }
        };
        self.pool.refresh()?;
        match self.pool.with(|lease| Ok(active(lease)))? {
            Some(_) => Ok(made),
            None => Err(Error::Untrusted("it was made, and is not found again under its label".to_owned())),
        }
    }

    /// Finishes the making of a key that a crash left recorded and not yet relabelled; says whether there was one.
    ///
    /// # Errors
    /// Whatever keeps the token from answering.
    pub(crate) fn finish(&self, kid: KeyId) -> Result<bool, Error> {
        self.pool.refresh()?;
        let finished = self.pool.once(|lease| finish_recorded(lease, |fact| fact.kid == kid))?;
        self.pool.refresh()?;
        Ok(finished.is_some())
    }

    /// Makes a key that may not wrap yet (pre-active): [`Keyring::activate`] lets it.
    ///
    /// # Errors
    /// As [`Keyring::init`].
    pub fn generate(&self, choice: Choice) -> Result<(KeyId, Route), Error> {
        self.generate_after(choice, 0)
    }

    /// [`Keyring::generate`], of a later generation than `generation`: that of the newest key on any token.
    ///
    /// # Errors
    /// As [`Keyring::init`].
    pub fn generate_after(&self, choice: Choice, generation: u16) -> Result<(KeyId, Route), Error> {
        self.pool.refresh()?;
        let keyring = &self.pool.settings().keyring;
        let made = self.pool.once(|lease| make_key(lease, keyring, choice, State::PreActive, generation))?;
        self.pool.refresh()?;
        Ok(made)
    }

    /// Lets a pre-active key wrap: new values are sealed under it from now on, in every process within a second of its
    /// next call. Keys that are active stay so; of those, the one made last seals. Done again, it changes nothing. A key
    /// that a crash left recorded, and not yet under the keyring's label, gets that first.
    ///
    /// # Errors
    /// [`Error::NoSuchKey`]; [`Error::Transition`] from any other state; whatever keeps the token from answering.
    pub fn activate(&self, kid: KeyId) -> Result<(), Error> {
        self.finish(kid)?;
        self.change(kid, |lease, fact, found| {
            match fact.state {
                State::PreActive | State::Active => {}
                _ => return Err(refused(fact, State::Active, "; a key never comes back to that")),
            }
            // First the permission, then the record: who reads that the key is active can wrap under it.
            permit_wrapping(lease.access(), found.handle, fact.route, true)?;
            let activated = fact.activated.or(Some(Timestamp::now()));
            Ok((fact.state != State::Active).then(|| KeyFact { state: State::Active, activated, ..fact.clone() }))
        })
    }

    /// Takes the permission to wrap from an active key, on the token itself: a fence, which also stops a process that
    /// has not heard of it. The key still unwraps. Done again, it changes nothing.
    ///
    /// # Errors
    /// [`Error::NoSuchKey`]; [`Error::Transition`] from any other state, and where no other key could seal; whatever
    /// keeps the token from answering.
    pub fn deactivate(&self, kid: KeyId) -> Result<(), Error> {
        self.fence(kid, false)
    }

    /// [`Keyring::deactivate`], for who knows that a key of another token seals.
    ///
    /// # Errors
    /// As [`Keyring::deactivate`].
    pub fn fence(&self, kid: KeyId, another_seals: bool) -> Result<(), Error> {
        self.change(kid, |lease, fact, found| {
            match fact.state {
                State::Active | State::Deactivated => {}
                _ => return Err(refused(fact, State::Deactivated, "")),
            }
            if fact.state == State::Active && !another_seals && !lease.keys().another_seals(kid) {
                return Err(refused(
                    fact,
                    State::Deactivated,
                    ": no other key could seal; generate and activate one first",
                ));
            }
            // First the fence, then the record: what the record says is fenced is.
            permit_wrapping(lease.access(), found.handle, fact.route, false)?;
            let deactivated = fact.deactivated.or(Some(Timestamp::now()));
            let next = KeyFact { state: State::Deactivated, deactivated, ..fact.clone() };
            Ok((fact.state != State::Deactivated).then_some(next))
        })
    }

    /// Takes the permission to unwrap from a deactivated key: the dress rehearsal of its destruction. It stays on the
    /// token, and [`Keyring::bring_back`] gives the permission back. Whether any value still needs the key is for the
    /// caller to know. Done again, it changes nothing.
    ///
    /// # Errors
    /// [`Error::NoSuchKey`]; [`Error::Transition`] from any other state; whatever keeps the token from answering.
    pub fn retire(&self, kid: KeyId) -> Result<(), Error> {
        self.change(kid, |lease, fact, found| {
            match fact.state {
                State::Deactivated | State::Retired => {}
                _ => return Err(refused(fact, State::Retired, ": a key is deactivated first")),
            }
            permit_wrapping(lease.access(), found.handle, fact.route, false)?;
            // First the record, then the permission: who finds that the canary does not unwrap reads why.
            if fact.state == State::Deactivated {
                let next = KeyFact { state: State::Retired, retired: Some(Timestamp::now()), ..fact.clone() };
                record::replace_key(lease.access().session, lease.keyring(), &lease.keys().record, next)?;
            }
            permit_unwrapping(lease.access(), found.handle, fact.route, false)?;
            Ok(None)
        })
    }

    /// Gives a retired key the permission to unwrap back: it is deactivated again. Done again, it changes nothing.
    ///
    /// # Errors
    /// [`Error::NoSuchKey`]; [`Error::Transition`] from any other state; [`Error::Silent`] if its canary does not
    /// unwrap then; whatever keeps the token from answering.
    pub fn bring_back(&self, kid: KeyId) -> Result<(), Error> {
        self.change(kid, |lease, fact, found| {
            match fact.state {
                State::Deactivated | State::Retired => {}
                _ => return Err(refused(fact, State::Deactivated, ": only a retired key is brought back")),
            }
            permit_unwrapping(lease.access(), found.handle, fact.route, true)?;
            if !fact.canary.sings(lease.access(), found.handle, fact)? {
                return Err(Error::Silent(kid));
            }
            let next = KeyFact { state: State::Deactivated, retired: None, ..fact.clone() };
            Ok((fact.state == State::Retired).then_some(next))
        })
    }

    /// Destroys a retired key, looks whether it is gone, and records it. Whether any value, or any backup that may be
    /// restored, still needs the key is for the caller to know. A destruction that was cut off is finished by doing it
    /// again.
    ///
    /// # Errors
    /// [`Error::NoSuchKey`]; [`Error::Transition`] from any other state; [`Error::TwoKeys`]; [`Error::Answer`] if the
    /// key is still there; whatever keeps the token from answering.
    pub fn destroy(&self, kid: KeyId) -> Result<(), Error> {
        self.pool.refresh()?;
        let keyring = &self.pool.settings().keyring;
        self.pool.once(|lease| {
            let fact = lease.keys().record.keys.get(&kid).ok_or(Error::NoSuchKey(kid))?;
            match fact.state {
                State::Retired => {}
                State::Destroyed => return Ok(()),
                _ => return Err(refused(fact, State::Destroyed, ": a key is retired first")),
            }
            // That it is not there says something only where another is.
            if lease.keys().is_empty() {
                return Err(Error::JustMissed(kid));
            }
            if let Some(found) = lease.keys().get(kid) {
                if found.doubled {
                    return Err(Error::TwoKeys(kid));
                }
                lease.access().session.destroy_object(found.handle).counted("C_DestroyObject")?;
            }
            let left = lease.access().session.find_objects(&[
                Attribute::Class(ObjectClass::SECRET_KEY),
                Attribute::Token(true),
                Attribute::Private(true),
                Attribute::Id(kid.as_bytes().to_vec()),
            ]);
            if !left.counted("C_FindObjects")?.is_empty() {
                return Err(Error::Answer("a key with this id is still on the token after it was destroyed"));
            }
            let next = KeyFact { state: State::Destroyed, destroyed: Some(Timestamp::now()), ..fact.clone() };
            record::replace_key(lease.access().session, keyring, &lease.keys().record, next)
        })?;
        self.pool.refresh()
    }

    /// Tries to wrap under a key that may not: whether the token refuses.
    ///
    /// # Errors
    /// [`Error::JustMissed`] if there is no such key; whatever else keeps the token from answering.
    pub fn refuses_to_wrap(&self, kid: KeyId) -> Result<bool, Error> {
        self.pool.once(|lease| {
            let found = lease.keys().get(kid).ok_or(Error::JustMissed(kid))?;
            match Canary::make(lease.access(), found.handle, kid, found.route) {
                Ok(_) => Ok(false),
                Err(error) if error.may_be_a_fence() => Ok(true),
                Err(error) => Err(error),
            }
        })
    }

    /// Notes that no value of the database `identity` names the key `kid`, as of `now`: with `anew`, or where that was
    /// not known, since now.
    ///
    /// # Errors
    /// Whatever keeps the token from answering.
    pub fn note_proof(&self, identity: &str, kid: KeyId, now: Timestamp, anew: bool) -> Result<Proof, Error> {
        self.pool.refresh()?;
        let keyring = &self.pool.settings().keyring;
        self.pool.once(|lease| {
            let record = &lease.keys().record;
            let before = record.proofs().get(&(identity.to_owned(), kid)).copied().filter(|_| !anew);
            let proof = Proof { since: before.map_or(now, |before| before.since), last: now };
            record.prove(lease.access().session, keyring, identity, kid, Some(proof))?;
            Ok(proof)
        })
    }

    /// Takes a proof back: a value of that database names the key after all.
    ///
    /// # Errors
    /// Whatever keeps the token from answering.
    pub fn withdraw_proof(&self, identity: &str, kid: KeyId) -> Result<(), Error> {
        self.pool.refresh()?;
        let keyring = &self.pool.settings().keyring;
        self.pool.once(|lease| lease.keys().record.prove(lease.access().session, keyring, identity, kid, None))
    }

    /// Notes in the record that the database with this identity is given up: the destruction of a key no longer asks
    /// for its proof.
    ///
    /// # Errors
    /// Whatever keeps the token from answering.
    pub fn release_database(&self, identity: &str, reason: &str) -> Result<(), Error> {
        let keyring = &self.pool.settings().keyring;
        self.pool.once(|lease| record::write_release(lease.access().session, keyring, identity, reason))?;
        self.pool.refresh()
    }

    /// Brings a key into another state: `step` changes it on the token, and says what the record is to say then.
    fn change(
        &self,
        kid: KeyId,
        step: impl FnOnce(&Lease, &KeyFact, Found) -> Result<Option<KeyFact>, Error>,
    ) -> Result<(), Error> {
        self.pool.refresh()?;
        self.pool.once(|lease| {
            let fact = lease.keys().record.keys.get(&kid).ok_or(Error::NoSuchKey(kid))?;
            if fact.state == State::Destroyed {
                return Err(Error::Transition { kid, from: fact.state.name(), to: "anything else", why: "" });
            }
            let found = lease.keys().get(kid).ok_or(Error::Silent(kid))?;
            if found.doubled {
                return Err(Error::TwoKeys(kid));
            }
            match step(lease, fact, found)? {
                Some(next) => record::replace_key(lease.access().session, lease.keyring(), &lease.keys().record, next),
                None => Ok(()),
            }
        })?;
        self.pool.refresh()
    }

    /// Notes in the record that the database with this identity uses the keyring.
    ///
    /// # Errors
    /// Whatever keeps the token from answering.
    pub fn note_database(&self, identity: &str) -> Result<(), Error> {
        let keyring = &self.pool.settings().keyring;
        self.pool.once(|lease| {
            if lease.keys().record.users().any(|user| user == identity) {
                return Ok(());
            }
            record::write_database(lease.access().session, keyring, identity)
        })
    }

    /// Tries each route on throw-away keys, as making a key does, and measures those that work. Leaves nothing on the
    /// token.
    ///
    /// # Errors
    /// Whatever keeps the token from answering; that a route does not work is its outcome.
    pub fn try_routes(&self) -> Result<Vec<RouteTrial>, Error> {
        Route::ALL.into_iter().map(|route| self.pool.once(|lease| RouteTrial::of(lease.access(), route))).collect()
    }

    /// Tidies up what a crash left under the label of keys in the making: a key that the record names gets the
    /// keyring's label; one that nothing names, neither the record nor `named` (as the databases that use the keyring
    /// know it), is destroyed. What is no private AES key is left: it is not ours.
    ///
    /// A key that `init` in another process is just making looks the same for the moment before it is recorded, so what
    /// is to be destroyed must have been seen unrecorded twice, some seconds apart.
    ///
    /// # Errors
    /// Whatever keeps the token from answering.
    pub fn clean(&self, named: impl Fn(KeyId) -> bool) -> Result<Vec<Cleaned>, Error> {
        self.pool.refresh()?;
        let before = self.pool.with(|lease| Ok(lease.keys().unrecorded()))?;
        if !before.is_empty() {
            thread::sleep(MAKING_TAKES);
            self.pool.refresh()?;
        }
        self.pool.once(|lease| {
            let found = &lease.keys().leftovers;
            found.iter().map(|left| clean(lease, left, before.contains(&left.id), &named)).collect()
        })
    }

    /// Tries on `key` what must be refused: reading it, wrapping it out, copying it, making it extractable.
    ///
    /// # Errors
    /// [`Error::JustMissed`] if there is no such key; whatever keeps the token from answering.
    pub fn probe_custody(&self, key: KeyId) -> Result<Vec<Probe>, Error> {
        self.pool.once(|lease| {
            let found = lease.keys().get(key).ok_or(Error::JustMissed(key))?;
            custody::probe(lease.access(), found.handle)
        })
    }

    /// How many objects, of the token and of this process's sessions, the token shows.
    ///
    /// # Errors
    /// Whatever keeps the token from answering.
    pub fn count_objects(&self) -> Result<usize, Error> {
        self.pool.with(|lease| Ok(lease.access().session.find_objects(&[]).counted("C_FindObjects")?.len()))
    }

    /// Runs `work` with the key `kid`; where it is not known, after reading the keyring again, though not all the time.
    fn with_key<T>(
        &self,
        kid: KeyId,
        mut work: impl FnMut(&Lease, Found) -> Result<Result<T, ProviderError>, Error>,
    ) -> Result<T, ProviderError> {
        // What is absent, and whether that says anything, is seen in one and the same reading.
        let mut attempt = || {
            self.pool.with(|lease| match lease.keys().get(kid) {
                Some(found) => work(lease, found).map(Ok),
                None if lease.keys().is_silent(kid) => Ok(Err(Some(Error::Silent(kid)))),
                // A token that shows no key at all says nothing about this one.
                None if lease.keys().is_empty() => Ok(Err(Some(Error::JustMissed(kid)))),
                None => Ok(Err(None)),
            })
        };
        if let Ok(done) = attempt().map_err(unavailable)? {
            return done;
        }
        {
            let mut missed = lock(&self.memory().missed);
            if missed.since.is_none_or(|since| since.elapsed() >= FORGET_AFTER) {
                *missed = Missed { since: Some(Instant::now()), absent: BTreeSet::new() };
            }
            if missed.absent.contains(&kid) {
                return Err(ProviderError::UnknownKey(kid));
            }
            // Forged ids must not keep the token busy.
            if missed.absent.len() >= READINGS_AT_MOST {
                return Err(unavailable(Error::JustMissed(kid)));
            }
        }
        loop {
            self.pool.refresh().map_err(unavailable)?;
            match attempt().map_err(unavailable)? {
                Ok(done) => {
                    lock(&self.memory().silences).remove(&kid);
                    return done;
                }
                Err(Some(Error::Silent(_))) if self.may_show_yet(kid) => thread::sleep(PAUSE),
                Err(Some(nothing_known)) => return Err(unavailable(nothing_known)),
                Err(None) => {
                    lock(&self.memory().missed).absent.insert(kid);
                    return Err(ProviderError::UnknownKey(kid));
                }
            }
        }
    }

    /// Whether a key that the record names and that does not show is looked for once more: SoftHSM2 writes the file of a
    /// key over while another process changes its state, and does not see it meanwhile. Who has lost a key is not made to
    /// wait at each value.
    fn may_show_yet(&self, kid: KeyId) -> bool {
        let mut silences = lock(&self.memory().silences);
        let since = silences.entry(kid).or_insert_with(Instant::now);
        if since.elapsed() >= LOOK_ANEW_AFTER {
            *since = Instant::now();
        }
        since.elapsed() < LOOK_FOR
    }
}

impl KeyProvider for Keyring {
    fn current(&self) -> Result<MasterKey, ProviderError> {
        let current = |keys: &KeySet| {
            let current = keys.current();
            let doubled = current.and_then(|key| keys.get(key.id)).is_some_and(|found| found.doubled);
            match current {
                Some(key) if doubled => Err(Error::TwoKeys(key.id)),
                current => Ok(current),
            }
        };
        self.pool.keep_up().map_err(unavailable)?;
        match self.pool.with_keys(current).map_err(unavailable)?.map_err(unavailable)? {
            Some(key) => Ok(key),
            // Another process may have made one since.
            None => loop {
                self.pool.refresh().map_err(unavailable)?;
                if let Some(key) = self.pool.with_keys(current).map_err(unavailable)?.map_err(unavailable)? {
                    lock(&self.memory().silences).remove(&key.id);
                    return Ok(key);
                }
                match self.pool.with_keys(KeySet::silent_active).map_err(unavailable)? {
                    Some(silent) if self.may_show_yet(silent) => thread::sleep(PAUSE),
                    Some(silent) => return Err(unavailable(Error::Silent(silent))),
                    None => return Err(ProviderError::NoCurrentKey),
                }
            },
        }
    }

    fn wrap(&self, key: KeyId, dek: &Dek, aad: &Aad) -> Result<WrappedDek, ProviderError> {
        let fenced = Cell::new(false);
        let wrapped = self.with_key(key, |lease, found| {
            if found.doubled {
                return Err(Error::TwoKeys(key));
            }
            if found.state != State::Active {
                return Ok(Err(ProviderError::NotCurrent(key)));
            }
            if found.route.alg() == Alg::A256GcmKw {
                self.memory().uses.take(lease, &self.pool.settings().keyring, key)?;
            }
            let wrapped = found.route.wrap(lease.access(), found.handle, dek, aad);
            fenced.set(wrapped.as_ref().is_err_and(Error::may_be_a_fence));
            wrapped.map(Ok)
        });
        match wrapped {
            Ok(bytes) => Ok(WrappedDek { key, bytes }),
            // The token knew before we did: the record says whether it is a fence.
            Err(refused) if fenced.get() => {
                self.pool.refresh().map_err(unavailable)?;
                let active =
                    |keys: &KeySet| keys.get(key).is_some_and(|found| found.state == State::Active && found.may_wrap);
                match self.pool.with_keys(active).map_err(unavailable)? {
                    true => Err(refused),
                    false => Err(ProviderError::NotCurrent(key)),
                }
            }
            Err(refused) => Err(refused),
        }
    }

    fn unwrap(&self, wrapped: &WrappedDek, aad: &Aad) -> Result<Dek, ProviderError> {
        self.with_key(wrapped.key, |lease, found| {
            if found.state == State::Retired {
                return Err(Error::Asleep(wrapped.key));
            }
            match found.route.unwrap(lease.access(), found.handle, &wrapped.bytes, aad) {
                Err(Error::Call { ckr, .. }) if ckr.blames_the_bytes() => Ok(Err(ProviderError::Rejected)),
                // Tokens have many words for a tampered DEK. If the canary still unwraps, it was the row.
                Err(error) if error.may_blame_the_bytes() && lease.keys().canary_sings(lease.access(), wrapped.key) => {
                    Ok(Err(ProviderError::Rejected))
                }
                outcome => outcome,
            }
        })
    }
}

impl std::fmt::Debug for Keyring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Keyring").field("settings", self.pool.settings()).finish_non_exhaustive()
    }
}

pub(super) fn unavailable(error: Error) -> ProviderError {
    ProviderError::Unavailable(Box::new(error))
}

fn active(lease: &Lease) -> Option<(KeyId, Route)> {
    let key = lease.keys().current()?;
    Some((key.id, lease.keys().get(key.id)?.route))
}

/// What became of a key that a crash had left in the making.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Cleaned {
    /// Its id, in hex.
    pub id: String,
    /// What was done.
    pub outcome: Tidied,
}

/// What [`Keyring::clean`] did with one key.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Tidied {
    /// The record names it: it has the keyring's label now.
    Relabelled,
    /// Nothing named it: it is gone.
    Destroyed,
    /// It was left as it is, for this reason.
    Left(&'static str),
}

fn clean(lease: &Lease, left: &Leftover, twice: bool, named: impl Fn(KeyId) -> bool) -> Result<Cleaned, Error> {
    let Access { session, .. } = lease.access();
    let seen = Seen::read(session, left.handle)?;
    let id = hex::encode(&left.id);
    let outcome = match (seen.is_private_aes(), left.recorded, key_id(&left.id)) {
        (false, ..) => Tidied::Left("it is no private AES key, so hardwrap did not make it"),
        (true, Some(kid), _) => {
            let fact = lease.keys().record.keys.get(&kid).ok_or(Error::JustMissed(kid))?;
            match seen.untrusted() {
                _ if lease.keys().get(kid).is_some() => Tidied::Left("another key has its id and the keyring's label"),
                Some(_) => Tidied::Left("the record names it, and its attributes are not those of a master key"),
                None if fact.canary.sings(lease.access(), left.handle, fact)? => {
                    let label = Attribute::Label(lease.keyring().as_bytes().to_vec());
                    session.update_attributes(left.handle, &[label]).counted("C_SetAttributeValue")?;
                    Tidied::Relabelled
                }
                None => Tidied::Left("the record names it, and its canary does not unwrap"),
            }
        }
        (true, None, Some(kid)) if named(kid) => {
            Tidied::Left("a database names it: it is not in the record, and no key is destroyed that a value may need")
        }
        (true, None, _) if !twice => Tidied::Left("it was made a moment ago: another `init` may be at work"),
        // Recorded in this moment?
        (true, None, Some(kid)) if Record::read(session, lease.keyring())?.keys.contains_key(&kid) => {
            Tidied::Left("it was recorded a moment ago: look again")
        }
        (true, None, _) => {
            session.destroy_object(left.handle).counted("C_DestroyObject")?;
            Tidied::Destroyed
        }
    };
    Ok(Cleaned { id, outcome })
}

/// Relabels a recorded key that is `wanted` and still lies under the label of keys in the making.
fn finish_recorded(lease: &Lease, wanted: impl Fn(&KeyFact) -> bool) -> Result<Option<(KeyId, Route)>, Error> {
    let Access { session, module } = lease.access();
    for left in &lease.keys().leftovers {
        let Some(fact) = left.recorded.and_then(|kid| lease.keys().record.keys.get(&kid)) else { continue };
        // Where another key has its id and the keyring's label already, there would be two.
        let stands = lease.keys().get(fact.kid).is_some();
        if stands || !wanted(fact) || Seen::read(session, left.handle)?.untrusted().is_some() {
            continue;
        }
        let access = Access { session, module };
        if fact.canary.sings(access, left.handle, fact)? {
            let label = lease.keyring().as_bytes().to_vec();
            session.update_attributes(left.handle, &[Attribute::Label(label)]).counted("C_SetAttributeValue")?;
            return Ok(Some((fact.kid, fact.route)));
        }
    }
    Ok(None)
}

/// Makes a key: generated under the label of keys in the making, checked, tried, recorded, and only then relabelled.
/// Whatever fails before it is recorded destroys it again.
fn make_key(lease: &Lease, keyring: &str, choice: Choice, state: State, after: u16) -> Result<(KeyId, Route), Error> {
    let access = lease.access();
    if let Some(kid) = lease.keys().silent_active() {
        return Err(Error::Silent(kid));
    }
    record::probe(access.session)?;
    let mut failed = Vec::new();
    let mut route = None;
    for candidate in choice.routes() {
        // Once more after an answer that may mean anything: a key keeps its route for life.
        let works = match candidate.works(access) {
            Err(error) if error.recovery() == Recovery::Judge => candidate.works(access),
            works => works,
        };
        match works {
            Ok(()) => {
                route = Some(candidate);
                break;
            }
            Err(error) if matches!(error.recovery(), Recovery::GiveUp | Recovery::Judge) => {
                failed.push(format!("{candidate}: {error}"));
            }
            Err(error) => return Err(error),
        }
    }
    let route = route.ok_or_else(|| Error::NoRoute(failed.join("; ")))?;
    let latest = lease.keys().latest_generation().max(after);
    let generation = latest.checked_add(1).ok_or(Error::Answer("no generation is left"))?;
    let mut drawn = [0; 6];
    random(&mut drawn).map_err(|_| Error::Answer(NO_RANDOM))?;
    let kid = KeyId::new(generation, drawn);
    let handle = generate(access, &making(keyring), kid, route)?;
    let recorded = prove(access, handle, kid, route).and_then(|canary| {
        let now = Timestamp::now();
        let activated = (state == State::Active).then_some(now);
        let fact = KeyFact {
            kid,
            route,
            state,
            made: now,
            activated,
            deactivated: None,
            retired: None,
            destroyed: None,
            revision: 0,
            canary,
        };
        if state != State::Active {
            permit_wrapping(access, handle, route, false)?;
        }
        record::write_key(access.session, keyring, &fact)
    });
    if let Err(error) = recorded {
        // A call may do its work and then fail. Only what the record does not name is destroyed; else `init` finishes it.
        if Record::read(access.session, keyring).is_ok_and(|record| !record.keys.contains_key(&kid)) {
            let _ = access.session.destroy_object(handle).counted("C_DestroyObject");
        }
        return Err(error);
    }
    access
        .session
        .update_attributes(handle, &[Attribute::Label(keyring.as_bytes().to_vec())])
        .counted("C_SetAttributeValue")?;
    Ok((kid, route))
}

fn refused(fact: &KeyFact, to: State, why: &'static str) -> Error {
    Error::Transition { kid: fact.kid, from: fact.state.name(), to: to.name(), why }
}

/// Gives a key the permission to wrap, or takes it away, and looks whether the token did it.
fn permit_wrapping(access: Access<'_>, handle: ObjectHandle, route: Route, may: bool) -> Result<(), Error> {
    if Seen::read(access.session, handle)?.may_wrap(route) == may {
        return Ok(());
    }
    let permission = route.wrap_permission(may);
    access.session.update_attributes(handle, &[permission]).counted("C_SetAttributeValue")?;
    match Seen::read(access.session, handle)?.may_wrap(route) == may {
        true => Ok(()),
        false => Err(Error::Answer("the token did not change whether the key may wrap, and said that it had")),
    }
}

/// Gives a key the permission to unwrap, or takes it away, and looks whether the token did it.
fn permit_unwrapping(access: Access<'_>, handle: ObjectHandle, route: Route, may: bool) -> Result<(), Error> {
    if Seen::read(access.session, handle)?.may_unwrap(route) == may {
        return Ok(());
    }
    let permission = route.unwrap_permission(may);
    access.session.update_attributes(handle, &[permission]).counted("C_SetAttributeValue")?;
    match Seen::read(access.session, handle)?.may_unwrap(route) == may {
        true => Ok(()),
        false => Err(Error::Answer("the token did not change whether the key may unwrap, and said that it had")),
    }
}

/// Reads the attributes back, wraps and unwraps once, and makes the canary.
fn prove(access: Access<'_>, handle: ObjectHandle, kid: KeyId, route: Route) -> Result<Canary, Error> {
    let seen = Seen::read(access.session, handle)?;
    if let Some(why) = seen.untrusted() {
        return Err(Error::Untrusted(format!("it is {why}")));
    }
    if seen.id != kid.as_bytes() {
        return Err(Error::Untrusted("it has not the id it was made with".to_owned()));
    }
    let canary = Canary::make(access, handle, kid, route)?;
    let now = Timestamp::now();
    let fact = KeyFact {
        kid,
        route,
        state: State::Active,
        made: now,
        activated: None,
        deactivated: None,
        retired: None,
        destroyed: None,
        revision: 0,
        canary,
    };
    if !fact.canary.sings(access, handle, &fact)? {
        return Err(Error::Untrusted("its canary did not unwrap to what was wrapped".to_owned()));
    }
    Ok(fact.canary)
}

/// `C_GenerateKey`, with `CKA_ALLOWED_MECHANISMS` where the token takes it.
fn generate(access: Access<'_>, label: &str, kid: KeyId, route: Route) -> Result<ObjectHandle, Error> {
    let mut template = vec![
        Attribute::Class(ObjectClass::SECRET_KEY),
        Attribute::KeyType(KeyType::AES),
        Attribute::ValueLen(32.into()),
        Attribute::Token(true),
        Attribute::Private(true),
        Attribute::Sensitive(true),
        Attribute::Extractable(false),
        Attribute::Copyable(false),
        Attribute::Label(label.as_bytes().to_vec()),
        Attribute::Id(kid.as_bytes().to_vec()),
    ];
    template.extend(route.usage());
    let without = template.clone();
    template.push(Attribute::AllowedMechanisms(vec![route.mechanism()]));
    match access.session.generate_key(&Mechanism::AesKeyGen, &template).counted("C_GenerateKey").map_err(Error::from) {
        Err(Error::Call {
            ckr:
                Ckr(
                    RvError::AttributeTypeInvalid
                    | RvError::AttributeValueInvalid
                    | RvError::TemplateInconsistent
                    | RvError::AttributeReadOnly,
                ),
            ..
        }) => Ok(access.session.generate_key(&Mechanism::AesKeyGen, &without).counted("C_GenerateKey")?),
        other => other,
    }
}

/// `init` records a key within milliseconds of making it; a slow token within this time.
const MAKING_TAKES: Duration = Duration::from_secs(3);
/// An id that is not known makes the keyring be read again: once for each id in this time, ...
const FORGET_AFTER: Duration = Duration::from_secs(1);
/// ... and for no more ids than this.
const READINGS_AT_MOST: usize = 16;
/// How long a key that the record names is looked for, ...
const LOOK_FOR: Duration = Duration::from_millis(400);
/// ... and when that begins anew.
const LOOK_ANEW_AFTER: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(20);
