//! The nftables dataplane against the real kernel, without the programs: quarantine and background
//! comparison.

use std::{
    collections::BTreeSet,
    sync::Mutex,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use headgate_core::{
    Change, Dirty, Endpoint, EndpointPort, Family, NodeFacts, Protocol, Service, ServiceKey, ServicePort, State,
    masquerade::MasqueradeConfig,
};
use headgate_node_agent::dataplane::{
    ErrorKind, FixedState, NodeDataplane, StateSource,
    nftables::{Config, NftablesDataplane},
};
use headgate_tests::testbed::{Namespace, netns, process::output};

/// Runs `work` in a new network namespace.
fn in_namespace(name: &str, work: impl FnOnce() -> Result<()> + Send) {
    netns::check_prerequisites().unwrap();
    netns::sweep_stale().unwrap();
    let namespace = Namespace::create(format!("hg{}-nftd-{name}", std::process::id())).unwrap();
    namespace.run(work).unwrap();
}

/// A dataplane for IPv4 whose table other programs may change.
fn dataplane() -> Result<NftablesDataplane> {
    let config = Config {
        families: vec![Family::V4],
        masquerade: MasqueradeConfig::default(),
        localhost_node_ports: false,
        conntrack_tcp_be_liberal: true,
        owns_tables: false,
        replies_to_ping: false,
        unused_features: Vec::new(),
    };
    NftablesDataplane::new(&config).context("starting mode nftables")
}

/// A Service with the ClusterIP 10.96.0.`last`, these ports, and one endpoint.
fn service(name: &str, last: u8, ports: &[u16]) -> [Change; 2] {
    let key = ServiceKey::new("ns", name);
    let port =
        |port: &u16| ServicePort { name: port.to_string().into(), protocol: Protocol::Tcp, port: *port, node_port: 0 };
    let targets: Vec<EndpointPort> =
        ports.iter().map(|port| EndpointPort::new(port.to_string(), Protocol::Tcp, 8080)).collect();
    let service = Service::new(key.clone(), vec![[10, 96, 0, last].into()], ports.iter().map(port).collect());
    [Change::from(service), Change::Endpoint(key, Endpoint::new([10, 244, 0, last].into(), targets.into()))]
}

fn apply(state: &mut State, changes: impl IntoIterator<Item = Change>) -> Dirty {
    let mut dirty = Dirty::default();
    for change in changes {
        state.apply(change, &mut dirty);
    }
    dirty
}

fn nft(arguments: &[&str]) -> String {
    output("nft", arguments)
}

fn services() -> String {
    nft(&["list", "map", "ip", "headgate", "services"])
}

/// A state during whose planning another program adds an element. The dataplane has then read the
/// kernel, so the kernel rejects the element of the plan.
struct Interfered<'a>(FixedState<'a>);

impl StateSource for Interfered<'_> {
    fn look(&self, plan: &mut dyn FnMut(&State, &NodeFacts)) {
        nft(&["add", "element", "ip", "headgate", "services", "{ 10.96.0.2 . tcp . 81 : 0 . 0 . 1 . 98 . 98 }"]);
        self.0.look(plan);
    }
}

