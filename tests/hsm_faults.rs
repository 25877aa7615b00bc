//! Tokens that misbehave, by the fault module between us and SoftHSM2: what real tokens do and SoftHSM2 never does.
#![allow(missing_docs, clippy::unwrap_used, reason = "tests")]

#[path = "support/softhsm.rs"]
mod softhsm;

use std::fs;
use std::thread;
use std::time::Duration;

use hardwrap::hsm::{Choice, Error, Keyring, Made, Route, Settings};
use hardwrap::provider::{Aad, KeyProvider, ProviderError, WrappedBytes, WrappedDek};
use hardwrap::secret::Dek;
use softhsm::{Site, SoftHsm};

fn keyring_named(site: &Site, name: &str) -> Keyring {
    let mut settings = Settings::new(site.faulty_uri().parse().unwrap());
    settings.keyring = name.to_owned();
    Keyring::new(settings).unwrap()
}

fn ready(site: &Site, choice: &str) -> Keyring {
    let keyring = keyring_named(site, "hardwrap");
    keyring.init(choice.parse().unwrap()).unwrap();
    keyring
}

fn dek() -> Dek {
    Dek::init(|bytes| {
        bytes.fill(7);
        Ok::<_, ()>(())
    })
    .unwrap()
}

fn aad() -> Aad {
    Aad::new(b"here".to_vec())
}

fn wrap(keyring: &Keyring) -> Result<WrappedDek, ProviderError> {
    keyring.wrap(keyring.current()?.id, &dek(), &aad())
}

fn opens(keyring: &Keyring, wrapped: &WrappedDek) -> bool {
    keyring.unwrap(wrapped, &aad()).is_ok_and(|dek| dek.expose() == &[7; 32])
}

#[test]
fn a_lost_session_or_handle_is_found_again_within_the_call() {
    SoftHsm::faulty("a_lost_session_or_handle_is_found_again_within_the_call", |site| {
        for (choice, call) in [("aes-kw", "C_UnwrapKey"), ("aes-gcm", "C_DecryptInit"), ("aes-gcm", "C_Decrypt")] {
            let keyring = keyring_named(site, choice);
            keyring.init(choice.parse().unwrap()).unwrap();
            let wrapped = wrap(&keyring).unwrap();
            // SESSION_HANDLE_INVALID (B01), SESSION_CLOSED, OBJECT_HANDLE_INVALID (B03), KEY_HANDLE_INVALID,
            // UNWRAPPING_KEY_HANDLE_INVALID, USER_NOT_LOGGED_IN (B08), CRYPTOKI_NOT_INITIALIZED (B04),
            // DEVICE_REMOVED, TOKEN_NOT_PRESENT, OPERATION_ACTIVE
            for ckr in ["0xb3", "0xb0", "0x82", "0x60", "0xf0", "0x101", "0x190", "0x32", "0xe0", "0x90"] {
                // The module is reloaded at most once a second.
                thread::sleep(Duration::from_millis(1050));
                site.set_faults(&format!("{call} 1 {ckr}"));
                assert!(opens(&keyring, &wrapped), "{choice} {call} {ckr}");
                site.set_faults("");
                wrap(&keyring).unwrap();
            }
        }
    });
}

#[test]
fn an_ambiguous_answer_is_the_rows_fault_only_while_the_canary_unwraps() {
    SoftHsm::faulty("an_ambiguous_answer_is_the_rows_fault_only_while_the_canary_unwraps", |site| {
        let keyring = ready(site, "aes-gcm");
        let wrapped = wrap(&keyring).unwrap();
        // GENERAL_ERROR, DEVICE_ERROR, FUNCTION_FAILED, DEVICE_MEMORY, HOST_MEMORY
        for ckr in ["0x5", "0x30", "0x6", "0x31", "0x2"] {
            // Once: the canary unwraps in the same session, so the row is blamed.
            site.set_faults(&format!("C_Decrypt 1 {ckr} after"));
            assert!(matches!(keyring.unwrap(&wrapped, &aad()), Err(ProviderError::Rejected)), "{ckr}");
            // Always: the canary does not unwrap either, so it is the token, and nothing is said of the row.
            site.set_faults(&format!("C_Decrypt * {ckr}"));
            assert!(matches!(keyring.unwrap(&wrapped, &aad()), Err(ProviderError::Unavailable(_))), "{ckr}");
            site.set_faults("");
            thread::sleep(Duration::from_millis(1050));
            assert!(opens(&keyring, &wrapped), "back after {ckr}");
        }
    });
}

