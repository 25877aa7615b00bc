//! Rotation, retirement and destruction of keys by the command line, on a real token and a real database.
#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout, reason = "tests")]

#[path = "support/bench.rs"]
mod bench;
#[path = "support/shop.rs"]
mod shop;
#[path = "support/softhsm.rs"]
mod softhsm;
#[path = "support/sqlite.rs"]
mod sqlite;

use std::fs;

use bench::{Bench, text};
use serde_json::Value;
use shop::{insert, keys, report, sealed, shop, text_of};
use sqlite::{sqlite3, try_sqlite3};

/// The gates that keep `command` from running, by name.
fn closed(bench: &Bench, command: &[&str]) -> Vec<String> {
    let done = bench.run(&[&["--json"], command, &["--dry-run"]].concat(), b"");
    let gates: Value = serde_json::from_slice(&done.stdout).unwrap_or_else(|_| panic!("{}", text(&done.stderr)));
    let gates = gates.as_array().unwrap().clone();
    let names: Vec<String> =
        gates.iter().filter(|gate| gate["open"] == false).map(|gate| text_of(&gate["gate"])).collect();
    assert_eq!(done.status.code(), Some(i32::from(!names.is_empty())));
    names
}

/// Retires or destroys, which must be refused for this one gate.
fn refused(bench: &Bench, command: &[&str], gate: &str) {
    assert_eq!(closed(bench, command), [gate], "{command:?}");
    let said = bench.fails(1, command, b"");
    assert!(said.contains(&format!("{gate}: ")), "{said}");
}

/// Runs SQL as a restored dump does: with the fence down, which then stands again.
fn past_the_fence(bench: &Bench, sql: &str) {
    let fence = "FROM sqlite_schema WHERE type = 'trigger' AND name GLOB 'hardwrap_fence_*'";
    let triggers = bench.sql(&format!("SELECT sql || ';' {fence}"));
    let names = bench.sql(&format!("SELECT name {fence}"));
    let drop: Vec<String> = names.lines().map(|name| format!("DROP TRIGGER {name};")).collect();
    assert_eq!(drop.len(), 8, "insert and update, on four columns");
    bench.sql(&format!("{}{sql};{triggers}", drop.concat()));
}

fn nap() {
    std::thread::sleep(std::time::Duration::from_millis(1200));
}

#[test]
fn f2_a_rotation_moves_everything_proves_it_and_says_so_once() {
    for mode in [&["rotate"][..], &["rotate", "--online"]] {
        let bench = shop(7);
        let payloads = || bench.sql("SELECT id, substr(iban, instr(iban, '.')) FROM customer ORDER BY id");
        let before = payloads();
        let dry = report(&bench, 0, &["rotate", "--dry-run"]);
        assert_eq!(dry["columns"][2]["data_keys_tried"], 7);
        assert_eq!(keys(&bench).len(), 1, "a dry run makes no key");
        let event = bench.hsm.site().dir().join("event");
        let notify = format!("cat >> {}", event.display());
        let done = report(&bench, 0, &[mode, &["--notify", &notify]].concat());
        assert_eq!((&done["moved"], &done["proven"]), (&7.into(), &true.into()));
        let states: Vec<String> = keys(&bench).into_iter().map(|(_, state)| state).collect();
        assert_eq!(states, ["deactivated", "active"]);
        let new = keys(&bench)[1].0.clone();
        assert_eq!(bench.sql(&format!("SELECT count(*) FROM customer WHERE iban GLOB 'hw1:{new}:*'")).trim(), "7");
        assert_eq!(payloads(), before, "no payload is touched");
        bench.ok(&["verify", "--all"], b"");
        let heard: Value = serde_json::from_str(&fs::read_to_string(&event).unwrap()).unwrap();
        assert_eq!((&heard["event"], &heard["moved"]), (&"MasterKeyRotated".into(), &7.into()));
        assert_eq!(heard["to"], new);
        // Once more, nothing is written: not even to the file.
        let file = || fs::read(bench.db()).unwrap();
        bench.sql("PRAGMA wal_checkpoint(TRUNCATE)");
        let (stood, listed) = (file(), bench.json(&["database", "list"]));
        let again = report(&bench, 0, &[mode, &["--resume", "--notify", &notify]].concat());
        assert_eq!((&again["nothing"], &again["moved"]), (&true.into(), &0.into()));
        bench.sql("PRAGMA wal_checkpoint(TRUNCATE)");
        assert!(file() == stood && bench.json(&["database", "list"]) == listed, "written");
        assert_eq!(fs::read_to_string(&event).unwrap().matches("MasterKeyRotated").count(), 1);
    }
}

