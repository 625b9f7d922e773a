//! Address families and transport protocols, which several subsystems number alike.

use std::{fmt, net::IpAddr};

/// An address family.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Family {
    /// `AF_INET`, which equals `NFPROTO_IPV4`.
    V4,
    /// `AF_INET6`, which equals `NFPROTO_IPV6`.
    V6,
}

impl Family {
    const BOTH: [Self; 2] = [Self::V4, Self::V6];

    /// The family of an address.
    #[must_use]
    pub fn of(address: IpAddr) -> Self {
        if address.is_ipv4() { Self::V4 } else { Self::V6 }
    }

    /// The number of the family.
    #[must_use]
    pub fn number(self) -> u8 {
        let number = match self {
            Self::V4 => libc::AF_INET,
            Self::V6 => libc::AF_INET6,
        };
        u8::try_from(number).unwrap_or_default()
    }

    /// The family with a number, if it is IPv4 or IPv6.
    #[must_use]
    pub fn of_number(number: u16) -> Option<Self> {
        Self::BOTH.into_iter().find(|family| u16::from(family.number()) == number)
    }
}

/// Formats the family like the program `ipset`.
impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::V4 => "inet",
            Self::V6 => "inet6",
        })
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
    const NAMED: [Self; 3] = [Self::Tcp, Self::Udp, Self::Sctp];

    /// The number of the protocol.
    #[must_use]
    pub fn number(self) -> u8 {
        let number = match self {
            Self::Tcp => libc::IPPROTO_TCP,
            Self::Udp => libc::IPPROTO_UDP,
            Self::Sctp => libc::IPPROTO_SCTP,
            Self::Other(number) => return number,
        };
        u8::try_from(number).unwrap_or_default()
    }

    /// The protocol with a number.
    #[must_use]
    pub fn of_number(number: u8) -> Self {
        Self::NAMED.into_iter().find(|named| named.number() == number).unwrap_or(Self::Other(number))
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
