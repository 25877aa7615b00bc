//! The sealed value: one string in a text column. This is the only description of the format; `tests/vectors/` holds
//! values of every kind.
//!
//! ```text
//! sealed  := "hw1:" kid ":" base64(header) "." base64(payload)
//! kid     := 16 lower-case hex digits: the master key's id
//! payload := ciphertext ‖ 16-byte tag
//! header  := JSON object without blanks, keys in this order (algorithm names of RFC 7518):
//!   alg     "A256KW" | "A256GCMKW"     how the DEK is wrapped ("RSA-OAEP-256" is reserved)
//!   enc     "A256GCM"
//!   dek     base64 of the wrapped DEK: A256KW 72 bytes, A256GCMKW 48 bytes (ciphertext ‖ tag)
//!   dek_iv  base64, 12 bytes; A256GCMKW only, else absent
//!   iv      base64, 12 bytes: the value's nonce
//!   sum     base64, 32 bytes: the checksum
//!   also    absent, or 1 to 4 of {"kid","alg","dek","dek_iv"?}: the same DEK wrapped to further keys
//! ```
//!
//! Everything is bound to where the value stands, its context:
//!
//! ```text
//! context := "hw1" 00 enc 00 len32(identifier) identifier bound [len32(row) row]
//!            len32: u32 big-endian; bound: 01 where the column is bound to rows, else 00 and nothing after
//! payload := AES-256-GCM(key = DEK, nonce = iv, aad = context)          SP 800-38D
//! dek     := A256GCMKW: AES-256-GCM(key = master key, iv = dek_iv, aad = "hw1-dek" 00 context) of the DEK
//!            A256KW: AES Key Wrap (RFC 3394) of DEK ‖ SHA-256("hw1-dek" 00 context)
//! sum     := HMAC-SHA256(key = HKDF-SHA256(ikm = DEK, no salt, info "hardwrap-checksum-v1"),
//!                        message = iv ‖ tag ‖ context)                   RFC 2104, RFC 5869
//! ```
//!
//! identifier and row are UTF-8; a row is the text of the row column: integers decimal, UUIDs lower-case with hyphens,
//! text exactly as stored, never empty. An empty value is stored as an empty text, never as a ciphertext of nothing.
//!
//! There is one canonical form: standard base64, padded (RFC 4648 §4); a header that does not serialise back to the
//! same bytes, has an unknown key, or is longer than 8 KiB is malformed. What stands before the first dot is the
//! [`Front`]: a re-wrap replaces it and never needs the payload.

mod encoding;
mod front;
mod marker;

pub use front::{Front, LONGEST_HEADER};
pub use marker::Marker;

use crate::aead::TAG;
use crate::provider::Alg;

/// A sealed value, taken apart: its front, and its payload still as text.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Envelope<'a> {
    /// What stands before the first dot.
    pub front: Front,
    payload: &'a str,
}

impl<'a> Envelope<'a> {
    /// Takes a stored text apart. The payload is decoded only by [`Envelope::payload`].
    ///
    /// # Errors
    /// [`Malformed`](Error::Malformed) or [`Unsupported`](Error::Unsupported).
    pub fn parse(stored: &'a str) -> Result<Self, Error> {
        let (front, payload) = stored.split_once('.').ok_or(Error::Malformed("no dot"))?;
        Ok(Self { front: front.parse()?, payload })
    }

    /// Ciphertext ‖ tag. Never shorter than 17 bytes: an empty value is stored as an empty text.
    ///
    /// # Errors
    /// [`Malformed`](Error::Malformed) if it is no canonical base64, or too short.
    pub fn payload(&self) -> Result<Vec<u8>, Error> {
        let payload = encoding::decode(self.payload).ok_or(Error::Malformed("payload is not canonical base64"))?;
        if payload.len() <= TAG {
            return Err(Error::Malformed("payload is too short"));
        }
        Ok(payload)
    }
}

/// Writes a sealed value: the front, a dot, the payload.
pub fn write(front: &Front, payload: &[u8]) -> String {
    let mut sealed = String::with_capacity(FRONT_AT_MOST + encoding::length(payload.len()));
    front.write(&mut sealed);
    sealed.push('.');
    encoding::append(payload, &mut sealed);
    sealed
}

/// The length in bytes of a sealed value of `value` bytes, wrapped by `alg` and to no further keys: exact.
pub fn sealed_length(alg: Alg, value: usize) -> u64 {
    (front_length(alg) + 1 + encoding::length(value + TAG)) as u64
}

/// The length in bytes of what stands before the first dot of a value wrapped by `alg` and to no further keys: exact.
pub(crate) fn front_length(alg: Alg) -> usize {
    match alg {
        Alg::A256Kw => 309,
        Alg::A256GcmKw => 305,
    }
}

/// Why a stored text is no value of this format.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum Error {
    /// It carries the marker and is damaged, or not in canonical form.
    #[error("malformed envelope: {0}")]
    Malformed(&'static str),
    /// A version or algorithm this version of hardwrap does not know.
    #[error("unsupported {0}")]
    Unsupported(&'static str),
}

/// Room for a front without further keys.
const FRONT_AT_MOST: usize = 310;
