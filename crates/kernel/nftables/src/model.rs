//! Tables, chains and rules as the kernel represents them (`linux/netfilter/nf_tables.h`).

mod expression;
mod operand;
mod set;
mod value;

pub use expression::{DynamicSet, Expression};
pub use operand::{
    AddressFamily, Bytes, Comparison, CtKey, Direction, DynamicSetOperation, FibFlags, FibResult, Generator,
    LookupResult, MetaKey, NatFlags, NatKind, PayloadBase, Policy, RegisterRange, Reject,
};
pub use set::{DataType, Element, ElementData, Set, SetData, SetFlags, ValueType};
pub use value::{Register, Value, Verdict};

use std::fmt;

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
    #[must_use]
    pub fn number(self) -> u8 {
        self as u8
    }

    /// Returns the family with this number.
    #[must_use]
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
    /// The family and the name.
    pub name: TableName,
    /// `NFT_TABLE_F_DORMANT`: the base chains process no packets.
    pub dormant: bool,
    /// `NFT_TABLE_F_OWNER` (Linux 5.12): only the socket that created the table may change it. The
    /// kernel deletes the table when the socket closes. The flag cannot be added or removed later.
    pub owned: bool,
    /// `NFT_TABLE_F_PERSIST` (Linux 6.9): when the owning socket closes, an owned table becomes an
    /// orphan. An orphan is persistent, has no owner, and any socket may change it. Adding the
    /// table again with both flags adopts the orphan.
    pub persistent: bool,
    /// The netlink port of the owning socket, in tables that the kernel lists. Ignored when a table
    /// is created.
    pub owner_port: Option<u32>,
    /// Bytes for user space. [`crate::comment`] encodes a comment that `nft` prints.
    pub user_data: Vec<u8>,
}

impl Table {
    /// A table without flags.
    #[must_use]
    pub fn new(name: TableName) -> Self {
        Self { name, dormant: false, owned: false, persistent: false, owner_port: None, user_data: Vec::new() }
    }

    /// Makes the table persistent and owned by the socket that creates it.
    #[must_use]
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
    #[must_use]
    pub fn regular(table: &TableName, name: impl Into<String>) -> Self {
        Self { table: table.clone(), name: name.into(), base: None, user_data: Vec::new() }
    }

    /// A base chain, which the kernel calls.
    #[must_use]
    pub fn base(table: &TableName, name: impl Into<String>, base: BaseChain) -> Self {
        Self { base: Some(base), ..Self::regular(table, name) }
    }
}

/// A rule. Its expressions are evaluated in order until an expression does not match or issues a
/// verdict.
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
    #[must_use]
    pub fn new(table: &TableName, chain: impl Into<String>, expressions: Vec<Expression>) -> Self {
        Self { table: table.clone(), chain: chain.into(), expressions, user_data: Vec::new() }
    }

    /// Adds a comment, which `nft` prints.
    #[must_use]
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

/// Encodes a comment of a table, chain or rule as user data that `nft` prints. The text is
/// truncated after 253 bytes.
#[must_use]
pub fn comment(text: &str) -> Vec<u8> {
    let end = text.floor_char_boundary(253);
    let text = text.get(..end).unwrap_or_default();
    // The comment has type 0 in all three kinds of objects. The length includes the terminating
    // zero byte.
    let mut bytes = vec![0, u8::try_from(text.len() + 1).unwrap_or(u8::MAX)];
    bytes.extend(text.as_bytes());
    bytes.push(0);
    bytes
}

/// Decodes the comment in the user data of a table, chain or rule.
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

/// A generation of a network namespace's rules. Each transaction begins a new generation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Generation {
    /// The number. Every transaction in the network namespace adds one. The kernel skips 0.
    pub id: u32,
    /// In notifications: the thread that executed the transaction, as its ID in the initial PID
    /// namespace.
    pub thread_id: Option<u32>,
    /// The name of that thread, at most 15 bytes.
    pub thread_name: Option<String>,
}
