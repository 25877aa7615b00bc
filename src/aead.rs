//! The value's cipher: AES-256-GCM (SP 800-38D) under the DEK with the context as AAD, and the checksum that commits
//! to the DEK, which GCM alone does not.

use aes_gcm::aead::inout::InOutBuf;
use aes_gcm::{AeadInOut, Aes256Gcm, Key, KeyInit, Nonce, Tag};
use hkdf::Hkdf;
use hmac::{Hmac, Mac};
use sha2::Sha256;
use zeroize::Zeroizing;

use crate::column::Context;
use crate::secret::{Dek, Plaintext};

/// A value's nonce, 12 bytes.
pub type Iv = [u8; 12];
/// A value's checksum, 32 bytes.
pub type Sum = [u8; 32];

/// Bytes that GCM appends to the ciphertext.
pub const TAG: usize = 16;
/// The longest value GCM takes under one nonce: 2^36 - 32 bytes (SP 800-38D §5.2.1.1).
pub const LONGEST: u64 = (1 << 36) - 32;

/// The value did not authenticate. No detail, by intent.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Rejected;

/// Encrypts `value`: ciphertext ‖ tag, and its checksum.
///
/// # Errors
/// [`Rejected`] if the value is longer than [`LONGEST`].
pub fn seal(dek: &Dek, iv: &Iv, context: &Context, value: &[u8]) -> Result<(Vec<u8>, Sum), Rejected> {
    // Encrypted from one buffer into the other: no copy of the value is made that would have to be wiped.
    let mut payload = Vec::with_capacity(value.len() + TAG);
    payload.resize(value.len(), 0);
    let buffer = InOutBuf::new(value, &mut payload).map_err(|_| Rejected)?;
    let tag =
        cipher(dek).encrypt_inout_detached(&Nonce::from(*iv), context.as_bytes(), buffer).map_err(|_| Rejected)?;
    payload.extend_from_slice(&tag);
    let sum = checksum(dek, iv, &tag.into(), context).finalize().into_bytes();
    Ok((payload, sum.into()))
}

/// Decrypts ciphertext ‖ tag in place, after its checksum was found right, in constant time.
///
/// # Errors
/// [`Rejected`] if anything was altered or belongs elsewhere.
pub fn open(dek: &Dek, iv: &Iv, sum: &Sum, context: &Context, mut payload: Vec<u8>) -> Result<Plaintext, Rejected> {
    let length = payload.len().checked_sub(TAG).ok_or(Rejected)?;
    let tag: [u8; TAG] = payload[length..].try_into().map_err(|_| Rejected)?;
    checksum(dek, iv, &tag, context).verify_slice(sum).map_err(|_| Rejected)?;
    payload.truncate(length);
    // GCM checks the tag before it decrypts: a rejected payload was never turned into cleartext.
    cipher(dek)
        .decrypt_inout_detached(&Nonce::from(*iv), context.as_bytes(), payload.as_mut_slice().into(), &Tag::from(tag))
        .map_err(|_| Rejected)?;
    Ok(Plaintext::new(payload))
}

fn cipher(dek: &Dek) -> Aes256Gcm {
    Aes256Gcm::new(<&Key<Aes256Gcm>>::from(dek.expose()))
}

/// HMAC-SHA256 (RFC 2104) of iv ‖ tag ‖ context, under a key drawn from the DEK by HKDF-SHA256 (RFC 5869).
fn checksum(dek: &Dek, iv: &Iv, tag: &[u8; TAG], context: &Context) -> Hmac<Sha256> {
    let mut key = Zeroizing::new([0u8; 32]);
    Hkdf::<Sha256>::new(None, dek.expose())
        .expand(CHECKSUM_INFO, key.as_mut_slice())
        .expect("HKDF-SHA256 gives up to 8160 bytes");
    <Hmac<Sha256> as KeyInit>::new_from_slice(key.as_slice())
        .expect("HMAC takes a key of any length")
        .chain_update(iv)
        .chain_update(tag)
        .chain_update(context.as_bytes())
}

const CHECKSUM_INFO: &[u8] = b"hardwrap-checksum-v1";
