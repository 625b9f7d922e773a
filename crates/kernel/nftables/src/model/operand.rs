//! Operands of expressions: headers, properties, comparisons and flags.

use super::Register;

/// The header that a payload expression reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PayloadBase {
    /// The link-layer header.
    LinkLayer,
    /// The IPv4 or IPv6 header.
    Network,
    /// The TCP, UDP or other transport header. Packets without a transport header, such as
    /// fragments, do not match.
    Transport,
}

/// Packet metadata that is not in the headers (`NFT_META_…`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MetaKey {
    /// The length of the packet in bytes, 4 bytes.
    Length,
    /// The Ethernet type, 2 bytes in network byte order.
    Protocol,
    /// The packet mark, 4 bytes.
    Mark,
    /// The index of the incoming interface, 4 bytes.
    InputInterface,
    /// The index of the outgoing interface, 4 bytes.
    OutputInterface,
    /// The name of the incoming interface, 16 bytes.
    InputInterfaceName,
    /// The name of the outgoing interface, 16 bytes.
    OutputInterfaceName,
    /// The user ID of the sending socket, 4 bytes.
    SocketUser,
    /// `NFPROTO_IPV4` or `NFPROTO_IPV6`, 1 byte.
    NfProtocol,
    /// The transport protocol, 1 byte.
    L4Protocol,
    /// The packet type, such as `PACKET_HOST`, 1 byte.
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
    /// The time until the connection expires in milliseconds, 4 bytes.
    Expiration,
    /// `NFPROTO_IPV4` or `NFPROTO_IPV6`, 1 byte.
    L3Protocol,
    /// The source address: 4 bytes in IPv4 tables, otherwise 16. Needs a direction.
    Source,
    /// The destination address: 4 bytes in IPv4 tables, otherwise 16. Needs a direction.
    Destination,
    /// The transport protocol, 1 byte.
    Protocol,
    /// The source port, 2 bytes. Needs a direction.
    SourcePort,
    /// The destination port, 2 bytes. Needs a direction.
    DestinationPort,
    /// The IPv4 source address, 4 bytes, in tables of any family (Linux 4.17). Needs a direction.
    SourceIp,
    /// The IPv4 destination address, 4 bytes, in tables of any family (Linux 4.17). Needs a
    /// direction.
    DestinationIp,
    /// The IPv6 source address, 16 bytes, in tables of any family (Linux 4.17). Needs a direction.
    SourceIp6,
    /// The IPv6 destination address, 16 bytes, in tables of any family (Linux 4.17). Needs a
    /// direction.
    DestinationIp6,
    /// The ID of the connection, 4 bytes.
    Id,
}

/// Direction of a connection's tuple.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    /// The direction of the first packet.
    Original,
    /// The direction of the replies.
    Reply,
}

/// How a register is compared with a value. Bytes are compared in order, starting with the first
/// byte.
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

/// How a lookup's result is used. With [`Self::Absent`] the rule continues if the key is not found.
/// In all other cases the rule ends if the key is not found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LookupResult {
    /// The key must be in the set.
    Present,
    /// The key must not be in the set.
    Absent,
    /// Loads the data of the map element into a register.
    Into(Register),
    /// Ends the rule with the verdict of the map element.
    Verdict,
}

/// How numbers are generated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Generator {
    /// The generator counts upwards, with one number for each packet that reaches the rule.
    Incremental,
    /// Random numbers.
    Random,
}

/// The result that a routing query returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FibResult {
    /// The index of the interface, 4 bytes. With `NFTA_FIB_F_PRESENT`: whether a route exists, 1
    /// byte.
    Interface,
    /// The name of the interface, 16 bytes. With `NFTA_FIB_F_PRESENT`: whether a route exists, 1
    /// byte.
    InterfaceName,
    /// The type of the address (`RTN_LOCAL` is 2), 4 bytes.
    AddressType,
}

/// The inputs of a routing query (`NFTA_FIB_F_…`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FibFlags(pub u32);

impl FibFlags {
    /// The source address.
    pub const SOURCE: Self = Self(1);
    /// The destination address.
    pub const DESTINATION: Self = Self(2);

    /// Whether all flags of `other` are set.
    #[must_use]
    pub fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

/// The address that is translated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum NatKind {
    /// The source.
    Source,
    /// The destination.
    Destination,
}

/// The address family of a translation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AddressFamily {
    /// IPv4.
    Ip,
    /// IPv6.
    Ip6,
    /// Both families: for ports without addresses, in tables of family inet.
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

/// How a translation selects among the allowed addresses and ports (`NF_NAT_RANGE_…`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct NatFlags(pub u32);

impl NatFlags {
    /// The kernel's default.
    pub const NONE: Self = Self(0);
    /// All connections of a client are translated to the same address.
    pub const PERSISTENT: Self = Self(8);
    /// A random port from a generator whose results are unpredictable.
    pub const FULLY_RANDOM: Self = Self(16);
}

/// The registers that hold the first and the last address or port of a range. Both may be the same
/// register.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RegisterRange {
    /// The register that holds the first address or port.
    pub first: Register,
    /// The register that holds the last address or port.
    pub last: Register,
}

impl From<Register> for RegisterRange {
    fn from(register: Register) -> Self {
        Self { first: register, last: register }
    }
}

/// How a packet is rejected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reject {
    /// An "unreachable" message with this code: ICMP in IPv4 tables, ICMPv6 in IPv6 tables.
    Icmp(u8),
    /// A TCP reset.
    TcpReset,
    /// An "unreachable" message of the packet's family: 0 no route, 1 port, 2 host, 3 prohibited.
    Icmpx(u8),
}

/// The operation of a packet on a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DynamicSetOperation {
    /// Adds an element if it does not exist.
    Add,
    /// Adds an element. If the element exists, its timeout restarts and its data stays.
    Update,
    /// Deletes an element (Linux 5.1).
    Delete,
}

/// Whether a limit counts bytes or packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Bytes {
    /// The limit counts bytes.
    Counted,
    /// The limit counts packets.
    Ignored,
}
