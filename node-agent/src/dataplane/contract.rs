//! The traits that a dataplane implements for one IP family (`docs/adding-a-dataplane.md`), its
//! errors, and the pauses between its retries. [`super::DualStack`] calls them for both families.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

use headgate_core::{
    Demand, Dirty, Family, LoadBalancing, NodeFacts, ServiceKey, State, StateSource, forwarding, view::NoLocalEndpoints,
};
use headgate_userspace::{ConnectionList, ServiceStats, TcpStats, UdpStats};

use super::metrics::DataplaneMetrics;
use crate::{
    backoff::{Backoff, Jitter},
    node_inputs::NodeInputs,
};

/// One IP family of a dataplane. All calls come from one thread. [`Self::plan`] runs under the lock
/// of the state, and does not touch the kernel. The caller calls [`Self::apply`] next. After an
/// error, [`super::ErrorKind`] says whether a full sync must follow.
pub trait Dataplane: Send {
    /// The handle to the kernel that both families share, such as netlink sockets.
    type Kernel: KernelHandle;
    /// The changes to write to the kernel.
    type Plan: Send;

    /// True when the dataplane needs [`NodeInputs::interfaces`], which the caller then reads.
    const NEEDS_INTERFACES: bool = false;

    /// True when a proxy carries TCP connections, so that it can limit them and send headers to
    /// endpoints. Otherwise [`super::DualStack`] reports the Services that ask for this.
    const HAS_PROXY: bool = false;

    /// About how many objects the caller plans at once. While the kernel writes them, others wait.
    const OBJECTS_AT_ONCE: usize = 8192;

    /// The family that this instance programs.
    fn family(&self) -> Family;

