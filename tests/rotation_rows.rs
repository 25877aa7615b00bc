//! Rotation of many rows of every kind, in two tables and three columns: it moves exactly those it must, names what is
//! damaged, and touches nothing else. 20,000 rows, and with HARDWRAP_LONG 100,000.
#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout, reason = "tests")]

#[path = "support/softhsm.rs"]
mod softhsm;
#[path = "support/sqlite.rs"]
mod sqlite;

use std::collections::BTreeMap;
use std::env;
use std::fmt::Write;
use std::fs;

use diesel::prelude::*;
use diesel::sql_types::{BigInt, Binary, Nullable, Text};
use hardwrap::column::{Cleartext, Column, nr_llm};
use hardwrap::hsm::{Choice, Route};
use hardwrap::keeper::Keeper;
use hardwrap::store::Key;
use sha2::{Digest, Sha256};
use softhsm::{Site, SoftHsm};
use sqlite::sqlite3;

const IDENTIFIERS: [&str; 3] = ["shop:customer:iban", "queued_request", "suspended_state"];

fn rows() -> i64 {
    if env::var_os("HARDWRAP_LONG").is_some() { 100_000 } else { 20_000 }
}

/// What stands in a row's column, and what a rotation is to make of it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Kind {
    /// To be moved: a text, or the same bytes as a BLOB.
    Sealed,
    SealedBlob,
    /// Left as it is, and no fault.
    Null,
    Empty,
    Cleartext,
    Ancestor,
    AncestorV2,
    OtherVersion,
    /// To be named, with the kind of error.
    NoDot,
    NoKeyId,
    Torn,
    UnknownKey,
    OfAnotherRow,
}

impl Kind {
    fn of(number: i64) -> Self {
        match number % 1009 {
            1 => Self::NoDot,
            2 => Self::NoKeyId,
            3 => Self::Torn,
            4 => Self::UnknownKey,
            5 => Self::OfAnotherRow,
            rest => match rest % 16 {
                0 => Self::Null,
                1 => Self::Empty,
                2 => Self::Cleartext,
                3 => Self::Ancestor,
                4 => Self::AncestorV2,
                5 => Self::OtherVersion,
                6 => Self::SealedBlob,
                _ => Self::Sealed,
            },
        }
    }

    fn is_moved(self) -> bool {
        matches!(self, Self::Sealed | Self::SealedBlob)
    }

    fn error(self) -> Option<&'static str> {
        match self {
            Self::NoDot | Self::NoKeyId | Self::Torn => Some("Malformed"),
            Self::UnknownKey => Some("UnknownKey"),
            Self::OfAnotherRow => Some("Rejected"),
            _ => None,
        }
    }

    /// What stands there, as SQL.
    fn stored(self, sealed: &str) -> String {
        match self {
            Self::Sealed | Self::OfAnotherRow => format!("'{sealed}'"),
            Self::SealedBlob => format!("CAST('{sealed}' AS BLOB)"),
            Self::Null => "NULL".to_owned(),
            Self::Empty => "''".to_owned(),
            Self::Cleartext => "'the text before anybody sealed it. With dots.'".to_owned(),
            Self::Ancestor => "'nrv1:eyJ2IjoxfQ==.AAAA'".to_owned(),
            Self::AncestorV2 => "'v2:eyJ2IjoyfQ==.AAAA'".to_owned(),
            Self::OtherVersion => format!("'hw2:{}'", &sealed[4..]),
            Self::NoDot => format!("'{}'", sealed.replace('.', "")),
            Self::NoKeyId => format!("'hw1:{}'", &sealed[21..]),
            Self::Torn => format!("'{}{}'", &sealed[..60], &sealed[64..]),
            Self::UnknownKey => format!("'hw1:00ff000000000000:{}'", &sealed[21..]),
        }
    }
}

/// The value of a row: of mixed length, a few of 64 KiB.
fn value(column: usize, number: i64) -> Vec<u8> {
    let length = match number % 500 {
        0 => 65_536,
        1..50 => 8_000 + number % 3_000,
        rest => rest,
    };
    let text = format!("{column} {number}: ");
    text.bytes().cycle().take(usize::try_from(length).unwrap()).collect()
}

