//! The token's address: an RFC 7512 URI, by label or serial, never by slot number.

use std::path::PathBuf;
use std::str::FromStr;

use super::PinSource;

/// `pkcs11:token=LABEL;serial=SERIAL?module-path=PATH&pin-source=SOURCE`. At least one of token and serial is there,
/// and the module path is.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct TokenUri {
    /// `CK_TOKEN_INFO.label`, blanks and NULs at the end cut off.
    pub label: Option<String>,
    /// `CK_TOKEN_INFO.serialNumber`, likewise.
    pub serial: Option<String>,
    /// `CK_TOKEN_INFO.manufacturerID`, likewise.
    pub manufacturer: Option<String>,
    /// `CK_TOKEN_INFO.model`, likewise.
    pub model: Option<String>,
    /// The PKCS#11 module to load.
    pub module: PathBuf,
    /// Where the PIN comes from, where the URI says so.
    pub pin_source: Option<PinSource>,
}

impl TokenUri {
    /// What the URI asks for, as messages show it.
    pub fn wanted(&self) -> String {
        let named = [
            ("token", &self.label),
            ("serial", &self.serial),
            ("manufacturer", &self.manufacturer),
            ("model", &self.model),
        ];
        let parts: Vec<_> =
            named.iter().filter_map(|(name, value)| value.as_ref().map(|value| format!("{name}={value:?}"))).collect();
        parts.join(";")
    }
}

impl FromStr for TokenUri {
    type Err = UriError;

    fn from_str(text: &str) -> Result<Self, UriError> {
        let rest = text.strip_prefix("pkcs11:").ok_or(UriError::Scheme)?;
        let (path, query) = rest.split_once('?').unwrap_or((rest, ""));
        // First of all, so that no other message can show a part of it.
        if query.split('&').any(|part| part.starts_with("pin-value")) {
            return Err(UriError::PinValue);
        }
        let [mut label, mut serial, mut manufacturer, mut model, mut module, mut pin_source] = [const { None }; 6];
        for (name, value) in attributes(path, ';')? {
            let slot = match name {
                "token" => &mut label,
                "serial" => &mut serial,
                "manufacturer" => &mut manufacturer,
                "model" => &mut model,
                "slot-id" | "slot-description" | "slot-manufacturer" => return Err(UriError::Slot),
                _ => return Err(UriError::Unknown(name.to_owned())),
            };
            once(slot, name, value)?;
        }
        for (name, value) in attributes(query, '&')? {
            let slot = match name {
                "module-path" => &mut module,
                "pin-source" => &mut pin_source,
                "module-name" => return Err(UriError::ModuleName),
                _ => return Err(UriError::Unknown(name.to_owned())),
            };
            once(slot, name, value)?;
        }
        if label.is_none() && serial.is_none() {
            return Err(UriError::NoToken);
        }
        // CK_TOKEN_INFO has 32 bytes for a label: a longer one would be cut and match another token.
        if label.as_ref().is_some_and(|label: &String| label.len() > 32) {
            return Err(UriError::LabelTooLong);
        }
        let module = module.filter(|path: &String| !path.is_empty()).ok_or(UriError::NoModule)?;
        Ok(Self {
            label,
            serial,
            manufacturer,
            model,
            module: PathBuf::from(module),
            pin_source: pin_source.map(|source: String| source.parse()).transpose()?,
        })
    }
}

/// Why a text is no token URI this program can use. Never shows a value: it may be a PIN.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum UriError {
    /// It does not start with `pkcs11:`.
    #[error("token uri: want pkcs11:token=LABEL?module-path=PATH (RFC 7512)")]
    Scheme,
    /// An attribute is not `name=value`, or its percent-encoding is bad.
    #[error("token uri: attribute {0} is not well formed (RFC 7512 §2.3)")]
    Malformed(String),
    /// An attribute stands there twice.
    #[error("token uri: attribute {0} stands there twice")]
    Twice(String),
    /// An attribute this program does not use: a selector that is not wired would select wrongly.
    #[error("token uri: attribute {0} is not used by hardwrap; take it out")]
    Unknown(String),
    /// Slots move; tokens are found by label or serial.
    #[error("token uri: slots change their numbers; name the token by token= or serial=")]
    Slot,
    /// Neither label nor serial.
    #[error("token uri: name the token by token= or serial=")]
    NoToken,
    /// A token label has at most 32 bytes.
    #[error("token uri: a token label is at most 32 bytes long")]
    LabelTooLong,
    /// No module.
    #[error("token uri: give the PKCS#11 module by module-path=")]
    NoModule,
    /// Module by name instead of path.
    #[error("token uri: give the PKCS#11 module by module-path=, not by module-name=")]
    ModuleName,
    /// A PIN in the URI itself.
    #[error("token uri: pin-value= would leave the PIN in a file or an argument; use pin-source=")]
    PinValue,
    /// A PIN source this program does not read.
    #[error("pin-source: want file:PATH, env:NAME, credential:NAME or prompt:")]
    PinSource,
}

