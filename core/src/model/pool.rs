//! One copy of each equal value: a cluster has few different names, port lists and placements, and
//! many endpoints.

use std::{borrow::Borrow, collections::HashSet, hash::Hash, sync::Arc};

/// A pool does not look for what is unused while it holds less than this.
const SWEEP_FROM: usize = 1_024;

/// Shared values of one type. Drops what nobody else holds each time it has doubled, so that a
/// lookup costs O(1) in the long run.
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
    /// The shared copy of a value, which is what `make` returns if there is none yet.
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
    fn equal_values_are_one_and_unused_ones_go() {
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
