//! Expressions as attributes. Each expression has its own attribute numbers, which
//! `linux/netfilter/nf_tables.h` defines.

use headgate_netlink::{Fields, Malformed, Request, read_be32};

use super::{Field, MISSING, UNKNOWN, With, put_expressions, read_expressions};
use crate::{
    Bytes, DynamicSet, DynamicSetOperation, Expression, FibFlags, LookupResult, NatFlags, Register, RegisterRange,
    Reject,
};

/// `NFTA_EXPR_NAME`
const NAME: u16 = 1;
/// `NFTA_EXPR_DATA`
const DATA: u16 = 2;
/// `NFT_REG_VERDICT`.
const VERDICT_REGISTER: u32 = 0;
/// `NFT_PAYLOAD_CSUM_INET`.
const INTERNET_CHECKSUM: u32 = 1;

/// Defines both directions of expressions from one table: the kernel's name, and the number of the
/// attribute of each field. `= value` stands for an attribute that the kernel may omit. The
/// attributes after `also` are only written.
macro_rules! expressions {
    (@read $fields:ident $number:literal) => { Field::read($fields, $number)? };
    (@read $fields:ident $number:literal $default:expr) => {
        Option::read($fields, $number)?.unwrap_or($default)
    };
    ($(
        $name:literal $variant:ident { $($number:literal: $field:ident $(= $default:expr)?),* }
        $(also { $($only_written:literal: $value:expr),+ })?
    )+) => {
        fn name_in_table(expression: &Expression) -> Option<&'static str> {
            match expression {
                $(Expression::$variant { .. } => Some($name),)+
                _ => None,
            }
        }

        fn put_fields(data: Request, expression: &Expression) -> Request {
            match expression {
                $(Expression::$variant { $($field),* } => {
                    data $(.with($number, $field))* $($(.with($only_written, &$value))+)?
                })+
                other => put_others(data, other),
            }
        }

        fn read_fields(name: &str, fields: &Fields<'_>) -> Result<Expression, Malformed> {
            Ok(match name {
                $($name => {
                    Expression::$variant { $($field: expressions!(@read fields $number $($default)?)),* }
                })+
                _ => return Err(UNKNOWN),
            })
        }
    };
}

expressions! {
    "payload" Payload { 1: to, 2: base, 3: offset, 4: length }
    "meta" Meta { 2: key, 1: to }
    "ct" Conntrack { 2: key, 1: to, 3: direction }
    "cmp" Compare { 1: register, 2: comparison, 3: value }
    // The operation NFT_BITWISE_MASK_XOR, and the length.
    "bitwise" Bitwise { 1: from, 2: to, 4: mask, 5: xor } also { 6: 0_u32, 3: mask.0.len() as u32 }
    "lookup" Lookup { 2: key, 3: result, 1: set }
    "immediate" Immediate { 1: to, 2: value }
    "numgen" NumberGenerator { 1: to, 2: modulus, 3: generator, 4: offset = 0 }
    // The type NFT_HASH_JENKINS.
    "hash" Hash { 1: from, 2: to, 3: length, 4: modulus, 5: seed, 6: offset = 0 } also { 7: 0_u32 }
    "fib" Fib { 2: result, 3: flags = FibFlags(0), 1: to }
    "nat" Nat { 1: kind, 2: family, 3: address, 5: port, 7: flags }
    "masq" Masquerade { 1: flags, 2: port }
    "counter" Counter { 1: bytes, 2: packets }
    "limit" Limit { 1: rate, 2: seconds, 3: burst = 0, 4: bytes = Bytes::Ignored, 5: inverted }
    "log" Log { 2: prefix, 1: group, 5: level }
    "notrack" NoTrack {}
}

/// Attributes of an expression that must be 0 or absent: this crate lacks them.
fn unrepresented(name: &str) -> &'static [u16] {
    match name {
        // Shifts. Since Linux 6.13: a second source register.
        "bitwise" => &[6, 8],
        // Other kinds of hashes.
        "hash" => &[7],
        // The snap length, the queue threshold, and flags.
        "log" => &[3, 4, 6],
        _ => &[],
    }
}

