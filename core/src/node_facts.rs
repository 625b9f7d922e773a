//! What one node adds to the shared state.

use std::{net::IpAddr, sync::Arc};

use crate::{endpoint_health::FailingEndpoints, model::Node};

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
    /// Endpoints that fail this node's checks.
    pub failing: FailingEndpoints,
}

impl NodeFacts {
    /// Facts before the Node resource has arrived.
    #[must_use]
    pub fn named(name: &str) -> Self {
        Self {
            name: name.into(),
            zone: None,
            addresses: Vec::new(),
            ignores_external_ips: false,
            failing: FailingEndpoints::default(),
        }
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
