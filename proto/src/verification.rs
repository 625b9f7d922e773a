//! What a forwarding table depends on, outside of the agent (discovery.proto, section 19).

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use bytes::Bytes;
use headgate_core::{
    Family, NodeFacts, Protocol, ServiceKey, State, address_from_bytes,
    addresses::DialPolicy,
    digest::{BucketDigest, Digests},
    endpoint_health::FailingEndpoints,
    explain::{Mode, NodeSettings},
    forwarding::{Table, expected},
    iptables::NodePortAddresses,
    view::{LocalDetector, MasqueradeConfig},
};
use ipnet::IpNet;

use crate::{
    address_to_wire,
    decode::ranges_from_wire,
    encode::{key_to_wire, prefix_to_wire},
    v1,
};

/// The maximum number of Services whose failing endpoints a message contains.
const MAX_FAILING: usize = 1_000;

/// The maximum number of addresses in a list, so that a comparison stays cheap.
const MAX_ADDRESSES: usize = 1_024;

/// What the forwarding table of a node depends on, beside the resources.
#[derive(Debug, Clone)]
pub struct NodeView {
    /// The facts about the node.
    pub facts: NodeFacts,
    /// The settings. For each family, the table depends only on whether there is a detector, and
    /// whether NodePorts answer at all.
    pub settings: NodeSettings,
    /// The IP families that the node programs.
    pub families: BTreeSet<Family>,
}

/// The digests of one Service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ServiceDigests {
    /// Of the Service and its endpoints.
    pub resources: BucketDigest,
    /// Of the Service's part of a forwarding table.
    pub table: BucketDigest,
}

impl ServiceDigests {
    /// Converts to the wire.
    #[must_use]
    pub fn to_wire(&self, key: &ServiceKey) -> v1::HeldService {
        let sum = |digest: BucketDigest| digest.sum.to_le_bytes().to_vec().into();
        v1::HeldService {
            service: Some(key_to_wire(key)),
            sum: sum(self.resources),
            count: self.resources.count,
            table_sum: sum(self.table),
            table_count: self.table.count,
        }
    }

    /// Converts from the wire; `None` if the name is missing or a sum does not have 16 bytes.
    #[must_use]
    pub fn from_wire(wire: &v1::HeldService) -> Option<(ServiceKey, Self)> {
        let digest =
            |sum: &Bytes, count| Some(BucketDigest { sum: u128::from_le_bytes(sum.as_ref().try_into().ok()?), count });
        let key = wire.service.as_ref()?;
        let resources = digest(&wire.sum, wire.count)?;
        let table = digest(&wire.table_sum, wire.table_count)?;
        Some((ServiceKey::new(&key.namespace, &key.name), Self { resources, table }))
    }
}

impl NodeView {
    /// Adds the digest of a Service's forwarding table, perhaps without SCTP, in all families.
    pub fn add_table(&self, state: &State, key: &Arc<ServiceKey>, has_sctp: bool, digests: &mut Digests) {
        for mut table in self.tables(state, key) {
            table.entries.retain(|frontend, _| has_sctp || frontend.protocol() != Protocol::Sctp);
            table.hashes(state.frontends()).for_each(|(bucket, hash)| digests.add(bucket, hash));
        }
    }

