//! Agents with a stream, and what they say about themselves.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    net::SocketAddr,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant, SystemTime},
};

use headgate_core::node_state::Reported;
use headgate_proto::v1;
use tonic::Status;

use super::{
    fleet::{Fleet, Seat},
    signal::Signal,
};
use crate::store::{NodeObserver, ResumeMode};

/// Nodes of which it is remembered how many streams they have opened; those that may open as many as ever are forgotten first.
const MAX_RESTING: usize = 65_536;

/// Streams of a node that may be opened at once, and how often further ones. Each may have a large step of the log compacted for it alone.
const STREAMS_AT_ONCE: u32 = 64;
const STREAM_INTERVAL: Duration = Duration::from_millis(250);

/// Rejections and the like kept for one agent.
const MAX_LISTED: usize = 64;

/// Bytes kept of a text that an agent sent.
const MAX_TEXT_BYTES: usize = 512;

/// An ACK that claims to have waited for longer is not believed.
const MAX_AGO: Duration = Duration::from_secs(3_600);

/// Why a stream ends.
#[derive(Debug, Clone)]
pub(super) struct End {
    pub(super) status: Status,
    /// Label of the counter.
    pub(super) reason: &'static str,
    /// True when it ends for what the agent did or is.
    pub(super) is_refusal: bool,
}

impl End {
    /// The agent is at fault.
    pub(super) fn refusal(reason: &'static str, status: Status) -> Self {
        Self { status, reason, is_refusal: true }
    }

    /// Nobody is at fault.
    pub(super) fn plain(reason: &'static str, status: Status) -> Self {
        Self { status, reason, is_refusal: false }
    }
}

/// One stream of an agent.
#[derive(Debug)]
pub(super) struct Agent {
    pub(super) node: Arc<str>,
    pub(super) address: SocketAddr,
    pub(super) agent_version: String,
    pub(super) connected: SystemTime,
    pub(super) resume: ResumeMode,
    pub(super) resumed_resources: AtomicU64,
    sent_version: AtomicU64,
    /// The newest version that it has said anything about: that it is programmed, or could not be.
    answered_version: AtomicU64,
    end: OnceLock<End>,
    asked_to_move: AtomicBool,
    signal: Arc<Signal>,
    record: Mutex<Record>,
    /// Where the fleet counts it, while it has a stream that was not replaced.
    place: Mutex<Option<(Arc<Fleet>, Seat)>>,
}

/// What an agent said last.
#[derive(Debug, Clone, Default)]
pub(super) struct Record {
    pub(super) backend: String,
    pub(super) degraded: Vec<String>,
    pub(super) programmed_version: u64,
    has_acknowledged: bool,
    pub(super) apply_microseconds: u64,
    pub(super) services_planned: u32,
    pub(super) objects_written: u32,
    pub(super) last_error: String,
    /// The version that it is about.
    failed_version: u64,
    /// Shared with the fleet's table.
    pub(super) rejections: Arc<Vec<v1::Rejection>>,
}

impl Agent {
    pub(super) fn new(
        node: Arc<str>,
        address: SocketAddr,
        hello: &v1::Hello,
        resume: ResumeMode,
        signal: Arc<Signal>,
    ) -> Self {
        let agent = Self {
            node,
            address,
            agent_version: clip(&hello.agent_version).to_owned(),
            connected: SystemTime::now(),
            resume,
            resumed_resources: AtomicU64::new(0),
            sent_version: AtomicU64::new(0),
            answered_version: AtomicU64::new(0),
            end: OnceLock::new(),
            asked_to_move: AtomicBool::new(false),
            signal,
            record: Mutex::default(),
            place: Mutex::default(),
        };
        if let Some(status) = &hello.status {
            agent.record().status(status);
        }
        agent
    }

    /// Ends the stream, unless something else has ended it already.
    pub(super) fn end(&self, end: End) {
        if self.end.set(end).is_ok() {
            self.signal.wake();
        }
    }

    /// Why the stream has to end, if it has.
    pub(super) fn ended(&self) -> Option<&End> {
        self.end.get()
    }

    /// Has the stream ask the agent to go to another replica.
    pub(super) fn ask_to_move(&self) {
        self.asked_to_move.store(true, Ordering::Release);
        self.signal.wake();
    }

    /// True once after each [`Self::ask_to_move`].
    pub(super) fn take_request_to_move(&self) -> bool {
        self.asked_to_move.load(Ordering::Acquire) && self.asked_to_move.swap(false, Ordering::AcqRel)
    }

    /// What wakes the stream.
    pub(super) fn signal(&self) -> &Arc<Signal> {
        &self.signal
    }

    pub(super) fn sent_version(&self) -> u64 {
        self.sent_version.load(Ordering::Acquire)
    }

    /// Takes in what the agent says, for the fleet too.
    pub(super) fn update(&self, change: impl FnOnce(&mut Record)) {
        self.update_programmed(&[], change);
    }

    /// The same with an ACK, which has come at `now`.
    pub(super) fn ack(&self, ack: &v1::Ack, now: Instant) {
        self.answered(ack.version);
        self.update_programmed(&programmed(ack, now), |record| record.ack(ack));
    }

