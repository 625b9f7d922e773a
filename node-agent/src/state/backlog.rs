//! What has come and is not in the kernel yet: since when, how much, and what set it off. Health
//! and kube-proxy's metrics are made from it.
//!
//! It has a lock of its own, held for moments only: pages are served from it while planning a full
//! sync holds the state's lock.

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant, SystemTime},
};

use headgate_core::{Change, Family, Node};

/// More triggers than this wait only while the kernel cannot be programmed at all; then the oldest
/// say enough.
const MAX_TRIGGERS: usize = 4096;

/// The moment at which something in the cluster set off a change of a service's endpoints, by the
/// clock of whoever wrote it down (`endpoints.kubernetes.io/last-change-trigger-time`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Trigger {
    /// Family of the endpoints.
    pub family: Family,
    /// Milliseconds since the Unix epoch.
    pub unix_ms: u64,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Backlog {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    waiting: Batch,
    waiting_since: Option<Instant>,
    taken: Batch,
    /// By family, IPv4 first.
    taken_since: [Option<Instant>; 2],
    synced_at: [Option<SystemTime>; 2],
    /// Families that the last attempt did not program, since the node does not have them.
    is_absent: [bool; 2],
    /// This run has programmed a complete state, or found an earlier run's rules in place beside a
    /// checked state on disk.
    has_programmed: bool,
    queued_at: Option<SystemTime>,
    endpoint_changes_total: u64,
    service_changes_total: u64,
    /// The Node has a deletionTimestamp or the autoscaler's taint, or is deleted.
    is_node_going_away: bool,
}

#[derive(Debug, Default)]
struct Batch {
    endpoint_changes: u64,
    service_changes: u64,
    triggers: Vec<Trigger>,
}

/// How one family does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FamilyHealth {
    /// No change has waited for too long.
    pub is_healthy: bool,
    /// The last sync; `None` before the first.
    pub synced_at: Option<SystemTime>,
}

/// How the agent does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Health {
    /// IPv4.
    pub v4: FamilyHealth,
    /// IPv6.
    pub v6: FamilyHealth,
    /// The node may get new connections from outside.
    pub is_node_eligible: bool,
    /// The kernel has a complete state: this run has programmed one, or found an earlier run's
    /// rules in place beside a checked state on disk.
    pub has_programmed: bool,
}

impl Health {
    /// Load balancers may send connections to the node: a complete state is programmed, no change
    /// waits for too long, and the node does not go away.
    #[must_use]
    pub fn is_serving(&self) -> bool {
        self.is_alive() && self.is_node_eligible && self.has_programmed
    }

    /// Both families are healthy.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        self.v4.is_healthy && self.v6.is_healthy
    }
}

/// Numbers for metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Changes of endpoints, since the start.
    pub endpoint_changes_total: u64,
    /// Changes of services, since the start.
    pub service_changes_total: u64,
    /// Changes of endpoints that are not in the kernel yet.
    pub endpoint_changes_pending: u64,
    /// Changes of services that are not in the kernel yet.
    pub service_changes_pending: u64,
    /// When the last change came.
    pub queued_at: Option<SystemTime>,
    /// The last sync of each family, IPv4 first.
    pub synced_at: [Option<SystemTime>; 2],
}

impl Inner {
    /// Takes note of which families there are. None means both.
    fn attempted(&mut self, programmed: &[Family]) {
        self.is_absent = Family::BOTH.map(|family| !names(programmed, family));
    }

    fn synced(&mut self, is_in_sync: impl Fn(Family) -> bool) {
        for (i, family) in Family::BOTH.into_iter().enumerate() {
            if is_in_sync(family) {
                self.taken_since[i] = None;
                self.synced_at[i] = Some(SystemTime::now());
            }
        }
    }
}

/// True when the family is in a list by which none means both.
fn names(families: &[Family], family: Family) -> bool {
    families.is_empty() || families.contains(&family)
}

