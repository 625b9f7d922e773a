//! The place of a stream in the store: a few words of memory.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use bytes::Bytes;
use headgate_core::{
    Change,
    digest::{BUCKETS, Digests},
};
use headgate_proto::{References, digests_from_wire, v1};

use super::{
    Inner, Store,
    encode::{BucketFrames, Delta, Span, positions_from_wire, positions_to_wire, present_all, server_frame},
    log,
};
use crate::transaction::SourceKind;

/// A cached step is used until its end is more than this number of versions behind the head.
const FOLLOW_VERSIONS: u64 = 16;

/// The state that an agent holds (`Hello.resume`).
#[derive(Debug, Clone, Default)]
pub struct Resume {
    /// Epoch of the replica that the agent last followed; 0 if the epoch is unknown.
    pub epoch: u64,
    /// Version within that epoch.
    pub version: u64,
    /// Source positions that the agent's state covers.
    pub positions: BTreeMap<SourceKind, u64>,
    /// Digests of the agent's state, if the agent sent them.
    pub digests: Option<Digests>,
}

impl Resume {
    /// Decodes the message; `None` unless there is a sum and a count for each bucket.
    #[must_use]
    pub fn from_wire(wire: &v1::Resume) -> Option<Self> {
        let digests = match &wire.digests {
            None => None,
            Some(digests) => Some(digests_from_wire(digests)?),
        };
        let positions = positions_from_wire(&wire.positions);
        Some(Self { epoch: wire.epoch, version: wire.version, positions, digests })
    }
}

/// How a stream begins (discovery.proto, section 3).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ResumeMode {
    /// The stream begins with the changes since the agent's version.
    Log,
    /// The stream begins with the buckets whose digests differ.
    Digests,
    /// The stream begins with the whole state.
    Full,
}

impl ResumeMode {
    /// Lower-case name, for metrics and `Inspect`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Log => "log",
            Self::Digests => "digests",
            Self::Full => "full",
        }
    }
}

/// The place of a stream. [`Store::cursor`] creates a cursor, and [`Store::next_frame`] moves it.
#[derive(Debug)]
pub struct Cursor {
    phase: CursorPhase,
    version: u64,
    resources: u64,
    snapshots: u64,
    /// Until the cursor has reached this version, messages contain no references. A reference
    /// stands for a value of the store at the cursor's version. After a snapshot, or a resume after
    /// an interrupted snapshot, parts of the agent's state may be newer than the cursor's version.
    /// So the agent may lack a value of the cursor's version.
    spelt_out_to: u64,
}

#[derive(Debug)]
enum CursorPhase {
    /// The next message is the batch after `Cursor.version`.
    Follow,
    /// The next message is part `next` of a split batch. The store bounds the memory of all split
    /// batches.
    Parts { delta: Arc<Delta>, next: usize },
    /// The next message belongs to a snapshot.
    Snapshot(Walk),
}

/// A walk over buckets, which sends a snapshot. Each bucket is sent in its present state when the
/// walk reaches it. The end marker carries the version at which the walk began, so later changes
/// follow as ordinary batches. For a slow stream, the store keeps no copy of the state.
#[derive(Debug)]
struct Walk {
    version: u64,
    /// The buckets to send; `None` for all buckets.
    buckets: Option<Box<[u16]>>,
    next: usize,
    current: Option<(Arc<BucketFrames>, usize)>,
    resources: u64,
}

impl Cursor {
    /// The version that the receiver has after all messages that were sent.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Number of resources and removals in the completed batches and snapshots.
    #[must_use]
    pub fn resources(&self) -> u64 {
        self.resources
    }

    /// Number of completed snapshots, full or of some buckets.
    #[must_use]
    pub fn snapshots(&self) -> u64 {
        self.snapshots
    }

    /// Number of buckets of the next message's snapshot; `None` if it belongs to none.
    #[must_use]
    pub fn snapshot_buckets(&self) -> Option<usize> {
        match &self.phase {
            CursorPhase::Snapshot(walk) => Some(walk.buckets.as_ref().map_or(BUCKETS, |buckets| buckets.len())),
            CursorPhase::Follow | CursorPhase::Parts { .. } => None,
        }
    }