    /// The load-balancing algorithms of this node. For others, the dataplane uses its default, and
    /// [`super::DualStack`] reports them.
    fn load_balancing(&self) -> &'static [LoadBalancing] {
        &[LoadBalancing::Random]
    }

    /// Sets the inputs of the rules that are not part of the state. Returns true if the inputs
    /// change rules; the caller must then make a full sync.
    fn configure(&mut self, _inputs: &NodeInputs) -> bool {
        false
    }

    /// True if the kernel has no object of this family, and the first sync should program the most
    /// important Services before all others. The cost does not grow with the number of Services.
    /// Errors: the kernel cannot be read.
    fn starts_with_first_services(&self, _kernel: &mut Self::Kernel) -> Result<bool, DataplaneError> {
        Ok(false)
    }

    /// A full sync: sets kernel parameters, reads all objects of this family, and writes what
    /// differs from the state, of which it reads a few Services at a time. What changes meanwhile
    /// is written now, or planned again. The cost grows with the number of Services. Errors: the
    /// kernel has its old objects, or a part of the new ones.
    fn sync(&mut self, kernel: &mut Self::Kernel, source: &dyn StateSource) -> Result<Report, DataplaneError>;

    /// Reads all objects of this family, and returns a verification, which plans everything anew.
    /// It does not touch the kernel or this dataplane, so changes can be programmed meanwhile. The
    /// cost is that of a full sync. Errors: the kernel cannot be read. It may lack objects that a
    /// full sync creates.
    fn verification(&mut self, kernel: &mut Self::Kernel) -> Result<RulesVerification, DataplaneError>;

    /// Plans the changes for the changed services. The cost depends only on these services.
    fn plan(&mut self, state: &State, node: &NodeFacts, dirty: &Dirty) -> Self::Plan;

    /// Writes a plan to the kernel. If the plan is large, writes a part of it and keeps the rest:
    /// see [`Report::has_rest`]. Each plan without services then writes another part.
    /// Errors: [`super::ErrorKind`] says what the caller must do. The plan cannot be applied again.
    fn apply(&mut self, kernel: &mut Self::Kernel, plan: Self::Plan) -> Result<Report, DataplaneError>;

    /// Looks for signs that somebody removed rules, at a cost that does not grow with the number of
    /// Services. Before the first full sync: whether the rules of an earlier run are in place.
    /// Errors: the check failed. It is unknown whether the rules are complete.
    fn check(&mut self, kernel: &mut Self::Kernel) -> Result<Finding, DataplaneError>;

    /// Reads the kernel, and returns what it forwards. The decoder shares no code with the writer
    /// and uses none of its records. The cost is that of a full sync. Errors: the kernel cannot be
    /// read. Try again.
    fn decode(&mut self, kernel: &mut Self::Kernel) -> Result<forwarding::Table, DataplaneError>;

    /// Counts of the programmed rules after the last step. Does not read the kernel.
    fn statistics(&self) -> Statistics {
        Statistics::default()
    }

    /// The problems that the operator has to fix. A missing feature is reported only if `demand`
    /// contains Services that need it.
    fn degraded(&self, _demand: &Demand) -> Vec<Degradation> {
        Vec::new()
    }

    /// The time at which to call [`Self::maintain`], for work that becomes due by time, such as
    /// draining. `None` while no work is pending.
    fn due_at(&self) -> Option<Instant> {
        None
    }

    /// Does the work that is due at `now`. Errors: the same errors as [`Self::apply`].
    fn maintain(&mut self, _kernel: &mut Self::Kernel, _now: Instant) -> Result<(), DataplaneError> {
        Ok(())
    }

    /// Returns the deferred parts of services, which the kernel rejects and the dataplane tries
    /// again by itself; `None` if they are unchanged since the last call.
    fn deferred(&mut self) -> Option<Vec<Fault>> {
        None
    }

    /// After [`super::ErrorKind::Rejected`]: finds the faulty services among `suspects`, or among
    /// all that are not quarantined. The list is empty if the kernel accepts each by itself. The
    /// dataplane takes them from the kernel's answer, or bisects with chains that receive no
    /// packets; a full sync repairs what the search leaves. Errors: the search did not finish. Try
    /// it again.
    fn find_faults(
        &mut self,
        _kernel: &mut Self::Kernel,
        _source: &dyn StateSource,
        _suspects: Option<&BTreeSet<Arc<ServiceKey>>>,
    ) -> Result<Vec<Fault>, DataplaneError> {
        Ok(Vec::new())
    }

    /// Quarantines these services and no others. Plans leave them out; their last good rules stay,
    /// if they are known. The caller makes a full sync after it adds a service, and plans a
    /// released service as changed.
    fn set_quarantined(&mut self, _services: &BTreeSet<Arc<ServiceKey>>) {}
}

/// What a check of the kernel found, in the order of certainty.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Finding {
    /// No sign that somebody removed or changed rules.
    Intact,
    /// Somebody may have changed rules: a full sync or a verification shows whether. Reported once.
    Unknown,
    /// Somebody removed or changed rules, as a sentence.
    Changed(String),
}

impl Finding {
    /// `Changed` with a sentence, or `Intact` without one.
    pub fn of(sentence: Option<String>) -> Self {
        sentence.map_or(Self::Intact, Self::Changed)
    }
}

/// A handle to the kernel.
pub trait KernelHandle: Send {
    /// The caller calls `reset` after a failed call: old answers may still arrive on the old
    /// netlink socket, so the handle opens a new one. Sockets that serve traffic stay.
    fn reset(&mut self) {}

    /// Calls `wake` from another thread after changes of other programs, with pauses. The next
    /// [`Dataplane::check`] then reports the change. Errors: the kernel does not report changes
    /// now. The dataplane works without the reports.
    fn follow(&mut self, _wake: WakeLoop, _metrics: &DataplaneMetrics) -> Result<(), DataplaneError> {
        Ok(())
    }

    /// The caller calls `note_sync` before and after the write of each full sync, so that what
    /// [`Self::follow`] started can tell this write from those of other programs.
    fn note_sync(&self) {}
}

/// What carries connections in this process.
pub trait ConnectionProxy: fmt::Debug + Send + Sync {
    /// Sends new connections elsewhere, and waits until the open connections have ended or `limit`
    /// has passed. Returns the number of open connections.
    fn drain(&self, limit: Duration) -> u64;

