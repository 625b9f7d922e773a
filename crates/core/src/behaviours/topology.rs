//! Topology: which ready endpoints this node prefers (KEP-2433 hints by zone, KEP-3015 hints by
//! node).
//!
//! A ready endpoint (here, one address and port) may have hints by node, hints by zone, or both.
//! Only ready endpoints decide which kind of hint applies. A kind applies only if every ready
//! endpoint has a hint of that kind and at least one of these hints names this node or its zone. If
//! both kinds apply, the node uses the hints by node. If neither kind applies, the node uses all
//! ready endpoints. Hints therefore never leave a node without endpoints.

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
    pub fn decide<'a>(ready: impl Iterator<Item = PortState<'a>>, node: &NodeFacts) -> Self {
        let zone = node.zone.as_deref().filter(|zone| !zone.is_empty());
        let (mut any, mut all_node, mut some_node, mut all_zone, mut some_zone) = (false, true, false, true, false);
        for endpoint in ready {
            any = true;
            let (nodes, zones) =
                endpoint.placement.hints.as_deref().map_or((&[][..], &[][..]), |h| (&h.nodes[..], &h.zones[..]));
            all_node &= !nodes.is_empty();
            some_node |= nodes.iter().any(|hint| **hint == *node.name);
            all_zone &= !zones.is_empty();
            some_zone |= zone.is_some_and(|zone| zones.iter().any(|hint| **hint == *zone));
        }
        if any && all_node && some_node {
            Self::SameNode
        } else if any && all_zone && some_zone {
            Self::SameZone
        } else {
            Self::Any
        }
    }

    /// True if this node uses the ready endpoint in this mode.
    #[must_use]
    pub fn admits(self, endpoint: &PortState<'_>, node: &NodeFacts) -> bool {
        let hints = endpoint.placement.hints.as_deref();
        match self {
            Self::Any => true,
            Self::SameNode => hints.is_some_and(|hints| hints.nodes.iter().any(|hint| **hint == *node.name)),
            Self::SameZone => {
                let zone = node.zone.as_deref().unwrap_or_default();
                hints.is_some_and(|hints| hints.zones.iter().any(|hint| **hint == *zone))
            }
        }
    }
}
