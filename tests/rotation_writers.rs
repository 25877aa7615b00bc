//! Rotations while four other processes insert, update and clear values: no update is lost, none comes back, no read
//! fails, and a value that was wrapped before the fence and stored after the proof is refused and sealed again.
#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout, reason = "tests")]

#[path = "support/softhsm.rs"]
mod softhsm;
#[path = "support/sqlite.rs"]
mod sqlite;

use std::collections::BTreeMap;
use std::env;
use std::fmt::Write;
use std::fs;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::thread;
use std::time::Duration;

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel::sql_types::{BigInt, Nullable, Text};
use hardwrap::column::{Column, nr_llm};
use hardwrap::hsm::Choice;
use hardwrap::keeper::Keeper;
use hardwrap::store::{self, AgentRuns, Answer, Lease, NewRun, Persister, RunId, Taken, Waiting};
use softhsm::{Site, SoftHsm};
use sqlite::sqlite3;

const NAME: &str = "o3_o4_four_writers_lose_nothing_while_keys_are_rotated";
const NOW: i64 = 1_790_000_000;

fn rotations() -> usize {
    if env::var_os("HARDWRAP_LONG").is_some() { 20 } else { 3 }
}

fn iban() -> Column {
    Column::new("customer", "iban", "id", "shop:customer:iban").unwrap().bound_to("id").unwrap()
}

fn keeper(site: &Site, name: &str) -> Keeper {
    let url = format!("sqlite://{}/app.db", site.dir().display());
    let columns = nr_llm().into_iter().map(|column| column.cleartext(hardwrap::column::Cleartext::Refuse));
    let columns = columns.chain([iban()]);
    let builder = Keeper::builder(site.uri().parse().unwrap(), url.parse().unwrap()).columns(columns);
    if name == "main" { builder.init(Choice::Auto).unwrap().0 } else { builder.open().unwrap() }
}

/// What each row holds, as its writer committed it last; empty for one that was cleared.
type Held = BTreeMap<String, String>;

fn file(site: &Site, name: &str) -> PathBuf {
    site.dir().join(name)
}

/// Until the main process has rotated often enough. A breath for the others, or four writers make more rows than a test
/// can look at.
fn goes_on(site: &Site) -> bool {
    thread::sleep(Duration::from_millis(3));
    !file(site, "stop").exists()
}

/// Numbers that look drawn, the same in each run.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % sides
    }
}

/// An application that stores values of a column with diesel itself.
struct Customers {
    keeper: Keeper,
    connection: SqliteConnection,
    held: Held,
    /// How often the fence refused a value that was then sealed again.
    refused: u64,
}

#[derive(QueryableByName)]
struct Stored {
    #[diesel(sql_type = Nullable<Text>)]
    iban: Option<String>,
}

impl Customers {
    fn new(site: &Site) -> Self {
        let mut connection = SqliteConnection::establish(&file(site, "app.db").display().to_string()).unwrap();
        connection.batch_execute("PRAGMA busy_timeout = 30000").unwrap();
        Self { keeper: keeper(site, "writer"), connection, held: Held::new(), refused: 0 }
    }

    fn seal(&self, row: i64, value: &str) -> String {
        self.keeper.seal(iban(), row, value.as_bytes()).unwrap()
    }

    /// Stores what was sealed, whenever that was.
    fn store(&mut self, row: i64, value: &str, mut sealed: String) {
        loop {
            let stored = diesel::sql_query(
                "INSERT INTO customer (id, iban) VALUES (?, ?) ON CONFLICT (id) DO UPDATE SET iban = excluded.iban",
            )
            .bind::<BigInt, _>(row)
            .bind::<Text, _>(&sealed)
            .execute(&mut self.connection);
            match stored {
                Ok(_) => break,
                Err(error) => {
                    let kid = store::fenced(&error).unwrap_or_else(|| panic!("{error}"));
                    assert!(sealed.starts_with(&format!("hw1:{kid}:")));
                    self.refused += 1;
                    sealed = self.seal(row, value);
                }
            }
        }
        self.held.insert(row.to_string(), value.to_owned());
    }

    fn clear(&mut self, row: i64) {
        let clear = diesel::sql_query("UPDATE customer SET iban = '' WHERE id = ?");
        clear.bind::<BigInt, _>(row).execute(&mut self.connection).unwrap();
        self.held.insert(row.to_string(), String::new());
    }

