//! Combines both IP families of a dataplane for the reconcile loop.

use std::{
    collections::BTreeSet,
    fs, mem,
    sync::Arc,
    time::{Duration, Instant},
};

use headgate_core::{Demand, Dirty, Family, LoadBalancing, NodeFacts, ServiceKey, State, StateSource, forwarding};
use tracing::{info, warn};

use super::{
    DataplaneError,
    contract::{
        ConnectionProxy, Dataplane, Degradation, FamilyStatistics, Fault, Finding, KernelHandle as _, Report,
        RulesVerification, WakeLoop,
    },
    first_services::FirstServices,
    leftovers::{Leftover, Leftovers},
    metrics::DataplaneMetrics,
};
use crate::node_inputs::NodeInputs;

/// The maximum number of services that a degradation names.
const MAX_NAMES: usize = 3;

/// The dataplane of a node, as the reconcile loop calls it; only [`DualStack`] implements it. After
/// an error in one family, the other one is still programmed.
pub trait NodeDataplane: Send {
    /// The name, such as "iptables-legacy". The part before the first `-` is the proxy mode.
    fn name(&self) -> &str;

    /// Why the agent chose this dataplane. `None` if the configuration leaves no choice.
    fn reason(&self) -> Option<&str>;

    /// The proxy that carries connections, in mode userspace.
    fn proxy(&self) -> Option<Arc<dyn ConnectionProxy>>;

    /// The problems that the operator has to fix, as sentences that include the remedy.
    fn degraded(&self, demand: &Demand) -> Vec<String>;

    /// True when the rules depend on the addresses of the node's interfaces.
    fn needs_interfaces(&self) -> bool;

    /// See [`Dataplane::OBJECTS_AT_ONCE`].
    fn objects_at_once(&self) -> usize;

    /// Like [`Dataplane::configure`], for both families.
    fn configure(&mut self, inputs: &NodeInputs) -> bool;

    /// Starts to follow the changes of other programs; see [`super::KernelHandle::follow`]. The
    /// dataplane counts into `metrics`. Logs a warning if the kernel does not report changes.
    fn follow(&mut self, wake: WakeLoop, metrics: DataplaneMetrics);

    /// Programs the whole state, whatever the kernel holds; see [`Dataplane::sync`]. Changes that
    /// arrive during the call are planned again afterwards. Errors: the kernel has its old rules,
    /// or a part of the new rules. The caller tries again.
    fn sync_full(&mut self, source: &dyn StateSource) -> Result<Report, DataplaneError>;

    /// Reads the kernel's objects of a family for a verification; see [`Dataplane::verification`].
    /// `None` if the family is not programmed. Errors: the kernel cannot be read.
    fn verification(&mut self, family: Family) -> Result<Option<RulesVerification>, DataplaneError>;

    /// Plans the changed services for both families. Does not touch the kernel, because the caller
    /// holds the lock of the state. The caller must call [`Self::apply`] next.
    fn plan(&mut self, state: &State, node: &NodeFacts, dirty: &Dirty);

    /// Writes the plan to the kernel.
    /// Errors: the plan is lost: the caller plans these services again, or makes a full sync.
    fn apply(&mut self) -> Result<Report, DataplaneError>;

    /// Finds the services whose rules the kernel rejects in `families`; an empty list means both
    /// families. See [`Dataplane::find_faults`].
    /// Errors: the search did not finish in a family. Try the search again.
    fn find_faults(
        &mut self,
        source: &dyn StateSource,
        suspects: Option<&BTreeSet<Arc<ServiceKey>>>,
        families: &[Family],
    ) -> Result<Vec<Fault>, DataplaneError>;

    /// Quarantines these services and no others; see [`Dataplane::set_quarantined`].
    fn set_quarantined(&mut self, faults: &[Fault]);

    /// Like [`Dataplane::deferred`], for both families.
    fn deferred(&mut self) -> Option<Vec<Fault>>;

