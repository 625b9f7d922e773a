//! What agents have programmed: the last reports of each, and the whole fleet. Agents are counted
//! by version, so an ACK costs one look-up in a map of the distinct versions.
//!
//! A commit is *programmed everywhere* when the last member has programmed it. The replica measures
//! the time from the arrival of the commit's event from the source until that moment. An ACK states
//! for each version that it covers how long ago the kernel accepted the version (discovery.proto,
//! section 7). So a delayed ACK does not distort the measurement.
//!
//! An agent with a stream becomes a *member* when its kernel has the version that was the newest
//! version when the agent connected. So an agent that joins does not count for earlier commits.
//! When an agent leaves, commits that waited only for this agent are not measured: they are lost.
//!
//! Each change has a second time, which begins with its trigger (discovery.proto, section 21). The
//! replica records it for each of its members. [`Progress::changes`] has what the replica knows
//! about the last changes.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque},
    hash::{BuildHasher as _, RandomState},
    sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use headgate_core::{
    ServiceKey,
    node_state::{NodeState, Reported, SETTLED},
};
use headgate_proto::v1;
use tokio::sync::watch;

use crate::{
    metrics::{Metrics, level},
    store::{Commit, Store, TIMED_COMMITS},
};

/// The number of measured commits that [`Recent`] summarizes.
const RECENT: usize = 1024;

/// What the members of a replica have done with a commit.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum LocalOutcome {
    /// Some member lacks it.
    Running,
    /// All members have it: since when, and the last of them. Without members, since its arrival.
    Done(Instant, Arc<str>),
    /// This member left before it had it, and when.
    Lost(Instant, Arc<str>),
}

/// A commit of this replica, and what its members have done with it.
#[derive(Debug, Clone)]
pub(crate) struct LocalChange {
    pub(crate) version: u64,
    pub(crate) commit: Commit,
    pub(crate) outcome: LocalOutcome,
    /// The number of members that have it.
    pub(crate) nodes: usize,
}

/// A commit that some member lacks.
#[derive(Debug)]
struct Pending {
    /// `None` if the store no longer knows it.
    commit: Option<Commit>,
    /// The last member so far that had it, and when.
    latest: Option<(Instant, Arc<str>)>,
}

/// How an agent is counted in [`FleetCounts`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct CountedAgent {
    version: u64,
    is_failing: bool,
    has_state: bool,
    is_stalled: bool,
    is_standby: bool,
    /// The newest version when the agent connected; `None` once it is a member.
    joins_at: Option<u64>,
}

#[derive(Debug, Default)]
struct FleetCounts {
    /// The number of agents with a stream, by their reports, without those in standby.
    all: BTreeMap<Reports, usize>,
    standby: usize,
    /// The number of members, by version.
    members: BTreeMap<u64, usize>,
    /// Commits up to this version have been measured, or will never be measured.
    measured: u64,
    /// The versions after `measured` that some member has, at most [`TIMED_COMMITS`].
    programmed: VecDeque<Pending>,
    /// The last [`RECENT`] commits that are not running any more.
    recent: VecDeque<LocalChange>,
    /// The rejections of each node that rejects resources.
    rejecting: HashMap<Arc<str>, Arc<Rejections>>,
    /// The nodes whose last verification found differences.
    drifting: HashSet<Arc<str>>,
}

/// The counts of the fleet, and the measurement of commits.
#[derive(Debug)]
pub(crate) struct Progress {
    store: Arc<Store>,
    metrics: Arc<Metrics>,
    counts: Mutex<FleetCounts>,
    /// Changes when an agent connects, leaves or changes its rejections, and when a Node changes.
    members: watch::Sender<()>,
    /// The version that the kernels of all agents have, except those that are stalled.
    floor: watch::Sender<u64>,
}

/// Whether an agent is stalled, fails, has acknowledged a state, and its kernel's version.
type Reports = (bool, bool, bool, u64);

/// The number of agents in each state.
pub(crate) type AgentStates = BTreeMap<NodeState, usize>;

/// A summary of how long the last commits took until they were programmed everywhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Recent {
    pub(crate) p50: Duration,
    pub(crate) p99: Duration,
    pub(crate) max: Duration,
    pub(crate) commits: usize,
}

fn count_in<K: Ord>(counts: &mut BTreeMap<K, usize>, key: K) {
    *counts.entry(key).or_default() += 1;
}

fn count_out<K: Ord>(counts: &mut BTreeMap<K, usize>, key: &K) {
    if let Some(count) = counts.get_mut(key) {
        *count -= 1;
        if *count == 0 {
            counts.remove(key);
        }
    }
}

impl FleetCounts {
    fn count(&mut self, counted: CountedAgent) {
        if counted.is_standby {
            self.standby += 1;
            return;
        }
        count_in(&mut self.all, counted.reports());
        if counted.joins_at.is_none() {
            if self.members.is_empty() {
                self.measured = counted.version;
                self.programmed.clear();
            }
            count_in(&mut self.members, counted.version);
        }
    }

    fn discount(&mut self, counted: CountedAgent) {
        if counted.is_standby {
            self.standby -= 1;
            return;
        }
        count_out(&mut self.all, &counted.reports());
        if counted.joins_at.is_none() {
            count_out(&mut self.members, &counted.version);
        }
    }

