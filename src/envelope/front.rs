//! What stands before the first dot: marker, key id, header.

use std::str::FromStr;

use super::{Error, Marker, encoding};
use crate::aead::{Iv, Sum};
use crate::provider::{Alg, KeyId, WrappedBytes, WrappedDek};

/// The front of a sealed value: everything a re-wrap replaces, and nothing of the value.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Front {
    /// The DEK, wrapped under the key the envelope names.
    pub wrapped: WrappedDek,
    /// The value's nonce.
    pub iv: Iv,
    /// The value's checksum.
    pub sum: Sum,
    /// The same DEK wrapped to up to four further keys (recovery): kept, never used to open in daily work.
    pub also: Vec<WrappedDek>,
}

impl Front {
    /// Appends the canonical text.
    pub fn write(&self, text: &mut String) {
        let mut json = String::with_capacity(JSON_AT_MOST);
        json.push_str("{\"alg\":\"");
        json.push_str(self.wrapped.alg().name());
        json.push_str("\",\"enc\":\"");
        json.push_str(ENC);
        json.push('"');
        write_dek(&self.wrapped, &mut json);
        write_bytes(",\"iv\":\"", &self.iv, &mut json);
        write_bytes(",\"sum\":\"", &self.sum, &mut json);
        let mut before = ",\"also\":[{\"kid\":\"";
        for further in &self.also {
            json.push_str(before);
            json.push_str(&hex::encode(further.key.as_bytes()));
            json.push_str("\",\"alg\":\"");
            json.push_str(further.alg().name());
            json.push('"');
            write_dek(further, &mut json);
            json.push('}');
            before = ",{\"kid\":\"";
        }
        json.push_str(if self.also.is_empty() { "}" } else { "]}" });
        text.push_str(Marker::HW1);
        text.push_str(&hex::encode(self.wrapped.key.as_bytes()));
        text.push(':');
        encoding::append(json.as_bytes(), text);
    }
}

impl FromStr for Front {
    type Err = Error;

    /// Reads what stands before the first dot; canonical form only.
    fn from_str(text: &str) -> Result<Self, Error> {
        match Marker::of(text) {
            Marker::Hw1 => {}
            Marker::HwOther => return Err(Error::Unsupported("envelope version")),
            _ => return Err(Error::Malformed("no marker hw1:")),
        }
        let (kid, header) = text[Marker::HW1.len()..].split_once(':').ok_or(Error::Malformed("no key id"))?;
        let key = kid.parse::<KeyId>().map_err(|_| Error::Malformed("key id: want 16 lower-case hex digits"))?;
        if header.len() > encoding::length(LONGEST_HEADER) {
            return Err(Error::Malformed("header is longer than 8 KiB"));
        }
        let json = encoding::decode(header).ok_or(Error::Malformed("header is not canonical base64"))?;
        if json.len() > LONGEST_HEADER {
            return Err(Error::Malformed("header is longer than 8 KiB"));
        }
        let json = str::from_utf8(&json).map_err(|_| Error::Malformed("header is not UTF-8"))?;
        let header = Header::read(json).ok_or(Error::Malformed("header is not in canonical form"))?;
        if header.enc != ENC {
            return Err(Error::Unsupported("enc"));
        }
        if header.also.len() > MOST_FURTHER {
            return Err(Error::Malformed("also: want 1 to 4 entries"));
        }
        let further =
            |(kid, dek): &(&str, DekText<'_>)| dek.wrapped(kid.parse().map_err(|_| Error::Malformed("also: key id"))?);
        let also = header.also.iter().map(further).collect::<Result<_, _>>()?;
        Ok(Self {
            wrapped: header.dek.wrapped(key)?,
            iv: encoding::decode_array(header.iv).ok_or(Error::Malformed("iv: want 12 bytes"))?,
            sum: encoding::decode_array(header.sum).ok_or(Error::Malformed("sum: want 32 bytes"))?,
            also,
        })
    }
}

/// The header as it stands in the text.
struct Header<'a> {
    enc: &'a str,
    dek: DekText<'a>,
    iv: &'a str,
    sum: &'a str,
    also: Vec<(&'a str, DekText<'a>)>,
}