#[test]
fn f1_what_nobody_registered_is_never_left_behind() {
    let bench = shop(2);
    let stray = sealed(&bench, 9);
    bench.sql(&format!("CREATE TABLE \"an archive\" (id INTEGER PRIMARY KEY, \"old iban\" BLOB); INSERT INTO \"an archive\" VALUES (1, '{stray}')"));
    for arguments in [&["rotate"][..], &["rotate", "--online"]] {
        let said = bench.fails(1, arguments, b"");
        assert!(said.contains("an archive.old iban (1)") && said.contains("table = \"an archive\""), "{said}");
    }
    assert_eq!(keys(&bench).len(), 1, "refused before a key was made");
    let dry = report(&bench, 1, &["rotate", "--dry-run"]);
    assert_eq!((&dry["clear"], &dry["unregistered"][0]), (&false.into(), &"an archive.old iban (1)".into()));
    let status = bench.json(&["status"]);
    assert!(status["critical"].to_string().contains("an archive.old iban"), "{}", status["critical"]);
    // Inside another text, as a history of whole rows keeps it.
    bench.sql(&format!("DROP TABLE \"an archive\"; CREATE TABLE history (row TEXT); INSERT INTO history VALUES ('{{\"iban\":\"{stray}\"}}')"));
    bench.fails(1, &["rotate"], b"");
    bench.sql("DELETE FROM history; CREATE TABLE prose (body TEXT); INSERT INTO prose VALUES ('values begin with hw1: and a key')");
    assert_eq!(report(&bench, 0, &["rotate"])["moved"], 2);
    // Found again before the key goes.
    let old = keys(&bench)[0].0.clone();
    bench.sql(&format!("INSERT INTO history VALUES ('{stray}')"));
    refused(&bench, &["key", "retire", &old], "unregistered-column");
    bench.fails(1, &["rotate", "--resume"], b"");
    // Registered, or ignored with a reason, it passes.
    let config = fs::read_to_string(bench.config()).unwrap();
    let ignore = "[[ignore]]\ntable = \"history\"\ncolumn = \"row\"\nreason = \"test\"\n";
    fs::write(bench.config(), format!("{config}{ignore}")).unwrap();
    assert_eq!(closed(&bench, &["key", "retire", &old]), [""; 0]);
    // And registered, with the identifier that it was sealed for, it is moved like any other.
    bench.sql("DELETE FROM history; CREATE TABLE attic (id INTEGER PRIMARY KEY, motto TEXT)");
    let stray = text(&bench.ok(&["seal", "--column", "customer.motto"], b"carpe diem"));
    bench.sql(&format!("INSERT INTO attic VALUES (1, '{stray}')"));
    assert!(bench.fails(1, &["rotate", "--resume"], b"").contains("attic.motto (1)"));
    let column = "table = \"attic\"\ncolumn = \"motto\"\nkey = \"id\"\nidentifier = \"shop:attic:motto\"\n";
    fs::write(bench.config(), format!("{config}[[column]]\n{column}")).unwrap();
    assert_eq!(closed(&bench, &["key", "retire", &old]), ["database-fence"]);
    assert_eq!(report(&bench, 0, &["rotate", "--resume"])["proven"], true);
    assert_eq!(closed(&bench, &["key", "retire", &old]), [""; 0]);
}

