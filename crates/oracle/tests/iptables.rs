//! The table that is decoded from rules equals the table that the state asks for, and corrupted
//! rules make a difference that names the Service.
#![allow(clippy::unwrap_used)]

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use fake_kernel::iptables::FakeKernel;
use headgate_core::{
    Change, ClientIpAffinity, Dirty, Endpoint, EndpointPort, Family, FixedState, NodeFacts, Placement, Protocol,
    ProxyProtocol, Service, ServiceKey, ServicePort, State, TrafficPolicy,
    digest::Digests,
    explain::{Mode, NodeSettings},
    forwarding::{self, expected, unverified},
    iptables::{
        ExistingTables, Layout, NodePortAddresses, RenderConfig, RulesLedger, RulesTable, names::GateChain, ruleset,
    },
    view::{LocalDetector, MasqueradeConfig},
};
use headgate_oracle::{Comparison, compare, iptables};
use proptest::prelude::*;

#[path = "../../core/tests/changes/mod.rs"]
mod changes;
#[path = "../../core/tests/fake_kernel/mod.rs"]
mod fake_kernel;
use changes::{any_event, node};

fn settings(mode: Mode, node_ports: NodePortAddresses) -> NodeSettings {
    NodeSettings {
        mode,
        masquerade: MasqueradeConfig {
            detector_v4: Some(LocalDetector::Cidr("10.244.0.0/16".parse().unwrap())),
            ..MasqueradeConfig::default()
        },
        node_ports_v4: node_ports.clone(),
        node_ports_v6: node_ports,
        localhost_node_ports: false,
    }
}

/// The listeners of the proxy in mode userspace.
fn listeners(family: Family, settings: &NodeSettings) -> BTreeMap<GateChain, SocketAddr> {
    if settings.mode != Mode::UserspaceIptables {
        return BTreeMap::new();
    }
    let address: IpAddr = if family == Family::V4 { "169.254.77.1" } else { "fd00:77::1" }.parse().unwrap();
    GateChain::ALL.into_iter().zip((10245..).map(|port| SocketAddr::new(address, port))).collect()
}

/// The rules of a state, as `iptables-save` prints them.
fn rules(state: &State, facts: &NodeFacts, family: Family, layout: Layout, settings: &NodeSettings) -> String {
    let config = RenderConfig {
        layout,
        masquerade: settings.masquerade.clone(),
        localhost_node_ports: settings.localhost_node_ports,
        node_port_addresses: settings.node_ports_v4.clone(),
        listeners: listeners(family, settings),
        ..RenderConfig::new(family)
    };
    let mut kernel = FakeKernel::default();
    let (script, _) = RulesLedger::new(ruleset(config)).full(&FixedState(state, facts), ExistingTables::default());
    kernel.restore(&script.to_string()).unwrap();
    RulesTable::ALL.map(|table| kernel.save(table)).concat()
}

fn digests(table: &forwarding::Table, state: &State) -> Digests {
    let mut digests = Digests::default();
    table.hashes(state.frontends()).for_each(|(bucket, hash)| digests.add(bucket, hash));
    digests
}

fn decode(dump: &str, family: Family, settings: &NodeSettings) -> forwarding::Table {
    let mut rules = iptables::Rules::default();
    dump.lines().for_each(|line| rules.line(line));
    let listeners: BTreeSet<SocketAddr> = listeners(family, settings).into_values().collect();
    iptables::decode(&rules, family, settings.masquerade.detector(family), &listeners)
}

fn verify(state: &State, facts: &NodeFacts, family: Family, settings: &NodeSettings, dump: &str) -> Comparison {
    compare(state, facts, settings, decode(dump, family, settings), &|_| true)
}

