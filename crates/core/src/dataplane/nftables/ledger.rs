//! A record of the elements that are programmed in one family, which plans their changes.
//!
//! A plan is one transaction: the kernel executes either the whole plan or nothing. The ledger
//! assumes that plans succeed. After a plan has failed, the caller must use
//! [`NftablesLedger::full`] for the next plan.

use std::{
    collections::{BTreeSet, HashMap, HashSet, VecDeque},
    net::{IpAddr, Ipv4Addr},
    sync::Arc,
};

use super::element::{
    Element, ElementKey, EndpointGroup, GroupKey, Lookup, NftablesConfig, Numbers, Pick, PortPlan, Selection, Shape,
    Target, group_number, port_number, port_plan,
};
use crate::{
    behaviours::view::{NoLocalEndpoints, ServiceSize, service_views},
    dataplane::shared::{self, Quarantine, RefCounts, StateSource, Touched},
    model::{LoadBalancing, NodeFacts, Protocol, ServiceKey},
    state::{Dirty, State, frontends::Frontend},
};

/// The programmed elements of one family.
#[derive(Debug)]
pub struct NftablesLedger {
    config: NftablesConfig,
    programmed: HashMap<Arc<ServiceKey>, ProgrammedElements>,
    /// The elements that several services may need.
    shared: RefCounts<Element>,
    shape: Shape,
    numbers: Numbers,
    quarantine: Quarantine<ProgrammedElements>,
    no_local: NoLocalEndpoints,
    element_count: usize,
}

/// The programmed elements of one service.
#[derive(Debug, Clone, Default)]
struct ProgrammedElements {
    groups: Box<[EndpointGroup]>,
    /// The elements that belong to no group, sorted.
    elements: Box<[Element]>,
    no_local: NoLocalEndpoints,
}

/// The elements in the kernel for one family.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ExistingElements {
    /// The elements, in any order.
    pub elements: Vec<Element>,
    /// The shape for which the rules in the kernel were written.
    pub shape: Shape,
}

/// One transaction.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NftablesPlan {
    /// Elements to delete. The deletions come before the additions, because an added element may
    /// have the key of a deleted element.
    pub delete: Vec<Element>,
    /// Elements to add. [`Self::added`] returns all added elements.
    pub add: Vec<Element>,
    /// True if the plan adds all elements of the ledger, because the kernel has none. The plan does
    /// not list these elements, so that memory does not hold them twice.
    pub adds_everything: bool,
    /// The new shape, if it changed. Its chains are added before the elements.
    pub shape: Option<Shape>,
    /// Number of services whose elements were computed.
    pub services_planned: u32,
}

impl NftablesPlan {
    /// True if the plan changes nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.delete.is_empty() && self.add.is_empty() && !self.adds_everything && self.shape.is_none()
    }

    /// The number of elements that the plan adds.
    #[must_use]
    pub fn added_count(&self, ledger: &NftablesLedger) -> usize {
        self.add.len() + if self.adds_everything { ledger.element_count() } else { 0 }
    }

    /// Returns the elements that the plan adds. `ledger` has made no plan since this one.
    pub fn added<'a>(&'a self, ledger: &'a NftablesLedger) -> impl Iterator<Item = Element> + 'a {
        let everything = self.adds_everything.then(|| ledger.elements());
        self.add.iter().copied().chain(everything.into_iter().flatten())
    }
}

/// The changes of one step. The kernel keeps an element that one service releases and another
/// service needs in the same step.
#[derive(Debug, Default)]
struct ElementRound {
    shared: Touched<Element>,
    removed: BTreeSet<Element>,
    added: BTreeSet<Element>,
    is_shape_changed: bool,
    /// Numbers that become free with the plan. Another service of the plan must not get them: if
    /// the plan is cut, the old frontends would lead to its endpoints.
    released: Vec<u32>,
}

/// The groups in the kernel, before a full sync adopts them.
#[derive(Debug, Default)]
struct Found<'a> {
    /// The elements in the kernel, sorted. So the slots of a group are adjacent and in order.
    elements: &'a [Element],
    numbers: HashMap<(Lookup, Frontend), u32>,
    taken: HashSet<u32>,
}

