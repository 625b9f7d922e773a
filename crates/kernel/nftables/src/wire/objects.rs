//! Tables, chains, rules, sets and elements as messages. Attributes are in the order in which `nft`
//! writes them. Unknown attributes are ignored. A truncated message, or a message without a
//! required attribute, is an error.

use headgate_netlink::{Fields, Malformed, Request, checked_attributes, netfilter, read_be32};
use libc::{NLM_F_APPEND, NLM_F_CREATE, c_int};

use super::{Field, LIST_ELEMENT, With, about, put_expressions, read_expressions, read_list, split};
use crate::{
    BaseChain, Chain, ChainType, Element, Generation, Hook, Listed, Policy, Rule, Set, SetData, SetFlags, Table,
    TableName, ValueType,
};

/// The flags that are set.
fn bits<const N: usize>(flags: [(bool, u32); N]) -> u32 {
    flags.into_iter().filter(|(is_set, _)| *is_set).fold(0, |bits, (_, flag)| bits | flag)
}

/// `NFTA_TABLE_…`
mod table {
    pub(super) const FLAGS: u16 = 2;
    pub(super) const HANDLE: u16 = 4;
    pub(super) const USER_DATA: u16 = 6;
    pub(super) const OWNER: u16 = 7;

    /// `NFT_TABLE_F_DORMANT`
    pub(super) const DORMANT: u32 = 1;
    /// `NFT_TABLE_F_OWNER`
    pub(super) const OWNED: u32 = 2;
    /// `NFT_TABLE_F_PERSIST`
    pub(super) const PERSISTENT: u32 = 4;
}

pub(crate) fn put_table(wanted: &Table) -> Request {
    let flags =
        bits([(wanted.dormant, table::DORMANT), (wanted.owned, table::OWNED), (wanted.persistent, table::PERSISTENT)]);
    let request = about(libc::NFT_MSG_NEWTABLE, NLM_F_CREATE, &wanted.name).with(table::FLAGS, &flags);
    request.with(table::USER_DATA, &wanted.user_data)
}

pub(crate) fn read_table(payload: &[u8]) -> Result<Listed<Table>, Malformed> {
    let (name, fields) = split(payload)?;
    let flags = fields.get(table::FLAGS, read_be32)?.unwrap_or_default();
    let object = Table {
        name,
        dormant: flags & table::DORMANT != 0,
        owned: flags & table::OWNED != 0,
        persistent: flags & table::PERSISTENT != 0,
        owner_port: not_zero(&fields, table::OWNER)?,
        user_data: Field::read(&fields, table::USER_DATA)?,
    };
    listed(&fields, table::HANDLE, object)
}

fn listed<T>(fields: &Fields<'_>, handle: u16, object: T) -> Result<Listed<T>, Malformed> {
    let handle: Option<u64> = Field::read(fields, handle)?;
    Ok(Listed { handle: handle.unwrap_or_default(), object })
}

/// A number for which the kernel lists 0 if there is none.
fn not_zero(fields: &Fields<'_>, kind: u16) -> Result<Option<u32>, Malformed> {
    Ok(fields.get(kind, read_be32)?.filter(|number| *number != 0))
}

/// `NFTA_CHAIN_…` and `NFTA_HOOK_…`
pub(crate) mod chain {
    pub(super) const HANDLE: u16 = 2;
    pub(crate) const NAME: u16 = 3;
    pub(super) const HOOK: u16 = 4;
    pub(super) const POLICY: u16 = 5;
    pub(super) const TYPE: u16 = 7;
    pub(super) const USER_DATA: u16 = 12;
    pub(super) const HOOK_NUMBER: u16 = 1;
    pub(super) const HOOK_PRIORITY: u16 = 2;
}

pub(crate) fn put_chain(wanted: &Chain) -> Request {
    let mut request = about(libc::NFT_MSG_NEWCHAIN, NLM_F_CREATE, &wanted.table).text(chain::NAME, &wanted.name);
    if let Some(base) = wanted.base {
        request = request.text(chain::TYPE, base.kind.name()).with(chain::POLICY, &base.policy);
        request = request.nested(chain::HOOK, |hook| {
            hook.with(chain::HOOK_NUMBER, &base.hook.number())
                .with(chain::HOOK_PRIORITY, &base.priority.cast_unsigned())
        });
    }
    request.with(chain::USER_DATA, &wanted.user_data)
}

