use std::io::{self, IsTerminal, Write};
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use clap::{Args, value_parser};
use hardwrap::hsm::Choice;
use hardwrap::keeper::{Plan, Rotated};
use hardwrap::rotation::{BoxedError, Control, Listener, MasterKeyRotated, Progress};
use serde::Serialize;

use crate::app::App;
use crate::failure::Failure;
use crate::text::plain;

/// Move all values to a new master key. Payloads are neither read nor written
///
/// Makes a key on the token, or takes the one that `key generate` made; from then on everything new is sealed under it.
/// Every data key is wrapped anew, and it is proven that no value names an old key. All in one transaction, or with
/// --online in short batches that others can write between. No key is destroyed: `key retire` and `key destroy` do that.
/// Cut off by whatever, it is finished by --resume, and every value opens meanwhile.
#[derive(Args)]
#[command(after_help = "\
Examples:
  hardwrap rotate --dry-run              what it would do: opens every data key, writes nothing
  hardwrap rotate                        in one transaction; others wait for it
  hardwrap rotate --online --rate 2000   while the application works
  hardwrap rotate --resume               after anything that cut it off
Exits 1 where values could not be moved: each stands in the ledger (hardwrap ledger list), and nothing is announced.")]
pub(crate) struct Rotate {
    /// In short batches instead of one transaction
    #[arg(long)]
    online: bool,
    /// Finish an unfinished rotation; makes no key. With nothing left it writes nothing
    #[arg(long, conflicts_with_all = ["dry_run", "mechanism"])]
    resume: bool,
    /// Check everything, unwrap every data key, write nothing
    #[arg(long)]
    dry_run: bool,
    /// Ask the token in this many threads [default: one for each processor]
    #[arg(long, value_name = "N", value_parser = value_parser!(u16).range(1..))]
    workers: Option<u16>,
    /// Read, move and write this many values at once
    #[arg(long, value_name = "N", default_value_t = 500, value_parser = value_parser!(u32).range(1..=100_000))]
    batch: u32,
    /// Move at most this many values a second
    #[arg(long, value_name = "R", value_parser = value_parser!(u32).range(1..))]
    rate: Option<u32>,
    /// How the new key is to wrap [default: as the one that seals now]; see `hardwrap init --help`
    #[arg(long, value_name = "M")]
    mechanism: Option<Choice>,
    /// Make the new key on this [[token]] of the configuration: so a deployment moves to a new HSM
    #[arg(long, value_name = "NAME", conflicts_with = "resume")]
    to_token: Option<String>,
    /// Run this by the shell when it is proven, with the event as JSON on its standard input; may run more than once
    #[arg(long, value_name = "COMMAND", conflicts_with = "dry_run")]
    notify: Option<String>,
}

impl Rotate {
    pub(crate) fn run(self, app: &App, out: &mut dyn Write) -> Result<u8, Failure> {
        let mut keeper = app.keeper()?;
        if let Some(command) = &self.notify {
            keeper = keeper.with_listener(Arc::new(Notify(command.clone())));
        }
        let stop = Arc::new(AtomicBool::new(false));
        for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM, signal_hook::consts::SIGHUP] {
            // The second one ends the program as it always would.
            signal_hook::flag::register_conditional_default(signal, stop.clone())?;
            signal_hook::flag::register(signal, stop.clone())?;
        }
        let shown = Mutex::new(Shown::new());
        let control = Control::new(stop).watched(move |progress| {
            shown.lock().unwrap_or_else(PoisonError::into_inner).show(progress);
        });
        let mut rotation = keeper
            .rotation()
            .to_token(self.to_token.clone())
            .online(self.online)
            .batch(self.batch)
            .rate(self.rate)
            .control(control);
        if let Some(workers) = self.workers {
            rotation = rotation.workers(workers.into());
        }
        if let Some(choice) = self.mechanism {
            rotation = rotation.mechanism(choice);
        }
        if self.dry_run {
            let plan = rotation.plan(true)?;
            let report = Planned::of(&plan);
            return app.report(out, u8::from(!plan.is_clear()), &report, |out| report.write(out));
        }
        let done = if self.resume { rotation.resume()? } else { rotation.run()? };
        let report = Done::of(&done);
        let verdict = u8::from(!report.open.is_empty() || !report.unheard.is_empty());
        app.report(out, verdict, &report, |out| report.write(out))
    }
}

/// `--notify COMMAND`.
struct Notify(String);

