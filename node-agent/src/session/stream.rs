//! The data that all streams share, and one open stream: [`Stream::run`] reads and writes;
//! [`Stream::on_message`] and the [`Outbox`] decide. Time comes from the caller, and random numbers
//! from `fastrand`'s generator of the thread, which a simulation can seed.

#[cfg(test)]
mod failover_tests;

use std::{
    collections::BTreeMap,
    pin::pin,
    sync::Arc,
    time::{Duration, SystemTime},
};

use futures::{FutureExt as _, StreamExt as _, future::BoxFuture};
use headgate_core::{node_state::SourceState, reference::Referable};
use headgate_listener::Carrier;
use headgate_proto::v1::{
    self, agent_message::Body as Asked, discovery_client::DiscoveryClient, server_message::Body as ServerBody,
    source_position::Kind,
};
use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
    time::{Instant, sleep, timeout},
};
use tonic::Status;
use tracing::{debug, info, warn};

use super::{
    barriers::Barriers,
    connect::ConnectError,
    machine::{Effect, Machine, Violation},
    metrics::SessionMetrics,
    outbox::{self, NodeKnowledge, Outbox},
    replicas::{Replica, Replicas},
    tls::AgentTls,
};
use crate::{
    backoff::{Backoff, Jitter, jitter, passed},
    control_planes::ControlPlane,
    state::{AgentState, progress::Progress},
};

/// Number of heartbeat intervals without a message after which the agent reconnects
/// (`discovery.proto`, rule 9).
const MISSED_HEARTBEATS: u32 = 3;
/// The heartbeat interval if the replica does not state an interval.
const DEFAULT_HEARTBEAT: Duration = Duration::from_secs(10);

/// An open stream, with the messages `I` of the replica.
pub(super) struct Stream<I> {
    pub(super) incoming: I,
    pub(super) outgoing: mpsc::Sender<v1::AgentMessage>,
    pub(super) outbox: Outbox,
    /// Decides when to look for a better replica.
    pub(super) failover: Failover,
    pub(super) silent_after: Duration,
    /// When to connect to another replica, and the reason that the replica gave.
    pub(super) drain: Option<(Instant, String)>,
    pub(super) renewal: Option<Renewal>,
    /// The problem with the TLS files. The agent reports this problem in `AgentStatus.degraded`.
    pub(super) tls_problem: watch::Receiver<Option<String>>,
}

impl<I: futures::Stream<Item = Result<v1::ServerMessage, Status>> + Unpin> Stream<I> {
    /// Follows the stream until it ends, and returns the reason.
    pub(super) async fn run(
        mut self,
        session: &mut Session,
        replica: &Replica,
        replicas: &Replicas,
    ) -> Result<StreamEnd, StreamEnd> {
        // The pending request to the other replicas, and its reason.
        let mut asking: Option<Asking> = None;
        let mut progress = session.progress.clone();
        let outgoing = self.outgoing.clone();
        let mut silence = pin!(sleep(self.silent_after));
        loop {
            let drain_at = self.drain.as_ref().map(|(at, _)| *at);
            let renew_at = self.renewal.as_ref().map(|renewal| renewal.check_at);
            let ask_at = self.failover.due_at().filter(|_| asking.is_none());
            tokio::select! {
                // The order matters: reports before messages, so that a replica that sends without
                // a pause does not delay them, and messages before the timer for silence.
                biased;
                () = passed(drain_at) => {
                    return Ok(StreamEnd::Drained(self.drain.map(|(_, reason)| reason).unwrap_or_default()));
                }
                (trouble, answered) = answered(&mut asking), if asking.is_some() => {
                    asking = None;
                    let (held, answers) = answered;
                    if let Some(to) = self.better(trouble, held.as_ref(), answers) {
                        return Ok(StreamEnd::Moved { to: Box::new(to), trouble });
                    }
                }
                Ok(permit) = self.outbox.ready(&session.machine.rejections).then(|()| outgoing.reserve()) => {
                    if let Some(message) = self.outbox.pop(Instant::now(), &mut session.machine.rejections) {
                        permit.send(message);
                    }
                }
                Ok(()) = progress.changed() => {
                    let seen = progress.borrow_and_update().clone();
                    self.report(&seen, session);
                }
                message = self.incoming.next() => {
                    let Some(message) = message.transpose()? else { return Ok(StreamEnd::Closed) };
                    let now = Instant::now();
                    for effect in self.on_message(session, replica, message, now)? {
                        change_state(&session.state, &session.metrics, effect).await;
                    }
                    if session.machine.needs_referable() {
                        let referable = session.state.blocking(|state| state.with_state(Referable::of)).await;
                        session.machine.refer_to(referable);
                        session.distrusts_version = false;
                    }
                    silence.as_mut().reset(Instant::now() + self.silent_after);
                }
                () = passed(ask_at) => {
                    let trouble = self.failover.due(Instant::now());
                    asking = trouble.map(|trouble| (trouble, self.ask_others(session, replicas)));
                }
                () = passed(renew_at) => {
                    if let Some(renewal) = &mut self.renewal && renewal.is_renewed().await {
                        return Ok(StreamEnd::Renewed);
                    }
                }
                Ok(()) = self.tls_problem.changed() => {
                    let seen = progress.borrow().clone();
                    self.report(&seen, session);
                }
                () = &mut silence => {
                    let is_welcomed = self.outbox.epoch.is_some();
                    return Ok(if is_welcomed { StreamEnd::Silent(self.silent_after) } else { StreamEnd::NoWelcome });
                }
            }
        }
    }

