//! Addresses: which of them a node's own programs connect to on behalf of a Service, which of them
//! other machines can reach, and which need no TLS.
//!
//! The proxy of mode userspace and the health checks ask [`DialPolicy::permits`]. Whoever writes an
//! EndpointSlice chooses its addresses. Rules keep the client's address, so a firewall or a
//! NetworkPolicy still knows who connects. A program of the node connects with the address of the
//! node, which may reach more than the client.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

/// The addresses that a node's programs connect to. The default contains no address.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DialPolicy {
    /// The ranges of pods, and those that the operator adds.
    pub ranges: Vec<IpNet>,
    /// The addresses of the node. They are left out also if a range contains them.
    pub of_node: Vec<IpNet>,
    /// A proxy on the node carries connections (mode userspace).
    pub has_proxy: bool,
}

/// Link-local addresses, and metadata servers: AWS, Azure, Alibaba Cloud and Google Cloud.
const METADATA: [IpNet; 6] = [
    v4([169, 254, 0, 0], 16),
    v6([0xfe80, 0, 0, 0, 0, 0, 0, 0], 10),
    v6([0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254], 128),
    v4([168, 63, 129, 16], 32),
    v4([100, 100, 100, 200], 32),
    v6([0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254], 128),
];

/// Addresses of every node: loopback, and the unspecified addresses, which lead there.
const LOOPBACK: [IpNet; 4] =
    [v4([127, 0, 0, 0], 8), v4([0, 0, 0, 0], 8), v6([0, 0, 0, 0, 0, 0, 0, 1], 128), v6([0; 8], 128)];

const fn v4([a, b, c, d]: [u8; 4], prefix_length: u8) -> IpNet {
    IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::new(a, b, c, d), prefix_length))
}

const fn v6([a, b, c, d, e, f, g, h]: [u16; 8], prefix_length: u8) -> IpNet {
    IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::new(a, b, c, d, e, f, g, h), prefix_length))
}

impl DialPolicy {
    /// The policy of a node with these addresses, and without a proxy.
    #[must_use]
    pub fn new(ranges: Vec<IpNet>, addresses: impl IntoIterator<Item = IpAddr>) -> Self {
        let of_node = addresses.into_iter().map(IpNet::from).chain(LOOPBACK).collect();
        Self { ranges, of_node, has_proxy: false }
    }

    /// Whether a program of the node may connect to an address: it is in a range, and is neither an
    /// address of the node nor that of a metadata server.
    #[must_use]
    pub fn permits(&self, address: IpAddr) -> bool {
        self.ranges.iter().any(|range| range.contains(&address.to_canonical()))
            && !is_metadata(address)
            && !is_in(&self.of_node, address)
    }

    /// True if a node with a proxy also has no rules that lead to this address: a metadata server.
    #[must_use]
    pub fn leaves_out(&self, address: IpAddr) -> bool {
        self.has_proxy && is_metadata(address)
    }
}

/// True if an address, or the address that it embeds, is link-local or that of a metadata server.
fn is_metadata(address: IpAddr) -> bool {
    is_in(&METADATA, address)
}

/// Whether ranges contain an address, or an IPv4 address that a NAT64 gateway may read from it (RFC
/// 6052, RFC 8215). The prefix 64:ff9b:1::/48 may be divided further, so that there are several
/// readings.
fn is_in(ranges: &[IpNet], address: IpAddr) -> bool {
    let address = address.to_canonical();
    let embedded: &[[usize; 4]] = match address {
        IpAddr::V6(v6) if v6.segments()[..6] == [0x64, 0xff9b, 0, 0, 0, 0] => &[[12, 13, 14, 15]],
        IpAddr::V6(v6) if v6.segments()[..3] == [0x64, 0xff9b, 1] => {
            &[[6, 7, 9, 10], [7, 9, 10, 11], [9, 10, 11, 12], [12, 13, 14, 15]]
        }
        _ => &[],
    };
    let octet = |at: usize| if let IpAddr::V6(v6) = address { v6.octets()[at] } else { 0 };
    let mut forms = std::iter::once(address).chain(embedded.iter().map(|places| places.map(octet).into()));
    forms.any(|form| ranges.iter().any(|range| range.contains(&form)))
}

// Which addresses in objects of the API other machines can reach. The control plane checks what
// the API says, and agents check again what a replica says.

/// What an address is used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AddressUse {
    /// A `ClusterIP`. Kubernetes allows ranges of Services in 169.254.0.0/16, because no machine
    /// holds a `ClusterIP`.
    ClusterIp,
    /// An address of a Node. Nodes that share a segment or a machine may use link-local and
    /// loopback addresses, and no rule sends packets there because of this address.
    Node,
    /// An endpoint, an external IP or an address of a load balancer.
    Other,
}

