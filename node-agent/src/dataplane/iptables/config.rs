//! The configuration of the iptables dataplane.

use headgate_core::{Family, iptables::Layout, view::MasqueradeConfig};

use super::Variant;

/// The configuration of the iptables dataplane.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IptablesOptions {
    /// Which variant of iptables to use: legacy or nft.
    pub variant: Variant,
    /// The layout of the rules.
    pub layout: Layout,
    /// Which connections are masqueraded, and with which mark.
    pub masquerade: MasqueradeConfig,
    /// True if NodePorts answer on 127.0.0.0/8 (IPv4 only).
    pub localhost_node_ports: bool,
    /// True if the kernel parameter `nf_conntrack_tcp_be_liberal` is set: then no packet outside of
    /// the TCP window is INVALID, and no rule has to drop it.
    pub conntrack_tcp_be_liberal: bool,
    /// True if rules count packets like kube-proxy, where kernel and programs support counters.
    pub count_packets: bool,
    /// Families to program, if the node supports them.
    pub families: Vec<Family>,
}

impl Default for IptablesOptions {
    fn default() -> Self {
        Self {
            variant: Variant::Auto,
            layout: Layout::Auto,
            masquerade: MasqueradeConfig::default(),
            localhost_node_ports: true,
            conntrack_tcp_be_liberal: false,
            count_packets: false,
            families: Family::BOTH.to_vec(),
        }
    }
}
