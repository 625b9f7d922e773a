//! Topology: which ready endpoints this node prefers (KEP-2433 hints by zone, KEP-3015 hints by
//! node).
//!
//! A ready endpoint (here, one address and port) may have hints by node, hints by zone, or both.
//! Only ready endpoints decide which kind of hint applies. A kind applies only if every ready
//! endpoint has a hint of that kind and at least one of these hints names this node or its zone. If
//! both kinds apply, the node uses the hints by node. If neither kind applies, the node uses all
//! ready endpoints. Hints therefore never leave a node without endpoints.

use std::sync::Arc;

use crate::{model::PortState, node_facts::NodeFacts};

/// Which ready endpoints this node uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TopologyMode {
    /// The endpoints with a hint for this node.
    SameNode,
    /// The endpoints with a hint for this node's zone.
    SameZone,
    /// All endpoints.
    Any,
}

impl TopologyMode {
    /// Decides the mode from the ready endpoints of a service port.
    pub fn decide<'a>(ready: &(impl Iterator<Item = PortState<'a>> + Clone), node: &NodeFacts) -> Self {
        let applies = |mode: &Self| {
            ready.clone().all(|endpoint| !mode.hints(&endpoint).is_empty())
                && ready.clone().any(|endpoint| mode.admits(&endpoint, node))
        };
        [Self::SameNode, Self::SameZone].into_iter().find(applies).unwrap_or(Self::Any)
    }

    /// True if this node uses the ready endpoint in this mode.
    #[must_use]
    pub fn admits(self, endpoint: &PortState<'_>, node: &NodeFacts) -> bool {
        let name = match self {
            Self::Any => return true,
            Self::SameNode => &*node.name,
            Self::SameZone => node.zone.as_deref().unwrap_or_default(),
        };
        !name.is_empty() && self.hints(endpoint).iter().any(|hint| **hint == *name)
    }

    /// The hints of an endpoint that count in this mode.
    fn hints<'a>(self, endpoint: &PortState<'a>) -> &'a [Arc<str>] {
        match (self, endpoint.placement.hints.as_deref()) {
            (Self::SameNode, Some(hints)) => &hints.nodes,
            (Self::SameZone, Some(hints)) => &hints.zones,
            _ => &[],
        }
    }
}
