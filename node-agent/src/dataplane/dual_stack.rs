//! Both families of a dataplane, as the reconcile loop drives them.

use std::{
    collections::BTreeSet,
    fs,
    sync::Arc,
    time::{Duration, Instant},
};

use headgate_core::{Demand, Dirty, Family, ServiceKey, State, view::NodeFacts};
use tracing::{info, warn};

use super::{
    DataplaneError, StateSource,
    contract::{Dataplane, Degradation, FamilyStatistics, Fault, KernelHandle as _, Maintain, Report},
    leftovers::{Leftover, Leftovers},
};
use crate::node_inputs::NodeInputs;

/// A comparison of everything is followed by a pause of this many times what it took.
const DEEP_CHECK_PAUSE_FACTOR: u32 = 100;

/// Services that a degradation names.
const MAX_NAMES: usize = 3;

/// What the reconcile loop drives. [`DualStack`] is its only implementation; the trait hides which
/// dataplane it holds. One family's error does not keep the other from its turn.
pub trait NodeDataplane: Send {
    /// Such as "iptables-legacy"; the part before the first `-` is the proxy mode.
    fn name(&self) -> &str;

    /// What the operator has to fix, one sentence each with the remedy.
    fn degraded(&self, demand: &Demand) -> Vec<String>;

    /// The addresses of the node's interfaces matter, and are to be read.
    fn needs_interfaces(&self) -> bool;

    /// Takes what rules depend on besides the state. When it returns true, a full sync is next.
    fn configure(&mut self, inputs: &NodeInputs) -> bool;

    /// Brings the kernel to the state, whatever is there: the first sync and every repair. It looks
    /// at the state after it has read the kernel, and releases it before it writes. What it
    /// programs is at least as new as the state at the call; the next step plans what changed in
    /// between once more.
    ///
    /// # Errors
    /// The kernel keeps what it had, or part of the new; the caller tries again.
    fn sync_full(&mut self, source: &dyn StateSource) -> Result<Report, DataplaneError>;

    /// Plans what changed, for both families. Does not touch the kernel: the caller holds the lock
    /// of the state. [`Self::apply`] is next.
    fn plan(&mut self, state: &State, node: &NodeFacts, dirty: &Dirty);

    /// Writes what was planned to the kernel.
    ///
    /// # Errors
    /// The plan is spent: the caller plans the same services again, or makes a full sync.
    fn apply(&mut self) -> Result<Report, DataplaneError>;

    /// Finds the services whose rules the kernel rejects, in these families (none means both); see
    /// [`super::FindFaults::find_faults`].
    ///
    /// # Errors
    /// The search came to no end in a family.
    fn find_faults(
        &mut self,
        source: &dyn StateSource,
        suspects: Option<&BTreeSet<Arc<ServiceKey>>>,
        families: &[Family],
    ) -> Result<Vec<Fault>, DataplaneError>;

    /// Quarantines these services and no others; see [`super::FindFaults::set_quarantined`].
    fn set_quarantined(&mut self, faults: &[Fault]);

    /// Parts of services that the kernel rejected and that are tried again, if they changed since
    /// the last call.
    fn deferred(&mut self) -> Option<Vec<Fault>>;

    /// When [`Self::maintain`] has something to do.
    fn maintain_at(&mut self) -> Option<Instant>;

    /// Does what is due, such as the removal of drained destinations.
    ///
    /// # Errors
    /// As [`Self::apply`].
    fn maintain(&mut self) -> Result<(), DataplaneError>;

    /// Whether the rules of an earlier run are in place: whether they are there, not which they
    /// are.
    ///
    /// # Errors
    /// It cannot be found out.
    fn has_rules(&mut self) -> Result<bool, DataplaneError>;

    /// Whether nobody else removed or changed what is programmed.
    ///
    /// # Errors
    /// It cannot be found out; this says nothing about the rules.
    fn verify(&mut self) -> Result<bool, DataplaneError>;

