//! Custody, proven by trying: each act that would let a master key leave the token is attempted, and must be refused.

use std::fmt;

use cryptoki::mechanism::Mechanism;
use cryptoki::object::{Attribute, AttributeType, KeyType, ObjectClass, ObjectHandle};

use super::Error;
use super::route::Access;

/// One forbidden act and what came of it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Probe {
    /// What was tried.
    pub act: &'static str,
    /// What the token did.
    pub verdict: Verdict,
}

/// What the token did when it was asked for something that it must not do.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Verdict {
    /// It refused; how.
    Refused(String),
    /// It did it: the key can leave the token.
    Allowed,
    /// The attempt could not be made, so nothing is proven.
    NotTried(String),
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(how) => write!(f, "refused ({how})"),
            Self::Allowed => f.write_str("ALLOWED"),
            Self::NotTried(why) => write!(f, "not tried ({why})"),
        }
    }
}

/// Tries everything on one key. Nothing that a probe makes stays.
pub(super) fn probe(access: Access<'_>, key: ObjectHandle) -> Result<Vec<Probe>, Error> {
    Ok(vec![
        Probe { act: "read CKA_VALUE", verdict: read(access, key)? },
        Probe { act: "wrap the key under another key (C_WrapKey)", verdict: wrap_out(access, key)? },
        Probe { act: "copy it to an extractable key (C_CopyObject)", verdict: copy(access, key) },
        Probe {
            act: "set CKA_EXTRACTABLE to true (C_SetAttributeValue)",
            verdict: change(access, key, Attribute::Extractable),
        },
        Probe {
            act: "set CKA_SENSITIVE to false (C_SetAttributeValue)",
            verdict: change(access, key, |forbidden| Attribute::Sensitive(!forbidden)),
        },
    ])
}

/// cryptoki leaves out a sensitive attribute without an error: no value is the refusal.
fn read(access: Access<'_>, key: ObjectHandle) -> Result<Verdict, Error> {
    let given = access.session.get_attributes(key, &[AttributeType::Value])?;
    Ok(match given.first() {
        None => Verdict::Refused("CKR_ATTRIBUTE_SENSITIVE".to_owned()),
        Some(Attribute::Value(value)) if value.is_empty() => Verdict::Refused("an empty value".to_owned()),
        Some(_) => Verdict::Allowed,
    })
}

fn wrap_out(access: Access<'_>, key: ObjectHandle) -> Result<Verdict, Error> {
    let template = [
        Attribute::Class(ObjectClass::SECRET_KEY),
        Attribute::KeyType(KeyType::AES),
        Attribute::ValueLen(32.into()),
        Attribute::Token(false),
        Attribute::Private(true),
        Attribute::Wrap(true),
        Attribute::Encrypt(true),
    ];
    let thief = match access.session.generate_key(&Mechanism::AesKeyGen, &template).map_err(Error::from) {
        Ok(thief) => thief,
        Err(error) => return Ok(Verdict::NotTried(error.to_string())),
    };
    access.module.count_object();
    let verdict = match access.session.wrap_key(&Mechanism::AesKeyWrap, thief, key).map_err(Error::from) {
        Ok(_) => Verdict::Allowed,
        Err(error) => refused(&error),
    };
    access.session.destroy_object(thief)?;
    Ok(verdict)
}

fn copy(access: Access<'_>, key: ObjectHandle) -> Verdict {
    let template = [Attribute::Token(false), Attribute::Extractable(true)];
    match access.session.copy_object(key, &template).map_err(Error::from) {
        Ok(made) => {
            let _ = access.session.destroy_object(made);
            Verdict::Allowed
        }
        Err(error) => refused(&error),
    }
}

/// `attribute` of true is the forbidden value. A token that takes it is told to take it back.
fn change(access: Access<'_>, key: ObjectHandle, attribute: impl Fn(bool) -> Attribute) -> Verdict {
    match access.session.update_attributes(key, &[attribute(true)]).map_err(Error::from) {
        Ok(()) => {
            let _ = access.session.update_attributes(key, &[attribute(false)]);
            Verdict::Allowed
        }
        Err(error) => refused(&error),
    }
}

fn refused(error: &Error) -> Verdict {
    match error.ckr() {
        Some(ckr) => Verdict::Refused(ckr.to_string()),
        None => Verdict::NotTried(error.to_string()),
    }
}
