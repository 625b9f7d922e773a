//! What a forwarding table depends on, for the comparison outside of the agent (discovery.proto,
//! section 19).

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use bytes::Bytes;
use headgate_core::{
    Family, NodeFacts, Protocol, ServiceKey, State,
    digest::{BucketDigest, Digests},
    endpoint_health::FailingEndpoints,
    explain::{Mode, NodeSettings},
    forwarding::{Table, expected},
    frontends::Frontend,
    iptables::NodePortAddresses,
    masquerade::{LocalDetector, MasqueradeConfig},
};

use crate::{address_to_wire, v1};

/// The maximum number of Services whose failing endpoints a message contains.
pub const MAX_FAILING: usize = 1_000;

/// The maximum number of addresses in a list of a message. Larger lists would make the comparison
/// expensive.
const MAX_ADDRESSES: usize = 1_024;

/// What the forwarding table of a node depends on, beside the resources.
#[derive(Debug, Clone)]
pub struct NodeView {
    /// The facts about the node.
    pub facts: NodeFacts,
    /// The settings. Of masquerading, the table depends only on whether a family has a detector.
    pub settings: NodeSettings,
    /// The IP families that the node programs.
    pub families: Vec<Family>,
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
        v1::HeldService {
            service: Some(key_to_wire(key)),
            sum: sum_to_wire(self.resources),
            count: self.resources.count,
            table_sum: sum_to_wire(self.table),
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

fn sum_to_wire(digest: BucketDigest) -> Bytes {
    digest.sum.to_le_bytes().to_vec().into()
}

fn key_to_wire(key: &ServiceKey) -> v1::ServiceKey {
    v1::ServiceKey { namespace: key.namespace.to_string(), name: key.name.to_string() }
}

impl NodeView {
    /// Adds the digest of a Service's part of the forwarding table, in all families of the node.
    pub fn add_table(&self, state: &State, key: &Arc<ServiceKey>, digests: &mut Digests) {
        self.tables(state, key).for_each(|table| table.digest(state.frontends(), digests));
    }

    /// Like [`Self::add_table`], for a node that leaves out ports of SCTP.
    pub fn add_table_without_sctp(&self, state: &State, key: &Arc<ServiceKey>, digests: &mut Digests) {
        for mut table in self.tables(state, key) {
            table.entries.retain(|frontend, _| {
                let (Frontend::Address(_, protocol, _) | Frontend::NodePort(_, protocol, _)) = frontend;
                *protocol != Protocol::Sctp
            });
            table.digest(state.frontends(), digests);
        }
    }

    fn tables<'a>(&'a self, state: &'a State, key: &'a Arc<ServiceKey>) -> impl Iterator<Item = Table> + 'a {
        self.families.iter().map(move |family| expected(state, [key], *family, &self.facts, &self.settings))
    }

    /// Returns the digests of one Service, which is in this bucket.
    #[must_use]
    pub fn digests_of(&self, state: &State, key: &Arc<ServiceKey>, bucket: u16) -> ServiceDigests {
        let mut table = BucketDigest::default();
        self.tables(state, key).for_each(|of_family| of_family.digest_of_bucket(state.frontends(), bucket, &mut table));
        let resources = state.entry(key).map(|entry| entry.digest(key)).unwrap_or_default();
        ServiceDigests { resources, table }
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
        v1::NodeView {
            zone: facts.zone.as_deref().unwrap_or_default().to_owned(),
            addresses: facts.addresses.iter().copied().map(address_to_wire).collect(),
            ignores_external_ips: facts.ignores_external_ips,
            failing: facts.failing.iter().take(MAX_FAILING).map(failing).collect(),
            failing_left_out: facts.failing.iter().nth(MAX_FAILING).is_some(),
            mode: settings.mode.as_str().to_owned(),
            families: families.iter().map(|family| family_to_wire(*family, settings)).collect(),
            localhost_node_ports: settings.localhost_node_ports,
            own_node: None,
        }
    }

    /// Converts from the wire. `node` is the name of the node.
    ///
    /// # Errors
    /// The field with an unusable value, and the reason.
    pub fn from_wire(node: &str, wire: &v1::NodeView) -> Result<Self, String> {
        let mode = Mode::parse(&wire.mode).ok_or_else(|| format!("mode: unknown mode {:?}", wire.mode))?;
        let mut facts = NodeFacts {
            zone: Some(&*wire.zone).filter(|zone| !zone.is_empty()).map(Into::into),
            addresses: addresses(&wire.addresses, "addresses")?,
            ignores_external_ips: wire.ignores_external_ips,
            ..NodeFacts::named(node)
        };
        facts.failing = failing_from_wire(&wire.failing)?;
        let mut settings = NodeSettings {
            mode,
            masquerade: MasqueradeConfig::default(),
            node_ports_v4: NodePortAddresses::All,
            node_ports_v6: NodePortAddresses::All,
            localhost_node_ports: wire.localhost_node_ports,
        };
        if wire.families.is_empty() {
            return Err("families: no IP family".to_owned());
        }
        let mut families = BTreeSet::new();
        for family in &wire.families {
            // The table depends only on the presence of the detector.
            let detector = family.recognises_pods.then(|| LocalDetector::InterfaceNamePrefix(String::new()));
            let listed = addresses(&family.node_port_addresses, "node_port_addresses")?;
            let node_ports =
                if family.restricts_node_ports { NodePortAddresses::Only(listed) } else { NodePortAddresses::All };
            if family.is_ipv6 {
                (settings.masquerade.detector_v6, settings.node_ports_v6) = (detector, node_ports);
            } else {
                (settings.masquerade.detector_v4, settings.node_ports_v4) = (detector, node_ports);
            }
            families.insert(if family.is_ipv6 { Family::V6 } else { Family::V4 });
        }
        Ok(Self { facts, settings, families: families.into_iter().collect() })
    }
}

