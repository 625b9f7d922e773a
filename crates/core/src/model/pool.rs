//! Pools that keep one shared copy of equal values. A cluster has many endpoints, but few different
//! names, port lists and placements.

use std::{borrow::Borrow, collections::HashSet, hash::Hash, sync::Arc};

/// A pool with fewer values does not search for unused values.
const SWEEP_FROM: usize = 1_024;

/// Shared values of one type. The pool drops unused values each time its size has doubled, so the
/// amortized cost of a lookup is O(1).
#[derive(Debug)]
pub struct Pool<T: ?Sized> {
    held: HashSet<Arc<T>>,
    sweep_at: usize,
}

impl<T: ?Sized> Default for Pool<T> {
    fn default() -> Self {
        Self { held: HashSet::new(), sweep_at: SWEEP_FROM }
    }
}

impl<T: ?Sized + Hash + Eq> Pool<T> {
    /// Returns the shared copy of `value`. If the pool has no copy, it stores the result of `make`.
    pub fn get(&mut self, value: &T, make: impl FnOnce() -> Arc<T>) -> Arc<T>
    where
        Arc<T>: Borrow<T>,
    {
        if let Some(shared) = self.held.get(value) {
            return Arc::clone(shared);
        }
        if self.held.len() >= self.sweep_at {
            self.held.retain(|shared| Arc::strong_count(shared) > 1);
            self.sweep_at = (self.held.len() * 2).max(SWEEP_FROM);
        }
        let shared = make();
        self.held.insert(Arc::clone(&shared));
        shared
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_values_share_one_copy_and_unused_values_are_dropped() {
        let mut pool = Pool::<str>::default();
        let kept = pool.get("zone-a", || "zone-a".into());
        for number in 0..10 * SWEEP_FROM {
            let name = number.to_string();
            pool.get(&name, || name.as_str().into());
        }
        assert!(Arc::ptr_eq(&kept, &pool.get("zone-a", || "zone-a".into())));
        assert!(pool.held.len() < 2 * SWEEP_FROM);
    }
}
