//! Nodes. A stream receives only the Node of its agent.

use std::{
    collections::HashMap,
    sync::{Arc, Weak},
};

use headgate_core::Node;

use crate::transaction::{NodeChange, SourceKind};

/// Receives notifications of changed Nodes.
pub trait NodeObserver: Send + Sync {
    /// The Node of this name has changed or was removed. The committing task calls this method
    /// after the commit, so the method must return quickly.
    fn node_changed(&self, name: &str);
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

#[derive(Debug)]
struct KnownNode {
    node: Arc<Node>,
    /// False if `--agent-nodes` does not select the Node.
    is_selected: bool,
    position: Option<(SourceKind, u64)>,
}

/// All Nodes by name, and the observers of their changes.
#[derive(Default)]
pub(super) struct Nodes {
    by_name: HashMap<Arc<str>, KnownNode>,
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
        self.by_name.iter().map(|(name, known)| (name, known.is_selected))
    }

    pub(super) fn get(&self, name: &str) -> OwnNode {
        match self.by_name.get(name) {
            Some(known) => OwnNode { node: Some(Arc::clone(&known.node)), position: known.position },
            None => OwnNode { node: None, position: self.position },
        }
    }

    /// Applies a change that the source made at `position`. Returns the name of the Node if its
    /// value has changed.
    pub(super) fn apply(&mut self, change: NodeChange, position: Option<(SourceKind, u64)>) -> Option<Arc<str>> {
        let (name, node, is_selected) = match change {
            NodeChange::Apply(node) => (Arc::clone(&node.name), Some(Arc::new(node)), true),
            NodeChange::ApplyExcluded(node) => (Arc::clone(&node.name), Some(Arc::new(node)), false),
            NodeChange::Remove(name) => (name, None, false),
        };
        let known = self.by_name.get(&name);
        if known.map(|known| &known.node) == node.as_ref() && known.is_none_or(|known| known.is_selected == is_selected)
        {
            return None;
        }
        self.position = position;
        match node {
            Some(node) => self.by_name.insert(Arc::clone(&name), KnownNode { node, is_selected, position }),
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
