use std::collections::BTreeMap;
use std::io::Write;

use clap::Args;
use hardwrap::column::Column;
use hardwrap::hsm;
use hardwrap::keeper::{self, ColumnStatus, Keeper};
use hardwrap::store::{self, Counts};
use serde::Serialize;

use super::columns::policy;
use super::key::Listed;
use super::prometheus::Exposition;
use crate::app::App;
use crate::failure::Failure;
use crate::text::plain;

/// Show keys, database, and what the values of each column are
///
/// Changes nothing and opens no value: the database counts them by how they begin. Reports, and fails only where token
/// or database cannot be asked; with --check it fails by what it finds as well.
#[derive(Args)]
#[command(after_help = "\
Examples:
  hardwrap status --check                what monitoring runs
  hardwrap status --sql                  for whoever wants to count without hardwrap
  hardwrap status --prometheus > hardwrap.prom.new && mv hardwrap.prom.new hardwrap.prom
Figures for Prometheus are whole or not there: where token or database cannot be asked, nothing is printed (exit 4).")]
pub(crate) struct Status {
    /// Exit 1 where something is critical and 3 where something is to be warned of
    #[arg(long)]
    check: bool,
    /// Print the SQL that repeats each count as well (--json always has it)
    #[arg(long)]
    sql: bool,
    /// Print the figures in the text format that Prometheus reads
    #[arg(long, conflicts_with_all = ["json", "sql"])]
    prometheus: bool,
}

impl Status {
    pub(crate) fn run(self, app: &App, out: &mut dyn Write) -> Result<u8, Failure> {
        let config = app.config()?;
        let keeper = Keeper::unchecked(&config)?;
        let found = keeper.status()?;
        let report = &found.token;
        let column = |one: ColumnStatus| match one.counts {
            Ok(counts) => Counted::of(&one.column, counts),
            Err(fault) => Counted {
                missing: matches!(fault, keeper::Error::Store(store::Error::NoTable(_) | store::Error::NoColumn(_))),
                fault: Some(fault.to_string()),
                ..Counted::of(&one.column, Counts::default())
            },
        };
        let mut status = Shown {
            environment: config.environment.clone(),
            token: report.token.label.clone(),
            token_serial: report.token.serial.clone(),
            keyring: config.token.keyring.clone(),
            tokens_away: report.unreachable.clone(),
            keys: report.keys.iter().map(Listed::of).collect(),
            strangers: report.strangers.len(),
            leftovers: report.leftovers.len(),
            database: keeper.db().url().to_string(),
            database_identity: found.identity.clone(),
            columns: found.columns.into_iter().map(column).collect(),
            unregistered: found.unregistered.iter().map(|one| format!("{one} ({})", one.count)).collect(),
            last_discovery: found.last_discovery.as_ref().map(|last| last.searched.clone()),
            ledger_open: found.ledger.iter().filter(|entry| entry.accepted.is_none()).count(),
            ledger_given_up: found.ledger.iter().filter(|entry| entry.accepted.is_some()).count(),
            rotations: found
                .rotations
                .iter()
                .map(|one| Rotation {
                    target: one.target.clone(),
                    mode: one.mode.clone(),
                    started: one.started.clone(),
                    moved: one.moved,
                    proven: one.proven.clone(),
                    weaker: one.weaker.is_some(),
                })
                .collect(),
            old_keys: found
                .fences
                .iter()
                .map(|(kid, missing)| {
                    let proof = found.token.proofs.get(&(found.identity.clone(), *kid));
                    OldKey {
                        kid: kid.to_string(),
                        proven_since: proof.map(|proof| proof.since.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()),
                        fence_missing_on: missing.iter().map(ToString::to_string).collect(),
                    }
                })
                .collect(),
            critical: found.wrong.iter().map(ToString::to_string).collect(),
            warnings: Vec::new(),
        };
        status.judge();
        let verdict = match (self.check, status.critical.is_empty(), status.warnings.is_empty()) {
            (true, false, _) => 1,
            (true, true, false) => 3,
            _ => 0,
        };
        if self.prometheus {
            return app.report(out, verdict, &status, |out| out.write_all(status.exposition().text().as_bytes()));
        }
        app.report(out, verdict, &status, |out| status.write(out, self.sql))
    }
}

