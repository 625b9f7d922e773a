//! Decoding of objects that the kernel lists or reports. Unknown attributes are ignored. A
//! truncated message, or a message without a required attribute, is an error.

use headgate_netlink::{Malformed, checked_attributes, netfilter, read_be32, read_text, read_u8};

pub(crate) use super::decode_set::{element_at, element_count, elements, new_set};
use super::{
    attributes::{DATA_VALUE, DATA_VERDICT, VERDICT_CHAIN, VERDICT_CODE, chain, generation, rule, table},
    decode_expression::expressions,
};
use crate::{
    BaseChain, Chain, ChainType, ElementData, Family, Generation, Hook, Listed, Policy, Rule, Table, TableName, Value,
    Verdict,
};

/// The attributes of a message or of a nested attribute, by number. If a number occurs several
/// times, the last attribute counts.
#[derive(Debug)]
pub(super) struct Fields<'a>([Option<&'a [u8]>; 24]);

impl<'a> Fields<'a> {
    pub(super) fn read(bytes: &'a [u8]) -> Result<Self, Malformed> {
        let mut fields = [None; 24];
        for attribute in checked_attributes(bytes) {
            let (kind, value) = attribute?;
            if let Some(field) = fields.get_mut(usize::from(kind)) {
                *field = Some(value);
            }
        }
        Ok(Self(fields))
    }

    pub(super) fn get(&self, kind: u16) -> Option<&'a [u8]> {
        self.0.get(usize::from(kind)).copied().flatten()
    }

    pub(super) fn u32(&self, kind: u16) -> Result<Option<u32>, Malformed> {
        self.get(kind).map(read_be32).transpose()
    }

    pub(super) fn u8(&self, kind: u16) -> Result<Option<u8>, Malformed> {
        self.get(kind).map(read_u8).transpose()
    }

    pub(super) fn u64(&self, kind: u16) -> Result<Option<u64>, Malformed> {
        let number = |value: &[u8]| value.try_into().map(u64::from_be_bytes);
        self.get(kind).map(number).transpose().map_err(|_| Malformed("a number is not 8 bytes long"))
    }

    pub(super) fn text(&self, kind: u16) -> Result<Option<String>, Malformed> {
        Ok(self.get(kind).map(read_text).transpose()?.map(str::to_owned))
    }

    pub(super) fn bytes(&self, kind: u16) -> Vec<u8> {
        self.get(kind).unwrap_or_default().to_vec()
    }
}

/// Splits a message payload into the family of its header and its attributes.
pub(super) fn split(payload: &[u8]) -> Result<(Family, Fields<'_>), Malformed> {
    let number = payload.first().copied().unwrap_or_default();
    let family = Family::of_number(number).ok_or(Malformed("an object of an unknown family"))?;
    Ok((family, Fields::read(netfilter::attributes(payload)?)?))
}

/// The name of the table that a message refers to.
pub(super) fn table_name(family: Family, fields: &Fields<'_>) -> Result<TableName, Malformed> {
    // Attribute 1 is the table's name in all messages.
    let name = fields.text(table::NAME)?.ok_or(Malformed("an object without a table"))?;
    Ok(TableName { family, name })
}

/// Decodes a table.
pub(crate) fn new_table(payload: &[u8]) -> Result<Listed<Table>, Malformed> {
    let (family, fields) = split(payload)?;
    let flags = fields.u32(table::FLAGS)?.unwrap_or_default();
    let object = Table {
        name: table_name(family, &fields)?,
        dormant: flags & table::DORMANT != 0,
        owned: flags & table::OWNED != 0,
        persistent: flags & table::PERSISTENT != 0,
        owner_port: fields.u32(table::OWNER)?.filter(|port| *port != 0),
        user_data: fields.bytes(table::USER_DATA),
    };
    Ok(Listed { handle: fields.u64(table::HANDLE)?.unwrap_or_default(), object })
}

