#![allow(clippy::unwrap_used)]
use std::{net::Ipv4Addr, time::Duration};

use headgate_core::{Change, Service, ServiceKey};
use headgate_proto::frame;
use proptest::prelude::*;

use super::*;
use crate::{
    identity::Identity,
    metrics::Metrics,
    model::{Sink as _, Transaction, TriggeredChange},
    serve::{
        Settings,
        transport::sync_connection::frame::{FrameHeader, PREFACE, kind},
    },
    store::{Limits, Store},
};

struct Rig {
    streams: Arc<Streams>,
    http2: Http2,
    now: Instant,
}

fn wire(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

fn hello() -> Vec<u8> {
    let hello = v1::Hello { node_name: "n1".into(), ..v1::Hello::default() };
    frame(&v1::AgentMessage { body: Some(v1::agent_message::Body::Hello(hello)) }).to_vec()
}

impl Rig {
    /// Returns a connection whose request has arrived.
    fn new(settings: Settings) -> Self {
        let metrics = Arc::new(Metrics::default());
        let store = Arc::new(Store::new(Limits::default(), Arc::clone(&metrics)));
        store.synced();
        let streams = Streams::new(store, metrics, settings);
        let peer = Peer { address: ([127, 0, 0, 1], 1).into(), identity: Identity::Unchecked, not_after: None };
        let now = Instant::now();
        let http2 = Http2::new(Arc::clone(&streams), peer, Arc::new(Signal::new()), now);
        let mut rig = Self { streams, http2, now };
        rig.receive(PREFACE);
        assert_eq!(rig.written(), [(kind::SETTINGS, 0, Vec::new())]);
        rig.receive(&wire(kind::HEADERS, 4, 1, b"not decoded here"));
        rig
    }

    fn receive(&mut self, bytes: &[u8]) {
        self.http2.receive(bytes, self.now);
    }

    /// Returns a connection whose `Hello` was accepted.
    fn following() -> Self {
        let mut rig = Self::new(Settings::default());
        rig.receive(&wire(kind::DATA, 0, 1, &hello()));
        let kinds: Vec<u8> = rig.written().iter().map(|frame| frame.0).collect();
        assert!(kinds.starts_with(&[kind::HEADERS, kind::DATA]), "{kinds:?}");
        rig
    }

    fn put(&self, number: u16) {
        let [high, low] = number.to_be_bytes();
        let key = ServiceKey::new("default", &format!("service-{number}-{}", "x".repeat(40)));
        let service = Service::new(key, vec![Ipv4Addr::new(10, 96, high, low).into()], Vec::new());
        let change = TriggeredChange { change: Change::from(service), trigger_unix_ms: 0 };
        self.streams.context.store.commit(Transaction { changes: vec![change], ..Transaction::default() });
    }

    /// Returns kind, flags and payload of the frames to write.
    fn written(&mut self) -> Vec<(u8, u8, Vec<u8>)> {
        let mut out = Vec::new();
        self.http2.fill(&mut out, 16_384, self.now);
        let (mut rest, mut frames) = (&out[..], Vec::new());
        while let Some(header) = rest.first_chunk().map(FrameHeader::parse) {
            let end = HEADER_BYTES + header.length as usize;
            frames.push((header.kind, header.flags, rest[HEADER_BYTES..end].to_vec()));
            rest = &rest[end..];
        }
        assert!(rest.is_empty());
        frames
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
        self.http2.keep_time(self.now);
    }
}

fn data_bytes(frames: &[(u8, u8, Vec<u8>)]) -> usize {
    frames.iter().filter(|frame| frame.0 == kind::DATA).map(|frame| frame.2.len()).sum()
}

#[test]
fn no_message_is_taken_from_the_cursor_while_the_window_is_full() {
    let mut rig = Rig::new(Settings::default());
    // The window of a stream has room for ten bytes.
    rig.receive(&wire(kind::SETTINGS, 0, 0, &[0, 4, 0, 0, 0, 10]));
    rig.receive(&wire(kind::DATA, 0, 1, &hello()));
    assert_eq!(data_bytes(&rig.written()), 10);
    for number in 0..100 {
        rig.put(number);
    }
    assert_eq!(data_bytes(&rig.written()), 0);
    // With more room, the server sends the rest of `Welcome`, and then one step with all changes
    // instead of a step for each change.
    rig.receive(&wire(kind::WINDOW_UPDATE, 0, 1, &4_000_u32.to_be_bytes()));
    assert_eq!(data_bytes(&rig.written()), 4_000);
    rig.receive(&wire(kind::WINDOW_UPDATE, 0, 1, &60_000_u32.to_be_bytes()));
    let rest = data_bytes(&rig.written());
    assert!((1_000..20_000).contains(&rest), "{rest}");
    // An initial window of 0 reduces the room by ten bytes, but the rest of the room stays.
    rig.receive(&wire(kind::SETTINGS, 0, 0, &[0, 4, 0, 0, 0, 0]));
    rig.put(200);
    assert!(data_bytes(&rig.written()) > 0, "room from window updates is kept");
}

#[test]
fn a_silent_client_receives_a_ping_and_is_then_disconnected() {
    let mut rig = Rig::following();
    rig.pass(KEEPALIVE);
    let ping = (kind::PING, 0, b"headgate".to_vec());
    assert!(rig.written().contains(&ping));
    rig.http2.heard(rig.now);
    rig.pass(KEEPALIVE / 2);
    assert!(!rig.written().contains(&ping));
    rig.pass(KEEPALIVE / 2);
    assert!(rig.written().contains(&ping));
    rig.pass(KEEPALIVE);
    assert!(rig.http2.is_over());
    assert_eq!(rig.streams.fleet.len(), 0);
}

#[test]
fn a_stream_without_hello_ends_after_the_timeout() {
    let mut rig = Rig::new(Settings::default());
    rig.written();
    rig.pass(rig.streams.context.settings.hello_timeout);
    let frames = rig.written();
    let kinds: Vec<u8> = frames.iter().map(|frame| frame.0).collect();
    assert_eq!(kinds, [kind::HEADERS, kind::RST_STREAM, kind::GOAWAY]);
    assert!(String::from_utf8_lossy(&frames[0].2).contains("no%20Hello"));
    assert!(rig.http2.is_closing() && !rig.http2.is_over());
    rig.pass(LINGER * 2);
    assert!(rig.http2.is_over(), "the server does not wait for a client that does not close the connection");
}

proptest! {
    #[test]
    fn the_answers_to_any_bytes_are_bounded(
        frames in prop::collection::vec((0_u8..11, any::<u8>(), 0_u32..4, prop::collection::vec(any::<u8>(), 0..24)), 0..40),
        reads in any::<bool>(),
    ) {
        let mut rig = Rig::following();
        for (kind, flags, stream, payload) in frames {
            rig.receive(&wire(kind, flags, stream, &payload));
            prop_assert!(rig.http2.answers.capacity() <= 4 * MAX_ANSWER_BYTES);
            if reads {
                rig.written();
            }
        }
        rig.pass(rig.streams.context.settings.heartbeat_interval);
        rig.written();
    }
}
