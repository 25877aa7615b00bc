//! The keyring on a real token: making a key, wrapping by every route, outages, PINs, planted objects.
#![allow(missing_docs, clippy::unwrap_used, reason = "tests")]

#[path = "support/softhsm.rs"]
mod softhsm;

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use cryptoki::context::{CInitializeArgs, CInitializeFlags, Pkcs11};
use cryptoki::mechanism::Mechanism;
use cryptoki::object::{Attribute, KeyType, ObjectClass};
use cryptoki::session::{SessionState, UserType};
use cryptoki::types::AuthPin;
use hardwrap::hsm::{Choice, Error, Health, Keyring, Made, PinError, Route, Settings, Tidied, Verdict};
use hardwrap::provider::{Aad, KeyId, KeyProvider, ProviderError, WrappedBytes, WrappedDek};
use hardwrap::secret::Dek;
use softhsm::{PIN, Site, SoftHsm, softhsm_module};

fn keyring(uri: &str) -> Keyring {
    Keyring::new(Settings::new(uri.parse().unwrap())).unwrap()
}

fn named(uri: &str, name: &str) -> Keyring {
    Keyring::new(Settings { keyring: name.to_owned(), ..Settings::new(uri.parse().unwrap()) }).unwrap()
}

fn ready(site: &Site, choice: &str) -> Keyring {
    let keyring = keyring(&site.uri());
    keyring.init(choice.parse().unwrap()).unwrap();
    keyring
}

fn dek(fill: u8) -> Dek {
    Dek::init(|bytes| {
        bytes.fill(fill);
        Ok::<_, ()>(())
    })
    .unwrap()
}

fn aad(text: &str) -> Aad {
    Aad::new(text.as_bytes().to_vec())
}

fn wrap(keyring: &Keyring, fill: u8) -> Result<WrappedDek, ProviderError> {
    keyring.wrap(keyring.current()?.id, &dek(fill), &aad("here"))
}

/// The error below a provider's `Unavailable`.
fn cause(error: &ProviderError) -> &Error {
    match error {
        ProviderError::Unavailable(source) => source.downcast_ref().unwrap(),
        other => panic!("not unavailable: {other}"),
    }
}

/// The module as another part of this process sees it: what a host application may do to us.
fn host() -> Pkcs11 {
    let host = Pkcs11::new(softhsm_module()).unwrap();
    let _ = host.initialize(CInitializeArgs::new(CInitializeFlags::OS_LOCKING_OK));
    host
}

#[test]
fn a_key_is_made_once_and_found_again() {
    SoftHsm::isolated("a_key_is_made_once_and_found_again", |site| {
        let made = match keyring(&site.uri()).init(Choice::Auto).unwrap() {
            Made::Key(kid, Route::GcmCallerIv) => kid,
            other => panic!("SoftHSM2 takes A256GCMKW with our IV first: {other:?}"),
        };
        assert_eq!(made.generation(), 1);
        let again = keyring(&site.uri());
        assert_eq!(again.init(Choice::Auto).unwrap(), Made::Nothing(made, Route::GcmCallerIv));
        assert_eq!(again.current().unwrap().id, made);
        let report = again.report().unwrap();
        assert!(report.keys.len() == 1 && report.keys[0].works && report.keys[0].current);
        assert!(report.strangers.is_empty() && report.leftovers.is_empty());
    });
}

