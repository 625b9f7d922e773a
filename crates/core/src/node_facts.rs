//! Facts about one node.

use std::{net::IpAddr, sync::Arc};

use crate::{conventions::dialling::DialPolicy, endpoint_health::FailingEndpoints, model::Node};

/// Facts about one node. The view of a service depends on the shared state and on these facts.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NodeFacts {
    /// The node's name in lower case. Endpoints on a node of this name are local.
    pub name: Arc<str>,
    /// The node's zone.
    pub zone: Option<Arc<str>>,
    /// The node's own addresses. [`crate::source_ranges`] tests whether source ranges admit them.
    pub addresses: Vec<IpAddr>,
    /// This node does not program externalIPs (feature gate `AllowServiceExternalIPs` is off).
    pub ignores_external_ips: bool,
    /// Endpoints that fail this node's health checks.
    pub failing: FailingEndpoints,
    /// The addresses that the node's programs connect to.
    pub dialled: Arc<DialPolicy>,
}

impl NodeFacts {
    /// Returns the facts about a node whose Node resource has not arrived.
    #[must_use]
    pub fn named(name: &str) -> Self {
        Self { name: name.into(), ..Self::default() }
    }

    /// Returns the facts from a Node resource, or [`Self::named`] if there is none.
    #[must_use]
    pub fn of(name: &str, node: Option<&Node>) -> Self {
        let Some(Node { zone, addresses, .. }) = node.cloned() else { return Self::named(name) };
        Self { zone, addresses, ..Self::named(name) }
    }
}
