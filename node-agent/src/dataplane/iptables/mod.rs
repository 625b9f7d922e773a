//! The iptables backend: scripts of [`headgate_core::iptables`], run by `iptables-restore --noflush`, one for each family.
//!
//! A change writes the chains of changed services and nothing else. Only a full sync reads the kernel.

pub(super) mod command;
mod config;
mod counters;
pub(super) mod refused;
pub(super) mod rules;
pub(super) mod sctp;
pub(super) mod sysctl;
pub(super) mod variant;

pub use config::{Config, Variant};

use std::{
    collections::BTreeSet,
    sync::Arc,
    time::{Duration, Instant},
};

use headgate_core::{
    Demand, Dirty, Family, ServiceKey, State,
    iptables::{
        Ledger, RenderConfig, Script, Table, has_localnet_guard,
        ledger::{LateChange, Planned},
        ruleset,
    },
    view::NodeFacts,
};

use self::{command::Programs, rules::Left, sctp::Sctp};
use super::{
    DataplaneError, FamilyStatistics, NodeDataplane, Plan, Refused, Report, StateSource, leftovers::Leftovers,
    missing_ipv6,
};
use tracing::info;

use crate::{node_inputs::NodeInputs, packet_counters};

/// A comparison of every rule is followed by a pause of this many times what it took.
const DEEP_LOOK_PAUSE_FACTOR: u32 = 100;

/// Sets what rules for NodePorts on 127.0.0.0/8 need, where there are to be any.
pub(crate) fn prepare(localhost_node_ports: bool, inputs: &NodeInputs) -> Result<(), DataplaneError> {
    let mut config = RenderConfig { localhost_node_ports, ..RenderConfig::new(Family::V4) };
    config.node_port_addresses = inputs.node_ports(Family::V4).clone();
    let set = if has_localnet_guard(&config) { sysctl::route_localnet() } else { Ok(()) };
    set.map_err(|sentence| DataplaneError::new(super::ErrorKind::Fatal, sentence))
}

/// What stays of the machine's settings after a cleanup, for who set it cannot be told: a sentence for the operator, if there is something.
#[must_use]
pub fn left_settings() -> Option<&'static str> {
    sysctl::is_localnet_routed().then_some(
        "net.ipv4.conf.all.route_localnet stays 1. Unless other rules guard it, as the kubelet's in KUBE-FIREWALL do, neighbours reach what \
         listens on 127.0.0.1: set it to 0, if no other software needs it",
    )
}

/// Programs the kernel by `iptables-restore`.
#[derive(Debug)]
pub struct IptablesDataplane {
    name: &'static str,
    families: Vec<FamilyDataplane>,
    leftovers: Leftovers,
    is_without_ipv6: bool,
    /// Why it runs in place of another backend.
    in_place_of: Option<String>,
}

#[derive(Debug)]
struct FamilyDataplane {
    family: Family,
    programs: Programs,
    ledger: Ledger,
    sctp: Sctp,
    /// A full sync with rules that count packets has succeeded.
    has_counted: bool,
    /// When every rule may be compared again; `None` before the first full sync, when there is nothing to compare with.
    next_deep_look: Option<Instant>,
    last_took: Duration,
    /// Rules that the last step wrote: nat, filter.
    last_rules: [u32; 2],
}

/// What [`NodeDataplane::plan`] hands to [`NodeDataplane::apply`]: a script for each family, in the order of the backend's families.
#[derive(Debug)]
struct IptablesPlan(Vec<(Script, Planned)>);

impl IptablesDataplane {
    /// Finds the programs that the configuration asks for. Changes nothing.
    ///
    /// # Errors
    /// [`super::ErrorKind::Unavailable`] where this machine has none.
    pub fn new(config: Config) -> Result<Self, DataplaneError> {
        let variant = variant::choose(config.variant)?;
        let mut is_without_ipv6 = false;
        let mut families = Vec::new();
        let mut other_variant = Vec::new();
        let other = if variant == Variant::Legacy { Variant::Nft } else { Variant::Legacy };
        for family in config.families {
            if family == Family::V6 && !sysctl::has_ipv6() {
                info!("IPv6 is off on this node: IPv4 alone is programmed");
                is_without_ipv6 = true;
                continue;
            }
            let render = RenderConfig {
                masquerade: config.masquerade.clone(),
                layout: config.layout,
                localhost_node_ports: config.localhost_node_ports && family == Family::V4,
                conntrack_tcp_be_liberal: config.conntrack_tcp_be_liberal,
                counts_packets: config.count_packets,
                ..RenderConfig::new(family)
            };
            other_variant.extend(Some(Programs::new(family, other)).filter(Programs::are_installed));
            families.push(FamilyDataplane::new(Programs::new(family, variant), render));
        }
        let name = if variant == Variant::Legacy { "iptables-legacy" } else { "iptables-nft" };
        let leftovers = Leftovers::new(other_variant, Some(config.ipvs_exclude_cidrs));
        Ok(Self { name, families, leftovers, is_without_ipv6, in_place_of: None })
    }

