//! Sixteen threads on one keeper, one value at a time and in batches: no error, and nothing is left on the token.
#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout, reason = "tests")]

#[path = "support/softhsm.rs"]
mod softhsm;
#[path = "support/sqlite.rs"]
mod sqlite;

use std::env;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use hardwrap::column::Column;
use hardwrap::hsm::{Choice, Route};
use hardwrap::keeper::Keeper;
use softhsm::SoftHsm;
use sqlite::sqlite3;

const THREADS: u64 = 16;
const BATCH: usize = 50;

/// How many values at least, and for how long at least; `ci/long` sets HARDWRAP_LONG.
fn counts() -> (u64, Duration) {
    if env::var_os("HARDWRAP_LONG").is_some() {
        (100_000, Duration::from_mins(1))
    } else {
        (10_000, Duration::from_secs(6))
    }
}

fn soak(route: Route) {
    SoftHsm::isolated(&format!("sixteen_threads::{}", route.name().replace('-', "_")), |site| {
        let column = || Column::new("t", "c", "id", "t:c").unwrap().bound_to("id").unwrap();
        let url = format!("sqlite://{}/app.db", site.dir().display());
        sqlite3(&site.dir().join("app.db"), "CREATE TABLE t (id INTEGER PRIMARY KEY, c TEXT)");
        let builder = Keeper::builder(site.uri().parse().unwrap(), url.parse().unwrap()).columns([column()]);
        let (keeper, _) = builder.init(Choice::Route(route)).unwrap();
        let sealed = keeper.seal(column(), 0, b"x").unwrap();
        assert_eq!(keeper.open_value(column(), 0, &sealed).unwrap().expose(), b"x");
        let objects = keeper.keyring().count_objects().unwrap();

        let (values, wanted) = (AtomicU64::new(0), counts());
        let began = Instant::now();
        thread::scope(|scope| {
            for thread in 0..THREADS {
                let (keeper, values) = (keeper.clone(), &values);
                scope.spawn(move || {
                    let mut round = 0;
                    while values.load(Ordering::Relaxed) < wanted.0 || began.elapsed() < wanted.1 {
                        let row = i64::try_from(thread * 1_000_000 + round).unwrap();
                        let batch: Vec<(i64, String)> =
                            (row..).take(BATCH).map(|row| (row, format!("value of {row}"))).collect();
                        if round % 2 == 0 {
                            let sealed = keeper.seal_many(column(), &batch).unwrap();
                            let stored: Vec<(i64, String)> =
                                batch.iter().zip(sealed).map(|((row, _), text)| (*row, text.unwrap())).collect();
                            for ((_, value), opened) in batch.iter().zip(keeper.open_many(column(), &stored).unwrap()) {
                                assert_eq!(opened.unwrap().expose(), value.as_bytes());
                            }
                        } else {
                            for (row, value) in &batch {
                                let sealed = keeper.seal(column(), row, value.as_bytes()).unwrap();
                                assert_eq!(
                                    keeper.open_value(column(), row, &sealed).unwrap().expose(),
                                    value.as_bytes()
                                );
                            }
                        }
                        values.fetch_add(BATCH as u64, Ordering::Relaxed);
                        round += 1;
                    }
                });
            }
        });
        println!("{route}: {} values in {:.1} s", values.load(Ordering::Relaxed), began.elapsed().as_secs_f64());
        assert!(values.load(Ordering::Relaxed) >= wanted.0);
        assert_eq!(keeper.keyring().count_objects().unwrap(), objects);
    });
}

mod sixteen_threads {
    use super::*;

    #[test]
    fn aes_gcm_caller_iv() {
        soak(Route::GcmCallerIv);
    }

    #[test]
    fn aes_kw_wrap() {
        soak(Route::KwWrap);
    }
}
