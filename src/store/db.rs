//! One database: its connection, its transactions, its lock.

use std::fmt;
use std::fs;
use std::mem;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use diesel::connection::{AnsiTransactionManager, SimpleConnection, TransactionManager};
use diesel::prelude::*;
use diesel::sql_types::{BigInt, Text};

use super::error::CANNOT_OPEN;
use super::sql::{self, Query};
use super::{DatabaseUrl, Error, schema};

/// A connection as diesel has it, for those who bring statements of their own.
pub type AnyConnection = SqliteConnection;

/// One database. Its methods take `&self` and wait for each other; share it by reference or in an `Arc`.
pub struct Db {
    url: DatabaseUrl,
    /// There until it drops.
    connection: Option<Mutex<SqliteConnection>>,
    /// Who opened it: SQLite forbids to carry a connection over a fork, and keeps what it knows of locks in the process,
    /// so that a second connection of the child would take none.
    process: u32,
    /// Whether the connection stands inside the transaction of [`Db::exclusively`].
    held: bool,
}

impl Db {
    /// Opens a database that is there: for reading where file or directory cannot be written, and then every write is
    /// [`Error::ReadOnly`]. A file that is not ours stays exactly as it is; one that is keeps a write-ahead log.
    ///
    /// # Errors
    /// [`Error::NoDatabase`] if it is not; [`Error::NotADatabase`], [`Error::Unfit`], [`Error::Unavailable`].
    pub fn open(url: &DatabaseUrl) -> Result<Self, Error> {
        if !is_there(url.path())? {
            return Err(Error::NoDatabase(url.path().to_owned()));
        }
        Ok(Self::on(url, connection(url, "rw")?, false))
    }

    /// Opens a database, and makes its file where it is missing. Who may read the file is for the umask to say.
    ///
    /// # Errors
    /// As [`Db::open`], but [`Error::NoPlace`] in place of [`Error::NoDatabase`], if the directory is missing.
    pub fn create(url: &DatabaseUrl) -> Result<Self, Error> {
        let path = absolute(url)?;
        if !path.parent().is_some_and(Path::is_dir) {
            return Err(Error::NoPlace(url.path().to_owned()));
        }
        let db = Self::on(url, connection(url, "rwc")?, false);
        db.keep_log()?;
        Ok(db)
    }

    /// Where the database is.
    pub fn url(&self) -> &DatabaseUrl {
        &self.url
    }

    /// Runs `work` while nobody else can write to the database, and keeps what it wrote only if it succeeds.
    ///
    /// `work` is given a `Db` of its own, on a second connection that holds the write lock: everything it does there
    /// is one transaction, and all methods work but [`Db::truncate_wal`]. The `Db` outside still reads, and a write
    /// through it would wait for the lock in vain and end as [`Error::Unavailable`].
    ///
    /// # Errors
    /// Whatever `work` fails with; [`Error::Unavailable`] if the lock is not to be had within ten seconds.
    pub fn exclusively<T, E: From<Error>>(&self, work: impl FnOnce(&Db) -> Result<T, E>) -> Result<T, E> {
        if self.held {
            return work(self);
        }
        let mut connection = connection(&self.url, "rw")?;
        AnsiTransactionManager::begin_transaction_sql(&mut connection, sql::BEGIN).map_err(Error::from)?;
        // Known before the work begins, which may change more than the database.
        connection.batch_execute(sql::TRY_WRITING).map_err(Error::from)?;
        let inside = Self::on(&self.url, connection, true);
        let result = work(&inside);
        let mut connection = inside.lock()?;
        let connection = &mut *connection;
        match result {
            Ok(value) => {
                AnsiTransactionManager::commit_transaction(connection).map_err(Error::from)?;
                Ok(value)
            }
            Err(error) => {
                // Closing the connection rolls back as well, so a failure here changes nothing.
                let _ = AnsiTransactionManager::rollback_transaction(connection);
                Err(error)
            }
        }
    }

