//! Encoding of requests and decoding of answers. Numbers are big-endian; types of those longer than
//! a byte carry `NLA_F_NET_BYTEORDER`. Unknown attributes are ignored. What is truncated, or lacks
//! a required attribute, is an error.

#[cfg(test)]
mod tests;

use std::net::IpAddr;

use headgate_netlink::{
    Fields, Malformed, Request, checked_attributes, netfilter_attributes, read_be16, read_be32, read_ip, read_text,
    read_u8, route::Prefix,
};

use crate::{Change, Element, Entry, Family, Header, Protocol, Set, SetType, Specification};

headgate_netlink::constants! {
    /// `IPSET_CMD_…`.
    commands: u8 {
        PROTOCOL = 1, CREATE = 2, DESTROY = 3, SWAP = 6, LIST = 7, ADD = 9, DEL = 10, TYPE = 13,
    }

    /// `IPSET_ATTR_…` of commands.
    top: u16 {
        PROTOCOL = 1, SETNAME = 2, TYPENAME = 3, SETNAME2 = 3, REVISION = 4, FAMILY = 5, FLAGS = 6,
        DATA = 7, ADT = 8, MINIMUM = 10,
    }

    /// `IPSET_ATTR_…` within `DATA`.
    data: u16 {
        IP = 1, CIDR = 3, PORT = 4, PORT_TO = 5, TIMEOUT = 6, PROTO = 7, CADT_FLAGS = 8,
        BITMASK = 12, HASHSIZE = 18, MAXELEM = 19, REFERENCES = 25, ELEMENTS = 24,
        // The netmask in set headers. In entries, this number means [`IP2`].
        NETMASK = 20, IP2 = 20, CIDR2 = 21,
    }
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

const NET_BYTE_ORDER: u16 = libc::NLA_F_NET_BYTEORDER as u16;
const FLAG_DUMP: u16 = libc::NLM_F_DUMP as u16;
const FLAG_EXCLUSIVE: u16 = libc::NLM_F_EXCL as u16;
const FLAG_CREATE: u16 = libc::NLM_F_CREATE as u16;

fn family_number(set_type: SetType, family: Family) -> u8 {
    if set_type == SetType::BitmapPort { 0 } else { family.number() }
}

fn request(command: u8, flags: u16, protocol: u8) -> Request {
    Request::netfilter(libc::NFNL_SUBSYS_IPSET, command, flags, Family::V4.number())
        .attribute(top::PROTOCOL, &[protocol])
}

/// Begins a request for a set. Without `NLM_F_EXCL` the kernel reports no error when it adds an
/// existing entry, or deletes or destroys a missing object.
fn about(command: u8, flags: u16, protocol: u8, set: &str) -> Request {
    request(command, flags, protocol).text(top::SETNAME, set)
}

fn put_u32(request: Request, kind: u16, value: impl Into<Option<u32>>) -> Request {
    let value = value.into().into_iter();
    value.fold(request, |request, value| request.attribute(kind | NET_BYTE_ORDER, &value.to_be_bytes()))
}

fn put_u16(request: Request, kind: u16, value: u16) -> Request {
    request.attribute(kind | NET_BYTE_ORDER, &value.to_be_bytes())
}

fn put_ip(request: Request, kind: u16, address: IpAddr) -> Request {
    let inner = if address.is_ipv4() { IPADDR_V4 } else { IPADDR_V6 };
    request.nested(kind, |request| request.ip(inner | NET_BYTE_ORDER, address))
}

pub(crate) fn get_protocol(ours: u8) -> Request {
    request(commands::PROTOCOL, 0, ours)
}

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
        .nested(top::DATA, |request| {
            let request = put_u32(request, data::TIMEOUT, of.timeout_seconds);
            if of.set_type == SetType::BitmapPort {
                let (first, last) = Specification::PORT_RANGE;
                return put_u16(put_u16(request, data::PORT, first), data::PORT_TO, last);
            }
            put_u32(put_u32(request, data::HASHSIZE, of.hash_size), data::MAXELEM, of.max_elements)
        })
}

pub(crate) fn destroy(protocol: u8, set: &str) -> Request {
    about(commands::DESTROY, FLAG_EXCLUSIVE, protocol, set)
}

pub(crate) fn swap(protocol: u8, set: &str, with: &str) -> Request {
    about(commands::SWAP, 0, protocol, set).text(top::SETNAME2, with)
}

pub(crate) fn list(protocol: u8, set: &str, entries: bool) -> Request {
    let request = about(commands::LIST, FLAG_DUMP, protocol, set);
    if entries { request } else { put_u32(request, top::FLAGS, LIST_HEADER) }
}

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

type Versions = (u8, u8);

