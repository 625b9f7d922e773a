//! Faults that a test can turn on at any time, and the queue of orders of each open watch.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::Bytes;
use serde_json::Value;

use super::{counters::Verb, kinds::Kind, store::lock};

/// How a connection ends when it is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cut {
    /// The socket is closed without the last chunk of the body. The peer sees an end of file in the
    /// middle of a message.
    Close,
    /// The peer gets a TCP reset.
    Reset,
}

/// What happens to a request to which a fault applies.
#[derive(Debug, Clone)]
pub enum RequestFault {
    /// The answer has this code, a Status body, and a Retry-After header if the time is given.
    Status {
        /// The HTTP code, such as 429, 500 or 503.
        code: u16,
        /// The seconds in the Retry-After header and in the Status details.
        retry_after_seconds: Option<u32>,
    },
    /// The request waits until `ApiServer::clear_faults` is called, and is then answered without a
    /// fault.
    Stall,
    /// The request is answered without a fault after this time.
    Delay(Duration),
    /// The connection is cut before any answer.
    Cut(Cut),
    /// The answer has code 200 and these bytes as the body.
    Garbage(Bytes),
}

/// The requests to which a fault applies. A field that is `None` matches every request.
#[derive(Debug, Clone, Copy, Default)]
pub struct RequestFilter {
    /// The verb of the requests.
    pub verb: Option<Verb>,
    /// The kind of objects that the requests name.
    pub kind: Option<Kind>,
}

impl RequestFilter {
    /// All requests, including `/version` and health checks.
    pub fn all() -> Self {
        Self::default()
    }

    /// Requests of one verb.
    pub fn verb(verb: Verb) -> Self {
        Self { verb: Some(verb), kind: None }
    }

    /// Requests of one verb and kind.
    pub fn verb_of(verb: Verb, kind: Kind) -> Self {
        Self { verb: Some(verb), kind: Some(kind) }
    }

    fn matches(self, verb: Verb, kind: Option<Kind>) -> bool {
        self.verb.is_none_or(|wanted| wanted == verb) && self.kind.is_none_or(|wanted| Some(wanted) == kind)
    }
}

/// An order to one open watch.
#[derive(Debug, Clone)]
pub(super) enum Order {
    /// End the response, as after a time-out of the watch.
    Close,
    /// Send half an event, then cut the connection.
    CutNow(Cut),
    /// Send only half of the next real event, then cut the connection.
    CutOnNextEvent(Cut),
    /// Send these bytes unchanged, then continue.
    Raw(Bytes),
    /// Send an ERROR event with this Status, then end the response.
    Error(Value),
    /// Send a BOOKMARK event after all earlier events.
    Bookmark,
}

/// An order, and the version of the last write before the order. The watch sends the events up to
/// this version before it executes the order.
pub(super) type DatedOrder = (u64, Order);

#[derive(Debug)]
struct Rule {
    filter: RequestFilter,
    fault: RequestFault,
    left: u64,
}

#[derive(Debug, Default)]
struct Inner {
    rules: Vec<Rule>,
    blocked: BTreeSet<Kind>,
    /// Kinds whose watches do not end.
    endless: BTreeSet<Kind>,
    watches: BTreeMap<u64, (Kind, VecDeque<DatedOrder>)>,
    next_watch: u64,
    /// The number of times that faults were cleared. A stalled request waits until this number
    /// changes.
    clearings: u64,
}

/// The faults, shared by the handle and the request handlers. After a change of the faults, the
/// caller must call `Store::wake_watches`.
#[derive(Debug, Default)]
pub(super) struct Faults {
    inner: Mutex<Inner>,
}

/// The registration of an open watch. Dropping it removes the watch.
#[derive(Debug)]
pub(super) struct Ticket {
    id: u64,
    faults: Arc<Faults>,
}

impl Faults {
    pub(super) fn add_rule(&self, filter: RequestFilter, fault: RequestFault, count: u64) {
        lock(&self.inner).rules.push(Rule { filter, fault, left: count });
    }

    /// Returns the fault of the oldest rule that matches a request, if any, and counts its use.
    pub(super) fn take(&self, verb: Verb, kind: Option<Kind>) -> Option<RequestFault> {
        let mut inner = lock(&self.inner);
        let rule = inner.rules.iter_mut().find(|rule| rule.left > 0 && rule.filter.matches(verb, kind))?;
        rule.left -= 1;
        let fault = rule.fault.clone();
        inner.rules.retain(|rule| rule.left > 0);
        Some(fault)
    }

    pub(super) fn clear(&self) {
        let mut inner = lock(&self.inner);
        inner.rules.clear();
        inner.blocked.clear();
        inner.endless.clear();
        inner.clearings += 1;
    }

    pub(super) fn clearings(&self) -> u64 {
        lock(&self.inner).clearings
    }

    pub(super) fn set_blocked(&self, kind: Kind, blocked: bool) {
        let mut inner = lock(&self.inner);
        if blocked {
            inner.blocked.insert(kind);
        } else {
            inner.blocked.remove(&kind);
            inner.endless.remove(&kind);
        }
    }

    pub(super) fn set_endless(&self, kind: Kind) {
        lock(&self.inner).endless.insert(kind);
    }

    pub(super) fn is_endless(&self, kind: Kind) -> bool {
        lock(&self.inner).endless.contains(&kind)
    }

    pub(super) fn is_blocked(&self, kind: Kind) -> bool {
        lock(&self.inner).blocked.contains(&kind)
    }

    /// Sends an order to all open watches of a kind, or of all kinds. Returns the number of these
    /// watches.
    pub(super) fn order(&self, kind: Option<Kind>, order: &Order, version: u64) -> usize {
        let mut inner = lock(&self.inner);
        let queues = inner.watches.values_mut().filter(|(of, _)| kind.is_none_or(|kind| kind == *of));
        queues.map(|(_, queue)| queue.push_back((version, order.clone()))).count()
    }

    pub(super) fn open_watches(&self, kind: Option<Kind>) -> usize {
        let inner = lock(&self.inner);
        inner.watches.values().filter(|(of, _)| kind.is_none_or(|kind| kind == *of)).count()
    }

    pub(super) fn register(self: &Arc<Self>, kind: Kind) -> Ticket {
        let mut inner = lock(&self.inner);
        let id = inner.next_watch;
        inner.next_watch += 1;
        inner.watches.insert(id, (kind, VecDeque::new()));
        Ticket { id, faults: self.clone() }
    }
}

impl Ticket {
    pub(super) fn take_orders(&self) -> VecDeque<DatedOrder> {
        let mut inner = lock(&self.faults.inner);
        inner.watches.get_mut(&self.id).map(|(_, queue)| std::mem::take(queue)).unwrap_or_default()
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        lock(&self.faults.inner).watches.remove(&self.id);
    }
}
