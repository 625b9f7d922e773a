//! Reads the store for `Inspect`, with the lock only for a short time in each function.

use std::{net::IpAddr, sync::Arc};

use headgate_core::{Change, Endpoint, Family, Service, ServiceKey};

use super::{
    Store, encode,
    log::{self, LogPlace},
};
use crate::model::Problem;

/// The maximum number of Services whose conflicts are shown together.
const MAX_CONFLICTS: usize = 1_000;

/// The maximum number of these Services of one namespace, so that nobody hides those of others.
const MAX_CONFLICTS_OF_NAMESPACE: usize = 10;

/// The maximum number of conflicts of one Service that are shown.
const MAX_CONFLICTS_OF_SERVICE: usize = 10;

/// A Service with details that this replica knows.
#[derive(Debug, Clone)]
pub(crate) struct ServiceDetail {
    pub(crate) service: Service,
    pub(crate) endpoints: usize,
    pub(crate) ready_endpoints: usize,
    pub(crate) version: u64,
    /// A sentence for each frontend of the Service that another Service owns.
    pub(crate) conflicts: Vec<String>,
}

/// The numbers of resources at a version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) version: u64,
    pub(crate) services: usize,
    pub(crate) endpoints: usize,
    pub(crate) nodes: usize,
}

/// The place of a watcher in the log.
#[derive(Debug, Clone, Copy)]
pub struct WatchCursor(LogPlace);

/// A page of changes that a watcher has not seen.
#[derive(Debug)]
pub struct WatchPage {
    /// Versions and present values, the oldest change first, each key once.
    pub changes: Vec<(u64, Change)>,
    /// Where the next page begins.
    pub next: WatchCursor,
    /// True if the log does not reach back to the start of this page, so that changes are missing.
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

    /// Ready endpoints of the family with more of them: dual-stack pods count once.
    pub(crate) fn ready_endpoints(&self, key: &ServiceKey) -> usize {
        let inner = self.read();
        let Some(entry) = inner.state.entry(key) else { return 0 };
        let ready = |family| {
            let of_family = |endpoint: &&Endpoint| Family::of(endpoint.address) == family && endpoint.has_ready_port();
            entry.endpoints().values().filter(of_family).count()
        };
        Family::BOTH.map(ready).into_iter().max().unwrap_or_default()
    }

    /// The number of Services that lack frontends because other Services own them, and of Services
    /// without a ready endpoint.
    pub(crate) fn conflicts_and_unready(&self) -> (usize, usize) {
        let inner = self.read();
        let services = inner.state.entries().map(|(_, entry)| entry).filter(|entry| entry.service().is_some());
        let unready = services.filter(|entry| !entry.endpoints().values().any(Endpoint::has_ready_port)).count();
        (inner.state.frontends().losers().len(), unready)
    }

    /// The sorted keys that pass `filter`. Keys that have endpoints but no Service are included.
    pub(crate) fn keys(&self, filter: impl Fn(&ServiceKey) -> bool) -> Vec<Arc<ServiceKey>> {
        let inner = self.read();
        let mut keys: Vec<_> = inner.state.entries().map(|(key, _)| key).filter(|key| filter(key)).cloned().collect();
        drop(inner);
        keys.sort_unstable();
        keys
    }

    pub(crate) fn service(&self, key: &ServiceKey) -> Option<ServiceDetail> {
        let inner = self.read();
        let entry = inner.state.entry(key)?;
        let service = entry.service()?.clone();
        let all = || inner.state.frontends().conflicts(key);
        let mut conflicts: Vec<String> = all().take(MAX_CONFLICTS_OF_SERVICE).map(|shown| shown.to_string()).collect();
        if let more @ 1.. = all().count() - conflicts.len() {
            conflicts.push(format!("{more} more are not shown"));
        }
        Some(ServiceDetail {
            conflicts,
            endpoints: entry.endpoints().len(),
            ready_endpoints: entry.endpoints().values().filter(|endpoint| endpoint.has_ready_port()).count(),
            version: inner.log.newest_version(key),
            service,
        })
    }

    /// A problem for each Service with conflicts, and beyond [`MAX_CONFLICTS`] their number.
    pub(crate) fn conflict_problems(&self) -> Vec<Problem> {
        let inner = self.read();
        let frontends = inner.state.frontends();
        let problem = |key: &Arc<ServiceKey>| {
            let conflict = frontends.conflicts(key).next()?;
            let (object, field) = (format!("Service {key}"), conflict.field().to_owned());
            let message = format!("{conflict}; until then {key} gets no packets there");
            Some(Problem { object, field, message, ..Problem::default() })
        };
        let losers: Vec<_> = frontends.losers().collect();
        let by_namespace = losers.chunk_by(|a, b| a.namespace == b.namespace);
        let shown = by_namespace.flat_map(|keys| keys.iter().take(MAX_CONFLICTS_OF_NAMESPACE));
        let mut problems: Vec<_> = shown.take(MAX_CONFLICTS).filter_map(|key| problem(key)).collect();
        if let more @ 1.. = frontends.losers().len() - problems.len() {
            let message = "lack addresses or ports that belong to other Services".to_owned();
            problems.push(Problem { object: format!("{more} more Services"), message, ..Problem::default() });
        }
        problems
    }

    /// Endpoints in order of address, split by the state of their ports, with versions.
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

    /// Returns the version of the last change of the Service or any of its endpoints. If `endpoint`
    /// is given, only the endpoint with this address counts. If `gone` is false, the result is
    /// `None` when the Service or endpoint does not exist. If `gone` is true, the result is `None`
    /// when the Service or endpoint exists. If the log no longer contains the change, the result is
    /// the floor of the log. A floor of 0 is replaced by the newest version.
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

    /// The place of a watcher that has seen all changes so far.
    #[must_use]
    pub fn watch_cursor(&self) -> WatchCursor {
        WatchCursor(log::after(self.version()))
    }

    /// At most `limit` changes from `place` on, of each key only the newest value.
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
