use std::io::Write;

use clap::{Args, Subcommand, value_parser};
use hardwrap::store::{AgentRuns, Answer, Db, Listing, Retention, RunId, StateFact, StateKind, Status, Summary};
use jiff::Timestamp;
use serde::Serialize;

use crate::app::App;
use crate::failure::Failure;
use crate::text::{plain, table};

/// Look after the agent runs of the preset nr-llm. Asks no key, and shows no value
#[derive(Args)]
#[command(after_help = "\
Examples:
  hardwrap runs list --status queued --status running
  hardwrap runs cancel 9f2c1ab0-5d1e-4c55-9a57-0d8a4b1f7e63 --reason 'asked by its owner' --confirm 9f2c1ab0-…
  hardwrap runs purge --finished 30 --dry-run")]
pub(crate) struct Runs {
    #[command(subcommand)]
    act: Act,
}

#[derive(Subcommand)]
enum Act {
    List(List),
    Show(Show),
    Cancel(Cancel),
    Purge(Purge),
}

impl Runs {
    pub(crate) fn run(self, app: &App, out: &mut dyn Write) -> Result<u8, Failure> {
        let config = app.config()?;
        if !config.has_preset() {
            return Err(Failure::usage("no agent runs: the preset nr-llm is not configured"));
        }
        let db = Db::open(&config.database)?;
        db.ready()?;
        match self.act {
            Act::List(list) => list.run(app, &db, out),
            Act::Show(show) => show.run(app, &db, out),
            Act::Cancel(cancel) => cancel.run(app, &db, out),
            Act::Purge(purge) => purge.run(app, &db, out),
        }
    }
}

/// List runs, oldest first, and what their two sealed columns hold
///
/// Asks the token nothing, reads no value and changes nothing. A run in a status that this hardwrap does not know is
/// listed as unknown.
#[derive(Args)]
#[command(after_help = "\
Examples:
  hardwrap runs list --status queued --status running
  hardwrap runs list --stale                     what a worker left behind
  hardwrap --json runs list | jq '.[] | select(.queued_request.kind == \"damaged\")'")]
struct List {
    /// Only runs that stand here: queued, running, waiting_for_approval, waiting_for_input, completed, failed, cancelled
    #[arg(long, value_name = "STATUS", value_parser = status)]
    status: Vec<Status>,
    /// Only running ones whose lease has ended
    #[arg(long, conflicts_with = "status")]
    stale: bool,
    /// At most so many
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = value_parser!(u32).range(1..=100_000))]
    limit: u32,
}

fn status(name: &str) -> Result<Status, String> {
    let names = || Status::ALL.map(Status::name).join(", ");
    Status::from_name(name).ok_or_else(|| format!("want one of {}", names()))
}

impl List {
    fn run(self, app: &App, db: &Db, out: &mut dyn Write) -> Result<u8, Failure> {
        let now = Timestamp::now().as_second();
        let mut listing =
            Listing { statuses: self.status, stale_before: self.stale.then_some(now), after: None, limit: PAGE };
        let mut listed: Vec<Listed> = Vec::new();
        // One more than is shown: whether there are more.
        let wanted = self.limit as usize + 1;
        loop {
            listing.limit = PAGE.min(u32::try_from(wanted - listed.len()).unwrap_or(PAGE));
            let page = if listing.limit == 0 { Vec::new() } else { AgentRuns::summaries(db, &listing)? };
            let Some(last) = page.last() else { break };
            listing.after = Some((last.run.crdate, last.run.uid));
            listed.extend(page.iter().map(Listed::of));
        }
        let more = listed.len() == wanted;
        listed.truncate(self.limit as usize);
        app.report(out, 0, &listed, |out| {
            if listed.is_empty() {
                return writeln!(out, "no runs");
            }
            let heading = ["uid", "run", "status", "made", "claimed by", "request", "state"].map(str::to_owned);
            let row = |run: &Listed| {
                vec![
                    run.uid.to_string(),
                    run.uuid.clone(),
                    run.status.unwrap_or("unknown").to_owned(),
                    run.made.clone().unwrap_or_default(),
                    run.claimed_by.clone(),
                    run.queued_request.to_string(),
                    run.suspended_state.to_string(),
                ]
            };
            let rows: Vec<_> = std::iter::once(heading.to_vec()).chain(listed.iter().map(row)).collect();
            table(out, &rows)?;
            if more {
                writeln!(out, "and more, made later: --limit N shows so many")?;
            }
            Ok(())
        })
    }
}

/// Show everything of one run but its values
///
/// Asks the token nothing and changes nothing. Says how each value is opened; that does need the token.
#[derive(Args)]
#[command(after_help = "\
Example:
  hardwrap runs show 0b9ff7a4-7c39-4fd1-9d1c-3b6f6a1f2c55")]
