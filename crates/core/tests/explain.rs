//! Explanations agree with the views that the dataplanes program, and with a second, simple
//! implementation of the rules for endpoints.

use std::{collections::BTreeSet, net::SocketAddr, sync::Arc};

use headgate_core::{
    Change, Conditions, Dirty, Endpoint, EndpointPort, Family, Hints, NodeFacts, Placement, Protocol, Service,
    ServiceKey, ServicePort, State, TrafficPolicy,
    explain::{Explanation, LeftOut, Mode, NodeSettings, PacketFate, Source, To, explain},
    view::{Destination, Exclusion},
    view::{LocalDetector, MasqueradeConfig, service_views},
};
use proptest::prelude::*;

const HERE: &str = "here";
const CLUSTER_IP: [u8; 4] = [10, 96, 0, 1];
const NODE_PORT: u16 = 30_080;

/// One endpoint with one port.
#[derive(Debug, Clone)]
struct Sample {
    conditions: Conditions,
    node: Option<&'static str>,
    zones: Vec<&'static str>,
    nodes: Vec<&'static str>,
    has_port: bool,
    is_failing: bool,
}

fn sample() -> impl Strategy<Value = Sample> {
    let conditions = prop_oneof![
        4 => Just((true, true, false)),
        2 => Just((false, false, false)),
        2 => Just((false, true, true)),
        1 => Just((false, false, true)),
        1 => Just((false, true, false)),
    ];
    let node = prop_oneof![Just(Some(HERE)), Just(Some("there")), Just(None)];
    let zones = prop_oneof![Just(vec!["z1"]), Just(vec!["z2"]), Just(vec!["z1", "z2"]), Just(vec![])];
    let nodes = prop_oneof![3 => Just(vec![]), 1 => Just(vec![HERE]), 1 => Just(vec!["there"])];
    (conditions, node, zones, nodes, prop::bool::weighted(0.9), prop::bool::weighted(0.3)).prop_map(
        |((ready, serving, terminating), node, zones, nodes, has_port, is_failing)| Sample {
            conditions: Conditions { ready, serving, terminating },
            node,
            zones,
            nodes,
            has_port,
            is_failing,
        },
    )
}

#[derive(Debug, Clone)]
struct World {
    samples: Vec<Sample>,
    internal: TrafficPolicy,
    external: TrafficPolicy,
    is_checked: bool,
    has_zone: bool,
}

fn world() -> impl Strategy<Value = World> {
    let policy = || prop_oneof![Just(TrafficPolicy::Cluster), Just(TrafficPolicy::Local)];
    (prop::collection::vec(sample(), 0..7), policy(), policy(), any::<bool>(), prop::bool::weighted(0.8)).prop_map(
        |(samples, internal, external, is_checked, has_zone)| World {
            samples,
            internal,
            external,
            is_checked,
            has_zone,
        },
    )
}

fn address(index: usize) -> [u8; 4] {
    [10, 244, 0, index as u8 + 1]
}

fn at(index: usize) -> SocketAddr {
    (address(index), 8080).into()
}

impl World {
    fn key() -> Arc<ServiceKey> {
        Arc::new(ServiceKey::new("shop", "web"))
    }

    fn state(&self) -> (State, NodeFacts) {
        let mut state = State::default();
        let port = ServicePort { name: "http".into(), protocol: Protocol::Tcp, port: 80, node_port: NODE_PORT };
        let mut service = Service::new((*Self::key()).clone(), vec![CLUSTER_IP.into()], vec![port]);
        service.internal_traffic_policy = self.internal;
        service.external_traffic_policy = self.external;
        service.health_check = if self.is_checked { "tcp" } else { "" }.into();
        state.apply(service.into(), &mut Dirty::default());
        for (index, sample) in self.samples.iter().enumerate() {
            let name = if sample.has_port { "http" } else { "other" };
            let texts = |list: &[&str]| list.iter().map(|text| Arc::from(*text)).collect();
            let hints = Hints { zones: texts(&sample.zones), nodes: texts(&sample.nodes) };
            let placement = Placement {
                node: sample.node.map(Arc::from),
                hints: (hints != Hints::default()).then(|| hints.into()),
                ..Placement::default()
            };
            let ports = [EndpointPort::new(name, Protocol::Tcp, 8080)].into();
            let mut endpoint = Endpoint::new(address(index).into(), ports);
            endpoint.conditions = sample.conditions;
            endpoint.placement = placement.into();
            state.apply(Change::Endpoint((*Self::key()).clone(), endpoint), &mut Dirty::default());
        }
        let mut facts = NodeFacts { zone: self.has_zone.then(|| "z1".into()), ..NodeFacts::named(HERE) };
        let failing = self.samples.iter().enumerate().filter(|(_, sample)| sample.is_failing);
        facts.failing.set(&Self::key(), failing.map(|(index, _)| at(index)).collect());
        (state, facts)
    }

