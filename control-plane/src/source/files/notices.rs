//! Notifications of the kernel (inotify): when to scan the folder, and which files are written.
//!
//! The folder is scanned [`QUIET`] after the last notification. The first half of a manifest may be
//! a valid manifest. So a file counts as read only if no program has written into it from its last
//! close to the end of the read. The kernel queues a notification before the program's call
//! returns, so the queue shows this after the read.
//!
//! A program may write a file again as soon as it has closed it. If a file has changes that were
//! not read for [`LONGEST_UNREST`], the folder is scanned at the moment when the file is closed.

use std::{
    collections::{BTreeMap, HashMap},
    ffi::OsStr,
    mem::MaybeUninit,
    os::{
        fd::{AsFd, OwnedFd},
        unix::{ffi::OsStrExt as _, net::UnixStream},
    },
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::inotify::{self, CreateFlags, Event, ReadFlags as Mask, Reader, WatchFlags},
    io::Errno,
};

use super::{
    RESCAN,
    disk::{is_hidden, is_manifest},
};

/// The folder is scanned this long after the last notification.
const QUIET: Duration = Duration::from_millis(50);

/// A folder that changes again and again is scanned this long after the first notification.
const LONGEST_UNREST: Duration = Duration::from_millis(500);

/// A file whose changes cannot be read for so long is a problem.
pub(super) const LONGEST_WRITING: Duration = Duration::from_secs(5);

/// The number of files that may be left out.
const WRITING_LIMIT: usize = 10_000;

/// The notifications of a folder, and what follows from them.
#[derive(Debug)]
pub(super) struct Notices {
    root: PathBuf,
    /// `None` if the system gives no notifications.
    inotify: Option<OwnedFd>,
    /// The path of each watch.
    watched: HashMap<i32, PathBuf>,
    /// The first and the last notification since the last scan.
    pending: Option<(Instant, Instant)>,
    /// When the folder was last scanned because of [`LONGEST_UNREST`].
    hurried: Option<Instant>,
    /// The files with changes that were not read: since when, and whether a program has the file
    /// open for writing.
    pub(super) unread: BTreeMap<PathBuf, (Instant, bool)>,
}

impl Notices {
    pub(super) fn new(root: PathBuf) -> Self {
        let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).inspect_err(warn).ok();
        let (watched, unread) = (HashMap::new(), BTreeMap::new());
        Self { root, inotify, watched, pending: None, hurried: None, unread }
    }

    /// Forgets the notifications before a scan, and watches the root and the folders above it, in
    /// which the root may appear, disappear, or be replaced.
    pub(super) fn begin_scan(&mut self, now: Instant) {
        self.take_in(now);
        let is_hurried = self.pending.take().is_some_and(|(first, _)| first + LONGEST_UNREST <= now);
        self.hurried = if is_hurried { Some(now) } else { self.hurried };
        self.watched.clear();
        let root = self.root.clone();
        root.ancestors().for_each(|path| self.watch(path));
    }

    /// Watches a file or a folder until the next scan, which renews the watch.
    pub(super) fn watch(&mut self, path: &Path) {
        let events = WatchFlags::ALL_EVENTS - WatchFlags::ACCESS - WatchFlags::OPEN - WatchFlags::CLOSE_NOWRITE;
        match self.inotify.as_ref().map(|inotify| inotify::add_watch(inotify, path, events)) {
            Some(Ok(watch)) => drop(self.watched.insert(watch, path.to_owned())),
            Some(Err(error @ Errno::NOSPC)) => {
                warn(&error);
                (self.inotify, self.unread) = (None, BTreeMap::new());
            }
            _ => {}
        }
    }

    /// Waits for a notification, at most for `time`. Returns true if the other end of `stopped` is
    /// closed.
    pub(super) fn wait(&mut self, time: Duration, stopped: &UnixStream) -> bool {
        let files = [stopped.as_fd()].into_iter().chain(self.inotify.as_ref().map(AsFd::as_fd));
        let mut files: Vec<_> = files.map(|file| PollFd::from_borrowed_fd(file, PollFlags::IN)).collect();
        let timeout = Timespec::try_from(time).ok();
        // After an error, the caller looks again what is due.
        let is_stopped = poll(&mut files, timeout.as_ref()).is_ok() && !files[0].revents().is_empty();
        self.take_in(Instant::now());
        is_stopped
    }

    /// Takes in all notifications so far.
    fn take_in(&mut self, now: Instant) {
        let Some(inotify) = self.inotify.take() else { return };
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut reader = Reader::new(&inotify, &mut buffer);
        while let Ok(event) = reader.next() {
            self.note(&inotify, &event, now);
        }
        self.inotify = Some(inotify);
    }

    fn note(&mut self, inotify: &OwnedFd, event: &Event<'_>, now: Instant) {
        let mask = event.events();
        let folder = match self.watched.get(&event.wd()) {
            // Notifications were lost, so every file may have changed.
            _ if mask.contains(Mask::QUEUE_OVERFLOW) => &self.root,
            Some(folder) => folder,
            // The folder has another name now.
            None => {
                let _ = inotify::remove_watch(inotify, event.wd());
                return;
            }
        };
        let name = event.file_name().map(|name| OsStr::from_bytes(name.to_bytes()));
        let path = name.map_or_else(|| folder.clone(), |name| folder.join(name));
        if !is_relevant(mask, &path, &self.root) {
            return;
        }
        if mask.contains(Mask::MODIFY) {
            if self.unread.len() < WRITING_LIMIT {
                self.unread.entry(path).or_insert((now, true)).1 = true;
            }
            // The folder is scanned when the file is closed.
            return;
        }
        let mut first = now;
        if !mask.contains(Mask::ATTRIB) {
            // The file was closed, or another file or folder has this name now. A pause between
            // scans remains, however often that happens.
            let has_rested = self.hurried.is_none_or(|hurried| hurried + QUIET <= now);
            let at_path = self.unread.range_mut(path.clone()..).take_while(|(file, _)| file.starts_with(&path));
            for (_, (since, is_open)) in at_path {
                *is_open = false;
                first = if has_rested { first.min(*since) } else { first };
            }
        }
        self.pending = Some((self.pending.map_or(first, |(before, _)| before.min(first)), now));
    }

    /// When the folder is to be scanned; `None` if no notification is pending.
    pub(super) fn due(&self) -> Option<Instant> {
        self.pending.map(|(first, last)| (last + QUIET).min(first + LONGEST_UNREST))
    }

    /// Calls `read` for a file. Returns its result if the file was whole all the time. The error
    /// says since when the file has changes that were not read.
    pub(super) fn read<T>(&mut self, path: &Path, now: Instant, read: impl FnOnce() -> T) -> Result<T, Instant> {
        self.take_in(now);
        let before = self.unread.get(path).copied();
        if let Some((since, true)) = before {
            return Err(since);
        }
        self.unread.remove(path);
        let result = read();
        self.take_in(now);
        let Some((since, _)) = self.unread.get_mut(path) else { return Ok(result) };
        *since = before.map_or(*since, |(first, _)| first);
        Err(*since)
    }
}