    /// Returns what the proxy has counted. The cost grows with the number of Services.
    fn counts(&self) -> ProxyCounts;

    /// Returns open connections and UDP sessions of all Services or of one Service, at most
    /// `limit`. The cost grows with the number of open connections.
    fn connections(&self, service: Option<&ServiceKey>, limit: usize) -> ConnectionList;

    /// Calls `wake` from another thread after a problem of the proxy began or ended
    /// ([`Dataplane::degraded`]). Only the first call has an effect.
    fn follow_problems(&self, wake: TryWake);
}

/// What a proxy has counted since its start.
#[derive(Debug, Default)]
pub struct ProxyCounts {
    /// The counts of each Service, by `namespace/name`.
    pub services: HashMap<Arc<str>, ServiceStats>,
    /// The sums over all Services, also over Services that were removed.
    pub totals: ServiceStats,
    /// The counts that belong to no Service.
    pub tcp: TcpStats,
    /// The counts of datagrams that belong to no Service.
    pub udp: UdpStats,
}

/// Wakes the reconcile loop.
pub type WakeLoop = Arc<dyn Fn() + Send + Sync>;

/// Like [`WakeLoop`], for threads that must not wait. Returns false if the call would have to wait:
/// call it again soon.
pub type TryWake = Arc<dyn Fn() -> bool + Send + Sync>;

/// A service of which the kernel rejects some or all rules, in one family.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// The service.
    pub service: Arc<ServiceKey>,
    /// The family.
    pub family: Family,
    /// The error message of the kernel or of the program that writes the rules.
    pub reason: String,
}

/// The result of writing one plan.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// Number of services that the step planned.
    pub services_planned: u32,
    /// Number of chains, or the dataplane's corresponding objects, written or removed.
    pub objects_written: u32,
    /// One sentence for each part of the step that did not succeed completely.
    pub warnings: Vec<String>,
    /// True if the services of the step are not completely in the kernel, because it was too large.
    /// The caller plans them again when nothing is left.
    pub is_partial: bool,
    /// True if a part of this step or of an earlier one is left.
    pub has_rest: bool,
}

impl Report {
    /// Joins the reports of both families. Both plan the same services, which count once.
    pub(super) fn merged(reports: Vec<Self>) -> Self {
        reports.into_iter().fold(Self::default(), |one, other| Self {
            services_planned: one.services_planned.max(other.services_planned),
            objects_written: one.objects_written + other.objects_written,
            warnings: [one.warnings, other.warnings].concat(),
            is_partial: one.is_partial || other.is_partial,
            has_rest: one.has_rest || other.has_rest,
        })
    }
}

/// Plans everything anew, a few Services at a time, and returns in which objects the kernel
/// differed. The caller leaves out what has changed since the kernel was read.
pub type RulesVerification = Box<dyn FnOnce(&dyn StateSource) -> RulesDifferences + Send>;

/// What differs between the kernel and the state.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RulesDifferences {
    /// Number of chains, or of the corresponding objects of the dataplane.
    pub count: u32,
    /// The services to which these objects belong, if they belong to services.
    pub services: BTreeSet<Arc<ServiceKey>>,
    /// True if a full sync would divide the rules among chains in another way, because the cluster
    /// has grown or shrunk. Nothing is compared then.
    pub is_redivided: bool,
}

/// Counts of the programmed rules of one family.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Rules, by table; empty for dataplanes without rules.
    pub rules: Vec<TableStatistics>,
    /// Service ports that have traffic policy Local and no endpoint on this node.
    pub no_local: NoLocalEndpoints,
    /// True when the rules increment [`crate::packet_counters`].
    pub counts_packets: bool,
}

/// The number of rules in one table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TableStatistics {
    /// The table.
    pub table: &'static str,
    /// Number of rules that are in the kernel.
    pub total: u32,
    /// Number of rules that the last step wrote.
    pub last: u32,
}

