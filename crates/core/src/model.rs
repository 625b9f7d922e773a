//! The resources that the control plane sends to agents. The control plane has already selected IP
//! families, applied the defaults of the API, and replaced policies that have no effect. So all
//! agents use the same values.

use std::{
    borrow::Borrow,
    collections::{BTreeMap, BTreeSet, HashSet},
    fmt,
    hash::Hash,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use compact_str::CompactString;
use ipnet::IpNet;

use crate::conventions::addresses::DialPolicy;

/// Defines an enum whose values have names, with `ALL`, `as_str`, `parse` and `Display`.
#[macro_export]
macro_rules! named {
    (
        $(#[$about:meta])*
        pub enum $name:ident { $($(#[$doc:meta])* $value:ident = $text:literal,)+ }
    ) => {
        $(#[$about])*
        pub enum $name { $($(#[$doc])* $value,)+ }

        impl $name {
            /// All values.
            pub const ALL: [Self; [$($text),+].len()] = [$(Self::$value),+];

            /// The name.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$value => $text,)+
                }
            }

            /// The value with this name, or `None` if the name is unknown.
            #[must_use]
            pub fn parse(name: &str) -> Option<Self> {
                Self::ALL.into_iter().find(|value| value.as_str() == name)
            }
        }

        impl ::std::fmt::Display for $name {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                f.write_str(self.as_str())
            }
        }
    };
}

/// An IP family. The two families of a Service are programmed independently of each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl Family {
    /// Both families, IPv4 first.
    pub const BOTH: [Self; 2] = [Self::V4, Self::V6];

    /// Returns the family of an address.
    #[must_use]
    pub fn of(address: IpAddr) -> Self {
        if address.is_ipv4() { Self::V4 } else { Self::V6 }
    }

    /// The length of a host prefix: 32 or 128.
    #[must_use]
    pub fn host_prefix_length(self) -> u8 {
        match self {
            Self::V4 => 32,
            Self::V6 => 128,
        }
    }
}

/// Reads an address in network order: 4 bytes of IPv4, or 16 bytes of IPv6.
#[must_use]
pub fn address_from_bytes(bytes: &[u8]) -> Option<IpAddr> {
    let v4 = <[u8; 4]>::try_from(bytes).map(IpAddr::from);
    v4.or_else(|_| <[u8; 16]>::try_from(bytes).map(IpAddr::from)).ok()
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
        })
    }
}

named! {
    /// A transport protocol that Services can name. Named as in the Kubernetes API.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub enum Protocol {
        /// TCP.
        Tcp = "TCP",
        /// UDP.
        Udp = "UDP",
        /// SCTP.
        Sctp = "SCTP",
    }
}

impl Protocol {
    /// The name in lower case, as in iptables rules and in the hashes of kube-proxy.
    #[must_use]
    pub fn as_lower_str(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
            Self::Sctp => "sctp",
        }
    }
}

// Changes of the shared state.

/// One change of the shared state: a resource with its new value, or the key of a deleted resource.
/// Services are boxed because they are large and few: a snapshot is a long list of changes, and
/// most of them are endpoints.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// A Service was added or changed.
    Service(Box<Service>),
    /// A Service was deleted. Separate changes remove its endpoints.
    RemoveService(ServiceKey),
    /// An endpoint of a service was added or changed. The service itself may arrive later.
    Endpoint(ServiceKey, Endpoint),
    /// An endpoint of a service was deleted.
    RemoveEndpoint(ServiceKey, IpAddr),
    /// A ServiceCIDR was added or changed.
    ServiceCidr(ServiceCidr),
    /// A ServiceCIDR was deleted.
    RemoveServiceCidr(CompactString),
}

/// The change that adds or replaces a Service.
impl From<Service> for Change {
    fn from(service: Service) -> Self {
        Self::Service(Box::new(service))
    }
}

// Endpoints.

/// `conditions` of an endpoint, with the API's defaults applied: absent `ready` and `serving` mean
/// true, absent `terminating` means false.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Conditions {
    /// The endpoint may receive new connections.
    pub ready: bool,
    /// The pod is ready, even if it is terminating.
    pub serving: bool,
    /// The pod is being deleted.
    pub terminating: bool,
}

impl Conditions {
    /// The usual state: ready, serving, not terminating.
    pub const READY: Self = Self { ready: true, serving: true, terminating: false };

