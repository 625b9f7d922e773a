//! Parses values of the API (addresses, names, times, annotations …), and bounds their size.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr},
};

use headgate_core::{
    Endpoint, EndpointPort, Family, LoadBalancing, Protocol, ProxyProtocol, Service, ServiceKey, Weight,
    dns_name::check_subdomain,
    ipvs::Scheduler,
    reach::{AddressUse, unreachable},
};
use headgate_proto::{ChangesBuilder, MAX_SERVER_MESSAGE_BYTES};
use ipnet::IpNet;
use k8s_openapi::jiff::Timestamp;

use super::problems::Findings;
use crate::objects::{
    Annotations,
    keys::{
        CILIUM_WEIGHT, HEALTH_CHECK, HEALTH_CHECK_INTERVAL, LOAD_BALANCING, MAX_CONNECTIONS, PROXY_PROTOCOL, SCHEDULER,
        WEIGHTS,
    },
};

/// Parses an address like the API server: leading zeros of IPv4 are decimal, and an IPv4-mapped
/// address becomes IPv4. An error is a sentence that ends in the remedy, as everywhere here.
pub(super) fn address(text: &str) -> Result<IpAddr, String> {
    let parsed = if text.contains(':') { text.parse::<IpAddr>().ok() } else { sloppy_ipv4(text).map(IpAddr::V4) };
    let parsed = parsed.map(|address| address.to_canonical());
    parsed
        .ok_or_else(|| format!("{} is not an IP address: write an address such as 10.96.0.10 or fd00::10", shown(text)))
}

/// Parses an address to which another machine can send packets, if it is used like this.
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

/// Parses a range, between spaces, and clears its host bits: `10.0.0.7/24` is `10.0.0.0/24`.
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
pub(super) fn port(number: i64) -> Result<u16, String> {
    let in_range = u16::try_from(number).ok().filter(|port| *port != 0);
    in_range.ok_or_else(|| format!("{number} is not a port: give a number from 1 to 65535"))
}

/// Checks a port, where 0 means no port.
pub(super) fn port_or_none(number: i64) -> Result<u16, String> {
    u16::try_from(number)
        .map_err(|_| format!("{number} is not a port: give a number from 1 to 65535, or leave the field out"))
}

/// Parses a protocol; an empty text means TCP.
pub(super) fn protocol(text: &str) -> Result<Protocol, String> {
    match text {
        "" | "TCP" => Ok(Protocol::Tcp),
        "UDP" => Ok(Protocol::Udp),
        "SCTP" => Ok(Protocol::Sctp),
        _ => Err(format!("{} is not a protocol that a Service can have: write TCP, UDP or SCTP", shown(text))),
    }
}

/// Checks the name of a namespace, a Service or a port (RFC 1123 label), which gets into rules.
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
pub(super) fn optional(check: fn(&str) -> Result<(), String>, text: &str) -> Result<(), String> {
    if text.is_empty() { Ok(()) } else { check(text) }
}

/// Checks the name of a Node or a ServiceCIDR (RFC 1123 subdomain).
pub(super) fn subdomain(text: &str) -> Result<(), String> {
    if check_subdomain(text).is_ok() {
        return Ok(());
    }
    Err(format!("{} is not a valid name: use at most 253 lower-case letters, digits, '-' and '.'", shown(text)))
}

/// Checks a zone, which has the syntax of a label's value.
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

// Annotations for settings without a field of the API. Unreadable ones are ignored and reported.

/// The highest limit of connections. A node has fewer ports for connections to one endpoint.
const HIGHEST_LIMIT: u32 = 1_000_000;

/// Bounds of the interval of health checks, in milliseconds.
const INTERVAL_MS: std::ops::RangeInclusive<u64> = 500..=3_600_000;

