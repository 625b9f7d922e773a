//! What the whole fleet has programmed. Agents are counted by version, so an ACK costs one look-up
//! in a map of the distinct versions.
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
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use headgate_core::{
    ServiceKey,
    node_state::{NodeState, Reported, SETTLED},
};
use tokio::sync::watch;

use super::{Record, Rejections};
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
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CountedAgent {
    version: u64,
    is_failing: bool,
    has_state: bool,
    is_stalled: bool,
    /// The newest version when the agent connected; `None` once the agent has acknowledged that
    /// version and is a member.
    joins_at: Option<u64>,
}

#[derive(Debug, Default)]
struct FleetCounts {
    /// The number of agents with a stream, by their reports.
    all: BTreeMap<Reports, usize>,
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

/// The reports of an agent: whether it is stalled, whether it fails, whether it has
/// acknowledged a state, and the version that its kernel has.
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
        if record.rejections.is_empty() || record.is_stalled() {
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

    /// Returns the version that the kernels of all agents have, except those that are stalled.
    /// Without agents, returns the highest number.
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

    /// Returns a receiver that is notified when an agent connects, leaves or changes its
    /// rejections, and when a Node changes.
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

    /// Counts an agent that has connected.
    pub(crate) fn enter(&self, node: &Arc<str>, record: &Record) -> CountedAgent {
        let head = self.store.version();
        let joins_at = Some(head);
        let mut counted = CountedAgent { version: 0, is_failing: false, has_state: false, is_stalled: false, joins_at };
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
            // The new counts are added before the old counts are removed, so that there is never a
            // moment without members.
            counts.count(*counted);
            counts.discount(old);
            self.measure(node, &mut counts);
        }
        self.announce(&counts, has_rejections || counted.is_stalled != old.is_stalled);
    }

    /// Discounts an agent that has left.
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

    /// Returns the number of agents in each state.
    pub(crate) fn states(&self) -> AgentStates {
        let (source, settled) = (self.store.source_state(), self.store.version_before(SETTLED));
        let mut states = AgentStates::new();
        for ((_, is_failing, has_state, version), count) in &self.counts().all {
            let is_settled = *version >= settled;
            let reported = Reported { has_state: *has_state, is_failing: *is_failing, is_settled };
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
        self.is_stalled = record.is_stalled();
    }

    fn reports(self) -> Reports {
        (self.is_stalled, self.is_failing, self.has_state, self.version)
    }

    /// Returns the version that the kernel has, if the agent is a member.
    pub(super) fn member_version(self) -> Option<u64> {
        self.joins_at.is_none().then_some(self.version)
    }

    /// Makes the agent a member if its kernel has the version that was the newest version when the
    /// agent connected.
    fn join(&mut self) {
        self.joins_at = self.joins_at.filter(|head| self.version < *head);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use headgate_core::{Change, ServiceCidr};
    use headgate_proto::v1;

    use super::*;
    use crate::{
        store::Limits,
        transaction::{Sink as _, Transaction, TriggeredChange},
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
            self.commits += 1;
            let cidrs = vec![ipnet::IpNet::new([10, (self.commits % 256) as u8, 0, 0].into(), 16).unwrap()];
            let change = Change::ServiceCidr(ServiceCidr { name: "kubernetes".into(), cidrs });
            let changes = vec![TriggeredChange { change, trigger_unix_ms: 0 }];
            self.progress.store.commit(Transaction { changes, ..Transaction::default() });
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
        rig.commit();
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

    #[test]
    fn agents_of_a_replica_without_a_listed_source_are_waiting() {
        let metrics = Arc::new(Metrics::default());
        let store = Arc::new(Store::new(Limits::default(), Arc::clone(&metrics)));
        let progress = Progress::new(store, metrics);
        let mut record = Record::default();
        let mut counted = progress.enter(&"a".into(), &record);
        record.ack(&v1::Ack::default());
        progress.update(&"a".into(), &mut counted, &record, &[]);
        assert_eq!(progress.states(), [(NodeState::Waiting, 1)].into());
        progress.refresh_metrics();
        let text = progress.metrics.render();
        assert!(text.contains("headgate_control_plane_agents{state=\"waiting\"} 1"), "{text}");
        assert!(text.contains("headgate_control_plane_agents{state=\"up_to_date\"} 0"), "{text}");
    }
}
