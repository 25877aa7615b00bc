//! SQLite: a file, its connection, its write-ahead log, and the rules for forks.

use std::fs;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use diesel::prelude::*;
use diesel::sql_types::{BigInt, Text};

use super::connection::AnyConnection;
use super::error::CANNOT_OPEN;
use super::query::Query;
use super::sql;
use super::url::percent_encoded;
use super::{Error, schema};

/// Connects to a file for writing. SQLite itself falls back to reading a file that cannot be written, but not where a
/// write-ahead log wants files of its own in a directory that cannot.
pub(super) fn connection(path: &Path, mode: &str) -> Result<AnyConnection, Error> {
    let asked = path;
    let path = absolute(path)?;
    if path.is_dir() {
        return Err(Error::NotADatabase(asked.to_owned()));
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
            Error::NotADatabase(asked.to_owned())
        }
        error => error,
    })
}

/// Connects to a file that nobody can be writing: no other connection keeps an index of its log, and nothing waits in
/// a log or journal to be recovered. Else, there is a reason not to read it.
fn frozen(path: &Path, error: Error) -> Result<AnyConnection, Error> {
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

fn settled(path: &Path, mode: &str) -> Result<AnyConnection, Error> {
    let mut connection = AnyConnection::Sqlite(Box::new(SqliteConnection::establish(&uri(path, mode))?));
    settle(&mut connection)?;
    Ok(connection)
}

pub(super) fn absolute(path: &Path) -> Result<PathBuf, Error> {
    std::path::absolute(path).map_err(|error| Error::Unavailable(Box::new(error)))
}

pub(super) fn is_there(path: &Path) -> Result<bool, Error> {
    path.try_exists().map_err(|error| Error::Unavailable(Box::new(error)))
}

/// The file as SQLite's URI, which alone can say that a file must be there already.
fn uri(path: &Path, mode: &str) -> String {
    let mut uri = format!("file://{}", percent_encoded(path.as_os_str().as_encoded_bytes()));
    uri.push_str("?mode=");
    uri.push_str(mode);
    uri
}

fn settle(connection: &mut AnyConnection) -> Result<(), Error> {
    connection.run(sql::BUSY)?;
    connection.run(sql::SETTINGS)?;
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

pub(super) fn keep_log(connection: &mut AnyConnection) -> Result<(), Error> {
    // Another program that is just doing the same does not make SQLite wait here, but fail.
    let patience = Instant::now() + Duration::from_secs(10);
    while journal_mode(connection, "PRAGMA journal_mode")? != "wal" {
        match journal_mode(connection, "PRAGMA journal_mode = WAL") {
            Ok(mode) if mode == "wal" => break,
            Ok(_) => {
                // One that is open for reading only says no without an error: a write gives the reason.
                connection.run(sql::TRY_WRITING)?;
                return Err(Error::Unfit("it takes no write-ahead log (WAL)"));
            }
            Err(Error::Unavailable(_)) if Instant::now() < patience => thread::sleep(Duration::from_millis(20)),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn journal_mode(connection: &mut AnyConnection, query: &str) -> Result<String, Error> {
    let modes: Vec<JournalMode> = Query::new(query).load(connection)?;
    Ok(modes.into_iter().next().map(|found| found.journal_mode).unwrap_or_default())
}

/// Writes everything from the write-ahead log into the database and empties the log; whether that was done.
pub(super) fn truncate_log(connection: &mut AnyConnection) -> Result<bool, Error> {
    let done: Vec<Checkpoint> = Query::new("PRAGMA wal_checkpoint(TRUNCATE)").load(connection)?;
    Ok(done.iter().all(|done| done.busy == 0))
}

/// Which files are open, and in which process: a child inherits the list of its parent.
pub(super) fn opened() -> MutexGuard<'static, Vec<(u32, PathBuf)>> {
    static OPENED: Mutex<Vec<(u32, PathBuf)>> = Mutex::new(Vec::new());
    OPENED.lock().unwrap_or_else(PoisonError::into_inner)
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
    use super::super::{DatabaseUrl, Db};
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
