//! The store: the current state, a compacted log of its changes, and cursors into the log.
//!
//! [`headgate_core::State`] holds the values and their digests. The log holds each recently changed
//! key once, at the version of its last change. A cursor holds the version of a stream. The log
//! brings a cursor to the head, at a cost proportional to the number of changed keys. A cursor that
//! is too far behind receives in full the buckets that have changed since its version. A step
//! contains the current values of all keys that have changed since a version. Messages that streams
//! share are encoded once: the steps, and the resources of each bucket.
//!
//! The cost of a commit is proportional to its changes, and a commit never waits for a stream. A
//! watch channel announces each new version. A reader holds the lock only while it encodes one
//! bucket, or copies the values of one step.

mod encode;
mod gates;
mod inspect;
mod log;
mod pods;
mod reserved;
mod resume;
#[cfg(test)]
mod tests;
mod usage;
mod verify;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque, hash_map::Entry},
    hash::{BuildHasher as _, RandomState},
    net::IpAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use headgate_core::{
    Change, Dirty, Node, Placement, ServiceKey, State, digest::Digests, frontends::Frontend, node_state::SourceState,
    reference,
};
use headgate_proto::{References, v1};
use tokio::{
    sync::{Notify, watch},
    time::{sleep_until, timeout_at},
};

use crate::{
    metrics::{Metrics, kind_name, level},
    model::{NodeChange, Problem, Sink, Transaction, TriggeredChange},
    objects::{PodId, SourceKind},
};
use encode::{Buckets, DeltaCache, LogKey, SplitBudget};
use gates::WaitingPods;
use log::Log;
use pods::Pods;
use usage::Witnesses;

pub(crate) use encode::{positions_from_wire, positions_to_wire, server_frame};
pub(crate) use gates::WaitingPod;
pub use inspect::{WatchCursor, WatchPage};
pub use log::{Cursor, Resume, ResumeMode};
pub(crate) use pods::{NoPod, PodEndpoints, PodName};
pub use resume::{BehindWait, NotYet, Resumption, Wait};
pub use usage::{Last, Usage};

/// After a pod begins to wait for its gate, agents acknowledge at once for this time.
const GATE_HURRY: Duration = Duration::from_secs(5);

/// The source is asked again for the same position after this time.
const WANT_INTERVAL: Duration = Duration::from_secs(5);

/// Bounds of the memory that the store uses in addition to the state.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Maximum number of removals in the log. A cursor that needs a removal which the log no longer
    /// holds receives whole buckets. The log holds at most `max_tombstones` + `max_delta_changes`
    /// keys, because no step needs more keys.
    pub max_tombstones: usize,
    /// Maximum bytes of cached steps' messages. Small steps need three times as much memory.
    pub delta_cache_bytes: usize,
    /// Maximum number of changes in one step, beyond which a cursor receives buckets.
    pub max_delta_changes: usize,
    /// A message is complete when it has reached this size, in bytes. The last resource of a
    /// message may exceed this size, so the size is well below
    /// [`headgate_proto::MAX_SERVER_MESSAGE_BYTES`].
    pub part_bytes: usize,
    /// Maximum size, in bytes, of all encoded steps that consist of several messages. The limit
    /// includes cached steps and steps that streams are sending. A stream that needs a step for
    /// which there is no room receives whole buckets instead.
    pub split_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_tombstones: 65_536,
            delta_cache_bytes: 8 << 20,
            max_delta_changes: 32_768,
            part_bytes: 256 << 10,
            split_bytes: 64 << 20,
        }
    }
}

/// The state of this replica, with the log and the encoded messages that streams share.
#[derive(Debug)]
pub struct Store {
    epoch: u64,
    limits: Limits,
    inner: RwLock<Inner>,
    deltas: DeltaCache,
    split_budget: SplitBudget,
    freshness: Freshness,
    problems: Mutex<Arc<[Problem]>>,
    head: watch::Sender<u64>,
    moves: watch::Sender<u64>,
    gates_changed: watch::Sender<()>,
    wanted_positions: watch::Sender<BTreeMap<SourceKind, u64>>,
    /// When the source was asked last for a position of each kind.
    position_asked: Mutex<BTreeMap<SourceKind, (Instant, u64)>>,
    /// While this time lies ahead, new batches ask for ACKs at once (discovery.proto, section 18).
    hurry_until: Mutex<Option<Instant>>,
    // The value of `head`, which thousands of streams read without a lock.
    head_version: AtomicU64,
    listed_version: AtomicU64,
    interests: Arc<Interests>,
    metrics: Arc<Metrics>,
}

