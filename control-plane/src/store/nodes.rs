//! Nodes. A stream receives only the Node of its agent.

use std::{
    collections::{BTreeSet, HashMap},
    net::IpAddr,
    sync::{Arc, Weak},
};

use headgate_core::Node;

use crate::transaction::{NodeChange, SourceKind};

/// Receives notifications of changed Nodes.
pub trait NodeObserver: Send + Sync {
    /// The Node of this name has changed or was removed. The committing task calls this method
    /// after the commit, so the method must return quickly.
    fn node_changed(&self, name: &str);

    /// What no Service gets has changed, for all agents. Must return quickly, too.
    fn reserved_changed(&self);
}

/// The Node of an agent.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct OwnNode {
    /// `None` when the source has no Node of this name.
    pub node: Option<Arc<Node>>,
    /// The position of the source when this Node last changed. If there is no Node of this name,
    /// the position of the source when any Node last changed.
    pub position: Option<(SourceKind, u64)>,
}

/// All Nodes by name, and the observers of their changes.
#[derive(Default)]
pub(super) struct Nodes {
    /// Each Node, and whether `--agent-nodes` selects it.
    by_name: HashMap<Arc<str>, (OwnNode, bool)>,
    /// The position of the source when any Node last changed.
    position: Option<(SourceKind, u64)>,
    observers: Vec<Weak<dyn NodeObserver>>,
}

impl Nodes {
    pub(super) fn len(&self) -> usize {
        self.by_name.len()
    }

    /// The names of all Nodes, and whether `--agent-nodes` selects them.
    pub(super) fn names(&self) -> impl Iterator<Item = (&Arc<str>, bool)> {
        self.by_name.iter().map(|(name, (_, is_selected))| (name, *is_selected))
    }

    pub(super) fn get(&self, name: &str) -> OwnNode {
        let known = self.by_name.get(name).map(|(known, _)| known.clone());
        known.unwrap_or(OwnNode { node: None, position: self.position })
    }

    /// The addresses of Nodes among these.
    pub(super) fn addresses_among(&self, wanted: &BTreeSet<IpAddr>) -> BTreeSet<IpAddr> {
        let nodes = self.by_name.values().filter_map(|(known, _)| known.node.as_deref());
        nodes.flat_map(|node| &node.addresses).filter(|address| wanted.contains(address)).copied().collect()
    }

    /// Applies a change that the source made at `position`. Returns the name of the Node if its
    /// value has changed.
    pub(super) fn apply(&mut self, change: NodeChange, position: Option<(SourceKind, u64)>) -> Option<Arc<str>> {
        let (name, node, is_selected) = match change {
            NodeChange::Apply(node) => (Arc::clone(&node.name), Some(Arc::new(node)), true),
            NodeChange::ApplyExcluded(node) => (Arc::clone(&node.name), Some(Arc::new(node)), false),
            NodeChange::Remove(name) => (name, None, false),
        };
        let known = self.by_name.get(&name).map(|(known, is_selected)| (&known.node, *is_selected));
        if known.unwrap_or((&None, false)) == (&node, is_selected) {
            return None;
        }
        self.position = position;
        match node {
            node @ Some(_) => self.by_name.insert(Arc::clone(&name), (OwnNode { node, position }, is_selected)),
            None => self.by_name.remove(&name),
        };
        Some(name)
    }

    /// Adds an observer, which is notified until the observer is dropped.
    pub(super) fn observe(&mut self, observer: Weak<dyn NodeObserver>) {
        self.observers.retain(|observer| observer.strong_count() > 0);
        self.observers.push(observer);
    }

    /// The observers that have not been dropped.
    pub(super) fn observers(&self) -> Vec<Arc<dyn NodeObserver>> {
        self.observers.iter().filter_map(Weak::upgrade).collect()
    }
}

impl std::fmt::Debug for Nodes {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Nodes").field("by_name", &self.by_name).finish_non_exhaustive()
    }
}