    /// Processes a message that arrived at `now`. Returns the effects on the state, in order.
    fn on_message(
        &mut self,
        session: &mut Session,
        replica: &Replica,
        message: v1::ServerMessage,
        now: Instant,
    ) -> Result<Vec<Effect>, Violation> {
        if let Some(ServerBody::Batch(v1::Batch { version, acknowledge_at_once: true, .. })) = message.body {
            self.outbox.hurry(version);
        }
        let brings_state = message.body.as_ref().is_some_and(brings_state);
        let mut of_state = Vec::new();
        for effect in session.machine.on_message(message)? {
            match effect {
                Effect::Apply(_) | Effect::Node(_) | Effect::Resumed => of_state.push(effect),
                Effect::Welcomed(welcome) => self.on_welcome(session, &welcome, replica, now),
                Effect::Reject(rejections) => {
                    session.metrics.rejected_resources.inc_by(rejections.len() as u64);
                    for v1::Rejection { resource, field, reason } in &rejections {
                        warn!(
                            resource,
                            field, reason, "a resource cannot be used; its last good value stays, if there is one"
                        );
                    }
                    if session.machine.has_forgotten_rejections() {
                        warn!("too many resources are rejected; the replica learns only the number of further ones");
                    }
                }
                Effect::Query(query) => self.outbox.answers.ask(query),
                Effect::Barrier(answer) => session.barriers.answered(answer),
                Effect::Heartbeat(heartbeat) => {
                    let source = heartbeat.source_state().into();
                    session.metrics.set_source_age(Duration::from_millis(heartbeat.source_age_ms));
                    session.metrics.head_version.set(heartbeat.head_version);
                    session.metrics.set_source_state(source);
                    self.failover.on_source(source, now);
                    self.failover.on_snapshots_sent(heartbeat.snapshots_sent, now);
                }
                Effect::Drain(v1::Drain { reconnect_within_ms, reason, for_balance }) => {
                    let at = now + jitter(Duration::from_millis(reconnect_within_ms.into()));
                    if for_balance {
                        self.failover.on_balance_request(at);
                    } else if self.drain.as_ref().is_none_or(|(earlier, _)| at < *earlier) {
                        self.drain = Some((at, reason));
                    }
                }
            }
        }
        if brings_state {
            self.failover.on_progress(session.machine.is_following(), now);
        }
        Ok(of_state)
    }

