//! Writes the part of the corpus that agents send: messages, connections and certificates.

use std::{fs, path::Path};

use headgate_core::digest::Digests;
use headgate_proto::{digests_to_wire, frame, v1};
use rcgen::{CertificateParams, DnType, KeyPair, SanType};
use v1::agent_message::Body;

use super::{
    connections::{
        ACK, CONTINUATION, DATA, END_HEADERS, END_STREAM, HEADERS, PADDED, PING, PREFACE, PRIORITY, SETTINGS,
        WINDOW_UPDATE, WITH_PRIORITY, http2_frame,
    },
    control_plane,
};

/// The epoch of the replica in the fuzz target.
const OWN: u64 = 1;
/// The epoch of another replica.
const OTHER: u64 = 7;

fn message(body: Body) -> Vec<u8> {
    frame(&v1::AgentMessage { body: Some(body) }).to_vec()
}

fn hello(resume: Option<v1::Resume>) -> Vec<u8> {
    message(Body::Hello(v1::Hello {
        node_name: "node-a".into(),
        agent_version: "0.1.0".into(),
        status: Some(v1::AgentStatus { backend: "iptables".into(), degraded: vec!["no IPv6".into()], verified: None }),
        resume,
        ..v1::Hello::default()
    }))
}

fn resume(epoch: u64) -> v1::Resume {
    let position = |kind, position| v1::SourcePosition { kind, position };
    let digests = Some(digests_to_wire(&Digests::default()));
    v1::Resume {
        epoch,
        version: 1,
        positions: vec![position(1, 100), position(2, 90), position(9, 1)],
        digests,
        ..v1::Resume::default()
    }
}

/// Messages that an agent may send after its `Hello`.
fn answers() -> Vec<u8> {
    let rejection =
        v1::Rejection { resource: "Service shop/web".into(), field: "ports[0].port".into(), reason: "it is 0".into() };
    let ack = |version| v1::Ack {
        version,
        node_revision: 1,
        apply_microseconds: 900,
        services_planned: 1,
        objects_written: 2,
        ..Default::default()
    };
    [
        Body::Ack(ack(1)),
        Body::Nack(v1::Nack {
            version: 1,
            rejections: vec![rejection; 3],
            withdrawn: vec!["Service shop/old".into()],
            in_force: 3,
        }),
        Body::ApplyFailed(v1::ApplyFailed { version: 1, error: "iptables-restore: busy".into(), attempts: 2 }),
        Body::Status(v1::AgentStatus { backend: "ipvs".into(), ..v1::AgentStatus::default() }),
        Body::Answer(v1::Answer { id: 1, is_last: true, ..v1::Answer::default() }),
        Body::Barrier(v1::BarrierRequest {
            id: 1,
            address: vec![10, 244, 1, 7].into(),
            pod_uid: "6f1a2f0e-1b1c-4f39-9a0e-5d0c7d3f1b2a".into(),
            ..v1::BarrierRequest::default()
        }),
        Body::Barrier(v1::BarrierRequest { id: 1, is_cancelled: true, ..v1::BarrierRequest::default() }),
        Body::Ack(ack(2)),
    ]
    .into_iter()
    .flat_map(message)
    .collect()
}

/// A header field without indexing (RFC 7541, 6.2.2). Names and values must be shorter than 127
/// bytes.
fn field(name: &str, value: &str) -> Vec<u8> {
    let text = |text: &str| [&[u8::try_from(text.len()).unwrap()], text.as_bytes()].concat();
    [vec![0], text(name), text(value)].concat()
}

/// A connection with one request.
fn connection(path: &str, messages: &[u8], ends: bool) -> Vec<u8> {
    let block = header_block(path);
    let (first, rest) = messages.split_at(messages.len() / 2);
    [
        PREFACE.to_vec(),
        http2_frame(SETTINGS, 0, 0, &[0, 4, 0, 1, 0, 0]),
        http2_frame(WINDOW_UPDATE, 0, 0, &[0, 1, 0, 0]),
        http2_frame(HEADERS, END_HEADERS, 1, &block),
        http2_frame(DATA, 0, 1, first),
        http2_frame(DATA, if ends { END_STREAM } else { 0 }, 1, rest),
    ]
    .concat()
}

/// The headers of a request.
fn header_block(path: &str) -> Vec<u8> {
    // `:method: POST` and `:scheme: http`.
    let mut block = vec![0x83, 0x86];
    let fields = [(":authority", "replica"), ("content-type", "application/grpc"), ("te", "trailers")];
    block.extend(field(":path", path));
    fields.into_iter().for_each(|(name, value)| block.extend(field(name, value)));
    block
}

