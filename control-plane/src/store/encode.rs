//! The keys of resources, and their encoding into messages of limited size. Streams share these
//! messages.

use std::{
    collections::{BTreeMap, BTreeSet},
    iter,
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
};

use bytes::Bytes;
use compact_str::CompactString;
use headgate_core::{
    Change, ServiceKey, State,
    digest::{self, BUCKETS},
};
use headgate_proto::{
    ChangesBuilder, References, frame,
    v1::{self, source_position::Kind},
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::objects::SourceKind;

/// Key of a resource that every agent receives.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum LogKey {
    Service(Arc<ServiceKey>),
    Endpoint(Arc<ServiceKey>, IpAddr),
    Cidr(CompactString),
}

impl LogKey {
    pub(super) fn bucket(&self) -> u16 {
        match self {
            Self::Service(key) | Self::Endpoint(key, _) => digest::service_bucket(key),
            Self::Cidr(name) => digest::service_cidr_bucket(name),
        }
    }

    /// Order of encoding: ServiceCIDRs, then each service followed by its endpoints.
    pub(super) fn order(&self) -> (Option<&ServiceKey>, Option<IpAddr>, &str) {
        match self {
            Self::Cidr(name) => (None, None, name),
            Self::Service(key) => (Some(key), None, ""),
            Self::Endpoint(key, address) => (Some(key), Some(*address), ""),
        }
    }
}

/// The last change of one key.
#[derive(Debug)]
pub(super) struct LoggedKey {
    pub(super) key: LogKey,
    pub(super) trigger_unix_ms: u64,
}

/// The versions before and after a step.
#[derive(Debug, Clone, Copy)]
pub(super) struct Span {
    pub(super) previous_version: u64,
    pub(super) version: u64,
    /// Agents acknowledge the step at once.
    pub(super) is_urgent: bool,
}

/// The kinds of positions, and their values on the wire.
const KINDS: [(SourceKind, Kind); 6] = [
    (SourceKind::Services, Kind::Services),
    (SourceKind::EndpointSlices, Kind::EndpointSlices),
    (SourceKind::Nodes, Kind::Nodes),
    (SourceKind::ServiceCidrs, Kind::ServiceCidrs),
    (SourceKind::Pods, Kind::Pods),
    (SourceKind::Files, Kind::Files),
];

/// The positions of a source on the wire.
pub(crate) fn positions_to_wire(positions: impl IntoIterator<Item = (SourceKind, u64)>) -> Vec<v1::SourcePosition> {
    let to_wire = |(kind, position)| {
        let kind = KINDS.iter().find(|(known, _)| *known == kind).map_or(Kind::Unspecified, |(_, kind)| *kind);
        v1::SourcePosition { kind: kind.into(), position }
    };
    positions.into_iter().map(to_wire).collect()
}

/// Positions by kind, without kinds that this program does not know.
pub(crate) fn positions_from_wire(wire: &[v1::SourcePosition]) -> BTreeMap<SourceKind, u64> {
    let from_wire = |wire: &v1::SourcePosition| {
        let (kind, _) = KINDS.into_iter().find(|(_, kind)| *kind == wire.kind())?;
        Some((kind, wire.position))
    };
    wire.iter().filter_map(from_wire).collect()
}

/// Encodes a message of the server with its gRPC prefix.
pub(crate) fn server_frame(body: v1::server_message::Body) -> Bytes {
    frame(&v1::ServerMessage { body: Some(body) })
}

/// The present value of a key as a change; a removal if the key has no value.
pub(super) fn present(state: &State, key: &LogKey) -> Change {
    match key {
        LogKey::Service(key) => match state.entry(key).and_then(|entry| entry.service()) {
            Some(service) => Change::from(service.clone()),
            None => Change::RemoveService((**key).clone()),
        },
        LogKey::Endpoint(key, address) => match state.entry(key).and_then(|entry| entry.endpoints().get(address)) {
            Some(endpoint) => Change::Endpoint((**key).clone(), endpoint.clone()),
            None => Change::RemoveEndpoint((**key).clone(), *address),
        },
        LogKey::Cidr(name) => match state.service_cidr(name) {
            Some(cidr) => Change::ServiceCidr(cidr.clone()),
            None => Change::RemoveServiceCidr(name.clone()),
        },
    }
}

