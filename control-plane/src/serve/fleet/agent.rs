//! One stream of an agent, as fleet and API see it: queries, requests, and whether it is late.

use std::{
    collections::{BTreeSet, HashMap, VecDeque},
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
use prost::Message as _;
use tokio::{
    sync::mpsc::{Receiver, Sender, channel},
    task::AbortHandle,
};
use tonic::Status;

use super::{
    Record,
    progress::{CountedAgent, Progress, clip, programmed},
};
use crate::{
    model::Problem,
    serve::context::{Context, Signal, Warning, milliseconds, unix_ms},
    store::{ResumeMode, Store},
};

/// A stream that is replaced so soon from another address may have been thrown out by a rival.
const RIVALRY: Duration = Duration::from_secs(60);

/// An agent that gets another address replaces a stream now and then, but not so many in a row.
const RIVAL_STREAMS: u32 = 4;

/// One stream of an agent. The stream's session, `Inspect` and the fleet share this value.
#[derive(Debug)]
pub(crate) struct Agent {
    pub(crate) node: Arc<str>,
    pub(crate) address: SocketAddr,
    pub(crate) agent_version: String,
    /// The other service proxy of the node; empty if the agent programs the node.
    pub(crate) standby: String,
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
            standby: clip(&hello.standby).to_owned(),
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
        agent.record().is_standby = !hello.standby.is_empty();
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

    /// Returns true if another agent throws this one out.
    pub(crate) fn has_rivals(&self) -> bool {
        self.rivalry().is_some()
    }

    /// Returns the problems of the node that people have to solve.
    pub(crate) fn problems(&self) -> impl Iterator<Item = Problem> {
        self.rivalry().into_iter().chain(self.stall_problem())
    }

    /// Returns the problem of a node for which nobody waits any more.
    pub(crate) fn stall_problem(&self) -> Option<Problem> {
        let message = "pods that stop or start have waited for this node too long, because it did not confirm what its kernel has: they hardly wait for it \
                       now, and their answers are incomplete. Look at the log of its agent, or delete the Node if it is gone";
        let object = || format!("Node {}", self.node);
        self.record().is_stalled().then(|| Problem {
            object: object(),
            message: message.to_owned(),
            ..Problem::default()
        })
    }

    /// Returns why the stream has to end, or `None` if the stream continues.
    pub(crate) fn ended(&self) -> Option<&End> {
        self.end.get()
    }

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

    /// Returns the buckets to send again, once. A visit without any takes no lock.
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
        self.update_programmed(&[], |record| {
            record.revision += 1;
            change(record);
        });
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

    /// Sets the newest version that is sent, before it is written, so before its ACK.
    pub(crate) fn set_sent_version(&self, version: u64) {
        self.sent_version.store(version, Ordering::Release);
    }

    pub(crate) fn record(&self) -> MutexGuard<'_, Record> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// For how many milliseconds the agent has been behind, since it connected at most.
    pub(crate) fn lag_ms(&self, store: &Store, programmed_version: u64) -> u64 {
        store.lagging_since(programmed_version).map_or(0, |since| milliseconds(since.max(self.entered).elapsed()))
    }

    /// Returns the version that the agent's kernel has, if commits wait for the agent.
    pub(crate) fn member_version(&self) -> Option<u64> {
        self.counted().as_ref().and_then(|(_, counted)| counted.member_version())
    }

    /// Describes the agent for people.
    pub(crate) fn info(&self, context: &Context) -> v1::AgentInfo {
        let store = &context.store;
        let record = self.record().clone();
        let source = store.source_state();
        let state = NodeState::of(source, record.reported(store.version_before(SETTLED)));
        let rejection = |rejection: &v1::Rejection| v1::Problem {
            object: rejection.resource.clone(),
            field: rejection.field.clone(),
            message: rejection.reason.clone(),
            origin: String::new(),
        };
        let verified = record.verified().cloned();
        let (zone, pool) = store.place_of(&self.node);
        v1::AgentInfo {
            node: self.node.to_string(),
            address: self.address.to_string(),
            agent_version: self.agent_version.clone(),
            backend: record.backend,
            degraded: record.degraded.into_iter().chain(self.problems().map(|problem| problem.message)).collect(),
            head_version: store.version(),
            sent_version: self.sent_version(),
            programmed_version: record.programmed_version,
            lag_ms: if record.is_standby { 0 } else { self.lag_ms(store, record.programmed_version) },
            apply_microseconds: record.apply_microseconds,
            services_planned: record.services_planned,
            objects_written: record.objects_written,
            resume: self.resume.as_str().into(),
            resumed_resources: self.resumed_resources.load(Ordering::Relaxed),
            connected_unix_ms: unix_ms(self.connected),
            last_error: record.last_error,
            rejections: record.rejections.shown().iter().map(rejection).collect(),
            state: state.as_str().into(),
            reason: self.reason(store, source, state),
            verified_unix_ms: verified
                .as_ref()
                .map_or(0, |verified| unix_ms(SystemTime::now() - verified.at.elapsed())),
            drift_count: verified.as_ref().map_or(0, |verified| verified.drift_count),
            drift: verified.map(|verified| verified.drift).unwrap_or_default(),
            replica: context.settings.replica_name.clone(),
            departed_ms: 0,
            zone,
            pool,
            rejected_count: record.rejections.count(),
        }
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
            standby: self.standby.clone(),
        }
    }

    /// Why the node is waiting, cut off or in standby, as a sentence; empty for other states.
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
            (NodeState::Standby, _) => format!("{} runs", self.standby),
            (NodeState::UpToDate | NodeState::Behind | NodeState::Failing, _) => String::new(),
        }
    }
}