fn columns() -> Vec<Column> {
    let iban = Column::new("customer", "iban", "id", IDENTIFIERS[0]).unwrap().bound_to("id").unwrap();
    let mut columns = vec![iban.cleartext(Cleartext::Accept)];
    columns.extend(nr_llm());
    let place = |name| columns.iter().position(|column| column.name() == name).unwrap();
    IDENTIFIERS.map(|name| columns[place(name.rsplit(':').next().unwrap())].clone()).to_vec()
}

fn uuid(number: i64) -> String {
    format!("00000000-0000-7000-8000-{number:012x}")
}

fn place(column: usize, number: i64) -> String {
    if column == 0 { number.to_string() } else { uuid(number) }
}

fn fill(keeper: &Keeper, site: &Site) {
    let columns = columns();
    let numbers: Vec<i64> = (1..=rows()).collect();
    for some in numbers.chunks(2000) {
        let sealed: Vec<Vec<String>> = (0..3)
            .map(|column| {
                let of = |number: &i64| match Kind::of(*number + column as i64) {
                    Kind::OfAnotherRow => place(column, number + 1),
                    _ => place(column, *number),
                };
                let values: Vec<_> = some.iter().map(|number| (of(number), value(column, *number))).collect();
                let sealed = keeper.seal_many(columns[column].clone(), &values).unwrap();
                sealed.into_iter().map(Result::unwrap).collect()
            })
            .collect();
        let mut sql = String::from("BEGIN;\n");
        for (at, number) in some.iter().enumerate() {
            let stored = |column: usize| Kind::of(*number + column as i64).stored(&sealed[column][at]);
            let status = ["queued", "running", "completed", "failed"][at % 4];
            writeln!(sql, "INSERT INTO customer VALUES ({number}, {}, {});", stored(0), at % 3).unwrap();
            writeln!(
                sql,
                "INSERT INTO tx_nrllm_agentrun (uid, uuid, status, queued_request, suspended_state) \
                 VALUES ({number}, '{}', '{status}', {}, {});",
                uuid(*number),
                stored(1),
                stored(2)
            )
            .unwrap();
        }
        sqlite3(&site.dir().join("app.db"), &(sql + "COMMIT;"));
    }
}

/// A stored value without its length.
#[derive(Clone, Debug, Eq, PartialEq)]
struct Fact {
    stored_as: String,
    kid: String,
    whole: [u8; 32],
    payload: [u8; 32],
}

#[derive(QueryableByName)]
struct Standing {
    #[diesel(sql_type = BigInt)]
    key: i64,
    #[diesel(sql_type = Text)]
    stored_as: String,
    #[diesel(sql_type = Nullable<Binary>)]
    value: Option<Vec<u8>>,
}

fn facts(site: &Site) -> BTreeMap<(usize, i64), Fact> {
    let mut connection = SqliteConnection::establish(&site.dir().join("app.db").display().to_string()).unwrap();
    let mut facts = BTreeMap::new();
    for (at, column) in columns().iter().enumerate() {
        let (name, key, table) = (column.name(), column.key(), column.table());
        for from in (0..=rows()).step_by(2000) {
            let page: Vec<Standing> = diesel::sql_query(format!(
                "SELECT {key} AS key, typeof({name}) AS stored_as, CAST({name} AS BLOB) AS value FROM {table} \
                 WHERE {key} > {from} AND {key} <= {from} + 2000"
            ))
            .load(&mut connection)
            .unwrap();
            for Standing { key, stored_as, value } in page {
                let value = value.unwrap_or_default();
                let dot = value.iter().position(|byte| *byte == b'.').unwrap_or(0);
                let fact = Fact {
                    stored_as,
                    kid: String::from_utf8_lossy(value.get(4..20).unwrap_or_default()).into_owned(),
                    whole: Sha256::digest(&value).into(),
                    payload: Sha256::digest(&value[dot..]).into(),
                };
                facts.insert((at, key), fact);
            }
        }
    }
    assert_eq!(facts.len() as i64, 3 * rows());
    facts
}

