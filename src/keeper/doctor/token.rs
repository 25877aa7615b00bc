//! Module, PIN, token, keyring and keys.

use jiff::Timestamp;
use serde::Serialize;

use super::configuration::{chain, writable};
use super::database::Opened;
use super::{Examination, Finding, FindingId, Severity};
use crate::hsm::{
    self, Health, KeyReport, Keyring, MOST_USES, PinError, PinSource, Report, RouteTrial, State, Stranger,
};
use crate::keeper::{Config, Error, check};

/// The token, its keys, and how fast it is.
#[derive(Debug, Serialize)]
pub struct TokenFacts {
    /// `label`.
    pub label: String,
    /// `serialNumber`.
    pub serial: String,
    /// `manufacturerID`.
    pub manufacturer: String,
    /// `model`.
    pub model: String,
    /// The module's file.
    pub module: String,
    /// The label of the keys.
    pub keyring: String,
    /// How many sessions are opened at most.
    pub sessions: usize,
    /// Where the record stands.
    pub record: &'static str,
    /// The keys that the record names.
    pub keys: Vec<ExaminedKey>,
    /// Whether a wrong user PIN was tried since the last right one.
    pub pin_count_low: bool,
    /// Whether one more wrong user PIN locks the token.
    pub pin_final_try: bool,
    /// Whether the user PIN is locked.
    pub pin_locked: bool,
    /// How many databases the record names.
    pub databases: usize,
    /// Every route, tried on throw-away keys.
    pub routes: Vec<ExaminedRoute>,
    /// The route that a new key takes, if any works.
    pub recommended: Option<&'static str>,
}

/// One recorded key.
#[derive(Debug, Serialize)]
pub struct ExaminedKey {
    /// Its id.
    pub kid: String,
    /// Its state.
    pub state: &'static str,
    /// How it wraps.
    pub route: &'static str,
    /// Whether it is on the token, alone, as it should be, and its canary unwraps.
    pub works: bool,
    /// Whether it is as the record says: a retired or destroyed key need not work.
    pub well: bool,
    /// Whether new values are sealed under it.
    pub seals: bool,
}

/// One route, tried.
#[derive(Debug, Serialize)]
pub struct ExaminedRoute {
    /// Its name.
    pub route: &'static str,
    /// What it makes.
    pub alg: &'static str,
    /// Median of one wrap, in microseconds.
    pub wrap_us: Option<u64>,
    /// Median of one unwrap, in microseconds.
    pub unwrap_us: Option<u64>,
    /// Why it does not work here.
    pub fault: Option<String>,
}

impl ExaminedKey {
    fn of(key: &KeyReport) -> Self {
        Self {
            kid: key.fact.kid.to_string(),
            state: key.fact.state.name(),
            route: key.fact.route.name(),
            works: key.works,
            well: key.is_well(),
            seals: key.current,
        }
    }
}

/// A token that answered.
pub(super) struct Seen {
    pub(super) report: Report,
    pub(super) facts: TokenFacts,
}

pub(super) fn examine(config: &Config, database: Option<&Opened>, examination: &mut Examination) -> Option<Seen> {
    let module = &config.token.uri.module;
    let subject = module.display().to_string();
    let mut found = Vec::new();
    if let Some((path, how)) = writable(module) {
        let remedy =
            format!("chown root and chmod go-w {}, and make sure that the module is the vendor's", path.display());
        found.push(Finding::new(FindingId::ModuleWritable, &*subject, format!("{}: {how}", path.display()), remedy));
    }
    let of_pin = pin(config.token.pin_source.as_ref());
    if !found.is_empty() {
        examination.ran("module", found);
        not_tried(of_pin, examination);
        examination.skip("the module is not loaded: others can write it");
        return None;
    }
    let keyring = match Keyring::new(config.token.clone()) {
        Ok(keyring) => keyring,
        Err(error) => {
            let remedy = "install the token's PKCS#11 module, or correct module-path in token.uri";
            found.push(Finding::new(FindingId::ModuleMissing, subject, chain(&error), remedy));
            examination.ran("module", found);
            not_tried(of_pin, examination);
            examination.skip("the module could not be loaded");
            return None;
        }
    };
    examination.ran("module", found);
    let report = match keyring.report() {
        Ok(report) => report,
        Err(error) => {
            let finding = unreachable(&error, config);
            let (check, of_pin) = match error.root() {
                hsm::Error::Pin(_) => ("pin", [of_pin, vec![finding.clone()]].concat()),
                error if error.is_pin_not_set() => ("pin", [of_pin, vec![finding.clone()]].concat()),
                hsm::Error::Record(_) => ("keyring", of_pin),
                _ => ("token", of_pin),
            };
            match check {
                "token" => not_tried(of_pin, examination),
                _ => examination.ran("pin", of_pin),
            }
            if check != "pin" {
                examination.ran(check, vec![finding]);
            }
            for id in ["token", "keyring", "keys", "routes"].into_iter().filter(|id| *id != check) {
                examination.not_run(id, "the token could not be asked");
            }
            return None;
        }
    };
    examination.ran("pin", of_pin);
    token(config, &report, examination);
    let report = with_further(config, report, examination);
    match database.is_some_and(|database| database.seen.is_none()) {
        true => examination.not_run("keyring", "what the database has seen of it could not be read"),
        false => ring(&keyring, &report, database, examination),
    }
    keys(config, &report, examination);
    let routes = routes(&keyring, &report, examination);
    let facts = facts(config, &report, routes);
    Some(Seen { report, facts })
}

