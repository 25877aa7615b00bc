use std::io::Write;

use clap::{Args, Subcommand};
use hardwrap::hsm::Report;
use serde::Serialize;

use super::key::right_keyring;
use crate::app::App;
use crate::failure::Failure;
use crate::text::plain;

/// Look at the databases that use the keyring, and give one up that is gone
#[derive(Args)]
pub(crate) struct Database {
    #[command(subcommand)]
    act: Act,
}

#[derive(Subcommand)]
enum Act {
    List(List),
    Release(Release),
}

/// List the databases that the keyring record names, and what each has proven of each old key
///
/// Changes nothing.
#[derive(Args)]
#[command(after_help = "\
Example:
  hardwrap database list")]
struct List {}

/// Give up a database: the destruction of a key no longer asks for its proof
///
/// For one that does not exist any more. What is sealed there becomes unreadable when its key is destroyed.
#[derive(Args)]
#[command(after_help = "\
Example:
  hardwrap database release baf3ba3982dc7d9476e48978677b7af8 --reason 'dropped with staging' \\
    --confirm baf3ba3982dc7d9476e48978677b7af8")]
struct Release {
    /// Its identity: 32 hex digits, as `database list` shows it
    identity: String,
    /// Why; kept in the keyring record
    #[arg(long, value_name = "TEXT")]
    reason: String,
    /// The identity once more
    #[arg(long, value_name = "IDENTITY")]
    confirm: String,
}

impl Database {
    pub(crate) fn run(self, app: &App, out: &mut dyn Write) -> Result<u8, Failure> {
        let keeper = right_keyring(app)?;
        let here = keeper.db().ready()?.identity;
        if let Act::Release(release) = self.act {
            if release.confirm != release.identity {
                return Err(Failure::usage("--confirm does not name the database: give its identity once more"));
            }
            keeper.release_database(&release.identity, &release.reason)?;
        }
        let known = known(&keeper.report()?, &here);
        app.report(out, 0, &known, |out| known.iter().try_for_each(|one| one.write(out)))
    }
}

#[derive(Serialize)]
struct Known {
    identity: String,
    here: bool,
    noted: String,
    released: Option<String>,
    reason: Option<String>,
    proofs: Vec<Proven>,
}

#[derive(Serialize)]
struct Proven {
    kid: String,
    since: String,
    last: String,
}

fn known(report: &Report, here: &str) -> Vec<Known> {
    let time = |at: jiff::Timestamp| at.strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    let one = |(identity, fact): (&String, &hardwrap::hsm::DatabaseFact)| {
        let released = fact.released.as_ref().filter(|_| !report.databases.contains(identity));
        let proofs = report.proofs.iter().filter(|((of, _), _)| of == identity);
        Known {
            identity: identity.clone(),
            here: identity == here,
            noted: time(fact.noted),
            released: released.map(|(at, _)| time(*at)),
            reason: released.map(|(_, reason)| reason.clone()),
            proofs: proofs
                .map(|((_, kid), proof)| Proven {
                    kid: kid.to_string(),
                    since: time(proof.since),
                    last: time(proof.last),
                })
                .collect(),
        }
    };
    report.all_databases.iter().map(one).collect()
}

impl Known {
    fn write(&self, out: &mut dyn Write) -> std::io::Result<()> {
        let here = if self.here { ", this one" } else { "" };
        write!(out, "database {}{here}, noted {}", plain(&self.identity), self.noted)?;
        match (&self.released, &self.reason) {
            (Some(at), Some(reason)) => writeln!(out, ", released {at}: {}", plain(reason))?,
            _ => writeln!(out)?,
        }
        for proof in &self.proofs {
            writeln!(out, "  no value names key {} since {}, proven last {}", proof.kid, proof.since, proof.last)?;
        }
        Ok(())
    }
}
