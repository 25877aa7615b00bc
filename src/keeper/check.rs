//! The check at start: that token, keyring and keys are those which this database knows, before any row is read.

use super::{Error, Keeper};
use crate::hsm::{self, Health, KeyReport, Report, State};
use crate::provider::KeyId;
use crate::store::{self, Db, KeySeen, RotationFact};

impl Keeper {
    /// Checks that token, keyring and keys are the right ones: connects, logs in, unwraps every canary, and compares
    /// the keyring record with what this database has seen of it. Reads no row. [`Keeper::open`] does this.
    ///
    /// What the record says that is new is noted in the database, so that an older record put back is found next time.
    ///
    /// # Errors
    /// Each wrong thing has its own: [`Error::NoKeys`], [`Error::EmptyKeyring`], [`Error::OtherKeys`],
    /// [`Error::OlderRecord`], [`Error::NotNoted`], [`Error::NoActiveKey`], [`Error::MayNotWrap`]; [`hsm::Error::Silent`]
    /// if the key that seals is recorded and does not work; whatever keeps token or database from working. That another
    /// key has the id of the one that seals is a warning only: values still open, and sealing says it itself.
    pub fn check(&self) -> Result<(), Error> {
        let identity = self.db().ready()?.identity;
        let report = self.report()?;
        let seen = self.db().keys_seen()?;
        same_keys(&report, self.keyring().label(), &seen, &self.db().rotations()?)?;
        if report.keys.is_empty() {
            return Err(Error::NoKeys(self.keyring().label().to_owned()));
        }
        if !report.databases.contains(&identity) {
            return Err(Error::NotNoted);
        }
        if !report.keys.iter().any(|key| key.current) {
            let active = |key: &&KeyReport| key.fact.state == State::Active;
            return Err(match report.keys.iter().rev().find(active) {
                Some(key) if key.health == Health::MayNotWrap => Error::MayNotWrap(key.fact.kid),
                Some(silent) => hsm::Error::Silent(silent.fact.kid).into(),
                None => Error::NoActiveKey(self.keyring().label().to_owned()),
            });
        }
        for key in report.keys.iter().filter(|key| !key.is_well()) {
            tracing::warn!(target: "hardwrap::keeper", kid = %key.fact.kid, "a recorded key does not work");
        }
        note(self.db(), &report, &seen)
    }
}

/// Whether the record is that of the keyring which the database has seen, and no older one.
pub(super) fn same_keys(
    report: &Report,
    keyring: &str,
    seen: &[KeySeen],
    rotations: &[RotationFact],
) -> Result<(), Error> {
    let recorded = |seen: &KeySeen| report.keys.iter().find(|key| key.fact.kid.to_string() == seen.kid);
    let Some(newest) = seen.last() else { return Ok(()) };
    let place = || (keyring.to_owned(), report.token.to_string());
    if seen.iter().all(|seen| recorded(seen).is_none()) {
        let ((keyring, token), kid) = (place(), newest.kid.clone());
        return Err(if report.keys.is_empty() {
            Error::EmptyKeyring { keyring, token, kid }
        } else {
            Error::OtherKeys { keyring, token, kid }
        });
    }
    for seen in seen {
        let now = recorded(seen).map(|key| key.fact.state);
        // A state that this version does not know is above all that it does.
        let older = match now {
            // Its token may be gone once it is proven that everything is under a later key.
            None => !rotations.iter().any(|rotation| rotation.proven.is_some() && rotation.target > seen.kid),
            Some(_) => false,
        };
        let older = older || now.is_some_and(|now| State::from_name(&seen.state).is_none_or(|was| age(now) < age(was)));
        if older {
            let (keyring, token) = place();
            let now = now.map_or("not recorded", State::name);
            return Err(Error::OlderRecord { keyring, token, kid: seen.kid.clone(), was: seen.state.clone(), now });
        }
    }
    Ok(())
}

/// How far a key has come. A retired key may be brought back, so that it is deactivated again is no older record.
fn age(state: State) -> State {
    if state == State::Retired { State::Deactivated } else { state }
}

/// Notes in the database what the record says and the database has not seen yet.
pub(super) fn note(db: &Db, report: &Report, seen: &[KeySeen]) -> Result<(), Error> {
    let known = |kid: KeyId, state: State| {
        let kid = kid.to_string();
        let at_least = |was: State| age(was) > age(state) || was == state;
        seen.iter().any(|seen| seen.kid == kid && State::from_name(&seen.state).is_none_or(at_least))
    };
    for KeyReport { fact, .. } in report.keys.iter().filter(|key| !known(key.fact.kid, key.fact.state)) {
        match db.note_key(fact.kid, fact.route.alg(), fact.state.name()) {
            // Who may only read still reads.
            Err(store::Error::ReadOnly) => return Ok(()),
            outcome => outcome?,
        }
    }
    Ok(())
}
