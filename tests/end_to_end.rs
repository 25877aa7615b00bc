//! The main job, end to end: agent runs in a real database, under a key on a real token.
#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout, reason = "tests")]

#[path = "support/softhsm.rs"]
mod softhsm;
#[path = "support/sqlite.rs"]
mod sqlite;

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use hardwrap::codec;
use hardwrap::column::Cleartext;
use hardwrap::envelope::Marker;
use hardwrap::hsm::Choice;
use hardwrap::keeper::{Config, Keeper};
use hardwrap::store::{self, AgentRuns, Lease, NewRun, Persister, RunId, SealedInPlace, Status, Taken, Waiting};
use softhsm::{Site, SoftHsm};
use sqlite::sqlite3;

const NOW: i64 = 1_790_000_000;

fn config(site: &Site, cleartext: &str) -> Config {
    let path = site.dir().join("hardwrap.toml");
    let text = format!(
        "environment = \"test\"\n[token]\nuri = \"{}\"\n[database]\nurl = \"sqlite://{}/app.db\"\n[[column]]\n\
         preset = \"nr-llm\"\ncleartext = \"{cleartext}\"\n",
        site.uri(),
        site.dir().display()
    );
    // Whole or not at all: a test's processes write it at the same moment.
    let mut whole = tempfile::NamedTempFile::new_in(site.dir()).unwrap();
    whole.write_all(text.as_bytes()).unwrap();
    whole.persist(&path).unwrap();
    Config::read(&path, &BTreeMap::new()).unwrap()
}

fn keeper(site: &Site, cleartext: &str) -> Keeper {
    Keeper::init(&config(site, cleartext), Choice::Auto).unwrap().0
}

fn persister(keeper: &Keeper) -> Persister {
    Persister::new(AgentRuns::new(keeper.db().clone(), keeper.codec().clone(), keeper.register()).unwrap())
}

fn lease(name: &str) -> Lease {
    Lease { worker: name.parse().unwrap(), expires: NOW + 900 }
}

/// Runs SQL as somebody else on the same database.
fn sqlite(site: &Site, sql: &str) -> String {
    sqlite3(&site.dir().join("app.db"), sql)
}

fn is_unavailable(error: &store::Error) -> bool {
    matches!(error, store::Error::Codec(codec::Error::Unavailable(_)))
}

#[test]
fn the_two_real_runs_of_nr_llm_are_sealed_and_read_back_equal() {
    SoftHsm::isolated("the_two_real_runs_of_nr_llm_are_sealed_and_read_back_equal", |site| {
        let seed = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/data/agentrun-seed.sql");
        let Ok(seed) = fs::read_to_string(&seed) else {
            println!("skipped: {} is not there", seed.display());
            return;
        };
        let keeper = keeper(site, "accept");
        sqlite(site, &seed);
        let column = keeper.register().find("tx_nrllm_agentrun.suspended_state").unwrap();
        let rows = keeper.db().page(column, None, 10).unwrap();
        assert_eq!(rows.len(), 2);
        let clear: Vec<Vec<u8>> = rows.iter().map(|row| row.value.as_ref().unwrap().bytes().to_vec()).collect();
        for row in &rows {
            let sealed = keeper.db().seal_cleartext(keeper.codec(), column, &row.key).unwrap();
            assert_eq!(sealed, SealedInPlace::Sealed);
        }
        keeper.db().truncate_wal().unwrap();
        for file in ["app.db", "app.db-wal", "app.db-shm"] {
            let raw = fs::read(site.dir().join(file)).unwrap_or_default();
            for word in ["delete_thing", "pendingCalls", "Why continue"] {
                assert!(!raw.windows(word.len()).any(|window| window == word.as_bytes()), "{word} in {file}");
            }
        }
        // Above the seam it is the same JSON, byte for byte.
        let persister = persister(&keeper);
        for (uuid, waiting, clear) in
            [("e2e-approval-0001", Waiting::Approval, &clear[0]), ("e2e-input-0001", Waiting::Input, &clear[1])]
        {
            let id = uuid.parse::<RunId>().unwrap();
            match persister.take_for_resume(&id, waiting, &lease("w"), NOW).unwrap() {
                Taken::Work(work) => assert_eq!(work.opened.unwrap().expose(), clear.as_slice()),
                refused @ Taken::Refused(_) => panic!("{refused:?}"),
            }
        }
    });
}

