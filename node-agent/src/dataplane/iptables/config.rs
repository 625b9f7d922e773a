//! What the operator asked of the iptables dataplane.

use headgate_core::{Family, iptables::Layout, masquerade::MasqueradeConfig};

use super::Variant;

/// Configuration of the dataplane.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Which iptables.
    pub variant: Variant,
    /// How rules are laid out.
    pub layout: Layout,
    /// Masquerading.
    pub masquerade: MasqueradeConfig,
    /// NodePorts answer on 127.0.0.0/8 (IPv4 only).
    pub localhost_node_ports: bool,
    /// Conntrack calls no packet INVALID for being outside of the window: there is nothing to drop.
    pub conntrack_tcp_be_liberal: bool,
    /// Count packets as kube-proxy does, where the kernel and the programs can.
    pub count_packets: bool,
    /// Families to program, where the node can.
    pub families: Vec<Family>,
}

impl Default for Config {
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
