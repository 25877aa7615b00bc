//! What a rotation costs over its two floors, in rows a second: the token's calls, one unwrap and one wrap for each row,
//! in as many threads as the rotation uses; and the same UPDATEs with a constant text, in transactions of the same size.
//! Prints a table and asserts nothing about time.
//!
//! `cargo bench --bench rotate`, and with `-- --quick` for a twentieth of the rows, once.
#![allow(missing_docs, clippy::print_stdout, clippy::unwrap_used, reason = "a program for developers")]

#[path = "../tests/support/softhsm.rs"]
mod softhsm;
#[path = "../tests/support/sqlite.rs"]
mod sqlite;

use std::env;
use std::fs;
use std::hint::black_box;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::thread;
use std::time::Instant;

use diesel::connection::SimpleConnection;
use diesel::dsl::sql;
use diesel::prelude::*;
use diesel::sql_types::Text;
use hardwrap::column::Column;
use hardwrap::hsm::{Choice, Floor, Route};
use hardwrap::keeper::Keeper;
use hardwrap::provider::Aad;
use softhsm::SoftHsm;
use sqlite::sqlite3;

const TOKEN: &str = "HARDWRAP_BENCH_TOKEN";
const CELL: &str = "HARDWRAP_BENCH_CELL";
/// The routes that SoftHSM2 has.
const ROUTES: [Route; 2] = [Route::GcmCallerIv, Route::KwWrap];
/// Length of a value, and how many rows.
const SIZES: [(&str, usize, i32); 3] =
    [("1 KiB", 1 << 10, 100_000), ("16 KiB", 1 << 14, 20_000), ("64 KiB", 1 << 16, 8_000)];
/// Threads that ask the token, and whether online.
const MODES: [(usize, bool); 3] = [(1, true), (2, true), (2, false)];
/// Rows written in one transaction of an online rotation: its default.
const BATCH: usize = 500;

diesel::table! {
    run (id) {
        id -> Integer,
        state -> Text,
    }
}

