use std::io::Write;

use clap::Args;
use hardwrap::column::{Cleartext, Column};
use hardwrap::keeper::Keeper;
use hardwrap::store::{ColumnFact, ColumnFacts};
use serde::Serialize;

use crate::app::App;
use crate::failure::Failure;
use crate::text;

/// List the register: every sealed column, and what the schema says of it
///
/// Asks the token nothing and changes nothing. Exits 1 where a column cannot be used as it is registered.
#[derive(Args)]
#[command(after_help = "\
Example:
  hardwrap columns
The last cell says what is wrong with a column; what is right has none.")]
pub(crate) struct Columns {}

impl Columns {
    pub(crate) fn run(self, app: &App, out: &mut dyn Write) -> Result<u8, Failure> {
        let keeper = Keeper::unchecked(&app.config()?)?;
        let columns: Vec<Listed> = keeper.columns().map(|(column, facts)| Listed::of(column, facts)).collect();
        let verdict = u8::from(columns.iter().any(|column| column.fault.is_some()));
        app.report(out, verdict, &columns, |out| {
            if columns.is_empty() {
                return writeln!(out, "no columns: add a [[column]] to the configuration");
            }
            let heading =
                ["column", "identifier", "key", "row", "cleartext", "declared", "holds", ""].map(str::to_owned);
            let row = |one: &Listed| {
                vec![
                    one.column.clone(),
                    one.identifier.clone(),
                    one.key.clone(),
                    one.row.clone().unwrap_or_else(|| "-".to_owned()),
                    one.cleartext.to_owned(),
                    one.declared.clone().unwrap_or_else(|| "-".to_owned()),
                    one.holds.map_or_else(|| "unlimited".to_owned(), |bytes| format!("{bytes} bytes")),
                    one.fault.clone().unwrap_or_default(),
                ]
            };
            let rows: Vec<_> = std::iter::once(heading.to_vec()).chain(columns.iter().map(row)).collect();
            text::table(out, &rows)
        })
    }
}

#[derive(Serialize)]
struct Listed {
    column: String,
    identifier: String,
    key: String,
    row: Option<String>,
    cleartext: &'static str,
    declared: Option<String>,
    holds: Option<u64>,
    fault: Option<String>,
}

impl Listed {
    fn of(column: &Column, facts: &ColumnFacts) -> Self {
        Self {
            column: column.to_string(),
            identifier: column.identifier().to_owned(),
            key: column.key().to_owned(),
            row: column.row().map(str::to_owned),
            cleartext: policy(column),
            declared: match &facts.column {
                ColumnFact::Declared(declared) | ColumnFact::Generated(declared) => Some(declared.clone()),
                ColumnFact::Missing => None,
            },
            holds: column.capacity().0,
            fault: facts.usable().err().map(|fault| fault.to_string()),
        }
    }
}

/// What a column does with cleartext, as the configuration says it.
pub(super) fn policy(column: &Column) -> &'static str {
    match column.policy() {
        Cleartext::Accept => "accept",
        Cleartext::Refuse => "refuse",
    }
}