impl NftablesLedger {
    /// The maximum number of unused chains, besides spare chains, that a full sync keeps. Only full
    /// syncs delete chains, so a group that grows and shrinks repeatedly does not add and delete
    /// chains each time.
    const MAX_UNUSED_PICKS: usize = 128;

    /// Creates a ledger in which nothing is programmed.
    #[must_use]
    pub fn new(config: NftablesConfig) -> Self {
        Self {
            config,
            programmed: HashMap::new(),
            shared: RefCounts::default(),
            shape: Shape::default(),
            numbers: Numbers::default(),
            quarantine: Quarantine::default(),
            no_local: NoLocalEndpoints::default(),
            element_count: 0,
        }
    }

    /// Creates an empty ledger with this configuration and quarantine. Its [`Self::full`] plans
    /// what the full plan of this ledger would write.
    #[must_use]
    pub fn fresh(&self) -> Self {
        Self { quarantine: self.quarantine.clone(), ..Self::new(self.config.clone()) }
    }

    /// The configuration.
    #[must_use]
    pub fn config(&self) -> &NftablesConfig {
        &self.config
    }

    /// Replaces the configuration by another configuration of the same family. Until the caller
    /// uses [`Self::full`], the kernel has the elements of the old configuration.
    pub fn set_config(&mut self, config: NftablesConfig) {
        self.config = config;
    }

    /// The values on which the programmed rules depend.
    #[must_use]
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The number of elements in all maps and sets.
    #[must_use]
    pub fn element_count(&self) -> usize {
        self.element_count
    }

    /// Returns the numbers of service ports that have a Local policy and no endpoint on this node.
    #[must_use]
    pub fn no_local_endpoints(&self) -> NoLocalEndpoints {
        self.no_local
    }

    /// Plans the changes of the dirty services. The cost depends only on these services.
    pub fn changed(&mut self, state: &State, node: &NodeFacts, dirty: &Dirty) -> NftablesPlan {
        let mut round = ElementRound::default();
        for key in &dirty.services {
            if self.quarantine.contains(key) {
                continue;
            }
            self.quarantine.changed(key, || self.programmed.get(key).cloned().unwrap_or_default());
            self.program(state, node, key, None, &mut round);
        }
        if dirty.service_cidrs {
            self.program_service_cidrs(state, &mut round);
        }
        self.finish(round, dirty.services.len())
    }

