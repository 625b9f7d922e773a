//! The iptables backend: scripts of [`headgate_core::iptables`], run by `iptables-restore --noflush`, one for each family.
//!
//! A change writes the chains of changed services and nothing else. Only a full sync reads the kernel.

mod command;
mod config;
mod sysctl;
mod variant;

pub use config::{Config, Variant};

use std::time::{Duration, Instant};

use headgate_core::{
    Dirty, Family, State,
    iptables::{ExistingTables, Ledger, RenderConfig, Script, Table, fixed, ledger::Planned},
    view::NodeFacts,
};

use self::command::Programs;
use super::{Backend, BackendError, FamilyStatistics, Plan, Report, TableStatistics};
use crate::node_inputs::NodeInputs;

/// Programs the kernel by `iptables-restore`.
#[derive(Debug)]
pub struct IptablesBackend {
    name: &'static str,
    families: Vec<FamilyBackend>,
    degraded: Vec<String>,
}

#[derive(Debug)]
struct FamilyBackend {
    family: Family,
    programs: Programs,
    ledger: Ledger,
    last_took: Duration,
    /// Rules that the last step wrote: nat, filter.
    last_rules: [u32; 2],
}

/// What [`Backend::plan`] hands to [`Backend::apply`]: a script for each family, in the order of the backend's families.
#[derive(Debug)]
struct IptablesPlan(Vec<(Script, Planned)>);

impl IptablesBackend {
    /// Finds the programs that the configuration asks for. Changes nothing.
    ///
    /// # Errors
    /// [`super::ErrorKind::Unavailable`] where this machine has none.
    pub fn new(config: Config) -> Result<Self, BackendError> {
        let variant = variant::choose(config.variant)?;
        let mut degraded = Vec::new();
        let mut families = Vec::new();
        for family in config.families {
            if family == Family::V6 && !sysctl::has_ipv6() {
                degraded.push("IPv6 is off on this node: IPv6 services are not programmed".to_owned());
                continue;
            }
            let render = RenderConfig {
                masquerade: config.masquerade.clone(),
                layout: config.layout,
                localhost_node_ports: config.localhost_node_ports && family == Family::V4,
                conntrack_tcp_be_liberal: config.conntrack_tcp_be_liberal,
                ..RenderConfig::new(family)
            };
            families.push(FamilyBackend {
                family,
                programs: Programs::new(family, variant),
                ledger: Ledger::new(render),
                last_took: Duration::ZERO,
                last_rules: [0; 2],
            });
        }
        let name = if variant == Variant::Legacy { "iptables-legacy" } else { "iptables-nft" };
        Ok(Self { name, families, degraded })
    }
}

impl Backend for IptablesBackend {
    fn name(&self) -> &str {
        self.name
    }

    fn degraded(&self) -> Vec<String> {
        self.degraded.clone()
    }

    fn sync_full(&mut self, state: &State, node: &NodeFacts) -> Result<Report, BackendError> {
        let mut report = Report::default();
        let mut result = Ok(());
        for family in &mut self.families {
            let synced = family.sync_full(state, node, &mut report).map_err(|error| error.of(family.family));
            // The other family gets its turn all the same.
            result = BackendError::join(result, synced);
        }
        result.map(|()| report)
    }

    fn plan(&mut self, state: &State, node: &NodeFacts, dirty: &Dirty) -> Plan {
        let scripts = self.families.iter_mut().map(|family| family.ledger.changed(state, node, dirty)).collect();
        Box::new(IptablesPlan(scripts))
    }

    fn apply(&mut self, plan: Plan) -> Result<Report, BackendError> {
        let Ok(plan) = plan.downcast::<IptablesPlan>() else {
            let message = "a plan of another backend was applied; everything is written again";
            return Err(BackendError::new(super::ErrorKind::NeedsFullSync, message));
        };
        let mut report = Report::default();
        let mut result = Ok(());
        for (family, (script, planned)) in self.families.iter_mut().zip(plan.0) {
            let applied = family.run(&script, planned, &mut report).map_err(|error| error.of(family.family));
            result = BackendError::join(result, applied);
        }
        result.map(|()| report)
    }

