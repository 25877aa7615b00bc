//! The end of a key: retired, which can be taken back, then destroyed, which cannot. Every gate is looked at each time,
//! and every one that is closed is named.

use jiff::{SignedDuration, Timestamp};

use super::rotate::without_fence;
use super::{Error, Keeper, check};
use crate::hsm::{Health, KeyFact, Report, State};
use crate::provider::KeyId;
use crate::store::RotationLease;

/// What has to hold before a key is retired or destroyed.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Gate {
    /// Its name, stable.
    pub name: &'static str,
    /// Why it is closed; none where it holds.
    pub closed: Option<String>,
}

/// A key that is gone.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Destroyed {
    /// Its id.
    pub kid: KeyId,
    /// Since when nothing named it: backups older than this need it, and nothing opens their values any more.
    pub unneeded_since: Timestamp,
}

impl Keeper {
    /// What keeps `kid` from being retired now, gate by gate. Writes nothing.
    ///
    /// # Errors
    /// Whatever keeps token or database from answering.
    pub fn retirement(&self, kid: KeyId) -> Result<Vec<Gate>, Error> {
        self.usable()?;
        self.gates(&self.report()?, kid)
    }

    /// Retires a key: it does not unwrap any more, and can be brought back. Every gate is looked at afresh. A key that
    /// is retired already is proven to be unneeded once more, for a destruction that another database asks for.
    ///
    /// # Errors
    /// [`Error::Gates`]; whatever keeps token or database from working.
    pub fn retire(&self, kid: KeyId) -> Result<(), Error> {
        self.with_lease(|| {
            let gates = self.gates(&self.report()?, kid)?;
            open_all(kid, "retired", gates)?;
            self.holder(kid)?.note_proof(&self.db().ready()?.identity, kid, Timestamp::now(), false)?;
            self.holder(kid)?.retire(kid)?;
            self.note_states()
        })
    }

    /// What keeps `kid` from being destroyed now, gate by gate: those of retirement, that it is retired, that the longest
    /// of backup horizon, write grace and `longer` has passed since it was proven under the fence, and that the id was
    /// given in full. Writes nothing.
    ///
    /// # Errors
    /// Whatever keeps token or database from answering.
    pub fn destruction(&self, kid: KeyId, confirm: &str, longer: Option<super::Duration>) -> Result<Vec<Gate>, Error> {
        self.usable()?;
        // Before the database is looked at: what could be restored after that look needs no key that has waited by now.
        let now = Timestamp::now();
        let report = self.report()?;
        let mut gates = self.gates(&report, kid)?;
        let state = report.key(kid).map(|key| key.fact.state);
        gates.push(gate(
            "retired",
            match state {
                Some(State::Retired) => None,
                _ => Some(format!("it is not retired: run `hardwrap key retire {kid}` first")),
            },
        ));
        let retired = report.key(kid).and_then(|key| key.fact.retired);
        let identity = self.db().ready()?.identity;
        let stale: Vec<&str> = report
            .databases
            .iter()
            .filter(|other| **other != identity)
            .filter(|other| {
                let proof = report.proofs.get(&((*other).clone(), kid));
                proof.is_some_and(|proof| retired.is_some_and(|retired| proof.last < retired))
            })
            .map(String::as_str)
            .collect();
        gates.push(gate(
            "other-database-fresh",
            match stale.is_empty() {
                true => None,
                false => Some(format!(
                    "database {} was not proven since the key was retired: run `hardwrap key retire {kid}` there",
                    stale.join(", ")
                )),
            },
        ));
        let policy = &self.parts.config.policy;
        gates.push(gate(
            "horizon-configured",
            match policy.backup_horizon {
                Some(_) => None,
                None => Some(
                    "policy.backup_horizon is not set: say how long a backup may be restored, and so need the key"
                        .to_owned(),
                ),
            },
        ));
        let wait = [policy.backup_horizon, Some(policy.write_grace), longer].into_iter().flatten().max();
        let since = report
            .databases
            .iter()
            .filter_map(|user| report.proofs.get(&(user.clone(), kid)))
            .map(|proof| proof.since)
            .max();
        gates.push(gate(
            "horizon",
            match (since, wait) {
                (Some(since), Some(wait)) => {
                    let wait = SignedDuration::from_secs(i64::try_from(wait.as_secs()).unwrap_or(i64::MAX));
                    let end = since.checked_add(wait).unwrap_or(Timestamp::MAX);
                    (now < end)
                        .then(|| format!("a backup from before {} may need it until {}", seconds(since), seconds(end)))
                }
                _ => Some("nothing is proven, so nothing has begun to pass".to_owned()),
            },
        ));
        gates.push(gate(
            "confirmed",
            match confirm == kid.to_string() {
                true => None,
                false => Some("--confirm does not name the key: give its id in full, 16 hex digits".to_owned()),
            },
        ));
        Ok(gates)
    }