/// A connection that uses what is rare: a new size of the header table, headers that are added to
/// the table and then used again, headers in three frames, padding, priorities, and pings.
fn rare_connection(path: &str, messages: &[u8], ends: bool) -> Vec<u8> {
    // The size of the dynamic table becomes 0, and then 4,096 (RFC 7541, 6.3).
    let mut block = vec![0x20, 0x3f, 0xe1, 0x1f];
    block.extend(header_block(path));
    // `x-a: b` is added to the table (6.2.1), and used by its index, which is 62 (6.1).
    block.extend([0x40, 3, b'x', b'-', b'a', 1, b'b', 0xbe]);
    // `x-h: a` with the Huffman code of `a` and its padding (5.2).
    block.extend([0, 3, b'x', b'-', b'h', 0x81, 0x1f]);
    let (first, rest) = block.split_at(block.len() / 3);
    let (second, third) = rest.split_at(rest.len() / 2);
    // One byte for the length of the padding, five for the priority.
    let padded = [&[4, 0, 0, 0, 0, 16][..], first, &[0; 4]].concat();
    let data = [&[3][..], messages, &[0; 3]].concat();
    [
        PREFACE.to_vec(),
        http2_frame(SETTINGS, 0, 0, &[0, 1, 0, 0, 16, 0, 0, 5, 0, 0, 64, 0]),
        http2_frame(SETTINGS, ACK, 0, &[]),
        http2_frame(PING, 0, 0, &[7; 8]),
        http2_frame(PRIORITY, 0, 3, &[0, 0, 0, 0, 1]),
        http2_frame(HEADERS, PADDED | WITH_PRIORITY, 1, &padded),
        http2_frame(CONTINUATION, 0, 1, second),
        http2_frame(CONTINUATION, END_HEADERS, 1, third),
        http2_frame(DATA, if ends { PADDED | END_STREAM } else { PADDED }, 1, &data),
        http2_frame(WINDOW_UPDATE, 0, 1, &[0, 0, 1, 0]),
    ]
    .concat()
}

fn certificate(common_name: &str, uri: Option<&str>) -> Vec<u8> {
    let mut parameters = CertificateParams::default();
    parameters.distinguished_name.push(DnType::CommonName, common_name);
    if common_name.starts_with("system:node:") {
        parameters.distinguished_name.push(DnType::OrganizationName, "system:nodes");
    }
    if let Some(uri) = uri {
        parameters.subject_alt_names.push(SanType::URI(uri.try_into().unwrap()));
    }
    let key = KeyPair::generate().unwrap();
    parameters.self_signed(&key).unwrap().der().to_vec()
}

fn write(target: &str, files: &[(&str, Vec<u8>)]) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target);
    fs::create_dir_all(&folder).unwrap();
    for (name, bytes) in files {
        fs::write(folder.join(name), bytes).unwrap();
    }
}

/// Checks messages and certificates of the corpus. Writes the files only if
/// `HEADGATE_WRITE_CORPUS=1` is set. Set the variable after a change of the protocol.
#[test]
fn corpus_of_agents_is_written_when_asked_for() {
    let streams = [
        ("new.bin", [hello(None), answers()].concat()),
        ("resumed-by-log.bin", [hello(Some(resume(OWN))), answers()].concat()),
        ("resumed-by-digests.bin", [hello(Some(resume(OTHER))), answers()].concat()),
    ];
    for (name, bytes) in &streams {
        let messages = super::messages_of(bytes);
        assert_eq!(control_plane::agent_stream(messages.iter().map(Vec::as_slice)), messages.len(), "{name}");
    }
    let certificates = [
        ("node-by-uri.der", certificate("agent", Some("headgate://node/node-a"))),
        ("node-by-name.der", certificate("system:node:node-a", None)),
        ("reader.der", certificate("me", Some("headgate://reader/me"))),
    ];
    assert!(certificates.iter().all(|(_, der)| control_plane::certificate(der)));
    if std::env::var_os("HEADGATE_WRITE_CORPUS").is_none() {
        return;
    }
    let sync = "/headgate.v1.Discovery/Sync";
    let list = frame(&v1::ListServicesRequest::default());
    let check = [0, 0, 0, 0, 2, 0x0a, 0];
    let drain = frame(&v1::DrainPodRequest {
        namespace: "shop".into(),
        name: "web-1".into(),
        timeout_ms: 1,
        silent_ms: 1,
        ..Default::default()
    });
    let service = Some(v1::ServiceKey { namespace: "shop".into(), name: "web-1".into() });
    let question = frame(&v1::Question {
        wanted: v1::question::Wanted::Gone.into(),
        endpoints: vec![v1::QuestionEndpoint { service, address: vec![10, 244, 1, 7].into() }],
        wait_ms: 1,
        ..Default::default()
    });
    let connections = [
        ("sync.bin", connection(sync, &streams[0].1, false)),
        ("sync-resumed.bin", connection(sync, &streams[2].1, false)),
        ("inspect.bin", connection("/headgate.v1.Inspect/ListServices", &list, true)),
        ("drain-pod.bin", connection("/headgate.v1.Inspect/DrainPod", &drain, true)),
        ("question.bin", connection("/headgate.v1.Peers/Ask", &question, true)),
        ("sync-rare.bin", rare_connection(sync, &streams[0].1, false)),
        ("inspect-rare.bin", rare_connection("/headgate.v1.Inspect/ListServices", &list, true)),
        ("health.bin", connection("/grpc.health.v1.Health/Check", &check, true)),
    ];
    write("agent_stream", &streams);
    write("certificate", &certificates);
    write("connection", &connections);
}
