//! How an agent goes on from what it holds, and when it has to wait first (contract, 3 and 6). No
//! clock and no connection: the session asks, and knows how long it has asked.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use headgate_core::node_state::SourceState;
use tokio::time::Instant;

use super::{
    Store,
    cursor::{Cursor, Resume, ResumeMode},
};
use crate::transaction::SourceKind;

/// Why an agent is given nothing yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NotYet {
    /// The source has not been listed: there is no state, only parts of one.
    Unlisted,
    /// The agent has seen more of the source than this replica.
    Behind {
        /// Of this kind.
        kind: SourceKind,
        /// Where this replica is.
        here: u64,
        /// Where the agent is.
        there: u64,
    },
}

impl NotYet {
    /// The first kind of `seen`, among those that count, of which this replica has seen less.
    fn check(store: &Store, seen: &BTreeMap<SourceKind, u64>, counts: impl Fn(SourceKind) -> bool) -> Result<(), Self> {
        if !store.is_synced() {
            return Err(Self::Unlisted);
        }
        let behind = store.behind_in(seen, counts);
        behind.map_or(Ok(()), |(kind, here, there)| Err(Self::Behind { kind, here, there }))
    }
}

/// The wait of an agent that has seen more of the source than a replica: bounded, since the source
/// may have been restored from a backup.
#[derive(Debug, Default)]
pub struct BehindWait {
    /// When it ends; set once it has begun.
    until: Option<Instant>,
    has_expired: bool,
    /// The kinds of which the source was asked how far it has come.
    asked: BTreeSet<SourceKind>,
}

/// What [`BehindWait::look`] finds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// The agent waits from now on.
    Begins,
    /// It still waits.
    GoesOn,
    /// It has waited long enough, which is said once.
    Expires,
    /// It has waited long enough.
    IsOver,
}

impl Wait {
    /// True when the agent is given what this replica has, be it older than what the agent has.
    #[must_use]
    pub fn is_over(self) -> bool {
        matches!(self, Self::Expires | Self::IsOver)
    }
}

impl BehindWait {
    /// Whether an agent that would have to wait still does, at `now`, for `bound` in all. The bound
    /// runs while the replica follows its source: a replica that is cut off shows nothing about a
    /// restored source, and one that has listed nothing has nothing to give.
    pub fn look(&mut self, not_yet: NotYet, store: &Store, bound: Duration, now: Instant) -> Wait {
        let NotYet::Behind { kind, there, .. } = not_yet else { return Wait::GoesOn };
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
            Some(_) if is_following => Wait::GoesOn,
            before => {
                self.until = Some(now + bound);
                if before.is_none() { Wait::Begins } else { Wait::GoesOn }
            }
        }
    }
}

/// What an agent has seen of its own Node. It is given no older one.
#[derive(Debug)]
pub struct NodeResumption(BTreeMap<SourceKind, u64>);

impl NodeResumption {
    /// Takes the positions from what the agent says that it holds.
    #[must_use]
    pub fn begin(resume: Option<&Resume>) -> Self {
        Self(resume.map(|resume| resume.positions.clone()).unwrap_or_default())
    }

    /// Ok once this replica's Nodes are as new as the agent's.
    ///
    /// # Errors
    /// Why the agent is not given its Node yet; to be asked again when the source was listed or
    /// moved.
    pub fn check(&self, store: &Store) -> Result<(), NotYet> {
        NotYet::check(store, &self.0, SourceKind::has_nodes)
    }
}

/// An agent on its way from `Hello` to its place in the store. Once it was told that it resumes by
/// digests, or from nothing, it does so however long it waits.
#[derive(Debug)]
pub struct Resumption(Option<Resume>);

impl Resumption {
    /// How an agent goes on, for `Welcome`; and its place, if it has one at once, as only a resume
    /// by the log does: it goes on where it was on this very replica.
    pub fn begin(store: &Store, resume: Option<Resume>) -> (ResumeMode, Result<Cursor, Self>) {
        let (mode, cursor) = store.cursor(resume.as_ref());
        match mode {
            ResumeMode::Log => (mode, Ok(cursor)),
            ResumeMode::Digests | ResumeMode::Full => {
                (mode, Err(Self(resume.map(|resume| Resume { epoch: 0, ..resume }))))
            }
        }
    }

    /// The agent's place, once this replica has everything that the agent has.
    ///
    /// # Errors
    /// Why it has to wait; to be asked again when the source was listed or moved.
    pub fn advance(&self, store: &Store) -> Result<Cursor, NotYet> {
        let nothing = BTreeMap::new();
        let seen = self.0.as_ref().map_or(&nothing, |resume| &resume.positions);
        NotYet::check(store, seen, SourceKind::has_shared_resources)?;
        Ok(self.revert(store))
    }

    /// The agent's place in what this replica has, be it older than what the agent has. For when it
    /// has waited too long, as after the restore of a source.
    #[must_use]
    pub fn revert(&self, store: &Store) -> Cursor {
        store.cursor(self.0.as_ref()).1
    }
}
