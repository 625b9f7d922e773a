//! The hot paths. Each prepares a cluster, and then measures one thing some times.

use std::{hint::black_box, sync::Arc, time::Instant};

use anyhow::{Context as _, Result, bail, ensure};
use bytes::Bytes;
use futures::FutureExt as _;
use headgate_control_plane::{
    metrics::Metrics,
    model::{Model, ModelSettings, Sink as _, Transaction, TriggeredChange},
    objects::{ObjectKind, SourceKind},
    serve::{Departed, Round, crowd::Crowd},
    source::watch_events,
    store::{Cursor, Limits, Resume, ResumeMode, Resumption, Store},
};
use headgate_core::{
    Change, Dirty, Family, NodeFacts, StateSource,
    nftables::{ExistingElements, NftablesConfig, NftablesLedger},
    reference::Referable,
};
use headgate_node_agent::{
    dataplane::{FixedState, nftables::transaction_of},
    session::machine::{Effect, Machine},
    state::Held,
};
use headgate_proto::{PREFIX_BYTES, v1};
use prost::Message as _;
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};
use v1::{agent_message, server_message::Body};

use super::{Counted, measured};
use crate::{
    bench::{wire::slice_event, workload},
    fleet::http2::Http2,
};

const SERVICES: u32 = 1_000;
const ENDPOINTS: u32 = 10;
/// The number of measured changes, of which each is the only one in its commit.
const CHANGES: u32 = 200;
/// The number of measured frames. A hash table is moved now and then, in each run at another frame.
const FRAMES: u32 = 1_000;
/// The number of agents that resume.
const RESUMES: u32 = 20;
/// The number of changes that an agent has missed when it resumes.
const MISSED: u32 = 20;
const STREAMS: usize = 5_000;
/// The number of measured changes that reach all streams. Sums of times need some instructions more
/// where the nanoseconds carry over, so one round would vary by half a percent.
const ROUNDS: u32 = 8;
const NODES: usize = 5_000;

/// All paths.
pub const PATHS: [Counted; 8] = [
    ("event-to-frame", "200 events of slices: decode, model, commit, frame", event_to_frame),
    ("frame-to-batch", "1,000 frames: decode, state, plan, netlink messages", frame_to_batch),
    ("resume-log", "20 agents resume from the log, each at another version", resume_log),
    ("resume-digests", "20 agents resume by their digests", resume_digests),
    ("commit", "eight changes, each of which reaches 5,000 streams", commit),
    ("acks", "5,000 streams acknowledge each of eight changes", acks),
    ("snapshot", "a full snapshot of 1,000 Services × 10", snapshot),
    ("everywhere", "a verdict about 5,000 nodes of three replicas", everywhere),
];

/// A Service that gets one more endpoint. A prime step spreads the changes over the cluster.
fn changed(number: u32) -> u32 {
    (number * 7_919) % SERVICES
}

fn added(number: u32) -> Change {
    let service = changed(number);
    Change::Endpoint(workload::key(service), workload::endpoint(service, ENDPOINTS))
}

fn put(store: &Store, changes: impl IntoIterator<Item = Change>) {
    let triggered = |change| TriggeredChange { change, trigger_unix_ms: 1_790_000_000_000 };
    let position = (SourceKind::EndpointSlices, 1_900_000_000 + store.version());
    let changes = changes.into_iter().map(triggered).collect();
    store.commit(Transaction { changes, positions: vec![position], ..Transaction::default() });
}

/// A store with the cluster.
fn store(services: u32) -> Arc<Store> {
    let store = Store::new(Limits::default(), Arc::new(Metrics::default()));
    put(&store, workload::changes(services, ENDPOINTS));
    store.synced();
    Arc::new(store)
}

fn frames(store: &Store, cursor: &mut Cursor) -> Vec<Bytes> {
    std::iter::from_fn(|| store.next_frame(cursor)).collect()
}

fn event_to_frame() -> Result<()> {
    let (mut model, store) = (Model::new(ModelSettings::default()), store(0));
    let endpoints = |service, count| (0..count).map(|number| workload::endpoint(service, number)).collect::<Vec<_>>();
    let slice = |service, count| slice_event(&workload::key(service), &endpoints(service, count)).to_string();
    for number in 0..SERVICES {
        let (key, ip) = (workload::key(number), workload::cluster_ip(number));
        let service = json!({"type": "ADDED", "object": {
            "metadata": {"name": key.name.as_str(), "namespace": key.namespace.as_str(), "resourceVersion": "1000"},
            "spec": {"clusterIP": ip, "ports": [{"name": "http", "port": 80, "protocol": "TCP"}]},
        }});
        let lines = [(ObjectKind::Service, service.to_string()), (ObjectKind::EndpointSlice, slice(number, ENDPOINTS))];
        for (kind, line) in lines {
            for event in watch_events(kind, line.as_bytes()) {
                model.event(event, "");
            }
        }
    }
    store.commit(model.take());
    let (_, mut cursor) = store.cursor(None);
    frames(&store, &mut cursor);
    let lines: Vec<String> = (0..CHANGES).map(|number| slice(changed(number), ENDPOINTS + 1)).collect();
    measured(&mut || {
        for line in &lines {
            for event in watch_events(ObjectKind::EndpointSlice, line.as_bytes()) {
                model.event(event, "");
            }
            store.commit(model.take());
            ensure!(frames(&store, &mut cursor).len() == 1, "a change is not one frame");
        }
        Ok(())
    })
}

