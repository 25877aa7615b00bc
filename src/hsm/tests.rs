//! What only this room can test: keys that were not made on the token, and routes by themselves.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use cryptoki::object::{Attribute, KeyType, ObjectClass, ObjectHandle};
use serde::Deserialize;

use super::module::Module;
use super::pool::Pool;
use super::route::Access;
use super::{Choice, Error, Keyring, Route, Settings};
use crate::column::{Column, Row};
use crate::envelope::Envelope;
use crate::keeper::{self, Keeper};
use crate::provider::{Aad, KeyProvider, ProviderError};
use crate::secret::Dek;
use crate::softhsm::SoftHsm;
use crate::store;

#[derive(Deserialize)]
struct Case {
    name: String,
    kek_hex: String,
    kid: String,
    identifier: String,
    row: Option<String>,
    dek_hex: Option<String>,
    envelope: String,
    expect: String,
}

/// Puts a KEK of the vectors into the session; no keyring would ever count it.
fn import(access: Access<'_>, kek: &str, route: Route) -> ObjectHandle {
    let mut template = vec![
        Attribute::Class(ObjectClass::SECRET_KEY),
        Attribute::KeyType(KeyType::AES),
        Attribute::Token(false),
        Attribute::Private(true),
        Attribute::Value(hex::decode(kek).expect("hex")),
    ];
    template.extend(route.usage());
    access.session.create_object(&template).expect("imported")
}

#[test]
fn the_token_unwraps_what_another_implementation_wrapped() {
    SoftHsm::isolated("hsm::tests::the_token_unwraps_what_another_implementation_wrapped", |site| {
        let pool = Pool::new(Settings::new(site.uri().parse().expect("a uri"))).expect("a pool");
        let cases: Vec<Case> =
            serde_json::from_str(include_str!("../../tests/vectors/hw1.json")).expect("the vectors are JSON");
        let (mut opened, mut refused) = (0, 0);
        for case in &cases {
            // What is refused before a key is asked has no wrapped DEK to try.
            let Ok(envelope) = Envelope::parse(&case.envelope) else { continue };
            let wrapped = &envelope.front.wrapped;
            if wrapped.key.to_string() != case.kid {
                continue;
            }
            let column = Column::new("t", "c", "id", case.identifier.clone()).expect("well named");
            let column = if case.row.is_some() { column.bound_to("id").expect("well named") } else { column };
            let row = case.row.as_deref().map(|row| Row::try_from(row).expect("a row"));
            let aad = column.at(row.as_ref()).expect("a place").context().aad();
            let route = if wrapped.alg() == Route::KwWrap.alg() { Route::KwWrap } else { Route::GcmCallerIv };
            let outcome = pool
                .with(|lease| {
                    let key = import(lease.access(), &case.kek_hex, route);
                    let outcome = match route.unwrap(lease.access(), key, &wrapped.bytes, &aad) {
                        // Not judged by a canary here: this key has none.
                        Err(Error::Call { .. }) => Ok(Err(ProviderError::Rejected)),
                        other => other,
                    };
                    lease.access().session.destroy_object(key)?;
                    outcome
                })
                .expect("the token answers");
            match (&case.dek_hex, outcome) {
                (Some(dek), outcome) => {
                    assert_eq!(hex::encode(outcome.expect(&case.name).expose()), *dek, "{}", case.name);
                    opened += 1;
                }
                (None, Err(ProviderError::Rejected)) => {
                    assert_eq!(case.expect, "Rejected", "{}", case.name);
                    refused += 1;
                }
                // The DEK is right and another part is not: the left wing's vectors show those.
                (None, _) => assert_ne!(case.expect, "open", "{}", case.name),
            }
        }
        assert_eq!(opened, 61);
        assert!(refused >= 4, "{refused}");
    });
}

#[test]
fn the_token_wraps_to_the_bytes_of_rfc_3394() {
    SoftHsm::isolated("hsm::tests::the_token_wraps_to_the_bytes_of_rfc_3394", |site| {
        let pool = Pool::new(Settings::new(site.uri().parse().expect("a uri"))).expect("a pool");
        let kek = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f";
        let dek = crate::secret::Dek::init(|bytes| {
            bytes.copy_from_slice(&(100..132).collect::<Vec<u8>>());
            Ok::<_, Error>(())
        })
        .expect("filled");
        let aad = crate::provider::Aad::new(b"hw1-dek\0x".to_vec());
        let by_token = pool
            .with(|lease| {
                let key = import(lease.access(), kek, Route::KwWrap);
                Route::KwWrap.wrap(lease.access(), key, &dek, &aad)
            })
            .expect("wrapped");
        let mut by_software = [0; 72];
        aes_kw::KeyInit::new_from_slice(&hex::decode(kek).expect("hex"))
            .map(|kek: aes_kw::KwAes256| {
                kek.wrap_key(crate::provider::BoundDek::new(&dek, &aad).expose(), &mut by_software).map(|_| ())
            })
            .expect("32 bytes")
            .expect("wrapped");
        assert_eq!(by_token, crate::provider::WrappedBytes::A256Kw(by_software));
    });
}

