//! Pauses for networks that cause failed handshakes and refused streams. A few failures cost
//! nothing. Each further failure makes the network's connections wait longer.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

use super::Network;

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
mod tests {
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
