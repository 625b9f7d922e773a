//! What the ledgers of several modes share: users of elements, the quarantine, and the access of a
//! full plan to the state.
//!
//! Several services may need the same element, such as an address of a device or an entry of a set.
//! The element is in the kernel while at least one service needs it. A [`Touched`] collects the
//! elements of one step. If one service releases an element and another service adds the element in
//! the same step, the kernel keeps the element without an update.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, hash_map::Entry},
    hash::Hash,
    sync::Arc,
};

use crate::{
    model::{NodeFacts, ServiceKey},
    state::{Dirty, State},
};

/// Elements with the number of their users.
#[derive(Debug)]
pub(super) struct RefCounts<T> {
    users: HashMap<T, u32>,
}

/// Elements that a step touched, and whether the kernel had them before.
#[derive(Debug)]
pub(super) struct Touched<T>(BTreeMap<T, bool>);

impl<T> Default for RefCounts<T> {
    fn default() -> Self {
        Self { users: HashMap::new() }
    }
}

impl<T> Default for Touched<T> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<T: Ord> Extend<T> for Touched<T> {
    /// Adds elements that the kernel has.
    fn extend<I: IntoIterator<Item = T>>(&mut self, elements: I) {
        self.0.extend(elements.into_iter().map(|element| (element, true)));
    }
}

impl<T: Copy + Ord + Hash> RefCounts<T> {
    /// Adds a user of an element. `is_lacking` means that the element has users but the kernel
    /// lacks it. Returns true if the new user is the first.
    pub(super) fn add(&mut self, element: T, is_lacking: bool, touched: &mut Touched<T>) -> bool {
        let count = self.users.entry(element).or_default();
        touched.0.entry(element).or_insert(*count > 0 && !is_lacking);
        *count += 1;
        *count == 1
    }

    /// Removes a user of an element. Returns true if the removed user was the last.
    pub(super) fn remove(&mut self, element: T, is_lacking: bool, touched: &mut Touched<T>) -> bool {
        let Entry::Occupied(mut count) = self.users.entry(element) else { return false };
        touched.0.entry(element).or_insert(!is_lacking);
        *count.get_mut() -= 1;
        let is_last = *count.get() == 0;
        if is_last {
            count.remove();
        }
        is_last
    }

    /// True if an element has users.
    #[must_use]
    pub(super) fn contains(&self, element: &T) -> bool {
        self.users.contains_key(element)
    }

    /// The elements that have users.
    pub(super) fn iter(&self) -> impl Iterator<Item = &T> {
        self.users.keys()
    }

    /// Returns the touched elements that have users and that the kernel lacked, in order.
    pub(super) fn to_add<'a>(&'a self, touched: &'a Touched<T>) -> impl DoubleEndedIterator<Item = T> + 'a {
        let added = touched.0.iter().filter(|(element, was_there)| !**was_there && self.contains(element));
        added.map(|(element, _)| *element)
    }

    /// Returns the touched elements that the kernel had and that have no users, in order.
    pub(super) fn to_remove<'a>(&'a self, touched: &'a Touched<T>) -> impl DoubleEndedIterator<Item = T> + 'a {
        let removed = touched.0.iter().filter(|(element, was_there)| **was_there && !self.contains(element));
        removed.map(|(element, _)| *element)
    }
}

// Services whose objects the kernel rejects. Plans skip them, and their last good objects remain.

/// The quarantined services, and the objects (`T`) of services before unconfirmed plans.
#[derive(Debug, Clone)]
pub(super) struct Quarantine<T> {
    /// The objects of each service before the first change since the last confirmation.
    before: HashMap<Arc<ServiceKey>, T>,
    /// True after a full plan since the last confirmation: objects not in `before` are unknown.
    is_after_full: bool,
    /// The quarantined services with their last good objects, or `None` if these are unknown.
    services: HashMap<Arc<ServiceKey>, Option<T>>,
}

