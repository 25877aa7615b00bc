use std::io::{self, Write};

use clap::Args;
use hardwrap::keeper::{Diagnosis, Outcome, Severity};
use hardwrap::store::{ServerSettings, Settings, SqliteSettings};

use crate::app::App;
use crate::failure::Failure;
use crate::text::plain;

/// Examine token, PIN, keys, database, register and values: what is wrong, what may come of it, what to do
///
/// Changes nothing, and leaves nothing on the token: routes are tried on throw-away keys. A part that cannot be examined
/// keeps no other from being examined.
#[derive(Args)]
#[command(after_help = "\
Examples:
  hardwrap doctor
  hardwrap --json doctor | jq -r '.findings[].id'
Exit codes: 0 nothing to say or only information, 1 something critical, 3 warnings only, 2 wrong usage.
A check that did not run is never a pass: the last lines name it.")]
pub(crate) struct Doctor {}

impl Doctor {
    pub(crate) fn run(self, app: &App, out: &mut dyn Write) -> Result<u8, Failure> {
        let config = app.found_config()?;
        let diagnosis = Diagnosis::of(config.as_ref());
        let verdict = match diagnosis.worst() {
            Some(Severity::Critical) => 1,
            Some(Severity::Warning) => 3,
            Some(Severity::Info) | None => 0,
        };
        app.report(out, verdict, &diagnosis, |out| write(&diagnosis, out))
    }
}

fn write(diagnosis: &Diagnosis, out: &mut dyn Write) -> io::Result<()> {
    let count = |severity| diagnosis.findings.iter().filter(|finding| finding.severity == severity).count();
    let not_run = diagnosis.checks.iter().filter(|check| check.outcome == Outcome::NotRun).count();
    let verdict = match (count(Severity::Critical), count(Severity::Warning), not_run) {
        (0, 0, 0) => "nothing is wrong".to_owned(),
        (critical, warnings, 0) => format!("{critical} critical, {warnings} to be warned of"),
        (critical, warnings, checks) => {
            format!("{critical} critical, {warnings} to be warned of, {checks} checks did not run")
        }
    };
    let environment = diagnosis.environment.as_deref().unwrap_or("no configuration");
    writeln!(out, "{verdict} ({}, {})", plain(environment), diagnosis.time)?;
    for finding in &diagnosis.findings {
        let severity = match finding.severity {
            Severity::Critical => "CRITICAL",
            other => other.name(),
        };
        writeln!(out)?;
        writeln!(out, "{severity}  {}: {}", finding.id.name(), plain(&finding.subject))?;
        writeln!(out, "  found   {}", plain(&finding.what))?;
        writeln!(out, "  risk    {}", finding.risk)?;
        writeln!(out, "  remedy  {}", plain(&finding.remedy))?;
    }
    writeln!(out)?;
    if let Some(token) = &diagnosis.token {
        let [label, serial, model] = [&token.label, &token.serial, &token.model].map(|text| plain(text));
        writeln!(out, "token     {label} (serial {serial}), {model}")?;
        writeln!(
            out,
            "keyring   {}: {} keys, record on the token, {} databases",
            plain(&token.keyring),
            token.keys.len(),
            token.databases
        )?;
        for key in &token.keys {
            let works = if key.well { "" } else { ", DOES NOT WORK" };
            let seals = if key.seals { ", seals" } else { "" };
            writeln!(out, "key       {} {} ({}){seals}{works}", key.kid, key.state, key.route)?;
        }
        for route in &token.routes {
            let best = if token.recommended == Some(route.route) { ", recommended" } else { "" };
            match (route.wrap_us, route.unwrap_us) {
                (Some(wrap), Some(unwrap)) => {
                    writeln!(out, "route     {}: wrap {wrap} µs, unwrap {unwrap} µs{best}", route.route)?;
                }
                _ => writeln!(out, "route     {}: {}", route.route, plain(route.fault.as_deref().unwrap_or_default()))?,
            }
        }
    }
    if let Some(database) = &diagnosis.database {
        writeln!(out, "database  {}", plain(&database.url))?;
        match &database.settings {
            Some(Settings::Sqlite(SqliteSettings { sqlite, journal_mode, free_pages, pages, .. })) => {
                writeln!(out, "          SQLite {sqlite}, journal {journal_mode}, {free_pages} of {pages} pages free")?;
            }
            Some(Settings::Server(ServerSettings { server, account, tls, writable, nodes })) => {
                let tls = if tls.is_empty() { "no TLS" } else { tls };
                let nodes = if *nodes > 0 { format!(", {nodes} nodes") } else { String::new() };
                let writable = if writable == "yes" { "" } else { ", cannot be written" };
                writeln!(out, "          {}, as {}, {}{nodes}{writable}", plain(server), plain(account), plain(tls))?;
            }
            None => {}
        }
        for column in &database.columns {
            let name = plain(&column.column);
            match (column.rows, column.sealed, column.in_cleartext) {
                (Some(rows), Some(sealed), Some(clear)) => {
                    writeln!(out, "column    {name}: {rows} rows, {sealed} sealed, {clear} in clear")?;
                }
                _ => writeln!(out, "column    {name}: not counted")?,
            }
        }
    }
    let went = |outcome| diagnosis.checks.iter().filter(|check| check.outcome == outcome).count();
    let (passed, found) = (went(Outcome::Passed), went(Outcome::Findings));
    writeln!(out, "checks    {passed} passed, {found} found something, {not_run} did not run")?;
    for check in diagnosis.checks.iter().filter(|check| check.outcome == Outcome::NotRun) {
        writeln!(out, "not run   {}: {}", check.id, plain(check.note.as_deref().unwrap_or_default()))?;
    }
    Ok(())
}
