//! The commands for operators: agent runs, what a crash left, figures for Prometheus, completions, manual pages.
#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout, reason = "tests")]

#[path = "support/bench.rs"]
mod bench;
#[path = "support/softhsm.rs"]
mod softhsm;
#[path = "support/sqlite.rs"]
mod sqlite;

use std::fs;
use std::process::Command;

use bench::{Bench, text};

/// Three runs: queued and sealed, failed and emptied, waiting in cleartext with a name that moves the cursor.
fn with_runs() -> Bench {
    let bench = Bench::new();
    bench.ok(&["init"], b"");
    let request = ["seal", "--column", "tx_nrllm_agentrun.queued_request", "--row", "run-1"];
    let sealed = text(&bench.ok(&request, b"{\"prompt\":\"SECRET\"}"));
    bench.sql(&format!(
        "INSERT INTO tx_nrllm_agentrun (uid, uuid, status, queued_request, suspended_state, crdate, claimed_by) VALUES \
         (1, 'run-1', 'queued', '{sealed}', NULL, 100, ''), (2, 'run-2', 'failed', '', '', 50, ''), \
         (3, 'run-3', 'waiting_for_input', 'nrv1:x', 'SECRET', 200, 'w' || char(27) || '[2J'), \
         (4, 'run-4', 'running', '', 'hw1:damaged', 300, 'worker'), (5, 'run-5', 'of tomorrow', '', '', 400, ''); \
         UPDATE tx_nrllm_agentrun SET lease_expires = 1 WHERE uid = 4; \
         INSERT INTO tx_nrllm_agentrun_event (run, kind) VALUES (2, 'a'), (2, 'b'), (1, 'c')"
    ));
    // None of these commands asks the token.
    bench.hsm.site().take_away();
    bench
}

#[test]
fn runs_are_listed_and_shown_without_a_key_or_a_value() {
    let bench = with_runs();
    let list = bench.json(&["runs", "list"]);
    let uids: Vec<i64> = list.as_array().unwrap().iter().map(|run| run["uid"].as_i64().unwrap()).collect();
    assert_eq!(uids, [2, 1, 3, 4, 5], "oldest first");
    let kinds = |run: usize| {
        let kind = |column: &str| list[run][column]["kind"].as_str().unwrap().to_owned();
        (kind("queued_request"), kind("suspended_state"))
    };
    let pair = |one: &str, other: &str| (one.to_owned(), other.to_owned());
    assert_eq!(kinds(0), pair("empty", "empty"));
    assert_eq!(kinds(1), pair("sealed", "null"));
    assert_eq!(kinds(2), pair("foreign", "cleartext"));
    assert_eq!(kinds(3), pair("empty", "damaged"));
    assert_eq!(list[4]["status"], serde_json::Value::Null);
    assert!(list[1]["queued_request"]["kid"].as_str().unwrap().starts_with("0001"));
    assert_eq!(list[2]["suspended_state"]["bytes"], 6);

    let shown = text(&bench.ok(&["runs", "list"], b""));
    assert!(
        shown.contains("CLEARTEXT, 6 bytes") && shown.contains(r"w\u{1b}[2J") && !shown.contains('\u{1b}'),
        "{shown}"
    );
    let count = |arguments: &[&str]| bench.json(arguments).as_array().unwrap().len();
    assert_eq!(count(&["runs", "list", "--status", "queued", "--status", "failed"]), 2);
    assert_eq!(count(&["runs", "list", "--stale"]), 1);
    assert_eq!(count(&["runs", "list", "--limit", "2"]), 2);
    assert_eq!(count(&["runs", "list", "--status", "completed"]), 0);
    assert_eq!(text(&bench.ok(&["runs", "list", "--status", "completed"], b"")), "no runs\n");

    let one = text(&bench.ok(&["runs", "show", "run-1"], b""));
    assert!(one.contains("hardwrap open --column tx_nrllm_agentrun.queued_request --key 1"), "{one}");
    assert_eq!(bench.json(&["runs", "show", "run-3"])["claimed_by"], "w\u{1b}[2J");
    for all in [shown, one] {
        assert!(!all.contains("SECRET"), "{all}");
    }
    let said = bench.fails(1, &["runs", "show", "run-9"], b"");
    assert_eq!(said, "hardwrap: there is no run run-9\n");
}

#[test]
fn a_list_of_many_runs_is_read_in_pages() {
    let bench = Bench::new();
    bench.ok(&["init"], b"");
    bench.sql(
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 1234) \
         INSERT INTO tx_nrllm_agentrun (uuid, crdate) SELECT 'r' || i, i / 700 FROM n",
    );
    let list = bench.json(&["runs", "list", "--limit", "5000"]);
    let uids: Vec<i64> = list.as_array().unwrap().iter().map(|run| run["uid"].as_i64().unwrap()).collect();
    assert_eq!(uids, (1..=1234).collect::<Vec<_>>());
    assert_eq!(bench.json(&["runs", "list", "--limit", "501"]).as_array().unwrap().len(), 501);
    assert_eq!(bench.json(&["runs", "list"]).as_array().unwrap().len(), 100);
}