fn sentences(comparison: &Comparison) -> Vec<String> {
    comparison.differences.iter().map(ToString::to_string).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn rules_of_random_services_decode_to_the_expected_table(
        events in prop::collection::vec(any_event(8), 1..60),
        layout in prop_oneof![Just(Layout::Classic), Just(Layout::Compact)],
        family in prop_oneof![Just(Family::V4), Just(Family::V6)],
        mode in prop_oneof![Just(Mode::Iptables), Just(Mode::UserspaceIptables)],
        has_addresses in any::<bool>(),
        localhost_node_ports in any::<bool>(),
    ) {
        let addresses = ["192.0.2.1", "192.0.2.9", "2001:db8::1"].map(|address| address.parse().unwrap());
        let node_ports = if has_addresses { NodePortAddresses::Only(addresses.into()) } else { NodePortAddresses::All };
        let settings = NodeSettings { localhost_node_ports, ..settings(mode, node_ports) };
        let (mut state, mut facts) = (State::default(), node());
        events.iter().for_each(|event| event.apply(&mut state, &mut facts, &mut Dirty::default()));
        let dump = rules(&state, &facts, family, layout, &settings);
        let comparison = verify(&state, &facts, family, &settings, &dump);
        prop_assert_eq!(sentences(&comparison), Vec::<String>::new(), "{}", dump);
        prop_assert_eq!(&comparison.not_understood, &Vec::<String>::new(), "{}", dump);
        let keys = state.entries().map(|(key, _)| key);
        let wanted = expected(&state, keys, family, &facts, &settings);
        prop_assert_eq!(comparison.frontends, wanted.entries.len() as u64);
        let mut found = decode(&dump, family, &settings);
        found.unverified = unverified(&state, &facts, &settings, family);
        prop_assert_eq!(digests(&found, &state), digests(&wanted, &state));
    }
}

/// Services with the kinds of rules that a corruption can hit.
fn some_services() -> State {
    let mut state = State::default();
    let port = |node_port| ServicePort { name: "web".into(), protocol: Protocol::Tcp, port: 80, node_port };
    let service = |name: &str, last: u8, node_port| {
        Service::new(ServiceKey::new("shop", name), vec![[10, 96, 0, last].into()], vec![port(node_port)])
    };
    let cart = service("cart", 1, 30001);
    let mut front = service("front", 2, 30002);
    front.external_traffic_policy = TrafficPolicy::Local;
    front.load_balancer_ips = vec![[203, 0, 113, 2].into()];
    front.load_balancer_source_ranges =
        ["198.51.100.0/24", "192.0.2.0/24"].map(|range| range.parse().unwrap()).to_vec();
    let mut sticky = service("sticky", 3, 0);
    sticky.session_affinity = Some(ClientIpAffinity { timeout_seconds: 60 });
    let mut empty = service("empty", 4, 30004);
    empty.external_ips = vec![[203, 0, 113, 4].into()];
    for (service, endpoints) in [(cart, 3), (front, 2), (sticky, 2), (empty, 0)] {
        let key = service.key.clone();
        let last = service.cluster_ips[0].to_string().rsplit('.').next().unwrap().parse::<u8>().unwrap();
        state.apply(Change::from(service), &mut Dirty::default());
        for i in 0..endpoints {
            let ports = Arc::from([EndpointPort::new("web", Protocol::Tcp, 8080)]);
            let endpoint = Endpoint {
                placement: Placement::on(if i == 0 { "n1" } else { "n2" }).into(),
                ..Endpoint::new([10, 244, last, i].into(), ports)
            };
            state.apply(Change::Endpoint(key.clone(), endpoint), &mut Dirty::default());
        }
    }
    state
}

/// True for a rule without which a Service is served otherwise.
fn is_essential(rule: &str) -> bool {
    let (_, target) = rule.split_once(" -j ").unwrap_or((rule, ""));
    let of_service = "KUBE-GATE-CLUSTER KUBE-GATE-LOCAL KUBE-GATE-NODEPORT KUBE-SVC- KUBE-SVL- KUBE-EXT- KUBE-FW- KUBE-SEP- \
                      DNAT REJECT DROP";
    let is_other = ["--rcheck", "INVALID", "LOCALNET", "localnet"].iter().any(|word| rule.contains(word));
    rule.starts_with("-A KUBE-") && of_service.split(' ').any(|prefix| target.starts_with(prefix)) && !is_other
}

#[test]
fn a_deleted_rule_is_found_and_names_the_service() {
    let state = some_services();
    let modes = [Mode::Iptables, Mode::UserspaceIptables];
    for (layout, mode) in modes.into_iter().flat_map(|mode| [(Layout::Classic, mode), (Layout::Compact, mode)]) {
        let settings = settings(mode, NodePortAddresses::All);
        let dump = rules(&state, &node(), Family::V4, layout, &settings);
        assert_eq!(sentences(&verify(&state, &node(), Family::V4, &settings, &dump)), Vec::<String>::new());
        let essential: Vec<(usize, &str)> = dump.lines().enumerate().filter(|(_, rule)| is_essential(rule)).collect();
        assert!(essential.len() > 20, "{dump}");
        for (at, rule) in essential {
            let without: String =
                dump.lines().enumerate().filter(|(i, _)| *i != at).map(|(_, line)| format!("{line}\n")).collect();
            let comparison = verify(&state, &node(), Family::V4, &settings, &without);
            assert!(comparison.total > 0, "{layout:?}, {mode:?}: no difference without {rule}\n{dump}");
            assert!(!comparison.services().is_empty(), "{:?}", sentences(&comparison));
            if let Some((_, name)) = rule.split_once("\"shop/") {
                let name = name.split(':').next().unwrap();
                let key = Arc::new(ServiceKey::new("shop", name));
                assert_eq!(comparison.services(), [key].into(), "{rule}: {:?}", sentences(&comparison));
            }
        }
    }
}