    /// Records when a member had programmed the versions after `after`. An entry of `programmed`
    /// covers all versions after the previous entry, up to the version of the entry. Entries are in
    /// ascending order. Calls `record` with the time of each of these commits.
    fn note_programmed(
        &mut self,
        store: &Store,
        (node, after): (&Arc<str>, u64),
        programmed: &[(u64, Instant)],
        record: impl Fn(Duration),
    ) {
        let Some((newest, _)) = programmed.last() else { return };
        let known = self.measured + self.programmed.len() as u64;
        if *newest > known {
            let mut commits = store.commits(known, *newest).into_iter().peekable();
            for version in (known + 1).max(newest.saturating_sub(TIMED_COMMITS as u64))..=*newest {
                let commit = commits.next_if(|(of, _)| *of == version).map(|(_, commit)| commit);
                self.programmed.push_back(Pending { commit, latest: None });
            }
            // A member that is stuck keeps the others from being measured for a limited time only.
            let excess = self.programmed.len().saturating_sub(TIMED_COMMITS);
            self.programmed.drain(..excess);
            self.measured = newest - self.programmed.len() as u64;
        }
        let mut next = after.max(self.measured) + 1;
        for (version, at) in programmed {
            for version in next..=*version {
                let index = usize::try_from(version - self.measured - 1).unwrap_or(usize::MAX);
                let Some(Pending { commit, latest }) = self.programmed.get_mut(index) else { continue };
                if let Some(commit) = commit {
                    record(commit.time_until(*at));
                }
                if latest.as_ref().is_none_or(|(latest, _)| latest < at) {
                    *latest = Some((*at, Arc::clone(node)));
                }
            }
            next = next.max(*version + 1);
        }
    }

    /// Takes the commits up to a version, which have ended. `lost` is the member that left, if they
    /// waited only for this one.
    fn end_to(&mut self, store: &Store, version: u64, (node, is_lost): (&Arc<str>, bool)) -> Vec<LocalChange> {
        let first = self.measured + 1;
        let count = usize::try_from(version.saturating_sub(self.measured)).unwrap_or(usize::MAX);
        self.measured = self.measured.max(version);
        let nodes = self.members.values().sum();
        let taken = self.programmed.drain(..count.min(self.programmed.len()));
        let known: Vec<_> = (first..).zip(taken).collect();
        let unknown = first + known.len() as u64;
        let mut ended: Vec<LocalChange> = Vec::new();
        let mut end = |version, commit, latest: Option<(Instant, Arc<str>)>| {
            let outcome = match latest {
                _ if is_lost => LocalOutcome::Lost(Instant::now(), Arc::clone(node)),
                Some((at, node)) => LocalOutcome::Done(at, node),
                None => LocalOutcome::Done(Instant::now(), Arc::clone(node)),
            };
            ended.push(LocalChange { version, commit, outcome, nodes });
        };
        for (version, Pending { commit, latest }) in known {
            if let Some(commit) = commit {
                end(version, commit, latest);
            }
        }
        // No member has told when it had these.
        for (version, commit) in store.commits(unknown - 1, version) {
            end(version, commit, None);
        }
        self.recent.extend(ended.iter().cloned());
        self.recent.drain(..self.recent.len().saturating_sub(RECENT));
        ended
    }

    fn oldest_member(&self) -> Option<u64> {
        self.members.first_key_value().map(|(version, _)| *version)
    }

    /// Returns true if the rejections have changed.
    fn note_rejections(&mut self, node: &Arc<str>, record: &Record) -> bool {
        if record.rejections.is_empty() || record.is_stalled() || record.is_standby {
            return !self.rejecting.is_empty() && self.rejecting.remove(node).is_some();
        }
        let is_known = self.rejecting.get(node).is_some_and(|known| Arc::ptr_eq(known, &record.rejections));
        if !is_known {
            self.rejecting.insert(Arc::clone(node), Arc::clone(&record.rejections));
        }
        !is_known
    }

    fn note_drift(&mut self, node: &Arc<str>, record: &Record) {
        if record.has_drift() {
            self.drifting.insert(Arc::clone(node));
        } else if !self.drifting.is_empty() {
            self.drifting.remove(node);
        }
    }

    /// The version that all kernels but stalled ones have; without agents, the highest number.
    fn floor(&self) -> u64 {
        let lowest = |failing: bool, has_state: bool| {
            let reports = (false, failing, has_state, 0)..=(false, failing, has_state, u64::MAX);
            self.all.range(reports).next().map(|((.., has_state, version), _)| if *has_state { *version } else { 0 })
        };
        let kinds = [(false, false), (false, true), (true, false), (true, true)];
        kinds.into_iter().filter_map(|(failing, has_state)| lowest(failing, has_state)).min().unwrap_or(u64::MAX)
    }
}

impl Progress {
    pub(crate) fn new(store: Arc<Store>, metrics: Arc<Metrics>) -> Self {
        let (members, floor) = (watch::Sender::new(()), watch::Sender::new(u64::MAX));
        Self { store, metrics, counts: Mutex::default(), members, floor }
    }

    fn counts(&self) -> MutexGuard<'_, FleetCounts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Is notified when agents come, go or change rejections, and when a Node changes.
    pub(crate) fn members(&self) -> watch::Receiver<()> {
        self.members.subscribe()
    }

    /// Notifies the receivers that a Node has changed.
    pub(super) fn node_changed(&self) {
        self.members.send_replace(());
    }

    /// Returns the version that the kernels of all agents have, except those that are stalled.
    pub(crate) fn floor(&self) -> u64 {
        *self.floor.borrow()
    }

    /// Waits until the kernels of all agents have `version`, except those that are stalled.
    pub(crate) async fn reached(&self, version: u64) {
        // An error means that the replica is gone.
        let _ = self.floor.subscribe().wait_for(|floor| *floor >= version).await.map(drop);
    }

