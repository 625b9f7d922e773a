//! The types of objects, with the fields of the API.

use compact_str::CompactString;
use serde::Deserialize;

use super::metadata::{Metadata, first, nullable, nullable_fitting};

/// A Service.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, Deserialize)]
pub struct Service {
    /// Metadata.
    #[serde(default, deserialize_with = "nullable")]
    pub metadata: Metadata,
    /// Spec.
    #[serde(default, deserialize_with = "nullable")]
    pub spec: ServiceSpec,
    /// Status.
    #[serde(default, deserialize_with = "nullable")]
    pub status: ServiceStatus,
}

/// `spec` of a Service.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ServiceSpec {
    /// Type; empty means ClusterIP.
    #[serde(default, rename = "type", deserialize_with = "nullable")]
    pub service_type: String,
    /// First ClusterIP.
    #[serde(default, rename = "clusterIP", deserialize_with = "nullable")]
    pub cluster_ip: String,
    /// All ClusterIPs.
    #[serde(default, rename = "clusterIPs", deserialize_with = "nullable")]
    pub cluster_ips: Vec<String>,
    /// Families of the ClusterIPs.
    #[serde(default, deserialize_with = "nullable")]
    pub ip_families: Vec<String>,
    /// Ports.
    #[serde(default, deserialize_with = "nullable")]
    pub ports: Vec<ServicePort>,
    /// External IPs.
    #[serde(default, rename = "externalIPs", deserialize_with = "nullable")]
    pub external_ips: Vec<String>,
    /// `Cluster`, `Local` or empty.
    #[serde(default, deserialize_with = "nullable")]
    pub internal_traffic_policy: String,
    /// `Cluster`, `Local` or empty.
    #[serde(default, deserialize_with = "nullable")]
    pub external_traffic_policy: String,
    /// `None`, `ClientIP` or empty.
    #[serde(default, deserialize_with = "nullable")]
    pub session_affinity: String,
    /// Time-out of the session affinity.
    #[serde(default, deserialize_with = "nullable")]
    pub session_affinity_config: SessionAffinityConfig,
    /// CIDRs of the clients that may use the load balancer.
    #[serde(default, deserialize_with = "nullable")]
    pub load_balancer_source_ranges: Vec<String>,
    /// Port, 0 for none.
    #[serde(default, deserialize_with = "nullable")]
    pub health_check_node_port: i64,
}

/// One port of a Service.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ServicePort {
    /// Name; empty for a single port.
    #[serde(default, deserialize_with = "nullable")]
    pub name: String,
    /// Protocol; empty means TCP.
    #[serde(default, deserialize_with = "nullable")]
    pub protocol: String,
    /// Port; 0 if there is none.
    #[serde(default, deserialize_with = "nullable")]
    pub port: i64,
    /// Node port, 0 for none.
    #[serde(default, deserialize_with = "nullable")]
    pub node_port: i64,
}

/// `spec.sessionAffinityConfig`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, Deserialize)]
pub struct SessionAffinityConfig {
    /// Settings of ClientIP affinity.
    #[serde(default, rename = "clientIP", deserialize_with = "nullable")]
    pub client_ip: ClientIpConfig,
}

/// `spec.sessionAffinityConfig.clientIP`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClientIpConfig {
    /// Seconds; `None` means 10,800.
    #[serde(default)]
    pub timeout_seconds: Option<i64>,
}

/// `status` of a Service.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ServiceStatus {
    /// Status of the load balancer.
    #[serde(default, deserialize_with = "nullable")]
    pub load_balancer: LoadBalancerStatus,
}

/// `status.loadBalancer`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, Deserialize)]
pub struct LoadBalancerStatus {
    /// Addresses of the load balancer.
    #[serde(default, deserialize_with = "nullable")]
    pub ingress: Vec<Ingress>,
}

/// `status.loadBalancer.ingress[]`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Ingress {
    /// Address, or empty.
    #[serde(default, deserialize_with = "nullable")]
    pub ip: String,
    /// `VIP`, `Proxy` or empty, which means VIP.
    #[serde(default, deserialize_with = "nullable")]
    pub ip_mode: String,
}

/// An EndpointSlice.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EndpointSlice {
    /// Metadata.
    #[serde(default, deserialize_with = "nullable")]
    pub metadata: Metadata,
    /// `IPv4`, `IPv6` or `FQDN`.
    #[serde(default, deserialize_with = "nullable")]
    pub address_type: String,
    /// Ports that each endpoint has.
    #[serde(default, deserialize_with = "nullable")]
    pub ports: Vec<SlicePort>,
    /// Endpoints.
    #[serde(default, deserialize_with = "nullable_fitting")]
    pub endpoints: Vec<SliceEndpoint>,
}

