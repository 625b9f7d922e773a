//! Versioned objects and their bounded history, like the data in etcd and in the real server's
//! watch cache.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use serde_json::{Value, json};
use tokio::sync::watch;

use super::{
    kinds::Kind,
    status::{self, Failure},
};

/// Locks a mutex, even if another thread panicked while it held the lock. The state is consistent
/// whenever a lock is released.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One write, with the object before and after it. Watches with selectors need both to distinguish
/// ADDED, MODIFIED and DELETED.
#[derive(Debug, Clone)]
pub(super) struct Change {
    pub(super) version: u64,
    pub(super) kind: Kind,
    pub(super) before: Option<Arc<Value>>,
    pub(super) after: Option<Arc<Value>>,
}

/// A copy of all objects and the version counter, like a backup of etcd. `ApiServer::backup`
/// creates it.
#[derive(Debug, Clone)]
pub struct Backup {
    objects: BTreeMap<Kind, BTreeMap<String, Arc<Value>>>,
    version: u64,
}

impl Backup {
    /// The resourceVersion at the time of the copy.
    pub fn version(&self) -> u64 {
        self.version
    }
}

#[derive(Debug)]
struct Inner {
    objects: BTreeMap<Kind, BTreeMap<String, Arc<Value>>>,
    /// The version of the last write. All kinds share one counter, like etcd's revision.
    version: u64,
    /// New watches and exact reads of versions below this version get 410.
    compacted: u64,
    /// All writes in order up to `version`, without gaps. The history keeps a write before
    /// `compacted` until every open watch has read it, because compaction does not remove events of
    /// open watches.
    history: VecDeque<Change>,
    cursors: BTreeMap<u64, u64>,
    next_cursor: u64,
}

/// The store. No code blocks while it holds the lock.
#[derive(Debug)]
pub(super) struct Store {
    inner: Mutex<Inner>,
    wakeups: watch::Sender<u64>,
}

/// The number of recent writes that the history keeps. A new watch can begin at any of these
/// writes.
const HISTORY: u64 = 10_000;

impl Store {
    pub(super) fn new() -> Self {
        let inner = Inner {
            objects: BTreeMap::new(),
            version: 1,
            compacted: 0,
            history: VecDeque::new(),
            cursors: BTreeMap::new(),
            next_cursor: 0,
        };
        Self { inner: Mutex::new(inner), wakeups: watch::Sender::new(0) }
    }

    /// A receiver that changes at every write and at every [`Self::wake_watches`].
    pub(super) fn subscribe(&self) -> watch::Receiver<u64> {
        self.wakeups.subscribe()
    }

    /// Wakes all watches, so that they check for new writes and faults.
    pub(super) fn wake_watches(&self) {
        self.wakeups.send_modify(|count| *count = count.wrapping_add(1));
    }

    pub(super) fn version(&self) -> u64 {
        lock(&self.inner).version
    }

    pub(super) fn get(&self, kind: Kind, namespace: &str, name: &str) -> Option<Arc<Value>> {
        self.get_by_key(kind, &key(kind, namespace, name))
    }

    pub(super) fn get_by_key(&self, kind: Kind, key: &str) -> Option<Arc<Value>> {
        lock(&self.inner).objects.get(&kind)?.get(key).cloned()
    }

    /// Creates or replaces an object. The resourceVersion of the given object is ignored.
    pub(super) fn apply(&self, object: Value) -> Result<Arc<Value>, Failure> {
        let kind = Kind::of(&object).filter(|_| object["metadata"]["name"].is_string());
        let kind = kind.ok_or_else(|| status::bad_request("the object has no name, or a kind that is not served"))?;
        self.update(kind, key_of(kind, &object), |_| Ok(object))
    }