#[test]
fn every_route_of_this_token_wraps_unwraps_and_rejects() {
    SoftHsm::isolated("every_route_of_this_token_wraps_unwraps_and_rejects", |site| {
        for route in ["aes-gcm-caller-iv", "aes-kw-wrap"] {
            let mut settings = Settings::new(site.uri().parse().unwrap());
            settings.keyring = route.to_owned();
            let keyring = Keyring::new(settings).unwrap();
            keyring.init(route.parse().unwrap()).unwrap();
            let wrapped = wrap(&keyring, 7).unwrap();
            assert_eq!(keyring.unwrap(&wrapped, &aad("here")).unwrap().expose(), &[7; 32]);
            assert!(matches!(keyring.unwrap(&wrapped, &aad("there")), Err(ProviderError::Rejected)), "{route}");
            let length = match wrapped.bytes {
                WrappedBytes::A256Kw(bytes) => bytes.len(),
                WrappedBytes::A256GcmKw { bytes, .. } => bytes.len(),
            };
            for index in 0..length {
                let mut bad = wrapped.clone();
                match &mut bad.bytes {
                    WrappedBytes::A256Kw(bytes) => bytes[index] ^= 0x10,
                    WrappedBytes::A256GcmKw { bytes, .. } => bytes[index] ^= 0x10,
                }
                assert!(matches!(keyring.unwrap(&bad, &aad("here")), Err(ProviderError::Rejected)), "{route} {index}");
            }
            let other = WrappedDek { key: KeyId::new(9, [0; 6]), ..wrapped.clone() };
            assert!(matches!(keyring.unwrap(&other, &aad("here")), Err(ProviderError::UnknownKey(_))));
            // Asked again within the second in which the keyring is not read again: the same answer.
            assert!(matches!(keyring.unwrap(&other, &aad("here")), Err(ProviderError::UnknownKey(_))));
        }
    });
}

#[test]
fn routes_this_token_has_not_are_refused_by_name_with_the_reason() {
    SoftHsm::isolated("routes_this_token_has_not_are_refused_by_name_with_the_reason", |site| {
        for (route, why) in [("aes-kw-encrypt", "CKR_MECHANISM_INVALID"), ("aes-gcm-token-iv", "made no IV of its own")]
        {
            let error = keyring(&site.uri()).init(route.parse().unwrap()).unwrap_err();
            assert!(matches!(&error, Error::NoRoute(said) if said.contains(why)), "{route}: {error}");
        }
        assert_eq!(keyring(&site.uri()).count_objects().unwrap(), 0, "nothing is left of the trials");
    });
}

#[test]
fn the_master_key_cannot_be_taken_out() {
    SoftHsm::isolated("the_master_key_cannot_be_taken_out", |site| {
        let keyring = ready(site, "auto");
        let before = keyring.count_objects().unwrap();
        let probes = keyring.probe_custody(keyring.current().unwrap().id).unwrap();
        let said: Vec<_> = probes.into_iter().map(|probe| probe.verdict).collect();
        let refused = [
            "CKR_ATTRIBUTE_SENSITIVE",
            "CKR_KEY_UNEXTRACTABLE",
            "CKR_ACTION_PROHIBITED",
            "CKR_ATTRIBUTE_READ_ONLY",
            "CKR_ATTRIBUTE_READ_ONLY",
        ];
        assert_eq!(said, refused.map(|ckr| Verdict::Refused(ckr.to_owned())));
        assert_eq!(keyring.count_objects().unwrap(), before);
    });
}

#[test]
fn a_planted_public_key_is_reported_and_never_used() {
    SoftHsm::isolated("a_planted_public_key_is_reported_and_never_used", |site| {
        let host = host();
        let slot = host.get_slots_with_initialized_token().unwrap()[0];
        let session = host.open_rw_session(slot).unwrap();
        let plant = |id: &[u8]| {
            let template = [
                Attribute::Class(ObjectClass::SECRET_KEY),
                Attribute::KeyType(KeyType::AES),
                Attribute::Token(true),
                Attribute::Private(false),
                Attribute::Label(b"hardwrap".to_vec()),
                Attribute::Id(id.to_vec()),
                Attribute::Value(vec![0x41; 32]),
                Attribute::Encrypt(true),
                Attribute::Decrypt(true),
            ];
            session.create_object(&template).unwrap();
        };
        // Without login, before there is any key: it is never taken for one.
        plant(b"planted1");
        let keyring = keyring(&site.uri());
        assert!(matches!(keyring.current(), Err(ProviderError::NoCurrentKey)));
        let kid = match keyring.init(Choice::Auto).unwrap() {
            Made::Key(kid, _) => kid,
            other => panic!("{other:?}"),
        };
        // And some that have the real key's id, and one with the last generation there is.
        for _ in 0..6 {
            plant(kid.as_bytes());
        }
        plant(&[0xff; 8]);
        let report = keyring.report().unwrap();
        assert_eq!(report.strangers.len(), 8);
        assert!(report.strangers.iter().all(|stranger| stranger.why.contains("public")), "{:?}", report.strangers);
        assert_eq!(keyring.current().unwrap().id, kid);
        let wrapped = wrap(&keyring, 1).unwrap();
        assert_eq!(keyring.unwrap(&wrapped, &aad("here")).unwrap().expose(), &[1; 32]);
        // A fresh process finds them in another order.
        let mut settings = Settings::new(site.uri().parse().unwrap());
        settings.keyring = "hardwrap".to_owned();
        host.finalize().unwrap();
        let fresh = Keyring::new(settings).unwrap();
        assert_eq!(fresh.unwrap(&wrap(&fresh, 2).unwrap(), &aad("here")).unwrap().expose(), &[2; 32]);
        // Nor do they keep a new key from being made.
        let mut other = Settings::new(site.uri().parse().unwrap());
        other.keyring = "other".to_owned();
        assert!(matches!(Keyring::new(other).unwrap().init(Choice::Auto), Ok(Made::Key(..))));
    });
}

