//! Views: what one node does for one service port in one family. Views do not depend on the
//! dataplane.

use std::{collections::BTreeSet, net::IpAddr, sync::Arc};

use compact_str::CompactString;

use crate::{
    behaviours::endpoint_choice::{self, Destination},
    behaviours::size::ServiceSize,
    behaviours::source_ranges::SourceRanges,
    model::{Family, LoadBalancing, Protocol, ProxyProtocol, Service, ServiceKey, ServicePort, TrafficPolicy},
    node_facts::NodeFacts,
    state::frontends::Frontend,
    state::{ServiceEntry, State},
};

/// Numbers of service ports whose traffic is dropped because this node has no endpoint for a Local
/// policy.
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
    /// The header that endpoints expect at the beginning of each connection. `None` unless the port
    /// is a TCP port.
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
    /// uses them: with Local policy, traffic from local pods and from the node itself may go to all
    /// endpoints.
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

    /// Counts this port for each Local policy whose traffic is dropped because all endpoints are on
    /// other nodes.
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
/// ClusterIP of the family, or is [too large](crate::size) for a node. The cost depends only on the
/// size of this Service.
#[must_use]
pub fn service_views(state: &State, key: &Arc<ServiceKey>, family: Family, node: &NodeFacts) -> Vec<ServicePortView> {
    let mut views = views_of_all_endpoints(state, key, family, node);
    if let Some(service) = state.entry(key).and_then(ServiceEntry::service) {
        views.iter_mut().for_each(|view| view.leave_out_failing(service, node));
    }
    views
}

/// Like [`service_views`], but includes endpoints that fail health checks. Health checks need these
/// endpoints. Dataplanes that keep the connections of failing endpoints need them too.
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
        let choice = endpoint_choice::choose(endpoints, port, family, node);
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

#[cfg(test)]
mod tests;
