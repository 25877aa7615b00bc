//! Base64 as envelopes use it: standard alphabet, padded, canonical (RFC 4648 §4). Anything else is refused.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

/// Appends the encoding of `bytes`.
pub(super) fn append(bytes: &[u8], text: &mut String) {
    STANDARD.encode_string(bytes, text);
}

/// Decodes canonical base64; `None` for anything else.
pub(super) fn decode(text: &str) -> Option<Vec<u8>> {
    STANDARD.decode(text).ok()
}

/// Decodes canonical base64 of exactly `N` bytes, 72 at most.
pub(super) fn decode_array<const N: usize>(text: &str) -> Option<[u8; N]> {
    if text.len() != length(N) {
        return None;
    }
    // Room for the decoder's estimate, which may be larger than what it writes.
    let mut buffer = [0; 80];
    let written = STANDARD.decode_slice(text, &mut buffer).ok()?;
    buffer.get(..written)?.try_into().ok()
}

/// The length of the encoding of `bytes` bytes.
pub(super) fn length(bytes: usize) -> usize {
    bytes.div_ceil(3) * 4
}
