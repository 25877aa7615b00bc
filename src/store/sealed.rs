//! A column type for diesel that carries its column: what was sealed for one column is stored in no other.

use std::fmt;
use std::marker::PhantomData;

use diesel::backend::Backend;
use diesel::deserialize::{self, FromSql, FromSqlRow};
use diesel::expression::AsExpression;
use diesel::query_builder::QueryId;
use diesel::serialize::{self, Output, ToSql};
use diesel::sql_types::{HasSqlType, SingleValue, SqlType, Text, is_nullable};
use zeroize::Zeroizing;

use crate::column::{Cleartext, SealedColumn};
use crate::envelope::{Envelope, Marker};
use crate::provider::KeyId;

/// The SQL type of the sealed column `C`, for `diesel::table!`. The database stores it as its own text type.
///
/// The Rust type is [`Sealed<C>`](Sealed), and `Option<Sealed<C>>` for `Nullable<SealedText<C>>`.
#[derive(Debug)]
pub struct SealedText<C>(PhantomData<fn() -> C>);

impl<C: SealedColumn> SqlType for SealedText<C> {
    type IsNull = is_nullable::NotNull;
}

impl<C: SealedColumn> SingleValue for SealedText<C> {}

impl<C: SealedColumn> QueryId for SealedText<C> {
    type QueryId = Self;
}

/// Each database's line: what it calls a text is what it calls a sealed text.
macro_rules! stored_as_text {
    ($($backend:ty),+) => {$(
        impl<C: SealedColumn> HasSqlType<SealedText<C>> for $backend {
            fn metadata(lookup: &mut Self::MetadataLookup) -> Self::TypeMetadata {
                <Self as HasSqlType<Text>>::metadata(lookup)
            }
        }
    )+};
}

#[cfg(feature = "sqlite")]
stored_as_text!(diesel::sqlite::Sqlite);
#[cfg(feature = "postgres")]
stored_as_text!(diesel::pg::Pg);
#[cfg(feature = "mariadb")]
stored_as_text!(diesel::mysql::Mysql);

/// A value of the column `C` as it stands in the database: sealed, or empty, or in clear where the column accepts that.
/// Reading rows asks no key; [`Sealed::open`] does. It is wiped on drop and never printed.
///
/// ```
/// use diesel::prelude::*;
/// use hardwrap::column::{Column, SealedColumn};
/// use hardwrap::store::Sealed;
///
/// #[derive(Debug)]
/// pub struct Iban;
///
/// impl SealedColumn for Iban {
///     const COLUMN: Column = Column::constant("customer", "iban", "id", "shop:customer:iban").in_row("id");
/// }
///
/// #[derive(Debug)]
/// pub struct Note;
///
/// impl SealedColumn for Note {
///     const COLUMN: Column = Column::constant("customer", "note", "id", "shop:customer:note").in_row("id");
/// }
///
/// diesel::table! {
///     use diesel::sql_types::{BigInt, Nullable};
///     use hardwrap::store::SealedText;
///     use super::{Iban, Note};
///
///     customer (id) {
///         id -> BigInt,
///         iban -> SealedText<Iban>,
///         note -> Nullable<SealedText<Note>>,
///     }
/// }
///
/// #[derive(Queryable, Selectable, Insertable, AsChangeset)]
/// #[diesel(table_name = customer)]
/// struct Customer {
///     id: i64,
///     iban: Sealed<Iban>,
///     note: Option<Sealed<Note>>,
/// }
///
/// # fn main() {}
/// # fn work(keeper: &hardwrap::keeper::Keeper, connection: &mut SqliteConnection) -> Result<(), Box<dyn std::error::Error>> {
/// let new = Customer { id: 7, iban: Sealed::seal(keeper, 7, b"DE02120300000000202051")?, note: None };
/// diesel::insert_into(customer::table).values(new).execute(connection)?;
///
/// // Loads every row, and opens none.
/// let rows = customer::table.filter(customer::note.is_null()).select(Customer::as_select()).load(connection)?;
/// for row in rows {
///     let iban = row.iban.open(keeper, row.id)?;
/// }
/// # Ok(())
/// # }
/// ```
///
/// One column's value is stored in that column:
///
/// ```
#[doc = include_str!("sealed/shop.in")]
/// fn update(connection: &mut SqliteConnection, sealed: Sealed<Iban>) -> QueryResult<usize> {
///     diesel::update(customer::table.find(7)).set(customer::iban.eq(sealed)).execute(connection)
/// }
/// ```
///
/// and in no other:
///
/// ```compile_fail,E0277
#[doc = include_str!("sealed/shop.in")]
/// fn update(connection: &mut SqliteConnection, sealed: Sealed<Iban>) -> QueryResult<usize> {
///     diesel::update(customer::table.find(7)).set(customer::note.eq(sealed)).execute(connection)
/// }
/// ```
///
/// Nor does a structure of rows carry it there:
///
/// ```
#[doc = include_str!("sealed/shop.in")]
/// #[derive(Insertable)]
/// #[diesel(table_name = customer)]
/// struct New {
///     id: i64,
///     iban: Sealed<Iban>,
///     note: Option<Sealed<Note>>,
/// }
/// ```
///
/// ```compile_fail,E0277
#[doc = include_str!("sealed/shop.in")]
/// #[derive(Insertable)]
/// #[diesel(table_name = customer)]
/// struct New {
///     id: i64,
///     iban: Sealed<Iban>,
///     note: Option<Sealed<Iban>>,
/// }
/// ```
///
/// Nor is it read from there:
///
/// ```
#[doc = include_str!("sealed/shop.in")]
/// fn read(connection: &mut SqliteConnection) -> QueryResult<Sealed<Iban>> {
///     customer::table.find(7).select(customer::iban).first(connection)
/// }
/// ```
///
/// ```compile_fail,E0277
#[doc = include_str!("sealed/shop.in")]
/// fn read(connection: &mut SqliteConnection) -> QueryResult<Sealed<Note>> {
///     customer::table.find(7).select(customer::iban).first(connection)
/// }
/// ```
///
/// What was not sealed is not stored:
///
/// ```
#[doc = include_str!("sealed/shop.in")]
/// fn update(connection: &mut SqliteConnection, text: Sealed<Iban>) -> QueryResult<usize> {
///     diesel::update(customer::table.find(7)).set(customer::iban.eq(text)).execute(connection)
/// }
/// ```
///
/// ```compile_fail,E0277
#[doc = include_str!("sealed/shop.in")]
/// fn update(connection: &mut SqliteConnection, text: String) -> QueryResult<usize> {
///     diesel::update(customer::table.find(7)).set(customer::iban.eq(text)).execute(connection)
/// }
/// ```
///
/// ```compile_fail,E0277
#[doc = include_str!("sealed/shop.in")]
/// fn update(connection: &mut SqliteConnection, text: &str) -> QueryResult<usize> {
///     diesel::update(customer::table.find(7)).set(customer::iban.eq(text)).execute(connection)
/// }
/// ```
///
/// Not even by [`Sealed::from_stored`]: diesel fails with [`NotSealed`] where a text without a marker would be written
/// to a column that refuses cleartext. A stored text that is not UTF-8 fails when it is read;
/// [`Db::page`](super::Db::page) reads such rows as well.
#[derive(AsExpression, FromSqlRow)]
#[diesel(sql_type = SealedText<C>)]
pub struct Sealed<C: SealedColumn> {
    text: Zeroizing<String>,
    column: PhantomData<fn() -> C>,
}

