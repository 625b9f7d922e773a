//! A record of the objects that are programmed in one family, which plans their changes.
//!
//! The ledger assumes that plans succeed, except for the operations that the caller passes to
//! [`IpvsLedger::record`] as rejected. After any other failure, the caller must use
//! [`IpvsLedger::full`] for the next plan.
//!
//! Operations are independent: if the kernel rejects an operation, the agent still carries out the
//! other operations. The object of a rejected operation becomes *deferred*. The ledger counts it as
//! programmed and can return the operation that creates it. Each plan for a service that wants the
//! object contains this operation again, and the caller may also try it at any time
//! ([`IpvsLedger::retries`]).

mod outcome;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::{IpAddr, SocketAddr},
    ops::RangeInclusive,
    sync::Arc,
};

use super::{
    super::{
        ipsets::{IpSetElement, Set},
        shared::{self, RefCounts, StateSource, Touched},
    },
    config::{IpvsConfig, SchedulerProblem},
    deferred::Deferred,
    existing::ExistingObjects,
    objects::{Object, ServerKey, Settings},
    plan::{IpvsPlan, Op},
    rules::ruleset,
    scheduler::Scheduler,
    server::{Server, Wanted},
    service::{self, AddressKind, ServicePlan},
};
use crate::{
    behaviours::view::views_of_all_endpoints,
    dataplane::rules::{RulesLedger, RulesTable, Tally},
    model::{NodeFacts, ServiceKey},
    state::{Dirty, State},
};

/// The programmed objects of one family.
#[derive(Debug)]
pub struct IpvsLedger {
    config: IpvsConfig,
    rules: RulesLedger,
    programmed: HashMap<Arc<ServiceKey>, ServicePlan>,
    /// Services that want a virtual server, in order. The first service gets the server. Nearly
    /// always, only one service wants a server.
    candidates: HashMap<ServerKey, Vec<(AddressKind, Arc<ServiceKey>)>>,
    /// The virtual servers in the kernel.
    servers: HashMap<ServerKey, Server>,
    /// The virtual servers that have a draining destination.
    draining: BTreeSet<ServerKey>,
    /// The virtual servers that plans had no room for.
    waiting: BTreeSet<ServerKey>,
    /// Elements of sets, with the services and virtual servers that need them.
    elements: RefCounts<(Set, IpSetElement)>,
    /// Number of elements of each set.
    set_sizes: BTreeMap<Set, usize>,
    /// Addresses of the device, with the services and virtual servers that need them.
    device_addresses: RefCounts<IpAddr>,
    problems: BTreeMap<Arc<ServiceKey>, SchedulerProblem>,
    deferred: Deferred,
}

/// The changes of one plan before they are put in order. An element that one service no longer
/// needs, and that another service needs after this plan, stays in the kernel.
#[derive(Debug, Default)]
struct ObjectRound {
    /// Deferred servers and destinations to try again. `elements` and `device_addresses` know
    /// those of their kinds.
    retries: BTreeSet<Object>,
    /// Changes of servers for [`IpvsPlan::before`] and [`IpvsPlan::after`], in order.
    before: Vec<Op>,
    after: Vec<Op>,
    elements: Touched<(Set, IpSetElement)>,
    device_addresses: Touched<IpAddr>,
}

impl IpvsLedger {
    /// After so many changes of virtual servers and destinations, the further virtual servers of a
    /// plan wait for the next plan. The kernel takes about 30 ms for these changes.
    pub const CHANGES_AT_ONCE: usize = 8192;

    /// Creates a ledger in which nothing is programmed.
    #[must_use]
    pub fn new(config: IpvsConfig) -> Self {
        let rules = RulesLedger::new(ruleset(&config));
        Self {
            config,
            rules,
            programmed: HashMap::new(),
            candidates: HashMap::new(),
            servers: HashMap::new(),
            draining: BTreeSet::new(),
            waiting: BTreeSet::new(),
            elements: RefCounts::default(),
            set_sizes: BTreeMap::new(),
            device_addresses: RefCounts::default(),
            problems: BTreeMap::new(),
            deferred: Deferred::default(),
        }
    }

