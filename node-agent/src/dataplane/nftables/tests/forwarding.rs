//! The table that is decoded from a kernel equals the table that the state asks for. Each missing
//! rule and each changed element of a Service makes a difference.

use headgate_core::{
    Change, Family, ServiceKey,
    explain::{Mode, NodeSettings},
    forwarding::{Comparison, compare},
    iptables::NodePortAddresses,
    masquerade::MasqueradeConfig,
};
use nftables_netlink::{
    Element, Kernel as _, Transaction,
    fake::{FakeKernel, FakeNftables},
};

use super::{
    super::{elements::has_node_addresses, layout::table_name},
    rig::{Rig, endpoint, shapes},
};
use crate::decoders::nftables::{Dump, decode, pack};

/// Services of all shapes. Some have no endpoints, some only on another node.
fn programmed(family: Family, fake: &FakeKernel, has_fib: bool) -> Rig<FakeNftables> {
    let mut rig = Rig::with(family, fake.connect(), has_fib);
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

fn verify(rig: &mut Rig<FakeNftables>) -> Comparison {
    let table = table_name(rig.family);
    let dump = Dump::read(&mut rig.kernel, &table, |kernel, set| {
        let mut elements: Vec<_> = kernel.elements(&table, set)?.into_iter().map(pack).collect();
        elements.sort_unstable();
        Ok(elements)
    });
    let detector = rig.config.detector.as_ref();
    let found = decode(&dump.unwrap().unwrap(), detector, None);
    let settings = NodeSettings {
        mode: Mode::Nftables,
        masquerade: MasqueradeConfig {
            detector_v4: detector.filter(|_| rig.family == Family::V4).cloned(),
            detector_v6: detector.filter(|_| rig.family == Family::V6).cloned(),
            ..MasqueradeConfig::default()
        },
        node_ports_v4: NodePortAddresses::All,
        node_ports_v6: NodePortAddresses::All,
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
        let mut rig = programmed(family, &FakeKernel::new(), has_fib);
        let comparison = verify(&mut rig);
        assert_eq!(sentences(&comparison), Vec::<String>::new());
        assert!(comparison.frontends > 100, "{}", comparison.frontends);
    }
}

/// Sets whose elements decide where connections go.
fn decides(set: &str) -> bool {
    let other = ["masquerade", "hairpin", "cluster-ips", "members", "recordings", "clients-"];
    !other.iter().any(|name| set.contains(name)) && !has_node_addresses(set)
}

#[test]
fn a_deleted_and_a_changed_element_are_found_and_name_the_service() {
    let fake = FakeKernel::new();
    let mut rig = programmed(Family::V4, &fake, true);
    let table = table_name(Family::V4);
    let sets: Vec<String> = rig.layout.sets.keys().filter(|set| decides(set)).cloned().collect();
    let mut corrupted = 0;
    for set in sets {
        // Verdict maps belong to all Services.
        let all = rig.kernel.elements(&table, &set).unwrap();
        let step = (all.len() / 6).max(1);
        for element in all.iter().filter(|element| element.key.0.len() > 1).step_by(step) {
            let mut change = |delete: &Element, add: Option<&Element>| {
                let mut transaction = Transaction::new();
                transaction.delete_elements(&table, set.as_str(), [delete.clone()]);
                transaction.add_elements(&table, set.as_str(), add.cloned());
                rig.kernel.commit(&transaction).unwrap();
                let comparison = verify(&mut rig);
                let mut transaction = Transaction::new();
                transaction.delete_elements(&table, set.as_str(), add.cloned());
                transaction.add_elements(&table, set.as_str(), [delete.clone()]);
                rig.kernel.commit(&transaction).unwrap();
                assert!(comparison.total > 0, "no difference without {delete:?} of {set}");
                assert!(comparison.services().iter().all(|key| &*key.namespace == "ns"));
                assert!(!comparison.services().is_empty(), "{:?}", sentences(&comparison));
            };
            corrupted += 1;
            change(element, None);
        }
    }
    assert!(corrupted > 30, "{corrupted} elements");
    assert_eq!(sentences(&verify(&mut rig)), Vec::<String>::new());
}

#[test]
fn a_swapped_address_is_found() {
    let fake = FakeKernel::new();
    let mut rig = programmed(Family::V4, &fake, true);
    let table = table_name(Family::V4);
    let element = rig.kernel.elements(&table, "endpoints").unwrap().remove(0);
    let mut swapped = element.clone();
    let Some(nftables_netlink::ElementData::Value(value)) = &mut swapped.data else { panic!("{element:?}") };
    value.0[3] = 250;
    let mut transaction = Transaction::new();
    transaction.delete_elements(&table, "endpoints", [element]);
    transaction.add_elements(&table, "endpoints", [swapped]);
    rig.kernel.commit(&transaction).unwrap();
    let comparison = verify(&mut rig);
    assert_eq!(comparison.services().len(), 1, "{:?}", sentences(&comparison));
    assert!(sentences(&comparison).iter().any(|sentence| sentence.contains("10.244.0.250:8080")));
}

#[test]
fn each_deleted_rule_of_the_dispatch_is_found() {
    let fake = FakeKernel::new();
    let mut rig = programmed(Family::V4, &fake, true);
    let table = table_name(Family::V4);
    // These rules masquerade, answer pings, guard 127.0.0.0/8 or drop INVALID packets. They do not
    // decide about the first packet of a connection to a Service. The rules that lead to records of
    // clients repeat what the next rule of the chain does.
    let is_other = |chain: &str, position: usize, last: usize| {
        let other = ["masquerad", "loopback", "unused-ports", "datagram", "counters", "nat-postrouting"];
        other.iter().any(|name| chain.contains(name)) || (chain.contains("affinity") && position < last)
    };
    let (mut found, mut missed) = (0, Vec::new());
    for listed in rig.kernel.rules(&table, None).unwrap() {
        let chain = listed.object.chain.clone();
        let rules = rig.kernel.rules(&table, Some(&chain)).unwrap();
        let position = rules.iter().position(|rule| rule.handle == listed.handle).unwrap();
        if is_other(&chain, position, rules.len() - 1) {
            continue;
        }
        let mut transaction = Transaction::new();
        transaction.flush_chain(&table, &chain);
        for rule in rules.iter().filter(|rule| rule.handle != listed.handle) {
            transaction.add_rule(&rule.object);
        }
        rig.kernel.commit(&transaction).unwrap();
        let comparison = verify(&mut rig);
        let mut transaction = Transaction::new();
        transaction.flush_chain(&table, &chain);
        rules.iter().for_each(|rule| transaction.add_rule(&rule.object));
        rig.kernel.commit(&transaction).unwrap();
        if comparison.total > 0 { found += 1 } else { missed.push(format!("{chain} {position}")) }
    }
    eprintln!("found {found}, missed {missed:?}");
    assert!(found > 20, "{missed:?}");
    let _: Option<ServiceKey> = None;
}
