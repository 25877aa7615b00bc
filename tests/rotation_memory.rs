//! A rotation needs less than 64 MiB, however many rows there are: on every route, online and atomic. 50,000 rows, and
//! with HARDWRAP_LONG a million.
#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout, reason = "tests")]

#[path = "support/bench.rs"]
mod bench;
#[path = "support/softhsm.rs"]
mod softhsm;
#[path = "support/sqlite.rs"]
mod sqlite;

use std::env;
use std::fs;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::Duration;

use bench::{Bench, text};
use hardwrap::hsm::Route;

/// KiB.
const MOST: u64 = 64 * 1024;

fn rows() -> u64 {
    if env::var_os("HARDWRAP_LONG").is_some() { 1_000_000 } else { 50_000 }
}

/// The most memory a process had until now: KiB. None once it has ended.
fn peak(child: &Child) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{}/status", child.id())).ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

fn rotates(route: Route, modes: &[&str]) {
    let bench = Bench::new();
    bench.make_customers();
    // SoftHSM2 has two of the routes; the fault module makes the others of them.
    let emulated = match route {
        Route::KwEncrypt => Some("kw-encrypt"),
        Route::GcmTokenIv => Some("token-iv random"),
        _ => None,
    };
    if let Some(rule) = emulated {
        bench.make_faulty();
        bench.hsm.site().set_faults(rule);
    }
    let run = |arguments: &[&str]| if emulated.is_some() { bench.faulty(arguments) } else { bench.command(arguments) };
    let ok = |mut command: Command| {
        let done = command.output().unwrap();
        assert!(done.status.success(), "{}", text(&done.stderr));
        text(&done.stdout)
    };
    ok(run(&["init", "--mechanism", route.name()]));
    bench.sql("INSERT INTO customer (id, motto) VALUES (1, 'carpe diem')");
    let mut seal = run(&["seal", "--column", "customer.motto"]);
    seal.stdin(fs::File::open(bench.hsm.site().pin_file()).unwrap());
    let sealed = ok(seal);
    bench.sql(&format!(
        "WITH RECURSIVE number (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM number WHERE n < {}) \
         INSERT OR REPLACE INTO customer (id, motto) SELECT n, '{sealed}' FROM number",
        rows()
    ));
    // What the fault module makes route 1 of costs 240 bytes of each object, of which there are two for each row.
    let emulation = if route == Route::KwEncrypt { 600 * rows() / 1000 } else { 0 };
    let watched = |arguments: &[&str]| {
        let (done, most) = watch(run(arguments));
        println!("{route} {arguments:?}: {} rows, {most} KiB at most", rows());
        assert!(most > 1024 && most < MOST + emulation, "{route} {arguments:?}: {most} KiB");
        done
    };
    watched(&["status"]);
    watched(&["rotate", "--dry-run"]);
    for mode in modes {
        let done = watched(&["--json", "rotate", mode]);
        let done: serde_json::Value = serde_json::from_slice(&done.stdout).unwrap();
        assert_eq!((&done["moved"], &done["proven"]), (&rows().into(), &true.into()));
    }
}

/// Runs it, and sees how much memory it had at most.
fn watch(mut command: Command) -> (Output, u64) {
    let child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut most = 0;
    while let Some(now) = peak(&child) {
        most = now;
        thread::sleep(Duration::from_millis(5));
    }
    let done = child.wait_with_output().unwrap();
    assert!(done.status.success());
    (done, most)
}

#[test]
fn aes_gcm_caller_iv() {
    rotates(Route::GcmCallerIv, &["--online", "--workers=2"]);
}

#[test]
fn aes_kw_wrap() {
    rotates(Route::KwWrap, &["--online", "--workers=2"]);
}

#[test]
fn aes_kw_encrypt() {
    rotates(Route::KwEncrypt, &["--online"]);
}

#[test]
fn aes_gcm_token_iv() {
    rotates(Route::GcmTokenIv, &["--online"]);
}
