//! Replay for IPVS. Changes that are replayed in another order, split into other steps, or squashed
//! produce equal virtual servers, sets, addresses and rules. The kernel accepts every plan, no plan
//! breaks connections, and objects of other programs are not changed.
#![allow(clippy::unwrap_used)]

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
};

use fake_kernel::ipvs::FakeKernel;
use headgate_core::{
    Change, Dirty, Family, FixedState, NodeFacts, Protocol, State, TrafficPolicy,
    iptables::Script,
    ipvs::{IpSetElement, IpvsConfig, IpvsLedger, IpvsPlan, Op, Scheduler, ServerKey, Set, Settings},
    view::{LocalDetector, service_views},
};
use proptest::prelude::*;

mod changes;
mod fake_kernel;
use changes::{Event, any_event, node, replays};

const FAR_FUTURE_MS: u64 = 1 << 40;

fn config(family: Family) -> IpvsConfig {
    let mut config = IpvsConfig { scheduler: Scheduler::WeightedLeastConnection, ..IpvsConfig::new(family) };
    config.masquerade.detector_v4 = Some(LocalDetector::Cidr("10.244.0.0/16".parse().unwrap()));
    // 192.0.2.101 is also an externalIP of services. It must not be added to the device.
    config.node_port_addresses =
        ["192.0.2.1", "192.0.2.101", "2001:db8::1"].iter().map(|address| address.parse().unwrap()).collect();
    config.other_addresses = config.node_port_addresses.iter().copied().collect();
    config.exclude_cidrs = vec!["203.0.113.200/31".parse().unwrap()];
    config
}

/// Virtual servers of another program.
fn foreign() -> [(ServerKey, Settings); 2] {
    let settings = Settings::new(Scheduler::SourceHashing);
    let key = |address: &str, port| ServerKey { address: address.parse().unwrap(), protocol: Protocol::Tcp, port };
    [(key("172.30.0.1", 80), settings), (key("203.0.113.201", 8080), settings)]
}

struct Rig {
    kernel: FakeKernel,
    ledger: IpvsLedger,
    state: State,
    node: NodeFacts,
    now_ms: u64,
}

impl Rig {
    fn new(config: IpvsConfig) -> Self {
        let mut kernel = FakeKernel::new(&config);
        for (key, settings) in foreign() {
            kernel.servers.insert(key, (settings, [(SocketAddr::new(key.address, 1), 1)].into()));
        }
        Self { kernel, ledger: IpvsLedger::new(config), state: State::default(), node: node(), now_ms: 0 }
    }

    /// Runs a full plan. Returns false if the plan is empty.
    fn full(&mut self) -> bool {
        let plan = self.ledger.full(&FixedState(&self.state, &self.node), &self.kernel.existing(), self.now_ms);
        self.kernel.apply(&plan).unwrap();
        self.check();
        !plan.is_empty()
    }

    fn restart(&mut self) {
        self.ledger = IpvsLedger::new(self.ledger.config().clone());
    }

    /// Runs the first operations of a plan and then restarts the agent, as if it was killed. The
    /// script counts as one operation.
    fn killed_in(&mut self, plan: &IpvsPlan, at: prop::sample::Index) {
        for op in plan.ops() {
            let Op::DeleteDestination(key, address) = op else { continue };
            assert_ne!(key.protocol, Protocol::Tcp, "connections of {address} at {key} are broken");
        }
        let before = plan.before.len();
        let done = at.index(before + plan.after.len() + 2);
        let cut = IpvsPlan {
            before: plan.before[..done.min(before)].to_vec(),
            script: if done > before { plan.script.clone() } else { Script::default() },
            after: plan.after[..done.saturating_sub(before + 1)].to_vec(),
            ..IpvsPlan::default()
        };
        self.kernel.apply(&cut).unwrap();
        self.restart();
    }

    fn step(&mut self, events: &[Event]) {
        let mut dirty = Dirty::default();
        events.iter().for_each(|event| event.apply(&mut self.state, &mut self.node, &mut dirty));
        let before = self.kernel.clone();
        let plan = self.ledger.changed(&self.state, &self.node, &dirty, self.now_ms);
        assert_eq!(plan.services_planned as usize, dirty.services.len());
        for op in plan.ops() {
            let Op::DeleteDestination(key, address) = op else { continue };
            assert_ne!(
                key.protocol,
                Protocol::Tcp,
                "connections of {address} at {key} are broken: {:?}",
                before.servers[key]
            );
        }
        self.kernel.apply(&plan).unwrap();
        self.check();
    }

