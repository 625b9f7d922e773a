//! Encoding of rtnetlink requests and decoding of the answers.

use std::net::IpAddr;

use super::{Change, Event, Link, LinkAddress, Prefix};
use crate::{Malformed, Request, checked_attributes, read_ip, read_text, read_u32};

/// `IFLA_IFNAME`.
const LINK_NAME: u16 = 3;
/// `IFLA_LINKINFO`.
const LINK_INFO: u16 = 18;
/// `IFLA_INFO_KIND`.
const LINK_INFO_KIND: u16 = 1;
/// Bytes of `struct ifinfomsg`.
const LINK_HEADER_BYTES: usize = 16;

/// `IFA_ADDRESS`.
const ADDRESS: u16 = 1;
/// `IFA_LOCAL`: the local address. It differs from `IFA_ADDRESS` on point-to-point links.
const ADDRESS_LOCAL: u16 = 2;
/// `IFA_CACHEINFO`: lifetimes.
const ADDRESS_LIFETIMES: u16 = 6;
/// `IFA_FLAGS`.
const ADDRESS_FLAGS: u16 = 8;
/// Bytes of `struct ifaddrmsg`.
const ADDRESS_HEADER_BYTES: usize = 8;

/// `RTA_DST`.
const ROUTE_DESTINATION: u16 = 1;
/// `RTA_OIF`: the index of the link.
const ROUTE_LINK: u16 = 4;

const FLAG_DUMP: u16 = libc::NLM_F_DUMP as u16;
const FLAG_REPLACE: u16 = libc::NLM_F_REPLACE as u16;
const FLAG_CREATE: u16 = (libc::NLM_F_CREATE | libc::NLM_F_EXCL) as u16;

fn family_of(address: IpAddr) -> u8 {
    family_number(if address.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 })
}

fn family_number(family: libc::c_int) -> u8 {
    u8::try_from(family).unwrap_or_default()
}

fn put_ip(request: Request, kind: u16, address: IpAddr) -> Request {
    match address {
        IpAddr::V4(address) => request.attribute(kind, &address.octets()),
        IpAddr::V6(address) => request.attribute(kind, &address.octets()),
    }
}

/// Begins a request about a link. The request sets the flags `link_flags` of the link.
fn link_request(kind: u16, flags: u16, index: u32, link_flags: u32) -> Request {
    let mut header = [0; LINK_HEADER_BYTES];
    header[4..8].copy_from_slice(&index.to_ne_bytes());
    header[8..12].copy_from_slice(&link_flags.to_ne_bytes());
    header[12..16].copy_from_slice(&link_flags.to_ne_bytes());
    Request::new(kind, flags, &header)
}

pub(super) fn get_link(name: &str) -> Request {
    link_request(libc::RTM_GETLINK, 0, 0, 0).text(LINK_NAME, name)
}

pub(super) fn add_dummy(name: &str) -> Request {
    let no_arp = libc::IFF_NOARP.cast_unsigned();
    link_request(libc::RTM_NEWLINK, FLAG_CREATE, 0, no_arp)
        .text(LINK_NAME, name)
        .nested(LINK_INFO, |info| info.text(LINK_INFO_KIND, "dummy"))
}

pub(super) fn remove_link(index: u32) -> Request {
    link_request(libc::RTM_DELLINK, 0, index, 0)
}

pub(super) fn link(payload: &[u8]) -> Result<Link, Malformed> {
    let short = Malformed("a link without its header");
    let header = payload.get(..LINK_HEADER_BYTES).ok_or(short)?;
    let (mut name, mut kind) = (None, None);
    for attribute in checked_attributes(payload.get(LINK_HEADER_BYTES..).ok_or(short)?) {
        match attribute? {
            (LINK_NAME, value) => name = Some(read_text(value)?.to_owned()),
            (LINK_INFO, value) => {
                for attribute in checked_attributes(value) {
                    if let (LINK_INFO_KIND, value) = attribute? {
                        kind = Some(read_text(value)?.to_owned());
                    }
                }
            }
            _ => {}
        }
    }
    Ok(Link {
        index: read_u32(&header[4..8])?,
        name: name.ok_or(Malformed("a link without a name"))?,
        kind,
        flags: read_u32(&header[8..12])?,
    })
}

fn address_header(family: u8, length: u8, scope: u8, link: u32) -> [u8; ADDRESS_HEADER_BYTES] {
    let [a, b, c, d] = link.to_ne_bytes();
    [family, length, 0, scope, a, b, c, d]
}

