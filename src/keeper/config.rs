//! The configuration: `hardwrap.toml`, and `HARDWRAP_…` variables over it.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::Deserialize;
use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{Deserializer, MapAccess, SeqAccess, Visitor};

use super::policy::{Duration, Policy};
use crate::column::{self, Cleartext, Column, Register};
use crate::hsm::{PinSource, Settings, TokenUri};
use crate::store::DatabaseUrl;

/// Everything a deployment says of itself.
#[derive(Clone, Debug)]
pub struct Config {
    /// What the deployment is called, as `production`.
    pub environment: String,
    /// Token and keyring: of several the first.
    pub token: Settings,
    /// What the first token is called.
    pub token_name: String,
    /// Further tokens, by name.
    pub more_tokens: Vec<(String, Settings)>,
    /// The database.
    pub database: DatabaseUrl,
    /// How long things may last.
    pub policy: Policy,
    /// The sealed columns.
    pub register: Register,
    /// Columns that hold what looks like envelopes and is none, each with a reason.
    pub ignore: Vec<Ignore>,
    /// The file it was read from; none where a [`Builder`](super::Builder) made it.
    pub path: Option<PathBuf>,
}

/// A column that discovery passes over.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Ignore {
    /// Its table.
    pub table: String,
    /// Its name.
    pub column: String,
    /// Why: it stands in every report.
    pub reason: String,
}

impl Ignore {
    fn is_registered(&self, register: &Register) -> bool {
        let bare = |table: &str| table.strip_prefix("main.").unwrap_or(table).to_ascii_lowercase();
        register
            .columns()
            .iter()
            .any(|column| bare(column.table()) == bare(&self.table) && column.name().eq_ignore_ascii_case(&self.column))
    }
}

impl Config {
    /// Reads the file at `path`, and lets `variables` named `HARDWRAP_…` override single settings.
    ///
    /// The file names a library to load, so whoever can write it runs code as us: it must belong to the caller or to
    /// root, and nobody else may write it.
    ///
    /// # Errors
    /// [`ConfigError`] names file and setting, never a value.
    pub fn read(path: &Path, variables: &BTreeMap<String, String>) -> Result<Self, ConfigError> {
        let shown = path.display().to_string();
        let text = read_guarded(path)?;
        // The message and the line, without the line's text: it may hold what should not be shown.
        let mut file: FileForm = toml::from_str(&text).map_err(|error| {
            let line = error
                .span()
                .map_or(0, |span| text.as_bytes()[..span.start].iter().filter(|b| **b == b'\n').count() + 1);
            ConfigError::Syntax { path: shown.clone(), line, what: quiet(error.message()) }
        })?;
        file.override_with(variables)?;
        file.build(path)
    }

    /// What must be true of a configuration wherever it comes from.
    pub(super) fn check(&self) -> Result<(), ConfigError> {
        let keyrings = std::iter::once(&self.token).chain(self.more_tokens.iter().map(|(_, token)| token));
        for keyring in keyrings.map(|token| &token.keyring) {
            Self::check_keyring(keyring)?;
        }
        if let Some(ignore) = self.ignore.iter().find(|ignore| ignore.reason.trim().is_empty()) {
            return Err(invalid("ignore", &format!("{}.{} needs a reason", ignore.table, ignore.column)));
        }
        if let Some(ignore) = self.ignore.iter().find(|ignore| ignore.is_registered(&self.register)) {
            return Err(invalid("ignore", &format!("{}.{} is a registered column", ignore.table, ignore.column)));
        }
        Ok(())
    }

    fn check_keyring(keyring: &str) -> Result<(), ConfigError> {
        if keyring.is_empty() || keyring.len() > LONGEST_KEYRING || keyring.chars().any(char::is_control) {
            return Err(invalid("token.keyring", "want a label of 1 to 64 bytes without control characters"));
        }
        Ok(())
    }

