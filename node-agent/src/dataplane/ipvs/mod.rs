//! The IPVS backend: plans of [`headgate_core::ipvs`], carried out over netlink, and the rules beside them by `iptables-restore`.
//!
//! A change writes what it changes. Only a full sync reads the kernel, and a look at everything in the background. What is refused, each for
//! itself, keeps nothing else from being done.

mod cleanup;
mod config;
mod convert;
mod family;
mod kernel;
mod probe;
mod read;
mod sysctl;
mod write;

pub(crate) use cleanup::remove_all;
pub use config::Config;

use std::{
    collections::BTreeSet,
    sync::Arc,
    time::{Duration, Instant},
};

use headgate_core::{
    Demand, Dirty, Family, ServiceKey, State,
    ipvs::{IpvsConfig, Ledger, Plan as FamilyPlan, Problem, Scheduler},
    view::NodeFacts,
};
use ipvs_netlink::{Ipvs, Timeouts};
use tracing::info;

use self::{
    family::FamilyDataplane,
    kernel::{Kernel, of_ipvs},
    sysctl::Sysctls,
};
use super::{
    DataplaneError, ErrorKind, FamilyStatistics, NodeDataplane, Plan, Refused, Report, StateSource,
    iptables::{Variant, command::Programs, sysctl::has_ipv6, variant},
    leftovers::Leftovers,
    missing_ipv6,
    retry::{PAUSES_OF_MODULES, Refusals},
};
use crate::node_inputs::NodeInputs;

/// Time between two questions for the connections of draining destinations.
const DRAIN_INTERVAL: Duration = Duration::from_secs(5);

/// Sets all kernel parameters that the backend needs or is better with, so that it need not be allowed to.
///
/// # Errors
/// One cannot be set; [`ErrorKind::Unavailable`] when the kernel has no IPVS.
pub(crate) fn prepare(strict_arp: bool) -> Result<(), DataplaneError> {
    // They come with IPVS.
    Ipvs::open().map_err(of_ipvs)?;
    let sentences = Sysctls::default().set(strict_arp).map_err(|error| DataplaneError::new(ErrorKind::Fatal, error))?;
    if sentences.is_empty() { Ok(()) } else { Err(DataplaneError::new(ErrorKind::Fatal, sentences.join("; "))) }
}

/// Services that are named where a scheduler is missing.
const MAX_NAMES: usize = 3;

/// Programs the kernel's IPVS.
#[derive(Debug)]
pub struct IpvsDataplane {
    config: Config,
    kernel: Kernel,
    families: Vec<FamilyDataplane>,
    leftovers: Leftovers,
    is_without_ipv6: bool,
    /// Kernel parameters that could not be set, a sentence each.
    unset_parameters: Vec<String>,
    is_prepared: bool,
    began: Instant,
    drain_at: Option<Instant>,
    /// Schedulers that services ask for and the kernel does not have.
    missing_schedulers: Refusals<Scheduler>,
    /// Services that get another scheduler than they had.
    to_plan: BTreeSet<Arc<ServiceKey>>,
    /// What was told of by [`NodeDataplane::refused_parts`], as the ledgers count.
    told_revisions: Vec<u64>,
}

/// What [`NodeDataplane::plan`] hands to [`NodeDataplane::apply`], in the order of the backend's families.
#[derive(Debug)]
struct IpvsPlan(Vec<FamilyPlan>);

impl IpvsDataplane {
    /// Looks whether this machine can run the backend. Programs nothing.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] where it cannot: all that is missing, and how to get it.
    pub fn new(config: Config) -> Result<Self, DataplaneError> {
        let variant = variant::choose(config.variant)?;
        let other = if variant == Variant::Legacy { Variant::Nft } else { Variant::Legacy };
        let mut is_without_ipv6 = false;
        let (mut families, mut other_variant) = (Vec::new(), Vec::new());
        for family in config.families.iter().copied() {
            if family == Family::V6 && !has_ipv6() {
                info!("IPv6 is off on this node: IPv4 alone is programmed");
                is_without_ipv6 = true;
                continue;
            }
            let ledger = Ledger::new(IpvsConfig {
                scheduler: config.scheduler,
                exclude_cidrs: config.exclude_cidrs.clone(),
                masquerade: config.masquerade.clone(),
                ..IpvsConfig::new(family)
            });
            families.push(FamilyDataplane::new(Programs::new(family, variant), ledger));
            other_variant.extend(Some(Programs::new(family, other)).filter(Programs::are_installed));
        }
        let programmed: Vec<Family> = families.iter().map(|family| family.family).collect();
        probe::require(config.scheduler, &programmed)?;
        Ok(Self {
            missing_schedulers: Refusals::new(PAUSES_OF_MODULES),
            to_plan: BTreeSet::new(),
            told_revisions: Vec::new(),
            config,
            kernel: Kernel::default(),
            families,
            leftovers: Leftovers::new(other_variant, None),
            is_without_ipv6,
            unset_parameters: Vec::new(),
            is_prepared: false,
            began: Instant::now(),
            drain_at: None,
        })
    }

