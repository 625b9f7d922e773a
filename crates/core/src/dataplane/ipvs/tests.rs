//! Names of sets, and schedulers and weights of example services.
#![allow(clippy::unwrap_used)]

use std::{net::IpAddr, sync::Arc};

use super::*;
use crate::{
    Change, ClientIpAffinity, Dirty, Endpoint, EndpointPort, Family, Placement, Protocol, Service, ServiceKey,
    ServicePort, State, Weight, behaviours::view::LocalDetector, dataplane::shared::FixedState,
    fake_kernel::ipvs::FakeKernel, model::NodeFacts,
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
    ledger: IpvsLedger,
    state: State,
    node: NodeFacts,
}

impl Rig {
    fn new(config: IpvsConfig) -> Self {
        let mut rig = Self {
            kernel: FakeKernel::new(&config),
            ledger: IpvsLedger::new(config),
            state: State::default(),
            node: node(),
        };
        let plan = rig.ledger.full(&FixedState(&rig.state, &rig.node), &rig.kernel.existing(), 0);
        rig.kernel.apply(&plan).unwrap();
        rig
    }

    fn step(&mut self, changes: impl IntoIterator<Item = Change>) -> IpvsPlan {
        let mut dirty = Dirty::default();
        changes.into_iter().for_each(|change| _ = self.state.apply(change, &mut dirty));
        let plan = self.ledger.changed(&self.state, &self.node, &dirty, 0);
        self.kernel.apply(&plan).unwrap();
        plan
    }

    /// Returns the destinations and weights of a server, or `None` if the server does not exist.
    fn destinations(&self, address: &str, port: u16) -> Option<Vec<(String, u32)>> {
        let key = ServerKey { address: ip(address), protocol: Protocol::Tcp, port };
        let (_, destinations) = self.kernel.servers.get(&key)?;
        Some(destinations.iter().map(|(address, weight)| (address.to_string(), *weight)).collect())
    }
}

fn weighted(destinations: &[(&str, u32)]) -> Option<Vec<(String, u32)>> {
    Some(destinations.iter().map(|(address, weight)| ((*address).to_owned(), *weight)).collect())
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
        ("nq", Scheduler::WeightedLeastConnection, Some(SchedulerProblem::MissingScheduler(Scheduler::NeverQueue))),
        ("fastest", Scheduler::WeightedLeastConnection, Some(SchedulerProblem::UnknownScheduler("fastest".into()))),
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
fn a_large_service_is_programmed_in_parts_between_which_others_change() {
    let mut rig = Rig::new(config());
    let port = |number| ServicePort { name: "web".into(), protocol: Protocol::Tcp, port: number, node_port: 0 };
    let large = Service { ports: (1..=200).map(port).collect(), ..service() };
    let all = (1..=60).map(|last| endpoint(&format!("10.244.1.{last}"), "node-b"));
    let plan = rig.step(std::iter::once(Change::from(large)).chain(all));
    assert!(plan.is_partial && plan.has_rest);
    let servers = |rig: &Rig| rig.kernel.servers.len();
    let first = servers(&rig);
    assert!((130..140).contains(&first), "{first} servers with 60 destinations");
    assert!(rig.ledger.any_server().is_some_and(|server| rig.kernel.servers.contains_key(&server)));

    // Another Service comes before the rest, and the rest goes on with plans without services.
    let small = Service { key: ServiceKey::new("ns", "small"), cluster_ips: vec![ip("10.96.0.9")], ..service() };
    let small = Service { external_ips: Vec::new(), load_balancer_ips: Vec::new(), ..small };
    let ports = [EndpointPort::new("web", Protocol::Tcp, 8080)].into();
    let own = Change::Endpoint(small.key.clone(), Endpoint::new(ip("10.244.1.1"), ports));
    let plan = rig.step([Change::from(small), own]);
    assert!(!plan.is_partial && plan.has_rest);
    assert_eq!(rig.destinations("10.96.0.9", 80), weighted(&[("10.244.1.1:8080", 1)]));
    let mut parts = 0;
    while rig.step([]).has_rest {
        parts += 1;
    }
    // The large Service has three addresses.
    assert_eq!((servers(&rig), (2..5).contains(&parts)), (3 * 200 + 2, true), "{parts} parts");
    let plan = rig.ledger.full(&FixedState(&rig.state, &rig.node), &rig.kernel.existing(), 0);
    assert!(plan.is_empty(), "{plan:?}");
    // Its removal takes several plans as well.
    let plan = rig.step([Change::RemoveService(service().key)]);
    assert!(plan.has_rest && servers(&rig) > 2);
    while rig.step([]).has_rest {}
    assert_eq!(rig.destinations("10.96.0.9", 80), weighted(&[("10.244.1.1:8080", 1)]));
}
