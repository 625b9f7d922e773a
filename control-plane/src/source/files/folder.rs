//! The folder: its files, the objects that each file defines, and what has changed.
//!
//! An edit must not remove a service by accident:
//! - A new or changed definition is used at once.
//! - An object that a file no longer defines is removed only when the file has not changed for
//!   [`SETTLE`]. So nothing is removed while an editor empties, truncates, deletes or renames a
//!   file and then writes it again.
//! - While a document of a file cannot be read, all objects that the file defined before are kept,
//!   because the unreadable document may define these objects.
//! - If two files define the same object, the definition in the first file in order of path is
//!   used, and a problem names both files.
//! - If the folder itself cannot be read, its last known content stays in use. An empty folder
//!   defines nothing.
//!
//! This module stores only the location and a hash of each definition. The model stores the
//! content. When an object loses the definition in use and another file also defines the object,
//! that other file is read again.

use std::{
    collections::{
        BTreeMap, BTreeSet, HashMap,
        hash_map::{DefaultHasher, RandomState},
    },
    fs::{self, Metadata},
    hash::{BuildHasher as _, Hasher as _},
    io::{self, Read as _},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use super::documents::{self, Definition};
use crate::{model::Event, objects::ObjectKey, transaction::Problem};

/// How long a file has to stay unchanged before the objects that it no longer defines are removed.
pub(super) const SETTLE: Duration = Duration::from_secs(1);

/// Maximum size of a file. Larger files are refused.
const FILE_LIMIT_BYTES: u64 = 256 * 1024 * 1024;

/// Metadata of a file. An equal stamp means that the file has not changed.
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

/// The result of the last read of a file.
#[derive(Debug, Default)]
struct File {
    /// `None` if the file does not exist or must be read again, for example after a failed read.
    stamp: Option<Stamp>,
    /// Hash of the content. `None` if `stamp` is `None`.
    content_hash: Option<u64>,
    /// Objects that the file defines, and lost objects: objects that the file no longer defines but
    /// that are still in use.
    keys: BTreeSet<Arc<ObjectKey>>,
    /// When the wait of [`SETTLE`] for the lost objects began. `None` if there are no lost objects,
    /// or if the file or one of its documents cannot be read.
    losing_since: Option<Instant>,
}

/// Where an object is defined, and a hash of the definition.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Location {
    file: Arc<Path>,
    /// Number of the definition in the file.
    index: usize,
    document: usize,
    hash: u64,
}

impl Location {
    fn origin(&self) -> String {
        documents::origin(&self.file.display().to_string(), self.document)
    }
}

/// What has changed in the folder.
#[derive(Debug, Default)]
pub(super) struct Update {
    /// Each event with its origin, such as `web.yaml, document 2`.
    pub(super) events: Vec<(Event, String)>,
    /// Problems of files and folders: the location, the value of the metric's label `reason`, and
    /// the problems. An empty list clears the problems of a location.
    pub(super) problems: Vec<(String, &'static str, Vec<Problem>)>,
    /// Objects with a changed definition, and the location that was in use before.
    touched: BTreeMap<Arc<ObjectKey>, Option<Location>>,
    /// The definitions that were read, by object and file.
    read: HashMap<(Arc<ObjectKey>, Arc<Path>), Event>,
}

/// The state of the folder.
#[derive(Debug)]
pub(super) struct Folder {
    root: PathBuf,
    files: BTreeMap<PathBuf, File>,
    /// The definitions of each object in order of path. The first definition is in use.
    definitions: HashMap<Arc<ObjectKey>, Vec<Location>>,
    hasher: RandomState,
    parsed_files: u64,
    /// Why the last scan could not read the folder itself.
    unreadable: Option<String>,
}

impl Folder {
    pub(super) fn new(root: PathBuf) -> Self {
        Self {
            root,
            files: BTreeMap::new(),
            definitions: HashMap::new(),
            hasher: RandomState::new(),
            parsed_files: 0,
            unreadable: None,
        }
    }

    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// Why the last scan could not read the folder itself; `None` if the scan could read the
    /// folder.
    pub(super) fn unreadable(&self) -> Option<&str> {
        self.unreadable.as_deref()
    }

    /// Number of files that were parsed so far, as a measure of the work.
    #[cfg(test)]
    fn parsed_files(&self) -> u64 {
        self.parsed_files
    }

