//! Limits of ClientIP affinity.

use std::{collections::BTreeSet, net::IpAddr};

use headgate_core::{Change, ClientIpAffinity, Family, Service};
use nftables_netlink::{
    Element, Hook, Kernel as _, Transaction, Value,
    fake::{Action, FakeKernel, FakeNftables, Fate, Packet},
};

use super::{
    super::layout::{
        picks::{MAX_RECORDED_CLIENTS, RECORDING_BURST, clients_map},
        table_name,
    },
    rig::{CLIENTS, CLUSTER, Rig, SHRINK, address, endpoint, key, service},
};

const TIMEOUT_SECONDS: u32 = 100;
/// The sizes in a shrunk layout.
const BURST: u32 = RECORDING_BURST / SHRINK;
const MAP_SIZE: u32 = MAX_RECORDED_CLIENTS / SHRINK;

/// Two Services with affinity and two endpoints each, the endpoints of Service n at n0 and n1.
fn two_services(family: Family, fake: &FakeKernel) -> Rig<FakeNftables> {
    let mut rig = Rig::new(family, fake.connect());
    for number in [1, 2] {
        let session_affinity = Some(ClientIpAffinity { timeout_seconds: TIMEOUT_SECONDS });
        let service = Service { session_affinity, ..service(family, number) };
        let endpoints = [0, 1].map(|n| Change::Endpoint(key(number), endpoint(family, number * 10 + n, "there")));
        rig.apply([Change::from(service)].into_iter().chain(endpoints));
    }
    rig
}

fn client(family: Family, number: u32) -> IpAddr {
    match (family, address(family, CLIENTS, 0)) {
        (Family::V4, _) => (0xc000_0000 + number).to_be_bytes().into(),
        (_, IpAddr::V6(base)) => (u128::from(base) + u128::from(number)).to_be_bytes().into(),
        (_, other) => other,
    }
}

/// The endpoint that a new TCP connection of a client to a Service gets.
fn reached(fake: &FakeKernel, family: Family, from: IpAddr, number: u8) -> IpAddr {
    let mut packet = Packet::new(6, (from, 999), (address(family, CLUSTER, number), 80));
    let walk = fake.walk(Hook::Prerouting, &mut packet);
    match walk.actions.as_slice() {
        [Action::DestinationTranslated(to, 8080)] if walk.fate == Fate::Accepted => *to,
        other => panic!("{other:?} {walk:?}"),
    }
}

fn recorded(rig: &mut Rig<FakeNftables>) -> usize {
    rig.kernel.elements(&table_name(rig.family), &clients_map(TIMEOUT_SECONDS)).unwrap().len()
}

/// Random numbers that lead to the second of two endpoints.
fn second(fake: &FakeKernel, count: usize) {
    fake.set_random_numbers(std::iter::repeat_n(u32::MAX, count));
}

#[test]
fn clients_stay_with_their_endpoint_while_it_exists() {
    for family in Family::BOTH {
        let fake = FakeKernel::new();
        let mut rig = two_services(family, &fake);
        let from = client(family, 1);
        second(&fake, 1);
        let first = reached(&fake, family, from, 1);
        // The next random numbers lead to the other endpoint.
        assert_eq!(reached(&fake, family, from, 1), first);
        fake.advance_ms(90_000);
        assert_eq!(reached(&fake, family, from, 1), first);
        fake.advance_ms(90_000);
        assert_eq!(reached(&fake, family, from, 1), first, "a connection renews the record");
        rig.apply([Change::RemoveEndpoint(key(1), first)]);
        let other = reached(&fake, family, from, 1);
        assert_ne!(other, first);
        rig.apply([Change::Endpoint(key(1), endpoint(family, 19, "there"))]);
        second(&fake, 1);
        assert_eq!(reached(&fake, family, from, 1), other, "the record leads to the new endpoint");
        assert_eq!(recorded(&mut rig), 1);
    }
}

#[test]
fn a_service_port_cannot_fill_the_map_of_clients() {
    for family in Family::BOTH {
        let fake = FakeKernel::new();
        let mut rig = two_services(family, &fake);
        let burst = usize::try_from(BURST).unwrap();
        for number in 0..BURST + 100 {
            reached(&fake, family, client(family, number), 1);
        }
        assert_eq!(recorded(&mut rig), burst, "the other clients have an endpoint, but no record");
        // The port may record as many again within the timeout, and no more.
        fake.advance_ms(u64::from(TIMEOUT_SECONDS) * 500);
        for number in 0..BURST {
            reached(&fake, family, client(family, 1_000_000 + number), 1);
        }
        assert_eq!(recorded(&mut rig), burst + burst / 2);
        const { assert!(2 * BURST <= MAP_SIZE / 8) };
        // The clients of another Service are recorded.
        let before = recorded(&mut rig);
        let from = client(family, 1);
        second(&fake, 1);
        let first = reached(&fake, family, from, 2);
        assert_eq!(reached(&fake, family, from, 2), first);
        assert_eq!(recorded(&mut rig), before + 1);
    }
}

#[test]
fn a_full_map_of_clients_refuses_nobody() {
    let (family, fake) = (Family::V4, FakeKernel::new());
    let mut rig = two_services(family, &fake);
    let record = |number: u32| {
        let key = Value::concatenation(&[Value::host_u32(9999), Value::host_u32(number)]);
        Element::new(key).with_value(Value::concatenation(&[0, 0, 0].map(Value::host_u32)))
    };
    let mut transaction = Transaction::new();
    transaction.add_elements(&table_name(family), clients_map(TIMEOUT_SECONDS), (0..MAP_SIZE).map(record));
    rig.kernel.commit(&transaction).unwrap();
    // Each connection draws a number in the rule that records, and one in the rule that does not.
    second(&fake, 2);
    let reached: BTreeSet<IpAddr> = [0, 1].map(|_| reached(&fake, family, client(family, 1), 1)).into();
    assert_eq!(reached.len(), 2, "the client gets any endpoint");
    assert_eq!(recorded(&mut rig), usize::try_from(MAP_SIZE).unwrap());
}