/// The keys of the further tokens beside those of the first.
fn with_further(config: &Config, first: Report, examination: &mut Examination) -> Report {
    if config.more_tokens.is_empty() {
        return first;
    }
    let mut found = Vec::new();
    let mut merged = first;
    for (name, settings) in &config.more_tokens {
        match Keyring::new(settings.clone()).and_then(|keyring| keyring.report()) {
            Ok(report) => merged.add(report),
            Err(error) => {
                let remedy = "see to it, or take its [[token]] out of the configuration once no value needs it";
                found.push(Finding::new(FindingId::TokenNotFound, format!("token {name}"), chain(&error), remedy));
            }
        }
    }
    examination.findings.extend(found);
    merged
}

/// The PIN where no login was tried: what was found about its source, and else nothing is known.
fn not_tried(of_pin: Vec<Finding>, examination: &mut Examination) {
    if of_pin.iter().any(|finding| finding.severity < Severity::Info) {
        examination.ran("pin", of_pin);
    } else {
        examination.findings.extend(of_pin);
        examination.not_run("pin", "no login was tried");
    }
}

/// What is unwise about where the PIN comes from.
fn pin(source: Option<&PinSource>) -> Vec<Finding> {
    let mut found = Vec::new();
    match source {
        Some(source @ PinSource::File(path)) => {
            if let Some(warning) = source.warning() {
                let (path, remedy) = (path.display().to_string(), format!("chmod 600 {}", path.display()));
                found.push(Finding::new(FindingId::PinReadable, path, warning, remedy));
            }
        }
        Some(PinSource::Env(name)) => found.push(Finding::new(
            FindingId::PinInEnvironment,
            format!("env:{name}"),
            "the PIN comes from an environment variable",
            "use pin-source=file: or credential: instead, where the platform has secret files",
        )),
        Some(PinSource::Credential(_) | PinSource::Prompt) | None => {}
    }
    found
}

/// Why the token could not be asked.
fn unreachable(error: &hsm::Error, config: &Config) -> Finding {
    let named = &config.token.uri;
    let subject = named.wanted();
    let found = |id, remedy: &str| Finding::new(id, &*subject, chain(error), remedy);
    match error.root() {
        hsm::Error::Token { .. } => found(
            FindingId::TokenNotFound,
            "plug the token in, or correct token.uri: what is there is listed; add serial= where two have one label",
        ),
        hsm::Error::Record(_) => found(
            FindingId::RecordDamaged,
            "use the hardwrap that wrote the record where it is a newer one; else put the token's backup back",
        ),
        hsm::Error::Pin(PinError::Source(..) | PinError::NotText(_) | PinError::None) => {
            found(FindingId::PinUnreadable, "put the PIN where pin-source= says, or correct pin-source=")
        }
        hsm::Error::Pin(PinError::CountLow) => {
            found(FindingId::PinCountLow, "log in once yourself, with the right PIN: hardwrap key list --ask-pin")
        }
        hsm::Error::Pin(PinError::FinalTry | PinError::Locked) => {
            found(FindingId::PinLocked, "the security officer sets a new PIN with the vendor's tool")
        }
        hsm::Error::Pin(_) => found(
            FindingId::PinRefused,
            "correct the PIN, then log in once yourself: hardwrap key list --ask-pin; no program tries it again",
        ),
        error if error.is_pin_not_set() => {
            found(FindingId::PinNotSet, "the security officer sets the user PIN with the vendor's tool")
        }
        _ => found(FindingId::TokenUnreachable, "see to the token and its connection, then run doctor again"),
    }
}

fn token(config: &Config, report: &Report, examination: &mut Examination) {
    let mut found = Vec::new();
    let token = &report.token;
    if config.environment == "production" && [&token.model, &token.manufacturer].iter().any(|it| it.contains("SoftHSM"))
    {
        found.push(Finding::new(
            FindingId::TokenInSoftware,
            token.to_string(),
            format!("{} in environment production", token.model),
            "keep production keys in an HSM; where this is none, say so: environment = \"ci\", for example",
        ));
    }
    examination.ran("token", found);
}

