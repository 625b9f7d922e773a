//! The messages of one stream of deltas: what the replica sends to the agent, and what the agent
//! answers. [`super::transport`] reads and writes the connection.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak, atomic::Ordering},
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use headgate_core::{digest::BUCKETS, dns_name::check_subdomain, node_state::SourceState};
use headgate_proto::{
    node_to_wire,
    v1::{self, agent_message::Body as Received, server_message::Body},
};
use tokio::time::Instant;
use tonic::Status;

use super::{
    barrier::Barrier,
    context::{Context, Lifecycle, PositionWait, Settings, Signal, Visit, Visited, Warning, milliseconds},
    everywhere::Everywhere,
    fleet::{Agent, End, Fleet, Lateness, balance, clip},
    overview::Overview,
};
use crate::{
    identity::{Expiry, Peer},
    metrics::{Metrics, kind_name, level},
    objects::SourceKind,
    store::{
        BehindWait, Cursor, NotYet, OwnNode, Resume, ResumeMode, Resumption, Store, Wait, positions_to_wire,
        server_frame,
    },
};

/// The state that all streams share.
pub(crate) struct Streams {
    pub(crate) context: Arc<Context>,
    pub(crate) fleet: Arc<Fleet>,
    pub(crate) everywhere: Arc<Everywhere>,
    pub(crate) barrier: Arc<Barrier>,
    pub(crate) overview: Arc<Overview>,
    snapshots: Arc<SnapshotQueue>,
    _visited: Visited,
}

impl Streams {
    /// Returns the shared state for the streams of a replica that serves `store`.
    pub(crate) fn new(store: Arc<Store>, metrics: Arc<Metrics>, settings: Settings) -> Arc<Self> {
        let snapshots = Arc::new(SnapshotQueue::new(Arc::clone(&metrics)));
        let context = Context::new(store, metrics, settings);
        let visited = context.visits.add(Arc::<SnapshotQueue>::clone(&snapshots));
        let fleet = Fleet::new(Arc::clone(&context));
        let everywhere = Everywhere::new(Arc::clone(&fleet));
        let barrier = Barrier::new(Arc::clone(&fleet), Arc::clone(&everywhere));
        let overview = Overview::new(Arc::clone(&fleet), Arc::clone(&everywhere));
        Arc::new(Self { context, fleet, everywhere, barrier, overview, snapshots, _visited: visited })
    }
}

// One stream to an agent: the session checks its `Hello`, handles its messages, and decides which
// message is sent next. The connection requests one message at a time.
//
// There is no queue between the store and the connection. When the connection can send a message,
// the session looks up the next message at its cursor. So a connection that is blocked needs no
// memory for messages. A session does no input or output and never waits. The connection requests
// the next message when it is visited ([`crate::serve::context::Visits`]) or when its signal wakes
// it.

/// Returns the end of a stream when the replica stops.
pub(crate) fn stopping() -> End {
    End::plain("stopping", Status::unavailable("this replica stops"))
}

/// Returns the end of a stream without `Hello` within the timeout.
pub(crate) fn no_hello_in_time(context: &Context) -> End {
    let text = format!("no Hello within {} s", context.settings.hello_timeout.as_secs());
    End::refusal("no_hello", Status::deadline_exceeded(text))
}

/// Returns the end of a stream that the agent closed before `Hello`.
pub(crate) fn closed_before_hello() -> End {
    End::refusal("no_hello", Status::invalid_argument("the stream closed before Hello"))
}

/// Counts a stream of a node, and refuses streams that follow each other too quickly.
///
/// # Errors
///
/// The end of the stream.
fn admit_stream(streams: &Streams, peer: &Peer, node: &str, now: Instant) -> Result<(), End> {
    if streams.fleet.turns().streams.take(node.into(), now.into_std()).is_ok() {
        return Ok(());
    }
    streams.context.failures.count(streams.context.network(peer.address.ip()), now);
    let text = format!("node {node} opens streams too often; wait some seconds before the next stream");
    Err(End::refusal("too_many_streams", Status::resource_exhausted(text)))
}

