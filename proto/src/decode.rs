//! Conversion from the wire to [`headgate_core`]. Unusable resources are reported.

use std::{
    collections::{BTreeSet, HashMap},
    net::IpAddr,
    sync::Arc,
};

use headgate_core::{
    Change, ClientIpAffinity, Conditions, Endpoint, EndpointPort, Family, Hints, Node, Placement, Pool, Protocol,
    ProxyProtocol, Service, ServiceCidr, ServiceKey, ServicePort, TrafficPolicy, Weight, address_from_bytes,
    addresses::{AddressUse, unreachable},
    digest::{BUCKETS, BucketDigest, Digests},
    frontends::Frontend,
    reference::{self, Referable, Reference},
};
use ipnet::IpNet;

use crate::{PROTOCOLS, PROXY_PROTOCOLS, v1};

/// A field that cannot be used, and the reason.
#[derive(Debug)]
struct Fault {
    field: String,
    reason: String,
}

impl Fault {
    fn new(field: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { field: field.into(), reason: reason.into() }
    }

    fn rejection(self, resource: String) -> v1::Rejection {
        v1::Rejection { resource, field: self.field, reason: self.reason }
    }
}

type Checked<T> = Result<T, Fault>;

/// Converts messages to changes. Equal strings, port lists and placements share memory, even if
/// they come from different messages. The decoder remembers the values that references stand for
/// (discovery.proto, section 13).
#[derive(Debug, Default)]
pub struct Decoder {
    strings: Pool<str>,
    port_lists: Pool<[EndpointPort]>,
    placements: Pool<Placement>,
    known: Known,
}

/// The shared tables of one message. `Err` holds the reason why an entry is unusable.
struct Tables {
    strings: Vec<Arc<str>>,
    port_lists: Vec<Result<Arc<[EndpointPort]>, String>>,
    placements: Vec<Result<Arc<Placement>, String>>,
    known_placements: Vec<Arc<Placement>>,
}

impl Decoder {
    /// Adds the contents of a state to the values that messages may refer to.
    pub fn refer_to(&mut self, referable: Referable) {
        self.known.add(referable);
    }

    /// Returns true if the decoder has learned so many values from messages that the caller should
    /// call [`Decoder::refer_to`] with the present contents of its state.
    #[must_use]
    pub fn has_learned_much(&self) -> bool {
        self.known.has_learned_much()
    }

    /// Converts the changes of one message and returns them in an order in which they can be
    /// applied: changed Services, changed and removed endpoints, changed ServiceCIDRs, removed
    /// Services, removed ServiceCIDRs. The second list describes the resources and removals that
    /// cannot be used; the first list omits them.
    ///
    /// # Errors
    /// [`UnknownReference`]: the message contains a reference to a value that this side does not
    /// hold. No part of the message may be used.
    pub fn changes(&mut self, wire: v1::Changes) -> Result<(Vec<Change>, Vec<v1::Rejection>), UnknownReference> {
        let (mut changes, mut rejections) = (Vec::new(), Vec::new());
        let tables = self.tables(&wire)?;
        for service in wire.services {
            let wire_key = service.key.clone().unwrap_or_default();
            match service_from_wire(service) {
                Ok(service) => {
                    self.known.learn_service(&service.key);
                    changes.push(Change::from(service));
                }
                Err(fault) => {
                    if let Ok(key) = key_from_wire(&wire_key) {
                        self.known.learn_service(&key);
                    }
                    rejections.push(fault.rejection(format!("Service {}/{}", wire_key.namespace, wire_key.name)));
                }
            }
        }
        for group in wire.endpoints {
            match self.group_key(&group, &tables)? {
                Ok(key) => endpoints_from_wire(&key, group, &tables, &mut changes, &mut rejections),
                Err(fault) => rejections.push(fault.rejection(format!("endpoints of service {}", group.name))),
            }
        }
        for service_cidr in wire.service_cidrs {
            let name = service_cidr.name.clone();
            match service_cidr_from_wire(&service_cidr) {
                Ok(service_cidr) => changes.push(Change::ServiceCidr(service_cidr)),
                Err(fault) => rejections.push(fault.rejection(format!("ServiceCIDR {name}"))),
            }
        }
        for key in wire.removed_services {
            match key_from_wire(&key) {
                Ok(key) => {
                    self.known.forget_service(&key);
                    changes.push(Change::RemoveService(key));
                }
                Err(fault) => rejections.push(fault.rejection("removed Service".into())),
            }
        }
        changes.extend(wire.removed_service_cidrs.into_iter().map(|name| Change::RemoveServiceCidr(name.into())));
        Ok((changes, rejections))
    }

