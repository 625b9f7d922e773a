//! Versioned objects and their bounded history: the part that etcd and the watch cache play for the real server.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{SystemTime, UNIX_EPOCH},
};

use serde_json::{Map, Value, json};
use tokio::sync::watch;

use super::{
    kinds::Kind,
    status::{self, Failure},
};

/// Locks even after a panic elsewhere: the stores of this module hold no half-made state.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One write, with what was there before: selectors need both sides to tell an add from a change.
#[derive(Debug, Clone)]
pub(super) struct Change {
    pub(super) version: u64,
    pub(super) kind: Kind,
    pub(super) before: Option<Arc<Value>>,
    pub(super) after: Option<Arc<Value>>,
}

/// A copy of every object and of the version counter, as an etcd backup is. Made by `ApiServer::backup`.
#[derive(Debug, Clone)]
pub struct Backup {
    objects: BTreeMap<Kind, BTreeMap<String, Arc<Value>>>,
    version: u64,
}

impl Backup {
    /// The resourceVersion at which the copy was made.
    pub fn version(&self) -> u64 {
        self.version
    }
}

/// A watch fell so far behind that its events are gone; the real server closes such a watch.
#[derive(Debug)]
pub(super) struct FellBehind;

#[derive(Debug)]
struct Inner {
    objects: BTreeMap<Kind, BTreeMap<String, Arc<Value>>>,
    /// The version of the last write. One counter for all kinds, as etcd's revision.
    version: u64,
    /// New watches and exact reads from before this version are told 410.
    compacted: u64,
    /// Writes in order, without gaps, the newest at `version`. Reaches further back than `compacted` while an
    /// open watch has yet to read it: compaction does not take events from watches already open.
    history: VecDeque<Change>,
    history_limit: usize,
    cursors: BTreeMap<u64, u64>,
    next_cursor: u64,
}

/// The store. Cheap locks, no waiting while they are held.
#[derive(Debug)]
pub(super) struct Store {
    inner: Mutex<Inner>,
    bell: watch::Sender<u64>,
}

/// How many times `history_limit` an open watch may lag before it is closed.
const LAG_FACTOR: usize = 10;

impl Store {
    pub(super) fn new(history_limit: usize) -> Self {
        let inner = Inner {
            objects: BTreeMap::new(),
            version: 1,
            compacted: 0,
            history: VecDeque::new(),
            history_limit,
            cursors: BTreeMap::new(),
            next_cursor: 0,
        };
        Self { inner: Mutex::new(inner), bell: watch::Sender::new(0) }
    }

    /// Wakes at every write, and at every `ring`.
    pub(super) fn subscribe(&self) -> watch::Receiver<u64> {
        self.bell.subscribe()
    }

    /// Wakes every watch to look again, as after a fault was switched.
    pub(super) fn ring(&self) {
        self.bell.send_modify(|count| *count = count.wrapping_add(1));
    }

    pub(super) fn version(&self) -> u64 {
        lock(&self.inner).version
    }

    pub(super) fn oldest_version(&self) -> u64 {
        lock(&self.inner).compacted
    }

    pub(super) fn get(&self, kind: Kind, namespace: &str, name: &str) -> Option<Arc<Value>> {
        lock(&self.inner).objects.get(&kind)?.get(&key(kind, namespace, name)).cloned()
    }

    /// Creates; 409 if the object is there.
    pub(super) fn create(&self, object: Value) -> Result<Arc<Value>, Failure> {
        self.write(object, |kind, name, existing, _| match existing {
            Some(_) => Err(status::already_exists(kind, name)),
            None => Ok(()),
        })
    }

    /// Replaces; 404 if the object is not there, 409 if the resourceVersion or uid given is not the current one.
    pub(super) fn update(&self, object: Value) -> Result<Arc<Value>, Failure> {
        self.write(object, |kind, name, existing, given| {
            let existing = existing.ok_or_else(|| status::not_found(kind, name))?;
            for field in ["/metadata/resourceVersion", "/metadata/uid"] {
                let given = given.pointer(field).and_then(Value::as_str).filter(|text| !text.is_empty());
                if given.is_some() && given != existing.pointer(field).and_then(Value::as_str) {
                    return Err(status::conflict(kind, name));
                }
            }
            Ok(())
        })
    }

