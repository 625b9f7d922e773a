//! Mode userspace: the pools of endpoints among which a proxy on the node chooses.
//!
//! The rules of mode userspace are the rules of mode nftables, or those of mode iptables. While the
//! proxy accepts connections, rules send the TCP connections (with nftables, also the datagrams)
//! for a frontend to the proxy, which finds the [`ProxyPool`] of the frontend. The
//! [`UserspaceLedger`] records the pools and plans only the differences. A pool has the endpoints
//! of one [group of mode nftables](super::nftables).

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::Arc,
};

use super::{
    nftables::{Lookup, NftablesConfig, port_plan},
    rules::names::GateChain,
    shared::{self, StateSource},
};
use crate::{
    behaviours::view::{ServicePortView, service_views},
    model::{Family, LoadBalancing, NodeFacts, Protocol, ProxyProtocol, ServiceKey},
    state::{Dirty, State, frontends::Frontend},
};

/// How the connections to a pool are treated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolSettings {
    /// `namespace/name[:port]`.
    pub name: Arc<str>,
    /// `namespace/name`. The pools of a Service share their counters.
    pub service: Arc<str>,
    /// The algorithm that chooses an endpoint.
    pub load_balancing: LoadBalancing,
    /// The timeout of ClientIP affinity. `None` for no affinity.
    pub affinity_timeout_seconds: Option<u32>,
    /// The header that endpoints get at the beginning of each connection.
    pub proxy_protocol: Option<ProxyProtocol>,
    /// The most open connections of the Service. `None` for no limit.
    pub max_connections: Option<u32>,
}

/// A change of the proxy's table. Each pool has a number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Operation {
    /// Adds a pool, or changes its settings.
    SetPool(u64, PoolSettings),
    /// Adds an endpoint with a weight, or changes its weight.
    SetEndpoint(u64, SocketAddr, u32),
    /// Removes an endpoint.
    RemoveEndpoint(u64, SocketAddr),
    /// Sends the connections or datagrams for an address to a pool, and to no other pool.
    /// [`Lookup`] is the map in which the rules find the address. NodePorts have an unspecified IP
    /// address.
    SetAddress(u64, Lookup, Protocol, SocketAddr),
    /// Removes an address from the pool, if the address still leads to this pool.
    RemoveAddress(u64, Lookup, Protocol, SocketAddr),
    /// Removes a pool, which has no address.
    RemovePool(u64),
    /// Ends the counters of a Service that was removed, by `namespace/name`.
    RemoveService(Arc<str>),
}

/// The changes of one step.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UserspacePlan {
    /// The changes before the rules are written.
    pub before: Vec<Operation>,
    /// The changes after the rules are written, because the old rules may need what is removed.
    pub after: Vec<Operation>,
}

/// Identifies a pool among the pools of a Service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct PoolKey {
    protocol: Protocol,
    port: u16,
    /// True for the endpoints for policy Local.
    is_local: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct ProxyPool {
    number: u64,
    settings: PoolSettings,
    endpoints: BTreeMap<SocketAddr, u32>,
    addresses: BTreeSet<(Lookup, Protocol, SocketAddr)>,
}

type Pools = BTreeMap<PoolKey, ProxyPool>;

/// How the rules choose the listener of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Listening {
    /// Rules of nftables. A listener gets what matches in one map of frontends.
    PerMap,
    /// Rules of iptables. A listener gets the connections that one policy applies to, either those
    /// to addresses or those to NodePorts. [`Lookup::Inside`] and [`Lookup::InsideNodePort`] are
    /// the listeners for policy Cluster, and the others those for policy Local. Datagrams go
    /// straight to endpoints.
    PerPolicy,
}

/// The listener to which a chain of the rules of iptables leads.
#[must_use]
pub fn listener_of(chain: GateChain) -> Lookup {
    match chain {
        GateChain::Cluster => Lookup::Inside,
        GateChain::NodePortCluster => Lookup::InsideNodePort,
        GateChain::Local => Lookup::Service,
        GateChain::NodePortLocal => Lookup::NodePort,
    }
}

