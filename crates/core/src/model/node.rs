//! Nodes and service ranges.

use std::{net::IpAddr, sync::Arc};

use compact_str::CompactString;
use ipnet::IpNet;

/// The fields of a Node that the agent on it needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// `metadata.name`.
    pub name: Arc<str>,
    /// Label `topology.kubernetes.io/zone`.
    pub zone: Option<Arc<str>>,
    /// `spec.podCIDRs`.
    pub pod_cidrs: Vec<IpNet>,
    /// `status.addresses`: InternalIPs, then ExternalIPs.
    pub addresses: Vec<IpAddr>,
    /// The Node has a deletionTimestamp or the taint `ToBeDeletedByClusterAutoscaler`. When a Node
    /// is deleted, its agent keeps the last value and sets this field.
    pub going_away: bool,
}

/// A ServiceCIDR: ranges from which ClusterIPs are allocated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServiceCidr {
    /// `metadata.name`.
    pub name: CompactString,
    /// `spec.cidrs`.
    pub cidrs: Vec<IpNet>,
}