    /// Creates or replaces, whatever the object says of its versions.
    pub(super) fn apply(&self, object: Value) -> Result<Arc<Value>, Failure> {
        self.write(object, |_, _, _, _| Ok(()))
    }

    fn write(
        &self,
        mut object: Value,
        check: impl FnOnce(Kind, &str, Option<&Value>, &Value) -> Result<(), Failure>,
    ) -> Result<Arc<Value>, Failure> {
        let (kind, namespace, name) = identify(&mut object)?;
        let mut inner = lock(&self.inner);
        let key = key(kind, &namespace, &name);
        let before = inner.objects.get(&kind).and_then(|objects| objects.get(&key)).cloned();
        check(kind, &name, before.as_deref(), &object)?;
        let version = inner.version + 1;
        match &before {
            Some(before) => {
                stamp_like(&mut object, before);
                // As in the real server, a write that changes nothing makes neither a version nor an event.
                if object == **before {
                    return Ok(before.clone());
                }
                bump_generation(&mut object);
            }
            None => stamp_new(&mut object, kind),
        }
        object["metadata"]["resourceVersion"] = json!(version.to_string());
        let after = Arc::new(object);
        inner.objects.entry(kind).or_default().insert(key, after.clone());
        inner.record(Change { version, kind, before, after: Some(after.clone()) });
        drop(inner);
        self.ring();
        Ok(after)
    }

    /// Deletes and gives back the last state; 404 if the object is not there.
    pub(super) fn delete(&self, kind: Kind, namespace: &str, name: &str) -> Result<Arc<Value>, Failure> {
        let mut inner = lock(&self.inner);
        let before = inner.objects.get_mut(&kind).and_then(|objects| objects.remove(&key(kind, namespace, name)));
        let before = before.ok_or_else(|| status::not_found(kind, name))?;
        let version = inner.version + 1;
        inner.record(Change { version, kind, before: Some(before.clone()), after: None });
        drop(inner);
        self.ring();
        Ok(before)
    }

    /// Objects by key, in key order, and the version that the list is of: the current one, or exactly `at`.
    /// 410 if that version is compacted.
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

    /// Opens a cursor for a watch; events after `from` stay until it has read them. 410 where `from` is compacted.
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

    /// The next changes after `from` and up to `until`, at most `limit`, and the version up to which they reach.
    pub(super) fn read(
        &self,
        cursor: u64,
        from: u64,
        until: u64,
        limit: usize,
    ) -> Result<(u64, Vec<Change>), FellBehind> {
        let mut inner = lock(&self.inner);
        if from >= inner.version.min(until) {
            // Also a watch from a version in the future, as after a restored backup: the real server lets it
            // wait in silence until the counter has caught up.
            return Ok((from, Vec::new()));
        }
        let first = inner.version + 1 - inner.history.len() as u64;
        if from + 1 < first {
            return Err(FellBehind);
        }
        let skip = usize::try_from(from + 1 - first).unwrap_or(usize::MAX);
        let following = inner.history.iter().skip(skip).take_while(|change| change.version <= until);
        let changes: Vec<Change> = following.take(limit).cloned().collect();
        let reached = changes.last().map_or(from, |change| change.version);
        inner.cursors.insert(cursor, reached);
        inner.trim();
        Ok((reached, changes))
    }

    pub(super) fn close_cursor(&self, cursor: u64) {
        let mut inner = lock(&self.inner);
        inner.cursors.remove(&cursor);
        inner.trim();
    }

    /// Forgets all history: watches and exact reads from before the current version get 410 from now on.
    pub(super) fn compact(&self) {
        let mut inner = lock(&self.inner);
        inner.compacted = inner.version;
        inner.trim();
    }

