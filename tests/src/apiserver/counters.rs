//! Counters and recorded requests, for assertions in tests.

use std::{
    collections::BTreeMap,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use http::Method;

use super::{kinds::Kind, store::lock};

/// The kind of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Verb {
    /// A list of a collection.
    List,
    /// A watch of a collection.
    Watch,
    /// Any other request, which is refused.
    Other,
}

/// One received request.
#[derive(Debug, Clone)]
pub struct RecordedRequest {
    /// The HTTP method.
    pub method: Method,
    /// The verb.
    pub verb: Verb,
    /// The kind of objects that the path names, if any.
    pub kind: Option<Kind>,
    /// The path, percent-encoded.
    pub path: String,
    /// The query string, percent-encoded. The string may be empty.
    pub query: String,
    /// The HTTP code of the answer, or `None` before the answer.
    pub answered: Option<u16>,
}

#[derive(Debug, Default)]
struct Inner {
    requests: BTreeMap<(Verb, Option<Kind>), u64>,
    recorded: Vec<RecordedRequest>,
}

/// Counts since the server was created. Restarts do not reset the counts.
#[derive(Debug, Default)]
pub(super) struct Counters {
    inner: Mutex<Inner>,
    bytes_sent: AtomicU64,
    connections: AtomicU64,
}

impl Counters {
    pub(super) fn record(&self, method: &Method, verb: Verb, kind: Option<Kind>, path: &str, query: &str) -> usize {
        let mut inner = lock(&self.inner);
        *inner.requests.entry((verb, kind)).or_default() += 1;
        let (method, path, query) = (method.clone(), path.to_owned(), query.to_owned());
        inner.recorded.push(RecordedRequest { method, verb, kind, path, query, answered: None });
        inner.recorded.len() - 1
    }

    pub(super) fn answered(&self, index: usize, code: u16) {
        if let Some(request) = lock(&self.inner).recorded.get_mut(index) {
            request.answered = Some(code);
        }
    }

    pub(super) fn requests(&self, verb: Verb, kind: Option<Kind>) -> u64 {
        let inner = lock(&self.inner);
        let matching =
            inner.requests.iter().filter(|((v, k), _)| *v == verb && kind.is_none_or(|kind| *k == Some(kind)));
        matching.map(|(_, count)| count).sum()
    }

    pub(super) fn recorded(&self) -> Vec<RecordedRequest> {
        lock(&self.inner).recorded.clone()
    }

    pub(super) fn add_bytes(&self, count: usize) {
        self.bytes_sent.fetch_add(count as u64, Ordering::Relaxed);
    }

    pub(super) fn bytes_sent(&self) -> u64 {
        self.bytes_sent.load(Ordering::Relaxed)
    }

    pub(super) fn add_connection(&self) {
        self.connections.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn connections(&self) -> u64 {
        self.connections.load(Ordering::Relaxed)
    }
}