// Decides whether an agent is late.
//
// An agent may hang or read slowly. The replica sends messages to such an agent until the socket
// is full, which may take minutes. Each of these messages costs as much time as a message to any
// other agent. Late agents are visited last ([`crate::serve::context::Visits`]), so that they do
// not delay other agents.

/// The time after which an agent that has not answered a version is late. A normal agent sends ACKs
/// 150 to 350 ms apart. An agent that needs more than a second for an ACK programs its kernel
/// slowly, so a later visit hardly delays this agent.
const LATE_AFTER: Duration = Duration::from_secs(1);

/// Measures how long an agent has not answered.
#[derive(Debug, Default)]
pub(crate) struct Lateness {
    /// A version without an answer, and a time by which this version had been sent.
    unanswered: Option<(u64, tokio::time::Instant)>,
}

impl Lateness {
    /// Returns true if the agent is late at `now`. An agent becomes late when a version has had no
    /// answer for [`LATE_AFTER`]. The agent stays late until it answers this version. Call this
    /// method often, because the wait for an answer is measured from one call to the next.
    pub(crate) fn look(&mut self, sent_version: u64, answered_version: u64, now: tokio::time::Instant) -> bool {
        match self.unanswered {
            Some((version, since)) if version > answered_version => now.saturating_duration_since(since) >= LATE_AFTER,
            _ => {
                self.unanswered = (sent_version > answered_version).then_some((sent_version, now));
                false
            }
        }
    }
}

// The queries on one stream that the agent has not answered yet (discovery.proto, section 17).

/// The maximum number of unanswered queries on a stream.
const MAX_ON_STREAM: usize = 4;

const MAX_ANSWER_BYTES: usize = 1 << 20;

/// The maximum number of parts that wait for the client. Agents send fewer parts in an answer.
const MAX_WAITING_PARTS: usize = 128;

/// The unanswered queries on one stream.
#[derive(Debug, Default)]
pub(crate) struct Queries {
    /// True if a query was not sent. Each visit reads this without a lock.
    has_unsent: AtomicBool,
    open: Mutex<OpenQueries>,
}

#[derive(Debug, Default)]
struct OpenQueries {
    last_id: u64,
    unanswered: Vec<Unanswered>,
    /// True after the stream has ended.
    is_over: bool,
}

#[derive(Debug)]
struct Unanswered {
    id: u64,
    /// `None` after the query was sent.
    unsent: Option<v1::NodeQuery>,
    received_bytes: usize,
    /// The parts of the answer that wait for the client.
    parts: Sender<Result<v1::Answer, Status>>,
}

impl Queries {
    /// Returns a query that has not been sent on the stream yet.
    pub(crate) fn take_unsent(&self) -> Option<v1::Query> {
        if !self.has_unsent.load(Ordering::Acquire) {
            return None;
        }
        let mut open = self.open();
        let mut unsent = open.unanswered.iter_mut().filter(|query| query.unsent.is_some());
        let next = unsent.next().map(|query| v1::Query { id: query.id, query: query.unsent.take() });
        self.has_unsent.store(unsent.next().is_some(), Ordering::Release);
        next
    }

