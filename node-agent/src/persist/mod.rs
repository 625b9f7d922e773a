//! The last good state on disk, with which a node forwards that starts while no control plane
//! answers. It is written soon after the first sync, then at most once per interval, and at the
//! end; a new file replaces the old one only when the kernel has its state. After a crash, the
//! rules in the kernel are newer than the file. The agent then resumes with the version of the file
//! and the positions that it recorded last: no replica that is behind the rules may send. Problems
//! of the file never affect forwarding: they are logged and counted.

mod disk;
mod file;
mod load;
#[cfg(test)]
mod tests;

use std::{
    io,
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

pub use disk::Disk;
pub(crate) use disk::Folder;
pub(crate) use file::StateFile;
#[doc(hidden)]
pub use load::{MAGIC, StatePart};

/// Opens the disk's state file for a node. Returns the state in it, if it is usable, and the file,
/// for a [`Saver`]. Problems are logged with their consequence.
pub(crate) fn open(disk: Box<dyn Disk>, node_name: Arc<str>) -> (Option<Restored>, StateFile) {
    let mut file = StateFile::new(disk, node_name);
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
/// this function. Errors: one of the files exists and cannot be removed.
pub fn remove(folder: &Path) -> io::Result<()> {
    let names = [load::FILE, file::TEMPORARY, FILE, TEMPORARY];
    let folder = Folder::new(folder);
    names.into_iter().try_for_each(|name| folder.remove(name))
}

/// Reads a file with this content and the right checksum, for fuzzing. `None` if invalid.
#[doc(hidden)]
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
    bytes: Gauge<u64, AtomicU64>,
}

impl SaveMetrics {
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

// Whether the rules in the kernel may be newer than the state on disk. Chains and jumps do not
// prove that rules are of the last run: a distribution restores saved rules at boot. So the agent
// records the boot in which it programs the kernel, and the positions of its source, until the file
// holds everything. The next run resumes with these positions.

/// The name of the file with the record: the id of the boot, and pairs of a kind and its position.
const FILE: &str = "run";
const TEMPORARY: &str = "run.new";

/// Returns positions of the source if the rules in the kernel may be newer than the state in the
/// disk: an agent programmed the kernel since the boot, and did not save its last state.
fn newer_rules(disk: &dyn Disk) -> Option<Vec<SourcePosition>> {
    let record = String::from_utf8(disk.read(FILE).ok()?).ok()?;
    let mut words = record.split_whitespace();
    let boot = words.next()?;
    let is_this_boot = disk.boot_id().is_ok_and(|current| current == boot);
    is_this_boot.then(|| words.filter_map(position).collect())
}

fn position(word: &str) -> Option<SourcePosition> {
    let (kind, position) = word.split_once(':')?;
    Some(SourcePosition { kind: kind.parse().ok()?, position: position.parse().ok()? })
}

/// Records that the kernel has rules of this agent, with the positions of its state; `None` removes
/// the record. It counts only in this boot, so it need not reach the disk. Errors: the file cannot
/// be written. The next run then takes the rules for older than the state.
fn record(disk: &dyn Disk, positions: Option<&[SourcePosition]>) -> io::Result<()> {
    let Some(positions) = positions else { return disk.remove(FILE) };
    let mut record = disk.boot_id()?;
    positions.iter().for_each(|source| record.push_str(&format!(" {}:{}", source.kind, source.position)));
    record.push('\n');
    disk.write(TEMPORARY, false, &mut |output| output.write_all(record.as_bytes()))?;
    disk.rename(TEMPORARY, FILE, false)
}

// Decides when the state is written.

/// How often the run is recorded, at most. The first state of a run is written after this time, so
/// that a new node soon has a file.
const RECORD_PERIOD: Duration = Duration::from_secs(10);
const SHORTEST_STEP: Duration = Duration::from_millis(100);

/// Writes the state that the kernel has. Call [`Self::run`]. After `run` returns, call
/// [`Self::save_last`]. Both block while they write.
#[derive(Debug)]
pub struct Saver {
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
    pub async fn run(mut self, shutdown: CancellationToken) -> Self {
        shutdown.run_until_cancelled(self.follow()).await;
        self
    }

    async fn follow(&mut self) {
        if !self.has_programmed(0).await {
            return;
        }
        loop {
            self.step(Instant::now()).await;
            sleep(pause(self.interval)).await;
        }
    }

    /// Waits until the kernel has this generation. Returns false if the reconcile loop ended.
    async fn has_programmed(&mut self, generation: u64) -> bool {
        self.progress.wait_for(|progress| progress.generation() >= Some(generation)).await.is_ok()
    }

    /// Records the run, and writes the state, if the kernel has a newer one and it is time.
    async fn step(&mut self, now: Instant) {
        let programmed = self.progress.borrow().generation();
        if programmed != self.recorded && self.file.record_run(Some(&self.state.positions())) {
            self.recorded = programmed;
        }
        if programmed > self.saved && now >= self.save_at {
            let written = self.file.write(&self.state);
            // The file has the state of the kernel, which may be older than the agent's.
            let may_replace = match written {
                Ok((generation, _)) => self.has_programmed(generation).await,
                Err(_) => true,
            };
            let is_saved = may_replace && self.replace(written);
            self.save_at = Instant::now() + if is_saved { self.interval } else { RECORD_PERIOD.min(self.interval) };
        }
    }

    /// Saves the last state after the reconcile loop has ended. Saves nothing if the last attempt
    /// to program the kernel failed.
    pub fn save_last(mut self) {
        let can_save = {
            let progress = self.progress.borrow();
            progress.failure.is_none() && progress.programmed.is_some()
        };
        if !can_save {
            return;
        }
        if self.state.has_moved_since(self.saved) {
            let written = self.file.write(&self.state);
            if !self.replace(written) {
                return;
            }
        }
        self.file.record_run(None);
    }

    /// Replaces the file by a written one: its generation and size. True if this was done.
    fn replace(&mut self, written: io::Result<(u64, u64)>) -> bool {
        let replaced = written.and_then(|written| self.file.commit().map(|()| written));
        match replaced {
            Ok((generation, bytes)) => {
                info!(bytes, "the state is saved");
                self.metrics.saves.inc();
                self.metrics.bytes.set(bytes);
                self.saved = Some(generation);
                self.has_failed = false;
            }
            Err(error) => {
                self.metrics.errors.inc();
                if !std::mem::replace(&mut self.has_failed, true) {
                    warn!(%error, "the state cannot be saved; forwarding continues, but a restart while no control plane answers would begin with an older state or without a state");
                }
            }
        }
        !self.has_failed
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
        let (disk, run) = (&Folder::new(folder.path()), folder.path().join(FILE));
        assert_eq!(newer_rules(disk), None, "no agent has run");
        record(disk, Some(&[])).unwrap();
        assert_eq!(newer_rules(disk), Some(Vec::new()));
        let positions = vec![SourcePosition { kind: 1, position: 7 }, SourcePosition { kind: 5, position: u64::MAX }];
        record(disk, Some(&positions)).unwrap();
        for _ in 0..2 {
            assert_eq!(newer_rules(disk).as_ref(), Some(&positions), "the agent crashes again");
        }
        record(disk, None).unwrap();
        assert_eq!(newer_rules(disk), None, "the state is saved");
        record(disk, Some(&positions)).unwrap();
        let record = std::fs::read_to_string(&run).unwrap();
        std::fs::write(&run, format!("0{record}")).unwrap();
        assert_eq!(newer_rules(disk), None, "the machine has rebooted");
        for damaged in ["", "5:7", "\u{0}\u{1}"] {
            std::fs::write(&run, damaged).unwrap();
            assert_eq!(newer_rules(disk), None, "{damaged:?}");
        }
    }
}
