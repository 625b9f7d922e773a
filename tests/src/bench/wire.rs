//! `wire`: the bytes that one node receives for an endpoint change. The bench measures slices of 10
//! and of 100 endpoints, with a single change and with 1,000 changes in one burst.
//!
//! The bench counts the TCP payload for one agent: the message, its gRPC prefix, the headers of its
//! HTTP/2 DATA frames, and the overhead of its TLS 1.3 records. Names have realistic lengths, and
//! versions and resourceVersions are as large as in an old cluster. The anchor is the TCP payload
//! that a watch of the API receives for this change: the whole EndpointSlice as JSON, once for each
//! changed slice. This payload includes the same kinds of overhead, except the gRPC prefix.
//!
//! The bytes are equal in every run, so a test also checks the goals.

use std::sync::Arc;

use anyhow::{Context as _, Result, bail, ensure};
use bytes::Bytes;
use headgate_control_plane::{
    metrics::Metrics,
    model::{Sink as _, Transaction, TriggeredChange},
    objects::SourceKind,
    store::{Cursor, Limits, Store},
};
use headgate_core::{Change, Endpoint, EndpointPort, Placement, Protocol, Service, ServiceKey, ServicePort};
use headgate_proto::{PREFIX_BYTES, v1};
use prost::Message as _;
use serde_json::{Value, json};

use super::report::Figure;

/// The size of an HTTP/2 frame header, and the default SETTINGS_MAX_FRAME_SIZE (RFC 9113, 4.1 and
/// 6.5.2).
const HTTP2_FRAME_HEADER_BYTES: usize = 9;
const HTTP2_FRAME_PAYLOAD_BYTES: usize = 16_384;
/// The overhead of a TLS 1.3 record, and its largest plaintext (RFC 8446, 5.2). The overhead
/// consists of a header of 5 bytes, the inner content type of one byte, and the AEAD tag of 16
/// bytes.
const TLS_RECORD_OVERHEAD_BYTES: usize = 5 + 1 + 16;
const TLS_RECORD_PLAINTEXT_BYTES: usize = 16_384;

/// The goals for a single change, and for each change of a burst.
const ALONE_BYTES: f64 = 136.0;
const BURST_BYTES: f64 = 42.0;
const BURST: u32 = 1_000;

/// A version after 20 changes a second for nearly three months.
const OLD_VERSION: u64 = 150_000_000;
/// A resourceVersion of a cluster that has run for years.
const RESOURCE_VERSION: u64 = 1_900_000_000;
const TRIGGER_UNIX_MS: u64 = 1_790_000_000_000;

const NODES: u32 = 150;
const NAMESPACES: [&str; 5] = ["payments", "checkout-backend", "search", "identity-and-access-prod", "web-frontend"];
const SERVICES: [&str; 6] =
    ["cart-api", "recommendation-service", "ledger", "notification-dispatcher", "user-profile-cache-redis", "orders"];
const ZONES: [&str; 3] = ["eu-central-1a", "eu-central-1b", "eu-central-1c"];

/// The address family of the cluster's pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pods {
    V4,
    V6,
}

/// Runs the bench.
///
/// # Errors
/// A goal is missed, or a message is unexpected.
pub fn run() -> Result<Vec<Figure>> {
    let mut figures = Vec::new();
    for pods in [Pods::V4, Pods::V6] {
        for slice in [10, 100] {
            alone(pods, slice, &mut figures)?;
            burst(pods, slice, &mut figures)?;
        }
    }
    let missed: Vec<&Figure> =
        figures.iter().filter(|figure| goal(&figure.name).is_some_and(|goal| figure.value > goal)).collect();
    ensure!(missed.is_empty(), "these figures miss their goals: {missed:?}");
    Ok(figures)
}

/// The goal of a figure, or `None` if it has no goal. The first endpoint on a node has no goal,
/// because its message contains the node's name.
fn goal(name: &str) -> Option<f64> {
    let [_, kind, what, ..] = name.split('/').collect::<Vec<_>>()[..] else { return None };
    match kind {
        "alone" if what == "first-on-its-node" => None,
        "alone" => Some(ALONE_BYTES),
        _ => Some(BURST_BYTES),
    }
}

fn name(kind: &str, what: &str, slice: u32, pods: Pods) -> String {
    let family = if pods == Pods::V4 { "ipv4" } else { "ipv6" };
    format!("wire/{kind}/{what}/slices-of-{slice}/{family}")
}

fn figure(name: String, bytes: usize, changes: u32, json_bytes: usize) -> Figure {
    let each = |bytes: usize| bytes as f64 / f64::from(changes);
    Figure::against(name, each(bytes), "bytes", "EndpointSlices in JSON", each(json_bytes))
}