pub(crate) fn read_chain(payload: &[u8]) -> Result<Listed<Chain>, Malformed> {
    let (table, fields) = split(payload)?;
    let base = match fields.get(chain::HOOK, Fields::of)? {
        Some(hook) => read_base_chain(&table, &fields, &hook)?,
        None => None,
    };
    let name = Field::read(&fields, chain::NAME)?;
    let object = Chain { table, name, base, user_data: Field::read(&fields, chain::USER_DATA)? };
    listed(&fields, chain::HANDLE, object)
}

/// Notifications of deleted chains contain a hook attribute without the number of the hook. In this
/// case, the result is `None`.
fn read_base_chain(table: &TableName, fields: &Fields<'_>, hook: &Fields<'_>) -> Result<Option<BaseChain>, Malformed> {
    let Some(number) = hook.get(chain::HOOK_NUMBER, read_be32)? else { return Ok(None) };
    let kind: Option<String> = Field::read(fields, chain::TYPE)?;
    Ok(Some(BaseChain {
        kind: kind.and_then(|name| ChainType::of_name(&name)).unwrap_or(ChainType::Filter),
        hook: Hook::of_number(table.family, number),
        priority: hook.get(chain::HOOK_PRIORITY, read_be32)?.unwrap_or_default().cast_signed(),
        policy: Option::read(fields, chain::POLICY)?.unwrap_or(Policy::Accept),
    }))
}

/// `NFTA_RULE_…`
pub(crate) mod rule {
    pub(crate) const CHAIN: u16 = 2;
    pub(super) const HANDLE: u16 = 3;
    pub(super) const EXPRESSIONS: u16 = 4;
    pub(crate) const USER_DATA: u16 = 7;
}

pub(crate) fn put_rule(wanted: &Rule) -> Request {
    about(libc::NFT_MSG_NEWRULE, NLM_F_CREATE | NLM_F_APPEND, &wanted.table)
        .with(rule::CHAIN, &wanted.chain)
        .with(rule::EXPRESSIONS, &wanted.expressions)
        .with(rule::USER_DATA, &wanted.user_data)
}

pub(crate) fn read_rule(payload: &[u8]) -> Result<Listed<Rule>, Malformed> {
    let (table, fields) = split(payload)?;
    let object = Rule {
        table,
        chain: Field::read(&fields, rule::CHAIN)?,
        expressions: Field::read(&fields, rule::EXPRESSIONS)?,
        user_data: Field::read(&fields, rule::USER_DATA)?,
    };
    listed(&fields, rule::HANDLE, object)
}

/// `NFTA_SET_…`, `NFTA_SET_DESC_…` and `NFT_SET_…`
pub(crate) mod set {
    pub(crate) const NAME: u16 = 2;
    pub(super) const FLAGS: u16 = 3;
    pub(super) const KEY_TYPE: u16 = 4;
    pub(super) const DATA_TYPE: u16 = 6;
    pub(super) const DESCRIPTION: u16 = 9;
    pub(super) const ID: u16 = 10;
    pub(super) const TIMEOUT: u16 = 11;
    pub(super) const GC_INTERVAL: u16 = 12;
    pub(super) const USER_DATA: u16 = 13;
    pub(super) const HANDLE: u16 = 16;
    pub(super) const EXPRESSION: u16 = 17;
    pub(super) const EXPRESSIONS: u16 = 18;
    pub(crate) const COUNT: u16 = 20;

    pub(super) const DESCRIPTION_SIZE: u16 = 1;
    pub(super) const DESCRIPTION_CONCATENATION: u16 = 2;
    pub(super) const FIELD_LENGTH: u16 = 1;

    pub(super) const ANONYMOUS: u32 = libc::NFT_SET_ANONYMOUS as u32;
    pub(super) const CONSTANT: u32 = libc::NFT_SET_CONSTANT as u32;
    pub(super) const INTERVAL: u32 = libc::NFT_SET_INTERVAL as u32;
    pub(super) const MAP: u32 = libc::NFT_SET_MAP as u32;
    pub(super) const HAS_TIMEOUT: u32 = libc::NFT_SET_TIMEOUT as u32;
    pub(super) const DYNAMIC: u32 = libc::NFT_SET_EVAL as u32;
    pub(super) const CONCATENATION: u32 = 0x80;

    /// The type of data that are verdicts.
    pub(super) const VERDICTS: u32 = libc::NFT_DATA_VERDICT;
}

/// The type, and the length in the next attribute.
impl Field for ValueType {
    fn put(&self, request: Request, kind: u16) -> Request {
        request.with(kind, &self.id).with(kind + 1, &self.length_bytes)
    }

