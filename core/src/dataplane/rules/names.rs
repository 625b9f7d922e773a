//! Names of chains.
//!
//! A service's chains end in the first 16 characters of base32(sha256(text)), text being
//! `namespace/name[:port]` and the lower-case protocol, for an endpoint's chain followed by
//! `address:port` (IPv6 in brackets). Sixteen characters are ten bytes of the hash.

use std::fmt;

use data_encoding::BASE32_NOPAD;
use sha2::{Digest as _, Sha256};

use super::Table;
use crate::{behaviours::endpoint_choice::Destination, behaviours::view::ServicePortView};

/// `KUBE-SERVICES`, in nat and filter.
pub const SERVICES: &str = "KUBE-SERVICES";
/// `KUBE-NODEPORTS`, in nat and filter.
pub const NODE_PORTS: &str = "KUBE-NODEPORTS";
/// `KUBE-EXTERNAL-SERVICES`, in filter.
pub const EXTERNAL_SERVICES: &str = "KUBE-EXTERNAL-SERVICES";
/// `KUBE-PROXY-FIREWALL`, in filter.
pub const PROXY_FIREWALL: &str = "KUBE-PROXY-FIREWALL";
/// `KUBE-MARK-MASQ`, in nat.
pub const MARK_MASQ: &str = "KUBE-MARK-MASQ";
/// `KUBE-POSTROUTING`, in nat.
pub const POSTROUTING: &str = "KUBE-POSTROUTING";
/// `KUBE-HAIRPIN`, compact layout only: connections of this node's endpoints to themselves. nat
/// masquerades them, filter lets them through.
pub const HAIRPIN: &str = "KUBE-HAIRPIN";
/// `KUBE-FORWARD`, in filter.
pub const FORWARD: &str = "KUBE-FORWARD";
/// Guards 127.0.0.0/8 while localhost NodePorts are on. kube-proxy uses the kubelet's KUBE-FIREWALL
/// for it, which cannot be removed again without taking the kubelet's; this one is ours alone.
pub const LOCALNET_GUARD: &str = "KUBE-LOCALNET-GUARD";
/// `KUBE-PROXY-CANARY`: empty; gone when somebody flushed the tables.
pub const CANARY: &str = "KUBE-PROXY-CANARY";

/// Counts packets that KUBE-FORWARD drops as INVALID; kube-proxy's name.
pub const INVALID_COUNTER: &str = "ct_state_invalid_dropped_pkts";
/// Counts what NodePorts on 127.0.0.0/8 accept; kube-proxy's name.
pub const LOCALHOST_COUNTER: &str = "localhost_nps_accepted_pkts";

/// `KUBE-LOAD-BALANCER`, in nat: masquerades traffic to load balancer IPs with Cluster policy.
pub const LOAD_BALANCER: &str = "KUBE-LOAD-BALANCER";
/// `KUBE-NODE-PORT`: in nat it masquerades traffic to NodePorts with Cluster policy, in filter it
/// admits health checks.
pub const NODE_PORT: &str = "KUBE-NODE-PORT";
/// `KUBE-SOURCE-RANGES-FIREWALL`, in filter and mangle: drops packets that no source range admits.
pub const SOURCE_RANGES: &str = "KUBE-SOURCE-RANGES-FIREWALL";
/// `KUBE-IPVS-FILTER`, in filter: rejects packets to the services' addresses that have no virtual
/// server.
pub const IN_FILTER: &str = "KUBE-IPVS-FILTER";
/// `KUBE-IPVS-OUT-FILTER`: the node's own traffic. In filter it rejects and drops, in mangle it
/// checks source ranges.
pub const OUT_FILTER: &str = "KUBE-IPVS-OUT-FILTER";

/// Names of all chains that are not hashed and that a dataplane of Headgate may have made in a
/// table: what a cleanup removes.
#[must_use]
pub fn all(table: Table) -> &'static [&'static str] {
    match table {
        Table::Mangle => &[CANARY, OUT_FILTER, SOURCE_RANGES],
        Table::Nat => &[SERVICES, NODE_PORTS, POSTROUTING, HAIRPIN, MARK_MASQ, CANARY, LOAD_BALANCER, NODE_PORT],
        Table::Filter => &[
            SERVICES,
            EXTERNAL_SERVICES,
            NODE_PORTS,
            PROXY_FIREWALL,
            FORWARD,
            HAIRPIN,
            LOCALNET_GUARD,
            CANARY,
            NODE_PORT,
            SOURCE_RANGES,
            IN_FILTER,
            OUT_FILTER,
        ],
    }
}

/// A chain in which many services have lines. A chain comes before those that jump to it; the
/// scripts write them in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DispatchChain {
    /// nat KUBE-HAIRPIN, compact layout only: masquerades connections of endpoints to themselves.
    NatHairpin,
    /// nat KUBE-NODEPORTS.
    NatNodePorts,
    /// nat KUBE-SERVICES, whose last rule leads to KUBE-NODEPORTS.
    NatServices,
    /// filter KUBE-HAIRPIN, compact layout only: accepts connections of endpoints to themselves.
    FilterHairpin,
    /// filter KUBE-SERVICES: ClusterIPs whose packets are rejected or dropped.
    FilterServices,
    /// filter KUBE-EXTERNAL-SERVICES: external destinations whose packets are rejected or dropped.
    FilterExternalServices,
    /// filter KUBE-PROXY-FIREWALL: packets that no source range admits.
    FilterProxyFirewall,
    /// filter KUBE-NODEPORTS: health-check node ports, accepted ahead of the host's firewall.
    FilterNodePorts,
}

