//! Encoding of requests. Numbers in attributes are big-endian. The types of attributes longer than
//! a byte carry `NLA_F_NET_BYTEORDER`.

mod decode;
#[cfg(test)]
mod tests;

pub(crate) use decode::{Part, protocol_versions, read_part, revisions};

use std::net::IpAddr;

use headgate_netlink::{NET_BYTE_ORDER, Request, netfilter};

use crate::{Change, Element, Family, Protocol, SetType, Specification};

/// `IPSET_CMD_…`.
mod commands {
    pub(super) const PROTOCOL: u8 = 1;
    pub(super) const CREATE: u8 = 2;
    pub(super) const DESTROY: u8 = 3;
    pub(super) const SWAP: u8 = 6;
    pub(super) const LIST: u8 = 7;
    pub(super) const ADD: u8 = 9;
    pub(super) const DEL: u8 = 10;
    pub(super) const TYPE: u8 = 13;
}

/// `IPSET_ATTR_…` of commands.
mod top {
    pub(super) const PROTOCOL: u16 = 1;
    pub(super) const SETNAME: u16 = 2;
    pub(super) const TYPENAME: u16 = 3;
    pub(super) const SETNAME2: u16 = 3;
    pub(super) const REVISION: u16 = 4;
    pub(super) const FAMILY: u16 = 5;
    pub(super) const FLAGS: u16 = 6;
    pub(super) const DATA: u16 = 7;
    pub(super) const ADT: u16 = 8;
    pub(super) const MINIMUM: u16 = 10;
}

/// `IPSET_ATTR_…` within `DATA`.
mod data {
    pub(super) const IP: u16 = 1;
    pub(super) const CIDR: u16 = 3;
    pub(super) const PORT: u16 = 4;
    pub(super) const PORT_TO: u16 = 5;
    pub(super) const TIMEOUT: u16 = 6;
    pub(super) const PROTO: u16 = 7;
    pub(super) const CADT_FLAGS: u16 = 8;
    pub(super) const BITMASK: u16 = 12;
    pub(super) const HASHSIZE: u16 = 18;
    pub(super) const MAXELEM: u16 = 19;
    pub(super) const REFERENCES: u16 = 25;
    pub(super) const ELEMENTS: u16 = 24;
    /// The netmask in set headers. In entries, this number means [`IP2`].
    pub(super) const NETMASK: u16 = 20;
    pub(super) const IP2: u16 = 20;
    pub(super) const CIDR2: u16 = 21;
}

/// `IPSET_ATTR_IPADDR_IPV4`.
const IPADDR_V4: u16 = 1;
/// `IPSET_ATTR_IPADDR_IPV6`.
const IPADDR_V6: u16 = 2;
/// `IPSET_FLAG_NOMATCH`.
const NOMATCH: u32 = 1 << 2;
/// `IPSET_FLAG_WITH_COMMENT`.
const WITH_COMMENT: u32 = 1 << 4;
/// `IPSET_FLAG_WITH_FORCEADD`.
const WITH_FORCEADD: u32 = 1 << 5;
/// `IPSET_FLAG_LIST_HEADER`.
const LIST_HEADER: u32 = 1 << 2;

const FLAG_DUMP: u16 = libc::NLM_F_DUMP as u16;
const FLAG_EXCLUSIVE: u16 = libc::NLM_F_EXCL as u16;
const FLAG_CREATE: u16 = libc::NLM_F_CREATE as u16;

fn family_number(set_type: SetType, family: Family) -> u8 {
    if set_type == SetType::BitmapPort { 0 } else { family.number() }
}

fn request(command: u8, flags: u16, protocol: u8) -> Request {
    netfilter::request(libc::NFNL_SUBSYS_IPSET, command, flags, Family::V4.number())
        .attribute(top::PROTOCOL, &[protocol])
}

/// Begins a request for a set. Without `NLM_F_EXCL` the kernel reports no error when it adds an
/// existing entry, or deletes or destroys a missing object.
fn about(command: u8, flags: u16, protocol: u8, set: &str) -> Request {
    request(command, flags, protocol).text(top::SETNAME, set)
}