    /// Wakes those who wait for the floor and for changes of members.
    fn announce(&self, counts: &FleetCounts, members_changed: bool) {
        let floor = counts.floor();
        self.floor.send_if_modified(|old| std::mem::replace(old, floor) != floor);
        if members_changed {
            self.members.send_replace(());
        }
    }

    pub(crate) fn enter(&self, node: &Arc<str>, record: &Record) -> CountedAgent {
        let head = self.store.version();
        let joins_at = Some(head);
        let mut counted = CountedAgent { joins_at, ..CountedAgent::default() };
        counted.take(record);
        counted.join();
        let mut counts = self.counts();
        counts.count(counted);
        counts.note_rejections(node, record);
        counts.note_drift(node, record);
        self.announce(&counts, true);
        counted
    }

    /// Updates the counts after an agent has reported something. `programmed` holds the versions
    /// that an ACK names, in ascending order, and when the kernel had them.
    pub(crate) fn update(
        &self,
        node: &Arc<str>,
        counted: &mut CountedAgent,
        record: &Record,
        programmed: &[(u64, Instant)],
    ) {
        let old = *counted;
        counted.take(record);
        counted.join();
        let mut counts = self.counts();
        let has_rejections = counts.note_rejections(node, record);
        counts.note_drift(node, record);
        if *counted != old {
            if old.joins_at.is_none() {
                let of_node = &self.metrics.programmed_on_node;
                let observe = |time: Duration| of_node.observe(time.as_secs_f64());
                counts.note_programmed(&self.store, (node, old.version), programmed, observe);
            }
            // New counts come before old ones go, so that there is always a member.
            counts.count(*counted);
            counts.discount(old);
            self.measure(node, &mut counts);
        }
        self.announce(&counts, has_rejections || counted.is_stalled != old.is_stalled);
    }

    pub(crate) fn leave(&self, node: &Arc<str>, counted: CountedAgent) {
        let mut counts = self.counts();
        counts.discount(counted);
        counts.rejecting.remove(node);
        counts.drifting.remove(node);
        if let Some(oldest) = counts.oldest_member() {
            counts.end_to(&self.store, oldest, (node, true));
        }
        self.announce(&counts, true);
    }

    fn measure(&self, node: &Arc<str>, counts: &mut FleetCounts) {
        let Some(oldest) = counts.oldest_member().filter(|oldest| *oldest > counts.measured) else { return };
        for LocalChange { commit, outcome, .. } in counts.end_to(&self.store, oldest, (node, false)) {
            if let LocalOutcome::Done(at, _) = outcome {
                let time = at.saturating_duration_since(commit.received);
                self.metrics.programmed_everywhere.observe(time.as_secs_f64());
            }
        }
    }

    /// Returns what is known about the last versions.
    pub(crate) fn last_changes(&self, limit: usize) -> Vec<LocalChange> {
        self.changes(self.store.version().saturating_sub(limit as u64), limit)
    }

    /// Returns what is known about the first versions after `after`, among the last [`RECENT`].
    pub(crate) fn changes(&self, after: u64, limit: usize) -> Vec<LocalChange> {
        let counts = self.counts();
        let head = self.store.version();
        let after = after.max(head.saturating_sub(RECENT as u64));
        let commits = self.store.commits(after, head.min(after + limit as u64));
        let mut ended = counts.recent.iter().peekable();
        let local = |(version, commit): (u64, Commit)| {
            while ended.next_if(|ended| ended.version < version).is_some() {}
            if let Some(ended) = ended.peek().filter(|ended| ended.version == version) {
                return (*ended).clone();
            }
            let nodes: usize = counts.members.range(version..).map(|(_, count)| count).sum();
            let is_running = counts.oldest_member().is_some_and(|oldest| oldest < version);
            let outcome =
                if is_running { LocalOutcome::Running } else { LocalOutcome::Done(commit.received, "".into()) };
            LocalChange { version, commit, outcome, nodes: if is_running { nodes } else { 0 } }
        };
        commits.into_iter().map(local).collect()
    }

    /// Returns the number of agents whose last verification found differences.
    pub(crate) fn drifting(&self) -> usize {
        self.counts().drifting.len()
    }

    /// Returns true if rejections of some agent that is not stalled concern one of the services.
    pub(crate) fn is_rejected(&self, services: &BTreeSet<ServiceKey>) -> bool {
        self.counts().rejecting.values().any(|rejections| services.iter().any(|key| rejections.concern(key)))
    }

    pub(crate) fn states(&self) -> AgentStates {
        let (source, settled) = (self.store.source_state(), self.store.version_before(SETTLED));
        let counts = self.counts();
        let mut states = AgentStates::new();
        if counts.standby > 0 {
            states.insert(NodeState::Standby, counts.standby);
        }
        for ((_, is_failing, has_state, version), count) in &counts.all {
            let is_settled = *version >= settled;
            let (has_state, is_failing) = (*has_state, *is_failing);
            let reported = Reported { has_state, is_failing, is_settled, is_standby: false };
            *states.entry(NodeState::of(source, reported)).or_default() += count;
        }
        states
    }

    /// Summarizes the last commits that were measured.
    pub(crate) fn recent(&self) -> Recent {
        let age = |change: &LocalChange| match change.outcome {
            LocalOutcome::Done(at, _) => Some(at.saturating_duration_since(change.commit.received)),
            LocalOutcome::Running | LocalOutcome::Lost(..) => None,
        };
        let mut ages: Vec<Duration> = self.counts().recent.iter().filter_map(age).collect();
        ages.sort_unstable();
        let at = |percent: usize| {
            ages.get((ages.len() * percent).div_ceil(100).saturating_sub(1)).copied().unwrap_or_default()
        };
        Recent { p50: at(50), p99: at(99), max: at(100), commits: ages.len() }
    }

