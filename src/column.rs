//! Sealed columns: the one register that sealing, counting, verifying and rotating read, and the context that binds
//! each value to its column and row.

use std::borrow::Cow;
use std::fmt;
use std::mem;

use crate::provider::Aad;

/// What a value is bound to, byte for byte as [`crate::envelope`] describes it. Only [`Column::at`] makes one.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Context(Vec<u8>);

impl Context {
    fn new(identifier: &str, row: Option<&Row>) -> Self {
        let mut bytes = Vec::with_capacity(64 + identifier.len());
        bytes.extend_from_slice(b"hw1\0A256GCM\0");
        push_with_length(&mut bytes, identifier);
        bytes.push(u8::from(row.is_some()));
        if let Some(Row(row)) = row {
            push_with_length(&mut bytes, row);
        }
        Self(bytes)
    }

    /// The bytes: the AAD of the value's AES-256-GCM.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// What the DEK is bound to: `"hw1-dek" 00` and this context.
    pub fn aad(&self) -> Aad {
        Aad::new([b"hw1-dek\0".as_slice(), &self.0].concat())
    }
}

/// The value of a row's row column, as text: integers decimal, UUIDs lower-case with hyphens, text exactly as stored.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct Row(String);

impl Row {
    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for Row {
    type Error = NotARow;

    fn try_from(text: String) -> Result<Self, NotARow> {
        if text.is_empty() || text.len() > LONGEST_NAME {
            return Err(NotARow);
        }
        Ok(Self(text))
    }
}

impl TryFrom<&str> for Row {
    type Error = NotARow;

    fn try_from(text: &str) -> Result<Self, NotARow> {
        text.to_owned().try_into()
    }
}

impl From<i64> for Row {
    fn from(number: i64) -> Self {
        Self(number.to_string())
    }
}

/// What can name the row of a value: a number, a text, a UUID, or `()` for a column that is not bound to rows.
pub trait ToRow {
    /// The row, or none.
    ///
    /// # Errors
    /// [`NotARow`].
    fn to_row(&self) -> Result<Option<Row>, NotARow>;
}

impl ToRow for () {
    fn to_row(&self) -> Result<Option<Row>, NotARow> {
        Ok(None)
    }
}

impl ToRow for Row {
    fn to_row(&self) -> Result<Option<Row>, NotARow> {
        Ok(Some(self.clone()))
    }
}

impl ToRow for i64 {
    fn to_row(&self) -> Result<Option<Row>, NotARow> {
        Ok(Some(Row::from(*self)))
    }
}

impl ToRow for i32 {
    fn to_row(&self) -> Result<Option<Row>, NotARow> {
        i64::from(*self).to_row()
    }
}

impl ToRow for str {
    fn to_row(&self) -> Result<Option<Row>, NotARow> {
        Row::try_from(self).map(Some)
    }
}

impl ToRow for String {
    fn to_row(&self) -> Result<Option<Row>, NotARow> {
        self.as_str().to_row()
    }
}

/// Lower-case with hyphens.
impl ToRow for uuid::Uuid {
    fn to_row(&self) -> Result<Option<Row>, NotARow> {
        Row::try_from(self.hyphenated().to_string()).map(Some)
    }
}

impl<T: ToRow> ToRow for Option<T> {
    fn to_row(&self) -> Result<Option<Row>, NotARow> {
        self.as_ref().map_or(Ok(None), ToRow::to_row)
    }
}

impl<T: ToRow + ?Sized> ToRow for &T {
    fn to_row(&self) -> Result<Option<Row>, NotARow> {
        (**self).to_row()
    }
}

/// A text cannot name a row.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("a row value is never empty and at most 65535 bytes long")]
pub struct NotARow;

/// What a column does with a value that carries no marker.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Cleartext {
    /// It is an error.
    #[default]
    Refuse,
    /// It is returned as it is: the upgrade path, an open window.
    Accept,
}

/// How long a stored text may be, in bytes; sealed values are ASCII, so characters count the same.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Capacity(pub Option<u64>);

impl Capacity {
    /// Whether a text of `length` bytes fits.
    pub fn holds(self, length: u64) -> bool {
        self.0.is_none_or(|limit| length <= limit)
    }
}