    fn statistics(&self) -> Vec<FamilyStatistics> {
        self.families.iter().map(FamilyBackend::statistics).collect()
    }

    fn reconfigure(&mut self, inputs: &NodeInputs) -> bool {
        let mut is_new = false;
        for FamilyBackend { family, ledger, .. } in &mut self.families {
            let mut config = ledger.config().clone();
            config.node_port_addresses = inputs.node_ports(*family).clone();
            config.masquerade.detector_v4 = inputs.detector_v4.clone();
            config.masquerade.detector_v6 = inputs.detector_v6.clone();
            if config != *ledger.config() {
                ledger.set_config(config);
                is_new = true;
            }
        }
        is_new
    }

    fn verify(&mut self) -> Result<bool, BackendError> {
        for family in &self.families {
            if !family.is_intact()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn cleanup(&mut self) -> Result<(), BackendError> {
        let mut result = Ok(());
        for family in &self.families {
            result = result.and(family.cleanup());
        }
        result
    }
}

impl FamilyBackend {
    fn sync_full(&mut self, state: &State, node: &NodeFacts, report: &mut Report) -> Result<(), BackendError> {
        if fixed::has_localnet_guard(self.ledger.config()) {
            report.warnings.extend(sysctl::route_localnet().err());
        }
        let existing = self.existing()?;
        let (script, planned) = self.ledger.full(state, node, &existing);
        self.run(&script, planned, report)
    }

    fn existing(&self) -> Result<ExistingTables, BackendError> {
        let mut tables = ExistingTables::default();
        for table in Table::ALL {
            tables.set(table, self.programs.existing(table)?);
        }
        Ok(tables)
    }

    fn statistics(&self) -> FamilyStatistics {
        let tally = self.ledger.tally();
        let [nat, filter] = self.last_rules;
        let rules = vec![
            TableStatistics { table: "nat", total: tally.nat_rules, last: nat },
            TableStatistics { table: "filter", total: tally.filter_rules, last: filter },
        ];
        FamilyStatistics { family: self.family, took: self.last_took, rules, no_local: tally.no_local }
    }

    fn run(&mut self, script: &Script, planned: Planned, report: &mut Report) -> Result<(), BackendError> {
        let started = Instant::now();
        let written = |table| u32::try_from(script.rules_written(table)).unwrap_or(u32::MAX);
        self.last_rules = [written(Table::Nat), written(Table::Filter)];
        let result = self.write(script, planned, report);
        self.last_took = started.elapsed();
        result
    }

    fn write(&self, script: &Script, planned: Planned, report: &mut Report) -> Result<(), BackendError> {
        // Both families compute the same services: they count once.
        report.services_planned = report.services_planned.max(planned.services);
        if script.is_empty() {
            return Ok(());
        }
        self.programs.restore(script)?;
        report.objects_written += script.chains_written() + script.chains_deleted();
        Ok(())
    }

    /// Somebody who flushes tables takes the canary with them, or at least the rules that lead to our chains.
    fn is_intact(&self) -> Result<bool, BackendError> {
        if !self.programs.has_chain(Table::Mangle, fixed::CANARY)? {
            return Ok(false);
        }
        for jump in fixed::jumps(self.ledger.config()) {
            if !self.programs.has_rule(jump.table, jump.from, &jump.rule)? {
                tracing::warn!(family = %self.family, table = %jump.table, chain = jump.from, "rule removed by somebody else");
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn cleanup(&self) -> Result<(), BackendError> {
        let existing = self.existing()?;
        let script = Ledger::cleanup(&existing);
        if script.is_empty() { Ok(()) } else { self.programs.restore(&script) }
    }
}
