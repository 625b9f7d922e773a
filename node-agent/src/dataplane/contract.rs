//! The traits that a dataplane implements. One instance programs one IP family.
//!
//! `docs/adding-a-dataplane.md` is the guide. [`super::DualStack`] calls the traits for both
//! families.

use std::{
    collections::{BTreeSet, HashMap},
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

use headgate_core::{
    Demand, Dirty, Family, LoadBalancing, NodeFacts, ServiceKey, State, StateSource, forwarding, view::NoLocalEndpoints,
};
use headgate_userspace::{ConnectionList, ServiceStats, TcpStats, UdpStats};

use super::{DataplaneError, metrics::DataplaneMetrics};
use crate::node_inputs::NodeInputs;

/// One IP family of a dataplane.
///
/// All calls come from one thread. [`Self::plan`] runs while the caller holds the lock of the
/// state: it computes and does not touch the kernel. The caller calls [`Self::apply`] next. After
/// an error of [`Self::apply`] or [`Self::sync`], [`super::ErrorKind`] says whether a full sync
/// must follow.
pub trait Dataplane: Send {
    /// The handle to the kernel that both families share, such as netlink sockets.
    type Kernel: KernelHandle;
    /// The changes to write to the kernel.
    type Plan: Send;

    /// True when the dataplane uses [`NodeInputs::interfaces`], so that the caller must read these
    /// addresses.
    const NEEDS_INTERFACES: bool = false;

    /// True when a proxy carries TCP connections, so that it can limit them and send headers to
    /// endpoints. Otherwise [`super::DualStack`] reports the Services that ask for this.
    const HAS_PROXY: bool = false;

    /// About how many objects the caller plans at once. While the kernel writes them, the changes
    /// of other services wait.
    const OBJECTS_AT_ONCE: usize = 8192;

    /// The family that this instance programs.
    fn family(&self) -> Family;

    /// The load-balancing algorithms that the dataplane supports on this node. If a Service asks
    /// for another algorithm, the dataplane uses its default, and [`super::DualStack`] reports the
    /// missing algorithm.
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
    ///
    /// # Errors
    /// The kernel cannot be read.
    fn starts_with_first_services(&self, _kernel: &mut Self::Kernel) -> Result<bool, DataplaneError> {
        Ok(false)
    }

    /// A full sync: sets kernel parameters, reads all objects of this family from the kernel, and
    /// writes what differs from the state. Reads a few Services at a time from `source`, so that
    /// the state is not locked for long and memory does not hold all rules. What changes meanwhile
    /// is written now, or planned again afterwards. The cost grows with the number of Services.
    ///
    /// # Errors
    /// The kernel has its old objects, or a part of the new ones.
    fn sync(&mut self, kernel: &mut Self::Kernel, source: &dyn StateSource) -> Result<Report, DataplaneError>;

    /// Reads all objects of this family from the kernel, and returns a verification, which plans
    /// everything anew. The verification does not touch the kernel and needs nothing of this
    /// dataplane, so that the caller can program changes while it runs. The cost is that of a full
    /// sync that writes nothing.
    ///
    /// # Errors
    /// The kernel cannot be read. It may lack objects that a full sync creates.
    fn verification(&mut self, kernel: &mut Self::Kernel) -> Result<RulesVerification, DataplaneError>;

    /// Plans the changes for the changed services. The cost depends only on these services.
    fn plan(&mut self, state: &State, node: &NodeFacts, dirty: &Dirty) -> Self::Plan;

    /// Writes a plan to the kernel. If the plan is large, writes a part of it and keeps the rest:
    /// see [`Report::has_rest`]. Each plan without services then writes another part.
    ///
    /// # Errors
    /// [`super::ErrorKind`] says what the caller must do. The plan cannot be applied again.
    fn apply(&mut self, kernel: &mut Self::Kernel, plan: Self::Plan) -> Result<Report, DataplaneError>;

    /// Looks for signs that somebody removed rules, at a cost that does not grow with the number of
    /// Services. Before the first full sync, the caller uses this check to find out whether the
    /// rules of an earlier run are in place.
    ///
    /// # Errors
    /// The check failed. It is unknown whether the rules are complete.
    fn check(&mut self, kernel: &mut Self::Kernel) -> Result<Finding, DataplaneError>;

    /// Reads the kernel, and returns what it forwards. The decoder shares no code with what writes
    /// to the kernel, and does not use this dataplane's records. The cost grows with the number of
    /// Services and endpoints: one call takes as long as a full sync that finds no difference.
    ///
    /// # Errors
    /// The kernel cannot be read. Try again.
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

    /// The time at which to call [`Self::maintain`]: some dataplanes have work that becomes due by
    /// time, such as draining, or another attempt to write rejected objects. `None` while no work
    /// is pending.
    fn due_at(&self) -> Option<Instant> {
        None
    }

    /// Does the work that is due at `now`.
    ///
    /// # Errors
    /// The same errors as [`Self::apply`].
    fn maintain(&mut self, _kernel: &mut Self::Kernel, _now: Instant) -> Result<(), DataplaneError> {
        Ok(())
    }

    /// Returns the deferred parts of services, or `None` if they are unchanged since the last call.
    /// A part is deferred when the kernel rejects it and accepts the rest of the service; the
    /// dataplane tries the part again by itself.
    fn deferred(&mut self) -> Option<Vec<Fault>> {
        None
    }

    /// The caller calls this function after [`super::ErrorKind::Rejected`]. Finds the faulty
    /// services among `suspects`. If `suspects` is `None`, searches all services that are not
    /// quarantined. Returns an empty list if the kernel accepts each service by itself.
    ///
    /// If the dataplane knows the faulty services from the kernel's answer, it returns these
    /// services. Otherwise the dataplane bisects: it tries the rules of some services in chains
    /// that receive no packets. A full sync repairs everything that the search leaves behind.
    ///
    /// # Errors
    /// The search did not finish, for example because another process holds a lock. Try the search
    /// again.
    fn find_faults(
        &mut self,
        _kernel: &mut Self::Kernel,
        _source: &dyn StateSource,
        _suspects: Option<&BTreeSet<Arc<ServiceKey>>>,
    ) -> Result<Vec<Fault>, DataplaneError> {
        Ok(Vec::new())
    }

    /// Quarantines these services and no others. Plans leave out the quarantined services. Their
    /// last good rules stay, if the dataplane knows these rules. The caller must make a full sync
    /// after it quarantines another service. After it releases a service from quarantine, it must
    /// plan this service as changed.
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
    #[must_use]
    pub fn of(sentence: Option<String>) -> Self {
        sentence.map_or(Self::Intact, Self::Changed)
    }
}

/// A handle to the kernel.
pub trait KernelHandle: Send {
    /// The caller calls `reset` after a failed call. The handle opens a new netlink socket, because
    /// answers to old requests may still arrive on the old socket. A handle whose sockets serve
    /// traffic keeps these sockets.
    fn reset(&mut self) {}

    /// Starts to follow the changes that other programs make, if the kernel reports them. Calls
    /// `wake` from another thread after such a change, not more often than the pauses of the
    /// implementation allow. The next [`Dataplane::check`] then reports the change.
    ///
    /// # Errors
    /// The kernel does not report changes now. The dataplane works without the reports.
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

    /// Calls `wake` from another thread after a problem of the proxy began or ended.
    /// [`Dataplane::degraded`] then returns the problem, or no longer returns it. Only the first
    /// call has an effect.
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
    /// Number of chains, or of the corresponding objects of the dataplane, that were written or
    /// removed.
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
    /// Joins the reports of both families. Both plan the same services, so `services_planned`
    /// counts each service once.
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

/// Plans everything anew from a source, a few Services at a time, and returns in which objects the
/// kernel differed from that plan when it was read. Objects differ also if the state or the kernel
/// has changed since then: the caller leaves these out.
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