    fn on_welcome(&mut self, session: &mut Session, welcome: &v1::Welcome, replica: &Replica, now: Instant) {
        let source = welcome.source_state().into();
        session.welcomed_at = Some(now);
        self.outbox.requests = session.barriers.begin_stream();
        session.metrics.set_source_state(source);
        if let Some(tls) = &session.config.tls {
            tls.on_accepted();
        }
        self.failover.on_source(source, now);
        let mode = session.metrics.resumed(welcome.resume());
        info!(%replica, name = welcome.replica, mode, "connected");
        session.metrics.connected.set(1);
        self.outbox.epoch = Some(welcome.epoch);
        let heartbeat_interval = match welcome.heartbeat_interval_ms {
            0 => DEFAULT_HEARTBEAT,
            interval_ms => Duration::from_millis(interval_ms.into()),
        };
        self.silent_after = heartbeat_interval.saturating_mul(MISSED_HEARTBEATS);
        // The replica needs a failure before the first ACK, and after a resume by log an ACK even
        // if no change follows (`discovery.proto`, rule 7).
        let seen = session.progress.borrow().clone();
        self.report(&seen, session);
    }

    /// Notes the positions that the agent holds, and only then asks the other replicas for their
    /// standing: changes arrive meanwhile, and every other replica would seem to be behind.
    fn ask_others(&self, session: &Session, replicas: &Replicas) -> BoxFuture<'static, Answered> {
        let (config, epoch) = (session.config.clone(), self.outbox.epoch);
        let others = replicas.others();
        let state = Arc::clone(&session.state);
        let ask = async move {
            let held = state.blocking(AgentState::point).await.as_ref().map(HeldState::of);
            (held, ask(config, others.await, epoch).await)
        };
        ask.boxed()
    }

    fn better(&self, trouble: Trouble, held: Option<&HeldState>, answers: Standings) -> Option<Replica> {
        // The trouble may have ended while the agent waited for answers.
        if !self.failover.still_applies(trouble) {
            return None;
        }
        let (mut targets, standings): (Vec<_>, Vec<_>) = answers.into_iter().unzip();
        let chosen =
            choose(trouble, held, &standings, self.failover.accepts_older()).map(|index| targets.swap_remove(index));
        if chosen.is_none() {
            debug!(reason = trouble.reason(), asked = standings.len(), "no other replica is better; the agent stays");
        }
        chosen
    }

    fn report(&mut self, progress: &Progress, session: &mut Session) {
        let status = status(progress, &self.tls_problem);
        self.outbox.report(progress, status, &mut session.machine, Instant::now());
    }
}

/// True for messages with a part of the replica's state, and `Welcome`, which may resume by log.
fn brings_state(body: &ServerBody) -> bool {
    matches!(
        body,
        ServerBody::Welcome(_) | ServerBody::Batch(_) | ServerBody::SnapshotChunk(_) | ServerBody::SnapshotEnd(_)
    )
}

/// The state that the agent held when it asked the other replicas, and their answers.
type Answered = (Option<HeldState>, Standings);

/// A pending request to the other replicas: its reason, and the future with the answers.
type Asking = (Trouble, BoxFuture<'static, Answered>);

async fn answered(asking: &mut Option<Asking>) -> (Trouble, Answered) {
    match asking {
        Some((trouble, answered)) => (*trouble, answered.await),
        None => std::future::pending().await,
    }
}

/// The status to report: the status of the dataplane, and the problem with the TLS files. TLS
/// problems do not end an open stream, so the agent can report these problems on the stream.
pub(super) fn status(progress: &Progress, tls_problem: &watch::Receiver<Option<String>>) -> v1::AgentStatus {
    let mut status = progress.status.clone();
    status.degraded.extend(tls_problem.borrow().clone());
    status.verified = progress.verification.as_deref().and_then(outbox::to_wire);
    status
}

/// Applies an effect on the state. Applies an update at once if the state's lock is free, otherwise
/// on a thread that may block.
async fn change_state(state: &Arc<AgentState>, metrics: &SessionMetrics, effect: Effect) {
    match effect {
        Effect::Apply(step) => {
            let version = step.version;
            debug!(version, changes = step.changes.len(), snapshot = step.snapshot.is_some(), "step");
            if let Some(step) = state.try_apply(step) {
                state.blocking(move |state| state.apply(step)).await;
            }
            metrics.version_received.set(version);
        }
        Effect::Node(node) => state.blocking(move |state| state.set_node(&node)).await,
        Effect::Resumed => state.blocking(AgentState::confirm).await,
        _ => {}
    }
}

// Decides when an agent leaves its replica for another replica, by rule 15 of the contract in
// `proto/headgate/v1/discovery.proto`. The module does no I/O. The caller passes the current time.

/// Source positions by the number of their kind ([`headgate_proto::v1::source_position::Kind`]).
/// Contains only kinds whose positions are comparable between replicas.
pub type Positions = BTreeMap<i32, u64>;

/// Shortest and longest wait for a replica that has not listed its source. The time is random, so
/// that its agents do not move together.
const UNLISTED_PATIENCE: [Duration; 2] = [Duration::from_secs(2), Duration::from_secs(4)];
/// Shortest and longest time that an agent waits for a replica that is cut off from its source.
const CUT_OFF_PATIENCE: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(6)];
/// Time without progress after which a stream without a complete state counts as stalled: less than
/// the 30 seconds after which a replica that is behind sends its older state.
const STALLED_PATIENCE: Duration = Duration::from_secs(20);
/// Time without a replica that follows its source after which an agent also moves to one that is
/// behind: the source may have been restored from a backup.
const RESTORE_PATIENCE: Duration = Duration::from_secs(45);
/// Pauses between two requests to the other replicas.
const ASK_PAUSES: Backoff = Backoff::new(Duration::from_secs(5), Duration::from_secs(60), Jitter::Half);
/// Shortest times that the agent stays with a replica after a move. They grow with each.
const STAYS: Backoff = Backoff::new(Duration::from_secs(10), Duration::from_secs(300), Jitter::None);
/// After a stay of this length, earlier moves are forgotten.
const SETTLED_AFTER: Duration = Duration::from_secs(600);

