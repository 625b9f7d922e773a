//! Conversion from [`headgate_core`] to the wire. The conversion cannot fail.

use std::{
    collections::{BTreeSet, HashMap},
    net::IpAddr,
    sync::Arc,
};

use bytes::{BufMut as _, Bytes, BytesMut};
use headgate_core::{
    Change, Conditions, Endpoint, EndpointPort, Family, Node, Placement, Service, ServiceCidr, ServiceKey, Weight,
    digest::Digests, frontends::Frontend, reference::Reference,
};
use ipnet::IpNet;
use prost::Message;

use crate::{PROTOCOLS, PROXY_PROTOCOLS, v1};

/// The parts of an endpoint's change that are sent as references (discovery.proto, section 13).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct References {
    /// A reference to the service's key.
    pub service: Option<Reference>,
    /// A reference to the endpoint's placement.
    pub placement: Option<Reference>,
}

/// Collects changes into one [`v1::Changes`]. Values that several endpoints have in common are
/// encoded once.
///
/// Consecutive endpoints of one service share one entry, so callers should group changes by
/// service.
#[derive(Debug, Default)]
pub struct ChangesBuilder {
    changes: v1::Changes,
    /// The service of the last entry in `changes.endpoints`.
    last_group: Option<ServiceKey>,
    strings: HashMap<Arc<str>, u32>,
    port_lists: HashMap<Arc<[EndpointPort]>, u32>,
    placements: HashMap<Arc<Placement>, u32>,
    known_placements: HashMap<Reference, u32>,
    triggers: HashMap<u64, u32>,
    resources: usize,
    estimated_bytes: usize,
}

impl ChangesBuilder {
    /// Adds one change with the given references. For an endpoint's change, `trigger_unix_ms` is
    /// its oldest trigger time in milliseconds since the Unix epoch, or 0 if unknown.
    pub fn push(&mut self, change: &Change, trigger_unix_ms: u64, references: References) {
        match change {
            Change::Service(service) => self.service(service),
            Change::RemoveService(key) => {
                self.changes.removed_services.push(key_to_wire(key));
                self.count(16 + key.namespace.len() + key.name.len());
            }
            Change::Endpoint(key, endpoint) => self.put_endpoint(key, endpoint, trigger_unix_ms, references),
            Change::RemoveEndpoint(key, address) => {
                self.count(20);
                let address = address_to_wire(*address);
                self.group(key, trigger_unix_ms, references).removed.push(address);
            }
            Change::ServiceCidr(service_cidr) => self.service_cidr(service_cidr),
            Change::RemoveServiceCidr(name) => {
                self.changes.removed_service_cidrs.push(name.to_string());
                self.count(8 + name.len());
            }
        }
    }

    /// Adds a Service in full.
    pub fn service(&mut self, service: &Service) {
        let wire = service_to_wire(service);
        self.count(wire.encoded_len() + 4);
        self.changes.services.push(wire);
    }

    /// Adds an endpoint in full.
    pub fn endpoint(&mut self, key: &ServiceKey, endpoint: &Endpoint, trigger_unix_ms: u64) {
        self.put_endpoint(key, endpoint, trigger_unix_ms, References::default());
    }

    fn put_endpoint(&mut self, key: &ServiceKey, endpoint: &Endpoint, trigger_unix_ms: u64, references: References) {
        let wire = v1::Endpoint {
            address: address_to_wire(endpoint.address),
            port_list: self.port_list(&endpoint.ports),
            placement: match references.placement {
                Some(reference) => self.known_placement(reference).saturating_mul(2),
                None => self.placement(&endpoint.placement).saturating_mul(2).saturating_add(1),
            },
            conditions: conditions_to_wire(endpoint.conditions),
        };
        self.count(wire.encoded_len() + 6);
        self.group(key, trigger_unix_ms, references).changed.push(wire);
    }

