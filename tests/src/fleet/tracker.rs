//! Tracks an agent's version without its resources, and checks all messages against the contract at
//! the head of `proto/headgate/v1/discovery.proto`. Batches and chunks, which are the most and the
//! largest messages, are parsed in place.

use headgate_proto::v1::{self, welcome::ResumeMode};
use prost::{DecodeError, Message as _};

use super::wire::{Fields, Malformed};

/// The number of values of `SourcePosition.Kind`.
const KINDS: usize = 6;
/// `SourcePosition.Kind.ENDPOINT_SLICES`.
const ENDPOINT_SLICES: usize = 2;

/// A violation of the contract.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// The bytes are not a message.
    #[error("a message cannot be decoded")]
    Malformed,
    /// The first message is not `Welcome`, a later message is `Welcome`, or `Welcome` is invalid.
    #[error("{0}")]
    Welcome(String),
    /// A batch does not follow the agent's version (discovery.proto, section 5).
    #[error("a batch follows version {previous}, and the agent is at {held}")]
    Gap {
        /// `Batch.follows_version`.
        previous: u64,
        /// The agent's version.
        held: u64,
    },
    /// A message arrives in a wrong order (discovery.proto, sections 2 and 5).
    #[error("{0}")]
    Order(&'static str),
    /// The number of resources in a snapshot is wrong (discovery.proto, section 4).
    #[error("the snapshot's end counts {counted} resources, but {staged} were received")]
    Count {
        /// `SnapshotEnd.resource_count`.
        counted: u64,
        /// The number of received resources.
        staged: u64,
    },
    /// A message contains an older state than the agent's state (discovery.proto, section 6).
    #[error("older state: position {sent} of source kind {kind} after {held}")]
    Older {
        /// The number of the kind.
        kind: usize,
        /// The agent's position.
        held: u64,
        /// The position in the message.
        sent: u64,
    },
    /// The server was silent for three heartbeat intervals (discovery.proto, section 9).
    #[error("the server sent nothing for three heartbeat intervals")]
    Silent,
    /// The decoder or state machine of the real agent reports an error.
    #[error("the real agent's state machine: {0}")]
    Agent(String),
}

impl From<Malformed> for Violation {
    fn from(_: Malformed) -> Self {
        Self::Malformed
    }
}

impl From<DecodeError> for Violation {
    fn from(_: DecodeError) -> Self {
        Self::Malformed
    }
}

/// How a stream began, as in `Welcome.ResumeMode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Mode {
    /// The replica sends the changes since the agent's version.
    Log,
    /// The replica sends the buckets whose digests differ.
    Digests,
    /// The replica sends everything.
    Full,
}

/// A version of a replica, with the positions of the source that it covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Point {
    /// The epoch of the replica.
    pub epoch: u64,
    /// The version within the epoch.
    pub version: u64,
    /// The positions of the source, by kind.
    pub positions: [u64; KINDS],
}

impl Point {
    /// The position of EndpointSlices.
    #[must_use]
    pub fn slices(&self) -> u64 {
        self.positions[ENDPOINT_SLICES]
    }
}

/// Counts of the messages on a stream.
#[derive(Debug, Clone, Copy, Default)]
pub struct Received {
    /// Messages.
    pub messages: u64,
    /// Bytes of messages, without framing.
    pub bytes: u64,
    /// Batches. Each part of a split batch counts.
    pub batches: u64,
    /// Bytes of batches.
    pub batch_bytes: u64,
    /// Resources and removals in batches.
    pub batch_resources: u64,
    /// Chunks of snapshots.
    pub chunks: u64,
    /// Bytes of chunks.
    pub chunk_bytes: u64,
    /// Resources in chunks.
    pub chunk_resources: u64,
    /// Complete snapshots.
    pub snapshots: u64,
    /// Buckets that the ends of snapshots list.
    pub buckets: u64,
    /// Heartbeats.
    pub heartbeats: u64,
    /// Requests to move to another replica.
    pub drains: u64,
}

impl std::ops::AddAssign for Received {
    fn add_assign(&mut self, other: Self) {
        self.messages += other.messages;
        self.bytes += other.bytes;
        self.batches += other.batches;
        self.batch_bytes += other.batch_bytes;
        self.batch_resources += other.batch_resources;
        self.chunks += other.chunks;
        self.chunk_bytes += other.chunk_bytes;
        self.chunk_resources += other.chunk_resources;
        self.snapshots += other.snapshots;
        self.buckets += other.buckets;
        self.heartbeats += other.heartbeats;
        self.drains += other.drains;
    }
}