/// Measures single changes.
fn alone(pods: Pods, slice: u32, figures: &mut Vec<Figure>) -> Result<()> {
    let mut replica = Replica::new(pods, slice, 50)?;
    let json = on_tcp(slice_event(&key(7), &replica.slice(7, slice)).to_string().len() + 1);
    let mut not_ready = replica.endpoint(7, 3);
    (not_ready.conditions.ready, not_ready.conditions.serving) = (false, false);
    let mut first_on_its_node = replica.endpoint(7, slice + 1);
    Arc::make_mut(&mut first_on_its_node.placement).node = Some("ip-10-7-211-34.ec2.internal".into());
    let removed = Change::RemoveEndpoint(key(7), replica.endpoint(7, 4).address);
    let changes = [
        ("becomes-unready", Change::Endpoint(key(7), not_ready)),
        ("new-endpoint", Change::Endpoint(key(7), replica.endpoint(7, slice))),
        ("removed", removed),
        ("first-on-its-node", Change::Endpoint(key(7), first_on_its_node)),
    ];
    for (what, change) in changes {
        let bytes = replica.commit(vec![change])?;
        figures.push(figure(name("alone", what, slice, pods), bytes, 1, json));
    }
    Ok(())
}

/// Measures bursts of 1,000 new endpoints: whole slices, and one endpoint in each of 1,000
/// Services.
fn burst(pods: Pods, slice: u32, figures: &mut Vec<Figure>) -> Result<()> {
    let json_of = |replica: &Replica, services: u32| -> usize {
        (0..services).map(|i| on_tcp(slice_event(&key(i), &replica.slice(i, slice)).to_string().len() + 1)).sum()
    };
    let services = BURST / slice;
    let mut replica = Replica::new(pods, slice, services)?;
    let json = json_of(&replica, services);
    let changes: Vec<Change> = (0..services)
        .flat_map(|i| (0..slice).map(move |j| (i, slice + j)))
        .map(|(i, j)| Change::Endpoint(key(i), replica.endpoint(i, j)))
        .collect();
    let bytes = replica.commit(changes)?;
    figures.push(figure(name("burst", "whole-slices", slice, pods), bytes, BURST, json));

    // The number of other endpoints does not change the messages, so a small number saves time.
    let mut replica = Replica::new(pods, slice.min(10), BURST)?;
    let json = json_of(&replica, BURST);
    let changes: Vec<Change> = (0..BURST).map(|i| Change::Endpoint(key(i), replica.endpoint(i, slice))).collect();
    let bytes = replica.commit(changes.clone())?;
    figures.push(figure(name("burst", "one-in-each-service", slice, pods), bytes, BURST, json));

    // The endpoints are also added in 1,000 steps, for a busy agent that receives all steps at
    // once.
    let mut replica = Replica::new(pods, slice.min(10), BURST)?;
    for change in changes {
        replica.put(vec![change]);
    }
    let bytes = replica.take()?;
    figures.push(figure(name("caught-up", "one-in-each-service", slice, pods), bytes, BURST, json));
    Ok(())
}

/// A store, and the cursor of a stream. At the start of each measurement, the stream has received
/// everything.
struct Replica {
    store: Store,
    cursor: Cursor,
    pods: Pods,
    resource_version: u64,
}

impl Replica {
    fn new(pods: Pods, slice: u32, services: u32) -> Result<Self> {
        let store = Store::new(Limits::default(), Arc::new(Metrics::default()));
        store.synced();
        let cursor = store.cursor(None).1;
        let mut replica = Self { store, cursor, pods, resource_version: RESOURCE_VERSION };
        let endpoints = |i| (0..slice).map(move |j| (i, j));
        let changes = (0..services).flat_map(|i| {
            let of_service = endpoints(i).map(|(i, j)| Change::Endpoint(key(i), replica.endpoint(i, j)));
            std::iter::once(service(i)).chain(of_service).collect::<Vec<_>>()
        });
        let changes: Vec<Change> = changes.collect();
        replica.put(changes);
        while replica.store.next_frame(&mut replica.cursor).is_some() {}
        Ok(replica)
    }

    fn put(&mut self, changes: Vec<Change>) {
        self.resource_version += 17;
        // The trigger time comes from a pod's condition, whose times have whole seconds.
        let trigger_unix_ms = TRIGGER_UNIX_MS + self.resource_version / 1_700 * 1_000;
        let changes = changes.into_iter().map(|change| TriggeredChange { change, trigger_unix_ms });
        self.store.commit(Transaction {
            changes: changes.collect(),
            positions: vec![(SourceKind::EndpointSlices, self.resource_version)],
            ..Transaction::default()
        });
    }

    /// The TCP payload of all pending messages of the stream, with version numbers as in a replica
    /// that has run for months.
    fn take(&mut self) -> Result<usize> {
        let mut bytes = 0;
        while let Some(frame) = self.store.next_frame(&mut self.cursor) {
            bytes += on_tcp(aged(&frame)?);
        }
        if bytes == 0 {
            bail!("no message for a change");
        }
        Ok(bytes)
    }

    fn commit(&mut self, changes: Vec<Change>) -> Result<usize> {
        self.put(changes);
        self.take()
    }