#[test]
fn a_service_that_the_kernel_rejects_is_quarantined_and_keeps_its_last_good_elements() {
    in_namespace("quarantine", || {
        let (mut dataplane, mut state, node) = (dataplane()?, State::default(), NodeFacts::named("node-1"));
        apply(&mut state, service("one", 1, &[80]).into_iter().chain(service("two", 2, &[80])));
        dataplane.sync_full(&FixedState(&state, &node))?;

        let dirty = apply(&mut state, service("two", 2, &[80, 81]).into_iter().chain(service("three", 3, &[80])));
        // Another program has taken the key. First the agent believes that the table changed.
        nft(&["add", "element", "ip", "headgate", "services", "{ 10.96.0.2 . tcp . 81 : 0 . 0 . 1 . 98 . 98 }"]);
        dataplane.plan(&state, &node, &dirty);
        let error = dataplane.apply().unwrap_err();
        assert_eq!(error.kind, ErrorKind::NeedsFullSync, "{error}");
        nft(&["delete", "element", "ip", "headgate", "services", "{ 10.96.0.2 . tcp . 81 }"]);
        let error = dataplane.sync_full(&Interfered(FixedState(&state, &node))).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Rejected, "{error}");

        let faults = dataplane.find_faults(&FixedState(&state, &node), None, &error.families)?;
        let named: Vec<String> = faults.iter().map(|fault| fault.service.to_string()).collect();
        assert_eq!(named, ["ns/two"], "{faults:?}");
        assert!(faults[0].reason.contains("set services of table ip headgate"), "{faults:?}");
        dataplane.set_quarantined(&faults);
        dataplane.sync_full(&FixedState(&state, &node))?;
        let listed = services();
        for (frontend, is_there) in [
            ("10.96.0.1 . tcp . 80", true),
            ("10.96.0.2 . tcp . 80", true),
            ("10.96.0.2 . tcp . 81", false),
            ("10.96.0.3 . tcp . 80", true),
        ] {
            assert_eq!(listed.contains(frontend), is_there, "{frontend} in\n{listed}");
        }
        assert!(dataplane.verify()?);

        // While another program has the key, another attempt fails and changes nothing.
        nft(&["add", "element", "ip", "headgate", "services", "{ 10.96.0.2 . tcp . 81 : 0 . 0 . 1 . 98 . 98 }"]);
        let two = BTreeSet::from([faults[0].service.clone()]);
        let again = dataplane.find_faults(&FixedState(&state, &node), Some(&two), &[])?;
        assert_eq!(again.len(), 1, "{again:?}");
        nft(&["delete", "element", "ip", "headgate", "services", "{ 10.96.0.2 . tcp . 81 }"]);
        assert_eq!(dataplane.find_faults(&FixedState(&state, &node), Some(&two), &[])?, []);
        assert_eq!(services(), listed);
        dataplane.set_quarantined(&[]);
        dataplane.plan(&state, &node, &Dirty { services: two, ..Dirty::default() });
        dataplane.apply()?;
        assert!(services().contains("10.96.0.2 . tcp . 81"));
        assert!(dataplane.verify()?);
        Ok(())
    });
}

/// The first sync writes many endpoints in several transactions. An agent that restarts finds what
/// it would write, and the table has spare chains.
#[test]
fn a_large_first_sync_is_complete() {
    in_namespace("large", || {
        let (mut first, mut state, node) = (dataplane()?, State::default(), NodeFacts::named("node-1"));
        let ports = std::sync::Arc::from([EndpointPort::new("80", Protocol::Tcp, 8080)]);
        for number in 1..=100 {
            let name = number.to_string();
            apply(&mut state, service(&name, number, &[80]));
            let endpoint = |last| Endpoint::new([10, 245, number, last].into(), std::sync::Arc::clone(&ports));
            apply(&mut state, (0..200).map(|last| Change::Endpoint(ServiceKey::new("ns", &name), endpoint(last))));
        }
        let written = first.sync_full(&FixedState(&state, &node))?.objects_written;
        assert!(written > 20_100, "{written} objects were written");
        assert!(first.verify()?);
        let chains = nft(&["list", "chains", "ip"]);
        assert!(chains.contains("services-of-7 ") && chains.contains("services-of-201 "), "{chains}");

        let dirty = apply(&mut state, service("7", 77, &[80]));
        first.plan(&state, &node, &dirty);
        first.apply()?;
        let written = dataplane()?.sync_full(&FixedState(&state, &node))?.objects_written;
        assert_eq!(written, 0, "an agent that restarts wrote {written} objects");
        Ok(())
    });
}

