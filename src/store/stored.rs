//! Stored values as they stand in their rows: read as bytes, so that one bad row never breaks a page.

use std::fmt;

use diesel::prelude::*;
use diesel::sql_types::{BigInt, Binary, Nullable, Text};
use zeroize::Zeroizing;

use super::key::KeyParts;
use super::query::Query;
use super::shape::{self, Shape};
use super::{Db, Error, Key};
use crate::codec::Codec;
use crate::column::{Column, Row};
use crate::envelope::Marker;
use crate::secret::Plaintext;

impl Db {
    /// The row whose key is `key`, as text, byte for byte; whether the key column holds numbers or texts is the database's to know.
    ///
    /// # Errors
    /// [`Error::NoTable`], [`Error::NoColumn`], [`Error::KeyNotUnique`], [`Error::Unavailable`].
    pub fn read(&self, column: &Column, key: &str) -> Result<Option<Stored>, Error> {
        let as_text = self.read_key(column, &Key::Text(key.to_owned()))?;
        match key.parse::<i64>() {
            // A column without a type compares a text with no number.
            Ok(number) if as_text.is_none() && number.to_string() == key => {
                self.read_key(column, &Key::Integer(number))
            }
            _ => Ok(as_text),
        }
    }

    /// The next `limit` rows behind `after`, or the first ones, in the order of the keys: numbers, texts byte for byte,
    /// bytes; every row, whatever its state. Rows whose key is NULL cannot be reached; [`Counts::keyless`](super::Counts::keyless) counts them.
    ///
    /// # Errors
    /// [`Error::NoTable`], [`Error::NoColumn`], [`Error::Unavailable`]. Bad rows are errors of their own, within
    /// [`Stored`].
    pub fn page(&self, column: &Column, after: Option<&Key>, limit: u32) -> Result<Vec<Stored>, Error> {
        let shape = self.shape(column)?;
        let key = shape.key.ordered();
        let query = select(&shape).sql(" WHERE ").sql(&key);
        let query = match after {
            Some(after) => match shape.key.bind(query.sql(" > "), after) {
                Some(query) => query,
                None => return Ok(Vec::new()),
            },
            None => query.sql(" IS NOT NULL"),
        };
        let query = query.sql(" ORDER BY ").sql(&key).sql(" LIMIT ").integer(limit.into());
        self.stored(column, &query)
    }

    /// At most `limit` rows drawn at random from those that hold a value.
    ///
    /// # Errors
    /// As [`Db::page`].
    pub fn sample(&self, column: &Column, limit: u32) -> Result<Vec<Stored>, Error> {
        let shape = self.shape(column)?;
        // MariaDB takes no LIMIT in what IN looks through, so the keys drawn stand in a table of their own.
        let drawn = format!(
            " WHERE {} IN (SELECT d.k FROM (SELECT {} AS k FROM {} WHERE {} > 0 ORDER BY {} LIMIT ",
            shape.key.ordered(),
            shape.key.of,
            shape.table,
            shape.sql.length(&shape.value.of),
            shape.sql.random(),
        );
        self.stored(column, &select(&shape).sql(&drawn).integer(limit.into()).sql(") AS d)"))
    }

    /// The row whose key is exactly `key`: the way back to a row that [`Db::page`] showed, whatever its key is.
    ///
    /// # Errors
    /// As [`Db::read`].
    pub fn read_key(&self, column: &Column, key: &Key) -> Result<Option<Stored>, Error> {
        let shape = self.shape(column)?;
        let Some(query) = shape.key.is(select(&shape).sql(" WHERE "), key) else { return Ok(None) };
        let mut rows = self.stored(column, &query.sql(" LIMIT 2"))?;
        if rows.len() > 1 {
            return Err(Error::KeyNotUnique(format!("{}.{}", column.table(), column.key())));
        }
        Ok(rows.pop())
    }

    fn stored(&self, column: &Column, query: &Query<'_>) -> Result<Vec<Stored>, Error> {
        let rows: Vec<StoredParts> = self.read_with(|connection| query.load(connection))?;
        let bound = column.row().is_some();
        Ok(rows.into_iter().map(|parts| parts.stored(bound)).collect())
    }
}

/// One row of a registered column.
#[derive(Debug)]
pub struct Stored {
    /// What the row is found by.
    pub key: Key,
    /// What its value is bound to: none where the column is not bound to rows.
    pub row: Result<Option<Row>, BadRow>,
    /// The value; none for NULL.
    pub value: Option<StoredText>,
}

impl Stored {
    /// Opens the value: none for NULL, empty for `''`.
    ///
    /// # Errors
    /// [`Error::Codec`], [`Error::NotText`], [`Error::BadRow`], [`Error::Misplaced`].
    pub fn open(&self, codec: &Codec, column: &Column) -> Result<Option<Plaintext>, Error> {
        open(codec, column, &self.row, self.value.as_ref())
    }
}

