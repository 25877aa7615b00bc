//! Secrets and the types that keep them silent: wiped on drop, never printed, never cloned.

use std::fmt;

use zeroize::{Zeroize, Zeroizing};

/// A data key of 32 bytes: wiped on drop, never printed, never cloned.
pub struct Dek(Box<Zeroizing<[u8; 32]>>);

impl Dek {
    /// Fills a new key in place, so that no copy stays behind on the stack.
    ///
    /// # Errors
    /// Whatever `fill` fails with.
    pub fn init<E>(fill: impl FnOnce(&mut [u8; 32]) -> Result<(), E>) -> Result<Self, E> {
        let mut dek = Self(Box::default());
        fill(&mut dek.0)?;
        Ok(dek)
    }

    /// The only way to the bytes: a search for this name finds every use.
    pub fn expose(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Debug for Dek {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Dek(..)")
    }
}

/// An opened value: any bytes, wiped on drop, never printed, never cloned.
pub struct Plaintext(Vec<u8>);

impl Plaintext {
    /// Takes over `bytes`; they are wiped when this drops.
    pub fn new(bytes: Vec<u8>) -> Self {
        Self(bytes)
    }

    /// The only way to the bytes: a search for this name finds every use.
    pub fn expose(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for Plaintext {
    fn drop(&mut self) {
        // Room that is not in use may hold what was there before. As a slice: zeroize wipes a slice 20 times as fast as
        // a vector, and a value may be megabytes.
        self.0.resize(self.0.capacity(), 0);
        self.0.as_mut_slice().zeroize();
    }
}

impl fmt::Debug for Plaintext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Plaintext(..)")
    }
}

/// The user PIN of a token, UTF-8 as PKCS#11 wants it: wiped on drop, never printed, never cloned.
pub struct Pin(Zeroizing<String>);

impl Pin {
    /// Takes over `text`; it is wiped when this drops.
    pub fn new(text: String) -> Self {
        Self(Zeroizing::new(text))
    }

    /// Takes a PIN as a file or a terminal gives it: one trailing newline (`\n` or `\r\n`) is not part of it.
    ///
    /// # Errors
    /// [`NotText`] if the bytes are not UTF-8, which no PKCS#11 PIN is.
    pub fn from_line(bytes: Vec<u8>) -> Result<Self, NotText> {
        let mut text = match String::from_utf8(bytes) {
            Ok(text) => Zeroizing::new(text),
            Err(error) => {
                error.into_bytes().zeroize();
                return Err(NotText);
            }
        };
        if text.ends_with('\n') {
            text.pop();
            if text.ends_with('\r') {
                text.pop();
            }
        }
        Ok(Self(text))
    }

    /// The only way to the text: a search for this name finds every use.
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// Whether this is the same PIN, compared without a data-dependent branch.
    pub fn same(&self, other: &Self) -> bool {
        use subtle::ConstantTimeEq;
        self.0.as_bytes().ct_eq(other.0.as_bytes()).into()
    }
}

impl fmt::Debug for Pin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Pin(..)")
    }
}

/// A PIN was not UTF-8.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("the PIN is not UTF-8 text")]
pub struct NotText;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_trailing_newline_is_not_part_of_a_pin() {
        for (line, pin) in [("1234\n", "1234"), ("1234\r\n", "1234"), ("1234\n\n", "1234\n"), (" 1 ", " 1 "), ("", "")]
        {
            assert_eq!(Pin::from_line(line.into()).map(|p| p.expose().to_owned()), Ok(pin.to_owned()));
        }
        assert_eq!(Pin::from_line(vec![0xff]).map(|_| ()), Err(NotText));
    }

    #[test]
    fn secrets_do_not_print() {
        let dek = Dek::init(|bytes| {
            bytes.fill(0x41);
            Ok::<_, NotText>(())
        });
        let shown = format!("{dek:?} {:?} {:?}", Plaintext::new(b"AAAA".to_vec()), Pin::new("AAAA".into()));
        assert_eq!(shown, "Ok(Dek(..)) Plaintext(..) Pin(..)");
    }
}
