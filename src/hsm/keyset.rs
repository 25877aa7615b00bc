//! The keys of a keyring as one connection found them: which count, which do not, and why.

use std::collections::{BTreeMap, BTreeSet};

use cryptoki::object::{Attribute, AttributeType, KeyType, ObjectClass, ObjectHandle};
use cryptoki::session::Session;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use super::Error;
use super::counted::Counted;
use super::error::Recovery;
use super::record::{self, Canary, KeyFact, Record, State};
use super::route::{Access, NO_RANDOM, Route};
use crate::provider::{Aad, KeyId, MasterKey, random};
use crate::secret::Dek;

/// What a connection found under one keyring's label. Handles are of that connection only.
#[derive(Debug)]
pub(super) struct KeySet {
    pub(super) record: Record,
    usable: BTreeMap<KeyId, Found>,
    /// What is wrong with private objects that have the id of a recorded key.
    unusable: BTreeMap<KeyId, Health>,
    /// How many objects with the attributes of a master key have the id of a recorded one. What anyone can plant is
    /// not counted.
    twins: BTreeMap<KeyId, u32>,
    /// The highest generation of a private key with our label.
    generation: u16,
    pub(super) strangers: Vec<Stranger>,
    pub(super) leftovers: Vec<Leftover>,
}

/// A key that counts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Found {
    pub(super) handle: ObjectHandle,
    pub(super) route: Route,
    pub(super) state: State,
    /// Whether the token lets it wrap.
    pub(super) may_wrap: bool,
    /// Whether the token lets it unwrap.
    pub(super) may_unwrap: bool,
    /// Another key on the token has the same id: this one opens, and nothing seals.
    pub(super) doubled: bool,
}

/// An object with the keyring's label that does not count: reported, never used.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Stranger {
    /// Its `CKA_ID`, in hex.
    pub id: String,
    /// Why it does not count.
    pub why: String,
    /// Whether only someone with the PIN can have put it there.
    pub private: bool,
}

/// How a recorded key is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Health {
    /// It is there, has the attributes it must have, and its canary unwraps.
    Works,
    /// Another key on the token has the same id: it opens, and nothing is sealed.
    Doubled,
    /// It is active, and the token does not let it wrap: it opens, and seals nothing.
    MayNotWrap,
    /// It is not active, and the token lets it wrap: the fence is down.
    MayWrap,
    /// It is not on the token.
    Missing,
    /// It is there, and its canary does not unwrap to what the record says: it is another key.
    CanaryFails,
    /// It is there, and is what a master key must not be.
    WrongAttributes(&'static str),
    /// It is retired: there, and may not unwrap.
    Asleep,
    /// It is retired, and the token lets it unwrap: somebody gave that back.
    MayUnwrap,
    /// It was destroyed, and is not there any more.
    Gone,
}

/// A key that a crash left under the label of keys in the making.
#[derive(Clone, Debug)]
pub(super) struct Leftover {
    pub(super) handle: ObjectHandle,
    pub(super) id: Vec<u8>,
    pub(super) recorded: Option<KeyId>,
}

impl KeySet {
    /// Reads the record, finds the keys, checks their attributes and their canaries.
    pub(super) fn load(access: Access<'_>, keyring: &str) -> Result<Self, Error> {
        let record = Record::read(access.session, keyring)?;
        let mut set = Self {
            record,
            usable: BTreeMap::new(),
            unusable: BTreeMap::new(),
            twins: BTreeMap::new(),
            generation: 0,
            strangers: Vec::new(),
            leftovers: Vec::new(),
        };
        for handle in labelled(access.session, keyring)? {
            set.add(access, handle)?;
        }
        for _ in record::planted(access.session, keyring)? {
            let why = "it is a public data object with the label of the keyring record: anyone can plant one";
            set.strangers.push(Stranger { id: String::new(), why: why.to_owned(), private: false });
        }
        for handle in labelled(access.session, &making(keyring))? {
            let seen = Seen::read(access.session, handle)?;
            set.note_generation(&seen);
            if !seen.is_private_aes() {
                let why = "it has the label of keys in the making, and is no private AES key: hardwrap did not make it";
                let (id, private) = (hex::encode(&seen.id), seen.private);
                set.strangers.push(Stranger { id, why: why.to_owned(), private });
                continue;
            }
            let id = seen.id;
            let recorded = key_id(&id).filter(|kid| set.record.keys.contains_key(kid));
            set.leftovers.push(Leftover { handle, id, recorded });
        }
        Ok(set)
    }

