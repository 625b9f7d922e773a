//! Limits on the number of connections, in all and for each client.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use crate::identity::Identity;

/// The maximum number of connections of all clients together. Further connections are closed
/// immediately.
const MAX_CONNECTIONS: usize = 65_536;

/// The maximum number of connections of one node. A node needs a connection for its agent, and a
/// second connection while the agent reconnects. The other connections are for people who use
/// `headgatectl` on the node.
const MAX_CONNECTIONS_PER_NODE: usize = 16;

/// The maximum number of connections of one reader, or of several clients with the same reader
/// name.
const MAX_CONNECTIONS_PER_READER: usize = 256;

/// Some certificates name neither a node nor a reader. All clients with such certificates together
/// may have this many connections. If `--tls-client-ca` names the cluster's own authority, other
/// programs of the cluster have such certificates.
const MAX_CONNECTIONS_OF_NOBODY: usize = 64;

/// The open connections.
#[derive(Debug, Default)]
pub(crate) struct Connections(Mutex<Counts>);

#[derive(Debug, Default)]
struct Counts {
    all: usize,
    by_holder: HashMap<Holder, usize>,
}

/// The client under whose name a connection is counted.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Holder {
    Node(Arc<str>),
    Reader(Arc<str>),
    Nobody,
}

impl Holder {
    /// Returns the holder of a client's connections; `None` without TLS, where clients have no
    /// identity.
    fn of(identity: &Identity) -> Option<Self> {
        match identity {
            Identity::Node(name) => Some(Self::Node(Arc::clone(name))),
            // Replicas are few, and each opens one connection.
            Identity::Reader(name) | Identity::Replica(name) => Some(Self::Reader(Arc::clone(name))),
            Identity::Unusable(_) => Some(Self::Nobody),
            Identity::Unchecked => None,
        }
    }

    /// Returns the maximum number of connections of the holder, and the label of this limit.
    fn limit(&self) -> (usize, &'static str) {
        match self {
            Self::Node(_) => (MAX_CONNECTIONS_PER_NODE, "too_many_connections_of_node"),
            Self::Reader(_) => (MAX_CONNECTIONS_PER_READER, "too_many_connections_of_reader"),
            Self::Nobody => (MAX_CONNECTIONS_OF_NOBODY, "too_many_connections_of_nobody"),
        }
    }
}

/// One counted connection. When this value is dropped, the connection no longer counts.
#[derive(Debug)]
pub(crate) struct Held {
    connections: Arc<Connections>,
    holder: Option<Holder>,
}

impl Connections {
    /// Counts a connection.
    ///
    /// # Errors
    ///
    /// The label of the limit that the connection would exceed.
    pub(crate) fn hold(self: &Arc<Self>, identity: &Identity) -> Result<Held, &'static str> {
        let mut counts = self.counts();
        if counts.all >= MAX_CONNECTIONS {
            return Err("too_many_connections");
        }
        let holder = Holder::of(identity);
        if let Some(holder) = &holder {
            let (most, reason) = holder.limit();
            let count = counts.by_holder.entry(holder.clone()).or_default();
            if *count >= most {
                return Err(reason);
            }
            *count += 1;
        }
        counts.all += 1;
        drop(counts);
        Ok(Held { connections: Arc::clone(self), holder })
    }

    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut counts = self.connections.counts();
        counts.all -= 1;
        if let Some(holder) = &self.holder
            && let Some(count) = counts.by_holder.get_mut(holder)
        {
            *count -= 1;
            if *count == 0 {
                counts.by_holder.remove(holder);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn connections_of_one_holder_are_bounded_and_count_until_they_end() {
        let connections = Arc::new(Connections::default());
        let (node, reader) = (|name: &str| Identity::Node(name.into()), |name: &str| Identity::Reader(name.into()));
        let nobody = |problem: &str| Identity::Unusable(problem.into());
        let cases = [
            (node("same"), node("same"), MAX_CONNECTIONS_PER_NODE, "too_many_connections_of_node"),
            (reader("same"), reader("same"), MAX_CONNECTIONS_PER_READER, "too_many_connections_of_reader"),
            (nobody("this"), nobody("that"), MAX_CONNECTIONS_OF_NOBODY, "too_many_connections_of_nobody"),
        ];
        let mut held = Vec::new();
        for (identity, next, most, reason) in cases {
            held.extend((0..most).map(|_| connections.hold(&identity).unwrap()));
            assert_eq!(connections.hold(&next).unwrap_err(), reason);
        }
        held.extend(
            [node("other"), reader("other"), Identity::Unchecked].map(|other| connections.hold(&other).unwrap()),
        );
        assert_eq!(connections.counts().all, held.len());
        drop(held);
        let counts = connections.counts();
        assert_eq!((counts.all, counts.by_holder.len()), (0, 0));
    }

    #[test]
    fn connections_of_all_holders_together_are_bounded() {
        let connections = Arc::new(Connections::default());
        connections.counts().all = MAX_CONNECTIONS;
        assert_eq!(connections.hold(&Identity::Unchecked).unwrap_err(), "too_many_connections");
    }
}