    /// Adds a ServiceCIDR in full.
    pub fn service_cidr(&mut self, service_cidr: &ServiceCidr) {
        let wire = v1::ServiceCidr {
            name: service_cidr.name.to_string(),
            cidrs: service_cidr.cidrs.iter().map(prefix_to_wire).collect(),
        };
        self.count(wire.encoded_len() + 4);
        self.changes.service_cidrs.push(wire);
    }

    /// The number of resources and removals so far.
    #[must_use]
    pub fn resources(&self) -> usize {
        self.resources
    }

    /// An upper estimate of the encoded size in bytes, to limit the size of messages.
    #[must_use]
    pub fn estimated_bytes(&self) -> usize {
        self.estimated_bytes
    }

    /// Finishes the message.
    #[must_use]
    pub fn finish(self) -> v1::Changes {
        self.changes
    }

    fn count(&mut self, bytes: usize) {
        self.resources += 1;
        self.estimated_bytes += bytes;
    }

    /// Returns the entry of a service, perhaps a new one. It keeps the oldest trigger time.
    fn group(&mut self, key: &ServiceKey, trigger_unix_ms: u64, references: References) -> &mut v1::ServiceEndpoints {
        if self.last_group.as_ref() != Some(key) {
            let group = match references.service {
                Some(reference) => {
                    v1::ServiceEndpoints { service: Bytes::copy_from_slice(&reference), ..Default::default() }
                }
                None => v1::ServiceEndpoints {
                    namespace: self.reference(&Arc::from(key.namespace.as_str())),
                    name: key.name.to_string(),
                    ..Default::default()
                },
            };
            self.estimated_bytes += group.name.len() + group.service.len() + 20;
            let trigger = self.trigger(trigger_unix_ms);
            self.changes.endpoints.push(v1::ServiceEndpoints { trigger, ..group });
            self.last_group = Some(key.clone());
        }
        let last = self.changes.endpoints.len() - 1;
        let present = self.changes.endpoints[last].trigger;
        let present_ms = usize::try_from(present).ok().and_then(|index| self.changes.triggers_unix_ms.get(index));
        let present_ms = present_ms.copied().unwrap_or_default();
        if trigger_unix_ms != 0 && (present_ms == 0 || trigger_unix_ms < present_ms) {
            self.changes.endpoints[last].trigger = self.trigger(trigger_unix_ms);
        }
        &mut self.changes.endpoints[last]
    }

    /// Returns the index of a trigger time in `triggers_unix_ms`. While all trigger times are
    /// unknown, `triggers_unix_ms` is empty, and index 0 is out of range.
    fn trigger(&mut self, unix_ms: u64) -> u32 {
        if unix_ms == 0 && self.changes.endpoints.is_empty() {
            return 0;
        }
        if self.changes.triggers_unix_ms.is_empty() && !self.changes.endpoints.is_empty() {
            if unix_ms == 0 {
                return 0;
            }
            // The entries so far use index 0 for an unknown time.
            self.changes.triggers_unix_ms.push(0);
            self.triggers.insert(0, 0);
        }
        let next = u32::try_from(self.changes.triggers_unix_ms.len()).unwrap_or(u32::MAX);
        let index = *self.triggers.entry(unix_ms).or_insert(next);
        if index == next {
            self.changes.triggers_unix_ms.push(unix_ms);
            self.estimated_bytes += 11;
        }
        index
    }

    fn references(&mut self, names: &[Arc<str>]) -> Vec<u32> {
        names.iter().map(|name| self.reference(name)).collect()
    }

    /// Returns the index + 1 of a shared string, or 0 for the empty string.
    fn reference(&mut self, text: &Arc<str>) -> u32 {
        if text.is_empty() {
            return 0;
        }
        if let Some(reference) = self.strings.get(text) {
            return *reference;
        }
        self.estimated_bytes += text.len() + 4;
        self.changes.strings.push(text.to_string());
        let reference = u32::try_from(self.changes.strings.len()).unwrap_or(u32::MAX);
        self.strings.insert(Arc::clone(text), reference);
        reference
    }

