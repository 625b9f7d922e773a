//! Objects of one kind as they are in use, and the rule for bad ones.
//!
//! The rule: **a bad object never withdraws a live one.** Findings come in three reaches.
//! - An *entry* (an externalIP, a load balancer address, an endpoint, an address of a Node): it is
//!   left out, the rest of that same version is used. Such lists change by entries, and holding an
//!   old version for one would keep sending traffic to others that are gone.
//! - An *annotation* of ours: it means nothing, as if it were not there, and the rest is used.
//! - The *object* (ports, ClusterIPs, policies, source ranges, labels that say what it belongs to,
//!   text that does not decode): the last good version stays in use as a whole, for as long as the
//!   object is bad. Where there was none, what of it can be used is used, unless that would open
//!   what it means to close.
//!
//! An object that is deleted goes, good or bad, and so does one whose new version says that it is
//! nobody's business here (headless, ExternalName, handed to another proxy).

use std::{collections::HashMap, hash::Hash};

use super::problems::Findings;

/// An object as read.
#[derive(Debug)]
pub(super) struct Reading<T> {
    /// What can be used of it.
    pub(super) value: Option<T>,
    /// What was found on the way.
    pub(super) findings: Findings,
}

impl<T> Reading<T> {
    /// An object that needs no programming.
    pub(super) fn nothing() -> Self {
        Self { value: None, findings: Findings::default() }
    }
}

/// How an object's new version is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// As it is, entries aside.
    Taken,
    /// The last good version stays.
    Kept,
    /// Nothing good before: what can be used is used, possibly nothing.
    Partial,
}

impl Verdict {
    /// From what was found, and whether a good version is in use.
    pub(super) fn of(findings: &Findings, has_good: bool) -> Self {
        match (findings.is_fit(), has_good) {
            (true, _) => Self::Taken,
            (false, true) => Self::Kept,
            (false, false) => Self::Partial,
        }
    }

    /// For the end of a problem's message.
    pub(super) fn consequence(self, is_served: bool) -> &'static str {
        match (self, is_served) {
            (Self::Kept, _) => "its last good version stays in use",
            (_, true) => "the rest of it is in use",
            (_, false) => "it is not in use",
        }
    }
}

/// The values in use, with those before the change that is going on.
#[derive(Debug)]
pub(super) struct ObjectSet<K, V> {
    held: HashMap<K, (V, bool)>,
    before: HashMap<K, Option<V>>,
}

impl<K, V> Default for ObjectSet<K, V> {
    fn default() -> Self {
        Self { held: HashMap::new(), before: HashMap::new() }
    }
}

impl<K: Hash + Eq + Clone + Ord, V: PartialEq + Clone> ObjectSet<K, V> {
    /// Whether a good version of it is in use.
    pub(super) fn has_good(&self, key: &K) -> bool {
        self.held.get(key).is_some_and(|(_, is_good)| *is_good)
    }

    /// Whether any version of it is in use.
    pub(super) fn contains(&self, key: &K) -> bool {
        self.held.contains_key(key)
    }

    /// Keys in use.
    pub(super) fn keys(&self) -> impl Iterator<Item = &K> {
        self.held.keys()
    }

    /// Puts or removes a value.
    pub(super) fn set(&mut self, key: K, value: Option<V>, is_good: bool) {
        let old = match value {
            Some(value) => {
                if let Some((held, was_good)) = self.held.get_mut(&key)
                    && *held == value
                {
                    *was_good = is_good;
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

    /// What differs since the last call, in order of key: the new value, or `None` for a key that
    /// is gone.
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
