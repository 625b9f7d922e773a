//! The keys of the resources that changed since the state was last written to disk.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use headgate_core::{Change, ServiceKey, State};
use headgate_proto::{ChangesBuilder, v1};

/// Maximum number of keys. If more resources change, the whole state is written, which needs less
/// memory.
const MAX_KEYS: usize = 16_384;

/// Changes are split into records of about this size.
pub(crate) const CHANGES_BYTES: usize = 64 << 10;

/// The resources that changed since the last write, with their present values.
#[derive(Debug)]
pub(crate) struct UnsavedChanges {
    /// The generation of the state after these changes, see [`crate::state::AgentState`].
    pub(crate) generation: u64,
    /// Changed and removed resources.
    pub(crate) changes: Vec<v1::Changes>,
    /// The agent's own Node, if it has changed.
    pub(crate) node: Option<v1::OwnNode>,
    /// The version and positions of the state.
    pub(crate) point: v1::Resume,
}

/// Encodes changes as messages of about [`CHANGES_BYTES`] each.
pub(crate) fn to_wire(changes: impl Iterator<Item = Change>) -> Vec<v1::Changes> {
    let (mut messages, mut builder) = (Vec::new(), ChangesBuilder::default());
    for change in changes {
        builder.push(&change, 0);
        if builder.estimated_bytes() >= CHANGES_BYTES {
            messages.push(std::mem::take(&mut builder).finish());
        }
    }
    if builder.resources() > 0 {
        messages.push(builder.finish());
    }
    messages
}

/// The resources that are not on disk yet. Contains keys but no values: a write uses the values
/// that the resources have at the time of the write.
#[derive(Debug, Default)]
pub enum Unsaved {
    /// The state is not written to disk at all.
    #[default]
    Off,
    /// The whole state must be written: too many keys changed, or nothing was written yet.
    Everything,
    /// The resources with these keys must be written.
    Some(Keys),
}

/// Keys of resources that were changed or removed.
#[derive(Debug, Default)]
pub struct Keys {
    services: BTreeMap<ServiceKey, ServiceKeys>,
    service_cidrs: BTreeSet<String>,
    count: usize,
}

#[derive(Debug, Default)]
struct ServiceKeys {
    service: bool,
    endpoints: BTreeSet<IpAddr>,
}

impl Unsaved {
    /// Records the key of a change.
    pub fn note(&mut self, change: &Change) {
        let Self::Some(keys) = self else { return };
        keys.note(change);
        if keys.count > MAX_KEYS {
            *self = Self::Everything;
        }
    }
}

impl Keys {
    /// The keys of all ServiceCIDRs of a state. A cluster has only few ServiceCIDRs.
    pub(crate) fn of_service_cidrs(state: &State) -> Self {
        let mut keys = Self::default();
        state.service_cidrs().for_each(|service_cidr| keys.note(&Change::ServiceCidr(service_cidr.clone())));
        keys
    }

    fn note(&mut self, change: &Change) {
        let is_new = match change {
            Change::Service(service) => !std::mem::replace(&mut self.of(&service.key).service, true),
            Change::RemoveService(key) => !std::mem::replace(&mut self.of(key).service, true),
            Change::Endpoint(key, endpoint) => self.of(key).endpoints.insert(endpoint.address),
            Change::RemoveEndpoint(key, address) => self.of(key).endpoints.insert(*address),
            Change::ServiceCidr(service_cidr) => self.service_cidrs.insert(service_cidr.name.to_string()),
            Change::RemoveServiceCidr(name) => self.service_cidrs.insert(name.to_string()),
        };
        self.count += usize::from(is_new);
    }

    fn of(&mut self, key: &ServiceKey) -> &mut ServiceKeys {
        self.services.entry(key.clone()).or_default()
    }

    /// Returns the values that the resources with these keys have in a state, or removals for
    /// resources that the state does not contain. Changes of one service are adjacent.
    pub(crate) fn changes<'a>(&'a self, state: &'a State) -> impl Iterator<Item = Change> + 'a {
        let of_services = self.services.iter().flat_map(move |(key, keys)| {
            let entry = state.entry(key);
            let service = keys.service.then(|| {
                let held = entry.and_then(|entry| entry.service().cloned());
                held.map_or_else(|| Change::RemoveService(key.clone()), Change::from)
            });
            let endpoints = keys.endpoints.iter().map(move |address| {
                let held = entry.and_then(|entry| entry.endpoints().get(address).cloned());
                held.map_or_else(
                    || Change::RemoveEndpoint(key.clone(), *address),
                    |endpoint| Change::Endpoint(key.clone(), endpoint),
                )
            });
            service.into_iter().chain(endpoints)
        });
        let of_service_cidrs = self.service_cidrs.iter().map(|name| {
            let held = state.service_cidr(name).cloned();
            held.map_or_else(|| Change::RemoveServiceCidr(name.as_str().into()), Change::ServiceCidr)
        });
        of_services.chain(of_service_cidrs)
    }
}
