//! Takes bytes that would come from an API server, a file or a peer, and processes them like the
//! control plane.
//!
//! Each function must return for any input. The memory that it uses must be bounded by the size of
//! the input. The result shows whether the input was valid, so that a test can check that its input
//! passes the first validation.

use std::sync::Arc;

use headgate_control_plane::{
    identity,
    metrics::Metrics,
    model::{Event, Model, ModelSettings, Sink as _},
    objects::ObjectKind,
    serve, source,
    store::{Limits, Resume, Store},
};
use tonic::transport::{Channel, Endpoint};

/// Reads a manifest like the source `files`, and serves its objects. `is_json` says whether the
/// file has the extension `.json`. Returns the number of objects.
pub(super) fn manifest(bytes: &[u8], is_json: bool) -> usize {
    let events = source::manifest_events(if is_json { "web.json" } else { "web.yaml" }, bytes);
    serve_events(events)
}

/// Reads the lines of a watch up to the first line that cannot be decoded, and serves the events.
/// Returns the number of events.
pub(super) fn watch(kind: ObjectKind, bytes: &[u8]) -> usize {
    serve_events(source::watch_events(kind, bytes))
}

/// Reads a page of a list, and serves its objects. Returns the number of objects.
pub(super) fn list(kind: ObjectKind, bytes: &[u8]) -> usize {
    serve_events(source::list_events(kind, bytes))
}

/// Serves a Service and a slice with this annotation. In `key`, an underscore stands for the slash.
/// The newline at the end of a file is no part of the value. Returns whether the annotation has no
/// problem.
pub(super) fn annotation(key: &str, value: &str) -> bool {
    let value = value.strip_suffix('\n').unwrap_or(value);
    let annotations = serde_json::json!({key.replacen('_', "/", 1): value});
    let metadata = |name: &str| serde_json::json!({"name": name, "namespace": "shop", "annotations": annotations});
    let list = |kind: &str, item: serde_json::Value| serde_json::json!({"kind": kind, "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": [item]});
    let service = serde_json::json!({
        "metadata": metadata("web"), "spec": {"clusterIP": "10.96.0.1", "ports": [{"port": 80, "protocol": "TCP"}]},
    });
    let mut slice = serde_json::json!({
        "metadata": metadata("web-1"), "addressType": "IPv4", "ports": [{"name": "", "port": 8080, "protocol": "TCP"}],
        "endpoints": [{"addresses": ["10.244.1.7"]}, {"addresses": ["10.244.1.8"]}],
    });
    slice["metadata"]["labels"] = serde_json::json!({"kubernetes.io/service-name": "web"});
    let read = |kind, list: &serde_json::Value| source::list_events(kind, list.to_string().as_bytes());
    let mut events = read(ObjectKind::Service, &list("ServiceList", service));
    events.extend(read(ObjectKind::EndpointSlice, &list("EndpointSliceList", slice)));
    let (mut model, store) = (
        Model::new(ModelSettings { reads_pods: true, ..ModelSettings::default() }),
        Store::new(Limits::default(), Arc::new(Metrics::default())),
    );
    for event in events {
        model.event(event, "");
    }
    store.commit(model.take());
    store.synced();
    model.take_problems().is_none_or(|problems| problems.is_empty())
}

/// The objects that [`agent_stream`] serves.
const SERVED: &str = "
{kind: Service, apiVersion: v1, metadata: {name: web}, spec: {clusterIP: 10.96.0.1, ports: [{port: 80}]}}
---
{kind: Node, apiVersion: v1, metadata: {name: node-a}}
";

/// Passes the messages of an agent, without their gRPC prefixes, to a stream. Returns the number of
/// accepted messages.
pub(super) fn agent_stream<'a>(messages: impl IntoIterator<Item = &'a [u8]>) -> usize {
    let (store, _) = store_of(source::manifest_events("web.yaml", SERVED.as_bytes()));
    serve::fuzz::stream(Arc::new(store), messages)
}

/// A channel that is never used.
pub(super) fn unused_channel() -> Channel {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async { Endpoint::from_static("http://127.0.0.1:1").connect_lazy() })
}

/// Passes the messages of another replica, without their gRPC prefixes, to a replica. Returns the
/// number of messages that it took in.
pub(super) fn peer_stream<'a>(channel: &Channel, messages: impl IntoIterator<Item = &'a [u8]>) -> usize {
    let (store, _) = store_of(source::manifest_events("web.yaml", SERVED.as_bytes()));
    serve::fuzz::replica(Arc::new(store), channel, messages)
}

/// Reads the identity in a certificate (DER), without verifying the certificate chain. Returns
/// whether the certificate names its holder.
pub(super) fn certificate(der: &[u8]) -> bool {
    identity::from_certificate(der)
        .is_ok_and(|(identity, _)| !matches!(identity, identity::Identity::Unusable(_) | identity::Identity::Unchecked))
}

/// Passes events through the model and the store, and encodes the result for a new agent. Returns
/// the number of events.
fn serve_events(events: Vec<Event>) -> usize {
    let (store, count) = store_of(events);
    let (_, mut cursor) = store.cursor(None::<&Resume>);
    while store.next_frame(&mut cursor).is_some() {}
    count
}

/// A store with the state after these events, and the number of events.
fn store_of(events: Vec<Event>) -> (Store, usize) {
    let (mut model, store) = (
        Model::new(ModelSettings { reads_pods: true, ..ModelSettings::default() }),
        Store::new(Limits::default(), Arc::new(Metrics::default())),
    );
    let count = events.len();
    for event in events {
        model.event(event, "");
    }
    store.commit(model.take());
    store.problems(model.take_problems().unwrap_or_default());
    store.synced();
    (store, count)
}
