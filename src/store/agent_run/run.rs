//! One agent run, and what its transitions are given.

use std::fmt;
use std::str::FromStr;

use diesel::prelude::*;
use diesel::sql_types::{BigInt, Binary, Nullable};

use super::AgentRuns;
use crate::column::{Column, Row};
use crate::secret::Plaintext;
use crate::store::Error;
use crate::store::sql::Sql;
use crate::store::stored::{self, BadRow, RowParts, StoredText};

/// Names one run: the text of its `uuid`, 1 to 36 bytes without control characters, never changed. A UUID is written
/// in lower case with hyphens.
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct RunId(String);

impl RunId {
    /// A new one: a random UUID (version 4).
    pub fn random() -> Self {
        Self(uuid::Uuid::new_v4().to_string())
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    pub(super) fn row(&self) -> Result<Row, Error> {
        Row::try_from(self.as_str()).map_err(|_| Error::BadRow(BadRow::Empty))
    }
}

impl FromStr for RunId {
    type Err = InvalidRun;

    fn from_str(text: &str) -> Result<Self, InvalidRun> {
        let canonical = uuid::Uuid::try_parse(text).map_or(true, |uuid| uuid.to_string() == text);
        if text.is_empty() || text.len() > 36 || text.chars().any(char::is_control) || !canonical {
            return Err(InvalidRun::Id);
        }
        Ok(Self(text.to_owned()))
    }
}

impl fmt::Display for RunId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Names one worker: 1 to 64 bytes without control characters.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct Worker(String);

impl Worker {
    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Worker {
    type Err = InvalidRun;

    fn from_str(text: &str) -> Result<Self, InvalidRun> {
        if text.is_empty() || text.len() > 64 || text.chars().any(char::is_control) {
            return Err(InvalidRun::Worker);
        }
        Ok(Self(text.to_owned()))
    }
}

/// A text names no run, or no worker.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum InvalidRun {
    /// No run.
    #[error("a run is named by 1 to 36 bytes without control characters; a UUID in lower case with hyphens")]
    Id,
    /// No worker.
    #[error("a worker is named by 1 to 64 bytes without control characters")]
    Worker,
}

/// Who works on a run, and until when nobody else may.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Lease {
    /// The worker.
    pub worker: Worker,
    /// When the lease ends, in unix seconds.
    pub expires: i64,
}

/// Where a run stands.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Status {
    /// It waits for a worker.
    Queued,
    /// A worker has it.
    Running,
    /// It waits for a human to allow what it wants to do.
    WaitingForApproval,
    /// It waits for a human to answer.
    WaitingForInput,
    /// It ended well.
    Completed,
    /// It ended badly.
    Failed,
    /// It was called off.
    Cancelled,
}

impl Status {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Queued,
        Self::Running,
        Self::WaitingForApproval,
        Self::WaitingForInput,
        Self::Completed,
        Self::Failed,
        Self::Cancelled,
    ];

    /// Those that a run can still leave.
    pub const UNFINISHED: [Self; 4] = [Self::Queued, Self::Running, Self::WaitingForApproval, Self::WaitingForInput];

    /// Those that end a run.
    pub const FINISHED: [Self; 3] = [Self::Completed, Self::Failed, Self::Cancelled];

    /// As the table writes it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Running => "running",
            Self::WaitingForApproval => "waiting_for_approval",
            Self::WaitingForInput => "waiting_for_input",
            Self::Completed => "completed",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }

    /// The status called `name`.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|status| status.name() == name)
    }

    /// Whether the run has ended.
    pub fn is_finished(self) -> bool {
        Self::FINISHED.contains(&self)
    }
}

/// What a run waits for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Waiting {
    /// A human who allows what it wants to do.
    Approval,
    /// A human who answers.
    Input,
}

impl Waiting {
    /// The status of a run that waits for this.
    pub fn status(self) -> Status {
        match self {
            Self::Approval => Status::WaitingForApproval,
            Self::Input => Status::WaitingForInput,
        }
    }
}

/// How a worker's run ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Settled {
    /// Well.
    Completed,
    /// Badly.
    Failed,
}

/// A run to be made.
#[derive(Clone, Debug, Default)]
pub struct NewRun {
    /// Its name; a random one where none is given. It is assigned before the insert, because values are bound to it.
    pub id: Option<RunId>,
    /// The page it belongs to.
    pub pid: i64,
    /// The configuration it runs under.
    pub configuration_uid: i64,
    /// That configuration's name.
    pub configuration_identifier: String,
    /// The user it runs for.
    pub be_user: i64,
}

/// How a run ended, and what it used.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Well or badly.
    pub settled: Settled,
    /// The class of the error, cut to 255 characters; empty for none.
    pub error_class: String,
    /// Why it ended, cut to 64 characters.
    pub termination_reason: String,
    /// What it used.
    pub totals: Totals,
}

