//! The configuration of the IPVS dataplane.

use std::time::Duration;

use headgate_core::{Family, ipvs::Scheduler, masquerade::MasqueradeConfig};
use ipnet::IpNet;

use super::super::xtables::Variant;

/// The configuration of the IPVS dataplane.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Which variant of iptables writes the rules beside the virtual servers.
    pub variant: Variant,
    /// Which connections are masqueraded, and with which mark.
    pub masquerade: MasqueradeConfig,
    /// The scheduler of services that do not name their own.
    pub scheduler: Scheduler,
    /// Virtual servers with addresses in these ranges belong to other software.
    pub exclude_cidrs: Vec<IpNet>,
    /// Only the device that carries the services' addresses answers ARP for them.
    pub strict_arp: bool,
    /// Idle time-out of established TCP connections; zero keeps the kernel's value.
    pub tcp_timeout: Duration,
    /// Idle time-out of TCP connections after a FIN; zero keeps the kernel's value.
    pub tcp_fin_timeout: Duration,
    /// Idle time-out of UDP flows; zero keeps the kernel's value.
    pub udp_timeout: Duration,
    /// Families to program, if the node supports them.
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
