//! Endpoints: the union of a service's EndpointSlices.
//!
//! An address that several slices contain has the ports of all these slices. Conditions, node, zone
//! and hints belong to an address and a port, and are read from the slice that lists this port. If
//! several slices list the same port, a ready entry counts, else one that does not terminate, else
//! one that serves. Among equal entries, the slice with the last name in sorted order counts, or
//! the first if they terminate. kube-proxy (`addEndpoints` in `pkg/proxy/endpointslicecache.go`)
//! visits the slices in random order, and takes the last entry that does not terminate. In this
//! module the result depends only on the present slices, and not on the order in which they
//! arrived. A change of one slice visits only the addresses that the change affects, and for each
//! of them only slices that contain the address, and one other. The exception is
//! described at [`Gates`]: pods that lack only the readiness gate of Headgate.

use std::{
    cell::Cell,
    cmp::Ordering,
    collections::{BTreeMap, BTreeSet, HashMap},
    iter,
    net::IpAddr,
    sync::Arc,
};

use headgate_core::{
    Change, Conditions, Endpoint, EndpointPort, Family, Hints, Placement, Pool, Protocol, ServiceKey, Weight,
    addresses::AddressUse,
};

use super::{
    ModelSettings,
    parse::{self, Findings, Outcome, Reading},
};
use crate::{
    model::{GateChange, GatedPod, PodChange, Problem, TriggeredChange},
    objects::{self, GateState, ObjectKey, PodId, keys},
};

/// The endpoint of an address before the pending changes.
#[derive(Debug)]
struct Before {
    endpoint: Option<Endpoint>,
    /// The oldest known trigger time of the pending changes; 0 if no trigger time is known.
    trigger_unix_ms: u64,
}

/// The slice that counts, and a slice that contradicts the first slice.
pub(super) type Conflict = [Arc<ObjectKey>; 2];

/// The size of a slice, used or left out.
#[derive(Debug)]
struct Size {
    key: Arc<ObjectKey>,
    /// The numbers of its endpoints in each family.
    endpoints: [usize; 2],
    ports: usize,
    is_left_out: bool,
}

impl Size {
    fn of(key: &Arc<ObjectKey>, slice: &Slice) -> Self {
        let is_v6 = slice.endpoints.first().is_some_and(|(address, _)| address.is_ipv6());
        let count = slice.endpoints.len();
        let endpoints = if is_v6 { [0, count] } else { [count, 0] };
        Self { key: Arc::clone(key), endpoints, ports: slice.ports.len(), is_left_out: false }
    }

    /// The endpoint ports. A node compares each endpoint with each port of the Service, and the
    /// model keeps endpoints without ports, and slices without endpoints.
    fn endpoint_ports(&self, service_ports: usize) -> usize {
        (self.endpoints.iter().sum::<usize>() * self.ports.max(service_ports).max(1)).max(1)
    }
}

/// The sizes of the slices of a service.
#[derive(Debug, Default)]
struct Sizes {
    service_ports: usize,
    /// The slices in the order of their names, also those that are left out.
    slices: Vec<Size>,
    /// The place of the first change since the last choice.
    changed_from: Option<usize>,
    /// The endpoint ports of all slices, and of those that are used.
    total: usize,
    used: usize,
    /// The endpoints of all slices, of each family.
    endpoints: [usize; 2],
}

impl Sizes {
    /// Sets the size of a slice; `None` removes the slice.
    fn set(&mut self, key: &Arc<ObjectKey>, size: Option<Size>) {
        let place = self.slices.binary_search_by(|other| other.key.cmp(key));
        let old = place.ok().map(|at| self.slices.remove(at));
        let at = place.unwrap_or_else(|at| at);
        let facts = |size: &Size| (size.endpoints, size.ports);
        if old.as_ref().map(facts) != size.as_ref().map(facts) {
            self.changed_from = Some(at);
        }
        let is_left_out = old.as_ref().is_some_and(|old| old.is_left_out);
        if let Some(size) = size.map(|size| Size { is_left_out, ..size }) {
            self.count(&size, usize::wrapping_add);
            self.slices.insert(at, size);
        }
        old.iter().for_each(|old| self.count(old, usize::wrapping_sub));
    }

    fn count(&mut self, size: &Size, change: fn(usize, usize) -> usize) {
        let endpoint_ports = size.endpoint_ports(self.service_ports);
        self.total = change(self.total, endpoint_ports);
        self.used = change(self.used, if size.is_left_out { 0 } else { endpoint_ports });
        self.endpoints = [0, 1].map(|family| change(self.endpoints[family], size.endpoints[family]));
    }

    fn set_service_ports(&mut self, ports: usize) {
        let slices = std::mem::take(&mut self.slices);
        *self = Self { service_ports: ports, ..Self::default() };
        slices.iter().for_each(|size| self.count(size, usize::wrapping_add));
        (self.slices, self.changed_from) = (slices, Some(0));
    }

