//! What rendering depends on besides state and node.

use std::net::IpAddr;

use crate::{behaviours::masquerade::MasqueradeConfig, model::Family};

/// How rules are laid out in chains.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Layout {
    /// Classic in small clusters; compact above [`RenderConfig::CLASSIC_MAX_SERVICES`] services or
    /// [`RenderConfig::CLASSIC_MAX_ENDPOINTS`] endpoints.
    #[default]
    Auto,
    /// As kube-proxy's: a chain for each service, a chain for each endpoint, and dispatch by one
    /// rule after the other.
    Classic,
    /// A third of the rules: a service's chain holds its DNAT rules, and hairpin connections are
    /// found after the choice, among this node's endpoints alone. Dispatch is on two levels, by
    /// address prefix or port range first: some 2·√n rules to pass instead of n, and a service that
    /// comes or goes rewrites only its group.
    Compact,
}

/// The node's addresses that answer NodePorts.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum NodePortAddresses {
    /// Every address of the node.
    #[default]
    All,
    /// These, whatever their family. A family with none of its own has no NodePorts: whoever
    /// resolves ranges to addresses gives [`NodePortAddresses::All`] to a family that no range was
    /// meant for.
    Only(Vec<IpAddr>),
}

/// Configuration of one family's rules.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RenderConfig {
    /// The family.
    pub family: Family,
    /// Masquerading.
    pub masquerade: MasqueradeConfig,
    /// Addresses that answer NodePorts.
    pub node_port_addresses: NodePortAddresses,
    /// NodePorts answer on 127.0.0.0/8 (IPv4 only; never on ::1).
    pub localhost_node_ports: bool,
    /// `nf_conntrack_tcp_be_liberal` is on: packets that conntrack calls INVALID need not be
    /// dropped.
    pub conntrack_tcp_be_liberal: bool,
    /// Rules count into [`super::names::INVALID_COUNTER`] and [`super::names::LOCALHOST_COUNTER`],
    /// which have to exist.
    pub counts_packets: bool,
    /// iptables cannot match SCTP on this machine: ports of SCTP have no rules, so that those of
    /// other protocols have theirs.
    pub leaves_out_sctp: bool,
    /// Layout.
    pub layout: Layout,
}

impl RenderConfig {
    /// Above this many services, [`Layout::Auto`] is compact.
    pub const CLASSIC_MAX_SERVICES: usize = 256;

    /// Above this many endpoints, [`Layout::Auto`] is compact.
    pub const CLASSIC_MAX_ENDPOINTS: usize = 1000;

    /// Defaults for a family: no detector, localhost NodePorts as kube-proxy has them.
    #[must_use]
    pub fn new(family: Family) -> Self {
        Self {
            family,
            masquerade: MasqueradeConfig::default(),
            node_port_addresses: NodePortAddresses::All,
            localhost_node_ports: family == Family::V4,
            conntrack_tcp_be_liberal: false,
            counts_packets: false,
            leaves_out_sctp: false,
            layout: Layout::Auto,
        }
    }

    /// True when a cluster of that size is laid out compactly.
    #[must_use]
    pub fn is_compact(&self, services: usize, endpoints: usize) -> bool {
        match self.layout {
            Layout::Auto => services > Self::CLASSIC_MAX_SERVICES || endpoints > Self::CLASSIC_MAX_ENDPOINTS,
            Layout::Classic => false,
            Layout::Compact => true,
        }
    }
}
