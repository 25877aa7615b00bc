//! Seals values into text and opens them again: DEK, cipher, checksum, envelope and the column's policy in one place.
//!
//! What is done is counted for whichever recorder of the package `metrics` the application installs, labelled with the
//! column's name, never with anything of a value:
//!
//! | counter | one for each |
//! |---|---|
//! | `hardwrap_seals_total{column}` | value sealed |
//! | `hardwrap_opens_total{column}` | value opened, cleartext not included |
//! | `hardwrap_rewraps_total{column}` | DEK wrapped anew |
//! | `hardwrap_cleartext_reads_total{column}` | value returned as it was stored, unsealed, by a column that accepts that |
//! | `hardwrap_errors_total{column, kind}` | failure, by [`Error::kind`]; without a column where the keeper was given none that is registered, or a wrong row |
//!
//! Each call is a `tracing` span `seal`, `open` or `rewrap` of the target `hardwrap::codec`, at DEBUG, with the column.

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
        let _span = tracing::debug_span!(target: TARGET, "seal", column = %place.column()).entered();
        let sealed = self.seal_value(place, value);
        counted(place, SEALS, sealed)
    }

    /// Opens a stored text at `place`.
    ///
    /// # Errors
    /// Every variant of [`Error`] but [`Error::TooLarge`]; never a panic, never a guess.
    pub fn open(&self, place: &Place<'_>, stored: &str) -> Result<Plaintext, Error> {
        let _span = tracing::debug_span!(target: TARGET, "open", column = %place.column()).entered();
        match Marker::of(stored) {
            Marker::Empty => Ok(Plaintext::new(Vec::new())),
            Marker::None if place.column().policy() == Cleartext::Accept => {
                counted(place, CLEARTEXT_READS, Ok(Plaintext::new(stored.as_bytes().to_vec())))
            }
            marker => counted(place, OPENS, self.open_value(place, stored, marker)),
        }
    }

    /// Wraps the DEK of a stored text under the current master key. The payload, everything from the first dot on, is
    /// carried over as it stands and never decrypted. None if there is nothing to do: it is wrapped so already, or is
    /// empty, or cleartext in a column that accepts that.
    ///
    /// # Errors
    /// Every variant of [`Error`]. A DEK that does not unwrap is never wrapped; a payload that was damaged is carried
    /// over as it is, for only opening looks at it.
    pub fn rewrap(&self, place: &Place<'_>, stored: &str) -> Result<Option<String>, Error> {
        let _span = tracing::debug_span!(target: TARGET, "rewrap", column = %place.column()).entered();
        match Marker::of(stored) {
            Marker::Empty => Ok(None),
            Marker::None if place.column().policy() == Cleartext::Accept => Ok(None),
            marker => match self.rewrap_value(place, stored, marker) {
                Ok(None) => Ok(None),
                outcome => counted(place, REWRAPS, outcome),
            },
        }
    }

    /// [`Codec::rewrap`] for who has only what stands before the first dot; `rest` is how many bytes follow it, the dot
    /// included.
    ///
    /// # Errors
    /// As [`Codec::rewrap`].
    pub fn rewrap_front(&self, place: &Place<'_>, front: &str, rest: u64) -> Result<Option<String>, Error> {
        let rewrapped = match self.rewrap_front_to_current(place, front, rest) {
            Err(Error::Unavailable(ProviderError::NotCurrent(_))) => self.rewrap_front_to_current(place, front, rest),
            outcome => outcome,
        };
        match rewrapped {
            Ok(None) => Ok(None),
            outcome => counted(place, REWRAPS, outcome),
        }
    }

    /// Unwraps the DEK of what stands before the first dot, and forgets it: whether the value could be re-wrapped.
    ///
    /// # Errors
    /// As [`Codec::rewrap`].
    pub fn try_front(&self, place: &Place<'_>, front: &str) -> Result<(), Error> {
        let front: Front = front.parse()?;
        Ok(self.keys.unwrap(&front.wrapped, &place.context().aad()).map(drop)?)
    }

    /// A key that was fenced between asking for it and wrapping under it is asked for once more.
    fn seal_value(&self, place: &Place<'_>, value: &[u8]) -> Result<String, Error> {
        match self.seal_under_current(place, value) {
            Err(Error::Unavailable(ProviderError::NotCurrent(_))) => self.seal_under_current(place, value),
            outcome => outcome,
        }
    }

    fn seal_under_current(&self, place: &Place<'_>, value: &[u8]) -> Result<String, Error> {
        let key = self.keys.current()?;
        fits(place, value.len() as u64, envelope::sealed_length(key.alg, value.len()))?;
        let (dek, iv) = draw()?;
        let wrapped = self.keys.wrap(key.id, &dek, &place.context().aad())?;
        seal_with(place, value, &dek, iv, wrapped)
    }

    fn open_value(&self, place: &Place<'_>, stored: &str, marker: Marker) -> Result<Plaintext, Error> {
        ours(marker)?;
        let envelope = Envelope::parse(stored)?;
        // Decoded before the token is asked: a damaged text costs no call.
        let payload = envelope.payload()?;
        let Front { wrapped, iv, sum, .. } = envelope.front;
        let dek = self.keys.unwrap(&wrapped, &place.context().aad())?;
        aead::open(&dek, &iv, &sum, place.context(), payload).map_err(|aead::Rejected| Error::Rejected)
    }

    fn rewrap_value(&self, place: &Place<'_>, stored: &str, marker: Marker) -> Result<Option<String>, Error> {
        match self.rewrap_to_current(place, stored, marker) {
            Err(Error::Unavailable(ProviderError::NotCurrent(_))) => self.rewrap_to_current(place, stored, marker),
            outcome => outcome,
        }
    }

    fn rewrap_to_current(&self, place: &Place<'_>, stored: &str, marker: Marker) -> Result<Option<String>, Error> {
        ours(marker)?;
        let (front, payload) = stored.split_once('.').ok_or(Error::Malformed("no dot"))?;
        let rest = payload.len() as u64 + 1;
        let Some(mut sealed) = self.rewrap_front_to_current(place, front, rest)? else { return Ok(None) };
        sealed.reserve_exact(payload.len() + 1);
        sealed.push('.');
        sealed.push_str(payload);
        Ok(Some(sealed))
    }

    fn rewrap_front_to_current(&self, place: &Place<'_>, front: &str, rest: u64) -> Result<Option<String>, Error> {
        let mut front: Front = front.parse()?;
        let key = self.keys.current()?;
        if front.wrapped.key == key.id {
            return Ok(None);
        }
        let aad = place.context().aad();
        let dek = self.keys.unwrap(&front.wrapped, &aad)?;
        front.wrapped = self.keys.wrap(key.id, &dek, &aad)?;
        let mut sealed = String::new();
        front.write(&mut sealed);
        fits(place, 0, sealed.len() as u64 + rest)?;
        Ok(Some(sealed))
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

/// Counts an outcome: a success under `name`, a failure by its kind.
fn counted<T>(place: &Place<'_>, name: &'static str, outcome: Result<T, Error>) -> Result<T, Error> {
    let column = place.column().to_string();
    match &outcome {
        Ok(_) => metrics::counter!(name, "column" => column).increment(1),
        Err(error) => {
            let kind = error.kind();
            tracing::debug!(target: TARGET, %column, kind, "a value could not be sealed or opened");
            metrics::counter!(ERRORS, "column" => column, "kind" => kind).increment(1);
        }
    }
    outcome
}

/// Whether a marker is that of an envelope which this version opens.
fn ours(marker: Marker) -> Result<(), Error> {
    match marker {
        Marker::Hw1 => Ok(()),
        Marker::HwOther => Err(Error::Unsupported("envelope version")),
        Marker::Foreign => Err(Error::Foreign),
        Marker::None | Marker::Empty => Err(Error::Cleartext),
    }
}

fn fits(place: &Place<'_>, value: u64, sealed: u64) -> Result<(), Error> {
    let column = place.column();
    let (needs, holds) = match column.capacity().0 {
        _ if value > aead::LONGEST => (value, aead::LONGEST),
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

const TARGET: &str = "hardwrap::codec";
const SEALS: &str = "hardwrap_seals_total";
const OPENS: &str = "hardwrap_opens_total";
const REWRAPS: &str = "hardwrap_rewraps_total";
const CLEARTEXT_READS: &str = "hardwrap_cleartext_reads_total";
const ERRORS: &str = "hardwrap_errors_total";

#[cfg(test)]
mod tests;
