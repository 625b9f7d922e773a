//! The folder: its files, the objects that each file defines, and what has changed.
//!
//! What is served is a function of the content of the folder, and an edit must not remove a Service
//! by accident:
//! - A new or changed definition is used at once. A changed file is read as a whole.
//! - An object that no file defines any more is removed once its file has not defined it for
//!   [`SETTLE`], however often the file changes meanwhile. So nothing is removed while an editor
//!   empties, truncates, deletes or renames a file and then writes it again.
//! - While a document cannot be read, the objects stay in use that the file defined before and
//!   whose names are words of this document. The document may define them. While a file or a folder
//!   cannot be read, all objects that it defined before stay in use.
//! - If two files define the same object, the definition in the first file in order of path is
//!   used, and a problem names both files.
//! - A file that a program writes is left out until it is closed (`notices.rs`). If that lasts, it
//!   is a problem.
//! - An empty folder defines nothing only if it had manifests before. Otherwise it may be a mount
//!   or a clone that is not there yet. A folder that is meant to be empty contains an empty List.
//!
//! A replica that starts cannot know what stayed in use elsewhere. [`ManifestFolder::doubt`] says
//! so.
//!
//! This module stores only the location and a hash of each definition. The model stores the
//! content. A definition that has not changed has no effect. When an object loses the definition in
//! use and another file also defines the object, that other file is read again.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet, hash_map::RandomState},
    fs,
    hash::BuildHasher as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    disk::{self, FileIdentity, Found, Stamp},
    documents::{self, Definition, Parsed},
    notices::{LONGEST_WRITING, Notices},
};
use crate::{
    model::{Event, Problem},
    objects::ObjectKey,
};

/// How long a file has to define an object no more before the object is removed.
pub(super) const SETTLE: Duration = Duration::from_secs(1);

/// The result of the last read of a file.
#[derive(Debug, Default)]
struct File {
    /// The stamp; `None` if the file does not exist or must be read.
    read: Option<Stamp>,
    /// Objects that the file defines, and objects that it defined before and still holds in use.
    keys: BTreeSet<Arc<ObjectKey>>,
    /// Since when the file does not define objects any more that it holds until [`SETTLE`].
    missing: Missing,
    has_manifest: bool,
    /// The first problem of what cannot be read in the file.
    fault: Option<Problem>,
}

type Missing = BTreeMap<Arc<ObjectKey>, Instant>;

/// The objects that a file does not define any more and does not hide, after a read at `now`.
fn missing<'a>(before: &Missing, lost: impl Iterator<Item = &'a Arc<ObjectKey>>, now: Instant) -> Missing {
    lost.map(|key| (Arc::clone(key), before.get(key).copied().unwrap_or(now))).collect()
}

/// Whether a file must be read: its stamp differs from the last read, or it has disappeared and
/// this was not noted yet.
fn is_changed(found: &Found, path: &Path, known: Option<&File>) -> bool {
    match found.files.get(path) {
        Some(stamp) => known.and_then(|file| file.read).is_none_or(|read| read != *stamp),
        // A file that became wanted while it was unreadable has no stamp, and still holds objects.
        None => known
            .is_some_and(|file| file.read.is_some() || file.fault.is_some() || file.keys.len() > file.missing.len()),
    }
}

/// Where an object is defined, and a hash of the definition and its place.
#[derive(Debug)]
struct Location {
    file: Arc<Path>,
    document: usize,
    hash: u64,
}

impl Location {
    fn origin(&self) -> String {
        documents::origin(&self.file.display().to_string(), self.document)
    }
}

/// An object in the folder.
#[derive(Debug, Default)]
struct KnownObject {
    /// In order of path. The first is to be used; without one, that in use stays.
    locations: Vec<Location>,
    /// The hash of the definition in use.
    used: Option<u64>,
}

impl KnownObject {
    /// The problems of all definitions except the first one.
    fn duplicates(&self, key: &ObjectKey) -> Vec<Problem> {
        let mut origins = self.locations.iter().map(Location::origin);
        let first = origins.next().unwrap_or_default();
        origins.map(|other| duplicate(key, &other, &first)).collect()
    }
}

