//! The register against the schema: what of each registered column is there, and how much it holds.

use diesel::prelude::*;
use diesel::sql_types::{BigInt, Text};

use super::catalog::{Form, ServerKind, ServerTable};
use super::connection::AnyConnection;
use super::query::Query;
use super::sql::{self, Sql};
use super::{Db, Error};
use crate::column::{Capacity, Column, Register};

impl Db {
    /// Looks up every registered column in the schema, and sets in the register how the schema spells it and the
    /// capacity that its declared type gives it: also where this database would not mind a longer text, because others
    /// will. A smaller capacity that is set already stays.
    ///
    /// What is missing is a fact, not an error: [`ColumnFacts::usable`] makes it one.
    ///
    /// # Errors
    /// [`Error::RegisteredTwice`] if two are one column to the database, and the register stays as it was;
    /// [`Error::Unavailable`].
    pub fn describe(&self, register: &mut Register) -> Result<Vec<ColumnFacts>, Error> {
        let mut described: Vec<Column> = Vec::new();
        let mut all = Vec::new();
        for column in register.columns() {
            let (spelt, facts) = match self.sql() {
                Sql::Sqlite => self.read_with(|connection| facts(connection, column))?,
                says => on_server(says, column, self.server_table(column.table())?.as_ref()),
            };
            if let Some(earlier) = described.iter().find(|earlier| one_column(self.sql(), earlier, &spelt)) {
                return Err(Error::RegisteredTwice { first: earlier.registered(), second: spelt.registered() });
            }
            let limits = [column.capacity().0, facts.capacity.0];
            described.push(spelt.holding(Capacity(limits.into_iter().flatten().min())));
            all.push(facts);
        }
        for (column, described) in register.columns_mut().iter_mut().zip(described) {
            *column = described;
        }
        Ok(all)
    }
}

/// What the schema says of one registered column.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ColumnFacts {
    /// `TABLE.COLUMN`.
    pub name: String,
    /// Its table.
    pub table: TableFact,
    /// The column itself.
    pub column: ColumnFact,
    /// How much the declared type holds.
    pub capacity: Capacity,
    /// The key column.
    pub key: KeyFact,
    /// The row column.
    pub row: RowFact,
    owner: String,
    key_name: String,
    row_name: Option<String>,
    /// What a server's column should be, where no sealed text can stand in it.
    not_for_text: Option<&'static str>,
    /// What a server's key column is declared as, where no walk can go by it.
    not_a_key: Option<String>,
    /// Whether the row column holds integers, ...
    integers: bool,
    /// ... and why nothing can be bound to it, if so.
    changes: String,
    on_server: bool,
}

impl ColumnFacts {
    /// Whether values can be sealed, opened and walked here.
    ///
    /// # Errors
    /// The first fault: [`Error::NoTable`], [`Error::NotATable`], [`Error::NoColumn`], [`Error::Generated`],
    /// [`Error::KeyNotUnique`], [`Error::NotBindable`].
    pub fn usable(&self) -> Result<(), Error> {
        let within = |name: &str| format!("{}.{name}", self.owner);
        let row = || within(self.row_name.as_deref().unwrap_or_default());
        match self.table {
            TableFact::Table => {}
            TableFact::Missing => return Err(Error::NoTable(self.owner.clone())),
            TableFact::View => return Err(Error::NotATable { table: self.owner.clone(), kind: "view" }),
            TableFact::Virtual => return Err(Error::NotATable { table: self.owner.clone(), kind: "virtual table" }),
            TableFact::Parent => {
                let kind = "table that others inherit from, whose rows no trigger on it sees";
                return Err(Error::NotATable { table: self.owner.clone(), kind });
            }
            TableFact::Foreign => {
                return Err(Error::NotATable { table: self.owner.clone(), kind: "foreign table or sequence" });
            }
        }
        match self.column {
            ColumnFact::Declared(_) => {}
            ColumnFact::Missing => return Err(Error::NoColumn(self.name.clone())),
            ColumnFact::Generated(_) => return Err(Error::Generated(self.name.clone())),
        }
        if let (Some(wanted), ColumnFact::Declared(declared)) = (self.not_for_text, &self.column) {
            return Err(Error::NotForText { column: self.name.clone(), declared: declared.clone(), wanted });
        }
        if let Some(declared) = &self.not_a_key {
            return Err(Error::NotAKey { column: within(&self.key_name), declared: declared.clone() });
        }
        match self.key {
            KeyFact::Unique => {}
            KeyFact::Missing => return Err(Error::NoColumn(within(&self.key_name))),
            KeyFact::NotUnique => return Err(Error::KeyNotUnique(within(&self.key_name))),
        }
        match &self.row {
            RowFact::Unbound | RowFact::Bindable(_) => Ok(()),
            RowFact::Missing => Err(Error::NoColumn(row())),
            RowFact::NotBindable(declared) => {
                Err(Error::NotBindable { column: row(), declared: declared.clone(), why: self.changes.clone() })
            }
        }
    }

