//! The types of objects, with the fields of the API.

use compact_str::CompactString;
use serde::Deserialize;

use super::{
    metadata::{Metadata, first, nullable, nullable_fitting},
    pod::PodId,
};

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

/// One endpoint of an EndpointSlice. The type is small, because all endpoints of a cluster are in
/// memory while a list is decoded.
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
    /// The pod in `targetRef`.
    #[serde(default, rename = "targetRef", deserialize_with = "super::pod::pod")]
    pub pod: PodId,
}

api_types! {
    /// A Service.
    pub struct Service {
        /// Metadata.
        pub metadata: Metadata,
        /// Spec.
        pub spec: ServiceSpec,
        /// Status.
        pub status: ServiceStatus,
    }

    /// `spec` of a Service.
    pub struct ServiceSpec {
        /// Type; empty means ClusterIP.
        #[serde(rename = "type")]
        pub service_type: String,
        /// First ClusterIP.
        #[serde(rename = "clusterIP")]
        pub cluster_ip: String,
        /// All ClusterIPs.
        #[serde(rename = "clusterIPs")]
        pub cluster_ips: Vec<String>,
        /// Families of the ClusterIPs.
        pub ip_families: Vec<String>,
        /// Ports.
        pub ports: Vec<ServicePort>,
        /// External IPs.
        #[serde(rename = "externalIPs")]
        pub external_ips: Vec<String>,
        /// `Cluster`, `Local` or empty.
        pub internal_traffic_policy: String,
        /// `Cluster`, `Local` or empty.
        pub external_traffic_policy: String,
        /// `None`, `ClientIP` or empty.
        pub session_affinity: String,
        /// Time-out of the session affinity.
        pub session_affinity_config: SessionAffinityConfig,
        /// CIDRs of the clients that may use the load balancer.
        pub load_balancer_source_ranges: Vec<String>,
        /// Health-check node port; 0 if there is none.
        pub health_check_node_port: i64,
    }

    /// One port of a Service.
    pub struct ServicePort {
        /// Name; empty for a single port.
        pub name: String,
        /// Protocol; empty means TCP.
        pub protocol: String,
        /// Port; 0 if there is none.
        pub port: i64,
        /// Node port; 0 if there is none.
        pub node_port: i64,
    }

    /// `spec.sessionAffinityConfig`.
    pub struct SessionAffinityConfig {
        /// Settings of ClientIP affinity.
        #[serde(rename = "clientIP")]
        pub client_ip: ClientIpConfig,
    }

    /// `spec.sessionAffinityConfig.clientIP`.
    pub struct ClientIpConfig {
        /// Seconds; `None` means 10,800.
        pub timeout_seconds: Option<i64>,
    }

    /// `status` of a Service.
    pub struct ServiceStatus {
        /// Status of the load balancer.
        pub load_balancer: LoadBalancerStatus,
    }

    /// `status.loadBalancer`.
    pub struct LoadBalancerStatus {
        /// Addresses of the load balancer.
        pub ingress: Vec<Ingress>,
    }

    /// `status.loadBalancer.ingress[]`.
    pub struct Ingress {
        /// Address, or empty.
        pub ip: String,
        /// `VIP`, `Proxy` or empty, which means VIP.
        pub ip_mode: String,
    }

    /// One port of an EndpointSlice.
    pub struct SlicePort {
        /// Name; empty for a port without a name.
        pub name: String,
        /// Protocol; empty means TCP.
        pub protocol: String,
        /// Number. A port whose number is `None` or 0 is ignored.
        pub port: Option<i64>,
    }

    /// `conditions` of an endpoint, as written.
    pub struct SliceConditions {
        /// `None` means true.
        pub ready: Option<bool>,
        /// `None` means true.
        pub serving: Option<bool>,
        /// `None` means false.
        pub terminating: Option<bool>,
    }

    /// `hints` of an endpoint.
    pub struct SliceHints {
        /// Zones.
        pub for_zones: Vec<HintName>,
        /// Nodes.
        pub for_nodes: Vec<HintName>,
    }

    /// A hint, written `{name: …}`.
    pub struct HintName {
        /// Name of a zone or a node.
        pub name: String,
    }

    /// A Node.
    pub struct Node {
        /// Metadata, with all labels.
        pub metadata: Metadata<std::collections::BTreeMap<String, String>>,
        /// Spec.
        pub spec: NodeSpec,
        /// Status.
        pub status: NodeStatus,
    }

    /// `spec` of a Node.
    pub struct NodeSpec {
        /// First pod range.
        #[serde(rename = "podCIDR")]
        pub pod_cidr: String,
        /// All pod ranges.
        #[serde(rename = "podCIDRs")]
        pub pod_cidrs: Vec<String>,
        /// Taints.
        pub taints: Vec<Taint>,
    }

    /// `spec.taints[]` of a Node.
    pub struct Taint {
        /// Key.
        pub key: String,
    }

    /// `status` of a Node.
    pub struct NodeStatus {
        /// Addresses.
        pub addresses: Vec<NodeAddress>,
    }

    /// `status.addresses[]` of a Node.
    pub struct NodeAddress {
        /// The type, such as `InternalIP`.
        #[serde(rename = "type")]
        pub address_type: String,
        /// The address.
        pub address: String,
    }

    /// A ServiceCIDR.
    pub struct ServiceCidr {
        /// Metadata.
        pub metadata: Metadata,
        /// Spec.
        pub spec: ServiceCidrSpec,
    }

    /// `spec` of a ServiceCIDR.
    pub struct ServiceCidrSpec {
        /// Ranges.
        pub cidrs: Vec<String>,
    }

    /// The fields of a Pod that say whether it is ready.
    pub struct Pod {
        /// Metadata.
        pub metadata: Metadata,
        /// Spec.
        pub spec: PodSpec,
        /// Status.
        pub status: PodStatus,
    }

    /// `spec` of a Pod.
    pub struct PodSpec {
        /// The conditions that the pod needs to become ready, besides ready containers.
        pub readiness_gates: Vec<ReadinessGate>,
    }

    /// `spec.readinessGates[]` of a Pod.
    pub struct ReadinessGate {
        /// The type of a condition.
        pub condition_type: String,
    }

    /// `status` of a Pod.
    pub struct PodStatus {
        /// The conditions.
        pub conditions: Vec<PodCondition>,
    }

    /// `status.conditions[]` of a Pod.
    pub struct PodCondition {
        /// The type, such as `ContainersReady`.
        #[serde(rename = "type")]
        pub condition_type: String,
        /// `True`, `False` or `Unknown`.
        pub status: String,
        /// The reason, which may be empty.
        pub reason: String,
    }
}
