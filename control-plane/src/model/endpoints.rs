//! Endpoints: the union of a service's EndpointSlices.
//!
//! An address that several slices contain has the ports of all these slices. Conditions, node, zone
//! and hints belong to an address and a port, and are read from the slice that lists this port. If
//! several slices list the same port, a ready entry counts, else one that does not terminate, else
//! one that serves. Among equal entries, the slice with the last name in sorted order counts, or
//! the first if they terminate. kube-proxy (`addEndpoints` in `pkg/proxy/endpointslicecache.go`)
//! visits the slices in random order, and takes the last entry that does not terminate. In this
//! module the result depends only on the present slices, and not on the order in which they
//! arrived. A change of one slice visits only the addresses that the change affects. The exception
//! is described in `gates.rs`: pods that lack only the readiness gate of Headgate.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::IpAddr,
    sync::Arc,
};

use headgate_core::{Conditions, Endpoint, EndpointPort, Protocol, ServiceKey};

use super::{
    gates::{Gates, Place, is_unready},
    intern::Interner,
    object_set::{Outcome, Reading},
    size,
    slices::{Facts, Slice, replaces},
};
use crate::{
    objects::{ObjectKey, PodId},
    transaction::PodChange,
};

/// The slices of a service whose addresses belong to one IP family. A slice is a carrier of the
/// addresses that it contains. Endpoints are computed when they are needed and are not stored,
/// because nearly all services have only one slice for each family.
#[derive(Debug, Default)]
enum Carriers {
    #[default]
    None,
    One(Arc<ObjectKey>),
    Several(Box<Several>),
}

#[derive(Debug, Default)]
struct Several {
    /// Number of slices.
    slices: usize,
    /// The slices that contain each address, in order of name.
    by_address: HashMap<IpAddr, Vec<Arc<ObjectKey>>>,
}

impl Several {
    fn add(&mut self, slice: &Arc<ObjectKey>, address: IpAddr) {
        let carriers = self.by_address.entry(address).or_insert_with(|| Vec::with_capacity(1));
        if let Err(place) = carriers.binary_search(slice) {
            carriers.insert(place, Arc::clone(slice));
        }
    }

    fn remove(&mut self, slice: &ObjectKey, address: IpAddr) {
        let Some(carriers) = self.by_address.get_mut(&address) else { return };
        carriers.retain(|carrier| **carrier != *slice);
        if carriers.is_empty() {
            self.by_address.remove(&address);
        }
    }
}

impl Carriers {
    /// The slices that may contain an address, in order of name. No other slice contains this
    /// address.
    fn of(&self, address: IpAddr) -> &[Arc<ObjectKey>] {
        match self {
            Self::None => &[],
            Self::One(slice) => std::slice::from_ref(slice),
            Self::Several(several) => several.by_address.get(&address).map(Vec::as_slice).unwrap_or_default(),
        }
    }
}

/// The endpoint of an address before the pending changes.
#[derive(Debug)]
struct Before {
    endpoint: Option<Endpoint>,
    /// The oldest known trigger time of the pending changes; 0 if no trigger time is known.
    trigger_unix_ms: u64,
}

/// A change of an endpoint.
#[derive(Debug)]
pub(super) struct EndpointChange {
    pub(super) address: IpAddr,
    /// `None` if the endpoint was removed.
    pub(super) endpoint: Option<Endpoint>,
    pub(super) trigger_unix_ms: u64,
}

/// The result of a check whether slices disagree about a port of an address.
#[derive(Debug)]
pub(super) struct SliceConflict {
    pub(super) service: ServiceKey,
    pub(super) address: IpAddr,
    /// The slice that counts, and a slice that contradicts the first slice; `None` if the slices
    /// now agree.
    pub(super) slices: ConflictingSlices,
}

/// The version in use of each slice, and whether this version is good. A good version is used as
/// written, except for invalid entries.
type Slices = HashMap<Arc<ObjectKey>, (Slice, bool)>;

/// All slices, and the changes of endpoints that result from them.
#[derive(Debug, Default)]
pub(super) struct Endpoints {
    slices: Slices,
    /// The slices of each service, for IPv4 and for IPv6.
    services: HashMap<ServiceKey, [Carriers; 2]>,
    /// The endpoints before the pending changes.
    before: BTreeMap<ServiceKey, BTreeMap<IpAddr, Before>>,
    /// The endpoints whose pods may have changed.
    touched_pods: BTreeSet<(ServiceKey, IpAddr)>,
    conflicts: Vec<SliceConflict>,
    pub(super) gates: Gates,
    visits: u64,
}

