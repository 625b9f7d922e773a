//! Which UDP flows a change leaves behind in the connection tracking table.
//!
//! Address translation is per flow: rules say where a flow's first packet goes, and the table sends
//! all later ones after it. A TCP client whose endpoint is gone notices and connects anew. A UDP
//! client does not, and as long as it sends, its entry lives. So for UDP, and for UDP alone,
//! entries are deleted that lead to what is no longer an endpoint. Where kube-proxy 1.36 leaves
//! flows stale or hits the wrong ones, this does better:
//!
//! - A service that is scaled to zero, deleted, or that loses an address or a port is cleaned too:
//!   what it used is remembered.
//! - What was planned is remembered until it was handed over ([`Tracker::commit`]), so a failed
//!   sync forgets nothing.
//! - NodePort flows count on the node's own addresses only.
//! - Endpoints that are ready without serving (publishNotReadyAddresses) keep their flows, like all
//!   that serve: whatever the policy, the topology, and whether they terminate.
//!
//! Work is proportional to the change: a service that only gained endpoints has nothing to clean,
//! and one that lost a few is looked for by those, not by listing all flows to it. Memory goes to
//! services with UDP ports only.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use crate::{
    behaviours::endpoint_choice::joins,
    model::{Endpoint, Family, Protocol, Service, ServiceKey, ServicePort},
    state::State,
    state::frontends::Frontend,
};

/// Where a client sends to, before translation. UDP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum OriginalDestination {
    /// An address of a service, and its port.
    Address(IpAddr, u16),
    /// A NodePort at any of the node's own addresses.
    NodePort(Family, u16),
}

impl OriginalDestination {
    /// Its family.
    #[must_use]
    pub fn family(self) -> Family {
        match self {
            Self::Address(address, _) => Family::of(address),
            Self::NodePort(family, _) => family,
        }
    }

    fn frontend(self) -> Frontend {
        match self {
            Self::Address(address, port) => Frontend::Address(address, Protocol::Udp, port),
            Self::NodePort(family, port) => Frontend::NodePort(family, Protocol::Udp, port),
        }
    }
}

/// Endpoints: sorted, without duplicates, shared by the destinations of one service port.
pub type Sources = Arc<[SocketAddr]>;

/// Which flows to a destination may be stale. Narrows the search; [`Rule`] decides.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Suspects {
    /// Any: its past is not known.
    Any,
    /// Those that these endpoints answer.
    Sources(BTreeSet<SocketAddr>),
}

/// Which flows to one destination stay.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// Flows that one of these answers.
    pub keep: Sources,
    /// Flows that nobody translated: no service is at this destination any more, and whoever has
    /// the address now is none of our business.
    pub keep_untranslated: bool,
    /// Where to look.
    pub suspects: Suspects,
}

/// Stale flows to be found and deleted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cleanup {
    rules: BTreeMap<OriginalDestination, Rule>,
}

/// What the kernel is asked to list: UDP entries of a family for which everything that is given
/// here holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Filter {
    /// Family.
    pub family: Family,
    /// Original destination address.
    pub original_address: Option<IpAddr>,
    /// Original destination port.
    pub original_port: Option<u16>,
    /// Source of replies: the endpoint.
    pub reply_source: Option<SocketAddr>,
}

impl Filter {
    /// All UDP entries of a family.
    #[must_use]
    pub fn all(family: Family) -> Self {
        Self { family, original_address: None, original_port: None, reply_source: None }
    }

    /// Entries to a destination. Those to a NodePort number include other machines' addresses.
    #[must_use]
    pub fn to(destination: OriginalDestination) -> Self {
        let (original_address, port) = match destination {
            OriginalDestination::Address(address, port) => (Some(address), port),
            OriginalDestination::NodePort(_, port) => (None, port),
        };
        Self { original_address, original_port: Some(port), ..Self::all(destination.family()) }
    }

    /// Entries that an endpoint answers.
    #[must_use]
    pub fn answered_by(source: SocketAddr) -> Self {
        Self { reply_source: Some(source), ..Self::all(Family::of(source.ip())) }
    }