    /// Plans the changes from `existing`, the elements in the kernel, to the wanted elements. The
    /// plan does not depend on what the ledger recorded before. Adopts the numbers and slots of
    /// groups in the kernel. The plan is empty if the kernel already has the wanted elements. It
    /// includes what changes meanwhile.
    pub fn full(&mut self, source: &dyn StateSource, existing: ExistingElements) -> NftablesPlan {
        let ExistingElements { elements: mut existing, shape: existing_shape } = existing;
        existing.sort_unstable();
        let mut found = Found::of(&existing);
        let mut quarantine = std::mem::take(&mut self.quarantine);
        quarantine.begin_full();
        let last_good = quarantine.all_last_good().flat_map(|(_, last_good)| &last_good.groups);
        found.taken.extend(last_good.map(|group| port_number(group.number)));
        let numbers = existing.iter().filter_map(group_of).map(port_number);
        *self = Self {
            numbers: Numbers::besides(&numbers.chain(found.taken.iter().copied()).collect()),
            quarantine,
            shape: Shape { service_cidrs: self.shape.service_cidrs.clone(), ..Shape::default() },
            ..Self::new(self.config.clone())
        };

        let keys = shared::services(source);
        let (quarantined, keys): (Vec<_>, Vec<_>) = keys.into_iter().partition(|key| self.quarantine.contains(key));
        // All records are compared with the kernel's elements, so the plan needs no round.
        quarantined.iter().for_each(|key| self.keep_last_good(key));
        for part in shared::parts(&keys) {
            source.look(&mut |state, node, _| {
                for key in part {
                    self.program_found(state, node, key, &mut found);
                }
            });
        }
        // Two services must not claim one frontend, so changed services are planned again.
        source.look(&mut |state, node, changed| {
            for key in &changed.services {
                if !self.quarantine.contains(key) {
                    self.program_found(state, node, key, &mut found);
                }
            }
            self.program_service_cidrs(state, &mut ElementRound::default());
        });
        if existing.is_empty() {
            self.shape.picks.extend(Shape::spare_picks());
        }
        let spare: HashSet<Pick> = Shape::spare_picks().collect();
        let unused = existing_shape.picks.difference(&self.shape.picks);
        let (spare, others): (Vec<Pick>, Vec<Pick>) = unused.partition(|pick| spare.contains(pick));
        self.shape.picks.extend(spare);
        if others.len() <= Self::MAX_UNUSED_PICKS {
            self.shape.picks.extend(others);
        }
        self.shape.prefix_lengths.extend(&existing_shape.prefix_lengths);
        let mut plan = self.finish(ElementRound::default(), keys.len());
        if existing.is_empty() {
            plan.adds_everything = self.element_count > 0;
        } else {
            let mut is_wanted = vec![false; existing.len()];
            plan.add = self.elements().filter(|element| !take(&existing, &mut is_wanted, element)).collect();
            plan.add.sort_unstable();
            let surplus = existing.iter().zip(&is_wanted).filter(|(_, is_wanted)| !**is_wanted);
            plan.delete = surplus.map(|(element, _)| *element).collect();
        }
        plan.shape = (self.shape != existing_shape).then(|| self.shape.clone());
        plan
    }

