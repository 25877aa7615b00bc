//! A small job queue that keeps what it is asked, and what it answered, sealed: diesel, SQLite, and HTTP by axum.
//!
//! ```sh
//! eval "$(softhsm/token dev)"               # a throw-away token; exports HARDWRAP_TOKEN_URI
//! export JOBS_DATABASE=sqlite://jobs.db     # this is the default
//! export JOBS_LISTEN=127.0.0.1:3000         # this too
//! cargo run --example jobs init             # once: makes key and tables
//! cargo run --example jobs                  # serves until SIGINT or SIGTERM
//!
//! curl -d '{"prompt":"hello"}' localhost:3000/jobs
//! curl -X PUT -d '"done"' localhost:3000/jobs/ID/result
//! curl localhost:3000/jobs/ID
//! ```
#![allow(
    missing_docs,
    clippy::print_stderr,
    reason = "lints of this repository: `table!` writes no docs, a server logs"
)]

use std::env;
use std::error::Error;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::extract::{Path, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post, put};
use axum::{Router, serve};
use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use hardwrap::codec;
use hardwrap::column::{Column, SealedColumn};
use hardwrap::hsm::Choice;
use hardwrap::keeper::{self, Keeper};
use hardwrap::secret::Plaintext;
use hardwrap::store::{DatabaseUrl, Sealed};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::spawn_blocking;
use tokio::time::sleep;
use uuid::Uuid;

// One type for each sealed column. The identifier is part of every sealed value: it never changes, whatever happens to
// the names of table and column. `in_row` binds each value to its row: copied to another row, it does not open.

/// What a job is asked.
#[derive(Debug)]
pub struct JobRequest;

impl SealedColumn for JobRequest {
    const COLUMN: Column = Column::constant("job", "request", "id", "jobs:job:request").in_row("id");
}

/// What came of it.
#[derive(Debug)]
pub struct JobResult;

impl SealedColumn for JobResult {
    const COLUMN: Column = Column::constant("job", "result", "id", "jobs:job:result").in_row("id");
}

// Every sealed column of the database stands here: what is not registered cannot be sealed, and would not be rotated.
const COLUMNS: [Column; 2] = [JobRequest::COLUMN, JobResult::COLUMN];

// A sealed value is about 300 bytes and four thirds of the value, all ASCII. The id is made by us and not by the
// database, because a value is sealed for its row before the row is there.
const TABLE: &str = "CREATE TABLE IF NOT EXISTS job (id TEXT NOT NULL PRIMARY KEY, request TEXT NOT NULL, result TEXT)";

diesel::table! {
    use diesel::sql_types::{Nullable, Text};
    use hardwrap::store::SealedText;
    use super::{JobRequest, JobResult};

    job (id) {
        id -> Text,
        request -> SealedText<JobRequest>,
        result -> Nullable<SealedText<JobResult>>,
    }
}

