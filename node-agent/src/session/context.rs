//! The session and its data, which all streams share.

use std::sync::Arc;

use tokio::{sync::watch, time::Instant};

use super::{answers::NodeKnowledge, barriers::Barriers, machine::Machine, metrics::SessionMetrics, tls::AgentTls};
use crate::{backoff::Backoff, control_planes::ControlPlane, progress::Progress, state::AgentState};

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
    /// Requests of pods that stop, which the session passes on.
    pub(crate) barriers: Arc<Barriers>,
    pub(super) machine: Machine,
    /// True if the last stream contained a reference to something that the agent does not hold. The
    /// held state therefore differs from the replica's state at the same version, and the next
    /// stream must resume by digests.
    pub(super) distrusts_version: bool,
    /// When `Welcome` arrived on the current stream.
    pub(super) welcomed_at: Option<Instant>,
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
        let (knowledge, barriers, distrusts_version, welcomed_at) = (None, Arc::default(), false, None);
        Self { config, state, metrics, progress, knowledge, barriers, machine, distrusts_version, welcomed_at }
    }
}
