//! A database in a directory of its own, keys in memory, and a second connection that is nobody's friend.

#![allow(dead_code, reason = "not every test uses every part")]

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel::sql_types::{BigInt, Nullable, Text};
use hardwrap::codec::Codec;
use hardwrap::column::{Register, nr_llm};
use hardwrap::provider::Alg;
use hardwrap::store::{AgentRuns, DatabaseUrl, Db, Persister};
use tempfile::TempDir;

use crate::memory_keys::MemoryKeys;

pub(crate) const KID: &str = "0001020304050607";

pub(crate) struct Shop {
    pub(crate) dir: TempDir,
    pub(crate) db: Arc<Db>,
    pub(crate) keys: Arc<MemoryKeys>,
    pub(crate) codec: Codec,
    other: Mutex<SqliteConnection>,
}

impl Shop {
    /// A new database with our tables and that of the agent runs.
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let db = Db::create(&url(&dir)).unwrap();
        db.upgrade().unwrap();
        db.create_agent_run_table().unwrap();
        let keys = Arc::new(MemoryKeys::one([0, 1, 2, 3, 4, 5, 6, 7].into(), Alg::A256GcmKw, [9; 32]));
        let codec = Codec::new(keys.clone());
        let other = Mutex::new(connection(&dir));
        Self { dir, db: Arc::new(db), keys, codec, other }
    }

    pub(crate) fn runs(&self) -> AgentRuns {
        AgentRuns::new(self.db.clone(), self.codec.clone(), &Register::new(nr_llm()).unwrap()).unwrap()
    }

    pub(crate) fn persister(&self) -> Persister {
        Persister::new(self.runs())
    }

    /// The directory, and the only connection that is left.
    pub(crate) fn closed(self) -> (TempDir, SqliteConnection) {
        let Self { dir, db, other, .. } = self;
        drop(db);
        (dir, other.into_inner().unwrap())
    }

    /// Runs statements on the other connection.
    pub(crate) fn sql(&self, sql: &str) {
        self.other.lock().unwrap().batch_execute(sql).unwrap_or_else(|error| panic!("{error}: {sql}"));
    }

    /// The number that a SELECT of one number gives.
    pub(crate) fn number(&self, sql: &str) -> i64 {
        let rows: Vec<Number> =
            diesel::sql_query(format!("SELECT ({sql}) AS n")).load(&mut *self.other.lock().unwrap()).unwrap();
        rows[0].n
    }

    /// The text that a SELECT of one text gives.
    pub(crate) fn text(&self, sql: &str) -> Option<String> {
        let rows: Vec<Line> =
            diesel::sql_query(format!("SELECT ({sql}) AS line")).load(&mut *self.other.lock().unwrap()).unwrap();
        rows.into_iter().next().unwrap().line
    }

    /// How SQLite would do a statement, step by step.
    pub(crate) fn plan(&self, explain: &str) -> String {
        let rows: Vec<Step> = diesel::sql_query(explain).load(&mut *self.other.lock().unwrap()).unwrap();
        rows.into_iter().map(|row| row.detail + "\n").collect()
    }

    /// One cell of one run.
    pub(crate) fn cell(&self, uuid: &str, column: &str) -> Option<String> {
        self.text(&format!("SELECT CAST({column} AS TEXT) FROM tx_nrllm_agentrun WHERE uuid = '{uuid}'"))
    }

    /// Everything of one run in one text.
    pub(crate) fn whole(&self, uuid: &str) -> Option<String> {
        self.text(&format!(
            "SELECT json_array(uid, status, queued_request, suspended_state, claimed_by, lease_expires, \
             requeue_count, pending_effect, started_at, finished_at, tstamp, crdate, error_class) \
             FROM tx_nrllm_agentrun WHERE uuid = '{uuid}'"
        ))
    }
}

pub(crate) fn path(dir: &TempDir) -> PathBuf {
    dir.path().join("app 1%.db")
}

pub(crate) fn url(dir: &TempDir) -> DatabaseUrl {
    format!("sqlite://{}", path(dir).display()).parse().unwrap()
}

pub(crate) fn connection(dir: &TempDir) -> SqliteConnection {
    let mut connection = SqliteConnection::establish(path(dir).to_str().unwrap()).unwrap();
    connection.batch_execute("PRAGMA busy_timeout = 10000").unwrap();
    connection
}

#[derive(QueryableByName)]
struct Number {
    #[diesel(sql_type = BigInt)]
    n: i64,
}

#[derive(QueryableByName)]
struct Step {
    #[diesel(sql_type = Text)]
    detail: String,
}

#[derive(QueryableByName)]
struct Line {
    #[diesel(sql_type = Nullable<Text>)]
    line: Option<String>,
}
