//! What changes may refer to (contract, 13): what the state holds, since when without a break, and by which reference.

use std::{collections::HashMap, hash::Hash, sync::Arc};

use headgate_core::{Change, Endpoint, EndpointPort, Placement, ServiceKey, reference::Referrer};
use headgate_proto::References;

/// One thing that the state holds.
#[derive(Debug)]
struct Name {
    reference: u32,
    users: u32,
    /// Version that brought it.
    since: u64,
}

/// Things of one kind.
#[derive(Debug)]
struct Table<T> {
    names: HashMap<T, Name>,
    /// How many have a reference: more than one cannot be referred to.
    holders: HashMap<u32, u32>,
}

impl<T> Default for Table<T> {
    fn default() -> Self {
        Self { names: HashMap::new(), holders: HashMap::new() }
    }
}

/// See the module.
#[derive(Debug)]
pub(super) struct Names {
    referrer: Referrer,
    services: Table<ServiceKey>,
    placements: Table<Arc<Placement>>,
    ports: Table<Arc<[EndpointPort]>>,
}

impl<T: Clone + Eq + Hash> Table<T> {
    fn take(&mut self, version: u64, value: &T, reference: impl FnOnce() -> u32) {
        if let Some(name) = self.names.get_mut(value) {
            name.users = name.users.saturating_add(1);
            return;
        }
        let reference = reference();
        *self.holders.entry(reference).or_default() += 1;
        self.names.insert(value.clone(), Name { reference, users: 1, since: version });
    }

    fn release(&mut self, value: &T) {
        let Some(name) = self.names.get_mut(value) else { return };
        name.users -= 1;
        if name.users > 0 {
            return;
        }
        let reference = name.reference;
        self.names.remove(value);
        if let Some(holders) = self.holders.get_mut(&reference) {
            *holders -= 1;
            if *holders == 0 {
                self.holders.remove(&reference);
            }
        }
    }

    fn reference(&self, version: u64, value: &T) -> Option<u32> {
        let name = self.names.get(value).filter(|name| name.since <= version)?;
        (self.holders.get(&name.reference) == Some(&1)).then_some(name.reference)
    }
}

impl Names {
    pub(super) fn new(epoch: u64) -> Self {
        let (services, placements, ports) = Default::default();
        Self { referrer: Referrer::new(epoch), services, placements, ports }
    }

    /// `version` brought a Service that was not there.
    pub(super) fn take_service(&mut self, version: u64, key: &ServiceKey) {
        self.services.take(version, key, || self.referrer.service(key));
    }

    /// A Service is gone.
    pub(super) fn release_service(&mut self, key: &ServiceKey) {
        self.services.release(key);
    }

    /// `version` brought an endpoint, or a new value of one.
    pub(super) fn take_endpoint(&mut self, version: u64, endpoint: &Endpoint) {
        self.placements.take(version, &endpoint.placement, || self.referrer.placement(&endpoint.placement));
        self.ports.take(version, &endpoint.ports, || self.referrer.ports(&endpoint.ports));
    }

    /// An endpoint is gone, or had this value before.
    pub(super) fn release_endpoint(&mut self, endpoint: &Endpoint) {
        self.placements.release(&endpoint.placement);
        self.ports.release(&endpoint.ports);
    }

    /// What of a change a receiver who is at `version` can be told by references.
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

    /// Number of things.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.services.names.len() + self.placements.names.len() + self.ports.names.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_shares_a_reference_or_is_newer_is_not_referred_to() {
        let mut table = Table::default();
        table.take(3, &"web", || 7);
        assert_eq!((table.reference(2, &"web"), table.reference(3, &"web")), (None, Some(7)));
        table.take(4, &"db", || 7);
        assert_eq!((table.reference(9, &"web"), table.reference(9, &"db")), (None, None));
        table.release(&"db");
        assert_eq!(table.reference(3, &"web"), Some(7));
        table.take(5, &"web", || 7);
        table.release(&"web");
        assert_eq!(table.reference(3, &"web"), Some(7), "it was there all the time");
        table.release(&"web");
        table.take(6, &"web", || 7);
        assert_eq!((table.reference(5, &"web"), table.reference(6, &"web")), (None, Some(7)), "it came back");
        table.release(&"web");
        assert!(table.names.is_empty() && table.holders.is_empty());
    }
}