impl<C: SealedColumn> Sealed<C> {
    /// Takes what was read from this column by other means than diesel, as it stands. Nothing is checked here:
    /// opening does that.
    pub fn from_stored(text: String) -> Self {
        Self { text: Zeroizing::new(text), column: PhantomData }
    }

    /// The text as it stands in the database.
    pub fn stored(&self) -> &str {
        &self.text
    }

    /// What it claims to be.
    pub fn marker(&self) -> Marker {
        Marker::of(self.stored())
    }

    /// The master key it names; none where it is no envelope of ours, or a damaged one.
    pub fn key(&self) -> Option<KeyId> {
        Envelope::parse(self.stored()).ok().map(|envelope| envelope.front.wrapped.key)
    }
}

/// Shows nothing of the value.
impl<C: SealedColumn> fmt::Debug for Sealed<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Sealed(..)")
    }
}

impl<C: SealedColumn, DB: Backend> ToSql<SealedText<C>, DB> for Sealed<C>
where
    str: ToSql<Text, DB>,
{
    fn to_sql<'b>(&'b self, out: &mut Output<'b, '_, DB>) -> serialize::Result {
        if self.marker() == Marker::None && C::COLUMN.policy() == Cleartext::Refuse {
            return Err(NotSealed(C::COLUMN.to_string()).into());
        }
        ToSql::<Text, DB>::to_sql(self.stored(), out)
    }
}

impl<C: SealedColumn, DB: Backend> FromSql<SealedText<C>, DB> for Sealed<C>
where
    String: FromSql<Text, DB>,
{
    fn from_sql(stored: DB::RawValue<'_>) -> deserialize::Result<Self> {
        Ok(Self::from_stored(FromSql::<Text, DB>::from_sql(stored)?))
    }
}

/// A text without a marker was to be written to a column that refuses cleartext. Nothing was written.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("the value is not sealed, and column {0} refuses cleartext: nothing was written")]
pub struct NotSealed(pub String);

#[cfg(test)]
mod tests {
    use zeroize::ZeroizeOnDrop;

    use super::*;
    use crate::column::Column;

    #[derive(Debug)]
    struct Iban;

    impl SealedColumn for Iban {
        const COLUMN: Column = Column::constant("customer", "iban", "id", "shop:customer:iban");
    }

    #[test]
    fn the_text_is_wiped_on_drop() {
        fn is_wiped(_: &impl ZeroizeOnDrop) {}
        is_wiped(&Sealed::<Iban>::from_stored("hw1:".to_owned()).text);
    }
}