/// The pools of one family that the proxy has.
#[derive(Debug)]
pub struct UserspaceLedger {
    config: NftablesConfig,
    listening: Listening,
    /// The pools of each Service. A Service without endpoints has none.
    programmed: HashMap<Arc<ServiceKey>, Pools>,
    last_number: u64,
    /// The Services with endpoints that get no connection because of [`NodeFacts::dialled`].
    refusing: BTreeSet<Arc<ServiceKey>>,
}

impl UserspaceLedger {
    /// Creates a ledger without pools, whose numbers are even for IPv4 and odd for IPv6.
    #[must_use]
    pub fn new(family: Family, listening: Listening) -> Self {
        let last_number = if family == Family::V4 { 0 } else { 1 };
        let (config, programmed) = (NftablesConfig::new(family), HashMap::new());
        Self { config, listening, programmed, last_number, refusing: BTreeSet::new() }
    }

    /// Plans the changes of the dirty Services. The cost depends only on these Services.
    pub fn changed(&mut self, state: &State, node: &NodeFacts, dirty: &Dirty) -> UserspacePlan {
        let mut plan = UserspacePlan::default();
        for key in &dirty.services {
            self.program(state, node, key, &mut plan);
        }
        plan
    }

    /// Plans the changes to the wanted pools. [`Self::changed`] gets what changes meanwhile.
    pub fn full(&mut self, source: &dyn StateSource) -> UserspacePlan {
        let mut plan = UserspacePlan::default();
        let mut keys = shared::services(source);
        keys.extend(self.programmed.keys().filter(|key| keys.binary_search(key).is_err()).cloned().collect::<Vec<_>>());
        for part in shared::parts(&keys) {
            source.look(&mut |state, node, _| {
                part.iter().for_each(|key| self.program(state, node, key, &mut plan));
            });
        }
        plan
    }

    /// The Services whose endpoints [`NodeFacts::dialled`] keeps from getting connections here.
    #[must_use]
    pub fn refusing(&self) -> &BTreeSet<Arc<ServiceKey>> {
        &self.refusing
    }

    fn program(&mut self, state: &State, node: &NodeFacts, key: &Arc<ServiceKey>, plan: &mut UserspacePlan) {
        let programmed = self.programmed.remove(key);
        let is_known = programmed.is_some();
        let old = programmed.unwrap_or_default();
        let mut new = Pools::new();
        let service: Arc<str> = key.to_string().into();
        let entry = state.entry(key).filter(|entry| entry.service().is_some());
        let mut addresses = entry.iter().flat_map(|entry| entry.endpoints().keys());
        let mut refuses = addresses.any(|address| node.dialled.leaves_out(*address));
        let (mut ports, mut node_ports) = (HashSet::new(), HashSet::new());
        for mut view in service_views(state, key, self.config.family, node) {
            // A malformed Service may list a port twice. Only the first entry counts.
            if !self.is_carried(&view) || !ports.insert((view.protocol, view.port)) {
                continue;
            }
            if view.node_port != 0 && !node_ports.insert((view.protocol, view.node_port)) {
                view.node_port = 0;
            }
            for endpoints in [&mut view.cluster_endpoints, &mut view.local_endpoints] {
                let all = endpoints.len();
                endpoints.retain(|endpoint| node.dialled.permits(endpoint.address));
                refuses |= endpoints.len() < all;
            }
            self.add_pools(&service, &view, &old, &mut new);
        }
        self.refusing.remove(key);
        self.refusing.extend(refuses.then(|| Arc::clone(key)));
        for (key, pool) in &new {
            pool.plan_changes(old.get(key), plan);
        }
        for pool in old.iter().filter(|(key, _)| !new.contains_key(key)).map(|(_, pool)| pool) {
            plan.after.extend(pool.addresses.iter().map(|address| pool.remove_address(*address)));
            plan.after.push(Operation::RemovePool(pool.number));
        }
        if entry.is_some() {
            self.programmed.insert(Arc::clone(key), new);
        } else if is_known {
            plan.after.push(Operation::RemoveService(service));
        }
    }

