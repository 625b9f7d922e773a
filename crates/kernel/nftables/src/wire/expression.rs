//! Encoding of expressions. Each expression has its own attribute numbers, which
//! `linux/netfilter/nf_tables.h` defines. The attributes are in the order in which `nft` writes
//! them.

use headgate_netlink::Request;

use super::{
    attributes::{EXPRESSION_DATA, EXPRESSION_NAME, LIST_ELEMENT},
    encode::{put_expressions, put_u32, put_u64, put_value, put_verdict},
};
use crate::{
    AddressFamily, Bytes, Comparison, CtKey, Direction, DynamicSet, DynamicSetOperation, Expression, FibResult,
    Generator, LookupResult, MetaKey, NatFlags, NatKind, PayloadBase, Register, RegisterRange, Reject,
};

/// `NFT_REG_VERDICT`.
const VERDICT_REGISTER: u32 = 0;

/// `NFT_PAYLOAD_L4CSUM_PSEUDOHDR`.
pub(super) const IN_PSEUDO_HEADER: u32 = 1;

/// Defines both conversions between the values of this crate and the kernel's numbers.
macro_rules! numbers {
    ($of:ty, $number:ident, $of_number:ident, { $($variant:ident = $value:literal),+ $(,)? }) => {
        impl $of {
            pub(crate) fn $number(self) -> u32 {
                match self { $(Self::$variant => $value),+ }
            }

            pub(crate) fn $of_number(number: u32) -> Option<Self> {
                match number { $($value => Some(Self::$variant),)+ _ => None }
            }
        }
    };
}

numbers!(PayloadBase, number, of_number, { LinkLayer = 0, Network = 1, Transport = 2 });
numbers!(MetaKey, number, of_number, {
    Length = 0, Protocol = 1, Mark = 3, InputInterface = 4, OutputInterface = 5, InputInterfaceName = 6,
    OutputInterfaceName = 7, SocketUser = 10, NfProtocol = 15, L4Protocol = 16, PacketType = 19, Random = 24,
});
numbers!(CtKey, number, of_number, {
    State = 0, Direction = 1, Status = 2, Mark = 3, Expiration = 5, L3Protocol = 7, Source = 8, Destination = 9,
    Protocol = 10, SourcePort = 11, DestinationPort = 12, SourceIp = 19, DestinationIp = 20, SourceIp6 = 21,
    DestinationIp6 = 22, Id = 23,
});
numbers!(Direction, number, of_number, { Original = 0, Reply = 1 });
numbers!(Comparison, number, of_number, {
    Equal = 0, NotEqual = 1, Less = 2, LessOrEqual = 3, Greater = 4, GreaterOrEqual = 5,
});
numbers!(Generator, number, of_number, { Incremental = 0, Random = 1 });
numbers!(FibResult, number, of_number, { Interface = 1, InterfaceName = 2, AddressType = 3 });
numbers!(NatKind, number, of_number, { Source = 0, Destination = 1 });
numbers!(DynamicSetOperation, number, of_number, { Add = 0, Update = 1, Delete = 2 });
numbers!(Bytes, number, of_number, { Ignored = 0, Counted = 1 });

impl Expression {
    /// The kernel's name of the expression.
    #[must_use]
    pub fn name(&self) -> &str {
        match self {
            Self::Payload { .. } | Self::SetPayload { .. } => "payload",
            Self::Meta { .. } => "meta",
            Self::Conntrack { .. } => "ct",
            Self::Compare { .. } => "cmp",
            Self::Bitwise { .. } => "bitwise",
            Self::Lookup { .. } => "lookup",
            Self::Immediate { .. } | Self::Verdict(_) => "immediate",
            Self::NumberGenerator { .. } => "numgen",
            Self::Hash { .. } => "hash",
            Self::Fib { .. } => "fib",
            Self::Nat { .. } => "nat",
            Self::Masquerade { .. } => "masq",
            Self::Reject(_) => "reject",
            Self::DynamicSet(_) => "dynset",
            Self::Counter { .. } => "counter",
            Self::Limit { .. } => "limit",
            Self::Log { .. } => "log",
            Self::NoTrack => "notrack",
            Self::Unknown { name, .. } => name,
        }
    }
}

/// Adds an expression's name and its attributes.
pub(super) fn put_expression(request: Request, expression: &Expression) -> Request {
    let request = request.text(EXPRESSION_NAME, expression.name());
    match expression {
        Expression::Unknown { data, .. } => request.attribute(EXPRESSION_DATA, data),
        _ => request.nested(EXPRESSION_DATA, |data| put_attributes(data, expression)),
    }
}

fn put_register(request: Request, kind: u16, register: Register) -> Request {
    put_u32(request, kind, register.number())
}

fn put_optional(request: Request, kind: u16, number: Option<u32>) -> Request {
    number.iter().fold(request, |request, number| put_u32(request, kind, *number))
}

/// Adds the first register, and the last register if it differs.
fn put_registers(request: Request, first: u16, range: Option<RegisterRange>) -> Request {
    let Some(range) = range else { return request };
    let request = put_register(request, first, range.first);
    if range.last == range.first { request } else { put_register(request, first + 1, range.last) }
}