    pub(super) fn set_history_limit(&self, limit: usize) {
        let mut inner = lock(&self.inner);
        inner.history_limit = limit;
        inner.bound();
    }

    pub(super) fn backup(&self) -> Backup {
        let inner = lock(&self.inner);
        Backup { objects: inner.objects.clone(), version: inner.version }
    }

    /// Goes back to a backup: objects and counter as they were, history gone.
    pub(super) fn restore(&self, backup: &Backup) {
        let mut inner = lock(&self.inner);
        inner.objects = backup.objects.clone();
        inner.version = backup.version;
        inner.forget();
    }

    /// Moves the counter up without a write, history gone.
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
        self.bound();
    }

    fn bound(&mut self) {
        let limit = u64::try_from(self.history_limit).unwrap_or(u64::MAX);
        self.compacted = self.compacted.max(self.version.saturating_sub(limit));
        self.trim();
    }

    fn trim(&mut self) {
        let slowest = self.cursors.values().copied().min().unwrap_or(u64::MAX);
        let keep_after = self.compacted.min(slowest);
        let most = self.history_limit.saturating_mul(LAG_FACTOR);
        while self.history.len() > most || self.history.front().is_some_and(|change| change.version <= keep_after) {
            self.history.pop_front();
        }
    }

    fn forget(&mut self) {
        self.history.clear();
        self.compacted = self.version;
    }
}

fn key(kind: Kind, namespace: &str, name: &str) -> String {
    if kind.is_namespaced() { format!("{namespace}/{name}") } else { name.to_owned() }
}

fn key_of(kind: Kind, object: &Value) -> String {
    let text = |field: &str| object["metadata"][field].as_str().unwrap_or_default();
    key(kind, text("namespace"), text("name"))
}

/// Checks what every write needs: a kind that is served, a name, and a namespace exactly where one belongs.
fn identify(object: &mut Value) -> Result<(Kind, String, String), Failure> {
    let Some(kind) = Kind::of(object) else {
        let message = format!(
            "no kind \"{}\" is registered for version \"{}\": use Service or Node (v1), EndpointSlice \
             (discovery.k8s.io/v1) or ServiceCIDR (networking.k8s.io/v1)",
            object["kind"].as_str().unwrap_or_default(),
            object["apiVersion"].as_str().unwrap_or_default()
        );
        return Err(status::bad_request(&message));
    };
    let metadata = object.get_mut("metadata").and_then(Value::as_object_mut);
    let metadata = metadata
        .ok_or_else(|| status::invalid_object(kind, "", "metadata", "Required value: an object with a name"))?;
    let text = |metadata: &Map<String, Value>, field: &str| {
        metadata.get(field).and_then(Value::as_str).unwrap_or_default().to_owned()
    };
    let name = text(metadata, "name");
    if name.is_empty() || name.contains('/') {
        let message = "Required value: name is required, and may hold no '/'";
        return Err(status::invalid_object(kind, &name, "metadata.name", message));
    }
    if !kind.is_namespaced() {
        metadata.remove("namespace");
        return Ok((kind, String::new(), name));
    }
    let namespace = text(metadata, "namespace");
    if namespace.is_empty() {
        let message = "Required value: this kind lives in a namespace";
        return Err(status::invalid_object(kind, &name, "metadata.namespace", message));
    }
    Ok((kind, namespace, name))
}

fn stamp_new(object: &mut Value, kind: Kind) {
    let metadata = &mut object["metadata"];
    metadata["uid"] = json!(random_uid());
    metadata["creationTimestamp"] = json!(rfc3339(SystemTime::now()));
    if matches!(kind, Kind::EndpointSlice | Kind::ServiceCidr) {
        metadata["generation"] = json!(1);
    }
}

