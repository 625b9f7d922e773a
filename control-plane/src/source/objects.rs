//! The fields of Kubernetes objects that a service proxy reads, and nothing else.
//!
//! Decoding these costs a fraction of decoding the full types: `managedFields`, most labels and annotations, selectors and statuses are skipped in
//! the text and never reach the heap. Both sources use them. Values are kept as written: an address is text and a port any
//! number, so that [`crate::model`] can say what is wrong with one field of an object, and use the others. A list that is
//! `null`, as Go writes an empty one, is empty.

use std::{borrow::Cow, fmt};

use serde::{
    Deserialize, Deserializer,
    de::{IgnoredAny, MapAccess, Visitor},
};

/// The kinds that are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ObjectKind {
    /// `v1` Service.
    Service,
    /// `discovery.k8s.io/v1` EndpointSlice.
    EndpointSlice,
    /// `v1` Node.
    Node,
    /// `networking.k8s.io/v1` ServiceCIDR.
    ServiceCidr,
}

impl ObjectKind {
    /// Every kind.
    pub const ALL: [Self; 4] = [Self::Service, Self::EndpointSlice, Self::Node, Self::ServiceCidr];

    /// `kind` as the API spells it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Service => "Service",
            Self::EndpointSlice => "EndpointSlice",
            Self::Node => "Node",
            Self::ServiceCidr => "ServiceCIDR",
        }
    }

    /// The kind that `apiVersion` and `kind` name together; `None` for all others, such as the `Service` of another API group.
    #[must_use]
    pub fn of(api_version: &str, kind: &str) -> Option<Self> {
        match (api_version, kind) {
            ("v1", "Service") => Some(Self::Service),
            ("v1", "Node") => Some(Self::Node),
            ("discovery.k8s.io/v1", "EndpointSlice") => Some(Self::EndpointSlice),
            ("networking.k8s.io/v1" | "networking.k8s.io/v1beta1", "ServiceCIDR") => Some(Self::ServiceCidr),
            _ => None,
        }
    }

    /// Whether its objects live in namespaces.
    #[must_use]
    pub fn is_namespaced(self) -> bool {
        matches!(self, Self::Service | Self::EndpointSlice)
    }
}

/// What names an object. Displayed as `Service prod/web`, or `Node node-1`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectKey {
    /// Kind.
    pub kind: ObjectKind,
    /// `metadata.namespace`; empty for kinds without.
    pub namespace: Box<str>,
    /// `metadata.name`.
    pub name: Box<str>,
}

impl ObjectKey {
    /// A key from its parts. A namespaced kind without a namespace is in `default`, as for `kubectl apply`.
    #[must_use]
    pub fn new(kind: ObjectKind, namespace: &str, name: &str) -> Self {
        let namespace = match (kind.is_namespaced(), namespace) {
            (false, _) => "",
            (true, "") => "default",
            (true, namespace) => namespace,
        };
        Self { kind, namespace: namespace.into(), name: name.into() }
    }
}

impl fmt::Display for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = self.kind.name();
        if self.namespace.is_empty() {
            write!(f, "{kind} {}", self.name)
        } else {
            write!(f, "{kind} {}/{}", self.namespace, self.name)
        }
    }
}

/// An object of any of the kinds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Object {
    /// A Service.
    Service(Service),
    /// An EndpointSlice.
    EndpointSlice(EndpointSlice),
    /// A Node.
    Node(Node),
    /// A ServiceCIDR.
    ServiceCidr(ServiceCidr),
}

impl Object {
    /// Its kind.
    #[must_use]
    pub fn kind(&self) -> ObjectKind {
        match self {
            Self::Service(_) => ObjectKind::Service,
            Self::EndpointSlice(_) => ObjectKind::EndpointSlice,
            Self::Node(_) => ObjectKind::Node,
            Self::ServiceCidr(_) => ObjectKind::ServiceCidr,
        }
    }

    /// Its metadata.
    #[must_use]
    pub fn metadata(&self) -> &Metadata {
        match self {
            Self::Service(object) => &object.metadata,
            Self::EndpointSlice(object) => &object.metadata,
            Self::Node(object) => &object.metadata,
            Self::ServiceCidr(object) => &object.metadata,
        }
    }

    /// What names it.
    #[must_use]
    pub fn key(&self) -> ObjectKey {
        let metadata = self.metadata();
        ObjectKey::new(self.kind(), &metadata.namespace, &metadata.name)
    }

