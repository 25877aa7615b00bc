//! What a row is found by.

use std::fmt;

use diesel::prelude::*;
use diesel::sql_types::{BigInt, Binary, Double, Nullable, Text};

use super::Plain;
use super::query::Query;

/// The value of a row's key column.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub enum Key {
    /// An integer.
    Integer(i64),
    /// A text.
    Text(String),
    /// Anything else that a key column can hold, kept so that no row is missed.
    Odd(OddKey),
}

/// A key that is neither an integer nor UTF-8 text.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct OddKey(Kind);

#[derive(Clone, Debug, Eq, Hash, PartialEq)]
enum Kind {
    Null,
    /// The bits of the number: it is compared by the database only.
    Real(u64),
    Bytes(Vec<u8>),
    NotUtf8(Vec<u8>),
}

impl Key {
    /// Binds the key as it is stored, so that comparisons are those of the key column.
    pub(super) fn bind<'a>(&'a self, query: Query<'a>) -> Query<'a> {
        match self {
            Self::Integer(value) => query.integer(*value),
            Self::Text(value) => query.text(value),
            Self::Odd(OddKey(Kind::Null)) => query.optional_bytes(None),
            Self::Odd(OddKey(Kind::Real(bits))) => query.real(f64::from_bits(*bits)),
            Self::Odd(OddKey(Kind::Bytes(value))) => query.bytes(value),
            Self::Odd(OddKey(Kind::NotUtf8(value))) => query.raw_text(value),
        }
    }
}

impl OddKey {
    /// The bytes, where it is bytes.
    pub(super) fn bytes(&self) -> Option<&[u8]> {
        match &self.0 {
            Kind::Bytes(bytes) => Some(bytes),
            Kind::Null | Kind::Real(_) | Kind::NotUtf8(_) => None,
        }
    }
}

impl Key {
    /// A text that says what the key is, for our own tables.
    pub(super) fn encoded(&self) -> String {
        match self {
            Self::Integer(number) => format!("i:{number}"),
            Self::Text(text) => format!("t:{text}"),
            Self::Odd(OddKey(Kind::Null)) => "n:".to_owned(),
            Self::Odd(OddKey(Kind::Real(bits))) => format!("r:{}", f64::from_bits(*bits)),
            Self::Odd(OddKey(Kind::Bytes(bytes))) => format!("x:{}", hex::encode(bytes)),
            Self::Odd(OddKey(Kind::NotUtf8(bytes))) => format!("u:{}", hex::encode(bytes)),
        }
    }

    /// The key that [`Key::encoded`] wrote.
    pub(super) fn decoded(text: &str) -> Self {
        let odd = |kind| Self::Odd(OddKey(kind));
        match text.split_at_checked(2) {
            Some(("i:", number)) => number.parse().map_or_else(|_| Self::Text(number.to_owned()), Self::Integer),
            Some(("t:", text)) => Self::Text(text.to_owned()),
            Some(("r:", real)) => odd(Kind::Real(real.parse().map_or(0, f64::to_bits))),
            Some(("x:", bytes)) => odd(Kind::Bytes(hex::decode(bytes).unwrap_or_default())),
            Some(("u:", bytes)) => odd(Kind::NotUtf8(hex::decode(bytes).unwrap_or_default())),
            _ => odd(Kind::Null),
        }
    }
}

impl From<i64> for Key {
    fn from(value: i64) -> Self {
        Self::Integer(value)
    }
}

impl From<&str> for Key {
    fn from(value: &str) -> Self {
        Self::Text(value.to_owned())
    }
}

