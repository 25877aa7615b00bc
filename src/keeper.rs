//! The facade: a configuration opened. The only place in the library that knows both wings.
//!
//! An application opens one [`Keeper`] when it starts, from `hardwrap.toml` or from a [`Builder`], and clones it for
//! whoever needs one: all clones share the sessions on the token. Opening checks that token, keyring and keys are
//! those which the database knows. Nothing here is async: a call takes one or two exchanges with the token, so an async
//! application makes it from a thread that may wait (`tokio::task::spawn_blocking`).
//!
//! **Fork.** Sealing and opening work in a forked child: it initialises the module and logs in there anew. Fork before
//! threads use the keeper where you can, for a PKCS#11 module may hold locks of its own in that instant. What needs the
//! database ([`Keeper::check`], [`Keeper::status`], the agent runs) is [`store::Error::Forked`] there, for SQLite cannot
//! be used over a fork: a server that forks its workers opens the keeper in each worker. **Host applications**
//! that have initialised the same module themselves keep it: the keeper then never finalises it.

mod builder;
mod check;
mod config;
mod doctor;
mod exit;
mod many;
mod policy;
mod retire;
mod rotate;
mod sealed;
mod status;
mod tokens;

pub use builder::Builder;
pub use config::{Config, ConfigError, Ignore};
pub use doctor::{
    Check, DatabaseFacts, Diagnosis, ExaminedColumn, ExaminedKey, ExaminedRoute, Finding, FindingId, Outcome, Severity,
    TokenFacts,
};
pub use policy::{Duration, NotADuration, Policy};
pub use retire::{Destroyed, Gate};
pub use rotate::{ColumnPlan, Plan, Rotated, Rotation};
pub use status::{ColumnStatus, Status};

use std::fmt;
use std::sync::{Arc, OnceLock};

use self::tokens::Tokens;
use crate::codec::{self, Codec};
use crate::column::{Column, Invalid, Misplaced, Named, NotARow, Place, Register, ToRow, Unknown};
use crate::hsm::{self, Choice, Keyring, Made, Route, TokenUri};
use crate::provider::KeyId;
use crate::rotation::{BoxedError, Listener, Rotator};
use crate::secret::Plaintext;
use crate::store::{self, ColumnFacts, DatabaseUrl, Db, Found};

/// Keys, register and database of one configuration, ready for sealing and opening. Cheap to clone, and for all
/// threads. When the last clone drops, its sessions on the token are closed; [`Keeper::close`] does it for all.
#[derive(Clone)]
pub struct Keeper {
    parts: Arc<Parts>,
    rotators: Vec<Arc<dyn Rotator>>,
    listeners: Vec<Arc<dyn Listener>>,
}

struct Parts {
    tokens: Arc<Tokens>,
    codec: Codec,
    db: Arc<Db>,
    register: Register,
    config: Config,
    facts: Vec<ColumnFacts>,
    /// What was missing or unfit when the keeper opened, and stands there since, as the schema describes it.
    since: Vec<OnceLock<(Column, ColumnFacts)>>,
}

impl Keeper {
    /// Opens what `config` names and checks it: loads the module, opens the database, looks every registered column up
    /// in its schema, logs in to the token, and makes sure that its keys are those which this database knows
    /// ([`Keeper::check`]). Reads no row. A registered table that is not there yet is no error here: make your tables
    /// first where you can, for sealing there is refused until they stand.
    ///
    /// # Errors
    /// As [`Keeper::unchecked`] and [`Keeper::check`].
    pub fn open(config: &Config) -> Result<Self, Error> {
        let keeper = Self::unchecked(config)?;
        keeper.check()?;
        Ok(keeper)
    }

    /// Opens what `config` names, and does not ask the token before a key is first needed: for work that needs no key,
    /// and for a service that has to start while its token is out of reach. That calls [`Keeper::check`] until it is
    /// done, and as long as [`Error::is_unavailable`] says so.
    ///
    /// # Errors
    /// [`Error::Token`] if the module cannot be loaded; [`Error::Store`] if the database is not there or not ours, or
    /// if a registered column cannot be sealed.
    pub fn unchecked(config: &Config) -> Result<Self, Error> {
        let db = Db::open(&config.database)?;
        db.ready()?;
        Self::with(config, db, Arc::new(Tokens::new(config)?))
    }

