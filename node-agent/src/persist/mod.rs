//! The last good state on disk. A node that starts while no control plane answers forwards with
//! this state.
//!
//! The agent writes the whole state to a new file: soon after its first sync, then at most once per
//! interval if something changed, and when it ends. A new file replaces the old one only when the
//! kernel has its state.
//!
//! After a crash, the rules in the kernel are newer than the file. The agent then resumes with the
//! version of the file, and with the positions that it recorded last (`last_run.rs`): the replica
//! sends what has changed since the file, and no replica that is behind the rules may send.
//!
//! Problems of the file never affect forwarding. If the file cannot be used, the agent starts
//! without a state. If the file cannot be written, the agent logs a warning and counts the error.

mod file;
mod last_run;
mod load;
mod metrics;
mod saver;

use std::{io, path::Path, sync::Arc};

use sha2::{Digest as _, Sha256};
use tracing::{info, warn};

#[doc(hidden)]
pub use load::{MAGIC, StatePart};
pub use metrics::SaveMetrics;
pub(crate) use saver::Saver;

pub(crate) use self::file::StateFile;
use crate::state::held::Restored;

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
    let names = [file::FILE, file::TEMPORARY, last_run::FILE, last_run::TEMPORARY];
    names.into_iter().try_for_each(|name| last_run::remove_file(&folder.join(name)))
}

/// Reads a file with this content and the right checksum, for fuzzing. `None` if the content is
/// invalid.
#[doc(hidden)]
#[must_use]
pub fn state_of(content: &[u8], node_name: &str) -> Option<headgate_core::State> {
    let bytes = [content, &Sha256::digest(content)[..]].concat();
    load::read_from(&bytes, node_name).ok().map(|restored| restored.held.state)
}

#[cfg(test)]
mod tests;
