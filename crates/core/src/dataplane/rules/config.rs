//! The configuration of rules.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
};

use super::names::GateChain;
use crate::{behaviours::view::MasqueradeConfig, model::Family};

/// How rules are distributed over chains.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Layout {
    /// [`Self::Classic`] in small clusters. [`Self::Compact`] above
    /// [`RenderConfig::CLASSIC_MAX_SERVICES`] services or [`RenderConfig::CLASSIC_MAX_ENDPOINTS`]
    /// endpoints.
    #[default]
    Auto,
    /// The layout of kube-proxy. Each service port and each endpoint has a chain, and a packet
    /// passes the rules of all services until one matches.
    Classic,
    /// A layout with about a third of the rules of the classic layout. The chain of a service
    /// contains its DNAT rules. Hairpin connections are detected after the choice of the endpoint,
    /// and only for endpoints of this node. Dispatch has two levels: the first level selects a
    /// group by address prefix or port range. With n services, a packet passes about 2·√n rules
    /// instead of n. Adding or removing a service rewrites only its group.
    Compact,
}

/// The addresses of the node on which NodePorts are served.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum NodePortAddresses {
    /// Every address of the node.
    #[default]
    All,
    /// These addresses, which may be of both families. NodePorts are not served in a family without
    /// an address in the list. A caller that resolves ranges to addresses must therefore use
    /// [`NodePortAddresses::All`] for a family in which the operator configured no range.
    Only(Vec<IpAddr>),
}

impl NodePortAddresses {
    /// Returns whether NodePorts of a family are served on addresses in 127.0.0.0/8. `is_wanted` is
    /// the setting `localhostNodePorts`. NodePorts are never served on ::1.
    #[must_use]
    pub fn include_localhost(&self, family: Family, is_wanted: bool) -> bool {
        let includes_loopback = match self {
            Self::All => true,
            Self::Only(addresses) => addresses.iter().any(IpAddr::is_loopback),
        };
        family == Family::V4 && is_wanted && includes_loopback
    }
}

/// The configuration of the rules of one family.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RenderConfig {
    /// The family.
    pub family: Family,
    /// Masquerading.
    pub masquerade: MasqueradeConfig,
    /// Addresses on which NodePorts are served.
    pub node_port_addresses: NodePortAddresses,
    /// NodePorts are also served on 127.0.0.0/8. NodePorts are never served on ::1.
    pub localhost_node_ports: bool,
    /// The sysctl `nf_conntrack_tcp_be_liberal` is on, so the rules do not drop packets in the
    /// conntrack state INVALID.
    pub conntrack_tcp_be_liberal: bool,
    /// Rules count packets in [`super::names::INVALID_COUNTER`] and
    /// [`super::names::LOCALHOST_COUNTER`]. Both nfacct counters must exist.
    pub counts_packets: bool,
    /// Leaves out the rules of SCTP ports, because iptables cannot match SCTP on this machine. A
    /// single rule for SCTP would make the kernel reject the rules of other protocols too.
    pub leaves_out_sctp: bool,
    /// The listener of the proxy of mode userspace for each chain. All listeners have one IP
    /// address. Empty in other modes.
    pub listeners: BTreeMap<GateChain, SocketAddr>,
    /// Layout.
    pub layout: Layout,
}

impl RenderConfig {
    /// The number of services above which [`Layout::Auto`] is compact.
    pub const CLASSIC_MAX_SERVICES: usize = 256;

    /// The number of endpoints above which [`Layout::Auto`] is compact.
    pub const CLASSIC_MAX_ENDPOINTS: usize = 1000;

    /// Returns the defaults for a family: no local detector, and localhost NodePorts for IPv4, as
    /// in kube-proxy.
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
            listeners: BTreeMap::new(),
            layout: Layout::Auto,
        }
    }

    /// True in mode userspace: a proxy carries TCP connections. Rules then send no connection
    /// straight to endpoints that expect the PROXY protocol, and refuse SCTP.
    #[must_use]
    pub fn has_proxy(&self) -> bool {
        !self.listeners.is_empty()
    }

    /// True if a cluster of this size has the compact layout.
    #[must_use]
    pub fn is_compact(&self, services: usize, endpoints: usize) -> bool {
        match self.layout {
            Layout::Auto => services > Self::CLASSIC_MAX_SERVICES || endpoints > Self::CLASSIC_MAX_ENDPOINTS,
            Layout::Classic => false,
            Layout::Compact => true,
        }
    }
}
