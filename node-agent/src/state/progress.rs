//! The changes that have arrived and are not in the kernel yet: their number, the time of their
//! arrival, and their triggers. Health checks and kube-proxy's metrics use these numbers. And
//! [`Progress`]: what the reconcile loop has programmed.
//!
//! The backlog has its own lock, which is only held briefly. Therefore the pages are served even
//! while the planning of a full sync holds the state's lock.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant, SystemTime},
};

use headgate_core::{Change, Family, Node, NodeFacts, digest::Digests};
use headgate_oracle::Comparison;
use headgate_proto::v1;

/// Maximum number of stored triggers. More triggers arrive only while the kernel cannot be
/// programmed at all. In this case, the oldest triggers are enough to measure the delay.
const MAX_TRIGGERS: usize = 4096;

/// The time at which something in the cluster triggered a change of a service's endpoints. The time
/// is the value of the annotation `endpoints.kubernetes.io/last-change-trigger-time`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Trigger {
    /// The family of the endpoints.
    pub family: Family,
    /// Milliseconds since the Unix epoch.
    pub unix_ms: u64,
}

/// The changes that are not in the kernel yet.
#[derive(Debug, Default)]
pub struct Backlog {
    inner: Mutex<Queue>,
}

#[derive(Debug, Default)]
struct Queue {
    /// Changes that no sync has taken yet.
    waiting: Batch,
    /// When the oldest change in `waiting` arrived.
    waiting_since: Option<Instant>,
    /// Changes that a sync has taken and that are not in the kernel yet.
    taken: Batch,
    /// When the oldest change in `taken` arrived, by family, IPv4 first. `None` when in sync.
    taken_since: [Option<Instant>; 2],
    /// What is counted since the start, and the last successful syncs. Not what waits.
    counts: ChangeCounts,
    /// Families that the last attempt did not program, because the node does not have them.
    is_absent: [bool; 2],
    /// True after this run programmed a complete state. Also true after this run found the rules of
    /// an earlier run, and read the state on disk that belongs to these rules.
    has_programmed: bool,
    /// True if the Node has a deletionTimestamp or the autoscaler's taint, or is deleted.
    is_node_going_away: bool,
}

#[derive(Debug, Default)]
struct Batch {
    endpoint_changes: u64,
    service_changes: u64,
    triggers: Vec<Trigger>,
}

/// The health of one IP family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FamilyHealth {
    /// True if no change has waited longer than the limit.
    pub is_healthy: bool,
    /// The time of the last successful sync. `None` before the first successful sync.
    pub synced_at: Option<SystemTime>,
}

/// The health of the agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Health {
    /// Both families, IPv4 first.
    pub families: [FamilyHealth; 2],
    /// True if load balancers may send new connections: the node is not going away.
    pub is_node_eligible: bool,
    /// True if the kernel has a complete state, of this run or of one whose file was read.
    pub has_programmed: bool,
}

impl Health {
    /// True when load balancers may send connections to the node: a complete state is programmed,
    /// no change has waited longer than the limit, and the node is not going away.
    pub fn is_serving(&self) -> bool {
        self.is_alive() && self.is_node_eligible && self.has_programmed
    }

    /// True when both families are healthy.
    pub fn is_alive(&self) -> bool {
        self.families.iter().all(|family| family.is_healthy)
    }
}

/// Numbers for metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ChangeCounts {
    /// Changes of endpoints since the start of the agent.
    pub endpoint_changes_total: u64,
    /// Changes of services since the start of the agent.
    pub service_changes_total: u64,
    /// Changes of endpoints that are not in the kernel yet.
    pub endpoint_changes_pending: u64,
    /// Changes of services that are not in the kernel yet.
    pub service_changes_pending: u64,
    /// When the last change arrived.
    pub queued_at: Option<SystemTime>,
    /// The last successful sync of each family, IPv4 first.
    pub synced_at: [Option<SystemTime>; 2],
}

impl Queue {
    /// Records which families a sync programs, and that it succeeded in those for which
    /// `is_in_sync` returns true. An empty list means both families.
    fn attempted(&mut self, programmed: &[Family], is_in_sync: impl Fn(Family) -> bool) {
        for (i, family) in Family::BOTH.into_iter().enumerate() {
            self.is_absent[i] = !includes(programmed, family);
            if !self.is_absent[i] && is_in_sync(family) {
                self.taken_since[i] = None;
                self.counts.synced_at[i] = Some(SystemTime::now());
            }
        }
    }
}

/// True when the list contains the family. An empty list means both families.
fn includes(families: &[Family], family: Family) -> bool {
    families.is_empty() || families.contains(&family)
}