    /// The programmed elements, each once, in no particular order.
    pub fn elements(&self) -> impl Iterator<Item = Element> + '_ {
        let own = self.programmed.values().flat_map(ProgrammedElements::all_elements);
        own.filter(|element| !is_shared(element)).chain(self.shared.iter().copied())
    }

    /// Programs a service for a full plan, which needs no changes.
    fn program_found(&mut self, state: &State, node: &NodeFacts, key: &Arc<ServiceKey>, found: &mut Found<'_>) {
        let mut round = ElementRound::default();
        self.program(state, node, key, Some(found), &mut round);
        round.released.into_iter().for_each(|number| self.numbers.release(number));
    }

    fn program(
        &mut self,
        state: &State,
        node: &NodeFacts,
        key: &Arc<ServiceKey>,
        found: Option<&mut Found<'_>>,
        round: &mut ElementRound,
    ) {
        let old = self.programmed.remove(key).unwrap_or_default();
        let views = service_views(state, key, self.config.family, node);
        let (mut groups, mut elements) = (Vec::new(), Vec::new());
        let mut no_local = NoLocalEndpoints::default();
        let mut found = found;
        let size = state.entry(key).map(|entry| ServiceSize::of(entry, self.config.family)).unwrap_or_default();
        // The endpoints of earlier ports, with the numbers of these ports.
        let mut earlier: Vec<(PortPlan, u32)> = Vec::new();
        let (mut ports, mut node_ports) = (HashSet::new(), HashSet::new());
        for mut view in views {
            // A malformed Service may list a port twice. Only the first entry counts.
            if !ports.insert((view.protocol, view.port)) {
                continue;
            }
            if view.node_port != 0 && !node_ports.insert((view.protocol, view.node_port)) {
                view.node_port = 0;
            }
            let plan = port_plan(&self.config, &view);
            let is_hashed = self.config.can_hash && view.load_balancing == Some(LoadBalancing::ConsistentHash);
            let needs_number = !(plan.cluster.is_empty() && plan.local.is_empty());
            let affinity_timeout_seconds = view.affinity_timeout_seconds.filter(|_| !plan.is_proxy_only);
            // Ports with affinity have records of their own clients.
            let may_share = needs_number && affinity_timeout_seconds.is_none() && !plan.is_proxy_only;
            let is_same = |(other, _): &&(PortPlan, u32)| other.cluster == plan.cluster && other.local == plan.local;
            let shared = earlier.iter().find(is_same).filter(|_| may_share).map(|(_, port)| *port);
            let port = match shared {
                Some(port) => port,
                None if needs_number => {
                    self.port_number(view.protocol, view.port, &old.groups, &plan, found.as_deref_mut())
                }
                None => 0,
            };
            for (is_local, endpoints) in [(false, &plan.cluster), (true, &plan.local)] {
                if endpoints.is_empty() || shared.is_some() {
                    continue;
                }
                let key = GroupKey { protocol: view.protocol, port: view.port, is_local };
                let number = group_number(port, is_local);
                let has_affinity = affinity_timeout_seconds.is_some();
                let slots = match old.groups.iter().find(|group| group.key == key) {
                    Some(group) => group.slots.clone(),
                    None => found.as_deref().map_or_else(Vec::new, |found| found.slots(number, has_affinity)),
                };
                let (is_proxy_only, hashed_slots) = (plan.is_proxy_only, is_hashed.then(|| size.hashed_slots()));
                let mut group =
                    EndpointGroup { key, number, affinity_timeout_seconds, hashed_slots, is_proxy_only, slots };
                group.set_endpoints(endpoints, size.weighted_slots());
                groups.push(group);
            }
            let target = |is_local| -> Option<Target> {
                let number = group_number(port, is_local);
                groups.iter().find(|group: &&EndpointGroup| group.number == number).map(EndpointGroup::target)
            };
            let services = plan.services.iter();
            let services =
                services.filter_map(|(frontend, is_local)| Some(Element::Service(*frontend, target(*is_local)?)));
            let inside = plan.inside.iter().filter_map(|frontend| Some(Element::Inside(*frontend, target(false)?)));
            elements.extend(services.chain(inside).chain(plan.elements.iter().copied()));
            no_local.add(view.no_local_endpoints());
            if may_share && shared.is_none() {
                earlier.push((plan, port));
            }
        }
        elements.sort_unstable();
        elements.dedup();
        let new = ProgrammedElements { groups: groups.into(), elements: elements.into(), no_local };
        self.replace(&old, &new, round);
        let still_used: HashSet<u32> = new.groups.iter().map(|group| port_number(group.number)).collect();
        let unused: BTreeSet<u32> = old.groups.iter().map(|group| port_number(group.number)).collect();
        round.released.extend(unused.into_iter().filter(|port| !still_used.contains(port)));
        if !new.elements.is_empty() {
            self.programmed.insert(Arc::clone(key), new);
        }
    }

    /// Returns the programmed number of a service port, or that in the kernel, or a new one.
    fn port_number(
        &mut self,
        protocol: Protocol,
        port: u16,
        groups: &[EndpointGroup],
        plan: &PortPlan,
        found: Option<&mut Found<'_>>,
    ) -> u32 {
        let own = groups.iter().find(|group| group.key.protocol == protocol && group.key.port == port);
        let own = own.map(|group| port_number(group.number));
        own.or_else(|| found?.take_port(plan)).unwrap_or_else(|| self.numbers.take())
    }

    /// Records that a service has the elements of `new` in place of those of `old`. Apart from the
    /// comparison of both, the cost depends only on the elements that differ.
    fn replace(&mut self, old: &ProgrammedElements, new: &ProgrammedElements, round: &mut ElementRound) {
        self.no_local.add(new.no_local);
        self.no_local.subtract(old.no_local);
        let (mut added, mut removed) = (Vec::new(), Vec::new());
        difference(&old.elements, &new.elements, &mut removed, &mut added);
        for group in &new.groups {
            let before = old.groups.iter().find(|before| before.number == group.number);
            group.difference(before, &mut removed, &mut added);
        }
        for group in &old.groups {
            if new.groups.iter().all(|after| after.number != group.number) {
                removed.extend(group.elements());
            }
        }
        for element in added {
            self.hold(element, round);
        }
        for element in removed {
            self.release(element, round);
        }
    }

    fn hold(&mut self, element: Element, round: &mut ElementRound) {
        if is_shared(&element) {
            self.element_count += usize::from(self.shared.add(element, false, &mut round.shared));
        } else {
            self.element_count += 1;
            round.added.insert(element);
        }
        if let Element::Admitted(_, range) = element {
            round.is_shape_changed |= self.shape.prefix_lengths.insert(range.prefix_len());
        }
        if let Some((lookup, _, target)) = Lookup::of(&element) {
            round.is_shape_changed |= self.shape.picks.insert(target.pick(lookup));
        }
    }

    fn release(&mut self, element: Element, round: &mut ElementRound) {
        if is_shared(&element) {
            self.element_count -= usize::from(self.shared.remove(element, false, &mut round.shared));
        } else {
            self.element_count -= 1;
            round.removed.insert(element);
        }
    }

    fn program_service_cidrs(&mut self, state: &State, round: &mut ElementRound) {
        let family = self.config.family;
        let cidrs = state.service_cidrs().flat_map(|cidr| cidr.cidrs.iter().copied());
        let cidrs = cidrs.filter(|cidr| crate::model::Family::of(cidr.addr()) == family).collect();
        if self.shape.service_cidrs != cidrs {
            self.shape.service_cidrs = cidrs;
            round.is_shape_changed = true;
        }
    }

    fn finish(&mut self, round: ElementRound, services_planned: usize) -> NftablesPlan {
        let services_planned = u32::try_from(services_planned).unwrap_or(u32::MAX);
        let ElementRound { shared, removed, added, is_shape_changed, released } = round;
        released.into_iter().for_each(|number| self.numbers.release(number));
        let mut delete: Vec<Element> = removed.difference(&added).copied().collect();
        delete.extend(self.shared.to_remove(&shared));
        let mut add: Vec<Element> = added.difference(&removed).copied().collect();
        add.extend(self.shared.to_add(&shared));
        NftablesPlan {
            delete,
            add,
            adds_everything: false,
            shape: is_shape_changed.then(|| self.shape.clone()),
            services_planned,
        }
    }
}

