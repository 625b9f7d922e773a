//! The shared state, the Services that a change makes dirty, and references to what it holds.
//!
//! Work per change is proportional to the change: a change of a Service visits the
//! frontends of that Service, and a change of an endpoint visits that endpoint.

pub mod frontends;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    net::IpAddr,
    sync::Arc,
};

use compact_str::CompactString;
use sha2::{Digest as _, Sha256};

use crate::model::{
    Change, Conditions, Endpoint, EndpointPort, Family, LoadBalancing, Placement, Protocol, Service, ServiceCidr,
    ServiceKey, Weight,
};
use frontends::{Frontend, FrontendOwners};

/// The state that all nodes share. It does not depend on the order in which changes arrived.
#[derive(Debug, Default)]
pub struct State {
    entries: HashMap<Arc<ServiceKey>, ServiceEntry>,
    service_cidrs: BTreeMap<CompactString, ServiceCidr>,
    frontends: FrontendOwners,
    demand: Demand,
    digests: Digests,
    services: usize,
    endpoints: usize,
}

/// A service and its endpoints. The API does not guarantee an order of events, so the state may
/// hold a Service without its endpoints, or endpoints without their Service.
#[derive(Debug, Default)]
pub struct ServiceEntry {
    service: Option<Box<Service>>,
    endpoints: Endpoints,
}

impl ServiceEntry {
    /// The Service, if it is known.
    #[must_use]
    pub fn service(&self) -> Option<&Service> {
        self.service.as_deref()
    }

    /// The endpoints in order of address.
    #[must_use]
    pub fn endpoints(&self) -> &Endpoints {
        &self.endpoints
    }

    /// The digest of the Service and its endpoints alone.
    #[must_use]
    pub fn digest(&self, key: &ServiceKey) -> BucketDigest {
        let mut digest = BucketDigest::default();
        self.hashes(key).for_each(|hash| digest.add(hash));
        digest
    }

    fn hashes<'a>(&'a self, key: &'a ServiceKey) -> impl Iterator<Item = u128> + 'a {
        let service = self.service().map(service_hash);
        service.into_iter().chain(self.endpoints.values().map(|endpoint| endpoint_hash(key, endpoint)))
    }

    fn is_empty(&self) -> bool {
        self.service.is_none() && self.endpoints.is_empty()
    }
}

/// The objects that the caller has to plan again after changes. A service that changed several
/// times is planned once.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Dirty {
    /// Services whose views have to be computed again.
    pub services: BTreeSet<Arc<ServiceKey>>,
    /// The set of ServiceCIDRs changed.
    pub service_cidrs: bool,
    /// Frontends that these services have lost. A plan with another service that specifies one
    /// of them must have the former owner as well, because a frontend leads to one service.
    pub lost: HashMap<Frontend, Arc<ServiceKey>>,
}

impl Dirty {
    /// True if nothing has to be planned.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.services.is_empty() && !self.service_cidrs
    }

    /// Adds everything in `other`.
    pub fn merge(&mut self, other: Self) {
        self.services.extend(other.services);
        self.service_cidrs |= other.service_cidrs;
        other.lost.into_iter().for_each(|(frontend, service)| _ = self.lost.entry(frontend).or_insert(service));
    }
}

impl State {
    /// Applies one change and adds what it affects to `dirty`.
    ///
    /// Returns false and does not change `dirty` if the state already had this value, or if the
    /// state does not have the resource to remove.
    pub fn apply(&mut self, change: Change, dirty: &mut Dirty) -> bool {
        match change {
            Change::Service(service) => self.set_service(service.key.clone(), Some(service), dirty),
            Change::RemoveService(key) => self.set_service(key, None, dirty),
            Change::Endpoint(key, endpoint) => self.set_endpoint(key, endpoint.address, Some(endpoint), dirty),
            Change::RemoveEndpoint(key, address) => self.set_endpoint(key, address, None, dirty),
            Change::ServiceCidr(new) => self.set_service_cidr(new.name.clone(), Some(new), dirty),
            Change::RemoveServiceCidr(name) => self.set_service_cidr(name, None, dirty),
        }
    }

    /// Returns a service and its endpoints.
    #[must_use]
    pub fn entry(&self, key: &ServiceKey) -> Option<&ServiceEntry> {
        self.entries.get(key)
    }

