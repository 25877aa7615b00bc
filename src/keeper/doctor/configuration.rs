//! The configuration file, and who else can write it.

use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::{Examination, Finding, FindingId};
use crate::keeper::{Config, ConfigError};

pub(super) fn examine(config: &Config, examination: &mut Examination) {
    let mut found = Vec::new();
    if let Some(path) = &config.path
        && let Some((at, how)) = writable(path)
    {
        found.push(Finding::new(
            FindingId::ConfigurationDirectory,
            path.display().to_string(),
            format!("{}: {how}", at.display()),
            format!("chmod go-w {}", at.display()),
        ));
    }
    examination.ran("configuration", found);
}

/// What is wrong with a configuration that could not be read.
pub(super) fn unusable(error: &ConfigError, examination: &mut Examination) {
    let (id, remedy) = match error {
        ConfigError::Unsafe(path, _) => (
            FindingId::ConfigurationUnsafe,
            format!("make sure of what it says, then chown it to yourself or root and chmod go-w {}", path.display()),
        ),
        _ => (FindingId::ConfigurationInvalid, "correct the file; the README has every setting".to_owned()),
    };
    let subject = match error {
        ConfigError::Unsafe(path, _) | ConfigError::Unreadable(path, _) => path.display().to_string(),
        ConfigError::Syntax { path, .. } => path.clone(),
        _ => "configuration".to_owned(),
    };
    let what = chain(error);
    examination.ran("configuration", vec![Finding::new(id, subject, what, remedy)]);
}

/// A file, or its directory, that somebody other than the caller and root can write, and what to do about it.
pub(super) fn writable(file: &Path) -> Option<(PathBuf, &'static str)> {
    let named = std::path::absolute(file).ok()?;
    let real = named.canonicalize().ok()?;
    let about = fs::metadata(&real).ok()?;
    if is_foreign(&about) {
        return Some((real, "it belongs to another user"));
    }
    if about.mode() & 0o022 != 0 {
        return Some((real, "others can write it"));
    }
    // Where it lies, and where a link to it does.
    let directories = [real.parent(), named.parent()].into_iter().flatten().map(Path::to_owned);
    directories
        .into_iter()
        .find(|directory| others_write(directory))
        .map(|directory| (directory, "others can write the directory it lies in"))
}

/// Whether others can put files of theirs in the place of those in a directory.
fn others_write(directory: &Path) -> bool {
    // In a sticky directory nobody can move another's file away.
    let open = |about: &Metadata| about.mode() & 0o022 != 0 && about.mode() & 0o1000 == 0;
    fs::metadata(directory).is_ok_and(|about| open(&about) || is_foreign(&about))
}

/// Whether something belongs to neither root nor the caller.
fn is_foreign(about: &Metadata) -> bool {
    let caller = fs::metadata("/proc/self").map_or(0, |process| process.uid());
    about.uid() != 0 && about.uid() != caller
}

/// An error with its causes, on one line.
pub(super) fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut said = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let text = cause.to_string();
        if !said.ends_with(&text) {
            said.push_str(": ");
            said.push_str(&text);
        }
        next = cause.source();
    }
    said
}