fn stamp_like(object: &mut Value, before: &Value) {
    for field in ["uid", "creationTimestamp", "resourceVersion", "generation"] {
        match before["metadata"].get(field) {
            Some(value) => object["metadata"][field] = value.clone(),
            None => {
                if let Some(metadata) = object["metadata"].as_object_mut() {
                    metadata.remove(field);
                }
            }
        }
    }
}

fn bump_generation(object: &mut Value) {
    if let Some(generation) = object["metadata"].get("generation").and_then(Value::as_u64) {
        object["metadata"]["generation"] = json!(generation + 1);
    }
}

fn random_uid() -> String {
    // A version 4 UUID: the version in the third group, the variant in the fourth.
    let bits =
        (fastrand::u128(..) & !(0xf000_u128 << 64) & !(0xc000_u128 << 48)) | (0x4000_u128 << 64) | (0x8000_u128 << 48);
    let hex = format!("{bits:032x}");
    format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

fn rfc3339(time: SystemTime) -> String {
    let seconds = time.duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs());
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    // Days to civil date, counted in years that begin in March (the leap day is then the last of the year).
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let march_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * march_month + 2) / 5 + 1;
    let month = if march_month < 10 { march_month + 3 } else { march_month - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", rest / 3_600, rest / 60 % 60, rest % 60)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::time::Duration;

    use super::*;

    fn node(name: &str, label: &str) -> Value {
        json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": {"at": label}}})
    }

    #[test]
    fn exact_reads_undo_later_writes_until_compacted() {
        let store = Store::new(100);
        store.apply(node("a", "1")).unwrap();
        store.apply(node("b", "1")).unwrap();
        let then = store.version();
        store.apply(node("a", "2")).unwrap();
        store.delete(Kind::Node, "", "b").unwrap();
        store.apply(node("c", "1")).unwrap();
        let (version, objects) = store.list(Kind::Node, Some(then)).unwrap();
        assert_eq!(version, then);
        assert_eq!(objects.keys().collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(objects["a"]["metadata"]["labels"]["at"], "1");
        store.compact();
        assert_eq!(store.list(Kind::Node, Some(then)).unwrap_err().code, 410);
        assert_eq!(store.list(Kind::Node, None).unwrap().1.len(), 2);
    }

    #[test]
    fn compaction_takes_nothing_from_an_open_cursor() {
        let store = Store::new(2);
        let start = store.version();
        let cursor = store.open_cursor(start).unwrap();
        for turn in 0..10 {
            store.apply(node("a", &turn.to_string())).unwrap();
        }
        store.compact();
        assert_eq!(store.open_cursor(start).unwrap_err().code, 410);
        let (reached, changes) = store.read(cursor, start, u64::MAX, 1_000).unwrap();
        assert_eq!((reached, changes.len()), (store.version(), 10));
        assert!(store.read(cursor, start, u64::MAX, 1_000).is_err(), "what was read is trimmed");
    }

    #[test]
    fn a_write_without_a_change_makes_no_version() {
        let store = Store::new(10);
        let first = store.apply(node("a", "1")).unwrap();
        assert_eq!(store.apply(node("a", "1")).unwrap(), first);
        assert_ne!(store.apply(node("a", "2")).unwrap(), first);
    }

    #[test]
    fn stale_updates_conflict() {
        let store = Store::new(10);
        let first = store.create(node("a", "1")).unwrap();
        assert_eq!(store.create(node("a", "1")).unwrap_err().code, 409);
        store.apply(node("a", "2")).unwrap();
        assert_eq!(store.update((*first).clone()).unwrap_err().code, 409);
        assert_eq!(store.update(node("b", "1")).unwrap_err().code, 404);
        store.update(node("a", "3")).unwrap();
    }

    #[test]
    fn timestamps_are_rfc3339() {
        let at = |seconds| rfc3339(UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(at(0), "1970-01-01T00:00:00Z");
        assert_eq!(at(951_827_696), "2000-02-29T12:34:56Z");
        assert_eq!(at(1_767_225_599), "2025-12-31T23:59:59Z");
    }
}