#[derive(Debug, Default)]
struct Inner {
    state: State,
    log: Log,
    /// For each placement in the state: how many endpoints have it, and the version at which the
    /// first of them got it. A message may refer to a placement (discovery.proto, section 13) only
    /// if its receiver holds it.
    placements: HashMap<Arc<Placement>, (u32, u64)>,
    buckets: Buckets,
    nodes: Nodes,
    pods: Pods,
    gates: WaitingPods,
    witnesses: Witnesses,
    /// What no Service gets.
    reserved: BTreeSet<Frontend>,
    version: u64,
    /// The position of each kind, with bookmarks, to compare with agents' positions.
    positions: BTreeMap<SourceKind, u64>,
    /// The position of each kind at its last change, which agents receive.
    changed_positions: BTreeMap<SourceKind, u64>,
    /// The version at which the position of each kind moved last; the next version if it moved
    /// after the newest version. A step contains only the positions that moved after its start.
    moved_at: BTreeMap<SourceKind, u64>,
    /// How each of the newest versions came to be. The last element belongs to the head, the
    /// element before it to the previous version, and so on.
    commits: VecDeque<Commit>,
}

impl Store {
    /// Creates an empty store with a new epoch.
    #[must_use]
    pub fn new(limits: Limits, metrics: Arc<Metrics>) -> Self {
        metrics.set_source_state(SourceState::Unlisted);
        Self {
            epoch: fastrand::u64(1..),
            inner: RwLock::default(),
            deltas: DeltaCache::new(limits.delta_cache_bytes),
            split_budget: SplitBudget::new(limits.split_bytes),
            limits,
            freshness: Freshness::default(),
            problems: Mutex::default(),
            head: watch::Sender::default(),
            moves: watch::Sender::default(),
            gates_changed: watch::Sender::default(),
            wanted_positions: watch::Sender::default(),
            position_asked: Mutex::default(),
            hurry_until: Mutex::default(),
            head_version: AtomicU64::new(0),
            listed_version: AtomicU64::new(0),
            interests: Arc::default(),
            metrics,
        }
    }

