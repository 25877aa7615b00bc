//! Agent runs of the preset `nr-llm`: JSON above, sealed text below.
//!
//! Both sealed columns stay in the row while a run is **running**, and a requeued run keeps its request: a worker that
//! dies must not take the run with it. They are emptied when the run ends, and only then. Who reads the database and
//! holds a key can therefore open the state of every unfinished run; a claim empties nothing.
//!
//! Times are unix seconds, given by the caller.

mod guard;
mod persister;
mod purge;
mod run;
mod runs;
mod summary;

pub use guard::Answer;
pub use persister::{Persister, Taken, Work};
pub use purge::{Purged, Retention};
pub use run::{InvalidRun, Lease, NewRun, Outcome, Run, RunId, Settled, StaleRun, Status, Totals, Waiting, Worker};
pub use runs::AgentRuns;
pub use summary::{Listing, StateFact, StateKind, Summary};
