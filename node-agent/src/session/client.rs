//! Input and output of the session: one stream after the other, for ever.

use std::{
    collections::BTreeMap,
    pin::pin,
    sync::Arc,
    time::{Duration, SystemTime},
};

use futures::{FutureExt as _, future::BoxFuture};
use headgate_core::{node_state::SourceState, reference::Referable};
use headgate_proto::{
    MAX_SERVER_MESSAGE_BYTES,
    v1::{
        self, agent_message::Body, discovery_client::DiscoveryClient, server_message::Body as ServerBody,
        welcome::ResumeMode,
    },
};
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, sleep, sleep_until, timeout},
};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Status, Streaming};
use tracing::{debug, info, warn};

use super::{
    backoff::{Backoff, jitter},
    connect::{ConnectError, Connection, ControlPlane},
    held::Step,
    machine::{Effect, Machine, OwnNode, Violation, Welcomed},
    others::{Answers, Question},
    outbox::Outbox,
    replicas::{Replicas, Target},
    stay::{HeldState, Moves, Stay, Trouble, choose},
    tls::AgentTls,
};
use crate::{metrics::Metrics, reconcile::Progress, shared::Shared};

/// Time from connecting to `Welcome`: a replica that is behind us welcomes first and lets us wait afterwards.
const WELCOME_TIMEOUT: Duration = Duration::from_secs(30);
/// A stream that lasted so long was a good one: the next pause is short again.
const HEALTHY_AFTER: Duration = Duration::from_secs(10);
/// Heartbeat intervals without any message until the stream is given up (contract, 9).
const MISSED_HEARTBEATS: u32 = 3;
/// A replica that does not say what its source is doing, and has not heard it for so long, is taken to be cut off.
const OLD_SOURCE: Duration = Duration::from_secs(180);
/// Shortest time between two looks for a renewed certificate.
const RENEWAL_RETRY: Duration = Duration::from_secs(10);
/// Further away than any stream lasts.
const WELL_LATER: Duration = Duration::from_secs(365 * 86_400);
/// Messages to the replica that wait inside the transport.
const OUTGOING: usize = 4;

/// What a session needs to know.
#[derive(Debug, Clone)]
pub struct SessionConfig {
    /// Name of the node, lower case.
    pub node_name: Arc<str>,
    /// Replicas, at least one.
    pub control_planes: Vec<ControlPlane>,
    /// Needed for https.
    pub tls: Option<Arc<AgentTls>>,
    /// Pauses between attempts.
    pub backoff: Backoff,
}

/// Why a stream ended.
#[derive(Debug, thiserror::Error)]
enum StreamEnd {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("no Welcome within {} s", WELCOME_TIMEOUT.as_secs())]
    NoWelcome,
    #[error("the replica ended the stream: {} ({:?})", .0.message(), .0.code())]
    Status(Box<Status>),
    #[error("the replica closed the stream")]
    Closed,
    #[error("the replica breaks the protocol: {0}")]
    Violation(#[from] Violation),
    #[error("nothing heard for {} s", .0.as_secs_f32())]
    Silent(Duration),
    #[error("the replica asked us to go elsewhere: {0}")]
    Drained(String),
    #[error("moving to {to}: {}", .trouble.reason())]
    Moved { to: Box<Target>, trouble: Trouble },
    #[error("the certificate was renewed, and the old one expires soon")]
    Renewed,
    #[error("the agent's worker was stopped")]
    Worker(#[from] tokio::task::JoinError),
}

impl StreamEnd {
    /// A label from a small fixed set.
    fn reason(&self) -> &'static str {
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
            Self::Worker(_) => "worker",
        }
    }
}

impl From<Status> for StreamEnd {
    fn from(status: Status) -> Self {
        Self::Status(Box::new(status))
    }
}

/// The session.
#[derive(Debug)]
pub struct Session {
    config: SessionConfig,
    shared: Arc<Shared>,
    metrics: Arc<Metrics>,
    progress: watch::Receiver<Progress>,
    machine: Machine,
    /// The last stream referred to something that is not held: the state is not that of its version, so the log cannot go on from it.
    distrusts_version: bool,
}

