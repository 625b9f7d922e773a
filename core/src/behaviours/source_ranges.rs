//! `loadBalancerSourceRanges`: who may reach a load balancer IP. NodePorts and externalIPs are not
//! filtered.
//!
//! The ranges of one family filter that family; a family without a range of its own is open, as is
//! a list with a zero-length prefix (the control plane has resolved those to an empty list).

use std::net::IpAddr;

use ipnet::IpNet;

use crate::model::{Family, Service};

/// What a service's load balancer IPs of one family admit.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SourceRanges {
    /// Sorted; empty means open.
    pub ranges: Vec<IpNet>,
    /// A node whose own address is admitted may also use the load balancer IP itself as source,
    /// since traffic from a node to an address that it has bound carries that address.
    pub admits_node: bool,
}

impl SourceRanges {
    /// The ranges of a service for one family on a node with these addresses.
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

    /// True when nobody is kept out.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.ranges.is_empty()
    }
}
