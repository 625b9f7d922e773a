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
    ipvs::{Ledger, Op, Plan, ServerKey},
};

use super::{
    super::{
        BackendError, ErrorKind, FamilyStatistics, Refused, Report, StateSource,
        iptables::{command::Programs, refused::find_refused, rules::Left},
    },
    convert,
    kernel::{Kernel, of_ipvs, of_sets},
    read, write,
    write::RefusedOp,
};
use crate::node_inputs::NodeInputs;

/// A comparison of everything is followed by a pause of this many times what it took.
const DEEP_LOOK_PAUSE_FACTOR: u32 = 100;

/// One family.
#[derive(Debug)]
pub(super) struct FamilyBackend {
    pub(super) family: Family,
    pub(super) programs: Programs,
    pub(super) ledger: Ledger,
    /// When everything may be compared again; `None` before the first full sync, when there is nothing to compare with.
    next_deep_look: Option<Instant>,
    last_took: Duration,
    /// Rules that the last step wrote: nat, filter.
    last_rules: [u32; 2],
    /// Steps that the kernel refuses, by the service that asks for them: in the last attempt, and those that are left out of plans since.
    refused: BTreeMap<Arc<ServiceKey>, Vec<RefusedOp>>,
    /// Some of them are from an attempt that has not been looked into.
    has_newly_refused: bool,
}