impl Backlog {
    /// Changes have come.
    pub(crate) fn queue<'a>(&self, changes: impl IntoIterator<Item = &'a Change>, triggers: &[Trigger]) {
        let mut inner = self.lock();
        for change in changes {
            match change {
                Change::Service(_) | Change::RemoveService(_) => {
                    inner.waiting.service_changes += 1;
                    inner.service_changes_total += 1;
                }
                Change::Endpoint(..) | Change::RemoveEndpoint(..) => {
                    inner.waiting.endpoint_changes += 1;
                    inner.endpoint_changes_total += 1;
                }
                Change::ServiceCidr(_) | Change::RemoveServiceCidr(_) => {}
            }
        }
        let room = MAX_TRIGGERS.saturating_sub(inner.waiting.triggers.len());
        inner.waiting.triggers.extend(triggers.iter().take(room));
        inner.waiting_since.get_or_insert_with(Instant::now);
        inner.queued_at = Some(SystemTime::now());
    }

    /// Something else than a change of the state has to be programmed.
    pub(crate) fn queue_other(&self) {
        self.lock().waiting_since.get_or_insert_with(Instant::now);
    }

    /// What waits is being programmed.
    pub(crate) fn take(&self) {
        let mut inner = self.lock();
        let Batch { endpoint_changes, service_changes, triggers } = std::mem::take(&mut inner.waiting);
        let since = inner.waiting_since.take();
        inner.taken.endpoint_changes += endpoint_changes;
        inner.taken.service_changes += service_changes;
        let room = MAX_TRIGGERS.saturating_sub(inner.taken.triggers.len());
        inner.taken.triggers.extend(triggers.into_iter().take(room));
        inner.taken_since.iter_mut().for_each(|taken_since| *taken_since = taken_since.or(since));
    }

    /// What was taken is in the kernel, in all families that are programmed at all; none means
    /// both. Returns what set it off.
    pub(crate) fn succeeded(&self, programmed: &[Family]) -> Vec<Trigger> {
        let mut inner = self.lock();
        inner.taken_since = [None; 2];
        inner.attempted(programmed);
        inner.has_programmed = true;
        inner.synced(|family| names(programmed, family));
        std::mem::take(&mut inner.taken).triggers
    }

    /// What was taken is not in the kernel, in these families; it is in others that are programmed.
    /// In both cases, none means both.
    pub(crate) fn failed(&self, failed: &[Family], programmed: &[Family]) {
        let mut inner = self.lock();
        inner.attempted(programmed);
        inner.synced(|family| !names(failed, family) && names(programmed, family));
    }

    /// An earlier run's rules are in place, and the state on disk that belongs to them was read and
    /// checked.
    pub(crate) fn found_in_place(&self) {
        self.lock().has_programmed = true;
    }

    /// What is known of the agent's own Node. A node that the source does not know is eligible, as
    /// in a folder without Node manifests.
    pub(crate) fn set_node(&self, node: &Node) {
        self.lock().is_node_going_away = node.going_away;
    }

    /// How the agent does. A family is unhealthy when a change has waited for longer than
    /// `patience`, also before its first sync. A family that the node does not have never is.
    #[must_use]
    pub fn health(&self, patience: Duration) -> Health {
        let inner = self.lock();
        let family = |i: usize| {
            let oldest = inner.taken_since[i].or(inner.waiting_since);
            FamilyHealth {
                is_healthy: inner.is_absent[i] || oldest.is_none_or(|oldest| oldest.elapsed() < patience),
                synced_at: inner.synced_at[i],
            }
        };
        Health {
            v4: family(0),
            v6: family(1),
            is_node_eligible: !inner.is_node_going_away,
            has_programmed: inner.has_programmed,
        }
    }

    /// Numbers for metrics.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let inner = self.lock();
        Counts {
            endpoint_changes_total: inner.endpoint_changes_total,
            service_changes_total: inner.service_changes_total,
            endpoint_changes_pending: inner.waiting.endpoint_changes + inner.taken.endpoint_changes,
            service_changes_pending: inner.waiting.service_changes + inner.taken.service_changes,
            queued_at: inner.queued_at,
            synced_at: inner.synced_at,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(3600);

    fn node(going_away: bool) -> Node {
        Node { name: "n".into(), zone: None, pod_cidrs: vec![], addresses: vec![], going_away }
    }

    // rows: 106
    #[test]
    fn row_106_only_a_change_that_waits_too_long_makes_unhealthy_each_family_for_itself() {
        let backlog = Backlog::default();
        assert!(backlog.health(Duration::ZERO).is_alive(), "nothing has come");
        backlog.queue([], &[]);
        assert!(backlog.health(LONG).is_alive(), "it is starting");
        assert!(!backlog.health(Duration::ZERO).is_alive(), "it has been starting for too long");
        backlog.take();
        backlog.failed(&[Family::V6], &[]);
        assert!(backlog.health(LONG).is_alive());
        let health = backlog.health(Duration::ZERO);
        assert!(health.v4.is_healthy && health.v4.synced_at.is_some(), "IPv4 is programmed");
        assert!(!health.v6.is_healthy && health.v6.synced_at.is_none(), "IPv6 was broken from the start");
        assert!(!health.has_programmed);
        backlog.take();
        backlog.succeeded(&[]);
        backlog.queue([], &[]);
        assert!(backlog.health(LONG).is_alive(), "it has not waited long");
        assert!(!backlog.health(Duration::ZERO).is_alive());
        backlog.take();
        backlog.failed(&[Family::V6], &[]);
        let health = backlog.health(Duration::ZERO);
        assert!(health.v4.is_healthy && !health.v6.is_healthy);
        backlog.take();
        backlog.succeeded(&[]);
        assert!(backlog.health(Duration::ZERO).is_alive());
    }

    #[test]
    fn a_family_that_is_not_programmed_is_never_in_sync_and_never_late() {
        let backlog = Backlog::default();
        for _ in 0..2 {
            backlog.queue([], &[]);
            backlog.take();
            backlog.failed(&[Family::V4], &[Family::V4]);
            backlog.take();
            backlog.succeeded(&[Family::V4]);
        }
        backlog.queue([], &[]);
        let health = backlog.health(Duration::ZERO);
        assert!(health.v4.synced_at.is_some() && !health.v4.is_healthy);
        assert!(health.v6.synced_at.is_none() && health.v6.is_healthy);
    }

    #[test]
    fn a_node_serves_once_a_complete_state_is_programmed_or_was_found_in_place() {
        let backlog = Backlog::default();
        let health = |backlog: &Backlog| backlog.health(LONG);
        assert!(health(&backlog).is_alive() && !health(&backlog).is_serving());
        backlog.queue([], &[]);
        backlog.take();
        backlog.failed(&[], &[]);
        assert!(!health(&backlog).is_serving());
        backlog.take();
        backlog.succeeded(&[]);
        assert!(health(&backlog).is_serving());
        let restarted = Backlog::default();
        restarted.found_in_place();
        assert!(health(&restarted).is_serving());
    }

    // rows: 107
    #[test]
    fn row_107_a_node_that_goes_away_or_is_gone_is_not_eligible() {
        let backlog = Backlog::default();
        let is_eligible = || backlog.health(LONG).is_node_eligible;
        assert!(is_eligible(), "a source without nodes says nothing about ours");
        backlog.set_node(&node(true));
        assert!(!is_eligible());
        backlog.set_node(&node(false));
        assert!(is_eligible());
        assert!(backlog.health(LONG).is_alive());
    }

    #[test]
    fn what_a_failed_sync_took_waits_on_and_triggers_are_given_out_once() {
        let backlog = Backlog::default();
        let trigger = Trigger { family: Family::V4, unix_ms: 5 };
        let removal = Change::RemoveService(headgate_core::ServiceKey::new("a", "b"));
        backlog.queue([&removal], &[trigger]);
        backlog.take();
        backlog.failed(&[], &[]);
        backlog.queue([&removal], &[]);
        assert_eq!(backlog.counts().service_changes_pending, 2);
        backlog.take();
        assert_eq!(backlog.succeeded(&[]), [trigger]);
        assert_eq!(backlog.succeeded(&[]), []);
        let counts = backlog.counts();
        assert_eq!((counts.service_changes_pending, counts.service_changes_total), (0, 2));
    }
}
