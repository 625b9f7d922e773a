//! Limits how fast the server reads from a client. Bytes above the limit are read later; until then
//! TCP flow control holds them back.
//!
//! A normal agent sends about a hundred bytes per second, and its `Hello` has about 20 KiB. Without
//! a limit, an agent that sends valid messages as fast as it can would use up a core.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

/// The number of bytes that may be read without a pause. A `Hello` and NACKs of very many resources
/// fit.
const BURST: u64 = 1 << 20;

/// The number of bytes that may be read per second on average.
const PER_SECOND: u64 = 256 << 10;

/// A read spends at least this number of bytes. A call to the kernel and a TLS record take time
/// even if the read returns few bytes.
const MIN_READ: u64 = 32;

/// The read budget of a client, which all its connections share. It holds the time at which the
/// budget is full again.
#[derive(Debug, Clone)]
pub(crate) struct Budget(Arc<Mutex<Instant>>);

impl Budget {
    /// Returns a full budget.
    pub(crate) fn new(now: Instant) -> Self {
        Self(Arc::new(Mutex::new(now)))
    }

    /// True if no connection uses the budget, and nothing of it is spent at `now`.
    pub(super) fn is_unused(&self, now: Instant) -> bool {
        Arc::strong_count(&self.0) == 1 && *self.full_at() <= now
    }

    fn full_at(&self) -> MutexGuard<'_, Instant> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Spends the bytes of one read.
    pub(crate) fn spend(&self, bytes: usize, now: Instant) {
        let bytes = u64::try_from(bytes).unwrap_or(u64::MAX).clamp(MIN_READ, BURST);
        let mut full_at = self.full_at();
        *full_at = now.max(*full_at) + time_for(bytes);
    }

    /// Returns how long a connection must not be read, or `None` if it may be read at `now`.
    pub(crate) fn pause(&self, now: Instant) -> Option<Duration> {
        let missing = self.full_at().saturating_duration_since(now);
        missing.checked_sub(time_for(BURST)).filter(|pause| !pause.is_zero())
    }
}

fn time_for(bytes: u64) -> Duration {
    Duration::from_micros(bytes * 1_000_000 / PER_SECOND)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_is_read_at_once_and_then_a_rate_applies() {
        let start = Instant::now();
        let budget = Budget::new(start);
        let mut reads = 0;
        while budget.pause(start).is_none() {
            budget.spend(16 << 10, start);
            reads += 1;
        }
        assert_eq!(reads, BURST / (16 << 10) + 1);
        assert_eq!(budget.pause(start), Some(Duration::from_micros(62_500)), "the pause is the time for 16 KiB");
        assert_eq!(budget.pause(start + Duration::from_micros(62_500)), None);
        // Small reads count as `MIN_READ` bytes.
        let later = start + Duration::from_secs(3_600);
        let small = (0..).take_while(|_| {
            budget.spend(1, later);
            budget.pause(later).is_none()
        });
        let (count, expected) = (small.count() as u64, BURST / MIN_READ);
        assert!(count.abs_diff(expected) < expected / 100, "{count}");
    }
}
