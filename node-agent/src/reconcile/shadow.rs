//! Shadow: on a node in standby, the rules of the other proxy are compared with the node's view. A
//! changed Service *waits* until the rules agree, so that a proxy that is at work is no difference,
//! and the time that this takes is measured by reading the rules again and again, within a limit of
//! processor time.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, Instant},
};

use headgate_core::{Family, ServiceKey, forwarding::expected};

use super::Reconciler;
use crate::{
    cpu_time,
    state::progress::{ChangeTimes, Shadow},
};

/// The pause after a look at the rules, as a multiple of its processor time: 3 percent of a core.
const PAUSE_FACTOR: u32 = 30;
/// For how long looks may be more frequent after a quiet time, and the least pause between two.
const CREDIT: Duration = Duration::from_secs(15);
const MIN_PAUSE: Duration = Duration::from_millis(50);
/// A Service whose rules never differed stops waiting after this time: they needed no change, or
/// only lost an address.
const SETTLED_AFTER: Duration = Duration::from_secs(10);
/// A Service that still differs stops waiting after this time: from then on it is a difference.
const LATE_AFTER: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Copy)]
struct WaitingService {
    since: Instant,
    /// When the rules were last seen to differ.
    differed: Option<Instant>,
}

/// The Services that wait, and the times so far.
#[derive(Debug, Default)]
pub(super) struct Waits {
    waiting: BTreeMap<Arc<ServiceKey>, WaitingService>,
    next: Option<Instant>,
    /// Until when the pauses for the looks so far last.
    paid_until: Option<Instant>,
    last_change: Option<Instant>,
    ready: ChangeTimes,
    agreed: ChangeTimes,
    resolution: ChangeTimes,
    late: u64,
}

impl Waits {
    pub(super) fn due_at(&self) -> Option<Instant> {
        self.next.filter(|_| !self.waiting.is_empty())
    }

    pub(super) fn contains(&self, key: &ServiceKey) -> bool {
        self.waiting.contains_key(key)
    }

    /// True if no rule may belong to something that was removed a short time ago.
    pub(super) fn is_settled(&self, now: Instant) -> bool {
        self.waiting.is_empty() && self.last_change.is_none_or(|at| now - at >= LATE_AFTER)
    }

    fn changed(&mut self, services: &BTreeSet<Arc<ServiceKey>>, since: Instant, now: Instant) {
        self.ready.add(now - since);
        self.last_change = Some(now);
        self.waiting.extend(services.iter().map(|key| (Arc::clone(key), WaitingService { since, differed: None })));
        self.next = Some(self.paid_until.map_or(now, |until| until.max(now)));
    }

    /// Records a look, in which the Services in `differing` differed, and those in `unknown` were
    /// not compared.
    fn looked(&mut self, at: Instant, differing: &BTreeSet<Arc<ServiceKey>>, unknown: &BTreeSet<Arc<ServiceKey>>) {
        let Self { waiting, agreed, resolution, late, .. } = self;
        waiting.retain(|key, one| {
            let age = at.saturating_duration_since(one.since);
            if unknown.contains(key) {
                return true;
            }
            if differing.contains(key) {
                one.differed = Some(at);
                *late += u64::from(age >= LATE_AFTER);
                return age < LATE_AFTER;
            }
            if let Some(differed) = one.differed {
                agreed.add(age);
                resolution.add(at - differed);
            }
            one.differed.is_none() && age < SETTLED_AFTER
        });
    }

    fn pay(&mut self, used: Duration, now: Instant) {
        let since = now.checked_sub(CREDIT).unwrap_or(now);
        let until = self.paid_until.map_or(since, |until| until.max(since)) + used * PAUSE_FACTOR;
        self.paid_until = Some(until);
        self.next = Some(until.max(now + MIN_PAUSE));
    }

    pub(super) fn report(&self, now: Instant) -> Shadow {
        let oldest = self.waiting.values().map(|one| now.saturating_duration_since(one.since)).max();
        Shadow {
            waiting: self.waiting.len() as u64,
            oldest: oldest.unwrap_or_default(),
            late: self.late,
            ready: self.ready.clone(),
            agreed: self.agreed.clone(),
            resolution: self.resolution.clone(),
        }
    }
}

impl Reconciler {
    /// Records that these Services changed, the first at `since`, and computes what their rules
    /// must do, which is what a plan of them begins with.
    pub(super) fn note_changed(&mut self, services: &BTreeSet<Arc<ServiceKey>>, since: Instant) {
        let settings = self.expected_settings();
        self.shared.with_facts(|state, facts| {
            Family::BOTH.into_iter().for_each(|family| drop(expected(state, services, family, facts, &settings)));
        });
        let now = self.now();
        self.waits.changed(services, since.min(now), now);
    }

    /// Reads the rules of the other proxy, to see which of the Services that wait agree with them.
    pub(super) fn look(&mut self) {
        let (at, before) = (self.now(), cpu_time::of_thread_and_children());
        let keys: BTreeSet<Arc<ServiceKey>> = self.waits.waiting.keys().cloned().collect();
        let compared = self.dataplane.decode().ok().and_then(|tables| {
            let is_broken = tables.iter().any(headgate_core::forwarding::Table::is_broken);
            self.compare_tables(tables, Some(&keys)).filter(|_| !is_broken)
        });
        if let Some((comparison, _)) = compared {
            let mut unknown = self.shared.with_unprogrammed(|_, _, dirty| dirty.services.clone()).unwrap_or(keys);
            unknown.extend(self.unfinished.dirty.services.iter().cloned());
            self.waits.looked(at, &comparison.services(), &unknown);
        }
        let now = self.now();
        self.waits.pay(super::verification::cpu_time_since(before).unwrap_or(now - at), now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_service_waits_until_the_rules_agree_and_looks_are_paid() {
        let (began, second) = (Instant::now() + CREDIT, Duration::from_secs(1));
        let key = |name: &str| Arc::new(ServiceKey::new("shop", name));
        let all: BTreeSet<_> = ["changed", "same", "stuck"].map(key).into();
        let (none, mut waits) = (BTreeSet::new(), Waits::default());
        waits.changed(&all, began, began + second / 1000);
        assert_eq!(waits.due_at(), Some(began + second / 1000));
        waits.looked(began + second, &[key("changed"), key("stuck")].into(), &none);
        waits.pay(second / 10, began + second);
        // The first looks use what the quiet time before has saved.
        assert_eq!(waits.due_at(), Some(began + second + MIN_PAUSE));
        waits.pay(second, began + second);
        assert_eq!(waits.due_at(), Some(began + second - CREDIT + 33 * second));
        waits.looked(began + 2 * second, &[key("stuck")].into(), &none);
        let report = waits.report(began + 3 * second);
        assert_eq!((report.waiting, report.oldest), (2, 3 * second));
        assert_eq!((report.agreed.count, report.agreed.quantile(1000)), (1, 2 * second));
        assert_eq!(report.resolution.quantile(1000), second);
        waits.looked(began + SETTLED_AFTER, &[key("stuck")].into(), &none);
        assert!(!waits.contains(&key("same")) && waits.contains(&key("stuck")));
        waits.looked(began + LATE_AFTER, &[key("stuck")].into(), &all);
        assert!(waits.contains(&key("stuck")));
        waits.looked(began + LATE_AFTER, &[key("stuck")].into(), &none);
        assert_eq!((waits.report(began).late, waits.due_at()), (1, None));
        assert!(!waits.is_settled(began + LATE_AFTER) && waits.is_settled(began + LATE_AFTER + second));
    }
}
