#![allow(clippy::unwrap_used)]

mod scripts;

use std::{collections::HashMap, net::IpAddr, sync::Arc};

use super::{
    ExistingRules, ExistingTables, Layout, RenderConfig, RulesLedger, RulesTable, Script,
    names::{ChainKind, ChainName},
    ruleset,
};
use crate::{
    Change, Dirty, Endpoint, EndpointPort, Family, Placement, Protocol, Service, ServiceKey, ServicePort, State,
    TrafficPolicy, behaviours::view::LocalDetector, dataplane::shared::FixedState, fake_kernel::iptables::FakeKernel,
    model::NodeFacts,
};

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn service(name: &str, cluster_ip: &str) -> Service {
    let port = ServicePort { name: "p80".into(), protocol: Protocol::Tcp, port: 80, node_port: 0 };
    Service::new(ServiceKey::new(name.replace("svc", "ns").as_str(), name), vec![ip(cluster_ip)], vec![port])
}

fn endpoint(address: &str) -> Endpoint {
    let port = EndpointPort::new("p80", Protocol::Tcp, 80);
    Endpoint { placement: Placement::on("other-node").into(), ..Endpoint::new(ip(address), Arc::from([port])) }
}

fn config() -> RenderConfig {
    let mut config = RenderConfig::new(Family::V4);
    config.masquerade.detector_v4 = Some(LocalDetector::Cidr("10.0.0.0/8".parse().unwrap()));
    config
}

fn node() -> NodeFacts {
    NodeFacts { addresses: vec![ip("192.0.2.10")], ..NodeFacts::named("test-node") }
}

fn state(changes: impl IntoIterator<Item = Change>) -> (State, Dirty) {
    let (mut state, mut dirty) = (State::default(), Dirty::default());
    changes.into_iter().for_each(|change| _ = state.apply(change, &mut dirty));
    (state, dirty)
}

fn full(config: RenderConfig, state: &State) -> (RulesLedger, String) {
    let mut ledger = RulesLedger::new(ruleset(config));
    let (script, _) = ledger.full(&FixedState(state, &node()), ExistingTables::default());
    (ledger, script.to_string())
}

// rows of iptables: 100
#[test]
fn names_of_chains_are_the_same_as_in_kube_proxy() {
    let vector = |kind, text| ChainName::of(kind, text).to_string();
    assert_eq!(vector(ChainKind::ClusterPolicy, "ns1/svc1:p80tcp"), "KUBE-SVC-XPGD46QRK7WJZT7O");
    assert_eq!(vector(ChainKind::Endpoint, "ns1/svc1:p80tcp10.180.0.1:80"), "KUBE-SEP-SXIVWICOYRO3J4NJ");
    let services = ["KUBE-SVC-XPGD46QRK7WJZT7O", "KUBE-SEP-SXIVWICOYRO3J4NJ", "KUBE-FW-NUKIZ6OKUXPJNT4C"];
    let groups = ["KUBE-SVC-G-XPGD46QRK7WJZT7O", "KUBE-EXT-G-XPGD46QRK7WJZT7O", "KUBE-HPS-XPGD46QRK7WJZT7O"];
    for name in services.into_iter().chain(groups) {
        assert!(name.len() <= 28, "the name is too long for iptables: {name}");
        assert_eq!(ChainName::parse(name).unwrap().to_string(), name);
    }
    for foreign in
        ["KUBE-SVC-short", "KUBE-SERVICES", "DOCKER", "KUBE-SVC-XPGD46QRK7WJZT7O1", "KUBE-SVC-XPGD46QRK7WJZT70"]
    {
        assert_eq!(ChainName::parse(foreign), None, "{foreign}");
    }
}

// rows of iptables: 93
#[test]
fn a_new_endpoint_rewrites_at_most_two_chains_and_no_dispatch_chain() {
    let changes = (0..100u32).flat_map(|i| {
        let key = ServiceKey::new("ns", &format!("svc{i}"));
        let service = Service { key: key.clone(), ..service("svc1", &format!("172.30.{}.{}", i / 250, i % 250 + 1)) };
        let endpoints = (0..10).map(move |j| Change::Endpoint(key.clone(), endpoint(&format!("10.{i}.0.{}", j + 1))));
        std::iter::once(Change::from(service)).chain(endpoints)
    });
    let (mut state, _) = state(changes);
    // The classic layout writes the chains of the service and of the endpoint. The compact layout
    // writes only the chain of the service, because the endpoint is on another node.
    for (layout, added, removed) in [(Layout::Classic, (1, 2, 0), (1, 1, 1)), (Layout::Compact, (1, 1, 0), (1, 1, 0))] {
        let (mut ledger, _) = full(RenderConfig { layout, ..config() }, &state);
        let mut dirty = Dirty::default();
        state.apply(Change::Endpoint(ServiceKey::new("ns", "svc7"), endpoint("10.7.1.1")), &mut dirty);
        let (script, planned) = ledger.changed(&state, &node(), &dirty);
        assert_eq!((planned, script.chains_written(), script.chains_deleted()), added);
        assert!(script.to_string().len() < 3000, "{script}");

        let mut dirty = Dirty::default();
        state.apply(Change::RemoveEndpoint(ServiceKey::new("ns", "svc7"), ip("10.7.1.1")), &mut dirty);
        let (script, planned) = ledger.changed(&state, &node(), &dirty);
        assert_eq!((planned, script.chains_written(), script.chains_deleted()), removed);
        assert!(!script.to_string().contains("KUBE-SERVICES"), "{script}");
    }
}

