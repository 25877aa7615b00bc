use std::collections::BTreeSet;
use std::io::Write;

use clap::{Args, Subcommand};
use hardwrap::hsm::{Choice, KeyReport, Keyring, Report, Tidied};
use hardwrap::keeper::{self, Config, Keeper};
use hardwrap::provider::KeyId;
use hardwrap::store::Db;
use serde::Serialize;

use crate::app::App;
use crate::failure::Failure;
use crate::text::{plain, table};

/// Look at the master keys on the token
#[derive(Args)]
pub(crate) struct Key {
    #[command(subcommand)]
    act: Act,
}

#[derive(Subcommand)]
enum Act {
    List(KeyList),
    Generate(Generate),
    Activate(Activate),
    Deactivate(Deactivate),
    Retire(Retire),
    Destroy(Destroy),
}

/// List the keys that the keyring record names, and objects with our label that do not count
///
/// Each key is found, its attributes are checked, and its canary is unwrapped. Changes nothing but with --clean, which
/// asks the database first what it names.
#[derive(Args)]
#[command(after_help = "\
Examples:
  hardwrap key list
  hardwrap key list --clean      after a crash of init
A key that DOES NOT UNWRAP is recorded, and missing or altered on the token: values under it cannot be opened.")]
struct KeyList {
    /// Tidy up what a crash left in the making: relabel a key that is recorded, destroy one that nothing names
    #[arg(long)]
    clean: bool,
}

impl Key {
    pub(crate) fn run(self, app: &App, out: &mut dyn Write) -> Result<u8, Failure> {
        match self.act {
            Act::List(list) => list.run(app, out),
            Act::Generate(generate) => generate.run(app, out),
            Act::Activate(activate) => activate.run(app, out),
            Act::Deactivate(deactivate) => deactivate.run(app, out),
            Act::Retire(retire) => retire.run(app, out),
            Act::Destroy(destroy) => destroy.run(app, out),
        }
    }
}

impl KeyList {
    fn run(self, app: &App, out: &mut dyn Write) -> Result<u8, Failure> {
        let clean = self.clean;
        let config = app.config()?;
        let (mut lists, mut away) = (Vec::new(), Vec::new());
        let further = config.more_tokens.iter().map(|(name, settings)| (name, settings));
        for (name, settings) in std::iter::once((&config.token_name, &config.token)).chain(further) {
            let keyring = Keyring::new(settings.clone())?;
            let report = match keyring.report() {
                Err(error) if !config.more_tokens.is_empty() => {
                    away.push((name.clone(), error));
                    continue;
                }
                report => report?,
            };
            let cleaned = if clean { tidied(&config, &keyring)? } else { Vec::new() };
            let report = if clean { keyring.report()? } else { report };
            lists.push(List::of(&report, &settings.keyring, cleaned));
        }
        if lists.is_empty()
            && let Some((_, error)) = away.pop()
        {
            return Err(error.into());
        }
        // Of several tokens each seals until something is made on a later one: only the newest key does.
        let newest =
            lists.iter().flat_map(|list| &list.keys).filter(|key| key.current).map(|key| key.kid.clone()).max();
        for key in lists.iter_mut().flat_map(|list| &mut list.keys) {
            key.current = newest.as_ref() == Some(&key.kid);
        }
        let mut first = lists.remove(0);
        first.further = lists;
        first.tokens_away = away.iter().map(|(name, _)| name.clone()).collect();
        app.report(out, if away.is_empty() { 0 } else { 4 }, &first, |out| {
            first.write(out, "`hardwrap init`")?;
            first.further.iter().try_for_each(|list| list.write(out, "`hardwrap rotate --to-token`"))?;
            away.iter().try_for_each(|(name, error)| writeln!(out, "token {} is out of reach: {error}", plain(name)))
        })
    }
}