/// The effect of a message on the agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Effect {
    /// The message needs no answer.
    None,
    /// The stream begins.
    Welcomed,
    /// The agent has a new version. The value is the agent's previous point.
    Moved(Point),
    /// The agent's own Node has changed.
    Node,
    /// The replica asks the agent to move to another replica within this number of milliseconds.
    Drained(u64),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Phase {
    #[default]
    AwaitingWelcome,
    Resuming,
    Following,
}

/// Tracks an agent's version, and checks messages against the contract.
#[derive(Debug, Default)]
pub struct Tracker {
    point: Option<Point>,
    phase: Phase,
    epoch: u64,
    mode: Option<Mode>,
    /// The positions in the received parts of a split batch.
    positions: [u64; KINDS],
    in_batch: bool,
    /// Whether the last batch asks for an ACK without a pause.
    is_urgent: bool,
    staged: u64,
    heartbeat_interval_ms: u64,
    node_revision: u64,
    received: Received,
}

impl Tracker {
    /// Begins a stream. The agent resumes from [`Self::point`].
    pub(super) fn begin(&mut self) {
        *self = Self { point: self.point, ..Self::default() };
    }

    /// Ends the stream, and returns the counts of its messages.
    pub(super) fn end(&mut self) -> Received {
        let received = self.received;
        self.begin();
        received
    }

    /// The agent's point; `None` before its first complete snapshot.
    #[must_use]
    pub fn point(&self) -> Option<Point> {
        self.point
    }

    /// How the present stream began; `None` before `Welcome`.
    #[must_use]
    pub fn mode(&self) -> Option<Mode> {
        self.mode
    }

    /// Whether the resume is complete and the agent receives batches.
    #[must_use]
    pub fn is_following(&self) -> bool {
        self.phase == Phase::Following
    }

    /// Counts of the messages on the present stream.
    #[must_use]
    pub fn received(&self) -> &Received {
        &self.received
    }

    /// Whether the last batch asks for an ACK without a pause (discovery.proto, section 18).
    pub(super) fn is_urgent(&self) -> bool {
        self.is_urgent
    }

    /// `Welcome.heartbeat_interval_ms` of the present stream.
    pub(super) fn heartbeat_interval_ms(&self) -> u64 {
        self.heartbeat_interval_ms
    }

    /// The revision of the last `OwnNode` of the present stream.
    pub(super) fn node_revision(&self) -> u64 {
        self.node_revision
    }

    /// Processes one `ServerMessage`.
    pub(super) fn on_message(&mut self, message: &[u8]) -> Result<Effect, Violation> {
        let length = message.len() as u64;
        self.received.messages += 1;
        self.received.bytes += length;
        let mut effect = Effect::None;
        for field in Fields(message) {
            let (number, value) = field?;
            let body = value.bytes()?;
            if (number == 1) != (self.phase == Phase::AwaitingWelcome) {
                return Err(Violation::Welcome(
                    "Welcome must be the first message of a stream, and no later message".to_owned(),
                ));
            }
            effect = match number {
                1 => self.on_welcome(body)?,
                2 => self.on_batch(body)?,
                3 => self.on_chunk(body)?,
                4 => self.on_end(body)?,
                5 => self.on_node(body)?,
                6 => self.on_heartbeat(body)?,
                7 => self.on_drain(body)?,
                // Agents ignore unknown messages (discovery.proto, section 12).
                _ => Effect::None,
            };
        }
        Ok(effect)
    }

    fn on_welcome(&mut self, body: &[u8]) -> Result<Effect, Violation> {
        let welcome = v1::Welcome::decode(body)?;
        (self.epoch, self.heartbeat_interval_ms) = (welcome.epoch, welcome.heartbeat_interval_ms.into());
        let held = self.point.map(|point| point.epoch);
        let mode = match welcome.resume() {
            ResumeMode::Log if held == Some(self.epoch) => Mode::Log,
            ResumeMode::Digests if held.is_some() => Mode::Digests,
            ResumeMode::Full => Mode::Full,
            mode => {
                return Err(Violation::Welcome(format!("resume mode {mode:?} for an agent that holds epoch {held:?}")));
            }
        };
        if self.epoch == 0 {
            return Err(Violation::Welcome("epoch 0 is reserved".to_owned()));
        }
        self.phase = if mode == Mode::Log { Phase::Following } else { Phase::Resuming };
        self.mode = Some(mode);
        Ok(Effect::Welcomed)
    }

