//! Registered columns: the schema, reading, counting, discovery, sealing in place.

#![allow(clippy::unwrap_used, clippy::missing_panics_doc, missing_docs)]

#[path = "support/memory_keys.rs"]
mod memory_keys;
#[path = "support/store.rs"]
mod support;

use std::process::Command;

use hardwrap::codec;
use hardwrap::column::{Cleartext, Column, Register, Row, nr_llm};
use hardwrap::envelope::Marker;
use hardwrap::store::{BadRow, ColumnFact, Error, Found, Key, KeyFact, RowFact, SealedInPlace, TableFact};
use support::{KID, Shop, path};

fn iban() -> Column {
    Column::new("customer", "iban", "id", "shop:customer:iban").unwrap()
}

fn with_customers(declared: &str) -> Shop {
    let shop = Shop::new();
    shop.sql(&format!("CREATE TABLE customer (id INTEGER PRIMARY KEY, iban {declared}, ref TEXT)"));
    shop
}

#[test]
fn the_schema_gives_each_column_its_capacity() {
    let shop = with_customers("VARCHAR(255)");
    let mut register = Register::new([nr_llm(), vec![iban()]].concat()).unwrap();
    let facts = shop.db.describe(&mut register).unwrap();
    for fact in &facts {
        fact.usable().unwrap();
    }
    assert_eq!(facts[0].column, ColumnFact::Declared("mediumtext".into()));
    assert_eq!(facts[0].row, RowFact::Bindable("varchar(36)".into()));
    assert_eq!((facts[2].table, facts[2].key, &facts[2].row), (TableFact::Table, KeyFact::Unique, &RowFact::Unbound));
    let capacities: Vec<_> = register.columns().iter().map(|column| column.capacity().0).collect();
    assert_eq!(capacities, [Some(16_777_215), Some(16_777_215), Some(255)]);
}

#[test]
fn what_is_missing_or_unfit_is_named() {
    let shop = with_customers("TEXT");
    shop.sql(
        "CREATE VIEW seen AS SELECT * FROM customer; \
         CREATE TABLE odd (id, amount DOUBLE, cut TEXT, doubled TEXT AS (cut || cut), \"at\" DATETIME, tag TEXT \
              UNIQUE)",
    );
    let facts = |column: Column| shop.db.describe(&mut Register::new(vec![column]).unwrap()).unwrap().remove(0);
    let of = |table: &'static str, name: &'static str, key: &'static str| Column::new(table, name, key, "x").unwrap();
    assert!(matches!(facts(of("nowhere", "a", "b")).usable(), Err(Error::NoTable(t)) if t == "nowhere"));
    assert!(matches!(facts(of("seen", "iban", "id")).usable(), Err(Error::NotATable { kind: "view", .. })));
    assert!(matches!(facts(of("customer", "bic", "id")).usable(), Err(Error::NoColumn(c)) if c == "customer.bic"));
    assert!(matches!(facts(of("customer", "iban", "no")).usable(), Err(Error::NoColumn(c)) if c == "customer.no"));
    assert!(matches!(facts(of("odd", "doubled", "tag")).usable(), Err(Error::Generated(_))));
    assert!(matches!(facts(of("odd", "cut", "id")).usable(), Err(Error::KeyNotUnique(_))));
    facts(of("odd", "cut", "tag")).usable().unwrap();
    facts(of("main.ODD", "CUT", "Tag")).usable().unwrap();
    let bound = |row: &'static str| facts(of("odd", "cut", "tag").bound_to(row).unwrap());
    assert!(matches!(bound("gone").usable(), Err(Error::NoColumn(c)) if c == "odd.gone"));
    for row in ["amount", "at"] {
        assert!(matches!(bound(row).usable(), Err(Error::NotBindable { .. })), "{row}");
    }
    bound("id").usable().unwrap();
}