    /// Whether the preset `nr-llm` is registered.
    pub fn has_preset(&self) -> bool {
        self.register.columns().iter().any(|column| column.table() == column::AGENT_RUN)
    }
}

/// The file as it is written.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileForm {
    #[serde(default)]
    environment: Option<String>,
    #[serde(default)]
    token: OneOrMany,
    #[serde(default)]
    database: DatabaseForm,
    #[serde(default)]
    policy: PolicyForm,
    #[serde(default)]
    column: Vec<ColumnForm>,
    #[serde(default)]
    ignore: Vec<Ignore>,
}

/// `[token]` or `[[token]]`.
enum OneOrMany {
    One(TokenForm),
    Many(Vec<TokenForm>),
}

/// By hand, because serde's `untagged` would make every typo within one and the same error.
impl<'de> Deserialize<'de> for OneOrMany {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(TableOrTables)
    }
}

struct TableOrTables;

impl<'de> Visitor<'de> for TableOrTables {
    type Value = OneOrMany;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[token], or several [[token]]")
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<OneOrMany, A::Error> {
        TokenForm::deserialize(MapAccessDeserializer::new(map)).map(OneOrMany::One)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, tables: A) -> Result<OneOrMany, A::Error> {
        Vec::deserialize(SeqAccessDeserializer::new(tables)).map(OneOrMany::Many)
    }
}

