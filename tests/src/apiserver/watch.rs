//! One open watch: a response body that reads the store's history through a cursor and sends one
//! JSON document per line.

use std::{collections::VecDeque, io, sync::Arc, time::Duration};

use bytes::Bytes;
use serde_json::{Value, json};
use tokio::{
    sync::watch::Receiver,
    time::{Instant, sleep, sleep_until},
};

use super::{
    Shared,
    connection::ConnectionState,
    faults::{Cut, Order, Ticket},
    kinds::Kind,
    params::{Params, Selector},
    status::{self, Failure},
    store::Change,
};

/// The largest number of changes in one read.
const BATCH: usize = 256;

/// The pause between half an event and the cut. During this pause the server writes the half event
/// to the socket.
const CUT_PAUSE: Duration = Duration::from_millis(20);

/// The first bookmark of a watch is sent at least this long before the end of the watch, if the
/// watch is longer than this time. `cacheWatcher.nextBookmarkTime` of the real server has the same
/// rule.
const LAST_BOOKMARK: Duration = Duration::from_secs(2);

#[derive(Debug, Clone, Copy)]
enum End {
    Clean,
    Cut(Cut),
}

/// A version in the history. The history keeps all later writes while the cursor exists.
#[derive(Debug)]
struct Cursor {
    shared: Arc<Shared>,
    id: u64,
    version: u64,
}

impl Drop for Cursor {
    fn drop(&mut self) {
        self.shared.store.close_cursor(self.id);
    }
}

/// The state of one watch. The state is dropped with the response body, also when the client
/// disconnects.
#[derive(Debug)]
pub(super) struct Session {
    shared: Arc<Shared>,
    connection: Arc<ConnectionState>,
    ticket: Ticket,
    wakeups: Receiver<u64>,
    kind: Kind,
    namespace: Option<String>,
    selector: Selector,
    cursor: Cursor,
    /// The objects to send before any change; `None` after they are sent.
    initial: Option<Vec<Arc<Value>>>,
    /// Whether a bookmark marks the end of the initial objects, as in a streaming list.
    marks_initial_end: bool,
    bookmarks: bool,
    wants_bookmark: bool,
    next_bookmark: Instant,
    deadline: Instant,
    cut_next: Option<Cut>,
    lines: VecDeque<Bytes>,
    end: Option<End>,
}

impl Session {
    /// Opens a watch.
    ///
    /// # Errors
    /// The version is too old. The caller sends the failure as an HTTP code or as an ERROR event.
    pub(super) fn open(
        shared: &Arc<Shared>,
        connection: Arc<ConnectionState>,
        kind: Kind,
        namespace: Option<&str>,
        params: Params,
    ) -> Result<Self, Failure> {
        let wakeups = shared.store.subscribe();
        let (cursor, initial) = match params.version.filter(|_| !params.send_initial_events) {
            Some(version) => (open_cursor(shared, version)?, None),
            None => {
                // The list and the cursor must have the same version. The cursor is opened first,
                // because it keeps this version in the history.
                let cursor = open_cursor(shared, shared.store.version())?;
                let (_, objects) = shared.store.list(kind, Some(cursor.version))?;
                let in_scope =
                    |object: &Arc<Value>| is_in_namespace(object, namespace) && params.selector.matches(object);
                (cursor, Some(objects.into_values().filter(in_scope).collect()))
            }
        };
        let options = shared.options();
        // If the client sets no time-out, the real server chooses a random time-out of at least
        // half an hour.
        let seconds = params.timeout_seconds.unwrap_or_else(|| fastrand::u64(1_800..3_600));
        let now = Instant::now();
        let deadline = now + Duration::from_secs(seconds.min(86_400));
        let last_bookmark = deadline - LAST_BOOKMARK;
        let next_bookmark = now + options.bookmark_interval;
        Ok(Self {
            ticket: shared.faults.register(kind),
            shared: shared.clone(),
            connection,
            wakeups,
            kind,
            namespace: namespace.map(str::to_owned),
            selector: params.selector,
            cursor,
            initial,
            marks_initial_end: params.send_initial_events && params.bookmarks,
            bookmarks: params.bookmarks && options.bookmarks,
            wants_bookmark: false,
            next_bookmark: if last_bookmark > now { next_bookmark.min(last_bookmark) } else { next_bookmark },
            deadline,
            cut_next: None,
            lines: VecDeque::new(),
            end: None,
        })
    }

    /// The next piece of the body. `None` ends the body. An error cuts the connection.
    pub(super) async fn next(&mut self) -> Option<io::Result<Bytes>> {
        loop {
            if let Some(line) = self.lines.pop_front() {
                return Some(Ok(line));
            }
            match self.end {
                Some(End::Clean) => return None,
                Some(End::Cut(how)) => {
                    sleep(CUT_PAUSE).await;
                    if how == Cut::Reset {
                        self.connection.reset_on_close();
                    }
                    self.end = Some(End::Clean);
                    return Some(Err(io::Error::other("the test cuts the connection")));
                }
                None => {}
            }
            self.wakeups.borrow_and_update();
            self.advance();
            if self.lines.is_empty() && self.end.is_none() {
                self.wait().await;
            }
        }
    }

