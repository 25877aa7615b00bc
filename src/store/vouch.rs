//! What has to hold on a server before a proof says anything: that it is no replica, that no transaction can still commit
//! what no fence has seen, and that one transaction takes what an atomic rotation writes.

use diesel::prelude::*;
use diesel::sql_types::{BigInt, Nullable, Text};

use super::connection::AnyConnection;
use super::lease::clock;
use super::query::Query;
use super::sql::Sql;
use super::{Db, Error, Spot};
use crate::column::Column;
use crate::provider::KeyId;

impl Db {
    /// Refuses where nothing can be proven: on a read replica, or a database that cannot be written.
    ///
    /// # Errors
    /// [`Error::Replica`], [`Error::Unavailable`].
    pub fn is_primary(&self) -> Result<(), Error> {
        let query = match self.sql() {
            Sql::Sqlite => return Ok(()),
            Sql::Postgres => {
                "SELECT CASE WHEN pg_is_in_recovery() OR current_setting('transaction_read_only') = 'on' THEN 1 ELSE 0 END::int8 \
                 AS count"
            }
            // Threads of a replica are seen by who has PROCESS.
            Sql::Mariadb => {
                "SELECT CAST(@@read_only OR EXISTS (SELECT 1 FROM information_schema.PROCESSLIST \
                 WHERE COMMAND IN ('Slave_SQL', 'Slave_worker')) AS SIGNED) AS count"
            }
        };
        let replica: Vec<Counted> = self.read_with(|connection| Query::new(query).load(connection))?;
        if replica.iter().any(|replica| replica.count != 0) { Err(Error::Replica) } else { Ok(()) }
    }

