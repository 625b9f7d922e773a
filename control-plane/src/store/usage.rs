//! Whether an endpoint gets new connections, for the drain barrier and for readiness gates
//! (discovery.proto, section 18).

use std::{
    collections::HashMap,
    net::IpAddr,
    sync::{Arc, Mutex, PoisonError},
};

use headgate_core::{Endpoint, EndpointPort, Family, Service, ServiceKey, ServicePort, TrafficPolicy};

use super::{Inner, Store};

/// The maximum number of remembered witnesses.
const MAX_WITNESSES: usize = 16_384;

/// Whether the nodes of a cluster use an endpoint for new connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Usage {
    /// A port of the endpoint is ready.
    Ready,
    /// The endpoint is neither ready nor terminating, so it may be used a moment later.
    MayReturn,
    /// The nodes that have this version or a later one do not use the endpoint, with an exception:
    /// where it is the last endpoint, it stays in use.
    UnusedSince(u64, Last),
}

impl Usage {
    /// Returns the version since which the endpoint is unused, and where it stays in use. The error
    /// says why it is in use.
    pub(crate) fn unused(self) -> Result<(u64, Last), &'static str> {
        match self {
            Self::Ready => Err("is ready"),
            Self::MayReturn => Err("is not ready and not terminating, so it may become ready again"),
            Self::UnusedSince(version, last) => Ok((version, last)),
        }
    }
}

/// Where a terminating endpoint stays in use, because no other endpoint is ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Last {
    /// Nowhere.
    No,
    /// On its own node, by a Local policy.
    OnItsNode,
    /// On all nodes.
    Everywhere,
}

/// Ready endpoints that were found before, by Service, port, family and node. The search for a
/// witness looks at all endpoints of a Service, and many pods ask about the same one.
#[derive(Debug, Default)]
pub(super) struct Witnesses(Mutex<HashMap<WitnessKey, (IpAddr, u64)>>);

type WitnessKey = (Arc<ServiceKey>, ServicePort, Family, Option<Arc<str>>);

impl Store {
    /// Returns whether an endpoint gets new connections. The endpoint may have been removed.
    ///
    /// The result follows from the present state alone. An endpoint that is serving and terminating
    /// is unused while a *witness* exists: a ready endpoint of the same port. Service, endpoint and
    /// witness have not changed since the newest of their versions. So all versions since then have
    /// the same result.
    #[must_use]
    pub fn usage(&self, key: &ServiceKey, address: IpAddr) -> Usage {
        self.read().usage(key, address)
    }

    /// Returns the version of the last change of an endpoint or of its Service.
    pub(crate) fn changed_at(&self, key: &ServiceKey, address: IpAddr) -> u64 {
        let inner = self.read();
        inner.log.endpoint_version(key, address).max(inner.log.service_version(key))
    }

    /// Returns the version since which an endpoint is ready for all its ports: every node that has
    /// programmed this version or a later one uses the endpoint. `None` if it is not ready, or if
    /// the store lacks the endpoint or its Service.
    #[must_use]
    pub fn ready_since(&self, key: &ServiceKey, address: IpAddr) -> Option<u64> {
        let inner = self.read();
        let entry = inner.state.entry(key)?;
        entry.service()?;
        let endpoint = entry.endpoints().get(&address)?;
        let is_ready = endpoint.port_states().all(|state| state.conditions.ready);
        is_ready.then(|| inner.log.endpoint_version(key, address).max(inner.log.service_version(key)))
    }
}

impl Inner {
    fn usage(&self, key: &ServiceKey, address: IpAddr) -> Usage {
        let unused = |version| Usage::UnusedSince(version, Last::No);
        let Some(entry) = self.state.entry(key) else { return unused(self.log.newest_version(key)) };
        let own = self.log.endpoint_version(key, address);
        let Some(endpoint) = entry.endpoints().get(&address) else { return unused(own) };
        let Some(service) = entry.service() else { return unused(self.log.newest_version(key)) };
        let (mut since, mut last) = (own.max(self.log.service_version(key)), Last::No);
        for port in &service.ports {
            for state in endpoint.port_states().filter(|state| is_of(state.port, port)) {
                if state.conditions.ready {
                    return Usage::Ready;
                }
                if !state.conditions.terminating {
                    return Usage::MayReturn;
                }
                if !state.conditions.is_serving_terminating() {
                    continue;
                }
                let node = state.placement.node.as_ref();
                match self.witness(key, address, port, None) {
                    Some(version) => since = since.max(version),
                    None => last = Last::Everywhere,
                }
                if is_local(service) {
                    match node.and_then(|node| self.witness(key, address, port, Some(node))) {
                        Some(version) => since = since.max(version),
                        None => last = last.max(Last::OnItsNode),
                    }
                }
            }
        }
        Usage::UnusedSince(since, last)
    }

    /// The version since which another endpoint of the same family takes new connections to a
    /// port. With `node`, only the endpoints of this node count.
    fn witness(&self, key: &ServiceKey, address: IpAddr, port: &ServicePort, node: Option<&Arc<str>>) -> Option<u64> {
        let (shared, family) = (self.state.key(key)?, Family::of(address));
        let endpoints = self.state.entry(key)?.endpoints();
        let is_witness = |other: &Endpoint| {
            let is_ready = other.port_states().any(|state| {
                let is_near = node.is_none_or(|node| state.placement.node.as_ref() == Some(node));
                let takes_new = state.conditions.ready && !state.placement.weight.is_zero();
                is_of(state.port, port) && takes_new && is_near
            });
            is_ready && other.address != address && Family::of(other.address) == family
        };
        let place = (Arc::clone(shared), port.clone(), family, node.cloned());
        let mut known = self.witnesses.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((other, version)) = known.get(&place)
            && endpoints.get(other).is_some_and(is_witness)
            && self.log.endpoint_version(key, *other) == *version
        {
            return Some(*version);
        }
        // The oldest witness gives the lowest version.
        let versions = endpoints.values().filter(|other| is_witness(other));
        let versions = versions.map(|other| (self.log.endpoint_version(key, other.address), other.address));
        let (version, other) = versions.min()?;
        if known.len() >= MAX_WITNESSES {
            known.clear();
        }
        known.insert(place, (other, version));
        Some(version)
    }
}

/// True if an endpoint's port belongs to a port of the Service.
fn is_of(candidate: &EndpointPort, port: &ServicePort) -> bool {
    candidate.name == port.name && candidate.protocol == port.protocol
}

/// True if some connections to the Service stay on their node.
fn is_local(service: &Service) -> bool {
    [service.internal_traffic_policy, service.external_traffic_policy].contains(&TrafficPolicy::Local)
}