#[test]
fn an_active_key_that_is_gone_is_never_replaced_in_silence() {
    SoftHsm::isolated("an_active_key_that_is_gone_is_never_replaced_in_silence", |site| {
        let keyring = ready(site, "auto");
        let wrapped = wrap(&keyring, 1).unwrap();
        // Somebody with the PIN destroys the key: this process is logged in, and so is its host.
        let host = host();
        let slot = host.get_slots_with_initialized_token().unwrap()[0];
        let session = host.open_rw_session(slot).unwrap();
        let keys = session.find_objects(&[Attribute::Class(ObjectClass::SECRET_KEY), Attribute::Token(true)]).unwrap();
        assert_eq!(keys.len(), 1);
        session.destroy_object(keys[0]).unwrap();
        let error = keyring.init(Choice::Auto).unwrap_err();
        assert!(error.to_string().contains("stands in the keyring record"), "{error}");
        assert!(matches!(keyring.unwrap(&wrapped, &aad("here")), Err(ProviderError::Unavailable(_))));
        let report = keyring.report().unwrap();
        assert!(report.keys.len() == 1 && !report.keys[0].works);
    });
}

#[test]
fn a_private_key_that_the_record_does_not_name_is_not_used() {
    SoftHsm::isolated("a_private_key_that_the_record_does_not_name_is_not_used", |site| {
        let keyring = keyring(&site.uri());
        keyring.connect().unwrap();
        let host = host();
        let slot = host.get_slots_with_initialized_token().unwrap()[0];
        let session = host.open_rw_session(slot).unwrap();
        let template = [
            Attribute::Token(true),
            Attribute::Private(true),
            Attribute::Sensitive(true),
            Attribute::Extractable(false),
            Attribute::ValueLen(32.into()),
            Attribute::Label(b"hardwrap".to_vec()),
            Attribute::Id(vec![0, 1, 1, 1, 1, 1, 1, 1]),
            Attribute::Encrypt(true),
            Attribute::Decrypt(true),
        ];
        session.generate_key(&Mechanism::AesKeyGen, &template).unwrap();
        let report = keyring.report().unwrap();
        assert!(report.strangers[0].why.contains("record does not name it"), "{:?}", report.strangers);
        assert!(matches!(keyring.current(), Err(ProviderError::NoCurrentKey)));
        // A new key does not take the generation of the stranger.
        assert!(matches!(keyring.init(Choice::Auto).unwrap(), Made::Key(kid, _) if kid.generation() == 2));
    });
}

#[test]
fn a_token_taken_away_is_unavailable_and_work_goes_on_when_it_is_back() {
    SoftHsm::isolated("a_token_taken_away_is_unavailable_and_work_goes_on_when_it_is_back", |site| {
        for choice in ["aes-gcm", "aes-kw"] {
            let mut settings = Settings::new(site.uri().parse().unwrap());
            settings.keyring = choice.to_owned();
            let keyring = Keyring::new(settings).unwrap();
            keyring.init(choice.parse().unwrap()).unwrap();
            let wrapped = wrap(&keyring, 3).unwrap();
            site.take_away();
            for _ in 0..3 {
                assert!(matches!(wrap(&keyring, 3), Err(ProviderError::Unavailable(_))));
                assert!(matches!(keyring.unwrap(&wrapped, &aad("here")), Err(ProviderError::Unavailable(_))));
                thread::sleep(Duration::from_millis(400));
            }
            site.put_back();
            let back = Instant::now();
            let opened = loop {
                match keyring.unwrap(&wrapped, &aad("here")) {
                    Ok(opened) => break opened,
                    Err(error) => assert!(matches!(error, ProviderError::Unavailable(_)), "{error}"),
                }
                assert!(back.elapsed() < Duration::from_secs(5), "still away");
                thread::sleep(Duration::from_millis(50));
            };
            assert_eq!(opened.expose(), &[3; 32]);
            wrap(&keyring, 4).unwrap();
        }
    });
}