impl DispatchChain {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::NatHairpin,
        Self::NatNodePorts,
        Self::NatServices,
        Self::FilterHairpin,
        Self::FilterServices,
        Self::FilterExternalServices,
        Self::FilterProxyFirewall,
        Self::FilterNodePorts,
    ];

    /// Its table.
    #[must_use]
    pub fn table(self) -> Table {
        match self {
            Self::NatHairpin | Self::NatServices | Self::NatNodePorts => Table::Nat,
            _ => Table::Filter,
        }
    }

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::NatHairpin | Self::FilterHairpin => HAIRPIN,
            Self::NatServices | Self::FilterServices => SERVICES,
            Self::NatNodePorts | Self::FilterNodePorts => NODE_PORTS,
            Self::FilterExternalServices => EXTERNAL_SERVICES,
            Self::FilterProxyFirewall => PROXY_FIREWALL,
        }
    }

    /// True of KUBE-HAIRPIN, which only the compact layout has.
    #[must_use]
    pub fn is_hairpin(self) -> bool {
        matches!(self, Self::NatHairpin | Self::FilterHairpin)
    }
}

/// What a hashed chain is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ChainKind {
    /// `KUBE-SVC-`: spreads over the endpoints for Cluster policy.
    ClusterPolicy,
    /// `KUBE-SVL-`: spreads over the endpoints for Local policy.
    LocalPolicy,
    /// `KUBE-EXT-`: traffic to external destinations.
    External,
    /// `KUBE-FW-`: source ranges of load balancer IPs.
    Firewall,
    /// `KUBE-SEP-`: one endpoint.
    Endpoint,
    /// `KUBE-SVC-G-`: second level of the dispatch by address.
    AddressGroup,
    /// `KUBE-EXT-G-`: second level of the dispatch by NodePort.
    NodePortGroup,
    /// `KUBE-HPS-`: second level of KUBE-HAIRPIN.
    HairpinGroup,
}

impl ChainKind {
    const ALL: [Self; 8] = [
        Self::ClusterPolicy,
        Self::LocalPolicy,
        Self::External,
        Self::Firewall,
        Self::Endpoint,
        Self::AddressGroup,
        Self::NodePortGroup,
        Self::HairpinGroup,
    ];

    /// The name's beginning.
    ///
    /// Groups that lead to services' chains begin as those do. So kube-proxy, where it takes a node
    /// over, finds them among the chains of services that it does not know, and removes them. Left
    /// behind, they would keep the chains that they lead to from being deleted, and with that each
    /// of its syncs from succeeding. KUBE-HAIRPIN leads to its groups and stays there, so that
    /// theirs have to stay as well.
    #[must_use]
    pub fn prefix(self) -> &'static str {
        match self {
            Self::ClusterPolicy => "KUBE-SVC-",
            Self::LocalPolicy => "KUBE-SVL-",
            Self::External => "KUBE-EXT-",
            Self::Firewall => "KUBE-FW-",
            Self::Endpoint => "KUBE-SEP-",
            Self::AddressGroup => "KUBE-SVC-G-",
            Self::NodePortGroup => "KUBE-EXT-G-",
            Self::HairpinGroup => "KUBE-HPS-",
        }
    }
}

/// The name of a hashed chain, in eleven bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChainName {
    kind: ChainKind,
    hash: [u8; 10],
}

impl ChainName {
    /// A chain of that kind named after the text.
    #[must_use]
    pub fn of(kind: ChainKind, text: &str) -> Self {
        let digest = Sha256::digest(text.as_bytes());
        let mut hash = [0; 10];
        hash.copy_from_slice(&digest[..10]);
        Self { kind, hash }
    }

    /// A chain of a service port.
    #[must_use]
    pub fn of_port(kind: ChainKind, view: &ServicePortView) -> Self {
        Self::of(kind, &port_text(view))
    }

    /// The chain of one endpoint of a service port.
    #[must_use]
    pub fn of_endpoint(view: &ServicePortView, destination: &Destination) -> Self {
        let endpoint = destination.socket_address();
        Self::of(ChainKind::Endpoint, &format!("{}{endpoint}", port_text(view)))
    }

    /// The same service port's chain of another kind.
    #[must_use]
    pub fn sibling(self, kind: ChainKind) -> Self {
        Self { kind, ..self }
    }

    /// Reads a name back; `None` when it is not one of ours.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        ChainKind::ALL.into_iter().find_map(|kind| {
            // A prefix may begin with another one; what follows that is no hash then, for the dash
            // in it.
            let hash = BASE32_NOPAD.decode(text.strip_prefix(kind.prefix())?.as_bytes()).ok()?;
            Some(Self { kind, hash: hash.try_into().ok()? })
        })
    }
}

impl fmt::Display for ChainName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.kind.prefix())?;
        BASE32_NOPAD.encode_display(&self.hash).fmt(f)
    }
}

fn port_text(view: &ServicePortView) -> String {
    let mut text = view.display_name();
    text.push_str(view.protocol.as_lower_str());
    text
}