impl fmt::Display for Capacity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(limit) => write!(f, "{limit} bytes"),
            None => f.write_str("unlimited"),
        }
    }
}

/// A type that stands for one sealed column, of size zero: what [`crate::store::Sealed`] carries its column by. It is
/// `pub` where `diesel::table!` names it: what that makes is `pub`, and may not show a private type (E0446).
///
/// ```
/// use hardwrap::column::{Column, SealedColumn};
///
/// #[derive(Debug)]
/// pub struct Iban;
///
/// impl SealedColumn for Iban {
///     const COLUMN: Column = Column::constant("customer", "iban", "id", "shop:customer:iban").in_row("id");
/// }
/// ```
pub trait SealedColumn: 'static {
    /// The column, as the register of the application holds it.
    const COLUMN: Column;
}

/// One sealed column of the register.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Column {
    table: Cow<'static, str>,
    name: Cow<'static, str>,
    key: Cow<'static, str>,
    identifier: Cow<'static, str>,
    row: Option<Cow<'static, str>>,
    cleartext: Cleartext,
    capacity: Capacity,
    /// `TABLE.COLUMN` as it was registered, where the schema spells it differently.
    registered: Option<String>,
}

impl Column {
    /// Registers `name` of `table`, whose rows are found by the column `key`, under an identifier that no other column
    /// has and that never changes. Not bound to rows, refuses cleartext, no limit of length.
    ///
    /// # Errors
    /// [`Invalid`] names what is wrong.
    pub fn new(
        table: impl Into<Cow<'static, str>>,
        name: impl Into<Cow<'static, str>>,
        key: impl Into<Cow<'static, str>>,
        identifier: impl Into<Cow<'static, str>>,
    ) -> Result<Self, Invalid> {
        let column = Self {
            table: table.into(),
            name: name.into(),
            key: key.into(),
            identifier: identifier.into(),
            row: None,
            cleartext: Cleartext::Refuse,
            capacity: Capacity(None),
            registered: None,
        };
        for (what, text) in [
            ("table", &column.table),
            ("column", &column.name),
            ("key", &column.key),
            ("identifier", &column.identifier),
        ] {
            well_named(what, text)?;
        }
        Ok(column)
    }

    /// [`Column::new`] for a constant: what would be an error there stops the compiler here.
    ///
    /// ```
    /// use hardwrap::column::Column;
    ///
    /// const IBAN: Column = Column::constant("customer", "iban", "id", "shop:customer:iban").in_row("id");
    /// assert_eq!(IBAN.row(), Some("id"));
    /// ```
    ///
    /// ```compile_fail,E0080
    /// use hardwrap::column::Column;
    ///
    /// const IBAN: Column = Column::constant("customer", "", "id", "shop:customer:iban").in_row("id");
    /// assert_eq!(IBAN.row(), Some("id"));
    /// ```
    ///
    /// # Panics
    /// If a name is empty, longer than 65535 bytes, or holds NUL.
    pub const fn constant(
        table: &'static str,
        name: &'static str,
        key: &'static str,
        identifier: &'static str,
    ) -> Self {
        Self {
            table: well_named_constant(table),
            name: well_named_constant(name),
            key: well_named_constant(key),
            identifier: well_named_constant(identifier),
            row: None,
            cleartext: Cleartext::Refuse,
            capacity: Capacity(None),
            registered: None,
        }
    }

    /// [`Column::bound_to`] for a constant.
    ///
    /// # Panics
    /// If the name is empty, longer than 65535 bytes, or holds NUL; if the column is bound to rows already.
    #[must_use]
    pub const fn in_row(mut self, row: &'static str) -> Self {
        assert!(self.row.is_none(), "a column is bound to one row column");
        // an assignment would drop what was there, which no constant can
        mem::forget(self.row.replace(well_named_constant(row)));
        self
    }

    /// Binds each value to its row, by the text of the column `row`.
    ///
    /// # Errors
    /// [`Invalid`] if the name is empty, too long or holds NUL.
    pub fn bound_to(mut self, row: impl Into<Cow<'static, str>>) -> Result<Self, Invalid> {
        let row = row.into();
        well_named("row", &row)?;
        self.row = Some(row);
        Ok(self)
    }

