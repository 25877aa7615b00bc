use std::io::{self, Write};

use clap::Args;

use super::open::Whose;
use crate::app::App;
use crate::failure::Failure;
use crate::text;

/// Seal a value: reads its bytes on standard input, writes the sealed text on standard output
///
/// Nothing is added to the text, and nothing is stored: that is for the application to do, in the row that was named.
/// An empty value stays empty. Changes nothing in the database.
#[derive(Args)]
#[command(after_help = "\
Example:
  printf %s DE02120300000000202051 | hardwrap seal --column customer.iban --row 7
The value opens in this column and row, and nowhere else. A newline at its end is part of it: echo adds one.")]
pub(crate) struct Seal {
    #[command(flatten)]
    whose: Whose,
}

impl Seal {
    pub(crate) fn run(self, app: &App, out: &mut dyn Write) -> Result<u8, Failure> {
        let keeper = app.keeper()?;
        let row = self.whose.row()?;
        // Asked before anything is read: a wrong name should not cost the input.
        let place = keeper.at(&self.whose.column, row.as_ref())?;
        let value = text::read_secret(&mut io::stdin().lock())?;
        out.write_all(keeper.codec().seal(&place, &value)?.as_bytes())?;
        Ok(0)
    }
}
