//! The owners of frontends: one of the Services that specify a frontend owns it.
//!
//! A frontend is an address, protocol and port, or a NodePort. The Service with the strongest
//! [`Claim`] owns the frontend. Among equal claims the oldest Service owns it, and among Services
//! of equal age the first by namespace and name.
//!
//! The API server gives a ClusterIP to one Service, but whoever may write a Service chooses its
//! externalIPs. So a ClusterIP belongs to its Service with all ports: no other claim to the address
//! is served, also not at a port that the Service does not have. The same holds for all addresses
//! in the ranges of ServiceCIDRs: the API server may give each of them to a Service at any time, or
//! has given it to a Service of another proxy. Services may share the addresses of load balancers
//! and externalIPs elsewhere, with different ports.
//!
//! Some frontends are reserved: where agents reach the control plane, and replicas the API server.
//! No Service gets them, except as its ClusterIP. Otherwise a Service could keep agents from
//! hearing of its own correction.
//!
//! No node forwards traffic from a frontend to Services that do not own it. `headgatectl` shows
//! these Services as conflicts.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, hash_map::Entry},
    fmt,
    net::IpAddr,
    sync::Arc,
};

use ipnet::IpNet;

use super::Dirty;
use crate::model::{Family, Protocol, Service, ServiceKey, ServicePort};

named! {
    /// What a frontend is for a Service, the strongest claim first. Named as in sentences.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub enum Claim {
        /// One of its ClusterIPs.
        ClusterIp = "ClusterIP",
        /// Reserved, by no Service.
        Reserved = "reserved",
        /// An address of its load balancer.
        LoadBalancerIp = "load balancer IP",
        /// One of its externalIPs.
        ExternalIp = "externalIP",
        /// Its NodePort.
        NodePort = "NodePort",
    }
}

/// Where clients reach one port of a Service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Frontend {
    /// A ClusterIP, externalIP or load balancer IP, with protocol and port.
    Address(IpAddr, Protocol, u16),
    /// A NodePort in one family.
    NodePort(Family, Protocol, u16),
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    claim: Claim,
    created_unix_seconds: i64,
    key: Arc<ServiceKey>,
}

/// What Services compete for. Addresses are first, so that the first place which a Service does not
/// get says the most.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Place {
    /// If the first candidate has the address as its ClusterIP, other claims get no frontend there.
    Address(IpAddr),
    /// Only the first candidate gets the frontend.
    Frontend(Frontend),
}

/// The candidates for a place. Nearly every place has only one.
#[derive(Debug)]
struct Candidates {
    first: Candidate,
    #[expect(clippy::box_collection, reason = "a frontend without conflicts is 16 bytes smaller")]
    others: Option<Box<BTreeSet<Candidate>>>,
}

/// The Services that specify each frontend, as candidates.
#[derive(Debug, Default)]
pub struct FrontendOwners {
    places: HashMap<Place, Candidates>,
    /// The places that each Service does not get, with its claims to them.
    lost: BTreeMap<Arc<ServiceKey>, BTreeMap<Place, Claim>>,
    /// The ranges of ServiceCIDRs. Only ClusterIPs are candidates for places in them.
    service_ranges: Vec<IpNet>,
    /// The places that are reserved, with their candidates, which are also in `places`.
    reserved: BTreeMap<Place, Candidate>,
}

/// A frontend or an address that a Service specifies and does not get.
#[derive(Debug)]
pub struct Conflict<'a> {
    place: Place,
    /// What the place is for the Service that does not get it.
    claim: Claim,
    /// The owner; `None` if the address is in the range of a ServiceCIDR and no ClusterIP.
    owner: Option<&'a Candidate>,
}

impl Conflict<'_> {
    /// The field of the Service that does not get the frontend.
    #[must_use]
    pub fn field(&self) -> &'static str {
        match self.claim {
            Claim::ClusterIp => "spec.clusterIPs",
            Claim::Reserved | Claim::LoadBalancerIp => "status.loadBalancer.ingress",
            Claim::ExternalIp => "spec.externalIPs",
            Claim::NodePort => "spec.ports",
        }
    }
}

