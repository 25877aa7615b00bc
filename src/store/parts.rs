//! The parts of a column that several workers share, on this machine and others: each is leased to one worker by a row
//! that is compared and set, owned once that is committed, and taken over when its worker dies.

use diesel::prelude::*;
use diesel::sql_types::{BigInt, Nullable, Text};

use super::connection::AnyConnection;
use super::lease::{LASTS, clock, holder, is_dead, now};
use super::query::Query;
use super::{Db, Error, Key};
use crate::column::Column;
use crate::provider::KeyId;

impl Db {
    /// Divides a column into parts of about `rows` rows for the walk to `target`, in one transaction. Where there are
    /// parts of it already, nothing is done.
    ///
    /// # Errors
    /// [`Error::NoTable`], [`Error::NoColumn`], [`Error::Conflict`], [`Error::Unavailable`].
    pub fn divide(&self, column: &Column, target: KeyId, rows: u64) -> Result<(), Error> {
        let mut ends = Vec::new();
        let mut last: Option<Key> = None;
        while let Some(end) = self.key_behind(column, last.as_ref(), rows.max(1))? {
            ends.push(end.encoded());
            last = Some(end);
        }
        let target = target.to_string();
        self.write(|connection| {
            // Of a rotation that was given up for this one.
            Query::new("DELETE FROM hardwrap_part WHERE target <> ").text(&target).execute(connection)?;
            let there =
                Query::new("SELECT id, tbl, col, from_key, to_key, holder, expires FROM hardwrap_part WHERE target = ")
                    .text(&target)
                    .sql(" AND tbl = ")
                    .text(column.table())
                    .sql(" AND col = ")
                    .text(column.name());
            if !there.load::<PartRow>(connection)?.is_empty() {
                return Ok(());
            }
            // What comes behind the last key belongs to the last part.
            let froms = [None].into_iter().chain(ends.iter().map(Some));
            let tos = ends.iter().map(Some).chain([None]);
            for (from, to) in froms.zip(tos) {
                let end = |query: Query<'static>, key: Option<&String>| match key {
                    Some(key) => query.owned(key.clone()),
                    None => query.sql("NULL"),
                };
                let insert = Query::new("INSERT INTO hardwrap_part (target, tbl, col, from_key, to_key) VALUES (")
                    .owned(target.clone())
                    .sql(", ")
                    .owned(column.table().to_owned())
                    .sql(", ")
                    .owned(column.name().to_owned())
                    .sql(", ");
                end(end(insert, from).sql(", "), to).sql(")").execute(connection)?;
            }
            Ok(())
        })
    }

    /// Takes a part of the walk to `target` that nobody works on; none where there is none now.
    ///
    /// # Errors
    /// [`Error::Conflict`], [`Error::Unavailable`].
    pub fn take_part(&self, target: KeyId) -> Result<Option<Part>, Error> {
        let mine = holder();
        let target = target.to_string();
        self.write(|connection| {
            let now = clock(connection)?;
            let open: Vec<PartRow> = Query::new(
                "SELECT id, tbl, col, from_key, to_key, holder, expires FROM hardwrap_part WHERE done = 0 AND target = ",
            )
            .text(&target)
            .sql(" ORDER BY id")
            .load(connection)?;
            let free = |part: &PartRow| part.holder.is_empty() || part.expires <= now || is_dead(&part.holder);
            for part in open.into_iter().filter(free) {
                let taken = Query::new("UPDATE hardwrap_part SET holder = ")
                    .text(&mine)
                    .sql(", expires = ")
                    .integer(now + LASTS)
                    .sql(" WHERE done = 0 AND id = ")
                    .integer(part.id)
                    .sql(" AND holder = ")
                    .text(&part.holder)
                    .execute(connection)?;
                if taken == 1 {
                    return Ok(Some(Part {
                        id: part.id,
                        holder: mine.clone(),
                        table: part.tbl,
                        column: part.col,
                        from: part.from_key.map(|key| Key::decoded(&key)),
                        to: part.to_key.map(|key| Key::decoded(&key)),
                    }));
                }
            }
            Ok(None)
        })
    }

    /// Notes that a part is walked: how many of its values writers changed meanwhile, and how many could not be moved.
    ///
    /// # Errors
    /// [`Error::LeaseLost`] if another worker has it by now; [`Error::Conflict`], [`Error::Unavailable`].
    pub fn end_part(&self, part: &Part, changed: u64, bad: u64) -> Result<(), Error> {
        let count = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
        self.write(|connection| {
            let ended = Query::new("UPDATE hardwrap_part SET done = 1, changed = ")
                .integer(count(changed))
                .sql(", bad = ")
                .integer(count(bad))
                .sql(" WHERE id = ")
                .integer(part.id)
                .sql(" AND holder = ")
                .text(&part.holder)
                .execute(connection)?;
            if ended == 1 { Ok(()) } else { Err(Error::LeaseLost) }
        })
    }

    /// Makes a part last again where nothing had to be written for a while.
    ///
    /// # Errors
    /// [`Error::LeaseLost`], [`Error::Unavailable`].
    pub fn renew_part(&self, part: &Part) -> Result<(), Error> {
        self.write(|connection| part.renew_in(connection, 0))
    }

    /// Gives a part back unfinished. Where that fails, its lease ends by itself.
    pub fn return_part(&self, part: &Part) {
        let returned = self.write(|connection| {
            Query::new("UPDATE hardwrap_part SET holder = '', expires = 0 WHERE id = ")
                .integer(part.id)
                .sql(" AND holder = ")
                .text(&part.holder)
                .execute(connection)
        });
        if let Err(error) = returned {
            tracing::debug!(target: "hardwrap::store", %error, "a part was not given back");
        }
    }

    /// How many parts of the walk to `target` there are, and how many are not walked yet.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    pub fn parts(&self, target: KeyId) -> Result<(u64, u64), Error> {
        let (sql, zero) = (self.sql(), self.sql().integer("0"));
        let query = Query::new(format!(
            "SELECT COUNT(*) AS parts, {} AS undone, {zero} AS changed, {zero} AS bad FROM hardwrap_part WHERE target = ",
            sql.integer("COALESCE(SUM(1 - done), 0)")
        ));
        let target = target.to_string();
        let sums: Vec<Sums> = self.read_with(|connection| query.text(&target).load(connection))?;
        Ok(sums.first().map_or((0, 0), |sums| (sums.parts.unsigned_abs(), sums.undone.unsigned_abs())))
    }

    /// Closes a walk to `target` whose parts are all walked: what they moved is counted to the rotation, and they go. Says
    /// what they moved, what writers changed meanwhile and what could not be moved.
    ///
    /// # Errors
    /// [`Error::Conflict`], [`Error::Unavailable`].
    pub fn settle_parts(&self, target: KeyId) -> Result<(u64, u64, u64), Error> {
        let sql = self.sql();
        let sum = |name: &str| sql.integer(&format!("COALESCE(SUM({name}), 0)"));
        let sums = format!(
            "SELECT {} AS parts, {} AS undone, {} AS changed, {} AS bad FROM hardwrap_part WHERE target = ",
            sum("moved"),
            sum("1 - done"),
            sum("changed"),
            sum("bad")
        );
        let target = target.to_string();
        self.write(|connection| {
            let sums: Vec<Sums> = Query::new(sums.as_str()).text(&target).load(connection)?;
            let Some(sums) = sums.into_iter().next() else { return Ok((0, 0, 0)) };
            Query::new("UPDATE hardwrap_rotation SET moved = moved + ")
                .integer(sums.parts)
                .sql(" WHERE target = ")
                .text(&target)
                .execute(connection)?;
            Query::new("DELETE FROM hardwrap_part WHERE target = ").text(&target).execute(connection)?;
            Ok((sums.parts.unsigned_abs(), sums.changed.unsigned_abs(), sums.bad.unsigned_abs()))
        })
    }
}

