//! Masquerading: whose source address is replaced by the node's, so that replies come back through
//! the node.
//!
//! Rules, in the order of the behavioural reference: (a) `masquerade_all` and a ClusterIP; (b) a
//! ClusterIP, and the source is known not to be a pod of this node's cluster (needs a
//! [`LocalDetector`]); (c) an external destination with Cluster policy, always; (d) an external
//! destination with Local policy, from one of the node's own addresses; (e) hairpin: the chosen
//! endpoint is the client itself.

use ipnet::IpNet;

use crate::model::Family;

/// How to tell local pods' traffic from other traffic.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LocalDetector {
    /// By source address, modes ClusterCIDR and NodeCIDR.
    Cidr(IpNet),
    /// By the name of the bridge that pods are on.
    BridgeInterface(String),
    /// By the first letters of the names of pods' interfaces.
    InterfaceNamePrefix(String),
}

/// What the operator configured about masquerading.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MasqueradeConfig {
    /// Masquerade everything that goes to a ClusterIP.
    pub all: bool,
    /// Packets to masquerade carry this bit, 0 to 31.
    pub bit: u8,
    /// Detector for IPv4.
    pub detector_v4: Option<LocalDetector>,
    /// Detector for IPv6.
    pub detector_v6: Option<LocalDetector>,
}

impl Default for MasqueradeConfig {
    fn default() -> Self {
        Self { all: false, bit: 14, detector_v4: None, detector_v6: None }
    }
}

impl MasqueradeConfig {
    /// The mark with only the configured bit set.
    #[must_use]
    pub fn mark(&self) -> u32 {
        1u32.checked_shl(u32::from(self.bit)).unwrap_or(1 << 14)
    }

    /// True when traffic to ClusterIPs is masqueraded at all: always, or unless a detector takes it
    /// for a pod's.
    #[must_use]
    pub fn covers_cluster_ips(&self, family: Family) -> bool {
        self.all || self.detector(family).is_some()
    }

    /// The detector of a family.
    #[must_use]
    pub fn detector(&self, family: Family) -> Option<&LocalDetector> {
        match family {
            Family::V4 => self.detector_v4.as_ref(),
            Family::V6 => self.detector_v6.as_ref(),
        }
    }
}