impl List {
    fn of(report: &Report, keyring: &str, cleaned: Vec<Cleaned>) -> Self {
        Self {
            cleaned,
            token: report.token.label.clone(),
            serial: report.token.serial.clone(),
            keyring: keyring.to_owned(),
            keys: report.keys.iter().map(Listed::of).collect(),
            strangers: report.strangers.iter().map(|one| Odd { id: one.id.clone(), why: one.why.clone() }).collect(),
            leftovers: report
                .leftovers
                .iter()
                .map(|(id, recorded)| Odd {
                    id: id.clone(),
                    why: if *recorded { "recorded" } else { "named by nothing" }.to_owned(),
                })
                .collect(),
            databases: report.databases.clone(),
            further: Vec::new(),
            tokens_away: Vec::new(),
        }
    }
}

/// Make a key that may not wrap yet: `key activate` lets it
#[derive(Args)]
#[command(after_help = "\
Example:
  hardwrap key generate --mechanism aes-gcm
Nothing is sealed under the key before it is activated. hardwrap init makes the first key of a keyring.")]
struct Generate {
    /// How the key is to wrap: auto, aes-kw, aes-gcm, or one route; see `hardwrap init --help`
    #[arg(long, value_name = "M", default_value = "auto")]
    mechanism: Choice,
}

impl Generate {
    fn run(self, app: &App, out: &mut dyn Write) -> Result<u8, Failure> {
        let keeper = right_keyring(app)?;
        let (kid, route) = keeper.generate(self.mechanism)?;
        let did = format!("made, pre-active, wraps by {} ({route})", route.alg().name());
        changed(app, &keeper, kid, &did, out)
    }
}

/// Let a pre-active key wrap: new values are sealed under it from now on
///
/// Every process follows within a second of its next call, without a restart. What was active stays so until it is
/// deactivated.
#[derive(Args)]
#[command(after_help = "\
Example:
  hardwrap key activate 0002914e2c2307a0
  hardwrap key activate --unwrap 0001914e2c2307a0      bring a retired key back")]
struct Activate {
    /// Its id
    kid: KeyId,
    /// Give a retired key the permission to unwrap back: it is deactivated again, and seals nothing
    #[arg(long)]
    unwrap: bool,
}

impl Activate {
    fn run(self, app: &App, out: &mut dyn Write) -> Result<u8, Failure> {
        let keeper = right_keyring(app)?;
        if self.unwrap {
            keeper.holder(self.kid)?.bring_back(self.kid)?;
            return changed(app, &keeper, self.kid, "deactivated: it unwraps again", out);
        }
        keeper.holder(self.kid)?.activate(self.kid)?;
        changed(app, &keeper, self.kid, "active: new values are sealed under it", out)
    }
}

/// Take from an active key the permission to wrap, on the token itself: it only unwraps from now on
///
/// Values under it still open. For good: a deactivated key is never active again. Refused where no other key could seal.
#[derive(Args)]
#[command(after_help = "\
Example:
  hardwrap key deactivate 0001914e2c2307a0")]
struct Deactivate {
    /// Its id
    kid: KeyId,
}

impl Deactivate {
    fn run(self, app: &App, out: &mut dyn Write) -> Result<u8, Failure> {
        let keeper = right_keyring(app)?;
        let seals = keeper.report()?.current().map(|key| key.fact.kid);
        keeper.holder(self.kid)?.fence(self.kid, seals.is_some_and(|seals| seals != self.kid))?;
        changed(app, &keeper, self.kid, "deactivated: it only unwraps", out)
    }
}

/// Take from a deactivated key the permission to unwrap as well: the dress rehearsal of its destruction
///
/// Every gate is looked at first, and each that is closed is named: no value names the key in any database of the
/// keyring, both fences are in place, the ledger is empty or given up, nothing is sealed in a column that nobody
/// registered. `key activate --unwrap` brings it back. On a retired key it proves once more, for a destruction that
/// another database asks for.
#[derive(Args)]
#[command(after_help = "\
Examples:
  hardwrap key retire 0001914e2c2307a0 --dry-run    only look at the gates
  hardwrap key retire 0001914e2c2307a0")]
struct Retire {
    /// Its id
    kid: KeyId,
    /// Only look at the gates; exits 1 where one is closed
    #[arg(long)]
    dry_run: bool,
}

impl Retire {
    fn run(self, app: &App, out: &mut dyn Write) -> Result<u8, Failure> {
        let keeper = right_keyring(app)?;
        if self.dry_run {
            return gates(app, &keeper.retirement(self.kid)?, out);
        }
        keeper.retire(self.kid)?;
        changed(app, &keeper, self.kid, "retired: it neither wraps nor unwraps, and can be brought back", out)
    }
}

