//! A private SoftHSM2 token for one test. `C_Initialize`, login and `SOFTHSM2_CONF` are process-wide, so a test that
//! uses a token runs alone in a child process.

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

/// The user PIN of every test token; long enough to be searched for.
pub(crate) const PIN: &str = "pin-7d1f0c55e2";
const SO_PIN: &str = "so-pin-4411";

/// A directory with a token in it. It goes when its guard goes, also when the test fails.
pub(crate) struct SoftHsm {
    dir: TempDir,
}

/// What a test sees of its token.
pub(crate) struct Site {
    dir: PathBuf,
}

#[allow(dead_code, clippy::unwrap_used, clippy::print_stdout, reason = "for tests; not every test uses every part")]
impl SoftHsm {
    /// Makes a token labelled `hardwrap-test`.
    pub(crate) fn new() -> Self {
        let hsm = Self { dir: tempfile::tempdir().unwrap() };
        let site = hsm.site();
        fs::create_dir(site.tokens()).unwrap();
        fs::write(
            site.conf(),
            format!(
                "directories.tokendir = {}\nobjectstore.backend = file\nlog.level = ERROR\nslots.removable = false\n",
                site.tokens().display()
            ),
        )
        .unwrap();
        fs::write(site.pin_file(), format!("{PIN}\n")).unwrap();
        Command::new("chmod").arg("600").arg(site.pin_file()).status().unwrap();
        site.add_token("hardwrap-test");
        hsm
    }

    pub(crate) fn site(&self) -> Site {
        Site { dir: self.dir.path().to_owned() }
    }

    /// Runs `body` in a child that is the test `name` alone, with a token directory of its own.
    pub(crate) fn isolated(name: &str, body: impl FnOnce(&Site)) {
        Self::isolated_with(name, &[], body);
    }

    /// The same with the fault module between us and the token, which reads its rules from [`Site::set_faults`].
    pub(crate) fn faulty(name: &str, body: impl FnOnce(&Site)) {
        Self::isolated_with(name, &[("HARDWRAP_FAULT_MODULE", softhsm_module().as_os_str())], body);
    }

    fn isolated_with(name: &str, variables: &[(&str, &OsStr)], body: impl FnOnce(&Site)) {
        if let Some(dir) = env::var_os("HARDWRAP_TEST_DIR") {
            return body(&Site { dir: dir.into() });
        }
        let hsm = Self::new();
        let mut child = hsm.site().command(env::current_exe().unwrap());
        child.args(["--exact", name, "--nocapture"]).env("HARDWRAP_TEST_DIR", hsm.dir.path());
        child.env("HARDWRAP_FAULT", hsm.site().faults_file()).envs(variables.iter().copied());
        let run = child.output().unwrap();
        let said = String::from_utf8_lossy(&run.stdout);
        let errors = String::from_utf8_lossy(&run.stderr);
        // A misspelt name would pass nothing.
        assert!(run.status.success() && said.contains("1 passed"), "{}\n{said}\n{errors}", run.status);
        // For `--nocapture`: what a test measured.
        print!("{said}");
    }
}

#[allow(dead_code, clippy::unwrap_used, reason = "for tests; not every test uses every part")]
impl Site {
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    pub(crate) fn tokens(&self) -> PathBuf {
        self.dir.join("tokens")
    }

    pub(crate) fn conf(&self) -> PathBuf {
        self.dir.join("softhsm2.conf")
    }

    pub(crate) fn pin_file(&self) -> PathBuf {
        self.dir.join("pin")
    }

    fn faults_file(&self) -> PathBuf {
        self.dir.join("faults")
    }

    /// A program that sees this token.
    pub(crate) fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        command.env("SOFTHSM2_CONF", self.conf());
        command
    }

    /// Makes one more token.
    pub(crate) fn add_token(&self, label: &str) {
        let made = self
            .command("softhsm2-util")
            .args(["--init-token", "--free", "--label", label, "--pin", PIN, "--so-pin", SO_PIN])
            .output()
            .expect("softhsm2-util runs: install softhsm2");
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    }

    /// The token's address, PIN from the file.
    pub(crate) fn uri(&self) -> String {
        self.uri_with(&softhsm_module(), &format!("file:{}", self.pin_file().display()))
    }

    /// The token's address through the fault module.
    pub(crate) fn faulty_uri(&self) -> String {
        self.uri_with(&fault_module(), &format!("file:{}", self.pin_file().display()))
    }

    pub(crate) fn uri_with(&self, module: &Path, pin_source: &str) -> String {
        format!("pkcs11:token=hardwrap-test?module-path={}&pin-source={pin_source}", module.display())
    }

    /// Rules for the fault module, from the next call on.
    pub(crate) fn set_faults(&self, rules: &str) {
        // Renamed into place, so that no call reads half of it.
        let new = self.dir.join("faults.new");
        fs::write(&new, rules).unwrap();
        fs::rename(new, self.faults_file()).unwrap();
    }

    /// Takes the token away, as pulling a cable does.
    pub(crate) fn take_away(&self) {
        fs::rename(self.tokens(), self.dir.join("tokens.away")).unwrap();
    }

    /// Puts it back.
    pub(crate) fn put_back(&self) {
        fs::rename(self.dir.join("tokens.away"), self.tokens()).unwrap();
    }
}

/// SoftHSM2's module, where distributions put it.
#[allow(dead_code, reason = "not every test uses it")]
pub(crate) fn softhsm_module() -> PathBuf {
    ["/usr/lib/softhsm/libsofthsm2.so", "/usr/lib/x86_64-linux-gnu/softhsm/libsofthsm2.so", "/usr/lib64/libsofthsm2.so"]
        .into_iter()
        .map(PathBuf::from)
        .find(|path| path.exists())
        .expect("libsofthsm2.so is there: install softhsm2")
}

/// The fault module, which `cargo test` builds as an example.
#[allow(dead_code, clippy::unwrap_used, reason = "not every test uses it")]
pub(crate) fn fault_module() -> PathBuf {
    let profile = env::current_exe().unwrap().parent().unwrap().parent().unwrap().to_owned();
    let module = profile.join("examples/libhardwrap_fault.so");
    assert!(module.exists(), "{} is missing: cargo build --examples", module.display());
    module
}
