//! A small agent: the generated client, and a reader that follows the protocol's contract.

use std::{collections::BTreeMap, net::SocketAddr, time::Duration};

use bytes::{Buf as _, BufMut as _, Bytes};
use headgate_core::{Change, Dirty, State, digest, reference::Referable};
use headgate_proto::{Decoder, PREFIX_BYTES, digests_to_wire, v1};
use prost::Message as _;
use tokio::{
    sync::mpsc,
    time::{sleep, timeout},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{
    Request, Status, Streaming,
    codec::{Codec, DecodeBuf, Decoder as WireDecoder, EncodeBuf, Encoder as WireEncoder},
    transport::{Channel, Endpoint},
};
use v1::{discovery_client::DiscoveryClient, server_message::Body};

/// A guard against hanging. No test asserts on time.
pub(crate) const GUARD: Duration = Duration::from_secs(60);

/// Waits until a condition holds. `what` completes the message "gave up waiting until …".
pub(crate) async fn eventually(what: &str, mut is_so: impl AsyncFnMut() -> bool) {
    let holds = async {
        while !is_so().await {
            sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(GUARD, holds).await.unwrap_or_else(|_| panic!("gave up waiting until {what}"));
}

/// Opens a new connection. The windows of the connection are small, so that the server notices a
/// client that does not read.
pub(crate) async fn channel(address: SocketAddr) -> Channel {
    endpoint(address).connect().await.unwrap()
}

pub(crate) fn endpoint(address: SocketAddr) -> Endpoint {
    let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
    endpoint.initial_stream_window_size(65_535).initial_connection_window_size(65_535)
}

pub(crate) fn hello(node: &str, resume: Option<v1::Resume>) -> v1::AgentMessage {
    message(v1::agent_message::Body::Hello(v1::Hello {
        node_name: node.into(),
        agent_version: "test".into(),
        status: Some(v1::AgentStatus { backend: "none".into(), ..v1::AgentStatus::default() }),
        resume,
        ..v1::Hello::default()
    }))
}

pub(crate) fn message(body: v1::agent_message::Body) -> v1::AgentMessage {
    v1::AgentMessage { body: Some(body) }
}

/// The state that an agent holds, with the version and positions that it received.
#[derive(Default)]
pub(crate) struct Held {
    pub(crate) state: State,
    pub(crate) epoch: u64,
    pub(crate) version: u64,
    pub(crate) positions: BTreeMap<i32, u64>,
}

impl Held {
    pub(crate) fn resume(&self) -> v1::Resume {
        let positions =
            self.positions.iter().map(|(kind, position)| v1::SourcePosition { kind: *kind, position: *position });
        v1::Resume {
            epoch: self.epoch,
            version: self.version,
            positions: positions.collect(),
            digests: Some(digests_to_wire(self.state.digests())),
            agent_version: String::new(),
        }
    }
}

/// A stream and the messages received on it.
pub(crate) struct Client {
    pub(crate) node: String,
    pub(crate) sender: mpsc::Sender<v1::AgentMessage>,
    messages: Streaming<v1::ServerMessage>,
    pub(crate) welcome: v1::Welcome,
    pub(crate) held: Held,
    staged: Vec<Change>,
    decoder: Decoder,
    /// The number of resources that took effect, without removals.
    pub(crate) resources: usize,
    pub(crate) removals: usize,
    pub(crate) batches: usize,
    pub(crate) ends: Vec<v1::SnapshotEnd>,
    /// The bytes of batches and snapshots, including gRPC prefixes.
    pub(crate) bytes: usize,
    pub(crate) nodes: Vec<v1::OwnNode>,
    pub(crate) heartbeats: Vec<v1::Heartbeat>,
    pub(crate) drains: Vec<v1::Drain>,
    pub(crate) queries: Vec<v1::Query>,
    pub(crate) barriers: Vec<v1::BarrierAnswer>,
    /// The versions of batches whose ACK is wanted at once.
    pub(crate) urgent: Vec<u64>,
}

impl Client {
    /// Opens a stream and reads `Welcome`. Resumes if `held` is given.
    pub(crate) async fn open(channel: Channel, node: &str, held: Option<Held>) -> Result<Self, Status> {
        let (sender, receiver) = mpsc::channel(16);
        sender.send(hello(node, held.as_ref().map(Held::resume))).await.unwrap();
        let mut client = DiscoveryClient::new(channel);
        let mut messages = client.sync(ReceiverStream::new(receiver)).await?.into_inner();
        let first = timeout(GUARD, messages.message()).await.unwrap()?;
        let Some(Body::Welcome(welcome)) = first.and_then(|message| message.body) else {
            panic!("the first message is not Welcome")
        };
        let mut held = held.unwrap_or_default();
        held.epoch = welcome.epoch;
        let mut decoder = Decoder::default();
        if welcome.resume() == v1::welcome::ResumeMode::Log {
            decoder.refer_to(Referable::of(&held.state));
        }
        Ok(Self {
            node: node.into(),
            sender,
            messages,
            welcome,
            held,
            staged: Vec::new(),
            decoder,
            resources: 0,
            removals: 0,
            batches: 0,
            ends: Vec::new(),
            bytes: 0,
            nodes: Vec::new(),
            heartbeats: Vec::new(),
            drains: Vec::new(),
            queries: Vec::new(),
            barriers: Vec::new(),
            urgent: Vec::new(),
        })
    }

    pub(crate) async fn send(&self, body: v1::agent_message::Body) {
        self.sender.send(message(body)).await.unwrap();
    }

    pub(crate) async fn ack(&self) {
        let ack = v1::Ack { version: self.held.version, apply_microseconds: 42, ..Default::default() };
        self.send(v1::agent_message::Body::Ack(ack)).await;
    }

    /// Reads the next message. Returns `None` at the end of a stream that ended with success.
    pub(crate) async fn step(&mut self) -> Result<Option<()>, Status> {
        let message = timeout(GUARD, self.messages.message()).await.expect("no message arrived")?;
        let Some(message) = message else { return Ok(None) };
        let bytes = message.encoded_len() + PREFIX_BYTES;
        match message.body.unwrap() {
            Body::Welcome(_) => panic!("a second Welcome"),
            Body::Batch(batch) => {
                self.bytes += bytes;
                let previous = batch.follows().unwrap();
                assert_eq!(previous, self.held.version);
                self.urgent.extend(batch.acknowledge_at_once.then_some(batch.version));
                let positions: Vec<_> = batch.moved_positions().collect();
                self.stage(batch.changes.unwrap());
                if batch.version != previous {
                    self.held.version = batch.version;
                    self.batches += 1;
                    self.finish(&positions);
                }
            }
            Body::SnapshotChunk(chunk) => {
                self.bytes += bytes;
                self.stage(chunk.changes.unwrap());
            }
            Body::SnapshotEnd(end) => {
                self.bytes += bytes;
                self.end(end);
            }
            Body::OwnNode(node) => self.nodes.push(node),
            Body::Heartbeat(heartbeat) => self.heartbeats.push(heartbeat),
            Body::Drain(drain) => self.drains.push(drain),
            Body::Query(query) => self.queries.push(query),
            Body::Barrier(answer) => self.barriers.push(answer),
            Body::Standing(_) => panic!("an answer to no question"),
        }
        Ok(Some(()))
    }

    /// Reads until a condition holds.
    pub(crate) async fn until(&mut self, is_done: impl Fn(&Self) -> bool) {
        while !is_done(self) {
            self.step().await.unwrap().expect("the stream ended");
        }
    }

    /// Reads until a snapshot has ended and `version` is reached.
    pub(crate) async fn reach(&mut self, version: u64) {
        self.until(|client| client.held.version >= version && !client.ends.is_empty()).await;
    }

    /// Reads until the stream ends, and returns its status.
    pub(crate) async fn status(&mut self) -> Status {
        loop {
            match self.step().await {
                Ok(Some(())) => {}
                Ok(None) => return Status::ok(""),
                Err(status) => return status,
            }
        }
    }

    fn stage(&mut self, changes: v1::Changes) {
        let (changes, rejections) = self.decoder.changes(changes).unwrap();
        assert_eq!(rejections, []);
        self.staged.extend(changes);
    }

    fn finish(&mut self, positions: &[v1::SourcePosition]) {
        self.held.positions.extend(positions.iter().map(|position| (position.kind, position.position)));
        for change in std::mem::take(&mut self.staged) {
            match change {
                Change::Service(_) | Change::Endpoint(..) | Change::ServiceCidr(_) => self.resources += 1,
                _ => self.removals += 1,
            }
            self.held.state.apply(change, &mut Dirty::default());
        }
    }

    fn end(&mut self, end: v1::SnapshotEnd) {
        assert_eq!(end.resource_count, self.staged.len() as u64);
        let by_digests = self.ends.is_empty() && self.welcome.resume() == v1::welcome::ResumeMode::Digests;
        let is_all = end.buckets.is_empty() && !by_digests;
        let is_named = |bucket: u16| is_all || end.buckets.contains(&bucket.into());
        let mut missing = Vec::new();
        for (key, entry) in self.held.state.entries().filter(|(key, _)| is_named(digest::service_bucket(key))) {
            missing.extend(entry.service().map(|_| Change::RemoveService((**key).clone())));
            missing.extend(entry.endpoints().keys().map(|address| Change::RemoveEndpoint((**key).clone(), *address)));
        }
        for change in missing {
            self.held.state.apply(change, &mut Dirty::default());
        }
        self.held.version = end.version;
        self.finish(&end.positions);
        self.ends.push(end);
        self.decoder.refer_to(Referable::of(&self.held.state));
    }
}

/// A codec that passes bytes unchanged in both directions.
#[derive(Clone, Copy, Default)]
pub(crate) struct Raw;

impl Codec for Raw {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        *self
    }

    fn decoder(&mut self) -> Self {
        *self
    }
}

impl WireEncoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, item: Bytes, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buffer.put(item);
        Ok(())
    }
}

impl WireDecoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        let length = buffer.remaining();
        Ok(Some(buffer.copy_to_bytes(length)))
    }
}

/// Opens a stream with raw bytes as messages.
pub(crate) async fn raw(
    channel: Channel,
    path: &'static str,
    messages: Vec<Bytes>,
) -> Result<Streaming<Bytes>, Status> {
    let mut grpc = tonic::client::Grpc::new(channel);
    grpc.ready().await.unwrap();
    let requests = tokio_stream::StreamExt::chain(tokio_stream::iter(messages), tokio_stream::pending());
    let path = http::uri::PathAndQuery::from_static(path);
    Ok(grpc.streaming(Request::new(requests), path, Raw).await?.into_inner())
}

/// The final status of a raw stream opened with `messages`.
pub(crate) async fn refusal(channel: Channel, messages: Vec<Bytes>) -> Status {
    let mut stream = match raw(channel, "/headgate.v1.Discovery/Sync", messages).await {
        Ok(stream) => stream,
        Err(status) => return status,
    };
    loop {
        match timeout(GUARD, stream.message()).await.expect("no message arrived") {
            Ok(Some(_)) => {}
            Ok(None) => return Status::ok(""),
            Err(status) => return status,
        }
    }
}