    /// Writes everything from the write-ahead log into the database and empties the log, so that old content does not
    /// stay there. Waits for readers, ten seconds at most.
    ///
    /// # Errors
    /// [`Error::WalInUse`] if another connection still needs the log.
    pub fn truncate_wal(&self) -> Result<(), Error> {
        if self.held {
            return Err(Error::WalInUse);
        }
        let outcome =
            self.read_with(|connection| Query::new("PRAGMA wal_checkpoint(TRUNCATE)").load::<Checkpoint>(connection));
        match outcome {
            Ok(done) if done.iter().all(|done| done.busy == 0) => Ok(()),
            Ok(_) | Err(Error::Unavailable(_)) => Err(Error::WalInUse),
            Err(error) => Err(error),
        }
    }

    /// Runs `work` of somebody else in one write transaction, or inside that of [`Db::exclusively`]: all of it is kept, or
    /// nothing. It must not begin, commit or roll back itself.
    ///
    /// # Errors
    /// Whatever `work` fails with; [`Error::Unavailable`], [`Error::ReadOnly`].
    pub fn transact<T>(&self, work: impl FnOnce(&mut AnyConnection) -> Result<T, Error>) -> Result<T, Error> {
        self.write(work)
    }

    /// Runs `work` of somebody else, which only reads.
    ///
    /// # Errors
    /// Whatever `work` fails with; [`Error::Unavailable`].
    pub fn look<T>(&self, work: impl FnOnce(&mut AnyConnection) -> Result<T, Error>) -> Result<T, Error> {
        self.read_with(work)
    }

    /// Runs one statement, or several that need no common view.
    pub(super) fn read_with<T>(
        &self,
        work: impl FnOnce(&mut SqliteConnection) -> Result<T, Error>,
    ) -> Result<T, Error> {
        self.with(work)
    }

    /// Runs one write transaction: all of `work`, or nothing.
    pub(super) fn write<T>(&self, work: impl FnOnce(&mut SqliteConnection) -> Result<T, Error>) -> Result<T, Error> {
        self.with(
            |connection| {
                if self.held { connection.transaction(work) } else { connection.immediate_transaction(work) }
            },
        )
    }

    /// Gives the database a write-ahead log, if it has none yet and the connection stands in no transaction. Fails
    /// where nothing can be written.
    pub(super) fn keep_log(&self) -> Result<(), Error> {
        if self.held {
            return Ok(());
        }
        self.read_with(|connection| {
            keep_log(connection)?;
            Ok(connection.batch_execute(sql::TRY_WRITING)?)
        })
    }

    fn on(url: &DatabaseUrl, connection: SqliteConnection, held: bool) -> Self {
        let process = process::id();
        opened().push((process, absolute(url).unwrap_or_default()));
        Self { url: url.clone(), connection: Some(Mutex::new(connection)), process, held }
    }

    fn with<T>(&self, work: impl FnOnce(&mut SqliteConnection) -> Result<T, Error>) -> Result<T, Error> {
        work(&mut *self.lock()?)
    }

    fn lock(&self) -> Result<MutexGuard<'_, SqliteConnection>, Error> {
        let connection = self.connection.as_ref().filter(|_| self.process == process::id()).ok_or(Error::Forked)?;
        Ok(connection.lock().unwrap_or_else(|poisoned| {
            // A thread died in the middle of its work, which nobody can finish now. The lock of `exclusively` is not
            // ours to give back: its owner ends that transaction.
            let mut guard = poisoned.into_inner();
            if !self.held {
                let _ = AnsiTransactionManager::rollback_transaction(&mut *guard);
            }
            connection.clear_poison();
            guard
        }))
    }
}

impl Drop for Db {
    fn drop(&mut self) {
        if self.process == process::id() {
            let path = absolute(&self.url).unwrap_or_default();
            let mut opened = opened();
            if let Some(at) = opened.iter().position(|(process, of)| *process == self.process && *of == path) {
                opened.swap_remove(at);
            }
        } else {
            // Closing it here would take the parent's log and locks away.
            mem::forget(self.connection.take());
        }
    }
}

