//! `iptables-save` prints the rendered rules letter for letter. The agent depends on this equality:
//! it compares saved rules as text and does not parse them. The tests check both variants and
//! families, after full syncs, changes and a change of the layout. They also check that a cleanup
//! leaves no rules.

#[path = "../../../crates/core/tests/fake_kernel/iptables.rs"]
mod fake_kernel;

use std::{net::IpAddr, path::Path, sync::Arc};

use headgate_core::{
    Change, ClientIpAffinity, Dirty, Endpoint, EndpointPort, Family, Placement, Protocol, Service, ServiceKey,
    ServicePort, State, TrafficPolicy,
    iptables::{ExistingTables, Layout, RenderConfig, RulesLedger, RulesTable, ruleset},
};
use headgate_node_agent::dataplane::{
    Finding, FixedState, NodeDataplane,
    iptables::{IptablesDataplane, IptablesOptions, Variant},
};
use headgate_tests::testbed::{iptables as testbed_iptables, netns};

use self::fake_kernel::FakeKernel;
use crate::forwarding::{masquerade, node};

fn service(i: u8) -> Service {
    let port = |name: &str, protocol, port, node_port| ServicePort { name: name.into(), protocol, port, node_port };
    let cluster_ips = vec![IpAddr::from([10, 96, 0, i]), format!("fd00:10:96::{i:x}").parse().unwrap()];
    let ports = vec![
        port("web", Protocol::Tcp, 80, 30000 + u16::from(i)),
        port("dns", Protocol::Udp, 53, 0),
        port("sig", Protocol::Sctp, 99, 31000 + u16::from(i)),
    ];
    Service::new(ServiceKey::new("ns", &format!("svc{i}")), cluster_ips, ports)
}

fn endpoint(i: u8, node: &str) -> [Endpoint; 2] {
    let port = |name: &str, protocol, port| EndpointPort::new(name, protocol, port);
    let ports: Arc<[EndpointPort]> = Arc::from([
        port("web", Protocol::Tcp, 8080),
        port("dns", Protocol::Udp, 5353),
        port("sig", Protocol::Sctp, 9999),
    ]);
    let addresses: [IpAddr; 2] = [IpAddr::from([10, 244, 1, i]), format!("fd00:10:244:1::{i:x}").parse().unwrap()];
    addresses
        .map(|address| Endpoint { placement: Placement::on(node).into(), ..Endpoint::new(address, Arc::clone(&ports)) })
}

/// Services that together use every kind of rule.
fn everything() -> Vec<Change> {
    let mut services: Vec<Service> = (1..=8).map(service).collect();
    services[1].session_affinity = Some(ClientIpAffinity { timeout_seconds: 10800 });
    services[2].external_traffic_policy = TrafficPolicy::Local;
    services[2].health_check_node_port = 32000;
    services[3].internal_traffic_policy = TrafficPolicy::Local;
    services[4].load_balancer_ips = vec![IpAddr::from([203, 0, 113, 5]), "2001:db8:5::5".parse().unwrap()];
    services[4].load_balancer_source_ranges =
        ["192.0.2.0/24", "198.51.100.7/32", "2001:db8::/32"].map(|range| range.parse().unwrap()).to_vec();
    services[5].external_ips = vec![IpAddr::from([203, 0, 113, 6]), "2001:db8:5::6".parse().unwrap()];
    services[6].external_traffic_policy = TrafficPolicy::Local;
    services[6].external_ips = vec![IpAddr::from([203, 0, 113, 7]), "2001:db8:5::7".parse().unwrap()];
    let mut changes: Vec<Change> = Vec::new();
    for (i, service) in (1u8..).zip(services) {
        let key = service.key.clone();
        changes.push(Change::from(service));
        // The seventh Service has no endpoint on this node, and the eighth Service has no endpoint.
        // The other Services have up to six addresses per family.
        let count = if i == 8 { 0 } else { i };
        for j in 0..count {
            let node = if j % 2 == 0 && i != 7 { "node-a" } else { "node-b" };
            changes.extend(endpoint(16 * i + j, node).map(|endpoint| Change::Endpoint(key.clone(), endpoint)));
        }
    }
    changes
}