    fn group_key(
        &self,
        group: &v1::ServiceEndpoints,
        tables: &Tables,
    ) -> Result<Checked<ServiceKey>, UnknownReference> {
        if !group.service.is_empty() {
            return Ok(Ok(self.known.service(&group.service)?));
        }
        let namespace = tables.string(group.namespace, "namespace");
        Ok(namespace.and_then(|namespace| checked_key(&namespace.unwrap_or_default(), &group.name)))
    }

    fn tables(&mut self, wire: &v1::Changes) -> Result<Tables, UnknownReference> {
        let known_placements = wire.known_placements.iter().map(|reference| self.known.placement(reference));
        let known_placements = known_placements.collect::<Result<_, _>>()?;
        let strings = wire.strings.iter().map(|text| self.shared_string(text)).collect();
        let (port_lists, placements) = (Vec::new(), Vec::new());
        let mut tables = Tables { strings, port_lists, placements, known_placements };
        for placement in &wire.placements {
            let placement = self.shared_placement(placement, &tables);
            tables.placements.push(placement);
        }
        for list in &wire.port_lists {
            let list = self.shared_port_list(list, &tables).map_err(|fault| fault.reason);
            tables.port_lists.push(list);
        }
        Ok(tables)
    }

    fn shared_placement(&mut self, wire: &v1::Placement, tables: &Tables) -> Result<Arc<Placement>, String> {
        let reason = |fault: Fault| format!("{}: {}", fault.field, fault.reason);
        let hints = Hints {
            zones: tables.strings(&wire.hint_zones, "hint_zones").map_err(reason)?,
            nodes: tables.strings(&wire.hint_nodes, "hint_nodes").map_err(reason)?,
        };
        let placement = Placement {
            node: (!wire.node.is_empty()).then(|| self.shared_string(&wire.node)),
            zone: tables.string(wire.zone, "zone").map_err(reason)?,
            hints: (hints != Hints::default()).then(|| Arc::new(hints)),
            weight: match wire.weight_hundredths.map(u16::try_from) {
                None => Weight::default(),
                Some(Ok(hundredths)) => Weight::from_hundredths(hundredths),
                Some(Err(_)) => return Err("weight_hundredths: it is above 65535".to_owned()),
            },
        };
        let shared = self.placements.get(&placement, || Arc::new(placement.clone()));
        self.known.learn_placement(&shared);
        Ok(shared)
    }

    fn shared_string(&mut self, text: &str) -> Arc<str> {
        self.strings.get(text, || text.into())
    }

    fn shared_port_list(&mut self, wire: &v1::PortList, tables: &Tables) -> Checked<Arc<[EndpointPort]>> {
        let ports = wire.ports.iter().map(|port| endpoint_port_from_wire(port, tables));
        let mut ports: Vec<EndpointPort> = ports.collect::<Checked<_>>()?;
        ports.sort_unstable();
        ports.dedup_by(|later, first| later.key() == first.key());
        Ok(self.port_lists.get(&ports, || ports.as_slice().into()))
    }
}

/// Returns the entry of a table to which `field` refers. `what` names the kind of entries.
fn entry<'a, T>(table: &'a [T], index: u32, field: &str, what: &str) -> Checked<&'a T> {
    let found = usize::try_from(index).ok().and_then(|index| table.get(index));
    let fault = || Fault::new(field, format!("refers to {what} {index}, but there are {}", table.len()));
    found.ok_or_else(fault)
}

