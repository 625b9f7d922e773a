//! Notices of changed files: which files to read, and when they are fit to be read.
//!
//! A file is read when nothing more was heard of it for [`QUIET`], and not while somebody has it
//! open for writing: half a manifest may be a valid one.

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

/// A file is read when nothing was heard of it for so long.
const QUIET: Duration = Duration::from_millis(50);

/// A file that is touched again and again is read after so long.
const LONGEST_UNREST: Duration = Duration::from_millis(500);

/// A file that is written to and not closed is read after so long.
const LONGEST_WRITING: Duration = Duration::from_secs(5);

/// Above so many files a scan is cheaper than single looks.
const FILES_LIMIT: usize = 10_000;

/// What to do.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Look {
    /// Scan the folder.
    Everywhere,
    /// Read these files, by paths inside the folder.
    At(Vec<PathBuf>),
}

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

    fn due(&self) -> Instant {
        if self.is_being_written {
            self.first + LONGEST_WRITING
        } else {
            (self.last + QUIET).min(self.first + LONGEST_UNREST)
        }
    }
}

/// Notices not acted upon yet.
#[derive(Debug, Default)]
pub(super) struct Notices {
    everywhere: Option<Unrest>,
    files: BTreeMap<PathBuf, Unrest>,
}

impl Notices {
    /// Takes in a notice.
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
                // What a mounted ConfigMap leads through, `..data`: every file may have changed.
                Some(name) if name.as_encoded_bytes().starts_with(b"..") => self.note_all(now),
                Some(_) => {}
                None if is_manifest(inside) && !path.is_dir() => self.note_file(inside, writes, now),
                None if path.is_dir() || folder.knows_below(inside) => self.note_all(now),
                None => {}
            }
        }
    }

    /// Everything may have changed.
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

    /// Whether somebody has a file open for writing, by its path inside the folder.
    pub(super) fn is_being_written(&self, inside: &Path) -> bool {
        self.files.get(inside).is_some_and(|unrest| unrest.is_being_written)
    }

    /// When there is something to do.
    pub(super) fn due(&self) -> Option<Instant> {
        self.files.values().chain(&self.everywhere).map(Unrest::due).min()
    }

    /// What there is to do now.
    pub(super) fn take(&mut self, now: Instant) -> Option<Look> {
        if self.everywhere.is_some_and(|unrest| unrest.due() <= now) {
            self.everywhere = None;
            // Files that are being written are looked at again when they are closed.
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
        assert_eq!(notices.take(start + LONGEST_UNREST), None, "still open");
        let closed = start + Duration::from_secs(1);
        notices.note(&event(EventKind::Access(AccessKind::Close(AccessMode::Write)), "a.yaml"), &folder, closed);
        assert_eq!(notices.take(closed + QUIET), Some(Look::At(vec!["a.yaml".into()])));
        assert_eq!(notices.take(closed + RESTFUL), None);
        notices.note(&event(wrote(), "a.yaml"), &folder, closed);
        assert_eq!(notices.take(closed + LONGEST_WRITING), Some(Look::At(vec!["a.yaml".into()])), "never closed");
    }

    const RESTFUL: Duration = Duration::from_secs(60);

    #[test]
    fn what_is_no_manifest_is_left_alone_and_a_mount_is_scanned() {
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
