//! The fields of Kubernetes objects that a service proxy reads. Both sources use these types.
//!
//! Decoding these types costs a fraction of decoding the full types: `managedFields`, most labels
//! and annotations, and selectors are skipped in the text, so no memory is allocated for them.
//! Values are stored as written: an address is text, and a port is any number. So [`crate::model`]
//! can report one invalid field of an object and use the other fields. A list that is `null` is
//! empty, because Go writes empty lists as `null`.

use std::{
    borrow::Cow,
    fmt,
    hash::{BuildHasher as _, RandomState},
    sync::LazyLock,
};

use compact_str::CompactString;
use serde::{
    Deserialize, Deserializer,
    de::{IgnoredAny, MapAccess, Visitor},
};

/// Defines types of the API. A field that is missing or `null` has the default value of its type.
macro_rules! api_types {
    ($($(#[$about:meta])* pub struct $name:ident { $($(#[$of_field:meta])* pub $field:ident: $type:ty,)+ })+) => {$(
        $(#[$about])*
        #[derive(Debug, Clone, PartialEq, Eq, Hash, Default, serde::Deserialize)]
        #[serde(rename_all = "camelCase")]
        pub struct $name {$(
            $(#[$of_field])*
            #[serde(default, deserialize_with = "crate::objects::nullable")]
            pub $field: $type,
        )+}
    )+};
}

/// The kinds of objects that a source reads.
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
    /// `v1` Pod.
    Pod,
}

impl ObjectKind {
    /// Every kind that each source reads. Pods are read only with `--ready-everywhere`.
    pub const ALL: [Self; 4] = [Self::Service, Self::EndpointSlice, Self::Node, Self::ServiceCidr];

    /// `kind`, the newest `apiVersion`, and the resource in the paths of the API.
    const fn api(self) -> [&'static str; 3] {
        match self {
            Self::Service => ["Service", "v1", "services"],
            Self::EndpointSlice => ["EndpointSlice", "discovery.k8s.io/v1", "endpointslices"],
            Self::Node => ["Node", "v1", "nodes"],
            Self::ServiceCidr => ["ServiceCIDR", "networking.k8s.io/v1", "servicecidrs"],
            Self::Pod => ["Pod", "v1", "pods"],
        }
    }

    /// `kind` as the API spells it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        self.api()[0]
    }

    /// The newest `apiVersion`.
    #[must_use]
    pub const fn api_version(self) -> &'static str {
        self.api()[1]
    }

    /// The path of all objects in the API.
    #[must_use]
    pub fn path(self) -> String {
        let [_, version, resource] = self.api();
        format!("/{}/{version}/{resource}", if version.contains('/') { "apis" } else { "api" })
    }

    /// The name of the resource in RBAC rules.
    #[must_use]
    pub fn rbac_resource(self) -> String {
        let [_, version, resource] = self.api();
        version.split_once('/').map_or_else(|| resource.to_owned(), |(group, _)| format!("{resource}.{group}"))
    }

    /// The kind that `apiVersion` and `kind` name together; `None` for all other kinds, such as a
    /// `Service` of another API group, and for pods.
    #[must_use]
    pub fn of(api_version: &str, kind: &str) -> Option<Self> {
        let newest = if api_version == "networking.k8s.io/v1beta1" { "networking.k8s.io/v1" } else { api_version };
        Self::ALL.into_iter().find(|known| (known.name(), known.api_version()) == (kind, newest))
    }

    /// Whether a replica can serve only if it follows this kind.
    #[must_use]
    pub fn is_essential(self) -> bool {
        self != Self::Pod
    }

    /// Whether objects of this kind have namespaces.
    #[must_use]
    pub fn is_namespaced(self) -> bool {
        matches!(self, Self::Service | Self::EndpointSlice | Self::Pod)
    }
}

/// The kinds of objects. The source has a position for each kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SourceKind {
    /// Services.
    Services,
    /// EndpointSlices.
    EndpointSlices,
    /// Nodes.
    Nodes,
    /// ServiceCIDRs.
    ServiceCidrs,
    /// Pods with the readiness gate of Headgate, which only `--ready-everywhere` reads.
    Pods,
    /// A folder of manifests, which has one position for all its objects.
    Files,
}