pub(super) fn annotations(annotations: &Annotations, service: &mut Service, findings: &mut Findings) {
    if let Some(name) = annotations.get(LOAD_BALANCING) {
        match LoadBalancing::parse(name) {
            Some(algorithm) => service.load_balancing = algorithm.as_str().into(),
            None => {
                let known = LoadBalancing::ALL.map(LoadBalancing::as_str).join(", ");
                let message = format!("{} is not an algorithm for load balancing: write one of {known}", shown(name));
                findings.annotation(LOAD_BALANCING, message, "each node uses the default of its mode");
            }
        }
    }
    if let Some(name) = annotations.get(SCHEDULER) {
        match Scheduler::parse(name) {
            Some(scheduler) => service.scheduler = scheduler.as_str().into(),
            None => {
                let known = Scheduler::ALL.map(Scheduler::as_str).join(", ");
                let message = format!("{} is not a scheduler of IPVS: write one of {known}", shown(name));
                findings.annotation(SCHEDULER, message, "the cluster's scheduler is used");
            }
        }
    }
    if let Some(name) = annotations.get(PROXY_PROTOCOL) {
        service.proxy_protocol = ProxyProtocol::parse(name);
        if service.proxy_protocol.is_none() {
            let known = ProxyProtocol::ALL.map(ProxyProtocol::as_str).join(" or ");
            let message = format!("{} is not a version of the PROXY protocol: write {known}", shown(name));
            findings.annotation(PROXY_PROTOCOL, message, "its endpoints get no header");
        }
    }
    if let Some(text) = annotations.get(MAX_CONNECTIONS) {
        match text.parse() {
            Ok(limit @ 1..=HIGHEST_LIMIT) => service.max_connections = limit,
            _ => {
                let message =
                    format!("{text:?} is not a limit of connections: write a whole number from 1 to {HIGHEST_LIMIT}");
                findings.annotation(MAX_CONNECTIONS, message, "its connections are not limited");
            }
        }
    }
    match annotations.get(HEALTH_CHECK) {
        None => {}
        Some("tcp") => service.health_check = "tcp".into(),
        Some(other) => {
            let message = format!("{} is not a kind of health check: write tcp", shown(other));
            findings.annotation(HEALTH_CHECK, message, "its endpoints are not checked");
        }
    }
    if let Some(text) = annotations.get(HEALTH_CHECK_INTERVAL) {
        let milliseconds = milliseconds(text).filter(|milliseconds| INTERVAL_MS.contains(milliseconds));
        match milliseconds.and_then(|milliseconds| u32::try_from(milliseconds).ok()) {
            Some(milliseconds) => service.health_check_interval_ms = milliseconds,
            None => {
                let message = format!("{} is not a time between 500ms and 1h: write a time such as 5s", shown(text));
                findings.annotation(HEALTH_CHECK_INTERVAL, message, "the agents' interval is used");
            }
        }
    }
}

/// Reads Cilium's weight of all endpoints of an EndpointSlice. Without it, the weight is 1, which
/// is Cilium's default of 100.
pub(super) fn weight_of_all(annotations: &Annotations, findings: &mut Findings) -> Weight {
    let Some(text) = annotations.get(CILIUM_WEIGHT) else { return Weight::default() };
    let weight = text.trim().parse().map(Weight::from_hundredths);
    weight.unwrap_or_else(|_| {
        let message = format!("{} is not a weight: write a whole number from 0 to 65535", shown(text));
        findings.annotation(CILIUM_WEIGHT, message, "the endpoints have their default weight");
        Weight::default()
    })
}

/// Reads the weights of some endpoints: `10.0.0.1=3, 10.0.0.2=0`, without unreadable entries.
pub(super) fn weights(annotations: &Annotations, findings: &mut Findings) -> BTreeMap<IpAddr, Weight> {
    let mut weights = BTreeMap::new();
    let text = annotations.get(WEIGHTS).unwrap_or_default();
    for entry in text.split(',').map(str::trim).filter(|entry| !entry.is_empty()) {
        let read = entry.split_once('=').and_then(|(address, weight)| {
            let address: IpAddr = address.trim().parse().ok()?;
            Some((address, Weight::new(weight.trim().parse().ok()?)?))
        });
        let message = match read {
            None => format!(
                "{} is not an address with a weight: write ADDRESS=WEIGHT, with a weight from 0 to {}",
                shown(entry),
                Weight::MAX
            ),
            Some((address, weight)) => match weights.insert(address, weight) {
                Some(earlier) if earlier != weight => format!("{address} has two weights: write it once"),
                _ => continue,
            },
        };
        findings.annotation(WEIGHTS, message, "the rest of the annotation is used");
    }
    weights
}

