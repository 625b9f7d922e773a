//! The last good state on disk, so that a node which starts while no control plane answers forwards
//! all the same.
//!
//! The file is a log: the whole state once, then what changed, appended at most once an interval.
//! When the appended part has grown as large as the whole, the file is written anew. A change
//! therefore costs its own size (twice, in the long run), whatever the size of the cluster. Only
//! what the kernel has is made durable: a step is prepared under the state's lock, and written when
//! the reconcile loop has programmed it.
//!
//! Nothing here may stand in the way of forwarding: a file that cannot be used is a cold start's
//! head start lost, and a disk that cannot be written to is a warning and a metric.

mod file;
mod format;
mod load;
mod metrics;
mod saver;

use std::{fs, io, path::Path, sync::Arc, time::Duration};

use tracing::{info, warn};

pub use metrics::SaveMetrics;
pub(crate) use saver::{Saver, SaverInputs};

use self::file::StateFile;
use crate::state::held::Restored;

/// Opens the folder's state file for a node. Returns what is in it, if that can be used, and the
/// saver that keeps it up to date, at most once an `interval`.
///
/// Nothing that is wrong with the file or the folder is an error: it is logged, with what it means.
pub(crate) fn open(folder: &Path, node_name: Arc<str>, interval: Duration) -> (Option<Restored>, Saver) {
    let mut file = StateFile::new(folder, node_name);
    let path = file.path();
    let restored = match file.load() {
        Ok(Some(loaded)) => {
            if let Some(reason) = &loaded.left_out {
                let path = path.display();
                warn!(%path, %reason, "the end of the last good state is left out; what comes before it is used");
            }
            let position = loaded.restored.held.position();
            let state = loaded.restored.held.state();
            let (services, endpoints) = (state.service_count(), state.endpoint_count());
            info!(path = %path.display(), services, endpoints, ?position, "read the last good state");
            Some(loaded.restored)
        }
        Ok(None) => {
            info!(path = %path.display(), "no last good state yet");
            None
        }
        Err(error) => {
            warn!(path = %path.display(), "the last good state {error}: it is ignored, and replaced once a control plane has sent one. Nothing else is lost");
            None
        }
    };
    let is_restored = restored.is_some();
    (restored, Saver::new(file, is_restored, interval))
}

/// Removes the state file of a folder, and what a killed agent left of writing one; for
/// `--cleanup`.
///
/// # Errors
/// When it is there and cannot be removed.
pub fn remove(folder: &Path) -> io::Result<()> {
    [file::FILE, file::TEMPORARY].into_iter().try_for_each(|name| match fs::remove_file(folder.join(name)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    })
}

/// The state in a file's bytes, if there is one; for [`crate::fuzz`].
pub(crate) fn state_in(bytes: &[u8], node_name: &str) -> Option<headgate_core::State> {
    let loaded = load::read_from(bytes, node_name).ok()?;
    Some(loaded.restored.held.into_state())
}

/// A file of records whose kinds are given as numbers; unknown ones cannot be written.
pub(crate) fn file_of(records: &[(u8, &[u8])]) -> io::Result<Vec<u8>> {
    let mut writer = format::Writer::begin(Vec::new())?;
    for (kind, payload) in records {
        let kind = format::Kind::from_byte(*kind).ok_or(io::ErrorKind::InvalidInput)?;
        writer.record(kind, payload)?;
    }
    Ok(writer.finish().0)
}

/// The records of a file, up to the first that is damaged.
pub(crate) fn records_of(bytes: &[u8]) -> Vec<(u8, Vec<u8>)> {
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
