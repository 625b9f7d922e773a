//! Links, addresses and local routes (`linux/rtnetlink.h`, `if_link.h`, `if_addr.h`), with which a
//! service proxy makes Service addresses those of the node. Changes take longer the more addresses
//! the node has; removals of IPv6 addresses are the slowest.

mod wire;

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr},
};

use super::{Connection, Family, Malformed, Message, NetlinkError, Refusal};

/// The multicast groups of `NETLINK_ROUTE` whose notifications [`event`] decodes.
pub const GROUPS: [u32; 3] = [libc::RTNLGRP_LINK, libc::RTNLGRP_IPV4_IFADDR, libc::RTNLGRP_IPV6_IFADDR];

/// A network, or an address with its prefix length.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Prefix {
    /// The address.
    pub address: IpAddr,
    /// The prefix length in bits.
    pub length: u8,
}

impl Prefix {
    /// The prefix of a single address: /32 or /128.
    pub fn host(address: IpAddr) -> Self {
        Self { address, length: if address.is_ipv4() { 32 } else { 128 } }
    }
}

impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.length)
    }
}

/// A network interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    /// The interface index.
    pub index: u32,
    /// The interface name.
    pub name: String,
    /// The kind of a virtual device, such as `dummy`. None for hardware and loopback.
    pub kind: Option<String>,
    /// The flags `IFF_…` of `linux/if.h`.
    pub flags: u32,
}

impl Link {
    /// Returns whether the link is up (`IFF_UP`).
    pub fn is_up(&self) -> bool {
        self.flags & libc::IFF_UP.cast_unsigned() != 0
    }
}

/// An address of a link. These fields identify an address among all addresses of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkAddress {
    /// The index of the link.
    pub link: u32,
    /// The address.
    pub address: Prefix,
    /// IPv4: the other end of a point-to-point link, or the address itself. A link can have several
    /// addresses that differ only in this field. IPv6: none.
    pub peer: Option<Ipv4Addr>,
}

/// A change of links or addresses, which any program may have made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A link was added or changed, for example renamed.
    Link {
        /// The interface index.
        index: u32,
        /// The interface name.
        name: String,
    },
    /// A link with this index was removed. Earlier events reported the removal of its addresses.
    RemovedLink(u32),
    /// An address was added or changed.
    Address(LinkAddress),
    /// An address was removed.
    RemovedAddress(LinkAddress),
}

/// Decodes a notification of one of the [`GROUPS`]. Returns `None` if the notification reports no
/// [`Event`]. Errors: the notification is truncated, or lacks an attribute. The caller must list
/// links and addresses again.
pub fn event(notification: &Message<'_>) -> Result<Option<Event>, Malformed> {
    wire::event(notification.kind, notification.payload)
}

/// One change of a link's addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// Adds an address that is no source address: IPv4 with host scope, IPv6 deprecated, without
    /// duplicate address detection and prefix route, and usable a moment later. Fails with `EEXIST`
    /// if the link has it.
    AddAddress {
        /// The index of the link.
        link: u32,
        /// The address.
        address: Prefix,
    },
    /// Makes the kernel avoid an IPv6 source address, like those of [`Self::AddAddress`].
    DeprecateAddress {
        /// The index of the link.
        link: u32,
        /// The address.
        address: Prefix,
    },
    /// Removes an address. Fails with `EADDRNOTAVAIL` if the link does not have the address.
    RemoveAddress {
        /// The index of the link.
        link: u32,
        /// The address.
        address: Prefix,
    },
}

/// A connection to rtnetlink in the network namespace of the thread that opened it.
#[derive(Debug)]
pub struct Routing {
    connection: Connection,
}

impl Routing {
    /// Opens a connection. Errors: the kernel creates no socket.
    pub fn open() -> Result<Self, NetlinkError> {
        Ok(Self { connection: Connection::open(libc::NETLINK_ROUTE)? })
    }

    /// Returns the link with this name, or `None` if no link has the name.
    /// Errors: the kernel rejects the query or does not answer.
    pub fn link(&mut self, name: &str) -> Result<Option<Link>, NetlinkError> {
        let request = wire::link_request(libc::RTM_GETLINK, 0, 0, 0).text(libc::IFLA_IFNAME, name);
        match self.connection.ask_one(&request, wire::link) {
            Err(error) if error.refusal_code() == Some(libc::ENODEV) => Ok(None),
            result => result.map(Some),
        }
    }

