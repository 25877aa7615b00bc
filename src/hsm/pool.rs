//! Sessions on one token: opened once, lent by closure, and recovered in one place.
//!
//! [`Pool::with`] is the only way to a session and the only caller of `recovery`. What it runs may run twice, so
//! making and destroying keys goes through [`Pool::once`]. No other retry exists.

use std::sync::{Arc, Condvar, Mutex, PoisonError, RwLockReadGuard};
use std::thread;
use std::time::{Duration, Instant};

use cryptoki::error::RvError;
use cryptoki::session::{Session, SessionState, UserType};
use cryptoki::slot::Slot;
use cryptoki::types::AuthPin;

use super::counted::Counted;
use super::error::Recovery;
use super::forks::forks;
use super::keyset::KeySet;
use super::module::{Module, lock};
use super::raw::without_signals;
use super::route::Access;
use super::token::{self, TokenInfo};
use super::turn::Turn;
use super::{Ckr, Error, PinError, Settings};
use crate::process::Own;

/// The sessions of one process on one token.
pub(super) struct Pool {
    settings: Settings,
    loaded: &'static Own<Module>,
    here: Own<Here>,
}

/// What each process has for itself: a forked child connects anew, and leaves its parent's sessions alone.
struct Here {
    module: &'static Module,
    state: Mutex<Connecting>,
}

/// What connecting knows. Whoever holds the lock is the only one who connects.
#[derive(Default)]
struct Connecting {
    closed: bool,
    connection: Option<Arc<Connection>>,
    generation: u64,
    failed: Option<(Instant, Arc<Error>)>,
    reloaded: Option<Instant>,
}

/// One generation: sessions of one initialisation of the module, and the handles found in it. Nothing of it is used
/// in another generation.
pub(super) struct Connection {
    module: &'static Module,
    generation: u64,
    epoch: u64,
    slot: Slot,
    keyring: String,
    token: TokenInfo,
    keys: Mutex<Arc<KeySet>>,
    /// When they were last found; whoever finds them again holds the lock.
    found: Mutex<Instant>,
    sessions: Mutex<Sessions>,
    returned: Condvar,
}

/// Sessions are never closed for idling: the one that stays is the anchor, without which a token logs everybody out.
struct Sessions {
    idle: Vec<Session>,
    open: usize,
    limit: usize,
    waiting: usize,
    closed: bool,
}

/// A session on loan. While it lives, nobody re-initialises the module.
pub(super) struct Lease {
    session: Option<Session>,
    spoilt: bool,
    keys: Arc<KeySet>,
    // Before the connection: the last lease of a dead connection drops that too, and it enters the module by itself.
    // Entering twice would wait for ever once somebody waits to re-initialise.
    _inside: RwLockReadGuard<'static, ()>,
    connection: Arc<Connection>,
}

impl Lease {
    pub(super) fn access(&self) -> Access<'_> {
        let session = self.session.as_ref().expect("a lease holds its session until it drops");
        Access { module: self.connection.module, session }
    }

    /// What was found when the session was lent.
    pub(super) fn keys(&self) -> &KeySet {
        &self.keys
    }

    /// Finds everything again, with this session, for all who come later.
    fn reread(&self) -> Result<(), Error> {
        let found = KeySet::load(self.access(), &self.connection.keyring)?;
        if found.is_empty() && !self.keys.is_empty() {
            return Err(Error::Vanished);
        }
        *lock(&self.connection.keys) = Arc::new(found);
        Ok(())
    }

    pub(super) fn token(&self) -> &TokenInfo {
        &self.connection.token
    }

    pub(super) fn keyring(&self) -> &str {
        &self.connection.keyring
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(session) = self.session.take() {
            self.connection.give_back(session, self.spoilt);
        }
    }
}

