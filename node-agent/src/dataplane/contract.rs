//! What a dataplane implements: one IP family of one way to program the kernel.
//!
//! `docs/adding-a-dataplane.md` walks through it. [`super::DualStack`] calls it for both families.

use std::{
    collections::BTreeSet,
    sync::Arc,
    time::{Duration, Instant},
};

use headgate_core::{
    Demand, Dirty, Family, ServiceKey, State,
    view::{NoLocalEndpoints, NodeFacts},
};

use super::{DataplaneError, StateSource};
use crate::node_inputs::NodeInputs;

/// One IP family of a dataplane.
///
/// All calls come from one thread, one at a time. [`Self::plan`] and [`Self::plan_full`] run under
/// the lock of the state: they compute and do not touch the kernel. After an error of
/// [`Self::apply`] the caller makes a full sync: [`Self::prepare`], [`Self::read`],
/// [`Self::plan_full`], [`Self::apply`].
pub trait Dataplane: Send {
    /// What the families share to reach the kernel, such as netlink sockets.
    type Kernel: KernelHandle;
    /// What the kernel has of this family.
    type Found;
    /// What is to be written to the kernel.
    type Plan: Send;

    /// [`NodeInputs::interfaces`] matters, and is to be read.
    const NEEDS_INTERFACES: bool = false;

    /// The family.
    fn family(&self) -> Family;

    /// Takes what rules depend on besides the state. Returns true when rules change by it; a full
    /// sync follows then.
    fn configure(&mut self, _inputs: &NodeInputs) -> bool {
        false
    }

    /// Begins a full sync: sets kernel parameters and makes what [`Self::read`] needs. Returns a
    /// sentence for each thing that works less well than asked.
    ///
    /// # Errors
    /// The full sync cannot go on.
    fn prepare(&mut self, _kernel: &mut Self::Kernel) -> Result<Vec<String>, DataplaneError> {
        Ok(Vec::new())
    }

    /// Reads all that the kernel has of this family. The cost grows with the number of Services; it
    /// is called in full syncs and, rarely, for [`Self::matches`].
    ///
    /// # Errors
    /// The kernel cannot be read.
    fn read(&mut self, kernel: &mut Self::Kernel) -> Result<Self::Found, DataplaneError>;

    /// Computes what brings the kernel from what was found to the state. May take parts of `found`.
    fn plan_full(&mut self, state: &State, node: &NodeFacts, found: &mut Self::Found) -> Self::Plan;

    /// Computes what the changed services need. The cost depends on these services alone.
    fn plan(&mut self, state: &State, node: &NodeFacts, dirty: &Dirty) -> Self::Plan;

    /// Writes a plan to the kernel. `source` is there in a full sync, for plans that render parts
    /// of the state while they are written.
    ///
    /// # Errors
    /// [`super::ErrorKind`] says what the caller does. The plan is spent.
    fn apply(
        &mut self,
        kernel: &mut Self::Kernel,
        plan: Self::Plan,
        source: Option<&dyn StateSource>,
    ) -> Result<Report, DataplaneError>;

    /// Looks for signs that rules are gone, at a cost that does not grow with the number of
    /// Services. Returns the first sign as a sentence. It is called before the first full sync too,
    /// to find out whether the rules of an earlier run are in place.
    ///
    /// # Errors
    /// It cannot be found out; this says nothing about the rules.
    fn check(&mut self, kernel: &mut Self::Kernel) -> Result<Option<String>, DataplaneError>;

    /// Whether what was read is what the last steps programmed.
    fn matches(&self, found: &Self::Found) -> bool;

    /// What the last step brought the kernel to, in numbers. Reads nothing.
    fn statistics(&self) -> Statistics {
        Statistics::default()
    }

    /// What the operator has to fix. What no Service asks for needs no fixing.
    fn degraded(&self, _demand: &Demand) -> Vec<Degradation> {
        Vec::new()
    }

    /// Itself, if it has work that becomes due by time.
    fn maintenance(&mut self) -> Option<&mut dyn Maintain<Self::Kernel>> {
        None
    }

    /// Itself, if it can find and leave out services whose rules the kernel rejects.
    fn fault_finding(&mut self) -> Option<&mut dyn FindFaults<Self::Kernel>> {
        None
    }
}

