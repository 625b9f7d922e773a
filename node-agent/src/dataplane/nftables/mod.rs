//! The nftables dataplane: a table per family with a fixed set of rules ([`layout`]), over netlink.
//! [`headgate_core::nftables`] plans the elements. Each step is one transaction, except the first
//! sync ([`bulk`]) and large changes of few Services ([`NftablesPlan::cut`]).

mod datagrams;
pub(super) mod dump;
mod elements;
mod expressions;
mod gate;
mod layout;
mod leftover;
mod quarantine;
mod read;
mod service_counters;
#[cfg(test)]
mod tests;
mod watch;

use std::{
    collections::{BTreeMap, BTreeSet, HashSet, VecDeque},
    io,
    net::SocketAddr,
    sync::Arc,
    time::Instant,
};

use headgate_core::{
    Dirty, Family, LoadBalancing, NodeFacts, ServiceKey, State, StateSource, forwarding,
    iptables::NodePortAddresses,
    nftables::{Element, ElementKey, ExistingElements, Lookup, NftablesConfig, NftablesLedger, NftablesPlan},
    view::MasqueradeConfig,
};
use nftables_netlink::{Nftables, NftablesError, Table, Transaction, probe, refusals};
use tracing::{info, warn};

use super::{
    Dataplane, DataplaneError, DualStack, ErrorKind, Fault, Finding, KernelHandle, Report, RulesDifferences,
    RulesVerification, Statistics, WakeLoop, metrics::DataplaneMetrics,
};
use crate::{node_inputs::NodeInputs, sysctl::route_localnet};
use elements::PART;
use layout::{Layout, LayoutConfig, picks::is_clients_map, table_name};
use quarantine::Rejected;
use watch::foreign_change;

pub(super) use datagrams::{Redirect, can_redirect, change_redirects};
pub(super) use gate::Gate;
pub(crate) use leftover::{kube_proxys_objects, kube_proxys_table, kube_proxys_tables, tables};
pub use nftables_netlink::Feature;
pub use service_counters::{Counts, ServiceCounters, read_counters};
pub(super) use watch::{Syncs, Watch};

/// The configuration of both families.
#[derive(Debug, Clone)]
pub struct NftablesOptions {
    /// The families, in the order of programming.
    pub families: Vec<Family>,
    /// Which connections are masqueraded. nftables mode uses no packet mark and ignores the bit.
    pub masquerade: MasqueradeConfig,
    /// True if NodePorts answer on 127.0.0.0/8 (IPv4 only).
    pub localhost_node_ports: bool,
    /// True if the kernel parameter `nf_conntrack_tcp_be_liberal` is set. With this parameter, no
    /// rule has to drop INVALID packets.
    pub conntrack_tcp_be_liberal: bool,
    /// Count the connections and the traffic of each Service.
    pub counts_services: bool,
    /// A proxy carries TCP connections (mode userspace).
    pub has_proxy: bool,
    /// Own the tables if owners can persist, so that no other program can change them.
    pub owns_tables: bool,
    /// Answer pings to ClusterIPs with the address of the node.
    pub replies_to_ping: bool,
    /// Features that the dataplane does without, as if the kernel lacked them. Tests set this.
    pub unused_features: Vec<Feature>,
}

