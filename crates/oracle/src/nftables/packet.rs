//! A packet, and what registers hold while a rule reads it.

use headgate_core::{forwarding::Origin, frontends::Frontend};
use nftables_netlink::{CtKey, Expression, FibFlags, FibResult, MetaKey, PayloadBase, Register, Value};

use super::dump::{NftablesDump, protocol_number};

/// `NF_CT_STATE_BIT(IP_CT_NEW)` of `linux/netfilter/nf_conntrack_common.h`.
const STATE_NEW: u32 = 8;
/// `RTN_LOCAL` and `RTN_UNICAST` of `linux/rtnetlink.h`.
const LOCAL: u32 = 2;
const UNICAST: u32 = 1;

/// The first packet of a connection, which is not translated.
#[derive(Debug, Clone, Copy)]
pub(super) struct Packet {
    pub(super) origin: Origin,
    pub(super) frontend: Frontend,
}

/// Four bytes of a register.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Word {
    Bytes([u8; 4]),
    /// A word of the source address, of which these first bits are kept.
    Source(u8, u8),
    /// A word of the destination address, which is an address of the node.
    NodeAddress,
    /// A word of the name of the interface on which the packet arrived.
    Interface,
    /// A value that the decoder does not know, and that no rule of Headgate compares.
    Unknown,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Registers([Word; 16]);

impl Default for Registers {
    fn default() -> Self {
        Self([Word::Unknown; 16])
    }
}

impl Registers {
    fn words(&self, at: Register, bytes: usize) -> impl Iterator<Item = Word> {
        let first = at.index() as usize;
        (first..first + bytes.div_ceil(4)).map(|index| self.0.get(index).copied().unwrap_or(Word::Unknown))
    }

    /// Loads bytes. The rest of the last word is zero.
    pub(super) fn load(&mut self, to: Register, bytes: &[u8]) {
        for (index, part) in bytes.chunks(4).enumerate() {
            let mut word = [0; 4];
            word[..part.len()].copy_from_slice(part);
            self.set(to, index, Word::Bytes(word));
        }
    }

    pub(super) fn load_number(&mut self, to: Register, number: u32) {
        self.load(to, &number.to_ne_bytes());
    }

    pub(super) fn set(&mut self, to: Register, index: usize, word: Word) {
        if let Some(register) = self.0.get_mut(to.index() as usize + index) {
            *register = word;
        }
    }

    pub(super) fn fill(&mut self, to: Register, bytes: usize, word: impl Fn(u8) -> Word) {
        for (index, part) in (0u8..).zip((0..bytes).step_by(4)) {
            self.set(to, part / 4, word(index));
        }
    }

    /// What the registers hold, if it is known as a whole.
    pub(super) fn bytes(&self, at: Register, length: usize) -> Option<Vec<u8>> {
        let mut all = Vec::with_capacity(length.next_multiple_of(4));
        for word in self.words(at, length) {
            let Word::Bytes(bytes) = word else { return None };
            all.extend(bytes);
        }
        all.truncate(length);
        Some(all)
    }

    /// What the registers hold.
    pub(super) fn key(&self, at: Register, length: usize) -> Key {
        let mut known = Vec::with_capacity(length);
        let mut words = self.words(at, length).peekable();
        while let Some(Word::Bytes(bytes)) = words.peek() {
            known.extend(bytes);
            words.next();
        }
        known.truncate(length);
        match words.next() {
            None => Key::Known(known),
            Some(Word::Source(0, prefix_length)) => Key::EndsWithSource(known, prefix_length),
            Some(Word::NodeAddress) if known.is_empty() => Key::NodeAddress,
            Some(Word::Interface) if known.is_empty() => Key::Interface,
            Some(_) => Key::Unknown,
        }
    }

    /// Keeps the first bits of the source address.
    pub(super) fn mask_source(&mut self, to: Register, bytes: usize, prefix_length: u8) {
        self.fill(to, bytes, |index| Word::Source(index, prefix_length));
    }
}

/// A key or value in registers.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Key {
    Known(Vec<u8>),
    /// Known bytes, and then this many bits of the source address.
    EndsWithSource(Vec<u8>, u8),
    NodeAddress,
    Interface,
    Unknown,
}

impl Packet {
    /// Executes an expression that loads a property of the packet. False for others.
    pub(super) fn load(&self, expression: &Expression, dump: &NftablesDump, registers: &mut Registers) -> bool {
        let bytes = dump.address_bytes();
        let (source, destination) = if bytes == 4 { (12, 16) } else { (8, 24) };
        match *expression {
            Expression::Payload { base: PayloadBase::Network, offset, length, to }
                if offset == source && length as usize <= bytes =>
            {
                // `nft` loads the first bytes for a range whose prefix ends with a byte.
                registers.mask_source(to, length as usize, u8::try_from(length * 8).unwrap_or(u8::MAX));
            }
            Expression::Payload { base: PayloadBase::Network, offset, length, to }
                if offset == destination && length as usize <= bytes =>
            {
                match self.frontend {
                    Frontend::Address(address, ..) => registers.load(to, &Value::from(address).0[..length as usize]),
                    Frontend::NodePort(..) => registers.fill(to, length as usize, |_| Word::NodeAddress),
                }
            }
            Expression::Payload { base: PayloadBase::Transport, offset: 2, length: 2, to } => {
                registers.load(to, &self.frontend.port().to_be_bytes());
            }
            Expression::Payload { length, to, .. } => registers.fill(to, length as usize, |_| Word::Unknown),
            Expression::Meta { key: MetaKey::L4Protocol, to } => {
                registers.load(to, &[protocol_number(self.frontend.protocol())]);
            }
            Expression::Meta { key: MetaKey::Mark, to }
            | Expression::Conntrack { key: CtKey::Status | CtKey::Mark, to, .. } => registers.load_number(to, 0),
            Expression::Meta { key: MetaKey::InputInterfaceName, to } => registers.fill(to, 16, |_| Word::Interface),
            Expression::Conntrack { key: CtKey::State, to, .. } => registers.load_number(to, STATE_NEW),
            Expression::Fib { result: FibResult::AddressType, flags, to } => {
                let is_local = if flags.contains(FibFlags::SOURCE) {
                    self.origin == Origin::Node
                } else {
                    matches!(self.frontend, Frontend::NodePort(..))
                };
                registers.load_number(to, if is_local { LOCAL } else { UNICAST });
            }
            Expression::Meta { to, .. } | Expression::Conntrack { to, .. } | Expression::Fib { to, .. } => {
                registers.fill(to, 16, |_| Word::Unknown);
            }
            _ => return false,
        }
        true
    }
}