    /// Sets what happens to a value without a marker.
    #[must_use]
    pub const fn cleartext(mut self, policy: Cleartext) -> Self {
        self.cleartext = policy;
        self
    }

    /// Sets how long a stored text may be.
    #[must_use]
    pub const fn holding(mut self, capacity: Capacity) -> Self {
        self.capacity = capacity;
        self
    }

    /// The same column with its names as the schema spells them. What it is called in contexts stays, and
    /// [`Register::find`] still knows it by the name it was registered under.
    #[must_use]
    pub(crate) fn spelt(&self, table: String, name: String, key: String, row: Option<String>) -> Self {
        let registered = self.registered();
        let mut column = self.clone();
        column.table = table.into();
        column.name = name.into();
        column.key = key.into();
        column.row = row.map(Cow::from);
        column.registered = (column.to_string() != registered).then_some(registered);
        column
    }

    /// Whether `name` is `TABLE.COLUMN`.
    fn is_written(&self, name: &str) -> bool {
        let rest = name.strip_prefix(&*self.table).and_then(|rest| rest.strip_prefix('.'));
        rest == Some(&self.name)
    }

    /// `TABLE.COLUMN` as it was registered.
    pub(crate) fn registered(&self) -> String {
        self.registered.clone().unwrap_or_else(|| self.to_string())
    }

    /// The table, schema-qualified where needed.
    pub fn table(&self) -> &str {
        &self.table
    }

    /// The column's own name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The column by whose value a row is found.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// What the column is called in every context: never changes.
    pub fn identifier(&self) -> &str {
        &self.identifier
    }

    /// The column whose value each value is bound to.
    pub fn row(&self) -> Option<&str> {
        self.row.as_deref()
    }

    /// What happens to a value without a marker.
    pub fn policy(&self) -> Cleartext {
        self.cleartext
    }

    /// How long a stored text may be.
    pub fn capacity(&self) -> Capacity {
        self.capacity
    }

    /// The place of one value in this column: what it will be, or was, bound to.
    ///
    /// # Errors
    /// [`Misplaced`] if the column is bound to rows and none is given, or the other way round.
    pub fn at(&self, row: Option<&Row>) -> Result<Place<'_>, Misplaced> {
        match (self.row.as_deref(), row) {
            (Some(name), None) => Err(Misplaced::RowMissing(self.to_string(), name.to_owned())),
            (None, Some(_)) => Err(Misplaced::RowGiven(self.to_string())),
            _ => Ok(Place { column: self, context: Context::new(&self.identifier, row) }),
        }
    }
}

/// `TABLE.COLUMN`, as the command line names it.
impl fmt::Display for Column {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.table, self.name)
    }
}

/// One place a value can stand in: a column, and its row where the column is bound to rows.
#[derive(Clone, Debug)]
pub struct Place<'a> {
    column: &'a Column,
    context: Context,
}

impl Place<'_> {
    /// The column.
    pub fn column(&self) -> &Column {
        self.column
    }

    /// What values here are bound to.
    pub fn context(&self) -> &Context {
        &self.context
    }
}

/// A place was named wrongly.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum Misplaced {
    /// A column bound to rows needs one.
    #[error("column {0} is bound to rows: give the value of its row column {1}")]
    RowMissing(String, String),
    /// A column not bound to rows takes none.
    #[error("column {0} is not bound to rows: give no row")]
    RowGiven(String),
}

/// The register: every sealed column, each named once.
#[derive(Clone, Debug, Default)]
pub struct Register(Vec<Column>);

impl Register {
    /// Takes the columns in the order given.
    ///
    /// # Errors
    /// [`Invalid`] if two are written alike, as the table `a.b` with `c` and the table `a` with `b.c` are, or have one
    /// identifier.
    pub fn new(columns: Vec<Column>) -> Result<Self, Invalid> {
        for (index, column) in columns.iter().enumerate() {
            for earlier in columns.iter().take(index) {
                if earlier.to_string() == column.to_string() {
                    return Err(Invalid::Twice("column", column.to_string()));
                }
                if earlier.identifier == column.identifier {
                    return Err(Invalid::Twice("identifier", column.identifier.to_string()));
                }
            }
        }
        Ok(Self(columns))
    }

