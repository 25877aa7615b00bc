//! Custody, proven by trying: each act that would let a master key leave the token is attempted, and must be refused,
//! with an answer that means refusal. Any other failure proves nothing.

use std::fmt;

use cryptoki::error::RvError;
use cryptoki::mechanism::Mechanism;
use cryptoki::object::{Attribute, KeyType, ObjectClass, ObjectHandle};

use super::Error;
use super::counted::Counted;
use super::route::{Access, with_throw_away};

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
    /// The attempt could not be made, or failed for another reason, so nothing is proven.
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
        Probe { act: "read CKA_VALUE", verdict: read(access, key) },
        Probe { act: "wrap the key under another key (C_WrapKey)", verdict: wrap_out(access, key) },
        Probe { act: "copy it to an extractable key (C_CopyObject)", verdict: copy(access, key) },
        Probe {
            act: "set CKA_EXTRACTABLE to true (C_SetAttributeValue)",
            verdict: change(access, key, &Attribute::Extractable(true)),
        },
        Probe {
            act: "set CKA_SENSITIVE to false (C_SetAttributeValue)",
            verdict: change(access, key, &Attribute::Sensitive(false)),
        },
    ])
}

fn read(access: Access<'_>, key: ObjectHandle) -> Verdict {
    let tried = access.module.functions.try_value(access.session, key);
    verdict(tried, &[RvError::AttributeSensitive])
}

/// Under a key that shows first that it can wrap: a token without C_WrapKey would refuse everything.
fn wrap_out(access: Access<'_>, key: ObjectHandle) -> Verdict {
    let wraps = || vec![Attribute::Wrap(true)];
    let tried = with_throw_away(wraps(), access, |thief| {
        let template = [
            Attribute::Class(ObjectClass::SECRET_KEY),
            Attribute::KeyType(KeyType::AES),
            Attribute::ValueLen(32.into()),
            Attribute::Token(false),
            Attribute::Private(true),
            Attribute::Extractable(true),
        ];
        let loose = access.session.generate_key(&Mechanism::AesKeyGen, &template).counted("C_GenerateKey")?;
        access.module.count_object();
        let control = access.session.wrap_key(&Mechanism::AesKeyWrap, thief, loose).counted("C_WrapKey");
        access.session.destroy_object(loose).counted("C_DestroyObject")?;
        if let Err(error) = control {
            return Ok(Verdict::NotTried(format!(
                "an extractable key cannot be wrapped either: {}",
                Error::from(error)
            )));
        }
        let tried = access
            .session
            .wrap_key(&Mechanism::AesKeyWrap, thief, key)
            .counted("C_WrapKey")
            .map(|_| ())
            .map_err(Error::from);
        Ok(verdict(tried, &[RvError::KeyUnextractable, RvError::KeyNotWrappable]))
    });
    tried.unwrap_or_else(|error| Verdict::NotTried(error.to_string()))
}

fn copy(access: Access<'_>, key: ObjectHandle) -> Verdict {
    let template = [Attribute::Token(false), Attribute::Extractable(true)];
    let tried = access.session.copy_object(key, &template).counted("C_CopyObject").map_err(Error::from);
    let tried = tried.map(|made| drop(access.session.destroy_object(made).counted("C_DestroyObject")));
    verdict(tried, &CHANGE_REFUSED)
}

/// First on a key of no worth: a token that takes the change would spoil the attributes of a master key for good.
fn change(access: Access<'_>, key: ObjectHandle, forbidden: &Attribute) -> Verdict {
    let attempt = |key| {
        let tried = access
            .session
            .update_attributes(key, std::slice::from_ref(forbidden))
            .counted("C_SetAttributeValue")
            .map_err(Error::from);
        verdict(tried, &CHANGE_REFUSED)
    };
    match with_throw_away(vec![Attribute::Encrypt(true)], access, |worthless| Ok(attempt(worthless))) {
        Ok(Verdict::Refused(_)) => attempt(key),
        Ok(other) => other,
        Err(error) => Verdict::NotTried(error.to_string()),
    }
}

fn verdict(tried: Result<(), Error>, refusals: &[RvError]) -> Verdict {
    match tried {
        Ok(()) => Verdict::Allowed,
        Err(error) => match error.ckr() {
            Some(ckr) if refusals.contains(&ckr.0) => Verdict::Refused(ckr.to_string()),
            _ => Verdict::NotTried(error.to_string()),
        },
    }
}

/// What tokens answer when they refuse to change an attribute, or to copy a key with a change.
const CHANGE_REFUSED: [RvError; 5] = [
    RvError::AttributeReadOnly,
    RvError::ActionProhibited,
    RvError::TemplateInconsistent,
    RvError::AttributeValueInvalid,
    RvError::AttributeSensitive,
];