/// The expressions that every rule set needs.
const NEEDED: [Feature; 7] = [
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

/// One family.
#[derive(Debug)]
pub struct NftablesFamily {
    ledger: NftablesLedger,
    layout_config: LayoutConfig,
    replies_to_ping: bool,
    layout: Layout,
    /// The elements that the kernel rejected in the last full sync.
    rejected: Rejected,
    /// When to write the addresses of the node, because they changed.
    addresses_due_at: Option<Instant>,
    /// The parts of large plans that are not in the kernel yet, in order.
    rest: VecDeque<NftablesPlan>,
}

/// The table of one family, as read from the kernel.
#[derive(Debug, Default)]
pub struct FoundTable {
    has_table: bool,
    existing: ExistingElements,
    layout: Layout,
    /// True if the table contains something that this agent never writes.
    is_foreign: bool,
}

/// The changes of one step.
#[derive(Debug, Default)]
pub struct TableStep {
    plan: NftablesPlan,
    layout: Option<Layout>,
    /// The layout in the kernel, as a full sync found it.
    found: Option<Layout>,
    /// True if the step first deletes the table: it holds what this agent never writes.
    replaces_table: bool,
}

pub(super) fn failure(what: &str, error: &NftablesError) -> DataplaneError {
    let kind = match error {
        NftablesError::Missing => ErrorKind::Unavailable,
        NftablesError::Refused(_) => match error.refusal_code() {
            // Another process owns the table, such as an older agent that has not ended yet.
            Some(libc::EPERM) => ErrorKind::Retry,
            _ => ErrorKind::NeedsFullSync,
        },
        NftablesError::Netlink(_) => ErrorKind::Retry,
    };
    DataplaneError::new(kind, format!("{what}: {error}"))
}

/// Why the table of a family is written anew, as a sentence. `programmed` is what this agent has
/// programmed, and is empty before the first sync.
fn why_replaced(family: Family, programmed: &Layout) -> String {
    let cause = if programmed.chains.is_empty() {
        "differs from what this version of Headgate writes in this mode: another mode or version wrote it, or another program changed it"
    } else {
        "was changed by another program"
    };
    format!("the table {} {cause}; it is written anew", table_name(family))
}

impl DualStack<NftablesFamily> {
    /// Connects to nftables and finds out whether the kernel has the needed expressions. Changes
    /// nothing. Errors: [`ErrorKind::Unavailable`] if the kernel lacks nftables or an expression;
    /// the message names it.
    pub fn new(config: &NftablesOptions) -> Result<Self, DataplaneError> {
        let (kernel, make) = open(config)?;
        Ok(Self::assemble("nftables", kernel, vec![tables()], config.families.clone(), make))
    }
}

/// The transaction of a plan without a new shape, as the dataplane commits it. Counts of
/// instructions use it without a kernel (docs/benchmarks.md).
#[doc(hidden)]
pub fn transaction_of(plan: &NftablesPlan, ledger: &NftablesLedger) -> Transaction {
    let mut transaction = Transaction::new();
    let table = table_name(ledger.config().family);
    elements::write(&plan.delete, elements::after(0, plan.added(ledger)), &table, &mut transaction);
    transaction
}

/// Connects to nftables and finds out whether the kernel has the needed expressions. Returns the
/// connection, and a function that makes the dataplane of a family. Changes nothing. Errors:
/// [`ErrorKind::Unavailable`] if the kernel lacks nftables or an expression; the message names it.
pub(super) fn open(
    config: &NftablesOptions,
) -> Result<(Connection, impl Fn(Family) -> NftablesFamily + use<>), DataplaneError> {
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
    let counting: &[Feature] = if config.counts_services { &[Feature::SetExpressions] } else { &[] };
    if let Some((family, feature, fault)) = lacking(&[&NEEDED[..], counting].concat())? {
        let message = format!("this kernel's nftables lacks {feature:?} in {family}: {fault}");
        return Err(DataplaneError::new(ErrorKind::Unavailable, message));
    }
    let mut has = |feature: Feature| {
        let is_used = !config.unused_features.contains(&feature);
        Ok::<_, DataplaneError>(is_used && lacking(&[feature])?.is_none())
    };
    let (can_hash, has_fib) = (has(Feature::Hash)?, has(Feature::Fib)?);
    let owns_tables = config.owns_tables && has(Feature::OwnerAndPersist)?;
    let kernel = Connection::new(connection, owns_tables);
    let NftablesOptions { masquerade, localhost_node_ports, conntrack_tcp_be_liberal, replies_to_ping, .. } =
        config.clone();
    let NftablesOptions { counts_services, has_proxy, .. } = *config;
    let make = move |family| {
        let masquerade = masquerade.clone();
        let core = NftablesConfig { masquerade, can_hash, counts_services, has_proxy, ..NftablesConfig::new(family) };
        let layout_config = LayoutConfig {
            family,
            detector: core.masquerade.detector(family).cloned(),
            node_port_addresses: NodePortAddresses::All,
            localhost_node_ports,
            interfaces: Vec::new(),
            ping_answered_by: None,
            has_fib,
            conntrack_tcp_be_liberal,
            counts_services,
            listeners: BTreeMap::new(),
        };
        NftablesFamily {
            ledger: NftablesLedger::new(core),
            layout_config,
            layout: Layout::default(),
            rejected: Rejected::new(),
            replies_to_ping,
            addresses_due_at: None,
            rest: VecDeque::new(),
        }
    };
    Ok((kernel, make))
}

impl Dataplane for NftablesFamily {
    type Kernel = Connection;
    type Plan = TableStep;

    const NEEDS_INTERFACES: bool = true;

    fn family(&self) -> Family {
        self.layout_config.family
    }

    fn load_balancing(&self) -> &'static [LoadBalancing] {
        match self.ledger.config().can_hash {
            true => &[LoadBalancing::Random, LoadBalancing::ConsistentHash],
            false => &[LoadBalancing::Random],
        }
    }

    fn configure(&mut self, inputs: &NodeInputs) -> bool {
        let family = self.family();
        let mut core = self.ledger.config().clone();
        core.masquerade.detector_v4.clone_from(&inputs.detector_v4);
        core.masquerade.detector_v6.clone_from(&inputs.detector_v6);
        let layout = LayoutConfig {
            detector: core.masquerade.detector(family).cloned(),
            node_port_addresses: inputs.node_ports(family).clone(),
            interfaces: inputs.interfaces.iter().filter(|address| Family::of(**address) == family).copied().collect(),
            ..self.layout_config.clone()
        };
        let is_new = !layout.has_rules_of(&self.layout_config) || core != *self.ledger.config();
        if layout != self.layout_config && !is_new {
            self.addresses_due_at = Some(Instant::now());
        }
        self.ledger.set_config(core);
        self.layout_config = layout;
        is_new
    }

    fn starts_with_first_services(&self, kernel: &mut Connection) -> Result<bool, DataplaneError> {
        let table = kernel.reader()?.table(&table_name(self.family()));
        Ok(table.map_err(|error| failure("reading the table of this agent", &error))?.is_none())
    }

    fn sync(&mut self, kernel: &mut Connection, source: &dyn StateSource) -> Result<Report, DataplaneError> {
        let failed = if self.layout_config.has_loopback_guard() { route_localnet().err() } else { None };
        if let Some(watch) = kernel.watch() {
            watch.forget(self.family());
        }
        let found = self.read(kernel)?;
        let step = self.plan_full(source, found);
        let mut report = self.apply(kernel, step)?;
        report.warnings.extend(failed);
        Ok(report)
    }

    fn verification(&mut self, kernel: &mut Connection) -> Result<RulesVerification, DataplaneError> {
        let found = self.read(kernel)?;
        let rules = self.layout.differences(&found.layout).len() + usize::from(found.is_foreign);
        let mut ledger = self.ledger.fresh();
        Ok(Box::new(move |source| {
            let plan = ledger.full(source, found.existing);
            let missing: HashSet<Element> = plan.added(&ledger).collect();
            let services = if missing.is_empty() { Vec::new() } else { ledger.services_of(&missing) };
            let count = u32::try_from(rules + missing.len() + plan.delete.len()).unwrap_or(u32::MAX);
            RulesDifferences { count, services: services.into_iter().collect(), is_redivided: false }
        }))
    }

    fn plan(&mut self, state: &State, node: &NodeFacts, dirty: &Dirty) -> TableStep {
        let plan = self.ledger.changed(state, node, dirty);
        let layout = plan.shape.as_ref().map(|shape| Layout::new(&self.layout_config, shape));
        TableStep { plan, layout, ..TableStep::default() }
    }

    /// A large plan is cut. Until all of its parts are in the kernel, plans of other services come
    /// between them, unless they change the same elements.
    fn apply(&mut self, kernel: &mut Connection, mut step: TableStep) -> Result<Report, DataplaneError> {
        if step.found.is_some() {
            self.rest.clear();
            return self.write(kernel, step);
        }
        let services_planned = step.plan.services_planned;
        if step.plan.is_empty() {
            step.plan = self.rest.pop_front().unwrap_or_default();
        } else if !self.rest.is_empty() {
            let keys: HashSet<ElementKey> = step.plan.keys().collect();
            while self.rest.iter().any(|part| part.keys().any(|key| keys.contains(&key))) {
                let plan = self.rest.pop_front().unwrap_or_default();
                self.write(kernel, TableStep { plan, ..TableStep::default() })?;
            }
        }
        let mut parts = step.plan.cut(PART);
        step.plan = parts.pop_front().unwrap_or_default();
        let is_partial = !parts.is_empty();
        self.rest.append(&mut parts);
        let report = self.write(kernel, step)?;
        Ok(Report { services_planned, is_partial, has_rest: !self.rest.is_empty(), ..report })
    }

    fn check(&mut self, kernel: &mut Connection) -> Result<Finding, DataplaneError> {
        let (family, table) = (self.family(), table_name(self.family()));
        let chains = kernel.reader()?.chains(&table).map_err(|error| failure("listing chains", &error))?;
        let missing = self.layout.chains.keys().find(|name| chains.iter().all(|chain| chain.object.name != **name));
        if chains.is_empty() {
            return Ok(Finding::Changed(format!("the table {table} is missing")));
        }
        if let Some(chain) = missing {
            return Ok(Finding::Changed(format!("the chain {chain} of the table {table} is missing")));
        }
        // Before the first sync, the records are empty.
        let Some(watch) = kernel.watch().filter(|_| !self.layout.chains.is_empty()) else { return Ok(Finding::Intact) };
        let is_lost = watch.take_lost(family);
        let without_change = if is_lost { Finding::Unknown } else { Finding::Intact };
        Ok(watch.foreign_change(family).map_or(without_change, Finding::Changed))
    }

    fn decode(&mut self, kernel: &mut Connection) -> Result<forwarding::Table, DataplaneError> {
        let (family, reader) = (self.family(), kernel.reader()?);
        let table = table_name(family);
        let dump = dump::read(reader, &table).map_err(|error| failure("reading the table of this agent", &error))?;
        let LayoutConfig { detector, listeners, .. } = &self.layout_config;
        let gate = (!listeners.is_empty()).then_some(elements::names::GATE);
        Ok(match dump {
            Some(dump) => headgate_oracle::nftables::decode(&dump, detector.as_ref(), gate),
            None => {
                let problem = forwarding::Problem::Broken(format!("the table {table} is missing"));
                forwarding::Table { problems: [problem].into(), ..forwarding::Table::new(family) }
            }
        })
    }

    fn statistics(&self) -> Statistics {
        Statistics { no_local: self.ledger.no_local_endpoints(), ..Statistics::default() }
    }

    fn due_at(&self) -> Option<Instant> {
        self.addresses_due_at
    }

    /// Writes the addresses of the node. Compares no elements of Services.
    fn maintain(&mut self, kernel: &mut Connection, _now: Instant) -> Result<(), DataplaneError> {
        // Before the first full sync, the kernel may have the rules of an earlier run.
        if self.addresses_due_at.take().is_none() || self.layout.chains.is_empty() {
            return Ok(());
        }
        let (family, layout) = (self.family(), Layout::new(&self.layout_config, self.ledger.shape()));
        let mut transaction = Transaction::new();
        self.layout.change_to(&layout, &table_name(family), &mut transaction);
        if transaction.message_count() > 0 {
            kernel
                .commit(family, &transaction)
                .map_err(|error| failure("writing the addresses of this node", &error))?;
        }
        self.layout = layout;
        Ok(())
    }

    fn find_faults(
        &mut self,
        kernel: &mut Connection,
        source: &dyn StateSource,
        suspects: Option<&BTreeSet<Arc<ServiceKey>>>,
    ) -> Result<Vec<Fault>, DataplaneError> {
        self.search(kernel, source, suspects)
    }

    fn set_quarantined(&mut self, services: &BTreeSet<Arc<ServiceKey>>) {
        self.ledger.set_quarantined(services);
    }
}

