//! Tests of groups.
#![allow(clippy::unwrap_used)]

use std::{collections::HashSet, net::IpAddr, sync::Arc};

use super::{
    ExistingElements, Lookup, NftablesConfig, NftablesLedger, Selection,
    element::{EndpointGroup, GroupKey, Numbers},
};
use crate::{
    behaviours::view::ServiceSize,
    dataplane::shared::FixedState,
    model::{
        Change, Endpoint, EndpointPort, Family, NodeFacts, Placement, Protocol, Service, ServiceKey, ServicePort,
        Weight,
    },
    state::{Dirty, State},
};

fn endpoints(last_bytes: &[u8]) -> Vec<(IpAddr, u16)> {
    last_bytes.iter().map(|last| ([10, 0, 0, *last].into(), 80)).collect()
}

fn group(slots: Vec<(IpAddr, u16)>) -> EndpointGroup {
    EndpointGroup {
        key: GroupKey { protocol: Protocol::Tcp, port: 80, is_local: false },
        number: 2,
        affinity_timeout_seconds: None,
        hashed_slots: None,
        is_proxy_only: false,
        slots,
    }
}

#[test]
fn endpoints_have_slots_in_proportion_to_their_weights() {
    let mut group = group(Vec::new());
    let mut after = |weights: &[(u8, u32)]| {
        let endpoint = |last: u8| (IpAddr::from([10, 0, 0, last]), 80);
        let wanted = weights.iter().map(|(last, weight)| (endpoint(*last), Weight::new(*weight).unwrap()));
        group.set_endpoints(&wanted.collect::<Vec<_>>(), 4096);
        group.slots.clone()
    };
    assert_eq!(after(&[(1, 4), (2, 2)]), endpoints(&[1, 1, 2]));
    assert_eq!(after(&[(1, 2), (2, 2)]), endpoints(&[1, 2]));
    assert_eq!(after(&[(1, 1), (2, 3)]), endpoints(&[1, 2, 2, 2]));
    assert_eq!(after(&[(2, 3), (3, 1)]), endpoints(&[3, 2, 2, 2]));
    let many: Vec<(u8, u32)> = (0..250).map(|last| (last, if last == 0 { 1 } else { 100 })).collect();
    let slots = after(&many);
    assert!((250..=4096).contains(&slots.len()), "{} slots", slots.len());
    assert!((0..250).all(|last| slots.contains(&endpoints(&[last])[0])));
}

#[test]
fn a_service_uses_random_slots_where_the_kernel_cannot_hash() {
    let key = ServiceKey::new("ns", "web");
    let port = ServicePort { name: "http".into(), protocol: Protocol::Tcp, port: 80, node_port: 0 };
    let mut service = Service::new(key.clone(), vec![[10, 96, 0, 1].into()], vec![port]);
    service.load_balancing = "consistent-hash".into();
    let ports = [EndpointPort::new("http", Protocol::Tcp, 8080)];
    let endpoint = Endpoint::new([10, 244, 0, 1].into(), ports.into());
    let mut state = State::default();
    state.apply(Change::from(service), &mut Dirty::default());
    state.apply(Change::Endpoint(key, endpoint), &mut Dirty::default());
    let selection = |can_hash| {
        let mut ledger = NftablesLedger::new(NftablesConfig { can_hash, ..NftablesConfig::new(Family::V4) });
        ledger.full(&FixedState(&state, &NodeFacts::named("node")), ExistingElements::default());
        ledger.elements().find_map(|element| Some(Lookup::of(&element)?.2.selection)).unwrap()
    };
    assert_eq!((selection(true), selection(false)), (Selection::ByClient(2048), Selection::Random(1)));
}

/// Weights without a common divisor give a Service no more elements than its estimate says.
#[test]
fn the_weights_of_a_service_with_many_ports_are_within_its_size() {
    let key = ServiceKey::new("ns", "web");
    let name = |number: u16| format!("p{number}");
    let port = |number| ServicePort { name: name(number).into(), protocol: Protocol::Tcp, port: number, node_port: 0 };
    let service = Service::new(key.clone(), vec![[10, 96, 0, 1].into()], (1..=100).map(port).collect());
    let mut state = State::default();
    state.apply(Change::from(service), &mut Dirty::default());
    for last in 1..=40 {
        let ports = (1..=100).map(|number| EndpointPort::new(name(number), Protocol::Tcp, 8000 + number)).collect();
        let mut endpoint = Endpoint::new([10, 244, 0, last].into(), ports);
        let weight = Weight::new(if last == 1 { 99 } else { 100 }).unwrap();
        endpoint.placement = Arc::new(Placement { weight, ..Placement::default() });
        state.apply(Change::Endpoint(key.clone(), endpoint), &mut Dirty::default());
    }
    let mut ledger = NftablesLedger::new(NftablesConfig::new(Family::V4));
    ledger.full(&FixedState(&state, &NodeFacts::named("node")), ExistingElements::default());
    let estimate = ServiceSize::of(state.entry(&key).unwrap(), Family::V4).objects();
    let found = ledger.elements().count();
    assert!((4_000..=estimate).contains(&found) && estimate <= 16_484, "{found} elements, {estimate} estimated");
}

#[test]
fn a_released_number_is_used_again_late() {
    let mut numbers = Numbers::besides(&HashSet::from([2, 8]));
    // 4 and 6 are free, but the reserve of free numbers is not full.
    assert_eq!(numbers.take(), 10);
    for number in (12..200).step_by(2) {
        numbers.release(number);
    }
    assert_eq!(numbers.take(), 4);
}
