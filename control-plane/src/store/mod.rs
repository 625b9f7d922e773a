//! The store: current state, a compacted log of it, and cursors into that.
//!
//! [`headgate_core::State`] holds values and digests. Beside it the log keeps each key that changed
//! lately once, at the version that touched it last, so a cursor, which is a version, can be
//! brought to the head at a cost of what differs; one that is too far behind, by the buckets that
//! differ. What streams have in common is encoded once: the newest batches, compacted steps by
//! where they start, and the resources of each bucket.
//!
//! A commit costs what it changes and never waits for a stream: streams are woken by a watch of the
//! head, and whoever reads holds the lock for one bucket or one copy of a delta at most.

mod buckets;
mod cursor;
mod deltas;
mod encode;
mod freshness;
mod inspect;
mod log;
mod names;
mod nodes;
mod resume;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{
        Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, SystemTime},
};

use headgate_core::{Change, Dirty, Endpoint, ServiceKey, State, digest::Digests, node_state::SourceState};
use tokio::sync::watch;

pub use cursor::{Cursor, Resume, ResumeMode};
pub(crate) use encode::{positions_from_wire, positions_to_wire, server_frame};
pub use inspect::{WatchCursor, WatchPage};
pub use resume::{BehindWait, NodeResumption, NotYet, Resumption, Wait};

use crate::{
    metrics::Metrics,
    transaction::{Problem, Sink, SourceKind, Transaction, TriggeredChange},
};
use buckets::Buckets;
use deltas::{Delta, DeltaCache, Ring, SplitBudget};
use encode::Span;
use freshness::Freshness;
use log::{Log, LogKey};
use names::Names;
use nodes::Nodes;
pub use nodes::{NodeObserver, OwnNode};

/// A batch of more changes than this is not encoded at its commit, but by the first stream that
/// asks for it.
const EAGER_CHANGES: usize = 1024;

/// Commits whose time is remembered, for lag.
pub(crate) const TIMED_COMMITS: usize = 4096;

/// Bounds of what the store keeps beside the state itself.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Removals remembered; a cursor behind the oldest of them is moved on by buckets. The log
    /// remembers as many keys as this and `max_delta_changes` together, which is all that a
    /// compacted step can need.
    pub max_tombstones: usize,
    /// Bytes of newest batches kept encoded.
    pub ring_bytes: usize,
    /// Bytes of compacted steps kept encoded.
    pub delta_cache_bytes: usize,
    /// Changes in one compacted step; a cursor with more to catch up on is moved on by buckets.
    pub max_delta_changes: usize,
    /// Size at which a message is cut, in bytes: well below
    /// [`headgate_proto::MAX_SERVER_MESSAGE_BYTES`], and small enough for a stream's turn on a
    /// shared connection to be short.
    pub part_bytes: usize,
    /// Bytes of steps that are cut into parts, be they kept for reuse or held by streams in the
    /// middle of them. Who needs a step for which there is no room is moved on by buckets.
    pub split_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_tombstones: 65_536,
            ring_bytes: 8 << 20,
            delta_cache_bytes: 16 << 20,
            max_delta_changes: 32_768,
            part_bytes: 256 << 10,
            split_bytes: 64 << 20,
        }
    }
}

/// See the module.
#[derive(Debug)]
pub struct Store {
    epoch: u64,
    limits: Limits,
    inner: RwLock<Inner>,
    deltas: DeltaCache,
    split_budget: Arc<SplitBudget>,
    freshness: Freshness,
    problems: Mutex<Arc<[Problem]>>,
    head: watch::Sender<u64>,
    moves: watch::Sender<u64>,
    wanted_positions: watch::Sender<BTreeMap<SourceKind, u64>>,
    // What `head` holds, for those who look thousands of times for each change.
    head_version: AtomicU64,
    metrics: Arc<Metrics>,
}

#[derive(Debug)]
struct Inner {
    state: State,
    log: Log,
    names: Names,
    buckets: Buckets,
    ring: Ring,
    nodes: Nodes,
    version: u64,
    /// Where the source stands, bookmarks included: what agents' positions are compared with.
    positions: BTreeMap<SourceKind, u64>,
    /// Where each kind stood when something of it changed last: what the state covers, and agents
    /// are told.
    changed_positions: BTreeMap<SourceKind, u64>,
    /// Those of them that batches have told so far.
    told_positions: BTreeMap<SourceKind, u64>,
    /// When the source brought the newest versions, without a gap, the head last.
    commit_times: VecDeque<SystemTime>,
}

/// A value that a change replaces.
enum Before {
    /// Whether there was a Service.
    Service(bool),
    Endpoint(Option<Endpoint>),
    Nothing,
}

