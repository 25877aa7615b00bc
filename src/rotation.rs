//! Moving values from one master key to another: the walk over what is registered, the application's own rotators, and
//! the event that says it is done. The protocol around them, with the token's part, is
//! [`keeper::Rotation`](crate::keeper::Rotation).
//!
//! Nothing here decrypts a value, and on no path is a payload touched: only what stands before the first dot of an
//! envelope is read, wrapped anew and written, and only where it is still, byte for byte, what was read.

mod control;
mod event;
mod rotator;
mod shared;
mod walk;

pub use control::{Control, Progress};
pub use event::{Listener, MasterKeyRotated};
pub use rotator::{BoxedError, Rewrapper, Rotator};
pub use shared::Shared;
pub use walk::{Passed, Walk};