#[derive(Serialize)]
struct Shown {
    environment: String,
    token: String,
    token_serial: String,
    keyring: String,
    /// Tokens of the configuration that could not be asked, by name.
    tokens_away: Vec<String>,
    keys: Vec<Listed>,
    strangers: usize,
    leftovers: usize,
    database: String,
    database_identity: String,
    columns: Vec<Counted>,
    /// Where envelopes stand that nobody registered.
    unregistered: Vec<String>,
    last_discovery: Option<String>,
    ledger_open: usize,
    ledger_given_up: usize,
    rotations: Vec<Rotation>,
    old_keys: Vec<OldKey>,
    critical: Vec<String>,
    warnings: Vec<String>,
}

#[derive(Serialize)]
struct Rotation {
    target: String,
    mode: String,
    started: String,
    moved: i64,
    proven: Option<String>,
    weaker: bool,
}

/// A key that values are to leave, or have left.
#[derive(Serialize)]
struct OldKey {
    kid: String,
    proven_since: Option<String>,
    fence_missing_on: Vec<String>,
}

#[derive(Serialize)]
struct Counted {
    column: String,
    cleartext_policy: &'static str,
    rows: u64,
    sealed: BTreeMap<String, u64>,
    cleartext: u64,
    foreign: u64,
    other_version: u64,
    damaged: u64,
    empty: u64,
    null: u64,
    keyless: u64,
    fault: Option<String>,
    #[serde(skip)]
    missing: bool,
    sql: String,
}

impl Counted {
    fn of(column: &Column, counts: Counts) -> Self {
        Self {
            column: column.to_string(),
            cleartext_policy: policy(column),
            rows: counts.total,
            sealed: counts.sealed.into_iter().map(|(kid, count)| (kid.to_string(), count)).collect(),
            cleartext: counts.cleartext,
            foreign: counts.foreign,
            other_version: counts.other_version,
            damaged: counts.damaged,
            empty: counts.empty,
            null: counts.null,
            keyless: counts.keyless,
            fault: None,
            missing: false,
            sql: counts.sql,
        }
    }
}

impl Counted {
    /// What is not sealed, by its name in output.
    fn others(&self) -> [(&'static str, u64); 6] {
        [
            ("cleartext", self.cleartext),
            ("foreign", self.foreign),
            ("other_version", self.other_version),
            ("damaged", self.damaged),
            ("empty", self.empty),
            ("null", self.null),
        ]
    }
}

fn key_id(key: &Listed) -> &str {
    &key.kid
}

impl Shown {
    fn judge(&mut self) {
        for name in &self.tokens_away {
            self.warnings.push(format!("token {name} is out of reach: its keys are not shown"));
        }
        for key in self.keys.iter().filter(|key| !key.well) {
            self.critical.push(format!("key {} is recorded and does not work", key.kid));
        }
        if self.strangers > 0 {
            self.warnings.push(format!("{} objects with our label do not count: `hardwrap key list`", self.strangers));
        }
        if self.leftovers > 0 {
            self.warnings.push(format!("{} keys were left in the making: `hardwrap key list`", self.leftovers));
        }
        for one in &self.unregistered {
            self.critical.push(format!("sealed values in a column that nobody registered: {one}: add a [[column]]"));
        }
        if self.ledger_open > 0 {
            self.warnings.push(format!("{} values could not be moved: `hardwrap ledger list`", self.ledger_open));
        }
        for old in &self.old_keys {
            match &old.proven_since {
                None => self
                    .warnings
                    .push(format!("nothing proves that no value names key {}: `hardwrap rotate --resume`", old.kid)),
                Some(_) if !old.fence_missing_on.is_empty() => self.warnings.push(format!(
                    "the fence against key {} is missing on {}: `hardwrap rotate --resume`",
                    old.kid,
                    old.fence_missing_on.join(", ")
                )),
                Some(_) => {}
            }
        }
        for column in &self.columns {
            let name = &column.column;
            match &column.fault {
                // As the doctor has it: what is not there yet may be to come.
                Some(fault) if column.missing => self.warnings.push(format!("{name}: {fault}")),
                Some(fault) => self.critical.push(format!("{name}: {fault}")),
                None => {}
            }
            if column.damaged > 0 {
                self.critical.push(format!("{name}: {} values are damaged", column.damaged));
            }
            if column.cleartext > 0 && column.cleartext_policy == "refuse" {
                self.critical
                    .push(format!("{name}: {} values in cleartext in a column that refuses it", column.cleartext));
            }
            for kid in column.sealed.keys() {
                let key = self.keys.iter().find(|key| key.kid == *kid);
                if key.is_none_or(|key| !key.works) {
                    // One that is as it should be is retired or destroyed.
                    let why = key.filter(|key| key.well).map_or("not there", |key| key.state);
                    self.critical.push(format!("{name}: values are sealed under key {kid}, which is {why}"));
                }
            }
            if column.cleartext_policy == "accept" {
                self.warnings.push(format!("{name}: accepts cleartext ({} values are)", column.cleartext));
            }
            if column.foreign > 0 {
                self.warnings.push(format!("{name}: {} values are nr-vault envelopes", column.foreign));
            }
            if column.other_version > 0 {
                self.warnings.push(format!("{name}: {} values were sealed by a newer hardwrap", column.other_version));
            }
            if column.keyless > 0 {
                self.warnings.push(format!("{name}: {} rows have no key and cannot be walked", column.keyless));
            }
        }
    }

