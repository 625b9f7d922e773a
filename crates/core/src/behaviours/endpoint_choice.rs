//! Endpoint choice: which endpoints of a service port this node uses, for Cluster and for Local
//! policy.
//!
//! In this file an endpoint is an address with a port, because two ports of one address may have
//! different conditions, nodes and hints.
//!
//! 1. The Cluster set contains the ready endpoints that the topology admits. If no such endpoint
//!    exists, the set contains all serving and terminating endpoints (KEP-1669), independent of the
//!    topology.
//! 2. The Local set contains the ready endpoints on this node, independent of the topology. If no
//!    such endpoint exists, the set contains the serving and terminating endpoints on this node.
//! 3. All other endpoints are in no set, and none with weight 0.
//!
//! The end of this file has the topology. [`verdict`] decides this for one endpoint. The renderers
//! and `headgatectl explain` use it.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use crate::model::{
    Endpoint, EndpointPort, Family, NodeFacts, PortState, ServicePort, Weight, greatest_common_divisor,
};

/// An endpoint to which connections can be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Destination {
    /// The address of the endpoint.
    pub address: IpAddr,
    /// The port of the endpoint.
    pub port: u16,
    /// The endpoint runs on this node.
    pub is_local: bool,
    /// The endpoint runs on this node, or its node is unknown.
    pub may_be_local: bool,
    /// The weight of the endpoint among those of its service port: a whole number.
    pub weight: Weight,
}

impl Destination {
    /// Returns address and port.
    #[must_use]
    pub fn socket_address(&self) -> SocketAddr {
        SocketAddr::new(self.address, self.port)
    }
}

/// The chosen endpoints of one service port in one family, in order of address and port.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct EndpointChoice {
    /// Endpoints for Cluster policy.
    pub cluster: Vec<Destination>,
    /// Endpoints for Local policy.
    pub local: Vec<Destination>,
    /// At least one endpoint on any node is ready, or is serving and terminating.
    pub has_any: bool,
}

/// When a set contains an endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// Always.
    First,
    /// Only if the set has no endpoint whose turn is [`Turn::First`].
    Last,
}

/// Why a set never contains an endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exclusion {
    /// The endpoint is not ready and does not terminate.
    NotReady,
    /// The endpoint terminates and does not serve any more.
    NotServing,
    /// The hints of the endpoint name other nodes.
    HintsForOtherNodes,
    /// The hints of the endpoint name other zones.
    HintsForOtherZones,
    /// The endpoint does not run on this node, or its node is unknown.
    NotOnThisNode,
    /// The endpoint has weight 0.
    NoWeight,
}

/// The membership of one endpoint in the two sets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Verdict {
    /// The set for Cluster policy.
    pub cluster: Result<Turn, Exclusion>,
    /// The set for Local policy.
    pub local: Result<Turn, Exclusion>,
}

/// Decides whether the sets of a node may contain an endpoint. `mode` is that of the service port.
#[must_use]
pub fn verdict(candidate: &PortState<'_>, mode: TopologyMode, node: &NodeFacts) -> Verdict {
    let conditions = candidate.conditions;
    let turn = match conditions {
        _ if candidate.placement.weight.is_zero() => Err(Exclusion::NoWeight),
        _ if conditions.ready => Ok(Turn::First),
        _ if conditions.is_serving_terminating() => Ok(Turn::Last),
        _ if conditions.terminating => Err(Exclusion::NotServing),
        _ => Err(Exclusion::NotReady),
    };
    let hinted = |turn: Turn| match mode {
        _ if turn == Turn::Last || mode.admits(candidate, node) => Ok(turn),
        TopologyMode::SameNode => Err(Exclusion::HintsForOtherNodes),
        TopologyMode::SameZone | TopologyMode::Any => Err(Exclusion::HintsForOtherZones),
    };
    let local = |turn: Turn| if is_local(candidate, node) { Ok(turn) } else { Err(Exclusion::NotOnThisNode) };
    Verdict { cluster: turn.and_then(hinted), local: turn.and_then(local) }
}

fn is_local(candidate: &PortState<'_>, node: &NodeFacts) -> bool {
    candidate.placement.node.as_deref() == Some(&*node.name)
}

/// Returns the endpoints of a service that belong to one of its ports.
pub fn candidates<'a>(
    endpoints: impl Iterator<Item = &'a Endpoint> + Clone,
    port: &ServicePort,
    family: Family,
) -> impl Iterator<Item = PortState<'a>> + Clone {
    endpoints
        .filter(move |endpoint| Family::of(endpoint.address) == family)
        .flat_map(move |endpoint| {
            // A Service with many ports asks for each of them, so a long list is not visited whole.
            let is_before = |other: &EndpointPort| (&other.name, other.protocol) < (&port.name, port.protocol);
            let is_long = endpoint.ports.len() > 16;
            let first = if is_long { endpoint.ports.partition_point(is_before) } else { 0 };
            endpoint.port_states().skip(first).take_while(move |state| !is_long || belongs_to(state.port, port))
        })
        .filter(move |candidate| belongs_to(candidate.port, port))
}

