//! The command line as its users meet it: good, bad, empty, huge, interrupted and repeated input.
#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout, reason = "tests")]

#[path = "support/bench.rs"]
mod bench;
#[path = "support/softhsm.rs"]
mod softhsm;
#[path = "support/sqlite.rs"]
mod sqlite;

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use bench::{Bench, text};
use hardwrap::column::Row;
use hardwrap::keeper::{self, Config, Keeper};
use hardwrap::store::{DatabaseUrl, Db};
use serde_json::Value;
use softhsm::{PIN, SoftHsm};

/// Waits until `done`, ten seconds at most.
fn wait_until(mut done: impl FnMut() -> bool) {
    let began = Instant::now();
    while !done() {
        assert!(began.elapsed() < Duration::from_secs(10), "it never came");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Runs with a standard output that nobody reads.
fn unread(mut command: Command, input: &[u8]) -> Output {
    let (reader, writer) = io::pipe().unwrap();
    drop(reader);
    let mut child = command.stdin(Stdio::piped()).stdout(writer).stderr(Stdio::piped()).spawn().unwrap();
    drop(command);
    let _ = child.stdin.take().unwrap().write_all(input);
    child.wait_with_output().unwrap()
}

const IBAN: [&str; 4] = ["--column", "customer.iban", "--row", "7"];
const MOTTO: [&str; 2] = ["--column", "customer.motto"];

fn with<'a>(command: &'a str, rest: &[&'a str]) -> Vec<&'a str> {
    [&[command], rest].concat()
}

#[test]
fn values_of_any_size_and_any_bytes_come_back() {
    let bench = Bench::new();
    bench.ok(&["init"], b"");
    bench.make_customers();
    let every_byte: Vec<u8> = (0..=255).collect();
    let values: [&[u8]; 8] = [
        b"",
        b"x",
        b"\n",
        b"\xff\xfe not text \0",
        &every_byte,
        b"hw1:0001020304050607:e30=.AAAA",
        &vec![0x61; 1 << 20],
        &vec![0x62; 12 << 20],
    ];
    for value in values {
        for place in [&IBAN[..], &MOTTO[..]] {
            let sealed = bench.ok(&with("seal", place), value);
            assert_eq!(sealed.is_empty(), value.is_empty(), "nothing of nothing");
            assert!(!sealed.ends_with(b"\n"));
            assert_eq!(bench.ok(&with("open", place), &sealed), value);
            // A file or a terminal adds a newline; one is not part of a sealed text.
            if !value.is_empty() {
                assert_eq!(bench.ok(&with("open", place), &[&sealed[..], b"\n"].concat()), value);
                bench.fails(1, &with("open", place), &[&sealed[..], b"\n\n"].concat());
            }
        }
    }
}

#[test]
fn a_value_opens_nowhere_else() {
    let bench = Bench::new();
    bench.ok(&["init"], b"");
    bench.make_customers();
    let sealed = bench.ok(&with("seal", &IBAN), b"DE02120300000000202051");
    for place in [&["--column", "customer.iban", "--row", "8"][..], &MOTTO] {
        let said = bench.fails(1, &with("open", place), &sealed);
        assert!(said.contains("failed authentication"), "{said}");
    }
    // Another keyring on the same token knows no such key.
    bench.configure(&bench.hsm.site().uri(), "");
    let other = Bench { hsm: SoftHsm::new() };
    other.configure(&other.hsm.site().uri(), "");
    other.ok(&["init"], b"");
    other.make_customers();
    let said = other.fails(1, &with("open", &IBAN), &sealed);
    assert!(said.contains("which the keyring does not hold"), "{said}");
}

#[test]
fn wrong_input_gets_one_line_and_code_one_or_two() {
    let bench = Bench::new();
    bench.ok(&["init"], b"");
    bench.make_customers();
    let sealed = bench.ok(&with("seal", &IBAN), b"x");
    for (code, arguments, input, what) in [
        (2, &["seal", "--column", "customer.nope"][..], &b"x"[..], "not registered"),
        (2, &["seal", "--column", "customer.iban"], b"x", "bound to rows"),
        (2, &["seal", "--column", "customer.motto", "--row", "7"], b"x", "not bound to rows"),
        (2, &["seal", "--column", "customer.iban", "--row", ""], b"x", "never empty"),
        (1, &["open", "--column", "customer.iban", "--row", "7"], b"plain", "not sealed"),
        (1, &["open", "--column", "customer.iban", "--row", "7"], b"\xff\xfe", "not UTF-8"),
        (1, &["open", "--column", "customer.iban", "--row", "7"], b"hw2:x", "unsupported"),
        (1, &["open", "--column", "customer.iban", "--row", "7"], b"hw1:", "malformed"),
        (1, &["open", "--column", "customer.iban", "--row", "7"], b"nrv1:e30=", "nr-vault"),
        (1, &["open", "--column", "customer.iban", "--row", "7"], &sealed[..300], "malformed"),
        (1, &["open", "--column", "customer.iban", "--key", "1"], b"", "no row with that key"),
        (1, &["open", "--column", "tx_nrllm_agentrun.queued_request", "--key", "1"], b"", "no row with that key"),
    ] {
        let said = bench.fails(code, arguments, input);
        assert!(said.contains(what), "{arguments:?}: {said}");
    }
    let gone = Bench::new();
    fs::remove_file(gone.config()).unwrap();
    let said = gone.fails(2, &["status"], b"");
    assert!(said.contains("cannot read configuration"), "{said}");
    // clap's own refusals.
    for arguments in [
        &["frob"][..],
        &["seal"],
        &["verify", "--all", "--sample", "3"],
        &["verify", "--sample", "0"],
        &["init", "--mechanism", "cbc"],
    ] {
        assert_eq!(bench.run(arguments, b"").status.code(), Some(2), "{arguments:?}");
    }
}

#[test]
fn init_is_repeatable_and_made_anew_only_where_nothing_would_be_lost() {
    let bench = Bench::new();
    let said = bench.fails(2, &["status"], b"");
    assert!(said.contains("hardwrap init"), "{said}");
    let first = bench.json(&["init"]);
    let again = bench.json(&["init"]);
    assert_eq!(first["key"]["kid"], again["key"]["kid"]);
    assert_eq!(first["key_did"], "made");
    assert_eq!(again["tables_changed"], false);
    assert_eq!(bench.json(&["key", "list"])["databases"], serde_json::json!([first["database_identity"]]));
    // The database holds an envelope, and the keyring, here another one, no key: refused.
    bench.ok(&["demo"], b"");
    bench.edit("[token]\n", "[token]\nkeyring = \"other\"\n");
    let said = bench.fails(1, &["init"], b"");
    assert!(said.contains("tx_nrllm_agentrun.queued_request") && said.contains("no key"), "{said}");
    assert_eq!(bench.json(&["key", "list"])["keys"], serde_json::json!([]));
}

#[test]
fn print_sql_needs_neither_token_nor_configuration() {
    let done =
        Command::new(env!("CARGO_BIN_EXE_hardwrap")).args(["init", "--print-sql"]).current_dir("/").output().unwrap();
    assert!(done.status.success());
    assert!(text(&done.stdout).contains("CREATE TABLE") && text(&done.stdout).contains("tx_nrllm_agentrun"));
}

#[test]
fn the_demo_seals_and_opens_and_may_be_run_again() {
    let bench = Bench::new();
    bench.ok(&["init"], b"");
    for _ in 0..2 {
        let said = text(&bench.ok(&["demo"], b""));
        assert!(said.contains("in the raw database files: 0 prompts"), "{said}");
        assert!(said.ends_with("done.\n"), "{said}");
    }
    for file in ["app.db", "app.db-wal"] {
        let raw = fs::read(bench.hsm.site().dir().join(file)).unwrap_or_default();
        assert!(!raw.windows(12).any(|window| window == b"DEMO-SECRET-"), "{file}");
    }
    let opened = bench.ok(&["open", "--column", "tx_nrllm_agentrun.queued_request", "--key", "4"], b"");
    assert!(text(&opened).contains("DEMO-SECRET-1"));
    bench.edit("\"test\"", "\"production\"");
    bench.fails(2, &["demo"], b"");
}

#[test]
fn verify_names_the_bad_rows_and_prints_no_value() {
    let bench = Bench::new();
    bench.ok(&["init"], b"");
    bench.sql("CREATE TABLE customer (id INTEGER PRIMARY KEY, iban TEXT, motto TEXT)");
    let seal = |row: &str| text(&bench.ok(&["seal", "--column", "customer.iban", "--row", row], b"DE0212030-secret"));
    let (one, two) = (seal("1"), seal("2"));
    bench.sql(&format!(
        "INSERT INTO customer (id, iban) VALUES (1, '{one}'), (2, '{two}'), (3, '{two}'), (4, 'clear-secret'), (5, NULL), \
         (6, ''), (7, 'hw1:broken'), (8, x'fffe')"
    ));
    let done = bench.run(&["verify", "--column", "customer.iban", "--all"], b"");
    assert_eq!(done.status.code(), Some(1));
    let said = text(&done.stdout);
    for part in [
        "all 8 rows: 2 opened, 1 empty, 1 NULL, 4 BAD",
        "key 3: Rejected",
        "key 4: Cleartext",
        "key 7: Malformed",
        "key 8: NotText",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    assert!(!said.contains("secret"), "{said}");
    let json = bench.run(&["--json", "verify", "--column", "customer.iban", "--all"], b"");
    let json: Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(json[0]["bad"].as_array().unwrap().len(), 4);
    // The same counts by SQL, and the verdict for a program.
    let status = bench.json(&["status"]);
    let counted = &status["columns"][2];
    assert_eq!((&counted["cleartext"], &counted["damaged"], &counted["null"]), (&2.into(), &1.into(), &1.into()));
    assert_eq!(bench.run(&["status", "--check"], b"").status.code(), Some(1));
    bench.sql("DELETE FROM customer WHERE id IN (3, 4, 7, 8)");
    bench.ok(&["verify", "--column", "customer.iban", "--all"], b"");
    assert_eq!(bench.run(&["status", "--check"], b"").status.code(), Some(3), "the preset still accepts cleartext");
    let limited = bench.json(&["verify", "--column", "customer.iban", "--sample", "2"]);
    assert_eq!(limited[0]["rows"], 2);
}

#[test]
fn a_column_with_a_limit_refuses_what_would_not_fit() {
    let bench = Bench::new();
    bench.ok(&["init"], b"");
    // SQLite itself would not mind.
    bench.sql("CREATE TABLE customer (id INTEGER PRIMARY KEY, iban varchar(400), motto tinytext)");
    bench.ok(&with("seal", &IBAN), &[b'x'; 40]);
    let said = bench.fails(1, &with("seal", &IBAN), &[b'x'; 60]);
    assert!(said.contains("customer.iban holds 400 bytes"), "{said}");
    bench.fails(1, &with("seal", &MOTTO), b"x");
    let said =
        bench.fails(1, &["seal", "--column", "tx_nrllm_agentrun.queued_request", "--row", "u"], &vec![b'x'; 12 << 20]);
    assert!(said.contains("holds 16777215 bytes"), "{said}");
    bench.ok(&["seal", "--column", "tx_nrllm_agentrun.queued_request", "--row", "u"], &vec![b'x'; 1 << 20]);
}

#[test]
fn a_wrong_pin_is_one_attempt_and_one_line() {
    let bench = Bench::new();
    bench.ok(&["init"], b"");
    fs::write(bench.hsm.site().pin_file(), "wrong-pin-3301").unwrap();
    let said = bench.fails(2, &with("seal", &IBAN), b"x");
    assert!(said.contains("refused the PIN (CKR_PIN_INCORRECT)"), "{said}");
    assert!(!said.contains("3301"), "{said}");
    // The token remembers, so that no program uses up what is left.
    let said = bench.fails(2, &["key", "list"], b"");
    assert!(said.contains("CKF_USER_PIN_COUNT_LOW") && said.contains("--ask-pin"), "{said}");
    // A person at a terminal may.
    fs::write(bench.hsm.site().pin_file(), PIN).unwrap();
    bench.fails(2, &["key", "list"], b"");
    let line = format!("{} --config {} --ask-pin key list", env!("CARGO_BIN_EXE_hardwrap"), bench.config().display());
    let mut typed = bench
        .hsm
        .site()
        .command("script")
        .args(["-qec", &line, "/dev/null"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    thread::sleep(Duration::from_millis(500));
    typed.stdin.take().unwrap().write_all(format!("{PIN}\n").as_bytes()).unwrap();
    let typed = typed.wait_with_output().unwrap();
    assert!(typed.status.success(), "{}", text(&typed.stdout));
    assert!(text(&typed.stdout).contains("active"), "{}", text(&typed.stdout));
    bench.ok(&["key", "list"], b"");
}

#[test]
fn the_pin_is_nowhere_to_be_seen() {
    let bench = Bench::new();
    let over = AtomicBool::new(false);
    thread::scope(|threads| {
        let watch = threads.spawn(|| {
            let mut seen = Vec::new();
            while !over.load(Ordering::Relaxed) {
                for process in fs::read_dir("/proc").unwrap().flatten() {
                    let line = fs::read(process.path().join("cmdline")).unwrap_or_default();
                    // Making other tests' tokens takes a PIN as an argument; that is softhsm2-util's.
                    if text(&line).contains(PIN) && !text(&line).contains("softhsm2-util") {
                        seen.push(text(&line));
                    }
                }
            }
            seen
        });
        for arguments in [
            &["init"][..],
            &["key", "list"],
            &["--json", "key", "list"],
            &["columns"],
            &["status"],
            &["--json", "status"],
            &["demo"],
            &["verify", "--all"],
            &["seal", "--column", "customer.iban"],
            &["open", "--column", "nope"],
        ] {
            let done = bench.command(arguments).env("RUST_LOG", "trace").env("RUST_BACKTRACE", "1").output().unwrap();
            let said = text(&done.stdout) + &text(&done.stderr);
            assert!(!said.contains(PIN), "{arguments:?}: {said}");
        }
        over.store(true, Ordering::Relaxed);
        assert_eq!(watch.join().unwrap(), Vec::<String>::new());
    });
    // A configuration with a fault is not quoted: it may hold what should not be shown (B70).
    for broken in [
        format!(
            "[token]\nuri = \"pkcs11:token=x?module-path=/m.so&pin-value={PIN}\"\n[database]\nurl = \"sqlite://x\""
        ),
        format!("[token]\npin = \"{PIN}\"\n"),
        format!("[token]\nuri = \"{PIN}\n"),
        format!("[token]\nuri = 5 \"{PIN}\"\n"),
        format!("[token]\nsessions = \"{PIN}\"\n"),
        format!("[database]\nurl = \"oracle://scott:{PIN}@host/db\"\n[token]\nuri = \"{}\"", bench.hsm.site().uri()),
    ] {
        fs::write(bench.config(), &broken).unwrap();
        let said = bench.fails(2, &["status"], b"");
        assert!(!said.contains(PIN), "{said}");
    }
}

#[test]
fn a_pin_file_that_others_can_read_is_warned_of() {
    let bench = Bench::new();
    fs::set_permissions(bench.hsm.site().pin_file(), fs::Permissions::from_mode(0o644)).unwrap();
    let done = bench.run(&["init"], b"");
    assert!(done.status.success());
    assert!(text(&done.stderr).contains("warning: PIN file") && text(&done.stderr).contains("chmod 600"));
}

#[test]
fn a_configuration_that_others_can_write_is_not_used() {
    let bench = Bench::new();
    for mode in [0o620, 0o602, 0o666] {
        fs::set_permissions(bench.config(), fs::Permissions::from_mode(mode)).unwrap();
        let said = bench.fails(2, &["key", "list"], b"");
        assert!(said.contains("others can write it"), "{said}");
    }
    fs::set_permissions(bench.config(), fs::Permissions::from_mode(0o644)).unwrap();
    bench.ok(&["init"], b"");
}

#[test]
fn variables_override_settings_and_unknown_ones_are_refused() {
    let bench = Bench::new();
    bench.ok(&["init"], b"");
    let done = bench.command(&["--json", "status"]).env("HARDWRAP_ENVIRONMENT", "staging").output().unwrap();
    let status: Value = serde_json::from_slice(&done.stdout).unwrap();
    assert_eq!(status["environment"], "staging");
    let done = bench.command(&["status"]).env("HARDWRAP_TOKEN_URL", "typo").output().unwrap();
    assert_eq!(done.status.code(), Some(2));
    assert!(text(&done.stderr).contains("HARDWRAP_TOKEN_URL: there is no such setting"));
    let done = bench.command(&["status"]).env("HARDWRAP_TOKEN_SESSIONS", "none").output().unwrap();
    assert_eq!(done.status.code(), Some(2));
}

#[test]
fn token_or_database_out_of_reach_is_code_four_and_nothing_is_printed() {
    let bench = Bench::new();
    bench.ok(&["init"], b"");
    bench.make_customers();
    bench.ok(&["demo"], b"");
    let sealed = bench.ok(&with("seal", &IBAN), b"x");
    bench.hsm.site().take_away();
    bench.fails(4, &with("seal", &IBAN), b"x");
    bench.fails(4, &with("open", &IBAN), &sealed);
    bench.fails(4, &["status"], b"");
    bench.fails(4, &["verify", "--all", "--column", "tx_nrllm_agentrun.queued_request"], b"");
    bench.hsm.site().put_back();
    assert_eq!(bench.ok(&with("open", &IBAN), &sealed), b"x");
    let uri = bench.hsm.site().uri_with(&PathBuf::from("/nonexistent/module.so"), "prompt:");
    bench.configure(&uri, "");
    let said = bench.fails(2, &with("seal", &IBAN), b"x");
    assert!(said.contains("cannot load PKCS#11 module /nonexistent/module.so"), "{said}");
}

#[test]
fn init_killed_at_any_point_leaves_a_token_on_which_init_succeeds() {
    let bench = Bench::new();
    let site = bench.hsm.site();
    bench.make_faulty();
    let init = |rules: &str| {
        site.set_faults(rules);
        bench.faulty(&["--json", "init"]).output().unwrap()
    };
    // `ci/long` kills before and after every call; `ci/test` before the even and after the odd ones.
    let long = std::env::var_os("HARDWRAP_LONG").is_some();
    let passes: &[[&str; 2]] = if long { &[["kill"; 2], ["kill-after"; 2]] } else { &[["kill", "kill-after"]] };
    let (mut killed, mut leftovers) = (0, 0);
    for (pass, when) in passes.iter().enumerate() {
        for call in 1.. {
            // A keyring of its own each time, so that every call of making a key is reached.
            let config = fs::read_to_string(bench.config()).unwrap();
            let config: Vec<_> = config.lines().filter(|line| !line.starts_with("keyring")).collect();
            let keyring = format!("[token]\nkeyring = \"keyring-{pass}-{call}\"");
            fs::write(bench.config(), config.join("\n").replace("[token]", &keyring)).unwrap();
            let done = init(&format!("any {call} {}", when[call % 2]));
            if done.status.success() {
                break;
            }
            assert_eq!(done.status.code(), None, "killed, not failed: {}", text(&done.stderr));
            killed += 1;
            let done = init("");
            assert!(done.status.success(), "after {} at call {call}: {}", when[call % 2], text(&done.stderr));
            let list = bench.command(&["--json", "key", "list"]).output().unwrap().stdout;
            let list: Value = serde_json::from_slice(&list).unwrap();
            let works = |key: &&Value| key["current"] == true && key["works"] == true;
            assert_eq!(list["keys"].as_array().unwrap().iter().filter(works).count(), 1, "{list}");
            leftovers += list["leftovers"].as_array().unwrap().len();
        }
    }
    println!("{killed} kills, {leftovers} keys left in the making");
    assert!(killed > 40, "init makes more calls than {killed}");
    assert!(leftovers > 0, "some kills fall between making and recording a key");
}

#[test]
fn two_inits_at_once_make_one_key() {
    let bench = Bench::new();
    let mut children: Vec<_> = (0..4)
        .map(|_| bench.command(&["init"]).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap())
        .collect();
    for child in &mut children {
        let status = child.wait().unwrap();
        assert!(status.success());
    }
    assert_eq!(bench.json(&["key", "list"])["keys"].as_array().unwrap().len(), 1);
}

#[test]
fn a_database_of_a_newer_hardwrap_is_refused() {
    let bench = Bench::new();
    bench.ok(&["init"], b"");
    bench.sql("UPDATE hardwrap_database SET oldest_version = '99.0.0'");
    for arguments in [&["status"][..], &["init"]] {
        let said = bench.fails(2, arguments, b"");
        assert!(said.contains("99.0.0"), "{said}");
    }
    drop(Db::open(&format!("sqlite://{}", bench.db().display()).parse::<DatabaseUrl>().unwrap()).unwrap());
}

#[test]
fn the_demo_leaves_sqlite_its_locks_while_it_searches_the_raw_files() {
    let bench = Bench::new();
    bench.ok(&["init"], b"");
    bench.make_faulty();
    let log = bench.hsm.site().dir().join("calls");
    bench.hsm.site().set_faults(&format!("log {}\nC_Encrypt 1 sleep 3000\n", log.display()));
    let mut demo = bench.faulty(&["demo"]).stdout(Stdio::null()).spawn().unwrap();
    // It has searched, and is about to seal.
    wait_until(|| fs::read_to_string(&log).is_ok_and(|calls| calls.contains("C_EncryptInit")));
    // Whoever is alone with a database takes its log away when it closes. The demo is still there.
    bench.sql("SELECT count(*) FROM tx_nrllm_agentrun");
    assert!(bench.db().with_file_name("app.db-wal").exists(), "the demo has lost its locks");
    assert!(demo.try_wait().unwrap().is_none());
    assert!(demo.wait().unwrap().success());
}

#[test]
fn verify_says_which_rows_it_cannot_reach() {
    let bench = Bench::new();
    bench.ok(&["init"], b"");
    // A primary key that is no INTEGER may be NULL in SQLite.
    bench.sql("CREATE TABLE customer (id TEXT PRIMARY KEY, iban TEXT, motto TEXT)");
    bench.sql("INSERT INTO customer (iban) VALUES ('clear-secret')");
    for (how, which) in [(&["--all"][..], "ONLY 0 of 1 rows"), (&["--sample", "5"], "a sample of 0 rows")] {
        let arguments = [&["verify", "--column", "customer.iban"], how].concat();
        let done = bench.run(&arguments, b"");
        let said = text(&done.stdout);
        assert_eq!(done.status.code(), Some(1), "{said}");
        assert!(said.contains(which) && said.contains("1 rows have no key (NULL)"), "{said}");
    }
    let json = bench.run(&["--json", "verify", "--all", "--column", "customer.iban"], b"");
    let json: Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!((&json[0]["rows"], &json[0]["keyless"], &json[0]["missed"]), (&0.into(), &1.into(), &0.into()));
}

#[test]
fn a_reader_who_goes_away_changes_no_verdict_and_a_lost_value_is_a_failure() {
    let bench = Bench::new();
    bench.ok(&["init"], b"");
    bench.sql("CREATE TABLE customer (id INTEGER PRIMARY KEY, iban TEXT, motto TEXT)");
    for json in [&[][..], &["--json"]] {
        let run = |arguments: &[&str]| {
            let done = unread(bench.command(&[json, arguments].concat()), b"");
            assert!(done.stderr.is_empty(), "{arguments:?}: {}", text(&done.stderr));
            done.status.code()
        };
        assert_eq!(run(&["status", "--check"]), Some(3));
        assert_eq!(run(&["status"]), Some(0));
        assert_eq!(run(&["key", "list"]), Some(0));
        assert_eq!(run(&["verify", "--all"]), Some(0));
        bench.sql("INSERT INTO customer VALUES (1, 'clear', NULL)");
        assert_eq!(run(&["status", "--check"]), Some(1));
        assert_eq!(run(&["verify", "--all"]), Some(1));
        bench.sql("DELETE FROM customer");
        let done = unread(bench.command(&[json, &["init"]].concat()), b"");
        assert_eq!((done.status.code(), text(&done.stderr).lines().count()), (Some(1), 1), "{}", text(&done.stderr));
    }
    let sealed = bench.ok(&with("seal", &MOTTO), b"x");
    for (command, input) in [("seal", &b"x"[..]), ("seal", &vec![b'x'; 1 << 20]), ("open", &sealed)] {
        let done = unread(bench.command(&with(command, &MOTTO)), input);
        assert_eq!(done.status.code(), Some(1), "{command}");
        assert!(text(&done.stderr).starts_with("hardwrap: standard output was closed"), "{}", text(&done.stderr));
        let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let mut child = bench
            .command(&with(command, &MOTTO))
            .stdin(Stdio::piped())
            .stdout(full)
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(input).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(1), "{command} on a full disk");
    }
}

#[test]
fn a_row_that_the_database_would_write_otherwise_is_refused() {
    let bench = Bench::new();
    bench.ok(&["init"], b"");
    // Without the table nobody knows how its rows are written, so nothing is sealed for them.
    for command in ["seal", "open"] {
        let said = bench.fails(2, &[command, "--column", "customer.iban", "--row", "007"], b"x");
        assert!(said.contains("customer") && said.contains("no table"), "{said}");
    }
    bench.sql("CREATE TABLE customer (id INTEGER PRIMARY KEY, iban TEXT, motto TEXT)");
    for row in ["007", "+7", " 7", "7 ", "7.0", "0x7", "-0", "seven", "9223372036854775808"] {
        for command in ["seal", "open"] {
            let row = format!("--row={row}");
            let said = bench.fails(2, &[command, "--column", "customer.iban", &row], b"x");
            assert!(said.contains("customer.iban is bound to rows by id, which holds integers"), "{said}");
        }
    }
    for row in ["--row=7", "--row=-7", "--row=0", "--row=9223372036854775807"] {
        let sealed = bench.ok(&["seal", "--column", "customer.iban", row], b"x");
        assert_eq!(bench.ok(&["open", "--column", "customer.iban", row], &sealed), b"x");
    }
    // The library is what refuses.
    let keeper = Keeper::unchecked(&Config::read(&bench.config(), &BTreeMap::new()).unwrap()).unwrap();
    let row = Row::try_from("007").unwrap();
    assert!(matches!(keeper.seal("customer.iban", Some(&row), b"x"), Err(keeper::Error::RowNotInteger { .. })));
    assert!(matches!(keeper.open_value("customer.iban", Some(&row), "x"), Err(keeper::Error::RowNotInteger { .. })));
    // Rows that are texts are what they are.
    bench.sql("DROP TABLE customer; CREATE TABLE customer (id TEXT PRIMARY KEY, iban TEXT, motto TEXT)");
    bench.ok(&["seal", "--column", "customer.iban", "--row", "007"], b"x");
}

#[test]
fn init_locks_nothing_while_it_waits_for_the_token() {
    let bench = Bench::new();
    bench.ok(&["init"], b"");
    bench.make_faulty();
    let log = bench.hsm.site().dir().join("calls");
    for keyring in ["hardwrap", "another"] {
        bench.edit("[token]\n", &format!("[token]\nkeyring = \"{keyring}\"\n"));
        let _ = fs::remove_file(&log);
        bench.hsm.site().set_faults(&format!("log {}\nC_Login 1 sleep 1500\n", log.display()));
        let mut init = bench.faulty(&["init"]).stdout(Stdio::null()).spawn().unwrap();
        wait_until(|| fs::read_to_string(&log).is_ok_and(|calls| calls.contains("C_OpenSession")));
        let began = Instant::now();
        while began.elapsed() < Duration::from_millis(800) {
            // Does not wait for a lock, but fails.
            bench.sql("UPDATE hardwrap_database SET made = made");
        }
        assert!(init.try_wait().unwrap().is_none(), "it waits still");
        assert!(init.wait().unwrap().success());
        bench.edit(&format!("keyring = \"{keyring}\"\n"), "");
    }
}

#[test]
fn an_ignored_column_keeps_init_from_nothing() {
    let bench = Bench::new();
    bench.ok(&["init"], b"");
    bench.sql("CREATE TABLE note (id INTEGER PRIMARY KEY, body TEXT)");
    bench.sql("INSERT INTO note (body) VALUES ('hw1:0123456789abcdef: is how a sealed value starts')");
    bench.edit("[token]\n", "[token]\nkeyring = \"other\"\n");
    let said = bench.fails(1, &["init"], b"");
    assert!(said.contains("note.body"), "{said}");
    let ignore = |column: &str| format!("[[ignore]]\ntable = \"Note\"\ncolumn = \"{column}\"\nreason = \"prose\"\n");
    bench.edit("[[column]]\npreset", &(ignore("Title") + "[[column]]\npreset"));
    bench.fails(1, &["init"], b"");
    bench.edit(&ignore("Title"), &ignore("Body"));
    bench.ok(&["init"], b"");
    bench.edit("table = \"Note\"\ncolumn = \"Body\"", "table = \"main.Customer\"\ncolumn = \"IBAN\"");
    let said = bench.fails(2, &["init"], b"");
    assert!(said.contains("main.Customer.IBAN is a registered column"), "{said}");
}

#[test]
fn the_variable_that_holds_the_pin_is_no_unknown_setting() {
    let bench = Bench::new();
    let uri = bench.hsm.site().uri_with(&softhsm::softhsm_module(), "env:HARDWRAP_PIN");
    let run = |variables: &[(&str, &str)]| {
        let done = bench.command(&["init"]).envs(variables.iter().copied()).output().unwrap();
        (done.status.code(), text(&done.stderr))
    };
    let (code, said) = run(&[("HARDWRAP_PIN", PIN)]);
    assert_eq!(code, Some(2), "the URI takes it from a file: {said}");
    assert_eq!(run(&[("HARDWRAP_PIN", PIN), ("HARDWRAP_TOKEN_URI", &uri)]), (Some(0), String::new()));
    bench.configure(&uri, "");
    assert_eq!(run(&[("HARDWRAP_PIN", PIN)]), (Some(0), String::new()));
    let (code, said) = run(&[("HARDWRAP_PIN", PIN), ("HARDWRAP_PINN", "x")]);
    assert!(code == Some(2) && said.contains("HARDWRAP_PINN: there is no such setting"), "{said}");
    // What makes a token for development takes no variable that the program would refuse.
    let script = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/softhsm/token")).unwrap();
    assert!(!script.contains("{HARDWRAP_"), "softhsm/token reads a variable of ours");
}

#[test]
fn a_typing_error_in_the_configuration_is_named_without_its_value() {
    let bench = Bench::new();
    for (from, to, line, what) in [
        ("uri = ", "uril = \"secret\"\nuri = ", 3, "unknown field `uril`"),
        ("[token]", "[[token]]\nuril = \"secret\"", 3, "unknown field `uril`"),
        ("[token]", "[token]\nsessions = \"secret\"", 3, "a setting has the wrong type"),
        ("[token]", "[token]\nsessions = -1", 3, "a setting has a value that it cannot have"),
        ("[token]", "[token]\nuri = \"secret\"", 4, "duplicate key"),
        ("[token]\nuri = ", "token = \"secret\"\n# ", 2, "a setting has the wrong type"),
        ("identifier = ", "identifer = ", 0, "unknown field `identifer`"),
        ("[token]", "[token", 2, "not well-formed TOML"),
    ] {
        bench.configure(&bench.hsm.site().uri(), "");
        bench.edit(from, to);
        let said = bench.fails(2, &["status"], b"");
        assert!(said.contains(what) && !said.contains("secret"), "{to}: {said}");
        assert!(line == 0 || said.contains(&format!("line {line}: ")), "{to}: {said}");
    }
    bench.configure(&bench.hsm.site().uri(), "");
    bench.edit("[token]", "[[token]]\nname = \"one\"");
    bench.ok(&["init"], b"");
}

#[test]
fn init_run_again_writes_nothing_of_its_key() {
    let bench = Bench::new();
    bench.ok(&["init"], b"");
    assert_eq!(bench.sql("SELECT count(*) FROM hardwrap_key_seen").trim(), "1");
    for act in ["INSERT", "UPDATE", "DELETE"] {
        bench.sql(&format!(
            "CREATE TRIGGER no_{act} BEFORE {act} ON hardwrap_key_seen BEGIN SELECT RAISE(FAIL, 'written'); END"
        ));
    }
    bench.ok(&["init"], b"");
    // Another database has not seen the key yet.
    fs::rename(bench.db(), bench.db().with_extension("old")).unwrap();
    assert_eq!(bench.json(&["init"])["key_did"], "was there already, and works");
    assert_eq!(bench.sql("SELECT count(*) FROM hardwrap_key_seen").trim(), "1");
}

#[test]
fn init_says_so_where_the_key_that_is_there_wraps_otherwise_than_asked() {
    let bench = Bench::new();
    bench.ok(&["init"], b"");
    for mechanism in ["aes-kw", "aes-kw-wrap", "aes-gcm-token-iv"] {
        let said = bench.fails(2, &["init", "--mechanism", mechanism], b"");
        assert!(
            said.contains("the keyring's key wraps by A256GCMKW (aes-gcm-caller-iv); `hardwrap rotate --mechanism`"),
            "{said}"
        );
    }
    for mechanism in ["auto", "aes-gcm", "aes-gcm-caller-iv"] {
        bench.ok(&["init", "--mechanism", mechanism], b"");
    }
}

#[test]
fn a_database_that_cannot_be_there_is_wrong_configuration() {
    let bench = Bench::new();
    bench.ok(&["init"], b"");
    let good = format!("sqlite://{}", bench.db().display());
    for bad in ["sqlite:///nonexistent/app.db", "sqlite:///tmp", &format!("{good}/app.db")] {
        bench.edit(&good, bad);
        for command in ["init", "status"] {
            bench.fails(2, &[command], b"");
        }
        bench.edit(bad, &good);
    }
}

#[test]
fn text_from_the_database_moves_no_cursor() {
    let bench = Bench::new();
    bench.ok(&["init"], b"");
    bench.sql("CREATE TABLE customer (id TEXT PRIMARY KEY, iban \"va\u{1b}[2Jr\u{9b}2J\", motto TEXT)");
    bench.sql("INSERT INTO customer (id, iban) VALUES ('\u{1b}[2J' || char(13, 10) || '\u{202e}', 'clear')");
    for arguments in [&["verify", "--all"][..], &["columns"], &["status", "--sql"]] {
        let said = text(&bench.run(arguments, b"").stdout);
        let odd = |c: char| (c.is_control() && c != '\n') || c == '\u{202e}';
        assert!(!said.contains(odd), "{arguments:?}: {said:?}");
    }
    let said = text(&bench.run(&["verify", "--all"], b"").stdout);
    assert!(said.contains(r"key \u{1b}[2J\r\n\u{202e}: Cleartext"), "{said}");
}