/// True if a comparison found nothing, and understood everything.
fn is_verified(comparison: &Comparison) -> bool {
    comparison.total == 0 && comparison.not_understood.is_empty()
}

/// The rules of a dump for which `is_chosen` holds, with the dump that `change` makes of each.
fn each_changed<'a>(
    dump: &'a str,
    is_chosen: impl Fn(&str) -> bool + 'a,
    change: impl Fn(&str, &str) -> String + 'a,
) -> impl Iterator<Item = (&'a str, String)> + 'a {
    dump.lines().enumerate().filter(move |(_, rule)| is_chosen(rule)).map(move |(at, rule)| {
        let (chain, rest) = rule.strip_prefix("-A ").unwrap().split_once(' ').unwrap();
        let changed = change(chain, rest);
        let lines = dump.lines().enumerate().map(|(i, line)| if i == at { &changed } else { line });
        (rule, lines.map(|line| format!("{line}\n")).collect())
    })
}

const HALF: &str = "-m statistic --mode random --probability 0.50000000000";

#[test]
fn a_rule_for_some_packets_is_found() {
    let state = some_services();
    for mode in [Mode::Iptables, Mode::UserspaceIptables] {
        for layout in [Layout::Classic, Layout::Compact] {
            let settings = settings(mode, NodePortAddresses::All);
            let dump = rules(&state, &node(), Family::V4, layout, &settings);
            assert!(is_verified(&verify(&state, &node(), Family::V4, &settings, &dump)));
            let narrowed = each_changed(
                &dump,
                |rule| is_essential(rule) && !rule.contains(" -s "),
                |chain, rest| format!("-A {chain} -s 10.3.0.0/16 {rest}"),
            );
            // Packets that return from the chain of an endpoint reach the next endpoint, so that
            // only the shares change. So do packets of pods for a NodePort with policy Local.
            let is_of_shares = |rule: &str| {
                rule.starts_with("-A KUBE-SEP-") || rule.ends_with("--dport 30002 -j KUBE-GATE-NODEPORT-CLUSTER")
            };
            let is_of_all = move |rule: &str| is_essential(rule) && !is_of_shares(rule);
            let returning = each_changed(&dump, is_of_all, |chain, rest| {
                let (conditions, _) = rest.rsplit_once("-j ").unwrap();
                format!("-A {chain} {conditions}{HALF} -j RETURN\n-A {chain} {rest}")
            });
            let mut count = 0;
            for (rule, dump) in narrowed.chain(returning) {
                count += 1;
                let comparison = verify(&state, &node(), Family::V4, &settings, &dump);
                assert!(!is_verified(&comparison), "{layout:?}, {mode:?}: a change of {rule}");
            }
            assert!(count > 40, "{count} rules in\n{dump}");
        }
    }
}

#[test]
fn a_conditional_jump_is_found() {
    let state = some_services();
    let leads = |rule: &str| {
        let needed = ["KUBE-SERVICES", "KUBE-EXTERNAL-SERVICES", "KUBE-PROXY-FIREWALL"];
        let is_of_base = !rule.starts_with("-A KUBE-") && needed.iter().any(|target| rule.ends_with(target));
        is_of_base || rule.starts_with("-A KUBE-SERVICES") && rule.ends_with("KUBE-NODEPORTS")
    };
    let addresses = NodePortAddresses::Only(vec![[192, 0, 2, 1].into()]);
    for (layout, node_ports) in [(Layout::Classic, NodePortAddresses::All), (Layout::Compact, addresses)] {
        let settings = settings(Mode::Iptables, node_ports);
        let dump = rules(&state, &node(), Family::V4, layout, &settings);
        assert!(is_verified(&verify(&state, &node(), Family::V4, &settings, &dump)));
        assert!(dump.lines().filter(|rule| leads(rule)).count() >= 11, "{dump}");
        for condition in ["-s 10.3.0.0/16", "-p udp", "-i eth9", HALF, "-m connlimit --connlimit-above 5"] {
            for (rule, dump) in each_changed(&dump, leads, |chain, rest| format!("-A {chain} {condition} {rest}")) {
                let comparison = verify(&state, &node(), Family::V4, &settings, &dump);
                assert!(!is_verified(&comparison), "{layout:?}: {condition} in front of {rule}");
            }
        }
    }
}

/// Inserts a rule at the beginning of a chain of a table. Creates the chains that it names.
fn insert(dump: &str, table: &str, rule: &str) -> String {
    let head = format!("*{table}\n");
    let (before, after) = dump.split_once(&head).unwrap();
    let at = after.find("-A ").unwrap();
    let target = rule.rsplit(' ').next().unwrap();
    let is_new = target.contains('-') && !after.contains(&format!(":{target} "));
    let declaration = if is_new { format!(":{target} - [0:0]\n") } else { String::new() };
    // The rules of a chain must be together.
    let chain = format!("-A {} ", rule.split(' ').next().unwrap());
    let at = after[at..].find(&chain).map_or(at, |offset| at + offset);
    format!("{before}{head}{declaration}{}-A {rule}\n{}", &after[..at], &after[at..])
}

#[test]
fn foreign_rules_count_among_the_rules_of_headgate_and_not_before() {
    let (state, settings) = (some_services(), settings(Mode::Iptables, NodePortAddresses::All));
    for layout in [Layout::Classic, Layout::Compact] {
        let dump = rules(&state, &node(), Family::V4, layout, &settings);
        let found = |dump: &str| verify(&state, &node(), Family::V4, &settings, dump);
        let in_front = [
            ("filter", "FORWARD -j cali-FORWARD"),
            ("filter", "INPUT -j KUBE-FIREWALL"),
            ("filter", "FORWARD -s 10.0.0.0/8 -j DROP"),
            ("filter", "INPUT -i lo -j ACCEPT"),
            ("nat", "PREROUTING -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT"),
            ("nat", "PREROUTING -d 10.96.0.9/32 -p tcp -m tcp --dport 80 -j DNAT --to-destination 10.9.9.9:80"),
        ];
        for (table, rule) in in_front {
            let comparison = found(&insert(&dump, table, rule));
            assert!(is_verified(&comparison), "{layout:?}: {rule}: {comparison:?}");
        }
        let drops_all = "Service shop/cart: connections from outside to 10.96.0.1 port 80/TCP are dropped";
        let loses_one = "are only partly forwarded, to 10.244.1.1:8080, 10.244.1.2:8080, but";
        let mut among = vec![
            ("nat", "PREROUTING -j ACCEPT", "Service shop/cart: connections from outside to 10.96.0.1"),
            ("nat", "KUBE-SERVICES -p tcp -m tcp --dport 80 -j ACCEPT", "to 10.96.0.1 port 80/TCP are not served"),
            ("filter", "FORWARD -j ACCEPT", "Service shop/empty: connections from outside to 10.96.0.4"),
            ("filter", "KUBE-FORWARD -j DROP", drops_all),
            ("filter", "KUBE-FORWARD -d 10.244.1.0/32 -j DROP", loses_one),
            ("filter", "KUBE-FORWARD -d 10.244.1.0/32 -m conntrack --ctstate DNAT -j DROP", loses_one),
            ("filter", "KUBE-FORWARD -d 10.244.1.0/32 -p tcp -m tcp --dport 8080 -j DROP", "no Service: connections"),
            ("filter", "KUBE-SERVICES -d 10.244.1.0/24 -p tcp -m tcp --dport 8080 -j REJECT", "10.96.0.1 port 80/TCP"),
            ("filter", "KUBE-NODEPORTS -p tcp -m tcp --dport 8080 -j DROP", "no Service: connections to IPv4 node"),
        ];
        if layout == Layout::Compact {
            among.push(("filter", "KUBE-HAIRPIN -j DROP", drops_all));
        }
        for (table, rule, wanted) in among {
            let sentences = sentences(&found(&insert(&dump, table, rule)));
            assert!(sentences.iter().any(|one| one.contains(wanted)), "{layout:?}: {rule}: {sentences:?}");
        }
        let not_understood = [
            ("nat", "KUBE-SERVICES -p tcp -m tcp --dport 80:81 -j DNAT --to-destination 9.9.9.9:80", "KUBE-SERVICES"),
            ("filter", "KUBE-FORWARD -s 10.0.0.0/8 -j DROP", "KUBE-FORWARD"),
            ("filter", "KUBE-NODEPORTS -j DROP", "KUBE-NODEPORTS"),
        ];
        for (table, rule, chain) in not_understood {
            let comparison = found(&insert(&dump, table, rule));
            let wanted = format!("chain {chain} in table {table}");
            let has = comparison.not_understood.iter().any(|one| one.contains(&wanted));
            assert!(has, "{layout:?}: {rule}: {comparison:?}");
        }
    }
}

/// A chain that jumps ten times to the next chain, which does the same, would take ages.
#[test]
fn chains_that_multiply_the_steps_end_the_verification() {
    let (state, settings) = (some_services(), settings(Mode::Iptables, NodePortAddresses::All));
    let dump = rules(&state, &node(), Family::V4, Layout::Classic, &settings);
    for rule in ["KUBE-SERVICES -j DEEP-0", "KUBE-SERVICES -d 10.96.0.1/32 -p tcp -m tcp --dport 80 -j DEEP-0"] {
        let mut dump = insert(&dump, "nat", rule);
        for i in 0..14 {
            let (chain, next) = (format!("-A DEEP-{i} -j DEEP-{}\n", i + 1).repeat(10), i + 1);
            dump = dump.replacen("*nat\n", &format!("*nat\n:DEEP-{next} - [0:0]\n"), 1);
            let (before, after) = dump.split_once("*nat\n").unwrap();
            let at = after.find("-A ").unwrap();
            dump = format!("{before}*nat\n{}{chain}{}", &after[..at], &after[at..]);
        }
        let comparison = verify(&state, &node(), Family::V4, &settings, &dump);
        let wanted = "cannot verify the rules of table nat (IPv4): they lead packets through too many chains";
        assert!(comparison.not_understood.contains(&wanted.to_owned()), "{:?}", comparison.not_understood);
    }
}

#[test]
fn changed_and_foreign_rules_are_found() {
    let (state, settings) = (some_services(), settings(Mode::Iptables, NodePortAddresses::All));
    let jump = "-A PREROUTING -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES\n";
    let chain = ":KUBE-SERVICES - [0:0]\n";
    let cart =
        "-A KUBE-SERVICES -d 10.96.0.1/32 -p tcp -m comment --comment \"shop/cart:web cluster IP\" -m tcp --dport 80";
    let cases: [(&str, &str, &str); 10] = [
        ("--to-destination 10.244.1.1:8080", "--to-destination 10.244.9.9:8080", "Service shop/cart: connections"),
        // An endpoint that no connection reaches.
        ("--probability 0.33333333349", "--probability 0.00000000000", "Service shop/cart: connections"),
        ("--probability 0.33333333349", "--probability 1.00000000000", "Service shop/cart: connections"),
        ("-j REJECT --reject-with icmp-port-unreachable", "-j DROP", "are dropped, but should be rejected"),
        ("-s 198.51.100.0/24", "-s 198.51.101.0/24", "can reach 203.0.113.2 port 80/TCP, but clients in"),
        (
            "-s 10.244.0.0/16 -m comment --comment \"pod",
            "-s 10.3.0.0/16 -m comment --comment \"pod",
            "from pods of the node",
        ),
        (jump, "", "no rule of chain PREROUTING in table nat"),
        ("--dst-type LOCAL -j KUBE-NODEPORTS", "--dst-type LOCAL -j RETURN", "NodePorts answer on no address"),
        // Somebody ends the chain of all Services.
        (chain, &format!("{chain}-A KUBE-SERVICES -j RETURN\n"), "to 10.96.0.3 port 80/TCP are not served"),
        // A Service that does not exist.
        (cart, &cart.replace(".1/", ".99/"), "no Service: connections to 10.96.0.99 port 80/TCP are forwarded to"),
    ];
    let dump = rules(&state, &node(), Family::V4, Layout::Classic, &settings);
    for (old, new, wanted) in cases {
        assert!(dump.contains(old), "{old} is not in\n{dump}");
        let comparison = verify(&state, &node(), Family::V4, &settings, &dump.replace(old, new));
        let found = sentences(&comparison);
        assert!(found.iter().any(|sentence| sentence.contains(wanted)), "{old} -> {new}: {found:?}");
    }
    // Recorded clients reach other endpoints than new clients.
    let other = dump.lines().find(|line| line.ends_with("--to-destination 10.244.1.1:8080")).unwrap();
    let other = other.split(' ').nth(1).unwrap();
    let changed = dump.lines().map(|line| match line.rsplit_once(" -j ") {
        Some((conditions, _)) if line.contains("--rcheck") => format!("{conditions} -j {other}\n"),
        _ => format!("{line}\n"),
    });
    let changed: String = changed.collect();
    let found = sentences(&verify(&state, &node(), Family::V4, &settings, &changed));
    let wanted = "Service shop/sticky: connections to 10.96.0.3 port 80/TCP are not served, but should be forwarded";
    assert!(found.iter().any(|sentence| sentence.starts_with(wanted)), "{found:?}");
    // One missing jump is one difference.
    assert_eq!(verify(&state, &node(), Family::V4, &settings, &dump.replacen(jump, "", 1)).total, 1);
    // A rule that nobody here writes is not taken for equal.
    let foreign = format!("{chain}-A KUBE-SERVICES -p tcp -m owner --uid-owner 7 -j ACCEPT\n");
    let comparison = verify(&state, &node(), Family::V4, &settings, &dump.replace(chain, &foreign));
    assert!(comparison.not_understood.iter().any(|one| one.contains("chain KUBE-SERVICES")), "{comparison:?}");
}

/// The rules that lead connections to the proxy, and a Service to which only the proxy can send.
#[test]
fn changed_rules_in_front_of_the_proxy_are_found() {
    let (mut state, settings) = (some_services(), settings(Mode::UserspaceIptables, NodePortAddresses::All));
    let mut service = state.entries().find(|(key, _)| key.name == "cart").unwrap().1.service().unwrap().clone();
    service.proxy_protocol = Some(ProxyProtocol::V2);
    state.apply(Change::from(service), &mut Dirty::default());
    let dump = rules(&state, &node(), Family::V4, Layout::Classic, &settings);
    assert_eq!(sentences(&verify(&state, &node(), Family::V4, &settings, &dump)), Vec::<String>::new());
    let without = "do not reach the proxy";
    let cases = [
        ("-j KUBE-GATE-CLUSTER", "-j KUBE-MARK-MASQ", vec!["cart", "front", "sticky"]),
        ("-j KUBE-GATE-LOCAL", "-j KUBE-MARK-MASQ", vec!["front"]),
        ("-j KUBE-GATE-NODEPORT-CLUSTER", "-j KUBE-MARK-MASQ", vec!["cart", "front"]),
        ("--to-destination 169.254.77.1:10245", "--to-destination 169.254.78.1:10245", vec!["cart", "front", "sticky"]),
        ("--match-set KUBE-GATE src -j DNAT", "--match-set KUBE-OTHER src -j DNAT", vec!["cart", "front", "sticky"]),
        ("--dport 30001 -j KUBE-GATE-NODEPORT-CLUSTER", "--dport 30009 -j KUBE-GATE-NODEPORT-CLUSTER", vec!["cart"]),
    ];
    for (old, new, services) in cases {
        assert!(dump.contains(old), "{old} is not in\n{dump}");
        let comparison = verify(&state, &node(), Family::V4, &settings, &dump.replace(old, new));
        let found = sentences(&comparison);
        assert!(found.iter().all(|sentence| sentence.contains(without)), "{old} -> {new}: {found:?}");
        let wanted: BTreeSet<_> = services.iter().map(|name| Arc::new(ServiceKey::new("shop", name))).collect();
        assert_eq!(comparison.services(), wanted, "{old} -> {new}: {found:?}");
    }
}

#[test]
fn services_that_are_not_verified_are_left_out() {
    let (state, settings) = (some_services(), settings(Mode::Iptables, NodePortAddresses::All));
    let dump = rules(&state, &node(), Family::V4, Layout::Classic, &settings);
    let found = decode(&dump.replace("10.244.1.", "10.244.77."), Family::V4, &settings);
    let is_verified = |key: &ServiceKey| key.name != "cart";
    assert_eq!(compare(&state, &node(), &settings, found, &is_verified).total, 0);
    let keys: Vec<_> = state.entries().map(|(key, _)| key).collect();
    let wanted = digests(&expected(&state, keys, Family::V4, &node(), &settings), &state);
    let found = digests(&decode(&dump.replace("10.244.1.", "10.244.77."), Family::V4, &settings), &state);
    assert_eq!(wanted.differing(&found).len(), 1, "only the bucket of one Service differs");
}
