//! What fails in the middle of a rotation: on the token, in the database, in the application's own rotator, and whoever
//! presses Ctrl-C. Nothing is lost, nothing is announced, and the next step is printed.
#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout, reason = "tests")]

#[path = "support/bench.rs"]
mod bench;
#[path = "support/shop.rs"]
mod shop;
#[path = "support/softhsm.rs"]
mod softhsm;
#[path = "support/sqlite.rs"]
mod sqlite;

use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use bench::{Bench, text};
use diesel::prelude::*;
use diesel::sql_types::{BigInt, Nullable, Text};
use hardwrap::column::{Column, Row};
use hardwrap::hsm::{Choice, State};
use hardwrap::keeper::{self, Keeper};
use hardwrap::provider::KeyId;
use hardwrap::rotation::{BoxedError, Listener, MasterKeyRotated, Rewrapper, Rotator};
use hardwrap::store::{AnyConnection, Spot};
use shop::{keys, report, shop};
use softhsm::SoftHsm;
use sqlite::sqlite3;

/// All rows as they stand.
fn rows(bench: &Bench) -> String {
    bench.sql("SELECT id, iban FROM customer ORDER BY id")
}

fn states(bench: &Bench) -> Vec<String> {
    keys(bench).into_iter().map(|(_, state)| state).collect()
}

/// Every value opens, and `rotate --resume` ends at zero.
fn is_finished_by_resume(bench: &Bench, moved: u64) {
    bench.ok(&["verify", "--all"], b"");
    let done = report(bench, 0, &["rotate", "--resume"]);
    assert_eq!((&done["moved"], &done["proven"]), (&moved.into(), &true.into()));
    bench.ok(&["verify", "--all"], b"");
}

/// What a command that failed said: one line.
fn said(done: &Output, code: i32) -> String {
    let said = text(&done.stderr);
    assert_eq!(done.status.code(), Some(code), "{said}");
    assert!(said.starts_with("hardwrap: ") && said.lines().count() == 1, "{said}");
    said
}

#[test]
fn a_token_that_fails_half_way_rolls_everything_back() {
    // Wrapping under the new key, or unwrapping under the old one, fails in the midst of the walk.
    for (fault, cause) in [
        ("C_Decrypt 35 0x30", "the keys are unavailable"),
        ("C_Encrypt 20 0x30", "C_Encrypt failed: CKR_DEVICE_ERROR"),
        ("C_Encrypt 20 0x32", "CKR_DEVICE_REMOVED"),
    ] {
        let function = fault.split(' ').next().unwrap();
        // From then on, as a token does that is broken: a retry does not help.
        let number: u32 = fault.split(' ').nth(1).unwrap().parse().unwrap();
        let code = fault.split(' ').nth(2).unwrap();
        let faults: Vec<String> =
            (number..number + 500).map(|number| format!("{function} {number} {code} after")).collect();
        let bench = shop(40);
        let before = rows(&bench);
        bench.make_faulty();
        bench.hsm.site().set_faults(&faults.join("\n"));
        let event = bench.hsm.site().dir().join("event");
        let notify = format!("cat >> {}", event.display());
        let done = bench.faulty(&["rotate", "--batch", "10", "--notify", &notify]).output().unwrap();
        let said = said(&done, 1);
        assert!(said.contains("rolled back") && said.contains("hardwrap rotate --resume"), "{said}");
        assert!(said.contains(cause), "{said}");
        bench.configure(&bench.hsm.site().uri(), "[policy]\nbackup_horizon = \"1s\"\nwrite_grace = \"1s\"");
        assert_eq!(rows(&bench), before, "all rows as before");
        assert_eq!(states(&bench), ["deactivated", "active"], "both keys on the token");
        assert!(!event.exists(), "nobody hears of it");
        is_finished_by_resume(&bench, 40);
    }
}

