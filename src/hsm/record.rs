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

use super::counted::Counted;
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
    /// The state of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        let all = [Self::PreActive, Self::Active, Self::Deactivated, Self::Retired, Self::Destroyed];
        all.into_iter().find(|state| state.name() == name)
    }

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
    /// When it ceased to wrap.
    pub deactivated: Option<Timestamp>,
    /// When it ceased to unwrap.
    pub retired: Option<Timestamp>,
    /// When it was destroyed.
    pub destroyed: Option<Timestamp>,
    /// How often what the record says of it has changed: of two facts the later one counts.
    pub(super) revision: u64,
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
    /// Identities of the databases that use this keyring, or did.
    pub(super) databases: BTreeMap<String, DatabaseFact>,
    /// That nothing in a database names a key any more, and the objects that say so.
    proofs: BTreeMap<(String, KeyId), (Proof, Vec<ObjectHandle>)>,
    /// Reservations of wraps, by key, and the objects they stand in.
    uses: BTreeMap<KeyId, Vec<Reservation>>,
    objects: BTreeMap<KeyId, Vec<ObjectHandle>>,
    /// The objects that the facts about each key stand in.
    facts: BTreeMap<KeyId, Vec<ObjectHandle>>,
}

/// A database that uses the keyring, or did.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct DatabaseFact {
    /// When it was noted last.
    pub noted: Timestamp,
    /// When an operator released it, if that was later, and why: the destruction of a key no longer asks it.
    pub released: Option<(Timestamp, String)>,
}

/// That no value of a database names a key, proven under the database's fence.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Proof {
    /// Since when that holds without a break: the backup horizon starts here.
    pub since: Timestamp,
    /// When it was proven last.
    pub last: Timestamp,
}

/// A reservation of wraps under A256GCMKW. Each replaces all that its writer saw, so that one stands in quiet times.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
struct Reservation {
    id: String,
    /// This block.
    own: u64,
    /// Everything reserved that the writer knew of, this block included.
    total: u64,
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    replaces: BTreeSet<String>,
}

impl Record {
    /// Reads all facts of `keyring`.
    pub(super) fn read(session: &Session, keyring: &str) -> Result<Self, Error> {
        let template = [
            Attribute::Class(ObjectClass::DATA),
            Attribute::Token(true),
            Attribute::Private(true),
            Attribute::Application(APPLICATION.to_vec()),
            Attribute::Label(label_of(keyring)),
        ];
        // A fact that another process replaces after the objects were listed is in neither list: begin anew.
        for _ in 0..READINGS {
            let mut record = Self::default();
            let mut whole = true;
            for object in session.find_objects(&template).counted("C_FindObjects")? {
                match session
                    .get_attributes(object, &[AttributeType::Value])
                    .counted("C_GetAttributeValue")
                    .map_err(Error::from)
                {
                    Ok(attributes) => match attributes.into_iter().next() {
                        Some(Attribute::Value(value)) => record.add(object, Self::parse(&value)?)?,
                        _ => return Err(Error::Record("a fact has no value".to_owned())),
                    },
                    Err(Error::Call { ckr: Ckr(RvError::ObjectHandleInvalid), .. }) => whole = false,
                    Err(error) => return Err(error),
                }
            }
            if whole {
                return Ok(record);
            }
        }
        Err(Error::Answer("the keyring record changes faster than it can be read"))
    }

    fn parse(value: &[u8]) -> Result<Fact, Error> {
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
        Ok(stored.fact)
    }

    fn add(&mut self, object: ObjectHandle, fact: Fact) -> Result<(), Error> {
        match fact {
            Fact::Key(text) => {
                let key = text.read().ok_or_else(|| Error::Record("a key's fact is not well formed".to_owned()))?;
                self.facts.entry(key.kid).or_default().push(object);
                match self.keys.get_mut(&key.kid) {
                    None => {
                        self.keys.insert(key.kid, key);
                    }
                    Some(other) if other.canary != key.canary || other.route != key.route => {
                        return Err(Error::Record(format!("two facts about key {} disagree", key.kid)));
                    }
                    Some(other) => {
                        // The later one; of two made at once, the stricter.
                        if (key.revision, key.state) > (other.revision, other.state) {
                            *other = key;
                        }
                    }
                }
            }
            Fact::Uses { kid, reservation } => {
                let kid = kid.parse().map_err(|_| Error::Record("uses of no key".to_owned()))?;
                self.uses.entry(kid).or_default().push(reservation);
                self.objects.entry(kid).or_default().push(object);
            }
            Fact::Database { identity, noted } => {
                let database = self.databases.entry(identity).or_insert(DatabaseFact { noted, released: None });
                database.noted = noted.max(database.noted);
            }
            Fact::Release { identity, released, reason } => {
                let fresh = DatabaseFact { noted: Timestamp::MIN, released: None };
                let database = self.databases.entry(identity).or_insert(fresh);
                if database.released.as_ref().is_none_or(|(at, _)| *at < released) {
                    database.released = Some((released, reason));
                }
            }
            Fact::Proof { identity, kid, proof } => {
                let kid = kid.parse().map_err(|_| Error::Record("a proof about no key".to_owned()))?;
                let (merged, objects) = self.proofs.entry((identity, kid)).or_insert((proof, Vec::new()));
                objects.push(object);
                // The strictest: what holds since later has held for less time.
                *merged = Proof { since: merged.since.max(proof.since), last: merged.last.min(proof.last) };
            }
        }
        Ok(())
    }

