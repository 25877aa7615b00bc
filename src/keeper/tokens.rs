//! The tokens of a configuration, one or several, as one provider of keys: a value opens on whichever holds its key.
//!
//! New values are sealed under the key made last, wherever it is. A token that is out of reach keeps nobody from what
//! the others can do; that a key does not exist is only said when every token was asked.

use std::sync::Arc;

use super::{Config, Error};
use crate::hsm::{self, Keyring, Report};
use crate::provider::{Aad, KeyId, KeyProvider, MasterKey, ProviderError, WrappedDek};
use crate::secret::Dek;

/// The keyrings of a deployment, each on its token.
#[derive(Debug)]
pub(super) struct Tokens {
    all: Vec<(String, Arc<Keyring>)>,
}

impl Tokens {
    /// Loads the modules. No token is asked before its first use.
    pub(super) fn new(config: &Config) -> Result<Self, Error> {
        let mut all = vec![(config.token_name.clone(), Arc::new(Keyring::new(config.token.clone())?))];
        for (name, settings) in &config.more_tokens {
            all.push((name.clone(), Arc::new(Keyring::new(settings.clone())?)));
        }
        Ok(Self { all })
    }

    /// The first one.
    pub(super) fn first(&self) -> &Arc<Keyring> {
        &self.all[0].1
    }

    /// All of them, with their names.
    pub(super) fn all(&self) -> impl Iterator<Item = (&str, &Arc<Keyring>)> {
        self.all.iter().map(|(name, keyring)| (name.as_str(), keyring))
    }

    /// The one called `name`.
    pub(super) fn named(&self, name: &str) -> Option<&Arc<Keyring>> {
        self.all().find(|(called, _)| *called == name).map(|(_, keyring)| keyring)
    }

    /// What seals and opens.
    pub(super) fn provider(self: &Arc<Self>) -> Arc<dyn KeyProvider> {
        if self.all.len() == 1 { self.first().clone() } else { self.clone() }
    }

    /// The keyring whose record names `kid`.
    pub(super) fn holder(&self, kid: KeyId) -> Result<&Arc<Keyring>, Error> {
        let mut unreachable = None;
        for (_, keyring) in self.all() {
            match keyring.report() {
                Ok(report) if report.key(kid).is_some() => return Ok(keyring),
                Ok(_) => {}
                Err(error) => unreachable = unreachable.or(Some(error)),
            }
        }
        Err(unreachable.unwrap_or(hsm::Error::NoSuchKey(kid)).into())
    }

    /// What stands on all tokens that are within reach: their keys, oldest first, and of the active ones the one made
    /// last seals. An error only where no token that answers has a key that seals.
    pub(super) fn report(&self) -> Result<Report, Error> {
        let mut merged: Option<Report> = None;
        let mut failed = None;
        for (name, keyring) in self.all() {
            match (keyring.report(), &mut merged) {
                (Ok(report), None) => merged = Some(report),
                (Ok(report), Some(merged)) => merged.add(report),
                (Err(error), _) => {
                    tracing::warn!(target: "hardwrap::keeper", token = name, %error, "a token is out of reach");
                    failed = failed.or(Some((name.to_owned(), error)));
                }
            }
        }
        match (merged, failed) {
            (Some(report), None) => Ok(report),
            (Some(mut report), Some((name, _))) if report.current().is_some() => {
                report.unreachable.push(name);
                Ok(report)
            }
            (_, Some((_, error))) => Err(error.into()),
            (None, None) => Err(Error::NoKeys(self.first().label().to_owned())),
        }
    }

    fn ask<T>(
        &self,
        ask: impl Fn(&Keyring) -> Result<T, ProviderError>,
        missing: ProviderError,
    ) -> Result<T, ProviderError> {
        let mut unreachable = None;
        for (_, keyring) in self.all() {
            match ask(keyring) {
                Err(ProviderError::UnknownKey(_)) => {}
                Err(error @ ProviderError::Unavailable(_)) => unreachable = unreachable.or(Some(error)),
                answer => return answer,
            }
        }
        Err(unreachable.unwrap_or(missing))
    }
}

impl KeyProvider for Tokens {
    fn current(&self) -> Result<MasterKey, ProviderError> {
        let (mut newest, mut unreachable): (Option<MasterKey>, _) = (None, None);
        for (_, keyring) in self.all() {
            match keyring.current() {
                Ok(key) => newest = newest.filter(|newest| newest.id > key.id).or(Some(key)),
                Err(ProviderError::NoCurrentKey) => {}
                Err(error) => unreachable = unreachable.or(Some(error)),
            }
        }
        newest.ok_or_else(|| unreachable.unwrap_or(ProviderError::NoCurrentKey))
    }

    fn wrap(&self, key: KeyId, dek: &Dek, aad: &Aad) -> Result<WrappedDek, ProviderError> {
        self.ask(|keyring| keyring.wrap(key, dek, aad), ProviderError::UnknownKey(key))
    }

    fn unwrap(&self, wrapped: &WrappedDek, aad: &Aad) -> Result<Dek, ProviderError> {
        self.ask(|keyring| keyring.unwrap(wrapped, aad), ProviderError::UnknownKey(wrapped.key))
    }
}
