//! Services.

use std::{fmt, net::IpAddr};

use compact_str::CompactString;
use ipnet::IpNet;

use super::{Family, Protocol};

/// Identity of a Service, and of the endpoints behind it. Ordered by namespace, then name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServiceKey {
    /// `metadata.namespace`.
    pub namespace: CompactString,
    /// `metadata.name`.
    pub name: CompactString,
}

impl ServiceKey {
    /// A key from its two parts.
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

/// `internalTrafficPolicy` or `externalTrafficPolicy`, where it has an effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum TrafficPolicy {
    /// All endpoints of the cluster.
    #[default]
    Cluster,
    /// Only endpoints on this node.
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
    /// Idle time after which a client may be sent elsewhere, 1 to 86,400.
    pub timeout_seconds: u32,
}

/// One entry of `spec.ports`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServicePort {
    /// Empty for a Service's single unnamed port. The name joins it to endpoint ports, never the
    /// number.
    pub name: CompactString,
    /// Transport protocol.
    pub protocol: Protocol,
    /// Port on every service address.
    pub port: u16,
    /// Port on the node's addresses, 0 for none.
    pub node_port: u16,
}

/// A Service that the proxy programs. It has at least one ClusterIP and one port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Service {
    /// Identity.
    pub key: ServiceKey,
    /// At most one address of each family, in the order of `spec.clusterIPs`.
    pub cluster_ips: Vec<IpAddr>,
    /// `spec.externalIPs` of the Service's families.
    pub external_ips: Vec<IpAddr>,
    /// `status.loadBalancer.ingress` addresses whose ipMode is VIP (or absent), of the Service's
    /// families.
    pub load_balancer_ips: Vec<IpAddr>,
    /// Ports, in the order of the spec.
    pub ports: Vec<ServicePort>,
    /// Policy of traffic to ClusterIPs.
    pub internal_traffic_policy: TrafficPolicy,
    /// Policy of traffic to NodePorts, externalIPs and load balancer IPs; `Cluster` where `Local`
    /// has no effect.
    pub external_traffic_policy: TrafficPolicy,
    /// Session affinity, if any.
    pub session_affinity: Option<ClientIpAffinity>,
    /// `spec.loadBalancerSourceRanges`; empty means open.
    pub load_balancer_source_ranges: Vec<IpNet>,
    /// Health-check node port, 0 for none.
    pub health_check_node_port: u16,
    /// `metadata.creationTimestamp`, seconds since the Unix epoch; 0 when unknown.
    pub created_unix_seconds: i64,
    /// Annotation `headgate.io/scheduler`; empty for the cluster's default.
    pub scheduler: CompactString,
    /// Annotation `headgate.io/health-check`: `tcp`, or empty for none. Agents check nothing for a
    /// kind that they do not know.
    pub health_check: CompactString,
    /// Annotation `headgate.io/health-check-interval`: time between two checks of an endpoint; 0
    /// for the agent's default.
    pub health_check_interval_ms: u32,
}

impl Service {
    /// A plain ClusterIP service, for callers that fill in the rest.
    #[must_use]
    pub fn new(key: ServiceKey, cluster_ips: Vec<IpAddr>, ports: Vec<ServicePort>) -> Self {
        Self {
            key,
            cluster_ips,
            external_ips: Vec::new(),
            load_balancer_ips: Vec::new(),
            ports,
            internal_traffic_policy: TrafficPolicy::Cluster,
            external_traffic_policy: TrafficPolicy::Cluster,
            session_affinity: None,
            load_balancer_source_ranges: Vec::new(),
            health_check_node_port: 0,
            created_unix_seconds: 0,
            scheduler: CompactString::default(),
            health_check: CompactString::default(),
            health_check_interval_ms: 0,
        }
    }

    /// Agents check its endpoints by connecting to them.
    #[must_use]
    pub fn is_checked_by_tcp(&self) -> bool {
        self.health_check == "tcp"
    }

    /// The ClusterIP of a family; a family without one is not programmed.
    #[must_use]
    pub fn cluster_ip(&self, family: Family) -> Option<IpAddr> {
        self.cluster_ips.iter().copied().find(|address| Family::of(*address) == family)
    }
}
