//! Decides when an agent leaves its replica for another replica, by rule 15 of the contract in
//! `proto/headgate/v1/discovery.proto`. The module does no I/O. The caller passes the current time.

use std::{collections::BTreeMap, time::Duration};

use headgate_core::node_state::SourceState;
use headgate_proto::v1::{self, source_position::Kind};
use tokio::time::Instant;

use crate::backoff::{Backoff, Jitter, jitter};

/// Source positions by the number of their kind ([`headgate_proto::v1::source_position::Kind`]).
/// Contains only kinds whose positions are comparable between replicas.
pub type Positions = BTreeMap<i32, u64>;

/// Shortest and longest time that an agent waits for a replica that has not listed its source. Each
/// agent draws a random time between these two times, so that the agents of a replica do not move
/// together.
const UNLISTED_PATIENCE: [Duration; 2] = [Duration::from_secs(2), Duration::from_secs(4)];
/// Shortest and longest time that an agent waits for a replica that is cut off from its source.
const CUT_OFF_PATIENCE: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(6)];
/// Time without progress after which a stream without a complete state counts as stalled. By
/// default, a replica that is behind the agent sends its older state after 30 seconds. This
/// constant is shorter, so that the agent can first move to a replica that is not behind.
const STALLED_PATIENCE: Duration = Duration::from_secs(20);
/// Time without a replica that follows its source after which an agent also moves to a replica that
/// is behind. Shorter losses of a source are usual. After a longer one, all replicas that follow
/// their source may be behind for ever, because the source was restored from a backup.
const RESTORE_PATIENCE: Duration = Duration::from_secs(45);
/// Pauses between two requests to the other replicas.
const ASK_PAUSES: Backoff = Backoff::new(Duration::from_secs(5), Duration::from_secs(60), Jitter::Half);
/// Shortest times that the agent stays with a replica after a move. These times grow with each
/// move.
const STAYS: Backoff = Backoff::new(Duration::from_secs(10), Duration::from_secs(300), Jitter::None);
/// After a stay of this length, earlier moves are forgotten.
const SETTLED_AFTER: Duration = Duration::from_secs(600);

/// Why an agent looks for another replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trouble {
    /// The replica has not listed its source.
    Unlisted,
    /// The replica is cut off from its source.
    CutOff,
    /// The stream has not brought a complete state and makes no progress.
    Stalled,
    /// The replica works, but has more agents than its share.
    Crowded,
}

impl Trouble {
    /// The reason as a text for the log.
    pub fn reason(self) -> &'static str {
        match self {
            Self::Unlisted => "the current replica has not listed its source",
            Self::CutOff => "the current replica is cut off from its source",
            Self::Stalled => "the current replica sends no complete state",
            Self::Crowded => "the current replica has more agents than its share",
        }
    }

    /// The value of the metric label `reason`, from a small fixed set.
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

/// What another replica reports about its source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Standing {
    /// The state of the source.
    pub source: SourceState,
    /// The current positions of the source.
    pub positions: Positions,
    /// The positions of the last change of each kind.
    pub changed: Positions,
}

/// Returns the positions that decide whether a replica is behind: Services, EndpointSlices and
/// ServiceCIDRs.
///
/// The position of a folder is left out, because this position is a time of the clock of the
/// replica that reads the folder. The position of Nodes is left out, because it concerns only the
/// agent's own Node. A replica whose Nodes are behind sends all resources except this Node (rule 6
/// of the contract).
#[must_use]
pub fn comparable(positions: &[v1::SourcePosition]) -> Positions {
    let is_comparable = |kind| matches!(kind, Kind::Services | Kind::EndpointSlices | Kind::ServiceCidrs);
    let known = positions.iter().filter(|source| is_comparable(source.kind()));
    known.map(|source| (source.kind, source.position)).collect()
}

/// The facts about an agent's state that decide whether another replica is better.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct HeldState {
    /// The source positions of the state; see [`comparable`].
    pub positions: Positions,
    /// True if the state may lack resources, although its positions include them: the agent
    /// rejected the resources, another version of the program left them out, or an earlier run had
    /// them and crashed.
    pub may_lack: bool,
}