/// A change to encode.
#[derive(Debug)]
pub(super) struct Item {
    change: Change,
    trigger_unix_ms: u64,
    references: References,
}

/// The present values of log entries in order of encoding, with possible references.
pub(super) fn present_all<'a>(
    state: &State,
    entries: impl IntoIterator<Item = &'a LoggedKey>,
    references: impl Fn(&Change) -> References,
) -> Vec<Item> {
    let mut entries: Vec<&LoggedKey> = entries.into_iter().collect();
    entries.sort_unstable_by(|a, b| a.key.order().cmp(&b.key.order()));
    let item = |entry: &LoggedKey| {
        let change = present(state, &entry.key);
        Item { trigger_unix_ms: entry.trigger_unix_ms, references: references(&change), change }
    };
    entries.into_iter().map(item).collect()
}

/// The messages of one step. If there are several messages, the receiver reaches the version of the
/// step with the last message. `None` if the estimated size of all messages before the last message
/// exceeds `max_split_bytes`.
pub(super) fn batch_frames(
    span: Span,
    positions: &[v1::SourcePosition],
    changes: impl IntoIterator<Item = Item>,
    part_bytes: usize,
    max_split_bytes: usize,
) -> Option<Box<[Bytes]>> {
    let Span { previous_version, version, is_urgent } = span;
    let mut parts = MessageParts::default();
    for change in changes {
        parts.push(change, part_bytes);
        if parts.full_bytes > max_split_bytes {
            return None;
        }
    }
    let is_slices = |position: &&v1::SourcePosition| position.kind() == Kind::EndpointSlices;
    let batch = |version: u64, positions: &[v1::SourcePosition], builder: ChangesBuilder| {
        server_frame(v1::server_message::Body::Batch(v1::Batch {
            follows_version: (version.checked_sub(1) != Some(previous_version)).then_some(previous_version),
            version,
            positions: positions.iter().filter(|position| !is_slices(position)).copied().collect(),
            changes: Some(builder.finish()),
            endpoint_slices_position: positions.iter().find(is_slices).map_or(0, |position| position.position),
            acknowledge_at_once: is_urgent,
        }))
    };
    let mut frames: Vec<Bytes> = parts.full.into_iter().map(|part| batch(previous_version, &[], part)).collect();
    frames.push(batch(version, positions, parts.last));
    Some(frames.into())
}

/// The messages of a part of a snapshot; empty if there are no resources.
pub(super) fn chunk_frames(changes: impl IntoIterator<Item = Change>, part_bytes: usize) -> Box<[Bytes]> {
    let mut parts = MessageParts::default();
    for change in changes {
        parts.push(Item { change, trigger_unix_ms: 0, references: References::default() }, part_bytes);
    }
    let chunk = |builder: ChangesBuilder| {
        let changes = Some(builder.finish());
        server_frame(v1::server_message::Body::SnapshotChunk(v1::SnapshotChunk { changes }))
    };
    let has_last = parts.last.resources() > 0;
    parts.full.into_iter().chain(has_last.then_some(parts.last)).map(chunk).collect()
}

/// Changes divided into messages.
#[derive(Default)]
struct MessageParts {
    full: Vec<ChangesBuilder>,
    /// Estimated size of `full`.
    full_bytes: usize,
    last: ChangesBuilder,
}

impl MessageParts {
    fn push(&mut self, Item { change, trigger_unix_ms, references }: Item, part_bytes: usize) {
        if self.last.estimated_bytes() >= part_bytes {
            self.full_bytes += self.last.estimated_bytes();
            self.full.push(std::mem::take(&mut self.last));
        }
        self.last.push(&change, trigger_unix_ms, references);
    }
}