/// One port of an EndpointSlice.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, Deserialize)]
pub struct SlicePort {
    /// `None` drops the port.
    #[serde(default)]
    pub name: Option<String>,
    /// Empty means TCP.
    #[serde(default, deserialize_with = "nullable")]
    pub protocol: String,
    /// `None` or 0 drops the port.
    #[serde(default)]
    pub port: Option<i64>,
}

/// One endpoint of an EndpointSlice. The type is small, because a list holds all endpoints of a
/// cluster for a moment.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SliceEndpoint {
    /// The first address of `addresses`. Other addresses are ignored, as in kube-proxy.
    #[serde(default, rename = "addresses", deserialize_with = "first")]
    pub address: Option<CompactString>,
    /// Conditions.
    #[serde(default, deserialize_with = "nullable")]
    pub conditions: SliceConditions,
    /// Name of the node.
    #[serde(default, deserialize_with = "nullable")]
    pub node_name: CompactString,
    /// Zone.
    #[serde(default, deserialize_with = "nullable")]
    pub zone: CompactString,
    /// Hints.
    #[serde(default)]
    pub hints: Option<Box<SliceHints>>,
}

/// `conditions` of an endpoint, as written.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, Deserialize)]
pub struct SliceConditions {
    /// `None` means true.
    #[serde(default)]
    pub ready: Option<bool>,
    /// `None` means true.
    #[serde(default)]
    pub serving: Option<bool>,
    /// `None` means false.
    #[serde(default)]
    pub terminating: Option<bool>,
}

/// `hints` of an endpoint.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SliceHints {
    /// Zones.
    #[serde(default, deserialize_with = "nullable")]
    pub for_zones: Vec<HintName>,
    /// Nodes.
    #[serde(default, deserialize_with = "nullable")]
    pub for_nodes: Vec<HintName>,
}

/// A hint, written `{name: …}`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, Deserialize)]
pub struct HintName {
    /// Name of a zone or a node.
    #[serde(default, deserialize_with = "nullable")]
    pub name: String,
}

/// A Node.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, Deserialize)]
pub struct Node {
    /// Metadata.
    #[serde(default, deserialize_with = "nullable")]
    pub metadata: Metadata,
    /// Spec.
    #[serde(default, deserialize_with = "nullable")]
    pub spec: NodeSpec,
    /// Status.
    #[serde(default, deserialize_with = "nullable")]
    pub status: NodeStatus,
}

/// `spec` of a Node.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, Deserialize)]
pub struct NodeSpec {
    /// First pod range.
    #[serde(default, rename = "podCIDR", deserialize_with = "nullable")]
    pub pod_cidr: String,
    /// All pod ranges.
    #[serde(default, rename = "podCIDRs", deserialize_with = "nullable")]
    pub pod_cidrs: Vec<String>,
    /// Taints.
    #[serde(default, deserialize_with = "nullable")]
    pub taints: Vec<Taint>,
}

/// `spec.taints[]` of a Node.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, Deserialize)]
pub struct Taint {
    /// Key.
    #[serde(default, deserialize_with = "nullable")]
    pub key: String,
}

/// `status` of a Node.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, Deserialize)]
pub struct NodeStatus {
    /// Addresses.
    #[serde(default, deserialize_with = "nullable")]
    pub addresses: Vec<NodeAddress>,
}

/// `status.addresses[]` of a Node.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, Deserialize)]
pub struct NodeAddress {
    /// The type, such as `InternalIP`.
    #[serde(default, rename = "type", deserialize_with = "nullable")]
    pub address_type: String,
    /// The address.
    #[serde(default, deserialize_with = "nullable")]
    pub address: String,
}

/// A ServiceCIDR.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, Deserialize)]
pub struct ServiceCidr {
    /// Metadata.
    #[serde(default, deserialize_with = "nullable")]
    pub metadata: Metadata,
    /// Spec.
    #[serde(default, deserialize_with = "nullable")]
    pub spec: ServiceCidrSpec,
}

/// `spec` of a ServiceCIDR.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, Deserialize)]
pub struct ServiceCidrSpec {
    /// Ranges.
    #[serde(default, deserialize_with = "nullable")]
    pub cidrs: Vec<String>,
}