#[test]
fn one_outage_is_asked_about_once_a_second_and_not_by_every_caller() {
    SoftHsm::faulty("one_outage_is_asked_about_once_a_second_and_not_by_every_caller", |site| {
        let keyring = ready(site, "aes-gcm");
        let wrapped = wrap(&keyring).unwrap();
        let log = site.dir().join("calls");
        site.set_faults(&format!("C_Decrypt * 0x30\nC_OpenSession * 0x30\nlog {}", log.display()));
        thread::scope(|threads| {
            for _ in 0..8 {
                threads.spawn(|| {
                    for _ in 0..50 {
                        let failed = keyring.unwrap(&wrapped, &aad());
                        assert!(matches!(failed, Err(ProviderError::Unavailable(_))), "{failed:?}");
                    }
                });
            }
        });
        let calls = fs::read_to_string(&log).unwrap();
        assert!(calls.matches("C_Initialize ").count() <= 2, "400 calls, one outage:\n{calls}");
        assert!(calls.matches("C_OpenSession ").count() <= 20, "{calls}");
    });
}

#[test]
fn a_token_with_one_session_serves_all_threads() {
    SoftHsm::faulty("a_token_with_one_session_serves_all_threads", |site| {
        for limit in [1, 2] {
            site.set_faults(&format!("sessions {limit}"));
            let keyring = keyring_named(site, &format!("limit-{limit}"));
            keyring.init(Choice::Auto).unwrap();
            thread::scope(|threads| {
                for _ in 0..8 {
                    threads.spawn(|| {
                        for _ in 0..100 {
                            assert!(opens(&keyring, &wrap(&keyring).unwrap()));
                        }
                    });
                }
            });
            drop(keyring);
        }
    });
}

#[test]
fn a_slot_that_cannot_be_read_hides_no_other() {
    SoftHsm::faulty("a_slot_that_cannot_be_read_hides_no_other", |site| {
        site.add_token("another");
        // openCryptoki's clock field makes cryptoki 0.12 fail.
        site.set_faults("token-info-clock-garbage");
        let keyring = ready(site, "auto");
        assert!(opens(&keyring, &wrap(&keyring).unwrap()));
        // The first slot answers DEVICE_ERROR, the others answer.
        site.set_faults("C_GetTokenInfo 1 0x30");
        let other = keyring_named(site, "hardwrap");
        let outcome = other.connect();
        site.set_faults("");
        // SoftHSM2's order of slots is by serial: either the token was found, or the message lists what was.
        if let Err(error) = outcome {
            let said = error.to_string();
            assert!(said.contains("cannot be read (C_GetTokenInfo failed: CKR_DEVICE_ERROR)"), "{said}");
            assert!(said.contains("token=\"another\""), "{said}");
        }
    });
}

#[test]
fn an_ambiguous_or_missing_token_is_refused_with_the_candidates() {
    SoftHsm::isolated("an_ambiguous_or_missing_token_is_refused_with_the_candidates", |site| {
        let connect = |uri: String| Keyring::new(Settings::new(uri.parse().unwrap())).unwrap().connect();
        site.add_token("hardwrap-test");
        let said = connect(site.uri()).unwrap_err().to_string();
        assert!(said.starts_with("more than one token is token=\"hardwrap-test\""), "{said}");
        assert_eq!(said.matches("serial=").count(), 2, "{said}");
        let serial = said.split("serial=\"").nth(1).unwrap().split('"').next().unwrap().to_owned();
        connect(site.uri().replace(":token=hardwrap-test", &format!(":serial={serial}"))).unwrap();
        connect(site.uri().replace("token=hardwrap-test", &format!("token=hardwrap-test;serial={serial}"))).unwrap();
        let said = connect(site.uri().replace("token=hardwrap-test", "token=nowhere")).unwrap_err().to_string();
        assert!(said.starts_with("no token is token=\"nowhere\"") && said.contains("hardwrap-test"), "{said}");
    });
}

#[test]
fn a_token_made_by_another_process_is_found_without_a_restart() {
    SoftHsm::isolated("a_token_made_by_another_process_is_found_without_a_restart", |site| {
        let uri = site.uri().replace("token=hardwrap-test", "token=later");
        let keyring = Keyring::new(Settings::new(uri.parse().unwrap())).unwrap();
        assert!(keyring.connect().is_err());
        site.add_token("later");
        thread::sleep(Duration::from_millis(1050));
        keyring.connect().unwrap();
    });
}

#[test]
fn a_token_without_data_objects_is_refused_before_a_key_is_made() {
    SoftHsm::faulty("a_token_without_data_objects_is_refused_before_a_key_is_made", |site| {
        site.set_faults("no-data-objects");
        let keyring = keyring_named(site, "hardwrap");
        let error = keyring.init(Choice::Auto).unwrap_err();
        assert!(matches!(error, Error::NoDataObjects(_)), "{error}");
        assert_eq!(keyring.count_objects().unwrap(), 0);
    });
}

