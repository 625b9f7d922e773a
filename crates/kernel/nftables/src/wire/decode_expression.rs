//! Decoding of expressions. Expressions that this crate cannot represent become
//! [`Expression::Unknown`].

use headgate_netlink::{Malformed, checked_attributes};

use super::{
    attributes::{EXPRESSION_DATA, EXPRESSION_NAME},
    decode::{Fields, data, value},
    expression::{IN_LIST, IN_PSEUDO_HEADER},
};
use crate::{
    AddressFamily, Bytes, Comparison, CtKey, Direction, DynamicSet, DynamicSetOperation, ElementData, Expression,
    FibFlags, FibResult, Generator, LookupResult, MetaKey, NatFlags, NatKind, PayloadBase, Register, RegisterRange,
    Reject, Value,
};

/// Decodes a list of expressions.
pub(super) fn expressions(bytes: &[u8]) -> Result<Vec<Expression>, Malformed> {
    let mut found = Vec::new();
    for attribute in checked_attributes(bytes) {
        if let (IN_LIST, one) = attribute? {
            found.push(expression(one)?);
        }
    }
    Ok(found)
}

/// Decodes an expression.
pub(super) fn expression(bytes: &[u8]) -> Result<Expression, Malformed> {
    let fields = Fields::read(bytes)?;
    let name = fields.text(EXPRESSION_NAME)?.ok_or(Malformed("an expression without a name"))?;
    let data = fields.get(EXPRESSION_DATA).unwrap_or_default();
    Ok(known(&name, data)?.unwrap_or_else(|| Expression::Unknown { name, data: data.to_vec() }))
}

impl Fields<'_> {
    fn number(&self, kind: u16) -> Result<u32, Malformed> {
        self.u32(kind)?.ok_or(Malformed("an expression without a number"))
    }

    fn number_or_zero(&self, kind: u16) -> Result<u32, Malformed> {
        Ok(self.u32(kind)?.unwrap_or_default())
    }

    fn long(&self, kind: u16) -> Result<u64, Malformed> {
        self.u64(kind)?.ok_or(Malformed("an expression without a number"))
    }

    fn register(&self, kind: u16) -> Result<Option<Register>, Malformed> {
        let number = self.u32(kind)?;
        let register = |number| Register::of_number(number).ok_or(Malformed("an unknown register"));
        number.map(register).transpose()
    }

    fn needed_register(&self, kind: u16) -> Result<Register, Malformed> {
        self.register(kind)?.ok_or(Malformed("an expression without a register"))
    }

    fn registers(&self, first: u16) -> Result<Option<RegisterRange>, Malformed> {
        let last = self.register(first + 1)?;
        let range = |first| RegisterRange { first, last: last.unwrap_or(first) };
        Ok(self.register(first)?.map(range))
    }

    fn value(&self, kind: u16) -> Result<Value, Malformed> {
        value(self.get(kind).ok_or(Malformed("an expression without a value"))?)
    }

    fn set_name(&self) -> Result<String, Malformed> {
        self.text(1)?.ok_or(Malformed("an expression without its set"))
    }

    fn nat_flags(&self, kind: u16) -> Result<NatFlags, Malformed> {
        /// `NF_NAT_RANGE_MAP_IPS` and `NF_NAT_RANGE_PROTO_SPECIFIED`. The kernel derives both flags
        /// from the registers.
        const IMPLIED: u32 = 3;
        Ok(NatFlags(self.number_or_zero(kind)? & !IMPLIED))
    }
}

