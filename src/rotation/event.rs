//! What is announced when nothing is left under the old keys.

use serde::{Deserialize, Serialize};

use super::BoxedError;

/// All values of a database are under a new master key, and that was proven. The JSON of this is the event on the
/// command line, with stable names.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct MasterKeyRotated {
    /// The name of the event: `MasterKeyRotated`.
    pub event: String,
    /// The same each time the event is told: listeners may hear it more than once.
    pub id: String,
    /// The identity of the database.
    pub database: String,
    /// The deployment, as the configuration calls it.
    pub environment: String,
    /// The label of the keys.
    pub keyring: String,
    /// The keys that nothing names any more, by id.
    pub from: Vec<String>,
    /// The key that everything is under, by id.
    pub to: String,
    /// How many values were moved.
    pub moved: u64,
    /// `online` or `atomic`.
    pub mode: String,
    /// Whether it was proven without the database's fence, because the account may make no trigger.
    #[serde(default)]
    pub weaker: bool,
    /// When it was proven, RFC 3339 in UTC.
    pub at: String,
}

impl MasterKeyRotated {
    /// The value of [`MasterKeyRotated::event`].
    pub const NAME: &'static str = "MasterKeyRotated";
}

/// Hears that a master key was rotated: after the commit, never on a rollback, at least once. Its failure is reported
/// and undoes nothing; the event is then told again by the next `rotate --resume`.
pub trait Listener: Send + Sync {
    /// What reports call it.
    fn name(&self) -> &str;

    /// Hears it.
    ///
    /// # Errors
    /// Whatever kept the listener from its work: it will hear the event again.
    fn master_key_rotated(&self, event: &MasterKeyRotated) -> Result<(), BoxedError>;
}