/// What has changed in the folder.
#[derive(Debug, Default)]
pub(super) struct Update {
    /// Each event with its origin, such as `web.yaml, document 2`.
    pub(super) events: Vec<(Event, String)>,
    /// Problems by location, with the metric's label `reason`. An empty list clears them.
    pub(super) problems: Vec<(String, &'static str, Vec<Problem>)>,
    /// Files whose definitions have come into use.
    wanted: BTreeSet<PathBuf>,
}

#[derive(Debug)]
pub(super) struct ManifestFolder {
    pub(super) root: PathBuf,
    /// The folder of the files: the root, or the folder of a root that is a file.
    base: PathBuf,
    files: BTreeMap<PathBuf, File>,
    objects: HashMap<Arc<ObjectKey>, KnownObject>,
    /// When the next object has been missing for long enough to be removed.
    pub(super) next_look: Option<Instant>,
    hasher: RandomState,
    /// The last root with a manifest.
    filled: Option<FileIdentity>,
    /// What the last walk could not read, with the reason.
    unreadable: Vec<(PathBuf, String)>,
}

impl ManifestFolder {
    pub(super) fn new(root: PathBuf) -> Self {
        Self {
            base: root.clone(),
            root,
            files: BTreeMap::new(),
            objects: HashMap::new(),
            next_look: None,
            hasher: RandomState::new(),
            filled: None,
            unreadable: Vec::new(),
        }
    }

    /// Why the last scan could not use the folder itself; `None` if it could.
    pub(super) fn unreadable(&self) -> Option<String> {
        let of_root = self.unreadable.iter().find(|(path, _)| path.as_os_str().is_empty());
        of_root.map(|(_, reason)| format!("the folder {} {reason}", self.root.display()))
    }

    /// Why it is not known which objects the folder defines; `None` if it is known. A replica that
    /// starts does not know what stayed in use elsewhere.
    pub(super) fn doubt(&self) -> Option<String> {
        let part = || self.unreadable.first().map(|(path, reason)| format!("{} {reason}", path.display()));
        let fault = || self.files.values().find_map(|file| file.fault.as_ref());
        let is_empty = || self.files.values().all(|file| !file.has_manifest);
        self.unreadable()
            .or_else(part)
            .or_else(|| fault().map(|Problem { origin, field, message, .. }| format!("{origin}: {field} {message}")))
            .or_else(|| is_empty().then(|| format!("the folder {} {EMPTY}", self.root.display())))
    }

    /// Compares the stamps of all files, reads the files that have changed, except files that are
    /// being written, and removes what has been missing for [`SETTLE`]. Passes the changes of each
    /// file to `hand_on` before reading the next file. So the memory never holds the content of a
    /// whole large folder.
    pub(super) fn scan(&mut self, now: Instant, notices: &mut Notices, mut hand_on: impl FnMut(Update)) {
        let consequence = if self.objects.is_empty() { "" } else { "; what it defined before stays in use" };
        notices.begin_scan(now);
        let mut found = self.walk(notices);
        notices.unread.retain(|path, _| path.strip_prefix(&self.base).is_ok_and(|path| found.files.contains_key(path)));
        let unread = notices.unread.keys().filter_map(|path| path.strip_prefix(&self.base).ok().map(Path::to_owned));
        let all = self.files.keys().chain(found.files.keys());
        let changed = all.filter(|path| is_changed(&found, path, self.files.get(*path))).cloned();
        let mut due: BTreeSet<PathBuf> = changed.chain(unread).filter(|path| !found.is_unreadable(path)).collect();
        let mut left_out: BTreeMap<PathBuf, Instant> = BTreeMap::new();
        while let Some(path) = due.pop_first() {
            match self.read(&path, &found, now, notices) {
                Ok(mut update) => {
                    let wanted = std::mem::take(&mut update.wanted).into_iter();
                    due.extend(wanted.filter(|path| !found.is_unreadable(path)));
                    hand_on(update);
                }
                Err(since) => left_out.extend([(path, since)]),
            }
        }
        found.unreadable.extend(left_out.keys().map(|path| (path.clone(), WRITTEN.to_owned())));
        let has_just_changed = |path: &Path| left_out.get(path).is_some_and(|since| now < *since + LONGEST_WRITING);
        let shown = found.unreadable.iter().filter(|(path, _)| !has_just_changed(path));
        let problem = |(path, reason): &(PathBuf, String)| Problem {
            // Without the separator that ends the path of a root.
            object: self.base.join(path).components().collect::<PathBuf>().display().to_string(),
            message: format!("{reason}{consequence}"),
            ..Problem::default()
        };
        let problems = vec![(String::new(), "unreadable_folder", shown.map(problem).collect())];
        hand_on(Update { problems, ..Update::default() });
        hand_on(self.remove_missing(now, |path| !found.is_unreadable(path)));
        self.files.retain(|_, file| !file.keys.is_empty() || file.read.is_some() || file.fault.is_some());
        self.unreadable = found.unreadable;
    }

