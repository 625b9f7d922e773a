//! Writes the state file.

use std::{
    io::{self, Write},
    path::PathBuf,
    sync::Arc,
};

use headgate_core::{ServiceKey, State};
use headgate_proto::{ChangesBuilder, v1};
use prost::Message as _;
use sha2::{Digest as _, Sha256};
use tracing::debug;

use super::{
    disk::{Disk, at},
    load::{self, FILE, LoadError, MAGIC, StatePart},
};
use crate::state::{AgentState, Restored, SavePoint};

/// The name of a file that is not in place yet.
pub(super) const TEMPORARY: &str = "state.new";

/// Resources are split into parts of about this size, but a Service is never split.
const PART_BYTES: usize = 64 << 10;

#[derive(Debug)]
pub(crate) struct StateFile {
    /// Locked while this agent may write. The lock excludes other agents with the same folder.
    disk: Box<dyn Disk>,
    node_name: Arc<str>,
    /// True if the file held a usable state when it was loaded.
    pub(super) holds_state: bool,
}

impl StateFile {
    /// Names the file in a folder. Does not access the disk.
    pub(super) fn new(disk: Box<dyn Disk>, node_name: Arc<str>) -> Self {
        Self { disk, node_name, holds_state: false }
    }

    pub(super) fn path(&self) -> PathBuf {
        self.disk.path().join(FILE)
    }

    /// Reads the file. Returns `None` if the file does not exist.
    pub(super) fn load(&mut self) -> Result<Option<Restored>, LoadError> {
        // If the lock cannot be taken, the next write reports the reason.
        let _ = self.disk.lock();
        let newer = super::newer_rules(&*self.disk);
        let mut restored = load::read(&*self.disk, &self.node_name)?;
        if let (Some(restored), Some(positions)) = (&mut restored, newer) {
            restored.may_be_behind = true;
            restored.held.raise_positions(&positions);
        }
        self.holds_state = restored.is_some();
        Ok(restored)
    }

    /// Writes the whole state to the temporary file, for [`StateFile::commit`] once the kernel has
    /// it. Returns its generation, and the size in bytes. The state is locked for one Service at a
    /// time. The version is that of the beginning: a resume by log brings what has changed since.
    /// The positions are those of the end: no replica behind them may replace a part.
    pub(super) fn write(&mut self, shared: &AgentState) -> io::Result<(u64, u64)> {
        self.disk.lock()?;
        let mut generation = 0;
        let written = self.disk.write(TEMPORARY, true, &mut |output| {
            generation = self.write_to(output, shared)?;
            Ok(())
        });
        written.map(|bytes| (generation, bytes)).map_err(|error| at(&self.disk.path().join(TEMPORARY), &error))
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

    pub(super) fn commit(&self) -> io::Result<()> {
        self.disk.rename(TEMPORARY, FILE, true).map_err(|error| at(&self.path(), &error))
    }

    /// Records that the kernel has rules of this agent; see [`super::record`]. Returns false if
    /// this failed.
    pub(super) fn record_run(&mut self, positions: Option<&[v1::SourcePosition]>) -> bool {
        let recorded = self.disk.lock().and_then(|()| super::record(&*self.disk, positions));
        if let Err(error) = &recorded {
            debug!(folder = %self.disk.path().display(), %error, "cannot record the run");
        }
        recorded.is_ok()
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
