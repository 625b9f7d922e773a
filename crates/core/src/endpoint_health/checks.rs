//! The schedule of health checks, and the outcomes that make an endpoint fail.
//!
//! An endpoint changes between passing and failing after two equal outcomes in a row, so one lost
//! packet changes nothing. A check that contradicts the present state is repeated after a quarter
//! of the interval, and a check takes at most a quarter of the interval. A change is therefore
//! detected within two intervals. Intervals vary at random by a tenth, so that nodes do not all
//! check at the same time. A new endpoint counts as passing.
//!
//! The cost of a call depends on the number of due checks, not on the number of endpoints.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::SocketAddr,
    sync::Arc,
};

use crate::model::ServiceKey;

/// Number of equal outcomes in a row that change the state of an endpoint.
const OUTCOMES_IN_A_ROW: u8 = 2;
/// How many checks of a service begin in a second, besides those that confirm a change. The
/// interval of a service with more endpoints is longer.
pub(super) const MAX_CHECKS_OF_SERVICE_PER_SECOND: u32 = 20;

/// The checks that a service requests on this node.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ServiceTargets {
    /// Time between two checks of an endpoint in milliseconds; `None` for the agent's default.
    pub interval_ms: Option<u32>,
    /// Addresses and TCP ports of endpoints.
    pub addresses: BTreeSet<SocketAddr>,
}

/// How often endpoints are checked, and how long a check may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CheckTiming {
    /// Time between two checks of an endpoint whose service sets no interval.
    pub interval_ms: u32,
    /// Maximum duration of a check. A check never takes longer than a quarter of its interval.
    pub timeout_ms: u32,
}

impl Default for CheckTiming {
    fn default() -> Self {
        Self { interval_ms: 5_000, timeout_ms: 1_000 }
    }
}

/// A check that the caller has to make.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Check {
    /// The address to connect to.
    pub address: SocketAddr,
    /// The check fails if no connection is established within this time.
    pub timeout_ms: u32,
    /// Distinguishes this check from earlier checks of the same address.
    ticket: u64,
}

/// The next check of a target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    /// The check is due at this time.
    At(u64),
    /// The check with this ticket is running.
    Running(u64),
}

#[derive(Debug)]
struct CheckedTarget {
    /// The services that request checks of this target, each with its interval in milliseconds.
    users: BTreeMap<Arc<ServiceKey>, u32>,
    is_failing: bool,
    /// Number of outcomes in a row that contradict `is_failing`.
    contradicting: u8,
    next: Next,
}

impl CheckedTarget {
    fn interval_ms(&self) -> u32 {
        self.users.values().copied().min().unwrap_or(u32::MAX)
    }
}

/// The check targets of all services. Times are milliseconds of a monotonic clock.
#[derive(Debug)]
pub(super) struct Checks {
    timing: CheckTiming,
    targets: HashMap<SocketAddr, CheckedTarget>,
    services: HashMap<Arc<ServiceKey>, BTreeSet<SocketAddr>>,
    due: BTreeSet<(u64, SocketAddr)>,
    failing: usize,
    tickets: u64,
    random: u64,
}

impl Checks {
    /// Creates an empty set of checks. Nodes must use different values of `seed`, which starts the
    /// random numbers that spread checks over time.
    pub(super) fn new(timing: CheckTiming, seed: u64) -> Self {
        Self {
            timing,
            targets: HashMap::new(),
            services: HashMap::new(),
            due: BTreeSet::new(),
            failing: 0,
            tickets: 0,
            random: seed,
        }
    }

    /// Number of endpoints that are checked.
    pub(super) fn len(&self) -> usize {
        self.targets.len()
    }

    /// True if no endpoint is checked.
    pub(super) fn is_empty(&self) -> bool {
        self.targets.is_empty()
    }

    /// Number of endpoints that fail.
    pub(super) fn failing_count(&self) -> usize {
        self.failing
    }

    /// Returns the endpoints of a service that fail. The cost is linear in the number of endpoints
    /// of the service.
    pub(super) fn failing(&self, key: &ServiceKey) -> BTreeSet<SocketAddr> {
        let is_failing = |address: &&SocketAddr| self.targets.get(address).is_some_and(|target| target.is_failing);
        self.services.get(key).into_iter().flatten().filter(is_failing).copied().collect()
    }