#[test]
fn o5_a_damaged_row_is_named_and_blocks_no_other() {
    let bench = shop(4);
    let old = keys(&bench)[0].0.clone();
    let damaged = sealed(&bench, 5);
    let at = damaged.find('.').unwrap();
    let other_row = sealed(&bench, 77);
    bench.sql(&format!(
        "INSERT INTO customer (id, iban) VALUES (5, '{}'), (6, 'hw1:nonsense'), (7, '{other_row}'), (8, ''), (9, NULL), \
         (10, 'hw1:00ff000000000000:{}')",
        &damaged[..at],
        &damaged[21..]
    ));
    let whole = || bench.sql("SELECT id, iban FROM customer WHERE id >= 5 ORDER BY id");
    let before = whole();
    let dry = report(&bench, 1, &["rotate", "--dry-run"]);
    assert_eq!(dry["columns"][2]["bad"].as_array().unwrap().len(), 4, "{dry}");
    let done = report(&bench, 1, &["rotate", "--online"]);
    assert_eq!((&done["moved"], &done["proven"]), (&4.into(), &false.into()));
    let open: Vec<(String, String)> =
        done["open"].as_array().unwrap().iter().map(|one| (text_of(&one["key"]), text_of(&one["error"]))).collect();
    let named = |key: &str, error: &str| (key.to_owned(), error.to_owned());
    assert_eq!(
        open,
        [named("5", "Malformed"), named("6", "Malformed"), named("7", "Rejected"), named("10", "UnknownKey")]
    );
    assert_eq!(whole(), before, "what cannot be moved stays as it is");
    assert_eq!(report(&bench, 1, &["ledger", "list", "--check"]).as_array().unwrap().len(), 4);
    // Again, nothing changes and nothing is written.
    let again = report(&bench, 1, &["rotate", "--resume", "--online"]);
    assert_eq!((&again["nothing"], &again["open"]), (&true.into(), &done["open"]));
    assert!(bench.fails(2, &["rotate"], b"").contains("--resume"));
    assert_eq!(closed(&bench, &["key", "retire", &old]), ["rows-left", "ledger", "proof"]);
    // One is mended, one is gone, two are given up.
    let mended = sealed(&bench, 5);
    bench.sql(&format!("UPDATE customer SET iban = '{mended}' WHERE id = 5; DELETE FROM customer WHERE id = 6"));
    let ids =
        |list: &Value| -> Vec<String> { list.as_array().unwrap().iter().map(|one| one["id"].to_string()).collect() };
    assert_eq!(report(&bench, 1, &["rotate", "--resume"])["open"].as_array().unwrap().len(), 2);
    assert!(bench.fails(2, &["ledger", "accept", "999", "--reason", "x"], b"").contains("no entry 999"));
    bench.fails(2, &["ledger", "accept", "1", "--reason", " "], b"");
    for id in ids(&report(&bench, 0, &["ledger", "list"])) {
        bench.ok(&["ledger", "accept", &id, "--reason", "test data"], b"");
    }
    let done = report(&bench, 0, &["rotate", "--resume"]);
    assert_eq!(done["proven"], true, "{done}");
    assert_eq!(closed(&bench, &["key", "retire", &old]), [""; 0]);
    // What was given up counts only while it is the same.
    past_the_fence(&bench, "UPDATE customer SET iban = iban || 'A' WHERE id = 7");
    assert_eq!(closed(&bench, &["key", "retire", &old]), ["rows-left"]);
}

/// The values that came back may be in a backup made meanwhile, so the horizon begins anew, also where they are gone.
#[test]
fn a_database_restored_from_before_its_proof_is_proven_anew() {
    let bench = shop(3);
    let old = keys(&bench)[0].0.clone();
    let other_row = sealed(&bench, 77);
    bench.sql(&format!("INSERT INTO customer (id, iban) VALUES (7, '{other_row}')"));
    // Both fences, and a value that keeps the rotation from its proof.
    report(&bench, 1, &["rotate", "--online"]);
    let backup = bench.hsm.site().dir().join("backup.db");
    bench.sql(&format!("VACUUM INTO '{}'", backup.display()));
    bench.sql("DELETE FROM customer WHERE id = 7");
    report(&bench, 0, &["rotate", "--resume"]);
    let retire = ["key", "retire", &old];
    assert_eq!(closed(&bench, &retire), [""; 0]);
    let since = || text_of(&report(&bench, 0, &["database", "list"])[0]["proofs"][0]["since"]);
    let before = since();
    nap();
    for suffix in ["-wal", "-shm"] {
        let _ = fs::remove_file(format!("{}{suffix}", bench.db().display()));
    }
    fs::copy(&backup, bench.db()).unwrap();
    bench.sql("DELETE FROM customer WHERE id = 7");
    assert_eq!(closed(&bench, &retire), ["ledger", "proof"]);
    assert!(bench.fails(2, &["rotate"], b"").contains("--resume"));
    report(&bench, 0, &["rotate", "--resume"]);
    assert_eq!(closed(&bench, &retire), [""; 0]);
    assert!(since() > before);
    assert_eq!(report(&bench, 0, &["rotate", "--resume"])["nothing"], true);
}

