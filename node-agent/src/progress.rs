//! What the reconcile loop has programmed, or could not program: the session reports it to the
//! control plane, the pages show it, and the state on disk follows it.

use std::{sync::Arc, time::Duration};

use headgate_proto::v1;

/// What a sync brings the kernel to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Target {
    /// Epoch of the replica that numbered the version.
    pub epoch: u64,
    /// Version of the state.
    pub version: u64,
    /// The stream on which the node's revision came, counted from 1.
    pub stream: u64,
    /// `OwnNode.revision` on that stream; 0 before the first.
    pub node_revision: u64,
}

/// What the loop has reached; the session tells the replica.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Progress {
    /// The backend, and ways in which it runs below what was asked for.
    pub status: v1::AgentStatus,
    /// The newest state that is in the kernel.
    pub programmed: Option<Programmed>,
    /// The failure that stands in the way of the next; `None` when the last attempt succeeded.
    pub failure: Option<Failure>,
    /// Services whose rules the kernel refuses, and why: `programmed` is about the others.
    pub refused: Arc<[v1::Rejection]>,
}

impl Progress {
    /// The state that is in the kernel, as [`AgentState`] counts; `None` before the first.
    pub(crate) fn generation(&self) -> Option<u64> {
        self.programmed.as_ref().map(|programmed| programmed.generation)
    }
}

/// A state that is in the kernel, as a whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Programmed {
    /// Which state.
    pub target: Target,
    /// Counts what came to the agent, over all streams; everything up to it is in the kernel.
    pub generation: u64,
    /// From taking up the change to the kernel's acknowledgement.
    pub took: Duration,
    /// Services whose programming this step computed anew.
    pub services_planned: u32,
    /// Chains, or the backend's like, that it wrote.
    pub objects_written: u32,
}

/// An attempt that failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// The state that was to be programmed.
    pub target: Target,
    /// The backend's words.
    pub error: String,
    /// Attempts since the last success.
    pub attempts: u32,
}
