//! Tokens that misbehave, by the fault module between us and SoftHSM2: what real tokens do and SoftHSM2 never does.
#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout, reason = "tests")]

#[path = "support/softhsm.rs"]
mod softhsm;

use std::fs;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use hardwrap::hsm::{Choice, Error, Keyring, Made, Route, Settings, Verdict};
use hardwrap::provider::{Aad, KeyId, KeyProvider, ProviderError, WrappedBytes, WrappedDek};
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
        // SoftHSM2 shows three slots: two tokens, and one to be initialised. Each in turn cannot be read, in every try.
        let uri = site.faulty_uri().replace("token=hardwrap-test", "token=nowhere");
        let mut listed = 0;
        for slot in 1..=3 {
            let rules: Vec<_> = (0..20).map(|tried| format!("C_GetTokenInfo {} 0x30", slot + 3 * tried)).collect();
            site.set_faults(&rules.join("\n"));
            let error = Keyring::new(Settings::new(uri.parse().unwrap())).unwrap().connect().unwrap_err();
            let said = error.to_string();
            assert!(said.contains("cannot be read (C_GetTokenInfo failed: CKR_DEVICE_ERROR)"), "{said}");
            listed += said.matches("token=\"another\"").count() + said.matches("token=\"hardwrap-test\"").count();
        }
        assert_eq!(listed, 1 + 1 + 2, "what can be read is listed");
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
fn a_general_error_at_the_first_login_is_taken_for_a_wrong_pin() {
    SoftHsm::faulty("a_general_error_at_the_first_login_is_taken_for_a_wrong_pin", |site| {
        let log = site.dir().join("calls");
        let logins = || fs::read_to_string(&log).unwrap_or_default().matches("C_Login ").count();
        // ePass2003 says so for a wrong PIN, and its flags do not move (B77); or the token goes right after.
        for (index, more) in ["", "C_GetTokenInfo 4 0x30\nC_GetTokenInfo 3 0x30"].into_iter().enumerate() {
            site.set_faults(&format!("C_Login * 0x5\nlog {}\n{more}", log.display()));
            let keyring = keyring_named(site, "hardwrap");
            // Another PIN value each time: what was refused is remembered for the whole process.
            fs::write(site.pin_file(), format!("pin-value-{index}")).unwrap();
            for _ in 0..3 {
                assert!(keyring.connect().is_err());
                thread::sleep(Duration::from_millis(1050));
            }
            assert_eq!(logins(), index + 1, "{more}");
        }
    });
}

#[test]
fn a_general_error_at_login_is_an_outage_where_the_pin_was_accepted_before() {
    SoftHsm::faulty("a_general_error_at_login_is_an_outage_where_the_pin_was_accepted_before", |site| {
        let keyring = ready(site, "aes-gcm");
        let wrapped = wrap(&keyring).unwrap();
        // The session goes, and the token answers nonsense for a while (B05).
        site.set_faults("C_Decrypt * 0xb3\nC_Login * 0x5");
        assert!(matches!(keyring.unwrap(&wrapped, &aad()), Err(ProviderError::Unavailable(_))));
        site.set_faults("");
        thread::sleep(Duration::from_millis(1050));
        assert!(opens(&keyring, &wrapped));
    });
}

#[test]
fn more_threads_than_sessions_all_come_back_from_an_outage() {
    SoftHsm::faulty("more_threads_than_sessions_all_come_back_from_an_outage", |site| {
        let keyring = ready(site, "aes-gcm");
        let wrapped = wrap(&keyring).unwrap();
        let over = AtomicBool::new(false);
        let done = AtomicUsize::new(0);
        site.set_faults("C_Decrypt * 0x30\nC_OpenSession * 0x30");
        thread::scope(|threads| {
            for _ in 0..24 {
                threads.spawn(|| {
                    while !over.load(Ordering::Relaxed) {
                        let _ = keyring.unwrap(&wrapped, &aad());
                    }
                    done.fetch_add(1, Ordering::Relaxed);
                });
            }
            thread::sleep(Duration::from_secs(2));
            site.set_faults("");
            over.store(true, Ordering::Relaxed);
            let began = Instant::now();
            while done.load(Ordering::Relaxed) < 24 {
                if began.elapsed() > Duration::from_secs(20) {
                    // The threads hang, and the scope would wait for them.
                    println!("{} of 24 threads came back", done.load(Ordering::Relaxed));
                    std::process::exit(1);
                }
                thread::sleep(Duration::from_millis(20));
            }
        });
        thread::sleep(Duration::from_millis(1050));
        assert!(opens(&keyring, &wrapped));
    });
}

