//! The doctor: examines everything that a deployment rests on, changes nothing, and says of each thing that is wrong
//! what may come of it and what to do. A part that cannot be examined keeps no other from being examined, and a check
//! that did not run is never a pass.

mod configuration;
mod database;
mod finding;
mod rotation;
mod token;

pub use database::{DatabaseFacts, ExaminedColumn};
pub use finding::{Finding, FindingId, Severity};
pub use token::{ExaminedKey, ExaminedRoute, TokenFacts};

use jiff::Timestamp;
use serde::Serialize;

use super::{Config, ConfigError};

/// What the doctor saw.
#[derive(Debug, Serialize)]
pub struct Diagnosis {
    /// What the deployment is called; none without a configuration.
    pub environment: Option<String>,
    /// When, RFC 3339 in UTC.
    pub time: String,
    /// Each check, and how it went.
    pub checks: Vec<Check>,
    /// What was found, worst first.
    pub findings: Vec<Finding>,
    /// The token, where it could be reached.
    pub token: Option<TokenFacts>,
    /// The database, where it could be opened.
    pub database: Option<DatabaseFacts>,
}

/// One check of a [`Diagnosis`].
#[derive(Clone, Debug, Serialize)]
pub struct Check {
    /// Its name: stable, for programs.
    pub id: &'static str,
    /// How it went.
    pub outcome: Outcome,
    /// Why it did not run.
    pub note: Option<String>,
}

/// How a check went.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// It ran to its end and found nothing, or only what is good to know.
    Passed,
    /// It found something.
    Findings,
    /// It did not run: nothing is known.
    NotRun,
}

impl Diagnosis {
    /// Examines what `config` names; or, where that is an error, says so, and nothing else can be examined.
    pub fn of(config: Result<&Config, &ConfigError>) -> Self {
        let mut examination = Examination::default();
        let (mut token, mut database) = (None, None);
        match config {
            Ok(config) => {
                configuration::examine(config, &mut examination);
                let opened = database::open(config, &mut examination);
                let seen = token::examine(config, opened.as_ref(), &mut examination);
                database = database::examine(config, opened, seen.as_ref().map(|seen| &seen.report), &mut examination);
                token = seen.map(|seen| seen.facts);
            }
            Err(error) => {
                configuration::unusable(error, &mut examination);
                examination.skip("there is no configuration to go by");
            }
        }
        let mut findings = examination.findings;
        findings.sort_by_key(|finding| finding.severity);
        Self {
            environment: config.ok().map(|config| config.environment.clone()),
            time: Timestamp::now().round(jiff::Unit::Second).unwrap_or_default().to_string(),
            checks: examination.checks,
            findings,
            token,
            database,
        }
    }

    /// How bad it is: the worst finding, and a warning at least where a check did not run.
    pub fn worst(&self) -> Option<Severity> {
        let not_run = self.checks.iter().any(|check| check.outcome == Outcome::NotRun).then_some(Severity::Warning);
        self.findings.iter().map(|finding| finding.severity).chain(not_run).min()
    }
}

/// A diagnosis in the making.
#[derive(Default)]
struct Examination {
    checks: Vec<Check>,
    findings: Vec<Finding>,
}

impl Examination {
    /// Notes that the check ran, and what it found.
    fn ran(&mut self, id: &'static str, found: Vec<Finding>) {
        let outcome = match found.iter().any(|finding| finding.severity < Severity::Info) {
            true => Outcome::Findings,
            false => Outcome::Passed,
        };
        self.checks.push(Check { id, outcome, note: None });
        self.findings.extend(found);
    }

    /// Notes that the check could not run.
    fn not_run(&mut self, id: &'static str, why: impl Into<String>) {
        self.checks.push(Check { id, outcome: Outcome::NotRun, note: Some(why.into()) });
    }

    /// Notes of every check that has not run that it will not.
    fn skip(&mut self, why: &str) {
        for id in CHECKS {
            if !self.checks.iter().any(|check| check.id == id) {
                self.not_run(id, why);
            }
        }
    }
}

/// Every check, in the order in which they are shown.
const CHECKS: [&str; 12] = [
    "configuration",
    "database",
    "module",
    "pin",
    "token",
    "keyring",
    "keys",
    "routes",
    "columns",
    "values",
    "discovery",
    "rotation",
];
