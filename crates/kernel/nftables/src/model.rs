//! Tables, chains and rules as the kernel represents them (`linux/netfilter/nf_tables.h`).

mod expression;
mod operand;

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

pub use expression::{DynamicSet, Expression};
pub use operand::{
    AddressFamily, Bytes, Comparison, CtKey, Direction, DynamicSetOperation, FibFlags, FibResult, Generator,
    LookupResult, MetaKey, NatFlags, NatKind, PayloadBase, Policy, RegisterRange, Reject,
};

/// Protocol families of tables (`NFPROTO_…`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Family {
    /// IPv4 and IPv6 together.
    Inet = 1,
    /// IPv4.
    Ip = 2,
    /// ARP.
    Arp = 3,
    /// Ingress and egress of devices.
    Netdev = 5,
    /// Bridges.
    Bridge = 7,
    /// IPv6.
    Ip6 = 10,
}

impl Family {
    /// All families.
    pub const ALL: [Self; 6] = [Self::Inet, Self::Ip, Self::Arp, Self::Netdev, Self::Bridge, Self::Ip6];

    /// The kernel's number of the family.
    pub fn number(self) -> u8 {
        self as u8
    }

    /// Returns the family with this number.
    pub fn of_number(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|family| family.number() == number)
    }
}

/// Formats the family like the `nft` program.
impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Inet => "inet",
            Self::Ip => "ip",
            Self::Arp => "arp",
            Self::Netdev => "netdev",
            Self::Bridge => "bridge",
            Self::Ip6 => "ip6",
        })
    }
}

/// The family and the name of a table.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TableName {
    /// The family.
    pub family: Family,
    /// The name, which is unique in the family. At most 255 bytes.
    pub name: String,
}

impl TableName {
    /// The name of a table in a family.
    pub fn new(family: Family, name: impl Into<String>) -> Self {
        Self { family, name: name.into() }
    }
}

impl fmt::Display for TableName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.family, self.name)
    }
}

/// A table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    /// The family and the name.
    pub name: TableName,
    /// `NFT_TABLE_F_DORMANT`: the base chains process no packets.
    pub dormant: bool,
    /// `NFT_TABLE_F_OWNER` (Linux 5.12): only the socket that created the table may change it. The
    /// kernel deletes the table when the socket closes. The flag cannot be added or removed later.
    pub owned: bool,
    /// `NFT_TABLE_F_PERSIST` (Linux 6.9): an owned table outlives its owner's socket without owner,
    /// and any socket may change it. Adding it again with both flags adopts it.
    pub persistent: bool,
    /// The netlink port of the owning socket, in listed tables. Ignored for a new table.
    pub owner_port: Option<u32>,
    /// Bytes for user space. [`crate::comment`] encodes a comment that `nft` prints.
    pub user_data: Vec<u8>,
}

impl Table {
    /// A table without flags.
    pub fn new(name: TableName) -> Self {
        Self { name, dormant: false, owned: false, persistent: false, owner_port: None, user_data: Vec::new() }
    }

    /// Makes the table persistent and owned by the socket that creates it.
    pub fn owned_and_persistent(self) -> Self {
        Self { owned: true, persistent: true, ..self }
    }
}

/// The type of a base chain. The kernel accepts address translation only in chains of type `nat`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ChainType {
    /// `filter`
    Filter,
    /// `nat`: processes the first packet of each connection.
    Nat,
    /// `route`: the kernel routes changed packets again.
    Route,
}

impl ChainType {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Filter => "filter",
            Self::Nat => "nat",
            Self::Route => "route",
        }
    }

    pub(crate) fn of_name(name: &str) -> Option<Self> {
        [Self::Filter, Self::Nat, Self::Route].into_iter().find(|kind| kind.name() == name)
    }
}

/// The point in the network stack at which a base chain is called (`NF_INET_…`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Hook {
    /// All incoming packets.
    Prerouting,
    /// Packets to this host.
    Input,
    /// Forwarded packets.
    Forward,
    /// Packets that this host sends.
    Output,
    /// All outgoing packets.
    Postrouting,
    /// A hook of another family, by its number.
    Other(u32),
}

impl Hook {
    /// The five hooks of IPv4 and IPv6.
    pub const ALL: [Self; 5] = [Self::Prerouting, Self::Input, Self::Forward, Self::Output, Self::Postrouting];