    /// Nobody else writes to this row but the rotation: it holds what was stored last.
    fn read(&mut self, row: i64) {
        let rows: Vec<Stored> = diesel::sql_query("SELECT iban FROM customer WHERE id = ?")
            .bind::<BigInt, _>(row)
            .load(&mut self.connection)
            .unwrap();
        let stored = rows.into_iter().next().and_then(|row| row.iban).unwrap_or_default();
        let held = &self.held[&row.to_string()];
        if held.is_empty() {
            assert_eq!(stored, "", "row {row} was cleared");
        } else {
            let opened = self.keeper.open_value(iban(), row, &stored).unwrap();
            assert_eq!(opened.expose(), held.as_bytes(), "row {row}");
        }
    }

    /// The newest key under which everything was proven to be; empty before the first proof.
    fn proven(&mut self) -> String {
        #[derive(QueryableByName)]
        struct Proven {
            #[diesel(sql_type = Text)]
            target: String,
        }
        let newest = "SELECT coalesce(max(target), '') AS target FROM hardwrap_rotation WHERE proven IS NOT NULL";
        diesel::sql_query(newest).load::<Proven>(&mut self.connection).unwrap().remove(0).target
    }
}

/// Inserts, updates and clears; and holds one value back from before each proof until after it.
fn writes_customers(site: &Site, writer: u64) -> Held {
    let mut customers = Customers::new(site);
    let mut dice = Dice(writer + 1);
    let row = |number: u64| i64::try_from(writer * 1_000_000 + number).unwrap();
    let (late_row, mut version, mut late_ones) = (row(0), 0, 0);
    let mut late = ("late 0".to_owned(), customers.seal(late_row, "late 0"));
    while goes_on(site) {
        version += 1;
        let row = row(1 + dice.roll(200));
        let value = format!("value {version} of {row}");
        match dice.roll(4) {
            0 => customers.clear(row),
            _ => {
                let sealed = customers.seal(row, &value);
                customers.store(row, &value, sealed);
            }
        }
        customers.read(row);
        // Key ids grow: this one was wrapped before the fence, and is stored after the proof.
        if late.1[4..20] < *customers.proven() {
            let before = customers.refused;
            customers.store(late_row, &late.0, late.1);
            assert!(customers.refused > before, "what comes late is refused");
            customers.read(late_row);
            late_ones += 1;
            let value = format!("late {version}");
            late = (value.clone(), customers.seal(late_row, &value));
        }
    }
    assert!(version > 20 && customers.refused >= late_ones);
    println!("writer {writer}: {version} values, {} refused, {late_ones} of them late", customers.refused);
    assert!(late_ones > 0);
    customers.held
}

fn persister(keeper: &Keeper) -> Persister {
    Persister::new(AgentRuns::new(keeper.db().clone(), keeper.codec().clone(), keeper.register()).unwrap())
}

/// Agent runs: queued, taken, suspended, resumed, and cleared as they end. The library seals again by itself.
fn writes_runs(site: &Site, writer: u64) -> Held {
    let keeper = keeper(site, "writer");
    let persister = persister(&keeper);
    let mut held = Held::new();
    let lease = Lease { worker: format!("writer-{writer}").parse().unwrap(), expires: NOW + 900 };
    let mut dice = Dice(writer + 1);
    let mut version = 0;
    while goes_on(site) {
        version += 1;
        let request = format!("{{\"writer\":{writer},\"request\":{version}}}");
        let state = format!("{{\"writer\":{writer},\"state\":{version}}}");
        let id: RunId = persister.enqueue(&NewRun::default(), &request, NOW).unwrap();
        let key = |column: &str| format!("{id} {column}");
        held.insert(key("queued_request"), request.clone());
        if dice.roll(3) == 0 {
            continue;
        }
        let taken = persister.take(&id, &lease, NOW).unwrap();
        let Taken::Work(work) = taken else { panic!("not taken: {taken:?}") };
        assert_eq!(work.opened.unwrap().expose(), request.as_bytes());
        assert_eq!(persister.suspend(&id, &lease.worker, Waiting::Input, &state, NOW).unwrap(), Answer::Moved);
        held.insert(key("suspended_state"), state.clone());
        if dice.roll(3) == 0 {
            continue;
        }
        let taken = persister.take_for_resume(&id, Waiting::Input, &lease, NOW).unwrap();
        let Taken::Work(work) = taken else { panic!("not taken for resume: {taken:?}") };
        assert_eq!(work.opened.unwrap().expose(), state.as_bytes());
        if dice.roll(2) == 0 {
            assert_eq!(persister.runs().cancel(&id, "a test", NOW).unwrap(), Answer::Moved);
            held.insert(key("queued_request"), String::new());
            held.insert(key("suspended_state"), String::new());
        }
    }
    println!("writer {writer}: {version} runs");
    assert!(version > 20);
    held
}

