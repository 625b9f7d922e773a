//! Tests of connections on the level of HTTP/2 (RFC 9113), most of them on the port for agents. The
//! settings of some clients are unusual, and other clients break the protocol. `sync_stream` tests
//! the streams on these connections.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::{Buf as _, Bytes, BytesMut};
use h2::{RecvStream, SendStream, client::SendRequest};
use headgate_control_plane::{
    model::Sink as _,
    serve::{Security, Settings},
};
use headgate_core::{Change, Dirty, State, reference::Referable};
use headgate_proto::{
    PREFIX_BYTES, frame,
    v1::{self, inspect_client::InspectClient, peers_client::PeersClient, server_message::Body},
};
use http::Request;
use prost::Message as _;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    task::JoinHandle,
    time::timeout,
};
use tonic::{Code, Response, Status, Streaming};
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};
use tonic_reflection::pb::v1::{
    ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
    server_reflection_request::MessageRequest,
};

use crate::{
    client::{Client, GUARD, channel, eventually, hello, message},
    replica::{self, Replica, cluster, service},
};

/// A stream on a connection of the `h2` crate.
struct Stream {
    sender: SendStream<Bytes>,
    body: RecvStream,
    unread: BytesMut,
    state: State,
    staged: Vec<Change>,
    decoder: headgate_proto::Decoder,
    version: u64,
}

impl Stream {
    async fn open(replica: &Replica, node: &str, settings: &h2::client::Builder) -> Self {
        let socket = TcpStream::connect(replica.running.local_addr).await.unwrap();
        let (mut requests, connection) = settings.handshake(socket).await.unwrap();
        tokio::spawn(connection);
        let (response, mut sender) = requests.send_request(sync_request(), false).unwrap();
        sender.send_data(frame(&hello(node, None)), false).unwrap();
        let response = timeout(GUARD, response).await.unwrap().unwrap();
        assert_eq!(
            (response.status(), &response.headers()["content-type"]),
            (http::StatusCode::OK, &"application/grpc".parse::<http::HeaderValue>().unwrap())
        );
        Self {
            sender,
            body: response.into_body(),
            unread: BytesMut::new(),
            state: State::default(),
            staged: Vec::new(),
            decoder: headgate_proto::Decoder::default(),
            version: 0,
        }
    }

    async fn message(&mut self) -> Option<Body> {
        loop {
            if let Some(message) = take_message(&mut self.unread) {
                return v1::ServerMessage::decode(message).unwrap().body;
            }
            let bytes = timeout(GUARD, self.body.data()).await.expect("no message arrived")?.unwrap();
            // Release the exact number of bytes that were used.
            self.body.flow_control().release_capacity(bytes.len()).unwrap();
            self.unread.extend_from_slice(&bytes);
        }
    }

    async fn reach(&mut self, version: u64) {
        while self.version < version {
            match self.message().await.expect("the stream ended") {
                Body::SnapshotChunk(chunk) => self.stage(chunk.changes.unwrap()),
                Body::SnapshotEnd(end) => {
                    self.apply(end.version);
                    self.decoder.refer_to(Referable::of(&self.state));
                }
                Body::Batch(batch) => {
                    self.stage(batch.changes.unwrap());
                    self.apply(batch.version);
                }
                _ => {}
            }
        }
    }

    fn stage(&mut self, changes: v1::Changes) {
        self.staged.extend(self.decoder.changes(changes).unwrap().0);
    }

    fn apply(&mut self, version: u64) {
        self.version = version;
        for change in self.staged.drain(..) {
            self.state.apply(change, &mut Dirty::default());
        }
    }

    async fn trailers(mut self) -> http::HeaderMap {
        while self.message().await.is_some() {}
        timeout(GUARD, self.body.trailers()).await.unwrap().unwrap().unwrap()
    }
}