#[test]
fn a_token_taken_away_in_the_middle_loses_nothing_and_stores_nothing() {
    SoftHsm::isolated("a_token_taken_away_in_the_middle_loses_nothing_and_stores_nothing", |site| {
        let keeper = keeper(site, "refuse");
        let persister = persister(&keeper);
        let request = r#"{"prompt":"before the outage"}"#;
        let id = persister.enqueue(&NewRun::default(), request, NOW).unwrap();
        site.take_away();
        // Sealing fails, and nothing is stored.
        assert!(is_unavailable(&persister.enqueue(&NewRun::default(), request, NOW).unwrap_err()));
        assert_eq!(sqlite(site, "SELECT count(*) FROM tx_nrllm_agentrun").trim(), "1");
        // Opening says so, and leaves the run as it was (O11).
        assert!(is_unavailable(&persister.take(&id, &lease("w"), NOW).unwrap_err()));
        assert_eq!(persister.runs().status(&id).unwrap(), Some(Status::Queued));
        let run = persister.runs().find(&id).unwrap().unwrap();
        assert!(is_unavailable(&run.queued_request(persister.runs()).unwrap_err()));
        // What needs no key goes on (O13, O14).
        let other = persister.runs();
        assert_eq!(other.queued().unwrap().len(), 1);
        site.put_back();
        let back = Instant::now();
        let work = loop {
            match persister.take(&id, &lease("w"), NOW) {
                Ok(Taken::Work(work)) => break work,
                Ok(refused) => panic!("{refused:?}"),
                Err(error) => assert!(is_unavailable(&error), "{error}"),
            }
            assert!(back.elapsed() < Duration::from_secs(5), "still away");
            thread::sleep(Duration::from_millis(50));
        };
        assert_eq!(work.opened.unwrap().expose(), request.as_bytes());
        let stored = sqlite(site, "SELECT queued_request FROM tx_nrllm_agentrun");
        assert_eq!(Marker::of(&stored), Marker::Hw1);
    });
}