    /// Sets the metrics that change with time. Call this method before each scrape.
    pub(crate) fn refresh_metrics(&self) {
        let states = self.states();
        for state in NodeState::ALL {
            let count = states.get(&state).copied().unwrap_or_default();
            self.metrics.agents.of([state.as_str()]).set(level(count));
        }
        self.metrics.drifting.set(level(self.drifting()));
    }
}

impl CountedAgent {
    fn take(&mut self, record: &Record) {
        self.version = record.kernel_version();
        (self.is_failing, self.has_state) = (record.is_failing(), record.has_state());
        (self.is_stalled, self.is_standby) = (record.is_stalled(), record.is_standby);
    }

    fn reports(self) -> Reports {
        (self.is_stalled, self.is_failing, self.has_state, self.version)
    }

    /// The version that the kernel has, if the agent is a member.
    pub(super) fn member_version(self) -> Option<u64> {
        self.joins_at.is_none().then_some(self.version)
    }

    /// Makes the agent a member if its kernel has the version that it joins at. An agent in standby
    /// programs nothing, so it never joins.
    fn join(&mut self) {
        self.joins_at = self.joins_at.filter(|head| self.version < *head || self.is_standby);
    }
}

// The last reports of an agent, cut to a bounded size, with its rejections.

/// The maximum number of stored items of each list that an agent sent.
const MAX_LISTED: usize = 64;

/// The maximum number of stored differences.
const MAX_DRIFT: usize = 5;

/// The longest age of a programmed version that is accepted from an ACK. Older entries are ignored.
const MAX_AGO: Duration = Duration::from_secs(3_600);

/// The last reports of an agent.
#[derive(Debug, Clone, Default)]
pub(crate) struct Record {
    /// Grows with each report that people look at. ACKs of an agent without problems do not count.
    pub(crate) revision: u64,
    /// True if another service proxy works on the node (discovery.proto, section 23).
    pub(crate) is_standby: bool,
    pub(crate) backend: String,
    pub(crate) degraded: Vec<String>,
    /// The last verification that the agent reported.
    reported: Option<Verified>,
    /// The last verification that a client has asked for. The replica may have seen differences
    /// that the agent does not see.
    requested: Option<Verified>,
    pub(crate) programmed_version: u64,
    has_acknowledged: bool,
    pub(crate) apply_microseconds: u64,
    pub(crate) services_planned: u32,
    pub(crate) objects_written: u32,
    pub(crate) last_error: String,
    /// The version of the last failed attempt.
    failed_version: u64,
    /// The current rejections. The counts of the fleet share this list.
    pub(crate) rejections: Arc<Rejections>,
    /// Nothing is left of the patience with the node until this time or a later one.
    pub(crate) stalled_until: Option<Instant>,
}

/// The result of a verification (discovery.proto, section 19).
#[derive(Debug, Clone)]
pub(crate) struct Verified {
    pub(crate) at: Instant,
    pub(crate) drift_count: u64,
    pub(crate) drift: Vec<v1::Drift>,
}

impl Verified {
    fn of(wire: &v1::Verified) -> Self {
        let drift = |v1::Drift { service, difference }: &v1::Drift| v1::Drift {
            service: clip(service).to_owned(),
            difference: clip(difference).to_owned(),
        };
        let now = Instant::now();
        Self {
            at: now.checked_sub(Duration::from_millis(wire.ago_ms)).unwrap_or(now),
            drift_count: wire.drift_count,
            drift: wire.drift.iter().take(MAX_DRIFT).map(drift).collect(),
        }
    }
}

impl Record {
    /// Returns the version that the kernel has, as far as the replica knows. The version is 0 if an
    /// attempt to program an acknowledged version again has failed. An agent makes such an attempt,
    /// for example, after another program has changed rules in the kernel. After the failure, it is
    /// unknown which rules the kernel holds.
    pub(crate) fn kernel_version(&self) -> u64 {
        if self.is_lost() { 0 } else { self.programmed_version }
    }

    /// Returns true if the agent has acknowledged a state on this stream and its kernel has not
    /// lost that state.
    pub(crate) fn has_state(&self) -> bool {
        self.has_acknowledged && !self.is_lost() && !self.is_standby
    }

    fn is_lost(&self) -> bool {
        !self.last_error.is_empty() && self.failed_version <= self.programmed_version
    }

    /// Returns the reports that decide the node's state. The replica has known the versions up to
    /// `settled` for more than a second.
    pub(crate) fn reported(&self, settled: u64) -> Reported {
        let is_settled = self.kernel_version() >= settled;
        let (has_state, is_failing) = (self.has_state(), self.is_failing());
        Reported { has_state, is_failing, is_settled, is_standby: self.is_standby }
    }

    /// Returns true if the agent's last attempt to program its kernel failed, or the agent rejects
    /// a resource.
    pub(crate) fn is_failing(&self) -> bool {
        !self.last_error.is_empty() || !self.rejections.is_empty()
    }

    /// Returns true if the node has held up questions for too long (discovery.proto, section 16).
    pub(crate) fn is_stalled(&self) -> bool {
        self.stalled_until.is_some()
    }

    /// Returns the verification to show: the last one. Differences that a request found stay until
    /// a later request finds none.
    pub(crate) fn verified(&self) -> Option<&Verified> {
        let replaces = |reported: &&Verified| {
            self.requested.as_ref().is_none_or(|requested| {
                reported.at > requested.at && (requested.drift_count == 0 || reported.drift_count > 0)
            })
        };
        self.reported.as_ref().filter(replaces).or(self.requested.as_ref())
    }