/// The keyring as a whole, and what else has its label.
fn ring(keyring: &Keyring, report: &Report, database: Option<&Opened>, examination: &mut Examination) {
    let mut found = Vec::new();
    let subject = format!("keyring {} on {}", keyring.label(), report.token);
    let seen = database.and_then(|database| database.seen.as_deref()).unwrap_or_default();
    let rotations = database.map(|database| database.rotations.as_slice()).unwrap_or_default();
    match check::same_keys(report, keyring.label(), seen, rotations) {
        Ok(()) if report.keys.is_empty() => {
            found.push(Finding::new(FindingId::KeyringEmpty, &*subject, "it has no key", "run hardwrap init"));
        }
        Ok(()) => {}
        Err(error) => {
            let (id, remedy) = match error {
                Error::OlderRecord { .. } => {
                    (FindingId::RecordOlder, "put the newest backup of the token back, or undo that of the older one")
                }
                _ => (
                    FindingId::KeyringOther,
                    "plug in the right token, or correct token.uri and keyring; where the keys are lost, restore the \
                     token's backup",
                ),
            };
            found.push(Finding::new(id, &*subject, error.to_string(), remedy));
        }
    }
    if let Some(identity) = database.and_then(|database| database.identity.as_ref())
        && !report.keys.is_empty()
        && !report.databases.contains(identity)
    {
        let what = "the keyring record does not name this database";
        found.push(Finding::new(
            FindingId::DatabaseNotNoted,
            &*subject,
            what,
            "run hardwrap init: it changes nothing else",
        ));
    }
    for stranger in report.strangers.iter().filter(|stranger| !explained(report, stranger)) {
        let object = format!("object with id {:?}", stranger.id);
        let what = format!("an object with our label does not count: {}", stranger.why);
        let remedy = "find out who made it, and destroy it with the vendor's tool";
        let id = if stranger.private { FindingId::ObjectUnrecorded } else { FindingId::ObjectPlanted };
        found.push(Finding::new(id, object, what, remedy));
    }
    for (id, recorded) in &report.leftovers {
        let what = if *recorded { "the record names it" } else { "nothing names it" };
        let what = format!("a crash left this key in the making; {what}");
        found.push(Finding::new(
            FindingId::KeyLeft,
            format!("key {id}"),
            what,
            "run hardwrap key list --clean; what that leaves, destroy with the vendor's tool",
        ));
    }
    examination.ran("keyring", found);
}

/// Whether a private object that does not count is one of the record's keys, about which another finding is.
fn explained(report: &Report, stranger: &Stranger) -> bool {
    let is = |key: &KeyReport| stranger.private && key.fact.kid.to_string() == stranger.id;
    report.keys.iter().any(|key| {
        is(key)
            && !matches!(
                key.health,
                Health::Works
                    | Health::Asleep
                    | Health::Doubled
                    | Health::MayNotWrap
                    | Health::MayWrap
                    | Health::MayUnwrap
            )
    })
}

fn keys(config: &Config, report: &Report, examination: &mut Examination) {
    let mut found = Vec::new();
    for key in &report.keys {
        let subject = format!("key {}", key.fact.kid);
        let restore = "restore the token's backup; no key can be made in its place";
        let finding = match key.health {
            Health::Works | Health::Asleep | Health::Gone => None,
            Health::Missing => {
                Some((FindingId::KeyMissing, "the record names it, and it is not on the token".to_owned(), restore))
            }
            Health::Doubled => Some((
                FindingId::KeyDoubled,
                "two keys on the token have this id".to_owned(),
                "find out who made the other one, and destroy that with the vendor's tool",
            )),
            Health::MayNotWrap => Some((
                FindingId::KeyMayNotWrap,
                "it is active, and the token does not let it wrap".to_owned(),
                "find out who took the permission, then hardwrap key activate with its id gives it back",
            )),
            Health::MayWrap => Some((
                FindingId::KeyMayWrap,
                format!("it is {}, and the token lets it wrap", key.fact.state.name()),
                "find out who gave the permission, then hardwrap key deactivate with its id takes it away",
            )),
            Health::MayUnwrap => Some((
                FindingId::KeyMayWrap,
                "it is retired, and the token lets it unwrap".to_owned(),
                "find out who gave the permission, then hardwrap key activate --unwrap and hardwrap key retire with its id",
            )),
            Health::CanaryFails => Some((
                FindingId::KeyCanary,
                "a key of this id is there, and does not unwrap the record's canary".to_owned(),
                restore,
            )),
            Health::WrongAttributes(why) => Some((FindingId::KeyAttributes, format!("it is {why}"), restore)),
        };
        if let Some((id, what, remedy)) = finding {
            found.push(Finding::new(id, &*subject, what, remedy));
        }
        found.extend(wearing_out(config, key));
    }
    let seals = report.keys.iter().any(|key| key.current);
    if !report.keys.is_empty() && !seals && report.keys.iter().all(|key| key.fact.state != State::Active) {
        let what = "no key of the keyring is active";
        found.push(Finding::new(
            FindingId::NoActiveKey,
            "keyring",
            what,
            "run hardwrap key generate, then hardwrap key activate",
        ));
    }
    examination.ran("keys", found);
}

