//! What all streams of a session use.

use std::sync::Arc;

use tokio::sync::watch;

use super::{machine::Machine, metrics::SessionMetrics, tls::AgentTls};
use crate::{backoff::Backoff, control_planes::ControlPlane, progress::Progress, state::AgentState};

/// Settings of a session.
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

/// See the module.
#[derive(Debug)]
pub(super) struct Context {
    pub(super) config: SessionConfig,
    pub(super) state: Arc<AgentState>,
    pub(super) metrics: SessionMetrics,
    pub(super) progress: watch::Receiver<Progress>,
    pub(super) machine: Machine,
    /// The last stream referred to something that is not held: the state is not the state of its
    /// version, so the log cannot continue from it.
    pub(super) distrusts_version: bool,
}