impl ProgrammedElements {
    fn is_empty(&self) -> bool {
        self.elements.is_empty()
    }

    fn all_elements(&self) -> impl Iterator<Item = Element> + '_ {
        self.elements.iter().copied().chain(self.groups.iter().flat_map(EndpointGroup::elements))
    }
}

/// True if several services may need the same element.
fn is_shared(element: &Element) -> bool {
    matches!(element, Element::ClusterIp(_) | Element::Hairpin(_))
}

/// Appends the elements that only one of two sorted lists has.
fn difference(old: &[Element], new: &[Element], removed: &mut Vec<Element>, added: &mut Vec<Element>) {
    let (mut old, mut new) = (old.iter().peekable(), new.iter().peekable());
    loop {
        match (old.peek(), new.peek()) {
            (Some(one), Some(other)) if one == other => drop((old.next(), new.next())),
            (Some(one), Some(other)) if one > other => added.extend(new.next()),
            (Some(_), _) => removed.extend(old.next()),
            (None, Some(_)) => added.extend(new.next()),
            (None, None) => return,
        }
    }
}

/// Returns whether a sorted list has an element, and notes this in `is_taken`.
fn take(sorted: &[Element], is_taken: &mut [bool], element: &Element) -> bool {
    let Ok(at) = sorted.binary_search(element) else { return false };
    is_taken[at] = true;
    true
}

/// Returns the group of an element, unless only another program can have written its number.
fn group_of(element: &Element) -> Option<u32> {
    let group = match *element {
        Element::Endpoint(group, ..) | Element::AffinityEndpoint(group, ..) => group,
        Element::Service(_, target) | Element::Inside(_, target) => target.group,
        _ => return None,
    };
    Some(group).filter(|group| *group <= Numbers::MAX_ADOPTED)
}

