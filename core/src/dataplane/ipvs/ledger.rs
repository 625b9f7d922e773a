//! What is programmed in one family, and the plans that change it.
//!
//! The ledger assumes that plans succeed, but for steps that the kernel refuses for themselves ([`Ledger::settle`]). After one that did not, only
//! [`Ledger::full`] brings ledger and kernel together again.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::{IpAddr, SocketAddr},
    ops::RangeInclusive,
    sync::Arc,
};

use super::{
    super::ipsets::{Element, Set},
    config::{IpvsConfig, Problem},
    existing::Existing,
    plan::{Op, Plan},
    refused::{Lacking, Object},
    scheduler::Scheduler,
    server::{Server, ServerKey, Wanted},
    service::{self, ServicePlan, Via},
};
use crate::{
    behaviours::view::views_of_all_endpoints,
    dataplane::rules::{self, Tally},
    model::ServiceKey,
    node_facts::NodeFacts,
    state::{Dirty, State},
};

/// One family's programmed state.
#[derive(Debug)]
pub struct Ledger {
    config: IpvsConfig,
    rules: rules::Ledger,
    programmed: HashMap<Arc<ServiceKey>, ServicePlan>,
    /// Services that want a virtual server; nearly always one.
    claimants: HashMap<ServerKey, Vec<(Via, Arc<ServiceKey>)>>,
    /// What the kernel has.
    servers: HashMap<ServerKey, Server>,
    /// Of them, those that have a destination which drains.
    draining: BTreeSet<ServerKey>,
    /// How many services and virtual servers need an element, and an address.
    elements: HashMap<(Set, Element), u32>,
    /// Elements of each set.
    set_sizes: BTreeMap<Set, usize>,
    bound: HashMap<IpAddr, u32>,
    problems: BTreeMap<Arc<ServiceKey>, Problem>,
    pub(super) lacking: Lacking,
}

/// Changes of one round, before they are put in order. What is needed again in the same round is not removed.
#[derive(Debug, Default)]
struct Round {
    /// Servers and destinations that the kernel has refused so far, to be tried once more. Elements and addresses are, as not being there.
    again: BTreeSet<Object>,
    /// Changes of servers, in order.
    before: Vec<Op>,
    after: Vec<Op>,
    /// Elements and addresses that were touched, and whether the kernel had them at the beginning.
    elements: BTreeMap<(Set, Element), bool>,
    bound: BTreeMap<IpAddr, bool>,
}

impl Ledger {
    /// Nothing is programmed.
    #[must_use]
    pub fn new(config: IpvsConfig) -> Self {
        let rules = rules::Ledger::new(config.render_config());
        Self {
            config,
            rules,
            programmed: HashMap::new(),
            claimants: HashMap::new(),
            servers: HashMap::new(),
            draining: BTreeSet::new(),
            elements: HashMap::new(),
            set_sizes: BTreeMap::new(),
            bound: HashMap::new(),
            problems: BTreeMap::new(),
            lacking: Lacking::default(),
        }
    }

    /// The configuration it plans for.
    #[must_use]
    pub fn config(&self) -> &IpvsConfig {
        &self.config
    }

    /// Takes another configuration, of the same family. Until the next [`Self::full`] the kernel is as the old one wants it.
    pub fn set_config(&mut self, config: IpvsConfig) {
        self.rules.set_config(config.render_config());
        self.config = config;
    }

    /// The iptables rules beside the virtual servers.
    #[must_use]
    pub fn rules(&self) -> &rules::Ledger {
        &self.rules
    }

    /// As [`rules::Ledger::set_aside`], of the rules beside the virtual servers.
    pub fn set_rules_aside(&mut self, services: &BTreeSet<Arc<ServiceKey>>) {
        self.rules.set_aside(services);
    }

    /// As [`rules::Ledger::confirm`].
    pub fn confirm(&mut self) {
        self.rules.confirm();
    }

    /// As [`rules::Ledger::leave`].
    pub fn leave(&mut self, table: rules::Table, name: &str) -> bool {
        self.rules.leave(table, name)
    }

    /// What is programmed, in numbers.
    #[must_use]
    pub fn tally(&self) -> Tally {
        self.rules.tally()
    }

    /// What services ask for and do not get.
    pub fn problems(&self) -> impl Iterator<Item = (&Arc<ServiceKey>, &Problem)> {
        self.problems.iter()
    }

