//! No PIN, DEK or value in anything that is said: spans and events, metric labels, errors with their chains, Debug,
//! panics, and what the commands print. Every path is driven with secrets that would be recognised.
#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout, reason = "tests")]

#[path = "support/softhsm.rs"]
mod softhsm;
#[path = "support/sqlite.rs"]
mod sqlite;

use std::error::Error as StdError;
use std::fmt::{Debug, Write as _};
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::panic;
use std::process::Stdio;
use std::sync::{Arc, Mutex};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hardwrap::codec::Codec;
use hardwrap::column::{Cleartext, Column, Row};
use hardwrap::hsm::{Choice, Keyring, PinSource};
use hardwrap::keeper::Keeper;
use hardwrap::provider::{Aad, KeyId, KeyProvider, MasterKey, ProviderError, WrappedDek};
use hardwrap::secret::Dek;
use hardwrap::store::{AgentRuns, NewRun, Persister};
use metrics_util::debugging::DebuggingRecorder;
use softhsm::{PIN, Site, SoftHsm};
use sqlite::sqlite3;

/// What a value says of itself, wherever it turns up.
const VALUE: &str = "VALUE-5e1f0b7c-TO-BE-KEPT";
const OTHER_PIN: &str = "wrong-pin-90215";
const PASSWORD: &str = "database-password-3377";

/// Everything that was said.
#[derive(Clone, Default)]
struct Heard(Arc<Mutex<Vec<u8>>>);

impl Heard {
    fn say(&self, text: &str) {
        self.0.lock().unwrap().extend_from_slice(text.as_bytes());
    }

    /// An error, as people see it and as programmers do, with its chain.
    fn error(&self, error: &(dyn StdError + 'static)) {
        self.say(&format!("{error:?}\n"));
        let mut next = Some(error);
        while let Some(error) = next {
            self.say(&format!("{error}\n"));
            next = error.source();
        }
    }

    fn outcome<T: Debug, E: StdError + 'static>(&self, outcome: Result<T, E>) {
        match outcome {
            Ok(done) => self.say(&format!("{done:?}\n")),
            Err(error) => self.error(&error),
        }
    }

    fn fails<T: Debug, E: StdError + 'static>(&self, outcome: Result<T, E>) {
        assert!(outcome.is_err(), "{outcome:?}");
        self.outcome(outcome);
    }
}

impl Write for Heard {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The real keyring, which tells the test each DEK that passes.
struct Overheard {
    keyring: Arc<Keyring>,
    deks: Arc<Mutex<Vec<[u8; 32]>>>,
}

impl KeyProvider for Overheard {
    fn current(&self) -> Result<MasterKey, ProviderError> {
        self.keyring.current()
    }

    fn wrap(&self, key: KeyId, dek: &Dek, aad: &Aad) -> Result<WrappedDek, ProviderError> {
        self.deks.lock().unwrap().push(*dek.expose());
        self.keyring.wrap(key, dek, aad)
    }