/// Why an agent looks for another replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trouble {
    /// The replica has not listed its source.
    Unlisted,
    /// The replica is cut off from its source.
    CutOff,
    /// The stream has not brought a complete state and makes no progress.
    Stalled,
    /// The replica works, but has more agents than its share.
    Crowded,
}

impl Trouble {
    /// The reason as a text for the log.
    pub fn reason(self) -> &'static str {
        match self {
            Self::Unlisted => "the current replica has not listed its source",
            Self::CutOff => "the current replica is cut off from its source",
            Self::Stalled => "the current replica sends no complete state",
            Self::Crowded => "the current replica has more agents than its share",
        }
    }

    /// The value of the metric label `reason`, from a small fixed set.
    pub fn label(self) -> &'static str {
        match self {
            Self::Unlisted => "moved_unlisted",
            Self::CutOff => "moved_cut_off",
            Self::Stalled => "moved_stalled",
            Self::Crowded => "moved_for_balance",
        }
    }

    fn patience(self) -> Duration {
        let [from, to] = match self {
            Self::Unlisted => UNLISTED_PATIENCE,
            Self::CutOff => CUT_OFF_PATIENCE,
            Self::Stalled | Self::Crowded => [Duration::ZERO; 2],
        };
        from + jitter(to - from)
    }
}

/// What another replica reports about its source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Standing {
    /// The state of the source.
    pub source: SourceState,
    /// The current positions of the source.
    pub positions: Positions,
    /// The positions of the last change of each kind.
    pub changed: Positions,
}

/// Returns the positions that decide whether a replica is behind: Services, EndpointSlices and
/// ServiceCIDRs. A folder's position is a time of its replica's clock. That of Nodes concerns only
/// the agent's own Node (rule 6 of the contract).
pub fn comparable(positions: &[v1::SourcePosition]) -> Positions {
    let is_comparable = |kind| matches!(kind, Kind::Services | Kind::EndpointSlices | Kind::ServiceCidrs);
    let known = positions.iter().filter(|source| is_comparable(source.kind()));
    known.map(|source| (source.kind, source.position)).collect()
}

/// The facts about an agent's state that decide whether another replica is better.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct HeldState {
    /// The source positions of the state; see [`comparable`].
    pub positions: Positions,
    /// True if the state may lack resources, although its positions include them: the agent
    /// rejected the resources, another version of the program left them out, or an earlier run had
    /// them and crashed.
    pub may_lack: bool,
}

impl HeldState {
    /// Extracts the facts from the result of [`crate::state::AgentState::point`].
    pub fn of(point: &v1::Resume) -> Self {
        Self { positions: comparable(&point.positions), may_lack: point.epoch == 0 }
    }
}

