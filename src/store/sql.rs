//! The SQL that differs between databases, in one place: names, types, and each one's ways to say things.

use crate::envelope::Marker;
use crate::provider::KeyId;

/// A database's way to say things.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[cfg_attr(not(all(feature = "sqlite", feature = "postgres", feature = "mariadb")), allow(dead_code))]
pub(super) enum Sql {
    Sqlite,
    Postgres,
    Mariadb,
}

/// How a stored text is looked at: databases keep texts and bytes apart, and each wants to be asked in its own way.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Kept {
    /// As text, or as SQLite has it.
    Text,
    /// As bytes (`bytea`, `BLOB`).
    Bytes,
}

impl Sql {
    /// Whether a server keeps the database, and several connections may write at once.
    pub(super) fn is_server(self) -> bool {
        self != Self::Sqlite
    }

    /// An identifier, quoted: the only place where names become SQL.
    pub(super) fn quote(self, name: &str) -> String {
        match self {
            Self::Sqlite | Self::Postgres => format!("\"{}\"", name.replace('"', "\"\"")),
            Self::Mariadb => format!("`{}`", name.replace('`', "``")),
        }
    }

    /// A column of the table called `t`. Always with the table's name before it: SQLite takes a quoted name alone that is
    /// no column for a string.
    pub(super) fn of_t(self, name: &str) -> String {
        format!("t.{}", self.quote(name))
    }

    /// A table by the name that the register gives it, quoted. In SQLite `main.` is the one schema, in any case; in
    /// PostgreSQL what stands before the first dot is the schema.
    pub(super) fn name(self, table: &str) -> String {
        match (self, table.split_once('.')) {
            (Self::Sqlite, _) => format!("main.{}", self.quote(bare(table))),
            (Self::Postgres, Some((schema, table))) => format!("{}.{}", self.quote(schema), self.quote(table)),
            _ => self.quote(table),
        }
    }

    /// The same, called `t`.
    pub(super) fn table(self, name: &str) -> String {
        format!("{} AS t", self.name(name))
    }

    /// Whether two names are those of one table.
    pub(super) fn same_table(self, one: &str, other: &str) -> bool {
        match self {
            Self::Sqlite => bare(one).eq_ignore_ascii_case(bare(other)),
            Self::Postgres | Self::Mariadb => one == other,
        }
    }

    /// Whether two names are those of one column of a table.
    pub(super) fn same_column(self, one: &str, other: &str) -> bool {
        match self {
            Self::Sqlite | Self::Mariadb => one.eq_ignore_ascii_case(other),
            Self::Postgres => one == other,
        }
    }

    /// A text, compared byte for byte whatever its collation.
    pub(super) fn exactly(self, expression: &str) -> String {
        match self {
            Self::Sqlite => format!("{expression} COLLATE BINARY"),
            Self::Postgres => format!("({expression})::text COLLATE \"C\""),
            Self::Mariadb => format!("CAST({expression} AS BINARY)"),
        }
    }

