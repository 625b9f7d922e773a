//! Whether an endpoint gets new connections, for the drain barrier and for readiness gates.

use std::net::IpAddr;

use headgate_core::{Endpoint, EndpointPort, Family, Service, ServiceKey, ServicePort, TrafficPolicy};

use super::{Inner, Store};

/// Whether the nodes of a cluster use an endpoint for new connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Usage {
    /// A port of the endpoint is ready.
    InUse,
    /// The endpoint is terminating, and stays in use because no other endpoint is ready. With a
    /// Local policy, only the endpoints of its node count.
    Last,
    /// No node that has this version or a later version uses the endpoint.
    UnusedSince(u64),
}

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
        let Some(entry) = self.state.entry(key) else {
            return Usage::UnusedSince(self.log.newest_version(key));
        };
        let own = self.log.endpoint_version(key, address);
        let Some(endpoint) = entry.endpoints().get(&address) else { return Usage::UnusedSince(own) };
        let Some(service) = entry.service() else { return Usage::UnusedSince(self.log.newest_version(key)) };
        let mut since = own.max(self.log.service_version(key));
        let mut usage = None;
        for port in &service.ports {
            let mut own_states = endpoint.port_states().filter(|state| is_of(state.port, port)).peekable();
            if own_states.peek().is_none() {
                continue;
            }
            for state in own_states {
                if state.conditions.ready {
                    return Usage::InUse;
                }
                if !state.conditions.is_serving_terminating() {
                    continue;
                }
                let others = || {
                    let others = entry.endpoints().values().filter(|other| other.address != address);
                    others.filter(|other| Family::of(other.address) == Family::of(address))
                };
                let node = state.placement.node.as_deref();
                match self.witness(key, others(), port, is_local(service).then_some(node)) {
                    Some(version) => since = since.max(version),
                    None => usage = Some(Usage::Last),
                }
            }
        }
        usage.unwrap_or(Usage::UnusedSince(since))
    }

    /// The version since which an endpoint is ready for a port: the lowest version, if several
    /// endpoints are ready. With `node`, only the endpoints of this node count.
    fn witness<'a>(
        &self,
        key: &ServiceKey,
        others: impl Iterator<Item = &'a Endpoint>,
        port: &ServicePort,
        node: Option<Option<&str>>,
    ) -> Option<u64> {
        let is_witness = |other: &&Endpoint| {
            other.port_states().any(|state| {
                let is_near = node.is_none_or(|node| node.is_some() && state.placement.node.as_deref() == node);
                is_of(state.port, port) && state.conditions.ready && is_near
            })
        };
        others.filter(is_witness).map(|other| self.log.endpoint_version(key, other.address)).min()
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
