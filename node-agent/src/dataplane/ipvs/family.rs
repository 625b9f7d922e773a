//! Virtual servers, sets and rules of one IP family.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::IpAddr,
    sync::Arc,
    time::Instant,
};

use headgate_core::{
    Demand, Dirty, Family, LoadBalancing, NodeFacts, ServiceKey, State, StateSource, forwarding,
    iptables::RulesTable,
    ipvs::{
        DEVICE, ExistingObjects, IpvsConfig, IpvsLedger, IpvsPlan, Object, Op, Scheduler, SchedulerProblem, ServerKey,
        Set,
    },
};

use super::{
    IpvsOptions, convert,
    kernel::{IpvsKernel, of_ipvs},
    probe, read,
    sysctl::IpvsSysctls,
    write::{self, RejectedOp, StepsOutcome},
};
use crate::dataplane::{
    Dataplane, DataplaneError, Degradation, ErrorKind, Fault, Finding, Report, RulesDifferences, RulesVerification,
    Statistics,
    contract::{PAUSES, PAUSES_OF_MODULES, Retries},
    ip_sets::of_sets,
    xtables::{self, FamilyRules, bisect},
};
use crate::node_inputs::NodeInputs;

/// The maximum number of reasons in a message.
const MAX_REASONS: usize = 3;

/// One IP family of the dataplane.
#[derive(Debug)]
pub struct IpvsFamily {
    pub(super) rules: FamilyRules,
    pub(super) ledger: IpvsLedger,
    config: Arc<IpvsOptions>,
    began: Instant,
    /// True after the first successful full sync.
    is_synced: bool,
    /// One sentence for each kernel parameter that could not be set.
    unset_parameters: Vec<String>,
    /// The deferred objects, without destinations of a deferred server, which come with it.
    pub(super) rejected: Retries<Object>,
    /// Schedulers that services ask for and the kernel does not have.
    pub(super) missing_schedulers: Retries<Scheduler>,
    /// The revision of the ledger's deferred objects that [`Dataplane::deferred`] last reported.
    pub(super) reported_revision: u64,
    /// When to check the draining destinations next.
    pub(super) drain_at: Option<Instant>,
}

impl IpvsFamily {
    pub(super) fn new(rules: FamilyRules, ledger: IpvsLedger, config: Arc<IpvsOptions>) -> Self {
        Self {
            rules,
            ledger,
            config,
            began: Instant::now(),
            is_synced: false,
            unset_parameters: Vec::new(),
            rejected: Retries::new(PAUSES),
            missing_schedulers: Retries::new(PAUSES_OF_MODULES),
            reported_revision: 0,
            drain_at: None,
        }
    }

    pub(super) fn now_ms(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}

impl Dataplane for IpvsFamily {
    type Kernel = IpvsKernel;
    type Plan = IpvsPlan;

    const NEEDS_INTERFACES: bool = true;

    fn family(&self) -> Family {
        self.ledger.config().family
    }

    fn load_balancing(&self) -> &'static [LoadBalancing] {
        &[LoadBalancing::RoundRobin, LoadBalancing::LeastConnections, LoadBalancing::ConsistentHash]
    }

    fn configure(&mut self, inputs: &NodeInputs) -> bool {
        let mut config = self.ledger.config().clone();
        let of_family = |address: &&IpAddr| Family::of(**address) == config.family;
        let other_addresses = inputs.interfaces.iter().filter(of_family).copied().collect();
        config.node_port_addresses = inputs.listed_node_ports(config.family);
        config.other_addresses = other_addresses;
        config.masquerade.detector_v4.clone_from(&inputs.detector_v4);
        config.masquerade.detector_v6.clone_from(&inputs.detector_v6);
        self.ledger.set_config(config)
    }

    fn sync(&mut self, kernel: &mut IpvsKernel, source: &dyn StateSource) -> Result<Report, DataplaneError> {
        self.unset_parameters = kernel.prepare(&self.config.settings)?;
        kernel.device()?;
        let failed =
            if self.family() == Family::V6 { IpvsSysctls::default().allow_ipv6_on_device().err() } else { None };
        let found = self.read(kernel)?;
        let now_ms = self.now_ms();
        let plan = self.ledger.full(source, &found, now_ms);
        drop(found);
        let mut report = self.apply(kernel, plan)?;
        self.is_synced = true;
        report.warnings.extend(failed);
        Ok(report)
    }

