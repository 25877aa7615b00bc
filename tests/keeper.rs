//! The facade as an embedding application meets it: built in code, checked at start, many values at once.
#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout, reason = "tests")]

#[path = "support/softhsm.rs"]
mod softhsm;
#[path = "support/sqlite.rs"]
mod sqlite;

use std::fs;
use std::process::Command;

use hardwrap::codec;
use hardwrap::column::{Column, Row, Unknown};
use hardwrap::hsm::{self, Choice};
use hardwrap::keeper::{Builder, Error, Keeper};
use hardwrap::provider::ProviderError;
use hardwrap::store;
use softhsm::{Site, SoftHsm};
use sqlite::sqlite3;

fn iban() -> Column {
    Column::new("customer", "iban", "id", "shop:customer:iban").unwrap().bound_to("id").unwrap()
}

fn motto() -> Column {
    Column::new("customer", "motto", "id", "shop:customer:motto").unwrap()
}

/// The shop, in the database `name`.
fn shop(site: &Site, name: &str) -> Builder {
    let url = format!("sqlite://{}/{name}", site.dir().display());
    let made =
        sqlite(site, name, "CREATE TABLE IF NOT EXISTS customer (id INTEGER PRIMARY KEY, iban TEXT, motto TEXT)");
    assert_eq!(made, "");
    Keeper::builder(site.uri().parse().unwrap(), url.parse().unwrap()).columns([iban(), motto()])
}

fn sqlite(site: &Site, name: &str, sql: &str) -> String {
    sqlite3(&site.dir().join(name), sql)
}

#[test]
fn an_application_needs_no_file() {
    SoftHsm::isolated("an_application_needs_no_file", |site| {
        let (made, _) = shop(site, "app.db").init(Choice::Auto).unwrap();
        drop(made);
        let keeper = shop(site, "app.db").sessions(2).open().unwrap();
        let sealed = keeper.seal(iban(), 7, b"DE02").unwrap();
        // By its name, by the column itself, in any of the row's types.
        assert_eq!(keeper.open_value("customer.iban", 7_i64, &sealed).unwrap().expose(), b"DE02");
        let column = iban();
        assert_eq!(keeper.open_value(&column, "7", &sealed).unwrap().expose(), b"DE02");
        assert_eq!(keeper.open_value(iban(), Some(Row::from(7)), &sealed).unwrap().expose(), b"DE02");
        assert!(matches!(keeper.open_value(iban(), 8, &sealed), Err(Error::Codec(codec::Error::Rejected))));
        assert!(matches!(keeper.seal(iban(), (), b"x"), Err(Error::Misplaced(_))));
        assert!(matches!(keeper.seal(motto(), 7, b"x"), Err(Error::Misplaced(_))));
        assert!(matches!(keeper.seal(iban(), "", b"x"), Err(Error::Row(_))));
        let recorder = metrics_util::debugging::DebuggingRecorder::new();
        let seen = recorder.snapshotter();
        metrics::with_local_recorder(&recorder, || {
            let _ = keeper.seal("no.such", 7, b"x");
            let _ = keeper.seal(iban(), "007", b"x");
        });
        let kinds: Vec<String> = seen
            .snapshot()
            .into_vec()
            .into_iter()
            .flat_map(|(key, ..)| key.key().labels().map(|label| label.value().to_owned()).collect::<Vec<_>>())
            .collect();
        assert!(
            ["ColumnUnknown", "RowNotInteger"].iter().all(|kind| kinds.iter().any(|found| found == kind)),
            "{kinds:?}"
        );
        let sealed = keeper.seal(motto(), (), b"carpe diem").unwrap();
        assert_eq!(keeper.open_value(motto(), (), &sealed).unwrap().expose(), b"carpe diem");
        assert_eq!(keeper.rewrap(motto(), (), &sealed).unwrap(), None);

        // Another column of the same name, or bound otherwise, is not the registered one.
        let renamed = Column::new("customer", "iban", "id", "shop:customer:other").unwrap().bound_to("id").unwrap();
        let unbound = Column::new("customer", "iban", "id", "shop:customer:iban").unwrap();
        let moved = Column::new("client", "iban", "id", "shop:customer:iban").unwrap().bound_to("id").unwrap();
        let elsewhere = Column::new("customer", "iban", "id", "shop:customer:iban").unwrap().bound_to("uuid").unwrap();
        for other in [renamed, unbound, moved, elsewhere] {
            let name = other.to_string();
            assert!(
                matches!(keeper.seal(other, 7, b"x"), Err(Error::ColumnUnknown(Unknown(unknown))) if unknown == name)
            );
        }
        // Clones share everything; what is opened is not printed.
        let clone = keeper.clone();
        assert!(std::ptr::eq(keeper.keyring(), clone.keyring()));
        let shown = format!("{keeper:?} {:?}", shop(site, "app.db"));
        assert!(!shown.contains(softhsm::PIN), "{shown}");
    });
}

