//! Writes the binary part of the corpus: messages of the control plane, and a state file.

use std::{fs, path::Path, sync::Arc};

use headgate_control_plane::{
    metrics::Metrics,
    model::{Sink as _, Transaction, TriggeredChange},
    objects::SourceKind,
    store::{Limits, Resume, Store},
};
use headgate_core::{
    Change, Conditions, Endpoint, EndpointPort, Hints, Placement, Protocol, Service, ServiceCidr, ServiceKey,
    ServicePort,
};
use headgate_node_agent::persist;
use headgate_proto::{ChangesBuilder, References, frame, v1};
use prost::Message as _;
use v1::server_message::Body;

const EPOCH: u64 = 7;

fn key(index: u8) -> ServiceKey {
    ServiceKey::new("shop", &format!("web-{index}"))
}

fn endpoint(index: u8, host: u8) -> Change {
    let mut ports = vec![EndpointPort::new("http", Protocol::Tcp, 8080)];
    if host == 3 {
        ports.push(EndpointPort {
            conditions: Some(Conditions { ready: false, serving: false, terminating: false }),
            placement: Some(Placement::on("node-3").into()),
            ..EndpointPort::new("metrics", Protocol::Tcp, 9090)
        });
    }
    let mut endpoint = Endpoint::new([10, 244, index, host].into(), ports.into());
    let mut placement = Placement { zone: Some("zone-1".into()), ..Placement::on(&format!("node-{}", host % 3)) };
    if host.is_multiple_of(2) {
        placement.hints = Some(Arc::new(Hints { zones: vec!["zone-1".into()], nodes: Vec::new() }));
        endpoint.conditions = Conditions { ready: false, serving: true, terminating: true };
    }
    endpoint.placement = placement.into();
    Change::Endpoint(key(index), endpoint)
}

pub(super) fn changes() -> Vec<Change> {
    let mut changes = vec![Change::ServiceCidr(ServiceCidr {
        name: "kubernetes".into(),
        cidrs: vec!["10.96.0.0/16".parse().unwrap()],
    })];
    for index in 0..4 {
        let cluster_ips = vec![[10, 96, 0, index + 1].into(), "fd00::1".parse().unwrap()];
        let ports = vec![ServicePort { name: "http".into(), protocol: Protocol::Tcp, port: 80, node_port: 30_000 }];
        let service = Service::new(key(index), cluster_ips, ports);
        changes.push(Change::from(service));
        changes.extend((1..5).map(|host| endpoint(index, host)));
    }
    changes
}

fn commit(store: &Store, changes: Vec<Change>, position: u64) {
    let changes = changes.into_iter().map(|change| TriggeredChange { change, trigger_unix_ms: 1_700_000_000_000 });
    let positions = vec![(SourceKind::Services, position), (SourceKind::EndpointSlices, position)];
    store.commit(Transaction { changes: changes.collect(), positions, ..Transaction::default() });
}

/// A stream with a snapshot and then batches.
fn stream() -> Vec<u8> {
    let store = Store::new(Limits::default(), Arc::new(Metrics::default()));
    commit(&store, changes(), 100);
    store.synced();
    let message = |body| frame(&v1::ServerMessage { body: Some(body) }).to_vec();
    let mut bytes = message(Body::Welcome(v1::Welcome {
        replica: "replica-0".into(),
        epoch: store.epoch(),
        resume: v1::welcome::ResumeMode::Full.into(),
        heartbeat_interval_ms: 10_000,
        behind_wait_ms: 30_000,
        head_version: Some(store.version()),
        source_state: v1::SourceState::Following.into(),
        replicas: vec!["192.0.2.1:7443".into(), "[2001:db8::1]:7443".into()],
    }));
    let (_, mut cursor) = store.cursor(None::<&Resume>);
    for step in 0..4 {
        while let Some(frame) = store.next_frame(&mut cursor) {
            bytes.extend_from_slice(&frame);
        }
        let next = match step {
            0 => vec![endpoint(1, 9)],
            1 => vec![Change::RemoveEndpoint(key(2), [10, 244, 2, 1].into()), Change::RemoveService(key(3))],
            _ => vec![endpoint(1, 2), endpoint(1, 3)],
        };
        commit(&store, next, 101 + step);
    }
    let node = v1::Node { name: "node-a".into(), zone: "zone-1".into(), ..v1::Node::default() };
    let position = Some(v1::SourcePosition { kind: v1::source_position::Kind::Nodes.into(), position: 100 });
    bytes.extend(message(Body::OwnNode(v1::OwnNode {
        revision: 1,
        node: Some(node),
        position,
        ..v1::OwnNode::default()
    })));
    bytes.extend(message(Body::Heartbeat(v1::Heartbeat {
        head_version: 4,
        source_age_ms: 12,
        source_state: v1::SourceState::CutOff.into(),
        snapshots_sent: 3,
        replicas: vec!["0.0.0.0:7443".into()],
    })));
    bytes.extend(message(Body::Drain(v1::Drain {
        reconnect_within_ms: 2000,
        reason: "this replica stops".into(),
        for_balance: true,
    })));
    bytes
}

/// A state file in two parts, without its checksum.
fn state_file() -> Vec<u8> {
    let mut builder = ChangesBuilder::default();
    changes().iter().for_each(|change| builder.push(change, 0, References::default()));
    let node = Some(v1::Node { name: "node-a".into(), ..v1::Node::default() });
    let positions = vec![v1::SourcePosition { kind: 1, position: 100 }];
    let last = persist::StatePart {
        changes: None,
        node_name: "node-a".into(),
        node: Some(v1::OwnNode { revision: 1, node, ..v1::OwnNode::default() }),
        point: Some(v1::Resume { epoch: EPOCH, version: 2, positions, ..v1::Resume::default() }),
    };
    let first = persist::StatePart { changes: Some(builder.finish()), ..persist::StatePart::default() };
    [persist::MAGIC.to_vec(), first.encode_length_delimited_to_vec(), last.encode_length_delimited_to_vec()].concat()
}

/// Checks a stream and a state file of the corpus. Writes the files only if
/// `HEADGATE_WRITE_CORPUS=1` is set. Set the variable after a change of the protocol or of the file
/// format.
#[test]
fn corpus_of_bytes_is_written_when_asked_for() {
    let (stream, state) = (stream(), state_file());
    assert!(super::node_agent::state_file(&state) && !super::messages_of(&stream).is_empty());
    if std::env::var_os("HEADGATE_WRITE_CORPUS").is_some() {
        let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
        fs::write(corpus.join("server_stream/snapshot-and-batches.bin"), stream).unwrap();
        fs::write(corpus.join("state/two-parts.bin"), state).unwrap();
    }
}