    /// The reasons for leaving out each endpoint, in order, by the text of the documentation.
    fn expected(&self, is_local: bool) -> Vec<Option<LeftOut>> {
        let with_port = || self.samples.iter().filter(|sample| sample.has_port);
        let ready = || with_port().filter(|sample| sample.conditions.ready);
        let hints_for_nodes =
            ready().all(|sample| !sample.nodes.is_empty()) && ready().any(|sample| sample.nodes.contains(&HERE));
        let hints_for_zones = self.has_zone
            && ready().all(|sample| !sample.zones.is_empty())
            && ready().any(|sample| sample.zones.contains(&"z1"));
        let excluded = |sample: &Sample| {
            let Conditions { ready, serving, terminating } = sample.conditions;
            if !ready && !serving && terminating {
                return Some(Exclusion::NotServing);
            }
            if !ready && !terminating {
                return Some(Exclusion::NotReady);
            }
            if is_local {
                return (sample.node != Some(HERE)).then_some(Exclusion::NotOnThisNode);
            }
            if !ready {
                return None;
            }
            if hints_for_nodes {
                return (!sample.nodes.contains(&HERE)).then_some(Exclusion::HintsForOtherNodes);
            }
            (hints_for_zones && !sample.zones.contains(&"z1")).then_some(Exclusion::HintsForOtherZones)
        };
        let set = || with_port().filter(|sample| excluded(sample).is_none());
        let some_ready = set().any(|sample| sample.conditions.ready);
        let in_turn = |sample: &Sample| sample.conditions.ready || !some_ready;
        let all_fail = set().filter(|sample| in_turn(sample)).all(|sample| sample.is_failing);
        let reason = |sample: &Sample| {
            if !sample.has_port {
                return Some(LeftOut::NoSuchPort);
            }
            if let Some(exclusion) = excluded(sample) {
                return Some(LeftOut::Excluded(exclusion));
            }
            if !in_turn(sample) {
                return Some(LeftOut::OthersAreReady);
            }
            (self.is_checked && sample.is_failing && !all_fail).then_some(LeftOut::FailsHealthCheck)
        };
        self.samples.iter().map(reason).collect()
    }
}

fn settings(mode: Mode) -> NodeSettings {
    let range = LocalDetector::Cidr("10.244.0.0/16".parse().expect("a range"));
    NodeSettings {
        mode,
        masquerade: MasqueradeConfig { detector_v4: Some(range), ..MasqueradeConfig::default() },
        node_ports_v4: headgate_core::iptables::NodePortAddresses::All,
        node_ports_v6: headgate_core::iptables::NodePortAddresses::All,
        localhost_node_ports: true,
    }
}

fn explained(state: &State, facts: &NodeFacts, source: Source, to: &str) -> Explanation {
    let to = To { at: to.parse().expect("an address"), protocol: None };
    let (mut all, left_out) =
        explain(state, &World::key(), facts, &settings(Mode::Nftables), source, Some(to)).expect("a Service");
    assert_eq!((all.len(), left_out), (1, 0));
    all.remove(0)
}

