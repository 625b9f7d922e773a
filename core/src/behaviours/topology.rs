//! Topology: which ready endpoints this node prefers (KEP-2433 hints by zone, KEP-3015 hints by
//! node).
//!
//! Hints belong to an address and port. The mode is decided from the ready endpoints alone. One
//! ready endpoint without a hint switches its level off, and so does a level on which no endpoint
//! names this node: hints are advice for spreading, never a reason to have nowhere to go.

use crate::{model::PortState, node_facts::NodeFacts};

/// Which ready endpoints are admitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TopologyMode {
    /// Those hinted for this node.
    SameNode,
    /// Those hinted for this node's zone.
    SameZone,
    /// All.
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

    /// True when the mode admits a ready endpoint.
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