    fn add(&mut self, access: Access<'_>, handle: ObjectHandle) -> Result<(), Error> {
        let seen = Seen::read(access.session, handle)?;
        self.note_generation(&seen);
        let stranger = |why: &str| Stranger { id: hex::encode(&seen.id), why: why.to_owned(), private: seen.private };
        if let Some(why) = seen.untrusted() {
            self.strangers.push(stranger(&format!("it is {why}")));
            // What is public anyone can plant: it says nothing of the key.
            if let Some(kid) = key_id(&seen.id).filter(|_| seen.private) {
                self.unusable.insert(kid, Health::WrongAttributes(why));
            }
            return Ok(());
        }
        let Some(fact) = key_id(&seen.id).and_then(|kid| self.record.keys.get(&kid)) else {
            self.strangers.push(stranger("the keyring record does not name it"));
            return Ok(());
        };
        let kid = fact.kid;
        let twins = self.twins.entry(kid).or_default();
        *twins += 1;
        let doubled = *twins > 1;
        if let Some(found) = self.usable.get_mut(&kid) {
            found.doubled |= doubled;
        }
        // A retired key may not unwrap; its canary is asked again when it is brought back.
        if fact.state < State::Retired && !fact.canary.sings(access, handle, fact)? {
            self.strangers.push(stranger("its canary did not unwrap to what the record says"));
            self.unusable.insert(kid, Health::CanaryFails);
            return Ok(());
        }
        self.usable.insert(
            kid,
            Found {
                handle,
                route: fact.route,
                state: fact.state,
                may_wrap: seen.may_wrap(fact.route),
                may_unwrap: seen.may_unwrap(fact.route),
                doubled,
            },
        );
        Ok(())
    }

    /// The ids of keys in the making that the record does not name.
    pub(super) fn unrecorded(&self) -> BTreeSet<Vec<u8>> {
        let unrecorded = self.leftovers.iter().filter(|left| left.recorded.is_none());
        unrecorded.map(|left| left.id.clone()).collect()
    }

    /// Whether no key counts.
    pub(super) fn is_empty(&self) -> bool {
        self.usable.is_empty()
    }

    /// The key of this id, if it counts.
    pub(super) fn get(&self, kid: KeyId) -> Option<Found> {
        self.usable.get(&kid).copied()
    }

    /// How a recorded key is.
    pub(super) fn health(&self, fact: &KeyFact) -> Health {
        match (self.usable.get(&fact.kid), self.unusable.get(&fact.kid)) {
            (Some(found), _) if found.doubled => Health::Doubled,
            (Some(found), _) if found.state == State::Active && !found.may_wrap => Health::MayNotWrap,
            (Some(found), _) if found.state > State::Active && found.may_wrap => Health::MayWrap,
            (Some(found), _) if found.state == State::Retired && found.may_unwrap => Health::MayUnwrap,
            (Some(found), _) if found.state == State::Retired => Health::Asleep,
            (Some(_), _) => Health::Works,
            (None, Some(health)) => *health,
            (None, None) if fact.state == State::Destroyed => Health::Gone,
            (None, None) => Health::Missing,
        }
    }

    /// The key that seals: of the active ones the one made last.
    pub(super) fn current(&self) -> Option<MasterKey> {
        let active = |(kid, found): (&KeyId, &Found)| {
            (found.state == State::Active && found.may_wrap).then_some(MasterKey { id: *kid, alg: found.route.alg() })
        };
        self.usable.iter().filter_map(active).next_back()
    }