struct Show {
    /// Its uuid
    #[arg(value_name = "UUID")]
    run: RunId,
}

impl Show {
    fn run(self, app: &App, db: &Db, out: &mut dyn Write) -> Result<u8, Failure> {
        let summary = AgentRuns::summary(db, &self.run)?;
        let summary = summary.ok_or_else(|| Failure::failed(format!("there is no run {}", self.run)))?;
        let (listed, shown) = (Listed::of(&summary), Shown::of(&summary));
        #[derive(Serialize)]
        struct Whole<'a> {
            #[serde(flatten)]
            listed: &'a Listed,
            #[serde(flatten)]
            shown: &'a Shown,
        }
        app.report(out, 0, &Whole { listed: &listed, shown: &shown }, |out| {
            let time = |time: &Option<String>| time.clone().unwrap_or_else(|| "-".to_owned());
            let lines = [
                ("run", listed.uuid.clone()),
                ("uid", listed.uid.to_string()),
                ("status", listed.status.unwrap_or("unknown to this hardwrap").to_owned()),
                ("configuration", format!("{} ({})", shown.configuration_identifier, shown.configuration_uid)),
                ("user", shown.be_user.to_string()),
                ("made", time(&listed.made)),
                ("started", time(&shown.started)),
                ("finished", time(&shown.finished)),
                ("claimed by", listed.claimed_by.clone()),
                ("lease ends", time(&listed.lease_ends)),
                ("requeued", shown.requeue_count.to_string()),
                ("pending effect", shown.pending_effect.to_string()),
                ("error", shown.error_class.clone()),
                ("ended because", shown.termination_reason.clone()),
                ("tokens", shown.tokens.to_string()),
                ("request", listed.queued_request.to_string()),
                ("state", listed.suspended_state.to_string()),
            ];
            for (name, value) in lines {
                writeln!(out, "{}", format!("{name:<15} {}", plain(&value)).trim_end())?;
            }
            for (column, fact) in
                [("queued_request", &listed.queued_request), ("suspended_state", &listed.suspended_state)]
            {
                if ["sealed", "cleartext"].contains(&fact.kind) {
                    writeln!(
                        out,
                        "to open it: hardwrap open --column tx_nrllm_agentrun.{column} --key {}",
                        listed.uid
                    )?;
                }
            }
            Ok(())
        })
    }
}

/// Call a run off, whoever has it: both its states are emptied, for good
///
/// Asks no key: a run that cannot be opened can be called off too.
#[derive(Args)]
#[command(after_help = "\
Example:
  hardwrap runs cancel 0b9ff7a4-7c39-4fd1-9d1c-3b6f6a1f2c55 --reason 'asked by its owner' --confirm 0b9ff7a4-7c39-4fd1-9d1c-3b6f6a1f2c55")]
struct Cancel {
    /// Its uuid
    #[arg(value_name = "UUID")]
    run: RunId,
    /// Why: stands in the row, cut to 64 characters
    #[arg(long, value_name = "TEXT")]
    reason: String,
    /// The uuid once more: without it, what would be lost is shown, and nothing is done
    #[arg(long, value_name = "UUID")]
    confirm: Option<RunId>,
}

impl Cancel {
    fn run(self, app: &App, db: &Db, out: &mut dyn Write) -> Result<u8, Failure> {
        let id = &self.run;
        if self.confirm.as_ref() != Some(id) {
            let summary =
                AgentRuns::summary(db, id)?.ok_or_else(|| Failure::failed(format!("there is no run {id}")))?;
            let Listed { status, queued_request, suspended_state, .. } = Listed::of(&summary);
            return Err(Failure::usage(format!(
                "run {id} is {}; its request ({queued_request}) and state ({suspended_state}) would be emptied, for \
                 good: add --confirm {id}",
                status.unwrap_or("in a status that this hardwrap does not know")
            )));
        }
        match AgentRuns::cancel_in(db, id, &self.reason, Timestamp::now().as_second())? {
            Answer::Moved => {
                #[derive(Serialize)]
                struct Cancelled<'a> {
                    uuid: &'a str,
                    status: &'static str,
                }
                let done = Cancelled { uuid: id.as_str(), status: Status::Cancelled.name() };
                app.report(out, 0, &done, |out| writeln!(out, "run {id} was called off; its states are empty"))
            }
            Answer::NoSuchRun => Err(Failure::failed(format!("there is no run {id}"))),
            Answer::InState(status) => {
                Err(Failure::failed(format!("run {id} has ended already: it is {}", status.name())))
            }
            Answer::NotYours | Answer::NotStale | Answer::Changed => {
                Err(Failure::failed(format!("run {id} changed meanwhile: look again")))
            }
        }
    }
}

