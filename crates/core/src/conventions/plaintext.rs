//! The addresses on which the stream and `Inspect` may be used without TLS: loopback, and ranges
//! that no production network uses. The control plane, the agent and `headgatectl` share this rule.

use std::net::IpAddr;

use ipnet::IpNet;

/// Ranges reserved for documentation and benchmarks (RFC 5737, RFC 2544, RFC 3849). Network
/// namespaces of tests use them.
pub const TEST_RANGES: [&str; 5] =
    ["192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24", "198.18.0.0/15", "2001:db8::/32"];

/// True for loopback addresses and for addresses in [`TEST_RANGES`]. Does not recognize IPv4-mapped
/// IPv6 addresses: callers convert them with [`IpAddr::to_canonical`] first.
#[must_use]
pub fn is_allowed(address: IpAddr) -> bool {
    let is_test = |range: &str| range.parse::<IpNet>().is_ok_and(|range| range.contains(&address));
    address.is_loopback() || TEST_RANGES.iter().any(|range| is_test(range))
}
