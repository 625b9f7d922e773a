//! Sets, virtual servers and rules of example services.
#![allow(clippy::unwrap_used)]

mod rejected;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use super::*;
use crate::{
    Change, ClientIpAffinity, Dirty, Endpoint, EndpointPort, Family, Placement, Protocol, Service, ServiceKey,
    ServicePort, State, TrafficPolicy, Weight, behaviours::masquerade::LocalDetector,
    dataplane::ipvs::fake_kernel::FakeKernel, dataplane::source::FixedState, node_facts::NodeFacts,
};

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn node() -> NodeFacts {
    NodeFacts { addresses: vec![ip("192.0.2.11")], ..NodeFacts::named("node-a") }
}

fn config() -> IpvsConfig {
    let mut config = IpvsConfig::new(Family::V4);
    config.masquerade.detector_v4 = Some(LocalDetector::Cidr("10.244.0.0/16".parse().unwrap()));
    config.node_port_addresses = vec![ip("192.0.2.11")];
    config.other_addresses = [ip("192.0.2.11")].into();
    config
}

/// A service with ClusterIP 10.96.0.1, port 80, externalIP, load balancer IP and NodePort.
fn service() -> Service {
    let port = ServicePort { name: "web".into(), protocol: Protocol::Tcp, port: 80, node_port: 30080 };
    let mut service = Service::new(ServiceKey::new("ns", "web"), vec![ip("10.96.0.1")], vec![port]);
    service.external_ips = vec![ip("203.0.113.1")];
    service.load_balancer_ips = vec![ip("203.0.113.2")];
    service
}

fn endpoint(address: &str, node: &str) -> Change {
    let ports: Arc<[EndpointPort]> = Arc::from([EndpointPort::new("web", Protocol::Tcp, 8080)]);
    let endpoint = Endpoint { placement: Placement::on(node).into(), ..Endpoint::new(ip(address), ports) };
    Change::Endpoint(service().key, endpoint)
}

struct Rig {
    kernel: FakeKernel,
    ledger: Ledger,
    state: State,
    node: NodeFacts,
}

impl Rig {
    fn new(config: IpvsConfig) -> Self {
        let mut rig = Self {
            kernel: FakeKernel::new(&config),
            ledger: Ledger::new(config),
            state: State::default(),
            node: node(),
        };
        let plan = rig.ledger.full(&FixedState(&rig.state, &rig.node), &rig.kernel.existing(), 0);
        rig.kernel.apply(&plan).unwrap();
        rig
    }

    fn step(&mut self, changes: impl IntoIterator<Item = Change>) -> Plan {
        let mut dirty = Dirty::default();
        changes.into_iter().for_each(|change| {
            self.state.apply(change, &mut dirty);
        });
        let plan = self.ledger.changed(&self.state, &self.node, &dirty, 0);
        self.kernel.apply(&plan).unwrap();
        plan
    }

    fn has(&self, set: Set, element: &str) -> bool {
        self.kernel.sets[&set].iter().any(|candidate| candidate.to_string() == element)
    }

    /// Returns the destinations and weights of a server, or `None` if the server does not exist.
    fn destinations(&self, address: &str, port: u16) -> Option<Vec<(String, u32)>> {
        let key = ServerKey { address: ip(address), protocol: Protocol::Tcp, port };
        let (_, destinations) = self.kernel.servers.get(&key)?;
        Some(destinations.iter().map(|(address, weight)| (address.to_string(), *weight)).collect())
    }

    fn rules(&self, table: crate::dataplane::rules::Table, chain: &str) -> Vec<String> {
        let prefix = format!("-A {chain} ");
        self.kernel
            .iptables
            .save(table)
            .lines()
            .filter_map(|line| Some(line.strip_prefix(&prefix)?.to_owned()))
            .collect()
    }
}

fn weighted(destinations: &[(&str, u32)]) -> Option<Vec<(String, u32)>> {
    Some(destinations.iter().map(|(address, weight)| ((*address).to_owned(), *weight)).collect())
}