    /// Takes note of whether the kernel has a scheduler. Returns the services that are to be planned as changed: those that get another one instead if it has;
    /// if not, those whose virtual servers it refuses. Cost: services with problems, and what is lacking.
    pub fn set_available(&mut self, scheduler: Scheduler, is_available: bool) -> BTreeSet<Arc<ServiceKey>> {
        if is_available {
            self.config.available_schedulers.insert(scheduler);
            let missing = Problem::MissingScheduler(scheduler);
            let getting_another = self.problems.iter().filter(|(_, problem)| **problem == missing);
            return getting_another.map(|(service, _)| Arc::clone(service)).collect();
        }
        self.config.available_schedulers.remove(&scheduler);
        let asks = |object: &Object| match object {
            Object::Server(key) => self.servers.get(key).is_some_and(|server| server.settings.scheduler == scheduler),
            _ => false,
        };
        self.lacking().filter(|(object, _)| asks(object)).map(|(_, service)| Arc::clone(service)).collect()
    }

    /// Number of virtual servers.
    #[must_use]
    pub fn server_count(&self) -> usize {
        self.servers.len()
    }

    /// Plans what changed for the dirty services, at the cost of those services alone.
    ///
    /// `now_ms` is any clock that does not go back; it is compared with itself only.
    pub fn changed(&mut self, state: &State, node: &NodeFacts, dirty: &Dirty, now_ms: u64) -> Plan {
        let (script, planned) = self.rules.changed(state, node, dirty);
        let mut round = Round::default();
        // An address may go from one service to another: each server is programmed once, when all have said what they want.
        let mut servers = BTreeSet::new();
        for key in &dirty.services {
            let plan = self.plan_of(state, node, key);
            servers.extend(plan.servers.keys().copied());
            servers.extend(self.withdraw(key, &mut round));
            self.enter(key, plan, &mut round);
        }
        for server in &servers {
            self.program_server(*server, now_ms, &mut round);
        }
        round.again.extend(servers.iter().flat_map(|server| self.lacking.of_server(*server)));
        let mut plan = self.finish(round);
        plan.script = script;
        plan.services_planned = planned.services;
        plan
    }

    /// Forgets what was programmed and goes by what the kernel has. What is ours and not wanted goes, or drains; what is not ours stays. Where
    /// everything is as it should be, the plan is empty.
    pub fn full(&mut self, state: &State, node: &NodeFacts, existing: &Existing, now_ms: u64) -> Plan {
        let (script, planned) = self.rules.full(state, node, &existing.tables);
        let before = std::mem::take(&mut self.servers);
        self.programmed.clear();
        self.claimants.clear();
        self.elements.clear();
        self.set_sizes.clear();
        self.bound.clear();
        self.problems.clear();
        self.draining.clear();
        // All of it is tried: what is not there is made.
        self.lacking.clear();

        let mut round = Round::default();
        for (set, elements) in &existing.sets {
            round.elements.extend(elements.iter().map(|element| ((*set, *element), true)));
        }
        round.bound.extend(existing.bound.iter().map(|address| (*address, true)));
        let keys: BTreeSet<&Arc<ServiceKey>> = state.entries().map(|(key, _)| key).collect();
        for key in keys {
            let plan = self.plan_of(state, node, key);
            self.enter(key, plan, &mut round);
        }
        // Servers that are wanted are ours, whoever made them.
        let wanted: BTreeSet<ServerKey> = self.claimants.keys().copied().collect();
        for (key, found) in &existing.servers {
            let is_needed = |element: &(Set, Element)| self.elements.contains_key(element);
            let found_mark = || existing.mark_besides(key, &self.config, is_needed);
            let Some(mark) = self.wanted(key).map(|wanted| wanted.mark).or_else(found_mark) else {
                continue;
            };
            let is_bound =
                self.wanted(key).map_or_else(|| existing.bound.contains(&key.address), |wanted| wanted.is_bound);
            let settings = found.settings.or_else(|| self.wanted(key).map(|wanted| wanted.settings));
            let settings =
                settings.unwrap_or(super::Settings { scheduler: self.config.scheduler, persistence_seconds: None });
            let since = |address: &SocketAddr| {
                before.get(key).and_then(|server| server.draining_since(address)).unwrap_or(now_ms)
            };
            let server = Server::found(*key, settings, mark, is_bound, &found.destinations, since);
            self.hold(&server, &mut round);
            self.servers.insert(*key, server);
            if found.settings.is_none()
                && let Some(wanted) = self.wanted(key)
            {
                round.before.push(Op::EditServer(*key, wanted.settings));
            }
        }
        let ours: BTreeSet<ServerKey> = self.servers.keys().copied().chain(wanted).collect();
        for key in ours {
            self.program_server(key, now_ms, &mut round);
        }

        let mut plan = self.finish(round);
        let missing_sets = Set::ALL.into_iter().filter(|set| !existing.sets.contains_key(set)).map(Op::CreateSet);
        plan.before.splice(0..0, missing_sets);
        plan.script = script;
        plan.services_planned = planned.services;
        plan
    }