impl SourceKind {
    /// True when replicas that follow the same source have comparable positions. The position of a
    /// folder is a time on the clock of the machine that reads the folder, so two replicas cannot
    /// compare such positions.
    #[must_use]
    pub fn is_comparable(self) -> bool {
        self != Self::Files
    }

    /// True when the kind includes resources that every agent receives.
    #[must_use]
    pub fn has_shared_resources(self) -> bool {
        self != Self::Nodes
    }

    /// True when the kind includes Nodes.
    #[must_use]
    pub fn has_nodes(self) -> bool {
        matches!(self, Self::Nodes | Self::Files)
    }
}

/// The kind and the name of an object. Displayed as `Service prod/web`, or `Node node-1`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectKey {
    /// Kind.
    pub kind: ObjectKind,
    /// `metadata.namespace`; empty for kinds without namespaces.
    pub namespace: Box<str>,
    /// `metadata.name`.
    pub name: Box<str>,
}

impl ObjectKey {
    /// Creates a key. An object of a namespaced kind that gives no namespace is in `default`, as
    /// with `kubectl apply`.
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

/// An object of any of the kinds. Events hold it in a box.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[allow(clippy::large_enum_variant)]
pub enum Object {
    /// A Service.
    Service(Service),
    /// An EndpointSlice.
    EndpointSlice(EndpointSlice),
    /// A Node.
    Node(Node),
    /// A ServiceCIDR.
    ServiceCidr(ServiceCidr),
    /// A pod.
    Pod(Pod),
}

impl Object {
    /// The kind, and namespace, name and resourceVersion as the metadata of the object gives them.
    #[must_use]
    pub fn names(&self) -> (ObjectKind, [&str; 3]) {
        fn of<L>(metadata: &Metadata<L>) -> [&str; 3] {
            [&metadata.namespace, &metadata.name, &metadata.resource_version]
        }
        match self {
            Self::Service(object) => (ObjectKind::Service, of(&object.metadata)),
            Self::EndpointSlice(object) => (ObjectKind::EndpointSlice, of(&object.metadata)),
            Self::Node(object) => (ObjectKind::Node, of(&object.metadata)),
            Self::ServiceCidr(object) => (ObjectKind::ServiceCidr, of(&object.metadata)),
            Self::Pod(object) => (ObjectKind::Pod, of(&object.metadata)),
        }
    }

    /// The key of the object.
    #[must_use]
    pub fn key(&self) -> ObjectKey {
        let (kind, [namespace, name, _]) = self.names();
        ObjectKey::new(kind, namespace, name)
    }

