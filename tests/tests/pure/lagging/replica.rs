//! A replica of the model: the real store. The test delays the watch of each kind.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use headgate_control_plane::{
    metrics::Metrics,
    model::{NodeChange, Sink as _, Transaction, TriggeredChange},
    objects::SourceKind,
    store::{BehindWait, Cursor, Limits, NotYet, OwnNode, Resume, ResumeMode, Resumption, Store},
};
use headgate_core::{Change, Dirty, State};
use headgate_node_agent::session::stream::Standing;
use headgate_proto::{PREFIX_BYTES, node_to_wire, v1};
use prost::Message as _;
use tokio::time::Instant;
use v1::{server_message::Body, source_position::Kind};

use super::source::{Event, History, KINDS, NODE, changes_of};

/// The longest time that an agent waits for a replica that is behind the agent.
pub(crate) const BEHIND_WAIT: Duration = Duration::from_secs(30);

pub(crate) struct Replica {
    pub(crate) store: Store,
    /// The state that the store holds.
    pub(crate) state: State,
    /// The position of the watch of each kind.
    pub(crate) positions: BTreeMap<SourceKind, u64>,
    /// The version of the source when the replica listed the source.
    pub(crate) listed_at: Option<u64>,
    /// Whether the replica reaches the API server.
    pub(crate) has_contact: bool,
}

fn wire_kind(kind: SourceKind) -> i32 {
    let kind = match kind {
        SourceKind::Services => Kind::Services,
        SourceKind::EndpointSlices => Kind::EndpointSlices,
        SourceKind::Nodes => Kind::Nodes,
        SourceKind::ServiceCidrs | SourceKind::Pods | SourceKind::Files => panic!("the model's source has no {kind:?}"),
    };
    kind.into()
}

impl Replica {
    /// Creates a replica that has listed nothing. Each of its messages carries one resource.
    pub(crate) fn new(has_contact: bool) -> Self {
        let limits = Limits { part_bytes: 1, ..Limits::default() };
        let store = Store::new(limits, Arc::new(Metrics::default()));
        let mut replica =
            Self { store, state: State::default(), positions: BTreeMap::new(), listed_at: None, has_contact: true };
        replica.set_contact(has_contact);
        replica
    }

    pub(crate) fn set_contact(&mut self, has_contact: bool) {
        self.has_contact = has_contact;
        self.store.cut_off((!has_contact).then(|| "no route to host".to_owned()));
    }

    pub(crate) fn is_listed(&self) -> bool {
        self.listed_at.is_some()
    }

    /// Lists the source at a version. Does nothing if the replica has already listed the source or
    /// cannot reach the API server.
    pub(crate) fn list(&mut self, source: &History, version: u64) {
        if self.is_listed() || !self.has_contact {
            return;
        }
        let (state, nodes) = source.at(version);
        let nodes = nodes.into_values().map(NodeChange::Apply).collect();
        self.commit(changes_of(&state), nodes, KINDS.map(|kind| (kind, version)).to_vec(), Vec::new());
        self.store.synced();
        self.listed_at = Some(version);
    }

    /// Delivers the next event of each kind in `kinds`, all in one step.
    pub(crate) fn deliver(&mut self, source: &History, kinds: &[SourceKind]) {
        let (mut changes, mut nodes, mut positions) = (Vec::new(), Vec::new(), Vec::new());
        for kind in kinds {
            let Some((version, event)) = self.next(source, *kind) else { continue };
            match event {
                Event::Change(change) => changes.push(change),
                Event::Node(change) => nodes.push(change),
            }
            positions.push((*kind, version));
        }
        if !positions.is_empty() {
            self.commit(changes, nodes, positions, Vec::new());
        }
    }

    fn next(&self, source: &History, kind: SourceKind) -> Option<(u64, Event)> {
        let position = self.positions.get(&kind).filter(|_| self.has_contact)?;
        source.next(kind, *position).map(|(version, event)| (version, event.clone()))
    }

    /// Delivers a bookmark: the replica missed no event of the kind up to `head`, or up to just
    /// before the kind's next event.
    pub(crate) fn bookmark(&mut self, source: &History, kind: SourceKind, head: u64) {
        let Some(position) = self.positions.get(&kind).copied().filter(|_| self.has_contact) else { return };
        let upto = source.next(kind, position).map_or(head, |(version, _)| head.min(version - 1));
        if upto > position {
            self.commit(Vec::new(), Vec::new(), Vec::new(), vec![(kind, upto)]);
        }
    }

    /// Delivers all events and bookmarks up to `head`.
    pub(crate) fn catch_up(&mut self, source: &History, head: u64) {
        for kind in KINDS {
            while self.next(source, kind).is_some_and(|(version, _)| version <= head) {
                self.deliver(source, &[kind]);
            }
            self.bookmark(source, kind, head);
        }
    }

