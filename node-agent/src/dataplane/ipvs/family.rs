//! One family's virtual servers, sets and rules.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant},
};

use headgate_core::{
    Family, ServiceKey,
    iptables::{NodePortAddresses, Table},
    ipvs::{IpvsConfig, Ledger, Object, Op, Plan, Scheduler, ServerKey, Set},
};
use tracing::info;

use super::{
    super::{
        DataplaneError, ErrorKind, FamilyStatistics, Refused, Report, StateSource,
        iptables::{command::Programs, refused::find_refused, rules::Left, sctp, sctp::Sctp},
        retry::{PAUSES, Refusals},
    },
    convert,
    kernel::{Kernel, is_without_route, of_ipvs, of_sets},
    read,
    sysctl::Sysctls,
    write,
    write::{Outcome, RefusedOp},
};
use crate::node_inputs::NodeInputs;

/// A comparison of everything is followed by a pause of this many times what it took.
const DEEP_LOOK_PAUSE_FACTOR: u32 = 100;

/// Refusals of one service, or of one step, that are told in words.
const MAX_REASONS: usize = 3;

/// One family.
#[derive(Debug)]
pub(super) struct FamilyDataplane {
    pub(super) family: Family,
    pub(super) programs: Programs,
    pub(super) ledger: Ledger,
    pub(super) sctp: Sctp,
    /// When everything may be compared again; `None` before the first full sync, when there is nothing to compare with.
    next_deep_look: Option<Instant>,
    last_took: Duration,
    /// Rules that the last step wrote: nat, filter.
    last_rules: [u32; 2],
    /// Why the ledger lacks what it does, and when that is tried again. Destinations of a server that is lacking come with it.
    refusals: Refusals<Object>,
    /// Schedulers that the kernel turned out not to have. Who asks for them gets another.
    newly_missing: BTreeSet<Scheduler>,
}

impl FamilyDataplane {
    pub(super) fn new(programs: Programs, ledger: Ledger) -> Self {
        Self {
            family: programs.family(),
            programs,
            ledger,
            sctp: Sctp::default(),
            next_deep_look: None,
            last_took: Duration::ZERO,
            last_rules: [0; 2],
            refusals: Refusals::new(PAUSES),
            newly_missing: BTreeSet::new(),
        }
    }

    /// Takes the addresses of the node's other devices, those that answer NodePorts, and how local pods are told. True when something changes by it.
    pub(super) fn reconfigure(&mut self, inputs: &NodeInputs) -> bool {
        let mut config = self.ledger.config().clone();
        let of_family = |address: &&IpAddr| Family::of(**address) == self.family;
        config.other_addresses = inputs.interfaces.iter().filter(of_family).copied().collect();
        let is_elsewhere = |address: &&IpAddr| !address.is_loopback() && of_family(address);
        config.node_port_addresses = match inputs.node_ports(self.family) {
            NodePortAddresses::All => inputs.interfaces.iter().filter(is_elsewhere).copied().collect(),
            NodePortAddresses::Only(addresses) => addresses.iter().filter(is_elsewhere).copied().collect(),
        };
        config.masquerade.detector_v4.clone_from(&inputs.detector_v4);
        config.masquerade.detector_v6.clone_from(&inputs.detector_v6);
        let is_new = config != *self.ledger.config();
        if is_new {
            self.ledger.set_config(config);
        }
        is_new
    }

    /// Reads what there is, and writes what differs.
    pub(super) fn sync_full(
        &mut self,
        kernel: &mut Kernel,
        source: &dyn StateSource,
        now_ms: u64,
        report: &mut Report,
    ) -> Result<(), DataplaneError> {
        let device = kernel.device()?;
        if self.family == Family::V6 {
            report.warnings.extend(Sysctls::default().allow_ipv6_on_device().err());
        }
        let tables = self.programs.existing_tables()?;
        let existing = read::existing(kernel, device, self.family, tables)?;
        let mut plan = None;
        source.look(&mut |state, node| plan = Some(self.ledger.full(state, node, &existing, now_ms)));
        drop(existing);
        let Some(plan) = plan else { return Ok(()) };
        self.run(kernel, device, &plan, report)?;
        self.next_deep_look.get_or_insert_with(Instant::now);
        Ok(())
    }

