//! Connection tracking entries as netlink attributes (`linux/netfilter/nfnetlink_conntrack.h`).
//! Numbers in attributes are big-endian, except the flags of filters, which are in host byte order.

use std::net::SocketAddr;

use headgate_core::{Family, address_from_bytes};
use headgate_netlink::{Request, attributes};

const SUBSYSTEM: u16 = (libc::NFNL_SUBSYS_CTNETLINK as u16) << 8;
/// `IPCTNL_MSG_CT_NEW`: the type of listed messages. A request adds or changes an entry.
pub const MESSAGE_NEW: u16 = SUBSYSTEM;
const MESSAGE_GET: u16 = SUBSYSTEM | 1;
const MESSAGE_DELETE: u16 = SUBSYSTEM | 2;

/// `CTA_TUPLE_ORIG`.
pub const TUPLE_ORIGINAL: u16 = 1;
/// `CTA_TUPLE_REPLY`.
pub const TUPLE_REPLY: u16 = 2;
const ID: u16 = 12;
const ZONE: u16 = 18;
const FILTER: u16 = 25;

/// `CTA_TUPLE_IP`.
pub const TUPLE_IP: u16 = 1;
/// `CTA_TUPLE_PROTO`.
pub const TUPLE_PROTOCOL: u16 = 2;
/// `CTA_PROTO_NUM`.
pub const PROTOCOL_NUMBER: u16 = 1;
/// `CTA_PROTO_SRC_PORT`.
pub const SOURCE_PORT: u16 = 2;
/// `CTA_PROTO_DST_PORT`.
pub const DESTINATION_PORT: u16 = 3;

const FILTER_ORIGINAL_FLAGS: u16 = 1;
/// `CTA_FILTER_FLAG(CTA_PROTO_NUM)`: the filter compares the protocol
/// (`net/netfilter/nf_internals.h`).
const COMPARE_PROTOCOL: u32 = 1 << 3;

const FLAG_DUMP: u16 = libc::NLM_F_DUMP as u16;
const PROTOCOL_UDP: u8 = libc::IPPROTO_UDP as u8;

/// Encodes `struct nfgenmsg` for a family.
pub fn header(family: Family) -> [u8; 4] {
    let family = match family {
        Family::V4 => libc::AF_INET,
        Family::V6 => libc::AF_INET6,
    };
    [u8::try_from(family).unwrap_or_default(), 0, 0, 0]
}

/// Returns the request to list the UDP entries of a family. Kernels before 5.8 list all entries.
pub fn list(family: Family) -> Request {
    Request::new(MESSAGE_GET, FLAG_DUMP, &header(family))
        .nested(TUPLE_ORIGINAL, |tuple| {
            tuple.nested(TUPLE_PROTOCOL, |protocol| protocol.attribute(PROTOCOL_NUMBER, &[PROTOCOL_UDP]))
        })
        .nested(FILTER, |flags| flags.attribute(FILTER_ORIGINAL_FLAGS, &COMPARE_PROTOCOL.to_ne_bytes()))
}

/// A UDP entry of a list. The entry borrows from the received message, because most entries are not
/// stale and are dropped at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UdpEntry<'a> {
    /// The destination to which the client sends, before translation.
    pub original_destination: SocketAddr,
    /// The source of the replies: the endpoint, if the flow is translated.
    pub reply_source: SocketAddr,
    original_tuple: &'a [u8],
    id: &'a [u8],
    zone: Option<&'a [u8]>,
    family: Family,
}

impl<'a> UdpEntry<'a> {
    /// Parses the payload of a message. Returns `None` if the entry is not UDP, or if a required
    /// attribute is missing or malformed.
    pub fn parse(payload: &'a [u8]) -> Option<Self> {
        let (mut original, mut reply, mut id, mut zone) = (None, None, None, None);
        for (kind, value) in attributes(payload.get(4..)?) {
            match kind {
                TUPLE_ORIGINAL => original = Some(value),
                TUPLE_REPLY => reply = Some(value),
                ID => id = Some(value),
                ZONE => zone = Some(value),
                _ => {}
            }
        }
        let original_tuple = original?;
        let (_, original_destination) = udp_tuple(original_tuple)?;
        let (reply_source, _) = udp_tuple(reply?)?;
        let family = Family::of(original_destination.ip());
        Some(Self { original_destination, reply_source, original_tuple, id: id?, zone, family })
    }

    /// Returns the request to delete this entry. The request includes the ID of the entry, so that
    /// the kernel does not delete a newer entry with an equal tuple.
    pub fn delete(&self) -> Request {
        let request = Request::new(MESSAGE_DELETE, 0, &header(self.family))
            // The tuple is sent back as received, with the flag for nested attributes.
            .nested(TUPLE_ORIGINAL, |tuple| attributes(self.original_tuple).fold(tuple, put_nested))
            .attribute(ID, self.id);
        match self.zone {
            Some(zone) => request.attribute(ZONE, zone),
            None => request,
        }
    }
}

/// Adds one part of a tuple. `CTA_TUPLE_IP` and `CTA_TUPLE_PROTO` are nested, the zone is not.
fn put_nested(request: Request, (kind, value): (u16, &[u8])) -> Request {
    if kind == TUPLE_IP || kind == TUPLE_PROTOCOL {
        request.nested(kind, |part| attributes(value).fold(part, |part, (kind, value)| part.attribute(kind, value)))
    } else {
        request.attribute(kind, value)
    }
}

/// The source and the destination of a tuple. `None` if its protocol is not UDP.
fn udp_tuple(tuple: &[u8]) -> Option<(SocketAddr, SocketAddr)> {
    let (mut source, mut destination) = (None, None);
    let (mut source_port, mut destination_port, mut is_udp) = (None, None, false);
    for (part, nested) in attributes(tuple) {
        for (kind, value) in attributes(nested) {
            match (part, kind) {
                // `CTA_IP_V4_SRC`, `CTA_IP_V6_SRC`, `CTA_IP_V4_DST`, `CTA_IP_V6_DST`.
                (TUPLE_IP, 1 | 3) => source = address_from_bytes(value),
                (TUPLE_IP, 2 | 4) => destination = address_from_bytes(value),
                (TUPLE_PROTOCOL, PROTOCOL_NUMBER) => is_udp = value == [PROTOCOL_UDP],
                (TUPLE_PROTOCOL, SOURCE_PORT) => source_port = port(value),
                (TUPLE_PROTOCOL, DESTINATION_PORT) => destination_port = port(value),
                _ => {}
            }
        }
    }
    let pair = (SocketAddr::new(source?, source_port?), SocketAddr::new(destination?, destination_port?));
    is_udp.then_some(pair)
}

fn port(value: &[u8]) -> Option<u16> {
    value.try_into().ok().map(u16::from_be_bytes)
}