/// Parses a whole number with a unit: `500ms`, `5s`, `1m`, `1h`.
fn milliseconds(text: &str) -> Option<u64> {
    let digits = text.find(|c: char| !c.is_ascii_digit())?;
    let (number, unit) = text.split_at(digits);
    let unit_ms = match unit {
        "ms" => 1,
        "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(unit_ms)
}

// Bounds of the size of one resource. A resource is never divided between messages. A resource
// that exceeds the size limit of messages would end the stream of every agent each time the
// resource is sent.

/// Upper bound of one resource on the wire, in bytes. When a message has reached a quarter of the
/// message limit, no further resource is added to the message. So a resource of half the limit
/// always fits.
pub(super) const MAX_RESOURCE_BYTES: usize = MAX_SERVER_MESSAGE_BYTES / 2;

/// The most zone hints of one endpoint, and node hints. The API allows 8 of each.
pub(super) const MAX_HINTS: usize = 64;

/// The most ranges of a ServiceCIDR or a Node, and addresses of a Node. The API allows 2.
pub(super) const MAX_LISTED: usize = 256;

/// Bytes of a port on the wire, without its name.
const PORT_BYTES: usize = 12;

/// Gives a Service at most `most` frontends: the ClusterIPs and NodePorts, or an error without
/// room for them, then load balancers' addresses and externalIPs in order while there is room.
pub(super) fn fit_frontends(service: &mut Service, most: usize, findings: &mut Findings) -> Result<(), String> {
    let total = service.frontend_count();
    let ports = service.ports.len();
    let load_balancer = std::mem::take(&mut service.load_balancer_ips);
    let external = std::mem::take(&mut service.external_ips);
    let Some(mut room) = most.checked_sub(service.frontend_count()) else {
        return Err(format!(
            "{ports} ports make {} frontends of the ClusterIPs and NodePorts, and a Service may have {most}: give fewer ports, divide the \
             Service, or raise --service-budget of the control plane",
            service.frontend_count()
        ));
    };
    let ranges = Family::BOTH.map(|family| service.source_range_count(family));
    for (field, mut addresses, ranges, served) in [
        ("status.loadBalancer.ingress", load_balancer, ranges, &mut service.load_balancer_ips),
        ("spec.externalIPs", external, [1; 2], &mut service.external_ips),
    ] {
        let fits = |address: &&IpAddr| {
            let rest = room.checked_sub(ports * ranges[Family::of(**address) as usize]);
            room = rest.unwrap_or(room);
            rest.is_some()
        };
        let fitting = addresses.iter().take_while(fits).count();
        if fitting < addresses.len() {
            let message = format!(
                "the Service has {total} frontends (each address with each port, and for load balancers with each source range of its family), and may \
                 have {most}: give fewer addresses, ports or ranges, or raise --service-budget of the control plane; the first {fitting} of \
                 {} addresses here are used",
                addresses.len()
            );
            findings.part(field, message, "the others are left out");
        }
        addresses.truncate(fitting);
        *served = addresses;
    }
    Ok(())
}

/// A Service in use, with the external addresses for which its endpoints leave room.
#[derive(Debug, Clone)]
pub(super) struct Fitted {
    pub(super) service: Service,
    /// The addresses of load balancers and the externalIPs, if some are left out.
    all: Option<Box<[Vec<IpAddr>; 2]>>,
}

impl From<Service> for Fitted {
    fn from(service: Service) -> Self {
        Self { service, all: None }
    }
}

/// Only what is served counts.
impl PartialEq for Fitted {
    fn eq(&self, other: &Self) -> bool {
        self.service == other.service
    }
}

impl Fitted {
    /// Leaves out what is over the budget of destinations with these endpoints, and says so.
    pub(super) fn fit(&mut self, endpoints: [usize; 2], destinations: usize) -> Option<String> {
        let Service { load_balancer_ips, external_ips, .. } = &mut self.service;
        let served = [load_balancer_ips, external_ips].map(std::mem::take);
        let written = self.all.take().map_or(served, |all| *all);
        let most = endpoints.map(|count| destinations / count.max(1));
        let ports = self.service.ports.len();
        let mut room = Family::BOTH
            .map(|family| most[family as usize].saturating_sub(self.service.virtual_servers(family)) / ports);
        let mut fits = |address: &&IpAddr| {
            let room = &mut room[Family::of(**address) as usize];
            let rest = room.checked_sub(1);
            *room = rest.unwrap_or_default();
            rest.is_some()
        };
        let [load_balancers, external] = written.each_ref().map(|all| all.iter().filter(&mut fits).copied().collect());
        let left_out = written.iter().map(Vec::len).sum::<usize>() - Vec::len(&load_balancers) - Vec::len(&external);
        (self.service.load_balancer_ips, self.service.external_ips) = (load_balancers, external);
        self.all = (left_out > 0).then(|| Box::new(written));
        (left_out > 0).then(|| format!(
            "the last {left_out} of the externalIPs and addresses of load balancers are left out: with {} IPv4 and {} IPv6 endpoints the \
             Service may have {} and {} addresses with ports and NodePorts, {} endpoints of them in a family: give fewer addresses, ports or \
             endpoints, or raise --service-budget of the control plane",
            endpoints[0], endpoints[1], most[0], most[1], destinations
        ))
    }
}

pub(super) fn check_service(service: &Service) -> Result<(), String> {
    let mut builder = ChangesBuilder::default();
    builder.service(service);
    let bytes = builder.estimated_bytes();
    if bytes <= MAX_RESOURCE_BYTES {
        return Ok(());
    }
    Err(format!(
        "the Service takes {bytes} bytes on the wire, and at most {MAX_RESOURCE_BYTES} are allowed: give fewer ports, externalIPs, \
         load balancer addresses or source ranges"
    ))
}

/// Whether an endpoint that several slices define is small enough to be sent with all its ports.
pub(super) fn may_be_sent(endpoint: &Endpoint) -> bool {
    let mut builder = ChangesBuilder::default();
    builder.endpoint(&ServiceKey::new("", ""), endpoint, 0);
    builder.estimated_bytes() <= MAX_RESOURCE_BYTES
}

/// Whether a port list is small enough for an endpoint.
pub(super) fn may_have(ports: &[EndpointPort]) -> bool {
    ports.iter().map(|port| port.name.len() + PORT_BYTES).sum::<usize>() <= MAX_RESOURCE_BYTES
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
