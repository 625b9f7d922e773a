//! Stale UDP flows: which entries of the connection tracking table the agent must delete after a
//! change.
//!
//! Rules choose the endpoint for the first packet of a flow. The connection tracking table then
//! translates all later packets of the flow. When an endpoint is removed, a TCP client notices and
//! opens a new connection. A UDP client does not notice, and its entry remains in the table as long
//! as the client sends. So the agent deletes UDP entries whose replies come from an address that is
//! no longer an endpoint. kube-proxy 1.36 misses some stale flows and deletes some valid flows.
//! This module differs from kube-proxy in four points. The [`Tracker`]
//!
//! - also finds stale flows after a service is deleted or scaled to zero, and after a service loses
//!   an address or a port, because it remembers the endpoints that the service used, also those of
//!   an earlier run ([`Tracker::remember_rules`]);
//! - forgets these endpoints only when the caller takes over the cleanup ([`Tracker::commit`]), so
//!   a failed sync loses nothing;
//! - selects flows to a NodePort only if they were sent to an address of this node;
//! - keeps flows of all endpoints that are serving or ready. Such endpoints may be terminating,
//!   ready without serving (publishNotReadyAddresses), or excluded by policy or topology.
//!
//! A service that only gained endpoints causes no search. A search reads all UDP entries of a
//! family. Only services with UDP ports use memory.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use crate::{
    behaviours::view::candidates,
    model::{Endpoint, Family, Protocol, ServiceKey, ServicePort},
    state::State,
    state::frontends::{Frontend, frontends_of_port},
};

/// Endpoints, sorted and without duplicates. They are the sources of replies. All destinations of a
/// service port share one list.
pub type Sources = Arc<[SocketAddr]>;

/// The flows to a destination that may be stale. Without any, no search is needed; the [`FlowRule`]
/// decides whether a flow is stale.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Suspects {
    /// All flows, because the earlier endpoints are unknown.
    Any,
    /// The flows whose replies come from these endpoints.
    Sources(BTreeSet<SocketAddr>),
}

/// Which flows to one destination are kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FlowRule {
    /// Endpoints whose flows are kept.
    pub keep: Sources,
    /// Also keep flows whose addresses were not translated. Set if no service owns the destination
    /// any more: another program may use the address now.
    pub keep_untranslated: bool,
    /// The flows that may be stale.
    pub suspects: Suspects,
}

/// Stale flows to be found and deleted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cleanup {
    rules: BTreeMap<Frontend, FlowRule>,
}