    /// Returns the shared copy of a key, or `None` if the state has no entry for the key.
    #[must_use]
    pub fn key(&self, key: &ServiceKey) -> Option<&Arc<ServiceKey>> {
        self.entries.get_key_value(key).map(|(key, _)| key)
    }

    /// Returns all entries in no particular order, including entries without a Service. Do not call
    /// this function on the hot path, because the caller visits every entry.
    pub fn entries(&self) -> impl Iterator<Item = (&Arc<ServiceKey>, &ServiceEntry)> {
        self.entries.iter()
    }

    /// Returns the ServiceCIDRs in order of name.
    pub fn service_cidrs(&self) -> impl Iterator<Item = &ServiceCidr> {
        self.service_cidrs.values()
    }

    /// Returns a ServiceCIDR by name.
    #[must_use]
    pub fn service_cidr(&self, name: &str) -> Option<&ServiceCidr> {
        self.service_cidrs.get(name)
    }

    /// The owners of addresses and ports.
    #[must_use]
    pub fn frontends(&self) -> &FrontendOwners {
        &self.frontends
    }

    /// Replaces the reserved frontends, and adds the Services that gain or lose a frontend to
    /// `dirty`. If `with_addresses` is true, the addresses are reserved with all ports, as mode
    /// IPVS needs: its nodes hold every address of a Service themselves.
    pub fn reserve(&mut self, frontends: &BTreeSet<Frontend>, with_addresses: bool, dirty: &mut Dirty) {
        self.frontends.reserve(frontends, with_addresses, dirty);
    }

    /// For each feature that a node may lack, the number of Services that use it.
    #[must_use]
    pub fn demand(&self) -> &Demand {
        &self.demand
    }

    /// The digests of this state.
    #[must_use]
    pub fn digests(&self) -> &Digests {
        &self.digests
    }

    /// Computes the digests anew from the resources, and returns true if [`Self::digests`] was
    /// right. It is wrong only if memory was damaged, or after a defect. Do not call this function
    /// on the hot path, because it hashes every resource.
    pub fn renew_digests(&mut self) -> bool {
        let mut digests = Digests::default();
        self.digest_services(self.entries.keys(), &mut digests);
        self.digest_service_cidrs(&mut digests);
        let was_right = digests == self.digests;
        self.digests = digests;
        was_right
    }

