//! What rotations left: one that is not finished, values that could not be moved, a fence that is down.

use super::configuration::chain;
use super::{Examination, Finding, FindingId};
use crate::column::Register;
use crate::hsm::{Report, State};
use crate::keeper::rotate::{knows_proof, without_fence};
use crate::store::{self, Db, Spot};

/// Looks at what this database says of rotations; what they left unfinished is known only where the token answered.
pub(super) fn examine(
    db: &Db,
    identity: Option<&str>,
    register: &Register,
    token: Option<&Report>,
    examination: &mut Examination,
) {
    // No rotation was ever in a database without our tables.
    let Some(identity) = identity else { return examination.ran("rotation", Vec::new()) };
    let looked = ledger(db).and_then(|mut found| {
        if let Some(token) = token {
            found.extend(keys(db, identity, register, token)?);
        }
        Ok(found)
    });
    match looked {
        Ok(found) if token.is_some() => examination.ran("rotation", found),
        Ok(found) => {
            examination.findings.extend(found);
            examination.not_run("rotation", "which keys are to go is not known without the token");
        }
        Err(error) => examination.not_run("rotation", chain(&error)),
    }
}

fn ledger(db: &Db) -> Result<Vec<Finding>, store::Error> {
    let open = db.ledger()?.into_iter().filter(|entry| entry.accepted.is_none()).count();
    let said = |open| {
        Finding::new(
            FindingId::LedgerOpen,
            "ledger",
            format!("{open} values could not be moved to the key that seals"),
            "see hardwrap ledger list; mend each and run hardwrap rotate --resume, or give it up with hardwrap ledger accept",
        )
    };
    Ok((open > 0).then(|| said(open)).into_iter().collect())
}

/// Keys older than the one that seals: each is to be proven unneeded here, and fenced from then on.
fn keys(db: &Db, identity: &str, register: &Register, token: &Report) -> Result<Vec<Finding>, store::Error> {
    let Some(sealing) = token.current().map(|key| key.fact.kid) else { return Ok(Vec::new()) };
    let spots: Vec<Spot> = register
        .columns()
        .iter()
        .map(|column| Spot { table: column.table().to_owned(), column: column.name().to_owned() })
        .collect();
    let rotations = db.rotations()?;
    let mut found = Vec::new();
    for fact in token.keys.iter().map(|key| &key.fact).filter(|fact| fact.kid < sealing) {
        let kid = fact.kid;
        let old = matches!(fact.state, State::Active | State::Deactivated | State::Retired);
        let proven = token.proofs.contains_key(&(identity.to_owned(), kid)) && knows_proof(&rotations, token, kid);
        let mut say = |id, what| found.push(Finding::new(id, kid.to_string(), what, "run hardwrap rotate --resume"));
        if old && !proven {
            say(FindingId::RotationUnfinished, "nothing proves that no value here names it".to_owned());
        } else if old {
            let missing = db.missing_fences(kid, &spots)?;
            if !missing.is_empty() {
                let missing: Vec<String> = missing.iter().map(ToString::to_string).collect();
                let weaker = match without_fence(&rotations, kid) {
                    true => " (this account may make no trigger: its proof waited instead, which is weaker)",
                    false => "",
                };
                say(FindingId::FenceMissing, format!("no fence against it stands on {}{weaker}", missing.join(", ")));
            }
        }
    }
    Ok(found)
}