impl<T> Default for Quarantine<T> {
    fn default() -> Self {
        Self { before: HashMap::new(), is_after_full: false, services: HashMap::new() }
    }
}

impl<T> Quarantine<T> {
    pub(super) fn contains(&self, key: &ServiceKey) -> bool {
        !self.services.is_empty() && self.services.contains_key(key)
    }

    /// Records that a plan changes a service whose objects were `before`.
    pub(super) fn changed(&mut self, key: &Arc<ServiceKey>, before: impl FnOnce() -> T) {
        if !self.is_after_full {
            self.before.entry(Arc::clone(key)).or_insert_with(before);
        }
    }

    /// Records that a full plan replaces the objects of all services.
    pub(super) fn begin_full(&mut self) {
        self.is_after_full = true;
    }

    /// The objects that services had before unconfirmed plans.
    pub(super) fn unconfirmed(&mut self) -> impl Iterator<Item = (&Arc<ServiceKey>, &mut T)> {
        self.before.iter_mut()
    }

    /// Records that the kernel has accepted all plans so far.
    pub(super) fn confirm(&mut self) {
        self.before.clear();
        self.is_after_full = false;
    }

    /// Quarantines these services and releases all others. Their last good objects are those before
    /// the unconfirmed plans. `programmed` returns the objects of a service that no such plan
    /// changed.
    pub(super) fn set(&mut self, services: &BTreeSet<Arc<ServiceKey>>, programmed: impl Fn(&ServiceKey) -> Option<T>) {
        self.services.retain(|key, _| services.contains(key));
        for key in services.iter().filter(|key| !self.services.contains_key(*key)).collect::<Vec<_>>() {
            let last_good = match self.before.remove(key) {
                None if self.is_after_full => None,
                None => programmed(key),
                before => before,
            };
            self.services.insert(Arc::clone(key), last_good);
        }
    }

    /// The last good objects of a quarantined service.
    pub(super) fn last_good(&mut self, key: &ServiceKey) -> Option<&mut Option<T>> {
        self.services.get_mut(key)
    }

    /// The quarantined services whose last good objects are known, with these objects.
    pub(super) fn all_last_good(&mut self) -> impl Iterator<Item = (&Arc<ServiceKey>, &mut T)> {
        self.services.iter_mut().filter_map(|(key, last_good)| Some((key, last_good.as_mut()?)))
    }
}

// The access of a full plan to the state.

/// Number of Services that a full plan reads while the state is locked.
const SERVICES_AT_ONCE: usize = 256;

/// Gives a full plan access to the state, which may change between two calls.
pub trait StateSource {
    /// Calls `read` with the present state, the facts about the node, and what changed since the
    /// last step was planned. The state is locked while `read` runs, so `read` must not wait.
    /// A source whose plan nobody needs any more does not call `read`.
    fn look(&self, read: &mut dyn FnMut(&State, &NodeFacts, &Dirty));
}

/// A state that does not change.
#[derive(Debug, Clone, Copy)]
pub struct FixedState<'a>(pub &'a State, pub &'a NodeFacts);

impl StateSource for FixedState<'_> {
    fn look(&self, read: &mut dyn FnMut(&State, &NodeFacts, &Dirty)) {
        read(self.0, self.1, &Dirty::default());
    }
}

/// Returns the Services of a source, in order.
pub(super) fn services(source: &dyn StateSource) -> Vec<Arc<ServiceKey>> {
    let mut keys = Vec::new();
    source.look(&mut |state, _, _| keys.extend(state.entries().map(|(key, _)| Arc::clone(key))));
    keys.sort_unstable();
    keys
}

/// Divides Services into the parts that a full plan reads while the state is locked.
pub(super) fn parts(services: &[Arc<ServiceKey>]) -> impl Iterator<Item = &[Arc<ServiceKey>]> {
    services.chunks(SERVICES_AT_ONCE)
}