    /// Whether a known file is below this path inside the folder.
    pub(super) fn knows_below(&self, path: &Path) -> bool {
        self.files.range(path.to_owned()..).next().is_some_and(|(file, _)| file.starts_with(path))
    }

    /// When the next file with lost objects has to be read again.
    pub(super) fn next_look(&self) -> Option<Instant> {
        self.files.values().filter_map(|file| file.losing_since).min().map(|since| since + SETTLE)
    }

    /// Compares the stamps of all files, and reads the files that have changed, except files that
    /// are being written. Passes the changes of each file to `hand_on` before reading the next
    /// file. So the memory never holds the content of a whole large folder.
    pub(super) fn scan(
        &mut self,
        now: Instant,
        is_being_written: impl Fn(&Path) -> bool,
        mut hand_on: impl FnMut(Update),
    ) {
        let mut update = Update::default();
        let mut found = BTreeMap::new();
        let mut unreadable = Vec::new();
        walk(&self.root, Path::new(""), &mut Vec::new(), &mut found, &mut unreadable);
        let of_root = unreadable.iter().find(|(path, _)| path.as_os_str().is_empty());
        self.unreadable =
            of_root.map(|(_, error)| format!("the folder {} cannot be read: {error}", self.root.display()));
        let problems = unreadable.iter().map(|(path, error)| folder_problem(path, error)).collect();
        update.problems.push((String::new(), "unreadable_folder", problems));
        for (path, stamp) in &found {
            let known = self.files.get(path);
            let is_touched = known.is_none_or(|file| file.stamp != Some(*stamp) || file.losing_since.is_some());
            if is_touched && !is_being_written(path) {
                self.read(path, now, &mut update);
                hand_on(self.resolve(std::mem::take(&mut update)));
            }
        }
        let gone = self.files.keys().filter(|path| !found.contains_key(*path));
        let gone = gone.filter(|path| !unreadable.iter().any(|(folder, _)| path.starts_with(folder)));
        for path in gone.cloned().collect::<Vec<_>>() {
            self.read(&path, now, &mut update);
        }
        hand_on(self.resolve(update));
    }

    /// Reads these files, even if their stamps have not changed. Paths are inside the folder.
    pub(super) fn look_at(&mut self, paths: impl IntoIterator<Item = PathBuf>, now: Instant) -> Update {
        let mut update = Update::default();
        for path in paths {
            self.read(&path, now, &mut update);
        }
        self.resolve(update)
    }