    /// Takes note that the agent has said something about a version, which was sent to it.
    pub(super) fn answered(&self, version: u64) {
        self.answered_version.fetch_max(version, Ordering::Relaxed);
    }

    /// The newest version that was answered.
    pub(super) fn answered_version(&self) -> u64 {
        self.answered_version.load(Ordering::Relaxed)
    }

    fn update_programmed(&self, programmed: &[(u64, Instant)], change: impl FnOnce(&mut Record)) {
        let mut record = self.record();
        change(&mut record);
        if let Some((fleet, seat)) = &mut *self.place() {
            fleet.update(&self.node, seat, &record, programmed);
        }
    }

    fn enter(&self, fleet: &Arc<Fleet>) {
        let record = self.record();
        *self.place() = Some((Arc::clone(fleet), fleet.enter(&self.node, &record)));
    }

    fn leave(&self) {
        if let Some((fleet, seat)) = self.place().take() {
            fleet.leave(&self.node, seat);
        }
    }

    /// Locked after the record, never before it.
    fn place(&self) -> MutexGuard<'_, Option<(Arc<Fleet>, Seat)>> {
        self.place.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// To be called before the message is put on the stream.
    pub(super) fn set_sent_version(&self, version: u64) {
        self.sent_version.store(version, Ordering::Release);
    }

    pub(super) fn record(&self) -> MutexGuard<'_, Record> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Record {
    /// The version that the kernel has, as far as that is known. 0 when a version failed that had been acknowledged: it was programmed anew because the
    /// rules were found to be others, and nobody knows which of them are left.
    pub(super) fn kernel_version(&self) -> u64 {
        let is_lost = !self.last_error.is_empty() && self.failed_version <= self.programmed_version;
        if is_lost { 0 } else { self.programmed_version }
    }

    /// It has acknowledged a state on this stream, and its kernel has not lost it.
    pub(super) fn has_state(&self) -> bool {
        let is_lost = self.programmed_version > 0 && self.kernel_version() == 0;
        self.has_acknowledged && !is_lost
    }

    /// What it has reported, where everything up to version `settled` has been known for a while.
    pub(super) fn reported(&self, settled: u64) -> Reported {
        let is_settled = self.kernel_version() >= settled;
        Reported { has_state: self.has_state(), is_failing: self.is_failing(), is_settled }
    }

    /// The last attempt failed, or something is rejected.
    pub(super) fn is_failing(&self) -> bool {
        !self.last_error.is_empty() || !self.rejections.is_empty()
    }

    pub(super) fn status(&mut self, status: &v1::AgentStatus) {
        self.backend = clip(&status.backend).to_owned();
        self.degraded = status.degraded.iter().take(MAX_LISTED).map(|text| clip(text).to_owned()).collect();
    }

    pub(super) fn ack(&mut self, ack: &v1::Ack) {
        self.programmed_version = self.programmed_version.max(ack.version);
        self.has_acknowledged = true;
        self.apply_microseconds = ack.apply_microseconds;
        self.services_planned = ack.services_planned;
        self.objects_written = ack.objects_written;
        // An ACK may have waited while a newer version failed.
        if ack.version >= self.failed_version {
            self.last_error.clear();
        }
    }

    pub(super) fn failed(&mut self, failed: &v1::ApplyFailed) {
        self.failed_version = failed.version;
        self.last_error = format!("version {}, attempt {}: {}", failed.version, failed.attempts, clip(&failed.error));
    }

    /// Takes in rejections and withdrawals; a resource that was rejected before is listed once, with the newer reason.
    pub(super) fn nack(&mut self, nack: &v1::Nack) {
        let rejections = Arc::make_mut(&mut self.rejections);
        if !nack.withdrawn.is_empty() && !rejections.is_empty() {
            let withdrawn: HashSet<&str> = nack.withdrawn.iter().map(|resource| clip(resource)).collect();
            rejections.retain(|old| !withdrawn.contains(old.resource.as_str()));
        }
        // Only so many are kept, so that the rest need not be compared: a peer decides how many there are.
        let skipped = nack.rejections.len().saturating_sub(MAX_LISTED);
        for rejection in &nack.rejections[skipped..] {
            let rejection = v1::Rejection {
                resource: clip(&rejection.resource).to_owned(),
                field: clip(&rejection.field).to_owned(),
                reason: clip(&rejection.reason).to_owned(),
            };
            rejections.retain(|old| old.resource != rejection.resource);
            rejections.push(rejection);
        }
        let excess = rejections.len().saturating_sub(MAX_LISTED);
        rejections.drain(..excess);
    }
}

