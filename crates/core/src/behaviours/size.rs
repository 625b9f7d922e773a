//! How much of a node one Service may occupy.
//!
//! A tenant writes Services, and each node pays for them. So the size of a Service has limits, the
//! same in every mode. A Service that is larger has no [view](crate::view) in the family, on any
//! node: no node forwards its connections. The control plane has limits of its own for objects;
//! these here also hold if a replica is faulty.

use std::net::IpAddr;

use crate::{
    model::{Family, LoadBalancing, Service},
    state::ServiceEntry,
};

/// The most pairs of a port and an endpoint of a Service in one family.
pub const MAX_PORT_ENDPOINTS: usize = 65_536;
/// The most pairs of a frontend and an endpoint of a Service in one family. A virtual server of
/// IPVS has a destination for each of them.
pub const MAX_FRONTEND_ENDPOINTS: usize = 262_144;
/// The most pairs of a slot and an endpoint of a Service with consistent-hash in one family. Mode
/// nftables computes a score for each of them.
pub const MAX_SCORES: usize = 1 << 24;

/// The largest number of slots of a Service port with consistent-hash, in mode nftables.
///
/// With `n` endpoints of equal weight, the share of an endpoint differs from the mean by
/// `sqrt(n / slots)` (standard deviation): by 7 % with 10 endpoints, and by 22 % with 100.
pub const HASHED_SLOTS: u32 = 2048;
/// The most such slots of all ports of a Service, for one policy in one family.
const MAX_SLOTS_OF_SERVICE: u32 = 16_384;

/// The size of a Service in one family. The cost on a node grows with it, and is not larger.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ServiceSize {
    ports: usize,
    frontends: usize,
    endpoints: usize,
    is_hashed: bool,
}

/// Returns the number of slots of each port of a Service with this number of ports. The number does
/// not depend on endpoints, because clients of all endpoints move when it changes, and not on the
/// node, because all nodes must send a client to the same endpoint.
#[must_use]
pub fn hashed_slots(ports: usize) -> u32 {
    let ports = u32::try_from(ports.next_power_of_two()).unwrap_or(u32::MAX);
    (MAX_SLOTS_OF_SERVICE / ports).clamp(1, HASHED_SLOTS)
}

impl ServiceSize {
    /// Returns the size of a Service. It is 0 in a family without a ClusterIP, because the Service
    /// has no rules there. The cost is linear in the addresses of the Service.
    #[must_use]
    pub fn of(entry: &ServiceEntry, family: Family) -> Self {
        let has_rules = |service: &&Service| service.cluster_ip(family).is_some();
        let Some(service) = entry.service().filter(has_rules) else { return Self::default() };
        let of_family = |address: &&IpAddr| Family::of(**address) == family;
        let (ports, load_balancers) = (service.ports.len(), service.load_balancer_ips.iter().filter(of_family).count());
        let addresses = 1 + service.external_ips.iter().filter(of_family).count() + load_balancers;
        let node_ports = service.ports.iter().filter(|port| port.node_port != 0).count();
        let ranges = load_balancers * service.load_balancer_source_ranges.len();
        let endpoints = entry.endpoints().values().as_slice();
        let first_v6 = endpoints.partition_point(|endpoint| endpoint.address.is_ipv4());
        let endpoints = if family == Family::V4 { first_v6 } else { endpoints.len() - first_v6 };
        let is_hashed = LoadBalancing::parse(&service.load_balancing) == Some(LoadBalancing::ConsistentHash);
        Self { ports, frontends: ports * (addresses + ranges) + node_ports, endpoints, is_hashed }
    }

    /// An estimate of the objects that a node writes for the whole Service.
    #[must_use]
    pub fn objects(self) -> usize {
        let slots = if self.is_hashed { hashed_slots(self.ports) as usize } else { 0 };
        self.frontends + self.ports * self.endpoints.max(slots)
    }

