//! Pauses of networks from which failing handshakes and refused streams come: a few failures cost
//! nothing, and each further one costs its network a pause.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

use super::Network;

/// Pause for each failure.
const PAUSE: Duration = Duration::from_millis(50);

/// Pauses that may be outstanding before a network has to take them.
const FREE: Duration = Duration::from_secs(1);

/// Networks that are remembered.
const MAX_NETWORKS: usize = 65_536;

/// For each network, when its pauses would be over if each were taken at once.
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

    /// When the network's pause ends, if it has to take one at `now`.
    pub(crate) fn pause_end(&self, network: Network, now: Instant) -> Option<Instant> {
        let paused_until = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        paused_until.get(&network)?.checked_sub(FREE).filter(|end| *end > now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_few_failures_cost_nothing_and_further_ones_a_pause_each() {
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
