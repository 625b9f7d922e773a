//! What rules do with a packet.

use std::{
    collections::{BTreeSet, HashSet},
    net::SocketAddr,
    sync::Arc,
};

use headgate_core::forwarding::{Entry, Fate};
use ipnet::IpNet;

/// How a packet ends that is not translated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ending {
    Accept,
    Drop,
    Reject,
}

impl Ending {
    /// The fate of an untranslated packet.
    pub(crate) fn fate(ending: Option<Self>) -> Fate {
        match ending {
            None | Some(Self::Accept) => Fate::NotServed,
            Some(Self::Drop) => Fate::Dropped,
            Some(Self::Reject) => Fate::Rejected,
        }
    }
}

/// What rules do with a packet. Random numbers, affinity and source ranges allow several.
#[derive(Debug, Clone, Default)]
pub(crate) struct Outcome {
    /// Lists of endpoints that the packet may reach. Many frontends share a list.
    pub(crate) endpoints: BTreeSet<Arc<[SocketAddr]>>,
    /// Those of clients that were recorded for ClientIP affinity.
    pub(crate) recorded: BTreeSet<Arc<[SocketAddr]>>,
    pub(crate) ending: Option<Ending>,
    /// Some packets go on with the next rule, or leave the chain at its end.
    pub(crate) goes_on: bool,
    /// Some packets leave the chain before its end. They meet none of its later rules.
    pub(crate) returns: bool,
    /// The clients to whom this applies. Empty for all clients.
    pub(crate) admitted: BTreeSet<IpNet>,
}

impl Outcome {
    pub(crate) fn goes_on() -> Self {
        Self { goes_on: true, ..Self::default() }
    }

    pub(crate) fn returns() -> Self {
        Self { returns: true, ..Self::default() }
    }

    pub(crate) fn ends(ending: Ending) -> Self {
        Self { ending: Some(ending), ..Self::default() }
    }

    pub(crate) fn reaches(endpoint: SocketAddr) -> Self {
        Self { endpoints: [[endpoint].into()].into(), ..Self::default() }
    }

    /// What a jump to a chain with this outcome does.
    pub(crate) fn of_jump(mut self) -> Self {
        self.goes_on |= std::mem::take(&mut self.returns);
        self
    }

    /// What a goto to a chain with this outcome does.
    pub(crate) fn of_goto(mut self) -> Self {
        self.returns |= std::mem::take(&mut self.goes_on);
        self
    }

    /// Adds what else may happen to the packet, or what a later rule does.
    pub(crate) fn add(&mut self, other: Self) {
        self.endpoints.extend(other.endpoints);
        self.recorded.extend(other.recorded);
        self.ending = self.ending.or(other.ending);
        self.goes_on |= other.goes_on;
        self.returns |= other.returns;
        self.admitted.extend(other.admitted);
    }

    /// The fate of packets that the rules may translate.
    pub(crate) fn fate(&self) -> Fate {
        let endpoints = match self.endpoints.first() {
            Some(list) if self.endpoints.len() == 1 && self.recorded.is_empty() => Arc::clone(list),
            _ => {
                let [all, recorded] =
                    [&self.endpoints, &self.recorded].map(|lists| lists.iter().flat_map(|one| &**one));
                with_recorded(all.copied().collect(), &recorded.copied().collect()).into_iter().collect()
            }
        };
        match self.goes_on || self.returns || self.ending.is_some() {
            _ if endpoints.is_empty() => Fate::NotServed,
            true => Fate::Partly(endpoints),
            false => Fate::Forwarded(endpoints),
        }
    }

    /// How all packets end. `None` if some of them go on.
    pub(crate) fn ending_of_all(&self) -> Option<Ending> {
        self.ending.filter(|_| !self.goes_on && !self.returns)
    }
}

/// Returns the endpoints of new clients that also receive recorded clients: with ClientIP affinity,
/// rules of iptables name each endpoint twice, and one of both may be missing.
pub(crate) fn with_recorded(endpoints: BTreeSet<SocketAddr>, recorded: &BTreeSet<SocketAddr>) -> BTreeSet<SocketAddr> {
    if recorded.is_empty() || endpoints.is_subset(recorded) {
        return endpoints;
    }
    endpoints.intersection(recorded).copied().collect()
}

/// The lists of endpoints so far. Equal lists become one, to save memory.
#[derive(Debug, Default)]
pub(crate) struct Lists(HashSet<Arc<[SocketAddr]>>);

impl Lists {
    pub(crate) fn share(&mut self, entry: &mut Entry) {
        for fate in &mut entry.fates {
            let (Fate::Forwarded(list) | Fate::Partly(list)) = fate else { continue };
            match self.0.get(list) {
                Some(known) => *list = Arc::clone(known),
                None => drop(self.0.insert(Arc::clone(list))),
            }
        }
    }
}
