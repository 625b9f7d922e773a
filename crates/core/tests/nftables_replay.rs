//! Replayed, split and squashed changes produce equal nftables elements. Only the numbers of groups
//! and the order of random slots may differ. The kernel accepts every plan.
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use headgate_core::{
    Dirty, Family, FixedState, NodeFacts, State,
    frontends::Frontend,
    nftables::{
        Element, ElementKey, ExistingElements, Lookup, NftablesConfig, NftablesLedger, NftablesPlan, Refusal,
        Selection, Shape,
    },
    view::LocalDetector,
};
use proptest::prelude::*;

mod changes;
use changes::{any_event, node, replays};

mod changing;
use changing::Changing;

/// The endpoints of each frontend, as text.
type Frontends = BTreeMap<(Lookup, Frontend), BTreeSet<String>>;

/// Maps and sets in memory. Like the kernel, these maps and sets reject the deletion of a missing
/// element and the addition of an existing element.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
struct Sets {
    elements: HashMap<ElementKey, Element>,
    shape: Shape,
}

impl Sets {
    fn commit(&mut self, plan: &NftablesPlan, ledger: &NftablesLedger) -> Result<(), String> {
        if let Some(shape) = &plan.shape {
            self.shape = shape.clone();
        }
        for element in &plan.delete {
            match self.elements.remove(&element.key()) {
                Some(found) if found == *element => {}
                found => return Err(format!("deletes {element:?}, but the set holds {found:?}")),
            }
        }
        for element in plan.added(ledger) {
            if let Some(found) = self.elements.insert(element.key(), element) {
                return Err(format!("adds {element:?}, but the set holds {found:?}"));
            }
        }
        self.check()
    }

    /// Checks that every frontend refers to a group whose slots are complete and whose chain
    /// exists, and that the rules refuse what only a proxy can carry.
    fn check(&self) -> Result<(), String> {
        for element in self.elements.values() {
            let Some((lookup, frontend, target)) = Lookup::of(element) else { continue };
            let is_refused = [Refusal::Reject, Refusal::Drop]
                .into_iter()
                .any(|refusal| self.elements.contains_key(&ElementKey::Whole(Element::Unserved(frontend, refusal))));
            if target.selection == Selection::ProxyOnly && !is_refused {
                return Err(format!("without a proxy, {frontend:?} is not refused"));
            }
            if !self.shape.picks.contains(&target.pick(lookup)) {
                return Err(format!("{target:?} of {lookup:?} has no chain"));
            }
            for slot in 0..target.selection.slots() {
                let key = match target.affinity_timeout_seconds {
                    None => ElementKey::Endpoint(target.group, slot),
                    Some(_) => ElementKey::AffinityEndpoint(target.group, slot),
                };
                if !self.elements.contains_key(&key) {
                    return Err(format!("slot {slot} of {target:?} is empty"));
                }
            }
        }
        Ok(())
    }

    fn existing(&self) -> ExistingElements {
        ExistingElements { elements: self.elements.values().copied().collect(), shape: self.shape.clone() }
    }

    /// The endpoints of each frontend, and the elements that belong to no group. The slots count
    /// only where the client's address selects the slot.
    fn flat(&self) -> (Frontends, BTreeSet<Element>) {
        let targets = self.elements.values().filter_map(Lookup::of).map(|(_, _, target)| target);
        let hashed: HashSet<u32> = targets
            .filter(|target| matches!(target.selection, Selection::ByClient(_)))
            .map(|target| target.group)
            .collect();
        let mut endpoints: HashMap<u32, BTreeSet<String>> = HashMap::new();
        let (mut frontends, mut others) = (BTreeMap::new(), BTreeSet::new());
        for element in self.elements.values() {
            match element {
                Element::Endpoint(group, slot, address, port)
                | Element::AffinityEndpoint(group, slot, address, port) => {
                    let slot = Some(slot).filter(|_| hashed.contains(group));
                    endpoints.entry(*group).or_default().insert(format!("{slot:?} {address} {port}"));
                }
                Element::Member(group, address, port) => {
                    endpoints.entry(*group).or_default().insert(format!("{address} {port} is recorded"));
                }
                Element::Service(..) | Element::Inside(..) => {}
                other => {
                    others.insert(*other);
                }
            }
        }
        for (lookup, frontend, target) in self.elements.values().filter_map(Lookup::of) {
            // A group for a proxy has no slots.
            let mut endpoints = endpoints.get(&target.group).cloned().unwrap_or_default();
            endpoints.insert(format!("{:?}, {:?}", target.selection, target.affinity_timeout_seconds));
            frontends.insert((lookup, frontend), endpoints);
        }
        (frontends, others)
    }
}