    /// The condition, up to a bind of a text, that a text column is that text byte for byte; the first part finds it by
    /// an index.
    pub(super) fn is_text<'a>(
        self,
        query: super::query::Query<'a>,
        column: &str,
        text: &'a str,
    ) -> super::query::Query<'a> {
        match self {
            Self::Sqlite => query.sql(&format!("{} = ", self.exactly(column))).text(text),
            Self::Postgres | Self::Mariadb => query
                .sql(&format!("({column} = "))
                .text(text)
                .sql(&format!(" AND {} = ", self.exactly(column)))
                .text(text)
                .sql(")"),
        }
    }

    /// The bytes of a stored text, whatever it is stored as.
    pub(super) fn as_bytes(self, expression: &str) -> String {
        match self {
            Self::Sqlite => format!("CAST({expression} AS BLOB)"),
            Self::Postgres => format!("convert_to(({expression})::text, 'UTF8')"),
            Self::Mariadb => format!("CAST({expression} AS BINARY)"),
        }
    }

    /// How many bytes a stored text has.
    pub(super) fn length(self, expression: &str) -> String {
        match self {
            Self::Sqlite => format!("length({})", self.as_bytes(expression)),
            Self::Postgres => format!("octet_length(({expression})::text)::int8"),
            Self::Mariadb => format!("OCTET_LENGTH({expression})"),
        }
    }

    /// A number of 64 bits.
    pub(super) fn integer(self, expression: &str) -> String {
        match self {
            Self::Sqlite => format!("CAST({expression} AS INTEGER)"),
            Self::Postgres => format!("CAST({expression} AS int8)"),
            Self::Mariadb => format!("CAST({expression} AS SIGNED)"),
        }
    }

    /// 1 where the condition holds, else 0.
    pub(super) fn truth(self, condition: &str) -> String {
        self.integer(&format!("CASE WHEN {condition} THEN 1 ELSE 0 END"))
    }

    /// NULL of a type: what is selected must have one.
    pub(super) fn null_bytes(self) -> &'static str {
        match self {
            Self::Sqlite => "NULL",
            Self::Postgres => "NULL::bytea",
            Self::Mariadb => "CAST(NULL AS BINARY)",
        }
    }

    /// The condition, to be followed by a bind, that two values are the same, NULL included.
    pub(super) fn same(self) -> &'static str {
        match self {
            Self::Sqlite => " IS ",
            Self::Postgres => " IS NOT DISTINCT FROM ",
            Self::Mariadb => " <=> ",
        }
    }

    /// The condition that a stored text begins with `plain`, which needs no quoting.
    pub(super) fn starts(self, expression: &str, plain: &str) -> String {
        match self {
            Self::Sqlite => format!("CAST({expression} AS TEXT) GLOB '{plain}*'"),
            Self::Postgres => format!("left({}, {}) = '{plain}'", self.exactly(expression), plain.len()),
            Self::Mariadb => format!("CAST(LEFT({expression}, {}) AS BINARY) = '{plain}'", plain.len()),
        }
    }

    /// The condition that a stored text is one of ours with a well-formed key id.
    pub(super) fn names_a_key(self, expression: &str) -> String {
        match self {
            Self::Sqlite => {
                format!("CAST({expression} AS TEXT) GLOB '{}{}:*'", Marker::HW1, "[0-9a-f]".repeat(16))
            }
            Self::Postgres => format!("left({}, 21) ~ '^{}[0-9a-f]{{16}}:'", self.exactly(expression), Marker::HW1),
            Self::Mariadb => format!("CAST(LEFT({expression}, 21) AS BINARY) REGEXP '^{}[0-9a-f]{{16}}:'", Marker::HW1),
        }
    }

    /// The condition that a stored text is one of ours under `kid`.
    pub(super) fn names(self, expression: &str, kid: KeyId) -> String {
        self.starts(expression, &format!("{}{kid}:", Marker::HW1))
    }

    /// Where the first dot of a stored text is, from 1; 0 where there is none in as many characters as a short front has.
    pub(super) fn dot(self, expression: &str) -> String {
        match self {
            Self::Sqlite => format!("instr({}, x'2e')", self.as_bytes(expression)),
            Self::Postgres => format!("strpos(left({}, {HEAD}), '.')", self.exactly(expression)),
            Self::Mariadb => format!("LOCATE('.', CAST(LEFT({expression}, {HEAD}) AS BINARY))"),
        }
    }

    /// The first `length` bytes of a text that is ASCII there.
    pub(super) fn head(self, expression: &str, length: &str) -> String {
        match self {
            Self::Sqlite => format!("substr({}, 1, {length})", self.as_bytes(expression)),
            Self::Postgres => format!("convert_to(left(({expression})::text, {length}), 'UTF8')"),
            Self::Mariadb => format!("CAST(LEFT({expression}, {length}) AS BINARY)"),
        }
    }

    /// The condition that a text is an envelope, ours or the ancestor's, or holds one of ours.
    ///
    /// Headers are JSON objects in base64, so they begin with `eyJ`, and ours with `eyJhbGciOi` (`{"alg":`).
    pub(super) fn holds_envelope(self, expression: &str, kept: Kept) -> String {
        let foreign = Marker::FOREIGN.map(|marker| format!("{marker}eyJ"));
        if self == Self::Sqlite {
            let text = format!("CAST({expression} AS TEXT)");
            let starts = |pattern: String| format!("{text} GLOB '{pattern}'");
            let patterns = [
                format!("*{}{}:eyJhbGciOi*", Marker::HW1, "[0-9a-f]".repeat(16)),
                format!("hw[0-9]:{}:eyJ*", "[0-9a-f]".repeat(16)),
                format!("hw[0-9][0-9]:{}:eyJ*", "[0-9a-f]".repeat(16)),
            ];
            let foreign = foreign.map(|start| format!("{start}*"));
            let any = patterns.into_iter().chain(foreign).map(starts).collect::<Vec<_>>().join(" OR ");
            return format!("({} OR {any})", self.names_a_key(expression));
        }
        let inside = format!("{}[0-9a-f]{{16}}:eyJhbGciOi", Marker::HW1);
        let [nrv1, v2] = foreign;
        let begins = format!("^({}[0-9a-f]{{16}}:|hw[0-9][0-9]?:[0-9a-f]{{16}}:eyJ|{nrv1}|{v2})", Marker::HW1);
        match self {
            Self::Postgres => {
                let text = self.searched(expression, kept);
                format!(
                    "(left({text}, 32) ~ '{begins}' OR strpos({text}, '{}') > 0 AND {text} ~ '{inside}')",
                    Marker::HW1
                )
            }
            _ => {
                let text = self.searched(expression, kept);
                format!(
                    "(LEFT({text}, 32) REGEXP '{begins}' OR LOCATE('{}', {text}) > 0 AND {text} REGEXP '{inside}')",
                    Marker::HW1
                )
            }
        }
    }

    /// What is searched of a column of any type.
    fn searched(self, expression: &str, kept: Kept) -> String {
        match (self, kept) {
            (Self::Sqlite, _) => format!("CAST({expression} AS TEXT)"),
            // Every byte that is ASCII and printable stays itself.
            (Self::Postgres, Kept::Bytes) => format!("encode({expression}, 'escape') COLLATE \"C\""),
            (Self::Postgres, Kept::Text) => self.exactly(expression),
            (Self::Mariadb, Kept::Bytes) => format!("CAST({expression} AS BINARY)"),
            (Self::Mariadb, Kept::Text) => format!("CAST(CONVERT({expression} USING utf8mb4) AS BINARY)"),
        }
    }

    /// The condition that a value of any column names `kid`.
    pub(super) fn names_anywhere(self, expression: &str, kept: Kept, kid: KeyId) -> String {
        let start = format!("{}{kid}:", Marker::HW1);
        match self {
            Self::Sqlite => self.names(expression, kid),
            Self::Postgres => format!("left({}, {}) = '{start}'", self.searched(expression, kept), start.len()),
            Self::Mariadb => format!("LEFT({}, {}) = '{start}'", self.searched(expression, kept), start.len()),
        }
    }

    /// What [`Marker::of`] says of a stored text, and the key id of well-formed ones, as SQL: `null`, `empty`, 16 hex
    /// digits, `damaged`, `foreign`, `other_version` or `cleartext`.
    ///
    /// SQLite's GLOB sees a text up to its first NUL. No marker holds one, so a text cut there matches no other pattern;
    /// only the digits of another version need their lengths compared as well, for `hw2` NUL `:` is no marker.
    pub(super) fn kind_of(self, expression: &str) -> String {
        let (key, ours) = (self.names_a_key(expression), self.starts(expression, Marker::HW1));
        let foreign = Marker::FOREIGN.map(|marker| self.starts(expression, marker)).join(" OR ");
        let (empty, kid, other) = match self {
            Self::Sqlite => {
                let (text, bytes) = (format!("CAST({expression} AS TEXT)"), self.as_bytes(expression));
                let version = format!("substr({bytes}, 3, instr({bytes}, x'3a') - 3)");
                (
                    format!("length({bytes}) = 0"),
                    format!("substr({text}, 5, 16)"),
                    format!(
                        "{text} GLOB 'hw[0-9]*' AND instr({bytes}, x'3a') > 3 \
                         AND CAST({version} AS TEXT) NOT GLOB '*[^0-9]*' \
                         AND length(CAST({version} AS TEXT)) = length({version})"
                    ),
                )
            }
            Self::Postgres => {
                let text = self.exactly(expression);
                (
                    format!("{text} = ''"),
                    format!("substr({text}, 5, 16)"),
                    format!("left({text}, 2) = 'hw' AND {text} ~ '^hw[0-9]+:'"),
                )
            }
            Self::Mariadb => (
                format!("OCTET_LENGTH({expression}) = 0"),
                format!("CONVERT(SUBSTR({expression}, 5, 16) USING utf8mb4)"),
                format!(
                    "CAST(LEFT({expression}, 2) AS BINARY) = 'hw' AND CAST({expression} AS BINARY) REGEXP '^hw[0-9]+:'"
                ),
            ),
        };
        format!(
            "CASE WHEN {expression} IS NULL THEN 'null' WHEN {empty} THEN 'empty' WHEN {key} THEN {kid} \
             WHEN {ours} THEN 'damaged' WHEN {foreign} THEN 'foreign' WHEN {other} THEN 'other_version' \
             ELSE 'cleartext' END"
        )
    }

    /// Rows in no order.
    pub(super) fn random(self) -> &'static str {
        match self {
            Self::Sqlite | Self::Postgres => "random()",
            Self::Mariadb => "RAND()",
        }
    }
}