    pub(crate) fn number(self) -> u32 {
        match self {
            Self::Prerouting => 0,
            Self::Input => 1,
            Self::Forward => 2,
            Self::Output => 3,
            Self::Postrouting => 4,
            Self::Other(number) => number,
        }
    }

    pub(crate) fn of_number(family: Family, number: u32) -> Self {
        let is_ip = matches!(family, Family::Inet | Family::Ip | Family::Ip6);
        let known = Self::ALL.into_iter().find(|hook| is_ip && hook.number() == number);
        known.unwrap_or(Self::Other(number))
    }
}

/// The properties of a base chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BaseChain {
    /// The type of the chain.
    pub kind: ChainType,
    /// The hook at which the chain is called.
    pub hook: Hook,
    /// Chains of lower priority are called first.
    pub priority: i32,
    /// The verdict at the end of the chain.
    pub policy: Policy,
}

/// A chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chain {
    /// The table of the chain.
    pub table: TableName,
    /// The name, which is unique in the table. At most 255 bytes.
    pub name: String,
    /// Properties of a base chain. Other chains process packets only after a jump.
    pub base: Option<BaseChain>,
    /// Bytes for user space.
    pub user_data: Vec<u8>,
}

impl Chain {
    /// A chain that processes packets only after a jump.
    pub fn regular(table: &TableName, name: impl Into<String>) -> Self {
        Self { table: table.clone(), name: name.into(), base: None, user_data: Vec::new() }
    }

    /// A base chain, which the kernel calls.
    pub fn base(table: &TableName, name: impl Into<String>, base: BaseChain) -> Self {
        Self { base: Some(base), ..Self::regular(table, name) }
    }
}

/// A rule. Its expressions are evaluated in order until one does not match or issues a verdict.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// The table of the rule.
    pub table: TableName,
    /// The chain of the rule.
    pub chain: String,
    /// The expressions, in order.
    pub expressions: Vec<Expression>,
    /// Bytes for user space. [`crate::comment`] encodes a comment that `nft` prints.
    pub user_data: Vec<u8>,
}

impl Rule {
    /// A rule of a chain.
    pub fn new(table: &TableName, chain: impl Into<String>, expressions: Vec<Expression>) -> Self {
        Self { table: table.clone(), chain: chain.into(), expressions, user_data: Vec::new() }
    }

    /// Adds a comment, which `nft` prints.
    pub fn with_comment(self, text: &str) -> Self {
        Self { user_data: comment(text), ..self }
    }
}

/// An object with its handle.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed<T> {
    /// The number that the kernel assigned. It is unique in the table and never reused.
    pub handle: u64,
    /// The object.
    pub object: T,
}

/// Encodes a comment of a table, chain or rule as user data that `nft` prints, at most 253 bytes.
pub fn comment(text: &str) -> Vec<u8> {
    let end = text.floor_char_boundary(253);
    let text = text.get(..end).unwrap_or_default();
    // The comment has type 0 in all three. The length includes the final zero byte.
    let mut bytes = vec![0, u8::try_from(text.len() + 1).unwrap_or(u8::MAX)];
    bytes.extend(text.as_bytes());
    bytes.push(0);
    bytes
}

/// Decodes the comment in the user data of a table, chain or rule.
pub fn comment_of(user_data: &[u8]) -> Option<&str> {
    let mut rest = user_data;
    while let [kind, length, after @ ..] = rest {
        let (value, next) = after.split_at_checked(usize::from(*length))?;
        if *kind == 0 {
            return value.strip_suffix(&[0]).and_then(|text| str::from_utf8(text).ok());
        }
        rest = next;
    }
    None
}

/// A generation of a network namespace's rules. Each transaction begins a new generation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Generation {
    /// The number. Every transaction in the network namespace adds one. The kernel skips 0.
    pub id: u32,
    /// In notifications: the thread of the transaction, in the initial PID namespace.
    pub thread_id: Option<u32>,
    /// The name of that thread, at most 15 bytes.
    pub thread_name: Option<String>,
}

// Sets, maps and their elements.