/// The number or text itself, for people to read: texts as [`Plain`] shows them, bytes as `x'0a1b'`. The way
/// back to the row is [`Db::read_key`](super::Db::read_key), not this text.
impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Integer(value) => value.fmt(f),
            Self::Text(value) => Plain(value).fmt(f),
            Self::Odd(OddKey(Kind::Null)) => f.write_str("NULL"),
            Self::Odd(OddKey(Kind::Real(bits))) => f64::from_bits(*bits).fmt(f),
            Self::Odd(OddKey(Kind::Bytes(bytes) | Kind::NotUtf8(bytes))) => {
                f.write_str("x'")?;
                bytes.iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
                f.write_str("'")
            }
        }
    }
}

/// A key as [`KeyParts::select`] reads it.
#[derive(QueryableByName)]
pub(super) struct KeyParts {
    #[diesel(sql_type = Text)]
    key_kind: String,
    #[diesel(sql_type = Nullable<BigInt>)]
    key_integer: Option<i64>,
    #[diesel(sql_type = Nullable<Double>)]
    key_real: Option<f64>,
    #[diesel(sql_type = Nullable<Binary>)]
    key_bytes: Option<Vec<u8>>,
}

impl KeyParts {
    /// Reads a key whatever it is stored as: a number is never made a text on the way, which could round it.
    pub(super) fn select(key: &str) -> String {
        format!(
            "typeof({key}) AS key_kind, \
             CASE WHEN typeof({key}) = 'integer' THEN {key} END AS key_integer, \
             CASE WHEN typeof({key}) = 'real' THEN {key} END AS key_real, \
             CASE WHEN typeof({key}) IN ('text', 'blob') THEN CAST({key} AS BLOB) END AS key_bytes"
        )
    }
}

impl From<KeyParts> for Key {
    fn from(parts: KeyParts) -> Self {
        match parts {
            KeyParts { key_integer: Some(value), .. } => Self::Integer(value),
            KeyParts { key_real: Some(value), .. } => Self::Odd(OddKey(Kind::Real(value.to_bits()))),
            KeyParts { key_kind, key_bytes: Some(bytes), .. } if key_kind == "text" => match String::from_utf8(bytes) {
                Ok(text) => Self::Text(text),
                Err(error) => Self::Odd(OddKey(Kind::NotUtf8(error.into_bytes()))),
            },
            KeyParts { key_bytes: Some(bytes), .. } => Self::Odd(OddKey(Kind::Bytes(bytes))),
            // An empty BLOB may come as NULL; a key that is NULL finds no row.
            KeyParts { key_kind, .. } => match key_kind.as_str() {
                "text" => Self::Text(String::new()),
                "blob" => Self::Odd(OddKey(Kind::Bytes(Vec::new()))),
                _ => Self::Odd(OddKey(Kind::Null)),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_comes_back_from_our_own_tables_as_it_was() {
        let odd = |kind| Key::Odd(OddKey(kind));
        for key in [
            Key::from(i64::MIN),
            Key::from(7),
            Key::from(""),
            Key::from("i:7"),
            Key::from("Öl\0\n"),
            odd(Kind::Null),
            odd(Kind::Real(0.1_f64.to_bits())),
            odd(Kind::Bytes(vec![0, 255])),
            odd(Kind::Bytes(Vec::new())),
            odd(Kind::NotUtf8(vec![0xff, 0x00])),
        ] {
            assert_eq!(Key::decoded(&key.encoded()), key);
        }
    }

    #[test]
    fn a_key_never_moves_the_cursor_or_ends_a_line_where_it_is_shown() {
        for (key, shown) in [
            ("\u{1b}[2J\u{7}", r"\u{1b}[2J\u{7}"),
            ("7\n  key 8: fine\r", r"7\n  key 8: fine\r"),
            ("\0\t\u{85}\u{9b}1m", r"\0\t\u{85}\u{9b}1m"),
            ("a\u{202e}b\u{2028}", r"a\u{202e}b\u{2028}"),
            ("Öl 'x' \"y\" \\ 東京", "Öl 'x' \"y\" \\ 東京"),
        ] {
            assert_eq!(Key::from(key).to_string(), shown);
        }
    }
}