/// The name of a table of SQLite without its schema.
pub(super) fn bare(table: &str) -> &str {
    match table.split_at_checked("main.".len()) {
        Some((schema, name)) if schema.eq_ignore_ascii_case("main.") => name,
        _ => table,
    }
}

/// A table of SQLite's schema as the register names it, so that [`bare`] gives its name again.
pub(super) fn registrable(name: &str) -> String {
    if bare(name) == name { name.to_owned() } else { format!("main.{name}") }
}

/// Most fronts and their dots are within this. Bytes.
pub(super) const HEAD: usize = 320;

/// What every SQLite connection is told first: the wait for locks, in milliseconds, before anything can need one.
pub(super) const BUSY: &str = "PRAGMA busy_timeout = 10000";

/// What every SQLite connection is told. Deleted content is overwritten, commits reach the disk, references hold, and
/// what is sorted or set aside never becomes a file in the directory for temporary ones.
pub(super) const SETTINGS: &str = "PRAGMA secure_delete = ON; PRAGMA synchronous = FULL; PRAGMA foreign_keys = ON; \
    PRAGMA temp_store = MEMORY;";

/// A write transaction of SQLite takes its lock at the start, so that it waits there and never fails half-way.
pub(super) const BEGIN: &str = "BEGIN IMMEDIATE";

/// A statement that takes SQLite's write lock, changes nothing and fails where nothing can be written, which a BEGIN does
/// not: SQLite then only reads. It frees one page of a database that is vacuumed page by page, and none of others.
pub(super) const TRY_WRITING: &str = "PRAGMA incremental_vacuum(1)";
