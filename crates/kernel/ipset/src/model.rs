//! Sets and their entries as the kernel represents them (`linux/netfilter/ipset/ip_set.h`).

use std::{fmt, net::IpAddr};

use headgate_netlink::{Family, Protocol, route::Prefix};

/// The type of a set, which determines the fields of its entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SetType {
    /// `hash:ip`
    HashIp,
    /// `hash:ip,port`
    HashIpPort,
    /// `hash:ip,port,ip`
    HashIpPortIp,
    /// `hash:ip,port,net`
    HashIpPortNet,
    /// `hash:net`
    HashNet,
    /// `bitmap:port`
    BitmapPort,
}

impl SetType {
    /// All supported types.
    pub const ALL: [Self; 6] =
        [Self::HashIp, Self::HashIpPort, Self::HashIpPortIp, Self::HashIpPortNet, Self::HashNet, Self::BitmapPort];

    /// The kernel's name for the type.
    pub fn name(self) -> &'static str {
        match self {
            Self::HashIp => "hash:ip",
            Self::HashIpPort => "hash:ip,port",
            Self::HashIpPortIp => "hash:ip,port,ip",
            Self::HashIpPortNet => "hash:ip,port,net",
            Self::HashNet => "hash:net",
            Self::BitmapPort => "bitmap:port",
        }
    }

    /// Returns the type with this name, or `None` if this crate does not support the type.
    pub fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|set_type| set_type.name() == name)
    }

    /// The newest revision that this crate needs (Linux 3.18: comments, counters, forced
    /// additions); older `ipset` programs cannot list sets of newer ones.
    pub(crate) fn wanted_revision(self) -> u8 {
        match self {
            Self::HashIp => 4,
            Self::HashIpPort | Self::HashIpPortIp => 5,
            Self::HashIpPortNet => 7,
            Self::HashNet => 6,
            Self::BitmapPort => 3,
        }
    }
}

impl fmt::Display for SetType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The properties of a set to create.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Specification {
    /// The name, at most 31 bytes.
    pub name: String,
    /// The type of the set.
    pub set_type: SetType,
    /// The family of the addresses. `bitmap:port` ignores the family.
    pub family: Family,
    /// Hash types: the initial number of buckets, rounded up to a power of two. None uses the
    /// kernel's default (1,024).
    pub hash_size: Option<u32>,
    /// Hash types: the maximum number of entries. None uses the kernel's default (65,536). Since
    /// Linux 5.6 sets with many buckets accept somewhat more.
    pub max_elements: Option<u32>,
    /// The time after which an entry expires, in seconds. Adding the entry again renews the time.
    /// None creates a set whose entries do not expire.
    pub timeout_seconds: Option<u32>,
}

impl Specification {
    /// Bitmap types: the first and the last port.
    pub(crate) const PORT_RANGE: (u16, u16) = (0, u16::MAX);

    /// A set without comments and timeout, with default sizes. A port bitmap covers all ports.
    pub fn new(name: impl Into<String>, set_type: SetType, family: Family) -> Self {
        Self { name: name.into(), set_type, family, hash_size: None, max_elements: None, timeout_seconds: None }
    }

    /// Sets the sizes of the hash.
    pub fn with_sizes(mut self, hash_size: u32, max_elements: u32) -> Self {
        self.hash_size = Some(hash_size);
        self.max_elements = Some(max_elements);
        self
    }

    /// Makes entries expire.
    pub fn expiring_after(mut self, timeout_seconds: u32) -> Self {
        self.timeout_seconds = Some(timeout_seconds);
        self
    }
}

/// The fields of an entry. They must match the type and the family of the set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Element {
    /// An entry of `hash:ip`.
    Ip(IpAddr),
    /// An entry of `hash:ip,port`.
    IpPort(IpAddr, Protocol, u16),
    /// An entry of `hash:ip,port,ip`.
    IpPortIp(IpAddr, Protocol, u16, IpAddr),
    /// An entry of `hash:ip,port,net`. The last two are network and prefix length (at least 1).
    IpPortNet(IpAddr, Protocol, u16, IpAddr, u8),
    /// An entry of `hash:net`: the network and its prefix length, at least 1.
    Net(IpAddr, u8),
    /// An entry of `bitmap:port`.
    Port(u16),
}

