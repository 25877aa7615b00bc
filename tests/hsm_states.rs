//! Key states (SP 800-57): a key that may not wrap yet, wraps, only unwraps; the fence on the token, and processes that
//! follow.
#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout, reason = "tests")]

#[path = "support/bench.rs"]
mod bench;
#[path = "support/softhsm.rs"]
mod softhsm;
#[path = "support/sqlite.rs"]
mod sqlite;

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use bench::{Bench, text};
use hardwrap::codec::Codec;
use hardwrap::column::Column;
use hardwrap::envelope::Envelope;
use hardwrap::hsm::{Choice, Error, Keyring, Made, Route, Settings, State};
use hardwrap::provider::{Aad, KeyId, KeyProvider, ProviderError};
use hardwrap::secret::Dek;
use softhsm::{Site, SoftHsm};

fn keyring(site: &Site) -> Arc<Keyring> {
    Arc::new(Keyring::new(Settings::new(site.uri().parse().unwrap())).unwrap())
}

fn first(keyring: &Keyring, choice: Choice) -> KeyId {
    match keyring.init(choice).unwrap() {
        Made::Key(kid, _) | Made::Finished(kid, _) | Made::Nothing(kid, _) => kid,
    }
}

fn dek() -> Dek {
    Dek::init(|bytes| {
        bytes.fill(7);
        Ok::<_, ()>(())
    })
    .unwrap()
}

fn state(keyring: &Keyring, kid: KeyId) -> State {
    keyring.report().unwrap().keys.iter().find(|key| key.fact.kid == kid).unwrap().fact.state
}

#[test]
fn a_key_wraps_only_while_it_is_active_and_unwraps_before_and_after() {
    SoftHsm::isolated("a_key_wraps_only_while_it_is_active_and_unwraps_before_and_after", |site| {
        let keyring = keyring(site);
        let old = first(&keyring, Choice::Route(Route::GcmCallerIv));
        let aad = Aad::new(b"here".to_vec());
        let early = keyring.wrap(old, &dek(), &aad).unwrap();
        for route in [Route::GcmCallerIv, Route::KwWrap] {
            let (new, by) = keyring.generate(Choice::Route(route)).unwrap();
            assert_eq!((by, state(&keyring, new)), (route, State::PreActive));
            let current = keyring.current().unwrap().id;
            assert_ne!(current, new, "nothing is sealed under it yet");
            assert!(matches!(keyring.wrap(new, &dek(), &aad), Err(ProviderError::NotCurrent(kid)) if kid == new));
            keyring.activate(new).unwrap();
            assert_eq!((keyring.current().unwrap().id, state(&keyring, new)), (new, State::Active));
            // What was active still is, until it is deactivated.
            keyring.wrap(current, &dek(), &aad).unwrap();
            keyring.deactivate(current).unwrap();
            assert_eq!(state(&keyring, current), State::Deactivated);
            assert!(
                matches!(keyring.wrap(current, &dek(), &aad), Err(ProviderError::NotCurrent(kid)) if kid == current)
            );
            assert_eq!(keyring.unwrap(&early, &aad).unwrap().expose(), &[7; 32]);
            let late = keyring.wrap(new, &dek(), &aad).unwrap();
            assert_eq!(keyring.unwrap(&late, &aad).unwrap().expose(), &[7; 32]);
            // Done again, it changes nothing, and what is in the record stands there once.
            let objects = keyring.count_objects().unwrap();
            keyring.activate(new).unwrap();
            keyring.deactivate(current).unwrap();
            assert_eq!(keyring.count_objects().unwrap(), objects);
        }
        // A fresh reader sees the same.
        let again = self::keyring(site);
        assert_eq!(again.current().unwrap().id, keyring.current().unwrap().id);
        assert_eq!(state(&again, old), State::Deactivated);
    });
}

#[test]
fn what_cannot_be_is_refused_and_said() {
    SoftHsm::isolated("what_cannot_be_is_refused_and_said", |site| {
        let keyring = keyring(site);
        let old = first(&keyring, Choice::Auto);
        let said = |outcome: Result<(), Error>| outcome.unwrap_err().to_string();
        assert_eq!(
            said(keyring.deactivate(old)),
            format!(
                "key {old} is active: it cannot become deactivated: no other key could seal; generate and activate one first"
            )
        );
        let (new, _) = keyring.generate(Choice::Auto).unwrap();
        // A key that may not wrap yet is no other key that could seal.
        assert!(said(keyring.deactivate(old)).contains("no other key could seal"));
        assert_eq!(said(keyring.deactivate(new)), format!("key {new} is pre-active: it cannot become deactivated"));
        keyring.activate(new).unwrap();
        keyring.deactivate(old).unwrap();
        assert_eq!(
            said(keyring.activate(old)),
            format!("key {old} is deactivated: it cannot become active; a key never comes back to that")
        );
        let other = KeyId::new(9, [9; 6]);
        assert_eq!(said(keyring.activate(other)), format!("the keyring has no key {other}"));
    });
}

