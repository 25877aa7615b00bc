//! Rotation of what an embedding application keeps in tables and layouts of its own.

use std::error::Error as StdError;
use std::fmt;

use crate::codec::{self, Codec};
use crate::column::Place;
use crate::envelope::Marker;
use crate::provider::KeyId;
use crate::store::{AnyConnection, Spot};

/// Why a rotator or listener failed.
pub type BoxedError = Box<dyn StdError + Send + Sync>;

/// Moves envelopes that no registered column holds: for example those whose front and payload stand in two columns.
/// What stands in its columns is counted, fenced and proven like a registered column, whatever the rotator says; it has
/// only to move it.
pub trait Rotator: Send + Sync {
    /// What reports call it.
    fn name(&self) -> &str;

    /// The columns in which its texts begin with `hw1:` and a key id, as the schema spells them.
    fn columns(&self) -> Vec<Spot>;

    /// How many values it would move: those that name another key than `target`. Only reads.
    ///
    /// # Errors
    /// Whatever keeps it from counting: then nothing is rotated.
    fn count(&self, connection: &mut AnyConnection, target: KeyId) -> Result<u64, BoxedError>;

    /// Moves all of them, and says how many. Runs inside a transaction, which it must neither commit nor roll back; it
    /// compares what it replaces with what it read, works in batches, and swallows no failure.
    ///
    /// # Errors
    /// Whatever keeps it from moving one: then the transaction is rolled back.
    fn rewrap(&self, connection: &mut AnyConnection, context: &Rewrapper<'_>) -> Result<u64, BoxedError>;
}

/// What a rotator is given: it can wrap data keys anew, and nothing else.
pub struct Rewrapper<'a> {
    codec: &'a Codec,
    target: KeyId,
}

impl<'a> Rewrapper<'a> {
    pub(super) fn new(codec: &'a Codec, target: KeyId) -> Self {
        Self { codec, target }
    }

    /// The key that everything is moved to.
    pub fn target(&self) -> KeyId {
        self.target
    }

    /// Whether a stored text, or its front, names another key than the target.
    pub fn is_due(&self, stored: &str) -> bool {
        let under = stored.strip_prefix(Marker::HW1).and_then(|rest| rest.get(..17));
        Marker::of(stored) == Marker::Hw1 && under != Some(&format!("{}:", self.target))
    }

    /// Wraps the DEK of a whole stored text anew; the payload is carried over as it stands. None if there is nothing to do.
    ///
    /// # Errors
    /// As [`Codec::rewrap`].
    pub fn rewrap(&self, place: &Place<'_>, stored: &str) -> Result<Option<String>, codec::Error> {
        self.codec.rewrap(place, stored)
    }

    /// The same for what stands before the first dot, where the payload is kept elsewhere; `rest` is how many bytes
    /// would follow it.
    ///
    /// # Errors
    /// As [`Codec::rewrap`].
    pub fn rewrap_front(&self, place: &Place<'_>, front: &str, rest: u64) -> Result<Option<String>, codec::Error> {
        self.codec.rewrap_front(place, front, rest)
    }
}

impl fmt::Debug for Rewrapper<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rewrapper").field("target", &self.target).finish_non_exhaustive()
    }
}
