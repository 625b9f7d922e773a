#![allow(clippy::unwrap_used)]

mod proxy;
mod scripts;

use std::{collections::HashMap, net::IpAddr, sync::Arc};

use super::{
    Existing, ExistingTables, Layout, Ledger, RenderConfig, Script, Table,
    fake_kernel::FakeKernel,
    names::{ChainKind, ChainName},
    ruleset,
};
use crate::{
    Change, ClientIpAffinity, Conditions, Dirty, Endpoint, EndpointPort, Family, Placement, Protocol, Service,
    ServiceKey, ServicePort, State, TrafficPolicy, Weight, behaviours::masquerade::LocalDetector,
    dataplane::source::FixedState, node_facts::NodeFacts,
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
    for change in changes {
        state.apply(change, &mut dirty);
    }
    (state, dirty)
}

fn full(config: RenderConfig, state: &State) -> (Ledger, String) {
    let mut ledger = Ledger::new(ruleset(config));
    let (script, _) = ledger.full(&FixedState(state, &node()), ExistingTables::default());
    (ledger, script.to_string())
}

/// Returns the rules of a chain without `-A CHAIN `.
fn rules<'a>(script: &'a str, chain: &str) -> Vec<&'a str> {
    let start = format!("-A {chain} ");
    script.lines().filter_map(|line| line.strip_prefix(&start)).collect()
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

// rows of iptables: 30, 32, 100
#[test]
fn the_rules_of_a_cluster_ip_are_the_same_as_in_kube_proxy() {
    let key = ServiceKey::new("ns4", "svc4");
    let mut svc4 = service("svc4", "172.30.0.44");
    svc4.external_ips = vec![ip("192.168.99.33")];
    let (state, _) = state([
        Change::from(svc4),
        Change::Endpoint(key.clone(), endpoint("10.180.0.4")),
        Change::Endpoint(key, endpoint("10.180.0.5")),
    ]);
    let (_, script) = full(config(), &state);
    assert_eq!(
        rules(&script, "KUBE-SVC-4SW47YFZTEDKD3PK"),
        [
            r#"! -s 10.0.0.0/8 -d 172.30.0.44/32 -p tcp -m comment --comment "ns4/svc4:p80 cluster IP" -m tcp --dport 80 -j KUBE-MARK-MASQ"#,
            r#"-m comment --comment "ns4/svc4:p80 -> 10.180.0.4:80" -m statistic --mode random --probability 0.50000000000 -j KUBE-SEP-UKSFD7AGPMPPLUHC"#,
            r#"-m comment --comment "ns4/svc4:p80 -> 10.180.0.5:80" -j KUBE-SEP-C6EBXVWJJZMIWKLZ"#,
        ]
    );
    assert_eq!(
        rules(&script, "KUBE-SEP-C6EBXVWJJZMIWKLZ"),
        [
            r#"-s 10.180.0.5/32 -m comment --comment "ns4/svc4:p80" -j KUBE-MARK-MASQ"#,
            r#"-p tcp -m comment --comment "ns4/svc4:p80" -m tcp -j DNAT --to-destination 10.180.0.5:80"#,
        ]
    );
    assert_eq!(
        rules(&script, "KUBE-EXT-4SW47YFZTEDKD3PK"),
        [
            r#"-m comment --comment "masquerade traffic for ns4/svc4:p80 external destinations" -j KUBE-MARK-MASQ"#,
            "-j KUBE-SVC-4SW47YFZTEDKD3PK",
        ]
    );
    let services = rules(&script, "KUBE-SERVICES");
    assert_eq!(
        services,
        [
            r#"-d 172.30.0.44/32 -p tcp -m comment --comment "ns4/svc4:p80 cluster IP" -m tcp --dport 80 -j KUBE-SVC-4SW47YFZTEDKD3PK"#,
            r#"-d 192.168.99.33/32 -p tcp -m comment --comment "ns4/svc4:p80 external IP" -m tcp --dport 80 -j KUBE-EXT-4SW47YFZTEDKD3PK"#,
            r#"-m comment --comment "kubernetes service nodeports; NOTE: this must be the last rule in this chain" -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS"#,
        ]
    );
}

