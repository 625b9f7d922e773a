//! Nodes and service ranges.

use std::{net::IpAddr, sync::Arc};

use compact_str::CompactString;
use ipnet::IpNet;

/// A Node as far as its own agent needs it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// `metadata.name`.
    pub name: Arc<str>,
    /// Label `topology.kubernetes.io/zone`.
    pub zone: Option<Arc<str>>,
    /// `spec.podCIDRs`.
    pub pod_cidrs: Vec<IpNet>,
    /// InternalIPs, then ExternalIPs.
    pub addresses: Vec<IpAddr>,
    /// It has a deletionTimestamp or the taint `ToBeDeletedByClusterAutoscaler`. An agent also sets
    /// it on the Node that it keeps after a deletion.
    pub going_away: bool,
}

/// A range that ClusterIPs are allocated from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServiceCidr {
    /// `metadata.name`.
    pub name: CompactString,
    /// `spec.cidrs`.
    pub cidrs: Vec<IpNet>,
}