impl Standing {
    /// The standing in a replica's answer.
    pub fn of(answer: &v1::StandingResponse) -> Self {
        Self {
            source: answer.source_state().into(),
            positions: comparable(&answer.positions),
            changed: comparable(&answer.changed_positions),
        }
    }

    fn is_behind(&self, held: &HeldState) -> bool {
        held.positions.iter().any(|(kind, ours)| self.positions.get(kind).is_some_and(|theirs| theirs < ours))
    }

    fn is_ahead(&self, held: &HeldState) -> bool {
        let is_newer = |(kind, theirs)| held.positions.get(kind).is_none_or(|ours| theirs > ours);
        held.may_lack || self.changed.iter().any(is_newer)
    }
}

/// How well a replica serves an agent, in ascending order. An agent moves only to a replica that
/// serves the agent better than its current replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Worth {
    /// The replica has no state that the agent could use.
    Nothing,
    /// The replica has a state, but receives no changes.
    OldState,
    /// The replica receives changes, and its state is older than the agent's.
    OlderSource,
    /// The replica has a state and receives changes.
    Everything,
}

/// The worth of an agent's own replica when the agent looks for another replica. A stalled stream
/// brings nothing to an agent that holds nothing.
fn worth_of_own(trouble: Trouble, holds_state: bool) -> Worth {
    match trouble {
        Trouble::Unlisted => Worth::Nothing,
        Trouble::Stalled if !holds_state => Worth::Nothing,
        Trouble::CutOff | Trouble::Stalled | Trouble::Crowded => Worth::OldState,
    }
}

/// The worth of another replica to an agent. `held` describes the agent's state; `None` means that
/// the agent holds no state.
fn worth_of_other(standing: &Standing, held: Option<&HeldState>, accepts_older: bool) -> Worth {
    let is_behind = held.is_some_and(|held| standing.is_behind(held));
    match standing.source {
        SourceState::Following if !is_behind => Worth::Everything,
        SourceState::Following if accepts_older => Worth::OlderSource,
        SourceState::CutOff if !is_behind && held.is_none_or(|held| standing.is_ahead(held)) => Worth::OldState,
        _ => Worth::Nothing,
    }
}

/// Returns the index of the replica to move to, if one of `others` is better than the agent's own;
/// among equal ones, a random one. `accepts_older`: [`Failover::accepts_older`].
pub fn choose(trouble: Trouble, held: Option<&HeldState>, others: &[Standing], accepts_older: bool) -> Option<usize> {
    let worth: Vec<Worth> = others.iter().map(|standing| worth_of_other(standing, held, accepts_older)).collect();
    let best = worth.iter().copied().max().filter(|best| *best > worth_of_own(trouble, held.is_some()))?;
    let best: Vec<usize> = (0..worth.len()).filter(|index| worth[*index] == best).collect();
    fastrand::choice(best)
}

/// Limits an agent's moves, over all its streams. After each move, the agent stays longer with its
/// replica, so that agents do not move in circles.
#[derive(Debug)]
pub struct MoveLimits {
    stays: Backoff,
    last: Option<Instant>,
    /// The time before which the agent does not move again.
    stays_until: Option<Instant>,
}

impl Default for MoveLimits {
    fn default() -> Self {
        Self { stays: STAYS, last: None, stays_until: None }
    }
}

impl MoveLimits {
    /// Records a move.
    pub fn moved(&mut self, now: Instant) {
        if self.last.is_some_and(|last| now.saturating_duration_since(last) >= SETTLED_AFTER) {
            self.stays.reset();
        }
        self.last = Some(now);
        self.stays_until = Some(now + self.stays.next_pause());
    }
}

/// Decides for one stream, from `Hello` on, when to look for another replica.
#[derive(Debug)]
pub struct Failover {
    source: Option<SourceState>,
    /// Since when the source has been in another state than `Following`.
    without_source_since: Option<Instant>,
    accepts_older: bool,
    is_complete: bool,
    progressed: Instant,
    snapshots_sent: u64,
    trouble: Option<Trouble>,
    /// When to ask the other replicas, while `trouble` is set.
    ask_at: Instant,
    ask_pauses: Backoff,
    /// When to ask the other replicas because this replica asked the agent to move.
    balance_at: Option<Instant>,
    stays_until: Option<Instant>,
}