    /// Creates or replaces the object with a key by the result of `change`, whose argument is the
    /// present object.
    pub(super) fn update(
        &self,
        kind: Kind,
        key: String,
        change: impl FnOnce(Option<&Value>) -> Result<Value, Failure>,
    ) -> Result<Arc<Value>, Failure> {
        let mut inner = lock(&self.inner);
        let before = inner.objects.get(&kind).and_then(|objects| objects.get(&key)).cloned();
        let mut object = change(before.as_deref())?;
        if let Some(before) = &before {
            object["metadata"]["resourceVersion"] = before["metadata"]["resourceVersion"].clone();
            // As in the real server, a write without a change creates neither a version nor an
            // event.
            if object == **before {
                return Ok(before.clone());
            }
        }
        let version = inner.version + 1;
        object["metadata"]["resourceVersion"] = json!(version.to_string());
        let after = Arc::new(object);
        inner.objects.entry(kind).or_default().insert(key, after.clone());
        inner.record(Change { version, kind, before, after: Some(after.clone()) });
        drop(inner);
        self.wake_watches();
        Ok(after)
    }

    /// Deletes an object, and returns its last state. Returns 404 if the object does not exist.
    pub(super) fn delete(&self, kind: Kind, namespace: &str, name: &str) -> Result<Arc<Value>, Failure> {
        let mut inner = lock(&self.inner);
        let before = inner.objects.get_mut(&kind).and_then(|objects| objects.remove(&key(kind, namespace, name)));
        let before = before.ok_or_else(status::not_found)?;
        let version = inner.version + 1;
        inner.record(Change { version, kind, before: Some(before.clone()), after: None });
        drop(inner);
        self.wake_watches();
        Ok(before)
    }

    /// The version of the list, and the objects by key at this version. The version is `at`, or the
    /// current version if `at` is `None` or newer than the current version. Returns 410 if the
    /// version is compacted.
    pub(super) fn list(&self, kind: Kind, at: Option<u64>) -> Result<(u64, BTreeMap<String, Arc<Value>>), Failure> {
        let inner = lock(&self.inner);
        let mut objects = inner.objects.get(&kind).cloned().unwrap_or_default();
        let Some(at) = at else { return Ok((inner.version, objects)) };
        if at < inner.compacted {
            return Err(status::expired("The resourceVersion for the provided list is too old."));
        }
        for change in inner.history.iter().rev().take_while(|change| change.version > at) {
            if change.kind != kind {
                continue;
            }
            match (&change.before, &change.after) {
                (Some(before), _) => objects.insert(key_of(kind, before), before.clone()),
                (None, Some(after)) => objects.remove(&key_of(kind, after)),
                (None, None) => None,
            };
        }
        Ok((at.min(inner.version), objects))
    }

    /// Opens a cursor for a watch. The history keeps events after `from` until the cursor has read
    /// these events. Returns 410 if `from` is compacted.
    pub(super) fn open_cursor(&self, from: u64) -> Result<u64, Failure> {
        let mut inner = lock(&self.inner);
        if from < inner.compacted {
            return Err(status::too_old(from, inner.compacted));
        }
        let cursor = inner.next_cursor;
        inner.next_cursor += 1;
        inner.cursors.insert(cursor, from);
        Ok(cursor)
    }

    /// Reads at most `limit` changes after `from` and up to `until`. Returns a version and the
    /// changes. The version is the version of the last returned change, or `from` if no change is
    /// returned.
    pub(super) fn read(&self, cursor: u64, from: u64, until: u64, limit: usize) -> (u64, Vec<Change>) {
        let mut inner = lock(&self.inner);
        if from >= inner.version.min(until) {
            // The condition also holds for a watch whose version is above the counter, for example
            // after a backup was restored. The real server sends nothing on such a watch until the
            // counter has reached the version of the watch.
            return (from, Vec::new());
        }
        let first = inner.version + 1 - inner.history.len() as u64;
        let skip = usize::try_from((from + 1).saturating_sub(first)).unwrap_or(usize::MAX);
        let following = inner.history.iter().skip(skip).take_while(|change| change.version <= until);
        let changes: Vec<Change> = following.take(limit).cloned().collect();
        let reached = changes.last().map_or(from, |change| change.version);
        inner.cursors.insert(cursor, reached);
        inner.trim();
        (reached, changes)
    }