    /// True for endpoints that receive traffic only when no endpoint is ready (KEP-1669).
    #[must_use]
    pub fn is_serving_terminating(self) -> bool {
        self.serving && self.terminating
    }
}

/// One named port of an endpoint.
///
/// The conditions and the placement of an address in an EndpointSlice apply to the ports in that
/// slice. Two ports of one address may be in different slices, so their conditions and placements
/// may differ. Such differences are rare. A port therefore carries only values that differ from its
/// [`Endpoint`], and endpoints share equal port lists.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EndpointPort {
    /// The name of the [`ServicePort`] to which this port belongs.
    pub name: CompactString,
    /// Transport protocol.
    pub protocol: Protocol,
    /// Port number on the endpoint's address, never 0.
    pub port: u16,
    /// Conditions of this port; `None` means the conditions of the endpoint.
    pub conditions: Option<Conditions>,
    /// Placement of this port; `None` means the placement of the endpoint.
    pub placement: Option<Arc<Placement>>,
}

impl EndpointPort {
    /// Creates a port with the conditions and the placement of its endpoint.
    #[must_use]
    pub fn new(name: impl Into<CompactString>, protocol: Protocol, port: u16) -> Self {
        Self { name: name.into(), protocol, port, conditions: None, placement: None }
    }

    /// The fields that identify a port among the ports of one address.
    #[must_use]
    pub fn key(&self) -> (&str, Protocol, u16) {
        (&self.name, self.protocol, self.port)
    }
}

/// `hints` of an endpoint. An empty list means that the endpoint has no hints of that kind.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Hints {
    /// `forZones`, sorted.
    pub zones: Vec<Arc<str>>,
    /// `forNodes`, sorted.
    pub nodes: Vec<Arc<str>>,
}

/// The weight of an endpoint. The share of an endpoint in the connections to a service port is its
/// weight, divided by the sum of all weights. An endpoint with weight 0 gets no new connections and
/// keeps its connections. Annotations of the EndpointSlice set the weight. Without them, it is 1.
///
/// The weight is held in hundredths, because Cilium's default is 100.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Weight(u16);

impl Weight {
    /// The largest weight of the annotation `headgate.io/weights`, and of a
    /// [`Destination`](crate::view::Destination).
    pub const MAX: u16 = 100;

    /// Creates a weight. Returns `None` if the number is not between 0 and [`Self::MAX`].
    #[must_use]
    pub fn new(number: u32) -> Option<Self> {
        let number = u16::try_from(number).ok().filter(|number| *number <= Self::MAX)?;
        Some(Self(number * 100))
    }

    /// Creates a weight from hundredths.
    #[must_use]
    pub fn from_hundredths(hundredths: u16) -> Self {
        Self(hundredths)
    }

    /// Returns the weight in hundredths.
    #[must_use]
    pub fn hundredths(self) -> u16 {
        self.0
    }

    /// Returns the weight, rounded up.
    #[must_use]
    pub fn get(self) -> u32 {
        u32::from(self.0.div_ceil(100))
    }

    /// True if the endpoint gets no new connections.
    #[must_use]
    pub fn is_zero(self) -> bool {
        self.0 == 0
    }
}

impl Default for Weight {
    fn default() -> Self {
        Self(100)
    }
}

/// The greatest common divisor of two numbers.
pub(crate) fn greatest_common_divisor(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

/// Where an endpoint runs, which zones or nodes it should serve, and its weight. Most endpoints on
/// one node have equal placements, so they share one value.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Placement {
    /// The node, in lower case; `None` if the EndpointSlice does not name a node.
    pub node: Option<Arc<str>>,
    /// The zone of the endpoint.
    pub zone: Option<Arc<str>>,
    /// Topology hints.
    pub hints: Option<Arc<Hints>>,
    /// The weight.
    pub weight: Weight,
}

impl Placement {
    /// Creates a placement on a node, with weight 1 and without zone and hints.
    #[must_use]
    pub fn on(node: &str) -> Self {
        Self { node: Some(node.into()), ..Self::default() }
    }
}

/// One address behind a service. The Service and the address identify an endpoint. Endpoints share
/// port lists and placements, because a cluster has few different values of them.
///
/// Digests are computed from this value, so equal endpoints must have equal fields. The control
/// plane therefore sets the conditions and the placement of the endpoint to the conditions and the
/// placement of its first port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    /// The address.
    pub address: IpAddr,
    /// The sorted ports of the address in EndpointSlices, each [key](EndpointPort::key) once.
    pub ports: Arc<[EndpointPort]>,
    /// Conditions of all ports that carry no conditions.
    pub conditions: Conditions,
    /// Placement of all ports that carry no placement.
    pub placement: Arc<Placement>,
}