    /// Returns true if the verification to show found differences. The rules of another proxy are
    /// no drift.
    pub(crate) fn has_drift(&self) -> bool {
        !self.is_standby && self.verified().is_some_and(|verified| verified.drift_count > 0)
    }

    /// Returns true if the kernel has `version`, and no rejection concerns the services.
    pub(crate) fn confirms(&self, version: u64, services: &BTreeSet<ServiceKey>) -> bool {
        self.has_programmed(version) && !services.iter().any(|key| self.rejections.concern(key))
    }

    /// Returns true if the kernel has `version`, except what the agent rejects.
    pub(crate) fn has_programmed(&self, version: u64) -> bool {
        self.has_state() && self.kernel_version() >= version
    }

    /// Ends a stall whose time is over.
    pub(crate) fn end_stall(&mut self) {
        self.stalled_until.take_if(|until| *until <= Instant::now());
    }

    pub(crate) fn status(&mut self, status: &v1::AgentStatus) {
        self.backend = clip(&status.backend).to_owned();
        self.degraded = status.degraded.iter().take(MAX_LISTED).map(|text| clip(text).to_owned()).collect();
        // An agent that cannot read its kernel at the moment reports no verification.
        if let Some(verified) = &status.verified {
            self.reported = Some(Verified::of(verified));
        }
    }

    /// Applies a verification that a client has asked for, with a result other than `unverified`.
    /// Repaired differences do not count.
    pub(crate) fn verified_on_request(&mut self, verification: &v1::NodeVerification) {
        let is_repaired = verification.is_repaired;
        let drift = if is_repaired { &[][..] } else { &verification.drift };
        self.requested = Some(Verified {
            at: Instant::now(),
            drift_count: if is_repaired { 0 } else { verification.drift_count },
            drift: drift.iter().take(MAX_DRIFT).cloned().collect(),
        });
    }

    pub(crate) fn ack(&mut self, ack: &v1::Ack) {
        self.revision += u64::from(!self.last_error.is_empty() || self.is_stalled() || !self.has_acknowledged);
        self.end_stall();
        self.programmed_version = self.programmed_version.max(ack.version);
        self.has_acknowledged = true;
        self.apply_microseconds = ack.apply_microseconds;
        self.services_planned = ack.services_planned;
        self.objects_written = ack.objects_written;
        // A newer version may have failed while this ACK was delayed.
        if ack.version >= self.failed_version {
            self.last_error.clear();
        }
    }

    pub(crate) fn failed(&mut self, failed: &v1::ApplyFailed) {
        self.failed_version = failed.version;
        self.last_error = format!("version {}, attempt {}: {}", failed.version, failed.attempts, clip(&failed.error));
    }

    /// Applies rejections and withdrawals.
    pub(crate) fn nack(&mut self, nack: &v1::Nack) {
        Arc::make_mut(&mut self.rejections).nack(nack);
    }
}

/// Returns the versions that an ACK names, in ascending order, and when the kernel had them.
/// Impossible entries are left out: entries that are out of order, newer than the ACK, or older
/// than [`MAX_AGO`].
pub(crate) fn programmed(ack: &v1::Ack, now: Instant) -> Vec<(u64, Instant)> {
    let earlier = ack.earlier.iter().take(MAX_LISTED).map(|earlier| (earlier.version, earlier.ago_microseconds));
    let mut found: Vec<(u64, Instant)> = Vec::with_capacity(ack.earlier.len().min(MAX_LISTED) + 1);
    for (version, ago) in earlier.chain([(ack.version, ack.programmed_ago_microseconds)]) {
        let is_next = version <= ack.version && found.last().is_none_or(|(last, _)| version > *last);
        let ago = Duration::from_micros(ago);
        if is_next
            && ago <= MAX_AGO
            && let Some(at) = now.checked_sub(ago)
        {
            found.push((version, at));
        }
    }
    found
}

// The rejections of one agent (discovery.proto, section 7).

/// The maximum stored length of a text that an agent sent, in bytes.
const MAX_TEXT_BYTES: usize = 512;

/// The maximum number of rejections that people see.
const MAX_SHOWN: usize = 64;

/// The maximum number of remembered rejections, 16 bytes each. A Service with many endpoints is one
/// rejection for each endpoint.
const MAX_REMEMBERED: usize = 4_096;

/// The key of the hashes. It is random, so that nobody can choose names with equal hashes.
static HASHER: LazyLock<RandomState> = LazyLock::new(RandomState::new);

/// The rejections that are in force, as far as this replica remembers them.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Rejections {
    /// The last rejections, in full.
    shown: Vec<v1::Rejection>,
    /// The hashes of all rejections: of the Service, and of the resource.
    remembered: BTreeSet<(u64, u64)>,
    /// How many rejections the agent says are in force.
    in_force: u64,
}

impl Rejections {
    /// How many rejections are in force, as far as this replica knows.
    pub(crate) fn count(&self) -> u64 {
        self.in_force.max(self.remembered.len() as u64)
    }

    /// The last rejections, at most 64.
    pub(crate) fn shown(&self) -> &[v1::Rejection] {
        &self.shown
    }

    /// True if the agent rejects nothing.
    pub(crate) fn is_empty(&self) -> bool {
        self.in_force == 0 && self.remembered.is_empty()
    }

    /// True if the agent rejects the Service, one of its endpoints or all its endpoints, or if this
    /// replica has forgotten some of the rejections, which may be any.
    pub(crate) fn concern(&self, key: &ServiceKey) -> bool {
        let has = |hash: u64| self.remembered.range((hash, 0)..=(hash, u64::MAX)).next().is_some();
        let is_complete = self.remembered.len() as u64 >= self.in_force;
        !is_complete || has(hash(&key.to_string())) || has(hash(&key.name))
    }

