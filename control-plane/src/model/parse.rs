//! Parses values of the API: addresses, ranges, ports, protocols, names, times and annotations.
//! Bounds the size of what is read, and collects the problems of invalid objects.

use std::{
    collections::{BTreeMap, HashMap},
    fmt::Display,
    hash::Hash,
    net::{IpAddr, Ipv4Addr},
};

use headgate_core::{
    Endpoint, EndpointPort, Family, LoadBalancing, Protocol, ProxyProtocol, Service, ServiceKey, Weight,
    addresses::{AddressUse, unreachable},
    check_subdomain,
    ipvs::Scheduler,
};
use headgate_proto::{ChangesBuilder, MAX_SERVER_MESSAGE_BYTES};
use ipnet::IpNet;
use k8s_openapi::jiff::Timestamp;

use crate::{
    model::Problem,
    objects::{
        Annotations, ObjectKey,
        keys::{
            CILIUM_WEIGHT, HEALTH_CHECK, HEALTH_CHECK_INTERVAL, LOAD_BALANCING, MAX_CONNECTIONS, PROXY_PROTOCOL,
            SCHEDULER, WEIGHTS,
        },
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

// Problems of objects: the findings about an object while it is read, the list of all present
// problems, and the rule for invalid objects.

/// The most problems of one object that are kept and shown. Of the others, only the number is kept.
pub(super) const MAX_SHOWN: usize = 10;

/// The longest field and the longest message, in bytes.
const MAX_TEXT_BYTES: usize = 1_000;

/// The part of an object that a finding concerns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reach {
    /// A part of the object, such as an entry of a list. The part is left out, and the rest of the
    /// object is used. The text says so, or says which setting applies instead.
    Part(&'static str),
    /// The object as a whole.
    Object,
}

/// The findings about one object.
#[derive(Debug, Default)]
pub(super) struct Findings {
    /// At most [`MAX_SHOWN`] findings, each with its field and a message. Findings about the object
    /// as a whole are kept first.
    kept: Vec<(Reach, String, String)>,
    total: usize,
}

impl Findings {
    fn add(&mut self, reach: Reach, field: impl Display, message: impl Into<String>) {
        self.total += 1;
        if self.kept.len() == MAX_SHOWN {
            let is_part = |(kept, ..): &(Reach, String, String)| *kept != Reach::Object;
            let Some(last) = self.kept.iter().rposition(is_part).filter(|_| reach == Reach::Object) else { return };
            self.kept.remove(last);
        }
        let [field, message] = [field.to_string(), message.into()].map(cut);
        self.kept.push((reach, field, message));
    }

    /// Adds a finding about an entry of a list, which is left out.
    pub(super) fn entry(&mut self, field: impl Display, message: impl Into<String>) {
        self.part(field, message, "this entry is left out");
    }

    /// Adds a finding about a part of the object. `instead` says what becomes of the part.
    pub(super) fn part(&mut self, field: impl Display, message: impl Into<String>, instead: &'static str) {
        self.add(Reach::Part(instead), field, message);
    }

    /// Adds a finding about a Headgate annotation that cannot be read. `instead` says which setting
    /// applies instead.
    pub(super) fn annotation(&mut self, name: &str, message: impl Into<String>, instead: &'static str) {
        self.part(format_args!("metadata.annotations[{name}]"), message, instead);
    }

    /// Adds a finding about the object as a whole. With such a finding, the object cannot be used
    /// as written.
    pub(super) fn object(&mut self, field: impl Display, message: impl Into<String>) {
        self.add(Reach::Object, field, message);
    }

    /// The value of a result. An error becomes a finding about the object as a whole.
    pub(super) fn checked<T>(&mut self, field: impl Display, result: Result<T, String>) -> Option<T> {
        result.map_err(|message| self.object(field, message)).ok()
    }

    /// The value of a result. An error becomes a finding about an entry of a list.
    pub(super) fn checked_entry<T>(&mut self, field: impl Display, result: Result<T, String>) -> Option<T> {
        result.map_err(|message| self.entry(field, message)).ok()
    }

    /// True unless a finding concerns the object as a whole.
    pub(super) fn is_fit(&self) -> bool {
        self.kept.iter().all(|(reach, ..)| *reach != Reach::Object)
    }

    /// Turns the findings into problems of an object. `consequence` ends the messages of findings
    /// about the object as a whole.
    pub(super) fn into_problems(self, key: &ObjectKey, origin: &str, consequence: &str) -> Vec<Problem> {
        let object = key.to_string();
        let problem = |(reach, field, message): (Reach, String, String)| {
            let consequence = match reach {
                Reach::Part(instead) => instead,
                Reach::Object => consequence,
            };
            let message = format!("{message}; {consequence}");
            Problem { object: object.clone(), field, message, origin: origin.to_owned() }
        };
        let more = self.total - self.kept.len();
        let problems = self.kept.into_iter().map(problem);
        problems.chain(and_more(&object, origin, more)).collect()
    }
}

/// Cuts a text that is too long, at a character boundary.
fn cut(mut text: String) -> String {
    if text.len() > MAX_TEXT_BYTES {
        text.truncate(text.floor_char_boundary(MAX_TEXT_BYTES));
        text.push('…');
    }
    text
}

/// The problem that stands for those which are not shown; `None` if all are shown. It follows the
/// others in the sorted list.
pub(super) fn and_more(object: &str, origin: &str, more: usize) -> Option<Problem> {
    let message = format!("{more} more problems are not shown: correct the ones that are shown first");
    let (object, field, origin) = (object.to_owned(), "…".to_owned(), origin.to_owned());
    (more > 0).then_some(Problem { object, field, message, origin })
}

/// The subject of a problem.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Subject {
    /// One object.
    Object(ObjectKey),
    /// The slices of a service, if they contradict each other.
    Slices(ServiceKey),
    /// The slices of a service, if they are over its budget.
    Budget(ServiceKey),
    /// The external addresses of a service for which its endpoints leave no room.
    Addresses(ServiceKey),
    /// A location that is not an object, such as a file.
    Location(String),
}

/// All present problems.
#[derive(Debug, Default)]
pub(super) struct Problems {
    /// The problems of each subject, sorted. Their number is bounded.
    by_subject: BTreeMap<Subject, Vec<Problem>>,
    changed: bool,
    /// For the log: the first new problem of each change.
    unlogged: Vec<Problem>,
}

impl Problems {
    /// Replaces the problems of a subject; an empty list removes all problems of the subject.
    /// Returns the number of new problems.
    pub(super) fn set(&mut self, subject: Subject, mut problems: Vec<Problem>) -> usize {
        if let Subject::Location(location) = &subject
            && let more @ 1.. = problems.len().saturating_sub(MAX_SHOWN)
        {
            problems.truncate(MAX_SHOWN);
            problems.extend(and_more(location, "", more));
        }
        let before = self.by_subject.get(&subject).map(Vec::as_slice).unwrap_or_default();
        let is_new = |problem: &&Problem| !before.contains(problem);
        let first = problems.iter().find(is_new).cloned();
        problems.sort_unstable();
        problems.dedup();
        if before == problems.as_slice() {
            return 0;
        }
        let count = problems.iter().filter(is_new).count();
        self.changed = true;
        self.unlogged.extend(first.map(|first| match count {
            1 => first,
            _ => Problem { message: format!("{}; and {} more new problems", first.message, count - 1), ..first },
        }));
        if problems.is_empty() {
            self.by_subject.remove(&subject);
        } else {
            self.by_subject.insert(subject, problems);
        }
        count
    }

    /// For each change since the last call that brought problems, the first of them.
    pub(super) fn take_unlogged(&mut self) -> Vec<Problem> {
        std::mem::take(&mut self.unlogged)
    }

    /// The objects with problems.
    pub(super) fn objects(&self) -> impl Iterator<Item = &ObjectKey> {
        self.by_subject.keys().filter_map(|subject| match subject {
            Subject::Object(key) => Some(key),
            _ => None,
        })
    }

    /// The sorted list of all problems, if it has changed since the last call.
    pub(super) fn take(&mut self) -> Option<Vec<Problem>> {
        if !std::mem::take(&mut self.changed) {
            return None;
        }
        let mut problems: Vec<Problem> = self.by_subject.values().flatten().cloned().collect();
        // A stable sort is fast here, because the problems of each kind of object are nearly
        // sorted.
        problems.sort();
        Some(problems)
    }
}

// The objects of one kind that are in use, and the rule for invalid objects.
//
// The rule: **an invalid version of an object never removes a good version.** A finding concerns
// one of three parts:
// - An *entry* of a list (an externalIP, a load balancer address, an endpoint, an address of a
//   Node): the entry is left out, and the rest of the version is used. If the old version stayed
//   in use instead, traffic would still be sent to entries that the new version has removed.
//   Entries beyond the budget of a Service are left out in the same way.
// - A Headgate *annotation*: the annotation is ignored, and the rest of the version is used.
// - The *object* (ports, ClusterIPs, policies, source ranges, labels that name the owner, text
//   that cannot be decoded): the last good version stays in use as a whole while the object is
//   invalid. Without a good version, the valid parts are used, unless these parts alone would
//   allow traffic that the object is meant to block.
//
// A deleted object is removed, valid or not. An object is also removed when its new version is not
// for this proxy (headless, ExternalName, or served by another proxy).

/// The result of reading an object.
#[derive(Debug)]
pub(super) struct Reading<T> {
    /// The usable value, if there is one.
    pub(super) value: Option<T>,
    /// The findings about the object.
    pub(super) findings: Findings,
}

impl<T> Reading<T> {
    /// The result for an object that this proxy does not serve.
    pub(super) fn nothing() -> Self {
        Self { value: None, findings: Findings::default() }
    }

    /// Applies the rule for invalid objects. Calls `set` with the value, and with whether the value
    /// is good. `has_good` says whether a good version is in use. If so, and if the object is
    /// invalid, the good version stays in use, and `set` is not called.
    pub(super) fn take_in(self, has_good: bool, set: impl FnOnce(Option<T>, bool)) -> Outcome {
        let Self { value, findings } = self;
        let (is_good, is_served) = (findings.is_fit(), value.is_some());
        let is_kept = !is_good && has_good;
        if !is_kept {
            set(value, is_good);
        }
        let consequence = match (is_kept, is_served) {
            (true, _) => "its last good version stays in use",
            (false, true) => "the rest of it is in use",
            (false, false) => "it is not in use",
        };
        Outcome { findings, consequence }
    }
}

/// The result of [`Reading::take_in`].
#[derive(Debug)]
pub(super) struct Outcome {
    /// The findings about the object.
    pub(super) findings: Findings,
    /// The last part of each message about a problem that concerns the object as a whole.
    pub(super) consequence: &'static str,
}

/// The values in use, and the values before the pending changes.
#[derive(Debug)]
pub(super) struct ObjectSet<K, V> {
    /// The value in use of each object, and whether this value is good. A good value comes from the
    /// object as written, except for invalid entries and annotations.
    held: HashMap<K, (V, bool)>,
    before: HashMap<K, Option<V>>,
}

impl<K, V> Default for ObjectSet<K, V> {
    fn default() -> Self {
        Self { held: HashMap::new(), before: HashMap::new() }
    }
}

impl<K: Hash + Eq + Clone + Ord, V: PartialEq + Clone> ObjectSet<K, V> {
    /// Applies a version of an object.
    pub(super) fn put(&mut self, key: K, reading: Reading<V>) -> Outcome {
        let has_good = self.held.get(&key).is_some_and(|(_, is_good)| *is_good);
        reading.take_in(has_good, |value, is_good| self.set(key, value, is_good))
    }

    /// The value in use of an object.
    pub(super) fn get(&self, key: &K) -> Option<&V> {
        self.held.get(key).map(|(value, _)| value)
    }

    /// Changes the value in use of an object, and returns the result of `change`.
    pub(super) fn amend<R>(&mut self, key: &K, change: impl FnOnce(&mut V) -> R) -> Option<R> {
        let (mut value, is_good) = self.held.get(key)?.clone();
        let result = change(&mut value);
        self.set(key.clone(), Some(value), is_good);
        Some(result)
    }

    /// The keys of the objects in use.
    pub(super) fn keys(&self) -> impl Iterator<Item = &K> {
        self.held.keys()
    }

    /// Sets or removes a value.
    fn set(&mut self, key: K, value: Option<V>, is_good: bool) {
        let old = match value {
            Some(value) => {
                if let Some((held, was_good)) = self.held.get_mut(&key)
                    && *held == value
                {
                    (*held, *was_good) = (value, is_good);
                    return;
                }
                self.held.insert(key.clone(), (value, is_good))
            }
            None => match self.held.remove(&key) {
                None => return,
                old => old,
            },
        };
        self.before.entry(key).or_insert(old.map(|(value, _)| value));
    }

    /// The values that have changed since the last call, in order of key; `None` for a removed
    /// object.
    pub(super) fn take_changes(&mut self) -> Vec<(K, Option<V>)> {
        let mut changes: Vec<(K, Option<V>)> = std::mem::take(&mut self.before)
            .into_iter()
            .map(|(key, before)| (before, self.held.get(&key).map(|(value, _)| value), key))
            .filter(|(before, now, _)| before.as_ref() != *now)
            .map(|(_, now, key)| (key, now.cloned()))
            .collect();
        changes.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
        changes
    }
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