    /// Reads again each file whose lost objects have waited for [`SETTLE`] or longer.
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
                let message = format!(
                    "the file cannot be read ({error}): correct its permissions; the objects that it defined before stay in use"
                );
                let problem = Problem { object: String::new(), field: String::new(), message, origin: name.clone() };
                // Without a stamp, the next scan reads the file again.
                let file = self.files.entry(path.to_owned()).or_default();
                (file.stamp, file.content_hash, file.losing_since) = (None, None, None);
                update.problems.push((name, "unreadable_file", vec![problem]));
            }
        }
    }

    /// Compares the content of a file with its known definitions. `hash` is `None` if the file does
    /// not exist.
    fn take(&mut self, path: &Path, name: &str, hash: Option<u64>, content: &[u8], now: Instant, update: &mut Update) {
        self.parsed_files += 1;
        let parsed = documents::parse(name, content);
        let mut new: BTreeMap<Arc<ObjectKey>, (usize, Definition)> = BTreeMap::new();
        let mut problems = parsed.faults;
        let is_whole = problems.is_empty();
        for (index, definition) in parsed.definitions.into_iter().enumerate() {
            let key = self.shared_key(definition.event.key());
            if let Some((_, first)) = new.get(&key) {
                let origin = |definition: &Definition| documents::origin(name, definition.document);
                problems.push(duplicate(&key, &origin(&definition), &origin(first)));
            } else {
                new.insert(key, (index, definition));
            }
        }
        update.problems.push((name.to_owned(), "malformed_file", problems));
        let file = self.files.entry(path.to_owned()).or_default();
        let is_same = file.content_hash == hash;
        file.content_hash = hash;
        if hash.is_none() {
            file.stamp = None;
        }
        let lost: Vec<Arc<ObjectKey>> = file.keys.iter().filter(|key| !new.contains_key(*key)).cloned().collect();
        let may_lose = match file.losing_since {
            _ if lost.is_empty() || !is_whole => None,
            Some(since) if is_same => Some((since, now >= since + SETTLE)),
            _ => Some((now, false)),
        };
        file.losing_since = may_lose.filter(|(_, is_over)| !is_over).map(|(since, _)| since);
        let is_settled = may_lose.is_some_and(|(_, is_over)| is_over);
        file.keys.extend(new.keys().cloned());
        if is_settled {
            file.keys.retain(|key| new.contains_key(key));
        }
        let is_forgotten = hash.is_none() && file.keys.is_empty();
        if is_settled {
            for key in lost {
                self.withdraw(&key, path, update);
            }
        }
        let path: Arc<Path> = path.into();
        for (key, (index, Definition { event, document })) in new {
            let location = Location { hash: self.hasher.hash_one(&event), file: Arc::clone(&path), index, document };
            self.define(key, location, event, update);
        }
        if is_forgotten {
            self.files.remove(&*path);
        }
    }

    fn shared_key(&self, key: ObjectKey) -> Arc<ObjectKey> {
        self.definitions.get_key_value(&key).map_or_else(|| Arc::new(key), |(shared, _)| Arc::clone(shared))
    }

    fn define(&mut self, key: Arc<ObjectKey>, location: Location, event: Event, update: &mut Update) {
        let locations = self.definitions.entry(Arc::clone(&key)).or_default();
        let known = locations.iter().position(|other| other.file == location.file);
        if known.is_some_and(|known| locations[known] == location) {
            return;
        }
        update.touched.entry(Arc::clone(&key)).or_insert_with(|| locations.first().cloned());
        update.read.insert((key, Arc::clone(&location.file)), event);
        match known {
            Some(known) => locations[known] = location,
            None => {
                locations.push(location);
                locations.sort_unstable_by(|a, b| a.file.cmp(&b.file));
                locations.shrink_to_fit();
            }
        }
    }

    fn withdraw(&mut self, key: &Arc<ObjectKey>, path: &Path, update: &mut Update) {
        let Some(locations) = self.definitions.get_mut(key) else { return };
        update.touched.entry(Arc::clone(key)).or_insert_with(|| locations.first().cloned());
        locations.retain(|location| *location.file != *path);
        if locations.is_empty() {
            self.definitions.remove(key);
        }
    }

    /// Creates events for the objects whose definition in use has changed.
    fn resolve(&mut self, mut update: Update) -> Update {
        let mut unread: BTreeMap<Arc<Path>, Vec<Arc<ObjectKey>>> = BTreeMap::new();
        for (key, before) in std::mem::take(&mut update.touched) {
            let locations = self.definitions.get(&key).map(Vec::as_slice).unwrap_or_default();
            let first = locations.first();
            let origin = first.map(Location::origin).unwrap_or_default();
            let others = locations.iter().skip(1).map(|other| duplicate(&key, &other.origin(), &origin)).collect();
            update.problems.push((format!("definitions of {key}"), "duplicate_object", others));
            match first {
                None => update.events.push((Event::Delete((*key).clone()), origin)),
                Some(first) if before.as_ref() == Some(first) => {}
                Some(first) => match update.read.remove(&(Arc::clone(&key), Arc::clone(&first.file))) {
                    Some(event) => update.events.push((event, origin)),
                    None => unread.entry(Arc::clone(&first.file)).or_default().push(key),
                },
            }
        }
        for (file, keys) in unread {
            self.read_again(&file, keys, &mut update);
        }
        update.read = HashMap::new();
        update
    }

    /// Reads the definitions of `keys` in `file`. These definitions come into use because the
    /// definitions that were in use before are gone. If a definition in `file` has changed since
    /// the last read of `file`, the object keeps its old value until the next scan reads `file`.
    fn read_again(&mut self, file: &Arc<Path>, keys: Vec<Arc<ObjectKey>>, update: &mut Update) {
        let content = read_file(&self.root.join(file)).ok().flatten().map(|(_, content)| content).unwrap_or_default();
        let definitions = documents::parse(&file.display().to_string(), &content).definitions;
        let mut found: HashMap<ObjectKey, Event> = HashMap::new();
        for Definition { event, .. } in definitions {
            found.entry(event.key()).or_insert(event);
        }
        for key in keys {
            let Some(location) = self.definitions.get_mut(&key).and_then(|locations| locations.first_mut()) else {
                continue;
            };
            match found.remove(&*key).filter(|event| self.hasher.hash_one(event) == location.hash) {
                Some(event) => update.events.push((event, location.origin())),
                None => {
                    // A wrong hash makes the next read find a change.
                    location.hash = !location.hash;
                    let file = self.files.entry(file.to_path_buf()).or_default();
                    (file.stamp, file.content_hash) = (None, None);
                }
            }
        }
    }
}

