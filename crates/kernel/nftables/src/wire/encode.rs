//! Encoding of objects as requests. Attributes are in the order in which `nft` writes them.

use headgate_netlink::Request;

use super::{
    APPEND, CREATE,
    attributes::{
        DATA_VALUE, DATA_VERDICT, LIST_ELEMENT, VERDICT_CHAIN, VERDICT_CODE, chain, element, message, rule, set, table,
    },
    expression::put_expression,
    request,
};
use crate::{
    Chain, Element, ElementData, Expression, Family, Policy, Rule, Set, SetData, Table, TableName, Value, Verdict,
};

/// The size in bytes after which elements continue in another message. The attribute that holds
/// elements is limited to 65,531 bytes, and the margin is larger than any element.
const ELEMENT_BYTES: usize = 48 * 1024;

pub(super) fn put_u32(request: Request, kind: u16, number: u32) -> Request {
    request.attribute(kind, &number.to_be_bytes())
}

pub(super) fn put_u64(request: Request, kind: u16, number: u64) -> Request {
    request.attribute(kind, &number.to_be_bytes())
}

pub(super) fn put_value(request: Request, kind: u16, value: &Value) -> Request {
    request.nested(kind, |data| data.attribute(DATA_VALUE, &value.0))
}

pub(super) fn put_verdict(request: Request, kind: u16, verdict: &Verdict) -> Request {
    request.nested(kind, |data| {
        data.nested(DATA_VERDICT, |data| {
            let data = data.attribute(VERDICT_CODE, &verdict.code().to_be_bytes());
            verdict.chain().iter().fold(data, |data, chain| data.text(VERDICT_CHAIN, chain))
        })
    })
}

fn put_user_data(request: Request, kind: u16, user_data: &[u8]) -> Request {
    if user_data.is_empty() { request } else { request.attribute(kind, user_data) }
}

pub(crate) fn new_table(wanted: &Table) -> Request {
    let flag = |is_set: bool, flag: u32| if is_set { flag } else { 0 };
    let flags = flag(wanted.dormant, table::DORMANT)
        | flag(wanted.owned, table::OWNED)
        | flag(wanted.persistent, table::PERSISTENT);
    let request = request(message::NEW_TABLE, CREATE, Some(wanted.name.family));
    let request = put_u32(request.text(table::NAME, &wanted.name.name), table::FLAGS, flags);
    put_user_data(request, table::USER_DATA, &wanted.user_data)
}

pub(crate) fn delete_table(name: &TableName) -> Request {
    request(message::DELETE_TABLE, 0, Some(name.family)).text(table::NAME, &name.name)
}

pub(crate) fn new_chain(wanted: &Chain) -> Request {
    let request = request(message::NEW_CHAIN, CREATE, Some(wanted.table.family))
        .text(chain::TABLE, &wanted.table.name)
        .text(chain::NAME, &wanted.name);
    let request = match wanted.base {
        None => request,
        Some(base) => {
            let policy = match base.policy {
                Policy::Drop => 0,
                Policy::Accept => 1,
            };
            let request = put_u32(request.text(chain::TYPE, base.kind.name()), chain::POLICY, policy);
            request.nested(chain::HOOK, |hook| {
                put_u32(hook, chain::HOOK_NUMBER, base.hook.number())
                    .attribute(chain::HOOK_PRIORITY, &base.priority.to_be_bytes())
            })
        }
    };
    put_user_data(request, chain::USER_DATA, &wanted.user_data)
}

pub(crate) fn delete_chain(of: &TableName, name: &str) -> Request {
    request(message::DELETE_CHAIN, 0, Some(of.family)).text(chain::TABLE, &of.name).text(chain::NAME, name)
}

pub(crate) fn new_rule(wanted: &Rule) -> Request {
    let request = request(message::NEW_RULE, CREATE | APPEND, Some(wanted.table.family))
        .text(rule::TABLE, &wanted.table.name)
        .text(rule::CHAIN, &wanted.chain);
    let request = put_expressions(request, rule::EXPRESSIONS, &wanted.expressions);
    put_user_data(request, rule::USER_DATA, &wanted.user_data)
}