/// A part of a column, leased to one worker.
#[derive(Clone, Debug)]
pub struct Part {
    id: i64,
    holder: String,
    table: String,
    column: String,
    /// The row before the first; none for the first row of all.
    pub from: Option<Key>,
    /// The last row; none for the last of all.
    pub to: Option<Key>,
}

impl Part {
    /// Whether it is one of that column.
    pub fn is_of(&self, column: &Column) -> bool {
        self.table == column.table() && self.column == column.name()
    }

    pub(super) fn renew_in(&self, connection: &mut AnyConnection, moved: i64) -> Result<(), Error> {
        let renewed = Query::new(format!(
            "UPDATE hardwrap_part SET expires = {} + {LASTS}, moved = moved + ",
            now(connection.sql())
        ))
        .integer(moved)
        .sql(" WHERE done = 0 AND id = ")
        .integer(self.id)
        .sql(" AND holder = ")
        .text(&self.holder)
        .execute(connection)?;
        if renewed == 1 { Ok(()) } else { Err(Error::LeaseLost) }
    }
}

#[derive(QueryableByName)]
struct PartRow {
    #[diesel(sql_type = BigInt)]
    id: i64,
    #[diesel(sql_type = Text)]
    tbl: String,
    #[diesel(sql_type = Text)]
    col: String,
    #[diesel(sql_type = Nullable<Text>)]
    from_key: Option<String>,
    #[diesel(sql_type = Nullable<Text>)]
    to_key: Option<String>,
    #[diesel(sql_type = Text)]
    holder: String,
    #[diesel(sql_type = BigInt)]
    expires: i64,
}

#[derive(QueryableByName)]
struct Sums {
    #[diesel(sql_type = BigInt)]
    parts: i64,
    #[diesel(sql_type = BigInt)]
    undone: i64,
    #[diesel(sql_type = BigInt)]
    changed: i64,
    #[diesel(sql_type = BigInt)]
    bad: i64,
}
