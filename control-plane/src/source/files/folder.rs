//! The folder: which files there are, what each defines, and what changed.
//!
//! An edit must not withdraw a service by accident:
//! - What a file defines anew or differently counts at once.
//! - What a file *no longer* defines goes only when the file has said so for [`SETTLE`] without another change. A file that is emptied,
//!   cut short, deleted or renamed by an editor that is about to write it again takes nothing away; one that is left so does.
//! - While a document of a file cannot be read, nothing that the file defined before goes: nobody knows what that document meant.
//! - Where two files define one object, the first in order of path counts, and both are named in a problem.
//! - A folder that cannot be read at all is kept as it was last seen; an empty one is empty.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, hash_map::DefaultHasher},
    fs::{self, Metadata},
    hash::Hasher as _,
    io::{self, Read as _},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use super::documents::{self, Definition};
use crate::{model::Event, source::objects::ObjectKey, transaction::Problem};

/// How long a file has to stay as it is before what it lost is gone.
pub(super) const SETTLE: Duration = Duration::from_secs(1);

/// Larger files are refused.
const FILE_LIMIT_BYTES: u64 = 256 * 1024 * 1024;

/// What tells that a file was not touched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    device_and_inode: (u64, u64),
    size_bytes: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Stamp {
    fn of(metadata: &Metadata) -> Self {
        Self {
            device_and_inode: (metadata.dev(), metadata.ino()),
            size_bytes: metadata.size(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }
}

/// A file as last read.
#[derive(Debug, Default)]
struct File {
    /// `None` if it could not be read, or is not there.
    stamp: Option<Stamp>,
    /// Of the content; `None` if it is not there.
    content_hash: Option<u64>,
    keys: BTreeSet<ObjectKey>,
    /// Since when it has lost objects that are still in use.
    losing_since: Option<Instant>,
}

/// A definition's place: file, and number in it.
type Place = (PathBuf, usize);

/// What changed.
#[derive(Debug, Default)]
pub(super) struct Update {
    /// Events with their origin.
    pub(super) events: Vec<(Event, String)>,
    /// Problems of places outside of objects, with the reason to count; an empty list clears a place.
    pub(super) places: Vec<(String, &'static str, Vec<Problem>)>,
    touched: BTreeSet<ObjectKey>,
}

/// The state of the folder.
#[derive(Debug)]
pub(super) struct Folder {
    root: PathBuf,
    files: BTreeMap<PathBuf, File>,
    definitions: HashMap<ObjectKey, BTreeMap<Place, Definition>>,
    parsed_files: u64,
    /// Why the last scan could not read the folder itself.
    unreadable: Option<String>,
}

impl Folder {
    pub(super) fn new(root: PathBuf) -> Self {
        Self { root, files: BTreeMap::new(), definitions: HashMap::new(), parsed_files: 0, unreadable: None }
    }

    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// Why the folder itself could not be read when it was last scanned; `None` when it could.
    pub(super) fn unreadable(&self) -> Option<&str> {
        self.unreadable.as_deref()
    }

    /// Files that were parsed so far: the measure of work done.
    #[cfg(test)]
    fn parsed_files(&self) -> u64 {
        self.parsed_files
    }

    /// Whether any file is known below a path inside the folder.
    pub(super) fn knows_below(&self, path: &Path) -> bool {
        self.files.range(path.to_owned()..).next().is_some_and(|(file, _)| file.starts_with(path))
    }

    /// When lost objects have to be looked at again.
    pub(super) fn next_look(&self) -> Option<Instant> {
        self.files.values().filter_map(|file| file.losing_since).min().map(|since| since + SETTLE)
    }

    /// Looks at every file, and reads those whose stamp is not as it was, except those that are being written.
    pub(super) fn scan(&mut self, now: Instant, is_being_written: impl Fn(&Path) -> bool) -> Update {
        let mut update = Update::default();
        let mut found = BTreeMap::new();
        let mut unreadable = Vec::new();
        walk(&self.root, Path::new(""), &mut Vec::new(), &mut found, &mut unreadable);
        let of_root = unreadable.iter().find(|(path, _)| path.as_os_str().is_empty());
        self.unreadable =
            of_root.map(|(_, error)| format!("the folder {} cannot be read: {error}", self.root.display()));
        let told = unreadable.iter().map(|(path, error)| folder_problem(path, error)).collect();
        update.places.push((String::new(), "unreadable_folder", told));
        for (path, stamp) in &found {
            let known = self.files.get(path);
            let is_touched = known.is_none_or(|file| file.stamp != Some(*stamp) || file.losing_since.is_some());
            if is_touched && !is_being_written(path) {
                self.read(path, now, &mut update);
            }
        }
        let gone = self.files.keys().filter(|path| !found.contains_key(*path));
        let gone = gone.filter(|path| !unreadable.iter().any(|(folder, _)| path.starts_with(folder)));
        for path in gone.cloned().collect::<Vec<_>>() {
            self.read(&path, now, &mut update);
        }
        self.settle(update)
    }

    /// Reads some files, by paths inside the folder, whatever their stamps say.
    pub(super) fn look_at(&mut self, paths: impl IntoIterator<Item = PathBuf>, now: Instant) -> Update {
        let mut update = Update::default();
        for path in paths {
            self.read(&path, now, &mut update);
        }
        self.settle(update)
    }

    /// Looks again at files that have lost objects for long enough.
    pub(super) fn look_again(&mut self, now: Instant) -> Update {
        let is_due = |file: &File| file.losing_since.is_some_and(|since| now >= since + SETTLE);
        let due: Vec<PathBuf> =
            self.files.iter().filter(|(_, file)| is_due(file)).map(|(path, _)| path.clone()).collect();
        self.look_at(due, now)
    }

    fn read(&mut self, path: &Path, now: Instant, update: &mut Update) {
        let name = path.display().to_string();
        match read_file(&self.root.join(path)) {
            Ok(Some((stamp, content))) => {
                let hash = content_hash(&content);
                let file = self.files.entry(path.to_owned()).or_default();
                file.stamp = Some(stamp);
                if file.content_hash != Some(hash) || file.losing_since.is_some() {
                    self.take(path, &name, Some(hash), &content, now, update);
                }
            }
            Ok(None) if self.files.contains_key(path) => self.take(path, &name, None, &[], now, update),
            Ok(None) => {}
            Err(error) => {
                let message =
                    format!("it cannot be read ({error}): mend its permissions; what it defined before stays in use");
                let problem = Problem { object: String::new(), field: String::new(), message, origin: name.clone() };
                // Without a stamp the next scan tries again.
                let file = self.files.entry(path.to_owned()).or_default();
                (file.stamp, file.content_hash, file.losing_since) = (None, None, None);
                update.places.push((name, "unreadable_file", vec![problem]));
            }
        }
    }

    /// Takes in a file's content; none if it is not there.
    fn take(&mut self, path: &Path, name: &str, hash: Option<u64>, content: &[u8], now: Instant, update: &mut Update) {
        self.parsed_files += 1;
        let parsed = documents::parse(name, content);
        let mut new: BTreeMap<ObjectKey, (usize, Definition)> = BTreeMap::new();
        let mut problems = parsed.faults;
        let is_whole = problems.is_empty();
        for (index, definition) in parsed.definitions.into_iter().enumerate() {
            let key = definition.event.key();
            if let Some((_, first)) = new.get(&key) {
                problems.push(duplicate(&key, &definition.origin, &first.origin));
            } else {
                new.insert(key, (index, definition));
            }
        }
        update.places.push((name.to_owned(), "malformed_file", problems));
        let file = self.files.entry(path.to_owned()).or_default();
        let is_same = file.content_hash == hash;
        file.content_hash = hash;
        if hash.is_none() {
            file.stamp = None;
        }
        let lost: Vec<ObjectKey> = file.keys.iter().filter(|key| !new.contains_key(*key)).cloned().collect();
        let may_lose = match file.losing_since {
            _ if lost.is_empty() || !is_whole => None,
            Some(since) if is_same => Some((since, now >= since + SETTLE)),
            _ => Some((now, false)),
        };
        file.losing_since = may_lose.filter(|(_, is_over)| !is_over).map(|(since, _)| since);
        let goes = may_lose.is_some_and(|(_, is_over)| is_over);
        file.keys.extend(new.keys().cloned());
        if goes {
            file.keys.retain(|key| new.contains_key(key));
        }
        let is_forgotten = hash.is_none() && file.keys.is_empty();
        if goes {
            for key in lost {
                self.withdraw(&key, path);
                update.touched.insert(key);
            }
        }
        for (key, (index, definition)) in new {
            self.define(path, key, index, definition, update);
        }
        if is_forgotten {
            self.files.remove(path);
        }
    }

    fn define(&mut self, path: &Path, key: ObjectKey, index: usize, definition: Definition, update: &mut Update) {
        let places = self.definitions.entry(key.clone()).or_default();
        let same = places.get(&(path.to_owned(), index)).is_some_and(|old| *old == definition);
        if same {
            return;
        }
        places.retain(|(file, _), _| file != path);
        places.insert((path.to_owned(), index), definition);
        update.touched.insert(key);
    }

    fn withdraw(&mut self, key: &ObjectKey, path: &Path) {
        if let Some(places) = self.definitions.get_mut(key) {
            places.retain(|(file, _), _| file != path);
            if places.is_empty() {
                self.definitions.remove(key);
            }
        }
    }

    /// Makes events of the objects whose definitions changed.
    fn settle(&self, mut update: Update) -> Update {
        for key in std::mem::take(&mut update.touched) {
            let mut places = self.definitions.get(&key).into_iter().flat_map(BTreeMap::values);
            let (event, origin) = match places.next() {
                Some(first) => (first.event.clone(), first.origin.clone()),
                None => (Event::Delete(key.clone()), String::new()),
            };
            let others = places.map(|other| duplicate(&key, &other.origin, &origin)).collect();
            update.places.push((format!("definitions of {key}"), "duplicate_object", others));
            update.events.push((event, origin));
        }
        update
    }
}

fn duplicate(key: &ObjectKey, origin: &str, first: &str) -> Problem {
    let message = format!("{first} defines the same object, and that one is used: remove one of the two");
    Problem { object: key.to_string(), field: String::new(), message, origin: origin.to_owned() }
}

fn folder_problem(path: &Path, error: &io::Error) -> Problem {
    let message = format!("the folder cannot be read ({error}): mend it; what its files defined before stays in use");
    Problem { object: String::new(), field: String::new(), message, origin: format!("./{}", path.display()) }
}

/// Whether a name is one of a manifest.
pub(super) fn is_manifest(path: &Path) -> bool {
    path.extension().is_some_and(|extension| ["yaml", "yml", "json"].iter().any(|known| extension == *known))
}

/// Hidden files are left alone. Kubernetes mounts a ConfigMap as visible symlinks into a hidden folder: those are followed.
pub(super) fn is_hidden(name: &std::ffi::OsStr) -> bool {
    name.as_encoded_bytes().first() == Some(&b'.')
}

/// Finds manifests below a folder. `above` are the folders that lead there, to notice a symlink that leads back.
fn walk(
    root: &Path,
    inside: &Path,
    above: &mut Vec<(u64, u64)>,
    found: &mut BTreeMap<PathBuf, Stamp>,
    unreadable: &mut Vec<(PathBuf, io::Error)>,
) {
    let is_gone = |error: &io::Error| error.kind() == io::ErrorKind::NotFound;
    let listed = fs::metadata(root.join(inside)).and_then(|metadata| Ok((metadata, fs::read_dir(root.join(inside))?)));
    let (identity, entries) = match listed {
        Ok((metadata, entries)) => ((metadata.dev(), metadata.ino()), entries),
        // A folder in the folder that is gone since it was listed is simply gone.
        Err(error) if is_gone(&error) && !above.is_empty() => return,
        Err(error) => return unreadable.push((inside.to_owned(), error)),
    };
    if above.contains(&identity) {
        tracing::debug!(path = %inside.display(), "a symlink leads back to a folder above it: not followed");
        return;
    }
    above.push(identity);
    for entry in entries {
        let name = match entry {
            Ok(entry) => entry.file_name(),
            Err(error) => {
                unreadable.push((inside.to_owned(), error));
                continue;
            }
        };
        let path = inside.join(&name);
        if is_hidden(&name) {
            continue;
        }
        match fs::metadata(root.join(&path)) {
            Ok(metadata) if metadata.is_dir() => walk(root, &path, above, found, unreadable),
            Ok(metadata) if is_manifest(&path) => {
                found.insert(path, Stamp::of(&metadata));
            }
            Ok(_) => {}
            Err(error) if is_gone(&error) => {}
            Err(error) => unreadable.push((path, error)),
        }
    }
    above.pop();
}

/// The content, `None` if there is no such file.
fn read_file(path: &Path) -> io::Result<Option<(Stamp, Vec<u8>)>> {
    let is_absent = |error: &io::Error| matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory);
    // A pipe or a device must not be opened: that could wait for ever.
    match fs::metadata(path) {
        Ok(metadata) if metadata.is_file() => {}
        Ok(metadata) if metadata.is_dir() => return Ok(None),
        Ok(_) => return Err(io::Error::other("it is not a regular file")),
        Err(error) if is_absent(&error) => return Ok(None),
        Err(error) => return Err(error),
    }
    let file = match fs::File::open(path) {
        Ok(file) => file,
        Err(error) if is_absent(&error) => return Ok(None),
        Err(error) => return Err(error),
    };
    let stamp = Stamp::of(&file.metadata()?);
    let mut content = Vec::new();
    file.take(FILE_LIMIT_BYTES + 1).read_to_end(&mut content)?;
    if content.len() as u64 > FILE_LIMIT_BYTES {
        return Err(io::Error::other(format!("it is larger than {FILE_LIMIT_BYTES} bytes")));
    }
    Ok(Some((stamp, content)))
}

fn content_hash(content: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(content);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn node(name: &str) -> String {
        format!("apiVersion: v1\nkind: Node\nmetadata: {{name: {name}}}\n---\n")
    }

    fn told(update: &Update) -> Vec<String> {
        let text = |event: &Event| {
            let sign = if matches!(event, Event::Delete(_)) { "-" } else { "+" };
            format!("{sign}{}", event.key().name)
        };
        update.events.iter().map(|(event, _)| text(event)).collect()
    }

    fn put(folder: &Folder, name: &str, text: &str) {
        fs::write(folder.root().join(name), text).unwrap();
    }

    #[test]
    fn only_what_changed_is_parsed_and_told() {
        let (root, now) = (tempfile::tempdir().unwrap(), Instant::now());
        let mut folder = Folder::new(root.path().to_owned());
        for number in 0..100 {
            put(&folder, &format!("{number}.yaml"), &(node(&format!("a{number}")) + &node(&format!("b{number}"))));
        }
        assert_eq!(folder.scan(now, |_| false).events.len(), 200);
        assert_eq!(folder.scan(now, |_| false).events.len(), 0);
        assert_eq!(folder.parsed_files(), 100);
        put(&folder, "7.yaml", &(node("a7") + &node("c7") + &node("b7")));
        assert_eq!(told(&folder.scan(now, |_| false)), ["+b7", "+c7"], "b7 has another origin now");
        assert_eq!(folder.parsed_files(), 101);
        assert_eq!(told(&folder.look_at(["7.yaml".into()], now)), [""; 0], "same content");
        assert_eq!(folder.parsed_files(), 101);
    }

    #[test]
    fn what_a_file_lost_goes_when_it_has_settled() {
        let (root, start) = (tempfile::tempdir().unwrap(), Instant::now());
        let mut folder = Folder::new(root.path().to_owned());
        put(&folder, "a.yaml", &(node("a") + &node("b")));
        folder.scan(start, |_| false);
        put(&folder, "a.yaml", &node("a"));
        assert_eq!(told(&folder.scan(start, |_| false)), [""; 0]);
        assert_eq!(folder.next_look(), Some(start + SETTLE));
        // Another edit starts the time anew; a broken one stops it.
        let later = start + SETTLE / 2;
        put(&folder, "a.yaml", "");
        assert_eq!(told(&folder.scan(later, |_| false)), [""; 0]);
        assert_eq!(folder.next_look(), Some(later + SETTLE));
        put(&folder, "a.yaml", "kind: [");
        assert_eq!(told(&folder.scan(later, |_| false)), [""; 0]);
        assert_eq!(folder.next_look(), None);
        fs::remove_file(root.path().join("a.yaml")).unwrap();
        assert_eq!(told(&folder.look_at(["a.yaml".into()], later)), [""; 0]);
        assert_eq!(told(&folder.look_again(later + SETTLE / 2)), [""; 0]);
        assert_eq!(told(&folder.look_again(later + SETTLE)), ["-a", "-b"]);
        assert_eq!(folder.next_look(), None);
        assert!(folder.files.is_empty() && folder.definitions.is_empty());
    }

    #[test]
    fn a_loop_of_symlinks_ends() {
        let (root, now) = (tempfile::tempdir().unwrap(), Instant::now());
        std::os::unix::fs::symlink(".", root.path().join("again")).unwrap();
        let mut folder = Folder::new(root.path().to_owned());
        put(&folder, "a.yaml", &node("a"));
        let update = folder.scan(now, |_| false);
        assert_eq!(told(&update), ["+a"]);
        assert!(update.places.iter().all(|(.., problems)| problems.is_empty()), "{update:?}");
    }
}
