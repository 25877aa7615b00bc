//! Whether this process is a fork of the one that loaded the module.

use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};

/// How often this process's line was forked, from the first call on: what [`Own`](crate::process::Own) tells processes
/// apart by. Asking for the process id instead is a system call each time. A child made by a bare `clone` system call
/// is not seen.
pub(super) fn forks() -> u64 {
    NOTICING.call_once(|| {
        #[expect(unsafe_code, reason = "libc's way to be told of a fork")]
        // SAFETY: the handler only adds to an atomic, which is allowed in a child of a process with threads.
        let refused = unsafe { libc::pthread_atfork(None, None, Some(forked)) };
        assert_eq!(refused, 0, "there is memory for one handler");
    });
    FORKS.load(Ordering::Acquire)
}

extern "C" fn forked() {
    FORKS.fetch_add(1, Ordering::AcqRel);
}

static NOTICING: Once = Once::new();
static FORKS: AtomicU64 = AtomicU64::new(0);
