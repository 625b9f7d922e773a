//! The compacted log: each recently changed key once, at the version of its last change.
//!
//! The log is bounded, so that its memory does not grow with the cluster. When the log is full, the
//! oldest keys are dropped. A cursor that needs a dropped key receives whole buckets, which cost
//! less than a very large number of single changes.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::IpAddr,
    sync::Arc,
};

use compact_str::CompactString;
use headgate_core::{Change, ServiceKey, State, digest};

/// Key of a resource that every agent receives.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum LogKey {
    /// A Service.
    Service(Arc<ServiceKey>),
    /// An endpoint of a service.
    Endpoint(Arc<ServiceKey>, IpAddr),
    /// A ServiceCIDR.
    Cidr(CompactString),
}

impl LogKey {
    /// Order of encoding: ServiceCIDRs, then each service followed by its endpoints.
    pub(super) fn order(&self) -> (Option<&ServiceKey>, Option<IpAddr>, &str) {
        match self {
            Self::Cidr(name) => (None, None, name),
            Self::Service(key) => (Some(key), None, ""),
            Self::Endpoint(key, address) => (Some(key), Some(*address), ""),
        }
    }
}

/// A place in the log: the version, and the number of the change within the version.
pub(super) type Place = (u64, u32);

/// The first place after `version`.
pub(super) fn after(version: u64) -> Place {
    (version.saturating_add(1), 0)
}

/// The last change of one key.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    pub(super) key: LogKey,
    pub(super) trigger_unix_ms: u64,
}

/// The places of one service's resources in the log, and the bucket of the service.
#[derive(Debug)]
struct ServicePlaces {
    bucket: u16,
    service: Option<Place>,
    endpoints: BTreeMap<IpAddr, Place>,
}

/// The compacted log.
#[derive(Debug)]
pub(super) struct Log {
    entries: BTreeMap<Place, Entry>,
    services: HashMap<Arc<ServiceKey>, ServicePlaces>,
    cidrs: HashMap<CompactString, Place>,
    tombstones: BTreeSet<Place>,
    max_tombstones: usize,
    max_entries: usize,
    floor: u64,
}

impl Log {
    /// Creates an empty log for at most `max_entries` keys, of which at most `max_tombstones` are
    /// removed keys.
    pub(super) fn new(max_entries: usize, max_tombstones: usize) -> Self {
        Self {
            entries: BTreeMap::new(),
            services: HashMap::new(),
            cidrs: HashMap::new(),
            tombstones: BTreeSet::new(),
            max_tombstones,
            max_entries,
            floor: 0,
        }
    }

    /// The floor: the log contains every change after this version.
    pub(super) fn floor(&self) -> u64 {
        self.floor
    }

    /// The key of the resource that a change adds, changes or removes, and the bucket of the
    /// resource. The key shares memory with an equal key in the log or in `state`. `state` is the
    /// state before the change.
    pub(super) fn intern(&self, change: &Change, state: &State) -> (LogKey, u16) {
        match change {
            Change::Service(service) => self.service_key(&service.key, state, LogKey::Service),
            Change::RemoveService(key) => self.service_key(key, state, LogKey::Service),
            Change::Endpoint(key, endpoint) => {
                self.service_key(key, state, |key| LogKey::Endpoint(key, endpoint.address))
            }
            Change::RemoveEndpoint(key, address) => self.service_key(key, state, |key| LogKey::Endpoint(key, *address)),
            Change::ServiceCidr(cidr) => (LogKey::Cidr(cidr.name.clone()), digest::service_cidr_bucket(&cidr.name)),
            Change::RemoveServiceCidr(name) => (LogKey::Cidr(name.clone()), digest::service_cidr_bucket(name)),
        }
    }

    fn service_key(
        &self,
        key: &ServiceKey,
        state: &State,
        make: impl FnOnce(Arc<ServiceKey>) -> LogKey,
    ) -> (LogKey, u16) {
        if let Some((shared, places)) = self.services.get_key_value(key) {
            return (make(Arc::clone(shared)), places.bucket);
        }
        let shared = state.key(key).map_or_else(|| Arc::new(key.clone()), Arc::clone);
        (make(shared), digest::service_bucket(key))
    }