    /// The time at which to call [`Self::maintain`]. `None` while no work is pending.
    fn maintain_at(&self) -> Option<Instant>;

    /// Does the work that is due at `now`, such as the removal of drained destinations.
    /// Errors: the same errors as [`Self::apply`].
    fn maintain(&mut self, now: Instant) -> Result<(), DataplaneError>;

    /// Looks for signs that somebody else removed rules, and returns the clearest finding of both
    /// families; see [`Dataplane::check`]. Errors: the check of a family failed, and the other one
    /// found no sign. It is unknown whether the rules are complete.
    fn check(&mut self) -> Result<Finding, DataplaneError>;

    /// Reads the kernel, and returns what it forwards in each family; see [`Dataplane::decode`].
    /// Errors: the kernel cannot be read. Try again.
    fn decode(&mut self) -> Result<Vec<forwarding::Table>, DataplaneError>;

    /// Counts of the programmed rules, for each family. Does not read the kernel.
    fn statistics(&self) -> Vec<FamilyStatistics>;

    /// Removes everything of this dataplane from the kernel.
    /// Errors: something could not be removed; the message names it.
    fn cleanup(&mut self) -> Result<(), DataplaneError>;
}

/// The algorithms that a Service can ask for; `None` means any unknown algorithm.
const ASKED_FOR: [Option<LoadBalancing>; 5] = [
    Some(LoadBalancing::Random),
    Some(LoadBalancing::RoundRobin),
    Some(LoadBalancing::LeastConnections),
    Some(LoadBalancing::ConsistentHash),
    None,
];

/// Both families of a dataplane.
pub struct DualStack<D: Dataplane> {
    name: &'static str,
    kernel: D::Kernel,
    families: Vec<OneFamily<D>>,
    own: Vec<Leftover>,
    /// What earlier runs left; `None` once all of it is removed.
    leftovers: Option<Leftovers>,
    proxy: Option<Arc<dyn ConnectionProxy>>,
    is_without_ipv6: bool,
    /// Why this dataplane runs in place of the configured dataplane.
    in_place_of: Option<String>,
    /// Why the agent chose this dataplane, if the configuration leaves a choice.
    reason: Option<String>,
}

struct OneFamily<D: Dataplane> {
    dataplane: D,
    /// The plan of [`NodeDataplane::plan`], until [`NodeDataplane::apply`] writes it.
    planned: Option<D::Plan>,
    /// How long the last step took.
    took: Duration,
    /// True after the first successful full sync.
    is_synced: bool,
    deferred: Vec<Fault>,
}

impl<D: Dataplane> DualStack<D> {
    /// Returns a sentence for each algorithm that Services ask for and this dataplane lacks.
    fn missing_algorithms(&self, demand: &Demand) -> Vec<Degradation> {
        let mode = self.name.split_once('-').map_or(self.name, |(mode, _)| mode);
        let sentence = |algorithm: Option<LoadBalancing>| {
            let lacks = |family: &D| algorithm.is_none_or(|algorithm| !family.load_balancing().contains(&algorithm));
            let families = self.families.iter().map(|family| &family.dataplane);
            let families = families.filter(|family| lacks(family)).map(|family| demand.of(family.family()));
            let count =
                families.map(|demand| demand.with_load_balancing(algorithm)).max().filter(|count| *count > 0)?;
            let name = algorithm.map_or("an unknown algorithm", LoadBalancing::as_str);
            Some(format!("mode {mode} does not have the load balancing that {count} Services ask for ({name}) and uses its default for them: change the annotation headgate.io/load-balancing, or use a mode that has {name}").into())
        };
        ASKED_FOR.into_iter().filter_map(sentence).collect()
    }