/// One port of an endpoint, with the conditions and the placement that apply to it.
#[derive(Debug, Clone, Copy)]
pub struct PortState<'a> {
    /// The endpoint's address.
    pub address: IpAddr,
    /// The port.
    pub port: &'a EndpointPort,
    /// Conditions of this address and port.
    pub conditions: Conditions,
    /// Placement of this address and port.
    pub placement: &'a Arc<Placement>,
}

impl Endpoint {
    /// True if one of its ports has another weight than 1.
    #[must_use]
    pub fn is_weighted(&self) -> bool {
        let of_ports = self.ports.iter().filter_map(|port| port.placement.as_ref());
        of_ports.chain([&self.placement]).any(|placement| placement.weight != Weight::default())
    }

    /// Creates a ready endpoint without node, zone and hints. Callers set other fields as needed.
    #[must_use]
    pub fn new(address: IpAddr, ports: Arc<[EndpointPort]>) -> Self {
        Self { address, ports, conditions: Conditions::READY, placement: Arc::default() }
    }

    /// Returns all ports, each with its conditions and its placement.
    pub fn port_states(&self) -> impl Iterator<Item = PortState<'_>> + Clone {
        self.ports.iter().map(|port| PortState {
            address: self.address,
            port,
            conditions: port.conditions.unwrap_or(self.conditions),
            placement: port.placement.as_ref().unwrap_or(&self.placement),
        })
    }

    /// Splits the endpoint into groups of ports with equal state, in order of their first ports.
    #[must_use]
    pub fn by_state(&self) -> Vec<Self> {
        if self.ports.iter().all(|port| port.conditions.is_none() && port.placement.is_none()) {
            return vec![self.clone()];
        }
        let mut groups: Vec<(PortState<'_>, Vec<EndpointPort>)> = Vec::new();
        for state in self.port_states() {
            let is_same =
                |group: &PortState<'_>| group.conditions == state.conditions && group.placement == state.placement;
            let port = EndpointPort { conditions: None, placement: None, ..state.port.clone() };
            match groups.iter_mut().find(|(group, _)| is_same(group)) {
                Some((_, ports)) => ports.push(port),
                None => groups.push((state, vec![port])),
            }
        }
        let endpoint = |(state, ports): (PortState<'_>, Vec<EndpointPort>)| Self {
            address: self.address,
            ports: ports.into(),
            conditions: state.conditions,
            placement: Arc::clone(state.placement),
        };
        groups.into_iter().map(endpoint).collect()
    }

    /// True if at least one port is ready.
    #[must_use]
    pub fn has_ready_port(&self) -> bool {
        self.port_states().any(|state| state.conditions.ready)
    }
}

// Load balancing: the algorithms by which a node chooses an endpoint for a new connection.
//
// The annotation `headgate.io/load-balancing` of a Service selects an algorithm, and the
// annotation `headgate.io/weights` of an EndpointSlice sets weights. Each dataplane supports some
// of the algorithms. In place of an algorithm that it does not support, a dataplane uses its
// default and reports this ([`Demand`](crate::Demand)).

named! {
    /// An algorithm that chooses endpoints.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub enum LoadBalancing {
        /// Selects an endpoint at random.
        Random = "random",
        /// Selects the endpoints in turn.
        RoundRobin = "round-robin",
        /// Selects the endpoint with the fewest connections from this node.
        LeastConnections = "least-connections",
        /// Selects an endpoint by a hash of the client's address. All nodes select the same
        /// endpoint for a client. When an endpoint is removed, only few clients of the other
        /// endpoints change their endpoint.
        ConsistentHash = "consistent-hash",
    }
}

// Nodes and service ranges.

/// The fields of a Node that the agent on it needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// `metadata.name`.
    pub name: Arc<str>,
    /// Label `topology.kubernetes.io/zone`.
    pub zone: Option<Arc<str>>,
    /// `spec.podCIDRs`.
    pub pod_cidrs: Vec<IpNet>,
    /// `status.addresses`: InternalIPs, then ExternalIPs.
    pub addresses: Vec<IpAddr>,
    /// The Node has a deletionTimestamp or the taint `ToBeDeletedByClusterAutoscaler`. When a Node
    /// is deleted, its agent keeps the last value and sets this field.
    pub going_away: bool,
}

