//! The userspace dataplane: the rules of the nftables dataplane, and a proxy in this process that
//! carries TCP connections and datagrams.
//!
//! The rules that lead straight to endpoints are always installed. A constant number of further
//! rules leads TCP connections and datagrams to the proxy while the gate is closed. The proxy keeps
//! the gate closed while it accepts connections (`proxy.rs`). `docs/userspace.md` shows the way of
//! a packet.

mod access_log;
mod datagrams;
mod proxy;
mod route;
mod sockets;

pub(crate) use route::routes;

use std::{collections::BTreeSet, sync::Arc, time::Instant};

use headgate_core::{
    Demand, Dirty, Family, LoadBalancing, NodeFacts, ServiceKey, State,
    userspace::{Ledger, Operation, Plan},
};

use self::{datagrams::Listeners, proxy::Proxy};
use super::{
    ConnectionProxy, Dataplane, DataplaneError, Degradation, DualStack, Fault, FindFaults, KernelHandle, Maintain,
    Report, StateSource, Statistics, Wake,
    metrics::DataplaneMetrics,
    nftables::{self, Connection, Found, NftablesFamily},
};
use crate::node_inputs::NodeInputs;

/// Programs the kernel's nftables, and a proxy.
pub type UserspaceDataplane = DualStack<UserspaceFamily>;

/// The configuration of both families.
#[derive(Debug, Clone)]
pub struct Config {
    /// The configuration of the rules.
    pub nftables: nftables::Config,
    /// True if the log has a line for each connection that ends.
    pub has_access_log: bool,
}

/// The connection to nftables, and the proxy that both families share.
pub struct UserspaceKernel {
    nftables: Connection,
    proxy: Arc<Proxy>,
}

impl KernelHandle for UserspaceKernel {
    fn reset(&mut self) {
        self.nftables.reset();
    }

    fn follow(&mut self, wake: Wake, metrics: &DataplaneMetrics) -> Result<(), DataplaneError> {
        self.nftables.follow(wake, metrics)
    }

    fn proxy(&self) -> Option<Arc<dyn ConnectionProxy>> {
        Some(Arc::clone(&self.proxy) as Arc<dyn ConnectionProxy>)
    }
}

/// One family.
#[derive(Debug)]
pub struct UserspaceFamily {
    /// The rules that lead to endpoints, and the redirects.
    direct: NftablesFamily,
    ledger: Ledger,
    proxy: Arc<Proxy>,
    /// The listeners for datagrams.
    datagrams: Listeners,
    /// What the proxy removes after the next write of rules.
    obsolete: Vec<Operation>,
}

/// The changes of one step.
#[derive(Debug)]
pub struct Step {
    direct: nftables::Step,
    pools: Plan,
}

impl DualStack<UserspaceFamily> {
    /// Connects to nftables and starts the proxy, which listens and gets no connections yet.
    /// Changes no rules.
    ///
    /// # Errors
    /// [`super::ErrorKind::Unavailable`] if the kernel lacks nftables or an expression, or refuses
    /// the proxy a socket or a thread. The message names it.
    pub fn new(config: &Config) -> Result<Self, DataplaneError> {
        let Config { nftables: config, has_access_log } = config;
        // The proxy changes the gate with a connection of its own, so no connection owns the
        // tables. The rules would not count the packets of connections that the proxy carries.
        let config = nftables::Config { owns_tables: false, counts_services: false, has_proxy: true, ..config.clone() };
        let (nftables, make_direct) = nftables::open(&config)?;
        let (proxy, listeners) = Proxy::start(&config.families, *has_access_log)?;
        let proxy = Arc::new(proxy);
        let kernel = UserspaceKernel { nftables, proxy: Arc::clone(&proxy) };
        let make = |family| {
            let mut direct = make_direct(family);
            direct.set_listeners(listeners.get(&family).cloned().unwrap_or_default());
            UserspaceFamily {
                direct,
                ledger: Ledger::new(family),
                proxy: Arc::clone(&proxy),
                datagrams: Listeners::new(family),
                obsolete: Vec::new(),
            }
        };
        let own = vec![nftables::tables(), routes()];
        Ok(Self::assemble("userspace", kernel, own, config.families.clone(), make))
    }
}

impl Dataplane for UserspaceFamily {
    type Kernel = UserspaceKernel;
    type Found = Found;
    type Plan = Step;