#[test]
fn one_database_column_is_not_registered_twice_under_two_spellings() {
    let shop = with_customers("TEXT");
    shop.sql(
        "CREATE TABLE \"a.b\" (id INTEGER PRIMARY KEY, c TEXT); CREATE TABLE a (id INTEGER PRIMARY KEY, \"b.c\" TEXT)",
    );
    let pairs = [
        (("customer", "iban"), ("main.customer", "iban")),
        (("customer", "iban"), ("CUSTOMER", "IBAN")),
        (("Main.Customer", "Iban"), ("MAIN.customer", "iban")),
        (("not_yet", "there"), ("main.NOT_YET", "There")),
        (("A.b", "c"), ("a", "B.c")), // two columns, and both would be called a.b.c
    ];
    for ((table, name), (other_table, other_name)) in pairs {
        let one = Column::new(table, name, "id", "one").unwrap();
        let other = Column::new(other_table, other_name, "id", "other").unwrap();
        let mut register = Register::new(vec![one.clone(), other.clone()]).unwrap();
        let error = shop.db.describe(&mut register).unwrap_err();
        let Error::RegisteredTwice { first, second } = &error else { panic!("{error}") };
        assert_eq!((first, second), (&one.to_string(), &other.to_string()));
        assert_eq!(register.columns(), [one, other], "the register stays as it was");
    }
}

#[test]
fn a_described_column_has_the_names_that_the_schema_gives_it() {
    let shop = with_customers("TEXT");
    shop.sql("CREATE TABLE \"main.Odd\" (id INTEGER PRIMARY KEY, v TEXT)");
    let written = Column::new("MAIN.Customer", "IBAN", "ID", "x").unwrap().bound_to("REF").unwrap();
    let odd = Column::new("main.main.odd", "V", "id", "y").unwrap();
    let mut register = Register::new(vec![written, odd]).unwrap();
    let facts = shop.db.describe(&mut register).unwrap();
    let column = register.find("customer.iban").unwrap();
    assert_eq!((column.table(), column.name(), column.key(), column.row()), ("customer", "iban", "id", Some("ref")));
    assert_eq!((column.identifier(), facts[0].name.as_str()), ("x", "customer.iban"));
    assert_eq!(register.find("MAIN.Customer.IBAN").unwrap(), column);
    assert_eq!(register.columns()[1].to_string(), "main.main.Odd.v");
    for fact in shop.db.describe(&mut register).unwrap() {
        fact.usable().unwrap();
    }
    assert!(register.find("main.main.odd.V").is_ok());
}

#[test]
fn a_row_column_that_sqlite_may_rewrite_is_refused_by_name() {
    let shop = Shop::new();
    for (declared, affinity, integer) in [
        ("uuid", Some("NUMERIC"), false),
        ("STRING", Some("NUMERIC"), false),
        ("boolean", Some("NUMERIC"), false),
        ("decimal(10,2)", Some("NUMERIC"), false),
        ("double", Some("REAL"), false),
        ("blob", Some("BLOB"), false),
        ("", None, false),
        ("varchar(36)", None, false),
        ("TEXT", None, false),
        ("bigint", None, true),
    ] {
        shop.sql(&format!("DROP TABLE IF EXISTS t; CREATE TABLE t (id INTEGER PRIMARY KEY, v TEXT, r {declared})"));
        let column = Column::new("t", "v", "id", "x").unwrap().bound_to("r").unwrap();
        let facts = shop.db.describe(&mut Register::new(vec![column.clone()]).unwrap()).unwrap().remove(0);
        assert_eq!(facts.row_is_integer(), integer, "{declared}");
        shop.sql("INSERT INTO t VALUES (1, 'x', '00123')");
        let kept = shop.db.read(&column, "1").unwrap().unwrap().row == Ok(Some(Row::try_from("00123").unwrap()));
        match (facts.usable(), affinity) {
            (Ok(()), None) => assert_eq!(kept, !integer, "{declared}"),
            (Err(error @ Error::NotBindable { .. }), Some(affinity)) => {
                let said = error.to_string().replace("BLOB\",", "blob\","); // SQLite writes this one so
                assert!(said.contains("t.r") && said.contains(declared) && said.contains(affinity), "{said}");
            }
            (usable, _) => panic!("{declared}: {usable:?}"),
        }
    }
    let unbound = Column::new("t", "v", "id", "x").unwrap();
    assert!(!shop.db.describe(&mut Register::new(vec![unbound]).unwrap()).unwrap()[0].row_is_integer());
}