/// A stream whose `Hello` was accepted.
pub(crate) struct Session {
    streams: Arc<Streams>,
    agent: Arc<Agent>,
    position: Position,
    /// The wait until the agent may receive its Node; `None` once the agent may receive it.
    node_wait: Option<Box<NodeWait>>,
    behind: BehindWait,
    welcome: Option<Bytes>,
    ticket: Ticket,
    node_revision: u64,
    has_drained: bool,
    has_resumed: bool,
    next_heartbeat: Instant,
    /// The state of the source that was last sent to the agent.
    sent_source: SourceState,
    lateness: Lateness,
    /// When the identity of the agent expires. The stream ends at that time.
    expiry: Option<Expiry>,
}

enum Position {
    /// The stream waits until this replica has listed its source and is not behind the agent.
    Waiting(Box<Waiting>),
    /// The stream sends the messages that follow this cursor.
    At(Cursor),
}

struct Waiting {
    resumption: Resumption,
    _wait: PositionWait,
}

struct NodeWait {
    /// The positions up to which the agent has seen its own Node.
    seen: BTreeMap<SourceKind, u64>,
    _wait: PositionWait,
}

impl Session {
    /// Opens a stream with its first message, which must be a `Hello` that is accepted.
    pub(crate) fn open(
        streams: &Arc<Streams>,
        peer: &Peer,
        first: &v1::AgentMessage,
        signal: &Arc<Signal>,
        now: Instant,
    ) -> Result<Self, End> {
        let Some(Received::Hello(hello)) = &first.body else {
            let text = "the first message of a stream must be Hello";
            return Err(End::refusal("no_hello", Status::invalid_argument(text)));
        };
        let admitted = admit(hello, peer, &streams.context)?;
        if !streams.everywhere.is_announced() {
            let text = "this replica starts, and the other replicas do not know it yet: try again";
            return Err(End::plain("starting", Status::unavailable(text)));
        }
        admit_stream(streams, peer, &admitted.node, now)?;
        Ok(Self::start(streams, peer, hello, admitted, signal, now))
    }

    fn start(
        streams: &Arc<Streams>,
        peer: &Peer,
        hello: &v1::Hello,
        admitted: Admitted,
        signal: &Arc<Signal>,
        now: Instant,
    ) -> Self {
        // Registered before the store is read, so that the stream misses no position.
        let context = &streams.context;
        let wait = context.visits.wait_for_position();
        let store = &context.store;
        let node_wait = NodeWait {
            seen: admitted.resume.as_ref().map(|resume| resume.positions.clone()).unwrap_or_default(),
            _wait: context.visits.wait_for_position(),
        };
        let (mode, begun) = Resumption::begin(store, admitted.resume);
        let agent = Arc::new(Agent::new(admitted.node, peer.address, hello, mode, Arc::clone(signal)));
        let position = match begun {
            Ok(cursor) => {
                agent.set_sent_version(cursor.version());
                Position::At(cursor)
            }
            Err(resumption) => Position::Waiting(Box::new(Waiting { resumption, _wait: wait })),
        };
        streams.fleet.enter(&agent);
        context.metrics.streams.inc();
        context.metrics.streams_opened.inc();
        context.metrics.resumes.of([mode.as_str()]).inc();
        tracing::info!(node = %agent.node, address = %peer.address, resume = mode.as_str(), "agent connected");
        let sent_source = store.source_state();
        let welcome = server_frame(Body::Welcome(v1::Welcome {
            replica: context.settings.replica_name.clone(),
            epoch: store.epoch(),
            resume: match mode {
                ResumeMode::Log => v1::welcome::ResumeMode::Log,
                ResumeMode::Digests => v1::welcome::ResumeMode::Digests,
                ResumeMode::Full => v1::welcome::ResumeMode::Full,
            }
            .into(),
            heartbeat_interval_ms: to_ms(context.settings.heartbeat_interval),
            behind_wait_ms: to_ms(context.settings.behind_wait),
            head_version: Some(store.version()),
            source_state: v1::SourceState::from(sent_source).into(),
        }));
        Self {
            position,
            node_wait: Some(Box::new(node_wait)),
            behind: BehindWait::default(),
            welcome: Some(welcome),
            ticket: Ticket::default(),
            node_revision: 0,
            has_drained: false,
            has_resumed: false,
            next_heartbeat: now + context.settings.heartbeat_interval,
            sent_source,
            lateness: Lateness::default(),
            expiry: peer.expiry(),
            agent,
            streams: Arc::clone(streams),
        }
    }

