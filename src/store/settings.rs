//! How a database is set up, for people who have to know.

use diesel::prelude::*;
use diesel::sql_types::{BigInt, Text};
use serde::Serialize;

use super::sql::Query;
use super::{Db, Error};

/// How a SQLite database is set up, as our connections find it.
#[derive(Clone, Debug, Eq, PartialEq, QueryableByName, Serialize)]
pub struct Settings {
    /// The version of SQLite compiled in.
    #[diesel(sql_type = Text)]
    pub sqlite: String,
    /// `wal` in a database of ours.
    #[diesel(sql_type = Text)]
    pub journal_mode: String,
    /// Bytes of a page.
    #[diesel(sql_type = BigInt)]
    pub page_size: i64,
    /// All pages.
    #[diesel(sql_type = BigInt)]
    pub pages: i64,
    /// Pages that are free: what other programs deleted may still stand there.
    #[diesel(sql_type = BigInt)]
    pub free_pages: i64,
}

impl Db {
    /// How the database is set up.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    pub fn settings(&self) -> Result<Settings, Error> {
        let query = "SELECT sqlite_version() AS sqlite, j.journal_mode AS journal_mode, s.page_size AS page_size, \
                     c.page_count AS pages, f.freelist_count AS free_pages \
                     FROM pragma_journal_mode AS j, pragma_page_size AS s, pragma_page_count AS c, \
                     pragma_freelist_count AS f";
        let rows: Vec<Settings> = self.read_with(|connection| Query::new(query).load(connection))?;
        rows.into_iter().next().ok_or(Error::Unfit("it does not say how it is set up"))
    }
}