    fn verification(&mut self, kernel: &mut IpvsKernel) -> Result<RulesVerification, DataplaneError> {
        let (found, now_ms) = (self.read(kernel)?, self.now_ms());
        let deferred: BTreeSet<Object> = self.ledger.deferred().map(|(object, _)| object).collect();
        let (mut ledger, recorded) = (self.ledger.fresh(), self.ledger.rules().prefix_length());
        let division = found.tables.get(RulesTable::Nat).prefix_length;
        Ok(Box::new(move |source| {
            let plan = ledger.full(source, &found, now_ms);
            let is_new = |op: &&Op| op.object().is_none_or(|object| !deferred.contains(&object));
            let ops: Vec<Op> = plan.ops().filter(is_new).copied().collect();
            let rules = xtables::differences(&plan.script, recorded, division, ledger.rules().prefix_length());
            let owners = if ops.is_empty() { HashMap::new() } else { ledger.owners(&ops) };
            RulesDifferences {
                count: u32::try_from(ops.len()).unwrap_or(u32::MAX).saturating_add(rules.count),
                services: rules.services.into_iter().chain(owners.into_values()).collect(),
                is_redivided: rules.is_redivided,
            }
        }))
    }

    fn plan(&mut self, state: &State, node: &NodeFacts, dirty: &Dirty) -> IpvsPlan {
        let now_ms = self.now_ms();
        self.ledger.changed(state, node, dirty, now_ms)
    }

    fn apply(&mut self, kernel: &mut IpvsKernel, plan: IpvsPlan) -> Result<Report, DataplaneError> {
        self.rules.count(&plan.script);
        let result = self.write(kernel, &plan);
        self.plan_drain();
        result
    }

    /// Detects flushed rules, sets or virtual servers, and a device that somebody removed or
    /// brought up. Checks only one address and one virtual server.
    fn check(&mut self, kernel: &mut IpvsKernel) -> Result<Finding, DataplaneError> {
        let sign = self.rules.check(self.ledger.rules().jumps())?;
        let sign = sign.map_or_else(|| self.check_device_and_sets(kernel), |sign| Ok(Some(sign)))?;
        // Before the first full sync, the ledger does not contain the objects of the kernel.
        Ok(Finding::of(if sign.is_some() || !self.is_synced { sign } else { self.check_contents(kernel)? }))
    }

    fn decode(&mut self, kernel: &mut IpvsKernel) -> Result<forwarding::Table, DataplaneError> {
        let rules = self.rules.programs.for_decoder()?;
        let config = self.ledger.config();
        let (family, ports) = (config.family, &config.node_port_addresses);
        let dump = read::for_decoder(kernel, family, &config.other_addresses, ports, rules)?;
        let table = headgate_oracle::ipvs::decode(&dump, family, config.masquerade.detector(family));
        Ok(forwarding::Table { leaves_out_sctp: config.leaves_out_sctp, ..table })
    }

    fn statistics(&self) -> Statistics {
        self.rules.statistics(&self.ledger.tally(), false)
    }

    fn degraded(&self, demand: &Demand) -> Vec<Degradation> {
        let missing = self.missing_schedulers.all().filter_map(|scheduler| self.missing_scheduler(scheduler));
        let until_then = "pods and the node itself reach ports of SCTP at addresses with externalTrafficPolicy Local only where this node has an endpoint";
        let without_sctp = self.rules.missing_sctp(demand, until_then);
        self.unset_parameters.iter().cloned().map(Into::into).chain(missing).chain(without_sctp).collect()
    }

    fn due_at(&self) -> Option<Instant> {
        let Self { rejected, missing_schedulers, rules, drain_at, .. } = self;
        [rejected.next_due(), missing_schedulers.next_due(), rules.sctp.retry_at(), *drain_at]
            .into_iter()
            .flatten()
            .min()
    }

    fn maintain(&mut self, kernel: &mut IpvsKernel, now: Instant) -> Result<(), DataplaneError> {
        match self.retry_schedulers(kernel, now) {
            Err(error) if error.kind != ErrorKind::PlanAgain => Err(error),
            found => DataplaneError::join(found, self.retry_all(kernel, now)),
        }
    }

    fn deferred(&mut self) -> Option<Vec<Fault>> {
        let revision = self.ledger.deferred_revision();
        (revision != self.reported_revision).then(|| {
            self.reported_revision = revision;
            self.deferred_parts()
        })
    }

    /// Searches only the iptables rules: the kernel rejects servers and set elements one by one.
    fn find_faults(
        &mut self,
        _: &mut IpvsKernel,
        source: &dyn StateSource,
        suspects: Option<&BTreeSet<Arc<ServiceKey>>>,
    ) -> Result<Vec<Fault>, DataplaneError> {
        bisect::find_faults(&self.rules.programs, self.ledger.rules(), source, suspects)
    }

