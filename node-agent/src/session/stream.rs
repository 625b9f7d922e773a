//! One open stream: reads messages, applies their effects to the state, and sends what the agent
//! reports.

use std::{pin::pin, sync::Arc, time::Duration};

use futures::{FutureExt as _, TryFutureExt as _, future::BoxFuture};
use headgate_core::reference::Referable;
use headgate_proto::v1::{self, server_message::Body as ServerBody};
use tokio::{
    sync::{mpsc, watch},
    task::spawn_blocking,
    time::{Instant, sleep, sleep_until},
};
use tonic::Streaming;
use tracing::{debug, info};

use super::{
    context::{Context, SessionConfig},
    failover::{Failover, HeldState, Trouble, choose},
    machine::{Effect, Machine, Welcomed},
    outbox::Outbox,
    renewal::Renewal,
    replicas::{Replicas, Target},
    reporter::Reporter,
    standings::{Standings, StandingsQuery},
    stream_end::StreamEnd,
    verified,
};
use crate::{
    backoff::jitter,
    progress::Progress,
    state::{AgentState, held::StateUpdate},
};

/// Number of heartbeat intervals without a message after which the agent reconnects
/// (`discovery.proto`, rule 9).
const MISSED_HEARTBEATS: u32 = 3;

/// An open stream.
pub(super) struct Stream {
    pub(super) incoming: Streaming<v1::ServerMessage>,
    pub(super) outgoing: mpsc::Sender<v1::AgentMessage>,
    pub(super) reporter: Reporter,
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

impl Stream {
    /// Follows the stream until it ends, and returns the reason.
    pub(super) async fn run(
        mut self,
        context: &mut Context,
        replica: &Target,
        replicas: &Replicas,
        welcomed_at: &mut Option<Instant>,
    ) -> Result<StreamEnd, StreamEnd> {
        // The pending request to the other replicas, and its reason.
        let mut asking: Option<Asking> = None;
        let mut progress = context.progress.clone();
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
                () = sleep_until(drain_at.unwrap_or_else(Instant::now)), if drain_at.is_some() => {
                    return Ok(StreamEnd::Drained(self.drain.map(|(_, reason)| reason).unwrap_or_default()));
                }
                (trouble, answered) = answered(&mut asking), if asking.is_some() => {
                    asking = None;
                    let (held, answers) = answered?;
                    if let Some(to) = self.better(trouble, held.as_ref(), answers) {
                        return Ok(StreamEnd::Moved { to: Box::new(to), trouble });
                    }
                }
                Ok(permit) = next_permit(&mut self.reporter.outbox, &outgoing) => {
                    if let Some(message) = self.reporter.outbox.pop(Instant::now()) {
                        permit.send(message);
                    }
                }
                Ok(()) = progress.changed() => {
                    let seen = progress.borrow_and_update().clone();
                    self.report(&seen, &context.machine);
                }
                message = self.incoming.message() => {
                    let Some(message) = message? else { return Ok(StreamEnd::Closed) };
                    if let Some(ServerBody::Batch(v1::Batch { version, acknowledge_at_once: true, .. })) = message.body {
                        self.reporter.outbox.hurry(version);
                    }
                    let brings_state = message.body.as_ref().is_some_and(brings_state);
                    for effect in context.machine.on_message(message)? {
                        self.on_effect(context, effect, replica, welcomed_at).await?;
                    }
                    if brings_state {
                        self.failover.on_progress(context.machine.is_following(), Instant::now());
                    }
                    if context.machine.needs_referable() {
                        let referable = blocking(&context.state, |state| state.with_state(Referable::of)).await?;
                        context.machine.refer_to(referable);
                        context.distrusts_version = false;
                    }
                    silence.as_mut().reset(Instant::now() + self.silent_after);
                }
                () = sleep_until(ask_at.unwrap_or_else(Instant::now)), if ask_at.is_some() => {
                    let trouble = self.failover.due(Instant::now());
                    asking = trouble.map(|trouble| (trouble, self.ask_others(context, replicas)));
                }
                () = sleep_until(renew_at.unwrap_or_else(Instant::now)), if renew_at.is_some() => {
                    if let Some(renewal) = &mut self.renewal && renewal.is_renewed().await {
                        return Ok(StreamEnd::Renewed);
                    }
                }
                Ok(()) = self.tls_problem.changed() => {
                    let seen = progress.borrow().clone();
                    self.report(&seen, &context.machine);
                }
                () = &mut silence => {
                    let is_welcomed = self.reporter.epoch.is_some();
                    return Ok(if is_welcomed { StreamEnd::Silent(self.silent_after) } else { StreamEnd::NoWelcome });
                }
            }
        }
    }

    async fn on_effect(
        &mut self,
        context: &Context,
        effect: Effect,
        replica: &Target,
        welcomed_at: &mut Option<Instant>,
    ) -> Result<(), StreamEnd> {
        match effect {
            Effect::Welcomed(welcomed) => {
                *welcomed_at = Some(Instant::now());
                self.on_welcome(context, welcomed, replica);
            }
            Effect::Apply(step) => {
                let version = step.version;
                debug!(version, changes = step.changes.len(), snapshot = step.snapshot.is_some(), "step");
                apply(&context.state, step).await?;
                context.metrics.version_received.set(version);
            }
            Effect::Node(node) => blocking(&context.state, move |state| state.set_node(&node)).await?,
            Effect::Resumed => blocking(&context.state, AgentState::confirm).await?,
            Effect::Reject(nack) => {
                context.metrics.rejected_resources.inc_by(nack.rejections.len() as u64);
                self.reporter.reject(nack, &context.machine);
            }
            Effect::Query(query) => self.reporter.outbox.answers.ask(query),
            Effect::Barrier(answer) => self.reporter.outbox.barriers.0.answered(answer),
            Effect::Heartbeat { source_age, head_version, source, snapshots_sent } => {
                context.metrics.set_source_age(source_age);
                context.metrics.head_version.set(head_version);
                context.metrics.set_source_state(source);
                self.failover.on_source(source, Instant::now());
                self.failover.on_snapshots_sent(snapshots_sent, Instant::now());
            }
            Effect::Drain { within, for_balance: true, .. } => {
                self.failover.on_balance_request(Instant::now() + jitter(within));
            }
            Effect::Drain { within, reason, for_balance: false } => self.on_drain(within, reason),
        }
        Ok(())
    }

    fn on_welcome(&mut self, context: &Context, welcomed: Welcomed, replica: &Target) {
        let Welcomed { replica: name, epoch, mode, heartbeat_interval, source } = welcomed;
        self.reporter.outbox.barriers.0.begin_stream();
        context.metrics.set_source_state(source);
        if let Some(tls) = &context.config.tls {
            tls.on_accepted();
        }
        self.failover.on_source(source, Instant::now());
        let mode = context.metrics.resumed(mode);
        info!(%replica, name, mode, "connected");
        context.metrics.connected.set(1);
        self.reporter.epoch = Some(epoch);
        self.silent_after = heartbeat_interval.saturating_mul(MISSED_HEARTBEATS);
        // The replica needs a failure before the first ACK, and after a resume by log an ACK even
        // if no change follows (`discovery.proto`, rule 7).
        let seen = context.progress.borrow().clone();
        self.report(&seen, &context.machine);
    }

    /// Notes the positions that the agent holds, and then asks the other replicas for their
    /// standing. The order is important, because the agent receives changes while it waits for
    /// answers. If the agent noted its positions after the answers, every other replica would seem
    /// to be behind.
    fn ask_others(&self, context: &Context, replicas: &Replicas) -> BoxFuture<'static, Answered> {
        let SessionConfig { node_name, tls, .. } = &context.config;
        let (node, tls, epoch) = (Arc::clone(node_name), tls.clone(), self.reporter.epoch);
        let others = replicas.others();
        let point = blocking(&context.state, AgentState::point);
        let ask = async move {
            let held = point.await?.as_ref().map(HeldState::of);
            let answers = StandingsQuery { node, tls, replicas: others.await, epoch }.ask().await;
            Ok((held, answers))
        };
        ask.boxed()
    }

    /// Returns the replica to move to, if a replica that answered is better than the current
    /// replica.
    fn better(&self, trouble: Trouble, held: Option<&HeldState>, answers: Standings) -> Option<Target> {
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

    fn on_drain(&mut self, within: Duration, reason: String) {
        let at = Instant::now() + jitter(within);
        if self.drain.as_ref().is_none_or(|(earlier, _)| at < *earlier) {
            self.drain = Some((at, reason));
        }
    }

    fn report(&mut self, progress: &Progress, machine: &Machine) {
        self.reporter.report(progress, status(progress, &self.tls_problem), machine);
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

/// Waits until a message may be sent, and then until the transport accepts a message.
async fn next_permit<'a>(
    outbox: &mut Outbox,
    outgoing: &'a mpsc::Sender<v1::AgentMessage>,
) -> Result<mpsc::Permit<'a, v1::AgentMessage>, mpsc::error::SendError<()>> {
    outbox.ready().await;
    outgoing.reserve().await
}

/// The state that the agent held when it asked the other replicas, and their answers.
type Answered = Result<(Option<HeldState>, Standings), StreamEnd>;

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

/// Applies an update at once if the state's lock is free, otherwise on a thread that may block.
async fn apply(state: &Arc<AgentState>, step: StateUpdate) -> Result<(), StreamEnd> {
    match state.try_apply(step) {
        Some(step) => blocking(state, move |state| state.apply(step)).await,
        None => Ok(()),
    }
}

/// Calls `work` on a thread that may block, because `work` waits for the state's lock. The planning
/// of a full sync may hold this lock for a while.
pub(super) fn blocking<T: Send + 'static>(
    state: &Arc<AgentState>,
    work: impl FnOnce(&AgentState) -> T + Send + 'static,
) -> BoxFuture<'static, Result<T, StreamEnd>> {
    let state = Arc::clone(state);
    spawn_blocking(move || work(&state)).map_err(StreamEnd::from).boxed()
}
