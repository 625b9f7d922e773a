//! `delta`: one endpoint changes among 100, 1,000 and 10,000 Services × 10 endpoints. The bench
//! measures the CPU time of the control plane (commit, log, digest, encoding) and the CPU time of
//! the agent (decoding, state, digest, view, plan of both families). It also measures the size of
//! the message.
//!
//! The stages run one after the other on one thread, without sockets and kernel, so that their CPU
//! times can be measured separately. The CPU times of each size are compared with the CPU times of
//! the smallest size. The message is compared with the JSON event of an EndpointSlice with ten
//! endpoints.

use std::{sync::Arc, time::Duration};

use anyhow::{Context as _, Result, bail};
use headgate_control_plane::{
    metrics::Metrics,
    store::{Cursor, Limits, Store},
    transaction::{Sink as _, SourceKind, Transaction, TriggeredChange},
};
use headgate_core::{
    Change, Dirty, Family, FixedState, NodeFacts,
    iptables::{ExistingTables, Layout, Ledger, RenderConfig, ruleset},
    reference::Referable,
};
use headgate_node_agent::{
    session::machine::{Effect, Machine},
    state::held::Held,
};
use headgate_proto::{frame::PREFIX_BYTES, v1};
use prost::Message as _;

use super::{clock::thread_cpu, report::Figure, wire::slice_event, workload};

const SIZES: [u32; 3] = [100, 1_000, 10_000];
const ENDPOINTS: u32 = 10;
const CHANGES: u32 = 2_000;
/// The size of an HTTP/2 frame header (RFC 9113, 4.1).
const HTTP2_FRAME_HEADER_BYTES: usize = 9;

/// Runs the bench.
///
/// # Errors
/// A message cannot be decoded, or a change affects other Services than its own.
pub fn run() -> Result<Vec<Figure>> {
    let mut figures = Vec::new();
    let mut smallest: Option<Costs> = None;
    for services in SIZES {
        let costs = measure(services)?;
        let name = |what: &str| format!("delta/{what}/{services}x{ENDPOINTS}");
        let beside = smallest.get_or_insert(costs);
        let anchor = format!("the size {}x{ENDPOINTS}", SIZES[0]);
        let us = "µs";
        figures.push(Figure::against(
            name("control-plane-cpu"),
            costs.control_plane_us,
            us,
            &anchor,
            beside.control_plane_us,
        ));
        figures.push(Figure::against(name("agent-cpu"), costs.agent_us, us, &anchor, beside.agent_us));
        let json = "the EndpointSlice as a watch event in JSON";
        figures.push(Figure::against(name("stream-bytes"), costs.bytes, "bytes", json, slice_event_bytes() as f64));
    }
    Ok(figures)
}

#[derive(Debug, Clone, Copy)]
struct Costs {
    control_plane_us: f64,
    agent_us: f64,
    bytes: f64,
}

/// The stages of the control plane.
struct Replica {
    store: Store,
    cursor: Cursor,
    cpu: Duration,
}

/// The stages of the agent.
struct Agent {
    machine: Machine,
    held: Held,
    ledgers: [Ledger; 2],
    node: NodeFacts,
    cpu: Duration,
}

fn measure(services: u32) -> Result<Costs> {
    let store = Store::new(Limits::default(), Arc::new(Metrics::default()));
    let changes = workload::changes(services, ENDPOINTS).map(|change| TriggeredChange { change, trigger_unix_ms: 0 });
    store.commit(Transaction {
        changes: changes.collect(),
        positions: vec![(SourceKind::EndpointSlices, 1_000)],
        ..Transaction::default()
    });
    store.synced();
    let (_, cursor) = store.cursor(None);
    let mut replica = Replica { store, cursor, cpu: Duration::ZERO };
    let mut agent = Agent::new(replica.store.epoch())?;
    while let Some(frame) = replica.store.next_frame(&mut replica.cursor) {
        agent.take(&frame, None)?;
    }
    agent.program_everything();

    let (mut largest, mut frames) = (0, 0);
    for i in 0..CHANGES {
        // Changes alternate: one change adds an endpoint, and the next change removes this
        // endpoint.
        let service = (i / 2 * 7919) % services;
        let change = if i % 2 == 0 {
            Change::Endpoint(workload::key(service), workload::endpoint(service, ENDPOINTS))
        } else {
            Change::RemoveEndpoint(workload::key(service), workload::endpoint_ip(service, ENDPOINTS))
        };
        let frame = replica.change(change, 1_001 + u64::from(i))?;
        largest = largest.max(frame.len() + HTTP2_FRAME_HEADER_BYTES);
        agent.take(&frame, Some(1))?;
        frames += 1;
    }
    if *replica.store.digests().buckets() != *agent.held.state().digests().buckets() {
        bail!("the agent's state differs from the replica's");
    }
    let per_change = |cpu: Duration| cpu.as_secs_f64() * 1e6 / f64::from(frames);
    Ok(Costs { control_plane_us: per_change(replica.cpu), agent_us: per_change(agent.cpu), bytes: largest as f64 })
}

