//! Where the stream and `Inspect` may go without TLS: addresses that are nobody's production
//! network. One rule for the control plane, the agent and `headgatectl`.

use std::net::IpAddr;

use ipnet::IpNet;

/// Ranges set aside for documentation and benchmarks (RFC 5737, RFC 2544, RFC 3849), which test
/// namespaces use.
pub const TEST_RANGES: [&str; 5] =
    ["192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24", "198.18.0.0/15", "2001:db8::/32"];

/// True for loopback addresses and those of [`TEST_RANGES`]. Says nothing about an IPv4 address in
/// IPv6 form: whoever wants those looked through hands in the canonical one.
#[must_use]
pub fn is_allowed(address: IpAddr) -> bool {
    let is_test = |range: &str| range.parse::<IpNet>().is_ok_and(|range| range.contains(&address));
    address.is_loopback() || TEST_RANGES.iter().any(|range| is_test(range))
}