#[test]
fn a_builder_is_held_to_the_rules_of_the_file() {
    SoftHsm::isolated("a_builder_is_held_to_the_rules_of_the_file", |site| {
        assert!(matches!(shop(site, "app.db").columns([iban()]).open(), Err(Error::Invalid(_))));
        assert!(matches!(shop(site, "app.db").keyring("").open(), Err(Error::Config(_))));
        assert!(matches!(shop(site, "app.db").keyring("k".repeat(65)).open(), Err(Error::Config(_))));
    });
}

#[test]
fn a_table_made_after_the_keeper_opened_is_looked_at_before_anything_is_sealed_for_it() {
    SoftHsm::isolated("a_table_made_after_the_keeper_opened_is_looked_at_before_anything_is_sealed_for_it", |site| {
        let url = format!("sqlite://{}/new.db", site.dir().display()).parse().unwrap();
        let builder = Keeper::builder(site.uri().parse().unwrap(), url).columns([iban(), motto()]);
        let (keeper, _) = builder.init(Choice::Auto).unwrap();
        assert!(matches!(keeper.seal(iban(), 7, b"x"), Err(Error::Store(store::Error::NoTable(_)))));
        sqlite(site, "new.db", "CREATE TABLE Customer (id INTEGER PRIMARY KEY, iban varchar(400))");
        // The same keeper: rows as this database writes them, and no more than the column holds.
        assert!(matches!(keeper.seal(iban(), "007", b"x"), Err(Error::RowNotInteger { .. })));
        let long = keeper.seal(iban(), 7, &[b'x'; 400]);
        assert!(matches!(long, Err(Error::Codec(codec::Error::TooLarge { .. }))), "{long:?}");
        let sealed = keeper.seal(iban(), 7, b"x").unwrap();
        assert_eq!(keeper.open_value(iban(), 7, &sealed).unwrap().expose(), b"x");
        assert!(matches!(keeper.seal(motto(), (), b"x"), Err(Error::Store(store::Error::NoColumn(_)))));
        sqlite(site, "new.db", "ALTER TABLE customer ADD COLUMN motto TEXT");
        keeper.seal(motto(), (), b"x").unwrap();
        // Found once, it is remembered, and shown as it is.
        assert!(keeper.columns().all(|(column, facts)| column.table() == "Customer" && facts.usable().is_ok()));
    });
}

