//! What each process has for itself. After a fork the child has a copy of everything, connections of its parent and
//! locks that its parent's other threads held among it, and may use none of that.

use std::sync::OnceLock;

/// A value that a forked child does not share with its parent: it makes one of its own when it first asks, and leaves
/// the parent's as it is, for ever. Dropped in the child, the parent's value is forgotten: closing a connection there
/// could close the parent's.
pub(crate) struct Own<T> {
    /// Tells one process from another that it was forked from.
    now: fn() -> u64,
    stamp: u64,
    value: Option<T>,
    heir: OnceLock<Box<Own<T>>>,
}

impl<T> Own<T> {
    /// The value of this process, among those that `now` tells apart.
    pub(crate) fn new(now: fn() -> u64, value: T) -> Self {
        Self::of(now, now(), value)
    }

    /// The value of the process in which `now` is `stamp`.
    pub(crate) const fn of(now: fn() -> u64, stamp: u64, value: T) -> Self {
        Self { now, stamp, value: Some(value), heir: OnceLock::new() }
    }

    /// The value of this process, made by `inherit` from that of its parent if it has none yet. `inherit` must not
    /// wait for a lock in there: nobody may be left to give it back.
    pub(crate) fn get(&self, inherit: impl Fn(&T) -> T) -> &T {
        let now = (self.now)();
        let mut own = self;
        while own.stamp != now {
            own = own.heir.get_or_init(|| Box::new(Self::of(self.now, now, inherit(own.value()))));
        }
        own.value()
    }

    fn value(&self) -> &T {
        self.value.as_ref().expect("it is there until it drops")
    }
}

impl<T> Drop for Own<T> {
    fn drop(&mut self) {
        if self.stamp != (self.now)() {
            std::mem::forget(self.value.take());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;

    use super::*;

    thread_local! {
        static NOW: Cell<u64> = const { Cell::new(1) };
    }

    fn now() -> u64 {
        NOW.get()
    }

    #[test]
    fn a_child_has_its_own_and_leaves_that_of_its_parent_alone() {
        let (parents, childs) = (Rc::new(1), Rc::new(2));
        let own = Own::new(now, Rc::clone(&parents));
        let get = || Rc::clone(own.get(|_| Rc::clone(&childs)));
        assert_eq!(*get(), 1);
        NOW.set(2);
        assert_eq!((*get(), *get()), (2, 2));
        NOW.set(3);
        assert_eq!(**own.get(|parent| Rc::new(**parent + 1)), 3, "made of that of its own parent");
        NOW.set(2);
        drop(own);
        // What was made in this process is dropped; what was not is forgotten.
        assert_eq!((Rc::strong_count(&childs), Rc::strong_count(&parents)), (1, 2));
    }
}