    /// Adds the hashes of these Services and of their endpoints to digests. Leaves out Services
    /// that the state does not hold.
    pub fn digest_services<'a>(&self, keys: impl IntoIterator<Item = &'a Arc<ServiceKey>>, digests: &mut Digests) {
        for (key, entry) in keys.into_iter().filter_map(|key| Some((key, self.entries.get(key)?))) {
            let bucket = service_bucket(key);
            entry.hashes(key).for_each(|hash| digests.add(bucket, hash));
        }
    }

    /// Adds the hashes of the ServiceCIDRs to digests.
    pub fn digest_service_cidrs(&self, digests: &mut Digests) {
        for (name, service_cidr) in &self.service_cidrs {
            digests.add(service_cidr_bucket(name), service_cidr_hash(service_cidr));
        }
    }

    /// Number of Services.
    #[must_use]
    pub fn service_count(&self) -> usize {
        self.services
    }

    /// Number of endpoints, including endpoints without a Service.
    #[must_use]
    pub fn endpoint_count(&self) -> usize {
        self.endpoints
    }

    fn shared_key(&self, key: ServiceKey) -> Arc<ServiceKey> {
        self.entries.get_key_value(&key).map_or_else(|| Arc::new(key), |(shared, _)| Arc::clone(shared))
    }

    fn set_service(&mut self, key: ServiceKey, new: Option<Box<Service>>, dirty: &mut Dirty) -> bool {
        let key = self.shared_key(key);
        let entry = self.entries.entry(Arc::clone(&key)).or_default();
        let old = std::mem::replace(&mut entry.service, new);
        let has_changed = old != entry.service;
        if has_changed {
            let new = self.entries.get(&key).and_then(ServiceEntry::service);
            let bucket = service_bucket(&key);
            if let Some(old) = &old {
                self.digests.subtract(bucket, service_hash(old));
                self.demand.subtract(old);
                self.services -= 1;
            }
            if let Some(new) = new {
                self.digests.add(bucket, service_hash(new));
                self.demand.add(new);
                self.services += 1;
            }
            self.frontends.replace(&key, old.as_deref(), new, dirty);
            dirty.services.insert(Arc::clone(&key));
        }
        self.drop_empty(&key);
        has_changed
    }

    fn set_endpoint(&mut self, key: ServiceKey, address: IpAddr, new: Option<Endpoint>, dirty: &mut Dirty) -> bool {
        let key = self.shared_key(key);
        let endpoints = &mut self.entries.entry(Arc::clone(&key)).or_default().endpoints;
        let old = endpoints.get(&address);
        let has_changed = old != new.as_ref();
        if has_changed {
            let bucket = service_bucket(&key);
            if let Some(old) = old {
                self.digests.subtract(bucket, endpoint_hash(&key, old));
                self.endpoints -= 1;
            }
            if let Some(new) = new {
                self.digests.add(bucket, endpoint_hash(&key, &new));
                self.endpoints += 1;
                endpoints.insert(new);
            } else {
                endpoints.remove(&address);
            }
            dirty.services.insert(Arc::clone(&key));
        }
        self.drop_empty(&key);
        has_changed
    }

    /// Removes an entry that holds nothing.
    fn drop_empty(&mut self, key: &ServiceKey) {
        if self.entries.get(key).is_some_and(ServiceEntry::is_empty) {
            self.entries.remove(key);
        }
    }

    fn set_service_cidr(&mut self, name: CompactString, new: Option<ServiceCidr>, dirty: &mut Dirty) -> bool {
        let (old, bucket) = (self.service_cidrs.get(&name), service_cidr_bucket(&name));
        if old == new.as_ref() {
            return false;
        }
        if let Some(old) = old {
            self.digests.subtract(bucket, service_cidr_hash(old));
        }
        if let Some(new) = new {
            self.digests.add(bucket, service_cidr_hash(&new));
            self.service_cidrs.insert(name, new);
        } else {
            self.service_cidrs.remove(&name);
        }
        let ranges = self.service_cidrs.values().flat_map(|service_cidr| service_cidr.cidrs.clone()).collect();
        let services = self.entries.iter().filter_map(|(key, entry)| Some((key, entry.service()?)));
        self.frontends.replace_service_ranges(ranges, services, dirty);
        dirty.service_cidrs = true;
        true
    }
}

// The endpoints of a service, in order of address.

/// Endpoints in order of address, each address once.
///
/// A sorted vector needs a third of the memory of a `BTreeMap`, and a node has few other objects of
/// such a number. A change in the middle moves the later endpoints, 48 bytes each: 1,000 endpoints
/// take about a microsecond.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Endpoints {
    list: Vec<Endpoint>,
    /// The number of endpoints with another weight than 1.
    weighted: usize,
}

impl Endpoints {
    /// The number of endpoints.
    #[must_use]
    pub fn len(&self) -> usize {
        self.list.len()
    }

    /// True without endpoints.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Returns the endpoint with an address.
    #[must_use]
    pub fn get(&self, address: &IpAddr) -> Option<&Endpoint> {
        self.list.get(self.place(address).ok()?)
    }

    /// Returns whether an endpoint has this address.
    #[must_use]
    pub fn contains_key(&self, address: &IpAddr) -> bool {
        self.place(address).is_ok()
    }