    /// Virtual servers with destinations that drain: what the agent asks the kernel about from time to time.
    pub fn draining(&self) -> impl Iterator<Item = ServerKey> {
        self.draining.iter().copied()
    }

    /// Takes note of the connections, active and inactive together, that the kernel counts for each destination of a virtual server, and
    /// removes what has drained. Cost: the destinations of that one server.
    pub fn drained(&mut self, key: ServerKey, connections: &BTreeMap<SocketAddr, u64>, now_ms: u64) -> Plan {
        let mut round = Round::default();
        if let Some(server) = self.servers.get_mut(&key) {
            server.drain(connections, self.config.drain_limit_ms, now_ms, &mut round.after);
            self.tidy(key, &mut round);
        }
        self.finish(round)
    }

    /// Removes everything that is ours and nothing else. The device itself is the caller's to remove.
    #[must_use]
    pub fn cleanup(config: &IpvsConfig, existing: &Existing) -> Plan {
        let mut plan = Plan { script: rules::Ledger::cleanup(&existing.tables), ..Plan::default() };
        for (key, server) in &existing.servers {
            if existing.mark(key, config).is_some() {
                plan.after.extend(server.destinations.keys().map(|address| Op::DeleteDestination(*key, *address)));
                plan.after.push(Op::DeleteServer(*key));
            }
        }
        plan.after.extend(existing.bound.iter().copied().map(Op::Unbind));
        plan.after.extend(existing.sets.keys().rev().copied().map(Op::DestroySet));
        plan
    }

    /// True when the kernel has what plans so far have made, and nothing of ours besides. What drains may be gone already. A full pass;
    /// for slow verification in the background.
    #[must_use]
    pub fn is_in(&self, existing: &Existing) -> bool {
        let has_sets = Set::ALL.into_iter().all(|set| existing.sets.contains_key(&set));
        let elements: usize = existing.sets.values().map(BTreeSet::len).sum();
        let has_element = |(set, element): &&(Set, Element)| {
            existing.sets.get(set).is_some_and(|elements| elements.contains(element))
        };
        let (found, missing): (Vec<_>, Vec<_>) = self.elements.keys().partition(has_element);
        let lacks_element = |(set, element): &(Set, Element)| self.lacks(&Object::Element(*set, *element));
        let has_address = |address: &IpAddr| existing.bound.contains(address) || self.lacks(&Object::Address(*address));
        let is_as_programmed = |(key, server): (&ServerKey, &Server)| match existing.servers.get(key) {
            Some(found) => {
                (found.settings == Some(server.settings) || self.lacks(&Object::Server(*key)))
                    && server.matches(&found.destinations, |address| self.lacks(&Object::Destination(*key, *address)))
            }
            // What nobody wants may have drained.
            None => self.lacks(&Object::Server(*key)) || !self.claimants.contains_key(key),
        };
        let ours = existing.servers.keys().filter(|key| existing.mark(key, &self.config).is_some());
        has_sets
            && elements == found.len()
            && missing.into_iter().all(lacks_element)
            && existing.bound.iter().all(|address| self.bound.contains_key(address))
            && self.bound.keys().all(has_address)
            && self.servers.iter().all(is_as_programmed)
            && ours.into_iter().all(|key| self.servers.contains_key(key))
            && self.rules.is_in(&existing.tables)
    }

    fn plan_of(&self, state: &State, node: &NodeFacts, key: &Arc<ServiceKey>) -> ServicePlan {
        let Some(service) = state.entry(key).and_then(|entry| entry.service()) else { return ServicePlan::default() };
        let views = views_of_all_endpoints(state, key, self.config.family, node);
        service::plan(&self.config, service, &views, &node.failing)
    }

