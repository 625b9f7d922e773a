//! Limits of ClientIP affinity.

use std::collections::BTreeSet;

use headgate_core::{Change, ClientIpAffinity, Family, Service};
use nftables_netlink::{Element, Transaction, Value};

use super::{
    super::layout::{
        picks::{MAX_RECORDED_CLIENTS, RECORDING_BURST, clients_map},
        table_name,
    },
    rig::{Rig, SHRINK, Servers, endpoint, key, service},
};

/// Long enough that no record ends during a test.
const TIMEOUT_SECONDS: u32 = 10_800;
/// The sizes in a shrunk layout.
const BURST: u32 = RECORDING_BURST / SHRINK;
const MAP_SIZE: u32 = MAX_RECORDED_CLIENTS / SHRINK;

/// Two Services with affinity and two endpoints each, the endpoints of Service n at n0 and n1.
fn two_services(family: Family) -> (Rig, Servers) {
    let mut rig = Rig::new(family);
    for number in [1, 2] {
        let session_affinity = Some(ClientIpAffinity { timeout_seconds: TIMEOUT_SECONDS });
        let service = Service { session_affinity, ..service(family, number) };
        let endpoints = [0, 1].map(|n| Change::Endpoint(key(number), endpoint(family, number * 10 + n, "there")));
        rig.apply([Change::from(service)].into_iter().chain(endpoints));
    }
    let servers = rig.serve([10, 11, 19, 20, 21]);
    (rig, servers)
}

fn recorded(rig: &mut Rig) -> usize {
    rig.elements(&clients_map(TIMEOUT_SECONDS)).len()
}

#[test]
fn clients_stay_with_their_endpoint_while_it_exists() {
    for family in Family::BOTH {
        let (mut rig, servers) = two_services(family);
        let first = servers.reached(1, 1);
        assert_eq!(servers.reached_often(1, 1, 20), BTreeSet::from([first]));
        rig.apply([Change::RemoveEndpoint(key(1), first)]);
        let other = servers.reached(1, 1);
        assert_ne!(other, first);
        rig.apply([Change::Endpoint(key(1), endpoint(family, 19, "there"))]);
        let reached = servers.reached_often(1, 1, 20);
        assert_eq!(reached, BTreeSet::from([other]), "the record leads to the endpoint that was left");
        assert_eq!(recorded(&mut rig), 1);
    }
}

#[test]
fn a_service_port_cannot_fill_the_map_of_clients() {
    for family in Family::BOTH {
        let (mut rig, servers) = two_services(family);
        for number in 0..BURST + 100 {
            servers.reached(number, 1);
        }
        let burst = usize::try_from(BURST).unwrap();
        assert_eq!(recorded(&mut rig), burst, "the other clients have an endpoint, but no record");
        // The port may record as many again within the timeout.
        const { assert!(2 * BURST <= MAP_SIZE / 8) };
        // The clients of another Service are recorded.
        assert_eq!(servers.reached_often(1, 2, 20).len(), 1);
        assert_eq!(recorded(&mut rig), burst + 1);
    }
}

#[test]
fn a_full_map_of_clients_refuses_nobody() {
    let (mut rig, servers) = two_services(Family::V4);
    let record = |number: u32| {
        let key = Value::concatenation(&[Value::host_u32(9999), Value::host_u32(number)]);
        Element::new(key).with_value(Value::concatenation(&[0, 0, 0].map(Value::host_u32)))
    };
    let mut transaction = Transaction::new();
    let table = table_name(rig.family);
    transaction.add_elements(&table, clients_map(TIMEOUT_SECONDS), (0..MAP_SIZE).map(record));
    rig.kernel.commit(&transaction).unwrap();
    assert_eq!(servers.reached_often(1, 1, 40).len(), 2, "the client gets any endpoint");
    assert_eq!(recorded(&mut rig), usize::try_from(MAP_SIZE).unwrap());
}
