//! Databases: the registered columns and their schema, reading and counting sealed values, sealing in place, and the
//! agent runs of the preset `nr-llm`. Everything that speaks SQL stands here, and what differs between SQLite,
//! PostgreSQL and MariaDB in `sql.rs`, `catalog.rs` and `server.rs`.
//!
//! A [`Db`] is one database. What a caller may do about a failure is the variant of [`Error`]; above all, a key out
//! of reach is [`codec::Error::Unavailable`](crate::codec::Error::Unavailable) and a database out of reach
//! [`Error::Unavailable`], never a value that is not there.

// What one database alone does not use is not waste: the build with all of them, and its tests, say what is.
#![cfg_attr(
    not(all(feature = "sqlite", feature = "postgres", feature = "mariadb")),
    allow(dead_code, unused_imports, unused_variables, irrefutable_let_patterns, unreachable_patterns)
)]

mod agent_run;
mod catalog;
mod connection;
mod counts;
mod db;
mod demo;
mod discovery;
mod error;
mod facts;
mod fence;
mod fronts;
mod in_place;
mod key;
mod lease;
mod ledger;
mod parts;
mod plain;
mod query;
mod rotations;
mod schema;
mod sealed;
#[cfg(any(feature = "postgres", feature = "mariadb"))]
mod server;
mod settings;
mod shape;
mod sql;
#[cfg(feature = "sqlite")]
mod sqlite;
mod stored;
mod url;
mod vouch;

pub use agent_run::{
    AgentRuns, Answer, InvalidRun, Lease, Listing, NewRun, Outcome, Persister, Purged, Retention, Run, RunId, Settled,
    StaleRun, StateFact, StateKind, Status, Summary, Taken, Totals, Waiting, Work, Worker,
};
pub use connection::AnyConnection;
pub use counts::Counts;
pub use db::Db;
pub use demo::DEMO_SECRET;
pub use discovery::Found;
pub use error::{Error, fenced};
pub use facts::{ColumnFact, ColumnFacts, KeyFact, RowFact, TableFact, declared_capacity};
pub use fence::Spot;
pub use fronts::{FrontPage, Naming, NewFront, StoredFront};
pub use in_place::SealedInPlace;
pub use key::{Key, OddKey};
pub use lease::{RotationLease, WorkLease};
pub(crate) use ledger::KEYLESS;
pub use ledger::{BadValue, LedgerEntry};
pub use parts::Part;
pub use plain::Plain;
pub use rotations::{LastDiscovery, RotationFact};
pub use schema::{Applied, Identity, KeySeen, schema_sql};
pub use sealed::{NotSealed, Sealed, SealedText};
pub use settings::{ServerSettings, Settings, SqliteSettings};
pub use stored::{BadRow, Stored, StoredText};
pub use url::{BadUrl, DatabaseUrl};