/// Statistics of one family, with the time of its last step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FamilyStatistics {
    /// The family.
    pub family: Family,
    /// How long the last step took. Includes the planning of a full sync.
    pub took: Duration,
    /// Counts of the programmed rules.
    pub statistics: Statistics,
}

/// Something that the operator has to fix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Degradation {
    /// What is wrong, with the remedy. A sentence that both families report appears once.
    pub sentence: String,
    /// The affected services; the report names them after the sentence.
    pub services: BTreeSet<Arc<ServiceKey>>,
}

impl From<String> for Degradation {
    fn from(sentence: String) -> Self {
        Self { sentence, services: BTreeSet::new() }
    }
}

// Errors of dataplanes, and how the caller reacts to each.

/// How the caller reacts to a [`DataplaneError`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// The same attempt may succeed later. For example, another process holds a lock.
    Retry,
    /// The kernel differs from the dataplane's records. Only a full sync helps.
    NeedsFullSync,
    /// The dataplane has written everything that the kernel accepts. Plan
    /// [`DataplaneError::services`] as changed: their new plan differs.
    PlanAgain,
    /// The kernel, or the program that writes the rules, rejects the rules of some service. The
    /// same plan would fail again.
    Rejected,
    /// Another attempt helps only after somebody changes the machine: a program is missing.
    Fatal,
    /// This machine cannot run the dataplane at all, so the kernel holds none of its objects.
    Unavailable,
}

/// A failure of a dataplane.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct DataplaneError {
    /// How to react to the error.
    pub kind: ErrorKind,
    /// What failed, and the remedy if one is known.
    pub message: String,
    /// The affected families; an empty list means both families.
    pub families: Vec<Family>,
    /// The services to plan as changed after [`ErrorKind::PlanAgain`].
    pub services: BTreeSet<Arc<ServiceKey>>,
}

impl DataplaneError {
    /// An error of this kind that affects both families.
    pub fn new(kind: ErrorKind, message: impl fmt::Display) -> Self {
        Self { kind, message: message.to_string(), families: Vec::new(), services: BTreeSet::new() }
    }

    /// An error that makes the caller plan these services as changed.
    pub fn plan_again(message: impl fmt::Display, services: BTreeSet<Arc<ServiceKey>>) -> Self {
        Self { services, ..Self::new(ErrorKind::PlanAgain, message) }
    }

    /// Limits the error to one family.
    pub fn of(self, family: Family) -> Self {
        Self { families: vec![family], ..self }
    }

    /// Joins the errors of all results with [`Self::join`].
    /// Errors: at least one result is an error.
    pub(super) fn join_all(results: impl IntoIterator<Item = Result<(), Self>>) -> Result<(), Self> {
        results.into_iter().reduce(Self::join).unwrap_or(Ok(()))
    }

    /// Joins the errors of two results. [`ErrorKind::PlanAgain`] is the least serious kind, then
    /// [`ErrorKind::Retry`]; of two others, the kind of `one` counts. Errors: at least one result
    /// is an error.
    pub fn join(one: Result<(), Self>, other: Result<(), Self>) -> Result<(), Self> {
        let (mut one, other) = match (one, other) {
            (Err(one), Err(other)) => (one, other),
            (one, other) => return one.and(other),
        };
        let is_lesser = one.kind == ErrorKind::Retry && other.kind != ErrorKind::PlanAgain;
        if is_lesser || one.kind == ErrorKind::PlanAgain {
            one.kind = other.kind;
        }
        if one.families.is_empty() || other.families.is_empty() {
            one.families.clear();
        } else {
            one.families.extend(other.families);
        }
        if one.message != other.message {
            one.message = format!("{}; {}", one.message, other.message);
        }
        one.services.extend(other.services);
        Err(one)
    }
}

// Schedules further attempts at objects that the kernel rejected.

/// The first pause is short: at boot, the kernel rejects each IPVS destination until an interface
/// is up, because it considers every address a broadcast address.
pub(in crate::dataplane) const PAUSES: Backoff =
    Backoff::new(Duration::from_secs(5), Duration::from_secs(3600), Jitter::None);