#[test]
fn a_database_that_refuses_one_row_rolls_everything_back() {
    let bench = shop(40);
    let before = rows(&bench);
    bench.sql("CREATE TRIGGER nope BEFORE UPDATE OF iban ON customer WHEN OLD.id = 33 BEGIN SELECT RAISE(ABORT, 'not today'); END");
    let event = bench.hsm.site().dir().join("event");
    let notify = format!("cat >> {}", event.display());
    let said = bench.fails(1, &["rotate", "--batch", "10", "--notify", &notify], b"");
    assert!(said.contains("rolled back") && said.contains("not today") && said.contains("--resume"), "{said}");
    assert_eq!(rows(&bench), before);
    assert_eq!(states(&bench), ["deactivated", "active"]);
    // Online, what was written before stays, and the next step is the same.
    let said = bench.fails(1, &["rotate", "--resume", "--online", "--batch", "10", "--notify", &notify], b"");
    assert!(said.contains("not today") && said.contains("hardwrap rotate --resume"), "{said}");
    let new = &keys(&bench)[1].0;
    let moved = bench.sql(&format!("SELECT count(*) FROM customer WHERE iban GLOB 'hw1:{new}:*'"));
    assert_eq!(moved.trim(), "30", "three batches");
    assert!(!event.exists());
    bench.sql("DROP TRIGGER nope");
    is_finished_by_resume(&bench, 10);
}

#[test]
fn a_full_disk_loses_nothing_wherever_it_strikes() {
    let mut outcomes = Vec::new();
    for limit in (40..).step_by(12) {
        let bench = shop(12);
        let before = rows(&bench);
        // No file can grow beyond so many KiB: as on a full disk, writes fail.
        let inner = bench.command(&["rotate"]);
        let mut limited = Command::new("sh");
        limited.args(["-c", &format!("trap '' XFSZ; ulimit -f {}; exec \"$0\" \"$@\"", 2 * limit)]);
        limited.arg(inner.get_program()).args(inner.get_args()).current_dir(inner.get_current_dir().unwrap());
        limited.envs(inner.get_envs().filter_map(|(name, value)| Some((name, value?))));
        let done = limited.output().unwrap();
        bench.ok(&["verify", "--all"], b"");
        if done.status.success() {
            break;
        }
        let line = text(&done.stderr);
        assert_eq!(line.lines().count(), 1, "{line}");
        assert_eq!(rows(&bench), before, "{line}");
        if states(&bench).len() == 1 {
            assert_eq!(report(&bench, 0, &["rotate"])["moved"], 12);
        } else {
            is_finished_by_resume(&bench, 12);
        }
        outcomes.push(line);
    }
    println!("{outcomes:#?}");
    assert!(outcomes.iter().any(|line| line.contains("rolled back")), "{outcomes:#?}");
}

/// Starts a slow rotation, interrupts it once a batch is written, and gives what it said.
fn interrupt(bench: &Bench, arguments: &[&str], signal: &str) -> Output {
    let mut command = bench.command(arguments);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // Its lease stands from the beginning, and the new key is active before the walk.
    while !bench.sql("SELECT count(*) FROM hardwrap_rotation WHERE proven IS NULL").contains('1') {
        thread::sleep(Duration::from_millis(10));
    }
    thread::sleep(Duration::from_millis(300));
    let sent = Command::new("kill").arg(format!("-{signal}")).arg(child.id().to_string()).status().unwrap();
    assert!(sent.success());
    child.wait_with_output().unwrap()
}

#[test]
fn o10_ctrl_c_ends_an_online_rotation_after_its_batch_and_an_atomic_one_by_rolling_back() {
    for signal in ["INT", "TERM"] {
        let bench = shop(60);
        let before = rows(&bench);
        let done = interrupt(&bench, &["rotate", "--online", "--batch", "5", "--rate", "20"], signal);
        let line = said(&done, 1);
        let new = keys(&bench)[1].0.clone();
        let moved: u64 =
            bench.sql(&format!("SELECT count(*) FROM customer WHERE iban GLOB 'hw1:{new}:*'")).trim().parse().unwrap();
        assert!(moved > 0 && moved < 60 && moved.is_multiple_of(5), "{moved}: whole batches");
        assert!(line.contains(&format!("{moved} values were moved")) && line.contains("--resume"), "{line}");
        is_finished_by_resume(&bench, 60 - moved);

        let bench = shop(60);
        let before_atomic = rows(&bench);
        let done = interrupt(&bench, &["rotate", "--batch", "5", "--rate", "20"], signal);
        let line = said(&done, 1);
        assert!(line.contains("rolled back") && line.contains("--resume"), "{line}");
        assert_eq!(rows(&bench), before_atomic);
        assert_eq!(states(&bench), ["deactivated", "active"]);
        is_finished_by_resume(&bench, 60);
        assert_ne!(rows(&bench), before);
    }
}

