//! Values, registers and verdicts.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

/// Bytes as they are in a packet or a register, at most 64. Addresses and ports are in network byte
/// order, marks and interface indices in the machine's byte order.
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

    /// A number in the machine's byte order, such as a mark or an interface index.
    #[must_use]
    pub fn host_u32(number: u32) -> Self {
        Self(number.to_ne_bytes().to_vec())
    }

    /// A port.
    #[must_use]
    pub fn port(port: u16) -> Self {
        Self(port.to_be_bytes().to_vec())
    }

    /// One byte, such as an IP protocol or an address family.
    #[must_use]
    pub fn byte(byte: u8) -> Self {
        Self(vec![byte])
    }

    /// The name of an interface, padded to 16 bytes. A name of more than 15 bytes is truncated; no
    /// interface has such a name.
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

/// Formats the bytes as hexadecimal, in words of 4 bytes.
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

/// The position in the 64 bytes of registers at which a value starts, in words of 4 bytes. Longer
/// values continue into the following words. The kernel rejects positions beyond word 15 with
/// `ERANGE`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Register(u32);

impl Register {
    /// `NFT_REG_1`, word 0.
    pub const R1: Self = Self(0);
    /// `NFT_REG_2`, word 4.
    pub const R2: Self = Self(4);

    /// The register that starts at a word: `NFT_REG32_00` to `NFT_REG32_15`.
    #[must_use]
    pub const fn word(word: u32) -> Self {
        Self(word)
    }

    /// The register after a value of this length in bytes. The next part of a concatenation starts
    /// in this register.
    #[must_use]
    pub const fn after(self, length_bytes: u32) -> Self {
        Self(self.0 + length_bytes.div_ceil(4))
    }

    /// The word at which the register starts.
    #[must_use]
    pub const fn index(self) -> u32 {
        self.0
    }

    /// The number of the register on the wire. If a 16-byte register starts at the same word, the
    /// result is the number of the 16-byte register, as in the kernel.
    pub(crate) fn number(self) -> u32 {
        match (self.0 % 4, self.0 / 4) {
            (0, wide @ 0..=3) => wide + 1,
            _ => self.0.saturating_add(8),
        }
    }

    /// Returns the register with this number, or `None` for the verdict register and for unknown
    /// numbers.
    pub(crate) fn of_number(number: u32) -> Option<Self> {
        match number {
            1..=4 => Some(Self((number - 1) * 4)),
            8.. => Some(Self(number - 8)),
            _ => None,
        }
    }
}

/// How packet processing continues after a rule.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Verdict {
    /// The packet passes this base chain. Later base chains still process it.
    Accept,
    /// The packet is dropped.
    Drop,
    /// Processing continues with the next rule.
    Continue,
    /// Processing continues after the rule that jumped to this chain. In a base chain, the policy
    /// of the chain applies.
    Return,
    /// Processing continues in a chain and returns afterwards.
    Jump(String),
    /// Processing continues in a chain and does not return to the present chain.
    Goto(String),
    /// Another verdict, such as `NF_QUEUE`, by its code.
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

    /// The target chain of the verdict.
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
