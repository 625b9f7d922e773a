//! Endpoints.

use std::{net::IpAddr, sync::Arc};

use compact_str::CompactString;

use super::Protocol;

/// `conditions` of an endpoint, with the API's defaults applied: absent `ready` and `serving` mean
/// true, absent `terminating` means false.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Conditions {
    /// The endpoint may receive new connections.
    pub ready: bool,
    /// The pod is ready, even if it is terminating.
    pub serving: bool,
    /// The pod is being deleted.
    pub terminating: bool,
}

impl Conditions {
    /// The usual state: ready, serving, not terminating.
    pub const READY: Self = Self { ready: true, serving: true, terminating: false };

    /// True for endpoints that receive traffic only when no endpoint is ready (KEP-1669).
    #[must_use]
    pub fn is_serving_terminating(self) -> bool {
        self.serving && self.terminating
    }
}

/// One named port of an endpoint.
///
/// The conditions and the placement of an address in an EndpointSlice apply to the ports in that
/// slice. Two ports of one address may be in different slices, so their conditions and placements
/// may differ. Such differences are rare. A port therefore carries only values that differ from its
/// [`Endpoint`], and endpoints share equal port lists.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EndpointPort {
    /// The name of the [`super::ServicePort`] to which this port belongs.
    pub name: CompactString,
    /// Transport protocol.
    pub protocol: Protocol,
    /// Port number on the endpoint's address, never 0.
    pub port: u16,
    /// Conditions of this port; `None` means the conditions of the endpoint.
    pub conditions: Option<Conditions>,
    /// Placement of this port; `None` means the placement of the endpoint.
    pub placement: Option<Arc<Placement>>,
}

impl EndpointPort {
    /// Creates a port with the conditions and the placement of its endpoint.
    #[must_use]
    pub fn new(name: impl Into<CompactString>, protocol: Protocol, port: u16) -> Self {
        Self { name: name.into(), protocol, port, conditions: None, placement: None }
    }

    /// The fields that identify a port among the ports of one address.
    #[must_use]
    pub fn key(&self) -> (&str, Protocol, u16) {
        (&self.name, self.protocol, self.port)
    }
}

/// `hints` of an endpoint. An empty list means that the endpoint has no hints of that kind.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Hints {
    /// `forZones`, sorted.
    pub zones: Vec<Arc<str>>,
    /// `forNodes`, sorted.
    pub nodes: Vec<Arc<str>>,
}

/// The weight of an endpoint. The share of an endpoint in the connections to a service port is its
/// weight, divided by the sum of all weights. An endpoint with weight 0 gets no new connections and
/// keeps its connections. Annotations of the EndpointSlice set the weight. Without them, it is 1.
///
/// The weight is held in hundredths, because Cilium's default is 100.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Weight(u16);

impl Weight {
    /// The largest weight of the annotation `headgate.io/weights`, and of a
    /// [`Destination`](crate::endpoint_choice::Destination).
    pub const MAX: u16 = 100;

    /// Creates a weight. Returns `None` if the number is not between 0 and [`Self::MAX`].
    #[must_use]
    pub fn new(number: u32) -> Option<Self> {
        let number = u16::try_from(number).ok().filter(|number| *number <= Self::MAX)?;
        Some(Self(number * 100))
    }

    /// Creates a weight from hundredths.
    #[must_use]
    pub fn from_hundredths(hundredths: u16) -> Self {
        Self(hundredths)
    }

    /// Returns the weight in hundredths.
    #[must_use]
    pub fn hundredths(self) -> u16 {
        self.0
    }

    /// Returns the weight, rounded up.
    #[must_use]
    pub fn get(self) -> u32 {
        u32::from(self.0.div_ceil(100))
    }

    /// True if the endpoint gets no new connections.
    #[must_use]
    pub fn is_zero(self) -> bool {
        self.0 == 0
    }
}

impl Default for Weight {
    fn default() -> Self {
        Self(100)
    }
}