impl<'a> Found<'a> {
    fn of(elements: &'a [Element]) -> Self {
        let numbers = elements.iter().filter_map(|element| {
            let (lookup, frontend, _) = Lookup::of(element)?;
            Some(((lookup, frontend), group_of(element)?))
        });
        Self { elements, numbers: numbers.collect(), taken: HashSet::new() }
    }

    /// Returns the endpoints of a group in the order of their slots.
    fn slots(&self, group: u32, has_affinity: bool) -> Vec<(IpAddr, u16)> {
        let slot = |element: &Element| match *element {
            Element::Endpoint(group, _, address, port) if !has_affinity => Some((group, (address, port))),
            Element::AffinityEndpoint(group, _, address, port) if has_affinity => Some((group, (address, port))),
            _ => None,
        };
        let first = if has_affinity { Element::AffinityEndpoint } else { Element::Endpoint };
        let first = first(group, 0, Ipv4Addr::UNSPECIFIED.into(), 0);
        let start = self.elements.partition_point(|element| *element < first);
        let slots = self.elements.iter().skip(start).map_while(slot);
        slots.take_while(|(of, _)| *of == group).map(|(_, endpoint)| endpoint).collect()
    }

    /// Returns the kernel's number of the port of the plan's frontends, each number only once.
    fn take_port(&mut self, plan: &PortPlan) -> Option<u32> {
        let none = Target { group: 0, selection: Selection::ProxyOnly, affinity_timeout_seconds: None };
        let services = plan.services.iter().map(|(frontend, _)| Element::Service(*frontend, none));
        let inside = plan.inside.iter().map(|frontend| Element::Inside(*frontend, none));
        let lookups = services.chain(inside).filter_map(|element| {
            let (lookup, frontend, _) = Lookup::of(&element)?;
            Some((lookup, frontend))
        });
        let mut numbers = lookups.filter_map(|lookup| self.numbers.get(&lookup)).map(|group| port_number(*group));
        let number = numbers.find(|number| !self.taken.contains(number) && *number != 0)?;
        self.taken.insert(number);
        Some(number)
    }
}

// Quarantined services: the kernel rejects their elements. Plans leave these services out, and
// their last good elements stay in the kernel.

impl NftablesLedger {
    /// Records that the kernel has accepted all plans so far. [`Self::set_quarantined`] treats the
    /// changes of unconfirmed plans as rejected.
    pub fn confirm(&mut self) {
        self.quarantine.confirm();
    }

    /// The services that need one of these elements. The cost grows with all elements.
    #[must_use]
    pub fn services_of(&self, elements: &HashSet<Element>) -> Vec<Arc<ServiceKey>> {
        let needs =
            |programmed: &ProgrammedElements| programmed.all_elements().any(|element| elements.contains(&element));
        self.programmed.iter().filter(|(_, programmed)| needs(programmed)).map(|(key, _)| Arc::clone(key)).collect()
    }

    /// Quarantines these services and releases all other services. Each further [`Self::full`]
    /// keeps or restores the elements that the quarantined services had before the unconfirmed
    /// plans, if these elements are known. The caller must pass released services to
    /// [`Self::changed`].
    pub fn set_quarantined(&mut self, services: &BTreeSet<Arc<ServiceKey>>) {
        let Self { quarantine, programmed, .. } = self;
        quarantine.set(services, |key| programmed.get(key).cloned());
    }

    /// Makes the next [`Self::full`] leave out a service's last good elements, now rejected too.
    pub fn forget_last_good(&mut self, service: &ServiceKey) {
        self.quarantine.last_good(service).into_iter().for_each(|last_good| *last_good = None);
    }

    /// Records the last good elements of a quarantined service as programmed.
    fn keep_last_good(&mut self, key: &Arc<ServiceKey>) {
        if let Some(Some(last_good)) = self.quarantine.last_good(key).cloned() {
            self.replace(&ProgrammedElements::default(), &last_good, &mut ElementRound::default());
            self.programmed.insert(Arc::clone(key), last_good);
        }
    }

