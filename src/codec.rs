//! Seals values into text and opens them again: DEK, cipher, checksum, envelope and the column's policy in one place.

use std::fmt;
use std::sync::Arc;

use zeroize::Zeroizing;

use crate::aead::{self, Iv};
use crate::column::{Cleartext, Place};
use crate::envelope::{self, Envelope, Front, Marker};
use crate::provider::{KeyId, KeyProvider, ProviderError, WrappedDek, random};
use crate::secret::{Dek, Plaintext};

/// Seals and opens values under the keys of one provider. Cheap to clone.
#[derive(Clone)]
pub struct Codec {
    keys: Arc<dyn KeyProvider>,
}

impl Codec {
    /// Works with `keys`.
    pub fn new(keys: Arc<dyn KeyProvider>) -> Self {
        Self { keys }
    }

    /// Seals `value` for `place` under the current master key: a new DEK and nonce each time. An empty value stays
    /// empty: `''`, never a ciphertext of nothing.
    ///
    /// # Errors
    /// [`Error::Unavailable`], [`Error::TooLarge`]. Cleartext is never returned.
    pub fn seal(&self, place: &Place<'_>, value: &[u8]) -> Result<String, Error> {
        if value.is_empty() {
            return Ok(String::new());
        }
        let key = self.keys.current()?;
        fits(place, value, envelope::sealed_length(key.alg, value.len()))?;
        let (dek, iv) = draw()?;
        let wrapped = self.keys.wrap(key.id, &dek, &place.context().aad())?;
        seal_with(place, value, &dek, iv, wrapped)
    }

    /// Opens a stored text at `place`.
    ///
    /// # Errors
    /// Every variant of [`Error`] but [`Error::TooLarge`]; never a panic, never a guess.
    pub fn open(&self, place: &Place<'_>, stored: &str) -> Result<Plaintext, Error> {
        match Marker::of(stored) {
            Marker::Empty => return Ok(Plaintext::new(Vec::new())),
            Marker::Hw1 => {}
            Marker::HwOther => return Err(Error::Unsupported("envelope version")),
            Marker::Foreign => return Err(Error::Foreign),
            Marker::None => {
                return match place.column().policy() {
                    Cleartext::Accept => Ok(Plaintext::new(stored.as_bytes().to_vec())),
                    Cleartext::Refuse => Err(Error::Cleartext),
                };
            }
        }
        let envelope = Envelope::parse(stored)?;
        // Decoded before the token is asked: a damaged text costs no call.
        let payload = envelope.payload()?;
        let Front { wrapped, iv, sum, .. } = envelope.front;
        let dek = self.keys.unwrap(&wrapped, &place.context().aad())?;
        aead::open(&dek, &iv, &sum, place.context(), payload).map_err(|aead::Rejected| Error::Rejected)
    }
}

impl fmt::Debug for Codec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Codec(..)")
    }
}

/// Draws a DEK and a nonce in one call to the operating system, which costs more than the bytes.
fn draw() -> Result<(Dek, Iv), ProviderError> {
    let mut drawn = Zeroizing::new([0; 44]);
    random(drawn.as_mut_slice())?;
    let (iv, rest) = drawn.split_first_chunk().expect("44 bytes are an IV of 12 and a DEK of 32");
    let dek = Dek::init(|dek| {
        dek.copy_from_slice(rest);
        Ok::<_, ProviderError>(())
    })?;
    Ok((dek, *iv))
}

/// Everything of a seal but the drawing and the wrapping, so that the vectors can be sealed again byte for byte.
fn seal_with(place: &Place<'_>, value: &[u8], dek: &Dek, iv: Iv, wrapped: WrappedDek) -> Result<String, Error> {
    let (payload, sum) = aead::seal(dek, &iv, place.context(), value).map_err(|aead::Rejected| Error::TooLarge {
        column: place.column().to_string(),
        needs: value.len() as u64,
        holds: aead::LONGEST,
    })?;
    Ok(envelope::write(&Front { wrapped, iv, sum, also: Vec::new() }, &payload))
}

fn fits(place: &Place<'_>, value: &[u8], sealed: u64) -> Result<(), Error> {
    let column = place.column();
    let (needs, holds) = match column.capacity().0 {
        _ if value.len() as u64 > aead::LONGEST => (value.len() as u64, aead::LONGEST),
        Some(limit) if sealed > limit => (sealed, limit),
        _ => return Ok(()),
    };
    Err(Error::TooLarge { column: column.to_string(), needs, holds })
}

/// Why a value could not be sealed or opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The keys cannot be used now; try again. Nothing is known about the value, and nothing was stored.
    #[error("the keys are unavailable")]
    Unavailable(#[source] ProviderError),

    /// The value names a key that the keyring does not hold.
    #[error("the value is sealed under key {0}, which the keyring does not hold")]
    UnknownKey(KeyId),

    /// The value failed authentication: altered, or moved from another place. No detail, by intent.
    #[error("the value failed authentication: it was altered, or belongs to another row or column")]
    Rejected,

    /// The value carries the marker and is damaged.
    #[error("malformed envelope: {0}")]
    Malformed(&'static str),

    /// A version or algorithm that this version of hardwrap does not know.
    #[error("unsupported {0}: a newer hardwrap wrote it")]
    Unsupported(&'static str),

    /// The sealed value would not fit; nothing was stored.
    #[error("column {column} holds {holds} bytes and the sealed value needs {needs}")]
    TooLarge {
        /// `TABLE.COLUMN`.
        column: String,
        /// Bytes the sealed value needs.
        needs: u64,
        /// Bytes the column holds.
        holds: u64,
    },

    /// The value carries no marker, and its column is closed to cleartext.
    #[error("the value is not sealed, and its column refuses cleartext")]
    Cleartext,

    /// The value is an envelope of nr-vault or nr-llm (`nrv1:`, `v2:`): it has to be migrated.
    #[error("the value is an nr-vault envelope: it has to be migrated")]
    Foreign,
}

impl Error {
    /// The name of the variant: stable, for programs.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Unavailable(_) => "Unavailable",
            Self::UnknownKey(_) => "UnknownKey",
            Self::Rejected => "Rejected",
            Self::Malformed(_) => "Malformed",
            Self::Unsupported(_) => "Unsupported",
            Self::TooLarge { .. } => "TooLarge",
            Self::Cleartext => "Cleartext",
            Self::Foreign => "Foreign",
        }
    }
}

impl From<ProviderError> for Error {
    fn from(error: ProviderError) -> Self {
        match error {
            ProviderError::UnknownKey(key) => Self::UnknownKey(key),
            ProviderError::Rejected => Self::Rejected,
            unavailable => Self::Unavailable(unavailable),
        }
    }
}

impl From<envelope::Error> for Error {
    fn from(error: envelope::Error) -> Self {
        match error {
            envelope::Error::Malformed(what) => Self::Malformed(what),
            envelope::Error::Unsupported(what) => Self::Unsupported(what),
        }
    }
}

#[cfg(test)]
mod tests;