    /// Returns a sentence for each annotation that Services have and that only a proxy can follow.
    fn missing_proxy(&self, demand: &Demand) -> Vec<Degradation> {
        let families = || self.families.iter().map(|family| demand.of(family.dataplane.family()));
        let mode = self.name.split_once('-').map_or(self.name, |(mode, _)| mode);
        let sentence = |count: Option<usize>, annotation: &str, consequence: &str| {
            let count = count.filter(|count| *count > 0 && !D::HAS_PROXY)?;
            Some(format!("mode {mode} has no proxy, so {count} Services with the annotation {annotation} {consequence}: use mode userspace on this node, or remove the annotation").into())
        };
        let headers = families().map(|demand| demand.with_proxy_protocol).max();
        let limits = families().map(|demand| demand.with_max_connections).max();
        let headers = sentence(headers, "headgate.io/proxy-protocol", "send connections without a header to endpoints");
        let limits = sentence(limits, "headgate.io/max-connections", "have no limit of connections");
        headers.into_iter().chain(limits).collect()
    }

    /// Creates a dataplane for each of `families` that this node supports. `own` lists the objects
    /// that the dataplane leaves in the kernel when the agent ends. Does not touch the kernel.
    pub fn assemble(
        name: &'static str,
        kernel: D::Kernel,
        own: Vec<Leftover>,
        families: Vec<Family>,
        mut make: impl FnMut(Family) -> D,
    ) -> Self {
        let (mut is_without_ipv6, mut made) = (false, Vec::new());
        for family in families {
            if family == Family::V6 && !has_ipv6() {
                info!("IPv6 is off on this node: the agent programs only IPv4");
                is_without_ipv6 = true;
                continue;
            }
            made.push(OneFamily {
                dataplane: make(family),
                planned: None,
                took: Duration::ZERO,
                is_synced: false,
                deferred: Vec::new(),
            });
        }
        Self {
            name,
            kernel,
            families: made,
            own,
            leftovers: None,
            proxy: None,
            is_without_ipv6,
            in_place_of: None,
            reason: None,
        }
    }

    /// Makes the first full sync remove the leftovers in `all`, except those that this dataplane
    /// itself leaves. What open connections need stays at most for `limit`.
    pub fn with_leftovers(self, mut all: Vec<Leftover>, limit: Duration) -> Self {
        all.retain(|leftover| self.own.iter().all(|own| own.name != leftover.name));
        Self { leftovers: Some(Leftovers::new(all, limit)), ..self }
    }

    pub(crate) fn with_proxy(self, proxy: Arc<dyn ConnectionProxy>) -> Self {
        Self { proxy: Some(proxy), ..self }
    }

    /// Makes [`NodeDataplane::degraded`] report `sentence`, which says why this dataplane runs in
    /// place of the configured dataplane.
    pub fn in_place_of(self, sentence: String) -> Self {
        Self { in_place_of: Some(sentence), ..self }
    }

    /// Sets [`NodeDataplane::reason`].
    pub fn because(self, reason: String) -> Self {
        Self { reason: Some(reason), ..self }
    }

    pub(super) fn families(&self) -> Vec<Family> {
        self.families.iter().map(|family| family.dataplane.family()).collect()
    }

    /// Calls `work` for each family, even after an earlier error, and joins the errors.
    fn each<T>(
        &mut self,
        mut work: impl FnMut(&mut OneFamily<D>, &mut D::Kernel) -> Result<T, DataplaneError>,
    ) -> Result<Vec<T>, DataplaneError> {
        let (mut all, mut result) = (Vec::new(), Ok(()));
        for family in &mut self.families {
            let done = work(family, &mut self.kernel).map_err(|error| error.of(family.dataplane.family()));
            if done.is_err() {
                self.kernel.reset();
            }
            result = DataplaneError::join(result, done.map(|value| all.push(value)));
        }
        result.map(|()| all)
    }
}

impl<D: Dataplane> NodeDataplane for DualStack<D> {
    fn objects_at_once(&self) -> usize {
        D::OBJECTS_AT_ONCE
    }

    fn name(&self) -> &str {
        self.name
    }

    fn reason(&self) -> Option<&str> {
        self.reason.as_deref()
    }

