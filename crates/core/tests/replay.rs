//! Changes that are replayed in another order, split into other steps, or squashed produce equal
//! states, digests and rules. The kernel accepts every script.
#![allow(clippy::unwrap_used)]

use std::{net::IpAddr, sync::Arc};

use fake_kernel::iptables::FakeKernel;
use headgate_core::{
    Change, Dirty, Endpoint, EndpointPort, Family, FixedState, NodeFacts, Protocol, Service, ServiceKey, ServicePort,
    State,
    iptables::{ExistingTables, Layout, RenderConfig, RulesLedger, RulesTable, Script, names::GateChain, ruleset},
    view::LocalDetector,
};
use proptest::prelude::*;

mod changes;
mod fake_kernel;
use changes::{Event, any_event, any_event_or_node, node, replays};

mod changing;
use changing::Changing;

mod flat;
use flat::flat;

fn config(family: Family, layout: Layout) -> RenderConfig {
    let mut config = RenderConfig { layout, ..RenderConfig::new(family) };
    config.masquerade.detector_v4 = Some(LocalDetector::Cidr("10.244.0.0/16".parse().unwrap()));
    config
}

/// The configuration of mode userspace.
fn with_proxy(mut config: RenderConfig) -> RenderConfig {
    let address: IpAddr = if config.family == Family::V4 { "169.254.77.1" } else { "fd00::1" }.parse().unwrap();
    config.listeners =
        GateChain::ALL.into_iter().zip(10245..).map(|(chain, port)| (chain, (address, port).into())).collect();
    config
}

struct Rig {
    kernel: FakeKernel,
    ledger: RulesLedger,
    state: State,
    node: NodeFacts,
}

impl Rig {
    fn new(config: RenderConfig) -> Self {
        Self {
            kernel: FakeKernel::default(),
            ledger: RulesLedger::new(ruleset(config)),
            state: State::default(),
            node: node(),
        }
    }

    /// Returns the number of chains written or deleted.
    fn full(&mut self) -> u32 {
        let saves = RulesTable::ALL.map(|table| self.kernel.save(table));
        let (script, _) =
            self.ledger.full(&FixedState(&self.state, &self.node), ExistingTables::parse(&saves.concat()));
        self.kernel.restore(&script.to_string()).unwrap();
        script.chains_written() + script.chains_deleted()
    }

    /// Returns the number of services that were planned and the number of dirty services. A change
    /// of the node is followed by a full script.
    fn step(&mut self, events: &[Event]) -> (usize, usize) {
        let mut dirty = Dirty::default();
        events.iter().for_each(|event| event.apply(&mut self.state, &mut self.node, &mut dirty));
        if events.iter().any(Event::is_of_node) {
            self.full();
            return (dirty.services.len(), dirty.services.len());
        }
        let (script, planned) = self.ledger.changed(&self.state, &self.node, &dirty);
        self.kernel.restore(&script.to_string()).unwrap();
        (planned as usize, dirty.services.len())
    }

    /// Runs a full script, in parts where this is allowed. The events of `meanwhile` happen after
    /// the source was read `looks` times.
    fn full_in_parts(&mut self, looks: usize, meanwhile: &[Event]) -> Result<(), String> {
        let saves = RulesTable::ALL.map(|table| self.kernel.save(table)).concat();
        let source = Changing::new(looks, std::mem::take(&mut self.state), self.node.clone(), meanwhile);
        let mut text = String::new();
        let mut write = |script: &Script| text.push_str(&script.to_string());
        let (script, _) = self.ledger.full_in_parts(&source, ExistingTables::parse(&saves), Some(&mut write));
        text.push_str(&script.to_string());
        self.kernel.restore(&text).map_err(|error| format!("{error} in\n{text}"))?;
        let dirty;
        (self.state, self.node, dirty) = source.end();
        let (script, _) = self.ledger.changed(&self.state, &self.node, &dirty);
        self.kernel.restore(&script.to_string())
    }

    /// Deletes all rules of the built-in chains.
    fn delete_jumps(&mut self) {
        for table in RulesTable::ALL {
            let save = self.kernel.save(table);
            let jumps =
                save.lines().filter_map(|line| line.strip_prefix("-A ").filter(|rule| !rule.starts_with("KUBE-")));
            let text: String = jumps.map(|rule| format!("-D {rule}\n")).collect();
            self.kernel.restore(&format!("*{table}\n{text}COMMIT\n")).unwrap();
        }
    }

    /// Returns the chain of Headgate in nat whose name is the last in alphabetical order. The chain
    /// belongs to a service if any service exists.
    fn some_chain(&self) -> String {
        let save = self.kernel.save(RulesTable::Nat);
        let mut names = save.lines().filter_map(|line| line.strip_prefix(":KUBE")?.split(' ').next());
        format!("KUBE{}", names.next_back().unwrap())
    }

