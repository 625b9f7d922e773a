//! Services whose connections the client's address distributes.

use std::{collections::BTreeMap, net::IpAddr};

use headgate_core::{Change, ClientIpAffinity, Family, Protocol, Service};

use super::{
    super::layout::picks::RECORDING_BURST,
    rig::{Rig, SHRINK, Servers, endpoint, hashed_service, key},
};

/// A node that has learned of the endpoints in this order.
fn node(family: Family, timeout: Option<u32>, endpoints: &[u8]) -> Rig {
    let mut rig = Rig::new(family);
    let session_affinity = timeout.map(|timeout_seconds| ClientIpAffinity { timeout_seconds });
    let service = Service { session_affinity, ..hashed_service(family, 1) };
    assert_eq!(service.ports[0].protocol, Protocol::Udp);
    rig.apply([Change::from(service)]);
    for last in endpoints {
        rig.apply([Change::Endpoint(key(1), endpoint(family, *last, "there"))]);
    }
    rig
}

/// The endpoint that each of 500 clients reaches. The random numbers differ between calls.
fn reached(servers: &Servers) -> BTreeMap<u32, IpAddr> {
    (0..500).map(|client| (client, servers.reached(client, 1))).collect()
}

#[test]
fn nodes_agree_and_an_endpoint_that_leaves_moves_only_its_own_clients() {
    for family in Family::BOTH {
        let mut rig = node(family, None, &[1, 2, 3, 4, 5]);
        let servers = rig.serve(1..=5);
        let before = reached(&servers);
        let leaving = endpoint(family, 3, "there").address;
        let plan = rig.apply([Change::RemoveEndpoint(key(1), leaving)]);
        let after = reached(&servers);
        let moved = before.iter().filter(|(client, to)| after[client] != **to);
        let (moved, own): (Vec<_>, Vec<_>) = (moved.collect(), before.values().filter(|to| **to == leaving).collect());
        assert!(moved.iter().all(|(_, to)| **to == leaving), "{moved:?}");
        assert!(moved.len() == own.len() && (50..150).contains(&own.len()), "{} clients", own.len());
        // A fifth of 2,048 slots; the targets stay.
        assert!((300..520).contains(&plan.add.len()), "{} elements", plan.add.len());
        let mut other = node(family, None, &[9, 5, 3, 1]);
        other.apply([
            Change::RemoveEndpoint(key(1), endpoint(family, 9, "there").address),
            Change::Endpoint(key(1), endpoint(family, 4, "there")),
            Change::Endpoint(key(1), endpoint(family, 2, "there")),
        ]);
        assert_eq!(reached(&other.serve(1..=5)), before);
    }
}

#[test]
fn the_address_selects_the_endpoint_of_a_client_without_a_record() {
    for family in Family::BOTH {
        let before = reached(&node(family, None, &[1, 2, 3]).serve(1..=3));
        let mut rig = node(family, Some(10_800), &[1, 2, 3]);
        let servers = rig.serve(1..=4);
        assert_eq!(before, reached(&servers));
        // A record is stronger than the address: clients keep their endpoint when another one is
        // added. Without a record, some clients get the new endpoint.
        rig.apply([Change::Endpoint(key(1), endpoint(family, 4, "there"))]);
        let after = reached(&servers);
        let burst = usize::try_from(RECORDING_BURST / SHRINK).unwrap();
        let moved = before.iter().filter(|(client, to)| after[client] != **to).count();
        assert!(moved > 0 && before.iter().take(burst).all(|(client, to)| after[client] == *to), "{moved} moved");
    }
}