#[test]
fn what_a_host_application_does_to_the_session_is_recovered_from() {
    SoftHsm::isolated("what_a_host_application_does_to_the_session_is_recovered_from", |site| {
        let keyring = ready(site, "aes-kw");
        let wrapped = wrap(&keyring, 5).unwrap();
        let works = |what: &str| {
            assert_eq!(keyring.unwrap(&wrapped, &aad("here")).expect(what).expose(), &[5; 32]);
            wrap(&keyring, 6).expect(what);
        };
        works("before");
        let host = host();
        let slot = host.get_slots_with_initialized_token().unwrap()[0];
        // CKR_USER_NOT_LOGGED_IN, or handles of private objects that are gone.
        host.open_ro_session(slot).unwrap().logout().unwrap();
        works("after C_Logout");
        // CKR_CRYPTOKI_NOT_INITIALIZED.
        host.finalize().unwrap();
        works("after C_Finalize");
    });
}

/// Makes the keyring in another process, so that this one meets the token logged out and uninitialised.
fn made_elsewhere(site: &Site) {
    let config = site.dir().join("elsewhere.toml");
    let text = format!(
        "environment = \"test\"\n[token]\nuri = \"{}\"\n[database]\nurl = \"sqlite://{}/elsewhere.db\"\n",
        site.uri(),
        site.dir().display()
    );
    fs::write(&config, text).unwrap();
    let mut init = site.command(env!("CARGO_BIN_EXE_hardwrap"));
    init.arg("--config").arg(&config).arg("init");
    init.env_remove("HARDWRAP_TEST_DIR").env_remove("HARDWRAP_FAULT").env_remove("HARDWRAP_FAULT_MODULE");
    let done = init.output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}

#[test]
fn a_refused_pin_is_never_retried() {
    SoftHsm::faulty("a_refused_pin_is_never_retried", |site| {
        made_elsewhere(site);
        let log = site.dir().join("calls");
        site.set_faults(&format!("log {}", log.display()));
        fs::write(site.pin_file(), "wrong").unwrap();
        let keyring = keyring(&site.faulty_uri());
        for _ in 0..3 {
            for error in [keyring.current().unwrap_err(), wrap(&keyring, 1).unwrap_err()] {
                let said = format!("{:#}", cause(&error));
                assert!(said.contains("CKR_PIN_INCORRECT") || said.contains("a moment ago"), "{said}");
            }
            thread::sleep(Duration::from_millis(1100));
        }
        assert!(matches!(keyring.init(Choice::Auto), Err(Error::Connecting(_) | Error::Down(_))));
        let calls = |name: &str| fs::read_to_string(&log).unwrap().matches(name).count();
        assert_eq!(calls("C_Login "), 1, "one attempt, on all paths together");
        assert_eq!(calls("C_Finalize "), 0, "a PIN is no reason to re-initialise the module (B05)");
        // The right PIN now in the file: at COUNT_LOW a program does not log in, a person has to.
        fs::write(site.pin_file(), PIN).unwrap();
        thread::sleep(Duration::from_millis(1100));
        assert!(keyring.current().is_err());
        assert_eq!(calls("C_Login "), 1);
        let error = keyring_error(site);
        let Error::Connecting(inner) = &error else { panic!("{error}") };
        assert!(matches!(**inner, Error::Pin(PinError::CountLow | PinError::Refused(_))), "{error}");
    });
}

fn keyring_error(site: &Site) -> Error {
    thread::sleep(Duration::from_millis(1100));
    keyring(&site.faulty_uri()).connect().unwrap_err()
}