    /// Chooses the slices for which a budget has room, if that may have changed. Returns the slices
    /// that were used and are not, or the reverse. The cost grows with the slices that follow the
    /// one that has changed, if the service is or was over its budget.
    fn choose(&mut self, budget: usize, visits: &Cell<u64>) -> Vec<Arc<ObjectKey>> {
        let mut moved = Vec::new();
        let may_move = self.total > budget || self.used < self.total;
        let Some(first) = self.changed_from.filter(|_| may_move) else { return moved };
        let ports = self.service_ports;
        let used = self.slices[first..].iter().filter(|size| !size.is_left_out);
        self.used -= used.map(|size| size.endpoint_ports(ports)).sum::<usize>();
        for size in &mut self.slices[first..] {
            visits.update(|visits| visits + 1);
            let used = self.used + size.endpoint_ports(ports);
            let is_over = used > budget;
            self.used = if is_over { self.used } else { used };
            if std::mem::replace(&mut size.is_left_out, is_over) != is_over {
                moved.push(Arc::clone(&size.key));
            }
        }
        moved
    }

    fn leaves_out(&self, key: &ObjectKey) -> bool {
        self.slices.binary_search_by(|size| (*size.key).cmp(key)).is_ok_and(|at| self.slices[at].is_left_out)
    }

    /// What is left out of a service with this budget; `None` if nothing is.
    fn excess(&self, service: &ServiceKey, budget: usize) -> Option<Problem> {
        let slices = if self.used < self.total { &*self.slices } else { &[] };
        let mut left_out = slices.iter().filter(|size| size.is_left_out);
        let first = &left_out.next()?.key;
        let message = format!(
            "its EndpointSlices have {} endpoint ports (each address with each port of its slice, or of the Service if it has more), \
             and a Service may have {budget}: give fewer endpoints or ports, divide the Service, or raise --service-budget of the control \
             plane; {} of the slices, such as {first}, are left out",
            self.total,
            1 + left_out.count()
        );
        let (object, field) = (format!("Service {service}"), "endpoints".to_owned());
        Some(Problem { object, field, message, ..Problem::default() })
    }
}

/// The slices of a service with addresses of one IP family. Nearly all services have only one slice
/// for each family, so only the addresses of further slices have an index.
#[derive(Debug)]
struct Carriers {
    /// One of the slices.
    main: Arc<ObjectKey>,
    /// Each address of the other slices, with the slice. A range begins at `None`, which precedes
    /// every slice; no entry is `None`.
    others: BTreeSet<(IpAddr, Option<Arc<ObjectKey>>)>,
}

