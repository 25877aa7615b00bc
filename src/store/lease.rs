//! Who rotates or destroys in a database: one at a time, by a row with an end. A process that died on this machine is
//! seen to be dead; one elsewhere is waited for.

use std::fs;
use std::process;

use diesel::prelude::*;
use diesel::sql_types::{BigInt, Text};

use super::connection::AnyConnection;
use super::query::Query;
use super::sql::Sql;
use super::{Db, Error};
use crate::provider::KeyId;

impl Db {
    /// Takes the lease of rotation and destruction, for `LASTS` seconds from each renewal.
    ///
    /// # Errors
    /// [`Error::Leased`] while somebody else has it; [`Error::ReadOnly`], [`Error::Unavailable`].
    pub fn lease_rotation(&self) -> Result<RotationLease, Error> {
        let lease = RotationLease { holder: holder() };
        self.write(|connection| {
            let now = clock(connection)?;
            let standing: Vec<Standing> =
                Query::new("SELECT holder, expires FROM hardwrap_lease WHERE name = ").text(NAME).load(connection)?;
            let taken = match standing.into_iter().next() {
                Some(other) if other.expires > now && other.holder != lease.holder && !is_dead(&other.holder) => {
                    return Err(Error::Leased(described(&other.holder), other.expires - now));
                }
                Some(other) => Query::new("UPDATE hardwrap_lease SET holder = ")
                    .text(&lease.holder)
                    .sql(", expires = ")
                    .integer(now + LASTS)
                    .sql(" WHERE name = ")
                    .text(NAME)
                    .sql(" AND holder = ")
                    .text(&other.holder)
                    .execute(connection)?,
                None => Query::new("INSERT INTO hardwrap_lease (name, holder, expires) VALUES (")
                    .text(NAME)
                    .sql(", ")
                    .text(&lease.holder)
                    .sql(", ")
                    .integer(now + LASTS)
                    .sql(")")
                    .execute(connection)
                    .map_err(Error::in_the_way)?,
            };
            // Somebody else took it in between: looked at again.
            if taken == 1 { Ok(()) } else { Err(Error::Conflict("the lease was taken".into())) }
        })?;
        Ok(lease)
    }

    /// Gives the lease back. Where that fails it ends by itself.
    pub fn end_lease(&self, lease: &RotationLease) {
        let ended = self.write(|connection| {
            Query::new("DELETE FROM hardwrap_lease WHERE name = ")
                .text(NAME)
                .sql(" AND holder = ")
                .text(&lease.holder)
                .execute(connection)
        });
        if let Err(error) = ended {
            tracing::debug!(target: "hardwrap::store", %error, "the lease was not given back");
        }
    }

    /// Makes the lease last again.
    ///
    /// # Errors
    /// [`Error::LeaseLost`], [`Error::Unavailable`].
    pub fn renew_lease(&self, lease: &RotationLease) -> Result<(), Error> {
        self.write(|connection| lease.renew_in(connection))
    }
}

/// The right to rotate or destroy in a database.
#[derive(Clone, Debug)]
pub struct RotationLease {
    holder: String,
}

impl RotationLease {
    /// Of who only looks.
    pub(crate) fn none() -> Self {
        Self { holder: String::new() }
    }

    pub(super) fn renew_in(&self, connection: &mut AnyConnection) -> Result<(), Error> {
        let renewed = Query::new(format!("UPDATE hardwrap_lease SET expires = {} + {LASTS}", now(connection.sql())))
            .sql(" WHERE name = ")
            .text(NAME)
            .sql(" AND holder = ")
            .text(&self.holder)
            .execute(connection)?;
        if renewed == 1 { Ok(()) } else { Err(Error::LeaseLost) }
    }
}