#[test]
fn an_outage_at_start_is_told_from_a_fault() {
    SoftHsm::isolated("an_outage_at_start_is_told_from_a_fault", |own| {
        drop(shop(own, "app.db").init(Choice::Auto).unwrap());
        fs::rename(own.tokens(), own.dir().join("away")).unwrap();
        fs::create_dir(own.tokens()).unwrap();
        let error = shop(own, "app.db").open().unwrap_err();
        assert!(error.is_unavailable() && matches!(error, Error::Token(_)), "{error:?}");
        // A service that has to start all the same.
        let keeper = Keeper::unchecked(&shop(own, "app.db").config().unwrap()).unwrap();
        assert!(keeper.check().unwrap_err().is_unavailable());
        let error = keeper.seal(iban(), 7, b"x").unwrap_err();
        assert!(error.is_unavailable() && matches!(error, Error::Codec(_)), "{error:?}");
        fs::remove_dir(own.tokens()).unwrap();
        fs::rename(own.dir().join("away"), own.tokens()).unwrap();
        let since = std::time::Instant::now();
        while let Err(error) = keeper.check() {
            assert!(error.is_unavailable() && since.elapsed().as_secs() < 5, "{error}");
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
        keeper.seal(iban(), 7, b"x").unwrap();
    });
}

/// A token directory that other tokens can be put into, and databases beside it, each command in a process of its own.
struct Deployment {
    hsm: SoftHsm,
}

impl Deployment {
    fn new() -> Self {
        let deployment = Self { hsm: SoftHsm::new() };
        let text = format!(
            "environment = \"test\"\n[token]\nuri = \"{}\"\n[database]\nurl = \"sqlite://app.db\"\n[[column]]\n\
             table = \"customer\"\ncolumn = \"iban\"\nkey = \"id\"\nidentifier = \"shop:customer:iban\"\nrow = \"id\"\n",
            deployment.hsm.site().uri()
        );
        fs::write(deployment.hsm.site().dir().join("hardwrap.toml"), text).unwrap();
        deployment
    }

    fn run(&self, database: &str, arguments: &[&str]) -> (Option<i32>, String, String) {
        let site = self.hsm.site();
        let done = site
            .command(env!("CARGO_BIN_EXE_hardwrap"))
            .args(arguments)
            .current_dir(site.dir())
            .env_remove("HARDWRAP_TEST_DIR")
            .env("HARDWRAP_DATABASE_URL", format!("sqlite://{database}"))
            .output()
            .unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        (done.status.code(), text(done.stdout), text(done.stderr))
    }

    fn ok(&self, database: &str, arguments: &[&str]) -> String {
        let (code, out, said) = self.run(database, arguments);
        assert_eq!(code, Some(0), "{arguments:?}: {said}");
        out
    }

    fn kid(&self) -> String {
        let list: serde_json::Value = serde_json::from_str(&self.ok("app.db", &["key", "list", "--json"])).unwrap();
        list["keys"][0]["kid"].as_str().unwrap().to_owned()
    }

    /// A copy of the tokens as they are now.
    fn keep(&self, name: &str) {
        let site = self.hsm.site();
        assert!(Command::new("cp").arg("-a").arg(site.tokens()).arg(site.dir().join(name)).status().unwrap().success());
    }

    /// Puts a copy in place of the tokens.
    fn put(&self, name: &str) {
        let site = self.hsm.site();
        fs::remove_dir_all(site.tokens()).unwrap();
        assert!(Command::new("cp").arg("-a").arg(site.dir().join(name)).arg(site.tokens()).status().unwrap().success());
    }

    fn sql(&self, sql: &str) {
        sqlite(&self.hsm.site(), "app.db", sql);
    }

    /// Starting fails with this message, before the row is looked at: it is damaged, and nobody says so.
    fn start_fails(&self, database: &str, code: i32, message: &str) {
        for command in [&["open", "--column", "customer.iban", "--key", "7"][..], &["verify"]] {
            let (found, out, said) = self.run(database, command);
            assert_eq!((found, out.as_str()), (Some(code), ""), "{said}");
            assert!(said.starts_with("hardwrap: ") && said.contains(message), "want: {message}\ngot: {said}");
        }
    }
}

#[test]
fn each_wrong_thing_at_start_is_found_before_any_row_is_read() {
    let shop = Deployment::new();
    shop.sql(
        "CREATE TABLE customer (id INTEGER PRIMARY KEY, iban TEXT); INSERT INTO customer VALUES (7, 'hw1:damaged')",
    );
    shop.start_fails("app.db", 2, "the database has no tables of hardwrap: run `hardwrap init`");
    shop.keep("empty");
    shop.ok("app.db", &["init"]);
    let kid = shop.kid();
    let (_, _, said) = shop.run("app.db", &["open", "--column", "customer.iban", "--key", "7"]);
    assert!(said.contains("malformed envelope"), "{said}");
    shop.keep("one");

    // An empty keyring.
    shop.put("empty");
    shop.start_fails("app.db", 1, &format!("is empty, and this database has seen its key {kid}"));

    // Another token with the same label, which has keys of its own.
    fs::remove_dir_all(shop.hsm.site().tokens()).unwrap();
    fs::create_dir(shop.hsm.site().tokens()).unwrap();
    shop.hsm.site().add_token("hardwrap-test");
    shop.ok("other.db", &["init"]);
    shop.start_fails("app.db", 1, &format!("holds other keys than this database has seen ({kid} is not there)"));
    shop.keep("other");

    // A record from before another database came to the keyring.
    shop.put("one");
    shop.ok("second.db", &["init"]);
    shop.keep("two");
    shop.put("one");
    let (code, _, said) = shop.run("second.db", &["open", "--column", "customer.iban", "--key", "7"]);
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("the keyring record does not name this database: run `hardwrap init`"), "{said}");
    shop.put("two");

    // A record from before a key went further, or was made.
    let seen = |state: &str| shop.sql(&format!("UPDATE hardwrap_key_seen SET state = '{state}' WHERE kid = '{kid}'"));
    seen("deactivated");
    shop.start_fails("app.db", 1, &format!("key {kid} was deactivated and is active; an old copy of the token"));
    seen("a state of a later version");
    shop.start_fails("app.db", 1, "is older than what this database has seen");
    seen("active");
    shop.sql("INSERT INTO hardwrap_key_seen VALUES ('0002000000000001', 'A256GCMKW', 'active', '')");
    shop.start_fails("app.db", 1, "key 0002000000000001 was active and is not recorded; an old copy of the token");
    shop.sql("DELETE FROM hardwrap_key_seen WHERE kid = '0002000000000001'");
    let (_, _, said) = shop.run("app.db", &["open", "--column", "customer.iban", "--key", "7"]);
    assert!(said.contains("malformed envelope"), "all is well again: {said}");
}