impl Replica {
    /// Commits one change, and reads its message from the cursor.
    fn change(&mut self, change: Change, position: u64) -> Result<bytes::Bytes> {
        let start = thread_cpu();
        self.store.commit(Transaction {
            changes: vec![TriggeredChange { change, trigger_unix_ms: 1_767_225_600_000 + position }],
            positions: vec![(SourceKind::EndpointSlices, position)],
            ..Transaction::default()
        });
        let frame = self.store.next_frame(&mut self.cursor).context("no message for a change")?;
        self.cpu += thread_cpu().saturating_sub(start);
        if self.store.next_frame(&mut self.cursor).is_some() {
            bail!("a change caused more than one message");
        }
        Ok(frame)
    }
}

/// The largest number of chains that the replacement of one endpoint may write. One chain is the
/// chain of the Service. The other chains are the hairpin groups of the old and of the new address,
/// in nat and in filter.
const MAX_CHAINS: u32 = 5;

impl Agent {
    fn new(epoch: u64) -> Result<Self> {
        let mut machine = Machine::new("node-000".into());
        machine.begin(None);
        let welcome = v1::Welcome { epoch, resume: v1::welcome::ResumeMode::Full.into(), ..Default::default() };
        machine.on_message(v1::ServerMessage { body: Some(v1::server_message::Body::Welcome(welcome)) })?;
        // The layout is fixed, because the smallest size is at the threshold between the layouts.
        let render = |family| RenderConfig { layout: Layout::Compact, ..RenderConfig::new(family) };
        let ledgers = Family::BOTH.map(|family| Ledger::new(ruleset(render(family))));
        let node = NodeFacts::named("node-000");
        Ok(Self { machine, held: Held::default(), ledgers, node, cpu: Duration::ZERO })
    }

    fn program_everything(&mut self) {
        for ledger in &mut self.ledgers {
            ledger.full(&FixedState(self.held.state(), &self.node), ExistingTables::default());
        }
    }

    /// Processes a message. If `services` is given, also plans the dirty Services, and checks their
    /// number.
    fn take(&mut self, frame: &[u8], services: Option<u32>) -> Result<()> {
        let start = thread_cpu();
        let message = v1::ServerMessage::decode(frame.get(PREFIX_BYTES..).context("no gRPC prefix")?)?;
        let mut dirty = Dirty::default();
        for effect in self.machine.on_message(message)? {
            if let Effect::Apply(step) = effect {
                self.held.apply(step, &mut dirty);
            }
        }
        if self.machine.needs_referable() {
            self.machine.refer_to(Referable::of(self.held.state()));
        }
        let Some(services) = services else { return Ok(()) };
        for ledger in &mut self.ledgers {
            let (script, planned) = ledger.changed(self.held.state(), &self.node, &dirty);
            if planned != services || script.chains_written() > MAX_CHAINS {
                bail!(
                    "one endpoint changed, but {planned} services were planned, with {} chains",
                    script.chains_written()
                );
            }
        }
        self.cpu += thread_cpu().saturating_sub(start);
        Ok(())
    }
}

/// The size of the watch event that a kube-proxy receives for the change of an endpoint. The event
/// contains the whole slice.
fn slice_event_bytes() -> usize {
    let endpoints: Vec<_> = (0..ENDPOINTS).map(|i| workload::endpoint(0, i)).collect();
    slice_event(&workload::key(0), &endpoints).to_string().len()
}