    /// Decodes an object of this kind.
    ///
    /// # Errors
    /// The error of the deserializer, if a field has a wrong type.
    pub fn deserialize<'de, D: Deserializer<'de>>(kind: ObjectKind, deserializer: D) -> Result<Self, D::Error> {
        Ok(match kind {
            ObjectKind::Service => Self::Service(Service::deserialize(deserializer)?),
            ObjectKind::EndpointSlice => Self::EndpointSlice(EndpointSlice::deserialize(deserializer)?),
            ObjectKind::Node => Self::Node(Node::deserialize(deserializer)?),
            ObjectKind::ServiceCidr => Self::ServiceCidr(ServiceCidr::deserialize(deserializer)?),
            ObjectKind::Pod => Self::Pod(Pod::deserialize(deserializer)?),
        })
    }
}

api_types! {
    /// The `apiVersion`, `kind` and names of an object. These fields identify an object whose other
    /// fields cannot be decoded.
    pub struct ManifestHeader {
        /// `apiVersion`, such as `discovery.k8s.io/v1`.
        pub api_version: String,
        /// `kind`, such as `EndpointSlice`.
        pub kind: String,
        /// The names in `metadata`.
        pub metadata: Names,
    }

    /// The names in `metadata`.
    pub struct Names {
        /// `metadata.name`.
        pub name: String,
        /// `metadata.namespace`.
        pub namespace: String,
        /// `metadata.resourceVersion`.
        pub resource_version: String,
    }
}

// The `metadata` of objects: names, times, and the few labels and annotations that Headgate reads.

/// `metadata`. A field that is missing or `null` has the default value of its type.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, Deserialize)]
#[serde(rename_all = "camelCase", default, bound = "L: Default + Deserialize<'de>")]
pub struct Metadata<L = Labels> {
    /// Name.
    #[serde(deserialize_with = "nullable")]
    pub name: String,
    /// Namespace; empty if the object gives no namespace.
    #[serde(deserialize_with = "nullable")]
    pub namespace: String,
    /// UID; empty in files.
    #[serde(deserialize_with = "nullable")]
    pub uid: String,
    /// resourceVersion; empty in files.
    #[serde(deserialize_with = "nullable")]
    pub resource_version: String,
    /// Time of creation (RFC 3339), or empty.
    #[serde(deserialize_with = "nullable")]
    pub creation_timestamp: String,
    /// Time of deletion (RFC 3339); empty unless the object is being deleted.
    #[serde(deserialize_with = "nullable")]
    pub deletion_timestamp: String,
    /// The labels that are read.
    #[serde(deserialize_with = "nullable")]
    pub labels: L,
    /// The annotations that are read.
    #[serde(deserialize_with = "nullable")]
    pub annotations: Annotations,
}

impl Metadata {
    /// The namespace of a namespaced object: `default` if the object gives no namespace, as with
    /// `kubectl apply`.
    #[must_use]
    pub fn namespace_or_default(&self) -> &str {
        if self.namespace.is_empty() { "default" } else { &self.namespace }
    }
}

/// The keys of the labels and annotations that are read.
pub mod keys {
    /// Label of a Service: another proxy serves it.
    pub const SERVICE_PROXY_NAME: &str = "service.kubernetes.io/service-proxy-name";
    /// Label of an EndpointSlice: it is for DNS only.
    pub const HEADLESS: &str = "service.kubernetes.io/headless";
    /// Label of an EndpointSlice: its Service.
    pub const SERVICE_NAME: &str = "kubernetes.io/service-name";
    /// Annotation of an EndpointSlice: when its newest change was triggered.
    pub const TRIGGER_TIME: &str = "endpoints.kubernetes.io/last-change-trigger-time";
    /// Annotation of an EndpointSlice: Cilium's weight of all its endpoints.
    pub const CILIUM_WEIGHT: &str = "service.cilium.io/weight";
    /// Annotation of an EndpointSlice: the weights of some endpoints.
    pub const WEIGHTS: &str = "headgate.io/weights";
    /// Annotation of a Service: the scheduler of IPVS.
    pub const SCHEDULER: &str = "headgate.io/scheduler";
    /// Annotation of a Service: the algorithm for load balancing.
    pub const LOAD_BALANCING: &str = "headgate.io/load-balancing";
    /// Annotation of a Service: the version of the PROXY protocol.
    pub const PROXY_PROTOCOL: &str = "headgate.io/proxy-protocol";
    /// Annotation of a Service: the limit of connections.
    pub const MAX_CONNECTIONS: &str = "headgate.io/max-connections";
    /// Annotation of a Service: the kind of health checks.
    pub const HEALTH_CHECK: &str = "headgate.io/health-check";
    /// Annotation of a Service: the interval of health checks.
    pub const HEALTH_CHECK_INTERVAL: &str = "headgate.io/health-check-interval";

    pub(super) const LABELS: &[&str] = &[SERVICE_PROXY_NAME, HEADLESS, SERVICE_NAME];
    pub(super) const ANNOTATIONS: &[&str] = &[
        TRIGGER_TIME,
        CILIUM_WEIGHT,
        WEIGHTS,
        SCHEDULER,
        LOAD_BALANCING,
        PROXY_PROTOCOL,
        MAX_CONNECTIONS,
        HEALTH_CHECK,
        HEALTH_CHECK_INTERVAL,
    ];
}

/// The labels that are read.
type Labels = Marks<true>;

/// The annotations that are read.
pub type Annotations = Marks<false>;

/// The labels or annotations that are read ([`keys`]). All others are ignored, whatever their
/// values are.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Marks<const ARE_LABELS: bool>(Vec<(Box<str>, String)>);

impl<const ARE_LABELS: bool> Marks<ARE_LABELS> {
    /// The value of a key.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&str> {
        self.0.iter().rfind(|(known, _)| **known == *key).map(|(_, value)| value.as_str())
    }
}

