//! The keyring record: what is true of a keyring, kept on the token as private data objects, one for each fact, so
//! that commands run from different databases never overwrite each other.
//!
//! A change writes the new object, then destroys the old one, because SoftHSM2 refuses to change `CKA_VALUE`. A crash
//! between the two leaves duplicates, which merge to the strictest. Objects that are not private are never read:
//! anyone who can reach the token can plant those.

use std::collections::{BTreeMap, BTreeSet};

use cryptoki::error::RvError;
use cryptoki::object::{Attribute, AttributeType, ObjectClass, ObjectHandle};
use cryptoki::session::Session;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::{Ckr, Error, Route};
use crate::provider::{KeyId, WrappedBytes};

/// The state of a master key (SP 800-57 part 1 §7), in order of strictness.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// May not wrap yet.
    PreActive,
    /// May wrap and unwrap.
    Active,
    /// Only unwraps.
    Deactivated,
    /// Does nothing, and can be brought back.
    Retired,
    /// Gone from the token.
    Destroyed,
}

impl State {
    /// The name in the record and in output.
    pub fn name(self) -> &'static str {
        match self {
            Self::PreActive => "pre-active",
            Self::Active => "active",
            Self::Deactivated => "deactivated",
            Self::Retired => "retired",
            Self::Destroyed => "destroyed",
        }
    }
}

/// What the record says of one key.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct KeyFact {
    /// Its id.
    pub kid: KeyId,
    /// How it wraps.
    pub route: Route,
    /// Its state.
    pub state: State,
    /// When it was made.
    pub made: Timestamp,
    /// When it became active.
    pub activated: Option<Timestamp>,
    /// What its canary is.
    pub(super) canary: Canary,
}

/// A random block wrapped under a key when it was made. That it still unwraps to the same block proves that the key
/// is the one the record means, and that the token works.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Canary {
    pub(super) wrapped: WrappedBytes,
    /// SHA-256 of the block.
    pub(super) digest: [u8; 32],
}

/// Everything the record says.
#[derive(Clone, Debug, Default)]
pub(super) struct Record {
    pub(super) keys: BTreeMap<KeyId, KeyFact>,
    /// Identities of the databases that use this keyring, with the time each was first noted.
    pub(super) databases: BTreeMap<String, Timestamp>,
    /// Reservations of wraps, by key.
    uses: BTreeMap<KeyId, Vec<(ObjectHandle, Reservation)>>,
}

/// One reservation of wraps under A256GCMKW.
#[derive(Clone, Debug)]
struct Reservation {
    id: String,
    count: u64,
    replaces: BTreeSet<String>,
}

