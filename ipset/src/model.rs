//! Sets and their entries as the kernel knows them (`linux/netfilter/ipset/ip_set.h`).

use std::{fmt, net::IpAddr};

/// An address family.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Family {
    /// `NFPROTO_IPV4`.
    V4,
    /// `NFPROTO_IPV6`.
    V6,
}

/// As the `ipset` program writes it.
impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::V4 => "inet",
            Self::V6 => "inet6",
        })
    }
}

/// What the entries of a set consist of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SetType {
    /// `hash:ip`
    HashIp,
    /// `hash:net`
    HashNet,
    /// `hash:ip,port`
    HashIpPort,
    /// `hash:ip,port,ip`
    HashIpPortIp,
    /// `hash:ip,port,net`
    HashIpPortNet,
    /// `bitmap:port`
    BitmapPort,
}

impl SetType {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::HashIp, Self::HashNet, Self::HashIpPort, Self::HashIpPortIp, Self::HashIpPortNet, Self::BitmapPort];

    /// The kernel's name of the type.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::HashIp => "hash:ip",
            Self::HashNet => "hash:net",
            Self::HashIpPort => "hash:ip,port",
            Self::HashIpPortIp => "hash:ip,port,ip",
            Self::HashIpPortNet => "hash:ip,port,net",
            Self::BitmapPort => "bitmap:port",
        }
    }

    /// The type of a name.
    #[must_use]
    pub fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|set_type| set_type.name() == name)
    }

    /// The newest revision that is of use here: comments, counters and forced additions (Linux 3.18). Newer ones only bring options that are not
    /// offered, and sets of them cannot be listed by older `ipset` programs.
    pub(crate) fn wanted_revision(self) -> u8 {
        match self {
            Self::HashIp => 4,
            Self::HashNet => 6,
            Self::HashIpPort | Self::HashIpPortIp => 5,
            Self::HashIpPortNet => 7,
            Self::BitmapPort => 3,
        }
    }

    /// The first revision with comments.
    pub(crate) fn comment_revision(self) -> u8 {
        match self {
            Self::HashIp | Self::BitmapPort => 2,
            Self::HashNet => 4,
            Self::HashIpPort | Self::HashIpPortIp => 3,
            Self::HashIpPortNet => 5,
        }
    }
}

impl fmt::Display for SetType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A transport protocol in an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
    /// SCTP.
    Sctp,
    /// Any other, by its number.
    Other(u8),
}

/// What to make.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Specification {
    /// The name, at most 31 bytes.
    pub name: String,
    /// The type.
    pub set_type: SetType,
    /// The family of its addresses. Of no meaning for `bitmap:port`.
    pub family: Family,
    /// Hash types: buckets to begin with, rounded up to a power of two; the kernel's own choice (1,024) if none.
    pub hash_size: Option<u32>,
    /// Hash types: most entries; the kernel's own choice (65,536) if none. Since Linux 5.6 sets of many buckets take somewhat more.
    pub max_elements: Option<u32>,
    /// Bitmap types: first and last port.
    pub port_range: (u16, u16),
    /// Entries may have comments.
    pub comments: bool,
}

impl Specification {
    /// A set without comments, of the kernel's sizes, or of all ports.
    #[must_use]
    pub fn new(name: impl Into<String>, set_type: SetType, family: Family) -> Self {
        Self {
            name: name.into(),
            set_type,
            family,
            hash_size: None,
            max_elements: None,
            port_range: (0, u16::MAX),
            comments: false,
        }
    }

    /// The same with room for comments.
    #[must_use]
    pub fn with_comments(mut self) -> Self {
        self.comments = true;
        self
    }

    /// The same with sizes of its hash.
    #[must_use]
    pub fn with_sizes(mut self, hash_size: u32, max_elements: u32) -> Self {
        self.hash_size = Some(hash_size);
        self.max_elements = Some(max_elements);
        self
    }
}

/// What an entry consists of; has to fit the set's type and family.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Element {
    /// Of `hash:ip`.
    Ip(IpAddr),
    /// Of `hash:net`: the network and the length of its prefix, 1 at least.
    Net(IpAddr, u8),
    /// Of `hash:ip,port`.
    IpPort(IpAddr, Protocol, u16),
    /// Of `hash:ip,port,ip`.
    IpPortIp(IpAddr, Protocol, u16, IpAddr),
    /// Of `hash:ip,port,net`: at last the network and the length of its prefix, 1 at least.
    IpPortNet(IpAddr, Protocol, u16, IpAddr, u8),
    /// Of `bitmap:port`.
    Port(u16),
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp => f.write_str("tcp"),
            Self::Udp => f.write_str("udp"),
            Self::Sctp => f.write_str("sctp"),
            Self::Other(number) => write!(f, "{number}"),
        }
    }
}