#[test]
fn init_takes_another_keyring_only_where_nothing_is_sealed() {
    let shop = Deployment::new();
    shop.sql("CREATE TABLE customer (id INTEGER PRIMARY KEY, iban TEXT)");
    shop.keep("empty");
    shop.ok("app.db", &["init"]);
    let first = shop.kid();
    // Nothing is sealed yet: a new token is a new beginning.
    shop.put("empty");
    shop.ok("app.db", &["init"]);
    shop.ok("app.db", &["verify"]);
    let second = shop.kid();
    assert_ne!(first, second);
    shop.keep("second");

    shop.sql(&format!("INSERT INTO customer VALUES (7, 'hw1:{second}:x.y')"));
    shop.put("empty");
    let (code, _, said) = shop.run("app.db", &["init"]);
    assert!(code == Some(1) && said.contains("(customer.iban) and the keyring has no key"), "{said}");
    shop.ok("other.db", &["init"]);
    let (code, _, said) = shop.run("app.db", &["init"]);
    assert!(code == Some(1) && said.contains("holds other keys than this database has seen"), "{said}");
    shop.put("second");
    shop.ok("app.db", &["init"]);
    let (_, _, said) = shop.run("app.db", &["open", "--column", "customer.iban", "--key", "7"]);
    assert!(said.contains("malformed envelope"), "{said}");
}

#[test]
fn many_values_come_back_in_order_with_an_error_for_each_that_failed() {
    SoftHsm::isolated("many_values_come_back_in_order_with_an_error_for_each_that_failed", |site| {
        let (keeper, _) = shop(site, "app.db").sessions(2).init(Choice::Auto).unwrap();
        // The first block of reserved wraps stands in the record from here on.
        keeper.seal(iban(), 7, b"x").unwrap();
        let objects = keeper.keyring().count_objects().unwrap();
        let values: Vec<(i64, String)> = (0..500).map(|row| (row, format!("value {row}"))).collect();
        let sealed = keeper.seal_many(iban(), &values).unwrap();
        let mut stored: Vec<(i64, String)> =
            sealed.into_iter().enumerate().map(|(row, text)| (i64::try_from(row).unwrap(), text.unwrap())).collect();
        stored[3].0 = 4;
        stored[499].1.pop();
        let opened = keeper.open_many(iban(), &stored).unwrap();
        assert_eq!(opened.len(), 500);
        for (row, opened) in opened.iter().enumerate() {
            match (row, opened) {
                (3, Err(Error::Codec(codec::Error::Rejected)))
                | (499, Err(Error::Codec(codec::Error::Malformed(_)))) => {}
                (_, Ok(value)) => assert_eq!(value.expose(), format!("value {row}").as_bytes()),
                (_, Err(error)) => panic!("{row}: {error}"),
            }
        }
        // Under the key that seals already: nothing to do, and only what stands before the dot is looked at.
        assert!(keeper.rewrap_many(iban(), &stored).unwrap().iter().all(|one| matches!(one, Ok(None))));
        assert!(keeper.seal_many(iban(), &[] as &[(i64, &[u8])]).unwrap().is_empty());
        assert!(matches!(keeper.open_many("no.such", &stored), Err(Error::ColumnUnknown(_))));
        assert_eq!(keeper.keyring().count_objects().unwrap(), objects);

        site.take_away();
        for outcome in keeper.seal_many(iban(), &values[..20]).unwrap() {
            // SoftHSM2 keeps keys in memory: the wrap may succeed. Never anything but a value or `Unavailable`.
            assert!(matches!(outcome, Ok(_) | Err(Error::Codec(codec::Error::Unavailable(_)))));
        }
        site.put_back();
    });
}

#[test]
fn the_return_value_of_the_token_stays_a_value_down_the_chain() {
    SoftHsm::faulty("the_return_value_of_the_token_stays_a_value_down_the_chain", |site| {
        let url = format!("sqlite://{}/app.db", site.dir().display());
        let builder = || Keeper::builder(site.faulty_uri().parse().unwrap(), url.parse().unwrap()).columns([motto()]);
        sqlite(site, "app.db", "CREATE TABLE customer (id INTEGER PRIMARY KEY, motto TEXT)");
        let (keeper, _) = builder().init(Choice::Auto).unwrap();
        site.set_faults("C_Encrypt * 0x30");
        let error = keeper.seal(motto(), (), b"x").unwrap_err();
        let mut next: Option<&dyn std::error::Error> = Some(&error);
        let mut found = None;
        while let Some(error) = next {
            found = found.or_else(|| error.downcast_ref::<hsm::Error>().and_then(hsm::Error::ckr));
            next = error.source();
        }
        assert_eq!(found.map(|ckr| ckr.to_string()).as_deref(), Some("CKR_DEVICE_ERROR"));
        let Error::Codec(codec::Error::Unavailable(ProviderError::Unavailable(source))) = error else {
            panic!("{error}")
        };
        assert!(source.downcast_ref::<hsm::Error>().is_some());
    });
}
