//! Measures the latency from the write of a change at the API server until agents have the change.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

/// The times of writes and receipts, by resourceVersion. The source adds the writes, and the
/// fleet's thread adds the receipts.
#[derive(Debug)]
pub struct Timetable {
    origin: Instant,
    /// Indexed by the version modulo the length.
    slots: Box<[Slot]>,
}

/// A write and its receipts. Times are nanoseconds since the origin; 0 means no time.
#[derive(Debug, Default)]
struct Slot {
    written: AtomicU64,
    last_receipt: AtomicU64,
    receipts: AtomicU64,
}

impl Default for Timetable {
    fn default() -> Self {
        Self { origin: Instant::now(), slots: (0..1 << 16).map(|_| Slot::default()).collect() }
    }
}

impl Timetable {
    fn slot(&self, version: u64) -> &Slot {
        // The remainder is below 65,536, so it fits.
        &self.slots[usize::try_from(version % self.slots.len() as u64).unwrap_or_default()]
    }

    fn nanoseconds(&self, at: Instant) -> u64 {
        u64::try_from(at.saturating_duration_since(self.origin).as_nanos()).unwrap_or(u64::MAX)
    }

    /// Sets the time of the write with `version` to now. Call this function just before the write.
    pub fn write(&self, version: u64) {
        self.slot(version).written.store(self.nanoseconds(Instant::now()), Ordering::Release);
    }

    /// Removes the time of a write, so that the write is not measured.
    pub fn forget(&self, version: u64) {
        self.slot(version).written.store(0, Ordering::Release);
    }

    /// Notes that an agent has received `version` at `now`. Returns the microseconds since the
    /// write; `None` for a write without a time.
    pub(super) fn receive(&self, version: u64, now: Instant) -> Option<u64> {
        let (slot, now) = (self.slot(version), self.nanoseconds(now));
        slot.last_receipt.fetch_max(now, Ordering::Relaxed);
        slot.receipts.fetch_add(1, Ordering::Release);
        let written = slot.written.load(Ordering::Acquire);
        (written != 0).then(|| now.saturating_sub(written) / 1_000)
    }

    /// The number of agents that have received `version` while receipts were measured, and when the
    /// last of them received it.
    #[must_use]
    pub fn receipts(&self, version: u64) -> (u64, Instant) {
        let slot = self.slot(version);
        let receipts = slot.receipts.load(Ordering::Acquire);
        (receipts, self.origin + Duration::from_nanos(slot.last_receipt.load(Ordering::Relaxed)))
    }
}

const LINEAR_BITS: u32 = 10;
const HALF: usize = 1 << (LINEAR_BITS - 1);

/// A histogram whose quantiles have a relative error of at most 0.2 %.
#[derive(Debug, Clone)]
pub struct Histogram {
    counts: Vec<u64>,
    total: u64,
    max: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { counts: vec![0; HALF * (64 - LINEAR_BITS as usize + 2)], total: 0, max: 0 }
    }
}

impl Histogram {
    fn index(value: u64) -> usize {
        let shift = (64 - value.leading_zeros()).saturating_sub(LINEAR_BITS);
        // After the shift the value is at most 1,023.
        shift as usize * HALF + usize::try_from(value >> shift).unwrap_or_default()
    }

    /// Counts a value.
    pub fn record(&mut self, value: u64) {
        self.counts[Self::index(value)] += 1;
        self.total += 1;
        self.max = self.max.max(value);
    }

    /// The number of values.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.total
    }

    /// The largest value, or 0 without values.
    #[must_use]
    pub fn max(&self) -> u64 {
        self.max
    }

    /// The quantile for a share between 0 and 1, or 0 without values.
    #[must_use]
    pub fn quantile(&self, share: f64) -> u64 {
        let mut left = (share * self.total as f64).ceil().max(1.0) as u64;
        for (index, count) in self.counts.iter().enumerate() {
            if *count >= left {
                let shift = (index / HALF).saturating_sub(1);
                let lowest = ((index - shift * HALF) as u64) << shift;
                return (lowest + ((1 << shift) - 1)).min(self.max);
            }
            left -= count;
        }
        self.max
    }

    /// The quantile in milliseconds, for a histogram of microseconds.
    #[must_use]
    pub fn quantile_ms(&self, share: f64) -> f64 {
        self.quantile(share) as f64 / 1e3
    }
}