impl Session {
    /// A session that feeds `shared` and reports `progress`.
    #[must_use]
    pub fn new(
        config: SessionConfig,
        shared: Arc<Shared>,
        metrics: Arc<Metrics>,
        progress: watch::Receiver<Progress>,
    ) -> Self {
        let machine = Machine::new(Arc::clone(&config.node_name));
        Self { config, shared, metrics, progress, machine, distrusts_version: false }
    }

    /// Follows one replica or another until `shutdown`. No failure ends it.
    pub async fn run(mut self, shutdown: CancellationToken) {
        let mut replicas = Replicas::new(self.config.control_planes.clone());
        let mut backoff = self.config.backoff.clone();
        let mut moves = Moves::default();
        loop {
            let Some(replica) = shutdown.run_until_cancelled(replicas.next()).await else { return };
            let Some(replica) = replica else { return shutdown.cancelled().await };
            let mut welcomed_at = None;
            let stay = Stay::new(&moves, Instant::now());
            let followed = self.follow(&replica, &replicas, stay, &mut welcomed_at);
            let Some(end) = shutdown.run_until_cancelled(followed).await else {
                self.metrics.connected.set(0);
                return;
            };
            self.metrics.connected.set(0);
            self.metrics.stream_error(end.reason());
            self.distrusts_version |= matches!(end, StreamEnd::Violation(Violation::Reference(_)));
            if welcomed_at.is_some_and(|at: Instant| at.elapsed() >= HEALTHY_AFTER) {
                backoff.reset();
            }
            if matches!(end, StreamEnd::Drained(_)) {
                replicas.forget();
            }
            if let StreamEnd::Moved { to, .. } = &end {
                moves.moved(Instant::now());
                replicas.prefer((**to).clone());
            }
            let is_renewed = matches!(end, StreamEnd::Renewed);
            if is_renewed {
                replicas.stay();
            }
            // One that goes by agreement has waited for its moment already, unless it is sent round in circles. Moves have
            // pauses of their own.
            let is_moved = matches!(end, StreamEnd::Moved { .. });
            let goes_at_once = is_renewed || matches!(end, StreamEnd::Drained(_));
            let goes_at_once = is_moved || (goes_at_once && backoff.attempts() == 0);
            let pause = if is_moved { Duration::ZERO } else { backoff.next_pause() };
            let pause = if goes_at_once { Duration::ZERO } else { pause };
            if let StreamEnd::Drained(_) | StreamEnd::Renewed | StreamEnd::Moved { .. } = end {
                info!(%replica, reason = %end, "connecting anew");
            } else {
                warn!(%replica, error = %end, pause_ms = pause.as_millis(), "the stream ended; forwarding goes on with the last state");
            }
            if shutdown.run_until_cancelled(sleep(pause)).await.is_none() {
                return;
            }
            self.metrics.reconnects.inc();
        }
    }

    /// One stream, from connecting to its end.
    async fn follow(
        &mut self,
        replica: &Target,
        replicas: &Replicas,
        stay: Stay,
        welcomed_at: &mut Option<Instant>,
    ) -> StreamEnd {
        let connection = match replica.control_plane.connect(replica.address, self.config.tls.as_ref()).await {
            Ok(connection) => connection,
            Err(error) => return error.into(),
        };
        let end = match self.open(&connection, stay).await {
            Ok(stream) => stream.run(self, replica, replicas, welcomed_at).await.unwrap_or_else(|end| end),
            Err(end) => end,
        };
        if let StreamEnd::Status(status) = &end
            && welcomed_at.is_none()
            && let Some(mistake) = replica.control_plane.mistake(status).await
        {
            return mistake.into();
        }
        // What broke the connection says more than that it broke.
        connection.refusal().map_or(end, |refusal| ConnectError::Refused(refusal).into())
    }