    /// True when an entry is among those asked for.
    #[must_use]
    pub fn admits(&self, original: SocketAddr, reply_source: SocketAddr) -> bool {
        Family::of(original.ip()) == self.family
            && self.original_address.is_none_or(|address| address == original.ip())
            && self.original_port.is_none_or(|port| port == original.port())
            && self.reply_source.is_none_or(|source| source == reply_source)
    }
}

impl Cleanup {
    /// True when there is nothing to look for.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rules.values().all(Rule::is_idle)
    }

    /// The rules by destination.
    pub fn rules(&self) -> impl Iterator<Item = (OriginalDestination, &Rule)> {
        self.rules.iter().map(|(destination, rule)| (*destination, rule))
    }

    /// Some rule is about NodePorts, so the node's own addresses have to be known.
    #[must_use]
    pub fn needs_node_addresses(&self) -> bool {
        self.rules.keys().any(|destination| matches!(destination, OriginalDestination::NodePort(..)))
    }

    /// Merges newer rules into a queue that nobody works on yet. As [`Self::merge`], but keeps
    /// rules without suspects: they may correct rules that somebody works on.
    pub fn merge_queued(&mut self, newer: Self) {
        newer.rules.into_iter().for_each(|(destination, rule)| self.add(destination, rule));
    }

    /// Merges newer rules into those that are being worked on. The newer rule of a destination
    /// decides, and the suspects of both are looked at.
    pub fn merge(&mut self, newer: Self) {
        for (destination, rule) in newer.rules {
            // A rule without suspects only corrects a rule that is there.
            if !rule.is_idle() || self.rules.contains_key(&destination) {
                self.add(destination, rule);
            }
        }
        self.rules.retain(|_, rule| !rule.is_idle());
    }

    /// What to ask the kernel for, so that every stale flow is among the answers. Each filter makes
    /// the kernel walk its whole table, which takes a good part of the time that telling us all of
    /// it would; a family that would need more than `limit` filters is listed whole.
    #[must_use]
    pub fn filters(&self, limit: usize) -> Vec<Filter> {
        Family::BOTH.into_iter().flat_map(|family| self.family_filters(family, limit)).collect()
    }

    fn family_filters(&self, family: Family, limit: usize) -> Vec<Filter> {
        let (mut unknown, mut known, mut sources) = (Vec::new(), Vec::new(), BTreeSet::new());
        for (destination, rule) in self.rules().filter(|(destination, _)| destination.family() == family) {
            match &rule.suspects {
                Suspects::Any => unknown.push(destination),
                Suspects::Sources(suspects) if suspects.is_empty() => {}
                Suspects::Sources(suspects) => {
                    known.push(destination);
                    sources.extend(suspects.iter().copied());
                }
            }
        }
        // The past of a few endpoints, or all flows of a few destinations: whichever is fewer.
        let mut filters = by_destination(unknown.iter().copied());
        let of_all = by_destination(unknown.into_iter().chain(known));
        filters.extend(sources.into_iter().map(Filter::answered_by));
        if of_all.len() < filters.len() {
            filters = of_all;
        }
        if filters.len() > limit { vec![Filter::all(family)] } else { filters.into_iter().collect() }
    }

    /// True when an entry has to go: its original destination is one of the rules', and its replies
    /// come from elsewhere than the rule keeps. `is_node_address` tells the node's own addresses.
    #[must_use]
    pub fn is_stale(
        &self,
        original: SocketAddr,
        reply_source: SocketAddr,
        is_node_address: impl Fn(IpAddr) -> bool,
    ) -> bool {
        let at_address = self.rules.get(&OriginalDestination::Address(original.ip(), original.port()));
        let rule = at_address.or_else(|| {
            let node_port = OriginalDestination::NodePort(Family::of(original.ip()), original.port());
            self.rules.get(&node_port).filter(|_| is_node_address(original.ip()))
        });
        rule.is_some_and(|rule| {
            let is_untranslated = original == reply_source;
            rule.keep.binary_search(&reply_source).is_err() && !(is_untranslated && rule.keep_untranslated)
        })
    }

    /// The rule replaces an older one, whose suspects it inherits; those that it keeps are none.
    fn add(&mut self, destination: OriginalDestination, mut rule: Rule) {
        let older = self.rules.remove(&destination).map(|rule| rule.suspects);
        match (&mut rule.suspects, older) {
            (Suspects::Sources(sources), Some(Suspects::Sources(older))) => sources.extend(older),
            (suspects, Some(Suspects::Any)) => *suspects = Suspects::Any,
            _ => {}
        }
        if let Suspects::Sources(sources) = &mut rule.suspects {
            sources.retain(|source| rule.keep.binary_search(source).is_err());
        }
        self.rules.insert(destination, rule);
    }
}

