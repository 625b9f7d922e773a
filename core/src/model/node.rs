//! Nodes, what one node knows of itself, and service ranges.

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
    /// It has a deletionTimestamp or the taint `ToBeDeletedByClusterAutoscaler`. An agent also sets it on the Node that it keeps after a deletion.
    pub going_away: bool,
}

/// What one node adds to the shared state: a service looks different from each node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeFacts {
    /// The node's name, lower case; endpoints that carry it are local.
    pub name: Arc<str>,
    /// The node's zone.
    pub zone: Option<Arc<str>>,
    /// The node's own addresses, for the source-range test.
    pub addresses: Vec<IpAddr>,
    /// externalIPs are left alone on this node (feature gate `AllowServiceExternalIPs` off).
    pub ignores_external_ips: bool,
}

impl NodeFacts {
    /// Facts before the Node resource has arrived.
    #[must_use]
    pub fn named(name: &str) -> Self {
        Self { name: name.into(), zone: None, addresses: Vec::new(), ignores_external_ips: false }
    }

    /// Facts of a Node resource, which may be absent.
    #[must_use]
    pub fn of(name: &str, node: Option<&Node>) -> Self {
        node.map_or_else(
            || Self::named(name),
            |node| Self { zone: node.zone.clone(), addresses: node.addresses.clone(), ..Self::named(name) },
        )
    }
}

/// A range that ClusterIPs are allocated from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServiceCidr {
    /// `metadata.name`.
    pub name: CompactString,
    /// `spec.cidrs`.
    pub cidrs: Vec<IpNet>,
}