    /// Begins a configuration in code, where there is no `hardwrap.toml`.
    pub fn builder(token: TokenUri, database: DatabaseUrl) -> Builder {
        Builder::new(token, database)
    }

    /// Makes everything ready: our tables, the preset's table where it is missing, a first key with its record. Run
    /// again, it upgrades our tables and changes nothing else. Columns that the configuration ignores hold no
    /// envelopes for it.
    ///
    /// # Errors
    /// [`Error::KeysMissing`] if the database holds envelopes and the keyring no key; [`Error::OtherRoute`] if a key is
    /// there that wraps by none of the routes of `choice`; whatever keeps token or database from working.
    pub fn init(config: &Config, choice: Choice) -> Result<(Self, Init), Error> {
        let tokens = Arc::new(Tokens::new(config)?);
        let keyring = tokens.first().clone();
        // Logs in, which may wait for a person: nothing is locked yet.
        let working = working_key(&keyring)?;
        if let Some((_, route)) = working {
            among(choice, route)?;
        }
        let db = Db::create(&config.database)?;
        let tables = !db.upgrade()?.is_empty();
        let preset = config.has_preset() && db.create_agent_run_table()?;
        let identity = db.ready()?.identity;
        let keeper = Self::with(config, db, tokens)?;
        keeper.settle(config)?;
        let made = match working {
            Some((kid, route)) => Made::Nothing(kid, route),
            None => keeper.make_key(config, choice)?,
        };
        let (Made::Key(_, route) | Made::Finished(_, route) | Made::Nothing(_, route)) = made;
        for (_, keyring) in keeper.parts.tokens.all() {
            keyring.note_database(&identity)?;
        }
        check::note(keeper.db(), &keeper.report()?, &keeper.db().keys_seen()?)?;
        // A key that a crash had left was finished all the same: values may be sealed under it.
        among(choice, route)?;
        Ok((keeper, Init { made, tables, preset, identity }))
    }

    /// Refuses a keyring that is not the one which the database has seen. A database without an envelope may change
    /// to another keyring: then what it had seen is forgotten.
    fn settle(&self, config: &Config) -> Result<(), Error> {
        self.db().exclusively(|db| {
            match check::same_keys(&self.report()?, self.keyring().label(), &db.keys_seen()?, &db.rotations()?) {
                Err(Error::EmptyKeyring { .. } | Error::OtherKeys { .. }) if envelopes(db, config)?.is_empty() => {
                    Ok(db.forget_keys()?)
                }
                // Said with the columns that hold them, when a key is to be made.
                Err(Error::EmptyKeyring { .. }) => Ok(()),
                outcome => outcome,
            }
        })
    }

    /// Makes or finishes a key, one init at a time on a database: two would make two keys.
    fn make_key(&self, config: &Config, choice: Choice) -> Result<Made, Error> {
        self.db().exclusively(|db| {
            let found = envelopes(db, config)?;
            if !found.is_empty() && self.report()?.keys.is_empty() {
                return Err(Error::KeysMissing(found.join(", ")));
            }
            Ok(self.keyring().init(choice)?)
        })
    }

    fn with(config: &Config, db: Db, tokens: Arc<Tokens>) -> Result<Self, Error> {
        let mut register = config.register.clone();
        let facts = db.describe(&mut register)?;
        for fact in &facts {
            match fact.usable() {
                // A table that is not there yet keeps nobody from the others: whoever seals for it looks again.
                Ok(()) | Err(store::Error::NoTable(_) | store::Error::NoColumn(_)) => {}
                Err(unfit) => return Err(unfit.into()),
            }
        }
        let since = facts.iter().map(|_| OnceLock::new()).collect();
        let (codec, config) = (Codec::new(tokens.provider()), config.clone());
        let parts = Parts { codec, tokens, db: Arc::new(db), register, config, facts, since };
        Ok(Self { parts: Arc::new(parts), rotators: Vec::new(), listeners: Vec::new() })
    }