#[test]
fn each_gate_alone_keeps_a_key_from_being_retired_or_destroyed() {
    let bench = shop(3);
    let old = keys(&bench)[0].0.clone();
    let retire = ["key", "retire", &old];
    let destroy = ["key", "destroy", &old, "--confirm", &old];
    let said = bench.fails(1, &retire, b"");
    assert!(said.contains("state: it is active") && said.contains("another-seals: no other key seals"), "{said}");
    bench.fails(2, &["key", "retire", "0001000000000000"], b"");
    let late = sealed(&bench, 90);
    bench.ok(&["rotate", "--online"], b"");
    let new = keys(&bench)[1].0.clone();
    // A row under the old key, as a restored dump brings it: past the fence, which then is missing.
    past_the_fence(&bench, &format!("INSERT INTO customer (id, iban) VALUES (90, '{late}')"));
    refused(&bench, &retire, "rows-left");
    bench.sql("DELETE FROM customer WHERE id = 90");
    for table in ["customer", "tx_nrllm_agentrun"] {
        let one = bench
            .sql(&format!("SELECT name FROM sqlite_schema WHERE type = 'trigger' AND tbl_name = '{table}' LIMIT 1"));
        let sql = bench.sql(&format!("SELECT sql FROM sqlite_schema WHERE name = '{}'", one.trim()));
        bench.sql(&format!("DROP TRIGGER {}", one.trim()));
        refused(&bench, &retire, "database-fence");
        bench.sql(&sql);
    }
    bench.sql(&format!("INSERT INTO hardwrap_ledger (tbl, col, row_key, shown, kid, error, digest, noted) VALUES ('customer', 'iban', 1, '1', '{old}', 'Rejected', '', '')"));
    refused(&bench, &retire, "ledger");
    bench.sql("DELETE FROM hardwrap_ledger");
    // Another database on the same keyring.
    let url = format!("sqlite://{}/other.db", bench.hsm.site().dir().display());
    let other = |arguments: &[&str]| {
        let done = bench.command(arguments).env("HARDWRAP_DATABASE_URL", &url).output().unwrap();
        assert!(done.status.success(), "{arguments:?}: {}", text(&done.stderr));
        text(&done.stdout)
    };
    other(&["init"]);
    refused(&bench, &retire, "other-database");
    let made = fs::metadata(bench.hsm.site().dir().join("other.db"));
    assert!(made.is_ok());
    let shop = bench.hsm.site().dir().join("other.db");
    sqlite3(&shop, "CREATE TABLE customer (id INTEGER PRIMARY KEY, iban TEXT, motto TEXT)");
    other(&["rotate", "--resume"]);
    assert_eq!(closed(&bench, &retire), [""; 0]);
    nap();
    refused(&bench, &destroy, "retired");
    bench.ok(&retire, b"");
    assert_eq!(keys(&bench)[0].1, "retired");
    nap();
    // Retired, it opens nothing, and is brought back.
    let said = bench.fails(1, &["open", "--column", "customer.iban", "--row", "90"], late.as_bytes());
    assert!(said.contains("is retired"), "{said}");
    refused(&bench, &destroy, "other-database-fresh");
    bench.ok(&["key", "activate", "--unwrap", &old], b"");
    assert_eq!(
        bench.ok(&["open", "--column", "customer.iban", "--row", "90"], late.as_bytes()),
        b"DE00000000000000000090"
    );
    bench.ok(&retire, b"");
    nap();
    other(&["key", "retire", &old]);
    // The horizon: not said, not over; the operator may add to it.
    bench.edit("backup_horizon = \"1s\"\n", "");
    refused(&bench, &destroy, "horizon-configured");
    bench.edit("write_grace = \"1s\"", "write_grace = \"1s\"\nbackup_horizon = \"1d\"");
    refused(&bench, &destroy, "horizon");
    bench.edit("backup_horizon = \"1d\"", "backup_horizon = \"1s\"");
    refused(&bench, &[&destroy[..], &["--wait", "30d"]].concat(), "horizon");
    refused(&bench, &["key", "destroy", &old, "--confirm", &new], "confirmed");
    refused(&bench, &["key", "destroy", &old], "confirmed");
    // An active key never.
    assert!(closed(&bench, &["key", "destroy", &new, "--confirm", &new]).contains(&"state".to_owned()));
    bench.ok(&destroy, b"");
    assert_eq!(keys(&bench), [(old.clone(), "destroyed".to_owned()), (new, "active".to_owned())]);
    assert_eq!(
        bench.sql("SELECT count(*) FROM sqlite_schema WHERE type = 'trigger' AND name GLOB 'hardwrap_*'").trim(),
        "0"
    );
    bench.ok(&["verify", "--all"], b"");
    let said = bench.fails(1, &["open", "--column", "customer.iban", "--row", "90"], late.as_bytes());
    assert!(said.contains("which the keyring does not hold"), "{said}");
    // Done again it does what a crash may have left, and so nothing.
    bench.ok(&destroy, b"");
    let other = ["key", "destroy", &old, "--confirm", "00"];
    for command in [&retire[..], &other, &["key", "activate", "--unwrap", &old]] {
        bench.fails(if command[1] == "activate" { 2 } else { 1 }, command, b"");
    }
}

