//! Limits of the enrolment listener, whose clients have no certificate.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use crate::serve::context::{Counted, Network, Tally};

/// The maximum number of open connections.
const MAX_OPEN: usize = 256;

/// The maximum number of open connections of one network (an IPv4 address, or an IPv6 /64).
const MAX_OPEN_OF_NETWORK: usize = 4;

/// The maximum number of connections in one period. 15,000 agents need 75 s.
const MAX_PER_PERIOD: u32 = 200;

/// The period of [`MAX_PER_PERIOD`].
const PERIOD: Duration = Duration::from_secs(1);

/// The connections, which are counted while they are open, and in each period.
pub(super) struct EnrolmentLimits {
    open: Arc<Tally<Network>>,
    period: Instant,
    in_period: u32,
}

impl EnrolmentLimits {
    pub(super) fn new(now: Instant) -> Self {
        Self { open: Arc::default(), period: now, in_period: 0 }
    }

    /// Admits a connection until the result is dropped. `None` if a limit is reached.
    pub(super) fn admit(&mut self, network: Network, now: Instant) -> Option<Counted<Network>> {
        if now.duration_since(self.period) >= PERIOD {
            (self.period, self.in_period) = (now, 0);
        }
        let may = |all: usize, of_network: usize| {
            let has_room = all < MAX_OPEN && self.in_period < MAX_PER_PERIOD && of_network < MAX_OPEN_OF_NETWORK;
            has_room.then_some(()).ok_or(())
        };
        let admitted = self.open.add(network, may).ok()?;
        self.in_period += 1;
        Some(admitted)
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
        let now = Instant::now();
        let mut limits = EnrolmentLimits::new(now);
        let mut held: Vec<_> = (0..MAX_OPEN_OF_NETWORK).map(|_| limits.admit(network(1), now)).collect();
        assert!(held.iter().all(Option::is_some));
        assert!(limits.admit(network(1), now).is_none());
        assert!(limits.admit(network(2), now).is_some());
        held.pop();
        assert!(limits.admit(network(1), now).is_some());
    }

    #[test]
    fn all_networks_together_have_a_limit_and_a_rate() {
        let now = Instant::now();
        let mut limits = EnrolmentLimits::new(now);
        let mut admitted = |count: u32, at| (0..count).filter_map(|n| limits.admit(network(n), at)).collect::<Vec<_>>();
        let first = admitted(300, now);
        assert_eq!(first.len(), 200);
        let second = admitted(300, now + PERIOD);
        assert_eq!(first.len() + second.len(), MAX_OPEN);
        drop((first, second));
        assert_eq!(admitted(300, now + PERIOD * 2).len(), 200);
    }
}