    /// Destroys a key, for good. Every gate is looked at afresh. Where that was cut off after the key was gone, this does
    /// the rest.
    ///
    /// # Errors
    /// [`Error::Gates`]; whatever keeps token or database from working.
    pub fn destroy(&self, kid: KeyId, confirm: &str, longer: Option<super::Duration>) -> Result<Destroyed, Error> {
        self.with_lease(|| {
            let identity = self.db().ready()?.identity;
            let report = self.report()?;
            let gone = |fact: &&KeyFact| fact.state == State::Destroyed && confirm == kid.to_string();
            if let Some(fact) = report.key(kid).map(|key| &key.fact).filter(gone) {
                self.note_states()?;
                self.drop_old_fences(&report)?;
                let proof = report.proofs.get(&(identity, kid)).map(|proof| proof.since);
                return Ok(Destroyed { kid, unneeded_since: proof.or(fact.destroyed).unwrap_or_default() });
            }
            open_all(kid, "destroyed", self.destruction(kid, confirm, longer)?)?;
            let proof = self.holder(kid)?.note_proof(&identity, kid, Timestamp::now(), false)?;
            self.holder(kid)?.destroy(kid)?;
            self.note_states()?;
            self.db().drop_fence(kid)?;
            Ok(Destroyed { kid, unneeded_since: proof.since })
        })
    }

    /// Gives up a database: the destruction of a key no longer asks for its proof. What is sealed there may then become
    /// unreadable for ever.
    ///
    /// # Errors
    /// [`Error::NotReleased`] if the keyring does not know it, or it is this one; whatever keeps the token from answering.
    pub fn release_database(&self, identity: &str, reason: &str) -> Result<(), Error> {
        let refused = |why| Err(Error::NotReleased(identity.to_owned(), why));
        if !self.report()?.databases.iter().any(|user| user == identity) {
            return refused("the keyring record does not name it: `hardwrap database list` shows those it does");
        }
        if self.db().ready()?.identity == identity {
            return refused("it is this one: release it from another database, when this one is gone");
        }
        if reason.trim().is_empty() {
            return refused("say why: --reason");
        }
        for (_, keyring) in self.parts.tokens.all() {
            keyring.release_database(identity, reason)?;
        }
        Ok(())
    }

