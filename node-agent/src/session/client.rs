//! The session: connects to a replica, follows its stream, and connects again until the agent
//! stops.

use std::{sync::Arc, time::Duration};

use headgate_proto::{
    MAX_SERVER_MESSAGE_BYTES,
    v1::{self, agent_message::Body, discovery_client::DiscoveryClient},
};
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, sleep, timeout},
};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::Streaming;
use tracing::{info, warn};

pub use super::context::SessionConfig;
use super::{
    answers::{Answers, NodeKnowledge},
    barriers::Barriers,
    connect::{ConnectError, Connection},
    context::Context,
    failover::{Failover, MoveLimits},
    machine::{Machine, Violation},
    metrics::SessionMetrics,
    outbox::Outbox,
    renewal::Renewal,
    replicas::{Replicas, Target},
    stream::{Stream, blocking, status},
    stream_end::{StreamEnd, WELCOME_TIMEOUT},
};
use crate::{progress::Progress, state::AgentState};

/// After a stream that lasted this long, pauses start again from the shortest pause.
const HEALTHY_AFTER: Duration = Duration::from_secs(10);
/// Number of messages to the replica that may wait inside the transport.
const OUTGOING: usize = 4;

/// The agent's side of all streams.
#[derive(Debug)]
pub struct Session {
    context: Context,
}

impl Session {
    /// Creates a session that applies received updates to `state` and reports `progress`.
    #[must_use]
    pub fn new(
        config: SessionConfig,
        state: Arc<AgentState>,
        metrics: SessionMetrics,
        progress: watch::Receiver<Progress>,
    ) -> Self {
        let machine = Machine::new(Arc::clone(&config.node_name));
        let (knowledge, barriers, distrusts_version) = (None, Arc::default(), false);
        Self { context: Context { config, state, metrics, progress, knowledge, barriers, machine, distrusts_version } }
    }

    /// The requests of pods that stop, which the session passes on.
    #[must_use]
    pub(crate) fn barriers(&self) -> Arc<Barriers> {
        Arc::clone(&self.context.barriers)
    }

    /// Makes the session answer the replicas' queries about the node.
    #[must_use]
    pub(crate) fn with_knowledge(mut self, knowledge: Arc<dyn NodeKnowledge>) -> Self {
        self.context.knowledge = Some(knowledge);
        self
    }

    /// Follows one replica after another until `shutdown`. No failure ends the session.
    pub async fn run(mut self, shutdown: CancellationToken) {
        let mut replicas = Replicas::new(self.context.config.control_planes.clone());
        let mut backoff = self.context.config.backoff.clone();
        let mut limits = MoveLimits::default();
        loop {
            let Some(replica) = shutdown.run_until_cancelled(replicas.next()).await else { return };
            let Some(replica) = replica else { return shutdown.cancelled().await };
            let mut welcomed_at = None;
            let failover = Failover::new(&limits, Instant::now());
            let followed = self.follow(&replica, &replicas, failover, &mut welcomed_at);
            let Some(end) = shutdown.run_until_cancelled(followed).await else {
                self.context.metrics.connected.set(0);
                return;
            };
            self.context.metrics.connected.set(0);
            self.context.metrics.stream_error(end.reason());
            self.context.distrusts_version |= matches!(end, StreamEnd::Violation(Violation::Reference(_)));
            if welcomed_at.is_some_and(|at: Instant| at.elapsed() >= HEALTHY_AFTER) {
                backoff.reset();
            }
            match &end {
                StreamEnd::Drained(_) => replicas.forget(),
                StreamEnd::Renewed => replicas.repeat(),
                StreamEnd::Moved { to, .. } => {
                    limits.moved(Instant::now());
                    replicas.prefer((**to).clone());
                }
                _ => {}
            }
            let is_first = backoff.attempts() == 0;
            let is_moved = matches!(end, StreamEnd::Moved { .. });
            let is_planned = is_moved || matches!(end, StreamEnd::Drained(_) | StreamEnd::Renewed);
            let pause = if is_moved { Duration::ZERO } else { backoff.next_pause() };
            // A drained stream has already waited for a random time, so the agent connects again
            // without a further pause. If the next replica drains its stream too, the agent pauses.
            // A move has no pause, because `MoveLimits` limits the number of moves.
            let pause = if is_planned && is_first { Duration::ZERO } else { pause };
            if is_planned {
                info!(%replica, reason = %end, "connecting again");
            } else {
                warn!(%replica, error = %end, pause_ms = pause.as_millis(), "the stream ended; forwarding continues with the last state");
            }
            if shutdown.run_until_cancelled(sleep(pause)).await.is_none() {
                return;
            }
            self.context.metrics.reconnects.inc();
        }
    }

    /// Connects, follows one stream, and returns the reason for its end.
    async fn follow(
        &mut self,
        replica: &Target,
        replicas: &Replicas,
        failover: Failover,
        welcomed_at: &mut Option<Instant>,
    ) -> StreamEnd {
        let connection = match replica.control_plane.connect(replica.address, self.context.config.tls.as_ref()).await {
            Ok(connection) => connection,
            Err(error) => return error.into(),
        };
        let end = match self.open(&connection, failover).await {
            Ok(stream) => stream.run(&mut self.context, replica, replicas, welcomed_at).await.unwrap_or_else(|end| end),
            Err(end) => end,
        };
        if let StreamEnd::Status(status) = &end
            && welcomed_at.is_none()
            && let Some(mistake) = replica.control_plane.mistake(status).await
        {
            return mistake.into();
        }
        // If TLS ended the connection, the reason that TLS gives is more precise than `end`.
        connection.refusal().map_or(end, |refusal| ConnectError::Refused(refusal).into())
    }

    async fn open(
        &mut self,
        connection: &Connection,
        failover: Failover,
    ) -> Result<Stream<Streaming<v1::ServerMessage>>, StreamEnd> {
        let (mut resume, position, number) = blocking(&self.context.state, AgentState::begin_stream).await?;
        let distrusts_version = self.context.distrusts_version || self.context.machine.has_forgotten_rejections();
        if let Some(resume) = resume.as_mut().filter(|_| distrusts_version) {
            resume.epoch = 0;
        }
        self.context.machine.begin(position);
        let tls_problem = self.context.metrics.tls.watch_problem();
        let status = status(&self.context.progress.borrow(), &tls_problem);
        let hello = v1::Hello {
            node_name: self.context.config.node_name.to_string(),
            agent_version: env!("CARGO_PKG_VERSION").to_owned(),
            status: Some(status.clone()),
            resume,
        };
        let (outgoing, receiver) = mpsc::channel(OUTGOING);
        // The call cannot fail: the channel is empty and has a receiver.
        let _ = outgoing.try_send(v1::AgentMessage { body: Some(Body::Hello(hello)) });
        let mut client =
            DiscoveryClient::new(connection.channel.clone()).max_decoding_message_size(MAX_SERVER_MESSAGE_BYTES);
        let answer = timeout(WELCOME_TIMEOUT, client.sync(ReceiverStream::new(receiver))).await;
        let incoming = answer.map_err(|_| StreamEnd::NoWelcome)??.into_inner();
        let tls = self.context.config.tls.clone().zip(connection.not_after);
        let renewal = tls.map(|(tls, not_after)| Renewal::new(tls, not_after));
        Ok(Stream {
            incoming,
            outgoing,
            outbox: Outbox::new(number, status, Answers::new(self.context.knowledge.clone())),
            failover,
            silent_after: WELCOME_TIMEOUT,
            drain: None,
            renewal,
            tls_problem,
        })
    }
}
