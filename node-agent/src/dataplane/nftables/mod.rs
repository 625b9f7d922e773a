//! The nftables dataplane: a table per family with a fixed set of rules, over netlink.
//!
//! [`headgate_core::nftables`] plans the elements of maps and sets. [`layout`] builds the rules.
//! Each step is one transaction: the kernel applies the whole step or nothing.

mod elements;
mod expressions;
mod layout;
mod leftover;
#[cfg(test)]
mod tests;

pub(crate) use leftover::tables;

use std::collections::HashSet;

use headgate_core::{
    Dirty, Family, NodeFacts, State,
    iptables::NodePortAddresses,
    masquerade::MasqueradeConfig,
    nftables::{Existing, Ledger, NftablesConfig, Plan, Shape},
};
use nftables_netlink::{ElementData, Feature, Kernel as _, Nftables, NftablesError, Rule, Table, Transaction, probe};

use self::layout::{ChainContent, Layout, LayoutConfig, RuleContent, table_name};
use super::{
    Dataplane, DataplaneError, DualStack, ErrorKind, KernelHandle, Report, StateSource, Statistics, TableStatistics,
    iptables::route_localnet,
};
use crate::node_inputs::NodeInputs;

/// The configuration of both families.
#[derive(Debug, Clone)]
pub struct Config {
    /// The families, in the order of programming.
    pub families: Vec<Family>,
    /// Which connections are masqueraded. nftables mode uses no packet mark and ignores the bit.
    pub masquerade: MasqueradeConfig,
    /// True if NodePorts answer on 127.0.0.0/8 (IPv4 only).
    pub localhost_node_ports: bool,
    /// True if the kernel parameter `nf_conntrack_tcp_be_liberal` is set. With this parameter, no
    /// rule has to drop INVALID packets.
    pub conntrack_tcp_be_liberal: bool,
}

/// The expressions that every rule set needs.
const NEEDED: [Feature; 8] = [
    Feature::Fib,
    Feature::NumberGenerator,
    Feature::Nat,
    Feature::Masquerade,
    Feature::Reject,
    Feature::ConntrackAddresses,
    Feature::DynamicSetDelete,
    Feature::Limit,
];

/// Programs the kernel's nftables.
pub type NftablesDataplane = DualStack<NftablesFamily>;

/// The connection to the kernel. If the kernel supports owned tables, the connection owns the
/// tables of this agent.
#[derive(Debug)]
pub struct Connection {
    connection: Option<Nftables>,
    supports_owners: bool,
    /// Families whose tables this connection has created or adopted.
    adopted: HashSet<Family>,
}

impl Connection {
    fn get(&mut self) -> Result<&mut Nftables, DataplaneError> {
        match &mut self.connection {
            Some(connection) => Ok(connection),
            closed => Ok(closed.insert(Nftables::open().map_err(|error| failure("connecting to nftables", &error))?)),
        }
    }
}

impl KernelHandle for Connection {
    fn reset(&mut self) {
        self.connection = None;
        self.adopted.clear();
    }
}

/// One family.
#[derive(Debug)]
pub struct NftablesFamily {
    ledger: Ledger,
    layout_config: LayoutConfig,
    /// The layout that is in the kernel.
    layout: Layout,
    last_written: u32,
}

/// The table of one family, as read from the kernel.
#[derive(Debug, Default)]
pub struct Found {
    has_table: bool,
    existing: Existing,
    layout: Layout,
    /// True if the table contains something that this agent never writes.
    is_foreign: bool,
}

/// The changes of one step.
#[derive(Debug, Default)]
pub struct Step {
    plan: Plan,
    layout: Option<Layout>,
    /// The layout in the kernel, as a full sync found it.
    found: Option<Layout>,
    /// True if the step first deletes the table, because the table contains something that this
    /// agent never writes.
    replaces_table: bool,
}

fn failure(what: &str, error: &NftablesError) -> DataplaneError {
    let kind = match error {
        NftablesError::Missing => ErrorKind::Unavailable,
        NftablesError::Refused(_) => match error.refusal_code() {
            // Another process owns the table, such as an older agent that has not ended yet.
            Some(libc::EPERM) => ErrorKind::Retry,
            _ => ErrorKind::NeedsFullSync,
        },
        NftablesError::Netlink(_) | NftablesError::Malformed(_) => ErrorKind::Retry,
    };
    DataplaneError::new(kind, format!("{what}: {error}"))
}

