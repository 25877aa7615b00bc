//! The runs of `hardwrap demo`.

use super::{Db, Error};

impl Db {
    /// Puts three agent runs into the preset's table, in clear, as an application without hardwrap would; run again,
    /// they are replaced. For the demo only.
    ///
    /// # Errors
    /// [`Error::NoTable`], [`Error::Unavailable`].
    pub fn insert_demo_runs(&self) -> Result<(), Error> {
        self.write(|connection| connection.run(include_str!("demo.sql")))
    }
}

/// A text that stands in every value of the demo, and nowhere else.
pub const DEMO_SECRET: &str = "DEMO-SECRET-";