pub(super) fn put_expressions(request: Request, kind: u16, expressions: &[Expression]) -> Request {
    request.nested(kind, |list| {
        expressions
            .iter()
            .fold(list, |list, expression| list.nested(LIST_ELEMENT, |inner| put_expression(inner, expression)))
    })
}

/// Adds expressions: a single expression in its own attribute, several expressions in a list.
/// Kernels before 5.11 support only a single expression.
fn put_some_expressions(request: Request, single: u16, several: u16, expressions: &[Expression]) -> Request {
    match expressions {
        [] => request,
        [expression] => request.nested(single, |inner| put_expression(inner, expression)),
        _ => put_expressions(request, several, expressions),
    }
}

/// Deletes all rules of a chain.
pub(crate) fn flush_chain(of: &TableName, chain: &str) -> Request {
    request(message::DELETE_RULE, 0, Some(of.family)).text(rule::TABLE, &of.name).text(rule::CHAIN, chain)
}

pub(crate) fn new_set(wanted: &Set, id: u32) -> Request {
    let flag = |is_set: bool, flag: u32| if is_set { flag } else { 0 };
    let flags = wanted.flags;
    let bits = flag(flags.anonymous, set::ANONYMOUS)
        | flag(flags.constant, set::CONSTANT)
        | flag(flags.interval, set::INTERVAL)
        | flag(wanted.data.is_some(), set::MAP)
        | flag(flags.timeout, set::HAS_TIMEOUT)
        | flag(flags.dynamic, set::DYNAMIC)
        | flag(flags.concatenated_ranges, set::CONCATENATION);
    let request = request(message::NEW_SET, CREATE, Some(wanted.table.family))
        .text(set::TABLE, &wanted.table.name)
        .text(set::NAME, &wanted.name);
    let request = put_u32(request, set::FLAGS, bits);
    let request = put_u32(request, set::KEY_TYPE, wanted.key.id);
    let mut request = put_u32(request, set::KEY_LENGTH, wanted.key.length_bytes);
    request = match wanted.data {
        None => request,
        Some(SetData::Verdicts) => put_u32(put_u32(request, set::DATA_TYPE, set::VERDICTS), set::DATA_LENGTH, 0),
        Some(SetData::Values(data)) => {
            put_u32(put_u32(request, set::DATA_TYPE, data.id), set::DATA_LENGTH, data.length_bytes)
        }
    };
    request = put_u32(request, set::ID, id);
    if wanted.size.is_some() || !wanted.field_lengths.is_empty() {
        request = request.nested(set::DESCRIPTION, |description| put_description(description, wanted));
    }
    if let Some(timeout) = wanted.timeout_ms {
        request = put_u64(request, set::TIMEOUT, timeout);
    }
    if let Some(interval) = wanted.gc_interval_ms {
        request = put_u32(request, set::GC_INTERVAL, interval);
    }
    request = put_user_data(request, set::USER_DATA, &wanted.user_data);
    put_some_expressions(request, set::EXPRESSION, set::EXPRESSIONS, &wanted.expressions)
}

fn put_description(request: Request, wanted: &Set) -> Request {
    let request = wanted.size.iter().fold(request, |request, size| put_u32(request, set::DESCRIPTION_SIZE, *size));
    if wanted.field_lengths.is_empty() {
        return request;
    }
    request.nested(set::DESCRIPTION_CONCATENATION, |fields| {
        wanted.field_lengths.iter().fold(fields, |fields, length| {
            fields.nested(LIST_ELEMENT, |field| put_u32(field, set::FIELD_LENGTH, *length))
        })
    })
}

pub(crate) fn delete_set(of: &TableName, name: &str) -> Request {
    request(message::DELETE_SET, 0, Some(of.family)).text(set::TABLE, &of.name).text(set::NAME, name)
}

fn elements_request(command: u8, flags: u16, of: &TableName, name: &str) -> Request {
    request(command, flags, Some(of.family)).text(element::LIST_TABLE, &of.name).text(element::LIST_SET, name)
}