    fn proxy(&self) -> Option<Arc<dyn ConnectionProxy>> {
        self.proxy.clone()
    }

    fn degraded(&self, demand: &Demand) -> Vec<String> {
        let mut found: Vec<Degradation> = self
            .in_place_of
            .clone()
            .into_iter()
            .chain(self.leftovers.as_ref().and_then(Leftovers::draining))
            .map(Into::into)
            .collect();
        if self.is_without_ipv6 && demand.of(Family::V6).services > 0 {
            found.push(MISSING_IPV6.to_owned().into());
        }
        found.extend(self.missing_algorithms(demand));
        found.extend(self.missing_proxy(demand));
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

    fn follow(&mut self, wake: WakeLoop, metrics: DataplaneMetrics) {
        if let Err(error) = self.kernel.follow(wake, &metrics) {
            warn!(%error, "the agent cannot follow the changes of other programs, and finds such changes by full syncs alone");
        }
    }

    fn sync_full(&mut self, source: &dyn StateSource) -> Result<Report, DataplaneError> {
        let mut reports = self.each(|family, kernel| family.sync_first(kernel, source))?;
        // The families sync one after the other, so that memory holds only one full plan at a time.
        reports.extend(self.each(|family, kernel| family.sync_full(kernel, source))?);
        let mut report = Report::merged(reports);
        // Now that our rules are in place, remove the rules of other dataplanes, because these
        // rules would still redirect packets.
        report.warnings.extend(self.leftovers.as_mut().map(Leftovers::remove).unwrap_or_default());
        self.leftovers.take_if(|leftovers| leftovers.is_empty());
        Ok(report)
    }

    fn verification(&mut self, family: Family) -> Result<Option<RulesVerification>, DataplaneError> {
        let verifications = self.each(|OneFamily { dataplane, .. }, kernel| {
            let is_wanted = dataplane.family() == family;
            is_wanted.then(|| dataplane.verification(kernel)).transpose()
        })?;
        Ok(verifications.into_iter().flatten().next())
    }

    fn plan(&mut self, state: &State, node: &NodeFacts, dirty: &Dirty) {
        for family in &mut self.families {
            family.planned = Some(family.dataplane.plan(state, node, dirty));
        }
    }

    fn apply(&mut self) -> Result<Report, DataplaneError> {
        let reports = self.each(|family, kernel| match family.planned.take() {
            Some(plan) => family.timed(|dataplane| dataplane.apply(kernel, plan)),
            None => Ok(Report::default()),
        })?;
        Ok(Report::merged(reports))
    }

    fn find_faults(
        &mut self,
        source: &dyn StateSource,
        suspects: Option<&BTreeSet<Arc<ServiceKey>>>,
        families: &[Family],
    ) -> Result<Vec<Fault>, DataplaneError> {
        let faults = self.each(|OneFamily { dataplane, .. }, kernel| {
            let is_wanted = families.is_empty() || families.contains(&dataplane.family());
            if is_wanted { dataplane.find_faults(kernel, source, suspects) } else { Ok(Vec::new()) }
        })?;
        Ok(faults.concat())
    }

    fn set_quarantined(&mut self, faults: &[Fault]) {
        for OneFamily { dataplane, .. } in &mut self.families {
            let family = dataplane.family();
            let own = faults.iter().filter(|fault| fault.family == family);
            dataplane.set_quarantined(&own.map(|fault| Arc::clone(&fault.service)).collect());
        }
    }

    fn deferred(&mut self) -> Option<Vec<Fault>> {
        let mut is_new = false;
        for OneFamily { dataplane, deferred, .. } in &mut self.families {
            if let Some(faults) = dataplane.deferred() {
                *deferred = faults;
                is_new = true;
            }
        }
        is_new.then(|| self.families.iter().flat_map(|family| family.deferred.clone()).collect())
    }

    fn maintain_at(&self) -> Option<Instant> {
        let families = self.families.iter().filter_map(|family| family.dataplane.due_at());
        families.chain(self.leftovers.as_ref().and_then(Leftovers::retry_at)).min()
    }

    fn maintain(&mut self, now: Instant) -> Result<(), DataplaneError> {
        if let Some(leftovers) = &mut self.leftovers {
            leftovers.retry(now);
            self.leftovers.take_if(|leftovers| leftovers.is_empty());
        }
        self.each(|family, kernel| family.dataplane.maintain(kernel, now)).map(drop)
    }

    fn check(&mut self) -> Result<Finding, DataplaneError> {
        let mut clearest = Finding::Intact;
        let checked = self.each(|family, kernel| {
            clearest = family.dataplane.check(kernel)?.max(mem::replace(&mut clearest, Finding::Intact));
            Ok(())
        });
        // A family reports lost notifications only once, so its sign counts although the check of
        // the other family fails.
        if clearest == Finding::Intact { checked.map(|_| clearest) } else { Ok(clearest) }
    }

    fn decode(&mut self) -> Result<Vec<forwarding::Table>, DataplaneError> {
        self.each(|family, kernel| family.dataplane.decode(kernel))
    }

    fn statistics(&self) -> Vec<FamilyStatistics> {
        self.families.iter().map(OneFamily::statistics).collect()
    }

    fn cleanup(&mut self) -> Result<(), DataplaneError> {
        DataplaneError::join_all(self.own.iter().map(Leftover::remove))
    }
}

impl<D: Dataplane> OneFamily<D> {
    /// Programs the most important Services alone, if this is the first sync and the dataplane
    /// wants to start with these Services.
    fn sync_first(&mut self, kernel: &mut D::Kernel, source: &dyn StateSource) -> Result<Report, DataplaneError> {
        if self.is_synced || !self.dataplane.starts_with_first_services(kernel)? {
            return Ok(Report::default());
        }
        self.sync(kernel, &FirstServices(source))
    }

