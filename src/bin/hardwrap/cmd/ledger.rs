use std::io::Write;

use clap::{Args, Subcommand};
use hardwrap::store::{Db, LedgerEntry};
use serde::Serialize;

use crate::app::App;
use crate::failure::Failure;
use crate::text::{plain, table};

/// Look at the values that a rotation could not move, and give some up
#[derive(Args)]
pub(crate) struct Ledger {
    #[command(subcommand)]
    act: Act,
}

#[derive(Subcommand)]
enum Act {
    List(List),
    Accept(Accept),
}

/// List the values that could not be moved: table, column, key, kind of error
///
/// Asks the token nothing, and shows no value. A row that was mended leaves the ledger with `rotate --resume`.
#[derive(Args)]
#[command(after_help = "\
Example:
  hardwrap ledger list --check     exits 1 while any is open")]
struct List {
    /// Exit 1 where an entry is neither mended nor given up
    #[arg(long)]
    check: bool,
}

/// Give up the value of one entry: it keeps no key from being destroyed any more
///
/// The row stays as it is. Once its key is destroyed nothing can open it.
#[derive(Args)]
#[command(after_help = "\
Example:
  hardwrap ledger accept 3 --reason 'test data of 2024, asked for by its owner'")]
struct Accept {
    /// The number that `ledger list` shows
    #[arg(value_name = "NUMBER")]
    id: i64,
    /// Why; kept in the ledger
    #[arg(long, value_name = "TEXT")]
    reason: String,
}

impl Ledger {
    pub(crate) fn run(self, app: &App, out: &mut dyn Write) -> Result<u8, Failure> {
        let db = Db::open(&app.config()?.database)?;
        db.ready()?;
        match self.act {
            Act::List(list) => {
                let entries: Vec<Entry> = db.ledger()?.iter().map(Entry::of).collect();
                let open = entries.iter().any(|entry| entry.accepted.is_none());
                app.report(out, u8::from(list.check && open), &entries, |out| write(&entries, out))
            }
            Act::Accept(accept) => {
                if accept.reason.trim().is_empty() {
                    return Err(Failure::usage("say why: --reason"));
                }
                db.accept_in_ledger(accept.id, &accept.reason)?;
                let entry = db.ledger()?.iter().find(|entry| entry.id == accept.id).map(Entry::of);
                app.report(out, 0, &entry, |out| {
                    writeln!(out, "ledger {}: given up; run hardwrap rotate --resume to prove the rest", accept.id)
                })
            }
        }
    }
}

#[derive(Serialize)]
struct Entry {
    id: i64,
    column: String,
    key: String,
    kid: String,
    error: String,
    noted: String,
    accepted: Option<String>,
    reason: Option<String>,
}

impl Entry {
    fn of(entry: &LedgerEntry) -> Self {
        Self {
            id: entry.id,
            column: format!("{}.{}", entry.table, entry.column),
            key: entry.key.to_string(),
            kid: entry.kid.clone(),
            error: entry.error.clone(),
            noted: entry.noted.clone(),
            accepted: entry.accepted.clone(),
            reason: entry.reason.clone(),
        }
    }
}

fn write(entries: &[Entry], out: &mut dyn Write) -> std::io::Result<()> {
    if entries.is_empty() {
        return writeln!(out, "the ledger is empty");
    }
    let heading = ["ledger", "column", "key", "sealed under", "error", "noted", ""].map(str::to_owned).to_vec();
    let row = |entry: &Entry| {
        let given_up = entry
            .accepted
            .as_ref()
            .map(|at| format!("given up {at}: {}", plain(entry.reason.as_deref().unwrap_or_default())));
        vec![
            entry.id.to_string(),
            entry.column.clone(),
            entry.key.clone(),
            entry.kid.clone(),
            entry.error.clone(),
            entry.noted.clone(),
            given_up.unwrap_or_else(|| "open".to_owned()),
        ]
    };
    let rows: Vec<_> = std::iter::once(heading).chain(entries.iter().map(row)).collect();
    table(out, &rows)
}