impl Default for OneOrMany {
    fn default() -> Self {
        Self::One(TokenForm::default())
    }
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct TokenForm {
    /// Wanted where there are several.
    name: Option<String>,
    uri: Option<String>,
    keyring: Option<String>,
    module_arguments: Option<String>,
    sessions: Option<usize>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct DatabaseForm {
    url: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct PolicyForm {
    backup_horizon: Option<String>,
    write_grace: Option<String>,
    cryptoperiod: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ColumnForm {
    preset: Option<String>,
    table: Option<String>,
    column: Option<String>,
    key: Option<String>,
    identifier: Option<String>,
    row: Option<String>,
    cleartext: Option<String>,
}

impl FileForm {
    fn override_with(&mut self, variables: &BTreeMap<String, String>) -> Result<(), ConfigError> {
        for (name, value) in variables {
            let Some(setting) = name.strip_prefix("HARDWRAP_") else { continue };
            // Whose business these are: the caller's, the tests' and the fault module's.
            if ["CONFIG", "LONG"].contains(&setting) || setting.starts_with("TEST_") || setting.starts_with("FAULT") {
                continue;
            }
            if self.is_pin(name, variables) {
                continue;
            }
            let value = Some(value.clone());
            match setting {
                "ENVIRONMENT" => self.environment = value,
                "TOKEN_URI" => self.token.one()?.uri = value,
                "TOKEN_KEYRING" => self.token.one()?.keyring = value,
                "TOKEN_MODULE_ARGUMENTS" => self.token.one()?.module_arguments = value,
                "TOKEN_SESSIONS" => {
                    let sessions = value.as_deref().and_then(|text| text.parse().ok());
                    self.token.one()?.sessions = Some(
                        sessions.ok_or_else(|| ConfigError::Setting(name.clone(), "want a whole number".to_owned()))?,
                    );
                }
                "DATABASE_URL" => self.database.url = value,
                "POLICY_BACKUP_HORIZON" => self.policy.backup_horizon = value,
                "POLICY_WRITE_GRACE" => self.policy.write_grace = value,
                "POLICY_CRYPTOPERIOD" => self.policy.cryptoperiod = value,
                _ => return Err(ConfigError::Setting(name.clone(), "there is no such setting".to_owned())),
            }
        }
        Ok(())
    }

    /// Whether a variable holds a PIN, because a token's URI names it: then it is no setting, whatever it is called.
    fn is_pin(&mut self, name: &str, variables: &BTreeMap<String, String>) -> bool {
        let over = variables.get("HARDWRAP_TOKEN_URI");
        let uris = over.into_iter().chain(self.token.all().iter().filter_map(|token| token.uri.as_ref()));
        // A URI that is none is refused where it is used.
        let mut sources = uris.filter_map(|uri| uri.parse::<TokenUri>().ok()?.pin_source);
        sources.any(|source| matches!(source, PinSource::Env(of) if of == name))
    }

    fn build(mut self, path: &Path) -> Result<Config, ConfigError> {
        let mut tokens = self.token.build()?;
        let (token_name, token) = tokens.remove(0);
        let mut policy = Policy::default();
        if self.policy.backup_horizon.is_some() {
            policy.backup_horizon = Some(setting("policy.backup_horizon", self.policy.backup_horizon)?);
        }
        for (name, text, field) in [
            ("policy.write_grace", self.policy.write_grace, &mut policy.write_grace),
            ("policy.cryptoperiod", self.policy.cryptoperiod, &mut policy.cryptoperiod),
        ] {
            if text.is_some() {
                *field = setting::<Duration>(name, text)?;
            }
        }
        let mut columns = Vec::new();
        for (index, form) in self.column.into_iter().enumerate() {
            form.build(index + 1, &mut columns)?;
        }
        let config = Config {
            environment: self.environment.unwrap_or_else(|| "production".to_owned()),
            token,
            token_name,
            more_tokens: tokens,
            database: setting("database.url", self.database.url)?,
            policy,
            register: Register::new(columns).map_err(|error| invalid("column", &error.to_string()))?,
            ignore: self.ignore,
            path: Some(path.to_owned()),
        };
        config.check()?;
        Ok(config)
    }
}

impl OneOrMany {
    /// The only one, which variables may override.
    fn one(&mut self) -> Result<&mut TokenForm, ConfigError> {
        match self.all() {
            [token] => Ok(token),
            _ => Err(invalid("token", "of several [[token]], a variable HARDWRAP_TOKEN_… cannot say which it means")),
        }
    }

    fn all(&mut self) -> &mut [TokenForm] {
        match self {
            Self::One(token) => std::slice::from_mut(token),
            Self::Many(tokens) => tokens,
        }
    }

    /// Every token with its name, at least one.
    fn build(&mut self) -> Result<Vec<(String, Settings)>, ConfigError> {
        let forms = self.all();
        let several = forms.len() > 1;
        let mut built: Vec<(String, Settings)> = Vec::new();
        for form in forms {
            let name = match form.name.take() {
                Some(name) if !name.trim().is_empty() => name,
                None if !several => "token".to_owned(),
                _ => return Err(invalid("token.name", "of several [[token]] each needs a name")),
            };
            if built.iter().any(|(other, _)| *other == name) {
                return Err(invalid("token.name", "two [[token]] have one name"));
            }
            let uri: TokenUri = setting("token.uri", form.uri.take())?;
            let mut settings = Settings::new(uri);
            if let Some(keyring) = form.keyring.take() {
                settings.keyring = keyring;
            }
            settings.module_arguments = form.module_arguments.take();
            if let Some(sessions) = form.sessions {
                if sessions == 0 {
                    return Err(invalid("token.sessions", "want 1 or more"));
                }
                settings.sessions = sessions;
            }
            built.push((name, settings));
        }
        if built.is_empty() { Err(invalid("token.uri", "is missing")) } else { Ok(built) }
    }
}

impl ColumnForm {
    fn build(self, number: usize, columns: &mut Vec<Column>) -> Result<(), ConfigError> {
        let named = |what: &str| format!("column {number}, {what}");
        let cleartext = match self.cleartext.as_deref() {
            None => None,
            Some("refuse") => Some(Cleartext::Refuse),
            Some("accept") => Some(Cleartext::Accept),
            Some(_) => return Err(invalid(&named("cleartext"), "want \"refuse\" or \"accept\"")),
        };
        if let Some(preset) = self.preset {
            if preset != "nr-llm" {
                return Err(invalid(&named("preset"), "want \"nr-llm\", the only one there is"));
            }
            let others = [&self.table, &self.column, &self.key, &self.identifier, &self.row];
            if others.iter().any(|other| other.is_some()) {
                return Err(invalid(&named("preset"), "of a preset's settings only cleartext can be overridden"));
            }
            let preset = column::nr_llm().into_iter();
            columns.extend(preset.map(|column| match cleartext {
                Some(policy) => column.cleartext(policy),
                None => column,
            }));
            return Ok(());
        }
        let required = |what, value: Option<String>| value.ok_or_else(|| invalid(&named(what), "is missing"));
        let table = required("table", self.table)?;
        let name = required("column", self.column)?;
        let key = required("key", self.key)?;
        let identifier = required("identifier", self.identifier)?;
        let built = Column::new(table, name, key, identifier).and_then(|column| match self.row {
            Some(row) => column.bound_to(row),
            None => Ok(column),
        });
        let built = built.map_err(|error| invalid(&format!("column {number}"), &error.to_string()))?;
        columns.push(built.cleartext(cleartext.unwrap_or_default()));
        Ok(())
    }
}

fn setting<T: FromStr<Err: fmt::Display>>(name: &str, text: Option<String>) -> Result<T, ConfigError> {
    let text = text.ok_or_else(|| invalid(name, "is missing"))?;
    text.parse().map_err(|error: T::Err| invalid(name, &error.to_string()))
}

fn invalid(name: &str, what: &str) -> ConfigError {
    ConfigError::Setting(name.to_owned(), what.to_owned())
}

/// Reads a file whose owner and mode are those of the descriptor read from, not of a name that may be swapped.
fn read_guarded(path: &Path) -> Result<String, ConfigError> {
    let unreadable = |error| ConfigError::Unreadable(path.to_owned(), error);
    let mut file = File::open(path).map_err(unreadable)?;
    let about = file.metadata().map_err(unreadable)?;
    if !about.is_file() {
        return Err(ConfigError::Unsafe(path.to_owned(), "it is no file"));
    }
    // The owner of this process, as the kernel sees it.
    let caller = fs::metadata("/proc/self").map_err(unreadable)?.uid();
    if about.uid() != 0 && about.uid() != caller {
        return Err(ConfigError::Unsafe(path.to_owned(), "it belongs to another user: chown it to yourself or root"));
    }
    if about.mode() & 0o022 != 0 {
        return Err(ConfigError::Unsafe(path.to_owned(), "others can write it: chmod go-w it"));
    }
    let mut text = String::new();
    file.read_to_string(&mut text).map_err(unreadable)?;
    Ok(text)
}

/// A parser's message, where it names settings only; others may quote a value.
fn quiet(message: &str) -> String {
    let first = message.lines().next().unwrap_or_default();
    let names_settings = ["unknown field", "missing field", "duplicate key"];
    if names_settings.iter().any(|start| first.starts_with(start)) {
        first.to_owned()
    } else if first.starts_with("invalid type") {
        "a setting has the wrong type".to_owned()
    } else if first.starts_with("invalid value") {
        "a setting has a value that it cannot have".to_owned()
    } else {
        "not well-formed TOML".to_owned()
    }
}

/// Why a configuration cannot be used. Names files and settings, never values.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read configuration {0}")]
    Unreadable(PathBuf, #[source] io::Error),
    /// The file could have been written by somebody else, and it names a library to load.
    #[error("configuration {0} is not used: {1}")]
    Unsafe(PathBuf, &'static str),
    /// The file is no configuration.
    #[error("configuration {path}, line {line}: {what}")]
    Syntax {
        /// The file.
        path: String,
        /// The line, from 1.
        line: usize,
        /// What is wrong.
        what: String,
    },
    /// A setting is missing or wrong.
    #[error("configuration: {0}: {1}")]
    Setting(String, String),
}

const LONGEST_KEYRING: usize = 64;
