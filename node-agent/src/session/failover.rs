//! When an agent leaves its replica for another (contract, 15). Decides only: no input, no output,
//! no clock of its own.

use std::{collections::BTreeMap, time::Duration};

use headgate_core::node_state::SourceState;
use headgate_proto::v1::{self, source_position::Kind};
use tokio::time::Instant;

use crate::backoff::{Backoff, Jitter, jitter};

/// Source positions by the number of their kind ([`headgate_proto::v1::source_position::Kind`]), of
/// kinds that replicas count alike.
pub type Positions = BTreeMap<i32, u64>;

/// A replica that has listed nothing is waited for from the first to the second of these.
const UNLISTED_PATIENCE: [Duration; 2] = [Duration::from_secs(2), Duration::from_secs(4)];
/// Likewise for one that is cut off from its source. The difference spreads its agents when they
/// move.
const CUT_OFF_PATIENCE: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(6)];
/// A stream that brings no complete state is waited for so long after the last sign of progress. A
/// replica that is behind the agent sends its older state after 30 seconds by default: before that,
/// the agent has asked the others, and has moved to one that is not behind.
const STALLED_PATIENCE: Duration = Duration::from_secs(20);
/// Pauses between two rounds of asking the other replicas.
const ASK_PAUSES: Backoff = Backoff::new(Duration::from_secs(5), Duration::from_secs(60), Jitter::Half);
/// Times that the agent stays with a replica after a move.
const STAYS: Backoff = Backoff::new(Duration::from_secs(10), Duration::from_secs(300), Jitter::None);
/// After so long a stay the moves before it count no more.
const SETTLED_AFTER: Duration = Duration::from_secs(600);

/// Why an agent looks for another replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trouble {
    /// The replica has listed nothing.
    Unlisted,
    /// The replica is cut off from its source.
    CutOff,
    /// The stream brings no complete state.
    Stalled,
    /// Nothing is wrong; the replica has more agents than its share.
    Crowded,
}

impl Trouble {
    /// For logs.
    pub fn reason(self) -> &'static str {
        match self {
            Self::Unlisted => "it has not listed its source",
            Self::CutOff => "it is cut off from its source",
            Self::Stalled => "it brings no complete state",
            Self::Crowded => "it has more agents than its share",
        }
    }

    /// A label from a small fixed set.
    pub fn label(self) -> &'static str {
        match self {
            Self::Unlisted => "moved_unlisted",
            Self::CutOff => "moved_cut_off",
            Self::Stalled => "moved_stalled",
            Self::Crowded => "moved_for_balance",
        }
    }

    fn patience(self) -> Duration {
        let [from, to] = match self {
            Self::Unlisted => UNLISTED_PATIENCE,
            Self::CutOff => CUT_OFF_PATIENCE,
            Self::Stalled | Self::Crowded => [Duration::ZERO; 2],
        };
        from + jitter(to - from)
    }
}

/// What another replica says of itself.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Standing {
    /// `None`: the replica is older than the question.
    pub source: Option<SourceState>,
    /// Where its source stands.
    pub positions: Positions,
    /// Where its source stood when each kind changed last.
    pub changed: Positions,
}

/// The positions that decide: of the kinds that every agent receives, as far as all replicas count
/// them alike. A folder's position is the clock of whoever reads it, and that of Nodes is about one
/// agent's Node, which a replica that is behind withholds by itself.
#[must_use]
pub fn comparable(positions: &[v1::SourcePosition]) -> Positions {
    let is_comparable = |kind| matches!(kind, Kind::Services | Kind::EndpointSlices | Kind::ServiceCidrs);
    let known = positions.iter().filter(|source| is_comparable(source.kind()));
    known.map(|source| (source.kind, source.position)).collect()
}

/// The state that an agent holds, as far as it decides.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct HeldState {
    /// Where the source was; see [`comparable`].
    pub positions: Positions,
    /// Some resource of these positions may be missing: it was rejected, or another version of the
    /// program left it out.
    pub may_lack: bool,
}

impl HeldState {
    /// What [`crate::state::held::Held::point`] says of a state.
    #[must_use]
    pub fn of(point: &v1::Resume) -> Self {
        Self { positions: comparable(&point.positions), may_lack: point.epoch == 0 }
    }
}

impl Standing {
    /// What a replica answered.
    #[must_use]
    pub fn of(answer: &v1::StandingResponse) -> Self {
        Self {
            source: answer.source_state().known(),
            positions: comparable(&answer.positions),
            changed: comparable(&answer.changed_positions),
        }
    }

    fn is_behind(&self, held: &HeldState) -> bool {
        held.positions.iter().any(|(kind, ours)| self.positions.get(kind).is_some_and(|theirs| theirs < ours))
    }

    fn is_ahead(&self, held: &HeldState) -> bool {
        let is_newer = |(kind, theirs)| held.positions.get(kind).is_none_or(|ours| theirs > ours);
        held.may_lack || self.changed.iter().any(is_newer)
    }
}

/// How well a replica serves an agent. Agents move upwards only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Worth {
    Nothing,
    Unknown,
    OldState,
    Everything,
}

/// What the present replica is worth to an agent that looks for another.
fn worth_here(trouble: Trouble, holds_state: bool) -> Worth {
    match trouble {
        Trouble::Unlisted => Worth::Nothing,
        Trouble::Stalled if !holds_state => Worth::Unknown,
        Trouble::CutOff | Trouble::Stalled | Trouble::Crowded => Worth::OldState,
    }
}