#[test]
fn a_quoted_name_that_is_no_column_is_never_taken_for_a_string() {
    let shop = with_customers("TEXT");
    shop.sql("INSERT INTO customer VALUES (1, 'x', 'r')");
    let wrong = Column::new("customer", "iben", "id", "x").unwrap();
    assert!(matches!(shop.db.page(&wrong, None, 10), Err(Error::NoColumn(_))));
    assert!(matches!(shop.db.count(&wrong), Err(Error::NoColumn(_))));
    let wrong = Column::new("custommer", "iban", "id", "x").unwrap();
    assert!(matches!(shop.db.read(&wrong, "1"), Err(Error::NoTable(_))));
    let wrong = Column::new("customer", "iban", "idd", "x").unwrap();
    assert!(matches!(shop.db.read(&wrong, "1"), Err(Error::NoColumn(_))));
}

#[test]
fn names_with_quotes_blanks_and_dots_are_names() {
    let shop = Shop::new();
    shop.sql(
        "CREATE TABLE \"my \"\"odd\"\".table; --\" (\"the key\" INTEGER PRIMARY KEY, \"va\"\"lue '?\" TEXT, \
        \"select\" TEXT); \
         INSERT INTO \"my \"\"odd\"\".table; --\" VALUES (7, 'clear', 'row')",
    );
    let column =
        Column::new("my \"odd\".table; --", "va\"lue '?", "the key", "odd").unwrap().bound_to("select").unwrap();
    let mut register = Register::new(vec![column.clone()]).unwrap();
    shop.db.describe(&mut register).unwrap()[0].usable().unwrap();
    assert_eq!(shop.db.seal_cleartext(&shop.codec, &column, &7.into()).unwrap(), SealedInPlace::Sealed);
    let stored = shop.db.read(&column, "7").unwrap().unwrap();
    assert_eq!(stored.open(&shop.codec, &column).unwrap().unwrap().expose(), b"clear");
    assert_eq!(shop.db.count(&column).unwrap().sealed_total(), 1);
    assert_eq!(shop.db.sample(&column, 5).unwrap().len(), 1);
    let found = Found { table: column.table().into(), column: column.name().into(), count: 1 };
    assert_eq!(shop.db.find_envelopes().unwrap(), [found]);
}

fn walk(shop: &Shop, column: &Column, limit: u32) -> Vec<String> {
    let (mut after, mut keys) = (None, Vec::new());
    loop {
        let page = shop.db.page(column, after.as_ref(), limit).unwrap();
        let Some(last) = page.last() else { return keys };
        keys.extend(page.iter().map(|row| row.key.to_string()));
        after = Some(last.key.clone());
        assert!(keys.len() < 1000, "the walk does not end");
    }
}

#[test]
fn pages_over_integer_keys_show_every_row_once() {
    let shop = with_customers("TEXT");
    shop.sql("INSERT INTO customer VALUES (-5, NULL, ''), (2, '', ''), (10, 'x', ''), (9007199254740993, x'ff', '')");
    for limit in 1..6 {
        assert_eq!(walk(&shop, &iban(), limit), ["-5", "2", "10", "9007199254740993"], "{limit}");
    }
}

#[test]
fn pages_over_text_keys_follow_the_order_of_the_key_column() {
    let shop = Shop::new();
    let column = Column::new("note", "body", "name", "note").unwrap();
    shop.sql(
        "CREATE TABLE note (name TEXT PRIMARY KEY, body TEXT); INSERT INTO note VALUES \
         ('10','a'),('9','b'),('B','c'),('a','d'),('ä','e'),('','f')",
    );
    shop.sql(
        "INSERT INTO note VALUES (CAST(x'ff41' AS TEXT), 'not UTF-8'), (CAST(x'ff42' AS TEXT), 'nor \
         this'), (x'00', 'BLOB'), (x'', 'empty'), (NULL, 'out of reach')",
    );
    for limit in 1..11 {
        assert_eq!(
            walk(&shop, &column, limit),
            ["", "10", "9", "B", "a", "ä", "x'ff41'", "x'ff42'", "x''", "x'00'"],
            "{limit}"
        );
    }
    assert_eq!(shop.db.count(&column).unwrap().keyless, 1);
    shop.sql(
        "CREATE TABLE loose (name TEXT PRIMARY KEY COLLATE NOCASE, body TEXT); INSERT INTO loose VALUES \
         ('b',''),('A',''),('C','')",
    );
    let loose = Column::new("loose", "body", "name", "loose").unwrap();
    assert_eq!(walk(&shop, &loose, 1), ["A", "C", "b"]);
}

