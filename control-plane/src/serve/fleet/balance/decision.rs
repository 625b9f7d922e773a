//! How many agents a replica asks to go elsewhere. No I/O, no clock.
//!
//! Replicas know nothing of each other. Each compares the number of its agents with its share: the
//! Nodes of the source, divided by the replicas that are ready according to the source. Only agents
//! of such Nodes count, one stream for each, so all replicas together never have more agents than
//! all shares together. While one replica is above its share another is below, and the moves come
//! to an end. Three things keep agents from moving to and fro: a band around the share, a time for
//! which a replica has to be above the band, and a memory of the agents that were asked before.

use std::time::Duration;

use tokio::time::Instant;

/// Mean time from one step to the next. Each time is drawn from half to one and a half of it, so
/// that replicas do not act at the same moment.
pub(super) const STEP: Duration = Duration::from_secs(1);

/// Agents asked in one step at the most.
pub(super) const MAX_PER_STEP: usize = 5;

/// How long a replica has to be above its limit, with the same number of replicas, before it asks
/// agents to move.
pub(super) const SETTLING: Duration = Duration::from_secs(10);

/// Time in which an agent that was asked goes.
pub(super) const LEAVING: Duration = Duration::from_secs(10);

/// Who was asked is not asked again for so long.
pub(super) const MEMORY: Duration = Duration::from_secs(600);

/// Asked agents from which can be told whether asking helps.
const TELLING: usize = 10;

/// What a replica sees at a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct View {
    /// Where it may be.
    pub(super) band: Band,
    /// Agents with a stream here whose Nodes are in the source, without those that were asked to
    /// move in the last [`LEAVING`].
    pub(super) agents: usize,
    /// Agents that were asked to go before that, and in the last [`MEMORY`].
    pub(super) asked: usize,
    /// Those of them that are here: they stayed, or found no other replica.
    pub(super) returned: usize,
}

/// How many agents a replica may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Band {
    pub(super) replicas: usize,
    pub(super) share: usize,
    /// Above this, agents are asked to go, ...
    pub(super) limit: usize,
    /// ... until no more than this are left.
    pub(super) target: usize,
}

impl Band {
    /// The band around a share. There is none without other replicas, or without nodes.
    pub(super) fn new(nodes: usize, replicas: usize) -> Option<Self> {
        if replicas < 2 || nodes == 0 {
            return None;
        }
        let share = nodes.div_ceil(replicas);
        // Agents choose replicas at random, and by chance alone no replica gets above this limit.
        Some(Self { replicas, share, limit: share + share / 5 + 8, target: share + share / 10 + 4 })
    }
}

/// What is remembered from one step to the next.
#[derive(Debug, Default)]
pub(super) struct Decision {
    /// Since when, and at how many replicas, this one has been above its limit without a break.
    above: Option<(Instant, usize)>,
    is_moving: bool,
}

impl Decision {
    /// How many agents to ask to move, at most [`MAX_PER_STEP`]. `None` stands for what is not
    /// known: there is one replica, or the source is stale.
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

    /// True from the first agent that is asked to go until the target is reached.
    pub(super) fn is_moving(&self) -> bool {
        self.is_moving
    }
}

impl View {
    /// Most of those who were asked are here: they know of no other replica, or reach none.
    pub(super) fn is_futile(&self) -> bool {
        self.asked >= TELLING && 4 * self.returned > 3 * self.asked
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn view(agents: usize, replicas: usize) -> Option<View> {
        Some(View { band: Band::new(1_000, replicas)?, agents, asked: 0, returned: 0 })
    }

    /// Steps a second for so long; agents that were asked.
    fn run(decision: &mut Decision, start: Instant, seconds: std::ops::Range<u64>, view: Option<View>) -> usize {
        seconds.map(|second| decision.step(view, start + Duration::from_secs(second))).sum()
    }

    #[test]
    fn a_band_is_around_the_share() {
        let band = Band::new(1_000, 3).unwrap();
        assert_eq!((band.share, band.limit, band.target), (334, 408, 371));
        let band = Band::new(1, 2).unwrap();
        assert_eq!((band.share, band.limit, band.target), (1, 9, 5));
        assert_eq!((Band::new(1_000, 1), Band::new(1_000, 0), Band::new(0, 2)), (None, None, None));
    }

    #[test]
    fn agents_are_asked_slowly_once_a_replica_has_been_above_its_limit_for_some_time() {
        let (mut decision, start) = (Decision::default(), Instant::now());
        assert_eq!(run(&mut decision, start, 0..10, view(1_000, 2)), 0);
        assert!(!decision.is_moving());
        assert_eq!(run(&mut decision, start, 10..20, view(1_000, 2)), 10 * MAX_PER_STEP);
        // Below the limit it goes on until the target.
        assert_eq!(run(&mut decision, start, 20..21, view(556, 2)), 2);
        assert!(decision.is_moving());
        assert_eq!(run(&mut decision, start, 21..22, view(554, 2)), 0);
        assert!(!decision.is_moving());
        // And does nothing then in between.
        assert_eq!(run(&mut decision, start, 22..60, view(608, 2)), 0);
    }

    #[test]
    fn what_passes_is_waited_for() {
        let (mut decision, start) = (Decision::default(), Instant::now());
        for round in 0..10 {
            assert_eq!(run(&mut decision, start, round * 10..round * 10 + 9, view(1_000, 2)), 0);
            assert_eq!(run(&mut decision, start, round * 10 + 9..round * 10 + 10, view(600, 2)), 0);
        }
        // A replica more is another situation.
        assert_eq!(run(&mut decision, start, 200..209, view(1_000, 2)), 0);
        assert_eq!(run(&mut decision, start, 209..219, view(1_000, 3)), 0);
        assert_eq!(run(&mut decision, start, 219..220, view(1_000, 3)), MAX_PER_STEP);
    }

    #[test]
    fn what_is_not_known_stops_it() {
        let (mut decision, start) = (Decision::default(), Instant::now());
        assert_eq!(run(&mut decision, start, 0..100, view(1_000, 1)), 0);
        assert!(run(&mut decision, start, 100..120, view(1_000, 2)) > 0);
        assert_eq!(run(&mut decision, start, 120..121, None), 0);
        assert!(!decision.is_moving());
        assert_eq!(run(&mut decision, start, 121..131, view(1_000, 2)), 0, "it begins anew");
    }

    #[test]
    fn agents_that_come_back_are_left_alone() {
        let (mut decision, start) = (Decision::default(), Instant::now());
        let here = |asked, returned| view(1_000, 2).map(|view| View { asked, returned, ..view });
        assert!(run(&mut decision, start, 0..11, here(0, 0)) > 0);
        assert!(run(&mut decision, start, 11..12, here(40, 30)) > 0, "some always do");
        assert_eq!(run(&mut decision, start, 12..100, here(40, 31)), 0);
    }
}