    /// The rejection to show for a Service that rejections [concern](Self::concern).
    pub(crate) fn reason(&self, key: &ServiceKey) -> String {
        let service = hash(&key.to_string());
        let own = |rejection: &&v1::Rejection| service_of(&rejection.resource) == service;
        match self.shown.iter().find(own) {
            Some(v1::Rejection { resource, field, reason }) => format!("rejected {resource}, {field}: {reason}"),
            None => format!(
                "rejects {} resources, and this replica remembers the names of {}",
                self.count(),
                self.remembered.len()
            ),
        }
    }

    /// Applies rejections and withdrawals. A resource that was rejected before is listed once, with
    /// the newer reason.
    pub(super) fn nack(&mut self, nack: &v1::Nack) {
        if !nack.withdrawn.is_empty() && !self.remembered.is_empty() {
            let withdrawn: BTreeSet<&str> = nack.withdrawn.iter().map(|resource| clip(resource)).collect();
            self.shown.retain(|old| !withdrawn.contains(old.resource.as_str()));
            for resource in &nack.withdrawn {
                self.remembered.remove(&(service_of(resource), hash(resource)));
            }
        }
        for v1::Rejection { resource, .. } in &nack.rejections {
            if self.remembered.len() < MAX_REMEMBERED {
                self.remembered.insert((service_of(resource), hash(resource)));
            }
        }
        // A peer can send any number of rejections. Only the last ones are shown, so earlier ones
        // are skipped to save time.
        for rejection in &nack.rejections[nack.rejections.len().saturating_sub(MAX_SHOWN)..] {
            let rejection = v1::Rejection {
                resource: clip(&rejection.resource).to_owned(),
                field: clip(&rejection.field).to_owned(),
                reason: clip(&rejection.reason).to_owned(),
            };
            self.shown.retain(|old| old.resource != rejection.resource);
            self.shown.push(rejection);
        }
        self.shown.drain(..self.shown.len().saturating_sub(MAX_SHOWN));
        self.in_force = nack.in_force;
    }
}

fn hash(text: &str) -> u64 {
    HASHER.hash_one(text)
}

/// The hash of the Service to which a rejected resource belongs: of NAMESPACE/NAME, or of the name
/// alone if the resource names only this.
fn service_of(resource: &str) -> u64 {
    match resource.split_once(' ') {
        Some(("Service", key)) => hash(key),
        Some(("Endpoint", endpoint)) => hash(endpoint.split(' ').next().unwrap_or_default()),
        _ => hash(resource.strip_prefix("endpoints of service ").unwrap_or(resource)),
    }
}