#[test]
fn a_run_is_called_off_only_when_its_name_is_given_twice() {
    let bench = with_runs();
    let whole = || bench.sql("SELECT * FROM tx_nrllm_agentrun ORDER BY uid");
    let before = whole();
    let said = bench.fails(2, &["runs", "cancel", "run-3", "--reason", "x"], b"");
    assert!(said.contains("run-3 is waiting_for_input") && said.contains("--confirm run-3"), "{said}");
    assert!(!said.contains("SECRET"), "{said}");
    bench.fails(2, &["runs", "cancel", "run-3", "--reason", "x", "--confirm", "run-4"], b"");
    for (code, run, says) in [
        (1, "run-9", "there is no run run-9"),
        (1, "run-2", "run run-2 has ended already: it is failed"),
        (1, "run-5", "has a status that this hardwrap does not know"),
    ] {
        let said = bench.fails(code, &["runs", "cancel", run, "--reason", "x", "--confirm", run], b"");
        assert!(said.contains(says), "{said}");
    }
    assert_eq!(whole(), before);
    let done = bench.json(&["runs", "cancel", "run-3", "--reason", "asked by its owner", "--confirm", "run-3"]);
    assert_eq!(done["status"], "cancelled");
    let row = bench.sql(
        "SELECT status, queued_request, suspended_state, claimed_by, termination_reason FROM tx_nrllm_agentrun WHERE uid = 3",
    );
    assert_eq!(row, "cancelled||||asked by its owner\n");
    bench.fails(1, &["runs", "cancel", "run-3", "--reason", "x", "--confirm", "run-3"], b"");
}

#[test]
fn old_runs_are_purged_as_the_dry_run_said() {
    let bench = with_runs();
    let purge = |more: &[&str]| bench.json(&[&["runs", "purge"], more].concat());
    let what =
        |done: &serde_json::Value| ["finished", "unfinished", "events"].map(|field| done[field].as_u64().unwrap());
    assert_eq!(what(&purge(&["--finished", "30", "--unfinished", "30", "--dry-run"])), [1, 4, 3]);
    assert_eq!(what(&purge(&["--finished", "30", "--dry-run"])), [1, 0, 2]);
    assert_eq!(bench.sql("SELECT count(*) FROM tx_nrllm_agentrun"), "5\n");
    assert_eq!(what(&purge(&["--finished", "30"])), [1, 0, 2]);
    assert_eq!(what(&purge(&["--finished", "30"])), [0, 0, 0]);
    // A lease that has not ended protects a run, whatever its age.
    bench.sql("UPDATE tx_nrllm_agentrun SET lease_expires = 99999999999 WHERE uid = 4");
    assert_eq!(what(&purge(&["--unfinished", "30", "--dry-run"])), [0, 3, 1]);
    assert_eq!(
        text(&bench.ok(&["runs", "purge", "--unfinished", "1"], b"")),
        "deleted 0 finished and 3 unfinished runs, with 1 events\n"
    );
    for bad in [&["runs", "purge"][..], &["runs", "purge", "--finished", "0"], &["runs", "purge", "--finished", "-1"]] {
        assert_eq!(bench.run(bad, b"").status.code(), Some(2), "{bad:?}");
    }
}

#[test]
fn what_is_missing_or_wrong_is_said_on_one_line() {
    let bench = with_runs();
    for bad in [&["runs", "show", ""][..], &["runs", "list", "--status", "lost"], &["runs", "list", "--limit", "0"]] {
        assert_eq!(bench.run(bad, b"").status.code(), Some(2), "{bad:?}");
    }
    bench.sql("DROP TABLE tx_nrllm_agentrun");
    for command in [&["runs", "list"][..], &["runs", "purge", "--finished", "1"]] {
        let said = bench.fails(2, command, b"");
        assert!(said.contains("no table tx_nrllm_agentrun"), "{said}");
    }
    bench.edit("preset = \"nr-llm\"", "table = \"a\"\ncolumn = \"b\"\nkey = \"c\"\nidentifier = \"d\"");
    assert!(bench.fails(2, &["runs", "list"], b"").contains("the preset nr-llm is not configured"));
}

