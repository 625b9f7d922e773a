//! Services whose connections the client's address distributes.

use std::{collections::BTreeMap, net::IpAddr};

use headgate_core::{Change, ClientIpAffinity, Family, Service};
use nftables_netlink::{
    Hook,
    fake::{Action, FakeKernel, FakeNftables, Fate, Packet},
};

use super::rig::{CLIENTS, CLUSTER, Rig, address, endpoint, hashed_service, key};

/// A node that has learned of the endpoints in this order.
fn node(family: Family, fake: &FakeKernel, timeout: Option<u32>, endpoints: &[u8]) -> Rig<FakeNftables> {
    let mut rig = Rig::new(family, fake.connect());
    let session_affinity = timeout.map(|timeout_seconds| ClientIpAffinity { timeout_seconds });
    let service = Service { session_affinity, ..hashed_service(family, 0) };
    rig.apply([Change::from(service)]);
    for last in endpoints {
        rig.apply([Change::Endpoint(key(0), endpoint(family, *last, "there"))]);
    }
    rig
}

/// The endpoint that each of 500 clients reaches. The random numbers differ between calls.
fn reached(fake: &FakeKernel, family: Family) -> BTreeMap<IpAddr, IpAddr> {
    let client = |number: u32| match address(family, CLIENTS, 0) {
        IpAddr::V4(base) => IpAddr::from((u32::from(base) + number).to_be_bytes()),
        IpAddr::V6(base) => IpAddr::from((u128::from(base) + (u128::from(number) << 64)).to_be_bytes()),
    };
    let reach = |from: IpAddr| {
        let mut packet = Packet::new(6, (from, 999), (address(family, CLUSTER, 0), 80));
        let walk = fake.walk(Hook::Prerouting, &mut packet);
        match walk.actions.as_slice() {
            [Action::DestinationTranslated(to, 8080)] if walk.fate == Fate::Accepted => (from, *to),
            other => panic!("{other:?} {walk:?}"),
        }
    };
    (0..500).map(client).map(reach).collect()
}

#[test]
fn nodes_agree_and_an_endpoint_that_leaves_moves_only_its_own_clients() {
    for family in Family::BOTH {
        let (fake, other) = (FakeKernel::new(), FakeKernel::new());
        let mut rig = node(family, &fake, None, &[1, 2, 3, 4, 5]);
        node(family, &other, None, &[9, 5, 3, 1]).apply([
            Change::RemoveEndpoint(key(0), endpoint(family, 9, "there").address),
            Change::Endpoint(key(0), endpoint(family, 4, "there")),
            Change::Endpoint(key(0), endpoint(family, 2, "there")),
        ]);
        let before = reached(&fake, family);
        assert_eq!(before, reached(&other, family));
        let leaving = endpoint(family, 3, "there").address;
        let plan = rig.apply([Change::RemoveEndpoint(key(0), leaving)]);
        let after = reached(&fake, family);
        let moved = before.iter().filter(|(client, to)| after[client] != **to);
        let (moved, own): (Vec<_>, Vec<_>) = (moved.collect(), before.values().filter(|to| **to == leaving).collect());
        assert!(moved.iter().all(|(_, to)| **to == leaving), "{moved:?}");
        assert!(moved.len() == own.len() && (50..150).contains(&own.len()), "{} clients", own.len());
        // A fifth of 2,048 slots; the targets stay.
        assert!((300..520).contains(&plan.add.len()), "{} elements", plan.add.len());
    }
}

#[test]
fn the_address_selects_the_endpoint_of_a_client_without_a_record() {
    for family in Family::BOTH {
        let (fake, recording) = (FakeKernel::new(), FakeKernel::new());
        node(family, &fake, None, &[1, 2, 3]);
        let mut rig = node(family, &recording, Some(100), &[1, 2, 3]);
        let before = reached(&fake, family);
        assert_eq!(before, reached(&recording, family));
        // A record is stronger than the address: clients keep their endpoint when another one is
        // added. Without a record, some clients get the new endpoint.
        rig.apply([Change::Endpoint(key(0), endpoint(family, 4, "there"))]);
        let after = reached(&recording, family);
        let burst = usize::try_from(super::super::layout::picks::RECORDING_BURST / super::rig::SHRINK).unwrap();
        let moved = before.iter().filter(|(client, to)| after[client] != **to).count();
        assert!(moved > 0 && before.iter().take(burst).all(|(client, to)| after[client] == *to), "{moved} moved");
    }
}
