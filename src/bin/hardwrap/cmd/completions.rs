use std::io::Write;

use clap::{Args, Command};
use clap_complete::{Generator, Shell};

use crate::failure::Failure;

/// Print a completion script for a shell
#[derive(Args)]
#[command(after_help = "\
Example:
  hardwrap completions bash > /etc/bash_completion.d/hardwrap")]
pub(crate) struct Completions {
    /// bash, zsh, fish, elvish or powershell
    shell: Shell,
}

impl Completions {
    pub(crate) fn run(self, mut command: Command, out: &mut dyn Write) -> Result<u8, Failure> {
        command.set_bin_name("hardwrap");
        command.build();
        self.shell.try_generate(&command, out)?;
        Ok(0)
    }
}
