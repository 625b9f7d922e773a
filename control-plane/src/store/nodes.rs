//! Nodes: each stream follows its own.

use std::{collections::HashMap, sync::Arc};

use headgate_core::Node;
use tokio::sync::watch;

use crate::transaction::NodeChange;

/// Nodes by name, and who follows them.
#[derive(Debug, Default)]
pub(super) struct Nodes {
    by_name: HashMap<Arc<str>, Arc<Node>>,
    followers: HashMap<Arc<str>, watch::Sender<Option<Arc<Node>>>>,
}

impl Nodes {
    pub(super) fn len(&self) -> usize {
        self.by_name.len()
    }

    /// Takes in a change and tells the node's follower, if it has one and something differs.
    pub(super) fn apply(&mut self, change: NodeChange) {
        let (name, node) = match change {
            NodeChange::Apply(node) => (Arc::clone(&node.name), Some(Arc::new(node))),
            NodeChange::Remove(name) => (name, None),
        };
        if self.by_name.get(&name) == node.as_ref() {
            return;
        }
        if let Some(follower) = self.followers.get(&name) {
            follower.send_replace(node.clone());
        }
        match node {
            Some(node) => self.by_name.insert(name, node),
            None => self.by_name.remove(&name),
        };
    }

    /// Follows a node, known or not. A follower that is dropped costs one entry until the next change of the number of followers.
    pub(super) fn follow(&mut self, name: &str) -> watch::Receiver<Option<Arc<Node>>> {
        if let Some(follower) = self.followers.get(name) {
            return follower.subscribe();
        }
        // A sweep each time the table is about to grow: amortised constant cost, and names that are gone do not pile up.
        if self.followers.len() == self.followers.capacity() {
            self.followers.retain(|_, follower| follower.receiver_count() > 0);
        }
        let (sender, receiver) = watch::channel(self.by_name.get(name).cloned());
        self.followers.insert(name.into(), sender);
        receiver
    }

    #[cfg(test)]
    pub(super) fn followers(&self) -> usize {
        self.followers.len()
    }
}
