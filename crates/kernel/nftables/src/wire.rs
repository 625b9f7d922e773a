//! Encoding and decoding of messages (`linux/netfilter/nf_tables.h`). Numbers are in network byte
//! order.

mod expression;
mod objects;
#[cfg(test)]
mod tests;

pub(crate) use objects::*;

use headgate_netlink::{
    Fields, Malformed, Request, checked_attributes, netfilter, read_be16, read_be32, read_be64, read_text, read_u8,
};
use libc::c_int;

use crate::{ElementData, Expression, Family, TableName, Value, Verdict};

/// `NFNLGRP_NFTABLES`.
pub(crate) const GROUP: u32 = 7;

/// The attribute of the table's name in all messages.
const TABLE: u16 = 1;
/// `NFTA_LIST_ELEM`
const LIST_ELEMENT: u16 = 1;
/// `NFTA_DATA_VALUE`
const DATA_VALUE: u16 = 1;
/// `NFTA_DATA_VERDICT`
const DATA_VERDICT: u16 = 2;
/// `NFTA_VERDICT_CODE`
const VERDICT_CODE: u16 = 1;
/// `NFTA_VERDICT_CHAIN`
const VERDICT_CHAIN: u16 = 2;

/// Begins a request with the command `NFT_MSG_…`.
pub(crate) fn request(command: c_int, flags: c_int, family: Option<Family>) -> Request {
    netfilter::request(libc::NFNL_SUBSYS_NFTABLES, command as u8, flags as u16, family.map_or(0, Family::number))
}

/// Begins a request about a table or an object in it.
pub(crate) fn about(command: c_int, flags: c_int, table: &TableName) -> Request {
    request(command, flags, Some(table.family)).text(TABLE, &table.name)
}

/// The command `NFT_MSG_…` of a message type, or none for other subsystems.
pub(crate) fn command(kind: u16) -> Option<c_int> {
    let [subsystem, command] = kind.to_be_bytes();
    (c_int::from(subsystem) == libc::NFNL_SUBSYS_NFTABLES).then_some(command.into())
}

/// Whether a command deletes an object. The commands of each kind of object are in the order add,
/// query, delete.
pub(crate) fn deletes(command: c_int) -> bool {
    command <= libc::NFT_MSG_DELSETELEM && command % 3 == libc::NFT_MSG_DELTABLE
}

/// Splits a message payload into the table that the message refers to, and the attributes.
pub(crate) fn split(payload: &[u8]) -> Result<(TableName, Fields<'_>), Malformed> {
    let number = payload.first().copied().unwrap_or_default();
    let family = Family::of_number(number).ok_or(Malformed("an object of an unknown family"))?;
    let fields = Fields::of(netfilter::attributes(payload)?)?;
    Ok((TableName { family, name: Field::read(&fields, TABLE)? }, fields))
}

/// An attribute has a value that this crate does not represent.
pub(crate) const UNKNOWN: Malformed = Malformed("a value that this crate does not know");
const MISSING: &str = "a message or an expression without a required attribute";

/// What an attribute holds, in both directions. Some types take several attributes.
pub(crate) trait Field: Sized {
    /// Adds the attribute of this type.
    fn put(&self, request: Request, kind: u16) -> Request;
    /// Reads the attribute of this type.
    fn read(fields: &Fields<'_>, kind: u16) -> Result<Self, Malformed>;
}

/// Lets requests be built in one expression.
pub(crate) trait With {
    /// Adds an attribute.
    fn with(self, kind: u16, value: &impl Field) -> Self;
}

impl With for Request {
    fn with(self, kind: u16, value: &impl Field) -> Self {
        value.put(self, kind)
    }
}

macro_rules! numbers {
    ($($number:ty: $read:ident),+) => { $(
        impl Field for $number {
            fn put(&self, request: Request, kind: u16) -> Request {
                request.attribute(kind, &self.to_be_bytes())
            }

            fn read(fields: &Fields<'_>, kind: u16) -> Result<Self, Malformed> {
                fields.need(kind, $read, MISSING)
            }
        }
    )+ };
}
numbers!(u8: read_u8, u16: read_be16, u32: read_be32, u64: read_be64);

/// A number of which only the lowest bit counts. The kernel uses 0 if there is no number.
impl Field for bool {
    fn put(&self, request: Request, kind: u16) -> Request {
        if *self { request.with(kind, &1_u32) } else { request }
    }

    fn read(fields: &Fields<'_>, kind: u16) -> Result<Self, Malformed> {
        Ok(Option::<u32>::read(fields, kind)?.is_some_and(|number| number & 1 != 0))
    }
}

impl Field for String {
    fn put(&self, request: Request, kind: u16) -> Request {
        request.text(kind, self)
    }

