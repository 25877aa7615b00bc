//! What the doctor can find: stable names, how bad each is, and why.

use serde::{Serialize, Serializer};

/// How bad a finding is.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Severity {
    /// Values cannot be sealed or opened, or are not protected: exit code 1.
    Critical,
    /// It works, and should not stay so: exit code 3.
    Warning,
    /// Good to know.
    Info,
}

impl Severity {
    /// Its name in output.
    pub fn name(self) -> &'static str {
        match self {
            Self::Critical => "critical",
            Self::Warning => "warning",
            Self::Info => "info",
        }
    }
}

/// One thing that the doctor found.
#[derive(Clone, Debug, Serialize)]
pub struct Finding {
    /// What kind of thing: stable, for programs.
    pub id: FindingId,
    /// How bad it is.
    pub severity: Severity,
    /// Which file, token, key, column it is about.
    pub subject: String,
    /// What was seen.
    pub what: String,
    /// What may come of it.
    pub risk: &'static str,
    /// What to do.
    pub remedy: String,
}

impl Finding {
    pub(super) fn new(
        id: FindingId,
        subject: impl Into<String>,
        what: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self {
            id,
            severity: id.severity(),
            subject: subject.into(),
            what: what.into(),
            risk: id.risk(),
            remedy: remedy.into(),
        }
    }
}

