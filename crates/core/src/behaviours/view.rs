//! Views: what one node does for one service port in one family. Views do not depend on the
//! dataplane. This file also has the behaviours that need few lines: the size of a Service, source
//! ranges, masquerading, and the health-check node port.

#[cfg(test)]
mod tests;

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use compact_str::CompactString;
use ipnet::IpNet;

use crate::{
    model::{
        Endpoint, EndpointPort, Family, LoadBalancing, NodeFacts, PortState, Protocol, ProxyProtocol, Service,
        ServiceKey, ServicePort, TrafficPolicy, Weight, greatest_common_divisor,
    },
    state::{ServiceEntry, State, frontends::Frontend},
};

/// Numbers of service ports whose traffic a Local policy drops because this node has no endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NoLocalEndpoints {
    /// Ports with `internalTrafficPolicy: Local`.
    pub internal: u32,
    /// Ports with `externalTrafficPolicy: Local`.
    pub external: u32,
}

impl NoLocalEndpoints {
    /// Adds `other`.
    pub fn add(&mut self, other: Self) {
        self.internal = self.internal.saturating_add(other.internal);
        self.external = self.external.saturating_add(other.external);
    }

    /// Subtracts `other`, which was added before.
    pub fn subtract(&mut self, other: Self) {
        self.internal = self.internal.saturating_sub(other.internal);
        self.external = self.external.saturating_sub(other.external);
    }
}

/// The view of one service port in one family.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServicePortView {
    /// Namespace and name.
    pub key: Arc<ServiceKey>,
    /// Name of the port; may be empty.
    pub port_name: CompactString,
    /// Protocol.
    pub protocol: Protocol,
    /// Family.
    pub family: Family,
    /// Port number on the service's addresses.
    pub port: u16,
    /// ClusterIP; `None` if another service owns this address and port.
    pub cluster_ip: Option<IpAddr>,
    /// externalIPs whose port this service owns.
    pub external_ips: Vec<IpAddr>,
    /// Load balancer IPs whose port this service owns.
    pub load_balancer_ips: Vec<IpAddr>,
    /// NodePort that this service owns, 0 for none.
    pub node_port: u16,
    /// The clients that may reach the load balancer IPs.
    pub source_ranges: SourceRanges,
    /// Policy for the ClusterIP.
    pub internal_traffic_policy: TrafficPolicy,
    /// Policy for NodePort, externalIPs and load balancer IPs.
    pub external_traffic_policy: TrafficPolicy,
    /// Timeout of ClientIP affinity in seconds; `None` for no affinity.
    pub affinity_timeout_seconds: Option<u32>,
    /// The algorithm that the Service selects; `None` for the default of the dataplane.
    pub load_balancing: Option<LoadBalancing>,
    /// The header that endpoints of a TCP port expect at the beginning of each connection.
    pub proxy_protocol: Option<ProxyProtocol>,
    /// The most open connections of the Service on this node. `None` for no limit.
    pub max_connections: Option<u32>,
    /// Endpoints for Cluster policy.
    pub cluster_endpoints: Vec<Destination>,
    /// Endpoints for Local policy.
    pub local_endpoints: Vec<Destination>,
    /// At least one endpoint on any node can be used. Otherwise connections are rejected.
    pub has_any_endpoint: bool,
    /// The rules lead connections to endpoints although the node has a proxy, because the proxy may
    /// connect to no endpoint for some policy. The rules keep the client's address.
    pub bypasses_proxy: bool,
}

/// What a node does with a new connection to a frontend of a service port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome<'a> {
    /// The connection goes to one of these endpoints.
    Forwarded(&'a [Destination]),
    /// The client gets an error at once, because no node has a usable endpoint.
    Rejected,
    /// The node drops the packet, because the policy is Local and all endpoints are on other nodes.
    Dropped,
}