fn warn(error: &Errno) {
    let seconds = RESCAN.as_secs();
    tracing::warn!("no notifications of changed files, so the folder is only scanned every {seconds} seconds: {error}");
}

/// Whether a notification may be about a manifest, a folder, or the root. Kubernetes replaces the
/// symlink `..data` when a mounted ConfigMap changes, so names that begin with `..` count.
fn is_relevant(mask: Mask, path: &Path, root: &Path) -> bool {
    let Ok(inside) = path.strip_prefix(root) else { return root.starts_with(path) };
    let Some(name) = inside.file_name() else { return true };
    let of_files = Mask::MODIFY | Mask::CLOSE_WRITE | Mask::CREATE | Mask::DELETE;
    let is_of_file = mask.intersects(of_files) && !mask.contains(Mask::ISDIR);
    let is_ignored = is_hidden(name) && !name.as_encoded_bytes().starts_with(b"..");
    !is_ignored && (!is_of_file || is_manifest(inside))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::fs::{self, File};

    use super::*;

    /// The notices of a new folder that was scanned at `start`, and a file in the folder.
    fn started(start: Instant) -> (tempfile::TempDir, PathBuf, Notices) {
        let folder = tempfile::tempdir().unwrap();
        let (file, mut notices) = (folder.path().join("a.yaml"), Notices::new(folder.path().to_owned()));
        fs::write(&file, "old").unwrap();
        notices.begin_scan(start);
        assert_eq!(notices.due(), None);
        (folder, file, notices)
    }

    #[test]
    fn what_was_written_meanwhile_was_not_read() {
        let start = Instant::now();
        let (folder, file, mut notices) = started(start);
        let write = || fs::write(&file, "new").unwrap();
        assert_eq!(notices.read(&file, start, write), Err(start), "the file is closed again");
        assert_eq!(notices.read(&file, start + QUIET, write), Err(start));
        let write_other = || fs::write(folder.path().join("b.yaml"), "new").unwrap();
        assert_eq!(notices.read(&file, start + QUIET, write_other), Ok(()));
        // Another file has the name, or none.
        for is_renamed in [true, false] {
            let _writer = File::create(&file).unwrap();
            assert_eq!(notices.read(&file, start, || {}), Err(start));
            if is_renamed {
                fs::rename(folder.path().join("b.yaml"), &file).unwrap();
            } else {
                fs::remove_file(&file).unwrap();
            }
            assert_eq!(notices.read(&file, start, || {}), Ok(()));
        }
    }

    #[test]
    fn a_folder_that_never_rests_is_scanned() {
        let start = Instant::now();
        let (_folder, file, mut notices) = started(start);
        for number in 0..100 {
            fs::write(&file, "new").unwrap();
            notices.take_in(start + QUIET / 2 * number);
        }
        assert_eq!(notices.due(), Some(start + LONGEST_UNREST));
    }

    #[test]
    fn notifications_about_other_files_are_ignored() {
        let is_relevant = |mask, path: &str| {
            let root = Path::new("/some/where");
            is_relevant(mask, &root.join(path), root)
        };
        for path in [".a.yaml.swp", "notes.txt", "/some/other/x.yaml", "/some/wherever"] {
            assert!(!is_relevant(Mask::MODIFY, path), "{path}");
        }
        assert!(!is_relevant(Mask::CREATE | Mask::ISDIR, ".git"));
        for path in ["..data", "folder.d", "a.yaml", "", "/some"] {
            assert!(is_relevant(Mask::MOVED_TO, path), "{path}");
        }
        for path in ["folder", ""] {
            assert!(is_relevant(Mask::CREATE | Mask::ISDIR, path), "{path}");
        }
    }
}
