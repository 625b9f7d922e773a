//! Links and addresses (`linux/rtnetlink.h`, `if_link.h`, `if_addr.h`): what a proxy needs to make a node take addresses for its own.
//!
//! An address costs the kernel more the more there are on the node, above all its removal in IPv6. The example `address_cost` measures it.

mod wire;

use std::{fmt, net::IpAddr};

use super::{Connection, Malformed, NetlinkError, Options, Refusal};

/// A network, or an address with the length of its network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Prefix {
    /// The address.
    pub address: IpAddr,
    /// Bits that name the network.
    pub length: u8,
}

impl Prefix {
    /// One address alone: /32 or /128.
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
    /// Its number.
    pub index: u32,
    /// Its name.
    pub name: String,
    /// Its driver's kind, such as `dummy`; none for hardware and loopback.
    pub kind: Option<String>,
    /// `IFF_…` of `linux/if.h`.
    pub flags: u32,
}

impl Link {
    /// It has been set up.
    #[must_use]
    pub fn is_up(&self) -> bool {
        self.flags & libc::IFF_UP.cast_unsigned() != 0
    }

    /// It answers no ARP requests.
    #[must_use]
    pub fn is_without_arp(&self) -> bool {
        self.flags & libc::IFF_NOARP.cast_unsigned() != 0
    }
}

/// A change of addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// The link gets an address that is not to be a source: of host scope in IPv4, deprecated from the beginning in IPv6, there without
    /// duplicate address detection and prefix route; the kernel delivers to it a moment later. `EEXIST` if it has it.
    AddAddress {
        /// The link's number.
        link: u32,
        /// The address.
        address: Prefix,
    },
    /// The link loses an address; `EADDRNOTAVAIL` if it has it not.
    RemoveAddress {
        /// The link's number.
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
    /// Connects.
    ///
    /// # Errors
    /// The system gives us no socket.
    pub fn open() -> Result<Self, NetlinkError> {
        let options = Options { strict: true, ..Options::default() };
        Ok(Self { connection: Connection::open_with(libc::NETLINK_ROUTE, &options)? })
    }

    /// The link of a name.
    ///
    /// # Errors
    /// When the kernel does not tell.
    pub fn link(&mut self, name: &str) -> Result<Option<Link>, NetlinkError> {
        let mut found = Err(Malformed("no answer describes the link"));
        match self.connection.ask(wire::get_link(name), |_, payload| found = wire::link(payload)) {
            Err(error) if error.refusal_code() == Some(libc::ENODEV) => Ok(None),
            result => result.and_then(|()| Ok(Some(found?))),
        }
    }

    /// Makes a dummy device, down, which answers no ARP requests.
    ///
    /// # Errors
    /// `EEXIST` when the name is taken, `EOPNOTSUPP` when the kernel has no dummy devices (module `dummy`).
    pub fn add_dummy(&mut self, name: &str) -> Result<(), NetlinkError> {
        self.connection.ask(wire::add_dummy(name), |_, _| {})
    }

    /// Sets a link up or down.
    ///
    /// # Errors
    /// `ENODEV` when there is none.
    pub fn set_up(&mut self, link: u32, up: bool) -> Result<(), NetlinkError> {
        self.connection.ask(wire::set_up(link, up), |_, _| {})
    }

    /// Removes a link with its addresses and routes.
    ///
    /// # Errors
    /// `ENODEV` when there is none.
    pub fn remove_link(&mut self, link: u32) -> Result<(), NetlinkError> {
        self.connection.ask(wire::remove_link(link), |_, _| {})
    }

    /// All addresses of a link, of both families.
    ///
    /// # Errors
    /// When the kernel does not list them, or interrupts each of several lists.
    pub fn addresses(&mut self, link: u32) -> Result<Vec<Prefix>, NetlinkError> {
        let mut all = Vec::new();
        for family in [libc::AF_INET, libc::AF_INET6] {
            let list = wire::list_addresses(family, link);
            all.extend(self.list(&list, |payload| Ok(wire::address(payload)?.filter(|(of, _)| *of == link)))?);
        }
        Ok(all.into_iter().map(|(_, address)| address).collect())
    }

    /// Makes changes, many in one send; each that the kernel refuses is given to `refused` by its index, the others are done.
    ///
    /// # Errors
    /// What was done is not known, all or part of it.
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