impl ServicePortView {
    /// Returns what the node does with a new connection when `policy` applies to it.
    #[must_use]
    pub fn outcome(&self, policy: TrafficPolicy) -> Outcome<'_> {
        let endpoints = if policy.is_local() { &self.local_endpoints } else { &self.cluster_endpoints };
        match (self.has_any_endpoint, endpoints.is_empty()) {
            (false, _) => Outcome::Rejected,
            (true, true) => Outcome::Dropped,
            (true, false) => Outcome::Forwarded(endpoints),
        }
    }

    /// Returns the policy for a new connection to an external destination. With Local policy,
    /// traffic from pods of this node and from the node itself may use all endpoints, because no
    /// load balancer has chosen this node for this traffic.
    #[must_use]
    pub fn external_policy(&self, is_from_inside: bool) -> TrafficPolicy {
        if is_from_inside && !self.cluster_endpoints.is_empty() {
            TrafficPolicy::Cluster
        } else {
            self.external_traffic_policy
        }
    }

    /// True if the port has a NodePort, an externalIP or a load balancer IP.
    #[must_use]
    pub fn is_externally_accessible(&self) -> bool {
        self.node_port != 0 || !self.external_ips.is_empty() || !self.load_balancer_ips.is_empty()
    }

    /// Returns all endpoints that this node may use with the policies of the service, in order.
    #[must_use]
    pub fn reachable_endpoints(&self) -> BTreeSet<Destination> {
        let cluster = self.cluster_endpoints.iter().filter(|_| self.uses_cluster_endpoints());
        let local = self.local_endpoints.iter().filter(|_| self.uses_local_endpoints());
        cluster.chain(local).copied().collect()
    }

    /// True if this node uses the endpoints for Cluster policy. Every externally accessible port
    /// does, see [`Self::external_policy`].
    #[must_use]
    pub fn uses_cluster_endpoints(&self) -> bool {
        !self.internal_traffic_policy.is_local() || self.is_externally_accessible()
    }

    /// True if this node uses the endpoints for Local policy.
    #[must_use]
    pub fn uses_local_endpoints(&self) -> bool {
        self.internal_traffic_policy.is_local()
            || (self.external_traffic_policy.is_local() && self.is_externally_accessible())
    }

    /// Counts this port for each Local policy whose endpoints are all on other nodes.
    #[must_use]
    pub fn no_local_endpoints(&self) -> NoLocalEndpoints {
        let lacks = self.has_any_endpoint && self.local_endpoints.is_empty();
        let is_external = self.external_traffic_policy.is_local() && self.is_externally_accessible();
        NoLocalEndpoints {
            internal: u32::from(lacks && self.internal_traffic_policy.is_local()),
            external: u32::from(lacks && is_external),
        }
    }

    /// Only the proxy sends the headers of the PROXY protocol, so such a port never bypasses it.
    fn must_bypass_proxy(&self, node: &NodeFacts) -> bool {
        let is_beyond = |endpoints: &[Destination]| {
            !endpoints.is_empty() && !endpoints.iter().any(|endpoint| node.dialled.permits(endpoint.address))
        };
        let cluster = self.uses_cluster_endpoints() && is_beyond(&self.cluster_endpoints);
        let local = self.uses_local_endpoints() && is_beyond(&self.local_endpoints);
        node.dialled.has_proxy && self.proxy_protocol.is_none() && (cluster || local)
    }

    fn leave_out_failing(&mut self, service: &Service, node: &NodeFacts) {
        for endpoints in [&mut self.cluster_endpoints, &mut self.local_endpoints] {
            let choice = endpoints.iter().map(Destination::socket_address);
            let failing = node.failing.among(service, self.protocol, choice);
            endpoints.retain(|endpoint| !failing.contains(&endpoint.socket_address()));
        }
    }

    /// Returns `namespace/name[:port]`. kube-proxy prints and hashes this form.
    #[must_use]
    pub fn display_name(&self) -> String {
        if self.port_name.is_empty() { self.key.to_string() } else { format!("{}:{}", self.key, self.port_name) }
    }
}