/// All slices, and the changes of endpoints that result from them. Endpoints are computed when they
/// are needed and are not stored.
#[derive(Debug, Default)]
pub(super) struct Endpoints {
    /// The good version of each slice, or another one.
    held: HashMap<Arc<ObjectKey>, (Arc<Slice>, bool)>,
    /// The slices in use, without those beyond their services' budget.
    slices: HashMap<Arc<ObjectKey>, Arc<Slice>>,
    sizes: HashMap<ServiceKey, Sizes>,
    pub(super) settings: Arc<ModelSettings>,
    /// The services whose number of endpoints may have changed since the model took them.
    pub(super) resized: BTreeSet<ServiceKey>,
    /// The services whose slices or ports have changed, and what is over their budget.
    pub(super) excesses: Vec<(ServiceKey, Option<Problem>)>,
    /// The slices of each service, for IPv4 and for IPv6.
    services: [HashMap<ServiceKey, Carriers>; 2],
    /// The endpoints before the pending changes.
    before: BTreeMap<ServiceKey, BTreeMap<IpAddr, Before>>,
    /// The endpoints whose pods may have changed.
    touched_pods: BTreeSet<(ServiceKey, IpAddr)>,
    /// Checked addresses: whether slices disagree about a port; `None` if they agree.
    pub(super) conflicts: Vec<(ServiceKey, IpAddr, Option<Conflict>)>,
    pub(super) gates: Gates,
    visits: Cell<u64>,
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
        let has_good = self.held.get(key).is_some_and(|(_, is_good)| *is_good);
        reading.take_in(has_good, |slice, is_good| self.admit(key, slice, is_good, trigger_is_new, interner))
    }

    /// Adds, changes or removes a slice, and uses the slices for which there is room.
    fn admit(
        &mut self,
        key: &ObjectKey,
        slice: Option<Slice>,
        is_good: bool,
        trigger_is_new: bool,
        interner: &mut Interner,
    ) {
        let (key, old) = match self.held.remove_entry(key) {
            Some((key, (old, _))) => (key, Some(old)),
            None => (Arc::new(key.clone()), None),
        };
        let new = slice.map(Arc::new);
        let services: BTreeSet<_> = old.iter().chain(&new).map(|slice| slice.service.clone()).collect();
        let mut moved = Vec::new();
        for service in &services {
            let sizes = self.sizes.entry(service.clone()).or_default();
            let of_service = new.as_ref().filter(|new| new.service == *service);
            sizes.set(&key, of_service.map(|slice| Size::of(&key, slice)));
            moved.extend(sizes.choose(self.settings.endpoint_ports(), &self.visits));
        }
        moved.retain(|other| *other != key);
        let fits = |slice: &&Arc<Slice>| !self.sizes[&slice.service].leaves_out(&key);
        self.set(&key, new.as_ref().filter(fits), trigger_is_new, interner);
        self.held.extend(new.map(|new| (key, (new, is_good))));
        self.settle(services, moved, interner);
    }

    /// Leaves out or uses slices after the size of one, or a service's ports, changed.
    fn settle(&mut self, services: BTreeSet<ServiceKey>, moved: Vec<Arc<ObjectKey>>, interner: &mut Interner) {
        for key in moved {
            let (slice, is_used) = (Arc::clone(&self.held[&key].0), self.slices.contains_key(&key));
            self.set(&key, Some(&slice).filter(|_| !is_used), false, interner);
        }
        for service in services {
            let Some(sizes) = self.sizes.get_mut(&service) else { continue };
            if sizes.changed_from.take().is_none() {
                continue;
            }
            self.excesses.push((service.clone(), sizes.excess(&service, self.settings.endpoint_ports())));
            if sizes.slices.is_empty() && sizes.service_ports == 0 {
                self.sizes.remove(&service);
            }
            self.resized.insert(service);
        }
    }

    /// Takes in a Service with this number of ports; 0 without the Service.
    pub(super) fn set_service_ports(&mut self, service: ServiceKey, ports: usize, interner: &mut Interner) {
        self.resized.insert(service.clone());
        if self.sizes.get(&service).map_or(0, |sizes| sizes.service_ports) != ports {
            let sizes = self.sizes.entry(service.clone()).or_default();
            sizes.set_service_ports(ports);
            let moved = sizes.choose(self.settings.endpoint_ports(), &self.visits);
            self.settle([service].into(), moved, interner);
        }
    }

    /// At most how many endpoints a service has in each family.
    pub(super) fn counts(&self, service: &ServiceKey) -> [usize; 2] {
        let Some(sizes) = self.sizes.get(service) else { return [0; 2] };
        sizes.endpoints.map(|count| count.min(self.settings.endpoint_ports() / sizes.service_ports.max(1)))
    }

    /// The keys of all slices, used or left out.
    pub(super) fn slice_keys(&self) -> impl Iterator<Item = &ObjectKey> {
        self.held.keys().map(|key| &**key)
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        let are_empty = self.slices.is_empty() && self.held.is_empty() && self.sizes.is_empty();
        are_empty && self.services.iter().all(HashMap::is_empty) && self.before.is_empty()
    }

    /// How often addresses were looked up in slices or moved in the index: the work so far.
    #[cfg(test)]
    pub(super) fn visits(&self) -> u64 {
        self.visits.get()
    }

    /// Adds, changes or removes a slice in use.
    fn set(&mut self, key: &Arc<ObjectKey>, new: Option<&Arc<Slice>>, trigger_is_new: bool, interner: &mut Interner) {
        let old = self.slices.get(key).cloned();
        let [before, now] = [old.as_ref(), new].map(|slice| slice.map_or(0, |slice| slice.trigger_unix_ms));
        let trigger_unix_ms = if trigger_is_new && before != now { now } else { 0 };
        let (old, latest) = (old.as_deref(), new.map(|new| &**new));
        let has_moved = matches!((old, latest), (Some(old), Some(new)) if old.service != new.service);
        let parts = if has_moved { [(old, None), (None, latest)] } else { [(old, latest), (None, None)] };
        let of_service = |(old, new): (Option<_>, Option<_>)| {
            let slice: Option<&Slice> = new.or(old);
            touched(old, new).into_iter().filter_map(move |touched| Some((&slice?.service, touched)))
        };
        let changed: Vec<_> = parts.into_iter().flat_map(of_service).collect();
        let before: Vec<_> = changed
            .iter()
            .map(|(service, (address, ..))| merge(&self.entries(service, *address), *address, interner).0)
            .collect();
        match new {
            Some(new) => drop(self.slices.insert(Arc::clone(key), Arc::clone(new))),
            None => drop(self.slices.remove(key)),
        }
        for (service, (address, was, is)) in &changed {
            match (was, is) {
                (None, Some(_)) => self.enter(service, *address, key),
                (Some(_), None) => self.leave(service, *address, key),
                _ => {}
            }
        }
        // An endpoint stays held if its slice moves to another service.
        if self.settings.reads_pods {
            for (address, was, is) in touched(old, latest) {
                self.move_unready(key, address, was, is);
            }
        }
        for ((service, (address, was, is)), before) in changed.into_iter().zip(before) {
            if was.and_then(Facts::pod) != is.and_then(Facts::pod) {
                self.touched_pods.insert((service.clone(), address));
            }
            self.note(service, address, is.is_some(), before, trigger_unix_ms, interner);
        }
    }

    /// Adds an address of a slice to the index.
    fn enter(&mut self, service: &ServiceKey, address: IpAddr, key: &Arc<ObjectKey>) {
        let of_family = &mut self.services[family(address)];
        let new = || Carriers { main: Arc::clone(key), others: BTreeSet::new() };
        let carriers = of_family.entry(service.clone()).or_insert_with(new);
        if carriers.main != *key {
            carriers.others.insert((address, Some(Arc::clone(key))));
        }
    }

    /// Removes an address of a slice from the index, also if it was the main slice.
    fn leave(&mut self, service: &ServiceKey, address: IpAddr, key: &Arc<ObjectKey>) {
        let of_family = &mut self.services[family(address)];
        let Some(Carriers { main, others }) = of_family.get_mut(service) else { return };
        if main != key {
            others.remove(&(address, Some(Arc::clone(key))));
            return;
        }
        let stays = |slice: &Slice| {
            let first = slice.endpoints.first();
            slice.service == *service && first.is_some_and(|(other, _)| family(*other) == family(address))
        };
        if self.slices.get(key).is_some_and(|slice| stays(slice)) {
            return;
        }
        let Some((_, Some(next))) = others.first().cloned() else {
            of_family.remove(service);
            return;
        };
        for (address, _) in self.slices.get(&next).into_iter().flat_map(|slice| &slice.endpoints) {
            others.remove(&(*address, Some(Arc::clone(&next))));
            self.visits.update(|visits| visits + 1);
        }
        *main = next;
    }

    /// Updates the unready endpoints of pods for an address whose facts changed.
    fn move_unready(&mut self, key: &Arc<ObjectKey>, address: IpAddr, was: Option<&Facts>, is: Option<&Facts>) {
        let pod = |facts: &Facts| Some(facts.pod).filter(|pod| !pod.is_none());
        let (was, unready) = (was.and_then(pod), is.filter(|facts| is_unready(facts.conditions)).and_then(pod));
        // An endpoint of the same pod that has served is not held again.
        if was == unready {
            return;
        }
        if let Some(pod) = was {
            self.gates.remove(pod, key, address);
        }
        if let Some(pod) = unready {
            self.gates.add(pod, (Arc::clone(key), address));
        }
    }

    /// Applies a change to the held pods, and notes the endpoints of `pods` that it changes, with
    /// this trigger.
    pub(super) fn change_gates(
        &mut self,
        pods: impl IntoIterator<Item = PodId>,
        change: impl FnOnce(&mut Gates),
        trigger_unix_ms: u64,
        interner: &mut Interner,
    ) {
        let before = |(slice, address): &EndpointPlace| {
            let service = &self.slices.get(slice)?.service;
            Some((service.clone(), *address, merge(&self.entries(service, *address), *address, interner).0))
        };
        let places = pods.into_iter().flat_map(|pod| self.gates.places(pod));
        let visited: Vec<_> = places.filter_map(before).collect();
        change(&mut self.gates);
        for (service, address, endpoint) in visited {
            self.note(&service, address, true, endpoint, trigger_unix_ms, interner);
        }
    }

    /// Records the endpoint that an address had before the change (`before`), if the endpoint has
    /// changed. Also records whether slices disagree about the address. `carries` says whether the
    /// changed slice contains the address now.
    fn note(
        &mut self,
        service: &ServiceKey,
        address: IpAddr,
        carries: bool,
        before: Option<Endpoint>,
        trigger_unix_ms: u64,
        interner: &mut Interner,
    ) {
        let entries = self.entries(service, address);
        let is_shared = entries.len() > 1;
        let (endpoint, conflict) = merge(&entries, address, interner);
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
            self.conflicts.push((service.clone(), address, conflict));
        }
    }

    /// The pods that may have changed since the last call.
    pub(super) fn take_pods(&mut self) -> Vec<PodChange> {
        let touched = std::mem::take(&mut self.touched_pods);
        let change = |(service, address): (ServiceKey, IpAddr)| {
            let entries = self.entries(&service, address).into_iter().filter(|entry| !entry.facts.pod.is_none());
            let pod = entries.reduce(SliceEntry::or_later).and_then(|entry| entry.facts.pod());
            PodChange { service, address, pod }
        };
        touched.into_iter().map(change).collect()
    }

    /// The entries of all slices for one address, in order of the slices' names.
    fn entries<'a>(&'a self, service: &ServiceKey, address: IpAddr) -> Vec<SliceEntry<'a>> {
        let Some(Carriers { main, others }) = self.services[family(address)].get(service) else { return Vec::new() };
        let others = others.range((address, None)..).take_while(|(other, _)| *other == address);
        let keys = iter::once(main).chain(others.filter_map(|(_, key)| key.as_ref()));
        let entry = |key: &'a Arc<ObjectKey>| {
            self.visits.update(|visits| visits + 1);
            let slice = self.slices.get(key)?;
            let facts = slice.facts(address)?;
            let is_held = is_unready(facts.conditions) && self.gates.holds(facts.pod, key, address);
            let held = Conditions { ready: true, serving: true, terminating: false };
            let conditions = if is_held { held } else { facts.conditions };
            Some(SliceEntry { slice: key, ports: &slice.ports, facts, conditions })
        };
        let mut entries: Vec<_> = keys.filter_map(entry).collect();
        entries.sort_unstable_by_key(|entry| entry.slice);
        entries
    }

    /// The changes of endpoints since the last call, by service and in order of address.
    pub(super) fn take_changes(&mut self, interner: &mut Interner) -> BTreeMap<ServiceKey, Vec<TriggeredChange>> {
        let mut changes: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for (service, addresses) in std::mem::take(&mut self.before) {
            for (address, Before { endpoint: before, trigger_unix_ms }) in addresses {
                let (endpoint, _) = merge(&self.entries(&service, address), address, interner);
                if before != endpoint {
                    let change = match endpoint {
                        Some(endpoint) => Change::Endpoint(service.clone(), endpoint),
                        None => Change::RemoveEndpoint(service.clone(), address),
                    };
                    changes.entry(service.clone()).or_default().push(TriggeredChange { change, trigger_unix_ms });
                }
            }
        }
        changes
    }
}

