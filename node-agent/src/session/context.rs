//! Data that all streams of a session share.

use std::sync::Arc;

use tokio::sync::watch;

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

/// Data that all streams of a session share.
#[derive(Debug)]
pub(super) struct Context {
    pub(super) config: SessionConfig,
    pub(super) state: Arc<AgentState>,
    pub(super) metrics: SessionMetrics,
    pub(super) progress: watch::Receiver<Progress>,
    /// Answers queries about the node; `None` if this agent answers no queries.
    pub(super) knowledge: Option<Arc<dyn NodeKnowledge>>,
    /// Requests of pods that stop.
    pub(super) barriers: Arc<Barriers>,
    pub(super) machine: Machine,
    /// True if the last stream contained a reference to something that the agent does not hold. The
    /// held state therefore differs from the replica's state at the same version, and the next
    /// stream must resume by digests.
    pub(super) distrusts_version: bool,
}
