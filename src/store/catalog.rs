//! What a server's own catalogue says of a table: its columns, what they hold, how they are compared, and what is odd
//! about it. Asked of the catalogue itself, which no missing grant makes shorter.

use diesel::prelude::*;
use diesel::sql_types::{BigInt, Nullable, Text};

use super::Error;
use super::connection::AnyConnection;
use super::query::Query;
use super::sql::{Kept, Sql};
use crate::column::Capacity;

/// A table of a server.
#[derive(Clone, Debug)]
pub(super) struct ServerTable {
    /// As the register may name it: without its schema where that is found without.
    pub(super) name: String,
    pub(super) kind: ServerKind,
    pub(super) columns: Vec<ServerColumn>,
    /// Whether the engine rolls back.
    pub(super) transactional: bool,
    /// Whether old rows are kept (`WITH SYSTEM VERSIONING`).
    pub(super) versioned: bool,
}

/// What stands where a table should.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum ServerKind {
    Table,
    View,
    /// A table that others inherit from: triggers on it do not see their rows.
    Parent,
    Other,
}

/// A column of a server's table.
#[derive(Clone, Debug)]
pub(super) struct ServerColumn {
    pub(super) name: String,
    pub(super) declared: String,
    pub(super) form: Form,
    pub(super) capacity: Capacity,
    pub(super) generated: bool,
    /// A primary key or unique index stands on it alone, and compares as the column does.
    pub(super) unique: bool,
    /// Moves by itself when the row is written.
    pub(super) moves: bool,
    /// Of MariaDB's texts: character set and collation.
    pub(super) collation: Option<(String, String)>,
}

/// How the values of a column are read, compared and bound.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) enum Form {
    /// SQLite: whatever each cell holds.
    Any,
    /// A number of 64 bits at most.
    Integer,
    /// MariaDB's BIGINT UNSIGNED, which goes as its decimal text.
    Unsigned,
    /// A text; the name of the type that a bound text is cast to.
    Text(String),
    /// A text of a fixed length, filled up with blanks.
    Padded,
    /// A UUID.
    Uuid,
    /// Bytes.
    Bytes,
    /// Anything else.
    Other,
}

impl Form {
    /// How a text in it is looked at.
    pub(super) fn kept(&self) -> Kept {
        if *self == Self::Bytes { Kept::Bytes } else { Kept::Text }
    }
}

/// Looks a table up by the name that the register gives it.
pub(super) fn table(connection: &mut AnyConnection, name: &str) -> Result<Option<ServerTable>, Error> {
    match connection.sql() {
        Sql::Postgres => postgres(connection, name),
        Sql::Mariadb => mariadb(connection, name),
        Sql::Sqlite => Ok(None),
    }
}