/// What a run used.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Totals {
    /// Rounds with the model.
    pub iterations: i64,
    /// Whether it was cut short.
    pub truncated: bool,
    /// Tokens sent.
    pub prompt_tokens: i64,
    /// Tokens received.
    pub completion_tokens: i64,
    /// Tokens, together.
    pub tokens: i64,
    /// Cost, in millionths: the column has six decimals.
    pub cost_micros: i64,
}

/// A run whose lease has ended.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct StaleRun {
    /// Its uid.
    pub uid: i64,
    /// Its name as it stands, with replacement characters where it is not UTF-8.
    pub uuid: String,
    /// Who had it.
    pub claimed_by: String,
    /// When the lease ended, in unix seconds.
    pub lease_expires: i64,
    /// How often it was queued again.
    pub requeue_count: i64,
    /// Whether something was under way that must not be done twice.
    pub pending_effect: bool,
}

/// One run. Its two states stay sealed until they are asked for, one by one, so that a list shows every run.
#[derive(Debug)]
pub struct Run {
    /// Its uid.
    pub uid: i64,
    /// Its name as it stands, with replacement characters where it is not UTF-8.
    pub uuid: String,
    /// Where it stands; none if this version does not know the status.
    pub status: Option<Status>,
    /// The configuration it runs under.
    pub configuration_uid: i64,
    /// That configuration's name.
    pub configuration_identifier: String,
    /// The user it runs for.
    pub be_user: i64,
    /// Who has it; empty for nobody.
    pub claimed_by: String,
    /// When the lease ends, in unix seconds; 0 for none.
    pub lease_expires: i64,
    /// How often it was queued again.
    pub requeue_count: i64,
    /// Whether something is under way that must not be done twice.
    pub pending_effect: bool,
    /// The class of the error it ended with.
    pub error_class: String,
    /// Why it ended.
    pub termination_reason: String,
    /// What it used.
    pub totals: Totals,
    /// When it first ran, in unix seconds; 0 for not yet.
    pub started_at: i64,
    /// When it ended, in unix seconds; 0 for not yet.
    pub finished_at: i64,
    /// When it was made, in unix seconds.
    pub crdate: i64,
    row: Result<Option<Row>, BadRow>,
    pub(super) queued_request: Option<StoredText>,
    pub(super) suspended_state: Option<StoredText>,
}

impl Run {
    /// Opens the request it was queued with; none where there is none (NULL and `''` alike).
    ///
    /// # Errors
    /// [`Error::Codec`], [`Error::NotText`], [`Error::BadRow`].
    pub fn queued_request(&self, runs: &AgentRuns) -> Result<Option<Plaintext>, Error> {
        self.open(runs, &runs.request, self.queued_request.as_ref())
    }

    /// Opens the state it was suspended with; none where there is none (NULL and `''` alike).
    ///
    /// # Errors
    /// [`Error::Codec`], [`Error::NotText`], [`Error::BadRow`].
    pub fn suspended_state(&self, runs: &AgentRuns) -> Result<Option<Plaintext>, Error> {
        self.open(runs, &runs.state, self.suspended_state.as_ref())
    }

    fn open(&self, runs: &AgentRuns, column: &Column, value: Option<&StoredText>) -> Result<Option<Plaintext>, Error> {
        let opened = stored::open(&runs.codec, column, &self.row, value)?;
        Ok(opened.filter(|plaintext| !plaintext.expose().is_empty()))
    }
}

/// A run as [`RunParts::select`] reads it: every cell cast, so that no cell of an odd kind hides a run.
#[derive(QueryableByName)]
pub(super) struct RunParts {
    #[diesel(embed)]
    bound_to: RowParts,
    #[diesel(sql_type = BigInt)]
    uid: i64,
    #[diesel(sql_type = Nullable<Binary>)]
    uuid: Option<Vec<u8>>,
    #[diesel(sql_type = Nullable<Binary>)]
    status: Option<Vec<u8>>,
    #[diesel(sql_type = Nullable<BigInt>)]
    configuration_uid: Option<i64>,
    #[diesel(sql_type = Nullable<Binary>)]
    configuration_identifier: Option<Vec<u8>>,
    #[diesel(sql_type = Nullable<BigInt>)]
    be_user: Option<i64>,
    #[diesel(sql_type = Nullable<BigInt>)]
    iterations: Option<i64>,
    #[diesel(sql_type = Nullable<BigInt>)]
    truncated: Option<i64>,
    #[diesel(sql_type = Nullable<BigInt>)]
    total_prompt_tokens: Option<i64>,
    #[diesel(sql_type = Nullable<BigInt>)]
    total_completion_tokens: Option<i64>,
    #[diesel(sql_type = Nullable<BigInt>)]
    total_tokens: Option<i64>,
    #[diesel(sql_type = Nullable<BigInt>)]
    cost_micros: Option<i64>,
    #[diesel(sql_type = Nullable<Binary>)]
    error_class: Option<Vec<u8>>,
    #[diesel(sql_type = Nullable<Binary>)]
    termination_reason: Option<Vec<u8>>,
    #[diesel(sql_type = Nullable<Binary>)]
    claimed_by: Option<Vec<u8>>,
    #[diesel(sql_type = Nullable<BigInt>)]
    lease_expires: Option<i64>,
    #[diesel(sql_type = Nullable<BigInt>)]
    requeue_count: Option<i64>,
    #[diesel(sql_type = Nullable<BigInt>)]
    pending_effect: Option<i64>,
    #[diesel(sql_type = Nullable<BigInt>)]
    started_at: Option<i64>,
    #[diesel(sql_type = Nullable<BigInt>)]
    finished_at: Option<i64>,
    #[diesel(sql_type = Nullable<BigInt>)]
    crdate: Option<i64>,
    #[diesel(sql_type = Nullable<Binary>)]
    queued_request: Option<Vec<u8>>,
    #[diesel(sql_type = Nullable<Binary>)]
    suspended_state: Option<Vec<u8>>,
}

