//! The last good state on disk. A node that starts while no control plane answers forwards with
//! this state.
//!
//! The agent writes the whole state to a new file: soon after its first sync, then at most once per
//! interval if something changed, and when it ends. A new file replaces the old one only when the
//! kernel has its state.
//!
//! After a crash, the rules in the kernel are newer than the file. The agent then resumes with the
//! version of the file, and with the positions that it recorded last: the replica
//! sends what has changed since the file, and no replica that is behind the rules may send.
//!
//! Problems of the file never affect forwarding. If the file cannot be used, the agent starts
//! without a state. If the file cannot be written, the agent logs a warning and counts the error.

mod file;
mod load;
#[cfg(test)]
mod tests;

use std::{
    fs, io,
    path::Path,
    sync::{Arc, atomic::AtomicU64},
    time::Duration,
};

use headgate_proto::v1::SourcePosition;
use prometheus_client::{
    metrics::{counter::Counter, gauge::Gauge},
    registry::Unit,
};
use sha2::{Digest as _, Sha256};
use tokio::{
    runtime::Handle,
    sync::watch,
    time::{Instant, sleep},
};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::{
    metric_registry::{AGENT, MetricRegistry},
    progress::Progress,
    state::{AgentState, Restored},
};

pub(crate) use file::StateFile;
#[doc(hidden)]
pub use load::{MAGIC, StatePart};

/// Opens the folder's state file for a node. Returns the state in the file, if it is usable, and
/// the file, for a [`Saver`].
///
/// Problems of the file or the folder are not errors. Such problems are logged with their
/// consequence.
pub(crate) fn open(folder: &Path, node_name: Arc<str>) -> (Option<Restored>, StateFile) {
    let mut file = StateFile::new(folder, node_name);
    let path = file.path();
    let restored = match file.load() {
        Ok(Some(restored)) => {
            let (state, (epoch, version)) = (restored.held.state(), restored.held.position().unwrap_or_default());
            let (services, endpoints) = (state.service_count(), state.endpoint_count());
            let may_be_behind = restored.may_be_behind;
            let epoch = format!("{epoch:016x}");
            info!(path = %path.display(), services, endpoints, epoch, version, may_be_behind, "read the last good state");
            Some(restored)
        }
        Ok(None) => {
            info!(path = %path.display(), "the folder has no state file");
            None
        }
        Err(error) => {
            warn!(path = %path.display(), "the file with the last good state {error}. The file is ignored, and replaced once a control plane has sent a state. Nothing else is lost");
            None
        }
    };
    (restored, file)
}

/// Removes the files of a folder, also those that a killed agent may have left. `--cleanup` calls
/// this function.
///
/// # Errors
/// One of the files exists and cannot be removed.
pub fn remove(folder: &Path) -> io::Result<()> {
    let names = [file::FILE, file::TEMPORARY, FILE, TEMPORARY];
    names.into_iter().try_for_each(|name| remove_file(&folder.join(name)))
}

/// Reads a file with this content and the right checksum, for fuzzing. `None` if the content is
/// invalid.
#[doc(hidden)]
#[must_use]
pub fn state_of(content: &[u8], node_name: &str) -> Option<headgate_core::State> {
    let bytes = [content, &Sha256::digest(content)[..]].concat();
    load::read_from(&bytes, node_name).ok().map(|restored| restored.held.state)
}

// Metrics of the state file.

/// Metrics of the state on disk.
#[derive(Debug, Clone, Default)]
pub struct SaveMetrics {
    /// 1 if this run began with a state from disk, else 0.
    pub restored: Gauge,
    /// Number of failed attempts to save the state.
    pub errors: Counter,
    saves: Counter,
    /// Size of the file.
    bytes: Gauge<u64, AtomicU64>,
}

