//! Where a database is.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// The address of a database: `sqlite://relative.db` or `sqlite:///absolute.db`. What follows `sqlite://` is the path
/// as it is: nothing in it is decoded. Neither `Display` nor `Debug` can show a password.
#[derive(Clone, Eq, PartialEq)]
pub struct DatabaseUrl {
    path: PathBuf,
}

impl DatabaseUrl {
    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl FromStr for DatabaseUrl {
    type Err = BadUrl;

    fn from_str(text: &str) -> Result<Self, BadUrl> {
        let (scheme, path) = text.split_once("://").ok_or(BadUrl::NoScheme)?;
        if scheme != "sqlite" {
            // A scheme is short and plain; anything else may be a piece of a password and is not repeated.
            let plain = scheme.len() <= 16 && scheme.bytes().all(|c| c.is_ascii_alphanumeric() || c == b'+');
            return Err(BadUrl::Scheme(if plain { scheme.to_owned() } else { "?".to_owned() }));
        }
        if path.is_empty() || path.starts_with(':') || path.contains(['?', '#', '\0']) {
            return Err(BadUrl::Path);
        }
        Ok(Self { path: path.into() })
    }
}

impl fmt::Display for DatabaseUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sqlite://{}", self.path.display())
    }
}

impl fmt::Debug for DatabaseUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DatabaseUrl({self})")
    }
}

/// A text is no address of a database. Never repeats the text: it may hold a password.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum BadUrl {
    /// There is no `://`.
    #[error("a database URL starts with its scheme, as in sqlite://app.db")]
    NoScheme,
    /// This build does not know the scheme.
    #[error("no database {0}:// in this build: it has only sqlite://")]
    Scheme(String),
    /// The path is empty, in memory, or followed by options.
    #[error(
        "sqlite:// is followed by the path of a file, without options: sqlite://app.db or sqlite:///var/lib/app.db"
    )]
    Path,
}
