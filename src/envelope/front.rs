//! What stands before the first dot: marker, key id, header.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

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
    ///
    /// # Panics
    /// Never: a header is plain strings, which always serialise.
    pub fn write(&self, text: &mut String) {
        let dek = WrappedText::of(&self.wrapped);
        let (iv, sum) = (encode(&self.iv), encode(&self.sum));
        let also: Vec<_> =
            self.also.iter().map(|further| (further.key.to_string(), WrappedText::of(further))).collect();
        let header = Header {
            alg: self.wrapped.alg().name(),
            enc: ENC,
            dek: &dek.dek,
            dek_iv: dek.iv.as_deref(),
            iv: &iv,
            sum: &sum,
            also: (!also.is_empty()).then(|| {
                also.iter()
                    .zip(&self.also)
                    .map(|((kid, text), further)| Further {
                        kid,
                        alg: further.alg().name(),
                        dek: &text.dek,
                        dek_iv: text.iv.as_deref(),
                    })
                    .collect()
            }),
        };
        text.push_str(Marker::HW1);
        text.push_str(&self.wrapped.key.to_string());
        text.push(':');
        let json = serde_json::to_string(&header).expect("strings serialise");
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
        let header: Header<'_> = serde_json::from_slice(&json).map_err(|_| Error::Malformed("header"))?;
        let again = serde_json::to_vec(&header).map_err(|_| Error::Malformed("header"))?;
        if again != json {
            return Err(Error::Malformed("header is not in canonical form"));
        }
        if header.enc != ENC {
            return Err(Error::Unsupported("enc"));
        }
        let also = match &header.also {
            None => Vec::new(),
            Some(also) if (1..=MOST_FURTHER).contains(&also.len()) => {
                also.iter().map(Further::wrapped).collect::<Result<_, _>>()?
            }
            Some(_) => return Err(Error::Malformed("also: want 1 to 4 entries")),
        };
        Ok(Self {
            wrapped: wrapped(key, header.alg, header.dek, header.dek_iv)?,
            iv: encoding::decode_array(header.iv).ok_or(Error::Malformed("iv: want 12 bytes"))?,
            sum: encoding::decode_array(header.sum).ok_or(Error::Malformed("sum: want 32 bytes"))?,
            also,
        })
    }
}

/// The header as it stands in the text, keys in this order.
#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Header<'a> {
    alg: &'a str,
    enc: &'a str,
    dek: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    dek_iv: Option<&'a str>,
    iv: &'a str,
    sum: &'a str,
    #[serde(borrow, skip_serializing_if = "Option::is_none")]
    also: Option<Vec<Further<'a>>>,
}

/// One entry of `also`.
#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Further<'a> {
    kid: &'a str,
    alg: &'a str,
    dek: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    dek_iv: Option<&'a str>,
}

impl Further<'_> {
    fn wrapped(&self) -> Result<WrappedDek, Error> {
        let key = self.kid.parse().map_err(|_| Error::Malformed("also: key id"))?;
        wrapped(key, self.alg, self.dek, self.dek_iv)
    }
}

fn wrapped(key: KeyId, alg: &str, dek: &str, dek_iv: Option<&str>) -> Result<WrappedDek, Error> {
    let bytes = match (Alg::from_name(alg).ok_or(Error::Unsupported("alg"))?, dek_iv) {
        (Alg::A256Kw, None) => {
            WrappedBytes::A256Kw(encoding::decode_array(dek).ok_or(Error::Malformed("dek: want 72 bytes"))?)
        }
        (Alg::A256GcmKw, Some(iv)) => WrappedBytes::A256GcmKw {
            iv: encoding::decode_array(iv).ok_or(Error::Malformed("dek_iv: want 12 bytes"))?,
            bytes: encoding::decode_array(dek).ok_or(Error::Malformed("dek: want 48 bytes"))?,
        },
        (Alg::A256Kw, Some(_)) => return Err(Error::Malformed("dek_iv goes with A256GCMKW only")),
        (Alg::A256GcmKw, None) => return Err(Error::Malformed("no dek_iv")),
    };
    Ok(WrappedDek { key, bytes })
}

/// A wrapped DEK as the header writes it.
struct WrappedText {
    dek: String,
    iv: Option<String>,
}

impl WrappedText {
    fn of(wrapped: &WrappedDek) -> Self {
        match &wrapped.bytes {
            WrappedBytes::A256Kw(bytes) => Self { dek: encode(bytes), iv: None },
            WrappedBytes::A256GcmKw { iv, bytes } => Self { dek: encode(bytes), iv: Some(encode(iv)) },
        }
    }
}

fn encode(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(encoding::length(bytes.len()));
    encoding::append(bytes, &mut text);
    text
}

/// A header is at most this long, in bytes of JSON.
pub const LONGEST_HEADER: usize = 8192;

const ENC: &str = "A256GCM";
const MOST_FURTHER: usize = 4;