#[test]
fn a_database_is_given_up_only_by_name_with_a_reason_and_from_another() {
    let bench = shop(1);
    let url = format!("sqlite://{}/gone.db", bench.hsm.site().dir().display());
    assert!(bench.command(&["init"]).env("HARDWRAP_DATABASE_URL", &url).status().unwrap().success());
    bench.ok(&["rotate"], b"");
    let old = keys(&bench)[0].0.clone();
    let list = bench.json(&["database", "list"]);
    let list = list.as_array().unwrap();
    let of = |here: bool| text_of(&list.iter().find(|one| one["here"] == here).unwrap()["identity"]);
    let (here, gone) = (of(true), of(false));
    refused(&bench, &["key", "retire", &old], "other-database");
    let release = |identity: &str, confirm: &str, reason: &str| {
        bench.run(&["database", "release", identity, "--confirm", confirm, "--reason", reason], b"")
    };
    for (identity, confirm, reason, code) in [
        (&gone, &here, "gone", 2),
        (&here, &here, "gone", 1),
        (&gone, &gone, " ", 1),
        (&"0".repeat(32), &"0".repeat(32), "x", 1),
    ] {
        let done = release(identity, confirm, reason);
        assert_eq!(done.status.code(), Some(code), "{}", text(&done.stderr));
    }
    assert!(release(&gone, &gone, "dropped with staging").status.success());
    assert_eq!(closed(&bench, &["key", "retire", &old]), [""; 0]);
    assert!(text(&bench.ok(&["database", "list"], b"")).contains("dropped with staging"));
    // Initialised again it counts again.
    assert!(bench.command(&["init"]).env("HARDWRAP_DATABASE_URL", &url).status().unwrap().success());
    refused(&bench, &["key", "retire", &old], "other-database");
}

#[test]
fn f11_rows_move_between_all_routes_of_the_token() {
    let bench = shop(2);
    for (step, mechanism) in ["aes-kw-wrap", "aes-gcm-caller-iv", "aes-kw", "aes-gcm"].into_iter().enumerate() {
        let mode = if step % 2 == 0 { "--online" } else { "--workers=1" };
        let done = report(&bench, 0, &["rotate", mode, "--mechanism", mechanism]);
        assert_eq!(done["moved"], 2 + step);
        insert(&bench, 10 + step);
        bench.ok(&["verify", "--all"], b"");
    }
}

#[test]
fn a_pre_active_key_is_taken_and_none_is_made() {
    let bench = shop(2);
    bench.ok(&["key", "generate"], b"");
    let waiting = keys(&bench)[1].0.clone();
    assert_eq!(report(&bench, 0, &["rotate"])["target"], waiting);
    assert_eq!(keys(&bench).len(), 2);
}

#[test]
fn a_pre_active_key_is_newer_than_those_of_every_token_and_stands_where_the_one_is_that_seals() {
    let bench = shop(1);
    let site = bench.hsm.site();
    site.add_token("hardwrap-new");
    let one = fs::read_to_string(bench.config()).unwrap();
    let new = site.uri().replacen("token=hardwrap-test", "token=hardwrap-new", 1);
    let two =
        format!("[[token]]\nname = \"old\"\nuri = \"{}\"\n[[token]]\nname = \"new\"\nuri = \"{new}\"\n", site.uri());
    fs::write(bench.config(), one.replacen(&format!("[token]\nuri = \"{}\"\n", site.uri()), &two, 1)).unwrap();
    assert!(text(&bench.ok(&["key", "list"], b"")).contains("no keys: `hardwrap rotate --to-token` makes one"));
    let moved = text_of(&report(&bench, 0, &["rotate", "--to-token", "new"])["target"]);
    let made = text_of(&report(&bench, 0, &["key", "generate"])["kid"]);
    assert!(made > moved, "{made} {moved}");
    assert_eq!(bench.json(&["key", "list"])["further"][0]["keys"][1]["kid"], made);
    assert_eq!(report(&bench, 0, &["rotate"])["target"], made);
}