impl Failover {
    /// Starts at the beginning of a stream.
    pub fn new(limits: &MoveLimits, now: Instant) -> Self {
        Self {
            source: None,
            without_source_since: None,
            accepts_older: false,
            is_complete: false,
            progressed: now,
            snapshots_sent: 0,
            trouble: None,
            ask_at: now,
            ask_pauses: ASK_PAUSES,
            balance_at: None,
            stays_until: limits.stays_until,
        }
    }

    /// Records the state of the replica's source.
    pub fn on_source(&mut self, source: SourceState, now: Instant) {
        self.source = Some(source);
        let is_without = source != SourceState::Following;
        self.without_source_since = is_without.then(|| self.without_source_since.unwrap_or(now));
        self.update_trouble(now);
    }

    /// Records the number of snapshots that the replica has completed, for any agent. A new number
    /// counts as progress of this stream.
    pub fn on_snapshots_sent(&mut self, count: u64, now: Instant) {
        if count != self.snapshots_sent {
            self.snapshots_sent = count;
            self.on_progress(self.is_complete, now);
        }
    }

    /// Records that a part of the state has arrived, and whether the state is complete.
    pub fn on_progress(&mut self, is_complete: bool, now: Instant) {
        (self.is_complete, self.progressed) = (is_complete, now);
        self.update_trouble(now);
    }

    /// Records that the replica asks the agent to move, for balance. It asks the others at `at`.
    pub fn on_balance_request(&mut self, at: Instant) {
        self.balance_at = Some(self.balance_at.map_or(at, |earlier| earlier.min(at)));
    }

    /// Determines the trouble at `now`. A new one starts the wait before the first request.
    fn update_trouble(&mut self, now: Instant) {
        let is_stalled = !self.is_complete && now >= self.progressed + STALLED_PATIENCE;
        let trouble = match self.source {
            Some(SourceState::Unlisted) => Some(Trouble::Unlisted),
            Some(SourceState::CutOff) => Some(Trouble::CutOff),
            _ if is_stalled => Some(Trouble::Stalled),
            _ => None,
        };
        let accepts_older = self.accepts_older_from().is_some_and(|from| now >= from);
        if (trouble, accepts_older) != (self.trouble, self.accepts_older) {
            (self.trouble, self.accepts_older) = (trouble, accepts_older);
            self.ask_pauses.reset();
            self.ask_at = now + trouble.map_or(Duration::ZERO, Trouble::patience);
        }
    }

    fn accepts_older_from(&self) -> Option<Instant> {
        self.without_source_since.map(|since| since + RESTORE_PATIENCE)
    }

    /// True if the agent also moves to a replica that follows its source and is behind the agent.
    pub fn accepts_older(&self) -> bool {
        self.accepts_older
    }

    /// True if the agent still has this reason to look for another replica.
    pub fn still_applies(&self, trouble: Trouble) -> bool {
        trouble == Trouble::Crowded || self.trouble == Some(trouble)
    }

    /// When to call [`Self::due`] next; `None` if no request to other replicas is expected.
    pub fn due_at(&self) -> Option<Instant> {
        let stays = |at: Instant| at.max(self.stays_until.unwrap_or(at));
        let trouble_at = match self.trouble {
            // Such moves are rare: each follows a loss of the source of [`RESTORE_PATIENCE`].
            Some(_) if self.accepts_older => Some(self.ask_at),
            Some(_) => Some(self.accepts_older_from().into_iter().fold(stays(self.ask_at), Instant::min)),
            None if !self.is_complete => Some(self.progressed + STALLED_PATIENCE),
            None => None,
        };
        trouble_at.into_iter().chain(self.balance_at.map(stays)).min()
    }

    /// Returns the reason to ask the other replicas now, or `None` if no reason is due. The pause
    /// before the next request for the same reason grows with each request.
    pub fn due(&mut self, now: Instant) -> Option<Trouble> {
        self.update_trouble(now);
        if self.due_at().is_none_or(|at| at > now) {
            return None;
        }
        if let Some(trouble) = self.trouble {
            self.ask_at = now + self.ask_pauses.next_pause();
            self.balance_at = None;
            return Some(trouble);
        }
        self.balance_at.take().map(|_| Trouble::Crowded)
    }
}

