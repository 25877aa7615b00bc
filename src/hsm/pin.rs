//! The PIN: where it comes from, and the guard that never tries a refused one again.

use std::env;
use std::fs::File;
use std::io::{self, IsTerminal, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use zeroize::Zeroize;

use super::UriError;
use super::token::TokenInfo;
use crate::secret::{NotText, Pin};

/// Where the PIN comes from. Never an argument.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum PinSource {
    /// `file:PATH`: a file; one trailing newline is not part of the PIN.
    File(PathBuf),
    /// `env:NAME`: an environment variable.
    Env(String),
    /// `credential:NAME`: a systemd credential, `$CREDENTIALS_DIRECTORY/NAME`.
    Credential(String),
    /// `prompt:`: asks on the terminal, without echo.
    Prompt,
}

impl PinSource {
    /// Whether a person types it: the only login at COUNT_LOW.
    pub fn is_interactive(&self) -> bool {
        matches!(self, Self::Prompt)
    }

    /// Reads the PIN.
    ///
    /// # Errors
    /// [`PinError::Source`] names the source, never its content.
    pub fn read(&self) -> Result<Pin, PinError> {
        match self {
            Self::File(path) => read_file(path),
            Self::Env(name) => {
                let text = env::var_os(name).ok_or_else(|| self.unreadable(io::ErrorKind::NotFound.into()))?;
                Pin::from_line(std::os::unix::ffi::OsStringExt::into_vec(text)).map_err(PinError::NotText)
            }
            Self::Credential(name) => {
                let directory = env::var_os("CREDENTIALS_DIRECTORY")
                    .ok_or_else(|| self.unreadable(io::Error::other("CREDENTIALS_DIRECTORY is not set")))?;
                read_file(&Path::new(&directory).join(name))
            }
            Self::Prompt => {
                if !io::stdin().is_terminal() && File::open("/dev/tty").is_err() {
                    return Err(self.unreadable(io::Error::other("there is no terminal to ask on")));
                }
                rpassword::prompt_password("PIN of the token: ").map(Pin::new).map_err(|error| self.unreadable(error))
            }
        }
    }

    /// What is unwise about this source, as one line: a file that others can read.
    pub fn warning(&self) -> Option<String> {
        let path = match self {
            Self::File(path) => path.clone(),
            _ => return None,
        };
        let about = path.metadata().ok()?;
        let caller = std::fs::metadata("/proc/self").ok()?.uid();
        let mode = about.mode();
        // A platform that keeps the file as root's lets us read it through a group of ours alone.
        let others = if about.uid() == caller { 0o077 } else { 0o007 };
        (mode & others != 0).then(|| {
            format!("PIN file {} can be read by others (mode {:03o}): chmod 600 it", path.display(), mode & 0o777)
        })
    }

    fn unreadable(&self, error: io::Error) -> PinError {
        PinError::Source(self.to_string(), error)
    }
}

fn read_file(path: &Path) -> Result<Pin, PinError> {
    let unreadable = |error| PinError::Source(format!("file:{}", path.display()), error);
    // Room for the longest sensible PIN at once, so that growing leaves no copy behind.
    let mut bytes = Vec::with_capacity(LONGEST_PIN);
    let read = File::open(path).and_then(|file| file.take(LONGEST_PIN as u64).read_to_end(&mut bytes));
    if let Err(error) = read {
        bytes.zeroize();
        return Err(unreadable(error));
    }
    if bytes.len() == LONGEST_PIN {
        bytes.zeroize();
        return Err(unreadable(io::Error::other("longer than a PIN can be")));
    }
    Pin::from_line(bytes).map_err(PinError::NotText)
}

impl FromStr for PinSource {
    type Err = UriError;

    fn from_str(text: &str) -> Result<Self, UriError> {
        // RFC 7512 §2.4: a file URI, or a plain absolute path.
        if let Some(path) = text.strip_prefix("file:") {
            let path = path.strip_prefix("//").unwrap_or(path);
            return if path.starts_with('/') { Ok(Self::File(path.into())) } else { Err(UriError::PinSource) };
        }
        match text.split_once(':') {
            Some(("prompt", "")) => Ok(Self::Prompt),
            Some(("env", name)) if is_name(name) => Ok(Self::Env(name.to_owned())),
            Some(("credential", name)) if is_name(name) => Ok(Self::Credential(name.to_owned())),
            None if text.starts_with('/') => Ok(Self::File(text.into())),
            _ => Err(UriError::PinSource),
        }
    }
}

fn is_name(text: &str) -> bool {
    !text.is_empty() && text != "." && text != ".." && !text.contains(['/', '\0', '='])
}

impl std::fmt::Display for PinSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::File(path) => write!(f, "file:{}", path.display()),
            Self::Env(name) => write!(f, "env:{name}"),
            Self::Credential(name) => write!(f, "credential:{name}"),
            Self::Prompt => f.write_str("prompt:"),
        }
    }
}