    /// Passes on a part of an answer. Returns false if the query is unknown, or its client gone.
    pub(crate) fn answer(&self, answer: v1::Answer) -> bool {
        let mut open = self.open();
        let Some(index) = open.unanswered.iter().position(|query| query.id == answer.id) else { return false };
        let query = &mut open.unanswered[index];
        query.received_bytes += answer.encoded_len();
        let is_too_large = query.received_bytes > MAX_ANSWER_BYTES;
        let is_last = answer.is_last || is_too_large;
        let part = if is_too_large {
            let text = "the answer has more than 1 MiB: ask for less, such as a single Service";
            Err(Status::resource_exhausted(text))
        } else {
            Ok(answer)
        };
        // A client that reads too slowly loses the answer. So does a client that has gone.
        if query.parts.try_send(part).is_err() || is_last {
            open.unanswered.swap_remove(index);
        }
        true
    }

    pub(super) fn close(&self) {
        let mut open = self.open();
        open.is_over = true;
        open.unanswered = Vec::new();
    }

    pub(super) fn add(&self, node: &str, query: v1::NodeQuery) -> Result<(u64, AnswerParts), Status> {
        let mut open = self.open();
        if open.is_over {
            return Err(stream_ended(node));
        }
        if open.unanswered.len() >= MAX_ON_STREAM {
            let text = format!("{MAX_ON_STREAM} queries already wait for the agent of node {node}: ask again later");
            return Err(Status::resource_exhausted(text));
        }
        open.last_id += 1;
        let (id, (parts, received)) = (open.last_id, channel(MAX_WAITING_PARTS));
        open.unanswered.push(Unanswered { id, unsent: Some(query), received_bytes: 0, parts });
        self.has_unsent.store(true, Ordering::Release);
        Ok((id, received))
    }

    pub(super) fn remove(&self, id: u64) {
        self.open().unanswered.retain(|query| query.id != id);
    }

    fn open(&self) -> MutexGuard<'_, OpenQueries> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(super) type AnswerParts = Receiver<Result<v1::Answer, Status>>;

/// The status of a query whose stream ended.
pub(super) fn stream_ended(node: &str) -> Status {
    let text = format!("the stream of the agent of node {node} ended, or the answer was read too slowly: ask again");
    Status::unavailable(text)
}

// An agent's requests for the drain barrier, and unsent answers (discovery.proto, section 18).

/// The maximum number of unanswered requests and unsent answers of a stream. An agent that keeps
/// to the contract never has more.
pub(crate) const MAX_OPEN: usize = 1_024;

/// The requests and answers of one stream.
#[derive(Debug, Default)]
pub(crate) struct Answers {
    /// True if an answer waits. Each visit of the stream reads this value without a lock.
    has_unsent: AtomicBool,
    open: Mutex<OpenRequests>,
}

#[derive(Debug, Default)]
struct OpenRequests {
    running: HashMap<u64, AbortHandle>,
    unsent: VecDeque<v1::BarrierAnswer>,
}

impl Answers {
    /// Starts the work for a request. Returns false if the stream has too many requests.
    pub(crate) fn begin(&self, id: u64, start: impl FnOnce() -> AbortHandle) -> bool {
        let mut open = self.open();
        let is_accepted = open.running.len() + open.unsent.len() < MAX_OPEN;
        if is_accepted {
            // The work cannot end before the lock is released.
            open.running.insert(id, start());
        }
        is_accepted
    }

    /// Adds the answer to a request. The caller wakes the stream.
    pub(crate) fn finish(&self, answer: v1::BarrierAnswer) {
        let mut open = self.open();
        if open.running.remove(&answer.id).is_some() {
            open.unsent.push_back(answer);
            self.has_unsent.store(true, Ordering::Release);
        }
    }

    pub(crate) fn cancel(&self, id: u64) {
        let mut open = self.open();
        if let Some(handle) = open.running.remove(&id) {
            handle.abort();
        }
        open.unsent.retain(|answer| answer.id != id);
    }

    /// Returns the next answer to send.
    pub(crate) fn take(&self) -> Option<v1::BarrierAnswer> {
        if !self.has_unsent.load(Ordering::Acquire) {
            return None;
        }
        let mut open = self.open();
        let next = open.unsent.pop_front();
        self.has_unsent.store(!open.unsent.is_empty(), Ordering::Release);
        next
    }

    pub(super) fn close(&self) {
        let OpenRequests { running, .. } = std::mem::take(&mut *self.open());
        running.values().for_each(AbortHandle::abort);
    }

