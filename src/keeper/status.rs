//! What stands where: keys on the token, and values in each column, counted.

use super::{Error, Keeper};
use crate::column::Column;
use crate::hsm::Report;
use crate::store::Counts;

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
        let token = self.keyring().report()?;
        let mut columns = Vec::new();
        for (column, facts) in self.columns() {
            let counts = match facts.usable() {
                Ok(()) => self.db().count(column).map_err(Error::from),
                Err(unfit) => Err(unfit.into()),
            };
            columns.push(ColumnStatus { column: column.clone(), counts });
        }
        Ok(Status { token, identity: self.db().ready()?.identity, wrong: self.check().err(), columns })
    }
}