impl Store {
    /// An empty store with an epoch of its own.
    #[must_use]
    pub fn new(limits: Limits, metrics: Arc<Metrics>) -> Self {
        let epoch = fastrand::u64(1..);
        let inner = Inner {
            state: State::default(),
            log: Log::new(limits.max_tombstones.saturating_add(limits.max_delta_changes), limits.max_tombstones),
            names: Names::new(epoch),
            buckets: Buckets::new(limits.part_bytes),
            ring: Ring::new(limits.ring_bytes),
            nodes: Nodes::default(),
            version: 0,
            positions: BTreeMap::new(),
            changed_positions: BTreeMap::new(),
            told_positions: BTreeMap::new(),
            commit_times: VecDeque::new(),
        };
        Self {
            epoch,
            inner: RwLock::new(inner),
            deltas: DeltaCache::new(limits.delta_cache_bytes),
            split_budget: Arc::new(SplitBudget::new(limits.split_bytes)),
            limits,
            freshness: Freshness::new(Arc::clone(&metrics)),
            problems: Mutex::new(Arc::from([])),
            head: watch::Sender::new(0),
            moves: watch::Sender::new(0),
            wanted_positions: watch::Sender::default(),
            head_version: AtomicU64::new(0),
            metrics,
        }
    }

    /// What this replica's versions count within; random, never 0.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The newest version.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.head_version.load(Ordering::Acquire)
    }

    /// Wakes at each new version.
    #[must_use]
    pub fn head(&self) -> watch::Receiver<u64> {
        self.head.subscribe()
    }

    /// Wakes when the state of the source changes.
    #[must_use]
    pub fn watch_source(&self) -> watch::Receiver<SourceState> {
        self.freshness.watch_state()
    }

    /// What the source is doing (contract, 14).
    #[must_use]
    pub fn source_state(&self) -> SourceState {
        self.freshness.state()
    }

    /// What the source is doing, for agents of other replicas (contract, 15): CUT_OFF as soon as a
    /// request to the source has failed or is late.
    #[must_use]
    pub fn source_state_for_others(&self) -> SourceState {
        self.freshness.state_for_others()
    }

    /// Why the source cannot be heard; `None` when it can.
    #[must_use]
    pub fn source_problem(&self) -> Option<String> {
        self.freshness.problem()
    }

    /// True once every kind has been listed and committed.
    #[must_use]
    pub fn is_synced(&self) -> bool {
        self.source_state() != SourceState::Unlisted
    }

    /// Wakes when a source position moves, whether or not that made a version.
    #[must_use]
    pub fn moves(&self) -> watch::Receiver<u64> {
        self.moves.subscribe()
    }

    /// Asks the source to find out at once whether it has come to `position`, which an agent has
    /// seen elsewhere.
    pub(crate) fn want_position(&self, kind: SourceKind, position: u64) {
        self.wanted_positions.send_modify(|wanted| {
            wanted.insert(kind, position);
        });
    }

    /// What the source says of a node.
    #[must_use]
    pub fn node(&self, name: &str) -> OwnNode {
        self.read().nodes.get(name)
    }

    /// Tells an observer of nodes that change from now on, for as long as it lives.
    pub fn observe_nodes(&self, observer: Weak<dyn NodeObserver>) {
        self.write().nodes.observe(observer);
    }

    /// The first kind of which `seen` is ahead of this replica, as (kind, here, there). Kinds that
    /// this replica's source does not have cannot be compared and do not count.
    #[must_use]
    pub fn behind(&self, seen: &BTreeMap<SourceKind, u64>) -> Option<(SourceKind, u64, u64)> {
        self.behind_in(seen, |_| true)
    }

    /// Does what [`Self::behind`] does, for the kinds that `counts` picks.
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

    /// Time since the source was last heard, for its stalest kind; since the start, until every
    /// kind has been listed.
    #[must_use]
    pub fn source_age(&self) -> Duration {
        self.freshness.age()
    }

    /// Present problems, sorted.
    #[must_use]
    pub fn present_problems(&self) -> Arc<[Problem]> {
        Arc::clone(&self.problems.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// When the source brought the version after `version`: since then, who is at `version` lags.
    /// `None` at the head; for a version so far back that its time is forgotten, the oldest time
    /// known.
    #[must_use]
    pub fn lagging_since(&self, version: u64) -> Option<SystemTime> {
        let inner = self.read();
        let behind = usize::try_from(inner.version.checked_sub(version)?).unwrap_or(usize::MAX);
        let index = inner.commit_times.len().saturating_sub(behind);
        inner.commit_times.get(index).copied().filter(|_| behind > 0)
    }

    /// Time since the source brought each version above `after`, up to `upto`, as far as it is
    /// remembered.
    #[must_use]
    pub fn commit_ages(&self, after: u64, upto: u64) -> Vec<Duration> {
        let inner = self.read();
        // The version before the oldest whose time is known.
        let floor = inner.version - inner.commit_times.len() as u64;
        let index = |version: u64| usize::try_from(version.clamp(floor, inner.version) - floor).unwrap_or_default();
        let now = SystemTime::now();
        let times = inner.commit_times.range(index(after)..index(upto.max(after)));
        times.map(|time| now.duration_since(*time).unwrap_or_default()).collect()
    }

    /// The newest version that is at least so old; the oldest whose time is remembered is taken as
    /// older than anything.
    #[must_use]
    pub fn version_before(&self, age: Duration) -> u64 {
        let inner = self.read();
        let Some(moment) = SystemTime::now().checked_sub(age) else { return inner.version };
        let younger = inner.commit_times.len() - inner.commit_times.partition_point(|time| *time <= moment);
        inner.version - younger as u64
    }

    /// Where the source stands, bookmarks included: an agent that has more is ahead of this
    /// replica.
    #[must_use]
    pub fn positions(&self) -> BTreeMap<SourceKind, u64> {
        self.read().positions.clone()
    }

    /// Where the source stood when each kind changed last: who has been told less has missed
    /// something.
    #[must_use]
    pub fn changed_positions(&self) -> BTreeMap<SourceKind, u64> {
        self.read().changed_positions.clone()
    }

    /// Time since each kind of the source was last heard.
    #[must_use]
    pub fn source_ages(&self) -> BTreeMap<SourceKind, Duration> {
        self.freshness.ages()
    }

    /// Digests of the present state.
    #[must_use]
    pub fn digests(&self) -> Digests {
        self.read().state.digests().clone()
    }

    /// Makes what was applied the next version.
    fn publish(&self, inner: &mut Inner, received: SystemTime, encode: bool) {
        let told = &inner.told_positions;
        let moved = inner.shared_positions().filter(|(kind, position)| told.get(kind) != Some(position));
        let positions = encode::positions_to_wire(moved);
        inner.told_positions.clone_from(&inner.changed_positions);
        let previous_version = inner.version;
        let version = previous_version + 1;
        inner.version = version;
        // In order, whatever the clock does.
        let received = inner.commit_times.back().map_or(received, |last| received.max(*last));
        inner.commit_times.push_back(received);
        if inner.commit_times.len() > TIMED_COMMITS {
            inner.commit_times.pop_front();
        }
        // More removals than the log remembers: the log cannot say what this version is, the
        // buckets can.
        let is_whole = inner.log.floor() < version;
        let delta = if encode && is_whole {
            let entries = inner.log.since(log::after(previous_version)).map(|(_, entry)| entry);
            let references = |change: &Change| inner.names.references(previous_version, change);
            let changes = encode::present_all(&inner.state, entries, references);
            let span = Span { previous_version, version };
            Delta::encode(span, &positions, changes, self.limits.part_bytes, &self.split_budget)
        } else {
            None
        };
        match delta {
            Some(delta) => inner.ring.push(delta),
            None => inner.ring.clear(),
        }
    }

    // A panic while the lock was held cannot leave half a change visible that matters more than
    // going on: State and log are repaired by the next change of the same key, and a proxy that
    // stops serving for it would be worse.
    fn read(&self) -> RwLockReadGuard<'_, Inner> {
        self.inner.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Inner> {
        self.inner.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    /// Applies changes as the next version and returns how many had an effect; with none there is
    /// no version.
    fn apply(&mut self, changes: Vec<TriggeredChange>) -> usize {
        let version = self.version + 1;
        let mut scratch = Dirty::default();
        let mut effective = 0_u32;
        for TriggeredChange { change, trigger_unix_ms } in changes {
            let (key, bucket) = self.log.intern(&change, &self.state);
            let before = self.before(&key);
            if self.state.apply(change, &mut scratch) {
                self.rename(version, &key, before);
                self.buckets.record(bucket, version, &key, &self.state);
                let removed = self.is_removed(&key);
                self.log.record((version, effective), key, bucket, trigger_unix_ms, removed);
                effective = effective.saturating_add(1);
            }
        }
        effective as usize
    }

    /// Where each kind stood when something of it changed last that every agent receives.
    fn shared_positions(&self) -> impl Iterator<Item = (SourceKind, u64)> {
        let positions = self.changed_positions.iter().map(|(kind, position)| (*kind, *position));
        positions.filter(|(kind, _)| kind.has_shared_resources())
    }

    /// Where the source stands as far as Nodes are concerned.
    fn nodes_position(&self) -> Option<(SourceKind, u64)> {
        let mut positions = self.positions.iter().map(|(kind, position)| (*kind, *position));
        positions.find(|(kind, _)| kind.has_nodes())
    }

    /// What a change of `key` is about to replace, as far as it can be referred to.
    fn before(&self, key: &LogKey) -> Before {
        match key {
            LogKey::Service(key) => Before::Service(self.has_service(key)),
            LogKey::Endpoint(key, address) => {
                Before::Endpoint(self.state.entry(key).and_then(|entry| entry.endpoints().get(address)).cloned())
            }
            LogKey::Cidr(_) => Before::Nothing,
        }
    }

    fn has_service(&self, key: &ServiceKey) -> bool {
        self.state.entry(key).is_some_and(|entry| entry.service().is_some())
    }

    /// Takes note of what can be referred to from `version` on. What is new is taken before what it
    /// replaces is released, so that what stays is there without a break.
    fn rename(&mut self, version: u64, key: &LogKey, before: Before) {
        match (key, before) {
            (LogKey::Service(key), Before::Service(was_there)) => match (was_there, self.has_service(key)) {
                (false, true) => self.names.take_service(version, key),
                (true, false) => self.names.release_service(key),
                _ => {}
            },
            (LogKey::Endpoint(key, address), Before::Endpoint(old)) => {
                let new = self.state.entry(key).and_then(|entry| entry.endpoints().get(address));
                new.into_iter().for_each(|endpoint| self.names.take_endpoint(version, endpoint));
                old.into_iter().for_each(|endpoint| self.names.release_endpoint(&endpoint));
            }
            _ => {}
        }
    }

    fn is_removed(&self, key: &LogKey) -> bool {
        match key {
            LogKey::Service(key) => !self.has_service(key),
            LogKey::Endpoint(key, address) => {
                self.state.entry(key).is_none_or(|entry| !entry.endpoints().contains_key(address))
            }
            LogKey::Cidr(name) => self.state.service_cidr(name).is_none(),
        }
    }
}

impl Sink for Store {
    fn commit(&self, transaction: Transaction) {
        let Transaction { changes, nodes, positions, bookmarks, received } = transaction;
        let has_moved = !(positions.is_empty() && bookmarks.is_empty());
        let received = received.unwrap_or_else(SystemTime::now);
        let is_synced = self.is_synced();
        let (effective, version, changed_nodes, observers) = {
            let mut inner = self.write();
            inner.changed_positions.extend(positions.iter().copied());
            let changed_nodes_at = positions.iter().copied().find(|(kind, _)| kind.has_nodes());
            inner.positions.extend(positions);
            inner.positions.extend(bookmarks);
            let nodes_position = changed_nodes_at.or_else(|| inner.nodes_position());
            let effective = inner.apply(changes);
            if effective > 0 {
                self.publish(&mut inner, received, is_synced && effective <= EAGER_CHANGES);
            }
            let changed_nodes: Vec<_> =
                nodes.into_iter().filter_map(|change| inner.nodes.apply(change, nodes_position)).collect();
            let observers = if changed_nodes.is_empty() { Vec::new() } else { inner.nodes.observers() };
            self.metrics.set_resources(
                inner.state.service_count(),
                inner.state.endpoint_count(),
                inner.state.service_cidrs().count(),
                inner.nodes.len(),
            );
            self.metrics.set_store(inner.version, inner.log.tombstones());
            (effective, inner.version, changed_nodes, observers)
        };
        self.metrics.count_changes(effective);
        if effective > 0 {
            self.head_version.store(version, Ordering::Release);
            self.head.send_replace(version);
        }
        if has_moved {
            self.moves.send_modify(|moves| *moves = moves.wrapping_add(1));
        }
        for observer in observers {
            changed_nodes.iter().for_each(|name| observer.node_changed(name));
        }
    }

    fn synced(&self) {
        self.freshness.listed();
    }

    fn heard(&self, kind: SourceKind) {
        self.freshness.heard(kind);
    }

    fn cut_off(&self, problem: Option<String>) {
        self.freshness.cut_off(problem);
    }

    fn doubted(&self, is_doubted: bool) {
        self.freshness.doubted(is_doubted);
    }

    fn problems(&self, problems: Vec<Problem>) {
        self.metrics.set_problems(problems.len());
        *self.problems.lock().unwrap_or_else(PoisonError::into_inner) = problems.into();
    }

    fn wanted_positions(&self) -> watch::Receiver<BTreeMap<SourceKind, u64>> {
        self.wanted_positions.subscribe()
    }

    fn count_error(&self, kind: SourceKind, reason: &'static str) {
        self.metrics.count_source_error(kind, reason);
    }
}
