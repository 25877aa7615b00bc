//! The documents are true: every command in them is run as written, and what they show is what comes out; every
//! configuration in them is one; every error and every finding has its entry.
//!
//! In a document, a block of `sh` holds commands that must succeed. A block of `console` holds commands after `$ ` and
//! what they print; a line `…` stands for any number of lines. A command that is shown to print `hardwrap: …` may fail;
//! any other exit code but 0 has to be shown (`; echo $?`). A block of `toml` is a configuration. The lines after `run:`
//! in a block of `yaml` are run as well. What differs from run to run (ids, times, sealed bytes, microseconds) is not
//! compared. `ci/docs` runs this.
#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout, reason = "tests")]

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use hardwrap::keeper::{Config, FindingId};

/// What is not run: `ci/test` runs this test, and cargo has built what it runs; built again without the packages of the
/// tests, the program in the target directory would be another one while other tests run it.
const NOT_RUN: [&str; 3] = ["ci/demo    #", "ci/test    #", "cargo build --locked"];

/// A document's blocks that something is done with, in order.
enum Block {
    /// Commands, and what each printed where that is shown; and the line in the document.
    Commands(usize, Vec<(String, Option<Vec<String>>)>),
    Toml(usize, String),
}

fn blocks(text: &str) -> Vec<Block> {
    let mut found = Vec::new();
    let mut lines = text.lines().enumerate();
    while let Some((number, line)) = lines.next() {
        let Some(language) = line.strip_prefix("```").filter(|language| !language.is_empty()) else { continue };
        let body: Vec<&str> =
            lines.by_ref().map(|(_, line)| line).take_while(|line| !line.starts_with("```")).collect();
        match language {
            "sh" => {
                let body: Vec<&str> = body.into_iter().filter(runs).collect();
                found.push(Block::Commands(number, vec![(body.join("\n"), None)]));
            }
            "console" => found.push(Block::Commands(number, console(&body))),
            "toml" => found.push(Block::Toml(number, body.join("\n"))),
            "yaml" => found.push(Block::Commands(number, vec![(workflow(&body), None)])),
            _ => {}
        }
    }
    found
}

fn runs(line: &&str) -> bool {
    !NOT_RUN.iter().any(|not| line.starts_with(not))
}

fn console(body: &[&str]) -> Vec<(String, Option<Vec<String>>)> {
    let mut commands: Vec<(String, Option<Vec<String>>)> = Vec::new();
    for line in body {
        match (line.strip_prefix("$ "), commands.last_mut()) {
            (Some(command), _) => commands.push((command.to_owned(), Some(Vec::new()))),
            (None, Some((command, Some(output)))) => match line.strip_prefix("> ") {
                Some(more) if output.is_empty() => command.push_str(&format!("\n{more}")),
                _ => output.push((*line).to_owned()),
            },
            _ => panic!("output without a command: {line}"),
        }
    }
    commands
}

/// The commands of a workflow's steps.
fn workflow(body: &[&str]) -> String {
    let mut commands = String::new();
    let mut inside = None;
    for line in body {
        let indent = line.len() - line.trim_start().len();
        if inside.is_some_and(|of| indent > of) {
            if runs(&line.trim_start()) {
                commands.push_str(&format!("{}\n", line.trim_start()));
            }
            continue;
        }
        inside = None;
        match line.trim_start().trim_start_matches("- ").strip_prefix("run:") {
            Some(more) if more.trim() == "|" => inside = Some(indent),
            Some(command) => commands.push_str(&format!("{}\n", command.trim())),
            None => {}
        }
    }
    commands
}

