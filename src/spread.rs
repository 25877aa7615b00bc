//! One piece of work for each of many items, spread over threads.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Does `work` on each item, in this thread and `workers - 1` more. Results are in the order of the items.
pub(crate) fn spread<T: Sync, U: Send>(items: &[T], workers: usize, work: impl Fn(&T) -> U + Sync) -> Vec<U> {
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
