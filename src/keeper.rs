//! The facade: a configuration opened. The only place in the library that knows both wings.

mod config;
mod policy;

pub use config::{Config, ConfigError, Ignore};
pub use policy::{Duration, NotADuration, Policy};

use std::sync::Arc;

use crate::codec::{self, Codec};
use crate::column::{Column, Misplaced, Place, Register, Row, Unknown};
use crate::hsm::{self, Choice, Keyring, Made, Route};
use crate::provider::KeyId;
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
        Self::with(config, db, Arc::new(Keyring::new(config.token.clone())?))
    }

    /// Makes everything ready: our tables, the preset's table where it is missing, a first key with its record. Run
    /// again, it upgrades our tables and changes nothing else. Columns that the configuration ignores hold no
    /// envelopes for it.
    ///
    /// # Errors
    /// [`Error::KeysMissing`] if the database holds envelopes and the keyring no key; [`Error::OtherRoute`] if a key is
    /// there that wraps by none of the routes of `choice`; whatever keeps token or database from working.
    pub fn init(config: &Config, choice: Choice) -> Result<(Self, Init), Error> {
        let keyring = Arc::new(Keyring::new(config.token.clone())?);
        // Logs in, which may wait for a person: nothing is locked yet.
        let working = working_key(&keyring)?;
        if let Some((_, route)) = working {
            among(choice, route)?;
        }
        let db = Db::create(&config.database)?;
        let tables = !db.upgrade()?.is_empty();
        let preset = config.has_preset() && db.create_agent_run_table()?;
        let identity = db.ready()?.identity;
        let keeper = Self::with(config, db, keyring)?;
        let made = match working {
            Some((kid, route)) => Made::Nothing(kid, route),
            None => keeper.make_key(config, choice)?,
        };
        let (Made::Key(kid, route) | Made::Finished(kid, route) | Made::Nothing(kid, route)) = made;
        let kid_text = kid.to_string();
        if !keeper.db.keys_seen()?.iter().any(|seen| seen.kid == kid_text) {
            keeper.db.note_key(kid, route.alg(), hsm::State::Active.name())?;
        }
        keeper.keyring.note_database(&identity)?;
        // A key that a crash had left was finished all the same: values may be sealed under it.
        among(choice, route)?;
        Ok((keeper, Init { made, tables, preset, identity }))
    }

    /// Makes or finishes a key, one init at a time on a database: two would make two keys.
    fn make_key(&self, config: &Config, choice: Choice) -> Result<Made, Error> {
        self.db.exclusively(|db| {
            let mut found = db.find_envelopes()?;
            found.retain(|found| !config.ignore.iter().any(|ignore| found.is(&ignore.table, &ignore.column)));
            if !found.is_empty() && self.keyring.report()?.keys.is_empty() {
                let columns: Vec<_> = found.iter().map(ToString::to_string).collect();
                return Err(Error::KeysMissing(columns.join(", ")));
            }
            Ok(self.keyring.init(choice)?)
        })
    }

    fn with(config: &Config, db: Db, keyring: Arc<Keyring>) -> Result<Self, Error> {
        let mut register = config.register.clone();
        let facts = db.describe(&mut register)?;
        for fact in &facts {
            match fact.usable() {
                // A table that is not there yet keeps nobody from sealing for it: `columns` shows it.
                Ok(()) | Err(store::Error::NoTable(_) | store::Error::NoColumn(_)) => {}
                Err(unfit) => return Err(unfit.into()),
            }
        }
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
    /// As [`Keeper::at`]; [`Error::Codec`].
    pub fn seal(&self, column: &str, row: Option<&Row>, value: &[u8]) -> Result<String, Error> {
        Ok(self.codec.seal(&self.at(column, row)?, value)?)
    }

    /// Opens a stored text of a column, and its row where the column is bound to rows.
    ///
    /// # Errors
    /// As [`Keeper::at`]; [`Error::Codec`].
    pub fn open_value(&self, column: &str, row: Option<&Row>, stored: &str) -> Result<Plaintext, Error> {
        Ok(self.codec.open(&self.at(column, row)?, stored)?)
    }

    /// The place of one value: a column, and its row where the column is bound to rows.
    ///
    /// # Errors
    /// [`Error::ColumnUnknown`]; [`Error::Misplaced`]; [`Error::RowNotInteger`] if the row column holds integers and
    /// `row` is not written as the database would write it: a value sealed there could never be opened in its row.
    pub fn at(&self, column: &str, row: Option<&Row>) -> Result<Place<'_>, Error> {
        let found = self.register.find(column)?;
        let place = found.at(row)?;
        if let (Some(name), Some(row)) = (found.row(), row) {
            let integers = self.columns().any(|(column, facts)| column == found && facts.row_is_integer());
            let canonical = row.as_str().parse::<i64>().is_ok_and(|number| number.to_string() == row.as_str());
            if integers && !canonical {
                return Err(Error::RowNotInteger { column: found.to_string(), row: name.to_owned() });
            }
        }
        Ok(place)
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

/// The key that seals, and works.
fn working_key(keyring: &Keyring) -> Result<Option<(KeyId, Route)>, Error> {
    let report = keyring.report()?;
    let key = report.keys.iter().find(|key| key.current && key.works);
    Ok(key.map(|key| (key.fact.kid, key.fact.route)))
}

/// Whether `choice` asks for this route, or leaves it open.
fn among(choice: Choice, route: Route) -> Result<(), Error> {
    if choice.routes().contains(&route) { Ok(()) } else { Err(Error::OtherRoute(route)) }
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
    /// The row column holds integers, and the row is none as the database writes it.
    #[error(
        "column {column} is bound to rows by {row}, which holds integers: give the row as the database writes it, a \
         decimal number without leading zeros, blanks or plus sign"
    )]
    RowNotInteger {
        /// `TABLE.COLUMN`.
        column: String,
        /// Its row column.
        row: String,
    },
    /// A key is there, and wraps otherwise than was asked for.
    #[error("the keyring's key wraps by {alg} ({0}); a key that wraps otherwise comes with rotation", alg = .0.alg().name())]
    OtherRoute(Route),
    /// The database holds envelopes, and the keyring has no key: a new one would not open them.
    #[error(
        "the database holds sealed values ({0}) and the keyring has no key: this is the wrong token or keyring, or its \
         keys are lost; a new key would not open them, so none is made"
    )]
    KeysMissing(String),
}