    /// How many wraps of `kid` are reserved: the most that anyone who still stands had seen, and all blocks that still
    /// stand. Those who reserve at the same moment saw the same, so nothing is counted twice; what they did not see
    /// of each other still stands.
    pub(super) fn reserved(&self, kid: KeyId) -> u64 {
        let all = self.uses.get(&kid).map_or(&[][..], Vec::as_slice);
        let replaced: BTreeSet<&String> = all.iter().flat_map(|one| &one.replaces).collect();
        let standing = || all.iter().filter(|one| !replaced.contains(&one.id));
        let seen = standing().map(|one| one.total.saturating_sub(one.own)).max().unwrap_or(0);
        standing().map(|one| one.own).fold(seen, u64::saturating_add)
    }

    /// The databases that use the keyring.
    pub(super) fn users(&self) -> impl Iterator<Item = &String> {
        let uses = |database: &DatabaseFact| database.released.as_ref().is_none_or(|(at, _)| *at < database.noted);
        self.databases.iter().filter(move |(_, database)| uses(database)).map(|(identity, _)| identity)
    }

    /// What is proven, by database and key.
    pub(super) fn proofs(&self) -> BTreeMap<(String, KeyId), Proof> {
        self.proofs.iter().map(|(about, (proof, _))| (about.clone(), *proof)).collect()
    }

    /// Writes a proof in place of what the record says, or withdraws it.
    pub(super) fn prove(
        &self,
        session: &Session,
        keyring: &str,
        identity: &str,
        kid: KeyId,
        proof: Option<Proof>,
    ) -> Result<(), Error> {
        if let Some(proof) = proof {
            write(session, keyring, Fact::Proof { identity: identity.to_owned(), kid: kid.to_string(), proof })?;
        }
        for object in self.proofs.get(&(identity.to_owned(), kid)).into_iter().flat_map(|(_, objects)| objects) {
            match session.destroy_object(*object).counted("C_DestroyObject").map_err(Error::from) {
                Ok(()) | Err(Error::Call { ckr: Ckr(RvError::ObjectHandleInvalid), .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Reserves `own` more wraps of `kid`.
    pub(super) fn reserve(&self, session: &Session, keyring: &str, kid: KeyId, own: u64) -> Result<(), Error> {
        let all = self.uses.get(&kid).map_or(&[][..], Vec::as_slice);
        let reservation = Reservation {
            id: uuid::Uuid::new_v4().simple().to_string(),
            own,
            total: self.reserved(kid).saturating_add(own),
            replaces: all.iter().map(|one| one.id.clone()).collect(),
        };
        write(session, keyring, Fact::Uses { kid: kid.to_string(), reservation })?;
        for object in self.objects.get(&kid).into_iter().flatten() {
            // Another process may have destroyed it: it is replaced all the same.
            let _ = session.destroy_object(*object).counted("C_DestroyObject");
        }
        Ok(())
    }
}

/// Writes what is true of a new key.
pub(super) fn write_key(session: &Session, keyring: &str, key: &KeyFact) -> Result<(), Error> {
    write(session, keyring, Fact::Key(KeyText::of(key)))
}

/// Writes what is true of a key now, in place of what `record` says of it.
pub(super) fn replace_key(session: &Session, keyring: &str, record: &Record, key: KeyFact) -> Result<(), Error> {
    write_key(session, keyring, &KeyFact { revision: key.revision + 1, ..key })?;
    for object in record.facts.get(&key.kid).into_iter().flatten() {
        // Another process may have destroyed it: it is superseded all the same.
        let _ = session.destroy_object(*object).counted("C_DestroyObject");
    }
    Ok(())
}

/// Notes that the database of this identity uses the keyring.
pub(super) fn write_database(session: &Session, keyring: &str, identity: &str) -> Result<(), Error> {
    write(session, keyring, Fact::Database { identity: identity.to_owned(), noted: Timestamp::now() })
}

/// Notes that the database of this identity need not be asked any more.
pub(super) fn write_release(session: &Session, keyring: &str, identity: &str, reason: &str) -> Result<(), Error> {
    let (identity, reason) = (identity.to_owned(), reason.to_owned());
    write(session, keyring, Fact::Release { identity, released: Timestamp::now(), reason })
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
    match session.create_object(&template).counted("C_CreateObject").map_err(Error::from) {
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
    for object in session.find_objects(&template).counted("C_FindObjects")? {
        session.destroy_object(object).counted("C_DestroyObject")?;
    }
    Ok(())
}

/// Public objects with the label of the record: never read, and somebody made them.
pub(super) fn planted(session: &Session, keyring: &str) -> Result<Vec<ObjectHandle>, Error> {
    let template =
        [Attribute::Class(ObjectClass::DATA), Attribute::Private(false), Attribute::Label(label_of(keyring))];
    Ok(session.find_objects(&template).counted("C_FindObjects")?)
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
    Uses { kid: String, reservation: Reservation },
    Database { identity: String, noted: Timestamp },
    Release { identity: String, released: Timestamp, reason: String },
    Proof { identity: String, kid: String, proof: Proof },
}

#[derive(Deserialize, Serialize)]
struct KeyText {
    kid: String,
    route: String,
    state: State,
    made: Timestamp,
    activated: Option<Timestamp>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    deactivated: Option<Timestamp>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    retired: Option<Timestamp>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    destroyed: Option<Timestamp>,
    #[serde(default)]
    revision: u64,
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
            deactivated: key.deactivated,
            retired: key.retired,
            destroyed: key.destroyed,
            revision: key.revision,
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
            deactivated: self.deactivated,
            retired: self.retired,
            destroyed: self.destroyed,
            revision: self.revision,
            canary: Canary { wrapped, digest: array(&self.canary_sha256)? },
        })
    }
}

fn array<const N: usize>(text: &str) -> Option<[u8; N]> {
    hex::decode(text).ok()?.try_into().ok()
}

const APPLICATION: &[u8] = b"hardwrap";
const VERSION: u32 = 1;
/// How often the record is read again because another process replaced a fact in the middle.
const READINGS: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;

    /// A reservation: id, own, total, replaced ids.
    type Line<'a> = (&'a str, u64, u64, &'a [&'a str]);

