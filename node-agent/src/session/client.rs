//! The session: follows the streams of replicas until the agent stops.

use std::{sync::Arc, time::Duration};

use headgate_proto::{
    MAX_SERVER_MESSAGE_BYTES,
    v1::{self, agent_message::Body, discovery_client::DiscoveryClient},
};
use tokio::{
    sync::mpsc,
    time::{Instant, sleep, timeout},
};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::Streaming;
use tracing::{info, warn};

pub use super::stream::{Session, SessionConfig};
use super::{
    connect::{ConnectError, Connected},
    machine::Violation,
    outbox::{Answers, Outbox},
    replicas::{Replica, Replicas},
    stream::{Failover, MoveLimits, Renewal, Stream, StreamEnd, WELCOME_TIMEOUT, status},
};
use crate::state::AgentState;

/// After a stream that lasted this long, pauses start again from the shortest pause.
const HEALTHY_AFTER: Duration = Duration::from_secs(10);
/// Number of messages to the replica that may wait inside the transport.
const OUTGOING: usize = 4;

impl Session {
    /// Follows one replica after another until `shutdown`. No failure ends the session.
    pub async fn run(mut self, shutdown: CancellationToken) {
        shutdown.run_until_cancelled(self.follow_replicas()).await;
        self.metrics.connected.set(0);
    }

    /// Follows one replica after another. Never returns.
    async fn follow_replicas(&mut self) {
        let mut replicas = Replicas::new(self.config.control_planes.clone(), Arc::clone(&self.state));
        let mut backoff = self.config.backoff.clone();
        let mut limits = MoveLimits::default();
        while let Some(replica) = replicas.next().await {
            let failover = Failover::new(&limits, Instant::now());
            let end = self.follow(&replica, &replicas, failover).await;
            self.metrics.connected.set(0);
            self.metrics.stream_error(end.reason());
            if self.welcomed_at.is_none() {
                self.state.blocking(AgentState::free_reserved).await;
            }
            self.distrusts_version |= matches!(end, StreamEnd::Violation(Violation::Reference(_)));
            if self.welcomed_at.is_some_and(|at| at.elapsed() >= HEALTHY_AFTER) {
                backoff.reset();
            }
            let is_first = backoff.attempts() == 0;
            let (is_planned, pause) = match &end {
                // `MoveLimits` limits the number of moves.
                StreamEnd::Moved { to, .. } => {
                    limits.moved(Instant::now());
                    replicas.prefer((**to).clone());
                    (true, Duration::ZERO)
                }
                StreamEnd::Drained(_) => {
                    replicas.forget();
                    (true, backoff.next_pause())
                }
                StreamEnd::Renewed => {
                    replicas.prefer(replica.clone());
                    (true, backoff.next_pause())
                }
                _ => (false, backoff.next_pause()),
            };
            // A drained stream has already waited for a random time, so the agent connects again
            // without a further pause. If the next replica drains its stream too, the agent pauses.
            let pause = if is_planned && is_first { Duration::ZERO } else { pause };
            if is_planned {
                info!(%replica, reason = %end, "connecting again");
            } else {
                warn!(%replica, error = %end, pause_ms = pause.as_millis(), "the stream ended; forwarding continues with the last state");
            }
            sleep(pause).await;
            self.metrics.reconnects.inc();
        }
        std::future::pending::<()>().await;
    }

    async fn follow(&mut self, replica: &Replica, replicas: &Replicas, failover: Failover) -> StreamEnd {
        self.welcomed_at = None;
        let SessionConfig { tls, carrier, .. } = &self.config;
        let connection = match replica.control_plane.connect(replica.address, tls.as_ref(), carrier.as_ref()).await {
            Ok(connection) => connection,
            Err(error) => return error.into(),
        };
        let end = match self.open(&connection, failover).await {
            Ok(stream) => stream.run(self, replica, replicas).await.unwrap_or_else(|end| end),
            Err(end) => end,
        };
        if let StreamEnd::Status(status) = &end
            && self.welcomed_at.is_none()
            // To find a mistake, the agent would connect over TCP.
            && self.config.carrier.is_none()
            && let Some(mistake) = replica.control_plane.mistake(status).await
        {
            return mistake.into();
        }
        // If TLS ended the connection, the reason that TLS gives is more precise than `end`.
        connection.refusal().map_or(end, |refusal| ConnectError::Refused(refusal).into())
    }

    async fn open(
        &mut self,
        connection: &Connected,
        failover: Failover,
    ) -> Result<Stream<Streaming<v1::ServerMessage>>, StreamEnd> {
        let (mut resume, position, number) = self.state.blocking(AgentState::begin_stream).await;
        let distrusts_version = self.distrusts_version || self.machine.has_forgotten_rejections();
        if let Some(resume) = resume.as_mut().filter(|_| distrusts_version) {
            resume.epoch = 0;
        }
        self.machine.begin(position);
        let tls_problem = self.metrics.tls.problem.subscribe();
        let status = status(&self.progress.borrow(), &tls_problem);
        let hello = v1::Hello {
            node_name: self.config.node_name.to_string(),
            agent_version: env!("CARGO_PKG_VERSION").to_owned(),
            status: Some(status.clone()),
            resume,
            standby: self.standby.to_string(),
        };
        let (outgoing, receiver) = mpsc::channel(OUTGOING);
        // The call cannot fail: the channel is empty and has a receiver.
        let _ = outgoing.try_send(v1::AgentMessage { body: Some(Body::Hello(hello)) });
        let mut client =
            DiscoveryClient::new(connection.channel.clone()).max_decoding_message_size(MAX_SERVER_MESSAGE_BYTES);
        let answer = timeout(WELCOME_TIMEOUT, client.sync(ReceiverStream::new(receiver))).await;
        let incoming = answer.map_err(|_| StreamEnd::NoWelcome)??.into_inner();
        let tls = self.config.tls.clone().zip(connection.not_after);
        let mut outbox = Outbox::new(number, status, Answers::new(self.knowledge.clone()));
        outbox.is_standby = !self.standby.is_empty();
        Ok(Stream {
            incoming,
            outgoing,
            outbox,
            failover,
            silent_after: WELCOME_TIMEOUT,
            drain: None,
            renewal: tls.map(|(tls, not_after)| Renewal::new(tls, not_after)),
            tls_problem,
        })
    }
}

#[cfg(test)]
mod size_tests {
    use super::*;

    /// The size of the future that a function returns. The function is not called.
    fn size_of_future<A, F: Future>(_: impl Fn(A) -> F) -> usize {
        size_of::<F>()
    }

    #[test]
    fn the_future_of_the_session_is_small() {
        let session = size_of_future(|session: Session| session.run(CancellationToken::new()));
        assert!(session <= 15_000, "{session} bytes");
    }
}