/// A sentence without its full stop, such as "10.96.0.10 port 80/TCP belongs to Service prod/web,
/// whose ClusterIP it is: give one of the two Services another address or port".
impl fmt::Display for Conflict<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.place {
            Place::Address(address) => write!(f, "{address}")?,
            Place::Frontend(frontend) => write!(f, "{frontend}")?,
        }
        let Some(owner) = self.owner else {
            return f.write_str(
                " is in the range of a ServiceCIDR, which is for ClusterIPs: give the Service another address",
            );
        };
        if owner.claim == Claim::Reserved {
            return f.write_str(
                " is reserved, because agents or replicas depend on it (docs/security.md): give this Service another address or port",
            );
        }
        write!(f, " belongs to Service {}, ", owner.key)?;
        match owner.claim {
            claim if claim == self.claim => f.write_str("which is older or comes first by name")?,
            claim => write!(f, "whose {} it is", claim.as_str())?,
        }
        f.write_str(": give one of the two Services another address or port")
    }
}

impl Frontend {
    /// The family of the frontend.
    #[must_use]
    pub fn family(self) -> Family {
        match self {
            Self::Address(address, ..) => Family::of(address),
            Self::NodePort(family, ..) => family,
        }
    }

    /// The protocol of the frontend.
    #[must_use]
    pub fn protocol(self) -> Protocol {
        let (Self::Address(_, protocol, _) | Self::NodePort(_, protocol, _)) = self;
        protocol
    }

    /// The port or NodePort of the frontend.
    #[must_use]
    pub fn port(self) -> u16 {
        let (Self::Address(.., port) | Self::NodePort(.., port)) = self;
        port
    }
}

impl fmt::Display for Frontend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(address, protocol, port) => write!(f, "{address} port {port}/{protocol}"),
            Self::NodePort(family, protocol, port) => write!(f, "{family} node port {port}/{protocol}"),
        }
    }
}

/// Returns every frontend that a Service specifies with one of its ports.
pub(crate) fn frontends_of_port(service: &Service, port: &ServicePort) -> impl Iterator<Item = (Frontend, Claim)> {
    let ServicePort { protocol, port, node_port, .. } = *port;
    let has_node_port = move |family: &Family| node_port != 0 && service.cluster_ip(*family).is_some();
    let node_ports = Family::BOTH.into_iter().filter(has_node_port);
    let at_addresses =
        addresses_of(service).map(move |(address, claim)| (Frontend::Address(address, protocol, port), claim));
    at_addresses.chain(node_ports.map(move |family| (Frontend::NodePort(family, protocol, node_port), Claim::NodePort)))
}

/// Returns every frontend that a Service specifies.
pub fn frontends_of(service: &Service) -> impl Iterator<Item = Frontend> {
    service.ports.iter().flat_map(|port| frontends_of_port(service, port)).map(|(frontend, _)| frontend)
}

/// Returns every address that a Service claims, the strongest claims first.
pub(crate) fn addresses_of(service: &Service) -> impl Iterator<Item = (IpAddr, Claim)> {
    let lists = [
        (&service.cluster_ips, Claim::ClusterIp),
        (&service.load_balancer_ips, Claim::LoadBalancerIp),
        (&service.external_ips, Claim::ExternalIp),
    ];
    lists.into_iter().flat_map(|(addresses, claim)| addresses.iter().map(move |address| (*address, claim)))
}

/// Returns the places for which a Service is a candidate, each with its strongest claim.
fn places_of(key: &Arc<ServiceKey>, service: &Service) -> BTreeMap<Place, Candidate> {
    let frontends = service.ports.iter().flat_map(|port| frontends_of_port(service, port));
    let frontends = frontends.map(|(frontend, claim)| (Place::Frontend(frontend), claim));
    let addresses = addresses_of(service).map(|(address, claim)| (Place::Address(address), claim));
    let mut places = BTreeMap::new();
    // The strongest claims to an address come first.
    for (place, claim) in frontends.chain(addresses) {
        let created_unix_seconds = service.created_unix_seconds;
        places.entry(place).or_insert_with(|| Candidate { claim, created_unix_seconds, key: Arc::clone(key) });
    }
    places
}

