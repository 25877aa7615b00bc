use std::fs;
use std::io::Write;
use std::path::PathBuf;

use clap::{Args, Command};

use crate::failure::Failure;

/// Write the manual pages, one for each command
#[derive(Args)]
#[command(after_help = "\
Example:
  hardwrap man /usr/local/share/man/man1")]
pub(crate) struct Man {
    /// The directory; it is made where it is missing
    #[arg(value_name = "DIR")]
    directory: PathBuf,
}

impl Man {
    pub(crate) fn run(self, command: Command, out: &mut dyn Write) -> Result<u8, Failure> {
        let failed = |error| Failure::failed(format!("cannot write to {}: {error}", self.directory.display()));
        fs::create_dir_all(&self.directory).map_err(failed)?;
        clap_mangen::generate_to(command, &self.directory).map_err(failed)?;
        writeln!(out, "manual pages in {}: hardwrap.1, and one for each command", self.directory.display())?;
        Ok(0)
    }
}
