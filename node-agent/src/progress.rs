//! What the reconcile loop has programmed or failed to program, for the session, the page `/status`
//! and [`crate::persist`].

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use headgate_core::{NodeFacts, digest::Digests};
use headgate_oracle::Comparison;
use headgate_proto::v1;

/// The state that a sync programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Target {
    /// Epoch of the replica that numbered the version.
    pub epoch: u64,
    /// Version of the state.
    pub version: u64,
    /// The stream that carried `node_revision`, counted from 1.
    pub stream: u64,
    /// `OwnNode.revision` of the node's own Node on that stream; 0 before the first `OwnNode`.
    pub node_revision: u64,
}

/// The results of the syncs so far: the programmed state, the last failure, and problems.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Progress {
    /// The name of the backend, and the problems that the operator has to fix.
    pub status: v1::AgentStatus,
    /// Why the agent chose the backend, if the configuration leaves a choice.
    pub mode_reason: Option<Arc<str>>,
    /// The newest state that is in the kernel.
    pub programmed: Option<Programmed>,
    /// Why the last sync failed. `None` if the last sync succeeded.
    pub failure: Option<Failure>,
    /// Services whose rules the kernel rejects, with the reasons. `programmed` excludes them.
    pub rejections: Arc<[v1::Rejection]>,
    /// Services that lack an address and port, because the agent needs it itself. `programmed`
    /// includes the rest of these Services.
    pub left_out: Arc<[v1::Rejection]>,
    /// The last verification of the kernel. `None` before the first one.
    pub verification: Option<Arc<Verification>>,
}

/// The result of a verification: the forwarding table that was decoded from a dump of the kernel,
/// compared with the agent's state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verification {
    /// When the dump was read.
    pub at: Instant,
    /// The last request of [`crate::state::AgentState::request_verification`] that this
    /// verification answers. 0 if no verification was requested before.
    pub request: u64,
    /// The state that the kernel was compared with. Later changes are not compared.
    pub target: Target,
    /// The differences, before the repair. Empty if the dump could not be read.
    pub comparison: Arc<Comparison>,
    /// The digests of the decoded tables of both families, by the buckets of their Services. The
    /// tables contain all Services, also those that were not compared. `None` if the dump could
    /// not be read, or if the kernel's rules are broken as a whole.
    pub found: Option<Arc<Digests>>,
    /// The node's facts when the dump was read.
    pub facts: Arc<NodeFacts>,
    /// Processor time of the verification. `None` if the system does not say.
    pub cpu_time: Option<Duration>,
    /// Why the kernel could not be read. Try again.
    pub error: Option<String>,
}

impl Progress {
    /// The generation of the state in the kernel. `None` before the first successful sync.
    pub(crate) fn generation(&self) -> Option<u64> {
        self.programmed.as_ref().map(|programmed| programmed.generation)
    }
}

/// A state that is completely in the kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Programmed {
    /// The epoch and version of the state.
    pub target: Target,
    /// Number of updates that the agent had received, over all streams, when the sync planned. All
    /// these updates are in the kernel.
    pub generation: u64,
    /// Time from the start of the sync until the kernel accepted the rules.
    pub took: Duration,
    /// Number of Services that the sync planned.
    pub services_planned: u32,
    /// Number of chains, or of the corresponding objects of the backend, that the sync wrote.
    pub objects_written: u32,
}

/// A sync that failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// The state that the sync tried to program.
    pub target: Target,
    /// True if the kernel may have lost rules of the programmed state since the last success:
    /// another program removed rules, or a sync of the programmed version failed.
    pub is_lost: bool,
    /// The error message of the backend.
    pub error: String,
    /// Number of failed syncs since the last success.
    pub attempts: u32,
}