fn client(address: &str) -> Source {
    Source::Address { address: address.parse().expect("an address"), is_local_pod: false }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn reasons_agree_with_the_documentation_and_chosen_endpoints_with_the_views(world in world()) {
        let (state, facts) = world.state();
        let view = service_views(&state, &World::key(), Family::V4, &facts).remove(0);
        let is_local = |policy: TrafficPolicy| policy == TrafficPolicy::Local;
        let has_cluster = !view.cluster_endpoints.is_empty();
        let inside_is_local = is_local(world.external) && !has_cluster;
        let cases = [
            (client("10.244.0.1"), "10.96.0.1:80", is_local(world.internal)),
            (Source::Node, "10.96.0.1:80", is_local(world.internal)),
            (client("203.0.113.7"), "192.0.2.1:30080", is_local(world.external)),
            (client("10.244.0.1"), "192.0.2.1:30080", inside_is_local),
            (Source::Node, "192.0.2.1:30080", inside_is_local),
        ];
        for (source, to, is_local) in cases {
            let found = explained(&state, &facts, source, to);
            let reasons: Vec<Option<LeftOut>> = found.endpoints.iter().map(|endpoint| endpoint.left_out).collect();
            prop_assert_eq!(&reasons, &world.expected(is_local), "{} {:?}", to, source);
            let chosen = found.endpoints.iter().filter(|endpoint| endpoint.left_out.is_none());
            let chosen: BTreeSet<SocketAddr> =
                chosen.map(|endpoint| SocketAddr::new(endpoint.address, endpoint.port)).collect();
            let set = if is_local { &view.local_endpoints } else { &view.cluster_endpoints };
            prop_assert_eq!(&chosen, &set.iter().map(Destination::socket_address).collect());
            let fate = match (view.has_any_endpoint, chosen.is_empty()) {
                (false, _) => PacketFate::Rejected,
                (true, true) => PacketFate::Dropped,
                (true, false) => PacketFate::Forwarded,
            };
            prop_assert_eq!(found.fate, fate);
        }
    }
}

fn plain_world(nodes: &[&'static str]) -> World {
    let sample = |node: &&'static str| Sample {
        conditions: Conditions::READY,
        node: Some(node),
        zones: Vec::new(),
        nodes: Vec::new(),
        has_port: true,
        is_failing: false,
    };
    let samples = nodes.iter().map(sample).collect();
    let (internal, external) = (TrafficPolicy::Cluster, TrafficPolicy::Local);
    World { samples, internal, external, is_checked: false, has_zone: true }
}

/// True if some step contains a text.
fn says(explanation: &Explanation, text: &str) -> bool {
    explanation.steps.iter().any(|step| step.contains(text))
}

#[test]
fn the_owner_of_an_address_and_unused_ports_are_named() {
    let (mut state, facts) = plain_world(&[HERE]).state();
    let port = |port| ServicePort { name: "".into(), protocol: Protocol::Tcp, port, node_port: 0 };
    let mut older = Service::new(ServiceKey::new("a", "older"), vec![CLUSTER_IP.into()], vec![port(80), port(81)]);
    older.created_unix_seconds = -1;
    state.apply(older.into(), &mut Dirty::default());
    let is_not_served = |found: &Explanation, text| found.fate == PacketFate::NotServed && says(found, text);
    let taken = explained(&state, &facts, Source::Node, "10.96.0.1:80");
    assert!(is_not_served(&taken, "belongs to Service a/older, which is older"), "{taken:#?}");
    let other = explained(&state, &facts, Source::Node, "10.96.0.1:81");
    assert!(is_not_served(&other, "explain a/older instead"), "{other:#?}");
    let mut third = Service::new(ServiceKey::new("b", "third"), vec![[10, 96, 0, 9].into()], vec![port(82)]);
    third.external_ips = vec![CLUSTER_IP.into()];
    let key = third.key.clone();
    state.apply(third.into(), &mut Dirty::default());
    let to = To { at: "10.96.0.1:82".parse().expect("an address"), protocol: None };
    let (foreign, _) =
        explain(&state, &key, &facts, &settings(Mode::Nftables), Source::Node, Some(to)).expect("a Service");
    assert!(is_not_served(&foreign[0], "belongs to Service a/older, whose ClusterIP it is"));
    state.apply(Change::RemoveService(key), &mut Dirty::default());
    let unused = explained(&state, &facts, Source::Node, "10.96.0.1:82");
    assert!(unused.fate == PacketFate::Rejected && says(&unused, "has no such port"), "{unused:#?}");
    let foreign = explained(&state, &facts, Source::Node, "10.1.1.1:82");
    assert!(is_not_served(&foreign, "neither an address of the Service"), "{foreign:#?}");
}