    /// Milliseconds since the backend was made.
    fn now_ms(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Kernel parameters and time-outs, once.
    fn prepare(&mut self) -> Result<(), DataplaneError> {
        if self.is_prepared {
            return Ok(());
        }
        // The parameters come with IPVS.
        let ipvs = self.kernel.ipvs()?;
        let seconds = |timeout: Duration| u32::try_from(timeout.as_secs()).unwrap_or(u32::MAX);
        let Config { tcp_timeout, tcp_fin_timeout, udp_timeout, strict_arp, .. } = self.config;
        let timeouts = Timeouts {
            tcp_seconds: seconds(tcp_timeout),
            tcp_fin_seconds: seconds(tcp_fin_timeout),
            udp_seconds: seconds(udp_timeout),
        };
        if timeouts != Timeouts::default() {
            ipvs.set_timeouts(&timeouts).map_err(of_ipvs)?;
        }
        self.unset_parameters =
            Sysctls::default().set(strict_arp).map_err(|error| DataplaneError::new(ErrorKind::Fatal, error))?;
        self.is_prepared = true;
        Ok(())
    }

    /// Does something for each family; one's failure does not keep the other from its turn. After a failure connections are opened anew, since
    /// answers to old questions may still come on them.
    fn each(
        &mut self,
        mut work: impl FnMut(&mut FamilyDataplane, &mut Kernel) -> Result<(), DataplaneError>,
    ) -> Result<(), DataplaneError> {
        let mut result = Ok(());
        for family in &mut self.families {
            let done = work(family, &mut self.kernel).map_err(|error| error.of(family.family));
            if done.is_err() {
                self.kernel = Kernel::default();
            }
            result = DataplaneError::join(result, done);
        }
        self.replace_missing_schedulers();
        self.plan_drain();
        result
    }

    /// Has services whose scheduler the kernel turned out not to have planned with the cluster's.
    fn replace_missing_schedulers(&mut self) {
        let missing: BTreeSet<Scheduler> =
            self.families.iter_mut().flat_map(FamilyDataplane::take_newly_missing).collect();
        for scheduler in missing {
            self.missing_schedulers.note(scheduler, String::new(), Instant::now());
            self.set_available(scheduler, false);
        }
    }

    fn set_available(&mut self, scheduler: Scheduler, is_available: bool) {
        for family in &mut self.families {
            self.to_plan.extend(family.ledger.set_available(scheduler, is_available));
        }
    }

    /// Looks whether the kernel has schedulers by now that it did not have.
    fn look_for_schedulers(&mut self, now: Instant) -> Result<(), DataplaneError> {
        for scheduler in self.missing_schedulers.due(now) {
            match probe::has_scheduler(self.kernel.ipvs()?, scheduler) {
                Ok(()) => {
                    info!(%scheduler, "the kernel has a scheduler that it did not have: services that ask for it get it");
                    self.missing_schedulers.retain(|missing| *missing != scheduler);
                    self.set_available(scheduler, true);
                }
                Err(error) if error.kind == ErrorKind::Unavailable => {
                    self.missing_schedulers.note(scheduler, error.message, now);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// What is to be told about a missing scheduler; none when no service asks for it.
    fn lament(&self, scheduler: Scheduler) -> Option<String> {
        let problem = Problem::MissingScheduler(scheduler);
        let of = |family: &FamilyDataplane| {
            let services = family.ledger.problems().filter(|(_, found)| **found == problem);
            services.map(|(service, _)| service.to_string()).collect::<Vec<_>>()
        };
        let services: BTreeSet<String> = self.families.iter().flat_map(of).collect();
        let named: Vec<&str> = services.iter().take(MAX_NAMES).map(String::as_str).collect();
        let more = services.len() - named.len();
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        (!named.is_empty()).then(|| {
            format!(
                "this kernel has no scheduler {scheduler}: load the module ip_vs_{scheduler} (modprobe ip_vs_{scheduler}); until then services that ask for it get {}: {}{more}",
                self.config.scheduler,
                named.join(", "),
            )
        })
    }

    fn plan_drain(&mut self) {
        let is_draining = self.families.iter().any(|family| family.ledger.draining().next().is_some());
        self.drain_at = is_draining.then(|| self.drain_at.unwrap_or_else(|| Instant::now() + DRAIN_INTERVAL));
    }
}

impl NodeDataplane for IpvsDataplane {
    fn name(&self) -> &str {
        "ipvs"
    }

    fn degraded(&self, demand: &Demand) -> Vec<String> {
        let missing = self.missing_schedulers.all().filter_map(|scheduler| self.lament(scheduler));
        let until_then = "pods and the node itself reach ports of SCTP at addresses with externalTrafficPolicy Local only where this node has an endpoint";
        let ask_for_sctp = |family: &&FamilyDataplane| demand.of(family.family).with_sctp > 0;
        let without_sctp = self.families.iter().filter(ask_for_sctp).find_map(|family| family.sctp.lament(until_then));
        let without_ipv6 = self.is_without_ipv6.then(|| missing_ipv6(demand)).flatten();
        self.unset_parameters.iter().cloned().chain(missing).chain(without_sctp).chain(without_ipv6).collect()
    }

    fn needs_interfaces(&self) -> bool {
        true
    }

    fn sync_full_from(&mut self, source: &dyn StateSource) -> Result<Report, DataplaneError> {
        self.prepare()?;
        let mut report = Report::default();
        let now_ms = self.now_ms();
        self.each(|family, kernel| family.sync_full(kernel, source, now_ms, &mut report))?;
        // Both variants' rules would be followed; ours are in place now.
        report.warnings.extend(self.leftovers.remove());
        Ok(report)
    }

    fn plan(&mut self, state: &State, node: &NodeFacts, dirty: &Dirty) -> Plan {
        let now_ms = self.now_ms();
        let plans = self.families.iter_mut().map(|family| family.ledger.changed(state, node, dirty, now_ms)).collect();
        Box::new(IpvsPlan(plans))
    }

    fn apply(&mut self, plan: Plan) -> Result<Report, DataplaneError> {
        let Ok(plan) = plan.downcast::<IpvsPlan>() else {
            return Err(DataplaneError::of_another_plan());
        };
        let mut report = Report::default();
        let mut plans = plan.0.into_iter();
        self.each(|family, kernel| {
            let Some(plan) = plans.next() else { return Ok(()) };
            let device = kernel.device_in_use()?;
            family.run(kernel, device, &plan, &mut report)
        })?;
        Ok(report)
    }

    fn find_refused(
        &mut self,
        source: &dyn StateSource,
        suspects: Option<&BTreeSet<Arc<ServiceKey>>>,
        families: &[Family],
    ) -> Result<Vec<Refused>, DataplaneError> {
        let mut refused = Vec::new();
        for family in self.families.iter_mut().filter(|of| families.is_empty() || families.contains(&of.family)) {
            refused.extend(family.find_refused(source, suspects)?);
        }
        Ok(refused)
    }

    fn set_aside(&mut self, refused: &[Refused]) {
        for family in &mut self.families {
            let own = refused.iter().filter(|refused| refused.family == family.family);
            family.set_aside(&own.map(|refused| Arc::clone(&refused.service)).collect());
        }
    }

    fn statistics(&self) -> Vec<FamilyStatistics> {
        self.families.iter().map(FamilyDataplane::statistics).collect()
    }

    fn reconfigure(&mut self, inputs: &NodeInputs) -> bool {
        let mut is_new = false;
        for family in &mut self.families {
            is_new |= family.reconfigure(inputs);
        }
        is_new
    }

    fn has_rules(&mut self) -> Result<bool, DataplaneError> {
        let mut has_rules = true;
        self.each(|family, kernel| {
            has_rules = has_rules && family.has_rules(kernel)?;
            Ok(())
        })?;
        Ok(has_rules)
    }

    fn verify(&mut self) -> Result<bool, DataplaneError> {
        let mut is_intact = true;
        self.each(|family, kernel| {
            is_intact = is_intact && family.is_intact(kernel)?;
            Ok(())
        })?;
        Ok(is_intact)
    }

    fn refused_parts(&mut self) -> Option<Vec<Refused>> {
        let revisions: Vec<u64> = self.families.iter().map(|family| family.ledger.deferred_revision()).collect();
        if revisions == self.told_revisions {
            return None;
        }
        self.told_revisions = revisions;
        Some(self.families.iter().flat_map(FamilyDataplane::refused_parts).collect())
    }

    fn services_to_plan(&mut self) -> BTreeSet<Arc<ServiceKey>> {
        std::mem::take(&mut self.to_plan)
    }

    fn tend_at(&self) -> Option<Instant> {
        let retries = self.families.iter().map(FamilyDataplane::retry_at);
        let others = [self.drain_at, self.missing_schedulers.next_due(), self.leftovers.retry_at()];
        retries.chain(others).flatten().min()
    }

    fn tend(&mut self) -> Result<(), DataplaneError> {
        let now = Instant::now();
        self.leftovers.retry(now);
        self.look_for_schedulers(now)?;
        let is_draining = self.drain_at.is_some_and(|at| at <= now);
        if is_draining {
            self.drain_at = None;
        }
        let now_ms = self.now_ms();
        self.each(|family, kernel| {
            if is_draining {
                family.drain(kernel, now_ms)?;
            }
            family.retry(kernel, now)?;
            family.look_for_sctp(now)
        })
    }

    fn cleanup(&mut self) -> Result<(), DataplaneError> {
        let mut result = Ok(());
        for family in &self.families {
            result = DataplaneError::join(result, family.programs.cleanup());
        }
        result = DataplaneError::join(result, self.leftovers.clean_up_other_variant());
        DataplaneError::join(result, remove_all(&self.config.exclude_cidrs))
    }
}