/// An application's own layout: the front and the payload of a value in two columns.
struct Parcels {
    /// Fails on the second row.
    fails: AtomicBool,
}

#[derive(QueryableByName)]
struct Parcel {
    #[diesel(sql_type = BigInt)]
    id: i64,
    #[diesel(sql_type = Nullable<Text>)]
    front: Option<String>,
    #[diesel(sql_type = BigInt)]
    rest: i64,
}

fn contents() -> Column {
    Column::new("parcel", "front", "id", "shop:parcel:contents").unwrap().bound_to("id").unwrap()
}

fn parcels(connection: &mut SqliteConnection) -> Result<Vec<Parcel>, BoxedError> {
    let query = "SELECT id, front, coalesce(length(payload), 0) + 1 AS rest FROM parcel ORDER BY id";
    Ok(diesel::sql_query(query).load(connection)?)
}

impl Rotator for Parcels {
    fn name(&self) -> &'static str {
        "parcels"
    }

    fn columns(&self) -> Vec<Spot> {
        vec![Spot { table: "parcel".to_owned(), column: "front".to_owned() }]
    }

    fn count(&self, connection: &mut AnyConnection, target: KeyId) -> Result<u64, BoxedError> {
        let connection = connection.sqlite().ok_or("not SQLite")?;
        let done = format!("hw1:{target}:");
        let due = |parcel: &Parcel| parcel.front.as_ref().is_some_and(|front| !front.starts_with(&done));
        Ok(parcels(connection)?.iter().filter(|parcel| due(parcel)).count() as u64)
    }

    fn rewrap(&self, connection: &mut AnyConnection, context: &Rewrapper<'_>) -> Result<u64, BoxedError> {
        let connection = connection.sqlite().ok_or("not SQLite")?;
        let column = contents();
        let mut moved = 0;
        for parcel in parcels(connection)? {
            let Some(front) = parcel.front.filter(|front| context.is_due(front)) else { continue };
            if moved == 1 && self.fails.load(Ordering::Relaxed) {
                return Err("the warehouse is closed".into());
            }
            let row = Row::from(parcel.id);
            let rest = parcel.rest.unsigned_abs();
            let Some(new) = context.rewrap_front(&column.at(Some(&row))?, &front, rest)? else { continue };
            moved += diesel::sql_query("UPDATE parcel SET front = ? WHERE id = ? AND front = ?")
                .bind::<Text, _>(&new)
                .bind::<BigInt, _>(parcel.id)
                .bind::<Text, _>(&front)
                .execute(connection)? as u64;
        }
        Ok(moved)
    }
}

/// Says that it moved everything, and moves nothing.
struct Liar;

impl Rotator for Liar {
    fn name(&self) -> &'static str {
        "liar"
    }

    fn columns(&self) -> Vec<Spot> {
        vec![Spot { table: "parcel".to_owned(), column: "front".to_owned() }]
    }

    fn count(&self, _: &mut AnyConnection, _: KeyId) -> Result<u64, BoxedError> {
        Ok(0)
    }

    fn rewrap(&self, _: &mut AnyConnection, _: &Rewrapper<'_>) -> Result<u64, BoxedError> {
        Ok(3)
    }
}

/// Takes the fence away behind the rotation, as a backup does that is put back under it.
struct Saboteur;

impl Rotator for Saboteur {
    fn name(&self) -> &'static str {
        "saboteur"
    }

    fn columns(&self) -> Vec<Spot> {
        Vec::new()
    }

    fn count(&self, _: &mut AnyConnection, _: KeyId) -> Result<u64, BoxedError> {
        Ok(0)
    }

    fn rewrap(&self, connection: &mut AnyConnection, _: &Rewrapper<'_>) -> Result<u64, BoxedError> {
        #[derive(QueryableByName)]
        struct Trigger {
            #[diesel(sql_type = Text)]
            name: String,
        }
        let connection = connection.sqlite().ok_or("not SQLite")?;
        let fence = "SELECT name FROM sqlite_schema WHERE name GLOB 'hardwrap_fence_*' LIMIT 1";
        for Trigger { name } in diesel::sql_query(fence).load(connection)? {
            diesel::sql_query(format!("DROP TRIGGER {name}")).execute(connection)?;
        }
        Ok(0)
    }
}