    async fn open(&mut self, connection: &Connection, stay: Stay) -> Result<Stream, StreamEnd> {
        let shared = Arc::clone(&self.shared);
        // Digests are copied under the state's lock, which planning a full sync holds for a while.
        let (mut resume, position, number) = tokio::task::spawn_blocking(move || shared.begin_stream()).await?;
        let distrusts_version = self.distrusts_version || self.machine.has_forgotten_rejections();
        if let Some(resume) = resume.as_mut().filter(|_| distrusts_version) {
            resume.epoch = 0;
        }
        self.machine.begin(position);
        let tls_problem = self.metrics.tls.watch_problem();
        let status = status(&self.progress.borrow(), &tls_problem);
        let hello = v1::Hello {
            node_name: self.config.node_name.to_string(),
            agent_version: env!("CARGO_PKG_VERSION").to_owned(),
            status: Some(status.clone()),
            resume,
        };
        let (outgoing, receiver) = mpsc::channel(OUTGOING);
        // The channel is empty and its receiver at hand: this cannot fail.
        let _ = outgoing.try_send(v1::AgentMessage { body: Some(Body::Hello(hello)) });
        let mut client =
            DiscoveryClient::new(connection.channel.clone()).max_decoding_message_size(MAX_SERVER_MESSAGE_BYTES);
        let answer = timeout(WELCOME_TIMEOUT, client.sync(ReceiverStream::new(receiver))).await;
        let incoming = answer.map_err(|_| StreamEnd::NoWelcome)??.into_inner();
        Ok(Stream {
            incoming,
            outgoing,
            outbox: Outbox::default(),
            number,
            epoch: None,
            acked: None,
            has_failed: false,
            refused: BTreeMap::new(),
            said: status,
            stay,
            silent_after: WELCOME_TIMEOUT,
            drain: None,
            renewal: self
                .config
                .tls
                .clone()
                .zip(connection.not_after)
                .map(|(tls, not_after)| Renewal::new(tls, not_after)),
            tls_problem,
        })
    }
}

/// A stream that is open.
struct Stream {
    incoming: Streaming<v1::ServerMessage>,
    outgoing: mpsc::Sender<v1::AgentMessage>,
    outbox: Outbox,
    /// As [`Shared::begin_stream`] counts.
    number: u64,
    /// The replica's, once it has welcomed us.
    epoch: Option<u64>,
    /// Version and node revision that were last acknowledged here.
    acked: Option<(u64, u64)>,
    /// Whether the replica was told of a failure since the last ACK that said that there is none.
    has_failed: bool,
    /// Services that the kernel refuses, by name, as the replica has been told.
    refused: BTreeMap<String, v1::Rejection>,
    /// What the replica has been told of the backend.
    said: v1::AgentStatus,
    /// Whether another replica would be better.
    stay: Stay,
    silent_after: Duration,
    /// When to go elsewhere, and why.
    drain: Option<(Instant, String)>,
    renewal: Option<Renewal>,
    /// Told to the replica among what is degraded.
    tls_problem: watch::Receiver<Option<String>>,
}

