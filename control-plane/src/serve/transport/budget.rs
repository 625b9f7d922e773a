//! How much of what a client sends is read. What exceeds it is read later, and TCP holds it back.
//!
//! An agent sends some hundred bytes a second, and its `Hello` has some 20 KiB. Without a limit, an
//! agent that sends valid messages as fast as it can would take the core from the others.

use std::time::Duration;

use tokio::time::Instant;

/// What may come at once: a `Hello`, and the NACKs of very many resources.
const BURST: u64 = 1 << 20;

/// What may come each second.
const PER_SECOND: u64 = 256 << 10;

/// What a read counts at least: a call to the kernel and a TLS record take time however small they
/// are.
const LEAST: u64 = 32;

/// Of one connection.
#[derive(Debug)]
pub(crate) struct Budget {
    /// When everything is there again.
    full_at: Instant,
}

impl Budget {
    /// All of it.
    pub(crate) fn new(now: Instant) -> Self {
        Self { full_at: now }
    }

    /// Counts so many bytes, read at once.
    pub(crate) fn spend(&mut self, bytes: usize, now: Instant) {
        let bytes = u64::try_from(bytes).unwrap_or(u64::MAX).clamp(LEAST, BURST);
        self.full_at = self.full_at.max(now) + time_for(bytes);
    }

    /// How long nothing more may be read; none while something may.
    pub(crate) fn pause(&self, now: Instant) -> Option<Duration> {
        let missing = self.full_at.saturating_duration_since(now);
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
    fn a_burst_and_then_a_rate() {
        let start = Instant::now();
        let mut budget = Budget::new(start);
        let mut reads = 0;
        while budget.pause(start).is_none() {
            budget.spend(16 << 10, start);
            reads += 1;
        }
        assert_eq!(reads, BURST / (16 << 10) + 1);
        assert_eq!(budget.pause(start), Some(Duration::from_micros(62_500)), "for 16 KiB");
        assert_eq!(budget.pause(start + Duration::from_micros(62_500)), None);
        // Small reads count for more than they are.
        let later = start + Duration::from_secs(3_600);
        let small = (0..).take_while(|_| {
            budget.spend(1, later);
            budget.pause(later).is_none()
        });
        let (count, expected) = (small.count() as u64, BURST / LEAST);
        assert!(count.abs_diff(expected) < expected / 100, "{count}");
    }
}
