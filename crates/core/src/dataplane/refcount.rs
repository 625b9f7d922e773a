//! Reference-counted elements of the kernel.
//!
//! Several services may need the same element, such as an address of a device or an entry of a set.
//! The element is in the kernel while at least one service needs it. A [`Touched`] collects the
//! elements of one step. If one service releases an element and another service adds the element in
//! the same step, the kernel keeps the element without an update.

use std::{
    collections::{BTreeMap, HashMap, hash_map::Entry},
    hash::Hash,
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