/// Opens one stored text at its place.
pub(super) fn open(
    codec: &Codec,
    column: &Column,
    row: &Result<Option<Row>, BadRow>,
    value: Option<&StoredText>,
) -> Result<Option<Plaintext>, Error> {
    let Some(value) = value else { return Ok(None) };
    let text = value.text()?;
    if text.is_empty() {
        return Ok(Some(Plaintext::new(Vec::new())));
    }
    let row = row.as_ref().map_err(|bad| *bad)?.as_ref();
    Ok(Some(codec.open(&column.at(row)?, text)?))
}

/// A stored value as it stands in the database. It may be cleartext: it is wiped on drop and never printed.
pub struct StoredText(Zeroizing<Vec<u8>>);

impl StoredText {
    pub(super) fn new(bytes: Vec<u8>) -> Self {
        Self(Zeroizing::new(bytes))
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// What stands behind the first dot, which no rotation touches; everything where there is none.
    pub(super) fn payload(&self) -> &[u8] {
        let dot = self.0.iter().position(|byte| *byte == b'.');
        dot.map_or(&self.0[..], |dot| &self.0[dot..])
    }

    /// The text.
    ///
    /// # Errors
    /// [`Error::NotText`] if it is not UTF-8.
    pub fn text(&self) -> Result<&str, Error> {
        std::str::from_utf8(&self.0).map_err(|_| Error::NotText)
    }

    /// What it claims to be.
    ///
    /// # Errors
    /// [`Error::NotText`] if it is not UTF-8.
    pub fn marker(&self) -> Result<Marker, Error> {
        Ok(Marker::of(self.text()?))
    }
}

impl fmt::Debug for StoredText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StoredText(..)")
    }
}

/// The row column of one row holds nothing that a value can be bound to.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum BadRow {
    /// It is NULL.
    #[error("the row column is NULL")]
    Null,
    /// It is an empty text.
    #[error("the row column is empty")]
    Empty,
    /// It is longer than 65535 bytes.
    #[error("the row column is longer than 65535 bytes")]
    TooLong,
    /// It is a text, but not UTF-8.
    #[error("the row column is not UTF-8 text")]
    NotText,
    /// It is a floating-point number, which has no one text.
    #[error("the row column is a floating-point number")]
    Real,
    /// It is bytes.
    #[error("the row column is stored as BLOB")]
    Blob,
}

/// A row value as [`RowParts::select`] reads it.
#[derive(QueryableByName)]
pub(super) struct RowParts {
    #[diesel(sql_type = Text)]
    row_kind: String,
    #[diesel(sql_type = Nullable<BigInt>)]
    row_integer: Option<i64>,
    #[diesel(sql_type = Nullable<Binary>)]
    row_bytes: Option<Vec<u8>>,
}

impl RowParts {
    pub(super) fn select(row: &str) -> String {
        format!(
            "typeof({row}) AS row_kind, \
             CASE WHEN typeof({row}) = 'integer' THEN {row} END AS row_integer, \
             CASE WHEN typeof({row}) = 'text' THEN CAST({row} AS BLOB) END AS row_bytes"
        )
    }

    pub(super) fn row(self) -> Result<Row, BadRow> {
        match (self.row_kind.as_str(), self.row_integer) {
            ("integer", Some(number)) => Ok(Row::from(number)),
            ("text", _) => {
                let text = String::from_utf8(self.row_bytes.unwrap_or_default()).map_err(|_| BadRow::NotText)?;
                if text.is_empty() {
                    return Err(BadRow::Empty);
                }
                Row::try_from(text).map_err(|_| BadRow::TooLong)
            }
            ("real", _) => Err(BadRow::Real),
            ("blob", _) => Err(BadRow::Blob),
            _ => Err(BadRow::Null),
        }
    }
}

#[derive(QueryableByName)]
struct StoredParts {
    #[diesel(embed)]
    key: KeyParts,
    #[diesel(embed)]
    bound_to: RowParts,
    #[diesel(sql_type = Text)]
    value_kind: String,
    #[diesel(sql_type = Nullable<Binary>)]
    value: Option<Vec<u8>>,
}

impl StoredParts {
    fn stored(self, bound: bool) -> Stored {
        Stored {
            key: self.key.into(),
            row: if bound { self.bound_to.row().map(Some) } else { Ok(None) },
            value: (self.value_kind != "null").then(|| StoredText::new(self.value.unwrap_or_default())),
        }
    }
}

fn select(shape: &Shape) -> Query<'static> {
    let (sql, value) = (shape.sql, &shape.value.of);
    let kind = match sql {
        super::sql::Sql::Sqlite => format!("typeof({value})"),
        _ => format!("CASE WHEN {value} IS NULL THEN 'null' ELSE 'text' END"),
    };
    Query::new(format!(
        "SELECT {}, {}, {kind} AS value_kind, {} AS value FROM {}",
        shape.key.select_key(),
        shape.row.as_ref().map_or_else(|| shape::no_row(sql), shape::Cell::select_row),
        sql.as_bytes(value),
        shape.table
    ))
}