    /// Whether a key other than `kid` is active, alone of its id, and may wrap.
    pub(super) fn another_seals(&self, kid: KeyId) -> bool {
        let seals = |(other, found): (&KeyId, &Found)| {
            *other != kid && found.state == State::Active && found.may_wrap && !found.doubled
        };
        self.usable.iter().any(seals)
    }

    /// Whether the canary of `kid` still unwraps in this session: if so, the token works and the key is there.
    pub(super) fn canary_sings(&self, access: Access<'_>, kid: KeyId) -> bool {
        match (self.usable.get(&kid), self.record.keys.get(&kid)) {
            (Some(found), Some(fact)) => fact.canary.sings(access, found.handle, fact).unwrap_or(false),
            _ => false,
        }
    }

    /// Whether the record names the key and it is not there, or does not work: nothing is known of values under it.
    pub(super) fn is_silent(&self, kid: KeyId) -> bool {
        !self.usable.contains_key(&kid) && self.record.keys.get(&kid).is_some_and(|fact| fact.state < State::Destroyed)
    }

    /// An active key that is silent, if there is one.
    pub(super) fn silent_active(&self) -> Option<KeyId> {
        let active = self.record.keys.values().filter(|fact| fact.state == State::Active);
        active.map(|fact| fact.kid).find(|kid| self.is_silent(*kid))
    }

    /// The highest generation of any key there is or was.
    pub(super) fn latest_generation(&self) -> u16 {
        self.record.keys.keys().map(|kid| kid.generation()).max().unwrap_or(0).max(self.generation)
    }

    /// Public keys do not count: anyone could plant the last generation there is.
    fn note_generation(&mut self, seen: &Seen) {
        if seen.private
            && let Some(kid) = key_id(&seen.id)
        {
            self.generation = self.generation.max(kid.generation());
        }
    }
}

impl Canary {
    /// Wraps a random block under a new key.
    pub(super) fn make(access: Access<'_>, handle: ObjectHandle, kid: KeyId, route: Route) -> Result<Self, Error> {
        let block = Dek::init(|bytes| random(bytes).map_err(|_| Error::Answer(NO_RANDOM)))?;
        let wrapped = route.wrap(access, handle, &block, &canary_aad(kid))?;
        Ok(Self { wrapped, digest: Sha256::digest(block.expose()).into() })
    }

    /// Whether it unwraps to the block it was made of. An answer about the bytes is a no, an ambiguous one if it is
    /// given twice; what only says that the session is gone is the token's error.
    pub(super) fn sings(&self, access: Access<'_>, handle: ObjectHandle, fact: &KeyFact) -> Result<bool, Error> {
        let ask = || fact.route.unwrap(access, handle, &self.wrapped, &canary_aad(fact.kid));
        let answer = match ask() {
            Err(error) if error.recovery() == Recovery::Judge => ask(),
            answer => answer,
        };
        match answer {
            Ok(Ok(block)) => Ok(Sha256::digest(block.expose()).as_slice().ct_eq(&self.digest).into()),
            Ok(Err(_)) => Ok(false),
            Err(error) => match error.recovery() {
                Recovery::GiveUp | Recovery::Judge => Ok(false),
                _ => Err(error),
            },
        }
    }
}

/// A context that no column can have.
fn canary_aad(kid: KeyId) -> Aad {
    Aad::new([b"hw1-canary\0".as_slice(), kid.as_bytes()].concat())
}

/// All secret keys with this label, whoever made them.
fn labelled(session: &Session, label: &str) -> Result<Vec<ObjectHandle>, Error> {
    let template = [
        Attribute::Class(ObjectClass::SECRET_KEY),
        Attribute::Token(true),
        Attribute::Label(label.as_bytes().to_vec()),
    ];
    Ok(session.find_objects(&template).counted("C_FindObjects")?)
}