    async fn wait(&mut self) {
        let bookmark_due = self.bookmarks && !self.shared.faults.is_blocked(self.kind);
        tokio::select! {
            changed = self.wakeups.changed() => {
                if changed.is_err() {
                    self.end = Some(End::Clean);
                }
            }
            () = sleep_until(self.deadline), if !self.shared.faults.is_endless(self.kind) => {
                if bookmark_due {
                    self.push_bookmark(false);
                }
                self.end = Some(End::Clean);
            }
            () = sleep_until(self.next_bookmark), if bookmark_due => self.push_bookmark(false),
        }
    }

    /// Executes the orders that the test has given to this watch. Before each order, sends the
    /// events of the writes that preceded the order. After the last order, sends all other events.
    fn advance(&mut self) {
        for (version, order) in self.ticket.take_orders() {
            self.send_up_to(version);
            if self.end.is_none() {
                self.execute(order);
            }
            if self.end.is_some() {
                return;
            }
        }
        self.send_up_to(u64::MAX);
    }

    /// Sends the initial objects, the changes up to a version, and a bookmark if the test has
    /// ordered a bookmark. Sends nothing while the kind is blocked.
    fn send_up_to(&mut self, version: u64) {
        if self.shared.faults.is_blocked(self.kind) {
            return;
        }
        if let Some(objects) = self.initial.take() {
            for object in objects {
                self.push_event("ADDED", &object);
            }
            if self.marks_initial_end {
                self.push_bookmark(true);
            }
        }
        self.send_changes(version);
        let reached = self.cursor.version >= self.shared.store.version().min(version);
        if self.wants_bookmark && self.end.is_none() && reached {
            self.push_bookmark(false);
        }
    }

    fn execute(&mut self, order: Order) {
        match order {
            Order::Close => self.end = Some(End::Clean),
            Order::CutNow(how) => {
                let line = self.last_object_line();
                self.push_half(&line, how);
            }
            Order::CutOnNextEvent(how) => self.cut_next = Some(how),
            Order::Raw(bytes) => self.lines.push_back(bytes),
            Order::Error(status) => {
                self.lines.push_back(line("ERROR", &status));
                self.end = Some(End::Clean);
            }
            Order::Bookmark => self.wants_bookmark = self.bookmarks,
        }
    }

    fn send_changes(&mut self, until: u64) {
        while self.end.is_none() {
            let (reached, changes) = self.shared.store.read(self.cursor.id, self.cursor.version, until, BATCH);
            self.cursor.version = reached;
            if changes.is_empty() {
                return;
            }
            for change in &changes {
                self.send_change(change);
                if self.end.is_some() {
                    return;
                }
            }
        }
    }

    fn send_change(&mut self, change: &Change) {
        if change.kind != self.kind {
            return;
        }
        let selected =
            |object: &&Arc<Value>| is_in_namespace(object, self.namespace.as_deref()) && self.selector.matches(object);
        let before = change.before.as_ref().filter(selected);
        let after = change.after.as_ref().filter(selected);
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

    fn push_event(&mut self, event: &str, object: &Value) {
        let line = line(event, object);
        match self.cut_next {
            Some(how) => self.push_half(&line, how),
            None => self.lines.push_back(line),
        }
    }

    fn push_half(&mut self, line: &Bytes, how: Cut) {
        if self.end.is_none() {
            self.lines.push_back(line.slice(..line.len() / 2));
            self.end = Some(End::Cut(how));
        }
    }

    fn push_bookmark(&mut self, initial_end: bool) {
        self.wants_bookmark = false;
        self.next_bookmark = Instant::now() + self.shared.options().bookmark_interval;
        let mut object = self.kind.zero_fields();
        object["kind"] = json!(self.kind.name());
        object["apiVersion"] = json!(self.kind.api_version());
        object["metadata"] = json!({"resourceVersion": self.cursor.version.to_string(), "creationTimestamp": null});
        if initial_end {
            object["metadata"]["annotations"] = json!({"k8s.io/initial-events-end": "true"});
        }
        self.lines.push_back(line("BOOKMARK", &object));
    }

    fn last_object_line(&self) -> Bytes {
        let objects = self.shared.store.list(self.kind, None).map(|(_, objects)| objects).unwrap_or_default();
        match objects.into_values().next_back() {
            Some(object) => line("MODIFIED", &object),
            None => line("ERROR", &status::injected(500, None).body),
        }
    }
}

fn open_cursor(shared: &Arc<Shared>, version: u64) -> Result<Cursor, Failure> {
    let id = shared.store.open_cursor(version)?;
    Ok(Cursor { shared: shared.clone(), id, version })
}

pub(super) fn is_in_namespace(object: &Value, namespace: Option<&str>) -> bool {
    namespace.is_none_or(|namespace| object["metadata"]["namespace"].as_str() == Some(namespace))
}

/// Encodes one event as a line of JSON.
pub(super) fn line(event: &str, object: &Value) -> Bytes {
    Bytes::from(format!("{}\n", json!({"type": event, "object": object})))
}