    /// Finds all manifests. A root that is a file is the only manifest.
    fn walk(&mut self, notices: &mut Notices) -> Found {
        let mut found = Found::default();
        self.base.clone_from(&self.root);
        match fs::metadata(&self.root) {
            Ok(root) if root.is_dir() => {
                disk::walk(&self.root, Path::new(""), &mut found, &mut |folder: &Path| notices.watch(folder));
                if !found.files.is_empty() {
                    self.filled = Some(disk::identity(&root));
                } else if found.unreadable.is_empty() && self.filled != Some(disk::identity(&root)) {
                    found.unreadable.push((PathBuf::new(), EMPTY.to_owned()));
                }
            }
            Ok(file) => {
                self.base.pop();
                found.add(self.root.file_name().map(PathBuf::from).unwrap_or_default(), &file);
            }
            Err(error) => found.unreadable.push((PathBuf::new(), disk::unreadable(&error))),
        }
        found
    }

    /// Reads a file, and compares its content with its known definitions. A file that was not found
    /// is empty: another file may have its path now that does not belong to the root. The error
    /// says since when the file has changes that cannot be read, because a program writes it.
    fn read(&mut self, path: &Path, found: &Found, now: Instant, notices: &mut Notices) -> Result<Update, Instant> {
        let (name, absolute) = (path.display().to_string(), self.base.join(path));
        let is_found = found.files.contains_key(path);
        let content = if is_found { notices.read(&absolute, now, || disk::read_file(&absolute))? } else { Ok(None) };
        let (read, reason, parsed) = match &content {
            Ok(Some((stamp, content))) => (Some(*stamp), "malformed_file", documents::parse(&name, content)),
            Ok(None) => (None, "malformed_file", Parsed::default()),
            Err(error) => {
                let message = format!("the file {}", disk::unreadable(error));
                (None, "unreadable_file", Parsed::unreadable(&name, message))
            }
        };
        self.files.entry(path.to_owned()).or_default().read = read;
        Ok(self.take(path, reason, parsed, now))
    }

    /// Compares the content of a file with its known definitions.
    fn take(&mut self, path: &Path, reason: &'static str, parsed: Parsed<'_>, now: Instant) -> Update {
        let words = parsed.unread_words();
        let is_hidden = |key: &ObjectKey| words.as_ref().is_none_or(|words| words.contains(&*key.name));
        let Parsed { definitions, has_manifest, notes: mut problems, faults, .. } = parsed;
        let name = path.display().to_string();
        let mut defined: BTreeMap<Arc<ObjectKey>, Definition> = BTreeMap::new();
        for definition in definitions {
            let key = self.shared_key(definition.event.key());
            let origin = |definition: &Definition| documents::origin(&name, definition.document);
            match defined.get(&key) {
                Some(first) => problems.push(duplicate(&key, &origin(&definition), &origin(first))),
                None => drop(defined.insert(key, definition)),
            }
        }
        let file = self.files.entry(path.to_owned()).or_default();
        let lost: Vec<Arc<ObjectKey>> = file.keys.iter().filter(|key| !defined.contains_key(*key)).cloned().collect();
        let (hidden, gone): (Vec<_>, Vec<_>) = lost.iter().partition(|key| is_hidden(key));
        let consequence = hidden.first().map_or_else(String::new, |key| {
            format!("; objects that it may define stay in use as they were ({}, such as {key})", hidden.len())
        });
        let faults: Vec<Problem> =
            faults.into_iter().map(|(fault, _)| Problem { message: fault.message + &consequence, ..fault }).collect();
        file.fault = faults.first().cloned();
        problems.extend(faults);
        file.missing = missing(&file.missing, gone.into_iter(), now);
        file.keys.extend(defined.keys().cloned());
        for key in defined.keys() {
            self.objects.entry(Arc::clone(key)).or_default();
        }
        file.has_manifest = has_manifest;
        let mut update = Update { problems: vec![(name, reason, problems)], ..Update::default() };
        for key in lost {
            self.choose(&key, path, None, &mut update);
        }
        let file: Arc<Path> = path.into();
        for (key, Definition { event, document }) in defined {
            let hash = self.hasher.hash_one((path, document, &event));
            self.choose(&key, path, Some((Location { file: Arc::clone(&file), document, hash }, event)), &mut update);
        }
        update
    }