/// A handle to the kernel.
pub trait KernelHandle: Send {
    /// Is called after a failed call. A netlink socket is opened anew, for the answers to old
    /// requests may still arrive on it. A handle that serves traffic keeps its sockets.
    fn reset(&mut self) {}
}

/// For dataplanes that run a program for each call.
impl KernelHandle for () {}

/// Work that becomes due by time: draining, and further attempts at what the kernel rejected.
pub trait Maintain<K> {
    /// When [`Self::maintain`] has something to do; `None` while nothing is pending.
    fn due_at(&self) -> Option<Instant>;

    /// Does what is due.
    ///
    /// # Errors
    /// As [`Dataplane::apply`].
    fn maintain(&mut self, kernel: &mut K, now: Instant) -> Result<(), DataplaneError>;

    /// Parts of services that the kernel rejected while it took the rest, if they changed since the
    /// last call. They are deferred: the dataplane tries them again by itself.
    fn deferred(&mut self) -> Option<Vec<Fault>> {
        None
    }
}

/// Services whose rules the kernel rejects are quarantined, so that they hold up no others.
pub trait FindFaults<K> {
    /// Finds the services at fault after [`super::ErrorKind::Rejected`], among the suspects or
    /// among all that are not quarantined. One that knows them from the kernel's answer returns
    /// those. One that does not bisects: it tries rules where no packet comes to them, and leaves
    /// nothing behind that a full sync would not put in order. Empty when the kernel takes each
    /// service by itself.
    ///
    /// # Errors
    /// The search came to no end, as when another process holds a lock.
    fn find_faults(
        &mut self,
        kernel: &mut K,
        source: &dyn StateSource,
        suspects: Option<&BTreeSet<Arc<ServiceKey>>>,
    ) -> Result<Vec<Fault>, DataplaneError>;

    /// Quarantines these services and no others: steps pass them over, and their last good rules
    /// stay where these are known. A full sync follows when there are new ones; those that are
    /// released are planned as changed.
    fn set_quarantined(&mut self, services: &BTreeSet<Arc<ServiceKey>>);
}

/// A service whose rules, or a part of them, the kernel rejects in one family.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// The service.
    pub service: Arc<ServiceKey>,
    /// The family.
    pub family: Family,
    /// In the words of the kernel or of the program that writes the rules.
    pub reason: String,
}

/// What one step did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// Services whose programming was computed anew.
    pub services_planned: u32,
    /// Chains, or the dataplane's like, that were written or removed.
    pub objects_written: u32,
    /// A sentence for each thing that was done less well than asked.
    pub warnings: Vec<String>,
}

impl Report {
    /// Adds the report of another family. Both plan the same services, which count once.
    pub(super) fn merge(&mut self, other: Self) {
        self.services_planned = self.services_planned.max(other.services_planned);
        self.objects_written += other.objects_written;
        self.warnings.extend(other.warnings);
    }
}

/// What a dataplane has in the kernel for one family, in numbers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Rules, by table; empty for dataplanes without rules.
    pub rules: Vec<TableStatistics>,
    /// Service ports whose Local policies find no endpoint on this node.
    pub no_local: NoLocalEndpoints,
    /// The rules count packets into [`crate::packet_counters`].
    pub counts_packets: bool,
}

/// Rules of one table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TableStatistics {
    /// The table.
    pub table: &'static str,
    /// Rules that are there.
    pub total: u32,
    /// Rules that the last step wrote.
    pub last: u32,
}

/// Statistics of one family, with the time of its last step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FamilyStatistics {
    /// The family.
    pub family: Family,
    /// Time that the kernel took for the last step.
    pub took: Duration,
    /// What is in the kernel.
    pub statistics: Statistics,
}

/// Something that the operator has to fix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Degradation {
    /// What is wrong, with the remedy. The same in both families is reported once.
    pub sentence: String,
    /// The services that it concerns, if they are to be named after the sentence.
    pub services: BTreeSet<Arc<ServiceKey>>,
}

impl From<String> for Degradation {
    fn from(sentence: String) -> Self {
        Self { sentence, services: BTreeSet::new() }
    }
}