impl Listener for Notify {
    fn name(&self) -> &'static str {
        "--notify"
    }

    fn master_key_rotated(&self, event: &MasterKeyRotated) -> Result<(), BoxedError> {
        let mut child =
            Command::new("sh").arg("-c").arg(&self.0).stdin(Stdio::piped()).stdout(Stdio::null()).spawn()?;
        if let Some(mut stdin) = child.stdin.take() {
            // A command that does not read is no failure; how it ends is.
            let _ = stdin.write_all(serde_json::to_string(event)?.as_bytes());
        }
        match child.wait()? {
            ended if ended.success() => Ok(()),
            ended => Err(format!("the command ended with {ended}").into()),
        }
    }
}

/// Progress on standard error: one line that is written over on a terminal, a line now and then elsewhere.
struct Shown {
    column: String,
    began: Instant,
    last: Option<Instant>,
}

impl Shown {
    fn new() -> Self {
        Self { column: String::new(), began: Instant::now(), last: None }
    }

    fn show(&mut self, progress: &Progress) {
        if self.column != progress.column {
            *self = Self { column: progress.column.clone(), ..Self::new() };
        }
        let terminal = io::stderr().is_terminal();
        let pause = Duration::from_millis(if terminal { 200 } else { 5000 });
        let whole = progress.done >= progress.total;
        if self.last.is_some_and(|last| last.elapsed() < pause) && !(whole && terminal) {
            return;
        }
        if self.last.is_none() && !terminal {
            // What is short says nothing.
            self.last = Some(Instant::now());
            return;
        }
        self.last = Some(Instant::now());
        let seconds = self.began.elapsed().as_secs_f64().max(0.001);
        let rate = progress.done as f64 / seconds;
        let left = (progress.total.saturating_sub(progress.done)) as f64 / rate.max(0.001);
        let (before, after) = if terminal { ("\r", if whole { "\x1b[K\n" } else { "\x1b[K" }) } else { ("", "\n") };
        // Nobody to watch is no reason to stop.
        let _ = write!(
            io::stderr(),
            "{before}{}: {} of {}, {rate:.0} a second, {left:.0} s left{after}",
            plain(&progress.column),
            progress.done,
            progress.total
        );
    }
}

#[derive(Serialize)]
struct Planned {
    current: String,
    clear: bool,
    unfinished: Option<String>,
    columns: Vec<PlannedColumn>,
    rotators: Vec<PlannedRotator>,
    unregistered: Vec<String>,
    triggers: Vec<String>,
}

#[derive(Serialize)]
struct PlannedColumn {
    column: String,
    rows: u64,
    sealed: u64,
    data_keys_tried: Option<u64>,
    bad: Vec<BadValue>,
    given_up: u64,
    cleartext: u64,
    foreign: u64,
    damaged: u64,
    keyless: u64,
    sql: String,
}

#[derive(Serialize)]
struct PlannedRotator {
    name: String,
    values: u64,
}

#[derive(Serialize)]
struct BadValue {
    key: String,
    error: &'static str,
}

