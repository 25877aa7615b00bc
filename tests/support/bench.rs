//! A directory with a token, a configuration and a database, and the built program run in it.

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::thread;

use serde_json::Value;

use crate::softhsm::{self, SoftHsm};
use crate::sqlite::sqlite3;

/// A directory with a token, a configuration, and what the commands make there.
pub(crate) struct Bench {
    pub(crate) hsm: SoftHsm,
}

#[allow(
    dead_code,
    clippy::unwrap_used,
    clippy::missing_panics_doc,
    reason = "for tests; not every test uses every part"
)]
impl Bench {
    pub(crate) fn new() -> Self {
        Self::with("")
    }

    pub(crate) fn with(more: &str) -> Self {
        let bench = Self { hsm: SoftHsm::new() };
        bench.configure(&bench.hsm.site().uri(), more);
        bench
    }

    pub(crate) fn configure(&self, uri: &str, more: &str) {
        let text = format!(
            "environment = \"test\"\n[token]\nuri = \"{uri}\"\n[database]\nurl = \"sqlite://{}\"\n{more}\n\
             [[column]]\npreset = \"nr-llm\"\n\
             [[column]]\ntable = \"customer\"\ncolumn = \"iban\"\nkey = \"id\"\nidentifier = \"shop:customer:iban\"\n\
             row = \"id\"\n\
             [[column]]\ntable = \"customer\"\ncolumn = \"motto\"\nkey = \"id\"\nidentifier = \"shop:customer:motto\"\n",
            self.db().display()
        );
        fs::write(self.config(), text).unwrap();
        fs::set_permissions(self.config(), fs::Permissions::from_mode(0o600)).unwrap();
    }

    pub(crate) fn config(&self) -> PathBuf {
        self.hsm.site().dir().join("hardwrap.toml")
    }

    pub(crate) fn db(&self) -> PathBuf {
        self.hsm.site().dir().join("app.db")
    }

    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = self.hsm.site().command(env!("CARGO_BIN_EXE_hardwrap"));
        command.arg("--config").arg(self.config()).args(arguments).env_remove("HARDWRAP_TEST_DIR");
        command.current_dir(self.hsm.site().dir());
        command
    }

    pub(crate) fn run(&self, arguments: &[&str], input: &[u8]) -> Output {
        let mut child = self
            .command(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stdin = child.stdin.take().unwrap();
        thread::scope(|threads| {
            threads.spawn(move || {
                // A command that fails before it reads closes the pipe.
                let _ = stdin.write_all(input);
            });
            child.wait_with_output().unwrap()
        })
    }

    /// Runs what must succeed.
    pub(crate) fn ok(&self, arguments: &[&str], input: &[u8]) -> Vec<u8> {
        let done = self.run(arguments, input);
        assert!(done.status.success(), "{arguments:?}: {}", text(&done.stderr));
        done.stdout
    }

    /// Runs what must fail with `code`, on one clear line, with nothing on standard output.
    pub(crate) fn fails(&self, code: i32, arguments: &[&str], input: &[u8]) -> String {
        let done = self.run(arguments, input);
        let said = text(&done.stderr);
        assert_eq!(done.status.code(), Some(code), "{arguments:?}: {said}");
        assert!(done.stdout.is_empty(), "{arguments:?} printed {:?}", text(&done.stdout));
        assert!(said.starts_with("hardwrap: ") && said.lines().count() == 1, "{arguments:?}: {said}");
        said
    }

    pub(crate) fn json(&self, arguments: &[&str]) -> Value {
        let arguments = [&["--json"], arguments].concat();
        serde_json::from_slice(&self.ok(&arguments, b"")).unwrap()
    }

    pub(crate) fn sql(&self, sql: &str) -> String {
        sqlite3(&self.db(), sql)
    }

    /// The shop's table, before anything is sealed for it.
    pub(crate) fn make_customers(&self) {
        self.sql("CREATE TABLE IF NOT EXISTS customer (id INTEGER PRIMARY KEY, iban TEXT, motto TEXT)");
    }

    /// Edits the configuration.
    pub(crate) fn edit(&self, from: &str, to: &str) {
        let config = fs::read_to_string(self.config()).unwrap();
        assert!(config.contains(from), "{config}");
        fs::write(self.config(), config.replacen(from, to, 1)).unwrap();
    }

    /// Puts the fault module between us and the token.
    pub(crate) fn make_faulty(&self) {
        let site = self.hsm.site();
        self.configure(&site.faulty_uri(), "");
        site.set_faults("");
    }

    /// Runs with the fault module, by the rules in the file.
    pub(crate) fn faulty(&self, arguments: &[&str]) -> Command {
        let mut command = self.command(arguments);
        command.env("HARDWRAP_FAULT_MODULE", softhsm::softhsm_module());
        command.env("HARDWRAP_FAULT", self.hsm.site().dir().join("faults"));
        command
    }
}

/// What a command said.
pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