/// Decides the topology mode of a service port.
pub fn topology_mode<'a>(candidates: impl Iterator<Item = PortState<'a>> + Clone, node: &NodeFacts) -> TopologyMode {
    let counts = |candidate: &PortState<'a>| candidate.conditions.ready && !candidate.placement.weight.is_zero();
    TopologyMode::decide(&candidates.filter(counts), node)
}

/// Chooses the endpoints of a service for one of its ports.
pub fn choose<'a>(
    endpoints: impl Iterator<Item = &'a Endpoint> + Clone,
    port: &ServicePort,
    family: Family,
    node: &NodeFacts,
) -> EndpointChoice {
    let candidates = candidates(endpoints, port, family);
    let mode = topology_mode(candidates.clone(), node);
    let mut choice = EndpointChoice::default();
    let mut last = EndpointChoice::default();
    for candidate in candidates {
        let verdict = verdict(&candidate, mode, node);
        let (conditions, weight) = (candidate.conditions, candidate.placement.weight);
        choice.has_any |= !weight.is_zero() && (conditions.ready || conditions.is_serving_terminating());
        let is_local = is_local(&candidate, node);
        let destination = Destination {
            address: candidate.address,
            port: candidate.port.port,
            is_local,
            may_be_local: is_local || candidate.placement.node.is_none(),
            weight,
        };
        let sets = [
            (verdict.cluster, &mut choice.cluster, &mut last.cluster),
            (verdict.local, &mut choice.local, &mut last.local),
        ];
        for (turn, first, last) in sets {
            match turn {
                Ok(Turn::First) => first.push(destination),
                Ok(Turn::Last) => last.push(destination),
                Err(_) => {}
            }
        }
    }
    if choice.cluster.is_empty() {
        choice.cluster = last.cluster;
    }
    if choice.local.is_empty() {
        choice.local = last.local;
    }
    scale(&mut choice);
    choice
}

/// Gives the endpoints whole weights in the same proportion. If the largest weight is above
/// [`Weight::MAX`], the weights are rounded up to hundredths of it.
fn scale(choice: &mut EndpointChoice) {
    let all = || choice.cluster.iter().chain(&choice.local).map(|endpoint| u32::from(endpoint.weight.hundredths()));
    let unit = all().fold(u32::from(Weight::default().hundredths()), greatest_common_divisor);
    let largest = all().max().unwrap_or_default();
    let unit = unit * largest.div_ceil(unit * u32::from(Weight::MAX)).max(1);
    for endpoint in choice.cluster.iter_mut().chain(&mut choice.local) {
        endpoint.weight = Weight::new(u32::from(endpoint.weight.hundredths()).div_ceil(unit)).unwrap_or_default();
    }
}

/// True if an endpoint port has the name and the protocol of a service port.
pub(crate) fn belongs_to(candidate: &EndpointPort, port: &ServicePort) -> bool {
    candidate.name == port.name && candidate.protocol == port.protocol
}

// Topology: which ready endpoints this node prefers (KEP-2433 hints by zone, KEP-3015 hints by
// node).
//
// A ready endpoint (here, one address and port) may have hints by node, hints by zone, or both.
// Only ready endpoints decide which kind of hint applies. A kind applies only if every ready
// endpoint has a hint of that kind and at least one of these hints names this node or its zone. If
// both kinds apply, the node uses the hints by node. If neither kind applies, the node uses all
// ready endpoints. Hints therefore never leave a node without endpoints.

/// Which ready endpoints this node uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TopologyMode {
    /// The endpoints with a hint for this node.
    SameNode,
    /// The endpoints with a hint for this node's zone.
    SameZone,
    /// All endpoints.
    Any,
}