    /// Creates an empty ledger with this configuration and quarantine. Its [`Self::full`] plans
    /// what the full plan of this ledger would write.
    #[must_use]
    pub fn fresh(&self) -> Self {
        Self { rules: self.rules.fresh(), ..Self::new(self.config.clone()) }
    }

    /// The configuration of the plans.
    #[must_use]
    pub fn config(&self) -> &IpvsConfig {
        &self.config
    }

    /// Replaces the configuration by another configuration of the same family. Returns true if the
    /// configuration changed. In this case the caller must use [`Self::full`] for the next plan;
    /// before that plan, the kernel has the objects of the old configuration.
    pub fn set_config(&mut self, config: IpvsConfig) -> bool {
        let is_new = config != self.config;
        self.rules.set_ruleset(ruleset(&config));
        self.config = config;
        is_new
    }

    /// The ledger of the iptables rules.
    #[must_use]
    pub fn rules(&self) -> &RulesLedger {
        &self.rules
    }

    /// See [`RulesLedger::set_quarantined`].
    pub fn set_quarantined(&mut self, services: &BTreeSet<Arc<ServiceKey>>) {
        self.rules.set_quarantined(services);
    }

    /// See [`RulesLedger::confirm`].
    pub fn confirm(&mut self) {
        self.rules.confirm();
    }

    /// See [`RulesLedger::note_undeletable`].
    pub fn note_undeletable(&mut self, table: RulesTable, name: &str) -> bool {
        self.rules.note_undeletable(table, name)
    }

    /// Returns counts of the programmed iptables rules.
    #[must_use]
    pub fn tally(&self) -> Tally {
        self.rules.tally()
    }

    /// Returns the services that do not use the requested scheduler, each with the reason.
    pub fn problems(&self) -> impl Iterator<Item = (&Arc<ServiceKey>, &SchedulerProblem)> {
        self.problems.iter()
    }

    /// Records whether the kernel has a scheduler. Returns the services that the caller has to plan
    /// again. If the scheduler is available, these are the services that use the default scheduler
    /// because this scheduler was missing. If the scheduler is not available, these are the
    /// services whose virtual servers with this scheduler the kernel rejected. The cost depends on
    /// the number of services with problems and of deferred objects.
    pub fn set_available(&mut self, scheduler: Scheduler, is_available: bool) -> BTreeSet<Arc<ServiceKey>> {
        if is_available {
            self.config.available_schedulers.insert(scheduler);
            let missing = SchedulerProblem::MissingScheduler(scheduler);
            let affected = self.problems.iter().filter(|(_, problem)| **problem == missing);
            return affected.map(|(service, _)| Arc::clone(service)).collect();
        }
        self.config.available_schedulers.remove(&scheduler);
        let uses_it = |object: &Object| match object {
            Object::Server(key) => self.servers.get(key).is_some_and(|server| server.settings.scheduler == scheduler),
            _ => false,
        };
        self.deferred().filter(|(object, _)| uses_it(object)).map(|(_, service)| Arc::clone(service)).collect()
    }

