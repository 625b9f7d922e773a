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

/// A violation of the contract, in a sentence.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Violation(pub String);

impl Violation {
    fn of(what: &str) -> Self {
        Self(what.to_owned())
    }

    fn older(kind: usize, held: u64, sent: u64) -> Self {
        Self(format!("older state: position {sent} of source kind {kind} after {held}"))
    }
}

impl From<Malformed> for Violation {
    fn from(_: Malformed) -> Self {
        Self::of("a message cannot be decoded")
    }
}

impl From<DecodeError> for Violation {
    fn from(_: DecodeError) -> Self {
        Self::of("a message cannot be decoded")
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
                return Err(Violation::of("Welcome must be the first message of a stream, and no later message"));
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
                return Err(Violation(format!("resume mode {mode:?} for an agent that holds epoch {held:?}")));
            }
        };
        if self.epoch == 0 {
            return Err(Violation::of("epoch 0 is reserved"));
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
            return Err(Violation::of("a batch before the snapshot's end"));
        };
        if self.staged > 0 {
            return Err(Violation::of("a batch in the middle of a snapshot"));
        }
        if previous != before.version {
            return Err(Violation(format!(
                "a batch follows version {previous}, and the agent is at {}",
                before.version
            )));
        }
        if version < previous {
            return Err(Violation::of("a batch has a version below the version that it follows"));
        }
        self.in_batch = version == previous;
        if self.in_batch {
            return Ok(Effect::None);
        }
        let mut point = Point { version, ..before };
        let moved = std::mem::take(&mut self.positions);
        for ((kind, held), sent) in point.positions.iter_mut().enumerate().zip(moved) {
            if sent != 0 && sent < *held {
                return Err(Violation::older(kind, *held, sent));
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
            return Err(Violation::of("a snapshot in the middle of a split batch"));
        }
        for field in Fields(body) {
            if let (1, value) = field? {
                let counts = count(value.bytes()?)?;
                if counts.removed > 0 {
                    return Err(Violation::of("a snapshot contains removals"));
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
            return Err(Violation(format!(
                "the snapshot's end counts {counted} resources, but {staged} were received"
            )));
        }
        let before = self.point.unwrap_or_default();
        if before.epoch == self.epoch && version < before.version {
            return Err(Violation::of("a snapshot has an older version than the agent"));
        }
        for (kind, (held, sent)) in before.positions.into_iter().zip(positions).enumerate() {
            // The position is 0 if this replica's source does not have the kind. A position of 0
            // cannot be compared.
            if sent != 0 && sent < held {
                return Err(Violation::older(kind, held, sent));
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
            return Err(Violation::of("OwnNode.revision is not the next number"));
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
            return Err(Violation::of("a heartbeat has an older head version than the agent"));
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