fn duplicate(key: &ObjectKey, origin: &str, first: &str) -> Problem {
    let message =
        format!("{first} defines the same object, and that definition is used: remove one of the two definitions");
    Problem { object: key.to_string(), field: String::new(), message, origin: origin.to_owned() }
}

fn folder_problem(path: &Path, error: &io::Error) -> Problem {
    let message = format!(
        "the folder cannot be read ({error}): correct its permissions; the objects that its files defined before stay in use"
    );
    Problem { object: String::new(), field: String::new(), message, origin: format!("./{}", path.display()) }
}

/// Whether a path has the file extension of a manifest.
pub(super) fn is_manifest(path: &Path) -> bool {
    path.extension().is_some_and(|extension| ["yaml", "yml", "json"].iter().any(|known| extension == *known))
}

/// Whether a file is hidden. Hidden files are ignored. Kubernetes mounts a ConfigMap as visible
/// symlinks into a hidden folder, and such symlinks are followed.
pub(super) fn is_hidden(name: &std::ffi::OsStr) -> bool {
    name.as_encoded_bytes().first() == Some(&b'.')
}

/// Finds the manifests below a folder. `above` lists the folders above this folder, so that a
/// symlink back to one of these folders is detected.
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
        // A folder may be deleted after its parent was listed. Such a deletion is not an error.
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

