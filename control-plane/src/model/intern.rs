//! One copy of each string and list: a cluster has few different ones, and many endpoints.

use std::{borrow::Borrow, collections::HashSet, hash::Hash, sync::Arc};

use headgate_core::{EndpointPort, Hints};

/// Shared strings, port lists and hints.
#[derive(Debug, Default)]
pub(super) struct Interner {
    strings: Pool<str>,
    ports: Pool<[EndpointPort]>,
    hints: Pool<Hints>,
}

impl Interner {
    /// The shared copy of a string; `None` for an empty one.
    pub(super) fn string(&mut self, text: &str) -> Option<Arc<str>> {
        (!text.is_empty()).then(|| self.strings.get(text, || text.into()))
    }

    /// The shared copy of a port list, sorted and without duplicates.
    pub(super) fn ports(&mut self, mut ports: Vec<EndpointPort>) -> Arc<[EndpointPort]> {
        ports.sort_unstable();
        ports.dedup();
        self.ports.get(ports.as_slice(), || ports.as_slice().into())
    }

    /// The shared copy of hints, sorted and without duplicates; `None` for none.
    pub(super) fn hints(&mut self, mut hints: Hints) -> Option<Arc<Hints>> {
        for list in [&mut hints.zones, &mut hints.nodes] {
            list.sort_unstable();
            list.dedup();
        }
        let is_empty = hints.zones.is_empty() && hints.nodes.is_empty();
        (!is_empty).then(|| self.hints.get(&hints, || Arc::new(hints.clone())))
    }
}

/// Drops what nobody else holds each time it has doubled, so that a lookup costs O(1) in the long run.
#[derive(Debug)]
struct Pool<T: ?Sized> {
    held: HashSet<Arc<T>>,
    sweep_at: usize,
}

impl<T: ?Sized> Default for Pool<T> {
    fn default() -> Self {
        Self { held: HashSet::new(), sweep_at: 1_024 }
    }
}

impl<T: ?Sized + Hash + Eq> Pool<T> {
    fn get(&mut self, value: &T, make: impl FnOnce() -> Arc<T>) -> Arc<T>
    where
        Arc<T>: Borrow<T>,
    {
        if let Some(shared) = self.held.get(value) {
            return Arc::clone(shared);
        }
        if self.held.len() >= self.sweep_at {
            self.held.retain(|shared| Arc::strong_count(shared) > 1);
            self.sweep_at = (self.held.len() * 2).max(1_024);
        }
        let shared = make();
        self.held.insert(Arc::clone(&shared));
        shared
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn equal_values_are_one_and_unused_ones_go() {
        let mut interner = Interner::default();
        let kept = interner.string("zone-a").unwrap();
        for number in 0..10_000 {
            assert!(interner.string(&number.to_string()).is_some());
        }
        assert!(Arc::ptr_eq(&kept, &interner.string("zone-a").unwrap()));
        assert!(interner.strings.held.len() < 2_000);
        assert_eq!(interner.string(""), None);
    }
}