/// Which files are open, and in which process: a child inherits the list of its parent.
fn opened() -> MutexGuard<'static, Vec<(u32, PathBuf)>> {
    static OPENED: Mutex<Vec<(u32, PathBuf)>> = Mutex::new(Vec::new());
    OPENED.lock().unwrap_or_else(PoisonError::into_inner)
}

impl fmt::Debug for Db {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Db({})", self.url)
    }
}

/// Connects to a file for writing. SQLite itself falls back to reading a file that cannot be written, but not where a
/// write-ahead log wants files of its own in a directory that cannot.
fn connection(url: &DatabaseUrl, mode: &str) -> Result<SqliteConnection, Error> {
    let path = absolute(url)?;
    if path.is_dir() {
        return Err(Error::NotADatabase(url.path().to_owned()));
    }
    if opened().iter().any(|(process, of)| *process != process::id() && *of == path) {
        return Err(Error::Forked);
    }
    let cannot_write = |error: &Error| match error {
        Error::ReadOnly => true,
        Error::Unavailable(source) => source.to_string().contains(CANNOT_OPEN),
        _ => false,
    };
    match settled(&path, mode) {
        Err(error) if cannot_write(&error) && is_there(&path)? => frozen(&path, error),
        outcome => outcome,
    }
    .map_err(|error| match error {
        Error::Refused(source) if source.to_string() == "file is not a database" => {
            Error::NotADatabase(url.path().to_owned())
        }
        error => error,
    })
}

/// Connects to a file that nobody can be writing: no other connection keeps an index of its log, and nothing waits in
/// a log or journal to be recovered. Else, there is a reason not to read it.
fn frozen(path: &Path, error: Error) -> Result<SqliteConnection, Error> {
    let beside = |end: &str| {
        let mut name = path.as_os_str().to_owned();
        name.push(end);
        // Asked by name: opening and closing a file here would take away the locks of this process.
        fs::metadata(PathBuf::from(name)).ok().map(|found| found.len())
    };
    if ["-wal", "-journal"].into_iter().any(|end| beside(end).is_some_and(|length| length > 0)) {
        return Err(Error::Unfit(
            "a log or journal (-wal, -journal) waits to be recovered, and its directory cannot be written: put both \
             files where they can be",
        ));
    }
    if beside("-shm").is_some() {
        return Err(error);
    }
    settled(path, "ro&immutable=1")
}

fn settled(path: &Path, mode: &str) -> Result<SqliteConnection, Error> {
    let mut connection = SqliteConnection::establish(&uri(path, mode))?;
    settle(&mut connection)?;
    Ok(connection)
}

fn absolute(url: &DatabaseUrl) -> Result<PathBuf, Error> {
    std::path::absolute(url.path()).map_err(|error| Error::Unavailable(Box::new(error)))
}

fn is_there(path: &Path) -> Result<bool, Error> {
    path.try_exists().map_err(|error| Error::Unavailable(Box::new(error)))
}

/// The file as SQLite's URI, which alone can say that a file must be there already.
fn uri(path: &Path, mode: &str) -> String {
    let mut uri = String::from("file://");
    for byte in path.as_os_str().as_encoded_bytes() {
        match *byte {
            b'/' | b'-' | b'_' | b'.' | b'0'..=b'9' | b'A'..=b'Z' | b'a'..=b'z' => uri.push(char::from(*byte)),
            byte => uri.push_str(&format!("%{byte:02X}")),
        }
    }
    uri.push_str("?mode=");
    uri.push_str(mode);
    uri
}