    fn port_list(&mut self, list: &Arc<[EndpointPort]>) -> u32 {
        if let Some(index) = self.port_lists.get(list) {
            return *index;
        }
        let ports = list.iter().map(|port| v1::EndpointPort {
            name: port.name.to_string(),
            protocol: to_number(&PROTOCOLS, port.protocol),
            port: u32::from(port.port),
            conditions: port.conditions.map(conditions_to_wire),
            placement: port.placement.as_ref().map_or(0, |placement| self.placement(placement).saturating_add(1)),
        });
        let wire = v1::PortList { ports: ports.collect() };
        self.estimated_bytes += wire.encoded_len() + 4;
        let index = u32::try_from(self.changes.port_lists.len()).unwrap_or(u32::MAX);
        self.changes.port_lists.push(wire);
        self.port_lists.insert(Arc::clone(list), index);
        index
    }

    fn known_placement(&mut self, reference: Reference) -> u32 {
        let next = u32::try_from(self.changes.known_placements.len()).unwrap_or(u32::MAX);
        let index = *self.known_placements.entry(reference).or_insert(next);
        if index == next {
            self.estimated_bytes += reference.len() + 2;
            self.changes.known_placements.push(Bytes::copy_from_slice(&reference));
        }
        index
    }

    fn placement(&mut self, placement: &Arc<Placement>) -> u32 {
        if let Some(index) = self.placements.get(placement) {
            return *index;
        }
        let (hint_zones, hint_nodes) = placement
            .hints
            .as_deref()
            .map_or_else(Default::default, |hints| (self.references(&hints.zones), self.references(&hints.nodes)));
        let wire = v1::Placement {
            node: placement.node.as_deref().unwrap_or_default().to_owned(),
            zone: placement.zone.as_ref().map_or(0, |name| self.reference(name)),
            hint_zones,
            hint_nodes,
            weight_hundredths: (placement.weight != Weight::default()).then(|| placement.weight.hundredths().into()),
        };
        self.estimated_bytes += wire.encoded_len() + 4;
        let index = u32::try_from(self.changes.placements.len()).unwrap_or(u32::MAX);
        self.changes.placements.push(wire);
        self.placements.insert(Arc::clone(placement), index);
        index
    }
}

fn conditions_to_wire(Conditions { ready, serving, terminating }: Conditions) -> u32 {
    use v1::endpoint::Condition;
    let all = [(!ready, Condition::NotReady), (!serving, Condition::NotServing), (terminating, Condition::Terminating)];
    all.into_iter().filter(|(holds, _)| *holds).map(|(_, condition)| condition as u32).sum()
}

/// Converts a node for [`v1::OwnNode`].
#[must_use]
pub fn node_to_wire(node: &Node) -> v1::Node {
    v1::Node {
        name: node.name.to_string(),
        zone: node.zone.as_deref().unwrap_or_default().to_owned(),
        pod_cidrs: node.pod_cidrs.iter().map(prefix_to_wire).collect(),
        addresses: node.addresses.iter().copied().map(address_to_wire).collect(),
        going_away: node.going_away,
    }
}

/// Converts reserved frontends for [`v1::OwnNode`].
#[must_use]
pub fn reserved_to_wire(reserved: &BTreeSet<Frontend>) -> Vec<v1::ReservedFrontend> {
    let frontend = |frontend: &Frontend| v1::ReservedFrontend {
        address: if let Frontend::Address(address, ..) = frontend { address_to_wire(*address) } else { Bytes::new() },
        protocol: to_number(&PROTOCOLS, frontend.protocol()),
        port: frontend.port().into(),
        is_ipv6: frontend.family() == Family::V6,
    };
    reserved.iter().map(frontend).collect()
}

/// Converts digests for [`v1::Resume`].
#[must_use]
pub fn digests_to_wire(digests: &Digests) -> v1::BucketDigests {
    let buckets = digests.buckets();
    v1::BucketDigests {
        sums: buckets.iter().flat_map(|digest| digest.sum.to_le_bytes()).collect::<Vec<u8>>().into(),
        counts: buckets.iter().map(|digest| digest.count).collect(),
    }
}