    /// Says for what reason it runs in place of another backend.
    #[must_use]
    pub fn in_place_of(self, sentence: String) -> Self {
        Self { in_place_of: Some(sentence), ..self }
    }
}

impl NodeDataplane for IptablesDataplane {
    fn name(&self) -> &str {
        self.name
    }

    fn degraded(&self, demand: &Demand) -> Vec<String> {
        let lament = |family: &FamilyDataplane| {
            let is_asked_for = demand.of(family.family).with_sctp > 0;
            is_asked_for.then(|| family.sctp.lament("ports of SCTP do not work"))?
        };
        let without_sctp = self.families.iter().find_map(lament);
        let without_ipv6 = self.is_without_ipv6.then(|| missing_ipv6(demand)).flatten();
        self.in_place_of.clone().into_iter().chain(without_ipv6).chain(without_sctp).collect()
    }

    fn sync_full_from(&mut self, source: &dyn StateSource) -> Result<Report, DataplaneError> {
        let mut report = Report::default();
        let mut result = Ok(());
        for family in &mut self.families {
            let synced = family.sync_full(source, &mut report).map_err(|error| error.of(family.family));
            // The other family gets its turn all the same.
            result = DataplaneError::join(result, synced);
        }
        result?;
        // Both variants' rules would be followed; ours are in place now.
        report.warnings.extend(self.leftovers.remove());
        Ok(report)
    }

    fn plan(&mut self, state: &State, node: &NodeFacts, dirty: &Dirty) -> Plan {
        let scripts = self.families.iter_mut().map(|family| family.ledger.changed(state, node, dirty)).collect();
        Box::new(IptablesPlan(scripts))
    }

    fn apply(&mut self, plan: Plan) -> Result<Report, DataplaneError> {
        let Ok(plan) = plan.downcast::<IptablesPlan>() else {
            return Err(DataplaneError::of_another_plan());
        };
        let mut report = Report::default();
        let mut result = Ok(());
        for (family, (script, planned)) in self.families.iter_mut().zip(plan.0) {
            // Such scripts hold all their text.
            let applied = family.run(&script, None, planned, &mut report).map_err(|error| error.of(family.family));
            result = DataplaneError::join(result, applied);
        }
        result.map(|()| report)
    }

    fn find_refused(
        &mut self,
        source: &dyn StateSource,
        suspects: Option<&BTreeSet<Arc<ServiceKey>>>,
        families: &[Family],
    ) -> Result<Vec<Refused>, DataplaneError> {
        let mut refused = Vec::new();
        for family in self.families.iter().filter(|of| families.is_empty() || families.contains(&of.family)) {
            refused.extend(refused::find_refused(&family.programs, &family.ledger, source, suspects)?);
        }
        Ok(refused)
    }

    fn set_aside(&mut self, refused: &[Refused]) {
        for FamilyDataplane { family, ledger, .. } in &mut self.families {
            let own = refused.iter().filter(|refused| refused.family == *family);
            ledger.set_quarantined(&own.map(|refused| Arc::clone(&refused.service)).collect());
        }
    }

    fn counts_packets(&self) -> bool {
        self.families.iter().any(|family| family.ledger.config().counts_packets)
    }

    fn statistics(&self) -> Vec<FamilyStatistics> {
        self.families.iter().map(FamilyDataplane::statistics).collect()
    }

    fn reconfigure(&mut self, inputs: &NodeInputs) -> bool {
        let mut is_new = false;
        for FamilyDataplane { family, ledger, .. } in &mut self.families {
            let mut config = ledger.config().clone();
            config.node_port_addresses = inputs.node_ports(*family).clone();
            config.masquerade.detector_v4 = inputs.detector_v4.clone();
            config.masquerade.detector_v6 = inputs.detector_v6.clone();
            if config != *ledger.config() {
                ledger.set_ruleset(ruleset(config));
                is_new = true;
            }
        }
        is_new
    }

    fn tend_at(&self) -> Option<Instant> {
        self.families.iter().map(|family| family.sctp.look_at()).chain([self.leftovers.retry_at()]).flatten().min()
    }

    fn tend(&mut self) -> Result<(), DataplaneError> {
        let now = Instant::now();
        self.leftovers.retry(now);
        let mut result = Ok(());
        for family in &mut self.families {
            result = DataplaneError::join(result, family.look_for_sctp(now).map_err(|error| error.of(family.family)));
        }
        result
    }

