//! Why the token layer failed, and what may be tried about it.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use cryptoki::context::Function;
use cryptoki::error::RvError;

use crate::provider::KeyId;

/// Why the token layer failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The token refused a call; `ckr` says why.
    #[error("C_{function:?} failed: {ckr}")]
    Call {
        /// The PKCS#11 function, without its `C_`.
        function: Function,
        /// What it returned.
        ckr: Ckr,
    },

    /// The module could not be loaded; the source says why.
    #[error("cannot load PKCS#11 module {0}")]
    Load(PathBuf, #[source] cryptoki::error::Error),

    /// The module misbehaved in a way that no return value names.
    #[error("the PKCS#11 module misbehaved")]
    Module(#[source] cryptoki::error::Error),

    /// The module answered something that no conforming token answers.
    #[error("the token answered wrongly: {0}")]
    Answer(&'static str),

    /// No token, or more than one, is what the URI names. Lists what there is.
    #[error("{what} {wanted}; tokens there: {there}")]
    Token {
        /// What is wrong.
        what: &'static str,
        /// What the URI asks for.
        wanted: String,
        /// What was found, quoted, with serials.
        there: String,
    },

    /// A login was not tried, or failed. Trying again without a change makes it worse.
    #[error(transparent)]
    Pin(#[from] super::PinError),

    /// The token keeps no data objects, so it cannot hold the keyring record.
    #[error(
        "the token keeps no private data objects ({0}), so it cannot hold the keyring record; \
         this version of hardwrap needs a token that does"
    )]
    NoDataObjects(Ckr),

    /// A part of the keyring record cannot be read.
    #[error("the keyring record on the token is damaged: {0}")]
    Record(String),

    /// No way of wrapping works on this token.
    #[error("no wrapping mechanism works on this token: {0}")]
    NoRoute(String),

    /// A made key did not have the attributes it was made with, or did not work. It was destroyed again.
    #[error("the token made a key that cannot be trusted: {0}")]
    Untrusted(String),

    /// A key that the record names is not on the token, or its canary does not unwrap: nothing is known about values
    /// under it, and no key is made in its place.
    #[error("key {0} stands in the keyring record, and is not on the token or does not work there")]
    Silent(KeyId),

    /// The token shows none of the keys it showed a moment ago.
    #[error("the token shows none of the keys it showed before")]
    Vanished,

    /// The module is loaded already, with other arguments.
    #[error("the PKCS#11 module {0} is in use in this process with other module_arguments")]
    Arguments(PathBuf),

    /// Two keys with one id.
    #[error("two keys on the token have the id {0}: nothing is sealed until one is gone")]
    TwoKeys(KeyId),

    /// The key was not found, and whether the keyring holds it is not known now; ask again.
    #[error("key {0} was not found on the token, and the keyring could not be read to the end")]
    JustMissed(KeyId),

    /// A key cannot go from the state it is in to the one that was asked for.
    #[error("key {kid} is {from}: it cannot become {to}{why}")]
    Transition {
        /// The key.
        kid: KeyId,
        /// Its state.
        from: &'static str,
        /// The state asked for.
        to: &'static str,
        /// Why not, where the two states do not say it.
        why: &'static str,
    },

    /// The key is retired: the token does not let it unwrap until it is brought back.
    #[error("key {0} is retired and does not unwrap: `hardwrap key activate --unwrap {0}` brings it back")]
    Asleep(KeyId),

    /// The keyring has no such key.
    #[error("the keyring has no key {0}")]
    NoSuchKey(KeyId),

    /// The key has wrapped as often as its algorithm allows (SP 800-38D §8.3).
    #[error("key {0} has used up its wraps under A256GCMKW: rotate to a new key")]
    UsedUp(KeyId),

    /// The token could not be reached a moment ago; the next try comes within a second.
    #[error("the token was out of reach a moment ago")]
    Down(#[source] Arc<Error>),

    /// The token could not be reached.
    #[error(transparent)]
    Connecting(Arc<Error>),

    /// The keyring was closed.
    #[error("the keyring was closed")]
    Closed,

    /// Another part of this process initialised the module, so only that part can re-initialise it.
    #[error("the module has to be re-initialised, and a host application owns it")]
    HostOwned,
}

impl Error {
    /// What may be tried, once.
    pub(super) fn recovery(&self) -> Recovery {
        match self {
            Self::Call { ckr, .. } => ckr.recovery(),
            Self::Vanished => Recovery::Reload,
            _ => Recovery::GiveUp,
        }
    }

    /// Whether this may only mean that the module does not see the token: re-initialising it may help.
    pub(super) fn may_be_absence(&self) -> bool {
        match self {
            Self::Token { what, .. } => *what == super::token::NONE,
            // SoftHSM2 rewrites a token's file at every login, and who reads it just then finds no PIN in it.
            Self::Call { ckr: Ckr(RvError::UserPinNotInitialized), .. } => true,
            Self::Connecting(error) | Self::Down(error) => error.may_be_absence(),
            other => !matches!(other.recovery(), Recovery::GiveUp | Recovery::Wait),
        }
    }

    /// Whether this may be a token's word for bad wrapped bytes: anything but what speaks of sessions, handles, logins,
    /// the token itself, or a fence.
    pub(super) fn may_blame_the_bytes(&self) -> bool {
        match self {
            Self::Call { ckr: Ckr(RvError::KeyFunctionNotPermitted), .. } => false,
            Self::Call { ckr, .. } => matches!(ckr.recovery(), Recovery::GiveUp | Recovery::Judge),
            Self::Answer(_) => true,
            _ => false,
        }
    }

    /// Whether this may be what a token says when a key may not wrap (any more): SoftHSM2, NSS, and kryoptic in
    /// C_WrapKey.
    pub(super) fn may_be_a_fence(&self) -> bool {
        matches!(
            self,
            Self::Call {
                ckr: Ckr(RvError::KeyFunctionNotPermitted
                    | RvError::KeyTypeInconsistent
                    | RvError::WrappingKeyHandleInvalid
                    | RvError::WrappingKeyTypeInconsistent),
                ..
            }
        )
    }

    /// Whether the token has no session left. CloudHSM says `CKR_ARGUMENTS_BAD`.
    pub(super) fn wants_a_session(&self) -> bool {
        matches!(
            self,
            Self::Call { function: Function::OpenSession, ckr: Ckr(RvError::SessionCount | RvError::ArgumentsBad) }
        )
    }

    /// What kept the token out of reach, below what says so.
    pub fn root(&self) -> &Self {
        match self {
            Self::Connecting(error) | Self::Down(error) => error.root(),
            other => other,
        }
    }

    /// Whether the token has no user PIN yet.
    pub fn is_pin_not_set(&self) -> bool {
        self.ckr() == Some(Ckr(RvError::UserPinNotInitialized))
    }

    /// The return value, where a call failed.
    pub fn ckr(&self) -> Option<Ckr> {
        match self {
            Self::Call { ckr, .. } => Some(*ckr),
            Self::Connecting(error) | Self::Down(error) => error.ckr(),
            _ => None,
        }
    }
}

impl From<cryptoki::error::Error> for Error {
    fn from(error: cryptoki::error::Error) -> Self {
        match error {
            cryptoki::error::Error::Pkcs11(ckr, function) => Self::Call { function, ckr: Ckr(ckr) },
            other => Self::Module(other),
        }
    }
}

/// What may be tried about a failed call, once.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Recovery {
    /// The session is gone: open one, log in, find again.
    Reopen,
    /// A handle is stale: find again.
    Refind,
    /// The login is gone.
    LogIn,
    /// The module or the token is gone: re-initialise the module and start anew.
    Reload,
    /// The token may be gone or the request bad: ask the canary, then [`Recovery::Reload`].
    Judge,
    /// Wait for a session to come back.
    Wait,
    /// Nothing helps. Bad requests are here too: they never reconnect.
    GiveUp,
}

/// A PKCS#11 return value, shown by the name operators search for: `CKR_PIN_INCORRECT`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Ckr(pub RvError);

impl Ckr {
    /// What may be tried, once: every return value of PKCS#11 3.2 that cryptoki names.
    pub(super) fn recovery(self) -> Recovery {
        use RvError as R;
        match self.0 {
            R::SessionClosed | R::SessionHandleInvalid => Recovery::Reopen,

            R::ObjectHandleInvalid
            | R::KeyHandleInvalid
            | R::UnwrappingKeyHandleInvalid
            | R::WrappingKeyHandleInvalid
            | R::KeyChanged => Recovery::Refind,

            R::UserNotLoggedIn => Recovery::LogIn,

            R::CryptokiNotInitialized
            | R::DeviceRemoved
            | R::TokenNotPresent
            | R::TokenNotRecognized
            | R::SlotIdInvalid => Recovery::Reload,

            R::GeneralError | R::DeviceError | R::DeviceMemory | R::HostMemory | R::FunctionFailed => Recovery::Judge,

            R::SessionCount => Recovery::Wait,

            // A session in the middle of something is no use; a new one is.
            R::OperationActive | R::OperationNotInitialized => Recovery::Reopen,

            // The PIN: trying again would lock the token.
            R::PinIncorrect
            | R::PinInvalid
            | R::PinLenRange
            | R::PinExpired
            | R::PinLocked
            | R::PinTooWeak
            | R::NewPinMode
            | R::UserPinNotInitialized
            | R::UserTypeInvalid
            | R::UserAlreadyLoggedIn
            | R::UserAnotherAlreadyLoggedIn
            | R::UserTooManyTypes => Recovery::GiveUp,

            // The request: one bad row, or a fence.
            R::EncryptedDataInvalid
            | R::EncryptedDataLenRange
            | R::WrappedKeyInvalid
            | R::WrappedKeyLenRange
            | R::DataInvalid
            | R::DataLenRange
            | R::SignatureInvalid
            | R::SignatureLenRange
            | R::BufferTooSmall
            | R::KeyFunctionNotPermitted
            | R::KeyTypeInconsistent
            | R::KeySizeRange
            | R::KeyNotNeeded
            | R::KeyNeeded
            | R::KeyIndigestible
            | R::KeyNotWrappable
            | R::KeyUnextractable
            | R::UnwrappingKeySizeRange
            | R::UnwrappingKeyTypeInconsistent
            | R::WrappingKeySizeRange
            | R::WrappingKeyTypeInconsistent
            | R::PublicKeyInvalid
            | R::DomainParamsInvalid => Recovery::GiveUp,

            // What the token is, or how it is set up: no call repairs it.
            R::ArgumentsBad
            | R::AttributeReadOnly
            | R::AttributeSensitive
            | R::AttributeTypeInvalid
            | R::AttributeValueInvalid
            | R::ActionProhibited
            | R::TemplateIncomplete
            | R::TemplateInconsistent
            | R::MechanismInvalid
            | R::MechanismParamInvalid
            | R::CurveNotSupported
            | R::FunctionNotSupported
            | R::FunctionNotParallel
            | R::FunctionRejected
            | R::FunctionCanceled
            | R::Cancel
            | R::NoEvent
            | R::NeedToCreateThreads
            | R::CantLock
            | R::SessionParallelNotSupported
            | R::SessionReadOnly
            | R::SessionExists
            | R::SessionReadOnlyExists
            | R::SessionReadWriteSoExists
            | R::TokenWriteProtected
            | R::RandomSeedNotSupported
            | R::RandomNoRng
            | R::SavedStateInvalid
            | R::InformationSensitive
            | R::StateUnsaveable
            | R::CryptokiAlreadyInitialized
            | R::MutexBad
            | R::MutexNotLocked
            | R::NextOtp
            | R::ExceededMaxIterations
            | R::FipsSelfTestFailed
            | R::LibraryLoadFailed
            | R::VendorDefined(_)
            | R::UnknownErrorCode(_) => Recovery::GiveUp,
        }
    }

    /// Whether the token says, without doubt, that the wrapped bytes are bad.
    pub(super) fn blames_the_bytes(self) -> bool {
        matches!(
            self.0,
            RvError::EncryptedDataInvalid
                | RvError::EncryptedDataLenRange
                | RvError::WrappedKeyInvalid
                | RvError::WrappedKeyLenRange
                // CKR_AEAD_DECRYPT_FAILED, PKCS#11 3.0, which cryptoki 0.12 does not name
                | RvError::UnknownErrorCode(0x42)
        )
    }
}

impl fmt::Display for Ckr {
    /// `CKR_` and the name, made from cryptoki's: `PinIncorrect` is `CKR_PIN_INCORRECT`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            RvError::VendorDefined(code) => write!(f, "CKR_VENDOR_DEFINED (0x{code:x})"),
            RvError::UnknownErrorCode(0x42) => f.write_str("CKR_AEAD_DECRYPT_FAILED"),
            RvError::UnknownErrorCode(code) => write!(f, "unknown return value 0x{code:x}"),
            known => {
                f.write_str("CKR")?;
                for letter in format!("{known:?}").chars() {
                    if letter.is_ascii_uppercase() {
                        f.write_str("_")?;
                    }
                    write!(f, "{}", letter.to_ascii_uppercase())?;
                }
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn return_values_are_shown_by_the_name_operators_search_for() {
        for (ckr, name) in [
            (RvError::PinIncorrect, "CKR_PIN_INCORRECT"),
            (RvError::CryptokiNotInitialized, "CKR_CRYPTOKI_NOT_INITIALIZED"),
            (RvError::SessionReadWriteSoExists, "CKR_SESSION_READ_WRITE_SO_EXISTS"),
            (RvError::UnknownErrorCode(0x42), "CKR_AEAD_DECRYPT_FAILED"),
            (RvError::VendorDefined(0x8000_0001), "CKR_VENDOR_DEFINED (0x80000001)"),
        ] {
            assert_eq!(Ckr(ckr).to_string(), name);
        }
    }

    #[test]
    fn no_answer_about_a_pin_is_tried_again() {
        for ckr in
            [RvError::PinIncorrect, RvError::PinLocked, RvError::PinExpired, RvError::PinInvalid, RvError::PinLenRange]
        {
            assert_eq!(Ckr(ckr).recovery(), Recovery::GiveUp);
        }
    }

    #[test]
    fn a_bad_row_never_reconnects() {
        for ckr in [RvError::EncryptedDataInvalid, RvError::WrappedKeyInvalid, RvError::KeyFunctionNotPermitted] {
            assert_eq!(Ckr(ckr).recovery(), Recovery::GiveUp);
        }
    }
}