/// A ServiceCIDR: ranges from which ClusterIPs are allocated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServiceCidr {
    /// `metadata.name`.
    pub name: CompactString,
    /// `spec.cidrs`.
    pub cidrs: Vec<IpNet>,
}

// Pools share equal values: a cluster has few different names, port lists and placements.

/// A pool with fewer values does not search for unused values.
const SWEEP_FROM: usize = 1_024;

/// Shared values of one type. Unused ones are dropped each time the size has doubled.
#[derive(Debug)]
pub struct Pool<T: ?Sized> {
    held: HashSet<Arc<T>>,
    sweep_at: usize,
}

impl<T: ?Sized> Default for Pool<T> {
    fn default() -> Self {
        Self { held: HashSet::new(), sweep_at: SWEEP_FROM }
    }
}

impl<T: ?Sized + Hash + Eq> Pool<T> {
    /// Returns the shared copy of `value`. If the pool has no copy, it stores the result of `make`.
    pub fn get(&mut self, value: &T, make: impl FnOnce() -> Arc<T>) -> Arc<T>
    where
        Arc<T>: Borrow<T>,
    {
        if let Some(shared) = self.held.get(value) {
            return Arc::clone(shared);
        }
        if self.held.len() >= self.sweep_at {
            self.held.retain(|shared| Arc::strong_count(shared) > 1);
            self.sweep_at = (self.held.len() * 2).max(SWEEP_FROM);
        }
        let shared = make();
        self.held.insert(Arc::clone(&shared));
        shared
    }
}

// The PROXY protocol, which tells endpoints the address of the client (`proxy-protocol.txt` of
// HAProxy). The annotation `headgate.io/proxy-protocol` of a Service selects a version.

named! {
    /// A version of the PROXY protocol.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub enum ProxyProtocol {
        /// A line of text.
        V1 = "v1",
        /// A binary header.
        V2 = "v2",
    }
}

// Services.

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

named! {
    /// An internal or external traffic policy, `Cluster` if the given one has no effect.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
    pub enum TrafficPolicy {
        /// Traffic may go to all endpoints of the cluster.
        #[default]
        Cluster = "Cluster",
        /// Traffic may go only to endpoints on this node.
        Local = "Local",
    }
}

impl TrafficPolicy {
    /// True for [`TrafficPolicy::Local`].
    #[must_use]
    pub fn is_local(self) -> bool {
        self == Self::Local
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
    /// The name, or empty. Endpoint ports of equal name and protocol belong to the port.
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
    /// Addresses in `status.loadBalancer.ingress` with ipMode VIP or none, of its families.
    pub load_balancer_ips: Vec<IpAddr>,
    /// Ports in the order of the spec.
    pub ports: Vec<ServicePort>,
    /// Policy for traffic to ClusterIPs.
    pub internal_traffic_policy: TrafficPolicy,
    /// Policy for external traffic; `Cluster` if `Local` has no effect.
    pub external_traffic_policy: TrafficPolicy,
    /// Session affinity, if any.
    pub session_affinity: Option<ClientIpAffinity>,
    /// `spec.loadBalancerSourceRanges`; an empty list admits all clients.
    pub load_balancer_source_ranges: Vec<IpNet>,
    /// `spec.healthCheckNodePort`, 0 for none.
    pub health_check_node_port: u16,
    /// `metadata.creationTimestamp`, seconds since the Unix epoch; 0 when unknown.
    pub created_unix_seconds: i64,
    /// Annotation `headgate.io/load-balancing`, see [`LoadBalancing`]; empty for the default.
    pub load_balancing: CompactString,
    /// Annotation `headgate.io/scheduler`; empty for the cluster's default.
    pub scheduler: CompactString,
    /// Annotation `headgate.io/health-check`: `tcp`; other values mean no checks.
    pub health_check: CompactString,
    /// Annotation `headgate.io/health-check-interval` in milliseconds, 0 for the default.
    pub health_check_interval_ms: u32,
    /// Annotation `headgate.io/proxy-protocol`: the header for endpoints, which needs a proxy.
    pub proxy_protocol: Option<ProxyProtocol>,
    /// Annotation `headgate.io/max-connections` on a node, 0 for no limit. It needs a proxy.
    pub max_connections: u32,
}

impl Service {
    /// True if the Service has a health-check node port.
    #[must_use]
    pub fn has_health_check_node_port(&self) -> bool {
        self.health_check_node_port != 0
    }

