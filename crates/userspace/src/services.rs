//! The table of Services, which all threads read and the caller changes. An entry has one set of
//! endpoints: a port of a Kubernetes Service, or that port with the endpoints of this node only, as
//! for `externalTrafficPolicy: Local`. A change costs O(log n) of the endpoints, and takes effect
//! for the next connection.

use std::{
    collections::{BTreeMap, HashMap, HashSet, hash_map::Entry},
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
        atomic::{AtomicU64, Ordering},
    },
};

use crate::{
    accounts::{Account, Accounts},
    balance::{Algorithm, EndpointKey, Picked, Pool},
    proxy_header::ProxyVersion,
    stats::ServiceStats,
};

/// The number that the caller gives to a Service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ServiceId(pub u64);

/// The protocol of an address of a Service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcp => "TCP",
            Self::Udp => "UDP",
        })
    }
}

/// A space of addresses. A listener finds the Services of one scope, so the same address can lead
/// to different Services, depending on the listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Scope(pub u8);

/// An address as the table has it: without IPv6 details, and IPv4 for IPv4-mapped addresses.
pub(crate) fn plain(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// The address that stands for all addresses of a family, with the same port.
fn any_address(address: SocketAddr) -> SocketAddr {
    let any = if address.is_ipv4() { IpAddr::from(Ipv4Addr::UNSPECIFIED) } else { Ipv6Addr::UNSPECIFIED.into() };
    SocketAddr::new(any, address.port())
}

/// How a Service treats its connections.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ServiceSettings {
    /// The name for lists and logs, such as `default/web:http`.
    pub name: Arc<str>,
    /// The account of the Service, such as `default/web`. Services with the same account share
    /// their counters and their limit of connections. A Service keeps its first account.
    pub account: Arc<str>,
    /// How the Service chooses endpoints.
    pub algorithm: Algorithm,
    /// The timeout of ClientIP affinity. `None` means no affinity. Each connection renews it.
    pub affinity_seconds: Option<u32>,
    /// The most open connections and UDP sessions of the account. `None` means no limit.
    pub max_connections: Option<u32>,
    /// The header that endpoints get at the beginning of each TCP connection.
    pub proxy_header: Option<ProxyVersion>,
}

#[derive(Debug)]
pub(crate) struct Service {
    pub(crate) id: ServiceId,
    state: Mutex<ServiceState>,
    pub(crate) account: Arc<Account>,
    /// Counts changes that remove an endpoint, or that give an address to another Service. UDP
    /// sessions compare it before they send.
    removals: AtomicU64,
}

/// The part of a Service that changes together.
#[derive(Debug, Default)]
pub(crate) struct ServiceState {
    pub(crate) settings: ServiceSettings,
    pub(crate) pool: Pool,
}

impl Service {
    /// Locks the endpoints. The lock is held for one choice or one change.
    pub(crate) fn state(&self) -> MutexGuard<'_, ServiceState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Chooses an endpoint, and renews the affinity of the client: see [`Pool::pick`].
    pub(crate) fn pick(&self, client: IpAddr, tried: &[EndpointKey], now_ms: u64, random: u64) -> Option<Picked> {
        let mut state = self.state();
        let affinity_ms = state.settings.affinity_seconds.map(|seconds| u64::from(seconds) * 1000);
        state.pool.pick(client, tried, affinity_ms, now_ms, random)
    }

    /// The number of changes that removed an endpoint, or that gave an address to another Service.
    pub(crate) fn removals(&self) -> u64 {
        self.removals.load(Ordering::Acquire)
    }

    /// The counts of the endpoints and of the clients with affinity.
    fn counts(&self) -> ServiceStats {
        let state = self.state();
        let (affinity_clients, affinity_evicted) = state.pool.affinity_clients();
        ServiceStats {
            resting_endpoints: state.pool.resting() as u64,
            affinity_clients: affinity_clients as u64,
            affinity_evicted,
            ..ServiceStats::default()
        }
    }
}

/// All Services.
#[derive(Debug, Default)]
pub struct Services {
    table: RwLock<Table>,
}

type Owners = BTreeMap<Scope, Arc<Service>>;

#[derive(Debug, Default)]
struct Table {
    services: HashMap<ServiceId, Arc<Service>>,
    accounts: Accounts,
    addresses: HashMap<(Protocol, SocketAddr), Owners>,
    node_addresses: HashSet<IpAddr>,
}

impl Services {
    /// Adds a Service without addresses and endpoints, or changes the settings of a Service.
    pub fn set_service(&self, id: ServiceId, settings: ServiceSettings) {
        let service = {
            let Table { services, accounts, .. } = &mut *self.write();
            let create = || {
                let (state, account) = (Mutex::default(), accounts.get(&settings.account));
                Arc::new(Service { id, state, account, removals: AtomicU64::new(0) })
            };
            Arc::clone(services.entry(id).or_insert_with(create))
        };
        service.account.set_limit(settings.max_connections);
        let mut state = service.state();
        state.pool.set_algorithm(settings.algorithm);
        state.settings = settings;
    }

