#![allow(clippy::unwrap_used)]
use std::{
    io::{Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    time::Instant,
};

use headgate_core::{
    Change, Dirty, Endpoint, EndpointPort, NodeFacts, Placement, Protocol, Service, ServiceKey, ServicePort, State,
    TrafficPolicy, iptables::NodePortAddresses,
};
use headgate_listener::ClosedConnections;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::*;
use crate::{
    observers::{Observer as _, Scope},
    tests::ReservedPort,
};

/// Longest time that a test waits before it fails.
const GUARD: Duration = Duration::from_secs(30);

/// A health-check server on 127.0.0.1, and a state. The kernel accepts the rules of every step.
struct World {
    state: State,
    ports: HealthCheckPorts,
    backlog: Arc<Backlog>,
    metrics: HealthCheckMetrics,
    inputs: watch::Sender<NodeInputs>,
    _stop: DropGuard,
}

impl World {
    fn start() -> Self {
        let inputs = NodeInputs { node_ports_v4: only(&["127.0.0.1"]), ..NodeInputs::default() };
        let (inputs, receiver) = watch::channel(inputs);
        let (metrics, backlog) = (HealthCheckMetrics::default(), Arc::<Backlog>::default());
        let connections = HttpConnections::new(false, ClosedConnections::default());
        let (ports, server) = new(metrics.clone(), receiver, Arc::clone(&backlog), Duration::ZERO, connections);
        let stop = CancellationToken::new();
        tokio::spawn(server.run(stop.clone()));
        Self { state: State::default(), ports, backlog, metrics, inputs, _stop: stop.drop_guard() }
    }

    fn plan(&mut self, changes: impl IntoIterator<Item = Change>) {
        let mut dirty = Dirty::default();
        changes.into_iter().for_each(|change| _ = self.state.apply(change, &mut dirty));
        let node = NodeFacts::named("node-1");
        self.ports.plan(&self.state, &node, Scope::Services(&dirty.services));
    }

    fn step(&mut self, changes: impl IntoIterator<Item = Change>) {
        self.plan(changes);
        self.ports.applied();
    }
}

fn key(name: &str) -> ServiceKey {
    ServiceKey::new("shop", name)
}

fn service(name: &str, port: u16) -> Change {
    let http = ServicePort { name: "".into(), protocol: Protocol::Tcp, port: 80, node_port: 0 };
    let mut service = Service::new(key(name), vec!["10.96.0.1".parse().unwrap()], vec![http]);
    service.external_traffic_policy = TrafficPolicy::Local;
    service.health_check_node_port = port;
    Change::from(service)
}

fn endpoint(name: &str, last: u8) -> Change {
    let port = EndpointPort::new("", Protocol::Tcp, 8080);
    let mut endpoint = Endpoint::new(IpAddr::from([10, 244, 0, last]), [port].into());
    endpoint.placement = Placement::on("node-1").into();
    Change::Endpoint(key(name), endpoint)
}

fn only(addresses: &[&str]) -> NodePortAddresses {
    NodePortAddresses::Only(addresses.iter().map(|address| address.parse().unwrap()).collect())
}

/// The status line and the body of the answer; `None` if nothing listens at the port.
fn get(port: u16) -> Option<(String, serde_json::Value)> {
    let mut stream = TcpStream::connect(SocketAddr::from(([127, 0, 0, 1], port))).ok()?;
    stream.write_all(b"GET /any/path HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n").ok()?;
    let mut response = String::new();
    stream.read_to_string(&mut response).ok()?;
    let (head, body) = response.split_once("\r\n\r\n")?;
    Some((head.lines().next()?.to_owned(), serde_json::from_str(body).ok()?))
}

async fn eventually(mut test: impl FnMut() -> bool + Send + 'static) {
    let deadline = Instant::now() + GUARD;
    let reached = tokio::task::spawn_blocking(move || {
        while !test() {
            if Instant::now() > deadline {
                return false;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        true
    });
    assert!(reached.await.unwrap());
}

async fn answers(port: u16, name: &'static str, status: &'static str, endpoints: u32) {
    eventually(move || {
        get(port).is_some_and(|(line, body)| {
            line.contains(status) && body["service"]["name"] == name && body["localEndpoints"] == endpoints
        })
    })
    .await;
}

// rows: 67
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_contain_the_local_endpoints_and_the_health_of_the_proxy() {
    let (mut world, reserved) = (World::start(), ReservedPort::reserve().unwrap());
    let port = reserved.number();
    world.step([service("web", port)]);
    answers(port, "web", "503", 0).await;
    world.step([endpoint("web", 1), endpoint("web", 2)]);
    answers(port, "web", "200", 2).await;
    world.backlog.queue_other();
    answers(port, "web", "503", 2).await;
    assert_eq!(get(port).unwrap().1["serviceProxyHealthy"], false);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_service_can_get_the_port_that_another_service_releases_in_the_same_step() {
    let (mut world, reserved) = (World::start(), [ReservedPort::reserve().unwrap(), ReservedPort::reserve().unwrap()]);
    let [first, second] = reserved.each_ref().map(ReservedPort::number);
    world.step([service("web", first)]);
    answers(first, "web", "503", 0).await;
    // In one step, "web" moves to another port and "api" gets the port that "web" had. The server
    // processes "api" before "web".
    world.step([service("web", second), service("api", first)]);
    answers(first, "api", "503", 0).await;
    answers(second, "web", "503", 0).await;
    assert_eq!(world.metrics.bind_failures.get(), 0);
    world.step([service("api", 0), Change::RemoveService(key("web"))]);
    eventually(move || get(first).is_none() && get(second).is_none()).await;
    assert!(world.ports.sent.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_port_in_use_is_counted_and_tried_again() {
    let mut world = World::start();
    let reserved = [ReservedPort::reserve().unwrap(), ReservedPort::reserve().unwrap()];
    let [port, other] = reserved.each_ref().map(ReservedPort::number);
    let taken = TcpListener::bind(("127.0.0.1", port)).unwrap();
    world.step([service("web", port), service("api", other)]);
    answers(other, "api", "503", 0).await;
    let failures = world.metrics.bind_failures.clone();
    eventually(move || failures.get() > 0).await;
    drop(taken);
    // A change of any service triggers another attempt.
    world.step([endpoint("api", 1)]);
    answers(port, "web", "503", 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ports_open_only_after_the_rules_are_in_place() {
    let (mut world, reserved) = (World::start(), ReservedPort::reserve().unwrap());
    let port = reserved.number();
    world.plan([service("web", port)]);
    assert!(world.ports.sent.is_empty());
    world.plan([service("web", port), endpoint("web", 1)]);
    // The step after a failed step plans the services of the failed step again.
    let node = NodeFacts::named("node-1");
    world.ports.plan(&world.state, &node, Scope::All);
    world.ports.applied();
    answers(port, "web", "200", 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sockets_follow_the_nodes_addresses() {
    let (mut world, reserved) = (World::start(), ReservedPort::reserve().unwrap());
    let port = reserved.number();
    world.step([service("web", port)]);
    answers(port, "web", "503", 0).await;
    world.inputs.send_replace(NodeInputs { node_ports_v4: only(&["127.0.0.2"]), ..NodeInputs::default() });
    world.step([endpoint("web", 1)]);
    eventually(move || get(port).is_none() && TcpStream::connect(SocketAddr::from(([127, 0, 0, 2], port))).is_ok())
        .await;
}
