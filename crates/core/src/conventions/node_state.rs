//! The states of a replica's source and of a node. `docs/concepts.md` describes these states for
//! operators.

use core::time::Duration;

/// When a replica decides whether a node is up to date, it ignores changes that it has known for
/// less than this duration. In a busy cluster, some newer changes are always on their way to the
/// node.
pub const SETTLED: Duration = Duration::from_secs(1);

named! {
    /// The state of the source of a control plane replica. Named as in metrics, JSON and the
    /// Inspect service.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub enum SourceState {
        /// The replica has not listed every kind since its start, so it has no complete state to
        /// serve.
        Unlisted = "unlisted",
        /// The replica has listed every kind, but changes no longer arrive.
        CutOff = "cut_off",
        /// The replica has listed every kind, and changes arrive.
        Following = "following",
    }
}

/// What a node has reported to its replica on the current stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reported {
    /// The node has acknowledged a complete state.
    pub has_state: bool,
    /// The node's last attempt to program its kernel failed, or the node rejects a resource.
    pub is_failing: bool,
    /// The acknowledged state contains all changes that the replica has known for longer than
    /// [`SETTLED`].
    pub is_settled: bool,
    /// Another service proxy works on the node, so its agent programs nothing.
    pub is_standby: bool,
}

named! {
    /// The state of a node. Named as in metrics, JSON and the Inspect service.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub enum NodeState {
        /// The node has all changes that its replica has known for longer than [`SETTLED`], and the
        /// replica follows its source.
        UpToDate = "up_to_date",
        /// The node lacks a change that its replica has known for longer than [`SETTLED`].
        Behind = "behind",
        /// The node's last attempt to program its kernel failed, or the node rejects a resource.
        Failing = "failing",
        /// The node has acknowledged nothing on its stream, or the replica's source is unlisted.
        /// The kernel may hold rules from an earlier stream, which the replica cannot confirm.
        Waiting = "waiting",
        /// The replica's source is cut off.
        CutOff = "cut_off",
        /// Another service proxy works on the node, and the agent writes nothing.
        Standby = "standby",
    }
}

impl NodeState {
    /// Returns the state of a node from the state of its replica's source and from what the node
    /// has reported to that replica. The first state that applies is returned, in this order:
    /// standby, waiting because the source is unlisted, failing, waiting because the node has
    /// acknowledged nothing, cut off, up to date or behind.
    #[must_use]
    pub fn of(source: SourceState, reported: Reported) -> Self {
        let Reported { has_state, is_failing, is_settled, is_standby } = reported;
        match source {
            _ if is_standby => Self::Standby,
            SourceState::Unlisted => Self::Waiting,
            _ if is_failing => Self::Failing,
            _ if !has_state => Self::Waiting,
            SourceState::CutOff => Self::CutOff,
            SourceState::Following if is_settled => Self::UpToDate,
            SourceState::Following => Self::Behind,
        }
    }
}
