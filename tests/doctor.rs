//! The doctor: every finding is provoked on a real token and a real database, and is gone once its remedy is followed.
#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout, reason = "tests")]

#[path = "support/bench.rs"]
mod bench;
#[path = "support/softhsm.rs"]
mod softhsm;
#[path = "support/sqlite.rs"]
mod sqlite;

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

use bench::{Bench, text};
use cryptoki::context::{CInitializeArgs, CInitializeFlags, Pkcs11};
use cryptoki::mechanism::Mechanism;
use cryptoki::object::{Attribute, KeyType, ObjectClass, ObjectHandle};
use cryptoki::session::{Session, UserType};
use cryptoki::types::AuthPin;
use hardwrap::keeper::FindingId;
use serde_json::Value;
use softhsm::{PIN, SoftHsm};

/// A deployment of which the doctor has nothing to say.
fn healthy() -> Bench {
    let bench = Bench::new();
    bench.edit("preset = \"nr-llm\"", "preset = \"nr-llm\"\ncleartext = \"refuse\"");
    bench.ok(&["init"], b"");
    bench.sql("CREATE TABLE customer (id INTEGER PRIMARY KEY, iban TEXT, motto TEXT)");
    close(&bench);
    well(&bench);
    bench
}

/// Makes the database's files unreadable for others.
fn close(bench: &Bench) {
    for file in ["app.db", "app.db-wal", "app.db-shm"] {
        let path = bench.hsm.site().dir().join(file);
        if path.exists() {
            mode(&path, 0o600);
        }
    }
}

fn mode(path: &Path, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

fn examined(done: &Output) -> Value {
    serde_json::from_slice(&done.stdout).unwrap_or_else(|_| panic!("{}{}", text(&done.stdout), text(&done.stderr)))
}

fn doctor(bench: &Bench) -> (Option<i32>, Value) {
    let done = bench.run(&["--json", "doctor"], b"");
    (done.status.code(), examined(&done))
}

fn finding<'a>(diagnosis: &'a Value, id: &str) -> Option<&'a Value> {
    diagnosis["findings"].as_array().unwrap().iter().find(|finding| finding["id"] == id)
}

/// The doctor finds `id`, says what it is and what to do, and ends as the worst finding wants it.
fn ill(bench: &Bench, id: &str, severity: &str) -> Value {
    let (code, diagnosis) = doctor(bench);
    let found = finding(&diagnosis, id).unwrap_or_else(|| panic!("{id} is not found: {diagnosis:#}")).clone();
    assert_eq!(found["severity"], severity, "{found:#}");
    for field in ["subject", "what", "risk", "remedy"] {
        assert!(!found[field].as_str().unwrap().is_empty(), "{found:#}");
    }
    let severities: Vec<&str> =
        diagnosis["findings"].as_array().unwrap().iter().map(|one| one["severity"].as_str().unwrap()).collect();
    let expected = if severities.contains(&"critical") {
        1
    } else if severities.contains(&"warning") {
        3
    } else {
        0
    };
    assert_eq!(code, Some(expected), "{diagnosis:#}");
    // For people the same is said.
    let shown = bench.run(&["doctor"], b"");
    assert_eq!(shown.status.code(), Some(expected));
    assert!(text(&shown.stdout).contains(&format!("{id}: ")), "{}", text(&shown.stdout));
    diagnosis
}

/// Nothing is found at all, and everything was looked at.
fn well(bench: &Bench) {
    let (code, diagnosis) = doctor(bench);
    let checks = diagnosis["checks"].as_array().unwrap();
    assert!(checks.iter().all(|check| check["outcome"] == "passed"), "{diagnosis:#}");
    assert_eq!((code, &diagnosis["findings"]), (Some(0), &Value::Array(vec![])), "{diagnosis:#}");
}

/// A check that did not run says so, and is no pass.
fn not_run(diagnosis: &Value, checks: &[&str]) {
    for id in checks {
        let check = diagnosis["checks"].as_array().unwrap().iter().find(|check| check["id"] == *id).unwrap();
        assert_eq!(check["outcome"], "not-run", "{diagnosis:#}");
        assert!(!check["note"].as_str().unwrap().is_empty());
    }
}