fn attributes(text: &str, separator: char) -> Result<Vec<(&str, String)>, UriError> {
    text.split(separator)
        .filter(|part| !part.is_empty())
        .map(|part| {
            // Without a name it is not shown at all: it may be the rest of a PIN with a separator in it.
            let (name, value) = part.split_once('=').ok_or_else(|| UriError::Malformed("without =".to_owned()))?;
            Ok((name, decode(value).ok_or_else(|| UriError::Malformed(shown(name)))?))
        })
        .collect()
}

/// The name of an attribute for a message, and no more of it than a name can be.
fn shown(name: &str) -> String {
    name.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '-').take(32).collect()
}

fn once(slot: &mut Option<String>, name: &str, value: String) -> Result<(), UriError> {
    match slot.replace(value) {
        None => Ok(()),
        Some(_) => Err(UriError::Twice(name.to_owned())),
    }
}

/// Percent-decoding (RFC 3986 §2.1) of what must be UTF-8.
fn decode(value: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(value.len());
    let mut rest = value.bytes();
    while let Some(byte) = rest.next() {
        if byte == b'%' {
            let digits = [rest.next()?, rest.next()?];
            let digits = std::str::from_utf8(&digits).ok()?;
            if !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
                return None;
            }
            bytes.push(u8::from_str_radix(digits, 16).ok()?);
        } else {
            bytes.push(byte);
        }
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_uri_is_read() {
        let uri: TokenUri = "pkcs11:token=my%20token;serial=0a1b?module-path=/usr/lib/m.so&pin-source=file:/run/pin"
            .parse()
            .expect("a good uri");
        assert_eq!(uri.label.as_deref(), Some("my token"));
        assert_eq!(uri.serial.as_deref(), Some("0a1b"));
        assert_eq!(uri.module, PathBuf::from("/usr/lib/m.so"));
        assert_eq!(uri.pin_source, Some(PinSource::File("/run/pin".into())));
        assert_eq!(uri.wanted(), r#"token="my token";serial="0a1b""#);
    }

    #[test]
    fn a_bad_uri_is_refused_without_showing_a_value() {
        for (text, error) in [
            ("token=x", UriError::Scheme),
            ("pkcs11:?module-path=/m.so", UriError::NoToken),
            ("pkcs11:token=x", UriError::NoModule),
            ("pkcs11:slot-id=0;token=x?module-path=/m.so", UriError::Slot),
            ("pkcs11:token=x;token=y?module-path=/m.so", UriError::Twice("token".into())),
            ("pkcs11:token=x;object=k?module-path=/m.so", UriError::Unknown("object".into())),
            ("pkcs11:token=%zz?module-path=/m.so", UriError::Malformed("token".into())),
            ("pkcs11:token=%+1?module-path=/m.so", UriError::Malformed("token".into())),
            ("pkcs11:token=%f?module-path=/m.so", UriError::Malformed("token".into())),
            ("pkcs11:token=x?module-path=/m.so&pin-value=secret", UriError::PinValue),
            ("pkcs11:token=x?module-path=/m.so&pin-value=s&secret", UriError::PinValue),
            ("pkcs11:token=x;secret?module-path=/m.so", UriError::Malformed("without =".into())),
            ("pkcs11:token=x?module-path=/m.so&pin-source=|secret", UriError::PinSource),
            ("pkcs11:token=aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaé?module-path=/m.so", UriError::LabelTooLong),
        ] {
            let refused = text.parse::<TokenUri>().expect_err(text);
            assert_eq!(refused, error, "{text}");
            assert!(!refused.to_string().contains("secret"));
        }
    }
}
