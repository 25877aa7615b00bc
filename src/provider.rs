//! The hinge between the two wings: what envelopes need of a master key, whoever holds it.
//!
//! The left wing (envelopes, databases) calls [`KeyProvider`]; the right wing (`hsm`) implements it over a PKCS#11
//! token. Neither knows the other.

use std::error::Error as StdError;
use std::fmt;
use std::str::FromStr;

use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use zeroize::{Zeroize, Zeroizing};

use crate::secret::Dek;

/// The one joint between envelopes and master keys. `hsm::Keyring` is the real one; tests bring a key held in memory.
pub trait KeyProvider: Send + Sync {
    /// The master key that new envelopes are wrapped under.
    ///
    /// # Errors
    /// [`ProviderError::NoCurrentKey`] until one is activated; [`ProviderError::Unavailable`].
    fn current(&self) -> Result<MasterKey, ProviderError>;

    /// Wraps `dek` under `key`, bound to `aad`.
    ///
    /// # Errors
    /// [`ProviderError::UnknownKey`] if `key` is not there; [`ProviderError::NotCurrent`] if it may not wrap any more;
    /// [`ProviderError::Unavailable`].
    fn wrap(&self, key: KeyId, dek: &Dek, aad: &Aad) -> Result<WrappedDek, ProviderError>;

    /// Unwraps a data key, under whichever master key `wrapped` names.
    ///
    /// # Errors
    /// [`ProviderError::UnknownKey`]; [`ProviderError::Rejected`] if the bytes were altered or bound to another
    /// `aad`; [`ProviderError::Unavailable`].
    fn unwrap(&self, wrapped: &WrappedDek, aad: &Aad) -> Result<Dek, ProviderError>;
}

/// Names one master key for ever: its `CKA_ID`, 8 bytes (generation, u16 big-endian; then 6 random bytes), written as
/// 16 lower-case hex digits.
#[derive(Clone, Copy, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct KeyId([u8; 8]);

impl KeyId {
    /// The id of a key of `generation` with the given random part.
    pub fn new(generation: u16, random: [u8; 6]) -> Self {
        let mut id = [0; 8];
        id[..2].copy_from_slice(&generation.to_be_bytes());
        id[2..].copy_from_slice(&random);
        Self(id)
    }

    /// How many keys this keyring had made when this one was, starting at 1.
    pub fn generation(self) -> u16 {
        u16::from_be_bytes([self.0[0], self.0[1]])
    }

    /// The `CKA_ID` bytes.
    pub fn as_bytes(&self) -> &[u8; 8] {
        &self.0
    }
}

impl From<[u8; 8]> for KeyId {
    fn from(bytes: [u8; 8]) -> Self {
        Self(bytes)
    }
}

impl FromStr for KeyId {
    type Err = NotAKeyId;

    fn from_str(text: &str) -> Result<Self, NotAKeyId> {
        let canonical = |c: u8| c.is_ascii_digit() || (b'a'..=b'f').contains(&c);
        if text.len() != 16 || !text.bytes().all(canonical) {
            return Err(NotAKeyId);
        }
        let id = u64::from_str_radix(text, 16).map_err(|_| NotAKeyId)?;
        Ok(Self(id.to_be_bytes()))
    }
}

impl fmt::Display for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", u64::from_be_bytes(self.0))
    }
}

impl fmt::Debug for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KeyId({self})")
    }
}

/// A text is no key id.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("want a key id: 16 lower-case hex digits")]
pub struct NotAKeyId;

/// How a DEK is wrapped: the meaning of the bytes, by its name in RFC 7518, not a mechanism number.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Alg {
    /// AES Key Wrap (RFC 3394) of 64 bytes, DEK ‖ SHA-256(aad), into 72.
    A256Kw,
    /// AES-256-GCM (SP 800-38D) of the 32-byte DEK with a 12-byte IV and the aad: 48 bytes, ciphertext ‖ tag.
    A256GcmKw,
}

impl Alg {
    /// The name in an envelope's header.
    pub fn name(self) -> &'static str {
        match self {
            Self::A256Kw => "A256KW",
            Self::A256GcmKw => "A256GCMKW",
        }
    }

    /// The algorithm called `name`, if this version knows it.
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::A256Kw, Self::A256GcmKw].into_iter().find(|alg| alg.name() == name)
    }
}

/// A master key as a sealer needs to know it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct MasterKey {
    /// Its name.
    pub id: KeyId,
    /// How it wraps.
    pub alg: Alg,
}

/// What a wrapped DEK is bound to: `"hw1-dek" 00` and the value's context. Only [`crate::column::Context`] makes one
/// for values, so reader and rotator cannot disagree.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Aad(Vec<u8>);

impl Aad {
    /// Binds to `bytes`. For values, take [`crate::column::Context::aad`].
    pub fn new(bytes: Vec<u8>) -> Self {
        Self(bytes)
    }