/// A wrapped DEK as it stands in the text.
struct DekText<'a> {
    alg: &'a str,
    dek: &'a str,
    dek_iv: Option<&'a str>,
}

impl<'a> Header<'a> {
    /// Reads the one form there is, from left to right: no other order, key, blank or escape.
    fn read(json: &'a str) -> Option<Self> {
        let mut rest = Rest(json);
        let alg = rest.string("{\"alg\":\"")?;
        let enc = rest.string(",\"enc\":\"")?;
        let dek = DekText::read(alg, &mut rest)?;
        let iv = rest.string(",\"iv\":\"")?;
        let sum = rest.string(",\"sum\":\"")?;
        let mut also = Vec::new();
        if let Some(kid) = rest.string(",\"also\":[{\"kid\":\"") {
            let mut next = Some(kid);
            while let Some(kid) = next {
                let alg = rest.string(",\"alg\":\"")?;
                also.push((kid, DekText::read(alg, &mut rest)?));
                rest.take("}")?;
                next = rest.string(",{\"kid\":\"");
            }
            rest.take("]")?;
        }
        (rest.0 == "}").then_some(Self { enc, dek, iv, sum, also })
    }
}

impl<'a> DekText<'a> {
    fn read(alg: &'a str, rest: &mut Rest<'a>) -> Option<Self> {
        Some(Self { alg, dek: rest.string(",\"dek\":\"")?, dek_iv: rest.string(",\"dek_iv\":\"") })
    }

    fn wrapped(&self, key: KeyId) -> Result<WrappedDek, Error> {
        let bytes = match (Alg::from_name(self.alg).ok_or(Error::Unsupported("alg"))?, self.dek_iv) {
            (Alg::A256Kw, None) => {
                WrappedBytes::A256Kw(encoding::decode_array(self.dek).ok_or(Error::Malformed("dek: want 72 bytes"))?)
            }
            (Alg::A256GcmKw, Some(iv)) => WrappedBytes::A256GcmKw {
                iv: encoding::decode_array(iv).ok_or(Error::Malformed("dek_iv: want 12 bytes"))?,
                bytes: encoding::decode_array(self.dek).ok_or(Error::Malformed("dek: want 48 bytes"))?,
            },
            (Alg::A256Kw, Some(_)) => return Err(Error::Malformed("dek_iv goes with A256GCMKW only")),
            (Alg::A256GcmKw, None) => return Err(Error::Malformed("no dek_iv")),
        };
        Ok(WrappedDek { key, bytes })
    }
}

/// What is not read yet.
struct Rest<'a>(&'a str);

impl<'a> Rest<'a> {
    /// Takes `text`, if it stands here.
    fn take(&mut self, text: &str) -> Option<()> {
        self.0 = self.0.strip_prefix(text)?;
        Some(())
    }

    /// Takes `before`, and a string up to its closing quote. No text of this format needs an escape.
    fn string(&mut self, before: &str) -> Option<&'a str> {
        let (string, rest) = self.0.strip_prefix(before)?.split_once('"')?;
        if string.bytes().any(|c| c == b'\\' || c < b' ') {
            return None;
        }
        self.0 = rest;
        Some(string)
    }
}

fn write_dek(wrapped: &WrappedDek, json: &mut String) {
    match &wrapped.bytes {
        WrappedBytes::A256Kw(bytes) => write_bytes(",\"dek\":\"", bytes, json),
        WrappedBytes::A256GcmKw { iv, bytes } => {
            write_bytes(",\"dek\":\"", bytes, json);
            write_bytes(",\"dek_iv\":\"", iv, json);
        }
    }
}

fn write_bytes(before: &str, bytes: &[u8], json: &mut String) {
    json.push_str(before);
    encoding::append(bytes, json);
    json.push('"');
}

/// A header is at most this long, in bytes of JSON.
pub const LONGEST_HEADER: usize = 8192;

/// Room for a header without further keys.
const JSON_AT_MOST: usize = 216;
const ENC: &str = "A256GCM";
const MOST_FURTHER: usize = 4;
