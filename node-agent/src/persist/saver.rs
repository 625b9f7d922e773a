//! Decides when the state is written.

use std::{sync::Arc, time::Duration};

use tokio::{
    runtime::Handle,
    sync::watch,
    time::{Instant, sleep},
};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::{SaveMetrics, file::StateFile};
use crate::{progress::Progress, state::AgentState};

/// How often the run is recorded, at most. The first state of a run is written after this time, so
/// that a new node soon has a file.
const RECORD_PERIOD: Duration = Duration::from_secs(10);
const SHORTEST_STEP: Duration = Duration::from_millis(100);

/// Writes the state that the kernel has. Call [`Self::run`]. After `run` returns, call
/// [`Self::save_last`]. Both block.
#[derive(Debug)]
pub(crate) struct Saver {
    file: StateFile,
    interval: Duration,
    state: Arc<AgentState>,
    metrics: SaveMetrics,
    progress: watch::Receiver<Progress>,
    /// The generation of the state on disk. `None` if no usable state is on disk.
    saved: Option<u64>,
    /// The generation whose positions are recorded.
    recorded: Option<u64>,
    /// When the state may be written next.
    save_at: Instant,
    has_failed: bool,
}

impl Saver {
    /// Creates a saver for `file`. If the file holds a usable state, this is generation 0 of
    /// `state`. The saver writes at most once per `interval`.
    pub(crate) fn new(
        file: StateFile,
        interval: Duration,
        state: Arc<AgentState>,
        metrics: SaveMetrics,
        progress: watch::Receiver<Progress>,
    ) -> Self {
        let (saved, save_at) = (file.holds_state.then_some(0), Instant::now() + pause(interval));
        Self { file, interval, state, metrics, progress, saved, recorded: None, save_at, has_failed: false }
    }

    /// Saves newly programmed states, at most once per interval, until `shutdown`.
    pub(crate) fn run(mut self, shutdown: &CancellationToken) -> Self {
        let (runtime, mut progress) = (Handle::current(), self.progress.clone());
        // Waits until the kernel has this generation. Returns false if the agent stops.
        let mut has_programmed = |generation| {
            let is_programmed = |progress: &Progress| progress.generation() >= Some(generation);
            let programmed = shutdown.run_until_cancelled(progress.wait_for(is_programmed));
            runtime.block_on(programmed).is_some_and(|found| found.is_ok())
        };
        let mut is_running = has_programmed(0);
        while is_running {
            self.step(Instant::now(), &mut has_programmed);
            is_running = runtime.block_on(shutdown.run_until_cancelled(sleep(pause(self.interval)))).is_some();
        }
        self
    }

    /// Records the run, and writes the state, if the kernel has a newer one and it is time.
    fn step(&mut self, now: Instant, has_programmed: impl FnOnce(u64) -> bool) {
        let programmed = self.progress.borrow().generation();
        if programmed != self.recorded && self.file.record_run(Some(&self.state.positions())) {
            self.recorded = programmed;
        }
        if programmed > self.saved && now >= self.save_at {
            // The file has the state of the kernel, which may be older than the agent's.
            let is_saved = self.save(has_programmed);
            self.save_at = Instant::now() + if is_saved { self.interval } else { RECORD_PERIOD.min(self.interval) };
        }
    }

    /// Saves the last state after the reconcile loop has ended. Saves nothing if the last attempt
    /// to program the kernel failed.
    pub(crate) fn save_last(mut self) {
        let can_save = {
            let progress = self.progress.borrow();
            progress.failure.is_none() && progress.programmed.is_some()
        };
        if can_save && (!self.state.has_moved_since(self.saved) || self.save(|_| true)) {
            self.file.record_run(None);
        }
    }

    /// Writes the state, and replaces the file if `may_replace` returns true for the state's
    /// generation. Returns true if the file was replaced.
    fn save(&mut self, may_replace: impl FnOnce(u64) -> bool) -> bool {
        let saved = self.file.write(&self.state).and_then(|(generation, bytes)| {
            let is_replaced = may_replace(generation);
            if is_replaced { self.file.commit().map(|()| Some((generation, bytes))) } else { Ok(None) }
        });
        match saved {
            Ok(Some((generation, bytes))) => {
                info!(bytes, "the state is saved");
                self.metrics.saves.inc();
                self.metrics.bytes.set(bytes);
                self.saved = Some(generation);
                self.has_failed = false;
                true
            }
            Ok(None) => false,
            Err(error) => {
                self.metrics.errors.inc();
                if !std::mem::replace(&mut self.has_failed, true) {
                    warn!(%error, "the state cannot be saved; forwarding continues, but a restart while no control plane answers would begin with an older state or without a state");
                }
                false
            }
        }
    }
}

/// The time between two steps.
fn pause(interval: Duration) -> Duration {
    interval.clamp(SHORTEST_STEP, RECORD_PERIOD)
}
