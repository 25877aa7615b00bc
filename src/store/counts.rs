//! How many values of a column are what: counted by the database, by the same rules as [`Marker::of`].
//!
//! [`Marker::of`]: crate::envelope::Marker::of

use std::collections::BTreeMap;

use diesel::prelude::*;
use diesel::sql_types::{BigInt, Bool, Nullable, Text};
use diesel::sqlite::SqliteAggregateFunction;

use super::sql::{self, Query};
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
        let sql = format!(
            "SELECT {} AS kind, COUNT(*) AS total, SUM({} IS NULL) AS keyless FROM {} GROUP BY 1 ORDER BY 1",
            sql::kind_of(&sql::of_t(column.name())),
            sql::of_t(column.key()),
            sql::from(column)
        );
        let tally = format!(
            "SELECT hardwrap_tally({}, {} IS NULL) AS tally FROM {}",
            sql::kind_of(&sql::of_t(column.name())),
            sql::of_t(column.key()),
            sql::from(column)
        );
        let tally: Vec<Tallied> = self.read_with(|connection| {
            hardwrap_tally_utils::register_impl::<Tally, _, _>(connection)?;
            Query::new(tally).load(connection)
        })?;
        let tally = tally.into_iter().next().map(|row| row.tally).unwrap_or_default();
        let mut counts = Counts { sql, ..Counts::default() };
        for line in tally.lines() {
            let mut parts = line.split(' ');
            let (Some(kind), Some(Ok(total)), Some(Ok(keyless))) =
                (parts.next(), parts.next().map(str::parse::<u64>), parts.next().map(str::parse::<u64>))
            else {
                continue;
            };
            counts.total += total;
            counts.keyless += keyless;
            match kind {
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
        let value = sql::of_t(column.name());
        let query = Query::new(format!(
            "SELECT MAX(length({})) AS longest FROM {} WHERE {} = 'cleartext'",
            sql::as_bytes(&value),
            sql::from(column),
            sql::kind_of(&value)
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

#[diesel::declare_sql_function]
extern "SQL" {
    /// How often each kind was met, and how often without a key: a line for each.
    #[aggregate]
    fn hardwrap_tally(kind: Text, keyless: Bool) -> Text;
}

/// GROUP BY sorts every row; this remembers every kind.
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
