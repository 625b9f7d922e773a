//! The agent of the model. Its session machine, its state and its decisions to stay or move are the
//! real code. Its disk is a copy in memory.

use headgate_core::{Change, Dirty, Node, reference::Referable};
use headgate_node_agent::{
    session::{
        machine::{Effect, Machine, Violation},
        stream::{Failover, HeldState, MoveLimits, Standing, choose},
    },
    state::Held,
};
use headgate_proto::v1::{self, server_message::Body};
use prost::Message as _;
use tokio::time::Instant;

use super::source::{History, NEED_NEW_PROGRAM, NODE, Places, as_seen_by_the_old_program, changes_of, state_of};

/// The version of the agent's program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Program {
    /// A program that cannot use some values of the source.
    Old,
    /// A program that can use every value.
    New,
}

/// The contents of the agent's disk.
struct Disk {
    changes: Vec<Change>,
    point: v1::Resume,
    node: Option<Node>,
    node_position: Option<v1::SourcePosition>,
    places: Places,
    node_place: u64,
}

pub(crate) struct Agent {
    program: Program,
    machine: Machine,
    pub(crate) held: Held,
    pub(crate) node: Option<Node>,
    node_position: Option<v1::SourcePosition>,
    /// The version of each key's value that the agent holds.
    places: Places,
    node_place: Option<u64>,
    disk: Option<Disk>,
    /// Whether the state comes from disk and no replica has confirmed the state. In this case the
    /// kernel may have newer rules, which an earlier run of the agent wrote.
    pub(crate) is_unconfirmed: bool,
    /// The version of each key's value that an earlier run wrote to the kernel.
    kernel: Places,
    /// The version of each key's value at the replica when the stream began. After a start from
    /// disk, the agent programs no older value.
    at_begin: Places,
    /// Whether the agent may lack changes that its version includes. In this case the agent resumes
    /// by its digests and not by its version.
    distrusts_version: bool,
    failover: Failover,
    moves: MoveLimits,
    /// Whether the source was restored from a backup. In this case an older value may replace a
    /// newer value.
    pub(crate) may_go_back: bool,
    pub(crate) rejections: u64,
}

impl Agent {
    pub(crate) fn new(program: Program, now: Instant) -> Self {
        let moves = MoveLimits::default();
        Self {
            program,
            machine: Machine::new(NODE.into()),
            held: Held::default(),
            node: None,
            node_position: None,
            places: Places::new(),
            node_place: None,
            disk: None,
            is_unconfirmed: false,
            kernel: Places::new(),
            at_begin: Places::new(),
            distrusts_version: false,
            failover: Failover::new(&moves, now),
            moves,
            may_go_back: false,
            rejections: 0,
        }
    }

    /// Saves to disk the state that the kernel has.
    pub(crate) fn save(&mut self) {
        if self.is_unconfirmed {
            return;
        }
        let Some(point) = self.held.point() else { return };
        self.disk = Some(Disk {
            changes: changes_of(self.held.state()),
            point,
            node: self.node.clone(),
            node_position: self.node_position,
            places: self.places.clone(),
            node_place: self.node_place.unwrap_or_default(),
        });
    }

    /// The running program crashes, and `program` starts with the state on disk, and with the
    /// positions that the crashed one has recorded.
    pub(crate) fn restart(&mut self, program: Program, now: Instant) {
        let disk = self.disk.take();
        let kernel = std::mem::take(if self.is_unconfirmed { &mut self.kernel } else { &mut self.places });
        let positions = self.held.positions();
        *self = Self { rejections: self.rejections, may_go_back: self.may_go_back, ..Self::new(program, now) };
        let Some(disk) = disk else { return };
        self.held = Held::restored(state_of(disk.changes.clone()), &disk.point);
        self.held.node_position = disk.node_position;
        self.held.raise_positions(&positions);
        self.kernel = kernel;
        (self.node, self.node_position) = (disk.node.clone(), disk.node_position);
        (self.places, self.node_place) = (disk.places.clone(), disk.node.is_some().then_some(disk.node_place));
        self.is_unconfirmed = true;
        self.disk = Some(disk);
    }

    /// Begins a stream. `at_begin` contains the version of each key's value at the replica. Returns
    /// the resume point for `Hello`.
    pub(crate) fn begin(&mut self, at_begin: Places, now: Instant) -> Option<v1::Resume> {
        self.at_begin = at_begin;
        self.failover = Failover::new(&self.moves, now);
        let mut resume = self.held.resume();
        if let Some(resume) = &mut resume
            && (self.distrusts_version || self.machine.has_forgotten_rejections())
        {
            resume.epoch = 0;
        }
        self.machine.begin(self.held.position());
        resume.map(|wire| v1::Resume::decode(wire.encode_to_vec().as_slice()).unwrap())
    }