    /// Replaces the checks that a service requests; `None` removes them. A service with many
    /// targets gets a longer interval. The first check of a new target is due at a random time
    /// within one interval, so that not all nodes connect to a new endpoint at the same time.
    pub(super) fn set_service(&mut self, key: &Arc<ServiceKey>, wanted: Option<ServiceTargets>, now_ms: u64) {
        let ServiceTargets { interval_ms, addresses: wanted } = wanted.unwrap_or_default();
        let targets = u32::try_from(wanted.len()).unwrap_or(u32::MAX);
        let shortest_ms = targets.saturating_mul(1000 / MAX_CHECKS_OF_SERVICE_PER_SECOND).max(1);
        let interval_ms = interval_ms.unwrap_or(self.timing.interval_ms).max(shortest_ms);
        let before = self.services.remove(key).unwrap_or_default();
        for address in before.difference(&wanted) {
            self.remove_user(*address, key);
        }
        for address in &wanted {
            self.add_user(*address, key, interval_ms, now_ms);
        }
        if !wanted.is_empty() {
            self.services.insert(Arc::clone(key), wanted);
        }
    }

    /// Returns when the next check is due, or `None` if no check is waiting.
    pub(super) fn next_due_ms(&self) -> Option<u64> {
        self.due.first().map(|(at, _)| *at)
    }

    /// Returns the earliest check that is due. The caller makes it and then calls [`Self::finish`].
    pub(super) fn start(&mut self, now_ms: u64) -> Option<Check> {
        let next = self.due.first().copied().filter(|(at, _)| *at <= now_ms)?;
        self.due.remove(&next);
        let (_, address) = next;
        let target = self.targets.get_mut(&address)?;
        self.tickets += 1;
        target.next = Next::Running(self.tickets);
        let timeout_ms = self.timing.timeout_ms.min(target.interval_ms() / 4).max(1);
        Some(Check { address, timeout_ms, ticket: self.tickets })
    }

    /// Records the outcome of a check. Ignores a check whose target has been removed since the
    /// check started. `has_passed` is `None` if the caller could not make the check, for a reason
    /// that is unrelated to the endpoint: the next check is due after one interval. Returns the
    /// services whose set of failing endpoints changed.
    pub(super) fn finish(&mut self, check: &Check, has_passed: Option<bool>, now_ms: u64) -> Vec<Arc<ServiceKey>> {
        let Some(target) = self.targets.get_mut(&check.address) else { return Vec::new() };
        if target.next != Next::Running(check.ticket) {
            return Vec::new();
        }
        let interval_ms = u64::from(target.interval_ms());
        let Some(has_passed) = has_passed else {
            self.schedule(check.address, now_ms + interval_ms);
            return Vec::new();
        };
        let contradicts = has_passed == target.is_failing;
        target.contradicting = if contradicts { target.contradicting + 1 } else { 0 };
        let has_changed = target.contradicting >= OUTCOMES_IN_A_ROW;
        if has_changed {
            target.is_failing = !has_passed;
            target.contradicting = 0;
        }
        let pause_ms = if target.contradicting > 0 { interval_ms / 4 } else { interval_ms };
        let users = if has_changed { target.users.keys().cloned().collect() } else { Vec::new() };
        if has_changed {
            self.failing = if has_passed { self.failing - 1 } else { self.failing + 1 };
        }
        // The pause is 0.9 to 1.1 times `pause_ms`.
        let spread = self.draw(pause_ms / 5 + 1);
        self.schedule(check.address, now_ms + (pause_ms - pause_ms / 10 + spread).max(1));
        users
    }

    fn add_user(&mut self, address: SocketAddr, key: &Arc<ServiceKey>, interval_ms: u32, now_ms: u64) {
        let first = now_ms + self.draw(u64::from(interval_ms));
        let target = self.targets.entry(address).or_insert_with(|| CheckedTarget {
            users: BTreeMap::new(),
            is_failing: false,
            contradicting: 0,
            next: Next::At(u64::MAX),
        });
        if target.users.insert(Arc::clone(key), interval_ms) == Some(interval_ms) {
            return;
        }
        if let Next::At(at) = target.next {
            // A shorter interval takes effect now, not after the check that is already scheduled.
            self.due.remove(&(at, address));
            self.schedule(address, at.min(first));
        }
    }

    fn remove_user(&mut self, address: SocketAddr, key: &ServiceKey) {
        let Some(target) = self.targets.get_mut(&address) else { return };
        target.users.remove(key);
        if !target.users.is_empty() {
            return;
        }
        if let Next::At(at) = target.next {
            self.due.remove(&(at, address));
        }
        self.failing -= usize::from(target.is_failing);
        self.targets.remove(&address);
    }

    fn schedule(&mut self, address: SocketAddr, at_ms: u64) {
        if let Some(target) = self.targets.get_mut(&address) {
            target.next = Next::At(at_ms);
            self.due.insert((at_ms, address));
        }
    }

    /// Returns a random number below `bound` (SplitMix64, Steele et al. 2014). The quality of these
    /// numbers suffices to spread checks over time.
    fn draw(&mut self, bound: u64) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.random;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % bound.max(1)
    }
}

#[cfg(test)]
mod tests;