    /// The step that makes what counts as programmed.
    pub(super) fn step_to(&self, object: Object) -> Option<Op> {
        match object {
            Object::Element(set, element) => Some(Op::AddElement(set, element)),
            Object::Address(address) => Some(Op::Bind(address)),
            Object::Server(key) => self.owner(&key).and(Some(Op::AddServer(key, self.servers.get(&key)?.settings))),
            Object::Destination(key, address) => {
                let weight = self.servers.get(&key)?.active_weight(&address)?;
                Some(Op::AddDestination(key, address, weight))
            }
        }
    }

    /// The service that a server is made for.
    pub(super) fn owner(&self, server: &ServerKey) -> Option<&Arc<ServiceKey>> {
        self.claimants.get(server)?.first().map(|(_, service)| service)
    }

    pub(super) fn is_programmed(&self, service: &ServiceKey) -> bool {
        self.programmed.contains_key(service)
    }

    pub(super) fn plans(&self) -> impl Iterator<Item = (&Arc<ServiceKey>, &ServicePlan)> {
        self.programmed.iter()
    }

    /// How many entries a set of the kernel's may have: all that are wanted, or less those that it has refused. Cost: what is lacking.
    #[must_use]
    pub fn set_size(&self, set: Set) -> RangeInclusive<usize> {
        let wanted = self.set_sizes.get(&set).copied().unwrap_or_default();
        wanted.saturating_sub(self.lacking.elements_of(set))..=wanted
    }

    /// A virtual server that the kernel should have, if there is any. What drains may be gone.
    #[must_use]
    pub fn any_server(&self) -> Option<ServerKey> {
        self.claimants.keys().find(|key| !self.lacking.contains(&Object::Server(**key))).copied()
    }

    /// An address that the device should have, if there is any.
    #[must_use]
    pub fn any_address(&self) -> Option<IpAddr> {
        self.bound.keys().find(|address| !self.lacking.contains(&Object::Address(**address))).copied()
    }

    /// Enters a service's plan, and what it needs besides servers.
    fn enter(&mut self, key: &Arc<ServiceKey>, plan: ServicePlan, round: &mut Round) {
        if plan == ServicePlan::default() {
            return;
        }
        plan.elements.iter().for_each(|element| self.need_element(*element, round));
        plan.bound.iter().for_each(|address| self.need_address(*address, round));
        for (server, (via, _)) in &plan.servers {
            let claimants = self.claimants.entry(*server).or_default();
            claimants.push((*via, Arc::clone(key)));
            claimants.sort_unstable();
        }
        if let Some(problem) = &plan.problem {
            self.problems.insert(Arc::clone(key), problem.clone());
        }
        self.programmed.insert(Arc::clone(key), plan);
    }

    /// Takes a service's plan out; its servers.
    fn withdraw(&mut self, key: &Arc<ServiceKey>, round: &mut Round) -> Vec<ServerKey> {
        let Some(old) = self.programmed.remove(key) else { return Vec::new() };
        self.problems.remove(key);
        old.elements.iter().for_each(|element| self.release_element(*element, round));
        old.bound.iter().for_each(|address| self.release_address(*address, round));
        for server in old.servers.keys() {
            if let Some(claimants) = self.claimants.get_mut(server) {
                claimants.retain(|(_, claimant)| claimant != key);
                if claimants.is_empty() {
                    self.claimants.remove(server);
                }
            }
        }
        old.servers.into_keys().collect()
    }

    /// What is wanted of a server by the service that has it.
    fn wanted(&self, key: &ServerKey) -> Option<&Wanted> {
        self.programmed.get(self.owner(key)?)?.servers.get(key).map(|(_, wanted)| wanted)
    }

    fn program_server(&mut self, key: ServerKey, now_ms: u64, round: &mut Round) {
        let wanted = self.wanted(&key).cloned();
        let Some(wanted) = wanted else {
            if let Some(server) = self.servers.get_mut(&key) {
                server.program(&[], now_ms, &mut round.before, &mut round.after);
                self.tidy(key, round);
            }
            return;
        };
        let fresh = Server::new(key, wanted.settings, wanted.mark, wanted.is_bound);
        // The new mark and address are needed before the old ones are released, so that what stays the same stays.
        self.hold(&fresh, round);
        let mut server = match self.servers.remove(&key) {
            None => {
                round.before.push(Op::AddServer(key, wanted.settings));
                fresh
            }
            Some(mut server) => {
                self.release(&server, round);
                if server.settings != wanted.settings {
                    round.before.push(Op::EditServer(key, wanted.settings));
                }
                (server.settings, server.mark, server.is_bound) = (wanted.settings, wanted.mark, wanted.is_bound);
                server
            }
        };
        server.program(&wanted.destinations, now_ms, &mut round.before, &mut round.after);
        self.servers.insert(key, server);
        self.tidy(key, round);
    }

