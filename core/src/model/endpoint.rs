//! Endpoints.

use std::{net::IpAddr, sync::Arc};

use compact_str::CompactString;

use super::Protocol;

/// `conditions` of an endpoint, with the API's defaults applied (nil ready and serving mean true,
/// nil terminating false).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Conditions {
    /// May receive new connections.
    pub ready: bool,
    /// Its pod is ready, terminating or not.
    pub serving: bool,
    /// Its pod is being deleted.
    pub terminating: bool,
}

impl Conditions {
    /// The usual state: ready, serving, not terminating.
    pub const READY: Self = Self { ready: true, serving: true, terminating: false };

    /// Used only when no endpoint is ready (KEP-1669).
    #[must_use]
    pub fn is_serving_terminating(self) -> bool {
        self.serving && self.terminating
    }
}

/// One named port of an endpoint.
///
/// An EndpointSlice says conditions and placement of an address for the ports that this slice
/// lists. Two ports of one address may come from different slices, so they may differ in both. Few
/// do: a port carries only what differs from its [`Endpoint`], and equal lists of ports stay
/// shared.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EndpointPort {
    /// Joins it to the [`super::ServicePort`] of that name.
    pub name: CompactString,
    /// Transport protocol.
    pub protocol: Protocol,
    /// Port on the endpoint's address, never 0.
    pub port: u16,
    /// Conditions of this port; `None` if they are the endpoint's.
    pub conditions: Option<Conditions>,
    /// Placement of this port; `None` if it is the endpoint's.
    pub placement: Option<Arc<Placement>>,
}

impl EndpointPort {
    /// A port with the conditions and the placement of its endpoint.
    #[must_use]
    pub fn new(name: impl Into<CompactString>, protocol: Protocol, port: u16) -> Self {
        Self { name: name.into(), protocol, port, conditions: None, placement: None }
    }

    /// What identifies a port among the ports of one address.
    #[must_use]
    pub fn key(&self) -> (&str, Protocol, u16) {
        (&self.name, self.protocol, self.port)
    }
}

/// `hints` of an endpoint. Empty lists mean that there is no such hint.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Hints {
    /// `forZones`, sorted.
    pub zones: Vec<Arc<str>>,
    /// `forNodes`, sorted.
    pub nodes: Vec<Arc<str>>,
}

/// Where an endpoint runs, and whom it should serve. Endpoints on one node mostly have the same,
/// whatever their service.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Placement {
    /// The node it runs on, lower case.
    pub node: Option<Arc<str>>,
    /// The zone it is in.
    pub zone: Option<Arc<str>>,
    /// Hints, if it has any.
    pub hints: Option<Arc<Hints>>,
}

impl Placement {
    /// On a node, without zone and hints.
    #[must_use]
    pub fn on(node: &str) -> Self {
        Self { node: Some(node.into()), ..Self::default() }
    }
}

/// An address behind a service. Its identity is the service and the address. Port lists and
/// placements are shared, since a cluster has few different ones.
///
/// The control plane writes each value in one way only, since digests are made from it: an endpoint
/// has the conditions and the placement of its first port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    /// The address.
    pub address: IpAddr,
    /// The ports that EndpointSlices list for the address: sorted, each [key](EndpointPort::key)
    /// once.
    pub ports: Arc<[EndpointPort]>,
    /// Conditions of all ports that carry none themselves.
    pub conditions: Conditions,
    /// Where all ports that carry no placement run, and whom they should serve.
    pub placement: Arc<Placement>,
}

/// One port of an endpoint, with what holds for this address and port.
#[derive(Debug, Clone, Copy)]
pub struct PortState<'a> {
    /// The endpoint's address.
    pub address: IpAddr,
    /// The port.
    pub port: &'a EndpointPort,
    /// Conditions of the address and port.
    pub conditions: Conditions,
    /// Placement of the address and port.
    pub placement: &'a Arc<Placement>,
}

impl Endpoint {
    /// A ready endpoint without node, zone and hints, for callers that fill in the rest.
    #[must_use]
    pub fn new(address: IpAddr, ports: Arc<[EndpointPort]>) -> Self {
        Self { address, ports, conditions: Conditions::READY, placement: Arc::default() }
    }

    /// All ports, with the conditions and the placement of each.
    pub fn port_states(&self) -> impl Iterator<Item = PortState<'_>> + Clone {
        self.ports.iter().map(|port| PortState {
            address: self.address,
            port,
            conditions: port.conditions.unwrap_or(self.conditions),
            placement: port.placement.as_ref().unwrap_or(&self.placement),
        })
    }

    /// All placements: the endpoint's, then those that ports carry themselves.
    pub fn placements(&self) -> impl Iterator<Item = &Arc<Placement>> {
        std::iter::once(&self.placement).chain(self.ports.iter().filter_map(|port| port.placement.as_ref()))
    }

    /// The endpoint taken apart: one for each group of ports that have the same conditions and
    /// placement, in the order of their first ports.
    #[must_use]
    pub fn by_state(&self) -> Vec<Self> {
        if self.ports.iter().all(|port| port.conditions.is_none() && port.placement.is_none()) {
            return vec![self.clone()];
        }
        let mut groups: Vec<(PortState<'_>, Vec<EndpointPort>)> = Vec::new();
        for state in self.port_states() {
            let is_same =
                |group: &PortState<'_>| group.conditions == state.conditions && group.placement == state.placement;
            let port = EndpointPort { conditions: None, placement: None, ..state.port.clone() };
            match groups.iter_mut().find(|(group, _)| is_same(group)) {
                Some((_, ports)) => ports.push(port),
                None => groups.push((state, vec![port])),
            }
        }
        let endpoint = |(state, ports): (PortState<'_>, Vec<EndpointPort>)| Self {
            address: self.address,
            ports: ports.into(),
            conditions: state.conditions,
            placement: Arc::clone(state.placement),
        };
        groups.into_iter().map(endpoint).collect()
    }

    /// Some port of the address is ready.
    #[must_use]
    pub fn has_ready_port(&self) -> bool {
        self.port_states().any(|state| state.conditions.ready)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_is_taken_apart_by_the_state_of_its_ports() {
        let plain = |name: &str| EndpointPort::new(name, Protocol::Tcp, 80);
        let not_ready = Conditions { ready: false, serving: false, terminating: false };
        let elsewhere = Arc::new(Placement::on("node-2"));
        let of_ports = |ports: Vec<EndpointPort>| Endpoint::new([10, 0, 0, 1].into(), ports.into());
        let endpoint = of_ports(vec![
            plain("a"),
            EndpointPort { conditions: Some(not_ready), ..plain("b") },
            EndpointPort { placement: Some(Arc::clone(&elsewhere)), ..plain("c") },
            // What it carries is what the endpoint has.
            EndpointPort { conditions: Some(Conditions::READY), ..plain("d") },
            EndpointPort { conditions: Some(not_ready), placement: Some(Arc::default()), ..plain("e") },
        ]);
        let groups = [
            of_ports(vec![plain("a"), plain("d")]),
            Endpoint { conditions: not_ready, ..of_ports(vec![plain("b"), plain("e")]) },
            Endpoint { placement: elsewhere, ..of_ports(vec![plain("c")]) },
        ];
        assert_eq!(endpoint.by_state(), groups);
        assert!(groups.iter().all(|group| group.by_state() == std::slice::from_ref(group)));
    }
}
