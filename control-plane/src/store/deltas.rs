//! Encoded steps that streams at the same version share.
//!
//! A step larger than one message is sent in parts. A stream keeps such a step in memory until it
//! has sent the last part, and its agent may read slowly. [`SplitBudget`] bounds the memory of all
//! these steps.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use bytes::Bytes;
use headgate_proto::v1;

use super::encode::{Item, Span, batch_frames};

/// The maximum size of one step in parts is the size of the [`SplitBudget`] divided by this number.
const MAX_SHARE: usize = 8;

/// Limits the bytes of all steps in parts. Both cached steps and steps that streams are sending
/// count.
#[derive(Debug)]
pub(super) struct SplitBudget {
    used: AtomicUsize,
    max_bytes: usize,
}

/// Bytes that are taken from a budget until this value is dropped.
#[derive(Debug)]
struct Charge {
    budget: Arc<SplitBudget>,
    bytes: usize,
}

impl SplitBudget {
    pub(super) fn new(max_bytes: usize) -> Self {
        Self { used: AtomicUsize::new(0), max_bytes }
    }

    /// Size of the largest step in parts for which there is room now.
    fn room(&self) -> usize {
        self.max_bytes.saturating_sub(self.used()).min(self.max_bytes / MAX_SHARE)
    }

    pub(super) fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    fn charge(self: &Arc<Self>, bytes: usize) -> Option<Charge> {
        let add = |used: usize| used.checked_add(bytes).filter(|used| *used <= self.max_bytes);
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).ok()?;
        Some(Charge { budget: Arc::clone(self), bytes })
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// An encoded step from one version to another.
#[derive(Debug)]
pub(super) struct Delta {
    pub(super) span: Span,
    /// The messages, with one `Batch` each. A step that was split has several messages.
    pub(super) frames: Box<[Bytes]>,
    pub(super) resources: u64,
    _charge: Option<Charge>,
}

impl Delta {
    /// Encodes a step in messages of about `part_bytes`. `None` if the step needs several messages
    /// and there is no room for them.
    pub(super) fn encode(
        span: Span,
        positions: &[v1::SourcePosition],
        changes: Vec<Item>,
        part_bytes: usize,
        budget: &Arc<SplitBudget>,
    ) -> Option<Self> {
        let resources = changes.len() as u64;
        let frames = batch_frames(span, positions, changes, part_bytes, budget.room())?;
        let charge = match &*frames {
            [_] => None,
            parts => Some(budget.charge(parts.iter().map(Bytes::len).sum())?),
        };
        Some(Self { span, frames, resources, _charge: charge })
    }

    fn bytes(&self) -> usize {
        self.frames.iter().map(Bytes::len).sum()
    }
}

/// The version at which a step starts, and whether the step is spelt out. A step that is spelt out
/// contains no references.
pub(super) type Start = (u64, bool);

/// A step that the first caller encodes; `None` if the first caller could not encode the step.
type Slot = Arc<OnceLock<Option<Arc<Delta>>>>;

/// Steps by their start. While one stream encodes a step, only streams that need this step wait.
#[derive(Debug)]
pub(super) struct DeltaCache(Mutex<Kept>);

#[derive(Debug)]
struct Kept {
    by_start: HashMap<Start, Entry>,
    /// The encoded steps, the oldest first.
    by_age: BTreeMap<u64, Start>,
    newest: u64,
    bytes: usize,
    max_bytes: usize,
}

#[derive(Debug)]
struct Entry {
    slot: Slot,
    /// The key in `by_age` and the size in bytes, once the step is encoded.
    encoded: Option<(u64, usize)>,
}

impl DeltaCache {
    pub(super) fn new(max_bytes: usize) -> Self {
        let (by_start, by_age) = Default::default();
        Self(Mutex::new(Kept { by_start, by_age, newest: 0, bytes: 0, max_bytes }))
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
                self.lock().encoded(start, &slot);
            }
            match delta {
                Some(delta) if !is_new && !usable(delta) => slot = self.lock().renewed(start, &slot),
                delta => return delta.clone(),
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Kept {
    fn slot(&mut self, start: Start) -> Slot {
        let empty = || Entry { slot: Slot::default(), encoded: None };
        Arc::clone(&self.by_start.entry(start).or_insert_with(empty).slot)
    }

    /// Replaces `old` with an empty slot, unless another caller has already replaced `old`. Returns
    /// the present slot.
    fn renewed(&mut self, start: Start, old: &Slot) -> Slot {
        if self.by_start.get(&start).is_some_and(|entry| Arc::ptr_eq(&entry.slot, old)) {
            self.remove(start);
        }
        self.slot(start)
    }

    fn remove(&mut self, start: Start) {
        if let Some((age, bytes)) = self.by_start.remove(&start).and_then(|entry| entry.encoded) {
            self.by_age.remove(&age);
            self.bytes -= bytes;
        }
    }

    /// Caches a step that was just encoded. If the cache exceeds its bound, the oldest steps that
    /// no stream holds are dropped. Dropping a step that a stream holds would free no memory, and
    /// the step might have to be encoded again.
    fn encoded(&mut self, start: Start, slot: &Slot) {
        let Some(entry) = self.by_start.get_mut(&start).filter(|entry| Arc::ptr_eq(&entry.slot, slot)) else { return };
        let Some(Some(delta)) = slot.get() else { return self.remove(start) };
        self.newest += 1;
        entry.encoded = Some((self.newest, delta.bytes()));
        self.by_age.insert(self.newest, start);
        self.bytes += delta.bytes();
        let mut excess = self.bytes.saturating_sub(self.max_bytes);
        let mut gone = Vec::new();
        for old in self.by_age.range(..self.newest).map(|(_, old)| *old) {
            if excess == 0 {
                break;
            }
            let Some(Entry { slot, encoded: Some((_, bytes)) }) = self.by_start.get(&old) else { continue };
            if slot.get().and_then(Option::as_ref).is_none_or(|delta| Arc::strong_count(delta) == 1) {
                excess = excess.saturating_sub(*bytes);
                gone.push(old);
            }
        }
        gone.into_iter().for_each(|start| self.remove(start));
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::{
        sync::{Barrier, mpsc},
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
                assert_eq!(
                    is_done.recv_timeout(Duration::from_mins(1)),
                    Ok(true),
                    "the other step is encoded meanwhile"
                );
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
    fn an_old_step_is_encoded_again_and_a_failed_step_is_not_kept() {
        let cache = DeltaCache::new(1000);
        let get = |from: u64, made: Option<u64>| {
            let encode = || made.map(|version| delta(1, version, 10));
            cache.get((1, false), |delta| delta.span.version >= from, encode).map(|delta| delta.span.version)
        };
        assert_eq!(get(5, Some(5)), Some(5));
        assert_eq!(get(5, Some(6)), Some(5), "the first step is kept");
        assert_eq!(get(6, Some(7)), Some(7));
        assert_eq!(get(8, None), None);
        assert_eq!(get(8, Some(9)), Some(9));
        let kept = cache.lock();
        assert_eq!((kept.bytes, kept.by_age.len(), kept.by_start.len()), (10, 1, 1));
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
