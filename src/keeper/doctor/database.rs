//! The database, the register against its schema, what the values are, and what stands outside of the register.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use serde::Serialize;

use super::configuration::chain;
use super::{Examination, Finding, FindingId, rotation};
use crate::column::{Cleartext, Column};
use crate::envelope;
use crate::hsm::{Report, State};
use crate::keeper::{Config, Error};
use crate::provider::Alg;
use crate::store::{
    self, ColumnFact, ColumnFacts, Counts, Db, KeyFact, KeySeen, RotationFact, RowFact, Settings, TableFact,
};

/// The database, and the registered columns in it.
#[derive(Debug, Serialize)]
pub struct DatabaseFacts {
    /// Where it is.
    pub url: String,
    /// Its identity, where our tables are there.
    pub identity: Option<String>,
    /// How it is set up.
    pub settings: Option<Settings>,
    /// The registered columns.
    pub columns: Vec<ExaminedColumn>,
}

/// One registered column.
#[derive(Debug, Serialize)]
pub struct ExaminedColumn {
    /// `TABLE.COLUMN`.
    pub column: String,
    /// As the schema declares it, where it is there.
    pub declared: Option<String>,
    /// How many bytes it holds, where that is limited.
    pub holds: Option<u64>,
    /// `accept` or `refuse`.
    pub cleartext: &'static str,
    /// All rows; none where they could not be counted.
    pub rows: Option<u64>,
    /// Sealed values.
    pub sealed: Option<u64>,
    /// Values in clear.
    pub in_cleartext: Option<u64>,
    /// The statement that repeats the counts.
    pub sql: Option<String>,
}

/// A database that could be opened.
pub(super) struct Opened {
    db: Db,
    pub(super) identity: Option<String>,
    /// None where they could not be read.
    pub(super) seen: Option<Vec<KeySeen>>,
    pub(super) rotations: Vec<RotationFact>,
}

/// Opens the database, and looks at its files.
pub(super) fn open(config: &Config, examination: &mut Examination) -> Option<Opened> {
    let subject = config.database.to_string();
    let found = |id, error: &store::Error, remedy: &str| Finding::new(id, &*subject, chain(error), remedy);
    let db = match Db::open(&config.database) {
        Ok(db) => db,
        Err(error) => {
            let finding = match error {
                store::Error::NoDatabase(_) => {
                    found(FindingId::DatabaseMissing, &error, "correct database.url, or run hardwrap init")
                }
                _ => found(FindingId::DatabaseUnusable, &error, "correct database.url, or see to the file"),
            };
            examination.ran("database", vec![finding]);
            for id in ["columns", "values", "discovery", "rotation"] {
                examination.not_run(id, "the database could not be opened");
            }
            return None;
        }
    };
    let mut findings = Vec::new();
    let identity = match db.ready() {
        Ok(identity) => Some(identity.identity),
        Err(error @ (store::Error::NewerTables { .. } | store::Error::NewerNeeded { .. })) => {
            findings.push(found(
                FindingId::DatabaseNewer,
                &error,
                "use the hardwrap that was here last, or a newer one",
            ));
            None
        }
        Err(error @ (store::Error::NotInitialised | store::Error::Outdated { .. })) => {
            findings.push(found(FindingId::DatabaseNotReady, &error, "run hardwrap init"));
            None
        }
        Err(error) => {
            findings.push(found(FindingId::DatabaseUnusable, &error, "see to the file, then run doctor again"));
            None
        }
    };
    let readable = readable_by_others(config);
    if !readable.is_empty() {
        let files: Vec<_> = readable.iter().map(|file| file.display().to_string()).collect();
        let what = format!("others can read or write {}", files.join(", "));
        let remedy = format!("chmod o-rw {}", files.join(" "));
        findings.push(Finding::new(FindingId::DatabaseReadable, &*subject, what, remedy));
    }
    // A database that is not ours has seen no keys.
    let seen = match db.keys_seen() {
        _ if identity.is_none() => Some(Vec::new()),
        Ok(seen) => Some(seen),
        Err(error) => {
            findings.push(found(FindingId::DatabaseUnusable, &error, "see to the file, then run doctor again"));
            None
        }
    };
    examination.ran("database", findings);
    let rotations = db.rotations().unwrap_or_default();
    Some(Opened { db, identity, seen, rotations })
}