    fn exposition(&self) -> Exposition {
        let mut shown = Exposition::default();
        let gauge = |is: bool| u64::from(is);
        let keys = |value: fn(&Listed) -> Option<u64>| -> Vec<_> {
            let sample = |key| Some((vec![("kid", key_id(key))], value(key)?));
            self.keys.iter().filter_map(sample).collect()
        };
        shown.gauge(
            "hardwrap_info",
            "Which deployment this is.",
            &[(vec![("environment", &*self.environment), ("keyring", &self.keyring), ("token", &self.token)], 1)],
        );
        let states: Vec<_> = self
            .keys
            .iter()
            .map(|key| (vec![("kid", key_id(key)), ("state", key.state), ("alg", key.alg)], 1))
            .collect();
        shown.gauge("hardwrap_key_state", "The state of a master key, as its label says.", &states);
        shown.gauge(
            "hardwrap_key_works",
            "Whether the key is on the token and its canary unwraps.",
            &keys(|key| Some(u64::from(key.works))),
        );
        shown.gauge(
            "hardwrap_key_current",
            "Whether new values are sealed under the key.",
            &keys(|key| Some(u64::from(key.current))),
        );
        shown.gauge(
            "hardwrap_key_activated_timestamp_seconds",
            "When the key became active, in unix seconds.",
            &keys(|key| key.activated_at.and_then(|at| u64::try_from(at).ok())),
        );
        shown.gauge(
            "hardwrap_key_wraps_reserved",
            "How many wraps of an A256GCMKW key are reserved.",
            &keys(|key| key.wraps_reserved),
        );
        shown.gauge(
            "hardwrap_key_wraps_limit",
            "How many wraps an A256GCMKW key may do (half of SP 800-38D section 8.3).",
            &keys(|key| key.wraps_reserved.map(|_| hsm::MOST_USES)),
        );
        shown.gauge(
            "hardwrap_token_strangers",
            "Objects with our label that do not count.",
            &[(vec![], self.strangers as u64)],
        );
        shown.gauge(
            "hardwrap_token_leftovers",
            "Keys that a crash left in the making.",
            &[(vec![], self.leftovers as u64)],
        );
        let mut values = Vec::new();
        for column in self.columns.iter().filter(|column| column.fault.is_none()) {
            let name = column.column.as_str();
            for (kid, count) in &column.sealed {
                values.push((vec![("column", name), ("kind", "sealed"), ("kid", kid.as_str())], *count));
            }
            for (kind, count) in column.others() {
                values.push((vec![("column", name), ("kind", kind), ("kid", "")], count));
            }
        }
        shown.gauge("hardwrap_column_values", "Values of a sealed column by what they are.", &values);
        let columns = |value: &dyn Fn(&Counted) -> u64| -> Vec<_> {
            self.columns.iter().map(|column| (vec![("column", column.column.as_str())], value(column))).collect()
        };
        let counted = self.columns.iter().filter(|column| column.fault.is_none());
        let rows: Vec<_> = counted.map(|column| (vec![("column", column.column.as_str())], column.rows)).collect();
        shown.gauge("hardwrap_column_rows", "Rows of the table.", &rows);
        shown.gauge(
            "hardwrap_column_fault",
            "Whether the column cannot be used.",
            &columns(&|column| gauge(column.fault.is_some())),
        );
        shown.gauge(
            "hardwrap_cleartext_window",
            "Whether the column accepts cleartext.",
            &columns(&|column| gauge(column.cleartext_policy == "accept")),
        );
        shown.gauge(
            "hardwrap_findings",
            "What status has to say.",
            &[
                (vec![("severity", "critical")], self.critical.len() as u64),
                (vec![("severity", "warning")], self.warnings.len() as u64),
            ],
        );
        shown
    }