/// NSS's soft token, with a database of its own and no password.
fn nss(directory: &Path) -> Settings {
    let module = ["/usr/lib/x86_64-linux-gnu/libsoftokn3.so", "/usr/lib/x86_64-linux-gnu/nss/libsoftokn3.so"]
        .into_iter()
        .map(PathBuf::from)
        .find(|path| path.exists())
        .expect("libsoftokn3.so is there: install libnss3");
    let made = Command::new("certutil")
        .args(["-N", "--empty-password", "-d"])
        .arg(format!("sql:{}", directory.display()))
        .status()
        .expect("certutil runs: install libnss3-tools");
    assert!(made.success());
    let uri = format!("pkcs11:token=NSS%20Certificate%20DB?module-path={}", module.display());
    let mut settings = Settings::new(uri.parse().expect("a uri"));
    settings.module_arguments =
        Some(format!("configdir='sql:{}' certPrefix='' keyPrefix='' secmod='secmod.db' flags=", directory.display()));
    settings
}

#[test]
fn nss_wraps_by_route_one_and_three() {
    SoftHsm::isolated("hsm::tests::nss_wraps_by_route_one_and_three", |site| {
        let directory = site.dir().join("nss");
        fs::create_dir(&directory).expect("made");
        let pool = Pool::new(nss(&directory)).expect("a pool");
        for route in [Route::KwEncrypt, Route::GcmCallerIv, Route::KwWrap] {
            let works = pool.with(|lease| route.works(lease.access()));
            works.unwrap_or_else(|error| panic!("{route}: {error}"));
        }
    });
}

#[test]
fn nss_keeps_no_data_objects_and_is_refused_before_a_key_is_made() {
    SoftHsm::isolated("hsm::tests::nss_keeps_no_data_objects_and_is_refused_before_a_key_is_made", |site| {
        let directory = site.dir().join("nss");
        fs::create_dir(&directory).expect("made");
        let keyring = Keyring::new(nss(&directory)).expect("a keyring");
        let before = keyring.count_objects().expect("counted");
        let error = keyring.init(Choice::Auto).expect_err("no data objects");
        assert!(matches!(error, Error::NoDataObjects(_)), "{error}");
        assert_eq!(keyring.count_objects().expect("counted"), before);
    });
}

/// Runs `work` in a forked child and says whether it came to its end there. The child never unwinds into the test's own
/// frames, and ends without running what the test would run at its end.
#[expect(unsafe_code, reason = "fork, wait, and leave without destructors")]
fn in_child(work: impl FnOnce()) -> bool {
    // SAFETY: the child runs `work` and leaves; whether threads of the parent held locks is what the tests are about.
    unsafe {
        match libc::fork() {
            0 => {
                // A child that waits for ever is a failure, and no hanging test.
                libc::alarm(20);
                let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).is_ok();
                libc::_exit(i32::from(!done));
            }
            child => {
                assert!(child > 0);
                let mut status = 0;
                assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
                libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0
            }
        }
    }
}

fn round_trip(keyring: &Keyring) {
    let aad = Aad::new(b"here".to_vec());
    let dek = Dek::init(|bytes| {
        bytes.fill(7);
        Ok::<_, ProviderError>(())
    })
    .expect("filled");
    let wrapped = keyring.wrap(keyring.current().expect("a key").id, &dek, &aad).expect("wrapped");
    assert_eq!(keyring.unwrap(&wrapped, &aad).expect("unwrapped").expose(), dek.expose());
}

fn made(uri: &str, sessions: usize) -> Keyring {
    let settings = Settings { sessions, ..Settings::new(uri.parse().expect("a uri")) };
    let keyring = Keyring::new(settings).expect("a keyring");
    keyring.init(Choice::Auto).expect("a key");
    keyring
}

#[test]
fn a_forked_child_and_its_parent_both_go_on() {
    SoftHsm::isolated("hsm::tests::a_forked_child_and_its_parent_both_go_on", |site| {
        let keyring = made(&site.uri(), 2);
        round_trip(&keyring);
        let reserved = || keyring.report().expect("a report").keys[0].reserved;
        let before = reserved();
        assert!(in_child(|| {
            round_trip(&keyring);
            // And so does its own child, and a keyring that is opened here.
            assert!(in_child(|| round_trip(&keyring)));
            round_trip(&made(&site.uri(), 1));
            round_trip(&keyring);
        }));
        assert!(before < reserved(), "the child reserved wraps of its own");
        round_trip(&keyring);
        // A child that only drops it takes nothing away.
        let keyring = std::sync::Arc::new(keyring);
        assert!(in_child(|| drop(std::sync::Arc::into_inner(keyring.clone()))));
        round_trip(&keyring);
        assert!(in_child(|| keyring.close()));
        round_trip(&keyring);
    });
}

