//! Nodes: each stream is told of its own.

use std::{
    collections::HashMap,
    sync::{Arc, Weak},
};

use headgate_core::Node;

use crate::transaction::{NodeChange, SourceKind};

/// Who wants to know which nodes change.
pub trait NodeObserver: Send + Sync {
    /// The node of this name is another than it was, or is gone. Called after the commit, by the
    /// task that commits: it must be quick.
    fn node_changed(&self, name: &str);
}

/// What the source says of a Node.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct OwnNode {
    /// `None` when the source has no Node of this name.
    pub node: Option<Arc<Node>>,
    /// Where the source was when this Node changed last; without one, when any Node changed last.
    pub position: Option<(SourceKind, u64)>,
}

#[derive(Debug)]
struct Known {
    node: Arc<Node>,
    position: Option<(SourceKind, u64)>,
}

/// Nodes by name, and who is told of changes.
#[derive(Default)]
pub(super) struct Nodes {
    by_name: HashMap<Arc<str>, Known>,
    /// Where the source was when any of them changed last.
    position: Option<(SourceKind, u64)>,
    observers: Vec<Weak<dyn NodeObserver>>,
}

impl Nodes {
    pub(super) fn len(&self) -> usize {
        self.by_name.len()
    }

    pub(super) fn get(&self, name: &str) -> OwnNode {
        match self.by_name.get(name) {
            Some(known) => OwnNode { node: Some(Arc::clone(&known.node)), position: known.position },
            None => OwnNode { node: None, position: self.position },
        }
    }

    /// Takes in a change that the source had at `position`. Returns the node's name if something
    /// differs.
    pub(super) fn apply(&mut self, change: NodeChange, position: Option<(SourceKind, u64)>) -> Option<Arc<str>> {
        let (name, node) = match change {
            NodeChange::Apply(node) => (Arc::clone(&node.name), Some(Arc::new(node))),
            NodeChange::Remove(name) => (name, None),
        };
        if self.by_name.get(&name).map(|known| &known.node) == node.as_ref() {
            return None;
        }
        self.position = position;
        match node {
            Some(node) => self.by_name.insert(Arc::clone(&name), Known { node, position }),
            None => self.by_name.remove(&name),
        };
        Some(name)
    }

    /// Tells an observer of changes from now on, for as long as it lives.
    pub(super) fn observe(&mut self, observer: Weak<dyn NodeObserver>) {
        self.observers.retain(|observer| observer.strong_count() > 0);
        self.observers.push(observer);
    }

    /// Those to tell.
    pub(super) fn observers(&self) -> Vec<Arc<dyn NodeObserver>> {
        self.observers.iter().filter_map(Weak::upgrade).collect()
    }
}

impl std::fmt::Debug for Nodes {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Nodes").field("by_name", &self.by_name).finish_non_exhaustive()
    }
}
