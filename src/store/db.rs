//! One database: its connection, its transactions, its lock.

use std::collections::HashMap;
use std::fmt;
use std::mem;
use std::process;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::catalog::{self, ServerTable};
use super::connection::AnyConnection;
use super::query::Query;
use super::shape::Shape;
use super::sql::Sql;
use super::url::Place;
use super::{DatabaseUrl, Error};
use crate::column::Column;

/// One database. Its methods take `&self` and wait for each other; share it by reference or in an `Arc`.
pub struct Db {
    url: DatabaseUrl,
    sql: Sql,
    /// There until it drops.
    connection: Option<Mutex<Live>>,
    /// Who opened it: a connection cannot be carried over a fork. SQLite besides keeps what it knows of locks in the
    /// process, so that a second connection of the child would take none.
    process: u32,
    /// Whether the connection stands inside the transaction of [`Db::exclusively`].
    held: bool,
    /// What the catalogue said of registered columns.
    shapes: Mutex<HashMap<[String; 4], Shape>>,
}

struct Live {
    connection: AnyConnection,
    /// Whether the server was lost: the next call connects again.
    lost: bool,
    used: Instant,
}

impl Db {
    /// Opens a database that is there. A SQLite file is opened for reading where file or directory cannot be written, and
    /// then every write is [`Error::ReadOnly`]; one that is not ours stays exactly as it is; one that is keeps a
    /// write-ahead log.
    ///
    /// # Errors
    /// [`Error::NoDatabase`] if there is no file; [`Error::NotADatabase`], [`Error::Unfit`], [`Error::Unavailable`].
    pub fn open(url: &DatabaseUrl) -> Result<Self, Error> {
        Ok(Self::on(url, connect(url, false)?, false))
    }

    /// Opens a database, and makes a SQLite file where it is missing. Who may read the file is for the umask to say. A
    /// server's database has to be there.
    ///
    /// # Errors
    /// As [`Db::open`], but [`Error::NoPlace`] in place of [`Error::NoDatabase`], if the directory is missing.
    pub fn create(url: &DatabaseUrl) -> Result<Self, Error> {
        let db = Self::on(url, connect(url, true)?, false);
        db.keep_log()?;
        Ok(db)
    }

    /// The same database by another connection, for work at the same time.
    ///
    /// # Errors
    /// As [`Db::open`].
    pub fn another(&self) -> Result<Self, Error> {
        Self::open(&self.url)
    }

    /// Where the database is.
    pub fn url(&self) -> &DatabaseUrl {
        &self.url
    }

    /// Whether a server keeps it, so that several connections can write at once.
    pub fn is_server(&self) -> bool {
        self.sql.is_server()
    }

    /// Runs `work` in one transaction, and keeps what it wrote only if it succeeds. In SQLite nobody else can write to the
    /// database meanwhile; on a server no other `exclusively` runs.
    ///
    /// `work` is given a `Db` of its own, on a second connection: everything it does there is one transaction, and all
    /// methods work but [`Db::truncate_wal`]. The `Db` outside still reads, and a write through it to what `work` has
    /// written would wait in vain and end as [`Error::Unavailable`] or [`Error::Conflict`].
    ///
    /// # Errors
    /// Whatever `work` fails with; [`Error::Unavailable`] or [`Error::Conflict`] if the lock is not to be had within ten
    /// seconds.
    pub fn exclusively<T, E: From<Error>>(&self, work: impl FnOnce(&Db) -> Result<T, E>) -> Result<T, E> {
        if self.held {
            return work(self);
        }
        let mut connection = connect(&self.url, false)?;
        connection.begin(false)?;
        // Known before the work begins, which may change more than the database.
        match self.sql {
            Sql::Sqlite => connection.run(super::sql::TRY_WRITING)?,
            _ => {
                // Galera would find two holders of a lock by its rows only when they commit.
                Query::new("UPDATE hardwrap_database SET oldest_version = oldest_version").execute(&mut connection)?;
            }
        }
        let inside = Self::on(&self.url, connection, true);
        let result = work(&inside);
        let mut live = inside.lock()?;
        match result {
            Ok(value) => {
                live.connection.commit()?;
                Ok(value)
            }
            Err(error) => {
                // Closing the connection rolls back as well, so a failure here changes nothing.
                let _ = live.connection.roll_back();
                Err(error)
            }
        }
    }