    fn write(&self, out: &mut dyn Write, sql: bool) -> std::io::Result<()> {
        writeln!(out, "environment  {}", plain(&self.environment))?;
        let (token, serial) = (plain(&self.token), plain(&self.token_serial));
        writeln!(out, "token        {token} (serial {serial}), keyring {}", self.keyring)?;
        for key in &self.keys {
            let seals = if key.current { ", seals" } else { "" };
            let works = if key.well { "" } else { ", DOES NOT WORK" };
            writeln!(out, "key          {} {}{seals}{works}, {} ({})", key.kid, key.state, key.alg, key.route)?;
        }
        writeln!(out, "database     {} (identity {})", plain(&self.database), plain(&self.database_identity))?;
        let last = self.last_discovery.as_deref().unwrap_or("never");
        writeln!(out, "searched     now: {} unregistered; before a rotation: {last}", self.unregistered.len())?;
        let (open, given_up) = (self.ledger_open, self.ledger_given_up);
        writeln!(out, "ledger       {open} open, {given_up} given up")?;
        for one in &self.rotations {
            let proven = one.proven.as_ref().map_or("NOT PROVEN".to_owned(), |at| format!("proven {at}"));
            writeln!(
                out,
                "rotation     to {} ({}), begun {}, {} moved, {proven}{}",
                one.target,
                one.mode,
                one.started,
                one.moved,
                if one.weaker { ", WEAKER: without the database's fence" } else { "" }
            )?;
        }
        for one in &self.old_keys {
            let since = one.proven_since.as_ref().map_or("not proven".to_owned(), |at| format!("unneeded since {at}"));
            let fence = if one.fence_missing_on.is_empty() { "fence in place" } else { "FENCE MISSING" };
            writeln!(out, "old key      {} {since}, {fence}", one.kid)?;
        }
        for column in &self.columns {
            writeln!(out)?;
            writeln!(out, "{}  ({} rows)", plain(&column.column), column.rows)?;
            for (kid, count) in &column.sealed {
                writeln!(out, "  {count} sealed under {kid}")?;
            }
            for (kind, count) in column.others().into_iter().filter(|(_, count)| *count > 0) {
                let what = match kind {
                    "cleartext" => "in cleartext",
                    "foreign" => "nr-vault envelopes",
                    "other_version" => "of a newer hardwrap",
                    "null" => "NULL",
                    kind => kind,
                };
                writeln!(out, "  {count} {what}")?;
            }
            if sql && column.fault.is_none() {
                writeln!(out, "  to repeat: {};", plain(column.sql.trim_end_matches(';')))?;
            }
        }
        if !self.critical.is_empty() || !self.warnings.is_empty() {
            writeln!(out)?;
        }
        for what in &self.critical {
            writeln!(out, "CRITICAL {}", plain(what))?;
        }
        for what in &self.warnings {
            writeln!(out, "warning  {}", plain(what))?;
        }
        Ok(())
    }
}
