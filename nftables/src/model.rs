//! Tables, chains and rules as the kernel knows them (`linux/netfilter/nf_tables.h`).

mod expression;
mod operand;
mod set;
mod value;

pub use expression::{DynamicSet, Expression};
pub use operand::{
    AddressFamily, Bytes, Comparison, Conversion, CtKey, Direction, DynamicSetOperation, FibFlags, FibResult,
    Generator, LookupResult, MetaKey, NatFlags, NatKind, PayloadBase, RegisterRange, Reject, SocketKey,
};
pub use set::{DataType, Element, ElementData, Set, SetData, SetFlags, SetName, ValueType};
pub use value::{Register, Value, Verdict};

use std::fmt;

/// Protocol families of tables (`NFPROTO_…`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Family {
    /// IPv4 and IPv6 together.
    Inet,
    /// IPv4.
    Ip,
    /// ARP.
    Arp,
    /// Ingress and egress of devices.
    Netdev,
    /// Bridges.
    Bridge,
    /// IPv6.
    Ip6,
}

impl Family {
    /// All of them.
    pub const ALL: [Self; 6] = [Self::Inet, Self::Ip, Self::Arp, Self::Netdev, Self::Bridge, Self::Ip6];

    /// The kernel's number.
    #[must_use]
    pub fn number(self) -> u8 {
        match self {
            Self::Inet => 1,
            Self::Ip => 2,
            Self::Arp => 3,
            Self::Netdev => 5,
            Self::Bridge => 7,
            Self::Ip6 => 10,
        }
    }

    /// The family of a number.
    #[must_use]
    pub fn of_number(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|family| family.number() == number)
    }
}

/// As the `nft` program writes it.
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

/// A table's name, which is unique in its family.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TableName {
    /// The family.
    pub family: Family,
    /// The name: at most 255 bytes.
    pub name: String,
}

impl TableName {
    /// The name of a table of a family.
    #[must_use]
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
    /// Its name.
    pub name: TableName,
    /// `NFT_TABLE_F_DORMANT`: its base chains see no packets.
    pub dormant: bool,
    /// `NFT_TABLE_F_OWNER` (Linux 5.12): only the socket that made it may change it, and it
    /// vanishes with the socket. The kernel can neither add nor remove this flag later.
    pub owned: bool,
    /// `NFT_TABLE_F_PERSIST` (Linux 6.9): an owned table outlives its socket as an orphan, which is
    /// persistent and not owned, and which everybody may change. Adding the table again with both
    /// flags adopts the orphan.
    pub persistent: bool,
    /// In lists: the port of the owning socket. Ignored when the table is made.
    pub owner_port: Option<u32>,
    /// Bytes for user space ([`crate::comment`] makes a comment that `nft` prints).
    pub user_data: Vec<u8>,
}

impl Table {
    /// A table without flags.
    #[must_use]
    pub fn new(name: TableName) -> Self {
        Self { name, dormant: false, owned: false, persistent: false, owner_port: None, user_data: Vec::new() }
    }

    /// The table, owned by the socket that makes it, and persistent.
    #[must_use]
    pub fn owned_and_persistent(self) -> Self {
        Self { owned: true, persistent: true, ..self }
    }
}

/// What a base chain is for. The kernel accepts address translation in chains of type `nat` only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ChainType {
    /// `filter`
    Filter,
    /// `nat`: sees the first packet of each connection.
    Nat,
    /// `route`: packets are routed again after a change.
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

/// Where in the network stack a base chain is called (`NF_INET_…`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Hook {
    /// All packets that arrive.
    Prerouting,
    /// Packets to this host.
    Input,
    /// Packets that pass through this host.
    Forward,
    /// Packets from this host.
    Output,
    /// All packets that leave.
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

/// What happens to packets that reach the end of a base chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Policy {
    /// They continue.
    Accept,
    /// They are dropped.
    Drop,
}

/// What makes a chain a base chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BaseChain {
    /// What it is for.
    pub kind: ChainType,
    /// Where it is called.
    pub hook: Hook,
    /// Chains of lower priority are called first.
    pub priority: i32,
    /// The fate of packets at its end.
    pub policy: Policy,
}

/// A chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chain {
    /// Its table.
    pub table: TableName,
    /// Its name, which is unique in its table: at most 255 bytes.
    pub name: String,
    /// Only base chains see packets by themselves; others are jumped to.
    pub base: Option<BaseChain>,
    /// Bytes for user space.
    pub user_data: Vec<u8>,
}

impl Chain {
    /// A chain that rules jump to.
    #[must_use]
    pub fn regular(table: &TableName, name: impl Into<String>) -> Self {
        Self { table: table.clone(), name: name.into(), base: None, user_data: Vec::new() }
    }

    /// A chain that the kernel calls.
    #[must_use]
    pub fn base(table: &TableName, name: impl Into<String>, base: BaseChain) -> Self {
        Self { base: Some(base), ..Self::regular(table, name) }
    }
}

/// A rule: expressions, evaluated in their order until one does not match or gives a verdict.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// Its table.
    pub table: TableName,
    /// Its chain.
    pub chain: String,
    /// What it does.
    pub expressions: Vec<Expression>,
    /// Bytes for user space ([`crate::comment`] makes a comment that `nft` prints).
    pub user_data: Vec<u8>,
}

impl Rule {
    /// A rule of a chain.
    #[must_use]
    pub fn new(table: &TableName, chain: impl Into<String>, expressions: Vec<Expression>) -> Self {
        Self { table: table.clone(), chain: chain.into(), expressions, user_data: Vec::new() }
    }

    /// The rule with a comment, which `nft` prints.
    #[must_use]
    pub fn with_comment(self, text: &str) -> Self {
        Self { user_data: comment(text), ..self }
    }
}

/// An object with the number that the kernel gave it, which is unique in its table and never used
/// again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed<T> {
    /// The kernel's number.
    pub handle: u64,
    /// The object.
    pub object: T,
}

/// User data that `nft` prints as a comment of a table, chain or rule. The text is cut after 253
/// bytes.
#[must_use]
pub fn comment(text: &str) -> Vec<u8> {
    let end = text.floor_char_boundary(253);
    let text = text.get(..end).unwrap_or_default();
    // Type 0 is the comment in all three; the length counts the zero byte at the end.
    let mut bytes = vec![0, u8::try_from(text.len() + 1).unwrap_or(u8::MAX)];
    bytes.extend(text.as_bytes());
    bytes.push(0);
    bytes
}

/// The comment in the user data of a table, chain or rule.
#[must_use]
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