    /// What is in the kernel, in numbers, for each family that is programmed. Reads nothing.
    fn statistics(&self) -> Vec<FamilyStatistics>;

    /// Removes every trace of this dataplane from the kernel.
    ///
    /// # Errors
    /// Names what stays.
    fn cleanup(&mut self) -> Result<(), DataplaneError>;
}

/// Both families of a dataplane.
pub struct DualStack<D: Dataplane> {
    name: &'static str,
    kernel: D::Kernel,
    families: Vec<OneFamily<D>>,
    own: Vec<Leftover>,
    leftovers: Leftovers,
    is_without_ipv6: bool,
    /// Why it runs in place of another dataplane.
    in_place_of: Option<String>,
}

struct OneFamily<D: Dataplane> {
    dataplane: D,
    /// What [`NodeDataplane::plan`] left for [`NodeDataplane::apply`].
    planned: Option<D::Plan>,
    /// Time that the kernel took for the last step.
    took: Duration,
    /// When everything may be compared again; `None` before the first full sync.
    next_deep_check: Option<Instant>,
    deferred: Vec<Fault>,
}

impl<D: Dataplane> DualStack<D> {
    /// Makes each of the families that this node can have. `own` is what the dataplane leaves
    /// behind when the agent ends. Touches no kernel.
    pub(crate) fn assemble(
        name: &'static str,
        kernel: D::Kernel,
        own: Vec<Leftover>,
        families: Vec<Family>,
        mut make: impl FnMut(Family) -> D,
    ) -> Self {
        let (mut is_without_ipv6, mut made) = (false, Vec::new());
        for family in families {
            if family == Family::V6 && !has_ipv6() {
                info!("IPv6 is off on this node: IPv4 alone is programmed");
                is_without_ipv6 = true;
                continue;
            }
            made.push(OneFamily {
                dataplane: make(family),
                planned: None,
                took: Duration::ZERO,
                next_deep_check: None,
                deferred: Vec::new(),
            });
        }
        Self {
            name,
            kernel,
            families: made,
            own,
            leftovers: Leftovers::new(Vec::new()),
            is_without_ipv6,
            in_place_of: None,
        }
    }

    /// Removes what is left of other dataplanes, after the first full sync. `all` may name its own.
    #[must_use]
    pub fn with_leftovers(self, mut all: Vec<Leftover>) -> Self {
        all.retain(|leftover| self.own.iter().all(|own| own.name != leftover.name));
        Self { leftovers: Leftovers::new(all), ..self }
    }

    /// Reports for what reason it runs in place of another dataplane.
    #[must_use]
    pub fn in_place_of(self, sentence: String) -> Self {
        Self { in_place_of: Some(sentence), ..self }
    }

    /// The families that are programmed.
    pub(super) fn families(&self) -> Vec<Family> {
        self.families.iter().map(|family| family.dataplane.family()).collect()
    }

    fn each(
        &mut self,
        mut work: impl FnMut(&mut OneFamily<D>, &mut D::Kernel) -> Result<(), DataplaneError>,
    ) -> Result<(), DataplaneError> {
        let mut result = Ok(());
        for family in &mut self.families {
            let done = work(family, &mut self.kernel).map_err(|error| error.of(family.dataplane.family()));
            if done.is_err() {
                self.kernel.reset();
            }
            result = DataplaneError::join(result, done);
        }
        result
    }

    /// Whether something is true of each family. The second is not asked when it is false of the
    /// first.
    fn all(
        &mut self,
        mut is_true: impl FnMut(&mut OneFamily<D>, &mut D::Kernel) -> Result<bool, DataplaneError>,
    ) -> Result<bool, DataplaneError> {
        let mut all = true;
        self.each(|family, kernel| {
            all = all && is_true(family, kernel)?;
            Ok(())
        })?;
        Ok(all)
    }
}

impl<D: Dataplane> NodeDataplane for DualStack<D> {
    fn name(&self) -> &str {
        self.name
    }

