//! How many Services use a feature. A node that lacks the feature reports itself as degraded only
//! if some Service needs it.

use crate::model::{Family, Protocol, Service};

/// Numbers of Services with a ClusterIP of one family, by feature.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FamilyDemand {
    /// Services that have a ClusterIP of the family.
    pub services: usize,
    /// Services of the family that have a NodePort.
    pub with_node_ports: usize,
    /// Services of the family that have an SCTP port.
    pub with_sctp: usize,
}

/// The numbers for both families. The cost of counting a Service is linear in its ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Demand {
    v4: FamilyDemand,
    v6: FamilyDemand,
}

impl Demand {
    /// Returns the numbers for a family.
    #[must_use]
    pub fn of(&self, family: Family) -> FamilyDemand {
        match family {
            Family::V4 => self.v4,
            Family::V6 => self.v6,
        }
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
            let demand = match Family::of(*address) {
                Family::V4 => &mut self.v4,
                Family::V6 => &mut self.v6,
            };
            count(&mut demand.services);
            if has_node_ports {
                count(&mut demand.with_node_ports);
            }
            if has_sctp {
                count(&mut demand.with_sctp);
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
                let FamilyDemand { services, with_node_ports, with_sctp } = state.demand().of(family);
                [services, with_node_ports, with_sctp]
            })
        };
        let mut after = |change: Change| {
            state.apply(change, &mut Dirty::default());
            counts(&state)
        };
        assert_eq!(after(service(&[[10, 0, 0, 1]], 30_000, Protocol::Tcp)), [[1, 1, 0], [1, 1, 0]]);
        assert_eq!(
            after(service(&[[10, 0, 0, 1]], 30_000, Protocol::Tcp)),
            [[1, 1, 0], [1, 1, 0]],
            "an equal Service changes no number"
        );
        assert_eq!(after(service(&[], 0, Protocol::Sctp)), [[0, 0, 0], [1, 0, 1]]);
        assert_eq!(after(Change::RemoveService(ServiceKey::new("a", "b"))), [[0, 0, 0], [0, 0, 0]]);
        assert_eq!(state.demand(), &Demand::default());
    }
}