/// Several destinations with the same port are looked for at once.
fn by_destination(destinations: impl Iterator<Item = OriginalDestination>) -> BTreeSet<Filter> {
    let mut by_port: BTreeMap<Option<u16>, Filter> = BTreeMap::new();
    for filter in destinations.map(Filter::to) {
        let merged = by_port.entry(filter.original_port).or_insert(filter);
        if *merged != filter {
            merged.original_address = None;
        }
    }
    by_port.into_values().collect()
}

impl Rule {
    /// Nothing can be stale.
    fn is_idle(&self) -> bool {
        matches!(&self.suspects, Suspects::Sources(sources) if sources.is_empty())
    }
}

/// The destinations that a service holds, each with the endpoints that keep their flows.
type Held = BTreeMap<OriginalDestination, Sources>;

/// What a step leaves to be cleaned. Give it back to [`Tracker::commit`] when its rules are in the
/// kernel; drop it when they are not.
#[derive(Debug, Default)]
pub struct CleanupPlan {
    /// Flows to be deleted once the rules are in place.
    pub cleanup: Cleanup,
    settled: Vec<(Arc<ServiceKey>, Held)>,
}

/// Remembers, for services with UDP ports, to where rules may have sent flows since they were last
/// cleaned.
#[derive(Debug, Default)]
pub struct Tracker {
    used: HashMap<Arc<ServiceKey>, Held>,
}

impl Tracker {
    /// What programming these services leaves stale. A plan that is not committed stays to be done:
    /// it is part of the next one that names its services.
    pub fn plan<'a>(&mut self, state: &State, services: impl IntoIterator<Item = &'a Arc<ServiceKey>>) -> CleanupPlan {
        self.plan_services(state, services, true)
    }

    /// The same for services that the kernel may have seen in states that this tracker has not.
    pub fn plan_unknown<'a>(
        &mut self,
        state: &State,
        services: impl IntoIterator<Item = &'a Arc<ServiceKey>>,
    ) -> CleanupPlan {
        self.plan_services(state, services, false)
    }

    /// The same for everything, when rules are programmed whole: at the start, or after somebody
    /// removed them. What happened until then is not known, so all flows to UDP services are
    /// suspects. A full pass.
    pub fn plan_all(&mut self, state: &State) -> CleanupPlan {
        let mut plan = CleanupPlan::default();
        let gone: Vec<_> = self.used.keys().filter(|key| state.entry(key).is_none()).cloned().collect();
        for key in state.entries().map(|(key, _)| key).chain(&gone) {
            self.plan_service(state, key, false, &mut plan);
        }
        plan
    }

    /// The rules of a plan are in the kernel, and its cleanup is in the hands of somebody who does
    /// not give up.
    pub fn commit(&mut self, plan: CleanupPlan) -> Cleanup {
        for (key, held) in plan.settled {
            if held.is_empty() {
                self.used.remove(&key);
            } else {
                self.used.insert(key, held);
            }
        }
        plan.cleanup
    }

    /// Number of services remembered.
    #[must_use]
    pub fn len(&self) -> usize {
        self.used.len()
    }

    /// True when no service has a UDP port.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.used.is_empty()
    }

    fn plan_services<'a>(
        &mut self,
        state: &State,
        services: impl IntoIterator<Item = &'a Arc<ServiceKey>>,
        is_past_known: bool,
    ) -> CleanupPlan {
        let mut plan = CleanupPlan::default();
        for key in services {
            self.plan_service(state, key, is_past_known, &mut plan);
        }
        plan
    }

    fn plan_service(&mut self, state: &State, key: &Arc<ServiceKey>, is_past_known: bool, plan: &mut CleanupPlan) {
        let held = held(state, key);
        if held.is_empty() && !self.used.contains_key(key) {
            return;
        }
        let used = self.used.entry(Arc::clone(key)).or_default();
        for (destination, keep) in &held {
            let suspects = match used.get(destination) {
                // Before the first endpoint there were no translations, and what passed
                // untranslated is not known.
                Some(sources) if is_past_known && (!sources.is_empty() || keep.is_empty()) => {
                    Suspects::Sources(sources.iter().copied().collect())
                }
                _ => Suspects::Any,
            };
            plan.cleanup.add(*destination, Rule { keep: Arc::clone(keep), keep_untranslated: false, suspects });
        }
        for (destination, sources) in used.iter().filter(|(destination, _)| !held.contains_key(destination)) {
            plan.cleanup.add(*destination, left_behind(state, *destination, sources));
        }
        for (destination, keep) in &held {
            let sources = used.entry(*destination).or_insert_with(|| Arc::clone(keep));
            if sources != keep {
                let both: BTreeSet<SocketAddr> = sources.iter().chain(keep.iter()).copied().collect();
                *sources = both.into_iter().collect();
            }
        }
        plan.settled.push((Arc::clone(key), held));
    }
}