    fn sync_full(&mut self, kernel: &mut D::Kernel, source: &dyn StateSource) -> Result<Report, DataplaneError> {
        let report = self.sync(kernel, source)?;
        self.is_synced = true;
        Ok(report)
    }

    fn sync(&mut self, kernel: &mut D::Kernel, source: &dyn StateSource) -> Result<Report, DataplaneError> {
        kernel.note_sync();
        let result = self.timed(|dataplane| dataplane.sync(kernel, source));
        kernel.note_sync();
        result
    }

    fn timed(&mut self, work: impl FnOnce(&mut D) -> Result<Report, DataplaneError>) -> Result<Report, DataplaneError> {
        let started = Instant::now();
        let result = work(&mut self.dataplane);
        self.took = started.elapsed();
        result
    }

    fn statistics(&self) -> FamilyStatistics {
        FamilyStatistics { family: self.dataplane.family(), took: self.took, statistics: self.dataplane.statistics() }
    }
}

/// The degradation of a node without IPv6, if IPv6 Services exist.
const MISSING_IPV6: &str = "IPv6 is off on this node, so IPv6 Services do not work on it: switch IPv6 on \
     (net.ipv6.conf.all.disable_ipv6=0, and no ipv6.disable=1 on the kernel's command line), and start the agent again";

pub(crate) fn with_names(Degradation { sentence, services }: Degradation) -> String {
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

/// False when IPv6 is off in the kernel (`ipv6.disable=1`), or when IPv6 is off on all interfaces
/// (`disable_ipv6`) and no interface has an IPv6 address.
pub(super) fn has_ipv6() -> bool {
    let is_off =
        || fs::read_to_string("/proc/sys/net/ipv6/conf/all/disable_ipv6").is_ok_and(|value| value.trim() == "1");
    match fs::read_to_string("/proc/thread-self/net/if_inet6") {
        Ok(addresses) => !(addresses.is_empty() && is_off()),
        Err(_) => false,
    }
}