#[test]
fn configuration_and_module() {
    let bench = healthy();
    let (config, dir) = (bench.config(), bench.hsm.site().dir().to_owned());
    mode(&config, 0o620);
    let diagnosis = ill(&bench, "configuration-unsafe", "critical");
    // A library that others may have named is not loaded.
    not_run(
        &diagnosis,
        &["module", "pin", "token", "keyring", "keys", "routes", "database", "columns", "values", "discovery"],
    );
    mode(&config, 0o600);
    well(&bench);

    bench.edit("[token]", "[token]\ncolour = \"blue\"");
    ill(&bench, "configuration-invalid", "critical");
    bench.edit("\ncolour = \"blue\"", "");
    well(&bench);

    mode(&dir, 0o770);
    ill(&bench, "configuration-directory-writable", "warning");
    mode(&dir, 0o700);
    well(&bench);

    // A module of our own: others can write it, then its directory; then it is gone.
    let module = dir.join("lib/module.so");
    fs::create_dir(dir.join("lib")).unwrap();
    fs::copy(softhsm::softhsm_module(), &module).unwrap();
    mode(&module, 0o755);
    let theirs = softhsm::softhsm_module().display().to_string();
    bench.edit(&theirs, &module.display().to_string());
    well(&bench);
    mode(&module, 0o777);
    not_run(&ill(&bench, "module-writable", "critical"), &["pin", "token", "keyring", "keys", "routes"]);
    mode(&module, 0o755);
    mode(module.parent().unwrap(), 0o777);
    ill(&bench, "module-writable", "critical");
    mode(module.parent().unwrap(), 0o755);
    well(&bench);
    // A link to it in a directory that others can write.
    fs::create_dir(dir.join("links")).unwrap();
    std::os::unix::fs::symlink(&module, dir.join("links/module.so")).unwrap();
    bench.edit("/lib/module.so", "/links/module.so");
    well(&bench);
    mode(&dir.join("links"), 0o777);
    ill(&bench, "module-writable", "critical");
    mode(&dir.join("links"), 0o755);
    well(&bench);
    bench.edit("/links/module.so", "/lib/module.so");
    // Another user's configuration.
    std::os::unix::fs::chown(&config, Some(65534), None).unwrap();
    ill(&bench, "configuration-unsafe", "critical");
    std::os::unix::fs::chown(&config, Some(0), None).unwrap();
    well(&bench);
    fs::rename(&module, dir.join("away")).unwrap();
    not_run(&ill(&bench, "module-missing", "critical"), &["token", "keyring", "keys", "routes"]);
    fs::rename(dir.join("away"), &module).unwrap();
    well(&bench);
}

#[test]
fn token_and_pin() {
    let bench = healthy();
    let site = bench.hsm.site();
    mode(&site.pin_file(), 0o640);
    ill(&bench, "pin-readable-by-others", "warning");
    mode(&site.pin_file(), 0o600);
    well(&bench);

    let file = format!("file:{}", site.pin_file().display());
    bench.edit(&file, "env:TOKEN_PIN");
    let done = bench.command(&["--json", "doctor"]).env("TOKEN_PIN", PIN).output().unwrap();
    assert_eq!(done.status.code(), Some(0), "information only");
    assert_eq!(finding(&examined(&done), "pin-in-environment").unwrap()["severity"], "info");
    ill(&bench, "pin-unreadable", "critical");
    bench.edit("env:TOKEN_PIN", &file);
    well(&bench);

    site.take_away();
    let diagnosis = ill(&bench, "token-unreachable", "critical");
    not_run(&diagnosis, &["keyring", "keys", "routes", "values"]);
    assert!(diagnosis["database"]["columns"].as_array().unwrap().len() == 4, "the database is examined all the same");
    site.put_back();
    well(&bench);
    bench.edit("token=hardwrap-test", "token=hardwrap-prod");
    ill(&bench, "token-not-found", "critical");
    bench.edit("token=hardwrap-prod", "token=hardwrap-test");
    well(&bench);
    site.add_token("hardwrap-test");
    let diagnosis = ill(&bench, "token-not-found", "critical");
    let what = finding(&diagnosis, "token-not-found").unwrap()["what"].as_str().unwrap();
    // The remedy: the serial of the right one.
    let serials: Vec<&str> = what.split("serial=\"").skip(1).map(|rest| rest.split('"').next().unwrap()).collect();
    assert_eq!(serials.len(), 2, "{what}");
    let with = |serial: &str| format!("token=hardwrap-test;serial={serial}");
    bench.edit("token=hardwrap-test", &with(serials[0]));
    if finding(&doctor(&bench).1, "keyring-other").is_some() || finding(&doctor(&bench).1, "keyring-empty").is_some() {
        bench.edit(&with(serials[0]), &with(serials[1]));
    }
    well(&bench);

    bench.edit("environment = \"test\"", "environment = \"production\"");
    ill(&bench, "token-in-software", "warning");
    bench.edit("environment = \"production\"", "environment = \"test\"");
    well(&bench);
}

