//! When each endpoint is checked, and which outcomes make it fail.
//!
//! An endpoint begins to fail, and recovers, after two equal outcomes in a row: one lost packet
//! changes nothing. The second check follows the first after a quarter of the interval, and a check
//! takes at most a quarter of it, so two intervals are enough to see a change. Intervals vary by a
//! tenth at random, so that nodes do not check in step. A new endpoint counts as good until it
//! fails.
//!
//! The cost of a call depends on the checks that are due, not on the number of endpoints.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::SocketAddr,
    sync::Arc,
};

use crate::model::ServiceKey;

/// Outcomes in a row that change what an endpoint counts as.
const OUTCOMES_IN_A_ROW: u8 = 2;

/// What a service asks to be checked on this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServiceTargets {
    /// Time between two checks of an endpoint; `None` for the agent's default.
    pub interval_ms: Option<u32>,
    /// TCP ports of endpoints.
    pub addresses: BTreeSet<SocketAddr>,
}

/// How often is checked, and how long a check may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CheckTiming {
    /// Time between two checks of an endpoint whose services ask for none.
    pub interval_ms: u32,
    /// Longest time for a check; a quarter of the interval where that is shorter.
    pub timeout_ms: u32,
}

impl Default for CheckTiming {
    fn default() -> Self {
        Self { interval_ms: 5_000, timeout_ms: 1_000 }
    }
}

/// A check to be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Check {
    /// Where to connect.
    pub address: SocketAddr,
    /// After this it has failed.
    pub timeout_ms: u32,
    /// Tells this check from earlier ones of the same address.
    ticket: u64,
}

/// When a target is checked next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    At(u64),
    /// The check with this ticket runs.
    Running(u64),
}

#[derive(Debug)]
struct Target {
    /// Services that want it checked, and how often.
    users: BTreeMap<Arc<ServiceKey>, u32>,
    is_failing: bool,
    /// Outcomes in a row that speak against what it counts as.
    against: u8,
    next: Next,
}

impl Target {
    fn interval_ms(&self) -> u32 {
        self.users.values().copied().min().unwrap_or(u32::MAX)
    }
}

/// All targets. Times are milliseconds of any clock that does not go back.
#[derive(Debug)]
pub struct Checks {
    timing: CheckTiming,
    targets: HashMap<SocketAddr, Target>,
    services: HashMap<Arc<ServiceKey>, BTreeSet<SocketAddr>>,
    due: BTreeSet<(u64, SocketAddr)>,
    failing: usize,
    tickets: u64,
    random: u64,
}

impl Checks {
    /// None yet. `seed` is what makes nodes differ.
    #[must_use]
    pub fn new(timing: CheckTiming, seed: u64) -> Self {
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
    #[must_use]
    pub fn len(&self) -> usize {
        self.targets.len()
    }

    /// Nothing is checked.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.targets.is_empty()
    }

    /// Number of them that fail.
    #[must_use]
    pub fn failing_count(&self) -> usize {
        self.failing
    }

    /// The endpoints of a service that fail. Cost: its endpoints.
    #[must_use]
    pub fn failing(&self, key: &ServiceKey) -> BTreeSet<SocketAddr> {
        let is_failing = |address: &&SocketAddr| self.targets.get(address).is_some_and(|target| target.is_failing);
        self.services.get(key).into_iter().flatten().filter(is_failing).copied().collect()
    }

    /// Services that have targets.
    pub fn services(&self) -> impl Iterator<Item = &Arc<ServiceKey>> {
        self.services.keys()
    }