#[test]
fn endpoints_are_chosen_in_proportion_to_their_weights() {
    let key = ServiceKey::new("ns4", "svc4");
    let weighing = |address: &str, weight| {
        let placement = Placement { weight: Weight::new(weight).unwrap(), ..Placement::on("other-node") };
        Change::Endpoint(key.clone(), Endpoint { placement: placement.into(), ..endpoint(address) })
    };
    let (state, _) = state([
        Change::from(service("svc4", "172.30.0.44")),
        weighing("10.180.0.4", 5),
        weighing("10.180.0.5", 3),
        weighing("10.180.0.6", 1),
    ]);
    let (_, script) = full(config(), &state);
    let chain = rules(&script, "KUBE-SVC-4SW47YFZTEDKD3PK");
    let probability = |rule: &&str| {
        rule.split(' ').skip_while(|word| *word != "--probability").nth(1).map(|number| number.parse::<f64>().unwrap())
    };
    let probabilities: Vec<_> = chain.iter().skip(1).map(probability).collect();
    assert_eq!(probabilities.len(), 3);
    let expected = [Some(5.0 / 9.0), Some(3.0 / 4.0), None];
    for (found, expected) in probabilities.iter().zip(expected) {
        assert_eq!(found.is_some(), expected.is_some());
        assert!((found.unwrap_or(1.0) - expected.unwrap_or(1.0)).abs() < 1e-9, "{probabilities:?}");
    }
}

