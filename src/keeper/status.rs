//! What stands where: keys on the token, and values in each column, counted.

use super::{Error, Keeper};
use crate::column::Column;
use crate::hsm::{Report, State};
use crate::provider::KeyId;
use crate::store::{Counts, Found, LastDiscovery, LedgerEntry, RotationFact, Spot};

/// What stands on the token and in the database now.
#[derive(Debug)]
pub struct Status {
    /// The token, its keys, and what else has our label there.
    pub token: Report,
    /// The identity of the database.
    pub identity: String,
    /// What [`Keeper::check`] says now: none where all is well.
    pub wrong: Option<Error>,
    /// Every registered column.
    pub columns: Vec<ColumnStatus>,
    /// Envelopes in columns that nobody registered.
    pub unregistered: Vec<Found>,
    /// When the whole database was last searched before a rotation, and what was found.
    pub last_discovery: Option<LastDiscovery>,
    /// Values that a rotation could not move.
    pub ledger: Vec<LedgerEntry>,
    /// Every rotation of this database, oldest first.
    pub rotations: Vec<RotationFact>,
    /// The application's own rotators, by name.
    pub rotators: Vec<String>,
    /// Old keys, and where the database's fence against each is missing.
    pub fences: Vec<(KeyId, Vec<Spot>)>,
}

/// One registered column of a [`Status`].
#[derive(Debug)]
pub struct ColumnStatus {
    /// The column.
    pub column: Column,
    /// What its values are, each count with the SQL that repeats it; or why they cannot be counted.
    pub counts: Result<Counts, Error>,
}

impl Keeper {
    /// Looks at token and database. Every value is counted, by the database, and none is opened.
    ///
    /// # Errors
    /// Whatever keeps token or database from answering. A column that cannot be counted is an error of its own, within.
    pub fn status(&self) -> Result<Status, Error> {
        let token = self.report()?;
        let mut columns = Vec::new();
        for (column, facts) in self.columns() {
            let counts = match facts.usable() {
                Ok(()) => self.db().count(column).map_err(Error::from),
                Err(unfit) => Err(unfit.into()),
            };
            columns.push(ColumnStatus { column: column.clone(), counts });
        }
        let mut fences = Vec::new();
        for key in token.keys.iter().filter(|key| matches!(key.fact.state, State::Deactivated | State::Retired)) {
            fences.push((key.fact.kid, self.db().missing_fences(key.fact.kid, &self.spots())?));
        }
        Ok(Status {
            token,
            identity: self.db().ready()?.identity,
            wrong: self.check().err(),
            columns,
            unregistered: self.unregistered(self.db())?.1,
            last_discovery: self.db().last_discovery()?,
            ledger: self.db().ledger()?,
            rotations: self.db().rotations()?,
            rotators: self.rotators().iter().map(|rotator| rotator.name().to_owned()).collect(),
            fences,
        })
    }
}
