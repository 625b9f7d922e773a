//! What expressions are told: which header, which property, how to compare.

use std::ops::BitOr;

use super::Register;

/// Header of the packet that a value is read from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PayloadBase {
    /// The link layer's.
    LinkLayer,
    /// IPv4's or IPv6's.
    Network,
    /// TCP's, UDP's and the like. Packets without one, such as fragments, do not match.
    Transport,
}

/// Properties of a packet that are not in its headers (`NFT_META_…`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MetaKey {
    /// Its length in bytes, 4 bytes.
    Length,
    /// Its Ethernet type, 2 bytes in network byte order.
    Protocol,
    /// Its mark, 4 bytes.
    Mark,
    /// The index of the interface it arrived on, 4 bytes.
    InputInterface,
    /// The index of the interface it leaves on, 4 bytes.
    OutputInterface,
    /// The name of the interface it arrived on, 16 bytes.
    InputInterfaceName,
    /// The name of the interface it leaves on, 16 bytes.
    OutputInterfaceName,
    /// User of the sending socket, 4 bytes.
    SocketUser,
    /// `NFPROTO_IPV4` or `NFPROTO_IPV6`, 1 byte.
    NfProtocol,
    /// Its transport protocol, 1 byte.
    L4Protocol,
    /// `PACKET_HOST` and the like, 1 byte.
    PacketType,
    /// A random number, 4 bytes.
    Random,
}

/// Properties of a packet's connection (`NFT_CT_…`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CtKey {
    /// Bits of `NF_CT_STATE_BIT`, 4 bytes.
    State,
    /// The packet's direction, 1 byte.
    Direction,
    /// Bits of `IPS_…`, 4 bytes.
    Status,
    /// The connection's mark, 4 bytes.
    Mark,
    /// Milliseconds until it expires, 4 bytes.
    Expiration,
    /// `NFPROTO_IPV4` or `NFPROTO_IPV6`, 1 byte.
    L3Protocol,
    /// Source address; 4 bytes in tables of IPv4, else 16. Needs a direction.
    Source,
    /// Destination address, likewise.
    Destination,
    /// Transport protocol, 1 byte.
    Protocol,
    /// Source port, 2 bytes. Needs a direction.
    SourcePort,
    /// Destination port, 2 bytes. Needs a direction.
    DestinationPort,
    /// Source address of IPv4, 4 bytes, in tables of any family (Linux 4.17). Needs a direction.
    SourceIp,
    /// Destination address of IPv4, likewise.
    DestinationIp,
    /// Source address of IPv6, 16 bytes, likewise.
    SourceIp6,
    /// Destination address of IPv6, likewise.
    DestinationIp6,
    /// The connection's number, 4 bytes.
    Id,
}

/// Direction of a connection's tuple.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    /// As its first packet.
    Original,
    /// As the answers to it.
    Reply,
}

/// How a register is compared with a value, byte by byte from the first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Comparison {
    /// Equal.
    Equal,
    /// Not equal.
    NotEqual,
    /// Less.
    Less,
    /// Less or equal.
    LessOrEqual,
    /// Greater.
    Greater,
    /// Greater or equal.
    GreaterOrEqual,
}

/// Between the byte orders of the machine and the network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Conversion {
    /// From network to machine.
    ToHost,
    /// From machine to network.
    ToNetwork,
}

/// What a lookup is for. In the first case the rule continues when the key is found, in the second
/// when it is not; in the others a key that is not found ends the rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LookupResult {
    /// The key has to be there.
    Present,
    /// The key must not be there.
    Absent,
    /// What the map's element leads to is put into a register.
    Into(Register),
    /// The map's element leads to a verdict, which is followed.
    Verdict,
}

/// How numbers are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Generator {
    /// Each one more than the last, of all packets of the rule.
    Incremental,
    /// At random.
    Random,
}

/// What is asked of the routing table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FibResult {
    /// Index of the interface, 4 bytes; with [`FibFlags::PRESENT`] whether there is a route, 1
    /// byte.
    Interface,
    /// Name of the interface, 16 bytes; likewise with [`FibFlags::PRESENT`].
    InterfaceName,
    /// Type of the address (`RTN_LOCAL` is 2), 4 bytes.
    AddressType,
}

/// What the routing table is asked with (`NFTA_FIB_F_…`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FibFlags(pub u32);

impl FibFlags {
    /// The source address.
    pub const SOURCE: Self = Self(1);
    /// The destination address.
    pub const DESTINATION: Self = Self(2);
    /// The packet's mark.
    pub const MARK: Self = Self(4);
    /// The interface on which the packet arrived.
    pub const INPUT: Self = Self(8);
    /// The interface on which the packet leaves.
    pub const OUTPUT: Self = Self(16);
    /// Only whether there is a route.
    pub const PRESENT: Self = Self(32);

    /// All flags of `other` are set.
    #[must_use]
    pub fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

impl BitOr for FibFlags {
    type Output = Self;
    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// Which address is translated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum NatKind {
    /// The source.
    Source,
    /// The destination.
    Destination,
}

/// Address families of translations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AddressFamily {
    /// IPv4.
    Ip,
    /// IPv6.
    Ip6,
    /// Both: for ports without addresses, in tables of family inet.
    Inet,
}

impl AddressFamily {
    /// `NFPROTO_…`.
    #[must_use]
    pub fn number(self) -> u32 {
        match self {
            Self::Inet => 1,
            Self::Ip => 2,
            Self::Ip6 => 10,
        }
    }
}

/// How translations choose among what is allowed (`NF_NAT_RANGE_…`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct NatFlags(pub u32);

impl NatFlags {
    /// Nothing in particular.
    pub const NONE: Self = Self(0);
    /// A random port.
    pub const RANDOM: Self = Self(4);
    /// The same address for each connection of a client.
    pub const PERSISTENT: Self = Self(8);
    /// A random port, by a generator that cannot be guessed.
    pub const FULLY_RANDOM: Self = Self(16);
}

impl BitOr for NatFlags {
    type Output = Self;
    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// Registers with the ends of a range of addresses or ports, which may be one and the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RegisterRange {
    /// The first.
    pub first: Register,
    /// The last.
    pub last: Register,
}

impl From<Register> for RegisterRange {
    fn from(register: Register) -> Self {
        Self { first: register, last: register }
    }
}

/// How a packet is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reject {
    /// ICMP or ICMPv6 "unreachable" of a code, for tables of one of these families.
    Icmp(u8),
    /// A TCP reset.
    TcpReset,
    /// Either family's "unreachable": 0 no route, 1 port, 2 host, 3 prohibited.
    Icmpx(u8),
}

/// What a packet does to a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DynamicSetOperation {
    /// Adds an element, if it is not there.
    Add,
    /// Adds an element, or renews the timeout of the one that is there, which keeps its data.
    Update,
    /// Deletes an element (Linux 5.1).
    Delete,
}

/// What [`super::Expression::Socket`] tells of the socket that a packet belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SocketKey {
    /// Whether it is transparent (`IP_TRANSPARENT`), 1 byte.
    Transparent,
    /// Its mark, 4 bytes.
    Mark,
    /// Whether it is bound to the wildcard address, 1 byte (Linux 5.9).
    Wildcard,
}

/// What a limit counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Bytes {
    /// Bytes.
    Counted,
    /// Packets.
    Ignored,
}