/// The dataplane on the real kernel. For each family, a ledger with a fake kernel receives the same
/// changes, and the fake kernel holds the expected rules.
struct Rig {
    variant: Variant,
    layout: Layout,
    backend: IptablesDataplane,
    expected: Vec<(Family, RulesLedger, FakeKernel)>,
    state: State,
}

impl Rig {
    fn new(variant: Variant, layout: Layout) -> Self {
        let config = IptablesOptions { variant, layout, masquerade: masquerade(), ..IptablesOptions::default() };
        let expected = Family::BOTH.map(|family| {
            let render = RenderConfig { layout, masquerade: masquerade(), ..RenderConfig::new(family) };
            (family, RulesLedger::new(ruleset(render)), FakeKernel::default())
        });
        let backend = IptablesDataplane::new(config).unwrap();
        Self { variant, layout, backend, expected: expected.into(), state: State::default() }
    }

    fn full(&mut self) {
        self.backend.sync_full(&FixedState(&self.state, &node())).unwrap();
        for (_, ledger, kernel) in &mut self.expected {
            let saves = RulesTable::ALL.map(|table| kernel.save(table)).concat();
            let (script, _) = ledger.full(&FixedState(&self.state, &node()), ExistingTables::parse(&saves));
            kernel.restore(&script.to_string()).unwrap();
        }
    }

    fn step(&mut self, changes: Vec<Change>) {
        let mut dirty = Dirty::default();
        for change in changes {
            self.state.apply(change, &mut dirty);
        }
        self.backend.plan(&self.state, &node(), &dirty);
        self.backend.apply().unwrap();
        for (_, ledger, kernel) in &mut self.expected {
            let (script, _) = ledger.changed(&self.state, &node(), &dirty);
            kernel.restore(&script.to_string()).unwrap();
        }
    }
}

impl Rig {
    fn assert_deep_verification_sees_a_flushed_chain(
        &self,
        namespace: &netns::Namespace,
        variant: testbed_iptables::Variant,
    ) {
        let config = IptablesOptions {
            variant: self.variant,
            layout: self.layout,
            masquerade: masquerade(),
            ..IptablesOptions::default()
        };
        let mut backend = IptablesDataplane::new(config).unwrap();
        assert_eq!(backend.sync_full(&FixedState(&self.state, &node())).unwrap().objects_written, 0);
        let family = headgate_tests::testbed::plan::Family::V4;
        let flush = ["-t", "nat", "-F", "KUBE-MARK-MASQ"];
        testbed_iptables::run(namespace, variant, family, Path::new("/run/xtables.lock"), &flush).unwrap();
        let verification = backend.verification(Family::V4).unwrap().unwrap();
        let found = verification(&FixedState(&self.state, &node()));
        assert_eq!(found.count, 1, "the flushed chain was not noticed");
        assert_eq!(backend.sync_full(&FixedState(&self.state, &node())).unwrap().objects_written, 1);
    }

    /// Asserts that a new agent writes nothing if it finds its rules in the kernel. After a change
    /// of one chain by hand, the next agent must write only that chain.
    fn assert_warm_restart_writes_nothing(&self, namespace: &netns::Namespace, variant: testbed_iptables::Variant) {
        let config = |layout| IptablesOptions {
            variant: self.variant,
            layout,
            masquerade: masquerade(),
            ..IptablesOptions::default()
        };
        let mut second = IptablesDataplane::new(config(self.layout)).unwrap();
        let report = second.sync_full(&FixedState(&self.state, &node())).unwrap();
        assert_eq!(report.objects_written, 0, "{report:?}");
        let family = headgate_tests::testbed::plan::Family::V4;
        let lock = Path::new("/run/xtables.lock");
        let by_hand = ["-t", "nat", "-A", "KUBE-MARK-MASQ", "-j", "RETURN"];
        testbed_iptables::run(namespace, variant, family, lock, &by_hand).unwrap();
        let mut third = IptablesDataplane::new(config(self.layout)).unwrap();
        let report = third.sync_full(&FixedState(&self.state, &node())).unwrap();
        assert_eq!(report.objects_written, 1, "{report:?}");
        assert_equal(namespace, variant, self, "after a repair");
    }
}