impl NftablesFamily {
    fn write(&mut self, kernel: &mut Connection, step: TableStep) -> Result<Report, DataplaneError> {
        let family = self.family();
        let table = table_name(family);
        let TableStep { mut plan, layout, found, replaces_table } = step;
        // The transaction that deletes a foreign table also writes all endpoints.
        let written = if replaces_table { 0 } else { self.write_endpoints(kernel, &plan)? };
        let mut transaction = Transaction::new();
        let mut report = Report { services_planned: plan.services_planned, ..Report::default() };
        let is_full = found.is_some();
        let needs_table = !kernel.has_adopted(family);
        if replaces_table {
            report.warnings.push(why_replaced(family, &self.layout));
            transaction.delete_table(&table);
        }
        if let Some(found) = found {
            self.layout = found;
        }
        if is_full || needs_table {
            transaction.add_table(&kernel.table(family));
        }
        let before = transaction.message_count();
        if let Some(layout) = &layout {
            // The kernel deletes a set with all its elements.
            plan.delete.retain(|element| layout.sets.contains_key(&*elements::set_of(element)));
            report.objects_written += self.layout.change_to(layout, &table, &mut transaction);
        }
        let added = elements::after(written, plan.added(&self.ledger));
        elements::write(&plan.delete, added, &table, &mut transaction);
        let written = u32::try_from(plan.added_count(&self.ledger) + plan.delete.len()).unwrap_or(u32::MAX);
        report.objects_written = report.objects_written.saturating_add(written);
        if transaction.message_count() == before && !needs_table && report.warnings.is_empty() {
            self.confirm();
            return Ok(report);
        }
        if let Err(error) = kernel.commit(family, &transaction) {
            return Err(self.explain(&transaction, is_full, &error));
        }
        if let Some(layout) = layout {
            self.layout = layout;
        }
        self.confirm();
        Ok(report)
    }