/// Merges the entries of all slices for one address. If the merged endpoint is too large to be
/// sent, the result has the ports of one slice only. Also returns two slices that disagree, if any.
fn merge(entries: &[SliceEntry<'_>], address: IpAddr, interner: &mut Interner) -> (Option<Endpoint>, Option<Conflict>) {
    if let [only] = entries {
        return (only.alone(address), None);
    }
    let mut counting: BTreeMap<(&str, Protocol, u16), SliceEntry<'_>> = BTreeMap::new();
    for entry in entries {
        for port in entry.ports.iter() {
            let counts = counting.entry(port.key()).or_insert(*entry);
            *counts = counts.or_later(*entry);
        }
    }
    let Some(main) = counting.values().next().copied() else { return (None, None) };
    let port = |((name, protocol, number), entry): (&(&str, Protocol, u16), &SliceEntry<'_>)| EndpointPort {
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
    let conflict = entries.iter().find_map(|entry| {
        let mut used = entry.ports.iter().filter_map(|port| counting.get(&port.key()));
        used.find(|used| used.facts.conflicts_with(entry.facts)).map(|used| used.conflict(entry))
    });
    if parse::may_be_sent(&endpoint) {
        return (Some(endpoint), conflict);
    }
    let used = entries.iter().copied().reduce(SliceEntry::or_later).unwrap_or(main);
    let other = entries.iter().find(|entry| entry.slice != used.slice);
    (used.alone(address), conflict.or_else(|| Some(used.conflict(other?))))
}

/// The index of an address's family in [`Endpoints::services`].
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

/// An address, and the facts about it in the old and in the new version of a slice.
type Touched<'a> = (IpAddr, Option<&'a Facts>, Option<&'a Facts>);

/// The addresses on which two versions of a slice differ.
fn touched<'a>(old: Option<&'a Slice>, new: Option<&'a Slice>) -> Vec<Touched<'a>> {
    let has_other_ports = old.map(|slice| &slice.ports) != new.map(|slice| &slice.ports);
    let endpoints = |slice: Option<&'a Slice>| slice.into_iter().flat_map(|slice| &slice.endpoints).peekable();
    let (mut left, mut right) = (endpoints(old), endpoints(new));
    let mut touched = Vec::new();
    loop {
        let order = match (left.peek(), right.peek()) {
            (None, None) => return touched,
            (Some(_), None) => Ordering::Less,
            (None, Some(_)) => Ordering::Greater,
            (Some((a, _)), Some((b, _))) => a.cmp(b),
        };
        let (was, is) = (left.next_if(|_| order.is_le()), right.next_if(|_| order.is_ge()));
        if let Some((address, _)) = was.or(is).filter(|_| has_other_ports || was != is) {
            touched.push((*address, was.map(|(_, facts)| facts), is.map(|(_, facts)| facts)));
        }
    }
}

/// The entry of one slice for an address.
#[derive(Clone, Copy)]
struct SliceEntry<'a> {
    slice: &'a Arc<ObjectKey>,
    ports: &'a Arc<[EndpointPort]>,
    facts: &'a Facts,
    /// The conditions of the facts, or of a ready endpoint if the pod is held.
    conditions: Conditions,
}

impl SliceEntry<'_> {
    /// The endpoint with the ports of this slice only; `None` without ports.
    fn alone(self, address: IpAddr) -> Option<Endpoint> {
        (!self.ports.is_empty()).then(|| Endpoint {
            address,
            ports: Arc::clone(self.ports),
            conditions: self.conditions,
            placement: Arc::clone(&self.facts.placement),
        })
    }

    /// The one of two entries that counts.
    fn or_later(self, later: Self) -> Self {
        if replaces(later.conditions, self.conditions) { later } else { self }
    }

    fn conflict(&self, other: &SliceEntry<'_>) -> Conflict {
        [Arc::clone(self.slice), Arc::clone(other.slice)]
    }
}

