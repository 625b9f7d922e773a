//! Bytes as an API server, a person or a peer could give them, taken as the control plane takes
//! them. For fuzzers and their tests only.
//!
//! Each function must return whatever it is given, in memory that is bounded by its input's size;
//! what it returns says whether the input was good, so that a test can tell that it exercises more
//! than the first check.

use std::sync::Arc;

use crate::{
    identity,
    metrics::Metrics,
    model::{Event, Model},
    objects::ObjectKind,
    serve, source,
    store::{Limits, Resume, Store},
    transaction::{Sink as _, Transaction},
};

/// Reads a manifest as the source `files` does, and serves what it defines. `is_json` as a file's
/// ending says. Returns the number of objects that were defined.
#[must_use]
pub fn manifest(bytes: &[u8], is_json: bool) -> usize {
    let events = source::manifest_events(if is_json { "web.json" } else { "web.yaml" }, bytes);
    serve_events(events)
}

/// Reads lines of a watch, and serves what they say until one is no event. Returns the number of
/// events.
#[must_use]
pub fn watch(kind: ObjectKind, bytes: &[u8]) -> usize {
    serve_events(source::watch_events(kind, bytes))
}

/// Reads a page of a list, and serves what is on it. Returns the number of objects.
#[must_use]
pub fn list(kind: ObjectKind, bytes: &[u8]) -> usize {
    serve_events(source::list_events(kind, bytes))
}

/// What the streams of [`agent_stream`] are served.
const SERVED: &str = "
{kind: Service, apiVersion: v1, metadata: {name: web}, spec: {clusterIP: 10.96.0.1, ports: [{port: 80}]}}
---
{kind: Node, apiVersion: v1, metadata: {name: node-a}}
";

/// Gives the messages of an agent to a stream, without their gRPC prefixes. Returns how many of
/// them were accepted.
#[must_use]
pub fn agent_stream<'a>(messages: impl IntoIterator<Item = &'a [u8]>) -> usize {
    let (store, _) = store_of(source::manifest_events("web.yaml", SERVED.as_bytes()));
    serve::fuzz::stream(Arc::new(store), messages)
}

/// Reads whose certificate this is, in DER, as of a peer that an authority vouches for. True when
/// it says.
#[must_use]
pub fn certificate(der: &[u8]) -> bool {
    identity::from_certificate(der)
        .is_ok_and(|(identity, _)| !matches!(identity, identity::Identity::Unusable(_) | identity::Identity::Unchecked))
}

/// Through the model and the store, to the bytes that a new agent gets.
fn serve_events(events: Vec<Event>) -> usize {
    let (store, count) = store_of(events);
    let (_, mut cursor) = store.cursor(None::<&Resume>);
    while store.next_frame(&mut cursor).is_some() {}
    count
}

/// A store of what these events come to, and their number.
fn store_of(events: Vec<Event>) -> (Store, usize) {
    let (mut model, store) = (Model::default(), Store::new(Limits::default(), Arc::new(Metrics::default())));
    let count = events.len();
    for event in events {
        model.event(event, "");
    }
    let (changes, nodes) = model.take_changes();
    store.commit(Transaction { changes, nodes, ..Transaction::default() });
    store.problems(model.take_problems().unwrap_or_default());
    store.synced();
    (store, count)
}
