//! The owners of frontends. Several Services may specify the same frontend, and one of them owns
//! it.
//!
//! A frontend is an address, protocol and port, or a NodePort. The oldest Service owns the
//! frontend. Among Services of equal age, the first by namespace and name owns it. No node forwards
//! traffic from the frontend to the other Services. `headgatectl` shows these Services as
//! conflicts.

use std::{
    collections::{HashMap, hash_map::Entry},
    fmt,
    net::IpAddr,
    sync::Arc,
};

use crate::model::{Family, Protocol, Service, ServiceKey, ServicePort};

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
    created_unix_seconds: i64,
    key: Arc<ServiceKey>,
}

/// The Services that specify each frontend, as candidates. Nearly every frontend has a single
/// candidate, which is stored without a list.
#[derive(Debug, Default)]
pub struct FrontendOwners {
    frontends: HashMap<Frontend, Candidates>,
}

#[derive(Debug)]
enum Candidates {
    One(Candidate),
    /// Two or more candidates, sorted. The first candidate is the owner.
    Many(Vec<Candidate>),
}

impl Candidates {
    fn owner(&self) -> Option<&Candidate> {
        match self {
            Self::One(candidate) => Some(candidate),
            Self::Many(candidates) => candidates.first(),
        }
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
pub(crate) fn frontends_of_port(service: &Service, port: &ServicePort) -> impl Iterator<Item = Frontend> {
    let ServicePort { protocol, port, node_port, .. } = *port;
    let addresses = [&service.cluster_ips, &service.external_ips, &service.load_balancer_ips].into_iter().flatten();
    let has_node_port = move |family: &Family| node_port != 0 && service.cluster_ip(*family).is_some();
    let node_ports = Family::BOTH.into_iter().filter(has_node_port);
    let at_addresses = addresses.map(move |address| Frontend::Address(*address, protocol, port));
    at_addresses.chain(node_ports.map(move |family| Frontend::NodePort(family, protocol, node_port)))
}

/// Returns every frontend that a Service specifies, sorted and without duplicates.
fn frontends_of(service: &Service) -> Vec<Frontend> {
    let mut frontends: Vec<_> = service.ports.iter().flat_map(|port| frontends_of_port(service, port)).collect();
    frontends.sort_unstable();
    frontends.dedup();
    frontends
}

impl FrontendOwners {
    /// Adds a Service as a candidate for its frontends. Returns the Services that lose a frontend
    /// to this Service.
    pub(crate) fn add(&mut self, key: &Arc<ServiceKey>, service: &Service) -> Vec<Arc<ServiceKey>> {
        let mut losers = Vec::new();
        for frontend in frontends_of(service) {
            let candidate = Candidate { created_unix_seconds: service.created_unix_seconds, key: Arc::clone(key) };
            match self.frontends.entry(frontend) {
                Entry::Vacant(entry) => {
                    entry.insert(Candidates::One(candidate));
                }
                Entry::Occupied(mut entry) => {
                    let before = entry.get().owner().map(|owner| Arc::clone(&owner.key));
                    let mut all = match std::mem::replace(entry.get_mut(), Candidates::Many(Vec::new())) {
                        Candidates::One(one) => vec![one],
                        Candidates::Many(many) => many,
                    };
                    all.push(candidate);
                    all.sort_unstable();
                    let is_owner = all.first().is_some_and(|owner| owner.key == *key);
                    *entry.get_mut() = Candidates::Many(all);
                    losers.extend(before.filter(|_| is_owner));
                }
            }
        }
        losers
    }

    /// Removes a Service from the candidates for its frontends. Returns the Services that become
    /// owners of one of these frontends.
    pub(crate) fn remove(&mut self, service: &Service) -> Vec<Arc<ServiceKey>> {
        let mut new_owners = Vec::new();
        for frontend in frontends_of(service) {
            let Entry::Occupied(mut entry) = self.frontends.entry(frontend) else { continue };
            match entry.get_mut() {
                Candidates::One(one) if *one.key == service.key => {
                    entry.remove();
                }
                Candidates::One(_) => {}
                Candidates::Many(many) => {
                    let was_owner = many.first().is_some_and(|owner| *owner.key == service.key);
                    many.retain(|candidate| *candidate.key != service.key);
                    new_owners.extend(many.first().filter(|_| was_owner).map(|owner| Arc::clone(&owner.key)));
                    if let [last] = many.as_slice() {
                        *entry.get_mut() = Candidates::One(last.clone());
                    }
                }
            }
        }
        new_owners
    }

    /// Returns the Service that owns a frontend, or `None` if no Service specifies the frontend.
    #[must_use]
    pub fn owner(&self, frontend: &Frontend) -> Option<&ServiceKey> {
        self.frontends.get(frontend)?.owner().map(|owner| &*owner.key)
    }

    /// True if the Service owns the frontend, or if no Service owns it.
    #[must_use]
    pub fn owns(&self, key: &ServiceKey, frontend: &Frontend) -> bool {
        self.owner(frontend).is_none_or(|owner| owner == key)
    }

    /// Returns the frontends that a Service asks for and another Service owns, each with its owner.
    #[must_use]
    pub fn conflicts<'a>(&'a self, service: &Service) -> Vec<(Frontend, &'a ServiceKey)> {
        let with_owner = |frontend: Frontend| Some((frontend, self.owner(&frontend)?));
        frontends_of(service).into_iter().filter_map(with_owner).filter(|(_, owner)| **owner != service.key).collect()
    }
}