    fn set_quarantined(&mut self, services: &BTreeSet<Arc<ServiceKey>>) {
        self.ledger.set_quarantined(services);
    }
}

impl IpvsFamily {
    fn read(&self, kernel: &mut IpvsKernel) -> Result<ExistingObjects, DataplaneError> {
        let device = kernel.device_in_use()?;
        let tables = self.rules.programs.existing_tables()?;
        read::existing(kernel, device, self.family(), tables)
    }

    /// Leaves SCTP ports out of the rules while iptables cannot match SCTP on this machine.
    pub(super) fn leave_out_sctp(&mut self) {
        let leaves_out_sctp = self.rules.sctp.is_missing();
        self.ledger.set_config(IpvsConfig { leaves_out_sctp, ..self.ledger.config().clone() });
    }

    fn write(&mut self, kernel: &mut IpvsKernel, plan: &IpvsPlan) -> Result<Report, DataplaneError> {
        let (device, family) = (kernel.device_in_use()?, self.family());
        let IpvsPlan { services_planned, is_partial, has_rest, .. } = *plan;
        let mut report = Report { services_planned, is_partial, has_rest, ..Report::default() };
        let mut outcome = StepsOutcome::default();
        write::run(kernel, device, family, &plan.before, &mut outcome)?;
        if !plan.script.is_empty() {
            let kept = self.rules.programs.restore_leaving(&plan.script).map_err(|error| {
                let error = self.rules.explain(error);
                self.leave_out_sctp();
                error
            })?;
            xtables::note_written(&mut report, &plan.script, kept, |table, name| {
                self.ledger.note_undeletable(table, name)
            });
        }
        self.ledger.confirm();
        write::run(kernel, device, family, &plan.after, &mut outcome)?;
        report.objects_written += u32::try_from(plan.ops().count()).unwrap_or(u32::MAX);
        self.record(plan.ops(), &outcome).map(|()| report)
    }

    pub(super) fn run_steps(&mut self, kernel: &mut IpvsKernel, ops: &[Op]) -> Result<(), DataplaneError> {
        let device = kernel.device_in_use()?;
        let mut outcome = StepsOutcome::default();
        write::run(kernel, device, self.family(), ops, &mut outcome)?;
        self.record(ops.iter(), &outcome)
    }

