//! Decoding of sets and elements.

use headgate_netlink::{Malformed, checked_attributes};

use super::{
    attributes::{LIST_ELEMENT, element, set},
    decode::{Fields, data, split, table_name, value},
    decode_expression::{expression, expressions},
};
use crate::{Element, Expression, Listed, Set, SetData, SetFlags, TableName, ValueType};

/// Decodes a set.
pub(crate) fn new_set(payload: &[u8]) -> Result<Listed<Set>, Malformed> {
    let (family, fields) = split(payload)?;
    let bits = fields.u32(set::FLAGS)?.unwrap_or_default();
    let has = |flag: u32| bits & flag != 0;
    let key = ValueType {
        id: fields.u32(set::KEY_TYPE)?.unwrap_or_default(),
        length_bytes: fields.u32(set::KEY_LENGTH)?.unwrap_or_default(),
    };
    let data = match fields.u32(set::DATA_TYPE)?.unwrap_or_default() {
        _ if !has(set::MAP) => None,
        set::VERDICTS => Some(SetData::Verdicts),
        id => {
            let length_bytes = fields.u32(set::DATA_LENGTH)?.unwrap_or_default();
            Some(SetData::Values(ValueType { id, length_bytes }))
        }
    };
    let (size, field_lengths) = description(fields.get(set::DESCRIPTION).unwrap_or_default())?;
    let object = Set {
        table: table_name(family, &fields)?,
        name: fields.text(set::NAME)?.ok_or(Malformed("a set without a name"))?,
        key,
        data,
        flags: SetFlags {
            anonymous: has(set::ANONYMOUS),
            constant: has(set::CONSTANT),
            interval: has(set::INTERVAL),
            timeout: has(set::HAS_TIMEOUT),
            dynamic: has(set::DYNAMIC),
            concatenated_ranges: has(set::CONCATENATION),
        },
        size,
        timeout_ms: fields.u64(set::TIMEOUT)?,
        // The kernel lists 0 if the set has the kernel's default interval.
        gc_interval_ms: fields.u32(set::GC_INTERVAL)?.filter(|interval| *interval != 0),
        expressions: some_expressions(&fields, set::EXPRESSION, set::EXPRESSIONS)?,
        field_lengths,
        user_data: fields.bytes(set::USER_DATA),
    };
    Ok(Listed { handle: fields.u64(set::HANDLE)?.unwrap_or_default(), object })
}

/// The number of elements in a set, if the kernel reports it (Linux 6.16).
pub(crate) fn element_count(payload: &[u8]) -> Result<Option<u32>, Malformed> {
    split(payload)?.1.u32(set::COUNT)
}

fn description(bytes: &[u8]) -> Result<(Option<u32>, Vec<u32>), Malformed> {
    let fields = Fields::read(bytes)?;
    let mut lengths = Vec::new();
    for attribute in checked_attributes(fields.get(set::DESCRIPTION_CONCATENATION).unwrap_or_default()) {
        if let (LIST_ELEMENT, field) = attribute? {
            let length = Fields::read(field)?.u32(set::FIELD_LENGTH)?;
            lengths.push(length.ok_or(Malformed("a part of a key without its length"))?);
        }
    }
    // The kernel lists 0 for sets without a size.
    Ok((fields.u32(set::DESCRIPTION_SIZE)?.filter(|size| *size != 0), lengths))
}

/// Decodes expressions. A single expression has its own attribute. Several expressions are in a
/// list.
fn some_expressions(fields: &Fields<'_>, single: u16, several: u16) -> Result<Vec<Expression>, Malformed> {
    match (fields.get(single), fields.get(several)) {
        (Some(one), _) => Ok(vec![expression(one)?]),
        (None, Some(all)) => expressions(all),
        (None, None) => Ok(Vec::new()),
    }
}

/// A message with elements of a set. Without a list, the message refers to all elements.
#[derive(Debug)]
pub(crate) struct Elements {
    pub(crate) table: TableName,
    pub(crate) set: String,
    pub(crate) list: Option<Vec<Element>>,
}

/// Decodes elements.
pub(crate) fn elements(payload: &[u8]) -> Result<Elements, Malformed> {
    let (family, fields) = split(payload)?;
    let set = fields.text(element::LIST_SET)?.ok_or(Malformed("elements without a set"))?;
    let mut list = None;
    if let Some(all) = fields.get(element::LIST_ELEMENTS) {
        let mut found = Vec::new();
        for attribute in checked_attributes(all) {
            if let (LIST_ELEMENT, one) = attribute? {
                found.push(one_element(one)?);
            }
        }
        list = Some(found);
    }
    Ok(Elements { table: table_name(family, &fields)?, set, list })
}

fn one_element(bytes: &[u8]) -> Result<Element, Malformed> {
    let fields = Fields::read(bytes)?;
    let flags = fields.u32(element::FLAGS)?.unwrap_or_default();
    Ok(Element {
        key: fields.get(element::KEY).map(value).transpose()?.unwrap_or_default(),
        key_end: fields.get(element::KEY_END).map(value).transpose()?,
        data: fields.get(element::DATA).map(data).transpose()?,
        interval_end: flags & element::INTERVAL_END != 0,
        catch_all: flags & element::CATCH_ALL != 0,
        timeout_ms: fields.u64(element::TIMEOUT)?,
        expires_in_ms: fields.u64(element::EXPIRATION)?,
        expressions: some_expressions(&fields, element::EXPRESSION, element::EXPRESSIONS)?,
        user_data: fields.bytes(element::USER_DATA),
    })
}

/// Returns the element of a request at an offset, with the index of the element. The offset counts
/// from the start of the message header.
pub(crate) fn element_at(payload: &[u8], offset: usize) -> Option<(usize, Element)> {
    /// The length of the message header.
    const HEADER_BYTES: usize = 16;
    let start = payload.as_ptr().addr().checked_sub(HEADER_BYTES)?;
    let (_, fields) = split(payload).ok()?;
    let all = fields.get(element::LIST_ELEMENTS)?;
    for (index, attribute) in checked_attributes(all).enumerate() {
        let (_, one) = attribute.ok()?;
        let end = one.as_ptr().addr() + one.len() - start;
        if offset < end {
            return (offset + 4 >= one.as_ptr().addr() - start).then(|| Some((index, one_element(one).ok()?)))?;
        }
    }
    None
}
