//! Endpoints: the union of a service's EndpointSlices.
//!
//! Several slices may carry an address. Its ports are the union over them. Conditions, node, zone
//! and hints belong to address and port: each port has those of the slices that list this port.
//! Where several do, the slice whose name comes last counts, but a terminating entry never replaces
//! another. kube-proxy decides by the same rule (`addEndpoints` in `pkg/proxy/endpointslicecache.go`),
//! with slices in random order. Here the result depends on the slices that there are, never on the
//! order in which they came. A change of one slice visits the addresses that it touches.

use std::{
    collections::{BTreeMap, HashMap},
    net::IpAddr,
    sync::Arc,
};

use headgate_core::{Endpoint, EndpointPort, Protocol, ServiceKey};

use super::{
    intern::Interner,
    size,
    slices::{Facts, Slice},
};
use crate::source::objects::ObjectKey;

/// An address of a service.
#[derive(Debug)]
struct Merged {
    /// The result; `None` if no slice gives it a port, since then nothing can be sent to it.
    endpoint: Option<Endpoint>,
    /// Slices that carry it, in order of name.
    carriers: Vec<Arc<ObjectKey>>,
}

/// An address before the change that is going on.
#[derive(Debug)]
struct Before {
    endpoint: Option<Endpoint>,
    /// The oldest trigger of the changes since; 0 if none said.
    trigger_unix_ms: u64,
}

/// A change of an endpoint.
#[derive(Debug)]
pub(super) struct EndpointChange {
    pub(super) address: IpAddr,
    /// `None` if it is gone.
    pub(super) endpoint: Option<Endpoint>,
    pub(super) trigger_unix_ms: u64,
}

/// Slices that disagree on a port of an address; `None` if they now agree.
#[derive(Debug)]
pub(super) struct Agreement {
    pub(super) service: ServiceKey,
    pub(super) address: IpAddr,
    /// The slice that counts, and one that says otherwise.
    pub(super) dispute: Option<(Arc<ObjectKey>, Arc<ObjectKey>)>,
}

/// All slices, and what they come to.
#[derive(Debug, Default)]
pub(super) struct Endpoints {
    slices: HashMap<Arc<ObjectKey>, (Slice, bool)>,
    services: HashMap<ServiceKey, HashMap<IpAddr, Merged>>,
    before: BTreeMap<ServiceKey, BTreeMap<IpAddr, Before>>,
    agreements: Vec<Agreement>,
    visits: u64,
}

impl Endpoints {
    /// Whether a good version of a slice is in use.
    pub(super) fn has_good(&self, key: &ObjectKey) -> bool {
        self.slices.get(key).is_some_and(|(_, is_good)| *is_good)
    }

    /// Whether any version of a slice is in use.
    pub(super) fn contains(&self, key: &ObjectKey) -> bool {
        self.slices.contains_key(key)
    }

    /// Slices in use.
    pub(super) fn slice_keys(&self) -> impl Iterator<Item = &ObjectKey> {
        self.slices.keys().map(|key| &**key)
    }

    /// Addresses that were merged so far: the measure of work done.
    pub(super) fn visits(&self) -> u64 {
        self.visits
    }

    /// Puts, changes or removes a slice. `times_changes`: whether its trigger time is about this change, which it is not in a list.
    pub(super) fn set(
        &mut self,
        key: &ObjectKey,
        slice: Option<Slice>,
        is_good: bool,
        times_changes: bool,
        interner: &mut Interner,
    ) {
        let shared =
            self.slices.get_key_value(key).map_or_else(|| Arc::new(key.clone()), |(shared, _)| Arc::clone(shared));
        let old = self.slices.remove(key).map(|(old, _)| old);
        let trigger_unix_ms = match (&old, &slice) {
            (_, None) => 0,
            (Some(old), Some(new)) if old.trigger_unix_ms == new.trigger_unix_ms => 0,
            (_, Some(new)) => new.trigger_unix_ms,
        };
        let touched = touched(old.as_ref(), slice.as_ref());
        let (old_service, new_service) = (old.map(|old| old.service), slice.as_ref().map(|new| new.service.clone()));
        if let Some(slice) = slice {
            self.slices.insert(Arc::clone(&shared), (slice, is_good));
        }
        let trigger_unix_ms = if times_changes { trigger_unix_ms } else { 0 };
        for (address, in_old, in_new) in touched {
            let moved = old_service != new_service;
            if let Some(service) = &old_service
                && in_old
                && (moved || !in_new)
            {
                self.carry(service, address, &shared, false, trigger_unix_ms, interner);
            }
            if let Some(service) = &new_service
                && in_new
            {
                self.carry(service, address, &shared, true, trigger_unix_ms, interner);
            }
        }
    }

