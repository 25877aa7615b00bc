#![doc = include_str!("../README.md")]

pub mod aead;
pub mod codec;
pub mod column;
pub mod docs;
pub mod envelope;
pub mod hsm;
pub mod keeper;
mod process;
pub mod provider;
pub mod rotation;
pub mod secret;
mod spread;
pub mod store;

#[cfg(test)]
extern crate self as hardwrap;
#[cfg(test)]
#[path = "../tests/support/memory_keys.rs"]
pub(crate) mod memory_keys;
#[cfg(test)]
#[path = "../tests/support/softhsm.rs"]
pub(crate) mod softhsm;