/// Runs the commands of a document in one shell, as a reader would, and compares.
fn run(document: &Path, text: &str) -> Result<usize, String> {
    let blocks = blocks(text);
    let commands: Vec<_> = blocks
        .iter()
        .filter_map(|block| match block {
            Block::Commands(line, commands) => {
                Some(commands.iter().map(move |(command, shown)| (*line, command, shown)))
            }
            Block::Toml(..) => None,
        })
        .flatten()
        .collect();
    let mut script = String::from("exec 2>&1 </dev/null\nset +e\n");
    for (index, (_, command, shown)) in commands.iter().enumerate() {
        // A block of `sh` stops at its first failure.
        let (strict, lenient) =
            if shown.is_none() { ("set -e -o pipefail\n", "\nset +e +o pipefail") } else { ("", "") };
        script.push_str(&format!(
            "printf '\\n@@begin {index}\\n'\n{strict}{command}{lenient}\nprintf '\\n@@end {index} %d\\n' $?\n"
        ));
    }
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("script");
    fs::write(&file, script).unwrap();
    let repository = Path::new(env!("CARGO_MANIFEST_DIR"));
    let built = Path::new(env!("CARGO_BIN_EXE_hardwrap")).parent().unwrap();
    let path = format!("{}:{}", built.display(), env::var("PATH").unwrap());
    let done = Command::new("bash")
        .arg(&file)
        .current_dir(repository)
        .env("PATH", path)
        .env("TMPDIR", home.path())
        .env("CARGO_TARGET_DIR", built.parent().unwrap())
        .env_remove("SOFTHSM2_CONF")
        .env_remove("HARDWRAP_TEST_DIR")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&done.stdout).into_owned();
    for (index, (line, command, shown)) in commands.iter().enumerate() {
        let at = format!("{}, block of line {}:\n$ {command}\n", document.display(), line + 1);
        let (_, rest) =
            said.split_once(&format!("\n@@begin {index}\n")).ok_or_else(|| format!("{at}never began:\n{said}"))?;
        let (output, rest) =
            rest.split_once(&format!("\n@@end {index} ")).ok_or_else(|| format!("{at}ended the shell:\n{rest}"))?;
        let code = rest.lines().next().unwrap_or_default();
        let fails = shown.as_ref().is_some_and(|shown| shown.iter().any(|line| line.starts_with("hardwrap: ")));
        if code != "0" && !fails {
            return Err(format!("{at}exit code {code}:\n{output}"));
        }
        if let Some(shown) = shown {
            let output: Vec<String> = output.lines().map(comparable).collect();
            let shown: Vec<String> = shown.iter().map(|line| comparable(line)).collect();
            if !same(&shown, &output) {
                return Err(format!("{at}shown:\n{}\ncame:\n{}\n", shown.join("\n"), output.join("\n")));
            }
        }
    }
    for block in &blocks {
        if let Block::Toml(line, toml) = block {
            let path = home.path().join("configuration.toml");
            fs::write(&path, toml).unwrap();
            fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
            // A part of a configuration is made whole.
            let mut variables = BTreeMap::new();
            for (setting, key, value) in [
                ("[token]", "HARDWRAP_TOKEN_URI", "pkcs11:token=x?module-path=/x"),
                ("[database]", "HARDWRAP_DATABASE_URL", "sqlite://x"),
            ] {
                if !toml.contains(setting) {
                    variables.insert(key.to_owned(), value.to_owned());
                }
            }
            Config::read(&path, &variables)
                .map_err(|error| format!("{}, line {}: {error}", document.display(), line + 1))?;
        }
    }
    Ok(commands.len())
}

/// Whether what came is what is shown, `…` being any number of lines.
fn same(shown: &[String], came: &[String]) -> bool {
    match (shown.split_first(), came.split_first()) {
        (None, None) => true,
        (Some((first, rest)), _) if first == "…" => (0..=came.len()).any(|skipped| same(rest, &came[skipped..])),
        (Some((shown, rest)), Some((line, more))) => shown == line && same(rest, more),
        _ => false,
    }
}

/// A line without what differs from run to run: times, hex of 8 and more digits, long base64, microseconds, and how many
/// blanks stand in a row, for a column is as wide as its widest cell.
fn comparable(line: &str) -> String {
    let mut words = Vec::new();
    for word in line.split_whitespace() {
        words.push(word_of(word));
    }
    let mut line = words.join(" ");
    while let Some(at) = line.find(" µs") {
        let start = line[..at].rfind(' ').map_or(0, |blank| blank + 1);
        line.replace_range(start..at + " µs".len(), "TIME");
    }
    line
}

