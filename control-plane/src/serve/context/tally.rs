//! Counts of open connections and similar things, in all and by key, for limits; and pauses for
//! networks that fail.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

use super::Network;

/// How many things count, in all and by key.
#[derive(Debug)]
pub(crate) struct Tally<K>(Mutex<(usize, HashMap<K, usize>)>);

impl<K> Default for Tally<K> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

/// One thing that counts until this value is dropped.
#[derive(Debug)]
pub(crate) struct Counted<K: Hash + Eq> {
    tally: Arc<Tally<K>>,
    key: K,
}

impl<K: Hash + Eq + Clone> Tally<K> {
    /// Counts one more of `key`. `may` receives the present numbers in all and of the key.
    ///
    /// # Errors
    ///
    /// The error of `may`; then nothing is counted.
    pub(crate) fn add<E>(
        self: &Arc<Self>,
        key: K,
        may: impl FnOnce(usize, usize) -> Result<(), E>,
    ) -> Result<Counted<K>, E> {
        let mut numbers = self.numbers();
        let (all, by_key) = &mut *numbers;
        may(*all, by_key.get(&key).copied().unwrap_or_default())?;
        *all += 1;
        *by_key.entry(key.clone()).or_default() += 1;
        Ok(Counted { tally: Arc::clone(self), key })
    }

    /// Returns the numbers in all and of a key.
    pub(crate) fn count(&self, key: &K) -> (usize, usize) {
        let (all, by_key) = &*self.numbers();
        (*all, by_key.get(key).copied().unwrap_or_default())
    }
}

impl<K> Tally<K> {
    /// Returns the number in all.
    pub(crate) fn all(&self) -> usize {
        self.numbers().0
    }

    fn numbers(&self) -> MutexGuard<'_, (usize, HashMap<K, usize>)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K: Hash + Eq> Drop for Counted<K> {
    fn drop(&mut self) {
        let (all, by_key) = &mut *self.tally.numbers();
        *all -= 1;
        if let Some(count) = by_key.get_mut(&self.key) {
            *count -= 1;
            if *count == 0 {
                by_key.remove(&self.key);
            }
        }
    }
}

// Pauses for networks that cause failed handshakes and refused streams. A few failures cost
// nothing. Each further failure makes the network's connections wait longer.

/// The pause that each failure adds.
const PAUSE: Duration = Duration::from_millis(50);

/// A network's connections are delayed only by the part of its sum of pauses that exceeds this
/// time.
const FREE: Duration = Duration::from_secs(1);

/// The maximum number of networks whose failures are remembered.
const MAX_NETWORKS: usize = 65_536;

/// For each network, the time at which all its pauses have passed. The network's connections wait
/// until [`FREE`] before this time.
#[derive(Debug, Default)]
pub(crate) struct Failures(Mutex<HashMap<Network, Instant>>);

impl Failures {
    /// Counts a failure at `now`.
    pub(crate) fn count(&self, network: Network, now: Instant) {
        let mut paused_until = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if paused_until.len() >= MAX_NETWORKS {
            paused_until.retain(|_, until| *until > now);
        }
        if paused_until.len() < MAX_NETWORKS || paused_until.contains_key(&network) {
            let until = paused_until.entry(network).or_insert(now);
            *until = (*until).max(now) + PAUSE;
        }
    }

    /// Returns when the network's pause ends, or `None` if connections of the network need not wait
    /// at `now`.
    pub(crate) fn pause_end(&self, network: Network, now: Instant) -> Option<Instant> {
        let paused_until = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        paused_until.get(&network)?.checked_sub(FREE).filter(|end| *end > now)
    }
}

#[cfg(test)]
mod failures_tests {
    use super::*;

    #[test]
    fn a_few_failures_cost_nothing_and_each_further_failure_adds_a_pause() {
        let (failures, now) = (Failures::default(), Instant::now());
        let [failing, other] = [1, 2].map(|host| Network::of([192, 0, 2, host].into()));
        for _ in 0..FREE.as_millis() / PAUSE.as_millis() {
            failures.count(failing, now);
            assert_eq!(failures.pause_end(failing, now), None);
        }
        failures.count(failing, now);
        failures.count(failing, now);
        assert_eq!(failures.pause_end(failing, now), Some(now + PAUSE * 2));
        assert_eq!(failures.pause_end(failing, now + PAUSE * 2), None);
        assert_eq!(failures.pause_end(other, now), None);
    }
}
