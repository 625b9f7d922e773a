//! IPVS on a kernel that rejects some objects of services. All other objects are always programmed,
//! and the ledger records exactly the missing objects. A retry programs the missing objects as soon
//! as the kernel accepts them.
#![allow(clippy::unwrap_used)]

use std::{collections::BTreeSet, net::SocketAddr};

use fake_kernel::ipvs::FakeKernel;
use headgate_core::{
    Dirty, Family, FixedState, NodeFacts, Protocol, State,
    ipvs::{IpvsConfig, IpvsLedger, IpvsPlan, Object, Op, Set},
};
use proptest::prelude::*;

mod changes;
mod fake_kernel;
use changes::{Event, any_event, node};

/// The operations that the kernel rejects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Rejection {
    /// Destinations whose addresses end with this byte.
    Destination(u8),
    /// Virtual servers of a protocol.
    Protocol(Protocol),
    /// New or existing virtual servers with this persistence timeout.
    Persistence(u32),
    /// Addresses of the device that end with this byte.
    Address(u8),
    /// Elements of a set.
    Element(Set),
}

impl Rejection {
    fn rejects(self, op: &Op) -> bool {
        let last = |address: std::net::IpAddr| match address {
            std::net::IpAddr::V4(address) => address.octets()[3],
            std::net::IpAddr::V6(address) => address.octets()[15],
        };
        match (self, op) {
            (Self::Persistence(seconds), Op::AddServer(_, settings) | Op::EditServer(_, settings)) => {
                settings.persistence_seconds == Some(seconds)
            }
            (rejection, op) => match (rejection, op.object()) {
                (Self::Destination(of), Some(Object::Destination(_, address))) => last(address.ip()) == of,
                (Self::Protocol(protocol), Some(Object::Server(server))) => server.protocol == protocol,
                (Self::Address(of), Some(Object::Address(address))) => last(address) == of,
                (Self::Element(rejected), Some(Object::Element(set, _))) => set == rejected,
                _ => false,
            },
        }
    }
}

fn any_rejections() -> impl Strategy<Value = BTreeSet<Rejection>> {
    let any = prop_oneof![
        (0u8..6).prop_map(Rejection::Destination),
        Just(Rejection::Protocol(Protocol::Udp)),
        Just(Rejection::Protocol(Protocol::Tcp)),
        Just(Rejection::Persistence(10)),
        Just(Rejection::Address(100)),
        Just(Rejection::Address(1)),
        Just(Rejection::Element(Set::LoopBack)),
        Just(Rejection::Element(Set::NoEndpoints)),
    ];
    prop::collection::btree_set(any, 0..4)
}

struct Rig {
    kernel: FakeKernel,
    ledger: IpvsLedger,
    state: State,
    node: NodeFacts,
    rejections: BTreeSet<Rejection>,
}

impl Rig {
    fn new(config: IpvsConfig, rejections: BTreeSet<Rejection>) -> Self {
        let kernel = FakeKernel::new(&config);
        Self { kernel, ledger: IpvsLedger::new(config), state: State::default(), node: node(), rejections }
    }

    fn run(&mut self, plan: &IpvsPlan) {
        let rejections = &self.rejections;
        let rejected =
            self.kernel.apply_rejecting(plan, |op| rejections.iter().any(|rejection| rejection.rejects(op))).unwrap();
        assert_eq!(self.ledger.record(plan.ops(), &rejected), [], "every rejected object must be wanted by a service");
        let existing = self.kernel.existing();
        for (set, elements) in &existing.sets {
            assert!(self.ledger.set_size(*set).contains(&elements.len()), "{set:?} has {}", elements.len());
        }
        assert!(self.ledger.any_server().is_none_or(|server| existing.servers.contains_key(&server)));
    }

    fn full(&mut self) {
        let plan = self.ledger.full(&FixedState(&self.state, &self.node), &self.kernel.existing(), 0);
        self.run(&plan);
    }

    fn step(&mut self, events: &[Event]) {
        let mut dirty = Dirty::default();
        events.iter().for_each(|event| event.apply(&mut self.state, &mut self.node, &mut dirty));
        let plan = self.ledger.changed(&self.state, &self.node, &dirty, 0);
        self.run(&plan);
    }