// Pods that lack only the readiness gate of Headgate. Their endpoints count as ready and serving
// for all nodes (discovery.proto, section 20).
//
// The API shows a pod that becomes ready in three steps, which arrive over two watches: the
// condition of the gate, the condition `Ready`, and the endpoint in the EndpointSlice. A pod is
// *held* from the beginning until the last step, so that its endpoints do not change in between.
// An endpoint that has been serving, and stops to serve, is never held.

/// A slice, and an address in the slice.
pub(super) type EndpointPlace = (Arc<ObjectKey>, IpAddr);

#[derive(Debug)]
struct HeldPod {
    id: PodId,
    /// The names; `None` once the condition of the gate is true.
    waiting: Option<Arc<GatedPod>>,
}

/// The held pods, and the endpoints that are not ready.
#[derive(Debug, Default)]
pub(super) struct Gates {
    held: HashMap<ObjectKey, HeldPod>,
    keys: HashMap<PodId, ObjectKey>,
    /// The endpoints of each pod that are neither ready, serving nor terminating.
    unready: HashMap<PodId, BTreeSet<EndpointPlace>>,
    /// The pods whose names have changed since the last call of [`Gates::take`].
    changed: BTreeMap<ObjectKey, Vec<GateChange>>,
}

/// True if an endpoint counts as ready when its pod is held.
pub(super) fn is_unready(conditions: Conditions) -> bool {
    !(conditions.ready || conditions.serving || conditions.terminating)
}