    pub(crate) fn agent(&self) -> &Arc<Agent> {
        &self.agent
    }

    /// Returns true if the agent is late: see [`Lateness`]. An agent in standby answers nothing.
    pub(crate) fn is_late(&mut self, now: Instant) -> bool {
        self.agent.standby.is_empty()
            && self.lateness.look(self.agent.sent_version(), self.agent.answered_version(), now)
    }

    /// Handles a message that the agent sends after `Hello`.
    pub(crate) fn take(&self, message: v1::AgentMessage, now: Instant) -> Result<(), End> {
        take(message, &self.agent, &self.streams, now)
    }

    /// Returns why the stream has to end, or `None` if the stream continues.
    pub(crate) fn end(&self, now: Instant) -> Option<End> {
        if let Some(end) = self.agent.ended() {
            return Some(end.clone());
        }
        if let Some(denied) = self.expiry.filter(|expiry| expiry.at <= now).and_then(Expiry::due) {
            return Some(End::refusal(denied.reason(), denied.into()));
        }
        (self.streams.context.lifecycle() == Lifecycle::Ended).then(stopping)
    }

    /// Returns the next message with its gRPC prefix, or `None` if there is none at `now`.
    pub(crate) fn next(&mut self, now: Instant) -> Result<Option<Bytes>, End> {
        let bytes = match self.end(now) {
            Some(end) => return Err(end),
            // Nothing waits for a query: the stream sends everything else first.
            None => self
                .next_message(now)
                .or_else(|| self.agent.barriers.take().map(|answer| server_frame(Body::Barrier(answer))))
                .or_else(|| self.agent.queries.take_unsent().map(|query| server_frame(Body::Query(query)))),
        };
        if let Some(bytes) = &bytes {
            let metrics = &self.streams.context.metrics;
            metrics.messages_sent.inc();
            metrics.bytes_sent.inc_by(bytes.len() as u64);
        }
        Ok(bytes)
    }

    fn next_message(&mut self, now: Instant) -> Option<Bytes> {
        if let Some(bytes) = self.welcome.take() {
            return Some(bytes);
        }
        if !self.has_drained && self.streams.context.lifecycle() == Lifecycle::Draining {
            self.has_drained = true;
            return Some(drain(self.streams.context.settings.drain_grace, "this replica stops", false));
        }
        if self.agent.take_request_to_move() {
            let reason = "this replica has more than its share of agents";
            return Some(drain(balance::MOVE_WITHIN, reason, true));
        }
        // A heartbeat that is due before the next visit is sent now, not too late.
        let is_due = self.next_heartbeat <= now + self.streams.context.visits.tick();
        if is_due || self.sent_source != self.streams.context.store.source_state() {
            return Some(self.heartbeat(now));
        }
        if self.may_send_node(now) && self.agent.signal.take_node_change() {
            return Some(self.own_node());
        }
        if let Position::Waiting(waiting) = &mut self.position {
            let cursor = match waiting.resumption.advance(&self.streams.context.store) {
                Ok(cursor) => cursor,
                Err(not_yet) if !wait_is_over(&mut self.behind, not_yet, &self.streams.context, &self.agent, now) => {
                    return None;
                }
                Err(_) => waiting.resumption.revert(&self.streams.context.store),
            };
            self.position = Position::At(cursor);
        }
        self.resource_message(now)
    }

    /// Returns true if the agent may receive its Node. The agent must wait until the source has
    /// been listed, because until then the store may lack Nodes. The agent must also wait while the
    /// source is behind the agent, because the store's Node may be older than the Node that the
    /// agent has.
    fn may_send_node(&mut self, now: Instant) -> bool {
        let Some(wait) = &self.node_wait else { return true };
        if let Err(not_yet) = NotYet::check(&self.streams.context.store, &wait.seen, SourceKind::has_nodes)
            && !wait_is_over(&mut self.behind, not_yet, &self.streams.context, &self.agent, now)
        {
            return false;
        }
        self.node_wait = None;
        true
    }