/// Returns the views of all ports of a service in one family, in the order of the spec. The views
/// do not contain endpoints that fail this node's [health checks](crate::endpoint_health), except
/// if all endpoints for a policy fail. The list is empty if the Service is unknown, has no
/// ClusterIP of the family, or is [too large](crate::view) for a node. The cost depends only on the
/// size of this Service.
#[must_use]
pub fn service_views(state: &State, key: &Arc<ServiceKey>, family: Family, node: &NodeFacts) -> Vec<ServicePortView> {
    let mut views = views_of_all_endpoints(state, key, family, node);
    if let Some(service) = state.entry(key).and_then(ServiceEntry::service) {
        views.iter_mut().for_each(|view| view.leave_out_failing(service, node));
    }
    views
}

/// Like [`service_views`], with endpoints that fail health checks, which may keep connections.
#[must_use]
pub fn views_of_all_endpoints(
    state: &State,
    key: &Arc<ServiceKey>,
    family: Family,
    node: &NodeFacts,
) -> Vec<ServicePortView> {
    let is_small = |entry: &&ServiceEntry| ServiceSize::of(entry, family).excess().is_none();
    let Some(entry) = state.entry(key).filter(is_small) else { return Vec::new() };
    let Some((service, cluster_ip)) = entry.service().and_then(|s| Some((s, s.cluster_ip(family)?))) else {
        return Vec::new();
    };
    let source_ranges = SourceRanges::of(service, family, &node.addresses);
    let view_of = |port: &ServicePort| {
        let endpoints = entry.endpoints().values().filter(|endpoint| !node.dialled.leaves_out(endpoint.address));
        let choice = choose(endpoints, port, family, node);
        let owns = |frontend| state.frontends().owns(key, &frontend);
        let owns_port_at = |address: &IpAddr| owns(Frontend::Address(*address, port.protocol, port.port));
        let owned = |addresses: &[IpAddr]| -> Vec<IpAddr> {
            let of_family = addresses.iter().filter(|address| Family::of(**address) == family);
            let owned: BTreeSet<IpAddr> = of_family.filter(|address| owns_port_at(address)).copied().collect();
            owned.into_iter().collect()
        };
        let mut view = ServicePortView {
            key: Arc::clone(key),
            port_name: port.name.clone(),
            protocol: port.protocol,
            family,
            port: port.port,
            cluster_ip: Some(cluster_ip).filter(owns_port_at),
            external_ips: if node.ignores_external_ips { Vec::new() } else { owned(&service.external_ips) },
            load_balancer_ips: owned(&service.load_balancer_ips),
            node_port: if owns(Frontend::NodePort(family, port.protocol, port.node_port)) { port.node_port } else { 0 },
            source_ranges: source_ranges.clone(),
            internal_traffic_policy: service.internal_traffic_policy,
            external_traffic_policy: service.external_traffic_policy,
            affinity_timeout_seconds: service.session_affinity.map(|affinity| affinity.timeout_seconds),
            load_balancing: LoadBalancing::parse(&service.load_balancing),
            proxy_protocol: service.proxy_protocol.filter(|_| port.protocol == Protocol::Tcp),
            max_connections: Some(service.max_connections).filter(|limit| *limit != 0),
            cluster_endpoints: choice.cluster,
            local_endpoints: choice.local,
            has_any_endpoint: choice.has_any,
            bypasses_proxy: false,
        };
        view.bypasses_proxy = view.must_bypass_proxy(node);
        if !view.uses_local_endpoints() {
            view.has_any_endpoint = !view.cluster_endpoints.is_empty();
        }
        view
    };
    service.ports.iter().map(view_of).collect()
}

