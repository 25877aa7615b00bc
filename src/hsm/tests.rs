//! What only this room can test: keys that were not made on the token, and routes by themselves.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use cryptoki::object::{Attribute, KeyType, ObjectClass, ObjectHandle};
use serde::Deserialize;

use super::pool::Pool;
use super::route::Access;
use super::{Choice, Error, Keyring, Route, Settings};
use crate::column::{Column, Row};
use crate::envelope::Envelope;
use crate::provider::ProviderError;
use crate::softhsm::SoftHsm;

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