    fn resource_message(&mut self, now: Instant) -> Option<Bytes> {
        let Position::At(cursor) = &mut self.position else { return None };
        if self.has_resumed
            && cursor.is_complete()
            && let Some(buckets) = self.agent.take_send_again()
        {
            self.streams.context.store.send_again(cursor, &buckets);
        }
        if let Some(buckets) = cursor.snapshot_buckets() {
            // A snapshot without buckets is only an end marker, so it does not wait in the queue.
            let signal = &self.agent.signal;
            if buckets > 0 && !self.streams.snapshots.may_continue(&mut self.ticket, buckets, signal, now) {
                return None;
            }
        } else if self.has_resumed && cursor.is_complete() && cursor.version() == self.streams.context.store.version() {
            // Usually everything has been sent already. This check does not need the store's lock.
            return None;
        }
        let snapshots = cursor.snapshots();
        let bytes = self.streams.context.store.next_frame(cursor);
        if cursor.snapshots() > snapshots {
            self.streams.context.metrics.snapshots.inc();
            self.streams.snapshots.leave(&mut self.ticket, now);
        }
        self.agent.set_sent_version(cursor.version());
        let is_resumed = if self.agent.resume == ResumeMode::Log { bytes.is_none() } else { cursor.is_complete() };
        if is_resumed && !self.has_resumed {
            self.has_resumed = true;
            self.agent.resumed_resources.store(cursor.resources(), Ordering::Relaxed);
            self.streams.context.metrics.resumed_resources.inc_by(cursor.resources());
        }
        bytes
    }

    fn heartbeat(&mut self, now: Instant) -> Bytes {
        self.next_heartbeat = now + self.streams.context.settings.heartbeat_interval;
        let (store, metrics) = (&self.streams.context.store, &self.streams.context.metrics);
        self.sent_source = store.source_state();
        server_frame(Body::Heartbeat(v1::Heartbeat {
            head_version: store.version(),
            source_age_ms: milliseconds(store.source_age()),
            source_state: v1::SourceState::from(self.sent_source).into(),
            snapshots_sent: metrics.snapshots.get(),
        }))
    }

    fn own_node(&mut self) -> Bytes {
        self.node_revision += 1;
        let OwnNode { node, position } = self.streams.context.store.node(&self.agent.node);
        server_frame(Body::OwnNode(v1::OwnNode {
            revision: self.node_revision,
            node: node.as_deref().map(node_to_wire),
            position: positions_to_wire(position).pop(),
            reserved: self.streams.context.store.reserved(),
        }))
    }
}

fn drain(within: Duration, reason: &str, for_balance: bool) -> Bytes {
    server_frame(Body::Drain(v1::Drain { reconnect_within_ms: to_ms(within), reason: reason.into(), for_balance }))
}

/// Returns a duration in milliseconds, for fields of 32 bits.
fn to_ms(duration: Duration) -> u32 {
    u32::try_from(duration.as_millis()).unwrap_or(u32::MAX)
}

/// True if the agent has waited enough for the source. Logs and counts begin and end of the wait.
fn wait_is_over(behind: &mut BehindWait, not_yet: NotYet, context: &Context, agent: &Agent, now: Instant) -> bool {
    let wait = behind.look(not_yet, &context.store, context.settings.behind_wait, now);
    if let NotYet::Behind { kind, here, there } = not_yet {
        if wait == Wait::Begins {
            context.metrics.behind_waits.inc();
            tracing::info!(node = %agent.node, kind = kind_name(kind), here, there, "this replica's source is behind the agent's state: the agent waits");
        }
        if wait == Wait::Expires {
            context.metrics.behind_waits_expired.inc();
            if context.warnings.admit(Warning::WentBack, now) {
                tracing::warn!(node = %agent.node, kind = kind_name(kind), here, there,
                    "this replica's source is still behind the agent's state (was etcd restored from a backup?): the agent receives this replica's older state");
            }
        }
    }
    wait.is_over()
}

impl Drop for Session {
    fn drop(&mut self) {
        let now = Instant::now();
        self.streams.snapshots.leave(&mut self.ticket, now);
        self.streams.fleet.leave(&self.agent);
        self.streams.context.metrics.streams.dec();
        let end = self.end(now).unwrap_or_else(|| End::plain("disconnected", Status::ok("")));
        end.record(&self.streams.context, self.agent.address, &self.agent.node);
    }
}

