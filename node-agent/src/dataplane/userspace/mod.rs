//! The userspace dataplane (`docs/userspace.md`): the rules of nftables or iptables straight to
//! endpoints, and a proxy in this process, to which further rules lead TCP connections, with
//! nftables also datagrams, while the gate is closed. The proxy keeps it closed (`proxy.rs`).

mod access_log;
mod capacity;
mod datagrams;
mod gate;
mod proxy;
mod route;
mod rules;
mod set_gate;
mod sockets;

pub(crate) use route::routes;
pub(crate) use set_gate::gates;

use std::{
    cell::RefCell,
    collections::BTreeSet,
    sync::Arc,
    time::{Duration, Instant},
};

use headgate_core::{
    Demand, Dirty, Family, LoadBalancing, NodeFacts, ServiceKey, State, StateSource, forwarding,
    userspace::{Operation, UserspaceLedger, UserspacePlan},
};
use headgate_userspace::{TcpSettings, UdpSettings};

use self::{
    datagrams::DatagramListeners,
    gate::{Connect, connect_to_nftables},
    proxy::Proxy,
    rules::GatedRules,
    set_gate::SetGate,
};
use super::{
    Dataplane, DataplaneError, Degradation, DualStack, Fault, Finding, Leftover, Report, RulesVerification, Statistics,
    iptables::{self, IptablesFamily, Variant},
    nftables::{self, NftablesFamily},
    xtables::{self, Flushes},
};
use crate::node_inputs::NodeInputs;

/// The rules that lead to the proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum Rules {
    /// Rules of nftables, or of iptables if the node cannot run those of nftables.
    #[default]
    Auto,
    /// Rules of nftables.
    Nftables,
    /// Rules of iptables.
    Iptables,
}

/// The settings of the proxy.
#[derive(Debug, Clone, Copy)]
pub struct ProxySettings {
    /// True if the log has a line for each connection that ends.
    pub has_access_log: bool,
    /// After this time without an answer of an endpoint, the proxy tries the next endpoint.
    pub connect_timeout: Duration,
    /// A connection without bytes for this time is reset.
    pub idle_timeout: Duration,
    /// A UDP session without a datagram for this time ends.
    pub udp_idle_timeout: Duration,
}

/// No access log, and the timeouts of the engine.
impl Default for ProxySettings {
    fn default() -> Self {
        let TcpSettings { connect_timeout, idle_timeout, .. } = TcpSettings::default();
        let udp_idle_timeout = UdpSettings::default().idle_timeout;
        Self { has_access_log: false, connect_timeout, idle_timeout, udp_idle_timeout }
    }
}

/// One family.
#[derive(Debug)]
pub struct UserspaceFamily<R> {
    /// The rules that lead to endpoints, and the redirects.
    direct: R,
    ledger: UserspaceLedger,
    proxy: Arc<Proxy>,
    datagrams: DatagramListeners,
    /// What the proxy removes after the next write of rules.
    obsolete: Vec<Operation>,
}

/// The changes of one step.
#[derive(Debug)]
pub struct ProxiedStep<P> {
    direct: P,
    pools: UserspacePlan,
}

/// Connects to nftables and starts the proxy behind its rules, which listens and gets no
/// connections yet. Changes no rules. Errors: [`super::ErrorKind::Unavailable`] if the kernel lacks
/// nftables or an expression, or refuses the proxy a socket or a thread. The message names it.
pub fn over_nftables(
    config: nftables::NftablesOptions,
    proxy: ProxySettings,
) -> Result<DualStack<UserspaceFamily<NftablesFamily>>, DataplaneError> {
    // The proxy changes the gate with a connection of its own, so no connection owns the tables.
    // The rules would not count the packets of connections that the proxy carries.
    let config = nftables::NftablesOptions { owns_tables: false, counts_services: false, has_proxy: true, ..config };
    let (kernel, make) = nftables::open(&config)?;
    let own = vec![nftables::tables()];
    assemble("userspace", kernel, own, config.families, (connect_to_nftables, proxy), make)
}

