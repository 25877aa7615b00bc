use std::collections::BTreeMap;
use std::io::Write;

use clap::Args;
use hardwrap::column::Column;
use hardwrap::keeper::Keeper;
use hardwrap::store::Counts;
use serde::Serialize;

use super::columns::policy;
use super::key::Listed;
use crate::app::App;
use crate::failure::Failure;
use crate::text::plain;

/// Show keys, database, and what the values of each column are
#[derive(Args)]
pub(crate) struct Status {
    /// Exit 1 where something is critical and 3 where something is to be warned of
    #[arg(long)]
    check: bool,
    /// Print the SQL that repeats each count as well (--json always has it)
    #[arg(long)]
    sql: bool,
}

impl Status {
    pub(crate) fn run(self, app: &App, out: &mut dyn Write) -> Result<u8, Failure> {
        let config = app.config()?;
        let keeper = Keeper::unchecked(&config)?;
        let report = keeper.keyring().report()?;
        let mut columns = Vec::new();
        for (column, facts) in keeper.columns() {
            columns.push(match facts.usable() {
                Ok(()) => Counted::of(column, keeper.db().count(column)?),
                Err(fault) => Counted { fault: Some(fault.to_string()), ..Counted::of(column, Counts::default()) },
            });
        }
        let mut status = Shown {
            environment: config.environment.clone(),
            token: report.token.label.clone(),
            token_serial: report.token.serial.clone(),
            keyring: config.token.keyring.clone(),
            keys: report.keys.iter().map(Listed::of).collect(),
            strangers: report.strangers.len(),
            leftovers: report.leftovers.len(),
            database: keeper.db().url().to_string(),
            database_identity: keeper.db().ready()?.identity,
            columns,
            critical: Vec::new(),
            warnings: Vec::new(),
        };
        status.judge();
        let verdict = match (self.check, status.critical.is_empty(), status.warnings.is_empty()) {
            (true, false, _) => 1,
            (true, true, false) => 3,
            _ => 0,
        };
        app.report(out, verdict, &status, |out| status.write(out, self.sql))
    }
}

#[derive(Serialize)]
struct Shown {
    environment: String,
    token: String,
    token_serial: String,
    keyring: String,
    keys: Vec<Listed>,
    strangers: usize,
    leftovers: usize,
    database: String,
    database_identity: String,
    columns: Vec<Counted>,
    critical: Vec<String>,
    warnings: Vec<String>,
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
            sql: counts.sql,
        }
    }
}

impl Shown {
    fn judge(&mut self) {
        if !self.keys.iter().any(|key| key.current && key.works) {
            self.critical.push("no key seals: run `hardwrap init`".to_owned());
        }
        for key in self.keys.iter().filter(|key| !key.works) {
            self.critical.push(format!("key {} is recorded and does not work", key.kid));
        }
        if self.strangers > 0 {
            self.warnings.push(format!("{} objects with our label do not count: `hardwrap key list`", self.strangers));
        }
        if self.leftovers > 0 {
            self.warnings.push(format!("{} keys were left in the making: `hardwrap key list`", self.leftovers));
        }
        for column in &self.columns {
            let name = &column.column;
            if let Some(fault) = &column.fault {
                self.critical.push(format!("{name}: {fault}"));
            }
            if column.damaged > 0 {
                self.critical.push(format!("{name}: {} values are damaged", column.damaged));
            }
            if column.cleartext > 0 && column.cleartext_policy == "refuse" {
                self.critical
                    .push(format!("{name}: {} values in cleartext in a column that refuses it", column.cleartext));
            }
            for kid in column.sealed.keys() {
                if !self.keys.iter().any(|key| key.kid == *kid && key.works) {
                    self.critical.push(format!("{name}: values are sealed under key {kid}, which is not there"));
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

    fn write(&self, out: &mut dyn Write, sql: bool) -> std::io::Result<()> {
        writeln!(out, "environment  {}", plain(&self.environment))?;
        let (token, serial) = (plain(&self.token), plain(&self.token_serial));
        writeln!(out, "token        {token} (serial {serial}), keyring {}", self.keyring)?;
        for key in &self.keys {
            let seals = if key.current { ", seals" } else { "" };
            let works = if key.works { "" } else { ", DOES NOT WORK" };
            writeln!(out, "key          {} {}{seals}{works}, {} ({})", key.kid, key.state, key.alg, key.route)?;
        }
        writeln!(out, "database     {} (identity {})", plain(&self.database), plain(&self.database_identity))?;
        for column in &self.columns {
            writeln!(out)?;
            writeln!(out, "{}  ({} rows)", plain(&column.column), column.rows)?;
            for (kid, count) in &column.sealed {
                writeln!(out, "  {count} sealed under {kid}")?;
            }
            for (count, what) in [
                (column.cleartext, "in cleartext"),
                (column.foreign, "nr-vault envelopes"),
                (column.other_version, "of a newer hardwrap"),
                (column.damaged, "damaged"),
                (column.empty, "empty"),
                (column.null, "NULL"),
            ] {
                if count > 0 {
                    writeln!(out, "  {count} {what}")?;
                }
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