/// The rule for a destination that a service used and no longer holds; another one may hold it now.
fn left_behind(state: &State, destination: OriginalDestination, sources: &Sources) -> Rule {
    let keep =
        state.frontends().owner(&destination.frontend()).and_then(|owner| held(state, owner).remove(&destination));
    Rule {
        keep_untranslated: keep.is_none(),
        keep: keep.unwrap_or_default(),
        suspects: Suspects::Sources(sources.iter().copied().collect()),
    }
}

/// What a service holds with its UDP ports; empty when it has none or is unknown. A family without
/// a ClusterIP is not programmed.
fn held(state: &State, key: &ServiceKey) -> Held {
    let mut held = Held::new();
    let Some(entry) = state.entry(key) else { return held };
    let Some(service) = entry.service() else { return held };
    for port in service.ports.iter().filter(|port| port.protocol == Protocol::Udp) {
        for family in Family::BOTH.into_iter().filter(|family| service.cluster_ip(*family).is_some()) {
            let keep = keep(entry.endpoints().values(), port, family);
            for destination in destinations(service, port, family) {
                if state.frontends().owns(key, &destination.frontend()) {
                    held.insert(destination, Arc::clone(&keep));
                }
            }
        }
    }
    held
}

fn destinations(service: &Service, port: &ServicePort, family: Family) -> impl Iterator<Item = OriginalDestination> {
    let lists = [&service.cluster_ips, &service.external_ips, &service.load_balancer_ips];
    let of_family = lists.into_iter().flatten().filter(move |address| Family::of(**address) == family);
    let number = port.port;
    let node_port = (port.node_port != 0).then_some(OriginalDestination::NodePort(family, port.node_port));
    of_family.map(move |address| OriginalDestination::Address(*address, number)).chain(node_port)
}

/// Addresses and ports whose flows stay: all that serve or are ready.
fn keep<'a>(endpoints: impl Iterator<Item = &'a Endpoint>, port: &ServicePort, family: Family) -> Sources {
    let mut keep: Vec<SocketAddr> = endpoints
        .filter(|endpoint| Family::of(endpoint.address) == family)
        .flat_map(Endpoint::port_states)
        .filter(|state| joins(state.port, port) && (state.conditions.serving || state.conditions.ready))
        .map(|state| SocketAddr::new(state.address, state.port.port))
        .collect();
    keep.sort_unstable();
    keep.dedup();
    keep.into()
}

#[cfg(test)]
mod tests;
