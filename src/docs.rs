//! The documents: pages to read from top to bottom. Every command in them is run by `ci/docs`.

#[doc = include_str!("docs/overview.md")]
pub mod overview {}

#[doc = include_str!("docs/cookbook.md")]
pub mod cookbook {}

#[doc = include_str!("docs/ceremony.md")]
pub mod ceremony {}

#[doc = include_str!("docs/pin.md")]
pub mod pin {}

#[doc = include_str!("docs/ci.md")]
pub mod ci {}

#[doc = include_str!("docs/environments.md")]
pub mod environments {}

#[doc = include_str!("docs/rotation.md")]
pub mod rotation {}

#[doc = include_str!("docs/servers.md")]
pub mod servers {}

#[doc = include_str!("docs/upgrade.md")]
pub mod upgrade {}

#[doc = include_str!("docs/what_to_do.md")]
pub mod what_to_do {}

#[doc = include_str!("docs/errors.md")]
pub mod errors {}

#[doc = include_str!("docs/findings.md")]
pub mod findings {}