    fn slice(&self, service: u32, slice: u32) -> Vec<Endpoint> {
        (0..slice).map(|j| self.endpoint(service, j)).collect()
    }

    fn endpoint(&self, service: u32, number: u32) -> Endpoint {
        let [_, high, middle, low] = (service * 256 + number).to_be_bytes();
        let address = match self.pods {
            Pods::V4 => [10, high, middle, low].into(),
            Pods::V6 => [0xfd12, 0x3456, 0x789a, 0, 0, 0, u16::from_be_bytes([high, middle]), low.into()].into(),
        };
        let port = |name: &str, port| EndpointPort::new(name, Protocol::Tcp, port);
        let mut endpoint = Endpoint::new(address, Arc::from([port("http", 8080), port("metrics", 9090)]));
        let node = (service * 7 + number * 13) % NODES;
        let zone = ZONES.get(node as usize % ZONES.len()).copied().map(Into::into);
        let node = format!("ip-10-0-{}-{}.ec2.internal", node / 50 * 64, 100 + node % 50);
        endpoint.placement = Placement { zone, ..Placement::on(&node) }.into();
        endpoint
    }
}

/// The length of a message with its gRPC prefix, with version numbers as in a replica that has run
/// for months.
fn aged(frame: &Bytes) -> Result<usize> {
    let message = v1::ServerMessage::decode(frame.get(PREFIX_BYTES..).context("no gRPC prefix")?)?;
    let Some(v1::server_message::Body::Batch(mut batch)) = message.body else { bail!("not a batch: {message:?}") };
    batch.version += OLD_VERSION;
    batch.follows_version = batch.follows_version.map(|version| version + OLD_VERSION);
    let message = v1::ServerMessage { body: Some(v1::server_message::Body::Batch(batch)) };
    Ok(PREFIX_BYTES + message.encoded_len())
}

/// The TCP payload for `bytes` bytes of HTTP/2 payload that are sent together.
fn on_tcp(bytes: usize) -> usize {
    let on_http2 = bytes + bytes.div_ceil(HTTP2_FRAME_PAYLOAD_BYTES) * HTTP2_FRAME_HEADER_BYTES;
    on_http2 + on_http2.div_ceil(TLS_RECORD_PLAINTEXT_BYTES) * TLS_RECORD_OVERHEAD_BYTES
}

fn key(service: u32) -> ServiceKey {
    let pick = |names: &[&'static str], number: u32| names[number as usize % names.len()];
    let namespace = pick(&NAMESPACES, service);
    match service / 30 {
        0 => ServiceKey::new(namespace, pick(&SERVICES, service)),
        more => ServiceKey::new(namespace, &format!("{}-{more}", pick(&SERVICES, service))),
    }
}

fn service(number: u32) -> Change {
    let [_, _, high, low] = number.to_be_bytes();
    let port = ServicePort { name: "http".into(), protocol: Protocol::Tcp, port: 80, node_port: 0 };
    Change::from(Service::new(key(number), vec![[172, 20, high, low].into()], vec![port]))
}

/// The watch event that a kube-proxy receives for a change of a slice. The event contains the whole
/// slice.
pub(crate) fn slice_event(key: &ServiceKey, endpoints: &[Endpoint]) -> Value {
    let name = key.name.as_str();
    let endpoint = |(i, endpoint): (usize, &Endpoint)| {
        json!({
            "addresses": [endpoint.address],
            "conditions": {"ready": true, "serving": true, "terminating": false},
            "nodeName": endpoint.placement.node, "zone": endpoint.placement.zone,
            "targetRef": {"kind": "Pod", "namespace": key.namespace.as_str(), "name": format!("{name}-7d4b9c6f5-x{i:04}"), "uid": "0b0f4d5e-3c52-4c0e-9a77-d9a1f5b8c1aa"},
        })
    };
    let port = |port: &EndpointPort| json!({"name": port.name.as_str(), "protocol": "TCP", "port": port.port});
    json!({"type": "MODIFIED", "object": {
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {
            "name": format!("{name}-x7k2p"), "namespace": key.namespace.as_str(), "generateName": format!("{name}-"), "resourceVersion": "1001", "generation": 7,
            "uid": "5a1c6f0e-8f3a-4c55-b9d0-0b3a1f0f8e11", "creationTimestamp": "2026-01-01T00:00:00Z",
            "labels": {"kubernetes.io/service-name": name, "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io"},
            "annotations": {"endpoints.kubernetes.io/last-change-trigger-time": "2026-01-01T00:00:00Z"},
            "ownerReferences": [{"apiVersion": "v1", "kind": "Service", "name": name, "uid": "c9b7e2f4-1f60-4f0e-a3f5-2f1d6f0c9b10", "controller": true, "blockOwnerDeletion": true}],
        },
        "ports": endpoints.first().map(|endpoint| endpoint.ports.iter().map(port).collect::<Vec<_>>()),
        "endpoints": endpoints.iter().enumerate().map(endpoint).collect::<Vec<_>>(),
    }})
}