impl Stream {
    async fn run(
        mut self,
        session: &mut Session,
        replica: &Target,
        replicas: &Replicas,
        welcomed_at: &mut Option<Instant>,
    ) -> Result<StreamEnd, StreamEnd> {
        // What the other replicas say, while they are being asked, and why they are.
        let mut asking: Option<Asking> = None;
        let mut progress = session.progress.clone();
        let outgoing = self.outgoing.clone();
        let mut silence = pin!(sleep(self.silent_after));
        loop {
            let drain_at = self.drain.as_ref().map(|(at, _)| *at);
            let renew_at = self.renewal.as_ref().map(|renewal| renewal.look_at);
            let ask_at = self.stay.due_at().filter(|_| asking.is_none());
            let now = Instant::now();
            let ready_at = self.outbox.ready_at(now);
            let is_ready = ready_at.is_some_and(|at| at <= now);
            tokio::select! {
                // In this order: a busy replica may not keep our answers from it, and what has arrived counts before silence does.
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
                Ok(permit) = outgoing.reserve(), if is_ready => {
                    if let Some(message) = self.outbox.pop(now) {
                        permit.send(message);
                    }
                }
                Ok(()) = progress.changed() => {
                    let seen = progress.borrow_and_update().clone();
                    self.report(&seen, &session.machine);
                }
                message = self.incoming.message() => {
                    let Some(message) = message? else { return Ok(StreamEnd::Closed) };
                    let brings_state = message.body.as_ref().is_some_and(brings_state);
                    for effect in session.machine.on_message(message)? {
                        self.on_effect(session, effect, replica, welcomed_at).await?;
                    }
                    if brings_state {
                        self.stay.on_progress(session.machine.is_following(), Instant::now());
                    }
                    if session.machine.needs_referable() {
                        let shared = Arc::clone(&session.shared);
                        let referable = tokio::task::spawn_blocking(move || shared.with_state(Referable::of)).await?;
                        session.machine.refer_to(referable);
                        session.distrusts_version = false;
                    }
                    silence.as_mut().reset(Instant::now() + self.silent_after);
                }
                // An ACK may go.
                () = sleep_until(ready_at.unwrap_or(now)), if ready_at.is_some() && !is_ready => {}
                () = sleep_until(ask_at.unwrap_or(now)), if ask_at.is_some() => {
                    let trouble = self.stay.due(Instant::now());
                    asking = trouble.map(|trouble| (trouble, self.ask_others(session, replicas)));
                }
                () = sleep_until(renew_at.unwrap_or_else(Instant::now)), if renew_at.is_some() => {
                    if let Some(renewal) = &mut self.renewal && renewal.is_done().await {
                        return Ok(StreamEnd::Renewed);
                    }
                }
                Ok(()) = self.tls_problem.changed() => {
                    let seen = progress.borrow().clone();
                    self.report(&seen, &session.machine);
                }
                () = &mut silence => {
                    let is_welcomed = self.epoch.is_some();
                    return Ok(if is_welcomed { StreamEnd::Silent(self.silent_after) } else { StreamEnd::NoWelcome });
                }
            }
        }
    }

    async fn on_effect(
        &mut self,
        session: &Session,
        effect: Effect,
        replica: &Target,
        welcomed_at: &mut Option<Instant>,
    ) -> Result<(), StreamEnd> {
        match effect {
            Effect::Welcomed(welcomed) => {
                *welcomed_at = Some(Instant::now());
                self.on_welcome(session, welcomed, replica);
            }
            Effect::Apply(step) => {
                let version = step.version;
                debug!(version, changes = step.changes.len(), snapshot = step.snapshot.is_some(), "step");
                apply(&session.shared, step).await?;
                session.metrics.version_received.set(version);
            }
            Effect::Node(node) => set_node(&session.shared, node).await?,
            Effect::Resumed => confirm(&session.shared).await?,
            Effect::Reject(nack) => self.reject(&session.metrics, nack),
            Effect::Heartbeat { source_age, head_version, source, snapshots_sent } => {
                session.metrics.heard(source_age);
                session.metrics.head_version.set(head_version);
                session.metrics.source_said(source);
                let is_old = source_age > OLD_SOURCE;
                self.stay.on_source(source.or(is_old.then_some(SourceState::CutOff)), Instant::now());
                self.stay.on_snapshots_sent(snapshots_sent, Instant::now());
            }
            Effect::Drain { within, for_balance: true, .. } => self.stay.on_wish(Instant::now() + jitter(within)),
            Effect::Drain { within, reason, for_balance: false } => self.on_drain(within, reason),
        }
        Ok(())
    }

    fn on_welcome(&mut self, session: &Session, welcomed: Welcomed, replica: &Target) {
        let Welcomed { replica: name, epoch, mode, heartbeat_interval, source } = welcomed;
        session.metrics.source_said(source);
        self.stay.on_source(source, Instant::now());
        info!(%replica, name, ?mode, "connected");
        session.metrics.connected.set(1);
        session.metrics.resumed(mode);
        self.epoch = Some(epoch);
        self.silent_after = heartbeat_interval.saturating_mul(MISSED_HEARTBEATS);
        if mode == ResumeMode::Log {
            // The replica has to learn what is programmed, also when nothing changes from now on.
            let seen = session.progress.borrow().clone();
            self.report(&seen, &session.machine);
        }
    }