impl RunParts {
    /// Everything of a run, or everything but its two states, which then come as NULL; and `more` after a comma.
    pub(super) fn select(sql: Sql, with_states: bool, more: &str) -> String {
        let text = |name: &&str| format!("{} AS {name}", sql.as_bytes(&sql.of_t(name)));
        let integer = |name: &&str| format!("{} AS {name}", sql.integer(&sql.of_t(name)));
        let state = |name: &&str| if with_states { text(name) } else { format!("{} AS {name}", sql.null_bytes()) };
        let uuid = sql.of_t("uuid");
        let row = match sql {
            Sql::Sqlite => RowParts::select(&uuid),
            _ => format!(
                "CASE WHEN {uuid} IS NULL THEN 'null' ELSE 'text' END AS row_kind, {} AS row_integer, {} AS row_bytes",
                sql.integer("NULL"),
                sql.as_bytes(&uuid)
            ),
        };
        let mut parts = vec![
            format!("{} AS uid", sql.integer("t.uid")),
            row,
            format!("{} AS cost_micros", sql.integer("round(t.estimated_cost * 1000000)")),
        ];
        parts.extend(TEXTS.iter().map(text));
        parts.extend(INTEGERS.iter().map(integer));
        parts.extend(["queued_request", "suspended_state"].iter().map(state));
        format!("SELECT {}{more} FROM {}", parts.join(", "), sql.table("tx_nrllm_agentrun"))
    }

    pub(super) fn stale(self) -> StaleRun {
        StaleRun {
            uid: self.uid,
            uuid: shown(self.uuid),
            claimed_by: shown(self.claimed_by),
            lease_expires: self.lease_expires.unwrap_or(0),
            requeue_count: self.requeue_count.unwrap_or(0),
            pending_effect: self.pending_effect.unwrap_or(0) != 0,
        }
    }
}

impl From<RunParts> for Run {
    fn from(parts: RunParts) -> Self {
        Self {
            uid: parts.uid,
            uuid: shown(parts.uuid),
            status: Status::from_name(&shown(parts.status)),
            configuration_uid: parts.configuration_uid.unwrap_or(0),
            configuration_identifier: shown(parts.configuration_identifier),
            be_user: parts.be_user.unwrap_or(0),
            claimed_by: shown(parts.claimed_by),
            lease_expires: parts.lease_expires.unwrap_or(0),
            requeue_count: parts.requeue_count.unwrap_or(0),
            pending_effect: parts.pending_effect.unwrap_or(0) != 0,
            error_class: shown(parts.error_class),
            termination_reason: shown(parts.termination_reason),
            totals: Totals {
                iterations: parts.iterations.unwrap_or(0),
                truncated: parts.truncated.unwrap_or(0) != 0,
                prompt_tokens: parts.total_prompt_tokens.unwrap_or(0),
                completion_tokens: parts.total_completion_tokens.unwrap_or(0),
                tokens: parts.total_tokens.unwrap_or(0),
                cost_micros: parts.cost_micros.unwrap_or(0),
            },
            started_at: parts.started_at.unwrap_or(0),
            finished_at: parts.finished_at.unwrap_or(0),
            crdate: parts.crdate.unwrap_or(0),
            row: parts.bound_to.row().map(Some),
            queued_request: parts.queued_request.map(StoredText::new),
            suspended_state: parts.suspended_state.map(StoredText::new),
        }
    }
}

fn shown(bytes: Option<Vec<u8>>) -> String {
    String::from_utf8_lossy(&bytes.unwrap_or_default()).into_owned()
}

const TEXTS: [&str; 6] =
    ["uuid", "status", "configuration_identifier", "error_class", "termination_reason", "claimed_by"];

const INTEGERS: [&str; 13] = [
    "configuration_uid",
    "be_user",
    "iterations",
    "truncated",
    "total_prompt_tokens",
    "total_completion_tokens",
    "total_tokens",
    "lease_expires",
    "requeue_count",
    "pending_effect",
    "started_at",
    "finished_at",
    "crdate",
];
