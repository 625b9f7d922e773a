//! Limits on the number of connections, in all and for each client. The connections of a client
//! share its read budget.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use tokio::time::Instant;

use crate::{
    identity::Identity,
    serve::context::{Budget, Counted, Tally},
};

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

/// When the budgets of this many clients are remembered, unused ones are forgotten. This is
/// repeated when there are twice as many as are left, so that a new client need not pay for all
/// others.
const MAX_BUDGETS: usize = 4_096;

/// The open connections, by the clients under whose names they count. Without TLS, clients have no
/// identity.
#[derive(Debug, Default)]
pub(crate) struct Connections {
    open: Arc<Tally<Option<Client>>>,
    /// A client that connects again goes on with what is left of its budget. The number is how many
    /// were left when unused ones were forgotten.
    budgets: Mutex<(HashMap<Client, Budget>, usize)>,
}

/// One open connection.
#[derive(Debug)]
pub(crate) struct HeldConnection {
    _counted: Counted<Option<Client>>,
    /// How fast the connection may be read.
    pub(crate) budget: Budget,
}

impl Connections {
    fn budget(&self, client: Option<Client>, now: Instant) -> Budget {
        let new = || Budget::new(now);
        let Some(client) = client else { return new() };
        let (budgets, left) = &mut *self.budgets.lock().unwrap_or_else(PoisonError::into_inner);
        if budgets.len() >= MAX_BUDGETS.max(2 * *left) && !budgets.contains_key(&client) {
            budgets.retain(|_, budget| !budget.is_unused(now));
            *left = budgets.len();
        }
        budgets.entry(client).or_insert_with(new).clone()
    }
}

/// The client under whose name a connection is counted.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Client {
    Node(Arc<str>),
    Reader(Arc<str>),
    Nobody,
}

impl Client {
    fn of(identity: &Identity) -> Option<Self> {
        match identity {
            Identity::Node(name) => Some(Self::Node(Arc::clone(name))),
            // Replicas are few, and each opens one connection.
            Identity::Reader(name) | Identity::Replica(name) => Some(Self::Reader(Arc::clone(name))),
            Identity::Unusable(_) => Some(Self::Nobody),
            Identity::Unchecked => None,
        }
    }

    /// Returns the maximum number of connections of the client, and the label of this limit.
    fn limit(&self) -> (usize, &'static str) {
        match self {
            Self::Node(_) => (MAX_CONNECTIONS_PER_NODE, "too_many_connections_of_node"),
            Self::Reader(_) => (MAX_CONNECTIONS_PER_READER, "too_many_connections_of_reader"),
            Self::Nobody => (MAX_CONNECTIONS_OF_NOBODY, "too_many_connections_of_nobody"),
        }
    }
}

/// Counts a connection.
///
/// # Errors
///
/// The label of the limit that the connection would exceed.
pub(crate) fn hold(connections: &Connections, identity: &Identity) -> Result<HeldConnection, &'static str> {
    let client = Client::of(identity);
    let limit = client.as_ref().map(Client::limit);
    let counted = connections.open.add(client.clone(), |all, own| match limit {
        _ if all >= MAX_CONNECTIONS => Err("too_many_connections"),
        Some((most, reason)) if own >= most => Err(reason),
        _ => Ok(()),
    })?;
    Ok(HeldConnection { _counted: counted, budget: connections.budget(client, Instant::now()) })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::time::Duration;

    use super::*;

    #[test]
    fn connections_of_one_holder_are_bounded_and_count_until_they_end() {
        let connections = Connections::default();
        let (node, reader) = (|name: &str| Identity::Node(name.into()), |name: &str| Identity::Reader(name.into()));
        let nobody = |problem: &str| Identity::Unusable(problem.into());
        let cases = [
            (node("same"), node("same"), MAX_CONNECTIONS_PER_NODE, "too_many_connections_of_node"),
            (reader("same"), reader("same"), MAX_CONNECTIONS_PER_READER, "too_many_connections_of_reader"),
            (nobody("this"), nobody("that"), MAX_CONNECTIONS_OF_NOBODY, "too_many_connections_of_nobody"),
        ];
        let mut held = Vec::new();
        for (identity, next, most, reason) in cases {
            held.extend((0..most).map(|_| hold(&connections, &identity).unwrap()));
            assert_eq!(hold(&connections, &next).unwrap_err(), reason);
        }
        held.extend(
            [node("other"), reader("other"), Identity::Unchecked].map(|other| hold(&connections, &other).unwrap()),
        );
        assert_eq!(connections.open.count(&None), (held.len(), 1));
        drop(held);
        assert_eq!(connections.open.count(&Client::of(&node("same"))), (0, 0));
        let all: Vec<_> = (0..MAX_CONNECTIONS).map(|_| hold(&connections, &Identity::Unchecked).unwrap()).collect();
        assert_eq!(hold(&connections, &node("other")).unwrap_err(), "too_many_connections");
        drop(all);
    }

    #[test]
    fn a_client_that_connects_again_goes_on_with_its_budget() {
        // The budget of `a` is full again only long after the end of the test.
        let (connections, now) = (Connections::default(), Instant::now() + Duration::from_secs(3_600));
        let budget_of = |name: &str| hold(&connections, &Identity::Node(name.into())).unwrap().budget;
        budget_of("a").spend(usize::MAX, now);
        budget_of("a").spend(1, now);
        assert!(budget_of("a").pause(now).is_some());
        assert!(budget_of("b").pause(now).is_none());
        for other in 0..2 * MAX_BUDGETS {
            budget_of(&other.to_string());
        }
        assert!(budget_of("a").pause(now).is_some());
        assert!(connections.budgets.lock().unwrap().0.len() <= MAX_BUDGETS);
    }
}