/// A foreign rule jumps to a chain of a removed Service. The agent writes all other changes. The
/// agent empties the chain, and deletes the chain once no rule jumps to it.
fn a_foreign_rule_does_not_stop_other_changes(variant: Variant, by: testbed_iptables::Variant) {
    let namespace = netns::Namespace::for_test(&format!("foreign-{by:?}")).unwrap();
    let lock = Path::new("/run/xtables.lock");
    let family = headgate_tests::testbed::plan::Family::V4;
    let save = || testbed_iptables::save(&namespace, by, family, lock).unwrap();
    let by_hand = |arguments: &[&str]| testbed_iptables::run(&namespace, by, family, lock, arguments).unwrap();
    namespace
        .run(|| {
            let mut rig = Rig::new(variant, Layout::Classic);
            rig.full();
            let key = service(1).key;
            let [v4, _] = endpoint(16, "node-b");
            rig.step(vec![Change::from(service(1)), Change::Endpoint(key.clone(), v4.clone())]);
            let saved = save();
            let chain = saved
                .lines()
                .find_map(|line| Some(line.split_once(":web cluster IP\" -m tcp --dport 80 -j ")?.1))
                .unwrap();
            by_hand(&["-t", "nat", "-N", "SOMEBODY"]);
            by_hand(&["-t", "nat", "-A", "SOMEBODY", "-j", chain]);
            let mut dirty = Dirty::default();
            for change in [Change::RemoveService(key.clone()), Change::from(service(2))] {
                rig.state.apply(change, &mut dirty);
            }
            rig.backend.plan(&rig.state, &node(), &dirty);
            let report = rig.backend.apply().unwrap();
            assert!(report.warnings.iter().any(|warning| warning.contains(chain)), "{report:?}");
            let saved = save();
            assert!(saved.contains("ns/svc2:web has no endpoints"), "{saved}");
            assert!(saved.contains(&format!(":{chain} ")) && !saved.contains(&format!("-A {chain} ")), "{saved}");
            assert!(!saved.contains("svc1"), "{saved}");
            let repaired = rig.backend.sync_full(&FixedState(&rig.state, &node())).unwrap();
            assert_eq!(
                (repaired.objects_written, repaired.warnings),
                (0, Vec::new()),
                "the repair wrote objects or repeated the warning"
            );
            let error = rig.backend.cleanup().unwrap_err();
            assert!(error.message.contains(chain), "{error}");
            assert!(!error.message.contains("KUBE-PROXY-CANARY"), "a deleted chain is reported as left: {error}");
            assert_eq!(
                save().matches("KUBE-").count(),
                2,
                "expected only the chain and the rule that jumps to it:\n{}",
                save()
            );
            by_hand(&["-t", "nat", "-F", "SOMEBODY"]);
            rig.backend.sync_full(&FixedState(&rig.state, &node())).unwrap();
            assert!(!save().contains(&format!(":{chain} ")), "the next repair did not delete the chain:\n{}", save());
            rig.backend.cleanup().unwrap();
            assert!(!save().contains("KUBE-"), "{}", save());
            Ok(())
        })
        .unwrap();
}

#[test]
fn a_foreign_rule_in_iptables_legacy_does_not_stop_other_changes() {
    a_foreign_rule_does_not_stop_other_changes(Variant::Legacy, testbed_iptables::Variant::Legacy);
}

#[test]
fn a_foreign_rule_in_iptables_nft_does_not_stop_other_changes() {
    a_foreign_rule_does_not_stop_other_changes(Variant::Nft, testbed_iptables::Variant::Nft);
}

/// The rules and Headgate's chains in the output of `iptables-save`. The lines are sorted by chain,
/// and the rules of a chain keep their order.
fn rules(save: &str) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    let mut table = "";
    for line in save.lines() {
        if let Some(name) = line.strip_prefix('*') {
            table = name;
        } else if line.starts_with("-A ") || line.starts_with(":KUBE") {
            lines.push(format!("{table} {}", line.split(" [").next().unwrap()));
        }
    }
    lines.sort_by_key(|line| line.split(' ').take(3).collect::<Vec<_>>().join(" "));
    lines
}

