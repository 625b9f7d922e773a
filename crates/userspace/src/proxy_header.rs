//! The header of the PROXY protocol (HAProxy's `doc/proxy-protocol.txt`), which tells an endpoint
//! the addresses that the client used. The tests have examples of that document.

use std::{
    fmt::Write as _,
    net::{IpAddr, SocketAddr},
};

/// The version of the PROXY protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProxyVersion {
    /// A line of text.
    V1,
    /// A binary header.
    V2,
}

/// Whether the header is for a stream or for a datagram. Version 1 has no datagrams.
const TCP: u8 = 1;
const SIGNATURE: [u8; 12] = *b"\r\n\r\n\0\r\nQUIT\n";
const VERSION_2_PROXY: u8 = 0x21;

/// The header of a TCP connection from `client` to `destination`, the address of the Service.
pub(crate) fn header(version: ProxyVersion, client: SocketAddr, destination: SocketAddr) -> Vec<u8> {
    let (from, to) = (client.ip().to_canonical(), destination.ip().to_canonical());
    // If one address is IPv4 and one is IPv6, both are written as IPv6.
    let (from, to) = match (from, to) {
        (IpAddr::V4(from), IpAddr::V6(_)) => (from.to_ipv6_mapped().into(), to),
        (IpAddr::V6(_), IpAddr::V4(to)) => (from, to.to_ipv6_mapped().into()),
        same => same,
    };
    match version {
        ProxyVersion::V1 => {
            let family = if from.is_ipv4() { "TCP4" } else { "TCP6" };
            let mut line = String::new();
            // Writing to a String cannot fail.
            let _ = write!(line, "PROXY {family} {from} {to} {} {}\r\n", client.port(), destination.port());
            line.into_bytes()
        }
        ProxyVersion::V2 => {
            let family = if from.is_ipv4() { 0x10 } else { 0x20 };
            let mut addresses = Vec::with_capacity(36);
            for ip in [from, to] {
                match ip {
                    IpAddr::V4(v4) => addresses.extend(v4.octets()),
                    IpAddr::V6(v6) => addresses.extend(v6.octets()),
                }
            }
            addresses.extend(client.port().to_be_bytes());
            addresses.extend(destination.port().to_be_bytes());
            let mut bytes = SIGNATURE.to_vec();
            bytes.extend([VERSION_2_PROXY, family | TCP]);
            bytes.extend(u16::try_from(addresses.len()).unwrap_or(0).to_be_bytes());
            bytes.extend(addresses);
            bytes
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(client: &str, destination: &str) -> String {
        let bytes = header(ProxyVersion::V1, client.parse().unwrap(), destination.parse().unwrap());
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn version_1_is_a_line() {
        let line = text("192.168.0.1:56324", "192.168.0.11:443");
        assert_eq!(line, "PROXY TCP4 192.168.0.1 192.168.0.11 56324 443\r\n");
        assert_eq!(text("[fd00::1]:1", "[fd00::2]:2"), "PROXY TCP6 fd00::1 fd00::2 1 2\r\n");
        assert_eq!(text("[::ffff:10.0.0.1]:1", "10.0.0.2:2"), "PROXY TCP4 10.0.0.1 10.0.0.2 1 2\r\n");
    }

    #[test]
    fn version_2_has_the_signature_the_lengths_and_the_addresses() {
        let bytes = header(ProxyVersion::V2, "10.0.0.1:258".parse().unwrap(), "10.0.0.2:80".parse().unwrap());
        let mut expected = vec![0x0d, 0x0a, 0x0d, 0x0a, 0, 0x0d, 0x0a, 0x51, 0x55, 0x49, 0x54, 0x0a, 0x21, 0x11, 0, 12];
        expected.extend([10, 0, 0, 1, 10, 0, 0, 2, 1, 2, 0, 80]);
        assert_eq!(bytes, expected);
        let bytes = header(ProxyVersion::V2, "[fd00::1]:1".parse().unwrap(), "[fd00::2]:2".parse().unwrap());
        assert_eq!((bytes[13], bytes[15], bytes.len()), (0x21, 36, 52));
    }
}
