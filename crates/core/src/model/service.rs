//! Services.

use std::{fmt, net::IpAddr};

use compact_str::CompactString;
use ipnet::IpNet;

use super::{Family, Protocol, ProxyProtocol};

/// Namespace and name of a Service. Keys are ordered by namespace, then by name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct ServiceKey {
    /// `metadata.namespace`.
    pub namespace: CompactString,
    /// `metadata.name`.
    pub name: CompactString,
}

impl ServiceKey {
    /// Creates a key from its two parts.
    #[must_use]
    pub fn new(namespace: &str, name: &str) -> Self {
        Self { namespace: namespace.into(), name: name.into() }
    }
}

/// `namespace/name`.
impl fmt::Display for ServiceKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// `internalTrafficPolicy` or `externalTrafficPolicy`. The control plane replaces a policy that has
/// no effect by `Cluster`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum TrafficPolicy {
    /// Traffic may go to all endpoints of the cluster.
    #[default]
    Cluster,
    /// Traffic may go only to endpoints on this node.
    Local,
}

impl TrafficPolicy {
    /// True for [`TrafficPolicy::Local`].
    #[must_use]
    pub fn is_local(self) -> bool {
        self == Self::Local
    }
}

impl fmt::Display for TrafficPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cluster => "Cluster",
            Self::Local => "Local",
        })
    }
}

/// `sessionAffinity: ClientIP`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClientIpAffinity {
    /// Idle time in seconds after which a client may be sent to another endpoint, 1 to 86,400.
    pub timeout_seconds: u32,
}

/// One entry of `spec.ports`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServicePort {
    /// The name, empty if a Service has a single unnamed port. Endpoint ports belong to the service
    /// port with equal name and protocol; their numbers do not matter.
    pub name: CompactString,
    /// Transport protocol.
    pub protocol: Protocol,
    /// Port number on every service address.
    pub port: u16,
    /// NodePort, 0 for none.
    pub node_port: u16,
}

/// A Service that the proxy programs. It has at least one ClusterIP and one port.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Service {
    /// Namespace and name.
    pub key: ServiceKey,
    /// `spec.clusterIPs` in their order, at most one address of each family.
    pub cluster_ips: Vec<IpAddr>,
    /// `spec.externalIPs` of the Service's families.
    pub external_ips: Vec<IpAddr>,
    /// Addresses in `status.loadBalancer.ingress` whose ipMode is VIP or absent, of the Service's
    /// families.
    pub load_balancer_ips: Vec<IpAddr>,
    /// Ports in the order of the spec.
    pub ports: Vec<ServicePort>,
    /// Policy for traffic to ClusterIPs.
    pub internal_traffic_policy: TrafficPolicy,
    /// Policy for traffic to NodePorts, externalIPs and load balancer IPs; `Cluster` if `Local` has
    /// no effect.
    pub external_traffic_policy: TrafficPolicy,
    /// Session affinity, if any.
    pub session_affinity: Option<ClientIpAffinity>,
    /// `spec.loadBalancerSourceRanges`; an empty list admits all clients.
    pub load_balancer_source_ranges: Vec<IpNet>,
    /// `spec.healthCheckNodePort`, 0 for none.
    pub health_check_node_port: u16,
    /// `metadata.creationTimestamp`, seconds since the Unix epoch; 0 when unknown.
    pub created_unix_seconds: i64,
    /// Annotation `headgate.io/load-balancing`; empty for the default of the dataplane. See
    /// [`super::LoadBalancing`].
    pub load_balancing: CompactString,
    /// Annotation `headgate.io/scheduler`; empty for the cluster's default.
    pub scheduler: CompactString,
    /// Annotation `headgate.io/health-check`: `tcp`, or empty for no checks. An agent makes no
    /// checks for an unknown value.
    pub health_check: CompactString,
    /// Annotation `headgate.io/health-check-interval`: time between two checks of an endpoint in
    /// milliseconds, 0 for the agent's default.
    pub health_check_interval_ms: u32,
    /// Annotation `headgate.io/proxy-protocol`: the header that endpoints get at the beginning of
    /// each TCP connection. Only dataplanes with a proxy can send it.
    pub proxy_protocol: Option<ProxyProtocol>,
    /// Annotation `headgate.io/max-connections`: the most open connections on a node, 0 for no
    /// limit. Only dataplanes with a proxy have limits.
    pub max_connections: u32,
}

impl Service {
    /// Creates a plain ClusterIP service. Callers set other fields as needed.
    #[must_use]
    pub fn new(key: ServiceKey, cluster_ips: Vec<IpAddr>, ports: Vec<ServicePort>) -> Self {
        Self { key, cluster_ips, ports, ..Self::default() }
    }

    /// The most frontends that an agent accepts of one Service. The control plane has a budget of
    /// its own, which is never higher.
    pub const MAX_FRONTENDS: usize = 16_384;

    /// Returns how much the Service asks of a node, without endpoints: the [frontends](Self::frontends)
    /// of both families.
    #[must_use]
    pub fn frontend_count(&self) -> usize {
        Family::BOTH.into_iter().map(|family| self.frontends(family)).fold(0, usize::saturating_add)
    }

    /// Returns the number of [virtual servers](Self::virtual_servers) of a family, where an address
    /// of a load balancer counts once for each source range of its family.
    #[must_use]
    pub fn frontends(&self, family: Family) -> usize {
        let load_balancers = of_family(&self.load_balancer_ips, family).saturating_mul(self.ports.len());
        let more_ranges = self.source_range_count(family) - 1;
        self.virtual_servers(family).saturating_add(load_balancers.saturating_mul(more_ranges))
    }

    /// Returns the number of addresses of a family with each port, and of NodePorts. Mode IPVS has a
    /// virtual server for each of them.
    #[must_use]
    pub fn virtual_servers(&self, family: Family) -> usize {
        let lists = [&self.cluster_ips, &self.load_balancer_ips, &self.external_ips];
        let addresses: usize = lists.into_iter().map(|addresses| of_family(addresses, family)).sum();
        let node_ports = self.ports.iter().filter(|port| port.node_port != 0).count();
        addresses.saturating_mul(self.ports.len()).saturating_add(node_ports * of_family(&self.cluster_ips, family))
    }

    /// Returns how often an address of a load balancer counts in a family: once for each source
    /// range, or once without ranges.
    #[must_use]
    pub fn source_range_count(&self, family: Family) -> usize {
        let ranges = self.load_balancer_source_ranges.iter().filter(|range| Family::of(range.addr()) == family);
        ranges.count().max(1)
    }

    /// True if agents check the endpoints by opening TCP connections to them.
    #[must_use]
    pub fn is_checked_by_tcp(&self) -> bool {
        self.health_check == "tcp"
    }

    /// Returns the ClusterIP of a family. A Service without a ClusterIP of a family is not
    /// programmed in that family.
    #[must_use]
    pub fn cluster_ip(&self, family: Family) -> Option<IpAddr> {
        self.cluster_ips.iter().copied().find(|address| Family::of(*address) == family)
    }
}

/// Returns the number of addresses of a family.
fn of_family(addresses: &[IpAddr], family: Family) -> usize {
    addresses.iter().filter(|address| Family::of(**address) == family).count()
}
