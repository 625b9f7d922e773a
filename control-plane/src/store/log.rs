//! The compacted log: each recently changed key once, at the version of its last change; and
//! cursors, the places of streams in it.
//!
//! The log is bounded, so that its memory does not grow with the cluster. When the log is full, the
//! oldest keys are dropped. A cursor that needs a dropped key receives whole buckets, which cost
//! less than a very large number of single changes.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::IpAddr,
    sync::Arc,
};

use bytes::Bytes;
use compact_str::CompactString;
use headgate_core::{
    Change, ServiceKey, State,
    digest::{BUCKETS, Digests},
};
use headgate_proto::{References, digests_from_wire, v1};

use super::{
    Inner, Limits, Store,
    encode::{
        BucketFrames, Delta, LogKey, LoggedKey, Span, positions_from_wire, positions_to_wire, present_all, server_frame,
    },
};
use crate::objects::SourceKind;

/// A place in the log: the version, and the number of the change within the version.
pub(super) type LogPlace = (u64, u32);

/// The first place after `version`.
pub(super) fn after(version: u64) -> LogPlace {
    (version.saturating_add(1), 0)
}

/// The places of one service's resources in the log.
#[derive(Debug, Default)]
struct ServicePlaces {
    service: Option<LogPlace>,
    endpoints: BTreeMap<IpAddr, LogPlace>,
}

#[derive(Debug, Default)]
pub(super) struct Log {
    entries: BTreeMap<LogPlace, LoggedKey>,
    services: HashMap<Arc<ServiceKey>, ServicePlaces>,
    cidrs: HashMap<CompactString, LogPlace>,
    tombstones: BTreeSet<LogPlace>,
    floor: u64,
}

impl Log {
    /// The floor: the log contains every change after this version.
    pub(super) fn floor(&self) -> u64 {
        self.floor
    }

    /// The key of the resource that a change adds, changes or removes. The key shares memory with
    /// an equal key in the log or in `state`. `state` is the state before the change.
    pub(super) fn intern(&self, change: &Change, state: &State) -> LogKey {
        let shared = |key: &ServiceKey| {
            let known = self.services.get_key_value(key).map(|(shared, _)| shared).or_else(|| state.key(key));
            known.map_or_else(|| Arc::new(key.clone()), Arc::clone)
        };
        match change {
            Change::Service(service) => LogKey::Service(shared(&service.key)),
            Change::RemoveService(key) => LogKey::Service(shared(key)),
            Change::Endpoint(key, endpoint) => LogKey::Endpoint(shared(key), endpoint.address),
            Change::RemoveEndpoint(key, address) => LogKey::Endpoint(shared(key), *address),
            Change::ServiceCidr(cidr) => LogKey::Cidr(cidr.name.clone()),
            Change::RemoveServiceCidr(name) => LogKey::Cidr(name.clone()),
        }
    }

    /// Records a key's last change at the newest `place`, and drops what is over the limits.
    pub(super) fn record(
        &mut self,
        place: LogPlace,
        key: LogKey,
        trigger_unix_ms: u64,
        is_removed: bool,
        limits: &Limits,
    ) {
        let old = match &key {
            LogKey::Service(key) => self.services.entry(Arc::clone(key)).or_default().service.replace(place),
            LogKey::Endpoint(key, address) => {
                self.services.entry(Arc::clone(key)).or_default().endpoints.insert(*address, place)
            }
            LogKey::Cidr(name) => self.cidrs.insert(name.clone(), place),
        };
        if let Some(old) = old {
            self.entries.remove(&old);
            self.tombstones.remove(&old);
        }
        self.entries.insert(place, LoggedKey { key, trigger_unix_ms });
        if is_removed {
            self.tombstones.insert(place);
        }
        while self.tombstones.len() > limits.max_tombstones
            && let Some(place) = self.tombstones.pop_first()
        {
            self.forget_place(place);
        }
        while self.entries.len() > limits.max_tombstones.saturating_add(limits.max_delta_changes)
            && let Some((place, _)) = self.entries.first_key_value()
        {
            let place = *place;
            self.tombstones.remove(&place);
            self.forget_place(place);
        }
    }

    fn forget_place(&mut self, place: LogPlace) {
        self.floor = self.floor.max(place.0);
        match self.entries.remove(&place).map(|entry| entry.key) {
            Some(LogKey::Cidr(name)) => {
                self.cidrs.remove(&name);
            }
            Some(LogKey::Service(key)) => self.forget(&key, |places| places.service = None),
            Some(LogKey::Endpoint(key, address)) => self.forget(&key, |places| {
                places.endpoints.remove(&address);
            }),
            None => {}
        }
    }

