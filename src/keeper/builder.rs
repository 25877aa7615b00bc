//! A keeper without a file: an embedding application says in code what `hardwrap.toml` would say.

use super::{Config, Error, Ignore, Init, Keeper, Policy};
use crate::column::{Column, Register};
use crate::hsm::{Choice, PinSource, Settings, TokenUri};
use crate::store::DatabaseUrl;

/// Collects what a [`Config`] says. What is not set is as it is where the file does not say it.
///
/// It reads no `HARDWRAP_…` variable: those override a `hardwrap.toml`. An application that wants one reads it itself.
/// Only the PIN is read from wherever the token's URI or [`Builder::pin_source`] says.
///
/// For a first start, make the application's tables, then [`Builder::init`] once, then [`Builder::open`] each time.
/// Commands as `hardwrap verify` know nothing of a builder: keep a `hardwrap.toml` that says the same, with the same
/// identifiers, for a value sealed under another one is [`Rejected`](crate::codec::Error::Rejected) like an altered one.
/// The doctor takes a builder's configuration: `Diagnosis::of(Ok(&builder.config()?))`, of
/// [`Diagnosis`](super::Diagnosis).
///
/// ```no_run
/// use hardwrap::column::Column;
/// use hardwrap::keeper::Keeper;
///
/// const IBAN: Column = Column::constant("customer", "iban", "id", "shop:customer:iban").in_row("id");
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let token = std::env::var("HARDWRAP_TOKEN_URI")?.parse()?;
/// let builder = Keeper::builder(token, "sqlite://app.db".parse()?).environment("dev").columns([IBAN]);
/// let keeper = builder.open()?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Builder {
    environment: String,
    token: Settings,
    more_tokens: Vec<(String, Settings)>,
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
            more_tokens: Vec::new(),
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

    /// Names a further token: a value opens on whichever holds its key, and a rotation may move to it. The first one is
    /// called `token`.
    #[must_use]
    pub fn further_token(mut self, name: impl Into<String>, token: Settings) -> Self {
        self.more_tokens.push((name.into(), token));
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

    /// Names the deployment; `production` else, where the doctor warns of a token in software.
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
            token_name: "token".to_owned(),
            more_tokens: self.more_tokens,
            database: self.database,
            policy: self.policy,
            register: Register::new(self.columns)?,
            ignore: self.ignore,
            path: None,
        };
        config.check()?;
        Ok(config)
    }

    /// [`Keeper::open`] with this configuration. A registered table or column that is missing is no error here, but
    /// [`store::Error::NoTable`](crate::store::Error::NoTable) or [`NoColumn`](crate::store::Error::NoColumn) of sealing
    /// for it ([`Keeper::at`]).
    ///
    /// # Errors
    /// As [`Builder::config`] and [`Keeper::open`].
    pub fn open(self) -> Result<Keeper, Error> {
        Keeper::open(&self.config()?)
    }

    /// [`Keeper::init`] with this configuration: what `hardwrap init` does, a command of its own. It turns the database
    /// to SQLite's WAL journal mode: `-wal` and `-shm` beside the file belong to it and to its backup. Who may read the
    /// file is for its mode and the umask to say: `chmod 600`.
    ///
    /// # Errors
    /// As [`Builder::config`] and [`Keeper::init`].
    pub fn init(self, choice: Choice) -> Result<(Keeper, Init), Error> {
        Keeper::init(&self.config()?, choice)
    }
}