// Handles the messages that an agent sends after its `Hello`.

/// Returns the end of a stream on which a message is longer than discovery.proto allows.
pub(crate) fn too_large() -> End {
    let text = format!("a message of an agent may have {} bytes at most", headgate_proto::MAX_AGENT_MESSAGE_BYTES);
    End::refusal("message_too_large", Status::resource_exhausted(text))
}

/// Returns the end of a stream on which a message cannot be decoded.
pub(crate) fn malformed(problem: &str) -> End {
    let text = format!("not a headgate.v1.AgentMessage: {problem}");
    End::refusal("malformed_message", Status::invalid_argument(text))
}

/// Returns the end of a stream that the agent has closed after a complete message.
pub(crate) fn closed_by_agent() -> End {
    End::plain("closed_by_agent", Status::ok(""))
}

/// Handles one message, if it may follow the first.
fn take(message: v1::AgentMessage, agent: &Arc<Agent>, streams: &Streams, now: Instant) -> Result<(), End> {
    let Context { metrics, warnings, .. } = &*streams.context;
    let Some(body) = message.body else {
        // Empty, or of a type of newer agents (discovery.proto, section 12).
        metrics.agent_messages_ignored.of(["unknown_message"]).inc();
        return Ok(());
    };
    match body {
        Received::Hello(_) | Received::Standing(_) => {
            let text = "Hello and a request for the standing may be only the first message of a stream";
            return Err(End::refusal("second_hello", Status::invalid_argument(text)));
        }
        Received::Ack(ack) => {
            metrics.agent_messages.of(["ack"]).inc();
            if was_sent(ack.version, agent, metrics) {
                agent.ack(&ack, now.into_std());
            }
        }
        Received::Nack(nack) => {
            metrics.agent_messages.of(["nack"]).inc();
            metrics.rejected_resources.inc_by(nack.rejections.len() as u64);
            if let Some(first) = nack.rejections.first()
                && warnings.admit(Warning::Rejected, now)
            {
                let count = nack.rejections.len();
                // The texts come from a peer, so they are cut before they are logged.
                let (resource, field, reason) = (clip(&first.resource), clip(&first.field), clip(&first.reason));
                tracing::warn!(node = %agent.node, version = nack.version, count, resource, field, reason, "agent cannot use resources");
            }
            agent.update(|record| record.nack(&nack));
        }
        Received::ApplyFailed(failed) => {
            metrics.agent_messages.of(["apply_failed"]).inc();
            if warnings.admit(Warning::ApplyFailed, now) {
                tracing::warn!(node = %agent.node, version = failed.version, attempts = failed.attempts, error = clip(&failed.error), "agent failed to program its kernel and retries");
            }
            if failed.version <= agent.sent_version() {
                agent.answered(failed.version);
            }
            agent.update(|record| record.failed(&failed));
        }
        Received::Answer(answer) => {
            metrics.agent_messages.of(["answer"]).inc();
            if !agent.queries.answer(answer) {
                metrics.agent_messages_ignored.of(["unknown_query"]).inc();
            }
        }
        Received::Barrier(request) => {
            metrics.agent_messages.of(["barrier"]).inc();
            streams.barrier.begin(agent, &request)?;
        }
        Received::Status(status) => {
            metrics.agent_messages.of(["status"]).inc();
            agent.update(|record| record.status(&status));
        }
    }
    Ok(())
}

/// True if `version` was sent here. ACKs of others, perhaps of another replica, are ignored.
fn was_sent(version: u64, agent: &Agent, metrics: &Metrics) -> bool {
    let was_sent = version <= agent.sent_version();
    if !was_sent {
        metrics.agent_messages_ignored.of(["version_not_sent"]).inc();
        tracing::debug!(node = %agent.node, version, sent = agent.sent_version(), "ACK of a version that was not sent");
    }
    was_sent
}

// Checks the `Hello` of an agent.

/// The contents of an accepted `Hello`.
#[derive(Debug)]
struct Admitted {
    node: Arc<str>,
    resume: Option<Resume>,
}

