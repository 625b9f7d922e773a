//! What a replica's source is doing, and whether a node is up to date. Each is defined here, once
//! (contract, 14 and 16).

use std::{fmt, time::Duration};

/// A node is up to date when it lacks nothing that its replica has known for longer than this: at
/// any moment something is on its way.
pub const SETTLED: Duration = Duration::from_secs(1);

/// What the source of a control plane replica is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SourceState {
    /// Not every kind has been listed since the replica's start: there is nothing to serve.
    Unlisted,
    /// Every kind has been listed, and the replica cannot hear of changes.
    CutOff,
    /// Every kind has been listed, and the replica hears of changes.
    Following,
}

impl SourceState {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Unlisted, Self::CutOff, Self::Following];

    /// As metrics, JSON and the Inspect service write it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Unlisted => "unlisted",
            Self::CutOff => "cut_off",
            Self::Following => "following",
        }
    }
}

impl fmt::Display for SourceState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// What a node has told its replica on its present stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reported {
    /// It has acknowledged a complete state.
    pub has_state: bool,
    /// The last attempt failed, or a resource is rejected.
    pub is_failing: bool,
    /// The acknowledged state has everything that the replica has known for longer than
    /// [`SETTLED`].
    pub is_settled: bool,
}

/// How a node stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum NodeState {
    /// It has everything that its replica has known for longer than [`SETTLED`], and the replica
    /// follows its source.
    UpToDate,
    /// It lacks something that its replica has known for longer.
    Behind,
    /// Its last attempt failed, or it rejects a resource.
    Failing,
    /// It has acknowledged nothing on its stream, or its replica has nothing to serve. The replica
    /// knows nothing of the rules that an earlier stream left in the kernel.
    Waiting,
    /// Its replica cannot hear of changes.
    CutOff,
}

impl NodeState {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::UpToDate, Self::Behind, Self::Failing, Self::Waiting, Self::CutOff];

    /// How a node stands, from the state of its replica's source and what the node has reported
    /// there.
    #[must_use]
    pub fn of(source: SourceState, reported: Reported) -> Self {
        let Reported { has_state, is_failing, is_settled } = reported;
        match source {
            SourceState::Unlisted => Self::Waiting,
            _ if is_failing => Self::Failing,
            _ if !has_state => Self::Waiting,
            SourceState::CutOff => Self::CutOff,
            SourceState::Following if is_settled => Self::UpToDate,
            SourceState::Following => Self::Behind,
        }
    }

    /// As metrics, JSON and the Inspect service write it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::UpToDate => "up_to_date",
            Self::Behind => "behind",
            Self::Failing => "failing",
            Self::Waiting => "waiting",
            Self::CutOff => "cut_off",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_settled_node_of_a_replica_that_follows_its_source_is_up_to_date() {
        for source in SourceState::ALL {
            for bits in 0..8_u8 {
                let [has_state, is_failing, is_settled] = [1, 2, 4].map(|bit| bits & bit != 0);
                let state = NodeState::of(source, Reported { has_state, is_failing, is_settled });
                let is_up_to_date = source == SourceState::Following && has_state && !is_failing && is_settled;
                assert_eq!(state == NodeState::UpToDate, is_up_to_date, "{source} {bits:03b}");
                if source == SourceState::Unlisted {
                    assert_eq!(state, NodeState::Waiting);
                }
            }
        }
    }
}