/// Cuts a text of a peer to a bounded length, at the boundary of a character.
pub(crate) fn clip(text: &str) -> &str {
    &text[..text.floor_char_boundary(MAX_TEXT_BYTES)]
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use headgate_core::{Change, ServiceCidr};

    use super::*;
    use crate::{
        model::{Sink as _, Transaction, TriggeredChange},
        store::Limits,
    };

    struct Rig {
        progress: Progress,
        counted: HashMap<&'static str, (CountedAgent, Record)>,
        commits: usize,
    }

    impl Rig {
        fn new() -> Self {
            let metrics = Arc::new(Metrics::default());
            let store = Arc::new(Store::new(Limits::default(), Arc::clone(&metrics)));
            store.synced();
            Self { progress: Progress::new(store, metrics), counted: HashMap::new(), commits: 0 }
        }

        fn commit(&mut self) {
            self.commit_received(None);
        }

        /// Commits a change that arrived from the source at `received`, or now.
        fn commit_received(&mut self, received: Option<Instant>) {
            self.commits += 1;
            let cidrs = vec![ipnet::IpNet::new([10, (self.commits % 256) as u8, 0, 0].into(), 16).unwrap()];
            let change = Change::ServiceCidr(ServiceCidr { name: "kubernetes".into(), cidrs });
            let changes = vec![TriggeredChange { change, trigger_unix_ms: 0 }];
            self.progress.store.commit(Transaction { changes, received, ..Transaction::default() });
        }

        fn enter(&mut self, node: &'static str) {
            let record = Record::default();
            let counted = self.progress.enter(&node.into(), &record);
            self.counted.insert(node, (counted, record));
        }

        fn report(&mut self, node: &'static str, change: impl FnOnce(&mut Record)) {
            let (counted, record) = self.counted.get_mut(node).unwrap();
            change(record);
            self.progress.update(&node.into(), counted, record, &[]);
        }

        fn ack(&mut self, node: &'static str, version: u64) {
            self.report(node, |record| record.ack(&v1::Ack { version, ..v1::Ack::default() }));
        }

        fn ack_with_times(&mut self, node: &'static str, programmed: &[(u64, Instant)]) {
            let (counted, record) = self.counted.get_mut(node).unwrap();
            record.ack(&v1::Ack { version: programmed.last().unwrap().0, ..v1::Ack::default() });
            self.progress.update(&node.into(), counted, record, programmed);
        }

        fn leave(&mut self, node: &'static str) {
            let (counted, _) = self.counted.remove(node).unwrap();
            self.progress.leave(&node.into(), counted);
        }

        fn floor(&self) -> u64 {
            self.progress.floor()
        }

        fn measured(&self) -> usize {
            self.progress.recent().commits
        }
    }

    #[test]
    fn a_commit_is_measured_when_the_last_member_has_programmed_it() {
        let mut rig = Rig::new();
        rig.enter("a");
        rig.enter("b");
        (0..3).for_each(|_| rig.commit());
        rig.ack("a", 3);
        assert_eq!(rig.measured(), 0);
        rig.ack("b", 2);
        assert_eq!(rig.measured(), 2);
        rig.ack("b", 3);
        rig.ack("b", 3);
        assert_eq!((rig.measured(), rig.floor()), (3, 3));
        let text = rig.progress.metrics.render();
        assert!(text.contains("headgate_control_plane_programmed_everywhere_seconds_count 3"), "{text}");
    }

    #[test]
    fn agents_that_join_or_leave_do_not_distort_the_measurement() {
        let mut rig = Rig::new();
        rig.commit();
        rig.enter("a");
        rig.ack("a", 1);
        rig.commit();
        rig.enter("late");
        rig.ack("a", 2);
        assert_eq!(rig.measured(), 1, "the commit does not wait for an agent that joins");
        rig.ack("late", 1);
        rig.commit();
        rig.ack("a", 3);
        assert_eq!(rig.measured(), 2, "the late agent lacks the version that was newest when it connected");
        rig.ack("late", 2);
        rig.commit();
        rig.ack("a", 4);
        assert_eq!(rig.measured(), 2, "the commit waits for the late agent, now a member");
        rig.leave("late");
        assert_eq!(rig.measured(), 2, "a commit that waited for an agent that left is not measured");
        let outcomes: Vec<_> = rig.progress.changes(0, 256).into_iter().map(|change| change.outcome).collect();
        let [
            LocalOutcome::Done(..),
            LocalOutcome::Done(_, second),
            LocalOutcome::Done(_, third),
            LocalOutcome::Lost(_, lost),
        ] = &outcomes[..]
        else {
            panic!("{outcomes:?}")
        };
        assert_eq!((&**second, &**third, &**lost), ("a", "a", "late"));
        rig.commit();
        rig.ack("a", 5);
        assert_eq!(rig.measured(), 3);
        rig.leave("a");
        rig.commit();
        rig.enter("a");
        rig.ack("a", 6);
        assert_eq!((rig.measured(), rig.floor()), (3, 6), "a commit without members is not measured");
    }

    #[test]
    fn a_commit_is_measured_until_the_kernel_has_it_and_not_until_the_ack_arrives() {
        let mut rig = Rig::new();
        rig.enter("a");
        rig.enter("b");
        let before = Instant::now();
        std::thread::sleep(Duration::from_millis(5));
        rig.commit();
        rig.commit();
        let after = Instant::now() + Duration::from_secs(3_600);
        assert!(rig.progress.changes(0, 256).iter().all(|change| change.outcome == LocalOutcome::Running));
        // Both agents report a time before the second commit, so the age of the second commit is
        // zero. For the first commit, `a` reports a later time than `b`, so this time counts.
        rig.ack_with_times("a", &[(1, after), (2, before)]);
        std::thread::sleep(Duration::from_millis(5));
        rig.ack_with_times("b", &[(2, before)]);
        let recent = rig.progress.recent();
        assert_eq!((recent.commits, recent.p50), (2, Duration::ZERO));
        assert!(recent.max > Duration::ZERO, "{recent:?}");
        // Times of measured commits are dropped.
        assert_eq!(rig.progress.counts().programmed.len(), 0);
        let last = rig.progress.last_changes(1);
        assert!(
            matches!(&last[..], [LocalChange { version: 2, nodes: 2, outcome: LocalOutcome::Done(at, _), .. }] if *at == before)
        );
        let text = rig.progress.metrics.render();
        assert!(text.contains("headgate_control_plane_programmed_on_node_seconds_count 4"), "{text}");
    }

    #[test]
    fn a_member_that_is_stuck_does_not_blind_the_measurement_of_the_others() {
        let mut rig = Rig::new();
        rig.enter("a");
        rig.enter("stuck");
        let mut version = 0;
        for _ in 0..TIMED_COMMITS + 10 {
            rig.commit();
            version += 1;
            rig.ack_with_times("a", &[(version, Instant::now())]);
        }
        assert_eq!(rig.measured(), 0);
        let count = format!("headgate_control_plane_programmed_on_node_seconds_count {version}");
        assert!(rig.progress.metrics.render().contains(&count));
        assert_eq!(rig.progress.counts().programmed.len(), TIMED_COMMITS);
        rig.ack("stuck", version);
        assert_eq!(rig.measured(), RECENT);
    }

    #[test]
    fn agents_are_counted_by_state() {
        let mut rig = Rig::new();
        // Until the end of the test, the commit stays younger than a second.
        rig.commit_received(Some(Instant::now() + Duration::from_secs(3_600)));
        ["a", "b"].into_iter().for_each(|node| rig.enter(node));
        assert_eq!(rig.progress.states(), [(NodeState::Waiting, 2)].into(), "the agents have acknowledged nothing");
        assert_eq!(rig.floor(), 0);
        rig.ack("a", 0);
        rig.ack("b", 0);
        assert_eq!(rig.progress.states(), [(NodeState::UpToDate, 2)].into(), "the commit is younger than a second");
        rig.report("b", |record| record.failed(&v1::ApplyFailed { version: 1, ..Default::default() }));
        let one_each = [(NodeState::UpToDate, 1), (NodeState::Failing, 1)].into();
        assert_eq!(rig.progress.states(), one_each);
        let rejection = v1::Rejection { resource: "Service prod/web".into(), ..Default::default() };
        rig.report("a", |record| record.nack(&v1::Nack { rejections: vec![rejection], ..Default::default() }));
        let web = |rig: &Rig| rig.progress.is_rejected(&[ServiceKey::new("prod", "web")].into());
        assert!(web(&rig));
        rig.ack("b", 1);
        assert_eq!(rig.progress.states(), one_each);
        rig.progress.refresh_metrics();
        assert!(rig.progress.metrics.render().contains("headgate_control_plane_agents{state=\"failing\"} 1"));
        rig.leave("a");
        assert!(!web(&rig));
        rig.progress.store.cut_off(Some("refused".into()));
        assert_eq!(rig.progress.states(), [(NodeState::CutOff, 1)].into());
    }
}