    /// Records that the kernel has accepted all plans, if no part of a plan is left.
    fn confirm(&mut self) {
        if self.rest.is_empty() {
            self.ledger.confirm();
        }
    }

    /// Makes the rules send TCP connections to the listeners of a proxy while the gate is closed.
    /// Datagrams go to listeners with the same IP address: see [`change_redirects`].
    pub(super) fn set_listeners(&mut self, listeners: BTreeMap<Lookup, SocketAddr>) {
        self.layout_config.listeners = listeners;
    }

    /// Reads all objects of this family, and counts the clients in the maps of affinity.
    fn read(&self, kernel: &mut Connection) -> Result<FoundTable, DataplaneError> {
        let (family, owns_tables) = (self.family(), kernel.owns_tables());
        let (metrics, reader) = (kernel.metrics.clone(), kernel.reader()?);
        let failed = |error| failure("reading the table of this agent", &error);
        let found = read::everything(reader, family, owns_tables).map_err(failed)?;
        for map in found.layout.sets.values().filter(|set| is_clients_map(&set.name)) {
            let mut clients = 0;
            reader.each_element(&table_name(family), &map.name, |_| clients += 1).map_err(failed)?;
            metrics.set_affinity(family, &map.name, clients, map.size.unwrap_or_default());
        }
        Ok(found)
    }

