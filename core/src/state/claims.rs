//! Two Services that claim the same address, protocol and port get one deterministic winner: the
//! older, then the one that comes first by namespace and name. The others are left out for that
//! address and shown to the operator.

use std::{
    collections::{HashMap, hash_map::Entry},
    net::IpAddr,
    sync::Arc,
};

use crate::model::{Family, Protocol, Service, ServiceKey};

/// What a Service can claim for one of its ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Claim {
    /// An address and port: a ClusterIP, externalIP or load balancer IP.
    Address(IpAddr, Protocol, u16),
    /// A NodePort of a family.
    NodePort(Family, Protocol, u16),
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Claimant {
    created_unix_seconds: i64,
    key: Arc<ServiceKey>,
}

/// Who claims what. Nearly every claim has one claimant, which is stored without a list.
#[derive(Debug, Default)]
pub struct Claims {
    claims: HashMap<Claim, Claimants>,
}

#[derive(Debug)]
enum Claimants {
    One(Claimant),
    /// Two or more, sorted: the winner first.
    Many(Vec<Claimant>),
}

impl Claimants {
    fn winner(&self) -> Option<&Claimant> {
        match self {
            Self::One(claimant) => Some(claimant),
            Self::Many(claimants) => claimants.first(),
        }
    }
}

/// Every claim of a Service, sorted and without duplicates.
#[must_use]
pub fn claims_of(service: &Service) -> Vec<Claim> {
    let mut claims = Vec::new();
    let addresses = [&service.cluster_ips, &service.external_ips, &service.load_balancer_ips];
    for port in &service.ports {
        let to_claim = |address: &IpAddr| Claim::Address(*address, port.protocol, port.port);
        claims.extend(addresses.iter().flat_map(|list| list.iter().map(to_claim)));
        if port.node_port != 0 {
            let families = Family::BOTH.into_iter().filter(|family| service.cluster_ip(*family).is_some());
            claims.extend(families.map(|family| Claim::NodePort(family, port.protocol, port.node_port)));
        }
    }
    claims.sort_unstable();
    claims.dedup();
    claims
}

impl Claims {
    /// Enters all claims of a Service and returns the services, other than itself, that lost one to
    /// it.
    pub(crate) fn take(&mut self, key: &Arc<ServiceKey>, service: &Service) -> Vec<Arc<ServiceKey>> {
        let mut losers = Vec::new();
        for claim in claims_of(service) {
            let claimant = Claimant { created_unix_seconds: service.created_unix_seconds, key: Arc::clone(key) };
            match self.claims.entry(claim) {
                Entry::Vacant(entry) => {
                    entry.insert(Claimants::One(claimant));
                }
                Entry::Occupied(mut entry) => {
                    let before = entry.get().winner().map(|winner| Arc::clone(&winner.key));
                    let mut all = match std::mem::replace(entry.get_mut(), Claimants::Many(Vec::new())) {
                        Claimants::One(one) => vec![one],
                        Claimants::Many(many) => many,
                    };
                    all.push(claimant);
                    all.sort_unstable();
                    let won = all.first().is_some_and(|winner| winner.key == *key);
                    *entry.get_mut() = Claimants::Many(all);
                    losers.extend(before.filter(|_| won));
                }
            }
        }
        losers
    }

    /// Withdraws all claims of a Service and returns the services that win one by it.
    pub(crate) fn release(&mut self, service: &Service) -> Vec<Arc<ServiceKey>> {
        let mut winners = Vec::new();
        for claim in claims_of(service) {
            let Entry::Occupied(mut entry) = self.claims.entry(claim) else { continue };
            match entry.get_mut() {
                Claimants::One(one) if *one.key == service.key => {
                    entry.remove();
                }
                Claimants::One(_) => {}
                Claimants::Many(many) => {
                    let won = many.first().is_some_and(|winner| *winner.key == service.key);
                    many.retain(|claimant| *claimant.key != service.key);
                    winners.extend(many.first().filter(|_| won).map(|winner| Arc::clone(&winner.key)));
                    if let [last] = many.as_slice() {
                        *entry.get_mut() = Claimants::One(last.clone());
                    }
                }
            }
        }
        winners
    }

    /// The Service that a claim belongs to, `None` when nobody claims it.
    #[must_use]
    pub fn winner(&self, claim: &Claim) -> Option<&ServiceKey> {
        self.claims.get(claim)?.winner().map(|winner| &*winner.key)
    }

    /// True when the Service may use what it claims.
    #[must_use]
    pub fn holds(&self, key: &ServiceKey, claim: &Claim) -> bool {
        self.winner(claim).is_none_or(|winner| winner == key)
    }

    /// The claims of a Service that another one holds, each with its holder.
    #[must_use]
    pub fn lost<'a>(&'a self, service: &Service) -> Vec<(Claim, &'a ServiceKey)> {
        let with_winner = |claim: Claim| Some((claim, self.winner(&claim)?));
        claims_of(service).into_iter().filter_map(with_winner).filter(|(_, winner)| **winner != service.key).collect()
    }
}
