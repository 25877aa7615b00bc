//! One database: its connection, its transactions, its lock.

use std::fmt;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use diesel::connection::{AnsiTransactionManager, SimpleConnection, TransactionManager};
use diesel::prelude::*;
use diesel::sql_types::{BigInt, Text};

use super::sql::{self, Query};
use super::{DatabaseUrl, Error};

/// One database. Its methods take `&self` and wait for each other; share it by reference or in an `Arc`.
pub struct Db {
    url: DatabaseUrl,
    connection: Mutex<SqliteConnection>,
    /// Whether the connection stands inside the transaction of [`Db::exclusively`].
    held: bool,
}

impl Db {
    /// Opens a database that is there.
    ///
    /// # Errors
    /// [`Error::NoDatabase`] if it is not; [`Error::NotADatabase`], [`Error::Unfit`], [`Error::Unavailable`].
    pub fn open(url: &DatabaseUrl) -> Result<Self, Error> {
        match url.path().try_exists() {
            Ok(true) => Self::connect(url, "rw"),
            Ok(false) => Err(Error::NoDatabase(url.path().to_owned())),
            Err(error) => Err(Error::Unavailable(Box::new(error))),
        }
    }

    /// Opens a database, and makes its file where it is missing. Who may read the file is for the umask to say.
    ///
    /// # Errors
    /// As [`Db::open`], but never [`Error::NoDatabase`].
    pub fn create(url: &DatabaseUrl) -> Result<Self, Error> {
        Self::connect(url, "rwc")
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
        let inside = Self { url: self.url.clone(), connection: Mutex::new(connection), held: true };
        let result = work(&inside);
        let mut connection = inside.connection.into_inner().unwrap_or_else(PoisonError::into_inner);
        match result {
            Ok(value) => {
                AnsiTransactionManager::commit_transaction(&mut connection).map_err(Error::from)?;
                Ok(value)
            }
            Err(error) => {
                // Closing the connection rolls back as well, so a failure here changes nothing.
                let _ = AnsiTransactionManager::rollback_transaction(&mut connection);
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

    /// Runs one statement, or several that need no common view.
    pub(super) fn read_with<T>(
        &self,
        work: impl FnOnce(&mut SqliteConnection) -> Result<T, Error>,
    ) -> Result<T, Error> {
        work(&mut self.lock())
    }

    /// Runs one write transaction: all of `work`, or nothing.
    pub(super) fn write<T>(&self, work: impl FnOnce(&mut SqliteConnection) -> Result<T, Error>) -> Result<T, Error> {
        let mut connection = self.lock();
        if self.held { connection.transaction(work) } else { connection.immediate_transaction(work) }
    }

    fn connect(url: &DatabaseUrl, mode: &str) -> Result<Self, Error> {
        Ok(Self { url: url.clone(), connection: Mutex::new(connection(url, mode)?), held: false })
    }

    fn lock(&self) -> MutexGuard<'_, SqliteConnection> {
        self.connection.lock().unwrap_or_else(|poisoned| {
            // A thread died in the middle of its work, which nobody can finish now. The lock of `exclusively` is not
            // ours to give back: its owner ends that transaction.
            let mut connection = poisoned.into_inner();
            if !self.held {
                let _ = AnsiTransactionManager::rollback_transaction(&mut *connection);
            }
            self.connection.clear_poison();
            connection
        })
    }
}

impl fmt::Debug for Db {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Db({})", self.url)
    }
}

fn connection(url: &DatabaseUrl, mode: &str) -> Result<SqliteConnection, Error> {
    let path = std::path::absolute(url.path()).map_err(|error| Error::Unavailable(Box::new(error)))?;
    let mut connection = SqliteConnection::establish(&uri(&path, mode))?;
    settle(&mut connection).map_err(|error| match error {
        Error::Refused(source) if source.to_string() == "file is not a database" => {
            Error::NotADatabase(url.path().to_owned())
        }
        error => error,
    })?;
    Ok(connection)
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
    // Another program that is just doing the same does not make SQLite wait here, but fail.
    let patience = Instant::now() + Duration::from_secs(10);
    while journal_mode(connection, "PRAGMA journal_mode")? != "wal" {
        match journal_mode(connection, "PRAGMA journal_mode = WAL") {
            Ok(mode) if mode == "wal" => break,
            Ok(_) => return Err(Error::Unfit("it takes no write-ahead log (WAL)")),
            Err(Error::Unavailable(_)) if Instant::now() < patience => thread::sleep(Duration::from_millis(20)),
            Err(error) => return Err(error),
        }
    }
    connection.batch_execute(sql::SETTINGS)?;
    let encodings: Vec<Encoding> = Query::new("PRAGMA encoding").load(connection)?;
    if encodings.iter().any(|found| found.encoding != "UTF-8") {
        return Err(Error::Unfit("its text is not stored as UTF-8"));
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