#[test]
fn no_row_at_the_edge_of_a_page_is_skipped_whatever_the_collations_of_key_and_index() {
    let shop = Shop::new();
    let column = Column::new("note", "body", "k", "note").unwrap();
    for key in [
        "k TEXT COLLATE NOCASE, body TEXT, UNIQUE (k COLLATE BINARY)",
        "k TEXT COLLATE RTRIM, body TEXT, UNIQUE (k COLLATE BINARY)",
        "k TEXT COLLATE NOCASE PRIMARY KEY COLLATE BINARY, body TEXT",
        "k TEXT, body TEXT, UNIQUE (k COLLATE BINARY)",
    ] {
        shop.sql(&format!(
            "DROP TABLE IF EXISTS note; CREATE TABLE note ({key}); \
             WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 199) \
             INSERT INTO note SELECT printf('a%03d', i), 'x' FROM n"
        ));
        shop.sql("INSERT INTO note VALUES ('ZZ', '1'), ('zz', '2'), ('zz ', '3'), ('zZ', '4'), ('a000', '5')");
        let facts = shop.db.describe(&mut Register::new(vec![column.clone()]).unwrap()).unwrap().remove(0);
        facts.usable().unwrap_or_else(|error| panic!("{key}: {error}"));
        for limit in [200, 201, 202, 203, 1, 7] {
            let mut keys = walk(&shop, &column, limit);
            assert_eq!(keys.len(), 204, "{key}: {limit}");
            keys.sort();
            keys.dedup();
            assert_eq!(keys.len(), 204, "{key}: {limit}");
        }
        for (key, value) in [("ZZ", "1"), ("zz", "2"), ("zz ", "3"), ("zZ", "4")] {
            let stored = shop.db.read_key(&column, &key.into()).unwrap().unwrap();
            assert_eq!(stored.value.unwrap().bytes(), value.as_bytes());
            assert_eq!(shop.db.seal_cleartext(&shop.codec, &column, &key.into()).unwrap(), SealedInPlace::Sealed);
        }
        assert_eq!(shop.db.count(&column).unwrap().sealed_total(), 4);
        assert_eq!(shop.db.sample(&column, 50).unwrap().len(), 50);
        assert!(shop.db.read(&column, "Zz").unwrap().is_none());
    }
}

#[test]
fn paging_by_a_key_walks_its_index() {
    let shop = Shop::new();
    shop.sql("CREATE TABLE note (id INTEGER PRIMARY KEY, name TEXT UNIQUE)");
    for key in ["id", "name"] {
        let plan = format!(
            "EXPLAIN QUERY PLAN SELECT * FROM note AS t WHERE t.{key} COLLATE BINARY > 1 ORDER BY t.{key} COLLATE \
             BINARY LIMIT 5"
        );
        let plan = shop.plan(&plan);
        assert!(plan.contains("SEARCH") && !plan.contains("TEMP B-TREE"), "{plan}");
    }
}

#[test]
fn the_way_back_to_a_row_is_its_key_and_not_what_is_shown_of_it() {
    let shop = Shop::new();
    shop.sql("CREATE TABLE note (k UNIQUE, v); INSERT INTO note VALUES ('a' || char(27) || char(10), '1'), (x'0a', '2'), ('7', '3')");
    let column = Column::new("note", "v", "k", "note").unwrap();
    let page = shop.db.page(&column, None, 10).unwrap();
    let shown: Vec<_> = page.iter().map(|row| row.key.to_string()).collect();
    assert_eq!(shown, ["7", r"a\u{1b}\n", "x'0a'"]);
    for row in page {
        let found = shop.db.read_key(&column, &row.key).unwrap().unwrap();
        assert_eq!(found.value.unwrap().bytes(), row.value.unwrap().bytes());
    }
}