#[test]
fn a_wrong_pin_and_what_the_token_counts() {
    let bench = healthy();
    let site = bench.hsm.site();
    fs::write(site.pin_file(), "a wrong one").unwrap();
    let (code, diagnosis) = doctor(&bench);
    let refused = finding(&diagnosis, "pin-refused").unwrap();
    assert!(code == Some(1) && refused["what"].as_str().unwrap().contains("CKR_PIN_INCORRECT"), "{refused:#}");
    // SoftHSM2 has counted: from now on nothing is tried by itself.
    fs::write(site.pin_file(), PIN).unwrap();
    ill(&bench, "pin-count-low", "critical");
    // The remedy: a person logs in, on a terminal.
    let login = format!(
        "printf '%s\\n' '{PIN}' | script -qec '{} --config {} key list --ask-pin' /dev/null",
        env!("CARGO_BIN_EXE_hardwrap"),
        bench.config().display()
    );
    let done = site.command("bash").arg("-c").arg(login).env_remove("HARDWRAP_TEST_DIR").output().unwrap();
    assert!(done.status.success(), "{}", text(&done.stdout));
    well(&bench);
}

/// The same through the fault module.
fn faulty(bench: &Bench, faults: &str) -> Value {
    bench.hsm.site().set_faults(faults);
    let done = bench.faulty(&["--json", "doctor"]).output().unwrap();
    assert_eq!(done.status.code(), Some(1));
    bench.hsm.site().set_faults("");
    let again = examined(&bench.faulty(&["--json", "doctor"]).output().unwrap());
    assert_eq!(again["findings"], Value::Array(vec![]), "{again:#}");
    examined(&done)
}

#[test]
fn what_only_other_tokens_do() {
    let bench = healthy();
    bench.edit(&softhsm::softhsm_module().display().to_string(), &softhsm::fault_module().display().to_string());
    for (faults, id, also) in [
        ("pin-flags final", "pin-locked", "CKF_USER_PIN_FINAL_TRY"),
        ("pin-flags locked", "pin-locked", "CKF_USER_PIN_LOCKED"),
        ("C_Login * 0x102", "pin-not-set", "CKR_USER_PIN_NOT_INITIALIZED"),
        ("C_OpenSession * 0x30", "token-unreachable", "CKR_DEVICE_ERROR"),
        ("C_GetSlotList * 0x5", "token-unreachable", "CKR_GENERAL_ERROR"),
        ("no-kw\nno-gcm", "no-route", "CKR_MECHANISM_INVALID"),
    ] {
        let diagnosis = faulty(&bench, faults);
        let found = finding(&diagnosis, id).unwrap_or_else(|| panic!("{faults}: {diagnosis:#}"));
        assert!(found["severity"] == "critical" && found["what"].as_str().unwrap().contains(also), "{found:#}");
    }
}

/// The token as somebody with the PIN has it, in this process: each test of this kind runs alone in a child.
fn logged_in() -> Session {
    let module = Pkcs11::new(softhsm::softhsm_module()).unwrap();
    module.initialize(CInitializeArgs::new(CInitializeFlags::OS_LOCKING_OK)).unwrap();
    let slot = module.get_slots_with_initialized_token().unwrap()[0];
    let session = module.open_rw_session(slot).unwrap();
    session.login(UserType::User, Some(&AuthPin::new(PIN.into()))).unwrap();
    session
}

fn keys_of(session: &Session, label: &str) -> Vec<ObjectHandle> {
    session.find_objects(&[Attribute::Class(ObjectClass::SECRET_KEY), Attribute::Label(label.into())]).unwrap()
}

/// Runs a step of a test in a child that sees the token of `bench`: C_Initialize is for once in a process.
fn on_token(bench: &Bench, step: &str) {
    let child = bench
        .hsm
        .site()
        .command(std::env::current_exe().unwrap())
        .args(["--exact", "steps_on_the_token", "--nocapture"])
        .env("DOCTOR_STEP", step)
        .output()
        .unwrap();
    assert!(child.status.success(), "{step}: {}{}", text(&child.stdout), text(&child.stderr));
}