// How much of a node one Service may occupy.
//
// A tenant writes Services, and each node pays for them. So the size of a Service has limits, the
// same in every mode. The control plane counts with the same functions and leaves out what is over
// its budget, which is never above these limits. So a Service meets them only if a replica is
// faulty. It then has no view in the family: no node forwards its connections.

/// The most pairs of a port and an endpoint of a Service in one family.
pub const MAX_PORT_ENDPOINTS: usize = 65_536;
/// The most destinations of mode IPVS: pairs of a virtual server and an endpoint, in one family.
pub const MAX_DESTINATIONS: usize = 262_144;
/// The most scores in mode nftables: pairs of a slot and an endpoint, for consistent-hash.
const MAX_SCORES: usize = 1 << 24;

/// The largest number of slots of a Service port with consistent-hash, in mode nftables.
///
/// With `n` endpoints of equal weight, the share of an endpoint differs from the mean by
/// `sqrt(n / slots)` (standard deviation): by 7 % with 10 endpoints, and by 22 % with 100.
pub const HASHED_SLOTS: u32 = 2048;
/// The largest number of slots that weights give to a Service port, in mode nftables. The weights
/// of larger groups are rounded.
pub const WEIGHTED_SLOTS: u32 = 4096;
/// The most slots of all ports of a Service, for one policy in one family.
const MAX_SLOTS_OF_SERVICE: usize = 16_384;

/// The size of a Service in one family. The cost on a node grows with it, and is not larger.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ServiceSize {
    ports: usize,
    frontends: usize,
    virtual_servers: usize,
    endpoints: usize,
    is_weighted: bool,
    is_hashed: bool,
}

impl ServiceSize {
    /// Returns the size of a Service, 0 in a family without a ClusterIP, where it has no rules.
    #[must_use]
    pub fn of(entry: &ServiceEntry, family: Family) -> Self {
        let has_rules = |service: &&Service| service.cluster_ip(family).is_some();
        let Some(service) = entry.service().filter(has_rules) else { return Self::default() };
        let endpoints = entry.endpoints().values().as_slice();
        let first_v6 = endpoints.partition_point(|endpoint| endpoint.address.is_ipv4());
        Self {
            ports: service.ports.len(),
            frontends: service.frontends(family),
            virtual_servers: service.virtual_servers(family),
            endpoints: if family == Family::V4 { first_v6 } else { endpoints.len() - first_v6 },
            is_weighted: entry.endpoints().are_weighted(),
            is_hashed: LoadBalancing::parse(&service.load_balancing) == Some(LoadBalancing::ConsistentHash),
        }
    }

    /// Returns the number of slots of each port with consistent-hash. The number does not depend on
    /// the node, because all nodes must send a client to the same endpoint. It depends on endpoints
    /// only above 1,024 of them, and then it is halved when their number doubles, because many
    /// clients move when it changes.
    #[must_use]
    pub fn hashed_slots(self) -> u32 {
        let slots = MAX_SLOTS_OF_SERVICE.min(MAX_SCORES / self.endpoints.next_power_of_two());
        u32::try_from(slots / self.ports.next_power_of_two()).unwrap_or(u32::MAX).clamp(1, HASHED_SLOTS)
    }

    /// Returns the most slots that weights give to each port.
    #[must_use]
    pub fn weighted_slots(self) -> u32 {
        let slots = u32::try_from(MAX_SLOTS_OF_SERVICE / self.ports.max(1)).unwrap_or(u32::MAX);
        slots.clamp(1, WEIGHTED_SLOTS)
    }

    /// An estimate of the objects that a node writes for the whole Service.
    #[must_use]
    pub fn objects(self) -> usize {
        let most_by_weight = (self.endpoints * usize::from(Weight::MAX)).min(self.weighted_slots() as usize);
        let slots = match (self.is_hashed, self.is_weighted) {
            (true, _) => self.hashed_slots() as usize,
            (false, true) => most_by_weight,
            (false, false) => 0,
        };
        self.frontends + self.ports * self.endpoints.max(slots)
    }