/// The label of keys in the making: nobody looks for keys there.
pub(super) fn making(keyring: &str) -> String {
    format!("{keyring}.new")
}

pub(super) fn key_id(bytes: &[u8]) -> Option<KeyId> {
    <[u8; 8]>::try_from(bytes).ok().map(KeyId::from)
}

/// The attributes by which a key counts, as the token gives them.
#[derive(Default)]
pub(super) struct Seen {
    pub(super) id: Vec<u8>,
    aes: bool,
    length: Option<u64>,
    private: bool,
    sensitive: bool,
    always_sensitive: bool,
    never_extractable: bool,
    local: bool,
    extractable: Option<bool>,
    encrypt: bool,
    wrap: bool,
    decrypt: bool,
    unwrap: bool,
}

impl Seen {
    pub(super) fn read(session: &Session, handle: ObjectHandle) -> Result<Self, Error> {
        let wanted = [
            AttributeType::Id,
            AttributeType::KeyType,
            AttributeType::ValueLen,
            AttributeType::Private,
            AttributeType::Sensitive,
            AttributeType::AlwaysSensitive,
            AttributeType::NeverExtractable,
            AttributeType::Local,
            AttributeType::Extractable,
            AttributeType::Encrypt,
            AttributeType::Wrap,
            AttributeType::Decrypt,
            AttributeType::Unwrap,
        ];
        let mut seen = Self::default();
        for attribute in session.get_attributes(handle, &wanted).counted("C_GetAttributeValue")? {
            match attribute {
                Attribute::Id(id) => seen.id = id,
                Attribute::KeyType(kind) => seen.aes = kind == KeyType::AES,
                Attribute::ValueLen(length) => seen.length = Some(*length),
                Attribute::Private(is) => seen.private = is,
                Attribute::Sensitive(is) => seen.sensitive = is,
                Attribute::AlwaysSensitive(is) => seen.always_sensitive = is,
                Attribute::NeverExtractable(is) => seen.never_extractable = is,
                Attribute::Local(is) => seen.local = is,
                Attribute::Extractable(is) => seen.extractable = Some(is),
                Attribute::Encrypt(is) => seen.encrypt = is,
                Attribute::Wrap(is) => seen.wrap = is,
                Attribute::Decrypt(is) => seen.decrypt = is,
                Attribute::Unwrap(is) => seen.unwrap = is,
                _ => {}
            }
        }
        Ok(seen)
    }

    /// Whether it may wrap, by its route's own calls.
    pub(super) fn may_wrap(&self, route: Route) -> bool {
        if route == Route::KwWrap { self.wrap } else { self.encrypt }
    }

    /// Whether it may unwrap, by its route's own calls.
    pub(super) fn may_unwrap(&self, route: Route) -> bool {
        if route == Route::KwWrap { self.unwrap } else { self.decrypt }
    }

    /// Whether only someone with the PIN can have made it, and it is of the kind we make.
    pub(super) fn is_private_aes(&self) -> bool {
        self.private && self.aes
    }

    /// Why a key with these attributes cannot be a master key.
    pub(super) fn untrusted(&self) -> Option<&'static str> {
        let checks = [
            (self.private, "public (CKA_PRIVATE is false): anyone who reaches the token can plant one"),
            (self.aes, "no AES key"),
            (self.length.is_none_or(|length| length == 32), "no 256-bit key"),
            (self.sensitive, "not sensitive (CKA_SENSITIVE is false)"),
            (self.always_sensitive, "not always sensitive (CKA_ALWAYS_SENSITIVE is false)"),
            (self.extractable == Some(false), "extractable (CKA_EXTRACTABLE is not false)"),
            (self.never_extractable, "not never extractable (CKA_NEVER_EXTRACTABLE is false)"),
            (self.local, "not made on the token (CKA_LOCAL is false)"),
        ];
        checks.into_iter().find(|(holds, _)| !holds).map(|(_, why)| why)
    }
}