    /// Creates a plain ClusterIP service. Callers set other fields as needed.
    #[must_use]
    pub fn new(key: ServiceKey, cluster_ips: Vec<IpAddr>, ports: Vec<ServicePort>) -> Self {
        Self { key, cluster_ips, ports, ..Self::default() }
    }

    /// The most frontends that an agent accepts of one Service.
    pub const MAX_FRONTENDS: usize = 16_384;

    /// Returns the [frontends](Self::frontends) of both families.
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

    /// Returns the number of a family's addresses with each port, and NodePorts, as in mode IPVS.
    #[must_use]
    pub fn virtual_servers(&self, family: Family) -> usize {
        let lists = [&self.cluster_ips, &self.load_balancer_ips, &self.external_ips];
        let addresses: usize = lists.into_iter().map(|addresses| of_family(addresses, family)).sum();
        let node_ports = self.ports.iter().filter(|port| port.node_port != 0).count();
        addresses.saturating_mul(self.ports.len()).saturating_add(node_ports * of_family(&self.cluster_ips, family))
    }

    /// Returns how often a load balancer's address counts: once for each source range, at least 1.
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

    /// Returns the ClusterIP of a family, without which the Service is not programmed there.
    #[must_use]
    pub fn cluster_ip(&self, family: Family) -> Option<IpAddr> {
        self.cluster_ips.iter().copied().find(|address| Family::of(*address) == family)
    }
}

// Facts about one node.

/// Facts about one node. The view of a service depends on the shared state and on these facts.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NodeFacts {
    /// The node's name in lower case. Endpoints on a node of this name are local.
    pub name: Arc<str>,
    /// The node's zone.
    pub zone: Option<Arc<str>>,
    /// The node's own addresses. [`crate::view`] tests whether source ranges admit them.
    pub addresses: Vec<IpAddr>,
    /// This node does not program externalIPs (feature gate `AllowServiceExternalIPs` is off).
    pub ignores_external_ips: bool,
    /// Endpoints that fail this node's health checks.
    pub failing: FailingEndpoints,
    /// The addresses that the node's programs connect to.
    pub dialled: Arc<DialPolicy>,
}

impl NodeFacts {
    /// Returns the facts about a node whose Node resource has not arrived.
    #[must_use]
    pub fn named(name: &str) -> Self {
        Self { name: name.into(), ..Self::default() }
    }

    /// Returns the facts from a Node resource, or [`Self::named`] if there is none.
    #[must_use]
    pub fn of(name: &str, node: Option<&Node>) -> Self {
        let Some(Node { zone, addresses, .. }) = node.cloned() else { return Self::named(name) };
        Self { zone, addresses, ..Self::named(name) }
    }
}

// The endpoints that fail this node's health checks.

static NONE: BTreeSet<SocketAddr> = BTreeSet::new();

/// The TCP ports of endpoints that fail this node's health checks, by service.
///
/// The entry of a service exists until an empty set replaces it, even if the service is deleted.
/// The checker reports only changes. If a service is deleted and created again before the checker
/// notices, the checker reports nothing and the entry is still needed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FailingEndpoints {
    services: BTreeMap<Arc<ServiceKey>, BTreeSet<SocketAddr>>,
}

impl FailingEndpoints {
    /// Replaces the failing endpoints of a service. Returns true if the failing endpoints changed.
    /// The caller then plans the service again.
    pub fn set(&mut self, key: &Arc<ServiceKey>, failing: BTreeSet<SocketAddr>) -> bool {
        if failing.is_empty() {
            return self.services.remove(key).is_some();
        }
        let is_new = self.services.get(key) != Some(&failing);
        if is_new {
            self.services.insert(Arc::clone(key), failing);
        }
        is_new
    }

    /// True if no endpoint fails.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.services.is_empty()
    }

    /// Returns the services with failing endpoints, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&Arc<ServiceKey>, &BTreeSet<SocketAddr>)> {
        self.services.iter()
    }

    /// Returns all failing endpoints of a service.
    #[must_use]
    pub fn of(&self, key: &ServiceKey) -> &BTreeSet<SocketAddr> {
        self.services.get(key).unwrap_or(&NONE)
    }

    /// Returns the endpoints that must not get new connections when a port of `service` chooses
    /// among `choice`. The set may also contain failing endpoints outside `choice`. The set is
    /// empty if the Service requests no checks for this protocol. It is also empty if all endpoints
    /// of `choice` fail, because using all of them is better than using none.
    pub fn among(
        &self,
        service: &Service,
        protocol: Protocol,
        mut choice: impl Iterator<Item = SocketAddr>,
    ) -> &BTreeSet<SocketAddr> {
        let failing = self.of(&service.key);
        let is_checked = protocol == Protocol::Tcp && service.is_checked_by_tcp();
        if is_checked && choice.any(|endpoint| !failing.contains(&endpoint)) { failing } else { &NONE }
    }
}