impl Gates {
    pub(super) fn keys(&self) -> impl Iterator<Item = &ObjectKey> {
        self.held.keys()
    }

    /// The held pod of this name.
    pub(super) fn id(&self, key: &ObjectKey) -> Option<PodId> {
        self.held.get(key).map(|held| held.id)
    }

    /// The endpoints of a pod that are not ready.
    pub(super) fn places(&self, id: PodId) -> impl Iterator<Item = &EndpointPlace> {
        self.unready.get(&id).into_iter().flatten()
    }

    /// True if an endpoint counts as ready although its slice says that it is not.
    pub(super) fn holds(&self, id: PodId, slice: &Arc<ObjectKey>, address: IpAddr) -> bool {
        let is_unready = |places: &BTreeSet<EndpointPlace>| places.contains(&(Arc::clone(slice), address));
        self.keys.contains_key(&id) && self.unready.get(&id).is_some_and(is_unready)
    }

    /// Applies a version of a pod with the gate.
    pub(super) fn set(&mut self, key: &ObjectKey, id: PodId, uid: &str, state: GateState) {
        let is_held = self.id(key).is_some();
        let waiting = match state {
            GateState::Waiting => {
                let names = GatedPod { namespace: key.namespace.clone(), name: key.name.clone(), uid: uid.into() };
                Some(Arc::new(names))
            }
            GateState::Programmed => None,
            GateState::Ready if is_held && self.unready.contains_key(&id) => None,
            GateState::Ready | GateState::Unready => return self.release(key),
        };
        let was_waiting = self.held.get(key).is_some_and(|held| held.waiting.is_some());
        if was_waiting != waiting.is_some() {
            self.note(key, GateChange { pod: id, waiting: waiting.clone() });
        }
        self.keys.insert(id, key.clone());
        self.held.insert(key.clone(), HeldPod { id, waiting });
    }

    pub(super) fn release(&mut self, key: &ObjectKey) {
        let Some(held) = self.held.remove(key) else { return };
        self.keys.remove(&held.id);
        if held.waiting.is_some() {
            self.note(key, GateChange { pod: held.id, waiting: None });
        }
    }

    fn note(&mut self, key: &ObjectKey, change: GateChange) {
        self.changed.entry(key.clone()).or_default().push(change);
    }

    /// Notes that an endpoint of a pod has become unready.
    pub(super) fn add(&mut self, id: PodId, place: EndpointPlace) {
        self.unready.entry(id).or_default().insert(place);
    }

    /// Notes that an endpoint of a pod is not unready any more, or was removed.
    pub(super) fn remove(&mut self, id: PodId, slice: &Arc<ObjectKey>, address: IpAddr) {
        let Some(places) = self.unready.get_mut(&id) else { return };
        places.remove(&(Arc::clone(slice), address));
        if !places.is_empty() {
            return;
        }
        self.unready.remove(&id);
        // The API has shown the last step.
        if let Some(key) = self.keys.get(&id).cloned()
            && self.held.get(&key).is_some_and(|held| held.waiting.is_none())
        {
            self.release(&key);
        }
    }

    /// The changes of waiting pods since the last call.
    pub(super) fn take(&mut self) -> Vec<GateChange> {
        std::mem::take(&mut self.changed).into_values().flatten().collect()
    }
}

// EndpointSlices: the fields that a service proxy needs, and shared copies of their values.

/// What a slice says about an address.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Facts {
    pub(super) conditions: Conditions,
    pub(super) placement: Arc<Placement>,
    pub(super) pod: PodId,
}

impl Facts {
    /// Whether only the order decides which of two different entries for a port counts.
    pub(super) fn conflicts_with(&self, other: &Self) -> bool {
        self.conditions == other.conditions && self.placement != other.placement
    }

    /// The pod and its node; `None` if the endpoint belongs to no pod.
    pub(super) fn pod(&self) -> Option<(PodId, Option<Arc<str>>)> {
        (!self.pod.is_none()).then(|| (self.pod, self.placement.node.clone()))
    }
}

/// Of two entries for a port, the higher one counts: two pods on a node may share the port.
fn precedence(Conditions { ready, serving, terminating }: Conditions) -> [bool; 3] {
    [ready, !terminating, serving]
}

