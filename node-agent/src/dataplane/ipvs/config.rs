//! What the operator asked of the IPVS dataplane.

use std::time::Duration;

use headgate_core::{Family, ipvs::Scheduler, masquerade::MasqueradeConfig};
use ipnet::IpNet;

use super::super::xtables::Variant;

/// Configuration of the dataplane.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Which iptables the rules beside the virtual servers are written with.
    pub variant: Variant,
    /// Masquerading.
    pub masquerade: MasqueradeConfig,
    /// The cluster's scheduler.
    pub scheduler: Scheduler,
    /// Virtual servers of these addresses are others'.
    pub exclude_cidrs: Vec<IpNet>,
    /// Other interfaces do not answer for the services' addresses.
    pub strict_arp: bool,
    /// Idle time of established TCP connections; zero leaves it as it is.
    pub tcp_timeout: Duration,
    /// The same after a FIN.
    pub tcp_fin_timeout: Duration,
    /// The same of UDP flows.
    pub udp_timeout: Duration,
    /// Families to program, where the node can.
    pub families: Vec<Family>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            variant: Variant::Auto,
            masquerade: MasqueradeConfig::default(),
            scheduler: Scheduler::default(),
            exclude_cidrs: Vec::new(),
            strict_arp: false,
            tcp_timeout: Duration::ZERO,
            tcp_fin_timeout: Duration::ZERO,
            udp_timeout: Duration::ZERO,
            families: Family::BOTH.to_vec(),
        }
    }
}