    /// Says which limit of agents the Service exceeds, as a sentence without its full stop.
    #[must_use]
    pub fn excess(self) -> Option<String> {
        let Self { ports, frontends, virtual_servers, endpoints, .. } = self;
        let limits = [
            (frontends, Service::MAX_FRONTENDS, "addresses with ports"),
            (ports * endpoints, MAX_PORT_ENDPOINTS, "endpoints of ports"),
            (virtual_servers * endpoints, MAX_DESTINATIONS, "endpoints of addresses with ports"),
        ];
        let (found, limit, what) = limits.into_iter().find(|(found, limit, _)| found > limit)?;
        Some(format!(
            "the Service is too large for a node, and is left out: with {ports} ports, {frontends} addresses with ports and {endpoints} endpoints it has {found} {what}, and {limit} are allowed: divide it into several Services, or remove ports, externalIPs or source ranges"
        ))
    }
}

// `loadBalancerSourceRanges`: which clients may reach a load balancer IP. The ranges do not apply
// to NodePorts and externalIPs.
//
// The ranges of a family apply to that family. If a family has no range, or has a range with
// prefix length 0, all clients of that family are admitted.

/// The clients that may reach a service's load balancer IPs of one family.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SourceRanges {
    /// The admitted ranges, sorted. An empty list admits all clients.
    pub ranges: Vec<IpNet>,
    /// True if the ranges admit an address of this node. Then the load balancer IP itself is
    /// admitted as source too: if an address is bound on the node, the node uses it as the source
    /// of its connections to that address.
    pub admits_node: bool,
}

impl SourceRanges {
    /// Returns the ranges of a service for one family on a node with these addresses.
    #[must_use]
    pub fn of(service: &Service, family: Family, node_addresses: &[IpAddr]) -> Self {
        let of_family = |range: &&IpNet| Family::of(range.addr()) == family;
        let mut ranges: Vec<IpNet> =
            service.load_balancer_source_ranges.iter().filter(of_family).map(IpNet::trunc).collect();
        ranges.sort_unstable();
        ranges.dedup();
        if ranges.iter().any(|range| range.prefix_len() == 0) {
            ranges.clear();
        }
        let admits_node = node_addresses.iter().any(|address| ranges.iter().any(|range| range.contains(address)));
        Self { ranges, admits_node }
    }

    /// True if a client is admitted to `destination`, a load balancer IP.
    #[must_use]
    pub fn admits(&self, client: IpAddr, destination: IpAddr) -> bool {
        self.is_open()
            || self.ranges.iter().any(|range| range.contains(&client))
            || (self.admits_node && client == destination)
    }

    /// True if all clients are admitted.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.ranges.is_empty()
    }
}

// Masquerading: the node replaces the source address of a packet by its own address, so that
// replies return through the node.
//
// The node masquerades traffic
//
// - to ClusterIPs, if [`MasqueradeConfig::all`] is set;
// - to ClusterIPs, if a [`LocalDetector`] does not recognize the source as a local pod;
// - to external destinations with Cluster policy;
// - to external destinations with Local policy, if it comes from the node itself;
// - of hairpin connections, in which the chosen endpoint is the client itself.

/// How the node recognizes traffic from local pods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LocalDetector {
    /// Recognizes local pods by source address, for the detection modes ClusterCIDR and NodeCIDR.
    Cidr(IpNet),
    /// Recognizes local pods by the name of the bridge to which they are connected.
    BridgeInterface(String),
    /// Recognizes local pods by a common prefix of the names of their interfaces.
    InterfaceNamePrefix(String),
}

/// The clients of a frontend whose source address becomes the address of the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum MasqueradeSources {
    /// No client.
    Nobody,
    /// Clients that the detector does not recognise as local pods.
    Outside,
    /// The node itself.
    Node,
    /// All clients.
    Everyone,
}