/// Why no login was tried, or why it failed. None of these is tried again by itself.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PinError {
    /// The source could not be read.
    #[error("cannot read the PIN from {0}")]
    Source(String, #[source] io::Error),
    /// The PIN is not UTF-8.
    #[error(transparent)]
    NotText(NotText),
    /// No source is configured, and the token has no keypad of its own.
    #[error("no PIN source: add pin-source= to the token uri, or use --ask-pin")]
    None,
    /// The token refused this PIN. It is not tried again in this process.
    #[error(
        "the token refused the PIN ({0}); it is not tried again, because that would lock the token: correct the PIN"
    )]
    Refused(super::Ckr),
    /// The token has counted wrong PINs: a program must not use up the rest.
    #[error(
        "a wrong PIN was tried on this token before (CKF_USER_PIN_COUNT_LOW): log in once yourself with --ask-pin to \
         clear it"
    )]
    CountLow,
    /// One try is left, or none.
    #[error("the token's user PIN has one try left (CKF_USER_PIN_FINAL_TRY): log in with the vendor's tool")]
    FinalTry,
    /// The user PIN is locked.
    #[error("the token's user PIN is locked (CKF_USER_PIN_LOCKED): the security officer has to set a new one")]
    Locked,
}

/// Remembers what the token answered to a PIN. One stands for one token in a process.
#[derive(Debug, Default)]
pub(super) struct PinGuard {
    /// The PIN in use, and where it came from.
    known: Option<(PinSource, Pin)>,
    /// Whether the token has accepted the PIN in use.
    accepted: bool,
    /// The last refusal: of this PIN, or of what was typed on the token's own keypad.
    refused: Option<(Option<Pin>, super::Ckr)>,
}

impl PinGuard {
    /// What to log in with now: the PIN, read once and kept for logins after a reconnection, and never one that was
    /// refused; or none, where the token has a keypad and no source is configured.
    pub(super) fn pin(&mut self, source: Option<&PinSource>, token: &TokenInfo) -> Result<Option<&Pin>, PinError> {
        if token.user_pin_locked() {
            return Err(PinError::Locked);
        }
        if token.user_pin_final_try() {
            return Err(PinError::FinalTry);
        }
        let Some(source) = source else {
            return match &self.refused {
                _ if !token.protected_authentication_path() => Err(PinError::None),
                // A program must not ask again and again: a person restarts it.
                Some((None, ckr)) => Err(PinError::Refused(*ckr)),
                _ => Ok(None),
            };
        };
        if token.user_pin_count_low() && !source.is_interactive() {
            return Err(match &self.refused {
                Some((_, ckr)) => PinError::Refused(*ckr),
                None => PinError::CountLow,
            });
        }
        if self.known.as_ref().is_none_or(|(from, _)| from != source) {
            let pin = source.read()?;
            if let Some((Some(refused), ckr)) = &self.refused
                && refused.same(&pin)
            {
                return Err(PinError::Refused(*ckr));
            }
            self.accepted = false;
            self.known = Some((source.clone(), pin));
        }
        Ok(self.known.as_ref().map(|(_, pin)| pin))
    }

    /// The token took the PIN.
    pub(super) fn accept(&mut self) {
        self.accepted = true;
        self.refused = None;
    }

    /// Whether the token has taken the PIN in use before.
    pub(super) fn was_accepted(&self) -> bool {
        self.accepted
    }

    /// The token refused the PIN: it is forgotten, and remembered as refused.
    pub(super) fn refuse(&mut self, ckr: super::Ckr) {
        self.accepted = false;
        self.refused = Some((self.known.take().map(|(_, pin)| pin), ckr));
    }
}

/// No PIN is this long, in bytes.
const LONGEST_PIN: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_are_read_as_written() {
        for (text, source) in [
            ("file:/run/pin", Some(PinSource::File("/run/pin".into()))),
            ("file:///run/pin", Some(PinSource::File("/run/pin".into()))),
            ("/run/pin", Some(PinSource::File("/run/pin".into()))),
            ("env:HSM_PIN", Some(PinSource::Env("HSM_PIN".into()))),
            ("credential:pin", Some(PinSource::Credential("pin".into()))),
            ("prompt:", Some(PinSource::Prompt)),
            ("credential:../pin", None),
            ("credential:..", None),
            ("file:pin", None),
            ("|cat pin", None),
            ("", None),
        ] {
            assert_eq!(text.parse().ok(), source, "{text}");
        }
    }

    #[test]
    fn a_source_that_cannot_be_read_is_named() {
        let error = PinSource::File("/nonexistent/pin".into()).read().expect_err("no such file");
        assert_eq!(error.to_string(), "cannot read the PIN from file:/nonexistent/pin");
    }
}
