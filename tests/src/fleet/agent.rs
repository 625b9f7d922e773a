//! The state of one agent, which survives its connections: a tracker, and for some agents the state
//! of a real agent.

use std::{sync::Arc, time::Instant};

use headgate_core::{Dirty, digest::Digests, reference::Referable};
use headgate_node_agent::{
    session::machine::{Effect as MachineEffect, Machine},
    state::Held,
};
use headgate_proto::{digests_to_wire, v1};
use prost::Message as _;
use v1::agent_message::Body;

use super::tracker::{Effect, Point, Received, Tracker, Violation};

/// The digests of a state, for agents that do not hold the state themselves. Agents with equal
/// epoch and version have equal digests.
#[derive(Debug, Clone)]
pub struct Reference {
    /// Epoch and version.
    pub at: (u64, u64),
    /// The digests of the state at this version.
    pub digests: v1::BucketDigests,
}

/// The state of a real agent, without a kernel.
#[derive(Debug)]
struct Full {
    machine: Machine,
    held: Held,
    /// The number of Services that a real agent would have programmed since the stream began.
    dirty_services: u64,
}

/// The state of one agent, which survives its connections.
#[derive(Debug)]
pub struct Agent {
    node: Arc<str>,
    tracker: Tracker,
    full: Option<Box<Full>>,
}

impl Agent {
    pub(super) fn new(node: &str, is_full: bool) -> Self {
        let full = || Box::new(Full { machine: Machine::new(node.into()), held: Held::default(), dirty_services: 0 });
        Self { node: node.into(), tracker: Tracker::default(), full: is_full.then(full) }
    }

    /// The tracker, which counts the received messages and holds the present version.
    #[must_use]
    pub fn tracker(&self) -> &Tracker {
        &self.tracker
    }

    /// The digests of the state; `None` for an agent that holds no state.
    #[must_use]
    pub fn digests(&self) -> Option<&Digests> {
        self.full.as_ref().map(|full| full.held.state().digests())
    }

    /// The number of Services that a real agent would have programmed since the stream began;
    /// `None` for an agent that holds no state.
    #[must_use]
    pub fn dirty_services(&self) -> Option<u64> {
        self.full.as_ref().map(|full| full.dirty_services)
    }

    /// The digests for other agents at this agent's version; `None` for an agent that holds no
    /// state.
    #[must_use]
    pub fn reference(&self) -> Option<Reference> {
        let full = self.full.as_ref()?;
        Some(Reference { at: full.held.position()?, digests: digests_to_wire(full.held.state().digests()) })
    }

    /// Begins a stream, and returns the encoded `Hello`.
    pub(super) fn hello(&mut self, reference: Option<&Reference>) -> Vec<u8> {
        self.tracker.begin();
        if let Some(full) = &mut self.full {
            full.machine.begin(full.held.position());
            full.dirty_services = 0;
        }
        let resume = self.tracker.point().map(|point| self.resume(&point, reference));
        let status = v1::AgentStatus { backend: "simulated".into(), ..Default::default() };
        let hello = v1::Hello {
            node_name: self.node.to_string(),
            agent_version: env!("CARGO_PKG_VERSION").into(),
            status: Some(status),
            resume,
            ..v1::Hello::default()
        };
        v1::AgentMessage { body: Some(Body::Hello(hello)) }.encode_to_vec()
    }

    /// Ends the stream, and returns the counts of its messages.
    pub(super) fn end_stream(&mut self) -> Received {
        self.tracker.end()
    }

    fn resume(&self, point: &Point, reference: Option<&Reference>) -> v1::Resume {
        if let Some(resume) = self.full.as_ref().and_then(|full| full.held.resume()) {
            return resume;
        }
        let known = point.positions.iter().enumerate().filter(|(_, position)| **position != 0);
        let position = |(kind, position): (usize, &u64)| v1::SourcePosition {
            kind: i32::try_from(kind).unwrap_or_default(),
            position: *position,
        };
        let is_same = |reference: &&Reference| reference.at == (point.epoch, point.version);
        v1::Resume {
            epoch: point.epoch,
            version: point.version,
            positions: known.map(position).collect(),
            digests: reference.filter(is_same).map(|reference| reference.digests.clone()),
            ..v1::Resume::default()
        }
    }

    /// Processes one message.
    pub(super) fn on_message(&mut self, message: &[u8]) -> Result<Effect, Violation> {
        let effect = self.tracker.on_message(message)?;
        if let Some(full) = &mut self.full {
            full.on_message(message)?;
            let point = self.tracker.point().map(|point| (point.epoch, point.version));
            if point != full.held.position() {
                return Err(Violation(format!(
                    "the real agent is at {:?}, and the tracker at {point:?}",
                    full.held.position()
                )));
            }
        }
        Ok(effect)
    }

    /// Encodes an ACK of the present version. `programmed` has the versions since the last ACK,
    /// with the times at which the agent reached them. Returns `None` before the first snapshot.
    pub(super) fn ack(&self, programmed: &[(u64, Instant)]) -> Option<Vec<u8>> {
        let version = self.tracker.point()?.version;
        let ago = |at: &Instant| u64::try_from(at.elapsed().as_micros()).unwrap_or(u64::MAX);
        let (last, earlier) = programmed.split_last().unzip();
        let earlier = earlier.unwrap_or_default().iter();
        let ack = v1::Ack {
            version,
            node_revision: self.tracker.node_revision(),
            apply_microseconds: 900,
            services_planned: 1,
            objects_written: 2,
            programmed_ago_microseconds: last.map_or(0, |(_, at)| ago(at)),
            earlier: earlier
                .map(|(version, at)| v1::ProgrammedVersion { version: *version, ago_microseconds: ago(at) })
                .collect(),
        };
        Some(v1::AgentMessage { body: Some(Body::Ack(ack)) }.encode_to_vec())
    }
}

impl Full {
    fn on_message(&mut self, message: &[u8]) -> Result<(), Violation> {
        let message = v1::ServerMessage::decode(message).map_err(Violation::from)?;
        let effects =
            self.machine.on_message(message).map_err(|violation| Violation(format!("the real agent: {violation}")))?;
        for effect in effects {
            match effect {
                MachineEffect::Apply(step) => {
                    let mut dirty = Dirty::default();
                    self.held.apply(step, &mut dirty);
                    self.dirty_services += dirty.services.len() as u64;
                }
                MachineEffect::Reject(rejections) => {
                    return Err(Violation(format!("the agent rejects resources: {rejections:?}")));
                }
                _ => {}
            }
        }
        if self.machine.needs_referable() {
            self.machine.refer_to(Referable::of(self.held.state()));
        }
        Ok(())
    }
}
