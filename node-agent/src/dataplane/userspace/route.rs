//! The addresses of the proxy's listeners, and the routes that make them addresses of the node. No
//! interface has these addresses, so nothing outside of the node can reach them.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use headgate_core::Family;
use headgate_netlink::{NetlinkError, route::Routing};

use super::super::{DataplaneError, ErrorKind, Leftover};

/// The index of the loopback device in each network namespace (`LOOPBACK_IFINDEX`).
const LOOPBACK: u32 = 1;

/// The address of the listeners of a family: a link-local address, and a unique local address.
pub(super) fn listener_address(family: Family) -> IpAddr {
    match family {
        Family::V4 => Ipv4Addr::new(169, 254, 77, 1).into(),
        Family::V6 => Ipv6Addr::new(0xfd68, 0x6561, 0x6467, 0, 0, 0, 0, 1).into(),
    }
}

/// Keeps the addresses of the listeners addresses of the node. The connection belongs to one
/// network namespace.
#[derive(Debug)]
pub(super) struct Route(Routing);

impl Route {
    /// Connects in the network namespace of the calling thread.
    pub(super) fn connect() -> Result<Self, String> {
        Ok(Self(Routing::open().map_err(|error| error.to_string())?))
    }

    /// Adds the route of a family if it is missing: another program may have removed it, and it
    /// goes when the loopback device goes down. Errors: the kernel refuses the route, for example
    /// while the loopback device is down. Try again.
    pub(super) fn keep(&mut self, family: Family) -> Result<(), String> {
        let address = listener_address(family);
        let added = self
            .0
            .is_local(address)
            .and_then(|is_local| if is_local { Ok(()) } else { self.0.add_local_route(LOOPBACK, address) });
        unless(libc::EEXIST, added, &format!("adding the local route to {address}, the address of the proxy"))
            .map_err(|error| error.to_string())
    }
}

/// The routes of both families, as a leftover.
pub(crate) fn routes() -> Leftover {
    Leftover::new("userspace", || {
        Family::BOTH.map(listener_address).into_iter().try_for_each(|address| {
            let removed = Routing::open().and_then(|mut routing| routing.remove_local_route(LOOPBACK, address));
            unless(libc::ESRCH, removed, &format!("removing the local route to {address}"))
        })
    })
}

/// An error, except the code that says that nothing had to be done.
fn unless(done: i32, result: Result<(), NetlinkError>, what: &str) -> Result<(), DataplaneError> {
    match result {
        Err(error) if error.refusal_code() != Some(done) => {
            Err(DataplaneError::new(ErrorKind::Retry, format!("{what}: {error}")))
        }
        _ => Ok(()),
    }
}
