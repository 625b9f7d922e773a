//! What every backend does: bring one node's kernel to the state, report how, and leave no trace when asked.
//!
//! Backends are synchronous (the kernel works inside the system call or the process that is waited for) and run on the thread of
//! [`crate::reconcile`].

use std::{
    any::Any,
    collections::BTreeSet,
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

use headgate_core::{
    Demand, Dirty, Family, ServiceKey, State,
    iptables::Tally,
    view::{NoLocalEndpoints, NodeFacts},
};

use crate::node_inputs::NodeInputs;
pub use crate::state::source::{FixedState, StateSource};

#[doc(hidden)]
pub mod fake;
pub mod iptables;
pub mod ipvs;
mod leftovers;
mod retry;

/// What one step did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// Services whose programming was computed anew.
    pub services_planned: u32,
    /// Chains, or the backend's like, that were written or removed.
    pub objects_written: u32,
    /// One sentence for each thing that was done less well than asked, such as a port that another process holds.
    pub warnings: Vec<String>,
}

/// One family's part of what a backend has in the kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FamilyStatistics {
    /// The family.
    pub family: Family,
    /// Time that the last step took in it.
    pub took: Duration,
    /// Rules, by table; empty for backends without rules.
    pub rules: Vec<TableStatistics>,
    /// Service ports whose Local policies find no endpoint on this node.
    pub no_local: NoLocalEndpoints,
}

impl FamilyStatistics {
    /// Of a backend that has rules. `last` are those that the last step wrote: nat, filter.
    pub(crate) fn of_rules(family: Family, took: Duration, tally: &Tally, [nat, filter]: [u32; 2]) -> Self {
        let rules = vec![
            TableStatistics { table: "nat", total: tally.nat_rules, last: nat },
            TableStatistics { table: "filter", total: tally.filter_rules, last: filter },
        ];
        Self { family, took, rules, no_local: tally.no_local }
    }
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

/// What a backend computed in [`NodeDataplane::plan`] and takes back in [`NodeDataplane::apply`]; nobody else looks inside.
pub type Plan = Box<dyn Any + Send>;

/// A service whose rules the kernel, or the program that writes them, refuses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// The service.
    pub service: Arc<ServiceKey>,
    /// The family whose rules are refused.
    pub family: Family,
    /// In the words of who refused them.
    pub reason: String,
}

/// A way to program the kernel. One value serves both families.
pub trait NodeDataplane: Send {
    /// Such as "iptables-legacy"; the part before the first `-` is the proxy mode.
    fn name(&self) -> &str;

    /// What the operator has to fix, one sentence each with the remedy. What no Service asks for needs no fixing.
    fn degraded(&self, demand: &Demand) -> Vec<String>;

    /// Brings the kernel to the state, whatever is there now: the first sync and every repair.
    ///
    /// # Errors
    /// The kernel keeps what it had, or part of the new; the caller tries again in full.
    fn sync_full(&mut self, state: &State, node: &NodeFacts) -> Result<Report, DataplaneError> {
        self.sync_full_from(&FixedState(state, node))
    }

    /// The same from a state that goes on changing: a backend looks at it when it has read the kernel, and lets go of it before it
    /// writes. What it programs is at least as new as the state at the call; parts may be newer than others, and what changed in between is
    /// planned once more by the next step.
    ///
    /// # Errors
    /// As [`Self::sync_full`].
    fn sync_full_from(&mut self, source: &dyn StateSource) -> Result<Report, DataplaneError>;

    /// Computes what [`Self::apply`] is to do for the services that changed. Touches no kernel: the caller holds the state's lock.
    fn plan(&mut self, state: &State, node: &NodeFacts, dirty: &Dirty) -> Plan;

    /// Writes a plan to the kernel.
    ///
    /// # Errors
    /// As [`DataplaneError::kind`] says. After an error the plan is spent: the caller plans the same services again, or syncs in full.
    fn apply(&mut self, plan: Plan) -> Result<Report, DataplaneError>;

    /// After [`ErrorKind::Refused`]: finds the services that are at fault, by trying them on the kernel, in these families (none means
    /// both); among the suspects, or among all that are not set aside. It leaves the others' rules as they were or as they are wanted, and nothing that
    /// [`Self::sync_full`] would not put in order. Empty when each service is taken by itself, or when the backend cannot tell.
    ///
    /// # Errors
    /// The search came to no end, as when another process holds a lock. Try again.
    fn find_refused(
        &mut self,
        source: &dyn StateSource,
        suspects: Option<&BTreeSet<Arc<ServiceKey>>>,
        families: &[Family],
    ) -> Result<Vec<Refused>, DataplaneError> {
        let _ = (source, suspects, families);
        Ok(Vec::new())
    }

    /// Sets just these services aside: until a call leaves them out, steps pass them over, and their last good rules stay where these are
    /// known, else none. The next step has to be [`Self::sync_full`] when there are new ones; those that are left out have to be planned as changed.
    fn set_aside(&mut self, refused: &[Refused]) {
        let _ = refused;
    }

