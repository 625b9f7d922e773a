//! Checks of many namespaces, of which none delays those of another.
//!
//! Each namespace has a schedule of its own, also if Services of two namespaces have the same
//! endpoint. A namespace may begin a check while it runs fewer checks than places are free, so one
//! namespace alone gets half of the places, and places stay free for others. Among the namespaces
//! with checks that are due, the one that runs the fewest is the next.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    sync::Arc,
};

use compact_str::CompactString;

use super::checks::{Check, CheckTiming, Checks, ServiceTargets};
use crate::model::ServiceKey;

/// How many checks of a namespace a node begins in a second, also if all are for one address.
const MAX_CHECKS_OF_NAMESPACE_PER_SECOND: u32 = 200;

/// The namespace of the Services that ask for a check, and the check that the caller has to make.
pub type FairCheck = (CompactString, Check);

#[derive(Debug)]
struct CheckedNamespace {
    checks: Checks,
    running: usize,
    /// The last second in which a check began, and how many began in it.
    begun: (u64, u32),
}

impl CheckedNamespace {
    /// When the next check may begin, if `free` places are free.
    fn next_due_ms(&self, free: usize) -> Option<u64> {
        let due = self.checks.next_due_ms().filter(|_| self.running < free)?;
        let is_full = self.begun.1 >= MAX_CHECKS_OF_NAMESPACE_PER_SECOND;
        Some(if is_full { due.max((self.begun.0 + 1) * 1000) } else { due })
    }
}

/// The checks of all namespaces. Times are milliseconds of a monotonic clock.
#[derive(Debug)]
pub struct FairChecks {
    timing: CheckTiming,
    seed: u64,
    /// How many further checks may run.
    free: usize,
    namespaces: BTreeMap<CompactString, CheckedNamespace>,
}

impl FairChecks {
    /// Creates an empty set of checks, of which `places` may run at a time. Nodes must use
    /// different values of `seed`, which starts the random numbers that spread checks over time.
    #[must_use]
    pub fn new(timing: CheckTiming, seed: u64, places: usize) -> Self {
        Self { timing, seed, free: places, namespaces: BTreeMap::new() }
    }

    /// Number of endpoints that are checked, and number of endpoints that fail. An endpoint of
    /// several namespaces counts for each.
    #[must_use]
    pub fn counts(&self) -> (usize, usize) {
        let checks = self.namespaces.values().map(|namespace| &namespace.checks);
        checks.fold((0, 0), |(all, failing), checks| (all + checks.len(), failing + checks.failing_count()))
    }

    /// Returns the endpoints of a Service that fail.
    #[must_use]
    pub fn failing(&self, key: &ServiceKey) -> BTreeSet<SocketAddr> {
        self.namespaces.get(&key.namespace).map(|namespace| namespace.checks.failing(key)).unwrap_or_default()
    }

    /// Replaces the checks that a Service requests; `None` removes them.
    pub fn set_service(&mut self, key: &Arc<ServiceKey>, wanted: Option<ServiceTargets>, now_ms: u64) {
        self.seed = self.seed.wrapping_add(1);
        let checks = Checks::new(self.timing, self.seed);
        let new = || CheckedNamespace { checks, running: 0, begun: (0, 0) };
        let namespace = self.namespaces.entry(key.namespace.clone()).or_insert_with(new);
        namespace.checks.set_service(key, wanted, now_ms);
        if namespace.checks.is_empty() && namespace.running == 0 {
            self.namespaces.remove(&key.namespace);
        }
    }

    /// When the next check may begin; `None` if no check waits, or all wait for running checks.
    #[must_use]
    pub fn next_due_ms(&self) -> Option<u64> {
        self.namespaces.values().filter_map(|namespace| namespace.next_due_ms(self.free)).min()
    }

    /// Returns the checks that may begin now. The caller makes each check and then calls
    /// [`Self::finish`].
    pub fn start(&mut self, now_ms: u64) -> Vec<FairCheck> {
        let mut started = Vec::new();
        loop {
            let due = self.namespaces.iter_mut().filter_map(|(name, namespace)| {
                let at_ms = namespace.next_due_ms(self.free).filter(|at_ms| *at_ms <= now_ms)?;
                Some(((namespace.running, at_ms), name, namespace))
            });
            let Some((_, name, namespace)) = due.min_by_key(|(order, ..)| *order) else { return started };
            let Some(check) = namespace.checks.start(now_ms) else { return started };
            let second = now_ms / 1000;
            let before = if namespace.begun.0 == second { namespace.begun.1 } else { 0 };
            namespace.begun = (second, before + 1);
            namespace.running += 1;
            self.free -= 1;
            started.push((name.clone(), check));
        }
    }

