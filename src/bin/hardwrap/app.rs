//! What every command is given: the global flags, and the configuration they lead to.

use std::collections::BTreeMap;
use std::env;
use std::io::{self, Write};
use std::path::PathBuf;

use clap::Args;
use hardwrap::hsm::PinSource;
use hardwrap::keeper::{Config, ConfigError, Keeper};
use serde::Serialize;

use crate::failure::Failure;
use crate::text;

/// Flags of every command.
#[derive(Args)]
pub(crate) struct Global {
    /// The configuration file [default: $HARDWRAP_CONFIG, else ./hardwrap.toml]
    #[arg(long, global = true, value_name = "FILE", help_heading = EVERYWHERE)]
    config: Option<PathBuf>,
    /// Ask for the PIN on the terminal, whatever the configuration says
    #[arg(long, global = true, help_heading = EVERYWHERE)]
    ask_pin: bool,
    /// Print JSON instead of text, where a command reports
    #[arg(long, global = true, help_heading = EVERYWHERE)]
    json: bool,
}

/// What every command is given.
pub(crate) struct App {
    global: Global,
}

impl App {
    pub(crate) fn new(global: Global) -> Self {
        Self { global }
    }

    /// Whether a configuration is named, or stands in the working directory.
    pub(crate) fn is_configured(&self) -> bool {
        self.global.config.is_some() || env::var_os("HARDWRAP_CONFIG").is_some() || PathBuf::from(FILE).exists()
    }

    /// Reads the configuration.
    pub(crate) fn config(&self) -> Result<Config, Failure> {
        let config = self.found_config()??;
        if let Some(warning) = config.token.pin_source.as_ref().and_then(PinSource::warning) {
            // Nobody to warn is no reason to stop.
            let _ = writeln!(io::stderr(), "hardwrap: warning: {}", text::plain(&warning));
        }
        Ok(config)
    }

    /// Reads the configuration, for who wants to know what is wrong with it.
    pub(crate) fn found_config(&self) -> Result<Result<Config, ConfigError>, Failure> {
        let path = match (&self.global.config, env::var_os("HARDWRAP_CONFIG")) {
            (Some(path), _) => path.clone(),
            (None, Some(path)) => path.into(),
            (None, None) => {
                let path = PathBuf::from(FILE);
                if !path.exists() {
                    return Err(Failure::usage(
                        "no configuration: make ./hardwrap.toml (the README shows one), or give --config FILE",
                    ));
                }
                path
            }
        };
        let mut variables = BTreeMap::new();
        for (name, value) in env::vars_os() {
            let Some(name) = name.to_str().filter(|name| name.starts_with("HARDWRAP_")) else { continue };
            let value =
                value.into_string().map_err(|_| Failure::usage(format!("variable {name} is not UTF-8 text")))?;
            variables.insert(name.to_owned(), value);
        }
        let mut config = Config::read(&path, &variables);
        if let (Ok(config), true) = (&mut config, self.global.ask_pin) {
            config.token.pin_source = Some(PinSource::Prompt);
        }
        Ok(config)
    }

    /// Opens everything the configuration names.
    pub(crate) fn keeper(&self) -> Result<Keeper, Failure> {
        Ok(Keeper::open(&self.config()?)?)
    }

    /// Prints `report` as JSON where that was asked for, else as text. Its verdict, an exit code, stands whether or not
    /// somebody reads it to its end.
    pub(crate) fn report(
        &self,
        out: &mut dyn Write,
        verdict: u8,
        report: &impl Serialize,
        as_text: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> Result<u8, Failure> {
        match self.print(out, report, as_text) {
            Ok(()) => Ok(verdict),
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Err(Failure::unread(verdict)),
            Err(error) => Err(error.into()),
        }
    }

    /// Prints `record` as JSON where that was asked for, else as text.
    pub(crate) fn print(
        &self,
        out: &mut dyn Write,
        record: &impl Serialize,
        as_text: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> io::Result<()> {
        if self.global.json {
            serde_json::to_writer_pretty(&mut *out, record)?;
            writeln!(out)?;
        } else {
            as_text(out)?;
        }
        out.flush()
    }
}

const EVERYWHERE: &str = "Options of every command";

/// The configuration, where none is named.
const FILE: &str = "hardwrap.toml";
