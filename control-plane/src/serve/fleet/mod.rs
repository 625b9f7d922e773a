//! The agents that follow this replica, and what they have programmed.

mod agent;
mod answers;
mod ask;
pub(crate) mod balance;
mod end;
mod lateness;
mod progress;
mod queries;
mod record;
mod rejections;
mod roster;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use headgate_proto::v1;
use tokio::sync::{Semaphore, watch};
use tonic::Status;

pub(crate) use self::{
    agent::Agent,
    answers::Answers,
    ask::Asked,
    end::End,
    lateness::Lateness,
    progress::Progress,
    queries::Queries,
    record::Record,
    rejections::{Rejections, clip},
    roster::Roster,
};
use super::context::Context;
use crate::{store::NodeObserver, transaction::Problem};
pub use roster::Departed;

/// When this many nodes are remembered, nodes that have their full allowance again are forgotten.
const MAX_REMEMBERED: usize = 65_536;

/// The maximum number of rejections that are problems of the fleet.
const MAX_REJECTED: usize = 1_000;

/// The origin of problems that agents report.
pub(crate) const OF_AGENTS: &str = "reported by agents";

/// The number of streams that a node may open without a pause: its full allowance. The limit exists
/// because a new stream can be expensive: the replica may have to compact many changes of its log
/// for the stream.
const STREAMS_AT_ONCE: u32 = 64;

/// The time after which a node may open one more stream.
const STREAM_INTERVAL: Duration = Duration::from_millis(250);

/// All agents with a stream, at most one for each node.
pub(crate) struct Fleet {
    pub(crate) context: Arc<Context>,
    progress: Arc<Progress>,
    registry: Mutex<Registry>,
    /// The number of the roster.
    roster: watch::Sender<u64>,
    /// Limits the unanswered queries about nodes.
    queries: Arc<Semaphore>,
}

#[derive(Debug, Default)]
struct Registry {
    present: BTreeMap<Arc<str>, Arc<Agent>>,
    /// For each node, the time at which the node has its full allowance of [`STREAMS_AT_ONCE`]
    /// again.
    full_at: HashMap<Arc<str>, Instant>,
    roster: Roster,
}

impl Fleet {
    /// Returns a fleet without agents. The store notifies the fleet when a Node changes.
    pub(crate) fn new(context: Arc<Context>) -> Arc<Self> {
        let progress = Progress::new(Arc::clone(&context.store), Arc::clone(&context.metrics));
        let queries = Arc::new(Semaphore::new(ask::MAX_ON_REPLICA));
        let (progress, registry, roster) = (Arc::new(progress), Mutex::default(), watch::Sender::new(0));
        let fleet = Arc::new(Self { progress, registry, roster, queries, context });
        let observer: Arc<dyn NodeObserver> = Arc::<Self>::clone(&fleet);
        fleet.context.store.observe_nodes(Arc::downgrade(&observer));
        fleet
    }

    /// Returns what all agents together have programmed.
    pub(crate) fn progress(&self) -> &Progress {
        &self.progress
    }

