//! A keeper without a file: an embedding application says in code what `hardwrap.toml` would say.

use super::{Config, Error, Ignore, Init, Keeper, Policy};
use crate::column::{Column, Register};
use crate::hsm::{Choice, PinSource, Settings, TokenUri};
use crate::store::DatabaseUrl;

/// Collects what a [`Config`] says. What is not set is as it is where the file does not say it.
#[derive(Clone, Debug)]
pub struct Builder {
    environment: String,
    token: Settings,
    database: DatabaseUrl,
    policy: Policy,
    columns: Vec<Column>,
    ignore: Vec<Ignore>,
}

impl Builder {
    pub(super) fn new(token: TokenUri, database: DatabaseUrl) -> Self {
        Self {
            environment: "production".to_owned(),
            token: Settings::new(token),
            database,
            policy: Policy::default(),
            columns: Vec::new(),
            ignore: Vec::new(),
        }
    }

    /// Registers sealed columns, after those registered before. Every sealed column of the database belongs here: the
    /// register is what sealing, counting and rotating read.
    #[must_use]
    pub fn columns(mut self, columns: impl IntoIterator<Item = Column>) -> Self {
        self.columns.extend(columns);
        self
    }

    /// Names the label of the keys; `hardwrap` else.
    #[must_use]
    pub fn keyring(mut self, label: impl Into<String>) -> Self {
        self.token.keyring = label.into();
        self
    }

    /// Says where the PIN comes from, whatever the token's URI says.
    #[must_use]
    pub fn pin_source(mut self, source: PinSource) -> Self {
        self.token.pin_source = Some(source);
        self
    }

    /// Says how many sessions to open at most; 8 else. One is the least.
    #[must_use]
    pub fn sessions(mut self, most: usize) -> Self {
        self.token.sessions = most.max(1);
        self
    }

    /// Gives what the module wants in `pReserved` of `C_Initialize` (NSS).
    #[must_use]
    pub fn module_arguments(mut self, arguments: impl Into<String>) -> Self {
        self.token.module_arguments = Some(arguments.into());
        self
    }

    /// Names the deployment; `production` else.
    #[must_use]
    pub fn environment(mut self, name: impl Into<String>) -> Self {
        self.environment = name.into();
        self
    }

    /// Says how long things may last.
    #[must_use]
    pub fn policy(mut self, policy: Policy) -> Self {
        self.policy = policy;
        self
    }

    /// Passes over columns that hold what only looks like envelopes.
    #[must_use]
    pub fn ignore(mut self, columns: impl IntoIterator<Item = Ignore>) -> Self {
        self.ignore.extend(columns);
        self
    }

    /// The configuration as it stands.
    ///
    /// # Errors
    /// [`Error::Config`], by the rules of the file.
    pub fn config(self) -> Result<Config, Error> {
        let config = Config {
            environment: self.environment,
            token: self.token,
            database: self.database,
            policy: self.policy,
            register: Register::new(self.columns)?,
            ignore: self.ignore,
            path: None,
        };
        config.check()?;
        Ok(config)
    }

    /// [`Keeper::open`] with this configuration.
    ///
    /// # Errors
    /// As [`Builder::config`] and [`Keeper::open`].
    pub fn open(self) -> Result<Keeper, Error> {
        Keeper::open(&self.config()?)
    }

    /// [`Keeper::init`] with this configuration: what `hardwrap init` does.
    ///
    /// # Errors
    /// As [`Builder::config`] and [`Keeper::init`].
    pub fn init(self, choice: Choice) -> Result<(Keeper, Init), Error> {
        Keeper::init(&self.config()?, choice)
    }
}
