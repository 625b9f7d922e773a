//! Limits of the enrolment listener, whose clients have no certificate.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use crate::serve::context::Network;

/// The maximum number of open connections.
const MAX_OPEN: usize = 256;

/// The maximum number of open connections of one network (an IPv4 address, or an IPv6 /64).
const MAX_OPEN_OF_NETWORK: usize = 4;

/// The maximum number of connections in one period. 15,000 agents need 75 s.
const MAX_PER_PERIOD: u32 = 200;

/// The period of [`MAX_PER_PERIOD`].
const PERIOD: Duration = Duration::from_secs(1);

#[derive(Default)]
struct State {
    open: BTreeMap<Network, usize>,
    total: usize,
    period: Option<Instant>,
    in_period: u32,
}

/// Counts the connections.
#[derive(Default)]
pub(super) struct Limits(Mutex<State>);

impl Limits {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Admits a connection until the result is dropped. `None` if a limit is reached.
    pub(super) fn admit(self: &Arc<Self>, network: Network, now: Instant) -> Option<Admitted> {
        let mut state = self.state();
        if state.period.is_none_or(|begin| now.duration_since(begin) >= PERIOD) {
            (state.period, state.in_period) = (Some(now), 0);
        }
        let of_network = state.open.get(&network).copied().unwrap_or_default();
        if state.total >= MAX_OPEN || state.in_period >= MAX_PER_PERIOD || of_network >= MAX_OPEN_OF_NETWORK {
            return None;
        }
        state.in_period += 1;
        state.total += 1;
        state.open.insert(network, of_network + 1);
        drop(state);
        Some(Admitted { limits: Arc::clone(self), network })
    }
}

/// A connection that counts.
pub(super) struct Admitted {
    limits: Arc<Limits>,
    network: Network,
}

impl Drop for Admitted {
    fn drop(&mut self) {
        let mut state = self.limits.state();
        state.total -= 1;
        let left = state.open.get(&self.network).map_or(0, |open| open - 1);
        if left == 0 {
            state.open.remove(&self.network);
        } else {
            state.open.insert(self.network, left);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn network(last: u32) -> Network {
        Network::of(Ipv4Addr::from(0x0a00_0000 + last).into())
    }

    #[test]
    fn one_network_has_few_connections_and_frees_them() {
        let (limits, now) = (Arc::new(Limits::default()), Instant::now());
        let mut held: Vec<_> = (0..MAX_OPEN_OF_NETWORK).map(|_| limits.admit(network(1), now)).collect();
        assert!(held.iter().all(Option::is_some));
        assert!(limits.admit(network(1), now).is_none());
        assert!(limits.admit(network(2), now).is_some());
        held.pop();
        assert!(limits.admit(network(1), now).is_some());
        drop(held);
        assert!(limits.state().open.is_empty());
    }

    #[test]
    fn all_networks_together_have_a_limit_and_a_rate() {
        let (limits, now) = (Arc::new(Limits::default()), Instant::now());
        let admitted = |count: u32, at| (0..count).filter_map(|n| limits.admit(network(n), at)).collect::<Vec<_>>();
        let first = admitted(300, now);
        assert_eq!(first.len(), 200);
        let second = admitted(300, now + PERIOD);
        assert_eq!(first.len() + second.len(), MAX_OPEN);
        drop((first, second));
        assert_eq!(admitted(300, now + PERIOD * 2).len(), 200);
    }
}
