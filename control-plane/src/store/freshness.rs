//! The state of the source, and the time since the source last confirmed each kind
//! (discovery.proto, sections 9 and 14).

use std::{
    collections::BTreeMap,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use headgate_core::node_state::SourceState;
use tokio::sync::watch;

use super::Store;
use crate::transaction::SourceKind;

/// The state of the source, and the facts that it follows from.
#[derive(Debug)]
pub(super) struct Freshness {
    facts: Mutex<SourceFacts>,
    pub(super) state: watch::Sender<SourceState>,
    pub(super) is_doubted: AtomicBool,
}

#[derive(Debug)]
pub(super) struct SourceFacts {
    started: Instant,
    pub(super) heard: BTreeMap<SourceKind, Instant>,
    pub(super) is_listed: bool,
    pub(super) problem: Option<String>,
}

impl Default for Freshness {
    /// The state of a source that has not been listed.
    fn default() -> Self {
        let facts = SourceFacts { started: Instant::now(), heard: BTreeMap::new(), is_listed: false, problem: None };
        let state = watch::Sender::new(SourceState::Unlisted);
        Self { facts: Mutex::new(facts), state, is_doubted: AtomicBool::new(false) }
    }
}

impl Freshness {
    pub(super) fn lock(&self) -> MutexGuard<'_, SourceFacts> {
        self.facts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Store {
    /// A receiver that wakes when the state of the source changes.
    #[must_use]
    pub fn watch_source(&self) -> watch::Receiver<SourceState> {
        self.freshness.state.subscribe()
    }

    /// The state of the source (discovery.proto, section 14).
    #[must_use]
    pub fn source_state(&self) -> SourceState {
        *self.freshness.state.borrow()
    }

    /// The state of the source that agents of other replicas receive (discovery.proto, section 15):
    /// CUT_OFF instead of FOLLOWING while a request to the source has failed or is late.
    #[must_use]
    pub fn source_state_for_others(&self) -> SourceState {
        match self.source_state() {
            SourceState::Following if self.freshness.is_doubted.load(Ordering::Acquire) => SourceState::CutOff,
            state => state,
        }
    }

    /// True once every kind has been listed and committed.
    #[must_use]
    pub fn is_synced(&self) -> bool {
        self.source_state() != SourceState::Unlisted
    }

    /// Why changes do not arrive from the source; `None` if changes arrive.
    #[must_use]
    pub fn source_problem(&self) -> Option<String> {
        self.freshness.lock().problem.clone()
    }

    /// The longest time since the source last confirmed a kind. Until every kind has been listed,
    /// the result is the time since the start of the replica.
    #[must_use]
    pub fn source_age(&self) -> Duration {
        let facts = self.freshness.lock();
        let oldest = facts.heard.values().min().filter(|_| facts.is_listed);
        oldest.unwrap_or(&facts.started).elapsed()
    }

    /// Time since the source last confirmed each kind.
    #[must_use]
    pub fn source_ages(&self) -> BTreeMap<SourceKind, Duration> {
        self.freshness.lock().heard.iter().map(|(kind, heard)| (*kind, heard.elapsed())).collect()
    }

    /// Changes the facts about the source, and publishes the state that follows from them.
    pub(super) fn change_source(&self, change: impl FnOnce(&mut SourceFacts)) {
        let mut facts = self.freshness.lock();
        change(&mut facts);
        let state = match (facts.is_listed, &facts.problem) {
            (false, _) => SourceState::Unlisted,
            (true, Some(_)) => SourceState::CutOff,
            (true, None) => SourceState::Following,
        };
        // The lock is held until the end of this function, so that states are published in order.
        self.metrics.set_source_state(state);
        self.freshness.state.send_replace(state);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{metrics::Metrics, store::Limits, transaction::Sink as _};

    #[test]
    fn a_source_is_unlisted_until_every_kind_is_listed_and_in_doubt_only_for_other_replicas() {
        let store = Store::new(Limits::default(), Arc::new(Metrics::default()));
        let states = || (store.source_state(), store.source_state_for_others());
        store.doubted(true);
        store.cut_off(Some("refused".into()));
        assert_eq!(states(), (SourceState::Unlisted, SourceState::Unlisted));
        store.synced();
        assert_eq!(states(), (SourceState::CutOff, SourceState::CutOff));
        store.cut_off(None);
        assert_eq!(states(), (SourceState::Following, SourceState::CutOff));
        store.doubted(false);
        assert_eq!(states(), (SourceState::Following, SourceState::Following));
    }
}
