//! The servers that tests run on: they start, answer, keep their data, and are gone afterwards.

#![allow(clippy::unwrap_used, clippy::missing_panics_doc, missing_docs)]

#[path = "support/server.rs"]
mod server;

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use server::{Backend, Cluster, Database, Server};

#[test]
fn a_postgres_server_keeps_its_data_and_goes() {
    keeps_its_data_and_goes(Backend::Postgres);
}

#[test]
fn a_mariadb_server_keeps_its_data_and_goes() {
    keeps_its_data_and_goes(Backend::Mariadb);
}

fn keeps_its_data_and_goes(backend: Backend) {
    // What is said last wins, so that MariaDB loses nothing to a kill.
    let settings = match backend {
        Backend::Mariadb => ["max_connections=41", "innodb_flush_log_at_trx_commit=2"].as_slice(),
        _ => &["max_connections=41"],
    };
    let server = Server::start_with(backend, settings);
    let database = server.database();
    let url = database.url();
    assert_eq!(url, server.url(database.name()));
    database.sql("CREATE TABLE kept (text VARCHAR(20)); INSERT INTO kept VALUES ('Grüße, 漢字 🔑')");

    server.stop();
    assert!(gone(server.pid()));
    assert!(!database.try_sql("SELECT 1").status.success());
    server.start_again();
    assert_eq!(database.sql("SELECT text FROM kept"), "Grüße, 漢字 🔑\n");
    assert_eq!(server.url(database.name()), url);

    database.sql("INSERT INTO kept VALUES ('second')");
    let killed = server.pid();
    server.kill();
    assert!(gone(killed));
    assert!(!database.try_sql("SELECT 1").status.success());
    server.start_again();
    assert_eq!(database.number("SELECT count(*) FROM kept"), 2);

    let limit = match backend {
        Backend::Postgres => "SELECT setting FROM pg_settings WHERE name = 'max_connections'",
        _ => "SELECT @@max_connections",
    };
    assert_eq!(server.number(limit), 41);

    let (dir, pid) = (server.dir().to_owned(), server.pid());
    assert!(!gone(pid));
    // A database whose server is gone does no harm.
    drop(server);
    assert!(gone(pid));
    assert!(!dir.exists());
}

#[test]
fn a_server_goes_when_its_test_panics() {
    let (send, receive) = std::sync::mpsc::channel();
    let test = std::thread::spawn(move || {
        let server = Server::start(Backend::Postgres);
        send.send((server.dir().to_owned(), server.pid())).unwrap();
        panic!("as a test does");
    });
    assert!(test.join().is_err());
    let (dir, pid) = receive.recv().unwrap();
    assert!(gone(pid));
    assert!(!dir.exists());
}

/// On the backend of now: an SQLite file, or the server of `ci/with-server`.
#[test]
fn a_database_is_its_tests_own() {
    let (one, other) = (Database::new(), Database::new());
    assert_eq!(one.backend(), Backend::now());
    is_its_tests_own(&one, &other);
    if let Some(file) = one.url().strip_prefix("sqlite://") {
        assert!(Path::new(file).exists());
        drop(one);
        assert!(!Path::new(file).exists());
    }
}

#[test]
fn a_database_goes_with_its_guard_although_somebody_is_in_it() {
    for backend in [Backend::Postgres, Backend::Mariadb] {
        let server = Server::start(backend);
        let (one, other) = (server.database(), server.database());
        is_its_tests_own(&one, &other);
        let count = match backend {
            Backend::Postgres => "SELECT count(*) FROM pg_database WHERE datname LIKE 't________________'",
            _ => "SELECT count(*) FROM information_schema.schemata WHERE schema_name LIKE 't________________'",
        };
        assert_eq!(server.number(count), 2);
        let name = one.name();
        let sleep = match backend {
            Backend::Postgres => format!("\\c {name}\nBEGIN; INSERT INTO t VALUES (9); SELECT pg_sleep(300)"),
            _ => format!("USE {name};\nBEGIN; INSERT INTO t VALUES (9); SELECT SLEEP(300)"),
        };
        let busy = match backend {
            Backend::Postgres => "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'SELECT pg_sleep%'",
            _ => "SELECT count(*) FROM information_schema.processlist WHERE info LIKE 'SELECT SLEEP%'",
        };
        std::thread::scope(|threads| {
            let sleeper = threads.spawn(|| server.try_sql(&sleep));
            while server.number(busy) == 0 {
                std::thread::yield_now();
            }
            drop(one);
            assert!(!sleeper.join().unwrap().status.success());
        });
        assert_eq!(server.number(count), 1);
    }
}