/// The configuration of masquerading.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MasqueradeConfig {
    /// Masquerade all traffic to ClusterIPs.
    pub all: bool,
    /// The bit of the firewall mark that marks packets to masquerade, 0 to 31.
    pub bit: u8,
    /// The detector for IPv4.
    pub detector_v4: Option<LocalDetector>,
    /// The detector for IPv6.
    pub detector_v6: Option<LocalDetector>,
}

impl MasqueradeSources {
    /// Returns the clients of an external destination whose connections are masqueraded.
    #[must_use]
    pub fn to_external_destinations(policy: TrafficPolicy) -> Self {
        if policy.is_local() { Self::Node } else { Self::Everyone }
    }
}

impl Default for MasqueradeConfig {
    fn default() -> Self {
        Self { all: false, bit: 14, detector_v4: None, detector_v6: None }
    }
}

impl MasqueradeConfig {
    /// Returns the firewall mark that has only the configured bit set.
    #[must_use]
    pub fn mark(&self) -> u32 {
        1u32.checked_shl(u32::from(self.bit)).unwrap_or(1 << 14)
    }

    /// True if the node masquerades traffic to ClusterIPs, at least that of unrecognized sources.
    #[must_use]
    pub fn covers_cluster_ips(&self, family: Family) -> bool {
        self.all || self.detector(family).is_some()
    }

    /// Returns the clients of a ClusterIP whose connections are masqueraded.
    #[must_use]
    pub fn sources_to_cluster_ips(&self, family: Family) -> MasqueradeSources {
        if self.all {
            MasqueradeSources::Everyone
        } else if self.covers_cluster_ips(family) {
            MasqueradeSources::Outside
        } else {
            MasqueradeSources::Nobody
        }
    }

    /// Returns the detector of a family.
    #[must_use]
    pub fn detector(&self, family: Family) -> Option<&LocalDetector> {
        match family {
            Family::V4 => self.detector_v4.as_ref(),
            Family::V6 => self.detector_v6.as_ref(),
        }
    }
}

// The health-check node port. On this port, an external load balancer checks whether the node has
// local endpoints of a service.
//
// A service with `externalTrafficPolicy: Local` and type `LoadBalancer` has a health-check node
// port. The node answers requests to this port with the number of addresses that have a ready port
// on this node. Terminating endpoints do not count, even while they receive traffic, so that the
// load balancer switches to other nodes before the endpoints stop. Each family has a separate
// count. The family of the request selects the count.

/// A health-check node port with the counts that it reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HealthCheckPort {
    /// TCP port on the node.
    pub port: u16,
    /// Number of local ready endpoints by family, IPv4 first; `None` without a ClusterIP.
    pub local_endpoints: [Option<u32>; 2],
}

/// Returns the health-check node port of a service on this node, if the service has one.
#[must_use]
pub fn health_check_port(state: &State, key: &Arc<ServiceKey>, node: &NodeFacts) -> Option<HealthCheckPort> {
    let entry = state.entry(key)?;
    let service = entry.service()?;
    if service.health_check_node_port == 0 || !service.external_traffic_policy.is_local() {
        return None;
    }
    let count = |family: Family| {
        service.cluster_ip(family)?;
        let is_local = |name: &str| name == &*node.name;
        let local = entry.endpoints().values().filter(|endpoint| {
            let is_counted = |state: PortState<'_>| {
                let placement = state.placement;
                state.conditions.ready && !placement.weight.is_zero() && placement.node.as_deref().is_some_and(is_local)
            };
            Family::of(endpoint.address) == family && endpoint.port_states().any(is_counted)
        });
        u32::try_from(local.count()).ok()
    };
    Some(HealthCheckPort { port: service.health_check_node_port, local_endpoints: Family::BOTH.map(count) })
}