    /// Returns the rules of all tables.
    fn rules(&self) -> Vec<String> {
        RulesTable::ALL.iter().map(|table| self.kernel.save(*table)).collect()
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    // rows: 25, 26, 27, 29, 62
    // rows of iptables: 19, 93, 98, 100
    #[test]
    fn replayed_split_and_squashed_changes_produce_the_same_rules(
        changes in prop::collection::vec(any_event_or_node(8), 1..60),
        chunk in 1usize..10,
        layout in prop_oneof![Just(Layout::Classic), Just(Layout::Compact)],
        family in prop_oneof![Just(Family::V4), Just(Family::V6)],
        has_proxy in any::<bool>(),
    ) {
        let config = if has_proxy { with_proxy(config(family, layout)) } else { config(family, layout) };
        // A single full script for the final state produces the wanted rules.
        let mut wanted = Rig::new(config.clone());
        changes.iter().for_each(|event| event.apply(&mut wanted.state, &mut wanted.node, &mut Dirty::default()));
        wanted.full();

        for sequence in replays(&changes) {
            let mut rig = Rig::new(config.clone());
            rig.full();
            for part in sequence.chunks(chunk) {
                let (planned, dirty) = rig.step(part);
                prop_assert_eq!(planned, dirty);
            }
            prop_assert_eq!(rig.state.digests(), wanted.state.digests());
            prop_assert_eq!((rig.state.service_count(), rig.state.endpoint_count()), (wanted.state.service_count(), wanted.state.endpoint_count()));
            prop_assert_eq!(rig.state.entries().count(), wanted.state.entries().count());
            if layout == Layout::Classic {
                prop_assert_eq!(rig.rules(), wanted.rules());
            }
            prop_assert_eq!(flat(&rig.rules()), flat(&wanted.rules()));
            rig.full();
            prop_assert_eq!(flat(&rig.rules()), flat(&wanted.rules()));
            // Nothing is left to do, also after a restart of the agent.
            rig.ledger = RulesLedger::new(ruleset(config.clone()));
            prop_assert_eq!(rig.full(), 0);
            prop_assert_eq!(rig.step(&[]), (0, 0));
            let chain = rig.some_chain();
            rig.kernel.restore(&format!("*nat\n-A {chain} -j RETURN\nCOMMIT\n")).unwrap();
            prop_assert_eq!(rig.full(), 1, "the change of {} by another program must be undone", chain);
            prop_assert_eq!(rig.full(), 0);
            // A cleanup removes everything.
            let saves = RulesTable::ALL.map(|table| rig.kernel.save(table)).concat();
            rig.kernel.restore(&RulesLedger::cleanup(&ExistingTables::parse(&saves)).to_string()).unwrap();
            prop_assert_eq!(rig.kernel, FakeKernel::default());
        }
    }

    // rows: 19, 98
    #[test]
    fn changes_during_the_writing_of_a_full_sync_are_programmed_by_the_next_step(
        earlier in prop::collection::vec(any_event(8), 0..30),
        changes in prop::collection::vec(any_event(8), 1..30),
        meanwhile in prop::collection::vec(any_event(8), 0..20),
        has_jumps in any::<bool>(),
        looks in 0usize..4,
        layout in prop_oneof![Just(Layout::Classic), Just(Layout::Compact)],
    ) {
        // The kernel has rules of an earlier run. Another program may have deleted the jumps to
        // Headgate's chains.
        let mut rig = Rig::new(config(Family::V4, layout));
        if !earlier.is_empty() {
            rig.full();
            rig.step(&earlier);
        }
        if !has_jumps {
            rig.delete_jumps();
        }
        rig.ledger = RulesLedger::new(ruleset(config(Family::V4, layout)));
        changes.iter().for_each(|event| event.apply(&mut rig.state, &mut rig.node, &mut Dirty::default()));
        rig.full_in_parts(looks, &meanwhile).map_err(TestCaseError::fail)?;

        let mut wanted = Rig::new(config(Family::V4, layout));
        for event in earlier.iter().chain(&changes).chain(&meanwhile) {
            event.apply(&mut wanted.state, &mut wanted.node, &mut Dirty::default());
        }
        wanted.full();
        prop_assert_eq!(flat(&rig.rules()), flat(&wanted.rules()));
        // The next full script may divide the dispatch chains into other groups. After that script,
        // nothing is left to do.
        rig.full();
        prop_assert_eq!(flat(&rig.rules()), flat(&wanted.rules()));
        prop_assert_eq!(rig.full(), 0);
    }
}

// rows of iptables: 99
#[test]
fn rules_are_correct_after_the_cluster_crosses_the_layout_threshold() {
    for removed in [0u16, 100, 144, 272, 399] {
        let service = |i: u16| {
            let [high, low] = i.to_be_bytes();
            let mut service = Service::new(
                ServiceKey::new("ns", &format!("s{i}")),
                vec![IpAddr::from([10, 96, high, low])],
                vec![ServicePort { name: "a".into(), protocol: Protocol::Tcp, port: 80, node_port: 30000 + i }],
            );
            service.created_unix_seconds = 1;
            service
        };
        let endpoint =
            || Endpoint::new(IpAddr::from([10, 244, 0, 1]), Arc::from([EndpointPort::new("a", Protocol::Tcp, 80)]));
        let mut rig = Rig::new(config(Family::V4, Layout::Auto));
        rig.full();
        for i in 0..400 {
            rig.step(&[Change::from(service(i)), Change::Endpoint(service(i).key, endpoint())].map(Event::from));
        }
        for i in 0..removed {
            let gone =
                [Change::RemoveService(service(i).key), Change::RemoveEndpoint(service(i).key, endpoint().address)];
            rig.step(&gone.map(Event::from));
        }
        let text = rig.kernel.save(RulesTable::Nat);
        for i in 0..400u16 {
            let [high, low] = i.to_be_bytes();
            assert_eq!(text.contains(&format!("-d 10.96.{high}.{low}/32 -p tcp")), i >= removed, "service {i}");
        }
        let before = rig.rules();
        rig.full();
        let (script, _) = rig.ledger.changed(&rig.state, &rig.node, &Dirty::default());
        assert!(script.is_empty());
        let is_two_level = before.concat().contains("KUBE-SVC-G-");
        // The layout for 400 services is compact. The layout becomes classic again at half of the
        // threshold.
        assert_eq!(is_two_level, removed < 272, "{removed} removed");
    }
}
