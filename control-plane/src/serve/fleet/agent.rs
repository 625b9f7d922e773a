//! Data about one stream of an agent. The fleet and the API read these data.

use std::{
    collections::BTreeSet,
    net::SocketAddr,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant, SystemTime},
};

use headgate_core::{
    ServiceKey,
    node_state::{NodeState, SETTLED, SourceState},
};
use headgate_proto::v1;

use super::{
    Answers, End, Queries, Record,
    progress::{CountedAgent, Progress},
    record::programmed,
    rejections::clip,
};
use crate::{
    serve::context::{Context, Signal, milliseconds},
    store::{ResumeMode, Store},
    transaction::Problem,
};

/// A stream that is replaced within this time, from another address, may have been thrown out by a
/// rival.
const RIVALRY: Duration = Duration::from_secs(60);

/// An agent that gets another address replaces a stream now and then, but not so many in a row.
const RIVAL_STREAMS: u32 = 4;

/// One stream of an agent. The stream's session, `Inspect` and the fleet share this value.
#[derive(Debug)]
pub(crate) struct Agent {
    pub(crate) node: Arc<str>,
    pub(crate) address: SocketAddr,
    pub(crate) agent_version: String,
    pub(crate) queries: Queries,
    /// Requests of the agent about pods of its node.
    pub(crate) barriers: Answers,
    pub(crate) connected: SystemTime,
    /// The same moment by the clock that never steps.
    entered: Instant,
    /// How many streams of the node in a row were replaced from another address soon after their
    /// begin, and the address of the last one; empty if this stream replaced none.
    rivals: OnceLock<(u32, SocketAddr)>,
    pub(crate) resume: ResumeMode,
    pub(crate) resumed_resources: AtomicU64,
    sent_version: AtomicU64,
    /// The newest version that the agent has answered, with an ACK or with a failed attempt.
    answered_version: AtomicU64,
    end: OnceLock<End>,
    asked_to_move: AtomicBool,
    /// Buckets to send again, because the agent's resources differ. Empty most of the time.
    send_again: Mutex<BTreeSet<u16>>,
    has_to_send_again: AtomicBool,
    /// Wakes the stream.
    pub(crate) signal: Arc<Signal>,
    record: Mutex<Record>,
    /// How the fleet counts the agent; `None` after the stream ended or was replaced.
    counted: Mutex<Option<(Arc<Progress>, CountedAgent)>>,
}