    /// Whether the declared type is one for texts or bytes: elsewhere a STRICT table refuses a sealed value.
    pub fn takes_text(&self) -> bool {
        if self.on_server {
            return self.not_for_text.is_none();
        }
        match &self.column {
            ColumnFact::Declared(declared) | ColumnFact::Generated(declared) => {
                matches!(Affinity::of(declared), Affinity::Text | Affinity::Blob)
            }
            ColumnFact::Missing => true,
        }
    }

    /// Whether the row column has integer affinity: `007` stored there is 7, so only the canonical decimal of an
    /// integer names its row.
    pub fn row_is_integer(&self) -> bool {
        matches!(self.row, RowFact::Bindable(_)) && self.integers
    }
}

/// What stands where a table should.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum TableFact {
    /// A table.
    Table,
    /// Nothing.
    Missing,
    /// A view: nothing can be stored there.
    View,
    /// A virtual table: whatever is behind it may not keep texts as they are.
    Virtual,
    /// A table that others inherit from (PostgreSQL): a fence on it does not see their rows.
    Parent,
    /// What is no table of this database.
    Foreign,
}

/// What stands where a sealed column should.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum ColumnFact {
    /// A column, declared so.
    Declared(String),
    /// Nothing.
    Missing,
    /// A column that is computed, declared so.
    Generated(String),
}

/// What the key column is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum KeyFact {
    /// There, and a primary key or unique index stands on it alone.
    Unique,
    /// There, but two rows may have one key.
    NotUnique,
    /// Not there.
    Missing,
}

/// What the row column is.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum RowFact {
    /// The column is not bound to rows.
    Unbound,
    /// Values can be bound to it; it is declared so.
    Bindable(String),
    /// Values cannot be bound to it; it is declared so.
    NotBindable(String),
    /// It is not there.
    Missing,
}

/// How much a column holds that is declared so: the length of `char(n)`, `varchar(n)` and their kin, the fixed lengths
/// of `tinytext`, `mediumtext`, `longtext` and their BLOBs, else no limit.
pub fn declared_capacity(declared: &str) -> Capacity {
    let (name, length) = split(declared);
    Capacity(match name.as_str() {
        "tinytext" | "tinyblob" => Some(255),
        "mediumtext" | "mediumblob" => Some(16_777_215),
        "longtext" | "longblob" => Some(4_294_967_295),
        _ if LENGTH_COUNTS.contains(&name.as_str()) => length,
        _ => None,
    })
}

/// What SQLite makes of a declared type (datatype3.html §3.1): how it changes what is stored.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Affinity {
    Integer,
    Text,
    Blob,
    Real,
    Numeric,
}

impl Affinity {
    /// The five rules, in their order: `CHARINT` is an integer, and so is `FLOATING POINT`.
    fn of(declared: &str) -> Self {
        let declared = declared.to_ascii_uppercase();
        let holds = |words: &[&str]| words.iter().any(|word| declared.contains(word));
        if holds(&["INT"]) {
            Self::Integer
        } else if holds(&["CHAR", "CLOB", "TEXT"]) {
            Self::Text
        } else if declared.is_empty() || holds(&["BLOB"]) {
            Self::Blob
        } else if holds(&["REAL", "FLOA", "DOUB"]) {
            Self::Real
        } else {
            Self::Numeric
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Integer => "INTEGER",
            Self::Text => "TEXT",
            Self::Blob => "BLOB",
            Self::Real => "REAL",
            Self::Numeric => "NUMERIC",
        }
    }
}