impl Pool {
    /// A pool that connects when it is first used.
    pub(super) fn new(settings: Settings) -> Result<Self, Error> {
        let loaded = Module::load(&settings.uri.module, settings.module_arguments.as_deref())?;
        let here = Own::new(forks, Here { module: Module::here(loaded), state: Mutex::default() });
        Ok(Self { settings, loaded, here })
    }

    /// Runs `work` while this process can neither connect nor ask for its connection.
    #[cfg(test)]
    pub(super) fn with_locked<T>(&self, work: impl FnOnce() -> T) -> T {
        let _state = lock(&self.here().state);
        work()
    }

    fn here(&self) -> &Here {
        self.here.get(|parent| Here {
            module: Module::here(self.loaded),
            state: Mutex::new(Connecting { closed: parent.closed(), ..Connecting::default() }),
        })
    }

    /// Closes the sessions, once those on loan have come back, and lends none any more. Does not wait for ever: what is
    /// still out after ten seconds is closed when it comes back.
    pub(super) fn close(&self) {
        let connection = {
            let mut state = lock(&self.here().state);
            state.closed = true;
            state.connection.take()
        };
        if let Some(connection) = connection {
            connection.wait_for_all();
        }
    }

    pub(super) fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Lends a session to `work`, and once more after a recovery where the error says that one may help.
    pub(super) fn with<T>(&self, mut work: impl FnMut(&Lease) -> Result<T, Error>) -> Result<T, Error> {
        let (error, generation) = match self.attempt(&mut work) {
            Ok(done) => return Ok(done),
            Err(failed) => failed,
        };
        match error.recovery() {
            Recovery::GiveUp | Recovery::Wait => return Err(error),
            step => {
                let ckr = error.ckr().map_or_else(|| "none".to_owned(), |ckr| ckr.to_string());
                tracing::warn!(target: TARGET, %ckr, ?step, "a call failed: the connection is made anew");
                metrics::counter!("hardwrap_token_recoveries_total", "ckr" => ckr).increment(1);
                self.recover(step, generation)?;
            }
        }
        self.attempt(&mut work).map_err(|(error, _)| error)
    }

    /// Lends what the connection found, for what asks the token nothing: where there is a connection, that takes no
    /// session.
    pub(super) fn with_keys<T>(&self, work: impl Fn(&KeySet) -> T) -> Result<T, Error> {
        let here = self.here();
        let connection = lock(&here.state).connection.clone();
        match connection {
            Some(connection) if connection.epoch == here.module.epoch() => {
                let keys = Arc::clone(&lock(&connection.keys));
                Ok(work(&keys))
            }
            _ => self.with(|lease| Ok(work(lease.keys()))),
        }
    }

    /// Lends a session to `work`, which runs at most once.
    pub(super) fn once<T>(&self, work: impl FnOnce(&Lease) -> Result<T, Error>) -> Result<T, Error> {
        // A recovery now, by something that may run twice: the work then meets a live connection.
        self.with(|lease| Ok(lease.access().session.get_session_info().counted("C_GetSessionInfo").map(|_| ())?))?;
        self.attempt(work).map_err(|(error, _)| error)
    }

    /// Finds everything again if that was not done for a second, so that what another process did to the keys is
    /// followed. One does it for all; who comes meanwhile goes on with what is known.
    pub(super) fn keep_up(&self) -> Result<(), Error> {
        let connection = lock(&self.here().state).connection.clone();
        let Some(connection) = connection else { return Ok(()) };
        let Ok(mut found) = connection.found.try_lock() else { return Ok(()) };
        if found.elapsed() < KEEP_UP {
            return Ok(());
        }
        *found = Instant::now();
        self.refresh()
    }

    /// Finds everything again.
    pub(super) fn refresh(&self) -> Result<(), Error> {
        self.with(Lease::reread)
    }

    fn attempt<T>(&self, work: impl FnOnce(&Lease) -> Result<T, Error>) -> Result<T, (Error, u64)> {
        // A session that failed in the middle of something, or whose work panicked, is not used again.
        let mut lease = self.lease()?;
        lease.spoilt = true;
        let outcome = work(&lease);
        lease.spoilt = outcome.is_err();
        outcome.map_err(|error| (error, lease.connection.generation))
    }