fn put_attributes(data: Request, expression: &Expression) -> Request {
    match expression {
        Expression::Payload { base, offset, length, to } => {
            put_u32(put_u32(put_u32(put_register(data, 1, *to), 2, base.number()), 3, *offset), 4, *length)
        }
        Expression::SetPayload { base, offset, length, from, checksum_offset, in_pseudo_header } => {
            let data = put_u32(put_register(data, 5, *from), 2, base.number());
            let data = put_u32(put_u32(data, 3, *offset), 4, *length);
            let data = match checksum_offset {
                // The type NFT_PAYLOAD_CSUM_INET.
                Some(offset) => put_u32(put_u32(data, 6, 1), 7, *offset),
                None => data,
            };
            if *in_pseudo_header { put_u32(data, 8, IN_PSEUDO_HEADER) } else { data }
        }
        Expression::Meta { key, to } => put_register(put_u32(data, 2, key.number()), 1, *to),
        Expression::Conntrack { key, direction, to } => {
            let data = put_register(put_u32(data, 2, key.number()), 1, *to);
            let direction = direction.and_then(|direction| u8::try_from(direction.number()).ok());
            direction.iter().fold(data, |data, direction| data.attribute(3, &[*direction]))
        }
        Expression::Compare { register, comparison, value } => {
            put_value(put_u32(put_register(data, 1, *register), 2, comparison.number()), 3, value)
        }
        Expression::Bitwise { from, to, mask, xor } => {
            let length = u32::try_from(mask.0.len()).unwrap_or(u32::MAX);
            let data = put_u32(put_register(put_register(data, 1, *from), 2, *to), 3, length);
            // The operation NFT_BITWISE_MASK_XOR.
            put_value(put_value(put_u32(data, 6, 0), 4, mask), 5, xor)
        }
        Expression::Lookup { set, key, result } => {
            let data = put_register(data, 2, *key);
            let data = match result {
                LookupResult::Present | LookupResult::Absent => data,
                LookupResult::Into(to) => put_register(data, 3, *to),
                LookupResult::Verdict => put_u32(data, 3, VERDICT_REGISTER),
            };
            let data = data.text(1, set);
            if *result == LookupResult::Absent { put_u32(data, 5, 1) } else { data }
        }
        Expression::Immediate { to, value } => put_value(put_register(data, 1, *to), 2, value),
        Expression::Verdict(verdict) => put_verdict(put_u32(data, 1, VERDICT_REGISTER), 2, verdict),
        Expression::NumberGenerator { generator, modulus, offset, to } => {
            let data = put_u32(put_register(data, 1, *to), 2, *modulus);
            put_u32(put_u32(data, 3, generator.number()), 4, *offset)
        }
        Expression::Hash { from, length, modulus, seed, offset, to } => {
            let data = put_register(put_register(data, 1, *from), 2, *to);
            let data = put_optional(put_u32(put_u32(data, 3, *length), 4, *modulus), 5, *seed);
            // The type NFT_HASH_JENKINS.
            put_u32(put_u32(data, 6, *offset), 7, 0)
        }
        Expression::Fib { result, flags, to } => {
            put_register(put_u32(put_u32(data, 2, result.number()), 3, flags.0), 1, *to)
        }
        Expression::Nat { kind, family, address, port, flags } => {
            let data = put_u32(put_u32(data, 1, kind.number()), 2, family.number());
            put_flags(put_registers(put_registers(data, 3, *address), 5, *port), 7, *flags)
        }
        Expression::Masquerade { port, flags } => put_registers(put_flags(data, 1, *flags), 2, *port),
        Expression::Reject(reject) => match reject {
            Reject::Icmp(code) => put_u32(data, 1, 0).attribute(2, &[*code]),
            Reject::TcpReset => put_u32(data, 1, 1).attribute(2, &[0]),
            Reject::Icmpx(code) => put_u32(data, 1, 2).attribute(2, &[*code]),
        },
        Expression::DynamicSet(change) => put_dynamic_set(data, change),
        Expression::Counter { packets, bytes } => put_u64(put_u64(data, 1, *bytes), 2, *packets),
        Expression::Limit { rate, seconds, burst, bytes, inverted } => {
            let data = put_u32(put_u64(put_u64(data, 1, *rate), 2, *seconds), 3, *burst);
            put_u32(put_u32(data, 4, bytes.number()), 5, u32::from(*inverted))
        }
        Expression::Log { prefix, level, group } => {
            let data = prefix.iter().fold(data, |data, prefix| data.text(2, prefix));
            let data = group.iter().fold(data, |data, group| data.attribute(1, &group.to_be_bytes()));
            put_optional(data, 5, *level)
        }
        Expression::NoTrack | Expression::Unknown { .. } => data,
    }
}

fn put_flags(data: Request, kind: u16, flags: NatFlags) -> Request {
    if flags == NatFlags::NONE { data } else { put_u32(data, kind, flags.0) }
}

fn put_dynamic_set(data: Request, change: &DynamicSet) -> Request {
    /// `NFT_DYNSET_F_EXPR`: the request contains a list of expressions.
    const HAS_EXPRESSIONS: u32 = 2;
    let data = put_register(data, 4, change.key);
    let data = put_optional(data, 5, change.data.map(Register::number));
    let data = put_u32(data, 3, change.operation.number());
    let data = change.timeout_ms.iter().fold(data, |data, timeout| put_u64(data, 6, *timeout));
    let data = data.text(1, &change.set);
    match change.expressions.as_slice() {
        [] => data,
        [expression] => data.nested(7, |inner| put_expression(inner, expression)),
        several => put_u32(put_expressions(data, 10, several), 9, HAS_EXPRESSIONS),
    }
}

impl AddressFamily {
    pub(crate) fn of_number(number: u32) -> Option<Self> {
        [Self::Inet, Self::Ip, Self::Ip6].into_iter().find(|family| family.number() == number)
    }
}

/// The attribute of one expression in a list.
pub(super) const IN_LIST: u16 = LIST_ELEMENT;
