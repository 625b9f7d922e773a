//! Descriptions of faulty changes and of the kernel's errors in words.

use headgate_netlink::{Malformed, Refusal, Request};

use crate::{
    Element, Fault, Transaction,
    wire::{self, Field},
};

/// Describes a fault of a transaction. `message` is the index of the faulty request. If the kernel
/// reports a position within an element, the text names that element.
pub(crate) fn fault(transaction: &Transaction, message: Option<usize>, refusal: Refusal) -> Fault {
    let request = message.and_then(|message| transaction.requests().get(message));
    let offset = refusal.offset_bytes.and_then(|offset| usize::try_from(offset).ok());
    let element = request.zip(offset).and_then(|(request, offset)| wire::element_at(request.payload(), offset));
    let what = match request {
        // The payload can be decoded, because this crate encoded it.
        Some(request) => describe(request, element.as_ref().map(|(_, element)| element))
            .unwrap_or_else(|_| format!("message of type {}", request.kind())),
        None => "the transaction as a whole".into(),
    };
    Fault { message, element: element.map(|(index, _)| index), what, reason: reason(&refusal), refusal }
}

fn describe(request: &Request, element: Option<&Element>) -> Result<String, Malformed> {
    let payload = request.payload();
    let command = wire::command(request.kind()).unwrap_or_default();
    let verb = if wire::deletes(command) { "deleting" } else { "adding" };
    let (table, fields) = wire::split(payload)?;
    let name = |kind| String::read(&fields, kind);
    Ok(match command {
        libc::NFT_MSG_NEWTABLE | libc::NFT_MSG_DELTABLE => format!("{verb} table {table}"),
        libc::NFT_MSG_NEWCHAIN | libc::NFT_MSG_DELCHAIN => {
            format!("{verb} chain {} of table {table}", name(wire::chain::NAME)?)
        }
        libc::NFT_MSG_NEWRULE | libc::NFT_MSG_DELRULE => {
            let which = if command == libc::NFT_MSG_NEWRULE { "a rule" } else { "all rules" };
            let comment = crate::comment_of(fields.bytes(wire::rule::USER_DATA).unwrap_or_default());
            let comment = comment.map(|text| format!(" \"{text}\"")).unwrap_or_default();
            format!("{verb} {which}{comment} of chain {} of table {table}", name(wire::rule::CHAIN)?)
        }
        libc::NFT_MSG_NEWSET | libc::NFT_MSG_DELSET => {
            format!("{verb} set {} of table {table}", name(wire::set::NAME)?)
        }
        _ => {
            let wire::Elements { set, list, .. } = wire::read_elements(payload)?;
            let which = match (element, list.as_deref()) {
                (Some(one), _) | (None, Some([one])) => format!("element {}", key(one)),
                (None, Some(several)) => format!("{} elements", several.len()),
                (None, None) => "all elements".into(),
            };
            format!("{verb} {which} of set {set} of table {table}")
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
fn reason(refusal: &Refusal) -> String {
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