    /// Asserts the invariants after each plan.
    fn check(&self) {
        let config = self.ledger.config();
        for (key, _) in self.kernel.servers.iter().filter(|(key, _)| foreign().iter().all(|(other, _)| other != *key)) {
            let is_local =
                self.kernel.device_addresses.contains(&key.address) || config.other_addresses.contains(&key.address);
            assert!(is_local, "the node does not have the address of {key}");
            let existing = self.kernel.existing();
            assert!(config.excludes(key.address) || existing.mark(key, config).is_some(), "{key} has no mark");
        }
        for (key, settings) in foreign() {
            assert_eq!(self.kernel.servers[&key], (settings, [(SocketAddr::new(key.address, 1), 1)].into()));
        }
        let is_rejected_or_dropped = |key: &ServerKey| {
            [Set::NoEndpoints, Set::NoLocalEndpoints].iter().any(|set| self.kernel.sets[set].contains(&key.element()))
        };
        for set in Set::OF_SERVERS {
            for element in &self.kernel.sets[&set] {
                let IpSetElement::IpPort(address, protocol, port) = *element else { panic!("{element}") };
                let key = ServerKey { address, protocol, port };
                let weights = self.kernel.servers.get(&key).map(|(_, destinations)| destinations);
                let is_served = weights.is_some_and(|weights| weights.values().any(|weight| *weight > 0));
                // A virtual server of a removed service port may only have draining destinations.
                let drains = weights.is_some_and(|weights| !weights.is_empty());
                assert!(is_served || is_rejected_or_dropped(&key) || drains, "{key} is neither served nor refused");
            }
        }
        self.check_new_connections_have_a_destination();
        let existing = self.kernel.existing();
        for (set, elements) in &existing.sets {
            assert!(self.ledger.set_size(*set).contains(&elements.len()), "{set:?} has {}", elements.len());
        }
        assert!(self.ledger.any_server().is_none_or(|server| existing.servers.contains_key(&server)));
    }

    /// Asserts that a server has a destination for new connections if and only if its service port
    /// has endpoints, even if all endpoints fail health checks.
    fn check_new_connections_have_a_destination(&self) {
        for key in self.state.entries().map(|(key, _)| key) {
            for view in service_views(&self.state, key, self.ledger.config().family, &self.node) {
                let Some(address) = view.cluster_ip else { continue };
                let endpoints = match view.internal_traffic_policy {
                    TrafficPolicy::Cluster => &view.cluster_endpoints,
                    TrafficPolicy::Local => &view.local_endpoints,
                };
                let server = ServerKey { address, protocol: view.protocol, port: view.port };
                let has_destination = |(_, destinations): &(Settings, BTreeMap<SocketAddr, u32>)| {
                    destinations.values().any(|weight| *weight > 0)
                };
                let is_served = self.kernel.servers.get(&server).is_some_and(has_destination);
                assert_eq!(is_served, !endpoints.is_empty(), "{server}");
            }
        }
    }

    /// Ends all connections and removes the drained destinations.
    fn drain(&mut self) {
        for key in self.ledger.draining().collect::<Vec<_>>() {
            let none = self.kernel.servers[&key].1.keys().map(|address| (*address, 0)).collect();
            let plan = self.ledger.drained(key, &none, self.now_ms);
            self.kernel.apply(&plan).unwrap();
        }
        assert_eq!(self.ledger.draining().count(), 0);
        self.check();
    }
}

