//! What sealing and opening cost over the floor: the bare token calls of the same route, bare AES-256-GCM under a DEK
//! of its own, and base64 of a text of the same length. Prints a table and asserts nothing about time.
//!
//! `cargo bench --bench seal` measures for 1.5 s a cell, `cargo bench --bench seal -- --quick` for 0.2 s.
#![allow(missing_docs, clippy::print_stdout, clippy::unwrap_used, reason = "a program for developers")]

#[path = "../tests/support/softhsm.rs"]
mod softhsm;
#[path = "../tests/support/sqlite.rs"]
mod sqlite;

use std::env;
use std::hint::black_box;
use std::process::ExitCode;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use aes_gcm::aead::{Aead, Payload};
use aes_gcm::{Aes256Gcm, KeyInit, Nonce};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hardwrap::codec::Codec;
use hardwrap::column::{Column, Place, Row, nr_llm};
use hardwrap::hsm::{Choice, Floor, Keyring, Route, Settings};
use hardwrap::keeper::Keeper;
use hardwrap::provider::Aad;
use hardwrap::store::DatabaseUrl;
use softhsm::SoftHsm;
use sqlite::sqlite3;

/// The routes that SoftHSM2 has.
const ROUTES: [Route; 2] = [Route::GcmCallerIv, Route::KwWrap];
const SIZES: [(&str, usize); 3] = [("1 KiB", 1 << 10), ("64 KiB", 1 << 16), ("1 MiB", 1 << 20)];
/// How long a round of one side takes, about: long against the clock, short against what disturbs the machine.
const ROUND: Duration = Duration::from_millis(1);
/// Wraps in a round of [`two_sessions`], long enough for two threads to fall into whatever step they fall into within
/// the token, and how many values `seal_many` gets at a time.
const CALLS: u32 = 4096;
const BATCH: usize = 512;
const TOKEN: &str = "HARDWRAP_BENCH_TOKEN";

fn main() -> ExitCode {
    // SoftHSM2 reads SOFTHSM2_CONF when it is loaded, so the measuring is done in a child that has it.
    let Ok(token) = env::var(TOKEN) else {
        let hsm = SoftHsm::new();
        let mut child = hsm.site().command(env::current_exe().unwrap());
        let run = child.args(env::args_os().skip(1)).env(TOKEN, hsm.site().uri()).status().unwrap();
        return if run.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    };
    // `cargo test` runs benches without `--bench`.
    let thorough = env::args().any(|arg| arg == "--bench") && !env::args().any(|arg| arg == "--quick");
    let budget = Duration::from_millis(if thorough { 1500 } else { 200 });
    println!("{:<18} {:>7} {:>6} {:>12} {:>12} {:>7}", "route", "size", "", "floor µs", "ours µs", "ratio");
    for route in ROUTES {
        let settings = Settings { keyring: route.name().to_owned(), ..Settings::new(token.parse().unwrap()) };
        let keyring = Arc::new(Keyring::new(settings).unwrap());
        keyring.init(Choice::Route(route)).unwrap();
        for (size, length) in SIZES {
            let bench = Bench::new(Arc::clone(&keyring), length);
            for (operation, sides) in [("seal", bench.seal(budget)), ("open", bench.open(budget))] {
                let Sides { floor, ours } = sides;
                println!(
                    "{:<18} {size:>7} {operation:>6} {floor:>12.2} {ours:>12.2} {:>7.3}",
                    route.name(),
                    ours / floor
                );
            }
        }
    }
    two_sessions(&token, budget);
    ExitCode::SUCCESS
}

/// What a second session gains: the bare token calls in two threads over one, and `seal_many` in two sessions over one.
fn two_sessions(token: &str, budget: Duration) {
    println!("\n{:<18} {:>14} {:>14} {:>7}", "two sessions", "bare gain", "our gain", "ratio");
    let column = || Column::new("t", "c", "id", "t:c").unwrap();
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("app.db");
    let url: DatabaseUrl = format!("sqlite://{}", file.display()).parse().unwrap();
    sqlite3(&file, "CREATE TABLE t (id INTEGER PRIMARY KEY, c TEXT)");
    let builder = |keyring: &str, sessions| {
        let builder = Keeper::builder(token.parse().unwrap(), url.clone()).columns([column()]);
        builder.keyring(format!("two {keyring}")).sessions(sessions)
    };
    let values = vec![((), vec![7; 1024]); BATCH];
    for route in ROUTES {
        // Another keyring, so that the database begins anew with each.
        let (one, _) = builder(route.name(), 1).init(Choice::Route(route)).unwrap();
        let two = builder(route.name(), 2).open().unwrap();
        let aad = Aad::new(b"here".to_vec());
        let bare = |threads: u32| {
            let began = Instant::now();
            thread::scope(|scope| {
                for _ in 0..threads {
                    scope.spawn(|| {
                        Floor::with(two.keyring(), &aad, |floor| {
                            for _ in 0..CALLS / threads {
                                black_box(floor.wrap()?);
                            }
                            Ok(())
                        })
                        .unwrap();
                    });
                }
            });
            began.elapsed().as_secs_f64()
        };
        let ours = |keeper: &Keeper| {
            let began = Instant::now();
            for _ in 0..CALLS as usize / BATCH {
                for sealed in keeper.seal_many(column(), &values).unwrap() {
                    black_box(sealed.unwrap());
                }
            }
            began.elapsed().as_secs_f64()
        };
        // Every side in turn, so that all see the same machine.
        let mut rounds = [const { Vec::new() }; 4];
        let began = Instant::now();
        while began.elapsed() < 4 * budget || rounds[0].len() < 5 {
            for (round, seconds) in rounds.iter_mut().zip([bare(1), bare(2), ours(&one), ours(&two)]) {
                round.push(seconds);
            }
        }
        let [bare_one, bare_two, ours_one, ours_two] = rounds.map(median);
        let (bare, ours) = (bare_one / bare_two, ours_one / ours_two);
        println!("{:<18} {bare:>14.3} {ours:>14.3} {:>7.3}", route.name(), ours / bare);
    }
}

