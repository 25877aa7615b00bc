//! One process at a time connects. SoftHSM2 rewrites a token's file at every login, and a process that reads it in the
//! middle finds no token, no PIN, or an error that looks like a wrong PIN. Processes of one user take turns, by a lock on
//! a file; who cannot have the lock in time goes on without it, and looks again where that fails.

use std::env;
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};

/// The turn to connect through one module; it ends when this drops.
pub(super) struct Turn {
    file: Option<File>,
}

impl Turn {
    /// Waits for the turn, though not for ever: somebody may be asked for a PIN in theirs.
    pub(super) fn take(module: &Path) -> Self {
        let file = open(module).filter(|file| {
            let began = Instant::now();
            loop {
                match file.try_lock() {
                    Ok(()) => break true,
                    Err(fs::TryLockError::WouldBlock) if began.elapsed() < PATIENCE => thread::sleep(LOOK_AGAIN),
                    Err(_) => break false,
                }
            }
        });
        Self { file }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        // Closing would not do: a child forked meanwhile has the file open too.
        if let Some(file) = &self.file {
            let _ = file.unlock();
        }
    }
}

/// A file of our own, in a directory where others may have put one of theirs: then there is no lock.
fn open(module: &Path) -> Option<File> {
    let digest = Sha256::digest(module.as_os_str().as_encoded_bytes());
    let directory = env::var_os("XDG_RUNTIME_DIR").map_or_else(env::temp_dir, PathBuf::from);
    let caller = fs::metadata("/proc/self").ok()?.uid();
    let path = directory.join(format!("hardwrap-{caller}-{}.lock", hex::encode(&digest[..8])));
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW)
        .open(path);
    file.ok().filter(|file| file.metadata().is_ok_and(|about| about.is_file() && about.uid() == caller))
}

const PATIENCE: Duration = Duration::from_secs(2);
const LOOK_AGAIN: Duration = Duration::from_millis(2);