const FRESH_KEY: &str = "move everything to a new key: hardwrap rotate";

/// How close a key is to the end of its use.
fn wearing_out(config: &Config, key: &KeyReport) -> Vec<Finding> {
    let mut found = Vec::new();
    let subject = format!("key {}", key.fact.kid);
    let seals = key.fact.state == State::Active;
    if let Some(reserved) = key.reserved.filter(|_| seals).filter(|reserved| *reserved >= MOST_USES / 2) {
        let what = format!("{reserved} of {MOST_USES} wraps under A256GCMKW are reserved");
        let finding = Finding::new(FindingId::WrapsRunningOut, &*subject, what, FRESH_KEY);
        let severity = if reserved >= MOST_USES / 10 * 9 { Severity::Critical } else { finding.severity };
        found.push(Finding { severity, ..finding });
    }
    let age = key.fact.activated.map(|since| Timestamp::now().as_second().saturating_sub(since.as_second()));
    let period = config.policy.cryptoperiod;
    if key.current && age.is_some_and(|age| u64::try_from(age).is_ok_and(|age| age > period.as_secs())) {
        let what = format!("it has sealed for longer than policy.cryptoperiod ({period})");
        let remedy = format!("{FRESH_KEY}; or set the cryptoperiod that your policy allows");
        found.push(Finding::new(FindingId::CryptoperiodPassed, &*subject, what, remedy));
    }
    found
}

fn routes(keyring: &Keyring, report: &Report, examination: &mut Examination) -> Vec<RouteTrial> {
    let trials = match keyring.try_routes() {
        Ok(trials) => trials,
        Err(error) => {
            examination.not_run("routes", chain(&error));
            return Vec::new();
        }
    };
    let mut found = Vec::new();
    let best = trials.iter().find(|trial| trial.outcome.is_ok());
    match (best, report.keys.iter().find(|key| key.current)) {
        (None, _) => {
            let faults: Vec<_> = trials.iter().filter_map(|trial| trial.outcome.as_ref().err()).cloned().collect();
            let remedy = "use a token that has AES key wrap (RFC 3394) or AES-GCM, or have the vendor enable it";
            found.push(Finding::new(FindingId::NoRoute, report.token.to_string(), faults.join("; "), remedy));
        }
        (Some(best), Some(key)) if best.route != key.fact.route => found.push(Finding::new(
            FindingId::RouteBetter,
            format!("key {}", key.fact.kid),
            format!("it wraps by {}, and {} works here too", key.fact.route, best.route),
            format!("move to a key that does: hardwrap rotate --mechanism {}", best.route),
        )),
        _ => {}
    }
    examination.ran("routes", found);
    trials
}

fn facts(config: &Config, report: &Report, trials: Vec<RouteTrial>) -> TokenFacts {
    let micros = |time: std::time::Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
    let recommended = trials.iter().find(|trial| trial.outcome.is_ok()).map(|trial| trial.route.name());
    let route = |trial: RouteTrial| {
        let (timing, fault) = match trial.outcome {
            Ok(timing) => (Some(timing), None),
            Err(fault) => (None, Some(fault)),
        };
        ExaminedRoute {
            route: trial.route.name(),
            alg: trial.route.alg().name(),
            wrap_us: timing.map(|timing| micros(timing.wrap)),
            unwrap_us: timing.map(|timing| micros(timing.unwrap)),
            fault,
        }
    };
    let token = &report.token;
    TokenFacts {
        label: token.label.clone(),
        serial: token.serial.clone(),
        manufacturer: token.manufacturer.clone(),
        model: token.model.clone(),
        module: config.token.uri.module.display().to_string(),
        keyring: config.token.keyring.clone(),
        sessions: config.token.sessions,
        record: "private data objects on the token",
        keys: report.keys.iter().map(ExaminedKey::of).collect(),
        pin_count_low: token.user_pin_count_low(),
        pin_final_try: token.user_pin_final_try(),
        pin_locked: token.user_pin_locked(),
        databases: report.databases.len(),
        routes: trials.into_iter().map(route).collect(),
        recommended,
    }
}
