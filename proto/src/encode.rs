//! Core → wire. Cannot fail.

use std::{collections::HashMap, net::IpAddr, sync::Arc};

use bytes::Bytes;
use headgate_core::{
    Change, Endpoint, EndpointPort, Node, Protocol, Service, ServiceCidr, ServiceKey, digest::Digests,
};
use ipnet::IpNet;

use crate::v1;

/// Collects changes into one [`v1::Changes`], sharing strings and port lists.
///
/// Endpoints of one service that are pushed one after the other share one entry, so callers group changes by service.
#[derive(Debug, Default)]
pub struct ChangesBuilder {
    changes: v1::Changes,
    strings: HashMap<Arc<str>, u32>,
    port_lists: HashMap<Arc<[EndpointPort]>, u32>,
    resources: usize,
    estimated_bytes: usize,
}

impl ChangesBuilder {
    /// Adds one change. `trigger_unix_ms` is the oldest trigger time behind an endpoint's change, 0 when unknown.
    pub fn push(&mut self, change: &Change, trigger_unix_ms: u64) {
        match change {
            Change::Service(service) => self.service(service),
            Change::RemoveService(key) => {
                self.changes.removed_services.push(key_to_wire(key));
                self.count(16 + key.namespace.len() + key.name.len());
            }
            Change::Endpoint(key, endpoint) => self.endpoint(key, endpoint, trigger_unix_ms),
            Change::RemoveEndpoint(key, address) => self.removed_endpoint(key, *address, trigger_unix_ms),
            Change::ServiceCidr(service_cidr) => self.service_cidr(service_cidr),
            Change::RemoveServiceCidr(name) => {
                self.changes.removed_service_cidrs.push(name.to_string());
                self.count(8 + name.len());
            }
        }
    }

    /// Adds a Service at its present value.
    pub fn service(&mut self, service: &Service) {
        let wire = service_to_wire(service);
        self.count(prost::Message::encoded_len(&wire) + 4);
        self.changes.services.push(wire);
    }

    /// Adds an endpoint at its present value.
    pub fn endpoint(&mut self, key: &ServiceKey, endpoint: &Endpoint, trigger_unix_ms: u64) {
        let (hint_zones, hint_nodes) = endpoint
            .hints
            .as_deref()
            .map_or_else(Default::default, |hints| (self.references(&hints.zones), self.references(&hints.nodes)));
        let wire = v1::Endpoint {
            address: address_to_wire(endpoint.address),
            port_list: self.port_list(&endpoint.ports),
            node: endpoint.node.as_ref().map_or(0, |name| self.reference(name)),
            zone: endpoint.zone.as_ref().map_or(0, |name| self.reference(name)),
            not_ready: !endpoint.conditions.ready,
            not_serving: !endpoint.conditions.serving,
            terminating: endpoint.conditions.terminating,
            hint_zones,
            hint_nodes,
        };
        self.count(prost::Message::encoded_len(&wire) + 4);
        self.group(key, trigger_unix_ms).changed.push(wire);
    }

    /// Adds a ServiceCIDR at its present value.
    pub fn service_cidr(&mut self, service_cidr: &ServiceCidr) {
        let wire = v1::ServiceCidr {
            name: service_cidr.name.to_string(),
            cidrs: service_cidr.cidrs.iter().map(prefix_to_wire).collect(),
        };
        self.count(prost::Message::encoded_len(&wire) + 4);
        self.changes.service_cidrs.push(wire);
    }

    /// Number of resources and removals so far.
    #[must_use]
    pub fn resources(&self) -> usize {
        self.resources
    }

    /// An upper estimate of the encoded size, for cutting messages to size.
    #[must_use]
    pub fn estimated_bytes(&self) -> usize {
        self.estimated_bytes
    }

    /// The message.
    #[must_use]
    pub fn finish(self) -> v1::Changes {
        self.changes
    }