    /// Decodes an object of a kind that is known.
    ///
    /// # Errors
    /// The deserializer's, when a field has a type that the API does not give it.
    pub fn deserialize<'de, D: Deserializer<'de>>(kind: ObjectKind, deserializer: D) -> Result<Self, D::Error> {
        Ok(match kind {
            ObjectKind::Service => Self::Service(Service::deserialize(deserializer)?),
            ObjectKind::EndpointSlice => Self::EndpointSlice(EndpointSlice::deserialize(deserializer)?),
            ObjectKind::Node => Self::Node(Node::deserialize(deserializer)?),
            ObjectKind::ServiceCidr => Self::ServiceCidr(ServiceCidr::deserialize(deserializer)?),
        })
    }
}

/// `apiVersion`, `kind` and the names: enough to say what an object is when the rest cannot be read.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Header {
    /// Such as `discovery.k8s.io/v1`.
    #[serde(default, deserialize_with = "nullable")]
    pub api_version: String,
    /// Such as `EndpointSlice`.
    #[serde(default, deserialize_with = "nullable")]
    pub kind: String,
    /// Names.
    #[serde(default, deserialize_with = "nullable")]
    pub metadata: Names,
}

/// The names in `metadata`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Names {
    /// `metadata.name`.
    #[serde(default, deserialize_with = "nullable")]
    pub name: String,
    /// `metadata.namespace`.
    #[serde(default, deserialize_with = "nullable")]
    pub namespace: String,
    /// `metadata.resourceVersion`.
    #[serde(default, deserialize_with = "nullable")]
    pub resource_version: String,
}

/// `metadata`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Metadata {
    /// Name.
    #[serde(default, deserialize_with = "nullable")]
    pub name: String,
    /// Namespace, empty if none is given.
    #[serde(default, deserialize_with = "nullable")]
    pub namespace: String,
    /// Version; empty in files.
    #[serde(default, deserialize_with = "nullable")]
    pub resource_version: String,
    /// RFC 3339, or empty.
    #[serde(default, deserialize_with = "nullable")]
    pub creation_timestamp: String,
    /// RFC 3339, or empty unless it is being deleted.
    #[serde(default, deserialize_with = "nullable")]
    pub deletion_timestamp: String,
    /// The labels that are read.
    #[serde(default, deserialize_with = "nullable")]
    pub labels: Labels,
    /// The annotations that are read.
    #[serde(default, deserialize_with = "nullable")]
    pub annotations: Annotations,
}

impl Metadata {
    /// The namespace of a namespaced object: `default` where none is given, as for `kubectl apply`.
    #[must_use]
    pub fn namespace_or_default(&self) -> &str {
        if self.namespace.is_empty() { "default" } else { &self.namespace }
    }
}

/// Labels that are read.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Labels {
    /// `service.kubernetes.io/service-proxy-name`: another proxy serves this Service.
    pub service_proxy_name: Option<String>,
    /// `service.kubernetes.io/headless`: a slice for DNS only.
    pub headless: Option<String>,
    /// `kubernetes.io/service-name`: the Service of a slice.
    pub service_name: Option<String>,
    /// `topology.kubernetes.io/zone` of a Node.
    pub zone: Option<String>,
}

/// Annotations that are read.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Annotations {
    /// `headgate.io/scheduler`.
    pub scheduler: Option<String>,
    /// `headgate.io/health-check`.
    pub health_check: Option<String>,
    /// `endpoints.kubernetes.io/last-change-trigger-time`.
    pub last_change_trigger_time: Option<String>,
}

/// A map of which few keys matter.
trait Picked: Default {
    /// The place for a key's value; `None` for keys that do not matter.
    fn place(&mut self, key: &str) -> Option<&mut Option<String>>;
}

impl Picked for Labels {
    fn place(&mut self, key: &str) -> Option<&mut Option<String>> {
        match key {
            "service.kubernetes.io/service-proxy-name" => Some(&mut self.service_proxy_name),
            "service.kubernetes.io/headless" => Some(&mut self.headless),
            "kubernetes.io/service-name" => Some(&mut self.service_name),
            "topology.kubernetes.io/zone" => Some(&mut self.zone),
            _ => None,
        }
    }
}

impl Picked for Annotations {
    fn place(&mut self, key: &str) -> Option<&mut Option<String>> {
        match key {
            "headgate.io/scheduler" => Some(&mut self.scheduler),
            "headgate.io/health-check" => Some(&mut self.health_check),
            "endpoints.kubernetes.io/last-change-trigger-time" => Some(&mut self.last_change_trigger_time),
            _ => None,
        }
    }
}

struct PickedVisitor<T>(std::marker::PhantomData<T>);

impl<'de, T: Picked> Visitor<'de> for PickedVisitor<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map of strings")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<T, A::Error> {
        let mut picked = T::default();
        while let Some(key) = map.next_key::<Text<'de>>()? {
            match picked.place(&key.0) {
                Some(place) => *place = Some(map.next_value::<Option<String>>()?.unwrap_or_default()),
                None => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(picked)
    }
}

/// A key, borrowed from the text where the text allows it.
struct Text<'de>(Cow<'de, str>);

