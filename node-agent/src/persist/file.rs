//! Writes the state file.

use std::{
    fs::{self, DirBuilder, File, OpenOptions, TryLockError},
    io::{self, BufWriter, Write as _},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    sync::Arc,
};

use headgate_core::{ServiceKey, State};
use headgate_proto::{ChangesBuilder, v1};
use prost::Message as _;
use sha2::{Digest as _, Sha256};
use tracing::debug;

use super::{
    load::{self, LoadError, MAGIC, StatePart},
    remove_file,
};
use crate::state::{AgentState, Restored, SavePoint};

// The names of the files in the folder.
pub(super) const FILE: &str = "state";
pub(super) const TEMPORARY: &str = "state.new";

/// Resources are split into parts of about this size, but a Service is never split.
const PART_BYTES: usize = 64 << 10;

/// The state file of one node.
#[derive(Debug)]
pub(crate) struct StateFile {
    folder: PathBuf,
    node_name: Arc<str>,
    /// The folder, which is open and locked while this agent may write. The lock excludes other
    /// agents with the same folder.
    lock: Option<File>,
    /// True if the file held a usable state when it was loaded.
    pub(super) holds_state: bool,
}

impl StateFile {
    /// Names the file in a folder. Does not access the disk.
    pub(super) fn new(folder: &Path, node_name: Arc<str>) -> Self {
        Self { folder: folder.to_owned(), node_name, lock: None, holds_state: false }
    }

    /// Path of the file.
    pub(super) fn path(&self) -> PathBuf {
        self.folder.join(FILE)
    }

    /// Reads the file. Returns `None` if the file does not exist.
    pub(super) fn load(&mut self) -> Result<Option<Restored>, LoadError> {
        // If the lock cannot be taken, the next write reports the reason.
        let _ = self.take_lock();
        let newer = super::newer_rules(&self.folder);
        let mut restored = load::read(&self.path(), &self.node_name)?;
        if let (Some(restored), Some(positions)) = (&mut restored, newer) {
            restored.may_be_behind = true;
            restored.held.raise_positions(&positions);
        }
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
    pub(super) fn write(&mut self, shared: &AgentState) -> io::Result<(u64, u64)> {
        self.take_lock()?;
        let path = self.folder.join(TEMPORARY);
        self.write_to(&path, shared).map_err(|error| {
            // A part of a state only takes up space, which a full disk lacks.
            let _ = fs::remove_file(&path);
            at(&path, &error)
        })
    }

    fn write_to(&self, path: &Path, shared: &AgentState) -> io::Result<(u64, u64)> {
        remove_file(path)?;
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
        let (mut output, mut hash) = (BufWriter::with_capacity(PART_BYTES, file), Sha256::new());
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
        let file = output.into_inner().map_err(io::IntoInnerError::into_error)?;
        file.sync_all()?;
        Ok((end.generation, file.metadata()?.len()))
    }

    /// Replaces the file by the temporary file.
    pub(super) fn commit(&self) -> io::Result<()> {
        let path = self.path();
        let moved = fs::rename(self.folder.join(TEMPORARY), &path);
        let lasts = moved.and_then(|()| self.lock.as_ref().map_or(Ok(()), File::sync_all));
        lasts.map_err(|error| at(&path, &error))
    }

    /// Records that the kernel has rules of this agent; see [`super::record`]. Returns false if
    /// this failed.
    pub(super) fn record_run(&mut self, positions: Option<&[v1::SourcePosition]>) -> bool {
        let recorded = self.take_lock().and_then(|()| super::record(&self.folder, positions));
        if let Err(error) = &recorded {
            debug!(folder = %self.folder.display(), %error, "cannot record the run");
        }
        recorded.is_ok()
    }

    fn take_lock(&mut self) -> io::Result<()> {
        if self.lock.is_some() {
            return Ok(());
        }
        let created = DirBuilder::new().recursive(true).mode(0o700).create(&self.folder);
        let folder = created.and_then(|()| File::open(&self.folder)).map_err(|error| at(&self.folder, &error))?;
        folder.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => io::Error::other(format!(
                "{} is in use by another agent; stop that agent, or pass another --state-dir",
                self.folder.display()
            )),
            TryLockError::Error(error) => at(&self.folder, &error),
        })?;
        self.lock = Some(folder);
        Ok(())
    }
}

fn at(path: &Path, error: &io::Error) -> io::Error {
    io::Error::other(format!("{}: {error}", path.display()))
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
