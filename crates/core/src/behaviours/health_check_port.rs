//! The health-check node port. On this port, an external load balancer checks whether the node has
//! local endpoints of a service.
//!
//! A service with `externalTrafficPolicy: Local` and type `LoadBalancer` has a health-check node
//! port. The node answers requests to this port with the number of addresses that have a ready port
//! on this node. Terminating endpoints do not count, even while they receive traffic, so that the
//! load balancer switches to other nodes before the endpoints stop. Each family has a separate
//! count. The family of the request selects the count.

use crate::{
    model::{Family, PortState, ServiceKey},
    node_facts::NodeFacts,
    state::State,
};

/// A health-check node port with the counts that it reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HealthCheckPort {
    /// TCP port on the node.
    pub port: u16,
    /// Number of local ready endpoints of each family, IPv4 first; `None` if the service has no
    /// ClusterIP of the family.
    pub local_endpoints: [Option<u32>; 2],
}

/// Returns the health-check node port of a service on this node, or `None` if the service has no
/// such port or is unknown. The cost is linear in the size of the service.
#[must_use]
pub fn health_check_port(state: &State, key: &ServiceKey, node: &NodeFacts) -> Option<HealthCheckPort> {
    let entry = state.entry(key)?;
    let service = entry.service()?;
    if service.health_check_node_port == 0 || !service.external_traffic_policy.is_local() {
        return None;
    }
    let count = |family: Family| {
        service.cluster_ip(family)?;
        let is_local = |name: &str| name == &*node.name;
        let local = entry.endpoints().values().filter(|endpoint| {
            let is_counted = |state: PortState<'_>| {
                let placement = state.placement;
                state.conditions.ready && !placement.weight.is_zero() && placement.node.as_deref().is_some_and(is_local)
            };
            Family::of(endpoint.address) == family && endpoint.port_states().any(is_counted)
        });
        u32::try_from(local.count()).ok()
    };
    Some(HealthCheckPort { port: service.health_check_node_port, local_endpoints: Family::BOTH.map(count) })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::{net::IpAddr, sync::Arc};

    use super::*;
    use crate::model::{
        Change, Conditions, Endpoint, EndpointPort, Placement, Protocol, Service, ServicePort, TrafficPolicy,
    };
    use crate::state::Dirty;

    fn key() -> ServiceKey {
        ServiceKey::new("shop", "web")
    }

    fn service() -> Service {
        let port = ServicePort { name: "".into(), protocol: Protocol::Tcp, port: 80, node_port: 30080 };
        let cluster_ips = vec!["10.96.0.1".parse().unwrap(), "fd00:96::1".parse().unwrap()];
        let mut service = Service::new(key(), cluster_ips, vec![port]);
        service.external_traffic_policy = TrafficPolicy::Local;
        service.health_check_node_port = 32000;
        service
    }

    fn endpoint(address: &str, node: &str, conditions: Conditions) -> Endpoint {
        let port = |port| EndpointPort::new("", Protocol::Tcp, port);
        let mut endpoint =
            Endpoint::new(address.parse::<IpAddr>().unwrap(), Arc::from([port(8080), port(8081), port(8082)]));
        endpoint.placement = Placement::on(node).into();
        endpoint.conditions = conditions;
        endpoint
    }

    fn found(service: Service, endpoints: Vec<Endpoint>) -> Option<HealthCheckPort> {
        let mut state = State::default();
        state.apply(Change::from(service), &mut Dirty::default());
        for endpoint in endpoints {
            state.apply(Change::Endpoint(key(), endpoint), &mut Dirty::default());
        }
        health_check_port(&state, &key(), &NodeFacts::named("node-1"))
    }

    #[test]
    fn each_address_counts_once_and_in_its_own_family_if_it_is_ready() {
        let ready = Conditions::READY;
        let of = |ready, serving, terminating| Conditions { ready, serving, terminating };
        let endpoints = vec![
            endpoint("10.244.2.1", "node-1", of(false, true, true)),
            endpoint("10.244.2.2", "node-1", of(false, false, false)),
            endpoint("10.244.2.3", "node-1", of(true, false, false)),
            endpoint("10.244.0.1", "node-1", ready),
            endpoint("10.244.0.2", "node-1", ready),
            endpoint("10.244.1.1", "node-2", ready),
            endpoint("fd00:244::1", "node-1", ready),
        ];
        let found = found(service(), endpoints).unwrap();
        assert_eq!((found.port, found.local_endpoints), (32000, [Some(3), Some(1)]));
    }

    #[test]
    fn an_address_counts_if_one_of_its_ports_is_ready_on_this_node() {
        let ready = Conditions::READY;
        let not_ready = Conditions { ready: false, serving: false, terminating: false };
        let two_ports = |first, second, nodes: [&str; 2]| {
            let mut endpoint = endpoint("10.244.0.1", nodes[0], first);
            let mut ports = endpoint.ports.to_vec();
            ports[1].conditions = Some(second);
            ports[1].placement = Some(Placement::on(nodes[1]).into());
            ports.truncate(2);
            endpoint.ports = ports.into();
            found(service(), vec![endpoint]).unwrap().local_endpoints[0]
        };
        assert_eq!(two_ports(not_ready, ready, ["node-1", "node-1"]), Some(1));
        assert_eq!(two_ports(ready, ready, ["node-1", "node-1"]), Some(1));
        assert_eq!(two_ports(not_ready, not_ready, ["node-1", "node-1"]), Some(0));
        assert_eq!(two_ports(not_ready, ready, ["node-1", "node-2"]), Some(0));
        assert_eq!(two_ports(ready, not_ready, ["node-2", "node-1"]), Some(0));
    }

    #[test]
    fn only_services_with_local_policy_have_a_health_check_port() {
        let cluster = Service { external_traffic_policy: TrafficPolicy::Cluster, ..service() };
        assert_eq!(found(cluster, Vec::new()), None);
        assert_eq!(found(Service { health_check_node_port: 0, ..service() }, Vec::new()), None);
        let mut single = service();
        single.cluster_ips.truncate(1);
        let found = found(single, vec![endpoint("fd00:244::1", "node-1", Conditions::READY)]).unwrap();
        assert_eq!(found.local_endpoints, [Some(0), None]);
    }
}