    /// Asserts that the kernel has exactly the wanted objects that are not deferred, and that every
    /// deferred object is wanted.
    fn check(&self) {
        let mut wanted = FakeKernel::new(self.ledger.config());
        let plan = IpvsLedger::new(self.ledger.config().clone()).full(
            &FixedState(&self.state, &self.node),
            &wanted.existing(),
            0,
        );
        wanted.apply(&plan).unwrap();
        let is_deferred = |object: Object| self.ledger.is_deferred(&object);
        for (set, elements) in &wanted.sets {
            for element in elements {
                let is_present = self.kernel.sets[set].contains(element);
                assert!(is_present != is_deferred(Object::Element(*set, *element)), "{element} in {set:?}");
            }
        }
        for address in &wanted.device_addresses {
            let is_present = self.kernel.device_addresses.contains(address);
            assert!(is_present != is_deferred(Object::Address(*address)), "{address}");
        }
        for (key, (settings, destinations)) in &wanted.servers {
            let found = self.kernel.servers.get(key);
            assert!(found.is_some_and(|(found, _)| found == settings) != is_deferred(Object::Server(*key)), "{key}");
            for (address, weight) in destinations {
                let is_present = found.is_some_and(|(_, found)| found.get(address) == Some(weight));
                assert!(is_present != is_deferred(Object::Destination(*key, *address)), "{address} of {key}");
            }
        }
        for (object, service) in self.ledger.deferred() {
            let is_wanted = match object {
                Object::Element(set, element) => wanted.sets[&set].contains(&element),
                Object::Address(address) => wanted.device_addresses.contains(&address),
                Object::Server(key) => wanted.servers.contains_key(&key),
                Object::Destination(key, address) => wanted.servers[&key].1.contains_key(&address),
            };
            // Draining servers may still need elements and addresses.
            let may_outlive_service = matches!(object, Object::Element(..) | Object::Address(_));
            assert!(is_wanted || may_outlive_service, "no service wants {object:?}");
            assert!(self.state.entry(service).is_some() || may_outlive_service, "{service} does not exist");
        }
    }

    fn drain(&mut self) {
        for key in self.ledger.draining().collect::<Vec<_>>() {
            let found = self.kernel.servers.get(&key).map(|(_, found)| found.clone()).unwrap_or_default();
            let none = found.into_keys().map(|address: SocketAddr| (address, 0)).collect();
            let plan = self.ledger.drained(key, &none, 0);
            self.run(&plan);
        }
    }
}

fn config(family: Family) -> IpvsConfig {
    let mut config = IpvsConfig::new(family);
    config.node_port_addresses = ["192.0.2.1", "2001:db8::1"].iter().map(|address| address.parse().unwrap()).collect();
    config.other_addresses = config.node_port_addresses.iter().copied().collect();
    config
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn other_objects_are_programmed_and_a_retry_programs_the_missing_objects(
        events in prop::collection::vec(any_event(5), 1..50),
        chunk in 1usize..8,
        rejections in any_rejections(),
        restarts in any::<bool>(),
        family in prop_oneof![Just(Family::V4), Just(Family::V6)],
    ) {
        let mut rig = Rig::new(config(family), rejections);
        rig.full();
        for (i, part) in events.chunks(chunk).enumerate() {
            rig.step(part);
            rig.check();
            if i % 4 == 3 {
                rig.drain();
                rig.check();
            }
            if restarts && i % 3 == 2 {
                rig.ledger = IpvsLedger::new(rig.ledger.config().clone());
                rig.full();
                rig.check();
            }
        }
        // The first retry fails, and the second retry succeeds.
        for is_rejecting in [true, false] {
            if !is_rejecting {
                rig.rejections.clear();
            }
            let missing: Vec<Object> = rig.ledger.deferred().map(|(object, _)| object).collect();
            let before = rig.ledger.retries(missing.iter().copied());
            prop_assert_eq!(before.len(), missing.len(), "one operation for each object: {:?}", missing);
            rig.run(&IpvsPlan { before, ..IpvsPlan::default() });
            rig.check();
            prop_assert_eq!(rig.ledger.deferred().count(), if is_rejecting { missing.len() } else { 0 });
        }
        rig.drain();
        let mut wanted = Rig::new(config(family), BTreeSet::new());
        (wanted.state, wanted.node) = (std::mem::take(&mut rig.state), rig.node.clone());
        wanted.full();
        prop_assert_eq!(&rig.kernel, &wanted.kernel);
    }
}