impl Record {
    /// Reads all facts of `keyring`.
    pub(super) fn read(session: &Session, keyring: &str) -> Result<Self, Error> {
        let mut record = Self::default();
        let template = [
            Attribute::Class(ObjectClass::DATA),
            Attribute::Token(true),
            Attribute::Private(true),
            Attribute::Application(APPLICATION.to_vec()),
            Attribute::Label(label_of(keyring)),
        ];
        for object in session.find_objects(&template)? {
            match session.get_attributes(object, &[AttributeType::Value]).map_err(Error::from) {
                Ok(attributes) => match attributes.into_iter().next() {
                    Some(Attribute::Value(value)) => record.add(object, &value)?,
                    _ => return Err(Error::Record("a fact has no value".to_owned())),
                },
                // Replaced by another process after it was listed.
                Err(Error::Call { ckr: Ckr(RvError::ObjectHandleInvalid), .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(record)
    }

    fn add(&mut self, object: ObjectHandle, value: &[u8]) -> Result<(), Error> {
        // The version first, so that a newer record is called newer and not damaged.
        #[derive(Deserialize)]
        struct Version {
            v: u32,
        }
        let damaged = |error: serde_json::Error| Error::Record(format!("not a fact of this version ({error})"));
        let version: Version = serde_json::from_slice(value).map_err(damaged)?;
        if version.v != VERSION {
            return Err(Error::Record(format!("a newer hardwrap wrote it (version {})", version.v)));
        }
        let stored: Stored = serde_json::from_slice(value).map_err(damaged)?;
        match stored.fact {
            Fact::Key(text) => {
                let key = text.read().ok_or_else(|| Error::Record("a key's fact is not well formed".to_owned()))?;
                match self.keys.get_mut(&key.kid) {
                    None => {
                        self.keys.insert(key.kid, key);
                    }
                    Some(other) if other.canary != key.canary || other.route != key.route => {
                        return Err(Error::Record(format!("two facts about key {} disagree", key.kid)));
                    }
                    Some(other) => {
                        if key.state > other.state {
                            *other = key;
                        }
                    }
                }
            }
            Fact::Uses { kid, id, count, replaces } => {
                let kid = kid.parse().map_err(|_| Error::Record("uses of no key".to_owned()))?;
                self.uses.entry(kid).or_default().push((object, Reservation { id, count, replaces }));
            }
            Fact::Database { identity, noted } => {
                let earliest = self.databases.entry(identity).or_insert(noted);
                *earliest = noted.min(*earliest);
            }
        }
        Ok(())
    }

    /// How many wraps of `kid` are reserved. Reservations that were replaced by a sum are not counted; counting one
    /// twice, as two processes that sum at once may make it, errs to the safe side.
    pub(super) fn reserved(&self, kid: KeyId) -> u64 {
        let Some(all) = self.uses.get(&kid) else { return 0 };
        let replaced: BTreeSet<&String> = all.iter().flat_map(|(_, one)| &one.replaces).collect();
        all.iter().filter(|(_, one)| !replaced.contains(&one.id)).map(|(_, one)| one.count).sum()
    }

    /// Reserves `count` more wraps of `kid` and, where many reservations have gathered, replaces them by their sum.
    pub(super) fn reserve(&self, session: &Session, keyring: &str, kid: KeyId, count: u64) -> Result<(), Error> {
        let all = self.uses.get(&kid).map_or(&[][..], Vec::as_slice);
        let summed = all.len() >= RESERVATIONS_AT_MOST;
        let fact = Fact::Uses {
            kid: kid.to_string(),
            id: uuid::Uuid::new_v4().simple().to_string(),
            count: if summed { count + self.reserved(kid) } else { count },
            replaces: if summed { all.iter().map(|(_, one)| one.id.clone()).collect() } else { BTreeSet::new() },
        };
        write(session, keyring, fact)?;
        if summed {
            for (object, _) in all {
                // Another process may have destroyed it: it is replaced all the same.
                let _ = session.destroy_object(*object);
            }
        }
        Ok(())
    }
}

/// Writes what is true of a key. Older facts about it are left: the strictest counts.
pub(super) fn write_key(session: &Session, keyring: &str, key: &KeyFact) -> Result<(), Error> {
    write(session, keyring, Fact::Key(KeyText::of(key)))
}

/// Notes that the database of this identity uses the keyring.
pub(super) fn write_database(session: &Session, keyring: &str, identity: &str) -> Result<(), Error> {
    write(session, keyring, Fact::Database { identity: identity.to_owned(), noted: Timestamp::now() })
}

fn write(session: &Session, keyring: &str, fact: Fact) -> Result<(), Error> {
    let value = serde_json::to_vec(&Stored { v: VERSION, fact })
        .map_err(|error| Error::Record(format!("cannot be written ({error})")))?;
    let template = [
        Attribute::Class(ObjectClass::DATA),
        Attribute::Token(true),
        Attribute::Private(true),
        Attribute::Application(APPLICATION.to_vec()),
        Attribute::Label(label_of(keyring)),
        Attribute::Value(value),
    ];
    match session.create_object(&template).map_err(Error::from) {
        Ok(_) => Ok(()),
        // NSS: no such objects at all.
        Err(Error::Call { ckr, .. })
            if matches!(
                ckr.0,
                RvError::AttributeValueInvalid
                    | RvError::AttributeTypeInvalid
                    | RvError::TemplateInconsistent
                    | RvError::FunctionNotSupported
            ) =>
        {
            Err(Error::NoDataObjects(ckr))
        }
        Err(error) => Err(error),
    }
}

/// Whether the token keeps private data objects at all, by trying with one that goes at once.
pub(super) fn probe(session: &Session) -> Result<(), Error> {
    let keyring = format!("probe-{}", uuid::Uuid::new_v4().simple());
    write_database(session, &keyring, "probe")?;
    let template =
        [Attribute::Class(ObjectClass::DATA), Attribute::Private(true), Attribute::Label(label_of(&keyring))];
    for object in session.find_objects(&template)? {
        session.destroy_object(object)?;
    }
    Ok(())
}

fn label_of(keyring: &str) -> Vec<u8> {
    format!("hardwrap record {keyring}").into_bytes()
}

/// One fact, as the object's `CKA_VALUE` holds it: JSON.
#[derive(Deserialize, Serialize)]
struct Stored {
    v: u32,
    #[serde(flatten)]
    fact: Fact,
}

#[derive(Deserialize, Serialize)]
#[serde(tag = "fact", rename_all = "kebab-case")]
enum Fact {
    Key(KeyText),
    Uses {
        kid: String,
        id: String,
        count: u64,
        #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
        replaces: BTreeSet<String>,
    },
    Database {
        identity: String,
        noted: Timestamp,
    },
}

#[derive(Deserialize, Serialize)]
struct KeyText {
    kid: String,
    route: String,
    state: State,
    made: Timestamp,
    activated: Option<Timestamp>,
    canary: String,
    canary_iv: Option<String>,
    canary_sha256: String,
}

impl KeyText {
    fn of(key: &KeyFact) -> Self {
        let (canary, canary_iv) = match &key.canary.wrapped {
            WrappedBytes::A256Kw(bytes) => (hex::encode(bytes), None),
            WrappedBytes::A256GcmKw { iv, bytes } => (hex::encode(bytes), Some(hex::encode(iv))),
        };
        Self {
            kid: key.kid.to_string(),
            route: key.route.name().to_owned(),
            state: key.state,
            made: key.made,
            activated: key.activated,
            canary,
            canary_iv,
            canary_sha256: hex::encode(key.canary.digest),
        }
    }

    fn read(&self) -> Option<KeyFact> {
        let route = Route::ALL.into_iter().find(|route| route.name() == self.route)?;
        let wrapped = match &self.canary_iv {
            None => WrappedBytes::A256Kw(array(&self.canary)?),
            Some(iv) => WrappedBytes::A256GcmKw { iv: array(iv)?, bytes: array(&self.canary)? },
        };
        Some(KeyFact {
            kid: self.kid.parse().ok()?,
            route,
            state: self.state,
            made: self.made,
            activated: self.activated,
            canary: Canary { wrapped, digest: array(&self.canary_sha256)? },
        })
    }
}

fn array<const N: usize>(text: &str) -> Option<[u8; N]> {
    hex::decode(text).ok()?.try_into().ok()
}

const APPLICATION: &[u8] = b"hardwrap";
const VERSION: u32 = 1;
/// From this many reservations of one key on, the next one sums them up.
const RESERVATIONS_AT_MOST: usize = 16;