    /// Notes whether a slice carries an address, and merges that address anew.
    fn carry(
        &mut self,
        service: &ServiceKey,
        address: IpAddr,
        slice: &Arc<ObjectKey>,
        carries: bool,
        trigger_unix_ms: u64,
        interner: &mut Interner,
    ) {
        self.visits += 1;
        if !self.services.contains_key(service) {
            self.services.insert(service.clone(), HashMap::new());
        }
        let Some(addresses) = self.services.get_mut(service) else { return };
        let merged =
            addresses.entry(address).or_insert_with(|| Merged { endpoint: None, carriers: Vec::with_capacity(1) });
        match (merged.carriers.binary_search(slice), carries) {
            (Err(place), true) => merged.carriers.insert(place, Arc::clone(slice)),
            (Ok(place), false) => drop(merged.carriers.remove(place)),
            _ => {}
        }
        let is_gone = merged.carriers.is_empty();
        let could_dispute = merged.carriers.len() > 1 || !carries;
        let (endpoint, dispute) = merge(&self.slices, address, &merged.carriers, interner);
        if merged.endpoint != endpoint {
            let old = std::mem::replace(&mut merged.endpoint, endpoint);
            if !self.before.contains_key(service) {
                self.before.insert(service.clone(), BTreeMap::new());
            }
            if let Some(before) = self.before.get_mut(service) {
                let before = before.entry(address).or_insert(Before { endpoint: old, trigger_unix_ms });
                before.trigger_unix_ms = older(before.trigger_unix_ms, trigger_unix_ms);
            }
        }
        if is_gone {
            addresses.remove(&address);
            if addresses.is_empty() {
                self.services.remove(service);
            }
        }
        if could_dispute {
            self.agreements.push(Agreement { service: service.clone(), address, dispute });
        }
    }

    /// Addresses on which slices began or ceased to disagree, since the last call.
    pub(super) fn take_agreements(&mut self) -> Vec<Agreement> {
        std::mem::take(&mut self.agreements)
    }

    /// What differs since the last call, by service and address.
    pub(super) fn take_changes(&mut self) -> BTreeMap<ServiceKey, Vec<EndpointChange>> {
        let mut changes = BTreeMap::new();
        for (service, addresses) in std::mem::take(&mut self.before) {
            let now = self.services.get(&service);
            let mut of_service = Vec::with_capacity(addresses.len());
            for (address, before) in addresses {
                let endpoint = now.and_then(|now| now.get(&address)).and_then(|merged| merged.endpoint.as_ref());
                if before.endpoint.as_ref() != endpoint {
                    let (endpoint, trigger_unix_ms) = (endpoint.cloned(), before.trigger_unix_ms);
                    of_service.push(EndpointChange { address, endpoint, trigger_unix_ms });
                }
            }
            if !of_service.is_empty() {
                changes.insert(service, of_service);
            }
        }
        changes
    }
}

fn older(a_unix_ms: u64, b_unix_ms: u64) -> u64 {
    match (a_unix_ms, b_unix_ms) {
        (0, other) | (other, 0) => other,
        (a, b) => a.min(b),
    }
}

