//! A keyring and a shop whose customers have sealed IBANs, for tests of rotation by the command line.

#![allow(dead_code, reason = "not every test uses every part")]

use serde_json::Value;

use crate::bench::{Bench, text};

/// A keyring, and a shop with `rows` customers, an IBAN sealed in each.
pub(crate) fn shop(rows: usize) -> Bench {
    let bench = Bench::with("[policy]\nbackup_horizon = \"1s\"\nwrite_grace = \"1s\"");
    bench.edit("preset = \"nr-llm\"", "preset = \"nr-llm\"\ncleartext = \"refuse\"");
    bench.make_customers();
    bench.ok(&["init"], b"");
    for row in 1..=rows {
        insert(&bench, row);
    }
    bench
}

/// What is to stand in the row of a customer.
pub(crate) fn sealed(bench: &Bench, row: usize) -> String {
    let row_text = row.to_string();
    let iban = format!("DE{row:020}");
    text(&bench.ok(&["seal", "--column", "customer.iban", "--row", &row_text], iban.as_bytes()))
}

/// A further customer.
pub(crate) fn insert(bench: &Bench, row: usize) {
    let iban = sealed(bench, row);
    bench.sql(&format!("INSERT INTO customer (id, iban) VALUES ({row}, '{iban}')"));
}

/// The keys, oldest first: id and state.
pub(crate) fn keys(bench: &Bench) -> Vec<(String, String)> {
    let list = bench.json(&["key", "list"]);
    let of = |key: &Value| (text_of(&key["kid"]), text_of(&key["state"]));
    list["keys"].as_array().unwrap().iter().map(of).collect()
}

/// A JSON text.
pub(crate) fn text_of(value: &Value) -> String {
    value.as_str().unwrap().to_owned()
}

/// Runs what ends with `code` and prints a report.
pub(crate) fn report(bench: &Bench, code: i32, arguments: &[&str]) -> Value {
    let done = bench.run(&[&["--json"], arguments].concat(), b"");
    assert_eq!(done.status.code(), Some(code), "{arguments:?}: {}", text(&done.stderr));
    serde_json::from_slice(&done.stdout).unwrap()
}