#[test]
fn a_child_of_a_parent_that_was_in_the_middle_of_everything_goes_on() {
    SoftHsm::isolated("hsm::tests::a_child_of_a_parent_that_was_in_the_middle_of_everything_goes_on", |site| {
        let keyring = made(&site.uri(), 4);
        // Locks of ours that other threads of the parent hold at the fork are held in the child for ever; so is the
        // module's own where it has one, so SoftHSM2 itself is asked nothing in that moment.
        let module = Module::load(&keyring.pool.settings().uri.module, None).expect("loaded");
        let barrier = std::sync::Barrier::new(2);
        std::thread::scope(|threads| {
            threads.spawn(|| {
                let _gate = Module::here(module).enter().expect("entered");
                keyring.pool.with_locked(|| {
                    barrier.wait();
                    barrier.wait();
                });
            });
            barrier.wait();
            let child = in_child(|| round_trip(&keyring));
            barrier.wait();
            assert!(child);
        });
        round_trip(&keyring);
    });
}

#[test]
fn a_module_that_notices_forks_is_initialised_in_the_child() {
    SoftHsm::faulty("hsm::tests::a_module_that_notices_forks_is_initialised_in_the_child", |site| {
        let log = site.dir().join("log");
        site.set_faults(&format!("notices-forks\nlog {}", log.display()));
        let keyring = made(&site.faulty_uri(), 2);
        round_trip(&keyring);
        fs::write(&log, "").expect("emptied");
        assert!(in_child(|| {
            round_trip(&keyring);
            let said = fs::read_to_string(&log).expect("a log");
            assert!(said.starts_with("C_Initialize 0x0\n"), "{said}");
            assert!(said.contains("C_Login 0x0"), "{said}");
            assert!(!said.contains("0xb3") && !said.contains("0x190"), "no call too many: {said}");
        }));
        round_trip(&keyring);
    });
}

#[test]
fn a_pin_refused_in_the_parent_is_not_tried_in_the_child() {
    SoftHsm::faulty("hsm::tests::a_pin_refused_in_the_parent_is_not_tried_in_the_child", |site| {
        let log = site.dir().join("log");
        site.set_faults(&format!("notices-forks\nC_Login * 0xa0\nlog {}", log.display()));
        let keyring = Keyring::new(Settings::new(site.faulty_uri().parse().expect("a uri"))).expect("a keyring");
        assert!(keyring.connect().is_err());
        assert!(in_child(|| assert!(keyring.connect().is_err())));
        let said = fs::read_to_string(&log).expect("a log");
        assert_eq!(said.matches("C_Login").count(), 1, "{said}");
    });
}

#[test]
fn a_child_seals_and_opens_and_never_touches_its_parents_database() {
    SoftHsm::isolated("hsm::tests::a_child_seals_and_opens_and_never_touches_its_parents_database", |site| {
        let column = || Column::new("t", "c", "id", "t:c").expect("well named");
        let url = format!("sqlite://{}/app.db", site.dir().display());
        let builder =
            || Keeper::builder(site.uri().parse().expect("a uri"), url.parse().expect("a url")).columns([column()]);
        let mut shell = std::process::Command::new("sqlite3");
        shell.arg(site.dir().join("app.db")).arg("CREATE TABLE t (id INTEGER PRIMARY KEY, c TEXT)");
        assert!(shell.status().expect("install sqlite3").success());
        let (keeper, _) = builder().init(Choice::Auto).expect("made");
        let sealed = keeper.seal(column(), (), b"value").expect("sealed");
        let forked = |outcome: Result<(), keeper::Error>| {
            assert!(matches!(outcome, Err(keeper::Error::Store(store::Error::Forked))), "{outcome:?}");
        };
        let files = || fs::read_dir(site.dir()).expect("a directory").count();
        let before = files();
        let keeper = std::sync::Arc::new(keeper);
        assert!(in_child(|| {
            assert_eq!(keeper.open_value(column(), (), &sealed).expect("opened").expose(), b"value");
            forked(keeper.check());
            // Nor by a connection of its own: SQLite would take no locks for it.
            forked(builder().open().map(drop));
            drop(std::sync::Arc::into_inner(keeper.clone()));
        }));
        assert_eq!(files(), before, "the log and its index are still there");
        keeper.check().expect("all is well");
        // Forked before it is opened, a child has a database like any process.
        drop(keeper);
        assert!(in_child(|| builder().open().expect("opened").check().expect("all is well")));
        builder().open().expect("opened");
    });
}
