use std::io::Write;

use clap::{Args, value_parser};
use hardwrap::column::Column;
use hardwrap::envelope::Marker;
use hardwrap::keeper::Keeper;
use hardwrap::provider::ProviderError;
use hardwrap::store::{self, Stored};
use hardwrap::{codec, hsm};
use serde::Serialize;

use crate::app::App;
use crate::failure::Failure;
use crate::text::plain;

/// Open values and print none: says how many opened, and names each that did not
///
/// Changes nothing. Exits 1 where a value did not open, or a row could not be reached.
#[derive(Args)]
#[command(after_help = "\
Examples:
  hardwrap verify                                   100 values of each column, taken at random
  hardwrap verify --all --column customer.iban      every row
Rejected says that a value was altered, or belongs to another row or column.")]
pub(crate) struct Verify {
    /// Only this column
    #[arg(long, value_name = "TABLE.COLUMN")]
    column: Option<String>,
    /// Open this many rows of each column, taken at random
    #[arg(long, value_name = "N", default_value_t = 100, conflicts_with = "all", value_parser = value_parser!(u32).range(1..))]
    sample: u32,
    /// Open every row
    #[arg(long)]
    all: bool,
}

impl Verify {
    pub(crate) fn run(self, app: &App, out: &mut dyn Write) -> Result<u8, Failure> {
        let keeper = app.keeper()?;
        let wanted: Vec<&Column> = match &self.column {
            Some(name) => vec![keeper.register().find(name)?],
            None => keeper.register().columns().iter().collect(),
        };
        let mut reports = Vec::new();
        for (column, facts) in keeper.columns().filter(|(column, _)| wanted.contains(column)) {
            reports.push(match facts.usable() {
                Ok(()) => self.verify(&keeper, column)?,
                Err(fault) => Verified { fault: Some(fault.to_string()), ..self.nothing_yet(column) },
            });
        }
        app.report(out, u8::from(!reports.iter().all(Verified::is_good)), &reports, |out| {
            for report in &reports {
                report.write(out)?;
            }
            Ok(())
        })
    }

    fn nothing_yet(&self, column: &Column) -> Verified {
        Verified { column: column.to_string(), all: self.all, ..Verified::default() }
    }

    fn verify(&self, keeper: &Keeper, column: &Column) -> Result<Verified, Failure> {
        let mut report = self.nothing_yet(column);
        let before = keeper.db().count(column)?;
        report.keyless = before.keyless;
        if !self.all {
            for row in keeper.db().sample(column, self.sample)? {
                report.add(keeper, column, &row)?;
            }
            return Ok(report);
        }
        let mut after = None;
        loop {
            let page = keeper.db().page(column, after.as_ref(), PAGE)?;
            for row in &page {
                report.add(keeper, column, row)?;
            }
            match page.into_iter().next_back() {
                Some(last) => after = Some(last.key),
                None => break,
            }
        }
        // Others may insert and delete meanwhile: only what was there before and after was surely passed over.
        let after = keeper.db().count(column)?;
        let there = [&before, &after].map(|counts| counts.total - counts.keyless);
        report.missed = there[0].min(there[1]).saturating_sub(report.rows);
        report.keyless = after.keyless;
        Ok(report)
    }
}

#[derive(Default, Serialize)]
struct Verified {
    column: String,
    all: bool,
    rows: u64,
    opened: u64,
    cleartext: u64,
    empty: u64,
    null: u64,
    /// Rows whose key is NULL: no walk reaches them.
    keyless: u64,
    /// Rows that are there, have a key, and were not met all the same.
    missed: u64,
    bad: Vec<Bad>,
    fault: Option<String>,
}

#[derive(Serialize)]
struct Bad {
    key: String,
    error: &'static str,
    detail: String,
}

impl Verified {
    fn is_good(&self) -> bool {
        self.fault.is_none() && self.bad.is_empty() && self.keyless == 0 && self.missed == 0
    }

    /// Opens one row. Keys or a database out of reach end the command: they say nothing of the row.
    fn add(&mut self, keeper: &Keeper, column: &Column, row: &Stored) -> Result<(), Failure> {
        self.rows += 1;
        let marker = row.value.as_ref().map(|value| value.marker());
        match row.open(keeper.codec(), column) {
            Ok(None) => self.null += 1,
            Ok(Some(_)) => match marker {
                Some(Ok(Marker::Empty)) => self.empty += 1,
                Some(Ok(Marker::None)) => self.cleartext += 1,
                _ => self.opened += 1,
            },
            Err(store::Error::Unavailable(source)) => return Err(store::Error::Unavailable(source).into()),
            Err(store::Error::Codec(codec::Error::Unavailable(ProviderError::Unavailable(source))))
                if matches!(source.downcast_ref(), Some(hsm::Error::Asleep(_))) =>
            {
                let (key, error) = (row.key.to_string(), "Asleep");
                self.bad.push(Bad { key, error, detail: source.to_string() });
            }
            Err(store::Error::Codec(codec::Error::Unavailable(source))) => {
                return Err(codec::Error::Unavailable(source).into());
            }
            Err(error) => self.bad.push(Bad {
                key: row.key.to_string(),
                error: match &error {
                    store::Error::Codec(error) => error.kind(),
                    store::Error::BadRow(_) => "BadRow",
                    store::Error::NotText => "NotText",
                    _ => "Refused",
                },
                detail: error.to_string(),
            }),
        }
        Ok(())
    }

    fn write(&self, out: &mut dyn Write) -> std::io::Result<()> {
        if let Some(fault) = &self.fault {
            return writeln!(out, "{}: NOT VERIFIED: {}", plain(&self.column), plain(fault));
        }
        let unread = self.keyless + self.missed;
        let which = match unread {
            _ if !self.all => format!("a sample of {}", self.rows),
            0 => format!("all {}", self.rows),
            _ => format!("ONLY {} of {}", self.rows, self.rows + unread),
        };
        write!(out, "{}: {which} rows: {} opened", plain(&self.column), self.opened)?;
        let others = [(self.cleartext, "in cleartext"), (self.empty, "empty"), (self.null, "NULL")];
        for (count, what) in others.into_iter().filter(|(count, _)| *count > 0) {
            write!(out, ", {count} {what}")?;
        }
        match self.bad.len() {
            0 => writeln!(out)?,
            bad => writeln!(out, ", {bad} BAD")?,
        }
        for bad in &self.bad {
            writeln!(out, "  key {}: {}: {}", plain(&bad.key), bad.error, plain(&bad.detail))?;
        }
        if self.keyless > 0 {
            writeln!(out, "  {} rows have no key (NULL) and cannot be opened: give them one", self.keyless)?;
        }
        if self.missed > 0 {
            writeln!(out, "  {} rows have a key and were not met", self.missed)?;
        }
        Ok(())
    }
}

const PAGE: u32 = 200;
