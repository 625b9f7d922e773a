//! Encoded steps that streams at the same version share.
//!
//! A step larger than one message is sent in parts. A stream keeps such a step in memory until it
//! has sent the last part, and its agent may read slowly. [`SplitBudget`] bounds the memory of all
//! these steps.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
};

use bytes::Bytes;
use headgate_proto::v1;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::encode::{Item, Span, batch_frames};

/// The maximum size of one step in parts is the size of the [`SplitBudget`] divided by this number.
const MAX_SHARE: usize = 8;

/// Limits the bytes of all steps in parts: one permit for each byte. Both cached steps and steps
/// that streams are sending count.
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
    /// Encodes a step in messages of about `part_bytes`. `None` if the step needs several messages
    /// and there is no room for them.
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

/// The version at which a step starts, and whether the step is spelt out. A step that is spelt out
/// contains no references.
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
mod tests {
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
        assert_eq!((kept.bytes, kept.by_start.len()), (10, 1));
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