    /// Returns the endpoints.
    pub fn values(&self) -> std::slice::Iter<'_, Endpoint> {
        self.list.iter()
    }

    /// Returns the addresses.
    pub fn keys(&self) -> impl Iterator<Item = &IpAddr> {
        self.list.iter().map(|endpoint| &endpoint.address)
    }

    /// True if an endpoint has another weight than 1.
    #[must_use]
    pub fn are_weighted(&self) -> bool {
        self.weighted > 0
    }

    /// Adds an endpoint, or replaces the endpoint with the same address.
    fn insert(&mut self, endpoint: Endpoint) {
        self.weighted += usize::from(endpoint.is_weighted());
        match self.place(&endpoint.address) {
            Ok(at) => {
                let old = std::mem::replace(&mut self.list[at], endpoint);
                self.weighted -= usize::from(old.is_weighted());
            }
            Err(at) => {
                if self.list.len() == self.list.capacity() {
                    // The vector would double its capacity, and most services rarely grow.
                    self.list.reserve_exact(1 + self.list.len() / 8);
                }
                self.list.insert(at, endpoint);
            }
        }
    }

    fn remove(&mut self, address: &IpAddr) {
        let Ok(at) = self.place(address) else { return };
        self.weighted -= usize::from(self.list.remove(at).is_weighted());
        if self.list.capacity() > 2 * self.list.len() {
            self.list.shrink_to_fit();
        }
    }

    fn place(&self, address: &IpAddr) -> Result<usize, usize> {
        self.list.binary_search_by(|endpoint| endpoint.address.cmp(address))
    }
}

// The numbers of Services that use a feature. A node that lacks a feature reports itself as
// degraded only if at least one Service uses the feature.

/// Numbers of Services with a ClusterIP of one family, by feature.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FamilyDemand {
    /// Services that have a ClusterIP of the family.
    pub services: usize,
    /// Services of the family that have a NodePort.
    pub with_node_ports: usize,
    /// Services of the family that have an SCTP port.
    pub with_sctp: usize,
    /// Services of the family whose endpoints expect the PROXY protocol.
    pub with_proxy_protocol: usize,
    /// Services of the family that limit their connections.
    pub with_max_connections: usize,
    /// Services of the family that select each algorithm of [`LoadBalancing::ALL`]. The last number
    /// counts Services that select an unknown algorithm.
    load_balancing: [usize; LoadBalancing::ALL.len() + 1],
}

impl FamilyDemand {
    /// Returns the number of Services that select an algorithm; `None` stands for all algorithms
    /// that this program does not know.
    #[must_use]
    pub fn with_load_balancing(&self, algorithm: Option<LoadBalancing>) -> usize {
        self.load_balancing[index(algorithm)]
    }
}

fn index(algorithm: Option<LoadBalancing>) -> usize {
    algorithm.map_or(LoadBalancing::ALL.len(), |algorithm| algorithm as usize)
}

/// The numbers for both families. The cost of counting a Service is linear in its ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Demand([FamilyDemand; 2]);

impl Demand {
    /// Returns the numbers for a family.
    #[must_use]
    pub fn of(&self, family: Family) -> FamilyDemand {
        self.0[family as usize]
    }

    pub(crate) fn add(&mut self, service: &Service) {
        self.count(service, |number| *number += 1);
    }

    pub(crate) fn subtract(&mut self, service: &Service) {
        self.count(service, |number| *number -= 1);
    }

    fn count(&mut self, service: &Service, count: impl Fn(&mut usize)) {
        let has_node_ports = service.ports.iter().any(|port| port.node_port != 0);
        let has_sctp = service.ports.iter().any(|port| port.protocol == Protocol::Sctp);
        for address in &service.cluster_ips {
            let demand = &mut self.0[Family::of(*address) as usize];
            let features = [
                (true, &mut demand.services),
                (has_node_ports, &mut demand.with_node_ports),
                (has_sctp, &mut demand.with_sctp),
                (service.proxy_protocol.is_some(), &mut demand.with_proxy_protocol),
                (service.max_connections != 0, &mut demand.with_max_connections),
            ];
            features.into_iter().filter(|(is_used, _)| *is_used).for_each(|(_, number)| count(number));
            if !service.load_balancing.is_empty() {
                count(&mut demand.load_balancing[index(LoadBalancing::parse(&service.load_balancing))]);
            }
        }
    }
}

// References: 11 bytes in a message that stand for a value which the receiver already has: the key
// of a Service, or the placement of an endpoint.
//
// A reference is the beginning of SHA-256 over the value, in the canonical form of
// [`crate::state::digest`]. It is so long that two values never have the same reference by chance,
// and that nobody finds a name whose reference equals that of a given Service. Whoever chooses two
// names with equal references, which takes 2^44 hashes, confuses only these two.

/// A reference.
pub type Reference = [u8; 11];