/// The session and the state of an agent.
struct Receiver {
    machine: Machine,
    held: Held,
}

impl Receiver {
    /// An agent that has received everything from a store.
    fn following(store: &Store, cursor: &mut Cursor) -> Result<Self> {
        let mut receiver = Self { machine: Machine::new("node-000".into()), held: Held::default() };
        receiver.machine.begin(None);
        let welcome = v1::Welcome {
            epoch: store.epoch(),
            resume: v1::welcome::ResumeMode::Full.into(),
            heartbeat_interval_ms: 10_000,
            head_version: Some(store.version()),
            source_state: v1::SourceState::Following.into(),
            ..v1::Welcome::default()
        };
        receiver.take(&headgate_proto::frame(&v1::ServerMessage { body: Some(Body::Welcome(welcome)) }))?;
        for frame in frames(store, cursor) {
            receiver.take(&frame)?;
        }
        Ok(receiver)
    }

    fn take(&mut self, frame: &[u8]) -> Result<Dirty> {
        let message = v1::ServerMessage::decode(frame.get(PREFIX_BYTES..).context("no prefix")?)?;
        let mut dirty = Dirty::default();
        for effect in self.machine.on_message(message)? {
            match effect {
                Effect::Apply(step) => self.held.apply(step, &mut dirty),
                Effect::Reject(rejections) => bail!("the agent rejects {rejections:?}"),
                _ => {}
            }
        }
        if self.machine.needs_referable() {
            self.machine.refer_to(Referable::of(self.held.state()));
        }
        Ok(dirty)
    }
}

fn frame_to_batch() -> Result<()> {
    let store = store(SERVICES);
    let (_, mut cursor) = store.cursor(None);
    let mut receiver = Receiver::following(&store, &mut cursor)?;
    let node = NodeFacts::named("node-000");
    let mut ledgers = Family::BOTH.map(|family| {
        let masquerade = workload::masquerade();
        NftablesLedger::new(NftablesConfig { masquerade, ..NftablesConfig::new(family) })
    });
    for ledger in &mut ledgers {
        let source: &dyn StateSource = &FixedState(receiver.held.state(), &node);
        ledger.full(source, ExistingElements::default());
        ledger.confirm();
    }
    let mut all = Vec::new();
    for number in 0..FRAMES {
        put(&store, [added(number)]);
        all.extend(frames(&store, &mut cursor));
    }
    measured(&mut || {
        let mut bytes = 0;
        for frame in &all {
            let dirty = receiver.take(frame)?;
            for ledger in &mut ledgers {
                let plan = ledger.changed(receiver.held.state(), &node, &dirty);
                bytes += transaction_of(&plan, ledger).length_bytes();
                ledger.confirm();
            }
        }
        ensure!(all.len() == FRAMES as usize && bytes > all.len() * 100, "{} frames, {bytes} bytes", all.len());
        Ok(())
    })
}

/// A store, and what agents say that have missed its last changes. With `is_ours`, they followed
/// this replica, and each stopped at another version.
fn resumable(is_ours: bool) -> Result<(Arc<Store>, Vec<Vec<u8>>)> {
    let store = store(SERVICES);
    let (_, mut cursor) = store.cursor(None);
    let mut receiver = Receiver::following(&store, &mut cursor)?;
    let mut points = Vec::new();
    for number in 0..RESUMES + MISSED {
        if number < RESUMES {
            let mut point = receiver.held.resume().context("the agent holds nothing")?;
            point.epoch = if is_ours { point.epoch } else { 1 };
            points.push(point.encode_to_vec());
        }
        put(&store, [added(number)]);
        for frame in frames(&store, &mut cursor) {
            receiver.take(&frame)?;
        }
    }
    Ok((store, points))
}

fn resume(mode: ResumeMode) -> Result<()> {
    let (store, points) = resumable(mode == ResumeMode::Log)?;
    measured(&mut || {
        for point in &points {
            let resume = Resume::from_wire(&v1::Resume::decode(point.as_slice())?);
            let (found, begun) = Resumption::begin(&store, resume);
            ensure!(found == mode, "the agent resumes by {found:?}");
            let mut cursor = match begun {
                Ok(cursor) => cursor,
                Err(waiting) => waiting.advance(&store).ok().context("the agent must wait")?,
            };
            ensure!(!frames(&store, &mut cursor).is_empty(), "no frame");
        }
        Ok(())
    })
}

fn resume_log() -> Result<()> {
    resume(ResumeMode::Log)
}

