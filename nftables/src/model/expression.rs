//! Expressions: what rules consist of.

use super::{
    AddressFamily, Bytes, Comparison, Conversion, CtKey, Direction, DynamicSetOperation, FibFlags, FibResult,
    Generator, LookupResult, MetaKey, NatFlags, NatKind, PayloadBase, Register, RegisterRange, Reject, SetName,
    SocketKey, Value, Verdict,
};

/// A change of a set by a packet. The rule continues if it succeeds; a full set ends the rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DynamicSet {
    /// The set, which has to be dynamic. Maps of verdicts are refused.
    pub set: SetName,
    /// What is done.
    pub operation: DynamicSetOperation,
    /// Where the key is.
    pub key: Register,
    /// Where a map's data is.
    pub data: Option<Register>,
    /// The element's timeout in milliseconds, if it is not the set's.
    pub timeout_ms: Option<u64>,
    /// Expressions of a new element.
    pub expressions: Vec<Expression>,
}

/// A part of a rule. Parts that compare or look up end the rule when they do not match.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Expression {
    /// `payload`: loads bytes of a header.
    Payload {
        /// The header.
        base: PayloadBase,
        /// Bytes from its beginning.
        offset: u32,
        /// Bytes to load.
        length: u32,
        /// Where to.
        to: Register,
    },
    /// `meta`: loads a property of the packet.
    Meta {
        /// Which.
        key: MetaKey,
        /// Where to.
        to: Register,
    },
    /// `meta … set`: sets a property, such as the mark.
    SetMeta {
        /// Which.
        key: MetaKey,
        /// Where the value is.
        from: Register,
    },
    /// `ct`: loads a property of the connection. Packets without one do not match, except for its
    /// state.
    Conntrack {
        /// Which.
        key: CtKey,
        /// Of which direction, for keys that have one.
        direction: Option<Direction>,
        /// Where to.
        to: Register,
    },
    /// `ct … set`: sets a property, such as the mark.
    SetConntrack {
        /// Which.
        key: CtKey,
        /// Where the value is.
        from: Register,
    },
    /// `cmp`: compares a register with a value.
    Compare {
        /// The register.
        register: Register,
        /// How.
        comparison: Comparison,
        /// The value.
        value: Value,
    },
    /// `range`: whether a register lies between two values, which belong to the range.
    Range {
        /// The register.
        register: Register,
        /// It must lie outside.
        inverted: bool,
        /// The first value.
        first: Value,
        /// The last.
        last: Value,
    },
    /// `bitwise`: `to = (from & mask) ^ xor`, over the length of the mask.
    Bitwise {
        /// Where the value is.
        from: Register,
        /// Where the result belongs.
        to: Register,
        /// The mask.
        mask: Value,
        /// The bits to turn, as long as the mask.
        xor: Value,
    },
    /// `byteorder`: turns bytes around.
    ByteOrder {
        /// Where the value is.
        from: Register,
        /// Where the result belongs.
        to: Register,
        /// From which order to which.
        conversion: Conversion,
        /// Bytes of the value.
        length: u32,
        /// Bytes of each number in it: 2, 4 or 8.
        size: u32,
    },
    /// `lookup`: looks a key up in a set or map.
    Lookup {
        /// The set.
        set: SetName,
        /// Where the key is.
        key: Register,
        /// What for.
        result: LookupResult,
    },
    /// `immediate`: puts a value into a register.
    Immediate {
        /// Where to.
        to: Register,
        /// The value.
        value: Value,
    },
    /// `immediate` into the verdict register.
    Verdict(Verdict),
    /// `numgen`: makes a number from `offset` to before `offset + modulus`, 4 bytes in the
    /// machine's order.
    NumberGenerator {
        /// How.
        generator: Generator,
        /// How many different numbers. At least 1.
        modulus: u32,
        /// The least.
        offset: u32,
        /// Where to.
        to: Register,
    },
    /// `hash`: Jenkins' hash of bytes, from `offset` to before `offset + modulus`, 4 bytes in the
    /// machine's order.
    Hash {
        /// Where the bytes are.
        from: Register,
        /// How many.
        length: u32,
        /// How many different results. At least 1.
        modulus: u32,
        /// Hosts with one seed give one key the same hash. None: the kernel chooses one.
        seed: Option<u32>,
        /// The least result.
        offset: u32,
        /// Where to.
        to: Register,
    },
    /// `fib`: asks the routing table.
    Fib {
        /// What.
        result: FibResult,
        /// With what.
        flags: FibFlags,
        /// Where to.
        to: Register,
    },
    /// `nat`: translates an address, a port or both. A verdict.
    Nat {
        /// Which end.
        kind: NatKind,
        /// The family of the addresses.
        family: AddressFamily,
        /// Where the addresses are.
        address: Option<RegisterRange>,
        /// Where the ports are.
        port: Option<RegisterRange>,
        /// How to choose.
        flags: NatFlags,
    },
    /// `masq`: translates the source to the address of the interface on which the packet leaves. A
    /// verdict.
    Masquerade {
        /// Where the ports are.
        port: Option<RegisterRange>,
        /// How to choose.
        flags: NatFlags,
    },
    /// `redir`: translates the destination to this host. A verdict.
    Redirect {
        /// Where the ports are.
        port: Option<RegisterRange>,
        /// How to choose.
        flags: NatFlags,
    },
    /// `reject`: answers with an error and drops the packet.
    Reject(Reject),
    /// `dynset`: changes a set.
    DynamicSet(DynamicSet),
    /// `counter`: counts packets and bytes, beginning with these numbers.
    Counter {
        /// Packets.
        packets: u64,
        /// Bytes.
        bytes: u64,
    },
    /// `limit`: matches up to a rate.
    Limit {
        /// So many.
        rate: u64,
        /// In so many seconds.
        seconds: u64,
        /// So many more at once.
        burst: u32,
        /// Of what.
        bytes: Bytes,
        /// It matches beyond the rate instead.
        inverted: bool,
    },
    /// `log`: writes a line to the kernel's log.
    Log {
        /// How the line begins: at most 127 bytes.
        prefix: Option<String>,
        /// The level (`LOG_WARNING` is 4, which is the default).
        level: Option<u32>,
        /// Sends the packet to a group of `nfnetlink_log` instead.
        group: Option<u16>,
    },
    /// `notrack`: the packet gets no connection. In hooks before connection tracking only.
    NoTrack,
    /// `tproxy`: gives the packet to a transparent socket. In prerouting only.
    TransparentProxy {
        /// The family of the address.
        family: AddressFamily,
        /// Where the socket's address is.
        address: Option<Register>,
        /// Where its port is.
        port: Option<Register>,
    },
    /// `socket`: loads a property of the socket that the packet belongs to. Without one it does not
    /// match.
    Socket {
        /// Which.
        key: SocketKey,
        /// Where to.
        to: Register,
    },
    /// An expression that this crate does not know, as the kernel lists it.
    Unknown {
        /// Its name.
        name: String,
        /// Its attributes.
        data: Vec<u8>,
    },
}

impl Expression {
    /// Ends the rule unless a register equals a value.
    #[must_use]
    pub fn equal(register: Register, value: Value) -> Self {
        Self::Compare { register, comparison: Comparison::Equal, value }
    }

    /// A counter that begins with nothing.
    #[must_use]
    pub fn counter() -> Self {
        Self::Counter { packets: 0, bytes: 0 }
    }
}
