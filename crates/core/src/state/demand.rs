//! The numbers of Services that use a feature. A node that lacks a feature reports itself as
//! degraded only if at least one Service uses the feature.

use crate::model::{Family, LoadBalancing, Protocol, Service};

/// Numbers of Services with a ClusterIP of one family, by feature.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FamilyDemand {
    /// Services that have a ClusterIP of the family.
    pub services: usize,
    /// Services of the family that have a NodePort.
    pub with_node_ports: usize,
    /// Services of the family that have an SCTP port.
    pub with_sctp: usize,
    /// Services of the family whose endpoints expect the PROXY protocol.
    pub with_proxy_protocol: usize,
    /// Services of the family that limit their connections.
    pub with_max_connections: usize,
    /// Services of the family that select each algorithm of [`LoadBalancing::ALL`]. The last number
    /// counts Services that select an unknown algorithm.
    load_balancing: [usize; LoadBalancing::ALL.len() + 1],
}

impl FamilyDemand {
    /// Returns the number of Services that select an algorithm; `None` stands for all algorithms
    /// that this program does not know.
    #[must_use]
    pub fn with_load_balancing(&self, algorithm: Option<LoadBalancing>) -> usize {
        self.load_balancing[index(algorithm)]
    }
}

fn index(algorithm: Option<LoadBalancing>) -> usize {
    algorithm.map_or(LoadBalancing::ALL.len(), |algorithm| algorithm as usize)
}

/// The numbers for both families. The cost of counting a Service is linear in its ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Demand([FamilyDemand; 2]);

impl Demand {
    /// Returns the numbers for a family.
    #[must_use]
    pub fn of(&self, family: Family) -> FamilyDemand {
        self.0[family as usize]
    }

    pub(crate) fn add(&mut self, service: &Service) {
        self.count(service, |number| *number += 1);
    }

    pub(crate) fn subtract(&mut self, service: &Service) {
        self.count(service, |number| *number -= 1);
    }

    fn count(&mut self, service: &Service, count: impl Fn(&mut usize)) {
        let has_node_ports = service.ports.iter().any(|port| port.node_port != 0);
        let has_sctp = service.ports.iter().any(|port| port.protocol == Protocol::Sctp);
        for address in &service.cluster_ips {
            let demand = &mut self.0[Family::of(*address) as usize];
            let features = [
                (true, &mut demand.services),
                (has_node_ports, &mut demand.with_node_ports),
                (has_sctp, &mut demand.with_sctp),
                (service.proxy_protocol.is_some(), &mut demand.with_proxy_protocol),
                (service.max_connections != 0, &mut demand.with_max_connections),
            ];
            features.into_iter().filter(|(is_used, _)| *is_used).for_each(|(_, number)| count(number));
            if !service.load_balancing.is_empty() {
                count(&mut demand.load_balancing[index(LoadBalancing::parse(&service.load_balancing))]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Change, Dirty, ServiceKey, ServicePort, State};

    fn service(cluster_ips: &[[u8; 4]], node_port: u16, protocol: Protocol) -> Change {
        let port = ServicePort { name: "".into(), protocol, port: 80, node_port };
        let v4 = cluster_ips.iter().map(|address| (*address).into());
        let addresses = v4.chain([[0xfd00, 0, 0, 0, 0, 0, 0, 1].into()]).collect();
        Service::new(ServiceKey::new("a", "b"), addresses, vec![port]).into()
    }

    #[test]
    fn demand_is_correct_after_services_are_added_changed_and_removed() {
        let mut state = State::default();
        let counts = |state: &State| {
            Family::BOTH.map(|family| {
                let FamilyDemand { services, with_node_ports, with_sctp, .. } = state.demand().of(family);
                [services, with_node_ports, with_sctp]
            })
        };
        let mut after = |change: Change| {
            state.apply(change, &mut Dirty::default());
            counts(&state)
        };
        assert_eq!(after(service(&[[10, 0, 0, 1]], 30_000, Protocol::Tcp)), [[1, 1, 0], [1, 1, 0]]);
        assert_eq!(after(service(&[[10, 0, 0, 1]], 30_000, Protocol::Tcp)), [[1, 1, 0], [1, 1, 0]], "an equal Service");
        assert_eq!(after(service(&[], 0, Protocol::Sctp)), [[0, 0, 0], [1, 0, 1]]);
        assert_eq!(after(Change::RemoveService(ServiceKey::new("a", "b"))), [[0, 0, 0], [0, 0, 0]]);
        assert_eq!(state.demand(), &Demand::default());
    }

    #[test]
    fn services_are_counted_by_the_algorithm_that_they_ask_for() {
        let mut state = State::default();
        for (name, algorithm) in [("a", "random"), ("b", "consistent-hash"), ("c", "fastest"), ("d", "")] {
            let key = ServiceKey::new("a", name);
            let port = ServicePort { name: "".into(), protocol: Protocol::Tcp, port: 80, node_port: 0 };
            let mut service = Service::new(key, vec![[10, 0, 0, 1].into()], vec![port]);
            service.load_balancing = algorithm.into();
            state.apply(service.into(), &mut Dirty::default());
        }
        let algorithms = LoadBalancing::ALL.map(Some).into_iter().chain([None]);
        let counts = algorithms.map(|algorithm| state.demand().of(Family::V4).with_load_balancing(algorithm));
        assert_eq!(counts.collect::<Vec<_>>(), [1, 0, 0, 1, 1]);
    }
}
