//! What went wrong in the ancestor's rotation (F and O numbers of its review), each impossible here. Others of these
//! tests stand where their subject is: `tests/rotation.rs`, `rotation_failures.rs`, `rotation_rows.rs` and
//! `rotation_writers.rs`.
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

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bench::{Bench, text};
use serde_json::Value;
use shop::{insert, keys, report, sealed, shop};

/// The values of `customer.iban`, in the order of their ids.
fn ibans(bench: &Bench) -> Vec<String> {
    bench.sql("SELECT coalesce(iban, 'NULL') FROM customer ORDER BY id").lines().map(str::to_owned).collect()
}

/// What `verify --all` says of `customer.iban`, which has bad values or none.
fn verified(bench: &Bench, code: i32) -> Value {
    let said = report(bench, code, &["verify", "--all"]);
    said.as_array().unwrap().iter().find(|one| one["column"] == "customer.iban").unwrap().clone()
}

/// The ancestor's SQL took other values for its own than its parser did, and refused for ever over the difference.
#[test]
fn f3_o7_count_walk_and_reading_tell_markers_apart_by_one_rule() {
    let bench = shop(2);
    bench.edit("row = \"id\"", "row = \"id\"\ncleartext = \"accept\"");
    for (id, clear) in [(3, "HW1:in clear"), (4, "V2:in clear"), (5, "NRV1:in clear"), (6, "hw1 is no marker")] {
        bench.sql(&format!("INSERT INTO customer (id, iban) VALUES ({id}, '{clear}')"));
    }
    // The ancestor's envelopes are seen by both, and neither moved nor in the way.
    bench.sql("INSERT INTO customer (id, iban) VALUES (7, 'v2:e30=.AA'), (8, 'nrv1:e30=.AA')");
    let before = ibans(&bench);
    for mode in [&["rotate"][..], &["rotate", "--online"]] {
        let done = report(&bench, 0, mode);
        assert_eq!((&done["moved"], &done["proven"]), (&2.into(), &true.into()));
    }
    assert_eq!(ibans(&bench)[2..], before[2..]);
    let iban = verified(&bench, 1);
    assert_eq!((&iban["opened"], &iban["cleartext"]), (&2.into(), &4.into()), "{iban}");
}

/// Its cursor advanced only over the rows it kept.
#[test]
fn f4_pages_in_which_nothing_is_to_be_moved_do_not_end_the_walk() {
    for mode in [&["rotate", "--batch", "2"][..], &["rotate", "--online", "--batch", "2"]] {
        let bench = shop(1);
        bench
            .sql("INSERT INTO customer (id, iban) VALUES (2, NULL), (3, ''), (4, NULL), (5, ''), (6, NULL), (7, NULL)");
        for row in [8, 9, 20] {
            insert(&bench, row);
        }
        // A page of nothing but damaged ones.
        bench.sql("INSERT INTO customer (id, iban) VALUES (10, 'hw1:a'), (11, 'hw1:b'), (12, 'hw1:c')");
        let done = report(&bench, 1, mode);
        assert_eq!((&done["moved"], done["open"].as_array().unwrap().len()), (&4.into(), 3), "{done}");
    }
}

/// It left out what was disabled or deleted, and said that it was done.
#[test]
fn f5_f6_no_state_of_a_row_keeps_its_value_under_the_old_key() {
    let bench = shop(0);
    bench.sql("ALTER TABLE customer ADD COLUMN deleted INTEGER; ALTER TABLE customer ADD COLUMN hidden INTEGER");
    for row in 1..=3 {
        insert(&bench, row);
    }
    bench.sql("UPDATE customer SET deleted = 1, hidden = 1");
    let request = text(&bench.ok(&["seal", "--column", "tx_nrllm_agentrun.queued_request", "--row", "u"], b"{}"));
    for status in ["completed", "failed", "cancelled", "a status that nobody knows"] {
        bench.sql(&format!(
            "INSERT INTO tx_nrllm_agentrun (uuid, status, queued_request) VALUES ('u{status}', '{status}', '{request}')"
        ));
    }
    bench.sql("DELETE FROM tx_nrllm_agentrun WHERE status = 'failed'; UPDATE tx_nrllm_agentrun SET uuid = 'u' WHERE status = 'cancelled'");
    bench.sql("UPDATE tx_nrllm_agentrun SET queued_request = '' WHERE status <> 'cancelled'");
    assert_eq!(report(&bench, 0, &["rotate"])["moved"], 4);
    let old = &keys(&bench)[0].0;
    for column in ["customer.iban", "tx_nrllm_agentrun.queued_request"] {
        let (table, name) = column.split_once('.').unwrap();
        assert_eq!(bench.sql(&format!("SELECT count(*) FROM {table} WHERE {name} LIKE '%{old}%'")).trim(), "0");
    }
}

/// Its vault was empty, so it did nothing, and what else hung on the key stayed under the old one.
#[test]
fn f7_an_empty_database_is_proven_like_any_other() {
    let bench = shop(0);
    let done = report(&bench, 0, &["rotate"]);
    assert_eq!((&done["moved"], &done["proven"], &done["nothing"]), (&0.into(), &true.into(), &false.into()));
    let states: Vec<String> = keys(&bench).into_iter().map(|(_, state)| state).collect();
    assert_eq!(states, ["deactivated", "active"]);
}