/// Returns the reference to a Service's key.
#[must_use]
pub fn service(key: &ServiceKey) -> Reference {
    let mut form = Form::new(b's');
    form.key(key);
    first_bytes(form)
}

/// Returns the reference to a placement.
#[must_use]
pub fn placement(placement: &Placement) -> Reference {
    let mut form = Form::new(b'p');
    form.placement(placement);
    first_bytes(form)
}

fn first_bytes(form: Form) -> Reference {
    let [first @ .., _, _, _, _, _] = form.finish().to_le_bytes();
    first
}

/// The values in a state that a message may refer to. The key of a Service belongs to these values
/// only if the Service itself is known. Endpoints without a Service are not enough.
#[derive(Debug, Default)]
pub struct Referable {
    /// Keys of Services.
    pub services: Vec<Arc<ServiceKey>>,
    /// Placements of endpoints.
    pub placements: HashSet<Arc<Placement>>,
}

impl Referable {
    /// Collects the values, for the start of a stream. The cost is linear in the size of the state.
    #[must_use]
    pub fn of(state: &State) -> Self {
        let mut found = Self::default();
        for (key, entry) in state.entries() {
            if entry.service().is_some() {
                found.services.push(Arc::clone(key));
            }
            for endpoint in entry.endpoints().values() {
                if !found.placements.contains(&endpoint.placement) {
                    found.placements.insert(Arc::clone(&endpoint.placement));
                }
            }
        }
        found
    }
}

// Content hashes and bucket digests. With about 20 KiB of digests, two sides find the buckets in
// which their states differ.
//
// The content hash of a resource is the first 128 bits of SHA-256 over its key and value in a
// canonical form (`Form`), so every replica and every agent computes equal hashes. The digest of a
// bucket is the sum of the hashes of its resources modulo 2^128, and their count. The digest does
// not depend on the order of resources, and a change costs one subtraction and one addition.

/// Number of buckets. The hash of a key selects the bucket.
pub const BUCKETS: usize = 1024;

/// The digest of one bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BucketDigest {
    /// Sum of content hashes modulo 2^128.
    pub sum: u128,
    /// Number of resources.
    pub count: u32,
}

impl BucketDigest {
    /// Adds a resource.
    pub fn add(&mut self, hash: u128) {
        self.sum = self.sum.wrapping_add(hash);
        self.count = self.count.wrapping_add(1);
    }
}

/// Digests of all buckets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Digests {
    buckets: Box<[BucketDigest]>,
}

impl Default for Digests {
    fn default() -> Self {
        Self { buckets: vec![BucketDigest::default(); BUCKETS].into_boxed_slice() }
    }
}

impl Digests {
    /// Creates digests from the buckets that a peer sent. Returns `None` if their number is not
    /// [`BUCKETS`].
    #[must_use]
    pub fn from_buckets(buckets: Vec<BucketDigest>) -> Option<Self> {
        (buckets.len() == BUCKETS).then(|| Self { buckets: buckets.into_boxed_slice() })
    }

    /// Returns all digests in bucket order.
    #[must_use]
    pub fn buckets(&self) -> &[BucketDigest] {
        &self.buckets
    }

    /// Returns the digest of one bucket.
    #[must_use]
    pub fn bucket(&self, bucket: u16) -> BucketDigest {
        self.buckets[usize::from(bucket) % BUCKETS]
    }

    /// Adds a resource.
    pub fn add(&mut self, bucket: u16, hash: u128) {
        self.buckets[usize::from(bucket) % BUCKETS].add(hash);
    }

    /// Removes a resource that was added with this hash.
    pub fn subtract(&mut self, bucket: u16, hash: u128) {
        let digest = &mut self.buckets[usize::from(bucket) % BUCKETS];
        digest.sum = digest.sum.wrapping_sub(hash);
        digest.count = digest.count.wrapping_sub(1);
    }

    /// Number of resources in all buckets.
    #[must_use]
    pub fn resource_count(&self) -> u64 {
        self.buckets.iter().map(|digest| u64::from(digest.count)).sum()
    }

    /// Returns the buckets in which `self` and `other` differ, in ascending order.
    #[must_use]
    pub fn differing(&self, other: &Self) -> Vec<u16> {
        let pairs = self.buckets.iter().zip(other.buckets.iter()).enumerate();
        pairs.filter(|(_, (a, b))| a != b).filter_map(|(bucket, _)| u16::try_from(bucket).ok()).collect()
    }
}

