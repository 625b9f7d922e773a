//! Writes the state file: appends changes, and sometimes replaces the file with the whole state.

use std::{
    fs::{self, DirBuilder, File, OpenOptions, TryLockError},
    io::{self, BufWriter, Write},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    sync::Arc,
};

use headgate_core::ServiceKey;
use headgate_proto::{ChangesBuilder, v1};
use prost::Message as _;
use tracing::debug;

use super::{
    format::{Chain, Kind, Writer},
    last_run,
    load::{self, LoadError, Loaded},
};
use crate::state::{
    AgentState,
    unsaved::{CHANGES_BYTES, UnsavedChanges},
};

/// The file is replaced when the appended part is at least as large as the whole state at the
/// beginning of the file, and at least as large as this size.
const MIN_APPENDED_BYTES: u64 = 256 << 10;

/// Why the state could not be written. The saver tries again.
#[derive(Debug, thiserror::Error)]
pub(super) enum SaveError {
    #[error("{}: {error}", path.display())]
    Io { path: PathBuf, error: io::Error },
    #[error("{} is in use by another agent; stop that agent, or pass another --state-dir", .0.display())]
    Locked(PathBuf),
    #[error("too much changed while the state was written")]
    Overtaken,
}

/// The state file of one node.
#[derive(Debug)]
pub(super) struct StateFile {
    folder: PathBuf,
    node_name: Arc<str>,
    /// The lock file, which is open while this agent may write. The lock excludes other agents with
    /// the same folder.
    lock: Option<File>,
    /// The file, if changes can be appended to it. `None` means that the next write replaces the
    /// file.
    log: Option<Log>,
}

/// A file that can be appended to.
#[derive(Debug)]
struct Log {
    file: File,
    chain: Chain,
    base_bytes: u64,
    bytes: u64,
}

/// An encoded state. [`StateFile::commit`] makes the state durable, once the kernel has it.
#[derive(Debug)]
pub(super) enum Prepared {
    /// Bytes to append, and the checksum of their last record.
    Append { generation: u64, bytes: Vec<u8>, chain: Chain },
    /// A complete file with the temporary name.
    Full { generation: u64, file: File, chain: Chain, bytes: u64 },
}

impl Prepared {
    /// The generation of the prepared state, as [`AgentState`] counts generations.
    pub(super) fn generation(&self) -> u64 {
        match self {
            Self::Append { generation, .. } | Self::Full { generation, .. } => *generation,
        }
    }

    /// The value of the metric label `kind`.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Self::Append { .. } => "append",
            Self::Full { .. } => "full",
        }
    }
}

impl StateFile {
    /// Names the file in a folder. Does not access the disk.
    pub(super) fn new(folder: &Path, node_name: Arc<str>) -> Self {
        Self { folder: folder.to_owned(), node_name, lock: None, log: None }
    }

    /// Path of the file.
    pub(super) fn path(&self) -> PathBuf {
        self.folder.join(FILE)
    }

    /// Reads the file. Returns `None` if the file does not exist. If the file is intact and this
    /// agent has the lock, later changes are appended to the file.
    pub(super) fn load(&mut self) -> Result<Option<Loaded>, LoadError> {
        // Take the lock before reading, because another agent could append to the file. If the lock
        // cannot be taken, the next write reports the reason.
        let may_write = self.take_lock().is_ok();
        let may_be_behind = last_run::may_have_newer_rules(&self.folder);
        let mut loaded = load::read(&self.path(), &self.node_name)?;
        loaded.iter_mut().for_each(|loaded| loaded.restored.may_be_behind = may_be_behind);
        if let Some(Loaded { chain, base_bytes, valid_bytes, left_out: None, .. }) = &loaded
            && may_write
            && let Ok(file) = OpenOptions::new().append(true).open(self.path())
        {
            self.log = Some(Log { file, chain: chain.clone(), base_bytes: *base_bytes, bytes: *valid_bytes });
        }
        Ok(loaded)
    }

    /// Takes the unsaved changes from the state and encodes them. If the file has to be replaced,
    /// writes the whole state to a temporary file instead.
    pub(super) fn prepare(&mut self, shared: &AgentState) -> Result<Prepared, SaveError> {
        self.take_lock()?;
        if let Some(log) = &self.log
            && log.bytes - log.base_bytes < log.base_bytes.max(MIN_APPENDED_BYTES)
            && let Some(unsaved) = shared.take_unsaved(false)
        {
            return self.encode_append(&log.chain, &unsaved);
        }
        self.log = None;
        self.write_full(shared)
    }

    fn encode_append(&self, chain: &Chain, unsaved: &UnsavedChanges) -> Result<Prepared, SaveError> {
        let mut writer = Writer::resume(Vec::new(), chain.clone());
        write_unsaved(&mut writer, unsaved).map_err(|error| self.io_error(&self.path(), error))?;
        let (bytes, chain, _) = writer.finish();
        Ok(Prepared::Append { generation: unsaved.generation, bytes, chain })
    }