/// Maximum length of the name of a Kubernetes object.
const MAX_NAME_BYTES: usize = 253;

/// Checks that a name is a DNS subdomain in lower case (RFC 1123).
///
/// # Errors
///
/// Returns a sentence with the fault of the name and the names that are allowed.
pub fn check_subdomain(name: &str) -> Result<(), String> {
    let is_label = |label: &str| {
        let is_allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        !label.is_empty() && !label.starts_with('-') && !label.ends_with('-') && label.bytes().all(is_allowed)
    };
    if name.len() > MAX_NAME_BYTES {
        return Err(format!("the name has {} bytes; at most {MAX_NAME_BYTES} are allowed", name.len()));
    }
    if !name.split('.').all(is_label) {
        return Err(format!("{name:?} is not a valid name: lower-case letters, digits, '-' and '.' are allowed"));
    }
    Ok(())
}

#[cfg(test)]
mod change_tests {
    use super::*;

    #[test]
    fn lower_case_subdomains_are_accepted_and_other_names_are_rejected() {
        for good in ["a", "node-1", "node-1.example.com"] {
            assert_eq!(check_subdomain(good), Ok(()));
        }
        for bad in ["", "A", "a..b", "-a", "a-", "a b", "a\n", &"a".repeat(254)] {
            assert!(check_subdomain(bad).is_err(), "{bad}");
        }
    }

    /// An agent keeps all endpoints in memory. It also keeps all changes of a snapshot until it has
    /// applied them.
    #[test]
    fn endpoints_and_changes_are_small() {
        assert_eq!((size_of::<Endpoint>(), size_of::<Change>()), (48, 96));
        assert_eq!((size_of::<EndpointPort>(), size_of::<Placement>()), (40, 48));
    }
}

#[cfg(test)]
mod endpoint_tests {
    use super::*;

    #[test]
    fn an_endpoint_is_split_by_the_state_of_its_ports() {
        let plain = |name: &str| EndpointPort::new(name, Protocol::Tcp, 80);
        let not_ready = Conditions { ready: false, serving: false, terminating: false };
        let elsewhere = Arc::new(Placement::on("node-2"));
        let of_ports = |ports: Vec<EndpointPort>| Endpoint::new([10, 0, 0, 1].into(), ports.into());
        let endpoint = of_ports(vec![
            plain("a"),
            EndpointPort { conditions: Some(not_ready), ..plain("b") },
            EndpointPort { placement: Some(Arc::clone(&elsewhere)), ..plain("c") },
            // This port carries conditions that are equal to the conditions of the endpoint.
            EndpointPort { conditions: Some(Conditions::READY), ..plain("d") },
            EndpointPort { conditions: Some(not_ready), placement: Some(Arc::default()), ..plain("e") },
        ]);
        let groups = [
            of_ports(vec![plain("a"), plain("d")]),
            Endpoint { conditions: not_ready, ..of_ports(vec![plain("b"), plain("e")]) },
            Endpoint { placement: elsewhere, ..of_ports(vec![plain("c")]) },
        ];
        assert_eq!(endpoint.by_state(), groups);
        assert!(groups.iter().all(|group| group.by_state() == std::slice::from_ref(group)));
    }
}

#[cfg(test)]
mod pool_tests {
    use super::*;

    #[test]
    fn equal_values_share_one_copy_and_unused_values_are_dropped() {
        let mut pool = Pool::<str>::default();
        let kept = pool.get("zone-a", || "zone-a".into());
        for number in 0..10 * SWEEP_FROM {
            let name = number.to_string();
            pool.get(&name, || name.as_str().into());
        }
        assert!(Arc::ptr_eq(&kept, &pool.get("zone-a", || "zone-a".into())));
        assert!(pool.held.len() < 2 * SWEEP_FROM);
    }
}

/// Returns the number of addresses of a family.
fn of_family(addresses: &[IpAddr], family: Family) -> usize {
    addresses.iter().filter(|address| Family::of(**address) == family).count()
}
