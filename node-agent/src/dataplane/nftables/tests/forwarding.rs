//! The table that is decoded from a kernel equals the table that the state asks for. Each missing
//! rule and each changed element of a Service makes a difference.

use std::collections::BTreeSet;

use headgate_core::{
    Change, Family, Service,
    explain::{Mode, NodeSettings},
    iptables::NodePortAddresses,
    view::MasqueradeConfig,
};
use headgate_oracle::{
    Comparison, compare,
    nftables::{decode, decode_within},
};
use nftables_netlink::{Chain, Element, Expression, Generator, Register, Rule, Transaction, Verdict};

use super::{
    super::{elements::has_node_addresses, layout::table_name},
    rig::{NODES, Rig, address, endpoint, hashed_service, key, service, shapes},
};

/// Services of all shapes. Some have no endpoints, some only on another node.
fn programmed(family: Family, has_fib: bool) -> Rig {
    let mut rig = Rig::with(family, has_fib);
    for (number, service) in (0u8..).zip(shapes(family)) {
        let key = service.key.clone();
        rig.apply([Change::from(service)]);
        for place in 0..number % 4 {
            let node = if place % 2 == 0 && number % 3 != 0 { "here" } else { "there" };
            rig.apply([Change::Endpoint(key.clone(), endpoint(family, 4 * number + place, node))]);
        }
    }
    rig
}

fn verify(rig: &mut Rig) -> Comparison {
    let dump = rig.dump();
    let detector = rig.config.detector.as_ref();
    let found = decode(&dump, detector, None);
    let settings = NodeSettings {
        mode: Mode::Nftables,
        masquerade: MasqueradeConfig {
            detector_v4: detector.filter(|_| rig.family == Family::V4).cloned(),
            detector_v6: detector.filter(|_| rig.family == Family::V6).cloned(),
            ..MasqueradeConfig::default()
        },
        node_ports_v4: rig.config.node_port_addresses.clone(),
        node_ports_v6: rig.config.node_port_addresses.clone(),
        localhost_node_ports: true,
    };
    compare(&rig.state, &rig.node, &settings, found, &|_| true)
}

fn sentences(comparison: &Comparison) -> Vec<String> {
    comparison.differences.iter().map(ToString::to_string).chain(comparison.not_understood.iter().cloned()).collect()
}

#[test]
fn the_tables_of_services_of_all_shapes_decode_to_the_expected_table() {
    for (family, has_fib) in [(Family::V4, true), (Family::V6, true), (Family::V4, false), (Family::V6, false)] {
        let mut rig = programmed(family, has_fib);
        let comparison = verify(&mut rig);
        assert_eq!(sentences(&comparison), Vec::<String>::new());
        assert!(comparison.frontends > 100, "{}", comparison.frontends);
    }
}

fn without_node_ports(family: Family, number: u8) -> Service {
    let mut service = service(family, number);
    service.ports.iter_mut().for_each(|port| port.node_port = 0);
    service
}

#[test]
fn tables_without_node_ports_or_without_an_address_for_them_are_verified() {
    for (family, has_fib) in [(Family::V4, true), (Family::V6, true), (Family::V4, false), (Family::V6, false)] {
        let only = |addresses: &[_]| NodePortAddresses::Only(addresses.to_vec());
        for addresses in [NodePortAddresses::All, only(&[]), only(&[address(family, NODES, 1)])] {
            for service in [without_node_ports(family, 0), service(family, 0)] {
                let mut rig = Rig::with(family, has_fib);
                rig.set_node_port_addresses(addresses.clone());
                rig.apply([Change::from(service), Change::Endpoint(key(0), endpoint(family, 1, "here"))]);
                let comparison = verify(&mut rig);
                assert_eq!(sentences(&comparison), Vec::<String>::new(), "{family} {has_fib} {addresses:?}");
                assert!(comparison.frontends > 3);
                rig.set_interfaces(Vec::new());
                assert_eq!(sentences(&verify(&mut rig)), Vec::<String>::new(), "{family} {has_fib} {addresses:?}");
            }
        }
    }
}