/// The first message of `unread`, without its prefix, if it is complete.
fn take_message(unread: &mut BytesMut) -> Option<BytesMut> {
    let prefix = unread.first_chunk::<PREFIX_BYTES>()?;
    let length = u32::from_be_bytes([prefix[1], prefix[2], prefix[3], prefix[4]]) as usize;
    if unread.len() < PREFIX_BYTES + length {
        return None;
    }
    unread.advance(PREFIX_BYTES);
    Some(unread.split_to(length))
}

fn sync_request() -> Request<()> {
    post("/headgate.v1.Discovery/Sync")
}

fn post(path: &str) -> Request<()> {
    let uri = format!("http://replica.example{path}");
    Request::post(uri).header("content-type", "application/grpc").header("te", "trailers").body(()).unwrap()
}

#[tokio::test]
async fn clients_with_unusual_settings_receive_everything() {
    let replica = Replica::start().await;
    replica.put(cluster(300));
    let builder = h2::client::Builder::new;
    let cases = [
        ("small windows", builder().initial_window_size(100).clone()),
        ("a window of one byte", builder().initial_window_size(1).clone()),
        ("large windows and frames", builder().initial_window_size(1 << 30).max_frame_size(1 << 20).clone()),
        ("no header table", builder().header_table_size(0).max_header_list_size(4_096).clone()),
    ];
    for (number, (what, settings)) in cases.iter().enumerate() {
        let mut stream = Stream::open(&replica, &format!("n{number}"), settings).await;
        stream.reach(1).await;
        assert!(*stream.state.digests() == replica.store.digests(), "{what}");
    }
    assert_eq!(replica.metric("headgate_streams_rejected_total{reason=\"http2_violation\"}"), 0);
    replica.running.stop().await;
}

#[tokio::test]
async fn a_stream_ends_with_its_status_in_trailers() {
    let replica = Replica::start().await;
    let settings = h2::client::Builder::new();
    let mut stream = Stream::open(&replica, "n1", &settings).await;
    stream.sender.send_data(frame(&hello("n1", None)), false).unwrap();
    let trailers = stream.trailers().await;
    assert_eq!(trailers["grpc-status"], "3");
    assert!(trailers["grpc-message"].to_str().unwrap().contains("Hello"), "{trailers:?}");

    let mut stream = Stream::open(&replica, "n1", &settings).await;
    stream.sender.send_data(Bytes::new(), true).unwrap();
    assert_eq!(stream.trailers().await["grpc-status"], "0");
    replica.running.stop().await;
}

#[tokio::test]
async fn each_port_tells_a_client_of_the_wrong_one_which_port_is_right() {
    let replica = Replica::start().await;
    let (agents, inspect) = (replica.running.local_addr, replica.running.inspect_addr);
    let error = Client::open(channel(inspect).await, "n1", None).await.err().unwrap();
    let right = format!("agents connect to port {}, --listen", agents.port());
    assert!(error.code() == Code::Unimplemented && error.message().contains(&right), "{error}");
    let connect = || channel(agents);
    let named = v1::WatchRequest { namespace: "default".into(), name: "web".into() };
    let checked = HealthCheckRequest { service: "headgate.v1.Discovery".into() };
    let peer = v1::PeerIdentity { replica: "replica-2".into(), epoch: 7 };
    let list = MessageRequest::ListServices(String::new());
    let listed = tokio_stream::once(ServerReflectionRequest { host: String::new(), message_request: Some(list) });
    let refused = [
        InspectClient::new(connect().await).get_status(v1::GetStatusRequest::default()).await.map(drop),
        ended(InspectClient::new(connect().await).list_services(v1::ListServicesRequest::default()).await).await,
        ended(InspectClient::new(connect().await).watch(named).await).await,
        ended(PeersClient::new(connect().await).join(peer).await).await,
        HealthClient::new(connect().await).check(checked).await.map(drop),
        ended(ServerReflectionClient::new(connect().await).server_reflection_info(listed).await).await,
    ];
    let right = format!("Inspect, health and reflection are on port {}, --inspect-listen", inspect.port());
    for error in refused.map(Result::unwrap_err) {
        assert!(error.code() == Code::InvalidArgument && error.message().contains(&right), "{error}");
    }
    replica.running.stop().await;
}

