//! Notifications of changed files: when to scan the folder, and which files not to read yet.
//!
//! The folder is scanned [`QUIET`] after the last notification. A file that a program has open for
//! writing is left out until the program closes the file, but at most for [`LONGEST_WRITING`],
//! because the first half of a manifest may be a valid manifest.

use std::{
    collections::BTreeMap,
    fs,
    path::{Component, Path, PathBuf},
    sync::mpsc,
    time::{Duration, Instant},
};

use notify::{
    Event, EventKind, RecursiveMode, Watcher as _,
    event::{AccessKind, AccessMode, CreateKind, ModifyKind, RemoveKind},
};

use super::{
    Message, RESCAN,
    disk::{Identity, identity, is_hidden, is_manifest},
};
use crate::transaction::{Sink, SourceKind};

/// The folder is scanned this long after the last notification.
const QUIET: Duration = Duration::from_millis(50);

/// A folder that changes again and again is scanned this long after the first notification.
const LONGEST_UNREST: Duration = Duration::from_millis(500);

/// A file that a program keeps open for writing is read this long after the first notification.
const LONGEST_WRITING: Duration = Duration::from_secs(5);

/// The number of files that may be left out.
const WRITING_LIMIT: usize = 10_000;

/// All pending notifications.
#[derive(Debug, Default)]
pub(super) struct Notices {
    /// The first and the last notification.
    pending: Option<(Instant, Instant)>,
    /// The files that programs have open for writing, since when.
    writing: BTreeMap<PathBuf, Instant>,
}

impl Notices {
    /// Records a notification.
    pub(super) fn note(&mut self, event: &Event, now: Instant) {
        self.note_all(now);
        for path in &event.paths {
            match event.kind {
                EventKind::Modify(ModifyKind::Data(_)) if self.writing.len() < WRITING_LIMIT => {
                    self.writing.entry(path.clone()).or_insert(now);
                }
                EventKind::Modify(ModifyKind::Metadata(_) | ModifyKind::Data(_)) => {}
                // The file was closed, or another file has this name now.
                _ => drop(self.writing.remove(path)),
            }
        }
    }

    /// Records that every file may have changed.
    pub(super) fn note_all(&mut self, now: Instant) {
        self.pending = Some((self.pending.map_or(now, |(first, _)| first), now));
    }

    /// Whether a program has the file open for writing.
    pub(super) fn is_being_written(&self, path: &Path) -> bool {
        self.writing.contains_key(path)
    }

    /// When the folder is to be scanned; `None` if no notification is pending.
    pub(super) fn due(&self) -> Option<Instant> {
        let pending = self.pending.map(|(first, last)| (last + QUIET).min(first + LONGEST_UNREST));
        self.writing.values().map(|since| *since + LONGEST_WRITING).chain(pending).min()
    }

    /// Forgets the notifications before a scan.
    pub(super) fn clear(&mut self, now: Instant) {
        self.pending = None;
        self.writing.retain(|_, since| now < *since + LONGEST_WRITING);
    }
}

/// Watches the root, all that is below it, and the folders above it, in which the root may appear,
/// disappear, or be replaced.
pub(super) struct Watch {
    /// `None` if the system gives no notifications. The thread of the watcher runs until the
    /// watcher is dropped.
    _watcher: Option<notify::RecommendedWatcher>,
    /// The root and the folders above it.
    watched: Vec<Option<Identity>>,
}

fn identities(root: &Path) -> Vec<Option<Identity>> {
    root.ancestors().map(|path| fs::metadata(path).ok().as_ref().map(identity)).collect()
}

impl Watch {
    pub(super) fn start(root: &Path, sender: mpsc::Sender<Message>, sink: &dyn Sink) -> Self {
        let watched = identities(root);
        let watcher = watch(root, sender).map_err(|error| {
            sink.count_error(SourceKind::Files, "no_notifications");
            let seconds = RESCAN.as_secs();
            tracing::warn!(
                "the system gives no notifications of changed files, so the folder is only scanned every {seconds} seconds: {error}"
            );
        });
        Self { _watcher: watcher.ok(), watched }
    }

    /// Whether the root and the folders above it are still those that are watched.
    pub(super) fn is_current(&self, root: &Path) -> bool {
        self.watched == identities(root)
    }
}