#[test]
fn nothing_is_proven_without_the_fence() {
    SoftHsm::isolated("nothing_is_proven_without_the_fence", |site| {
        let file = site.dir().join("app.db");
        sqlite3(&file, "CREATE TABLE parcel (id INTEGER PRIMARY KEY, front TEXT, payload TEXT)");
        let url = format!("sqlite://{}", file.display());
        let builder = Keeper::builder(site.uri().parse().unwrap(), url.parse().unwrap()).columns([contents()]);
        let (keeper, _) = builder.init(Choice::Auto).unwrap();
        let old = keeper.report().unwrap().current().unwrap().fact.kid;
        let keeper = keeper.with_rotator(Arc::new(Saboteur));
        let Err(keeper::Error::RolledBack(cause)) = keeper.rotation().run() else { panic!("rolled back") };
        assert!(matches!(*cause, keeper::Error::FenceGone(kid) if kid == old), "{cause:?}");
        // Online it is proven before the rotator comes again.
        assert!(keeper.rotation().online(true).resume().unwrap().proven);
    });
}

#[derive(Default)]
struct Ear(AtomicUsize);

impl Listener for Ear {
    fn name(&self) -> &'static str {
        "ear"
    }

    fn master_key_rotated(&self, event: &MasterKeyRotated) -> Result<(), BoxedError> {
        assert_eq!(event.event, MasterKeyRotated::NAME);
        self.0.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

#[test]
fn a_rotator_of_the_application_moves_its_own_layout_and_its_failure_rolls_everything_back() {
    SoftHsm::isolated(
        "a_rotator_of_the_application_moves_its_own_layout_and_its_failure_rolls_everything_back",
        |site| {
            let file = site.dir().join("app.db");
            sqlite3(
                &file,
                "CREATE TABLE customer (id INTEGER PRIMARY KEY, iban TEXT); \
                 CREATE TABLE parcel (id INTEGER PRIMARY KEY, front TEXT, payload TEXT)",
            );
            let iban = || Column::new("customer", "iban", "id", "shop:customer:iban").unwrap().bound_to("id").unwrap();
            let url = format!("sqlite://{}", file.display());
            let builder = Keeper::builder(site.uri().parse().unwrap(), url.parse().unwrap()).columns([iban()]);
            let (keeper, _) = builder.init(Choice::Auto).unwrap();
            let seal = |column: &Column, id: i64| {
                keeper.codec().seal(&column.at(Some(&Row::from(id))).unwrap(), format!("{id}").as_bytes()).unwrap()
            };
            for id in 1..=3 {
                let parcel = seal(&contents(), id);
                let (front, payload) = parcel.split_once('.').unwrap();
                let sealed = seal(&iban(), id);
                sqlite3(
                    &file,
                    &format!(
                        "INSERT INTO customer VALUES ({id}, '{sealed}'); INSERT INTO parcel VALUES ({id}, '{front}', '{payload}')"
                    ),
                );
            }
            sqlite3(&file, "INSERT INTO parcel VALUES (4, NULL, NULL)");
            let stored = || sqlite3(&file, "SELECT * FROM customer; SELECT * FROM parcel");
            let payloads = || sqlite3(&file, "SELECT id, payload FROM parcel");
            let (before, untouched) = (stored(), payloads());
            // Nobody registered what the parcels hold: the rotation refuses before it makes a key.
            assert!(matches!(keeper.rotation().run(), Err(keeper::Error::Unregistered(_))));
            let old = keeper.report().unwrap().current().unwrap().fact.kid;
            let (rotator, ear) = (Arc::new(Parcels { fails: AtomicBool::new(true) }), Arc::new(Ear::default()));
            let keeper = keeper.with_rotator(rotator.clone()).with_listener(ear.clone());
            assert_eq!(keeper.status().unwrap().rotators, ["parcels"]);
            let plan = keeper.rotation().plan(true).unwrap();
            assert!(plan.is_clear() && plan.rotators == [("parcels".to_owned(), 3)], "{plan:?}");
            // Its failure takes the registered columns back with it.
            let Err(keeper::Error::RolledBack(cause)) = keeper.rotation().run() else { panic!("rolled back") };
            assert!(matches!(&*cause, keeper::Error::Rotator(name, _) if name == "parcels"), "{cause:?}");
            assert_eq!(stored(), before);
            let states: Vec<State> = keeper.report().unwrap().keys.iter().map(|key| key.fact.state).collect();
            assert_eq!(states, [State::Deactivated, State::Active]);
            assert_eq!(ear.0.load(Ordering::Relaxed), 0);
            // Online, the registered columns stay moved, the rotator's own transaction does not.
            let cut_off = keeper.rotation().online(true).resume();
            assert!(
                matches!(cut_off, Err(keeper::Error::CutOff(cause)) if matches!(*cause, keeper::Error::Rotator(..)))
            );
            let naming = |table, column| {
                sqlite3(&file, &format!("SELECT count(*) FROM {table} WHERE {column} GLOB 'hw1:{old}:*'"))
            };
            assert_eq!((naming("customer", "iban").trim(), naming("parcel", "front").trim()), ("0", "3"));
            assert_eq!(ear.0.load(Ordering::Relaxed), 0);
            rotator.fails.store(false, Ordering::Relaxed);
            let done = keeper.rotation().resume().unwrap();
            assert!(done.proven && done.moved == 3, "{done:?}");
            assert_eq!(ear.0.load(Ordering::Relaxed), 1);
            assert_eq!((payloads(), naming("parcel", "front").trim()), (untouched, "0"));
            // What it moved opens, and its column is fenced like any other.
            let target = done.target.unwrap();
            for id in 1..=3 {
                let whole = sqlite3(&file, &format!("SELECT front || '.' || payload FROM parcel WHERE id = {id}"));
                assert!(whole.starts_with(&format!("hw1:{target}:")));
                let column = contents();
                let place = column.at(Some(&Row::from(id))).unwrap();
                assert_eq!(keeper.codec().open(&place, whole.trim()).unwrap().expose(), id.to_string().as_bytes());
            }
            let late =
                before.lines().find(|line| line.starts_with("1|hw1:") && line.matches('|').count() == 2).unwrap();
            let front = late.split('|').nth(1).unwrap();
            let refused = sqlite::try_sqlite3(&file, &format!("UPDATE parcel SET front = '{front}' WHERE id = 1"));
            assert!(text(&refused.stderr).contains("fenced against key"), "{refused:?}");
        },
    );
}

/// The ancestor compared sums over all tables, which what is added to one of them makes fit.
#[test]
fn o6_the_proof_counts_each_column_whatever_a_rotator_says_it_moved() {
    const NAME: &str = "o6_the_proof_counts_each_column_whatever_a_rotator_says_it_moved";
    SoftHsm::isolated(NAME, |site| {
        let file = site.dir().join("app.db");
        sqlite3(&file, "CREATE TABLE parcel (id INTEGER PRIMARY KEY, front TEXT, payload TEXT)");
        let url = format!("sqlite://{}", file.display());
        let builder = Keeper::builder(site.uri().parse().unwrap(), url.parse().unwrap());
        let (keeper, _) = builder.init(Choice::Auto).unwrap();
        let column = contents();
        for id in 1..=3 {
            let parcel = keeper.codec().seal(&column.at(Some(&Row::from(id))).unwrap(), b"x").unwrap();
            let (front, payload) = parcel.split_once('.').unwrap();
            sqlite3(&file, &format!("INSERT INTO parcel VALUES ({id}, '{front}', '{payload}')"));
        }
        let ear = Arc::new(Ear::default());
        let keeper = keeper.with_rotator(Arc::new(Liar)).with_listener(ear.clone());
        let not_zero = |error: &keeper::Error| matches!(error, keeper::Error::NotZero { count: 3, column, .. } if column == "parcel.front");
        let Err(keeper::Error::RolledBack(cause)) = keeper.rotation().run() else { panic!("rolled back") };
        assert!(not_zero(&cause), "{cause:?}");
        assert!(keeper.rotation().online(true).resume().is_err_and(|error| not_zero(&error)));
        assert_eq!(ear.0.load(Ordering::Relaxed), 0);
        // An honest one is believed no more, and counted alike.
        drop(keeper);
        let builder = Keeper::builder(site.uri().parse().unwrap(), url.parse().unwrap());
        let keeper = builder.open().unwrap().with_rotator(Arc::new(Parcels { fails: AtomicBool::new(false) }));
        assert!(keeper.rotation().resume().unwrap().proven);
    });
}