    fn lease(&self) -> Result<Lease, (Error, u64)> {
        let here = self.here();
        for _ in 0..TRIES {
            let current = {
                let state = lock(&here.state);
                state.connection.clone().ok_or(state.generation)
            };
            match current {
                Err(generation) => self.recover(Recovery::Reopen, generation).map_err(|error| (error, generation))?,
                Ok(connection) if here.module.is_bloated() => {
                    let generation = connection.generation;
                    drop(connection);
                    self.recover(Recovery::Reload, generation).map_err(|error| (error, generation))?;
                }
                Ok(connection) => {
                    let generation = connection.generation;
                    let inside = here.module.enter().map_err(|error| (error, generation))?;
                    if connection.epoch == here.module.epoch() {
                        let session = connection.take().map_err(|error| (error, generation))?;
                        let keys = Arc::clone(&lock(&connection.keys));
                        return Ok(Lease { session: Some(session), spoilt: false, keys, _inside: inside, connection });
                    }
                    drop(inside);
                    self.recover(Recovery::Reopen, generation).map_err(|error| (error, generation))?;
                }
            }
        }
        Err((Error::Answer("the module is re-initialised again and again"), 0))
    }

    /// Connects anew, once for all who saw `generation` fail, and not more than once a second while it fails.
    fn recover(&self, step: Recovery, generation: u64) -> Result<(), Error> {
        let Here { module, state } = self.here();
        let mut state = lock(state);
        if state.closed {
            return Err(Error::Closed);
        }
        if state.generation != generation && state.connection.is_some() {
            return Ok(());
        }
        if let Some((when, why)) = &state.failed
            && when.elapsed() < RETRY_AFTER
        {
            return Err(Error::Down(Arc::clone(why)));
        }
        let mut dead = state.connection.take();
        let had_keys = dead.as_ref().is_some_and(|dead| !lock(&dead.keys).is_empty());
        // A bloated module is re-initialised whenever it asks, a broken one not more than once a second.
        let too_soon = state.reloaded.is_some_and(|when| when.elapsed() < RETRY_AFTER) && !module.is_bloated();
        let absent = state.failed.as_ref().is_some_and(|(_, why)| why.may_be_absence());
        let mut reload = matches!(step, Recovery::Reload | Recovery::Judge) || absent;
        // A process that starts may meet another one's login, in which SoftHSM2 rewrites the token's file: look again.
        let tries = if state.generation == 0 { FIRST_TRIES } else { 2 };
        let _turn = Turn::take(module.path());
        let mut outcome = Err(Error::HostOwned);
        for attempt in 0..tries {
            if reload && !too_soon {
                // Its sessions are closed while they are still its own.
                dead = None;
                state.reloaded = Some(Instant::now());
                thread::sleep(PAUSE * attempt);
                tracing::warn!(target: TARGET, "the module is re-initialised");
                metrics::counter!("hardwrap_token_reloads_total").increment(1);
                match module.reload(module.epoch()) {
                    Ok(()) | Err(Error::HostOwned) => {}
                    Err(error) => {
                        outcome = Err(error);
                        break;
                    }
                }
            }
            // The dead connection keeps the login alive until the new one stands, where the token has a second session.
            outcome = Connection::establish(module, &self.settings, state.generation + 1);
            if dead.is_some() && outcome.as_ref().is_err_and(Error::wants_a_session) {
                dead = None;
                outcome = Connection::establish(module, &self.settings, state.generation + 1);
            }
            let look_again = match &outcome {
                Ok(found) => had_keys && lock(&found.keys).is_empty() && !reload,
                Err(error) => error.may_be_absence(),
            };
            if !look_again || too_soon {
                break;
            }
            reload = true;
        }
        let word = if outcome.is_ok() { "connected" } else { "failed" };
        metrics::counter!("hardwrap_token_connects_total", "outcome" => word).increment(1);
        match outcome {
            Ok(connection) => {
                state.generation += 1;
                state.connection = Some(Arc::new(connection));
                state.failed = None;
                Ok(())
            }
            Err(error) => {
                tracing::warn!(target: TARGET, %error, "the token is out of reach");
                let error = Arc::new(error);
                state.failed = Some((Instant::now(), Arc::clone(&error)));
                Err(Error::Connecting(error))
            }
        }
    }
}