    /// Plans the changes of the dirty services. The cost depends only on these services, except in
    /// the case that [`RulesLedger::changed`] describes. If a plan has too many changes, some
    /// virtual servers wait: each further plan has those of its own services, and then those that
    /// wait, until it has too many changes.
    ///
    /// `now_ms` is the time of a monotonic clock. Only differences between such times count.
    pub fn changed(&mut self, state: &State, node: &NodeFacts, dirty: &Dirty, now_ms: u64) -> IpvsPlan {
        let (script, planned) = self.rules.changed(state, node, dirty);
        let mut round = ObjectRound::default();
        // An address may move between services, so servers follow once all plans are known.
        let mut servers = BTreeSet::new();
        for key in &dirty.services {
            let plan = self.plan_of(state, node, key);
            servers.extend(plan.servers.keys().copied());
            servers.extend(self.remove_service(key, &mut round));
            self.add_service(key, plan, &mut round);
        }
        let earlier = std::mem::take(&mut self.waiting);
        let mut is_partial = false;
        for server in servers.iter().chain(earlier.difference(&servers)) {
            if round.before.len() + round.after.len() >= Self::CHANGES_AT_ONCE {
                is_partial |= servers.contains(server);
                self.waiting.insert(*server);
                continue;
            }
            self.program_server(*server, now_ms, &mut round);
            round.retries.extend(self.deferred.of_server(*server));
        }
        let mut plan = self.plan_of_round(round);
        (plan.is_partial, plan.has_rest) = (is_partial, !self.waiting.is_empty());
        plan.script = script;
        plan.services_planned = planned;
        plan
    }