impl Endpoints {
    /// Applies a version of a slice. `trigger_is_new` says whether the trigger time of the slice
    /// belongs to this change. The flag is false for slices of a list, because their trigger times
    /// may belong to earlier changes.
    pub(super) fn put(
        &mut self,
        key: &ObjectKey,
        reading: Reading<Slice>,
        trigger_is_new: bool,
        interner: &mut Interner,
    ) -> Outcome {
        let has_good = self.slices.get(key).is_some_and(|(_, is_good)| *is_good);
        reading.take_in(has_good, |slice, is_good| self.set(key, slice, is_good, trigger_is_new, interner))
    }

    /// The keys of the slices in use.
    pub(super) fn slice_keys(&self) -> impl Iterator<Item = &ObjectKey> {
        self.slices.keys().map(|key| &**key)
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.slices.is_empty() && self.services.is_empty() && self.before.is_empty()
    }

    /// How many addresses have been merged so far, as a measure of the work.
    #[cfg(test)]
    pub(super) fn visits(&self) -> u64 {
        self.visits
    }

    /// Adds, changes or removes a slice.
    fn set(
        &mut self,
        key: &ObjectKey,
        slice: Option<Slice>,
        is_good: bool,
        trigger_is_new: bool,
        interner: &mut Interner,
    ) {
        let shared =
            self.slices.get_key_value(key).map_or_else(|| Arc::new(key.clone()), |(shared, _)| Arc::clone(shared));
        let old = self.slices.get(key).map(|(old, _)| old);
        let trigger_of = |slice: &Slice| slice.trigger_unix_ms;
        let trigger_unix_ms = slice.as_ref().filter(|_| trigger_is_new).map(trigger_of);
        let trigger_unix_ms = trigger_unix_ms.filter(|new| old.map(trigger_of) != Some(*new)).unwrap_or(0);
        let touched = touched(old, slice.as_ref());
        self.touched_pods.extend(touched_pods(old, slice.as_ref()));
        let old_service = old.map(|old| old.service.clone());
        let new_service = slice.as_ref().map(|new| new.service.clone());
        let has_moved = old_service != new_service;
        // For each changed address: its service, whether the slice contains the address after the
        // change, and the endpoint of the address before the change.
        let mut visited = Vec::with_capacity(touched.len());
        for (address, in_old, in_new) in touched {
            let left = old_service.as_ref().filter(|_| in_old && (has_moved || !in_new));
            let entered = new_service.as_ref().filter(|_| in_new);
            for (service, carries) in left.map(|key| (key, false)).into_iter().chain(entered.map(|key| (key, true))) {
                let (endpoint, _) = self.merge(service, address, interner);
                visited.push((service, address, carries, endpoint));
            }
        }
        let old = match slice {
            Some(slice) => self.slices.insert(Arc::clone(&shared), (slice, is_good)),
            None => self.slices.remove(key),
        };
        let old = old.map(|(old, _)| old);
        self.move_carrier(&shared, old.as_ref(), &visited);
        self.move_unready(&shared, old.as_ref(), visited.iter().map(|(_, address, ..)| *address));
        for (service, address, carries, before) in visited {
            self.visits += 1;
            self.note(service, address, carries, before, trigger_unix_ms, interner);
        }
    }

    /// Updates the unready endpoints of pods after a slice has changed from `old` to its present
    /// version.
    fn move_unready(&mut self, key: &Arc<ObjectKey>, old: Option<&Slice>, addresses: impl Iterator<Item = IpAddr>) {
        if !self.gates.is_on() {
            return;
        }
        let new = self.slices.get(key).map(|(slice, _)| slice);
        for address in addresses {
            let was = old.and_then(|slice| slice.pod_facts(address));
            let is = new.and_then(|slice| slice.pod_facts(address));
            let unready = is.filter(|(_, facts)| is_unready(facts.conditions)).map(|(pod, _)| pod);
            let was = was.map(|(pod, _)| pod);
            if let Some(pod) = was.filter(|pod| unready != Some(*pod)) {
                self.gates.remove(pod, key, address);
            }
            // An endpoint of the same pod that has served is not held again.
            if let Some(pod) = unready.filter(|pod| was != Some(*pod)) {
                self.gates.add(pod, (Arc::clone(key), address));
            }
        }
    }