impl Expression {
    /// The kernel's name of the expression.
    pub fn name(&self) -> &str {
        match self {
            Self::SetPayload { .. } => "payload",
            Self::Verdict(_) => "immediate",
            Self::Reject(_) => "reject",
            Self::DynamicSet(_) => "dynset",
            Self::Unknown { name, .. } => name,
            other => name_in_table(other).unwrap_or_default(),
        }
    }
}

impl Field for Expression {
    fn put(&self, request: Request, kind: u16) -> Request {
        request.nested(kind, |inner| {
            let inner = inner.text(NAME, self.name());
            match self {
                Self::Unknown { data, .. } => inner.attribute(DATA, data),
                _ => inner.nested(DATA, |data| put_fields(data, self)),
            }
        })
    }

    fn read(fields: &Fields<'_>, kind: u16) -> Result<Self, Malformed> {
        fields.need(kind, read, MISSING)
    }
}

/// Reads an expression. Those that this crate lacks become [`Expression::Unknown`].
pub(super) fn read(bytes: &[u8]) -> Result<Expression, Malformed> {
    let fields = Fields::of(bytes)?;
    let name = String::read(&fields, NAME)?;
    let data = fields.bytes(DATA).unwrap_or_default();
    let fields = &Fields::of(data)?;
    let is_zero = |kind: &u16| fields.bytes(*kind).is_none_or(|value| value.iter().all(|byte| *byte == 0));
    let mut known = Err(UNKNOWN);
    if unrepresented(&name).iter().all(is_zero) {
        known = read_fields(&name, fields);
        if known == Err(UNKNOWN) {
            known = read_others(&name, fields);
        }
    }
    if known == Err(UNKNOWN) { Ok(Expression::Unknown { name, data: data.to_vec() }) } else { known }
}

fn put_others(data: Request, expression: &Expression) -> Request {
    match expression {
        Expression::SetPayload { base, offset, length, from, checksum_offset, in_pseudo_header } => data
            .with(5, from)
            .with(2, base)
            .with(3, offset)
            .with(4, length)
            .with(6, &checksum_offset.map(|_| INTERNET_CHECKSUM))
            .with(7, checksum_offset)
            .with(8, in_pseudo_header),
        Expression::Verdict(verdict) => data.with(1, &VERDICT_REGISTER).with(2, verdict),
        Expression::Reject(reject) => data.with(1, reject),
        Expression::DynamicSet(change) => put_dynamic_set(data, change),
        _ => data,
    }
}

fn read_others(name: &str, fields: &Fields<'_>) -> Result<Expression, Malformed> {
    Ok(match name {
        "payload" => {
            let checksum_offset = match fields.get(6, read_be32)?.unwrap_or_default() {
                0 => None,
                INTERNET_CHECKSUM => Some(Field::read(fields, 7)?),
                // The checksum of SCTP.
                _ => return Err(UNKNOWN),
            };
            Expression::SetPayload {
                base: Field::read(fields, 2)?,
                offset: Field::read(fields, 3)?,
                length: Field::read(fields, 4)?,
                from: Field::read(fields, 5)?,
                checksum_offset,
                in_pseudo_header: Field::read(fields, 8)?,
            }
        }
        "immediate" => Expression::Verdict(Field::read(fields, 2)?),
        "reject" => Expression::Reject(Field::read(fields, 1)?),
        "dynset" => Expression::DynamicSet(read_dynamic_set(fields)?),
        _ => return Err(UNKNOWN),
    })
}

/// `NFT_DYNSET_F_INV`: the rule continues if the change fails.
const INVERTED: u32 = 1;
/// `NFT_DYNSET_F_EXPR`: the request contains a list of expressions.
const HAS_EXPRESSIONS: u32 = 2;

fn put_dynamic_set(data: Request, change: &DynamicSet) -> Request {
    let data = data
        .with(4, &change.key)
        .with(5, &change.data)
        .with(3, &change.operation)
        .with(6, &change.timeout_ms)
        .with(1, &change.set)
        .with(9, &(change.expressions.len() > 1).then_some(HAS_EXPRESSIONS));
    put_expressions(data, 7, 10, &change.expressions)
}