/// Not a test by itself: what [`on_token`] runs.
#[test]
fn steps_on_the_token() {
    let Ok(step) = std::env::var("DOCTOR_STEP") else { return };
    let session = logged_in();
    let key = |label: &str, id: &[u8], private: bool, value: bool| {
        let mut template = vec![
            Attribute::Class(ObjectClass::SECRET_KEY),
            Attribute::KeyType(KeyType::AES),
            Attribute::Token(true),
            Attribute::Private(private),
            Attribute::Sensitive(private),
            Attribute::Extractable(!private),
            Attribute::Label(label.into()),
            Attribute::Id(id.to_vec()),
            Attribute::Encrypt(true),
            Attribute::Decrypt(true),
        ];
        if value {
            template.push(Attribute::Value(vec![0x41; 32]));
            session.create_object(&template).unwrap()
        } else {
            template.push(Attribute::ValueLen(32.into()));
            session.generate_key(&Mechanism::AesKeyGen, &template).unwrap()
        }
    };
    let real = || keys_of(&session, "hardwrap")[0];
    let id = || match session.get_attributes(real(), &[cryptoki::object::AttributeType::Id]).unwrap().remove(0) {
        Attribute::Id(id) => id,
        other => panic!("{other:?}"),
    };
    let relabel = |key, label: &str| session.update_attributes(key, &[Attribute::Label(label.into())]).unwrap();
    let reserve = |own: u64| {
        let value = format!(
            "{{\"v\":1,\"fact\":\"uses\",\"kid\":\"{}\",\"reservation\":{{\"id\":\"planted\",\"own\":{own},\"total\":{own}}}}}",
            hex::encode(id())
        );
        let template = [
            Attribute::Class(ObjectClass::DATA),
            Attribute::Token(true),
            Attribute::Private(true),
            Attribute::Application(b"hardwrap".to_vec()),
            Attribute::Label(b"hardwrap record hardwrap".to_vec()),
            Attribute::Value(value.into_bytes()),
        ];
        session.create_object(&template).unwrap();
    };
    let facts_with = |word: &str| -> Vec<ObjectHandle> {
        let facts = session.find_objects(&[Attribute::Class(ObjectClass::DATA)]).unwrap();
        let has = |fact: &ObjectHandle| {
            let value = session.get_attributes(*fact, &[cryptoki::object::AttributeType::Value]).unwrap().remove(0);
            matches!(value, Attribute::Value(bytes) if String::from_utf8_lossy(&bytes).contains(word))
        };
        facts.into_iter().filter(has).collect()
    };
    match step.as_str() {
        "plant" => drop(key("hardwrap", b"planted", false, true)),
        "plant in the making" => drop(key("hardwrap.new", b"planted", false, true)),
        "plant a fact" => {
            let template = [
                Attribute::Class(ObjectClass::DATA),
                Attribute::Token(true),
                Attribute::Private(false),
                Attribute::Label(b"hardwrap record hardwrap".to_vec()),
                Attribute::Value(b"anything".to_vec()),
            ];
            session.create_object(&template).unwrap();
        }
        "destroy planted" => {
            for object in session.find_objects(&[Attribute::Private(false)]).unwrap() {
                session.destroy_object(object).unwrap();
            }
        }
        "take permission" => session.update_attributes(real(), &[Attribute::Encrypt(false)]).unwrap(),
        "give permission" => {
            for key in keys_of(&session, "hardwrap") {
                session.update_attributes(key, &[Attribute::Encrypt(true)]).unwrap();
            }
        }
        "impostor" => drop(key("hardwrap", b"private!", true, false)),
        "leave" => drop(key("hardwrap.new", &[0, 9, 0, 0, 0, 0, 0, 1], true, false)),
        "destroy others" => {
            // hardwrap makes its keys so that they cannot be copied.
            let ours = session.find_objects(&[Attribute::Copyable(false)]).unwrap();
            for key in keys_of(&session, "hardwrap").into_iter().filter(|key| !ours.contains(key)) {
                session.destroy_object(key).unwrap();
            }
        }
        "double" => drop(key("hardwrap", &id(), true, false)),
        // The real key is set aside, and one of its id put in its place.
        "replace" => {
            let (id, real) = (id(), real());
            relabel(real, "aside");
            key("hardwrap", &id, true, false);
        }
        "import" => {
            let (id, real) = (id(), real());
            relabel(real, "aside");
            key("hardwrap", &id, true, true);
        }
        "set aside" => relabel(real(), "aside"),
        "put back" => {
            for key in keys_of(&session, "hardwrap") {
                session.destroy_object(key).unwrap();
            }
            relabel(keys_of(&session, "aside")[0], "hardwrap");
        }
        "reserve half" => reserve(1 << 30),
        "reserve most" => reserve(2_000_000_000),
        "forget" => facts_with("planted").into_iter().for_each(|fact| session.destroy_object(fact).unwrap()),
        "damage" => {
            let template = [
                Attribute::Class(ObjectClass::DATA),
                Attribute::Token(true),
                Attribute::Private(true),
                Attribute::Application(b"hardwrap".to_vec()),
                Attribute::Label(b"hardwrap record hardwrap".to_vec()),
                Attribute::Value(b"planted, and no fact".to_vec()),
            ];
            session.create_object(&template).unwrap();
        }
        other => panic!("{other}"),
    }
}

