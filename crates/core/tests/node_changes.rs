//! Changes of the node's facts among changes of services. In any order, the rules at the end match
//! the last facts.
#![allow(clippy::unwrap_used)]

use std::net::IpAddr;

use fake_kernel::iptables::FakeKernel;
use headgate_core::{
    Change, Dirty, Family, FixedState, NodeFacts, ServiceKey, State,
    iptables::{ExistingTables, Layout, RenderConfig, RulesLedger, RulesTable, ruleset},
};
use proptest::prelude::*;

mod changes;
mod fake_kernel;
use changes::{any_change, last_of_each, node, subject};

mod flat;
use flat::flat;

/// A change of the node's zone, of its address, or of the shared state.
#[derive(Debug, Clone)]
enum Event {
    Zone(Option<u8>),
    Address(u8),
    Change(Box<Change>),
}

/// The object of an event. The last event of each subject determines the result.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Subject {
    Zone,
    Address,
    Change((ServiceKey, Option<IpAddr>)),
}

impl Event {
    fn subject(&self) -> Subject {
        match self {
            Self::Zone(_) => Subject::Zone,
            Self::Address(_) => Subject::Address,
            Self::Change(change) => Subject::Change(subject(change)),
        }
    }
}

fn any_event() -> impl Strategy<Value = Event> {
    prop_oneof![
        2 => prop::option::of(1u8..4).prop_map(Event::Zone),
        1 => (0u8..4).prop_map(Event::Address),
        8 => any_change(4).prop_map(|change| Event::Change(Box::new(change))),
    ]
}

/// A simplified agent. The agent programs the services that changed, or all services if the node
/// changed.
struct Agent {
    facts: NodeFacts,
    state: State,
    kernel: FakeKernel,
    ledger: RulesLedger,
}

impl Agent {
    fn new(layout: Layout, family: Family) -> Self {
        let config = RenderConfig { layout, ..RenderConfig::new(family) };
        let (kernel, ledger) = (FakeKernel::default(), RulesLedger::new(ruleset(config)));
        Self { facts: node(), state: State::default(), kernel, ledger }
    }

    /// Applies an event. Returns true if the node changed.
    fn apply(&mut self, event: &Event, dirty: &mut Dirty) -> bool {
        match event {
            Event::Zone(zone) => self.facts.zone = zone.map(|zone| format!("z{zone}").into()),
            Event::Address(last) => {
                let v6 = format!("2001:db8:5::{last}").parse().unwrap();
                self.facts.addresses = vec![IpAddr::from([192, 0, 2, *last]), v6];
            }
            Event::Change(change) => {
                self.state.apply(Change::clone(change), dirty);
                return false;
            }
        }
        true
    }

    /// Programs events in one step.
    fn step(&mut self, events: &[Event]) {
        let mut dirty = Dirty::default();
        let needs_full = events.iter().fold(false, |needs_full, event| self.apply(event, &mut dirty) | needs_full);
        if needs_full {
            self.full();
        } else {
            let (script, _) = self.ledger.changed(&self.state, &self.facts, &dirty);
            self.kernel.restore(&script.to_string()).unwrap();
        }
    }

    fn full(&mut self) {
        let saves = RulesTable::ALL.map(|table| self.kernel.save(table)).concat();
        let (script, _) = self.ledger.full(&FixedState(&self.state, &self.facts), ExistingTables::parse(&saves));
        self.kernel.restore(&script.to_string()).unwrap();
    }

    fn rules(&self) -> Vec<String> {
        flat(&RulesTable::ALL.map(|table| self.kernel.save(table)))
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    // rows: 25, 26, 27, 29, 62
    #[test]
    fn rules_match_the_last_facts_of_the_node_in_any_order_of_changes(
        events in prop::collection::vec(any_event(), 1..50),
        chunk in 1usize..8,
        layout in prop_oneof![Just(Layout::Classic), Just(Layout::Compact)],
        family in prop_oneof![Just(Family::V4), Just(Family::V6)],
    ) {
        let mut at_once = Agent::new(layout, family);
        events.iter().for_each(|event| _ = at_once.apply(event, &mut Dirty::default()));
        at_once.full();
        let wanted = at_once.rules();

        // The sequences are: the original order; events of the node first; events of the node last;
        // only the last event of each subject; the last events in reverse order.
        let (of_node, others): (Vec<Event>, Vec<Event>) =
            events.iter().cloned().partition(|event| !matches!(event, Event::Change(_)));
        let squashed = last_of_each(&events, Event::subject);
        let reversed: Vec<Event> = squashed.iter().rev().cloned().collect();
        let node_first = [of_node.clone(), others.clone()].concat();
        for sequence in [events.clone(), node_first, [others, of_node].concat(), squashed, reversed] {
            let mut agent = Agent::new(layout, family);
            agent.full();
            for part in sequence.chunks(chunk) {
                agent.step(part);
            }
            prop_assert_eq!(&agent.rules(), &wanted);
        }
    }
}