fn main() -> ExitCode {
    // `cargo test` runs benches without `--bench`.
    let thorough = env::args().any(|arg| arg == "--bench") && !env::args().any(|arg| arg == "--quick");
    let cells = ROUTES.into_iter().flat_map(|route| SIZES.map(|size| (route, size)));
    let mut cells = cells.flat_map(|(route, size)| MODES.map(|mode| (route, size, mode)));
    // SoftHSM2 reads SOFTHSM2_CONF when it is loaded, so each cell is measured in a child that has it, with a token of
    // its own: SoftHSM2 becomes slower with each key.
    if let (Ok(token), Ok(cell)) = (env::var(TOKEN), env::var(CELL)) {
        let (route, (_, length, rows), mode) = cells.nth(cell.parse().unwrap()).unwrap();
        let (rows, rounds) = if thorough { (rows, 3) } else { (rows / 20, 1) };
        let rounds: Vec<Round> =
            (0..rounds).map(|_| Shop::new(&token, route, length, rows).measure(mode.0, mode.1)).collect();
        let of = |part: fn(&Round) -> f64| median(rounds.iter().map(part).collect());
        let (token, updates, rotation) =
            (of(|round| round.token), of(|round| round.updates), of(|round| round.rotation));
        println!("{token:>11.0} {updates:>11.0} {rotation:>11.0} {:>6.3}", rotation / token.min(updates));
        return ExitCode::SUCCESS;
    }
    println!(
        "{:<18} {:>7} {:>7} {:>8} {:>11} {:>11} {:>11} {:>6}",
        "rows a second", "size", "workers", "mode", "token", "updates", "rotation", "ratio"
    );
    for (cell, (route, (size, ..), (workers, online))) in cells.enumerate() {
        print!("{:<18} {size:>7} {workers:>7} {:>8} ", route.name(), if online { "online" } else { "atomic" });
        std::io::stdout().flush().unwrap();
        let hsm = SoftHsm::new();
        let mut child = hsm.site().command(env::current_exe().unwrap());
        child.args(env::args_os().skip(1)).env(TOKEN, hsm.site().uri()).env(CELL, cell.to_string());
        if !child.status().unwrap().success() {
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

/// Rows a second.
struct Round {
    token: f64,
    updates: f64,
    rotation: f64,
}

/// A database with one sealed column, and a keyring of its own.
struct Shop {
    directory: tempfile::TempDir,
    keeper: Keeper,
    rows: i32,
}

impl Shop {
    fn new(token: &str, route: Route, length: usize, rows: i32) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("app.db");
        sqlite3(&file, "CREATE TABLE run (id INTEGER PRIMARY KEY, state TEXT NOT NULL)");
        let url = format!("sqlite://{}", file.display());
        let column = || Column::new("run", "state", "id", "bench:run:state").unwrap().bound_to("id").unwrap();
        let keyring = uuid::Uuid::new_v4().to_string();
        let builder = Keeper::builder(token.parse().unwrap(), url.parse().unwrap()).columns([column()]);
        let (keeper, _) = builder.keyring(keyring).init(Choice::Route(route)).unwrap();
        let value: Vec<u8> = (0..=250).cycle().take(length).collect();
        let mut connection = SqliteConnection::establish(&file.display().to_string()).unwrap();
        let ids: Vec<i32> = (1..=rows).collect();
        for some in ids.chunks(BATCH) {
            let values: Vec<(i64, &[u8])> = some.iter().map(|id| (i64::from(*id), value.as_slice())).collect();
            let sealed = keeper.seal_many(column(), &values).unwrap();
            let rows: Vec<_> =
                some.iter().zip(sealed).map(|(id, sealed)| (run::id.eq(id), run::state.eq(sealed.unwrap()))).collect();
            connection
                .transaction(|connection| diesel::insert_into(run::table).values(rows).execute(connection))
                .unwrap();
        }
        connection.batch_execute("PRAGMA wal_checkpoint(TRUNCATE)").unwrap();
        Self { directory, keeper, rows }
    }

    fn measure(&self, workers: usize, online: bool) -> Round {
        let copy = self.directory.path().join("copy.db");
        fs::copy(self.directory.path().join("app.db"), &copy).unwrap();
        let token = self.token(workers);
        let updates = self.updates(&copy, if online { BATCH } else { usize::MAX });
        let rotation = self.rate(|| {
            let done = self.keeper.rotation().workers(workers).online(online).run().unwrap();
            assert!(done.proven && done.moved == u64::from(self.rows.unsigned_abs()));
        });
        Round { token, updates, rotation }
    }

    fn token(&self, workers: usize) -> f64 {
        let aad = Aad::new(b"here".to_vec());
        let each = self.rows.unsigned_abs() as usize / workers;
        self.rate(|| {
            thread::scope(|scope| {
                for _ in 0..workers {
                    scope.spawn(|| {
                        let calls = |floor: &Floor<'_>| {
                            for _ in 0..each {
                                floor.unwrap()?;
                                black_box(floor.wrap()?);
                            }
                            Ok(())
                        };
                        Floor::with(self.keeper.keyring(), &aad, calls).unwrap();
                    });
                }
            });
        })
    }

    /// The front of every row replaced by a constant one, the rest kept, as somebody writes it who checks nothing.
    fn updates(&self, file: &Path, batch: usize) -> f64 {
        let mut connection = SqliteConnection::establish(&file.display().to_string()).unwrap();
        connection.batch_execute("PRAGMA synchronous = FULL; PRAGMA secure_delete = ON").unwrap();
        let ids: Vec<i32> = (1..=self.rows).collect();
        let front: String = run::table.find(1).select(run::state).first(&mut connection).unwrap();
        let front = front.split_once('.').unwrap().0;
        let from = format!(" || substr(state, {})", front.len() + 1);
        self.rate(|| {
            for some in ids.chunks(batch.min(ids.len())) {
                let update = |connection: &mut SqliteConnection| {
                    for id in some {
                        let new = sql::<Text>("").bind::<Text, _>(front).sql(&from);
                        diesel::update(run::table.find(id)).set(run::state.eq(new)).execute(connection)?;
                    }
                    Ok::<_, diesel::result::Error>(())
                };
                connection.immediate_transaction(update).unwrap();
            }
        })
    }

    fn rate(&self, work: impl FnOnce()) -> f64 {
        let began = Instant::now();
        work();
        f64::from(self.rows) / began.elapsed().as_secs_f64()
    }
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}