fn address_request(kind: u16, flags: u16, link: u32, address: Prefix) -> Request {
    let header = address_header(family_of(address.address), address.length, libc::RT_SCOPE_HOST, link);
    let request = put_ip(Request::new(kind, flags, &header), ADDRESS_LOCAL, address.address);
    put_ip(request, ADDRESS, address.address)
}

pub(super) fn list_addresses(family: libc::c_int, link: u32) -> Request {
    Request::new(libc::RTM_GETADDR, FLAG_DUMP, &address_header(family_number(family), 0, 0, link))
}

/// Returns the address of an address message, or `None` if the message has no address.
pub(super) fn address(payload: &[u8]) -> Result<Option<LinkAddress>, Malformed> {
    let short = Malformed("an address without its header");
    let header = payload.get(..ADDRESS_HEADER_BYTES).ok_or(short)?;
    let (mut local, mut other) = (None, None);
    for attribute in checked_attributes(payload.get(ADDRESS_HEADER_BYTES..).ok_or(short)?) {
        match attribute? {
            (ADDRESS_LOCAL, value) => local = Some(read_ip(value)?),
            (ADDRESS, value) => other = Some(read_ip(value)?),
            _ => {}
        }
    }
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
        libc::RTM_NEWLINK | libc::RTM_DELLINK if payload.first() == Some(&family_number(libc::AF_UNSPEC)) => {
            let Link { index, name, .. } = link(payload)?;
            Some(if kind == libc::RTM_NEWLINK { Event::Link { index, name } } else { Event::RemovedLink(index) })
        }
        _ => None,
    })
}

/// A `struct ifa_cacheinfo` with a preferred lifetime of 0 and an unlimited valid lifetime. These
/// lifetimes make an IPv6 address deprecated from the beginning, so that the kernel avoids it as a
/// source address (RFC 6724, rule 3). IPv6 has no host scope, which has this effect in IPv4.
fn deprecated_lifetimes() -> [u8; 16] {
    let mut lifetimes = [0; 16];
    lifetimes[4..8].copy_from_slice(&u32::MAX.to_ne_bytes());
    lifetimes
}

pub(super) fn change(change: &Change) -> Request {
    let deprecated = |request: Request| {
        request
            .attribute(ADDRESS_FLAGS, &(libc::IFA_F_NODAD | libc::IFA_F_NOPREFIXROUTE).to_ne_bytes())
            .attribute(ADDRESS_LIFETIMES, &deprecated_lifetimes())
    };
    match *change {
        Change::AddAddress { link, address } => {
            let request = address_request(libc::RTM_NEWADDR, FLAG_CREATE, link, address);
            if address.address.is_ipv4() { request } else { deprecated(request) }
        }
        Change::DeprecateAddress { link, address } => {
            deprecated(address_request(libc::RTM_NEWADDR, FLAG_REPLACE, link, address))
        }
        Change::RemoveAddress { link, address } => address_request(libc::RTM_DELADDR, 0, link, address),
    }
}

/// A request about the route that makes an address local on a link. The header is a `struct rtmsg`.
fn local_route(kind: u16, flags: u16, link: u32, address: IpAddr) -> Request {
    let Prefix { address, length } = Prefix::host(address);
    let table = libc::RT_TABLE_LOCAL;
    let header = [
        [family_of(address), length, 0, 0],
        [table, libc::RTPROT_STATIC, libc::RT_SCOPE_HOST, libc::RTN_LOCAL],
        [0; 4],
    ];
    let request = put_ip(Request::new(kind, flags, &header.concat()), ROUTE_DESTINATION, address);
    request.attribute(ROUTE_LINK, &link.to_ne_bytes())
}

/// Asks for the route to an address.
pub(super) fn get_route(address: IpAddr) -> Request {
    let Prefix { address, length } = Prefix::host(address);
    let header = [[family_of(address), length, 0, 0], [0; 4], [0; 4]];
    put_ip(Request::new(libc::RTM_GETROUTE, 0, &header.concat()), ROUTE_DESTINATION, address)
}