fn is_its_tests_own(one: &Database, other: &Database) {
    assert_ne!(one.url(), other.url());
    for database in [one, other] {
        database.sql("CREATE TABLE t (n INTEGER)");
    }
    one.sql("INSERT INTO t VALUES (1); INSERT INTO t VALUES (2)");
    assert_eq!(one.number("SELECT sum(n) FROM t"), 3);
    assert_eq!(other.number("SELECT count(*) FROM t"), 0);
    // The first error ends it.
    let failed = other.try_sql("INSERT INTO t VALUES (1); INSERT INTO nowhere VALUES (2); INSERT INTO t VALUES (3)");
    assert!(!failed.status.success());
    assert!(String::from_utf8_lossy(&failed.stderr).contains("nowhere"));
    assert_eq!(other.number("SELECT count(*) FROM t"), 1);
}

#[test]
fn a_cluster_replicates_and_survives_the_loss_of_a_node() {
    let cluster = Cluster::start();
    let database = cluster.node(0).database();
    database.sql("CREATE TABLE t (n INTEGER PRIMARY KEY); INSERT INTO t VALUES (1)");
    let rows = format!("SET wsrep_sync_wait = 7; SELECT count(*) FROM {}.t", database.name());
    assert_eq!(cluster.node(2).number(&rows), 1);

    cluster.node(1).kill();
    for i in [0, 2] {
        cluster.wait_for_size(i, 2);
    }
    cluster.node(2).sql(&format!("INSERT INTO {}.t VALUES (2)", database.name()));
    assert_eq!(cluster.node(0).number(&rows), 2);

    cluster.node(1).start_again();
    cluster.wait_for_size(1, 3);
    assert_eq!(cluster.node(1).number(&rows), 2);

    let nodes: Vec<_> = (0..3).map(|i| (cluster.node(i).dir().to_owned(), cluster.node(i).pid())).collect();
    drop(database);
    drop(cluster);
    for (dir, pid) in nodes {
        assert!(gone(pid));
        assert!(!dir.exists());
    }
}

#[test]
fn with_server_hands_on_the_server_and_the_exit_code_and_leaves_nothing() {
    for backend in ["postgres", "mariadb"] {
        // The server's user has to get there.
        let dir = tempfile::tempdir().unwrap();
        Command::new("chmod").arg("711").arg(dir.path()).status().unwrap();
        let said = "echo \"$HARDWRAP_TEST_BACKEND $HARDWRAP_TEST_SERVER\"; cat; cat \"$TMPDIR\"/*/pid; exit 7";
        let mut child = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/ci/with-server"))
            .args([backend, "sh", "-c", said])
            .env("TMPDIR", dir.path())
            .stdin(fs::File::open(concat!(env!("CARGO_MANIFEST_DIR"), "/rustfmt.toml")).unwrap())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(7));
        let said = std::io::read_to_string(child.stdout.take().unwrap()).unwrap();
        let url = if backend == "postgres" { "postgres://hardwrap@127.0.0.1:" } else { "mysql://root@127.0.0.1:" };
        assert!(said.starts_with(&format!("{backend} {url}")), "{said}");
        assert!(said.contains("max_width"), "its input is the command's: {said}");
        assert!(gone(said.lines().last().unwrap().parse().unwrap()));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}

/// Whether the process is gone; a dead one that its parent has not noticed has no command line.
fn gone(pid: u32) -> bool {
    fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.is_empty())
        || !Path::new(&format!("/proc/{pid}")).exists()
}
