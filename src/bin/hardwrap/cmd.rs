//! The commands, one file for each.

mod columns;
mod completions;
mod count_demo_texts;
mod database;
mod demo;
mod doctor;
mod init;
mod key;
mod ledger;
mod man;
mod open;
mod prometheus;
mod rotate;
mod runs;
mod seal;
mod status;
mod verify;

pub(crate) use columns::Columns;
pub(crate) use completions::Completions;
pub(crate) use count_demo_texts::CountDemoTexts;
pub(crate) use database::Database;
pub(crate) use demo::Demo;
pub(crate) use doctor::Doctor;
pub(crate) use init::Init;
pub(crate) use key::Key;
pub(crate) use ledger::Ledger;
pub(crate) use man::Man;
pub(crate) use open::Open;
pub(crate) use rotate::Rotate;
pub(crate) use runs::Runs;
pub(crate) use seal::Seal;
pub(crate) use status::Status;
pub(crate) use verify::Verify;