fn assert_equal(namespace: &netns::Namespace, variant: testbed_iptables::Variant, rig: &Rig, what: &str) {
    let lock = Path::new("/run/xtables.lock");
    for (family, _, kernel) in &rig.expected {
        let testbed_family = match family {
            Family::V4 => headgate_tests::testbed::plan::Family::V4,
            Family::V6 => headgate_tests::testbed::plan::Family::V6,
        };
        let real = rules(&testbed_iptables::save(namespace, variant, testbed_family, lock).unwrap());
        let expected = rules(&RulesTable::ALL.map(|table| kernel.save(table)).concat());
        for (real, expected) in real.iter().zip(&expected) {
            assert_eq!(real, expected, "{what}, {family}");
        }
        assert_eq!(real.len(), expected.len(), "{what}, {family}");
    }
}

fn run(variant: Variant, layout: Layout) {
    let (saved_by, name) = match variant {
        Variant::Legacy => (testbed_iptables::Variant::Legacy, "legacy"),
        _ => (testbed_iptables::Variant::Nft, "nft"),
    };
    let namespace = netns::Namespace::for_test(&format!("text-{name}-{layout:?}")).unwrap();
    namespace
        .run(|| {
            let mut rig = Rig::new(variant, layout);
            rig.full();
            assert_equal(&namespace, saved_by, &rig, "without Services");
            rig.step(everything());
            assert_equal(&namespace, saved_by, &rig, "with all Services");
            let first = service(1).key;
            let gone = endpoint(48, "node-a").map(|endpoint| Change::RemoveEndpoint(service(3).key, endpoint.address));
            rig.step(gone.into());
            rig.step(endpoint(16, "node-a").map(|e| Change::RemoveEndpoint(first.clone(), e.address)).into());
            rig.step(vec![Change::RemoveService(service(2).key)]);
            assert_equal(&namespace, saved_by, &rig, "after some removals");
            rig.full();
            assert_equal(&namespace, saved_by, &rig, "after another full sync");
            rig.assert_warm_restart_writes_nothing(&namespace, saved_by);
            let more = (0..300u16).map(|i| {
                let [high, low] = i.to_be_bytes();
                let key = ServiceKey::new("many", &format!("svc{i}"));
                let cluster_ips =
                    vec![IpAddr::from([10, 97, high, low]), format!("fd00:10:97::{i:x}").parse().unwrap()];
                let port = ServicePort { name: "web".into(), protocol: Protocol::Tcp, port: 80, node_port: 30300 + i };
                Change::from(Service::new(key, cluster_ips, vec![port]))
            });
            rig.step(more.collect());
            assert_equal(&namespace, saved_by, &rig, "with many Services");
            rig.step((1..200u16).map(|i| Change::RemoveService(ServiceKey::new("many", &format!("svc{i}")))).collect());
            assert_equal(&namespace, saved_by, &rig, "with few Services again");
            assert_eq!(rig.backend.check().unwrap(), Finding::Intact);
            rig.assert_deep_verification_sees_a_flushed_chain(&namespace, saved_by);
            rig.backend.cleanup().unwrap();
            assert!(matches!(rig.backend.check().unwrap(), Finding::Changed(_)));
            let left = testbed_iptables::save_all(&namespace, Path::new("/run/xtables.lock")).unwrap();
            assert!(!left.contains("KUBE"), "{left}");
            Ok(())
        })
        .unwrap();
}

// rows of iptables: 99, 100
#[test]
fn iptables_legacy_prints_classic_rules_as_rendered() {
    run(Variant::Legacy, Layout::Classic);
}

// rows of iptables: 99, 100
#[test]
fn iptables_nft_prints_classic_rules_as_rendered() {
    run(Variant::Nft, Layout::Classic);
}

// rows of iptables: 99, 100
#[test]
fn iptables_legacy_prints_compact_rules_as_rendered() {
    run(Variant::Legacy, Layout::Compact);
}

// rows of iptables: 99, 100
#[test]
fn iptables_nft_prints_compact_rules_as_rendered() {
    run(Variant::Nft, Layout::Compact);
}

/// Adding and removing 300 Services changes the layout twice.
// rows of iptables: 99, 100
#[test]
fn iptables_nft_prints_rules_as_rendered_when_the_layout_changes() {
    run(Variant::Nft, Layout::Auto);
}
