//! `loadBalancerSourceRanges`: which clients may reach a load balancer IP. The ranges do not apply
//! to NodePorts and externalIPs.
//!
//! The ranges of a family apply to that family. If a family has no range, or has a range with
//! prefix length 0, all clients of that family are admitted.

use std::net::IpAddr;

use ipnet::IpNet;

use crate::model::{Family, Service};

/// The clients that may reach a service's load balancer IPs of one family.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SourceRanges {
    /// The admitted ranges, sorted. An empty list admits all clients.
    pub ranges: Vec<IpNet>,
    /// True if the ranges admit an address of this node. Then the load balancer IP itself is
    /// admitted as source too: if an address is bound on the node, the node uses it as the source
    /// of its connections to that address.
    pub admits_node: bool,
}

impl SourceRanges {
    /// Returns the ranges of a service for one family on a node with these addresses.
    #[must_use]
    pub fn of(service: &Service, family: Family, node_addresses: &[IpAddr]) -> Self {
        let of_family = |range: &&IpNet| Family::of(range.addr()) == family;
        let mut ranges: Vec<IpNet> =
            service.load_balancer_source_ranges.iter().filter(of_family).map(IpNet::trunc).collect();
        ranges.sort_unstable();
        ranges.dedup();
        if ranges.iter().any(|range| range.prefix_len() == 0) {
            ranges.clear();
        }
        let admits_node = node_addresses.iter().any(|address| ranges.iter().any(|range| range.contains(address)));
        Self { ranges, admits_node }
    }

    /// True if a client is admitted to `destination`, a load balancer IP.
    #[must_use]
    pub fn admits(&self, client: IpAddr, destination: IpAddr) -> bool {
        self.is_open()
            || self.ranges.iter().any(|range| range.contains(&client))
            || (self.admits_node && client == destination)
    }

    /// True if all clients are admitted.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.ranges.is_empty()
    }
}