/// One value on one keyring.
struct Bench {
    keyring: Arc<Keyring>,
    codec: Codec,
    row: Row,
    value: Vec<u8>,
}

/// µs for one operation.
struct Sides {
    floor: f64,
    ours: f64,
}

impl Bench {
    fn new(keyring: Arc<Keyring>, length: usize) -> Self {
        let codec = Codec::new(keyring.clone());
        let value = (0..=250).cycle().take(length).collect();
        Self { keyring, codec, row: "9f2c1ab0-5d1e-4c55-9a57-0d8a4b1f7e63".try_into().unwrap(), value }
    }

    fn seal(&self, budget: Duration) -> Sides {
        self.at(|place| {
            let context = place.context().as_bytes();
            let floor = |floor: &Floor<'_>| {
                black_box(floor.wrap().unwrap());
                let payload = Payload { msg: &self.value, aad: context };
                let ciphertext = cipher().encrypt(&nonce(), payload).unwrap();
                black_box(STANDARD.encode(&ciphertext));
            };
            let ours = || {
                black_box(self.codec.seal(place, &self.value).unwrap());
            };
            self.compare(place, budget, floor, ours)
        })
    }

    fn open(&self, budget: Duration) -> Sides {
        self.at(|place| {
            let context = place.context().as_bytes();
            let bare = cipher().encrypt(&nonce(), Payload { msg: &self.value, aad: context }).unwrap();
            let bare = STANDARD.encode(bare);
            let sealed = self.codec.seal(place, &self.value).unwrap();
            let floor = |floor: &Floor<'_>| {
                floor.unwrap().unwrap();
                let ciphertext = STANDARD.decode(&bare).unwrap();
                black_box(cipher().decrypt(&nonce(), Payload { msg: &ciphertext, aad: context }).unwrap());
            };
            let ours = || {
                black_box(self.codec.open(place, &sealed).unwrap());
            };
            self.compare(place, budget, floor, ours)
        })
    }

    fn at<T>(&self, work: impl FnOnce(&Place<'_>) -> T) -> T {
        let column = nr_llm().remove(0);
        work(&column.at(Some(&self.row)).unwrap())
    }

    /// Rounds of one side and the other in turn; the median of each. Both see the same machine.
    fn compare(&self, place: &Place<'_>, budget: Duration, floor: impl Fn(&Floor<'_>), ours: impl Fn()) -> Sides {
        let aad = place.context().aad();
        let floor_round = |times| Floor::with(&self.keyring, &aad, |calls| Ok(time(times, || floor(calls)))).unwrap();
        let once = time(8, &ours).min(floor_round(8));
        let once = Duration::from_secs_f64(once / 1e6).as_nanos().max(1);
        let times = u32::try_from(ROUND.as_nanos() / once).unwrap_or(1).max(1);
        let (mut floors, mut all_ours) = (Vec::new(), Vec::new());
        let began = Instant::now();
        while began.elapsed() < budget || floors.len() < 3 {
            floors.push(floor_round(times));
            all_ours.push(time(times, &ours));
        }
        Sides { floor: median(floors), ours: median(all_ours) }
    }
}

/// The key schedule is part of the floor: each value has a DEK of its own.
fn cipher() -> Aes256Gcm {
    Aes256Gcm::new(black_box(&[0x5a; 32]).into())
}

fn nonce() -> Nonce<aes_gcm::aead::consts::U12> {
    Nonce::from(black_box([7; 12]))
}

/// µs for one of `times`.
fn time(times: u32, work: impl Fn()) -> f64 {
    let began = Instant::now();
    for _ in 0..times {
        work();
    }
    began.elapsed().as_secs_f64() * 1e6 / f64::from(times)
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}
