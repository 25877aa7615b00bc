//! What a list of runs shows: everything but the states themselves, of which only their kind and length are read.

use diesel::prelude::*;
use diesel::sql_types::{BigInt, Nullable, Text};

use super::guard::{lease_ended, status_in};
use super::run::RunParts;
use super::runs::{QUEUED_REQUEST, SUSPENDED_STATE};
use super::{AgentRuns, Run, RunId, Status};
use crate::provider::KeyId;
use crate::store::query::Query;
use crate::store::sql::Sql;
use crate::store::{Db, Error};

/// Which runs are listed.
#[derive(Clone, Debug, Default)]
pub struct Listing {
    /// Only those that stand in one of these; in any where none is given.
    pub statuses: Vec<Status>,
    /// Only running ones whose lease ended before this, in unix seconds.
    pub stale_before: Option<i64>,
    /// After the run with this `crdate` and uid.
    pub after: Option<(i64, i64)>,
    /// At most so many.
    pub limit: u32,
}

/// One run, and of its two states what they are.
#[derive(Debug)]
pub struct Summary {
    /// The run, without its states.
    pub run: Run,
    /// The request it was queued with.
    pub request: StateFact,
    /// The state it was suspended with.
    pub state: StateFact,
}

/// What a state column of one run holds.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct StateFact {
    /// What it claims to be.
    pub kind: StateKind,
    /// How long the stored text is, in bytes.
    pub bytes: u64,
}

/// What a stored text claims to be, by its marker.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum StateKind {
    /// NULL.
    Null,
    /// `''`.
    Empty,
    /// Sealed under this key.
    Sealed(KeyId),
    /// Marked as ours, without a well-formed key id.
    Damaged,
    /// Sealed by a newer hardwrap.
    OtherVersion,
    /// An envelope of nr-vault.
    Foreign,
    /// Not sealed.
    Cleartext,
}

impl AgentRuns {
    /// Runs, oldest first, without their states. Asks no key, and reads no payload.
    ///
    /// # Errors
    /// [`Error::Unavailable`], [`Error::NoTable`].
    pub fn summaries(db: &Db, listing: &Listing) -> Result<Vec<Summary>, Error> {
        let mut query = Query::new(select(db.sql())).sql(" WHERE 1 = 1");
        if !listing.statuses.is_empty() {
            query = query.sql(" AND ").append(status_in(db.sql(), &listing.statuses));
        }
        if let Some(now) = listing.stale_before {
            query = query
                .sql(" AND ")
                .append(status_in(db.sql(), &[Status::Running]))
                .sql(" AND ")
                .append(lease_ended(now));
        }
        if let Some((crdate, uid)) = listing.after {
            query = query.sql(&format!(" AND ({}, t.uid) > (", crdate_of(db.sql()))).integer(crdate);
            query = query.sql(", ").integer(uid).sql(")");
        }
        let query = query.sql(&format!(" ORDER BY {}, t.uid LIMIT ", crdate_of(db.sql())));
        load(db, &query.integer(listing.limit.into()))
    }

    /// One run without its states; none if there is no such run. Asks no key.
    ///
    /// # Errors
    /// [`Error::Unavailable`], [`Error::NoTable`].
    pub fn summary(db: &Db, id: &RunId) -> Result<Option<Summary>, Error> {
        let query = db.sql().is_text(Query::new(select(db.sql())).sql(" WHERE "), "t.uuid", id.as_str());
        Ok(load(db, &query)?.into_iter().next())
    }
}

fn load(db: &Db, query: &Query<'_>) -> Result<Vec<Summary>, Error> {
    let rows: Vec<SummaryParts> = db.read_with(|connection| query.load(connection))?;
    Ok(rows.into_iter().map(Summary::from).collect())
}

fn crdate_of(sql: Sql) -> String {
    format!("COALESCE({}, 0)", sql.integer("t.crdate"))
}

fn select(sql: Sql) -> String {
    let fact = |column: &str, name: &str| {
        let value = sql.of_t(column);
        format!(", {} AS {name}_kind, {} AS {name}_bytes", sql.kind_of(&value), sql.length(&value))
    };
    RunParts::select(sql, false, &(fact(QUEUED_REQUEST, "request") + &fact(SUSPENDED_STATE, "state")))
}

#[derive(QueryableByName)]
struct SummaryParts {
    #[diesel(embed)]
    run: RunParts,
    #[diesel(sql_type = Text)]
    request_kind: String,
    #[diesel(sql_type = Nullable<BigInt>)]
    request_bytes: Option<i64>,
    #[diesel(sql_type = Text)]
    state_kind: String,
    #[diesel(sql_type = Nullable<BigInt>)]
    state_bytes: Option<i64>,
}

impl From<SummaryParts> for Summary {
    fn from(parts: SummaryParts) -> Self {
        Self {
            run: parts.run.into(),
            request: StateFact::of(&parts.request_kind, parts.request_bytes),
            state: StateFact::of(&parts.state_kind, parts.state_bytes),
        }
    }
}

impl StateFact {
    fn of(kind: &str, bytes: Option<i64>) -> Self {
        let kind = match kind {
            "null" => StateKind::Null,
            "empty" => StateKind::Empty,
            "damaged" => StateKind::Damaged,
            "foreign" => StateKind::Foreign,
            "other_version" => StateKind::OtherVersion,
            kid => kid.parse().map_or(StateKind::Cleartext, StateKind::Sealed),
        };
        Self { kind, bytes: bytes.unwrap_or(0).unsigned_abs() }
    }
}