    fn has_rules(&mut self) -> Result<bool, DataplaneError> {
        for family in &self.families {
            if family.programs.missing(family.ledger.jumps())?.is_some() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn verify(&mut self) -> Result<bool, DataplaneError> {
        for family in &mut self.families {
            if !family.programs.is_intact(family.ledger.jumps())? || !family.is_intact_in_depth()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn cleanup(&mut self) -> Result<(), DataplaneError> {
        let mut result = Ok(());
        for family in &self.families {
            result = DataplaneError::join(result, family.programs.cleanup());
        }
        if self.counts_packets() {
            let removed = packet_counters::remove();
            result = DataplaneError::join(result, removed.map_err(|error| counters::error("removing", &error)));
        }
        result
    }
}

impl FamilyDataplane {
    fn new(programs: Programs, render: RenderConfig) -> Self {
        Self {
            family: render.family,
            programs,
            ledger: Ledger::new(ruleset(render)),
            sctp: Sctp::default(),
            has_counted: false,
            next_deep_look: None,
            last_took: Duration::ZERO,
            last_rules: [0; 2],
        }
    }

    /// One family after the other, so that there is never more than one script of the whole.
    fn sync_full(&mut self, source: &dyn StateSource, report: &mut Report) -> Result<(), DataplaneError> {
        self.make_counters();
        let synced = self.sync_everything(source, report);
        if self.counters_are_refused(&synced)? { self.sync_everything(source, report) } else { synced }
    }

    fn sync_everything(&mut self, source: &dyn StateSource, report: &mut Report) -> Result<(), DataplaneError> {
        if has_localnet_guard(self.ledger.config()) {
            report.warnings.extend(sysctl::route_localnet().err());
        }
        let mut existing = Some(self.programs.existing_tables()?);
        let mut work = None;
        source.look(&mut |state, node| {
            // The source shows one state.
            let Some(existing) = existing.take() else { return };
            work = Some(self.ledger.full_by(self.programs.writing(), state, node, existing));
        });
        let Some((script, planned)) = work else { return Ok(()) };
        self.run(&script, Some(source), planned, report)?;
        self.next_deep_look.get_or_insert_with(Instant::now);
        Ok(())
    }

    fn statistics(&self) -> FamilyStatistics {
        FamilyStatistics::of_rules(self.family, self.last_took, &self.ledger.tally(), self.last_rules)
    }

    fn run(
        &mut self,
        script: &Script,
        source: Option<&dyn StateSource>,
        planned: Planned,
        report: &mut Report,
    ) -> Result<(), DataplaneError> {
        let started = Instant::now();
        let written = |table| u32::try_from(script.rules_written(table)).unwrap_or(u32::MAX);
        self.last_rules = [written(Table::Nat), written(Table::Filter)];
        let result = self.write(script, source, planned, report);
        self.last_took = started.elapsed();
        match result {
            Ok(()) => {
                self.ledger.confirm();
                Ok(())
            }
            Err(error) => {
                let error = self.sctp.judge(&self.programs, error);
                self.leave_out_sctp(self.sctp.is_missing());
                Err(error)
            }
        }
    }

    fn leave_out_sctp(&mut self, is_left_out: bool) {
        if self.ledger.config().leaves_out_sctp != is_left_out {
            let config = RenderConfig { leaves_out_sctp: is_left_out, ..self.ledger.config().clone() };
            self.ledger.set_ruleset(ruleset(config));
        }
    }

    /// Looks whether SCTP can be matched by now, if it could not and it is time.
    fn look_for_sctp(&mut self, now: Instant) -> Result<(), DataplaneError> {
        if self.sctp.look(&self.programs, now)? {
            self.leave_out_sctp(false);
            return Err(sctp::can_be_matched_again());
        }
        Ok(())
    }

    fn write(
        &mut self,
        script: &Script,
        source: Option<&dyn StateSource>,
        planned: Planned,
        report: &mut Report,
    ) -> Result<(), DataplaneError> {
        // Both families compute the same services: they count once.
        report.services_planned = report.services_planned.max(planned.services);
        if script.is_empty() {
            return Ok(());
        }
        // Each is named once, not at every repair.
        let mut changed = Vec::new();
        let left =
            self.programs.restore_leaving_by(script, &mut |script| self.restore(script, source, &mut changed))?;
        self.ledger.note_late(changed);
        for Left { table, name, sentence } in left {
            report.warnings.extend(self.ledger.note_undeletable(table, &name).then_some(sentence));
        }
        report.objects_written += script.chains_written() + script.chains_deleted();
        Ok(())
    }

    /// Runs a script, with what it leaves for later rendered from the source. `changed` takes what became of that meanwhile.
    fn restore(
        &self,
        script: &Script,
        source: Option<&dyn StateSource>,
        changed: &mut Vec<LateChange>,
    ) -> Result<(), DataplaneError> {
        changed.clear();
        self.programs.restore_with(script, &mut |services, text| {
            let Some(source) = source else { return };
            source.look(&mut |state, node| {
                text.clear();
                self.ledger.write_late(state, node, script, services, text, changed);
            });
        })
    }

    /// Compares every rule with what is wanted, as often as that costs at most some percent of a core.
    fn is_intact_in_depth(&mut self) -> Result<bool, DataplaneError> {
        let started = Instant::now();
        if self.next_deep_look.is_none_or(|due| started < due) {
            return Ok(true);
        }
        let is_intact = self.ledger.is_in(&self.programs.existing_tables()?);
        self.next_deep_look = Some(Instant::now() + started.elapsed() * DEEP_LOOK_PAUSE_FACTOR);
        Ok(is_intact)
    }
}