    /// Forgets what the kernel lacks of a server and is not wanted any more. As long as the server drains, it is not known how it is set up.
    fn forget_lacking(&mut self, key: ServerKey) {
        if self.lacking.is_empty() {
            return;
        }
        for object in self.lacking.of_server(key) {
            let stays = match object {
                Object::Server(key) => self.servers.contains_key(&key),
                object => self.step_to(object).is_some(),
            };
            if !stays {
                self.lacking.remove(&object);
            }
        }
    }

    /// Removes a server that nobody wants and that has no destinations any more.
    fn tidy(&mut self, key: ServerKey, round: &mut Round) {
        let is_wanted = self.claimants.contains_key(&key);
        let Some(server) = self.servers.get(&key) else { return };
        if server.is_draining() {
            self.draining.insert(key);
        } else {
            self.draining.remove(&key);
        }
        if server.is_empty()
            && !is_wanted
            && let Some(server) = self.servers.remove(&key)
        {
            round.after.push(Op::DeleteServer(key));
            self.release(&server, round);
        }
        self.forget_lacking(key);
    }

    fn hold(&mut self, server: &Server, round: &mut Round) {
        self.need_element(server.mark, round);
        if server.is_bound {
            self.need_address(server.address(), round);
        }
    }

    fn release(&mut self, server: &Server, round: &mut Round) {
        self.release_element(server.mark, round);
        if server.is_bound {
            self.release_address(server.address(), round);
        }
    }

    fn need_element(&mut self, element: (Set, Element), round: &mut Round) {
        let count = self.elements.entry(element).or_default();
        let is_there = *count > 0 && !self.lacking.contains(&Object::Element(element.0, element.1));
        round.elements.entry(element).or_insert(is_there);
        if *count == 0 {
            *self.set_sizes.entry(element.0).or_default() += 1;
        }
        *count += 1;
    }

    fn release_element(&mut self, element: (Set, Element), round: &mut Round) {
        let Some(count) = self.elements.get_mut(&element) else { return };
        let object = Object::Element(element.0, element.1);
        round.elements.entry(element).or_insert(!self.lacking.contains(&object));
        *count -= 1;
        if *count == 0 {
            self.elements.remove(&element);
            self.set_sizes.entry(element.0).and_modify(|size| *size -= 1);
            self.lacking.remove(&object);
        }
    }

    fn need_address(&mut self, address: IpAddr, round: &mut Round) {
        let count = self.bound.entry(address).or_default();
        let is_there = *count > 0 && !self.lacking.contains(&Object::Address(address));
        round.bound.entry(address).or_insert(is_there);
        *count += 1;
        self.need_element((Set::BoundAddresses, Element::Ip(address)), round);
    }

    fn release_address(&mut self, address: IpAddr, round: &mut Round) {
        let Some(count) = self.bound.get_mut(&address) else { return };
        let object = Object::Address(address);
        round.bound.entry(address).or_insert(!self.lacking.contains(&object));
        *count -= 1;
        if *count == 0 {
            self.bound.remove(&address);
            self.lacking.remove(&object);
        }
        self.release_element((Set::BoundAddresses, Element::Ip(address)), round);
    }

    /// Puts a round in order.
    fn finish(&self, round: Round) -> Plan {
        let mut plan = Plan::default();
        let is_needed = |element: &(Set, Element)| self.elements.contains_key(element);
        let added = round.elements.iter().filter(|(element, was_there)| !**was_there && is_needed(element));
        plan.before.extend(added.map(|((set, element), _)| Op::AddElement(*set, *element)));
        let bound = round.bound.iter().filter(|(address, was_there)| !**was_there && self.bound.contains_key(*address));
        plan.before.extend(bound.map(|(address, _)| Op::Bind(*address)));
        plan.before.extend(round.again.into_iter().filter_map(|object| self.step_to(object)));
        plan.before.extend(round.before);
        plan.after.extend(round.after);
        let unbound =
            round.bound.iter().filter(|(address, was_there)| **was_there && !self.bound.contains_key(*address));
        plan.after.extend(unbound.map(|(address, _)| Op::Unbind(*address)));
        let removed = round.elements.iter().rev().filter(|(element, was_there)| **was_there && !is_needed(element));
        plan.after.extend(removed.map(|((set, element), _)| Op::DeleteElement(*set, *element)));
        plan
    }
}