impl Tables {
    fn string(&self, reference: u32, field: &str) -> Checked<Option<Arc<str>>> {
        let Some(index) = reference.checked_sub(1) else { return Ok(None) };
        let found = usize::try_from(index).ok().and_then(|index| self.strings.get(index));
        let fault = || Fault::new(field, format!("refers to string {reference}, but there are {}", self.strings.len()));
        found.map(|text| Some(Arc::clone(text))).ok_or_else(fault)
    }

    fn strings(&self, references: &[u32], field: &str) -> Checked<Vec<Arc<str>>> {
        let mut strings = Vec::with_capacity(references.len());
        for reference in references {
            strings.extend(self.string(*reference, field)?);
        }
        strings.sort_unstable();
        strings.dedup();
        Ok(strings)
    }

    fn port_list(&self, index: u32) -> Checked<Arc<[EndpointPort]>> {
        let found = entry(&self.port_lists, index, "port_list", "list")?;
        found.clone().map_err(|reason| Fault::new("ports", reason))
    }

    fn placement(&self, index: u32) -> Checked<Arc<Placement>> {
        let found = entry(&self.placements, index, "placement", "placement")?;
        found.clone().map_err(|reason| Fault::new("placement", reason))
    }

    /// The placement of an endpoint: even numbers stand for known placements.
    fn endpoint_placement(&self, number: u32) -> Checked<Arc<Placement>> {
        match number % 2 {
            1 => self.placement(number / 2),
            _ => entry(&self.known_placements, number / 2, "placement", "known placement").cloned(),
        }
    }
}

fn endpoints_from_wire(
    key: &ServiceKey,
    group: v1::ServiceEndpoints,
    tables: &Tables,
    changes: &mut Vec<Change>,
    rejections: &mut Vec<v1::Rejection>,
) {
    for endpoint in group.changed {
        match endpoint_from_wire(&endpoint, tables) {
            Ok(endpoint) => changes.push(Change::Endpoint(key.clone(), endpoint)),
            Err(fault) => {
                let shown = show_address(&endpoint.address);
                rejections.push(fault.rejection(format!("Endpoint {key} {shown}")));
            }
        }
    }
    for address in group.removed {
        match address_from_wire(&address, "removed") {
            Ok(address) => changes.push(Change::RemoveEndpoint(key.clone(), address)),
            Err(fault) => rejections.push(fault.rejection(format!("Endpoint {key}"))),
        }
    }
}

fn endpoint_from_wire(wire: &v1::Endpoint, tables: &Tables) -> Checked<Endpoint> {
    Ok(Endpoint {
        address: reachable_from_wire(&wire.address, "address", AddressUse::Other)?,
        ports: tables.port_list(wire.port_list)?,
        conditions: conditions_from_wire(wire.conditions)?,
        placement: tables.endpoint_placement(wire.placement)?,
    })
}

fn endpoint_port_from_wire(wire: &v1::EndpointPort, tables: &Tables) -> Checked<EndpointPort> {
    Ok(EndpointPort {
        name: wire.name.as_str().into(),
        protocol: protocol_from_wire(wire.protocol, "protocol")?,
        port: non_zero_port(wire.port, "port")?,
        conditions: wire.conditions.map(conditions_from_wire).transpose()?,
        placement: wire.placement.checked_sub(1).map(|index| tables.placement(index)).transpose()?,
    })
}

fn conditions_from_wire(bits: u32) -> Checked<Conditions> {
    use v1::endpoint::Condition;
    let has = |condition: Condition| bits & condition as u32 != 0;
    let known = Condition::NotReady as u32 | Condition::NotServing as u32 | Condition::Terminating as u32;
    match bits & !known {
        0 => Ok(Conditions {
            ready: !has(Condition::NotReady),
            serving: !has(Condition::NotServing),
            terminating: has(Condition::Terminating),
        }),
        // Contract, 12: an unknown condition may decide whether the endpoint may receive traffic.
        unknown => Err(Fault::new("conditions", format!("condition {unknown} is unknown"))),
    }
}