// The reasons why a stream ends.

/// Maximum time from the connection to `Welcome`. A replica that is behind the agent sends
/// `Welcome` before it waits until it has caught up.
pub(super) const WELCOME_TIMEOUT: Duration = Duration::from_secs(30);

#[derive(Debug, thiserror::Error)]
pub(super) enum StreamEnd {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("no Welcome within {} s", WELCOME_TIMEOUT.as_secs())]
    NoWelcome,
    #[error("the replica ended the stream: {} ({})", .0.message(), .0.code())]
    Status(Box<Status>),
    #[error("the replica closed the stream")]
    Closed,
    #[error("the replica breaks the protocol: {0}")]
    Violation(#[from] Violation),
    #[error("the replica sent nothing for {} s", .0.as_secs_f32())]
    Silent(Duration),
    #[error("the replica asked the agent to connect to another replica: {0}")]
    Drained(String),
    #[error("moving to {to}, because {}", .trouble.reason())]
    Moved { to: Box<Replica>, trouble: Trouble },
    #[error("the certificate was renewed, and the old certificate expires soon")]
    Renewed,
}

impl StreamEnd {
    /// The value of the metric label `reason`, from a small fixed set.
    pub(super) fn reason(&self) -> &'static str {
        match self {
            Self::Connect(ConnectError::Files(_)) => "tls_files",
            Self::Connect(ConnectError::Refused(_)) => "tls",
            Self::Connect(_) => "connect",
            Self::NoWelcome => "no_welcome",
            Self::Status(_) => "status",
            Self::Closed => "closed",
            Self::Violation(Violation::VersionGap { .. }) => "version_gap",
            Self::Violation(Violation::Reference(_)) => "unknown_reference",
            Self::Violation(_) => "protocol",
            Self::Silent(_) => "silent",
            Self::Drained(_) => "drained",
            Self::Moved { trouble, .. } => trouble.label(),
            Self::Renewed => "renewed",
        }
    }
}

impl From<Status> for StreamEnd {
    fn from(status: Status) -> Self {
        Self::Status(Box::new(status))
    }
}

// The session and its data, which all streams share.

/// Settings of a session.
#[derive(Debug, Clone)]
pub struct SessionConfig {
    /// Name of the node, in lower case.
    pub node_name: Arc<str>,
    /// URLs of the replicas, at least one.
    pub control_planes: Vec<ControlPlane>,
    /// Certificate, key and authorities; required for https URLs.
    pub tls: Option<Arc<AgentTls>>,
    /// Pauses between attempts to connect.
    pub backoff: Backoff,
    /// What carries connections without TLS to addresses, instead of TCP.
    pub carrier: Option<Arc<dyn Carrier>>,
}

/// The agent's side of all streams.
#[derive(Debug)]
pub struct Session {
    pub(super) config: SessionConfig,
    pub(super) state: Arc<AgentState>,
    pub(super) metrics: SessionMetrics,
    pub(super) progress: watch::Receiver<Progress>,
    /// Answers queries about the node; `None` if this agent answers no queries.
    pub(crate) knowledge: Option<Arc<dyn NodeKnowledge>>,
    /// The other service proxy that works on the node; empty if this agent programs the node.
    pub standby: Arc<str>,
    /// Requests of pods that stop, which the session passes on.
    pub(crate) barriers: Arc<Barriers>,
    pub(super) machine: Machine,
    /// True if the last stream referred to something that the agent does not hold: its state
    /// differs from the replica's at the same version, and the next stream must resume by digests.
    pub(super) distrusts_version: bool,
    /// When `Welcome` arrived on the current stream.
    pub(super) welcomed_at: Option<Instant>,
}

impl Session {
    /// Creates a session that applies received updates to `state` and reports `progress`.
    pub fn new(
        config: SessionConfig,
        state: Arc<AgentState>,
        metrics: SessionMetrics,
        progress: watch::Receiver<Progress>,
    ) -> Self {
        let machine = Machine::new(Arc::clone(&config.node_name));
        let (knowledge, standby, barriers) = (None, "".into(), Arc::default());
        let (distrusts_version, welcomed_at) = (false, None);
        Self { config, state, metrics, progress, knowledge, standby, barriers, machine, distrusts_version, welcomed_at }
    }
}