    /// The bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

/// A data key wrapped by one master key.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct WrappedDek {
    /// The master key it is wrapped under.
    pub key: KeyId,
    /// The wrapped bytes.
    pub bytes: WrappedBytes,
}

/// The bytes of a wrapped DEK, by algorithm.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub enum WrappedBytes {
    /// [`Alg::A256Kw`].
    A256Kw([u8; 72]),
    /// [`Alg::A256GcmKw`].
    A256GcmKw {
        /// The IV of the wrapping, never the value's.
        iv: [u8; 12],
        /// Ciphertext ‖ tag.
        bytes: [u8; 48],
    },
}

impl WrappedDek {
    /// How it is wrapped.
    pub fn alg(&self) -> Alg {
        match self.bytes {
            WrappedBytes::A256Kw(_) => Alg::A256Kw,
            WrappedBytes::A256GcmKw { .. } => Alg::A256GcmKw,
        }
    }
}

/// What [`Alg::A256Kw`] wraps: 64 bytes, DEK ‖ SHA-256(aad). Wiped on drop, never printed, never cloned.
pub struct BoundDek(Box<Zeroizing<[u8; 64]>>);

impl BoundDek {
    /// Joins a DEK with the digest of what it is bound to.
    pub fn new(dek: &Dek, aad: &Aad) -> Self {
        let mut bound = Self(Box::new(Zeroizing::new([0; 64])));
        bound.0[..32].copy_from_slice(dek.expose());
        bound.0[32..].copy_from_slice(&Sha256::digest(aad.as_bytes()));
        bound
    }

    /// Fills 64 unwrapped bytes in place.
    ///
    /// # Errors
    /// Whatever `fill` fails with.
    pub fn init<E>(fill: impl FnOnce(&mut [u8; 64]) -> Result<(), E>) -> Result<Self, E> {
        let mut bound = Self(Box::new(Zeroizing::new([0; 64])));
        fill(&mut bound.0)?;
        Ok(bound)
    }

    /// The only way to the bytes: a search for this name finds every use.
    pub fn expose(&self) -> &[u8; 64] {
        &self.0
    }

    /// The DEK, if it was bound to `aad`. The digests are compared in constant time.
    ///
    /// # Errors
    /// [`ProviderError::Rejected`] if it was bound to something else.
    pub fn release(self, aad: &Aad) -> Result<Dek, ProviderError> {
        let (dek, digest) = self.0.split_at(32);
        if !bool::from(Sha256::digest(aad.as_bytes()).as_slice().ct_eq(digest)) {
            return Err(ProviderError::Rejected);
        }
        Dek::init(|bytes| {
            bytes.copy_from_slice(dek);
            Ok(())
        })
    }
}

impl fmt::Debug for BoundDek {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("BoundDek(..)")
    }
}

/// Why a master key did not do what was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProviderError {
    /// No key is active yet, so nothing can be sealed. `hardwrap init` makes one.
    #[error("the keyring has no active key")]
    NoCurrentKey,

    /// The keyring is there and does not know this key.
    #[error("no key {0} in the keyring")]
    UnknownKey(KeyId),

    /// The key may not wrap any more: another seals by now, and [`KeyProvider::current`] names it.
    #[error("key {0} may not wrap any more")]
    NotCurrent(KeyId),

    /// The wrapped bytes were altered, or belong elsewhere. No detail, by intent.
    #[error("the wrapped data key failed authentication")]
    Rejected,

    /// The keys cannot be used now; the source says why. Nothing is known about the value.
    #[error("the keyring is unavailable")]
    Unavailable(#[source] Box<dyn StdError + Send + Sync>),
}

/// Fills `bytes` from the operating system's generator, one call for all a seal needs.
pub(crate) fn random(bytes: &mut [u8]) -> Result<(), ProviderError> {
    getrandom::fill(bytes).map_err(|error| {
        bytes.zeroize();
        ProviderError::Unavailable(Box::new(error))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_id_is_sixteen_lower_case_hex_digits() {
        let id: KeyId = "000196c9441ba3af".parse().expect("a canonical id");
        assert_eq!((id.to_string().as_str(), id.generation()), ("000196c9441ba3af", 1));
        for bad in
            ["", "000196C9441BA3AF", "000196c9441ba3a", "000196c9441ba3af0", "+00196c9441ba3af", "000196c9441ba3aé"]
        {
            assert_eq!(bad.parse::<KeyId>(), Err(NotAKeyId), "{bad}");
        }
    }

    #[test]
    fn a_bound_dek_is_released_only_to_its_own_aad() {
        let dek = Dek::init(|b| {
            b.fill(7);
            Ok::<_, ProviderError>(())
        })
        .expect("filled");
        let (here, there) = (Aad::new(b"here".to_vec()), Aad::new(b"there".to_vec()));
        let released = BoundDek::new(&dek, &here).release(&here).expect("its own");
        assert_eq!(released.expose(), dek.expose());
        assert!(matches!(BoundDek::new(&dek, &here).release(&there), Err(ProviderError::Rejected)));
    }
}