/// As the `ipset` program writes it.
impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ip(ip) => write!(f, "{ip}"),
            Self::Net(net, 32) if net.is_ipv4() => write!(f, "{net}"),
            Self::Net(net, 128) => write!(f, "{net}"),
            Self::Net(net, length) => write!(f, "{net}/{length}"),
            Self::IpPort(ip, protocol, port) => write!(f, "{ip},{protocol}:{port}"),
            Self::IpPortIp(ip, protocol, port, other) => write!(f, "{ip},{protocol}:{port},{other}"),
            Self::IpPortNet(ip, protocol, port, net, 32) if net.is_ipv4() => write!(f, "{ip},{protocol}:{port},{net}"),
            Self::IpPortNet(ip, protocol, port, net, 128) => write!(f, "{ip},{protocol}:{port},{net}"),
            Self::IpPortNet(ip, protocol, port, net, length) => write!(f, "{ip},{protocol}:{port},{net}/{length}"),
            Self::Port(port) => write!(f, "{port}"),
        }
    }
}

/// An entry of a set.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Entry {
    /// What it consists of.
    pub element: Element,
    /// A comment of at most 255 bytes, if the set has room for comments.
    pub comment: Option<String>,
    /// What it consists of does not match, though an entry with a larger network may. Only types with networks have this.
    pub nomatch: bool,
}

impl Entry {
    /// An entry without a comment.
    #[must_use]
    pub fn new(element: Element) -> Self {
        Self { element, comment: None, nomatch: false }
    }

    /// An entry of `hash:ip,port`.
    #[must_use]
    pub fn ip_port(ip: IpAddr, protocol: Protocol, port: u16) -> Self {
        Self::new(Element::IpPort(ip, protocol, port))
    }

    /// The same as an exception, see [`Entry::nomatch`].
    #[must_use]
    pub fn excepted(mut self) -> Self {
        self.nomatch = true;
        self
    }

    /// The same with a comment.
    #[must_use]
    pub fn with_comment(mut self, comment: impl Into<String>) -> Self {
        self.comment = Some(comment.into());
        self
    }
}

/// What the kernel says of a set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// The name.
    pub name: String,
    /// The type's name, which may be another than those of [`SetType`].
    pub type_name: String,
    /// The family; none for sets without addresses.
    pub family: Option<Family>,
    /// The revision of the type.
    pub revision: u8,
    /// Hash types: buckets.
    pub hash_size: Option<u32>,
    /// Hash types: most entries.
    pub max_elements: Option<u32>,
    /// Bitmap types: first and last port.
    pub port_range: Option<(u16, u16)>,
    /// There is room for comments.
    pub comments: bool,
    /// An option decides which entries it holds besides what is added and deleted: a time-out, a mask over addresses, or that it makes room by
    /// itself when it is full (`timeout`, `netmask`, `bitmask`, `forceadd`). Sets that this crate makes have none.
    pub changes_entries: bool,
    /// Rules and other sets that use it; it cannot be destroyed while there are any.
    pub references: u32,
    /// Entries, where the kernel says it (Linux 4.9).
    pub elements: Option<u32>,
}

impl Header {
    /// It can be swapped with the set that is asked for, and may hold the same entries: type and family are the same.
    #[must_use]
    pub fn is_of_type(&self, wanted: &Specification) -> bool {
        let is_bitmap = wanted.set_type == SetType::BitmapPort;
        self.type_name == wanted.set_type.name() && (is_bitmap || self.family == Some(wanted.family))
    }

    /// The set is what was asked for: swapping is not needed. Sizes of hashes that were not asked for may be anything, and hashes may have grown. Options that
    /// leave entries as they are, such as counters, may be there.
    #[must_use]
    pub fn fits(&self, wanted: &Specification) -> bool {
        let is_bitmap = wanted.set_type == SetType::BitmapPort;
        self.is_of_type(wanted)
            && self.comments == wanted.comments
            && !self.changes_entries
            && (!is_bitmap || self.port_range == Some(wanted.port_range))
            && wanted.max_elements.is_none_or(|wanted| self.max_elements == Some(wanted))
    }
}

/// A set in a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Set {
    /// About the set.
    pub header: Header,
    /// What is in it; empty for types that are not in [`SetType`].
    pub entries: Vec<Entry>,
}

/// A change of a set's entries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// Adds an entry; one that is there gets the new comment.
    Add(String, Entry),
    /// Deletes an entry; one that is not there is no error.
    Delete(String, Element),
}

impl Change {
    /// Adds an entry to a set.
    #[must_use]
    pub fn add(set: impl Into<String>, entry: Entry) -> Self {
        Self::Add(set.into(), entry)
    }

    /// Deletes an entry from a set.
    #[must_use]
    pub fn delete(set: impl Into<String>, element: Element) -> Self {
        Self::Delete(set.into(), element)
    }
}