    /// Asks the other replicas how they stand, after a look at what the agent holds. Answers may be seconds old when the
    /// last one comes: what the agent has learned meanwhile would make every other replica look behind.
    fn ask_others(&self, session: &Session, replicas: &Replicas) -> BoxFuture<'static, Answered> {
        let SessionConfig { node_name, tls, .. } = &session.config;
        let (node, tls, epoch) = (Arc::clone(node_name), tls.clone(), self.epoch);
        let others = replicas.others();
        let shared = Arc::clone(&session.shared);
        let ask = async move {
            // Under the state's lock, which planning a full sync holds for a while.
            let point = tokio::task::spawn_blocking(move || shared.point()).await?;
            let held = point.as_ref().map(HeldState::of);
            let answers = Question { node, tls, others: others.await, epoch }.ask().await;
            Ok((held, answers))
        };
        ask.boxed()
    }

    /// The replica to move to, if one of those that answered is better than this one.
    fn better(&self, trouble: Trouble, held: Option<&HeldState>, answers: Answers) -> Option<Target> {
        // It may be over by now.
        if !self.stay.is_still(trouble) {
            return None;
        }
        let (mut targets, standings): (Vec<_>, Vec<_>) = answers.into_iter().unzip();
        let chosen = choose(trouble, held, &standings).map(|index| targets.swap_remove(index));
        if chosen.is_none() {
            debug!(reason = trouble.reason(), asked = standings.len(), "no other replica is better: staying");
        }
        chosen
    }

    fn on_drain(&mut self, within: Duration, reason: String) {
        let at = Instant::now() + jitter(within);
        if self.drain.as_ref().is_none_or(|(earlier, _)| at < *earlier) {
            self.drain = Some((at, reason));
        }
    }

    fn reject(&mut self, metrics: &Metrics, mut nack: v1::Nack) {
        metrics.rejected_resources.inc_by(nack.rejections.len() as u64);
        for v1::Rejection { resource, field, reason } in &nack.rejections {
            warn!(resource, field, reason, "a resource cannot be used; its last good value stays, if there was one");
        }
        // The value can be used, and the kernel still refuses its rules: that is what is to be seen of it now.
        let still = nack.withdrawn.extract_if(.., |resource| self.refused.contains_key(resource));
        let still: Vec<_> = still.filter_map(|resource| self.refused.get(&resource).cloned()).collect();
        nack.rejections.extend(still);
        self.send_nack(nack);
    }

    fn send_nack(&mut self, nack: v1::Nack) {
        let dropped = self.outbox.nack(nack);
        if dropped > 0 {
            warn!(dropped, "more rejections than the replica takes; it is not told of these");
        }
    }

    /// Queues which services the kernel refuses, as far as the replica does not know.
    fn report_refused(&mut self, version: u64, refused: &[v1::Rejection], machine: &Machine) {
        if refused.is_empty() && self.refused.is_empty() {
            return;
        }
        let now: BTreeMap<String, v1::Rejection> =
            refused.iter().map(|rejection| (rejection.resource.clone(), rejection.clone())).collect();
        let is_new = |rejection: &&v1::Rejection| self.refused.get(&rejection.resource) != Some(*rejection);
        let rejections: Vec<_> = now.values().filter(is_new).cloned().collect();
        let is_over = |resource: &&String| !now.contains_key(*resource) && !machine.has_rejected(resource);
        let withdrawn: Vec<_> = self.refused.keys().filter(is_over).cloned().collect();
        self.refused = now;
        if !rejections.is_empty() || !withdrawn.is_empty() {
            self.send_nack(v1::Nack { version, rejections, withdrawn });
        }
    }

    /// Queues what has changed about the backend, and ACK or failure, as far as it is about this replica's versions.
    fn report(&mut self, progress: &Progress, machine: &Machine) {
        let status = status(progress, &self.tls_problem);
        if status != self.said {
            self.said = status;
            self.outbox.status(self.said.clone());
        }
        if let Some(failure) = &progress.failure
            && Some(failure.target.epoch) == self.epoch
        {
            self.has_failed = true;
            self.outbox.apply_failed(v1::ApplyFailed {
                version: failure.target.version,
                error: failure.error.clone(),
                attempts: failure.attempts,
            });
        }
        let Some(programmed) = &progress.programmed else { return };
        let target = programmed.target;
        if Some(target.epoch) == self.epoch {
            self.report_refused(target.version, &progress.refused, machine);
        }
        let node_revision = if target.stream == self.number { target.node_revision } else { 0 };
        let reached = (target.version, node_revision);
        // A version that was acknowledged may have failed when it was tried again, and the replica waits to hear that this is over.
        let is_made_good = self.has_failed && progress.failure.is_none();
        if Some(target.epoch) != self.epoch || (self.acked == Some(reached) && !is_made_good) {
            return;
        }
        self.has_failed &= !is_made_good;
        self.acked = Some(reached);
        let ack = v1::Ack {
            version: target.version,
            node_revision,
            apply_microseconds: u64::try_from(programmed.took.as_micros()).unwrap_or(u64::MAX),
            services_planned: programmed.services_planned,
            objects_written: programmed.objects_written,
            ..v1::Ack::default()
        };
        self.outbox.ack(ack, Instant::now());
    }
}