fn service_from_wire(wire: v1::Service) -> Checked<Service> {
    let key = key_from_wire(&wire.key.unwrap_or_default())?;
    let addresses = |list: &[bytes::Bytes], field: &str, used| -> Checked<Vec<IpAddr>> {
        list.iter().enumerate().map(|(i, bytes)| reachable_from_wire(bytes, &format!("{field}[{i}]"), used)).collect()
    };
    let mut ports = Vec::with_capacity(wire.ports.len());
    for (i, port) in wire.ports.iter().enumerate() {
        if !port.name.is_empty() {
            check_name(&port.name, &format!("ports[{i}].name"))?;
        }
        ports.push(ServicePort {
            name: port.name.as_str().into(),
            protocol: protocol_from_wire(port.protocol, &format!("ports[{i}].protocol"))?,
            port: non_zero_port(port.port, &format!("ports[{i}].port"))?,
            node_port: any_port(port.node_port, &format!("ports[{i}].node_port"))?,
        });
    }
    let ranges = &wire.load_balancer_source_ranges;
    let service = Service {
        cluster_ips: addresses(&wire.cluster_ips, "cluster_ips", AddressUse::ClusterIp)?,
        external_ips: addresses(&wire.external_ips, "external_ips", AddressUse::Other)?,
        load_balancer_ips: addresses(&wire.load_balancer_ips, "load_balancer_ips", AddressUse::Other)?,
        ports,
        internal_traffic_policy: policy(wire.internal_traffic_policy_local),
        external_traffic_policy: policy(wire.external_traffic_policy_local),
        session_affinity: Some(ClientIpAffinity { timeout_seconds: wire.session_affinity_timeout_seconds })
            .filter(|affinity| affinity.timeout_seconds != 0),
        load_balancer_source_ranges: prefixes_from_wire(ranges, "load_balancer_source_ranges")?,
        health_check_node_port: any_port(wire.health_check_node_port, "health_check_node_port")?,
        created_unix_seconds: wire.created_unix_seconds,
        load_balancing: wire.load_balancing.into(),
        scheduler: wire.scheduler.into(),
        health_check: wire.health_check.into(),
        health_check_interval_ms: wire.health_check_interval_ms,
        proxy_protocol: proxy_protocol_from_wire(wire.proxy_protocol)?,
        max_connections: wire.max_connections,
        key,
    };
    let mut families: HashMap<bool, IpAddr> = HashMap::new();
    for address in &service.cluster_ips {
        if families.insert(address.is_ipv4(), *address).is_some() {
            return Err(Fault::new("cluster_ips", "contains two addresses of one family"));
        }
    }
    if service.cluster_ips.is_empty() || service.ports.is_empty() {
        return Err(Fault::new("cluster_ips, ports", "a service must have at least one of each"));
    }
    let (frontends, most) = (service.frontend_count(), Service::MAX_FRONTENDS);
    if frontends > most {
        let reason =
            format!("{frontends} frontends, each address with each port, and a node accepts {most} of a service");
        return Err(Fault::new("ports, external_ips, load_balancer_ips, load_balancer_source_ranges", reason));
    }
    Ok(service)
}

fn proxy_protocol_from_wire(number: i32) -> Checked<Option<ProxyProtocol>> {
    // Endpoints would misread connections without the header that they expect.
    let unknown = || Fault::new("proxy_protocol", format!("version {number} is unknown"));
    from_number(&PROXY_PROTOCOLS, number).ok_or_else(unknown)
}

fn policy(is_local: bool) -> TrafficPolicy {
    if is_local { TrafficPolicy::Local } else { TrafficPolicy::Cluster }
}

fn service_cidr_from_wire(wire: &v1::ServiceCidr) -> Checked<ServiceCidr> {
    if wire.name.is_empty() {
        return Err(Fault::new("name", "must not be empty"));
    }
    Ok(ServiceCidr { name: wire.name.as_str().into(), cidrs: prefixes_from_wire(&wire.cidrs, "cidrs")? })
}