/// Formats the entry like the `ipset` program.
impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let network = |net: IpAddr, length| {
            let net = Prefix { address: net, length };
            if net == Prefix::host(net.address) { net.address.to_string() } else { net.to_string() }
        };
        match self {
            Self::Ip(ip) => write!(f, "{ip}"),
            Self::IpPort(ip, protocol, port) => write!(f, "{ip},{protocol}:{port}"),
            Self::IpPortIp(ip, protocol, port, other) => write!(f, "{ip},{protocol}:{port},{other}"),
            Self::IpPortNet(ip, protocol, port, net, length) => {
                write!(f, "{ip},{protocol}:{port},{}", network(*net, *length))
            }
            Self::Net(net, length) => f.write_str(&network(*net, *length)),
            Self::Port(port) => write!(f, "{port}"),
        }
    }
}

/// An entry of a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Entry {
    /// The fields that the set matches.
    pub element: Element,
    /// The entry is an exception: addresses in the network of this entry do not match, although a
    /// larger network in the set contains them. Only types with networks support exceptions.
    pub nomatch: bool,
}

/// The properties of a set as the kernel lists them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// The name.
    pub name: String,
    /// The name of the type. The type may be outside [`SetType`].
    pub type_name: String,
    /// The address family. None for sets without addresses.
    pub family: Option<Family>,
    /// The revision of the type.
    pub revision: u8,
    /// Hash types: the number of buckets.
    pub hash_size: Option<u32>,
    /// Hash types: the maximum number of entries.
    pub max_elements: Option<u32>,
    /// Bitmap types: the first and the last port.
    pub port_range: Option<(u16, u16)>,
    /// True if entries may have comments.
    pub comments: bool,
    /// The default time after which an entry expires, in seconds. None if entries do not expire.
    pub timeout_seconds: Option<u32>,
    /// An option changes the entries: masked addresses (`netmask`, `bitmask`), or eviction by a
    /// full set (`forceadd`). Sets of this crate have none.
    pub changes_entries: bool,
    /// The number of rules and other sets that use this set. The kernel destroys a set only at 0.
    pub references: u32,
    /// The number of entries, if the kernel reports it (Linux 4.9).
    pub elements: Option<u32>,
}

impl Header {
    /// Returns whether the set has the wanted type and family. Such a set can be swapped with the
    /// wanted set and can hold the same entries.
    pub fn is_of_type(&self, wanted: &Specification) -> bool {
        let is_bitmap = wanted.set_type == SetType::BitmapPort;
        self.type_name == wanted.set_type.name() && (is_bitmap || self.family == Some(wanted.family))
    }

    /// Returns whether the set already has the wanted properties, so that no swap is needed. Not
    /// compared: hash sizes, which grow, a maximum that `wanted` lacks, and options without effect
    /// on entries.
    pub fn fits(&self, wanted: &Specification) -> bool {
        let is_bitmap = wanted.set_type == SetType::BitmapPort;
        self.is_of_type(wanted)
            && !self.comments
            && !self.changes_entries
            && self.timeout_seconds == wanted.timeout_seconds
            && (!is_bitmap || self.port_range == Some(Specification::PORT_RANGE))
            && wanted.max_elements.is_none_or(|wanted| self.max_elements == Some(wanted))
    }
}

/// A set as the kernel lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Set {
    /// The properties of the set.
    pub header: Header,
    /// The entries. Empty for types outside [`SetType`].
    pub entries: Vec<Entry>,
}

/// A change of a set's entries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// Adds an entry. If the entry exists, its comment is replaced.
    Add(String, Element),
    /// Deletes an entry. A missing entry is not an error.
    Delete(String, Element),
}

impl Change {
    /// Adds an entry to a set.
    pub fn add(set: impl Into<String>, element: Element) -> Self {
        Self::Add(set.into(), element)
    }

    /// Deletes an entry from a set.
    pub fn delete(set: impl Into<String>, element: Element) -> Self {
        Self::Delete(set.into(), element)
    }
}