fn readable_by_others(config: &Config) -> Vec<PathBuf> {
    let Some(path) = config.database.path() else { return Vec::new() };
    let beside = |end: &str| {
        let mut name = path.as_os_str().to_owned();
        name.push(end);
        PathBuf::from(name)
    };
    let open = |file: &PathBuf| fs::metadata(file).is_ok_and(|about| about.permissions().mode() & 0o006 != 0);
    ["", "-wal", "-shm", "-journal"].into_iter().map(beside).filter(open).collect()
}

/// Looks at columns and values. Which keys there are is known only where the token answered.
pub(super) fn examine(
    config: &Config,
    opened: Option<Opened>,
    token: Option<&Report>,
    examination: &mut Examination,
) -> Option<DatabaseFacts> {
    let Opened { db, identity, .. } = opened?;
    let mut columns = Vec::new();
    let mut register = config.register.clone();
    match db.describe(&mut register) {
        Err(error) => {
            let remedy = "register the column once: values keep the identifier they were sealed with";
            let finding = match error {
                store::Error::RegisteredTwice { .. } => {
                    Finding::new(FindingId::ColumnTwice, "register", error.to_string(), remedy)
                }
                _ => Finding::new(
                    FindingId::DatabaseUnusable,
                    config.database.to_string(),
                    chain(&error),
                    "see to the file",
                ),
            };
            examination.ran("columns", vec![finding]);
            examination.not_run("values", "the register could not be looked up in the schema");
        }
        Ok(facts) => {
            let pairs = || register.columns().iter().zip(&facts);
            examination.ran("columns", pairs().flat_map(|(column, facts)| schema(column, facts)).collect());
            let mut found = Vec::new();
            let mut failed = None;
            for (column, facts) in pairs() {
                // What is there is counted, also where it cannot be walked.
                let there = facts.table != TableFact::Missing && facts.column != ColumnFact::Missing;
                let mut counts = None;
                if there {
                    match db.count(column).and_then(|counts| Ok((values(&db, column, &counts, token)?, counts))) {
                        Ok((said, counted)) => {
                            found.extend(said);
                            counts = Some(counted);
                        }
                        Err(error) => {
                            let remedy = "put a backup of the database back; what it says is not to be trusted";
                            let said = chain(&error);
                            if facts.key != KeyFact::Missing {
                                found.push(Finding::new(
                                    FindingId::DatabaseUnusable,
                                    column.to_string(),
                                    &*said,
                                    remedy,
                                ));
                            }
                            failed = Some(format!("{column}: {said}"));
                        }
                    }
                }
                columns.push(ExaminedColumn::of(column, facts, counts));
            }
            match (failed, token) {
                (Some(why), _) => {
                    examination.findings.extend(found);
                    examination.not_run("values", why);
                }
                (None, None) => {
                    examination.findings.extend(found);
                    examination.not_run("values", "counted; which keys there are is not known without the token");
                }
                (None, Some(_)) => examination.ran("values", found),
            }
        }
    }
    discovery(config, &db, examination);
    rotation::examine(&db, identity.as_deref(), &register, token, examination);
    Some(DatabaseFacts { url: config.database.to_string(), identity, settings: db.settings().ok(), columns })
}

