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
//! Beside the state is the list of replicas that a replica announced last, so that an agent also
//! finds the control plane if it has moved away from the addresses of `--control-plane`.
//!
//! Problems of the file never affect forwarding. If the file cannot be used, the agent starts
//! without a state. If the file cannot be written, the agent logs a warning and counts the error.

#[cfg(test)]
mod tests;

use std::{
    collections::BTreeSet,
    fmt::{Debug, Display},
    fs::{self, DirBuilder, File, OpenOptions, TryLockError},
    io::{self, BufWriter, Write},
    net::SocketAddr,
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    sync::{Arc, atomic::AtomicU64},
    time::Duration,
};

use headgate_core::{Dirty, ServiceKey, State};
use headgate_proto::{
    ChangesBuilder, Decoder, node_from_wire, reserved_from_wire,
    v1::{self, SourcePosition},
};
use prometheus_client::metrics::{counter::Counter, gauge::Gauge};
use prost::Message as _;
use sha2::{Digest as _, Sha256};
use tokio::{
    sync::watch,
    time::{Instant, sleep},
};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::{
    metric_registry::{AGENT, metrics},
    state::{AgentState, Held, Restored, SavePoint, progress::Progress},
};

/// Opens the disk's state file for a node. Returns the state in the file, or an empty one if there
/// is no usable file, and the file, for a [`Saver`].
///
/// Problems of the file or the disk are not errors. Such problems are logged with their
/// consequence.
pub(crate) fn open(disk: Box<dyn Disk>, node_name: Arc<str>) -> (Restored, StateFile) {
    let mut file = StateFile::new(disk, node_name);
    let (path, newer) = (file.path(), newer_rules(&*file.disk));
    let mut restored = match file.load() {
        Ok(Some(restored)) => restored,
        Ok(None) => {
            info!(path = %path.display(), "the folder has no state file");
            Restored::default()
        }
        Err(error) => {
            warn!(path = %path.display(), "the file with the last good state {error}. The file is ignored, and replaced once a control plane has sent a state. Nothing else is lost");
            Restored::default()
        }
    };
    restored.may_be_behind = file.holds_state && newer.is_some();
    // Also without a state, no replica that is behind the rules may replace them.
    restored.held.raise_positions(newer.as_deref().unwrap_or_default());
    if file.holds_state {
        let (state, (epoch, version)) = (restored.held.state(), restored.held.position().unwrap_or_default());
        let (services, endpoints) = (state.service_count(), state.endpoint_count());
        let may_be_behind = restored.may_be_behind;
        let epoch = format!("{epoch:016x}");
        info!(path = %path.display(), services, endpoints, epoch, version, may_be_behind, "read the last good state");
    }
    // From now on, this run may write rules. The record also takes its space, in case that the disk
    // fills up. If it fails, the saver tries again, and reports why.
    let _ = file.record_run(Some(&restored.held.positions()));
    (restored, file)
}

/// Removes the files of a folder, also those that a killed agent may have left. `--cleanup` calls
/// this function.
///
/// # Errors
/// One of the files exists and cannot be removed.
pub fn remove(folder: &Path) -> io::Result<()> {
    let names = [STATE_FILE, STATE_TEMPORARY, RUN_FILE, REPLICAS_FILE, REPLICAS_TEMPORARY, ROLE_FILE];
    let folder = Folder::new(folder);
    names.into_iter().try_for_each(|name| folder.remove(name))
}

/// Reads a file with this content and the right checksum, for fuzzing. `None` if the content is
/// invalid.
#[doc(hidden)]
#[must_use]
pub fn state_of(content: &[u8], node_name: &str) -> Option<headgate_core::State> {
    let bytes = [content, &Sha256::digest(content)[..]].concat();
    read_from(&bytes, node_name).ok().map(|restored| restored.held.state)
}

