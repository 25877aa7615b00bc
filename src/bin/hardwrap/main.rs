//! `hardwrap`: seals database columns under a master key that never leaves its PKCS#11 token.

mod app;
mod cmd;
mod failure;
mod text;

use std::io::{self, Write};
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

use app::{App, Global};
use failure::Failure;

/// Seals database columns under a master key that never leaves its PKCS#11 token.
#[derive(Parser)]
#[command(name = "hardwrap", version, after_help = AFTER_HELP, disable_help_subcommand = true)]
struct Arguments {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Init(cmd::Init),
    Key(cmd::Key),
    Seal(cmd::Seal),
    Open(cmd::Open),
    Columns(cmd::Columns),
    Verify(cmd::Verify),
    Rotate(cmd::Rotate),
    Ledger(cmd::Ledger),
    Database(cmd::Database),
    Status(cmd::Status),
    Doctor(cmd::Doctor),
    Runs(cmd::Runs),
    Demo(cmd::Demo),
    Completions(cmd::Completions),
    Man(cmd::Man),
    #[command(hide = true)]
    CountDemoTexts(cmd::CountDemoTexts),
}

fn main() -> ExitCode {
    let matches = match Arguments::command().try_get_matches() {
        Ok(matches) => matches,
        Err(error) => {
            // clap's own: help and version go to stdout and are no failure.
            let code = if error.use_stderr() { 2 } else { 0 };
            let _ = error.print();
            return ExitCode::from(code);
        }
    };
    let outcome = Arguments::from_arg_matches(&matches)
        .map_err(|error| Failure::usage(error.to_string()))
        .and_then(|arguments| run(arguments.command, &App::new(arguments.global)));
    match outcome {
        Ok(code) => ExitCode::from(code),
        Err(failure) => {
            let said = failure.to_string();
            if !said.is_empty() {
                let _ = writeln!(io::stderr(), "hardwrap: {said}");
            }
            ExitCode::from(failure.code())
        }
    }
}

fn run(command: Command, app: &App) -> Result<u8, Failure> {
    let mut out = io::BufWriter::new(io::stdout().lock());
    let code = match command {
        Command::Init(init) => init.run(app, &mut out),
        Command::Key(key) => key.run(app, &mut out),
        Command::Seal(seal) => seal.run(app, &mut out),
        Command::Open(open) => open.run(app, &mut out),
        Command::Columns(columns) => columns.run(app, &mut out),
        Command::Verify(verify) => verify.run(app, &mut out),
        Command::Rotate(rotate) => rotate.run(app, &mut out),
        Command::Ledger(ledger) => ledger.run(app, &mut out),
        Command::Database(database) => database.run(app, &mut out),
        Command::Status(status) => status.run(app, &mut out),
        Command::Doctor(doctor) => doctor.run(app, &mut out),
        Command::Runs(runs) => runs.run(app, &mut out),
        Command::Demo(demo) => demo.run(app, &mut out),
        Command::Completions(completions) => completions.run(Arguments::command(), &mut out),
        Command::Man(man) => man.run(Arguments::command(), &mut out),
        Command::CountDemoTexts(count) => count.run(&mut out),
    }?;
    out.flush()?;
    Ok(code)
}

const AFTER_HELP: &str = "\
A first look, which changes nothing:
  hardwrap doctor          everything, with what may come of what is wrong, and what to do
  hardwrap status          keys, database, what is sealed and what is not
  hardwrap columns         the columns, and whether the database has them
  hardwrap verify          opens 100 values of each column and prints none
Each command has examples: hardwrap runs cancel --help

Exit codes: 0 done, 1 failed or something critical was found, 2 wrong usage or configuration, 3 warnings only \
(doctor, status --check), 4 token or database unavailable: try again.";
