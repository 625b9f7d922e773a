//! Encoding of rtnetlink requests and decoding of the answers.

use std::net::IpAddr;

use super::{Change, Event, Link, LinkAddress, Prefix};
use crate::{Family, Fields, Malformed, Request, read_ip, read_text, read_u32};

/// Bytes of `struct ifinfomsg`.
const LINK_HEADER_BYTES: usize = 16;
/// Bytes of `struct ifaddrmsg`.
const ADDRESS_HEADER_BYTES: usize = 8;
/// `IFA_FLAGS`.
const ADDRESS_FLAGS: u16 = 8;

const FLAG_CREATE: u16 = (libc::NLM_F_CREATE | libc::NLM_F_EXCL) as u16;

pub(super) fn link_request(kind: u16, flags: u16, index: u32, link_flags: u32) -> Request {
    let words = [0, index, link_flags, link_flags].map(u32::to_ne_bytes);
    Request::new(kind, flags, words.as_flattened())
}

pub(super) fn add_dummy(name: &str) -> Request {
    link_request(libc::RTM_NEWLINK, FLAG_CREATE, 0, libc::IFF_NOARP.cast_unsigned())
        .text(libc::IFLA_IFNAME, name)
        .nested(libc::IFLA_LINKINFO, |info| info.text(libc::IFLA_INFO_KIND, "dummy"))
}

pub(super) fn link(payload: &[u8]) -> Result<Link, Malformed> {
    let (header, attributes) =
        payload.split_at_checked(LINK_HEADER_BYTES).ok_or(Malformed("a link without its header"))?;
    let fields = Fields::of(attributes)?;
    let info = fields.get(libc::IFLA_LINKINFO, Fields::of)?;
    Ok(Link {
        index: read_u32(&header[4..8])?,
        name: fields.need(libc::IFLA_IFNAME, read_text, "a link without a name")?,
        kind: info.map(|info| info.get(libc::IFLA_INFO_KIND, read_text)).transpose()?.flatten(),
        flags: read_u32(&header[8..12])?,
    })
}

pub(super) fn address_request(kind: u16, flags: u16, family: Family, length: u8, scope: u8, link: u32) -> Request {
    let [a, b, c, d] = link.to_ne_bytes();
    Request::new(kind, flags, &[family.number(), length, 0, scope, a, b, c, d])
}

pub(super) fn address(payload: &[u8]) -> Result<Option<LinkAddress>, Malformed> {
    let (header, attributes) =
        payload.split_at_checked(ADDRESS_HEADER_BYTES).ok_or(Malformed("an address without its header"))?;
    let fields = Fields::of(attributes)?;
    // The local address differs from the other address on point-to-point links.
    let (local, other) = (fields.get(libc::IFA_LOCAL, read_ip)?, fields.get(libc::IFA_ADDRESS, read_ip)?);
    let link = read_u32(&header[4..8])?;
    // In IPv6 the peer is not part of the key: the kernel can change it (`inet6_addr_modify`).
    let peer = other.and_then(|other| if let IpAddr::V4(peer) = other { Some(peer) } else { None });
    let prefix = |address| Prefix { address, length: header[1] };
    Ok(local.or(other).map(|address| LinkAddress { link, address: prefix(address), peer }))
}

/// Whether the kernel may choose an IPv6 address as a source address, by its address message.
pub(super) fn is_preferred(address: &LinkAddress, payload: &[u8]) -> bool {
    let is_deprecated = payload.get(2).is_some_and(|flags| u32::from(*flags) & libc::IFA_F_DEPRECATED != 0);
    address.address.address.is_ipv6() && !is_deprecated
}

/// Returns the event that a notification reports, or `None` if the notification does not report a
/// change of a link or an address.
pub(super) fn event(kind: u16, payload: &[u8]) -> Result<Option<Event>, Malformed> {
    Ok(match kind {
        libc::RTM_NEWADDR => address(payload)?.map(Event::Address),
        libc::RTM_DELADDR => address(payload)?.map(Event::RemovedAddress),
        // A bridge sends messages of the same types about its ports, in the family `AF_BRIDGE`. A
        // bridge sends `RTM_DELLINK` when a link is no longer a port, although the link still
        // exists (`br_ifinfo_notify` in `net/bridge/br_netlink.c`).
        libc::RTM_NEWLINK | libc::RTM_DELLINK if payload.first() == Some(&(libc::AF_UNSPEC as u8)) => {
            let Link { index, name, .. } = link(payload)?;
            Some(if kind == libc::RTM_NEWLINK { Event::Link { index, name } } else { Event::RemovedLink(index) })
        }
        _ => None,
    })
}

