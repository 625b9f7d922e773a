//! Everything that the server knows: versioned objects and their bounded history, as in etcd and in
//! the real server's watch cache, the events that open watches have not sent, and faults.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use bytes::Bytes;
use serde_json::{Value, json};
use tokio::sync::watch;

use super::{
    Options,
    faults::{Cut, Order, RecordedRequest, RequestFault, RequestFilter, Verb},
    http::Params,
    kinds::Kind,
    status::{self, Failure},
    tokens::Tokens,
};

/// The number of recent writes that the history keeps. A new watch can begin at any of these
/// writes.
const HISTORY: usize = 10_000;

/// The objects of all kinds, by [`key`].
type Objects = BTreeMap<(Kind, String), Arc<Value>>;

/// The state that the handle shares with the request handlers. No code blocks while it holds the
/// lock.
#[derive(Debug)]
pub(super) struct Shared {
    state: Mutex<State>,
    /// Changes after each change of the state.
    changes: watch::Sender<()>,
}

impl Shared {
    pub(super) fn new(options: Options) -> Self {
        let state = State {
            options,
            objects: Objects::new(),
            version: 1,
            compacted: 0,
            history: VecDeque::new(),
            watches: BTreeMap::new(),
            next_watch: 0,
            rules: Vec::new(),
            blocked: BTreeSet::new(),
            endless: BTreeSet::new(),
            clearings: 0,
            tokens: Tokens::default(),
            token_serial: 0,
            expired_tokens: 0,
            recorded: Vec::new(),
        };
        Self { state: Mutex::new(state), changes: watch::Sender::new(()) }
    }

    /// Locks the state, even if another thread panicked while it held the lock.
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state, and wakes all tasks that wait for a change.
    pub(super) fn change<R>(&self, change: impl FnOnce(&mut State) -> R) -> R {
        let result = change(&mut self.lock());
        self.changes.send_replace(());
        result
    }

    /// A receiver that changes after each change of the state.
    pub(super) fn subscribe(&self) -> watch::Receiver<()> {
        self.changes.subscribe()
    }
}

/// One write, with the object before and after it. Watches with selectors need both to distinguish
/// ADDED, MODIFIED and DELETED.
#[derive(Debug)]
struct Change {
    version: u64,
    kind: Kind,
    key: String,
    before: Option<Arc<Value>>,
    after: Option<Arc<Value>>,
}

/// A piece of the body of a watch.
#[derive(Debug)]
pub(super) enum Piece {
    Bytes(Bytes),
    /// The response ends, as after a time-out of the watch.
    End,
    /// The connection is cut.
    Cut(Cut),
}

/// An open watch.
#[derive(Debug)]
pub(super) struct Watch {
    pub(super) kind: Kind,
    params: Params,
    /// The watch sends the changes after this version.
    from: u64,
    cut_next: Option<Cut>,
    /// What the response has not sent yet. True marks the results of orders, which a blocked kind
    /// does not hold back.
    queue: VecDeque<(bool, Piece)>,
}

impl Watch {
    fn push_event(&mut self, event: &str, object: &Value) {
        let line = line(event, object);
        match self.cut_next {
            Some(how) => self.push_half(false, &line, how),
            None => self.queue.push_back((false, Piece::Bytes(line))),
        }
    }

    fn push_half(&mut self, is_ordered: bool, line: &Bytes, how: Cut) {
        let half = line.slice(..line.len() / 2);
        self.queue.extend([(is_ordered, Piece::Bytes(half)), (is_ordered, Piece::Cut(how))]);
    }

    fn push_error(&mut self, status: &Value) {
        self.queue.extend([(true, Piece::Bytes(line("ERROR", status))), (true, Piece::End)]);
    }

    fn push_bookmark(&mut self, version: u64, is_initial_end: bool) {
        let mut object = self.kind.zero_fields();
        object["kind"] = json!(self.kind.name());
        object["apiVersion"] = json!(self.kind.api_version());
        let version = version.max(self.from).to_string();
        object["metadata"] = json!({"resourceVersion": version, "creationTimestamp": null});
        if is_initial_end {
            object["metadata"]["annotations"] = json!({"k8s.io/initial-events-end": "true"});
        }
        self.queue.push_back((false, Piece::Bytes(line("BOOKMARK", &object))));
    }

