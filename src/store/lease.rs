//! Who rotates or destroys in a database: one at a time, by a row with an end. A process that died on this machine is
//! seen to be dead; one elsewhere is waited for.

use std::fs;
use std::process;

use diesel::prelude::*;
use diesel::sql_types::{BigInt, Text};

use super::sql::Query;
use super::{Db, Error};

impl Db {
    /// Takes the lease of rotation and destruction, for `LASTS` seconds from each renewal.
    ///
    /// # Errors
    /// [`Error::Leased`] while somebody else has it; [`Error::ReadOnly`], [`Error::Unavailable`].
    pub fn lease_rotation(&self) -> Result<RotationLease, Error> {
        let lease = RotationLease { holder: holder() };
        self.write(|connection| {
            let now = now();
            let standing: Vec<Standing> =
                Query::new("SELECT holder, expires FROM hardwrap_lease WHERE name = ").text(NAME).load(connection)?;
            if let Some(other) = standing.into_iter().find(|one| one.expires > now && one.holder != lease.holder)
                && !is_dead(&other.holder)
            {
                return Err(Error::Leased(described(&other.holder), other.expires - now));
            }
            Query::new("INSERT OR REPLACE INTO hardwrap_lease (name, holder, expires) VALUES (")
                .text(NAME)
                .sql(", ")
                .text(&lease.holder)
                .sql(", ")
                .integer(now + LASTS)
                .sql(")")
                .execute(connection)?;
            Ok(())
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

    pub(super) fn renew_in(&self, connection: &mut SqliteConnection) -> Result<(), Error> {
        let renewed = Query::new("UPDATE hardwrap_lease SET expires = ")
            .integer(now() + LASTS)
            .sql(" WHERE name = ")
            .text(NAME)
            .sql(" AND holder = ")
            .text(&self.holder)
            .execute(connection)?;
        if renewed == 1 { Ok(()) } else { Err(Error::LeaseLost) }
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
fn holder() -> String {
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
fn is_dead(holder: &str) -> bool {
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

fn now() -> i64 {
    jiff::Timestamp::now().as_second()
}

const NAME: &str = "rotation";
/// How long a lease lasts from its last renewal: seconds.
const LASTS: i64 = 60;

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