/// Whether what is stored there is what was given, up to the spelling of an integer. A `uuid` is not: its affinity is
/// NUMERIC, and one that is all digits becomes a number. A column without a type keeps everything as it is: its rows
/// are looked at one by one.
fn bindable(declared: &str) -> bool {
    declared.is_empty() || matches!(Affinity::of(declared), Affinity::Integer | Affinity::Text)
}

/// Whether two columns with the schema's spelling are one, by the database's rules for names, or are written alike. Those
/// that are not there yet have no spelling but that of the register.
fn one_column(sql: Sql, one: &Column, other: &Column) -> bool {
    sql.same_table(one.table(), other.table()) && sql.same_column(one.name(), other.name())
        || one.to_string() == other.to_string()
}

/// The name of a type in lower case with single blanks, and the number in its parentheses.
fn split(declared: &str) -> (String, Option<u64>) {
    let (name, rest) = declared.split_once('(').unwrap_or((declared, ""));
    let name = name.split_whitespace().collect::<Vec<_>>().join(" ").to_ascii_lowercase();
    let digits: String = rest.trim_start().chars().take_while(char::is_ascii_digit).collect();
    (name, digits.parse().ok())
}

/// A registered column with its names as the schema spells them, and what the schema says of it.
fn facts(connection: &mut AnyConnection, column: &Column) -> Result<(Column, ColumnFacts), Error> {
    let table = sql::bare(column.table());
    let kinds: Vec<Kind> =
        Query::new("SELECT name, type AS kind FROM pragma_table_list WHERE schema = 'main' AND name COLLATE NOCASE = ")
            .text(table)
            .load(connection)?;
    let columns: Vec<Declared> = Query::new("SELECT name, type AS declared, hidden, pk FROM pragma_table_xinfo(")
        .text(table)
        .sql(", 'main')")
        .load(connection)?;
    let find = |name: &str| columns.iter().find(|found| found.name.eq_ignore_ascii_case(name));

    let sealed = find(column.name());
    let spelt = |name: &str| find(name).map_or(name, |found| &found.name).to_owned();
    let column = column.spelt(
        kinds.first().map_or(column.table().to_owned(), |found| sql::registrable(&found.name)),
        spelt(column.name()),
        spelt(column.key()),
        column.row().map(spelt),
    );
    let key = match find(column.key()) {
        None => KeyFact::Missing,
        Some(found) if unique(connection, table, found, &columns)? => KeyFact::Unique,
        Some(_) => KeyFact::NotUnique,
    };
    let facts = ColumnFacts {
        name: column.to_string(),
        table: match kinds.first().map(|found| found.kind.as_str()) {
            None => TableFact::Missing,
            Some("view") => TableFact::View,
            Some("virtual") => TableFact::Virtual,
            Some(_) => TableFact::Table,
        },
        column: match sealed {
            None => ColumnFact::Missing,
            Some(found) if found.hidden > 1 => ColumnFact::Generated(found.declared.clone()),
            Some(found) => ColumnFact::Declared(found.declared.clone()),
        },
        capacity: sealed.map_or(Capacity(None), |found| declared_capacity(&found.declared)),
        key,
        row: match column.row().map(find) {
            None => RowFact::Unbound,
            Some(None) => RowFact::Missing,
            Some(Some(found)) if bindable(&found.declared) => RowFact::Bindable(found.declared.clone()),
            Some(Some(found)) => RowFact::NotBindable(found.declared.clone()),
        },
        owner: column.table().to_owned(),
        key_name: column.key().to_owned(),
        row_name: column.row().map(str::to_owned),
        not_for_text: None,
        not_a_key: None,
        integers: column.row().and_then(find).is_some_and(|found| Affinity::of(&found.declared) == Affinity::Integer),
        changes: column
            .row()
            .and_then(find)
            .map_or_else(String::new, |found| format!("which has {} affinity", Affinity::of(&found.declared).name())),
        on_server: false,
    };
    Ok((column, facts))
}