#[test]
fn keys_and_what_else_has_their_label() {
    let bench = healthy();
    for (provoke, id, severity, remedy) in [
        ("plant", "object-planted", "warning", "destroy others"),
        ("plant in the making", "object-planted", "warning", "destroy planted"),
        ("plant a fact", "object-planted", "warning", "destroy planted"),
        ("impostor", "object-unrecorded", "warning", "destroy others"),
        ("double", "key-doubled", "critical", "destroy others"),
        ("replace", "key-canary-fails", "critical", "put back"),
        ("import", "key-wrong-attributes", "critical", "put back"),
        ("set aside", "key-missing", "critical", "put back"),
        ("reserve half", "wraps-running-out", "warning", "forget"),
        ("reserve most", "wraps-running-out", "critical", "forget"),
        ("damage", "record-damaged", "critical", "forget"),
    ] {
        on_token(&bench, provoke);
        ill(&bench, id, severity);
        on_token(&bench, remedy);
        well(&bench);
    }
    // The fence, by its own commands.
    let kids = || -> Vec<String> {
        let list = bench.json(&["key", "list"]);
        list["keys"].as_array().unwrap().iter().map(|key| key["kid"].as_str().unwrap().to_owned()).collect()
    };
    on_token(&bench, "take permission");
    ill(&bench, "key-may-not-wrap", "critical");
    let said = bench.fails(1, &["verify"], b"");
    assert!(said.contains("the token does not let it wrap"), "{said}");
    bench.ok(&["key", "activate", &kids()[0]], b"");
    well(&bench);
    bench.ok(&["key", "generate"], b"");
    bench.ok(&["key", "activate", &kids()[1]], b"");
    bench.ok(&["key", "deactivate", &kids()[0]], b"");
    ill(&bench, "rotation-unfinished", "warning");
    bench.ok(&["rotate", "--resume"], b"");
    well(&bench);
    on_token(&bench, "give permission");
    ill(&bench, "key-may-wrap", "critical");
    bench.ok(&["key", "deactivate", &kids()[0]], b"");
    well(&bench);

    on_token(&bench, "leave");
    ill(&bench, "key-left-in-the-making", "warning");
    bench.ok(&["key", "list", "--clean"], b"");
    well(&bench);

    bench.edit("[[column]]", "[policy]\ncryptoperiod = \"1s\"\n[[column]]");
    std::thread::sleep(std::time::Duration::from_secs(2));
    ill(&bench, "cryptoperiod-passed", "warning");
    bench.edit("cryptoperiod = \"1s\"", "cryptoperiod = \"1y\"");
    well(&bench);
}

#[test]
fn a_key_that_wraps_by_a_slower_route() {
    let bench = healthy();
    let other = Bench { hsm: SoftHsm::new() };
    other.configure(&other.hsm.site().uri(), "");
    other.edit("preset = \"nr-llm\"", "preset = \"nr-llm\"\ncleartext = \"refuse\"");
    other.ok(&["init", "--mechanism", "aes-kw-wrap"], b"");
    other.sql("CREATE TABLE customer (id INTEGER PRIMARY KEY, iban TEXT, motto TEXT)");
    close(&other);
    let diagnosis = ill(&other, "route-better", "info");
    assert_eq!(diagnosis["token"]["recommended"], "aes-gcm-caller-iv");
    let routes = diagnosis["token"]["routes"].as_array().unwrap();
    assert_eq!(routes.len(), 4);
    for route in routes {
        let works = ["aes-gcm-caller-iv", "aes-kw-wrap"].contains(&route["route"].as_str().unwrap());
        assert_eq!((route["wrap_us"].is_u64(), route["fault"].is_null()), (works, works), "{route:#}");
    }
    // With the route that the remedy names there is nothing to say.
    well(&bench);
}