// Buckets. Each bucket has its keys, the version of its last change, and its encoded resources.
//
// A snapshot, full or of some buckets, consists of the messages of its buckets. A bucket that does
// not change between two snapshots is encoded once.

/// The resources of one bucket as `SnapshotChunk`s.
#[derive(Debug)]
pub(super) struct BucketFrames {
    pub(super) frames: Box<[Bytes]>,
    pub(super) resources: u64,
}

#[derive(Debug, Default)]
struct Bucket {
    services: BTreeSet<Arc<ServiceKey>>,
    cidrs: BTreeSet<CompactString>,
    changed: u64,
    frames: OnceLock<Arc<BucketFrames>>,
}

#[derive(Debug)]
pub(super) struct Buckets(Box<[Bucket]>);

impl Default for Buckets {
    fn default() -> Self {
        Self(iter::repeat_with(Bucket::default).take(BUCKETS).collect())
    }
}

impl Buckets {
    /// Records a change of `key` at `version`. `state` already contains the change.
    pub(super) fn record(&mut self, version: u64, key: &LogKey, state: &State) {
        let bucket = &mut self.0[usize::from(key.bucket()) % BUCKETS];
        bucket.changed = version;
        bucket.frames = OnceLock::new();
        match key {
            LogKey::Service(key) | LogKey::Endpoint(key, _) => match state.entry(key) {
                Some(_) if bucket.services.contains(key) => false,
                Some(_) => bucket.services.insert(Arc::clone(key)),
                None => bucket.services.remove(key),
            },
            LogKey::Cidr(name) => match state.service_cidr(name) {
                Some(_) => bucket.cidrs.insert(name.clone()),
                None => bucket.cidrs.remove(name),
            },
        };
    }

    /// The buckets that have changed after `version`, in ascending order.
    pub(super) fn changed_since(&self, version: u64) -> Vec<u16> {
        let changed = self.0.iter().enumerate().filter(|(_, bucket)| bucket.changed > version);
        changed.filter_map(|(index, _)| u16::try_from(index).ok()).collect()
    }

    /// True if a bucket has changed after `version`.
    pub(super) fn has_changed_since(&self, bucket: u16, version: u64) -> bool {
        self.0[usize::from(bucket) % BUCKETS].changed > version
    }

    /// The keys of a bucket that have a Service or endpoints, in order.
    pub(super) fn services(&self, bucket: u16) -> impl Iterator<Item = &Arc<ServiceKey>> {
        self.0[usize::from(bucket) % BUCKETS].services.iter()
    }

    /// The messages of a bucket, each of about `part_bytes`, encoded once after a change.
    pub(super) fn frames(&self, bucket: u16, state: &State, part_bytes: usize) -> Arc<BucketFrames> {
        let bucket = &self.0[usize::from(bucket) % BUCKETS];
        Arc::clone(bucket.frames.get_or_init(|| Arc::new(bucket.encode(state, part_bytes))))
    }
}

impl Bucket {
    fn encode(&self, state: &State, part_bytes: usize) -> BucketFrames {
        let cidrs = self.cidrs.iter().filter_map(|name| state.service_cidr(name)).cloned().map(Change::ServiceCidr);
        let mut resources = 0;
        let changes = cidrs.chain(self.services.iter().flat_map(|key| service_changes(state, key)));
        let frames = chunk_frames(changes.inspect(|_| resources += 1), part_bytes);
        BucketFrames { frames, resources }
    }
}

fn service_changes<'a>(state: &'a State, key: &'a ServiceKey) -> impl Iterator<Item = Change> + 'a {
    state.entry(key).into_iter().flat_map(move |entry| {
        let endpoints = entry.endpoints().values().map(|endpoint| Change::Endpoint(key.clone(), endpoint.clone()));
        entry.service().cloned().map(Change::from).into_iter().chain(endpoints)
    })
}

// Encoded steps that streams at the same version share.
//
// A step larger than one message is sent in parts. A stream keeps such a step in memory until it
// has sent the last part, and its agent may read slowly. [`SplitBudget`] bounds the memory of all
// these steps.