/// The same on a server, by its catalogue.
fn on_server(says: Sql, column: &Column, table: Option<&ServerTable>) -> (Column, ColumnFacts) {
    let columns = table.map_or(&[][..], |table| &table.columns);
    let find = |name: &str| columns.iter().find(|found| says.same_column(&found.name, name));
    let spelt = |name: &str| find(name).map_or(name, |found| &found.name).to_owned();
    let column = column.spelt(
        table.map_or_else(|| column.table().to_owned(), |table| table.name.clone()),
        spelt(column.name()),
        spelt(column.key()),
        column.row().map(spelt),
    );
    let (sealed, key, row) = (find(column.name()), find(column.key()), column.row().map(find));
    let bindable = |form: &Form| matches!(form, Form::Integer | Form::Unsigned | Form::Text(_) | Form::Uuid);
    let facts = ColumnFacts {
        name: column.to_string(),
        table: match table.map(|table| table.kind) {
            None => TableFact::Missing,
            Some(ServerKind::Table) => TableFact::Table,
            Some(ServerKind::View) => TableFact::View,
            Some(ServerKind::Parent) => TableFact::Parent,
            Some(ServerKind::Other) => TableFact::Foreign,
        },
        column: match sealed {
            None => ColumnFact::Missing,
            Some(found) if found.generated => ColumnFact::Generated(found.declared.clone()),
            Some(found) => ColumnFact::Declared(found.declared.clone()),
        },
        capacity: sealed.map_or(Capacity(None), |found| found.capacity),
        key: match key {
            None => KeyFact::Missing,
            Some(found) if found.unique => KeyFact::Unique,
            Some(_) => KeyFact::NotUnique,
        },
        row: match row {
            None => RowFact::Unbound,
            Some(None) => RowFact::Missing,
            Some(Some(found)) if bindable(&found.form) => RowFact::Bindable(found.declared.clone()),
            Some(Some(found)) => RowFact::NotBindable(found.declared.clone()),
        },
        owner: column.table().to_owned(),
        key_name: column.key().to_owned(),
        row_name: column.row().map(str::to_owned),
        not_for_text: match (says, sealed.map(|found| &found.form)) {
            (Sql::Postgres, Some(Form::Text(_))) | (_, None) => None,
            (Sql::Postgres, _) => Some("text"),
            (_, Some(Form::Text(_) | Form::Bytes)) => None,
            _ => Some("mediumtext CHARACTER SET utf8mb4"),
        },
        not_a_key: key.filter(|found| found.form == Form::Other).map(|found| found.declared.clone()),
        integers: row.flatten().is_some_and(|found| matches!(found.form, Form::Integer | Form::Unsigned)),
        changes: "which fills up, rounds or rewrites".to_owned(),
        on_server: true,
    };
    (column, facts)
}

fn unique(connection: &mut AnyConnection, table: &str, key: &Declared, columns: &[Declared]) -> Result<bool, Error> {
    if key.pk > 0 && columns.iter().filter(|column| column.pk > 0).count() == 1 {
        return Ok(true);
    }
    // An index of one column, over all rows, that admits each value once. Whatever its collation, keys that are the
    // same byte for byte are the same to it, and keys are never compared otherwise (`sql::exactly`).
    let indexes: Vec<Indexed> = Query::new("SELECT MIN(c.name) AS name FROM pragma_index_list(")
        .text(table)
        .sql(
            ", 'main') AS i JOIN pragma_index_xinfo(i.name, 'main') AS c WHERE i.\"unique\" = 1 \
             AND i.partial = 0 AND c.key = 1 GROUP BY i.name HAVING COUNT(*) = 1 AND MIN(c.name) IS NOT NULL",
        )
        .load(connection)?;
    Ok(indexes.iter().any(|index| index.name == key.name))
}

#[derive(QueryableByName)]
struct Kind {
    #[diesel(sql_type = Text)]
    name: String,
    #[diesel(sql_type = Text)]
    kind: String,
}

