use std::io::{self, Write};

use clap::Args;
use hardwrap::column::{AGENT_RUN, Column, Row};
use hardwrap::hsm::Verdict;
use hardwrap::keeper::Keeper;
use hardwrap::secret::Plaintext;
use hardwrap::store::{Key, SealedInPlace, Stored};
use zeroize::Zeroizing;

use super::count_demo_texts::{CountDemoTexts, count_in};
use crate::app::App;
use crate::failure::Failure;
use crate::text;

/// Watch agent runs being sealed: inserts three in clear, seals them, searches the raw database files (SQLite), opens them again
///
/// Works in the configured database, which needs the preset nr-llm and an environment that is not production. Its three
/// runs stay there, sealed; run again, they are replaced. Tries every way to get the key out of the token, too.
#[derive(Args)]
#[command(after_help = "\
Example:
  hardwrap demo
For a database that may be thrown away. Runs that are not the demo's are left alone.")]
pub(crate) struct Demo {}

impl Demo {
    pub(crate) fn run(self, app: &App, out: &mut dyn Write) -> Result<u8, Failure> {
        let config = app.config()?;
        if config.environment == "production" {
            return Err(Failure::usage("the demo puts runs into the database: set environment = \"demo\" to run it"));
        }
        if !config.has_preset() {
            return Err(Failure::usage("the demo needs the preset nr-llm: add [[column]] preset = \"nr-llm\""));
        }
        let keeper = Keeper::open(&config)?;
        let demo = Run { keeper: &keeper };
        demo.run(out)
    }
}

struct Run<'a> {
    keeper: &'a Keeper,
}

/// One value of the demo.
struct Value<'a> {
    column: &'a Column,
    key: Key,
    row: Row,
    clear: Zeroizing<Vec<u8>>,
}

impl Run<'_> {
    fn run(&self, out: &mut dyn Write) -> Result<u8, Failure> {
        let db = self.keeper.db();
        db.insert_demo_runs()?;
        let values = self.values()?;
        writeln!(out, "1. {} runs inserted in clear, as an application without hardwrap leaves them:", values.len())?;
        for value in &values {
            line(out, value, &value.clear)?;
        }
        let before = CountDemoTexts::ask(db.url())?;
        searched(out, before)?;

        for value in &values {
            match db.seal_cleartext(self.keeper.codec(), value.column, &value.key)? {
                SealedInPlace::Sealed => {}
                other => return Err(Failure::failed(format!("row {} was not sealed: {other:?}", value.key))),
            }
        }
        db.truncate_wal()?;
        writeln!(out, "2. sealed, each under a data key of its own that the token wrapped:")?;
        for value in &values {
            line(out, value, self.stored(value)?.as_bytes())?;
        }
        let after = CountDemoTexts::ask(db.url())?;
        searched(out, after)?;
        if before == Some(0) || after > Some(0) {
            return Err(Failure::failed("a prompt can be read in the raw database files"));
        }

        for value in &values {
            if self.open(value)?.expose() != value.clear.as_slice() {
                return Err(Failure::failed(format!("row {} did not open to what was sealed", value.key)));
            }
        }
        writeln!(out, "3. opened again: {} of {} equal, byte for byte", values.len(), values.len())?;

        writeln!(out, "4. moved, the sealed text of one run opens nowhere else:")?;
        if let [first, .., last] = values.as_slice() {
            let stored = self.stored(first)?;
            for (what, column, row) in
                [("another row", first.column, &last.row), ("another column", last.column, &first.row)]
            {
                match self.keeper.codec().open(&column.at(Some(row))?, &stored) {
                    Ok(_) => return Err(Failure::failed(format!("a sealed text opened in {what}"))),
                    Err(error) => writeln!(out, "   in {what}: {error}")?,
                }
            }
        }

        let key = self.keeper.keyring().report()?.keys.iter().find(|key| key.current).map(|key| key.fact.kid);
        let key = key.ok_or_else(|| Failure::failed("no key seals"))?;
        writeln!(out, "5. the master key {key} cannot leave the token; each way out was tried:")?;
        for probe in self.keeper.keyring().probe_custody(key)? {
            writeln!(out, "   {}: {}", probe.act, probe.verdict)?;
            if !matches!(probe.verdict, Verdict::Refused(_)) {
                return Err(Failure::failed(format!("the token did not refuse: {}", probe.act)));
            }
        }
        writeln!(out, "done.")?;
        Ok(0)
    }

    fn values(&self) -> Result<Vec<Value<'_>>, Failure> {
        let mut values = Vec::new();
        for column in self.keeper.register().columns().iter().filter(|column| column.table() == AGENT_RUN) {
            let mut after = None;
            loop {
                let page = self.keeper.db().page(column, after.as_ref(), 100)?;
                for row in &page {
                    let Some(value) = &row.value else { continue };
                    if count_in(value.bytes()) == 0 {
                        continue;
                    }
                    let Ok(Some(bound)) = &row.row else { continue };
                    values.push(Value {
                        column,
                        key: row.key.clone(),
                        row: bound.clone(),
                        clear: Zeroizing::new(value.bytes().to_vec()),
                    });
                }
                match page.into_iter().next_back() {
                    Some(last) => after = Some(last.key),
                    None => break,
                }
            }
        }
        Ok(values)
    }

    fn stored(&self, value: &Value<'_>) -> Result<String, Failure> {
        let text = self.row(value)?.value.ok_or_else(|| Failure::failed("a value is gone"))?;
        Ok(text.text()?.to_owned())
    }

    fn open(&self, value: &Value<'_>) -> Result<Plaintext, Failure> {
        let opened = self.row(value)?.open(self.keeper.codec(), value.column)?;
        opened.ok_or_else(|| Failure::failed("a value is gone"))
    }

    fn row(&self, value: &Value<'_>) -> Result<Stored, Failure> {
        let row = self.keeper.db().read_key(value.column, &value.key)?;
        row.ok_or_else(|| Failure::failed("a row is gone"))
    }
}

fn searched(out: &mut dyn Write, found: Option<usize>) -> io::Result<()> {
    match found {
        Some(found) => writeln!(out, "   in the raw database files: {found} prompts and arguments can be read"),
        None => writeln!(
            out,
            "   the raw files are the server's, and were not searched: its logs keep old content for a while"
        ),
    }
}

/// One value as it stands in the database, its beginning.
fn line(out: &mut dyn Write, value: &Value<'_>, stored: &[u8]) -> io::Result<()> {
    let start: String = std::str::from_utf8(stored).unwrap_or_default().chars().take(60).collect();
    let row = text::plain(value.row.as_str());
    writeln!(out, "   {} of {row}: {}…", value.column.name(), text::plain(&start))
}
