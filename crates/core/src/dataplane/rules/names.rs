//! Names of chains.
//!
//! The names of a service's chains end with the first 16 characters of base32(sha256(text)). The
//! text is `namespace/name[:port]`, then the lower-case protocol, and for the chain of an endpoint
//! also `address:port` with IPv6 addresses in brackets. Sixteen characters encode ten bytes of the
//! hash.

use std::fmt;

use data_encoding::BASE32_NOPAD;
use sha2::{Digest as _, Sha256};

use super::RulesTable;
use crate::{
    behaviours::view::{Destination, ServicePortView},
    model::Family,
};

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
/// `KUBE-HAIRPIN`, in nat and filter, only in the compact layout. It matches connections of this
/// node's endpoints to themselves: nat masquerades these connections, and filter accepts them.
pub const HAIRPIN: &str = "KUBE-HAIRPIN";
/// `KUBE-FORWARD`, in filter.
pub const FORWARD: &str = "KUBE-FORWARD";
/// `KUBE-LOCALNET-GUARD`, in filter: protects 127.0.0.0/8 while localhost NodePorts are on.
/// kube-proxy adds this rule to the kubelet's chain KUBE-FIREWALL. Headgate uses a separate chain,
/// so that a cleanup can remove it without removing rules of the kubelet.
pub const LOCALNET_GUARD: &str = "KUBE-LOCALNET-GUARD";
/// `KUBE-PROXY-CANARY`, in all tables: an empty chain. If the chain is missing, another program has
/// flushed the tables.
pub const CANARY: &str = "KUBE-PROXY-CANARY";

/// The nfacct counter of packets that KUBE-FORWARD drops as INVALID. kube-proxy uses this name too.
pub const INVALID_COUNTER: &str = "ct_state_invalid_dropped_pkts";
/// The nfacct counter of packets to NodePorts on 127.0.0.0/8. kube-proxy uses this name too.
pub const LOCALHOST_COUNTER: &str = "localhost_nps_accepted_pkts";

named! {
    /// The chains of mode userspace in nat. Each leads TCP connections to one listener of the proxy
    /// while the gate is closed, and else returns. A listener belongs to a policy, and to addresses
    /// of Services or to NodePorts.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub enum GateChain {
        /// `KUBE-GATE-CLUSTER`.
        Cluster = "KUBE-GATE-CLUSTER",
        /// `KUBE-GATE-LOCAL`.
        Local = "KUBE-GATE-LOCAL",
        /// `KUBE-GATE-NODEPORT-CLUSTER`.
        NodePortCluster = "KUBE-GATE-NODEPORT-CLUSTER",
        /// `KUBE-GATE-NODEPORT-LOCAL`.
        NodePortLocal = "KUBE-GATE-NODEPORT-LOCAL",
    }
}

/// `KUBE-GATE-INPUT`, in filter: accepts connections to the proxy of mode userspace, even if the
/// host's firewall would drop them.
pub const GATE_INPUT: &str = "KUBE-GATE-INPUT";

/// The set that is the gate of mode userspace. While the gate is closed, the set contains all
/// addresses.
#[must_use]
pub fn gate_set(family: Family) -> &'static str {
    match family {
        Family::V4 => "KUBE-GATE",
        Family::V6 => "KUBE-6-GATE",
    }
}

/// `KUBE-LOAD-BALANCER`, in nat: masquerades traffic to load balancer IPs with Cluster policy.
pub const LOAD_BALANCER: &str = "KUBE-LOAD-BALANCER";
/// `KUBE-NODE-PORT`: in nat it masquerades traffic to NodePorts with Cluster policy. In filter it
/// accepts packets to health-check node ports.
pub const NODE_PORT: &str = "KUBE-NODE-PORT";
/// `KUBE-SOURCE-RANGES-FIREWALL`, in filter and mangle: drops packets that no source range admits.
pub const SOURCE_RANGES: &str = "KUBE-SOURCE-RANGES-FIREWALL";
/// `KUBE-IPVS-FILTER`, in filter: rejects packets to a service's address on ports for which no
/// virtual server exists.
pub const IN_FILTER: &str = "KUBE-IPVS-FILTER";
/// `KUBE-IPVS-OUT-FILTER`: handles traffic from the node itself. In filter it rejects and drops
/// packets. In mangle it checks source ranges.
pub const OUT_FILTER: &str = "KUBE-IPVS-OUT-FILTER";

/// Returns the fixed names of all chains that a dataplane of Headgate may have
/// created in a table. A cleanup removes these chains.
#[must_use]
pub fn all(table: RulesTable) -> &'static [&'static str] {
    match table {
        RulesTable::Mangle => &[CANARY, OUT_FILTER, SOURCE_RANGES],
        RulesTable::Nat => {
            const {
                &[
                    SERVICES,
                    NODE_PORTS,
                    POSTROUTING,
                    HAIRPIN,
                    MARK_MASQ,
                    CANARY,
                    LOAD_BALANCER,
                    NODE_PORT,
                    GateChain::Cluster.as_str(),
                    GateChain::Local.as_str(),
                    GateChain::NodePortCluster.as_str(),
                    GateChain::NodePortLocal.as_str(),
                ]
            }
        }
        RulesTable::Filter => &[
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
            GATE_INPUT,
        ],
    }
}