macro_rules! findings {
    ($($(#[doc = $doc:literal])* $variant:ident $name:literal $severity:ident $risk:literal;)*) => {
        /// Every kind of thing that the doctor can find.
        #[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
        #[non_exhaustive]
        pub enum FindingId {
            $($(#[doc = $doc])* $variant,)*
        }

        impl FindingId {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$variant),*];

            /// Its name: stable, for programs.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// How bad it is.
            pub fn severity(self) -> Severity {
                match self { $(Self::$variant => Severity::$severity,)* }
            }

            /// What may come of it.
            pub fn risk(self) -> &'static str {
                match self { $(Self::$variant => $risk,)* }
            }
        }
    };
}

findings! {
    /// The file cannot be read, or is no configuration.
    ConfigurationInvalid "configuration-invalid" Critical
        "Nothing works, and nothing but this file was examined.";
    /// Somebody else could have written the file.
    ConfigurationUnsafe "configuration-unsafe" Critical
        "It names a library to load: who can write it runs code as us, with the PIN in reach.";
    /// Somebody else can put another file in its place.
    ConfigurationDirectory "configuration-directory-writable" Warning
        "Who can write the directory can put another configuration there.";
    /// The module is not there, or does not load.
    ModuleMissing "module-missing" Critical
        "Without its module the token cannot be reached: nothing can be sealed or opened.";
    /// Somebody else can change the module.
    ModuleWritable "module-writable" Critical
        "The module is code that sees the PIN and every data key: who can write it has them.";
    /// No token, or more than one, is what the URI names.
    TokenNotFound "token-not-found" Critical
        "Nothing can be sealed or opened.";
    /// The token is there and does not work.
    TokenUnreachable "token-unreachable" Critical
        "Nothing can be sealed or opened until it answers. Nothing is lost by that.";
    /// A token in software holds the keys of a production.
    TokenInSoftware "token-in-software" Warning
        "Its key file and PIN are files: who copies both has the master keys, and a crash at the wrong moment loses them.";
    /// The PIN cannot be read from where it should come from.
    PinUnreadable "pin-unreadable" Critical
        "Without a login nothing can be sealed or opened.";
    /// Others can read the PIN's file.
    PinReadable "pin-readable-by-others" Warning
        "Who has the PIN and reaches the token can open every value.";
    /// The PIN stands in an environment variable.
    PinInEnvironment "pin-in-environment" Info
        "Child processes inherit it, and whoever may read the process's environment reads it.";
    /// The token has no user PIN yet.
    PinNotSet "pin-not-set" Critical
        "Nobody can log in, so nothing can be sealed or opened.";
    /// The token refused the PIN.
    PinRefused "pin-refused" Critical
        "Nothing can be sealed or opened; every further wrong try brings the token closer to locking.";
    /// A wrong PIN was tried before.
    PinCountLow "pin-count-low" Critical
        "Programs do not log in any more, so that a person is left a try.";
    /// One try is left, or none.
    PinLocked "pin-locked" Critical
        "Nothing can be sealed or opened until the PIN is unlocked. The keys are still there.";
    /// The keyring has no key yet.
    KeyringEmpty "keyring-empty" Critical
        "Nothing can be sealed.";
    /// It is another keyring than the one that the database has seen.
    KeyringOther "keyring-other" Critical
        "Values cannot be opened with these keys, and what would be sealed now belongs to another deployment.";
    /// An older record was put back.
    RecordOlder "record-older" Critical
        "A key may be used that must not be any more, and a closed window may stand open.";
    /// A part of the record cannot be read.
    RecordDamaged "record-damaged" Critical
        "Which keys may be used is not known, so none is.";
    /// The record does not name the database.
    DatabaseNotNoted "database-not-noted" Critical
        "The destruction of a key would not ask this database for its proof.";
    /// No key may seal.
    NoActiveKey "no-active-key" Critical
        "Nothing can be sealed.";
    /// A recorded key is not on the token.
    KeyMissing "key-missing" Critical
        "Values under it cannot be opened.";
    /// Two keys have one id.
    KeyDoubled "key-doubled" Critical
        "Nothing is sealed while it is not known which of the two is the key.";
    /// An active key may not wrap, on the token.
    KeyMayNotWrap "key-may-not-wrap" Critical
        "Nothing can be sealed under it, and somebody with the PIN took the permission away.";
    /// A key that may not wrap any more may, on the token.
    KeyMayWrap "key-may-wrap" Critical
        "The fence is down: a process with an old view could seal under a key that is to go.";
    /// A key of that id is there, and is another one.
    KeyCanary "key-canary-fails" Critical
        "Values under it cannot be opened, and somebody put another key in its place.";
    /// A recorded key is what a master key must not be.
    KeyAttributes "key-wrong-attributes" Critical
        "It may have been outside of the token, so it is not used.";
    /// A key has wrapped nearly as often as its algorithm allows.
    WrapsRunningOut "wraps-running-out" Warning
        "At the limit (half of what SP 800-38D section 8.3 allows) the key seals no more; what is sealed still opens.";
    /// A key has sealed for longer than it should.
    CryptoperiodPassed "cryptoperiod-passed" Warning
        "The longer a key is used, the more a loss of it costs (SP 800-57 part 1 section 5.3).";
    /// Anyone can have put an object with our label there.
    ObjectPlanted "object-planted" Warning
        "It is never used. Somebody without the PIN reached the token and tried.";
    /// A private key with our label is not in the record.
    ObjectUnrecorded "object-unrecorded" Warning
        "It is never used. Somebody with the PIN made it, or a part of the record is gone.";
    /// A crash left a key in the making.
    KeyLeft "key-left-in-the-making" Warning
        "It does no harm, and says that a command was interrupted.";
    /// No route works on the token.
    NoRoute "no-route" Critical
        "No key can be made there, and none of them works.";
    /// Another route is better than that of the key.
    RouteBetter "route-better" Info
        "Sealing and opening take longer than they have to, or the algorithm counts its uses.";
    /// The database is not there.
    DatabaseMissing "database-missing" Critical
        "There is nothing to seal values in.";
    /// It cannot be opened, or is none.
    DatabaseUnusable "database-unusable" Critical
        "No value in it can be read or written by us.";
    /// Our tables are not there, or older.
    DatabaseNotReady "database-not-ready" Critical
        "hardwrap does not use a database whose tables it does not know.";
    /// A newer hardwrap was here.
    DatabaseNewer "database-newer" Critical
        "This hardwrap does not know what a newer one wrote, and keeps out.";
    /// Others can read its files.
    DatabaseReadable "database-readable-by-others" Warning
        "Sealed values stay sealed; everything else in it can be read or written, with what deleted rows left.";
    /// Two registered columns are one.
    ColumnTwice "column-registered-twice" Critical
        "A value would be bound to one of two identifiers, and open under the other no more.";
    /// A registered table is not there.
    TableMissing "table-missing" Warning
        "Nothing is sealed there; where the name is misspelt, a table that should be sealed is not.";
    /// What is there is no table.
    TableOdd "table-not-a-table" Critical
        "Nothing can be stored there, so hardwrap refuses to start.";
    /// A registered column is not there.
    ColumnMissing "column-missing" Warning
        "Nothing is sealed there; where the name is misspelt, a column that should be sealed is not.";
    /// A column computes its value.
    ColumnGenerated "column-generated" Critical
        "Nothing can be stored there, so hardwrap refuses to start.";
    /// A column is declared for numbers.
    ColumnType "column-type" Warning
        "Sealed values are texts: a STRICT table or another database refuses them there.";
    /// A column is too short for any sealed value.
    ColumnTooSmall "column-too-small" Critical
        "Every value is refused there before it is stored.";
    /// Cleartext that would not fit once sealed.
    ValuesTooLong "values-too-long-to-seal" Warning
        "These values cannot be sealed where they stand, so the window for cleartext cannot be closed.";
    /// The key column does not tell rows apart.
    KeyNotUnique "key-not-unique" Critical
        "A write could meet another row, so hardwrap refuses to start.";
    /// The row column may change what is stored in it.
    RowNotBindable "row-not-bindable" Critical
        "A value bound to what was written would not open for what is stored, so hardwrap refuses to start.";
    /// Rows whose key is NULL.
    RowsWithoutKey "rows-without-key" Warning
        "No walk reaches these rows: they are not verified, and no rotation is proven while they are there.";
    /// Values with our marker and no well-formed key id.
    ValuesDamaged "values-damaged" Critical
        "They cannot be opened: something outside of hardwrap changed or cut them.";
    /// Values under a key that is not there.
    ValuesUnknownKey "values-under-unknown-key" Critical
        "They cannot be opened without that key.";
    /// Values of a newer version.
    ValuesNewer "values-of-newer-version" Warning
        "This hardwrap cannot open them.";
    /// A column accepts cleartext.
    CleartextWindow "cleartext-window-open" Warning
        "Who writes the database can put values in clear there, and they are taken for true.";
    /// Cleartext where none may be.
    CleartextClosed "cleartext-in-closed-column" Critical
        "These values can be read by anyone with a backup, and are refused on reading: somebody wrote past hardwrap.";
    /// Envelopes of nr-vault.
    ForeignEnvelopes "foreign-envelopes" Warning
        "They open with the ancestor's software key only, and not here before they are migrated.";
    /// Envelopes outside of the register.
    Unregistered "unregistered-envelopes" Critical
        "Nobody counts, verifies or rotates them, and no rotation begins: it would leave them behind under a key that dies.";
    /// A key that is to go is not proven to be unneeded here.
    RotationUnfinished "rotation-unfinished" Warning
        "Values may still be under a key that is to go: it can be neither retired nor destroyed.";
    /// Values that no rotation could move.
    LedgerOpen "ledger-open" Warning
        "They stay under a key that is to go, and while they are neither mended nor given up nothing is proven.";
    /// The fence in the database is down.
    FenceMissing "fence-missing" Warning
        "A value that was wrapped long ago could be stored under a key that is to go.";
    /// An exception that nothing needs.
    IgnoreNeedless "ignore-without-need" Info
        "The exception hides what may come into that column later.";
}

impl Serialize for FindingId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}
