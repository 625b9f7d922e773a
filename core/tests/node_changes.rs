//! A node's own facts change among the changes of services: whatever the order, the rules are those of the facts at the end.
#![allow(clippy::unwrap_used)]

use std::{net::IpAddr, sync::Arc};

use headgate_core::{
    Change, Dirty, Endpoint, EndpointPort, Family, Hints, Protocol, Service, ServiceKey, ServicePort, State,
    TrafficPolicy,
    iptables::{Existing, Layout, Ledger, RenderConfig, Table, fake_kernel::FakeKernel},
    view::NodeFacts,
};
use proptest::prelude::*;

const NODE: &str = "n1";

fn key(number: u8) -> ServiceKey {
    ServiceKey::new("ns", &format!("svc{number}"))
}

/// What can happen.
#[derive(Debug, Clone)]
enum Event {
    Zone(Option<u8>),
    Address(u8),
    Change(Box<Change>),
}

impl Event {
    fn change(change: Change) -> Self {
        Self::Change(Box::new(change))
    }
}

prop_compose! {
    fn any_service()(number in 0u8..4, is_local in any::<bool>(), has_ranges in any::<bool>()) -> Service {
        let ports = vec![ServicePort { name: "a".into(), protocol: Protocol::Tcp, port: 80, node_port: 30_000 + u16::from(number) }];
        let mut service = Service::new(key(number), vec![IpAddr::from([10, 96, 0, number])], ports);
        service.load_balancer_ips.push(IpAddr::from([203, 0, 113, number]));
        if is_local { service.internal_traffic_policy = TrafficPolicy::Local; }
        // A node whose address is in a range is treated in another way.
        if has_ranges { service.load_balancer_source_ranges.push("192.0.2.0/31".parse().unwrap()); }
        service
    }
}

prop_compose! {
    fn any_endpoint()(number in 0u8..4, address in 0u8..5, zone in 0u8..3, node in 0u8..3) -> Change {
        let ports = Arc::from([EndpointPort { name: "a".into(), protocol: Protocol::Tcp, port: 8080 }]);
        let mut endpoint = Endpoint::new(IpAddr::from([10, 244, 0, address]), ports);
        endpoint.node = Some(format!("n{}", address % 3).into());
        let nodes = if node > 0 { vec![format!("n{node}").into()] } else { Vec::new() };
        let zones = if zone > 0 { vec![format!("z{zone}").into()] } else { Vec::new() };
        endpoint.hints = Some(Arc::new(Hints { zones, nodes }));
        Change::Endpoint(key(number), endpoint)
    }
}

fn any_event() -> impl Strategy<Value = Event> {
    prop_oneof![
        2 => prop::option::of(1u8..4).prop_map(Event::Zone),
        1 => (0u8..4).prop_map(Event::Address),
        2 => any_service().prop_map(|service| Event::change(Change::Service(service))),
        4 => any_endpoint().prop_map(Event::change),
        1 => (0u8..4, 0u8..5).prop_map(|(number, address)| {
            Event::change(Change::RemoveEndpoint(key(number), IpAddr::from([10, 244, 0, address])))
        }),
        1 => (0u8..4).prop_map(|number| Event::change(Change::RemoveService(key(number)))),
    ]
}

/// What an agent does: services that changed are written anew, and everything is when the node has changed.
struct Agent {
    facts: NodeFacts,
    state: State,
    kernel: FakeKernel,
    ledger: Ledger,
}

impl Agent {
    fn new(layout: Layout) -> Self {
        let config = RenderConfig { layout, ..RenderConfig::new(Family::V4) };
        let (kernel, ledger) = (FakeKernel::default(), Ledger::new(config));
        Self { facts: NodeFacts::named(NODE), state: State::default(), kernel, ledger }
    }

    fn take(&mut self, event: &Event, dirty: &mut Dirty) -> bool {
        match event {
            Event::Zone(zone) => self.facts.zone = zone.map(|zone| format!("z{zone}").into()),
            Event::Address(last) => self.facts.addresses = vec![IpAddr::from([192, 0, 2, *last])],
            Event::Change(change) => {
                self.state.apply(Change::clone(change), dirty);
                return false;
            }
        }
        true
    }

    /// Takes events up as one step.
    fn step(&mut self, events: &[Event]) {
        let mut dirty = Dirty::default();
        let needs_full = events.iter().fold(false, |needs_full, event| self.take(event, &mut dirty) | needs_full);
        if needs_full {
            self.full();
        } else {
            let (script, _) = self.ledger.changed(&self.state, &self.facts, &dirty);
            self.kernel.restore(&script.to_string()).unwrap();
        }
    }

    fn full(&mut self) {
        let saves = Table::ALL.map(|table| self.kernel.save(table)).concat();
        let mut existing = headgate_core::iptables::existing::ExistingTables::default();
        for table in Table::ALL {
            existing.set(table, Existing::parse(table, &saves));
        }
        let (script, _) = self.ledger.full(&self.state, &self.facts, &existing);
        self.kernel.restore(&script.to_string()).unwrap();
    }

    /// Rules, sorted, as if dispatch chains had no groups: how those are cut depends on the addresses of the first full sync.
    fn rules(&self) -> Vec<String> {
        let is_group = |name: &str| name.starts_with("KUBE-SVCS-") || name.starts_with("KUBE-NPS-");
        let mut rules = Vec::new();
        for table in Table::ALL {
            for line in self.kernel.save(table).lines() {
                let words: Vec<&str> = line.split(' ').collect();
                let name = words.get(1).copied().unwrap_or_default();
                if is_group(words[0].trim_start_matches(':')) || words.last().is_some_and(|target| is_group(target)) {
                    continue;
                }
                let line = if is_group(name) { line.replace(name, "group") } else { line.to_owned() };
                rules.push(format!("{table} {line}"));
            }
        }
        rules.sort();
        rules
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    // rows: 25, 26, 27, 29, 62
    #[test]
    fn facts_of_the_node_may_change_at_any_time(
        events in prop::collection::vec(any_event(), 1..50),
        chunk in 1usize..8,
        layout in prop_oneof![Just(Layout::Classic), Just(Layout::Compact)],
    ) {
        let mut at_once = Agent::new(layout);
        for event in &events {
            at_once.take(event, &mut Dirty::default());
        }
        at_once.full();
        let wanted = at_once.rules();

        // As they came, and with all of the node's first or last.
        let (of_node, others): (Vec<Event>, Vec<Event>) =
            events.iter().cloned().partition(|event| !matches!(event, Event::Change(_)));
        for sequence in [events.clone(), [of_node.clone(), others.clone()].concat(), [others, of_node].concat()] {
            let mut agent = Agent::new(layout);
            agent.full();
            for part in sequence.chunks(chunk) {
                agent.step(part);
            }
            prop_assert_eq!(&agent.rules(), &wanted);
        }
    }
}
