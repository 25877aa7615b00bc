//! How many values of a column are what: counted by the database, by the same rules as [`Marker::of`].
//!
//! [`Marker::of`]: crate::envelope::Marker::of

use std::collections::BTreeMap;

use diesel::prelude::*;
use diesel::sql_types::{BigInt, Nullable, Text};

use super::connection::AnyConnection;
use super::query::Query;
use super::shape::Shape;
use super::sql::Sql;
use super::{Db, Error};
use crate::column::Column;
use crate::provider::KeyId;

impl Db {
    /// Counts every row of a column by what its value is, in one pass. [`Counts::sql`] says the same, and sorts all rows
    /// for it.
    ///
    /// # Errors
    /// [`Error::NoTable`], [`Error::NoColumn`], [`Error::Unavailable`].
    pub fn count(&self, column: &Column) -> Result<Counts, Error> {
        let shape = self.shape(column)?;
        let (kind, keyless) = (shape.sql.kind_of(&shape.value.of), format!("{} IS NULL", shape.key.of));
        let keyless_sum = match shape.sql {
            Sql::Sqlite => format!("SUM({keyless})"),
            _ => shape.sql.integer(&format!("SUM(CASE WHEN {keyless} THEN 1 ELSE 0 END)")),
        };
        let from = shape.whole();
        let sql = format!(
            "SELECT {kind} AS kind, COUNT(*) AS total, {keyless_sum} AS keyless FROM {from} GROUP BY 1 ORDER BY 1"
        );
        let tally = self.read_with(|connection| tally(connection, &shape, &kind, &keyless, &sql))?;
        let mut counts = Counts { sql, ..Counts::default() };
        for (kind, total, keyless) in tally {
            counts.total += total;
            counts.keyless += keyless;
            match kind.as_str() {
                "null" => counts.null = total,
                "empty" => counts.empty = total,
                "damaged" => counts.damaged = total,
                "foreign" => counts.foreign = total,
                "other_version" => counts.other_version = total,
                kid => match kid.parse() {
                    Ok(kid) => {
                        counts.sealed.insert(kid, total);
                    }
                    Err(_) => counts.cleartext = total,
                },
            }
        }
        Ok(counts)
    }
}

impl Db {
    /// The length in bytes of the longest value without a marker; none where there is none.
    ///
    /// # Errors
    /// [`Error::NoTable`], [`Error::NoColumn`], [`Error::Unavailable`].
    pub fn longest_cleartext(&self, column: &Column) -> Result<Option<u64>, Error> {
        let shape = self.shape(column)?;
        let value = &shape.value.of;
        let query = Query::new(format!(
            "SELECT {} AS longest FROM {} WHERE {} = 'cleartext'",
            shape.sql.integer(&format!("MAX({})", shape.sql.length(value))),
            shape.table,
            shape.sql.kind_of(value)
        ));
        let rows: Vec<Longest> = self.read_with(|connection| query.load(connection))?;
        Ok(rows.into_iter().next().and_then(|row| row.longest).map(i64::unsigned_abs))
    }
}

/// What the values of one column are.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Counts {
    /// All rows.
    pub total: u64,
    /// Rows without a value.
    pub null: u64,
    /// Rows whose value is `''`.
    pub empty: u64,
    /// Values with our marker and a well-formed key id, by key.
    pub sealed: BTreeMap<KeyId, u64>,
    /// Values with our marker whose key id is not well-formed.
    pub damaged: u64,
    /// Values with a marker of the ancestor.
    pub foreign: u64,
    /// Values with a marker `hwN:` of another version.
    pub other_version: u64,
    /// Values without a marker.
    pub cleartext: u64,
    /// Rows whose key is NULL, counted above as well: no walk reaches them.
    pub keyless: u64,
    /// The statement that repeats this count.
    pub sql: String,
}

impl Counts {
    /// All values with our marker and a well-formed key id.
    pub fn sealed_total(&self) -> u64 {
        self.sealed.values().sum()
    }
}

#[derive(QueryableByName)]
struct Longest {
    #[diesel(sql_type = Nullable<BigInt>)]
    longest: Option<i64>,
}

/// How often each kind is met, and how often without a key.
fn tally(
    connection: &mut AnyConnection,
    shape: &Shape,
    kind: &str,
    keyless: &str,
    sql: &str,
) -> Result<Vec<(String, u64, u64)>, Error> {
    #[cfg(feature = "sqlite")]
    if let AnyConnection::Sqlite(sqlite) = connection {
        return sqlite::tally(
            sqlite,
            &format!("SELECT hardwrap_tally({kind}, {keyless}) AS tally FROM {}", shape.table),
        );
    }
    let _ = (shape, kind, keyless);
    let rows: Vec<Kind> = Query::new(sql).load(connection)?;
    Ok(rows.into_iter().map(|row| (row.kind, row.total.unsigned_abs(), row.keyless.unsigned_abs())).collect())
}

#[derive(QueryableByName)]
struct Kind {
    #[diesel(sql_type = Text)]
    kind: String,
    #[diesel(sql_type = BigInt)]
    total: i64,
    #[diesel(sql_type = BigInt)]
    keyless: i64,
}

/// SQLite's GROUP BY sorts every row; an aggregate of our own remembers every kind.
#[cfg(feature = "sqlite")]
mod sqlite {
    use std::collections::BTreeMap;

    use diesel::prelude::*;
    use diesel::sql_types::{Bool, Text};
    use diesel::sqlite::SqliteAggregateFunction;

    use crate::store::Error;

    pub(super) fn tally(connection: &mut SqliteConnection, sql: &str) -> Result<Vec<(String, u64, u64)>, Error> {
        hardwrap_tally_utils::register_impl::<Tally, _, _>(connection)?;
        let tally: Vec<Tallied> = diesel::sql_query(sql).load(connection)?;
        let tally = tally.into_iter().next().map(|row| row.tally).unwrap_or_default();
        let line = |line: &str| {
            let mut parts = line.split(' ');
            Some((parts.next()?.to_owned(), parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
        };
        Ok(tally.lines().filter_map(line).collect())
    }

    #[diesel::declare_sql_function]
    extern "SQL" {
        /// How often each kind was met, and how often without a key: a line for each.
        #[aggregate]
        fn hardwrap_tally(kind: Text, keyless: Bool) -> Text;
    }

    #[derive(Default)]
    struct Tally(BTreeMap<String, [u64; 2]>);

    impl SqliteAggregateFunction<(String, bool)> for Tally {
        type Output = String;

        fn step(&mut self, (kind, keyless): (String, bool)) {
            let [total, without] = self.0.entry(kind).or_default();
            *total += 1;
            *without += u64::from(keyless);
        }

        fn finalize(tally: Option<Self>) -> String {
            let line = |(kind, [total, without]): (&String, &[u64; 2])| format!("{kind} {total} {without}\n");
            tally.map_or_else(String::new, |tally| tally.0.iter().map(line).collect())
        }
    }

    #[derive(QueryableByName)]
    struct Tallied {
        #[diesel(sql_type = Text)]
        tally: String,
    }
}