    fn unwrap(&self, wrapped: &WrappedDek, aad: &Aad) -> Result<Dek, ProviderError> {
        let dek = self.keyring.unwrap(wrapped, aad)?;
        self.deks.lock().unwrap().push(*dek.expose());
        Ok(dek)
    }
}

fn column() -> Column {
    Column::new("t", "c", "id", "t:c").unwrap().bound_to("id").unwrap()
}

/// Every way in which `bytes` could have been written: as text, hex, base64, and as Debug writes bytes.
fn forms(bytes: &[u8]) -> Vec<Vec<u8>> {
    let mut listed = String::new();
    let mut hexed = String::new();
    for byte in bytes.iter().take(12) {
        let _ = write!(listed, "{byte}, ");
        let _ = write!(hexed, "{byte:x}, ");
    }
    let hex = hex::encode(&bytes[..bytes.len().min(16)]);
    let mut forms = vec![
        bytes[..bytes.len().min(16)].to_vec(),
        hex.to_uppercase().into_bytes(),
        hex.into_bytes(),
        listed.into_bytes(),
        hexed.into_bytes(),
    ];
    // At each of the three offsets that a byte can have in base64, without the letters that depend on neighbours.
    for offset in 0..3 {
        let encoded = STANDARD.encode([&vec![0; offset], bytes].concat());
        forms.push(encoded.as_bytes()[offset.div_ceil(3) * 4..][..16].to_vec());
    }
    forms
}

/// Where a secret stands in what was heard.
fn position(heard: &[u8], secret: &[u8]) -> Option<usize> {
    forms(secret).iter().find_map(|form| heard.windows(form.len()).position(|window| window == form))
}

fn search(heard: &[u8], what: &str, secret: &[u8]) {
    if let Some(at) = position(heard, secret) {
        let around = &heard[at.saturating_sub(200)..heard.len().min(at + 40)];
        panic!("{what} was said, after: {}", String::from_utf8_lossy(around));
    }
}

#[test]
fn the_search_finds_what_it_looks_for() {
    let secret: Vec<u8> = (100..132).collect();
    let shown = [
        format!("{secret:?}"),
        format!("{secret:x?}"),
        hex::encode(&secret),
        STANDARD.encode([b"12".as_slice(), &secret].concat()),
        STANDARD.encode([b"1".as_slice(), &secret].concat()),
        STANDARD.encode(&secret),
        String::from_utf8_lossy(&secret).into_owned(),
    ];
    for shown in shown {
        assert!(position(shown.as_bytes(), &secret).is_some(), "{shown}");
    }
    assert_eq!(position(b"nothing of the kind", &secret), None);
}

#[test]
fn the_library_says_no_secret() {
    SoftHsm::faulty("the_library_says_no_secret", |site| {
        let heard = Heard::default();
        let writer = heard.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(tracing_subscriber::filter::LevelFilter::TRACE)
            .with_span_events(tracing_subscriber::fmt::format::FmtSpan::FULL)
            .with_writer(move || writer.clone())
            .finish();
        tracing::subscriber::set_global_default(subscriber).unwrap();
        let recorder = DebuggingRecorder::new();
        let snapshots = recorder.snapshotter();
        metrics::set_global_recorder(recorder).unwrap();
        let panics = heard.clone();
        panic::set_hook(Box::new(move |panic| panics.say(&format!("{panic}\n"))));

        let deks = Arc::new(Mutex::new(Vec::new()));
        let driven = panic::catch_unwind(panic::AssertUnwindSafe(|| drive(site, &heard, &deks)));
        let _ = panic::take_hook();
        if let Err(panic) = driven {
            println!("{}", String::from_utf8_lossy(&heard.0.lock().unwrap()));
            panic::resume_unwind(panic);
        }
        for (key, unit, description, value) in snapshots.snapshot().into_vec() {
            heard.say(&format!("{key:?} {unit:?} {description:?} {value:?}\n"));
        }
        let said = heard.0.lock().unwrap().clone();
        let text = String::from_utf8_lossy(&said);
        // That it was listened to at all.
        for word in [
            "hardwrap::codec",
            "hardwrap::hsm",
            "hardwrap_token_calls_total",
            "CKR_DEVICE_ERROR",
            "hardwrap_seals_total",
            "hardwrap_errors_total",
            "Rejected",
            "Unavailable",
        ] {
            assert!(text.contains(word), "{word} was never said");
        }
        let deks = deks.lock().unwrap();
        assert!(deks.len() > 20);
        for (what, secret) in
            [("the PIN", PIN), ("a wrong PIN", OTHER_PIN), ("the value", VALUE), ("a password", PASSWORD)]
        {
            search(&said, what, secret.as_bytes());
        }
        for dek in deks.iter() {
            search(&said, "a DEK", dek);
        }
        println!("{} bytes heard, {} DEKs", said.len(), deks.len());
    });
}

/// Every path: what works, and what fails in each way there is.
fn drive(site: &Site, heard: &Heard, deks: &Arc<Mutex<Vec<[u8; 32]>>>) {
    let url = format!("sqlite://{}/app.db", site.dir().display());
    let builder = || {
        let builder = Keeper::builder(site.faulty_uri().parse().unwrap(), url.parse().unwrap());
        builder.columns([column()]).columns(hardwrap::column::nr_llm())
    };
    // Wrong PINs first, from every source, so that no session is logged in yet.
    let wrong = site.dir().join("wrong-pin");
    fs::write(&wrong, OTHER_PIN).unwrap();
    heard.say(&format!("{:?} {:?}", builder(), PinSource::File(wrong.clone())));
    heard.outcome(format!("pkcs11:token=x?pin-value={PIN}").parse::<hardwrap::hsm::TokenUri>());
    heard.outcome(format!("oracle://scott:{PASSWORD}@host/db").parse::<hardwrap::store::DatabaseUrl>());
    heard.outcome(PinSource::File(site.pin_file()).read());
    heard.fails(PinSource::Env("NO_SUCH_VARIABLE".to_owned()).read());
    site.add_token("spare");
    let spare = site.faulty_uri().replace("token=hardwrap-test", "token=spare");
    let spare = Keeper::builder(spare.parse().unwrap(), url.parse().unwrap());
    heard.fails(spare.pin_source(PinSource::File(wrong)).init(Choice::Auto));

    let (keeper, made) = builder().init(Choice::Auto).unwrap();
    heard.say(&format!("{keeper:?} {made:?}"));
    heard.outcome(builder().open());
    let keyring = Arc::new(Keyring::new(builder().config().unwrap().token).unwrap());
    heard.say(&format!("{keyring:?} {:?}", keyring.report().unwrap()));
    let codec = Codec::new(Arc::new(Overheard { keyring: Arc::clone(&keyring), deks: Arc::clone(deks) }));
    let (column, accepting) = (column(), column().cleartext(Cleartext::Accept));
    let (row, other) = (Row::from(7), Row::from(8));
    let place = column.at(Some(&row)).unwrap();
    let elsewhere = column.at(Some(&other)).unwrap();
    let open_window = accepting.at(Some(&row)).unwrap();
    let mut sealed = String::new();
    for _ in 0..12 {
        sealed = codec.seal(&place, VALUE.as_bytes()).unwrap();
        heard.outcome(codec.open(&place, &sealed));
    }
    heard.outcome(codec.rewrap(&place, &sealed));
    heard.fails(codec.open(&elsewhere, &sealed));
    heard.fails(codec.rewrap(&elsewhere, &sealed.replacen("hw1:0001", "hw1:0002", 1)));
    heard.fails(codec.open(&place, VALUE));
    heard.outcome(codec.open(&open_window, VALUE));
    for damaged in [
        format!("nrv1:{VALUE}"),
        format!("hw2:{VALUE}"),
        format!("hw1:{VALUE}"),
        format!("hw1:0001000000000000:{VALUE}.{VALUE}"),
        sealed.replacen('.', &format!(".{VALUE}"), 1),
        sealed[..sealed.len() - 4].to_owned(),
    ] {
        heard.fails(codec.open(&place, &damaged));
        heard.outcome(codec.rewrap(&place, &damaged));
    }
    let full = column.clone().holding(hardwrap::column::Capacity(Some(10)));
    heard.fails(codec.seal(&full.at(Some(&row)).unwrap(), VALUE.as_bytes()));
    let values: Vec<(i64, &str)> = vec![(7, VALUE), (8, VALUE)];
    heard.outcome(keeper.seal_many(&column, &values));
    heard.outcome(keeper.open_many(&column, &values));
    heard.outcome(keeper.rewrap_many(&column, &values));
    heard.outcome(
        keeper.seal(&column, VALUE, VALUE.as_bytes()).map_err(|error| error.to_string().len()).map_err(NotSaid),
    );

    // Agent runs: what is no JSON, and what is.
    let runs = AgentRuns::new(keeper.db().clone(), codec.clone(), keeper.register()).unwrap();
    let persister = Persister::new(runs);
    heard.fails(persister.enqueue(&NewRun::default(), VALUE, 1));
    let id = persister.enqueue(&NewRun::default(), &format!("{{\"prompt\":\"{VALUE}\"}}"), 1).unwrap();
    heard.outcome(persister.runs().find(&id));
    heard.say(&format!("{persister:?}"));

    // A token that fails in every function we call, with every kind of answer.
    for function in ["C_EncryptInit", "C_Encrypt", "C_DecryptInit", "C_Decrypt", "any"] {
        for ckr in ["0x5", "0x30", "0x40", "0x42", "0x68", "0x82", "0xb3", "0x101", "0x190", "0x80000001"] {
            site.set_faults(&format!("{function} 1 {ckr}"));
            heard.outcome(codec.seal(&place, VALUE.as_bytes()));
            site.set_faults(&format!("{function} 1 {ckr}"));
            heard.outcome(codec.open(&place, &sealed));
        }
    }
    for flags in ["low", "final", "locked"] {
        site.set_faults(&format!("pin-flags {flags}\nC_GetSessionInfo 1 0xb3\nC_Encrypt 1 0x101"));
        heard.outcome(codec.seal(&place, VALUE.as_bytes()));
    }
    site.set_faults("C_Login * 0xa0\nC_Encrypt 1 0x190");
    heard.outcome(codec.seal(&place, VALUE.as_bytes()));
    site.set_faults("");

    // A panic with everything at hand.
    let broken = panic::catch_unwind(panic::AssertUnwindSafe(|| {
        let opened = codec.open(&open_window, VALUE).unwrap();
        let pin = PinSource::File(site.pin_file()).read().unwrap();
        panic!("{opened:?} {pin:?} {codec:?} {keeper:?} {persister:?}");
    }));
    assert!(broken.is_err());
}

/// An error whose text may quote what the caller gave as a row: its length is all that is said.
#[derive(Debug, thiserror::Error)]
#[error("an error of {0} letters")]
struct NotSaid(usize);

#[test]
fn the_commands_say_no_secret() {
    let hsm = SoftHsm::new();
    let site = hsm.site();
    let config = site.dir().join("hardwrap.toml");
    let write = |uri: &str, url: &str| {
        let text = format!(
            "environment = \"test\"\n[token]\nuri = \"{uri}\"\n[database]\nurl = \"{url}\"\n[[column]]\n\
             preset = \"nr-llm\"\n[[column]]\ntable = \"t\"\ncolumn = \"c\"\nkey = \"id\"\nidentifier = \"t:c\"\n"
        );
        fs::write(&config, text).unwrap();
        fs::set_permissions(&config, fs::Permissions::from_mode(0o600)).unwrap();
    };
    let mut heard = Vec::new();
    let mut run = |arguments: &[&str], input: &str| {
        let mut child = site
            .command(env!("CARGO_BIN_EXE_hardwrap"))
            .args(["--config", config.to_str().unwrap()])
            .args(arguments)
            .env("WRONG_PIN", OTHER_PIN)
            .env("RUST_BACKTRACE", "full")
            .env_remove("HARDWRAP_TEST_DIR")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
        let done = child.wait_with_output().unwrap();
        heard.extend_from_slice(&done.stderr);
        if arguments.first() != Some(&"open") {
            heard.extend_from_slice(&done.stdout);
        }
        done.stdout
    };
    let url = format!("sqlite://{}/app.db", site.dir().display());
    write(&site.uri(), &url);
    let sqlite = |sql: &str| sqlite3(&site.dir().join("app.db"), sql);
    sqlite("CREATE TABLE t (id INTEGER PRIMARY KEY, c TEXT)");
    run(&["init"], "");
    let sealed = String::from_utf8(run(&["seal", "--column", "t.c"], VALUE)).unwrap();
    let sql = format!(
        "INSERT INTO t VALUES (1, '{sealed}'), (2, '{VALUE}'), \
         (3, 'hw1:{VALUE}'), (4, 'nrv1:{VALUE}'), (5, '{}');
         INSERT INTO tx_nrllm_agentrun (uuid, queued_request) VALUES ('u-1', '{VALUE}')",
        &sealed[..sealed.len() - 4]
    );
    sqlite(&sql);
    for arguments in [
        &["init"][..],
        &["key", "list"],
        &["columns"],
        &["status"],
        &["status", "--sql", "--check"],
        &["verify", "--all"],
        &["doctor"],
        &["runs", "list"],
        &["runs", "show", "u-1"],
        &["runs", "cancel", "u-1", "--reason", "x"],
        &["runs", "purge", "--unfinished", "1", "--dry-run"],
        &["key", "list", "--clean"],
        &["demo"],
        &["open", "--column", "t.c", "--key", "2"],
        &["open", "--column", "t.c", "--key", "3"],
        &["open", "--column", "t.c", "--key", "4"],
        &["open", "--column", "t.c", "--key", "5"],
    ] {
        run(arguments, "");
        run(&[&["--json"], arguments].concat(), "");
    }
    run(&["status", "--prometheus"], "");
    run(&["open", "--column", "t.c"], VALUE);
    // Wrong settings, whose values may hold what is secret.
    let uri = site.uri_with(&softhsm::softhsm_module(), "env:WRONG_PIN");
    for (uri, url) in [
        (uri.as_str(), url.as_str()),
        (&format!("pkcs11:token=x?pin-value={PIN}"), &url),
        (&site.uri(), &format!("postgres://me:{PASSWORD}@nowhere.invalid/db")),
        (&site.uri(), &format!("sqlite://{PASSWORD}\"")),
        (&format!("{PIN}\n"), &url),
    ] {
        write(uri, url);
        for arguments in
            [&["doctor"][..], &["init"], &["key", "list"], &["status"], &["columns"], &["seal", "--column", "t.c"]]
        {
            run(arguments, VALUE);
        }
    }
    for secret in [PIN, OTHER_PIN, VALUE] {
        search(&heard, "a secret", secret.as_bytes());
    }
    search(&heard, "a password", &PASSWORD.as_bytes()[..16]);
}