metrics! {
    /// Metrics of the state on disk.
    pub struct SaveMetrics {}
    AGENT {
        pub restored: Gauge = "state_restored", "1 if this run of the agent began with a state from disk";
        saves: Counter = "state_saves", "Times that the state was saved to disk";
        pub errors: Counter = "state_save_errors", "Attempts to save the state, the list of replicas or the positions of the rules that failed";
        bytes: Gauge<u64, AtomicU64> = "state_bytes", "Size of the saved state";
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
const RUN_FILE: &str = "run";

/// The record of a run that has ended, and whose file holds everything that the kernel has.
const SAVED: &str = "saved";

/// The size of each record. A record replaces the last one in place, which also works on a full
/// disk ([`Disk::overwrite`]).
const RECORD_BYTES: usize = 512;

/// The name of the file that says whether the last run programmed the node.
pub(crate) const ROLE_FILE: &str = "role";

/// Returns positions of the source if the rules in the kernel may be newer than the state on
/// disk: an agent programmed the kernel since the boot, and did not save its last state. The same
/// holds if there is no record. The positions are unknown then.
fn newer_rules(disk: &dyn Disk) -> Option<Vec<SourcePosition>> {
    let record = disk.read(RUN_FILE).ok().and_then(|bytes| String::from_utf8(bytes).ok()).unwrap_or_default();
    let mut words = record.split_whitespace();
    let is_other_boot = |boot| disk.boot_id().is_ok_and(|current| current != boot);
    let is_over = words.next().is_some_and(|boot| boot == SAVED || is_other_boot(boot));
    (!is_over).then(|| words.filter_map(position).collect())
}

fn position(word: &str) -> Option<SourcePosition> {
    let (kind, position) = word.split_once(':')?;
    Some(SourcePosition { kind: kind.parse().ok()?, position: position.parse().ok()? })
}

/// Records that the kernel may have rules of this agent, with the positions of the agent's state.
/// `None` records that the file holds everything that the kernel has.
///
/// The record only counts in this boot, so it need not reach the disk.
///
/// # Errors
/// The file cannot be written. The next run then relies on the last record.
fn record(disk: &dyn Disk, positions: Option<&[SourcePosition]>) -> io::Result<()> {
    let mut record = positions.map_or_else(|| Ok(SAVED.to_owned()), |_| disk.boot_id())?;
    for source in positions.unwrap_or_default() {
        record.push_str(&format!(" {}:{}", source.kind, source.position));
    }
    disk.overwrite(RUN_FILE, format!("{record:<width$}\n", width = RECORD_BYTES - 1).as_bytes())
}

// The list of replicas.

/// The name of the file with the addresses of replicas, one a line.
const REPLICAS_FILE: &str = "replicas";
const REPLICAS_TEMPORARY: &str = "replicas.new";

/// Reads the list of replicas. It is empty if there is no file, or if the file cannot be used.
fn read_replicas(disk: &dyn Disk) -> BTreeSet<SocketAddr> {
    let lines = |bytes: Vec<u8>| {
        let text = String::from_utf8(bytes).map_err(io::Error::other)?;
        text.lines().map(|line| line.parse().map_err(io::Error::other)).collect()
    };
    let read = disk.read(REPLICAS_FILE).and_then(lines);
    read.unwrap_or_else(|error| {
        if error.kind() != io::ErrorKind::NotFound {
            let path = disk.path().join(REPLICAS_FILE);
            warn!(path = %path.display(), %error, "the list of replicas cannot be used; the agent begins with those of --control-plane, and then writes a new list");
        }
        BTreeSet::new()
    })
}

// Decides when the state is written.

/// The longest time between two steps, if nothing wakes the saver. The first state of a run is
/// written after this time, so that a new node soon has a file.
const LONGEST_STEP: Duration = Duration::from_secs(10);
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
    replicas: watch::Receiver<BTreeSet<SocketAddr>>,
    /// The generation of the state on disk. `None` if no usable state is on disk.
    saved: Option<u64>,
    /// A new file that waits until the kernel has its generation, and its size.
    written: Option<(u64, u64)>,
    /// The positions that are recorded.
    recorded: Option<Vec<SourcePosition>>,
    lacks_record: bool,
    /// When the state may be written next.
    save_at: Instant,
    has_failed: bool,
    lacks_replicas: bool,
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
        let replicas = state.replicas();
        Self {
            file,
            interval,
            state,
            metrics,
            progress,
            replicas,
            saved,
            written: None,
            recorded: None,
            lacks_record: false,
            save_at,
            has_failed: false,
            lacks_replicas: false,
        }
    }

    /// Records what the kernel may have, and saves what it has at most once per interval, until
    /// `shutdown`.
    pub async fn run(mut self, shutdown: CancellationToken) -> Self {
        shutdown.run_until_cancelled(self.follow()).await;
        self
    }

    async fn follow(&mut self) {
        loop {
            self.step(Instant::now());
            tokio::select! {
                () = sleep(pause(self.interval)) => {}
                Ok(()) = self.replicas.changed() => {}
                // The record must not lag: another replica may know the Node no longer, so that
                // only the record keeps it from sending what is older than the rules.
                Ok(()) = self.progress.changed() => {}
            }
        }
    }

    /// Writes the list of replicas, if it has changed.
    fn save_replicas(&mut self) {
        let replicas = self.replicas.borrow_and_update().clone();
        let written = self.file.write_replicas(replicas);
        note(
            &self.metrics,
            &mut self.lacks_replicas,
            &written,
            "the list of replicas cannot be saved; forwarding continues, but after a restart the agent begins with an older list, or with --control-plane",
        );
    }

    /// Records the run, and writes the state, if the kernel has a newer one and it is time.
    fn step(&mut self, now: Instant) {
        self.save_replicas();
        let (programmed, has_tried) = {
            let progress = self.progress.borrow_and_update();
            (progress.generation(), progress.programmed.is_some() || progress.failure.is_some())
        };
        // An attempt that failed may have programmed a part.
        if has_tried {
            let positions = self.state.positions();
            if self.recorded.as_ref() != Some(&positions) && self.record_run(Some(&positions)) {
                self.recorded = Some(positions);
            }
        }
        if self.written.is_none() && programmed > self.saved && now >= self.save_at {
            match self.file.write(&self.state) {
                Ok(written) => self.written = Some(written),
                failed => self.replace(failed),
            }
        }
        // The file has the state of the agent, which may be newer than that of the kernel.
        if let Some(written) = self.written.take_if(|(generation, _)| programmed >= Some(*generation)) {
            self.replace(Ok(written));
        }
    }

    /// Saves the last state after the reconcile loop has ended. Saves nothing if the last attempt
    /// to program the kernel failed.
    pub fn save_last(mut self) {
        self.save_replicas();
        let can_save = {
            let progress = self.progress.borrow();
            progress.failure.is_none() && progress.programmed.is_some()
        };
        if !can_save {
            return;
        }
        if self.state.has_moved_since(self.saved) {
            let written = self.file.write(&self.state);
            self.replace(written);
        }
        if !self.has_failed {
            self.record_run(None);
        }
    }

    /// See [`record`]. Returns false if this failed.
    fn record_run(&mut self, positions: Option<&[SourcePosition]>) -> bool {
        let recorded = self.file.record_run(positions);
        note(
            &self.metrics,
            &mut self.lacks_record,
            &recorded,
            "the positions of the rules cannot be recorded; forwarding continues, but after a crash an older state may replace the rules",
        );
        recorded.is_ok()
    }

    /// Replaces the file by a written one: its generation and size.
    fn replace(&mut self, written: io::Result<(u64, u64)>) {
        let replaced = written.and_then(|written| self.file.commit().map(|()| written));
        note(
            &self.metrics,
            &mut self.has_failed,
            &replaced,
            "the state cannot be saved; forwarding continues, but a restart while no control plane answers would begin with an older state or without a state",
        );
        let pause = if replaced.is_ok() { self.interval } else { LONGEST_STEP.min(self.interval) };
        self.save_at = Instant::now() + pause;
        if let Ok((generation, bytes)) = replaced {
            info!(bytes, "the state is saved");
            self.metrics.saves.inc();
            self.metrics.bytes.set(bytes);
            self.saved = Some(generation);
        }
    }
}

