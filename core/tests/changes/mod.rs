//! Changes to replay: any services, endpoints and removals, among few names and addresses, so that they meet.

use std::{collections::BTreeSet, net::IpAddr, sync::Arc};

use headgate_core::{
    Change, ClientIpAffinity, Conditions, Endpoint, EndpointPort, Hints, Protocol, Service, ServiceKey, ServicePort,
    TrafficPolicy, view::NodeFacts,
};
use proptest::prelude::*;

pub(crate) fn node() -> NodeFacts {
    NodeFacts { zone: Some("z1".into()), addresses: vec!["192.0.2.1".parse().unwrap()], ..NodeFacts::named("n1") }
}

fn key(i: u8) -> ServiceKey {
    ServiceKey::new("ns", &format!("svc{i}"))
}

prop_compose! {
    pub(crate) fn any_service(services: u8)(
        i in 0..services, shared in any::<bool>(), external in any::<bool>(), vip in any::<bool>(), node_port in any::<bool>(),
        internal_local in any::<bool>(), external_local in any::<bool>(), affinity in any::<bool>(), ranges in any::<bool>(),
        udp in any::<bool>(), created in 0i64..3, second_port in any::<bool>(),
    ) -> Service {
        let protocol = if udp { Protocol::Udp } else { Protocol::Tcp };
        // Several services claim the same externalIP and NodePort.
        let mut ports = vec![ServicePort { name: "a".into(), protocol, port: 80, node_port: if node_port { 30000 + u16::from(i % 3) } else { 0 } }];
        if second_port {
            ports.push(ServicePort { name: "b".into(), protocol: Protocol::Tcp, port: 81, node_port: 0 });
        }
        let cluster_ips = vec![IpAddr::from([10, 96, i, 1]), format!("fd00:96::{i:x}").parse().unwrap()];
        let mut service = Service::new(key(i), cluster_ips, ports);
        if external {
            service.external_ips.push(IpAddr::from([192, 0, 2, if shared { 100 } else { 100 + i }]));
        }
        if vip {
            service.load_balancer_ips.push(IpAddr::from([203, 0, 113, i]));
        }
        if internal_local { service.internal_traffic_policy = TrafficPolicy::Local; }
        if external_local { service.external_traffic_policy = TrafficPolicy::Local; service.health_check_node_port = 31000 + u16::from(i); }
        service.session_affinity = affinity.then_some(ClientIpAffinity { timeout_seconds: 10 });
        if ranges { service.load_balancer_source_ranges.push("198.51.100.0/24".parse().unwrap()); }
        service.created_unix_seconds = created;
        service
    }
}

prop_compose! {
    pub(crate) fn any_endpoint(services: u8)(
        i in 0..services, address in 0u8..6, v6 in any::<bool>(), state in 0u8..4, node in 0u8..3, hint in 0u8..3, ports in 0u8..4,
    ) -> (ServiceKey, Endpoint) {
        let address: IpAddr = if v6 { format!("fd00:244::{address:x}").parse().unwrap() } else { IpAddr::from([10, 244, 0, address]) };
        let port = |name: &str, number| EndpointPort { name: name.into(), protocol: Protocol::Tcp, port: number };
        let ports: Vec<EndpointPort> = match ports {
            0 => vec![port("a", 8080)],
            1 => vec![port("a", 8080), port("b", 8081)],
            2 => vec![port("a", 8080), port("a", 9090)],
            _ => vec![EndpointPort { protocol: Protocol::Udp, ..port("a", 53) }],
        };
        let mut endpoint = Endpoint::new(address, Arc::from(ports));
        endpoint.conditions = Conditions { ready: state < 2, serving: state < 3, terminating: state == 2 };
        endpoint.node = (node > 0).then(|| format!("n{node}").into());
        endpoint.hints = (hint > 0).then(|| Arc::new(Hints { zones: vec![format!("z{hint}").into()], nodes: Vec::new() }));
        (key(i), endpoint)
    }
}

pub(crate) fn any_change(services: u8) -> impl Strategy<Value = Change> {
    prop_oneof![
        3 => any_service(services).prop_map(Change::Service),
        6 => any_endpoint(services).prop_map(|(key, endpoint)| Change::Endpoint(key, endpoint)),
        1 => (0..services).prop_map(|i| Change::RemoveService(key(i))),
        3 => any_endpoint(services).prop_map(|(key, endpoint)| Change::RemoveEndpoint(key, endpoint.address)),
    ]
}

/// The identity of what a change is about.
fn subject(change: &Change) -> (ServiceKey, Option<IpAddr>) {
    match change {
        Change::Service(service) => (service.key.clone(), None),
        Change::RemoveService(key) => (key.clone(), None),
        Change::Endpoint(key, endpoint) => (key.clone(), Some(endpoint.address)),
        Change::RemoveEndpoint(key, address) => (key.clone(), Some(*address)),
        Change::ServiceCidr(_) | Change::RemoveServiceCidr(_) => unreachable!("not generated"),
    }
}

/// Only the last change of each subject.
pub(crate) fn squash(changes: &[Change]) -> Vec<Change> {
    let mut seen = BTreeSet::new();
    let mut squashed: Vec<Change> =
        changes.iter().rev().filter(|change| seen.insert(subject(change))).cloned().collect();
    squashed.reverse();
    squashed
}
