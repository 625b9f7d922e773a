#![allow(clippy::unwrap_used)]
use std::net::{IpAddr, SocketAddr, TcpStream};

use headgate_core::{
    Change, Dirty, NodeFacts, Protocol, Service, ServicePort, State, TrafficPolicy, iptables::NodePortAddresses,
};
use headgate_listener::ClosedConnections;

use super::*;
use crate::{
    observers::{Observer as _, Scope},
    tests::ReservedPort,
};

/// The kernel tests show what the ports answer; only here, a step is planned and not yet written.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ports_open_only_after_the_rules_are_in_place() {
    let node_ports_v4 = NodePortAddresses::Only(vec![IpAddr::from([127, 0, 0, 1])]);
    let (_inputs, receiver) = watch::channel(NodeInputs { node_ports_v4, ..NodeInputs::default() });
    let connections = HttpConnections::new(false, ClosedConnections::default());
    let (mut ports, server) = new(HealthCheckMetrics::default(), receiver, Arc::default(), Duration::ZERO, connections);
    let (stop, reserved) = (CancellationToken::new(), ReservedPort::reserve().unwrap());
    let running = tokio::spawn(server.run(stop.clone()));
    let http = ServicePort { name: "".into(), protocol: Protocol::Tcp, port: 80, node_port: 0 };
    let mut service = Service::new(ServiceKey::new("shop", "web"), vec!["10.96.0.1".parse().unwrap()], vec![http]);
    service.external_traffic_policy = TrafficPolicy::Local;
    service.health_check_node_port = reserved.number();
    let (mut state, mut dirty) = (State::default(), Dirty::default());
    state.apply(Change::from(service), &mut dirty);
    let node = NodeFacts::named("node-1");
    ports.plan(&state, &node, Scope::Services(&dirty.services));
    assert!(ports.sent.is_empty());
    // The step after a failed step plans the services of the failed step again.
    ports.plan(&state, &node, Scope::All);
    ports.applied();
    let address = SocketAddr::from(([127, 0, 0, 1], reserved.number()));
    let opened = tokio::time::timeout(Duration::from_secs(30), async {
        while TcpStream::connect(address).is_err() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    });
    opened.await.unwrap();
    stop.cancel();
    running.await.unwrap();
}
