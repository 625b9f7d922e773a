//! The cluster that benches run on: so many services with so many endpoints each.

use std::{net::IpAddr, sync::Arc};

use headgate_core::{
    Change, Dirty, Endpoint, EndpointPort, Placement, Protocol, Service, ServiceKey, ServicePort, State,
};

/// Key of a service by number.
#[must_use]
pub fn key(service: u32) -> ServiceKey {
    ServiceKey::new("bench", &format!("service-{service:05}"))
}

/// ClusterIP of a service by number.
#[must_use]
pub fn cluster_ip(service: u32) -> IpAddr {
    let [_, high, middle, low] = service.to_be_bytes();
    IpAddr::from([10, 96 + high, middle, low])
}

/// Address of an endpoint by number within its service; the next one after those in use is free for
/// changes.
#[must_use]
pub fn endpoint_ip(service: u32, endpoint: u32) -> IpAddr {
    let [high, middle_high, middle_low, low] = (service * 64 + endpoint).to_be_bytes();
    IpAddr::from([11 + high, middle_high, middle_low, low])
}

/// A service without its endpoints.
#[must_use]
pub fn service(number: u32) -> Service {
    let port = ServicePort { name: "http".into(), protocol: Protocol::Tcp, port: 80, node_port: 0 };
    Service::new(key(number), vec![cluster_ip(number)], vec![port])
}

/// An endpoint of a service, ready, on one of a hundred nodes in one of three zones.
#[must_use]
pub fn endpoint(service: u32, number: u32) -> Endpoint {
    let port = EndpointPort::new("http", Protocol::Tcp, 8080);
    let mut endpoint = Endpoint::new(endpoint_ip(service, number), Arc::from([port]));
    let zone = Some(format!("zone-{}", (service + number) % 3).into());
    let node = format!("node-{:03}", (service + number) % 100);
    endpoint.placement = Placement { zone, ..Placement::on(&node) }.into();
    endpoint
}

/// All changes that build the cluster, grouped by service.
pub fn changes(services: u32, endpoints: u32) -> impl Iterator<Item = Change> {
    (0..services).flat_map(move |i| {
        let of_service = (0..endpoints).map(move |j| Change::Endpoint(key(i), endpoint(i, j)));
        std::iter::once(Change::from(service(i))).chain(of_service)
    })
}

/// The cluster as a state.
#[must_use]
pub fn state(services: u32, endpoints: u32) -> State {
    let mut state = State::default();
    for change in changes(services, endpoints) {
        state.apply(change, &mut Dirty::default());
    }
    state
}