    fn shared_key(&self, key: ObjectKey) -> Arc<ObjectKey> {
        self.objects.get_key_value(&key).map_or_else(|| Arc::new(key), |(shared, _)| Arc::clone(shared))
    }

    /// Sets the definition of an object in a file, and brings the first one into use.
    fn choose(&mut self, key: &ObjectKey, path: &Path, definition: Option<(Location, Event)>, update: &mut Update) {
        let Some(known) = self.objects.get_mut(key) else { return };
        let before = known.locations.len();
        known.locations.retain(|location| *location.file != *path);
        let event = definition.map(|(location, event)| {
            let place = known.locations.partition_point(|other| other.file < location.file);
            known.locations.insert(place, location);
            known.locations.shrink_to_fit();
            event
        });
        if before.max(known.locations.len()) > 1 {
            update.problems.push((format!("definitions of {key}"), "duplicate_object", known.duplicates(key)));
        }
        let Some(first) = known.locations.first().filter(|first| known.used != Some(first.hash)) else { return };
        match event.filter(|_| *first.file == *path) {
            Some(event) => {
                update.events.push((event, first.origin()));
                known.used = Some(first.hash);
            }
            None => {
                self.files.entry(first.file.to_path_buf()).or_default().read = None;
                update.wanted.insert(first.file.to_path_buf());
            }
        }
    }

    /// Removes the objects that their files have not defined for [`SETTLE`].
    fn remove_missing(&mut self, now: Instant, is_readable: impl Fn(&Path) -> bool) -> Update {
        let (mut update, mut gone) = (Update::default(), Vec::new());
        self.next_look = None;
        let losing = self.files.iter_mut().filter(|(path, file)| !file.missing.is_empty() && is_readable(path));
        for (_, File { keys, missing, .. }) in losing {
            missing.retain(|key, since| {
                let end = *since + SETTLE;
                if now < end {
                    self.next_look = Some(self.next_look.map_or(end, |next| next.min(end)));
                } else {
                    keys.remove(key);
                    gone.push(Arc::clone(key));
                }
                now < end
            });
        }
        // Another file may define an object or hold it in use.
        let held: HashSet<&Arc<ObjectKey>> =
            if gone.is_empty() { HashSet::new() } else { self.files.values().flat_map(|file| &file.keys).collect() };
        for key in gone.iter().filter(|key| !held.contains(*key)) {
            if self.objects.remove(key).is_some() {
                update.events.push((Event::Delete((**key).clone()), String::new()));
            }
        }
        update
    }
}

/// Why a folder without manifests is not used, unless it contained manifests before.
const EMPTY: &str = "contains no manifest, so it may not be mounted or cloned yet: if it is meant to be empty, write an \
                     empty List into it (apiVersion: v1, kind: List)";

/// Why a file is left out.
const WRITTEN: &str = "has changes that were not read yet, because a program has it open for writing, or writes it \
                       again and again: write another file, and rename it to this one";

fn duplicate(key: &ObjectKey, origin: &str, first: &str) -> Problem {
    let message =
        format!("{first} defines the same object, and that definition is used: remove one of the two definitions");
    Problem { object: key.to_string(), field: String::new(), message, origin: origin.to_owned() }
}

#[cfg(test)]
mod tests;
