//! Values, registers and verdicts.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

/// Bytes as they are in a packet or a register: addresses and ports in network byte order, marks
/// and indices of interfaces in the machine's order. At most 64 bytes.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Value(pub Vec<u8>);

impl Value {
    /// A concatenation: each part is padded to a multiple of 4 bytes.
    #[must_use]
    pub fn concatenation<'a>(parts: impl IntoIterator<Item = &'a Self>) -> Self {
        let mut bytes = Vec::with_capacity(20);
        for part in parts {
            bytes.extend(&part.0);
            bytes.resize(bytes.len().next_multiple_of(4), 0);
        }
        Self(bytes)
    }

    /// A number in the machine's byte order: a mark, the index of an interface.
    #[must_use]
    pub fn host_u32(number: u32) -> Self {
        Self(number.to_ne_bytes().to_vec())
    }

    /// A number in network byte order.
    #[must_use]
    pub fn network_u32(number: u32) -> Self {
        Self(number.to_be_bytes().to_vec())
    }

    /// A port.
    #[must_use]
    pub fn port(port: u16) -> Self {
        Self(port.to_be_bytes().to_vec())
    }

    /// One byte: an IP protocol, an address family.
    #[must_use]
    pub fn byte(byte: u8) -> Self {
        Self(vec![byte])
    }

    /// The name of an interface, padded to 16 bytes; longer ones are cut, as no interface has such
    /// a name.
    #[must_use]
    pub fn interface_name(name: &str) -> Self {
        let mut bytes: Vec<u8> = name.bytes().take(15).collect();
        bytes.resize(16, 0);
        Self(bytes)
    }
}

impl From<Ipv4Addr> for Value {
    fn from(address: Ipv4Addr) -> Self {
        Self(address.octets().to_vec())
    }
}

impl From<Ipv6Addr> for Value {
    fn from(address: Ipv6Addr) -> Self {
        Self(address.octets().to_vec())
    }
}

impl From<IpAddr> for Value {
    fn from(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(address) => address.into(),
            IpAddr::V6(address) => address.into(),
        }
    }
}

/// Hexadecimal, in words of 4 bytes.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, word) in self.0.chunks(4).enumerate() {
            f.write_str(if index == 0 { "" } else { " " })?;
            for byte in word {
                write!(f, "{byte:02x}")?;
            }
        }
        Ok(())
    }
}

/// The place in the 64 bytes of registers where a value begins, in words of 4 bytes. Longer values
/// reach into the words behind. The kernel refuses places beyond word 15 with `ERANGE`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Register(u32);

impl Register {
    /// `NFT_REG_1`, word 0.
    pub const R1: Self = Self(0);
    /// `NFT_REG_2`, word 4.
    pub const R2: Self = Self(4);
    /// `NFT_REG_3`, word 8.
    pub const R3: Self = Self(8);
    /// `NFT_REG_4`, word 12.
    pub const R4: Self = Self(12);

    /// The register that begins at a word: `NFT_REG32_00` to `NFT_REG32_15`.
    #[must_use]
    pub const fn word(word: u32) -> Self {
        Self(word)
    }

    /// The register behind a value of a length in this one: where the next part of a concatenation
    /// belongs.
    #[must_use]
    pub const fn after(self, length_bytes: u32) -> Self {
        Self(self.0 + length_bytes.div_ceil(4))
    }

    /// The word where it begins.
    #[must_use]
    pub const fn index(self) -> u32 {
        self.0
    }

    /// The number on the wire. The kernel prefers the names of 16-byte registers where both exist.
    pub(crate) fn number(self) -> u32 {
        match (self.0 % 4, self.0 / 4) {
            (0, wide @ 0..=3) => wide + 1,
            _ => self.0.saturating_add(8),
        }
    }

    /// The register of a number; none for the verdict and for numbers that are no register.
    pub(crate) fn of_number(number: u32) -> Option<Self> {
        match number {
            1..=4 => Some(Self((number - 1) * 4)),
            8.. => Some(Self(number - 8)),
            _ => None,
        }
    }
}

/// Where a packet goes from a rule.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Verdict {
    /// The packet passes this base chain; later ones still see it.
    Accept,
    /// The packet is dropped.
    Drop,
    /// The next rule.
    Continue,
    /// The rule behind the jump that led here; at the end of a base chain its policy.
    Return,
    /// A chain, and back.
    Jump(String),
    /// A chain, without a return to this one.
    Goto(String),
    /// Another verdict, by its code: `NF_QUEUE` and the like.
    Other(i32),
}

impl Verdict {
    pub(crate) fn code(&self) -> i32 {
        match self {
            Self::Drop => 0,
            Self::Accept => 1,
            Self::Continue => -1,
            Self::Jump(_) => -3,
            Self::Goto(_) => -4,
            Self::Return => -5,
            Self::Other(code) => *code,
        }
    }

    /// The chain that the verdict leads to.
    #[must_use]
    pub fn chain(&self) -> Option<&str> {
        match self {
            Self::Jump(chain) | Self::Goto(chain) => Some(chain),
            _ => None,
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Accept => f.write_str("accept"),
            Self::Drop => f.write_str("drop"),
            Self::Continue => f.write_str("continue"),
            Self::Return => f.write_str("return"),
            Self::Jump(chain) => write!(f, "jump {chain}"),
            Self::Goto(chain) => write!(f, "goto {chain}"),
            Self::Other(code) => write!(f, "verdict {code}"),
        }
    }
}