impl Cleanup {
    /// True if no flow can be stale.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rules.values().all(FlowRule::is_idle)
    }

    /// Returns the rules by destination.
    pub fn rules(&self) -> impl Iterator<Item = (Frontend, &FlowRule)> {
        self.rules.iter().map(|(destination, rule)| (*destination, rule))
    }

    /// True if a rule is about a NodePort. Then [`Self::is_stale`] needs the addresses of the node.
    #[must_use]
    pub fn needs_node_addresses(&self) -> bool {
        self.rules.keys().any(|destination| matches!(destination, Frontend::NodePort(..)))
    }

    /// Merges newer rules into the rules of a search that is running. The newer rule of a
    /// destination replaces the older rule and inherits its suspects.
    pub fn merge(&mut self, newer: Self) {
        for (destination, rule) in newer.rules {
            // A rule without suspects is needed only to replace an older rule.
            if !rule.is_idle() || self.rules.contains_key(&destination) {
                self.add(destination, rule);
            }
        }
        self.rules.retain(|_, rule| !rule.is_idle());
    }

    /// True if a flow of this family may be stale.
    #[must_use]
    pub fn concerns(&self, family: Family) -> bool {
        self.rules().any(|(destination, rule)| destination.family() == family && !rule.is_idle())
    }

    /// True if an entry must be deleted: a rule exists for its original destination, and the rule
    /// does not keep the source of its replies. `is_node_address` returns true for addresses of
    /// this node.
    #[must_use]
    pub fn is_stale(
        &self,
        original: SocketAddr,
        reply_source: SocketAddr,
        is_node_address: impl Fn(IpAddr) -> bool,
    ) -> bool {
        let at_address = self.rules.get(&Frontend::Address(original.ip(), Protocol::Udp, original.port()));
        let rule = at_address.or_else(|| {
            let node_port = Frontend::NodePort(Family::of(original.ip()), Protocol::Udp, original.port());
            self.rules.get(&node_port).filter(|_| is_node_address(original.ip()))
        });
        rule.is_some_and(|rule| {
            let is_untranslated = original == reply_source;
            rule.keep.binary_search(&reply_source).is_err() && !(is_untranslated && rule.keep_untranslated)
        })
    }

    /// Adds a rule. The new rule replaces an older rule for the destination and inherits the
    /// suspects of the older rule, except endpoints that the new rule keeps.
    fn add(&mut self, destination: Frontend, mut rule: FlowRule) {
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

impl FlowRule {
    /// True if no flow to the destination can be stale.
    fn is_idle(&self) -> bool {
        matches!(&self.suspects, Suspects::Sources(sources) if sources.is_empty())
    }
}

/// The destinations that a service owns, each with the endpoints whose flows are kept.
type Owned = BTreeMap<Frontend, Sources>;

/// The cleanup after a step. When the rules of the step are in the kernel, the caller passes the
/// plan to [`Tracker::commit`]. If the step failed, the caller drops the plan.
#[derive(Debug, Default)]
pub struct CleanupPlan {
    /// Flows to be deleted once the rules are in place.
    pub cleanup: Cleanup,
    owned: Vec<(Arc<ServiceKey>, Owned)>,
    is_for_all: bool,
}

/// Remembers, for services with UDP ports, the endpoints to which rules may have sent flows since
/// the last cleanup.
#[derive(Debug, Default)]
pub struct Tracker {
    used: HashMap<Arc<ServiceKey>, Owned>,
    /// True if the last committed plan was from [`Self::plan_all`]. The full sync may have
    /// programmed a newer state than that plan saw. The next plan contains the services that
    /// changed in the meantime. The tracker does not know all former endpoints of these services,
    /// so all their flows are suspects.
    is_after_all: bool,
}

impl Tracker {
    /// Plans the cleanup after the rules of these services are programmed. If a plan is not
    /// committed, the next plan for its services includes it.
    pub fn plan<'a>(&mut self, state: &State, services: impl IntoIterator<Item = &'a Arc<ServiceKey>>) -> CleanupPlan {
        let mut plan = CleanupPlan::default();
        for key in services {
            self.plan_service(state, key, !self.is_after_all, &mut plan);
        }
        plan
    }

    /// Plans the cleanup after the rules of all services are programmed: at the start, and after
    /// another program has removed them. All flows are suspects. The cost is linear in the number
    /// of services.
    pub fn plan_all(&mut self, state: &State) -> CleanupPlan {
        let mut plan = CleanupPlan { is_for_all: true, ..CleanupPlan::default() };
        let removed: Vec<_> = self.used.keys().filter(|key| state.entry(key).is_none()).cloned().collect();
        for key in state.entries().map(|(key, _)| key).chain(&removed) {
            self.plan_service(state, key, false, &mut plan);
        }
        plan
    }

    /// Remembers destinations of an earlier run and their endpoints: those of its state. Call this
    /// function before the first plan.
    pub fn remember(&mut self, earlier: &State) {
        let plan = self.plan_all(earlier);
        self.commit(plan);
    }

    /// Like [`Self::remember`], for destinations that rules of an earlier run have.
    pub fn remember_rules(&mut self, earlier: impl IntoIterator<Item = (Frontend, Sources)>) {
        // No Service has this name, so the next plan for all services counts it as deleted.
        self.used.entry(Arc::new(ServiceKey::new("", ""))).or_default().extend(earlier);
    }

    /// Records that the rules of a plan are in the kernel. Returns the cleanup of the plan. The
    /// tracker does not keep the cleanup, so the caller must retry the cleanup until it succeeds.
    pub fn commit(&mut self, plan: CleanupPlan) -> Cleanup {
        for (key, owned) in plan.owned {
            if owned.is_empty() {
                self.used.remove(&key);
            } else {
                self.used.insert(key, owned);
            }
        }
        self.is_after_all = plan.is_for_all;
        plan.cleanup
    }

    /// True if the tracker remembers no service.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.used.is_empty()
    }

    fn plan_service(&mut self, state: &State, key: &Arc<ServiceKey>, is_past_known: bool, plan: &mut CleanupPlan) {
        let owned = owned_destinations(state, key);
        if owned.is_empty() && !self.used.contains_key(key) {
            return;
        }
        let used = self.used.entry(Arc::clone(key)).or_default();
        for (destination, keep) in &owned {
            let suspects = match used.get(destination) {
                // As long as a service has no endpoints, its packets are not translated. If the
                // service has just got its first endpoint, flows without translation may exist.
                Some(sources) if is_past_known && (!sources.is_empty() || keep.is_empty()) => {
                    Suspects::Sources(sources.iter().copied().collect())
                }
                _ => Suspects::Any,
            };
            plan.cleanup.add(*destination, FlowRule { keep: Arc::clone(keep), keep_untranslated: false, suspects });
        }
        for (destination, sources) in used.iter().filter(|(destination, _)| !owned.contains_key(destination)) {
            plan.cleanup.add(*destination, rule_after_loss(state, *destination, sources));
        }
        for (destination, keep) in &owned {
            let sources = used.entry(*destination).or_insert_with(|| Arc::clone(keep));
            if sources != keep {
                let both: BTreeSet<SocketAddr> = sources.iter().chain(keep.iter()).copied().collect();
                *sources = both.into_iter().collect();
            }
        }
        plan.owned.push((Arc::clone(key), owned));
    }
}

