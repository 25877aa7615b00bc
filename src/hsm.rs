//! The right wing: master keys in a PKCS#11 token. Knows sessions, keys and return values, and nothing of envelopes or
//! databases.
//!
//! [`Keyring`] is the doorway: it implements [`KeyProvider`](crate::provider::KeyProvider) over the keys with one
//! label on one token. The token is named by a [`TokenUri`] (RFC 7512); the PIN comes from a [`PinSource`].
//!
//! For whichever recorder of the package `metrics` the application installs:
//!
//! | metric | what |
//! |---|---|
//! | `hardwrap_token_calls_total{function, ckr}` | counter: calls to the token, as `C_Encrypt`, `CKR_OK` |
//! | `hardwrap_token_connects_total{outcome}` | counter: connections made (`connected`) or not (`failed`) |
//! | `hardwrap_token_reloads_total` | counter: re-initialisations of the module |
//! | `hardwrap_token_recoveries_total{ckr}` | counter: failed calls after which the connection was made anew |
//! | `hardwrap_pool_wait_seconds` | histogram: waits for a session, of calls that had to wait |
//!
//! and for whichever subscriber of `tracing`, target `hardwrap::hsm`: a span `connect` at INFO, events at reloads and
//! recoveries at WARN with the return value, at logins at INFO. No PIN, no key, no handle is in any of them.

mod counted;
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
pub use record::{DatabaseFact, KeyFact, Proof, State};
pub use route::{Choice, Route, RouteTrial, Timing};
pub use token::TokenInfo;
pub use uri::{TokenUri, UriError};
pub use uses::MOST_USES;

#[cfg(test)]
mod tests;
