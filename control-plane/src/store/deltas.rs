//! Encoded steps of the log that streams share: the last batches, and compacted steps for those further behind.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
};

use bytes::Bytes;

/// An encoded step from one version to another.
#[derive(Debug)]
pub(super) struct Delta {
    pub(super) previous_version: u64,
    pub(super) version: u64,
    /// It holds no references.
    pub(super) is_spelt_out: bool,
    /// One `Batch` a message; more than one when the step was split.
    pub(super) frames: Box<[Bytes]>,
    pub(super) resources: u64,
}

impl Delta {
    fn bytes(&self) -> usize {
        self.frames.iter().map(Bytes::len).sum()
    }
}

/// The newest batches, each one version, without a gap.
#[derive(Debug)]
pub(super) struct Ring {
    deltas: VecDeque<Arc<Delta>>,
    bytes: usize,
    max_bytes: usize,
}

impl Ring {
    pub(super) fn new(max_bytes: usize) -> Self {
        Self { deltas: VecDeque::new(), bytes: 0, max_bytes }
    }

    /// Adds the newest batch and forgets the oldest beyond the bound.
    pub(super) fn push(&mut self, delta: Delta) {
        if self.deltas.back().is_some_and(|last| last.version != delta.previous_version) {
            self.clear();
        }
        self.bytes += delta.bytes();
        self.deltas.push_back(Arc::new(delta));
        while self.bytes > self.max_bytes
            && let Some(oldest) = self.deltas.pop_front()
        {
            self.bytes -= oldest.bytes();
        }
    }

    /// Forgets everything: the newest step is not kept encoded.
    pub(super) fn clear(&mut self) {
        self.deltas.clear();
        self.bytes = 0;
    }

    /// The batch that follows `version`.
    pub(super) fn after(&self, version: u64) -> Option<&Arc<Delta>> {
        // Every batch is one version further than the one before it.
        let distance = version.checked_sub(self.deltas.front()?.previous_version)?;
        self.deltas.get(usize::try_from(distance).ok()?)
    }
}

/// Compacted steps by the version that they start from, and whether they are spelt out, so that streams at the same point share them.
#[derive(Debug)]
pub(super) struct DeltaCache {
    by_start: HashMap<(u64, bool), Arc<Delta>>,
    order: VecDeque<(u64, bool)>,
    bytes: usize,
    max_bytes: usize,
}

impl DeltaCache {
    pub(super) fn new(max_bytes: usize) -> Self {
        Self { by_start: HashMap::new(), order: VecDeque::new(), bytes: 0, max_bytes }
    }

    pub(super) fn get(&self, start: u64, is_spelt_out: bool) -> Option<&Arc<Delta>> {
        self.by_start.get(&(start, is_spelt_out))
    }

    /// Keeps a step, the newest one always; the oldest go beyond the bound.
    pub(super) fn insert(&mut self, delta: Arc<Delta>) {
        let start = (delta.previous_version, delta.is_spelt_out);
        self.bytes += delta.bytes();
        if let Some(old) = self.by_start.insert(start, delta) {
            self.bytes -= old.bytes();
            self.order.retain(|other| *other != start);
        }
        self.order.push_back(start);
        while self.bytes > self.max_bytes && self.order.len() > 1 {
            let Some(oldest) = self.order.pop_front() else { return };
            self.bytes -= self.by_start.remove(&oldest).map_or(0, |delta| delta.bytes());
        }
    }
}