#[test]
fn a_token_close_to_locking_is_not_logged_in_to() {
    SoftHsm::faulty("a_token_close_to_locking_is_not_logged_in_to", |site| {
        made_elsewhere(site);
        let log = site.dir().join("calls");
        for (flags, why) in [("final", "FINAL_TRY"), ("locked", "LOCKED"), ("low", "COUNT_LOW")] {
            site.set_faults(&format!("pin-flags {flags}\nlog {}", log.display()));
            let error = keyring_error(site);
            assert!(error.to_string().contains(why), "{flags}: {error}");
        }
        assert!(!fs::read_to_string(&log).unwrap().contains("C_Login "));
    });
}

#[test]
fn what_a_crash_left_is_tidied_up_and_nothing_else_is_touched() {
    SoftHsm::isolated("what_a_crash_left_is_tidied_up_and_nothing_else_is_touched", |site| {
        // First, so that the keyring does not re-initialise it under our hands.
        let host = host();
        let keyring = ready(site, "auto");
        let wrapped = wrap(&keyring, 1).unwrap();
        assert!(keyring.clean(|_| false).unwrap().is_empty());
        let slot = host.get_slots_with_initialized_token().unwrap()[0];
        let session = host.open_rw_session(slot).unwrap();
        let leave = |id: &[u8], kind: KeyType, private: bool| {
            let template = [
                Attribute::Class(ObjectClass::SECRET_KEY),
                Attribute::KeyType(kind),
                Attribute::Token(true),
                Attribute::Private(private),
                Attribute::Label(b"hardwrap.new".to_vec()),
                Attribute::Id(id.to_vec()),
                Attribute::Value(vec![0x41; 32]),
            ];
            session.create_object(&template).unwrap();
        };
        let [nothing, named, public, generic] = [[0, 2, 0, 0, 0, 0, 0, 1], [0, 2, 0, 0, 0, 0, 0, 2], [3; 8], [4; 8]];
        leave(&nothing, KeyType::AES, true);
        leave(&named, KeyType::AES, true);
        leave(&public, KeyType::AES, false);
        leave(&generic, KeyType::GENERIC_SECRET, true);
        leave(b"odd", KeyType::AES, true);
        // The recorded key itself, as a crash between recording and relabelling leaves it.
        let kid = wrapped.key;
        let made = session.find_objects(&[Attribute::Id(kid.as_bytes().to_vec())]).unwrap();
        session.update_attributes(made[0], &[Attribute::Label(b"hardwrap.new".to_vec())]).unwrap();

        let mut done = keyring.clean(|kid| kid == KeyId::from(named)).unwrap();
        done.sort_by_key(|one| one.id.clone());
        let done: Vec<(String, Tidied)> = done.into_iter().map(|one| (one.id, one.outcome)).collect();
        let find = |id: &[u8]| done.iter().find(|(of, _)| *of == hex::encode(id)).unwrap().1;
        assert_eq!(done.len(), 4);
        assert_eq!(
            (find(kid.as_bytes()), find(&nothing), find(b"odd")),
            (Tidied::Relabelled, Tidied::Destroyed, Tidied::Destroyed)
        );
        assert!(matches!(find(&named), Tidied::Left(why) if why.contains("a database names it")));
        // What hardwrap did not make is no leftover: it is reported, and left.
        let strangers = keyring.report().unwrap().strangers;
        for (other, private) in [(public, false), (generic, true)] {
            let stranger = strangers.iter().find(|one| one.id == hex::encode(other)).unwrap();
            assert!(stranger.private == private && stranger.why.contains("hardwrap did not make it"), "{stranger:?}");
        }
        let left = session.find_objects(&[Attribute::Label(b"hardwrap.new".to_vec())]).unwrap();
        assert_eq!(left.len(), 3);
        assert_eq!(keyring.unwrap(&wrapped, &aad("here")).unwrap().expose(), &[1; 32]);
        assert!(matches!(keyring.init(Choice::Auto).unwrap(), Made::Nothing(found, _) if found == kid));
    });
}