#[test]
fn names_of_sets_are_the_same_as_in_kube_proxy() {
    assert_eq!(Set::ClusterIp.name(Family::V4), "KUBE-CLUSTER-IP");
    assert_eq!(Set::LoopBack.name(Family::V6), "KUBE-6-LOOP-BACK");
    assert_eq!(Set::LoadBalancerSourceCidr.name(Family::V6), "KUBE-6-LOAD-BALANCER-SOURCE-CID");
    assert_eq!(Set::NodePortLocalSctp.name(Family::V6), "KUBE-6-NODE-PORT-LOCAL-SCTP-HAS");
    for family in Family::BOTH {
        let names: BTreeSet<String> = Set::ALL.iter().map(|set| set.name(family)).collect();
        assert_eq!(names.len(), Set::ALL.len());
        assert!(names.iter().all(|name| name.len() <= 31));
        assert!(Set::ALL.iter().all(|set| Set::parse(&set.name(family), family) == Some(*set)));
    }
    let element = Element::IpPortNet(ip("fd00::1"), Protocol::Udp, 53, "2001:db8::/32".parse().unwrap());
    assert_eq!(element.to_string(), "fd00::1,udp:53,2001:db8::/32");
}

#[test]
fn every_address_has_a_virtual_server() {
    let mut rig = Rig::new(config());
    let plan = rig.step([Change::from(service()), endpoint("10.244.1.1", "node-a"), endpoint("10.244.2.1", "node-b")]);
    for (address, port) in [("10.96.0.1", 80), ("203.0.113.1", 80), ("203.0.113.2", 80), ("192.0.2.11", 30080)] {
        let both = weighted(&[("10.244.1.1:8080", 1), ("10.244.2.1:8080", 1)]);
        assert_eq!(rig.destinations(address, port), both, "{address}");
    }
    assert_eq!(rig.kernel.device_addresses, ["10.96.0.1", "203.0.113.1", "203.0.113.2"].map(ip).into());
    assert!(rig.has(Set::ClusterIp, "10.96.0.1,tcp:80") && rig.has(Set::ExternalIp, "203.0.113.1,tcp:80"));
    assert!(rig.has(Set::LoadBalancer, "203.0.113.2,tcp:80") && rig.has(Set::NodePortTcp, "30080"));
    assert!(rig.has(Set::DeviceAddresses, "203.0.113.2") && rig.has(Set::NodePortServers, "192.0.2.11,tcp:30080"));
    // Hairpin connections are possible only for endpoints on this node.
    let loop_back: Vec<String> = rig.kernel.sets[&Set::LoopBack].iter().map(ToString::to_string).collect();
    assert_eq!(loop_back, ["10.244.1.1,tcp:8080,10.244.1.1"]);
    // The order is elements, addresses, servers and their destinations.
    let rank = |op: &Op| match op {
        Op::AddElement(..) => 0,
        Op::AddAddress(_) => 1,
        Op::AddServer(..) | Op::AddDestination(..) => 2,
        other => panic!("{other:?}"),
    };
    assert!(plan.before.is_sorted_by_key(rank) && plan.after.is_empty());
    assert!(plan.script.is_empty(), "rules do not depend on such services: {}", plan.script);
    let plan = rig.step([endpoint("10.244.2.2", "node-b")]);
    assert_eq!(plan.ops().count(), 4, "one destination on each of four servers: {plan:?}");
}

#[test]
fn a_local_policy_uses_local_endpoints_or_drops_packets() {
    let mut rig = Rig::new(config());
    let mut local = service();
    (local.external_traffic_policy, local.internal_traffic_policy) = (TrafficPolicy::Local, TrafficPolicy::Local);
    rig.step([Change::from(local.clone()), endpoint("10.244.1.1", "node-a"), endpoint("10.244.2.1", "node-b")]);
    for (address, port) in [("10.96.0.1", 80), ("203.0.113.1", 80), ("203.0.113.2", 80), ("192.0.2.11", 30080)] {
        assert_eq!(rig.destinations(address, port), weighted(&[("10.244.1.1:8080", 1)]), "{address}");
    }
    assert!(rig.has(Set::ExternalIpLocal, "203.0.113.1,tcp:80") && !rig.has(Set::ExternalIp, "203.0.113.1,tcp:80"));
    assert!(rig.has(Set::LoadBalancerLocal, "203.0.113.2,tcp:80") && rig.has(Set::NodePortLocalTcp, "30080"));

    let plan = rig.step([Change::RemoveEndpoint(local.key.clone(), ip("10.244.1.1"))]);
    let drops_first = plan.before.iter().any(|op| matches!(op, Op::AddElement(Set::NoLocalEndpoints, _)));
    assert!(drops_first, "packets must be dropped before the destination is removed: {plan:?}");
    assert_eq!(rig.kernel.sets[&Set::NoLocalEndpoints].len(), 4);
    assert_eq!(rig.destinations("203.0.113.2", 80), weighted(&[("10.244.1.1:8080", 0)]));

    rig.step([Change::RemoveEndpoint(local.key, ip("10.244.2.1"))]);
    assert_eq!(rig.kernel.sets[&Set::NoLocalEndpoints].len(), 0);
    assert_eq!(rig.kernel.sets[&Set::NoEndpoints].len(), 4);
}

