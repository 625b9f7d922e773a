//! Limits on the number of connections, in all and for each client, and the read budgets of
//! clients.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

use crate::{
    identity::Identity,
    serve::context::{Counted, Tally},
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

// Limits how fast the server reads from a client. Bytes above the limit are read later; until then
// TCP flow control holds them back.
//
// A normal agent sends about a hundred bytes per second, and its `Hello` has about 20 KiB. Without
// a limit, an agent that sends valid messages as fast as it can would use up a core.

/// The number of bytes that may be read without a pause. A `Hello` and NACKs of very many resources
/// fit.
const BURST: u64 = 1 << 20;

/// The number of bytes that may be read per second on average.
const PER_SECOND: u64 = 256 << 10;

/// A read spends at least this number of bytes. A call to the kernel and a TLS record take time
/// even if the read returns few bytes.
const MIN_READ: u64 = 32;

/// The read budget of a client, which all its connections share. It holds the time at which the
/// budget is full again.
#[derive(Debug, Clone)]
pub(crate) struct Budget(Arc<Mutex<Instant>>);

impl Budget {
    /// Returns a full budget.
    pub(crate) fn new(now: Instant) -> Self {
        Self(Arc::new(Mutex::new(now)))
    }

    /// True if no connection uses the budget, and nothing of it is spent at `now`.
    pub(super) fn is_unused(&self, now: Instant) -> bool {
        Arc::strong_count(&self.0) == 1 && *self.full_at() <= now
    }

    fn full_at(&self) -> MutexGuard<'_, Instant> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Spends the bytes of one read.
    pub(crate) fn spend(&self, bytes: usize, now: Instant) {
        let bytes = u64::try_from(bytes).unwrap_or(u64::MAX).clamp(MIN_READ, BURST);
        let mut full_at = self.full_at();
        *full_at = now.max(*full_at) + time_for(bytes);
    }

    /// Returns how long a connection must not be read, or `None` if it may be read at `now`.
    pub(crate) fn pause(&self, now: Instant) -> Option<Duration> {
        let missing = self.full_at().saturating_duration_since(now);
        missing.checked_sub(time_for(BURST)).filter(|pause| !pause.is_zero())
    }
}

fn time_for(bytes: u64) -> Duration {
    Duration::from_micros(bytes * 1_000_000 / PER_SECOND)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
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
        let (connections, now) = (Connections::default(), Instant::now());
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

#[cfg(test)]
mod budget_tests {
    use super::*;

    #[test]
    fn a_burst_is_read_at_once_and_then_a_rate_applies() {
        let start = Instant::now();
        let budget = Budget::new(start);
        let mut reads = 0;
        while budget.pause(start).is_none() {
            budget.spend(16 << 10, start);
            reads += 1;
        }
        assert_eq!(reads, BURST / (16 << 10) + 1);
        assert_eq!(budget.pause(start), Some(Duration::from_micros(62_500)), "the pause is the time for 16 KiB");
        assert_eq!(budget.pause(start + Duration::from_micros(62_500)), None);
        // Small reads count as `MIN_READ` bytes.
        let later = start + Duration::from_secs(3_600);
        let small = (0..).take_while(|_| {
            budget.spend(1, later);
            budget.pause(later).is_none()
        });
        let (count, expected) = (small.count() as u64, BURST / MIN_READ);
        assert!(count.abs_diff(expected) < expected / 100, "{count}");
    }
}