    /// Applies a change to the held pods, and notes the endpoints of `pods` that it changes.
    pub(super) fn change_gates(
        &mut self,
        pods: impl IntoIterator<Item = PodId>,
        change: impl FnOnce(&mut Gates),
        interner: &mut Interner,
    ) {
        let places = pods.into_iter().flat_map(|pod| self.gates.places(pod).iter().cloned());
        let before = |(slice, address): Place| {
            let service = self.slices.get(&slice)?.0.service.clone();
            let (endpoint, _) = self.merge(&service, address, interner);
            Some((service, address, endpoint))
        };
        let visited: Vec<_> = places.collect::<Vec<_>>().into_iter().filter_map(before).collect();
        change(&mut self.gates);
        for (service, address, endpoint) in visited {
            self.visits += 1;
            self.note(&service, address, true, endpoint, 0, interner);
        }
    }

    fn carriers(&self, service: &ServiceKey, address: IpAddr) -> &[Arc<ObjectKey>] {
        self.services.get(service).map(|carriers| carriers[family(address)].of(address)).unwrap_or_default()
    }

    /// Updates `services` after a slice has changed from `old` to its present version.
    fn move_carrier(
        &mut self,
        key: &Arc<ObjectKey>,
        old: Option<&Slice>,
        visited: &[(&ServiceKey, IpAddr, bool, Option<Endpoint>)],
    ) {
        let place = |slice: &Slice| Some((slice.service.clone(), family(slice.endpoints.first()?.0)));
        let was = old.and_then(place);
        let is = self.slices.get(key).and_then(|(slice, _)| place(slice));
        if was == is {
            // A service with only this slice needs no update.
            for (service, address, carries, _) in visited {
                if let Some(Carriers::Several(several)) =
                    self.services.get_mut(*service).map(|carriers| &mut carriers[family(*address)])
                {
                    if *carries { several.add(key, *address) } else { several.remove(key, *address) }
                }
            }
            return;
        }
        if let (Some((service, family)), Some(old)) = (was, old) {
            self.leave(&service, family, key, old);
        }
        if let Some((service, family)) = is {
            self.enter(service, family, key);
        }
    }

    fn leave(&mut self, service: &ServiceKey, family: usize, key: &ObjectKey, old: &Slice) {
        let Some(families) = self.services.get_mut(service) else { return };
        let carriers = &mut families[family];
        match carriers {
            Carriers::None => {}
            Carriers::One(_) => *carriers = Carriers::None,
            Carriers::Several(several) => {
                several.slices -= 1;
                old.endpoints.iter().for_each(|(address, _)| several.remove(key, *address));
                if several.slices == 1
                    && let Some(last) = several.by_address.values().flatten().next()
                {
                    *carriers = Carriers::One(Arc::clone(last));
                }
            }
        }
        if families.iter().all(|carriers| matches!(carriers, Carriers::None)) {
            self.services.remove(service);
        }
    }

    fn enter(&mut self, service: ServiceKey, family: usize, key: &Arc<ObjectKey>) {
        let carriers = &mut self.services.entry(service).or_default()[family];
        let several = match carriers {
            Carriers::None => {
                *carriers = Carriers::One(Arc::clone(key));
                return;
            }
            Carriers::One(first) => {
                let mut several = Several { slices: 1, ..Several::default() };
                if let Some((slice, _)) = self.slices.get(first) {
                    slice.endpoints.iter().for_each(|(address, _)| several.add(first, *address));
                }
                *carriers = Carriers::Several(Box::new(several));
                carriers
            }
            Carriers::Several(_) => carriers,
        };
        if let (Carriers::Several(several), Some((slice, _))) = (several, self.slices.get(key)) {
            several.slices += 1;
            slice.endpoints.iter().for_each(|(address, _)| several.add(key, *address));
        }
    }

    /// Records the endpoint that an address had before the change (`before`), if the endpoint has
    /// changed. Also records whether slices disagree about the address.
    fn note(
        &mut self,
        service: &ServiceKey,
        address: IpAddr,
        carries: bool,
        before: Option<Endpoint>,
        trigger_unix_ms: u64,
        interner: &mut Interner,
    ) {
        let is_shared = self.carriers(service, address).len() > 1;
        let (endpoint, conflict) = self.merge(service, address, interner);
        if before != endpoint {
            let of_service = self.before.entry(service.clone()).or_default();
            let before = of_service.entry(address).or_insert(Before { endpoint: before, trigger_unix_ms });
            before.trigger_unix_ms = older(before.trigger_unix_ms, trigger_unix_ms);
        }
        if is_shared {
            // Conditions decide which slice names the pod.
            self.touched_pods.insert((service.clone(), address));
        }
        if is_shared || !carries {
            self.conflicts.push(SliceConflict { service: service.clone(), address, slices: conflict });
        }
    }