/// Notes the result of a write. Counts a failure, and logs its consequence if the last write of
/// this kind succeeded.
fn note<T>(metrics: &SaveMetrics, has_failed: &mut bool, written: &io::Result<T>, consequence: &str) {
    if let Err(error) = written {
        metrics.errors.inc();
        if !*has_failed {
            warn!(%error, "{consequence}");
        }
    }
    *has_failed = written.is_err();
}

/// The time between two steps, if nothing wakes the saver.
fn pause(interval: Duration) -> Duration {
    interval.clamp(SHORTEST_STEP, LONGEST_STEP)
}

// The folder in which the files of the state are.

/// A random id that the kernel draws at each boot.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// The folder that holds an agent's state across restarts, and the machine's boot.
pub trait Disk: Debug + Send {
    /// Where the folder is, for messages.
    fn path(&self) -> &Path;

    /// Locks the folder until this value is dropped, unless this value has locked it. Creates the
    /// folder if necessary.
    ///
    /// # Errors
    /// Another agent has locked the folder, or the folder cannot be created or locked.
    fn lock(&mut self) -> io::Result<()>;

    /// Reads a file of the folder.
    ///
    /// # Errors
    /// The kind is `InvalidInput` if there is something else than a file, which a read may wait
    /// for.
    fn read(&self, name: &str) -> io::Result<Vec<u8>>;