/// The lifetimes of an IPv6 address as `struct ifa_cacheinfo`: deprecated from the beginning, so
/// that the kernel avoids it as a source address (RFC 6724, rule 3), as host scope does in IPv4.
const DEPRECATED: [u32; 4] = [0, u32::MAX, 0, 0];

pub(super) fn change(change: &Change) -> Request {
    let (kind, flags, link, address) = match *change {
        Change::AddAddress { link, address } => (libc::RTM_NEWADDR, FLAG_CREATE, link, address),
        Change::DeprecateAddress { link, address } => (libc::RTM_NEWADDR, libc::NLM_F_REPLACE as u16, link, address),
        Change::RemoveAddress { link, address } => (libc::RTM_DELADDR, 0, link, address),
    };
    let Prefix { address, length } = address;
    let request = address_request(kind, flags, Family::of(address), length, libc::RT_SCOPE_HOST, link)
        .ip(libc::IFA_LOCAL, address)
        .ip(libc::IFA_ADDRESS, address);
    if kind == libc::RTM_DELADDR || address.is_ipv4() {
        return request;
    }
    request
        .attribute(ADDRESS_FLAGS, &(libc::IFA_F_NODAD | libc::IFA_F_NOPREFIXROUTE).to_ne_bytes())
        .attribute(libc::IFA_CACHEINFO, DEPRECATED.map(u32::to_ne_bytes).as_flattened())
}

/// A request about the route to an address, which `route` describes: its table, protocol, scope and
/// type. The header is a `struct rtmsg`.
fn route_request(kind: u16, flags: u16, address: IpAddr, route: [u8; 4]) -> Request {
    let header = [[Family::of(address).number(), Prefix::host(address).length, 0, 0], route, [0; 4]];
    Request::new(kind, flags, header.as_flattened()).ip(libc::RTA_DST, address)
}

pub(super) fn get_route(address: IpAddr) -> Request {
    route_request(libc::RTM_GETROUTE, 0, address, [0; 4])
}

pub(super) fn is_local(payload: &[u8]) -> bool {
    payload.get(7) == Some(&libc::RTN_LOCAL)
}

fn local_route(kind: u16, flags: u16, link: u32, address: IpAddr) -> Request {
    let route = [libc::RT_TABLE_LOCAL, libc::RTPROT_STATIC, libc::RT_SCOPE_HOST, libc::RTN_LOCAL];
    route_request(kind, flags, address, route).attribute(libc::RTA_OIF, &link.to_ne_bytes())
}

pub(super) fn add_local_route(link: u32, address: IpAddr) -> Request {
    local_route(libc::RTM_NEWROUTE, FLAG_CREATE, link, address)
}

pub(super) fn remove_local_route(link: u32, address: IpAddr) -> Request {
    local_route(libc::RTM_DELROUTE, 0, link, address)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    fn bytes(hex: &str) -> Vec<u8> {
        let digits: Vec<char> = hex.chars().filter(|c| !c.is_whitespace()).collect();
        digits.chunks(2).map(|byte| u8::from_str_radix(&String::from_iter(byte), 16).unwrap()).collect()
    }

    #[cfg(target_endian = "little")]
    #[test]
    fn notifications_of_links_are_decoded_and_notifications_of_bridge_ports_are_ignored() {
        // The first attributes of the notification for: ip link del d1
        let link = bytes("00000100 03000000 02100000 ffffffff 07000300 64310000 08000d00 e8030000");
        assert_eq!(event(libc::RTM_DELLINK, &link), Ok(Some(Event::RemovedLink(3))));
        assert_eq!(event(libc::RTM_NEWLINK, &link), Ok(Some(Event::Link { index: 3, name: "d1".into() })));
        // ip link set d0 nomaster
        let port = bytes(
            "07000100 03000000 03100000 00000000 07000300 64300000 08000a00 04000000 08000400 dc050000 \
             05001000 03000000 0a000100 72679cb2 d7d80000 08000500 02000000",
        );
        assert_eq!(event(libc::RTM_DELLINK, &port), Ok(None));
        assert_eq!(event(libc::RTM_NEWROUTE, &link), Ok(None));
    }

    proptest! {
        #[test]
        fn any_bytes_are_decoded_or_give_an_error(bytes in prop::collection::vec(any::<u8>(), 0..120)) {
            let _ = (link(&bytes), address(&bytes));
            for kind in [libc::RTM_NEWLINK, libc::RTM_DELLINK, libc::RTM_NEWADDR, libc::RTM_DELADDR] {
                let _ = event(kind, &bytes);
            }
        }
    }
}
