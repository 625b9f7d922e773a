//! The endpoints that this node checks.

use std::{collections::BTreeSet, net::SocketAddr, sync::Arc};

use headgate_core::{
    Family, NodeFacts, Protocol, ServiceKey, State, endpoint_health::ServiceTargets, view::views_of_all_endpoints,
};

/// The endpoints of a service that this node has to check: the TCP endpoints that the node may use.
/// `None` if the service has no checks or no such endpoints. The cost depends only on the size of
/// this service.
pub(super) fn targets(state: &State, key: &Arc<ServiceKey>, node: &NodeFacts) -> Option<ServiceTargets> {
    let service = state.entry(key)?.service().filter(|service| service.is_checked_by_tcp())?;
    let views = Family::BOTH.into_iter().flat_map(|family| views_of_all_endpoints(state, key, family, node));
    let endpoints = views.filter(|view| view.protocol == Protocol::Tcp).flat_map(|view| view.reachable_endpoints());
    let addresses: BTreeSet<SocketAddr> = endpoints.map(|endpoint| endpoint.socket_address()).collect();
    let interval_ms = Some(service.health_check_interval_ms).filter(|interval| *interval != 0);
    (!addresses.is_empty()).then_some(ServiceTargets { interval_ms, addresses })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use headgate_core::{
        Change, Dirty, Endpoint, EndpointPort, Placement, Service, ServicePort, TrafficPolicy, view::service_views,
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

    #[test]
    fn a_node_checks_the_tcp_ports_that_it_uses() {
        let node = NodeFacts::named("node-a");
        let targets_of = |service: Service| {
            let (state, key) = state_with(service, &ENDPOINTS);
            targets(&state, &key, &node)
        };
        let texts = |addresses: &[&str]| addresses.iter().map(|text| text.parse().unwrap()).collect::<BTreeSet<_>>();
        let all = texts(&["10.244.1.1:8080", "10.244.2.1:8080", "10.244.2.2:8080", "[fd00:1::1]:8080"]);
        assert_eq!(targets_of(service("tcp")), Some(ServiceTargets { interval_ms: None, addresses: all }));
        assert_eq!(targets_of(service("")), None);
        assert_eq!(targets_of(service("http")), None, "an unknown kind of check is ignored");
        let mut local = service("tcp");
        (local.internal_traffic_policy, local.health_check_interval_ms) = (TrafficPolicy::Local, 700);
        // Endpoints on other nodes are not checked under policy Local.
        let expected = ServiceTargets { interval_ms: Some(700), addresses: texts(&["10.244.1.1:8080"]) };
        assert_eq!(targets_of(local), Some(expected));
        assert_eq!(targets(&State::default(), &Arc::new(ServiceKey::new("ns", "none")), &node), None);
    }

    #[test]
    fn endpoints_that_fail_are_still_checked() {
        let (state, key) = state_with(service("tcp"), &ENDPOINTS);
        let mut node = NodeFacts::named("node-a");
        let wanted = targets(&state, &key, &node);
        node.failing.set(&key, ["10.244.1.1:8080".parse().unwrap()].into());
        assert_eq!(service_views(&state, &key, Family::V4, &node)[0].cluster_endpoints.len(), 2);
        assert_eq!(targets(&state, &key, &node), wanted);
    }
}