    fn registry(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns true if a node may open a stream at `now`, and counts the stream. Returns false if
    /// the node has opened too many streams lately.
    pub(crate) fn may_open(&self, node: &str, now: Instant) -> bool {
        let mut registry = self.registry();
        let full_at = registry.full_at.get(node).copied().unwrap_or(now).max(now) + STREAM_INTERVAL;
        if full_at > now + STREAM_INTERVAL * STREAMS_AT_ONCE {
            return false;
        }
        if registry.full_at.len() >= MAX_REMEMBERED {
            registry.full_at.retain(|_, full_at| *full_at > now);
        }
        registry.full_at.insert(node.into(), full_at);
        true
    }

    /// Adds a stream. If the node has an older stream, that stream ends.
    ///
    /// ACKs of an earlier stream do not count for the new stream, even if the new stream resumes by
    /// the log. The node may have rebooted between the two streams, so that its kernel holds no
    /// rules. After an agent has connected, it reports at once which version its kernel has
    /// (discovery.proto, section 7).
    pub(crate) fn enter(&self, agent: &Arc<Agent>) {
        let old = {
            let mut registry = self.registry();
            self.roster.send_replace(registry.roster.enter(&agent.node));
            registry.present.insert(Arc::clone(&agent.node), Arc::clone(agent))
        };
        if let Some(old) = &old {
            agent.replace(old);
            old.leave();
        }
        agent.enter(&self.progress);
        if let Some(old) = old {
            let text = format!("node {} has opened a newer stream", agent.node);
            old.end(End::plain("replaced", Status::aborted(text)));
        }
    }

    /// Removes a stream. If a newer stream of the node has replaced this stream, the newer stream
    /// stays.
    pub(crate) fn leave(&self, agent: &Arc<Agent>) {
        agent.leave();
        let mut registry = self.registry();
        if registry.present.get(&agent.node).is_some_and(|present| Arc::ptr_eq(present, agent)) {
            registry.present.remove(&agent.node);
            let version = agent.record().programmed_version;
            let departed = Departed { at: Instant::now(), version };
            self.roster.send_replace(registry.roster.depart(Arc::clone(&agent.node), departed));
        }
    }

    /// Remembers nodes that had a stream to another replica, which has none now.
    pub(crate) fn adopt(&self, nodes: impl IntoIterator<Item = (Arc<str>, Departed)>) {
        let mut registry = self.registry();
        for (node, departed) in nodes {
            if !registry.present.contains_key(&node) && registry.roster.is_news(&node, departed) {
                self.roster.send_replace(registry.roster.depart(node, departed));
            }
        }
    }

    /// Forgets the departed nodes that are no Nodes of the source and have had no stream for
    /// `Settings::uncovered_after`.
    pub(crate) fn forget_departed(&self) {
        if !self.context.store.is_synced() {
            return;
        }
        let nodes: BTreeSet<Arc<str>> = self.context.store.node_names().into_iter().map(|(node, _)| node).collect();
        let mut registry = self.registry();
        let is_kept = |node: &Arc<str>| nodes.contains(node);
        if let Some(number) = registry.roster.forget(self.context.settings.uncovered_after, is_kept) {
            self.roster.send_replace(number);
        }
    }

    /// Returns a receiver of the roster's number, which grows when a node enters or leaves.
    pub(crate) fn rosters(&self) -> watch::Receiver<u64> {
        self.roster.subscribe()
    }

    /// Returns what has changed in the roster since `number`; everything if `number` is 0.
    pub(crate) fn roster_since(&self, number: u64) -> v1::Roster {
        self.registry().roster.since(number)
    }

    /// Calls `look` with the roster, under a lock.
    pub(crate) fn with_roster<T>(&self, look: impl FnOnce(&Roster) -> T) -> T {
        look(&self.registry().roster)
    }

    /// Returns all streams, with the number of the roster that has exactly these.
    pub(crate) fn census(&self) -> (u64, Vec<Arc<Agent>>) {
        let registry = self.registry();
        (registry.roster.number(), registry.present.values().cloned().collect())
    }

    /// Returns true if a node has a stream.
    pub(crate) fn has(&self, node: &str) -> bool {
        self.registry().present.contains_key(node)
    }

    /// Returns the stream of a node.
    pub(crate) fn find(&self, node: &str) -> Option<Arc<Agent>> {
        self.registry().present.get(node).cloned()
    }

    /// Returns all streams in order of node name.
    pub(crate) fn all(&self) -> Vec<Arc<Agent>> {
        self.registry().present.values().cloned().collect()
    }

    pub(crate) fn len(&self) -> usize {
        self.registry().present.len()
    }

    /// What agents reject, each problem once: at most [`MAX_REJECTED`] problems.
    pub(crate) fn rejected(&self) -> BTreeSet<Problem> {
        let mut all = BTreeSet::new();
        for agent in self.all() {
            for v1::Rejection { resource, field, reason } in agent.record().rejections.shown() {
                if all.len() < MAX_REJECTED {
                    let [object, field, message] = [resource, field, reason].map(String::clone);
                    all.insert(Problem { object, field, message, origin: OF_AGENTS.to_owned() });
                }
            }
        }
        all
    }
}

impl NodeObserver for Fleet {
    fn node_changed(&self, name: &str) {
        if let Some(agent) = self.registry().present.get(name) {
            agent.signal.change_node();
        }
        self.progress.node_changed();
    }

    fn reserved_changed(&self) {
        self.registry().present.values().for_each(|agent| agent.signal.change_node());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        metrics::Metrics,
        serve::context::Settings,
        store::{Limits, Store},
    };

    #[test]
    fn a_node_may_open_some_streams_at_once_and_then_a_few_per_second() {
        let metrics = Arc::new(Metrics::default());
        let store = Arc::new(Store::new(Limits::default(), Arc::clone(&metrics)));
        let fleet = Fleet::new(Context::new(store, metrics, Settings::default()));
        let start = Instant::now();
        let opened = (0..1_000).filter(|_| fleet.may_open("n1", start)).count();
        assert_eq!(opened, STREAMS_AT_ONCE as usize);
        assert!(fleet.may_open("n2", start), "each node has its own allowance");
        let later = start + STREAM_INTERVAL * 3;
        assert_eq!((0..10).filter(|_| fleet.may_open("n1", later)).count(), 3);
        assert_eq!((0..1_000).filter(|_| fleet.may_open("n1", later + STREAM_INTERVAL * 1_000)).count(), opened);
    }
}