/// Like [`any_event`], but some services request a scheduler.
fn any_scheduled_event(services: u8) -> impl Strategy<Value = Event> {
    (any_event(services), prop_oneof![Just(""), Just("fo"), Just("fastest")]).prop_map(|(mut event, scheduler)| {
        if let Event::Change(change) = &mut event
            && let Change::Service(service) = &mut **change
        {
            service.scheduler = scheduler.into();
        }
        event
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn replayed_split_and_squashed_changes_produce_the_same_kernel_objects(
        changes in prop::collection::vec(any_scheduled_event(8), 1..60),
        chunk in 1usize..10,
        restarts in any::<bool>(),
        family in prop_oneof![Just(Family::V4), Just(Family::V6)],
    ) {
        let mut wanted = Rig::new(config(family));
        changes.iter().for_each(|event| event.apply(&mut wanted.state, &mut wanted.node, &mut Dirty::default()));
        wanted.full();

        for sequence in replays(&changes) {
            let mut rig = Rig::new(config(family));
            rig.full();
            for (i, part) in sequence.chunks(chunk).enumerate() {
                rig.now_ms += 1000;
                rig.step(part);
                if restarts && i % 3 == 2 {
                    rig.restart();
                    prop_assert!(!rig.full(), "a restarted agent must not change a correct kernel");
                }
            }
            rig.drain();
            prop_assert_eq!(&rig.kernel, &wanted.kernel);
            prop_assert!(rig.ledger.problems().eq(wanted.ledger.problems()));
            prop_assert!(!rig.full());
            rig.restart();
            prop_assert!(!rig.full());
            // Changes by other programs are detected and undone.
            rig.kernel.device_addresses.pop_first();
            rig.kernel.sets.get_mut(&Set::ClusterIp).unwrap().clear();
            if let Some((_, destinations)) = rig.kernel.servers.values_mut().find(|(settings, _)| settings.scheduler != Scheduler::SourceHashing) {
                destinations.clear();
                destinations.insert("198.51.100.99:1".parse().unwrap(), 1);
            }
            rig.full();
            rig.drain();
            prop_assert_eq!(&rig.kernel, &wanted.kernel);
            // A cleanup removes all objects of Headgate.
            let plan = IpvsLedger::cleanup(rig.ledger.config(), &rig.kernel.existing(), &BTreeSet::new());
            rig.kernel.apply(&plan).unwrap();
            let mut left = rig.kernel.servers.clone();
            left.retain(|key, _| !rig.ledger.config().excludes(key.address));
            prop_assert_eq!(left.len(), 1);
            rig.kernel.servers.clear();
            prop_assert_eq!(&rig.kernel, &FakeKernel::new(rig.ledger.config()));
        }
    }

    #[test]
    fn an_agent_that_was_killed_at_any_operation_repairs_the_kernel_after_its_restart(
        changes in prop::collection::vec(any_scheduled_event(6), 1..40),
        chunk in 1usize..6,
        kills in prop::collection::vec(any::<[prop::sample::Index; 2]>(), 1..10),
        family in prop_oneof![Just(Family::V4), Just(Family::V6)],
    ) {
        let mut wanted = Rig::new(config(family));
        changes.iter().for_each(|event| event.apply(&mut wanted.state, &mut wanted.node, &mut Dirty::default()));
        wanted.full();
        let mut rig = Rig::new(config(family));
        for (part, [first, second]) in changes.chunks(chunk).zip(kills.iter().cycle()) {
            let mut dirty = Dirty::default();
            part.iter().for_each(|event| event.apply(&mut rig.state, &mut rig.node, &mut dirty));
            // Before the first full plan there are no sets.
            if !rig.kernel.sets.is_empty() {
                let plan = rig.ledger.changed(&rig.state, &rig.node, &dirty, rig.now_ms);
                rig.killed_in(&plan, *first);
            }
            let plan = rig.ledger.full(&FixedState(&rig.state, &rig.node), &rig.kernel.existing(), rig.now_ms);
            rig.killed_in(&plan, *second);
            rig.full();
        }
        rig.drain();
        prop_assert_eq!(&rig.kernel, &wanted.kernel);
        prop_assert!(!rig.full());
    }

    #[test]
    fn connections_survive_changes_until_the_drain_limit(changes in prop::collection::vec(any_scheduled_event(4), 1..40)) {
        let limit = 60_000;
        let mut rig = Rig::new(IpvsConfig { drain_limit_ms: Some(limit), ..config(Family::V4) });
        rig.full();
        let mut ever: BTreeMap<ServerKey, BTreeMap<SocketAddr, u64>> = BTreeMap::new();
        for event in &changes {
            rig.step(std::slice::from_ref(event));
            for (key, (_, destinations)) in rig.kernel.servers.iter().filter(|(key, _)| key.protocol == Protocol::Tcp) {
                ever.entry(*key).or_default().extend(destinations.keys().map(|address| (*address, 1)));
            }
            for key in rig.ledger.draining().collect::<Vec<_>>() {
                let plan = rig.ledger.drained(key, &ever[&key], rig.now_ms);
                prop_assert!(plan.is_empty());
            }
        }
        for (key, destinations) in &ever {
            for address in destinations.keys() {
                prop_assert!(rig.kernel.servers[key].1.contains_key(address), "connections of {} at {} were broken", address, key);
            }
        }
        rig.now_ms = limit;
        for key in rig.ledger.draining().collect::<Vec<_>>() {
            let plan = rig.ledger.drained(key, &ever[&key], FAR_FUTURE_MS);
            rig.kernel.apply(&plan).unwrap();
        }
        prop_assert_eq!(rig.ledger.draining().count(), 0);
        rig.check();
    }
}

#[test]
fn servers_of_excluded_networks_are_kept_even_on_addresses_of_the_device() {
    let mut rig = Rig::new(config(Family::V4));
    let (key, _) = foreign()[1];
    rig.kernel.device_addresses.insert(key.address);
    rig.kernel.device_addresses.insert("203.0.113.9".parse::<IpAddr>().unwrap());
    let ours = ServerKey { address: "203.0.113.9".parse().unwrap(), ..key };
    let settings = Settings::new(Scheduler::RoundRobin);
    rig.kernel.servers.insert(ours, (settings, BTreeMap::new()));
    rig.full();
    assert!(rig.kernel.servers.contains_key(&key) && !rig.kernel.servers.contains_key(&ours));
    let plan = IpvsLedger::cleanup(rig.ledger.config(), &rig.kernel.existing(), &BTreeSet::new());
    rig.kernel.apply(&plan).unwrap();
    assert_eq!(rig.kernel.servers.keys().copied().collect::<Vec<_>>(), foreign().map(|(key, _)| key));
}
