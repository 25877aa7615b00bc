//! The diesel column type on a real database, as an application uses it.

#![allow(clippy::unwrap_used, missing_docs, missing_debug_implementations, reason = "tests")]

#[path = "support/memory_keys.rs"]
mod memory_keys;

use std::sync::Arc;

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel::sqlite::Sqlite;
use hardwrap::codec::{self, Codec};
use hardwrap::column::{Cleartext, Column, Row, SealedColumn};
use hardwrap::envelope::Marker;
use hardwrap::provider::Alg;
use hardwrap::store::{NotSealed, Sealed, SealedText};
use memory_keys::MemoryKeys;

// Neither `Debug` nor `Send`: what stands for a column has to be able to do nothing.
pub struct Iban(std::marker::PhantomData<*const ()>);

impl SealedColumn for Iban {
    const COLUMN: Column = Column::constant("customer", "iban", "id", "shop:customer:iban").in_row("id");
}

pub struct Note;

impl SealedColumn for Note {
    const COLUMN: Column =
        Column::constant("customer", "note", "id", "shop:customer:note").in_row("id").cleartext(Cleartext::Accept);
}

diesel::table! {
    use diesel::sql_types::{BigInt, Nullable};
    use hardwrap::store::SealedText;
    use super::{Iban, Note};

    customer (id) {
        id -> BigInt,
        iban -> SealedText<Iban>,
        note -> Nullable<SealedText<Note>>,
    }
}

#[derive(Debug, Queryable, Selectable, Insertable, AsChangeset)]
#[diesel(table_name = customer)]
struct Customer {
    id: i64,
    iban: Sealed<Iban>,
    note: Option<Sealed<Note>>,
}

#[derive(Insertable, AsChangeset)]
#[diesel(table_name = customer)]
struct Borrowed<'a> {
    id: i64,
    iban: &'a Sealed<Iban>,
    note: Option<&'a Sealed<Note>>,
}

struct Shop {
    connection: SqliteConnection,
    keys: Arc<MemoryKeys>,
    codec: Codec,
}

impl Shop {
    fn new() -> Self {
        let mut connection = SqliteConnection::establish(":memory:").unwrap();
        connection
            .batch_execute("CREATE TABLE customer (id INTEGER PRIMARY KEY, iban TEXT NOT NULL, note TEXT)")
            .unwrap();
        let keys = Arc::new(MemoryKeys::one([0, 1, 2, 3, 4, 5, 6, 7].into(), Alg::A256GcmKw, [9; 32]));
        Self { connection, codec: Codec::new(keys.clone()), keys }
    }

    fn seal<C: SealedColumn>(&self, id: i64, value: &str) -> Sealed<C> {
        let sealed = self.codec.seal(&C::COLUMN.at(Some(&Row::from(id))).unwrap(), value.as_bytes()).unwrap();
        Sealed::from_stored(sealed)
    }

    fn open<C: SealedColumn>(&self, id: i64, sealed: &Sealed<C>) -> Result<String, codec::Error> {
        let opened = self.codec.open(&C::COLUMN.at(Some(&Row::from(id))).unwrap(), sealed.stored())?;
        Ok(String::from_utf8(opened.expose().to_vec()).unwrap())
    }

    /// Customer `id` with a sealed IBAN, and a note where one is given.
    fn insert(&mut self, id: i64, iban: &str, note: Option<&str>) {
        let new = Customer { id, iban: self.seal(id, iban), note: note.map(|note| self.seal(id, note)) };
        diesel::insert_into(customer::table).values(new).execute(&mut self.connection).unwrap();
    }

    fn customer(&mut self, id: i64) -> Customer {
        customer::table.find(id).select(Customer::as_select()).first(&mut self.connection).unwrap()
    }

    fn raw(&mut self, sql: &str) {
        self.connection.batch_execute(sql).unwrap();
    }

    fn stored(&mut self, id: i64) -> (String, Option<String>) {
        diesel::table! {
            #[sql_name = "customer"]
            plain (id) {
                id -> BigInt,
                iban -> Text,
                note -> Nullable<Text>,
            }
        }
        plain::table.find(id).select((plain::iban, plain::note)).first(&mut self.connection).unwrap()
    }
}

