//! The node's own addresses: those at which NodePorts are.

use std::{collections::HashSet, net::IpAddr};

use crate::netlink::{Connection, Dumped, NetlinkError, Protocol, Request, attributes};

const GET_ADDRESSES: u16 = libc::RTM_GETADDR;
const NEW_ADDRESS: u16 = libc::RTM_NEWADDR;
/// `struct ifaddrmsg`.
const HEADER_BYTES: usize = 8;
/// `IFA_ADDRESS`: the peer's address on links that have one.
const ADDRESS: u16 = 1;
/// `IFA_LOCAL`: then this is our own.
const LOCAL: u16 = 2;
const ATTEMPTS: u32 = 5;

/// Addresses of all interfaces in the calling thread's network namespace.
///
/// # Errors
/// When the kernel does not list them; worth trying again.
pub fn node_addresses() -> Result<HashSet<IpAddr>, NetlinkError> {
    let mut found = HashSet::new();
    for _ in 0..ATTEMPTS {
        let request = Request::new(GET_ADDRESSES, libc::NLM_F_DUMP as u16, &[0; HEADER_BYTES]);
        let dumped = Connection::open(Protocol::Route)?.dump(request, |kind, payload| {
            if kind == NEW_ADDRESS {
                found.extend(own_address(payload));
            }
        })?;
        if dumped == Dumped::Whole {
            break;
        }
    }
    Ok(found)
}

fn own_address(payload: &[u8]) -> Option<IpAddr> {
    let (mut address, mut local) = (None, None);
    for (kind, value) in attributes(payload.get(HEADER_BYTES..)?) {
        let parsed = || match value.len() {
            4 => <[u8; 4]>::try_from(value).ok().map(IpAddr::from),
            16 => <[u8; 16]>::try_from(value).ok().map(IpAddr::from),
            _ => None,
        };
        match kind {
            ADDRESS => address = parsed(),
            LOCAL => local = parsed(),
            _ => {}
        }
    }
    local.or(address)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn loopback_is_among_them() {
        assert!(node_addresses().unwrap().iter().any(IpAddr::is_loopback));
    }

    #[test]
    fn the_own_side_of_a_link_with_a_peer_counts() {
        let message = Request::new(NEW_ADDRESS, 0, &[0; HEADER_BYTES])
            .attribute(ADDRESS, &[192, 0, 2, 2])
            .attribute(LOCAL, &[192, 0, 2, 1]);
        assert_eq!(own_address(message.payload()), Some("192.0.2.1".parse().unwrap()));
        assert_eq!(own_address(&[0; 3]), None);
    }
}