fn postgres(connection: &mut AnyConnection, name: &str) -> Result<Option<ServerTable>, Error> {
    let quoted = Sql::Postgres.name(name);
    let tables: Vec<PostgresTable> = Query::new(
        "SELECT c.oid::int8 AS id, CASE WHEN pg_table_is_visible(c.oid) THEN c.relname ELSE n.nspname || '.' || c.relname END \
         AS name, c.relkind::text AS kind, CASE WHEN c.relkind = 'r' AND EXISTS (SELECT 1 FROM pg_inherits i \
         WHERE i.inhparent = c.oid) THEN 1 ELSE 0 END::int8 AS parent FROM pg_class c \
         JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = to_regclass(",
    )
    .text(&quoted)
    .sql(")")
    .load(connection)?;
    let Some(table) = tables.into_iter().next() else { return Ok(None) };
    let columns: Vec<PostgresColumn> = Query::new(
        "SELECT a.attname AS name, format_type(a.atttypid, a.atttypmod) AS declared, b.typname AS base, \
         b.typcategory::text AS category, \
         CASE WHEN t.typtype = 'd' THEN t.typtypmod ELSE a.atttypmod END::int8 AS modifier, \
         CASE WHEN a.attgenerated <> '' THEN 1 ELSE 0 END::int8 AS generated, \
         CASE WHEN EXISTS (SELECT 1 FROM pg_index i WHERE i.indrelid = a.attrelid AND i.indisunique AND i.indisvalid \
         AND i.indimmediate AND i.indpred IS NULL AND i.indexprs IS NULL AND i.indnkeyatts = 1 AND i.indkey[0] = a.attnum \
         AND (i.indcollation[0] = a.attcollation OR a.attcollation = 0)) THEN 1 ELSE 0 END::int8 AS sole \
         FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid \
         JOIN pg_type b ON b.oid = CASE WHEN t.typtype = 'd' THEN t.typbasetype ELSE t.oid END \
         WHERE a.attnum > 0 AND NOT a.attisdropped AND a.attrelid = ",
    )
    .integer(table.id)
    .sql("::oid ORDER BY a.attnum")
    .load(connection)?;
    let columns = columns.into_iter().map(|found| ServerColumn {
        form: match (found.base.as_str(), found.category.as_str()) {
            ("int2" | "int4" | "int8", _) => Form::Integer,
            ("text" | "varchar" | "citext", _) => Form::Text(found.base.clone()),
            ("bpchar", _) => Form::Padded,
            ("uuid", _) => Form::Uuid,
            ("bytea", _) => Form::Bytes,
            _ => Form::Other,
        },
        capacity: match (found.base.as_str(), found.modifier) {
            // The type's modifier counts four bytes of its own.
            ("varchar" | "bpchar", modifier) if modifier > 4 => Capacity(Some(modifier.unsigned_abs() - 4)),
            // A value of any type is shorter than one gibibyte.
            _ => Capacity(Some(1_073_741_823)),
        },
        name: found.name,
        declared: found.declared,
        generated: found.generated > 0,
        unique: found.sole > 0,
        moves: false,
        collation: None,
    });
    Ok(Some(ServerTable {
        name: table.name,
        kind: match (table.kind.as_str(), table.parent > 0) {
            ("r", true) => ServerKind::Parent,
            ("r" | "p", _) => ServerKind::Table,
            ("v" | "m", _) => ServerKind::View,
            _ => ServerKind::Other,
        },
        columns: columns.collect(),
        transactional: true,
        versioned: false,
    }))
}

