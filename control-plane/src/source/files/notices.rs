//! Notifications of changed files: which files to read, and when.
//!
//! A file is read [`QUIET`] after the last notification about the file. If a program has the file
//! open for writing, the read waits until the program closes the file, but at most
//! [`LONGEST_WRITING`]. The read waits because the first half of a manifest may be a valid
//! manifest.

use std::{
    collections::BTreeMap,
    path::{Component, Path, PathBuf},
    time::{Duration, Instant},
};

use notify::{
    Event, EventKind,
    event::{AccessKind, AccessMode, ModifyKind},
};

use super::folder::{Folder, is_hidden, is_manifest};

/// A file is read this long after the last notification about the file.
const QUIET: Duration = Duration::from_millis(50);

/// A file that changes again and again is read at most this long after the first notification.
const LONGEST_UNREST: Duration = Duration::from_millis(500);

/// A file that a program keeps open for writing is read this long after the first notification.
const LONGEST_WRITING: Duration = Duration::from_secs(5);

/// The number of changed files above which a scan is cheaper than reading each file.
const FILES_LIMIT: usize = 10_000;

/// What to read.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Look {
    /// Scan the folder.
    Everywhere,
    /// Read these files, by paths inside the folder.
    At(Vec<PathBuf>),
}

/// The pending notifications about one file, or about the whole folder.
#[derive(Debug, Clone, Copy)]
struct Unrest {
    first: Instant,
    last: Instant,
    is_being_written: bool,
}

impl Unrest {
    fn new(now: Instant) -> Self {
        Self { first: now, last: now, is_being_written: false }
    }

    /// The time at which the file or the folder is read.
    fn due(&self) -> Instant {
        if self.is_being_written {
            self.first + LONGEST_WRITING
        } else {
            (self.last + QUIET).min(self.first + LONGEST_UNREST)
        }
    }
}

/// All pending notifications.
#[derive(Debug, Default)]
pub(super) struct Notices {
    everywhere: Option<Unrest>,
    files: BTreeMap<PathBuf, Unrest>,
}

impl Notices {
    /// Records a notification.
    pub(super) fn note(&mut self, event: &Event, folder: &Folder, now: Instant) {
        let writes = match event.kind {
            EventKind::Access(AccessKind::Close(AccessMode::Write)) => Some(false),
            EventKind::Access(_) => return,
            EventKind::Modify(ModifyKind::Data(_)) => Some(true),
            _ => None,
        };
        if event.need_rescan() {
            self.note_all(now);
        }
        for path in &event.paths {
            let Ok(inside) = path.strip_prefix(folder.root()) else { continue };
            let hidden = inside.components().find_map(|component| match component {
                Component::Normal(name) if is_hidden(name) => Some(name),
                _ => None,
            });
            match hidden {
                // Kubernetes replaces the symlink `..data` when a mounted ConfigMap changes, so
                // every file may have changed.
                Some(name) if name.as_encoded_bytes().starts_with(b"..") => self.note_all(now),
                Some(_) => {}
                None if is_manifest(inside) && !path.is_dir() => self.note_file(inside, writes, now),
                None if path.is_dir() || folder.knows_below(inside) => self.note_all(now),
                None => {}
            }
        }
    }

    /// Records that every file may have changed.
    pub(super) fn note_all(&mut self, now: Instant) {
        self.everywhere.get_or_insert(Unrest::new(now)).last = now;
    }

    fn note_file(&mut self, inside: &Path, writes: Option<bool>, now: Instant) {
        if self.files.len() >= FILES_LIMIT && !self.files.contains_key(inside) {
            return self.note_all(now);
        }
        let unrest = self.files.entry(inside.to_owned()).or_insert(Unrest::new(now));
        unrest.last = now;
        unrest.is_being_written = writes.unwrap_or(unrest.is_being_written);
    }

    /// Whether a program has the file open for writing. The path is inside the folder.
    pub(super) fn is_being_written(&self, inside: &Path) -> bool {
        self.files.get(inside).is_some_and(|unrest| unrest.is_being_written)
    }

    /// When the next file, or the folder, is due to be read; `None` if no notification is pending.
    pub(super) fn due(&self) -> Option<Instant> {
        self.files.values().chain(&self.everywhere).map(Unrest::due).min()
    }

    /// Returns what is due to be read now, and removes the notifications about it.
    pub(super) fn take(&mut self, now: Instant) -> Option<Look> {
        if self.everywhere.is_some_and(|unrest| unrest.due() <= now) {
            self.everywhere = None;
            // Files that are being written are read later, at the latest after [`LONGEST_WRITING`].
            self.files.retain(|_, unrest| unrest.is_being_written);
            return Some(Look::Everywhere);
        }
        let due: Vec<PathBuf> =
            self.files.iter().filter(|(_, unrest)| unrest.due() <= now).map(|(path, _)| path.clone()).collect();
        for path in &due {
            self.files.remove(path);
        }
        (!due.is_empty()).then_some(Look::At(due))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use notify::event::{CreateKind, DataChange};

    use super::*;

    fn event(kind: EventKind, path: &str) -> Event {
        Event::new(kind).add_path(Path::new("/nowhere").join(path))
    }

    fn wrote() -> EventKind {
        EventKind::Modify(ModifyKind::Data(DataChange::Any))
    }

    #[test]
    fn a_file_is_read_when_its_writer_has_closed_it() {
        let (folder, start) = (Folder::new("/nowhere".into()), Instant::now());
        let mut notices = Notices::default();
        notices.note(&event(EventKind::Create(CreateKind::File), "a.yaml"), &folder, start);
        notices.note(&event(wrote(), "a.yaml"), &folder, start);
        assert_eq!(notices.take(start + LONGEST_UNREST), None, "the file is still open");
        let closed = start + Duration::from_secs(1);
        notices.note(&event(EventKind::Access(AccessKind::Close(AccessMode::Write)), "a.yaml"), &folder, closed);
        assert_eq!(notices.take(closed + QUIET), Some(Look::At(vec!["a.yaml".into()])));
        assert_eq!(notices.take(closed + LATER), None);
        notices.note(&event(wrote(), "a.yaml"), &folder, closed);
        assert_eq!(
            notices.take(closed + LONGEST_WRITING),
            Some(Look::At(vec!["a.yaml".into()])),
            "the file was never closed"
        );
    }

    const LATER: Duration = Duration::from_secs(60);

    #[test]
    fn other_files_are_ignored_and_a_changed_mount_is_scanned() {
        let (folder, now) = (Folder::new("/nowhere".into()), Instant::now());
        let mut notices = Notices::default();
        for path in [".a.yaml.swp", "notes.txt", ".git/x.yaml"] {
            notices.note(&event(wrote(), path), &folder, now);
        }
        assert_eq!(notices.due(), None);
        notices.note(&event(EventKind::Create(CreateKind::Any), "..data"), &folder, now);
        assert_eq!(notices.take(now + QUIET), Some(Look::Everywhere));
    }
}