    fn gates(&self, report: &Report, kid: KeyId) -> Result<Vec<Gate>, Error> {
        let db = self.db();
        let identity = db.ready()?.identity;
        let key = match (report.key(kid), report.unreachable.first()) {
            (Some(key), _) => key,
            (None, Some(away)) => return Err(Error::TokenAway(away.clone())),
            (None, None) => return Err(crate::hsm::Error::NoSuchKey(kid).into()),
        };
        let resume = "run `hardwrap rotate --resume`";
        let mut gates = vec![
            gate(
                "state",
                match key.fact.state {
                    State::Deactivated | State::Retired => None,
                    State::Destroyed => Some("it is destroyed already".to_owned()),
                    state => {
                        Some(format!("it is {}: {resume} or `hardwrap rotate`, which deactivates it", state.name()))
                    }
                },
            ),
            gate(
                "another-seals",
                match report.current() {
                    Some(current) if current.fact.kid != kid => None,
                    _ => Some("no other key seals".to_owned()),
                },
            ),
        ];
        gates.push(gate(
            "token-away",
            report
                .unreachable
                .first()
                .map(|name| format!("token {name} is out of reach, and may know of a database that needs the key")),
        ));
        let left = self.rows_left(db, &[kid])?;
        gates.push(gate(
            "rows-left",
            match left.is_empty() {
                true => None,
                false => {
                    let said: Vec<String> =
                        left.iter().map(|left| format!("{} in {}", left.count, left.spot)).collect();
                    Some(format!("values name it, {}: {resume}", said.join(", ")))
                }
            },
        ));
        let open = db
            .ledger()?
            .into_iter()
            .filter(|entry| entry.accepted.is_none() && (entry.kid.is_empty() || entry.kid == kid.to_string()));
        gates.push(gate(
            "ledger",
            match open.count() {
                0 => None,
                open => Some(format!("{open} values in the ledger: mend them, or `hardwrap ledger accept`")),
            },
        ));
        let (_, unregistered) = self.unregistered(db)?;
        gates.push(gate(
            "unregistered-column",
            match unregistered.is_empty() {
                true => None,
                false => Some(super::unregistered(&unregistered)),
            },
        ));
        gates.push(gate("token-fence", match key.health {
            Health::Works if self.holder(kid)?.refuses_to_wrap(kid)? => None,
            Health::Asleep => None,
            Health::Works | Health::MayWrap => {
                Some(format!("the token lets it wrap: run `hardwrap key deactivate {kid}`"))
            }
            Health::MayUnwrap => Some(format!("the token lets it unwrap, though it is retired: run `hardwrap key activate --unwrap {kid}`, then retire it")),
            Health::Missing if key.fact.state == State::Retired => None,
            _ => Some("it is not on the token as the record says: `hardwrap key list`".to_owned()),
        }));
        let missing = db.missing_fences(kid, &self.spots())?;
        gates.push(gate(
            "database-fence",
            match missing.is_empty() || without_fence(&db.rotations()?, kid) {
                true => None,
                false => {
                    let names: Vec<String> = missing.iter().map(ToString::to_string).collect();
                    Some(format!("it is not in place on {}: {resume}", names.join(", ")))
                }
            },
        ));
        gates.push(gate(
            "proof",
            match (report.proofs.contains_key(&(identity.clone(), kid)), self.knows_proof(report, kid)?) {
                (true, true) => None,
                (true, false) => Some(format!("this database was restored from before its proof: {resume}")),
                (false, _) => Some(format!("nothing proves that no value here names it: {resume}")),
            },
        ));
        let unproven = report.databases.iter().filter(|other| **other != identity);
        let unproven: Vec<&str> = unproven
            .filter(|other| !report.proofs.contains_key(&((*other).clone(), kid)))
            .map(String::as_str)
            .collect();
        gates.push(gate("other-database", match unproven.is_empty() {
            true => None,
            false => Some(format!(
                "database {} uses the keyring and proves nothing: {resume} there, or `hardwrap database release` if it is gone",
                unproven.join(", ")
            )),
        }));
        Ok(gates)
    }

    /// Takes away the fences against keys that are destroyed, here or by another database: nothing comes under them.
    pub(super) fn drop_old_fences(&self, report: &Report) -> Result<(), Error> {
        for key in report.keys.iter().filter(|key| key.fact.state == State::Destroyed) {
            self.db().drop_fence(key.fact.kid)?;
        }
        Ok(())
    }

    fn with_lease<T>(&self, work: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
        self.usable()?;
        let lease: RotationLease = self.db().lease_rotation()?;
        let done = work();
        self.db().end_lease(&lease);
        done
    }

    fn note_states(&self) -> Result<(), Error> {
        check::note(self.db(), &self.report()?, &self.db().keys_seen()?)
    }
}

fn gate(name: &'static str, closed: Option<String>) -> Gate {
    Gate { name, closed }
}

fn open_all(kid: KeyId, act: &'static str, gates: Vec<Gate>) -> Result<(), Error> {
    if gates.iter().all(|gate| gate.closed.is_none()) { Ok(()) } else { Err(Error::Gates { kid, act, gates }) }
}

fn seconds(time: Timestamp) -> String {
    time.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}