#[test]
fn what_a_crash_left_is_tidied_up_by_key_list() {
    let bench = Bench::new();
    bench.make_faulty();
    let run = |arguments: &[&str]| {
        let done = bench.faulty(arguments).output().unwrap();
        assert!(done.status.success(), "{}", text(&done.stderr));
        text(&done.stdout)
    };
    for (kill, tidied) in [("C_CreateObject 2 kill", "destroyed"), ("C_SetAttributeValue 1 kill", "relabelled")] {
        // Before the new key is recorded, and between that and its label.
        bench.hsm.site().set_faults(kill);
        assert!(bench.faulty(&["init"]).output().unwrap().status.code().is_none(), "{kill}");
        bench.hsm.site().set_faults("");
        assert!(run(&["key", "list"]).contains("left by a crash: a key in the making"));
        let said = run(&["key", "list", "--clean"]);
        assert!(said.contains(&format!("{tidied} the key in the making")), "{said}");
        assert!(!run(&["key", "list", "--clean"]).contains("in the making"));
    }
    assert!(run(&["init"]).contains("was there already, and works"));
}

#[test]
fn tidying_up_asks_the_database_first() {
    let bench = Bench::new();
    let said = bench.fails(2, &["key", "list", "--clean"], b"");
    assert!(said.contains("no database"), "{said}");
}

/// A metric's name, its labels, its value.
type Sample = (String, Vec<(String, String)>, f64);

/// Reads the exposition format strictly: every sample after its HELP and TYPE, names and labels well formed.
fn parse(exposition: &str) -> Vec<Sample> {
    let mut samples = Vec::new();
    let mut current = String::new();
    let name = |text: &str| !text.is_empty() && text.chars().all(|c| c.is_ascii_lowercase() || c == '_');
    for line in exposition.lines() {
        if let Some(rest) = line.strip_prefix("# ") {
            let (kind, rest) = rest.split_once(' ').unwrap();
            let (metric, text) = rest.split_once(' ').unwrap();
            assert!(name(metric) && !text.is_empty(), "{line}");
            match kind {
                "HELP" => metric.clone_into(&mut current),
                "TYPE" => assert!(metric == current && text == "gauge", "{line}"),
                other => panic!("{other}"),
            }
            continue;
        }
        let (series, value) = line.rsplit_once(' ').unwrap();
        let (metric, rest) = series.split_once('{').unwrap_or((series, "}"));
        assert_eq!(metric, current, "{line}");
        let mut labels = Vec::new();
        let mut rest = rest;
        while rest != "}" {
            let (label, after) = rest.split_once("=\"").unwrap();
            assert!(name(label), "{line}");
            let (mut text, mut letters) = (String::new(), after.char_indices());
            let end = loop {
                match letters.next().unwrap() {
                    (at, '"') => break at,
                    (_, '\\') => text.push(match letters.next().unwrap().1 {
                        'n' => '\n',
                        c @ ('"' | '\\') => c,
                        other => panic!("\\{other} in {line}"),
                    }),
                    (_, c) => text.push(c),
                }
            };
            labels.push((label.to_owned(), text));
            rest = after[end + 1..].trim_start_matches(',');
        }
        samples.push((metric.to_owned(), labels, value.parse().unwrap()));
    }
    samples
}

#[test]
fn prometheus_reads_what_status_counts() {
    let bench = Bench::new();
    bench.edit("table = \"customer\"", "table = \"cust\\\"o\\\\m\\ner\"");
    bench.ok(&["init"], b"");
    bench.sql("CREATE TABLE \"cust\"\"o\\m\ner\" (id INTEGER PRIMARY KEY, iban TEXT)");
    let sealed = text(&bench.ok(&["seal", "--column", "cust\"o\\m\ner.iban", "--row", "7"], b"x"));
    bench.sql(&format!("INSERT INTO \"cust\"\"o\\m\ner\" VALUES (7, '{sealed}'), (8, 'clear'), (9, NULL)"));
    let exposition = text(&bench.ok(&["status", "--prometheus"], b""));
    let samples = parse(&exposition);
    let value = |metric: &str, wanted: &[(&str, &str)]| {
        let fits = |labels: &[(String, String)]| {
            wanted.iter().all(|(label, value)| labels.iter().any(|(l, v)| l == label && v == value))
        };
        let mut found = samples.iter().filter(|(name, labels, _)| name == metric && fits(labels));
        let (_, _, value) = found.next().unwrap_or_else(|| panic!("{metric} {wanted:?}: {exposition}"));
        assert!(found.next().is_none(), "{metric} {wanted:?} twice");
        *value
    };
    let column = ("column", "cust\"o\\m\ner.iban");
    let kid = bench.json(&["key", "list"])["keys"][0]["kid"].as_str().unwrap().to_owned();
    assert_eq!(value("hardwrap_column_values", &[column, ("kind", "sealed"), ("kid", &kid)]), 1.0);
    assert_eq!(value("hardwrap_column_values", &[column, ("kind", "cleartext")]), 1.0);
    assert_eq!(value("hardwrap_column_values", &[column, ("kind", "null")]), 1.0);
    assert_eq!(value("hardwrap_column_rows", &[column]), 3.0);
    assert_eq!(value("hardwrap_cleartext_window", &[column]), 0.0);
    assert_eq!(value("hardwrap_cleartext_window", &[("column", "tx_nrllm_agentrun.queued_request")]), 1.0);
    assert_eq!(value("hardwrap_key_works", &[("kid", &kid)]), 1.0);
    assert_eq!(value("hardwrap_key_state", &[("kid", &kid), ("state", "active")]), 1.0);
    assert_eq!(value("hardwrap_key_wraps_limit", &[("kid", &kid)]), f64::from(1_u32 << 31));
    // Cleartext in a column that refuses it; the column whose table is not there is a warning, as are two windows.
    assert_eq!(value("hardwrap_findings", &[("severity", "critical")]), 1.0);
    assert_eq!(value("hardwrap_findings", &[("severity", "warning")]), 3.0);
    assert_eq!(value("hardwrap_column_fault", &[("column", "customer.motto")]), 1.0);
    assert_eq!(bench.run(&["status", "--prometheus", "--check"], b"").status.code(), Some(1));
    assert_eq!(bench.run(&["status", "--prometheus", "--json"], b"").status.code(), Some(2));
}