/// Deletes all elements of a set.
pub(crate) fn flush_set(of: &TableName, name: &str) -> Request {
    elements_request(message::DELETE_ELEMENTS, 0, of, name)
}

/// Divides elements among messages with about [`ELEMENT_BYTES`] of elements each.
fn elements(
    command: u8,
    flags: u16,
    of: &TableName,
    name: &str,
    elements: impl IntoIterator<Item = Element>,
) -> Vec<Request> {
    let mut elements = elements.into_iter().peekable();
    let mut requests = Vec::new();
    while elements.peek().is_some() {
        let head = elements_request(command, flags, of, name);
        let end = head.length() + ELEMENT_BYTES;
        requests.push(head.nested(element::LIST_ELEMENTS, |mut list| {
            while list.length() < end
                && let Some(next) = elements.next()
            {
                list = list.nested(LIST_ELEMENT, |inner| put_element(inner, &next));
            }
            list
        }));
    }
    requests
}

pub(crate) fn new_elements(of: &TableName, name: &str, all: impl IntoIterator<Item = Element>) -> Vec<Request> {
    elements(message::NEW_ELEMENTS, CREATE, of, name, all)
}

pub(crate) fn delete_elements(of: &TableName, name: &str, all: impl IntoIterator<Item = Element>) -> Vec<Request> {
    elements(message::DELETE_ELEMENTS, 0, of, name, all)
}

fn put_element(mut request: Request, wanted: &Element) -> Request {
    let flags = if wanted.interval_end { element::INTERVAL_END } else { 0 }
        | if wanted.catch_all { element::CATCH_ALL } else { 0 };
    if flags != 0 {
        request = put_u32(request, element::FLAGS, flags);
    }
    if let Some(timeout) = wanted.timeout_ms {
        request = put_u64(request, element::TIMEOUT, timeout);
    }
    if let Some(expiration) = wanted.expires_in_ms {
        request = put_u64(request, element::EXPIRATION, expiration);
    }
    if !wanted.catch_all {
        request = put_value(request, element::KEY, &wanted.key);
    }
    if let Some(end) = &wanted.key_end {
        request = put_value(request, element::KEY_END, end);
    }
    request = match &wanted.data {
        None => request,
        Some(ElementData::Value(value)) => put_value(request, element::DATA, value),
        Some(ElementData::Verdict(verdict)) => put_verdict(request, element::DATA, verdict),
    };
    request = put_user_data(request, element::USER_DATA, &wanted.user_data);
    put_some_expressions(request, element::EXPRESSION, element::EXPRESSIONS, &wanted.expressions)
}

/// Queries a list of tables, chains, rules or sets.
pub(crate) fn list(command: u8, family: Option<Family>, of: Option<&TableName>, chain: Option<&str>) -> Request {
    let request = request(command, super::DUMP, family.or(of.map(|of| of.family)));
    // In all these messages attribute 1 is the table. In rule messages attribute 2 is the chain.
    let request = of.iter().fold(request, |request, of| request.text(rule::TABLE, &of.name));
    chain.iter().fold(request, |request, chain| request.text(rule::CHAIN, chain))
}

/// Queries one table, chain or set.
pub(crate) fn get(command: u8, of: &TableName, name: Option<(u16, &str)>) -> Request {
    let request = request(command, 0, Some(of.family)).text(table::NAME, &of.name);
    name.iter().fold(request, |request, (kind, name)| request.text(*kind, name))
}

/// Queries one set.
pub(crate) fn get_set(of: &TableName, name: &str) -> Request {
    get(message::GET_SET, of, Some((set::NAME, name)))
}

/// Queries all elements of a set.
pub(crate) fn list_elements(of: &TableName, name: &str) -> Request {
    elements_request(message::GET_ELEMENTS, super::DUMP, of, name)
}

/// Queries the number of the current generation.
pub(crate) fn get_generation() -> Request {
    request(message::GET_GENERATION, 0, None)
}
