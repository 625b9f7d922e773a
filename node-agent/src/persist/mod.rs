//! The last good state on disk. A node that starts while no control plane answers forwards with
//! this state.
//!
//! The file is a log. The file begins with the whole state. Changes are appended to the file, at
//! most once per interval. When the appended part has grown as large as the whole state, a new file
//! is written. The cost of a change is therefore about twice its size, and does not depend on the
//! size of the cluster. A state becomes durable only when the kernel has this state: the saver
//! collects the changes under the state's lock, and writes these changes after the reconcile loop
//! has programmed them.
//!
//! Problems of the file never affect forwarding. If the file cannot be used, the agent starts
//! without a state. If the file cannot be written, the agent logs a warning and counts the error.

mod file;
mod format;
mod last_run;
mod load;
mod metrics;
mod saver;

use std::{fs, io, path::Path, sync::Arc, time::Duration};

use tracing::{info, warn};

pub use metrics::SaveMetrics;
pub(crate) use saver::{Saver, SaverInputs};

use self::file::StateFile;
use crate::state::held::Restored;

/// Opens the folder's state file for a node. Returns the state in the file, if it is usable, and
/// the saver that updates the file, at most once per `interval`.
///
/// Problems of the file or the folder are not errors. Such problems are logged with their
/// consequence.
pub(crate) fn open(folder: &Path, node_name: Arc<str>, interval: Duration) -> (Option<Restored>, Saver) {
    let mut file = StateFile::new(folder, node_name);
    let path = file.path();
    let restored = match file.load() {
        Ok(Some(loaded)) => {
            if let Some(reason) = &loaded.left_out {
                let path = path.display();
                warn!(%path, %reason, "the end of the file with the last good state is unusable; the part before it is used");
            }
            let position = loaded.restored.held.position();
            let state = loaded.restored.held.state();
            let (services, endpoints) = (state.service_count(), state.endpoint_count());
            let may_be_behind = loaded.restored.may_be_behind;
            info!(path = %path.display(), services, endpoints, ?position, may_be_behind, "read the last good state");
            Some(loaded.restored)
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
    let is_restored = restored.is_some();
    (restored, Saver::new(file, is_restored, interval))
}

/// Removes the state file of a folder, the temporary file that a killed agent may have left, and
/// the record of the last run. `--cleanup` calls this function.
///
/// # Errors
/// One of the files exists and cannot be removed.
pub fn remove(folder: &Path) -> io::Result<()> {
    [file::FILE, file::TEMPORARY, last_run::FILE].into_iter().try_for_each(|name| {
        match fs::remove_file(folder.join(name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    })
}

/// Returns the state that the bytes of a file encode, or `None` if the bytes are not usable. For
/// [`crate::fuzz`].
pub(crate) fn state_in(bytes: &[u8], node_name: &str) -> Option<headgate_core::State> {
    let loaded = load::read_from(bytes, node_name).ok()?;
    Some(loaded.restored.held.into_state())
}

/// Encodes a file that consists of `records`, each with the number of its kind. For [`crate::fuzz`]
/// and tests.
///
/// # Errors
/// The number of a kind is unknown, or a payload is too long.
#[doc(hidden)]
pub fn file_of(records: &[(u8, &[u8])]) -> io::Result<Vec<u8>> {
    let mut writer = format::Writer::begin(Vec::new())?;
    for (kind, payload) in records {
        let kind = format::Kind::from_byte(*kind).ok_or(io::ErrorKind::InvalidInput)?;
        writer.record(kind, payload)?;
    }
    Ok(writer.finish().0)
}

/// Returns the records of a file, up to the first damaged record.
#[doc(hidden)]
#[must_use]
pub fn records_of(bytes: &[u8]) -> Vec<(u8, Vec<u8>)> {
    let mut records = Vec::new();
    if let Ok(mut reader) = format::Reader::begin(bytes) {
        while let Ok(Some((kind, payload))) = reader.next() {
            records.push((kind as u8, payload.to_vec()));
        }
    }
    records
}

#[cfg(test)]
mod tests;
