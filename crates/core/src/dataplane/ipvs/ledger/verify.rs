//! Comparison of the ledger with the kernel.

use std::{collections::BTreeSet, net::IpAddr, ops::RangeInclusive};

use super::{
    super::{
        super::ipsets::{Element, Set},
        existing::Existing,
        objects::{Object, ServerKey},
        server::Server,
    },
    Ledger,
};

impl Ledger {
    /// True if the kernel has the recorded objects and no other objects of Headgate. `existing`
    /// contains the objects in the kernel. Draining destinations may be missing, and deferred
    /// objects may be missing or differ. The cost is linear in the number of objects, so callers
    /// use this check only for verification in the background.
    #[must_use]
    pub fn matches(&self, existing: &Existing) -> bool {
        let has_sets = Set::ALL.into_iter().all(|set| existing.sets.contains_key(&set));
        let elements: usize = existing.sets.values().map(BTreeSet::len).sum();
        let has_element = |(set, element): &&(Set, Element)| {
            existing.sets.get(set).is_some_and(|elements| elements.contains(element))
        };
        let (found, missing): (Vec<_>, Vec<_>) = self.elements.iter().partition(has_element);
        let is_deferred = |(set, element): &(Set, Element)| self.is_deferred(&Object::Element(*set, *element));
        let has_address = |address: &IpAddr| {
            existing.device_addresses.contains(address) || self.is_deferred(&Object::Address(*address))
        };
        let is_as_programmed = |(key, server): (&ServerKey, &Server)| match existing.servers.get(key) {
            Some(found) => {
                (found.settings == Some(server.settings) || self.is_deferred(&Object::Server(*key)))
                    && server
                        .matches(&found.destinations, |address| self.is_deferred(&Object::Destination(*key, *address)))
            }
            // A server that no service wants may be missing because it has drained.
            None => self.is_deferred(&Object::Server(*key)) || !self.candidates.contains_key(key),
        };
        let ours = existing.servers.keys().filter(|key| existing.mark(key, &self.config).is_some());
        has_sets
            && elements == found.len()
            && missing.into_iter().all(is_deferred)
            && existing.device_addresses.iter().all(|address| self.device_addresses.contains(address))
            && self.device_addresses.iter().all(has_address)
            && self.servers.iter().all(is_as_programmed)
            && ours.into_iter().all(|key| self.servers.contains_key(key))
            && self.rules.matches(&existing.tables)
    }

    /// Returns the minimum and the maximum number of elements that a set in the kernel must have.
    /// The maximum is the number of wanted elements. The minimum does not count deferred elements.
    /// The cost is linear in the number of deferred objects.
    #[must_use]
    pub fn set_size(&self, set: Set) -> RangeInclusive<usize> {
        let wanted = self.set_sizes.get(&set).copied().unwrap_or_default();
        wanted.saturating_sub(self.deferred.elements_of(set))..=wanted
    }

    /// Returns any virtual server that the kernel must have, for a quick check that the kernel
    /// still has Headgate's servers. Draining servers do not count.
    #[must_use]
    pub fn any_server(&self) -> Option<ServerKey> {
        self.candidates.keys().find(|key| !self.deferred.contains(&Object::Server(**key))).copied()
    }

    /// Returns any address that the device must have.
    #[must_use]
    pub fn any_address(&self) -> Option<IpAddr> {
        self.device_addresses.iter().find(|address| !self.deferred.contains(&Object::Address(**address))).copied()
    }
}
