//! One open stream: reads messages, applies their effects to the state, and sends what the agent
//! reports. [`Stream::run`] reads and writes; [`Stream::on_message`] and the [`Outbox`] decide.
//! They get the time from the caller, and draw random numbers from `fastrand`'s generator of the
//! thread, which a simulation can seed.

use std::{pin::pin, sync::Arc, time::Duration};

use futures::{FutureExt as _, StreamExt as _, future::BoxFuture};
use headgate_core::reference::Referable;
use headgate_proto::v1::{self, server_message::Body as ServerBody};
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, sleep},
};
use tonic::Status;
use tracing::{debug, info, warn};

use super::{
    context::{Session, SessionConfig},
    failover::{Failover, HeldState, Trouble, choose},
    machine::{Effect, Violation},
    metrics::SessionMetrics,
    outbox::Outbox,
    renewal::Renewal,
    replicas::{Replica, Replicas},
    standings::{self, Standings},
    stream_end::StreamEnd,
    verified,
};
use crate::{
    backoff::{jitter, passed},
    progress::Progress,
    state::AgentState,
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
    /// The problem with the TLS files, if any. The agent reports this problem in
    /// `AgentStatus.degraded`.
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
                // The order of the branches matters. What the agent sends comes before messages of
                // the replica, so that a replica that sends without a pause does not delay the
                // reports. Messages come before the timer for silence.
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

    /// Notes the positions that the agent holds, and then asks the other replicas for their
    /// standing. The order is important, because the agent receives changes while it waits for
    /// answers. If the agent noted its positions after the answers, every other replica would seem
    /// to be behind.
    fn ask_others(&self, session: &Session, replicas: &Replicas) -> BoxFuture<'static, Answered> {
        let SessionConfig { node_name, tls, .. } = &session.config;
        let (node, tls, epoch) = (Arc::clone(node_name), tls.clone(), self.outbox.epoch);
        let others = replicas.others();
        let state = Arc::clone(&session.state);
        let ask = async move {
            let held = state.blocking(AgentState::point).await.as_ref().map(HeldState::of);
            (held, standings::ask(node, tls, others.await, epoch).await)
        };
        ask.boxed()
    }

    /// Returns the replica to move to, if a replica that answered is better than the current
    /// replica.
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

/// True for messages that carry a part of the replica's state, and for `Welcome`, which may start a
/// resume by log.
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
    status.verified = progress.verification.as_deref().and_then(verified::to_wire);
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
