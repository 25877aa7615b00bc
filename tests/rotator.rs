//! What an application keeps in tables of its own is moved with the rest: the rotator and the listener of the page on
//! rotation, at work.
#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout, reason = "tests")]

#[path = "support/softhsm.rs"]
mod softhsm;
#[path = "support/sqlite.rs"]
mod sqlite;

use std::sync::{Arc, Mutex};

use diesel::dsl::sql;
use diesel::prelude::*;
use diesel::sql_types::BigInt;
use hardwrap::column::{Column, Row};
use hardwrap::hsm::Choice;
use hardwrap::keeper::{Error, Keeper};
use hardwrap::provider::KeyId;
use hardwrap::rotation::{BoxedError, Listener, MasterKeyRotated, Rewrapper, Rotator};
use hardwrap::store::{AnyConnection, Spot};
use softhsm::SoftHsm;
use sqlite::sqlite3;

diesel::table! {
    document (id) {
        id -> BigInt,
        front -> Text,
        payload -> Text,
    }
}

const BODY: Column = Column::constant("document", "front", "id", "shop:document:body").in_row("id");

struct Documents;

impl Rotator for Documents {
    fn name(&self) -> &'static str {
        "documents"
    }

    fn columns(&self) -> Vec<Spot> {
        vec![Spot { table: "document".to_owned(), column: "front".to_owned() }]
    }

    fn count(&self, connection: &mut AnyConnection, target: KeyId) -> Result<u64, BoxedError> {
        let connection = connection.sqlite().ok_or("not SQLite")?;
        let moved = format!("hw1:{target}:%");
        let due = document::table.filter(document::front.ne("")).filter(document::front.not_like(moved));
        Ok(due.count().get_result::<i64>(connection)?.unsigned_abs())
    }

    fn rewrap(&self, connection: &mut AnyConnection, context: &Rewrapper<'_>) -> Result<u64, BoxedError> {
        let connection = connection.sqlite().ok_or("not SQLite")?;
        let column = BODY;
        let (mut moved, mut after) = (0, i64::MIN);
        loop {
            let rest = sql::<BigInt>("length(payload) + 1");
            let page = document::table.filter(document::id.gt(after)).order(document::id).limit(2);
            let page: Vec<(i64, String, i64)> = page.select((document::id, document::front, rest)).load(connection)?;
            let Some((last, ..)) = page.last() else { return Ok(moved) };
            after = *last;
            for (id, front, rest) in page.iter().filter(|(_, front, _)| context.is_due(front)) {
                let place = column.at(Some(&Row::from(*id)))?;
                let Some(new) = context.rewrap_front(&place, front, rest.unsigned_abs())? else { continue };
                let same = document::table.filter(document::id.eq(id)).filter(document::front.eq(front));
                moved += diesel::update(same).set(document::front.eq(new)).execute(connection)? as u64;
            }
        }
    }
}

#[derive(Default)]
struct Heard(Mutex<Vec<MasterKeyRotated>>);

impl Listener for Heard {
    fn name(&self) -> &'static str {
        "heard"
    }

    fn master_key_rotated(&self, event: &MasterKeyRotated) -> Result<(), BoxedError> {
        self.0.lock().unwrap().push(event.clone());
        Ok(())
    }
}

#[test]
fn fronts_that_stand_apart_from_their_payloads_are_moved_by_a_rotator_and_by_nobody_without_it() {
    let name = "fronts_that_stand_apart_from_their_payloads_are_moved_by_a_rotator_and_by_nobody_without_it";
    SoftHsm::isolated(name, |site| {
        let database = site.dir().join("app.db");
        sqlite3(
            &database,
            "CREATE TABLE document (id INTEGER PRIMARY KEY, front TEXT NOT NULL, payload TEXT NOT NULL)",
        );
        let url = format!("sqlite://{}", database.display());
        let builder = Keeper::builder(site.uri().parse().unwrap(), url.parse().unwrap());
        let (keeper, _) = builder.init(Choice::Auto).unwrap();
        let column = BODY;
        for id in 1..=5 {
            let place = column.at(Some(&Row::from(id))).unwrap();
            let sealed = keeper.codec().seal(&place, format!("body {id}").as_bytes()).unwrap();
            let (front, payload) = sealed.split_once('.').unwrap();
            sqlite3(&database, &format!("INSERT INTO document VALUES ({id}, '{front}', '{payload}')"));
        }
        let payloads = || sqlite3(&database, "SELECT id, payload FROM document ORDER BY id");
        let before = payloads();
        assert!(matches!(keeper.rotation().run(), Err(Error::Unregistered(found)) if found[0].count == 5));
        for online in [false, true] {
            let heard = Arc::new(Heard::default());
            let keeper = keeper.clone().with_rotator(Arc::new(Documents)).with_listener(heard.clone());
            let done = keeper.rotation().online(online).run().unwrap();
            assert_eq!((done.moved, done.proven), (5, true));
            let target = done.target.unwrap();
            let under = format!("SELECT count(*) FROM document WHERE front GLOB 'hw1:{target}:*'");
            assert_eq!(sqlite3(&database, &under).trim(), "5");
            assert_eq!(heard.0.lock().unwrap()[0].to, target.to_string());
            for id in 1..=5 {
                let text = sqlite3(&database, &format!("SELECT front || '.' || payload FROM document WHERE id = {id}"));
                let place = column.at(Some(&Row::from(id))).unwrap();
                let opened = keeper.codec().open(&place, text.trim()).unwrap();
                assert_eq!(opened.expose(), format!("body {id}").as_bytes());
            }
        }
        assert_eq!(payloads(), before, "no payload is touched");
    });
}