/// The first and the longest pause for features that need a kernel module. The longest pause is
/// short, because an operator who loads the missing module waits for the result.
pub(in crate::dataplane) const PAUSES_OF_MODULES: Backoff =
    Backoff::new(Duration::from_secs(5), Duration::from_secs(30), Jitter::None);

/// The rejected objects, each with a reason and the time of the next attempt. Pauses double.
/// Objects that were first rejected together are due together.
#[derive(Debug)]
pub(in crate::dataplane) struct Retries<K> {
    pauses: Backoff,
    entries: BTreeMap<K, RejectedObject>,
    due: BTreeSet<(Instant, K)>,
}

#[derive(Debug)]
struct RejectedObject {
    reason: String,
    backoff: Backoff,
    retry_at: Instant,
}

impl<K: Ord + Copy> Retries<K> {
    pub(in crate::dataplane) fn new(pauses: Backoff) -> Self {
        Self { pauses, entries: BTreeMap::new(), due: BTreeSet::new() }
    }

    /// Records that the kernel rejected `what` at `now`.
    pub(in crate::dataplane) fn note(&mut self, what: K, reason: String, now: Instant) {
        let mut backoff = self.remove(what).map_or_else(|| self.pauses.clone(), |entry| entry.backoff);
        let retry_at = now + backoff.next_pause();
        self.entries.insert(what, RejectedObject { reason, backoff, retry_at });
        self.due.insert((retry_at, what));
    }

    fn remove(&mut self, what: K) -> Option<RejectedObject> {
        let entry = self.entries.remove(&what)?;
        self.due.remove(&(entry.retry_at, what));
        Some(entry)
    }

    /// Removes the objects for which `is_kept` returns false. Cost: all objects.
    pub(in crate::dataplane) fn retain(&mut self, is_kept: impl Fn(&K) -> bool) {
        self.entries.retain(|what, _| is_kept(what));
        self.due.retain(|(_, what)| is_kept(what));
    }

    /// Why the kernel rejected `what`. `None` if `what` is not a rejected object.
    pub(in crate::dataplane) fn reason(&self, what: &K) -> Option<&str> {
        self.entries.get(what).map(|entry| entry.reason.as_str())
    }

    pub(in crate::dataplane) fn all(&self) -> impl Iterator<Item = K> {
        self.entries.keys().copied()
    }

    /// The objects whose next attempt is due at `now`, the longest overdue first.
    pub(in crate::dataplane) fn due(&self, now: Instant) -> Vec<K> {
        self.due.iter().take_while(|(at, _)| *at <= now).map(|(_, what)| *what).collect()
    }

    /// When the next attempt is due. `None` if no object is rejected.
    pub(in crate::dataplane) fn next_due(&self) -> Option<Instant> {
        self.due.first().map(|(at, _)| *at)
    }
}

#[cfg(test)]
mod retries_tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest_and_start_again_after_a_success() {
        let (minute, began) = (Duration::from_secs(60), Instant::now());
        let mut entries = Retries::new(Backoff::new(minute, 60 * minute, Jitter::None));
        entries.note("other", String::new(), began + 1000 * minute);
        let (mut now, mut pauses) = (began, Vec::new());
        for _ in 0..9 {
            entries.note("web", format!("since {} s", now.duration_since(began).as_secs()), now);
            let due = entries.next_due().unwrap_or(began);
            assert_eq!(entries.due(due - Duration::from_millis(1)), [""; 0]);
            assert_eq!(entries.due(due), ["web"]);
            pauses.push(due.duration_since(now).as_secs() / 60);
            now = due;
        }
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 60, 60, 60]);
        assert_eq!(entries.reason(&"web"), Some("since 10980 s"));
        entries.retain(|what| *what == "other");
        assert_eq!((entries.reason(&"web"), entries.all().collect::<Vec<_>>()), (None, vec!["other"]));
        entries.note("web", String::new(), began);
        assert_eq!(entries.next_due(), Some(began + minute));
        assert_eq!(entries.due(began + 2000 * minute), ["web", "other"]);
    }
}