fn word_of(word: &str) -> String {
    let mut out = String::new();
    let mut rest = word;
    while let Some(first) = rest.chars().next() {
        let run: usize =
            rest.chars().take_while(|c| c.is_ascii_alphanumeric() || "+/=".contains(*c)).map(char::len_utf8).sum();
        if rest.len() >= 20 && rest.is_char_boundary(20) && is_time(&rest[..20]) {
            out.push_str("NOW");
            rest = &rest[20..];
        } else if run >= 60 {
            out.push_str("BASE64");
            rest = &rest[run..];
        } else if run >= 8
            && rest[..run].bytes().all(|b| b.is_ascii_hexdigit())
            && rest[..run].bytes().any(|b| b.is_ascii_digit())
        {
            out.push_str("HEX");
            rest = &rest[run..];
        } else {
            let whole = run.max(first.len_utf8());
            out.push_str(&rest[..whole]);
            rest = &rest[whole..];
        }
    }
    out
}

/// `2026-11-30T23:50:02Z`
fn is_time(text: &str) -> bool {
    let form: String = text.chars().map(|c| if c.is_ascii_digit() { '0' } else { c }).collect();
    form == "0000-00-00T00:00:00Z"
}

fn pages() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut pages: Vec<_> = fs::read_dir(root.join("src/docs")).unwrap().map(|entry| entry.unwrap().path()).collect();
    pages.push(root.join("README.md"));
    pages.sort();
    pages
}

#[test]
fn every_command_of_every_document_does_what_it_says() {
    let mut commands = 0;
    for page in pages() {
        commands += run(&page, &fs::read_to_string(&page).unwrap()).unwrap_or_else(|wrong| panic!("{wrong}"));
    }
    println!("{commands} commands");
    assert!(commands > 40, "{commands}");
}

#[test]
fn a_document_that_is_wrong_is_found() {
    let page = Path::new("page");
    let good = "text\n```sh\ntrue\nx=$(printf a)\n```\n```console\n$ echo $x; echo b\na\nb\n$ hardwrap nonsense; echo $?\n…\n2\n```\n";
    assert_eq!(run(page, good), Ok(3));
    for bad in [
        "```sh\nfalse\n```",
        "```sh\nfalse; false\ntrue\n```",
        "```sh\nexit 0\n```",
        "```console\n$ echo a\nb\n```",
        "```console\n$ echo a\n```",
        "```console\n$ echo a; echo b\na\n```",
        "```console\n$ echo a; false\na\n```",
        "```console\n$ true\nhardwrap: it failed\n```",
        "```yaml\nsteps:\n  - run: |\n      true\n      false\n```",
        "```toml\n[token]\nuri = \"pkcs11:token=x?module-path=/x\"\ncolour = 1\n```",
    ] {
        assert!(run(page, bad).is_err(), "{bad}");
    }
    assert_eq!(comparable("key  0001914e2c2307a0: made 2026-11-30T23:50:02Z, 17 µs"), "key HEX: made NOW, TIME");
}

/// The variants of the public enum `name` in a source file.
fn variants(file: &str, name: &str) -> BTreeSet<String> {
    let source = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("src").join(file)).unwrap();
    let (_, body) = source.split_once(&format!("pub enum {name} {{\n")).unwrap();
    let (body, _) = body.split_once("\n}\n").unwrap();
    let of_enum = |line: &&str| line.starts_with("    ") && line.as_bytes()[4].is_ascii_uppercase();
    let word = |line: &str| line.trim().chars().take_while(char::is_ascii_alphanumeric).collect();
    body.lines().filter(|line| line.len() > 4).filter(of_enum).map(word).collect()
}

/// The names in the first column of the tables below a heading.
fn entries(page: &str, heading: &str) -> BTreeSet<String> {
    let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("src/docs").join(page)).unwrap();
    let (_, section) = text.split_once(&format!("\n## {heading}\n")).unwrap_or_else(|| panic!("no section {heading}"));
    let section = section.split("\n## ").next().unwrap();
    let cell = |line: &str| Some(line.strip_prefix("| `")?.split('`').next()?.to_owned());
    section.lines().filter_map(cell).collect()
}