    const NEEDS_INTERFACES: bool = NftablesFamily::NEEDS_INTERFACES;
    const HAS_PROXY: bool = true;

    fn family(&self) -> Family {
        self.direct.family()
    }

    fn load_balancing(&self) -> &'static [LoadBalancing] {
        &LoadBalancing::ALL
    }

    fn configure(&mut self, inputs: &NodeInputs) -> bool {
        self.proxy.set_node_addresses(&inputs.interfaces);
        self.direct.configure(inputs)
    }

    fn prepare(&mut self, kernel: &mut UserspaceKernel) -> Result<Vec<String>, DataplaneError> {
        route::add(self.family())?;
        self.direct.prepare(&mut kernel.nftables)
    }

    fn starts_with_first_services(&self, kernel: &mut UserspaceKernel) -> Result<bool, DataplaneError> {
        self.direct.starts_with_first_services(&mut kernel.nftables)
    }

    fn read(&mut self, kernel: &mut UserspaceKernel) -> Result<Found, DataplaneError> {
        self.direct.read(&mut kernel.nftables)
    }

    fn plan_full(&mut self, state: &State, node: &NodeFacts, found: &mut Found) -> Step {
        Step { direct: self.direct.plan_full(state, node, found), pools: self.ledger.full(state, node) }
    }

    fn plan(&mut self, state: &State, node: &NodeFacts, dirty: &Dirty) -> Step {
        Step { direct: self.direct.plan(state, node, dirty), pools: self.ledger.changed(state, node, dirty) }
    }

    /// The proxy knows a frontend before the rules lead there, and forgets the frontend after the
    /// rules do not.
    fn apply(
        &mut self,
        kernel: &mut UserspaceKernel,
        step: Step,
        source: Option<&dyn StateSource>,
    ) -> Result<Report, DataplaneError> {
        let Step { direct, pools } = step;
        self.obsolete.extend(pools.after);
        self.proxy.execute(pools.before, &mut self.datagrams);
        let report = self.direct.apply(&mut kernel.nftables, direct, source)?;
        self.proxy.execute(std::mem::take(&mut self.obsolete), &mut self.datagrams);
        self.proxy.write_redirects(&mut self.datagrams, &mut kernel.nftables, source.is_some())?;
        if source.is_some() {
            self.proxy.serve(self.family());
        }
        Ok(report)
    }

    fn check(&mut self, kernel: &mut UserspaceKernel) -> Result<Option<String>, DataplaneError> {
        self.direct.check(&mut kernel.nftables)
    }

    fn compare(&mut self, kernel: &mut UserspaceKernel) -> Result<Vec<String>, DataplaneError> {
        self.direct.compare(&mut kernel.nftables)
    }

    fn maintenance(&mut self) -> Option<&mut dyn Maintain<UserspaceKernel>> {
        Some(self)
    }

    fn fault_finding(&mut self) -> Option<&mut dyn FindFaults<UserspaceKernel>> {
        Some(self)
    }

    fn statistics(&self) -> Statistics {
        self.direct.statistics()
    }

    fn degraded(&self, demand: &Demand) -> Vec<Degradation> {
        let sctp = demand.of(self.family()).with_sctp;
        let refused = (sctp > 0).then(|| format!("mode userspace refuses connections of SCTP, and {sctp} Services have a port of SCTP: use mode nftables on this node, or remove the ports"));
        let problems = self.proxy.problem().into_iter().chain(self.datagrams.problem());
        problems.chain(refused).map(Into::into).collect()
    }
}

impl Maintain<UserspaceKernel> for UserspaceFamily {
    fn due_at(&self) -> Option<Instant> {
        self.direct.due_at()
    }

    fn maintain(&mut self, kernel: &mut UserspaceKernel, now: Instant) -> Result<(), DataplaneError> {
        self.direct.maintain(&mut kernel.nftables, now)
    }
}

impl FindFaults<UserspaceKernel> for UserspaceFamily {
    fn find_faults(
        &mut self,
        kernel: &mut UserspaceKernel,
        source: &dyn StateSource,
        suspects: Option<&BTreeSet<Arc<ServiceKey>>>,
    ) -> Result<Vec<Fault>, DataplaneError> {
        self.direct.find_faults(&mut kernel.nftables, source, suspects)
    }

    fn set_quarantined(&mut self, services: &BTreeSet<Arc<ServiceKey>>) {
        self.direct.set_quarantined(services);
    }
}
