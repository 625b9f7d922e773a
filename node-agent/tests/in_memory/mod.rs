//! A dataplane whose kernel is a table in memory. It serves tests of the code around dataplanes,
//! and is the example in `docs/adding-a-dataplane.md`. With a [`Control`], a test sees the calls
//! and decides which calls fail.

mod control;

pub use control::{Call, Control};

use std::{collections::BTreeSet, sync::Arc, time::Instant};

use headgate_core::{
    Demand, Dirty, Family, NodeFacts, ServiceKey, State, StateSource,
    explain::{Mode, NodeSettings},
    forwarding,
    iptables::NodePortAddresses,
    view::{MasqueradeConfig, ServicePortView, service_views},
};
use headgate_node_agent::dataplane::{
    Dataplane, DataplaneError, Degradation, DualStack, ErrorKind, Fault, Finding, Leftover, Report, RulesDifferences,
    RulesVerification,
};

use self::control::{Script, Table};

/// One IP family. It records its calls in a [`Control`].
#[derive(Debug)]
pub struct InMemoryFamily {
    control: Control,
}

/// A dataplane and its control. The dataplane programs only IPv4, because both families would share
/// one table.
pub fn dataplane() -> (DualStack<InMemoryFamily>, Control) {
    let control = Control::default();
    (dataplane_of(&control), control)
}

/// A dataplane for a kernel that may have a table already. Nothing is in quarantine.
pub fn dataplane_of(control: &Control) -> DualStack<InMemoryFamily> {
    control.script().quarantined.clear();
    let make = |_| InMemoryFamily { control: control.clone() };
    let kernel = control.clone();
    let own = Leftover::new("memory", move || kernel.work(Call::Cleanup).map(|mut script| script.table.clear()));
    // Verifications need a mode.
    DualStack::assemble("iptables-memory", control.clone(), vec![own], vec![Family::V4], make)
}

/// Changes of the table. An entry without ports removes the service.
#[derive(Debug)]
pub struct Plan {
    call: Call,
    services: usize,
    entries: Table,
}

impl Dataplane for InMemoryFamily {
    type Kernel = Control;
    type Plan = Plan;

    fn family(&self) -> Family {
        Family::V4
    }

    fn sync(&mut self, kernel: &mut Control, source: &dyn StateSource) -> Result<Report, DataplaneError> {
        let found = kernel.script().table.clone();
        let mut plan = None;
        source.look(&mut |state, node, _| {
            let gone = found.keys().map(|key| (Arc::clone(key), Vec::new()));
            let entries = gone.chain(state.entries().map(|(key, _)| entry(state, node, key))).collect();
            let call = Call::Full(state.digests().clone(), node.clone());
            plan = Some(Plan { call, services: state.service_count(), entries });
        });
        let Some(plan) = plan else { return Ok(Report::default()) };
        self.apply(kernel, plan)
    }

    fn verification(&mut self, kernel: &mut Control) -> Result<RulesVerification, DataplaneError> {
        let script = kernel.work(Call::Verify)?;
        let (found, quarantined) = (script.table.clone(), script.quarantined.clone());
        drop(script);
        Ok(Box::new(move |source| {
            let mut wanted = Table::new();
            source
                .look(&mut |state, node, _| wanted = state.entries().map(|(key, _)| entry(state, node, key)).collect());
            wanted.retain(|_, views| !views.is_empty());
            let differs = |key: &&Arc<ServiceKey>| found.get(*key) != wanted.get(*key) && !quarantined.contains(*key);
            let services: BTreeSet<_> = found.keys().chain(wanted.keys()).filter(differs).cloned().collect();
            RulesDifferences { count: count(services.len()), services, is_redivided: false }
        }))
    }

    fn plan(&mut self, state: &State, node: &NodeFacts, dirty: &Dirty) -> Plan {
        let entries: Table = dirty.services.iter().map(|key| entry(state, node, key)).collect();
        Plan { call: Call::Apply(names(&dirty.services), state.digests().clone()), services: entries.len(), entries }
    }

