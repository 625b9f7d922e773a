//! Sets, maps and their elements.

use std::fmt;

use super::{Expression, TableName, Value, Verdict};

/// Types of values as the `nft` program numbers them. The kernel keeps the number and needs the
/// length alone; the number is what makes `nft list` print values readably without user data in the
/// set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DataType {
    /// `nf_proto`: 1 byte.
    NfProtocol,
    /// `ipv4_addr`: 4 bytes.
    Ipv4Address,
    /// `ipv6_addr`: 16 bytes.
    Ipv6Address,
    /// `ether_addr`: 6 bytes.
    EthernetAddress,
    /// `inet_proto`: 1 byte.
    Protocol,
    /// `inet_service`, a port: 2 bytes.
    Port,
    /// `mark`: 4 bytes in the machine's byte order. Also fit for numbers of one's own.
    Mark,
    /// `iface_index`: 4 bytes in the machine's byte order.
    InterfaceIndex,
    /// `ct_state`: 4 bytes in the machine's byte order.
    CtState,
    /// `ifname`: 16 bytes.
    InterfaceName,
}

impl DataType {
    /// `nft`'s number of the type.
    #[must_use]
    pub fn id(self) -> u32 {
        match self {
            Self::NfProtocol => 2,
            Self::Ipv4Address => 7,
            Self::Ipv6Address => 8,
            Self::EthernetAddress => 9,
            Self::Protocol => 12,
            Self::Port => 13,
            Self::Mark => 19,
            Self::InterfaceIndex => 20,
            Self::CtState => 26,
            Self::InterfaceName => 41,
        }
    }

    /// Bytes of a value.
    #[must_use]
    pub fn length_bytes(self) -> u32 {
        match self {
            Self::NfProtocol | Self::Protocol => 1,
            Self::Port => 2,
            Self::EthernetAddress => 6,
            Self::Ipv4Address | Self::Mark | Self::InterfaceIndex | Self::CtState => 4,
            Self::Ipv6Address | Self::InterfaceName => 16,
        }
    }
}

/// The type of keys or data: one [`DataType`], or a concatenation of up to five.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ValueType {
    /// `nft`'s number: 6 bits for each part.
    pub id: u32,
    /// Bytes of a value. In concatenations each part takes a multiple of 4.
    pub length_bytes: u32,
}

impl ValueType {
    /// A concatenation of types; of one alone, that type itself.
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

/// What the elements of a map lead to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SetData {
    /// Values.
    Values(ValueType),
    /// Verdicts. Each change of such a map may make the kernel validate all chains that it can
    /// reach.
    Verdicts,
}

/// `NFTNL_UDATA_SET_KEYBYTEORDER`
const KEY_BYTE_ORDER: u8 = 0;
/// `NFTNL_UDATA_SET_DATABYTEORDER`
const DATA_BYTE_ORDER: u8 = 1;

/// Properties of sets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SetFlags {
    /// `NFT_SET_ANONYMOUS`: belongs to the rule that refers to it, and vanishes with it.
    pub anonymous: bool,
    /// `NFT_SET_CONSTANT`: its elements cannot change once a rule refers to it.
    pub constant: bool,
    /// `NFT_SET_INTERVAL`: keys are ranges.
    pub interval: bool,
    /// `NFT_SET_TIMEOUT`: elements may have a timeout.
    pub timeout: bool,
    /// `NFT_SET_EVAL`: packets may add elements ([`Expression::DynamicSet`]).
    pub dynamic: bool,
    /// `NFT_SET_CONCAT`: keys are concatenations of ranges, of which [`Set::field_lengths`] has the
    /// lengths.
    pub concatenated_ranges: bool,
}

/// The name of a set in rules and elements.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SetName {
    /// The name. Of an anonymous set that is not made yet, the pattern of it.
    pub name: String,
    /// The number of a set of the same transaction, needed for anonymous sets alone.
    pub id: Option<u32>,
}

impl From<&str> for SetName {
    fn from(name: &str) -> Self {
        Self { name: name.into(), id: None }
    }
}

impl From<String> for SetName {
    fn from(name: String) -> Self {
        Self { name, id: None }
    }
}

impl fmt::Display for SetName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// A set, or a map if it has data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Set {
    /// Its table.
    pub table: TableName,
    /// Its name, which is unique among the sets of its table; a pattern such as `__set%d` if it is
    /// anonymous.
    pub name: String,
    /// The type of its keys.
    pub key: ValueType,
    /// What its elements lead to, if it is a map.
    pub data: Option<SetData>,
    /// Its properties.
    pub flags: SetFlags,
    /// Most elements that it may have. With a size the kernel uses a hash of a fixed number of
    /// buckets, without one a hash that grows.
    pub size: Option<u32>,
    /// When elements vanish that name no time of their own, in milliseconds.
    pub timeout_ms: Option<u64>,
    /// How often the kernel removes elements that have expired, in milliseconds.
    pub gc_interval_ms: Option<u32>,
    /// Expressions that each element gets a copy of, such as a counter (Linux 5.7; more than one:
    /// 5.11).
    pub expressions: Vec<Expression>,
    /// Lengths in bytes of the parts of keys that are concatenations of ranges.
    pub field_lengths: Vec<u32>,
    /// Bytes for user space. Old versions of `nft` crash on kinds that they do not know; best left
    /// empty.
    pub user_data: Vec<u8>,
}

