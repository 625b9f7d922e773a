//! How much of a node one Service may occupy.
//!
//! A tenant writes Services, and each node pays for them. So the size of a Service has limits, the
//! same in every mode. The control plane counts with the same functions and leaves out what is over
//! its budget, which is never above these limits. So a Service meets them only if a replica is
//! faulty. It then has no [view](crate::view) in the family: no node forwards its connections.

use crate::{
    model::{Family, LoadBalancing, Service, Weight},
    state::ServiceEntry,
};

/// The most pairs of a port and an endpoint of a Service in one family.
pub const MAX_PORT_ENDPOINTS: usize = 65_536;
/// The most pairs of a virtual server and an endpoint of a Service in one family. Mode IPVS has a
/// destination for each of them.
pub const MAX_DESTINATIONS: usize = 262_144;
/// The most pairs of a slot and an endpoint of a Service with consistent-hash in one family. Mode
/// nftables computes a score for each of them.
const MAX_SCORES: usize = 1 << 24;

/// The largest number of slots of a Service port with consistent-hash, in mode nftables.
///
/// With `n` endpoints of equal weight, the share of an endpoint differs from the mean by
/// `sqrt(n / slots)` (standard deviation): by 7 % with 10 endpoints, and by 22 % with 100.
pub const HASHED_SLOTS: u32 = 2048;
/// The largest number of slots that weights give to a Service port, in mode nftables. The weights
/// of larger groups are rounded.
pub const WEIGHTED_SLOTS: u32 = 4096;
/// The most slots of all ports of a Service, for one policy in one family: of consistent-hash, or
/// that weights ask for.
const MAX_SLOTS_OF_SERVICE: usize = 16_384;

/// The size of a Service in one family. The cost on a node grows with it, and is not larger.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ServiceSize {
    ports: usize,
    frontends: usize,
    virtual_servers: usize,
    endpoints: usize,
    is_weighted: bool,
    is_hashed: bool,
}

impl ServiceSize {
    /// Returns the size of a Service. It is 0 in a family without a ClusterIP, because the Service
    /// has no rules there. The cost is linear in the addresses of the Service.
    #[must_use]
    pub fn of(entry: &ServiceEntry, family: Family) -> Self {
        let has_rules = |service: &&Service| service.cluster_ip(family).is_some();
        let Some(service) = entry.service().filter(has_rules) else { return Self::default() };
        let endpoints = entry.endpoints().values().as_slice();
        let first_v6 = endpoints.partition_point(|endpoint| endpoint.address.is_ipv4());
        Self {
            ports: service.ports.len(),
            frontends: service.frontends(family),
            virtual_servers: service.virtual_servers(family),
            endpoints: if family == Family::V4 { first_v6 } else { endpoints.len() - first_v6 },
            is_weighted: entry.endpoints().are_weighted(),
            is_hashed: LoadBalancing::parse(&service.load_balancing) == Some(LoadBalancing::ConsistentHash),
        }
    }

    /// Returns the number of slots of each port with consistent-hash. The number does not depend on
    /// the node, because all nodes must send a client to the same endpoint. It depends on endpoints
    /// only above 1,024 of them, and then it is halved when their number doubles, because many
    /// clients move when it changes.
    #[must_use]
    pub fn hashed_slots(self) -> u32 {
        let slots = MAX_SLOTS_OF_SERVICE.min(MAX_SCORES / self.endpoints.next_power_of_two());
        u32::try_from(slots / self.ports.next_power_of_two()).unwrap_or(u32::MAX).clamp(1, HASHED_SLOTS)
    }

    /// Returns the most slots that weights give to each port.
    #[must_use]
    pub fn weighted_slots(self) -> u32 {
        let slots = u32::try_from(MAX_SLOTS_OF_SERVICE / self.ports.max(1)).unwrap_or(u32::MAX);
        slots.clamp(1, WEIGHTED_SLOTS)
    }

    /// An estimate of the objects that a node writes for the whole Service.
    #[must_use]
    pub fn objects(self) -> usize {
        let most_by_weight = (self.endpoints * usize::from(Weight::MAX)).min(self.weighted_slots() as usize);
        let slots = match (self.is_hashed, self.is_weighted) {
            (true, _) => self.hashed_slots() as usize,
            (false, true) => most_by_weight,
            (false, false) => 0,
        };
        self.frontends + self.ports * self.endpoints.max(slots)
    }

    /// Says which limit of agents the Service exceeds, as a sentence with the remedy, without its
    /// full stop.
    #[must_use]
    pub fn excess(self) -> Option<String> {
        let Self { ports, frontends, virtual_servers, endpoints, .. } = self;
        let limits = [
            (frontends, Service::MAX_FRONTENDS, "addresses with ports"),
            (ports * endpoints, MAX_PORT_ENDPOINTS, "endpoints of ports"),
            (virtual_servers * endpoints, MAX_DESTINATIONS, "endpoints of addresses with ports"),
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
        let names = ["endpoints of addresses", "endpoints of ports", "addresses with ports"];
        let excess = size.excess()?;
        names.into_iter().find(|name| excess.split(" it has ").nth(1).is_some_and(|rest| rest.contains(name)))
    }

    /// However many ports and endpoints a Service has, its slots and their scores are bounded.
    #[test]
    fn a_service_with_many_ports_or_endpoints_has_fewer_slots_for_each_port() {
        for (ports, endpoints, slots) in [
            (1, 10, 2048),
            (1, 5000, 2048),
            (1, 8192, 2048),
            (1, 8193, 1024),
            (8, 1024, 2048),
            (8, 1025, 1024),
            (9, 10, 1024),
            (16, 10, 1024),
            (100, 10, 128),
            (128, 10, 128),
            (60_000, 1, 1),
        ] {
            let size = ServiceSize { ports, endpoints, is_hashed: true, ..ServiceSize::default() };
            assert_eq!(size.hashed_slots(), slots, "{ports} ports, {endpoints} endpoints");
            assert_eq!(size.excess(), None);
        }
        for ports in [1, 4, 5, 8, 100, 655, 20_000] {
            let size = ServiceSize { ports, endpoints: 40, is_weighted: true, ..ServiceSize::default() };
            let slots = size.weighted_slots();
            assert!(slots <= 4096 && ports * slots as usize <= MAX_SLOTS_OF_SERVICE.max(ports), "{ports} ports");
            assert_eq!(size.objects(), ports * 40.max(4000.min(slots as usize)));
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
        assert_eq!(excess("consistent-hash", 8, 0, 2000), None);
    }
}
