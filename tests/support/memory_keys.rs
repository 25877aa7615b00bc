//! Master keys held in memory: the second implementer of the hinge, for tests only. Nothing in the library uses it.

use std::collections::BTreeMap;
use std::sync::Mutex;

use aes_gcm::aead::{Aead, Payload};
use aes_gcm::{Aes256Gcm, KeyInit};
use aes_kw::KwAes256;
use hardwrap::provider::{Aad, Alg, BoundDek, KeyId, KeyProvider, MasterKey, ProviderError, WrappedBytes, WrappedDek};
use hardwrap::secret::Dek;

/// A keyring in memory. `unavailable` makes every call fail, as a token does that was taken away.
pub(crate) struct MemoryKeys {
    keys: BTreeMap<KeyId, (Alg, [u8; 32])>,
    current: Option<KeyId>,
    unavailable: Mutex<bool>,
    dek_iv: Option<[u8; 12]>,
}

#[allow(
    dead_code,
    clippy::unwrap_used,
    clippy::missing_panics_doc,
    reason = "not every test uses every part; for tests only"
)]
impl MemoryKeys {
    /// One key, active.
    pub(crate) fn one(id: KeyId, alg: Alg, kek: [u8; 32]) -> Self {
        Self { keys: [(id, (alg, kek))].into(), current: Some(id), unavailable: Mutex::new(false), dek_iv: None }
    }

    /// One key more, which seals from now on; the others still open.
    pub(crate) fn then(mut self, id: KeyId, alg: Alg, kek: [u8; 32]) -> Self {
        self.keys.insert(id, (alg, kek));
        self.current = Some(id);
        self
    }

    /// Wraps with this IV every time, to make the bytes of a vector again.
    pub(crate) fn with_dek_iv(mut self, iv: [u8; 12]) -> Self {
        self.dek_iv = Some(iv);
        self
    }

    /// From now on every call fails, or works again.
    pub(crate) fn set_unavailable(&self, unavailable: bool) {
        *self.unavailable.lock().unwrap() = unavailable;
    }

    fn reach(&self) -> Result<(), ProviderError> {
        if *self.unavailable.lock().unwrap() {
            return Err(ProviderError::Unavailable("the keys in memory were switched off".into()));
        }
        Ok(())
    }
}

#[allow(clippy::unwrap_used, reason = "for tests only")]
impl KeyProvider for MemoryKeys {
    fn current(&self) -> Result<MasterKey, ProviderError> {
        self.reach()?;
        let id = self.current.ok_or(ProviderError::NoCurrentKey)?;
        Ok(MasterKey { id, alg: self.keys[&id].0 })
    }

    fn wrap(&self, key: KeyId, dek: &Dek, aad: &Aad) -> Result<WrappedDek, ProviderError> {
        self.reach()?;
        let (alg, kek) = self.keys.get(&key).ok_or(ProviderError::UnknownKey(key))?;
        let bytes = match alg {
            Alg::A256Kw => {
                let mut bytes = [0; 72];
                KwAes256::new(kek.into()).wrap_key(BoundDek::new(dek, aad).expose(), &mut bytes).unwrap();
                WrappedBytes::A256Kw(bytes)
            }
            Alg::A256GcmKw => {
                let mut iv = [0; 12];
                getrandom::fill(&mut iv).unwrap();
                let iv = self.dek_iv.unwrap_or(iv);
                let payload = Payload { msg: dek.expose(), aad: aad.as_bytes() };
                let bytes = Aes256Gcm::new(kek.into()).encrypt(&iv.into(), payload).unwrap();
                WrappedBytes::A256GcmKw { iv, bytes: bytes.try_into().unwrap() }
            }
        };
        Ok(WrappedDek { key, bytes })
    }

    fn unwrap(&self, wrapped: &WrappedDek, aad: &Aad) -> Result<Dek, ProviderError> {
        self.reach()?;
        let (_, kek) = self.keys.get(&wrapped.key).ok_or(ProviderError::UnknownKey(wrapped.key))?;
        match &wrapped.bytes {
            WrappedBytes::A256Kw(bytes) => BoundDek::init(|bound| {
                KwAes256::new(kek.into()).unwrap_key(bytes, bound).map_err(|_| ProviderError::Rejected)?;
                Ok(())
            })?
            .release(aad),
            WrappedBytes::A256GcmKw { iv, bytes } => {
                let payload = Payload { msg: bytes, aad: aad.as_bytes() };
                let dek =
                    Aes256Gcm::new(kek.into()).decrypt(&(*iv).into(), payload).map_err(|_| ProviderError::Rejected)?;
                Dek::init(|bytes| {
                    bytes.copy_from_slice(&dek);
                    Ok(())
                })
            }
        }
    }
}