fn watch(root: &Path, sender: mpsc::Sender<Message>) -> notify::Result<notify::RecommendedWatcher> {
    let of_root = root.to_owned();
    let mut watcher = notify::recommended_watcher(move |noticed: notify::Result<Event>| {
        if noticed.as_ref().map_or(true, |event| is_relevant(event, &of_root)) {
            // Sending fails only if the reading thread has ended.
            let _ = sender.send(Message::Noticed(noticed));
        }
    })?;
    for above in root.ancestors().skip(1) {
        // Without this watch, the next scan finds a root that has been replaced.
        let _ = watcher.watch(above, RecursiveMode::NonRecursive);
    }
    match watcher.watch(root, RecursiveMode::Recursive) {
        Err(error) if root.exists() => Err(error),
        _ => Ok(watcher),
    }
}

/// Whether a notification may be about a manifest, a folder, or the root. Kubernetes replaces the
/// symlink `..data` when a mounted ConfigMap changes, so names that begin with `..` count.
fn is_relevant(event: &Event, root: &Path) -> bool {
    let is_of_file = matches!(
        event.kind,
        EventKind::Access(_)
            | EventKind::Create(CreateKind::File)
            | EventKind::Modify(ModifyKind::Data(_))
            | EventKind::Remove(RemoveKind::File)
    );
    let is_read = matches!(event.kind, EventKind::Access(access) if access != AccessKind::Close(AccessMode::Write));
    let is_of_interest = |path: &PathBuf| {
        let Ok(inside) = path.strip_prefix(root) else { return root.starts_with(path) };
        let is_ignored = |component| matches!(component, Component::Normal(name) if is_hidden(name) && !name.as_encoded_bytes().starts_with(b".."));
        !inside.components().any(is_ignored) && (!is_of_file || is_manifest(inside) || inside.as_os_str().is_empty())
    };
    event.need_rescan() || (!is_read && event.paths.iter().any(is_of_interest))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use notify::event::DataChange;

    use super::*;

    fn event(kind: EventKind, path: &str) -> Event {
        Event::new(kind).add_path(Path::new("/some/where").join(path))
    }

    const WROTE: EventKind = EventKind::Modify(ModifyKind::Data(DataChange::Any));
    const CLOSED: EventKind = EventKind::Access(AccessKind::Close(AccessMode::Write));

    #[test]
    fn a_file_is_read_when_its_writer_has_closed_it() {
        let (start, file) = (Instant::now(), Path::new("/some/where/a.yaml"));
        let mut notices = Notices::default();
        notices.note(&event(EventKind::Create(CreateKind::File), "a.yaml"), start);
        notices.note(&event(WROTE, "a.yaml"), start);
        assert_eq!(notices.due(), Some(start + QUIET));
        notices.clear(start + QUIET);
        assert!(notices.is_being_written(file), "the file is still open");
        assert_eq!(notices.due(), Some(start + LONGEST_WRITING));
        let closed = start + Duration::from_secs(1);
        notices.note(&event(CLOSED, "a.yaml"), closed);
        assert!(!notices.is_being_written(file));
        assert_eq!(notices.due(), Some(closed + QUIET));
        notices.note(&event(WROTE, "a.yaml"), closed);
        notices.clear(closed + LONGEST_WRITING);
        assert!(!notices.is_being_written(file), "the file was never closed");
        assert_eq!(notices.due(), None);
    }

    #[test]
    fn a_folder_that_never_rests_is_scanned() {
        let (start, mut notices) = (Instant::now(), Notices::default());
        for number in 0..100 {
            notices.note(&event(CLOSED, "a.yaml"), start + QUIET / 2 * number);
        }
        assert_eq!(notices.due(), Some(start + LONGEST_UNREST));
    }

    #[test]
    fn notifications_about_other_files_are_ignored() {
        let is_relevant = |kind, path: &str| is_relevant(&event(kind, path), Path::new("/some/where"));
        for path in [".a.yaml.swp", "notes.txt", ".git/x.yaml", "/some/other/x.yaml", "/some/wherever"] {
            assert!(!is_relevant(WROTE, path), "{path}");
        }
        assert!(!is_relevant(EventKind::Access(AccessKind::Open(AccessMode::Read)), "a.yaml"));
        for path in ["..data", "..2026/a.yaml", "a.yaml", "folder.d", "", "/some"] {
            assert!(is_relevant(EventKind::Create(CreateKind::Any), path), "{path}");
        }
    }
}