// Endpoint choice: which endpoints of a service port this node uses, for Cluster and for Local
// policy.
//
// In this part an endpoint is an address with a port, because two ports of one address may have
// different conditions, nodes and hints.
//
// 1. The Cluster set contains the ready endpoints that the topology admits. If no such endpoint
//    exists, the set contains all serving and terminating endpoints (KEP-1669), independent of the
//    topology.
// 2. The Local set contains the ready endpoints on this node, independent of the topology. If no
//    such endpoint exists, the set contains the serving and terminating endpoints on this node.
// 3. All other endpoints are in no set, and none with weight 0.
//
// The end of this part has the topology. [`verdict`] decides this for one endpoint. The renderers
// and `headgatectl explain` use it.

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
mod choice_tests {
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

#[cfg(test)]
mod size_tests {
    use super::*;
    use crate::model::{Change, Endpoint, EndpointPort, Protocol, ServiceKey, ServicePort};
    use crate::state::{Dirty, State};

    /// The limit that a Service exceeds in IPv4, if any.
    fn excess(algorithm: &str, ports: u16, external_ips: u32, endpoints: u32) -> Option<&'static str> {
        let key = ServiceKey::new("ns", "web");
        let port = |number| ServicePort { name: "p".into(), protocol: Protocol::Tcp, port: number, node_port: number };
        let mut service = Service::new(key.clone(), vec![[10, 96, 0, 1].into()], (1..=ports).map(port).collect());
        service.load_balancing = algorithm.into();
        service.external_ips = (0..external_ips).map(|number| (0xc633_6400 + number).to_be_bytes().into()).collect();
        service.external_ips.push("2001:db8::1".parse().unwrap_or([0; 16].into()));
        let mut state = State::default();
        state.apply(Change::from(service), &mut Dirty::default());
        for number in 0..endpoints {
            let address = (0x0af4_0000 + number).to_be_bytes().into();
            let ports = [EndpointPort::new("p", Protocol::Tcp, 8080)].into();
            state.apply(Change::Endpoint(key.clone(), Endpoint::new(address, ports)), &mut Dirty::default());
        }
        let size = ServiceSize::of(state.entry(&key)?, Family::V4);
        assert_eq!(state.entry(&key).map(|entry| ServiceSize::of(entry, Family::V6)), Some(ServiceSize::default()));
        let names = ["endpoints of addresses", "endpoints of ports", "addresses with ports"];
        let excess = size.excess()?;
        names.into_iter().find(|name| excess.split(" it has ").nth(1).is_some_and(|rest| rest.contains(name)))
    }

    /// However many ports and endpoints a Service has, its slots and their scores are bounded.
    #[test]
    fn a_service_with_many_ports_or_endpoints_has_fewer_slots_for_each_port() {
        for (ports, endpoints, slots) in [
            (1, 10, 2048),
            (1, 5000, 2048),
            (1, 8192, 2048),
            (1, 8193, 1024),
            (8, 1024, 2048),
            (8, 1025, 1024),
            (9, 10, 1024),
            (16, 10, 1024),
            (100, 10, 128),
            (128, 10, 128),
            (60_000, 1, 1),
        ] {
            let size = ServiceSize { ports, endpoints, is_hashed: true, ..ServiceSize::default() };
            assert_eq!(size.hashed_slots(), slots, "{ports} ports, {endpoints} endpoints");
            assert_eq!(size.excess(), None);
        }
        for ports in [1, 4, 5, 8, 100, 655, 20_000] {
            let size = ServiceSize { ports, endpoints: 40, is_weighted: true, ..ServiceSize::default() };
            let slots = size.weighted_slots();
            assert!(slots <= 4096 && ports * slots as usize <= MAX_SLOTS_OF_SERVICE.max(ports), "{ports} ports");
            assert_eq!(size.objects(), ports * 40.max(4000.min(slots as usize)));
        }
    }

