//! Endpoint choice: which endpoints of a service port this node uses, for Cluster and for Local policy.
//!
//! 1. The Cluster set is the ready endpoints that the [topology](crate::topology) admits; if there is none, all that are serving and terminating
//!    (KEP-1669), whatever the topology.
//! 2. The Local set is the ready endpoints on this node; if there is none, those of this node that are serving and terminating. Hints
//!    never apply.
//! 3. An endpoint that is neither ready nor serving and terminating is never used.
//! 4. Of each set, endpoints that fail this node's [health checks](crate::endpoint_health) get no new connections, unless all of them fail.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
};

use crate::{
    model::{Endpoint, Family, ServicePort},
    topology::TopologyMode,
    view::NodeFacts,
};

/// Where a connection can be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Destination {
    /// Address of the endpoint.
    pub address: IpAddr,
    /// Its port.
    pub port: u16,
    /// It runs on this node.
    pub is_local: bool,
    /// It runs on this node, or on none that is known.
    pub may_be_here: bool,
}

/// The endpoints of one service port in one family. Lists are in order of address and port.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct EndpointChoice {
    /// For Cluster policy.
    pub cluster: Vec<Destination>,
    /// For Local policy.
    pub local: Vec<Destination>,
    /// Of the Cluster set, those that fail health checks while others do not: they get no new connections, and keep theirs.
    pub failing_cluster: Vec<Destination>,
    /// The same of the Local set.
    pub failing_local: Vec<Destination>,
    /// There is a ready, or serving and terminating, endpoint anywhere.
    pub has_any: bool,
}

impl EndpointChoice {
    /// Takes those that fail out of each set, unless that would leave none.
    #[must_use]
    pub fn without_failing(mut self, failing: &BTreeSet<SocketAddr>) -> Self {
        if failing.is_empty() {
            return self;
        }
        let is_good = |endpoint: &Destination| !failing.contains(&SocketAddr::new(endpoint.address, endpoint.port));
        for (set, failing) in
            [(&mut self.cluster, &mut self.failing_cluster), (&mut self.local, &mut self.failing_local)]
        {
            if set.iter().any(is_good) {
                (*set, *failing) = std::mem::take(set).into_iter().partition(is_good);
            }
        }
        self
    }
}

/// Chooses among the endpoints of a service for one of its ports.
pub fn choose<'a>(
    endpoints: impl Iterator<Item = &'a Endpoint> + Clone,
    port: &ServicePort,
    family: Family,
    node: &NodeFacts,
) -> EndpointChoice {
    let candidates = endpoints.filter(move |endpoint| {
        Family::of(endpoint.address) == family && endpoint.ports.iter().any(|candidate| joins(candidate, port))
    });
    let ready = candidates.clone().filter(|endpoint| endpoint.conditions.ready);
    let mode = TopologyMode::decide(ready.clone(), node);
    let is_local = |endpoint: &Endpoint| endpoint.placement.node.as_deref() == Some(&*node.name);

    let mut choice = EndpointChoice::default();
    let mut terminating = EndpointChoice::default();
    for endpoint in candidates {
        let conditions = endpoint.conditions;
        let chosen = if conditions.ready {
            &mut choice
        } else if conditions.is_serving_terminating() {
            &mut terminating
        } else {
            continue;
        };
        chosen.has_any = true;
        let admitted = !conditions.ready || mode.admits(endpoint, node);
        for candidate in endpoint.ports.iter().filter(|candidate| joins(candidate, port)) {
            let destination = Destination {
                address: endpoint.address,
                port: candidate.port,
                is_local: is_local(endpoint),
                may_be_here: is_local(endpoint) || endpoint.placement.node.is_none(),
            };
            if admitted {
                chosen.cluster.push(destination);
            }
            if destination.is_local {
                chosen.local.push(destination);
            }
        }
    }
    if choice.cluster.is_empty() {
        choice.cluster = terminating.cluster;
    }
    if choice.local.is_empty() {
        choice.local = terminating.local;
    }
    choice.has_any |= terminating.has_any;
    choice
}

/// Name and protocol join an endpoint's port to a service's, never the number.
pub(crate) fn joins(candidate: &crate::model::EndpointPort, port: &ServicePort) -> bool {
    candidate.name == port.name && candidate.protocol == port.protocol
}