/// Converts the agent's own node.
///
/// # Errors
/// The rejection names the field that cannot be used. A retry with the same message does not help.
pub fn node_from_wire(wire: &v1::Node) -> Result<Node, v1::Rejection> {
    let rejection = |fault: Fault| fault.rejection(format!("Node {}", wire.name));
    let address = |bytes: &bytes::Bytes| reachable_from_wire(bytes, "addresses", AddressUse::Node);
    let addresses: Checked<Vec<IpAddr>> = wire.addresses.iter().map(address).collect();
    Ok(Node {
        name: wire.name.as_str().into(),
        zone: (!wire.zone.is_empty()).then(|| wire.zone.as_str().into()),
        pod_cidrs: prefixes_from_wire(&wire.pod_cidrs, "pod_cidrs").map_err(rejection)?,
        addresses: addresses.map_err(rejection)?,
        going_away: wire.going_away,
    })
}

/// Converts the reserved frontends of [`v1::OwnNode`].
///
/// # Errors
/// The rejection names the field that cannot be used. A retry with the same message does not help.
pub fn reserved_from_wire(wire: &[v1::ReservedFrontend]) -> Result<BTreeSet<Frontend>, v1::Rejection> {
    let frontend = |v1::ReservedFrontend { address, protocol, port, is_ipv6 }: &v1::ReservedFrontend| {
        let protocol = protocol_from_wire(*protocol, "reserved.protocol")?;
        let port = non_zero_port(*port, "reserved.port")?;
        if address.is_empty() {
            return Ok(Frontend::NodePort(if *is_ipv6 { Family::V6 } else { Family::V4 }, protocol, port));
        }
        Ok(Frontend::Address(address_from_wire(address, "reserved.address")?, protocol, port))
    };
    wire.iter().map(frontend).collect::<Checked<_>>().map_err(|fault| fault.rejection("Node reserved".to_owned()))
}

/// Converts digests from a `Hello`; `None` unless there is a sum and a count for each bucket.
#[must_use]
pub fn digests_from_wire(wire: &v1::BucketDigests) -> Option<Digests> {
    if wire.sums.len() != 16 * BUCKETS || wire.counts.len() != BUCKETS {
        return None;
    }
    let sums = wire.sums.chunks_exact(16).filter_map(|bytes| Some(u128::from_le_bytes(bytes.try_into().ok()?)));
    Digests::from_buckets(sums.zip(&wire.counts).map(|(sum, count)| BucketDigest { sum, count: *count }).collect())
}

fn key_from_wire(wire: &v1::ServiceKey) -> Checked<ServiceKey> {
    checked_key(&wire.namespace, &wire.name)
}

fn checked_key(namespace: &str, name: &str) -> Checked<ServiceKey> {
    check_name(namespace, "namespace")?;
    check_name(name, "name")?;
    Ok(ServiceKey::new(namespace, name))
}

/// Rejects names that contain a character other than a letter, a digit, '-', '.' or '_', because
/// names become part of rules. The Kubernetes API rejects such names too (RFC 1123 labels and
/// subdomains), but this check does not rely on the sender.
fn check_name(name: &str, field: &str) -> Checked<()> {
    let is_name = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_');
    if name.is_empty() || name.len() > 253 || !name.bytes().all(is_name) {
        let shown: String = name.chars().take(64).collect();
        return Err(Fault::new(
            field,
            format!("{shown:?} is not a name of 1 to 253 letters, digits, '-', '.' and '_'"),
        ));
    }
    Ok(())
}

fn address_from_wire(bytes: &[u8], field: &str) -> Checked<IpAddr> {
    let fault = || Fault::new(field, format!("an address must have 4 or 16 bytes, not {}", bytes.len()));
    address_from_bytes(bytes).ok_or_else(fault)
}

