//! Many values in one call: spread over threads, each with a session of its own, in the order they came.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use super::{Error, Keeper};
use crate::column::{Named, ToRow};
use crate::secret::Plaintext;

impl Keeper {
    /// Seals many values of one column, as [`Keeper::seal`] does each. One result for each value, in their order; one
    /// that fails keeps no other from being sealed.
    ///
    /// The work is spread over as many threads as the token lends sessions and the machine has processors.
    ///
    /// # Errors
    /// [`Error::ColumnUnknown`]; within, those of [`Keeper::seal`].
    pub fn seal_many<R: ToRow + Sync, V: AsRef<[u8]> + Sync>(
        &self,
        column: impl Named,
        values: &[(R, V)],
    ) -> Result<Vec<Result<String, Error>>, Error> {
        let column = column.find_in(self.register())?;
        Ok(self.spread(values, |(row, value)| self.seal(column, row, value.as_ref())))
    }

    /// Opens many stored texts of one column, as [`Keeper::open_value`] does each; results as [`Keeper::seal_many`].
    ///
    /// # Errors
    /// [`Error::ColumnUnknown`]; within, those of [`Keeper::open_value`].
    pub fn open_many<R: ToRow + Sync, S: AsRef<str> + Sync>(
        &self,
        column: impl Named,
        stored: &[(R, S)],
    ) -> Result<Vec<Result<Plaintext, Error>>, Error> {
        let column = column.find_in(self.register())?;
        Ok(self.spread(stored, |(row, stored)| self.open_value(column, row, stored.as_ref())))
    }

    /// Wraps the DEKs of many stored texts of one column anew, as [`Keeper::rewrap`] does each; results as
    /// [`Keeper::seal_many`].
    ///
    /// # Errors
    /// [`Error::ColumnUnknown`]; within, those of [`Keeper::rewrap`].
    pub fn rewrap_many<R: ToRow + Sync, S: AsRef<str> + Sync>(
        &self,
        column: impl Named,
        stored: &[(R, S)],
    ) -> Result<Vec<Result<Option<String>, Error>>, Error> {
        let column = column.find_in(self.register())?;
        Ok(self.spread(stored, |(row, stored)| self.rewrap(column, row, stored.as_ref())))
    }

    fn spread<T: Sync, U: Send>(
        &self,
        items: &[T],
        work: impl Fn(&T) -> Result<U, Error> + Sync,
    ) -> Vec<Result<U, Error>> {
        let processors = thread::available_parallelism().map_or(1, usize::from);
        let workers = self.keyring().sessions().min(processors).min(items.len().div_ceil(WORTH_A_THREAD));
        spread(items, workers, work)
    }
}

/// Does `work` on each item, in this thread and `workers - 1` more. Results are in the order of the items.
fn spread<T: Sync, U: Send>(items: &[T], workers: usize, work: impl Fn(&T) -> U + Sync) -> Vec<U> {
    if workers <= 1 {
        return items.iter().map(work).collect();
    }
    let next = AtomicUsize::new(0);
    // Each takes the next few that nobody has, so that a slow one holds nobody up.
    let take = || {
        let mut done = Vec::new();
        loop {
            let start = next.fetch_add(AT_A_TIME, Ordering::Relaxed);
            let Some(rest) = items.get(start..) else { return done };
            done.push((start, rest.iter().take(AT_A_TIME).map(&work).collect::<Vec<U>>()));
        }
    };
    let mut parts = thread::scope(|scope| {
        let others: Vec<_> = (1..workers).map(|_| scope.spawn(take)).collect();
        let mut parts = take();
        for other in others {
            parts.extend(other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
        parts
    });
    parts.sort_unstable_by_key(|(start, _)| *start);
    parts.into_iter().flat_map(|(_, part)| part).collect()
}

/// So many values take longer than starting a thread does.
const WORTH_A_THREAD: usize = 8;
const AT_A_TIME: usize = 4;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_come_in_the_order_of_the_items_however_many_work() {
        for (items, workers) in [(0, 1), (0, 4), (1, 4), (4, 2), (5, 2), (1000, 3), (1001, 16)] {
            let items: Vec<usize> = (0..items).collect();
            let doubled = spread(&items, workers, |item| {
                if item % 7 == 0 {
                    thread::yield_now();
                }
                item * 2
            });
            assert_eq!(doubled, items.iter().map(|item| item * 2).collect::<Vec<_>>());
        }
    }
}