    /// Records the outcome of steps. What the kernel rejects is deferred. Errors: a full sync is
    /// needed if somebody else removed a virtual server; services must be planned again if the
    /// kernel lacks their scheduler.
    fn record<'a>(&mut self, ops: impl Iterator<Item = &'a Op>, outcome: &StepsOutcome) -> Result<(), DataplaneError> {
        let removed = self.removed_server(outcome);
        let rejected = &outcome.rejected;
        let before = self.ledger.deferred_revision();
        let steps: Vec<Op> = rejected.iter().map(|rejected| rejected.op).collect();
        let unowned = self.ledger.record(ops, &steps);
        let now = Instant::now();
        let mut missing = BTreeSet::new();
        for RejectedOp { op, reason, missing_scheduler } in rejected {
            let Some(object) = op.object().filter(|object| self.ledger.is_deferred(object)) else { continue };
            let config = self.ledger.config();
            // If a service asks for a missing scheduler, its virtual servers use the configured
            // scheduler. The configured scheduler has no fallback.
            let is_replaced = |scheduler: &Scheduler| {
                *scheduler != config.scheduler && config.available_schedulers.contains(scheduler)
            };
            missing.extend(missing_scheduler.filter(is_replaced));
            let is_of_deferred_server =
                matches!(object, Object::Destination(server, _) if self.ledger.is_deferred(&Object::Server(server)));
            if !is_of_deferred_server {
                self.rejected.note(object, reason.clone(), now);
            }
        }
        let names: Vec<&str> = missing.iter().map(|scheduler| scheduler.as_str()).collect();
        let mut services = BTreeSet::new();
        for scheduler in &missing {
            self.missing_schedulers.note(*scheduler, String::new(), now);
            services.extend(self.ledger.set_available(*scheduler, false));
        }
        if self.ledger.deferred_revision() != before {
            self.rejected.retain(|object| self.ledger.is_deferred(object));
        }
        if !unowned.is_empty() {
            let reasons = rejected.iter().filter(|rejected| unowned.contains(&rejected.op));
            let reasons = in_words(reasons.map(|rejected| rejected.reason.as_str()));
            let message = format!("the kernel rejects {} steps: {reasons}", unowned.len());
            return Err(DataplaneError::new(ErrorKind::NeedsFullSync, message));
        }
        if let Some(server) = removed {
            let message = format!("somebody else has removed the virtual server {server}, and maybe other objects");
            return Err(DataplaneError::new(ErrorKind::NeedsFullSync, message));
        }
        if names.is_empty() {
            return Ok(());
        }
        let message =
            format!("the kernel has no scheduler {}: planning again the services that ask for it", names.join(", "));
        Err(DataplaneError::plan_again(message, services))
    }

    /// Returns a virtual server that somebody else removed: a step did not find the server, and the
    /// kernel has not rejected the server.
    fn removed_server(&self, StepsOutcome { rejected, absent }: &StepsOutcome) -> Option<ServerKey> {
        let not_created: BTreeSet<ServerKey> = rejected
            .iter()
            .filter_map(|rejected| match rejected.op {
                Op::AddServer(server, _) => Some(server),
                _ => None,
            })
            .collect();
        let is_removed =
            |server: &&ServerKey| !not_created.contains(server) && !self.ledger.is_deferred(&Object::Server(**server));
        absent.iter().find(is_removed).copied()
    }

    /// Services with deferred objects, each with the kernel's reasons.
    pub(super) fn deferred_parts(&self) -> Vec<Fault> {
        let mut reasons: BTreeMap<&Arc<ServiceKey>, Vec<&str>> = BTreeMap::new();
        for (object, service) in self.ledger.deferred() {
            reasons.entry(service).or_default().extend(self.rejected.reason(&object));
        }
        let fault = |(service, reasons): (&Arc<ServiceKey>, Vec<&str>)| Fault {
            service: Arc::clone(service),
            family: self.family(),
            reason: in_words(reasons.into_iter()),
        };
        reasons.into_iter().map(fault).collect()
    }

    /// The degradation to report if services ask for this missing scheduler.
    fn missing_scheduler(&self, scheduler: Scheduler) -> Option<Degradation> {
        let problem = SchedulerProblem::MissingScheduler(scheduler);
        let asking = self.ledger.problems().filter(|(_, found)| **found == problem);
        let services: BTreeSet<_> = asking.map(|(service, _)| Arc::clone(service)).collect();
        let sentence = format!(
            "{}; until then services that ask for it get {}",
            probe::no_scheduler(scheduler),
            self.config.settings.scheduler,
        );
        (!services.is_empty()).then_some(Degradation { sentence, services })
    }

    fn check_device_and_sets(&self, kernel: &mut IpvsKernel) -> Result<Option<String>, DataplaneError> {
        match kernel.link()? {
            None => return Ok(Some(format!("somebody else has removed device {DEVICE}"))),
            Some(link) if link.is_up() => return Ok(Some(format!("somebody else has brought device {DEVICE} up"))),
            Some(_) => {}
        }
        let name = Set::ClusterIp.name(self.family());
        let found = kernel.sets()?.header(&name).map_err(of_sets)?;
        Ok(found.is_none().then(|| format!("somebody else has removed set {name}")))
    }

    /// Checks the number of elements in every set. Checks that the node treats one service address
    /// as its own, and that one virtual server exists.
    fn check_contents(&self, kernel: &mut IpvsKernel) -> Result<Option<String>, DataplaneError> {
        for set in Set::ALL {
            let name = set.name(self.family());
            let header = kernel.sets()?.header(&name).map_err(of_sets)?;
            let Some(header) = header else { return Ok(Some(format!("somebody else has removed set {name}"))) };
            let elements = header.elements.and_then(|elements| usize::try_from(elements).ok());
            if elements.is_some_and(|elements| !self.ledger.set_size(set).contains(&elements)) {
                return Ok(Some(format!("somebody else has changed set {name}")));
            }
        }
        if let Some(address) = self.ledger.any_address()
            && !kernel.is_own(address)?
        {
            return Ok(Some(format!("the node does not treat address {address} of device {DEVICE} as its own")));
        }
        let Some(server) = self.ledger.any_server() else { return Ok(None) };
        let found = kernel.ipvs()?.service(convert::service_id(server)).map_err(of_ipvs)?;
        Ok(found.is_none().then(|| format!("somebody else has removed the virtual server {server}")))
    }
}

/// Joins the first sentences, and appends the number of the remaining sentences.
fn in_words<'a>(mut sentences: impl Iterator<Item = &'a str>) -> String {
    let first: Vec<&str> = sentences.by_ref().take(MAX_REASONS).collect();
    match sentences.count() {
        0 => first.join("; "),
        more => format!("{}; and {more} more", first.join("; ")),
    }
}
