//! The bare token calls, for measuring only (`benches/seal.rs`): what a wrap and an unwrap cost where nobody draws,
//! hashes, counts or checks anything.

use std::fmt;

use cryptoki::object::ObjectHandle;

use super::keyring::unavailable;
use super::raw::Cipher;
use super::route::Access;
use super::{Error, Keyring, Route};
use crate::provider::{Aad, BoundDek, KeyProvider, ProviderError, WrappedBytes};
use crate::secret::Dek;

/// The bare token calls, for measuring only: one wrap under the keyring's current key, done again and again with the
/// same DEK, the same aad and the same IV. So nothing is ever encrypted under an IV that encrypted something else.
pub struct Floor<'a> {
    access: Access<'a>,
    key: ObjectHandle,
    route: Route,
    dek: Dek,
    bound: BoundDek,
    aad: &'a Aad,
    wrapped: WrappedBytes,
}

impl Floor<'_> {
    /// Wraps a fixed DEK once, as `keyring` does it, and lends one session to `work`, to do that again. Inside of
    /// `work` the keyring itself is out of bounds: it may wait for the session.
    ///
    /// # Errors
    /// Whatever keeps the keyring from wrapping, and what `work` fails with.
    pub fn with<T>(
        keyring: &Keyring,
        aad: &Aad,
        work: impl FnOnce(&Floor<'_>) -> Result<T, Error>,
    ) -> Result<T, ProviderError> {
        let dek = Dek::init(|bytes| {
            bytes.fill(0x5a);
            Ok::<_, ProviderError>(())
        })?;
        let wrapped = keyring.wrap(keyring.current()?.id, &dek, aad)?;
        let work = |lease: &super::pool::Lease| {
            let found = lease.keys().get(wrapped.key).ok_or(Error::JustMissed(wrapped.key))?;
            let bound = BoundDek::new(&dek, aad);
            work(&Floor {
                access: lease.access(),
                key: found.handle,
                route: found.route,
                dek,
                bound,
                aad,
                wrapped: wrapped.bytes,
            })
        };
        keyring.pool.once(work).map_err(unavailable)
    }

    /// The calls of one wrap.
    ///
    /// # Errors
    /// [`Error::Call`].
    pub fn wrap(&self) -> Result<WrappedBytes, Error> {
        let Access { module, session } = self.access;
        let functions = &module.functions;
        match self.wrapped {
            WrappedBytes::A256Kw(_) if self.route == Route::KwWrap => {
                let object = functions.create_secret(session, self.bound.expose())?;
                module.count_object();
                let bytes = functions.wrap_key(session, self.key, object)?;
                functions.destroy(session, object)?;
                Ok(WrappedBytes::A256Kw(bytes))
            }
            WrappedBytes::A256Kw(_) => {
                let bytes = functions.encrypt(session, self.key, Cipher::KeyWrap, self.bound.expose())?;
                Ok(WrappedBytes::A256Kw(bytes))
            }
            WrappedBytes::A256GcmKw { mut iv, .. } => {
                if self.route == Route::GcmTokenIv {
                    iv.fill(0);
                }
                let bytes = functions.encrypt(session, self.key, Cipher::Gcm(&mut iv, self.aad), self.dek.expose())?;
                Ok(WrappedBytes::A256GcmKw { iv, bytes })
            }
        }
    }

    /// The calls of one unwrap.
    ///
    /// # Errors
    /// [`Error::Call`].
    pub fn unwrap(&self) -> Result<(), Error> {
        let Access { module, session } = self.access;
        let functions = &module.functions;
        match &self.wrapped {
            WrappedBytes::A256Kw(bytes) if self.route == Route::KwWrap => {
                let object = functions.unwrap_key(session, self.key, bytes, module.wants_value_length())?;
                module.count_object();
                functions.read_value(session, object, &mut [0; 64])?;
                functions.destroy(session, object)
            }
            WrappedBytes::A256Kw(bytes) => functions.decrypt(session, self.key, Cipher::KeyWrap, bytes, &mut [0; 64]),
            WrappedBytes::A256GcmKw { iv, bytes } => {
                let mut iv = *iv;
                functions.decrypt(session, self.key, Cipher::Gcm(&mut iv, self.aad), bytes, &mut [0; 32])
            }
        }
    }
}

impl fmt::Debug for Floor<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Floor").field("route", &self.route).finish_non_exhaustive()
    }
}
