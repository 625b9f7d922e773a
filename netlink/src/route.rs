//! Links and addresses (`linux/rtnetlink.h`, `if_link.h`, `if_addr.h`). A service proxy uses them
//! to make Service addresses local to the node.
//!
//! The cost of an address grows with the number of addresses on the node, above all for removals in
//! IPv6. The example `address_cost` measures it.

mod wire;

use std::{fmt, net::IpAddr};

use super::{Connection, Malformed, NetlinkError, Options, Refusal};

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
    #[must_use]
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
    /// Whether the link is set up (`IFF_UP`).
    #[must_use]
    pub fn is_up(&self) -> bool {
        self.flags & libc::IFF_UP.cast_unsigned() != 0
    }

    /// Whether the link answers no ARP requests (`IFF_NOARP`).
    #[must_use]
    pub fn is_without_arp(&self) -> bool {
        self.flags & libc::IFF_NOARP.cast_unsigned() != 0
    }
}

/// One change of a link's addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// Adds an address that the kernel does not select as a source address. An IPv4 address has
    /// host scope. An IPv6 address is deprecated from the beginning, without duplicate address
    /// detection and prefix route; the kernel accepts packets to it a moment later. Fails with
    /// `EEXIST` if the link has the address.
    AddAddress {
        /// The index of the link.
        link: u32,
        /// The address.
        address: Prefix,
    },
    /// Removes an address. Fails with `EADDRNOTAVAIL` if the link does not have it.
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
    /// Opens a connection.
    ///
    /// # Errors
    /// The kernel creates no socket.
    pub fn open() -> Result<Self, NetlinkError> {
        let options = Options { strict: true, ..Options::default() };
        Ok(Self { connection: Connection::open_with(libc::NETLINK_ROUTE, &options)? })
    }

    /// The link with a name, or none.
    ///
    /// # Errors
    /// The kernel rejects the query or does not answer.
    pub fn link(&mut self, name: &str) -> Result<Option<Link>, NetlinkError> {
        let mut found = Err(Malformed("an answer without the link"));
        match self.connection.ask(wire::get_link(name), |_, payload| found = wire::link(payload)) {
            Err(error) if error.refusal_code() == Some(libc::ENODEV) => Ok(None),
            result => result.and_then(|()| Ok(Some(found?))),
        }
    }

    /// Creates a dummy device that answers no ARP requests. The device is down.
    ///
    /// # Errors
    /// `EEXIST` if the name is in use, `EOPNOTSUPP` if the kernel has no dummy devices (module
    /// `dummy`).
    pub fn add_dummy(&mut self, name: &str) -> Result<(), NetlinkError> {
        self.connection.ask(wire::add_dummy(name), |_, _| {})
    }

    /// Sets a link up or down.
    ///
    /// # Errors
    /// `ENODEV` if the link does not exist.
    pub fn set_up(&mut self, link: u32, up: bool) -> Result<(), NetlinkError> {
        self.connection.ask(wire::set_up(link, up), |_, _| {})
    }

    /// Removes a link with its addresses and routes.
    ///
    /// # Errors
    /// `ENODEV` if the link does not exist.
    pub fn remove_link(&mut self, link: u32) -> Result<(), NetlinkError> {
        self.connection.ask(wire::remove_link(link), |_, _| {})
    }

    /// All IPv4 and IPv6 addresses of a link.
    ///
    /// # Errors
    /// The kernel does not list them, or interrupts every attempt to list them.
    pub fn addresses(&mut self, link: u32) -> Result<Vec<Prefix>, NetlinkError> {
        let mut all = Vec::new();
        for family in [libc::AF_INET, libc::AF_INET6] {
            let list = wire::list_addresses(family, link);
            all.extend(self.list(&list, |payload| Ok(wire::address(payload)?.filter(|(of, _)| *of == link)))?);
        }
        Ok(all.into_iter().map(|(_, address)| address).collect())
    }

    /// Executes changes, many in one send. `refused` receives the index of each change that the
    /// kernel rejects. The kernel executes the other changes.
    ///
    /// # Errors
    /// The kernel may have executed none, some or all of the changes.
    pub fn change<'a>(
        &mut self,
        changes: impl IntoIterator<Item = &'a Change>,
        refused: impl FnMut(usize, Refusal),
    ) -> Result<(), NetlinkError> {
        self.connection.execute(changes.into_iter().map(wire::change), refused)
    }

    fn list<T>(
        &mut self,
        request: &super::Request,
        read: impl Fn(&[u8]) -> Result<Option<T>, Malformed>,
    ) -> Result<Vec<T>, NetlinkError> {
        self.connection.list(request, |found: &mut Vec<T>, payload| {
            found.extend(read(payload)?);
            Ok(())
        })
    }
}