    /// The transactions that are prepared and not seen by a new trigger: MariaDB makes one while they stand, and
    /// PostgreSQL waits for them.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    pub fn prepared(&self) -> Result<Vec<String>, Error> {
        if self.sql() != Sql::Mariadb {
            return Ok(Vec::new());
        }
        let rows: Vec<Prepared> =
            self.read_with(|connection| Query::new("XA RECOVER FORMAT='SQL'").load(connection))?;
        Ok(rows.into_iter().map(|row| row.data).collect())
    }

    /// How many transactions are open, or prepared, that began before `fenced` (seconds since 1970, the server's clock).
    ///
    /// # Errors
    /// [`Error::Hidden`] where this account does not see all of them, or a cluster has them on other nodes;
    /// [`Error::Unavailable`].
    pub fn open_since(&self, fenced: i64) -> Result<i64, Error> {
        let hidden = |why| Error::Hidden("the list of open transactions".to_owned(), why);
        self.read_with(|connection| match connection.sql() {
            Sql::Sqlite => Ok(0),
            Sql::Postgres => {
                let sees: Vec<Counted> = Query::new(
                    "SELECT CASE WHEN pg_has_role(current_user, 'pg_read_all_stats', 'USAGE') THEN 1 ELSE 0 END::int8 AS count",
                )
                .load(connection)?;
                if sees.iter().all(|sees| sees.count == 0) {
                    return Err(hidden("it is no member of pg_read_all_stats"));
                }
                // What is prepared now may have begun at any time.
                let open: Vec<Counted> = Query::new(
                    "SELECT (SELECT COUNT(*) FROM pg_stat_activity WHERE datname = current_database() \
                     AND pid <> pg_backend_pid() AND xact_start <= to_timestamp(",
                )
                .integer(fenced + 1)
                .sql("::float8)) + (SELECT COUNT(*) FROM pg_prepared_xacts WHERE database = current_database()) AS count")
                .load(connection)?;
                Ok(open.iter().map(|open| open.count).sum())
            }
            Sql::Mariadb => {
                if cluster(connection)?.is_some() {
                    return Err(hidden("another node of the cluster may have more"));
                }
                let open = Query::new(
                    "SELECT COUNT(*) AS count FROM information_schema.INNODB_TRX \
                     WHERE trx_mysql_thread_id <> CONNECTION_ID() AND trx_started <= FROM_UNIXTIME(",
                )
                .integer(fenced + 1)
                .sql(")")
                .load::<Counted>(connection);
                match open {
                    Ok(open) => Ok(open.iter().map(|open| open.count).sum()),
                    Err(Error::Denied(_)) => Err(hidden("it has no PROCESS")),
                    Err(error) => Err(error),
                }
            }
        })
    }

    /// When the rotation to `target` had fenced the old keys on the token, by the database's clock; noted now where it was
    /// not noted before.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    pub fn fenced_since(&self, target: KeyId) -> Result<i64, Error> {
        let target = target.to_string();
        self.write(|connection| {
            let now = clock(connection)?;
            Query::new("UPDATE hardwrap_rotation SET fenced = ")
                .integer(now)
                .sql(" WHERE fenced IS NULL AND target = ")
                .text(&target)
                .execute(connection)?;
            let since: Vec<Since> = Query::new("SELECT fenced AS since FROM hardwrap_rotation WHERE target = ")
                .text(&target)
                .load(connection)?;
            Ok(since.first().and_then(|row| row.since).unwrap_or(now))
        })
    }

    /// Notes what stood in for the database's fence where no trigger could be made; nothing did where it stands.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    pub fn note_weaker(&self, target: KeyId, how: Option<&str>) -> Result<(), Error> {
        let target = target.to_string();
        self.write(|connection| {
            let query = Query::new("UPDATE hardwrap_rotation SET weaker = ");
            let query = match how {
                Some(how) => query.text(how),
                None => query.sql("NULL"),
            };
            query.sql(" WHERE target = ").text(&target).execute(connection).map(drop)
        })
    }

    /// The database's clock: seconds since 1970.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    pub fn clock(&self) -> Result<i64, Error> {
        self.read_with(clock)
    }

    /// Refuses what one transaction cannot do: roll back a table whose engine does not, or write more than a cluster takes
    /// in one piece.
    ///
    /// # Errors
    /// [`Error::NotTransactional`], [`Error::WriteSet`], [`Error::Unavailable`].
    pub fn takes_at_once(&self, columns: &[Column], target: KeyId) -> Result<(), Error> {
        if self.sql() != Sql::Mariadb {
            return Ok(());
        }
        let limits = self.read_with(cluster)?;
        let (mut rows, mut bytes) = (0, 0);
        for column in columns {
            let table = self.server_table(column.table())?.ok_or_else(|| Error::NoTable(column.table().to_owned()))?;
            if !table.transactional {
                return Err(Error::NotTransactional(column.table().to_owned()));
            }
            if limits.is_none() {
                continue;
            }
            let spot = Spot { table: column.table().to_owned(), column: column.name().to_owned() };
            let looked = self.looked(&spot)?;
            let due = format!(
                "{} AND NOT ({})",
                looked.sql.starts(&looked.value, crate::envelope::Marker::HW1),
                looked.sql.names(&looked.value, target)
            );
            // Each row goes into the write set as it was and as it is.
            let sums: Vec<Sums> = self.read_with(|connection| {
                Query::new(format!(
                    "SELECT COUNT(*) AS due, CAST(COALESCE(SUM(2 * OCTET_LENGTH({}) + 512), 0) AS SIGNED) AS bytes FROM {} WHERE {due}",
                    looked.value, looked.whole
                ))
                .load(connection)
            })?;
            rows += sums.iter().map(|sums| sums.due.unsigned_abs()).sum::<u64>();
            bytes += sums.iter().map(|sums| sums.bytes.unsigned_abs()).sum::<u64>();
        }
        let Some((most_rows, most_bytes)) = limits else { return Ok(()) };
        let over = |setting, most, wanted, unit| match most {
            0 => None,
            most if wanted <= most => None,
            most => Some(Error::WriteSet { setting, most, wanted, unit }),
        };
        over("wsrep_max_ws_rows", most_rows, rows, "rows")
            .or_else(|| over("wsrep_max_ws_size", most_bytes, bytes, "bytes"))
            .map_or(Ok(()), Err)
    }
}

/// What one transaction may write in a Galera cluster, rows and bytes, 0 for any number; none where it is no cluster.
fn cluster(connection: &mut AnyConnection) -> Result<Option<(u64, u64)>, Error> {
    let limits: Vec<Limits> = Query::new(
        "SELECT CAST(@@wsrep_on AS SIGNED) AS galera, CAST(@@wsrep_max_ws_rows AS SIGNED) AS most_rows, \
         CAST(@@wsrep_max_ws_size AS SIGNED) AS most_bytes",
    )
    .load(connection)?;
    let limits = limits.into_iter().next().filter(|limits| limits.galera != 0);
    Ok(limits.map(|limits| (limits.most_rows.unsigned_abs(), limits.most_bytes.unsigned_abs())))
}

#[derive(QueryableByName)]
struct Counted {
    #[diesel(sql_type = BigInt)]
    count: i64,
}

#[derive(QueryableByName)]
struct Prepared {
    #[diesel(sql_type = Text)]
    data: String,
}

#[derive(QueryableByName)]
struct Since {
    #[diesel(sql_type = Nullable<BigInt>)]
    since: Option<i64>,
}

#[derive(QueryableByName)]
struct Sums {
    #[diesel(sql_type = BigInt)]
    due: i64,
    #[diesel(sql_type = BigInt)]
    bytes: i64,
}

#[derive(QueryableByName)]
struct Limits {
    #[diesel(sql_type = BigInt)]
    galera: i64,
    #[diesel(sql_type = BigInt)]
    most_rows: i64,
    #[diesel(sql_type = BigInt)]
    most_bytes: i64,
}