#[test]
fn a_run_is_sealed_from_enqueue_to_finish() {
    SoftHsm::isolated("a_run_is_sealed_from_enqueue_to_finish", |site| {
        let keeper = keeper(site, "refuse");
        assert!(keeper.register().columns().iter().all(|column| column.policy() == Cleartext::Refuse));
        let persister = persister(&keeper);
        let (request, state) = (r#"{"prompt":"zürich"}"#, r#"{"messages":["東京"]}"#);
        let id = persister.enqueue(&NewRun::default(), request, NOW).unwrap();
        let Taken::Work(work) = persister.take(&id, &lease("w"), NOW).unwrap() else { panic!("not taken") };
        assert_eq!(work.opened.unwrap().expose(), request.as_bytes());
        let worker = lease("w").worker;
        let answer = persister.suspend(&id, &worker, Waiting::Approval, state, NOW).unwrap();
        assert_eq!(answer, store::Answer::Moved);
        let row = sqlite(site, "SELECT queued_request, suspended_state FROM tx_nrllm_agentrun");
        assert_eq!(row.matches("hw1:").count(), 2, "{row}");
        // A sealed text moved to the other column of the same row opens there no more.
        sqlite(site, "UPDATE tx_nrllm_agentrun SET suspended_state = queued_request");
        let refused = persister.take_for_resume(&id, Waiting::Approval, &lease("w"), NOW).unwrap_err();
        assert!(matches!(refused, store::Error::Codec(codec::Error::Rejected)), "{refused}");
        assert_eq!(persister.runs().status(&id).unwrap(), Some(Status::WaitingForApproval));
        // Cancelling needs no key and no opening, and clears both.
        assert_eq!(persister.runs().cancel(&id, "user", NOW).unwrap(), store::Answer::Moved);
        assert_eq!(sqlite(site, "SELECT queued_request || suspended_state FROM tx_nrllm_agentrun").trim(), "");
    });
}

/// What one of the processes of the next test does, over and over.
fn busy(site: &Site, name: &str, rounds: usize) {
    let keeper = Keeper::open(&config(site, "refuse")).unwrap();
    let persister = persister(&keeper);
    for round in 0..rounds {
        let request = format!("{{\"worker\":\"{name}\",\"round\":{round}}}");
        let id = persister.enqueue(&NewRun::default(), &request, NOW).unwrap();
        let Taken::Work(work) = persister.take(&id, &lease(name), NOW).unwrap() else { panic!("not taken") };
        assert_eq!(work.opened.unwrap().expose(), request.as_bytes());
        let answer = persister.suspend(&id, &lease(name).worker, Waiting::Input, &request, NOW).unwrap();
        assert_eq!(answer, store::Answer::Moved);
        let state = persister.take_for_resume(&id, Waiting::Input, &lease(name), NOW).unwrap();
        let Taken::Work(work) = state else { panic!("not taken for resume") };
        assert_eq!(work.opened.unwrap().expose(), request.as_bytes());
    }
}

#[test]
fn two_processes_seal_and_open_on_one_token_and_one_database_at_once() {
    const NAME: &str = "two_processes_seal_and_open_on_one_token_and_one_database_at_once";
    SoftHsm::isolated(NAME, |site| {
        let rounds = if env::var_os("HARDWRAP_LONG").is_some() { 3_000 } else { 200 };
        if let Ok(name) = env::var("HARDWRAP_TEST_WORKER") {
            return busy(site, &name, rounds);
        }
        drop(keeper(site, "refuse"));
        let workers: Vec<_> = ["one", "two"]
            .map(|name| {
                let mut worker = site.command(env::current_exe().unwrap());
                worker.args(["--exact", NAME, "--nocapture"]).env("HARDWRAP_TEST_DIR", site.dir());
                worker.env("HARDWRAP_TEST_WORKER", name).stdout(Stdio::piped()).stderr(Stdio::piped());
                worker.spawn().unwrap()
            })
            .into();
        for worker in workers {
            let done = worker.wait_with_output().unwrap();
            let said = String::from_utf8_lossy(&done.stdout).into_owned() + &String::from_utf8_lossy(&done.stderr);
            assert!(done.status.success() && said.contains("1 passed"), "{said}");
        }
        assert_eq!(sqlite(site, "SELECT count(*) FROM tx_nrllm_agentrun").trim(), (2 * rounds).to_string());
        // Each process reserved its wraps, and the sum of them covers all that were made.
        let keeper = Keeper::open(&config(site, "refuse")).unwrap();
        let reserved = keeper.keyring().report().unwrap().keys[0].reserved.unwrap();
        assert!(reserved >= 4 * rounds as u64, "{reserved}");
    });
}

#[test]
fn many_short_lived_processes_on_one_token_all_succeed() {
    SoftHsm::isolated("many_short_lived_processes_on_one_token_all_succeed", |site| {
        drop(keeper(site, "refuse"));
        let rounds = if env::var_os("HARDWRAP_LONG").is_some() { 50 } else { 10 };
        for round in 0..rounds {
            // SoftHSM2 rewrites the token's file at every login, and these log in at the same moment.
            let sealers: Vec<_> = (0..6)
                .map(|_| {
                    let mut sealer = site.command(env!("CARGO_BIN_EXE_hardwrap"));
                    sealer.arg("--config").arg(site.dir().join("hardwrap.toml"));
                    sealer.args(["seal", "--column", "tx_nrllm_agentrun.queued_request", "--row", "r"]);
                    sealer.env_remove("HARDWRAP_TEST_DIR").env_remove("HARDWRAP_FAULT");
                    sealer
                        .stdin(fs::File::open(site.pin_file()).unwrap())
                        .stdout(Stdio::piped())
                        .stderr(Stdio::piped());
                    sealer.spawn().unwrap()
                })
                .collect();
            for sealer in sealers {
                let done = sealer.wait_with_output().unwrap();
                assert!(done.status.success(), "round {round}: {}", String::from_utf8_lossy(&done.stderr));
                assert!(done.stdout.starts_with(b"hw1:"));
            }
        }
    });
}

#[test]
fn a_command_ended_by_a_signal_at_any_moment_leaves_the_token_whole() {
    SoftHsm::isolated("a_command_ended_by_a_signal_at_any_moment_leaves_the_token_whole", |site| {
        drop(keeper(site, "refuse"));
        let hardwrap = || {
            let mut command = site.command(env!("CARGO_BIN_EXE_hardwrap"));
            command.arg("--config").arg(site.dir().join("hardwrap.toml")).args(["key", "list"]);
            command.env_remove("HARDWRAP_TEST_DIR").env_remove("HARDWRAP_FAULT");
            command.stdout(Stdio::piped()).stderr(Stdio::piped());
            command
        };
        let began = Instant::now();
        assert!(hardwrap().output().unwrap().status.success());
        let whole = began.elapsed();
        let rounds = if env::var_os("HARDWRAP_LONG").is_some() { 1_000 } else { 120 };
        let mut ended = 0;
        for round in 0..rounds {
            let mut child = hardwrap().spawn().unwrap();
            // SoftHSM2 rewrites the token's file at the login, which is somewhere in the middle.
            thread::sleep(whole.mul_f64(f64::from(round) / f64::from(rounds)));
            let signal = ["-TERM", "-INT", "-HUP"][round as usize % 3];
            Command::new("kill").args([signal, &child.id().to_string()]).stderr(Stdio::null()).status().unwrap();
            ended += u32::from(child.wait().unwrap().code().is_none());
        }
        assert!(ended > 10, "{ended} were ended by their signal");
        let done = hardwrap().output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    });
}