#[test]
fn keyring_and_record_against_the_database() {
    let bench = Bench::new();
    let site = bench.hsm.site();
    let copy = |from: &Path, to: &Path| {
        let _ = fs::remove_dir_all(to);
        assert!(Command::new("cp").arg("-a").arg(from).arg(to).status().unwrap().success());
    };
    bench.edit("preset = \"nr-llm\"", "preset = \"nr-llm\"\ncleartext = \"refuse\"");
    let [empty, good] = ["empty", "good"].map(|name| site.dir().join(name));
    copy(&site.tokens(), &empty);
    bench.sql("CREATE TABLE customer (id INTEGER PRIMARY KEY, iban TEXT, motto TEXT)");
    close(&bench);
    ill(&bench, "database-not-ready", "critical");
    ill(&bench, "keyring-empty", "critical");
    bench.ok(&["init"], b"");
    close(&bench);
    well(&bench);
    copy(&site.tokens(), &good);

    copy(&empty, &site.tokens());
    ill(&bench, "keyring-other", "critical");
    copy(&good, &site.tokens());
    well(&bench);

    bench.sql("INSERT INTO hardwrap_key_seen VALUES ('0002000000000001', 'A256GCMKW', 'active', '')");
    ill(&bench, "record-older", "critical");
    bench.sql("DELETE FROM hardwrap_key_seen WHERE kid LIKE '0002%'");
    well(&bench);

    let identity = bench.sql("SELECT identity FROM hardwrap_database");
    bench.sql("UPDATE hardwrap_database SET identity = 'another'");
    ill(&bench, "database-not-noted", "critical");
    bench.ok(&["init"], b"");
    well(&bench);
    bench.sql(&format!("UPDATE hardwrap_database SET identity = '{}'", identity.trim()));

    bench.sql("UPDATE hardwrap_database SET oldest_version = '99.0.0'");
    ill(&bench, "database-newer", "critical");
    bench.sql("UPDATE hardwrap_database SET oldest_version = '0.1.0'");
    well(&bench);

    // A damaged page: what could not be counted is no pass.
    let whole = fs::read(bench.db()).unwrap();
    bench.sql("INSERT INTO customer (motto) VALUES (''); PRAGMA wal_checkpoint(TRUNCATE)");
    let mut broken = fs::read(bench.db()).unwrap();
    let page: usize = bench.sql("SELECT rootpage FROM sqlite_schema WHERE name = 'customer'").trim().parse().unwrap();
    broken[(page - 1) * 4096..page * 4096].fill(0xa5);
    for end in ["-wal", "-shm"] {
        let _ = fs::remove_file(format!("{}{end}", bench.db().display()));
    }
    fs::write(bench.db(), broken).unwrap();
    let (code, diagnosis) = doctor(&bench);
    assert_eq!(code, Some(1), "{diagnosis:#}");
    not_run(&diagnosis, &["values", "discovery"]);
    assert!(finding(&diagnosis, "database-unusable").is_some());
    assert!(diagnosis["database"]["columns"].as_array().unwrap().iter().any(|column| column["rows"].is_null()));
    let said = text(&bench.run(&["doctor"], b"").stdout);
    assert!(said.starts_with("3 critical, 0 to be warned of, 2 checks did not run (test, "), "{said}");
    assert!(said.contains("malformed"), "{said}");
    for end in ["-wal", "-shm"] {
        let _ = fs::remove_file(format!("{}{end}", bench.db().display()));
    }
    fs::write(bench.db(), whole).unwrap();
    well(&bench);

    mode(&bench.db(), 0o602);
    ill(&bench, "database-readable-by-others", "warning");
    close(&bench);
    mode(&bench.db(), 0o644);
    ill(&bench, "database-readable-by-others", "warning");
    close(&bench);
    well(&bench);

    let away = site.dir().join("away.db");
    fs::rename(bench.db(), &away).unwrap();
    not_run(&ill(&bench, "database-missing", "critical"), &["columns", "values", "discovery"]);
    fs::write(bench.db(), "this is no database, but long enough to be looked at as one by whoever opens it").unwrap();
    mode(&bench.db(), 0o600);
    ill(&bench, "database-unusable", "critical");
    fs::rename(&away, bench.db()).unwrap();
    well(&bench);
}

