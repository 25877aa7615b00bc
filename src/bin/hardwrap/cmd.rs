//! The commands, one file for each.

mod columns;
mod count_demo_texts;
mod demo;
mod init;
mod key;
mod open;
mod seal;
mod status;
mod verify;

pub(crate) use columns::Columns;
pub(crate) use count_demo_texts::CountDemoTexts;
pub(crate) use demo::Demo;
pub(crate) use init::Init;
pub(crate) use key::Key;
pub(crate) use open::Open;
pub(crate) use seal::Seal;
pub(crate) use status::Status;
pub(crate) use verify::Verify;