    fn read(fields: &Fields<'_>, kind: u16) -> Result<Self, Malformed> {
        fields.need(kind, read_text, MISSING)
    }
}

/// Data for user space, which has no attribute if it is empty.
impl Field for Vec<u8> {
    fn put(&self, request: Request, kind: u16) -> Request {
        if self.is_empty() { request } else { request.attribute(kind, self) }
    }

    fn read(fields: &Fields<'_>, kind: u16) -> Result<Self, Malformed> {
        Ok(fields.bytes(kind).unwrap_or_default().to_vec())
    }
}

impl<T: Field> Field for Option<T> {
    fn put(&self, request: Request, kind: u16) -> Request {
        match self {
            Some(value) => value.put(request, kind),
            None => request,
        }
    }

    fn read(fields: &Fields<'_>, kind: u16) -> Result<Self, Malformed> {
        fields.bytes(kind).map(|_| T::read(fields, kind)).transpose()
    }
}

impl Field for Vec<Expression> {
    fn put(&self, request: Request, kind: u16) -> Request {
        request.nested(kind, |list| self.iter().fold(list, |list, one| list.with(LIST_ELEMENT, one)))
    }

    fn read(fields: &Fields<'_>, kind: u16) -> Result<Self, Malformed> {
        read_list(fields.bytes(kind).unwrap_or_default(), expression::read)
    }
}

/// Reads each element of a list.
fn read_list<T>(bytes: &[u8], read: impl Fn(&[u8]) -> Result<T, Malformed>) -> Result<Vec<T>, Malformed> {
    let found = checked_attributes(bytes).filter_map(|attribute| match attribute {
        Ok((LIST_ELEMENT, one)) => Some(read(one)),
        Ok(_) => None,
        Err(error) => Some(Err(error)),
    });
    found.collect()
}

/// Adds expressions: a single expression in its own attribute, several expressions in a list.
/// Kernels before 5.11 support only a single expression.
fn put_expressions(request: Request, single: u16, several: u16, expressions: &Vec<Expression>) -> Request {
    match expressions.as_slice() {
        [] => request,
        [expression] => request.with(single, expression),
        _ => request.with(several, expressions),
    }
}

/// Reads expressions that [`put_expressions`] adds.
fn read_expressions(fields: &Fields<'_>, single: u16, several: u16) -> Result<Vec<Expression>, Malformed> {
    match Field::read(fields, single)? {
        Some(one) => Ok(vec![one]),
        None => Field::read(fields, several),
    }
}

impl Field for Value {
    fn put(&self, request: Request, kind: u16) -> Request {
        request.nested(kind, |data| data.attribute(DATA_VALUE, &self.0))
    }

    fn read(fields: &Fields<'_>, kind: u16) -> Result<Self, Malformed> {
        match Field::read(fields, kind)? {
            ElementData::Value(value) => Ok(value),
            ElementData::Verdict(_) => Err(Malformed("a verdict instead of a value")),
        }
    }
}

impl Field for Verdict {
    fn put(&self, request: Request, kind: u16) -> Request {
        request.nested(kind, |data| {
            data.nested(DATA_VERDICT, |data| {
                let data = data.with(VERDICT_CODE, &self.code().cast_unsigned());
                self.chain().iter().fold(data, |data, chain| data.text(VERDICT_CHAIN, chain))
            })
        })
    }

    fn read(fields: &Fields<'_>, kind: u16) -> Result<Self, Malformed> {
        match Field::read(fields, kind)? {
            ElementData::Verdict(verdict) => Ok(verdict),
            ElementData::Value(_) => Err(Malformed("a value instead of a verdict")),
        }
    }
}

impl Field for ElementData {
    fn put(&self, request: Request, kind: u16) -> Request {
        match self {
            Self::Value(value) => request.with(kind, value),
            Self::Verdict(verdict) => request.with(kind, verdict),
        }
    }

    fn read(fields: &Fields<'_>, kind: u16) -> Result<Self, Malformed> {
        let bytes = fields.bytes(kind).ok_or(Malformed(MISSING))?;
        match checked_attributes(bytes).next().transpose()? {
            Some((DATA_VALUE, value)) => Ok(Self::Value(Value(value.to_vec()))),
            Some((DATA_VERDICT, verdict)) => read_verdict(&Fields::of(verdict)?).map(Self::Verdict),
            _ => Err(Malformed("data that is neither a value nor a verdict")),
        }
    }
}

fn read_verdict(fields: &Fields<'_>) -> Result<Verdict, Malformed> {
    let chain = || Field::read(fields, VERDICT_CHAIN);
    Ok(match u32::read(fields, VERDICT_CODE)?.cast_signed() {
        0 => Verdict::Drop,
        1 => Verdict::Accept,
        -1 => Verdict::Continue,
        -3 => Verdict::Jump(chain()?),
        -4 => Verdict::Goto(chain()?),
        -5 => Verdict::Return,
        code => Verdict::Other(code),
    })
}