    fn on_batch(&mut self, body: &[u8]) -> Result<Effect, Violation> {
        let (mut follows, mut version, mut resources) = (None, 0_u64, 0);
        self.is_urgent = false;
        for field in Fields(body) {
            match field? {
                (2, value) => version = value.number()?,
                (3, value) => put_position(v1::SourcePosition::decode(value.bytes()?)?, &mut self.positions),
                (5, value) => self.positions[ENDPOINT_SLICES] = value.number()?,
                (6, value) => follows = Some(value.number()?),
                (7, value) => self.is_urgent = value.number()? != 0,
                (4, value) => resources += count(value.bytes()?)?.all(),
                _ => {}
            }
        }
        let previous = follows.unwrap_or(version.wrapping_sub(1));
        self.received.batches += 1;
        self.received.batch_bytes += body.len() as u64;
        self.received.batch_resources += resources;
        let (Phase::Following, Some(before)) = (self.phase, self.point) else {
            return Err(Violation::Order("a batch before the snapshot's end"));
        };
        if self.staged > 0 {
            return Err(Violation::Order("a batch in the middle of a snapshot"));
        }
        if previous != before.version {
            return Err(Violation::Gap { previous, held: before.version });
        }
        if version < previous {
            return Err(Violation::Order("a batch has a version below the version that it follows"));
        }
        self.in_batch = version == previous;
        if self.in_batch {
            return Ok(Effect::None);
        }
        let mut point = Point { version, ..before };
        let moved = std::mem::take(&mut self.positions);
        for ((kind, held), sent) in point.positions.iter_mut().enumerate().zip(moved) {
            if sent != 0 && sent < *held {
                return Err(Violation::Older { kind, held: *held, sent });
            }
            *held = sent.max(*held);
        }
        self.point = Some(point);
        Ok(Effect::Moved(before))
    }

    fn on_chunk(&mut self, body: &[u8]) -> Result<Effect, Violation> {
        self.received.chunks += 1;
        self.received.chunk_bytes += body.len() as u64;
        if self.in_batch {
            return Err(Violation::Order("a snapshot in the middle of a split batch"));
        }
        for field in Fields(body) {
            if let (1, value) = field? {
                let counts = count(value.bytes()?)?;
                if counts.removed > 0 {
                    return Err(Violation::Order("a snapshot contains removals"));
                }
                self.staged += counts.present;
                self.received.chunk_resources += counts.present;
            }
        }
        Ok(Effect::None)
    }

    fn on_end(&mut self, body: &[u8]) -> Result<Effect, Violation> {
        let end = v1::SnapshotEnd::decode(body)?;
        let (version, counted, buckets) = (end.version, end.resource_count, end.buckets.len() as u64);
        let mut positions = [0; KINDS];
        end.positions.into_iter().for_each(|position| put_position(position, &mut positions));
        let staged = std::mem::take(&mut self.staged);
        if counted != staged {
            return Err(Violation::Count { counted, staged });
        }
        let before = self.point.unwrap_or_default();
        if before.epoch == self.epoch && version < before.version {
            return Err(Violation::Order("a snapshot has an older version than the agent"));
        }
        for (kind, (held, sent)) in before.positions.into_iter().zip(positions).enumerate() {
            // The position is 0 if this replica's source does not have the kind. A position of 0
            // cannot be compared.
            if sent != 0 && sent < held {
                return Err(Violation::Older { kind, held, sent });
            }
        }
        self.received.snapshots += 1;
        self.received.buckets += buckets;
        self.phase = Phase::Following;
        self.point = Some(Point { epoch: self.epoch, version, positions });
        Ok(Effect::Moved(before))
    }

    fn on_node(&mut self, body: &[u8]) -> Result<Effect, Violation> {
        let revision = v1::OwnNode::decode(body)?.revision;
        if revision != self.node_revision + 1 {
            return Err(Violation::Order("OwnNode.revision is not the next number"));
        }
        self.node_revision = revision;
        Ok(Effect::Node)
    }

    fn on_drain(&mut self, body: &[u8]) -> Result<Effect, Violation> {
        self.received.drains += 1;
        Ok(Effect::Drained(v1::Drain::decode(body)?.reconnect_within_ms.into()))
    }

    fn on_heartbeat(&mut self, body: &[u8]) -> Result<Effect, Violation> {
        self.received.heartbeats += 1;
        let head = v1::Heartbeat::decode(body)?.head_version;
        if self.phase == Phase::Following && self.point.is_some_and(|point| head < point.version) {
            return Err(Violation::Order("a heartbeat has an older head version than the agent"));
        }
        Ok(Effect::None)
    }
}

