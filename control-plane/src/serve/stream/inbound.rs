//! Handles the messages that an agent sends after its `Hello`.

use std::sync::Arc;

use headgate_proto::v1::{self, agent_message::Body};
use tokio::time::Instant;
use tonic::Status;

use super::Streams;
use crate::{
    metrics::Metrics,
    serve::{
        context::{Context, Warning},
        fleet::{Agent, End, clip},
    },
};

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

/// Handles one message.
///
/// # Errors
///
/// The end of the stream, after a message that may only be the first.
pub(super) fn take(message: v1::AgentMessage, agent: &Arc<Agent>, streams: &Streams, now: Instant) -> Result<(), End> {
    let Context { metrics, warnings, .. } = &*streams.context;
    let Some(body) = message.body else {
        // The message is empty, or has a type that only newer agents send (discovery.proto, section
        // 12).
        metrics.agent_messages_ignored.of(["unknown_message"]).inc();
        return Ok(());
    };
    match body {
        Body::Hello(_) | Body::Standing(_) => {
            let text = "Hello and a request for the standing may be only the first message of a stream";
            return Err(End::refusal("second_hello", Status::invalid_argument(text)));
        }
        Body::Ack(ack) => {
            metrics.agent_messages.of(["ack"]).inc();
            if was_sent(ack.version, agent, metrics) {
                agent.ack(&ack, now.into_std());
            }
        }
        Body::Nack(nack) => {
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
        Body::ApplyFailed(failed) => {
            metrics.agent_messages.of(["apply_failed"]).inc();
            if warnings.admit(Warning::ApplyFailed, now) {
                tracing::warn!(node = %agent.node, version = failed.version, attempts = failed.attempts, error = clip(&failed.error), "agent failed to program its kernel and retries");
            }
            if failed.version <= agent.sent_version() {
                agent.answered(failed.version);
            }
            agent.update(|record| record.failed(&failed));
        }
        Body::Answer(answer) => {
            metrics.agent_messages.of(["answer"]).inc();
            if !agent.queries.answer(answer) {
                metrics.agent_messages_ignored.of(["unknown_query"]).inc();
            }
        }
        Body::Barrier(request) => {
            metrics.agent_messages.of(["barrier"]).inc();
            streams.barrier.begin(agent, &request)?;
        }
        Body::Status(status) => {
            metrics.agent_messages.of(["status"]).inc();
            agent.update(|record| record.status(&status));
        }
    }
    Ok(())
}

/// Returns true if `version` was sent on this stream. An ACK of any other version is ignored: the
/// ACK may name a version of the replica that the agent followed before.
fn was_sent(version: u64, agent: &Agent, metrics: &Metrics) -> bool {
    let was_sent = version <= agent.sent_version();
    if !was_sent {
        metrics.agent_messages_ignored.of(["version_not_sent"]).inc();
        tracing::debug!(node = %agent.node, version, sent = agent.sent_version(), "ACK of a version that was not sent");
    }
    was_sent
}
