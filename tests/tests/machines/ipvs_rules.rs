//! The IP sets and iptables rules of mode IPVS on a real kernel, inside User-Mode Linux. The kernel
//! accepts the names, types and elements of the sets, and `iptables-save` prints the rules letter
//! for letter as they were rendered.

use std::{
    io::Write,
    net::IpAddr,
    process::{Command, Stdio},
    sync::Arc,
};

use headgate_core::{
    Change, Dirty, Endpoint, EndpointPort, Family, FixedState, NodeFacts, Placement, Protocol, Service, ServiceKey,
    ServicePort, State, TrafficPolicy,
    iptables::{ExistingTables, RulesTable},
    ipvs::{ExistingObjects, IpvsConfig, IpvsLedger, IpvsPlan, Op, SetKind},
    view::LocalDetector,
};
use headgate_tests::uml;

/// Runs a program with `input` and returns its output. Panics if the program fails.
fn run(program: &str, arguments: &[&str], input: &str) -> String {
    let mut child = Command::new(program).args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{program} {arguments:?}: {}\n{input}", output.status);
    String::from_utf8(output.stdout).unwrap()
}

/// The planned set operations as input of `ipset restore`.
fn set_lines(ops: &[Op], family: Family) -> String {
    let family_name = if family == Family::V4 { "inet" } else { "inet6" };
    let line = |op: &Op| match op {
        Op::CreateSet(set) if set.kind() == SetKind::Port => {
            Some(format!("create {} bitmap:port range 0-65535", set.name(family)))
        }
        Op::CreateSet(set) => Some(format!(
            "create {} {} family {family_name} maxelem {}",
            set.name(family),
            set.kind().as_str(),
            SetKind::KUBE_PROXYS_MAX_ELEMENTS
        )),
        Op::AddElement(set, element) => Some(format!("add {} {element}", set.name(family))),
        Op::DeleteElement(set, element) => Some(format!("del {} {element}", set.name(family))),
        Op::DestroySet(set) => Some(format!("destroy {}", set.name(family))),
        _ => None,
    };
    ops.iter().filter_map(line).map(|line| line + "\n").collect()
}

fn apply(plan: &IpvsPlan, family: Family) {
    let program = if family == Family::V4 { "iptables-legacy-restore" } else { "ip6tables-legacy-restore" };
    run("ipset", &["restore"], &set_lines(&plan.before, family));
    run(program, &["--noflush", "-w"], &plan.script.to_string());
    run("ipset", &["restore"], &set_lines(&plan.after, family));
}

fn tables(family: Family) -> ExistingTables {
    let program = if family == Family::V4 { "iptables-legacy-save" } else { "ip6tables-legacy-save" };
    ExistingTables::parse(&RulesTable::ALL.map(|table| run(program, &["-t", table.as_str()], "")).concat())
}

fn changes() -> Vec<Change> {
    let port = |name: &str, protocol, port, node_port| ServicePort { name: name.into(), protocol, port, node_port };
    let ports = vec![
        port("a", Protocol::Tcp, 80, 30080),
        port("b", Protocol::Sctp, 99, 30099),
        port("c", Protocol::Udp, 53, 0),
    ];
    let ip = |address: &str| address.parse::<IpAddr>().unwrap();
    let mut service = Service::new(ServiceKey::new("ns", "web"), vec![ip("10.96.0.1"), ip("fd00:10:96::1")], ports);
    service.external_ips = vec![ip("203.0.113.1"), ip("2001:db8:5::1")];
    service.load_balancer_ips = vec![ip("203.0.113.2"), ip("2001:db8:5::2")];
    service.load_balancer_source_ranges =
        ["192.0.2.0/24", "198.51.100.7/32", "2001:db8::/32"].map(|range| range.parse().unwrap()).to_vec();
    service.external_traffic_policy = TrafficPolicy::Local;
    service.health_check_node_port = 32000;
    let mut changes = vec![Change::from(service.clone())];
    for (address, node) in [("10.244.1.1", "node-a"), ("fd00:10:244::1", "node-a"), ("10.244.2.1", "node-b")] {
        let port = |name: &str, protocol, port| EndpointPort::new(name, protocol, port);
        let ports = Arc::from([port("a", Protocol::Tcp, 8080), port("b", Protocol::Sctp, 9999)]);
        let endpoint = Endpoint { placement: Placement::on(node).into(), ..Endpoint::new(ip(address), ports) };
        changes.push(Change::Endpoint(service.key.clone(), endpoint));
    }
    changes
}

fn check_that_rules_are_printed_as_rendered(family: Family) {
    let mut config = IpvsConfig::new(family);
    config.node_port_addresses = vec!["192.0.2.11".parse().unwrap(), "2001:db8::11".parse().unwrap()];
    config.masquerade.detector_v4 = Some(LocalDetector::Cidr("10.244.0.0/16".parse().unwrap()));
    let node = NodeFacts { addresses: vec!["192.0.2.11".parse().unwrap()], ..NodeFacts::named("node-a") };
    let (mut state, mut ledger) = (State::default(), IpvsLedger::new(config.clone()));
    let existing = || ExistingObjects { tables: tables(family), ..ExistingObjects::default() };
    // What an agent that starts now would write.
    let left = |state: &State| {
        let plan = IpvsLedger::new(config.clone()).full(&FixedState(state, &node), &existing(), 0);
        plan.script.to_string()
    };
    apply(&ledger.full(&FixedState(&state, &node), &existing(), 0), family);
    assert_eq!(left(&state), "");

    let mut dirty = Dirty::default();
    for change in changes() {
        state.apply(change, &mut dirty);
    }
    let plan = ledger.changed(&state, &node, &dirty, 0);
    assert!(!plan.script.is_empty(), "the plan has no rule for internal clients, which policy Local needs");
    apply(&plan, family);
    assert_eq!(left(&state), "");
    // `ipset save` prints the lines of the added elements as they were written.
    let saved = run("ipset", &["save"], "");
    for line in set_lines(&plan.before, family).lines() {
        assert!(saved.lines().any(|saved| saved == line), "{line} is not in:\n{saved}");
    }

    let sets = headgate_core::ipvs::Set::ALL.iter().map(|set| (*set, std::collections::BTreeSet::new())).collect();
    let existing = ExistingObjects { tables: tables(family), sets, ..ExistingObjects::default() };
    apply(&IpvsLedger::cleanup(&config, &existing, &std::collections::BTreeSet::new()), family);
    assert!(!run("ipset", &["save"], "").contains("KUBE"), "sets are left after the cleanup");
}

#[test]
fn ipv4_rules_are_printed_as_rendered() {
    uml::inside(|| check_that_rules_are_printed_as_rendered(Family::V4));
}

#[test]
fn ipv6_rules_are_printed_as_rendered() {
    uml::inside(|| check_that_rules_are_printed_as_rendered(Family::V6));
}
