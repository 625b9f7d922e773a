//! The endpoints that this node checks.

use std::{collections::BTreeSet, net::SocketAddr, sync::Arc};

use headgate_core::{
    Family, NodeFacts, Protocol, ServiceKey, State, endpoint_health::ServiceTargets, view::views_of_all_endpoints,
};

/// Why a Service has fewer checks than it asks for, with the remedy.
const NOT_ALLOWED: &str = "no endpoint is checked of Services with the annotation headgate.io/health-check in namespaces that --health-check-namespaces does not name: add the namespaces to the flag, or remove the annotation";
const NOT_DIALLED: &str = "the node does not check some endpoints of Services with the annotation headgate.io/health-check, because their addresses are in no range of pods, or are addresses of the node or of metadata servers: if they are pods, add their range to --pod-ranges";
const TOO_MANY: &str = "the node checks only 1,000 endpoints of a Service with the annotation headgate.io/health-check, and the others count as passing: divide the Service, or remove the annotation";
/// The maximum number of endpoints of a Service that a node checks. [`TOO_MANY`] names it.
const MAX_TARGETS: usize = 1_000;

/// The endpoints of a service that this node has to check: the TCP endpoints that it may use, and
/// that its programs may connect to. `None` if the service has no checks or no such endpoints.
/// `namespaces` are those in which services may ask for checks: names, or `*` for all. Also returns
/// why endpoints are left out. The cost depends only on the size of this service.
pub(super) fn targets(
    state: &State,
    key: &Arc<ServiceKey>,
    node: &NodeFacts,
    namespaces: &[String],
) -> (Option<ServiceTargets>, Option<&'static str>) {
    let service = state.entry(key).and_then(|entry| entry.service());
    let Some(service) = service.filter(|service| service.is_checked_by_tcp()) else { return (None, None) };
    let views = Family::BOTH.into_iter().flat_map(|family| views_of_all_endpoints(state, key, family, node));
    let endpoints = views.filter(|view| view.protocol == Protocol::Tcp).flat_map(|view| view.reachable_endpoints());
    let mut addresses: BTreeSet<SocketAddr> = endpoints.map(|endpoint| endpoint.socket_address()).collect();
    let asked = addresses.len();
    let is_allowed = namespaces.iter().any(|name| name == "*" || *name == *key.namespace);
    addresses.retain(|address| is_allowed && node.dialled.permits(address.ip()));
    let refused = if is_allowed { NOT_DIALLED } else { NOT_ALLOWED };
    let mut shortage = (addresses.len() < asked).then_some(refused);
    if let Some(first_left_out) = addresses.iter().nth(MAX_TARGETS).copied() {
        addresses.split_off(&first_left_out);
        shortage = Some(TOO_MANY);
    }
    let interval_ms = Some(service.health_check_interval_ms).filter(|interval| *interval != 0);
    ((asked > 0).then_some(ServiceTargets { interval_ms, addresses }), shortage)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use headgate_core::{
        Change, Dirty, Endpoint, EndpointPort, Placement, Service, ServicePort, TrafficPolicy, dialling::DialPolicy,
        view::service_views,
    };

    use std::net::IpAddr;

    use super::*;

    fn state_with(service: Service, endpoints: &[(&str, &str)]) -> (State, Arc<ServiceKey>) {
        let (mut state, mut dirty) = (State::default(), Dirty::default());
        let key = Arc::new(service.key.clone());
        let ports: Arc<[EndpointPort]> = [("web", Protocol::Tcp, 8080), ("dns", Protocol::Udp, 53)]
            .map(|(name, protocol, port)| EndpointPort::new(name, protocol, port))
            .into();
        state.apply(Change::from(service), &mut dirty);
        for (address, node) in endpoints {
            let address: IpAddr = address.parse().unwrap();
            let endpoint =
                Endpoint { placement: Placement::on(node).into(), ..Endpoint::new(address, Arc::clone(&ports)) };
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

    const ENDPOINTS: [(&str, &str); 4] =
        [("10.244.1.1", "node-a"), ("10.244.2.1", "node-b"), ("10.244.2.2", "node-b"), ("fd00:1::1", "node-b")];

    fn facts() -> NodeFacts {
        let ranges = ["10.244.0.0/16", "fd00:1::/64"].map(|range| range.parse().unwrap());
        let dialled = Arc::new(DialPolicy::new(ranges.to_vec(), ["10.244.2.2".parse().unwrap()]));
        NodeFacts { dialled, ..NodeFacts::named("node-a") }
    }

    #[test]
    fn a_node_checks_the_tcp_ports_that_it_uses_and_may_connect_to() {
        let node = facts();
        let targets_of = |service: Service| {
            let (state, key) = state_with(service, &ENDPOINTS);
            targets(&state, &key, &node, &["ns".to_owned()])
        };
        let texts = |addresses: &[&str]| addresses.iter().map(|text| text.parse().unwrap()).collect::<BTreeSet<_>>();
        let all = texts(&["10.244.1.1:8080", "10.244.2.1:8080", "[fd00:1::1]:8080"]);
        let expected = ServiceTargets { interval_ms: None, addresses: all };
        assert_eq!(targets_of(service("tcp")), (Some(expected), Some(NOT_DIALLED)));
        assert_eq!(targets_of(service("")), (None, None));
        assert_eq!(targets_of(service("http")), (None, None), "an unknown kind of check is ignored");
        let mut local = service("tcp");
        (local.internal_traffic_policy, local.health_check_interval_ms) = (TrafficPolicy::Local, 700);
        // Endpoints on other nodes are not checked under policy Local.
        let expected = ServiceTargets { interval_ms: Some(700), addresses: texts(&["10.244.1.1:8080"]) };
        assert_eq!(targets_of(local), (Some(expected), None));
        let none = Arc::new(ServiceKey::new("ns", "none"));
        assert_eq!(targets(&State::default(), &none, &node, &["*".to_owned()]), (None, None));
    }

    #[test]
    fn services_of_other_namespaces_and_endpoints_beyond_the_limit_are_left_out() {
        let node = facts();
        let (state, key) = state_with(service("tcp"), &ENDPOINTS);
        let count = |namespaces: &[&str]| {
            let namespaces: Vec<String> = namespaces.iter().map(|name| (*name).to_owned()).collect();
            let (found, reason) = targets(&state, &key, &node, &namespaces);
            (found.unwrap().addresses.len(), reason)
        };
        for namespaces in [&[][..], &["other"], &["ns2", "n"]] {
            assert_eq!(count(namespaces), (0, Some(NOT_ALLOWED)), "{namespaces:?}");
        }
        for namespaces in [&["*"][..], &["other", "ns"]] {
            assert_eq!(count(namespaces), (3, Some(NOT_DIALLED)), "{namespaces:?}");
        }
        let many: Vec<String> = (0..1_100).map(|last| format!("10.244.{}.{}", 3 + last / 250, last % 250)).collect();
        let many: Vec<(&str, &str)> = many.iter().map(|address| (address.as_str(), "node-b")).collect();
        let (state, key) = state_with(service("tcp"), &many);
        let (found, reason) = targets(&state, &key, &node, &["*".to_owned()]);
        assert_eq!((found.unwrap().addresses.len(), reason), (MAX_TARGETS, Some(TOO_MANY)));
    }

    #[test]
    fn endpoints_that_fail_are_still_checked() {
        let (state, key) = state_with(service("tcp"), &ENDPOINTS);
        let mut node = facts();
        let wanted = targets(&state, &key, &node, &["*".to_owned()]);
        node.failing.set(&key, ["10.244.1.1:8080".parse().unwrap()].into());
        assert_eq!(service_views(&state, &key, Family::V4, &node)[0].cluster_endpoints.len(), 2);
        assert_eq!(targets(&state, &key, &node, &["*".to_owned()]), wanted);
    }
}
