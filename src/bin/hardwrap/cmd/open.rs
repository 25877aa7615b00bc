use std::io::{self, Write};

use clap::Args;
use hardwrap::column::Row;
use hardwrap::envelope::Marker;
use hardwrap::store;

use crate::app::App;
use crate::failure::Failure;
use crate::text;

/// Open a sealed text: reads it on standard input, or from the database by --key, writes the value's bytes on standard
/// output
///
/// Prints a secret. Nothing is added to the value. One newline after a sealed text is not part of it. Changes nothing.
#[derive(Args)]
#[command(after_help = "\
Examples:
  hardwrap open --column customer.iban --key 7              the row whose key column holds 7
  hardwrap open --column customer.iban --row 7 < sealed     a text that was taken elsewhere
Exit 4 says that token or database is out of reach, and nothing of the value; exit 1 that it does not open there.")]
pub(crate) struct Open {
    #[command(flatten)]
    whose: Whose,
    /// Read the text from the database: the row whose key column holds this
    #[arg(long, value_name = "KEY", conflicts_with = "row")]
    key: Option<String>,
}

/// Where a value stands.
#[derive(Args)]
pub(super) struct Whose {
    /// The registered column
    #[arg(long, value_name = "TABLE.COLUMN")]
    pub(super) column: String,
    /// The value of the row column, where the column is bound to rows
    #[arg(long, value_name = "VALUE")]
    row: Option<String>,
}

impl Whose {
    pub(super) fn row(&self) -> Result<Option<Row>, Failure> {
        self.row.as_deref().map(Row::try_from).transpose().map_err(|error| Failure::usage(format!("--row: {error}")))
    }
}

impl Open {
    pub(crate) fn run(self, app: &App, out: &mut dyn Write) -> Result<u8, Failure> {
        let keeper = app.keeper()?;
        if let Some(key) = &self.key {
            let column = keeper.register().find(&self.whose.column)?;
            let stored = keeper.db().read(column, key)?;
            let stored = stored.ok_or_else(|| Failure::failed(format!("{column}: no row with that key")))?;
            let value = stored.open(keeper.codec(), column)?;
            let value = value.ok_or_else(|| Failure::failed(format!("{column}: the row holds no value (NULL)")))?;
            out.write_all(value.expose())?;
            return Ok(0);
        }
        let row = self.whose.row()?;
        // Asked before anything is read: a wrong name should not cost the input.
        let place = keeper.at(&self.whose.column, row.as_ref())?;
        let read = text::read_secret(&mut io::stdin().lock())?;
        let stored = std::str::from_utf8(&read).map_err(|_| store::Error::NotText)?;
        let stored = match Marker::of(stored) {
            Marker::None => stored,
            _ => stored.strip_suffix('\n').unwrap_or(stored),
        };
        out.write_all(keeper.codec().open(&place, stored)?.expose())?;
        Ok(0)
    }
}
