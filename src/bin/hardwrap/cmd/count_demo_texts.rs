use std::ffi::OsString;
use std::fs;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use clap::Args;
use hardwrap::store::{DEMO_SECRET, DatabaseUrl};

use crate::failure::Failure;

/// Print how often a text of the demo stands in these files; those that are not there hold none
///
/// A process of its own: closing a file gives back every lock that its process holds on it (POSIX), so a program that
/// has a SQLite database open may not read the database's files beside SQLite.
#[derive(Args)]
pub(crate) struct CountDemoTexts {
    #[arg(required = true)]
    files: Vec<PathBuf>,
}

impl CountDemoTexts {
    pub(crate) fn run(self, out: &mut dyn Write) -> Result<u8, Failure> {
        let mut found = 0;
        for file in &self.files {
            match fs::read(file) {
                Ok(bytes) => found += count_in(&bytes),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(Failure::failed(format!("cannot read {}: {error}", file.display()))),
            }
        }
        writeln!(out, "{found}")?;
        Ok(0)
    }

    /// Asks another process of this program about the files of a database as they lie on disk, write-ahead log included.
    /// None where a server keeps them.
    pub(super) fn ask(database: &DatabaseUrl) -> Result<Option<usize>, Failure> {
        let Some(path) = database.path() else { return Ok(None) };
        let files = ["", "-wal", "-shm", "-journal"].map(|suffix| {
            let mut name = OsString::from(path);
            name.push(suffix);
            name
        });
        let asked = Command::new(std::env::current_exe()?)
            .args(["count-demo-texts", "--"])
            .args(files)
            .stdin(Stdio::null())
            .stderr(Stdio::inherit())
            .output()?;
        let said = String::from_utf8_lossy(&asked.stdout);
        match said.trim_end().parse() {
            Ok(found) if asked.status.success() => Ok(Some(found)),
            _ => Err(Failure::failed(format!("the database files were not searched ({})", asked.status))),
        }
    }
}

/// How often a text of the demo stands in `bytes`.
pub(super) fn count_in(bytes: &[u8]) -> usize {
    bytes.windows(DEMO_SECRET.len()).filter(|window| *window == DEMO_SECRET.as_bytes()).count()
}