/// The versions that an ACK names, in ascending order, and when the kernel had them. What cannot be so is left out.
fn programmed(ack: &v1::Ack, now: Instant) -> Vec<(u64, Instant)> {
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

/// A text of a peer's, cut at a character's boundary.
pub(super) fn clip(text: &str) -> &str {
    &text[..text.floor_char_boundary(MAX_TEXT_BYTES)]
}

/// All agents with a stream, one a node.
#[derive(Debug)]
pub(super) struct Agents {
    table: Mutex<Table>,
    fleet: Arc<Fleet>,
}

#[derive(Debug, Default)]
struct Table {
    present: BTreeMap<Arc<str>, Arc<Agent>>,
    /// When nodes may open as many streams at once as ever; those that may already among them.
    rested_at: HashMap<Arc<str>, Instant>,
}

impl Agents {
    pub(super) fn new(fleet: Arc<Fleet>) -> Self {
        Self { table: Mutex::default(), fleet }
    }

    /// What all of them have programmed.
    pub(super) fn fleet(&self) -> &Arc<Fleet> {
        &self.fleet
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True when a node may open a stream now, and has not opened too many before.
    pub(super) fn may_open(&self, node: &str, now: Instant) -> bool {
        let mut table = self.table();
        let rested_at = table.rested_at.get(node).copied().unwrap_or(now).max(now) + STREAM_INTERVAL;
        if rested_at > now + STREAM_INTERVAL * STREAMS_AT_ONCE {
            return false;
        }
        if table.rested_at.len() >= MAX_RESTING {
            table.rested_at.retain(|_, rested_at| *rested_at > now);
        }
        table.rested_at.insert(node.into(), rested_at);
        true
    }

    /// Enters a stream. The node's older one, if any, is ended.
    ///
    /// Nothing that an earlier stream acknowledged counts for it, also where it goes on by the log: the node may have rebooted in between, and then
    /// its kernel has nothing. An agent says at once what is programmed (contract, 7).
    pub(super) fn enter(&self, agent: &Arc<Agent>) {
        let old = self.table().present.insert(Arc::clone(&agent.node), Arc::clone(agent));
        if let Some(old) = &old {
            old.leave();
        }
        agent.enter(&self.fleet);
        if let Some(old) = old {
            let text = format!("node {} has opened a newer stream", agent.node);
            old.end(End::plain("replaced", Status::aborted(text)));
        }
    }

    /// Takes a stream out, unless a newer one of the same node has taken its place.
    pub(super) fn leave(&self, agent: &Arc<Agent>) {
        agent.leave();
        let mut table = self.table();
        if table.present.get(&agent.node).is_some_and(|present| Arc::ptr_eq(present, agent)) {
            table.present.remove(&agent.node);
        }
    }

    /// The stream of a node.
    pub(super) fn has(&self, node: &str) -> bool {
        self.table().present.contains_key(node)
    }

    /// Streams in order of node name.
    pub(super) fn all(&self) -> Vec<Arc<Agent>> {
        self.table().present.values().cloned().collect()
    }

    pub(super) fn len(&self) -> usize {
        self.table().present.len()
    }
}

impl NodeObserver for Agents {
    fn node_changed(&self, name: &str) {
        if let Some(agent) = self.table().present.get(name) {
            agent.signal.change_node();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ack_says_when_the_kernel_had_what_it_covers() {
        let now = Instant::now() + Duration::from_secs(1);
        let earlier = |version, ago_microseconds| v1::ProgrammedVersion { version, ago_microseconds };
        let ack = v1::Ack {
            version: 9,
            programmed_ago_microseconds: 10,
            // Out of order, ahead of the ACK, and before there was any clock.
            earlier: vec![earlier(5, 300), earlier(7, 200), earlier(6, 100), earlier(10, 50), earlier(8, u64::MAX)],
            ..v1::Ack::default()
        };
        let ago = |(version, at): (u64, Instant)| (version, (now - at).as_micros());
        let found: Vec<_> = programmed(&ack, now).into_iter().map(ago).collect();
        assert_eq!(found, [(5, 300), (7, 200), (9, 10)]);
    }

    #[test]
    fn a_node_opens_some_streams_at_once_and_then_a_few_a_second() {
        let metrics = Arc::new(crate::metrics::Metrics::default());
        let store = Arc::new(crate::store::Store::new(crate::store::Limits::default(), Arc::clone(&metrics)));
        let (agents, start) = (Agents::new(Arc::new(Fleet::new(store, metrics))), Instant::now());
        let opened = (0..1_000).filter(|_| agents.may_open("n1", start)).count();
        assert_eq!(opened, STREAMS_AT_ONCE as usize);
        assert!(agents.may_open("n2", start), "each node for itself");
        let later = start + STREAM_INTERVAL * 3;
        assert_eq!((0..10).filter(|_| agents.may_open("n1", later)).count(), 3);
        assert_eq!((0..1_000).filter(|_| agents.may_open("n1", later + STREAM_INTERVAL * 1_000)).count(), opened);
    }

    #[test]
    fn texts_of_a_peer_are_cut_between_characters() {
        let text = "ä".repeat(MAX_TEXT_BYTES);
        assert_eq!(clip(&text).len(), MAX_TEXT_BYTES);
        assert_eq!(clip(&format!("a{text}")).len(), MAX_TEXT_BYTES - 1);
        assert_eq!(clip("short"), "short");
    }
}