    /// Plans the changes from `existing`, the objects in the kernel, to the wanted objects. The
    /// plan is empty if the kernel already has the wanted objects. [`RulesLedger::full`]
    /// describes the script of the plan.
    ///
    /// The earlier contents of the ledger do not affect the operations, with one exception: the
    /// ledger keeps the times at which destinations started to drain.
    ///
    /// Objects of Headgate that no service wants are removed or drained. Objects of other programs
    /// stay unchanged, with one exception: if a service wants a virtual server of another program,
    /// this server becomes a server of Headgate.
    ///
    /// The state may change meanwhile: the caller passes the changed services to [`Self::changed`].
    pub fn full(&mut self, source: &dyn StateSource, existing: &ExistingObjects, now_ms: u64) -> IpvsPlan {
        let mut new = Self::new(self.config.clone());
        std::mem::swap(&mut new.rules, &mut self.rules);
        new.deferred = self.deferred.cleared();
        let before = std::mem::replace(self, new).servers;
        let (script, planned) = self.rules.full(source, existing.tables.clone());

        let mut round = ObjectRound::default();
        for (set, elements) in &existing.sets {
            round.elements.extend(elements.iter().map(|element| (*set, *element)));
        }
        round.device_addresses.extend(existing.device_addresses.iter().copied());
        for part in shared::parts(&shared::services(source)) {
            source.look(&mut |state, node, _| {
                for key in part {
                    let plan = self.plan_of(state, node, key);
                    self.add_service(key, plan, &mut round);
                }
            });
        }
        // A server that a service wants belongs to Headgate, even if another program created it.
        let wanted: BTreeSet<ServerKey> = self.candidates.keys().copied().collect();
        for (key, found) in &existing.servers {
            let is_needed = |element: &(Set, IpSetElement)| self.elements.contains(element);
            let found_mark = || existing.mark_preferring(key, &self.config, is_needed);
            let Some(mark) = self.wanted(key).map(|wanted| wanted.mark).or_else(found_mark) else {
                continue;
            };
            let is_on_device = self
                .wanted(key)
                .map_or_else(|| existing.device_addresses.contains(&key.address), |wanted| wanted.is_on_device);
            let settings = found.settings.or_else(|| self.wanted(key).map(|wanted| wanted.settings));
            let settings = settings.unwrap_or(Settings::new(self.config.scheduler));
            let since = |address: &SocketAddr| {
                before.get(key).and_then(|server| server.draining_since(address)).unwrap_or(now_ms)
            };
            let server = Server::found(*key, settings, mark, is_on_device, &found.destinations, since);
            self.need_objects_of(&server, &mut round);
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

        let mut plan = self.plan_of_round(round);
        let missing_sets = Set::ALL.into_iter().filter(|set| !existing.sets.contains_key(set)).map(Op::CreateSet);
        plan.before.splice(0..0, missing_sets);
        plan.script = script;
        plan.services_planned = planned;
        plan
    }

    /// Returns the virtual servers with draining destinations, for [`Self::drained`].
    pub fn draining(&self) -> impl Iterator<Item = ServerKey> {
        self.draining.iter().copied()
    }

    /// Plans the removal of drained destinations of a virtual server. `connections` contains for
    /// each destination the number of its connections in the kernel, active and inactive. The cost
    /// is linear in the number of destinations of this server.
    pub fn drained(&mut self, key: ServerKey, connections: &BTreeMap<SocketAddr, u64>, now_ms: u64) -> IpvsPlan {
        let mut round = ObjectRound::default();
        if let Some(server) = self.servers.get_mut(&key) {
            server.drain(connections, self.config.drain_limit_ms, now_ms, &mut round.after);
            self.remove_if_unused(key, &mut round);
        }
        self.plan_of_round(round)
    }

    /// Plans the removal of all objects of Headgate. The caller removes the device itself.
    ///
    /// The destinations in `busy` stay, with weight 0. Their virtual servers and addresses stay,
    /// too, and so do all sets, because sets mark the virtual servers of Headgate.
    #[must_use]
    pub fn cleanup(
        config: &IpvsConfig,
        existing: &ExistingObjects,
        busy: &BTreeSet<(ServerKey, SocketAddr)>,
    ) -> IpvsPlan {
        let mut plan = IpvsPlan { script: RulesLedger::cleanup(&existing.tables), ..IpvsPlan::default() };
        let mut kept = BTreeSet::new();
        for (key, server) in existing.servers.iter().filter(|(key, _)| existing.mark(key, config).is_some()) {
            let (busy, idle): (Vec<_>, Vec<_>) =
                server.destinations.iter().partition(|(address, _)| busy.contains(&(*key, **address)));
            plan.after.extend(idle.into_iter().map(|(address, _)| Op::DeleteDestination(*key, *address)));
            if busy.is_empty() {
                plan.after.push(Op::DeleteServer(*key));
            } else {
                kept.insert(key.address);
            }
            let weighed = busy.into_iter().filter(|(_, weight)| **weight > 0);
            plan.after.extend(weighed.map(|(address, _)| Op::EditDestination(*key, *address, 0)));
        }
        plan.after.extend(existing.device_addresses.difference(&kept).copied().map(Op::DeleteAddress));
        if kept.is_empty() {
            plan.after.extend(existing.sets.keys().rev().copied().map(Op::DestroySet));
        }
        plan
    }

    /// Returns how many elements a set in the kernel must have: all wanted ones at most, and those
    /// that are not deferred at least. The cost is linear in the number of deferred objects.
    #[must_use]
    pub fn set_size(&self, set: Set) -> RangeInclusive<usize> {
        let wanted = self.set_sizes.get(&set).copied().unwrap_or_default();
        wanted.saturating_sub(self.deferred.elements_of(set))..=wanted
    }

    /// Returns any virtual server that the kernel must have, for a quick check that the kernel
    /// still has Headgate's servers. Draining servers do not count.
    #[must_use]
    pub fn any_server(&self) -> Option<ServerKey> {
        let is_missing = |key: &ServerKey| self.waiting.contains(key) || self.deferred.contains(&Object::Server(*key));
        self.candidates.keys().find(|key| !is_missing(key)).copied()
    }

    /// Returns any address that the device must have.
    #[must_use]
    pub fn any_address(&self) -> Option<IpAddr> {
        self.device_addresses.iter().find(|address| !self.deferred.contains(&Object::Address(**address))).copied()
    }

    fn plan_of(&self, state: &State, node: &NodeFacts, key: &Arc<ServiceKey>) -> ServicePlan {
        let Some(service) = state.entry(key).and_then(|entry| entry.service()) else { return ServicePlan::default() };
        let views = views_of_all_endpoints(state, key, self.config.family, node);
        service::plan(&self.config, service, &views, &node.failing)
    }

    /// Returns the operation that creates a programmed object; `None` if no service wants it.
    pub(super) fn op_for(&self, object: Object) -> Option<Op> {
        match object {
            Object::Element(set, element) => Some(Op::AddElement(set, element)),
            Object::Address(address) => Some(Op::AddAddress(address)),
            Object::Server(key) => self.owner(&key).and(Some(Op::AddServer(key, self.servers.get(&key)?.settings))),
            Object::Destination(key, address) => {
                let weight = self.servers.get(&key)?.active_weight(&address)?;
                Some(Op::AddDestination(key, address, weight))
            }
        }
    }

    /// Returns the service that gets a virtual server.
    pub(super) fn owner(&self, server: &ServerKey) -> Option<&Arc<ServiceKey>> {
        self.candidates.get(server)?.first().map(|(_, service)| service)
    }

    pub(super) fn is_programmed(&self, service: &ServiceKey) -> bool {
        self.programmed.contains_key(service)
    }

    pub(super) fn plans(&self) -> impl Iterator<Item = (&Arc<ServiceKey>, &ServicePlan)> {
        self.programmed.iter()
    }

    /// Adds the plan of a service, with its elements and addresses. [`Self::program_server`]
    /// programs the virtual servers of the service.
    fn add_service(&mut self, key: &Arc<ServiceKey>, plan: ServicePlan, round: &mut ObjectRound) {
        if plan == ServicePlan::default() {
            return;
        }
        plan.elements.iter().for_each(|element| self.need_element(*element, round));
        plan.device_addresses.iter().for_each(|address| self.need_address(*address, round));
        for (server, (kind, _)) in &plan.servers {
            let candidates = self.candidates.entry(*server).or_default();
            candidates.push((*kind, Arc::clone(key)));
            candidates.sort_unstable();
        }
        if let Some(problem) = &plan.problem {
            self.problems.insert(Arc::clone(key), problem.clone());
        }
        self.programmed.insert(Arc::clone(key), plan);
    }

    /// Removes the plan of a service. Returns its servers.
    fn remove_service(&mut self, key: &Arc<ServiceKey>, round: &mut ObjectRound) -> Vec<ServerKey> {
        let Some(old) = self.programmed.remove(key) else { return Vec::new() };
        self.problems.remove(key);
        old.elements.iter().for_each(|element| self.release_element(*element, round));
        old.device_addresses.iter().for_each(|address| self.release_address(*address, round));
        for server in old.servers.keys() {
            if let Some(candidates) = self.candidates.get_mut(server) {
                candidates.retain(|(_, candidate)| candidate != key);
                if candidates.is_empty() {
                    self.candidates.remove(server);
                }
            }
        }
        old.servers.into_keys().collect()
    }

    /// Returns the virtual server as its owner wants it.
    fn wanted(&self, key: &ServerKey) -> Option<&Wanted> {
        self.programmed.get(self.owner(key)?)?.servers.get(key).map(|(_, wanted)| wanted)
    }

    fn program_server(&mut self, key: ServerKey, now_ms: u64, round: &mut ObjectRound) {
        let wanted = self.wanted(&key).cloned();
        let Some(wanted) = wanted else {
            if let Some(server) = self.servers.get_mut(&key) {
                server.program(&[], now_ms, &mut round.before, &mut round.after);
                self.remove_if_unused(key, round);
            }
            return;
        };
        let fresh = Server::new(key, wanted.settings, wanted.mark, wanted.is_on_device);
        // The new mark comes before the old one goes, so that the kernel keeps an equal one.
        self.need_objects_of(&fresh, round);
        let mut server = match self.servers.remove(&key) {
            None => {
                round.before.push(Op::AddServer(key, wanted.settings));
                fresh
            }
            Some(mut server) => {
                self.release_objects_of(&server, round);
                if server.settings != wanted.settings {
                    round.before.push(Op::EditServer(key, wanted.settings));
                }
                (server.settings, server.mark, server.is_on_device) =
                    (wanted.settings, wanted.mark, wanted.is_on_device);
                server
            }
        };
        server.program(&wanted.destinations, now_ms, &mut round.before, &mut round.after);
        self.servers.insert(key, server);
        self.remove_if_unused(key, round);
    }

    /// Removes deferred objects of a server that are no longer wanted.
    fn forget_deferred(&mut self, key: ServerKey) {
        if self.deferred.is_empty() {
            return;
        }
        for object in self.deferred.of_server(key) {
            let is_wanted = match object {
                Object::Server(key) => self.servers.contains_key(&key),
                object => self.op_for(object).is_some(),
            };
            if !is_wanted {
                self.deferred.remove(&object);
            }
        }
    }

    /// Removes an unwanted server without destinations. Updates whether the server is draining.
    fn remove_if_unused(&mut self, key: ServerKey, round: &mut ObjectRound) {
        let is_wanted = self.candidates.contains_key(&key);
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
            self.release_objects_of(&server, round);
        }
        self.forget_deferred(key);
    }