    /// True between batches: the agent has received all changes up to [`Cursor::version`].
    #[must_use]
    pub fn is_complete(&self) -> bool {
        matches!(self.phase, CursorPhase::Follow)
    }

    fn at(version: u64, phase: CursorPhase, head: u64) -> Self {
        Self { phase, version, resources: 0, snapshots: 0, spelt_out_to: head }
    }

    /// Returns one message of a batch, and moves the cursor past it.
    fn take_part(&mut self, delta: &Arc<Delta>, index: usize) -> Option<Bytes> {
        let frame = delta.frames.get(index).cloned();
        if index + 1 < delta.frames.len() {
            self.phase = CursorPhase::Parts { delta: Arc::clone(delta), next: index + 1 };
        } else {
            self.version = delta.span.version;
            self.resources += delta.resources;
            self.phase = CursorPhase::Follow;
        }
        frame
    }
}

impl Walk {
    fn new(version: u64, buckets: Option<Vec<u16>>) -> Self {
        Self { version, buckets: buckets.map(Into::into), next: 0, current: None, resources: 0 }
    }

    fn next_bucket(&mut self) -> Option<u16> {
        let bucket = match &self.buckets {
            Some(buckets) => buckets.get(self.next).copied(),
            None => u16::try_from(self.next).ok().filter(|bucket| usize::from(*bucket) < BUCKETS),
        };
        self.next += usize::from(bucket.is_some());
        bucket
    }

    /// The next chunk; `None` after the last bucket.
    fn next_chunk(&mut self, inner: &Inner, part_bytes: usize) -> Option<Bytes> {
        loop {
            if let Some((frames, next)) = &mut self.current {
                if let Some(frame) = frames.frames.get(*next).cloned() {
                    *next += 1;
                    return Some(frame);
                }
                self.resources += frames.resources;
                self.current = None;
            }
            let bucket = self.next_bucket()?;
            self.current = Some((inner.buckets.frames(bucket, &inner.state, part_bytes), 0));
        }
    }

    fn end_marker(&self, inner: &Inner) -> Bytes {
        // Empty for a full snapshot, but after digests it means that none differed.
        let buckets = self.buckets.iter().flatten().copied().map(u32::from).collect();
        server_frame(v1::server_message::Body::SnapshotEnd(v1::SnapshotEnd {
            version: self.version,
            // Positions must cover the newest bucket (discovery.proto, section 6).
            positions: positions_to_wire(inner.shared_positions()),
            buckets,
            resource_count: self.resources,
        }))
    }
}

impl Store {
    /// Chooses the cheapest way for an agent to continue from what it holds.
    #[must_use]
    pub fn cursor(&self, resume: Option<&Resume>) -> (ResumeMode, Cursor) {
        let inner = self.read();
        let full =
            || (ResumeMode::Full, Cursor::at(0, CursorPhase::Snapshot(Walk::new(inner.version, None)), inner.version));
        let Some(resume) = resume else { return full() };
        // Before the source is listed, the state is incomplete.
        let is_ours = resume.epoch == self.epoch() && self.is_synced();
        if is_ours && (inner.log.floor()..=inner.version).contains(&resume.version) {
            return (ResumeMode::Log, Cursor::at(resume.version, CursorPhase::Follow, inner.version));
        }
        let Some(digests) = &resume.digests else { return full() };
        let walk = Walk::new(inner.version, Some(inner.state.digests().differing(digests)));
        (ResumeMode::Digests, Cursor::at(0, CursorPhase::Snapshot(walk), inner.version))
    }