#[cfg(test)]
mod record_tests {
    use super::*;

    #[test]
    fn an_ack_says_when_the_kernel_had_each_version() {
        let now = Instant::now() + Duration::from_secs(1);
        let earlier = |version, ago_microseconds| v1::ProgrammedVersion { version, ago_microseconds };
        let ack = v1::Ack {
            version: 9,
            programmed_ago_microseconds: 10,
            // Version 6 is out of order, 10 is ahead of the ACK, and the age of 8 is impossible.
            earlier: vec![earlier(5, 300), earlier(7, 200), earlier(6, 100), earlier(10, 50), earlier(8, u64::MAX)],
            ..v1::Ack::default()
        };
        let ago = |(version, at): (u64, Instant)| (version, (now - at).as_micros());
        let found: Vec<_> = programmed(&ack, now).into_iter().map(ago).collect();
        assert_eq!(found, [(5, 300), (7, 200), (9, 10)]);
    }

    #[test]
    fn a_difference_that_a_request_found_stays_until_a_later_request_finds_none() {
        let reported = |drift_count, ago_ms| v1::AgentStatus {
            verified: Some(v1::Verified { ago_ms, drift_count, ..v1::Verified::default() }),
            ..v1::AgentStatus::default()
        };
        let requested = |drift_count, is_repaired| v1::NodeVerification {
            drift_count,
            is_repaired,
            ..v1::NodeVerification::default()
        };
        let shown = |record: &Record| record.verified().map(|verified| verified.drift_count);
        let mut record = Record::default();
        record.status(&reported(2, 60_000));
        assert_eq!(shown(&record), Some(2));
        record.verified_on_request(&requested(0, false));
        assert_eq!(shown(&record), Some(0), "the request is newer than the report");
        record.verified_on_request(&requested(1, false));
        record.status(&reported(0, 0));
        assert!(record.has_drift(), "the agent does not see what the replica sees");
        record.verified_on_request(&requested(1, true));
        assert!(!record.has_drift());
    }
}

#[cfg(test)]
mod rejections_tests {
    use super::*;

    fn nack(rejections: &[String], withdrawn: &[String], in_force: u64) -> v1::Nack {
        let rejection = |resource: &String| v1::Rejection { resource: resource.clone(), ..v1::Rejection::default() };
        let rejections = rejections.iter().map(rejection).collect();
        v1::Nack { rejections, withdrawn: withdrawn.to_vec(), in_force, ..v1::Nack::default() }
    }

    fn services(numbers: std::ops::Range<usize>) -> Vec<String> {
        numbers.map(|number| format!("Service prod/web-{number}")).collect()
    }

    #[test]
    fn rejections_concern_their_services_beyond_the_number_that_is_shown() {
        let mut rejections = Rejections::default();
        rejections.nack(&nack(&services(0..80), &[], 80));
        let web = |number: usize| ServiceKey::new("prod", &format!("web-{number}"));
        assert_eq!(rejections.shown().len(), MAX_SHOWN);
        assert!(rejections.concern(&web(3)), "it is not shown, but known");
        rejections.nack(&nack(&[], &services(79..80), 79));
        assert!(rejections.concern(&web(3)) && !rejections.concern(&web(79)) && !rejections.concern(&web(80)));
        let others = ["Endpoint prod/api 10.0.0.1", "endpoints of service dns"].map(str::to_owned);
        rejections.nack(&nack(&others, &services(0..79), 2));
        assert!(
            rejections.concern(&ServiceKey::new("prod", "api")) && rejections.concern(&ServiceKey::new("x", "dns"))
        );
        assert!(!rejections.concern(&web(3)));
        assert!(rejections.reason(&ServiceKey::new("prod", "api")).starts_with("rejected Endpoint prod/api 10.0.0.1"));
    }

    #[test]
    fn forgotten_rejections_concern_every_service_until_they_are_withdrawn() {
        let mut rejections = Rejections::default();
        let (all, kept) = (services(0..MAX_REMEMBERED + 10), MAX_REMEMBERED as u64);
        rejections.nack(&nack(&all, &[], all.len() as u64));
        let other = ServiceKey::new("test", "other");
        assert!(rejections.concern(&other));
        rejections.nack(&nack(&[], &all[..10], kept));
        assert!(rejections.concern(&other), "ten rejections are unknown");
        rejections.nack(&nack(&[], &all[MAX_REMEMBERED..], kept - 10));
        assert!(!rejections.concern(&other) && !rejections.is_empty());
        rejections.nack(&nack(&[], &all, 0));
        assert!(rejections.is_empty() && rejections.shown().is_empty());
    }

    #[test]
    fn a_rejection_that_never_arrived_counts() {
        let mut rejections = Rejections::default();
        rejections.nack(&nack(&services(0..1), &[], 2));
        assert!(rejections.concern(&ServiceKey::new("test", "other")));
    }

    #[test]
    fn texts_from_a_peer_are_cut_between_characters() {
        let text = "ä".repeat(MAX_TEXT_BYTES);
        assert_eq!(clip(&text).len(), MAX_TEXT_BYTES);
        assert_eq!(clip(&format!("a{text}")).len(), MAX_TEXT_BYTES - 1);
        assert_eq!(clip("short"), "short");
    }
}
