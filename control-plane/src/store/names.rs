//! References: numbers that stand for values in messages (discovery.proto, section 13). Each
//! Service key, placement and port list in the state has a reference. A receiver can resolve a
//! reference only if the receiver's state contains the value. Therefore, this module also stores
//! the version that added each value to the state.

use std::{
    borrow::Borrow,
    collections::{HashMap, HashSet},
    hash::Hash,
    sync::Arc,
};

use headgate_core::{Change, Endpoint, EndpointPort, Placement, ServiceKey, reference::Referrer};
use headgate_proto::References;

/// The maximum number of collided references of one kind. Two values with the same reference
/// collide. Anybody who knows the epoch can easily find values that collide. Without a bound, the
/// author of such values could use up the memory.
const MAX_COLLIDED: usize = 16_384;

/// One value in the state.
#[derive(Debug)]
struct Name {
    reference: u32,
    /// How many resources contain the value.
    users: u32,
    /// The version that added the value.
    since: u64,
}

/// The values of one kind.
#[derive(Debug)]
struct Table<T> {
    names: HashMap<T, Name>,
    collisions: Collisions,
}

/// Decides which references of one kind messages may use.
#[derive(Debug)]
enum Collisions {
    Few {
        /// References that belong to one value.
        unique: HashSet<u32>,
        /// References that two values had at the same time in this epoch. A receiver may still
        /// resolve such a reference to the wrong value.
        collided: HashSet<u32>,
    },
    /// Too many references have collided. Values of this kind are sent without references until the
    /// epoch ends.
    Many,
}

impl<T> Default for Table<T> {
    fn default() -> Self {
        let (unique, collided) = Default::default();
        Self { names: HashMap::new(), collisions: Collisions::Few { unique, collided } }
    }
}

/// The values of all kinds.
#[derive(Debug)]
pub(super) struct Names {
    referrer: Referrer,
    services: Table<Arc<ServiceKey>>,
    placements: Table<Arc<Placement>>,
    ports: Table<Arc<[EndpointPort]>>,
}

impl Collisions {
    fn take(&mut self, reference: u32) {
        let Self::Few { unique, collided } = self else { return };
        if collided.contains(&reference) || unique.insert(reference) {
            return;
        }
        unique.remove(&reference);
        collided.insert(reference);
        if collided.len() > MAX_COLLIDED {
            *self = Self::Many;
        }
    }

    fn release(&mut self, reference: u32) {
        if let Self::Few { unique, .. } = self {
            unique.remove(&reference);
        }
    }

    fn may_be_used(&self, reference: u32) -> bool {
        matches!(self, Self::Few { unique, .. } if unique.contains(&reference))
    }
}

impl<T: Clone + Eq + Hash> Table<T> {
    fn take(&mut self, version: u64, value: &T, reference: impl FnOnce() -> u32) {
        if let Some(name) = self.names.get_mut(value) {
            name.users = name.users.saturating_add(1);
            return;
        }
        let reference = reference();
        self.collisions.take(reference);
        self.names.insert(value.clone(), Name { reference, users: 1, since: version });
    }

    fn release<Q: Eq + Hash + ?Sized>(&mut self, value: &Q)
    where
        T: Borrow<Q>,
    {
        let Some(name) = self.names.get_mut(value) else { return };
        name.users -= 1;
        if name.users == 0 {
            self.collisions.release(name.reference);
            self.names.remove(value);
        }
    }

    fn reference<Q: Eq + Hash + ?Sized>(&self, version: u64, value: &Q) -> Option<u32>
    where
        T: Borrow<Q>,
    {
        let name = self.names.get(value).filter(|name| name.since <= version)?;
        self.collisions.may_be_used(name.reference).then_some(name.reference)
    }
}

impl Names {
    pub(super) fn new(epoch: u64) -> Self {
        let (services, placements, ports) = Default::default();
        Self { referrer: Referrer::new(epoch), services, placements, ports }
    }

    /// Adds the key of a Service that was created at `version`.
    pub(super) fn take_service(&mut self, version: u64, key: &Arc<ServiceKey>) {
        self.services.take(version, key, || self.referrer.service(key));
    }

    /// Releases the key of a removed Service.
    pub(super) fn release_service(&mut self, key: &ServiceKey) {
        self.services.release(key);
    }

    /// Adds the placements and ports of an endpoint that `version` has created or changed.
    pub(super) fn take_endpoint(&mut self, version: u64, endpoint: &Endpoint) {
        for placement in endpoint.placements() {
            self.placements.take(version, placement, || self.referrer.placement(placement));
        }
        self.ports.take(version, &endpoint.ports, || self.referrer.ports(&endpoint.ports));
    }

    /// Releases the placements and ports of an old value of an endpoint.
    pub(super) fn release_endpoint(&mut self, endpoint: &Endpoint) {
        for placement in endpoint.placements() {
            self.placements.release(placement);
        }
        self.ports.release(&endpoint.ports);
    }

    /// The references that can replace parts of a change for a receiver at `version`.
    pub(super) fn references(&self, version: u64, change: &Change) -> References {
        match change {
            Change::Endpoint(key, endpoint) => References {
                service: self.services.reference(version, key),
                placement: self.placements.reference(version, &endpoint.placement),
                ports: self.ports.reference(version, &endpoint.ports),
            },
            Change::RemoveEndpoint(key, _) => {
                References { service: self.services.reference(version, key), ..References::default() }
            }
            _ => References::default(),
        }
    }

    /// Number of values.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.services.names.len() + self.placements.names.len() + self.ports.names.len()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn newer_values_and_values_with_collided_references_are_not_referred_to() {
        let mut table = Table::default();
        table.take(3, &"web", || 7);
        assert_eq!((table.reference(2, "web"), table.reference(3, "web")), (None, Some(7)));
        table.take(5, &"web", || 7);
        table.release("web");
        assert_eq!(table.reference(3, "web"), Some(7), "the value was never absent");
        table.release("web");
        table.take(6, &"db", || 7);
        assert_eq!(
            (table.reference(5, "db"), table.reference(6, "db")),
            (None, Some(7)),
            "the two values never existed at the same time"
        );
        table.take(7, &"web", || 7);
        assert_eq!((table.reference(9, "web"), table.reference(9, "db")), (None, None));
        table.release("db");
        assert_eq!(table.reference(9, "web"), None, "a receiver may still resolve the reference to the other value");
        table.release("web");
        table.take(8, &"web", || 7);
        assert_eq!(table.reference(9, "web"), None);
        table.take(8, &"mail", || 8);
        assert_eq!(table.reference(9, "mail"), Some(8));
    }

    #[test]
    fn too_many_collisions_end_the_use_of_references() {
        let mut table = Table::default();
        let last = u32::try_from(MAX_COLLIDED).unwrap();
        for reference in 0..=last {
            table.take(1, &u64::from(reference), || reference);
            if reference == last {
                table.take(1, &u64::MAX, || last + 1);
                assert_eq!(table.reference(1, &u64::MAX), Some(last + 1));
            }
            let other = u64::from(reference) << 32 | 1 << 31;
            table.take(1, &other, || reference);
            table.release(&other);
        }
        assert_eq!(table.reference(1, &u64::MAX), None);
        assert!(matches!(table.collisions, Collisions::Many), "the collided references are no longer stored");
        table.release(&u64::MAX);
        table.take(2, &u64::MAX, || last + 1);
        assert_eq!(table.reference(2, &u64::MAX), None, "references stay unused");
    }
}