/// The files of the database, log included.
fn files(site: &Site) -> Vec<Vec<u8>> {
    ["app.db", "app.db-wal"].map(|name| Sha256::digest(fs::read(site.dir().join(name)).unwrap()).to_vec()).to_vec()
}

fn rotates(route: Route, online: bool) {
    let name = format!("{}_{}", if online { "online" } else { "atomic" }, route.name().replace('-', "_"));
    SoftHsm::isolated(&name, |site| {
        let table = "CREATE TABLE customer (id INTEGER PRIMARY KEY, iban, deleted INTEGER NOT NULL DEFAULT 0)";
        sqlite3(&site.dir().join("app.db"), table);
        let url = format!("sqlite://{}/app.db", site.dir().display());
        let builder = Keeper::builder(site.uri().parse().unwrap(), url.parse().unwrap()).columns(columns());
        let (keeper, _) = builder.init(Choice::Route(route)).unwrap();
        keeper.db().create_agent_run_table().unwrap();
        fill(&keeper, site);
        let kind = |(column, key): &(usize, i64)| Kind::of(key + *column as i64);
        let before = facts(site);
        let moved = before.keys().filter(|place| kind(place).is_moved()).count() as u64;

        let done = keeper.rotation().online(online).run().unwrap();
        let new = done.target.unwrap().to_string();
        assert_eq!((done.moved, done.proven), (moved, false));
        let after = facts(site);
        for (place, fact) in &before {
            if kind(place).is_moved() {
                let expected = Fact { kid: new.clone(), whole: after[place].whole, ..fact.clone() };
                assert_eq!(after[place], expected, "{place:?}");
                assert_ne!(fact.whole, after[place].whole);
            } else {
                assert_eq!(after[place], *fact, "{place:?} {:?}", kind(place));
            }
        }
        // Every damaged one is named, and no other.
        let of = |place: &(usize, i64)| Some((*place, kind(place).error()?.to_owned()));
        let named: BTreeMap<(usize, i64), String> = before.keys().filter_map(of).collect();
        let open = done.open.iter().map(|entry| {
            let column = columns().iter().position(|column| column.name() == entry.column).unwrap();
            let Key::Integer(key) = entry.key else { panic!("{:?}", entry.key) };
            ((column, key), entry.error.clone())
        });
        assert_eq!(open.collect::<BTreeMap<_, _>>(), named);
        // Every other one opens to what was sealed.
        opens(&keeper, &kind);

        // A second time nothing is written, not even to the log.
        let (stood, listed) = (files(site), keeper.report().unwrap().databases);
        let again = keeper.rotation().online(online).resume().unwrap();
        assert!(again.nothing && again.moved == 0 && again.open.len() == named.len());
        assert!(files(site) == stood && keeper.report().unwrap().databases == listed, "written");
        // Given up, they stand in no way, and stay as they are.
        for entry in &done.open {
            keeper.db().accept_in_ledger(entry.id, "a test").unwrap();
        }
        let last = keeper.rotation().online(online).resume().unwrap();
        assert!(last.proven && last.moved == 0);
        assert_eq!(facts(site), after);
        let stood = files(site);
        assert!(keeper.rotation().online(online).resume().unwrap().nothing);
        assert!(files(site) == stood, "written");
        println!("{name}: {moved} of {} values moved, {} named", before.len(), named.len());
    });
}

fn opens(keeper: &Keeper, kind: &dyn Fn(&(usize, i64)) -> Kind) {
    for (at, column) in columns().iter().enumerate() {
        let mut after = None;
        loop {
            let page = keeper.db().page(column, after.as_ref(), 1000).unwrap();
            for stored in &page {
                let Key::Integer(key) = stored.key else { panic!("{:?}", stored.key) };
                if kind(&(at, key)).is_moved() {
                    let opened = stored.open(keeper.codec(), column).unwrap().unwrap();
                    assert!(opened.expose() == value(at, key), "{column} {key}");
                }
            }
            let Some(last) = page.last() else { break };
            after = Some(last.key.clone());
        }
    }
}

#[test]
fn online_aes_gcm_caller_iv() {
    rotates(Route::GcmCallerIv, true);
}

#[test]
fn atomic_aes_kw_wrap() {
    rotates(Route::KwWrap, false);
}