#[test]
fn a_sealed_value_goes_in_and_comes_out() {
    let mut shop = Shop::new();
    shop.insert(7, "DE02", Some("pays late"));
    let (iban, note) = shop.stored(7);
    assert!(iban.starts_with("hw1:") && note.is_some_and(|note| note.starts_with("hw1:")), "sealed, as text");
    let found = shop.customer(7);
    assert_eq!(found.id, 7);
    assert_eq!(shop.open(7, &found.iban).unwrap(), "DE02");
    assert_eq!(shop.open(7, found.note.as_ref().unwrap()).unwrap(), "pays late");
    assert_eq!(found.iban.stored(), iban);
}

#[test]
fn rows_are_read_and_written_back_while_no_key_is_in_reach() {
    let mut shop = Shop::new();
    shop.insert(7, "DE02", Some("pays late"));
    shop.keys.set_unavailable(true);
    let found = shop.customer(7);
    assert_eq!(found.iban.key().unwrap().to_string(), "0001020304050607");
    assert_eq!(found.iban.marker(), Marker::Hw1);
    assert!(matches!(shop.open(7, &found.iban), Err(codec::Error::Unavailable(_))));
    let before = shop.stored(7);
    diesel::update(customer::table.find(7)).set(found).execute(&mut shop.connection).unwrap();
    assert_eq!(shop.stored(7), before);
}

#[test]
fn a_value_is_updated_alone_within_a_row_and_borrowed() {
    let mut shop = Shop::new();
    shop.insert(7, "DE02", None);
    let (iban, note) = (shop.seal::<Iban>(7, "DE03"), shop.seal::<Note>(7, "new"));
    diesel::update(customer::table.find(7))
        .set((customer::iban.eq(&iban), customer::note.eq(&note)))
        .execute(&mut shop.connection)
        .unwrap();
    let found = shop.customer(7);
    assert_eq!(shop.open(7, &found.iban).unwrap(), "DE03");
    assert_eq!(shop.open(7, &found.note.unwrap()).unwrap(), "new");

    diesel::insert_into(customer::table)
        .values(Borrowed { id: 8, iban: &shop.seal(8, "DE08"), note: Some(&shop.seal(8, "eight")) })
        .execute(&mut shop.connection)
        .unwrap();
    // As in every changeset of diesel, None leaves the column as it is.
    diesel::update(customer::table.find(8))
        .set(Borrowed { id: 8, iban: &shop.seal(8, "DE09"), note: None })
        .execute(&mut shop.connection)
        .unwrap();
    let found = shop.customer(8);
    assert_eq!(shop.open(8, &found.iban).unwrap(), "DE09");
    assert_eq!(shop.open(8, &found.note.unwrap()).unwrap(), "eight");
}

#[test]
fn null_stays_null_and_empty_stays_empty() {
    let mut shop = Shop::new();
    shop.insert(7, "", None);
    shop.insert(8, "DE08", Some(""));
    assert_eq!(shop.stored(7), (String::new(), None));
    let (seven, eight) = (shop.customer(7), shop.customer(8));
    assert!(seven.note.is_none());
    assert_eq!((seven.iban.marker(), seven.iban.key()), (Marker::Empty, None));
    assert_eq!(shop.open(7, &seven.iban).unwrap(), "");
    assert_eq!(shop.open(8, &eight.note.unwrap()).unwrap(), "");

    let with: Vec<i64> =
        customer::table.filter(customer::note.is_not_null()).select(customer::id).load(&mut shop.connection).unwrap();
    let without: Vec<i64> =
        customer::table.filter(customer::note.is_null()).select(customer::id).load(&mut shop.connection).unwrap();
    assert_eq!((with, without), (vec![8], vec![7]));

    diesel::update(customer::table.find(8))
        .set(customer::note.eq(None::<Sealed<Note>>))
        .execute(&mut shop.connection)
        .unwrap();
    assert_eq!(shop.stored(8).1, None);
}