fn family_to_wire(family: Family, settings: &NodeSettings) -> v1::FamilyView {
    let node_ports = match family {
        Family::V4 => &settings.node_ports_v4,
        Family::V6 => &settings.node_ports_v6,
    };
    let listed = match node_ports {
        NodePortAddresses::All => None,
        NodePortAddresses::Only(addresses) => Some(addresses),
    };
    v1::FamilyView {
        is_ipv6: family == Family::V6,
        recognises_pods: settings.masquerade.detector(family).is_some(),
        restricts_node_ports: listed.is_some(),
        node_port_addresses: listed.into_iter().flatten().copied().map(address_to_wire).collect(),
    }
}

fn addresses(wire: &[Bytes], field: &str) -> Result<Vec<IpAddr>, String> {
    if wire.len() > MAX_ADDRESSES {
        return Err(format!("{field}: {} addresses, and {MAX_ADDRESSES} are allowed", wire.len()));
    }
    let address = |bytes: &Bytes| address(bytes).ok_or_else(|| format!("{field}: an address needs 4 or 16 bytes"));
    wire.iter().map(address).collect()
}

fn address(bytes: &[u8]) -> Option<IpAddr> {
    let v4 = <[u8; 4]>::try_from(bytes).map(IpAddr::from);
    v4.or_else(|_| <[u8; 16]>::try_from(bytes).map(IpAddr::from)).ok()
}

fn failing_from_wire(wire: &[v1::FailingEndpoints]) -> Result<FailingEndpoints, String> {
    let mut failing = FailingEndpoints::default();
    for v1::FailingEndpoints { service, endpoints } in wire.iter().take(MAX_FAILING) {
        let key = service.as_ref().ok_or("failing: a Service has no name")?;
        let endpoints: Option<BTreeSet<SocketAddr>> = endpoints.iter().map(|bytes| socket_from_wire(bytes)).collect();
        let endpoints = endpoints.ok_or("failing: an endpoint needs 6 or 18 bytes")?;
        failing.set(&Arc::new(ServiceKey::new(&key.namespace, &key.name)), endpoints);
    }
    Ok(failing)
}

fn socket_to_wire(endpoint: &SocketAddr) -> Bytes {
    let mut bytes = address_to_wire(endpoint.ip()).to_vec();
    bytes.extend(endpoint.port().to_be_bytes());
    bytes.into()
}

fn socket_from_wire(bytes: &[u8]) -> Option<SocketAddr> {
    let (of_address, port) = bytes.split_last_chunk::<2>()?;
    Some(SocketAddr::new(address(of_address)?, u16::from_be_bytes(*port)))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_view_survives_the_wire() {
        let mut facts = NodeFacts::named("node-a");
        facts.zone = Some("zone-a".into());
        facts.addresses = vec!["192.0.2.1".parse().unwrap(), "2001:db8::1".parse().unwrap()];
        let key = Arc::new(ServiceKey::new("ns", "web"));
        facts.failing.set(&key, ["10.0.0.1:80".parse().unwrap(), "[fd00::1]:80".parse().unwrap()].into());
        let settings = NodeSettings {
            mode: Mode::Ipvs,
            masquerade: MasqueradeConfig {
                detector_v4: Some(LocalDetector::InterfaceNamePrefix(String::new())),
                ..MasqueradeConfig::default()
            },
            node_ports_v4: NodePortAddresses::Only(vec!["192.0.2.1".parse().unwrap()]),
            node_ports_v6: NodePortAddresses::All,
            localhost_node_ports: true,
        };
        let view = NodeView { facts, settings, families: vec![Family::V4, Family::V6] };
        let back = NodeView::from_wire("node-a", &view.to_wire()).unwrap();
        assert_eq!((&back.facts, &back.families), (&view.facts, &view.families));
        assert_eq!(format!("{:?}", back.settings), format!("{:?}", view.settings));
        let unknown = v1::NodeView { mode: "x".into(), ..view.to_wire() };
        assert!(NodeView::from_wire("node-a", &unknown).unwrap_err().contains("mode"));
        let mut short = view.to_wire();
        let none = v1::NodeView { families: Vec::new(), ..view.to_wire() };
        assert!(NodeView::from_wire("node-a", &none).unwrap_err().contains("families"));
        short.failing[0].endpoints[0] = Bytes::from_static(&[1, 2, 3]);
        assert!(NodeView::from_wire("node-a", &short).unwrap_err().contains("failing"));
    }
}
