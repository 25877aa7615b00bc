//! What ends a command: one line for people, one exit code for programs.

use std::error::Error as StdError;
use std::fmt;
use std::io;

use hardwrap::provider::ProviderError;
use hardwrap::{codec, column, hsm, keeper, store};

use crate::text;

/// Why a command failed.
#[derive(Debug)]
pub(crate) struct Failure {
    code: u8,
    what: String,
    source: Option<Box<dyn StdError>>,
}

impl Failure {
    /// Wrong usage or configuration.
    pub(crate) fn usage(what: impl Into<String>) -> Self {
        Self { code: 2, what: what.into(), source: None }
    }

    /// It was tried and did not work.
    pub(crate) fn failed(what: impl Into<String>) -> Self {
        Self { code: 1, what: what.into(), source: None }
    }

    /// Whoever read a report had enough of it: its verdict stands, and there is nothing to say.
    pub(crate) fn unread(verdict: u8) -> Self {
        Self { code: verdict, what: String::new(), source: None }
    }

    pub(crate) fn code(&self) -> u8 {
        self.code
    }

    fn of(code: u8, error: impl StdError + 'static) -> Self {
        Self { code, what: String::new(), source: Some(Box::new(error)) }
    }
}

impl fmt::Display for Failure {
    /// The whole chain on one line, nothing twice; empty where there is nothing to say.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut said = self.what.clone();
        let mut next: Option<&dyn StdError> = self.source.as_deref();
        while let Some(error) = next {
            let text = error.to_string();
            if !said.ends_with(&text) {
                if !said.is_empty() {
                    said.push_str(": ");
                }
                said.push_str(&text);
            }
            next = error.source();
        }
        f.write_str(&text::plain(&said.replace('\n', " ")))
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        // Standard output is the only pipe we write to.
        let what = if error.kind() == io::ErrorKind::BrokenPipe { "standard output was closed" } else { "" };
        Self { what: what.to_owned(), ..Self::of(1, error) }
    }
}

impl From<keeper::ConfigError> for Failure {
    fn from(error: keeper::ConfigError) -> Self {
        Self::of(2, error)
    }
}

impl From<column::Unknown> for Failure {
    fn from(error: column::Unknown) -> Self {
        Self::of(2, error)
    }
}

impl From<column::Misplaced> for Failure {
    fn from(error: column::Misplaced) -> Self {
        Self::of(2, error)
    }
}

impl From<hsm::Error> for Failure {
    fn from(error: hsm::Error) -> Self {
        Self::of(of_token(&error), error)
    }
}

impl From<codec::Error> for Failure {
    fn from(error: codec::Error) -> Self {
        Self::of(of_value(&error), error)
    }
}

impl From<store::Error> for Failure {
    fn from(error: store::Error) -> Self {
        Self::of(of_store(&error), error)
    }
}

impl From<keeper::Error> for Failure {
    fn from(error: keeper::Error) -> Self {
        let code = match &error {
            keeper::Error::Token(error) => of_token(error),
            keeper::Error::Store(error) => of_store(error),
            keeper::Error::Codec(error) => of_value(error),
            keeper::Error::ColumnUnknown(_)
            | keeper::Error::Misplaced(_)
            | keeper::Error::RowNotInteger { .. }
            | keeper::Error::Config(_)
            | keeper::Error::Invalid(_)
            | keeper::Error::Row(_)
            | keeper::Error::NoKeys(_)
            | keeper::Error::NotNoted
            | keeper::Error::OtherRoute(_) => 2,
            _ => 1,
        };
        Self::of(code, error)
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
        store::Error::Unavailable(_) | store::Error::WalInUse => 4,
        store::Error::Codec(error) => of_value(error),
        store::Error::NoDatabase(_)
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
        | store::Error::NotBoundToUuid(_)
        | store::Error::Misplaced(_)
        | store::Error::Unregistered(_) => 2,
        _ => 1,
    }
}