impl Backlog {
    /// Adds changes that have arrived, with their triggers.
    pub(crate) fn queue<'a>(&self, changes: impl IntoIterator<Item = &'a Change>, triggers: &[Trigger]) {
        let mut inner = self.lock();
        for change in changes {
            match change {
                Change::Service(_) | Change::RemoveService(_) => {
                    inner.waiting.service_changes += 1;
                    inner.counts.service_changes_total += 1;
                }
                Change::Endpoint(..) | Change::RemoveEndpoint(..) => {
                    inner.waiting.endpoint_changes += 1;
                    inner.counts.endpoint_changes_total += 1;
                }
                Change::ServiceCidr(_) | Change::RemoveServiceCidr(_) => {}
            }
        }
        let room = MAX_TRIGGERS.saturating_sub(inner.waiting.triggers.len());
        inner.waiting.triggers.extend(triggers.iter().take(room));
        inner.waiting_since.get_or_insert_with(Instant::now);
        inner.counts.queued_at = Some(SystemTime::now());
    }

    /// Records that something other than a change of the state must be programmed.
    pub(crate) fn queue_other(&self) {
        self.lock().waiting_since.get_or_insert_with(Instant::now);
    }

    /// Records that a sync takes all waiting changes.
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

    /// Records that all taken changes are in the kernel, in the families of `programmed`. An empty
    /// list means both families. Returns the triggers of these changes.
    pub(crate) fn succeeded(&self, programmed: &[Family]) -> Vec<Trigger> {
        let mut inner = self.lock();
        inner.taken_since = [None; 2];
        inner.attempted(programmed, |_| true);
        inner.has_programmed = true;
        std::mem::take(&mut inner.taken).triggers
    }

    /// When the oldest change arrived that a sync has taken.
    pub(crate) fn taken_since(&self) -> Option<Instant> {
        self.lock().taken_since.iter().flatten().min().copied()
    }

    /// Records that all changes that had arrived at `at` are in the kernel.
    pub(crate) fn advanced(&self, at: Instant) {
        self.lock().taken_since.iter_mut().flatten().for_each(|since| *since = at.max(*since));
    }

    /// Records that a sync of the taken changes failed in the families of `failed`, and succeeded
    /// in the other families of `programmed`. For both arguments, an empty list means both
    /// families.
    pub(crate) fn failed(&self, failed: &[Family], programmed: &[Family]) {
        self.lock().attempted(programmed, |family| !includes(failed, family));
    }

    /// Records that the rules of an earlier run are in place, and that the agent has read and
    /// checked the state on disk that belongs to these rules.
    pub(crate) fn found_in_place(&self) {
        self.lock().has_programmed = true;
    }

    /// Records whether the agent's own Node is going away. Before the first call, the node is
    /// eligible, because some sources have no Nodes. An example is a folder without Node manifests.
    pub(crate) fn set_node(&self, node: &Node) {
        self.lock().is_node_going_away = node.going_away;
    }

    /// Returns the health of the agent. A family is unhealthy when a change has waited for longer
    /// than `patience`, even before the first sync. A family that the node does not have is always
    /// healthy.
    pub fn health(&self, patience: Duration) -> Health {
        let inner = self.lock();
        let family = |i: usize| {
            let oldest = inner.taken_since[i].or(inner.waiting_since);
            FamilyHealth {
                is_healthy: inner.is_absent[i] || oldest.is_none_or(|oldest| oldest.elapsed() < patience),
                synced_at: inner.counts.synced_at[i],
            }
        };
        Health {
            families: [0, 1].map(family),
            is_node_eligible: !inner.is_node_going_away,
            has_programmed: inner.has_programmed,
        }
    }

    /// Numbers for metrics.
    pub fn counts(&self) -> ChangeCounts {
        let inner = self.lock();
        ChangeCounts {
            endpoint_changes_pending: inner.waiting.endpoint_changes + inner.taken.endpoint_changes,
            service_changes_pending: inner.waiting.service_changes + inner.taken.service_changes,
            ..inner.counts
        }
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// What the reconcile loop has programmed or failed to program. The session reports this progress
// to the control plane, the page `/status` shows it, and [`crate::persist`] writes programmed
// states to disk.

/// The state that a sync programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Target {
    /// Epoch of the replica that numbered the version.
    pub epoch: u64,
    /// Version of the state.
    pub version: u64,
    /// The stream that carried `node_revision`, counted from 1.
    pub stream: u64,
    /// `OwnNode.revision` of the node's own Node on that stream; 0 before the first `OwnNode`.
    pub node_revision: u64,
}

