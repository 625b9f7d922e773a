//! The objects of one kind that are in use, and the rule for invalid objects.
//!
//! The rule: **an invalid version of an object never removes a good version.** A finding concerns
//! one of three parts:
//! - An *entry* of a list (an externalIP, a load balancer address, an endpoint, an address of a
//!   Node): the entry is left out, and the rest of the version is used. If the old version stayed
//!   in use instead, traffic would still be sent to entries that the new version has removed.
//!   Entries beyond the budget of a Service are left out in the same way.
//! - A Headgate *annotation*: the annotation is ignored, and the rest of the version is used.
//! - The *object* (ports, ClusterIPs, policies, source ranges, labels that name the owner, text
//!   that cannot be decoded): the last good version stays in use as a whole while the object is
//!   invalid. Without a good version, the valid parts are used, unless these parts alone would
//!   allow traffic that the object is meant to block.
//!
//! A deleted object is removed, valid or not. An object is also removed when its new version is not
//! for this proxy (headless, ExternalName, or served by another proxy).

use std::{collections::HashMap, hash::Hash};

use super::problems::Findings;

/// The result of reading an object.
#[derive(Debug)]
pub(super) struct Reading<T> {
    /// The usable value, if there is one.
    pub(super) value: Option<T>,
    /// The findings about the object.
    pub(super) findings: Findings,
}

impl<T> Reading<T> {
    /// The result for an object that this proxy does not serve.
    pub(super) fn nothing() -> Self {
        Self { value: None, findings: Findings::default() }
    }

    /// Applies the rule for invalid objects. Calls `set` with the value, and with whether the value
    /// is good. `has_good` says whether a good version is in use. If so, and if the object is
    /// invalid, the good version stays in use, and `set` is not called.
    pub(super) fn take_in(self, has_good: bool, set: impl FnOnce(Option<T>, bool)) -> Outcome {
        let Self { value, findings } = self;
        let (is_good, is_served) = (findings.is_fit(), value.is_some());
        let is_kept = !is_good && has_good;
        if !is_kept {
            set(value, is_good);
        }
        let consequence = match (is_kept, is_served) {
            (true, _) => "its last good version stays in use",
            (false, true) => "the rest of it is in use",
            (false, false) => "it is not in use",
        };
        Outcome { findings, consequence }
    }
}

/// The result of [`Reading::take_in`].
#[derive(Debug)]
pub(super) struct Outcome {
    /// The findings about the object.
    pub(super) findings: Findings,
    /// The last part of each message about a problem that concerns the object as a whole.
    pub(super) consequence: &'static str,
}

/// The values in use, and the values before the pending changes.
#[derive(Debug)]
pub(super) struct ObjectSet<K, V> {
    /// The value in use of each object, and whether this value is good. A good value comes from the
    /// object as written, except for invalid entries and annotations.
    held: HashMap<K, (V, bool)>,
    before: HashMap<K, Option<V>>,
}

impl<K, V> Default for ObjectSet<K, V> {
    fn default() -> Self {
        Self { held: HashMap::new(), before: HashMap::new() }
    }
}

impl<K: Hash + Eq + Clone + Ord, V: PartialEq + Clone> ObjectSet<K, V> {
    /// Applies a version of an object.
    pub(super) fn put(&mut self, key: K, reading: Reading<V>) -> Outcome {
        let has_good = self.held.get(&key).is_some_and(|(_, is_good)| *is_good);
        reading.take_in(has_good, |value, is_good| self.set(key, value, is_good))
    }

    /// The value in use of an object.
    pub(super) fn get(&self, key: &K) -> Option<&V> {
        self.held.get(key).map(|(value, _)| value)
    }

    /// Changes the value in use of an object, and returns the result of `change`.
    pub(super) fn amend<R>(&mut self, key: &K, change: impl FnOnce(&mut V) -> R) -> Option<R> {
        let (mut value, is_good) = self.held.get(key)?.clone();
        let result = change(&mut value);
        self.set(key.clone(), Some(value), is_good);
        Some(result)
    }

    /// The keys of the objects in use.
    pub(super) fn keys(&self) -> impl Iterator<Item = &K> {
        self.held.keys()
    }

    /// Sets or removes a value.
    fn set(&mut self, key: K, value: Option<V>, is_good: bool) {
        let old = match value {
            Some(value) => {
                if let Some((held, was_good)) = self.held.get_mut(&key)
                    && *held == value
                {
                    (*held, *was_good) = (value, is_good);
                    return;
                }
                self.held.insert(key.clone(), (value, is_good))
            }
            None => match self.held.remove(&key) {
                None => return,
                old => old,
            },
        };
        self.before.entry(key).or_insert(old.map(|(value, _)| value));
    }

    /// The values that have changed since the last call, in order of key; `None` for a removed
    /// object.
    pub(super) fn take_changes(&mut self) -> Vec<(K, Option<V>)> {
        let mut changes: Vec<(K, Option<V>)> = std::mem::take(&mut self.before)
            .into_iter()
            .map(|(key, before)| (before, self.held.get(&key).map(|(value, _)| value), key))
            .filter(|(before, now, _)| before.as_ref() != *now)
            .map(|(_, now, key)| (key, now.cloned()))
            .collect();
        changes.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
        changes
    }
}