    /// The results of all checks for disagreeing slices since the last call.
    pub(super) fn take_conflicts(&mut self) -> Vec<SliceConflict> {
        std::mem::take(&mut self.conflicts)
    }

    /// The pods that may have changed since the last call.
    pub(super) fn take_pods(&mut self) -> Vec<PodChange> {
        let touched = std::mem::take(&mut self.touched_pods);
        let change = |(service, address): (ServiceKey, IpAddr)| {
            let pod = |entry: Entry<'_>| Some((entry.conditions, self.slices.get(entry.slice)?.0.pod(address)?));
            let pods = self.entries(&service, address).filter_map(pod);
            let counts = pods.reduce(|used, pod| if replaces(pod.0, used.0) { pod } else { used });
            PodChange { service, address, pod: counts.map(|(_, pod)| pod) }
        };
        touched.into_iter().map(change).collect()
    }

    /// The entries of all slices for one address.
    fn entries(&self, service: &ServiceKey, address: IpAddr) -> impl Iterator<Item = Entry<'_>> {
        self.carriers(service, address).iter().filter_map(move |key| {
            let (slice, _) = self.slices.get(key)?;
            let facts = slice.facts(address)?;
            let is_held = is_unready(facts.conditions)
                && self.gates.is_on()
                && slice.pod_facts(address).is_some_and(|(pod, _)| self.gates.holds(pod, key, address));
            let held = Conditions { ready: true, serving: true, terminating: false };
            let conditions = if is_held { held } else { facts.conditions };
            Some(Entry { slice: key, ports: &slice.ports, facts, conditions })
        })
    }

    /// Merges the entries of all slices for one address. If the merged endpoint is too large to be
    /// sent, the result has the ports of one slice only. Also returns two slices that disagree, if
    /// any.
    fn merge(
        &self,
        service: &ServiceKey,
        address: IpAddr,
        interner: &mut Interner,
    ) -> (Option<Endpoint>, ConflictingSlices) {
        let entries = || self.entries(service, address);
        let mut rest = entries();
        let Some(first) = rest.next() else { return (None, None) };
        if rest.next().is_none() {
            return (first.alone(address), None);
        }
        let mut counting: BTreeMap<(&str, Protocol, u16), Entry<'_>> = BTreeMap::new();
        for entry in entries() {
            for port in entry.ports.iter() {
                let counts = counting.entry(port.key()).or_insert(entry);
                if replaces(entry.conditions, counts.conditions) {
                    *counts = entry;
                }
            }
        }
        let Some(main) = counting.values().next().copied() else { return (None, None) };
        let port = |((name, protocol, number), entry): (&(&str, Protocol, u16), &Entry<'_>)| EndpointPort {
            conditions: Some(entry.conditions).filter(|conditions| *conditions != main.conditions),
            placement: Some(&entry.facts.placement).filter(|placement| **placement != main.facts.placement).cloned(),
            ..EndpointPort::new(*name, *protocol, *number)
        };
        let endpoint = Endpoint {
            address,
            ports: interner.ports(counting.iter().map(port).collect()),
            conditions: main.conditions,
            placement: Arc::clone(&main.facts.placement),
        };
        let conflict = entries().find_map(|entry| {
            let mut used = entry.ports.iter().filter_map(|port| counting.get(&port.key()));
            used.find(|used| used.facts.conflicts_with(entry.facts))?.conflict(entry)
        });
        if size::may_be_sent(&endpoint) {
            return (Some(endpoint), conflict);
        }
        let later = |used: Entry<'_>, entry: Entry<'_>| replaces(entry.conditions, used.conditions);
        let used = entries().skip(1).fold(first, |used, entry| if later(used, entry) { entry } else { used });
        let other = entries().find(|entry| entry.slice != used.slice);
        (used.alone(address), conflict.or_else(|| used.conflict(other?)))
    }

    /// The endpoints that have changed since the last call, by service and address.
    pub(super) fn take_changes(&mut self, interner: &mut Interner) -> BTreeMap<ServiceKey, Vec<EndpointChange>> {
        let mut changes = BTreeMap::new();
        for (service, addresses) in std::mem::take(&mut self.before) {
            let mut of_service = Vec::with_capacity(addresses.len());
            for (address, before) in addresses {
                let (endpoint, _) = self.merge(&service, address, interner);
                if before.endpoint != endpoint {
                    of_service.push(EndpointChange { address, endpoint, trigger_unix_ms: before.trigger_unix_ms });
                }
            }
            if !of_service.is_empty() {
                changes.insert(service, of_service);
            }
        }
        changes
    }
}