#[test]
fn every_route_is_tried_and_timed_and_leaves_nothing() {
    SoftHsm::isolated("every_route_is_tried_and_timed_and_leaves_nothing", |site| {
        let keyring = ready(site, "auto");
        let before = keyring.count_objects().unwrap();
        let trials = keyring.try_routes().unwrap();
        assert_eq!(trials.iter().map(|trial| trial.route).collect::<Vec<_>>(), Route::ALL);
        let works: Vec<bool> = trials.iter().map(|trial| trial.outcome.is_ok()).collect();
        assert_eq!(works, [false, true, true, false], "{trials:?}");
        assert!(trials.iter().filter_map(|trial| trial.outcome.as_ref().ok()).all(|timing| !timing.wrap.is_zero()));
        let said = trials[0].outcome.as_ref().unwrap_err();
        assert!(said.contains("CKR_"), "{said}");
        assert_eq!(keyring.count_objects().unwrap(), before);
    });
}

#[test]
fn the_report_says_how_each_recorded_key_is() {
    SoftHsm::isolated("the_report_says_how_each_recorded_key_is", |site| {
        // First, so that the keyring does not re-initialise it under our hands.
        let host = host();
        let keyring = ready(site, "auto");
        let health = || keyring.report().unwrap().keys[0].health;
        assert_eq!(health(), Health::Works);
        let kid = keyring.current().unwrap().id;
        let slot = host.get_slots_with_initialized_token().unwrap()[0];
        let session = host.open_rw_session(slot).unwrap();
        let impostor = |local: bool| {
            let mut template = vec![
                Attribute::Class(ObjectClass::SECRET_KEY),
                Attribute::KeyType(KeyType::AES),
                Attribute::Token(true),
                Attribute::Private(true),
                Attribute::Sensitive(true),
                Attribute::Extractable(false),
                Attribute::Label(b"hardwrap".to_vec()),
                Attribute::Id(kid.as_bytes().to_vec()),
                Attribute::Encrypt(true),
                Attribute::Decrypt(true),
            ];
            if local {
                template.push(Attribute::ValueLen(32.into()));
                return session.generate_key(&Mechanism::AesKeyGen, &template).unwrap();
            }
            template.push(Attribute::Value(vec![0x41; 32]));
            session.create_object(&template).unwrap()
        };
        // What is not made on the token is no twin.
        let imported = impostor(false);
        assert_eq!(health(), Health::Works);
        let twin = impostor(true);
        assert_eq!(health(), Health::Doubled);
        let real = session.find_objects(&[Attribute::Id(kid.as_bytes().to_vec())]).unwrap();
        for object in real {
            if object != imported && object != twin {
                session.destroy_object(object).unwrap();
            }
        }
        assert_eq!(health(), Health::CanaryFails);
        session.destroy_object(twin).unwrap();
        assert!(
            matches!(health(), Health::WrongAttributes(why) if why.contains("not always sensitive")),
            "{:?}",
            health()
        );
        session.destroy_object(imported).unwrap();
        assert_eq!(health(), Health::Missing);
    });
}

#[test]
fn a_host_application_keeps_its_module_session_and_login() {
    SoftHsm::isolated("a_host_application_keeps_its_module_session_and_login", |site| {
        let host = host();
        let slot = host.get_slots_with_initialized_token().unwrap()[0];
        let session = host.open_rw_session(slot).unwrap();
        session.login(UserType::User, Some(&AuthPin::new(softhsm::PIN.into()))).unwrap();
        let keyring = ready(site, "auto");
        let other = named(&site.uri(), "other");
        other.init(Choice::Auto).unwrap();
        // Two keyrings and a host on one module, side by side.
        for fill in 1..5 {
            for keyring in [&keyring, &other] {
                let wrapped = wrap(keyring, fill).unwrap();
                assert_eq!(keyring.unwrap(&wrapped, &aad("here")).unwrap().expose(), &[fill; 32]);
            }
        }
        other.close();
        wrap(&keyring, 1).unwrap();
        keyring.close();
        drop(keyring);
        assert_eq!(session.get_session_info().unwrap().session_state(), SessionState::RwUser);
        assert!(!session.find_objects(&[Attribute::Class(ObjectClass::SECRET_KEY)]).unwrap().is_empty());
        // Where only we were logged in, nobody is any more.
        let again = ready(site, "auto");
        session.close().unwrap();
        again.close();
        let session = host.open_rw_session(slot).unwrap();
        assert_eq!(session.get_session_info().unwrap().session_state(), SessionState::RwPublic);
    });
}