fn read_dynamic_set(fields: &Fields<'_>) -> Result<DynamicSet, Malformed> {
    if fields.get(9, read_be32)?.unwrap_or_default() & INVERTED != 0 {
        return Err(UNKNOWN);
    }
    let timeout_ms: Option<u64> = Field::read(fields, 6)?;
    Ok(DynamicSet {
        set: Field::read(fields, 1)?,
        operation: DynamicSetOperation::read(fields, 3)?,
        key: Field::read(fields, 4)?,
        data: Field::read(fields, 5)?,
        timeout_ms: timeout_ms.filter(|timeout| *timeout != 0),
        expressions: read_expressions(fields, 7, 10)?,
    })
}

/// Expressions without a register, or with the verdict register, are of another kind.
impl Field for Register {
    fn put(&self, request: Request, kind: u16) -> Request {
        request.with(kind, &self.number())
    }

    fn read(fields: &Fields<'_>, kind: u16) -> Result<Self, Malformed> {
        fields.get(kind, read_be32)?.and_then(Self::of_number).ok_or(UNKNOWN)
    }
}

/// The first register, and in the next attribute the last register if it differs.
impl Field for RegisterRange {
    fn put(&self, request: Request, kind: u16) -> Request {
        let request = request.with(kind, &self.first);
        if self.last == self.first { request } else { request.with(kind + 1, &self.last) }
    }

    fn read(fields: &Fields<'_>, kind: u16) -> Result<Self, Malformed> {
        let first = Register::read(fields, kind)?;
        let last: Option<Register> = Field::read(fields, kind + 1)?;
        Ok(Self { first, last: last.unwrap_or(first) })
    }
}

/// The destination register, and in the attribute 5 whether the lookup is inverted.
impl Field for LookupResult {
    fn put(&self, request: Request, kind: u16) -> Request {
        match self {
            Self::Present => request,
            Self::Absent => request.with(5, &true),
            Self::Into(to) => request.with(kind, to),
            Self::Verdict => request.with(kind, &VERDICT_REGISTER),
        }
    }

    fn read(fields: &Fields<'_>, kind: u16) -> Result<Self, Malformed> {
        Ok(match fields.get(kind, read_be32)? {
            Some(VERDICT_REGISTER) => Self::Verdict,
            Some(_) => Self::Into(Field::read(fields, kind)?),
            None if bool::read(fields, 5)? => Self::Absent,
            None => Self::Present,
        })
    }
}

/// The type, and in the next attribute the code.
impl Field for Reject {
    fn put(&self, request: Request, kind: u16) -> Request {
        let (of, code) = match self {
            Self::Icmp(code) => (0_u32, *code),
            Self::TcpReset => (1, 0),
            Self::Icmpx(code) => (2, *code),
        };
        request.with(kind, &of).with(kind + 1, &code)
    }

    fn read(fields: &Fields<'_>, kind: u16) -> Result<Self, Malformed> {
        let code: Option<u8> = Field::read(fields, kind + 1)?;
        match u32::read(fields, kind)? {
            0 => Ok(Self::Icmp(code.unwrap_or_default())),
            1 => Ok(Self::TcpReset),
            2 => Ok(Self::Icmpx(code.unwrap_or_default())),
            _ => Err(UNKNOWN),
        }
    }
}

impl Field for FibFlags {
    fn put(&self, request: Request, kind: u16) -> Request {
        request.with(kind, &self.0)
    }

    fn read(fields: &Fields<'_>, kind: u16) -> Result<Self, Malformed> {
        Field::read(fields, kind).map(Self)
    }
}

impl Field for NatFlags {
    fn put(&self, request: Request, kind: u16) -> Request {
        if *self == Self::NONE { request } else { request.with(kind, &self.0) }
    }

    fn read(fields: &Fields<'_>, kind: u16) -> Result<Self, Malformed> {
        /// `NF_NAT_RANGE_MAP_IPS` and `NF_NAT_RANGE_PROTO_SPECIFIED`. The kernel derives both.
        const IMPLIED: u32 = 3;
        Ok(Self(fields.get(kind, read_be32)?.unwrap_or_default() & !IMPLIED))
    }
}