/// The register against the schema, one column of it.
fn schema(column: &Column, facts: &ColumnFacts) -> Vec<Finding> {
    let mut found = Vec::new();
    let mut say = |id, what: String, remedy: &str| found.push(Finding::new(id, column.to_string(), what, remedy));
    let table = column.table();
    match facts.table {
        TableFact::Missing => {
            say(
                FindingId::TableMissing,
                format!("there is no table {table}"),
                "make the table, or correct the register",
            );
            return found;
        }
        TableFact::View | TableFact::Virtual => {
            say(FindingId::TableOdd, format!("{table} is a view or a virtual table"), "register the table behind it");
            return found;
        }
        TableFact::Parent | TableFact::Foreign => {
            let what = format!("{table} is a foreign table, a sequence, or a table that others inherit from");
            say(FindingId::TableOdd, what, "register an ordinary or a partitioned table");
            return found;
        }
        TableFact::Table => {}
    }
    match &facts.column {
        ColumnFact::Missing => {
            let what = format!("table {table} has no column {}", column.name());
            say(FindingId::ColumnMissing, what, "add the column, or correct the register");
        }
        ColumnFact::Generated(declared) => {
            let what = format!("it is generated (declared {declared:?})");
            say(FindingId::ColumnGenerated, what, "register the column that the value is stored in");
        }
        ColumnFact::Declared(declared) if !facts.takes_text() => {
            let what = format!("it is declared {declared:?}, which is no type for a sealed text");
            say(FindingId::ColumnType, what, "declare it as text; in MariaDB as mediumtext of character set utf8mb4");
        }
        ColumnFact::Declared(_) => {}
    }
    let least = envelope::sealed_length(Alg::A256Kw, 1);
    if !column.capacity().holds(least) {
        let what = format!("it holds {}, and the shortest sealed value needs {least}", column.capacity());
        say(FindingId::ColumnTooSmall, what, "make it longer: 334 bytes and 4/3 of the longest value");
    }
    match facts.key {
        KeyFact::Unique => {}
        KeyFact::NotUnique => {
            let what = format!("no primary key or unique index stands on {table}.{} alone", column.key());
            say(
                FindingId::KeyNotUnique,
                what,
                "register a key column that tells rows apart, or give it a unique index",
            );
        }
        KeyFact::Missing => {
            let what = format!("table {table} has no key column {}", column.key());
            say(FindingId::ColumnMissing, what, "correct key in the register");
        }
    }
    match &facts.row {
        RowFact::Unbound | RowFact::Bindable(_) => {}
        RowFact::Missing => {
            let what = format!("table {table} has no row column {}", column.row().unwrap_or_default());
            say(FindingId::ColumnMissing, what, "correct row in the register");
        }
        RowFact::NotBindable(declared) => {
            let what = format!("row column {} is declared {declared:?}", column.row().unwrap_or_default());
            say(FindingId::RowNotBindable, what, "bind values to a column declared INTEGER or TEXT");
        }
    }
    found
}