/// Reads an address that becomes part of rules. A control plane rejects addresses without a meaning
/// on other machines, but this check does not rely on the sender.
fn reachable_from_wire(bytes: &[u8], field: &str, used: AddressUse) -> Checked<IpAddr> {
    let address = address_from_wire(bytes, field)?;
    unreachable(address, used).map_or(Ok(address), |reason| Err(Fault::new(field, reason)))
}

fn show_address(bytes: &[u8]) -> String {
    address_from_wire(bytes, "").map_or_else(|_| "?".to_owned(), |address| address.to_string())
}

/// Reads at most `most` ranges.
pub(crate) fn ranges_from_wire(wire: &[v1::IpPrefix], most: usize, field: &str) -> Result<Vec<IpNet>, String> {
    let part = wire.get(..most).unwrap_or(wire);
    prefixes_from_wire(part, field).map_err(|Fault { field, reason }| format!("{field}: {reason}"))
}

fn prefixes_from_wire(wire: &[v1::IpPrefix], field: &str) -> Checked<Vec<IpNet>> {
    let prefix = |(i, wire): (usize, &v1::IpPrefix)| {
        let field = format!("{field}[{i}]");
        let address = address_from_wire(&wire.address, &field)?;
        let length = u8::try_from(wire.prefix_length).unwrap_or(u8::MAX);
        IpNet::new(address, length)
            .map_err(|_| Fault::new(field, format!("prefix length {} is out of range", wire.prefix_length)))
    };
    wire.iter().enumerate().map(prefix).collect()
}

fn any_port(number: u32, field: &str) -> Checked<u16> {
    u16::try_from(number).map_err(|_| Fault::new(field, format!("{number} is not a port")))
}

fn non_zero_port(number: u32, field: &str) -> Checked<u16> {
    match any_port(number, field)? {
        0 => Err(Fault::new(field, "0 is not a port")),
        port => Ok(port),
    }
}

fn protocol_from_wire(number: i32, field: &str) -> Checked<Protocol> {
    // Contract, 12: an unknown protocol must not be read as TCP, the enum's zero value.
    from_number(&PROTOCOLS, number).ok_or_else(|| Fault::new(field, format!("protocol {number} is unknown")))
}

// The values that references stand for, on the receiver's side (discovery.proto, section 13).

/// [`Known::has_learned_much`] is true if the tables have more than `LEARNED_MUCH` values plus
/// twice the number of values in the state.
const LEARNED_MUCH: usize = 4096;