/// Index of the address's family in the arrays of `Endpoints::services`.
fn family(address: IpAddr) -> usize {
    usize::from(address.is_ipv6())
}

/// The earlier of two trigger times, where 0 means unknown.
fn older(a_unix_ms: u64, b_unix_ms: u64) -> u64 {
    match (a_unix_ms, b_unix_ms) {
        (0, other) | (other, 0) => other,
        (a, b) => a.min(b),
    }
}

/// The addresses on which two versions of a slice differ. For each address, the result says whether
/// the old version and whether the new version contain the address.
fn touched(old_slice: Option<&Slice>, new_slice: Option<&Slice>) -> Vec<(IpAddr, bool, bool)> {
    let pod = |slice: Option<&Slice>, rest: &[(IpAddr, Facts)]| {
        slice.and_then(|slice| slice.pod_at(slice.endpoints.len().checked_sub(rest.len())?))
    };
    let is_other = match (old_slice, new_slice) {
        (Some(old), Some(new)) => old.ports != new.ports || old.service != new.service,
        _ => true,
    };
    let (mut left, mut right) = (
        old_slice.map(|slice| slice.endpoints.as_slice()).unwrap_or_default(),
        new_slice.map(|slice| slice.endpoints.as_slice()).unwrap_or_default(),
    );
    let mut touched = Vec::new();
    loop {
        let entry = match (left.first(), right.first()) {
            (None, None) => return touched,
            (Some((a, _)), Some((b, _))) if a < b => (*a, true, false),
            (Some((a, _)), None) => (*a, true, false),
            (Some((a, old)), Some((b, new))) if a == b => {
                let has_other_pod = pod(old_slice, left) != pod(new_slice, right);
                (left, right) = (&left[1..], &right[1..]);
                if is_other || has_other_pod || old != new {
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

/// The endpoints whose pods differ between two versions of a slice.
fn touched_pods(old: Option<&Slice>, new: Option<&Slice>) -> Vec<(ServiceKey, IpAddr)> {
    let lacks = |other: Option<&Slice>, slice: &Slice, address: IpAddr| {
        other.is_none_or(|other| other.service != slice.service || other.pod(address) != slice.pod(address))
    };
    let only_in = |slice: Option<&Slice>, other: Option<&Slice>| {
        let pods = slice.into_iter().flat_map(|slice| slice.pod_addresses().map(move |address| (slice, address)));
        let touched = pods.filter(|(slice, address)| lacks(other, slice, *address));
        touched.map(|(slice, address)| (slice.service.clone(), address)).collect::<Vec<_>>()
    };
    let mut touched = only_in(old, new);
    touched.extend(only_in(new, old));
    touched
}

type ConflictingSlices = Option<(Arc<ObjectKey>, Arc<ObjectKey>)>;

/// The entry of one slice for an address.
#[derive(Clone, Copy)]
struct Entry<'a> {
    slice: &'a Arc<ObjectKey>,
    ports: &'a Arc<[EndpointPort]>,
    facts: &'a Facts,
    /// The conditions of the facts, or of a ready endpoint if the pod is held.
    conditions: Conditions,
}

impl Entry<'_> {
    /// The endpoint with the ports of this slice only; `None` if the slice has no ports, because
    /// nothing can be sent to an endpoint without ports.
    fn alone(self, address: IpAddr) -> Option<Endpoint> {
        (!self.ports.is_empty()).then(|| Endpoint {
            address,
            ports: Arc::clone(self.ports),
            conditions: self.conditions,
            placement: Arc::clone(&self.facts.placement),
        })
    }

    fn conflict(self, other: Self) -> ConflictingSlices {
        Some((Arc::clone(self.slice), Arc::clone(other.slice)))
    }
}