    /// Writes what `content` writes to a new file. Replaces the last file with this name. Returns
    /// the size in bytes. The file survives a loss of power once it has been renamed.
    ///
    /// # Errors
    /// The file cannot be written, or `content` fails. No part of the file stays.
    fn write(&self, name: &str, content: &mut dyn FnMut(&mut dyn Write) -> io::Result<()>) -> io::Result<u64>;

    /// Writes `content` over the beginning of a file. It may be lost or torn when the power fails,
    /// unless it made the file longer. Creates the file if necessary. A file that has this size
    /// needs no further space, where the file system writes in place (ext4 and XFS do, btrfs does
    /// not).
    ///
    /// # Errors
    /// The file cannot be written. If this created the file, it may be empty.
    fn overwrite(&self, name: &str, content: &[u8]) -> io::Result<()>;

    /// Renames a file. It replaces the file with the new name in one step, and survives a loss of
    /// power once the call has returned.
    ///
    /// # Errors
    /// The file does not exist, or cannot be renamed.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;

    /// Removes a file, if it exists.
    ///
    /// # Errors
    /// The file cannot be removed.
    fn remove(&self, name: &str) -> io::Result<()>;

    /// A random id of the present boot of the machine.
    ///
    /// # Errors
    /// The kernel does not tell the id.
    fn boot_id(&self) -> io::Result<String>;
}

/// A folder of the file system.
#[derive(Debug)]
pub(crate) struct Folder {
    path: PathBuf,
    /// The folder, which is open and locked while this agent may write.
    lock: Option<File>,
}

impl Folder {
    /// Names a folder. Does not access the disk.
    pub(crate) fn new(path: &Path) -> Self {
        Self { path: path.to_owned(), lock: None }
    }
}

impl Disk for Folder {
    fn path(&self) -> &Path {
        &self.path
    }

    fn lock(&mut self) -> io::Result<()> {
        if self.lock.is_some() {
            return Ok(());
        }
        let created = DirBuilder::new().recursive(true).mode(0o700).create(&self.path);
        let folder = created.and_then(|()| File::open(&self.path)).map_err(|error| at(&self.path, &error))?;
        folder.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => io::Error::other(format!(
                "{} is in use by another agent; stop that agent, or pass another --state-dir",
                self.path.display()
            )),
            TryLockError::Error(error) => at(&self.path, &error),
        })?;
        self.lock = Some(folder);
        Ok(())
    }

    fn read(&self, name: &str) -> io::Result<Vec<u8>> {
        let path = self.path.join(name);
        // Opening a named pipe would wait for a writer.
        if !fs::metadata(&path)?.is_file() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        fs::read(path)
    }

    fn write(&self, name: &str, content: &mut dyn FnMut(&mut dyn Write) -> io::Result<()>) -> io::Result<u64> {
        self.remove(name)?;
        let path = self.path.join(name);
        let mut output = BufWriter::new(OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?);
        let written = content(&mut output).and_then(|()| {
            let file = output.into_inner().map_err(io::IntoInnerError::into_error)?;
            file.sync_all()?;
            Ok(file.metadata()?.len())
        });
        written.inspect_err(|_| {
            // A part of a state only takes up space, which a full disk lacks.
            let _ = fs::remove_file(&path);
        })
    }

    fn overwrite(&self, name: &str, content: &[u8]) -> io::Result<()> {
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(false).mode(0o600);
        // Opening a named pipe would wait for a reader.
        let mut file = options.custom_flags(libc::O_NONBLOCK).open(self.path.join(name))?;
        let is_new = file.metadata()?.len() < content.len() as u64;
        file.write_all(content)?;
        if is_new { file.sync_all() } else { Ok(()) }
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        fs::rename(self.path.join(from), self.path.join(to))?;
        self.lock.as_ref().map_or(Ok(()), File::sync_all)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        let removed = fs::remove_file(self.path.join(name));
        removed.or_else(|error| if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) })
    }

    fn boot_id(&self) -> io::Result<String> {
        Ok(fs::read_to_string(BOOT_ID)?.trim_end().to_owned())
    }
}