/// Decodes an expression that this crate represents. Returns `None` if the expression has a
/// property that this crate cannot represent.
fn known(name: &str, bytes: &[u8]) -> Result<Option<Expression>, Malformed> {
    let f = &Fields::read(bytes)?;
    Ok(Some(match name {
        "payload" if f.get(1).is_some() => {
            let Some(base) = PayloadBase::of_number(f.number(2)?) else { return Ok(None) };
            Expression::Payload { base, offset: f.number(3)?, length: f.number(4)?, to: f.needed_register(1)? }
        }
        "payload" => {
            let Some(base) = PayloadBase::of_number(f.number(2)?) else { return Ok(None) };
            let checksum_offset = match f.number_or_zero(6)? {
                0 => None,
                1 => Some(f.number(7)?),
                // The checksum of SCTP.
                _ => return Ok(None),
            };
            Expression::SetPayload {
                base,
                offset: f.number(3)?,
                length: f.number(4)?,
                from: f.needed_register(5)?,
                checksum_offset,
                in_pseudo_header: f.number_or_zero(8)? & IN_PSEUDO_HEADER != 0,
            }
        }
        "meta" => {
            let (Some(key), Some(to)) = (MetaKey::of_number(f.number(2)?), f.register(1)?) else { return Ok(None) };
            Expression::Meta { key, to }
        }
        "ct" => return conntrack(f),
        "cmp" => {
            let Some(comparison) = Comparison::of_number(f.number(2)?) else { return Ok(None) };
            Expression::Compare { register: f.needed_register(1)?, comparison, value: f.value(3)? }
        }
        // `bitwise` can also shift. Since Linux 6.13 it can read a second source register. This
        // crate represents neither of these operations.
        "bitwise" if f.number_or_zero(6)? == 0 && f.get(8).is_none() => Expression::Bitwise {
            from: f.needed_register(1)?,
            to: f.needed_register(2)?,
            mask: f.value(4)?,
            xor: f.value(5)?,
        },
        "lookup" => {
            let result = match (f.u32(3)?, f.number_or_zero(5)? & 1) {
                (Some(0), _) => LookupResult::Verdict,
                (Some(_), _) => LookupResult::Into(f.needed_register(3)?),
                (None, 0) => LookupResult::Present,
                (None, _) => LookupResult::Absent,
            };
            Expression::Lookup { set: f.set_name()?, key: f.needed_register(2)?, result }
        }
        "immediate" => match data(f.get(2).ok_or(Malformed("an expression without a value"))?)? {
            ElementData::Value(value) => Expression::Immediate { to: f.needed_register(1)?, value },
            ElementData::Verdict(verdict) => Expression::Verdict(verdict),
        },
        "numgen" => {
            let Some(generator) = Generator::of_number(f.number(3)?) else { return Ok(None) };
            let offset = f.number_or_zero(4)?;
            Expression::NumberGenerator { generator, modulus: f.number(2)?, offset, to: f.needed_register(1)? }
        }
        "hash" if f.number_or_zero(7)? == 0 => Expression::Hash {
            from: f.needed_register(1)?,
            length: f.number(3)?,
            modulus: f.number(4)?,
            seed: f.u32(5)?,
            offset: f.number_or_zero(6)?,
            to: f.needed_register(2)?,
        },
        "fib" => {
            let Some(result) = FibResult::of_number(f.number(2)?) else { return Ok(None) };
            Expression::Fib { result, flags: FibFlags(f.number_or_zero(3)?), to: f.needed_register(1)? }
        }
        "nat" => {
            let kind = NatKind::of_number(f.number(1)?);
            let (Some(kind), Some(family)) = (kind, AddressFamily::of_number(f.number(2)?)) else { return Ok(None) };
            Expression::Nat { kind, family, address: f.registers(3)?, port: f.registers(5)?, flags: f.nat_flags(7)? }
        }
        "masq" => Expression::Masquerade { flags: f.nat_flags(1)?, port: f.registers(2)? },
        "reject" => {
            let code = f.u8(2)?.unwrap_or_default();
            Expression::Reject(match f.number(1)? {
                0 => Reject::Icmp(code),
                1 => Reject::TcpReset,
                2 => Reject::Icmpx(code),
                _ => return Ok(None),
            })
        }
        "dynset" => return dynamic_set(f),
        "counter" => Expression::Counter { bytes: f.long(1)?, packets: f.long(2)? },
        "limit" => {
            let Some(bytes) = Bytes::of_number(f.number_or_zero(4)?) else { return Ok(None) };
            Expression::Limit {
                rate: f.long(1)?,
                seconds: f.long(2)?,
                burst: f.number_or_zero(3)?,
                bytes,
                inverted: f.number_or_zero(5)? & 1 != 0,
            }
        }
        // This crate does not represent snap length, queue threshold and flags.
        "log" if [3, 4].iter().all(|kind| f.get(*kind).is_none()) && f.number_or_zero(6)? == 0 => {
            let group = f.get(1).map(headgate_netlink::read_be16).transpose()?;
            Expression::Log { prefix: f.text(2)?, level: f.u32(5)?, group }
        }
        "notrack" => Expression::NoTrack,
        _ => return Ok(None),
    }))
}

fn conntrack(f: &Fields<'_>) -> Result<Option<Expression>, Malformed> {
    let (Some(key), Some(to)) = (CtKey::of_number(f.number(2)?), f.register(1)?) else { return Ok(None) };
    let direction = f.u8(3)?.map(u32::from);
    let Some(direction) = direction.map(Direction::of_number) else {
        return Ok(Some(Expression::Conntrack { key, direction: None, to }));
    };
    Ok(direction.map(|direction| Expression::Conntrack { key, direction: Some(direction), to }))
}

fn dynamic_set(f: &Fields<'_>) -> Result<Option<Expression>, Malformed> {
    /// `NFT_DYNSET_F_INV`.
    const INVERTED: u32 = 1;
    let operation = DynamicSetOperation::of_number(f.number(3)?);
    let Some(operation) = operation.filter(|_| f.number_or_zero(9).unwrap_or_default() & INVERTED == 0) else {
        return Ok(None);
    };
    let expressions = match (f.get(7), f.get(10)) {
        (Some(one), _) => vec![expression(one)?],
        (None, all) => expressions(all.unwrap_or_default())?,
    };
    Ok(Some(Expression::DynamicSet(DynamicSet {
        set: f.set_name()?,
        operation,
        key: f.needed_register(4)?,
        data: f.register(5)?,
        timeout_ms: f.u64(6)?.filter(|timeout| *timeout != 0),
        expressions,
    })))
}
