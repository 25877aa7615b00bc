//! Opening, upgrading and locking a database.

#![allow(clippy::unwrap_used, clippy::missing_panics_doc, clippy::print_stdout, missing_docs)]

#[path = "support/memory_keys.rs"]
mod memory_keys;
#[path = "support/store.rs"]
mod support;

use std::fs::Permissions;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::mpsc;
use std::time::Duration;
use std::{env, fs, thread};

use hardwrap::column::{Column, Register};
use hardwrap::provider::{Alg, KeyId};
use hardwrap::store::{BadUrl, DatabaseUrl, Db, Error, Key, SealedInPlace, schema_sql};
use support::{Shop, path, url};

#[test]
fn a_url_names_a_file_and_never_shows_a_password() {
    let url: DatabaseUrl = "sqlite:///var/lib/app.db".parse().unwrap();
    assert_eq!(
        (url.to_string().as_str(), url.path().unwrap().to_str().unwrap()),
        ("sqlite:///var/lib/app.db", "/var/lib/app.db")
    );
    let url: DatabaseUrl = "sqlite://app.db".parse().unwrap();
    assert_eq!(
        (format!("{url:?}").as_str(), url.path().unwrap().to_str().unwrap()),
        ("DatabaseUrl(sqlite://app.db)", "app.db")
    );
    for (text, error) in [
        ("oracle://user:hunter2@db/app", BadUrl::Scheme("oracle".into())),
        ("postgres://user:hunter2@db", BadUrl::Server),
        ("mysql://user:hunter2@db/", BadUrl::Server),
        ("mariadb://user:hunter2@db/app#1", BadUrl::Server),
        ("user:hunter2@db://x", BadUrl::Scheme("?".into())),
        ("hunter2", BadUrl::NoScheme),
        ("sqlite://", BadUrl::Path),
        ("sqlite://:memory:", BadUrl::Path),
        ("sqlite://app.db?mode=memory&key=hunter2", BadUrl::Path),
    ] {
        let refused = text.parse::<DatabaseUrl>().unwrap_err();
        assert!(!format!("{refused} {refused:?}").contains("hunter2"), "{text}");
        assert_eq!(refused, error, "{text}");
    }
}

#[test]
fn a_missing_file_is_refused_and_not_made() {
    let dir = tempfile::tempdir().unwrap();
    let error = Db::open(&url(&dir)).unwrap_err();
    assert!(matches!(error, Error::NoDatabase(_)), "{error}");
    assert!(error.to_string().contains("hardwrap init"));
    assert!(!path(&dir).exists());
    Db::create(&url(&dir)).unwrap();
    assert!(path(&dir).exists());
    Db::open(&url(&dir)).unwrap();
}

#[test]
fn a_file_that_is_no_database_and_one_out_of_reach_are_told_apart() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(path(&dir), [b"no database at all ".as_slice(); 100].concat()).unwrap();
    assert!(matches!(Db::open(&url(&dir)).unwrap_err(), Error::NotADatabase(_)));
    fs::remove_file(path(&dir)).unwrap();
    fs::create_dir(path(&dir)).unwrap();
    assert!(matches!(Db::open(&url(&dir)).unwrap_err(), Error::NotADatabase(_)));
}

#[test]
fn a_place_where_no_database_can_be_made_is_named_and_not_called_unavailable() {
    let dir = tempfile::tempdir().unwrap();
    let at = |path: &str| format!("sqlite://{}/{path}", dir.path().display()).parse::<DatabaseUrl>().unwrap();
    let error = Db::create(&at("gone/app.db")).unwrap_err();
    assert!(matches!(&error, Error::NoPlace(path) if path.ends_with("gone/app.db")), "{error}");
    assert!(error.to_string().ends_with("gone/app.db: no such directory"), "{error}");
    fs::create_dir(dir.path().join("directory")).unwrap();
    assert!(matches!(Db::create(&at("directory")).unwrap_err(), Error::NotADatabase(_)));
    fs::write(dir.path().join("file"), "").unwrap();
    assert!(matches!(Db::create(&at("file/app.db")).unwrap_err(), Error::NoPlace(_)));
}