    /// Adds the pools of a port. A pool keeps its number.
    fn add_pools(&mut self, service: &Arc<str>, view: &ServicePortView, old: &Pools, new: &mut Pools) {
        let plan = port_plan(&self.config, view);
        for (is_local, endpoints) in [(false, &plan.cluster), (true, &plan.local)] {
            if endpoints.is_empty() {
                continue;
            }
            let key = PoolKey { protocol: view.protocol, port: view.port, is_local };
            let number = old.get(&key).map_or_else(|| self.next_number(), |pool| pool.number);
            let is_per_policy = self.listening == Listening::PerPolicy;
            let outside = plan.services.iter().filter(|(_, local)| *local == is_local);
            let outside = outside.map(|(frontend, _)| address(*frontend, is_per_policy && !is_local));
            let inside = plan.inside.iter().filter(|_| !is_local).map(|frontend| address(*frontend, true));
            // The rules of iptables take all connections with this port for those of the NodePort.
            let has_one_port = is_per_policy && view.port == view.node_port;
            let node_port = Frontend::NodePort(view.family, view.protocol, view.node_port);
            let node_port = has_one_port.then(|| address(node_port, !is_local));
            let pool = ProxyPool {
                number,
                settings: PoolSettings {
                    name: view.display_name().into(),
                    service: Arc::clone(service),
                    load_balancing: view.load_balancing.unwrap_or(LoadBalancing::Random),
                    affinity_timeout_seconds: view.affinity_timeout_seconds,
                    proxy_protocol: view.proxy_protocol,
                    max_connections: view.max_connections,
                },
                endpoints: endpoints.iter().map(|((ip, port), weight)| ((*ip, *port).into(), weight.get())).collect(),
                addresses: outside.chain(inside).chain(node_port).collect(),
            };
            new.insert(key, pool);
        }
    }

    /// Whether the proxy carries a port. The other ports go straight to endpoints. Datagrams for
    /// NodePorts always do, and records of clients are shared between all addresses of a port.
    fn is_carried(&self, view: &ServicePortView) -> bool {
        match view.protocol {
            _ if view.bypasses_proxy => false,
            Protocol::Tcp => true,
            Protocol::Udp if self.listening == Listening::PerPolicy => false,
            Protocol::Udp => view.node_port == 0 || view.affinity_timeout_seconds.is_none(),
            Protocol::Sctp => false,
        }
    }

    fn next_number(&mut self) -> u64 {
        self.last_number += 2;
        self.last_number
    }
}

impl ProxyPool {
    /// Plans the changes from `before`, the same pool before the step.
    fn plan_changes(&self, before: Option<&Self>, plan: &mut UserspacePlan) {
        let number = self.number;
        if before.is_none_or(|before| before.settings != self.settings) {
            plan.before.push(Operation::SetPool(number, self.settings.clone()));
        }
        let (no_endpoints, no_addresses) = (BTreeMap::new(), BTreeSet::new());
        let old = before.map_or(&no_endpoints, |before| &before.endpoints);
        let changed = self.endpoints.iter().filter(|(endpoint, weight)| old.get(endpoint) != Some(weight));
        plan.before.extend(changed.map(|(endpoint, weight)| Operation::SetEndpoint(number, *endpoint, *weight)));
        let removed = old.keys().filter(|endpoint| !self.endpoints.contains_key(endpoint));
        plan.before.extend(removed.map(|endpoint| Operation::RemoveEndpoint(number, *endpoint)));
        let old = before.map_or(&no_addresses, |before| &before.addresses);
        let added = self.addresses.difference(old);
        plan.before.extend(added.map(|(lookup, protocol, at)| Operation::SetAddress(number, *lookup, *protocol, *at)));
        plan.after.extend(old.difference(&self.addresses).map(|address| self.remove_address(*address)));
    }

    fn remove_address(&self, (lookup, protocol, at): (Lookup, Protocol, SocketAddr)) -> Operation {
        Operation::RemoveAddress(self.number, lookup, protocol, at)
    }
}

/// The address under which the proxy finds the pool of a frontend.
fn address(frontend: Frontend, is_inside: bool) -> (Lookup, Protocol, SocketAddr) {
    match frontend {
        Frontend::Address(address, protocol, port) => {
            (if is_inside { Lookup::Inside } else { Lookup::Service }, protocol, (address, port).into())
        }
        Frontend::NodePort(family, protocol, port) => {
            let any = match family {
                Family::V4 => IpAddr::from(Ipv4Addr::UNSPECIFIED),
                Family::V6 => Ipv6Addr::UNSPECIFIED.into(),
            };
            (if is_inside { Lookup::InsideNodePort } else { Lookup::NodePort }, protocol, (any, port).into())
        }
    }
}
