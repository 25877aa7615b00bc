//! What ends a command: one line for people, one exit code for programs.

use std::error::Error as StdError;
use std::fmt;
use std::io;

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

impl From<keeper::Error> for Failure {
    fn from(error: keeper::Error) -> Self {
        Self::of(error.exit_code(), error)
    }
}

/// What is below a keeper's error is judged as the keeper judges it.
macro_rules! as_the_keeper {
    ($($error:ty),+) => {
        $(impl From<$error> for Failure {
            fn from(error: $error) -> Self {
                keeper::Error::from(error).into()
            }
        })+
    };
}

as_the_keeper!(keeper::ConfigError, column::Unknown, column::Misplaced, hsm::Error, codec::Error, store::Error);
