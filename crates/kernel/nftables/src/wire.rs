//! Encoding and decoding of messages (`linux/netfilter/nf_tables.h`). Numbers are big-endian.

mod expression;
#[cfg(test)]
mod tests;

use headgate_netlink::{
    Fields, Malformed, Request, checked_attributes, netfilter_attributes, read_be16, read_be32, read_be64, read_text,
    read_u8,
};
use libc::{NLM_F_APPEND, NLM_F_CREATE, c_int};

use crate::{
    BaseChain, Chain, ChainType, Element, ElementData, Expression, Family, Generation, Hook, Listed, Policy, Rule, Set,
    SetData, SetFlags, Table, TableName, Value, ValueType, Verdict,
};

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

pub(crate) fn request(command: c_int, flags: c_int, family: Option<Family>) -> Request {
    Request::netfilter(libc::NFNL_SUBSYS_NFTABLES, command as u8, flags as u16, family.map_or(0, Family::number))
}

pub(crate) fn about(command: c_int, flags: c_int, table: &TableName) -> Request {
    request(command, flags, Some(table.family)).text(TABLE, &table.name)
}

/// The command `NFT_MSG_…` of a message type, or none for other subsystems.
pub(crate) fn command(kind: u16) -> Option<c_int> {
    let [subsystem, command] = kind.to_be_bytes();
    (c_int::from(subsystem) == libc::NFNL_SUBSYS_NFTABLES).then_some(command.into())
}

/// Whether a command deletes an object. Each kind has the order add, query, delete.
pub(crate) fn deletes(command: c_int) -> bool {
    command <= libc::NFT_MSG_DELSETELEM && command % 3 == libc::NFT_MSG_DELTABLE
}

/// Splits a message payload into the table that the message refers to, and the attributes.
pub(crate) fn split(payload: &[u8]) -> Result<(TableName, Fields<'_>), Malformed> {
    let number = payload.first().copied().unwrap_or_default();
    let family = Family::of_number(number).ok_or(Malformed("an object of an unknown family"))?;
    let fields = Fields::of(netfilter_attributes(payload)?)?;
    Ok((TableName { family, name: Field::read(&fields, TABLE)? }, fields))
}

/// An attribute has a value that this crate does not represent.
pub(crate) const UNKNOWN: Malformed = Malformed("a value that this crate does not know");
const MISSING: &str = "a message or an expression without a required attribute";