impl<'de> Deserialize<'de> for Text<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TextVisitor;
        impl<'de> Visitor<'de> for TextVisitor {
            type Value = Text<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string")
            }
            fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Self::Value, E> {
                Ok(Text(Cow::Borrowed(text)))
            }
            fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
                Ok(Text(Cow::Owned(text.to_owned())))
            }
            fn visit_string<E>(self, text: String) -> Result<Self::Value, E> {
                Ok(Text(Cow::Owned(text)))
            }
        }
        deserializer.deserialize_str(TextVisitor)
    }
}

impl<'de> Deserialize<'de> for Labels {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(PickedVisitor(std::marker::PhantomData))
    }
}

impl<'de> Deserialize<'de> for Annotations {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(PickedVisitor(std::marker::PhantomData))
    }
}

/// `null` is the default value.
fn nullable<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(deserializer: D) -> Result<T, D::Error> {
    Ok(Option::<T>::deserialize(deserializer)?.unwrap_or_default())
}

/// A Service.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
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
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
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
    /// Its time-out.
    #[serde(default, deserialize_with = "nullable")]
    pub session_affinity_config: SessionAffinityConfig,
    /// CIDRs.
    #[serde(default, deserialize_with = "nullable")]
    pub load_balancer_source_ranges: Vec<String>,
    /// Port, 0 for none.
    #[serde(default, deserialize_with = "nullable")]
    pub health_check_node_port: i64,
}

/// One port of a Service.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
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
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
pub struct SessionAffinityConfig {
    /// Of ClientIP affinity.
    #[serde(default, rename = "clientIP", deserialize_with = "nullable")]
    pub client_ip: ClientIpConfig,
}

/// `spec.sessionAffinityConfig.clientIP`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClientIpConfig {
    /// Seconds; `None` means 10,800.
    #[serde(default)]
    pub timeout_seconds: Option<i64>,
}

/// `status` of a Service.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ServiceStatus {
    /// Of its load balancer.
    #[serde(default, deserialize_with = "nullable")]
    pub load_balancer: LoadBalancerStatus,
}

/// `status.loadBalancer`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
pub struct LoadBalancerStatus {
    /// Where it is reached.
    #[serde(default, deserialize_with = "nullable")]
    pub ingress: Vec<Ingress>,
}

/// `status.loadBalancer.ingress[]`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
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
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
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
    #[serde(default, deserialize_with = "nullable")]
    pub endpoints: Vec<SliceEndpoint>,
}

/// One port of an EndpointSlice.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
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

/// One endpoint of an EndpointSlice.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SliceEndpoint {
    /// Only the first counts.
    #[serde(default, deserialize_with = "nullable")]
    pub addresses: Vec<String>,
    /// Conditions.
    #[serde(default, deserialize_with = "nullable")]
    pub conditions: SliceConditions,
    /// Node.
    #[serde(default, deserialize_with = "nullable")]
    pub node_name: String,
    /// Zone.
    #[serde(default, deserialize_with = "nullable")]
    pub zone: String,
    /// Hints.
    #[serde(default, deserialize_with = "nullable")]
    pub hints: SliceHints,
}

/// `conditions` of an endpoint, as written.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
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
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SliceHints {
    /// Zones.
    #[serde(default, deserialize_with = "nullable")]
    pub for_zones: Vec<HintName>,
    /// Nodes.
    #[serde(default, deserialize_with = "nullable")]
    pub for_nodes: Vec<HintName>,
}

/// `{name: …}`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
pub struct HintName {
    /// Of a zone or a node.
    #[serde(default, deserialize_with = "nullable")]
    pub name: String,
}

/// A Node.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
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
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
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
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
pub struct Taint {
    /// Key.
    #[serde(default, deserialize_with = "nullable")]
    pub key: String,
}

/// `status` of a Node.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
pub struct NodeStatus {
    /// Addresses.
    #[serde(default, deserialize_with = "nullable")]
    pub addresses: Vec<NodeAddress>,
}

/// `status.addresses[]` of a Node.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
pub struct NodeAddress {
    /// Such as `InternalIP`.
    #[serde(default, rename = "type", deserialize_with = "nullable")]
    pub address_type: String,
    /// The address.
    #[serde(default, deserialize_with = "nullable")]
    pub address: String,
}

/// A ServiceCIDR.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
pub struct ServiceCidr {
    /// Metadata.
    #[serde(default, deserialize_with = "nullable")]
    pub metadata: Metadata,
    /// Spec.
    #[serde(default, deserialize_with = "nullable")]
    pub spec: ServiceCidrSpec,
}

/// `spec` of a ServiceCIDR.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
pub struct ServiceCidrSpec {
    /// Ranges.
    #[serde(default, deserialize_with = "nullable")]
    pub cidrs: Vec<String>,
}