    fn commit(
        &mut self,
        changes: Vec<Change>,
        nodes: Vec<NodeChange>,
        positions: Vec<(SourceKind, u64)>,
        bookmarks: Vec<(SourceKind, u64)>,
    ) {
        self.positions.extend(positions.iter().chain(&bookmarks).copied());
        for change in &changes {
            self.state.apply(change.clone(), &mut Dirty::default());
        }
        let changes = changes.into_iter().map(|change| TriggeredChange { change, trigger_unix_ms: 0 }).collect();
        self.store.commit(Transaction { changes, nodes, positions, bookmarks, ..Transaction::default() });
    }

    /// The replica's answer to a `Standing` request.
    pub(crate) fn standing(&self) -> Standing {
        let to_wire = |positions: BTreeMap<SourceKind, u64>| {
            let position = |(kind, position)| v1::SourcePosition { kind: wire_kind(kind), position };
            positions.into_iter().map(position).collect()
        };
        Standing::of(&v1::StandingResponse {
            source_state: v1::SourceState::from(self.store.source_state()).into(),
            positions: to_wire(self.store.positions()),
            changed_positions: to_wire(self.store.changed_positions()),
            ..v1::StandingResponse::default()
        })
    }
}

/// The replica's side of a stream. It calls the same store functions as `serve/stream.rs`,
/// in the same order.
pub(crate) struct Stream {
    pub(crate) replica: usize,
    place: Reading,
    /// The positions up to which the agent has seen its own Node.
    node_wait: Option<BTreeMap<SourceKind, u64>>,
    behind: BehindWait,
    sent_node: Option<OwnNode>,
    node_revision: u64,
}

enum Reading {
    Waiting(Resumption),
    At(Cursor),
}

impl Stream {
    /// Answers `Hello` with `Welcome`.
    pub(crate) fn open(index: usize, replica: &Replica, resume: Option<Resume>) -> (Self, ResumeMode, Body) {
        let store = &replica.store;
        let node_wait = Some(resume.as_ref().map(|resume| resume.positions.clone()).unwrap_or_default());
        let (mode, begun) = Resumption::begin(store, resume);
        let welcome = v1::Welcome {
            replica: format!("replica-{index}"),
            epoch: store.epoch(),
            resume: match mode {
                ResumeMode::Log => v1::welcome::ResumeMode::Log,
                ResumeMode::Digests => v1::welcome::ResumeMode::Digests,
                ResumeMode::Full => v1::welcome::ResumeMode::Full,
            }
            .into(),
            source_state: v1::SourceState::from(store.source_state()).into(),
            head_version: Some(store.version()),
            ..v1::Welcome::default()
        };
        let place = begun.map_or_else(Reading::Waiting, Reading::At);
        let (behind, sent_node) = (BehindWait::default(), None);
        (Self { replica: index, place, node_wait, behind, sent_node, node_revision: 0 }, mode, Body::Welcome(welcome))
    }

    pub(crate) fn is_waiting(&self) -> bool {
        matches!(self.place, Reading::Waiting(_))
    }

    /// The next message for the agent. `None` if no message is due.
    pub(crate) fn next(&mut self, replica: &Replica, now: Instant) -> Option<Body> {
        let store = &replica.store;
        let mut is_over = |not_yet| self.behind.look(not_yet, store, BEHIND_WAIT, now).is_over();
        if let Some(wait) = &self.node_wait
            && NotYet::check(store, wait, SourceKind::has_nodes).map_or_else(&mut is_over, |()| true)
        {
            self.node_wait = None;
        }
        if self.node_wait.is_none() {
            let own = store.node(NODE);
            if self.sent_node.as_ref() != Some(&own) {
                self.node_revision += 1;
                let position =
                    own.position.map(|(kind, position)| v1::SourcePosition { kind: wire_kind(kind), position });
                let node = own.node.as_deref().map(node_to_wire);
                self.sent_node = Some(own);
                return Some(Body::OwnNode(v1::OwnNode {
                    revision: self.node_revision,
                    node,
                    position,
                    ..v1::OwnNode::default()
                }));
            }
        }
        if let Reading::Waiting(resumption) = &self.place {
            let cursor = match resumption.advance(store) {
                Ok(cursor) => cursor,
                Err(not_yet) if !is_over(not_yet) => return None,
                Err(_) => resumption.revert(store),
            };
            self.place = Reading::At(cursor);
        }
        let Reading::At(cursor) = &mut self.place else { return None };
        let frame = store.next_frame(cursor)?;
        v1::ServerMessage::decode(&frame[PREFIX_BYTES..]).unwrap().body
    }

    /// The current `Heartbeat` of a replica.
    pub(crate) fn heartbeat(replica: &Replica) -> Body {
        Body::Heartbeat(v1::Heartbeat {
            head_version: replica.store.version(),
            source_state: v1::SourceState::from(replica.store.source_state()).into(),
            ..v1::Heartbeat::default()
        })
    }
}