    pub(super) fn close_cursor(&self, cursor: u64) {
        let mut inner = lock(&self.inner);
        inner.cursors.remove(&cursor);
        inner.trim();
    }

    /// Drops the history. New watches and exact reads of earlier versions get 410.
    pub(super) fn compact(&self) {
        let mut inner = lock(&self.inner);
        inner.compacted = inner.version;
        inner.trim();
    }

    pub(super) fn backup(&self) -> Backup {
        let inner = lock(&self.inner);
        Backup { objects: inner.objects.clone(), version: inner.version }
    }

    /// Restores the objects and the counter of a backup, and drops the history.
    pub(super) fn restore(&self, backup: &Backup) {
        let mut inner = lock(&self.inner);
        inner.objects = backup.objects.clone();
        inner.version = backup.version;
        inner.forget();
    }

    /// Raises the counter without a write, and drops the history.
    pub(super) fn raise_version(&self, by: u64) {
        let mut inner = lock(&self.inner);
        inner.version += by;
        inner.forget();
    }
}

impl Inner {
    fn record(&mut self, change: Change) {
        self.version = change.version;
        self.history.push_back(change);
        self.compacted = self.compacted.max(self.version.saturating_sub(HISTORY));
        self.trim();
    }

    fn trim(&mut self) {
        let slowest = self.cursors.values().copied().min().unwrap_or(u64::MAX);
        let keep_after = self.compacted.min(slowest);
        while self.history.front().is_some_and(|change| change.version <= keep_after) {
            self.history.pop_front();
        }
    }

    fn forget(&mut self) {
        self.history.clear();
        self.compacted = self.version;
    }
}

pub(super) fn key(kind: Kind, namespace: &str, name: &str) -> String {
    if kind.is_namespaced() { format!("{namespace}/{name}") } else { name.to_owned() }
}

fn key_of(kind: Kind, object: &Value) -> String {
    let text = |field: &str| object["metadata"][field].as_str().unwrap_or_default();
    key(kind, text("namespace"), text("name"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn node(name: &str, label: &str) -> Value {
        json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": {"at": label}}})
    }

    #[test]
    fn exact_reads_return_old_versions_until_they_are_compacted() {
        let store = Store::new();
        store.apply(node("a", "1")).unwrap();
        store.apply(node("b", "1")).unwrap();
        let earlier = store.version();
        store.apply(node("a", "2")).unwrap();
        store.delete(Kind::Node, "", "b").unwrap();
        store.apply(node("c", "1")).unwrap();
        let (version, objects) = store.list(Kind::Node, Some(earlier)).unwrap();
        assert_eq!(version, earlier);
        assert_eq!(objects.keys().collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(objects["a"]["metadata"]["labels"]["at"], "1");
        store.compact();
        assert_eq!(store.list(Kind::Node, Some(earlier)).unwrap_err().code, 410);
        assert_eq!(store.list(Kind::Node, None).unwrap().1.len(), 2);
    }

    #[test]
    fn compaction_removes_no_events_of_an_open_cursor() {
        let store = Store::new();
        let start = store.version();
        let cursor = store.open_cursor(start).unwrap();
        for turn in 0..10 {
            store.apply(node("a", &turn.to_string())).unwrap();
        }
        store.compact();
        assert_eq!(store.open_cursor(start).unwrap_err().code, 410);
        let (reached, changes) = store.read(cursor, start, u64::MAX, 1_000);
        assert_eq!((reached, changes.len()), (store.version(), 10));
        assert!(store.read(cursor, start, u64::MAX, 1_000).1.is_empty(), "read events are removed");
    }

    #[test]
    fn a_write_without_a_change_creates_no_version() {
        let store = Store::new();
        let first = store.apply(node("a", "1")).unwrap();
        assert_eq!(store.apply(node("a", "1")).unwrap(), first);
        assert_ne!(store.apply(node("a", "2")).unwrap(), first);
    }
}