    /// Records the outcome of a check, unless its target has been removed. `has_passed` is `None`
    /// if the caller could not make the check. Returns the Services whose failing endpoints
    /// changed.
    pub fn finish(&mut self, (name, check): &FairCheck, has_passed: Option<bool>, now_ms: u64) -> Vec<Arc<ServiceKey>> {
        self.free += 1;
        // A namespace stays while its checks run.
        let Some(CheckedNamespace { checks, running, .. }) = self.namespaces.get_mut(name) else { return Vec::new() };
        *running -= 1;
        let changed = checks.finish(check, has_passed, now_ms);
        if checks.is_empty() && *running == 0 {
            self.namespaces.remove(name);
        }
        changed
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::endpoint_health::checks::MAX_CHECKS_OF_SERVICE_PER_SECOND;

    const PLACES: usize = 8;

    fn key(namespace: &str) -> Arc<ServiceKey> {
        Arc::new(ServiceKey::new(namespace, "web"))
    }

    fn wanted(interval_ms: u32, count: u32) -> Option<ServiceTargets> {
        let address = |last: u32| SocketAddr::from(((0x0af4_0000 + last).to_be_bytes(), 8080));
        Some(ServiceTargets { interval_ms: Some(interval_ms), addresses: (0..count).map(address).collect() })
    }

    fn of<'a>(started: &'a [FairCheck], namespace: &str) -> Vec<&'a FairCheck> {
        started.iter().filter(|check| check.0 == namespace).collect()
    }

    #[test]
    fn a_namespace_whose_checks_never_end_leaves_places_to_others() {
        let mut checks = FairChecks::new(CheckTiming::default(), 7, PLACES);
        checks.set_service(&key("hostile"), wanted(1000, 900), 0);
        let now = 100_000;
        let hostile = checks.start(now);
        assert_eq!(hostile.len(), PLACES / 2, "one namespace gets half of the places");
        assert_eq!(checks.next_due_ms(), None);
        checks.set_service(&key("honest"), wanted(1000, 2), now);
        let later = now + 2000;
        let honest = checks.start(later);
        assert_eq!((of(&honest, "honest").len(), of(&honest, "hostile").len()), (2, 0));
        honest.iter().for_each(|check| assert_eq!(checks.finish(check, Some(true), later), []));
        let again = checks.start(later + 2000);
        assert_eq!((of(&again, "honest").len(), of(&again, "hostile").len()), (2, 0));
    }

    #[test]
    fn namespaces_share_the_places_and_a_shared_endpoint_is_checked_for_each() {
        let mut checks = FairChecks::new(CheckTiming::default(), 7, PLACES);
        for namespace in ["a", "b", "c"] {
            checks.set_service(&key(namespace), wanted(1000, 100), 0);
        }
        assert_eq!(checks.counts(), (300, 0));
        let mut started = checks.start(100_000);
        let counts = ["a", "b", "c"].map(|namespace| of(&started, namespace).len());
        assert!(counts.iter().all(|count| (2..=3).contains(count)), "{counts:?}");
        let first = started.remove(0);
        assert_eq!(checks.finish(&first, None, 100_000), []);
        started.iter().for_each(|check| drop(checks.finish(check, Some(true), 100_000)));
        // An endpoint that fails twice for one namespace may pass for the others.
        for namespace in ["a", "b", "c"] {
            checks.set_service(&key(namespace), wanted(1000, 2), 100_000);
        }
        for now in [110_000, 110_300] {
            let started = checks.start(now);
            assert_eq!(started.len(), 6);
            let passes = |check: &FairCheck| now == 110_300 && check.0 != "b";
            started.iter().for_each(|check| drop(checks.finish(check, Some(passes(check)), now)));
        }
        assert_eq!(["a", "b", "c"].map(|namespace| checks.failing(&key(namespace)).len()), [0, 2, 0]);
        assert_eq!(checks.counts(), (6, 2));
        for namespace in ["a", "b", "c"] {
            checks.set_service(&key(namespace), None, 100_000);
        }
        assert!(checks.free == PLACES && checks.namespaces.is_empty(), "nothing is left");
    }

    #[test]
    fn a_namespace_that_ends_while_its_checks_run_gives_the_places_back() {
        let mut checks = FairChecks::new(CheckTiming::default(), 7, PLACES);
        checks.set_service(&key("a"), wanted(1000, 100), 0);
        let started = checks.start(100_000);
        checks.set_service(&key("a"), None, 100_000);
        assert_eq!(checks.free, PLACES / 2);
        started.iter().for_each(|check| drop(checks.finish(check, Some(false), 100_000)));
        assert!(checks.free == PLACES && checks.namespaces.is_empty());
    }

    #[test]
    fn services_and_namespaces_have_a_rate() {
        let mut checks = FairChecks::new(CheckTiming::default(), 7, 100_000);
        checks.set_service(&key("a"), wanted(500, 900), 0);
        let run = |checks: &mut FairChecks, seconds: std::ops::Range<u64>| {
            let mut begun = Vec::new();
            for now in seconds.flat_map(|second| (0..20).map(move |part| second * 1000 + part * 50)) {
                let started = checks.start(now);
                started.iter().for_each(|check| drop(checks.finish(check, Some(true), now)));
                begun.extend(started.iter().map(|_| now / 1000));
            }
            begun
        };
        let begun = run(&mut checks, 100..200).len();
        let most = 100 * MAX_CHECKS_OF_SERVICE_PER_SECOND as usize;
        assert!((most / 2..=most * 3 / 2).contains(&begun), "{begun} checks in 100 s, {most} expected");
        for service in 0..200 {
            let key = Arc::new(ServiceKey::new("b", &format!("web-{service}")));
            let addresses = (0..20).map(|port| SocketAddr::from(([10, 244, 1, service], 8000 + port))).collect();
            checks.set_service(&key, Some(ServiceTargets { interval_ms: Some(500), addresses }), 200_000);
        }
        let begun = run(&mut checks, 210..220);
        for second in 210..220 {
            let count = begun.iter().filter(|at| **at == second).count();
            let most = (MAX_CHECKS_OF_NAMESPACE_PER_SECOND + 2 * MAX_CHECKS_OF_SERVICE_PER_SECOND) as usize;
            assert!(count <= most, "{count} checks in one second, at most {most} expected");
        }
        assert!(begun.len() > 1_500, "{} checks in 10 s", begun.len());
        assert!(checks.next_due_ms().is_some());
    }
}
