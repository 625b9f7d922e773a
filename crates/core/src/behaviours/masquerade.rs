//! Masquerading: the node replaces the source address of a packet by its own address, so that
//! replies return through the node.
//!
//! The node masquerades traffic
//!
//! - to ClusterIPs, if [`MasqueradeConfig::all`] is set;
//! - to ClusterIPs, if a [`LocalDetector`] does not recognize the source as a local pod;
//! - to external destinations with Cluster policy;
//! - to external destinations with Local policy, if it comes from the node itself;
//! - of hairpin connections, in which the chosen endpoint is the client itself.

use ipnet::IpNet;

use crate::model::{Family, TrafficPolicy};

/// How the node recognizes traffic from local pods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LocalDetector {
    /// Recognizes local pods by source address, for the detection modes ClusterCIDR and NodeCIDR.
    Cidr(IpNet),
    /// Recognizes local pods by the name of the bridge to which they are connected.
    BridgeInterface(String),
    /// Recognizes local pods by a common prefix of the names of their interfaces.
    InterfaceNamePrefix(String),
}

/// The clients of a frontend whose connections are masqueraded: the address of the node replaces
/// the source address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum MasqueradeSources {
    /// No client.
    Nobody,
    /// Clients that the detector does not recognise as local pods.
    Outside,
    /// The node itself.
    Node,
    /// All clients.
    Everyone,
}

/// The configuration of masquerading.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MasqueradeConfig {
    /// Masquerade all traffic to ClusterIPs.
    pub all: bool,
    /// The bit of the firewall mark that marks packets to masquerade, 0 to 31.
    pub bit: u8,
    /// The detector for IPv4.
    pub detector_v4: Option<LocalDetector>,
    /// The detector for IPv6.
    pub detector_v6: Option<LocalDetector>,
}

impl MasqueradeSources {
    /// Returns the clients of an external destination whose connections are masqueraded.
    #[must_use]
    pub fn to_external_destinations(policy: TrafficPolicy) -> Self {
        if policy.is_local() { Self::Node } else { Self::Everyone }
    }
}

impl Default for MasqueradeConfig {
    fn default() -> Self {
        Self { all: false, bit: 14, detector_v4: None, detector_v6: None }
    }
}

impl MasqueradeConfig {
    /// Returns the firewall mark that has only the configured bit set.
    #[must_use]
    pub fn mark(&self) -> u32 {
        1u32.checked_shl(u32::from(self.bit)).unwrap_or(1 << 14)
    }

    /// True if the node masquerades all traffic to ClusterIPs, or the part of this traffic that a
    /// detector does not recognize as traffic from local pods.
    #[must_use]
    pub fn covers_cluster_ips(&self, family: Family) -> bool {
        self.all || self.detector(family).is_some()
    }

    /// Returns the clients of a ClusterIP whose connections are masqueraded.
    #[must_use]
    pub fn sources_to_cluster_ips(&self, family: Family) -> MasqueradeSources {
        if self.all {
            MasqueradeSources::Everyone
        } else if self.covers_cluster_ips(family) {
            MasqueradeSources::Outside
        } else {
            MasqueradeSources::Nobody
        }
    }

    /// Returns the detector of a family.
    #[must_use]
    pub fn detector(&self, family: Family) -> Option<&LocalDetector> {
        match family {
            Family::V4 => self.detector_v4.as_ref(),
            Family::V6 => self.detector_v6.as_ref(),
        }
    }
}
