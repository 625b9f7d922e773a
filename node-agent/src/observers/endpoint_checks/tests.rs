#![allow(clippy::unwrap_used)]
use std::{
    collections::BTreeSet,
    net::{SocketAddr, TcpListener},
};

use headgate_core::{
    Change, Endpoint, EndpointPort, NodeFacts, Protocol, Service, ServicePort, addresses::DialPolicy,
    endpoint_health::CheckTiming,
};
use tokio_util::sync::DropGuard;

use super::*;
use crate::{
    observers::{Observer as _, Scope},
    testing::{snapshot, update},
    tests::ReservedPort,
};

/// Longest time that a test waits before it fails.
const GUARD: Duration = Duration::from_secs(30);

struct World {
    shared: Arc<AgentState>,
    metrics: EndpointCheckMetrics,
    follower: Follower<Targets>,
    version: u64,
    _stop: DropGuard,
}

impl World {
    fn start() -> Self {
        let (shared, metrics) = (Arc::new(AgentState::new("node-1")), EndpointCheckMetrics::default());
        let timing = CheckTiming { interval_ms: 800, timeout_ms: 1000 };
        // The listeners of these tests have loopback addresses, which no node dials.
        let ranges = ["127.0.0.0/8", "::1/128"].map(|range| range.parse().unwrap()).into();
        shared.set_dialled(Arc::new(DialPolicy { ranges, ..DialPolicy::default() }));
        let (follower, checker) = new(vec!["ns".to_owned()], timing, Arc::clone(&shared), metrics.clone());
        let stop = CancellationToken::new();
        tokio::spawn(checker.run(stop.clone()));
        Self { shared, metrics, follower, version: 0, _stop: stop.drop_guard() }
    }

    /// Applies changes to the state and programs them.
    fn step(&mut self, changes: impl IntoIterator<Item = Change>) {
        self.receive(changes);
        let Self { shared, follower, .. } = self;
        shared.with_facts(|state, node: &NodeFacts| follower.plan(state, node, Scope::All));
        follower.applied();
    }

    /// Applies changes to the state without programming them.
    fn receive(&mut self, changes: impl IntoIterator<Item = Change>) {
        self.version += 1;
        let message = if self.version == 1 { snapshot } else { update };
        self.shared.apply(message(self.version, changes.into_iter().collect()));
    }

    fn failing(&self) -> BTreeSet<SocketAddr> {
        self.shared.with_facts(|_, node| node.failing.of(&key()).clone())
    }

    async fn expect(&self, failing: &[SocketAddr]) {
        let wanted: BTreeSet<SocketAddr> = failing.iter().copied().collect();
        self.wait(|world| world.failing() == wanted, &format!("{wanted:?} fail")).await;
    }

    async fn wait(&self, is_so: impl Fn(&Self) -> bool, what: &str) {
        let begun = Instant::now();
        while !is_so(self) {
            assert!(begun.elapsed() < GUARD, "not within {GUARD:?}: {what}; {:?} fail", self.failing());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

fn key() -> ServiceKey {
    ServiceKey::new("ns", "web")
}

fn service(health_check: &str) -> Change {
    let port = ServicePort { name: "web".into(), protocol: Protocol::Tcp, port: 80, node_port: 0 };
    let addresses = ["10.96.0.1", "fd00::1"].map(|address| address.parse().unwrap());
    let service = Service::new(key(), addresses.to_vec(), vec![port]);
    Change::from(Service { health_check: health_check.into(), ..service })
}

fn endpoint(address: SocketAddr) -> Change {
    let port = EndpointPort::new("web", Protocol::Tcp, address.port());
    Change::Endpoint(key(), Endpoint::new(address.ip(), [port].into()))
}

/// Opens a listening socket. The kernel accepts its connections.
fn listen(on: &str) -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind(on).unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

#[tokio::test]
async fn failing_endpoints_are_kept_when_a_service_is_recreated_at_once_and_dropped_when_it_is_deleted() {
    let mut world = World::start();
    // The endpoints need different addresses.
    let (_listener, good) = listen("127.0.0.2:0");
    let refusing = ReservedPort::reserve().unwrap();
    let bad = refusing.address();
    let all = || [service("tcp"), endpoint(good), endpoint(bad)];
    let none = || {
        let endpoints = [good, bad].map(|address| Change::RemoveEndpoint(key(), address.ip()));
        [Change::RemoveService(key())].into_iter().chain(endpoints)
    };
    world.step(all());
    world.expect(&[bad]).await;
    // The removal and the new service are programmed in one step, so the checker sees no change.
    world.receive(none());
    world.step(all());
    assert_eq!(world.failing(), [bad].into());
    world.step(none());
    world.wait(|world| world.shared.with_facts(|_, node| node.failing.is_empty()), "no failing endpoint is left").await;
    assert_eq!(world.shared.with_state(|state| state.entries().count()), 0);
    assert_eq!(world.metrics.failing.get(), 0);
}

#[tokio::test]
async fn the_log_gets_a_few_lines_about_each_namespace_in_a_minute() {
    let (shared, metrics) = (Arc::new(AgentState::new("node-1")), EndpointCheckMetrics::default());
    let (_follower, mut checker) = new(Vec::new(), CheckTiming::default(), shared, metrics);
    let now = Instant::now().into();
    let mut count = |namespace: &str| (0..50).filter(|_| checker.lines.take(namespace.to_owned(), now).is_ok()).count();
    assert_eq!((count("hostile"), count("honest")), (10, 10));
}

#[tokio::test]
async fn the_agent_names_services_with_fewer_checks_until_they_are_gone() {
    let mut world = World::start();
    let (_listener, good) = listen("127.0.0.1:0");
    let foreign = "10.244.1.1:80".parse().unwrap();
    world.step([service("tcp"), endpoint(good), endpoint(foreign)]);
    let names = |world: &World| world.shared.unchecked().into_values().flatten().eq([Arc::new(key())]);
    world.wait(names, "the Service is named").await;
    world.step([Change::RemoveService(key())]);
    world.wait(|world| world.shared.unchecked().is_empty(), "no Service is named").await;
}

#[test]
fn local_errors_do_not_count_as_failed_checks() {
    for code in [libc::EMFILE, libc::EADDRNOTAVAIL, libc::ENOBUFS] {
        assert!(is_local_error(&io::Error::from_raw_os_error(code)));
    }
    for error in [io::ErrorKind::TimedOut.into(), io::Error::from_raw_os_error(libc::ECONNREFUSED)] {
        assert!(!is_local_error(&error));
    }
}
