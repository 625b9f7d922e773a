//! Which connections count as connections to NodePorts, and which clients count as the node itself.

use std::net::IpAddr;

use headgate_core::{Change, Family, Service, TrafficPolicy};
use nftables_netlink::{
    Expression, Hook, NatFlags,
    fake::{Action, Connection, FakeKernel, FakeNftables, Fate, Packet, Tuple},
};

use super::rig::{CLIENTS, CLUSTER, NODES, PODS, Rig, address, endpoint, key, service};

/// A node with a Service of each external policy, whose endpoints are on another node.
fn node(family: Family, fake: &FakeKernel, has_fib: bool) -> Rig<FakeNftables> {
    fake.set_local_addresses([1, 2].map(|last| address(family, NODES, last)));
    let mut rig = Rig::with(family, fake.connect(), has_fib);
    for (number, external_traffic_policy) in [(1, TrafficPolicy::Cluster), (2, TrafficPolicy::Local)] {
        let service = Service { external_traffic_policy, ..service(family, number) };
        rig.apply([Change::from(service), Change::Endpoint(key(number), endpoint(family, number, "there"))]);
    }
    rig
}

/// What the node does with the first packet of a TCP connection: the endpoint, and whether the
/// source is masqueraded.
fn sent_to(fake: &FakeKernel, from: IpAddr, to: IpAddr, port: u16) -> Option<(IpAddr, bool)> {
    let mut packet = Packet::new(6, (from, 999), (to, port));
    let walk = fake.walk(Hook::Prerouting, &mut packet);
    assert_eq!(walk.fate, Fate::Accepted, "{walk:?}");
    let [Action::DestinationTranslated(endpoint, 8080)] = walk.actions.as_slice() else { return None };
    Some((*endpoint, is_masqueraded(fake, &mut packet)))
}

fn is_masqueraded(fake: &FakeKernel, packet: &mut Packet) -> bool {
    let walk = fake.walk(Hook::Postrouting, packet);
    match walk.actions.as_slice() {
        [] => false,
        [Action::Masqueraded(NatFlags::FULLY_RANDOM)] => true,
        other => panic!("{other:?}"),
    }
}

#[test]
fn node_ports_answer_on_addresses_of_the_node_with_and_without_fib() {
    for family in Family::BOTH {
        for has_fib in [true, false] {
            let fake = FakeKernel::new();
            let mut rig = node(family, &fake, has_fib);
            let rules = rig.layout.chains.values().flat_map(|chain| &chain.rules);
            let uses_fib = rules.flat_map(|rule| &rule.expressions).any(|one| matches!(one, Expression::Fib { .. }));
            assert_eq!(uses_fib, has_fib);
            let (client, pod) = (address(family, CLIENTS, 200), address(family, PODS, 1));
            let [own, further, foreign] = [1, 2, 9].map(|last| address(family, NODES, last));
            let ask = |to, port| sent_to(&fake, client, to, port);
            assert_eq!(ask(own, 30_001), Some((pod, true)));
            assert_eq!(ask(foreign, 30_001), None);
            // Policy Local: clients outside do not reach the other node, but the node itself does.
            assert_eq!(ask(own, 30_002), None);
            assert_eq!(sent_to(&fake, own, own, 30_002), Some((address(family, PODS, 2), true)));
            if family == Family::V4 {
                let loopback = IpAddr::from([127, 0, 0, 5]);
                assert_eq!(sent_to(&fake, loopback, loopback, 30_001), Some((pod, true)));
                assert_eq!(sent_to(&fake, loopback, loopback, 30_002), Some((address(family, PODS, 2), true)));
            }
            // Without fib, an address counts once the agent has learned of it.
            assert_eq!(ask(further, 30_001), has_fib.then_some((pod, false)));
            rig.set_interfaces(vec![own, further]);
            assert_eq!(ask(further, 30_001), Some((pod, true)));
            rig.set_interfaces(vec![own]);
            assert_eq!(ask(further, 30_001), has_fib.then_some((pod, false)));
        }
    }
}

/// An echo request to a ClusterIP is translated to the address of the node. Other ICMP messages,
/// and echo requests to addresses that are not ClusterIPs, are not.
#[test]
fn the_node_answers_pings_to_cluster_ips() {
    for (family, protocol, echo_request) in [(Family::V4, 1, 0x0800), (Family::V6, 58, 0x8000)] {
        let fake = FakeKernel::new();
        let rig = node(family, &fake, true);
        let own = rig.config.ping_answered_by.unwrap();
        let [cluster_ip, unused] = [1, 77].map(|last| address(family, CLUSTER, last));
        for (to, kind, expected) in
            [(cluster_ip, echo_request, true), (cluster_ip, 0x0300, false), (unused, echo_request, false)]
        {
            for (hook, from) in [(Hook::Prerouting, address(family, PODS, 9)), (Hook::Output, own)] {
                // The fake's ports are the first bytes of the ICMP header: type and code.
                let mut packet = Packet::new(protocol, (from, kind), (to, 0));
                let walk = fake.walk(hook, &mut packet);
                let wanted = expected.then_some(Action::DestinationTranslated(own, 0));
                assert!(walk.actions.iter().eq(&wanted), "{to} {kind:#x}: {walk:?}");
            }
        }
    }
}

/// Another program has translated a connection whose port equals a NodePort.
#[test]
fn a_connection_of_another_program_is_not_masqueraded() {
    for family in Family::BOTH {
        let fake = FakeKernel::new();
        node(family, &fake, true);
        let (client, pod) = (address(family, CLIENTS, 200), address(family, PODS, 1));
        let translated = |to: IpAddr| {
            let original = Tuple { source: (client, 999), destination: (to, 30_001) };
            let mut packet = Packet::new(6, (client, 999), (pod, 8080));
            let status = Connection::DESTINATION_TRANSLATED;
            packet.connection = packet.connection.map(|connection| Connection { original, status, ..connection });
            is_masqueraded(&fake, &mut packet)
        };
        assert!(translated(address(family, NODES, 1)));
        assert!(!translated(address(family, NODES, 9)));
    }
}