#[test]
fn reading_the_keyring_again_disturbs_nobody_on_a_token_with_one_session() {
    SoftHsm::faulty("reading_the_keyring_again_disturbs_nobody_on_a_token_with_one_session", |site| {
        site.set_faults("sessions 1");
        let keyring = ready(site, "aes-gcm");
        let wrapped = wrap(&keyring).unwrap();
        let over = AtomicBool::new(false);
        thread::scope(|threads| {
            for _ in 0..4 {
                threads.spawn(|| {
                    while !over.load(Ordering::Relaxed) {
                        assert!(opens(&keyring, &wrapped));
                    }
                });
            }
            for forged in 0..10u8 {
                let forged = WrappedDek { key: KeyId::new(7, [forged; 6]), ..wrapped.clone() };
                let answer = keyring.unwrap(&forged, &aad());
                assert!(matches!(answer, Err(ProviderError::UnknownKey(_))), "{answer:?}");
            }
            over.store(true, Ordering::Relaxed);
        });
    });
}

#[test]
fn one_ambiguous_answer_makes_no_second_key_and_forgets_none() {
    SoftHsm::faulty("one_ambiguous_answer_makes_no_second_key_and_forgets_none", |site| {
        let keyring = ready(site, "aes-gcm");
        let wrapped = wrap(&keyring).unwrap();
        site.set_faults("C_Decrypt 1 0x5 after");
        let fresh = keyring_named(site, "hardwrap");
        assert!(matches!(fresh.init(Choice::Auto).unwrap(), Made::Nothing(..)));
        // A canary that is silent all the time: no key is made in its place, and nothing is said of the values.
        site.set_faults("C_Decrypt * 0x5 after");
        let fresh = keyring_named(site, "hardwrap");
        assert!(matches!(fresh.init(Choice::Auto), Err(Error::Silent(_))));
        let answer = fresh.unwrap(&wrapped, &aad());
        assert!(matches!(answer, Err(ProviderError::Unavailable(_))), "{answer:?}");
        site.set_faults("");
        assert!(opens(&fresh, &wrapped));
    });
}

#[test]
fn a_record_written_by_a_call_that_failed_is_finished_and_its_key_is_kept() {
    SoftHsm::faulty("a_record_written_by_a_call_that_failed_is_finished_and_its_key_is_kept", |site| {
        let keyring = keyring_named(site, "hardwrap");
        // The first object is the trial whether the token keeps any.
        site.set_faults("C_CreateObject 2 0x30 after");
        assert!(keyring.init(Choice::Auto).is_err());
        site.set_faults("");
        thread::sleep(Duration::from_millis(1050));
        assert!(matches!(keyring.init(Choice::Auto).unwrap(), Made::Finished(..)));
        assert!(opens(&keyring, &wrap(&keyring).unwrap()));
    });
}

#[test]
fn a_passing_fault_in_the_trial_does_not_choose_the_route() {
    SoftHsm::faulty("a_passing_fault_in_the_trial_does_not_choose_the_route", |site| {
        for (index, fault) in ["C_Encrypt 1 0x30", "C_Encrypt 1 0xb3", "C_Encrypt 2 0x5 after"].into_iter().enumerate()
        {
            site.set_faults(fault);
            let keyring = keyring_named(site, &format!("keyring-{index}"));
            let first = keyring.init(Choice::Auto);
            site.set_faults("");
            thread::sleep(Duration::from_millis(1050));
            let made = first.or_else(|_| keyring.init(Choice::Auto)).unwrap();
            assert!(matches!(made, Made::Key(_, Route::GcmCallerIv)), "{fault}: {made:?}");
        }
    });
}