impl Set {
    /// A set.
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

    /// The set with user data which tells `nft` that keys of one number are in the machine's byte
    /// order; without, it prints their bytes in reverse. Concatenations need none. Every version of
    /// `nft` knows these kinds.
    #[must_use]
    pub fn with_key_in_host_order(self) -> Self {
        self.with_byte_order(KEY_BYTE_ORDER)
    }

    /// Likewise for data.
    #[must_use]
    pub fn with_data_in_host_order(self) -> Self {
        self.with_byte_order(DATA_BYTE_ORDER)
    }

    fn with_byte_order(mut self, of: u8) -> Self {
        /// `BYTEORDER_HOST_ENDIAN` of `nft`.
        const HOST: u32 = 1;
        self.user_data.extend([of, 4]);
        self.user_data.extend(HOST.to_ne_bytes());
        self
    }

    /// The set as an anonymous one, for one rule of the same transaction. Its name becomes a
    /// pattern.
    #[must_use]
    pub fn anonymous(mut self) -> Self {
        self.name = if self.data.is_some() { "__map%d" } else { "__set%d" }.into();
        self.flags.anonymous = true;
        self.flags.constant = true;
        self
    }

    /// The set with a size.
    #[must_use]
    pub fn with_size(self, size: u32) -> Self {
        Self { size: Some(size), ..self }
    }

    /// The set with a timeout for elements that name none.
    #[must_use]
    pub fn with_timeout_ms(mut self, timeout_ms: u64) -> Self {
        self.flags.timeout = true;
        self.timeout_ms = Some(timeout_ms);
        self
    }

    /// The set, to which packets may add elements. Without a size the kernel takes 65,535.
    #[must_use]
    pub fn dynamic(mut self) -> Self {
        self.flags.dynamic = true;
        self
    }

    /// The set with keys that are ranges. Those of one type have their ends in elements of their
    /// own ([`Element::interval`]); in concatenations ([`Element::range`]) each part is a range.
    #[must_use]
    pub fn with_ranges(mut self, key: &[DataType]) -> Self {
        self.flags.interval = true;
        if key.len() > 1 {
            self.flags.concatenated_ranges = true;
            self.field_lengths = key.iter().map(|part| part.length_bytes()).collect();
        }
        self
    }
}

/// What an element of a map leads to.
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
    /// Its key; the first of its keys if it is a range. Empty in the element for all other keys.
    pub key: Value,
    /// The last key of a range in a set of concatenated ranges.
    pub key_end: Option<Value>,
    /// What it leads to.
    pub data: Option<ElementData>,
    /// `NFT_SET_ELEM_INTERVAL_END`: the first key behind a range.
    pub interval_end: bool,
    /// `NFT_SET_ELEM_CATCHALL`: stands for all keys that no other element has (Linux 5.13).
    pub catch_all: bool,
    /// When it vanishes after it was made, in milliseconds.
    pub timeout_ms: Option<u64>,
    /// When it vanishes from now, in milliseconds. In lists, and for elements that are to keep
    /// their age.
    pub expires_in_ms: Option<u64>,
    /// Its counter and the like.
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

    /// An element that leads to a value.
    #[must_use]
    pub fn with_value(self, value: Value) -> Self {
        Self { data: Some(ElementData::Value(value)), ..self }
    }

    /// An element that leads to a verdict.
    #[must_use]
    pub fn with_verdict(self, verdict: Verdict) -> Self {
        Self { data: Some(ElementData::Verdict(verdict)), ..self }
    }

    /// An element that vanishes after a time.
    #[must_use]
    pub fn with_timeout_ms(self, timeout_ms: u64) -> Self {
        Self { timeout_ms: Some(timeout_ms), ..self }
    }

    /// An element with an expression of its own, such as a counter.
    #[must_use]
    pub fn with_expression(mut self, expression: Expression) -> Self {
        self.expressions.push(expression);
        self
    }

    /// A range of concatenations: every part lies between those of both keys, which belong to it.
    #[must_use]
    pub fn range(first: Value, last: Value) -> Self {
        Self { key: first, key_end: Some(last), ..Self::default() }
    }

    /// The two elements of a range from `first` to before `end`, for sets of ranges of one type.
    #[must_use]
    pub fn interval(first: Value, end: Value) -> [Self; 2] {
        [Self::new(first), Self { interval_end: true, ..Self::new(end) }]
    }
}