    fn forget(&mut self, key: &ServiceKey, clear: impl FnOnce(&mut ServicePlaces)) {
        let Some(places) = self.services.get_mut(key) else { return };
        clear(places);
        if places.service.is_none() && places.endpoints.is_empty() {
            self.services.remove(key);
        }
    }

    /// The keys that have changed at or after `from`, in order of their last change.
    pub(super) fn since(&self, from: LogPlace) -> impl Iterator<Item = (LogPlace, &LoggedKey)> {
        self.entries.range(from..).map(|(place, entry)| (*place, entry))
    }

    /// The version of an endpoint's last change; the floor if the log lacks it.
    pub(super) fn endpoint_version(&self, key: &ServiceKey, address: IpAddr) -> u64 {
        let place = self.services.get(key).and_then(|places| places.endpoints.get(&address));
        place.map_or(self.floor, |place| place.0)
    }

    /// The version of a Service's own last change; the floor if the log lacks it.
    pub(super) fn service_version(&self, key: &ServiceKey) -> u64 {
        let place = self.services.get(key).and_then(|places| places.service);
        place.map_or(self.floor, |place| place.0)
    }

    /// The version of the last change of a service or its endpoints; the floor if the log lacks it.
    pub(super) fn newest_version(&self, key: &ServiceKey) -> u64 {
        let Some(places) = self.services.get(key) else { return self.floor };
        let endpoints = places.endpoints.values().map(|place| place.0).max();
        places.service.map(|place| place.0).max(endpoints).unwrap_or(self.floor)
    }

    /// Number of keys, including removed keys.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn tombstones(&self) -> usize {
        self.tombstones.len()
    }
}

// The place of a stream in the store. A cursor needs a few words of memory, however far behind the
// stream is.

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
    /// Decodes the message; `None` if the digests do not consist of one sum and one count for each
    /// bucket.
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

headgate_core::named! {
    /// How a stream begins (discovery.proto, section 3).
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub enum ResumeMode {
        /// The stream begins with the changes since the agent's version.
        Log = "log",
        /// The stream begins with the buckets whose digests differ.
        Digests = "digests",
        /// The stream begins with the whole state.
        Full = "full",
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
    /// The version that the receiver has reached when it has applied all messages that were sent so
    /// far.
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

    /// Number of buckets of the snapshot to which the next message belongs; `None` if the next
    /// message does not belong to a snapshot.
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
        // The list is empty for a full snapshot, which contains all buckets. After a comparison of
        // digests, an empty list means that no bucket differed.
        let buckets = self.buckets.iter().flatten().copied().map(u32::from).collect();
        server_frame(v1::server_message::Body::SnapshotEnd(v1::SnapshotEnd {
            version: self.version,
            // Buckets may be newer than `version`, and the positions must cover the newest bucket
            // (discovery.proto, section 6).
            positions: positions_to_wire(inner.shared_positions()),
            buckets,
            resource_count: self.resources,
        }))
    }
}

impl Store {
    /// Chooses the cheapest way for an agent to continue from the state that it holds. Returns the
    /// resume mode and a cursor.
    #[must_use]
    pub fn cursor(&self, resume: Option<&Resume>) -> (ResumeMode, Cursor) {
        let inner = self.read();
        let full =
            || (ResumeMode::Full, Cursor::at(0, CursorPhase::Snapshot(Walk::new(inner.version, None)), inner.version));
        let Some(resume) = resume else { return full() };
        // Until the source has been listed, the state is incomplete, and no agent can resume from
        // the log.
        let is_ours = resume.epoch == self.epoch() && self.is_synced();
        if is_ours && (inner.log.floor()..=inner.version).contains(&resume.version) {
            return (ResumeMode::Log, Cursor::at(resume.version, CursorPhase::Follow, inner.version));
        }
        let Some(digests) = &resume.digests else { return full() };
        let walk = Walk::new(inner.version, Some(inner.state.digests().differing(digests)));
        (ResumeMode::Digests, Cursor::at(0, CursorPhase::Snapshot(walk), inner.version))
    }

    /// Makes a cursor between batches send these buckets in full, with everything that has changed
    /// since the cursor's version. Returns false if the cursor is not between batches.
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
        let entries: Vec<_> = inner.log.since(after(start)).map(|(_, entry)| entry).take(limit + 1).collect();
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
        // The lock is released before the copied values are encoded, so that commits do not wait
        // for the encoding.
        drop(inner);
        Delta::encode(span, &positions, changes, self.limits.part_bytes, &self.split_budget)
    }
}