/// An error that names the path.
fn at(path: &Path, error: &io::Error) -> io::Error {
    io::Error::other(format!("{}: {error}", path.display()))
}

// Writes the state file.

/// The name of a file that is not in place yet.
const STATE_TEMPORARY: &str = "state.new";

/// Resources are split into parts of about this size, but a Service is never split.
const PART_BYTES: usize = 64 << 10;

/// The state file of one node.
#[derive(Debug)]
pub(crate) struct StateFile {
    /// Locked while this agent may write. The lock excludes other agents with the same folder.
    disk: Box<dyn Disk>,
    node_name: Arc<str>,
    /// True if the file held a usable state when it was loaded.
    holds_state: bool,
    /// The list of replicas on disk.
    pub(crate) replicas: BTreeSet<SocketAddr>,
}

impl StateFile {
    /// Names the file in a folder. Does not access the disk.
    fn new(disk: Box<dyn Disk>, node_name: Arc<str>) -> Self {
        Self { disk, node_name, holds_state: false, replicas: BTreeSet::new() }
    }

    /// Path of the file.
    fn path(&self) -> PathBuf {
        self.disk.path().join(STATE_FILE)
    }

    /// Reads the file. Returns `None` if the file does not exist.
    fn load(&mut self) -> Result<Option<Restored>, LoadError> {
        // If the lock cannot be taken, the next write reports the reason.
        let _ = self.disk.lock();
        self.replicas = read_replicas(&*self.disk);
        let restored = read_state(&*self.disk, &self.node_name)?;
        self.holds_state = restored.is_some();
        Ok(restored)
    }

    /// Writes the whole state to the temporary file. [`StateFile::commit`] puts it in place, once
    /// the kernel has it. Returns the generation of the state, and the size of the file in bytes.
    ///
    /// The state is locked for one Service at a time, so each Service is as it was at some moment
    /// of the write. The version in the file is that of the beginning: a resume by log brings all
    /// that has changed since. The positions are those of the end: no replica that is behind them
    /// may replace a part of the state by an older one.
    fn write(&mut self, shared: &AgentState) -> io::Result<(u64, u64)> {
        self.disk.lock()?;
        let mut generation = 0;
        let written = self.disk.write(STATE_TEMPORARY, &mut |output| {
            generation = self.write_to(output, shared)?;
            Ok(())
        });
        written.map(|bytes| (generation, bytes)).map_err(|error| at(&self.disk.path().join(STATE_TEMPORARY), &error))
    }