fn put_position(sent: v1::SourcePosition, positions: &mut [u64; KINDS]) {
    let held = usize::try_from(sent.kind).ok().filter(|kind| *kind != 0).and_then(|kind| positions.get_mut(kind));
    if let Some(held) = held {
        *held = sent.position;
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct Counts {
    present: u64,
    removed: u64,
}

impl Counts {
    fn all(self) -> u64 {
        self.present + self.removed
    }
}

/// Counts resources and removals in a `Changes` message.
fn count(changes: &[u8]) -> Result<Counts, Malformed> {
    let mut counts = Counts::default();
    for field in Fields(changes) {
        match field? {
            (1 | 4, _) => counts.present += 1,
            (3 | 5, _) => counts.removed += 1,
            (2, group) => {
                for field in Fields(group.bytes()?) {
                    match field? {
                        (3, _) => counts.present += 1,
                        (4, _) => counts.removed += 1,
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    Ok(counts)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use headgate_proto::v1::{server_message::Body, source_position::Kind};

    use super::*;

    fn take(tracker: &mut Tracker, body: Body) -> Result<Effect, Violation> {
        tracker.on_message(&v1::ServerMessage { body: Some(body) }.encode_to_vec())
    }

    fn welcome(epoch: u64, mode: ResumeMode) -> Body {
        Body::Welcome(v1::Welcome { epoch, resume: mode.into(), ..Default::default() })
    }

    fn at(position: u64) -> Vec<v1::SourcePosition> {
        vec![v1::SourcePosition { kind: Kind::EndpointSlices.into(), position }]
    }

    fn batch(previous: u64, version: u64, endpoint_slices_position: u64) -> Body {
        let follows_version = (previous + 1 != version).then_some(previous);
        Body::Batch(v1::Batch { follows_version, version, endpoint_slices_position, ..Default::default() })
    }

    fn end(version: u64, position: u64, resource_count: u64) -> Body {
        Body::SnapshotEnd(v1::SnapshotEnd { version, positions: at(position), buckets: Vec::new(), resource_count })
    }

    fn chunk(services: usize, endpoints: usize) -> Body {
        let changed = vec![v1::Endpoint::default(); endpoints];
        let changes = v1::Changes {
            services: vec![v1::Service::default(); services],
            endpoints: vec![v1::ServiceEndpoints { changed, ..Default::default() }],
            ..Default::default()
        };
        Body::SnapshotChunk(v1::SnapshotChunk { changes: Some(changes) })
    }

    /// A tracker at version 5 of epoch 1, which covers position 10.
    fn following() -> Tracker {
        let mut tracker = Tracker::default();
        take(&mut tracker, welcome(1, ResumeMode::Full)).unwrap();
        take(&mut tracker, chunk(1, 2)).unwrap();
        take(&mut tracker, end(5, 10, 3)).unwrap();
        tracker
    }

    #[test]
    fn a_stream_that_follows_the_contract_is_accepted() {
        let mut tracker = following();
        assert_eq!(take(&mut tracker, batch(5, 5, 11)), Ok(Effect::None), "the first part of a split batch");
        assert!(matches!(take(&mut tracker, batch(5, 6, 11)), Ok(Effect::Moved(before)) if before.version == 5));
        let point = tracker.point().unwrap();
        assert_eq!((point.epoch, point.version, point.slices()), (1, 6, 11));
        assert_eq!((tracker.received().chunk_resources, tracker.received().batches), (3, 2));
    }

    #[test]
    fn violations_of_the_contract_are_found() {
        let broken = |body| take(&mut following(), body).unwrap_err();
        assert_eq!(broken(batch(4, 6, 11)), Violation::Gap { previous: 4, held: 5 });
        assert_eq!(broken(batch(5, 6, 9)), Violation::Older { kind: 2, held: 10, sent: 9 });
        assert_eq!(broken(end(6, 9, 0)), Violation::Older { kind: 2, held: 10, sent: 9 });
        assert_eq!(broken(end(6, 11, 1)), Violation::Count { counted: 1, staged: 0 });
        assert!(matches!(broken(end(4, 11, 0)), Violation::Order(_)));
        assert!(matches!(broken(welcome(1, ResumeMode::Log)), Violation::Welcome(_)));
        let heartbeat = Body::Heartbeat(v1::Heartbeat { head_version: 4, ..Default::default() });
        assert!(matches!(broken(heartbeat), Violation::Order(_)));
        let node = Body::OwnNode(v1::OwnNode { revision: 2, ..v1::OwnNode::default() });
        assert!(matches!(broken(node), Violation::Order(_)));
        assert!(matches!(take(&mut Tracker::default(), batch(0, 1, 1)), Err(Violation::Welcome(_))));
        let mut tracker = following();
        tracker.begin();
        assert!(matches!(take(&mut tracker, welcome(2, ResumeMode::Log)), Err(Violation::Welcome(_))), "another epoch");
        let mut tracker = following();
        tracker.begin();
        take(&mut tracker, welcome(2, ResumeMode::Digests)).unwrap();
        assert!(matches!(take(&mut tracker, batch(5, 6, 11)), Err(Violation::Order(_))), "before the snapshot's end");
    }
}