    /// What the kernel refuses of services for itself while it takes the rest of them, once it has changed since the last call. The backend tries it again
    /// by itself, when the service is planned and in [`Self::tend`].
    fn refused_parts(&mut self) -> Option<Vec<Refused>> {
        None
    }

    /// Services that have to be planned as changed because of what the backend has found out about the kernel: after [`ErrorKind::PlanAgain`] and
    /// [`Self::tend`].
    fn services_to_plan(&mut self) -> BTreeSet<Arc<ServiceKey>> {
        BTreeSet::new()
    }

    /// True while its rules count into [`crate::packet_counters`].
    fn counts_packets(&self) -> bool {
        false
    }

    /// What the last step brought the kernel to, in numbers, for each family that is programmed. Costs nothing: the numbers are kept in step.
    fn statistics(&self) -> Vec<FamilyStatistics> {
        Vec::new()
    }

    /// The addresses of the node's interfaces matter, and are to be read.
    fn needs_interfaces(&self) -> bool {
        false
    }

    /// When [`Self::tend`] is to be called; `None` while there is nothing to tend.
    fn tend_at(&self) -> Option<Instant> {
        None
    }

    /// Does what time brings with it, such as removing what has drained.
    ///
    /// # Errors
    /// As [`Self::apply`].
    fn tend(&mut self) -> Result<(), DataplaneError> {
        Ok(())
    }

    /// Takes what rules depend on besides the state. True when rules change by it: then the next step has to be [`Self::sync_full`].
    fn reconfigure(&mut self, inputs: &NodeInputs) -> bool {
        let _ = inputs;
        false
    }

    /// Looks whether rules that an earlier run left are in place, before any sync: whether there are any, not which they are.
    ///
    /// # Errors
    /// When it cannot be found out.
    fn has_rules(&mut self) -> Result<bool, DataplaneError> {
        self.verify()
    }

    /// Looks whether somebody else removed or changed our rules. True means intact.
    ///
    /// # Errors
    /// When it cannot be found out; says nothing about the rules.
    fn verify(&mut self) -> Result<bool, DataplaneError>;

    /// Removes every trace from the kernel.
    ///
    /// # Errors
    /// Names what was left behind.
    fn cleanup(&mut self) -> Result<(), DataplaneError>;
}

/// What the caller does about a [`DataplaneError`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// The same step may succeed later, as when another process holds a lock.
    Retry,
    /// The kernel is not as the backend thinks: only a full sync helps.
    NeedsFullSync,
    /// All is done that the kernel takes. The rest comes out differently when its services are planned anew, which [`NodeDataplane::services_to_plan`] names:
    /// nothing has failed.
    PlanAgain,
    /// What is written is refused for itself: some service's rules cannot be had on this kernel, and the same step will fail again.
    Refused,
    /// Trying again helps only when somebody changes the machine, as when a program is missing.
    Fatal,
    /// This machine lacks what the backend needs to run at all; there can be no trace of it either.
    Unavailable,
}

/// A failure of a backend.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct DataplaneError {
    /// What to do about it.
    pub kind: ErrorKind,
    /// What failed, and the remedy where there is one.
    pub message: String,
    /// The families that it is about; none means both.
    pub families: Vec<Family>,
}

impl DataplaneError {
    /// An error of a kind.
    pub fn new(kind: ErrorKind, message: impl fmt::Display) -> Self {
        Self { kind, message: message.to_string(), families: Vec::new() }
    }

    /// A plan that another backend made cannot be applied.
    pub(crate) fn of_another_plan() -> Self {
        Self::new(ErrorKind::NeedsFullSync, "a plan of another backend was applied; everything is written again")
    }

    /// The same, about one family.
    #[must_use]
    pub fn of(self, family: Family) -> Self {
        Self { families: vec![family], ..self }
    }

    /// One error for two results; the graver kind counts, and [`ErrorKind::PlanAgain`] is the least.
    ///
    /// # Errors
    /// One of the two has failed, or both.
    pub fn join(one: Result<(), Self>, other: Result<(), Self>) -> Result<(), Self> {
        let (Err(mut one), Err(other)) = (one.clone(), other.clone()) else { return one.and(other) };
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
        Err(one)
    }
}

/// The mode that a backend's name stands for, as `/proxyMode` shows it: "iptables" for "iptables-nft".
#[must_use]
pub fn proxy_mode(backend_name: &str) -> &str {
    backend_name.split('-').next().unwrap_or(backend_name)
}

/// What the operator has to fix on a node that programs IPv4 alone.
pub(crate) fn missing_ipv6(demand: &Demand) -> Option<String> {
    (demand.of(Family::V6).services > 0).then(|| {
        "IPv6 is off on this node, and there are IPv6 Services, which do not work here: switch it on (net.ipv6.conf.all.disable_ipv6=0, and no \
         ipv6.disable=1 on the kernel's command line), and start the agent again"
            .to_owned()
    })
}