/// A reference to a value that this side does not hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a change refers to a {0} that is missing in this agent's state")]
pub struct UnknownReference(&'static str);

/// The known values: those of the state, and those that messages have brought. The replica also
/// refers to values of resources that this side cannot use.
#[derive(Debug, Default)]
pub(crate) struct Known {
    services: HashMap<Reference, Arc<ServiceKey>>,
    placements: HashMap<Reference, Arc<Placement>>,
    /// Number of values in the state of the last [`Known::add`].
    held: Option<usize>,
}

impl Known {
    /// Adds the values in a state. Forgets all others if many have been learned.
    pub(crate) fn add(&mut self, referable: Referable) {
        self.held = Some(referable.services.len() + referable.placements.len());
        if self.has_learned_much() {
            self.services.clear();
            self.placements.clear();
        }
        self.services.extend(referable.services.into_iter().map(|key| (reference::service(&key), key)));
        let placements = referable.placements.into_iter();
        self.placements.extend(placements.map(|placement| (reference::placement(&placement), placement)));
    }

    /// Returns true if a [`Known::add`] is due, which drops values of removed resources.
    pub(crate) fn has_learned_much(&self) -> bool {
        self.services.len() + self.placements.len() > 2 * self.held.unwrap_or_default() + LEARNED_MUCH
    }

    pub(crate) fn learn_service(&mut self, key: &ServiceKey) {
        self.services.entry(reference::service(key)).or_insert_with(|| Arc::new(key.clone()));
    }

    pub(crate) fn forget_service(&mut self, key: &ServiceKey) {
        self.services.remove(&reference::service(key));
    }

    /// Learns a placement, except from the first snapshot: the state will have nearly all of these.
    pub(crate) fn learn_placement(&mut self, placement: &Arc<Placement>) {
        if self.held.is_some() {
            self.placements.insert(reference::placement(placement), Arc::clone(placement));
        }
    }

    pub(crate) fn service(&self, reference: &[u8]) -> Result<ServiceKey, UnknownReference> {
        self.services.get(reference).map(|key| (**key).clone()).ok_or(UnknownReference("service"))
    }

    pub(crate) fn placement(&self, reference: &[u8]) -> Result<Arc<Placement>, UnknownReference> {
        self.placements.get(reference).cloned().ok_or(UnknownReference("placement"))
    }
}

impl v1::Batch {
    /// The version that the receiver must have before it applies the batch. `None` for a batch with
    /// version 0 and without `follows_version`, which violates the contract.
    #[must_use]
    pub fn follows(&self) -> Option<u64> {
        self.follows_version.or_else(|| self.version.checked_sub(1))
    }

    /// All source positions that the batch changes.
    pub fn moved_positions(&self) -> impl Iterator<Item = v1::SourcePosition> {
        let slices = v1::SourcePosition {
            kind: v1::source_position::Kind::EndpointSlices.into(),
            position: self.endpoint_slices_position,
        };
        self.positions.iter().copied().chain((self.endpoint_slices_position != 0).then_some(slices))
    }
}

impl v1::Changes {
    /// The trigger time of a group's changes in milliseconds since the Unix epoch. 0 if unknown.
    #[must_use]
    pub fn trigger_unix_ms(&self, group: &v1::ServiceEndpoints) -> u64 {
        let index = usize::try_from(group.trigger).unwrap_or(usize::MAX);
        self.triggers_unix_ms.get(index).copied().unwrap_or_default()
    }
}

fn from_number<T: Copy, W: Copy + Into<i32>>(table: &[(T, W)], number: i32) -> Option<T> {
    table.iter().find(|(_, wire)| (*wire).into() == number).map(|(value, _)| *value)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn addresses_without_a_meaning_on_other_machines_are_rejected_and_other_resources_are_used() {
        let bytes = |address: &str| crate::address_to_wire(address.parse().unwrap());
        let service = |name: &str, cluster: &str, external: &str, load_balancer: &str| v1::Service {
            key: Some(v1::ServiceKey { namespace: "prod".into(), name: name.into() }),
            cluster_ips: vec![bytes(cluster)],
            external_ips: vec![bytes(external)],
            load_balancer_ips: vec![bytes(load_balancer)],
            ports: vec![v1::ServicePort { port: 80, ..Default::default() }],
            ..Default::default()
        };
        let hostile = ["127.0.0.1", "0.0.0.0", "224.0.0.1", "169.254.169.254", "255.255.255.255", "fe80::1", "::1"];
        let changed = hostile.iter().chain(&["10.1.0.1"]).map(|address| v1::Endpoint {
            address: bytes(address),
            placement: 1,
            ..Default::default()
        });
        let wire = v1::Changes {
            services: vec![
                service("a", "127.0.0.1", "192.0.2.1", "192.0.2.2"),
                service("b", "10.96.0.1", "127.0.0.1", "192.0.2.2"),
                service("c", "10.96.0.1", "192.0.2.1", "127.0.0.1"),
                service("good", "169.254.20.10", "192.0.2.1", "192.0.2.2"),
            ],
            endpoints: vec![v1::ServiceEndpoints {
                namespace: 1,
                name: "good".into(),
                changed: changed.collect(),
                ..Default::default()
            }],
            strings: vec!["prod".into()],
            port_lists: vec![v1::PortList::default()],
            placements: vec![v1::Placement::default()],
            ..Default::default()
        };
        let (changes, rejections) = Decoder::default().changes(wire).unwrap();
        let [Change::Service(good), Change::Endpoint(_, endpoint)] = changes.as_slice() else { panic!("{changes:?}") };
        assert_eq!((&*good.key.name, endpoint.address.to_string()), ("good", "10.1.0.1".to_owned()));
        assert_eq!(rejections.len(), 3 + hostile.len(), "{rejections:?}");
        assert!(rejections.iter().all(|rejection| rejection.reason.contains("which other nodes cannot reach")));
        let node = |address| v1::Node { name: "n1".into(), addresses: vec![bytes(address)], ..Default::default() };
        assert!(node_from_wire(&node("fe80::1")).is_ok());
        assert!(node_from_wire(&node("0.0.0.0")).is_err());
    }

    #[test]
    fn names_that_would_end_a_rule_are_rejected_and_other_resources_are_used() {
        let service = |name: &str, port_name: &str| v1::Service {
            key: Some(v1::ServiceKey { namespace: "prod".into(), name: name.into() }),
            cluster_ips: vec![bytes::Bytes::from_static(&[10, 96, 0, 1])],
            ports: vec![v1::ServicePort { name: port_name.into(), protocol: 0, port: 80, node_port: 0 }],
            ..Default::default()
        };
        let hostile = "web\"\n-A INPUT -j DROP\n#";
        let wire = v1::Changes {
            services: vec![service(hostile, ""), service("web", hostile), service("db", "sql"), service("", "")],
            endpoints: vec![v1::ServiceEndpoints { namespace: 1, name: hostile.into(), ..Default::default() }],
            strings: vec!["prod".into()],
            ..Default::default()
        };
        let (changes, rejections) = Decoder::default().changes(wire).unwrap();
        assert!(matches!(changes.as_slice(), [Change::Service(service)] if service.key.name == "db"), "{changes:?}");
        let fields: Vec<&str> = rejections.iter().map(|rejection| rejection.field.as_str()).collect();
        assert_eq!(fields, ["name", "ports[0].name", "name", "name"]);
    }

    #[test]
    fn a_service_with_too_many_frontends_is_rejected_and_others_are_used() {
        let service = |name: &str, ports: u32, addresses: u32| v1::Service {
            key: Some(v1::ServiceKey { namespace: "prod".into(), name: name.into() }),
            cluster_ips: vec![bytes::Bytes::from_static(&[10, 96, 0, 1])],
            external_ips: (0..addresses)
                .map(|n| bytes::Bytes::copy_from_slice(&(0x0a00_0000 + n).to_be_bytes()))
                .collect(),
            ports: (1..=ports).map(|port| v1::ServicePort { port, ..Default::default() }).collect(),
            ..Default::default()
        };
        let services = vec![service("most", 100, 162), service("more", 100, 163)];
        let (changes, rejections) = Decoder::default().changes(v1::Changes { services, ..Default::default() }).unwrap();
        assert!(matches!(changes.as_slice(), [Change::Service(service)] if service.key.name == "most"));
        let [rejection] = rejections.as_slice() else { panic!("{rejections:?}") };
        assert_eq!(rejection.resource, "Service prod/more");
        assert!(rejection.reason.starts_with("16400 frontends"), "{rejection:?}");
    }
}

#[cfg(test)]
mod known_tests {
    use super::*;

    #[test]
    fn a_service_is_known_until_it_is_removed_and_learned_values_are_bounded() {
        let mut known = Known::default();
        let [web, db] = ["web", "db"].map(|name| ServiceKey::new("prod", name));
        let is_known = |known: &Known, key: &ServiceKey| known.service(&reference::service(key)).as_ref() == Ok(key);
        known.add(Referable { services: vec![Arc::new(web.clone())], ..Referable::default() });
        known.learn_service(&db);
        assert!(is_known(&known, &web) && is_known(&known, &db));
        known.forget_service(&web);
        assert!(!is_known(&known, &web));
        known.add(Referable::default());
        assert!(is_known(&known, &db), "the replica may hold a Service that this side cannot use");
        for number in 0..LEARNED_MUCH {
            assert!(!known.has_learned_much());
            known.learn_placement(&Placement::on(&format!("n{number}")).into());
        }
        assert!(known.has_learned_much());
        known.add(Referable::default());
        assert!(!is_known(&known, &db) && !known.has_learned_much());
    }
}