impl Agent {
    pub(crate) fn new(
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
            queries: Queries::default(),
            barriers: Answers::default(),
            connected: SystemTime::now(),
            entered: Instant::now(),
            rivals: OnceLock::new(),
            resume,
            resumed_resources: AtomicU64::new(0),
            sent_version: AtomicU64::new(0),
            answered_version: AtomicU64::new(0),
            end: OnceLock::new(),
            asked_to_move: AtomicBool::new(false),
            send_again: Mutex::default(),
            has_to_send_again: AtomicBool::new(false),
            signal,
            record: Mutex::default(),
            counted: Mutex::default(),
        };
        if let Some(status) = &hello.status {
            agent.record().status(status);
        }
        agent
    }

    /// Ends the stream, unless it has ended already.
    pub(crate) fn end(&self, end: End) {
        if self.end.set(end).is_ok() {
            self.signal.wake();
        }
    }

    /// Notes that this stream replaces an older one, and logs a rivalry, each time that the number
    /// of streams has doubled. An agent that connects again from its address is no rival of itself.
    pub(super) fn replace(&self, old: &Self) {
        let before = old.rivals.get().map_or(0, |(count, _)| *count);
        let is_rival = old.entered.elapsed() < RIVALRY && old.address.ip() != self.address.ip();
        let count = if is_rival { before.saturating_add(1) } else { 0 };
        let _ = self.rivals.set((count, old.address));
        if let Some(Problem { object, message, .. }) = self.rivalry().filter(|_| count.is_power_of_two()) {
            tracing::warn!(object, "{message}");
        }
    }

    /// Returns the problem of agents that throw each other out; `None` if they do not.
    fn rivalry(&self) -> Option<Problem> {
        let rivals = self.rivals.get().filter(|_| self.entered.elapsed() < RIVALRY);
        let (count, other) = rivals.filter(|(count, _)| *count >= RIVAL_STREAMS)?;
        let message = format!(
            "{count} times in a row, a stream from another address has replaced the stream of this node (last {other} by {}): if two machines use this \
             node name, start each agent with the --node-name of its own node",
            self.address
        );
        Some(Problem { object: format!("Node {}", self.node), message, ..Problem::default() })
    }

    /// Returns the problems of the node that people have to solve.
    pub(crate) fn problems(&self) -> impl Iterator<Item = Problem> {
        self.rivalry().into_iter().chain(self.stall_problem())
    }

    /// Returns the problem of a node for which nobody waits any more.
    pub(crate) fn stall_problem(&self) -> Option<Problem> {
        let message = "pods that stop or start have waited for this node too long, because it did not confirm what its kernel has: they hardly wait for it \
                       now, and their answers are incomplete. Look at the log of its agent, or delete the Node if it is gone";
        let object = format!("Node {}", self.node);
        self.record().is_stalled().then(|| Problem { object, message: message.to_owned(), ..Problem::default() })
    }

    /// Returns why the stream has to end, or `None` if the stream continues.
    pub(crate) fn ended(&self) -> Option<&End> {
        self.end.get()
    }

    /// Makes the stream ask the agent to move to another replica.
    pub(crate) fn ask_to_move(&self) {
        self.asked_to_move.store(true, Ordering::Release);
        self.signal.wake();
    }

    /// Returns true once after each [`Self::ask_to_move`].
    pub(crate) fn take_request_to_move(&self) -> bool {
        self.asked_to_move.load(Ordering::Acquire) && self.asked_to_move.swap(false, Ordering::AcqRel)
    }

    /// Makes the stream send these buckets in full.
    pub(crate) fn send_again(&self, buckets: &BTreeSet<u16>) {
        self.send_again.lock().unwrap_or_else(PoisonError::into_inner).extend(buckets);
        self.has_to_send_again.store(true, Ordering::Release);
        self.signal.wake();
    }

    /// Returns the buckets to send again, once after each [`Self::send_again`]. Each visit of the
    /// stream reads an atomic value and takes no lock.
    pub(crate) fn take_send_again(&self) -> Option<BTreeSet<u16>> {
        let is_set = self.has_to_send_again.load(Ordering::Acquire);
        (is_set && self.has_to_send_again.swap(false, Ordering::AcqRel))
            .then(|| std::mem::take(&mut *self.send_again.lock().unwrap_or_else(PoisonError::into_inner)))
    }

    pub(crate) fn sent_version(&self) -> u64 {
        self.sent_version.load(Ordering::Acquire)
    }

    /// Applies a report of the agent to its record, and updates the counts of the fleet.
    pub(crate) fn update(&self, change: impl FnOnce(&mut Record)) {
        self.update_programmed(&[], change);
    }

    /// Applies an ACK that arrived at `now`.
    pub(crate) fn ack(&self, ack: &v1::Ack, now: Instant) {
        self.answered(ack.version);
        self.update_programmed(&programmed(ack, now), |record| record.ack(ack));
    }

    /// Records that the agent has answered a version that this stream sent.
    pub(crate) fn answered(&self, version: u64) {
        self.answered_version.fetch_max(version, Ordering::Relaxed);
    }

    /// Returns the newest version that the agent has answered.
    pub(crate) fn answered_version(&self) -> u64 {
        self.answered_version.load(Ordering::Relaxed)
    }

    fn update_programmed(&self, programmed: &[(u64, Instant)], change: impl FnOnce(&mut Record)) {
        let mut record = self.record();
        change(&mut record);
        if let Some((progress, counted)) = &mut *self.counted() {
            progress.update(&self.node, counted, &record, programmed);
        }
    }

    pub(super) fn enter(&self, progress: &Arc<Progress>) {
        let record = self.record();
        *self.counted() = Some((Arc::clone(progress), progress.enter(&self.node, &record)));
    }

    pub(super) fn leave(&self) {
        self.queries.close();
        self.barriers.close();
        if let Some((progress, counted)) = self.counted().take() {
            progress.leave(&self.node, counted);
        }
    }

    /// Locks `counted`. A caller that also locks the record must lock the record first.
    fn counted(&self) -> MutexGuard<'_, Option<(Arc<Progress>, CountedAgent)>> {
        self.counted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the newest version that the stream sends. Call this method before the message is
    /// written, so that no ACK of the version arrives earlier.
    pub(crate) fn set_sent_version(&self, version: u64) {
        self.sent_version.store(version, Ordering::Release);
    }

    pub(crate) fn record(&self) -> MutexGuard<'_, Record> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns for how many milliseconds the agent has been behind the head of the log. Time before
    /// the agent connected does not count.
    pub(crate) fn lag_ms(&self, store: &Store, programmed_version: u64) -> u64 {
        store.lagging_since(programmed_version).map_or(0, |since| milliseconds(since.max(self.entered).elapsed()))
    }

    /// Describes an agent that has not programmed `version`, or rejects one of the services.
    pub(crate) fn laggard(&self, context: &Context, version: u64, services: &BTreeSet<ServiceKey>) -> v1::Laggard {
        let (programmed_version, reason, is_stalled) = {
            let record = self.record();
            let rejected = services.iter().find(|key| record.rejections.concern(key));
            let reported = record.reported(context.store.version_before(SETTLED));
            let reason = match rejected {
                _ if !record.last_error.is_empty() => record.last_error.clone(),
                Some(key) if record.kernel_version() >= version => record.rejections.reason(key),
                _ => {
                    let source = context.store.source_state();
                    self.reason(&context.store, source, NodeState::of(source, reported))
                }
            };
            (record.programmed_version, reason, record.is_stalled())
        };
        v1::Laggard {
            node: self.node.to_string(),
            programmed_version,
            lag_ms: self.lag_ms(&context.store, programmed_version),
            version,
            sent_version: self.sent_version(),
            reason,
            is_stalled,
            replica: context.settings.replica_name.clone(),
        }
    }

    /// Returns why the node is waiting or cut off, as a sentence; empty for other states. `source`
    /// is the state of the replica's source.
    pub(crate) fn reason(&self, store: &Store, source: SourceState, state: NodeState) -> String {
        let held = match self.resume {
            ResumeMode::Full => "the node holds no state",
            ResumeMode::Log | ResumeMode::Digests => "the node forwards with the state that it had before",
        };
        match (state, source) {
            (NodeState::Waiting, SourceState::Unlisted) => format!("the replica has not listed its source; {held}"),
            (NodeState::Waiting, _) => format!("the agent has acknowledged nothing on this stream; {held}"),
            (NodeState::CutOff, _) => {
                let problem = store.source_problem().unwrap_or_default();
                format!("the replica is cut off from its source: {problem}")
            }
            (NodeState::UpToDate | NodeState::Behind | NodeState::Failing, _) => String::new(),
        }
    }
}
