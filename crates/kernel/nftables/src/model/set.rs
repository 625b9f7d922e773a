//! Sets, maps and their elements.

use super::{Expression, TableName, Value, Verdict};

/// Data types with the numbers of the `nft` program. The kernel stores the number but needs only
/// the length. With the right number `nft list` prints readable values without user data in the
/// set.
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
    #[must_use]
    pub fn id(self) -> u32 {
        self as u32
    }

    /// The length of a value in bytes.
    #[must_use]
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
    #[must_use]
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
    /// Verdicts. After each change of such a map, the kernel may validate all chains that packets
    /// can reach.
    Verdicts,
}

/// The flags of a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SetFlags {
    /// `NFT_SET_ANONYMOUS`: the set belongs to the rule that refers to it, and is deleted with the
    /// rule.
    pub anonymous: bool,
    /// `NFT_SET_CONSTANT`: the elements cannot change once a rule refers to the set.
    pub constant: bool,
    /// `NFT_SET_INTERVAL`: keys are ranges.
    pub interval: bool,
    /// `NFT_SET_TIMEOUT`: elements may have timeouts.
    pub timeout: bool,
    /// `NFT_SET_EVAL`: packets may add elements ([`Expression::DynamicSet`]).
    pub dynamic: bool,
    /// `NFT_SET_CONCAT`: keys are concatenations of ranges. [`Set::field_lengths`] holds the
    /// lengths of their parts.
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
    /// The maximum number of elements. With a size, the kernel uses a hash table with a fixed
    /// number of buckets. Without a size, the hash table grows.
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
    #[must_use]
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
    #[must_use]
    pub fn map(table: &TableName, name: impl Into<String>, key: &[DataType], data: &[DataType]) -> Self {
        let data = SetData::Values(ValueType::concatenation(data));
        Self { data: Some(data), ..Self::new(table, name, key) }
    }

    /// A map from keys to verdicts.
    #[must_use]
    pub fn verdict_map(table: &TableName, name: impl Into<String>, key: &[DataType]) -> Self {
        Self { data: Some(SetData::Verdicts), ..Self::new(table, name, key) }
    }

    /// Sets the maximum number of elements.
    #[must_use]
    pub fn with_size(self, size: u32) -> Self {
        Self { size: Some(size), ..self }
    }

    /// Sets the timeout of elements without an individual timeout.
    #[must_use]
    pub fn with_timeout_ms(mut self, timeout_ms: u64) -> Self {
        self.flags.timeout = true;
        self.timeout_ms = Some(timeout_ms);
        self
    }

    /// Allows packets to add elements. Without a size the kernel uses 65,535.
    #[must_use]
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
    /// `NFT_SET_ELEM_CATCHALL`: the element matches all keys that no other element matches (Linux
    /// 5.13).
    pub catch_all: bool,
    /// The time from creation to expiry, in milliseconds.
    pub timeout_ms: Option<u64>,
    /// The remaining time to expiry, in milliseconds. Lists contain this time. Set this field for a
    /// new element that replaces an older element and expires at the same time.
    pub expires_in_ms: Option<u64>,
    /// Expressions of the element, such as a counter.
    pub expressions: Vec<Expression>,
    /// Bytes for user space.
    pub user_data: Vec<u8>,
}

impl Element {
    /// An element with a key.
    #[must_use]
    pub fn new(key: Value) -> Self {
        Self { key, ..Self::default() }
    }

    /// Adds a value as data.
    #[must_use]
    pub fn with_value(self, value: Value) -> Self {
        Self { data: Some(ElementData::Value(value)), ..self }
    }

    /// Adds a verdict as data.
    #[must_use]
    pub fn with_verdict(self, verdict: Verdict) -> Self {
        Self { data: Some(ElementData::Verdict(verdict)), ..self }
    }

    /// Sets the timeout.
    #[must_use]
    pub fn with_timeout_ms(self, timeout_ms: u64) -> Self {
        Self { timeout_ms: Some(timeout_ms), ..self }
    }
}