#[test]
fn what_was_given_up_stays_so_when_its_key_is_gone() {
    let bench = shop(2);
    let old = keys(&bench)[0].0.clone();
    let elsewhere = sealed(&bench, 77);
    bench.sql(&format!("INSERT INTO customer (id, iban) VALUES (3, '{elsewhere}')"));
    let id = report(&bench, 1, &["rotate"])["open"][0]["id"].to_string();
    bench.ok(&["ledger", "accept", &id, "--reason", "test data"], b"");
    bench.ok(&["rotate", "--resume"], b"");
    bench.ok(&["key", "retire", &old], b"");
    let doctor = text(&bench.run(&["doctor"], b"").stdout);
    assert!(doctor.contains(&format!("key       {old} retired (aes-gcm-caller-iv)\n")), "{doctor}");
    assert!(doctor.contains(&format!("hardwrap key activate --unwrap {old} brings it back")), "{doctor}");
    let status = report(&bench, 1, &["status", "--check"]);
    assert!(status["critical"].to_string().contains(&format!("{old}, which is retired")), "{status}");
    // It keeps no later rotation from its end, neither while the key sleeps nor after.
    let dry = report(&bench, 0, &["rotate", "--dry-run"]);
    assert_eq!((&dry["columns"][2]["given_up"], &dry["clear"]), (&1.into(), &true.into()));
    for mode in ["--workers=1", "--online"] {
        let done = report(&bench, 0, &["rotate", mode]);
        assert_eq!((&done["moved"], &done["proven"]), (&2.into(), &true.into()));
        assert_eq!(report(&bench, 0, &["rotate", "--resume"])["nothing"], true);
    }
    nap();
    bench.ok(&["key", "destroy", &old, "--confirm", &old], b"");
    assert_eq!(report(&bench, 0, &["rotate"])["proven"], true);
    let entry = &report(&bench, 0, &["ledger", "list", "--check"])[0];
    assert_eq!((&entry["id"].to_string(), &entry["reason"]), (&id, &"test data".into()));
}

#[test]
fn events_that_nobody_heard_are_told_in_their_order() {
    let bench = shop(1);
    let targets: Vec<String> = (0..5).map(|_| text_of(&report(&bench, 0, &["rotate"])["target"])).collect();
    let heard = bench.hsm.site().dir().join("heard");
    bench.ok(&["rotate", "--resume", "--notify", &format!("cat >> {0}; echo >> {0}", heard.display())], b"");
    let heard = fs::read_to_string(heard).unwrap();
    let to = |line: &str| text_of(&serde_json::from_str::<Value>(line).unwrap()["to"]);
    assert_eq!(heard.lines().map(to).collect::<Vec<_>>(), targets);
}

#[test]
fn a_late_value_is_refused_by_the_database_and_what_stays_as_it_is_passes() {
    let bench = shop(2);
    let late = sealed(&bench, 3);
    let standing = bench.sql("SELECT iban FROM customer WHERE id = 1");
    bench.ok(&["rotate", "--online"], b"");
    for statement in [
        format!("INSERT INTO customer (id, iban) VALUES (3, '{late}')"),
        format!("INSERT OR IGNORE INTO customer (id, iban) VALUES (3, '{late}')"),
        format!("INSERT OR REPLACE INTO customer (id, iban) VALUES (1, '{late}')"),
        format!("INSERT INTO customer (id, iban) VALUES (1, 'x') ON CONFLICT (id) DO UPDATE SET iban = '{late}'"),
        format!("UPDATE customer SET iban = '{}' WHERE id = 1", standing.trim()),
        format!("UPDATE OR IGNORE customer SET iban = CAST('{late}' AS BLOB) WHERE id = 2"),
    ] {
        let done = try_sqlite3(&bench.db(), &statement);
        assert!(text(&done.stderr).contains("hardwrap: the database is fenced against key"), "{statement}: {done:?}");
    }
    bench.sql("UPDATE customer SET iban = iban, motto = ''; UPDATE customer SET iban = '' WHERE id = 2");
    bench.ok(&["verify", "--all"], b"");
    assert_eq!(bench.sql("SELECT count(*) FROM customer").trim(), "2");
}

#[test]
fn two_rotations_at_once_are_one() {
    let bench = shop(400);
    let start = || {
        let mut command = bench.command(&["--json", "rotate", "--online", "--batch", "10"]);
        command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn().unwrap()
    };
    let ended: Vec<_> =
        [start(), start(), start()].into_iter().map(|child| child.wait_with_output().unwrap()).collect();
    let moved: Vec<bool> = ended.iter().map(|done| done.status.success()).collect();
    assert!(moved.contains(&true), "{ended:?}");
    for refused in ended.iter().filter(|done| !done.status.success()) {
        let said = text(&refused.stderr);
        assert!(said.contains("is at work on this database") || said.contains("--resume"), "{said}");
    }
    bench.ok(&["rotate", "--resume"], b"");
    bench.ok(&["verify", "--all"], b"");
    assert_eq!(keys(&bench).iter().filter(|(_, state)| state == "active").count(), 1);
}

#[test]
fn a_listener_that_fails_is_reported_undoes_nothing_and_hears_again() {
    let bench = shop(2);
    let done = report(&bench, 1, &["rotate", "--notify", "exit 3"]);
    assert_eq!((&done["proven"], &done["moved"]), (&true.into(), &2.into()));
    assert!(done["unheard"][0].as_str().unwrap().contains("exit status: 3"), "{done}");
    let heard = bench.hsm.site().dir().join("heard");
    let notify = format!("cat >> {}", heard.display());
    let again = report(&bench, 0, &["rotate", "--resume", "--notify", &notify]);
    assert_eq!(again["moved"], 0);
    report(&bench, 0, &["rotate", "--resume", "--notify", &notify]);
    assert_eq!(fs::read_to_string(heard).unwrap().matches("MasterKeyRotated").count(), 1);
}