/// Whether an entry replaces an earlier entry for the same address and port.
pub(super) fn replaces(later: Conditions, earlier: Conditions) -> bool {
    let (later, earlier) = (precedence(later), precedence(earlier));
    // Of two equal entries that terminate, the first counts.
    later > earlier || later == earlier && later[1]
}

#[derive(Debug)]
pub(super) struct Slice {
    pub(super) service: ServiceKey,
    /// The ports of each address; sorted, without duplicates.
    pub(super) ports: Arc<[EndpointPort]>,
    /// Each address once, sorted.
    pub(super) endpoints: Vec<(IpAddr, Facts)>,
    /// The trigger time of this version, in milliseconds since the Unix epoch; 0 if unknown.
    pub(super) trigger_unix_ms: u64,
}

impl Slice {
    /// The facts about an address; `None` if the slice does not contain the address.
    pub(super) fn facts(&self, address: IpAddr) -> Option<&Facts> {
        let place = self.endpoints.binary_search_by(|(other, _)| other.cmp(&address)).ok()?;
        Some(&self.endpoints[place].1)
    }
}

/// Reads a slice. It has no value if it is for DNS only, or contains names, not addresses.
pub(super) fn read(object: &objects::EndpointSlice, interner: &mut Interner) -> Reading<Slice> {
    let metadata = &object.metadata;
    if metadata.labels.get(keys::HEADLESS).is_some() || object.address_type == "FQDN" {
        return Reading::nothing();
    }
    let mut findings = Findings::default();
    let family = match object.address_type.as_str() {
        "IPv4" => Some(Family::V4),
        "IPv6" => Some(Family::V6),
        other => {
            let message = format!("{} is not a type of address: write IPv4, IPv6 or FQDN", parse::shown(other));
            findings.object("addressType", message);
            None
        }
    };
    let service = metadata.labels.get(keys::SERVICE_NAME).filter(|name| !name.is_empty());
    if service.is_none() {
        let message = "no label names the Service of this slice: add the label kubernetes.io/service-name";
        findings.object("metadata.labels", message);
    }
    let names = [
        ("metadata.namespace", Some(metadata.namespace_or_default())),
        ("metadata.labels[kubernetes.io/service-name]", service),
    ];
    let mut is_named = true;
    for (field, name) in names {
        is_named &= name.is_none_or(|name| findings.checked(field, parse::label(name)).is_some());
    }
    let mut ports = ports(object, &mut findings);
    if !parse::may_have(&ports) {
        findings.object("ports", "an endpoint may not have so many ports: give fewer ports, or shorter names");
        ports.clear();
    }
    let (Some(family), Some(service), true) = (family, service, is_named) else {
        return Reading { value: None, findings };
    };
    let slice = Slice {
        service: ServiceKey::new(metadata.namespace_or_default(), service),
        ports: interner.ports(ports),
        endpoints: endpoints(object, family, interner, &mut findings),
        trigger_unix_ms: metadata.annotations.get(keys::TRIGGER_TIME).map_or(0, parse::unix_ms),
    };
    Reading { value: Some(slice), findings }
}

/// The ports with a number. Ports without a number belong to selectors that match no pod yet; they
/// are ignored, as in kube-proxy. A port without a name has the name '', and a port without a
/// protocol has TCP, as the API server fills in (`pkg/apis/discovery/v1/defaults.go`).
fn ports(object: &objects::EndpointSlice, findings: &mut Findings) -> Vec<EndpointPort> {
    let mut ports = Vec::with_capacity(object.ports.len());
    for (index, written) in object.ports.iter().enumerate() {
        let Some(number) = written.port.filter(|number| *number != 0) else { continue };
        let name = &written.name;
        let port = findings.checked(format_args!("ports[{index}].port"), parse::port(number));
        let protocol = findings.checked(format_args!("ports[{index}].protocol"), parse::protocol(&written.protocol));
        let named = findings.checked(format_args!("ports[{index}].name"), parse::optional(parse::label, name));
        if let (Some(port), Some(protocol), Some(())) = (port, protocol, named) {
            ports.push(EndpointPort::new(name.as_str(), protocol, port));
        }
    }
    ports
}