#[test]
fn a_comparison_finds_every_kind_of_foreign_change() {
    in_namespace("compare", || {
        let (mut dataplane, mut state, node) = (dataplane()?, State::default(), NodeFacts::named("node-1"));
        apply(&mut state, service("one", 1, &[80]).into_iter().chain(service("two", 2, &[80])));
        dataplane.sync_full(&FixedState(&state, &node))?;
        // Nothing listens to notifications: only the comparison can find the changes.
        let changes: [&[&str]; 7] = [
            &["delete", "element", "ip", "headgate", "services", "{ 10.96.0.2 . tcp . 80 }"],
            &["flush", "map", "ip", "headgate", "endpoints"],
            &["add", "element", "ip", "headgate", "cluster-ips", "{ 192.0.2.77 }"],
            &["add", "rule", "ip", "headgate", "nat-prerouting", "counter"],
            &["flush", "chain", "ip", "headgate", "services"],
            &["add", "set", "ip", "headgate", "foreign", "{ type mark; }"],
            &["flush", "map", "ip", "headgate", "services-by-count"],
        ];
        for change in changes {
            nft(change);
            find_difference(&mut dataplane, change);
            dataplane.sync_full(&FixedState(&state, &node))?;
        }
        let until = Instant::now() + Duration::from_secs(5);
        while Instant::now() < until {
            assert!(dataplane.verify()?, "a comparison found a difference that does not exist");
            thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    });
}

/// A state that records, at each look, the Services in the kernel.
struct Recording<'a>(FixedState<'a>, &'a Mutex<Vec<String>>);

impl StateSource for Recording<'_> {
    fn look(&self, plan: &mut dyn FnMut(&State, &NodeFacts)) {
        let maps = nft(&["list", "maps", "ip"]);
        self.1.lock().unwrap().push(if maps.contains("headgate") { services() } else { String::new() });
        self.0.look(plan);
    }
}

#[test]
fn a_cold_start_programs_the_api_server_and_dns_before_other_services() {
    in_namespace("first", || {
        let (mut dataplane, mut state, node) = (dataplane()?, State::default(), NodeFacts::named("node-1"));
        let mut changes = Vec::from(service("other", 7, &[80]));
        let (api, dns) = (ServiceKey::new("default", "kubernetes"), ServiceKey::new("ns", "dns"));
        for (key, last, protocol, port) in [(api, 1, Protocol::Tcp, 443), (dns, 8, Protocol::Udp, 53)] {
            let ports = vec![ServicePort { name: "".into(), protocol, port, node_port: 0 }];
            changes.push(Service::new(key.clone(), vec![[10, 96, 0, last].into()], ports).into());
            let target = EndpointPort::new("", protocol, 8080);
            changes.push(Change::Endpoint(key, Endpoint::new([10, 244, 0, last].into(), vec![target].into())));
        }
        apply(&mut state, changes);
        let looks = Mutex::new(Vec::new());
        let source = Recording(FixedState(&state, &node), &looks);
        dataplane.sync_full(&source)?;
        let recorded = looks.lock().unwrap().clone();
        let [before, first] = recorded.as_slice() else { panic!("{} looks", recorded.len()) };
        assert_eq!(before, "");
        let holds = |listed: &str| {
            ["10.96.0.1 . tcp . 443", "10.96.0.8 . udp . 53", "10.96.0.7 . tcp . 80"].map(|one| listed.contains(one))
        };
        assert_eq!(holds(first), [true, true, false], "{first}");
        assert_eq!(holds(&services()), [true; 3]);
        // A later full sync, and the start of an agent beside rules, program everything at once.
        dataplane.sync_full(&source)?;
        self::dataplane()?.sync_full(&source)?;
        assert_eq!(looks.lock().unwrap().len(), 4);
        Ok(())
    });
}

/// Verifies until a comparison has found a difference.
fn find_difference(dataplane: &mut NftablesDataplane, change: &[&str]) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while dataplane.verify().unwrap() {
        assert!(Instant::now() < deadline, "no comparison found {change:?}");
        thread::sleep(Duration::from_millis(50));
    }
}