/// True for a part of the replica's state, and for `Welcome`, which may say that the agent lacks only what changed.
fn brings_state(body: &ServerBody) -> bool {
    matches!(
        body,
        ServerBody::Welcome(_) | ServerBody::Batch(_) | ServerBody::SnapshotChunk(_) | ServerBody::SnapshotEnd(_)
    )
}

/// What the agent held when it asked the other replicas, and their answers.
type Answered = Result<(Option<HeldState>, Answers), StreamEnd>;

/// Why the other replicas are being asked, and what will come of it.
type Asking = (Trouble, BoxFuture<'static, Answered>);

async fn answered(asking: &mut Option<Asking>) -> (Trouble, Answered) {
    match asking {
        Some((trouble, answered)) => (*trouble, answered.await),
        None => std::future::pending().await,
    }
}

/// The backend's state, and what is wrong with the TLS files: the operator learns of it while there is time.
fn status(progress: &Progress, tls_problem: &watch::Receiver<Option<String>>) -> v1::AgentStatus {
    let mut status = progress.status.clone();
    status.degraded.extend(tls_problem.borrow().clone());
    status
}

/// Leaves a stream in time for a renewed certificate: the replica ends it when the one expires that it was made with.
struct Renewal {
    tls: Arc<AgentTls>,
    /// Of that one.
    not_after: SystemTime,
    /// When to look whether there is another.
    look_at: Instant,
}

impl Renewal {
    /// Looks for the first time when between 5 and 10 % of the time are left, lest all agents come back at once whose certificates were made at
    /// once.
    fn new(tls: Arc<AgentTls>, not_after: SystemTime) -> Self {
        let left = not_after.duration_since(SystemTime::now()).unwrap_or_default();
        let wait = left.mul_f64(0.9) + jitter(left / 20);
        let now = Instant::now();
        Self { tls, not_after, look_at: now.checked_add(wait).unwrap_or(now + WELL_LATER) }
    }

    /// True when the files hold one that lasts longer; otherwise it is looked for again.
    async fn is_done(&mut self) -> bool {
        // What is wrong with the files is logged there.
        if self.tls.load().await.is_ok_and(|loaded| loaded.validity.not_after > self.not_after) {
            return true;
        }
        let left = self.not_after.duration_since(SystemTime::now()).unwrap_or_default();
        warn!(
            left_seconds = left.as_secs(),
            "this agent's certificate expires soon, and --tls-cert holds no newer one; renew it"
        );
        self.look_at = Instant::now() + RENEWAL_RETRY.max(left / 4);
        false
    }
}

/// Applies a step at once, or on a thread that may wait while the kernel's work holds the lock.
async fn apply(shared: &Arc<Shared>, step: Step) -> Result<(), StreamEnd> {
    let Some(step) = shared.try_apply(step) else { return Ok(()) };
    let shared = Arc::clone(shared);
    Ok(tokio::task::spawn_blocking(move || shared.apply(step)).await?)
}

async fn set_node(shared: &Arc<Shared>, node: OwnNode) -> Result<(), StreamEnd> {
    let shared = Arc::clone(shared);
    Ok(tokio::task::spawn_blocking(move || shared.set_node(&node)).await?)
}

async fn confirm(shared: &Arc<Shared>) -> Result<(), StreamEnd> {
    let shared = Arc::clone(shared);
    Ok(tokio::task::spawn_blocking(move || shared.confirm()).await?)
}