/// Delete old runs with their events, never one under a lease
///
/// Asks no key. What is deleted is gone; --dry-run counts it first, by the same conditions.
#[derive(Args)]
#[command(after_help = "\
Examples:
  hardwrap runs purge --finished 30 --dry-run
  hardwrap runs purge --finished 30 --unfinished 90")]
#[command(group = clap::ArgGroup::new("window").required(true).multiple(true))]
struct Purge {
    /// Runs that ended and were made more than so many days ago
    #[arg(long, value_name = "DAYS", group = "window", value_parser = value_parser!(u32).range(1..))]
    finished: Option<u32>,
    /// Runs that have not ended and were made more than so many days ago
    #[arg(long, value_name = "DAYS", group = "window", value_parser = value_parser!(u32).range(1..))]
    unfinished: Option<u32>,
    /// Count what would be deleted, and delete nothing
    #[arg(long)]
    dry_run: bool,
}

impl Purge {
    fn run(self, app: &App, db: &Db, out: &mut dyn Write) -> Result<u8, Failure> {
        let retention = Retention { finished: self.finished.unwrap_or(0), unfinished: self.unfinished.unwrap_or(0) };
        let now = Timestamp::now().as_second();
        let purged = match self.dry_run {
            true => AgentRuns::due(db, retention, now)?,
            false => AgentRuns::purge_in(db, retention, now)?,
        };
        #[derive(Serialize)]
        struct Purged {
            dry_run: bool,
            finished: u64,
            unfinished: u64,
            events: u64,
        }
        let done = Purged {
            dry_run: self.dry_run,
            finished: purged.finished,
            unfinished: purged.unfinished,
            events: purged.events,
        };
        app.report(out, 0, &done, |out| {
            let did = if done.dry_run { "would delete" } else { "deleted" };
            let Purged { finished, unfinished, events, .. } = done;
            writeln!(out, "{did} {finished} finished and {unfinished} unfinished runs, with {events} events")
        })
    }
}

#[derive(Serialize)]
struct Listed {
    uid: i64,
    uuid: String,
    status: Option<&'static str>,
    made: Option<String>,
    claimed_by: String,
    lease_ends: Option<String>,
    queued_request: Fact,
    suspended_state: Fact,
}

impl Listed {
    fn of(summary: &Summary) -> Self {
        let run = &summary.run;
        Self {
            uid: run.uid,
            uuid: run.uuid.clone(),
            status: run.status.map(Status::name),
            made: time(run.crdate),
            claimed_by: run.claimed_by.clone(),
            lease_ends: time(run.lease_expires),
            queued_request: Fact::of(&summary.request),
            suspended_state: Fact::of(&summary.state),
        }
    }
}

#[derive(Serialize)]
struct Shown {
    configuration_uid: i64,
    configuration_identifier: String,
    be_user: i64,
    started: Option<String>,
    finished: Option<String>,
    requeue_count: i64,
    pending_effect: bool,
    error_class: String,
    termination_reason: String,
    tokens: i64,
}

impl Shown {
    fn of(summary: &Summary) -> Self {
        let run = &summary.run;
        Self {
            configuration_uid: run.configuration_uid,
            configuration_identifier: run.configuration_identifier.clone(),
            be_user: run.be_user,
            started: time(run.started_at),
            finished: time(run.finished_at),
            requeue_count: run.requeue_count,
            pending_effect: run.pending_effect,
            error_class: run.error_class.clone(),
            termination_reason: run.termination_reason.clone(),
            tokens: run.totals.tokens,
        }
    }
}

/// What a sealed column of a run holds.
#[derive(Serialize)]
struct Fact {
    kind: &'static str,
    kid: Option<String>,
    bytes: u64,
}

impl Fact {
    fn of(fact: &StateFact) -> Self {
        let (kind, kid) = match fact.kind {
            StateKind::Null => ("null", None),
            StateKind::Empty => ("empty", None),
            StateKind::Sealed(kid) => ("sealed", Some(kid.to_string())),
            StateKind::Damaged => ("damaged", None),
            StateKind::OtherVersion => ("other_version", None),
            StateKind::Foreign => ("foreign", None),
            StateKind::Cleartext => ("cleartext", None),
        };
        Self { kind, kid, bytes: fact.bytes }
    }
}

impl std::fmt::Display for Fact {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (&self.kid, self.kind) {
            (Some(kid), _) => write!(f, "sealed under {kid}, {} bytes", self.bytes),
            (None, "null" | "empty") => f.write_str(self.kind),
            (None, "cleartext") => write!(f, "CLEARTEXT, {} bytes", self.bytes),
            (None, kind) => write!(f, "{kind}, {} bytes", self.bytes),
        }
    }
}

/// A time of the table; none for 0.
fn time(seconds: i64) -> Option<String> {
    (seconds != 0)
        .then(|| Timestamp::from_second(seconds).map_or_else(|_| seconds.to_string(), |time| time.to_string()))
}

const PAGE: u32 = 500;