/// What another replica is worth to an agent that holds a state at these positions, or none.
fn worth_there(standing: &Standing, held: Option<&HeldState>) -> Worth {
    match (standing.source, held) {
        (Some(SourceState::Unlisted), _) => Worth::Nothing,
        (Some(SourceState::Following), None) => Worth::Everything,
        (Some(SourceState::CutOff), None) => Worth::OldState,
        (None, None) => Worth::Unknown,
        (Some(SourceState::Following), Some(held)) if !standing.is_behind(held) => Worth::Everything,
        (Some(SourceState::CutOff), Some(held)) if !standing.is_behind(held) && standing.is_ahead(held) => {
            Worth::OldState
        }
        (_, Some(_)) => Worth::Nothing,
    }
}

/// Which of the replicas that answered to move to: one at random of those that are worth most, if
/// that is more than the present one is.
pub fn choose(trouble: Trouble, held: Option<&HeldState>, others: &[Standing]) -> Option<usize> {
    let worth: Vec<Worth> = others.iter().map(|standing| worth_there(standing, held)).collect();
    let best = worth.iter().copied().max().filter(|best| *best > worth_here(trouble, held.is_some()))?;
    let best: Vec<usize> = (0..worth.len()).filter(|index| worth[*index] == best).collect();
    fastrand::choice(best)
}

/// Limits the moves that an agent has chosen to make, over all its streams. They become rarer, so
/// that agents do not move in circles.
#[derive(Debug)]
pub struct MoveLimits {
    stays: Backoff,
    last: Option<Instant>,
    /// The agent does not move again before then.
    stays_until: Option<Instant>,
}

impl Default for MoveLimits {
    fn default() -> Self {
        Self { stays: STAYS, last: None, stays_until: None }
    }
}

impl MoveLimits {
    /// The agent moves.
    pub fn moved(&mut self, now: Instant) {
        if self.last.is_some_and(|last| now.saturating_duration_since(last) >= SETTLED_AFTER) {
            self.stays.reset();
        }
        self.last = Some(now);
        self.stays_until = Some(now + self.stays.next_pause());
    }
}

/// One stream, from `Hello` on.
#[derive(Debug)]
pub struct Failover {
    source: Option<SourceState>,
    is_complete: bool,
    progressed: Instant,
    snapshots_sent: u64,
    trouble: Option<Trouble>,
    /// When to ask the other replicas; while there is trouble.
    ask_at: Instant,
    ask_pauses: Backoff,
    /// When to ask them because the replica wishes that the agent went.
    balance_at: Option<Instant>,
    stays_until: Option<Instant>,
}

impl Failover {
    /// A stream begins.
    pub fn new(limits: &MoveLimits, now: Instant) -> Self {
        Self {
            source: None,
            is_complete: false,
            progressed: now,
            snapshots_sent: 0,
            trouble: None,
            ask_at: now,
            ask_pauses: ASK_PAUSES,
            balance_at: None,
            stays_until: limits.stays_until,
        }
    }

    /// The replica says what its source is doing; `None` from an older one.
    pub fn on_source(&mut self, source: Option<SourceState>, now: Instant) {
        self.source = source;
        self.look(now);
    }

    /// The replica has completed so many snapshots, for any agent.
    pub fn on_snapshots_sent(&mut self, count: u64, now: Instant) {
        if count != self.snapshots_sent {
            self.snapshots_sent = count;
            self.on_progress(self.is_complete, now);
        }
    }

    /// A part of the state has come; the state is complete, or is not yet.
    pub fn on_progress(&mut self, is_complete: bool, now: Instant) {
        (self.is_complete, self.progressed) = (is_complete, now);
        self.look(now);
    }

    /// The replica asks the agent to move, for balance. The agent looks for another replica at
    /// `at`.
    pub fn on_balance_request(&mut self, at: Instant) {
        self.balance_at = Some(self.balance_at.map_or(at, |earlier| earlier.min(at)));
    }

    /// Takes note of what is wrong at a moment.
    fn look(&mut self, now: Instant) {
        let is_stalled = !self.is_complete && now >= self.progressed + STALLED_PATIENCE;
        let trouble = match self.source {
            Some(SourceState::Unlisted) => Some(Trouble::Unlisted),
            Some(SourceState::CutOff) => Some(Trouble::CutOff),
            _ if is_stalled => Some(Trouble::Stalled),
            _ => None,
        };
        if trouble != self.trouble {
            self.trouble = trouble;
            self.ask_pauses.reset();
            self.ask_at = now + trouble.map_or(Duration::ZERO, Trouble::patience);
        }
    }

    /// Whether this is still why the agent looks for another replica.
    pub fn still_applies(&self, trouble: Trouble) -> bool {
        trouble == Trouble::Crowded || self.trouble == Some(trouble)
    }

    /// When [`Self::due`] has to be asked again; `None`: nothing is expected.
    pub fn due_at(&self) -> Option<Instant> {
        let stays = |at: Instant| at.max(self.stays_until.unwrap_or(at));
        let trouble_at = match self.trouble {
            Some(_) => Some(stays(self.ask_at)),
            None if !self.is_complete => Some(self.progressed + STALLED_PATIENCE),
            None => None,
        };
        trouble_at.into_iter().chain(self.balance_at.map(stays)).min()
    }

    /// Why the others are to be asked now, if they are. The next time for the same reason is after
    /// a pause that grows.
    pub fn due(&mut self, now: Instant) -> Option<Trouble> {
        self.look(now);
        if self.due_at().is_none_or(|at| at > now) {
            return None;
        }
        if let Some(trouble) = self.trouble {
            self.ask_at = now + self.ask_pauses.next_pause();
            self.balance_at = None;
            return Some(trouble);
        }
        self.balance_at.take().map(|_| Trouble::Crowded)
    }
}

#[cfg(test)]
mod tests;