/// The maximum size of one step in parts is the size of the [`SplitBudget`] divided by this number.
const MAX_SHARE: usize = 8;

/// Limits the bytes of all steps in parts, cached or being sent: a permit for each.
#[derive(Debug)]
pub(super) struct SplitBudget {
    pub(super) free: Arc<Semaphore>,
    max_share: usize,
}

impl SplitBudget {
    pub(super) fn new(max_bytes: usize) -> Self {
        let free = Arc::new(Semaphore::new(max_bytes.min(Semaphore::MAX_PERMITS)));
        Self { free, max_share: max_bytes / MAX_SHARE }
    }
}

/// An encoded step from one version to another.
#[derive(Debug)]
pub(super) struct Delta {
    pub(super) span: Span,
    /// The messages, with one `Batch` each. A step that was split has several messages.
    pub(super) frames: Box<[Bytes]>,
    pub(super) resources: u64,
    _charge: Option<OwnedSemaphorePermit>,
}

impl Delta {
    /// Encodes a step in messages of about `part_bytes`; `None` without room for several.
    pub(super) fn encode(
        span: Span,
        positions: &[v1::SourcePosition],
        changes: Vec<Item>,
        part_bytes: usize,
        budget: &SplitBudget,
    ) -> Option<Self> {
        let resources = changes.len() as u64;
        let room = budget.free.available_permits().min(budget.max_share);
        let mut step =
            Self { span, frames: batch_frames(span, positions, changes, part_bytes, room)?, resources, _charge: None };
        if step.frames.len() > 1 {
            let bytes = u32::try_from(step.bytes()).ok()?;
            step._charge = Some(Arc::clone(&budget.free).try_acquire_many_owned(bytes).ok()?);
        }
        Some(step)
    }

    fn bytes(&self) -> usize {
        self.frames.iter().map(Bytes::len).sum()
    }
}

/// The version at which a step starts, and whether it is spelt out, without references.
pub(super) type Start = (u64, bool);

/// A step that the first caller encodes; `None` if the first caller could not encode the step.
type Slot = Arc<OnceLock<Option<Arc<Delta>>>>;

/// Steps by their start. While one stream encodes a step, only streams that need this step wait.
#[derive(Debug)]
pub(super) struct DeltaCache {
    kept: Mutex<KeptSteps>,
    max_bytes: usize,
}

#[derive(Debug, Default)]
struct KeptSteps {
    /// Each step with its size in bytes, which is 0 until the step is encoded.
    by_start: BTreeMap<Start, (Slot, usize)>,
    bytes: usize,
}

impl DeltaCache {
    pub(super) fn new(max_bytes: usize) -> Self {
        Self { kept: Mutex::default(), max_bytes }
    }

