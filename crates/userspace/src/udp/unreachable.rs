//! The ICMP error "port unreachable", which tells a client that its datagram reached nobody.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    os::fd::OwnedFd,
};

use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, ipproto, sendto, socket_with};

const UDP: u8 = 17;
const ICMP: u8 = 1;
const ICMPV6: u8 = 58;
/// ICMP type "destination unreachable" and code "port unreachable" (RFC 792).
const UNREACHABLE: [u8; 2] = [3, 3];
/// ICMPv6 type "destination unreachable" and code "port unreachable" (RFC 4443).
const UNREACHABLE_V6: [u8; 2] = [1, 4];
const HOPS: u8 = 64;

/// The raw sockets of a thread. A process without the capability NET_RAW has none.
#[derive(Debug)]
pub(super) struct Reporter {
    v4: Option<OwnedFd>,
    v6: Option<OwnedFd>,
}

impl Reporter {
    pub(super) fn open() -> Self {
        let open = |family| {
            let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
            // Sockets of the protocol RAW receive nothing, and send packets with our headers.
            socket_with(family, SocketType::RAW, flags, Some(ipproto::RAW)).ok()
        };
        Self { v4: open(AddressFamily::INET), v6: open(AddressFamily::INET6) }
    }

    /// Tells `client` that its datagram to `destination` reached nobody. Returns whether the kernel
    /// sent the packet.
    pub(super) fn report(&self, client: SocketAddr, destination: SocketAddr) -> bool {
        let socket = if client.is_ipv4() { &self.v4 } else { &self.v6 };
        let (Some(socket), Some(packet)) = (socket, packet(client, destination)) else { return false };
        // Raw sockets refuse a port.
        sendto(socket, &packet, SendFlags::empty(), &SocketAddr::new(client.ip(), 0)).is_ok()
    }
}

/// The whole packet. `None` if the addresses have different families.
fn packet(client: SocketAddr, destination: SocketAddr) -> Option<Vec<u8>> {
    let mut datagram = [client.port().to_be_bytes(), destination.port().to_be_bytes()].concat();
    // The length of the header, and no checksum.
    datagram.extend([0, 8, 0, 0]);
    match (client.ip(), destination.ip()) {
        (IpAddr::V4(client), IpAddr::V4(destination)) => {
            let quoted = [header(UDP, client, destination, datagram.len()), datagram].concat();
            let message = message(UNREACHABLE, &quoted, 0);
            Some([header(ICMP, destination, client, message.len()), message].concat())
        }
        (IpAddr::V6(client), IpAddr::V6(destination)) => {
            let quoted = [header_v6(UDP, client, destination, datagram.len()), datagram].concat();
            // The checksum of ICMPv6 covers the addresses, the length and the protocol.
            let length = u64::try_from(quoted.len() + 8).unwrap_or_default();
            let pseudo = words(&client.octets()) + words(&destination.octets()) + length + u64::from(ICMPV6);
            let message = message(UNREACHABLE_V6, &quoted, pseudo);
            Some([header_v6(ICMPV6, destination, client, message.len()), message].concat())
        }
        _ => None,
    }
}

/// An ICMP message with its checksum.
fn message(kind: [u8; 2], quoted: &[u8], pseudo_header: u64) -> Vec<u8> {
    let mut message = vec![kind[0], kind[1], 0, 0, 0, 0, 0, 0];
    message.extend(quoted);
    let checksum = checksum(words(&message) + pseudo_header);
    message[2..4].copy_from_slice(&checksum);
    message
}

fn header(protocol: u8, from: Ipv4Addr, to: Ipv4Addr, payload_bytes: usize) -> Vec<u8> {
    let mut header = vec![0x45, 0, 0, 0, 0, 0, 0, 0, HOPS, protocol, 0, 0];
    header[2..4].copy_from_slice(&u16::try_from(20 + payload_bytes).unwrap_or_default().to_be_bytes());
    header.extend(from.octets().into_iter().chain(to.octets()));
    let checksum = checksum(words(&header));
    header[10..12].copy_from_slice(&checksum);
    header
}

fn header_v6(protocol: u8, from: Ipv6Addr, to: Ipv6Addr, payload_bytes: usize) -> Vec<u8> {
    let mut header = vec![0x60, 0, 0, 0, 0, 0, protocol, HOPS];
    header[4..6].copy_from_slice(&u16::try_from(payload_bytes).unwrap_or_default().to_be_bytes());
    header.extend(from.octets().into_iter().chain(to.octets()));
    header
}

/// The sum of the 16-bit words. The length is even.
fn words(bytes: &[u8]) -> u64 {
    bytes.as_chunks::<2>().0.iter().map(|word| u64::from(u16::from_be_bytes(*word))).sum()
}

/// The Internet checksum of a sum of words (RFC 1071).
fn checksum(mut sum: u64) -> [u8; 2] {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    (!u16::try_from(sum).unwrap_or_default()).to_be_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_of_a_packet_are_correct() {
        let v4 = packet("10.0.0.9:4000".parse().unwrap(), "10.96.0.10:53".parse().unwrap()).unwrap();
        assert_eq!((v4.len(), checksum(words(&v4[..20]))), (56, [0, 0]));
        assert_eq!(checksum(words(&v4[20..])), [0, 0]);
        assert_eq!(v4[48..56], [0x0f, 0xa0, 0, 53, 0, 8, 0, 0]);
        let v6 = packet("[fd00::9]:4000".parse().unwrap(), "[fd00:96::10]:53".parse().unwrap()).unwrap();
        let pseudo = words(&v6[8..40]) + 56 + u64::from(ICMPV6);
        assert_eq!((v6.len(), checksum(words(&v6[40..]) + pseudo)), (96, [0, 0]));
    }
}
