//! What rendering depends on besides state and node.

use crate::{masquerade::MasqueradeConfig, model::Family};

/// How KUBE-SERVICES and its like find a service's rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Dispatch {
    /// By the number of services: linear up to [`RenderConfig::LINEAR_DISPATCH_MAX_SERVICES`], two levels above.
    #[default]
    Auto,
    /// One rule after the other, as kube-proxy does.
    Linear,
    /// First by address prefix or port range, then by address or port: some 2·√n rules to pass instead of n, and a service that comes
    /// or goes rewrites only its group.
    TwoLevel,
}

/// Configuration of one family's rules.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RenderConfig {
    /// The family.
    pub family: Family,
    /// Masquerading.
    pub masquerade: MasqueradeConfig,
    /// NodePorts answer on 127.0.0.0/8 (IPv4 only; never on ::1).
    pub localhost_node_ports: bool,
    /// `nf_conntrack_tcp_be_liberal` is on: packets that conntrack calls INVALID need not be dropped.
    pub conntrack_tcp_be_liberal: bool,
    /// Dispatch.
    pub dispatch: Dispatch,
}

impl RenderConfig {
    /// Above this many services, [`Dispatch::Auto`] means two levels.
    pub const LINEAR_DISPATCH_MAX_SERVICES: usize = 256;

    /// Defaults for a family: no detector, localhost NodePorts as kube-proxy has them.
    #[must_use]
    pub fn new(family: Family) -> Self {
        Self {
            family,
            masquerade: MasqueradeConfig::default(),
            localhost_node_ports: family == Family::V4,
            conntrack_tcp_be_liberal: false,
            dispatch: Dispatch::Auto,
        }
    }

    /// True when that many services are dispatched on two levels.
    #[must_use]
    pub fn is_two_level(&self, services: usize) -> bool {
        match self.dispatch {
            Dispatch::Auto => services > Self::LINEAR_DISPATCH_MAX_SERVICES,
            Dispatch::Linear => false,
            Dispatch::TwoLevel => true,
        }
    }
}