#[derive(QueryableByName)]
struct Declared {
    #[diesel(sql_type = Text)]
    name: String,
    #[diesel(sql_type = Text)]
    declared: String,
    #[diesel(sql_type = BigInt)]
    hidden: i64,
    #[diesel(sql_type = BigInt)]
    pk: i64,
}

#[derive(QueryableByName)]
struct Indexed {
    #[diesel(sql_type = Text)]
    name: String,
}

const LENGTH_COUNTS: [&str; 16] = [
    "char",
    "character",
    "nchar",
    "bpchar",
    "varchar",
    "nvarchar",
    "varchar2",
    "nvarchar2",
    "char varying",
    "character varying",
    "varying character",
    "native character",
    "national character",
    "national character varying",
    "binary",
    "varbinary",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_declared_type_says_how_much_it_holds() {
        for (declared, capacity) in [
            ("char(36)", Some(36)),
            ("VARCHAR(255)", Some(255)),
            ("nvarchar ( 40 )", Some(40)),
            ("character  varying(12)", Some(12)),
            ("VARCHAR2(10 CHAR)", Some(10)),
            ("varbinary(64)", Some(64)),
            ("TinyText", Some(255)),
            ("tinyblob", Some(255)),
            ("mediumtext", Some(16_777_215)),
            ("MEDIUMBLOB", Some(16_777_215)),
            ("longtext", Some(4_294_967_295)),
            ("longblob", Some(4_294_967_295)),
            ("text", None),
            ("blob", None),
            ("varchar", None),
            ("decimal(10,6)", None),
            ("varchar(999999999999999999999999)", None),
            ("", None),
        ] {
            assert_eq!(declared_capacity(declared), Capacity(capacity), "{declared}");
        }
    }

    #[test]
    fn a_declared_type_has_the_affinity_that_sqlite_gives_it() {
        use Affinity::{Blob, Integer, Numeric, Real, Text};
        let connection = SqliteConnection::establish(":memory:").expect("memory");
        let mut connection = AnyConnection::Sqlite(Box::new(connection));
        for (declared, affinity) in [
            ("INT", Integer),
            ("bigint unsigned", Integer),
            ("CHARINT", Integer),
            ("FLOATING POINT", Integer),
            ("interval", Integer),
            ("varchar(36)", Text),
            ("char(32)", Text),
            ("clob", Text),
            ("TinyText", Text),
            ("", Blob),
            ("LongBlob", Blob),
            ("real", Real),
            ("double precision", Real),
            ("FLOAT", Real),
            ("numeric(10,2)", Numeric),
            ("decimal", Numeric),
            ("STRING", Numeric),
            ("uuid", Numeric),
            ("boolean", Numeric),
            ("date", Numeric),
            ("datetime", Numeric),
            ("TIMESTAMP", Numeric),
            ("binary(16)", Numeric),
            ("varbinary(16)", Numeric),
            ("bytea", Numeric),
            ("json", Numeric),
            ("any", Numeric),
        ] {
            assert_eq!(Affinity::of(declared), affinity, "{declared}");
            // And SQLite itself, by what it casts a text to.
            let kinds: Vec<Kind> = Query::new(format!("SELECT '' AS name, typeof(CAST('1.5' AS {declared})) AS kind"))
                .load(&mut connection)
                .unwrap_or_default();
            if declared.is_empty() {
                continue; // no CAST to no type
            }
            let kind = match affinity {
                Integer => "integer",
                Text => "text",
                Blob => "blob",
                Real | Numeric => "real",
            };
            assert_eq!(kinds.first().map(|found| found.kind.as_str()), Some(kind), "{declared}");
        }
    }

    #[test]
    fn values_are_bound_to_what_is_stored_as_it_was_given() {
        for declared in ["int", "INTEGER", "varchar(36)", "text", "char(32)", ""] {
            assert!(bindable(declared), "{declared}");
        }
        for declared in ["uuid", "STRING", "boolean", "decimal(10,6)", "date", "real", "double", "blob", "binary(16)"] {
            assert!(!bindable(declared), "{declared}");
        }
    }
}