/// The right under which a batch is written: that of the whole rotation, or of one part that several workers share.
#[derive(Clone, Copy, Debug)]
pub enum WorkLease<'a> {
    /// Of the rotation.
    Rotation(&'a RotationLease),
    /// Of a part.
    Part(&'a super::Part),
}

impl WorkLease<'_> {
    /// Makes it last again, and counts what was moved under it.
    pub(super) fn renew_in(&self, connection: &mut AnyConnection, target: KeyId, moved: usize) -> Result<(), Error> {
        let moved = i64::try_from(moved).unwrap_or(i64::MAX);
        match self {
            Self::Rotation(lease) => {
                lease.renew_in(connection)?;
                Query::new("UPDATE hardwrap_rotation SET moved = moved + ")
                    .integer(moved)
                    .sql(" WHERE target = ")
                    .text(&target.to_string())
                    .execute(connection)
                    .map(drop)
            }
            Self::Part(part) => part.renew_in(connection, moved),
        }
    }
}

#[derive(QueryableByName)]
struct Standing {
    #[diesel(sql_type = Text)]
    holder: String,
    #[diesel(sql_type = BigInt)]
    expires: i64,
}

/// This process, so that another on the same machine can see whether it still lives: boot, space of process ids,
/// process id, when it started, and something drawn, for one process may hold only one.
pub(super) fn holder() -> String {
    let pid = process::id();
    let started = started(pid).unwrap_or_default();
    format!("{} {pid} {started} {}", machine(), uuid::Uuid::new_v4().simple())
}

/// Where process ids mean the same.
fn machine() -> String {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let space = fs::read_link("/proc/self/ns/pid").map(|space| space.to_string_lossy().into_owned());
    format!("{}/{}", boot.trim(), space.unwrap_or_default())
}

/// When a process started, in ticks since the machine did; none if there is no such process.
fn started(pid: u32) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field is the program's name, and may hold anything.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    (state != "Z").then(|| fields.nth(18).map(str::to_owned))?
}

/// Whether a holder is a process of this machine that is there no more.
pub(super) fn is_dead(holder: &str) -> bool {
    let parts: Vec<&str> = holder.split(' ').collect();
    let [at, pid, since, _] = parts[..] else { return false };
    let Ok(pid) = pid.parse() else { return false };
    at == machine() && !since.is_empty() && at.len() > 1 && started(pid).as_deref() != Some(since)
}

fn described(holder: &str) -> String {
    match holder.split(' ').nth(1) {
        Some(pid) if holder.starts_with(&machine()) => format!("process {pid}"),
        _ => "a process on another machine".to_owned(),
    }
}

/// Seconds since 1970 by the clock that all who share the database share: the server's own.
pub(super) fn now(sql: Sql) -> &'static str {
    match sql {
        Sql::Sqlite => "CAST(strftime('%s', 'now') AS INTEGER)",
        Sql::Postgres => "CAST(extract(epoch FROM clock_timestamp()) AS int8)",
        Sql::Mariadb => "UNIX_TIMESTAMP()",
    }
}

/// What that clock shows.
pub(super) fn clock(connection: &mut AnyConnection) -> Result<i64, Error> {
    let query = Query::new(format!("SELECT {} AS now", connection.sql().integer(now(connection.sql()))));
    let rows: Vec<Clock> = query.load(connection)?;
    Ok(rows.first().map_or(0, |row| row.now))
}

#[derive(QueryableByName)]
struct Clock {
    #[diesel(sql_type = BigInt)]
    now: i64,
}

const NAME: &str = "rotation";
/// How long a lease lasts from its last renewal: seconds.
pub(super) const LASTS: i64 = 60;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_holder_is_dead_only_if_it_ran_here_and_is_gone() {
        assert!(!is_dead(&holder()));
        let mut child = process::Command::new("true").spawn().expect("a process");
        let started_then = "1";
        child.wait().expect("ended");
        assert!(is_dead(&format!("{} {} {started_then} x", machine(), child.id())));
        // The same number, another process.
        assert!(is_dead(&format!("{} {} {started_then} x", machine(), process::id())));
        assert!(!is_dead(&format!("elsewhere {} {started_then} x", child.id())));
        assert!(!is_dead("anything") && !is_dead(""));
    }
}