    #[test]
    fn large_services_of_ordinary_use_are_within_the_limits_and_those_of_attacks_are_not() {
        for (ports, external_ips, endpoints) in [(1, 0, 5000), (3, 10, 5000), (100, 0, 100), (100, 2, 600)] {
            let found = excess("random", ports, external_ips, endpoints);
            assert_eq!(found, None, "{ports} {external_ips} {endpoints}");
        }
        assert_eq!(excess("consistent-hash", 1, 0, 5000), None);
        assert_eq!(excess("consistent-hash", 100, 0, 600), None);
        assert_eq!(excess("random", 100, 4000, 1), Some("addresses with ports"));
        assert_eq!(excess("random", 1, 60_000, 1), Some("addresses with ports"));
        assert_eq!(excess("random", 100, 0, 700), Some("endpoints of ports"));
        assert_eq!(excess("random", 10, 100, 1000), Some("endpoints of addresses"));
        assert_eq!(excess("consistent-hash", 8, 0, 2000), None);
    }
}

#[cfg(test)]
mod health_check_port_tests {
    #![allow(clippy::unwrap_used)]
    use std::{net::IpAddr, sync::Arc};

    use super::*;
    use crate::model::{
        Change, Conditions, Endpoint, EndpointPort, Placement, Protocol, Service, ServicePort, TrafficPolicy,
    };
    use crate::state::Dirty;

    fn key() -> ServiceKey {
        ServiceKey::new("shop", "web")
    }

    fn service() -> Service {
        let port = ServicePort { name: "".into(), protocol: Protocol::Tcp, port: 80, node_port: 30080 };
        let cluster_ips = vec!["10.96.0.1".parse().unwrap(), "fd00:96::1".parse().unwrap()];
        let mut service = Service::new(key(), cluster_ips, vec![port]);
        service.external_traffic_policy = TrafficPolicy::Local;
        service.health_check_node_port = 32000;
        service
    }

    fn endpoint(address: &str, node: &str, conditions: Conditions) -> Endpoint {
        let port = |port| EndpointPort::new("", Protocol::Tcp, port);
        let mut endpoint =
            Endpoint::new(address.parse::<IpAddr>().unwrap(), Arc::from([port(8080), port(8081), port(8082)]));
        endpoint.placement = Placement::on(node).into();
        endpoint.conditions = conditions;
        endpoint
    }

    fn found(service: Service, endpoints: Vec<Endpoint>) -> Option<HealthCheckPort> {
        let mut state = State::default();
        state.apply(Change::from(service), &mut Dirty::default());
        for endpoint in endpoints {
            state.apply(Change::Endpoint(key(), endpoint), &mut Dirty::default());
        }
        health_check_port(&state, &Arc::new(key()), &NodeFacts::named("node-1"))
    }

    #[test]
    fn an_address_counts_if_one_of_its_ports_is_ready_on_this_node() {
        let ready = Conditions::READY;
        let not_ready = Conditions { ready: false, serving: false, terminating: false };
        let two_ports = |first, second, nodes: [&str; 2]| {
            let mut endpoint = endpoint("10.244.0.1", nodes[0], first);
            let mut ports = endpoint.ports.to_vec();
            ports[1].conditions = Some(second);
            ports[1].placement = Some(Placement::on(nodes[1]).into());
            ports.truncate(2);
            endpoint.ports = ports.into();
            found(service(), vec![endpoint]).unwrap().local_endpoints[0]
        };
        assert_eq!(two_ports(not_ready, ready, ["node-1", "node-1"]), Some(1));
        assert_eq!(two_ports(ready, ready, ["node-1", "node-1"]), Some(1));
        assert_eq!(two_ports(not_ready, not_ready, ["node-1", "node-1"]), Some(0));
        assert_eq!(two_ports(not_ready, ready, ["node-1", "node-2"]), Some(0));
        assert_eq!(two_ports(ready, not_ready, ["node-2", "node-1"]), Some(0));
    }
}