#[test]
fn pages_over_keys_of_every_kind_show_every_row_once() {
    let shop = Shop::new();
    shop.sql(
        "CREATE TABLE mixed (k UNIQUE, v); INSERT INTO mixed VALUES \
         (10,''),(9,''),(9.5,''),(CAST(x'01ff' AS TEXT),''),(0.1,''),('10',''),('9',''),(CAST(x'ff' AS TEXT),''), \
         (CAST(x'fe' AS \
         TEXT),''),(x'01','')",
    );
    let column = Column::new("mixed", "v", "k", "mixed").unwrap();
    for limit in 1..11 {
        assert_eq!(
            walk(&shop, &column, limit),
            ["0.1", "9", "9.5", "10", "x'01ff'", "10", "9", "x'fe'", "x'ff'", "x'01'"],
            "{limit}"
        );
    }
    shop.sql("UPDATE mixed SET v = CASE typeof(k) WHEN 'integer' THEN 'number' ELSE 'text' END");
    assert_eq!(shop.db.read(&column, "9").unwrap().unwrap().value.unwrap().bytes(), b"text");
    shop.sql("DELETE FROM mixed WHERE k = '9'");
    assert_eq!(shop.db.read(&column, "9").unwrap().unwrap().value.unwrap().bytes(), b"number");
    assert!(shop.db.read(&column, "8").unwrap().is_none());
}

#[test]
fn one_bad_row_never_breaks_a_page() {
    let shop = with_customers("TEXT");
    let column = iban().bound_to("ref").unwrap().cleartext(Cleartext::Accept);
    let place = "INSERT INTO customer VALUES";
    shop.sql(&format!(
        "{place} (1, CAST(x'fffe' AS TEXT), 'r'), (2, x'c3a9', 'r'), (3, 'x', NULL), (4, 'x', ''), (5, 'x', x'41'), \
         (6, 'x', CAST(x'ff' AS TEXT)), (7, NULL, NULL), (8, '', NULL), (9, 'x', 'r'), (10, 5, 'r')"
    ));
    let page = shop.db.page(&column, None, 100).unwrap();
    let said: Vec<_> = page
        .iter()
        .map(|row| match row.open(&shop.codec, &column) {
            Ok(None) => "null".to_owned(),
            Ok(Some(plaintext)) => String::from_utf8(plaintext.expose().to_vec()).unwrap(),
            Err(Error::NotText) => "not text".to_owned(),
            Err(Error::BadRow(bad)) => format!("{bad:?}"),
            Err(error) => panic!("{error}"),
        })
        .collect();
    assert_eq!(said, ["not text", "é", "Null", "Empty", "Blob", "NotText", "null", "", "x", "5"]);
    let real = iban().bound_to("weight").unwrap();
    shop.sql("ALTER TABLE customer ADD COLUMN weight REAL DEFAULT 1.5");
    assert_eq!(shop.db.read(&real, "9").unwrap().unwrap().row, Err(BadRow::Real));
}

#[test]
fn a_row_value_is_the_text_as_stored_and_an_integer_in_decimal() {
    let shop = with_customers("TEXT");
    shop.sql("INSERT INTO customer VALUES (-7, 'x', ' Öl ')");
    let row = |name: &'static str| shop.db.read(&iban().bound_to(name).unwrap(), "-7").unwrap().unwrap().row;
    assert_eq!(row("id"), Ok(Some(Row::from(-7))));
    assert_eq!(row("ref"), Ok(Some(Row::try_from(" Öl ").unwrap())));
    assert_eq!(shop.db.read(&iban(), "-7").unwrap().unwrap().row, Ok(None));
}