/// Finds the programs of iptables and starts the proxy behind their rules, which listens and gets
/// no connections yet. Changes no rules in chains that receive packets.
/// Errors: [`super::ErrorKind::Unavailable`] if this machine lacks iptables or IP sets, or refuses
/// the proxy a socket or a thread. The message names it.
pub fn over_iptables(
    config: &iptables::IptablesOptions,
    proxy: ProxySettings,
) -> Result<DualStack<UserspaceFamily<IptablesFamily>>, DataplaneError> {
    let variant = xtables::choose(config.variant)?;
    set_gate::require(&config.families, variant)?;
    let name = if variant == Variant::Legacy { "userspace-iptables-legacy" } else { "userspace-iptables-nft" };
    let make = |family| IptablesFamily::new(config, family, variant);
    // The rules come before the set that they refer to.
    let own = xtables::leftovers(variant).into_iter().chain([gates()]).collect();
    assemble(name, Flushes::of(variant), own, config.families.clone(), (SetGate::connect, proxy), make)
}

fn assemble<R: GatedRules>(
    name: &'static str,
    rules: R::Kernel,
    mut own: Vec<Leftover>,
    families: Vec<Family>,
    (connect, settings): (Connect, ProxySettings),
    make_direct: impl Fn(Family) -> R,
) -> Result<DualStack<UserspaceFamily<R>>, DataplaneError> {
    let (proxy, listeners) = Proxy::start(&families, connect, settings)?;
    let proxy = Arc::new(proxy);
    let carrier = Arc::clone(&proxy);
    let make = |family| {
        let mut direct = make_direct(family);
        direct.set_listeners(listeners.get(&family).cloned().unwrap_or_default());
        UserspaceFamily {
            direct,
            ledger: UserspaceLedger::new(family, R::LISTENING),
            proxy: Arc::clone(&proxy),
            datagrams: DatagramListeners::new(family),
            obsolete: Vec::new(),
        }
    };
    own.push(routes());
    Ok(DualStack::assemble(name, rules, own, families, make).with_proxy(carrier))
}

impl<R: GatedRules> Dataplane for UserspaceFamily<R> {
    type Kernel = R::Kernel;
    type Plan = ProxiedStep<R::Plan>;

    /// The proxy needs the addresses of the node.
    const NEEDS_INTERFACES: bool = true;
    const HAS_PROXY: bool = true;
    const OBJECTS_AT_ONCE: usize = R::OBJECTS_AT_ONCE;

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

    fn starts_with_first_services(&self, kernel: &mut R::Kernel) -> Result<bool, DataplaneError> {
        self.direct.starts_with_first_services(kernel)
    }

    fn sync(&mut self, kernel: &mut R::Kernel, source: &dyn StateSource) -> Result<Report, DataplaneError> {
        self.direct.prepare_gate()?;
        let pools = self.ledger.full(source);
        let Self { ledger, proxy, datagrams, obsolete, .. } = self;
        let proxied = RefCell::new(Proxied { ledger, proxy, datagrams, obsolete });
        proxied.borrow_mut().execute(pools);
        let report = self.direct.sync(kernel, &Ahead { source, proxied })?;
        self.finish(kernel, true)?;
        self.proxy.serve(self.family());
        Ok(report)
    }

    fn verification(&mut self, kernel: &mut R::Kernel) -> Result<RulesVerification, DataplaneError> {
        self.direct.verification(kernel)
    }

    fn plan(&mut self, state: &State, node: &NodeFacts, dirty: &Dirty) -> ProxiedStep<R::Plan> {
        ProxiedStep { direct: self.direct.plan(state, node, dirty), pools: self.ledger.changed(state, node, dirty) }
    }

