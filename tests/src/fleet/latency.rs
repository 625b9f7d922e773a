//! From the moment a change is handed to the API watch to the moment an agent has it.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Instant,
};

/// When each write was made, by its resourceVersion. Written by whoever makes the changes, read by
/// the fleet's thread.
#[derive(Debug)]
pub struct Timetable {
    origin: Instant,
    /// Nanoseconds since `origin`, by version modulo their number; 0 is none.
    writes: Box<[AtomicU64]>,
}

impl Default for Timetable {
    fn default() -> Self {
        Self { origin: Instant::now(), writes: (0..1 << 16).map(|_| AtomicU64::new(0)).collect() }
    }
}

impl Timetable {
    fn slot(&self, version: u64) -> &AtomicU64 {
        // The remainder is below 65,536 and fits.
        &self.writes[usize::try_from(version % self.writes.len() as u64).unwrap_or_default()]
    }

    /// The write that will get `version` is made now.
    pub fn write(&self, version: u64) {
        let nanoseconds = u64::try_from(self.origin.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.slot(version).store(nanoseconds, Ordering::Release);
    }

    /// Forgets a write, so that it is not measured.
    pub fn forget(&self, version: u64) {
        self.slot(version).store(0, Ordering::Release);
    }

    /// Microseconds from the write of `version` to `now`; none of a write that was not timed.
    pub(super) fn microseconds(&self, version: u64, now: Instant) -> Option<u64> {
        let written = self.slot(version).load(Ordering::Acquire);
        let now = u64::try_from(now.duration_since(self.origin).as_nanos()).unwrap_or(u64::MAX);
        (written != 0).then(|| now.saturating_sub(written) / 1_000)
    }
}

const LINEAR_BITS: u32 = 10;
const HALF: usize = 1 << (LINEAR_BITS - 1);

/// Counts of times, to a thousandth of each.
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
        // At most 1,023 after the shift.
        shift as usize * HALF + usize::try_from(value >> shift).unwrap_or_default()
    }

    /// Counts a value.
    pub fn record(&mut self, value: u64) {
        self.counts[Self::index(value)] += 1;
        self.total += 1;
        self.max = self.max.max(value);
    }

    /// Number of values.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.total
    }

    /// The largest value; 0 of none.
    #[must_use]
    pub fn max(&self) -> u64 {
        self.max
    }

    /// The value that so large a share of all does not exceed; 0 of none.
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

    /// The same of a histogram of microseconds, in milliseconds.
    #[must_use]
    pub fn quantile_ms(&self, share: f64) -> f64 {
        self.quantile(share) as f64 / 1e3
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_right_to_a_thousandth() {
        let mut histogram = Histogram::default();
        assert_eq!(histogram.quantile(0.5), 0);
        (1..=100_000).for_each(|value| histogram.record(value));
        for (share, exact) in [(0.001, 100.0), (0.5, 50_000.0), (0.99, 99_000.0), (1.0, 100_000.0)] {
            let found = histogram.quantile(share) as f64;
            assert!((found / exact - 1.0).abs() < 0.002, "{share}: {found}");
        }
        assert_eq!((histogram.count(), histogram.max()), (100_000, 100_000));
        histogram.record(u64::MAX);
        assert_eq!(histogram.quantile(1.0), u64::MAX);
    }

    #[test]
    fn only_writes_that_were_timed_are_measured() {
        let timetable = Timetable::default();
        timetable.write(5);
        assert!(timetable.microseconds(5, Instant::now()).is_some());
        assert_eq!(timetable.microseconds(6, Instant::now()), None);
        timetable.forget(5);
        assert_eq!(timetable.microseconds(5, Instant::now()), None);
    }
}
