//! The owners of frontends. Several Services may specify the same frontend, and one of them owns
//! it.
//!
//! A frontend is an address, protocol and port, or a NodePort. The Service with the strongest
//! [`Claim`] owns the frontend. Among equal claims the oldest Service owns it, and among Services
//! of equal age the first by namespace and name.
//!
//! The API server gives a ClusterIP to one Service, but whoever may write a Service chooses its
//! externalIPs. So a ClusterIP belongs to its Service with all ports: no other claim to the address
//! is served, also not at a port that the Service does not have. Services may share the addresses
//! of load balancers and externalIPs, with different ports.
//!
//! No node forwards traffic from a frontend to Services that do not own it. `headgatectl` shows
//! these Services as conflicts.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, hash_map::Entry},
    fmt,
    net::IpAddr,
    sync::Arc,
};

use crate::model::{Family, Protocol, Service, ServiceKey, ServicePort};

/// What a frontend is for a Service, the strongest claim first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Claim {
    /// One of its ClusterIPs.
    ClusterIp,
    /// An address of its load balancer.
    LoadBalancerIp,
    /// One of its externalIPs.
    ExternalIp,
    /// Its NodePort.
    NodePort,
}

impl Claim {
    /// The name of the claim in a sentence.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::ClusterIp => "ClusterIP",
            Self::LoadBalancerIp => "load balancer IP",
            Self::ExternalIp => "externalIP",
            Self::NodePort => "NodePort",
        }
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
}

/// A frontend or an address that a Service specifies, and that another Service owns.
#[derive(Debug)]
pub struct Conflict<'a> {
    place: Place,
    /// What the place is for the Service that does not get it.
    claim: Claim,
    owner: &'a Candidate,
}

impl Conflict<'_> {
    /// The field of the Service that does not get the frontend.
    #[must_use]
    pub fn field(&self) -> &'static str {
        match self.claim {
            Claim::ClusterIp => "spec.clusterIPs",
            Claim::LoadBalancerIp => "status.loadBalancer.ingress",
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
        write!(f, " belongs to Service {}, ", self.owner.key)?;
        match self.owner.claim {
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

/// True if a candidate gets nothing at a place with this first candidate.
fn excludes(place: Place, first: &Candidate, candidate: &Candidate) -> bool {
    let is_cluster_ip = |candidate: &Candidate| candidate.claim == Claim::ClusterIp;
    matches!(place, Place::Frontend(_)) || is_cluster_ip(first) && !is_cluster_ip(candidate)
}

impl FrontendOwners {
    /// Replaces the claims of a Service. Returns the other Services that gain or lose a frontend.
    /// The cost depends on the claims that differ.
    pub(crate) fn replace(
        &mut self,
        key: &Arc<ServiceKey>,
        old: Option<&Service>,
        new: Option<&Service>,
    ) -> Vec<Arc<ServiceKey>> {
        let [old, new] = [old, new].map(|service| service.map(|service| places_of(key, service)).unwrap_or_default());
        let mut affected = Vec::new();
        for (place, candidate) in old.iter().filter(|(place, candidate)| new.get(place) != Some(candidate)) {
            self.remove(*place, candidate, &mut affected);
        }
        for (place, candidate) in new {
            if old.get(&place) != Some(&candidate) {
                self.add(place, candidate, &mut affected);
            }
        }
        affected
    }

    fn add(&mut self, place: Place, candidate: Candidate, affected: &mut Vec<Arc<ServiceKey>>) {
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
            affected.extend(losers.iter().map(|loser| Arc::clone(&loser.key)));
        } else if excludes(place, &candidates.first, &later) {
            losers.push(later.clone());
        }
        candidates.others.get_or_insert_default().insert(later);
        for Candidate { key, claim, .. } in losers {
            self.lost.entry(key).or_default().insert(place, claim);
        }
    }

    fn remove(&mut self, place: Place, candidate: &Candidate, affected: &mut Vec<Arc<ServiceKey>>) {
        let Entry::Occupied(mut entry) = self.places.entry(place) else { return };
        let candidates = entry.get_mut();
        let mut winners = Vec::new();
        if candidates.first != *candidate {
            if let Some(others) = &mut candidates.others {
                others.remove(candidate);
            }
            winners.extend(excludes(place, &candidates.first, candidate).then(|| candidate.clone()));
        } else if let Some(next) = candidates.others.as_mut().and_then(|others| others.pop_first()) {
            winners = candidates.losers(place, candidate, &next);
            affected.extend(winners.iter().map(|winner| Arc::clone(&winner.key)));
            candidates.first = next;
        } else {
            entry.remove();
            return;
        }
        candidates.others.take_if(|others| others.is_empty());
        for Candidate { key, .. } in winners {
            if let Some(lost) = self.lost.get_mut(&key) {
                lost.remove(&place);
                if lost.is_empty() {
                    self.lost.remove(&key);
                }
            }
        }
    }

    fn first(&self, frontend: &Frontend) -> Option<&Candidate> {
        let first = |place| self.places.get(&place).map(|candidates| &candidates.first);
        let of_frontend = first(Place::Frontend(*frontend))?;
        match frontend {
            Frontend::Address(address, ..) if of_frontend.claim != Claim::ClusterIp => {
                first(Place::Address(*address)).filter(|first| first.claim == Claim::ClusterIp).or(Some(of_frontend))
            }
            _ => Some(of_frontend),
        }
    }

    /// Returns the Service that owns a frontend, or `None` if no Service specifies the frontend.
    /// The owner of a ClusterIP also owns frontends there that only other Services specify.
    #[must_use]
    pub fn owner(&self, frontend: &Frontend) -> Option<&ServiceKey> {
        self.first(frontend).map(|first| &*first.key)
    }

    /// True if the Service owns the frontend, or if no Service owns it.
    #[must_use]
    pub fn owns(&self, key: &ServiceKey, frontend: &Frontend) -> bool {
        self.owner(frontend).is_none_or(|owner| owner == key)
    }

    /// Returns why a Service that specifies a frontend does not own it.
    #[must_use]
    pub fn conflict(&self, key: &ServiceKey, frontend: Frontend, claim: Claim) -> Option<Conflict<'_>> {
        let owner = self.first(&frontend).filter(|owner| *owner.key != *key)?;
        Some(Conflict { place: Place::Frontend(frontend), claim, owner })
    }

    /// Returns what a Service specifies and another Service owns, addresses first. A frontend at
    /// such an address is no conflict of its own.
    pub fn conflicts(&self, key: &ServiceKey) -> impl Iterator<Item = Conflict<'_>> {
        let lost = self.lost.get(key);
        let has_lost = move |address| lost.is_some_and(|lost| lost.contains_key(&Place::Address(address)));
        lost.into_iter().flatten().filter_map(move |(place, claim)| match place {
            Place::Frontend(Frontend::Address(address, ..)) if has_lost(*address) => None,
            _ => Some(Conflict { place: *place, claim: *claim, owner: &self.places.get(place)?.first }),
        })
    }

    /// Returns the Services with [`Self::conflicts`], in order.
    pub fn losers(&self) -> impl ExactSizeIterator<Item = &Arc<ServiceKey>> {
        self.lost.keys()
    }
}

#[cfg(test)]
mod tests;