/// Decodes a chain.
pub(crate) fn new_chain(payload: &[u8]) -> Result<Listed<Chain>, Malformed> {
    let (family, fields) = split(payload)?;
    let base = match fields.get(chain::HOOK) {
        Some(hook) => base_chain(family, &fields, &Fields::read(hook)?)?,
        None => None,
    };
    let object = Chain {
        table: table_name(family, &fields)?,
        name: fields.text(chain::NAME)?.ok_or(Malformed("a chain without a name"))?,
        base,
        user_data: fields.bytes(chain::USER_DATA),
    };
    Ok(Listed { handle: fields.u64(chain::HANDLE)?.unwrap_or_default(), object })
}

/// Decodes the properties of a base chain. Notifications of deleted chains contain a hook attribute
/// without the number of the hook. In this case, the result is `None`.
fn base_chain(family: Family, fields: &Fields<'_>, hook: &Fields<'_>) -> Result<Option<BaseChain>, Malformed> {
    let kind = fields.text(chain::TYPE)?.and_then(|name| ChainType::of_name(&name)).unwrap_or(ChainType::Filter);
    let Some(number) = hook.u32(chain::HOOK_NUMBER)? else { return Ok(None) };
    Ok(Some(BaseChain {
        kind,
        hook: Hook::of_number(family, number),
        priority: hook.u32(chain::HOOK_PRIORITY)?.unwrap_or_default().cast_signed(),
        policy: if fields.u32(chain::POLICY)? == Some(0) { Policy::Drop } else { Policy::Accept },
    }))
}

/// Decodes a rule.
pub(crate) fn new_rule(payload: &[u8]) -> Result<Listed<Rule>, Malformed> {
    let (family, fields) = split(payload)?;
    let object = Rule {
        table: table_name(family, &fields)?,
        chain: fields.text(rule::CHAIN)?.ok_or(Malformed("a rule without a chain"))?,
        expressions: expressions(fields.get(rule::EXPRESSIONS).unwrap_or_default())?,
        user_data: fields.bytes(rule::USER_DATA),
    };
    Ok(Listed { handle: fields.u64(rule::HANDLE)?.unwrap_or_default(), object })
}

/// Decodes a generation and the thread that created it.
pub(crate) fn new_generation(payload: &[u8]) -> Result<Generation, Malformed> {
    let fields = Fields::read(netfilter::attributes(payload)?)?;
    Ok(Generation {
        id: fields.u32(generation::ID)?.ok_or(Malformed("a generation without its number"))?,
        thread_id: fields.u32(generation::PROCESS_ID)?,
        thread_name: fields.text(generation::PROCESS_NAME)?,
    })
}

/// Decodes a value or a verdict.
pub(super) fn data(bytes: &[u8]) -> Result<ElementData, Malformed> {
    let fields = Fields::read(bytes)?;
    if let Some(value) = fields.get(DATA_VALUE) {
        return Ok(ElementData::Value(Value(value.to_vec())));
    }
    let verdict = fields.get(DATA_VERDICT).ok_or(Malformed("data that is neither a value nor a verdict"))?;
    let fields = Fields::read(verdict)?;
    let code = fields.u32(VERDICT_CODE)?.ok_or(Malformed("a verdict without its code"))?.cast_signed();
    let chain = || fields.text(VERDICT_CHAIN)?.ok_or(Malformed("a jump without its chain"));
    Ok(ElementData::Verdict(match code {
        0 => Verdict::Drop,
        1 => Verdict::Accept,
        -1 => Verdict::Continue,
        -3 => Verdict::Jump(chain()?),
        -4 => Verdict::Goto(chain()?),
        -5 => Verdict::Return,
        code => Verdict::Other(code),
    }))
}

/// Decodes a value.
pub(super) fn value(bytes: &[u8]) -> Result<Value, Malformed> {
    match data(bytes)? {
        ElementData::Value(value) => Ok(value),
        ElementData::Verdict(_) => Err(Malformed("a verdict instead of a value")),
    }
}