    fn open(&self) -> MutexGuard<'_, OpenRequests> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// The reason why a stream ends, its counter, and its log line.

/// Why a stream ends.
#[derive(Debug, Clone)]
pub(crate) struct End {
    pub(crate) status: Status,
    /// The `reason` label of the metric that counts the end.
    pub(crate) reason: &'static str,
    /// True if the stream ends because of what the agent did, or because of its identity.
    pub(crate) is_refusal: bool,
}

impl End {
    /// Returns an end for which the agent is responsible.
    pub(crate) fn refusal(reason: &'static str, status: Status) -> Self {
        Self { status, reason, is_refusal: true }
    }

    /// Returns an end for which the agent is not responsible.
    pub(crate) fn plain(reason: &'static str, status: Status) -> Self {
        Self { status, reason, is_refusal: false }
    }

    /// Counts and logs the end of a stream. `node` is empty if the stream ends before `Hello`.
    pub(crate) fn record(&self, context: &Context, address: SocketAddr, node: &str) {
        let (reason, status) = (self.reason, self.status.message());
        if self.is_refusal {
            context.metrics.streams_rejected.of([reason]).inc();
            if context.warnings.admit(Warning::StreamRefused, tokio::time::Instant::now()) {
                tracing::warn!(%address, node, reason, status, "stream refused");
            }
        } else {
            context.metrics.streams_ended.of([reason]).inc();
            tracing::info!(%address, node, reason, "stream ended");
        }
    }
}

#[cfg(test)]
mod lateness_tests {
    use super::*;

    #[test]
    fn an_agent_is_late_while_it_does_not_answer() {
        let (start, mut lateness) = (tokio::time::Instant::now(), Lateness::default());
        let at = |ms| start + Duration::from_millis(ms);
        // A version is sent every 50 ms, and is answered 500 ms later.
        for ms in (0..10_000).step_by(50) {
            assert!(!lateness.look(ms / 50, (ms / 50).saturating_sub(10), at(ms)), "after {ms} ms");
        }
        // An agent is not late while nothing is sent.
        assert!(!lateness.look(200, 200, at(10_000)) && !lateness.look(200, 200, at(60_000)));
        assert!(!lateness.look(201, 200, at(60_000)));
        assert!(!lateness.look(210, 200, at(60_999)));
        assert!(lateness.look(211, 200, at(61_000)) && lateness.look(211, 200, at(600_000)));
        // After an answer to some versions, the time for the other versions starts again.
        assert!(!lateness.look(300, 250, at(600_001)) && !lateness.look(400, 250, at(601_000)));
        assert!(lateness.look(400, 299, at(601_001)));
        assert!(!lateness.look(400, 400, at(601_002)));
    }
}

#[cfg(test)]
mod queries_tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn query() -> v1::NodeQuery {
        let kind = v1::node_query::Kind::Status(v1::NodeStatusQuery {});
        v1::NodeQuery { kind: Some(kind) }
    }

    fn part(id: u64, text_bytes: usize) -> v1::Answer {
        let text = "x".repeat(text_bytes);
        let kind = Some(v1::node_answer::Kind::Metrics(v1::MetricsText { text }));
        v1::Answer { id, part: Some(v1::NodeAnswer { kind }), ..v1::Answer::default() }
    }

    #[test]
    fn each_query_is_sent_once_and_the_number_is_limited() {
        let queries = Queries::default();
        let asked: Vec<_> = (0..MAX_ON_STREAM).map(|_| queries.add("n1", query()).unwrap()).collect();
        let refused = queries.add("n1", query()).unwrap_err();
        assert!(refused.message().contains("node n1"), "{refused}");
        let sent: Vec<u64> = std::iter::from_fn(|| queries.take_unsent()).map(|query| query.id).collect();
        assert_eq!(sent, [1, 2, 3, 4]);
        queries.remove(asked[0].0);
        queries.add("n1", query()).unwrap();
        assert_eq!(queries.take_unsent().unwrap().id, 5);
    }

    #[test]
    fn an_answer_that_is_too_large_ends_with_an_error() {
        let queries = Queries::default();
        let (id, mut parts) = queries.add("n1", query()).unwrap();
        for _ in 0..5 {
            queries.answer(part(id, 250 << 10));
        }
        let received: Vec<_> = std::iter::from_fn(|| parts.try_recv().ok()).collect();
        assert_eq!(received.iter().filter(|part| part.is_ok()).count(), 4);
        assert!(received[4].is_err() && received.len() == 5);
        assert!(!queries.answer(part(id, 1)), "the query is over");
    }
}