    /// Registers what the application itself moves when a key is rotated. Every one belongs here: what is not known
    /// keeps a rotation from running.
    #[must_use]
    pub fn with_rotator(mut self, rotator: Arc<dyn Rotator>) -> Self {
        self.rotators.push(rotator);
        self
    }

    /// Registers who hears when a key was rotated.
    #[must_use]
    pub fn with_listener(mut self, listener: Arc<dyn Listener>) -> Self {
        self.listeners.push(listener);
        self
    }

    /// The application's own rotators.
    pub fn rotators(&self) -> &[Arc<dyn Rotator>] {
        &self.rotators
    }

    /// Moves all values to another key.
    pub fn rotation(&self) -> Rotation<'_> {
        Rotation::new(self)
    }

    /// Seals `value` for a column, and its row where the column is bound to rows (`()` where it is not). The same value
    /// sealed twice shares no part of the text. An empty value stays empty.
    ///
    /// # Errors
    /// As [`Keeper::at`]; [`Error::Codec`]. Nothing is stored, and cleartext is never returned.
    pub fn seal(&self, column: impl Named, row: impl ToRow, value: &[u8]) -> Result<String, Error> {
        Ok(self.codec().seal(&self.at(column, row)?, value)?)
    }

    /// Opens a stored text of a column, and its row where the column is bound to rows.
    ///
    /// # Errors
    /// As [`Keeper::at`]; [`Error::Codec`].
    pub fn open_value(&self, column: impl Named, row: impl ToRow, stored: &str) -> Result<Plaintext, Error> {
        Ok(self.codec().open(&self.at(column, row)?, stored)?)
    }

    /// Wraps the DEK of a stored text under the key that seals now; the payload is carried over as it stands. None if
    /// there is nothing to do.
    ///
    /// # Errors
    /// As [`Keeper::at`]; [`Error::Codec`].
    pub fn rewrap(&self, column: impl Named, row: impl ToRow, stored: &str) -> Result<Option<String>, Error> {
        Ok(self.codec().rewrap(&self.at(column, row)?, stored)?)
    }

    /// The place of one value: a column, and its row where the column is bound to rows.
    ///
    /// # Errors
    /// [`Error::ColumnUnknown`]; [`store::Error::NoTable`] and [`store::Error::NoColumn`] if the schema has no place for
    /// it, looked up again each time until it has; [`Error::Row`]; [`Error::Misplaced`]; [`Error::RowNotInteger`] if the
    /// row column holds integers and `row` is not written as the database would write it: a value sealed there could
    /// never be opened in its row.
    pub fn at(&self, column: impl Named, row: impl ToRow) -> Result<Place<'_>, Error> {
        let place = self.find_place(column, row);
        if let Err(error) = &place {
            metrics::counter!("hardwrap_errors_total", "column" => "", "kind" => error.kind()).increment(1);
        }
        place
    }

    fn find_place(&self, column: impl Named, row: impl ToRow) -> Result<Place<'_>, Error> {
        let (found, facts) = self.described(column.find_in(self.register())?)?;
        let row = row.to_row()?;
        let place = found.at(row.as_ref())?;
        if let (Some(name), Some(row)) = (found.row(), row) {
            let canonical = row.as_str().parse::<i64>().is_ok_and(|number| number.to_string() == row.as_str());
            if facts.row_is_integer() && !canonical {
                return Err(Error::RowNotInteger { column: found.to_string(), row: name.to_owned() });
            }
        }
        Ok(place)
    }

    /// A registered column as the schema describes it. Where the table was not there yet, it is looked up again:
    /// without the schema nobody knows how the database writes its rows, nor how much the column holds.
    fn described(&self, registered: &Column) -> Result<(&Column, &ColumnFacts), Error> {
        let unknown = || Error::from(Unknown(registered.to_string()));
        let at =
            self.register().columns().iter().position(|column| std::ptr::eq(column, registered)).ok_or_else(unknown)?;
        let (column, facts) = self.columns().nth(at).ok_or_else(unknown)?;
        if facts.usable().is_ok() {
            return Ok((column, facts));
        }
        let mut register = self.register().clone();
        let facts = self.db().describe(&mut register)?.into_iter().nth(at).ok_or_else(unknown)?;
        facts.usable()?;
        let column = register.columns().get(at).cloned().ok_or_else(unknown)?;
        let (column, facts) = self.parts.since.get(at).ok_or_else(unknown)?.get_or_init(|| (column, facts));
        Ok((column, facts))
    }

    /// Closes the sessions on the token, for all clones, once the calls in progress have ended. Every later call that
    /// needs a key is [`codec::Error::Unavailable`]. The module stays initialised: finalising it at exit crashes more
    /// modules than it helps.
    pub fn close(&self) {
        self.parts.tokens.all().for_each(|(_, keyring)| keyring.close());
    }

    /// The keys: of several tokens those of the first.
    pub fn keyring(&self) -> &Keyring {
        self.parts.tokens.first()
    }

    /// The keys of every token, by its name in the configuration.
    pub fn keyrings(&self) -> impl Iterator<Item = (&str, &Keyring)> {
        self.parts.tokens.all().map(|(name, keyring)| (name, keyring.as_ref()))
    }

    /// The keyring whose record names this key.
    ///
    /// # Errors
    /// [`hsm::Error::NoSuchKey`]; whatever keeps a token from answering.
    pub fn holder(&self, kid: KeyId) -> Result<&Keyring, Error> {
        self.parts.tokens.holder(kid).map(Arc::as_ref)
    }

    /// What stands on all tokens.
    ///
    /// # Errors
    /// Whatever keeps them from answering; of several, one may be out of reach while another seals.
    pub fn report(&self) -> Result<hsm::Report, Error> {
        self.parts.tokens.report()
    }

    /// Seals and opens at places of one's own making.
    pub fn codec(&self) -> &Codec {
        &self.parts.codec
    }

    /// The database.
    pub fn db(&self) -> &Arc<Db> {
        &self.parts.db
    }

    /// The registered columns, with the capacity that the schema gives them.
    pub fn register(&self) -> &Register {
        &self.parts.register
    }

    /// Each registered column with what the schema says of it: as it was when the keeper opened, or since a place was
    /// asked for there. After a migration of the schema, open a new keeper.
    pub fn columns(&self) -> impl Iterator<Item = (&Column, &ColumnFacts)> {
        let then = self.register().columns().iter().zip(&self.parts.facts);
        then.zip(&self.parts.since).map(|(then, since)| since.get().map_or(then, |(column, facts)| (column, facts)))
    }
}