/// Whether a route leads to this node.
pub(super) fn is_local(payload: &[u8]) -> bool {
    payload.get(7) == Some(&libc::RTN_LOCAL)
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
    use std::net::Ipv4Addr;

    use proptest::prelude::*;

    use super::*;

    fn hex(bytes: &[u8]) -> String {
        bytes.chunks(4).map(|word| word.iter().map(|byte| format!("{byte:02x}")).collect::<String>() + " ").collect()
    }

    #[cfg(target_endian = "little")]
    #[test]
    fn changes_are_encoded_as_the_kernel_expects() {
        let add = |address: &str| Change::AddAddress { link: 7, address: Prefix::host(address.parse().unwrap()) };
        assert_eq!(hex(change(&add("10.96.0.1")).payload()), "022000fe 07000000 08000200 0a600001 08000100 0a600001 ");
        assert_eq!(
            hex(change(&add("fd00:96::1")).payload()),
            "0a8000fe 07000000 14000200 fd000096 00000000 00000000 00000001 14000100 fd000096 00000000 00000000 00000001 \
             08000800 02020000 14000600 00000000 ffffffff 00000000 00000000 "
        );
        assert_eq!(
            hex(add_dummy("kube-ipvs0").payload()),
            "00000000 00000000 80000000 80000000 0f000300 6b756265 2d697076 73300000 10001280 0a000100 64756d6d 79000000 "
        );
    }

    /// `ip route add local 169.254.77.1 dev lo`, as Linux 6.18 gets it.
    #[cfg(target_endian = "little")]
    #[test]
    fn a_local_route_is_encoded_as_the_kernel_expects() {
        let request = add_local_route(1, "169.254.77.1".parse().unwrap());
        assert_eq!(hex(request.payload()), "02200000 ff04fe02 00000000 08000100 a9fe4d01 08000400 01000000 ");
    }

    fn bytes(hex: &str) -> Vec<u8> {
        let digits: Vec<char> = hex.chars().filter(|c| !c.is_whitespace()).collect();
        digits.chunks(2).map(|byte| u8::from_str_radix(&String::from_iter(byte), 16).unwrap()).collect()
    }

    /// Compares with messages that Linux 6.18 sends to the multicast groups.
    #[cfg(target_endian = "little")]
    #[test]
    fn notifications_of_addresses_are_decoded() {
        // ip addr add 192.0.2.1/24 dev d0
        let added = bytes(
            "02188000 03000000 08000100 c0000201 08000200 c0000201 07000300 64300000 08000800 80000000 \
             14000600 ffffffff ffffffff fa3d0200 fa3d0200",
        );
        let on = |address: &str, length, peer: Option<[u8; 4]>| LinkAddress {
            link: 3,
            address: Prefix { address: address.parse().unwrap(), length },
            peer: peer.map(Ipv4Addr::from),
        };
        let plain = on("192.0.2.1", 24, Some([192, 0, 2, 1]));
        assert_eq!(event(libc::RTM_NEWADDR, &added), Ok(Some(Event::Address(plain))));
        // ip addr del 192.0.2.1 peer 192.0.2.9 dev d0
        let removed = bytes(
            "02208000 03000000 08000100 c0000209 08000200 c0000201 07000300 64300000 08000800 80000000 \
             14000600 ffffffff ffffffff 023e0200 023e0200",
        );
        let point_to_point = on("192.0.2.1", 32, Some([192, 0, 2, 9]));
        assert_eq!(event(libc::RTM_DELADDR, &removed), Ok(Some(Event::RemovedAddress(point_to_point))));
        // ip addr add 2001:db8::2 peer 2001:db8::9 nodad dev d0
        let added = bytes(
            "0a808200 03000000 14000200 20010db8 00000000 00000000 00000002 14000100 20010db8 00000000 \
             00000000 00000009 14000600 ffffffff ffffffff 123e0200 123e0200 08000800 82000000",
        );
        assert_eq!(event(libc::RTM_NEWADDR, &added), Ok(Some(Event::Address(on("2001:db8::2", 128, None)))));
        assert!(event(libc::RTM_NEWADDR, &added[..30]).is_err() && event(libc::RTM_NEWADDR, &[2]).is_err());
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

    #[test]
    fn encoded_messages_are_decoded_unchanged() {
        let prefix = Prefix { address: "fd00:96::".parse().unwrap(), length: 112 };
        let added = change(&Change::AddAddress { link: 3, address: prefix });
        let expected = LinkAddress { link: 3, address: prefix, peer: None };
        assert_eq!(address(added.payload()), Ok(Some(expected)));
        let link = link(add_dummy("d0").payload()).unwrap();
        assert_eq!((link.name.as_str(), link.kind.as_deref()), ("d0", Some("dummy")));
        assert!(!link.is_up());
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