/// Returns the bucket of a service and of all its endpoints.
#[must_use]
pub fn service_bucket(key: &ServiceKey) -> u16 {
    let mut form = Form::new(b'k');
    form.key(key);
    bucket(form.finish())
}

/// Returns the bucket of a ServiceCIDR.
#[must_use]
pub fn service_cidr_bucket(name: &str) -> u16 {
    let mut form = Form::new(b'c');
    form.text(name);
    bucket(form.finish())
}

fn bucket(hash: u128) -> u16 {
    // The conversion cannot fail: the remainder is below 1,024.
    u16::try_from(hash % BUCKETS as u128).unwrap_or_default()
}

/// Returns the content hash of a Service.
#[must_use]
pub fn service_hash(service: &Service) -> u128 {
    let mut form = Form::new(b'S');
    form.key(&service.key);
    for list in [&service.cluster_ips, &service.external_ips, &service.load_balancer_ips] {
        form.number(list.len() as u64);
        list.iter().for_each(|address| form.address(*address));
    }
    form.number(service.ports.len() as u64);
    for port in &service.ports {
        form.text(&port.name);
        form.text(port.protocol.as_lower_str());
        form.number(u64::from(port.port));
        form.number(u64::from(port.node_port));
    }
    form.number(u64::from(service.internal_traffic_policy.is_local()));
    form.number(u64::from(service.external_traffic_policy.is_local()));
    form.number(service.session_affinity.map_or(0, |affinity| u64::from(affinity.timeout_seconds)));
    form.number(service.load_balancer_source_ranges.len() as u64);
    for range in &service.load_balancer_source_ranges {
        form.address(range.addr());
        form.number(u64::from(range.prefix_len()));
    }
    form.number(u64::from(service.health_check_node_port));
    form.number(service.created_unix_seconds.cast_unsigned());
    form.text(&service.scheduler);
    form.text(&service.health_check);
    form.number(u64::from(service.health_check_interval_ms));
    if !service.load_balancing.is_empty() {
        form.text(&service.load_balancing);
    }
    // The names keep these fields apart from each other and from the field before.
    if let Some(version) = service.proxy_protocol {
        form.text("proxy-protocol");
        form.text(version.as_str());
    }
    if service.max_connections != 0 {
        form.text("max-connections");
        form.number(u64::from(service.max_connections));
    }
    form.finish()
}

/// Returns the content hash of an endpoint of a service.
#[must_use]
pub fn endpoint_hash(key: &ServiceKey, endpoint: &Endpoint) -> u128 {
    let mut form = Form::new(b'E');
    form.key(key);
    form.address(endpoint.address);
    form.ports(&endpoint.ports);
    form.conditions(endpoint.conditions);
    form.placement(&endpoint.placement);
    form.finish()
}

/// Returns the content hash of a ServiceCIDR.
#[must_use]
pub fn service_cidr_hash(service_cidr: &ServiceCidr) -> u128 {
    let mut form = Form::new(b'C');
    form.text(&service_cidr.name);
    for cidr in &service_cidr.cidrs {
        form.address(cidr.addr());
        form.number(u64::from(cidr.prefix_len()));
    }
    form.finish()
}

/// The canonical form of a value. It begins with a tag. A number is 8 bytes, little endian. A text
/// is its length as a number, then its bytes. An address is its length in one byte, then its bytes.
pub(crate) struct Form(Sha256);

impl Form {
    pub(crate) fn new(tag: u8) -> Self {
        Self(Sha256::new_with_prefix([tag]))
    }

    pub(crate) fn number(&mut self, number: u64) {
        self.0.update(number.to_le_bytes());
    }

    pub(crate) fn text(&mut self, text: &str) {
        self.number(text.len() as u64);
        self.0.update(text.as_bytes());
    }

    pub(crate) fn address(&mut self, address: IpAddr) {
        match address {
            IpAddr::V4(v4) => {
                self.0.update([4]);
                self.0.update(v4.octets());
            }
            IpAddr::V6(v6) => {
                self.0.update([16]);
                self.0.update(v6.octets());
            }
        }
    }