/// The status that ends a stream.
async fn ended<T>(opened: Result<Response<Streaming<T>>, Status>) -> Result<(), Status> {
    let mut messages = opened?.into_inner();
    while messages.message().await?.is_some() {}
    Ok(())
}

/// A client that writes HTTP/2 frames itself.
struct Wire(TcpStream);

impl Wire {
    async fn connect(replica: &Replica) -> Self {
        let socket = TcpStream::connect(replica.running.local_addr).await.unwrap();
        socket.set_nodelay(true).unwrap();
        Self(socket)
    }

    async fn send(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).await.unwrap();
    }

    /// The type, flags, stream and payload of the next frame. `None` at the end of the connection.
    async fn frame(&mut self) -> Option<(u8, u8, u32, Vec<u8>)> {
        let mut header = [0; 9];
        timeout(GUARD, self.0.read_exact(&mut header)).await.expect("no frame arrived").ok()?;
        let [l0, l1, l2, kind, flags, stream @ ..] = header;
        let mut payload = vec![0; u32::from_be_bytes([0, l0, l1, l2]) as usize];
        self.0.read_exact(&mut payload).await.ok()?;
        Some((kind, flags, u32::from_be_bytes(stream), payload))
    }

    async fn until(&mut self, kind: u8) -> (u8, u32, Vec<u8>) {
        loop {
            let (found, flags, stream, payload) = self.frame().await.expect("the connection ended");
            if found == kind {
                return (flags, stream, payload);
            }
        }
    }
}

fn wire_frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// The header block with `:method: POST`, `:scheme: http`, `:path` and `content-type` as literals.
fn sync_headers() -> Vec<u8> {
    let path = b"/headgate.v1.Discovery/Sync";
    let mut block = vec![0x83, 0x86, 0x04, u8::try_from(path.len()).unwrap()];
    block.extend_from_slice(path);
    block.extend_from_slice(&[0x0f, 16, 16]);
    block.extend_from_slice(b"application/grpc");
    block
}

/// The bytes that a client sends up to `Hello`. The headers are in three frames, and the DATA frame
/// has padding.
fn opening(node: &str) -> Vec<u8> {
    let block = sync_headers();
    let message = frame(&hello(node, None));
    let padded = [&[4][..], &message, &[0; 4]].concat();
    [
        PREFACE.to_vec(),
        wire_frame(4, 0, 0, &[]),
        wire_frame(8, 0, 0, &[0, 1, 0, 0]),
        wire_frame(1, 0, 1, &block[..5]),
        wire_frame(9, 0, 1, &block[5..9]),
        wire_frame(9, 4, 1, &block[9..]),
        wire_frame(0, 8, 1, &padded),
    ]
    .concat()
}

/// Opens a connection to the port for Inspect, on which the server has answered a request.
async fn general(
    replica: &Replica,
    settings: &h2::client::Builder,
) -> (SendRequest<Bytes>, JoinHandle<Result<(), h2::Error>>) {
    let socket = TcpStream::connect(replica.running.inspect_addr).await.unwrap();
    let (mut requests, connection) = settings.handshake(socket).await.unwrap();
    let connection = tokio::spawn(connection);
    ask(&mut requests).await;
    (requests, connection)
}

/// Sends a request whose answer has no body.
async fn ask(requests: &mut SendRequest<Bytes>) {
    let (answer, _) = requests.send_request(post("/a/b"), true).unwrap();
    assert!(timeout(GUARD, answer).await.unwrap().unwrap().headers().contains_key("grpc-status"));
}