    fn tables<'a>(&'a self, state: &'a State, key: &'a Arc<ServiceKey>) -> impl Iterator<Item = Table> + 'a {
        self.families.iter().map(move |family| expected(state, [key], *family, &self.facts, &self.settings))
    }

    /// Returns the digests of one Service, which is in this bucket.
    #[must_use]
    pub fn digests_of(&self, state: &State, key: &Arc<ServiceKey>, bucket: u16) -> ServiceDigests {
        let mut digests = ServiceDigests::default();
        for table in self.tables(state, key) {
            let hashes = table.hashes(state.frontends()).filter(|(of, _)| *of == bucket);
            hashes.for_each(|(_, hash)| digests.table.add(hash));
        }
        digests.resources = state.entry(key).map(|entry| entry.digest(key)).unwrap_or_default();
        digests
    }

    /// Converts to the wire, without `own_node`. Leaves out failing endpoints beyond
    /// [`MAX_FAILING`] Services.
    #[must_use]
    pub fn to_wire(&self) -> v1::NodeView {
        let Self { facts, settings, families } = self;
        let failing = |(key, endpoints): (&Arc<ServiceKey>, &BTreeSet<SocketAddr>)| v1::FailingEndpoints {
            service: Some(key_to_wire(key)),
            endpoints: endpoints.iter().map(socket_to_wire).collect(),
        };
        let family = |family: &Family| v1::FamilyView {
            is_ipv6: *family == Family::V6,
            recognises_pods: settings.masquerade.detector(*family).is_some(),
            has_node_ports: *settings.node_ports(*family) != NodePortAddresses::Only(Vec::new()),
        };
        let list = |all: &[IpNet]| all.iter().filter(|_| facts.dialled.has_proxy).map(prefix_to_wire).collect();
        v1::NodeView {
            zone: facts.zone.as_deref().unwrap_or_default().to_owned(),
            addresses: facts.addresses.iter().copied().map(address_to_wire).collect(),
            ignores_external_ips: facts.ignores_external_ips,
            failing: facts.failing.iter().take(MAX_FAILING).map(failing).collect(),
            failing_left_out: facts.failing.iter().nth(MAX_FAILING).is_some(),
            mode: settings.mode.as_str().to_owned(),
            families: families.iter().map(family).collect(),
            own_node: None,
            dialled: list(&facts.dialled.ranges),
            dialled_never: list(&facts.dialled.of_node),
        }
    }

    /// Converts from the wire. `node` is the name of the node.
    ///
    /// # Errors
    /// The field with an unusable value, and the reason.
    pub fn from_wire(node: &str, wire: &v1::NodeView) -> Result<Self, String> {
        let mode = Mode::parse(&wire.mode).ok_or_else(|| format!("mode: unknown mode {:?}", wire.mode))?;
        let facts = NodeFacts {
            zone: Some(&*wire.zone).filter(|zone| !zone.is_empty()).map(Into::into),
            addresses: addresses(&wire.addresses)?,
            ignores_external_ips: wire.ignores_external_ips,
            failing: failing_from_wire(&wire.failing)?,
            dialled: Arc::new(DialPolicy {
                ranges: ranges_from_wire(&wire.dialled, MAX_ADDRESSES, "dialled")?,
                of_node: ranges_from_wire(&wire.dialled_never, MAX_ADDRESSES, "dialled_never")?,
                has_proxy: matches!(mode, Mode::Userspace | Mode::UserspaceIptables),
            }),
            ..NodeFacts::named(node)
        };
        let mut settings = NodeSettings {
            mode,
            masquerade: MasqueradeConfig::default(),
            node_ports_v4: NodePortAddresses::All,
            node_ports_v6: NodePortAddresses::All,
            localhost_node_ports: false,
        };
        if wire.families.is_empty() {
            return Err("families: no IP family".to_owned());
        }
        let mut families = BTreeSet::new();
        for v1::FamilyView { is_ipv6, recognises_pods, has_node_ports } in &wire.families {
            let (family, detector, node_ports) = if *is_ipv6 {
                (Family::V6, &mut settings.masquerade.detector_v6, &mut settings.node_ports_v6)
            } else {
                (Family::V4, &mut settings.masquerade.detector_v4, &mut settings.node_ports_v4)
            };
            *detector = recognises_pods.then(|| LocalDetector::InterfaceNamePrefix(String::new()));
            if !has_node_ports {
                *node_ports = NodePortAddresses::Only(Vec::new());
            }
            families.insert(family);
        }
        Ok(Self { facts, settings, families })
    }
}

fn addresses(wire: &[Bytes]) -> Result<Vec<IpAddr>, String> {
    if wire.len() > MAX_ADDRESSES {
        return Err(format!("addresses: {} addresses, and {MAX_ADDRESSES} are allowed", wire.len()));
    }
    let addresses: Option<_> = wire.iter().map(|bytes| address_from_bytes(bytes)).collect();
    addresses.ok_or_else(|| "addresses: an address needs 4 or 16 bytes".to_owned())
}

fn failing_from_wire(wire: &[v1::FailingEndpoints]) -> Result<FailingEndpoints, String> {
    let mut failing = FailingEndpoints::default();
    for v1::FailingEndpoints { service, endpoints } in wire.iter().take(MAX_FAILING) {
        let key = service.as_ref().ok_or("failing: a Service has no name")?;
        let endpoints: Option<_> = endpoints.iter().map(|bytes| socket_from_wire(bytes)).collect();
        let endpoints = endpoints.ok_or("failing: an endpoint needs 6 or 18 bytes")?;
        failing.set(&Arc::new(ServiceKey::new(&key.namespace, &key.name)), endpoints);
    }
    Ok(failing)
}

fn socket_to_wire(endpoint: &SocketAddr) -> Bytes {
    [address_to_wire(endpoint.ip()), endpoint.port().to_be_bytes().to_vec().into()].concat().into()
}

fn socket_from_wire(bytes: &[u8]) -> Option<SocketAddr> {
    let (address, port) = bytes.split_last_chunk()?;
    Some(SocketAddr::new(address_from_bytes(address)?, u16::from_be_bytes(*port)))
}