impl DualStack<NftablesFamily> {
    /// Connects to nftables and finds out whether the kernel has the needed expressions. Changes
    /// nothing.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] if the kernel lacks nftables or an expression; the message names
    /// it.
    pub fn new(config: &Config) -> Result<Self, DataplaneError> {
        let mut connection = Nftables::open().map_err(|error| failure("mode nftables cannot run", &error))?;
        let mut lacking = |features: &[Feature]| {
            for family in &config.families {
                let table = table_name(*family);
                let support = probe(&mut connection, table.family, features)
                    .map_err(|error| failure("finding out what this kernel's nftables supports", &error))?;
                if let Some((feature, fault)) = support.into_iter().find_map(|one| Some((one.feature, one.fault?))) {
                    return Ok(Some((*family, feature, fault)));
                }
            }
            Ok(None)
        };
        if let Some((family, feature, fault)) = lacking(&NEEDED)? {
            let message = format!("this kernel's nftables lacks {feature:?} in {family}: {fault}");
            return Err(DataplaneError::new(ErrorKind::Unavailable, message));
        }
        let supports_owners = lacking(&[Feature::OwnerAndPersist])?.is_none();
        let kernel = Connection { connection: Some(connection), supports_owners, adopted: HashSet::new() };
        let make = |family| {
            let core = NftablesConfig { masquerade: config.masquerade.clone(), ..NftablesConfig::new(family) };
            let layout_config = LayoutConfig {
                family,
                detector: core.masquerade.detector(family).cloned(),
                node_port_addresses: NodePortAddresses::All,
                localhost_node_ports: config.localhost_node_ports,
                conntrack_tcp_be_liberal: config.conntrack_tcp_be_liberal,
            };
            NftablesFamily { ledger: Ledger::new(core), layout_config, layout: Layout::default(), last_written: 0 }
        };
        Ok(Self::assemble("nftables", kernel, vec![tables()], config.families.clone(), make))
    }
}

impl Dataplane for NftablesFamily {
    type Kernel = Connection;
    type Found = Found;
    type Plan = Step;

    fn family(&self) -> Family {
        self.layout_config.family
    }

    fn configure(&mut self, inputs: &NodeInputs) -> bool {
        let family = self.family();
        let mut core = self.ledger.config().clone();
        core.masquerade.detector_v4.clone_from(&inputs.detector_v4);
        core.masquerade.detector_v6.clone_from(&inputs.detector_v6);
        let layout = LayoutConfig {
            detector: core.masquerade.detector(family).cloned(),
            node_port_addresses: inputs.node_ports(family).clone(),
            ..self.layout_config.clone()
        };
        let is_new = layout != self.layout_config || core != *self.ledger.config();
        self.ledger.set_config(core);
        self.layout_config = layout;
        is_new
    }

    fn prepare(&mut self, _kernel: &mut Connection) -> Result<Vec<String>, DataplaneError> {
        let failed = if self.layout_config.has_loopback_guard() { route_localnet().err() } else { None };
        Ok(failed.into_iter().collect())
    }

    fn read(&mut self, kernel: &mut Connection) -> Result<Found, DataplaneError> {
        let nftables = kernel.get()?;
        read(nftables, self.family()).map_err(|error| failure("reading the table of this agent", &error))
    }

    fn plan_full(&mut self, state: &State, node: &NodeFacts, found: &mut Found) -> Step {
        let mut plan = self.ledger.full(state, node, &found.existing);
        let mut layout = Layout::new(&self.layout_config, self.ledger.shape());
        if found.is_foreign || !found.layout.can_become(&layout) {
            // The table is written anew, in the same transaction.
            found.is_foreign = true;
            found.existing = Existing::default();
            found.layout = Layout::default();
            plan = self.ledger.full(state, node, &found.existing);
            layout = Layout::new(&self.layout_config, self.ledger.shape());
        }
        Step {
            plan,
            layout: Some(layout),
            found: Some(std::mem::take(&mut found.layout)),
            replaces_table: found.has_table && found.is_foreign,
        }
    }

    fn plan(&mut self, state: &State, node: &NodeFacts, dirty: &Dirty) -> Step {
        let plan = self.ledger.changed(state, node, dirty);
        let layout = plan.shape.as_ref().map(|shape| Layout::new(&self.layout_config, shape));
        Step { plan, layout, ..Step::default() }
    }