#[tokio::test]
async fn a_connection_ends_when_its_client_stops_reading_an_answer() {
    let settings = Settings { stalled_response_timeout: Duration::from_millis(200), ..replica::settings() };
    let replica = Replica::start_with(settings, Security::Plaintext).await;
    let watch = |window: u32| {
        let replica = &replica;
        async move {
            let settings = h2::client::Builder::new().initial_window_size(window).clone();
            let (mut requests, connection) = general(replica, &settings).await;
            let (answer, mut sender) = requests.send_request(post("/grpc.health.v1.Health/Watch"), false).unwrap();
            sender.send_data(frame(&HealthCheckRequest::default()), true).unwrap();
            (connection, requests, timeout(GUARD, answer).await.unwrap().unwrap().into_body())
        }
    };
    let (_, mut requests, mut body) = watch(60_000).await;
    assert!(timeout(GUARD, body.data()).await.unwrap().is_some(), "the first state did not arrive");
    // The client has no room for any byte of the answer. The client answers pings, so only
    // `stalled_response_timeout` ends the connection.
    let (connection, _requests, _is_kept) = watch(0).await;
    let _ = timeout(GUARD, connection).await.expect("the connection does not end");
    assert_eq!(
        replica.metric("headgate_connections_untaken_total"),
        1,
        "a connection that reads its answer was ended too"
    );
    replica.store.synced();
    assert!(timeout(GUARD, body.data()).await.expect("no answer arrived").is_some(), "the second state did not arrive");
    ask(&mut requests).await;
    replica.running.stop().await;
}

#[tokio::test]
async fn a_violation_of_http2_ends_its_connection_and_affects_no_other() {
    let replica = Replica::start().await;
    let mut good = replica.open("good").await;
    let window = |stream, bytes: u32| wire_frame(8, 0, stream, &bytes.to_be_bytes());
    let open_other = |stream| wire_frame(1, 4, stream, b"x");
    let settings = wire_frame(4, 0, 0, &[0, 4, 0x7f, 0xff, 0xff, 0xff]);
    let cases: Vec<(&str, Vec<u8>, u8)> = vec![
        ("DATA on an idle stream", wire_frame(0, 0, 9, b"x"), 1),
        ("a window update of 0", window(1, 0), 1),
        ("a window too large", window(1, 0x7fff_ffff), 3),
        ("a window too large by settings", [window(1, 1000), settings].concat(), 3),
        ("a frame too large", vec![0, 0x80, 0, 0, 0, 0, 0, 0, 1], 6),
        ("an interrupted header block", [wire_frame(1, 0, 3, b"x"), wire_frame(6, 0, 0, &[0; 8])].concat(), 1),
        ("too many streams", (1..=200).flat_map(|number| open_other(2 * number + 1)).collect(), 11),
        ("a header block without end", [wire_frame(1, 0, 3, b"x"), wire_frame(9, 0, 3, b"").repeat(100)].concat(), 11),
    ];
    let sample = "headgate_streams_rejected_total{reason=\"http2_violation\"}";
    for (number, (what, bytes, code)) in cases.iter().enumerate() {
        let mut wire = Wire::connect(&replica).await;
        wire.send(&opening("bad")).await;
        wire.until(0).await;
        wire.send(bytes).await;
        let found = loop {
            let payload = wire.until(7).await.2;
            // If a client opens another stream, the server first sends a GOAWAY without an error.
            if payload[7] != 0 {
                break payload[7];
            }
        };
        assert_eq!(found, *code, "{what}");
        eventually(&format!("{what} is counted"), async || replica.metric(sample) > number as u64).await;
    }
    replica.put([service(1, 80)]);
    good.reach(1).await;
    replica.running.stop().await;
}