#[test]
fn what_a_backup_brings_back_under_a_retired_or_destroyed_key_is_named_and_blocks_no_other_row() {
    let bench = shop(2);
    let backup = bench.sql("SELECT iban FROM customer WHERE id = 1").trim().to_owned();
    bench.ok(&["rotate"], b"");
    let old = keys(&bench)[0].0.clone();
    bench.ok(&["key", "retire", &old], b"");
    let now = bench.sql("SELECT iban FROM customer WHERE id = 1").trim().to_owned();
    let put = |value: &str| past_the_fence(&bench, &format!("UPDATE customer SET iban = '{value}' WHERE id = 1"));
    put(&backup);
    let named = |error: &str| {
        let said = report(&bench, 1, &["verify", "--all"]);
        let iban = said.as_array().unwrap().iter().find(|one| one["column"] == "customer.iban").unwrap().clone();
        assert_eq!((&iban["opened"], &iban["bad"][0]["error"]), (&1.into(), &error.into()), "{iban}");
    };
    named("Asleep");
    assert!(bench.fails(1, &["rotate", "--resume"], b"").contains(&format!("hardwrap key activate --unwrap {old}")));
    put(&now);
    let resumed = bench.ok(&["rotate", "--resume"], b"");
    assert!(text(&resumed).contains(&format!("hardwrap key destroy {old} is the next step")));
    nap();
    bench.ok(&["key", "destroy", &old, "--confirm", &old], b"");
    bench.sql(&format!("UPDATE customer SET iban = '{backup}' WHERE id = 1"));
    named("UnknownKey");
    let done = report(&bench, 1, &["rotate"]);
    assert_eq!((&done["moved"], &done["open"][0]["error"]), (&1.into(), &"UnknownKey".into()));
    // It is not begun again and again.
    bench.fails(2, &["rotate"], b"");
    assert_eq!(keys(&bench).len(), 3);
}

#[test]
fn a_wrong_identifier_is_hinted_at_and_fills_no_screen() {
    let bench = shop(1);
    let motto = text(&bench.ok(&["seal", "--column", "customer.motto"], b"carpe diem"));
    let numbers = "WITH RECURSIVE number (n) AS (SELECT 2 UNION ALL SELECT n + 1 FROM number WHERE n < 40)";
    bench.sql(&format!("{numbers} INSERT INTO customer (id, motto) SELECT n, '{motto}' FROM number"));
    bench.edit("identifier = \"shop:customer:motto\"", "identifier = \"shop:client:motto\"");
    let dry = text(&bench.run(&["rotate", "--dry-run"], b"").stdout);
    assert!(dry.contains("and 19 more") && dry.contains("is the identifier the one"), "{dry}");
    let done = text(&bench.run(&["rotate"], b"").stdout);
    assert!(done.lines().count() < 25 && done.contains("and 19 more: hardwrap ledger list"), "{done}");
    bench.edit("identifier = \"shop:client:motto\"", "identifier = \"shop:customer:motto\"");
    let mended = report(&bench, 0, &["rotate", "--resume"]);
    assert_eq!((&mended["moved"], &mended["proven"]), (&39.into(), &true.into()));
    assert_eq!(report(&bench, 0, &["ledger", "list"]), Value::Array(Vec::new()));
}

#[test]
fn a_row_without_a_key_is_named() {
    let bench = shop(1);
    let iban = sealed(&bench, 1);
    bench.sql(&format!("CREATE TABLE IF NOT EXISTS client (name TEXT PRIMARY KEY, iban TEXT); INSERT INTO client VALUES (NULL, '{iban}')"));
    let config = fs::read_to_string(bench.config()).unwrap();
    fs::write(bench.config(), format!("{config}[[column]]\ntable = \"client\"\ncolumn = \"iban\"\nkey = \"name\"\nidentifier = \"shop:client:iban\"\n")).unwrap();
    let done = report(&bench, 1, &["rotate"]);
    assert_eq!(done["open"][0]["error"], "NoKey");
    bench.sql("DELETE FROM client");
    assert_eq!(report(&bench, 0, &["rotate", "--resume"])["proven"], true);
}

