//! The rules that lead to the proxy of mode userspace.

use std::net::SocketAddr;

use super::*;
use crate::{ProxyProtocol, iptables::names::GateChain};

/// The configuration of mode userspace.
pub(super) fn with_proxy() -> RenderConfig {
    let listener = |(chain, port): (GateChain, u16)| (chain, SocketAddr::new(ip("169.254.77.1"), port));
    let listeners = GateChain::ALL.into_iter().zip(10245..).map(listener).collect();
    RenderConfig { listeners, layout: Layout::Classic, ..config() }
}

fn port(name: &str, protocol: Protocol, port: u16, node_port: u16) -> ServicePort {
    ServicePort { name: name.into(), protocol, port, node_port }
}

/// The script for a Service with these ports, and an endpoint on this node and one on another node.
fn script(config: RenderConfig, mut service: Service) -> String {
    let at = |address: &str, node: &str| {
        let ports = service.ports.iter().map(|port| EndpointPort::new(port.name.clone(), port.protocol, 8080));
        let placement = Placement::on(node).into();
        Endpoint { placement, ..Endpoint::new(ip(address), ports.collect()) }
    };
    let endpoints = [at("10.180.0.4", "test-node"), at("10.180.0.5", "other-node")];
    service.key = ServiceKey::new("ns4", "svc4");
    let key = service.key.clone();
    let endpoints = endpoints.map(|endpoint| Change::Endpoint(key.clone(), endpoint));
    full(config, &state([Change::from(service)].into_iter().chain(endpoints)).0).1
}

/// The jumps of a chain to the listeners.
fn gates<'a>(script: &'a str, chain: &str) -> Vec<&'a str> {
    rules(script, chain).into_iter().filter(|rule| rule.contains("-j KUBE-GATE-")).collect()
}

const CLUSTER: &str = "KUBE-SVC-4SW47YFZTEDKD3PK";
const LOCAL: &str = "KUBE-SVL-4SW47YFZTEDKD3PK";

#[test]
fn the_gate_decides_after_the_policy_and_before_the_endpoint() {
    let mut service = service("svc4", "172.30.0.44");
    service.external_traffic_policy = TrafficPolicy::Local;
    service.ports = vec![port("p80", Protocol::Tcp, 80, 30080), port("u", Protocol::Udp, 80, 30080)];
    let script = script(with_proxy(), service);
    let cluster = rules(&script, CLUSTER);
    assert_eq!(cluster[0], "-p tcp -m tcp --dport 80 -j KUBE-GATE-CLUSTER");
    assert_eq!(cluster[1], "-p tcp -m tcp --dport 30080 -j KUBE-GATE-NODEPORT-CLUSTER");
    assert!(cluster[2].ends_with("-j KUBE-MARK-MASQ") && cluster[3].contains("-> 10.180.0.4:8080"), "{cluster:?}");
    let local = rules(&script, LOCAL);
    assert_eq!(local[0], "-p tcp -m tcp --dport 80 -j KUBE-GATE-LOCAL");
    assert_eq!(local[1], "-p tcp -m tcp --dport 30080 -j KUBE-GATE-NODEPORT-LOCAL");
    let jumps = gates(&script, CLUSTER).len() + gates(&script, LOCAL).len();
    assert_eq!(jumps, 4, "datagrams go straight to endpoints");
    assert_eq!(
        rules(&script, "KUBE-GATE-LOCAL"),
        [
            r#"-p tcp -m comment --comment "the proxy, while it accepts connections" -m set --match-set KUBE-GATE src -j DNAT --to-destination 169.254.77.1:10246"#
        ]
    );
    assert_eq!(rules(&script, "KUBE-GATE-INPUT"), ["-d 169.254.77.1/32 -p tcp -m conntrack --ctstate DNAT -j ACCEPT"]);
    // The proxy sees the addresses of its clients.
    assert_eq!(rules(&script, "KUBE-POSTROUTING")[0], "-d 169.254.77.1/32 -j RETURN");
}

#[test]
fn a_port_that_is_also_its_node_port_counts_as_the_node_port() {
    let mut service = service("svc4", "172.30.0.44");
    service.ports = vec![port("p80", Protocol::Tcp, 30080, 30080)];
    let script = script(with_proxy(), service);
    assert_eq!(gates(&script, CLUSTER), ["-p tcp -m tcp --dport 30080 -j KUBE-GATE-NODEPORT-CLUSTER"]);
}

#[test]
fn only_the_proxy_leads_to_endpoints_that_expect_its_header() {
    let mut service = service("svc4", "172.30.0.44");
    service.proxy_protocol = Some(ProxyProtocol::V1);
    service.external_ips = vec![ip("192.168.99.33")];
    service.ports = vec![port("p80", Protocol::Tcp, 80, 30080)];
    for layout in [Layout::Classic, Layout::Compact] {
        let script = script(RenderConfig { layout, ..with_proxy() }, service.clone());
        assert!(!script.contains("10.180.0."), "{script}");
        assert_eq!(gates(&script, CLUSTER).len(), 2);
        let refused: Vec<_> = script.lines().filter(|line| line.contains("needs the proxy")).collect();
        assert_eq!(refused.len(), 3, "the ClusterIP, the external IP and the NodePort: {refused:?}");
        assert!(refused.iter().all(|line| line.ends_with("-j REJECT --reject-with icmp-port-unreachable")));
    }
    let without = script(config(), service);
    assert!(without.contains("--to-destination 10.180.0.4:8080") && !without.contains("needs the proxy"));
}

#[test]
fn connections_of_sctp_are_refused() {
    let mut service = service("svc4", "172.30.0.44");
    service.ports = vec![port("p80", Protocol::Sctp, 80, 30080)];
    let script = script(with_proxy(), service);
    assert!(!script.contains("10.180.0.") && !script.contains("-j KUBE-EXT-"), "{script}");
    let refused: Vec<_> = script.lines().filter(|line| line.contains("cannot be carried by the proxy")).collect();
    assert_eq!(refused.len(), 2, "{refused:?}");
    assert!(refused[0].starts_with("-A KUBE-SERVICES -d 172.30.0.44/32 -p sctp"), "{refused:?}");
}

/// A kube-proxy that takes over removes the chains of services, and knows nothing about the gate.
#[test]
fn the_chains_of_the_gate_are_removed_without_those_of_kube_proxy() {
    let (mut kernel, mut without) = (FakeKernel::default(), FakeKernel::default());
    let script = |config| {
        Ledger::new(ruleset(config)).full(&FixedState(&State::default(), &node()), ExistingTables::default()).0
    };
    kernel.restore(&script(with_proxy()).to_string()).unwrap();
    without.restore(&script(config()).to_string()).unwrap();
    let saved = ExistingTables::parse(&Table::ALL.map(|table| kernel.save(table)).concat());
    kernel.restore(&Ledger::cleanup_of_gates(&saved).to_string()).unwrap();
    assert_eq!(kernel.save(Table::Filter), without.save(Table::Filter));
    let to_proxy = "-A KUBE-POSTROUTING -d 169.254.77.1/32 -j RETURN\n";
    assert_eq!(kernel.save(Table::Nat).replace(to_proxy, ""), without.save(Table::Nat));
}
