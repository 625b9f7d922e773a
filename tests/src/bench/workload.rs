//! The cluster of the benches: a number of Services with a number of endpoints each.

use std::{net::IpAddr, sync::Arc};

use headgate_core::{
    Change, Dirty, Endpoint, EndpointPort, Placement, Protocol, Service, ServiceKey, ServicePort, State,
    explain::{Mode, NodeSettings},
    iptables::NodePortAddresses,
    view::{LocalDetector, MasqueradeConfig},
};
use ipnet::{IpNet, Ipv4Net};

/// The key of a Service, from its number.
#[must_use]
pub fn key(service: u32) -> ServiceKey {
    ServiceKey::new("bench", &format!("service-{service:05}"))
}

/// The ClusterIP of a Service, from its number.
#[must_use]
pub fn cluster_ip(service: u32) -> IpAddr {
    let [_, high, middle, low] = service.to_be_bytes();
    IpAddr::from([10, 96 + high, middle, low])
}

/// The address of an endpoint, from the number of its Service and its number within the Service.
/// Benches use the next free number for endpoints that they add.
#[must_use]
pub fn endpoint_ip(service: u32, endpoint: u32) -> IpAddr {
    let [high, middle_high, middle_low, low] = (service * 64 + endpoint).to_be_bytes();
    IpAddr::from([11 + high, middle_high, middle_low, low])
}

/// A Service without its endpoints.
#[must_use]
pub fn service(number: u32) -> Service {
    let port = ServicePort { name: "http".into(), protocol: Protocol::Tcp, port: 80, node_port: 0 };
    Service::new(key(number), vec![cluster_ip(number)], vec![port])
}

/// A ready endpoint of a Service, on one of 100 nodes in one of three zones.
#[must_use]
pub fn endpoint(service: u32, number: u32) -> Endpoint {
    let port = EndpointPort::new("http", Protocol::Tcp, 8080);
    let mut endpoint = Endpoint::new(endpoint_ip(service, number), Arc::from([port]));
    let zone = Some(format!("zone-{}", (service + number) % 3).into());
    let node = format!("node-{:03}", (service + number) % 100);
    endpoint.placement = Placement { zone, ..Placement::on(&node) }.into();
    endpoint
}

/// All changes that create the cluster, grouped by Service.
pub fn changes(services: u32, endpoints: u32) -> impl Iterator<Item = Change> {
    (0..services).flat_map(move |i| {
        let of_service = (0..endpoints).map(move |j| Change::Endpoint(key(i), endpoint(i, j)));
        std::iter::once(Change::from(service(i))).chain(of_service)
    })
}

/// The state of the complete cluster.
#[must_use]
pub fn state(services: u32, endpoints: u32) -> State {
    let mut state = State::default();
    for change in changes(services, endpoints) {
        state.apply(change, &mut Dirty::default());
    }
    state
}

/// How rules recognise pods of the node: by the range of the endpoints.
#[must_use]
pub fn masquerade() -> MasqueradeConfig {
    let range = IpNet::V4(Ipv4Net::new_assert([11, 0, 0, 0].into(), 8));
    MasqueradeConfig { detector_v4: Some(LocalDetector::Cidr(range)), ..MasqueradeConfig::default() }
}

/// The settings of a node with [`masquerade`].
#[must_use]
pub fn settings(mode: Mode) -> NodeSettings {
    NodeSettings {
        mode,
        masquerade: masquerade(),
        node_ports_v4: NodePortAddresses::All,
        node_ports_v6: NodePortAddresses::All,
        localhost_node_ports: false,
    }
}
