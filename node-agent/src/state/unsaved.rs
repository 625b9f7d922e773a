//! What has changed since the state was last written to disk.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use headgate_core::{Change, ServiceKey, State};
use headgate_proto::{ChangesBuilder, v1};

/// Keys that are remembered at most. Beyond that everything is written anew, which costs less
/// memory.
const MAX_KEYS: usize = 16_384;

/// Size at which changes are cut into records.
pub(crate) const CHANGES_BYTES: usize = 64 << 10;

/// What changed since the last write, as it is now.
#[derive(Debug)]
pub(crate) struct UnsavedChanges {
    /// The state that this leads to, as [`crate::state::AgentState`] counts.
    pub(crate) generation: u64,
    /// Values and removals.
    pub(crate) changes: Vec<v1::Changes>,
    /// The agent's own node, when it has changed.
    pub(crate) node: Option<v1::OwnNode>,
    /// Version and positions.
    pub(crate) point: v1::Resume,
}

/// Changes in messages of a size that suits records.
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

/// See the module. Remembers keys only: what is written is their value at that moment.
#[derive(Debug, Default)]
pub enum Unsaved {
    /// Nothing is written to disk.
    #[default]
    Off,
    /// So much that single keys do not matter, or nothing was written yet.
    Everything,
    /// These.
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
    /// Takes note of a change. Cost: one key.
    pub fn note(&mut self, change: &Change) {
        let Self::Some(keys) = self else { return };
        keys.note(change);
        if keys.count > MAX_KEYS {
            *self = Self::Everything;
        }
    }
}

impl Keys {
    /// All ServiceCIDRs of a state; there are few.
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

    /// What these keys are in a state: values, and removals of what is not there. In order of
    /// service.
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