    fn push_change(&mut self, change: &Change) {
        if change.kind != self.kind || change.version <= self.from {
            return;
        }
        let before = change.before.as_ref().filter(|object| self.params.selects(object));
        let after = change.after.as_ref().filter(|object| self.params.selects(object));
        match (before, after) {
            (None, Some(object)) => self.push_event("ADDED", object),
            (Some(_), Some(object)) => self.push_event("MODIFIED", object),
            (Some(object), None) => {
                // The event has the last state of the object that the selector matched. The version
                // is the version of the write after which the object is deleted or no longer
                // matches.
                let mut object = (**object).clone();
                object["metadata"]["resourceVersion"] = json!(change.version.to_string());
                self.push_event("DELETED", &object);
            }
            (None, None) => {}
        }
    }
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) options: Options,
    pub(super) objects: Objects,
    /// The version of the last write. All kinds share one counter, like etcd's revision.
    pub(super) version: u64,
    /// New watches and exact reads of versions below this version get 410.
    compacted: u64,
    /// The writes after `compacted`, in order.
    history: VecDeque<Change>,
    pub(super) watches: BTreeMap<u64, Watch>,
    next_watch: u64,
    /// Faults of requests, and the number of requests that each still applies to.
    pub(super) rules: Vec<(RequestFilter, RequestFault, u64)>,
    pub(super) blocked: BTreeSet<Kind>,
    /// Kinds whose watches do not end.
    pub(super) endless: BTreeSet<Kind>,
    /// The number of times that faults were cleared. A stalled request waits until it changes.
    pub(super) clearings: u64,
    pub(super) tokens: Tokens,
    pub(super) token_serial: u64,
    /// Continue tokens with a serial number below this number have expired.
    pub(super) expired_tokens: u64,
    pub(super) recorded: Vec<RecordedRequest>,
}

impl State {
    pub(super) fn get(&self, kind: Kind, key: &str) -> Option<Arc<Value>> {
        self.objects.get(&(kind, key.to_owned())).cloned()
    }

    /// The objects of a kind by key, in order.
    pub(super) fn of_kind(&self, kind: Kind) -> impl DoubleEndedIterator<Item = (&String, &Arc<Value>)> {
        self.objects.iter().filter(move |((of, _), _)| *of == kind).map(|((_, key), object)| (key, object))
    }

    /// Creates or replaces an object. The resourceVersion of the given object is ignored.
    pub(super) fn apply(&mut self, object: Value) -> Result<Arc<Value>, Failure> {
        let text = |field: &str| object["metadata"][field].as_str();
        let (Some(kind), Some(name)) = (Kind::of(&object), text("name")) else {
            return Err(status::bad_request("the object has no name, or a kind that is not served"));
        };
        let key = key(kind, text("namespace").unwrap_or_default(), name);
        Ok(self.replace(kind, key, object))
    }

    /// Writes an object. As in the real server, a write without a change creates neither a version
    /// nor an event.
    pub(super) fn replace(&mut self, kind: Kind, key: String, mut object: Value) -> Arc<Value> {
        if let Some(before) = self.get(kind, &key) {
            object["metadata"]["resourceVersion"] = before["metadata"]["resourceVersion"].clone();
            if object == *before {
                return before;
            }
        }
        object["metadata"]["resourceVersion"] = json!((self.version + 1).to_string());
        let object = Arc::new(object);
        let before = self.objects.insert((kind, key.clone()), object.clone());
        self.record(kind, key, before, Some(object.clone()));
        object
    }

    /// Deletes an object, and returns its last state. Returns 404 if the object does not exist.
    pub(super) fn delete(&mut self, kind: Kind, key: String) -> Result<Arc<Value>, Failure> {
        let before = self.objects.remove(&(kind, key.clone())).ok_or_else(status::not_found)?;
        self.record(kind, key, Some(before.clone()), None);
        Ok(before)
    }

    fn record(&mut self, kind: Kind, key: String, before: Option<Arc<Value>>, after: Option<Arc<Value>>) {
        self.version += 1;
        let change = Change { version: self.version, kind, key, before, after };
        self.watches.values_mut().for_each(|watch| watch.push_change(&change));
        self.history.push_back(change);
        if self.history.len() > HISTORY
            && let Some(oldest) = self.history.pop_front()
        {
            self.compacted = oldest.version;
        }
    }

    /// The version of the list, and the objects by key at this version. The version is `at`, or the
    /// current version if `at` is `None` or newer than the current version. Returns 410 if the
    /// version is compacted.
    pub(super) fn list(&self, kind: Kind, at: Option<u64>) -> Result<(u64, BTreeMap<String, Arc<Value>>), Failure> {
        let mut objects: BTreeMap<_, _> =
            self.of_kind(kind).map(|(key, object)| (key.clone(), object.clone())).collect();
        let at = at.unwrap_or(self.version);
        if at < self.compacted {
            return Err(status::expired("The resourceVersion for the provided list is too old."));
        }
        let later = self.history.iter().rev().take_while(|change| change.version > at);
        for Change { key, before, .. } in later.filter(|change| change.kind == kind) {
            match before {
                Some(before) => objects.insert(key.clone(), before.clone()),
                None => objects.remove(key),
            };
        }
        Ok((at.min(self.version), objects))
    }

