//! Snapshots of what each layout writes for Services that use every kind of rule. The packet cases
//! show what the rules do; a snapshot shows what a change of the code changes in them. Its names,
//! hashes and texts are those of kube-proxy, except in the compact layout.
//!
//! `HEADGATE_WRITE_SNAPSHOTS=1` writes the files of `crates/core/tests/snapshots`.
#![allow(clippy::unwrap_used)]

mod fake_kernel;

use std::{
    fmt::Write as _,
    net::{IpAddr, SocketAddr},
    path::Path,
    sync::Arc,
};

use fake_kernel::iptables::FakeKernel;
use headgate_core::{
    Change, ClientIpAffinity, Conditions, Dirty, Endpoint, EndpointPort, Family, FixedState, NodeFacts, Placement,
    Protocol, ProxyProtocol, Service, ServiceKey, ServicePort, State, TrafficPolicy, Weight,
    iptables::{ExistingTables, Layout, RenderConfig, RulesLedger, RulesTable, names::GateChain, ruleset},
    ipvs::{self, IpvsConfig},
    nftables::{ExistingElements, NftablesConfig, NftablesLedger},
    view::LocalDetector,
};

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// A Service `shop/NAME` with TCP port 80 and, if `node_port` is not 0, a node port.
fn service(name: &str, cluster_ip: &str, node_port: u16) -> Service {
    let port = ServicePort { name: "web".into(), protocol: Protocol::Tcp, port: 80, node_port };
    Service::new(ServiceKey::new("shop", name), vec![ip(cluster_ip)], vec![port])
}

/// An endpoint of a Service, with a weight from 0 to 100.
fn endpoint(service: &Service, address: &str, node: &str, weight: u32, conditions: Conditions) -> Change {
    let ports: Arc<[EndpointPort]> =
        service.ports.iter().map(|port| EndpointPort::new(port.name.clone(), port.protocol, 8080)).collect();
    let placement = Placement { weight: Weight::new(weight).unwrap(), ..Placement::on(node) }.into();
    Change::Endpoint(service.key.clone(), Endpoint { placement, conditions, ..Endpoint::new(ip(address), ports) })
}

fn facts() -> NodeFacts {
    NodeFacts { addresses: vec![ip("192.0.2.10")], ..NodeFacts::named("here") }
}

fn state() -> State {
    let plain = service("plain", "10.96.0.1", 0);
    let mut local = service("local", "10.96.0.2", 30002);
    local.external_traffic_policy = TrafficPolicy::Local;
    local.load_balancer_ips = vec![ip("203.0.113.2")];
    local.health_check_node_port = 32000;
    let mut inside = service("inside", "10.96.0.3", 0);
    inside.internal_traffic_policy = TrafficPolicy::Local;
    inside.external_ips = vec![ip("198.51.100.3")];
    let mut ranges = service("ranges", "10.96.0.4", 30004);
    ranges.load_balancer_ips = vec![ip("203.0.113.4")];
    ranges.load_balancer_source_ranges =
        ["203.0.113.0/25", "192.0.2.0/24", "2001:db8::/32"].map(|range| range.parse().unwrap()).to_vec();
    let mut sticky = service("sticky", "10.96.0.5", 30005);
    sticky.session_affinity = Some(ClientIpAffinity { timeout_seconds: 60 });
    let mut empty = service("empty", "10.96.0.6", 30006);
    empty.external_ips = vec![ip("198.51.100.6")];
    let mut headed = service("headed", "10.96.0.7", 30007);
    headed.proxy_protocol = Some(ProxyProtocol::V1);
    let mut others = service("others", "10.96.0.8", 80);
    others.ports.push(ServicePort { name: "dns".into(), protocol: Protocol::Udp, port: 53, node_port: 30053 });
    others.ports.push(ServicePort { name: "sig".into(), protocol: Protocol::Sctp, port: 99, node_port: 30099 });
    let mut fallen = local.clone();
    (fallen.key, fallen.cluster_ips) = (ServiceKey::new("shop", "fallen"), vec![ip("10.96.0.9")]);
    (fallen.ports[0].node_port, fallen.health_check_node_port) = (30009, 32009);
    (fallen.load_balancer_ips, fallen.external_ips) = (Vec::new(), vec![ip("198.51.100.9")]);
    let terminating = Conditions { ready: false, serving: true, terminating: true };
    let broken = Conditions { ready: false, serving: false, terminating: false };
    let mut changes = vec![
        endpoint(&plain, "10.244.1.1", "here", 5, Conditions::READY),
        endpoint(&plain, "10.244.1.2", "there", 3, Conditions::READY),
        endpoint(&plain, "10.244.1.3", "there", 1, Conditions::READY),
        endpoint(&plain, "10.244.1.4", "here", 1, terminating),
        endpoint(&local, "10.244.2.1", "here", 1, terminating),
        endpoint(&local, "10.244.2.2", "there", 1, Conditions::READY),
        endpoint(&fallen, "10.244.9.1", "there", 1, terminating),
        endpoint(&fallen, "10.244.9.2", "here", 1, broken),
    ];
    for (number, service) in (3..).zip([&inside, &ranges, &sticky, &headed, &others]) {
        for (last, node) in [(1, "here"), (2, "there")] {
            changes.push(endpoint(service, &format!("10.244.{number}.{last}"), node, 1, Conditions::READY));
        }
    }
    changes.extend([plain, local, inside, ranges, sticky, empty, headed, others, fallen].map(Change::from));
    let mut state = State::default();
    changes.into_iter().for_each(|change| _ = state.apply(change, &mut Dirty::default()));
    state
}