fn start(site: &Site, writer: u64) -> Child {
    let mut command = site.command(env::current_exe().unwrap());
    command.args(["--exact", NAME, "--nocapture"]).env("HARDWRAP_TEST_DIR", site.dir());
    command.env("HARDWRAP_TEST_WORKER", writer.to_string()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().unwrap()
}

#[test]
fn o3_o4_four_writers_lose_nothing_while_keys_are_rotated() {
    SoftHsm::isolated(NAME, |site| {
        if let Ok(writer) = env::var("HARDWRAP_TEST_WORKER") {
            let writer: u64 = writer.parse().unwrap();
            let held = if writer < 2 { writes_customers(site, writer) } else { writes_runs(site, writer) };
            let mut said = String::new();
            held.iter().for_each(|(row, value)| writeln!(said, "{row}\t{value}").unwrap());
            return fs::write(file(site, &format!("writer-{writer}")), said).unwrap();
        }
        sqlite3(&file(site, "app.db"), "CREATE TABLE customer (id INTEGER PRIMARY KEY, iban TEXT)");
        let keeper = keeper(site, "main");
        keeper.db().create_agent_run_table().unwrap();
        let writers: Vec<Child> = (0..4).map(|writer| start(site, writer)).collect();
        thread::sleep(Duration::from_millis(500));
        let mut moved = 0;
        for number in 0..2 * rotations() {
            let online = number % 2 == 0;
            let rotation = keeper.rotation().online(online).batch(20);
            let done = rotation.run().unwrap_or_else(|error| panic!("online {online}: {error}"));
            assert!(done.proven && done.open.is_empty(), "{done:?}");
            moved += done.moved;
            thread::sleep(Duration::from_millis(400));
        }
        fs::write(file(site, "stop"), "").unwrap();
        for writer in writers {
            let done = writer.wait_with_output().unwrap();
            let said = String::from_utf8_lossy(&done.stdout).into_owned() + &String::from_utf8_lossy(&done.stderr);
            assert!(done.status.success() && said.contains("1 passed"), "{said}");
            said.lines().filter(|line| line.starts_with("writer")).for_each(|line| println!("{line}"));
        }
        println!("{} rotations, {moved} values moved", 2 * rotations());
        assert!(keeper.rotation().resume().unwrap().nothing, "nothing came under an old key since the last proof");
        let newest = keeper.report().unwrap().current().unwrap().fact.kid;
        let mut values = 0;
        for column in keeper.register().columns() {
            let counts = keeper.db().count(column).unwrap();
            assert!(counts.sealed.keys().all(|kid| *kid == newest), "{column}: {counts:?}");
            values += counts.sealed_total();
        }
        // Every row holds what its writer committed last.
        let uids = sqlite3(&file(site, "app.db"), "SELECT uuid, uid FROM tx_nrllm_agentrun");
        let uids: BTreeMap<&str, &str> = uids.lines().map(|line| line.split_once('|').unwrap()).collect();
        let column_named = |name: &str| nr_llm().into_iter().find(|column| column.name() == name).unwrap();
        let mut holding = 0;
        for writer in 0..4 {
            let said = fs::read_to_string(file(site, &format!("writer-{writer}"))).unwrap();
            for (row, value) in said.lines().map(|line| line.split_once('\t').unwrap()) {
                let (column, key) = match row.split_once(' ') {
                    None => (iban(), row),
                    Some((uuid, name)) => (column_named(name), uids[uuid]),
                };
                // One that was cleared may never have been there.
                let stored = keeper.db().read(&column, key).unwrap();
                let opened = stored.and_then(|stored| stored.open(keeper.codec(), &column).unwrap());
                let opened = opened.as_ref().map_or(&b""[..], |opened| opened.expose());
                assert_eq!(opened, value.as_bytes(), "{column} {row}");
                holding += u64::from(!value.is_empty());
            }
        }
        assert_eq!(holding, values, "and no value is there that nobody wrote");
    });
}
