//! When the state is written.

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

use super::file::{Prepared, SaveError, StateFile};
use crate::{metrics::Metrics, reconcile::Progress, shared::Shared};

/// Longest pause after writes that failed.
const LONGEST_PAUSE: Duration = Duration::from_secs(300);

/// Keeps the file at what the kernel has. Build it, run [`Self::run`], and let [`Self::save_last`] have the last word.
#[derive(Debug)]
pub(crate) struct Saver {
    file: Arc<Mutex<StateFile>>,
    /// Ready, and not in the kernel yet.
    prepared: Option<Prepared>,
    /// What is on disk; `None` when nothing, or nobody knows.
    saved: Option<u64>,
    failures: u32,
}

/// What a saver works with.
#[derive(Debug, Clone)]
pub(crate) struct Surroundings {
    pub(crate) shared: Arc<Shared>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) progress: watch::Receiver<Progress>,
}

impl Surroundings {
    /// Waits until the kernel has a state later than this one. False when no state follows any more.
    async fn programmed_after(&mut self, generation: Option<u64>) -> bool {
        let is_later =
            |progress: &Progress| progress.generation().is_some_and(|programmed| Some(programmed) > generation);
        self.progress.wait_for(is_later).await.is_ok()
    }
}

impl Saver {
    /// A saver for a file that holds state 0 of [`Shared`], or nothing of use.
    pub(super) fn new(file: StateFile, is_restored: bool) -> Self {
        Self { file: Arc::new(Mutex::new(file)), prepared: None, saved: is_restored.then_some(0), failures: 0 }
    }

    /// Saves at most once an `interval`, when something has been programmed that is not on disk, until `shutdown`.
    pub(crate) async fn run(
        mut self,
        mut around: Surroundings,
        interval: Duration,
        shutdown: CancellationToken,
    ) -> Self {
        let mut not_before = Instant::now() + interval;
        loop {
            let programmed = shutdown.run_until_cancelled(around.programmed_after(self.saved)).await;
            let waited = shutdown.run_until_cancelled(sleep_until(not_before)).await;
            if programmed != Some(true) || waited.is_none() {
                return self;
            }
            not_before = Instant::now() + interval;
            let outcome = match self.prepare(&around.shared).await {
                Ok(generation) => {
                    // What was taken over may be ahead of the kernel by a step.
                    let before = generation.checked_sub(1);
                    if shutdown.run_until_cancelled(around.programmed_after(before)).await != Some(true) {
                        return self;
                    }
                    self.commit(&around.metrics).await
                }
                Err(error) => Err(error),
            };
            if let Err(error) = outcome {
                let pause = interval.saturating_mul(1 << self.failures.min(16)).min(LONGEST_PAUSE.max(interval));
                not_before = Instant::now() + pause;
                self.failed(&around.metrics, &error, pause);
            }
        }
    }

    /// Saves what came last, once the reconcile loop has ended. A state that the kernel refused is not saved.
    pub(crate) async fn save_last(mut self, around: &Surroundings) {
        let progress = around.progress.borrow().clone();
        let has_news = progress.generation().is_some() && around.shared.has_moved_since(self.saved);
        if progress.failure.is_some() || !has_news {
            return self.give_up();
        }
        let mut outcome = Ok(());
        if self.prepared.is_some() {
            outcome = self.commit(&around.metrics).await;
        }
        if outcome.is_ok() && around.shared.has_moved_since(self.saved) {
            outcome = match self.prepare(&around.shared).await {
                Ok(_) => self.commit(&around.metrics).await,
                Err(error) => Err(error),
            };
        }
        match outcome {
            Ok(()) => info!("the state is saved"),
            Err(error) => self.failed(&around.metrics, &error, Duration::ZERO),
        }
    }

    /// Returns the state that is ready.
    async fn prepare(&mut self, shared: &Arc<Shared>) -> Result<u64, Failure> {
        let (file, shared) = (Arc::clone(&self.file), Arc::clone(shared));
        let prepared = spawn_blocking(move || lock(&file).prepare(&shared)).await??;
        Ok(self.prepared.insert(prepared).generation())
    }

    async fn commit(&mut self, metrics: &Metrics) -> Result<(), Failure> {
        let Some(prepared) = self.prepared.take() else { return Ok(()) };
        let (generation, kind) = (prepared.generation(), prepared.kind());
        let file = Arc::clone(&self.file);
        let bytes = spawn_blocking(move || lock(&file).commit(prepared)).await??;
        debug!(kind, bytes, "the state is saved");
        metrics.state_saved(kind, bytes);
        if self.failures > 0 {
            info!("the state can be saved again");
        }
        (self.saved, self.failures) = (Some(generation), 0);
        Ok(())
    }

    fn failed(&mut self, metrics: &Metrics, failure: &Failure, pause: Duration) {
        metrics.state_save_errors.inc();
        if self.failures == 0 {
            warn!(%failure, pause_ms = pause.as_millis(), "the state cannot be saved; forwarding does not depend on it, but a restart without a control plane would begin with an older state or none");
        } else {
            debug!(%failure, pause_ms = pause.as_millis(), "the state still cannot be saved");
        }
        self.failures += 1;
        self.saved = None;
        self.give_up();
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
    #[error("the worker was stopped: {0}")]
    Worker(#[from] JoinError),
}