struct Rig {
    sets: Sets,
    ledger: NftablesLedger,
    state: State,
    node: NodeFacts,
    /// The number of changes to which plans of steps are cut.
    at_once: usize,
}

fn ledger(family: Family, has_proxy: bool) -> NftablesLedger {
    let mut config = NftablesConfig { has_proxy, ..NftablesConfig::new(family) };
    config.masquerade.detector_v4 = Some(LocalDetector::Cidr("10.244.0.0/16".parse().unwrap()));
    NftablesLedger::new(config)
}

impl Rig {
    fn new(family: Family, has_proxy: bool) -> Self {
        let (ledger, at_once) = (ledger(family, has_proxy), usize::MAX);
        Self { sets: Sets::default(), ledger, state: State::default(), node: node(), at_once }
    }

    fn full(&mut self) -> Result<NftablesPlan, TestCaseError> {
        let plan = self.ledger.full(&FixedState(&self.state, &self.node), self.sets.existing());
        self.sets.commit(&plan, &self.ledger).map_err(TestCaseError::fail)?;
        Ok(plan)
    }

    fn step(&mut self, events: &[changes::Event]) -> Result<NftablesPlan, TestCaseError> {
        let mut dirty = Dirty::default();
        events.iter().for_each(|event| event.apply(&mut self.state, &mut self.node, &mut dirty));
        let plan = self.ledger.changed(&self.state, &self.node, &dirty);
        // Also between the parts of a plan, each frontend leads to a complete group.
        for part in plan.clone().cut(self.at_once) {
            self.sets.commit(&part, &self.ledger).map_err(TestCaseError::fail)?;
        }
        Ok(plan)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]