/// What an attribute holds, in both directions. Some types take several attributes.
pub(crate) trait Field: Sized {
    fn put(&self, request: Request, kind: u16) -> Request;
    fn read(fields: &Fields<'_>, kind: u16) -> Result<Self, Malformed>;
}

pub(crate) trait With {
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

// Tables, chains, rules, sets and elements as messages. Attributes are in the order in which `nft`
// writes them. Unknown attributes are ignored. A truncated message, or a message without a
// required attribute, is an error.

fn bits<const N: usize>(flags: [(bool, u32); N]) -> u32 {
    flags.into_iter().filter(|(is_set, _)| *is_set).fold(0, |bits, (_, flag)| bits | flag)
}

headgate_netlink::constants! {
    /// `NFTA_TABLE_…`
    table: u16 {
        FLAGS = 2, HANDLE = 4, USER_DATA = 6, OWNER = 7,
    }

    /// `NFT_TABLE_F_…`
    table_flag: u32 {
        DORMANT = 1, OWNED = 2, PERSISTENT = 4,
    }

    /// `NFTA_CHAIN_…` and `NFTA_HOOK_…`
    chain: u16 {
        HANDLE = 2, NAME = 3, HOOK = 4, POLICY = 5, TYPE = 7, USER_DATA = 12, HOOK_NUMBER = 1,
        HOOK_PRIORITY = 2,
    }

    /// `NFTA_RULE_…`
    rule: u16 {
        CHAIN = 2, HANDLE = 3, EXPRESSIONS = 4, USER_DATA = 7,
    }

    /// `NFTA_SET_…`, `NFTA_SET_DESC_…` and `NFT_SET_…`
    set: u16 {
        NAME = 2, FLAGS = 3, KEY_TYPE = 4, DATA_TYPE = 6, DESCRIPTION = 9, ID = 10, TIMEOUT = 11,
        GC_INTERVAL = 12, USER_DATA = 13, HANDLE = 16, EXPRESSION = 17, EXPRESSIONS = 18,
        COUNT = 20, DESCRIPTION_SIZE = 1, DESCRIPTION_CONCATENATION = 2, FIELD_LENGTH = 1,
    }

    /// `NFTA_SET_ELEM_LIST_…` and `NFTA_SET_ELEM_…`
    element: u16 {
        LIST_SET = 2, LIST_ELEMENTS = 3, KEY = 1, DATA = 2, FLAGS = 3, TIMEOUT = 4, EXPIRATION = 5,
        USER_DATA = 6, EXPRESSION = 7, KEY_END = 10, EXPRESSIONS = 11,
    }

    /// `NFT_SET_ELEM_…`
    element_flag: u32 {
        INTERVAL_END = 1, CATCH_ALL = 2,
    }
}

pub(crate) fn put_table(wanted: &Table) -> Request {
    let flags = bits([
        (wanted.dormant, table_flag::DORMANT),
        (wanted.owned, table_flag::OWNED),
        (wanted.persistent, table_flag::PERSISTENT),
    ]);
    let request = about(libc::NFT_MSG_NEWTABLE, NLM_F_CREATE, &wanted.name).with(table::FLAGS, &flags);
    request.with(table::USER_DATA, &wanted.user_data)
}

pub(crate) fn read_table(payload: &[u8]) -> Result<Listed<Table>, Malformed> {
    let (name, fields) = split(payload)?;
    let flags = fields.get(table::FLAGS, read_be32)?.unwrap_or_default();
    let object = Table {
        name,
        dormant: flags & table_flag::DORMANT != 0,
        owned: flags & table_flag::OWNED != 0,
        persistent: flags & table_flag::PERSISTENT != 0,
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

const VERDICTS: u32 = libc::NFT_DATA_VERDICT;

type Flag = fn(&mut SetFlags) -> &mut bool;

/// The numbers of the flags of a set. The flag `NFT_SET_MAP` follows from the data.
const SET_FLAGS: [(c_int, Flag); 6] = [
    (libc::NFT_SET_ANONYMOUS, |flags| &mut flags.anonymous),
    (libc::NFT_SET_CONSTANT, |flags| &mut flags.constant),
    (libc::NFT_SET_INTERVAL, |flags| &mut flags.interval),
    (libc::NFT_SET_TIMEOUT, |flags| &mut flags.timeout),
    (libc::NFT_SET_EVAL, |flags| &mut flags.dynamic),
    // `NFT_SET_CONCAT`
    (0x80, |flags| &mut flags.concatenated_ranges),
];

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
    let mut flags = wanted.flags;
    let map = if wanted.data.is_some() { libc::NFT_SET_MAP } else { 0 };
    let bits = SET_FLAGS.iter().filter(|(_, flag)| *flag(&mut flags)).fold(map, |bits, (bit, _)| bits | bit);
    let data = wanted.data.map(|data| match data {
        SetData::Verdicts => ValueType { id: VERDICTS, length_bytes: 0 },
        SetData::Values(data) => data,
    });
    let mut request = about(libc::NFT_MSG_NEWSET, NLM_F_CREATE, &wanted.table)
        .with(set::NAME, &wanted.name)
        .with(set::FLAGS, &bits.cast_unsigned())
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
    let bits = fields.get(set::FLAGS, read_be32)?.unwrap_or_default().cast_signed();
    let mut flags = SetFlags::default();
    SET_FLAGS.iter().for_each(|(bit, flag)| *flag(&mut flags) = bits & bit != 0);
    let data = match Field::read(&fields, set::DATA_TYPE)? {
        _ if bits & libc::NFT_SET_MAP == 0 => None,
        ValueType { id: VERDICTS, .. } => Some(SetData::Verdicts),
        values => Some(SetData::Values(values)),
    };
    let description = Fields::of(fields.bytes(set::DESCRIPTION).unwrap_or_default())?;
    let lengths = description.bytes(set::DESCRIPTION_CONCATENATION).unwrap_or_default();
    let object = Set {
        table,
        name: Field::read(&fields, set::NAME)?,
        key: Field::read(&fields, set::KEY_TYPE)?,
        data,
        flags,
        size: not_zero(&description, set::DESCRIPTION_SIZE)?,
        timeout_ms: Field::read(&fields, set::TIMEOUT)?,
        gc_interval_ms: not_zero(&fields, set::GC_INTERVAL)?,
        expressions: read_expressions(&fields, set::EXPRESSION, set::EXPRESSIONS)?,
        field_lengths: read_list(lengths, |field| Field::read(&Fields::of(field)?, set::FIELD_LENGTH))?,
        user_data: Field::read(&fields, set::USER_DATA)?,
    };
    listed(&fields, set::HANDLE, object)
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
    let flags = bits([(wanted.interval_end, element_flag::INTERVAL_END), (wanted.catch_all, element_flag::CATCH_ALL)]);
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
        interval_end: flags & element_flag::INTERVAL_END != 0,
        catch_all: flags & element_flag::CATCH_ALL != 0,
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
    let fields = &Fields::of(netfilter_attributes(payload)?)?;
    Ok(Generation {
        id: Field::read(fields, 1)?,
        thread_id: Field::read(fields, 2)?,
        thread_name: Field::read(fields, 3)?,
    })
}