    /// Carries out a plan.
    pub(super) fn run(
        &mut self,
        kernel: &mut Kernel,
        device: u32,
        plan: &Plan,
        report: &mut Report,
    ) -> Result<(), DataplaneError> {
        let started = Instant::now();
        let written = |table| u32::try_from(plan.script.rules_written(table)).unwrap_or(u32::MAX);
        self.last_rules = [written(Table::Nat), written(Table::Filter)];
        let result = self.write(kernel, device, plan, report);
        self.last_took = started.elapsed();
        result
    }

    fn write(
        &mut self,
        kernel: &mut Kernel,
        device: u32,
        plan: &Plan,
        report: &mut Report,
    ) -> Result<(), DataplaneError> {
        // Both families compute the same services: they count once.
        report.services_planned = report.services_planned.max(plan.services_planned);
        let mut outcome = Outcome::default();
        write::run(kernel, device, self.family, &plan.before, &mut outcome)?;
        if !plan.script.is_empty() {
            // Each is named once, not at every repair.
            let left = self.programs.restore_leaving(&plan.script).map_err(|error| self.without_sctp(error))?;
            for Left { table, name, sentence } in left {
                report.warnings.extend(self.ledger.note_undeletable(table, &name).then_some(sentence));
            }
        }
        self.ledger.confirm();
        write::run(kernel, device, self.family, &plan.after, &mut outcome)?;
        let chains = plan.script.chains_written() + plan.script.chains_deleted();
        report.objects_written += chains + u32::try_from(plan.ops().count()).unwrap_or(u32::MAX);
        self.settle(plan.ops(), &outcome)
    }

    /// A script has failed: where that is because SCTP cannot be matched, its ports are left out of the rules from now on.
    fn without_sctp(&mut self, error: DataplaneError) -> DataplaneError {
        let error = self.sctp.judge(&self.programs, error);
        self.leave_out_sctp(self.sctp.is_missing());
        error
    }

    fn leave_out_sctp(&mut self, is_left_out: bool) {
        if self.ledger.config().leaves_out_sctp != is_left_out {
            self.ledger.set_config(IpvsConfig { leaves_out_sctp: is_left_out, ..self.ledger.config().clone() });
        }
    }

    /// Looks whether SCTP can be matched by now, if it could not and it is time.
    pub(super) fn look_for_sctp(&mut self, now: Instant) -> Result<(), DataplaneError> {
        if self.sctp.look(&self.programs, now)? {
            self.leave_out_sctp(false);
            return Err(sctp::can_be_matched_again());
        }
        Ok(())
    }