/// Reads a file; `None` if the path does not exist or is a folder.
fn read_file(path: &Path) -> io::Result<Option<(Stamp, Vec<u8>)>> {
    let is_absent = |error: &io::Error| matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory);
    // Opening a pipe or a device could block for ever.
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

    fn changed_names(update: &Update) -> Vec<String> {
        let text = |event: &Event| {
            let sign = if matches!(event, Event::Delete(_)) { "-" } else { "+" };
            format!("{sign}{}", event.key().name)
        };
        update.events.iter().map(|(event, _)| text(event)).collect()
    }

    fn scan(folder: &mut Folder, now: Instant) -> Update {
        let mut all = Update::default();
        folder.scan(
            now,
            |_| false,
            |update| {
                all.events.extend(update.events);
                all.problems.extend(update.problems);
            },
        );
        all
    }

    fn put(folder: &Folder, name: &str, text: &str) {
        fs::write(folder.root().join(name), text).unwrap();
    }

    #[test]
    fn only_changed_files_are_parsed_and_reported() {
        let (root, now) = (tempfile::tempdir().unwrap(), Instant::now());
        let mut folder = Folder::new(root.path().to_owned());
        for number in 0..100 {
            put(&folder, &format!("{number}.yaml"), &(node(&format!("a{number}")) + &node(&format!("b{number}"))));
        }
        assert_eq!(scan(&mut folder, now).events.len(), 200);
        assert_eq!(scan(&mut folder, now).events.len(), 0);
        assert_eq!(folder.parsed_files(), 100);
        put(&folder, "7.yaml", &(node("a7") + &node("c7") + &node("b7")));
        assert_eq!(changed_names(&scan(&mut folder, now)), ["+b7", "+c7"], "b7 is now in another document");
        assert_eq!(folder.parsed_files(), 101);
        assert_eq!(changed_names(&folder.look_at(["7.yaml".into()], now)), [""; 0], "the content has not changed");
        assert_eq!(folder.parsed_files(), 101);
    }

    #[test]
    fn objects_that_a_file_no_longer_defines_are_removed_after_a_while() {
        let (root, start) = (tempfile::tempdir().unwrap(), Instant::now());
        let mut folder = Folder::new(root.path().to_owned());
        put(&folder, "a.yaml", &(node("a") + &node("b")));
        scan(&mut folder, start);
        put(&folder, "a.yaml", &node("a"));
        assert_eq!(changed_names(&scan(&mut folder, start)), [""; 0]);
        assert_eq!(folder.next_look(), Some(start + SETTLE));
        // Another edit restarts the time. After an edit with a document that cannot be read, no
        // object is removed.
        let later = start + SETTLE / 2;
        put(&folder, "a.yaml", "");
        assert_eq!(changed_names(&scan(&mut folder, later)), [""; 0]);
        assert_eq!(folder.next_look(), Some(later + SETTLE));
        put(&folder, "a.yaml", "kind: [");
        assert_eq!(changed_names(&scan(&mut folder, later)), [""; 0]);
        assert_eq!(folder.next_look(), None);
        fs::remove_file(root.path().join("a.yaml")).unwrap();
        assert_eq!(changed_names(&folder.look_at(["a.yaml".into()], later)), [""; 0]);
        assert_eq!(changed_names(&folder.look_again(later + SETTLE / 2)), [""; 0]);
        assert_eq!(changed_names(&folder.look_again(later + SETTLE)), ["-a", "-b"]);
        assert_eq!(folder.next_look(), None);
        assert!(folder.files.is_empty() && folder.definitions.is_empty());
    }

    #[test]
    fn the_definition_of_another_file_is_used_after_the_first_is_removed() {
        let (root, start) = (tempfile::tempdir().unwrap(), Instant::now());
        let mut folder = Folder::new(root.path().to_owned());
        let cidr = |prefix: &str| {
            format!(
                "apiVersion: v1\nkind: Node\nmetadata: {{name: a}}\nspec: {{podCIDR: {prefix}}}\n---\n{}",
                node("b")
            )
        };
        let ranges_of_a = |update: &Update| -> Vec<(String, String)> {
            let text = |(event, origin): &(Event, String)| match event {
                Event::Apply(object) => match &**object {
                    crate::objects::Object::Node(node) => (node.spec.pod_cidr.clone(), origin.clone()),
                    other => panic!("{other:?}"),
                },
                other => (format!("{other:?}"), origin.clone()),
            };
            update.events.iter().filter(|(event, _)| &*event.key().name == "a").map(text).collect()
        };
        put(&folder, "1.yaml", &cidr("10.1.0.0/16"));
        put(&folder, "2.yaml", &(node("c") + &cidr("10.2.0.0/16")));
        assert_eq!(ranges_of_a(&scan(&mut folder, start)), [("10.1.0.0/16".into(), "1.yaml, document 1".into())]);
        let mut now = start;
        let mut take_from = |folder: &mut Folder, file: &str| {
            fs::remove_file(folder.root().join(file)).unwrap();
            assert_eq!(ranges_of_a(&folder.look_at([file.into()], now)), []);
            now += SETTLE;
            ranges_of_a(&folder.look_again(now))
        };
        assert_eq!(take_from(&mut folder, "1.yaml"), [("10.2.0.0/16".into(), "2.yaml, document 2".into())]);
        put(&folder, "1.yaml", &cidr("10.3.0.0/16"));
        assert_eq!(ranges_of_a(&scan(&mut folder, start)), [("10.3.0.0/16".into(), "1.yaml, document 1".into())]);
        // `2.yaml` has changed too, and has not been read yet. The definition in use stays until
        // `2.yaml` is read.
        put(&folder, "2.yaml", &(node("c") + &cidr("10.4.0.0/16")));
        assert_eq!(take_from(&mut folder, "1.yaml"), []);
        assert_eq!(ranges_of_a(&scan(&mut folder, start)), [("10.4.0.0/16".into(), "2.yaml, document 2".into())]);
    }

    #[test]
    fn a_loop_of_symlinks_is_not_followed() {
        let (root, now) = (tempfile::tempdir().unwrap(), Instant::now());
        std::os::unix::fs::symlink(".", root.path().join("again")).unwrap();
        let mut folder = Folder::new(root.path().to_owned());
        put(&folder, "a.yaml", &node("a"));
        let update = scan(&mut folder, now);
        assert_eq!(changed_names(&update), ["+a"]);
        assert!(update.problems.iter().all(|(.., problems)| problems.is_empty()), "{update:?}");
    }
}
