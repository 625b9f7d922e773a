//! How an agent continues from the state that it holds, and when it must wait first
//! (discovery.proto, sections 3 and 6). This module uses no clock and no connection. The session of
//! the stream passes the current time to this module.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use headgate_core::node_state::SourceState;
use tokio::time::Instant;

use super::{
    Store,
    log::{Cursor, Resume, ResumeMode},
};
use crate::objects::SourceKind;

/// Why an agent receives nothing yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NotYet {
    /// The source has not been listed, so the state is incomplete.
    Unlisted,
    /// The agent has seen a later position of the source than this replica.
    Behind {
        /// The kind.
        kind: SourceKind,
        /// The position of this replica.
        here: u64,
        /// The position of the agent.
        there: u64,
    },
}

impl NotYet {
    /// Checks that this replica has reached the positions in `seen`, for the kinds that `counts`
    /// selects. An agent receives an older Node only after its [`BehindWait`] is over.
    ///
    /// # Errors
    /// The reason why the agent has to wait. Retry when the source has been listed or its position
    /// has moved.
    pub fn check(
        store: &Store,
        seen: &BTreeMap<SourceKind, u64>,
        counts: impl Fn(SourceKind) -> bool,
    ) -> Result<(), Self> {
        if !store.is_synced() {
            return Err(Self::Unlisted);
        }
        let behind = store.behind_in(seen, counts);
        behind.map_or(Ok(()), |(kind, here, there)| Err(Self::Behind { kind, here, there }))
    }
}

/// The bounded wait of an agent that is ahead: the source may come from a backup.
#[derive(Debug, Default)]
pub struct BehindWait {
    /// When the wait ends; `None` before the wait begins.
    until: Option<Instant>,
    has_expired: bool,
    /// The kinds whose current position was requested from the source.
    asked: BTreeSet<SourceKind>,
}

/// The result of [`BehindWait::look`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// The wait begins now.
    Begins,
    /// The wait continues.
    Continues,
    /// The wait has just ended. Each wait returns this value once.
    Expires,
    /// The wait ended earlier.
    IsOver,
}

impl Wait {
    /// True when the agent receives this replica's state, even if it is older.
    #[must_use]
    pub fn is_over(self) -> bool {
        matches!(self, Self::Expires | Self::IsOver)
    }
}

impl BehindWait {
    /// Decides whether an agent still has to wait at the time `now`. `not_yet` is the result of the
    /// latest check for this agent. The wait lasts `bound`, and starts again while the replica does
    /// not follow its source. A cut-off replica cannot detect whether the source was restored. An
    /// unlisted replica has no state to send.
    pub fn look(&mut self, not_yet: NotYet, store: &Store, bound: Duration, now: Instant) -> Wait {
        let NotYet::Behind { kind, there, .. } = not_yet else { return Wait::Continues };
        if self.asked.insert(kind) {
            store.want_position(kind, there);
        }
        let is_following = store.source_state() == SourceState::Following;
        match self.until {
            Some(until) if is_following && until <= now => {
                if std::mem::replace(&mut self.has_expired, true) {
                    Wait::IsOver
                } else {
                    Wait::Expires
                }
            }
            Some(_) if is_following => Wait::Continues,
            before => {
                self.until = Some(now + bound);
                if before.is_none() { Wait::Begins } else { Wait::Continues }
            }
        }
    }
}

/// An agent that waits for its cursor, by digests or in full as `Welcome` announced.
#[derive(Debug)]
pub struct Resumption(Option<Resume>);

impl Resumption {
    /// Decides how an agent resumes. `Welcome` announces the mode to the agent. Also returns the
    /// agent's cursor if the agent can continue at once. An agent that resumes from the log never
    /// waits, because it is not ahead of this replica.
    pub fn begin(store: &Store, mut resume: Option<Resume>) -> (ResumeMode, Result<Cursor, Self>) {
        // An agent that crashed may have followed another replica since it saved its state.
        if let Some(resume) = &mut resume
            && NotYet::check(store, &resume.positions, SourceKind::has_shared_resources).is_err()
        {
            resume.epoch = 0;
        }
        let (mode, cursor) = store.cursor(resume.as_ref());
        match mode {
            ResumeMode::Log => (mode, Ok(cursor)),
            ResumeMode::Digests | ResumeMode::Full => {
                (mode, Err(Self(resume.map(|resume| Resume { epoch: 0, ..resume }))))
            }
        }
    }

    /// The agent's cursor, if this replica has reached all positions that the agent has seen.
    ///
    /// # Errors
    /// The reason why the agent has to wait. Retry when the source has been listed or its position
    /// has moved.
    pub fn advance(&self, store: &Store) -> Result<Cursor, NotYet> {
        let nothing = BTreeMap::new();
        let seen = self.0.as_ref().map_or(&nothing, |resume| &resume.positions);
        NotYet::check(store, seen, SourceKind::has_shared_resources)?;
        Ok(self.revert(store))
    }

    /// The agent's cursor into the state of this replica, even if this state is older than the
    /// agent's state. Call this method when [`BehindWait`] reports that the wait is over, for
    /// example because the source was restored from a backup.
    #[must_use]
    pub fn revert(&self, store: &Store) -> Cursor {
        store.cursor(self.0.as_ref()).1
    }
}