fn mariadb(connection: &mut AnyConnection, name: &str) -> Result<Option<ServerTable>, Error> {
    let tables: Vec<MariadbTable> = Query::new(
        "SELECT t.TABLE_NAME AS name, t.TABLE_TYPE AS kind, e.TRANSACTIONS AS transactions FROM information_schema.TABLES t \
         LEFT JOIN information_schema.ENGINES e ON e.ENGINE = t.ENGINE \
         WHERE t.TABLE_SCHEMA = DATABASE() AND BINARY t.TABLE_NAME = ",
    )
    .text(name)
    .load(connection)?;
    let Some(table) = tables.into_iter().next() else { return Ok(None) };
    let packet: Vec<Packet> = Query::new("SELECT CAST(@@max_allowed_packet AS SIGNED) AS bytes").load(connection)?;
    let packet = packet.first().map_or(1 << 20, |packet| packet.bytes.unsigned_abs()).saturating_sub(PACKET_REST);
    let columns: Vec<MariadbColumn> = Query::new(
        "SELECT c.COLUMN_NAME AS name, c.COLUMN_TYPE AS declared, c.DATA_TYPE AS base, \
         CAST(c.CHARACTER_MAXIMUM_LENGTH AS SIGNED) AS longest, c.CHARACTER_SET_NAME AS charset, c.COLLATION_NAME AS collation, \
         CASE WHEN c.IS_GENERATED = 'ALWAYS' THEN 1 ELSE 0 END AS generated, c.EXTRA AS extra, \
         CAST(EXISTS (SELECT 1 FROM information_schema.STATISTICS s WHERE s.TABLE_SCHEMA = c.TABLE_SCHEMA \
         AND s.TABLE_NAME = c.TABLE_NAME AND s.NON_UNIQUE = 0 AND s.COLUMN_NAME = c.COLUMN_NAME AND s.SUB_PART IS NULL \
         AND (SELECT COUNT(*) FROM information_schema.STATISTICS o WHERE o.TABLE_SCHEMA = s.TABLE_SCHEMA \
         AND o.TABLE_NAME = s.TABLE_NAME AND o.INDEX_NAME = s.INDEX_NAME) = 1) AS SIGNED) AS sole \
         FROM information_schema.COLUMNS c WHERE c.TABLE_SCHEMA = DATABASE() AND BINARY c.TABLE_NAME = ",
    )
    .text(name)
    .sql(" ORDER BY c.ORDINAL_POSITION")
    .load(connection)?;
    let columns = columns.into_iter().map(|found| {
        let unsigned = found.declared.contains("unsigned");
        let ascii = matches!(found.charset.as_deref(), Some("utf8mb4" | "utf8mb3" | "utf8" | "ascii"));
        ServerColumn {
            form: match found.base.as_str() {
                "bigint" if unsigned => Form::Unsigned,
                "tinyint" | "smallint" | "mediumint" | "int" | "bigint" => Form::Integer,
                "char" | "varchar" | "tinytext" | "text" | "mediumtext" | "longtext" if ascii => {
                    Form::Text(found.base.clone())
                }
                "binary" | "varbinary" | "tinyblob" | "blob" | "mediumblob" | "longblob" => Form::Bytes,
                "uuid" => Form::Uuid,
                _ => Form::Other,
            },
            capacity: Capacity(Some(found.longest.map_or(packet, |longest| longest.unsigned_abs().min(packet)))),
            name: found.name,
            declared: match (&found.charset, ascii) {
                (Some(charset), false) => format!("{} CHARACTER SET {charset}", found.declared),
                _ => found.declared,
            },
            generated: found.generated > 0,
            unique: found.sole > 0,
            moves: found.extra.to_ascii_lowercase().contains("on update"),
            collation: found.charset.zip(found.collation),
        }
    });
    Ok(Some(ServerTable {
        name: table.name,
        kind: match table.kind.as_str() {
            "BASE TABLE" | "SYSTEM VERSIONED" => ServerKind::Table,
            "VIEW" | "SYSTEM VIEW" => ServerKind::View,
            _ => ServerKind::Other,
        },
        columns: columns.collect(),
        transactional: table.transactions.as_deref() == Some("YES"),
        versioned: table.kind == "SYSTEM VERSIONED",
    }))
}

/// What a statement holds beside the value it stores, at most. Bytes.
const PACKET_REST: u64 = 16_384;

#[derive(QueryableByName)]
struct PostgresTable {
    #[diesel(sql_type = BigInt)]
    id: i64,
    #[diesel(sql_type = Text)]
    name: String,
    #[diesel(sql_type = Text)]
    kind: String,
    #[diesel(sql_type = BigInt)]
    parent: i64,
}

#[derive(QueryableByName)]
struct PostgresColumn {
    #[diesel(sql_type = Text)]
    name: String,
    #[diesel(sql_type = Text)]
    declared: String,
    #[diesel(sql_type = Text)]
    base: String,
    #[diesel(sql_type = Text)]
    category: String,
    #[diesel(sql_type = BigInt)]
    modifier: i64,
    #[diesel(sql_type = BigInt)]
    generated: i64,
    #[diesel(sql_type = BigInt)]
    sole: i64,
}

#[derive(QueryableByName)]
struct MariadbTable {
    #[diesel(sql_type = Text)]
    name: String,
    #[diesel(sql_type = Text)]
    kind: String,
    #[diesel(sql_type = Nullable<Text>)]
    transactions: Option<String>,
}

#[derive(QueryableByName)]
struct MariadbColumn {
    #[diesel(sql_type = Text)]
    name: String,
    #[diesel(sql_type = Text)]
    declared: String,
    #[diesel(sql_type = Text)]
    base: String,
    #[diesel(sql_type = Nullable<BigInt>)]
    longest: Option<i64>,
    #[diesel(sql_type = Nullable<Text>)]
    charset: Option<String>,
    #[diesel(sql_type = Nullable<Text>)]
    collation: Option<String>,
    #[diesel(sql_type = BigInt)]
    generated: i64,
    #[diesel(sql_type = Text)]
    extra: String,
    #[diesel(sql_type = BigInt)]
    sole: i64,
}

#[derive(QueryableByName)]
struct Packet {
    #[diesel(sql_type = BigInt)]
    bytes: i64,
}