#[test]
fn a_shell_completes_the_commands_and_each_has_its_page() {
    let bench = Bench::new();
    let script = bench.hsm.site().dir().join("completion.bash");
    fs::write(&script, bench.ok(&["completions", "bash"], b"")).unwrap();
    let offered = Command::new("bash")
        .arg("-c")
        .arg(format!(
            "source '{}'; COMP_WORDS=(hardwrap ru); COMP_CWORD=1; _hardwrap hardwrap ru hardwrap; echo \"${{COMPREPLY[@]}}\"",
            script.display()
        ))
        .output()
        .unwrap();
    assert_eq!(text(&offered.stdout), "runs\n", "{}", text(&offered.stderr));
    for shell in ["zsh", "fish", "elvish", "powershell"] {
        assert!(text(&bench.ok(&["completions", shell], b"")).contains("status"), "{shell}");
    }
    let pages = bench.hsm.site().dir().join("a/man1");
    for _ in 0..2 {
        bench.ok(&["man", pages.to_str().unwrap()], b"");
    }
    for (page, says) in [
        ("hardwrap.1", "PKCS#11"),
        ("hardwrap-key-list.1", "\\-\\-clean"),
        ("hardwrap-runs-purge.1", "\\-\\-dry\\-run"),
        ("hardwrap-status.1", "\\-\\-prometheus"),
    ] {
        let text = fs::read_to_string(pages.join(page)).unwrap();
        assert!(text.contains(".TH") && text.contains(says), "{page}: {text}");
    }
    assert!(!fs::exists(pages.join("hardwrap-count-demo-texts.1")).unwrap());
    bench.fails(1, &["man", "/proc/nowhere"], b"");
}

#[test]
fn help_says_what_each_command_changes_and_shows_it_used() {
    let mut ahead = vec![Vec::<String>::new()];
    let mut seen = 0;
    while let Some(command) = ahead.pop() {
        let words: Vec<_> = command.iter().map(String::as_str).chain(["--help"]).collect();
        let done = Command::new(env!("CARGO_BIN_EXE_hardwrap")).args(&words).output().unwrap();
        let help = text(&done.stdout);
        assert!(done.status.success() && done.stderr.is_empty(), "{words:?}");
        let summary = help.lines().next().unwrap();
        assert!(!summary.is_empty() && !summary.ends_with('.'), "{words:?}: {summary}");
        let listed = help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
        for name in listed.filter(|line| !line.starts_with("   ")).filter_map(|line| line.split_whitespace().next()) {
            ahead.push([&command[..], &[name.to_owned()]].concat());
        }
        let spoken = format!("hardwrap {}", command.join(" "));
        if help.contains("\nCommands:\n") {
            continue;
        }
        seen += 1;
        let (_, notes) = help.split_once("Options of every command:").unwrap();
        assert!(notes.contains(&format!("  {spoken}")) || notes.contains(&format!("| {spoken}")), "no example: {help}");
        // What an example shows is there.
        for line in notes.lines().filter_map(|line| line.split_once("hardwrap ").map(|(_, rest)| rest)) {
            let flags = line.split(['|', '>', '<', '\\', '&']).next().unwrap().split("   ").next().unwrap();
            for flag in flags.split_whitespace().filter(|word| word.starts_with("--") && *word != "--json") {
                assert!(help.contains(flag), "{flag} of the example is no flag: {help}");
            }
        }
    }
    assert!(seen > 12, "{seen}");
}
