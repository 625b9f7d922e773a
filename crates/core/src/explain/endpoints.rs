//! Why a node chooses an endpoint or leaves it out.

use std::{fmt, net::IpAddr, sync::Arc};

use crate::{
    behaviours::view::{self, Destination, Exclusion, TopologyMode, Turn},
    model::{Conditions, Endpoint, Family, NodeFacts, Placement, PortState, ServicePort, TrafficPolicy},
};

/// Why a node leaves out an endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeftOut {
    /// The endpoint has no port with the name and the protocol of the service port.
    NoSuchPort,
    /// The endpoint is in no set, or not in the set of the policy.
    Excluded(Exclusion),
    /// The endpoint terminates, and the set has endpoints that are ready.
    OthersAreReady,
    /// The endpoint fails the health checks of this node.
    FailsHealthCheck,
}

/// The reason as a part of a sentence.
impl fmt::Display for LeftOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NoSuchPort => "has no port with this name and protocol",
            Self::Excluded(Exclusion::NotReady) => "not ready",
            Self::Excluded(Exclusion::NotServing) => "terminates and does not serve any more",
            Self::Excluded(Exclusion::HintsForOtherNodes) => "its hints name other nodes",
            Self::Excluded(Exclusion::HintsForOtherZones) => "wrong zone: its hints name other zones",
            Self::Excluded(Exclusion::NotOnThisNode) => "not on this node, and the policy is Local",
            Self::Excluded(Exclusion::NoWeight) => "has weight 0, so it only keeps its connections",
            Self::OthersAreReady => "terminates, and other endpoints are ready",
            Self::FailsHealthCheck => "fails the health check of this node",
        })
    }
}

/// One endpoint, and whether the node can choose it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExplainedEndpoint {
    /// The address.
    pub address: IpAddr,
    /// The port. 0 if the endpoint has no such port.
    pub port: u16,
    /// The conditions of the port.
    pub conditions: Conditions,
    /// Node, zone, hints and weight.
    pub placement: Arc<Placement>,
    /// Why the node leaves out the endpoint. `None` if the node can choose the endpoint.
    pub left_out: Option<LeftOut>,
}

/// Explains the endpoints of a port under a policy. `chosen` get the new connections.
pub(super) fn explain<'a>(
    endpoints: impl Iterator<Item = &'a Endpoint> + Clone,
    port: &ServicePort,
    family: Family,
    facts: &NodeFacts,
    policy: TrafficPolicy,
    chosen: &[Destination],
) -> Vec<ExplainedEndpoint> {
    let candidates = view::candidates(endpoints.clone(), port, family);
    let mode = view::topology_mode(candidates.clone(), facts);
    let is_chosen = |candidate: &PortState<'_>| {
        let at = (candidate.address, candidate.port.port);
        chosen.iter().any(|endpoint| (endpoint.address, endpoint.port) == at)
    };
    let explained = |candidate: PortState<'_>, left_out| ExplainedEndpoint {
        address: candidate.address,
        port: candidate.port.port,
        conditions: candidate.conditions,
        placement: Arc::clone(candidate.placement),
        left_out,
    };
    // The health checks decide among the endpoints of a set.
    let first = candidates.clone().any(|one| member(&one, mode, facts, policy) == Ok(Turn::First));
    let mut all: Vec<ExplainedEndpoint> = candidates
        .map(|one| {
            let left_out = match member(&one, mode, facts, policy) {
                _ if is_chosen(&one) => None,
                Err(exclusion) => Some(LeftOut::Excluded(exclusion)),
                Ok(Turn::Last) if first => Some(LeftOut::OthersAreReady),
                Ok(_) => Some(LeftOut::FailsHealthCheck),
            };
            explained(one, left_out)
        })
        .collect();
    let without_port = endpoints.filter(|endpoint| {
        Family::of(endpoint.address) == family
            && !endpoint.ports.iter().any(|candidate| view::belongs_to(candidate, port))
    });
    all.extend(without_port.map(|endpoint| ExplainedEndpoint {
        address: endpoint.address,
        port: 0,
        conditions: endpoint.conditions,
        placement: Arc::clone(&endpoint.placement),
        left_out: Some(LeftOut::NoSuchPort),
    }));
    all.sort_by_key(|endpoint| (endpoint.address, endpoint.port));
    all
}

fn member(
    candidate: &PortState<'_>,
    mode: TopologyMode,
    facts: &NodeFacts,
    policy: TrafficPolicy,
) -> Result<Turn, Exclusion> {
    let verdict = view::verdict(candidate, mode, facts);
    if policy.is_local() { verdict.local } else { verdict.cluster }
}
