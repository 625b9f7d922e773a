//! The files on disk: finds the manifests below a folder, and reads them.

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    fs::{self, Metadata},
    io::{self, Read as _},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use rustix::fs::{SeekFrom, seek};

/// Maximum size of a file. Larger files are refused.
const FILE_LIMIT_BYTES: u64 = 256 * 1024 * 1024;

/// More than the time between two ticks of the clock of a file system.
const TICK: Duration = Duration::from_millis(20);

/// Device and inode of a file or folder.
pub(super) type FileIdentity = (u64, u64);

/// Metadata of a file: identity, size, and the times of the last changes of content and metadata.
/// An equal stamp means that the file has not changed.
pub(super) type Stamp = (FileIdentity, u64, [i64; 4]);

fn stamp(metadata: &Metadata) -> Stamp {
    let times = [metadata.mtime(), metadata.mtime_nsec(), metadata.ctime(), metadata.ctime_nsec()];
    (identity(metadata), metadata.size(), times)
}

/// The stamp of a file that is about to be read. Two changes within one tick of the clock may leave
/// the same stamp, so the stamp of a file that has just changed is equal to no other.
fn stamp_before_reading(metadata: &Metadata) -> Stamp {
    let (identity, size, mut times) = stamp(metadata);
    if metadata.modified().is_ok_and(|modified| modified + TICK > SystemTime::now()) {
        times[3] = -1;
    }
    (identity, size, times)
}

/// The device and inode of a file or folder.
pub(super) fn identity(metadata: &Metadata) -> FileIdentity {
    (metadata.dev(), metadata.ino())
}

/// What a walk through the folder has found.
#[derive(Debug, Default)]
pub(super) struct Found {
    pub(super) files: BTreeMap<PathBuf, Stamp>,
    /// What cannot be read, with the reason; the root is the empty path.
    pub(super) unreadable: Vec<(PathBuf, String)>,
    /// The folders above the entry that the walk is at, so that a symlink back to one is detected.
    above: Vec<FileIdentity>,
}

impl Found {
    /// Adds a manifest. Reading a pipe or a device could block for ever.
    pub(super) fn add(&mut self, path: PathBuf, metadata: &Metadata) {
        if metadata.is_file() {
            self.files.insert(path, stamp(metadata));
        } else {
            self.unreadable.push((path, "is not a regular file: replace it".to_owned()));
        }
    }

    pub(super) fn is_unreadable(&self, path: &Path) -> bool {
        self.unreadable.iter().any(|(folder, _)| path.starts_with(folder))
    }
}

/// Why a file or folder cannot be read.
pub(super) fn unreadable(error: &io::Error) -> String {
    let remedy = match error.kind() {
        io::ErrorKind::NotFound => "create it",
        io::ErrorKind::PermissionDenied => "correct its permissions",
        _ => "replace it",
    };
    format!("cannot be read ({error}): {remedy}")
}

/// Whether a path has the file extension of a manifest.
pub(super) fn is_manifest(path: &Path) -> bool {
    path.extension().is_some_and(|extension| ["yaml", "yml", "json"].iter().any(|known| extension == *known))
}

/// Whether a file is hidden. Hidden files are ignored. Kubernetes mounts a ConfigMap as visible
/// symlinks into a hidden folder, and such symlinks are followed.
pub(super) fn is_hidden(name: &OsStr) -> bool {
    name.as_encoded_bytes().first() == Some(&b'.')
}

/// Finds the manifests below a folder. Calls `watch` for each folder before its entries are read.
pub(super) fn walk(root: &Path, inside: &Path, found: &mut Found, watch: &mut impl FnMut(&Path)) {
    let is_gone = |error: &io::Error| error.kind() == io::ErrorKind::NotFound;
    let folder = root.join(inside);
    let listed = fs::metadata(&folder).and_then(|metadata| Ok((metadata, fs::read_dir(&folder)?)));
    let (identity, entries) = match listed {
        Ok((metadata, entries)) => (identity(&metadata), entries),
        // A folder may be deleted after its parent was listed. Such a deletion is not an error.
        Err(error) if is_gone(&error) && !found.above.is_empty() => return,
        Err(error) => return found.unreadable.push((inside.to_owned(), unreadable(&error))),
    };
    if found.above.contains(&identity) {
        tracing::debug!(path = %inside.display(), "a symlink leads back to a folder above it: not followed");
        return;
    }
    found.above.push(identity);
    watch(&folder);
    for entry in entries {
        let path = match entry {
            Ok(entry) if is_hidden(&entry.file_name()) => continue,
            Ok(entry) => inside.join(entry.file_name()),
            Err(error) => {
                found.unreadable.push((inside.to_owned(), unreadable(&error)));
                continue;
            }
        };
        match fs::metadata(root.join(&path)) {
            Ok(metadata) if metadata.is_dir() => walk(root, &path, found, watch),
            Ok(metadata) if is_manifest(&path) => found.add(path, &metadata),
            Ok(_) => {}
            Err(error) if is_gone(&error) => {}
            Err(error) => found.unreadable.push((path, unreadable(&error))),
        }
    }
    found.above.pop();
}

/// Reads a file; `None` if it does not exist any more.
pub(super) fn read_file(path: &Path) -> io::Result<Option<(Stamp, Vec<u8>)>> {
    let file = match fs::File::open(path) {
        Ok(file) => file,
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(None);
        }
        Err(error) => return Err(error),
    };
    let stamp = stamp_before_reading(&file.metadata()?);
    let mut content = Vec::new();
    (&file).take(FILE_LIMIT_BYTES + 1).read_to_end(&mut content)?;
    // A file that is truncated is empty some time before its notification is queued. Both happen
    // under the lock of the inode, for which this call waits. What it returns is of no interest.
    let _ = seek(&file, SeekFrom::Hole(0));
    if content.len() as u64 > FILE_LIMIT_BYTES {
        return Err(io::Error::other(format!("it is larger than {FILE_LIMIT_BYTES} bytes")));
    }
    Ok(Some((stamp, content)))
}