/// Data types with the numbers of `nft`, for readable listings. The kernel needs only the length.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DataType {
    /// `ipv4_addr`: 4 bytes.
    Ipv4Address = 7,
    /// `ipv6_addr`: 16 bytes.
    Ipv6Address = 8,
    /// `inet_proto`: 1 byte.
    Protocol = 12,
    /// `inet_service`, a port: 2 bytes.
    Port = 13,
    /// `mark`: 4 bytes in the machine's byte order. Also suitable for your own numbers.
    Mark = 19,
}

impl DataType {
    /// The number of the type in `nft`.
    pub fn id(self) -> u32 {
        self as u32
    }

    /// The length of a value in bytes.
    pub fn length_bytes(self) -> u32 {
        match self {
            Self::Protocol => 1,
            Self::Port => 2,
            Self::Ipv4Address | Self::Mark => 4,
            Self::Ipv6Address => 16,
        }
    }
}

/// The type of keys or data: one [`DataType`], or a concatenation of up to five.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ValueType {
    /// The number in `nft`: 6 bits per part.
    pub id: u32,
    /// The length of a value in bytes. Each part of a concatenation is padded to a multiple of 4.
    pub length_bytes: u32,
}

impl ValueType {
    /// A concatenation of types. A single type is returned unchanged.
    pub fn concatenation(parts: &[DataType]) -> Self {
        match parts {
            [single] => (*single).into(),
            _ => parts.iter().fold(Self { id: 0, length_bytes: 0 }, |all, part| Self {
                id: all.id << 6 | part.id(),
                length_bytes: all.length_bytes + part.length_bytes().next_multiple_of(4),
            }),
        }
    }
}

impl From<DataType> for ValueType {
    fn from(of: DataType) -> Self {
        Self { id: of.id(), length_bytes: of.length_bytes() }
    }
}

/// The data of a map's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SetData {
    /// Values.
    Values(ValueType),
    /// Verdicts. After each change, the kernel may validate all chains that packets can reach.
    Verdicts,
}

/// The flags of a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SetFlags {
    /// `NFT_SET_ANONYMOUS`: the set belongs to its rule, and is deleted with it.
    pub anonymous: bool,
    /// `NFT_SET_CONSTANT`: the elements cannot change once a rule refers to the set.
    pub constant: bool,
    /// `NFT_SET_INTERVAL`: keys are ranges.
    pub interval: bool,
    /// `NFT_SET_TIMEOUT`: elements may have timeouts.
    pub timeout: bool,
    /// `NFT_SET_EVAL`: packets may add elements ([`Expression::DynamicSet`]).
    pub dynamic: bool,
    /// `NFT_SET_CONCAT`: keys are concatenations of ranges, of [`Set::field_lengths`].
    pub concatenated_ranges: bool,
}

/// A set, or a map if [`Set::data`] is present.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Set {
    /// The table of the set.
    pub table: TableName,
    /// The name, which is unique among the sets of the table.
    pub name: String,
    /// The type of the keys.
    pub key: ValueType,
    /// The data of the elements. None if the set is not a map.
    pub data: Option<SetData>,
    /// The flags of the set.
    pub flags: SetFlags,
    /// The maximum number of elements. With a size, the hash table has a fixed number of buckets.
    pub size: Option<u32>,
    /// The timeout in milliseconds of elements without an individual timeout.
    pub timeout_ms: Option<u64>,
    /// The interval in milliseconds at which the kernel removes expired elements.
    pub gc_interval_ms: Option<u32>,
    /// Expressions that the kernel copies into each element, such as a counter (Linux 5.7; several
    /// expressions: Linux 5.11).
    pub expressions: Vec<Expression>,
    /// If keys are concatenations of ranges: the length of each part in bytes.
    pub field_lengths: Vec<u32>,
    /// Bytes for user space. Old versions of `nft` crash on unknown kinds of user data, so leave
    /// this field empty if possible.
    pub user_data: Vec<u8>,
}

impl Set {
    /// A set without data.
    pub fn new(table: &TableName, name: impl Into<String>, key: &[DataType]) -> Self {
        Self {
            table: table.clone(),
            name: name.into(),
            key: ValueType::concatenation(key),
            data: None,
            flags: SetFlags::default(),
            size: None,
            timeout_ms: None,
            gc_interval_ms: None,
            expressions: Vec::new(),
            field_lengths: Vec::new(),
            user_data: Vec::new(),
        }
    }