/// Names neither keys nor values.
impl fmt::Debug for Keeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keeper").field("keyring", self.keyring()).field("db", self.db()).finish_non_exhaustive()
    }
}

/// The columns that hold envelopes of ours, but for those that the configuration ignores.
fn envelopes(db: &Db, config: &Config) -> Result<Vec<String>, Error> {
    let mut found = db.find_envelopes()?;
    found.retain(|found| !config.ignore.iter().any(|ignore| found.is(&ignore.table, &ignore.column)));
    Ok(found.iter().map(ToString::to_string).collect())
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

/// Says where envelopes stand that nobody registered, and what to add to the configuration.
fn unregistered(found: &[Found]) -> String {
    let where_ = found.iter().map(|one| format!("{one} ({})", one.count)).collect::<Vec<_>>().join(", ");
    let lines = found.iter().map(|one| {
        format!(
            "[[column]] table = {:?} column = {:?} key = \"…\" identifier = \"…\"",
            store::Plain(&one.table).to_string(),
            store::Plain(&one.column).to_string()
        )
    });
    format!(
        "sealed values stand in columns that nobody registered: {where_}; register each, with the identifier it was \
         sealed for: {}; or, if it only looks like one, [[ignore]] with table, column and reason",
        lines.collect::<Vec<_>>().join("; ")
    )
}

/// What an interrupted rotation leaves; a rollback leaves nothing.
fn stay(moved: u64) -> String {
    match moved {
        0 => String::new(),
        _ => format!("; {moved} values were moved and stay so: run `hardwrap rotate --resume`"),
    }
}

fn failed(gates: &[Gate]) -> String {
    let closed = gates.iter().filter_map(|gate| gate.closed.as_ref().map(|why| format!("{}: {why}", gate.name)));
    closed.collect::<Vec<_>>().join("; ")
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
    /// The configuration cannot be.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A column, or the register, cannot be.
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// The column is not registered, so nothing is sealed for it.
    #[error(transparent)]
    ColumnUnknown(#[from] Unknown),
    /// A row is missing, or one too many.
    #[error(transparent)]
    Misplaced(#[from] Misplaced),
    /// A text cannot name a row.
    #[error(transparent)]
    Row(#[from] NotARow),
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
    /// The keyring has no key yet.
    #[error("keyring {0} has no key: run `hardwrap init`")]
    NoKeys(String),
    /// No key of the keyring may seal.
    #[error("no key of keyring {0} is active, so nothing can be sealed: `hardwrap key list` shows their states")]
    NoActiveKey(String),
    /// The key that should seal may not, on the token.
    #[error(
        "key {0} is active, and the token does not let it wrap (CKA_ENCRYPT or CKA_WRAP is false): `hardwrap key \
         activate {0}` gives that back"
    )]
    MayNotWrap(KeyId),
    /// The keyring is empty, and the database has seen its keys.
    #[error(
        "keyring {keyring} on {token} is empty, and this database has seen its key {kid}: this is the wrong token or \
         keyring, or its keys are lost; no row was read"
    )]
    EmptyKeyring {
        /// The label of the keys.
        keyring: String,
        /// The token.
        token: String,
        /// The key that was seen last.
        kid: String,
    },
    /// The keyring holds keys, and none that the database has seen.
    #[error(
        "keyring {keyring} on {token} holds other keys than this database has seen ({kid} is not there): this is \
         another token, though it may have the same label; no row was read"
    )]
    OtherKeys {
        /// The label of the keys.
        keyring: String,
        /// The token.
        token: String,
        /// The key that was seen last.
        kid: String,
    },
    /// The keyring record says less than it said before: somebody put an older one back.
    #[error(
        "the keyring record of {keyring} on {token} is older than what this database has seen: key {kid} was {was} and \
         is {now}; an old copy of the token was put back; no row was read"
    )]
    OlderRecord {
        /// The label of the keys.
        keyring: String,
        /// The token.
        token: String,
        /// The key.
        kid: String,
        /// The state that the database saw.
        was: String,
        /// What the record says now.
        now: &'static str,
    },
    /// The keyring record does not name this database, so the destruction of a key would not ask for its proof.
    #[error("the keyring record does not name this database: run `hardwrap init`, which changes nothing else")]
    NotNoted,
    /// A key is there, and wraps otherwise than was asked for.
    #[error("the keyring's key wraps by {alg} ({0}); `hardwrap rotate --mechanism` makes one that wraps otherwise", alg = .0.alg().name())]
    OtherRoute(Route),
    /// There is no token of this name in the configuration.
    #[error("no [[token]] is called {0:?}: give its name as in the configuration")]
    NoSuchToken(String),
    /// A token of the configuration is out of reach, and a rotation, or the end of a key, needs all.
    #[error("token {0} is out of reach, and this needs every token of the configuration")]
    TokenAway(String),
    /// Envelopes stand in columns that nobody registered: a rotation would leave them behind.
    #[error("{}", unregistered(.0))]
    Unregistered(Vec<Found>),
    /// A rotation before this one is not finished.
    #[error("{0}: an earlier rotation is not finished: run `hardwrap rotate --resume`")]
    Unfinished(String),
    /// Somebody asked the rotation to end.
    #[error("stopped{}", stay(*moved))]
    Stopped {
        /// How many values were moved, and stay so.
        moved: u64,
    },
    /// An online rotation failed on the way.
    #[error(
        "cut off; what was moved stays so, and every value opens: see to the cause, then run `hardwrap rotate --resume`"
    )]
    CutOff(#[source] Box<Error>),
    /// An atomic rotation was rolled back.
    #[error(
        "rolled back: all rows are as before, both keys are on the token, and nothing is unreadable; see to the cause, then \
         run `hardwrap rotate --resume`"
    )]
    RolledBack(#[source] Box<Error>),
    /// The fence in the database went away while values were moved: somebody dropped it, or put a backup there.
    #[error(
        "the fence against key {0} is gone from the database since the rotation began: run `hardwrap rotate --resume`"
    )]
    FenceGone(KeyId),
    /// After the walk, values still name an old key: the proof failed.
    #[error("{count} values of {column} still name key {kid}: run `hardwrap rotate --resume`")]
    NotZero {
        /// `TABLE.COLUMN`.
        column: String,
        /// The key.
        kid: KeyId,
        /// How many.
        count: u64,
    },
    /// Another key was activated while values were moved.
    #[error("another key than {0} seals by now: run `hardwrap rotate --resume`")]
    AnotherSeals(KeyId),
    /// The application's own rotator failed; nothing of it was kept.
    #[error("rotator {0} failed, and nothing of it was kept")]
    Rotator(String, #[source] BoxedError),
    /// What has to hold before a key is retired or destroyed does not.
    #[error("key {kid} cannot be {act}: {}", failed(.gates))]
    Gates {
        /// The key.
        kid: KeyId,
        /// `retired` or `destroyed`.
        act: &'static str,
        /// Every gate, with why it is closed.
        gates: Vec<Gate>,
    },
    /// A database of the keyring cannot be given up.
    #[error("database {0} cannot be released: {1}")]
    NotReleased(String, &'static str),
    /// The database holds envelopes, and the keyring has no key: a new one would not open them.
    #[error(
        "the database holds sealed values ({0}) and the keyring has no key: this is the wrong token or keyring, or its \
         keys are lost; a new key would not open them, so none is made"
    )]
    KeysMissing(String),
}

