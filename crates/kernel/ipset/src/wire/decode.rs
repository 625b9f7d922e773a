//! Decoding of the kernel's answers. Unknown attributes are ignored. A truncated message, or a
//! message without a required attribute, is an error.

use std::net::IpAddr;

use headgate_netlink::{Malformed, checked_attributes, netfilter, read_be16, read_be32, read_ip, read_text, read_u8};

use super::{IPADDR_V4, IPADDR_V6, NOMATCH, WITH_COMMENT, WITH_FORCEADD, data, top};
use crate::{Element, Entry, Family, Header, Protocol, SetType};

/// The lowest and the highest supported version.
type Versions = (u8, u8);

/// Reads the kernel's protocol versions. Kernels before 4.20 report a single version.
pub(crate) fn protocol_versions(payload: &[u8]) -> Result<Versions, Malformed> {
    versions(payload, top::PROTOCOL, "no version of the protocol")
}

/// Reads the revisions of a type.
pub(crate) fn revisions(payload: &[u8]) -> Result<Versions, Malformed> {
    versions(payload, top::REVISION, "no revision of the set type")
}

fn versions(payload: &[u8], greatest: u16, missing: &'static str) -> Result<Versions, Malformed> {
    let (mut least, mut most) = (None, None);
    for attribute in checked_attributes(netfilter::attributes(payload)?) {
        let (kind, value) = attribute?;
        if kind == greatest {
            most = Some(read_u8(value)?);
        } else if kind == top::MINIMUM {
            least = Some(read_u8(value)?);
        }
    }
    let most = most.ok_or(Malformed(missing))?;
    Ok((least.unwrap_or(most), most))
}

/// One message of a list. The first message of a set has the header; further messages of the same
/// set have no header.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) name: String,
    pub(crate) header: Option<Header>,
    entries: Vec<u8>,
}

impl Part {
    /// Decodes the entries by the set type of the header.
    pub(crate) fn entries(&self, set_type: SetType) -> Result<Vec<Entry>, Malformed> {
        let mut found = Vec::new();
        for attribute in checked_attributes(&self.entries) {
            if let (top::DATA, value) = attribute? {
                found.push(entry(set_type, value)?);
            }
        }
        Ok(found)
    }
}

/// Reads one message of a list.
pub(crate) fn read_part(payload: &[u8]) -> Result<Part, Malformed> {
    let (mut name, mut type_name, mut family, mut revision) = (None, None, 0, None);
    let (mut header_data, mut entries) = (&[][..], Vec::new());
    for attribute in checked_attributes(netfilter::attributes(payload)?) {
        match attribute? {
            (top::SETNAME, value) => name = Some(read_text(value)?.to_owned()),
            (top::TYPENAME, value) => type_name = Some(read_text(value)?.to_owned()),
            (top::REVISION, value) => revision = Some(read_u8(value)?),
            (top::FAMILY, value) => family = read_u8(value)?,
            (top::DATA, value) => header_data = value,
            (top::ADT, value) => entries = value.to_vec(),
            _ => {}
        }
    }
    let name = name.ok_or(Malformed("a set without a name"))?;
    let header = match type_name {
        None => None,
        Some(type_name) => {
            let revision = revision.ok_or(Malformed("a set without the revision of its type"))?;
            Some(read_header(name.clone(), type_name, family, revision, header_data)?)
        }
    };
    Ok(Part { name, header, entries })
}

fn read_header(name: String, type_name: String, family: u8, revision: u8, bytes: &[u8]) -> Result<Header, Malformed> {
    let family = Family::of_number(family.into());
    let is_bitmap = type_name == SetType::BitmapPort.name();
    let (mut hash_size, mut max_elements, mut elements) = (None, None, None);
    let (mut first, mut last) = (None, None);
    let (mut flags, mut references, mut changes_entries, mut timeout_seconds) = (0, 0, false, None);
    for attribute in checked_attributes(bytes) {
        match attribute? {
            (data::HASHSIZE, value) => hash_size = Some(read_be32(value)?),
            (data::MAXELEM, value) => max_elements = Some(read_be32(value)?),
            (data::ELEMENTS, value) => elements = Some(read_be32(value)?),
            (data::REFERENCES, value) => references = read_be32(value)?,
            (data::CADT_FLAGS, value) => flags = read_be32(value)?,
            (data::TIMEOUT, value) => timeout_seconds = Some(read_be32(value)?),
            (data::NETMASK | data::BITMASK, _) => changes_entries = true,
            (data::PORT, value) if is_bitmap => first = Some(read_be16(value)?),
            (data::PORT_TO, value) if is_bitmap => last = Some(read_be16(value)?),
            _ => {}
        }
    }
    Ok(Header {
        name,
        type_name,
        family,
        revision,
        hash_size,
        max_elements,
        port_range: first.zip(last),
        comments: flags & WITH_COMMENT != 0,
        timeout_seconds,
        changes_entries: changes_entries || flags & WITH_FORCEADD != 0,
        references,
        elements,
    })
}

fn ip(value: &[u8]) -> Result<IpAddr, Malformed> {
    for attribute in checked_attributes(value) {
        if let (IPADDR_V4 | IPADDR_V6, value) = attribute? {
            return read_ip(value);
        }
    }
    Err(Malformed("an address that is neither IPv4 nor IPv6"))
}

fn entry(set_type: SetType, bytes: &[u8]) -> Result<Entry, Malformed> {
    let (mut first, mut second, mut length) = (None, None, None);
    let (mut port, mut protocol) = (None, None);
    let mut flags = 0;
    for attribute in checked_attributes(bytes) {
        match attribute? {
            (data::IP, value) => first = Some(ip(value)?),
            (data::IP2, value) => second = Some(ip(value)?),
            (data::CIDR | data::CIDR2, value) => length = Some(read_u8(value)?),
            (data::PORT, value) => port = Some(read_be16(value)?),
            (data::PROTO, value) => protocol = Some(Protocol::of_number(read_u8(value)?)),
            (data::CADT_FLAGS, value) => flags = read_be32(value)?,
            _ => {}
        }
    }
    let first = || first.ok_or(Malformed("an entry without its address"));
    let second = || second.ok_or(Malformed("an entry without its second address"));
    let port = || port.ok_or(Malformed("an entry without its port"));
    let protocol = || protocol.ok_or(Malformed("an entry without its protocol"));
    // The kernel omits the prefix length of a single address.
    let length_of = |net: IpAddr| length.unwrap_or(if net.is_ipv4() { 32 } else { 128 });
    let element = match set_type {
        SetType::HashIp => Element::Ip(first()?),
        SetType::HashIpPort => Element::IpPort(first()?, protocol()?, port()?),
        SetType::HashIpPortIp => Element::IpPortIp(first()?, protocol()?, port()?, second()?),
        SetType::HashIpPortNet => {
            let net = second()?;
            Element::IpPortNet(first()?, protocol()?, port()?, net, length_of(net))
        }
        SetType::HashNet => {
            let net = first()?;
            Element::Net(net, length_of(net))
        }
        SetType::BitmapPort => Element::Port(port()?),
    };
    Ok(Entry { element, nomatch: flags & NOMATCH != 0 })
}
