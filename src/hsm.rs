//! The right wing: master keys in a PKCS#11 token. Knows sessions, keys and return values, and nothing of envelopes or
//! databases.
//!
//! [`Keyring`] is the doorway: it implements [`KeyProvider`](crate::provider::KeyProvider) over the keys with one
//! label on one token. The token is named by a [`TokenUri`] (RFC 7512); the PIN comes from a [`PinSource`].

mod custody;
mod error;
mod floor;
mod forks;
mod keyring;
mod keyset;
mod module;
mod pin;
mod pool;
mod raw;
mod record;
mod route;
mod token;
mod turn;
mod uri;
mod uses;

pub use custody::{Probe, Verdict};
pub use error::{Ckr, Error};
pub use floor::Floor;
pub use keyring::{Cleaned, KeyReport, Keyring, Made, Report, Settings, Tidied};
pub use keyset::{Health, Stranger};
pub use pin::{PinError, PinSource};
pub use record::{KeyFact, State};
pub use route::{Choice, Route, RouteTrial, Timing};
pub use token::TokenInfo;
pub use uri::{TokenUri, UriError};

#[cfg(test)]
mod tests;
