//! Descriptions of requests and of the kernel's errors in words.

use headgate_netlink::{Refusal, Request};

use crate::{
    Element,
    wire::{self, decode, message},
};

/// Describes a request. If `offset_bytes` lies within an element, the text names that element.
pub(crate) fn request(request: &Request, offset_bytes: Option<u32>) -> String {
    let payload = request.payload();
    let text = describe(request, payload, offset_bytes);
    // The payload can be decoded, because this crate encoded it.
    text.unwrap_or_else(|_| format!("message of type {}", request.kind()))
}

fn describe(
    request: &Request,
    payload: &[u8],
    offset_bytes: Option<u32>,
) -> Result<String, headgate_netlink::Malformed> {
    let command = wire::command(request.kind()).unwrap_or(u8::MAX);
    let verb = match command {
        message::DELETE_TABLE
        | message::DELETE_CHAIN
        | message::DELETE_RULE
        | message::DELETE_SET
        | message::DELETE_ELEMENTS => "deleting",
        _ => "adding",
    };
    Ok(match command {
        message::NEW_TABLE | message::DELETE_TABLE => {
            format!("{verb} table {}", decode::new_table(payload)?.object.name)
        }
        message::NEW_CHAIN | message::DELETE_CHAIN => {
            let chain = decode::new_chain(payload)?.object;
            format!("{verb} chain {} of table {}", chain.name, chain.table)
        }
        message::NEW_RULE | message::DELETE_RULE => {
            let rule = decode::new_rule(payload)?.object;
            let which = if command == message::NEW_RULE { "a rule" } else { "all rules" };
            let comment = crate::comment_of(&rule.user_data).map(|text| format!(" \"{text}\"")).unwrap_or_default();
            format!("{verb} {which}{comment} of chain {} of table {}", rule.chain, rule.table)
        }
        message::NEW_SET | message::DELETE_SET => {
            let set = decode::new_set(payload)?.object;
            format!("{verb} set {} of table {}", set.name, set.table)
        }
        _ => {
            let elements = decode::elements(payload)?;
            let at = offset_bytes.and_then(|offset| usize::try_from(offset).ok());
            let found = at.and_then(|at| decode::element_at(payload, at));
            let which = match (&elements.list, &found) {
                (_, Some((_, element))) => format!("element {}", key(element)),
                (Some(list), None) => match list.as_slice() {
                    [only] => format!("element {}", key(only)),
                    several => format!("{} elements", several.len()),
                },
                (None, None) => "all elements".into(),
            };
            format!("{verb} {which} of set {} of table {}", elements.set, elements.table)
        }
    })
}

fn key(element: &Element) -> String {
    match &element.key_end {
        None if element.catch_all => "*".into(),
        None => format!("0x{}", element.key),
        Some(end) => format!("0x{} to 0x{end}", element.key),
    }
}

/// The reason for a rejection: the meaning of the error number, followed by the kernel's own text
/// if the kernel sent one.
pub(crate) fn reason(refusal: &Refusal) -> String {
    let text = match refusal.code {
        libc::EMLINK | libc::ELOOP => "jumps form a loop, or are nested more than 16 chains deep".into(),
        libc::ENFILE => "the set is full".into(),
        libc::EBUSY => "it is in use, or exists with other properties".into(),
        libc::EEXIST => "it already exists".into(),
        libc::ENOENT => "it, or an object that it refers to, does not exist".into(),
        libc::EPERM => "another socket owns the table, or the capability CAP_NET_ADMIN is missing".into(),
        libc::EOPNOTSUPP => "the kernel does not support this at all, or not in this chain".into(),
        _ => refusal.to_io_error().to_string(),
    };
    match &refusal.message {
        Some(kernel_text) => format!("{text} ({kernel_text})"),
        None => text,
    }
}