// rows of iptables: 52, 53, 54, 55
#[test]
fn with_local_policy_only_pods_and_the_node_use_endpoints_on_other_nodes() {
    let key = ServiceKey::new("ns2", "svc2");
    let mut svc2 = service("svc2", "172.30.0.42");
    svc2.external_traffic_policy = TrafficPolicy::Local;
    svc2.load_balancer_ips = vec![ip("1.2.3.4")];
    svc2.ports[0].node_port = 3001;
    svc2.health_check_node_port = 30000;
    let (state, _) = state([Change::from(svc2), Change::Endpoint(key, endpoint("10.180.0.2"))]);
    let (_, script) = full(config(), &state);
    assert_eq!(
        rules(&script, "KUBE-EXT-GNZBNJ2PO5MGZ6GT"),
        [
            r#"-s 10.0.0.0/8 -m comment --comment "pod traffic for ns2/svc2:p80 external destinations" -j KUBE-SVC-GNZBNJ2PO5MGZ6GT"#,
            r#"-m comment --comment "masquerade LOCAL traffic for ns2/svc2:p80 external destinations" -m addrtype --src-type LOCAL -j KUBE-MARK-MASQ"#,
            r#"-m comment --comment "route LOCAL traffic for ns2/svc2:p80 external destinations" -m addrtype --src-type LOCAL -j KUBE-SVC-GNZBNJ2PO5MGZ6GT"#,
        ]
    );
    assert_eq!(
        rules(&script, "KUBE-EXTERNAL-SERVICES"),
        [
            r#"-d 1.2.3.4/32 -p tcp -m comment --comment "ns2/svc2:p80 has no local endpoints" -m tcp --dport 80 -j DROP"#,
            r#"-p tcp -m comment --comment "ns2/svc2:p80 has no local endpoints" -m tcp --dport 3001 -m addrtype --dst-type LOCAL -j DROP"#,
        ]
    );
    assert!(script.contains(r#"-A KUBE-NODEPORTS -p tcp -m comment --comment "ns2/svc2 health check node port" -m tcp --dport 30000 -j ACCEPT"#));
}

// rows of iptables: 60, 62, 63
#[test]
fn source_ranges_apply_only_to_load_balancer_ips() {
    let key = ServiceKey::new("ns5", "svc5");
    let mut svc5 = service("svc5", "172.30.0.45");
    svc5.load_balancer_ips = vec![ip("5.6.7.8")];
    svc5.ports[0].node_port = 3002;
    svc5.load_balancer_source_ranges = vec!["203.0.113.0/25".parse().unwrap(), "2001:db8::/32".parse().unwrap()];
    let (state, _) = state([Change::from(svc5), Change::Endpoint(key, endpoint("10.180.0.3"))]);
    let (_, script) = full(config(), &state);
    assert_eq!(
        rules(&script, "KUBE-FW-NUKIZ6OKUXPJNT4C"),
        [
            r#"-s 203.0.113.0/25 -m comment --comment "ns5/svc5:p80 loadbalancer IP" -j KUBE-EXT-NUKIZ6OKUXPJNT4C"#,
            r#"-m comment --comment "other traffic to ns5/svc5:p80 will be dropped by KUBE-PROXY-FIREWALL""#,
        ]
    );
    assert_eq!(
        rules(&script, "KUBE-PROXY-FIREWALL"),
        [
            r#"-d 5.6.7.8/32 -p tcp -m comment --comment "ns5/svc5:p80 traffic not accepted by KUBE-FW-NUKIZ6OKUXPJNT4C" -m tcp --dport 80 -j DROP"#
        ]
    );
    assert!(rules(&script, "KUBE-NODEPORTS")[0].ends_with("--dport 3002 -j KUBE-EXT-NUKIZ6OKUXPJNT4C"));
}

// rows of iptables: 73, 74
#[test]
fn affinity_checks_and_records_the_client() {
    let key = ServiceKey::new("ns1", "svc1");
    let mut svc1 = service("svc1", "172.30.0.41");
    svc1.session_affinity = Some(ClientIpAffinity { timeout_seconds: 10800 });
    let (state, _) = state([Change::from(svc1), Change::Endpoint(key, endpoint("10.180.0.1"))]);
    let (_, script) = full(config(), &state);
    let sep = "KUBE-SEP-SXIVWICOYRO3J4NJ";
    assert_eq!(
        rules(&script, "KUBE-SVC-XPGD46QRK7WJZT7O")[1],
        format!(
            r#"-m comment --comment "ns1/svc1:p80 -> 10.180.0.1:80" -m recent --rcheck --seconds 10800 --reap --name {sep} --mask 255.255.255.255 --rsource -j {sep}"#
        )
    );
    assert!(
        rules(&script, sep)[1]
            .contains(&format!("-m recent --set --name {sep} --mask 255.255.255.255 --rsource -m tcp -j DNAT"))
    );
}

// rows of iptables: 40, 57
#[test]
fn connections_to_a_service_without_endpoints_are_rejected() {
    let (state, _) = state([Change::from(service("svc6", "172.30.0.46"))]);
    let (_, script) = full(config(), &state);
    let rejected = r#"-A KUBE-SERVICES -d 172.30.0.46/32 -p tcp -m comment --comment "ns6/svc6:p80 has no endpoints" -m tcp --dport 80 -j REJECT --reject-with icmp-port-unreachable"#;
    assert!(script.contains(rejected), "{script}");
    assert!(!script.contains("172.30.0.46/32 -p tcp -m comment --comment \"ns6/svc6:p80 cluster IP\""));
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

#[test]
fn the_older_of_two_services_owns_a_shared_external_ip() {
    let mut old = service("svc2", "172.30.0.42");
    old.external_ips = vec![ip("192.0.2.99")];
    old.created_unix_seconds = 100;
    let mut young = service("svc1", "172.30.0.41");
    young.external_ips = vec![ip("192.0.2.99")];
    young.created_unix_seconds = 200;
    let young_key = young.key.clone();
    let (mut state, _) = state([
        Change::from(young),
        Change::Endpoint(young_key.clone(), endpoint("10.180.0.1")),
        Change::from(old.clone()),
        Change::Endpoint(old.key.clone(), endpoint("10.180.0.2")),
    ]);
    let owner_in = |script: &str| -> Vec<String> {
        let lines = script.lines().filter(|line| line.contains("-d 192.0.2.99/32"));
        lines.map(|line| line.split("--comment \"").nth(1).unwrap()[..8].to_owned()).collect()
    };
    assert_eq!(owner_in(&full(config(), &state).1), ["ns2/svc2"]);
    assert_eq!(state.frontends().conflicts(&young_key).count(), 1);

    // When the owner is removed, the other service becomes the owner and is dirty.
    let mut dirty = Dirty::default();
    state.apply(Change::RemoveService(old.key), &mut dirty);
    assert!(dirty.services.contains(&young_key));
    assert_eq!(owner_in(&full(config(), &state).1), ["ns1/svc1"]);
}

// rows of iptables: 20, 21
#[test]
fn terminating_endpoints_are_used_only_if_no_endpoint_is_ready() {
    let key = ServiceKey::new("ns1", "svc1");
    let mut leaving = endpoint("10.180.0.1");
    leaving.conditions = Conditions { ready: false, serving: true, terminating: true };
    let mut broken = endpoint("10.180.0.3");
    broken.conditions = Conditions { ready: false, serving: false, terminating: false };
    let (mut state, _) = state([
        Change::from(service("svc1", "172.30.0.41")),
        Change::Endpoint(key.clone(), leaving),
        Change::Endpoint(key.clone(), broken),
    ]);
    assert!(full(config(), &state).1.contains("--to-destination 10.180.0.1:80"));
    state.apply(Change::Endpoint(key, endpoint("10.180.0.2")), &mut Dirty::default());
    let (_, script) = full(config(), &state);
    assert!(script.contains("--to-destination 10.180.0.2:80"));
    assert!(!script.contains("10.180.0.1:80") && !script.contains("10.180.0.3:80"));
}

// rows of iptables: 97, 98
#[test]
fn stale_chains_are_deleted_and_foreign_chains_are_kept() {
    let save = "*nat\n:PREROUTING ACCEPT [0:0]\n:DOCKER - [0:0]\n:KUBE-SVC-XPGD46QRK7WJZT7O - [0:0]\n\
        -A PREROUTING -j DOCKER\n-A PREROUTING -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES\nCOMMIT\n";
    let existing = ExistingTables::parse(save);
    let (script, _) = Ledger::new(ruleset(config())).full(&FixedState(&State::default(), &node()), existing.clone());
    let script = script.to_string();
    assert!(script.contains("-X KUBE-SVC-XPGD46QRK7WJZT7O\n"));
    assert!(!script.contains("DOCKER"));
    assert!(!script.contains("-I PREROUTING"), "the jump already exists");
    assert!(script.contains("-I OUTPUT -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES"));
    let cleanup = Ledger::cleanup(&existing).to_string();
    assert_eq!(
        cleanup,
        "*nat\n:KUBE-SVC-XPGD46QRK7WJZT7O - [0:0]\n\
         -D PREROUTING -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES\n-X KUBE-SVC-XPGD46QRK7WJZT7O\nCOMMIT\n"
    );
    assert!(Existing::parse(Table::Filter, save).chains.is_empty());
}

// rows of iptables: 99
#[test]
fn in_the_compact_layout_the_chain_of_a_service_contains_its_dnat_rules() {
    let key = ServiceKey::new("ns1", "svc1");
    let mut svc1 = service("svc1", "172.30.0.41");
    svc1.session_affinity = Some(ClientIpAffinity { timeout_seconds: 60 });
    svc1.ports[0].node_port = 30001;
    let here = Endpoint { placement: Placement::on("test-node").into(), ..endpoint("10.180.0.2") };
    let (state, _) =
        state([Change::from(svc1), Change::Endpoint(key.clone(), endpoint("10.180.0.1")), Change::Endpoint(key, here)]);
    let (_, script) = full(RenderConfig { layout: Layout::Compact, ..config() }, &state);
    let recent = |what: &str, list: &str| format!("-m recent {what} --name {list} --mask 255.255.255.255 --rsource");
    let second = ChainName::of(ChainKind::Endpoint, "ns1/svc1:p80tcp10.180.0.2:80").to_string();
    let (first, second) = ("KUBE-SEP-SXIVWICOYRO3J4NJ", second.as_str());
    let check = "--rcheck --seconds 60 --reap";
    assert_eq!(
        rules(&script, "KUBE-SVC-XPGD46QRK7WJZT7O"),
        [
            format!(
                "-p tcp {} {} -j DNAT --to-destination 10.180.0.1:80",
                recent(check, first),
                recent("--set", first)
            ),
            format!(
                "-p tcp {} {} -j DNAT --to-destination 10.180.0.2:80",
                recent(check, second),
                recent("--set", second)
            ),
            format!(
                "-p tcp -m statistic --mode random --probability 0.50000000000 {} -j DNAT --to-destination 10.180.0.1:80",
                recent("--set", first)
            ),
            format!("-p tcp {} -j DNAT --to-destination 10.180.0.2:80", recent("--set", second)),
        ]
    );
    let (script, filter) = script.split_once("*filter\n").unwrap();
    // Hairpin connections are possible only for endpoints on this node.
    let hairpin = rules(script, "KUBE-HAIRPIN");
    assert_eq!(hairpin.len(), 1);
    let group = hairpin[0].strip_prefix("-s 10.180.0.0/24 -j ").unwrap();
    assert_eq!(rules(script, group), ["-s 10.180.0.2/32 -d 10.180.0.2/32 -j MASQUERADE --random-fully"]);
    assert_eq!(rules(script, "KUBE-POSTROUTING")[0], "-m conntrack --ctstate DNAT -j KUBE-HAIRPIN");
    // Filter must accept hairpin connections too. Hairpin connections have no mark that
    // KUBE-FORWARD could match, because table nat detects them only after table filter.
    assert_eq!(rules(filter, group), ["-s 10.180.0.2/32 -d 10.180.0.2/32 -j ACCEPT"]);
    assert_eq!(rules(filter, "KUBE-HAIRPIN"), hairpin);
    assert_eq!(rules(filter, "KUBE-FORWARD").last(), Some(&"-m conntrack --ctstate DNAT -j KUBE-HAIRPIN"));
    assert!(rules(script, "KUBE-NODEPORTS")[0].starts_with("-p tcp -m tcp --dport 29984:30015 -j KUBE-EXT-G-"));
}

// rows of iptables: 57
#[test]
fn packets_from_the_node_to_itself_are_rejected_only_in_input() {
    let (_, script) = full(config(), &State::default());
    let jumps = |chain: &str| {
        let jumps = script.lines().filter(|line| line.starts_with(&format!("-I {chain} ")));
        jumps.filter(|line| line.ends_with("-j KUBE-EXTERNAL-SERVICES")).collect::<Vec<_>>()
    };
    assert!(jumps("OUTPUT")[0].contains(" -m addrtype ! --dst-type LOCAL "), "{script}");
    assert!(!jumps("INPUT")[0].contains("addrtype"), "{script}");
}

#[test]
fn the_compact_layout_masquerades_by_groups_of_cluster_ips() {
    let mut svc1 = service("svc1", "172.30.0.41");
    // The externalIP has the prefix of the ClusterIP. With its Local policy, the address of the
    // client is kept.
    svc1.external_ips = vec![ip("172.30.0.42")];
    svc1.external_traffic_policy = TrafficPolicy::Local;
    let key = ServiceKey::new("ns1", "svc1");
    let here = Endpoint { placement: Placement::on("test-node").into(), ..endpoint("10.180.0.2") };
    let (state, _) = state([Change::from(svc1), Change::Endpoint(key, here)]);
    let groups = |config: RenderConfig| {
        let (_, script) = full(RenderConfig { layout: Layout::Compact, ..config }, &state);
        let jumps = rules(&script, "KUBE-SERVICES");
        let names = jumps.iter().filter_map(|rule| rule.split_once(" -j KUBE-SVC-G-"));
        let groups: Vec<Vec<String>> = names
            .map(|(_, hash)| rules(&script, &format!("KUBE-SVC-G-{hash}")).into_iter().map(str::to_owned).collect())
            .collect();
        groups
    };
    let cluster_ip = "-d 172.30.0.41/32 -p tcp -m tcp --dport 80 -j KUBE-SVC-XPGD46QRK7WJZT7O";
    let external_ip = ["-d 172.30.0.42/32 -p tcp -m tcp --dport 80 -j KUBE-EXT-XPGD46QRK7WJZT7O"];
    // The last rule removes the mark from packets that no ClusterIP of the group matches: packets
    // to an externalIP, or to a port that no service has.
    let outside = ["! -s 10.0.0.0/8 -j KUBE-MARK-MASQ", cluster_ip, "! -s 10.0.0.0/8 -j MARK --set-xmark 0x0/0x4000"];
    assert_eq!(groups(config()), [outside.to_vec(), external_ip.to_vec()]);

    let mut all = config();
    all.masquerade.all = true;
    let everything = ["-j KUBE-MARK-MASQ", cluster_ip, "-j MARK --set-xmark 0x0/0x4000"];
    assert_eq!(groups(all), [everything.to_vec(), external_ip.to_vec()]);

    assert_eq!(groups(RenderConfig::new(Family::V4)), [vec![cluster_ip], external_ip.to_vec()]);
}

#[test]
fn dispatch_groups_are_resized_when_the_cluster_grows() {
    let key = |i: u32| ServiceKey::new("ns", &format!("svc{i}"));
    let address = |i: u32| IpAddr::from((0x0a60_0000 + i * 7).to_be_bytes());
    let service_number =
        |i: u32| Service { key: key(i), cluster_ips: vec![address(i)], ..service("svc1", "172.30.0.41") };
    let mut kernel = FakeKernel::default();
    let mut state = State::default();
    let mut ledger = Ledger::new(ruleset(config()));
    kernel.restore(&ledger.full(&FixedState(&state, &node()), ExistingTables::default()).0.to_string()).unwrap();
    for i in 0..4000 {
        let mut dirty = Dirty::default();
        for change in [Change::from(service_number(i)), Change::Endpoint(key(i), endpoint("10.180.0.1"))] {
            state.apply(change, &mut dirty);
        }
        kernel.restore(&ledger.changed(&state, &node(), &dirty).0.to_string()).unwrap();
    }
    let save = kernel.save(Table::Nat);
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
    kernel.restore(&Ledger::trial_of_sctp().to_string()).unwrap();
    assert!(kernel.save(Table::Nat).contains("-p sctp -m sctp"));
    kernel.restore(&Ledger::end_of_trials().to_string()).unwrap();
    assert!(!kernel.save(Table::Nat).contains("sctp"));
}
