//! The example application as its users run it: a process of its own on a token of its own, spoken to over HTTP.

#![allow(clippy::unwrap_used, missing_docs, reason = "tests")]

#[path = "support/softhsm.rs"]
mod softhsm;
#[path = "support/sqlite.rs"]
mod sqlite;

use std::env;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use softhsm::{PIN, SoftHsm};
use sqlite::sqlite3;

const PROMPT: &str = r#"{"prompt":"the launch code is 8842-swordfish"}"#;
const ANSWER: &str = r#""the answer is 9113-halibut""#;

#[test]
fn jobs_are_sealed_and_come_back() {
    let hsm = SoftHsm::new();
    init(&hsm);
    let jobs = Jobs::start(&hsm);
    let id = jobs.post(PROMPT);
    let job = format!("/jobs/{id}");
    assert_eq!(jobs.get(&job).body, format!(r#"{{"id":"{id}","request":{PROMPT},"result":null}}"#));
    assert_eq!(jobs.ask("PUT", &format!("{job}/result"), ANSWER.as_bytes()).status, 204);
    assert_eq!(jobs.get(&job).body, format!(r#"{{"id":"{id}","request":{PROMPT},"result":{ANSWER}}}"#));

    // While it runs, the write-ahead log is a raw file too.
    assert_nowhere(&hsm, "swordfish");
    assert_nowhere(&hsm, "halibut");
    assert_nowhere(&hsm, PIN);
    let said = jobs.stop();
    assert_eq!(said, "", "nothing went wrong");
    assert_nowhere(&hsm, "swordfish");

    // What one process sealed, the next one opens; `init` again changes nothing of it.
    init(&hsm);
    let jobs = Jobs::start(&hsm);
    assert!(jobs.get(&job).body.contains("8842-swordfish"));
    jobs.stop();
}

#[test]
fn a_token_that_is_away_is_unavailable_and_nothing_else() {
    let hsm = SoftHsm::new();
    init(&hsm);
    let jobs = Jobs::start(&hsm);
    let id = jobs.post(PROMPT);
    let job = format!("/jobs/{id}");

    hsm.site().take_away();
    for answer in [
        jobs.get(&job),
        jobs.ask("POST", "/jobs", PROMPT.as_bytes()),
        jobs.ask("PUT", &format!("{job}/result"), ANSWER.as_bytes()),
    ] {
        assert_eq!((answer.status, answer.body.as_str()), (503, ""));
        assert!(answer.head.contains("retry-after: 1\r\n"), "{}", answer.head);
    }
    // What needs no key is answered.
    assert_eq!(jobs.get("/jobs/8e3a4f22-59d9-4b5a-a5b3-0b5fd1f4b3c7").status, 404);

    hsm.site().put_back();
    // The keeper may have tried a moment ago.
    let back = jobs.until_available(&job);
    assert_eq!(back, format!(r#"{{"id":"{id}","request":{PROMPT},"result":null}}"#));
    assert_eq!(rows(&hsm), "1", "nothing was stored while the token was away");
    let said = jobs.stop();
    assert!(said.contains("jobs: the keys are unavailable"), "{said}");
    assert!(!said.contains("swordfish") && !said.contains("halibut") && !said.contains(PIN), "{said}");
}

#[test]
fn a_value_moved_to_another_row_fails_without_detail() {
    let hsm = SoftHsm::new();
    init(&hsm);
    let jobs = Jobs::start(&hsm);
    let (one, other) = (jobs.post(PROMPT), jobs.post("2"));
    sqlite(
        &hsm,
        &format!("UPDATE job SET request = (SELECT request FROM job WHERE id = '{one}') WHERE id = '{other}'"),
    );
    let answer = jobs.get(&format!("/jobs/{other}"));
    assert_eq!((answer.status, answer.body.as_str()), (500, ""));
    assert_eq!(jobs.get(&format!("/jobs/{one}")).status, 200);
    let said = jobs.stop();
    assert!(said.contains("failed authentication") && !said.contains("swordfish"), "{said}");
}

#[test]
fn bad_input_is_refused_and_never_ends_the_server() {
    let hsm = SoftHsm::new();
    init(&hsm);
    let jobs = Jobs::start(&hsm);
    let id = jobs.post("[1e2, \"\u{fc}\", null]");

    for body in [b"".as_slice(), b"{", b"nonsense", b"1e999", b"\"\xff\"", &b"[".repeat(100_000)] {
        assert_eq!(jobs.ask("POST", "/jobs", body).status, 400, "{:?}", body.get(..10));
        assert_eq!(jobs.ask("PUT", &format!("/jobs/{id}/result"), body).status, 400);
    }
    // One byte more than axum takes. Of a longer one the server does not read the rest, and hangs up.
    let huge = format!("\"{}\"", "x".repeat((2 << 20) - 1));
    assert_eq!(jobs.ask("POST", "/jobs", huge.as_bytes()).status, 413);
    let mut endless = TcpStream::connect(jobs.address).unwrap();
    endless.write_all(b"POST /jobs HTTP/1.1\r\nhost: jobs\r\ncontent-length: 1000000000000\r\n\r\n\"").unwrap();
    while endless.write_all(&[b'x'; 65536]).is_ok() {}
    for id in ["7", "-1", "x", "%00", "%27%20OR%201=1--", "00000000-0000-0000-0000-000000000000", &"9".repeat(5000)] {
        assert_eq!(jobs.get(&format!("/jobs/{id}")).status, 404, "{id}");
        assert_eq!(jobs.ask("PUT", &format!("/jobs/{id}/result"), b"1").status, 404, "{id}");
    }
    assert_eq!(jobs.get("/jobs/%ff").status, 400);
    assert_eq!(jobs.get("/").status, 404);
    assert_eq!(jobs.ask("DELETE", "/jobs", b"").status, 405);
    let mut nonsense = TcpStream::connect(jobs.address).unwrap();
    nonsense.write_all(b"\x16\x03\x01 no HTTP\r\n\r\n").unwrap();
    drop(nonsense);

    assert_eq!(
        jobs.get(&format!("/jobs/{id}")).body,
        format!("{{\"id\":\"{id}\",\"request\":[1e2, \"\u{fc}\", null],\"result\":null}}")
    );
    assert_eq!(rows(&hsm), "1");
    let said = jobs.stop();
    assert_eq!(said, "", "nobody's input is a fault of ours");
}

#[test]
fn what_is_missing_is_said_at_the_start() {
    let hsm = SoftHsm::new();
    let outcome = |command: &mut Command| {
        let done = command.output().unwrap();
        (done.status.code(), String::from_utf8(done.stderr).unwrap())
    };
    let (code, said) = outcome(command(&hsm).env_remove("HARDWRAP_TOKEN_URI"));
    assert_eq!((code, said.as_str()), (Some(1), "jobs: HARDWRAP_TOKEN_URI is not set: which token?\n"));
    let (code, said) = outcome(&mut command(&hsm));
    assert!(code == Some(1) && said.contains("no database"), "{said}");
    let (code, said) = outcome(command(&hsm).arg("nonsense"));
    assert!(code == Some(1) && said.contains("usage"), "{said}");
    init(&hsm);
    fs::write(hsm.site().pin_file(), "wrong-pin\n").unwrap();
    let (code, said) = outcome(&mut command(&hsm));
    assert!(code == Some(1) && said.contains("CKR_PIN_INCORRECT") && !said.contains("wrong-pin"), "{said}");
}

/// The example, running.
struct Jobs {
    child: Child,
    address: SocketAddr,
    log: Option<JoinHandle<String>>,
}

impl Jobs {
    fn start(hsm: &SoftHsm) -> Self {
        let mut child = command(hsm).stderr(Stdio::piped()).spawn().unwrap();
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        stderr.read_line(&mut line).unwrap();
        let Some(address) = line.strip_prefix("jobs: listening on ") else { panic!("{line}{}", rest(stderr)) };
        let address = address.trim_end().parse().unwrap();
        // Read all the time, so that the pipe never fills.
        Self { child, address, log: Some(thread::spawn(move || rest(stderr))) }
    }

    fn post(&self, request: &str) -> String {
        let answer = self.ask("POST", "/jobs", request.as_bytes());
        assert_eq!(answer.status, 201, "{}", answer.body);
        let job: serde_json::Value = serde_json::from_str(&answer.body).unwrap();
        job["id"].as_str().unwrap().to_owned()
    }

    fn get(&self, path: &str) -> Answer {
        self.ask("GET", path, b"")
    }

    fn until_available(&self, path: &str) -> String {
        for _ in 0..100 {
            let answer = self.get(path);
            if answer.status != 503 {
                assert_eq!(answer.status, 200, "{}", answer.head);
                return answer.body;
            }
            thread::sleep(Duration::from_millis(100));
        }
        panic!("{path}: the token is back, and still unavailable");
    }

    fn ask(&self, method: &str, path: &str, body: &[u8]) -> Answer {
        let mut stream = TcpStream::connect(self.address).unwrap();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: jobs\r\nconnection: close\r\ncontent-type: application/json\r\n\
             content-length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all(head.as_bytes()).unwrap();
        stream.write_all(body).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        let answer = String::from_utf8(answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{method} {path}: {answer:?}"));
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        Answer { status, head: format!("{head}\r\n"), body: body.to_owned() }
    }

    /// Asks the server to end, and sees it end well. What it said meanwhile.
    fn stop(mut self) -> String {
        let asked = Command::new("kill").args(["-TERM", &self.child.id().to_string()]).status().unwrap();
        assert!(asked.success());
        let ended = self.child.wait().unwrap();
        let said = self.log.take().unwrap().join().unwrap();
        assert_eq!(ended.code(), Some(0), "{said}");
        assert!(!said.contains("panicked"), "{said}");
        said
    }
}

/// A test that fails leaves no server behind.
impl Drop for Jobs {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

struct Answer {
    status: u16,
    head: String,
    body: String,
}

fn command(hsm: &SoftHsm) -> Command {
    let mut command = hsm.site().command(program());
    command
        .env("HARDWRAP_TOKEN_URI", hsm.site().uri())
        .env("JOBS_DATABASE", format!("sqlite://{}", hsm.site().dir().join("jobs.db").display()))
        .env("JOBS_LISTEN", "127.0.0.1:0");
    command
}

fn init(hsm: &SoftHsm) {
    let done = command(hsm).arg("init").output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}

/// The example, which `cargo test` builds.
fn program() -> PathBuf {
    let profile = env::current_exe().unwrap().parent().unwrap().parent().unwrap().to_owned();
    let program = profile.join("examples/jobs");
    assert!(program.exists(), "{} is missing: cargo build --examples", program.display());
    program
}

fn rest(mut stderr: BufReader<ChildStderr>) -> String {
    let mut rest = String::new();
    stderr.read_to_string(&mut rest).unwrap();
    rest
}

fn rows(hsm: &SoftHsm) -> String {
    sqlite(hsm, "SELECT count(*) FROM job")
}

fn sqlite(hsm: &SoftHsm, sql: &str) -> String {
    sqlite3(&hsm.site().dir().join("jobs.db"), sql).trim_end().to_owned()
}

/// No file of the database holds the text; they do hold sealed values.
fn assert_nowhere(hsm: &SoftHsm, text: &str) {
    let mut sealed = false;
    let files = fs::read_dir(hsm.site().dir()).unwrap().map(|file| file.unwrap().path());
    for file in files.filter(|file| file.file_name().unwrap().to_string_lossy().starts_with("jobs.db")) {
        let bytes = fs::read(&file).unwrap();
        let holds = |text: &str| bytes.windows(text.len()).any(|window| window == text.as_bytes());
        assert!(!holds(text), "{} holds {text:?}", file.display());
        sealed |= holds("hw1:");
    }
    assert!(sealed, "the search looks at the right files");
}