    /// The epoch of this replica: random, never 0.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The newest version.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.head_version.load(Ordering::Acquire)
    }

    /// A receiver that wakes at each new version.
    #[must_use]
    pub fn head(&self) -> watch::Receiver<u64> {
        self.head.subscribe()
    }

    /// A receiver that wakes when a position of the source moves, with or without a new version.
    #[must_use]
    pub fn moves(&self) -> watch::Receiver<u64> {
        self.moves.subscribe()
    }

    /// Asks the source to check `position`, which an agent has seen at another replica.
    pub(crate) fn want_position(&self, kind: SourceKind, position: u64) {
        let mut asked = self.position_asked.lock().unwrap_or_else(PoisonError::into_inner);
        let is_asked = asked.get(&kind).is_some_and(|(at, of)| at.elapsed() < WANT_INTERVAL && *of >= position);
        if !is_asked {
            asked.insert(kind, (Instant::now(), position));
            self.wanted_positions.send_modify(|wanted| {
                wanted.insert(kind, position);
            });
        }
    }

    /// The Node of this name in the source.
    #[must_use]
    pub fn node(&self, name: &str) -> OwnNode {
        self.read().nodes.get(name)
    }

    /// The zone and the pool of the Node of this name.
    pub(crate) fn place_of(&self, name: &str) -> (String, String) {
        let inner = self.read();
        let zone = inner.nodes.by_name.get(name).and_then(|(known, _)| known.node.as_ref()?.zone.clone());
        let pool = inner.nodes.pools.get(name).cloned();
        [zone, pool].map(|text| text.as_deref().unwrap_or_default().to_owned()).into()
    }

    /// Returns true if a Node in the source has this address.
    pub(crate) fn is_node_address(&self, address: IpAddr) -> bool {
        self.read().nodes.have(address)
    }

    /// Notifies an observer of Nodes that change from now on, until the observer is dropped.
    pub fn observe_nodes(&self, observer: Weak<dyn NodeObserver>) {
        self.write().nodes.observe(observer);
    }

    /// The first kind for which `seen` is ahead of this replica, as (kind, position here, position
    /// in `seen`). Kinds that the source of this replica does not have are ignored.
    #[must_use]
    pub fn behind(&self, seen: &BTreeMap<SourceKind, u64>) -> Option<(SourceKind, u64, u64)> {
        self.behind_in(seen, |_| true)
    }

    /// Like [`Self::behind`], for the kinds that `counts` selects.
    fn behind_in(
        &self,
        seen: &BTreeMap<SourceKind, u64>,
        counts: impl Fn(SourceKind) -> bool,
    ) -> Option<(SourceKind, u64, u64)> {
        let inner = self.read();
        let compare = |(kind, there): (&SourceKind, &u64)| {
            let here = *inner.positions.get(kind)?;
            (here < *there).then_some((*kind, here, *there))
        };
        seen.iter().filter(|(kind, _)| counts(**kind)).find_map(compare)
    }

    /// The present problems, sorted.
    #[must_use]
    pub fn present_problems(&self) -> Arc<[Problem]> {
        Arc::clone(&self.problems.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The time at which the change after `version` arrived from the source. An agent at `version`
    /// has lagged since this time. `None` if `version` is the head. If the time of an old version
    /// is no longer stored, the result is the oldest stored time.
    #[must_use]
    pub fn lagging_since(&self, version: u64) -> Option<Instant> {
        let inner = self.read();
        let behind = usize::try_from(inner.version.checked_sub(version)?).unwrap_or(usize::MAX);
        let index = inner.commits.len().saturating_sub(behind);
        inner.commits.get(index).map(|commit| commit.received).filter(|_| behind > 0)
    }

    /// The newest version at least `age` old. Times that are not stored count as older.
    #[must_use]
    pub fn version_before(&self, age: Duration) -> u64 {
        let inner = self.read();
        let Some(moment) = Instant::now().checked_sub(age) else { return inner.version };
        let younger = inner.commits.len() - inner.commits.partition_point(|commit| commit.received <= moment);
        inner.version - younger as u64
    }

    /// The position of each kind, with bookmarks: an agent with a higher one is ahead.
    #[must_use]
    pub fn positions(&self) -> BTreeMap<SourceKind, u64> {
        self.read().positions.clone()
    }

    /// The position of each kind's last change: an agent with a lower one has missed it.
    #[must_use]
    pub fn changed_positions(&self) -> BTreeMap<SourceKind, u64> {
        self.read().changed_positions.clone()
    }

    /// The digests of the present state.
    #[must_use]
    pub fn digests(&self) -> Digests {
        self.read().state.digests().clone()
    }

    /// Asks for the ACKs of the batches of the next time at once (discovery.proto, section 18).
    pub(crate) fn hurry(&self, time: Duration) {
        let mut until = self.hurry_until.lock().unwrap_or_else(PoisonError::into_inner);
        *until = (*until).max(Instant::now().checked_add(time));
    }

    pub(super) fn is_in_hurry(&self) -> bool {
        self.hurry_until.lock().unwrap_or_else(PoisonError::into_inner).is_some_and(|until| until > Instant::now())
    }

    /// The names of all Nodes, and whether `--agent-nodes` selects them.
    pub(crate) fn node_names(&self) -> Vec<(Arc<str>, bool)> {
        self.read().nodes.names().map(|(name, is_selected)| (Arc::clone(name), is_selected)).collect()
    }

    /// The version at which every kind had been listed; 0 before.
    pub(crate) fn listed_version(&self) -> u64 {
        self.listed_version.load(Ordering::Acquire)
    }

    // The store continues to serve after a thread has panicked while holding the lock. After such a
    // panic, state and log may disagree about one key until its next change. A control plane that
    // stops serving would be worse.
    fn read(&self) -> RwLockReadGuard<'_, Inner> {
        self.inner.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Inner> {
        self.inner.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    /// Records positions of the source at changes.
    fn move_positions(&mut self, positions: &[(SourceKind, u64)]) {
        for (kind, position) in positions {
            if self.changed_positions.insert(*kind, *position) != Some(*position) {
                self.moved_at.insert(*kind, self.version + 1);
            }
        }
    }

    /// The positions that have moved after `version`, of kinds that agents receive.
    fn moved_positions(&self, version: u64) -> Vec<v1::SourcePosition> {
        let has_moved = |kind: &SourceKind| self.moved_at.get(kind).is_some_and(|at| *at > version);
        positions_to_wire(self.shared_positions().filter(|(kind, _)| has_moved(kind)))
    }

    /// Applies changes as the next version. Returns those with an effect; none makes no version.
    fn apply(&mut self, changes: Vec<TriggeredChange>, limits: &Limits) -> Applied {
        let version = self.version + 1;
        let mut scratch = Dirty::default();
        let (mut effective, mut applied) = (0_u32, Applied::default());
        for TriggeredChange { change, trigger_unix_ms } in changes {
            let key = self.log.intern(&change, &self.state);
            let is_removed =
                matches!(change, Change::RemoveService(_) | Change::RemoveEndpoint(..) | Change::RemoveServiceCidr(_));
            let before = self.placement(&key).cloned();
            if self.state.apply(change, &mut scratch) {
                self.update_placements(version, &key, before);
                self.buckets.record(version, &key, &self.state);
                applied.add(&key, trigger_unix_ms);
                self.log.record((version, effective), key, trigger_unix_ms, is_removed, limits);
                effective = effective.saturating_add(1);
            }
        }
        applied
    }

    /// The position at the last change, for each kind with resources that every agent receives.
    fn shared_positions(&self) -> impl Iterator<Item = (SourceKind, u64)> {
        let positions = self.changed_positions.iter().map(|(kind, position)| (*kind, *position));
        positions.filter(|(kind, _)| kind.has_shared_resources())
    }

    /// The position of the kind that includes Nodes.
    fn nodes_position(&self) -> Option<(SourceKind, u64)> {
        let mut positions = self.positions.iter().map(|(kind, position)| (*kind, *position));
        positions.find(|(kind, _)| kind.has_nodes())
    }

    fn placement(&self, key: &LogKey) -> Option<&Arc<Placement>> {
        let LogKey::Endpoint(key, address) = key else { return None };
        Some(&self.state.entry(key)?.endpoints().get(address)?.placement)
    }

    /// Records the placement of a changed endpoint, so that an equal one keeps its version.
    fn update_placements(&mut self, version: u64, key: &LogKey, before: Option<Arc<Placement>>) {
        if let Some(now) = self.placement(key).cloned() {
            self.placements.entry(now).or_insert((0, version)).0 += 1;
        }
        if let Some(Entry::Occupied(mut users)) = before.map(|before| self.placements.entry(before)) {
            users.get_mut().0 -= 1;
            if users.get().0 == 0 {
                users.remove();
            }
        }
    }

    fn has_service(&self, key: &ServiceKey) -> bool {
        self.state.entry(key).is_some_and(|entry| entry.service().is_some())
    }

    /// The references for a receiver at `version`, at or after the floor of the log.
    fn references(&self, version: u64, change: &Change) -> References {
        let (key, placement) = match change {
            Change::Endpoint(key, endpoint) => (key, Some(&endpoint.placement)),
            Change::RemoveEndpoint(key, _) => (key, None),
            _ => return References::default(),
        };
        let has_service = self.has_service(key) && self.log.service_version(key) <= version;
        let has_held = |placement| self.placements.get(placement).is_some_and(|(_, since)| *since <= version);
        let placement = placement.filter(|placement| has_held(*placement));
        References {
            service: has_service.then(|| reference::service(key)),
            placement: placement.map(|placement| reference::placement(placement)),
        }
    }
}

impl Sink for Store {
    fn commit(&self, transaction: Transaction) {
        let Transaction { changes, nodes, pools, pods, gates, positions, bookmarks, received } = transaction;
        let has_gates = !gates.is_empty();
        let is_gate = gates.iter().any(|change| change.waiting.is_some());
        if is_gate {
            self.hurry(GATE_HURRY);
        }
        let has_moved = !(positions.is_empty() && bookmarks.is_empty());
        let received = received.unwrap_or_else(Instant::now);
        let (effective, version, changed_nodes, observers, touched) = {
            let mut inner = self.write();
            inner.move_positions(&positions);
            let changed_nodes_at = positions.iter().copied().find(|(kind, _)| kind.has_nodes());
            inner.positions.extend(positions);
            inner.positions.extend(bookmarks);
            let nodes_position = changed_nodes_at.or_else(|| inner.nodes_position());
            // A waiter registers before it reads the store, so it is found here.
            let mut touched =
                self.interests.touched(changes.iter().filter_map(|triggered| Topic::of(&triggered.change)));
            let applied = inner.apply(changes, &self.limits);
            let effective = applied.changed;
            let of_pods = pods.into_iter().flat_map(|change| inner.apply_pod(change));
            touched.extend(self.interests.touched(of_pods.collect::<Vec<_>>().into_iter().map(Topic::Pod)));
            gates.into_iter().for_each(|change| inner.apply_gate(change));
            if effective > 0 {
                inner.publish(received, applied, is_gate);
                // Whoever reads the new state must not read an older version afterwards.
                self.head_version.store(inner.version, Ordering::Release);
            }
            inner.nodes.set_pools(pools);
            let changed_nodes: Vec<_> =
                nodes.into_iter().filter_map(|change| inner.nodes.apply(change, nodes_position)).collect();
            let observers = if changed_nodes.is_empty() { Vec::new() } else { inner.nodes.observers() };
            self.metrics.set_resources(
                inner.state.service_count(),
                inner.state.endpoint_count(),
                inner.state.service_cidrs().count(),
                inner.nodes.len(),
            );
            self.metrics.conflicts.set(level(inner.state.frontends().losers().len()));
            self.metrics.version.set(level(inner.version));
            self.metrics.tombstones.set(level(inner.log.tombstones()));
            (effective, inner.version, changed_nodes, observers, touched)
        };
        self.metrics.changes.inc_by(effective as u64);
        if effective > 0 {
            self.head.send_replace(version);
        }
        self.interests.wake(&touched);
        if has_gates {
            self.metrics.gates_waiting.set(level(self.read().gates.len()));
            self.gates_changed.send_replace(());
        }
        if has_moved {
            self.moves.send_modify(|moves| *moves = moves.wrapping_add(1));
        }
        for observer in observers {
            changed_nodes.iter().for_each(|name| observer.node_changed(name));
        }
    }

    fn synced(&self) {
        self.listed_version.store(self.version(), Ordering::Release);
        self.change_source(|facts| facts.is_listed = true);
    }

    fn heard(&self, kind: SourceKind) {
        self.freshness.lock().heard.insert(kind, Instant::now());
    }

    fn cut_off(&self, problem: Option<String>) {
        self.change_source(|facts| facts.problem = problem);
    }

    fn doubted(&self, is_doubted: bool) {
        self.freshness.is_doubted.store(is_doubted, Ordering::Release);
    }

    fn problems(&self, problems: Vec<Problem>) {
        self.metrics.problems.set(level(problems.len()));
        *self.problems.lock().unwrap_or_else(PoisonError::into_inner) = problems.into();
    }

    fn wanted_positions(&self) -> watch::Receiver<BTreeMap<SourceKind, u64>> {
        self.wanted_positions.subscribe()
    }

    fn count_error(&self, kind: SourceKind, reason: &'static str) {
        self.metrics.source_errors.of([kind_name(kind), reason]).inc();
    }
}

// The state of the source, and the time since the source last confirmed each kind
// (discovery.proto, sections 9 and 14).

/// The state of the source, and the facts that it follows from.
#[derive(Debug)]
struct Freshness {
    facts: Mutex<SourceFacts>,
    state: watch::Sender<SourceState>,
    is_doubted: AtomicBool,
}

#[derive(Debug)]
struct SourceFacts {
    started: Instant,
    heard: BTreeMap<SourceKind, Instant>,
    is_listed: bool,
    problem: Option<String>,
}

impl Default for Freshness {
    /// The state of a source that has not been listed.
    fn default() -> Self {
        let facts = SourceFacts { started: Instant::now(), heard: BTreeMap::new(), is_listed: false, problem: None };
        let state = watch::Sender::new(SourceState::Unlisted);
        Self { facts: Mutex::new(facts), state, is_doubted: AtomicBool::new(false) }
    }
}

impl Freshness {
    fn lock(&self) -> MutexGuard<'_, SourceFacts> {
        self.facts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Store {
    /// A receiver that wakes when the state of the source changes.
    #[must_use]
    pub fn watch_source(&self) -> watch::Receiver<SourceState> {
        self.freshness.state.subscribe()
    }

    /// The state of the source (discovery.proto, section 14).
    #[must_use]
    pub fn source_state(&self) -> SourceState {
        *self.freshness.state.borrow()
    }

    /// The state of the source that agents of other replicas receive (discovery.proto, section 15):
    /// CUT_OFF instead of FOLLOWING while a request to the source has failed or is late.
    #[must_use]
    pub fn source_state_for_others(&self) -> SourceState {
        match self.source_state() {
            SourceState::Following if self.freshness.is_doubted.load(Ordering::Acquire) => SourceState::CutOff,
            state => state,
        }
    }

    /// True once every kind has been listed and committed.
    #[must_use]
    pub fn is_synced(&self) -> bool {
        self.source_state() != SourceState::Unlisted
    }

    /// Why changes do not arrive from the source; `None` if changes arrive.
    #[must_use]
    pub fn source_problem(&self) -> Option<String> {
        self.freshness.lock().problem.clone()
    }

    /// The longest time since a kind was confirmed, or before that, since the start.
    #[must_use]
    pub fn source_age(&self) -> Duration {
        let facts = self.freshness.lock();
        let oldest = facts.heard.values().min().filter(|_| facts.is_listed);
        oldest.unwrap_or(&facts.started).elapsed()
    }

    /// Time since the source last confirmed each kind.
    #[must_use]
    pub fn source_ages(&self) -> BTreeMap<SourceKind, Duration> {
        self.freshness.lock().heard.iter().map(|(kind, heard)| (*kind, heard.elapsed())).collect()
    }

    /// Changes the facts about the source, and publishes the state that follows from them.
    fn change_source(&self, change: impl FnOnce(&mut SourceFacts)) {
        let mut facts = self.freshness.lock();
        change(&mut facts);
        let state = match (facts.is_listed, &facts.problem) {
            (false, _) => SourceState::Unlisted,
            (true, Some(_)) => SourceState::CutOff,
            (true, None) => SourceState::Following,
        };
        // The lock is held until the end of this function, so that states are published in order.
        self.metrics.set_source_state(state);
        self.freshness.state.send_replace(state);
    }
}

// Who waits for a Service, an endpoint or a pod. A commit wakes only those of its keys.

/// The shortest time between two looks at the store, or at all replicas, for one question.
pub(crate) const PACE: Duration = Duration::from_millis(50);

/// What can be waited for.
#[derive(Debug, Hash)]
pub(crate) enum Topic<'a> {
    /// The Service itself, not its endpoints.
    Service(&'a ServiceKey),
    Endpoint(&'a ServiceKey, IpAddr),
    Pod(PodId),
}

/// All waiters, by the hash of each topic. An equal hash of another topic wakes a waiter in vain.
#[derive(Debug, Default)]
struct Interests {
    hasher: RandomState,
    waiters: Mutex<HashMap<u64, Vec<Arc<Notify>>>>,
}

/// The interest of one waiter, until it is dropped.
#[derive(Debug)]
pub(crate) struct Interest {
    interests: Arc<Interests>,
    topics: Vec<u64>,
    changed: Arc<Notify>,
}

impl Interests {
    /// The hashes of the topics of changes; nothing if nobody waits.
    fn touched<'a>(&self, topics: impl Iterator<Item = Topic<'a>>) -> Vec<u64> {
        if self.lock().is_empty() { Vec::new() } else { topics.map(|topic| self.hasher.hash_one(topic)).collect() }
    }

    fn wake(&self, touched: &[u64]) {
        if touched.is_empty() {
            return;
        }
        let waiters = self.lock();
        touched.iter().filter_map(|topic| waiters.get(topic)).flatten().for_each(|waiter| waiter.notify_one());
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Vec<Arc<Notify>>>> {
        self.waiters.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Interest {
    /// Waits for a change since the interest began, or since the last call.
    pub(crate) async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Waits for a change or until `deadline`, and at least for [`PACE`].
    pub(crate) async fn changed_until(&self, deadline: tokio::time::Instant) {
        let next = tokio::time::Instant::now() + PACE;
        // An error means that the deadline has come.
        let _ = timeout_at(deadline, self.changed()).await;
        sleep_until(next.min(deadline)).await;
    }

    /// Also waits for changes of these topics.
    pub(crate) fn add<'a>(&mut self, topics: impl IntoIterator<Item = Topic<'a>>) {
        let topics: Vec<u64> = topics.into_iter().map(|topic| self.interests.hasher.hash_one(topic)).collect();
        let mut waiters = self.interests.lock();
        for topic in &topics {
            waiters.entry(*topic).or_default().push(Arc::clone(&self.changed));
        }
        drop(waiters);
        self.topics.extend(topics);
    }
}

impl Drop for Interest {
    fn drop(&mut self) {
        let mut waiters = self.interests.lock();
        for topic in &self.topics {
            if let Some(of_topic) = waiters.get_mut(topic) {
                of_topic.retain(|waiter| !Arc::ptr_eq(waiter, &self.changed));
                if of_topic.is_empty() {
                    waiters.remove(topic);
                }
            }
        }
    }
}

impl<'a> Topic<'a> {
    /// The topic of a change.
    fn of(change: &'a Change) -> Option<Self> {
        match change {
            Change::Service(service) => Some(Topic::Service(&service.key)),
            Change::RemoveService(key) => Some(Topic::Service(key)),
            Change::Endpoint(key, endpoint) => Some(Topic::Endpoint(key, endpoint.address)),
            Change::RemoveEndpoint(key, address) => Some(Topic::Endpoint(key, *address)),
            Change::ServiceCidr(_) | Change::RemoveServiceCidr(_) => None,
        }
    }
}

impl Store {
    /// Begins to wait for topics. The caller looks at the store after this call.
    pub(crate) fn interest<'a>(&self, topics: impl IntoIterator<Item = Topic<'a>>) -> Interest {
        let (interests, changed) = (Arc::clone(&self.interests), Arc::new(Notify::new()));
        let mut interest = Interest { interests, topics: Vec::new(), changed };
        interest.add(topics);
        interest
    }
}

// Nodes. A stream receives only the Node of its agent.

/// How many addresses of a Node have a share of their own in the limits of listeners. A kubelet
/// writes the addresses of its Node itself.
const MAX_SHARES: usize = 8;

/// Receives notifications of changed Nodes.
pub trait NodeObserver: Send + Sync {
    /// The Node of this name has changed or gone. Called after a commit; must return quickly.
    fn node_changed(&self, name: &str);

    /// What no Service gets has changed, for all agents. Must return quickly, too.
    fn reserved_changed(&self);
}

/// The Node of an agent.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct OwnNode {
    /// `None` when the source has no Node of this name.
    pub node: Option<Arc<Node>>,
    /// The position when this Node last changed, or without it, when any Node did.
    pub position: Option<(SourceKind, u64)>,
}

/// All Nodes by name, and the observers of their changes.
#[derive(Default)]
struct Nodes {
    /// Each Node, and whether `--agent-nodes` selects it.
    by_name: HashMap<Arc<str>, (OwnNode, bool)>,
    /// The pools of Nodes that have one.
    pools: HashMap<Arc<str>, Arc<str>>,
    /// How many Nodes have each address.
    addresses: HashMap<IpAddr, usize>,
    /// The position of the source when any Node last changed.
    position: Option<(SourceKind, u64)>,
    observers: Vec<Weak<dyn NodeObserver>>,
}

impl Nodes {
    fn len(&self) -> usize {
        self.by_name.len()
    }

    /// The names of all Nodes, and whether `--agent-nodes` selects them.
    fn names(&self) -> impl Iterator<Item = (&Arc<str>, bool)> {
        self.by_name.iter().map(|(name, (_, is_selected))| (name, *is_selected))
    }

    fn get(&self, name: &str) -> OwnNode {
        let known = self.by_name.get(name).map(|(known, _)| known.clone());
        known.unwrap_or(OwnNode { node: None, position: self.position })
    }

    fn set_pools(&mut self, pools: Vec<(Arc<str>, Option<Arc<str>>)>) {
        for (name, pool) in pools {
            match pool {
                Some(pool) => drop(self.pools.insert(name, pool)),
                None => drop(self.pools.remove(&name)),
            }
        }
    }

    /// Applies a change at `position`. Returns the Node's name if its value has changed.
    fn apply(&mut self, change: NodeChange, position: Option<(SourceKind, u64)>) -> Option<Arc<str>> {
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
        for address in node.iter().flat_map(|node| shares(node)) {
            *self.addresses.entry(address).or_default() += 1;
        }
        let before = match node {
            node @ Some(_) => self.by_name.insert(Arc::clone(&name), (OwnNode { node, position }, is_selected)),
            None => self.by_name.remove(&name),
        };
        for address in before.iter().filter_map(|(own, _)| own.node.as_ref()).flat_map(|node| shares(node)) {
            if let Some(count) = self.addresses.get_mut(&address) {
                *count -= 1;
                if *count == 0 {
                    self.addresses.remove(&address);
                }
            }
        }
        Some(name)
    }

    /// Returns true if a Node has this address, among its first [`MAX_SHARES`] ones.
    fn have(&self, address: IpAddr) -> bool {
        self.addresses.contains_key(&address)
    }

    /// Adds an observer, which is notified until the observer is dropped.
    fn observe(&mut self, observer: Weak<dyn NodeObserver>) {
        self.observers.retain(|observer| observer.strong_count() > 0);
        self.observers.push(observer);
    }

    /// The observers that have not been dropped.
    fn observers(&self) -> Vec<Arc<dyn NodeObserver>> {
        self.observers.iter().filter_map(Weak::upgrade).collect()
    }
}

fn shares(node: &Node) -> impl Iterator<Item = IpAddr> {
    node.addresses.iter().take(MAX_SHARES).map(IpAddr::to_canonical)
}

impl std::fmt::Debug for Nodes {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Nodes").field("by_name", &self.by_name).finish_non_exhaustive()
    }
}

// How each of the newest versions came to be: when its changes arrived, and what triggered them.

/// The number of versions about which this is known.
pub(crate) const TIMED_COMMITS: usize = 4096;

/// An older trigger does not count.
const MAX_WAITED: Duration = Duration::from_secs(3_600);

/// What the time of a change begins with (discovery.proto, section 21).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Trigger {
    /// The annotation of the EndpointSlice.
    Annotation,
    /// The pod lacked only the readiness gate of Headgate.
    PodReady,
    /// The arrival at this replica.
    #[default]
    Arrival,
}

impl Trigger {
    /// The text in `ChangeTime.trigger`.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Annotation => "trigger annotation",
            Self::PodReady => "pod ready",
            Self::Arrival => "arrival",
        }
    }
}