/// Destroy a retired key, for good
///
/// The gates of `key retire` are looked at again, and the longest of policy.backup_horizon, policy.write_grace and --wait
/// must have passed since it was proven that nothing names the key.
#[derive(Args)]
#[command(after_help = "\
Examples:
  hardwrap key destroy 0001914e2c2307a0 --confirm 0001914e2c2307a0 --dry-run
  hardwrap key destroy 0001914e2c2307a0 --confirm 0001914e2c2307a0
A backup from before the proof needs the key: once it is destroyed, nothing opens its values.")]
struct Destroy {
    /// Its id
    kid: KeyId,
    /// The id once more, in full
    #[arg(long, value_name = "KID", default_value = "")]
    confirm: String,
    /// Wait at least this long after the proof, as in 90d
    #[arg(long, value_name = "DURATION")]
    wait: Option<keeper::Duration>,
    /// Only look at the gates; exits 1 where one is closed
    #[arg(long)]
    dry_run: bool,
}

impl Destroy {
    fn run(self, app: &App, out: &mut dyn Write) -> Result<u8, Failure> {
        let keeper = right_keyring(app)?;
        if self.dry_run {
            return gates(app, &keeper.destruction(self.kid, &self.confirm, self.wait)?, out);
        }
        let gone = keeper.destroy(self.kid, &self.confirm, self.wait)?;
        let did = format!(
            "destroyed; a backup from before {} holds values that nothing opens any more",
            day_and_time(gone.unneeded_since)
        );
        changed(app, &keeper, self.kid, &did, out)
    }
}

/// Shows every gate.
fn gates(app: &App, gates: &[keeper::Gate], out: &mut dyn Write) -> Result<u8, Failure> {
    #[derive(Serialize)]
    struct Shown<'a> {
        gate: &'a str,
        open: bool,
        why: Option<&'a str>,
    }
    let shown: Vec<Shown<'_>> = gates
        .iter()
        .map(|gate| Shown { gate: gate.name, open: gate.closed.is_none(), why: gate.closed.as_deref() })
        .collect();
    let closed = shown.iter().any(|gate| !gate.open);
    app.report(out, u8::from(closed), &shown, |out| {
        shown.iter().try_for_each(|gate| match gate.why {
            None => writeln!(out, "holds   {}", gate.gate),
            Some(why) => writeln!(out, "CLOSED  {}: {}", gate.gate, plain(why)),
        })
    })
}

/// The keyring which the database knows, also where these commands are what it lacks.
pub(super) fn right_keyring(app: &App) -> Result<Keeper, Failure> {
    let keeper = Keeper::unchecked(&app.config()?)?;
    match keeper.check() {
        Ok(()) | Err(keeper::Error::MayNotWrap(_) | keeper::Error::NoActiveKey(_)) => Ok(keeper),
        Err(wrong) => Err(wrong.into()),
    }
}

/// Notes in the database what became of a key, and says it.
fn changed(app: &App, keeper: &Keeper, kid: KeyId, did: &str, out: &mut dyn Write) -> Result<u8, Failure> {
    keeper.check()?;
    let report = keeper.report()?;
    let key = report.keys.iter().find(|key| key.fact.kid == kid);
    let key = key.map(Listed::of).ok_or_else(|| Failure::failed(format!("key {kid} is not found again")))?;
    app.report(out, 0, &key, |out| writeln!(out, "key {kid}: {did}"))
}

/// Tidies up. What the configured database names stays, so that has to be there.
fn tidied(config: &Config, keyring: &Keyring) -> Result<Vec<Cleaned>, Failure> {
    let db = Db::open(&config.database)?;
    db.ready()?;
    let seen: BTreeSet<String> = db.keys_seen()?.into_iter().map(|seen| seen.kid).collect();
    // No `init` works on this database meanwhile. What cannot be asked counts as a yes.
    let cleaned = db.exclusively(|db| -> Result<_, keeper::Error> {
        Ok(keyring.clean(|kid| seen.contains(&kid.to_string()) || db.names(kid).unwrap_or(true))?)
    })?;
    Ok(cleaned
        .into_iter()
        .map(|one| match one.outcome {
            Tidied::Relabelled => Cleaned { id: one.id, outcome: "relabelled", why: "the record names it" },
            Tidied::Destroyed => Cleaned { id: one.id, outcome: "destroyed", why: "nothing named it" },
            Tidied::Left(why) => Cleaned { id: one.id, outcome: "left", why },
        })
        .collect())
}