#[test]
fn a_process_with_a_stale_view_is_stopped_by_the_token_and_goes_on_under_the_new_key() {
    SoftHsm::isolated("a_process_with_a_stale_view_is_stopped_by_the_token_and_goes_on_under_the_new_key", |site| {
        let column = Column::new("t", "c", "id", "t:c").unwrap();
        let place = column.at(None).unwrap();
        let (one, other) = (keyring(site), keyring(site));
        let old = first(&one, Choice::Auto);
        let codec = Codec::new(other.clone());
        let kid = |sealed: &str| Envelope::parse(sealed).unwrap().front.wrapped.key;
        assert_eq!(kid(&codec.seal(&place, b"x").unwrap()), old);
        let stale = other.current().unwrap().id;
        let (new, _) = one.generate(Choice::Auto).unwrap();
        one.activate(new).unwrap();
        one.deactivate(old).unwrap();
        // Asked before, used after: the token refuses, and the record says why.
        let refused = other.wrap(stale, &dek(), &Aad::new(b"here".to_vec()));
        assert!(matches!(refused, Err(ProviderError::NotCurrent(kid)) if kid == old), "{refused:?}");
        let sealed = codec.seal(&place, b"x").unwrap();
        assert_eq!(kid(&sealed), new);
        assert_eq!(codec.open(&place, &sealed).unwrap().expose(), b"x");
    });
}

#[test]
fn a_running_process_follows_within_a_second_of_its_next_call() {
    SoftHsm::isolated("a_running_process_follows_within_a_second_of_its_next_call", |site| {
        let (one, other) = (keyring(site), keyring(site));
        let old = first(&one, Choice::Auto);
        assert_eq!(other.current().unwrap().id, old);
        let (new, _) = one.generate(Choice::Auto).unwrap();
        one.activate(new).unwrap();
        thread::sleep(Duration::from_millis(1100));
        assert_eq!(other.current().unwrap().id, new, "without a restart, and without an error in between");
    });
}

#[test]
fn a_change_of_state_that_was_killed_anywhere_is_finished_by_doing_it_again() {
    let bench = Bench::new();
    bench.make_faulty();
    bench.ok(&["init"], b"");
    bench.make_customers();
    let list = || bench.json(&["key", "list"]);
    let states = || -> Vec<String> {
        let list = list();
        list["keys"].as_array().unwrap().iter().map(|key| key["state"].as_str().unwrap().to_owned()).collect()
    };
    let made: serde_json::Value = serde_json::from_slice(&bench.ok(&["--json", "key", "generate"], b"")).unwrap();
    let new = made["kid"].as_str().unwrap().to_owned();
    let old = list()["keys"][0]["kid"].as_str().unwrap().to_owned();
    let mut kills = 0;
    for (command, kid, to) in [("activate", &new, "active"), ("deactivate", &old, "deactivated")] {
        for function in ["C_SetAttributeValue", "C_CreateObject", "C_DestroyObject"] {
            for act in ["kill", "kill-after"] {
                bench.hsm.site().set_faults(&format!("{function} 1 {act}"));
                let died = bench.faulty(&["key", command, kid]).output().unwrap();
                bench.hsm.site().set_faults("");
                kills += usize::from(died.status.code().is_none());
                // Whatever it left, a value can be sealed and opened.
                let sealed = bench.ok(&["seal", "--column", "customer.motto"], b"x");
                assert_eq!(bench.ok(&["open", "--column", "customer.motto"], &sealed), b"x");
            }
        }
        bench.ok(&["key", command, kid], b"");
        let at = usize::from(command == "activate");
        assert_eq!(states()[at], to, "{:?}", list());
    }
    assert!(kills >= 4, "{kills}");
    assert_eq!(states(), ["deactivated", "active"]);
}

#[test]
fn the_commands_say_what_they_did_and_what_they_refuse() {
    let bench = Bench::new();
    bench.ok(&["init"], b"");
    bench.make_customers();
    let sealed = bench.ok(&["seal", "--column", "customer.motto"], b"carpe diem");
    let made = text(&bench.ok(&["key", "generate"], b""));
    assert!(made.contains(": made, pre-active, wraps by A256GCMKW (aes-gcm-caller-iv)"), "{made}");
    let list = bench.json(&["key", "list"]);
    let kid = |at: usize| list["keys"][at]["kid"].as_str().unwrap().to_owned();
    let (old, new) = (kid(0), kid(1));
    assert!(bench.fails(2, &["key", "deactivate", &old], b"").contains("no other key could seal"));
    assert!(bench.fails(2, &["key", "activate", "00ff000000000000"], b"").contains("has no key 00ff000000000000"));
    assert_eq!(bench.run(&["key", "activate", "nonsense"], b"").status.code(), Some(2));
    assert_eq!(
        text(&bench.ok(&["key", "activate", &new], b"")),
        format!("key {new}: active: new values are sealed under it\n")
    );
    assert_eq!(
        text(&bench.ok(&["key", "deactivate", &old], b"")),
        format!("key {old}: deactivated: it only unwraps\n")
    );
    assert!(bench.fails(2, &["key", "activate", &old], b"").contains("never comes back"));
    assert_eq!(bench.ok(&["open", "--column", "customer.motto"], &sealed), b"carpe diem");
    let now = text(&bench.ok(&["seal", "--column", "customer.motto"], b"x"));
    assert!(now.starts_with(&format!("hw1:{new}:")), "{now}");
    // The database has seen it: a record from before is an older one.
    let seen = bench.sql("SELECT state FROM hardwrap_key_seen ORDER BY kid");
    assert_eq!(seen, "deactivated\nactive\n");
}