    /// Takes note of what became of steps: where the kernel refuses what a service wants, that is lacking until it is tried again, and the rest of the service
    /// is programmed. What somebody else has removed is no such case: nobody knows what went with it.
    fn settle<'a>(&mut self, ops: impl Iterator<Item = &'a Op>, outcome: &Outcome) -> Result<(), DataplaneError> {
        let gone = self.gone(outcome);
        let refused = &outcome.refused;
        let before = self.ledger.deferred_revision();
        let steps: Vec<Op> = refused.iter().map(|refused| refused.op).collect();
        let unowned = self.ledger.record(ops, &steps);
        let now = Instant::now();
        for RefusedOp { op, reason, missing_scheduler } in refused {
            let Some(object) = op.object().filter(|object| self.ledger.is_deferred(object)) else { continue };
            let config = self.ledger.config();
            // In place of the cluster's there is no other.
            let is_replaced = |scheduler: &Scheduler| {
                *scheduler != config.scheduler && config.available_schedulers.contains(scheduler)
            };
            if let Some(scheduler) = missing_scheduler.filter(is_replaced) {
                self.newly_missing.insert(scheduler);
            }
            let comes_with_server =
                matches!(object, Object::Destination(server, _) if self.ledger.is_deferred(&Object::Server(server)));
            if !comes_with_server {
                self.refusals.note(object, reason.clone(), now);
            }
        }
        if self.ledger.deferred_revision() != before {
            self.refusals.retain(|object| self.ledger.is_deferred(object));
        }
        if !unowned.is_empty() {
            let reasons = refused.iter().filter(|refused| unowned.contains(&refused.op));
            let reasons = in_words(reasons.map(|refused| refused.reason.as_str()));
            let message = format!("the kernel refuses {} steps: {reasons}", unowned.len());
            return Err(DataplaneError::new(ErrorKind::NeedsFullSync, message));
        }
        if let Some(server) = gone {
            let message = format!("somebody else has removed the virtual server {server}, at least");
            return Err(DataplaneError::new(ErrorKind::NeedsFullSync, message));
        }
        if self.newly_missing.is_empty() {
            return Ok(());
        }
        let names: Vec<&str> = self.newly_missing.iter().map(|scheduler| scheduler.as_str()).collect();
        let message =
            format!("the kernel has no scheduler {}: services that ask for it are planned anew", names.join(", "));
        Err(DataplaneError::new(ErrorKind::PlanAgain, message))
    }

    /// A virtual server that steps did not find, though the kernel has never refused it.
    fn gone(&self, Outcome { refused, absent }: &Outcome) -> Option<ServerKey> {
        let not_made: BTreeSet<ServerKey> = refused
            .iter()
            .filter_map(|refused| match refused.op {
                Op::AddServer(server, _) => Some(server),
                _ => None,
            })
            .collect();
        absent
            .iter()
            .find(|server| !not_made.contains(server) && !self.ledger.is_deferred(&Object::Server(**server)))
            .copied()
    }

    /// Schedulers that the kernel turned out not to have since the last call.
    pub(super) fn take_newly_missing(&mut self) -> BTreeSet<Scheduler> {
        std::mem::take(&mut self.newly_missing)
    }

    /// Tries once more what the kernel has refused and is due. Cost: what is tried.
    pub(super) fn retry(&mut self, kernel: &mut Kernel, now: Instant) -> Result<(), DataplaneError> {
        let due = self.refusals.due(now);
        if due.is_empty() {
            return Ok(());
        }
        let ops = self.ledger.retries(due.iter().copied());
        // What nobody wants at the moment is tried when somebody does.
        let tried: BTreeSet<Object> = ops.iter().filter_map(Op::object).collect();
        self.refusals.retain(|object| tried.contains(object) || !due.contains(object));
        self.run_steps(kernel, &ops)?;
        let taken = due.iter().filter(|object| !self.ledger.is_deferred(object)).count();
        if taken > 0 {
            info!(family = %self.family, taken, "the kernel takes what it had refused");
        }
        Ok(())
    }

    /// When [`Self::retry`] or [`Self::look_for_sctp`] has something to do.
    pub(super) fn retry_at(&self) -> Option<Instant> {
        [self.refusals.next_due(), self.sctp.look_at()].into_iter().flatten().min()
    }

    /// What the kernel refuses of services, each with its reasons.
    pub(super) fn refused_parts(&self) -> Vec<Refused> {
        let mut reasons: BTreeMap<&Arc<ServiceKey>, Vec<&str>> = BTreeMap::new();
        for (object, service) in self.ledger.deferred() {
            reasons.entry(service).or_default().extend(self.refusals.reason(&object));
        }
        let refused = |(service, reasons): (&Arc<ServiceKey>, Vec<&str>)| Refused {
            service: Arc::clone(service),
            family: self.family,
            reason: in_words(reasons.into_iter()),
        };
        reasons.into_iter().map(refused).collect()
    }

    /// As [`NodeDataplane::find_refused`](super::super::NodeDataplane::find_refused), of the rules beside the virtual servers: these are refused as a whole.
    pub(super) fn find_refused(
        &mut self,
        source: &dyn StateSource,
        suspects: Option<&BTreeSet<Arc<ServiceKey>>>,
    ) -> Result<Vec<Refused>, DataplaneError> {
        find_refused(&self.programs, self.ledger.rules(), source, suspects)
    }

    /// As [`NodeDataplane::set_aside`](super::super::NodeDataplane::set_aside), of the rules.
    pub(super) fn set_aside(&mut self, services: &BTreeSet<Arc<ServiceKey>>) {
        self.ledger.set_quarantined(services);
    }

    /// What somebody flushes shows at once, be it rules, sets or virtual servers, and so does a device that is gone or has been up; what somebody changes shows when
    /// everything is compared.
    pub(super) fn is_intact(&mut self, kernel: &mut Kernel) -> Result<bool, DataplaneError> {
        Ok(self.programs.is_intact(self.ledger.rules().jumps())?
            && self.has_device_and_sets(kernel)?
            && self.has_all_elements_and_servers(kernel)?
            && self.is_intact_in_depth(kernel)?)
    }

    /// Rules that lead to our chains, the device, down, and the sets are there.
    pub(super) fn has_rules(&self, kernel: &mut Kernel) -> Result<bool, DataplaneError> {
        Ok(self.programs.missing(self.ledger.rules().jumps())?.is_none() && self.has_device_and_sets(kernel)?)
    }

    fn has_device_and_sets(&self, kernel: &mut Kernel) -> Result<bool, DataplaneError> {
        if kernel.link()?.is_none_or(|link| link.is_up()) {
            return Ok(false);
        }
        let found = kernel.sets()?.header(&Set::ClusterIp.name(self.family)).map_err(of_sets)?;
        Ok(found.is_some())
    }

    /// Every set has as many entries as it should, the node takes the services' addresses for its own, and there are virtual servers, if there should be:
    /// one address and one server stand for all. The cost does not grow
    /// with the cluster's size. True before the first full sync.
    fn has_all_elements_and_servers(&self, kernel: &mut Kernel) -> Result<bool, DataplaneError> {
        if self.next_deep_look.is_none() {
            return Ok(true);
        }
        for set in Set::ALL {
            let header = kernel.sets()?.header(&set.name(self.family)).map_err(of_sets)?;
            let Some(header) = header else { return Ok(false) };
            let elements = header.elements.and_then(|elements| usize::try_from(elements).ok());
            if elements.is_some_and(|elements| !self.ledger.set_size(set).contains(&elements)) {
                return Ok(false);
            }
        }
        if self.ledger.any_address().is_some_and(is_without_route) {
            return Ok(false);
        }
        let Some(server) = self.ledger.any_server() else { return Ok(true) };
        let found = kernel.ipvs()?.service(convert::service_id(server)).map_err(of_ipvs)?;
        Ok(found.is_some())
    }

    fn is_intact_in_depth(&mut self, kernel: &mut Kernel) -> Result<bool, DataplaneError> {
        let started = Instant::now();
        if self.next_deep_look.is_none_or(|due| started < due) {
            return Ok(true);
        }
        let device = kernel.device_in_use()?;
        let tables = self.programs.existing_tables()?;
        let is_intact = self.ledger.is_in(&read::existing(kernel, device, self.family, tables)?);
        self.next_deep_look = Some(Instant::now() + started.elapsed() * DEEP_LOOK_PAUSE_FACTOR);
        Ok(is_intact)
    }

    /// Asks how many connections draining destinations still have, and removes those without any.
    pub(super) fn drain(&mut self, kernel: &mut Kernel, now_ms: u64) -> Result<(), DataplaneError> {
        let draining: Vec<_> = self.ledger.draining().collect();
        let mut ops: Vec<Op> = Vec::new();
        for key in draining {
            let found = kernel.ipvs()?.destinations(convert::service_id(key)).map_err(of_ipvs)?;
            let count = |entry: &ipvs_netlink::DestinationEntry| {
                u64::from(entry.active_connections) + u64::from(entry.inactive_connections)
            };
            let connections: BTreeMap<SocketAddr, u64> =
                found.iter().map(|entry| (entry.destination.address, count(entry))).collect();
            let Plan { before, after, .. } = self.ledger.drained(key, &connections, now_ms);
            ops.extend(before.into_iter().chain(after));
        }
        if ops.is_empty() {
            return Ok(());
        }
        self.run_steps(kernel, &ops)
    }

    fn run_steps(&mut self, kernel: &mut Kernel, ops: &[Op]) -> Result<(), DataplaneError> {
        let device = kernel.device_in_use()?;
        let mut outcome = Outcome::default();
        write::run(kernel, device, self.family, ops, &mut outcome)?;
        self.settle(ops.iter(), &outcome)
    }

    pub(super) fn statistics(&self) -> FamilyStatistics {
        FamilyStatistics::of_rules(self.family, self.last_took, &self.ledger.tally(), self.last_rules)
    }
}

/// The first of some sentences, and how many more there are.
fn in_words<'a>(mut sentences: impl Iterator<Item = &'a str>) -> String {
    let first: Vec<&str> = sentences.by_ref().take(MAX_REASONS).collect();
    match sentences.count() {
        0 => first.join("; "),
        more => format!("{}; and {more} more", first.join("; ")),
    }
}
