//! What an error asks of whoever meets it: try again, correct something first, or look at what happened.

use std::io;

use super::Error;
use crate::provider::ProviderError;
use crate::{codec, hsm, store};

impl Error {
    /// Whether token or database is out of reach: nothing is known about what was asked, nothing was stored, and the
    /// same may work later. It is so for one value ([`codec::Error::Unavailable`]), at start and in
    /// [`Keeper::check`](super::Keeper::check) alike.
    pub fn is_unavailable(&self) -> bool {
        self.exit_code() == 4
    }

    /// The exit code of a command that ends so: 1 failed, 2 to be corrected first, 4 out of reach, try again.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Token(error) => of_token(error),
            Self::Store(error) => of_store(error),
            Self::Codec(error) => of_value(error),
            Self::CutOff(error) => error.exit_code(),
            Self::ColumnUnknown(_)
            | Self::Misplaced(_)
            | Self::RowNotInteger { .. }
            | Self::Config(_)
            | Self::Invalid(_)
            | Self::Row(_)
            | Self::NoKeys(_)
            | Self::NotNoted
            | Self::Unfinished(_)
            | Self::NoSuchToken(_)
            | Self::OtherRoute(_) => 2,
            Self::TokenAway(_) => 4,
            _ => 1,
        }
    }
}

/// What trying again may help is 4; what the operator has to correct first is 2.
fn of_token(error: &hsm::Error) -> u8 {
    match error {
        hsm::Error::Connecting(error) | hsm::Error::Down(error) => of_token(error),
        hsm::Error::Pin(_)
        | hsm::Error::Load(..)
        | hsm::Error::Arguments(_)
        | hsm::Error::NoRoute(_)
        | hsm::Error::NoDataObjects(_)
        | hsm::Error::NoSuchKey(_)
        | hsm::Error::Transition { .. } => 2,
        hsm::Error::Token { what, .. } if what.starts_with("more") => 2,
        hsm::Error::Record(_)
        | hsm::Error::Untrusted(_)
        | hsm::Error::Silent(_)
        | hsm::Error::TwoKeys(_)
        | hsm::Error::Asleep(_)
        | hsm::Error::UsedUp(_) => 1,
        _ => 4,
    }
}

fn of_value(error: &codec::Error) -> u8 {
    match error {
        codec::Error::Unavailable(ProviderError::NoCurrentKey) => 2,
        codec::Error::Unavailable(ProviderError::Unavailable(source)) => {
            source.downcast_ref::<hsm::Error>().map_or(4, of_token)
        }
        codec::Error::Unavailable(_) => 4,
        _ => 1,
    }
}

fn of_store(error: &store::Error) -> u8 {
    match error {
        // Something on the way to the file is a file itself.
        store::Error::Unavailable(source)
            if source.downcast_ref().is_some_and(|error: &io::Error| error.kind() == io::ErrorKind::NotADirectory) =>
        {
            2
        }
        store::Error::Unavailable(_)
        | store::Error::WalInUse
        | store::Error::Leased(..)
        | store::Error::Conflict(_)
        | store::Error::FenceBlocked(_)
        | store::Error::Prepared(_) => 4,
        store::Error::Codec(error) => of_value(error),
        store::Error::NoDatabase(_)
        | store::Error::NoServerDatabase(_)
        | store::Error::Login(_)
        | store::Error::Denied(_)
        | store::Error::Hidden(..)
        | store::Error::MayNotFence(_)
        | store::Error::Replica
        | store::Error::NotTransactional(_)
        | store::Error::WriteSet { .. }
        | store::Error::NotForText { .. }
        | store::Error::NotAKey { .. }
        | store::Error::NoPlace(_)
        | store::Error::ReadOnly
        | store::Error::RegisteredTwice { .. }
        | store::Error::NotInitialised
        | store::Error::Outdated { .. }
        | store::Error::NewerTables { .. }
        | store::Error::NewerNeeded { .. }
        | store::Error::NotADatabase(_)
        | store::Error::Unfit(_)
        | store::Error::NoTable(_)
        | store::Error::NotATable { .. }
        | store::Error::NoColumn(_)
        | store::Error::Generated(_)
        | store::Error::NotBindable { .. }
        | store::Error::KeyNotUnique(_)
        | store::Error::NoLedgerEntry(_)
        | store::Error::NotBoundToUuid(_)
        | store::Error::Misplaced(_)
        | store::Error::Unregistered(_) => 2,
        _ => 1,
    }
}