    /// Writes everything from SQLite's write-ahead log into the database and empties the log, so that old content does
    /// not stay there. Waits for readers, ten seconds at most. On a server there is nothing that this could do.
    ///
    /// # Errors
    /// [`Error::WalInUse`] if another connection still needs the log.
    pub fn truncate_wal(&self) -> Result<(), Error> {
        if self.held {
            return Err(Error::WalInUse);
        }
        #[cfg(feature = "sqlite")]
        if self.sql == Sql::Sqlite {
            return match self.read_with(super::sqlite::truncate_log) {
                Ok(true) => Ok(()),
                Ok(false) | Err(Error::Unavailable(_)) => Err(Error::WalInUse),
                Err(error) => Err(error),
            };
        }
        Ok(())
    }

    /// Runs `work` of somebody else in one write transaction, or inside that of [`Db::exclusively`]: all of it is kept, or
    /// nothing. It must not begin, commit or roll back itself.
    ///
    /// # Errors
    /// Whatever `work` fails with; [`Error::Unavailable`], [`Error::Conflict`], [`Error::ReadOnly`].
    pub fn transact<T>(&self, work: impl FnOnce(&mut AnyConnection) -> Result<T, Error>) -> Result<T, Error> {
        self.with(|connection| connection.transaction(self.held, work))
    }

    /// Runs `work` of somebody else, which only reads.
    ///
    /// # Errors
    /// Whatever `work` fails with; [`Error::Unavailable`].
    pub fn look<T>(&self, work: impl FnOnce(&mut AnyConnection) -> Result<T, Error>) -> Result<T, Error> {
        self.read_with(work)
    }

    /// How this database says things.
    pub(super) fn sql(&self) -> Sql {
        self.sql
    }

    /// Runs one statement, or several that need no common view.
    pub(super) fn read_with<T>(&self, work: impl FnOnce(&mut AnyConnection) -> Result<T, Error>) -> Result<T, Error> {
        self.with(work)
    }

    /// Runs one write transaction: all of `work`, or nothing. One that another transaction was in the way of is tried
    /// again, so `work` may run more than once.
    pub(super) fn write<T>(&self, mut work: impl FnMut(&mut AnyConnection) -> Result<T, Error>) -> Result<T, Error> {
        let mut tries = 0;
        loop {
            match self.with(|connection| connection.transaction(self.held, &mut work)) {
                Err(Error::Conflict(source)) if !self.held && tries < TRIES => {
                    tries += 1;
                    tracing::debug!(target: "hardwrap::store", error = %source, tries, "tried again");
                    thread::sleep(pause(tries));
                }
                outcome => return outcome,
            }
        }
    }

    /// The same, tried once.
    pub(super) fn write_once<T>(&self, work: impl FnOnce(&mut AnyConnection) -> Result<T, Error>) -> Result<T, Error> {
        self.with(|connection| connection.transaction(self.held, work))
    }

    /// Gives a SQLite database a write-ahead log, if it has none yet and the connection stands in no transaction. Fails
    /// where nothing can be written.
    pub(super) fn keep_log(&self) -> Result<(), Error> {
        #[cfg(feature = "sqlite")]
        if self.sql == Sql::Sqlite && !self.held {
            return self.read_with(|connection| {
                super::sqlite::keep_log(connection)?;
                connection.run(super::sql::TRY_WRITING)
            });
        }
        Ok(())
    }

    /// What the catalogue says of a table; none where there is none. Servers only.
    pub(super) fn server_table(&self, name: &str) -> Result<Option<ServerTable>, Error> {
        self.read_with(|connection| catalog::table(connection, name))
    }

    /// A registered column as statements need it.
    pub(super) fn shape(&self, column: &Column) -> Result<Shape, Error> {
        if self.sql == Sql::Sqlite {
            return Ok(Shape::of_sqlite(column));
        }
        let row = column.row().unwrap_or_default();
        let names = [column.table(), column.name(), column.key(), row].map(str::to_owned);
        let known = |shapes: &Mutex<HashMap<_, Shape>>| {
            shapes.lock().unwrap_or_else(PoisonError::into_inner).get(&names).cloned()
        };
        if let Some(shape) = known(&self.shapes) {
            return Ok(shape);
        }
        let table = self.server_table(column.table())?.ok_or_else(|| Error::NoTable(column.table().to_owned()))?;
        let shape = Shape::of_server(self.sql, column, &table)?;
        self.shapes.lock().unwrap_or_else(PoisonError::into_inner).insert(names, shape.clone());
        Ok(shape)
    }