impl<'de, const ARE_LABELS: bool> Deserialize<'de> for Marks<ARE_LABELS> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(MarksVisitor)
    }
}

struct MarksVisitor<const ARE_LABELS: bool>;

impl<'de, const ARE_LABELS: bool> Visitor<'de> for MarksVisitor<ARE_LABELS> {
    type Value = Marks<ARE_LABELS>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map of strings")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let read = if ARE_LABELS { keys::LABELS } else { keys::ANNOTATIONS };
        let mut marks = Vec::new();
        while let Some(Text(key)) = map.next_key()? {
            if read.contains(&&*key) {
                marks.push((key.into(), map.next_value::<Option<String>>()?.unwrap_or_default()));
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(Marks(marks))
    }
}

/// A text, borrowed from the document where possible.
#[derive(Deserialize)]
struct Text<'a>(#[serde(borrow)] Cow<'a, str>);

/// Reads a value, where `null` means the default value.
fn nullable<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(deserializer: D) -> Result<T, D::Error> {
    Ok(Option::<T>::deserialize(deserializer)?.unwrap_or_default())
}

/// Reads a list, where `null` means an empty list, and frees its spare capacity.
fn nullable_fitting<'de, D: Deserializer<'de>, T: Deserialize<'de>>(deserializer: D) -> Result<Vec<T>, D::Error> {
    let mut list: Vec<T> = nullable(deserializer)?;
    list.shrink_to_fit();
    Ok(list)
}

/// Reads the first entry of a list that may be `null`.
fn first<'de, D: Deserializer<'de>, T: Deserialize<'de>>(deserializer: D) -> Result<Option<T>, D::Error> {
    Ok(nullable::<D, Vec<T>>(deserializer)?.into_iter().next())
}

// The types of objects, with the fields of the API; the pod of an endpoint, and what a pod with
// the readiness gate of Headgate needs.

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
    #[serde(default, rename = "targetRef", deserialize_with = "pod")]
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
        /// When the status changed last (RFC 3339), or empty.
        pub last_transition_time: String,
    }
}

// The pod of an endpoint, in a form that needs little memory.

/// The key of the hashes. It is random, so that nobody can choose names with equal hashes.
static HASHER: LazyLock<RandomState> = LazyLock::new(RandomState::new);

/// The UID and the name of a pod, as hashes that only this process understands. The default value
/// means that the endpoint belongs to no pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct PodId {
    uid: u64,
    name: u64,
}

impl PodId {
    /// Creates the identity of a pod in a namespace that is not known yet.
    #[must_use]
    pub fn new(uid: &str, name: &str) -> Self {
        Self { uid: HASHER.hash_one(uid), name: HASHER.hash_one(name) }
    }

    /// The pod in this namespace. Objects of other namespaces cannot name it, whatever UID they
    /// give.
    #[must_use]
    pub fn in_namespace(self, namespace: &str) -> Self {
        let name = if self.is_none() { self.name } else { HASHER.hash_one((namespace, self.name)) };
        Self { name, ..self }
    }

    /// True if the endpoint belongs to no pod.
    #[must_use]
    pub fn is_none(self) -> bool {
        self == Self::default()
    }

    /// The hash of the pod's UID.
    #[must_use]
    pub fn uid(self) -> u64 {
        self.uid
    }

    /// The hash of the pod's namespace and name.
    #[must_use]
    pub fn name(self) -> u64 {
        self.name
    }

    /// The hash of a namespace and a name, to compare it with [`Self::name`].
    #[must_use]
    pub fn name_hash(namespace: &str, name: &str) -> u64 {
        Self::new("", name).in_namespace(namespace).name
    }
}

/// The fields of `targetRef` that are read. A `targetRef` without UID, as people write it, counts
/// too: the name then identifies the pod.
#[derive(Deserialize)]
struct TargetRef<'a> {
    #[serde(borrow, default)]
    kind: Option<Text<'a>>,
    #[serde(borrow, default)]
    name: Option<Text<'a>>,
    #[serde(borrow, default)]
    uid: Option<Text<'a>>,
}

