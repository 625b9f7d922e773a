//! Exponential back-off with full jitter: each pause is drawn evenly from zero to a bound that doubles.
//!
//! Without the jitter, agents that lost the same replica would come back in the same instant, again and again.

use std::time::Duration;

/// Pauses between attempts; never gives up.
#[derive(Debug, Clone)]
pub struct Backoff {
    base: Duration,
    cap: Duration,
    attempts: u32,
}

impl Default for Backoff {
    /// From 200 ms to 10 s: 15,000 agents that lost their replica come back as some 1,500 a second.
    fn default() -> Self {
        Self::new(Duration::from_millis(200), Duration::from_secs(10))
    }
}

impl Backoff {
    /// The first bound, and the largest.
    #[must_use]
    pub fn new(base: Duration, cap: Duration) -> Self {
        Self { base, cap, attempts: 0 }
    }

    /// The pause before the next attempt.
    pub fn next_pause(&mut self) -> Duration {
        let bound = self.bound();
        self.attempts = self.attempts.saturating_add(1);
        jitter(bound)
    }

    /// Attempts since the last success.
    #[must_use]
    pub fn attempts(&self) -> u32 {
        self.attempts
    }

    /// The largest bound.
    #[must_use]
    pub fn cap(&self) -> Duration {
        self.cap
    }

    /// Success: the next pause is short again.
    pub fn reset(&mut self) {
        self.attempts = 0;
    }

    fn bound(&self) -> Duration {
        let factor = 1u32.checked_shl(self.attempts).unwrap_or(u32::MAX);
        self.base.saturating_mul(factor).min(self.cap)
    }
}

/// A moment drawn evenly from zero to `bound`.
#[must_use]
pub fn jitter(bound: Duration) -> Duration {
    let bound_ms = u64::try_from(bound.as_millis()).unwrap_or(u64::MAX);
    Duration::from_millis(fastrand::u64(0..=bound_ms))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_double_up_to_the_cap_and_pauses_stay_within() {
        let mut backoff = Backoff::default();
        let mut bounds = Vec::new();
        for _ in 0..100 {
            let bound = backoff.bound();
            assert!(backoff.next_pause() <= bound);
            bounds.push(bound.as_millis());
        }
        assert_eq!(bounds[..7], [200, 400, 800, 1600, 3200, 6400, 10_000]);
        assert!(bounds[7..].iter().all(|bound| *bound == 10_000));
        backoff.reset();
        assert_eq!((backoff.bound().as_millis(), backoff.attempts()), (200, 0));
    }
}