impl Place {
    /// The address; `None` for a NodePort.
    fn address(self) -> Option<IpAddr> {
        match self {
            Self::Address(address) | Self::Frontend(Frontend::Address(address, ..)) => Some(address),
            Self::Frontend(Frontend::NodePort(..)) => None,
        }
    }
}

impl Candidates {
    /// The candidates that get nothing if `first` is the first candidate and `second` follows it,
    /// but would get something if `second` was the first.
    fn losers(&self, place: Place, first: &Candidate, second: &Candidate) -> Vec<Candidate> {
        if !excludes(place, first, second) {
            return Vec::new();
        }
        // At a frontend, the others get nothing in either case.
        let others = self.others.as_deref().filter(|_| matches!(place, Place::Address(_)));
        std::iter::once(second).chain(others.into_iter().flatten()).cloned().collect()
    }
}

/// True if a Service gets nothing at a place with this first candidate.
fn excludes(place: Place, first: &Candidate, candidate: &Candidate) -> bool {
    let has_address = |candidate: &Candidate| candidate.claim <= Claim::Reserved;
    candidate.claim != Claim::Reserved
        && (matches!(place, Place::Frontend(_)) || has_address(first) && !has_address(candidate))
}

/// Records that the first candidate for a place may have lost it.
fn lose(place: Place, Candidate { key, claim, .. }: &Candidate, dirty: &mut Dirty) {
    if let Place::Frontend(frontend) = place
        && *claim != Claim::Reserved
    {
        dirty.lost.entry(frontend).or_insert_with(|| Arc::clone(key));
    }
}

impl FrontendOwners {
    /// True if a Service claims the frontend, or its address, and does not get it. The cost grows
    /// with the number of Services that do not get a frontend.
    pub fn is_contested(&self, frontend: &Frontend) -> bool {
        let place = Place::Frontend(*frontend);
        let places = place.address().map(Place::Address).into_iter().chain([place]).collect::<Vec<_>>();
        self.lost.values().any(|lost| places.iter().any(|place| lost.contains_key(place)))
    }

    /// Replaces the claims of a Service. Adds to `dirty` the other Services that gain or lose a
    /// frontend, and the frontends that change hands. The cost depends on the claims of this
    /// Service, and not on those of the others.
    pub(crate) fn replace(
        &mut self,
        key: &Arc<ServiceKey>,
        old: Option<&Service>,
        new: Option<&Service>,
        dirty: &mut Dirty,
    ) {
        let [mut old, mut new] =
            [old, new].map(|service| service.map(|service| places_of(key, service)).unwrap_or_default());
        let refused = |place: &Place, candidate: &mut Candidate| {
            let is_in_range = |address| self.service_ranges.iter().any(|range| range.contains(&address));
            candidate.claim != Claim::ClusterIp && place.address().is_some_and(is_in_range)
        };
        let no_more: Vec<_> = old.extract_if(.., refused).collect();
        let now: Vec<_> = new.extract_if(.., refused).collect();
        no_more.iter().for_each(|(place, _)| self.no_longer_lost(key, place));
        for (place, Candidate { claim, .. }) in now.iter().filter(|(place, _)| matches!(place, Place::Address(_))) {
            self.lost.entry(Arc::clone(key)).or_default().insert(*place, *claim);
        }
        self.change(&old, new, dirty);
    }

    /// Replaces the reserved frontends, and adds the Services that gain or lose a frontend to
    /// `dirty`. If `with_addresses` is true, the addresses are reserved with all ports.
    pub(super) fn reserve(&mut self, frontends: &BTreeSet<Frontend>, with_addresses: bool, dirty: &mut Dirty) {
        let places = frontends.iter().flat_map(|frontend| {
            let address = match frontend {
                Frontend::Address(address, ..) if with_addresses => Some(Place::Address(*address)),
                _ => None,
            };
            address.into_iter().chain([Place::Frontend(*frontend)])
        });
        let candidate = Candidate { claim: Claim::Reserved, created_unix_seconds: 0, key: Arc::default() };
        let new: BTreeMap<Place, Candidate> = places.map(|place| (place, candidate.clone())).collect();
        let old = std::mem::replace(&mut self.reserved, new.clone());
        self.change(&old, new, dirty);
    }

