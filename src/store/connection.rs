//! One connection to one of the databases that this build knows, its settings and its transactions.

use std::fmt;

use diesel::connection::{AnsiTransactionManager, SimpleConnection, TransactionManager};
#[cfg(feature = "mariadb")]
use diesel::mysql::MysqlConnection;
#[cfg(feature = "postgres")]
use diesel::pg::PgConnection;
#[cfg(feature = "sqlite")]
use diesel::sqlite::SqliteConnection;

use super::Error;
use super::sql::Sql;

/// A connection as diesel has it, for those who bring statements of their own: they match on the databases that they
/// speak to.
#[non_exhaustive]
pub enum AnyConnection {
    /// SQLite.
    #[cfg(feature = "sqlite")]
    Sqlite(Box<SqliteConnection>),
    /// PostgreSQL.
    #[cfg(feature = "postgres")]
    Postgres(Box<PgConnection>),
    /// MariaDB.
    #[cfg(feature = "mariadb")]
    Mariadb(Box<MysqlConnection>),
}

/// Does the same with whichever connection it is.
macro_rules! each {
    ($any:expr, $connection:ident => $work:expr) => {
        match $any {
            #[cfg(feature = "sqlite")]
            AnyConnection::Sqlite($connection) => {
                let $connection = &mut **$connection;
                $work
            }
            #[cfg(feature = "postgres")]
            AnyConnection::Postgres($connection) => {
                let $connection = &mut **$connection;
                $work
            }
            #[cfg(feature = "mariadb")]
            AnyConnection::Mariadb($connection) => {
                let $connection = &mut **$connection;
                $work
            }
        }
    };
}
pub(super) use each;

impl AnyConnection {
    /// The connection, if it is one to SQLite.
    #[cfg(feature = "sqlite")]
    pub fn sqlite(&mut self) -> Option<&mut SqliteConnection> {
        #[allow(unreachable_patterns, reason = "where no other database is built in")]
        match self {
            Self::Sqlite(connection) => Some(connection),
            _ => None,
        }
    }

    /// The connection, if it is one to PostgreSQL.
    #[cfg(feature = "postgres")]
    pub fn postgres(&mut self) -> Option<&mut PgConnection> {
        #[allow(unreachable_patterns, reason = "where no other database is built in")]
        match self {
            Self::Postgres(connection) => Some(connection),
            _ => None,
        }
    }

    /// The connection, if it is one to MariaDB.
    #[cfg(feature = "mariadb")]
    pub fn mariadb(&mut self) -> Option<&mut MysqlConnection> {
        #[allow(unreachable_patterns, reason = "where no other database is built in")]
        match self {
            Self::Mariadb(connection) => Some(connection),
            _ => None,
        }
    }

    /// How this database says things.
    pub(super) fn sql(&self) -> Sql {
        match self {
            #[cfg(feature = "sqlite")]
            Self::Sqlite(_) => Sql::Sqlite,
            #[cfg(feature = "postgres")]
            Self::Postgres(_) => Sql::Postgres,
            #[cfg(feature = "mariadb")]
            Self::Mariadb(_) => Sql::Mariadb,
        }
    }

    /// Runs statements that give nothing back.
    pub(super) fn run(&mut self, statements: &str) -> Result<(), Error> {
        each!(self, connection => Ok(connection.batch_execute(statements)?))
    }

    /// Begins a transaction, or a savepoint inside of one.
    pub(super) fn begin(&mut self, inside: bool) -> Result<(), Error> {
        match self {
            #[cfg(feature = "sqlite")]
            Self::Sqlite(connection) if !inside => {
                Ok(AnsiTransactionManager::begin_transaction_sql(&mut **connection, super::sql::BEGIN)?)
            }
            any => each!(any, connection => Ok(AnsiTransactionManager::begin_transaction(connection)?)),
        }
    }

    /// Keeps what was done since [`AnyConnection::begin`].
    pub(super) fn commit(&mut self) -> Result<(), Error> {
        each!(self, connection => Ok(AnsiTransactionManager::commit_transaction(connection)?))
    }

    /// Takes back what was done since [`AnyConnection::begin`].
    pub(super) fn roll_back(&mut self) -> Result<(), Error> {
        each!(self, connection => Ok(AnsiTransactionManager::rollback_transaction(connection)?))
    }

    /// All of `work`, or nothing.
    pub(super) fn transaction<T, E: From<Error>>(
        &mut self,
        inside: bool,
        work: impl FnOnce(&mut Self) -> Result<T, E>,
    ) -> Result<T, E> {
        self.begin(inside)?;
        match work(self) {
            Ok(value) => match self.commit() {
                Ok(()) => Ok(value),
                Err(error) => {
                    let _ = self.roll_back();
                    Err(error.into())
                }
            },
            Err(error) => {
                // The work's own error says more than that of a transaction that is gone already.
                let _ = self.roll_back();
                Err(error)
            }
        }
    }
}

impl fmt::Debug for AnyConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AnyConnection({:?})", self.sql())
    }
}