    /// The column written `TABLE.COLUMN`, as the schema spells it or as it was registered.
    ///
    /// # Errors
    /// [`Unknown`] if it is not registered: what is not registered cannot be sealed.
    pub fn find(&self, name: &str) -> Result<&Column, Unknown> {
        let spelt = self.0.iter().find(|column| column.is_written(name));
        spelt
            .or_else(|| self.0.iter().find(|column| column.registered.as_deref() == Some(name)))
            .ok_or_else(|| Unknown(name.to_owned()))
    }

    /// All columns.
    pub fn columns(&self) -> &[Column] {
        &self.0
    }

    /// All columns, for the store to fill in what the schema says.
    pub fn columns_mut(&mut self) -> &mut [Column] {
        &mut self.0
    }
}

/// What can name a column of a [`Register`]: the text `TABLE.COLUMN`, or a [`Column`] of the application's own.
pub trait Named {
    /// The column as it is registered.
    ///
    /// # Errors
    /// [`Unknown`] if it is not, or is registered under another identifier or bound otherwise.
    fn find_in<'a>(&self, register: &'a Register) -> Result<&'a Column, Unknown>;
}

impl Named for str {
    fn find_in<'a>(&self, register: &'a Register) -> Result<&'a Column, Unknown> {
        register.find(self)
    }
}

impl Named for String {
    fn find_in<'a>(&self, register: &'a Register) -> Result<&'a Column, Unknown> {
        register.find(self)
    }
}

impl Named for Column {
    fn find_in<'a>(&self, register: &'a Register) -> Result<&'a Column, Unknown> {
        let same = |column: &&Column| {
            let registered = column.registered.as_ref().map_or_else(
                || column.table == self.table && column.name == self.name,
                |registered| self.is_written(registered),
            );
            // The schema may spell it differently.
            let row = match (column.row(), self.row()) {
                (Some(registered), Some(own)) => registered.eq_ignore_ascii_case(own),
                (registered, own) => registered == own,
            };
            registered && row
        };
        let found = register.0.iter().find(|column| column.identifier == self.identifier);
        found.filter(same).ok_or_else(|| Unknown(self.to_string()))
    }
}

impl<T: Named + ?Sized> Named for &T {
    fn find_in<'a>(&self, register: &'a Register) -> Result<&'a Column, Unknown> {
        (**self).find_in(register)
    }
}

/// A column is not in the register (`ColumnUnknown`).
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error(
    "column {0} is not registered: add a [[column]] with its table and column to hardwrap.toml, or give it to the builder"
)]
pub struct Unknown(pub String);

