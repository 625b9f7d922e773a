//! The shared state, and the Services that a change makes dirty.
//!
//! Work per change is proportional to the change: a change of a Service visits the
//! frontends of that Service, and a change of an endpoint visits that endpoint.

mod demand;
pub mod digest;
mod endpoints;
pub mod frontends;
pub mod reference;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    net::IpAddr,
    sync::Arc,
};

use compact_str::CompactString;

pub use self::{
    demand::{Demand, FamilyDemand},
    endpoints::Endpoints,
};
use self::{
    digest::{BucketDigest, Digests},
    frontends::{Frontend, FrontendOwners, frontends_of},
};
use crate::model::{Change, Endpoint, Service, ServiceCidr, ServiceKey};

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
        let service = self.service().map(digest::service_hash);
        service.into_iter().chain(self.endpoints.values().map(|endpoint| digest::endpoint_hash(key, endpoint)))
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
    /// Frontends that these services may have lost. A plan with another service that specifies one
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
            let bucket = digest::service_bucket(key);
            entry.hashes(key).for_each(|hash| digests.add(bucket, hash));
        }
    }

    /// Adds the hashes of the ServiceCIDRs to digests.
    pub fn digest_service_cidrs(&self, digests: &mut Digests) {
        for (name, service_cidr) in &self.service_cidrs {
            digests.add(digest::service_cidr_bucket(name), digest::service_cidr_hash(service_cidr));
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
            let bucket = digest::service_bucket(&key);
            if let Some(old) = &old {
                self.digests.subtract(bucket, digest::service_hash(old));
                self.demand.subtract(old);
                self.services -= 1;
            }
            if let Some(new) = new {
                self.digests.add(bucket, digest::service_hash(new));
                self.demand.add(new);
                self.services += 1;
            }
            let affected = self.frontends.replace(&key, old.as_deref(), new);
            if old.is_some() || !affected.is_empty() {
                let own: HashSet<Frontend> = new.into_iter().flat_map(frontends_of).collect();
                let others = affected.iter().filter_map(|other| Some((other, self.entries.get(other)?.service()?)));
                let lost = others.flat_map(|(other, service)| frontends_of(service).map(move |lost| (lost, other)));
                let lost = lost.filter(|(frontend, _)| own.contains(frontend));
                let gone = old.iter().flat_map(|old| frontends_of(old)).filter(|frontend| !own.contains(frontend));
                for (frontend, service) in lost.chain(gone.map(|frontend| (frontend, &key))) {
                    dirty.lost.entry(frontend).or_insert_with(|| Arc::clone(service));
                }
            }
            dirty.services.extend(affected);
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
            let bucket = digest::service_bucket(&key);
            if let Some(old) = old {
                self.digests.subtract(bucket, digest::endpoint_hash(&key, old));
                self.endpoints -= 1;
            }
            if let Some(new) = new {
                self.digests.add(bucket, digest::endpoint_hash(&key, &new));
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
        let (old, bucket) = (self.service_cidrs.get(&name), digest::service_cidr_bucket(&name));
        if old == new.as_ref() {
            return false;
        }
        if let Some(old) = old {
            self.digests.subtract(bucket, digest::service_cidr_hash(old));
        }
        if let Some(new) = new {
            self.digests.add(bucket, digest::service_cidr_hash(&new));
            self.service_cidrs.insert(name, new);
        } else {
            self.service_cidrs.remove(&name);
        }
        dirty.service_cidrs = true;
        true
    }
}
