//! Generators of random changes: services, endpoints and removals. There are few names and
//! addresses, so many changes affect the same object. Two versions of a service may differ in
//! families, addresses, ports, policies, affinity, source ranges and annotations.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use headgate_core::{
    Change, ClientIpAffinity, Conditions, Dirty, Endpoint, EndpointPort, Hints, NodeFacts, Placement, Protocol,
    ProxyProtocol, Service, ServiceKey, ServicePort, State, TrafficPolicy, Weight,
};
use proptest::prelude::*;

pub(crate) fn node() -> NodeFacts {
    NodeFacts { zone: Some("z1".into()), addresses: vec!["192.0.2.1".parse().unwrap()], ..NodeFacts::named("n1") }
}

fn key(i: u8) -> ServiceKey {
    ServiceKey::new("ns", &format!("svc{i}"))
}

fn any_protocol() -> impl Strategy<Value = Protocol> {
    prop_oneof![6 => Just(Protocol::Tcp), 2 => Just(Protocol::Udp), 1 => Just(Protocol::Sctp)]
}

prop_compose! {
    /// One or two ports. Several services may have the same NodePort.
    fn any_ports(i: u8)(
        protocol in any_protocol(), port in 80u16..82, is_renamed in prop::bool::weighted(0.2), has_node_port in any::<bool>(),
        second in prop::option::of((any_protocol(), any::<bool>())),
    ) -> Vec<ServicePort> {
        let name = if is_renamed { "c" } else { "a" };
        let node_port = if has_node_port { 30_000 + u16::from(i % 3) } else { 0 };
        let mut ports = vec![ServicePort { name: name.into(), protocol, port, node_port }];
        if let Some((protocol, has_node_port)) = second {
            let node_port = if has_node_port { 30_010 + u16::from(i) } else { 0 };
            ports.push(ServicePort { name: "b".into(), protocol, port: 90, node_port });
        }
        ports
    }
}

prop_compose! {
    /// ClusterIPs, externalIPs and load balancer IPs, each in one family or in both. Several
    /// services may have the same externalIP or load balancer IP, and an externalIP may be the
    /// ClusterIP of another service.
    fn any_addresses(i: u8)(
        families in prop_oneof![4 => Just((true, true)), 1 => Just((true, false)), 1 => Just((false, true))],
        is_shared in any::<bool>(), has_external in any::<bool>(), has_balancer in any::<bool>(), has_v6 in any::<bool>(),
        takes_cluster_ip in prop::bool::weighted(0.1),
    ) -> [Vec<IpAddr>; 3] {
        let mut cluster = Vec::new();
        if families.0 { cluster.push(IpAddr::from([10, 96, i, 1])); }
        if families.1 { cluster.push(format!("fd00:96::{i:x}").parse().unwrap()); }
        let last = if is_shared { 100 } else { 100 + i };
        let of = |is_present: bool, v4: [u8; 3], v6: &str| -> Vec<IpAddr> {
            let mut addresses = Vec::new();
            if is_present { addresses.push(IpAddr::from([v4[0], v4[1], v4[2], last])); }
            if is_present && has_v6 { addresses.push(format!("{v6}{last:x}").parse().unwrap()); }
            addresses
        };
        let mut external = of(has_external, [192, 0, 2], "2001:db8:e::");
        if takes_cluster_ip { external.push([10, 96, i ^ 1, 1].into()); }
        [cluster, external, of(has_balancer, [203, 0, 113], "2001:db8:b::")]
    }
}

/// Generates source ranges: no ranges, ranges of clients, a range with the node, a range of IPv6
/// only, or a range with all IPv4 addresses.
fn any_source_ranges() -> impl Strategy<Value = Vec<&'static str>> {
    prop_oneof![
        4 => Just(vec![]),
        1 => Just(vec!["198.51.100.0/24", "2001:db8:5::/64"]),
        1 => Just(vec!["192.0.2.0/31"]),
        1 => Just(vec!["2001:db8:5::/64"]),
        1 => Just(vec!["0.0.0.0/0", "198.51.100.0/24"]),
    ]
}

/// A service number, and the ports and addresses that depend on it.
fn any_number(services: u8) -> impl Strategy<Value = (u8, Vec<ServicePort>, [Vec<IpAddr>; 3])> {
    (0..services).prop_flat_map(|i| (Just(i), any_ports(i), any_addresses(i)))
}