impl HeldState {
    /// Extracts the facts from the result of [`crate::state::AgentState::point`].
    #[must_use]
    pub fn of(point: &v1::Resume) -> Self {
        Self { positions: comparable(&point.positions), may_lack: point.epoch == 0 }
    }
}

impl Standing {
    /// The standing in a replica's answer.
    #[must_use]
    pub fn of(answer: &v1::StandingResponse) -> Self {
        Self {
            source: answer.source_state().into(),
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

/// How well a replica serves an agent, in ascending order. An agent moves only to a replica that
/// serves the agent better than its current replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Worth {
    /// The replica has no state that the agent could use.
    Nothing,
    /// The replica has a state, but receives no changes.
    OldState,
    /// The replica receives changes, and its state is older than the agent's.
    OlderSource,
    /// The replica has a state and receives changes.
    Everything,
}

/// The worth of an agent's own replica when the agent looks for another replica. A stalled stream
/// brings nothing to an agent that holds nothing.
fn worth_of_own(trouble: Trouble, holds_state: bool) -> Worth {
    match trouble {
        Trouble::Unlisted => Worth::Nothing,
        Trouble::Stalled if !holds_state => Worth::Nothing,
        Trouble::CutOff | Trouble::Stalled | Trouble::Crowded => Worth::OldState,
    }
}

/// The worth of another replica to an agent. `held` describes the agent's state; `None` means that
/// the agent holds no state.
fn worth_of_other(standing: &Standing, held: Option<&HeldState>, accepts_older: bool) -> Worth {
    let is_behind = held.is_some_and(|held| standing.is_behind(held));
    match standing.source {
        SourceState::Following if !is_behind => Worth::Everything,
        SourceState::Following if accepts_older => Worth::OlderSource,
        SourceState::CutOff if !is_behind && held.is_none_or(|held| standing.is_ahead(held)) => Worth::OldState,
        _ => Worth::Nothing,
    }
}

/// Returns the index of the replica to move to, if any of `others` is better than the agent's own
/// replica. If several replicas are equally good, chooses one of them at random. `accepts_older` is
/// [`Failover::accepts_older`].
pub fn choose(trouble: Trouble, held: Option<&HeldState>, others: &[Standing], accepts_older: bool) -> Option<usize> {
    let worth: Vec<Worth> = others.iter().map(|standing| worth_of_other(standing, held, accepts_older)).collect();
    let best = worth.iter().copied().max().filter(|best| *best > worth_of_own(trouble, held.is_some()))?;
    let best: Vec<usize> = (0..worth.len()).filter(|index| worth[*index] == best).collect();
    fastrand::choice(best)
}

/// Limits an agent's moves, over all its streams. After each move, the agent stays longer with its
/// replica, so that agents do not move in circles.
#[derive(Debug)]
pub struct MoveLimits {
    stays: Backoff,
    last: Option<Instant>,
    /// The time before which the agent does not move again.
    stays_until: Option<Instant>,
}

impl Default for MoveLimits {
    fn default() -> Self {
        Self { stays: STAYS, last: None, stays_until: None }
    }
}

impl MoveLimits {
    /// Records a move.
    pub fn moved(&mut self, now: Instant) {
        if self.last.is_some_and(|last| now.saturating_duration_since(last) >= SETTLED_AFTER) {
            self.stays.reset();
        }
        self.last = Some(now);
        self.stays_until = Some(now + self.stays.next_pause());
    }
}

/// Decides for one stream, from `Hello` on, when to look for another replica.
#[derive(Debug)]
pub struct Failover {
    source: Option<SourceState>,
    /// Since when the source has been in another state than `Following`.
    without_source_since: Option<Instant>,
    accepts_older: bool,
    is_complete: bool,
    progressed: Instant,
    snapshots_sent: u64,
    trouble: Option<Trouble>,
    /// When to ask the other replicas, while `trouble` is set.
    ask_at: Instant,
    ask_pauses: Backoff,
    /// When to ask the other replicas because this replica asked the agent to move.
    balance_at: Option<Instant>,
    stays_until: Option<Instant>,
}

impl Failover {
    /// Starts at the beginning of a stream.
    pub fn new(limits: &MoveLimits, now: Instant) -> Self {
        Self {
            source: None,
            without_source_since: None,
            accepts_older: false,
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

    /// Records the state of the replica's source.
    pub fn on_source(&mut self, source: SourceState, now: Instant) {
        self.source = Some(source);
        let is_without = source != SourceState::Following;
        self.without_source_since = is_without.then(|| self.without_source_since.unwrap_or(now));
        self.update_trouble(now);
    }

    /// Records the number of snapshots that the replica has completed, for any agent. A new number
    /// counts as progress of this stream.
    pub fn on_snapshots_sent(&mut self, count: u64, now: Instant) {
        if count != self.snapshots_sent {
            self.snapshots_sent = count;
            self.on_progress(self.is_complete, now);
        }
    }

    /// Records that a part of the state has arrived, and whether the state is complete.
    pub fn on_progress(&mut self, is_complete: bool, now: Instant) {
        (self.is_complete, self.progressed) = (is_complete, now);
        self.update_trouble(now);
    }

    /// Records that the replica asks the agent to move, for balance. The agent asks the other
    /// replicas at `at`.
    pub fn on_balance_request(&mut self, at: Instant) {
        self.balance_at = Some(self.balance_at.map_or(at, |earlier| earlier.min(at)));
    }

    /// Determines the trouble at `now`. If the trouble is new, starts the wait before the first
    /// request.
    fn update_trouble(&mut self, now: Instant) {
        let is_stalled = !self.is_complete && now >= self.progressed + STALLED_PATIENCE;
        let trouble = match self.source {
            Some(SourceState::Unlisted) => Some(Trouble::Unlisted),
            Some(SourceState::CutOff) => Some(Trouble::CutOff),
            _ if is_stalled => Some(Trouble::Stalled),
            _ => None,
        };
        let accepts_older = self.accepts_older_from().is_some_and(|from| now >= from);
        if (trouble, accepts_older) != (self.trouble, self.accepts_older) {
            (self.trouble, self.accepts_older) = (trouble, accepts_older);
            self.ask_pauses.reset();
            self.ask_at = now + trouble.map_or(Duration::ZERO, Trouble::patience);
        }
    }

    fn accepts_older_from(&self) -> Option<Instant> {
        self.without_source_since.map(|since| since + RESTORE_PATIENCE)
    }

    /// True if the agent also moves to a replica that follows its source and is behind the agent.
    pub fn accepts_older(&self) -> bool {
        self.accepts_older
    }

    /// True if the agent still has this reason to look for another replica.
    pub fn still_applies(&self, trouble: Trouble) -> bool {
        trouble == Trouble::Crowded || self.trouble == Some(trouble)
    }

    /// When to call [`Self::due`] next; `None` if no request to other replicas is expected.
    pub fn due_at(&self) -> Option<Instant> {
        let stays = |at: Instant| at.max(self.stays_until.unwrap_or(at));
        let trouble_at = match self.trouble {
            // Such moves are rare: each follows a loss of the source of [`RESTORE_PATIENCE`].
            Some(_) if self.accepts_older => Some(self.ask_at),
            Some(_) => Some(self.accepts_older_from().into_iter().fold(stays(self.ask_at), Instant::min)),
            None if !self.is_complete => Some(self.progressed + STALLED_PATIENCE),
            None => None,
        };
        trouble_at.into_iter().chain(self.balance_at.map(stays)).min()
    }

    /// Returns the reason to ask the other replicas now, or `None` if no reason is due. The pause
    /// before the next request for the same reason grows with each request.
    pub fn due(&mut self, now: Instant) -> Option<Trouble> {
        self.update_trouble(now);
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