    fn apply(&mut self, kernel: &mut Control, plan: Plan) -> Result<Report, DataplaneError> {
        let is_full = matches!(plan.call, Call::Full(..));
        let mut script = kernel.work(plan.call)?;
        script.is_flushed &= !is_full;
        let Script { table, rejected, quarantined, .. } = &mut *script;
        let mut entries = plan.entries;
        entries.retain(|key, _| !quarantined.contains(key));
        if entries.iter().any(|(key, views)| !views.is_empty() && rejected.contains(&key.to_string())) {
            return Err(DataplaneError::new(ErrorKind::Rejected, "line 3 failed"));
        }
        let objects_written = count(entries.len());
        for (key, views) in entries {
            match views.is_empty() {
                true => drop(table.remove(&key)),
                false => drop(table.insert(key, views)),
            }
        }
        Ok(Report { services_planned: count(plan.services), objects_written, ..Report::default() })
    }

    fn check(&mut self, kernel: &mut Control) -> Result<Finding, DataplaneError> {
        let mut script = kernel.work(Call::Check)?;
        let is_intact = script.verdicts.pop_front().unwrap_or(!script.is_flushed);
        Ok(Finding::of((!is_intact).then(|| "somebody else has changed the table".to_owned())))
    }

    fn decode(&mut self, kernel: &mut Control) -> Result<forwarding::Table, DataplaneError> {
        kernel.note_dump();
        Ok(kernel.forwarding())
    }

    fn degraded(&self, _: &Demand) -> Vec<Degradation> {
        self.control.script().degraded.iter().cloned().map(Into::into).collect()
    }

    fn due_at(&self) -> Option<Instant> {
        self.control.script().maintenance_due_at
    }

    fn maintain(&mut self, kernel: &mut Control, _: Instant) -> Result<(), DataplaneError> {
        kernel.script().maintenance_due_at = None;
        Ok(())
    }

    fn find_faults(
        &mut self,
        kernel: &mut Control,
        source: &dyn StateSource,
        suspects: Option<&BTreeSet<Arc<ServiceKey>>>,
    ) -> Result<Vec<Fault>, DataplaneError> {
        let rejected = kernel.work(Call::FindFaults(suspects.map(names)))?.rejected.clone();
        let mut faults = Vec::new();
        source.look(&mut |state, _, _| {
            let suspected = state.entries().map(|(key, _)| key);
            let suspected = suspected.filter(|key| suspects.is_none_or(|suspects| suspects.contains(*key)));
            let found = suspected.filter(|key| rejected.contains(&key.to_string())).cloned();
            let reason = || "line 3 failed: no such match".to_owned();
            faults = found.map(|service| Fault { service, family: Family::V4, reason: reason() }).collect();
        });
        Ok(faults)
    }

    fn set_quarantined(&mut self, services: &BTreeSet<Arc<ServiceKey>>) {
        self.control.script().quarantined.clone_from(services);
    }
}

impl Control {
    /// What the table forwards.
    pub fn forwarding(&self) -> forwarding::Table {
        forwarding_of(&self.script().table)
    }
}

fn forwarding_of(table: &Table) -> forwarding::Table {
    let settings = NodeSettings {
        mode: Mode::Iptables,
        masquerade: MasqueradeConfig::default(),
        node_ports_v4: NodePortAddresses::All,
        node_ports_v6: NodePortAddresses::All,
        localhost_node_ports: false,
    };
    forwarding::of_views(table.values().flatten().cloned(), Family::V4, &settings)
}

fn entry(state: &State, node: &NodeFacts, key: &Arc<ServiceKey>) -> (Arc<ServiceKey>, Vec<ServicePortView>) {
    (Arc::clone(key), service_views(state, key, Family::V4, node))
}

fn names(services: &BTreeSet<Arc<ServiceKey>>) -> Vec<String> {
    services.iter().map(ToString::to_string).collect()
}

fn count(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}
