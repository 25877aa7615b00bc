//! The register against the schema: what of each registered column is there, and how much it holds.

use diesel::prelude::*;
use diesel::sql_types::{BigInt, Text};

use super::sql::{self, Query};
use super::{Db, Error};
use crate::column::{Capacity, Column, Register};

impl Db {
    /// Looks up every registered column in the schema, and sets the capacity that its declared type gives it in the
    /// register: also where this database would not mind a longer text, because others will. A smaller capacity that
    /// is set already stays.
    ///
    /// What is missing is a fact, not an error: [`ColumnFacts::usable`] makes it one.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    pub fn describe(&self, register: &mut Register) -> Result<Vec<ColumnFacts>, Error> {
        register
            .columns_mut()
            .iter_mut()
            .map(|column| {
                let facts = self.read_with(|connection| facts(connection, column))?;
                let limits = [column.capacity().0, facts.capacity.0];
                *column = column.clone().holding(Capacity(limits.into_iter().flatten().min()));
                Ok(facts)
            })
            .collect()
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
        }
        match self.column {
            ColumnFact::Declared(_) => {}
            ColumnFact::Missing => return Err(Error::NoColumn(self.name.clone())),
            ColumnFact::Generated(_) => return Err(Error::Generated(self.name.clone())),
        }
        match self.key {
            KeyFact::Unique => {}
            KeyFact::Missing => return Err(Error::NoColumn(within(&self.key_name))),
            KeyFact::NotUnique => return Err(Error::KeyNotUnique(within(&self.key_name))),
        }
        match &self.row {
            RowFact::Unbound | RowFact::Bindable(_) => Ok(()),
            RowFact::Missing => Err(Error::NoColumn(row())),
            RowFact::NotBindable(declared) => Err(Error::NotBindable { column: row(), declared: declared.clone() }),
        }
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

/// Whether a type has one text for each value. A column without a type may hold anything: its rows are looked at one
/// by one.
fn bindable(declared: &str) -> bool {
    let (name, _) = split(declared);
    !NOT_BINDABLE.iter().any(|word| name.split(' ').any(|part| part.starts_with(word)))
        && !name.ends_with("blob")
        && !name.contains("binary")
}

/// The name of a type in lower case with single blanks, and the number in its parentheses.
fn split(declared: &str) -> (String, Option<u64>) {
    let (name, rest) = declared.split_once('(').unwrap_or((declared, ""));
    let name = name.split_whitespace().collect::<Vec<_>>().join(" ").to_ascii_lowercase();
    let digits: String = rest.trim_start().chars().take_while(char::is_ascii_digit).collect();
    (name, digits.parse().ok())
}

fn facts(connection: &mut SqliteConnection, column: &Column) -> Result<ColumnFacts, Error> {
    let table = sql::bare(column.table());
    let kinds: Vec<Kind> =
        Query::new("SELECT type AS kind FROM pragma_table_list WHERE schema = 'main' AND name COLLATE NOCASE = ")
            .text(table)
            .load(connection)?;
    let columns: Vec<Declared> = Query::new("SELECT name, type AS declared, hidden, pk FROM pragma_table_xinfo(")
        .text(table)
        .sql(", 'main')")
        .load(connection)?;
    let find = |name: &str| columns.iter().find(|found| found.name.eq_ignore_ascii_case(name));

    let sealed = find(column.name());
    let key = match find(column.key()) {
        None => KeyFact::Missing,
        Some(found) if unique(connection, table, found, &columns)? => KeyFact::Unique,
        Some(_) => KeyFact::NotUnique,
    };
    Ok(ColumnFacts {
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
    })
}

fn unique(connection: &mut SqliteConnection, table: &str, key: &Declared, columns: &[Declared]) -> Result<bool, Error> {
    if key.pk > 0 && columns.iter().filter(|column| column.pk > 0).count() == 1 {
        return Ok(true);
    }
    // An index of one column, over all rows, that admits each value once.
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

/// Types whose values have several texts, or none: floating-point and decimal numbers, bytes, times, bits.
const NOT_BINDABLE: [&str; 16] = [
    "real", "double", "float", "numeric", "decimal", "dec", "fixed", "number", "money", "bytea", "date", "time",
    "year", "interval", "bit", "json",
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
    fn values_are_bound_to_integers_and_texts_only() {
        for declared in ["int", "INTEGER", "bigint unsigned", "varchar(36)", "text", "uuid", "char(32)", ""] {
            assert!(bindable(declared), "{declared}");
        }
        for declared in [
            "real",
            "double precision",
            "FLOAT",
            "numeric(10,2)",
            "decimal",
            "blob",
            "LongBlob",
            "varbinary(16)",
            "bytea",
            "date",
            "datetime",
            "TIMESTAMP",
            "timestamptz",
            "time",
            "binary(16)",
        ] {
            assert!(!bindable(declared), "{declared}");
        }
    }
}