/// It wrote the header anew from the fields that it knew.
#[test]
fn f9_a_rotation_changes_key_and_wrapping_and_nothing_else() {
    let bench = shop(1);
    let header = || -> (Value, String) {
        let value = ibans(&bench).remove(0);
        let (front, payload) = value.split_once('.').unwrap();
        (serde_json::from_slice(&STANDARD.decode(&front[21..]).unwrap()).unwrap(), payload.to_owned())
    };
    let (before, payload) = header();
    report(&bench, 0, &["rotate"]);
    let (after, payload_after) = header();
    assert_eq!(payload_after, payload);
    let names = |header: &Value| header.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(&after), names(&before));
    let changed: Vec<String> =
        names(&before).into_iter().filter(|name| before[name.as_str()] != after[name.as_str()]).collect();
    assert!(changed.iter().all(|name| ["dek", "dek_iv"].contains(&name.as_str())), "{changed:?}");
    assert!(changed.contains(&"dek".to_owned()), "{before}");
    // One with a field that nobody knows is not moved without it: it is named.
    let value = ibans(&bench).remove(0);
    let mut odd = after;
    odd["x"] = 1.into();
    let odd = format!("{}{}.{payload}", &value[..21], STANDARD.encode(odd.to_string()));
    bench.sql(&format!("UPDATE customer SET iban = '{odd}'"));
    assert_eq!(report(&bench, 1, &["rotate"])["open"][0]["error"], "Malformed");
    assert_eq!(ibans(&bench), [odd]);
}

/// It opened what said that it was of version 99.
#[test]
fn f10_a_version_that_nobody_knows_is_neither_opened_nor_moved() {
    let bench = shop(1);
    let stored = ibans(&bench).remove(0);
    bench.sql(&format!("INSERT INTO customer (id, iban) VALUES (2, 'hw99:{}')", &stored[4..]));
    assert_eq!(report(&bench, 0, &["rotate"])["moved"], 1);
    assert!(ibans(&bench)[1].starts_with("hw99:"));
    assert_eq!(verified(&bench, 1)["bad"][0]["error"], "Unsupported");
}

/// Its dry run passed over most of what the run then refused or failed on.
#[test]
fn o8_a_dry_run_finds_what_the_run_would_fail_on() {
    let bench = shop(2);
    let other_row = sealed(&bench, 77);
    let fails = |sql: &str, undo: &str| {
        bench.sql(sql);
        assert_eq!(report(&bench, 1, &["rotate", "--dry-run"])["clear"], false, "{sql}");
        assert_eq!(keys(&bench).len(), 1);
        bench.sql(undo);
        assert_eq!(report(&bench, 0, &["rotate", "--dry-run"])["clear"], true);
    };
    let restore = format!("UPDATE customer SET iban = '{}' WHERE id = 1", ibans(&bench)[0]);
    fails(&format!("UPDATE customer SET iban = '{other_row}' WHERE id = 1"), &restore);
    fails("UPDATE customer SET iban = 'hw1:cut' WHERE id = 1", &restore);
    fails("UPDATE customer SET iban = substr(iban, 1, 200) WHERE id = 1", &restore);
    fails(&format!("CREATE TABLE attic AS SELECT '{other_row}' AS c"), "DROP TABLE attic");
    // A token on which no key can be unwrapped, and one that is not there.
    bench.hsm.site().take_away();
    bench.fails(4, &["rotate", "--dry-run"], b"");
    bench.hsm.site().put_back();
    assert_eq!(report(&bench, 0, &["rotate"])["moved"], 2);
}

/// Its commands took both keys as files in clear.
#[test]
fn o9_the_new_key_is_made_on_the_token_and_no_command_takes_or_shows_one() {
    let bench = shop(1);
    bench.make_faulty();
    let log = bench.hsm.site().dir().join("calls");
    bench.hsm.site().set_faults(&format!("log {}", log.display()));
    let done = bench.faulty(&["rotate"]).output().unwrap();
    assert!(done.status.success(), "{}", text(&done.stderr));
    let calls = fs::read_to_string(log).unwrap();
    let count = |name: &str| calls.lines().filter(|line| line.split(' ').next() == Some(name)).count();
    assert!(count("C_GenerateKey") > 0);
    assert_eq!((count("C_WrapKey"), count("C_UnwrapKey")), (0, 0));
    let help = text(&bench.ok(&["rotate", "--help"], b""));
    let options: Vec<&str> = help
        .lines()
        .filter_map(|line| line.trim_start().strip_prefix("--"))
        .map(|rest| rest.split(' ').next().unwrap())
        .collect();
    assert!(
        options.len() > 8 && !options.iter().any(|option| option.contains("key") || option.contains("file")),
        "{options:?}"
    );
}

/// A damaged payload is re-wrapped without a word, and found when it is needed.
#[test]
fn o21_a_damaged_payload_is_found_before_it_is_needed() {
    let bench = shop(2);
    let stored = ibans(&bench).remove(0);
    let (front, payload) = stored.split_once('.').unwrap();
    let other = if payload.starts_with('A') { "B" } else { "A" };
    bench.sql(&format!("UPDATE customer SET iban = '{front}.{other}{}' WHERE id = 1", &payload[1..]));
    assert_eq!(report(&bench, 0, &["rotate"])["moved"], 2, "its key is sound");
    let iban = verified(&bench, 1);
    assert_eq!(
        (&iban["opened"], &iban["bad"][0]["key"], &iban["bad"][0]["error"]),
        (&1.into(), &"1".into(), &"Rejected".into())
    );
}