    /// Records the last change of a key at `place`, which must be after every other place in the
    /// log.
    pub(super) fn record(&mut self, place: Place, entry_key: LogKey, bucket: u16, trigger_unix_ms: u64, removed: bool) {
        let old = match &entry_key {
            LogKey::Service(key) => self.places(key, bucket).service.replace(place),
            LogKey::Endpoint(key, address) => self.places(key, bucket).endpoints.insert(*address, place),
            LogKey::Cidr(name) => self.cidrs.insert(name.clone(), place),
        };
        if let Some(old) = old {
            self.entries.remove(&old);
            self.tombstones.remove(&old);
        }
        self.entries.insert(place, Entry { key: entry_key, trigger_unix_ms });
        if removed {
            self.tombstones.insert(place);
        }
        self.forget_oldest();
    }

    fn places(&mut self, key: &Arc<ServiceKey>, bucket: u16) -> &mut ServicePlaces {
        let empty = || ServicePlaces { bucket, service: None, endpoints: BTreeMap::new() };
        self.services.entry(Arc::clone(key)).or_insert_with(empty)
    }

    fn forget_oldest(&mut self) {
        while self.tombstones.len() > self.max_tombstones {
            let Some(place) = self.tombstones.pop_first() else { return };
            self.forget_place(place);
        }
        while self.entries.len() > self.max_entries
            && let Some((place, _)) = self.entries.first_key_value()
        {
            let place = *place;
            self.tombstones.remove(&place);
            self.forget_place(place);
        }
    }

    fn forget_place(&mut self, place: Place) {
        self.floor = self.floor.max(place.0);
        match self.entries.remove(&place).map(|entry| entry.key) {
            Some(LogKey::Cidr(name)) => {
                self.cidrs.remove(&name);
            }
            Some(LogKey::Service(key)) => self.forget(&key, |places| places.service = None),
            Some(LogKey::Endpoint(key, address)) => self.forget(&key, |places| {
                places.endpoints.remove(&address);
            }),
            None => {}
        }
    }

    fn forget(&mut self, key: &ServiceKey, clear: impl FnOnce(&mut ServicePlaces)) {
        let Some(places) = self.services.get_mut(key) else { return };
        clear(places);
        if places.service.is_none() && places.endpoints.is_empty() {
            self.services.remove(key);
        }
    }

    /// The keys that have changed at or after `from`, in order of their last change.
    pub(super) fn since(&self, from: Place) -> impl Iterator<Item = (Place, &Entry)> {
        self.entries.range(from..).map(|(place, entry)| (*place, entry))
    }

    /// The version of the last change of an endpoint. If the log does not contain the change, the
    /// result is the floor, because the log contains every change after the floor.
    pub(super) fn endpoint_version(&self, key: &ServiceKey, address: IpAddr) -> u64 {
        let place = self.services.get(key).and_then(|places| places.endpoints.get(&address));
        place.map_or(self.floor, |place| place.0)
    }

    /// The version of the last change of a Service without its endpoints; the floor if the log does
    /// not contain the change.
    pub(super) fn service_version(&self, key: &ServiceKey) -> u64 {
        let place = self.services.get(key).and_then(|places| places.service);
        place.map_or(self.floor, |place| place.0)
    }

    /// The version of the last change of a service or one of its endpoints, including removals. If
    /// the log does not contain the change, the result is the floor, because the log contains every
    /// change after the floor.
    pub(super) fn newest_version(&self, key: &ServiceKey) -> u64 {
        let Some(places) = self.services.get(key) else { return self.floor };
        let endpoints = places.endpoints.values().map(|place| place.0).max();
        places.service.map(|place| place.0).max(endpoints).unwrap_or(self.floor)
    }

    /// Number of keys, including removed keys.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Number of removals in the log.
    pub(super) fn tombstones(&self) -> usize {
        self.tombstones.len()
    }
}
