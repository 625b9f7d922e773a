//! The reason why a stream ends, its counter, and its log line.

use std::net::SocketAddr;

use tonic::Status;

use crate::serve::context::{Context, Warning};

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