/// Reads the endpoints, of equal addresses the one that [`replaces`] the others.
fn endpoints(
    object: &objects::EndpointSlice,
    family: Family,
    interner: &mut Interner,
    findings: &mut Findings,
) -> Vec<(IpAddr, Facts)> {
    let weights = parse::weights(&object.metadata.annotations, findings);
    let weight_of_all = parse::weight_of_all(&object.metadata.annotations, findings);
    let mut endpoints: Vec<(IpAddr, usize, Facts)> = Vec::with_capacity(object.endpoints.len());
    for (index, written) in object.endpoints.iter().enumerate() {
        let address = address(written, family);
        if let Some(address) = findings.checked_entry(format_args!("endpoints[{index}].addresses[0]"), address) {
            let weight = weights.get(&address).copied().unwrap_or(weight_of_all);
            let mut facts = facts(index, written, weight, interner, findings);
            facts.pod = facts.pod.in_namespace(object.metadata.namespace_or_default());
            endpoints.push((address, index, facts));
        }
    }
    endpoints.sort_unstable_by_key(|(address, index, _)| (*address, *index));
    endpoints.dedup_by(|later, kept| {
        let is_same = later.0 == kept.0;
        if is_same {
            if later.2.conflicts_with(&kept.2) {
                let message = format!("{} is also in endpoints[{}], with other values: list it once", later.0, kept.1);
                findings.entry(format!("endpoints[{}].addresses[0]", later.1), message);
            }
            if replaces(later.2.conditions, kept.2.conditions) {
                std::mem::swap(later, kept);
            }
        }
        is_same
    });
    for address in weights.keys() {
        if endpoints.binary_search_by_key(address, |(address, ..)| *address).is_err() {
            let message =
                format!("{address} is no address of this slice: write the weight in the slice of the endpoint");
            findings.annotation(keys::WEIGHTS, message, "the rest of the annotation is used");
        }
    }
    endpoints.into_iter().map(|(address, _, facts)| (address, facts)).collect()
}

fn address(written: &objects::SliceEndpoint, family: Family) -> Result<IpAddr, String> {
    let text = written.address.as_deref().ok_or("the endpoint has no address: give one")?;
    let address = parse::reachable(text, AddressUse::Other)?;
    if Family::of(address) == family {
        Ok(address)
    } else {
        Err(format!(
            "{address} is not an {family} address, but addressType is {family}: move the endpoint to a slice of its own family"
        ))
    }
}

/// Reads the conditions and the placement of an endpoint, without invalid names.
fn facts(
    index: usize,
    written: &objects::SliceEndpoint,
    weight: Weight,
    interner: &mut Interner,
    findings: &mut Findings,
) -> Facts {
    let conditions = &written.conditions;
    let mut known = |field: &str, text: &str, check: fn(&str) -> Result<(), String>| {
        findings.checked_entry(format_args!("endpoints[{index}].{field}"), parse::optional(check, text))?;
        interner.string(text)
    };
    let node = known("nodeName", &written.node_name.trim().to_lowercase(), parse::subdomain);
    let zone = known("zone", &written.zone, parse::zone);
    let mut names = |field: &str, list: &[objects::HintName], check: fn(&str) -> Result<(), String>| {
        list.iter().take(parse::MAX_HINTS).filter_map(|hint| known(field, &hint.name, check)).collect()
    };
    let (for_zones, for_nodes) =
        written.hints.as_deref().map(|hints| (&*hints.for_zones, &*hints.for_nodes)).unwrap_or_default();
    let hints = Hints {
        zones: names("hints.forZones", for_zones, parse::zone),
        nodes: names("hints.forNodes", for_nodes, parse::subdomain),
    };
    for (field, list) in [("hints.forZones", for_zones), ("hints.forNodes", for_nodes)] {
        if list.len() > parse::MAX_HINTS {
            let message = format!("only the first {} hints of an endpoint count: give fewer", parse::MAX_HINTS);
            findings.entry(format!("endpoints[{index}].{field}"), message);
        }
    }
    let placement = Placement { node, zone, hints: interner.hints(hints), weight };
    Facts {
        conditions: Conditions {
            ready: conditions.ready.unwrap_or(true),
            serving: conditions.serving.unwrap_or(true),
            terminating: conditions.terminating.unwrap_or(false),
        },
        placement: interner.placement(&placement),
        pod: written.pod,
    }
}

// Shared strings, lists and placements, of which the endpoints of a cluster have few.

/// Shared strings, port lists, hints and placements.
#[derive(Debug, Default)]
pub(super) struct Interner {
    strings: Pool<str>,
    ports: Pool<[EndpointPort]>,
    hints: Pool<Hints>,
    placements: Pool<Placement>,
}

impl Interner {
    /// The shared copy of a string; `None` for an empty string.
    pub(super) fn string(&mut self, text: &str) -> Option<Arc<str>> {
        (!text.is_empty()).then(|| self.strings.get(text, || text.into()))
    }

    /// The shared copy of a name, which may be empty.
    pub(super) fn name(&mut self, text: &str) -> Arc<str> {
        self.string(text).unwrap_or_default()
    }

    /// The shared copy of a port list, sorted and without duplicates.
    pub(super) fn ports(&mut self, mut ports: Vec<EndpointPort>) -> Arc<[EndpointPort]> {
        ports.sort_unstable();
        ports.dedup();
        self.ports.get(ports.as_slice(), || ports.as_slice().into())
    }

    /// The shared copy of sorted, distinct hints; `None` without any.
    pub(super) fn hints(&mut self, mut hints: Hints) -> Option<Arc<Hints>> {
        for list in [&mut hints.zones, &mut hints.nodes] {
            list.sort_unstable();
            list.dedup();
        }
        let is_empty = hints.zones.is_empty() && hints.nodes.is_empty();
        (!is_empty).then(|| self.hints.get(&hints, || Arc::new(hints.clone())))
    }

    pub(super) fn placement(&mut self, placement: &Placement) -> Arc<Placement> {
        self.placements.get(placement, || Arc::new(placement.clone()))
    }
}
