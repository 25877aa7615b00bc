//! A statement and what is bound to its places, for whichever database.

use diesel::deserialize::FromSqlRow;
use diesel::prelude::*;
use diesel::query_builder::{AstPass, QueryFragment, QueryId};
use diesel::sql_types::{BigInt, Binary, Double, Nullable, Text, Untyped};

use super::Error;
use super::connection::{AnyConnection, each};

/// A statement and what is bound to its places, put together from left to right.
pub(super) struct Query<'a> {
    text: String,
    /// Each with the place in the text that it stands at.
    binds: Vec<(usize, Bind<'a>)>,
    /// Whether the connection keeps the prepared statement.
    kept: bool,
}

enum Bind<'a> {
    Integer(i64),
    Real(f64),
    Text(&'a str),
    Owned(String),
    Bytes(&'a [u8]),
    Null,
}

impl<'a> Query<'a> {
    pub(super) fn new(text: impl Into<String>) -> Self {
        Self { text: text.into(), binds: Vec::new(), kept: false }
    }

    /// For a statement that runs again and again, and whose text depends on nothing but the schema: the connection
    /// prepares it once and forgets it never.
    pub(super) fn kept(text: impl Into<String>) -> Self {
        Self { kept: true, ..Self::new(text) }
    }

    pub(super) fn sql(mut self, text: &str) -> Self {
        self.text.push_str(text);
        self
    }

    pub(super) fn integer(self, value: i64) -> Self {
        self.bind(Bind::Integer(value))
    }

    pub(super) fn real(self, value: f64) -> Self {
        self.bind(Bind::Real(value))
    }

    pub(super) fn text(self, value: &'a str) -> Self {
        self.bind(Bind::Text(value))
    }

    pub(super) fn owned(self, value: String) -> Self {
        self.bind(Bind::Owned(value))
    }

    pub(super) fn bytes(self, value: &'a [u8]) -> Self {
        self.bind(Bind::Bytes(value))
    }

    pub(super) fn optional_bytes(self, value: Option<&'a [u8]>) -> Self {
        self.bind(value.map_or(Bind::Null, Bind::Bytes))
    }

    /// Binds the bytes of a text that is not UTF-8. SQLite then compares it with a column as it would any text.
    pub(super) fn raw_text(self, value: &'a [u8]) -> Self {
        self.sql("CAST(").bytes(value).sql(" AS TEXT)")
    }

    /// Appends another statement's text and binds.
    pub(super) fn append(mut self, other: Query<'a>) -> Self {
        let at = self.text.len();
        self.text.push_str(&other.text);
        self.binds.extend(other.binds.into_iter().map(|(place, bind)| (at + place, bind)));
        self
    }

    pub(super) fn execute(&self, connection: &mut AnyConnection) -> Result<usize, Error> {
        each!(connection, connection => Ok(RunQueryDsl::execute(self, connection)?))
    }

    pub(super) fn load<T: Loaded>(&self, connection: &mut AnyConnection) -> Result<Vec<T>, Error> {
        each!(connection, connection => Ok(RunQueryDsl::load(self, connection)?))
    }

    fn bind(mut self, bind: Bind<'a>) -> Self {
        self.binds.push((self.text.len(), bind));
        self
    }
}

/// What each database makes of a query, and that a row of it can be loaded.
macro_rules! spoken_by {
    ($feature:literal, $backend:ty, $connection:ty, $from:ident) => {
        #[cfg(feature = $feature)]
        impl QueryFragment<$backend> for Query<'_> {
            fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, $backend>) -> QueryResult<()> {
                if !self.kept {
                    out.unsafe_to_cache_prepared();
                }
                let mut from = 0;
                for (place, bind) in &self.binds {
                    out.push_sql(&self.text[from..*place]);
                    from = *place;
                    match bind {
                        Bind::Integer(value) => out.push_bind_param::<BigInt, _>(value)?,
                        Bind::Real(value) => out.push_bind_param::<Double, _>(value)?,
                        Bind::Text(value) => out.push_bind_param::<Text, str>(value)?,
                        Bind::Owned(value) => out.push_bind_param::<Text, str>(value)?,
                        Bind::Bytes(value) => out.push_bind_param::<Binary, [u8]>(value)?,
                        Bind::Null => out.push_bind_param::<Nullable<Binary>, Option<&[u8]>>(&None)?,
                    }
                }
                out.push_sql(&self.text[from..]);
                Ok(())
            }
        }

        #[cfg(feature = $feature)]
        impl RunQueryDsl<$connection> for &Query<'_> {}

        /// A row as this database gives it.
        #[cfg(feature = $feature)]
        pub(super) trait $from: FromSqlRow<Untyped, $backend> {}

        #[cfg(feature = $feature)]
        impl<T: FromSqlRow<Untyped, $backend>> $from for T {}

        /// This build does not know the database.
        #[cfg(not(feature = $feature))]
        pub(super) trait $from {}

        #[cfg(not(feature = $feature))]
        impl<T> $from for T {}
    };
}

spoken_by!("sqlite", diesel::sqlite::Sqlite, SqliteConnection, FromSqlite);
spoken_by!("postgres", diesel::pg::Pg, PgConnection, FromPostgres);
spoken_by!("mariadb", diesel::mysql::Mysql, MysqlConnection, FromMariadb);

/// A row that every database of this build can give.
pub(super) trait Loaded: FromSqlite + FromPostgres + FromMariadb + 'static {}

impl<T: FromSqlite + FromPostgres + FromMariadb + 'static> Loaded for T {}

impl QueryId for Query<'_> {
    type QueryId = ();
    const HAS_STATIC_QUERY_ID: bool = false;
}

impl diesel::query_builder::Query for Query<'_> {
    type SqlType = Untyped;
}
