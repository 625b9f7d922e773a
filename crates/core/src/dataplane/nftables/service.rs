//! Computes the elements and the groups of one service port, as the configuration says.

use std::net::IpAddr;

use super::element::{Counted, Element, Refusal};
use crate::{
    behaviours::{
        endpoint_choice::Destination,
        view::{MasqueradeConfig, MasqueradeSources, Outcome, ServicePortView},
    },
    model::{Family, Protocol, TrafficPolicy, Weight},
    state::frontends::Frontend,
};

/// True for connections that go to the endpoints for policy Local, false for policy Cluster.
type IsLocal = bool;

/// The elements and the endpoints of one service port, before its groups have numbers.
#[derive(Debug, Default)]
pub(in super::super) struct PortPlan {
    /// Endpoints for policy Cluster, if a frontend uses them, sorted. Each endpoint occurs once.
    pub(in super::super) cluster: Vec<((IpAddr, u16), Weight)>,
    /// The same for policy Local.
    pub(in super::super) local: Vec<((IpAddr, u16), Weight)>,
    /// Frontends whose connections are sent to a group.
    pub(in super::super) services: Vec<(Frontend, IsLocal)>,
    /// Frontends at which local pods and the node use the endpoints for policy Cluster.
    pub(in super::super) inside: Vec<Frontend>,
    /// True if only a proxy can carry connections to the endpoints.
    pub(in super::super) is_proxy_only: bool,
    /// The elements that contain no group.
    pub(in super::super) elements: Vec<Element>,
}

/// Computes the plan of a service port.
pub(in super::super) fn plan(config: &NftablesConfig, view: &ServicePortView) -> PortPlan {
    let is_proxy_only = config.has_proxy && view.proxy_protocol.is_some();
    let mut plan = PortPlan { is_proxy_only, ..PortPlan::default() };
    let at = |address: &IpAddr| Frontend::Address(*address, view.protocol, view.port);
    if let Some(address) = &view.cluster_ip {
        plan.elements.push(Element::ClusterIp(*address));
        let sources = config.masquerade.sources_to_cluster_ips(config.family);
        plan.add_frontend(config, view, at(address), view.internal_traffic_policy, sources);
    }
    // An address may be in several lists. Only its first occurrence counts.
    let mut external: Vec<Frontend> = Vec::new();
    for address in view.external_ips.iter().chain(&view.load_balancer_ips) {
        if view.cluster_ip != Some(*address) && !external.contains(&at(address)) {
            external.push(at(address));
        }
    }
    if view.node_port != 0 {
        external.push(Frontend::NodePort(view.family, view.protocol, view.node_port));
    }
    let masquerade = MasqueradeSources::to_external_destinations(view.external_traffic_policy);
    for frontend in external {
        plan.add_frontend(config, view, frontend, view.external_traffic_policy, masquerade);
        if view.external_policy(true) != view.external_traffic_policy && !refuses(config, view) {
            plan.inside.push(frontend);
        }
    }
    // Ranges come first, as in kube-proxy's mode nftables: also a Service without endpoints gives
    // other clients no answer.
    for address in view.load_balancer_ips.iter().filter(|_| !view.source_ranges.is_open()) {
        plan.elements.push(Element::Guarded(at(address)));
        let admitted = view.source_ranges.ranges.iter().copied();
        let admitted = admitted.chain(view.source_ranges.admits_node.then_some((*address).into()));
        plan.elements.extend(admitted.map(|range| Element::Admitted(at(address), range)));
    }
    if config.counts_services {
        plan.add_counters();
    }
    if view.bypasses_proxy && view.protocol == Protocol::Tcp {
        let frontends = plan.services.iter().map(|(frontend, _)| *frontend).chain(plan.inside.iter().copied());
        plan.elements.extend(frontends.map(Element::Straight));
    }
    plan.add_endpoints(view);
    plan
}

/// Whether the rules refuse all connections to a port: a proxy cannot carry SCTP.
fn refuses(config: &NftablesConfig, view: &ServicePortView) -> bool {
    config.has_proxy && view.protocol == Protocol::Sctp
}

impl PortPlan {
    fn add_frontend(
        &mut self,
        config: &NftablesConfig,
        view: &ServicePortView,
        frontend: Frontend,
        policy: TrafficPolicy,
        masquerade: MasqueradeSources,
    ) {
        match view.outcome(policy) {
            _ if refuses(config, view) => self.elements.push(Element::Unserved(frontend, Refusal::Reject)),
            Outcome::Rejected => self.elements.push(Element::Unserved(frontend, Refusal::Reject)),
            Outcome::Dropped => self.elements.push(Element::Unserved(frontend, Refusal::Drop)),
            Outcome::Forwarded(_) => {
                self.services.push((frontend, policy.is_local()));
                // The rules translate connections for the proxy, and refuse those that are left.
                self.elements.extend(self.is_proxy_only.then_some(Element::Unserved(frontend, Refusal::Reject)));
            }
        }
        self.elements.push(Element::Masquerade(frontend, masquerade));
    }

    /// Adds the counters of all frontends.
    fn add_counters(&mut self) {
        let frontends = self.elements.iter().filter_map(|element| match element {
            Element::Masquerade(frontend, _) => Some(*frontend),
            _ => None,
        });
        let counters = frontends.flat_map(|frontend| Counted::ALL.map(|counted| Element::Counter(frontend, counted)));
        let counters: Vec<Element> = counters.collect();
        self.elements.extend(counters);
    }

    fn add_endpoints(&mut self, view: &ServicePortView) {
        let uses_cluster = !self.inside.is_empty() || self.services.iter().any(|(_, is_local)| !is_local);
        let uses_local = self.services.iter().any(|(_, is_local)| *is_local);
        let mut use_endpoints = |endpoints: &[Destination], is_used: bool| {
            let used = endpoints.iter().filter(|_| is_used);
            let here = used.clone().filter(|endpoint| endpoint.may_be_local);
            self.elements.extend(here.map(|endpoint| Element::Hairpin(endpoint.address)));
            let weighted = used.map(|endpoint| ((endpoint.address, endpoint.port), endpoint.weight));
            let mut endpoints: Vec<_> = weighted.collect();
            endpoints.sort_by_key(|(endpoint, _)| *endpoint);
            endpoints.dedup_by_key(|(endpoint, _)| *endpoint);
            endpoints
        };
        self.cluster = use_endpoints(&view.cluster_endpoints, uses_cluster);
        self.local = use_endpoints(&view.local_endpoints, uses_local);
        self.elements.sort_unstable();
        self.elements.dedup();
    }
}

// The configuration of nftables mode.

/// The configuration of one family.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NftablesConfig {
    /// The family.
    pub family: Family,
    /// Masquerading. nftables mode uses no packet mark, so it ignores [`MasqueradeConfig::bit`].
    pub masquerade: MasqueradeConfig,
    /// True if rules can hash the client's address. Otherwise slots are random.
    pub can_hash: bool,
    /// True if the kernel counts the connections and the traffic of each frontend.
    pub counts_services: bool,
    /// True in mode userspace: a proxy carries TCP connections. Rules then send no connection
    /// straight to endpoints that expect the PROXY protocol, and refuse SCTP.
    pub has_proxy: bool,
}

impl NftablesConfig {
    /// Returns the defaults of a family: no detector of local pods, and rules that can hash.
    #[must_use]
    pub fn new(family: Family) -> Self {
        Self {
            family,
            masquerade: MasqueradeConfig::default(),
            can_hash: true,
            counts_services: false,
            has_proxy: false,
        }
    }
}