/// A chain that contains rules of many services. A chain comes before the chains that jump to it,
/// and scripts write them in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DispatchChain {
    /// nat KUBE-HAIRPIN, compact layout only: masquerades connections of endpoints to themselves.
    NatHairpin,
    /// nat KUBE-NODEPORTS.
    NatNodePorts,
    /// nat KUBE-SERVICES, whose last rules jump to KUBE-NODEPORTS.
    NatServices,
    /// filter KUBE-HAIRPIN, compact layout only: accepts connections of endpoints to themselves.
    FilterHairpin,
    /// filter KUBE-SERVICES: ClusterIPs whose packets are rejected or dropped.
    FilterServices,
    /// filter KUBE-EXTERNAL-SERVICES: external addresses and NodePorts whose packets are rejected
    /// or dropped.
    FilterExternalServices,
    /// filter KUBE-PROXY-FIREWALL: drops packets that no source range admits.
    FilterProxyFirewall,
    /// filter KUBE-NODEPORTS: accepts packets to health-check node ports before the host's firewall
    /// can drop them.
    FilterNodePorts,
}

impl DispatchChain {
    /// All dispatch chains.
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

    /// The table of the chain.
    #[must_use]
    pub fn table(self) -> RulesTable {
        match self {
            Self::NatHairpin | Self::NatServices | Self::NatNodePorts => RulesTable::Nat,
            _ => RulesTable::Filter,
        }
    }

    /// The name of the chain.
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

    /// True for KUBE-HAIRPIN, which only the compact layout has.
    #[must_use]
    pub fn is_hairpin(self) -> bool {
        matches!(self, Self::NatHairpin | Self::FilterHairpin)
    }
}

named! {
    /// The purpose of a chain with a hashed name. Named by the start of the name.
    ///
    /// Groups jump to chains of services. The kernel does not delete a chain while a rule jumps to
    /// the chain. So when kube-proxy replaces Headgate on a node, kube-proxy must remove the groups
    /// together with the chains of services. Otherwise each sync of kube-proxy would fail.
    /// kube-proxy removes unknown chains whose names begin with one of its own prefixes. The
    /// prefixes of groups therefore begin with such a prefix: `KUBE-SVC-G-` begins with
    /// `KUBE-SVC-`. Hairpin groups have another prefix, because kube-proxy keeps KUBE-HAIRPIN,
    /// which jumps to them.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub enum ChainKind {
        /// `KUBE-SVC-`: distributes connections over the endpoints for Cluster policy.
        ClusterPolicy = "KUBE-SVC-",
        /// `KUBE-SVL-`: distributes connections over the endpoints for Local policy.
        LocalPolicy = "KUBE-SVL-",
        /// `KUBE-EXT-`: handles traffic to external addresses and NodePorts.
        External = "KUBE-EXT-",
        /// `KUBE-FW-`: checks the source ranges of load balancer IPs.
        Firewall = "KUBE-FW-",
        /// `KUBE-SEP-`: translates the destination to one endpoint.
        Endpoint = "KUBE-SEP-",
        /// `KUBE-SVC-G-`: second level of the dispatch by address.
        AddressGroup = "KUBE-SVC-G-",
        /// `KUBE-EXT-G-`: second level of the dispatch by NodePort.
        NodePortGroup = "KUBE-EXT-G-",
        /// `KUBE-HPS-`: second level of KUBE-HAIRPIN.
        HairpinGroup = "KUBE-HPS-",
    }
}

/// The hashed name of a chain, in eleven bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChainName {
    kind: ChainKind,
    hash: [u8; 10],
}

impl ChainName {
    /// Returns the name of a chain of this kind for `text`.
    #[must_use]
    pub fn of(kind: ChainKind, text: &str) -> Self {
        let digest = Sha256::digest(text.as_bytes());
        let mut hash = [0; 10];
        hash.copy_from_slice(&digest[..10]);
        Self { kind, hash }
    }

    /// Returns the name of a service port's chain.
    #[must_use]
    pub fn of_port(kind: ChainKind, view: &ServicePortView) -> Self {
        Self::of(kind, &port_text(view))
    }

    /// Returns the name of the chain of one endpoint of a service port.
    #[must_use]
    pub fn of_endpoint(view: &ServicePortView, destination: &Destination) -> Self {
        let endpoint = destination.socket_address();
        Self::of(ChainKind::Endpoint, &format!("{}{endpoint}", port_text(view)))
    }

    /// The purpose of the chain.
    #[must_use]
    pub fn kind(self) -> ChainKind {
        self.kind
    }

    /// Returns the name of another kind of chain for the same service port.
    #[must_use]
    pub fn sibling(self, kind: ChainKind) -> Self {
        Self { kind, ..self }
    }

    /// Parses a name. Returns `None` if `text` is not a hashed name of Headgate.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        ChainKind::ALL.into_iter().find_map(|kind| {
            // KUBE-SVC-G- begins with KUBE-SVC-. If `text` has the longer prefix, the text after
            // the shorter prefix contains a dash and is not a valid hash.
            let hash = BASE32_NOPAD.decode(text.strip_prefix(kind.as_str())?.as_bytes()).ok()?;
            Some(Self { kind, hash: hash.try_into().ok()? })
        })
    }
}

impl fmt::Display for ChainName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.kind.as_str())?;
        BASE32_NOPAD.encode_display(&self.hash).fmt(f)
    }
}

fn port_text(view: &ServicePortView) -> String {
    let mut text = view.display_name();
    text.push_str(view.protocol.as_lower_str());
    text
}
