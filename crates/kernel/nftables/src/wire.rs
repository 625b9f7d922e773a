//! Encoding and decoding of messages (`linux/netfilter/nf_tables.h`). Numbers are in network byte
//! order.

mod attributes;
pub(crate) mod decode;
mod decode_expression;
mod decode_set;
mod encode;
mod expression;
#[cfg(test)]
mod tests;

pub(crate) use attributes::message;
pub(crate) use encode::*;

use headgate_netlink::{Request, netfilter};

use crate::Family;

/// `NFNL_SUBSYS_NFTABLES`.
pub(crate) const SUBSYSTEM: u8 = 10;
/// `NFNLGRP_NFTABLES`.
pub(crate) const GROUP: u32 = 7;

/// `NLM_F_CREATE`.
pub(crate) const CREATE: u16 = 0x400;
/// `NLM_F_APPEND`.
pub(crate) const APPEND: u16 = 0x800;
/// `NLM_F_DUMP`.
pub(crate) const DUMP: u16 = 0x300;

/// Begins a request to nf_tables.
pub(crate) fn request(command: u8, flags: u16, family: Option<Family>) -> Request {
    netfilter::request(SUBSYSTEM.into(), command, flags, family.map_or(0, Family::number))
}

/// The nf_tables command of a message type, or none for other subsystems.
pub(crate) fn command(kind: u16) -> Option<u8> {
    let [subsystem, command] = kind.to_be_bytes();
    (subsystem == SUBSYSTEM).then_some(command)
}
