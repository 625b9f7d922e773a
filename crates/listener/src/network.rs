//! The network of a client. Limits on connections apply to each network.

use std::net::{IpAddr, Ipv6Addr};

/// The network of a connection's client: one IPv4 address, or an IPv6 network with a prefix of 64
/// bits. A single IPv6 host can use any address of such a network. The value is the first address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Network(pub(crate) IpAddr);

impl Network {
    /// Returns the network of a client's address.
    #[must_use]
    pub fn of(address: IpAddr) -> Self {
        match address.to_canonical() {
            IpAddr::V6(address) => Self(Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX)).into()),
            ipv4 @ IpAddr::V4(_) => Self(ipv4),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn all_addresses_of_an_ipv6_prefix_are_one_network() {
        let network = |text: &str| Network::of(text.parse().unwrap());
        assert_eq!(network("2001:db8::1"), network("2001:db8::ffff:0:0:1"));
        assert_ne!(network("2001:db8::1"), network("2001:db8:0:1::1"));
        assert_eq!(network("::ffff:192.0.2.1"), network("192.0.2.1"));
        assert_ne!(network("192.0.2.1"), network("192.0.2.2"));
    }
}
