//! Reads objects from a folder of manifests, and follows the changes of the files.
//!
//! A scan compares the names and metadata of all files, and reads the files that have changed.
//! inotify reports when to scan, and which files are being written. A scan every [`RESCAN`] finds
//! changes that inotify does not report: behind symlinks to files, and on network file systems.
//! `folder.rs` describes when an edit removes an object.

mod disk;
mod documents;
mod folder;
mod notices;

use std::{
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use tokio_util::sync::CancellationToken;

use self::{
    folder::{ManifestFolder, Update},
    notices::Notices,
};
use super::SourceError;
use crate::{
    model::{Event, Model, Sink, Transaction},
    objects::SourceKind,
};

const RESCAN: Duration = Duration::from_secs(10);

/// Reads a folder until `shutdown`, and passes its changes to `sink`. While the folder cannot be
/// used, `sink` learns that the source is cut off, and the objects that were read before stay in
/// use.
pub(super) async fn run(
    folder: PathBuf,
    model: Model,
    sink: Arc<dyn Sink>,
    shutdown: CancellationToken,
) -> Result<(), SourceError> {
    // The reading thread ends when `stop` is closed, also when this future is dropped.
    let (stop, stopped) = UnixStream::pair().map_err(|error| SourceError::WatchEnded(error.to_string()))?;
    let mut reading = tokio::task::spawn_blocking(move || FolderReader::start(&folder, model, sink).run(&stopped));
    let ended = tokio::select! {
        () = shutdown.cancelled() => {
            drop(stop);
            reading.await
        }
        ended = &mut reading => ended,
    };
    ended.map_err(|error| SourceError::WatchEnded(error.to_string()))
}

/// The reading thread.
struct FolderReader {
    folder: ManifestFolder,
    intake: Intake,
    notices: Notices,
    next_scan: Instant,
}

/// Turns updates of the folder into transactions.
struct Intake {
    model: Model,
    sink: Arc<dyn Sink>,
    position_ms: u64,
    is_synced: bool,
    /// Why the sink counts the source as cut off.
    cut_off: Option<String>,
}

impl FolderReader {
    /// Starts to watch the folder, and reads all its files once.
    fn start(root: &Path, model: Model, sink: Arc<dyn Sink>) -> Self {
        // Notifications name files by absolute paths.
        let root = std::path::absolute(root).unwrap_or_else(|_| root.to_owned());
        let mut reader = Self {
            notices: Notices::new(root.clone()),
            folder: ManifestFolder::new(root),
            intake: Intake { model, sink, position_ms: 0, is_synced: false, cut_off: None },
            next_scan: Instant::now(),
        };
        reader.scan(Instant::now());
        reader
    }

    fn run(mut self, stopped: &UnixStream) {
        loop {
            let now = Instant::now();
            let due =
                [self.notices.due(), self.folder.next_look].into_iter().flatten().fold(self.next_scan, Instant::min);
            if due <= now {
                self.scan(now);
            }
            if self.notices.wait(due - now, stopped) {
                return;
            }
        }
    }

    /// Reads the files that have changed, and commits their changes.
    fn scan(&mut self, now: Instant) {
        self.next_scan = now + RESCAN;
        let Self { folder, intake, notices, .. } = self;
        folder.scan(now, notices, |update| intake.take_in(update));
        intake.commit(folder, now);
    }
}

impl Intake {
    fn take_in(&mut self, update: Update) {
        for (location, reason, problems) in update.problems {
            let new = self.model.set_location_problems(&location, problems);
            (0..new).for_each(|_| self.sink.count_error(SourceKind::Files, reason));
        }
        for (event, origin) in update.events {
            let new = self.model.event(event, &origin);
            (0..new).for_each(|_| self.sink.count_error(SourceKind::Files, "malformed_object"));
        }
    }

    /// Commits the updates. A replica serves once it knows all that the folder defines.
    fn commit(&mut self, folder: &ManifestFolder, received: Instant) {
        let invalid = || self.model.invalid().map(|key| format!("{key} is invalid: correct it (see its problem)"));
        let doubt = if self.is_synced { folder.unreadable() } else { folder.doubt().or_else(invalid) };
        if doubt.is_none() {
            self.sink.heard(SourceKind::Files);
        }
        self.model.show_problems(&*self.sink);
        if doubt != self.cut_off {
            if let (Some(doubt), false) = (&doubt, self.is_synced) {
                tracing::warn!("this replica is not ready, because it cannot know what to serve: {doubt}");
            }
            self.cut_off.clone_from(&doubt);
            self.sink.cut_off(doubt);
        }
        if !self.is_synced && self.cut_off.is_some() {
            return;
        }
        let transaction = self.model.take();
        if !self.is_synced || transaction != Transaction::default() {
            self.position_ms = unix_ms().max(self.position_ms + 1);
            let positions = vec![(SourceKind::Files, self.position_ms)];
            self.sink.commit(Transaction { positions, received: Some(received), ..transaction });
        }
        if !std::mem::replace(&mut self.is_synced, true) {
            self.sink.synced();
        }
    }
}

fn unix_ms() -> u64 {
    let elapsed = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX)
}

/// The events for the objects that a file defines.
#[must_use]
pub fn manifest_events(name: &str, bytes: &[u8]) -> Vec<Event> {
    documents::parse(name, bytes).definitions.into_iter().map(|definition| definition.event).collect()
}