/// Returns a sentence about an address that has no meaning on other machines, else `None`.
#[must_use]
pub fn unreachable(address: IpAddr, used: AddressUse) -> Option<String> {
    let class = match address.to_canonical() {
        IpAddr::V4(v4) if v4.is_broadcast() => "the broadcast address",
        IpAddr::V4(v4) if v4.is_link_local() && used == AddressUse::Other => "a link-local address",
        IpAddr::V6(v6) if v6.is_unicast_link_local() && used != AddressUse::Node => "a link-local address",
        address if address.is_unspecified() => "the unspecified address",
        address if address.is_loopback() && used != AddressUse::Node => "a loopback address",
        address if address.is_multicast() => "a multicast address",
        _ => return None,
    };
    Some(format!("{address} is {class}, which other nodes cannot reach: give the routable address"))
}

// The addresses on which the stream and `Inspect` may be used without TLS: loopback, and ranges
// that no production network uses. The control plane, the agent and `headgatectl` share this rule.

/// Ranges for documentation and benchmarks (RFC 5737, 2544, 3849), which tests use.
pub const TEST_RANGES: [&str; 5] =
    ["192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24", "198.18.0.0/15", "2001:db8::/32"];

/// True for loopback addresses and [`TEST_RANGES`]. Callers convert IPv4-mapped addresses first.
#[must_use]
pub fn may_lack_tls(address: IpAddr) -> bool {
    let is_test = |range: &str| range.parse::<IpNet>().is_ok_and(|range| range.contains(&address));
    address.is_loopback() || TEST_RANGES.iter().any(|range| is_test(range))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn policy(ranges: &[&str]) -> DialPolicy {
        let ranges = ranges.iter().map(|range| range.parse().unwrap()).collect();
        DialPolicy::new(ranges, ["10.244.1.1", "192.0.2.11", "fd00:1::11"].map(ip))
    }

    #[test]
    fn only_ranges_permit_addresses() {
        let policy = policy(&["10.244.0.0/16", "fd00:1::/64", "64:ff9b::/96"]);
        for (address, is_permitted) in [
            ("10.244.1.2", true),
            ("::ffff:10.244.1.2", true),
            ("fd00:1::12", true),
            ("64:ff9b::10.9.9.9", true),
            ("10.245.1.2", false),
            ("fd00:2::12", false),
            ("64:ff9b:1::10.244.1.2", false),
        ] {
            assert_eq!(policy.permits(ip(address)), is_permitted, "{address}");
        }
        assert!(!DialPolicy::default().permits(ip("10.244.1.2")), "without ranges, no address is permitted");
    }

    #[test]
    fn no_range_permits_the_node_and_metadata_servers() {
        let policy = policy(&["0.0.0.0/0", "::/0"]);
        for address in ["8.8.8.8", "169.253.255.255", "168.63.129.17", "100.100.100.201", "192.0.2.12", "2001:db8::1"] {
            assert!(policy.permits(ip(address)), "{address}");
        }
        for address in ["10.244.1.1", "192.0.2.11", "fd00:1::11", "127.0.0.1", "127.1.2.3", "0.0.0.0", "::1", "::"]
            .iter()
            .chain(&["::ffff:192.0.2.11", "::ffff:127.0.0.1", "64:ff9b::192.0.2.11", "64:ff9b::127.0.0.1"])
        {
            assert!(!policy.permits(ip(address)) && !is_metadata(ip(address)), "{address}");
        }
        for address in [
            "169.254.169.254",
            "169.254.77.1",
            "168.63.129.16",
            "100.100.100.200",
            "fd00:ec2::254",
            "fd20:ce::254",
            "fe80::1",
            "::ffff:169.254.169.254",
            "64:ff9b::169.254.169.254",
            "64:ff9b::168.63.129.16",
            "64:ff9b::100.100.100.200",
            // 169.254.169.254 with the prefix lengths 48, 56, 64 and 96.
            "64:ff9b:1:a9fe:a9:fe00::",
            "64:ff9b:1:22a9:fe:a9fe::",
            "64:ff9b:1:2222:a9:fea9:fe00::",
            "64:ff9b:1:2222:3333:4444:a9fe:a9fe",
        ] {
            assert!(!policy.permits(ip(address)) && is_metadata(ip(address)), "{address}");
        }
    }
}

#[cfg(test)]
mod reach_tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn addresses_without_a_meaning_elsewhere_are_refused_for_each_use() {
        let refused = |text: &str| {
            let uses = [AddressUse::ClusterIp, AddressUse::Node, AddressUse::Other];
            uses.map(|used| unreachable(text.parse().unwrap(), used).is_some())
        };
        for text in ["0.0.0.0", "::", "224.0.0.1", "ff02::1", "255.255.255.255"] {
            assert_eq!(refused(text), [true; 3], "{text}");
        }
        for text in ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"] {
            assert_eq!(refused(text), [true, false, true], "{text}");
        }
        assert_eq!(refused("169.254.169.254"), [false, false, true]);
        assert_eq!(refused("fe80::1"), [true, false, true]);
        for text in ["10.0.0.1", "192.0.2.1", "fd00::1", "2001:db8::1"] {
            assert_eq!(refused(text), [false; 3], "{text}");
        }
    }
}
