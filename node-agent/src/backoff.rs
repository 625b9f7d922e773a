//! Exponential back-off. With jitter, agents that lost the same replica do not all connect to the
//! next one in the same instant.

use std::time::Duration;

/// How a pause is drawn from its bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Jitter {
    /// The pause is the bound.
    None,
    /// The pause is drawn evenly from the upper half of the bound.
    Half,
    /// The pause is drawn evenly from zero to the bound.
    Full,
}

/// Computes the pauses between attempts. The number of attempts is not limited.
#[derive(Debug, Clone)]
pub struct Backoff {
    first: Duration,
    longest: Duration,
    jitter: Jitter,
    attempts: u32,
}

impl Default for Backoff {
    /// The bounds grow from 200 ms to 10 s, with full jitter. When 15,000 agents lose their
    /// replica, about 1,500 agents per second connect again.
    fn default() -> Self {
        Self::new(Duration::from_millis(200), Duration::from_secs(10), Jitter::Full)
    }
}

impl Backoff {
    /// Bounds double from `first` up to `longest`, and `jitter` draws each pause from its bound.
    pub const fn new(first: Duration, longest: Duration, jitter: Jitter) -> Self {
        Self { first, longest, jitter, attempts: 0 }
    }

    /// Returns the pause before the next attempt, and counts that attempt.
    pub fn next_pause(&mut self) -> Duration {
        let bound = self.bound();
        self.attempts = self.attempts.saturating_add(1);
        match self.jitter {
            Jitter::None => bound,
            Jitter::Half => bound / 2 + jitter(bound / 2),
            Jitter::Full => jitter(bound),
        }
    }

    /// Attempts since the last [`Self::reset`].
    pub fn attempts(&self) -> u32 {
        self.attempts
    }

    /// The bound of the first pause.
    pub const fn first(&self) -> Duration {
        self.first
    }

    /// The longest possible pause.
    pub const fn longest(&self) -> Duration {
        self.longest
    }

    /// Starts again from the first bound. Call this function after an attempt that succeeded.
    pub fn reset(&mut self) {
        self.attempts = 0;
    }

    fn bound(&self) -> Duration {
        let factor = 1u32.checked_shl(self.attempts).unwrap_or(u32::MAX);
        self.first.saturating_mul(factor).min(self.longest)
    }
}

/// A random duration, drawn evenly from zero to `bound` in whole milliseconds.
pub fn jitter(bound: Duration) -> Duration {
    let bound_ms = u64::try_from(bound.as_millis()).unwrap_or(u64::MAX);
    Duration::from_millis(fastrand::u64(0..=bound_ms))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_double_up_to_the_longest_and_pauses_stay_within_their_bounds() {
        for jitter in [Jitter::None, Jitter::Half, Jitter::Full] {
            let mut backoff = Backoff { jitter, ..Backoff::default() };
            let mut bounds = Vec::new();
            for _ in 0..100 {
                let bound = backoff.bound();
                let pause = backoff.next_pause();
                let least = [bound, bound / 2, Duration::ZERO][jitter as usize];
                assert!((least..=bound).contains(&pause), "{pause:?} of {bound:?}");
                bounds.push(bound.as_millis());
            }
            assert_eq!(bounds[..7], [200, 400, 800, 1600, 3200, 6400, 10_000]);
            assert!(bounds[7..].iter().all(|bound| *bound == 10_000));
            backoff.reset();
            assert_eq!((backoff.bound().as_millis(), backoff.attempts()), (200, 0));
        }
    }
}