#[test]
fn no_active_key() {
    // Part C will deactivate keys; until then the record is made to say so, as its format allows.
    SoftHsm::isolated("no_active_key", |site| {
        let url = format!("sqlite://{}/app.db", site.dir().display());
        let builder = || hardwrap::keeper::Keeper::builder(site.uri().parse().unwrap(), url.parse().unwrap());
        drop(builder().init(hardwrap::hsm::Choice::Auto).unwrap());
        let session = {
            let module = Pkcs11::new(softhsm::softhsm_module()).unwrap();
            let slot = module.get_slots_with_initialized_token().unwrap()[0];
            let session = module.open_rw_session(slot).unwrap();
            session.login(UserType::User, Some(&AuthPin::new(PIN.into()))).unwrap();
            session
        };
        let facts = session.find_objects(&[Attribute::Class(ObjectClass::DATA)]).unwrap();
        let value =
            |fact| match session.get_attributes(fact, &[cryptoki::object::AttributeType::Value]).unwrap().remove(0) {
                Attribute::Value(bytes) => String::from_utf8(bytes).unwrap(),
                other => panic!("{other:?}"),
            };
        let key = facts.into_iter().map(value).find(|fact| fact.contains("\"active\"")).unwrap();
        let stricter = session
            .create_object(&[
                Attribute::Class(ObjectClass::DATA),
                Attribute::Token(true),
                Attribute::Private(true),
                Attribute::Application(b"hardwrap".to_vec()),
                Attribute::Label(b"hardwrap record hardwrap".to_vec()),
                Attribute::Value(key.replace("\"active\"", "\"deactivated\"").into_bytes()),
            ])
            .unwrap();
        let config = builder().config().unwrap();
        let ids = || -> Vec<FindingId> {
            let diagnosis = hardwrap::keeper::Diagnosis::of(Ok(&config));
            diagnosis.findings.iter().map(|finding| finding.id).collect()
        };
        assert!(ids().iter().any(|id| id.name() == "no-active-key"), "{:?}", ids());
        session.destroy_object(stricter).unwrap();
        assert!(!ids().iter().any(|id| id.name() == "no-active-key"), "{:?}", ids());
    });
}

#[test]
fn the_register_against_the_schema() {
    let bench = healthy();
    let make = |columns: &str| bench.sql(&format!("DROP TABLE IF EXISTS customer; CREATE TABLE customer ({columns})"));
    let good = "id INTEGER PRIMARY KEY, iban TEXT, motto TEXT";
    for (columns, id, severity) in [
        ("id INTEGER PRIMARY KEY, iban TEXT", "column-missing", "warning"),
        ("iban TEXT, motto TEXT", "column-missing", "warning"),
        ("id INTEGER, iban TEXT, motto TEXT", "key-not-unique", "critical"),
        ("id DECIMAL PRIMARY KEY, iban TEXT, motto TEXT", "row-not-bindable", "critical"),
        ("id INTEGER PRIMARY KEY, iban TEXT, motto TEXT AS (iban)", "column-generated", "critical"),
        ("id INTEGER PRIMARY KEY, iban TEXT, motto INTEGER", "column-type", "warning"),
        ("id INTEGER PRIMARY KEY, iban varchar(300), motto TEXT", "column-too-small", "critical"),
    ] {
        make(columns);
        ill(&bench, id, severity);
        make(good);
        well(&bench);
    }
    bench.sql("ALTER TABLE customer RENAME TO client");
    ill(&bench, "table-missing", "warning");
    bench.sql("CREATE VIEW customer AS SELECT * FROM client");
    ill(&bench, "table-not-a-table", "critical");
    bench.sql("DROP VIEW customer; ALTER TABLE client RENAME TO customer");
    well(&bench);
    bench.edit(
        "column = \"motto\"\nkey = \"id\"\nidentifier = \"shop:customer:motto\"",
        "column = \"IBAN\"\nkey = \"id\"\nidentifier = \"shop:customer:motto\"",
    );
    ill(&bench, "column-registered-twice", "critical");
    bench.edit("column = \"IBAN\"", "column = \"motto\"");
    well(&bench);
}