    /// The proxy knows a frontend before the rules lead there, and forgets it afterwards.
    fn apply(
        &mut self,
        kernel: &mut R::Kernel,
        ProxiedStep { direct, pools }: ProxiedStep<R::Plan>,
    ) -> Result<Report, DataplaneError> {
        self.obsolete.extend(pools.after);
        self.proxy.execute(pools.before, &mut self.datagrams);
        let report = self.direct.apply(kernel, direct)?;
        self.finish(kernel, false)?;
        Ok(report)
    }

    fn check(&mut self, kernel: &mut R::Kernel) -> Result<Finding, DataplaneError> {
        self.direct.check(kernel)
    }

    fn decode(&mut self, kernel: &mut R::Kernel) -> Result<forwarding::Table, DataplaneError> {
        self.direct.decode(kernel)
    }

    fn due_at(&self) -> Option<Instant> {
        self.direct.due_at()
    }

    fn maintain(&mut self, kernel: &mut R::Kernel, now: Instant) -> Result<(), DataplaneError> {
        self.direct.maintain(kernel, now)
    }

    fn find_faults(
        &mut self,
        kernel: &mut R::Kernel,
        source: &dyn StateSource,
        suspects: Option<&BTreeSet<Arc<ServiceKey>>>,
    ) -> Result<Vec<Fault>, DataplaneError> {
        self.direct.find_faults(kernel, source, suspects)
    }

    fn set_quarantined(&mut self, services: &BTreeSet<Arc<ServiceKey>>) {
        self.direct.set_quarantined(services);
    }

    fn statistics(&self) -> Statistics {
        self.direct.statistics()
    }

    fn degraded(&self, demand: &Demand) -> Vec<Degradation> {
        let sctp = demand.of(self.family()).with_sctp;
        let refused = (sctp > 0).then(|| format!("mode userspace refuses connections of SCTP, and {sctp} Services have a port of SCTP: use mode nftables on this node, or remove the ports"));
        let services = self.ledger.refusing().clone();
        let sentence = "the proxy of mode userspace does not connect to some endpoints, because their addresses are in no range of pods, or are addresses of the node or of metadata servers: if they are pods, add their range to --pod-ranges; else remove them from the EndpointSlices".to_owned();
        let left_out = (!services.is_empty()).then_some(Degradation { sentence, services });
        let problems = self.proxy.problem().into_iter().chain(self.datagrams.problem());
        problems.chain(refused).map(Into::into).chain(left_out).chain(self.direct.degraded(demand)).collect()
    }
}

impl<R: GatedRules> UserspaceFamily<R> {
    /// Removes what the rules do not lead to any more, and redirects datagrams.
    fn finish(&mut self, kernel: &mut R::Kernel, is_full: bool) -> Result<(), DataplaneError> {
        self.proxy.execute(std::mem::take(&mut self.obsolete), &mut self.datagrams);
        self.datagrams.write(&self.proxy.udp, &self.direct, kernel, is_full)
    }
}

/// The part of a family that the proxy needs.
struct Proxied<'a> {
    ledger: &'a mut UserspaceLedger,
    proxy: &'a Proxy,
    datagrams: &'a mut DatagramListeners,
    obsolete: &'a mut Vec<Operation>,
}

impl Proxied<'_> {
    fn execute(&mut self, pools: UserspacePlan) {
        self.obsolete.extend(pools.after);
        self.proxy.execute(pools.before, self.datagrams);
    }
}

/// A source for full syncs of rules. Changes reach the proxy before the rules.
struct Ahead<'a> {
    source: &'a dyn StateSource,
    proxied: RefCell<Proxied<'a>>,
}

impl StateSource for Ahead<'_> {
    fn look(&self, read: &mut dyn FnMut(&State, &NodeFacts, &Dirty)) {
        let (mut proxied, mut pools) = (self.proxied.borrow_mut(), UserspacePlan::default());
        self.source.look(&mut |state, node, changed| {
            pools = proxied.ledger.changed(state, node, changed);
            read(state, node, changed);
        });
        proxied.execute(pools);
    }
}