#[tokio::test]
async fn a_client_that_sends_pings_and_does_not_read_is_disconnected() {
    let replica = Replica::start().await;
    let mut good = replica.open("good").await;
    let mut wire = Wire::connect(&replica).await;
    wire.send(&opening("bad")).await;
    let pings = wire_frame(6, 0, 0, &[7; 8]).repeat(1_000);
    let flood = async { while wire.0.write_all(&pings).await.is_ok() {} };
    timeout(GUARD, flood).await.expect("a flood of pings does not end");
    assert_eq!(replica.metric("headgate_streams_rejected_total{reason=\"http2_violation\"}"), 1);
    replica.put([service(1, 80)]);
    good.reach(1).await;
    replica.running.stop().await;
}

#[tokio::test]
async fn too_many_messages_of_one_agent_are_read_slowly() {
    let replica = Replica::start().await;
    let failed = v1::ApplyFailed { error: "x".repeat(60_000), ..Default::default() };
    let failed = frame(&message(v1::agent_message::Body::ApplyFailed(failed)));
    let socket = TcpStream::connect(replica.running.local_addr).await.unwrap();
    let (mut requests, connection) = h2::client::handshake(socket).await.unwrap();
    tokio::spawn(connection);
    let (answer, mut sender) = requests.send_request(sync_request(), false).unwrap();
    let _answer = timeout(GUARD, answer).await.unwrap().unwrap();
    sender.send_data(frame(&hello("bad", None)), false).unwrap();
    let read = || replica.metric("headgate_agent_messages_total{message=\"apply_failed\"}");
    assert_read_slowly(&replica, &mut sender, &failed, read).await;
    replica.running.stop().await;
}

#[tokio::test]
async fn too_many_requests_on_one_stream_are_read_slowly() {
    let replica = Replica::start().await;
    let (mut requests, _connection) = general(&replica, &h2::client::Builder::new()).await;
    let (answer, mut sender) =
        requests.send_request(post("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"), false).unwrap();
    let list = MessageRequest::ListServices(String::new());
    let question = frame(&ServerReflectionRequest { host: "x".repeat(60_000), message_request: Some(list) });
    let heard = Arc::new(AtomicU64::new(0));
    let counter = Arc::clone(&heard);
    tokio::spawn(async move {
        let (mut answers, mut unread) = (answer.await.unwrap().into_body(), BytesMut::new());
        while let Some(Ok(bytes)) = answers.data().await {
            answers.flow_control().release_capacity(bytes.len()).unwrap();
            unread.extend_from_slice(&bytes);
            while take_message(&mut unread).is_some() {
                counter.fetch_add(1, Ordering::SeqCst);
            }
        }
    });
    assert_read_slowly(&replica, &mut sender, &question, || heard.load(Ordering::SeqCst)).await;
    replica.running.stop().await;
}

/// Sends `message` a thousand times. The server must read the copies at the pace of
/// `serve/transport/connection_limits.rs`, and other agents must not be affected. `read` returns
/// the number of copies that were read.
async fn assert_read_slowly(
    replica: &Replica,
    sender: &mut SendStream<Bytes>,
    message: &Bytes,
    read: impl Fn() -> u64,
) {
    let mut good = replica.open("good").await;
    let start = Instant::now();
    for _ in 0..1_000 {
        sender.send_data(message.clone(), false).unwrap();
    }
    let mut port = 0;
    // On a slow machine, the first message may take longer.
    let is_unread = |elapsed: Duration| read() == 0 && elapsed < GUARD;
    while port < 20 || start.elapsed() < Duration::from_secs(1) || is_unread(start.elapsed()) {
        port += 1;
        replica.put([service(1, port)]);
        good.reach(replica.store.version()).await;
    }
    // The budget is one megabyte at once and a quarter of a megabyte per second. The test allows
    // twice as much.
    let most = 2 * ((1 << 20) + start.elapsed().as_millis() * (256 << 10) / 1_000);
    let bytes = u128::from(read()) * message.len() as u128;
    assert!(bytes > 0 && bytes < most, "{bytes} bytes were read, which is not between 0 and {most}");
}