/// Addresses for which two versions of a slice differ, and in which of the two each is.
fn touched(old: Option<&Slice>, new: Option<&Slice>) -> Vec<(IpAddr, bool, bool)> {
    let is_other = match (old, new) {
        (Some(old), Some(new)) => old.ports != new.ports || old.service != new.service,
        _ => true,
    };
    let (mut left, mut right) = (
        old.map(|slice| slice.endpoints.as_slice()).unwrap_or_default(),
        new.map(|slice| slice.endpoints.as_slice()).unwrap_or_default(),
    );
    let mut touched = Vec::new();
    loop {
        let entry = match (left.first(), right.first()) {
            (None, None) => return touched,
            (Some((a, _)), Some((b, _))) if a < b => (*a, true, false),
            (Some((a, _)), None) => (*a, true, false),
            (Some((a, old)), Some((b, new))) if a == b => {
                (left, right) = (&left[1..], &right[1..]);
                if is_other || old != new {
                    touched.push((*a, true, true));
                }
                continue;
            }
            (_, Some((b, _))) => (*b, false, true),
        };
        if entry.1 {
            left = &left[1..];
        } else {
            right = &right[1..];
        }
        touched.push(entry);
    }
}

type Dispute = Option<(Arc<ObjectKey>, Arc<ObjectKey>)>;

/// What one slice says of an address.
#[derive(Clone, Copy)]
struct Entry<'a> {
    slice: &'a Arc<ObjectKey>,
    ports: &'a Arc<[EndpointPort]>,
    facts: &'a Facts,
}

impl Entry<'_> {
    /// The endpoint, if this slice alone gives it ports; `None` without any, since nothing can be sent to it.
    fn alone(self, address: IpAddr) -> Option<Endpoint> {
        (!self.ports.is_empty()).then(|| Endpoint {
            address,
            ports: Arc::clone(self.ports),
            conditions: self.facts.conditions,
            placement: Arc::clone(&self.facts.placement),
        })
    }

    fn dispute(self, other: Self) -> Dispute {
        Some((Arc::clone(self.slice), Arc::clone(other.slice)))
    }
}

/// One address from all slices that carry it.
fn merge(
    slices: &HashMap<Arc<ObjectKey>, (Slice, bool)>,
    address: IpAddr,
    carriers: &[Arc<ObjectKey>],
    interner: &mut Interner,
) -> (Option<Endpoint>, Dispute) {
    let entries = || {
        carriers.iter().filter_map(|key| {
            let (slice, _) = slices.get(key)?;
            Some(Entry { slice: key, ports: &slice.ports, facts: slice.facts(address)? })
        })
    };
    let mut rest = entries();
    let Some(first) = rest.next() else { return (None, None) };
    if rest.next().is_none() {
        return (first.alone(address), None);
    }
    let mut counting: BTreeMap<(&str, Protocol, u16), Entry<'_>> = BTreeMap::new();
    for entry in entries() {
        for port in entry.ports.iter() {
            let counts = counting.entry(port.key()).or_insert(entry);
            if entry.facts.replaces() {
                *counts = entry;
            }
        }
    }
    let Some(main) = counting.values().next().map(|entry| entry.facts) else { return (None, None) };
    let port = |((name, protocol, number), entry): (&(&str, Protocol, u16), &Entry<'_>)| EndpointPort {
        conditions: Some(entry.facts.conditions).filter(|conditions| *conditions != main.conditions),
        placement: Some(&entry.facts.placement).filter(|placement| **placement != main.placement).cloned(),
        ..EndpointPort::new(*name, *protocol, *number)
    };
    let endpoint = Endpoint {
        address,
        ports: interner.ports(counting.iter().map(port).collect()),
        conditions: main.conditions,
        placement: Arc::clone(&main.placement),
    };
    let dispute = entries().find_map(|entry| {
        let mut used = entry.ports.iter().filter_map(|port| counting.get(&port.key()));
        used.find(|used| used.facts.disputes(entry.facts))?.dispute(entry)
    });
    if size::may_be_sent(&endpoint) {
        return (Some(endpoint), dispute);
    }
    let used = entries().skip(1).fold(first, |used, entry| if entry.facts.replaces() { entry } else { used });
    let other = entries().find(|entry| entry.slice != used.slice);
    (used.alone(address), dispute.or_else(|| used.dispute(other?)))
}
