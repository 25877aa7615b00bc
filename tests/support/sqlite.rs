//! Debian's own `sqlite3`: what a test does to a database behind our back.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::thread;

/// Runs SQL on a database file, which is made if it is not there, and gives what was printed.
#[allow(clippy::missing_panics_doc, dead_code, reason = "for tests")]
pub(crate) fn sqlite3(file: &Path, sql: &str) -> String {
    let done = try_sqlite3(file, sql);
    assert!(done.status.success() && done.stderr.is_empty(), "{sql}: {}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8_lossy(&done.stdout).into_owned()
}

/// The same for what may fail: the first error ends it.
#[allow(clippy::unwrap_used, clippy::missing_panics_doc, dead_code, reason = "for tests")]
pub(crate) fn try_sqlite3(file: &Path, sql: &str) -> Output {
    let mut child = Command::new("sqlite3")
        .args(["-bail", "-cmd", ".timeout 10000"])
        .arg(file)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("sqlite3 runs: install sqlite3");
    let mut stdin = child.stdin.take().unwrap();
    thread::scope(|threads| {
        threads.spawn(move || {
            // One that fails before it reads closes the pipe.
            let _ = stdin.write_all(sql.as_bytes());
        });
        child.wait_with_output().unwrap()
    })
}