    /// Creates a dummy device that answers no ARP requests. The device is down. Errors: `EEXIST` if
    /// the name is in use, `EOPNOTSUPP` if the kernel has no dummy devices (module `dummy`).
    pub fn add_dummy(&mut self, name: &str) -> Result<(), NetlinkError> {
        self.connection.ask(wire::add_dummy(name), |_, _| {})
    }

    /// Removes a link with its addresses and routes. Errors: `ENODEV` if the link does not exist.
    pub fn remove_link(&mut self, link: u32) -> Result<(), NetlinkError> {
        self.connection.ask(wire::link_request(libc::RTM_DELLINK, 0, link, 0), |_, _| {})
    }

    /// All IPv4 and IPv6 addresses of a link. Errors: the kernel does not list the addresses, or
    /// changes interrupt every attempt to list them.
    pub fn addresses(&mut self, link: u32) -> Result<Vec<Prefix>, NetlinkError> {
        self.list_addresses(link, |found, _| (found.link == link).then_some(found.address))
    }

    /// The IPv6 addresses of a link that the kernel does not avoid as source addresses.
    /// Errors: the errors of [`Routing::addresses`].
    pub fn preferred_addresses(&mut self, link: u32) -> Result<Vec<Prefix>, NetlinkError> {
        self.list_addresses(link, |found, payload| {
            (found.link == link && wire::is_preferred(&found, payload)).then_some(found.address)
        })
    }

    /// All IPv4 and IPv6 addresses of all links that `is_wanted` accepts. The kernel lists all
    /// addresses. Addresses that `is_wanted` rejects are not stored.
    /// Errors: the errors of [`Routing::addresses`].
    pub fn all_addresses(
        &mut self,
        is_wanted: impl Fn(&LinkAddress) -> bool,
    ) -> Result<Vec<LinkAddress>, NetlinkError> {
        self.list_addresses(0, |found, _| is_wanted(&found).then_some(found))
    }

    /// Executes changes, many in one send. `refused` receives the index of each change that the
    /// kernel rejects. The kernel executes the other changes.
    /// Errors: the kernel may have executed none, some or all of the changes.
    pub fn change<'a>(
        &mut self,
        changes: impl IntoIterator<Item = &'a Change>,
        refused: impl FnMut(usize, Refusal),
    ) -> Result<(), NetlinkError> {
        self.connection.execute(changes.into_iter().map(wire::change), refused)
    }

    /// Returns whether an address is an address of the node, by the routes of the node. The kernel
    /// answers without the lock that changes of links and routes take.
    /// Errors: the kernel does not answer. A node without any route to the address is no error.
    pub fn is_local(&mut self, address: IpAddr) -> Result<bool, NetlinkError> {
        let mut is_local = false;
        match self.connection.ask(wire::get_route(address), |_, payload| is_local = wire::is_local(payload)) {
            Err(error) if error.refusal_code().is_none() => Err(error),
            _ => Ok(is_local),
        }
    }

    /// Adds a route that makes an address an address of the node, on a link that does not get the
    /// address. Rules and sockets can then use the address, and the kernel does not choose it as a
    /// source address. Errors: `EEXIST` if the route exists, `ENETDOWN` if the link is down.
    pub fn add_local_route(&mut self, link: u32, address: IpAddr) -> Result<(), NetlinkError> {
        self.connection.ask(wire::add_local_route(link, address), |_, _| {})
    }

    /// Removes a route of [`Self::add_local_route`]. Errors: `ESRCH` if the route does not exist.
    pub fn remove_local_route(&mut self, link: u32, address: IpAddr) -> Result<(), NetlinkError> {
        self.connection.ask(wire::remove_local_route(link, address), |_, _| {})
    }

    /// Lists what `select` returns for the addresses of a link, or of all links for index 0.
    /// Kernels before 4.20 always list the addresses of all links. `select` also receives the
    /// message about the address.
    fn list_addresses<T>(
        &mut self,
        link: u32,
        select: impl Fn(LinkAddress, &[u8]) -> Option<T>,
    ) -> Result<Vec<T>, NetlinkError> {
        let mut all = Vec::new();
        for family in [Family::V4, Family::V6] {
            let dump = libc::NLM_F_DUMP as u16;
            let request = wire::address_request(libc::RTM_GETADDR, dump, family, 0, 0, link);
            all.append(&mut self.connection.list(&request, |found: &mut Vec<_>, payload| {
                found.extend(wire::address(payload)?.and_then(|found| select(found, payload)));
                Ok(())
            })?);
        }
        Ok(all)
    }
}
