//! The diesel column type sealed and opened: the column stands in the type, so a call names only the row.

use super::{Error, Keeper};
use crate::column::{SealedColumn, ToRow};
use crate::secret::Plaintext;
use crate::store::Sealed;

impl<C: SealedColumn> Sealed<C> {
    /// [`Keeper::seal`] for the column `C`.
    ///
    /// # Errors
    /// As [`Keeper::seal`].
    pub fn seal(keeper: &Keeper, row: impl ToRow, value: &[u8]) -> Result<Self, Error> {
        Ok(Self::from_stored(keeper.seal(C::COLUMN, row, value)?))
    }

    /// [`Keeper::open_value`] for the column `C`.
    ///
    /// # Errors
    /// As [`Keeper::open_value`].
    pub fn open(&self, keeper: &Keeper, row: impl ToRow) -> Result<Plaintext, Error> {
        keeper.open_value(C::COLUMN, row, self.stored())
    }
}