#[test]
fn route_one_works_where_the_token_encrypts_with_key_wrap() {
    SoftHsm::faulty("route_one_works_where_the_token_encrypts_with_key_wrap", |site| {
        site.set_faults("kw-encrypt");
        let keyring = keyring_named(site, "hardwrap");
        assert!(matches!(keyring.init(Choice::Auto).unwrap(), Made::Key(_, Route::KwEncrypt)), "auto takes it first");
        let before = keyring.count_objects().unwrap();
        let wrapped = wrap(&keyring).unwrap();
        assert!(opens(&keyring, &wrapped));
        let mut bad = wrapped.clone();
        match &mut bad.bytes {
            WrappedBytes::A256Kw(bytes) => bytes[9] ^= 1,
            other => panic!("{other:?}"),
        }
        assert!(matches!(keyring.unwrap(&bad, &aad()), Err(ProviderError::Rejected)));
        assert_eq!(keyring.count_objects().unwrap(), before);
    });
}

#[test]
fn route_four_stores_the_tokens_iv_and_refuses_zero_and_repeated_ones() {
    SoftHsm::faulty("route_four_stores_the_tokens_iv_and_refuses_zero_and_repeated_ones", |site| {
        let four: Choice = "aes-gcm-token-iv".parse().unwrap();
        for (rule, why) in [("token-iv zero", "made no IV"), ("token-iv repeat", "repeated an IV")] {
            site.set_faults(rule);
            let error = keyring_named(site, "hardwrap").init(four).unwrap_err();
            assert!(matches!(&error, Error::NoRoute(said) if said.contains(why)), "{rule}: {error}");
        }
        site.set_faults("token-iv random");
        let keyring = keyring_named(site, "hardwrap");
        keyring.init(four).unwrap();
        let (one, two) = (wrap(&keyring).unwrap(), wrap(&keyring).unwrap());
        assert!(opens(&keyring, &one) && opens(&keyring, &two));
        assert_ne!(one.bytes, two.bytes);
        // A token that begins to repeat itself later is not believed either.
        site.set_faults("token-iv repeat");
        let _ = wrap(&keyring);
        assert!(matches!(wrap(&keyring), Err(ProviderError::Unavailable(_))));
    });
}

#[test]
fn the_next_route_is_taken_where_a_mechanism_is_missing() {
    SoftHsm::faulty("the_next_route_is_taken_where_a_mechanism_is_missing", |site| {
        for (rule, route) in
            [("no-gcm", Some(Route::KwWrap)), ("no-kw", Some(Route::GcmCallerIv)), ("no-gcm\nno-kw", None)]
        {
            site.set_faults(rule);
            match keyring_named(site, &rule.replace('\n', "-")).init(Choice::Auto) {
                Ok(Made::Key(_, made)) => assert_eq!(Some(made), route),
                Err(Error::NoRoute(said)) => {
                    assert!(route.is_none() && said.contains("CKR_MECHANISM_INVALID"), "{said}")
                }
                other => panic!("{rule}: {other:?}"),
            }
        }
    });
}

#[test]
fn a_login_that_fails_for_the_session_is_not_held_against_the_pin() {
    SoftHsm::faulty("a_login_that_fails_for_the_session_is_not_held_against_the_pin", |site| {
        // SESSION_HANDLE_INVALID at C_Login says nothing about the PIN.
        site.set_faults("C_Login 1 0xb3");
        let keyring = keyring_named(site, "hardwrap");
        let _ = keyring.connect();
        thread::sleep(Duration::from_millis(1050));
        site.set_faults("");
        keyring.connect().unwrap();
    });
}

#[test]
fn a_general_error_at_login_stops_unless_the_pin_was_accepted_before() {
    SoftHsm::faulty("a_general_error_at_login_stops_unless_the_pin_was_accepted_before", |site| {
        let log = site.dir().join("calls");
        let fault = format!("C_Login * 0x5\nlog {}", log.display());
        let logins = || fs::read_to_string(&log).unwrap_or_default().matches("C_Login ").count();
        site.set_faults(&fault);
        // ePass2003 says so for a wrong PIN, and its flags do not move (B77): not tried again.
        let keyring = keyring_named(site, "hardwrap");
        for _ in 0..3 {
            assert!(keyring.connect().is_err());
            thread::sleep(Duration::from_millis(1050));
        }
        assert_eq!(logins(), 1);
        // A changed PIN value is a new value: here it is the right one, written otherwise.
        fs::write(site.pin_file(), softhsm::PIN).unwrap();
    });
}

#[test]
fn sixteen_threads_that_start_at_once_log_in_once() {
    SoftHsm::faulty("sixteen_threads_that_start_at_once_log_in_once", |site| {
        drop(ready(site, "auto"));
        let log = site.dir().join("calls");
        site.set_faults(&format!("log {}", log.display()));
        let keyring = keyring_named(site, "hardwrap");
        thread::scope(|threads| {
            for _ in 0..16 {
                threads.spawn(|| assert!(opens(&keyring, &wrap(&keyring).unwrap())));
            }
        });
        let calls = fs::read_to_string(&log).unwrap();
        assert_eq!(calls.matches("C_Login ").count(), 1);
        assert!(calls.matches("C_OpenSession ").count() <= 8, "the pool is bounded");
    });
}