#[test]
fn a_changed_list_of_addresses_for_node_ports_is_found_and_names_the_family() {
    let family = Family::V6;
    let mut rig = programmed(family, true);
    let (wanted, other) = (address(family, NODES, 1), address(family, NODES, 2));
    rig.set_node_port_addresses(NodePortAddresses::Only(vec![wanted]));
    assert_eq!(sentences(&verify(&mut rig)), Vec::<String>::new());
    let mut expect = |right: NodePortAddresses, wrong, found: &str, expected: &str| {
        rig.set_node_port_addresses(wrong);
        rig.config.node_port_addresses = right;
        let sentence = format!("IPv6 NodePorts answer on {found}, but should answer on {expected}");
        assert_eq!(sentences(&verify(&mut rig)), [sentence]);
    };
    let (all, only) = (NodePortAddresses::All, |addresses: &[_]| NodePortAddresses::Only(addresses.to_vec()));
    let (first, both) = (wanted.to_string(), format!("{wanted}, {other}"));
    expect(only(&[wanted]), only(&[wanted, other]), &both, &first);
    expect(only(&[wanted]), only(&[]), "no address", &first);
    expect(only(&[wanted]), all.clone(), "every address of the node", &first);
    expect(all, only(&[wanted]), &first, "every address of the node");
}

/// The elements of a group are read once, and not for each frontend and origin.
#[test]
fn the_steps_grow_with_the_elements() {
    let family = Family::V4;
    let mut rig = Rig::new(family);
    for number in 0..20 {
        rig.apply([Change::from(hashed_service(family, number))]);
        rig.apply((0..10).map(|last| Change::Endpoint(key(number), endpoint(family, 10 * number + last, "there"))));
    }
    let dump = rig.dump();
    let detector = rig.config.detector.as_ref();
    let needs_more_than = |steps: u64| decode_within(&dump, detector, None, steps).is_broken();
    assert!(needs_more_than(dump.size()));
    assert!(!needs_more_than(10 * dump.size()));
}

#[test]
fn the_decoder_gives_up_if_foreign_rules_branch_too_often() {
    let table = table_name(Family::V4);
    let jump = |chain: &str, target: String| Rule::new(&table, chain, vec![Expression::Verdict(Verdict::Jump(target))]);
    // Chains that each jump to the next one ten times.
    let chains = |transaction: &mut Transaction| {
        for number in (0..6).rev() {
            let chain = format!("foreign-{number}");
            transaction.add_chain(&Chain::regular(&table, &chain));
            (0..10).filter(|_| number < 5).for_each(|_| {
                transaction.add_rule(&jump(&chain, format!("foreign-{}", number + 1)));
            });
        }
        jump("nat-prerouting", "foreign-0".to_owned())
    };
    // Random numbers that are not used to look up an element.
    let numbers = |_: &mut Transaction| {
        let generator = Generator::Random;
        let number = Expression::NumberGenerator { generator, modulus: 1 << 16, offset: 0, to: Register::R1 };
        Rule::new(&table, "nat-prerouting", vec![number.clone(), number.clone(), number])
    };
    for add in [&chains as &dyn Fn(&mut Transaction) -> Rule, &numbers] {
        let mut rig = programmed(Family::V4, true);
        let mut transaction = Transaction::new();
        let first = add(&mut transaction);
        let others = rig.kernel.rules(&table, Some("nat-prerouting")).unwrap().into_iter().map(|rule| rule.object);
        transaction.flush_chain(&table, "nat-prerouting");
        [first].into_iter().chain(others).for_each(|rule| transaction.add_rule(&rule));
        rig.kernel.commit(&transaction).unwrap();
        let comparison = verify(&mut rig);
        assert!(comparison.differences.is_empty() && comparison.frontends == 0, "{:?}", sentences(&comparison));
        assert_eq!(comparison.not_understood.len(), 1);
        assert!(comparison.not_understood[0].contains("branch too often"), "{:?}", comparison.not_understood);
    }
}

/// Sets whose elements decide where connections to single Services go.
fn decides(set: &str) -> bool {
    let other = ["masquerade", "hairpin", "cluster-ips", "members", "recordings", "clients-", "-by-count"];
    !other.iter().any(|name| set.contains(name)) && !has_node_addresses(set)
}