    /// Opens a watch, and returns its number. Returns 410 if its version is compacted.
    pub(super) fn open_watch(&mut self, kind: Kind, params: Params) -> Result<u64, Failure> {
        let resumed = params.version().filter(|version| *version > 0 && !params.send_initial_events);
        let from = resumed.unwrap_or(self.version);
        if from < self.compacted {
            return Err(status::too_old(from, self.compacted));
        }
        let mut watch = Watch { kind, params, from, cut_next: None, queue: VecDeque::new() };
        if resumed.is_none() {
            for (_, object) in self.of_kind(kind).filter(|(_, object)| watch.params.selects(object)).collect::<Vec<_>>()
            {
                watch.push_event("ADDED", object);
            }
            if watch.params.send_initial_events && watch.params.bookmarks {
                watch.push_bookmark(from, true);
            }
        }
        self.history.iter().for_each(|change| watch.push_change(change));
        let id = self.next_watch;
        self.next_watch += 1;
        self.watches.insert(id, watch);
        Ok(id)
    }

    /// Takes the next piece of the body of a watch. A blocked kind gets only results of orders.
    pub(super) fn take_piece(&mut self, id: u64) -> Option<Piece> {
        let watch = self.watches.get_mut(&id)?;
        let is_blocked = self.blocked.contains(&watch.kind);
        let next = watch.queue.iter().position(|(is_ordered, _)| *is_ordered || !is_blocked)?;
        watch.queue.remove(next).map(|(_, piece)| piece)
    }

    /// Appends a bookmark to a watch that may get one.
    pub(super) fn push_bookmark(&mut self, id: u64) {
        if let Some(watch) = self.watches.get_mut(&id) {
            watch.push_bookmark(self.version, false);
        }
    }

    /// Ends a watch at its time limit.
    pub(super) fn push_end(&mut self, id: u64) {
        if let Some(watch) = self.watches.get_mut(&id) {
            watch.queue.push_back((true, Piece::End));
        }
    }

    /// Gives an order to all open watches of a kind, or of all kinds. Returns the number of these
    /// watches.
    pub(super) fn order(&mut self, kind: Option<Kind>, order: &Order) -> usize {
        let watches = self.watches.values_mut().filter(|watch| kind.is_none_or(|kind| kind == watch.kind));
        watches
            .map(|watch| match order {
                Order::Close => watch.queue.push_back((true, Piece::End)),
                Order::CutNow(how) => {
                    let last = self.objects.iter().rfind(|((of, _), _)| *of == watch.kind);
                    let event = line("MODIFIED", last.map_or(&Value::Null, |(_, object)| object));
                    watch.push_half(true, &event, *how);
                }
                Order::CutOnNextEvent(how) => watch.cut_next = Some(*how),
                Order::Raw(bytes) => watch.queue.push_back((true, Piece::Bytes(bytes.clone()))),
                Order::Error(status) => watch.push_error(status),
                Order::Expire => watch.push_error(&status::too_old(self.version, self.version).body),
            })
            .count()
    }

    /// Drops the history. New watches and exact reads of earlier versions get 410.
    pub(super) fn compact(&mut self) {
        self.history.clear();
        self.compacted = self.version;
    }

    /// Returns the fault of the oldest rule that matches a request, if any, and counts its use.
    pub(super) fn take_fault(&mut self, verb: Verb, kind: Option<Kind>) -> Option<RequestFault> {
        let (_, fault, left) = self.rules.iter_mut().find(|(filter, ..)| filter.matches(verb, kind))?;
        *left -= 1;
        let fault = fault.clone();
        self.rules.retain(|(.., left)| *left > 0);
        Some(fault)
    }

    pub(super) fn clear_faults(&mut self) {
        self.rules.clear();
        self.blocked.clear();
        self.endless.clear();
        self.clearings += 1;
    }
}

/// The key of an object within its kind.
pub(super) fn key(kind: Kind, namespace: &str, name: &str) -> String {
    if kind.is_namespaced() { format!("{namespace}/{name}") } else { name.to_owned() }
}

/// Encodes one event as a line of JSON.
pub(super) fn line(event: &str, object: &Value) -> Bytes {
    Bytes::from(format!("{}\n", json!({"type": event, "object": object})))
}