    pub(super) fn on(url: &DatabaseUrl, connection: AnyConnection, held: bool) -> Self {
        let process = process::id();
        #[cfg(feature = "sqlite")]
        if let Place::Sqlite(path) = url.place() {
            super::sqlite::opened().push((process, super::sqlite::absolute(path).unwrap_or_default()));
        }
        let sql = connection.sql();
        let live = Live { connection, lost: false, used: Instant::now() };
        Self { url: url.clone(), sql, connection: Some(Mutex::new(live)), process, held, shapes: Mutex::default() }
    }

    fn with<T>(&self, work: impl FnOnce(&mut AnyConnection) -> Result<T, Error>) -> Result<T, Error> {
        let mut live = self.lock()?;
        if self.sql.is_server() && !self.held {
            // A server, or something on the way to it, ends connections that rest.
            if live.used.elapsed() > RESTED && live.connection.run("SELECT 1").is_err() {
                live.lost = true;
            }
            if live.lost {
                live.connection = connect(&self.url, false)?;
                live.lost = false;
            }
        }
        let done = work(&mut live.connection);
        live.used = Instant::now();
        if self.sql.is_server() && matches!(done, Err(Error::Unavailable(_))) {
            live.lost = true;
        }
        done
    }

    fn lock(&self) -> Result<MutexGuard<'_, Live>, Error> {
        let connection = self.connection.as_ref().filter(|_| self.process == process::id()).ok_or(Error::Forked)?;
        Ok(connection.lock().unwrap_or_else(|poisoned| {
            // A thread died in the middle of its work, which nobody can finish now. The lock of `exclusively` is not
            // ours to give back: its owner ends that transaction.
            let mut guard = poisoned.into_inner();
            if !self.held {
                let _ = guard.connection.roll_back();
            }
            connection.clear_poison();
            guard
        }))
    }
}

impl Drop for Db {
    fn drop(&mut self) {
        let forked = self.process != process::id();
        if forked {
            // Closing it here would take the parent's log and locks away, or end its connection to the server.
            mem::forget(self.connection.take());
        }
        #[cfg(feature = "sqlite")]
        if let (Place::Sqlite(path), false) = (self.url.place(), forked) {
            let path = super::sqlite::absolute(path).unwrap_or_default();
            let mut opened = super::sqlite::opened();
            if let Some(at) = opened.iter().position(|(process, of)| *process == self.process && *of == path) {
                opened.swap_remove(at);
            }
        }
    }
}

impl fmt::Debug for Db {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Db({})", self.url)
    }
}

/// Connects, and makes a SQLite file where it is missing and `make` says so.
fn connect(url: &DatabaseUrl, make: bool) -> Result<AnyConnection, Error> {
    match url.place() {
        #[cfg(feature = "sqlite")]
        Place::Sqlite(path) if make => {
            if !super::sqlite::absolute(path)?.parent().is_some_and(std::path::Path::is_dir) {
                return Err(Error::NoPlace(path.clone()));
            }
            super::sqlite::connection(path, "rwc")
        }
        #[cfg(feature = "sqlite")]
        Place::Sqlite(path) => {
            if !super::sqlite::is_there(path)? {
                return Err(Error::NoDatabase(path.clone()));
            }
            super::sqlite::connection(path, "rw")
        }
        #[cfg(feature = "postgres")]
        Place::Postgres(server) => super::server::postgres(server),
        #[cfg(feature = "mariadb")]
        Place::Mariadb(server) => super::server::mariadb(server),
        #[allow(unreachable_patterns, reason = "where every database is built in")]
        _ => Err(Error::Unfit("this build does not know it")),
    }
}

/// How long to wait before the next try: longer each time, and not the same for all.
fn pause(tries: u32) -> Duration {
    let mut drawn = [0; 1];
    let _ = crate::provider::random(&mut drawn);
    Duration::from_millis(u64::from(drawn[0]) / 8 + (4 << tries.min(7)))
}

/// How often a transaction that another one was in the way of is tried again.
const TRIES: u32 = 10;

/// After what rest a connection is asked whether it still stands.
const RESTED: Duration = Duration::from_secs(5);