// Decides when to leave a stream because the agent's certificate was renewed.

/// Shortest time between two checks for a renewed certificate.
const RETRY: Duration = Duration::from_secs(10);
/// The wait before a check whose time is too far away to be represented. No stream lasts this long.
const ONE_YEAR: Duration = Duration::from_secs(365 * 86_400);

/// Checks for a renewed certificate before the certificate of a stream expires, because the replica
/// ends the stream when the certificate expires.
pub(super) struct Renewal {
    tls: Arc<AgentTls>,
    /// When the certificate of the stream expires.
    not_after: SystemTime,
    /// When to check the files for another certificate.
    pub(super) check_at: Instant,
}

impl Renewal {
    /// Schedules the first check when a random 5 to 10 % of the certificate's lifetime are left.
    pub(super) fn new(tls: Arc<AgentTls>, not_after: SystemTime) -> Self {
        let left = not_after.duration_since(SystemTime::now()).unwrap_or_default();
        let wait = left.mul_f64(0.9) + jitter(left / 20);
        let now = Instant::now();
        Self { tls, not_after, check_at: now.checked_add(wait).unwrap_or(now + ONE_YEAR) }
    }

    /// True if the files hold a certificate that expires later. Otherwise schedules the next check.
    pub(super) async fn is_renewed(&mut self) -> bool {
        // `load` logs errors of the files.
        if self.tls.load().await.is_ok_and(|loaded| loaded.validity.not_after > self.not_after) {
            return true;
        }
        let left = self.not_after.duration_since(SystemTime::now()).unwrap_or_default();
        warn!(
            left_seconds = left.as_secs(),
            "this agent's certificate expires soon, and the file of --tls-cert holds no newer certificate; renew the certificate"
        );
        self.check_at = Instant::now() + RETRY.max(left / 4);
        false
    }
}

// Asks other replicas for their standing: the state and the positions of their sources (rule 15 of
// the contract in `proto/headgate/v1/discovery.proto`).

/// Maximum time for an answer, including the time to connect.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

pub(super) type Standings = Vec<(Replica, Standing)>;

/// Asks all replicas at the same time, for the agent of `config`, and returns the answers. Replicas
/// that do not answer in time are left out. So is a replica that answers with `epoch`, the epoch of
/// the replica that the agent follows: it is the same replica at another address.
pub(super) async fn ask(config: SessionConfig, replicas: Vec<Replica>, epoch: Option<u64>) -> Standings {
    let mut asked = JoinSet::new();
    for target in replicas {
        let config = config.clone();
        asked.spawn(async move {
            let answer = timeout(ANSWER_TIMEOUT, ask_one(&target, &config)).await;
            (target, answer.unwrap_or_else(|_| Err(format!("no answer in {} s", ANSWER_TIMEOUT.as_secs()))))
        });
    }
    let mut answers = Vec::new();
    for (target, answer) in asked.join_all().await {
        match answer {
            Ok((theirs, _)) if Some(theirs) == epoch => {}
            Ok((_, standing)) => answers.push((target, standing)),
            Err(error) => debug!(replica = %target, error, "another replica did not report its standing"),
        }
    }
    answers
}

async fn ask_one(target: &Replica, config: &SessionConfig) -> Result<(u64, Standing), String> {
    let connecting = target.control_plane.connect(target.address, config.tls.as_ref(), config.carrier.as_ref());
    let connection = connecting.await.map_err(|error| error.to_string())?;
    let request = Asked::Standing(v1::StandingRequest { node_name: config.node_name.to_string() });
    let request = tokio_stream::once(v1::AgentMessage { body: Some(request) });
    let answer = async { DiscoveryClient::new(connection.channel).sync(request).await?.into_inner().message().await };
    match answer.await.map_err(|status| status.message().to_owned())?.and_then(|message| message.body) {
        Some(ServerBody::Standing(answer)) => Ok((answer.epoch, Standing::of(&answer))),
        _ => Err("the answer is not a standing".to_owned()),
    }
}