    fn degraded(&self, demand: &Demand) -> Vec<String> {
        let mut found: Vec<Degradation> = self.in_place_of.clone().into_iter().map(Into::into).collect();
        if self.is_without_ipv6 && demand.of(Family::V6).services > 0 {
            found.push(MISSING_IPV6.to_owned().into());
        }
        for degradation in self.families.iter().flat_map(|family| family.dataplane.degraded(demand)) {
            match found.iter_mut().find(|other| other.sentence == degradation.sentence) {
                Some(other) => other.services.extend(degradation.services),
                None => found.push(degradation),
            }
        }
        found.into_iter().map(with_names).collect()
    }

    fn needs_interfaces(&self) -> bool {
        D::NEEDS_INTERFACES
    }

    fn configure(&mut self, inputs: &NodeInputs) -> bool {
        let mut is_changed = false;
        for family in &mut self.families {
            is_changed |= family.dataplane.configure(inputs);
        }
        is_changed
    }

    fn sync_full(&mut self, source: &dyn StateSource) -> Result<Report, DataplaneError> {
        let mut report = Report::default();
        // One family after the other, so that there is never more than one plan of everything.
        self.each(|family, kernel| {
            report.merge(family.sync_full(kernel, source)?);
            Ok(())
        })?;
        // Packets would follow other dataplanes' rules too; ours are in place now.
        report.warnings.extend(self.leftovers.remove());
        Ok(report)
    }

    fn plan(&mut self, state: &State, node: &NodeFacts, dirty: &Dirty) {
        for family in &mut self.families {
            family.planned = Some(family.dataplane.plan(state, node, dirty));
        }
    }

    fn apply(&mut self) -> Result<Report, DataplaneError> {
        let mut report = Report::default();
        self.each(|family, kernel| {
            let Some(plan) = family.planned.take() else { return Ok(()) };
            report.merge(family.apply(kernel, plan, None)?);
            Ok(())
        })?;
        Ok(report)
    }

    fn find_faults(
        &mut self,
        source: &dyn StateSource,
        suspects: Option<&BTreeSet<Arc<ServiceKey>>>,
        families: &[Family],
    ) -> Result<Vec<Fault>, DataplaneError> {
        let mut faults = Vec::new();
        self.each(|OneFamily { dataplane, .. }, kernel| {
            let is_asked_for = families.is_empty() || families.contains(&dataplane.family());
            if let Some(finding) = dataplane.fault_finding().filter(|_| is_asked_for) {
                faults.extend(finding.find_faults(kernel, source, suspects)?);
            }
            Ok(())
        })?;
        Ok(faults)
    }

    fn set_quarantined(&mut self, faults: &[Fault]) {
        for OneFamily { dataplane, .. } in &mut self.families {
            let family = dataplane.family();
            let own = faults.iter().filter(|fault| fault.family == family);
            if let Some(finding) = dataplane.fault_finding() {
                finding.set_quarantined(&own.map(|fault| Arc::clone(&fault.service)).collect());
            }
        }
    }

    fn deferred(&mut self) -> Option<Vec<Fault>> {
        let mut is_new = false;
        for OneFamily { dataplane, deferred, .. } in &mut self.families {
            if let Some(faults) = dataplane.maintenance().and_then(Maintain::deferred) {
                *deferred = faults;
                is_new = true;
            }
        }
        is_new.then(|| self.families.iter().flat_map(|family| family.deferred.clone()).collect())
    }

    fn maintain_at(&mut self) -> Option<Instant> {
        let due_at = |family: &mut OneFamily<D>| family.dataplane.maintenance()?.due_at();
        self.families.iter_mut().filter_map(due_at).chain(self.leftovers.retry_at()).min()
    }

    fn maintain(&mut self) -> Result<(), DataplaneError> {
        let now = Instant::now();
        self.leftovers.retry(now);
        self.each(|OneFamily { dataplane, .. }, kernel| match dataplane.maintenance() {
            Some(maintenance) => maintenance.maintain(kernel, now),
            None => Ok(()),
        })
    }