    fn count(&mut self, bytes: usize) {
        self.resources += 1;
        self.estimated_bytes += bytes;
    }

    fn removed_endpoint(&mut self, key: &ServiceKey, address: IpAddr, trigger_unix_ms: u64) {
        self.count(20);
        self.group(key, trigger_unix_ms).removed.push(address_to_wire(address));
    }

    fn group(&mut self, key: &ServiceKey, trigger_unix_ms: u64) -> &mut v1::ServiceEndpoints {
        let namespace = self.reference(&Arc::from(key.namespace.as_str()));
        let groups = &mut self.changes.endpoints;
        if groups.last().is_none_or(|last| last.namespace != namespace || last.name != key.name.as_str()) {
            self.estimated_bytes += key.name.len() + 20;
            groups.push(v1::ServiceEndpoints { namespace, name: key.name.to_string(), ..Default::default() });
        }
        let last = groups.len() - 1;
        let group = &mut groups[last];
        if trigger_unix_ms != 0 && (group.trigger_unix_ms == 0 || trigger_unix_ms < group.trigger_unix_ms) {
            group.trigger_unix_ms = trigger_unix_ms;
        }
        group
    }

    fn references(&mut self, names: &[Arc<str>]) -> Vec<u32> {
        names.iter().map(|name| self.reference(name)).collect()
    }

    /// Index + 1 of a shared string; 0 for the empty one.
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

    fn port_list(&mut self, ports: &Arc<[EndpointPort]>) -> u32 {
        if let Some(index) = self.port_lists.get(ports) {
            return *index;
        }
        let to_wire = |port: &EndpointPort| v1::EndpointPort {
            name: port.name.to_string(),
            protocol: protocol_to_wire(port.protocol),
            port: u32::from(port.port),
        };
        let wire = v1::PortList { ports: ports.iter().map(to_wire).collect() };
        self.estimated_bytes += prost::Message::encoded_len(&wire) + 4;
        let index = u32::try_from(self.changes.port_lists.len()).unwrap_or(u32::MAX);
        self.changes.port_lists.push(wire);
        self.port_lists.insert(Arc::clone(ports), index);
        index
    }
}

/// A node for [`v1::OwnNode`].
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

/// Digests for [`v1::Resume`].
#[must_use]
pub fn digests_to_wire(digests: &Digests) -> v1::BucketDigests {
    let buckets = digests.buckets();
    v1::BucketDigests {
        sums: buckets.iter().flat_map(|digest| digest.sum.to_le_bytes()).collect::<Vec<u8>>().into(),
        counts: buckets.iter().map(|digest| digest.count).collect(),
    }
}

fn key_to_wire(key: &ServiceKey) -> v1::ServiceKey {
    v1::ServiceKey { namespace: key.namespace.to_string(), name: key.name.to_string() }
}

fn service_to_wire(service: &Service) -> v1::Service {
    let addresses = |list: &[IpAddr]| list.iter().copied().map(address_to_wire).collect();
    let port = |port: &headgate_core::ServicePort| v1::ServicePort {
        name: port.name.to_string(),
        protocol: protocol_to_wire(port.protocol),
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
    }
}

fn address_to_wire(address: IpAddr) -> Bytes {
    match address {
        IpAddr::V4(v4) => Bytes::copy_from_slice(&v4.octets()),
        IpAddr::V6(v6) => Bytes::copy_from_slice(&v6.octets()),
    }
}

fn prefix_to_wire(prefix: &IpNet) -> v1::IpPrefix {
    v1::IpPrefix { address: address_to_wire(prefix.addr()), prefix_length: u32::from(prefix.prefix_len()) }
}

fn protocol_to_wire(protocol: Protocol) -> i32 {
    match protocol {
        Protocol::Tcp => v1::Protocol::Tcp,
        Protocol::Udp => v1::Protocol::Udp,
        Protocol::Sctp => v1::Protocol::Sctp,
    }
    .into()
}