#[test]
fn a_file_that_is_not_ours_keeps_its_journal_mode_until_it_is_upgraded() {
    let dir = tempfile::tempdir().unwrap();
    let mut other = support::connection(&dir);
    diesel::connection::SimpleConnection::batch_execute(&mut other, "CREATE TABLE a (b)").unwrap();
    drop(other);
    let before = fs::read(path(&dir)).unwrap();
    let db = Db::open(&url(&dir)).unwrap();
    assert!(matches!(db.ready().unwrap_err(), Error::NotInitialised));
    drop(db);
    assert_eq!(fs::read(path(&dir)).unwrap(), before);
    let db = Db::open(&url(&dir)).unwrap();
    db.upgrade().unwrap();
    drop(db);
    assert_eq!(fs::read(path(&dir)).unwrap()[18..20], [2, 2], "a write-ahead log");
}

#[test]
fn our_database_gets_its_log_back_when_it_is_opened() {
    let (dir, connection) = Shop::new().closed();
    drop(connection);
    assert_eq!(fs::read(path(&dir)).unwrap()[18..20], [2, 2]);
    let mut connection = support::connection(&dir);
    diesel::connection::SimpleConnection::batch_execute(&mut connection, "PRAGMA journal_mode = DELETE").unwrap();
    drop(connection);
    assert_eq!(fs::read(path(&dir)).unwrap()[18..20], [1, 1]);
    drop(Db::open(&url(&dir)).unwrap());
    assert_eq!(fs::read(path(&dir)).unwrap()[18..20], [2, 2]);
}

/// What an auditor does with a copy that cannot be written: everything but writing.
fn read_all_and_write_nothing(at: &DatabaseUrl) {
    let column = Column::new("customer", "iban", "id", "shop:customer:iban").unwrap();
    let db = Db::open(at).unwrap();
    db.ready().unwrap();
    for facts in db.describe(&mut Register::new(vec![column.clone()]).unwrap()).unwrap() {
        facts.usable().unwrap();
    }
    assert_eq!(db.count(&column).unwrap().cleartext, 2);
    assert_eq!(db.page(&column, None, 10).unwrap().len(), 2);
    assert_eq!(db.sample(&column, 1).unwrap().len(), 1);
    assert!(db.read(&column, "1").unwrap().is_some());
    assert_eq!(db.find_envelopes().unwrap(), []);
    let keys = memory_keys::MemoryKeys::one([0, 1, 2, 3, 4, 5, 6, 7].into(), Alg::A256Kw, [9; 32]);
    let codec = hardwrap::codec::Codec::new(std::sync::Arc::new(keys));
    let error = db.seal_cleartext(&codec, &column, &1.into()).unwrap_err();
    assert!(matches!(error, Error::ReadOnly), "{error}");
    assert_eq!(error.to_string(), "the database is read-only");
    assert!(matches!(db.note_key([1; 8].into(), Alg::A256Kw, "active"), Err(Error::ReadOnly)));
    assert!(matches!(db.upgrade(), Err(Error::ReadOnly)));
    assert!(matches!(db.exclusively(|_| Ok::<_, Error>(())), Err(Error::ReadOnly)));
    assert!(matches!(Db::create(at).and_then(|db| db.upgrade()), Err(Error::ReadOnly)));
}

#[test]
fn a_database_that_cannot_be_written_is_read_and_says_so_when_written() {
    let name = "a_database_that_cannot_be_written_is_read_and_says_so_when_written";
    if let Ok(at) = env::var("STORE_READ_ONLY") {
        read_all_and_write_nothing(&at.parse().unwrap());
        return;
    }
    // Root may write whatever its mode says, so that a child without root's rights reads.
    for (journal, directory) in [("WAL", 0o555), ("DELETE", 0o555), ("WAL", 0o777), ("DELETE", 0o777)] {
        let (dir, mut connection) = Shop::new().closed();
        diesel::connection::SimpleConnection::batch_execute(
            &mut connection,
            &format!(
                "CREATE TABLE customer (id INTEGER PRIMARY KEY, iban TEXT); \
                 INSERT INTO customer VALUES (1, 'DE1'), (2, 'DE2'); PRAGMA journal_mode = {journal}"
            ),
        )
        .unwrap();
        drop(connection);
        let copy = tempfile::tempdir().unwrap();
        let (file, exe) = (copy.path().join("app.db"), dir.path().join("test"));
        fs::copy(path(&dir), &file).unwrap();
        fs::copy(env::current_exe().unwrap(), &exe).unwrap();
        for (path, mode) in
            [(file.as_path(), 0o444), (copy.path(), directory), (dir.path(), 0o755), (exe.as_path(), 0o755)]
        {
            fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
        }
        let mut child = Command::new(exe);
        child.args(["--exact", name]).env("STORE_READ_ONLY", format!("sqlite://{}", file.display())).current_dir("/");
        if fs::metadata(&file).unwrap().uid() == 0 {
            child.uid(NOBODY).gid(NOBODY);
        }
        let output = child.output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && said.contains("1 passed"), "{journal} {directory:o}: {said}");
        fs::set_permissions(copy.path(), Permissions::from_mode(0o755)).unwrap();
    }
}