    fn need_objects_of(&mut self, server: &Server, round: &mut ObjectRound) {
        self.need_element(server.mark, round);
        if server.is_on_device {
            self.need_address(server.address(), round);
        }
    }

    fn release_objects_of(&mut self, server: &Server, round: &mut ObjectRound) {
        self.release_element(server.mark, round);
        if server.is_on_device {
            self.release_address(server.address(), round);
        }
    }

    fn need_element(&mut self, element: (Set, IpSetElement), round: &mut ObjectRound) {
        let is_deferred = self.deferred.contains(&Object::Element(element.0, element.1));
        if self.elements.add(element, is_deferred, &mut round.elements) {
            *self.set_sizes.entry(element.0).or_default() += 1;
        }
    }

    fn release_element(&mut self, element: (Set, IpSetElement), round: &mut ObjectRound) {
        let object = Object::Element(element.0, element.1);
        if self.elements.remove(element, self.deferred.contains(&object), &mut round.elements) {
            self.set_sizes.entry(element.0).and_modify(|size| *size -= 1);
            self.deferred.remove(&object);
        }
    }

    fn need_address(&mut self, address: IpAddr, round: &mut ObjectRound) {
        let is_deferred = self.deferred.contains(&Object::Address(address));
        self.device_addresses.add(address, is_deferred, &mut round.device_addresses);
        self.need_element((Set::DeviceAddresses, IpSetElement::Ip(address)), round);
    }

    fn release_address(&mut self, address: IpAddr, round: &mut ObjectRound) {
        let object = Object::Address(address);
        if self.device_addresses.remove(address, self.deferred.contains(&object), &mut round.device_addresses) {
            self.deferred.remove(&object);
        }
        self.release_element((Set::DeviceAddresses, IpSetElement::Ip(address)), round);
    }

    /// Puts the operations of a round in order.
    fn plan_of_round(&self, round: ObjectRound) -> IpvsPlan {
        let ObjectRound { retries, before, after, elements, device_addresses: addresses } = round;
        let mut plan = IpvsPlan::default();
        plan.before.extend(self.elements.to_add(&elements).map(|(set, element)| Op::AddElement(set, element)));
        plan.before.extend(self.device_addresses.to_add(&addresses).map(Op::AddAddress));
        plan.before.extend(retries.into_iter().filter_map(|object| self.op_for(object)));
        plan.before.extend(before);
        plan.after.extend(after);
        plan.after.extend(self.device_addresses.to_remove(&addresses).map(Op::DeleteAddress));
        let removed = self.elements.to_remove(&elements).rev();
        plan.after.extend(removed.map(|(set, element)| Op::DeleteElement(set, element)));
        plan
    }
}