fn put_u32(request: Request, kind: u16, value: u32) -> Request {
    request.attribute(kind | NET_BYTE_ORDER, &value.to_be_bytes())
}

fn put_u16(request: Request, kind: u16, value: u16) -> Request {
    request.attribute(kind | NET_BYTE_ORDER, &value.to_be_bytes())
}

fn put_ip(request: Request, kind: u16, address: IpAddr) -> Request {
    request.nested(kind, |request| match address {
        IpAddr::V4(address) => request.attribute(IPADDR_V4 | NET_BYTE_ORDER, &address.octets()),
        IpAddr::V6(address) => request.attribute(IPADDR_V6 | NET_BYTE_ORDER, &address.octets()),
    })
}

/// A query for the kernel's protocol versions.
pub(crate) fn get_protocol(ours: u8) -> Request {
    request(commands::PROTOCOL, 0, ours)
}

/// A query for the revisions of a type.
pub(crate) fn get_type(protocol: u8, set_type: SetType, family: Family) -> Request {
    request(commands::TYPE, 0, protocol)
        .text(top::TYPENAME, set_type.name())
        .attribute(top::FAMILY, &[family_number(set_type, family)])
}

/// The request to create a set. The kernel rejects the request if a set has this name.
pub(crate) fn create(protocol: u8, revision: u8, of: &Specification) -> Request {
    about(commands::CREATE, FLAG_CREATE | FLAG_EXCLUSIVE, protocol, &of.name)
        .text(top::TYPENAME, of.set_type.name())
        .attribute(top::REVISION, &[revision])
        .attribute(top::FAMILY, &[family_number(of.set_type, of.family)])
        .nested(top::DATA, |mut request| {
            if let Some(seconds) = of.timeout_seconds {
                request = put_u32(request, data::TIMEOUT, seconds);
            }
            if of.set_type == SetType::BitmapPort {
                let (first, last) = Specification::PORT_RANGE;
                return put_u16(put_u16(request, data::PORT, first), data::PORT_TO, last);
            }
            for (kind, size) in [(data::HASHSIZE, of.hash_size), (data::MAXELEM, of.max_elements)] {
                if let Some(size) = size {
                    request = put_u32(request, kind, size);
                }
            }
            request
        })
}

pub(crate) fn destroy(protocol: u8, set: &str) -> Request {
    about(commands::DESTROY, FLAG_EXCLUSIVE, protocol, set)
}

pub(crate) fn swap(protocol: u8, set: &str, with: &str) -> Request {
    about(commands::SWAP, 0, protocol, set).text(top::SETNAME2, with)
}

/// A query for a set, with or without entries.
pub(crate) fn list(protocol: u8, set: &str, entries: bool) -> Request {
    let request = about(commands::LIST, FLAG_DUMP, protocol, set);
    if entries { request } else { put_u32(request, top::FLAGS, LIST_HEADER) }
}

/// The request for a change.
pub(crate) fn change(protocol: u8, change: &Change) -> Request {
    let (command, set, element) = match change {
        Change::Add(set, element) => (commands::ADD, set, element),
        Change::Delete(set, element) => (commands::DEL, set, element),
    };
    about(command, 0, protocol, set).nested(top::DATA, |request| put_element(request, element))
}

fn put_element(request: Request, element: &Element) -> Request {
    let put_ip_port = |request: Request, ip: IpAddr, protocol: Protocol, port: u16| {
        put_u16(put_ip(request, data::IP, ip), data::PORT, port).attribute(data::PROTO, &[protocol.number()])
    };
    match *element {
        Element::Ip(ip) => put_ip(request, data::IP, ip),
        Element::IpPort(ip, protocol, port) => put_ip_port(request, ip, protocol, port),
        Element::IpPortIp(ip, protocol, port, other) => {
            put_ip(put_ip_port(request, ip, protocol, port), data::IP2, other)
        }
        Element::IpPortNet(ip, protocol, port, net, length) => {
            put_ip(put_ip_port(request, ip, protocol, port), data::IP2, net).attribute(data::CIDR2, &[length])
        }
        Element::Net(net, length) => put_ip(request, data::IP, net).attribute(data::CIDR, &[length]),
        Element::Port(port) => put_u16(request, data::PORT, port),
    }
}