// rows of iptables: 97, 98
#[test]
fn stale_chains_are_deleted_and_foreign_chains_are_kept() {
    let save = "*nat\n:PREROUTING ACCEPT [0:0]\n:DOCKER - [0:0]\n:KUBE-SVC-XPGD46QRK7WJZT7O - [0:0]\n\
        -A PREROUTING -j DOCKER\n-A PREROUTING -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES\nCOMMIT\n";
    let existing = ExistingTables::parse(save);
    let (script, _) =
        RulesLedger::new(ruleset(config())).full(&FixedState(&State::default(), &node()), existing.clone());
    let script = script.to_string();
    assert!(script.contains("-X KUBE-SVC-XPGD46QRK7WJZT7O\n"));
    assert!(!script.contains("DOCKER"));
    assert!(!script.contains("-I PREROUTING"), "the jump already exists");
    assert!(script.contains("-I OUTPUT -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES"));
    let cleanup = RulesLedger::cleanup(&existing).to_string();
    assert_eq!(
        cleanup,
        "*nat\n:KUBE-SVC-XPGD46QRK7WJZT7O - [0:0]\n\
         -D PREROUTING -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES\n-X KUBE-SVC-XPGD46QRK7WJZT7O\nCOMMIT\n"
    );
    assert!(ExistingRules::parse(RulesTable::Filter, save).chains.is_empty());
}

#[test]
fn dispatch_groups_are_resized_when_the_cluster_grows() {
    let key = |i: u32| ServiceKey::new("ns", &format!("svc{i}"));
    let address = |i: u32| IpAddr::from((0x0a60_0000 + i * 7).to_be_bytes());
    let service_number =
        |i: u32| Service { key: key(i), cluster_ips: vec![address(i)], ..service("svc1", "172.30.0.41") };
    let mut kernel = FakeKernel::default();
    let mut state = State::default();
    let mut ledger = RulesLedger::new(ruleset(config()));
    kernel.restore(&ledger.full(&FixedState(&state, &node()), ExistingTables::default()).0.to_string()).unwrap();
    for i in 0..4000 {
        let mut dirty = Dirty::default();
        for change in [Change::from(service_number(i)), Change::Endpoint(key(i), endpoint("10.180.0.1"))] {
            state.apply(change, &mut dirty);
        }
        kernel.restore(&ledger.changed(&state, &node(), &dirty).0.to_string()).unwrap();
    }
    let save = kernel.save(RulesTable::Nat);
    let mut lengths: HashMap<&str, usize> = HashMap::new();
    for line in save.lines() {
        if let Some(chain) = line.strip_prefix("-A ").and_then(|rule| rule.split(' ').next()) {
            *lengths.entry(chain).or_default() += 1;
        }
    }
    let longest = lengths.iter().filter(|(chain, _)| chain.starts_with("KUBE-SVC-G-")).map(|(_, n)| *n).max().unwrap();
    // With the best group size, a packet passes at most about 2·√4000 = 126 rules. Groups that were
    // sized for a quarter of the services are at most four times too long.
    assert!(longest + lengths["KUBE-SERVICES"] < 4 * 126, "{longest} + {}", lengths["KUBE-SERVICES"]);
}

#[test]
fn only_rules_of_sctp_ports_are_left_out_if_iptables_cannot_match_sctp() {
    let port = |name: &str, protocol, node_port| ServicePort { name: name.into(), protocol, port: 80, node_port };
    let of_endpoint = |name: &str, protocol| EndpointPort::new(name, protocol, 8080);
    let without = Service {
        ports: vec![port("t", Protocol::Tcp, 30080), port("u", Protocol::Udp, 30080)],
        external_ips: vec![ip("192.168.99.33")],
        load_balancer_ips: vec![ip("192.168.99.34")],
        external_traffic_policy: TrafficPolicy::Local,
        ..service("svc1", "172.30.0.41")
    };
    let mut with = without.clone();
    with.ports.push(port("s", Protocol::Sctp, 30081));
    let empty = Service { key: ServiceKey::new("ns2", "svc2"), cluster_ips: vec![ip("172.30.0.42")], ..with.clone() };
    let script = |config: RenderConfig, service: &Service, empty: &Service| {
        let ports =
            [of_endpoint("t", Protocol::Tcp), of_endpoint("u", Protocol::Udp), of_endpoint("s", Protocol::Sctp)];
        let endpoint = Endpoint { ports: Arc::from(ports), ..endpoint("10.180.0.4") };
        let changes = [
            Change::from(service.clone()),
            Change::from(empty.clone()),
            Change::Endpoint(service.key.clone(), endpoint),
        ];
        full(config, &state(changes).0).1
    };
    for layout in [Layout::Classic, Layout::Compact] {
        let config = RenderConfig { layout, ..config() };
        let left_out = script(RenderConfig { leaves_out_sctp: true, ..config.clone() }, &with, &empty);
        let empty_without = Service { ports: without.ports.clone(), ..empty.clone() };
        assert_eq!(left_out, script(config.clone(), &without, &empty_without));
        assert!(!left_out.contains("-m sctp") && script(config, &with, &empty).contains("-m sctp"), "{layout:?}");
    }
    let mut kernel = FakeKernel::default();
    kernel.restore(&RulesLedger::trial_of_sctp().to_string()).unwrap();
    assert!(kernel.save(RulesTable::Nat).contains("-p sctp -m sctp"));
    kernel.restore(&RulesLedger::end_of_trials().to_string()).unwrap();
    assert!(!kernel.save(RulesTable::Nat).contains("sctp"));
}
