//! Operands of chains and expressions: headers, properties, comparisons and flags.

use headgate_netlink::{Fields, Malformed, Request};

use super::Register;
use crate::wire::{Field, UNKNOWN};

/// Declares enumerations with the kernel's numbers, which attributes hold.
macro_rules! numbered {
    ($($(#[$meta:meta])* pub enum $name:ident: $number:ty {
        $($(#[$doc:meta])* $variant:ident = $value:literal,)+
    })+) => { $(
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum $name {
            $($(#[$doc])* $variant = $value,)+
        }

        impl Field for $name {
            fn put(&self, request: Request, kind: u16) -> Request {
                (*self as $number).put(request, kind)
            }

            fn read(fields: &Fields<'_>, kind: u16) -> Result<Self, Malformed> {
                match <$number>::read(fields, kind)? {
                    $($value => Ok(Self::$variant),)+
                    _ => Err(UNKNOWN),
                }
            }
        }
    )+ };
}

numbered! {
    /// The verdict on packets that reach the end of a base chain.
    pub enum Policy: u32 {
        /// The packets continue.
        Accept = 1,
        /// The packets are dropped.
        Drop = 0,
    }

    /// The header that a payload expression reads.
    pub enum PayloadBase: u32 {
        /// The IPv4 or IPv6 header.
        Network = 1,
        /// The TCP, UDP or other transport header. Fragments, for example, do not match.
        Transport = 2,
    }

    /// Packet metadata that is not in the headers (`NFT_META_…`).
    pub enum MetaKey: u32 {
        /// The length of the packet in bytes, 4 bytes.
        Length = 0,
        /// The Ethernet type, 2 bytes in network byte order.
        Protocol = 1,
        /// The packet mark, 4 bytes.
        Mark = 3,
        /// The name of the incoming interface, 16 bytes.
        InputInterfaceName = 6,
        /// `NFPROTO_IPV4` or `NFPROTO_IPV6`, 1 byte.
        NfProtocol = 15,
        /// The transport protocol, 1 byte.
        L4Protocol = 16,
        /// A random number, 4 bytes.
        Random = 24,
    }

    /// Properties of a packet's connection (`NFT_CT_…`).
    pub enum CtKey: u32 {
        /// Bits of `NF_CT_STATE_BIT`, 4 bytes.
        State = 0,
        /// The packet's direction, 1 byte.
        Direction = 1,
        /// Bits of `IPS_…`, 4 bytes.
        Status = 2,
        /// The connection's mark, 4 bytes.
        Mark = 3,
        /// The source address: 4 bytes in IPv4 tables, otherwise 16. Needs a direction.
        Source = 8,
        /// The destination address: 4 bytes in IPv4 tables, otherwise 16. Needs a direction.
        Destination = 9,
        /// The transport protocol, 1 byte.
        Protocol = 10,
        /// The destination port, 2 bytes. Needs a direction.
        DestinationPort = 12,
        /// The IPv4 destination address, 4 bytes, in tables of any family (Linux 4.17). Needs a
        /// direction.
        DestinationIp = 20,
        /// The IPv6 destination address, 16 bytes, in tables of any family (Linux 4.17). Needs a
        /// direction.
        DestinationIp6 = 22,
    }

    /// Direction of a connection's tuple.
    pub enum Direction: u8 {
        /// The direction of the first packet.
        Original = 0,
        /// The direction of the replies.
        Reply = 1,
    }

    /// How a register is compared with a value, from the first byte on.
    pub enum Comparison: u32 {
        /// Equal.
        Equal = 0,
        /// Not equal.
        NotEqual = 1,
        /// Less.
        Less = 2,
        /// Less or equal.
        LessOrEqual = 3,
        /// Greater.
        Greater = 4,
        /// Greater or equal.
        GreaterOrEqual = 5,
    }

    /// How numbers are generated.
    pub enum Generator: u32 {
        /// The generator counts upwards, with one number for each packet that reaches the rule.
        Incremental = 0,
        /// Random numbers.
        Random = 1,
    }

    /// The result that a routing query returns.
    pub enum FibResult: u32 {
        /// The interface, 4 bytes. With `NFTA_FIB_F_PRESENT`: whether a route exists, 1 byte.
        Interface = 1,
        /// The type of the address (`RTN_LOCAL` is 2), 4 bytes.
        AddressType = 3,
    }

    /// The address that is translated.
    pub enum NatKind: u32 {
        /// The source.
        Source = 0,
        /// The destination.
        Destination = 1,
    }

    /// The address family of a translation.
    pub enum AddressFamily: u32 {
        /// IPv4.
        Ip = 2,
        /// IPv6.
        Ip6 = 10,
        /// Both families: for ports without addresses, in tables of family inet.
        Inet = 1,
    }

    /// The operation of a packet on a set.
    pub enum DynamicSetOperation: u32 {
        /// Adds an element if it does not exist.
        Add = 0,
        /// Adds an element. If the element exists, its timeout restarts and its data stays.
        Update = 1,
        /// Deletes an element (Linux 5.1).
        Delete = 2,
    }

    /// Whether a limit counts bytes or packets.
    pub enum Bytes: u32 {
        /// The limit counts bytes.
        Counted = 1,
        /// The limit counts packets.
        Ignored = 0,
    }
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

/// The inputs of a routing query (`NFTA_FIB_F_…`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FibFlags(pub u32);

impl FibFlags {
    /// The source address.
    pub const SOURCE: Self = Self(1);
    /// The destination address.
    pub const DESTINATION: Self = Self(2);

    /// Whether all flags of `other` are set.
    pub fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
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

/// The registers with the first and the last address or port of a range. May be the same.
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