    fn record(all: &[Line<'_>]) -> (Record, KeyId) {
        let kid = KeyId::new(1, [0; 6]);
        let reservation = |(id, own, total, replaces): &Line<'_>| Reservation {
            id: (*id).to_owned(),
            own: *own,
            total: *total,
            replaces: replaces.iter().map(|id| (*id).to_owned()).collect(),
        };
        let uses = [(kid, all.iter().map(reservation).collect())].into();
        (Record { uses, ..Record::default() }, kid)
    }

    #[test]
    fn reservations_made_at_the_same_moment_are_all_counted_and_never_doubled() {
        for (all, reserved) in [
            (&[][..], 0),
            (&[("a", 16, 16, &[][..])][..], 16),
            // Written, and the replaced one not destroyed yet.
            (&[("a", 16, 116, &[]), ("b", 256, 372, &["a"])], 372),
            // Two at once, both from a.
            (&[("b", 16, 116, &["a"]), ("c", 16, 116, &["a"])], 132),
            // One of them replaced by one who saw both, and by one who saw one.
            (&[("d", 16, 148, &["b", "c"]), ("e", 16, 132, &["b"])], 164),
            // Two at once, of whom one saw a block more.
            (&[("d", 65_536, 65_636, &["a"]), ("e", 16, 132, &["a", "z"])], 65_668),
            (&[("z", u64::MAX, u64::MAX, &[]), ("y", 1, 1, &[])], u64::MAX),
        ] {
            let (record, kid) = record(all);
            assert_eq!(record.reserved(kid), reserved, "{all:?}");
        }
    }

    #[test]
    fn a_fact_of_a_newer_version_or_an_unknown_kind_is_refused() {
        for (fact, said) in [
            (&br#"{"v":2,"fact":"key"}"#[..], "newer hardwrap"),
            (br#"{"v":1,"fact":"closed-column"}"#, "not a fact"),
            (br#"{"v":1,"fact":"key","kid":"x"}"#, "not a fact"),
            (b"not json", "not a fact"),
            (b"", "not a fact"),
        ] {
            let error = Record::parse(fact).err().expect("refused").to_string();
            assert!(error.contains(said), "{error}");
        }
    }
}