    fn read(fields: &Fields<'_>, kind: u16) -> Result<Self, Malformed> {
        let number = |kind| Ok(fields.get(kind, read_be32)?.unwrap_or_default());
        Ok(Self { id: number(kind)?, length_bytes: number(kind + 1)? })
    }
}

pub(crate) fn put_set(wanted: &Set, id: u32) -> Request {
    let flags = wanted.flags;
    let flags = bits([
        (flags.anonymous, set::ANONYMOUS),
        (flags.constant, set::CONSTANT),
        (flags.interval, set::INTERVAL),
        (wanted.data.is_some(), set::MAP),
        (flags.timeout, set::HAS_TIMEOUT),
        (flags.dynamic, set::DYNAMIC),
        (flags.concatenated_ranges, set::CONCATENATION),
    ]);
    let data = wanted.data.map(|data| match data {
        SetData::Verdicts => ValueType { id: set::VERDICTS, length_bytes: 0 },
        SetData::Values(data) => data,
    });
    let mut request = about(libc::NFT_MSG_NEWSET, NLM_F_CREATE, &wanted.table)
        .with(set::NAME, &wanted.name)
        .with(set::FLAGS, &flags)
        .with(set::KEY_TYPE, &wanted.key)
        .with(set::DATA_TYPE, &data)
        .with(set::ID, &id);
    if wanted.size.is_some() || !wanted.field_lengths.is_empty() {
        request = request.nested(set::DESCRIPTION, |description| put_description(description, wanted));
    }
    request = request
        .with(set::TIMEOUT, &wanted.timeout_ms)
        .with(set::GC_INTERVAL, &wanted.gc_interval_ms)
        .with(set::USER_DATA, &wanted.user_data);
    put_expressions(request, set::EXPRESSION, set::EXPRESSIONS, &wanted.expressions)
}

fn put_description(request: Request, wanted: &Set) -> Request {
    let request = request.with(set::DESCRIPTION_SIZE, &wanted.size);
    if wanted.field_lengths.is_empty() {
        return request;
    }
    request.nested(set::DESCRIPTION_CONCATENATION, |fields| {
        let lengths = wanted.field_lengths.iter();
        lengths.fold(fields, |all, length| all.nested(LIST_ELEMENT, |field| field.with(set::FIELD_LENGTH, length)))
    })
}

pub(crate) fn read_set(payload: &[u8]) -> Result<Listed<Set>, Malformed> {
    let (table, fields) = split(payload)?;
    let bits = fields.get(set::FLAGS, read_be32)?.unwrap_or_default();
    let has = |flag: u32| bits & flag != 0;
    let data = match Field::read(&fields, set::DATA_TYPE)? {
        _ if !has(set::MAP) => None,
        ValueType { id: set::VERDICTS, .. } => Some(SetData::Verdicts),
        values => Some(SetData::Values(values)),
    };
    let description = Fields::of(fields.bytes(set::DESCRIPTION).unwrap_or_default())?;
    let lengths = description.bytes(set::DESCRIPTION_CONCATENATION).unwrap_or_default();
    let object = Set {
        table,
        name: Field::read(&fields, set::NAME)?,
        key: Field::read(&fields, set::KEY_TYPE)?,
        data,
        flags: SetFlags {
            anonymous: has(set::ANONYMOUS),
            constant: has(set::CONSTANT),
            interval: has(set::INTERVAL),
            timeout: has(set::HAS_TIMEOUT),
            dynamic: has(set::DYNAMIC),
            concatenated_ranges: has(set::CONCATENATION),
        },
        size: not_zero(&description, set::DESCRIPTION_SIZE)?,
        timeout_ms: Field::read(&fields, set::TIMEOUT)?,
        gc_interval_ms: not_zero(&fields, set::GC_INTERVAL)?,
        expressions: read_expressions(&fields, set::EXPRESSION, set::EXPRESSIONS)?,
        field_lengths: read_list(lengths, |field| Field::read(&Fields::of(field)?, set::FIELD_LENGTH))?,
        user_data: Field::read(&fields, set::USER_DATA)?,
    };
    listed(&fields, set::HANDLE, object)
}

/// `NFTA_SET_ELEM_LIST_…` and `NFTA_SET_ELEM_…`
pub(crate) mod element {
    pub(crate) const LIST_SET: u16 = 2;
    pub(crate) const LIST_ELEMENTS: u16 = 3;

    pub(super) const KEY: u16 = 1;
    pub(super) const DATA: u16 = 2;
    pub(super) const FLAGS: u16 = 3;
    pub(super) const TIMEOUT: u16 = 4;
    pub(super) const EXPIRATION: u16 = 5;
    pub(super) const USER_DATA: u16 = 6;
    pub(super) const EXPRESSION: u16 = 7;
    pub(super) const KEY_END: u16 = 10;
    pub(super) const EXPRESSIONS: u16 = 11;

