//! The network of a client. Limits on connections apply to each network.

use std::{
    fmt,
    net::{IpAddr, Ipv6Addr},
};

/// The network of a connection's client: the address of a Node, or for strangers one IPv4 address
/// or an IPv6 network with a prefix of 64 bits. A single IPv6 host can use any address of such a
/// network, but all nodes of a segment may have addresses of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Network {
    address: IpAddr,
    is_node: bool,
}

impl Network {
    /// Returns the network of a stranger's address.
    pub fn of(address: IpAddr) -> Self {
        let address = match address.to_canonical() {
            IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX)).into(),
            ipv4 @ IpAddr::V4(_) => ipv4,
        };
        Self { address, is_node: false }
    }

    /// Returns the network of an address that is one of a Node.
    pub fn of_node(address: IpAddr) -> Self {
        Self { address: address.to_canonical(), is_node: true }
    }

    /// Returns true if the network is the address of a Node.
    pub fn is_node(self) -> bool {
        self.is_node
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let prefix = if self.is_node || self.address.is_ipv4() { "" } else { "/64" };
        write!(f, "{}{prefix}", self.address)
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
        assert_eq!(network("2001:db8::1").to_string(), "2001:db8::/64");
    }

    #[test]
    fn each_address_of_a_node_is_a_network() {
        let node = |text: &str| Network::of_node(text.parse().unwrap());
        assert_ne!(node("2001:db8::1"), node("2001:db8::2"));
        assert_ne!(node("2001:db8::"), Network::of("2001:db8::".parse().unwrap()));
        assert_eq!(node("::ffff:192.0.2.1").to_string(), "192.0.2.1");
    }
}