/// Checks a `Hello` against the identity that the peer has proved.
///
/// # Errors
/// The end of the stream, with the status that discovery.proto specifies. The agent may retry with
/// another `Hello`.
fn admit(hello: &v1::Hello, peer: &Peer, context: &Context) -> Result<Admitted, End> {
    admit_node(&hello.node_name, peer, context)?;
    let resume = hello.resume.as_ref().map(resume).transpose()?;
    Ok(Admitted { node: hello.node_name.as_str().into(), resume })
}

/// Checks the name of an agent's node against the identity that the peer has proved, and with
/// `--streams-from-node-address` against its address.
///
/// # Errors
///
/// The end of the stream, as for [`admit`].
fn admit_node(node_name: &str, peer: &Peer, context: &Context) -> Result<(), End> {
    check_subdomain(node_name)
        .map_err(|problem| End::refusal("invalid_hello", Status::invalid_argument(format!("node_name: {problem}"))))?;
    peer.may_follow(node_name, SystemTime::now())
        .map_err(|denied| End::refusal(denied.reason(), Status::from(denied)))?;
    let address = peer.address.ip().to_canonical();
    let known = context.settings.streams_from_node_address.then(|| context.store.node(node_name).node);
    if known.is_none_or(|node| node.is_some_and(|node| node.addresses.contains(&address))) {
        return Ok(());
    }
    let text = format!(
        "the control plane knows no Node {node_name} with the address {address}; if addresses are translated on the way, start it without --streams-from-node-address"
    );
    Err(End::refusal("node_address", Status::permission_denied(text)))
}

fn resume(wire: &v1::Resume) -> Result<Resume, End> {
    Resume::from_wire(wire).ok_or_else(|| {
        let text = "Hello.resume.digests: must have one sum of 16 bytes and one count for each of 1,024 buckets";
        End::refusal("invalid_hello", Status::invalid_argument(text))
    })
}

// The queue of streams that wait to send a snapshot.
//
// A stream that sends a snapshot keeps its current encoded bucket in memory, and some kilobytes in
// its connection. After an outage all agents may need a snapshot at the same time. Streams are
// served in order, so that memory is bounded and the first agents are done soon. A slow reader
// does not block other streams: while other streams wait, the turn of a stream ends after
// [`TURN`]. The stream then moves to the end of the queue and keeps its cursor.

/// The maximum number of buckets of all snapshots that are sent at the same time: 64 full
/// snapshots, or more partial snapshots.
const MAX_BUCKETS_IN_FLIGHT: usize = 64 * BUCKETS;

/// How long a stream may send its snapshot while other streams wait.
const TURN: Duration = Duration::from_secs(5);

/// The snapshots that are being sent, and the streams that wait.
#[derive(Debug)]
struct SnapshotQueue {
    queue: Mutex<SnapshotTurns>,
    metrics: Arc<Metrics>,
}

#[derive(Debug)]
struct SnapshotTurns {
    free_buckets: usize,
    next_ticket: u64,
    /// The waiting streams by ticket: the number of buckets, and how to wake the stream.
    waiting: BTreeMap<u64, (usize, Weak<Signal>)>,
    /// The snapshots that are being sent, by ticket: the number of buckets, and the end of the
    /// turn. Tickets are admitted in order, so the first turn ends first.
    admitted: BTreeMap<u64, (usize, Instant)>,
}

/// The place of a stream in the queue, or its turn. The stream returns the ticket with
/// [`SnapshotQueue::leave`].
#[derive(Debug, Default)]
struct Ticket(Option<u64>);

impl SnapshotQueue {
    /// Returns a queue that admits [`MAX_BUCKETS_IN_FLIGHT`] buckets.
    fn new(metrics: Arc<Metrics>) -> Self {
        Self::with_limit(MAX_BUCKETS_IN_FLIGHT, metrics)
    }

    fn with_limit(free_buckets: usize, metrics: Arc<Metrics>) -> Self {
        let (waiting, admitted) = (BTreeMap::new(), BTreeMap::new());
        let queue = SnapshotTurns { free_buckets, next_ticket: 0, waiting, admitted };
        Self { queue: Mutex::new(queue), metrics }
    }