    /// Writes the whole state to a temporary file. Locks the state for one service at a time.
    /// Changes that arrive during the write are added at the end, so that the file holds one
    /// consistent state.
    fn write_full(&self, shared: &AgentState) -> Result<Prepared, SaveError> {
        let path = self.folder.join(TEMPORARY);
        let fail = |error| self.io_error(&path, error);
        if let Err(error) = fs::remove_file(&path)
            && error.kind() != io::ErrorKind::NotFound
        {
            return Err(fail(error));
        }
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path).map_err(fail)?;
        let mut writer = Writer::begin(BufWriter::with_capacity(CHANGES_BYTES, file)).map_err(fail)?;
        writer.record(Kind::Owner, self.node_name.as_bytes()).map_err(fail)?;
        let keys = shared.begin_saving();
        write_services(&mut writer, shared, &keys).map_err(fail)?;
        let unsaved = shared.take_unsaved(true).ok_or(SaveError::Overtaken)?;
        write_unsaved(&mut writer, &unsaved).map_err(fail)?;
        let (output, chain, bytes) = writer.finish();
        let file = output.into_inner().map_err(|error| fail(error.into_error()))?;
        // `commit` renames the file when the kernel has this state.
        file.sync_all().map_err(fail)?;
        Ok(Prepared::Full { generation: unsaved.generation, file, chain, bytes })
    }

    /// Makes a prepared state durable, and returns the size of the file. After an error, the next
    /// write replaces the file.
    pub(super) fn commit(&mut self, prepared: Prepared) -> Result<u64, SaveError> {
        let log = self.log.take();
        let (path, temporary) = (self.path(), self.folder.join(TEMPORARY));
        let log = match (prepared, log) {
            (Prepared::Append { bytes, chain, .. }, Some(mut log)) => {
                log.append(&bytes, chain).map_err(|error| self.io_error(&path, error))?;
                log
            }
            // The bytes were prepared for a file to which nothing can be appended any more.
            (Prepared::Append { .. }, None) => return Err(SaveError::Overtaken),
            (Prepared::Full { file, chain, bytes, .. }, _) => {
                fs::rename(&temporary, &path).map_err(|error| self.io_error(&temporary, error))?;
                let synced = File::open(&self.folder).and_then(|folder| folder.sync_all());
                synced.map_err(|error| self.io_error(&self.folder, error))?;
                Log { file, chain, base_bytes: bytes, bytes }
            }
        };
        Ok(self.log.insert(log).bytes)
    }

    /// Records that the kernel has rules of this agent; see [`last_run::record`].
    pub(super) fn record_run(&self, is_saved: bool) {
        if self.lock.is_some()
            && let Err(error) = last_run::record(&self.folder, is_saved)
        {
            debug!(folder = %self.folder.display(), %error, "cannot record the run");
        }
    }

    /// Drops the prepared state and removes the temporary file. The next write replaces the file.
    pub(super) fn give_up(&mut self) {
        self.log = None;
        if self.lock.is_some() {
            // The temporary file may not exist. If its removal fails, the next full write removes
            // it.
            let _ = fs::remove_file(self.folder.join(TEMPORARY));
        }
    }

    fn take_lock(&mut self) -> Result<(), SaveError> {
        if self.lock.is_some() {
            return Ok(());
        }
        let path = self.folder.join(LOCK);
        let fail = |error| self.io_error(&path, error);
        DirBuilder::new().recursive(true).mode(0o700).create(&self.folder).map_err(fail)?;
        // If the path is a named pipe, opening it would block until a reader opens the pipe.
        if fs::metadata(&path).is_ok_and(|found| !found.is_file()) {
            return Err(fail(io::Error::other("it is not a regular file")));
        }
        let open = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&path);
        let file = open.map_err(fail)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(SaveError::Locked(self.folder.clone())),
            Err(TryLockError::Error(error)) => return Err(fail(error)),
        }
        self.lock = Some(file);
        Ok(())
    }

    fn io_error(&self, path: &Path, error: io::Error) -> SaveError {
        SaveError::Io { path: path.to_owned(), error }
    }
}

// The names of the files in the folder.
pub(super) const FILE: &str = "state";
pub(super) const TEMPORARY: &str = "state.new";
const LOCK: &str = "lock";

impl Log {
    fn append(&mut self, bytes: &[u8], chain: Chain) -> io::Result<()> {
        self.file.write_all(bytes)?;
        self.file.sync_data()?;
        self.bytes += bytes.len() as u64;
        self.chain = chain;
        Ok(())
    }
}

fn write_unsaved(writer: &mut Writer<impl Write>, unsaved: &UnsavedChanges) -> io::Result<()> {
    for changes in &unsaved.changes {
        writer.record(Kind::Changes, &changes.encode_to_vec())?;
    }
    if let Some(node) = &unsaved.node {
        writer.record(Kind::Node, &node.encode_to_vec())?;
    }
    writer.record(Kind::Point, &unsaved.point.encode_to_vec())
}

/// Writes services with their current values. If a service was removed in the meantime, the unsaved
/// changes contain its removal. The unsaved changes are written afterwards.
fn write_services(writer: &mut Writer<impl Write>, shared: &AgentState, keys: &[Arc<ServiceKey>]) -> io::Result<()> {
    let mut builder = ChangesBuilder::default();
    for key in keys {
        let mut full: Vec<v1::Changes> = Vec::new();
        shared.with_state(|state| {
            let Some(entry) = state.entry(key) else { return };
            entry.service().into_iter().for_each(|service| builder.service(service));
            for endpoint in entry.endpoints().values() {
                builder.endpoint(key, endpoint, 0);
                if builder.estimated_bytes() >= CHANGES_BYTES {
                    full.push(std::mem::take(&mut builder).finish());
                }
            }
        });
        if builder.estimated_bytes() >= CHANGES_BYTES {
            full.push(std::mem::take(&mut builder).finish());
        }
        full.iter().try_for_each(|changes| writer.record(Kind::Changes, &changes.encode_to_vec()))?;
    }
    let rest = builder.finish();
    if rest.encoded_len() > 0 { writer.record(Kind::Changes, &rest.encode_to_vec()) } else { Ok(()) }
}
