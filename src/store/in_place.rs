//! Sealing cleartext where it stands.

use super::query::Query;
use super::{Db, Error, Key};
use crate::codec::Codec;
use crate::column::Column;
use crate::envelope::Marker;

impl Db {
    /// Seals the value of one row in place if it is cleartext. No lock is held while the key is asked: the row is
    /// written only if its whole value, and what it is bound to, are still what was read.
    ///
    /// # Errors
    /// [`Error::Codec`], [`Error::NotText`], [`Error::BadRow`], [`Error::KeyNotUnique`], [`Error::Unavailable`]; in
    /// each case nothing was changed.
    pub fn seal_cleartext(&self, codec: &Codec, column: &Column, key: &Key) -> Result<SealedInPlace, Error> {
        match self.seal_in_place(codec, column, key) {
            // Its key was fenced meanwhile: the new one seals.
            Err(Error::Fenced(_)) => self.seal_in_place(codec, column, key),
            outcome => outcome,
        }
    }

    fn seal_in_place(&self, codec: &Codec, column: &Column, key: &Key) -> Result<SealedInPlace, Error> {
        let Some(stored) = self.read_key(column, key)? else { return Ok(SealedInPlace::Nothing) };
        let Some(old) = &stored.value else { return Ok(SealedInPlace::Nothing) };
        if old.bytes().is_empty() || old.marker()? != Marker::None {
            return Ok(SealedInPlace::Nothing);
        }
        let row = stored.row?;
        let sealed = codec.seal(&column.at(row.as_ref())?, old.bytes())?;

        let shape = self.shape(column)?;
        let mut set = format!("{} = ", shape.value.name);
        for moves in &shape.moves {
            set.insert_str(0, &format!("{moves} = t.{moves}, "));
        }
        let update = Query::new(format!("UPDATE {} SET {set}", shape.table)).text(&sealed).sql(" WHERE ");
        let Some(update) = shape.key.is(update, key) else { return Ok(SealedInPlace::Nothing) };
        let mut update =
            update.sql(&format!(" AND {}{}", shape.sql.as_bytes(&shape.value.of), shape.sql.same())).bytes(old.bytes());
        if let (Some(cell), Some(row)) = (&shape.row, &row) {
            update = cell.is_row(update.sql(" AND "), row.as_str());
        }
        self.write(|connection| match update.execute(connection)? {
            0 => Ok(SealedInPlace::Changed),
            1 => Ok(SealedInPlace::Sealed),
            // An error rolls the transaction back.
            _ => Err(Error::KeyNotUnique(format!("{}.{}", column.table(), column.key()))),
        })
    }
}

/// What became of one row.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum SealedInPlace {
    /// Its value was cleartext and is sealed now.
    Sealed,
    /// There was nothing to seal: no such row, no value, an empty one, or one with a marker.
    Nothing,
    /// A concurrent writer changed the row, which was left as that writer made it: look again.
    Changed,
}
