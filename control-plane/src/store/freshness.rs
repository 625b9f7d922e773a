//! The state of the source, and the time since the source last confirmed each kind
//! (discovery.proto, sections 9 and 14).

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU8, Ordering},
    },
    time::{Duration, Instant},
};

use headgate_core::node_state::SourceState;
use tokio::sync::watch;

use crate::{metrics::Metrics, transaction::SourceKind};

/// The state of the source, and the time at which the source last confirmed each kind.
#[derive(Debug)]
pub(super) struct Freshness {
    inner: Mutex<Inner>,
    state: watch::Sender<SourceState>,
    /// The index in [`SourceState::ALL`] of the value in `state`. Each stream reads the index at
    /// each visit, without a lock.
    index: AtomicU8,
    is_doubted: AtomicBool,
    metrics: Arc<Metrics>,
}

#[derive(Debug)]
struct Inner {
    started: Instant,
    heard: BTreeMap<SourceKind, Instant>,
    is_listed: bool,
    problem: Option<String>,
}

impl Freshness {
    /// Creates the state of a source that has not been listed.
    pub(super) fn new(metrics: Arc<Metrics>) -> Self {
        let inner = Inner { started: Instant::now(), heard: BTreeMap::new(), is_listed: false, problem: None };
        metrics.set_source_state(SourceState::Unlisted);
        Self {
            inner: Mutex::new(inner),
            state: watch::Sender::new(SourceState::Unlisted),
            index: AtomicU8::new(SourceState::Unlisted as u8),
            is_doubted: AtomicBool::new(false),
            metrics,
        }
    }

    pub(super) fn listed(&self) {
        self.change(|inner| inner.is_listed = true);
    }

    pub(super) fn cut_off(&self, problem: Option<String>) {
        self.change(|inner| inner.problem = problem);
    }

    pub(super) fn doubted(&self, is_doubted: bool) {
        self.is_doubted.store(is_doubted, Ordering::Release);
    }

    /// The state, with CUT_OFF in place of FOLLOWING while a request to the source has failed or is
    /// late.
    pub(super) fn state_for_others(&self) -> SourceState {
        match self.state() {
            SourceState::Following if self.is_doubted.load(Ordering::Acquire) => SourceState::CutOff,
            state => state,
        }
    }

    pub(super) fn heard(&self, kind: SourceKind) {
        self.lock().heard.insert(kind, Instant::now());
    }

    pub(super) fn state(&self) -> SourceState {
        SourceState::ALL[usize::from(self.index.load(Ordering::Acquire))]
    }

    pub(super) fn watch_state(&self) -> watch::Receiver<SourceState> {
        self.state.subscribe()
    }

    pub(super) fn problem(&self) -> Option<String> {
        self.lock().problem.clone()
    }

    pub(super) fn age(&self) -> Duration {
        let inner = self.lock();
        let oldest = inner.heard.values().min().filter(|_| inner.is_listed);
        oldest.unwrap_or(&inner.started).elapsed()
    }

    pub(super) fn ages(&self) -> BTreeMap<SourceKind, Duration> {
        self.lock().heard.iter().map(|(kind, heard)| (*kind, heard.elapsed())).collect()
    }

    fn change(&self, change: impl FnOnce(&mut Inner)) {
        let mut inner = self.lock();
        change(&mut inner);
        let state = match (inner.is_listed, &inner.problem) {
            (false, _) => SourceState::Unlisted,
            (true, Some(_)) => SourceState::CutOff,
            (true, None) => SourceState::Following,
        };
        // The lock is held until the end of this function, so that states are published in order.
        self.index.store(state as u8, Ordering::Release);
        self.metrics.set_source_state(state);
        self.state.send_replace(state);
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_is_unlisted_until_every_kind_is_listed() {
        let freshness = Freshness::new(Arc::new(Metrics::default()));
        assert_eq!(freshness.state(), SourceState::Unlisted);
        freshness.cut_off(Some("refused".into()));
        assert_eq!(freshness.state(), SourceState::Unlisted);
        freshness.listed();
        assert_eq!(freshness.state(), SourceState::CutOff);
        freshness.cut_off(None);
        assert_eq!(
            (freshness.state(), *freshness.watch_state().borrow()),
            (SourceState::Following, SourceState::Following)
        );
    }

    #[test]
    fn a_source_in_doubt_is_cut_off_only_for_agents_of_other_replicas() {
        let freshness = Freshness::new(Arc::new(Metrics::default()));
        freshness.doubted(true);
        assert_eq!(freshness.state_for_others(), SourceState::Unlisted);
        freshness.listed();
        assert_eq!(freshness.state_for_others(), SourceState::CutOff);
        assert_eq!(freshness.state(), SourceState::Following);
        freshness.doubted(false);
        assert_eq!(freshness.state_for_others(), SourceState::Following);
    }

    #[test]
    fn the_index_of_a_state_is_its_place_in_the_list_of_all_states() {
        for (index, state) in SourceState::ALL.into_iter().enumerate() {
            assert_eq!(usize::from(state as u8), index);
        }
    }
}