/// Reads the pod in a `targetRef`, which may be `null`.
fn pod<'de, D: Deserializer<'de>>(deserializer: D) -> Result<PodId, D::Error> {
    let target = Option::<TargetRef<'de>>::deserialize(deserializer)?;
    let Some(TargetRef { kind: Some(Text(kind)), name: Some(Text(name)), uid }) = target else {
        return Ok(PodId::default());
    };
    let uid = uid.map(|Text(uid)| uid).unwrap_or_default();
    Ok(if kind == "Pod" { PodId::new(&uid, &name) } else { PodId::default() })
}

// Whether a pod waits only for the readiness gate of Headgate (KEP-580, "Pod Readiness Gates").

/// The type of the readiness gate, and of the condition that Headgate sets.
pub const GATE: &str = "headgate.io/programmed";

/// The reason that the kubelet gives in the condition `Ready` while the containers are ready, and a
/// readiness gate is not true (`k8s.io/kubernetes` `pkg/kubelet/status/generate.go`).
const GATES_NOT_READY: &str = "ReadinessGatesNotReady";

/// What a pod with the gate needs to become ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GateState {
    /// The condition of the gate is not true, and everything else is.
    Waiting,
    /// The condition of the gate is true, and the kubelet has not set `Ready` yet.
    Programmed,
    /// The pod is ready.
    Ready,
    /// The pod is not ready for another reason, or it is being deleted.
    Unready,
}

impl Pod {
    /// Whether the pod has the gate. The gates of a pod never change.
    #[must_use]
    pub fn has_gate(&self) -> bool {
        self.spec.readiness_gates.iter().any(|gate| gate.condition_type == GATE)
    }

    /// What the pod needs to become ready; `None` without the gate.
    #[must_use]
    pub fn gate_state(&self) -> Option<GateState> {
        if !self.has_gate() {
            return None;
        }
        let is_true = |name: &str| self.condition(name).is_some_and(|condition| condition.status == "True");
        let mut others = self.spec.readiness_gates.iter().filter(|gate| gate.condition_type != GATE);
        let is_held_back = !is_true("ContainersReady") || !others.all(|gate| is_true(&gate.condition_type));
        if is_held_back || !self.metadata.deletion_timestamp.is_empty() {
            return Some(GateState::Unready);
        }
        let waits_for_gates = self.condition("Ready").is_none_or(|ready| ready.reason == GATES_NOT_READY);
        Some(match (is_true(GATE), is_true("Ready")) {
            (false, _) => GateState::Waiting,
            (true, true) => GateState::Ready,
            (true, false) if waits_for_gates => GateState::Programmed,
            // Something else has made the pod unready, such as the loss of its node.
            (true, false) => GateState::Unready,
        })
    }

    /// Since when a pod with the gate has lacked only the gate (RFC 3339); empty if it lacks more.
    #[must_use]
    pub fn waits_since(&self) -> &str {
        let others = self.spec.readiness_gates.iter().map(|gate| &*gate.condition_type).filter(|gate| *gate != GATE);
        let needed = others.chain(["ContainersReady"]).filter_map(|name| self.condition(name));
        let last = needed.map(|condition| &*condition.last_transition_time).max();
        last.filter(|_| self.gate_state() == Some(GateState::Waiting)).unwrap_or_default()
    }

    fn condition(&self, name: &str) -> Option<&PodCondition> {
        self.status.conditions.iter().find(|condition| condition.condition_type == name)
    }
}

#[cfg(test)]
mod metadata_tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::json;

    use super::*;

    #[test]
    fn only_known_labels_and_annotations_are_decoded_each_in_its_own_map() {
        let unknown = json!({"headgate.io/managed": true, "other": {"nested": [1]}});
        let mut metadata = json!({"labels": unknown, "annotations": unknown});
        metadata["labels"][keys::WEIGHTS] = json!(1);
        metadata["annotations"][keys::SERVICE_NAME] = json!(1);
        assert_eq!(Metadata::<Labels>::deserialize(&metadata).unwrap(), Metadata::default());
        for (map, known) in [("labels", keys::LABELS), ("annotations", keys::ANNOTATIONS)] {
            for key in known {
                let read = |value| Metadata::<Labels>::deserialize(json!({map: {*key: value}}));
                assert!(read(json!(true)).is_err(), "{key}");
                let read = read(json!("value")).unwrap();
                assert_eq!(read.labels.get(key).or(read.annotations.get(key)), Some("value"));
            }
        }
    }
}