/// Returns the rule for a destination that a service used and no longer owns. Another service may
/// own the destination now.
fn rule_after_loss(state: &State, destination: Frontend, sources: &Sources) -> FlowRule {
    let keep =
        state.frontends().owner(&destination).and_then(|owner| owned_destinations(state, owner).remove(&destination));
    FlowRule {
        keep_untranslated: keep.is_none(),
        keep: keep.unwrap_or_default(),
        suspects: Suspects::Sources(sources.iter().copied().collect()),
    }
}

/// Returns the destinations that a service owns with its UDP ports. The map is empty if the service
/// has no UDP ports or is unknown. A family without a ClusterIP is not programmed.
fn owned_destinations(state: &State, key: &ServiceKey) -> Owned {
    let mut owned = Owned::new();
    let Some(entry) = state.entry(key) else { return owned };
    let Some(service) = entry.service() else { return owned };
    for port in service.ports.iter().filter(|port| port.protocol == Protocol::Udp) {
        for family in Family::BOTH.into_iter().filter(|family| service.cluster_ip(*family).is_some()) {
            let keep = keep(entry.endpoints().values(), port, family);
            let frontends = frontends_of_port(service, port).map(|(destination, _)| destination);
            let of_family = frontends.filter(|destination| destination.family() == family);
            let own = of_family.filter(|destination| state.frontends().owns(key, destination));
            owned.extend(own.map(|destination| (destination, Arc::clone(&keep))));
        }
    }
    owned
}

/// Returns the endpoints whose flows are kept: all endpoints that are serving or ready.
fn keep<'a>(endpoints: impl Iterator<Item = &'a Endpoint> + Clone, port: &ServicePort, family: Family) -> Sources {
    let mut keep: Vec<SocketAddr> = candidates(endpoints, port, family)
        .filter(|state| state.conditions.serving || state.conditions.ready)
        .map(|state| SocketAddr::new(state.address, state.port.port))
        .collect();
    keep.sort_unstable();
    keep.dedup();
    keep.into()
}

#[cfg(test)]
mod tests;
