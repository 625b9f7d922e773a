//! Bytes as an API server, a person or a peer could give them, taken as the control plane takes them. For fuzzers and their tests only.
//!
//! Each function must return whatever it is given, in memory that is bounded by its input's size; what it returns says whether the input
//! was good, so that a test can tell that it exercises more than the first check.

use std::sync::Arc;

use crate::{
    metrics::Metrics,
    model::{Event, Model},
    source::{self, objects::ObjectKind},
    store::{Limits, Resume, Store},
    transaction::{Sink as _, Transaction},
};

/// Reads a manifest as the source `files` does, and serves what it defines. `is_json` as a file's ending says. Returns the number of objects that were defined.
#[must_use]
pub fn manifest(bytes: &[u8], is_json: bool) -> usize {
    let events = source::manifest_events(if is_json { "web.json" } else { "web.yaml" }, bytes);
    serve(events)
}

/// Reads lines of a watch, and serves what they say until one is no event. Returns the number of events.
#[must_use]
pub fn watch(kind: ObjectKind, bytes: &[u8]) -> usize {
    serve(source::watch_events(kind, bytes))
}

/// Reads a page of a list, and serves what is on it. Returns the number of objects.
#[must_use]
pub fn list(kind: ObjectKind, bytes: &[u8]) -> usize {
    serve(source::list_events(kind, bytes))
}

/// Through the model and the store, to the bytes that a new agent gets.
fn serve(events: Vec<Event>) -> usize {
    let (mut model, store) = (Model::default(), Store::new(Limits::default(), Arc::new(Metrics::default())));
    let count = events.len();
    for event in events {
        model.event(event, "");
    }
    let (changes, nodes) = model.take_changes();
    store.commit(Transaction { changes, nodes, ..Transaction::default() });
    store.problems(model.take_problems().unwrap_or_default());
    store.synced();
    let (_, mut cursor) = store.cursor(None::<&Resume>);
    while let Ok(Some(_)) = store.next_frame(&mut cursor) {}
    count
}
