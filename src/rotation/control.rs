//! How somebody outside watches a rotation, slows it, and ends it.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Watches a rotation and can end it. Cheap to clone: all clones are one.
#[derive(Clone, Default)]
pub struct Control {
    stop: Arc<AtomicBool>,
    watch: Option<Arc<Watch>>,
}

type Watch = dyn Fn(&Progress) + Send + Sync;

impl Control {
    /// Ends when `stop` becomes true: an online rotation after the batch at hand, an atomic one by rolling back.
    pub fn new(stop: Arc<AtomicBool>) -> Self {
        Self { stop, watch: None }
    }

    /// Calls `watch` after every batch.
    #[must_use]
    pub fn watched(mut self, watch: impl Fn(&Progress) + Send + Sync + 'static) -> Self {
        self.watch = Some(Arc::new(watch));
        self
    }

    /// Asks the rotation to end.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Whether somebody asked it to end.
    pub fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    pub(super) fn tell(&self, progress: &Progress) {
        if let Some(watch) = &self.watch {
            watch(progress);
        }
    }
}

impl fmt::Debug for Control {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Control").field("stopped", &self.is_stopped()).finish_non_exhaustive()
    }
}

/// How far a walk is.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Progress {
    /// `TABLE.COLUMN`.
    pub column: String,
    /// Rows gone over in this pass, whether their values had to be moved or not.
    pub done: u64,
    /// Rows that there were when the pass began.
    pub total: u64,
}