#[test]
fn a_value_moved_to_another_row_or_column_does_not_open() {
    let mut shop = Shop::new();
    shop.insert(7, "DE07", None);
    shop.insert(8, "DE08", None);
    // The types cannot see a row, and nobody asks types in SQL: the context does.
    shop.raw("UPDATE customer SET iban = (SELECT iban FROM customer WHERE id = 7) WHERE id = 8");
    shop.raw("UPDATE customer SET note = iban WHERE id = 7");
    let (seven, eight) = (shop.customer(7), shop.customer(8));
    assert_eq!(shop.open(7, &seven.iban).unwrap(), "DE07");
    assert!(matches!(shop.open(8, &eight.iban), Err(codec::Error::Rejected)));
    assert!(matches!(shop.open(7, &seven.note.unwrap()), Err(codec::Error::Rejected)));
}

#[test]
fn a_text_that_nobody_sealed_is_not_written_where_cleartext_is_refused() {
    let mut shop = Shop::new();
    shop.insert(7, "DE07", None);
    let before = shop.stored(7);
    let update =
        diesel::update(customer::table.find(7)).set(customer::iban.eq(Sealed::from_stored("in clear".to_owned())));
    let refused = update.execute(&mut shop.connection).unwrap_err();
    let diesel::result::Error::SerializationError(cause) = &refused else { panic!("{refused}") };
    assert_eq!(cause.downcast_ref(), Some(&NotSealed("customer.iban".to_owned())));
    assert!(!format!("{refused} {refused:?}").contains("in clear"));
    assert_eq!(shop.stored(7), before);

    // The upgrade path: what was read in clear is written back by a structure of rows.
    shop.raw("UPDATE customer SET note = 'in clear' WHERE id = 7");
    let found = shop.customer(7);
    assert_eq!(found.note.as_ref().map(|note| (note.marker(), note.key())), Some((Marker::None, None)));
    diesel::update(customer::table.find(7)).set(found).execute(&mut shop.connection).unwrap();
    let note = shop.customer(7).note.unwrap();
    assert_eq!(shop.open(7, &note).unwrap(), "in clear");
}

#[test]
fn damaged_values_are_read_and_name_no_key() {
    let mut shop = Shop::new();
    for (stored, marker) in [
        ("hw1:0001020304050607:e30=.AAAA", Marker::Hw1),
        ("hw1:", Marker::Hw1),
        ("hw2:0001020304050607:e30=.AAAA", Marker::HwOther),
        ("nrv1:e30=", Marker::Foreign),
    ] {
        shop.raw(&format!("INSERT OR REPLACE INTO customer VALUES (7, '{stored}', NULL)"));
        let found = shop.customer(7);
        assert_eq!((found.iban.marker(), found.iban.key()), (marker, None), "{stored}");
        assert!(shop.open(7, &found.iban).is_err(), "{stored}");
    }
}

#[test]
fn a_stored_text_that_is_not_utf_8_is_an_error_and_not_a_guess() {
    let mut shop = Shop::new();
    shop.raw("INSERT INTO customer VALUES (7, CAST(x'6877313aff' AS TEXT), NULL)");
    let read = customer::table.select(Customer::as_select()).load(&mut shop.connection);
    assert!(matches!(read, Err(diesel::result::Error::DeserializationError(_))), "{read:?}");
}

#[test]
fn neither_debug_nor_the_log_of_statements_shows_a_value() {
    let shop = Shop::new();
    let row = Customer { id: 7, iban: shop.seal(7, "DE07"), note: Some(Sealed::from_stored("in clear".to_owned())) };
    let debug = format!("{row:?}");
    assert_eq!(debug, "Customer { id: 7, iban: Sealed(..), note: Some(Sealed(..)) }");
    let insert = diesel::insert_into(customer::table).values(row);
    let statement = diesel::debug_query::<Sqlite, _>(&insert).to_string();
    assert!(statement.contains("Sealed(..)"), "{statement}");
    assert!(!statement.contains("hw1:") && !statement.contains("in clear"), "{statement}");
}

#[test]
fn whatever_stands_for_a_column_a_value_goes_to_other_threads() {
    fn goes_everywhere<T: Send + Sync + 'static>() {}
    goes_everywhere::<Sealed<Iban>>();
    goes_everywhere::<SealedText<Iban>>();
}