impl Here {
    /// Asked by a child of its parent, in which another thread may have held the lock.
    fn closed(&self) -> bool {
        self.state.try_lock().is_ok_and(|state| state.closed)
    }
}

impl Connection {
    fn establish(module: &'static Module, settings: &Settings, generation: u64) -> Result<Self, Error> {
        let _span = tracing::info_span!(target: TARGET, "connect", keyring = settings.keyring).entered();
        let _inside = module.enter()?;
        let epoch = module.epoch();
        let (slot, token) = token::find(module, &settings.uri)?;
        let session = open(module, slot)?;
        let keys = login(module, &session, slot, &token, settings)
            .and_then(|()| KeySet::load(Access { module, session: &session }, &settings.keyring));
        let keys = match keys {
            Ok(keys) => keys,
            Err(error) => {
                let _ = session.close().counted("C_CloseSession");
                return Err(error);
            }
        };
        let sessions =
            Sessions { idle: vec![session], open: 1, limit: settings.sessions.max(1), waiting: 0, closed: false };
        Ok(Self {
            module,
            generation,
            epoch,
            slot,
            keyring: settings.keyring.clone(),
            token,
            keys: Mutex::new(Arc::new(keys)),
            found: Mutex::new(Instant::now()),
            sessions: Mutex::new(sessions),
            returned: Condvar::new(),
        })
    }

