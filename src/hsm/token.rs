//! Tokens: what is in the slots, and the one token that a URI names.

use std::fmt;

use cryptoki::slot::Slot;
use cryptoki_sys::{
    CK_FLAGS, CKF_LOGIN_REQUIRED, CKF_PROTECTED_AUTHENTICATION_PATH, CKF_TOKEN_INITIALIZED, CKF_USER_PIN_COUNT_LOW,
    CKF_USER_PIN_FINAL_TRY, CKF_USER_PIN_LOCKED,
};

use super::counted::Counted;
use super::module::Module;
use super::{Error, TokenUri};

/// What a token says of itself (`CK_TOKEN_INFO`), blanks and NULs at the end of texts cut off.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct TokenInfo {
    /// `label`.
    pub label: String,
    /// `serialNumber`.
    pub serial: String,
    /// `manufacturerID`.
    pub manufacturer: String,
    /// `model`.
    pub model: String,
    flags: CK_FLAGS,
}

impl TokenInfo {
    pub(super) fn read(module: &Module, slot: Slot) -> Result<Self, Error> {
        let info = module.functions.token_info(slot)?;
        Ok(Self {
            label: text(&info.label),
            serial: text(&info.serialNumber),
            manufacturer: text(&info.manufacturerID),
            model: text(&info.model),
            flags: info.flags,
        })
    }

    /// Whether private objects need a login.
    pub fn login_required(&self) -> bool {
        self.has(CKF_LOGIN_REQUIRED)
    }

    /// Whether the token takes the PIN on a keypad of its own.
    pub fn protected_authentication_path(&self) -> bool {
        self.has(CKF_PROTECTED_AUTHENTICATION_PATH)
    }

    /// Whether a wrong user PIN was tried since the last right one.
    pub fn user_pin_count_low(&self) -> bool {
        self.has(CKF_USER_PIN_COUNT_LOW)
    }

    /// Whether one more wrong user PIN locks the token.
    pub fn user_pin_final_try(&self) -> bool {
        self.has(CKF_USER_PIN_FINAL_TRY)
    }

    /// Whether the user PIN is locked.
    pub fn user_pin_locked(&self) -> bool {
        self.has(CKF_USER_PIN_LOCKED)
    }

    fn is(&self, uri: &TokenUri) -> bool {
        let same = |wanted: &Option<String>, is: &str| {
            wanted.as_ref().is_none_or(|wanted| wanted.trim_end_matches([' ', '\0']) == is)
        };
        self.has(CKF_TOKEN_INITIALIZED)
            && same(&uri.label, &self.label)
            && same(&uri.serial, &self.serial)
            && same(&uri.manufacturer, &self.manufacturer)
            && same(&uri.model, &self.model)
    }

    fn has(&self, flag: CK_FLAGS) -> bool {
        self.flags & flag != 0
    }
}

/// As candidates are listed: quoted, so that blanks are seen.
impl fmt::Display for TokenInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "token={:?};serial={:?}", self.label, self.serial)
    }
}

/// The slot of the one token that `uri` names. A slot whose token cannot be read is listed and hides no other.
pub(super) fn find(module: &'static Module, uri: &TokenUri) -> Result<(Slot, TokenInfo), Error> {
    let mut matching = Vec::new();
    let mut there = Vec::new();
    let mut uninitialised = 0;
    for slot in module.pkcs11().get_slots_with_token().counted("C_GetSlotList")? {
        match TokenInfo::read(module, slot) {
            Ok(info) if info.is(uri) => {
                there.push(info.to_string());
                matching.push((slot, info));
            }
            Ok(info) if info.has(CKF_TOKEN_INITIALIZED) => there.push(info.to_string()),
            Ok(_) => uninitialised += 1,
            Err(error) => there.push(format!("a token that cannot be read ({error})")),
        }
    }
    let what = match matching.len() {
        0 => NONE,
        1 => return Ok(matching.remove(0)),
        _ => "more than one token is",
    };
    if uninitialised > 0 {
        there.push(format!("{uninitialised} not initialised"));
    }
    let there = if there.is_empty() { "none".to_owned() } else { there.join(", ") };
    Err(Error::Token { what, wanted: uri.wanted(), there })
}

/// What is wrong when nothing matches.
pub(super) const NONE: &str = "no token is";

/// A fixed field of `CK_TOKEN_INFO`: UTF-8, padded with blanks, in bad modules with NULs. What is no UTF-8 is shown
/// escaped, and matches nothing by accident.
fn text(field: &[u8]) -> String {
    let end = field.iter().rposition(|byte| !matches!(byte, b' ' | 0)).map_or(0, |last| last + 1);
    let field = &field[..end];
    std::str::from_utf8(field).map_or_else(|_| field.escape_ascii().to_string(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn padding_of_any_kind_is_no_part_of_a_label() {
        assert_eq!(text(b"hardwrap-dev                    "), "hardwrap-dev");
        assert_eq!(text(b"nul\0\0\0"), "nul");
        assert_eq!(text(b"   "), "");
        assert_eq!(text(b"  leading"), "  leading");
        assert_eq!(text(b"\xffx "), "\\xffx");
    }
}