    pub(super) const INTERVAL_END: u32 = libc::NFT_SET_ELEM_INTERVAL_END as u32;
    /// `NFT_SET_ELEM_CATCHALL`
    pub(super) const CATCH_ALL: u32 = 2;
}

/// The size in bytes after which elements continue in another message. The attribute that holds
/// elements is limited to 65,531 bytes, and the margin is larger than any element.
const ELEMENT_BYTES: usize = 48 * 1024;

/// Divides elements among messages with about [`ELEMENT_BYTES`] of elements each.
pub(crate) fn put_elements(
    command: c_int,
    flags: c_int,
    table: &TableName,
    set: &str,
    elements: impl IntoIterator<Item = Element>,
) -> Vec<Request> {
    let mut elements = elements.into_iter().peekable();
    let mut requests = Vec::new();
    while elements.peek().is_some() {
        let head = about(command, flags, table).text(element::LIST_SET, set);
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

fn put_element(mut request: Request, wanted: &Element) -> Request {
    let flags = bits([(wanted.interval_end, element::INTERVAL_END), (wanted.catch_all, element::CATCH_ALL)]);
    if flags != 0 {
        request = request.with(element::FLAGS, &flags);
    }
    request = request.with(element::TIMEOUT, &wanted.timeout_ms).with(element::EXPIRATION, &wanted.expires_in_ms);
    if !wanted.catch_all {
        request = request.with(element::KEY, &wanted.key);
    }
    request = request
        .with(element::KEY_END, &wanted.key_end)
        .with(element::DATA, &wanted.data)
        .with(element::USER_DATA, &wanted.user_data);
    put_expressions(request, element::EXPRESSION, element::EXPRESSIONS, &wanted.expressions)
}

fn read_element(bytes: &[u8]) -> Result<Element, Malformed> {
    let fields = &Fields::of(bytes)?;
    let flags = fields.get(element::FLAGS, read_be32)?.unwrap_or_default();
    let key: Option<_> = Field::read(fields, element::KEY)?;
    Ok(Element {
        key: key.unwrap_or_default(),
        key_end: Field::read(fields, element::KEY_END)?,
        data: Field::read(fields, element::DATA)?,
        interval_end: flags & element::INTERVAL_END != 0,
        catch_all: flags & element::CATCH_ALL != 0,
        timeout_ms: Field::read(fields, element::TIMEOUT)?,
        expires_in_ms: Field::read(fields, element::EXPIRATION)?,
        expressions: read_expressions(fields, element::EXPRESSION, element::EXPRESSIONS)?,
        user_data: Field::read(fields, element::USER_DATA)?,
    })
}

/// A message with elements of a set. Without a list, the message refers to all elements.
#[derive(Debug)]
pub(crate) struct Elements {
    pub(crate) table: TableName,
    pub(crate) set: String,
    pub(crate) list: Option<Vec<Element>>,
}

pub(crate) fn read_elements(payload: &[u8]) -> Result<Elements, Malformed> {
    let (table, fields) = split(payload)?;
    let list = fields.get(element::LIST_ELEMENTS, |all| read_list(all, read_element))?;
    Ok(Elements { table, set: Field::read(&fields, element::LIST_SET)?, list })
}

/// Returns the element of a request at an offset, with the index of the element. The offset counts
/// from the start of the message header.
pub(crate) fn element_at(payload: &[u8], offset: usize) -> Option<(usize, Element)> {
    /// The length of the message header.
    const HEADER_BYTES: usize = 16;
    let start = payload.as_ptr().addr().checked_sub(HEADER_BYTES)?;
    let (_, fields) = split(payload).ok()?;
    for (index, attribute) in checked_attributes(fields.bytes(element::LIST_ELEMENTS)?).enumerate() {
        let (_, one) = attribute.ok()?;
        let begin = one.as_ptr().addr() - start;
        if offset < begin + one.len() {
            return (offset + 4 >= begin).then(|| Some((index, read_element(one).ok()?)))?;
        }
    }
    None
}

/// Reads a generation and the thread that created it (`NFTA_GEN_…`).
pub(crate) fn read_generation(payload: &[u8]) -> Result<Generation, Malformed> {
    let fields = &Fields::of(netfilter::attributes(payload)?)?;
    Ok(Generation {
        id: Field::read(fields, 1)?,
        thread_id: Field::read(fields, 2)?,
        thread_name: Field::read(fields, 3)?,
    })
}