#[test]
fn custody_is_proven_by_refusals_only() {
    SoftHsm::faulty("custody_is_proven_by_refusals_only", |site| {
        let keyring = ready(site, "aes-gcm");
        let key = keyring.current().unwrap().id;
        site.set_faults("no-kw\nC_CopyObject * 0x30\nC_SetAttributeValue * 0x101\nC_GetAttributeValue * 0x12");
        for probe in keyring.probe_custody(key).unwrap() {
            assert!(matches!(probe.verdict, Verdict::NotTried(_)), "{probe:?}");
        }
    });
}

#[test]
fn a_tampered_dek_is_rejected_whatever_the_token_calls_it() {
    SoftHsm::faulty("a_tampered_dek_is_rejected_whatever_the_token_calls_it", |site| {
        let keyring = ready(site, "aes-gcm");
        let wrapped = wrap(&keyring).unwrap();
        // ENCRYPTED_DATA_INVALID, ..._LEN_RANGE, AEAD_DECRYPT_FAILED, WRAPPED_KEY_INVALID, DATA_INVALID, DATA_LEN_RANGE,
        // SIGNATURE_INVALID, ARGUMENTS_BAD, one of a vendor's own
        for ckr in ["0x40", "0x41", "0x42", "0x110", "0x20", "0x21", "0xc0", "0x7", "0x80000001"] {
            site.set_faults(&format!("C_Decrypt 1 {ckr} after"));
            let answer = keyring.unwrap(&wrapped, &aad());
            assert!(matches!(answer, Err(ProviderError::Rejected)), "{ckr}: {answer:?}");
            // The same answer to everything says nothing of the row.
            if !["0x40", "0x41", "0x42", "0x110"].contains(&ckr) {
                site.set_faults(&format!("C_Decrypt * {ckr} after"));
                let answer = keyring.unwrap(&wrapped, &aad());
                assert!(matches!(answer, Err(ProviderError::Unavailable(_))), "{ckr}: {answer:?}");
            }
        }
        site.set_faults("");
        assert!(opens(&keyring, &wrapped));
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

#[test]
fn closing_waits_for_calls_in_progress_and_closes_every_session() {
    SoftHsm::faulty("closing_waits_for_calls_in_progress_and_closes_every_session", |site| {
        let log = site.dir().join("log");
        site.set_faults(&format!("log {}", log.display()));
        let keyring = ready(site, "auto");
        site.set_faults(&format!("C_Encrypt * sleep 300\nlog {}", log.display()));
        let key = keyring.current().unwrap().id;
        thread::scope(|threads| {
            let calls: Vec<_> = (0..3).map(|_| threads.spawn(|| keyring.wrap(key, &dek(), &aad()))).collect();
            thread::sleep(Duration::from_millis(100));
            keyring.close();
            for call in calls {
                call.join().unwrap().expect("it was in progress");
            }
        });
        let said = fs::read_to_string(&log).unwrap();
        let count = |call: &str| said.lines().filter(|line| *line == format!("{call} 0x0")).count();
        assert!(count("C_OpenSession") >= 3, "{said}");
        assert_eq!(count("C_OpenSession"), count("C_CloseSession"), "{said}");
        assert_eq!(count("C_Finalize"), 0);
        // Again, and for everything else.
        keyring.close();
        for error in [keyring.wrap(key, &dek(), &aad()).unwrap_err(), keyring.current().unwrap_err()] {
            let ProviderError::Unavailable(source) = error else { panic!("{error}") };
            assert!(matches!(source.downcast_ref(), Some(Error::Closed)), "{source}");
        }
        assert!(matches!(keyring.report(), Err(Error::Closed)));
        assert_eq!(said, fs::read_to_string(&log).unwrap(), "nothing was asked of the token any more");
    });
}