#[test]
fn counting_in_sql_agrees_with_the_one_recogniser() {
    let shop = with_customers("TEXT");
    let kid = KID;
    let mut values: Vec<Vec<u8>> = [
        "",
        " ",
        "x",
        "hw1:",
        "hw1",
        "hw",
        "h",
        "HW1:",
        "Hw1:x",
        " hw1:",
        "hw1 :",
        "hw:",
        "hw:1",
        "hw10:",
        "hw1x:",
        "hw01:",
        "hw2:x",
        "hw2",
        "hw99999999999999999999:",
        "hw1\0:",
        "hw1\0",
        "hw\x001:",
        "\0hw1:",
        "hw1:\0",
        "hw2\0:",
        "hw2:\0",
        "hw22:a:b",
        "hw-1:",
        "hw+1:",
        "hw1.5:",
        "hw٣:",
        "hw3٣:",
        "nrv1:",
        "nrv1",
        "NRV1:",
        "nrv2:",
        "v2:",
        "v2",
        "V2:",
        "v20:",
        "v2:hw1:",
        "nrv1:\0",
        "{\"a\":\"hw1:\"}",
        "hw*:",
        "hw[0-9]:",
        "hw?:",
        "hw1:*",
        "hw%",
        "5",
        "1.5",
        "null",
        "\u{feff}hw1:",
        "é",
    ]
    .into_iter()
    .map(|text| text.as_bytes().to_vec())
    .collect();
    for front in
        [kid, "000102030405060", "00010203040506070", "000102030405060A", "000102030405060g", "00010203\x000405060"]
    {
        for end in ["", ":", ":e30=.AAAA", ":\0", " :", "é:"] {
            values.push(format!("hw1:{front}{end}").into_bytes());
        }
    }
    let mut id = 0;
    for value in &values {
        let hex: String = value.iter().map(|byte| format!("{byte:02x}")).collect();
        for stored in [format!("CAST(x'{hex}' AS TEXT)"), format!("x'{hex}'")] {
            id += 1;
            shop.sql(&format!("DELETE FROM customer; INSERT INTO customer VALUES ({id}, {stored}, NULL)"));
            let counts = shop.db.count(&iban()).unwrap();
            let text = String::from_utf8(value.clone()).unwrap();
            let well_formed = text.get(4..20).is_some_and(|kid| kid.parse::<hardwrap::provider::KeyId>().is_ok())
                && text.as_bytes().get(20) == Some(&b':');
            let expected = match Marker::of(&text) {
                Marker::Empty => counts.empty,
                Marker::Hw1 if well_formed => counts.sealed[&kid.parse().unwrap()],
                Marker::Hw1 => counts.damaged,
                Marker::HwOther => counts.other_version,
                Marker::Foreign => counts.foreign,
                Marker::None => counts.cleartext,
            };
            assert_eq!((counts.total, expected), (1, 1), "{text:?} as {stored}: {counts:?}");
            let found = shop.db.find_envelopes().unwrap().len();
            assert_eq!(found, usize::from(Marker::of(&text) == Marker::Hw1 && well_formed), "{text:?}");
        }
    }
    shop.sql(
        "DELETE FROM customer; INSERT INTO customer VALUES (1, NULL, ''), (2, 5, ''), (3, 1.5, ''), (4, x'ff', '')",
    );
    let counts = shop.db.count(&iban()).unwrap();
    assert_eq!((counts.total, counts.null, counts.cleartext), (4, 1, 3));
}

#[test]
fn arbitrary_bytes_are_counted_as_the_recogniser_says() {
    use proptest::prelude::*;
    let shop = with_customers("TEXT");
    let cases = ProptestConfig::with_cases(200);
    proptest!(cases, |(text in "(hw|HW|nrv|v|)[0-9\x00]{0,3}(:|)[0-9a-g]{0,17}(:|)[ -~é\x00]{0,6}")| {
        let hex: String = text.bytes().map(|byte| format!("{byte:02x}")).collect();
        shop.sql(&format!("DELETE FROM customer; INSERT INTO customer VALUES (1, CAST(x'{hex}' AS TEXT), NULL)"));
        let counts = shop.db.count(&iban()).unwrap();
        let counted = match Marker::of(&text) {
            Marker::Empty => counts.empty,
            Marker::Hw1 => counts.damaged + counts.sealed_total(),
            Marker::HwOther => counts.other_version,
            Marker::Foreign => counts.foreign,
            Marker::None => counts.cleartext,
        };
        prop_assert_eq!((counts.total, counted), (1, 1), "{:?}: {:?}", text, counts);
    });
}

#[test]
fn the_counts_carry_the_sql_that_repeats_them() {
    let shop = with_customers("TEXT");
    shop.sql(&format!("INSERT INTO customer VALUES (1, 'hw1:{KID}:e30=.AAAA', ''), (2, 'clear', '')"));
    let counts = shop.db.count(&iban()).unwrap();
    assert_eq!((counts.sealed_total(), counts.cleartext), (1, 1));
    assert_eq!(shop.number(&format!("SELECT total FROM ({}) WHERE kind = '{KID}'", counts.sql)), 1);
}