#[test]
fn what_the_values_are() {
    let bench = healthy();
    let sealed = text(&bench.ok(&["seal", "--column", "customer.motto"], b"x"));
    let kid = &sealed[4..20];
    for (motto, id, severity) in [
        ("'in clear'".to_owned(), "cleartext-in-closed-column", "critical"),
        ("'hw1:cut'".to_owned(), "values-damaged", "critical"),
        (format!("'{}'", sealed.replace(kid, "00ff000000000001")), "values-under-unknown-key", "critical"),
        ("'hw2:x'".to_owned(), "values-of-newer-version", "warning"),
        ("'nrv1:x'".to_owned(), "foreign-envelopes", "warning"),
    ] {
        bench.sql(&format!("INSERT INTO customer (id, motto) VALUES (1, '{sealed}'), (2, {motto})"));
        ill(&bench, id, severity);
        if let "cleartext-in-closed-column" | "values-damaged" = id {
            let named = bench.run(&["verify", "--all"], b"");
            assert!(text(&named.stdout).contains("key 2: "), "{}", text(&named.stdout));
        }
        bench.sql("UPDATE customer SET motto = '' WHERE id = 2");
        well(&bench);
        bench.sql("DELETE FROM customer");
    }
    bench.sql("DROP TABLE customer; CREATE TABLE customer (id INTEGER UNIQUE, iban TEXT, motto varchar(400)); INSERT INTO customer (motto) VALUES ('')");
    ill(&bench, "rows-without-key", "warning");
    bench.sql("UPDATE customer SET id = 1");
    well(&bench);

    // The window: open on purpose, until part E closes it for good.
    bench.edit(
        "identifier = \"shop:customer:motto\"\n",
        "identifier = \"shop:customer:motto\"\ncleartext = \"accept\"\n",
    );
    ill(&bench, "cleartext-window-open", "warning");
    bench.sql("UPDATE customer SET motto = printf('%.*c', 300, 'x')");
    ill(&bench, "values-too-long-to-seal", "warning");
    bench.sql("UPDATE customer SET motto = ''");
    let (_, diagnosis) = doctor(&bench);
    assert!(finding(&diagnosis, "values-too-long-to-seal").is_none());
    bench.edit(
        "identifier = \"shop:customer:motto\"\ncleartext = \"accept\"\n",
        "identifier = \"shop:customer:motto\"\n",
    );
    well(&bench);
}

#[test]
fn envelopes_outside_of_the_register() {
    let bench = healthy();
    let sealed = text(&bench.ok(&["seal", "--column", "customer.motto"], b"x"));
    bench.sql(&format!("CREATE TABLE forgotten (note TEXT); INSERT INTO forgotten VALUES ('{sealed}')"));
    let diagnosis = ill(&bench, "unregistered-envelopes", "critical");
    let remedy = finding(&diagnosis, "unregistered-envelopes").unwrap()["remedy"].as_str().unwrap().to_owned();
    assert!(remedy.contains("table = \"forgotten\" column = \"note\""), "{remedy}");
    let ignore = "[[ignore]]\ntable = \"forgotten\"\ncolumn = \"note\"\nreason = \"examples\"\n";
    bench.edit("[[column]]", &format!("{ignore}[[column]]"));
    well(&bench);
    bench.sql("DROP TABLE forgotten");
    ill(&bench, "ignore-without-need", "info");
    bench.edit(ignore, "");
    well(&bench);
}

#[test]
fn what_rotations_leave() {
    let bench = healthy();
    let sealed = text(&bench.ok(&["seal", "--column", "customer.motto"], b"x"));
    bench.sql(&format!(
        "INSERT INTO customer (id, motto) VALUES (1, '{sealed}'); \
         CREATE TRIGGER nope BEFORE UPDATE OF motto ON customer BEGIN SELECT RAISE(ABORT, 'not today'); END"
    ));
    bench.fails(1, &["rotate"], b"");
    ill(&bench, "rotation-unfinished", "warning");
    bench.sql("DROP TRIGGER nope");
    bench.ok(&["rotate", "--resume"], b"");
    well(&bench);
    // A value that cannot be moved.
    let sealed = text(&bench.ok(&["seal", "--column", "customer.motto"], b"x"));
    bench.sql(&format!("UPDATE customer SET motto = '{}'", sealed.replace(':', ":x").replacen(":x", ":", 1)));
    assert_eq!(bench.run(&["rotate"], b"").status.code(), Some(1));
    ill(&bench, "ledger-open", "warning");
    bench.ok(&["ledger", "accept", "1", "--reason", "a test"], b"");
    bench.sql("UPDATE customer SET motto = ''");
    bench.ok(&["rotate", "--resume"], b"");
    well(&bench);
    // A fence that somebody took down.
    let fence = bench.sql("SELECT name FROM sqlite_schema WHERE name GLOB 'hardwrap_fence_*' LIMIT 1");
    bench.sql(&format!("DROP TRIGGER {fence}"));
    ill(&bench, "fence-missing", "warning");
    bench.ok(&["rotate", "--resume"], b"");
    well(&bench);
}

#[test]
fn every_finding_is_provoked_by_a_test_here() {
    let tests = include_str!("doctor.rs");
    for id in FindingId::ALL {
        let provoked = |line: &&str| line.contains(&format!("\"{}\"", id.name())) && !line.contains("is_none");
        assert!(tests.lines().any(|line| provoked(&line)), "{} is not provoked", id.name());
    }
    let mut names: Vec<_> = FindingId::ALL.iter().map(|id| id.name()).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), FindingId::ALL.len());
}
