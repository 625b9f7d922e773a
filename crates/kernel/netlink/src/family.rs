//! Address families and transport protocols, which several subsystems number alike.

use std::{fmt, net::IpAddr};

/// An address family.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Family {
    /// `AF_INET`, which equals `NFPROTO_IPV4`.
    V4 = libc::AF_INET as isize,
    /// `AF_INET6`, which equals `NFPROTO_IPV6`.
    V6 = libc::AF_INET6 as isize,
}

impl Family {
    /// The family of an address.
    pub fn of(address: IpAddr) -> Self {
        if address.is_ipv4() { Self::V4 } else { Self::V6 }
    }

    /// The number of the family.
    pub fn number(self) -> u8 {
        self as u8
    }

    /// The family with a number, if it is IPv4 or IPv6.
    pub fn of_number(number: u16) -> Option<Self> {
        [Self::V4, Self::V6].into_iter().find(|family| u16::from(family.number()) == number)
    }
}

/// Formats the family like the program `ipset`.
impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if *self == Self::V4 { "inet" } else { "inet6" })
    }
}

/// A transport protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Protocol {
    /// `IPPROTO_TCP`.
    Tcp,
    /// `IPPROTO_UDP`.
    Udp,
    /// `IPPROTO_SCTP`.
    Sctp,
    /// Another protocol, by its number.
    Other(u8),
}

impl Protocol {
    /// The number of the protocol.
    pub fn number(self) -> u8 {
        match self {
            Self::Tcp => 6,
            Self::Udp => 17,
            Self::Sctp => 132,
            Self::Other(number) => number,
        }
    }

    /// The protocol with a number.
    pub fn of_number(number: u8) -> Self {
        let named = [Self::Tcp, Self::Udp, Self::Sctp].into_iter().find(|named| named.number() == number);
        named.unwrap_or(Self::Other(number))
    }
}

/// Formats the protocol like the program `ipset`.
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
