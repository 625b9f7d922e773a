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

use super::Limits;

/// Key of a resource that every agent receives.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum LogKey {
    Service(Arc<ServiceKey>),
    Endpoint(Arc<ServiceKey>, IpAddr),
    Cidr(CompactString),
}

impl LogKey {
    pub(super) fn bucket(&self) -> u16 {
        match self {
            Self::Service(key) | Self::Endpoint(key, _) => digest::service_bucket(key),
            Self::Cidr(name) => digest::service_cidr_bucket(name),
        }
    }

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
pub(super) type LogPlace = (u64, u32);

/// The first place after `version`.
pub(super) fn after(version: u64) -> LogPlace {
    (version.saturating_add(1), 0)
}

/// The last change of one key.
#[derive(Debug)]
pub(super) struct LoggedKey {
    pub(super) key: LogKey,
    pub(super) trigger_unix_ms: u64,
}

/// The places of one service's resources in the log.
#[derive(Debug, Default)]
struct ServicePlaces {
    service: Option<LogPlace>,
    endpoints: BTreeMap<IpAddr, LogPlace>,
}

#[derive(Debug, Default)]
pub(super) struct Log {
    entries: BTreeMap<LogPlace, LoggedKey>,
    services: HashMap<Arc<ServiceKey>, ServicePlaces>,
    cidrs: HashMap<CompactString, LogPlace>,
    tombstones: BTreeSet<LogPlace>,
    floor: u64,
}

impl Log {
    /// The floor: the log contains every change after this version.
    pub(super) fn floor(&self) -> u64 {
        self.floor
    }

    /// The key of the resource that a change adds, changes or removes. The key shares memory with
    /// an equal key in the log or in `state`. `state` is the state before the change.
    pub(super) fn intern(&self, change: &Change, state: &State) -> LogKey {
        let shared = |key: &ServiceKey| {
            let known = self.services.get_key_value(key).map(|(shared, _)| shared).or_else(|| state.key(key));
            known.map_or_else(|| Arc::new(key.clone()), Arc::clone)
        };
        match change {
            Change::Service(service) => LogKey::Service(shared(&service.key)),
            Change::RemoveService(key) => LogKey::Service(shared(key)),
            Change::Endpoint(key, endpoint) => LogKey::Endpoint(shared(key), endpoint.address),
            Change::RemoveEndpoint(key, address) => LogKey::Endpoint(shared(key), *address),
            Change::ServiceCidr(cidr) => LogKey::Cidr(cidr.name.clone()),
            Change::RemoveServiceCidr(name) => LogKey::Cidr(name.clone()),
        }
    }

    /// Records a key's last change at the newest `place`, and drops what is over the limits.
    pub(super) fn record(
        &mut self,
        place: LogPlace,
        key: LogKey,
        trigger_unix_ms: u64,
        is_removed: bool,
        limits: &Limits,
    ) {
        let old = match &key {
            LogKey::Service(key) => self.services.entry(Arc::clone(key)).or_default().service.replace(place),
            LogKey::Endpoint(key, address) => {
                self.services.entry(Arc::clone(key)).or_default().endpoints.insert(*address, place)
            }
            LogKey::Cidr(name) => self.cidrs.insert(name.clone(), place),
        };
        if let Some(old) = old {
            self.entries.remove(&old);
            self.tombstones.remove(&old);
        }
        self.entries.insert(place, LoggedKey { key, trigger_unix_ms });
        if is_removed {
            self.tombstones.insert(place);
        }
        while self.tombstones.len() > limits.max_tombstones
            && let Some(place) = self.tombstones.pop_first()
        {
            self.forget_place(place);
        }
        while self.entries.len() > limits.max_tombstones.saturating_add(limits.max_delta_changes)
            && let Some((place, _)) = self.entries.first_key_value()
        {
            let place = *place;
            self.tombstones.remove(&place);
            self.forget_place(place);
        }
    }

    fn forget_place(&mut self, place: LogPlace) {
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
    pub(super) fn since(&self, from: LogPlace) -> impl Iterator<Item = (LogPlace, &LoggedKey)> {
        self.entries.range(from..).map(|(place, entry)| (*place, entry))
    }

    /// The version of an endpoint's last change; the floor if the log lacks it.
    pub(super) fn endpoint_version(&self, key: &ServiceKey, address: IpAddr) -> u64 {
        let place = self.services.get(key).and_then(|places| places.endpoints.get(&address));
        place.map_or(self.floor, |place| place.0)
    }

    /// The version of a Service's own last change; the floor if the log lacks it.
    pub(super) fn service_version(&self, key: &ServiceKey) -> u64 {
        let place = self.services.get(key).and_then(|places| places.service);
        place.map_or(self.floor, |place| place.0)
    }

    /// The version of the last change of a service or its endpoints; the floor if the log lacks it.
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

    pub(super) fn tombstones(&self) -> usize {
        self.tombstones.len()
    }
}