    pub(crate) fn key(&mut self, key: &ServiceKey) {
        self.text(&key.namespace);
        self.text(&key.name);
    }

    /// Adds a list of ports. Bits 16 and 17 of the port number are set if the port carries
    /// conditions and a placement, respectively.
    pub(crate) fn ports(&mut self, ports: &[EndpointPort]) {
        self.number(ports.len() as u64);
        for port in ports {
            self.text(&port.name);
            self.text(port.protocol.as_lower_str());
            let carries = u64::from(port.conditions.is_some()) | u64::from(port.placement.is_some()) << 1;
            self.number(u64::from(port.port) | carries << 16);
            if let Some(conditions) = port.conditions {
                self.conditions(conditions);
            }
            if let Some(placement) = &port.placement {
                self.number(u64::from(placement.hints.is_some()));
                self.placement(placement);
            }
        }
    }

    fn conditions(&mut self, conditions: Conditions) {
        let Conditions { ready, serving, terminating } = conditions;
        self.number(u64::from(ready) | u64::from(serving) << 1 | u64::from(terminating) << 2);
    }

    /// Adds a placement. The form of a placement does not show whether the placement has hints. So
    /// a placement must be the last value, or the caller must first add a number that depends on
    /// whether the placement has hints.
    pub(crate) fn placement(&mut self, placement: &Placement) {
        let Placement { node, zone, hints, weight } = placement;
        if *weight != Weight::default() {
            // No text has this length, so a weight cannot be confused with the name of a node.
            self.number(u64::MAX);
            self.number(weight.hundredths().into());
        }
        self.text(node.as_deref().unwrap_or_default());
        self.text(zone.as_deref().unwrap_or_default());
        for list in hints.iter().flat_map(|hints| [&hints.zones, &hints.nodes]) {
            self.number(list.len() as u64);
            list.iter().for_each(|name| self.text(name));
        }
    }

    pub(crate) fn finish(self) -> u128 {
        let hash = self.0.finalize();
        let mut first = [0; 16];
        first.copy_from_slice(&hash[..16]);
        u128::from_le_bytes(first)
    }
}

#[cfg(test)]
mod size_tests {
    use super::*;

    /// Replicas and agents have an entry for each Service, and in it each endpoint with its
    /// address.
    #[test]
    fn entries_are_small() {
        assert_eq!((size_of::<ServiceEntry>(), size_of::<(IpAddr, Endpoint)>()), (40, 72));
    }
}

#[cfg(test)]
mod demand_tests {
    use super::*;
    use crate::{Change, Dirty, ServiceKey, ServicePort, State};

    fn service(cluster_ips: &[[u8; 4]], node_port: u16, protocol: Protocol) -> Change {
        let port = ServicePort { name: "".into(), protocol, port: 80, node_port };
        let v4 = cluster_ips.iter().map(|address| (*address).into());
        let addresses = v4.chain([[0xfd00, 0, 0, 0, 0, 0, 0, 1].into()]).collect();
        Service::new(ServiceKey::new("a", "b"), addresses, vec![port]).into()
    }

    #[test]
    fn demand_is_correct_after_services_are_added_changed_and_removed() {
        let mut state = State::default();
        let counts = |state: &State| {
            Family::BOTH.map(|family| {
                let FamilyDemand { services, with_node_ports, with_sctp, .. } = state.demand().of(family);
                [services, with_node_ports, with_sctp]
            })
        };
        let mut after = |change: Change| {
            state.apply(change, &mut Dirty::default());
            counts(&state)
        };
        assert_eq!(after(service(&[[10, 0, 0, 1]], 30_000, Protocol::Tcp)), [[1, 1, 0], [1, 1, 0]]);
        assert_eq!(after(service(&[[10, 0, 0, 1]], 30_000, Protocol::Tcp)), [[1, 1, 0], [1, 1, 0]], "an equal Service");
        assert_eq!(after(service(&[], 0, Protocol::Sctp)), [[0, 0, 0], [1, 0, 1]]);
        assert_eq!(after(Change::RemoveService(ServiceKey::new("a", "b"))), [[0, 0, 0], [0, 0, 0]]);
        assert_eq!(state.demand(), &Demand::default());
    }
}