    /// Returns the Services that do not get what is reserved, without the frontends in `known`. The
    /// cost depends on what is reserved, and on these Services.
    pub fn reserved_conflicts(
        &self,
        known: &BTreeSet<Frontend>,
    ) -> impl Iterator<Item = (&Arc<ServiceKey>, Conflict<'_>)> {
        let is_known = |place: &Place| matches!(place, Place::Frontend(frontend) if known.contains(frontend));
        let places = self.reserved.keys().filter(move |place| !is_known(place));
        places.filter_map(|place| Some((*place, self.places.get(place)?))).flat_map(
            move |(place, Candidates { first, others })| {
                let others = others.as_deref().into_iter().flatten();
                let lost = others.filter(move |other| first.claim == Claim::Reserved && excludes(place, first, other));
                let lost = lost.filter(move |other| !self.is_part(&other.key, place));
                lost.map(move |Candidate { key, claim, .. }| {
                    (key, Conflict { place, claim: *claim, owner: Some(first) })
                })
            },
        )
    }

    /// Replaces candidates. Adds to `dirty` the Services, besides those of the candidates, that
    /// gain or lose a frontend, and who may have lost each frontend.
    fn change(&mut self, old: &BTreeMap<Place, Candidate>, new: BTreeMap<Place, Candidate>, dirty: &mut Dirty) {
        for (place, candidate) in old.iter().filter(|(place, candidate)| new.get(place) != Some(candidate)) {
            self.remove(*place, candidate, dirty);
        }
        for (place, candidate) in new {
            if old.get(&place) != Some(&candidate) {
                self.add(place, candidate, dirty);
            }
        }
    }