impl FamilyBackend {
    pub(super) fn new(programs: Programs, ledger: Ledger) -> Self {
        Self {
            family: programs.family(),
            programs,
            ledger,
            next_deep_look: None,
            last_took: Duration::ZERO,
            last_rules: [0; 2],
            refused: BTreeMap::new(),
            has_newly_refused: false,
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
    ) -> Result<(), BackendError> {
        let device = kernel.device()?;
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
    ) -> Result<(), BackendError> {
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
    ) -> Result<(), BackendError> {
        // Both families compute the same services: they count once.
        report.services_planned = report.services_planned.max(plan.services_planned);
        let mut refused = write::run(kernel, device, self.family, &plan.before)?;
        if !plan.script.is_empty() {
            // Each is named once, not at every repair.
            for Left { table, name, sentence } in self.programs.restore_leaving(&plan.script)? {
                report.warnings.extend(self.ledger.leave(table, &name).then_some(sentence));
            }
        }
        self.ledger.confirm();
        refused.extend(write::run(kernel, device, self.family, &plan.after)?);
        let chains = plan.script.chains_written() + plan.script.chains_deleted();
        report.objects_written += chains + u32::try_from(plan.ops().count()).unwrap_or(u32::MAX);
        self.judge(refused, report)
    }

    /// What becomes of steps that the kernel refuses.
    fn judge(&mut self, refused: Vec<RefusedOp>, report: &mut Report) -> Result<(), BackendError> {
        if refused.is_empty() {
            return Ok(());
        }
        let mut config = self.ledger.config().clone();
        for scheduler in refused.iter().filter_map(|refused| refused.missing_scheduler) {
            if config.available_schedulers.remove(&scheduler) {
                report.warnings.push(format!(
                    "this kernel has no scheduler {scheduler} (load it: modprobe ip_vs_{scheduler}): services that ask for it get {}",
                    config.scheduler
                ));
            }
        }
        self.ledger.set_config(config);
        let reasons: Vec<String> = refused.iter().take(5).map(|refused| refused.reason.clone()).collect();
        let message = format!("the kernel refuses {} steps: {}", refused.len(), reasons.join("; "));
        let without_scheduler: BTreeSet<ServerKey> = refused
            .iter()
            .filter(|refused| refused.missing_scheduler.is_some())
            .filter_map(|refused| if let Op::AddServer(key, _) = refused.op { Some(key) } else { None })
            .collect();
        let (mut kind, mut at_fault) = (ErrorKind::Refused, Vec::new());
        for refused in refused {
            // Another scheduler is taken by planning anew, which makes the destinations of the server as well.
            let follows = matches!(refused.op, Op::AddDestination(key, ..) if without_scheduler.contains(&key));
            if refused.missing_scheduler.is_some() || follows {
                kind = ErrorKind::NeedsFullSync;
                continue;
            }
            let services = self.ledger.services_that_want(&refused.op);
            // What no service is at fault for only the kernel can tell.
            if services.is_empty() {
                kind = ErrorKind::NeedsFullSync;
                continue;
            }
            at_fault.extend(services.into_iter().map(|service| (service, refused.clone())));
        }
        // A full sync tries all of them again.
        if kind == ErrorKind::Refused {
            self.has_newly_refused = true;
            for (service, refused) in at_fault {
                let ops = self.refused.entry(service).or_default();
                if !ops.contains(&refused) {
                    ops.push(refused);
                }
            }
        }
        Err(BackendError::new(kind, message))
    }

    /// As [`Backend::find_refused`](super::super::Backend::find_refused). Steps stand for themselves, so that it is known who is at fault; rules have to be tried.
    pub(super) fn find_refused(
        &mut self,
        source: &dyn StateSource,
        suspects: Option<&BTreeSet<Arc<ServiceKey>>>,
    ) -> Result<Vec<Refused>, BackendError> {
        if !std::mem::take(&mut self.has_newly_refused) {
            return find_refused(&self.programs, self.ledger.rules(), source, suspects);
        }
        let reason = |ops: &Vec<RefusedOp>| {
            let reasons: Vec<&str> = ops.iter().map(|refused| refused.reason.as_str()).collect();
            reasons.join("; ")
        };
        let refused = |(service, ops): (&Arc<ServiceKey>, &Vec<RefusedOp>)| Refused {
            service: Arc::clone(service),
            family: self.family,
            reason: format!("{}; the rest of the service is programmed", reason(ops)),
        };
        Ok(self.refused.iter().map(refused).collect())
    }

    /// As [`Backend::set_aside`](super::super::Backend::set_aside): of services with refused steps, those are left out; of others, the rules stay as they were.
    pub(super) fn set_aside(&mut self, services: &BTreeSet<Arc<ServiceKey>>) {
        self.refused.retain(|service, _| services.contains(service));
        let ops = |refused: &Vec<RefusedOp>| refused.iter().map(|refused| refused.op).collect();
        self.ledger.bar(self.refused.iter().map(|(service, refused)| (Arc::clone(service), ops(refused))).collect());
        let by_rules = services.iter().filter(|service| !self.refused.contains_key(*service));
        self.ledger.set_rules_aside(&by_rules.cloned().collect());
    }

    /// What somebody else flushes shows at once; what somebody changes shows when everything is compared.
    pub(super) fn is_intact(&mut self, kernel: &mut Kernel) -> Result<bool, BackendError> {
        Ok(self.has_rules(kernel)? && self.is_intact_in_depth(kernel)?)
    }

    /// Rules that lead to our chains, the device and the sets are there.
    pub(super) fn has_rules(&self, kernel: &mut Kernel) -> Result<bool, BackendError> {
        if !self.programs.is_intact(self.ledger.rules().config())? {
            return Ok(false);
        }
        if kernel.existing_device()?.is_none() {
            return Ok(false);
        }
        let set = headgate_core::ipvs::Set::ClusterIp.name(self.family);
        let found = kernel.sets()?.set(&set).map_err(of_sets)?;
        Ok(found.is_some())
    }

    fn is_intact_in_depth(&mut self, kernel: &mut Kernel) -> Result<bool, BackendError> {
        let started = Instant::now();
        if self.next_deep_look.is_none_or(|due| started < due) {
            return Ok(true);
        }
        let device = kernel.device()?;
        let tables = self.programs.existing_tables()?;
        let is_intact = self.ledger.is_in(&read::existing(kernel, device, self.family, tables)?);
        self.next_deep_look = Some(Instant::now() + started.elapsed() * DEEP_LOOK_PAUSE_FACTOR);
        Ok(is_intact)
    }

    /// Asks how many connections draining destinations still have, and removes those without any.
    pub(super) fn drain(&mut self, kernel: &mut Kernel, now_ms: u64) -> Result<(), BackendError> {
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
        let device = kernel.device()?;
        let refused = write::run(kernel, device, self.family, &ops)?;
        self.judge(refused, &mut Report::default())
    }

    pub(super) fn statistics(&self) -> FamilyStatistics {
        FamilyStatistics::of_rules(self.family, self.last_took, &self.ledger.tally(), self.last_rules)
    }
}