impl Error {
    /// The name of the variant, or of that of the value's error: stable, for programs.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Codec(error) => error.kind(),
            Self::Token(_) => "Token",
            Self::Store(_) => "Store",
            Self::Config(_) => "Config",
            Self::Invalid(_) => "Invalid",
            Self::ColumnUnknown(_) => "ColumnUnknown",
            Self::Misplaced(_) => "Misplaced",
            Self::Row(_) => "Row",
            Self::RowNotInteger { .. } => "RowNotInteger",
            Self::NoKeys(_) => "NoKeys",
            Self::NoActiveKey(_) => "NoActiveKey",
            Self::MayNotWrap(_) => "MayNotWrap",
            Self::EmptyKeyring { .. } => "EmptyKeyring",
            Self::OtherKeys { .. } => "OtherKeys",
            Self::OlderRecord { .. } => "OlderRecord",
            Self::NotNoted => "NotNoted",
            Self::OtherRoute(_) => "OtherRoute",
            Self::KeysMissing(_) => "KeysMissing",
            Self::NoSuchToken(_) => "NoSuchToken",
            Self::TokenAway(_) => "TokenAway",
            Self::Unregistered(_) => "Unregistered",
            Self::Unfinished(_) => "Unfinished",
            Self::Stopped { .. } => "Stopped",
            Self::CutOff(_) => "CutOff",
            Self::RolledBack(_) => "RolledBack",
            Self::FenceGone(_) => "FenceGone",
            Self::NotZero { .. } => "NotZero",
            Self::AnotherSeals(_) => "AnotherSeals",
            Self::Rotator(..) => "Rotator",
            Self::Gates { .. } => "Gates",
            Self::NotReleased(..) => "NotReleased",
        }
    }
}