    fn add(&mut self, place: Place, candidate: Candidate, dirty: &mut Dirty) {
        let candidates = match self.places.entry(place) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => {
                entry.insert(Candidates { first: candidate, others: None });
                return;
            }
        };
        let (mut later, mut losers) = (candidate, Vec::new());
        if later < candidates.first {
            std::mem::swap(&mut later, &mut candidates.first);
            losers = candidates.losers(place, &candidates.first, &later);
            lose(place, &later, dirty);
            dirty.services.extend(losers.iter().map(|loser| Arc::clone(&loser.key)));
        } else if excludes(place, &candidates.first, &later) {
            losers.push(later.clone());
        }
        candidates.others.get_or_insert_default().insert(later);
        for Candidate { key, claim, .. } in losers {
            self.lost.entry(key).or_default().insert(place, claim);
        }
    }

    fn remove(&mut self, place: Place, candidate: &Candidate, dirty: &mut Dirty) {
        let Entry::Occupied(mut entry) = self.places.entry(place) else { return };
        let candidates = entry.get_mut();
        let mut winners = Vec::new();
        if candidates.first == *candidate {
            lose(place, candidate, dirty);
        }
        if candidates.first != *candidate {
            if let Some(others) = &mut candidates.others {
                others.remove(candidate);
            }
            winners.extend(excludes(place, &candidates.first, candidate).then(|| candidate.clone()));
        } else if let Some(next) = candidates.others.as_mut().and_then(|others| others.pop_first()) {
            winners = candidates.losers(place, candidate, &next);
            dirty.services.extend(winners.iter().map(|winner| Arc::clone(&winner.key)));
            candidates.first = next;
        } else {
            entry.remove();
            return;
        }
        candidates.others.take_if(|others| others.is_empty());
        winners.iter().for_each(|winner| self.no_longer_lost(&winner.key, &place));
    }

    fn no_longer_lost(&mut self, key: &Arc<ServiceKey>, place: &Place) {
        if let Some(lost) = self.lost.get_mut(key) {
            lost.remove(place);
            if lost.is_empty() {
                self.lost.remove(key);
            }
        }
    }

    /// Replaces the ranges of ServiceCIDRs. `services` are all Services. Adds those that gain or
    /// lose a frontend to `dirty`. The cost grows with the number of Services; ServiceCIDRs rarely
    /// change.
    pub(crate) fn replace_service_ranges<'a>(
        &mut self,
        ranges: Vec<IpNet>,
        services: impl Iterator<Item = (&'a Arc<ServiceKey>, &'a Service)>,
        dirty: &mut Dirty,
    ) {
        let is_in = |ranges: &[IpNet], address: &IpAddr| ranges.iter().any(|range| range.contains(address));
        let is_affected = |(_, service): &(&Arc<ServiceKey>, &Service)| {
            let mut claimed = service.load_balancer_ips.iter().chain(&service.external_ips);
            claimed.any(|address| is_in(&ranges, address) != is_in(&self.service_ranges, address))
        };
        let claimants: Vec<_> = services.filter(is_affected).collect();
        dirty.services.extend(claimants.iter().map(|(key, _)| Arc::clone(key)));
        for (key, service) in &claimants {
            self.replace(key, Some(service), None, dirty);
        }
        self.service_ranges = ranges;
        for (key, service) in claimants {
            self.replace(key, None, Some(service), dirty);
        }
    }

    fn first(&self, frontend: &Frontend) -> Option<&Candidate> {
        let first = |place| self.places.get(&place).map(|candidates| &candidates.first);
        let of_frontend = first(Place::Frontend(*frontend))?;
        match frontend {
            Frontend::Address(address, ..) if of_frontend.claim != Claim::ClusterIp => {
                first(Place::Address(*address)).filter(|first| first.claim <= Claim::Reserved).or(Some(of_frontend))
            }
            _ => Some(of_frontend),
        }
    }

    /// Returns the Service that owns a frontend, or `None` if no Service gets the frontend. The
    /// owner of a ClusterIP also owns frontends there that only other Services specify.
    #[must_use]
    pub fn owner(&self, frontend: &Frontend) -> Option<&ServiceKey> {
        self.first(frontend).filter(|first| first.claim != Claim::Reserved).map(|first| &*first.key)
    }

    /// True if the Service owns the frontend, or would own it if it specified the frontend.
    #[must_use]
    pub fn owns(&self, key: &ServiceKey, frontend: &Frontend) -> bool {
        !self.is_part(key, Place::Frontend(*frontend)) && self.first(frontend).is_none_or(|first| *first.key == *key)
    }

    /// Returns why a Service that specifies a frontend does not own it.
    #[must_use]
    pub fn conflict(&self, key: &ServiceKey, frontend: Frontend, claim: Claim) -> Option<Conflict<'_>> {
        let place = Place::Frontend(frontend);
        let at_address = || place.address().and_then(|address| self.places.get(&Place::Address(address)));
        let owner = || self.first(&frontend).or_else(|| Some(&at_address()?.first));
        (!self.owns(key, &frontend)).then(|| Conflict { place, claim, owner: owner() })
    }

    /// Returns what a Service specifies and does not get, addresses first. A frontend at such an
    /// address is no conflict of its own.
    pub fn conflicts(&self, key: &ServiceKey) -> impl Iterator<Item = Conflict<'_>> {
        let lost = self.lost.get(key).into_iter().flatten().filter(|(place, _)| !self.is_part(key, **place));
        lost.map(|(place, claim)| Conflict {
            place: *place,
            claim: *claim,
            owner: self.places.get(place).map(|of| &of.first),
        })
    }

    /// True for a frontend at an address that the Service does not get either.
    fn is_part(&self, key: &ServiceKey, place: Place) -> bool {
        let has_lost = |address| self.lost.get(key).is_some_and(|lost| lost.contains_key(&Place::Address(address)));
        matches!(place, Place::Frontend(_)) && place.address().is_some_and(has_lost)
    }

    /// Returns the Services with [`Self::conflicts`], in order.
    pub fn losers(&self) -> impl ExactSizeIterator<Item = &Arc<ServiceKey>> {
        self.lost.keys()
    }
}

#[cfg(test)]
mod tests;