    /// Sends these buckets in full, with all changes. False if the cursor is within a batch.
    pub fn send_again(&self, cursor: &mut Cursor, buckets: &BTreeSet<u16>) -> bool {
        if !cursor.is_complete() || buckets.is_empty() {
            return false;
        }
        let inner = self.read();
        let mut buckets = buckets.clone();
        buckets.extend(inner.buckets.changed_since(cursor.version));
        cursor.phase = CursorPhase::Snapshot(Walk::new(inner.version, Some(buckets.into_iter().collect())));
        true
    }

    /// The next message for a stream, with its gRPC prefix; `None` if the cursor is at the head.
    pub fn next_frame(&self, cursor: &mut Cursor) -> Option<Bytes> {
        match &mut cursor.phase {
            CursorPhase::Parts { delta, next } => {
                let (delta, next) = (Arc::clone(delta), *next);
                cursor.take_part(&delta, next)
            }
            CursorPhase::Snapshot(walk) => {
                let inner = self.read();
                if let Some(chunk) = walk.next_chunk(&inner, self.limits.part_bytes) {
                    return Some(chunk);
                }
                let end = walk.end_marker(&inner);
                cursor.version = walk.version;
                cursor.spelt_out_to = inner.version;
                cursor.resources += walk.resources;
                cursor.snapshots += 1;
                cursor.phase = CursorPhase::Follow;
                Some(end)
            }
            CursorPhase::Follow => self.follow(cursor),
        }
    }

    fn follow(&self, cursor: &mut Cursor) -> Option<Bytes> {
        let inner = self.read();
        if cursor.version >= inner.version {
            return None;
        }
        let (head, must_walk) = (inner.version, cursor.version < inner.log.floor());
        drop(inner);
        if !must_walk && let Some(delta) = self.step(cursor.version, cursor.spelt_out_to, head) {
            return cursor.take_part(&delta, 0);
        }
        let inner = self.read();
        // At least one bucket has changed, because the head is ahead of the cursor. The filter is a
        // safeguard: if the list were empty, the walk would send all buckets. In the end marker of
        // this snapshot, an empty list means all buckets.
        let buckets = Some(inner.buckets.changed_since(cursor.version)).filter(|buckets| !buckets.is_empty());
        cursor.phase = CursorPhase::Snapshot(Walk::new(inner.version, buckets));
        drop(inner);
        self.next_frame(cursor)
    }

    /// Returns the step from `start`: the current values of everything that has changed since
    /// `start`. All streams at `start` share the step. A cached step is reused if it ends at most
    /// [`FOLLOW_VERSIONS`] versions before `head`. If `spelt_out_to` is after `start`, the step
    /// contains no references and ends at `spelt_out_to` or later. The receiver may already hold
    /// values of `spelt_out_to`, and must not return to older values.
    ///
    /// Returns `None` if the step is so large that buckets are cheaper, or if the memory for split
    /// steps has no room for the step.
    fn step(&self, start: u64, spelt_out_to: u64, head: u64) -> Option<Arc<Delta>> {
        let is_spelt_out = start < spelt_out_to;
        let from = head.saturating_sub(FOLLOW_VERSIONS).max(spelt_out_to.min(head));
        let is_usable = |delta: &Delta| delta.span.version >= from;
        self.deltas.get((start, is_spelt_out), is_usable, || self.encode_step(start, is_spelt_out))
    }

    fn encode_step(&self, start: u64, is_spelt_out: bool) -> Option<Delta> {
        let inner = self.read();
        if start < inner.log.floor() {
            return None;
        }
        let limit = self.limits.max_delta_changes;
        let entries: Vec<_> = inner.log.since(log::after(start)).map(|(_, entry)| entry).take(limit + 1).collect();
        if entries.len() > limit {
            return None;
        }
        let references = |change: &Change| match is_spelt_out {
            true => References::default(),
            false => inner.references(start, change),
        };
        let changes = present_all(&inner.state, entries, references);
        let positions = inner.moved_positions(start);
        let span = Span { previous_version: start, version: inner.version, is_urgent: self.is_in_hurry() };
        // Commits do not wait for the encoding of the copied values.
        drop(inner);
        Delta::encode(span, &positions, changes, self.limits.part_bytes, &self.split_budget)
    }
}