    /// Removes a Service. The caller removes its addresses first, with [`Self::remove_address`].
    /// TCP connections of the Service continue until they end. Returns whether the Service existed.
    pub fn remove_service(&self, id: ServiceId) -> bool {
        let removed = self.write().services.remove(&id);
        if let Some(service) = &removed {
            let pool = std::mem::take(&mut service.state().pool);
            service.account.stats.affinity_evicted.add(pool.affinity_clients().1);
            service.removals.fetch_add(1, Ordering::Release);
        }
        removed.is_some()
    }

    /// Adds an address to a Service. In each scope, an address belongs to one Service: the last
    /// call wins. An unspecified IP address stands for all addresses of its family that the scope
    /// does not have, as for NodePorts. UDP sessions of the earlier Service move to this Service
    /// with their next datagram. Returns whether the Service exists.
    pub fn set_address(&self, id: ServiceId, scope: Scope, protocol: Protocol, address: SocketAddr) -> bool {
        let mut table = self.write();
        let Some(service) = table.services.get(&id).map(Arc::clone) else { return false };
        let replaced = table.addresses.entry((protocol, address)).or_default().insert(scope, service);
        if let Some(owner) = replaced.filter(|owner| owner.id != id) {
            owner.removals.fetch_add(1, Ordering::Release);
        }
        true
    }

    /// Removes an address if it belongs to this Service. Returns whether it did.
    pub fn remove_address(&self, id: ServiceId, scope: Scope, protocol: Protocol, address: SocketAddr) -> bool {
        let mut table = self.write();
        let Entry::Occupied(mut owners) = table.addresses.entry((protocol, address)) else { return false };
        let is_owner = owners.get().get(&scope).is_some_and(|owner| owner.id == id);
        if is_owner {
            owners.get_mut().remove(&scope);
        }
        if owners.get().is_empty() {
            owners.remove();
        }
        is_owner
    }

    /// Sets the addresses of the node. An endpoint at such an address is not tried: the program
    /// there would take the client for the node.
    pub fn set_node_addresses(&self, addresses: impl IntoIterator<Item = IpAddr>) {
        self.write().node_addresses = addresses.into_iter().collect();
    }

    /// Adds an endpoint, or changes its weight (1 or more). Returns whether the Service exists.
    pub fn set_endpoint(&self, id: ServiceId, endpoint: SocketAddr, weight: u32) -> bool {
        let Some(service) = self.service(id) else { return false };
        service.state().pool.set(endpoint, weight);
        true
    }

    /// Removes an endpoint. Its TCP connections continue, and its UDP sessions move to another
    /// endpoint with their next datagram. Returns whether the endpoint existed.
    pub fn remove_endpoint(&self, id: ServiceId, endpoint: SocketAddr) -> bool {
        let Some(service) = self.service(id) else { return false };
        let is_removed = service.state().pool.remove(endpoint);
        service.removals.fetch_add(1, Ordering::Release);
        is_removed
    }

    /// Removes an account, which no Service uses any more. Its counts stay in the totals.
    pub fn remove_account(&self, name: &str) {
        self.write().accounts.remove(name);
    }

    /// The counters of each account, and the sums over all accounts that ever existed. This walks
    /// over all Services, for metrics pages.
    pub fn stats(&self) -> (HashMap<Arc<str>, ServiceStats>, ServiceStats) {
        let (services, (mut accounts, mut totals)) = {
            let table = &mut *self.write();
            (table.services.values().map(Arc::clone).collect::<Vec<_>>(), table.accounts.read())
        };
        for service in services {
            let counts = service.counts();
            totals += counts;
            if let Some(account) = accounts.get_mut(&service.account.name) {
                *account += counts;
            }
        }
        (accounts, totals)
    }

    /// The Service of an address that a client used, with [`Service::removals`] at a time when the
    /// Service had the address.
    pub(crate) fn find(&self, scope: Scope, protocol: Protocol, address: SocketAddr) -> Option<(Arc<Service>, u64)> {
        let table = self.read();
        let of = |address| {
            let service = table.addresses.get(&(protocol, address))?.get(&scope)?;
            Some((Arc::clone(service), service.removals()))
        };
        of(address).or_else(|| of(any_address(address)))
    }

    /// Whether an address is the node's, or rules lead its connections back to this proxy.
    pub(crate) fn has_address(&self, protocol: Protocol, address: SocketAddr) -> bool {
        let table = self.read();
        table.addresses.contains_key(&(protocol, address)) || table.node_addresses.contains(&address.ip())
    }

    fn service(&self, id: ServiceId) -> Option<Arc<Service>> {
        self.read().services.get(&id).map(Arc::clone)
    }

    fn read(&self) -> RwLockReadGuard<'_, Table> {
        self.table.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Table> {
        self.table.write().unwrap_or_else(PoisonError::into_inner)
    }
}
