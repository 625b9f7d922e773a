//! Decides how many agents a replica asks to move to another replica. This module does no I/O and
//! reads no clock.
//!
//! Replicas do not talk to each other. Each replica compares the number of its agents with its
//! share. The share is the number of Nodes in the source, divided by the number of ready replicas
//! according to the source. Each of these Nodes counts once, if an agent follows a stream for it.
//! So the number of counted agents at all replicas never exceeds the sum of the shares. While one
//! replica is above its share, another replica is below its share. Therefore, the moves end.
//!
//! Three rules prevent agents from moving back and forth. A replica tolerates some agents above its
//! share, up to a limit. A replica must be above this limit for some time before it asks agents to
//! move. And a replica remembers which agents it asked.

use std::time::Duration;

use tokio::time::Instant;

/// The mean time from one step to the next. The actual time is random, between 0.5 and 1.5 times
/// this mean, so that replicas do not act at the same moment.
pub(super) const STEP: Duration = Duration::from_secs(1);

/// The maximum number of agents that a replica asks to move in one step.
pub(super) const MAX_PER_STEP: usize = 5;

/// How long a replica must be above its limit before it asks agents to move. The time starts again
/// when the number of replicas changes.
pub(super) const SETTLING: Duration = Duration::from_secs(10);

/// How long an agent counts as leaving after it was asked to move.
pub(super) const LEAVING: Duration = Duration::from_secs(10);

/// How long a replica remembers that it asked an agent to move. During this time it does not ask
/// this agent again.
pub(super) const MEMORY: Duration = Duration::from_secs(600);

/// A replica first asks this many agents to move. Only then it judges whether its requests are
/// futile.
const MIN_ASKED: usize = 10;

/// The numbers by which a replica decides at a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct View {
    /// How many agents the replica may have.
    pub(super) band: Band,
    /// Agents with a stream to this replica whose Nodes are in the source. Agents that were asked
    /// to move within the last [`LEAVING`] do not count.
    pub(super) agents: usize,
    /// Agents that were asked to move within the last [`MEMORY`], but not within the last
    /// [`LEAVING`].
    pub(super) asked: usize,
    /// The agents of `asked` that have a stream to this replica: they stayed or came back.
    pub(super) returned: usize,
}

/// How many agents a replica may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Band {
    /// The number of ready replicas.
    pub(super) replicas: usize,
    /// The number of Nodes divided by the number of ready replicas, rounded up.
    pub(super) share: usize,
    /// The number of agents above which a replica begins to ask agents to move.
    pub(super) limit: usize,
    /// The number of agents at which a replica stops asking agents to move.
    pub(super) target: usize,
}

impl Band {
    /// Returns the band for a number of Nodes and ready replicas; `None` without Nodes or without
    /// other replicas.
    pub(super) fn new(nodes: usize, replicas: usize) -> Option<Self> {
        if replicas < 2 || nodes == 0 {
            return None;
        }
        let share = nodes.div_ceil(replicas);
        // Agents choose replicas at random, so the numbers vary. This limit is so high that random
        // choices alone practically never exceed it.
        Some(Self { replicas, share, limit: share + share / 5 + 8, target: share + share / 10 + 4 })
    }
}

/// The state that a replica keeps from one step to the next.
#[derive(Debug, Default)]
pub(super) struct Decision {
    /// The time since which this replica has been above its limit without a break, and the number
    /// of replicas since then.
    above: Option<(Instant, usize)>,
    is_moving: bool,
}

impl Decision {
    /// Returns how many agents to ask to move, at most [`MAX_PER_STEP`]. Returns 0 if requests are
    /// futile. `view` is `None` if the replica has no [`Band`].
    pub(super) fn step(&mut self, view: Option<View>, now: Instant) -> usize {
        let Some(view) = view.filter(|view| !view.is_futile()) else {
            *self = Self::default();
            return 0;
        };
        let band = view.band;
        let is_above = view.agents > band.limit;
        self.above = match self.above {
            Some((since, replicas)) if is_above && replicas == band.replicas => Some((since, replicas)),
            _ => is_above.then_some((now, band.replicas)),
        };
        let has_settled = self.above.is_some_and(|(since, _)| now.duration_since(since) >= SETTLING);
        self.is_moving = (self.is_moving || has_settled) && view.agents > band.target;
        if self.is_moving { MAX_PER_STEP.min(view.agents - band.target) } else { 0 }
    }

    /// Returns true if the last step decided to ask agents to move.
    pub(super) fn is_moving(&self) -> bool {
        self.is_moving
    }
}

impl View {
    /// Returns true if more than three quarters of the asked agents have a stream to this replica.
    /// Such agents know no other replica, or cannot reach another replica.
    pub(super) fn is_futile(&self) -> bool {
        self.asked >= MIN_ASKED && 4 * self.returned > 3 * self.asked
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn view(agents: usize, replicas: usize) -> Option<View> {
        Some(View { band: Band::new(1_000, replicas)?, agents, asked: 0, returned: 0 })
    }

    /// Makes one step for each second of a range. Returns the number of agents that were asked.
    fn run(decision: &mut Decision, start: Instant, seconds: std::ops::Range<u64>, view: Option<View>) -> usize {
        seconds.map(|second| decision.step(view, start + Duration::from_secs(second))).sum()
    }

    #[test]
    fn a_replica_that_is_above_its_limit_only_briefly_asks_no_agents() {
        let (mut decision, start) = (Decision::default(), Instant::now());
        for round in 0..10 {
            assert_eq!(run(&mut decision, start, round * 10..round * 10 + 9, view(1_000, 2)), 0);
            assert_eq!(run(&mut decision, start, round * 10 + 9..round * 10 + 10, view(600, 2)), 0);
        }
        // A change of the number of replicas starts the time again.
        assert_eq!(run(&mut decision, start, 200..209, view(1_000, 2)), 0);
        assert_eq!(run(&mut decision, start, 209..219, view(1_000, 3)), 0);
        assert_eq!(run(&mut decision, start, 219..220, view(1_000, 3)), MAX_PER_STEP);
    }
}