#[test]
fn envelopes_are_found_in_every_column_of_every_table() {
    let shop = with_customers("TEXT");
    let sealed = format!("hw1:{KID}:e30=.AAAA");
    shop.sql(&format!(
        "CREATE TABLE \"a.b\" (n INTEGER, b BLOB, untyped); INSERT INTO \"a.b\" VALUES (1, CAST('{sealed}' AS \
        BLOB), '{sealed}'), ('{sealed}', 'HW1:{KID}:', 'hw1:');
         CREATE TABLE hardwrap_own (v); INSERT INTO hardwrap_own VALUES ('{sealed}');
         CREATE VIRTUAL TABLE words USING fts5(body); INSERT INTO words VALUES ('{sealed}');
         CREATE VIEW seen AS SELECT * FROM \"a.b\"; INSERT INTO customer VALUES (1, ' {sealed}', '')"
    ));
    let found: Vec<_> = shop.db.find_envelopes().unwrap().into_iter().map(|f| (f.table, f.column, f.count)).collect();
    let here = ["n", "b", "untyped"].map(|column| ("a.b".to_owned(), column.to_owned(), 1));
    let shadow = ("words_content".to_owned(), "c0".to_owned(), 1);
    assert_eq!(found, [here.to_vec(), vec![shadow]].concat());
    let found = Found { table: "a.b".into(), column: "n\u{1b}".into(), count: 1 };
    assert!(found.is("a.b", "N\u{1b}") && found.is("Main.A.B", "n\u{1b}") && !found.is("a", "b.n\u{1b}"));
    assert_eq!(found.to_string(), r"a.b.n\u{1b}");
}

#[test]
fn a_sample_is_drawn_from_rows_that_hold_a_value() {
    let shop = with_customers("TEXT");
    shop.sql("INSERT INTO customer VALUES (1, NULL, ''), (2, '', ''), (3, 'a', ''), (4, 'b', ''), (5, 'c', '')");
    assert_eq!(shop.db.sample(&iban(), 10).unwrap().len(), 3);
    assert_eq!(shop.db.sample(&iban(), 2).unwrap().len(), 2);
}

#[test]
fn cleartext_is_sealed_in_place_once() {
    let shop = with_customers("TEXT");
    let column = iban().bound_to("id").unwrap();
    shop.sql(
        "INSERT INTO customer VALUES (1, 'DE02', ''), (2, '', ''), (3, NULL, ''), (4, x'44453033', ''), \
         (5, 'nrv1:x', ''), (6, CAST(x'ff' AS TEXT), '')",
    );
    let seal = |key: i64| shop.db.seal_cleartext(&shop.codec, &column, &key.into());
    for (key, outcome) in [
        (1, SealedInPlace::Sealed),
        (2, SealedInPlace::Nothing),
        (3, SealedInPlace::Nothing),
        (4, SealedInPlace::Sealed),
        (5, SealedInPlace::Nothing),
        (99, SealedInPlace::Nothing),
    ] {
        assert_eq!(seal(key).unwrap(), outcome, "{key}");
        assert_ne!(seal(key).unwrap(), SealedInPlace::Sealed, "{key} again");
    }
    assert!(matches!(seal(6), Err(Error::NotText)));
    for (key, value) in [("1", b"DE02"), ("4", b"DE03")] {
        let stored = shop.db.read(&column, key).unwrap().unwrap();
        assert_eq!(stored.open(&shop.codec, &column).unwrap().unwrap().expose(), value);
    }
    assert_eq!(shop.text("SELECT typeof(iban) FROM customer WHERE id = 4").unwrap(), "text");
}

#[test]
fn a_concurrent_writer_wins_over_sealing_in_place() {
    let shop = with_customers("TEXT COLLATE NOCASE");
    shop.sql("INSERT INTO customer VALUES (1, 'score 0.5', '')");
    // The writer comes between the read and the write: when the key is asked. It changes nothing but case.
    struct Meddling<'a>(&'a Shop);
    impl hardwrap::provider::KeyProvider for Meddling<'static> {
        fn current(&self) -> Result<hardwrap::provider::MasterKey, hardwrap::provider::ProviderError> {
            self.0.sql("UPDATE customer SET iban = 'SCORE 0.5'");
            self.0.keys.current()
        }
        fn wrap(
            &self,
            key: hardwrap::provider::KeyId,
            dek: &hardwrap::secret::Dek,
            aad: &hardwrap::provider::Aad,
        ) -> Result<hardwrap::provider::WrappedDek, hardwrap::provider::ProviderError> {
            self.0.keys.wrap(key, dek, aad)
        }
        fn unwrap(
            &self,
            wrapped: &hardwrap::provider::WrappedDek,
            aad: &hardwrap::provider::Aad,
        ) -> Result<hardwrap::secret::Dek, hardwrap::provider::ProviderError> {
            self.0.keys.unwrap(wrapped, aad)
        }
    }
    let shop: &'static Shop = Box::leak(Box::new(shop));
    let codec = codec::Codec::new(std::sync::Arc::new(Meddling(shop)));
    assert_eq!(shop.db.seal_cleartext(&codec, &iban(), &1.into()).unwrap(), SealedInPlace::Changed);
    assert_eq!(shop.text("SELECT iban FROM customer").unwrap(), "SCORE 0.5");
    std::fs::remove_dir_all(shop.dir.path()).unwrap();
}