#[derive(Queryable, Selectable, Insertable)]
#[diesel(table_name = job)]
struct Job {
    id: String,
    request: Sealed<JobRequest>,
    result: Option<Sealed<JobResult>>,
}

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let outcome = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["init"] => init(),
        [] => run(),
        _ => Err("usage: jobs [init]".into()),
    };
    if let Err(error) = outcome {
        log(&*error);
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

/// What `hardwrap init` does, and our own table. Run again, it changes nothing.
fn init() -> Result<(), Box<dyn Error>> {
    let database = database()?;
    keeper(&database)?.init(Choice::Auto)?;
    connect(&database)?.batch_execute(TABLE)?;
    eprintln!("jobs: key and tables are ready");
    Ok(())
}

fn run() -> Result<(), Box<dyn Error>> {
    let database = database()?;
    // Fails here, before any row is read, if the token is not there or is the wrong one.
    let keeper = keeper(&database)?.open()?;
    let queue = Queue { keeper, connection: Arc::new(Mutex::new(connect(&database)?)) };
    let keeper = queue.keeper.clone();
    let done = Runtime::new()?.block_on(listen(queue));
    // Whatever is still in a handler gets its answer first.
    keeper.close();
    done
}

async fn listen(queue: Queue) -> Result<(), Box<dyn Error>> {
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let routes = Router::new()
        .route("/jobs", post(add))
        .route("/jobs/{id}", get(show))
        .route("/jobs/{id}/result", put(finish))
        .with_state(queue);
    let listener = TcpListener::bind(variable("JOBS_LISTEN", "127.0.0.1:3000")).await?;
    eprintln!("jobs: listening on {}", listener.local_addr()?);
    let (stop, stopping) = tokio::sync::oneshot::channel::<()>();
    let server = serve(listener, routes).with_graceful_shutdown(async {
        let _ = stopping.await;
    });
    let patience = async {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        let _ = stop.send(());
        sleep(PATIENCE).await;
    };
    tokio::select! {
        served = server => served?,
        // Somebody sends half a request and waits.
        () = patience => {}
    }
    Ok(())
}

/// What the handlers share. Cheap to clone.
#[derive(Clone)]
struct Queue {
    keeper: Keeper,
    connection: Arc<Mutex<SqliteConnection>>,
}

async fn add(State(queue): State<Queue>, request: String) -> Result<Response, Refusal> {
    is_json(&request)?;
    let id = Uuid::new_v4();
    waiting(move || queue.add(id, &request)).await?;
    Ok((StatusCode::CREATED, JSON, format!("{{\"id\":\"{id}\"}}")).into_response())
}

async fn show(State(queue): State<Queue>, Path(id): Path<String>) -> Result<Response, Refusal> {
    let id = parse(&id)?;
    let (request, result) = waiting(move || queue.show(id)).await?;
    let result = result.as_ref().map_or(b"null".as_slice(), Plaintext::expose);
    let start = format!("{{\"id\":\"{id}\",\"request\":");
    let body = [start.as_bytes(), request.expose(), b",\"result\":", result, b"}"].concat();
    Ok((JSON, body).into_response())
}

async fn finish(State(queue): State<Queue>, Path(id): Path<String>, result: String) -> Result<StatusCode, Refusal> {
    let id = parse(&id)?;
    is_json(&result)?;
    waiting(move || queue.finish(id, &result)).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Runs what waits for the token or the database on a thread that may wait. On a thread of the runtime, a slow token
/// would hold up every other request.
async fn waiting<T: Send + 'static>(work: impl FnOnce() -> Result<T, Refusal> + Send + 'static) -> Result<T, Refusal> {
    spawn_blocking(work).await.unwrap_or_else(|panicked| Err(Refusal::failed(&panicked)))
}

impl Queue {
    fn add(&self, id: Uuid, request: &str) -> Result<(), Refusal> {
        // Sealed before the connection is locked: the token may take its time.
        let request = Sealed::seal(&self.keeper, id, request.as_bytes())?;
        let new = Job { id: id.to_string(), request, result: None };
        diesel::insert_into(job::table).values(new).execute(&mut *self.connection())?;
        Ok(())
    }

    fn show(&self, id: Uuid) -> Result<(Plaintext, Option<Plaintext>), Refusal> {
        let query = job::table.find(id.to_string()).select(Job::as_select());
        // Reading asks no key, so the connection is free again before the token is asked.
        let found = query.first(&mut *self.connection()).optional()?.ok_or(Refusal::Unknown)?;
        let result = found.result.map(|result| result.open(&self.keeper, id)).transpose()?;
        Ok((found.request.open(&self.keeper, id)?, result))
    }

    fn finish(&self, id: Uuid, result: &str) -> Result<(), Refusal> {
        // `job::request.eq(result)` would not compile: the type says which column it was sealed for.
        let result = Sealed::seal(&self.keeper, id, result.as_bytes())?;
        let update = diesel::update(job::table.find(id.to_string())).set(job::result.eq(result));
        if update.execute(&mut *self.connection())? == 0 {
            return Err(Refusal::Unknown);
        }
        Ok(())
    }

    fn connection(&self) -> MutexGuard<'_, SqliteConnection> {
        // Nothing here leaves a statement half done, so a thread that died leaves a connection that works.
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a client is told. The reason goes to the log, and never to the client.
#[derive(Debug)]
enum Refusal {
    NotJson,
    Unknown,
    TooLarge,
    /// Nothing is known about the value, nothing was stored. It is never "not found" and never "tampered".
    Unavailable,
    Failed,
}

impl Refusal {
    fn failed(reason: &dyn Error) -> Self {
        log(reason);
        Self::Failed
    }
}

impl From<keeper::Error> for Refusal {
    fn from(error: keeper::Error) -> Self {
        match error {
            keeper::Error::Codec(codec::Error::Unavailable(_)) => {
                log(&error);
                Self::Unavailable
            }
            keeper::Error::Codec(codec::Error::TooLarge { .. }) => Self::TooLarge,
            // Above all `Rejected`: altered, or moved here from another row. Somebody should look.
            error => Self::failed(&error),
        }
    }
}

impl From<diesel::result::Error> for Refusal {
    fn from(error: diesel::result::Error) -> Self {
        Self::failed(&error)
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        match self {
            Self::NotJson => StatusCode::BAD_REQUEST.into_response(),
            Self::Unknown => StatusCode::NOT_FOUND.into_response(),
            Self::TooLarge => StatusCode::PAYLOAD_TOO_LARGE.into_response(),
            // The keeper tries a token that was out of reach again within a second.
            Self::Unavailable => (StatusCode::SERVICE_UNAVAILABLE, [(header::RETRY_AFTER, "1")]).into_response(),
            Self::Failed => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
        }
    }
}

fn is_json(text: &str) -> Result<(), Refusal> {
    serde_json::from_str::<serde_json::Value>(text).map_err(|_| Refusal::NotJson)?;
    Ok(())
}

fn parse(id: &str) -> Result<Uuid, Refusal> {
    Uuid::try_parse(id).map_err(|_| Refusal::Unknown)
}

fn keeper(database: &DatabaseUrl) -> Result<keeper::Builder, Box<dyn Error>> {
    let token = env::var("HARDWRAP_TOKEN_URI").map_err(|_| "HARDWRAP_TOKEN_URI is not set: which token?")?;
    Ok(Keeper::builder(token.parse()?, database.clone()).columns(COLUMNS))
}

fn database() -> Result<DatabaseUrl, Box<dyn Error>> {
    Ok(variable("JOBS_DATABASE", "sqlite://jobs.db").parse()?)
}

/// The application's own connection, beside the keeper's: two writers of one SQLite file wait for each other.
fn connect(database: &DatabaseUrl) -> Result<SqliteConnection, Box<dyn Error>> {
    let path = database.path().and_then(|path| path.to_str()).ok_or("JOBS_DATABASE is no SQLite file, or not UTF-8")?;
    let mut connection = SqliteConnection::establish(path)?;
    connection.batch_execute("PRAGMA busy_timeout = 10000")?;
    Ok(connection)
}

fn variable(name: &str, default: &str) -> String {
    env::var(name).unwrap_or_else(|_| default.to_owned())
}

/// The whole chain on one line. Errors of hardwrap hold no value, key, PIN or password.
fn log(error: &dyn Error) {
    let mut said = error.to_string();
    let mut next = error.source();
    while let Some(source) = next {
        said.push_str(": ");
        said.push_str(&source.to_string());
        next = source.source();
    }
    eprintln!("jobs: {said}");
}

const JSON: [(header::HeaderName, &str); 1] = [(header::CONTENT_TYPE, "application/json")];

/// How long requests may take to end after SIGTERM.
const PATIENCE: Duration = Duration::from_secs(10);
