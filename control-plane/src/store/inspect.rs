//! What `Inspect` reads: one short look under the lock an item, nothing held between two.

use std::{net::IpAddr, sync::Arc};

use headgate_core::{Change, Endpoint, Family, Service, ServiceKey, frontends::Frontend};

use super::{
    Store, encode,
    log::{self, Place},
};

/// A Service with what its replica knows about it.
#[derive(Debug, Clone)]
pub(crate) struct ServiceDetail {
    pub(crate) service: Service,
    pub(crate) endpoints: usize,
    pub(crate) ready_endpoints: usize,
    pub(crate) version: u64,
    /// Frontends of the Service that another Service owns, with the owner.
    pub(crate) conflicts: Vec<(Frontend, ServiceKey)>,
}

/// Counts of what is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) version: u64,
    pub(crate) services: usize,
    pub(crate) endpoints: usize,
    pub(crate) nodes: usize,
}

/// A watcher's place in the log.
#[derive(Debug, Clone, Copy)]
pub struct WatchCursor(Place);

/// Some changes that a watcher has not seen.
#[derive(Debug)]
pub struct WatchPage {
    /// Versions and present values, oldest change first; a key that changed several times is there
    /// once.
    pub changes: Vec<(u64, Change)>,
    /// Where the next page begins.
    pub next: WatchCursor,
    /// The log no longer reaches back to where this page begins: changes are missing.
    pub is_incomplete: bool,
}

impl Store {
    pub(crate) fn counts(&self) -> Counts {
        let inner = self.read();
        Counts {
            version: inner.version,
            services: inner.state.service_count(),
            endpoints: inner.state.endpoint_count(),
            nodes: inner.nodes.len(),
        }
    }

    /// Number of nodes.
    pub(crate) fn node_count(&self) -> usize {
        self.read().nodes.len()
    }

    /// Number of ready endpoints, of the family of which there are more: in a dual-stack cluster
    /// each is there twice.
    pub(crate) fn ready_endpoints(&self, key: &ServiceKey) -> usize {
        let inner = self.read();
        let Some(entry) = inner.state.entry(key) else { return 0 };
        let ready = |family| {
            let of_family = |endpoint: &&Endpoint| Family::of(endpoint.address) == family && endpoint.has_ready_port();
            entry.endpoints().values().filter(of_family).count()
        };
        Family::BOTH.map(ready).into_iter().max().unwrap_or_default()
    }

    /// Keys with a Service or endpoints that pass `filter`, sorted.
    pub(crate) fn keys(&self, filter: impl Fn(&ServiceKey) -> bool) -> Vec<Arc<ServiceKey>> {
        let inner = self.read();
        let mut keys: Vec<_> = inner.state.entries().map(|(key, _)| key).filter(|key| filter(key)).cloned().collect();
        drop(inner);
        keys.sort_unstable();
        keys
    }

    /// A Service, if there is one.
    pub(crate) fn service(&self, key: &ServiceKey) -> Option<ServiceDetail> {
        let inner = self.read();
        let entry = inner.state.entry(key)?;
        let service = entry.service()?.clone();
        let conflicts = inner.state.frontends().conflicts(&service).into_iter();
        Some(ServiceDetail {
            conflicts: conflicts.map(|(frontend, owner)| (frontend, owner.clone())).collect(),
            endpoints: entry.endpoints().len(),
            ready_endpoints: entry.endpoints().values().filter(|endpoint| endpoint.has_ready_port()).count(),
            version: inner.log.newest_version(key),
            service,
        })
    }

    /// A service's endpoints with the version of each, in order of address; one for each group of
    /// ports with the same state.
    pub(crate) fn endpoints(&self, key: &ServiceKey) -> Vec<(Endpoint, u64)> {
        let inner = self.read();
        let Some(entry) = inner.state.entry(key) else { return Vec::new() };
        let endpoints = entry.endpoints().values().flat_map(Endpoint::by_state);
        let with_version = |endpoint: Endpoint| {
            let version = inner.log.endpoint_version(key, endpoint.address);
            (endpoint, version)
        };
        endpoints.map(with_version).collect()
    }

    /// The version that brought the present state of a service, or of one of its endpoints; `None`
    /// while what is asked for is not so: that it is there, or that it is gone. For a removal that
    /// is no longer remembered it is the head.
    pub(crate) fn version_of(&self, key: &ServiceKey, endpoint: Option<IpAddr>, gone: bool) -> Option<u64> {
        let inner = self.read();
        let entry = inner.state.entry(key);
        let is_there = match endpoint {
            Some(address) => entry.is_some_and(|entry| entry.endpoints().contains_key(&address)),
            None => entry.is_some_and(|entry| entry.service().is_some()),
        };
        let version = match endpoint {
            Some(address) => inner.log.endpoint_version(key, address),
            None => inner.log.newest_version(key),
        };
        (is_there != gone).then_some(if version == 0 { inner.version } else { version })
    }

    /// The place of a watcher who has seen everything up to now.
    #[must_use]
    pub fn watch_cursor(&self) -> WatchCursor {
        WatchCursor(log::after(self.version()))
    }

    /// At most `limit` changes from `place` on. A watcher that is slow skips to newest values.
    #[must_use]
    pub fn watch_page(&self, place: WatchCursor, limit: usize) -> WatchPage {
        let inner = self.read();
        let mut next = place.0;
        let mut changes = Vec::new();
        for (place, entry) in inner.log.since(place.0).take(limit) {
            next = (place.0, place.1.saturating_add(1));
            changes.push((place.0, encode::present(&inner.state, &entry.key)));
        }
        WatchPage { changes, next: WatchCursor(next), is_incomplete: place.0.0 <= inner.log.floor() }
    }
}