    /// Returns the plan that would program some services, whether or not they are quarantined. The
    /// records stay as they are, so the caller must not execute the plan. A trial of the plan shows
    /// whether the kernel accepts these services.
    pub fn trial(&mut self, state: &State, node: &NodeFacts, services: &BTreeSet<Arc<ServiceKey>>) -> NftablesPlan {
        let shape = self.shape.clone();
        let before: Vec<ProgrammedElements> =
            services.iter().map(|key| self.programmed.get(key).cloned().unwrap_or_default()).collect();
        let mut round = ElementRound::default();
        for key in services {
            self.program(state, node, key, None, &mut round);
        }
        let plan = self.finish(round, services.len());
        let mut round = ElementRound::default();
        for (key, before) in services.iter().zip(before) {
            let tried = self.programmed.remove(key).unwrap_or_default();
            self.replace(&tried, &before, &mut round);
            let numbers_of = |programmed: &ProgrammedElements| -> BTreeSet<u32> {
                programmed.groups.iter().map(|group| port_number(group.number)).collect()
            };
            let (old, new) = (numbers_of(&before), numbers_of(&tried));
            new.difference(&old).for_each(|number| self.numbers.release(*number));
            old.difference(&new).for_each(|number| self.numbers.take_back(*number));
            if !before.is_empty() {
                self.programmed.insert(Arc::clone(key), before);
            }
        }
        self.shape = shape;
        plan
    }
}

// Cuts a large plan into several transactions, so that other plans can be executed between them.

/// When a change is executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum CutPhase {
    /// Slots that no frontend leads to yet, and slots that get another endpoint.
    First,
    /// Frontends, which lead to complete groups before and after their change.
    Then(Option<Frontend>),
    /// Slots that no frontend leads to any more.
    Last,
}

impl NftablesPlan {
    /// Cuts a plan of changed services into plans of at most `most` changes, to execute in order.
    /// After each of them, every frontend leads to a group all of whose slots are filled. The first
    /// plan has the shape. The changes of one frontend, and those of one key, stay together. A plan
    /// that is not larger stays as it is, and so does a plan that adds everything.
    #[must_use]
    pub fn cut(mut self, most: usize) -> VecDeque<Self> {
        if self.adds_everything || self.delete.len() + self.add.len() <= most {
            return [self].into();
        }
        let replaced: HashSet<ElementKey> = self.add.iter().map(Element::key).collect();
        let phase = |is_added: bool, element: &Element| match element {
            // A client would be refused while its Service has no port.
            Element::ClusterIp(_) => CutPhase::Last,
            _ if element.frontend().is_some() => CutPhase::Then(element.frontend()),
            _ if is_added || replaced.contains(&element.key()) => CutPhase::First,
            _ => CutPhase::Last,
        };
        let deleted = std::mem::take(&mut self.delete).into_iter().map(|element| (false, element));
        let added = std::mem::take(&mut self.add).into_iter().map(|element| (true, element));
        let changes = deleted.chain(added).map(|(is_added, element)| (phase(is_added, &element), is_added, element));
        let mut changes: Vec<(CutPhase, bool, Element)> = changes.collect();
        changes.sort_unstable_by_key(|(phase, _, element)| (*phase, element.key()));
        let (mut parts, mut size) = (VecDeque::from([self]), 0);
        for together in changes.chunk_by(|(phase, _, one), (next, _, other)| {
            phase == next && (matches!(phase, CutPhase::Then(_)) || one.key() == other.key())
        }) {
            if size > 0 && size + together.len() > most {
                parts.push_back(Self::default());
                size = 0;
            }
            size += together.len();
            let Some(part) = parts.back_mut() else { break };
            for (_, is_added, element) in together {
                if *is_added { part.add.push(*element) } else { part.delete.push(*element) }
            }
        }
        parts
    }

    /// The keys that the plan changes. Plans that change the same key must be executed in order.
    pub fn keys(&self) -> impl Iterator<Item = ElementKey> {
        self.delete.iter().chain(&self.add).map(Element::key)
    }
}
