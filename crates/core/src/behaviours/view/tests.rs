#![allow(clippy::unwrap_used)]
use super::*;
use crate::{
    conventions::addresses::DialPolicy,
    model::{Change, Endpoint, EndpointPort, Placement},
    state::Dirty,
};

fn state_with(service: Service, endpoints: &[(&str, &str)]) -> (State, Arc<ServiceKey>) {
    let (mut state, mut dirty) = (State::default(), Dirty::default());
    let key = Arc::new(service.key.clone());
    let ports: Arc<[EndpointPort]> = [("web", Protocol::Tcp, 8080), ("dns", Protocol::Udp, 53)]
        .map(|(name, protocol, port)| EndpointPort::new(name, protocol, port))
        .into();
    state.apply(Change::from(service), &mut dirty);
    for (address, node) in endpoints {
        let address: IpAddr = address.parse().unwrap();
        let endpoint = Endpoint { placement: Placement::on(node).into(), ..Endpoint::new(address, Arc::clone(&ports)) };
        state.apply(Change::Endpoint((*key).clone(), endpoint), &mut dirty);
    }
    (state, key)
}

fn service(health_check: &str) -> Service {
    let port = |name: &str, protocol, port| ServicePort { name: name.into(), protocol, port, node_port: 0 };
    let ports = vec![port("web", Protocol::Tcp, 80), port("dns", Protocol::Udp, 53)];
    let addresses = ["10.96.0.1", "fd00::1"].map(|address| address.parse().unwrap());
    let mut service = Service::new(ServiceKey::new("ns", "web"), addresses.to_vec(), ports);
    service.health_check = health_check.into();
    service
}

// rows: 18
#[test]
fn row_18_external_ips_are_left_out_if_the_node_ignores_external_ips() {
    let external_ips = vec!["198.51.100.1".parse().unwrap()];
    let (state, key) = state_with(Service { external_ips, ..service("") }, &[]);
    for ignores_external_ips in [false, true] {
        let facts = NodeFacts { ignores_external_ips, ..NodeFacts::named("n") };
        let found = service_views(&state, &key, Family::V4, &facts).remove(0).external_ips;
        assert_eq!(found.is_empty(), ignores_external_ips);
    }
}

/// Returns the addresses of endpoints in order.
fn texts(found: &[Destination]) -> Vec<String> {
    found.iter().map(|endpoint| endpoint.address.to_string()).collect()
}

#[test]
fn a_port_bypasses_the_proxy_if_the_proxy_may_connect_to_no_endpoint_of_a_policy() {
    let policy = |has_proxy| {
        let dialled = DialPolicy::new(vec!["10.244.0.0/16".parse().unwrap()], ["10.244.1.1".parse().unwrap()]);
        let facts = NodeFacts::named("node-a");
        NodeFacts { dialled: Arc::new(DialPolicy { has_proxy, ..dialled }), ..facts }
    };
    let bypasses = |change: &dyn Fn(&mut Service), endpoints: &[(&str, &str)], has_proxy| {
        let mut service = service("");
        change(&mut service);
        let (state, key) = state_with(service, endpoints);
        service_views(&state, &key, Family::V4, &policy(has_proxy)).remove(0).bypasses_proxy
    };
    let (pods, own, host) = (("10.244.2.1", "node-b"), ("10.244.1.1", "node-a"), ("192.0.2.12", "node-b"));
    let plain = |_: &mut Service| {};
    assert!(bypasses(&plain, &[own], true) && bypasses(&plain, &[own, host], true));
    assert!(!bypasses(&plain, &[own, host], false), "a node without a proxy has none to bypass");
    assert!(!bypasses(&plain, &[own, host, pods], true) && !bypasses(&plain, &[], true));
    let local = |service: &mut Service| service.internal_traffic_policy = TrafficPolicy::Local;
    assert!(bypasses(&local, &[own, pods], true), "the policy Local admits only the address of the node");
    assert!(!bypasses(&local, &[pods], true), "no endpoint is on the node");
    let with_header = |service: &mut Service| service.proxy_protocol = Some(ProxyProtocol::V1);
    assert!(!bypasses(&with_header, &[own], true), "only the proxy sends headers");
}

#[test]
fn a_node_with_a_proxy_has_no_endpoints_that_are_metadata_servers() {
    let endpoints = [("168.63.129.16", "node-b"), ("10.244.2.1", "node-b")];
    for (has_proxy, addresses) in [(false, &["10.244.2.1", "168.63.129.16"][..]), (true, &["10.244.2.1"])] {
        let node = |has_proxy| {
            let dialled = Arc::new(DialPolicy { has_proxy, ..DialPolicy::default() });
            NodeFacts { dialled, ..NodeFacts::named("node-a") }
        };
        let (state, key) = state_with(service(""), &endpoints);
        let found = service_views(&state, &key, Family::V4, &node(has_proxy)).remove(0);
        assert_eq!(texts(&found.cluster_endpoints), addresses);
        let (state, key) = state_with(service(""), &endpoints[..1]);
        let found = service_views(&state, &key, Family::V4, &node(has_proxy)).remove(0);
        assert_eq!(found.outcome(TrafficPolicy::Cluster) == Outcome::Rejected, has_proxy);
    }
}