    fn plan_full(&mut self, source: &dyn StateSource, mut found: FoundTable) -> TableStep {
        self.addresses_due_at = None;
        let family = self.family();
        source.look(&mut |_, node, _| {
            let own = node.addresses.iter().find(|address| Family::of(**address) == family);
            self.layout_config.ping_answered_by = own.filter(|_| self.replies_to_ping).copied();
        });
        let mut plan = self.ledger.full(source, found.existing);
        let mut layout = Layout::new(&self.layout_config, self.ledger.shape());
        if found.is_foreign || !found.layout.can_become(&layout) {
            // The table is written anew, in the same transaction.
            found.is_foreign = true;
            found.layout = Layout::default();
            plan = self.ledger.full(source, ExistingElements::default());
            layout = Layout::new(&self.layout_config, self.ledger.shape());
        }
        TableStep {
            plan,
            layout: Some(layout),
            found: Some(found.layout),
            replaces_table: found.has_table && found.is_foreign,
        }
    }
}

// The connections to the kernel.

/// Two connections to the kernel: one writes and owns the tables, the other one reads. An error of
/// a read closes only the latter, so that the tables keep their owner.
pub struct Connection {
    writer: Nftables,
    reader: Option<Nftables>,
    owns_tables: bool,
    /// True after an error that leaves it open whether the connection still works.
    is_writer_in_doubt: bool,
    /// Families whose tables this connection has created or adopted.
    adopted: HashSet<Family>,
    watch: Option<Watch>,
    wake: Option<WakeLoop>,
    metrics: DataplaneMetrics,
}