const NOBODY: u32 = 65_534;

#[test]
fn a_database_in_utf_16_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut other = support::connection(&dir);
    diesel::connection::SimpleConnection::batch_execute(&mut other, "PRAGMA encoding = 'UTF-16'; CREATE TABLE a (b)")
        .unwrap();
    assert!(matches!(Db::open(&url(&dir)).unwrap_err(), Error::Unfit(_)));
}

#[test]
fn upgrading_twice_changes_nothing_the_second_time() {
    let dir = tempfile::tempdir().unwrap();
    let db = Db::create(&url(&dir)).unwrap();
    assert!(matches!(db.ready().unwrap_err(), Error::NotInitialised));
    let applied = db.upgrade().unwrap();
    assert_eq!((applied.len(), applied[0].version), (3, 1));
    let identity = db.ready().unwrap();
    assert_eq!(identity.identity.len(), 32);
    assert!(identity.identity.bytes().all(|c| c.is_ascii_digit() || (b'a'..=b'f').contains(&c)));
    assert!(identity.made.ends_with('Z') && identity.made.len() == 20, "{}", identity.made);
    assert_eq!(db.upgrade().unwrap(), []);
    assert_eq!(db.ready().unwrap(), identity);
}

#[test]
fn two_programs_may_make_and_upgrade_one_database_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let identities: Vec<_> = thread::scope(|scope| {
        let make = || {
            let db = Db::create(&url(&dir)).unwrap();
            db.upgrade().unwrap();
            db.create_agent_run_table().unwrap();
            db.ready().unwrap()
        };
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(make)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(identities.windows(2).all(|pair| pair[0] == pair[1]));
}

#[test]
fn tables_of_a_newer_hardwrap_are_refused() {
    let shop = Shop::new();
    shop.sql("INSERT INTO hardwrap_migration VALUES (99, 'later')");
    assert!(matches!(shop.db.ready().unwrap_err(), Error::NewerTables { found: 99, known: 3 }));
    assert!(matches!(shop.db.upgrade().unwrap_err(), Error::NewerTables { .. }));
}

#[test]
fn a_database_that_wants_a_newer_hardwrap_is_refused() {
    let shop = Shop::new();
    for (oldest, refused) in [("0.0.9", false), ("0.1.0", false), ("0.10.0", true), ("1.0", true), ("soon", true)] {
        shop.sql(&format!("UPDATE hardwrap_database SET oldest_version = '{oldest}'"));
        assert_eq!(matches!(shop.db.ready(), Err(Error::NewerNeeded { .. })), refused, "{oldest}");
        assert_eq!(matches!(shop.db.upgrade(), Err(Error::NewerNeeded { .. })), refused, "{oldest}");
    }
}

#[test]
fn the_printed_sql_makes_the_same_tables() {
    let (made, printed) = (Shop::new(), tempfile::tempdir().unwrap());
    let mut other = support::connection(&printed);
    diesel::connection::SimpleConnection::batch_execute(&mut other, &schema_sql(&url(&printed))).unwrap();
    drop(other);
    let objects = "SELECT COUNT(*) FROM sqlite_schema WHERE name NOT LIKE 'sqlite_%'";
    assert_eq!(made.number(objects), 15);
    assert_eq!(made.number("SELECT COUNT(*) FROM sqlite_schema WHERE name GLOB '__diesel*'"), 0);
    let db = Db::open(&url(&printed)).unwrap();
    assert!(!db.create_agent_run_table().unwrap());
}

#[test]
fn the_printed_sql_leaves_nothing_to_upgrade() {
    let dir = tempfile::tempdir().unwrap();
    let mut other = support::connection(&dir);
    diesel::connection::SimpleConnection::batch_execute(&mut other, &schema_sql(&url(&dir))).unwrap();
    let db = Db::open(&url(&dir)).unwrap();
    let identity = db.ready().unwrap();
    assert_eq!(identity.identity.len(), 32);
    assert!(identity.identity.bytes().all(|c| c.is_ascii_digit() || (b'a'..=b'f').contains(&c)));
    assert!(identity.made.ends_with('Z') && identity.made.len() == 20, "{}", identity.made);
    assert_eq!(db.upgrade().unwrap(), []);
    assert_eq!(db.ready().unwrap(), identity);
    for statement in schema_sql(&url(&dir)).split_inclusive(";\n") {
        // By hand a second time, as a shell would that goes on after an error.
        let _ = diesel::connection::SimpleConnection::batch_execute(&mut other, statement);
    }
    assert_eq!(db.ready().unwrap(), identity);
    assert_eq!(db.upgrade().unwrap(), []);
}

#[test]
fn the_agent_run_table_is_made_only_where_it_is_missing() {
    let shop = Shop::new();
    assert!(!shop.db.create_agent_run_table().unwrap());
    shop.sql("DROP TABLE tx_nrllm_agentrun_event; DROP TABLE tx_nrllm_agentrun; CREATE TABLE TX_nrllm_agentrun (uid)");
    assert!(shop.db.create_agent_run_table().unwrap());
    assert_eq!(shop.number("SELECT COUNT(*) FROM pragma_table_info('tx_nrllm_agentrun')"), 1);
}

#[test]
fn keys_that_were_seen_are_remembered_with_their_last_state() {
    let shop = Shop::new();
    let kid: KeyId = support::KID.parse().unwrap();
    shop.db.note_key(kid, Alg::A256Kw, "active").unwrap();
    shop.db.note_key([9; 8].into(), Alg::A256GcmKw, "pre-active").unwrap();
    shop.db.note_key(kid, Alg::A256Kw, "deactivated").unwrap();
    let seen = shop.db.keys_seen().unwrap();
    assert_eq!(seen.len(), 2);
    assert_eq!(
        (seen[0].kid.as_str(), seen[0].alg.as_str(), seen[0].state.as_str()),
        (support::KID, "A256KW", "deactivated")
    );
}

#[test]
fn noting_a_key_again_in_the_same_state_changes_nothing() {
    let shop = Shop::new();
    let kid: KeyId = support::KID.parse().unwrap();
    shop.db.note_key(kid, Alg::A256Kw, "active").unwrap();
    shop.sql("UPDATE hardwrap_key_seen SET seen = '2001-01-01T00:00:00Z'");
    shop.db.note_key(kid, Alg::A256Kw, "active").unwrap();
    assert_eq!(shop.db.keys_seen().unwrap()[0].seen, "2001-01-01T00:00:00Z");
    shop.db.note_key(kid, Alg::A256Kw, "deactivated").unwrap();
    let seen = shop.db.keys_seen().unwrap();
    assert_eq!((seen.len(), seen[0].state.as_str()), (1, "deactivated"));
    assert_ne!(seen[0].seen, "2001-01-01T00:00:00Z");
}

#[test]
fn what_is_done_exclusively_is_kept_whole_or_not_at_all() {
    let shop = Shop::new();
    let failed = shop.db.exclusively(|inside| {
        inside.note_key([1; 8].into(), Alg::A256Kw, "active")?;
        assert_eq!(inside.keys_seen()?.len(), 1);
        assert_eq!(shop.db.keys_seen()?.len(), 0, "the Db outside reads what was committed");
        Err::<(), _>(Error::NotInitialised)
    });
    assert!(matches!(failed, Err(Error::NotInitialised)));
    assert_eq!(shop.db.keys_seen().unwrap().len(), 0);
    let done: Result<_, Error> = shop.db.exclusively(|inside| {
        inside.upgrade()?;
        inside.note_key([1; 8].into(), Alg::A256Kw, "active")?;
        inside.exclusively(|same| same.note_key([2; 8].into(), Alg::A256Kw, "active"))?;
        inside.ready()
    });
    done.unwrap();
    assert_eq!(shop.db.keys_seen().unwrap().len(), 2);
}

#[test]
fn exclusive_work_keeps_others_waiting_not_failing() {
    let shop = Shop::new();
    let (entered, wait) = mpsc::channel();
    thread::scope(|scope| {
        let db = &shop.db;
        scope.spawn(move || {
            db.exclusively(|inside| {
                entered.send(()).unwrap();
                thread::sleep(Duration::from_millis(300));
                inside.note_key([1; 8].into(), Alg::A256Kw, "first")
            })
            .unwrap();
        });
        wait.recv().unwrap();
        let second = Db::open(&url(&shop.dir)).unwrap();
        second
            .exclusively(|inside| {
                assert_eq!(inside.keys_seen()?.len(), 1);
                inside.note_key([1; 8].into(), Alg::A256Kw, "second")
            })
            .unwrap();
    });
    assert_eq!(shop.db.keys_seen().unwrap()[0].state, "second");
}

#[test]
fn a_thread_that_died_leaves_the_database_usable() {
    let shop = Shop::new();
    let died = thread::scope(|scope| {
        scope.spawn(|| shop.db.exclusively(|_| -> Result<(), Error> { panic!("on purpose") })).join().is_err()
    });
    assert!(died);
    shop.db.note_key([1; 8].into(), Alg::A256Kw, "active").unwrap();
}

#[test]
fn a_log_in_use_is_not_reported_as_truncated() {
    let shop = Shop::new();
    shop.db.truncate_wal().unwrap();
    let wal = format!("{}-wal", path(&shop.dir).display());
    assert_eq!(fs::metadata(&wal).unwrap().len(), 0);
    shop.sql("PRAGMA busy_timeout = 0; BEGIN; SELECT * FROM hardwrap_migration");
    shop.db.note_key([1; 8].into(), Alg::A256Kw, "active").unwrap();
    assert!(matches!(shop.db.truncate_wal(), Err(Error::WalInUse)));
    shop.sql("COMMIT");
    shop.db.truncate_wal().unwrap();
}

#[test]
fn a_locked_database_is_unavailable_and_nothing_else() {
    let shop = Shop::new();
    shop.sql("BEGIN IMMEDIATE");
    let error = shop.db.note_key([1; 8].into(), Alg::A256Kw, "active").unwrap_err();
    assert!(matches!(error, Error::Unavailable(_)), "{error}");
    shop.sql("ROLLBACK");
    shop.db.note_key([1; 8].into(), Alg::A256Kw, "active").unwrap();
}

#[test]
fn two_processes_seal_on_one_database_at_once() {
    const ROWS: i64 = 150;
    let name = "two_processes_seal_on_one_database_at_once";
    let column = Column::new("customer", "iban", "id", "shop:customer:iban").unwrap().bound_to("id").unwrap();
    if let Some(database) = env::var_os("STORE_CHILD") {
        let db = Db::open(&format!("sqlite://{}", database.to_str().unwrap()).parse().unwrap()).unwrap();
        let keys = memory_keys::MemoryKeys::one([0, 1, 2, 3, 4, 5, 6, 7].into(), Alg::A256Kw, [9; 32]);
        let codec = hardwrap::codec::Codec::new(std::sync::Arc::new(keys));
        let sealed = (1..=ROWS)
            .filter(|id| db.seal_cleartext(&codec, &column, &Key::Integer(*id)).unwrap() == SealedInPlace::Sealed)
            .count();
        println!("sealed {sealed}.");
        return;
    }
    let shop = Shop::new();
    shop.sql("CREATE TABLE customer (id INTEGER PRIMARY KEY, iban TEXT)");
    for id in 1..=ROWS {
        shop.sql(&format!("INSERT INTO customer VALUES ({id}, 'DE{id}')"));
    }
    let child = || {
        Command::new(env::current_exe().unwrap())
            .args(["--exact", name, "--nocapture"])
            .env("STORE_CHILD", path(&shop.dir))
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap()
    };
    let children = [child(), child()];
    let mut total = 0;
    for child in children {
        let output = child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success() && said.contains("1 passed"), "{said}");
        let (_, rest) = said.split_once("sealed ").unwrap();
        total += rest.split_once('.').unwrap().0.parse::<i64>().unwrap();
    }
    assert_eq!(total, ROWS);
    assert_eq!(shop.db.count(&column).unwrap().sealed_total(), ROWS.unsigned_abs());
}