/// The greatest common divisor of two numbers.
pub(crate) fn greatest_common_divisor(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

/// Where an endpoint runs, which zones or nodes it should serve, and its weight. Most endpoints on
/// one node have equal placements, so they share one value.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Placement {
    /// The node, in lower case; `None` if the EndpointSlice does not name a node.
    pub node: Option<Arc<str>>,
    /// The zone of the endpoint.
    pub zone: Option<Arc<str>>,
    /// Topology hints.
    pub hints: Option<Arc<Hints>>,
    /// The weight.
    pub weight: Weight,
}

impl Placement {
    /// Creates a placement on a node, with weight 1 and without zone and hints.
    #[must_use]
    pub fn on(node: &str) -> Self {
        Self { node: Some(node.into()), ..Self::default() }
    }
}

/// One address behind a service. The Service and the address identify an endpoint. Endpoints share
/// port lists and placements, because a cluster has few different values of them.
///
/// Digests are computed from this value, so equal endpoints must have equal fields. The control
/// plane therefore sets the conditions and the placement of the endpoint to the conditions and the
/// placement of its first port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    /// The address.
    pub address: IpAddr,
    /// The ports that EndpointSlices list for the address, sorted. Each [key](EndpointPort::key)
    /// occurs once.
    pub ports: Arc<[EndpointPort]>,
    /// Conditions of all ports that carry no conditions.
    pub conditions: Conditions,
    /// Placement of all ports that carry no placement.
    pub placement: Arc<Placement>,
}

/// One port of an endpoint, with the conditions and the placement that apply to it.
#[derive(Debug, Clone, Copy)]
pub struct PortState<'a> {
    /// The endpoint's address.
    pub address: IpAddr,
    /// The port.
    pub port: &'a EndpointPort,
    /// Conditions of this address and port.
    pub conditions: Conditions,
    /// Placement of this address and port.
    pub placement: &'a Arc<Placement>,
}

impl Endpoint {
    /// True if one of its ports has another weight than 1.
    #[must_use]
    pub fn is_weighted(&self) -> bool {
        let of_ports = self.ports.iter().filter_map(|port| port.placement.as_ref());
        of_ports.chain([&self.placement]).any(|placement| placement.weight != Weight::default())
    }

    /// Creates a ready endpoint without node, zone and hints. Callers set other fields as needed.
    #[must_use]
    pub fn new(address: IpAddr, ports: Arc<[EndpointPort]>) -> Self {
        Self { address, ports, conditions: Conditions::READY, placement: Arc::default() }
    }

    /// Returns all ports, each with its conditions and its placement.
    pub fn port_states(&self) -> impl Iterator<Item = PortState<'_>> + Clone {
        self.ports.iter().map(|port| PortState {
            address: self.address,
            port,
            conditions: port.conditions.unwrap_or(self.conditions),
            placement: port.placement.as_ref().unwrap_or(&self.placement),
        })
    }

    /// Splits the endpoint by the state of its ports. Returns one endpoint for each group of ports
    /// with equal conditions and placement, in the order of the first port of each group.
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

    /// True if at least one port is ready.
    #[must_use]
    pub fn has_ready_port(&self) -> bool {
        self.port_states().any(|state| state.conditions.ready)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_is_split_by_the_state_of_its_ports() {
        let plain = |name: &str| EndpointPort::new(name, Protocol::Tcp, 80);
        let not_ready = Conditions { ready: false, serving: false, terminating: false };
        let elsewhere = Arc::new(Placement::on("node-2"));
        let of_ports = |ports: Vec<EndpointPort>| Endpoint::new([10, 0, 0, 1].into(), ports.into());
        let endpoint = of_ports(vec![
            plain("a"),
            EndpointPort { conditions: Some(not_ready), ..plain("b") },
            EndpointPort { placement: Some(Arc::clone(&elsewhere)), ..plain("c") },
            // This port carries conditions that are equal to the conditions of the endpoint.
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
