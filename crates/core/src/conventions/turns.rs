//! How often something may happen for each key: some times at once, and then once in an interval.
//! The caller reads the clock.

use std::{
    collections::HashMap,
    hash::Hash,
    time::{Duration, Instant},
};

/// When this many keys are remembered, keys that have all their turns again are forgotten.
const MAX_REMEMBERED: usize = 65_536;

/// The turns of all keys.
#[derive(Debug)]
pub struct Turns<K> {
    interval: Duration,
    at_once: u32,
    /// For each key, the time at which it has all its turns again.
    full_at: HashMap<K, Instant>,
}

impl<K: Hash + Eq> Turns<K> {
    /// Each key has `at_once` turns at first, and gets one back in each `interval`.
    #[must_use]
    pub fn new(interval: Duration, at_once: u32) -> Self {
        Self { interval, at_once, full_at: HashMap::new() }
    }

    /// Returns whether a key has a turn at `now`.
    ///
    /// # Errors
    /// The time of the next turn.
    pub fn check(&self, key: &K, now: Instant) -> Result<(), Instant> {
        let after = self.full_at.get(key).map_or(now, |full_at| now.max(*full_at)) + self.interval;
        match after.checked_duration_since(now + self.interval * self.at_once) {
            Some(wait) if !wait.is_zero() => Err(now + wait),
            _ => Ok(()),
        }
    }

    /// Takes a turn of a key.
    ///
    /// # Errors
    /// The time of the next turn, if the key has none at `now`.
    pub fn take(&mut self, key: K, now: Instant) -> Result<(), Instant> {
        self.check(&key, now)?;
        if self.full_at.len() >= MAX_REMEMBERED {
            self.full_at.retain(|_, full_at| *full_at > now);
        }
        let full_at = self.full_at.entry(key).or_insert(now);
        *full_at = now.max(*full_at) + self.interval;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_key_has_some_turns_at_once_and_then_one_in_an_interval() {
        let (interval, now) = (Duration::from_millis(250), Instant::now());
        let mut turns = Turns::new(interval, 64);
        assert_eq!((0..1_000).filter(|_| turns.take("a", now).is_ok()).count(), 64);
        assert_eq!(turns.check(&"a", now), Err(now + interval));
        assert!(turns.take("b", now).is_ok(), "each key has its own turns");
        let later = now + interval * 3;
        assert_eq!((0..10).filter(|_| turns.take("a", later).is_ok()).count(), 3);
        assert_eq!((0..1_000).filter(|_| turns.take("a", later + interval * 1_000).is_ok()).count(), 64);
    }

    #[test]
    fn keys_with_all_their_turns_are_forgotten() {
        let (interval, now) = (Duration::from_secs(1), Instant::now());
        let mut turns = Turns::new(interval, 1);
        for key in 0..3 * MAX_REMEMBERED {
            assert!(turns.take(key, now + interval * u32::try_from(2 * key / MAX_REMEMBERED).unwrap_or(0)).is_ok());
        }
        assert!(turns.full_at.len() <= MAX_REMEMBERED);
    }
}
