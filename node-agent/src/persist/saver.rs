//! Decides when the state is written.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{
    sync::watch,
    task::{JoinError, spawn_blocking},
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::{
    SaveMetrics,
    file::{Prepared, SaveError, StateFile},
};
use crate::{
    backoff::{Backoff, Jitter},
    progress::Progress,
    state::AgentState,
};

/// The longest pause after a failed write.
const LONGEST_PAUSE: Duration = Duration::from_secs(300);

/// Keeps the file up to date with the state that the kernel has. Call [`Self::run`]. After `run`
/// returns, call [`Self::save_last`].
#[derive(Debug)]
pub(crate) struct Saver {
    file: Arc<Mutex<StateFile>>,
    /// An encoded state. The kernel may not have this state yet.
    prepared: Option<Prepared>,
    /// The generation of the state on disk. `None` if no state is on disk, or if its generation is
    /// unknown.
    saved: Option<u64>,
    backoff: Backoff,
}

/// The inputs of a saver.
#[derive(Debug, Clone)]
pub(crate) struct SaverInputs {
    pub(crate) state: Arc<AgentState>,
    pub(crate) metrics: SaveMetrics,
    pub(crate) progress: watch::Receiver<Progress>,
}

impl SaverInputs {
    /// Waits until the kernel has a newer state than this generation. Returns false if the
    /// reconcile loop has ended.
    async fn programmed_after(&mut self, generation: Option<u64>) -> bool {
        let is_later =
            |progress: &Progress| progress.generation().is_some_and(|programmed| Some(programmed) > generation);
        self.progress.wait_for(is_later).await.is_ok()
    }
}

impl Saver {
    /// Creates a saver for `file`. If `is_restored` is true, the file holds generation 0 of
    /// [`AgentState`]. Otherwise the file holds no usable state. The saver writes at most once per
    /// `interval`.
    pub(super) fn new(file: StateFile, is_restored: bool, interval: Duration) -> Self {
        let backoff = Backoff::new(interval, LONGEST_PAUSE.max(interval), Jitter::None);
        Self { file: Arc::new(Mutex::new(file)), prepared: None, saved: is_restored.then_some(0), backoff }
    }

    /// Saves newly programmed states, at most once per interval, until `shutdown`.
    pub(crate) async fn run(mut self, mut inputs: SaverInputs, shutdown: CancellationToken) -> Self {
        let interval = self.backoff.first();
        let mut not_before = Instant::now() + interval;
        if shutdown.run_until_cancelled(inputs.programmed_after(None)).await == Some(true) {
            self.record_run(false).await;
        }
        loop {
            let programmed = shutdown.run_until_cancelled(inputs.programmed_after(self.saved)).await;
            let waited = shutdown.run_until_cancelled(sleep_until(not_before)).await;
            if programmed != Some(true) || waited.is_none() {
                return self;
            }
            not_before = Instant::now() + interval;
            let outcome = match self.prepare(&inputs.state).await {
                Ok(generation) => {
                    // The prepared state may be newer than the state in the kernel. Wait until the
                    // kernel has the prepared state.
                    let before = generation.checked_sub(1);
                    if shutdown.run_until_cancelled(inputs.programmed_after(before)).await != Some(true) {
                        return self;
                    }
                    self.commit(&inputs.metrics).await
                }
                Err(error) => Err(error),
            };
            if let Err(error) = outcome {
                not_before = Instant::now() + self.failed(&inputs.metrics, &error);
            }
        }
    }

    /// Saves the last state after the reconcile loop has ended. Saves nothing if the last attempt
    /// to program the kernel failed.
    pub(crate) async fn save_last(mut self, inputs: &SaverInputs) {
        let progress = inputs.progress.borrow().clone();
        if progress.failure.is_some() || progress.generation().is_none() {
            return self.give_up();
        }
        if !inputs.state.has_moved_since(self.saved) {
            return self.record_run(true).await;
        }
        let mut outcome = Ok(());
        if self.prepared.is_some() {
            outcome = self.commit(&inputs.metrics).await;
        }
        if outcome.is_ok() && inputs.state.has_moved_since(self.saved) {
            outcome = match self.prepare(&inputs.state).await {
                Ok(_) => self.commit(&inputs.metrics).await,
                Err(error) => Err(error),
            };
        }
        match outcome {
            Ok(()) => {
                info!("the state is saved");
                self.record_run(true).await;
            }
            Err(error) => {
                self.failed(&inputs.metrics, &error);
            }
        }
    }

    /// Prepares the current state, and returns its generation.
    async fn prepare(&mut self, shared: &Arc<AgentState>) -> Result<u64, Failure> {
        let (file, shared) = (Arc::clone(&self.file), Arc::clone(shared));
        let prepared = spawn_blocking(move || lock(&file).prepare(&shared)).await??;
        Ok(self.prepared.insert(prepared).generation())
    }

    async fn commit(&mut self, metrics: &SaveMetrics) -> Result<(), Failure> {
        let Some(prepared) = self.prepared.take() else { return Ok(()) };
        let (generation, kind) = (prepared.generation(), prepared.kind());
        let file = Arc::clone(&self.file);
        let bytes = spawn_blocking(move || lock(&file).commit(prepared)).await??;
        debug!(kind, bytes, "the state is saved");
        metrics.saved(kind, bytes);
        if self.backoff.attempts() > 0 {
            info!("the state can be saved again");
        }
        self.saved = Some(generation);
        self.backoff.reset();
        Ok(())
    }

    async fn record_run(&self, is_saved: bool) {
        let file = Arc::clone(&self.file);
        // The task cannot fail: it does not panic, and nobody stops it.
        let _ = spawn_blocking(move || lock(&file).record_run(is_saved)).await;
    }

    /// Counts and logs a failure. Returns the pause before the next attempt.
    fn failed(&mut self, metrics: &SaveMetrics, failure: &Failure) -> Duration {
        metrics.errors.inc();
        let pause = self.backoff.next_pause();
        if self.backoff.attempts() == 1 {
            warn!(%failure, pause_ms = pause.as_millis(), "the state cannot be saved; forwarding continues, but a restart while no control plane answers would begin with an older state or without a state");
        } else {
            debug!(%failure, pause_ms = pause.as_millis(), "the state still cannot be saved");
        }
        self.saved = None;
        self.give_up();
        pause
    }

    fn give_up(&mut self) {
        self.prepared = None;
        lock(&self.file).give_up();
    }
}

fn lock(file: &Mutex<StateFile>) -> MutexGuard<'_, StateFile> {
    file.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Why the state is not saved.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Save(#[from] SaveError),
    #[error("the background task was stopped: {0}")]
    Worker(#[from] JoinError),
}