#[test]
fn every_error_has_its_entry() {
    let mut seen = BTreeSet::new();
    for (file, name, heading) in [
        ("codec.rs", "Error", "codec::Error"),
        ("keeper.rs", "Error", "keeper::Error"),
        ("keeper/config.rs", "ConfigError", "keeper::ConfigError"),
        ("store/error.rs", "Error", "store::Error"),
        ("store/stored.rs", "BadRow", "store::BadRow"),
        ("store/url.rs", "BadUrl", "store::BadUrl"),
        ("store/agent_run/run.rs", "InvalidRun", "store::InvalidRun"),
        ("envelope.rs", "Error", "envelope::Error"),
        ("hsm/error.rs", "Error", "hsm::Error"),
        ("hsm/pin.rs", "PinError", "hsm::PinError"),
        ("hsm/uri.rs", "UriError", "hsm::UriError"),
        ("provider.rs", "ProviderError", "provider::ProviderError"),
        ("column.rs", "Invalid", "column::Invalid"),
        ("column.rs", "Misplaced", "column::Misplaced"),
    ] {
        assert_eq!(entries("errors.md", heading), variants(file, name), "{heading}");
        seen.insert((file.to_owned(), name.to_owned()));
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let (mut enums, mut structs) = (BTreeSet::new(), BTreeSet::new());
    for file in sources(&root) {
        let source = fs::read_to_string(&file).unwrap();
        let room = file.strip_prefix(&root).unwrap().to_str().unwrap().to_owned();
        for (_, after) in source.match_indices("thiserror::Error)]").map(|(at, _)| source.split_at(at)) {
            let line = after.lines().find(|line| line.starts_with("pub ")).unwrap();
            let mut words = line.split(|c: char| !c.is_ascii_alphanumeric()).skip(1);
            match (words.next(), words.next()) {
                (Some("enum"), Some(name)) => enums.insert((room.clone(), name.to_owned())),
                (Some("struct"), Some(name)) => structs.insert(name.to_owned()),
                _ => panic!("{room}: {line}"),
            };
        }
    }
    assert_eq!(seen, enums, "every enum of errors is in the list above");
    let single = entries("errors.md", "Errors of one kind");
    assert_eq!(
        single.iter().map(|name| name.rsplit("::").next().unwrap().to_owned()).collect::<BTreeSet<_>>(),
        structs
    );
}

fn sources(directory: &Path) -> Vec<PathBuf> {
    let inside = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let (directories, files): (Vec<_>, Vec<_>) = inside.partition(|path| path.is_dir());
    let files = files.into_iter().filter(|path| path.extension().is_some_and(|end| end == "rs"));
    files.chain(directories.iter().flat_map(|directory| sources(directory))).collect()
}

#[test]
fn the_dependencies_shown_are_those_of_this_package() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = fs::read_to_string(root.join("src/docs/cookbook.md")).unwrap();
    let (_, shown) = page.split_once("```text\n[dependencies]\n").unwrap();
    let shown: toml::Table = shown.split("```").next().unwrap().parse().unwrap();
    let package: toml::Table = fs::read_to_string(root.join("Cargo.toml")).unwrap().parse().unwrap();
    let used = |name: &str| ["dependencies", "dev-dependencies"].iter().find_map(|table| package[*table].get(name));
    for (name, shown) in &shown {
        let version = shown["version"].as_str().unwrap();
        match used(name) {
            Some(used) => assert_eq!(used["version"].as_str(), Some(version), "{name}"),
            None => {
                assert_eq!(name, "hardwrap");
                assert!(env!("CARGO_PKG_VERSION").starts_with(&format!("{version}.")));
            }
        }
    }
    assert_eq!(shown.len(), 4);
}

#[test]
fn every_gate_has_its_entry() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let source = fs::read_to_string(root.join("src/keeper/retire.rs")).unwrap();
    let name = |call: &str| call.trim_start().strip_prefix('"').map(|text| text.split('"').next().unwrap().to_owned());
    let gates: BTreeSet<String> = source.split("gate(").filter_map(name).collect();
    assert_eq!(gates.len(), 15);
    assert_eq!(entries("rotation.md", "Gates"), gates);
}

#[test]
fn every_finding_has_its_entry() {
    let ids: BTreeSet<String> = FindingId::ALL.iter().map(|id| id.name().to_owned()).collect();
    assert_eq!(entries("findings.md", "Findings"), ids);
    let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("src/docs/findings.md")).unwrap();
    for id in FindingId::ALL {
        let line = format!("| `{}` | {} | {} |", id.name(), id.severity().name(), id.risk());
        assert!(text.contains(&line), "want the line {line}");
    }
}