    /// Returns true if a stream may begin or continue a snapshot of `buckets` buckets. Otherwise
    /// the stream is in the queue, and `signal` is woken when the stream's turn begins.
    fn may_continue(&self, ticket: &mut Ticket, buckets: usize, signal: &Arc<Signal>, now: Instant) -> bool {
        let mut queue = self.queue();
        if let Some(number) = ticket.0 {
            if queue.admitted.contains_key(&number) {
                return true;
            }
            if queue.waiting.contains_key(&number) {
                return false;
            }
            // The turn of this ticket has ended, so the stream needs a new ticket.
        }
        let number = queue.next_ticket;
        queue.next_ticket += 1;
        ticket.0 = Some(number);
        queue.waiting.insert(number, (buckets, Arc::downgrade(signal)));
        queue.admit(now, Some(number));
        self.publish(&queue);
        let is_admitted = queue.admitted.contains_key(&number);
        if !is_admitted {
            self.metrics.snapshots_waited.inc();
        }
        is_admitted
    }

    /// Ends the turn of a ticket, or removes the ticket from the queue. Does nothing for a ticket
    /// without a turn or a place in the queue.
    fn leave(&self, ticket: &mut Ticket, now: Instant) {
        let Some(number) = ticket.0.take() else { return };
        let mut queue = self.queue();
        queue.end_turn(number);
        queue.waiting.remove(&number);
        queue.admit(now, None);
        self.publish(&queue);
    }

    fn publish(&self, queue: &SnapshotTurns) {
        self.metrics.snapshots_in_flight.set(level(queue.admitted.len()));
        self.metrics.snapshots_waiting.set(level(queue.waiting.len()));
    }

    fn queue(&self) -> MutexGuard<'_, SnapshotTurns> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Visit for SnapshotQueue {
    /// Ends turns whose time is over, if other streams wait.
    fn visit(&self, now: Instant) {
        let mut queue = self.queue();
        if !queue.waiting.is_empty() {
            queue.admit(now, None);
            self.publish(&queue);
        }
    }
}

impl SnapshotTurns {
    /// Frees the buckets of a snapshot that is being sent.
    fn end_turn(&mut self, ticket: u64) {
        if let Some((buckets, _)) = self.admitted.remove(&ticket) {
            self.free_buckets += buckets;
        }
    }

    /// Admits streams from the head of the queue while there is room, and wakes them. `own` is the
    /// ticket of the caller, which need not be woken.
    fn admit(&mut self, now: Instant, own: Option<u64>) {
        while let Some(first) = self.waiting.first_entry() {
            // A snapshot that is larger than the limit is sent alone.
            if first.get().0 > self.free_buckets
                && let Some((oldest, (_, end))) = self.admitted.first_key_value()
            {
                let (oldest, is_over) = (*oldest, *end <= now);
                if !is_over {
                    return;
                }
                self.end_turn(oldest);
                continue;
            }
            let (ticket, (buckets, signal)) = first.remove_entry();
            let buckets = buckets.min(self.free_buckets);
            self.free_buckets -= buckets;
            self.admitted.insert(ticket, (buckets, now + TURN));
            if own != Some(ticket)
                && let Some(signal) = signal.upgrade()
            {
                signal.wake();
            }
        }
    }
}

// The state of this replica, for agents of other replicas that look for a better replica
// (discovery.proto, section 15). It is the only answer on its stream.
//
// An answer is cheap: it reads a few numbers. A request names a node, and the client must be
// allowed to open a stream for this node. Each request counts against the node's limit of new
// streams.

/// The reason why a stream ends after the answer.
pub(crate) const ANSWERED: &str = "standing";