    fn write_to(&self, output: &mut dyn Write, shared: &AgentState) -> io::Result<u64> {
        let mut hash = Sha256::new();
        let mut write = |bytes: &[u8]| {
            hash.update(bytes);
            output.write_all(bytes)
        };
        write(MAGIC)?;
        let begin = save_point(shared)?;
        let mut builder = ChangesBuilder::default();
        let mut write_changes = |builder: ChangesBuilder| {
            write(
                &StatePart { changes: Some(builder.finish()), ..StatePart::default() }.encode_length_delimited_to_vec(),
            )
        };
        for key in shared.keys() {
            shared.with_state(|state| add_service(&mut builder, state, &key));
            if builder.estimated_bytes() >= PART_BYTES {
                write_changes(std::mem::take(&mut builder))?;
            }
        }
        shared.with_state(|state| state.service_cidrs().for_each(|service_cidr| builder.service_cidr(service_cidr)));
        write_changes(builder)?;
        let end = save_point(shared)?;
        // Another stream may have brought the state of another replica.
        let epoch =
            if begin.stream == end.stream && begin.point.epoch == end.point.epoch { end.point.epoch } else { 0 };
        let point = Some(v1::Resume { epoch, version: begin.point.version, ..end.point });
        let last = StatePart { changes: None, node_name: self.node_name.to_string(), node: Some(end.node), point };
        write(&last.encode_length_delimited_to_vec())?;
        output.write_all(&hash.finalize())?;
        Ok(end.generation)
    }

    /// Replaces the file by the temporary file.
    fn commit(&self) -> io::Result<()> {
        self.disk.rename(STATE_TEMPORARY, STATE_FILE).map_err(|error| at(&self.path(), &error))
    }

    /// Replaces the list of replicas, if it differs.
    fn write_replicas(&mut self, replicas: BTreeSet<SocketAddr>) -> io::Result<()> {
        if self.replicas != replicas {
            self.disk.lock()?;
            self.disk.write(REPLICAS_TEMPORARY, &mut |output| {
                replicas.iter().try_for_each(|address| writeln!(output, "{address}"))
            })?;
            self.disk.rename(REPLICAS_TEMPORARY, REPLICAS_FILE)?;
            self.replicas = replicas;
        }
        Ok(())
    }

    /// See [`record`].
    fn record_run(&mut self, positions: Option<&[SourcePosition]>) -> io::Result<()> {
        let recorded = self.disk.lock().and_then(|()| record(&*self.disk, positions));
        recorded.map_err(|error| at(&self.disk.path().join(RUN_FILE), &error))
    }
}

fn save_point(shared: &AgentState) -> io::Result<SavePoint> {
    shared.save_point().ok_or_else(|| io::Error::other("there is no complete state"))
}

/// Adds a Service with its present values.
fn add_service(builder: &mut ChangesBuilder, state: &State, key: &ServiceKey) {
    let Some(entry) = state.entry(key) else { return };
    entry.service().into_iter().for_each(|service| builder.service(service));
    entry.endpoints().values().for_each(|endpoint| builder.endpoint(key, endpoint, 0));
}

// The format of the state file, and how the file is read and checked.
//
// ```text
// MAGIC   { length, varint   StatePart }*   checksum
// ```
//
// The checksum is SHA-256 over everything before it. A reader uses the whole file or nothing.

/// The name of the file in its folder.
const STATE_FILE: &str = "state";

/// The first bytes of the file. They change with each incompatible change of the format.
pub const MAGIC: &[u8; 16] = b"Headgate state 2";

/// The size of the checksum at the end of the file.
const CHECKSUM_BYTES: usize = 32;

/// A part of the file. Each part has resources, or all other fields: the last part.
#[derive(Clone, PartialEq, prost::Message)]
pub struct StatePart {
    /// Resources.
    #[prost(message, optional, tag = "1")]
    pub changes: Option<v1::Changes>,
    /// The name of the node to which the file belongs.
    #[prost(string, tag = "2")]
    pub node_name: String,
    /// What the agent holds of its own Node.
    #[prost(message, optional, tag = "3")]
    pub node: Option<v1::OwnNode>,
    /// The version and positions of the state, without digests.
    #[prost(message, optional, tag = "4")]
    pub point: Option<v1::Resume>,
}