#[test]
fn everything_moves_to_another_token_and_the_first_may_vanish() {
    let bench = shop(3);
    let site = bench.hsm.site();
    let old = keys(&bench)[0].0.clone();
    site.add_token("hardwrap-new");
    let one = fs::read_to_string(bench.config()).unwrap();
    let uri = |label: &str| site.uri().replacen("token=hardwrap-test", &format!("token={label}"), 1);
    let named = |tokens: &[(&str, &str)]| {
        let several: Vec<String> = tokens
            .iter()
            .map(|(name, label)| format!("[[token]]\nname = \"{name}\"\nuri = \"{}\"\n", uri(label)))
            .collect();
        let single = format!("[token]\nuri = \"{}\"\n", site.uri());
        assert!(one.contains(&single));
        fs::write(bench.config(), one.replacen(&single, &several.concat(), 1)).unwrap();
    };
    named(&[("old", "hardwrap-test"), ("new", "hardwrap-new")]);
    bench.ok(&["verify", "--all"], b"");
    assert!(bench.fails(2, &["rotate", "--to-token", "nope"], b"").contains("no [[token]] is called \"nope\""));
    let done = report(&bench, 0, &["rotate", "--online", "--to-token", "new"]);
    assert_eq!((&done["moved"], &done["proven"]), (&3.into(), &true.into()));
    let new = text_of(&done["target"]);
    assert!(new > old);
    let list = bench.json(&["key", "list"]);
    assert_eq!((&list["keys"][0]["state"], &list["keys"][0]["current"]), (&"deactivated".into(), &false.into()));
    assert_eq!(
        (&list["further"][0]["keys"][0]["kid"], &list["further"][0]["keys"][0]["current"]),
        (&new.clone().into(), &true.into())
    );
    insert(&bench, 4);
    bench.ok(&["verify", "--all"], b"");
    assert_eq!(report(&bench, 0, &["rotate", "--resume"])["nothing"], true);
    assert_eq!(closed(&bench, &["key", "retire", &old]), [""; 0]);
    // The first token out of reach: what is under the second one opens and is sealed, and no rotation begins.
    let find = std::process::Command::new("sh")
        .args(["-c", "grep -rl hardwrap-test .", "x"])
        .current_dir(site.tokens())
        .output()
        .unwrap();
    let file = text(&find.stdout).lines().find(|line| line.ends_with("token.object")).unwrap().to_owned();
    let directory = site.tokens().join(file).parent().unwrap().to_owned();
    let away = site.dir().join("away");
    fs::rename(&directory, &away).unwrap();
    insert(&bench, 5);
    bench.ok(&["verify", "--all"], b"");
    for command in [&["rotate"][..], &["key", "retire", &old], &["key", "destroy", &old], &["key", "generate"]] {
        let said = bench.fails(4, command, b"");
        assert!(said.contains("token old is out of reach"), "{command:?}: {said}");
    }
    let list = report(&bench, 4, &["key", "list"]);
    assert_eq!((&list["keys"][0]["kid"], &list["tokens_away"]), (&new.clone().into(), &serde_json::json!(["old"])));
    let status = report(&bench, 3, &["status", "--check"]);
    assert_eq!(status["tokens_away"], serde_json::json!(["old"]));
    assert_eq!(report(&bench, 0, &["database", "list"])[0]["proofs"], Value::Array(Vec::new()));
    // Out of the configuration as well: the database knows that nothing names its key.
    named(&[("new", "hardwrap-new")]);
    bench.ok(&["verify", "--all"], b"");
    insert(&bench, 6);
    assert_eq!(report(&bench, 0, &["rotate"])["moved"], 6);
    bench.ok(&["verify", "--all"], b"");
    // Nor is a token missed that something still needs.
    fs::rename(&away, &directory).unwrap();
    let both = bench.run(&["status", "--check"], b"");
    assert_eq!(both.status.code(), Some(0), "{}", text(&both.stdout));
}

#[test]
fn several_tokens_are_named_and_no_variable_means_one_of_them() {
    let bench = Bench::new();
    let token = "[[token]]\nname = \"a\"\nuri = \"pkcs11:token=x?module-path=/x.so\"\n";
    for (tokens, said) in [
        ("[[token]]\nuri = \"pkcs11:token=x?module-path=/x.so\"\n".repeat(2), "each needs a name"),
        (token.repeat(2), "have one name"),
        (format!("{token}[[token]]\nname = \"b\"\n"), "token.uri"),
    ] {
        let config = fs::read_to_string(bench.config()).unwrap();
        let (head, tail) = config.split_once("[token]").unwrap();
        let (_, tail) = tail.split_once("[database]").unwrap();
        fs::write(bench.config(), format!("{head}{tokens}[database]{tail}")).unwrap();
        let error = bench.fails(2, &["status"], b"");
        assert!(error.contains(said), "{error}");
        fs::write(bench.config(), config).unwrap();
    }
}
