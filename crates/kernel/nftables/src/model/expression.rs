//! Expressions, the parts of rules.

use super::{
    AddressFamily, Bytes, Comparison, CtKey, Direction, DynamicSetOperation, FibFlags, FibResult, Generator,
    LookupResult, MetaKey, NatFlags, NatKind, PayloadBase, Register, RegisterRange, Reject, Value, Verdict,
};

/// A change of a set by a packet. The rule continues if the change succeeds. The rule ends if the
/// set is full, or if the element to delete does not exist.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DynamicSet {
    /// The set. No verdict map; one with a size must be dynamic or have timeouts.
    pub set: String,
    /// The operation.
    pub operation: DynamicSetOperation,
    /// The register that holds the key.
    pub key: Register,
    /// The register that holds the data of a map element.
    pub data: Option<Register>,
    /// The timeout of the element in milliseconds, if it differs from the set's timeout.
    pub timeout_ms: Option<u64>,
    /// Expressions that the kernel adds to a new element.
    pub expressions: Vec<Expression>,
}

/// A part of a rule. Expressions that compare or look up a value end the rule if they do not match.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Expression {
    /// `payload`: loads bytes of a header.
    Payload {
        /// The header.
        base: PayloadBase,
        /// The offset in bytes from the start of the header.
        offset: u32,
        /// The number of bytes to load.
        length: u32,
        /// The destination register.
        to: Register,
    },
    /// `payload … set`: writes bytes of a header, and corrects the checksums.
    SetPayload {
        /// The header.
        base: PayloadBase,
        /// The offset in bytes from the start of the header.
        offset: u32,
        /// The number of bytes to write.
        length: u32,
        /// The register that holds the bytes.
        from: Register,
        /// The offset of the header's own checksum. `None` if the header has no checksum.
        checksum_offset: Option<u32>,
        /// Whether the checksum of the transport header covers the bytes, as it covers addresses.
        in_pseudo_header: bool,
    },
    /// `meta`: loads a property of the packet.
    Meta {
        /// The property.
        key: MetaKey,
        /// The destination register.
        to: Register,
    },
    /// `ct`: loads a property of the connection. For packets without a connection only the state is
    /// available. Expressions that load other properties do not match.
    Conntrack {
        /// The property.
        key: CtKey,
        /// The direction, for properties that need a direction.
        direction: Option<Direction>,
        /// The destination register.
        to: Register,
    },
    /// `cmp`: compares a register with a value.
    Compare {
        /// The register.
        register: Register,
        /// The comparison operator.
        comparison: Comparison,
        /// The value.
        value: Value,
    },
    /// `bitwise`: `to = (from & mask) ^ xor`, over the length of the mask.
    Bitwise {
        /// The source register.
        from: Register,
        /// The destination register.
        to: Register,
        /// The mask.
        mask: Value,
        /// The bits to flip, as long as the mask.
        xor: Value,
    },
    /// `lookup`: looks a key up in a set or map.
    Lookup {
        /// The set.
        set: String,
        /// The register that holds the key.
        key: Register,
        /// How the result of the lookup is used.
        result: LookupResult,
    },
    /// `immediate`: loads a value into a register.
    Immediate {
        /// The destination register.
        to: Register,
        /// The value.
        value: Value,
    },
    /// `immediate` into the verdict register: ends the rule with a verdict.
    Verdict(Verdict),
    /// `numgen`: a 4-byte number in the machine's byte order, `offset..offset + modulus`.
    NumberGenerator {
        /// How numbers are generated.
        generator: Generator,
        /// The number of different results, at least 1.
        modulus: u32,
        /// The smallest result.
        offset: u32,
        /// The destination register.
        to: Register,
    },
    /// `hash`: computes the Jenkins hash of a register as a 4-byte number in the machine's byte
    /// order, at least `offset` and less than `offset + modulus`.
    Hash {
        /// The register that holds the bytes.
        from: Register,
        /// The number of bytes.
        length: u32,
        /// The number of different results, at least 1.
        modulus: u32,
        /// Hosts with the same seed hash a key alike. Without one, the seed is random.
        seed: Option<u32>,
        /// The smallest result.
        offset: u32,
        /// The destination register.
        to: Register,
    },
    /// `fib`: queries the routing table.
    Fib {
        /// The requested result.
        result: FibResult,
        /// The inputs of the query.
        flags: FibFlags,
        /// The destination register.
        to: Register,
    },
    /// `nat`: translates an address, a port or both, and ends the rule with a verdict.
    Nat {
        /// Whether source or destination is translated.
        kind: NatKind,
        /// The family of the addresses.
        family: AddressFamily,
        /// The registers that hold the addresses.
        address: Option<RegisterRange>,
        /// The registers that hold the ports.
        port: Option<RegisterRange>,
        /// How an address or port is selected.
        flags: NatFlags,
    },
    /// `masq`: translates the source to the outgoing interface's address, and ends the rule.
    Masquerade {
        /// The registers that hold the ports.
        port: Option<RegisterRange>,
        /// How a port is selected.
        flags: NatFlags,
    },
    /// `reject`: answers with an error and drops the packet.
    Reject(Reject),
    /// `dynset`: adds, updates or deletes an element of a set.
    DynamicSet(DynamicSet),
    /// `counter`: counts packets and bytes, starting with these numbers.
    Counter {
        /// The packets counted so far.
        packets: u64,
        /// The bytes counted so far.
        bytes: u64,
    },
    /// `limit`: matches up to a rate of `rate` units per `seconds`.
    Limit {
        /// The number of units in each period.
        rate: u64,
        /// The length of the period in seconds.
        seconds: u64,
        /// The number of units that may exceed the rate in a burst.
        burst: u32,
        /// Whether the units are bytes or packets.
        bytes: Bytes,
        /// Whether the expression matches above the rate, instead of up to the rate.
        inverted: bool,
    },
    /// `log`: writes a line to the kernel's log.
    Log {
        /// The prefix of the line, at most 127 bytes.
        prefix: Option<String>,
        /// The log level. `LOG_WARNING` (4) is the default.
        level: Option<u32>,
        /// Sends the packet to this group of `nfnetlink_log` instead of the kernel's log.
        group: Option<u16>,
    },
    /// `notrack`: exempts the packet from connection tracking, in hooks before that.
    NoTrack,
    /// An expression that this crate does not know, as the kernel lists it.
    Unknown {
        /// The name of the expression.
        name: String,
        /// The encoded attributes of the expression.
        data: Vec<u8>,
    },
}

impl Expression {
    /// Ends the rule unless the register equals the value.
    pub fn equal(register: Register, value: Value) -> Self {
        Self::Compare { register, comparison: Comparison::Equal, value }
    }

    /// A counter that starts at zero.
    pub fn counter() -> Self {
        Self::Counter { packets: 0, bytes: 0 }
    }
}