#[derive(Serialize)]
struct Cleaned {
    id: String,
    outcome: &'static str,
    why: &'static str,
}

#[derive(Serialize)]
struct List {
    /// What --clean did.
    cleaned: Vec<Cleaned>,
    token: String,
    serial: String,
    keyring: String,
    keys: Vec<Listed>,
    strangers: Vec<Odd>,
    leftovers: Vec<Odd>,
    databases: Vec<String>,
    /// The same of every further token.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    further: Vec<List>,
    /// Tokens of the configuration that could not be asked, by name.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tokens_away: Vec<String>,
}

/// One key, as commands show it.
#[derive(Serialize)]
pub(super) struct Listed {
    pub(super) kid: String,
    pub(super) alg: &'static str,
    pub(super) route: &'static str,
    pub(super) state: &'static str,
    made: String,
    activated: Option<String>,
    #[serde(skip)]
    pub(super) activated_at: Option<i64>,
    pub(super) current: bool,
    pub(super) works: bool,
    /// Whether the key is as the record says.
    pub(super) well: bool,
    deactivated: Option<String>,
    retired: Option<String>,
    destroyed: Option<String>,
    pub(super) wraps_reserved: Option<u64>,
}

#[derive(Serialize)]
struct Odd {
    id: String,
    why: String,
}

impl Listed {
    pub(super) fn of(key: &KeyReport) -> Self {
        Self {
            kid: key.fact.kid.to_string(),
            alg: key.fact.route.alg().name(),
            route: key.fact.route.name(),
            state: key.fact.state.name(),
            made: day_and_time(key.fact.made),
            activated: key.fact.activated.map(day_and_time),
            activated_at: key.fact.activated.map(jiff::Timestamp::as_second),
            current: key.current,
            works: key.works,
            well: key.is_well(),
            deactivated: key.fact.deactivated.map(day_and_time),
            retired: key.fact.retired.map(day_and_time),
            destroyed: key.fact.destroyed.map(day_and_time),
            wraps_reserved: key.reserved,
        }
    }
}

impl List {
    /// `maker` is what makes the first key on this token.
    fn write(&self, out: &mut dyn Write, maker: &str) -> std::io::Result<()> {
        writeln!(out, "keyring {} on token {} (serial {})", self.keyring, plain(&self.token), plain(&self.serial))?;
        if self.keys.is_empty() {
            writeln!(out, "no keys: {maker} makes one")?;
        } else {
            let heading = ["key", "state", "wraps by", "made", "canary", ""].map(str::to_owned).to_vec();
            let row = |key: &Listed| {
                vec![
                    key.kid.clone(),
                    key.state.to_owned(),
                    format!("{} ({})", key.alg, key.route),
                    key.made.clone(),
                    match (key.works, key.well) {
                        (true, _) => "unwraps",
                        (false, true) => "-",
                        (false, false) => "DOES NOT UNWRAP",
                    }
                    .to_owned(),
                    if key.current { "seals" } else { "" }.to_owned(),
                ]
            };
            let rows: Vec<_> = std::iter::once(heading).chain(self.keys.iter().map(row)).collect();
            table(out, &rows)?;
        }
        for one in &self.cleaned {
            writeln!(out, "{} the key in the making with id {}: {}", one.outcome, one.id, one.why)?;
        }
        for one in &self.strangers {
            writeln!(out, "not used: an object with our label and id {:?}: {}", one.id, plain(&one.why))?;
        }
        for one in &self.leftovers {
            writeln!(
                out,
                "left by a crash: a key in the making with id {}: {}; `hardwrap key list --clean` tidies up",
                one.id, one.why
            )?;
        }
        Ok(())
    }
}

fn day_and_time(time: jiff::Timestamp) -> String {
    time.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}