    /// Handles one message. Returns false when the agent drops the stream.
    pub(crate) fn receive(&mut self, source: &History, mut body: Body, now: Instant) -> bool {
        if self.program == Program::Old {
            match &mut body {
                Body::Batch(batch) => batch.changes.iter_mut().for_each(as_seen_by_the_old_program),
                Body::SnapshotChunk(chunk) => chunk.changes.iter_mut().for_each(as_seen_by_the_old_program),
                _ => {}
            }
        }
        let is_heartbeat = matches!(body, Body::Heartbeat(_));
        let effects = match self.machine.on_message(v1::ServerMessage { body: Some(body) }) {
            Ok(effects) => effects,
            // After a rejection, the old program may lack changes that its version includes.
            Err(Violation::Reference(_)) if self.program == Program::Old => {
                self.distrusts_version = true;
                return false;
            }
            Err(violation) => panic!("{violation}"),
        };
        for effect in effects {
            self.on_effect(source, effect, now);
        }
        if !is_heartbeat {
            self.failover.on_progress(self.machine.is_following(), now);
        }
        if self.machine.needs_referable() {
            self.machine.refer_to(Referable::of(self.held.state()));
            self.distrusts_version = false;
        }
        true
    }

    fn on_effect(&mut self, source: &History, effect: Effect, now: Instant) {
        match effect {
            Effect::Welcomed(welcome) => self.failover.on_source(welcome.source_state().into(), now),
            Effect::Heartbeat(heartbeat) => self.failover.on_source(heartbeat.source_state().into(), now),
            Effect::Apply(step) => {
                self.held.apply(step, &mut Dirty::default());
                let places = source.places(self.held.state());
                for (key, place) in self.places.iter().filter(|_| !self.may_go_back) {
                    assert!(
                        places[key] >= *place,
                        "{key} was replaced by an older value: version {place} by version {}",
                        places[key]
                    );
                }
                self.places = places;
            }
            Effect::Node(own) => {
                let place = source.node_place(own.node.as_ref());
                if let Some(before) = self.node_place.filter(|_| !self.may_go_back) {
                    assert!(
                        place >= before,
                        "an older value replaced the agent's own Node: version {place} after version {before}"
                    );
                }
                self.held.node_position = own.position;
                (self.node, self.node_position, self.node_place) = (own.node, own.position, Some(place));
            }
            Effect::Resumed => {
                if std::mem::take(&mut self.is_unconfirmed) {
                    let may_go_back = self.may_go_back || self.program == Program::Old;
                    for (key, place) in self.kernel.iter().filter(|_| !may_go_back) {
                        let here = self.places[key];
                        assert!(here >= *place, "version {here} of {key} replaces version {place} in the kernel");
                    }
                    for (key, place) in self.at_begin.iter().filter(|_| self.program == Program::New) {
                        let here = self.places[key];
                        assert!(
                            here >= *place,
                            "the agent programs version {here} of {key}, which is older than version {place} of the replica"
                        );
                    }
                }
            }
            Effect::Reject(rejections) => {
                assert_eq!(self.program, Program::Old, "{rejections:?}");
                self.rejections += rejections.len() as u64;
            }
            Effect::Drain(_) | Effect::Query(_) | Effect::Barrier(_) => {}
        }
    }

    /// Whether this program can use every value of the resource.
    pub(crate) fn program_can_use(&self, key: &str) -> bool {
        self.program == Program::New || !NEED_NEW_PROGRAM.contains(&key)
    }

    /// Whether the state may lack what its positions include.
    pub(crate) fn may_lack(&self) -> bool {
        self.is_unconfirmed || self.held.point().is_some_and(|point| point.epoch == 0)
    }

    /// Returns the replica to which the agent moves now, if it moves. `others` returns the replicas
    /// that answer.
    pub(crate) fn decide(&mut self, others: impl FnOnce() -> Vec<(usize, Standing)>, now: Instant) -> Option<usize> {
        let trouble = self.failover.due(now)?;
        let others = others();
        let of = |point| HeldState { may_lack: self.may_lack(), ..HeldState::of(&point) };
        let held = self.held.point().map(of);
        let standings: Vec<_> = others.iter().map(|(_, standing)| standing.clone()).collect();
        let accepts_older = self.failover.accepts_older();
        let to = choose(trouble, held.as_ref(), &standings, accepts_older).map(|index| others[index].0)?;
        self.moves.moved(now);
        Some(to)
    }
}