impl TopologyMode {
    /// Decides the mode from the ready endpoints of a service port.
    pub fn decide<'a>(ready: &(impl Iterator<Item = PortState<'a>> + Clone), node: &NodeFacts) -> Self {
        let applies = |mode: &Self| {
            ready.clone().all(|endpoint| !mode.hints(&endpoint).is_empty())
                && ready.clone().any(|endpoint| mode.admits(&endpoint, node))
        };
        [Self::SameNode, Self::SameZone].into_iter().find(applies).unwrap_or(Self::Any)
    }

    /// True if this node uses the ready endpoint in this mode.
    #[must_use]
    pub fn admits(self, endpoint: &PortState<'_>, node: &NodeFacts) -> bool {
        let name = match self {
            Self::Any => return true,
            Self::SameNode => &*node.name,
            Self::SameZone => node.zone.as_deref().unwrap_or_default(),
        };
        !name.is_empty() && self.hints(endpoint).iter().any(|hint| **hint == *name)
    }

    /// The hints of an endpoint that count in this mode.
    fn hints<'a>(self, endpoint: &PortState<'a>) -> &'a [Arc<str>] {
        match (self, endpoint.placement.hints.as_deref()) {
            (Self::SameNode, Some(hints)) => &hints.nodes,
            (Self::SameZone, Some(hints)) => &hints.zones,
            _ => &[],
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::model::{Conditions, EndpointPort, Hints, Placement, Protocol};

    const NOT_READY: Conditions = Conditions { ready: false, serving: false, terminating: false };
    const TERMINATING: Conditions = Conditions { ready: false, serving: true, terminating: true };

    fn service_port(name: &str) -> ServicePort {
        ServicePort { name: name.into(), protocol: Protocol::Tcp, port: 80, node_port: 0 }
    }

    fn placed(node: &str, zones: &[&str]) -> Arc<Placement> {
        let hints = Hints { zones: zones.iter().map(|zone| (*zone).into()).collect(), nodes: Vec::new() };
        Arc::new(Placement { hints: Some(hints.into()), ..Placement::on(node) })
    }

    /// Creates an address with the ports `http` and `metrics`, each with conditions and placement.
    fn endpoint(last: u8, http: (Conditions, Arc<Placement>), metrics: (Conditions, Arc<Placement>)) -> Endpoint {
        let metrics = EndpointPort {
            conditions: Some(metrics.0),
            placement: Some(metrics.1),
            ..EndpointPort::new("metrics", Protocol::Tcp, 9090)
        };
        let ports = Arc::from([EndpointPort::new("http", Protocol::Tcp, 8080), metrics]);
        Endpoint { conditions: http.0, placement: http.1, ..Endpoint::new([10, 244, 0, last].into(), ports) }
    }

    /// Returns the last bytes of the addresses that a node in zone z1 uses for a port, first for
    /// Cluster policy and then for Local policy.
    fn chosen(endpoints: &[Endpoint], port: &str) -> [Vec<u8>; 2] {
        let node = NodeFacts { zone: Some("z1".into()), ..NodeFacts::named("here") };
        let choice = choose(endpoints.iter(), &service_port(port), Family::V4, &node);
        let last = |to: &Destination| match to.address {
            IpAddr::V4(v4) => v4.octets()[3],
            IpAddr::V6(_) => 0,
        };
        [choice.cluster, choice.local].map(|set| set.iter().map(last).collect())
    }

    // rows: 9, 10
    #[test]
    fn each_port_of_an_address_has_its_own_conditions_and_node() {
        let (ready, plain) = (Conditions::READY, |node: &str| Arc::new(Placement::on(node)));
        let endpoints = [
            endpoint(1, (ready, plain("here")), (NOT_READY, plain("here"))),
            endpoint(2, (NOT_READY, plain("here")), (TERMINATING, plain("there"))),
            endpoint(3, (ready, plain("there")), (TERMINATING, plain("here"))),
        ];
        assert_eq!(chosen(&endpoints, "http"), [vec![1, 3], vec![1]]);
        assert_eq!(chosen(&endpoints, "metrics"), [vec![2, 3], vec![3]]);
    }

    fn weighing(hundredths: &[u16]) -> Vec<Endpoint> {
        let one = |(last, weight): (u8, &u16)| {
            let weight = Weight::from_hundredths(*weight);
            let placement = || Arc::new(Placement { weight, ..Placement::on("there") });
            endpoint(last, (Conditions::READY, placement()), (Conditions::READY, placement()))
        };
        (1..).zip(hundredths).map(one).collect()
    }

    #[test]
    fn an_endpoint_of_weight_zero_is_not_chosen_and_does_not_decide_about_hints() {
        assert_eq!(chosen(&weighing(&[0, 100, 0, 7]), "http")[0], [2, 4]);
        let none = weighing(&[0, 0]);
        let choice = choose(none.iter(), &service_port("http"), Family::V4, &NodeFacts::named("here"));
        assert!(!choice.has_any && choice.cluster.is_empty());
        // The only endpoint in the zone of the node has weight 0.
        let mut hinted = weighing(&[0, 100]);
        for (endpoint, zone) in hinted.iter_mut().zip(["z1", "z2"]) {
            let weight = endpoint.placement.weight;
            endpoint.placement = Arc::new(Placement { weight, ..(*placed("there", &[zone])).clone() });
        }
        assert_eq!(chosen(&hinted, "http")[0], [2]);
        // An endpoint that terminates and still serves is better than one of weight 0.
        hinted[1].conditions = TERMINATING;
        assert_eq!(chosen(&hinted, "http")[0], [2]);
    }

    #[test]
    fn weights_become_whole_numbers_in_the_same_proportion() {
        for (hundredths, expected) in [
            (&[100, 100][..], &[1, 1][..]),
            (&[500], &[5]),
            (&[200, 400, 10_000], &[2, 4, 100]),
            (&[50, 100], &[1, 2]),
            (&[0, 30, 20], &[3, 2]),
            (&[1, u16::MAX, 32_768], &[1, 100, 50]),
        ] {
            let endpoints = weighing(hundredths);
            let choice = choose(endpoints.iter(), &service_port("http"), Family::V4, &NodeFacts::named("here"));
            let weights: Vec<u32> = choice.cluster.iter().map(|endpoint| endpoint.weight.get()).collect();
            assert_eq!(weights, expected, "{hundredths:?}");
        }
    }
}