#[test]
fn deleted_elements_are_found_and_name_the_service() {
    let mut rig = programmed(Family::V4, true);
    let table = table_name(Family::V4);
    let sets: Vec<String> = rig.layout.sets.keys().filter(|set| decides(set)).cloned().collect();
    let mut corrupted = 0;
    for set in sets {
        let all = rig.elements(&set);
        let step = (all.len() / 6).max(1);
        // The rules drop packets to a known ClusterIP that is in no other set.
        let is_dropped_anyway = |element: &Element| set == "dropped" && element.key.0.starts_with(&[10, 96]);
        let deciding = all.iter().filter(|element| element.key.0.len() > 1 && !is_dropped_anyway(element));
        let mut found = 0;
        for element in deciding.step_by(step) {
            let mut transaction = Transaction::new();
            transaction.delete_elements(&table, set.as_str(), [element.clone()]);
            rig.kernel.commit(&transaction).unwrap();
            let comparison = verify(&mut rig);
            let mut transaction = Transaction::new();
            transaction.add_elements(&table, set.as_str(), [element.clone()]);
            rig.kernel.commit(&transaction).unwrap();
            corrupted += 1;
            found += u32::from(comparison.total > 0);
            // Without an element of these maps, policy Local decides, which may mean the same.
            assert!(comparison.total > 0 || set.starts_with("inside"), "no difference without {element:?} of {set}");
            assert!(comparison.services().iter().all(|key| &*key.namespace == "ns"));
            assert_eq!(comparison.total == 0, comparison.services().is_empty(), "{:?}", sentences(&comparison));
        }
        assert!(found > 0 || all.is_empty(), "no difference without elements of {set}");
    }
    assert!(corrupted > 30, "{corrupted} elements");
    assert_eq!(sentences(&verify(&mut rig)), Vec::<String>::new());
}

#[test]
fn each_deleted_rule_of_the_dispatch_is_found() {
    let mut rig = programmed(Family::V4, true);
    let table = table_name(Family::V4);
    // These rules masquerade, answer pings, guard 127.0.0.0/8 or drop INVALID packets. They do not
    // decide about the first packet of a connection to a Service. The rules that lead to records of
    // clients repeat what the next rule of the chain does.
    let is_other = |chain: &str, position: usize, last: usize| {
        let other = ["masquerad", "loopback", "unused-ports", "datagram", "counters", "nat-postrouting"];
        other.iter().any(|name| chain.contains(name)) || (chain.contains("affinity") && position < last)
    };
    let chains: BTreeSet<String> =
        rig.kernel.rules(&table, None).unwrap().into_iter().map(|listed| listed.object.chain).collect();
    let (mut found, mut missed) = (0, BTreeSet::new());
    for chain in chains {
        let rules: Vec<_> =
            rig.kernel.rules(&table, Some(&chain)).unwrap().into_iter().map(|listed| listed.object).collect();
        let replace = |rig: &mut Rig, left_out: Option<usize>| {
            let mut transaction = Transaction::new();
            transaction.flush_chain(&table, &chain);
            let kept = rules.iter().enumerate().filter(|(position, _)| Some(*position) != left_out);
            kept.for_each(|(_, rule)| transaction.add_rule(rule));
            rig.kernel.commit(&transaction).unwrap();
        };
        for position in (0..rules.len()).filter(|position| !is_other(&chain, *position, rules.len() - 1)) {
            replace(&mut rig, Some(position));
            if verify(&mut rig).total > 0 {
                found += 1;
            } else {
                missed.insert(format!("{chain} {position}"));
            }
        }
        replace(&mut rig, None);
    }
    // No Service in this test goes through these chains.
    let unused = ["services", "node-ports"].map(|map| (2..=16).map(move |count| format!("{map}-of-{count} 0")));
    // These rules drop INVALID packets, guard 127.0.0.0/8, or concern Services whose address is an
    // address of the node.
    let guards = "filter-forward 1, filter-input 0, filter-input 1, filter-output 0, firewall-output 0, \
                  firewall-prerouting 0, services 6";
    // An element has two alternatives, and a packet that misses the first one uses the second one.
    // The last rule drops packets while an element is replaced.
    let alternatives = "inside 0, inside 1, inside 2, inside-node-ports 0, inside-node-ports 1, inside-node-ports 2, \
                        node-ports 2, node-ports 3, node-ports 4, services 2, services 3, services 4, unserved 2, \
                        unserved 3, unserved-node-ports 2";
    // Where policy Cluster has only one endpoint, policy Local has the same one.
    let equal = "inside-node-ports-of-1 0, inside-node-ports-of-1-affinity-10800s 2, \
                 inside-node-ports-of-1-affinity-10s 2, inside-services-of-1 0, \
                 inside-services-of-1-affinity-10800s 2, inside-services-of-1-affinity-10s 2";
    let other = [guards, alternatives, equal].map(|rules| rules.split(", ").map(str::to_owned));
    let known: BTreeSet<String> = unused.into_iter().flatten().chain(other.into_iter().flatten()).collect();
    assert_eq!(missed.difference(&known).collect::<Vec<_>>(), Vec::<&String>::new());
    assert!(found > 20, "{found}");
}