/// A column or register that cannot be.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum Invalid {
    /// A name is empty, longer than 65535 bytes, or holds NUL.
    #[error("{0}: a name is never empty, at most 65535 bytes long, and holds no NUL")]
    Name(&'static str),
    /// Something that must be unique is there twice.
    #[error("{0} {1} is registered twice")]
    Twice(&'static str, String),
}

/// The table of the preset `nr-llm`.
pub const AGENT_RUN: &str = "tx_nrllm_agentrun";

/// The preset `nr-llm`: the two columns of the table that TYPO3's nr_llm keeps agent runs in. It starts with
/// [`Cleartext::Accept`], for installations that hold cleartext.
///
/// # Panics
/// Never: the names are constants.
pub fn nr_llm() -> Vec<Column> {
    [("queued_request", "nrllm:agent-state:queued-request"), ("suspended_state", "nrllm:agent-state:suspended-state")]
        .into_iter()
        .map(|(name, identifier)| {
            Column::new(AGENT_RUN, name, "uid", identifier)
                .and_then(|column| column.bound_to("uuid"))
                .expect("the preset's names are well formed")
                .cleartext(Cleartext::Accept)
        })
        .collect()
}

/// len32(text) text.
fn push_with_length(bytes: &mut Vec<u8>, text: &str) {
    let length = u32::try_from(text.len()).expect("names and row values are at most LONGEST_NAME bytes");
    bytes.extend_from_slice(&length.to_be_bytes());
    bytes.extend_from_slice(text.as_bytes());
}

/// What [`well_named`] asks, where only constants can be.
const fn well_named_constant(text: &'static str) -> Cow<'static, str> {
    assert!(!text.is_empty() && text.len() <= LONGEST_NAME, "a name is never empty and at most 65535 bytes long");
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        assert!(*first != 0, "a name holds no NUL");
        rest = tail;
    }
    Cow::Borrowed(text)
}

fn well_named(what: &'static str, text: &str) -> Result<(), Invalid> {
    if text.is_empty() || text.len() > LONGEST_NAME || text.contains('\0') {
        return Err(Invalid::Name(what));
    }
    Ok(())
}

/// No name of a column and no row value is longer, in bytes.
const LONGEST_NAME: usize = 65_535;

#[cfg(test)]
mod tests {
    use super::*;

    fn iban() -> Column {
        Column::new("customer", "iban", "id", "shop:customer:iban").expect("well named")
    }

    #[test]
    fn a_bound_column_wants_a_row_and_an_unbound_one_takes_none() {
        let row = Row::from(7);
        assert!(matches!(iban().at(Some(&row)), Err(Misplaced::RowGiven(_))));
        assert!(iban().at(None).is_ok());
        let bound = iban().bound_to("id").expect("well named");
        assert!(matches!(bound.at(None), Err(Misplaced::RowMissing(..))));
        assert!(bound.at(Some(&row)).is_ok());
    }

    #[test]
    fn a_register_names_each_column_and_identifier_once() {
        assert!(matches!(Register::new(vec![iban(), iban()]), Err(Invalid::Twice("column", _))));
        let other = Column::new("customer", "name", "id", "shop:customer:iban").expect("well named");
        assert!(matches!(Register::new(vec![iban(), other]), Err(Invalid::Twice("identifier", _))));
        assert!(Register::new(nr_llm()).is_ok());
    }

    #[test]
    fn two_columns_that_are_written_alike_are_refused() {
        let whole = Column::new("a.b", "c", "id", "x").expect("well named");
        let split = Column::new("a", "b.c", "id", "y").expect("well named");
        assert_eq!(Register::new(vec![whole, split]).err(), Some(Invalid::Twice("column", "a.b.c".to_owned())));
    }

    #[test]
    fn a_column_is_found_as_the_schema_spells_it_and_as_it_was_registered() {
        let written = Column::new("main.CUSTOMER", "Iban", "ID", "shop:customer:iban").expect("well named");
        let spelt = written.spelt("customer".to_owned(), "iban".to_owned(), "id".to_owned(), None);
        let again = spelt.spelt("customer".to_owned(), "iban".to_owned(), "id".to_owned(), None);
        let register = Register::new(vec![again]).expect("one column");
        for name in ["customer.iban", "main.CUSTOMER.Iban"] {
            assert_eq!(register.find(name).map(ToString::to_string), Ok("customer.iban".to_owned()));
        }
        assert!(register.find("Customer.iban").is_err());
    }

    #[test]
    fn a_constant_is_the_column_that_is_made_at_run_time() {
        const IBAN: Column = Column::constant("customer", "iban", "id", "shop:customer:iban")
            .in_row("id")
            .cleartext(Cleartext::Accept)
            .holding(Capacity(Some(500)));
        let made = iban().bound_to("id").expect("well named");
        assert_eq!(IBAN, made.cleartext(Cleartext::Accept).holding(Capacity(Some(500))));
    }

    #[test]
    #[should_panic(expected = "NUL")]
    fn a_constant_holds_no_nul() {
        let _ = Column::constant("t", "c", "k", "i\0");
    }

    #[test]
    #[should_panic(expected = "one row column")]
    fn a_constant_is_bound_to_one_row_column() {
        let _ = iban().in_row("id").in_row("uuid");
    }

    #[test]
    fn names_are_never_empty_and_hold_no_nul() {
        assert_eq!(Column::new("", "c", "k", "i"), Err(Invalid::Name("table")));
        assert_eq!(Column::new("t", "c", "k", "i\0"), Err(Invalid::Name("identifier")));
        assert_eq!(Row::try_from(""), Err(NotARow));
    }
}