    /// Returns the step from `start`: the cached step if `usable` accepts it, otherwise a new step.
    /// `encode` must return a step that `usable` accepts. If `encode` returns `None`, all callers
    /// that wait for this step receive `None`.
    pub(super) fn get(
        &self,
        start: Start,
        usable: impl Fn(&Delta) -> bool,
        encode: impl Fn() -> Option<Delta>,
    ) -> Option<Arc<Delta>> {
        let mut slot = self.lock().slot(start);
        loop {
            let mut is_new = false;
            let delta = slot.get_or_init(|| {
                is_new = true;
                encode().map(Arc::new)
            });
            if is_new {
                self.lock().encoded(start, &slot, self.max_bytes);
            }
            match delta {
                Some(delta) if !is_new && !usable(delta) => {
                    let mut kept = self.lock();
                    if kept.holds(start, &slot) {
                        kept.remove(start);
                    }
                    slot = kept.slot(start);
                }
                delta => return delta.clone(),
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, KeptSteps> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl KeptSteps {
    fn slot(&mut self, start: Start) -> Slot {
        Arc::clone(&self.by_start.entry(start).or_default().0)
    }

    fn holds(&self, start: Start, slot: &Slot) -> bool {
        self.by_start.get(&start).is_some_and(|(kept, _)| Arc::ptr_eq(kept, slot))
    }

    fn remove(&mut self, start: Start) {
        self.bytes -= self.by_start.remove(&start).map_or(0, |(_, bytes)| bytes);
    }

    /// Caches a step that was just encoded. If the cache exceeds its bound, steps that no stream
    /// holds are dropped, the ones that start at the oldest versions first. Dropping a step that a
    /// stream holds would free no memory, and the step might have to be encoded again.
    fn encoded(&mut self, start: Start, slot: &Slot, max_bytes: usize) {
        if !self.holds(start, slot) {
            return;
        }
        let Some(Some(delta)) = slot.get() else { return self.remove(start) };
        self.by_start.insert(start, (Arc::clone(slot), delta.bytes()));
        self.bytes += delta.bytes();
        let mut excess = self.bytes.saturating_sub(max_bytes);
        let mut gone = Vec::new();
        for (old, (slot, bytes)) in self.by_start.iter().filter(|(old, _)| **old != start) {
            if excess == 0 {
                break;
            }
            if slot.get().and_then(Option::as_ref).is_some_and(|delta| Arc::strong_count(delta) == 1) {
                excess = excess.saturating_sub(*bytes);
                gone.push(*old);
            }
        }
        gone.into_iter().for_each(|start| self.remove(start));
    }
}

#[cfg(test)]
mod deltas_tests {
    #![allow(clippy::unwrap_used)]
    use std::{
        sync::{
            Barrier,
            atomic::{AtomicUsize, Ordering},
            mpsc,
        },
        thread,
        time::Duration,
    };

    use super::*;

    fn delta(previous_version: u64, version: u64, bytes: usize) -> Delta {
        let span = Span { previous_version, version, is_urgent: false };
        Delta { span, frames: [Bytes::from(vec![0; bytes])].into(), resources: 1, _charge: None }
    }

    #[test]
    fn encoding_one_step_does_not_block_another_step() {
        let cache = DeltaCache::new(1000);
        let slow = || {
            let (done, is_done) = mpsc::channel();
            thread::scope(|scope| {
                let cache = &cache;
                scope.spawn(move || done.send(cache.get((2, false), |_| true, || Some(delta(2, 9, 10))).is_some()));
                assert_eq!(is_done.recv_timeout(Duration::from_mins(1)), Ok(true), "the other step is encoded");
            });
            Some(delta(1, 9, 10))
        };
        assert!(cache.get((1, false), |_| true, slow).is_some());
    }

    #[test]
    fn a_step_that_many_streams_need_is_encoded_once() {
        let (cache, encoded, begin) = (DeltaCache::new(1000), AtomicUsize::new(0), Barrier::new(8));
        let want = || {
            begin.wait();
            let encode = || {
                encoded.fetch_add(1, Ordering::Relaxed);
                // During the sleep, the other threads arrive.
                thread::sleep(Duration::from_millis(20));
                Some(delta(1, 9, 10))
            };
            Arc::as_ptr(&cache.get((1, false), |_| true, encode).unwrap()) as usize
        };
        let got = thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(want)).collect();
            // No thread holds the step any longer, but the cache keeps it.
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        assert!(got.iter().all(|delta| *delta == got[0]));
        assert_eq!(encoded.into_inner(), 1);
    }

    #[test]
    fn beyond_the_bound_the_oldest_step_that_no_stream_holds_is_dropped() {
        let cache = DeltaCache::new(100);
        let get = |start: u64, made: Option<u64>| {
            cache.get((start, false), |_| true, || made.map(|version| delta(start, version, 40)))
        };
        let held = get(1, Some(9)).unwrap();
        get(2, Some(9));
        get(3, Some(9));
        assert_eq!(get(2, Some(10)).unwrap().span.version, 10, "the oldest step that no stream held was dropped");
        assert!(Arc::ptr_eq(&get(1, None).unwrap(), &held));
        drop(held);
        get(4, Some(9));
        assert!(get(1, None).is_none());
        assert!(cache.lock().bytes <= 100);
    }
}