/// The changes of one version.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Commit {
    /// When the changes arrived from the source.
    pub(crate) received: Instant,
    pub(crate) trigger: Trigger,
    /// The time from the trigger to the arrival.
    pub(crate) waited: Duration,
    /// The Service, or its endpoint, with the oldest trigger; `None` for a ServiceCIDR.
    pub(crate) subject: Option<(ServiceKey, Option<IpAddr>)>,
    /// The number of changes.
    pub(crate) changed: usize,
    /// The comparable positions that the version reached, and whether they moved with it.
    pub(crate) positions: Box<[(SourceKind, u64, bool)]>,
}

impl Commit {
    /// The time from the trigger until `end`.
    pub(crate) fn time_until(&self, end: Instant) -> Duration {
        self.waited + end.saturating_duration_since(self.received)
    }
}

/// What [`Inner::apply`] has applied.
#[derive(Debug, Default)]
struct Applied {
    /// The number of changes with an effect.
    changed: usize,
    /// The change with the oldest trigger, and this trigger; 0 if it is not known.
    oldest: Option<(LogKey, u64)>,
}

impl Applied {
    /// Counts a change that had an effect.
    fn add(&mut self, key: &LogKey, trigger_unix_ms: u64) {
        self.changed += 1;
        let is_older = |(_, oldest): &(LogKey, u64)| trigger_unix_ms > 0 && (*oldest == 0 || trigger_unix_ms < *oldest);
        if self.oldest.as_ref().is_none_or(is_older) {
            self.oldest = Some((key.clone(), trigger_unix_ms));
        }
    }
}