/// Why a state file is not used. Each text continues a sentence that begins with the name of the
/// file.
#[derive(Debug, thiserror::Error)]
enum LoadError {
    #[error("cannot be read: {0}")]
    Io(#[from] io::Error),
    #[error("is not a regular file")]
    NoFile,
    #[error("is not a state file of this version of Headgate")]
    Magic,
    #[error("is damaged: the checksum does not match")]
    Checksum,
    #[error("belongs to node {0}")]
    ForeignNode(String),
    #[error("is damaged: {0}")]
    Content(String),
}

/// Reads the file of a node. Returns `None` if the file does not exist.
fn read_state(disk: &dyn Disk, node_name: &str) -> Result<Option<Restored>, LoadError> {
    match disk.read(STATE_FILE) {
        Ok(bytes) => read_from(&bytes, node_name).map(Some),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => Err(LoadError::NoFile),
        Err(error) => Err(error.into()),
    }
}

/// Reads the contents of a file.
fn read_from(bytes: &[u8], node_name: &str) -> Result<Restored, LoadError> {
    if !bytes.starts_with(MAGIC) {
        return Err(LoadError::Magic);
    }
    let (body, checksum) = bytes.split_last_chunk::<CHECKSUM_BYTES>().ok_or(LoadError::Checksum)?;
    let Some(mut rest) = body.strip_prefix(MAGIC).filter(|_| Sha256::digest(body)[..] == checksum[..]) else {
        return Err(LoadError::Checksum);
    };
    let (mut state, mut decoder) = (State::default(), Decoder::default());
    while !rest.is_empty() {
        let part = StatePart::decode_length_delimited(&mut rest).map_err(|error| content(&error))?;
        let (changes, rejections) =
            decoder.changes(part.changes.unwrap_or_default()).map_err(|error| content(&error))?;
        // Every resource in the file was usable when it was written. If this version of the program
        // cannot use a resource, the program must not silently leave out the resource.
        rejections.first().map_or(Ok(()), |rejection| Err(unusable(rejection)))?;
        for change in changes {
            state.apply(change, &mut Dirty::default());
        }
        if let Some(point) = part.point {
            if part.node_name != node_name {
                return Err(LoadError::ForeignNode(part.node_name));
            }
            let own = part.node.unwrap_or_default();
            let node = own.node.map(|node| node_from_wire(&node)).transpose().map_err(|error| unusable(&error))?;
            let mut held = Held::restored(state, &point);
            held.node_position = own.position;
            held.reserved = reserved_from_wire(&own.reserved).map_err(|error| unusable(&error))?;
            return Ok(Restored { held, node, may_be_behind: false });
        }
    }
    Err(LoadError::Content("it has no end".into()))
}

fn content(error: &dyn Display) -> LoadError {
    LoadError::Content(error.to_string())
}

fn unusable(v1::Rejection { resource, field, reason }: &v1::Rejection) -> LoadError {
    LoadError::Content(format!("{resource} cannot be used: {field}: {reason}"))
}

#[cfg(test)]
mod last_run_tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn rules_may_be_newer_only_after_a_crash_in_the_same_boot() {
        let folder = tempfile::tempdir().unwrap();
        let (disk, run) = (&Folder::new(folder.path()), folder.path().join(RUN_FILE));
        assert_eq!(newer_rules(disk), Some(Vec::new()), "the record is missing");
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
        std::fs::write(&run, "").unwrap();
        assert_eq!(newer_rules(disk), Some(Vec::new()), "the disk was full");
        for damaged in ["5:7", "\u{0}\u{1}"] {
            std::fs::write(&run, damaged).unwrap();
            assert_eq!(newer_rules(disk), None, "{damaged:?}");
        }
    }

    #[test]
    fn each_record_has_the_size_of_the_longest() {
        let folder = tempfile::tempdir().unwrap();
        let (disk, run) = (&Folder::new(folder.path()), folder.path().join(RUN_FILE));
        let kinds = (0..).map_while(|kind| v1::source_position::Kind::try_from(kind).ok());
        let longest: Vec<_> = kinds.map(|kind| SourcePosition { kind: kind.into(), position: u64::MAX }).collect();
        for positions in [None, Some(&longest[..]), Some(&[]), Some(&longest[1..2])] {
            record(disk, positions).unwrap();
            assert_eq!(std::fs::metadata(&run).unwrap().len(), RECORD_BYTES as u64, "{positions:?}");
        }
        assert!(longest.len() > 3, "{longest:?}");
        assert_eq!(newer_rules(disk).as_deref(), Some(&longest[1..2]));
    }
}
