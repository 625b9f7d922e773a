//! Decides when the state is written.

use std::{sync::Arc, time::Duration};

use tokio::{
    runtime::Handle,
    sync::watch,
    time::{Instant, sleep},
};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::{
    SaveMetrics,
    file::{StateFile, Written},
};
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
    /// The generation of the state on disk. `None` if no usable state is on disk.
    saved: Option<u64>,
    has_failed: bool,
}

/// The inputs of a saver.
#[derive(Debug, Clone)]
pub(crate) struct SaverInputs {
    pub(crate) state: Arc<AgentState>,
    pub(crate) metrics: SaveMetrics,
    pub(crate) progress: watch::Receiver<Progress>,
}

impl Saver {
    /// Creates a saver for `file`. If `is_restored` is true, the file holds generation 0 of
    /// [`AgentState`]. Otherwise the file holds no usable state. The saver writes at most once per
    /// `interval`.
    pub(super) fn new(file: StateFile, is_restored: bool, interval: Duration) -> Self {
        Self { file, interval, saved: is_restored.then_some(0), has_failed: false }
    }

    /// Saves newly programmed states, at most once per interval, until `shutdown`.
    pub(crate) fn run(mut self, inputs: &SaverInputs, shutdown: &CancellationToken) -> Self {
        let (runtime, mut progress) = (Handle::current(), inputs.progress.clone());
        // Waits until the kernel has this generation. Returns false if the agent stops.
        let mut has_programmed = |generation| {
            let is_programmed = |progress: &Progress| progress.generation() >= Some(generation);
            let programmed = shutdown.run_until_cancelled(progress.wait_for(is_programmed));
            runtime.block_on(programmed).is_some_and(|found| found.is_ok())
        };
        let step = self.interval.clamp(SHORTEST_STEP, RECORD_PERIOD);
        let (mut save_at, mut recorded) = (Instant::now() + step, None);
        let mut is_running = has_programmed(0);
        while is_running {
            let programmed = inputs.progress.borrow().generation();
            if programmed != recorded && self.file.record_run(false, &inputs.state.positions()) {
                recorded = programmed;
            }
            if programmed > self.saved && Instant::now() >= save_at {
                // The file has the state of the kernel, which may be older than the agent's.
                let is_saved = self.save(inputs, &mut has_programmed);
                save_at = Instant::now() + if is_saved { self.interval } else { RECORD_PERIOD.min(self.interval) };
            }
            is_running = runtime.block_on(shutdown.run_until_cancelled(sleep(step))).is_some();
        }
        self
    }

    /// Saves the last state after the reconcile loop has ended. Saves nothing if the last attempt
    /// to program the kernel failed.
    pub(crate) fn save_last(mut self, inputs: &SaverInputs) {
        let can_save = {
            let progress = inputs.progress.borrow();
            progress.failure.is_none() && progress.programmed.is_some()
        };
        if can_save && (!inputs.state.has_moved_since(self.saved) || self.save(inputs, |_| true)) {
            self.file.record_run(true, &[]);
        }
    }

    /// Writes the state, and replaces the file if `may_replace` returns true for the state's
    /// generation. Returns true if the file was replaced.
    fn save(&mut self, inputs: &SaverInputs, may_replace: impl FnOnce(u64) -> bool) -> bool {
        let saved = self.file.write(&inputs.state).and_then(|written| {
            let is_replaced = may_replace(written.generation);
            if is_replaced { self.file.commit().map(|()| Some(written)) } else { Ok(None) }
        });
        match saved {
            Ok(Some(Written { generation, bytes })) => {
                info!(bytes, "the state is saved");
                inputs.metrics.saved(bytes);
                self.saved = Some(generation);
                self.has_failed = false;
                true
            }
            Ok(None) => false,
            Err(error) => {
                inputs.metrics.errors.inc();
                if !std::mem::replace(&mut self.has_failed, true) {
                    warn!(%error, "the state cannot be saved; forwarding continues, but a restart while no control plane answers would begin with an older state or without a state");
                }
                false
            }
        }
    }
}
