//! The table that is decoded from virtual servers, sets and rules of mode IPVS equals the table
//! that the state asks for, and a corrupted kernel makes a difference that names the Service.
#![allow(clippy::unwrap_used)]

use std::{collections::BTreeSet, net::IpAddr};

use headgate_core::{
    Dirty, Family, NodeFacts, State,
    explain::{Mode, NodeSettings},
    forwarding::{
        Comparison, compare,
        iptables::Rules,
        ipvs::{Dump, Member, decode},
    },
    iptables::{NodePortAddresses, Table},
    ipvs::{Element, IpvsConfig, Ledger, fake_kernel::FakeKernel},
    masquerade::{LocalDetector, MasqueradeConfig},
};
use proptest::prelude::*;

mod changes;
use changes::{any_event, node};

fn addresses() -> Vec<IpAddr> {
    ["192.0.2.1", "192.0.2.101", "2001:db8::1"].iter().map(|address| address.parse().unwrap()).collect()
}

fn settings() -> NodeSettings {
    NodeSettings {
        mode: Mode::Ipvs,
        masquerade: MasqueradeConfig {
            detector_v4: Some(LocalDetector::Cidr("10.244.0.0/16".parse().unwrap())),
            ..MasqueradeConfig::default()
        },
        node_ports_v4: NodePortAddresses::Only(addresses()),
        node_ports_v6: NodePortAddresses::Only(addresses()),
        localhost_node_ports: false,
    }
}

fn programmed(state: &State, facts: &NodeFacts, family: Family) -> FakeKernel {
    let config = IpvsConfig {
        masquerade: settings().masquerade,
        node_port_addresses: addresses(),
        other_addresses: addresses().into_iter().collect(),
        ..IpvsConfig::new(family)
    };
    let mut kernel = FakeKernel::new(&config);
    let plan = Ledger::new(config).full(state, facts, &kernel.existing(), 0);
    kernel.apply(&plan).unwrap();
    kernel
}

fn member(element: &Element) -> Member {
    let (address, port, source) = match *element {
        Element::Ip(address) => (Some(address), None, None),
        Element::Port(port) => (None, Some((None, port)), None),
        Element::IpPort(address, protocol, port) => (Some(address), Some((Some(protocol), port)), None),
        Element::IpPortIp(address, protocol, port, source) => {
            (Some(address), Some((Some(protocol), port)), Some(source.into()))
        }
        Element::IpPortNet(address, protocol, port, source) => {
            (Some(address), Some((Some(protocol), port)), Some(source))
        }
    };
    Member { address, port, source }
}

fn verify(state: &State, facts: &NodeFacts, family: Family, kernel: &FakeKernel) -> Comparison {
    let mut rules = Rules::default();
    Table::ALL.iter().for_each(|table| kernel.iptables.save(*table).lines().for_each(|line| rules.line(line)));
    let servers = kernel.servers.iter().map(|(key, (_, destinations))| {
        let destinations = destinations.iter().map(|(address, weight)| (*address, *weight));
        ((key.address, key.protocol, key.port), destinations.collect())
    });
    let of_family: BTreeSet<IpAddr> =
        addresses().into_iter().filter(|address| Family::of(*address) == family).collect();
    let dump = Dump {
        servers: servers.collect(),
        device: kernel.device_addresses.clone(),
        sets: kernel.sets.iter().map(|(set, all)| (set.name(family), all.iter().map(member).collect())).collect(),
        rules,
        node_addresses: of_family.clone(),
        node_port_addresses: of_family,
    };
    let found = decode(&dump, family, settings().masquerade.detector(family));
    compare(state, facts, &settings(), found, &|_| true)
}

fn sentences(comparison: &Comparison) -> Vec<String> {
    comparison.differences.iter().map(ToString::to_string).chain(comparison.not_understood.iter().cloned()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn kernels_with_random_services_decode_to_the_expected_table(
        events in prop::collection::vec(any_event(8), 1..60),
        family in prop_oneof![Just(Family::V4), Just(Family::V6)],
    ) {
        let (mut state, mut facts) = (State::default(), node());
        events.iter().for_each(|event| event.apply(&mut state, &mut facts, &mut Dirty::default()));
        let mut kernel = programmed(&state, &facts, family);
        let comparison = verify(&state, &facts, family, &kernel);
        prop_assert_eq!(sentences(&comparison), Vec::<String>::new());
        // A lost virtual server, a lost endpoint and a lost address are found.
        let Some(key) = kernel.servers.keys().next().copied() else { return Ok(()) };
        let (settings, mut destinations) = kernel.servers.remove(&key).unwrap();
        let without = verify(&state, &facts, family, &kernel);
        let first = *destinations.keys().next().unwrap();
        let weight = destinations.remove(&first).unwrap();
        destinations.insert("[2001:db8:9::9]:1".parse().unwrap(), weight);
        kernel.servers.insert(key, (settings, destinations));
        let swapped = verify(&state, &facts, family, &kernel);
        let is_used = sentences(&without).iter().any(|sentence| sentence.contains("should be forwarded"));
        // The endpoints of a Service may all fail, and then drain.
        if weight > 0 && is_used {
            prop_assert!(swapped.services().iter().next().is_some(), "{:?}", sentences(&swapped));
        }
    }
}