#[test]
fn sealing_under_a_key_that_two_rows_share_changes_neither() {
    let shop = with_customers("TEXT");
    shop.sql("INSERT INTO customer VALUES (1, 'a', 'same'), (2, 'a', 'same')");
    let column = Column::new("customer", "iban", "ref", "x").unwrap();
    assert!(matches!(shop.db.seal_cleartext(&shop.codec, &column, &Key::from("same")), Err(Error::KeyNotUnique(_))));
    assert_eq!(shop.number("SELECT COUNT(*) FROM customer WHERE iban = 'a'"), 2);
}

#[test]
fn an_unavailable_key_leaves_cleartext_as_it_was_and_says_so() {
    let shop = with_customers("TEXT");
    shop.sql("INSERT INTO customer VALUES (1, 'DE02', '')");
    shop.keys.set_unavailable(true);
    let error = shop.db.seal_cleartext(&shop.codec, &iban(), &1.into()).unwrap_err();
    assert!(matches!(error, Error::Codec(codec::Error::Unavailable(_))), "{error}");
    assert_eq!(shop.text("SELECT iban FROM customer").unwrap(), "DE02");
}

#[test]
fn what_does_not_fit_is_refused_before_anything_is_written() {
    let shop = with_customers("varchar(255)");
    shop.sql("INSERT INTO customer VALUES (1, 'DE02', '')");
    let mut register = Register::new(vec![iban()]).unwrap();
    shop.db.describe(&mut register).unwrap();
    let error = shop.db.seal_cleartext(&shop.codec, &register.columns()[0], &1.into()).unwrap_err();
    assert!(matches!(error, Error::Codec(codec::Error::TooLarge { holds: 255, .. })), "{error}");
    assert_eq!(shop.text("SELECT iban FROM customer").unwrap(), "DE02");
}

#[test]
fn twelve_mebibytes_do_not_fit_into_mediumtext() {
    let shop = Shop::new();
    let json = format!("\"{}\"", "x".repeat((12 << 20) - 2));
    let error = shop.runs().enqueue(&hardwrap::store::NewRun::default(), &json, 1).unwrap_err();
    let Error::Codec(codec::Error::TooLarge { needs, holds, .. }) = error else { panic!("{error}") };
    assert!(needs > 16_777_215 && holds == 16_777_215, "{needs} {holds}");
    assert_eq!(shop.number("SELECT COUNT(*) FROM tx_nrllm_agentrun"), 0);
}

#[test]
fn after_sealing_no_cleartext_stays_in_the_files() {
    let shop = with_customers("TEXT");
    let (short, long) = ("TOP-SECRET-IBAN-4711", "LONG-SECRET-".repeat(3000));
    shop.sql(&format!("INSERT INTO customer VALUES (1, '{short}', ''), (2, '{long}', '')"));
    let holds = |needle: &str| {
        ["", "-wal"].iter().any(|end| {
            // Read by another process: to close a file of an open database here would take away this one's locks.
            let bytes = Command::new("cat").arg(format!("{}{end}", path(&shop.dir).display())).output().unwrap().stdout;
            bytes.windows(needle.len()).any(|window| window == needle.as_bytes())
        })
    };
    assert!(holds("SECRET-"));
    for key in [1, 2] {
        assert_eq!(shop.db.seal_cleartext(&shop.codec, &iban(), &key.into()).unwrap(), SealedInPlace::Sealed);
    }
    shop.db.truncate_wal().unwrap();
    for needle in ["TOP-SECRET", "LONG-SECRET", "SECRET-"] {
        assert!(!holds(needle), "{needle}");
    }
}
