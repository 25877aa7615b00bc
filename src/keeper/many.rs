//! Many values in one call: spread over threads, each with a session of its own, in the order they came.

use std::thread;

use super::{Error, Keeper};
use crate::column::{Named, ToRow};
use crate::secret::Plaintext;
use crate::spread::spread;

impl Keeper {
    /// Seals many values of one column, as [`Keeper::seal`] does each. One result for each value, in their order; one
    /// that fails keeps no other from being sealed.
    ///
    /// The work is spread over as many threads as the token lends sessions and the machine has processors.
    ///
    /// # Errors
    /// [`Error::ColumnUnknown`]; within, those of [`Keeper::seal`].
    pub fn seal_many<R: ToRow + Sync, V: AsRef<[u8]> + Sync>(
        &self,
        column: impl Named,
        values: &[(R, V)],
    ) -> Result<Vec<Result<String, Error>>, Error> {
        let column = column.find_in(self.register())?;
        Ok(self.spread(values, |(row, value)| self.seal(column, row, value.as_ref())))
    }

    /// Opens many stored texts of one column, as [`Keeper::open_value`] does each; results as [`Keeper::seal_many`].
    ///
    /// # Errors
    /// [`Error::ColumnUnknown`]; within, those of [`Keeper::open_value`].
    pub fn open_many<R: ToRow + Sync, S: AsRef<str> + Sync>(
        &self,
        column: impl Named,
        stored: &[(R, S)],
    ) -> Result<Vec<Result<Plaintext, Error>>, Error> {
        let column = column.find_in(self.register())?;
        Ok(self.spread(stored, |(row, stored)| self.open_value(column, row, stored.as_ref())))
    }

    /// Wraps the DEKs of many stored texts of one column anew, as [`Keeper::rewrap`] does each; results as
    /// [`Keeper::seal_many`].
    ///
    /// # Errors
    /// [`Error::ColumnUnknown`]; within, those of [`Keeper::rewrap`].
    pub fn rewrap_many<R: ToRow + Sync, S: AsRef<str> + Sync>(
        &self,
        column: impl Named,
        stored: &[(R, S)],
    ) -> Result<Vec<Result<Option<String>, Error>>, Error> {
        let column = column.find_in(self.register())?;
        Ok(self.spread(stored, |(row, stored)| self.rewrap(column, row, stored.as_ref())))
    }

    fn spread<T: Sync, U: Send>(
        &self,
        items: &[T],
        work: impl Fn(&T) -> Result<U, Error> + Sync,
    ) -> Vec<Result<U, Error>> {
        let processors = thread::available_parallelism().map_or(1, usize::from);
        let workers = self.keyring().sessions().min(processors).min(items.len().div_ceil(WORTH_A_THREAD));
        spread(items, workers, work)
    }
}

/// So many values take longer than starting a thread does.
const WORTH_A_THREAD: usize = 8;