/// Compares a text with the file of this name.
fn check(name: &str, text: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/snapshots").join(name);
    if std::env::var_os("HEADGATE_WRITE_SNAPSHOTS").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, text).unwrap();
    }
    let expected = std::fs::read_to_string(&path).unwrap_or_default();
    let difference = text.lines().zip(expected.lines()).find(|(found, wanted)| found != wanted);
    assert!(
        text == expected,
        "{name} differs, first in (found, expected) {difference:?}; HEADGATE_WRITE_SNAPSHOTS=1 writes it: {}",
        path.display()
    );
}

fn iptables(name: &str, mut config: RenderConfig) {
    config.masquerade.detector_v4 = Some(LocalDetector::Cidr("10.244.0.0/16".parse().unwrap()));
    let mut kernel = FakeKernel::default();
    let (script, _) =
        RulesLedger::new(ruleset(config)).full(&FixedState(&state(), &facts()), ExistingTables::default());
    kernel.restore(&script.to_string()).unwrap();
    check(name, &RulesTable::ALL.map(|table| kernel.save(table)).concat());
}

// rows of iptables: 100
#[test]
fn the_classic_layout() {
    iptables("iptables-classic.rules", RenderConfig { layout: Layout::Classic, ..RenderConfig::new(Family::V4) });
}

// rows of iptables: 99, 100
#[test]
fn the_compact_layout() {
    iptables("iptables-compact.rules", RenderConfig { layout: Layout::Compact, ..RenderConfig::new(Family::V4) });
}

/// The rules of mode nftables are the same for all Services; what differs are elements.
#[test]
fn elements_of_sets_and_maps() {
    let mut ledger = NftablesLedger::new(NftablesConfig::new(Family::V4));
    let plan = ledger.full(&FixedState(&state(), &facts()), ExistingElements::default());
    let mut elements: Vec<String> = plan.added(&ledger).map(|element| format!("{element:?}\n")).collect();
    elements.sort();
    check("nftables.elements", &elements.concat());
}

#[test]
fn rules_in_front_of_the_proxy() {
    let listener = |(chain, port): (GateChain, u16)| (chain, SocketAddr::new(ip("169.254.77.1"), port));
    let listeners = GateChain::ALL.into_iter().zip(10245..).map(listener).collect();
    let config = RenderConfig { listeners, layout: Layout::Classic, ..RenderConfig::new(Family::V4) };
    iptables("userspace-iptables.rules", config);
}

#[test]
fn virtual_servers_and_sets() {
    let mut config = IpvsConfig::new(Family::V4);
    config.masquerade.detector_v4 = Some(LocalDetector::Cidr("10.244.0.0/16".parse().unwrap()));
    config.node_port_addresses = facts().addresses;
    config.other_addresses = config.node_port_addresses.iter().copied().collect();
    let mut kernel = fake_kernel::ipvs::FakeKernel::new(&config);
    let plan = ipvs::IpvsLedger::new(config).full(&FixedState(&state(), &facts()), &kernel.existing(), 0);
    kernel.apply(&plan).unwrap();
    let mut text = RulesTable::ALL.map(|table| kernel.iptables.save(table)).concat();
    for address in &kernel.device_addresses {
        writeln!(text, "address {address}").unwrap();
    }
    for (set, elements) in &kernel.sets {
        for element in elements {
            writeln!(text, "{} {element}", set.name(Family::V4)).unwrap();
        }
    }
    for (key, (settings, destinations)) in &kernel.servers {
        writeln!(text, "server {key} {} {}", settings.scheduler.as_str(), settings.persistence_seconds.unwrap_or(0))
            .unwrap();
        for (address, weight) in destinations {
            writeln!(text, "  {address} weight {weight}").unwrap();
        }
    }
    check("ipvs.objects", &text);
}