#[cfg(test)]
mod pod_tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn only_a_target_ref_of_a_pod_names_a_pod() {
        let read = |target: &str| {
            let text = format!(r#"{{"addresses": ["10.0.0.1"], "targetRef": {target}}}"#);
            serde_json::from_str::<SliceEndpoint>(&text).unwrap().pod
        };
        assert_eq!(read(r#"{"kind": "Pod", "name": "web-1", "uid": "u\u0031"}"#), PodId::new("u1", "web-1"));
        assert_eq!(read(r#"{"kind": "Pod", "name": "web-1"}"#), PodId::new("", "web-1"));
        for other in [r#"{"kind": "VirtualMachine", "name": "web-1", "uid": "u1"}"#, r#"{"kind": "Pod"}"#, "null"] {
            assert!(read(other).is_none(), "{other}");
        }
    }
}

#[cfg(test)]
mod gate_tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::json;

    use super::*;

    /// A pod with gates, and with conditions that are written `TYPE=STATUS` or
    /// `TYPE=STATUS/REASON`.
    fn state(gates: &[&str], conditions: &[&str]) -> Option<GateState> {
        let gates: Vec<_> = gates.iter().map(|gate| json!({"conditionType": gate})).collect();
        let condition = |text: &&str| {
            let (name, rest) = text.split_once('=').unwrap();
            let (status, reason) = rest.split_once('/').unwrap_or((rest, ""));
            json!({"type": name, "status": status, "reason": reason})
        };
        let conditions: Vec<_> = conditions.iter().map(condition).collect();
        let pod = json!({"spec": {"readinessGates": gates}, "status": {"conditions": conditions}});
        serde_json::from_value::<Pod>(pod).unwrap().gate_state()
    }

    #[test]
    fn only_a_pod_that_lacks_nothing_but_the_gate_waits() {
        const OURS: &str = "headgate.io/programmed";
        const NOT_YET: &str = "Ready=False/ReadinessGatesNotReady";
        use GateState::{Programmed, Ready, Unready, Waiting};
        let table: &[(&[&str], &[&str], Option<GateState>)] = &[
            (&[], &["ContainersReady=True", "Ready=True"], None),
            (&["other"], &["ContainersReady=True"], None),
            (&[OURS], &[], Some(Unready)),
            (&[OURS], &["ContainersReady=False"], Some(Unready)),
            (&[OURS], &["ContainersReady=True"], Some(Waiting)),
            (&[OURS], &["ContainersReady=True", NOT_YET], Some(Waiting)),
            (&[OURS], &["ContainersReady=True", "headgate.io/programmed=False"], Some(Waiting)),
            (&[OURS, "other"], &["ContainersReady=True", NOT_YET], Some(Unready)),
            (&[OURS, "other"], &["ContainersReady=True", "other=Unknown"], Some(Unready)),
            (&[OURS, "other"], &["ContainersReady=True", "other=True"], Some(Waiting)),
            (&[OURS], &["ContainersReady=True", "headgate.io/programmed=True", NOT_YET], Some(Programmed)),
            (&[OURS], &["ContainersReady=True", "headgate.io/programmed=True", "Ready=True"], Some(Ready)),
            (&[OURS], &["ContainersReady=True", "headgate.io/programmed=True", "Ready=False"], Some(Unready)),
            (&[OURS], &["ContainersReady=False", "headgate.io/programmed=True", NOT_YET], Some(Unready)),
        ];
        for (gates, conditions, expected) in table {
            assert_eq!(state(gates, conditions), *expected, "{gates:?} {conditions:?}");
        }
    }

    #[test]
    fn a_pod_that_is_deleted_does_not_wait() {
        let pod = json!({
            "metadata": {"deletionTimestamp": "2024-01-01T00:00:00Z"},
            "spec": {"readinessGates": [{"conditionType": GATE}]},
            "status": {"conditions": [{"type": "ContainersReady", "status": "True"}]},
        });
        let pod: Pod = serde_json::from_value(pod).unwrap();
        assert_eq!(pod.gate_state(), Some(GateState::Unready));
    }
}