impl SaveMetrics {
    /// Registers all metrics of the state file.
    pub(crate) fn register(&self, registry: &mut MetricRegistry) {
        let mut add = registry.adder(AGENT);
        let help = "1 if this run of the agent began with a state from disk";
        add.gauge("state_restored", "", help, self.restored.clone());
        add.counter("state_saves", "", "Times that the state was saved to disk", self.saves.clone());
        let help = "Attempts to save the state to disk that failed";
        add.counter("state_save_errors", "", help, self.errors.clone());
        add.gauge_in(Unit::Bytes, "state", "", "Size of the saved state", self.bytes.clone());
    }
}

// Whether the rules in the kernel may be newer than the state on disk.
//
// The rules of the last run are at least as new as the file. But chains and jumps do not prove
// that the rules are of the last run: a distribution restores saved rules at boot, and a program
// may restore them while no agent runs. So the agent also records the boot in which it has
// programmed the kernel, and the positions of its source, until it ends and the file holds
// everything that the kernel has. The next run resumes with these positions, so that no replica
// that is behind the rules replaces them by older ones.

/// The name of the file with the record: the id of the boot, and pairs of a kind and its position.
const FILE: &str = "run";
const TEMPORARY: &str = "run.new";
/// A random id that the kernel draws at each boot.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Returns positions of the source if the rules in the kernel may be newer than the state in the
/// folder: an agent programmed the kernel since the boot, and did not save its last state.
fn newer_rules(folder: &Path) -> Option<Vec<SourcePosition>> {
    let record = fs::read_to_string(folder.join(FILE)).unwrap_or_default();
    let mut words = record.split_whitespace();
    let boot = words.next()?;
    let is_this_boot = fs::read_to_string(BOOT_ID).is_ok_and(|current| current.trim_end() == boot);
    is_this_boot.then(|| words.filter_map(position).collect())
}

fn position(word: &str) -> Option<SourcePosition> {
    let (kind, position) = word.split_once(':')?;
    Some(SourcePosition { kind: kind.parse().ok()?, position: position.parse().ok()? })
}

/// Records that the kernel has rules of this agent, with the positions of the agent's state.
/// `None` removes the record: the agent ends and its state is saved.
///
/// The record only counts in this boot, so it need not reach the disk.
///
/// # Errors
/// The file cannot be written. Without it, the next run takes the rules for older than the state.
fn record(folder: &Path, positions: Option<&[SourcePosition]>) -> io::Result<()> {
    let Some(positions) = positions else { return remove_file(&folder.join(FILE)) };
    let mut record = fs::read_to_string(BOOT_ID)?.trim_end().to_owned();
    positions.iter().for_each(|source| record.push_str(&format!(" {}:{}", source.kind, source.position)));
    record.push('\n');
    let temporary = folder.join(TEMPORARY);
    fs::write(&temporary, record)?;
    fs::rename(temporary, folder.join(FILE))
}

/// Removes a file, if it exists.
fn remove_file(path: &Path) -> io::Result<()> {
    fs::remove_file(path).or_else(|error| if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) })
}

// Decides when the state is written.

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

#[cfg(test)]
mod last_run_tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn rules_may_be_newer_only_after_a_crash_in_the_same_boot() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        assert_eq!(newer_rules(folder), None, "no agent has run");
        record(folder, Some(&[])).unwrap();
        assert_eq!(newer_rules(folder), Some(Vec::new()));
        let positions = vec![SourcePosition { kind: 1, position: 7 }, SourcePosition { kind: 5, position: u64::MAX }];
        record(folder, Some(&positions)).unwrap();
        for _ in 0..2 {
            assert_eq!(newer_rules(folder).as_ref(), Some(&positions), "the agent crashes again");
        }
        record(folder, None).unwrap();
        assert_eq!(newer_rules(folder), None, "the state is saved");
        record(folder, Some(&positions)).unwrap();
        let record = fs::read_to_string(folder.join(FILE)).unwrap();
        fs::write(folder.join(FILE), format!("0{record}")).unwrap();
        assert_eq!(newer_rules(folder), None, "the machine has rebooted");
        for damaged in ["", "5:7", "\u{0}\u{1}"] {
            fs::write(folder.join(FILE), damaged).unwrap();
            assert_eq!(newer_rules(folder), None, "{damaged:?}");
        }
    }
}