fn resume_digests() -> Result<()> {
    resume(ResumeMode::Digests)
}

/// An agent's end of a connection.
struct Agent {
    http2: Http2,
    pipe: DuplexStream,
}

impl Agent {
    fn send(&mut self, body: agent_message::Body, mut opening: Vec<u8>) -> Result<()> {
        let message = v1::AgentMessage { body: Some(body) }.encode_to_vec();
        ensure!(self.http2.send(&message, &mut opening), "no window for a message");
        self.pipe.write_all(&opening).now_or_never().context("the pipe is full")??;
        Ok(())
    }

    /// The number of bytes that the replica has written since the last call.
    fn take_received(&mut self) -> Result<usize> {
        let mut buffer = [0; 4096];
        self.pipe.read(&mut buffer).now_or_never().map_or(Ok(0), |read| Ok(read?))
    }
}

/// A replica with streams that follow.
struct Following {
    store: Arc<Store>,
    crowd: Crowd,
    agents: Vec<Agent>,
}

impl Following {
    fn new() -> Result<Self> {
        let store = store(10);
        let mut crowd = Crowd::new(Arc::clone(&store));
        let mut agents = Vec::new();
        for number in 0..STREAMS {
            let mut agent = Agent { http2: Http2::new(), pipe: crowd.join().context("too many connections")? };
            let mut opening = Vec::new();
            Http2::open("localhost", &mut opening);
            // An agent that holds everything needs no snapshot.
            let resume = Some(v1::Resume { epoch: store.epoch(), version: store.version(), ..v1::Resume::default() });
            let hello = v1::Hello { node_name: format!("node-{number:05}"), resume, ..v1::Hello::default() };
            agent.send(agent_message::Body::Hello(hello), opening)?;
            agents.push(agent);
        }
        crowd.read();
        let mut following = Self { store, crowd, agents };
        following.change(0);
        following.acknowledge()?;
        following.crowd.read();
        Ok(following)
    }

    fn change(&mut self, number: u32) {
        put(&self.store, [added(number)]);
        self.crowd.visit();
    }

    /// Sends ACKs of a change that each agent must have received.
    fn acknowledge(&mut self) -> Result<()> {
        let version = self.store.version();
        for agent in &mut self.agents {
            ensure!(agent.take_received()? >= 40, "a stream does not follow");
            let ack = v1::Ack { version, apply_microseconds: 900, services_planned: 1, ..v1::Ack::default() };
            agent.send(agent_message::Body::Ack(ack), Vec::new())?;
        }
        Ok(())
    }
}

fn commit() -> Result<()> {
    let mut following = Following::new()?;
    for number in 1..=ROUNDS {
        measured(&mut || {
            following.change(number);
            Ok(())
        })?;
        following.acknowledge()?;
        following.crowd.read();
    }
    Ok(())
}

fn acks() -> Result<()> {
    let mut following = Following::new()?;
    for number in 1..=ROUNDS {
        following.change(number);
        following.acknowledge()?;
        measured(&mut || {
            following.crowd.read();
            Ok(())
        })?;
    }
    Ok(())
}

fn snapshot() -> Result<()> {
    let store = store(SERVICES);
    measured(&mut || {
        let (mode, mut cursor) = store.cursor(None);
        let bytes: usize = frames(&store, &mut cursor).iter().map(Bytes::len).sum();
        ensure!(mode == ResumeMode::Full && bytes > (SERVICES * ENDPOINTS * 10) as usize, "{mode:?}, {bytes} bytes");
        Ok(())
    })
}

fn everywhere() -> Result<()> {
    let nodes: Vec<(Arc<str>, bool)> = (0..NODES).map(|node| (format!("node-{node:05}").into(), true)).collect();
    let departed = Departed { at: Instant::now(), version: 5 };
    let answer = |nodes: &[(Arc<str>, bool)]| {
        let laggard = |(node, _): &(Arc<str>, bool)| v1::Laggard { node: node.to_string(), ..v1::Laggard::default() };
        let unconfirmed = nodes.iter().step_by(100).map(laggard).collect();
        v1::QuestionAnswer { roster: 1, version: 1, unconfirmed, ..v1::QuestionAnswer::default() }
    };
    // Each replica has a third of the agents, and remembers that it has lost another third.
    let third = NODES.div_ceil(3);
    let parts: Vec<_> = nodes.chunks(third).collect();
    measured(&mut || {
        let mut round = Round::default();
        for (number, present) in parts.iter().enumerate() {
            let lost = parts[(number + 1) % parts.len()];
            let states = present.iter().map(|node| (node, None)).chain(lost.iter().map(|node| (node, Some(departed))));
            let roster = states.map(|((node, _), state)| (node, 1, state));
            round.add(&format!("replica-{number}"), roster, Some(answer(present)));
        }
        let verdict = black_box(round.verdict(&nodes, [].into()));
        ensure!(verdict.nodes == NODES && !verdict.holds(), "{} nodes", verdict.nodes);
        Ok(())
    })
}
