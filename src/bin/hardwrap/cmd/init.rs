use std::io::Write;

use clap::Args;
use hardwrap::hsm::{Choice, Made};
use hardwrap::keeper::Keeper;
use hardwrap::store::{self, BadUrl};
use jiff::Timestamp;
use serde::Serialize;

use super::key::Listed;
use crate::app::App;
use crate::failure::Failure;
use crate::text::plain;

/// Make the first key and its record on the token, and our tables in the database
///
/// Run again, it upgrades our tables and changes nothing else. A first key is made only where the database holds no
/// sealed values. What it prints is a record of the ceremony, to be printed and signed by those who were there.
#[derive(Args)]
#[command(after_help = "\
Examples:
  hardwrap init
  hardwrap init --print-sql      the tables, for whoever has to allow them; needs no configuration
Changes the token (key and record, where missing) and the database (hardwrap_* tables; those of the preset nr-llm).")]
pub(crate) struct Init {
    /// How the key is to wrap: auto, aes-kw, aes-gcm, or one route (aes-kw-encrypt, aes-gcm-caller-iv, aes-kw-wrap,
    /// aes-gcm-token-iv)
    #[arg(long, value_name = "M", default_value = "auto")]
    mechanism: Choice,
    /// Print the SQL that makes the tables, and do nothing: for the configured database, or for sqlite, postgres or mysql
    #[arg(long, value_name = "DATABASE", num_args = 0..=1, require_equals = true, default_missing_value = "")]
    print_sql: Option<String>,
}

impl Init {
    pub(crate) fn run(self, app: &App, out: &mut dyn Write) -> Result<u8, Failure> {
        if let Some(scheme) = &self.print_sql {
            let url = match scheme.as_str() {
                "" if app.is_configured() => app.config()?.database,
                "" => "sqlite://app.db".parse().map_err(|bad: BadUrl| Failure::usage(bad.to_string()))?,
                scheme => {
                    format!("{scheme}://app/app").parse().map_err(|bad: BadUrl| Failure::usage(bad.to_string()))?
                }
            };
            write!(out, "{}", store::schema_sql(&url))?;
            return Ok(0);
        }
        let config = app.config()?;
        let (keeper, done) = Keeper::init(&config, self.mechanism)?;
        let report = keeper.keyring().report()?;
        let (did, kid) = match &done.made {
            Made::Key(kid, _) => ("made", kid),
            Made::Finished(kid, _) => ("finished: a crash had left it recorded and not yet labelled", kid),
            Made::Nothing(kid, _) => ("was there already, and works", kid),
        };
        let key = report.keys.iter().find(|key| key.fact.kid == *kid);
        let key = key.map(Listed::of).ok_or_else(|| Failure::failed("the key is not found again on the token"))?;
        let ceremony = Ceremony {
            environment: config.environment.clone(),
            time: Timestamp::now().round(jiff::Unit::Second).unwrap_or_default().to_string(),
            token_label: report.token.label.clone(),
            token_serial: report.token.serial.clone(),
            token_model: report.token.model.clone(),
            module: config.token.uri.module.display().to_string(),
            keyring: config.token.keyring.clone(),
            key,
            key_did: did,
            database: keeper.db().url().to_string(),
            database_identity: done.identity,
            tables_changed: done.tables || done.preset,
        };
        app.print(out, &ceremony, |out| ceremony.write(out))?;
        Ok(0)
    }
}

#[derive(Serialize)]
struct Ceremony {
    environment: String,
    time: String,
    token_label: String,
    token_serial: String,
    token_model: String,
    module: String,
    keyring: String,
    key: Listed,
    key_did: &'static str,
    database: String,
    database_identity: String,
    tables_changed: bool,
}

impl Ceremony {
    fn write(&self, out: &mut dyn Write) -> std::io::Result<()> {
        writeln!(out, "hardwrap key ceremony, {} ({})", self.time, plain(&self.environment))?;
        writeln!(out)?;
        let [label, serial, model] = [&self.token_label, &self.token_serial, &self.token_model].map(|text| plain(text));
        writeln!(out, "  token      {label} (serial {serial}, {model})")?;
        writeln!(out, "  module     {}", plain(&self.module))?;
        writeln!(out, "  keyring    {}", self.keyring)?;
        writeln!(out, "  key        {}: {}", self.key.kid, self.key_did)?;
        writeln!(out, "  wraps by   {} ({})", self.key.alg, self.key.route)?;
        writeln!(
            out,
            "  checked    AES-256, private, sensitive, never extractable, made on the token; canary unwraps"
        )?;
        writeln!(out, "  database   {} (identity {})", plain(&self.database), plain(&self.database_identity))?;
        writeln!(out, "  tables     {}", if self.tables_changed { "made or upgraded" } else { "up to date" })?;
        writeln!(out)?;
        writeln!(out, "  present    ______________________________   ______________________________")
    }
}