fn settle(connection: &mut SqliteConnection) -> Result<(), Error> {
    connection.batch_execute(sql::BUSY)?;
    connection.batch_execute(sql::SETTINGS)?;
    let encodings: Vec<Encoding> = Query::new("PRAGMA encoding").load(connection)?;
    if encodings.iter().any(|found| found.encoding != "UTF-8") {
        return Err(Error::Unfit("its text is not stored as UTF-8"));
    }
    // The journal mode is a property of the file, and a file of somebody else keeps its own.
    if schema::is_there(connection, "hardwrap_database")? {
        match keep_log(connection) {
            Ok(()) | Err(Error::ReadOnly) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn keep_log(connection: &mut SqliteConnection) -> Result<(), Error> {
    // Another program that is just doing the same does not make SQLite wait here, but fail.
    let patience = Instant::now() + Duration::from_secs(10);
    while journal_mode(connection, "PRAGMA journal_mode")? != "wal" {
        match journal_mode(connection, "PRAGMA journal_mode = WAL") {
            Ok(mode) if mode == "wal" => break,
            Ok(_) => {
                // One that is open for reading only says no without an error: a write gives the reason.
                connection.batch_execute(sql::TRY_WRITING)?;
                return Err(Error::Unfit("it takes no write-ahead log (WAL)"));
            }
            Err(Error::Unavailable(_)) if Instant::now() < patience => thread::sleep(Duration::from_millis(20)),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn journal_mode(connection: &mut SqliteConnection, query: &str) -> Result<String, Error> {
    let modes: Vec<JournalMode> = Query::new(query).load(connection)?;
    Ok(modes.into_iter().next().map(|found| found.journal_mode).unwrap_or_default())
}

#[derive(QueryableByName)]
struct Checkpoint {
    #[diesel(sql_type = BigInt)]
    busy: i64,
}

#[derive(QueryableByName)]
struct JournalMode {
    #[diesel(sql_type = Text)]
    journal_mode: String,
}

#[derive(QueryableByName)]
struct Encoding {
    #[diesel(sql_type = Text)]
    encoding: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A database of ours, closed, in a directory of its own.
    fn closed() -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("app.db");
        let url = format!("sqlite://{}", path.display()).parse().expect("a URL");
        Db::create(&url).and_then(|db| db.upgrade()).expect("a database");
        (dir, path)
    }

    fn beside(path: &Path, end: &str) -> PathBuf {
        PathBuf::from(format!("{}{end}", path.display()))
    }

    #[test]
    fn what_is_sorted_stays_in_memory() {
        #[derive(QueryableByName)]
        struct Store {
            #[diesel(sql_type = BigInt)]
            temp_store: i64,
        }
        let (_dir, path) = closed();
        for connect in [|path: &Path| settled(path, "rw"), |path: &Path| frozen(path, Error::ReadOnly)] {
            let mut connection = connect(&path).expect("open");
            let stores: Vec<Store> = Query::new("PRAGMA temp_store").load(&mut connection).expect("a setting");
            assert_eq!(stores.first().map(|found| found.temp_store), Some(2));
        }
    }

    #[test]
    fn a_frozen_database_is_read_and_never_written() {
        let (dir, path) = closed();
        let url: DatabaseUrl = format!("sqlite://{}", path.display()).parse().expect("a URL");
        let db = Db::on(&url, frozen(&path, Error::ReadOnly).expect("readable"), false);
        db.ready().expect("ours");
        assert!(matches!(db.create_agent_run_table(), Err(Error::ReadOnly)));
        assert!(matches!(db.upgrade(), Err(Error::ReadOnly)));
        let files = fs::read_dir(dir.path()).expect("a directory").count();
        assert_eq!(files, 1, "nothing was made beside it");
    }

    #[test]
    fn a_database_is_not_taken_as_frozen_while_a_log_waits_or_is_in_use() {
        let (_dir, path) = closed();
        for end in ["-wal", "-journal"] {
            fs::write(beside(&path, end), "").expect("written");
            frozen(&path, Error::ReadOnly).map(drop).expect("an empty log holds nothing");
            fs::write(beside(&path, end), "x").expect("written");
            assert!(matches!(frozen(&path, Error::ReadOnly).map(drop), Err(Error::Unfit(_))), "{end}");
            fs::remove_file(beside(&path, end)).expect("removed");
        }
        fs::write(beside(&path, "-shm"), "").expect("written");
        assert!(matches!(frozen(&path, Error::WalInUse).map(drop), Err(Error::WalInUse)));
    }
}