/// Reads the kernel's protocol versions. Kernels before 4.20 report a single version.
pub(crate) fn protocol_versions(payload: &[u8]) -> Result<Versions, Malformed> {
    versions(payload, top::PROTOCOL, "no version of the protocol")
}

pub(crate) fn revisions(payload: &[u8]) -> Result<Versions, Malformed> {
    versions(payload, top::REVISION, "no revision of the set type")
}

fn versions(payload: &[u8], greatest: u16, missing: &'static str) -> Result<Versions, Malformed> {
    let fields = Fields::of(netfilter_attributes(payload)?)?;
    let most = fields.need(greatest, read_u8, missing)?;
    Ok((fields.get(top::MINIMUM, read_u8)?.unwrap_or(most), most))
}

/// Adds one message of a list to the sets read so far. The first message of a set has the header;
/// further messages of the same set have no header.
pub(crate) fn add_part(sets: &mut Vec<Set>, payload: &[u8]) -> Result<(), Malformed> {
    let fields = Fields::of(netfilter_attributes(payload)?)?;
    let name = fields.need(top::SETNAME, read_text, "a set without a name")?;
    if let Some(type_name) = fields.get(top::TYPENAME, read_text)? {
        sets.push(Set { header: read_header(name.clone(), type_name, &fields)?, entries: Vec::new() });
    }
    let set = sets.last_mut().filter(|set| set.header.name == name);
    let set = set.ok_or(Malformed("a set without its first message"))?;
    if let Some(set_type) = SetType::of_name(&set.header.type_name) {
        for attribute in checked_attributes(fields.bytes(top::ADT).unwrap_or_default()) {
            if let (top::DATA, value) = attribute? {
                set.entries.push(read_entry(set_type, &Fields::of(value)?)?);
            }
        }
    }
    Ok(())
}

fn read_header(name: String, type_name: String, fields: &Fields<'_>) -> Result<Header, Malformed> {
    let data = Fields::of(fields.bytes(top::DATA).unwrap_or_default())?;
    let number = |kind| data.get(kind, read_be32);
    let port_range = if type_name == SetType::BitmapPort.name() {
        data.get(data::PORT, read_be16)?.zip(data.get(data::PORT_TO, read_be16)?)
    } else {
        None
    };
    let flags = number(data::CADT_FLAGS)?.unwrap_or_default();
    let has_mask = [data::NETMASK, data::BITMASK].iter().any(|kind| data.bytes(*kind).is_some());
    Ok(Header {
        name,
        type_name,
        family: fields.get(top::FAMILY, read_u8)?.and_then(|number| Family::of_number(number.into())),
        revision: fields.need(top::REVISION, read_u8, "a set without the revision of its type")?,
        hash_size: number(data::HASHSIZE)?,
        max_elements: number(data::MAXELEM)?,
        port_range,
        comments: flags & WITH_COMMENT != 0,
        timeout_seconds: number(data::TIMEOUT)?,
        changes_entries: has_mask || flags & WITH_FORCEADD != 0,
        references: number(data::REFERENCES)?.unwrap_or_default(),
        elements: number(data::ELEMENTS)?,
    })
}

fn read_address(value: &[u8]) -> Result<IpAddr, Malformed> {
    let fields = Fields::of(value)?;
    let address = fields.bytes(IPADDR_V4).or(fields.bytes(IPADDR_V6));
    read_ip(address.ok_or(Malformed("an address that is neither IPv4 nor IPv6"))?)
}

fn read_entry(set_type: SetType, fields: &Fields<'_>) -> Result<Entry, Malformed> {
    let first = || fields.need(data::IP, read_address, "an entry without its address");
    let second = || fields.need(data::IP2, read_address, "an entry without its second address");
    let port = || fields.need(data::PORT, read_be16, "an entry without its port");
    let protocol = || fields.need(data::PROTO, read_u8, "an entry without its protocol").map(Protocol::of_number);
    // The kernel omits the prefix length of a single address.
    let length = |kind, net| Ok(fields.get(kind, read_u8)?.unwrap_or(Prefix::host(net).length));
    let element = match set_type {
        SetType::HashIp => Element::Ip(first()?),
        SetType::HashIpPort => Element::IpPort(first()?, protocol()?, port()?),
        SetType::HashIpPortIp => Element::IpPortIp(first()?, protocol()?, port()?, second()?),
        SetType::HashIpPortNet => {
            Element::IpPortNet(first()?, protocol()?, port()?, second()?, length(data::CIDR2, second()?)?)
        }
        SetType::HashNet => Element::Net(first()?, length(data::CIDR, first()?)?),
        SetType::BitmapPort => Element::Port(port()?),
    };
    let flags = fields.get(data::CADT_FLAGS, read_be32)?.unwrap_or_default();
    Ok(Entry { element, nomatch: flags & NOMATCH != 0 })
}