prop_compose! {
    pub(crate) fn any_service(services: u8)(
        (i, ports, [cluster_ips, external_ips, load_balancer_ips]) in any_number(services), created_unix_seconds in 0i64..3,
        internal_local in any::<bool>(), external_local in any::<bool>(), health_check_node_port in 0u16..2,
        timeout_seconds in prop::option::of(prop_oneof![Just(10u32), Just(10_800)]), ranges in any_source_ranges(),
        scheduler in prop_oneof![3 => Just(""), 1 => Just("fo")],
        load_balancing in prop_oneof![3 => Just(""), 1 => Just("random"), 1 => Just("consistent-hash")], health_check in prop_oneof![3 => Just(""), 1 => Just("tcp")],
        proxy_protocol in prop_oneof![3 => Just(None), 1 => Just(Some(ProxyProtocol::V2))], max_connections in 0u32..2,
    ) -> Service {
        let policy = |is_local| if is_local { TrafficPolicy::Local } else { TrafficPolicy::Cluster };
        let health_check_node_port =
            if external_local { 31_000 + 100 * health_check_node_port + u16::from(i) } else { 0 };
        Service {
            external_ips,
            load_balancer_ips,
            internal_traffic_policy: policy(internal_local),
            external_traffic_policy: policy(external_local),
            session_affinity: timeout_seconds.map(|timeout_seconds| ClientIpAffinity { timeout_seconds }),
            load_balancer_source_ranges: ranges.into_iter().map(|range| range.parse().unwrap()).collect(),
            health_check_node_port,
            created_unix_seconds,
            scheduler: scheduler.into(),
            load_balancing: load_balancing.into(),
            health_check: health_check.into(),
            proxy_protocol,
            max_connections,
            ..Service::new(key(i), cluster_ips, ports)
        }
    }
}

/// The conditions to choose from: ready (twice as likely), ready and terminating
/// (publishNotReadyAddresses), serving and terminating, terminating, not ready.
const CONDITIONS: [Conditions; 6] = [
    Conditions::READY,
    Conditions::READY,
    Conditions { ready: true, serving: true, terminating: true },
    Conditions { ready: false, serving: true, terminating: true },
    Conditions { ready: false, serving: false, terminating: true },
    Conditions { ready: false, serving: false, terminating: false },
];

/// Generates no hints, or hints for some zones and nodes.
fn any_hints() -> impl Strategy<Value = Option<Arc<Hints>>> {
    let names = |letter: char| {
        prop::collection::btree_set(1u8..4, 0..3).prop_map(move |numbers| {
            numbers.into_iter().map(|n| format!("{letter}{n}").into()).collect::<Vec<Arc<str>>>()
        })
    };
    prop_oneof![
        1 => Just(None),
        2 => (names('z'), names('n')).prop_map(|(zones, nodes)| Some(Arc::new(Hints { zones, nodes }))),
    ]
}

/// One of a few addresses in both families. Services share these addresses.
fn any_address() -> impl Strategy<Value = IpAddr> {
    (0u8..6, any::<bool>()).prop_map(|(last, v6)| {
        if v6 { format!("fd00:244::{last:x}").parse().unwrap() } else { IpAddr::from([10, 244, 0, last]) }
    })
}

fn any_placement() -> impl Strategy<Value = Arc<Placement>> {
    (0u8..3, 0u8..3, any_hints(), prop_oneof![4 => Just(100), 1 => 0u16..6, 1 => 2u16..600]).prop_map(
        |(node, zone, hints, weight)| {
            let weight = Weight::from_hundredths(weight);
            let node = (node > 0).then(|| format!("n{node}").into());
            let zone = (zone > 0).then(|| format!("z{zone}").into());
            Placement { node, zone, hints, weight }.into()
        },
    )
}

fn any_conditions() -> impl Strategy<Value = Conditions> {
    prop::sample::select(CONDITIONS.to_vec())
}

/// The conditions and placements that the ports of an endpoint carry, in order. The ports of most
/// endpoints carry no conditions and no placement.
fn any_carried() -> impl Strategy<Value = Vec<(Option<Conditions>, Option<Arc<Placement>>)>> {
    let one = (prop::option::weighted(0.6, any_conditions()), prop::option::weighted(0.4, any_placement()));
    prop_oneof![2 => Just(Vec::new()), 1 => prop::collection::vec(one, 1..4)]
}

prop_compose! {
    pub(crate) fn any_endpoint(services: u8)(
        i in 0..services, address in any_address(), conditions in any_conditions(), placement in any_placement(),
        ports in 0u8..6, carried in any_carried(),
    ) -> (ServiceKey, Endpoint) {
        let port = |name: &str, number| EndpointPort::new(name, Protocol::Tcp, number);
        let of = |protocol, port| EndpointPort { protocol, ..port };
        let mut ports: Vec<EndpointPort> = match ports {
            0 => vec![port("a", 8080)],
            1 => vec![port("a", 8080), port("b", 8081)],
            2 => vec![port("a", 8080), port("a", 9090)],
            3 => vec![of(Protocol::Udp, port("a", 53))],
            4 => vec![port("a", 53), of(Protocol::Udp, port("a", 53)), of(Protocol::Sctp, port("a", 53)), of(Protocol::Udp, port("b", 54))],
            _ => vec![port("b", 8081), port("c", 8080)],
        };
        for (port, (conditions, placement)) in ports.iter_mut().skip(1).zip(carried) {
            (port.conditions, port.placement) = (conditions, placement);
        }
        (key(i), Endpoint { conditions, placement, ..Endpoint::new(address, Arc::from(ports)) })
    }
}