    fn apply(
        &mut self,
        kernel: &mut Connection,
        step: Step,
        _source: Option<&dyn StateSource>,
    ) -> Result<Report, DataplaneError> {
        let family = self.family();
        let table = table_name(family);
        let Step { plan, layout, found, replaces_table } = step;
        let mut transaction = Transaction::new();
        let mut report = Report { services_planned: plan.services_planned, ..Report::default() };
        let is_full = found.is_some();
        let needs_table = !kernel.adopted.contains(&family);
        if replaces_table {
            report.warnings.push(format!("the table {table} was changed by another program; it is written anew"));
            transaction.delete_table(&table);
        }
        if let Some(found) = found {
            self.layout = found;
        }
        if is_full || needs_table {
            let mut definition = Table::new(table.clone());
            if kernel.supports_owners {
                definition = definition.owned_and_persistent();
            }
            transaction.add_table(&definition);
        }
        let before = transaction.message_count();
        if let Some(layout) = &layout {
            report.objects_written += self.layout.change_to(layout, &table, &mut transaction);
        }
        elements::write(&plan, &table, &mut transaction);
        self.last_written = u32::try_from(plan.add.len() + plan.delete.len()).unwrap_or(u32::MAX);
        report.objects_written = report.objects_written.saturating_add(self.last_written);
        if transaction.message_count() == before && !needs_table && report.warnings.is_empty() {
            return Ok(report);
        }
        kernel.get()?.commit(&transaction).map_err(|error| failure("writing the table of this agent", &error))?;
        kernel.adopted.insert(family);
        if let Some(layout) = layout {
            self.layout = layout;
        }
        Ok(report)
    }

    fn check(&mut self, kernel: &mut Connection) -> Result<Option<String>, DataplaneError> {
        let table = table_name(self.family());
        let chains = kernel.get()?.chains(&table).map_err(|error| failure("listing chains", &error))?;
        let missing = self.layout.chains.keys().find(|name| chains.iter().all(|chain| chain.object.name != **name));
        Ok(if chains.is_empty() {
            Some(format!("the table {table} is missing"))
        } else {
            missing.map(|chain| format!("the chain {chain} of the table {table} is missing"))
        })
    }

    fn matches(&self, found: &Found) -> bool {
        !found.is_foreign && found.layout == self.layout && self.ledger.matches(&found.existing)
    }

    fn statistics(&self) -> Statistics {
        let rules = self.layout.chains.values().map(|chain| chain.rules.len()).sum::<usize>();
        let total = u32::try_from(rules + self.ledger.element_count()).unwrap_or(u32::MAX);
        Statistics {
            rules: vec![TableStatistics { table: "headgate", total, last: self.last_written }],
            no_local: self.ledger.no_local_endpoints(),
            ..Statistics::default()
        }
    }
}

/// Reads the table of a family with all its contents.
fn read(nftables: &mut Nftables, family: Family) -> Result<Found, NftablesError> {
    let name = table_name(family);
    let mut found = Found::default();
    if nftables.table(&name)?.is_none() {
        return Ok(found);
    }
    found.has_table = true;
    for chain in nftables.chains(&name)? {
        let base = chain.object.base;
        found.layout.chains.insert(chain.object.name, ChainContent { base, rules: Vec::new() });
    }
    for rule in nftables.rules(&name, None)? {
        match found.layout.chains.get_mut(&rule.object.chain) {
            Some(chain) => {
                let Rule { expressions, user_data, .. } = rule.object;
                chain.rules.push(RuleContent { expressions, user_data });
            }
            None => found.is_foreign = true,
        }
    }
    for set in nftables.sets(&name)? {
        let set = set.object;
        if !set.flags.dynamic {
            for element in nftables.elements(&name, &set.name)? {
                match &element.data {
                    Some(ElementData::Verdict(verdict)) => {
                        found.layout.verdicts.insert((set.name.clone(), element.key), verdict.clone());
                    }
                    _ => match elements::decode(family, &set.name, &element) {
                        Some(element) => drop(found.existing.elements.insert(element)),
                        None => found.is_foreign = true,
                    },
                }
            }
        }
        found.layout.sets.insert(set.name.clone(), set);
    }
    found.existing.shape = shape(&found);
    Ok(found)
}

/// Returns the shape that the found layout was made for, without the ranges of ClusterIPs. The
/// comparison of all rules detects other ranges.
fn shape(found: &Found) -> Shape {
    let lengths = found.layout.sets.keys().filter_map(|name| name.strip_prefix(elements::names::ADMITTED));
    Shape {
        picks: found.layout.chains.keys().filter_map(|name| layout::pick_of_chain(name)).collect(),
        prefix_lengths: lengths.filter_map(|length| length.parse().ok()).collect(),
        ..Shape::default()
    }
}