#[test]
fn the_short_circuit_comes_after_source_ranges_and_before_the_virtual_server() {
    use crate::dataplane::rules::Table::Nat;
    let mut rig = Rig::new(config());
    let mut local = service();
    local.external_traffic_policy = TrafficPolicy::Local;
    local.load_balancer_source_ranges = vec!["198.51.100.0/24".parse().unwrap(), "192.0.2.0/24".parse().unwrap()];
    rig.step([Change::from(local), endpoint("10.244.2.1", "node-b")]);
    let services = rig.rules(Nat, "KUBE-SERVICES");
    let jump = |address: &str, what: &str, target: &str| {
        format!(r#"-d {address}/32 -p tcp -m comment --comment "ns/web:web {what}" -m tcp --dport 80 -j {target}-"#)
    };
    assert!(services[0].starts_with(&jump("203.0.113.1", "external IP", "KUBE-EXT")), "{}", services[0]);
    assert!(services[1].starts_with(&jump("203.0.113.2", "loadbalancer IP", "KUBE-FW")), "{}", services[1]);
    assert_eq!(
        services[2..],
        [
            "-s 127.0.0.0/8 -j RETURN",
            r#"-m comment --comment "Kubernetes service lb portal" -m set --match-set KUBE-LOAD-BALANCER dst,dst -j KUBE-LOAD-BALANCER"#,
            r#"! -s 10.244.0.0/16 -m comment --comment "Kubernetes service cluster ip + port for masquerade purpose" -m set --match-set KUBE-CLUSTER-IP dst,dst -j KUBE-MARK-MASQ"#,
            r#"-m comment --comment "Kubernetes service external ip + port for masquerade and filter purpose" -m set --match-set KUBE-EXTERNAL-IP dst,dst -j KUBE-MARK-MASQ"#,
            // Packets to addresses of services reach neither the rules for NodePorts nor foreign
            // rules after this chain.
            "-m set --match-set KUBE-IPVS-IPS dst -j ACCEPT",
            "-m set --match-set KUBE-LOAD-BALANCER dst,dst -j ACCEPT",
            "-m set --match-set KUBE-EXTERNAL-IP dst,dst -j ACCEPT",
            "-m set --match-set KUBE-EXTERNAL-IP-LOCAL dst,dst -j ACCEPT",
            "-m addrtype --dst-type LOCAL -j KUBE-NODE-PORT",
            r#"-d 192.0.2.11/32 -m comment --comment "kubernetes service nodeports; NOTE: this must be the last rule in this chain" -j KUBE-NODEPORTS"#,
        ]
    );
    let external = services[0].rsplit(' ').next().unwrap();
    let cluster = external.replace("EXT", "SVC");
    assert_eq!(
        rig.rules(Nat, external),
        [
            format!(r#"-s 10.244.0.0/16 -m comment --comment "pod traffic for ns/web:web external destinations" -j {cluster}"#),
            r#"-m comment --comment "masquerade LOCAL traffic for ns/web:web external destinations" -m addrtype --src-type LOCAL -j KUBE-MARK-MASQ"#.to_owned(),
            format!(r#"-m comment --comment "route LOCAL traffic for ns/web:web external destinations" -m addrtype --src-type LOCAL -j {cluster}"#),
        ],
        "packets of other clients continue to the virtual server"
    );
    assert!(rig.rules(Nat, "KUBE-NODEPORTS")[0].contains("--dport 30080 -j KUBE-EXT-"));
    // The rules do not translate packets that no source range admits. These packets are dropped
    // before they reach the virtual server.
    assert_eq!(rig.rules(Nat, &external.replace("EXT", "FW")).len(), 4);
    assert!(rig.has(Set::LoadBalancerFirewall, "203.0.113.2,tcp:80"));
    assert!(rig.has(Set::LoadBalancerSourceCidr, "203.0.113.2,tcp:80,198.51.100.0/24"));
    assert!(rig.has(Set::LoadBalancerSourceIp, "203.0.113.2,tcp:80,203.0.113.2"), "the node is admitted");
}

#[test]
fn iptables_rules_match_sets() {
    use crate::dataplane::rules::Table::{Filter, Mangle, Nat};
    let rig = Rig::new(config());
    let firewall = ["-m set --match-set KUBE-LOAD-BALANCER-FW dst,dst -j KUBE-SOURCE-RANGES-FIREWALL"];
    assert_eq!(rig.rules(Mangle, "KUBE-IPVS-OUT-FILTER"), firewall);
    assert_eq!(rig.rules(Filter, "KUBE-PROXY-FIREWALL"), firewall);
    for table in [Mangle, Filter] {
        assert_eq!(
            rig.rules(table, "KUBE-SOURCE-RANGES-FIREWALL"),
            [
                "-m set --match-set KUBE-LOAD-BALANCER-SOURCE-CIDR dst,dst,src -j RETURN",
                "-m set --match-set KUBE-LOAD-BALANCER-SOURCE-IP dst,dst,src -j RETURN",
                "-j DROP",
            ]
        );
    }
    assert_eq!(
        rig.rules(Filter, "KUBE-IPVS-FILTER"),
        [
            r#"-m comment --comment "no endpoints" -m set --match-set KUBE-NO-ENDPOINTS dst,dst -j REJECT --reject-with icmp-port-unreachable"#,
            r#"-m comment --comment "no local endpoints" -m set --match-set KUBE-NO-LOCAL-ENDPOINTS dst,dst -j DROP"#,
            "-m set --match-set KUBE-LOAD-BALANCER dst,dst -j RETURN",
            "-m set --match-set KUBE-CLUSTER-IP dst,dst -j RETURN",
            "-m set --match-set KUBE-EXTERNAL-IP dst,dst -j RETURN",
            "-m set --match-set KUBE-EXTERNAL-IP-LOCAL dst,dst -j RETURN",
            "-p tcp -m set --match-set KUBE-HEALTH-CHECK-NODE-PORT dst -j RETURN",
            "-p icmp -m icmp --icmp-type 8 -j RETURN",
            "-m set --match-set KUBE-IPVS-IPS dst -j REJECT --reject-with icmp-port-unreachable",
        ]
    );
    assert_eq!(
        rig.rules(Nat, "KUBE-POSTROUTING")[0],
        r#"-m comment --comment "Kubernetes endpoints dst ip:port, source ip for solving hairpin purpose" -m set --match-set KUBE-LOOP-BACK dst,dst,src -j MASQUERADE --random-fully"#
    );
    assert_eq!(rig.rules(Filter, "KUBE-IPVS-OUT-FILTER")[0], "-m set ! --match-set KUBE-IPVS-IPS dst -j RETURN");
    assert_eq!(rig.rules(Nat, "KUBE-NODE-PORT").len(), 6);
    assert_eq!(rig.rules(Filter, "INPUT").len(), 3);
}

#[test]
fn the_annotation_selects_the_scheduler_and_a_bad_name_is_reported() {
    let mut available = config();
    available.scheduler = Scheduler::WeightedLeastConnection;
    available.available_schedulers.remove(&Scheduler::NeverQueue);
    let mut rig = Rig::new(available);
    let key = ServerKey { address: ip("10.96.0.1"), protocol: Protocol::Tcp, port: 80 };
    let endpoints = [endpoint("10.244.1.1", "node-a"), endpoint("10.244.2.1", "node-b")];
    rig.step(endpoints);
    for (name, scheduler, problem) in [
        ("", Scheduler::WeightedLeastConnection, None),
        ("mh", Scheduler::MaglevHashing, None),
        ("nq", Scheduler::WeightedLeastConnection, Some(Problem::MissingScheduler(Scheduler::NeverQueue))),
        ("fastest", Scheduler::WeightedLeastConnection, Some(Problem::UnknownScheduler("fastest".into()))),
        ("sh", Scheduler::SourceHashing, None),
    ] {
        let mut service = service();
        service.scheduler = name.into();
        service.session_affinity = (name == "sh").then_some(ClientIpAffinity { timeout_seconds: 300 });
        let plan = rig.step([Change::from(service)]);
        assert!(name.is_empty() || plan.ops().all(|op| matches!(op, Op::EditServer(..))), "{plan:?}");
        let settings = rig.kernel.servers[&key].0;
        assert_eq!((settings.scheduler, settings.persistence_seconds), (scheduler, (name == "sh").then_some(300)));
        let problems: Vec<_> = rig.ledger.problems().map(|(_, problem)| problem.clone()).collect();
        assert_eq!(problems, Vec::from_iter(problem), "{name}");
    }
    for scheduler in Scheduler::ALL {
        assert_eq!(Scheduler::parse(scheduler.as_str()), Some(scheduler));
    }
    let mut first = service();
    first.scheduler = "fo".into();
    rig.step([Change::from(first)]);
    assert_eq!(rig.destinations("10.96.0.1", 80), weighted(&[("10.244.1.1:8080", 2), ("10.244.2.1:8080", 1)]));
}

#[test]
fn the_algorithm_for_all_modes_selects_a_scheduler_and_weights_are_those_of_the_endpoints() {
    let mut rig = Rig::new(config());
    let key = ServerKey { address: ip("10.96.0.1"), protocol: Protocol::Tcp, port: 80 };
    let Change::Endpoint(service_key, mut heavy) = endpoint("10.244.1.1", "node-a") else { panic!() };
    rig.step([Change::Endpoint(service_key.clone(), heavy.clone()), endpoint("10.244.2.1", "node-b")]);
    for (algorithm, scheduler, hashes_source_port) in [
        ("", Scheduler::RoundRobin, false),
        ("random", Scheduler::RoundRobin, false),
        ("round-robin", Scheduler::WeightedRoundRobin, false),
        ("least-connections", Scheduler::WeightedLeastConnection, false),
        ("consistent-hash", Scheduler::MaglevHashing, false),
    ] {
        let mut service = service();
        service.load_balancing = algorithm.into();
        rig.step([Change::from(service)]);
        let settings = rig.kernel.servers[&key].0;
        assert_eq!((settings.scheduler, settings.hashes_source_port), (scheduler, hashes_source_port), "{algorithm}");
    }
    let mut named = service();
    named.load_balancing = "consistent-hash".into();
    named.scheduler = "lc".into();
    rig.step([Change::from(named)]);
    assert_eq!(rig.kernel.servers[&key].0.scheduler, Scheduler::LeastConnection, "the annotation for IPVS is stronger");
    assert_eq!(rig.destinations("10.96.0.1", 80), weighted(&[("10.244.1.1:8080", 1), ("10.244.2.1:8080", 1)]));

    let placement = Placement { weight: Weight::new(5).unwrap(), ..(*heavy.placement).clone() };
    heavy.placement = placement.into();
    rig.step([Change::Endpoint(service_key, heavy), Change::from(service())]);
    assert_eq!(rig.kernel.servers[&key].0.scheduler, Scheduler::WeightedRoundRobin, "rr would ignore weights");
    assert_eq!(rig.destinations("10.96.0.1", 80), weighted(&[("10.244.1.1:8080", 5), ("10.244.2.1:8080", 1)]));
}

#[test]
fn tcp_destinations_drain_or_are_restored_and_udp_destinations_are_removed_at_once() {
    let mut rig = Rig::new(config());
    let key = ServerKey { address: ip("10.96.0.1"), protocol: Protocol::Tcp, port: 80 };
    let mut plain = service();
    (plain.external_ips, plain.load_balancer_ips, plain.ports[0].node_port) = (Vec::new(), Vec::new(), 0);
    rig.step([Change::from(plain.clone()), endpoint("10.244.1.1", "node-a"), endpoint("10.244.2.1", "node-b")]);
    rig.step([Change::RemoveEndpoint(plain.key.clone(), ip("10.244.2.1"))]);
    let draining = weighted(&[("10.244.1.1:8080", 1), ("10.244.2.1:8080", 0)]);
    assert_eq!(rig.destinations("10.96.0.1", 80), draining);
    let busy: BTreeMap<SocketAddr, u64> = [("10.244.2.1:8080".parse().unwrap(), 3)].into();
    assert!(rig.ledger.drained(key, &busy, 1).is_empty());

    // After a restart, the agent continues to drain the destination.
    rig.ledger = Ledger::new(config());
    let plan = rig.ledger.full(&FixedState(&rig.state, &rig.node), &rig.kernel.existing(), 0);
    assert!(plan.is_empty(), "{plan:?}");
    assert_eq!(rig.ledger.draining().collect::<Vec<_>>(), [key]);

    let plan = rig.step([endpoint("10.244.2.1", "node-b")]);
    assert_eq!(plan.before, [Op::EditDestination(key, "10.244.2.1:8080".parse().unwrap(), 1)]);
    assert_eq!(rig.ledger.draining().count(), 0);

    // After the service is removed, its connections continue and the device keeps their address.
    rig.step([Change::RemoveService(plain.key.clone())]);
    let none = weighted(&[("10.244.1.1:8080", 0), ("10.244.2.1:8080", 0)]);
    assert_eq!(rig.destinations("10.96.0.1", 80), none);
    assert!(rig.kernel.device_addresses.contains(&key.address));
    let idle = ["10.244.1.1:8080", "10.244.2.1:8080"].map(|address| (address.parse().unwrap(), 0)).into();
    let plan = rig.ledger.drained(key, &idle, 2);
    rig.kernel.apply(&plan).unwrap();
    assert!(rig.kernel.servers.is_empty() && rig.kernel.device_addresses.is_empty());
    assert!(rig.kernel.sets.values().all(BTreeSet::is_empty), "{:?}", rig.kernel.sets);

    plain.ports[0].protocol = Protocol::Udp;
    let udp = |address: &str| {
        let port = EndpointPort::new("web", Protocol::Udp, 53);
        Change::Endpoint(plain.key.clone(), Endpoint::new(ip(address), Arc::from([port])))
    };
    rig.step([Change::from(plain.clone()), udp("10.244.1.1"), udp("10.244.2.1")]);
    let plan = rig.step([Change::RemoveEndpoint(plain.key.clone(), ip("10.244.2.1"))]);
    assert!(matches!(plan.after[0], Op::DeleteDestination(..)), "{plan:?}");
    assert_eq!(rig.ledger.draining().count(), 0);
}

#[test]
fn destinations_that_fail_health_checks_get_weight_0_and_are_kept() {
    let mut rig = Rig::new(config());
    let key = ServerKey { address: ip("10.96.0.1"), protocol: Protocol::Tcp, port: 80 };
    let mut checked = service();
    (checked.external_ips, checked.load_balancer_ips, checked.ports[0].node_port) = (Vec::new(), Vec::new(), 0);
    checked.health_check = "tcp".into();
    rig.step([Change::from(checked.clone()), endpoint("10.244.1.1", "node-a"), endpoint("10.244.2.1", "node-b")]);
    let one: SocketAddr = "10.244.2.1:8080".parse().unwrap();
    let fails = |rig: &mut Rig, failing: &[SocketAddr]| {
        let mut dirty = Dirty::default();
        let key = Arc::new(checked.key.clone());
        rig.node.failing.set(&key, failing.iter().copied().collect());
        dirty.services.insert(key);
        let plan = rig.ledger.changed(&rig.state, &rig.node, &dirty, 0);
        rig.kernel.apply(&plan).unwrap();
        plan.ops().copied().collect::<Vec<_>>()
    };
    assert_eq!(fails(&mut rig, &[one]), [Op::EditDestination(key, one, 0)]);
    assert_eq!(rig.ledger.draining().count(), 0, "a failing destination does not drain");
    assert!(rig.ledger.drained(key, &[(one, 0)].into(), 1).is_empty());
    // After a restart, an agent that knows the failing endpoint writes nothing.
    let mut restarted = Ledger::new(config());
    assert!(restarted.full(&FixedState(&rig.state, &rig.node), &rig.kernel.existing(), 0).is_empty());
    assert_eq!(restarted.draining().count(), 0);
    let all: Vec<SocketAddr> = vec!["10.244.1.1:8080".parse().unwrap(), one];
    assert_eq!(fails(&mut rig, &all), [Op::EditDestination(key, one, 1)], "all destinations fail, so all are used");
    assert_eq!(fails(&mut rig, &[one]), [Op::EditDestination(key, one, 0)]);
    let plan = rig.step([Change::RemoveEndpoint(checked.key.clone(), one.ip())]);
    assert!(plan.is_empty() && rig.ledger.draining().eq([key]), "the destination keeps its connections: {plan:?}");
    assert_eq!(fails(&mut rig, &[]), []);
    let plan = rig.step([endpoint("10.244.2.1", "node-b")]);
    assert_eq!(plan.before, [Op::EditDestination(key, one, 1)]);
}

#[test]
fn objects_of_a_previous_kube_proxy_are_taken_over() {
    let mut rig = Rig::new(config());
    let settings = Settings::new(Scheduler::RoundRobin);
    let key = |address: &str, port| ServerKey { address: ip(address), protocol: Protocol::Tcp, port };
    rig.kernel.sets.remove(&Set::NodePortServers);
    rig.kernel.sets.get_mut(&Set::NodePortTcp).unwrap().insert(Element::Port(30080));
    rig.kernel.device_addresses.insert(ip("10.96.0.9"));
    for (address, port) in [("10.96.0.9", 80), ("192.0.2.11", 30080), ("192.0.2.11", 8000)] {
        rig.kernel.servers.insert(key(address, port), (settings, BTreeMap::new()));
    }
    let plan = rig.ledger.full(&FixedState(&rig.state, &rig.node), &rig.kernel.existing(), 0);
    rig.kernel.apply(&plan).unwrap();
    assert_eq!(rig.kernel.servers.keys().collect::<Vec<_>>(), [&key("192.0.2.11", 8000)]);
    assert!(rig.kernel.device_addresses.is_empty());
}

#[test]
fn destinations_do_not_drain_if_the_scheduler_does_not_skip_weight_0() {
    let mut rig = Rig::new(config());
    let service = Service { scheduler: "dh".into(), ..service() };
    rig.step([Change::from(service.clone()), endpoint("10.244.1.1", "node-a"), endpoint("10.244.2.1", "node-b")]);
    rig.step([Change::RemoveEndpoint(service.key.clone(), ip("10.244.2.1"))]);
    assert_eq!(rig.destinations("10.96.0.1", 80), weighted(&[("10.244.1.1:8080", 1)]));
    // The last destination drains even with `dh`, because new connections have no other
    // destination.
    rig.step([Change::RemoveEndpoint(service.key, ip("10.244.1.1"))]);
    assert_eq!(rig.destinations("10.96.0.1", 80), weighted(&[("10.244.1.1:8080", 0)]));
}

#[test]
fn an_address_that_moves_to_another_service_keeps_common_destinations() {
    let mut rig = Rig::new(config());
    let first = service();
    let second = Service { key: ServiceKey::new("ns", "other"), cluster_ips: vec![ip("10.96.0.2")], ..service() };
    let of_second = |change: Change| match change {
        Change::Endpoint(_, endpoint) => Change::Endpoint(second.key.clone(), endpoint),
        other => other,
    };
    rig.step([
        Change::from(first.clone()),
        endpoint("10.244.1.1", "node-a"),
        Change::from(second.clone()),
        of_second(endpoint("10.244.1.1", "node-a")),
    ]);
    // The first service owned the address. Both services change in one step.
    rig.step([Change::RemoveService(first.key)]);
    assert_eq!(rig.destinations("203.0.113.1", 80), weighted(&[("10.244.1.1:8080", 1)]));
}

#[test]
fn a_service_without_endpoints_has_no_source_ranges() {
    let mut rig = Rig::new(config());
    let service = Service { load_balancer_source_ranges: vec!["10.0.0.0/8".parse().unwrap()], ..service() };
    rig.step([Change::from(service)]);
    assert!(rig.kernel.sets[&Set::LoadBalancerFirewall].is_empty());
    rig.step([endpoint("10.244.1.1", "node-a")]);
    assert!(rig.has(Set::LoadBalancerFirewall, "203.0.113.2,tcp:80"));
}