    fn has_rules(&mut self) -> Result<bool, DataplaneError> {
        self.all(|family, kernel| Ok(family.dataplane.check(kernel)?.is_none()))
    }

    fn verify(&mut self) -> Result<bool, DataplaneError> {
        self.all(OneFamily::is_intact)
    }

    fn statistics(&self) -> Vec<FamilyStatistics> {
        self.families.iter().map(OneFamily::statistics).collect()
    }

    fn cleanup(&mut self) -> Result<(), DataplaneError> {
        DataplaneError::join_all(self.own.iter().map(Leftover::remove))
    }
}

impl<D: Dataplane> OneFamily<D> {
    fn sync_full(&mut self, kernel: &mut D::Kernel, source: &dyn StateSource) -> Result<Report, DataplaneError> {
        let mut report = Report { warnings: self.dataplane.prepare(kernel)?, ..Report::default() };
        let mut found = self.dataplane.read(kernel)?;
        let mut plan = None;
        source.look(&mut |state, node| plan = Some(self.dataplane.plan_full(state, node, &mut found)));
        drop(found);
        if let Some(plan) = plan {
            report.merge(self.apply(kernel, plan, Some(source))?);
            self.next_deep_check.get_or_insert_with(Instant::now);
        }
        Ok(report)
    }

    fn apply(
        &mut self,
        kernel: &mut D::Kernel,
        plan: D::Plan,
        source: Option<&dyn StateSource>,
    ) -> Result<Report, DataplaneError> {
        let started = Instant::now();
        let result = self.dataplane.apply(kernel, plan, source);
        self.took = started.elapsed();
        result
    }

    /// What somebody flushes is noticed at once. What somebody changes is noticed when everything
    /// is compared, as often as that costs at most one percent of a core.
    fn is_intact(&mut self, kernel: &mut D::Kernel) -> Result<bool, DataplaneError> {
        if let Some(sentence) = self.dataplane.check(kernel)? {
            warn!("{sentence}");
            return Ok(false);
        }
        let started = Instant::now();
        if self.next_deep_check.is_none_or(|due| started < due) {
            return Ok(true);
        }
        let found = self.dataplane.read(kernel)?;
        let is_intact = self.dataplane.matches(&found);
        self.next_deep_check = Some(Instant::now() + started.elapsed() * DEEP_CHECK_PAUSE_FACTOR);
        Ok(is_intact)
    }

    fn statistics(&self) -> FamilyStatistics {
        FamilyStatistics { family: self.dataplane.family(), took: self.took, statistics: self.dataplane.statistics() }
    }
}

/// What the operator has to fix on a node that programs IPv4 alone.
const MISSING_IPV6: &str = "IPv6 is off on this node, and there are IPv6 Services, which do not work here: switch it on \
     (net.ipv6.conf.all.disable_ipv6=0, and no ipv6.disable=1 on the kernel's command line), and start the agent again";

fn with_names(Degradation { sentence, services }: Degradation) -> String {
    if services.is_empty() {
        return sentence;
    }
    let names: Vec<String> = services.iter().take(MAX_NAMES).map(ToString::to_string).collect();
    let more = match services.len() - names.len() {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    format!("{sentence}: {}{more}", names.join(", "))
}

/// False when the kernel was told to do without IPv6 (`ipv6.disable=1`), or when all interfaces
/// were (`disable_ipv6`) and none has an address.
pub(super) fn has_ipv6() -> bool {
    let is_off =
        || fs::read_to_string("/proc/sys/net/ipv6/conf/all/disable_ipv6").is_ok_and(|value| value.trim() == "1");
    match fs::read_to_string("/proc/thread-self/net/if_inet6") {
        Ok(addresses) => !(addresses.is_empty() && is_off()),
        Err(_) => false,
    }
}
