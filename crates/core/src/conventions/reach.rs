//! Which addresses in objects of the API other machines can reach. The control plane checks what
//! the API says, and agents check again what a replica says.

use std::net::IpAddr;

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

/// Returns a sentence about an address that has no meaning on other machines; `None` if the address
/// can be used.
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

#[cfg(test)]
mod tests {
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