/// Returns the answer, with its gRPC prefix.
///
/// # Errors
///
/// The end of the stream, if the request is not accepted.
pub(crate) fn standing(
    streams: &Streams,
    peer: &Peer,
    request: &v1::StandingRequest,
    now: Instant,
) -> Result<Bytes, End> {
    admit_node(&request.node_name, peer, &streams.context)?;
    admit_stream(streams, peer, &request.node_name, now)?;
    let context = &streams.context;
    let store = &context.store;
    let is_serving = context.lifecycle() == Lifecycle::Serving;
    let source = if is_serving { store.source_state_for_others() } else { SourceState::Unlisted };
    // The answer has only positions that can be compared between replicas.
    let comparable = |positions: BTreeMap<SourceKind, u64>| {
        positions_to_wire(positions.into_iter().filter(|(kind, _)| kind.is_comparable()))
    };
    Ok(server_frame(Body::Standing(v1::StandingResponse {
        replica: context.settings.replica_name.clone(),
        epoch: store.epoch(),
        source_state: v1::SourceState::from(source).into(),
        source_age_ms: milliseconds(store.source_age()),
        positions: comparable(store.positions()),
        changed_positions: comparable(store.changed_positions()),
    })))
}

#[cfg(test)]
mod tests {
    use super::*;

    struct QueueRig {
        queue: SnapshotQueue,
        now: Instant,
    }

    struct SlowReader(Ticket, Arc<Signal>);

    impl SlowReader {
        fn new() -> Self {
            Self(Ticket::default(), Arc::new(Signal::new()))
        }
    }

    impl QueueRig {
        fn new(limit: usize) -> Self {
            Self { queue: SnapshotQueue::with_limit(limit, Arc::default()), now: Instant::now() }
        }

        fn ask(&self, reader: &mut SlowReader, buckets: usize) -> bool {
            self.queue.may_continue(&mut reader.0, buckets, &reader.1, self.now)
        }

        /// The numbers of admitted and waiting streams, and of free buckets.
        fn levels(&self) -> (usize, usize, usize) {
            let queue = self.queue.queue();
            (queue.admitted.len(), queue.waiting.len(), queue.free_buckets)
        }
    }

    #[test]
    fn streams_are_served_in_order() {
        let rig = QueueRig::new(10);
        let mut readers: Vec<SlowReader> = std::iter::repeat_with(SlowReader::new).take(4).collect();
        let answers: Vec<bool> = readers.iter_mut().map(|reader| rig.ask(reader, 5)).collect();
        assert_eq!(answers, [true, true, false, false]);
        // A small snapshot that is requested later does not overtake larger snapshots.
        let mut small = SlowReader::new();
        assert!(!rig.ask(&mut small, 1));
        rig.queue.leave(&mut readers[1].0, rig.now);
        assert!(rig.ask(&mut readers[2], 5) && !rig.ask(&mut readers[3], 5) && !rig.ask(&mut small, 1));
        rig.queue.leave(&mut readers[3].0, rig.now);
        rig.queue.leave(&mut readers[0].0, rig.now);
        assert!(rig.ask(&mut small, 1));
        rig.queue.leave(&mut readers[2].0, rig.now);
        rig.queue.leave(&mut small.0, rig.now);
        assert_eq!(rig.levels(), (0, 0, 10));
    }

    #[test]
    fn a_slow_reader_moves_to_the_end_of_the_queue_when_others_wait() {
        let mut rig = QueueRig::new(10);
        let (mut slow, mut next) = (SlowReader::new(), SlowReader::new());
        assert!(rig.ask(&mut slow, 10));
        rig.now += TURN * 3;
        assert!(rig.ask(&mut slow, 10), "no other stream waits");
        assert!(rig.ask(&mut next, 10), "the turn of the slow reader is over");
        assert!(!rig.ask(&mut slow, 10));
        rig.now += TURN / 2;
        rig.queue.visit(rig.now);
        assert!(rig.ask(&mut next, 10) && !rig.ask(&mut slow, 10), "the turn is not over");
        rig.now += TURN;
        rig.queue.visit(rig.now);
        assert!(rig.ask(&mut slow, 10) && !rig.ask(&mut next, 10));
        assert_eq!(rig.levels(), (1, 1, 0));
    }

    #[test]
    fn a_snapshot_that_is_larger_than_the_limit_is_sent_alone() {
        let rig = QueueRig::new(10);
        let (mut large, mut small) = (SlowReader::new(), SlowReader::new());
        assert!(rig.ask(&mut large, 50) && !rig.ask(&mut small, 1));
        rig.queue.leave(&mut large.0, rig.now);
        assert!(rig.ask(&mut small, 1));
        rig.queue.leave(&mut small.0, rig.now);
        assert_eq!(rig.levels(), (0, 0, 10));
    }
}