fn any_change(services: u8) -> impl Strategy<Value = Change> {
    prop_oneof![
        3 => any_service(services).prop_map(Change::from),
        6 => any_endpoint(services).prop_map(|(key, endpoint)| Change::Endpoint(key, endpoint)),
        1 => (0..services).prop_map(|i| Change::RemoveService(key(i))),
        3 => any_endpoint(services).prop_map(|(key, endpoint)| Change::RemoveEndpoint(key, endpoint.address)),
    ]
}

/// Identifies the object of a change.
fn subject(change: &Change) -> (ServiceKey, Option<IpAddr>) {
    match change {
        Change::Service(service) => (service.key.clone(), None),
        Change::RemoveService(key) => (key.clone(), None),
        Change::Endpoint(key, endpoint) => (key.clone(), Some(endpoint.address)),
        Change::RemoveEndpoint(key, address) => (key.clone(), Some(*address)),
        Change::ServiceCidr(_) | Change::RemoveServiceCidr(_) => unreachable!("not generated"),
    }
}

/// Returns the last item of each subject.
fn last_of_each<T: Clone, S: Ord>(all: &[T], subject: impl Fn(&T) -> S) -> Vec<T> {
    let mut seen = BTreeSet::new();
    let mut last: Vec<T> = all.iter().rev().filter(|one| seen.insert(subject(one))).cloned().collect();
    last.reverse();
    last
}

/// A change of the state, of the failing endpoints, or of the node.
#[allow(dead_code)] // not used by every test that includes this module
#[derive(Debug, Clone)]
pub(crate) enum Event {
    /// A change of the state.
    Change(Box<Change>),
    /// The endpoints of a service that fail health checks of the node.
    Failing(ServiceKey, BTreeSet<SocketAddr>),
    /// The zone of the node.
    Zone(Option<u8>),
    /// The last byte of the addresses of the node.
    Address(u8),
}

impl From<Change> for Event {
    fn from(change: Change) -> Self {
        Self::Change(Box::new(change))
    }
}

#[allow(dead_code)] // not used by every test that includes this module
impl Event {
    pub(crate) fn apply(&self, state: &mut State, node: &mut NodeFacts, dirty: &mut Dirty) {
        match self {
            Self::Change(change) => drop(state.apply((**change).clone(), dirty)),
            Self::Failing(key, failing) => {
                let key = Arc::new(key.clone());
                if node.failing.set(&key, failing.clone()) {
                    dirty.services.insert(key);
                }
            }
            Self::Zone(zone) => node.zone = zone.map(|zone| format!("z{zone}").into()),
            Self::Address(last) => {
                let v6 = format!("2001:db8:5::{last}").parse().unwrap();
                node.addresses = vec![IpAddr::from([192, 0, 2, *last]), v6];
            }
        }
    }

    /// Whether an agent programs all services after this event.
    pub(crate) fn is_of_node(&self) -> bool {
        matches!(self, Self::Zone(_) | Self::Address(_))
    }

    fn subject(&self) -> (u8, Option<(ServiceKey, Option<IpAddr>)>) {
        match self {
            Self::Change(change) => (0, Some(subject(change))),
            Self::Failing(key, _) => (1, Some((key.clone(), None))),
            Self::Zone(_) => (2, None),
            Self::Address(_) => (3, None),
        }
    }
}

prop_compose! {
    /// A set of failing endpoints for a service. The service may not have these endpoints.
    fn any_failing(services: u8)(
        i in 0..services, failing in prop::collection::btree_set((any_address(), 0usize..4), 0..6),
    ) -> Event {
        let of = |(address, port): (IpAddr, usize)| SocketAddr::new(address, [8080, 8081, 9090, 53][port]);
        Event::Failing(key(i), failing.into_iter().map(of).collect())
    }
}

/// Generates mostly changes of the state, and some changes of failing endpoints.
#[allow(dead_code)] // not used by every test that includes this module
pub(crate) fn any_event(services: u8) -> impl Strategy<Value = Event> {
    prop_oneof![
        9 => any_change(services).prop_map(Event::from),
        1 => any_failing(services),
    ]
}

/// Like [`any_event`], with changes of the node.
#[allow(dead_code)] // not used by every test that includes this module
pub(crate) fn any_event_or_node(services: u8) -> impl Strategy<Value = Event> {
    prop_oneof![
        8 => any_event(services),
        2 => prop::option::of(1u8..4).prop_map(Event::Zone),
        1 => (0u8..4).prop_map(Event::Address),
    ]
}

/// Returns the events, the last event of each subject, and these in the reverse order.
#[allow(dead_code)] // not used by every test that includes this module
pub(crate) fn replays(events: &[Event]) -> [Vec<Event>; 3] {
    let squashed = last_of_each(events, Event::subject);
    let reversed = squashed.iter().rev().cloned().collect();
    [events.to_vec(), squashed, reversed]
}