/// The results of the syncs so far: the programmed state, the last failure, and problems.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Progress {
    /// The name of the backend, and the problems that the operator has to fix.
    pub status: v1::AgentStatus,
    /// Why the agent chose the backend, if the configuration leaves a choice.
    pub mode_reason: Option<Arc<str>>,
    /// The newest state that is in the kernel.
    pub programmed: Option<Programmed>,
    /// Why the last sync failed. `None` if the last sync succeeded.
    pub failure: Option<Failure>,
    /// Services whose rules the kernel rejects, with the reasons. `programmed` excludes these
    /// Services.
    pub rejections: Arc<[v1::Rejection]>,
    /// Services that lack an address and port, because the agent needs it itself. `programmed`
    /// includes the rest of these Services.
    pub left_out: Arc<[v1::Rejection]>,
    /// The last verification of the kernel. `None` before the first one.
    pub verification: Option<Arc<Verification>>,
}

/// The result of a verification: the forwarding table that was decoded from a dump of the kernel,
/// compared with the agent's state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verification {
    /// When the dump was read.
    pub at: Instant,
    /// The last request of [`crate::state::AgentState::request_verification`] that this
    /// verification answers. 0 if no verification was requested before.
    pub request: u64,
    /// The state that the kernel was compared with. Services that changed after it are not
    /// compared.
    pub target: Target,
    /// The differences, before the repair. Empty if the dump could not be read.
    pub comparison: Arc<Comparison>,
    /// The digests of the decoded tables of both families, by the buckets of their Services. The
    /// tables contain all Services, also those that were not compared. `None` if the dump could
    /// not be read, or if the kernel's rules are broken as a whole.
    pub found: Option<Arc<Digests>>,
    /// The node's facts when the dump was read.
    pub facts: Arc<NodeFacts>,
    /// Processor time of the verification. `None` if the system does not say.
    pub cpu_time: Option<Duration>,
    /// Why the kernel could not be read. Try again.
    pub error: Option<String>,
    /// The times of the other proxy, of an agent in standby.
    pub shadow: Option<Shadow>,
}

/// How long another proxy takes from a change to its rules.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Shadow {
    /// The changed Services whose rules do not agree yet, and the time since the first change.
    pub waiting: u64,
    /// See `waiting`.
    pub oldest: Duration,
    /// How often the rules of a changed Service did not agree within a minute.
    pub late: u64,
    /// From the arrival of a change until this agent could have written its rules.
    pub ready: ChangeTimes,
    /// From the arrival of a change until the rules were seen to agree, and the time since they
    /// were last seen to differ, by which the time may be too long.
    pub agreed: ChangeTimes,
    /// See `agreed`.
    pub resolution: ChangeTimes,
}

/// Durations: their number, and the last ones.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ChangeTimes {
    /// The number of all durations.
    pub count: u64,
    last: VecDeque<Duration>,
}

impl ChangeTimes {
    /// The number of durations that count for a quantile.
    const LAST: usize = 1000;

    /// Adds a duration.
    pub fn add(&mut self, duration: Duration) {
        self.count += 1;
        self.last.truncate(Self::LAST - 1);
        self.last.push_front(duration);
    }

    /// A quantile of the last durations, in thousandths; 0 without durations.
    pub fn quantile(&self, thousandths: usize) -> Duration {
        let mut sorted: Vec<Duration> = self.last.iter().copied().collect();
        sorted.sort_unstable();
        let at = (sorted.len().saturating_sub(1) * thousandths).div_ceil(1000);
        sorted.get(at).copied().unwrap_or_default()
    }
}

impl Progress {
    /// The generation of the state in the kernel. `None` before the first successful sync.
    pub(crate) fn generation(&self) -> Option<u64> {
        self.programmed.as_ref().map(|programmed| programmed.generation)
    }
}

/// A state that is completely in the kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Programmed {
    /// The epoch and version of the state.
    pub target: Target,
    /// Number of updates that the agent had received, over all streams, when the sync planned. All
    /// these updates are in the kernel.
    pub generation: u64,
    /// Time from the start of the sync until the kernel accepted the rules.
    pub took: Duration,
    /// Number of Services that the sync planned.
    pub services_planned: u32,
    /// Number of chains, or of the corresponding objects of the backend, that the sync wrote.
    pub objects_written: u32,
}

/// A sync that failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// The state that the sync tried to program.
    pub target: Target,
    /// True if the kernel may have lost rules of the programmed state since the last success:
    /// another program removed rules, or a sync of the programmed version failed.
    pub is_lost: bool,
    /// The error message of the backend.
    pub error: String,
    /// Number of failed syncs since the last success.
    pub attempts: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_of_a_failed_sync_stay_pending_and_triggers_are_returned_once() {
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