    /// Replaces what a service asks for. A target is checked first within one interval, at random:
    /// a new endpoint is not met by all nodes at once.
    pub fn set_service(&mut self, key: &Arc<ServiceKey>, wanted: Option<ServiceTargets>, now_ms: u64) {
        let (interval_ms, wanted) = match wanted {
            Some(wanted) => (wanted.interval_ms.unwrap_or(self.timing.interval_ms).max(1), wanted.addresses),
            None => (0, BTreeSet::new()),
        };
        let before = self.services.remove(key).unwrap_or_default();
        for address in before.difference(&wanted) {
            self.leave(*address, key);
        }
        for address in &wanted {
            self.join(*address, key, interval_ms, now_ms);
        }
        if !wanted.is_empty() {
            self.services.insert(Arc::clone(key), wanted);
        }
    }

    /// When the next check is due; none while there are none but running ones.
    #[must_use]
    pub fn next_due_ms(&self) -> Option<u64> {
        self.due.first().map(|(at, _)| *at)
    }

    /// Checks that are due, the longest waiting first, at most as many as there is room for. Each
    /// has to be [`Self::finish`]ed.
    pub fn start(&mut self, now_ms: u64, room: usize) -> Vec<Check> {
        let mut started = Vec::new();
        while started.len() < room
            && let Some((at, address)) = self.due.first().copied()
            && at <= now_ms
        {
            self.due.remove(&(at, address));
            let Some(target) = self.targets.get_mut(&address) else { continue };
            self.tickets += 1;
            target.next = Next::Running(self.tickets);
            let timeout_ms = self.timing.timeout_ms.min(target.interval_ms() / 4).max(1);
            started.push(Check { address, timeout_ms, ticket: self.tickets });
        }
        started
    }

    /// Takes the outcome of a check. Returns the services for which it changes what fails.
    pub fn finish(&mut self, check: &Check, has_passed: bool, now_ms: u64) -> Vec<Arc<ServiceKey>> {
        let Some(target) = self.targets.get_mut(&check.address) else { return Vec::new() };
        if target.next != Next::Running(check.ticket) {
            return Vec::new();
        }
        let is_against = has_passed == target.is_failing;
        target.against = if is_against { target.against + 1 } else { 0 };
        let has_turned = target.against >= OUTCOMES_IN_A_ROW;
        if has_turned {
            target.is_failing = !has_passed;
            target.against = 0;
        }
        let interval_ms = u64::from(target.interval_ms());
        let pause_ms = if target.against > 0 { interval_ms / 4 } else { interval_ms };
        let users = if has_turned { target.users.keys().cloned().collect() } else { Vec::new() };
        if has_turned {
            self.failing = if has_passed { self.failing - 1 } else { self.failing + 1 };
        }
        // From nine to eleven tenths.
        let spread = self.draw(pause_ms / 5 + 1);
        self.schedule(check.address, now_ms + (pause_ms - pause_ms / 10 + spread).max(1));
        users
    }

    /// Takes note that a check could not be made, which says nothing about the endpoint: it is made
    /// after another interval.
    pub fn skip(&mut self, check: &Check, now_ms: u64) {
        let Some(target) = self.targets.get(&check.address).filter(|target| target.next == Next::Running(check.ticket))
        else {
            return;
        };
        let interval_ms = u64::from(target.interval_ms());
        self.schedule(check.address, now_ms + interval_ms);
    }

    fn join(&mut self, address: SocketAddr, key: &Arc<ServiceKey>, interval_ms: u32, now_ms: u64) {
        let first = now_ms + self.draw(u64::from(interval_ms));
        let target = self.targets.entry(address).or_insert_with(|| Target {
            users: BTreeMap::new(),
            is_failing: false,
            against: 0,
            next: Next::At(u64::MAX),
        });
        if target.users.insert(Arc::clone(key), interval_ms) == Some(interval_ms) {
            return;
        }
        if let Next::At(at) = target.next {
            // An interval that was cut takes effect now, not after the old one.
            self.due.remove(&(at, address));
            self.schedule(address, at.min(first));
        }
    }

    fn leave(&mut self, address: SocketAddr, key: &ServiceKey) {
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

    /// A number below `bound` (SplitMix64, Steele et al. 2014): good enough to spread checks.
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