impl Connection {
    /// Uses `writer` for changes. With `owns_tables`, it owns the tables that it writes.
    fn new(writer: Nftables, owns_tables: bool) -> Self {
        Self {
            writer,
            reader: None,
            owns_tables,
            is_writer_in_doubt: false,
            adopted: HashSet::new(),
            watch: None,
            wake: None,
            metrics: DataplaneMetrics::default(),
        }
    }

    fn owns_tables(&self) -> bool {
        self.owns_tables
    }

    fn has_adopted(&self, family: Family) -> bool {
        self.adopted.contains(&family)
    }

    fn table(&self, family: Family) -> Table {
        let table = Table::new(table_name(family));
        if self.owns_tables { table.owned_and_persistent() } else { table }
    }

    fn reader(&mut self) -> Result<&mut Nftables, DataplaneError> {
        match &mut self.reader {
            Some(reader) => Ok(reader),
            closed => Ok(closed.insert(Nftables::open().map_err(|error| failure("connecting to nftables", &error))?)),
        }
    }

    /// Executes a transaction that adopts or changes the table of a family.
    fn commit(&mut self, family: Family, transaction: &Transaction) -> Result<(), NftablesError> {
        let started = Instant::now();
        let result = self.writer.commit(transaction);
        self.metrics.transaction_duration.observe(started.elapsed().as_secs_f64());
        match &result {
            Ok(()) => drop(self.adopted.insert(family)),
            Err(NftablesError::Netlink(error)) if error.is_transient() || error.refusal_code().is_some() => {}
            Err(NftablesError::Netlink(_)) => self.is_writer_in_doubt = true,
            Err(_) => {}
        }
        result
    }

    fn refusals(&mut self, transaction: &Transaction) -> Result<Vec<nftables_netlink::Fault>, NftablesError> {
        refusals(&mut self.writer, transaction)
    }

    /// Replaces the connection that writes, if it no longer works, and adopts the tables at once.
    fn check_writer(&mut self) -> Result<(), NftablesError> {
        if self.writer.generation().is_ok() {
            return Ok(());
        }
        self.writer = Nftables::open()?;
        // The notifications that the watch receives must leave out the new connection's changes.
        self.watch = None;
        if let Err(error) = self.start_watch() {
            warn!(%error, "cannot follow the changes of other programs");
        }
        let adopted: Vec<Family> = self.adopted.drain().collect();
        for family in adopted {
            let mut transaction = Transaction::new();
            transaction.add_table(&self.table(family));
            self.commit(family, &transaction)?;
        }
        info!("opened another connection to nftables and adopted the tables");
        Ok(())
    }
}

impl Connection {
    /// What notifications say about the tables; `None` if the kernel sends none.
    fn watch(&self) -> Option<&Watch> {
        self.watch.as_ref()
    }

    fn start_watch(&mut self) -> Result<(), io::Error> {
        if let Some(wake) = &self.wake {
            let (own_port, wake) = (Some(self.writer.port()), Arc::clone(wake));
            self.watch = Some(Watch::start(own_port, Syncs::default(), foreign_change, wake, self.metrics.clone())?);
        }
        Ok(())
    }
}

impl KernelHandle for Connection {
    fn follow(&mut self, wake: WakeLoop, metrics: &DataplaneMetrics) -> Result<(), DataplaneError> {
        self.metrics = metrics.clone();
        self.wake = Some(wake);
        self.start_watch()
            .map_err(|error| DataplaneError::new(ErrorKind::Retry, format!("subscribing to nftables: {error}")))
    }

    fn reset(&mut self) {
        self.reader = None;
        if self.is_writer_in_doubt {
            let checked = self.check_writer();
            self.is_writer_in_doubt = checked.is_err();
            if let Err(error) = checked {
                warn!(%error, "cannot replace the connection to nftables; the next write adopts the tables");
            }
        }
    }
}
