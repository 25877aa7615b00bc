//! The facade: a configuration opened. The only place in the library that knows both wings.

mod config;
mod policy;

pub use config::{Config, ConfigError, Ignore};
pub use policy::{Duration, NotADuration, Policy};

use std::sync::Arc;

use crate::codec::{self, Codec};
use crate::column::{Column, Misplaced, Register, Row, Unknown};
use crate::hsm::{self, Choice, Keyring, Made};
use crate::secret::Plaintext;
use crate::store::{self, ColumnFacts, Db};

/// Keys, register and database of one configuration, ready for sealing and opening. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Keeper {
    keyring: Arc<Keyring>,
    codec: Codec,
    db: Arc<Db>,
    register: Arc<Register>,
    facts: Arc<[ColumnFacts]>,
}

impl Keeper {
    /// Opens what `config` names: loads the module, opens the database, and looks every registered column up in its
    /// schema. The token is asked when a key is first needed.
    ///
    /// # Errors
    /// [`Error::Token`] if the module cannot be loaded; [`Error::Store`] if the database is not there or not ours, or
    /// if a registered column cannot be sealed.
    pub fn open(config: &Config) -> Result<Self, Error> {
        let db = Db::open(&config.database)?;
        db.ready()?;
        Self::with(config, db)
    }

    /// Makes everything ready: our tables, the preset's table where it is missing, a first key with its record. Run
    /// again, it upgrades our tables and changes nothing else.
    ///
    /// # Errors
    /// [`Error::KeysMissing`] if the database holds envelopes and the keyring no key; whatever keeps token or database
    /// from working.
    pub fn init(config: &Config, choice: Choice) -> Result<(Self, Init), Error> {
        let db = Db::create(&config.database)?;
        let tables = !db.upgrade()?.is_empty();
        let preset = config.has_preset() && db.create_agent_run_table()?;
        let identity = db.ready()?.identity;
        let keeper = Self::with(config, db)?;
        // One init at a time on a database: two would make two keys.
        let made = keeper.db.exclusively(|db| {
            let empty = keeper.keyring.report()?.keys.is_empty();
            let found = if empty { db.find_envelopes()? } else { Vec::new() };
            if !found.is_empty() {
                let columns: Vec<_> = found.iter().map(|found| format!("{}.{}", found.table, found.column)).collect();
                return Err(Error::KeysMissing(columns.join(", ")));
            }
            let made = keeper.keyring.init(choice)?;
            let (Made::Key(kid, route) | Made::Finished(kid, route) | Made::Nothing(kid, route)) = &made;
            db.note_key(*kid, route.alg(), hsm::State::Active.name())?;
            Ok(made)
        })?;
        keeper.keyring.note_database(&identity)?;
        Ok((keeper, Init { made, tables, preset, identity }))
    }

    fn with(config: &Config, db: Db) -> Result<Self, Error> {
        let mut register = config.register.clone();
        let facts = db.describe(&mut register)?;
        for fact in &facts {
            match fact.usable() {
                // A table that is not there yet keeps nobody from sealing for it: `columns` shows it.
                Ok(()) | Err(store::Error::NoTable(_) | store::Error::NoColumn(_)) => {}
                Err(unfit) => return Err(unfit.into()),
            }
        }
        let keyring = Arc::new(Keyring::new(config.token.clone())?);
        Ok(Self {
            codec: Codec::new(keyring.clone()),
            keyring,
            db: Arc::new(db),
            register: Arc::new(register),
            facts: facts.into(),
        })
    }

    /// Seals `value` for a column, and its row where the column is bound to rows.
    ///
    /// # Errors
    /// [`Error::ColumnUnknown`], [`Error::Misplaced`], [`Error::Codec`].
    pub fn seal(&self, column: &str, row: Option<&Row>, value: &[u8]) -> Result<String, Error> {
        Ok(self.codec.seal(&self.register.find(column)?.at(row)?, value)?)
    }

    /// Opens a stored text of a column, and its row where the column is bound to rows.
    ///
    /// # Errors
    /// [`Error::ColumnUnknown`], [`Error::Misplaced`], [`Error::Codec`].
    pub fn open_value(&self, column: &str, row: Option<&Row>, stored: &str) -> Result<Plaintext, Error> {
        Ok(self.codec.open(&self.register.find(column)?.at(row)?, stored)?)
    }

    /// The keys.
    pub fn keyring(&self) -> &Keyring {
        &self.keyring
    }

    /// Seals and opens at places of one's own making.
    pub fn codec(&self) -> &Codec {
        &self.codec
    }

    /// The database.
    pub fn db(&self) -> &Arc<Db> {
        &self.db
    }

    /// The registered columns, with the capacity that the schema gives them.
    pub fn register(&self) -> &Register {
        &self.register
    }

    /// Each registered column with what the schema says of it.
    pub fn columns(&self) -> impl Iterator<Item = (&Column, &ColumnFacts)> {
        self.register.columns().iter().zip(self.facts.iter())
    }
}

/// What [`Keeper::init`] did.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Init {
    /// The key.
    pub made: Made,
    /// Whether tables of ours were made or upgraded.
    pub tables: bool,
    /// Whether the preset's table was made.
    pub preset: bool,
    /// The identity of the database.
    pub identity: String,
}

/// Why a keeper did not do what was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The token layer failed.
    #[error(transparent)]
    Token(#[from] hsm::Error),
    /// The database failed.
    #[error(transparent)]
    Store(#[from] store::Error),
    /// One value could not be sealed or opened.
    #[error(transparent)]
    Codec(#[from] codec::Error),
    /// The column is not registered, so nothing is sealed for it.
    #[error(transparent)]
    ColumnUnknown(#[from] Unknown),
    /// A row is missing, or one too many.
    #[error(transparent)]
    Misplaced(#[from] Misplaced),
    /// The database holds envelopes, and the keyring has no key: a new one would not open them.
    #[error(
        "the database holds sealed values ({0}) and the keyring has no key: this is the wrong token or keyring, or its \
         keys are lost; a new key would not open them, so none is made"
    )]
    KeysMissing(String),
}