pub(crate) fn key_to_wire(key: &ServiceKey) -> v1::ServiceKey {
    v1::ServiceKey { namespace: key.namespace.to_string(), name: key.name.to_string() }
}

fn service_to_wire(service: &Service) -> v1::Service {
    let addresses = |list: &[IpAddr]| list.iter().copied().map(address_to_wire).collect();
    let port = |port: &headgate_core::ServicePort| v1::ServicePort {
        name: port.name.to_string(),
        protocol: to_number(&PROTOCOLS, port.protocol),
        port: u32::from(port.port),
        node_port: u32::from(port.node_port),
    };
    v1::Service {
        key: Some(key_to_wire(&service.key)),
        cluster_ips: addresses(&service.cluster_ips),
        external_ips: addresses(&service.external_ips),
        load_balancer_ips: addresses(&service.load_balancer_ips),
        ports: service.ports.iter().map(port).collect(),
        internal_traffic_policy_local: service.internal_traffic_policy.is_local(),
        external_traffic_policy_local: service.external_traffic_policy.is_local(),
        session_affinity_timeout_seconds: service.session_affinity.map_or(0, |affinity| affinity.timeout_seconds),
        load_balancer_source_ranges: service.load_balancer_source_ranges.iter().map(prefix_to_wire).collect(),
        health_check_node_port: u32::from(service.health_check_node_port),
        created_unix_seconds: service.created_unix_seconds,
        scheduler: service.scheduler.to_string(),
        health_check: service.health_check.to_string(),
        health_check_interval_ms: service.health_check_interval_ms,
        load_balancing: service.load_balancing.to_string(),
        proxy_protocol: to_number(&PROXY_PROTOCOLS, service.proxy_protocol),
        max_connections: service.max_connections,
    }
}

/// The bytes of an address in network order.
#[must_use]
pub fn address_to_wire(address: IpAddr) -> Bytes {
    match address {
        IpAddr::V4(v4) => Bytes::copy_from_slice(&v4.octets()),
        IpAddr::V6(v6) => Bytes::copy_from_slice(&v6.octets()),
    }
}

pub(crate) fn prefix_to_wire(prefix: &IpNet) -> v1::IpPrefix {
    v1::IpPrefix { address: address_to_wire(prefix.addr()), prefix_length: u32::from(prefix.prefix_len()) }
}

/// Returns the number of a value, which the table has.
fn to_number<T: Copy + PartialEq, W: Copy + Into<i32>>(table: &[(T, W)], value: T) -> i32 {
    table.iter().find(|(known, _)| *known == value).map_or(0, |(_, wire)| (*wire).into())
}

// gRPC framing of messages that many streams share.

/// The length of the prefix: a compression flag and a 32-bit length (gRPC over HTTP/2,
/// "Length-Prefixed-Message").
pub const PREFIX_BYTES: usize = 5;

/// Encodes a message once with its gRPC prefix, uncompressed. Clones of the result share its
/// memory.
#[must_use]
pub fn frame(message: &impl Message) -> Bytes {
    let length = message.encoded_len();
    let mut buffer = BytesMut::with_capacity(PREFIX_BYTES + length);
    buffer.put_u8(0);
    buffer.put_u32(u32::try_from(length).unwrap_or(u32::MAX));
    // `BytesMut` grows as needed, so the encoding cannot fail.
    message.encode_raw(&mut buffer);
    buffer.freeze()
}

#[cfg(test)]
mod frame_tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn prefix_is_flag_and_big_endian_length() {
        let message = v1::ServiceKey { namespace: "a".into(), name: "b".into() };
        let framed = frame(&message);
        assert_eq!(&framed[..PREFIX_BYTES], &[0, 0, 0, 0, 6]);
        assert_eq!(v1::ServiceKey::decode(&framed[PREFIX_BYTES..]).unwrap(), message);
    }
}