/// What the values of one column are.
fn values(db: &Db, column: &Column, counts: &Counts, token: Option<&Report>) -> Result<Vec<Finding>, store::Error> {
    let mut found = Vec::new();
    let mut say = |id, what: String, remedy: String| found.push(Finding::new(id, column.to_string(), what, remedy));
    let see = "hardwrap verify --all names each; put it back from a backup, or empty it".to_owned();
    if counts.keyless > 0 {
        let what = format!("{} rows have no {} (NULL)", counts.keyless, column.key());
        say(FindingId::RowsWithoutKey, what, format!("give each row a {}", column.key()));
    }
    if counts.damaged > 0 {
        say(FindingId::ValuesDamaged, format!("{} values are damaged", counts.damaged), see.clone());
    }
    if let Some(token) = token {
        let there: BTreeSet<_> = token.keys.iter().filter(|key| key.works).map(|key| key.fact.kid).collect();
        for (kid, count) in counts.sealed.iter().filter(|(kid, _)| !there.contains(kid)) {
            let (why, remedy) = match token.key(*kid).map(|key| key.fact.state) {
                Some(State::Retired) => (
                    "is retired",
                    format!("hardwrap key activate --unwrap {kid} brings it back, then hardwrap rotate --resume"),
                ),
                Some(State::Destroyed) => {
                    ("was destroyed", "a token's backup that has the key, or empty them: nothing else".to_owned())
                }
                _ => (
                    "is not there or does not work",
                    "restore the token's backup that has the key, or empty them".to_owned(),
                ),
            };
            say(FindingId::ValuesUnknownKey, format!("{count} values are sealed under {kid}, which {why}"), remedy);
        }
    }
    if counts.other_version > 0 {
        let what = format!("{} values were sealed by a newer hardwrap", counts.other_version);
        say(FindingId::ValuesNewer, what, "use a hardwrap that knows them".to_owned());
    }
    if counts.foreign > 0 {
        let what = format!("{} values are envelopes of nr-vault", counts.foreign);
        say(FindingId::ForeignEnvelopes, what, "they have to be migrated, with the ancestor's key".to_owned());
    }
    match column.policy() {
        Cleartext::Accept => {
            let what = format!("it accepts cleartext; {} values are", counts.cleartext);
            say(FindingId::CleartextWindow, what, "once nothing is in clear, set cleartext = \"refuse\"".to_owned());
            if let Some(longest) = db.longest_cleartext(column)?
                && let Ok(length) = usize::try_from(longest)
                && !column.capacity().holds(envelope::sealed_length(Alg::A256Kw, length))
            {
                let what = format!("a value of {longest} bytes in clear does not fit once it is sealed");
                say(FindingId::ValuesTooLong, what, format!("make the column longer than {}", column.capacity()));
            }
        }
        Cleartext::Refuse if counts.cleartext > 0 => {
            let what = format!("{} values are in clear, and the column refuses that", counts.cleartext);
            say(FindingId::CleartextClosed, what, see);
        }
        Cleartext::Refuse => {}
    }
    Ok(found)
}

/// Envelopes that stand where no registered column is.
fn discovery(config: &Config, db: &Db, examination: &mut Examination) {
    let everywhere = match db.find_envelopes() {
        Ok(everywhere) => everywhere,
        Err(error) => {
            let said = chain(&Error::from(error));
            let remedy = "put a backup of the database back; what it says is not to be trusted";
            examination.findings.push(Finding::new(FindingId::DatabaseUnusable, "discovery", &*said, remedy));
            return examination.not_run("discovery", said);
        }
    };
    let mut found = Vec::new();
    for one in &everywhere {
        let registered = config.register.columns().iter().any(|column| one.is(column.table(), column.name()));
        let ignored = config.ignore.iter().any(|ignore| one.is(&ignore.table, &ignore.column));
        if !registered && !ignored {
            let what = format!("{} envelopes stand in a column that is not registered", one.count);
            let remedy = format!(
                "add it: [[column]] table = {:?} column = {:?} key = … identifier = … as they were sealed; a false alarm \
                 goes to [[ignore]] with a reason",
                one.table, one.column
            );
            found.push(Finding::new(FindingId::Unregistered, one.to_string(), what, remedy));
        }
    }
    for ignore in &config.ignore {
        if !everywhere.iter().any(|one| one.is(&ignore.table, &ignore.column)) {
            let subject = format!("{}.{}", ignore.table, ignore.column);
            let what = "this [[ignore]] passes over no envelope";
            found.push(Finding::new(FindingId::IgnoreNeedless, subject, what, "take it out of the configuration"));
        }
    }
    examination.ran("discovery", found);
}

impl ExaminedColumn {
    fn of(column: &Column, facts: &ColumnFacts, counts: Option<Counts>) -> Self {
        Self {
            column: column.to_string(),
            declared: match &facts.column {
                ColumnFact::Declared(declared) | ColumnFact::Generated(declared) => Some(declared.clone()),
                ColumnFact::Missing => None,
            },
            holds: column.capacity().0,
            cleartext: match column.policy() {
                Cleartext::Accept => "accept",
                Cleartext::Refuse => "refuse",
            },
            rows: counts.as_ref().map(|counts| counts.total),
            sealed: counts.as_ref().map(Counts::sealed_total),
            in_cleartext: counts.as_ref().map(|counts| counts.cleartext),
            sql: counts.map(|counts| counts.sql),
        }
    }
}