    /// Waits until every session has come back, ten seconds at most.
    fn wait_for_all(&self) {
        let began = Instant::now();
        let mut sessions = lock(&self.sessions);
        sessions.closed = true;
        self.returned.notify_all();
        sessions.waiting += 1;
        while sessions.idle.len() < sessions.open {
            let Some(left) = PATIENCE.checked_sub(began.elapsed()) else { break };
            sessions = self.returned.wait_timeout(sessions, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        sessions.waiting -= 1;
    }

    /// An idle session, a new one, or, at the token's limit, the next that comes back.
    fn take(&self) -> Result<Session, Error> {
        let mut sessions = lock(&self.sessions);
        let began = Instant::now();
        let mut waited = false;
        loop {
            if sessions.closed {
                return Err(Error::Closed);
            }
            if let Some(session) = sessions.idle.pop() {
                if waited {
                    drop(sessions);
                    metrics::histogram!("hardwrap_pool_wait_seconds").record(began.elapsed());
                }
                return Ok(session);
            }
            if sessions.open < sessions.limit {
                match open(self.module, self.slot) {
                    Ok(session) => {
                        sessions.open += 1;
                        return Ok(session);
                    }
                    Err(error) if error.wants_a_session() && sessions.open > 0 => sessions.limit = sessions.open,
                    Err(error) => {
                        // Who waits behind us must not wait for a session that nobody brings back.
                        drop(sessions);
                        self.returned.notify_one();
                        return Err(error);
                    }
                }
            } else {
                waited = true;
                sessions.waiting += 1;
                sessions = self.returned.wait(sessions).unwrap_or_else(PoisonError::into_inner);
                sessions.waiting -= 1;
            }
        }
    }

    fn give_back(&self, session: Session, spoilt: bool) {
        let mut sessions = lock(&self.sessions);
        if spoilt {
            // Closing the last session would log the process out: open its successor first, where the token lets us.
            if sessions.open == 1
                && let Ok(successor) = open(self.module, self.slot)
            {
                sessions.idle.push(successor);
            } else {
                sessions.open -= 1;
            }
            let _ = session.close().counted("C_CloseSession");
        } else {
            sessions.idle.push(session);
        }
        // Waking is a system call, also where nobody waits.
        if sessions.closed {
            self.returned.notify_all();
        } else if sessions.waiting > 0 {
            drop(sessions);
            self.returned.notify_one();
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // After a re-initialisation these handles may name somebody else's sessions.
        if let Ok(_inside) = self.module.enter()
            && self.module.epoch() == self.epoch
        {
            for session in lock(&self.sessions).idle.drain(..) {
                let _ = session.close().counted("C_CloseSession");
            }
        }
    }
}

/// A session that can make objects, or one that cannot where the token is write-protected. cryptoki must not close it
/// by itself: by then its handle may be another's.
fn open(module: &Module, slot: Slot) -> Result<Session, Error> {
    match module.pkcs11().open_rw_session_no_drop(slot).counted("C_OpenSession").map_err(Error::from) {
        Err(Error::Call { ckr: Ckr(RvError::TokenWriteProtected), .. }) => {
            Ok(module.pkcs11().open_ro_session_no_drop(slot).counted("C_OpenSession")?)
        }
        other => other,
    }
}

/// Logs the process in, unless it is. One at a time for each token in the process.
fn login(
    module: &'static Module,
    session: &Session,
    slot: Slot,
    token: &TokenInfo,
    settings: &Settings,
) -> Result<(), Error> {
    if !token.login_required() {
        return Ok(());
    }
    let mut guard = lock(module.pin_guard(token));
    if matches!(
        session.get_session_info().counted("C_GetSessionInfo")?.session_state(),
        SessionState::RwUser | SessionState::RoUser
    ) {
        return Ok(());
    }
    let pin = guard.pin(settings.pin_source.as_ref(), &TokenInfo::read(module, slot)?)?;
    let pin = pin.map(|pin| AuthPin::new(pin.expose().into()));
    match without_signals(|| session.login(UserType::User, pin.as_ref()).counted("C_Login")).map_err(Error::from) {
        Ok(()) | Err(Error::Call { ckr: Ckr(RvError::UserAlreadyLoggedIn), .. }) => {
            guard.accept();
            tracing::info!(target: TARGET, token = token.label, "logged in");
            Ok(())
        }
        Err(Error::Call { function, ckr }) => {
            let not_about_the_pin = match ckr.recovery() {
                Recovery::Reopen | Recovery::Reload => true,
                // Some tokens answer CKR_GENERAL_ERROR to a wrong PIN, others when they are broken. A PIN that was
                // accepted before, and flags that did not move, speak for the second.
                Recovery::Judge => {
                    guard.was_accepted()
                        && TokenInfo::read(module, slot).is_ok_and(|after| {
                            !after.user_pin_count_low() && !after.user_pin_final_try() && !after.user_pin_locked()
                        })
                }
                // There is no PIN that could have been wrong.
                _ => ckr == Ckr(RvError::UserPinNotInitialized),
            };
            if not_about_the_pin {
                return Err(Error::Call { function, ckr });
            }
            guard.refuse(ckr);
            Err(PinError::Refused(ckr).into())
        }
        Err(error) => Err(error),
    }
}

const TARGET: &str = "hardwrap::hsm";
/// While a token is out of reach it is tried once in this time, and everybody else is told at once.
const RETRY_AFTER: Duration = Duration::from_secs(1);
/// How often a process that starts looks for its token, with pauses that grow by [`PAUSE`]: 0.4 s in all.
const FIRST_TRIES: u32 = 8;
/// How old what is known of the keys may be when a value is sealed.
const KEEP_UP: Duration = Duration::from_secs(1);
/// How long closing waits for sessions on loan.
const PATIENCE: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(15);
/// How often a lease may find that the module was re-initialised in between.
const TRIES: usize = 8;