    /// Says which limit the Service exceeds, as a sentence with the remedy, without its full stop.
    #[must_use]
    pub fn excess(self) -> Option<String> {
        let Self { ports, frontends, endpoints, is_hashed } = self;
        let slots = if is_hashed { ports * hashed_slots(ports) as usize } else { 0 };
        let limits = [
            (frontends, Service::MAX_FRONTENDS, "addresses with ports"),
            (ports * endpoints, MAX_PORT_ENDPOINTS, "endpoints of ports"),
            (frontends * endpoints, MAX_FRONTEND_ENDPOINTS, "endpoints of addresses with ports"),
            (slots * endpoints, MAX_SCORES, "endpoints of slots of consistent-hash"),
        ];
        let (found, limit, what) = limits.into_iter().find(|(found, limit, _)| found > limit)?;
        Some(format!(
            "the Service is too large for a node, and is left out: with {ports} ports, {frontends} addresses with ports and {endpoints} endpoints it has {found} {what}, and {limit} are allowed: divide it into several Services, or remove ports, externalIPs or source ranges"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Change, Endpoint, EndpointPort, Protocol, ServiceKey, ServicePort};
    use crate::state::{Dirty, State};

    /// The limit that a Service exceeds in IPv4, if any.
    fn excess(algorithm: &str, ports: u16, external_ips: u32, endpoints: u32) -> Option<&'static str> {
        let key = ServiceKey::new("ns", "web");
        let port = |number| ServicePort { name: "p".into(), protocol: Protocol::Tcp, port: number, node_port: number };
        let mut service = Service::new(key.clone(), vec![[10, 96, 0, 1].into()], (1..=ports).map(port).collect());
        service.load_balancing = algorithm.into();
        service.external_ips = (0..external_ips).map(|number| (0xc633_6400 + number).to_be_bytes().into()).collect();
        service.external_ips.push("2001:db8::1".parse().unwrap_or([0; 16].into()));
        let mut state = State::default();
        state.apply(Change::from(service), &mut Dirty::default());
        for number in 0..endpoints {
            let address = (0x0af4_0000 + number).to_be_bytes().into();
            let ports = [EndpointPort::new("p", Protocol::Tcp, 8080)].into();
            state.apply(Change::Endpoint(key.clone(), Endpoint::new(address, ports)), &mut Dirty::default());
        }
        let size = ServiceSize::of(state.entry(&key)?, Family::V4);
        assert_eq!(state.entry(&key).map(|entry| ServiceSize::of(entry, Family::V6)), Some(ServiceSize::default()));
        let names = ["endpoints of slots", "endpoints of addresses", "endpoints of ports", "addresses with ports"];
        let excess = size.excess()?;
        names.into_iter().find(|name| excess.split(" it has ").nth(1).is_some_and(|rest| rest.contains(name)))
    }

    #[test]
    fn a_service_with_many_ports_has_fewer_slots_for_each() {
        for (ports, slots) in [(1, 2048), (8, 2048), (9, 1024), (16, 1024), (100, 128), (128, 128), (60_000, 1)] {
            assert_eq!(hashed_slots(ports), slots, "{ports} ports");
        }
    }

    #[test]
    fn large_services_of_ordinary_use_are_within_the_limits_and_those_of_attacks_are_not() {
        for (ports, external_ips, endpoints) in [(1, 0, 5000), (3, 10, 5000), (100, 0, 100), (100, 2, 600)] {
            let found = excess("random", ports, external_ips, endpoints);
            assert_eq!(found, None, "{ports} {external_ips} {endpoints}");
        }
        assert_eq!(excess("consistent-hash", 1, 0, 5000), None);
        assert_eq!(excess("consistent-hash", 100, 0, 600), None);
        assert_eq!(excess("random", 100, 4000, 1), Some("addresses with ports"));
        assert_eq!(excess("random", 1, 60_000, 1), Some("addresses with ports"));
        assert_eq!(excess("random", 100, 0, 700), Some("endpoints of ports"));
        assert_eq!(excess("random", 10, 100, 1000), Some("endpoints of addresses"));
        assert_eq!(excess("consistent-hash", 8, 0, 2000), Some("endpoints of slots"));
    }
}