impl Planned {
    fn of(plan: &Plan) -> Self {
        let bad = |(key, error): &(String, &'static str)| BadValue { key: key.clone(), error };
        Self {
            current: plan.current.to_string(),
            clear: plan.is_clear(),
            unfinished: plan.unfinished.clone(),
            columns: plan
                .columns
                .iter()
                .map(|one| PlannedColumn {
                    column: one.column.to_string(),
                    rows: one.counts.total,
                    sealed: one.counts.sealed_total(),
                    data_keys_tried: one.tried,
                    bad: one.bad.iter().map(bad).collect(),
                    given_up: one.given_up,
                    cleartext: one.counts.cleartext,
                    foreign: one.counts.foreign,
                    damaged: one.counts.damaged,
                    keyless: one.counts.keyless,
                    sql: one.counts.sql.clone(),
                })
                .collect(),
            rotators: plan
                .rotators
                .iter()
                .map(|(name, values)| PlannedRotator { name: name.clone(), values: *values })
                .collect(),
            unregistered: plan.unregistered.iter().map(|one| format!("{one} ({})", one.count)).collect(),
            triggers: plan.triggers.clone(),
        }
    }

    fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        writeln!(out, "dry run: nothing was written; key {} seals now", self.current)?;
        if let Some(unfinished) = &self.unfinished {
            writeln!(out, "unfinished: {unfinished}: only --resume runs")?;
        }
        for one in &self.columns {
            let tried = one.data_keys_tried.unwrap_or(0);
            write!(out, "{}: {} rows, {} sealed, {tried} data keys to move", plain(&one.column), one.rows, one.sealed)?;
            let others = [(one.cleartext, "in cleartext"), (one.foreign, "nr-vault envelopes")];
            for (count, what) in others.into_iter().filter(|(count, _)| *count > 0) {
                write!(out, ", {count} {what} (stay)")?;
            }
            if one.given_up > 0 {
                write!(out, ", {} given up (stay)", one.given_up)?;
            }
            match one.bad.len() {
                0 => writeln!(out)?,
                bad => writeln!(out, ", {bad} CANNOT BE MOVED")?,
            }
            for bad in one.bad.iter().take(SHOWN) {
                writeln!(out, "  key {}: {}", plain(&bad.key), bad.error)?;
            }
            if one.bad.len() > SHOWN {
                writeln!(out, "  and {} more: --json has all", one.bad.len() - SHOWN)?;
            }
            if tried > 1 && one.bad.len() as u64 == tried && one.bad.iter().all(|bad| bad.error == "Rejected") {
                writeln!(
                    out,
                    "  every one Rejected: is the identifier the one that they were sealed with, and the row?"
                )?;
            }
            if one.keyless > 0 {
                writeln!(out, "  {} rows have no key (NULL) and cannot be moved: give them one", one.keyless)?;
            }
        }
        for one in &self.rotators {
            writeln!(out, "rotator {}: {} values", plain(&one.name), one.values)?;
        }
        for one in &self.unregistered {
            writeln!(out, "NOT REGISTERED: {}: rotation refuses; add a [[column]], or [[ignore]] it", plain(one))?;
        }
        for one in &self.triggers {
            writeln!(out, "trigger {}: one that keeps history would bring values under the old key back", plain(one))?;
        }
        writeln!(out, "{}", if self.clear { "it would run to its end" } else { "it would NOT run to its end" })
    }
}

/// Of more bad values than this only so many are shown to people.
const SHOWN: usize = 20;

#[derive(Serialize)]
struct Done {
    target: Option<String>,
    from: Vec<String>,
    retired: Vec<String>,
    moved: u64,
    proven: bool,
    weaker: bool,
    nothing: bool,
    open: Vec<Open>,
    unheard: Vec<String>,
}

#[derive(Serialize)]
struct Open {
    id: i64,
    column: String,
    key: String,
    error: String,
}

impl Done {
    fn of(done: &Rotated) -> Self {
        Self {
            target: done.target.map(|kid| kid.to_string()),
            from: done.from.iter().map(ToString::to_string).collect(),
            retired: done.retired.iter().map(ToString::to_string).collect(),
            moved: done.moved,
            proven: done.proven,
            weaker: done.weaker,
            nothing: done.nothing,
            open: done
                .open
                .iter()
                .map(|entry| Open {
                    id: entry.id,
                    column: format!("{}.{}", entry.table, entry.column),
                    key: entry.key.to_string(),
                    error: entry.error.clone(),
                })
                .collect(),
            unheard: done.unheard.clone(),
        }
    }

    fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let target = self.target.as_deref().unwrap_or_default();
        match (self.nothing, self.from.is_empty()) {
            (true, _) => writeln!(out, "nothing to do: key {target} seals")?,
            (false, true) => writeln!(out, "key {target} seals; there was no other")?,
            (false, false) => writeln!(out, "{} values moved to key {target}", self.moved)?,
        }
        for one in self.open.iter().take(SHOWN) {
            writeln!(
                out,
                "COULD NOT BE MOVED: {} key {}: {} (ledger {})",
                plain(&one.column),
                plain(&one.key),
                one.error,
                one.id
            )?;
        }
        if self.open.len() > SHOWN {
            writeln!(out, "and {} more: hardwrap ledger list", self.open.len() - SHOWN)?;
        }
        if !self.open.is_empty() {
            writeln!(
                out,
                "not proven, and not announced: mend these rows and run hardwrap rotate --resume, or give them up with \
                 hardwrap ledger accept"
            )?;
        } else if self.proven {
            if self.weaker {
                writeln!(
                    out,
                    "WEAKER: this account may make no trigger, so nothing but the time that was waited keeps values under an \
                     old key away; grant it and run hardwrap rotate --resume"
                )?;
            }
            for kid in &self.from {
                let next = if self.retired.contains(kid) { "destroy" } else { "retire" };
                writeln!(out, "proven: no value names key {kid}; hardwrap key {next} {kid} is the next step")?;
            }
        }
        for one in &self.unheard {
            writeln!(out, "NOT HEARD by {}: the rotation is done; it hears again at rotate --resume", plain(one))?;
        }
        Ok(())
    }
}
