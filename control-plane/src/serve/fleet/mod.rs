//! The agents that follow this replica, and what they have programmed.

mod agent;
mod ask;
pub(crate) mod balance;
mod progress;
mod roster;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use headgate_core::turns::Turns;
use headgate_proto::v1;
use tokio::sync::{Semaphore, watch};
use tonic::Status;

pub use self::roster::Departed;
pub(crate) use self::{
    agent::{Agent, End, Lateness, MAX_OPEN},
    ask::Asked,
    progress::{LocalChange, LocalOutcome, Progress, Record, Rejections, clip},
    roster::Roster,
};
use super::context::Context;
use crate::{model::Problem, objects::PodId, store::NodeObserver};

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

/// The number of requests for the drain barrier without a pause: as many as may wait.
const QUESTIONS_AT_ONCE: u32 = 1_024;

/// The time after which a node may send one more request for the drain barrier.
const QUESTION_INTERVAL: Duration = Duration::from_millis(4);

/// The shortest time between questions about one pod, which agents keep as well.
const POD_INTERVAL: Duration = Duration::from_secs(1);

/// All agents with a stream, at most one for each node.
pub(crate) struct Fleet {
    pub(crate) context: Arc<Context>,
    progress: Arc<Progress>,
    registry: Mutex<Registry>,
    turns: Mutex<FleetTurns>,
    /// The number of the roster.
    roster: watch::Sender<u64>,
    /// Limits the unanswered queries about nodes.
    queries: Arc<Semaphore>,
}

#[derive(Debug, Default)]
struct Registry {
    present: BTreeMap<Arc<str>, Arc<Agent>>,
    roster: Roster,
}

/// The parts of the patience with a node, and in how many one returns (discovery.proto, 16).
const PATIENCE: u32 = 20;
const RECOVERY: u32 = 15;

/// How often nodes, and pods through their agents, may do something, on whatever stream.
pub(crate) struct FleetTurns {
    pub(crate) streams: Turns<Arc<str>>,
    /// Requests for the drain barrier.
    pub(crate) questions: Turns<Arc<str>>,
    pub(crate) pods: Turns<PodId>,
    /// Parts of patience, of which questions at the same time spend one together.
    spent: Turns<Arc<str>>,
    patience: Turns<Arc<str>>,
}

impl FleetTurns {
    fn new(patience_part: Duration) -> Self {
        Self {
            streams: Turns::new(STREAM_INTERVAL, STREAMS_AT_ONCE),
            questions: Turns::new(QUESTION_INTERVAL, QUESTIONS_AT_ONCE),
            pods: Turns::new(POD_INTERVAL, 1),
            spent: Turns::new(patience_part, 1),
            patience: Turns::new(patience_part * RECOVERY, PATIENCE),
        }
    }

    /// Counts that a question has waited for a node, or fails: nothing is left until then.
    pub(crate) fn spend_patience(&mut self, node: &Arc<str>, now: Instant) -> Result<(), Instant> {
        match self.spent.take(Arc::clone(node), now) {
            Ok(()) => self.patience.take(Arc::clone(node), now),
            Err(_) => self.check_patience(node, now),
        }
    }

    /// Returns whether something is left of the patience with a node.
    pub(crate) fn check_patience(&self, node: &Arc<str>, now: Instant) -> Result<(), Instant> {
        self.patience.check(node, now)
    }
}

impl Fleet {
    /// Returns a fleet without agents. The store notifies the fleet when a Node changes.
    pub(crate) fn new(context: Arc<Context>) -> Arc<Self> {
        let progress = Progress::new(Arc::clone(&context.store), Arc::clone(&context.metrics));
        let queries = Arc::new(Semaphore::new(ask::MAX_ON_REPLICA));
        let (progress, registry, roster) = (Arc::new(progress), Mutex::default(), watch::Sender::new(0));
        let turns = Mutex::new(FleetTurns::new(context.settings.patience_part));
        let fleet = Arc::new(Self { progress, registry, turns, roster, queries, context });
        let observer: Arc<dyn NodeObserver> = Arc::<Self>::clone(&fleet);
        fleet.context.store.observe_nodes(Arc::downgrade(&observer));
        fleet
    }

    pub(crate) fn progress(&self) -> &Progress {
        &self.progress
    }

    fn registry(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn turns(&self) -> MutexGuard<'_, FleetTurns> {
        self.turns.lock().unwrap_or_else(PoisonError::into_inner)
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
        let left = self.turns().check_patience(&agent.node, Instant::now());
        agent.record().stalled_until = left.err();
        agent.enter(&self.progress);
        if let Some(old) = old {
            let text = format!("node {} has opened a newer stream", agent.node);
            old.end(End::plain("replaced", Status::aborted(text)));
        }
    }

    /// Removes a stream, and not a newer stream of the node.
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

    /// Forgets departed nodes without a Node, after `Settings::uncovered_after`.
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

    /// Calls `look` with the roster, under a lock.
    pub(crate) fn with_roster<T>(&self, look: impl FnOnce(&Roster) -> T) -> T {
        look(&self.registry().roster)
    }

    /// Returns all streams, with the number of the roster that has exactly these.
    pub(crate) fn census(&self) -> (u64, Vec<Arc<Agent>>) {
        let registry = self.registry();
        (registry.roster.number(), registry.present.values().cloned().collect())
    }

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
            agent.record().revision += 1;
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
    fn a_node_delays_questions_for_a_limited_time_whatever_it_does() {
        let (part, start) = (Duration::from_secs(3), Instant::now());
        let (mut turns, node) = (FleetTurns::new(part), Arc::from("n1"));
        // Many questions wait at the same time.
        let mut spend = |now| (0..100).map(|_| turns.spend_patience(&node, now)).all(|left| left.is_ok());
        let parts = (0..100).take_while(|index| spend(start + part * *index)).count();
        assert!((PATIENCE as usize..=PATIENCE as usize + 2).contains(&parts), "{parts}");
        assert!(turns.check_patience(&"n2".into(), start).is_ok());
        let day = 86_400 / 3;
        let spent = (0..day).filter(|index| turns.spend_patience(&node, start + part * (100 + index)).is_ok()).count();
        assert!(spent < (day / RECOVERY + 2 * PATIENCE) as usize, "{spent} parts of {day}");
    }

    #[test]
    fn a_node_may_open_some_streams_at_once_and_then_a_few_per_second() {
        let metrics = Arc::new(Metrics::default());
        let store = Arc::new(Store::new(Limits::default(), Arc::clone(&metrics)));
        let fleet = Fleet::new(Context::new(store, metrics, Settings::default()));
        let start = Instant::now();
        let opened = (0..1_000).filter(|_| fleet.turns().streams.take("n1".into(), start).is_ok()).count();
        assert_eq!(opened, STREAMS_AT_ONCE as usize);
        assert!(fleet.turns().streams.take("n2".into(), start).is_ok(), "each node has its own allowance");
        let later = start + STREAM_INTERVAL * 3;
        assert_eq!((0..10).filter(|_| fleet.turns().streams.take("n1".into(), later).is_ok()).count(), 3);
        assert_eq!(
            (0..1_000)
                .filter(|_| fleet.turns().streams.take("n1".into(), later + STREAM_INTERVAL * 1_000).is_ok())
                .count(),
            opened
        );
    }
}
