//! Parses values of the API: addresses, ranges, ports, protocols, names and times.

use std::net::{IpAddr, Ipv4Addr};

use headgate_core::{
    Protocol,
    dns_name::check_subdomain,
    reach::{AddressUse, unreachable},
};
use ipnet::IpNet;
use k8s_openapi::jiff::Timestamp;

/// Parses an address like the API server. Numbers with leading zeros in an IPv4 address are
/// decimal. An IPv4-mapped IPv6 address becomes the IPv4 address.
///
/// # Errors
/// A sentence that ends in the remedy.
pub(super) fn address(text: &str) -> Result<IpAddr, String> {
    let parsed = if text.contains(':') { text.parse::<IpAddr>().ok() } else { sloppy_ipv4(text).map(IpAddr::V4) };
    let parsed = parsed.map(|address| address.to_canonical());
    parsed
        .ok_or_else(|| format!("{} is not an IP address: write an address such as 10.96.0.10 or fd00::10", shown(text)))
}

/// Parses an address to which another machine can send packets, if it is used like this.
///
/// # Errors
/// The errors of [`address`] and [`unreachable`].
pub(super) fn reachable(text: &str, used: AddressUse) -> Result<IpAddr, String> {
    let address = address(text)?;
    unreachable(address, used).map_or(Ok(address), Err)
}

/// Parses an IPv4 address whose parts may have leading zeros.
fn sloppy_ipv4(text: &str) -> Option<Ipv4Addr> {
    let mut octets = [0; 4];
    let mut parts = text.split('.');
    for octet in &mut octets {
        let part = parts.next()?;
        if part.is_empty() || !part.bytes().all(|byte| byte.is_ascii_digit()) {
            return None;
        }
        let digits = part.trim_start_matches('0');
        *octet = if digits.is_empty() { 0 } else { digits.parse().ok()? };
    }
    parts.next().is_none().then(|| Ipv4Addr::from(octets))
}

/// Parses a range and clears its host bits: `10.0.0.7/24` becomes `10.0.0.0/24`. Spaces before and
/// after the range are ignored.
///
/// # Errors
/// A sentence that ends in the remedy.
pub(super) fn range(text: &str) -> Result<IpNet, String> {
    let trimmed = text.trim();
    let parsed = trimmed.split_once('/').and_then(|(address_text, length)| {
        let address = address(address_text).ok()?;
        let is_number = !length.is_empty() && length.bytes().all(|byte| byte.is_ascii_digit());
        let mut length: u8 = if is_number { length.parse().ok()? } else { return None };
        if address.is_ipv4() && address_text.contains(':') {
            length = length.checked_sub(96)?;
        }
        IpNet::new(address, length).ok()
    });
    let remedy = || format!("{} is not a CIDR range: write a range such as 192.0.2.0/24 or 2001:db8::/64", shown(text));
    parsed.map(|range| range.trunc()).ok_or_else(remedy)
}

/// Checks a port, 1 to 65,535.
///
/// # Errors
/// A sentence that ends in the remedy.
pub(super) fn port(number: i64) -> Result<u16, String> {
    let in_range = u16::try_from(number).ok().filter(|port| *port != 0);
    in_range.ok_or_else(|| format!("{number} is not a port: give a number from 1 to 65535"))
}

/// Checks a port, where 0 means no port.
///
/// # Errors
/// A sentence that ends in the remedy.
pub(super) fn port_or_none(number: i64) -> Result<u16, String> {
    u16::try_from(number)
        .map_err(|_| format!("{number} is not a port: give a number from 1 to 65535, or leave the field out"))
}

/// Parses a protocol; an empty text means TCP.
///
/// # Errors
/// A sentence that ends in the remedy.
pub(super) fn protocol(text: &str) -> Result<Protocol, String> {
    match text {
        "" | "TCP" => Ok(Protocol::Tcp),
        "UDP" => Ok(Protocol::Udp),
        "SCTP" => Ok(Protocol::Sctp),
        _ => Err(format!("{} is not a protocol that a Service can have: write TCP, UDP or SCTP", shown(text))),
    }
}

/// Checks the name of a namespace, a Service or a port (RFC 1123 label). These names become part of
/// rules, so every other name is refused.
///
/// # Errors
/// A sentence that ends in the remedy.
pub(super) fn label(text: &str) -> Result<(), String> {
    if text.len() <= 63 && !text.contains('.') && check_subdomain(text).is_ok() {
        return Ok(());
    }
    Err(format!(
        "{} is not a valid name: use at most 63 lower-case letters, digits and '-', without '-' at either end",
        shown(text)
    ))
}

/// Checks a text that may also be empty.
///
/// # Errors
/// The errors of `check`.
pub(super) fn optional(check: fn(&str) -> Result<(), String>, text: &str) -> Result<(), String> {
    if text.is_empty() { Ok(()) } else { check(text) }
}

/// Checks the name of a Node or a ServiceCIDR (RFC 1123 subdomain).
///
/// # Errors
/// A sentence that ends in the remedy.
pub(super) fn subdomain(text: &str) -> Result<(), String> {
    if check_subdomain(text).is_ok() {
        return Ok(());
    }
    Err(format!("{} is not a valid name: use at most 253 lower-case letters, digits, '-' and '.'", shown(text)))
}

