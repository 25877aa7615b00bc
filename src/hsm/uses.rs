//! How often a key has wrapped under A256GCMKW. With random IVs that must end well before 2^32 (SP 800-38D §8.3), so
//! wraps are reserved in the keyring record in blocks, small ones first, and counted down in memory.

use std::collections::HashMap;
use std::sync::Mutex;

use super::Error;
use super::module::lock;
use super::pool::Lease;
use super::record::Record;
use crate::provider::KeyId;

/// What this process has reserved and not used yet.
#[derive(Debug, Default)]
pub(super) struct Uses(Mutex<HashMap<KeyId, Block>>);

#[derive(Debug, Default)]
struct Block {
    left: u64,
    last: u64,
}

impl Uses {
    /// Takes one wrap, out of a new block where the last one is used up.
    pub(super) fn take(&self, lease: &Lease, keyring: &str, kid: KeyId) -> Result<(), Error> {
        let mut blocks = lock(&self.0);
        let block = blocks.entry(kid).or_default();
        if block.left == 0 {
            // A process that seals one value reserves little, one that seals for hours seldom.
            let count = (block.last * 16).clamp(FIRST_BLOCK, LARGEST_BLOCK);
            let session = lease.access().session;
            // Read anew: other processes reserve too.
            let record = Record::read(session, keyring)?;
            if record.reserved(kid).saturating_add(count) > MOST_USES {
                return Err(Error::UsedUp(kid));
            }
            record.reserve(session, keyring, kid, count)?;
            *block = Block { left: count, last: count };
        }
        block.left -= 1;
        Ok(())
    }
}

const FIRST_BLOCK: u64 = 16;
const LARGEST_BLOCK: u64 = 65_536;
/// How often a key may wrap under A256GCMKW: half of what SP 800-38D §8.3 allows with random IVs.
pub const MOST_USES: u64 = 1 << 31;