    /// A map from keys to values.
    pub fn map(table: &TableName, name: impl Into<String>, key: &[DataType], data: &[DataType]) -> Self {
        let data = SetData::Values(ValueType::concatenation(data));
        Self { data: Some(data), ..Self::new(table, name, key) }
    }

    /// A map from keys to verdicts.
    pub fn verdict_map(table: &TableName, name: impl Into<String>, key: &[DataType]) -> Self {
        Self { data: Some(SetData::Verdicts), ..Self::new(table, name, key) }
    }

    /// Sets the maximum number of elements.
    pub fn with_size(self, size: u32) -> Self {
        Self { size: Some(size), ..self }
    }

    /// Sets the timeout of elements without an individual timeout.
    pub fn with_timeout_ms(mut self, timeout_ms: u64) -> Self {
        self.flags.timeout = true;
        self.timeout_ms = Some(timeout_ms);
        self
    }

    /// Allows packets to add elements. Without a size the kernel uses 65,535.
    pub fn dynamic(mut self) -> Self {
        self.flags.dynamic = true;
        self
    }
}

/// The data of a map element.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ElementData {
    /// A value of the map's data type.
    Value(Value),
    /// A verdict.
    Verdict(Verdict),
}

/// An element of a set.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Element {
    /// The key, or the first key of a range. Empty in the catch-all element.
    pub key: Value,
    /// The last key of a range in a set of concatenated ranges.
    pub key_end: Option<Value>,
    /// The data of a map element.
    pub data: Option<ElementData>,
    /// `NFT_SET_ELEM_INTERVAL_END`: the key is the first key after a range.
    pub interval_end: bool,
    /// `NFT_SET_ELEM_CATCHALL`: it matches all keys that no other matches (Linux 5.13).
    pub catch_all: bool,
    /// The time from creation to expiry, in milliseconds.
    pub timeout_ms: Option<u64>,
    /// The remaining time in milliseconds; set it for an element that replaces an older one.
    pub expires_in_ms: Option<u64>,
    /// Expressions of the element, such as a counter.
    pub expressions: Vec<Expression>,
    /// Bytes for user space.
    pub user_data: Vec<u8>,
}

impl Element {
    /// An element with a key.
    pub fn new(key: Value) -> Self {
        Self { key, ..Self::default() }
    }

    /// Adds a value as data.
    pub fn with_value(self, value: Value) -> Self {
        Self { data: Some(ElementData::Value(value)), ..self }
    }

    /// Adds a verdict as data.
    pub fn with_verdict(self, verdict: Verdict) -> Self {
        Self { data: Some(ElementData::Verdict(verdict)), ..self }
    }

    /// Sets the timeout.
    pub fn with_timeout_ms(self, timeout_ms: u64) -> Self {
        Self { timeout_ms: Some(timeout_ms), ..self }
    }
}

// Values, registers and verdicts.

/// Bytes as they are in a packet or a register, at most 64. Addresses and ports are in network byte
/// order, marks and interface indices in the machine's byte order.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Value(pub Vec<u8>);

impl Value {
    /// A concatenation: each part is padded to a multiple of 4 bytes.
    pub fn concatenation<'a>(parts: impl IntoIterator<Item = &'a Self>) -> Self {
        let mut bytes = Vec::with_capacity(20);
        for part in parts {
            bytes.extend(&part.0);
            bytes.resize(bytes.len().next_multiple_of(4), 0);
        }
        Self(bytes)
    }

    /// A number in the machine's byte order, such as a mark or an interface index.
    pub fn host_u32(number: u32) -> Self {
        Self(number.to_ne_bytes().to_vec())
    }

    /// A port.
    pub fn port(port: u16) -> Self {
        Self(port.to_be_bytes().to_vec())
    }

    /// One byte, such as an IP protocol or an address family.
    pub fn byte(byte: u8) -> Self {
        Self(vec![byte])
    }

    /// The name of an interface, padded to 16 bytes. Longer names, which none has, are truncated.
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
    pub const fn word(word: u32) -> Self {
        Self(word)
    }

    /// The register after a value of this length in bytes, for the next part of a concatenation.
    pub const fn after(self, length_bytes: u32) -> Self {
        Self(self.0 + length_bytes.div_ceil(4))
    }

    /// The word at which the register starts.
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

    /// The register with this number, or `None` for the verdict register and for unknown numbers.
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
    /// Processing continues after the rule that jumped here. In a base chain, the policy applies.
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