/// Checks a zone, which has the syntax of a label's value.
///
/// # Errors
/// A sentence that ends in the remedy.
pub(super) fn zone(text: &str) -> Result<(), String> {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    if text.len() <= 63 && text.bytes().all(is_allowed) {
        return Ok(());
    }
    Err(format!("{} is not a valid zone: use at most 63 letters, digits, '-', '_' and '.'", shown(text)))
}

/// Quotes a text for a message, escapes its control characters, and shortens it.
pub(super) fn shown(text: &str) -> String {
    const MAX_CHARACTERS: usize = 80;
    let cut: String = text.chars().take(MAX_CHARACTERS).collect();
    let dots = if cut.len() < text.len() { "…" } else { "" };
    format!("{cut:?}{dots}")
}

/// Parses an RFC 3339 time into seconds since the Unix epoch; 0 if the text is not a time.
pub(super) fn unix_seconds(text: &str) -> i64 {
    text.parse::<Timestamp>().map_or(0, Timestamp::as_second)
}

/// Parses an RFC 3339 time into milliseconds since the Unix epoch; 0 if the text is not a time.
pub(super) fn unix_ms(text: &str) -> u64 {
    let parsed = text.parse::<Timestamp>().map(Timestamp::as_millisecond);
    parsed.ok().and_then(|ms| u64::try_from(ms).ok()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn addresses_with_leading_zeros_are_decimal() {
        assert_eq!(address("010.096.000.010").unwrap().to_string(), "10.96.0.10");
        assert_eq!(address("::ffff:10.0.0.1").unwrap().to_string(), "10.0.0.1");
        assert_eq!(address("FD00:0::01").unwrap().to_string(), "fd00::1");
        assert_eq!(range(" 192.168.001.7/24 ").unwrap().to_string(), "192.168.1.0/24");
        assert_eq!(range("::ffff:10.0.0.0/104").unwrap().to_string(), "10.0.0.0/8");
    }

    #[test]
    fn invalid_addresses_and_ranges_are_refused() {
        for text in ["", "300.1.1.1", "1.2.3", "1.2.3.4.5", "1..2.3", "+1.2.3.4", "fe80::1%eth0", "None", "256.0.0.1"] {
            assert!(address(text).is_err(), "{text}");
        }
        for text in ["", "10.0.0.0", "10.0.0.0/33", "10.0.0.0/", "10.0.0.0/+8", "fd00::/129", "::ffff:10.0.0.0/64"] {
            assert!(range(text).is_err(), "{text}");
        }
    }

    #[test]
    fn addresses_that_other_machines_cannot_reach_are_refused() {
        for text in ["127.0.0.1", "127.200.1.1", "0.0.0.0", "224.0.0.1", "169.254.1.1", "255.255.255.255"] {
            assert!(reachable(text, AddressUse::Other).is_err(), "{text}");
        }
        for text in ["::", "::1", "fe80::1", "ff02::1"] {
            assert!(reachable(text, AddressUse::Other).is_err(), "{text}");
        }
        assert!(reachable("10.0.0.1", AddressUse::Other).is_ok());
        assert!(["169.254.1.1", "10.0.0.1"].iter().all(|text| reachable(text, AddressUse::ClusterIp).is_ok()));
        for text in ["fe80::1", "127.0.0.1", "0.0.0.0", "224.0.0.1", "255.255.255.255"] {
            assert!(reachable(text, AddressUse::ClusterIp).is_err(), "{text}");
        }
    }

    #[test]
    fn names_follow_the_rules_of_the_api() {
        let longest = "n".repeat(63);
        for text in ["a", "web-1", "0", &longest] {
            assert_eq!(label(text), Ok(()), "{text}");
        }
        for text in ["", "-a", "a-", "Web", "a.b", "a b", "a\"", "a\n", "ä", &"n".repeat(64)] {
            assert!(label(text).is_err(), "{text}");
        }
        assert!(subdomain("node-1.example.org").is_ok() && subdomain(&"n".repeat(253)).is_ok());
        assert!(subdomain("a..b").is_err() && subdomain("a/b").is_err() && subdomain(&"n".repeat(254)).is_err());
        assert!(zone("eu-west-1A_x.y").is_ok() && zone("eu west").is_err() && zone("\u{1b}[2J").is_err());
        let text = label(&"\u{1b}".repeat(1_000)).unwrap_err();
        assert!(text.len() < 1_000 && !text.contains('\u{1b}'), "{text}");
    }

    #[test]
    fn ports_and_times_are_parsed() {
        assert_eq!(port(65_535), Ok(65_535));
        assert!(port(0).is_err() && port(65_536).is_err() && port(-1).is_err());
        assert_eq!(unix_seconds("2024-01-01T00:00:00Z"), 1_704_067_200);
        assert_eq!(unix_ms("2024-01-01T00:00:00.123456Z"), 1_704_067_200_123);
        assert_eq!(unix_seconds("yesterday"), 0);
    }
}