impl Inner {
    /// Publishes the applied changes, which arrived at `received`, as the next version. `is_gate`
    /// says that a pod with the readiness gate of Headgate caused them.
    fn publish(&mut self, received: Instant, applied: Applied, is_gate: bool) {
        self.version += 1;
        // Events of several watches may arrive in another order.
        let received = self.commits.back().map_or(received, |last| received.max(last.received));
        let (key, trigger) = applied.oldest.unzip();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let since = now.checked_sub(Duration::from_millis(trigger.unwrap_or_default()));
        let since = since.filter(|since| trigger.is_some_and(|at| at > 0) && *since <= MAX_WAITED);
        let trigger = match since {
            None => Trigger::Arrival,
            Some(_) if is_gate => Trigger::PodReady,
            Some(_) => Trigger::Annotation,
        };
        let subject = key.and_then(|key| match key {
            LogKey::Service(key) => Some(((*key).clone(), None)),
            LogKey::Endpoint(key, address) => Some(((*key).clone(), Some(address))),
            LogKey::Cidr(_) => None,
        });
        let comparable = self.shared_positions().filter(|(kind, _)| kind.is_comparable());
        let has_moved = |kind: &SourceKind| self.moved_at.get(kind) == Some(&self.version);
        self.commits.push_back(Commit {
            received,
            trigger,
            waited: since.map_or(Duration::ZERO, |since| since.saturating_sub(received.elapsed())),
            subject,
            changed: applied.changed,
            positions: comparable.map(|(kind, position)| (kind, position, has_moved(&kind))).collect(),
        });
        if self.commits.len() > TIMED_COMMITS {
            self.commits.pop_front();
        }
    }
}

impl Store {
    /// The versions above `after`, up to `upto`, with what is known about each. Versions about
    /// which nothing is known any more are left out.
    pub(crate) fn commits(&self, after: u64, upto: u64) -> Vec<(u64, Commit)> {
        let inner = self.read();
        // The version before the oldest version that is known.
        let floor = inner.version - inner.commits.len() as u64;
        let index = |version: u64| usize::try_from(version.clamp(floor, inner.version) - floor).unwrap_or_default();
        let (first, last) = (index(after), index(upto.max(after)));
        (floor + first as u64 + 1..).zip(inner.commits.range(first..last).cloned()).collect()
    }
}