    #[test]
    fn replayed_split_and_squashed_changes_produce_the_same_elements(
        changes in prop::collection::vec(any_event(8), 1..60),
        chunk in 1usize..10,
        family in prop_oneof![Just(Family::V4), Just(Family::V6)], has_proxy in any::<bool>(),
        at_once in prop_oneof![Just(usize::MAX), 1usize..20],
    ) {
        let mut wanted = Rig::new(family, has_proxy);
        changes.iter().for_each(|event| event.apply(&mut wanted.state, &mut wanted.node, &mut Dirty::default()));
        wanted.full()?;

        for sequence in replays(&changes) {
            let mut rig = Rig { at_once, ..Rig::new(family, has_proxy) };
            rig.full()?;
            for part in sequence.chunks(chunk) {
                rig.step(part)?;
            }
            prop_assert_eq!(rig.sets.flat(), wanted.sets.flat());
            prop_assert_eq!(rig.ledger.element_count(), rig.sets.elements.len());
            prop_assert_eq!(
                rig.ledger.elements().collect::<HashSet<_>>(),
                rig.sets.existing().elements.into_iter().collect(),
            );
            // An agent that restarts adopts the numbers and the slots, and writes nothing.
            let before = rig.sets.clone();
            rig.ledger = ledger(family, has_proxy);
            let plan = rig.full()?;
            prop_assert!(plan.is_empty(), "{:?}", plan);
            prop_assert_eq!(&rig.sets, &before);
            prop_assert!(rig.step(&[])?.is_empty());
            // The agent detects and repairs a change that another program made.
            let some = rig.sets.elements.keys().min().copied();
            if let Some(key) = some {
                rig.sets.elements.remove(&key);
                rig.full()?;
                prop_assert_eq!(rig.sets.flat(), wanted.sets.flat());
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn changes_during_a_full_plan_leave_no_two_services_with_one_frontend(
        changes in prop::collection::vec(any_event(8), 1..40),
        meanwhile in prop::collection::vec(any_event(8), 0..20),
        reads in 0usize..4,
        family in prop_oneof![Just(Family::V4), Just(Family::V6)],
    ) {
        let mut rig = Rig::new(family, false);
        changes.iter().for_each(|event| event.apply(&mut rig.state, &mut rig.node, &mut Dirty::default()));
        let source = Changing::new(reads, std::mem::take(&mut rig.state), rig.node.clone(), &meanwhile);
        let plan = rig.ledger.full(&source, rig.sets.existing());
        rig.sets.commit(&plan, &rig.ledger).map_err(TestCaseError::fail)?;
        let dirty;
        (rig.state, rig.node, dirty) = source.end();
        let plan = rig.ledger.changed(&rig.state, &rig.node, &dirty);
        rig.sets.commit(&plan, &rig.ledger).map_err(TestCaseError::fail)?;

        let mut wanted = Rig::new(family, false);
        for event in changes.iter().chain(&meanwhile) {
            event.apply(&mut wanted.state, &mut wanted.node, &mut Dirty::default());
        }
        wanted.full()?;
        prop_assert_eq!(rig.sets.flat(), wanted.sets.flat());
        prop_assert_eq!(rig.ledger.element_count(), rig.sets.elements.len());
    }
}

/// The change of one endpoint writes the targets of the service and at most two slots. The number
/// of these elements does not depend on the number of endpoints.
#[test]
fn an_endpoint_change_replaces_the_targets_and_at_most_two_slots() {
    use headgate_core::{Change, Endpoint, EndpointPort, Protocol, Service, ServiceKey, ServicePort};
    let key = ServiceKey::new("ns", "web");
    let port = ServicePort { name: "http".into(), protocol: Protocol::Tcp, port: 80, node_port: 30080 };
    let mut service = Service::new(key.clone(), vec!["10.96.0.10".parse().unwrap()], vec![port]);
    service.external_ips = vec![[198, 51, 100, 1].into()];
    let endpoint =
        |last: u8| Endpoint::new([10, 244, 0, last].into(), [EndpointPort::new("http", Protocol::Tcp, 8080)].into());
    let mut rig = Rig::new(Family::V4, false);
    rig.state.apply(Change::from(service), &mut Dirty::default());
    for last in 1..=100 {
        rig.state.apply(Change::Endpoint(key.clone(), endpoint(last)), &mut Dirty::default());
    }
    rig.full().unwrap();
    let mut change = |change: Change| {
        let mut dirty = Dirty::default();
        rig.state.apply(change, &mut dirty);
        let plan = rig.ledger.changed(&rig.state, &rig.node, &dirty);
        rig.sets.commit(&plan, &rig.ledger).unwrap();
        let hairpins: HashSet<Element> = plan.add.iter().chain(&plan.delete).copied().collect();
        let hairpins = hairpins.iter().filter(|element| matches!(element, Element::Hairpin(_))).count();
        (plan.delete.len() + plan.add.len()) - hairpins
    };
    assert_eq!(change(Change::Endpoint(key.clone(), endpoint(101))), 7, "three targets are replaced, a slot is added");
    assert_eq!(change(Change::RemoveEndpoint(key.clone(), [10, 244, 0, 101].into())), 7, "the last slot is removed");
    assert_eq!(change(Change::RemoveEndpoint(key, [10, 244, 0, 1].into())), 9, "the last endpoint moves");
}

/// An agent that restarts repairs slots with the same endpoint, slots after a gap, and slots beyond
/// the number of endpoints.
#[test]
fn wrong_slots_are_not_adopted() {
    use headgate_core::{Change, ClientIpAffinity, Endpoint, EndpointPort, Protocol, Service, ServiceKey, ServicePort};
    for session_affinity in [None, Some(ClientIpAffinity { timeout_seconds: 10 })] {
        let key = ServiceKey::new("ns", "web");
        let port = ServicePort { name: "http".into(), protocol: Protocol::Tcp, port: 80, node_port: 0 };
        let service = Service::new(key.clone(), vec!["10.96.0.10".parse().unwrap()], vec![port]);
        let mut rig = Rig::new(Family::V4, false);
        rig.state.apply(Change::from(Service { session_affinity, ..service }), &mut Dirty::default());
        let ports = [EndpointPort::new("http", Protocol::Tcp, 8080)];
        for last in 1..=3 {
            let endpoint = Endpoint::new([10, 244, 0, last].into(), ports.clone().into());
            rig.state.apply(Change::Endpoint(key.clone(), endpoint), &mut Dirty::default());
        }
        rig.full().unwrap();
        let wanted = rig.sets.clone();
        let group = wanted.elements.values().find_map(Lookup::of).unwrap().2.group;
        let endpoint = |slot, last: u8| {
            let new = if session_affinity.is_some() { Element::AffinityEndpoint } else { Element::Endpoint };
            new(group, slot, [10, 244, 0, last].into(), 8080)
        };
        // The slots and endpoints that the kernel has.
        for slots in
            [[(0, 1), (1, 1), (2, 1)], [(0, 2), (5, 1), (9, 3)], [(0, 1), (1, 2), (3, 2)], [(0, 9), (1, 1), (7, 1)]]
        {
            rig.sets = wanted.clone();
            for slot in 0..3 {
                rig.sets.elements.remove(&endpoint(slot, 0).key());
            }
            rig.sets.elements.extend(slots.map(|(slot, last)| (endpoint(slot, last).key(), endpoint(slot, last))));
            rig.ledger = ledger(Family::V4, false);
            rig.full().unwrap();
            assert_eq!(rig.sets.flat(), wanted.flat(), "{slots:?}");
            assert_eq!(rig.sets.elements.len(), wanted.elements.len(), "{slots:?}");
        }
    }
}

/// A Service with consistent-hash and these target ports, each at its own port, and two endpoints.
fn hashed(target_ports: &[u16]) -> Vec<headgate_core::Change> {
    use headgate_core::{Change, Endpoint, EndpointPort, Protocol, Service, ServiceKey, ServicePort};
    let key = ServiceKey::new("ns", "hashed");
    let name = |number: usize| format!("p{number:03}");
    let port = |number: usize| ServicePort {
        name: name(number).as_str().into(),
        protocol: Protocol::Tcp,
        port: 1000 + u16::try_from(number).unwrap(),
        node_port: 0,
    };
    let ports = (0..target_ports.len()).map(port).collect();
    let mut service = Service::new(key.clone(), vec!["10.96.0.10".parse().unwrap()], ports);
    service.load_balancing = "consistent-hash".into();
    let targets = target_ports.iter().enumerate();
    let targets: Vec<_> = targets.map(|(at, target)| EndpointPort::new(name(at), Protocol::Tcp, *target)).collect();
    let endpoint = |last: u8| Endpoint::new([10, 244, 0, last].into(), targets.as_slice().into());
    let endpoints = [1, 2].map(|last| Change::Endpoint(key.clone(), endpoint(last)));
    std::iter::once(Change::from(service)).chain(endpoints).collect()
}

/// However many ports it has, a Service has a limited number of slots, and ports with equal
/// endpoints share them. A change of the target of one port leaves the slots of the others.
#[test]
fn ports_with_equal_endpoints_share_their_slots_and_many_ports_have_few() {
    let mut rig = Rig::new(Family::V4, false);
    rig.full().unwrap();
    let mut slots = |target_ports: &[u16]| {
        let mut dirty = Dirty::default();
        hashed(target_ports).into_iter().for_each(|change| _ = rig.state.apply(change, &mut dirty));
        let plan = rig.ledger.changed(&rig.state, &rig.node, &dirty);
        let written = plan.add.iter().filter(|element| matches!(element, Element::Endpoint(..))).count();
        rig.sets.commit(&plan, &rig.ledger).unwrap();
        let all = rig.sets.elements.keys().filter(|key| matches!(key, ElementKey::Endpoint(..))).count();
        let before = rig.sets.clone();
        rig.ledger = ledger(Family::V4, false);
        assert!(rig.full().unwrap().is_empty(), "a restarted agent shares other slots");
        assert_eq!(rig.sets, before);
        (all, written)
    };
    assert_eq!(slots(&[8080; 8]), (2048, 2048));
    assert_eq!(slots(&[8080, 8080, 8080, 9090, 8080, 8080, 8080, 8080]), (4096, 2048));
    assert_eq!(slots(&[8080; 8]), (2048, 0));
    assert_eq!(slots(&[8080; 100]).0, 128);
    assert_eq!(slots(&(1..=100).collect::<Vec<u16>>()).0, 100 * 128);
}
