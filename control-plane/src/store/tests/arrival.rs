//! Random tests: readers reach the state of the store at any speed, with any interruptions, and
//! with any limits of the store.

use std::net::Ipv4Addr;

use headgate_core::{
    Change, Conditions, Endpoint, EndpointPort, Placement, Protocol, ServiceCidr, reference::Referable,
};
use proptest::prelude::*;

use super::{Reader, endpoint, key, remove_endpoint, service, store};
use crate::store::{Cursor, Limits};

#[derive(Debug, Clone)]
enum Action {
    Commit(Vec<Change>),
    /// A reader receives some messages.
    Read(usize, usize),
    /// Breaks a reader's stream. The reader resumes, with or without its epoch.
    Reconnect(usize, bool),
}

const READERS: usize = 3;

fn any_change() -> impl Strategy<Value = Change> {
    let cidr = |name: u8, host: u8| {
        let cidrs = vec![ipnet::IpNet::new(Ipv4Addr::new(10, host, 0, 0).into(), 16).unwrap()];
        Change::ServiceCidr(ServiceCidr { name: format!("cidr-{name}").into(), cidrs })
    };
    prop_oneof![
        (0..6_u8, 1..4_u16).prop_map(|(number, port)| service(number, port)),
        (0..6_u8).prop_map(|number| Change::RemoveService(key(number))),
        (0..6_u8, 0..5_u16, 1..4_u16).prop_map(|(number, host, port)| endpoint(number, host, port)),
        (0..6_u8, 0..5_u16, 1..4_u16, 0..4_u8).prop_map(|(number, host, port, state)| mixed(number, host, port, state)),
        (0..6_u8, 0..5_u16).prop_map(|(number, host)| remove_endpoint(number, host)),
        (0..2_u8, 0..3_u8).prop_map(move |(name, host)| cidr(name, host)),
        (0..2_u8).prop_map(|name| Change::RemoveServiceCidr(format!("cidr-{name}").into())),
    ]
}

/// An endpoint with a second port, which may have its own conditions, its own node, or both.
fn mixed(number: u8, host: u16, port: u16, state: u8) -> Change {
    let Change::Endpoint(key, endpoint) = endpoint(number, host, port) else { unreachable!() };
    let terminating = Conditions { ready: false, serving: true, terminating: true };
    let second = EndpointPort {
        conditions: (state & 1 != 0).then_some(terminating),
        placement: (state & 2 != 0).then(|| Placement::on(&format!("node-{port}")).into()),
        ..EndpointPort::new("metrics", Protocol::Tcp, 9090)
    };
    let ports = endpoint.ports.iter().cloned().chain([second]).collect();
    Change::Endpoint(key, Endpoint { ports, ..endpoint })
}

fn any_action() -> impl Strategy<Value = Action> {
    prop_oneof![
        3 => prop::collection::vec(any_change(), 0..12).prop_map(Action::Commit),
        3 => (0..READERS, 1..6_usize).prop_map(|(reader, messages)| Action::Read(reader, messages)),
        1 => (0..READERS, any::<bool>()).prop_map(|(reader, known)| Action::Reconnect(reader, known)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    /// Each reader ends with the state of the store, at any speed, with any interruptions, and with
    /// any limits of the store.
    #[test]
    fn every_reader_reaches_the_state_of_the_store(
        actions in prop::collection::vec(any_action(), 1..80),
        max_tombstones in 0..8_usize,
        max_delta_changes in prop_oneof![Just(0_usize), Just(5), Just(1000)],
        part_bytes in prop_oneof![Just(1_usize), Just(100), Just(1 << 18)],
        split_bytes in prop_oneof![Just(0_usize), Just(8 * 400), Just(1 << 20)],
    ) {
        let limits =
            Limits { max_tombstones, delta_cache_bytes: 500, max_delta_changes, part_bytes, split_bytes };
        let store = store(limits);
        let mut readers: Vec<(Reader, Cursor)> = (0..READERS).map(|_| (Reader::default(), store.cursor(None).1)).collect();
        for action in actions {
            match action {
                Action::Commit(changes) => store.put(changes),
                Action::Read(reader, messages) => {
                    let (reader, cursor) = &mut readers[reader];
                    for _ in 0..messages {
                        match store.next_frame(cursor) {
                            Some(frame) => reader.read(&frame),
                            None => break,
                        }
                    }
                }
                Action::Reconnect(reader, is_known) => {
                    let (reader, cursor) = &mut readers[reader];
                    let epoch = if is_known && !reader.ends.is_empty() { store.epoch() } else { 0 };
                    *cursor = reader.resume(&store, epoch).1;
                }
            }
        }
        for (reader, cursor) in &mut readers {
            reader.read_all(&store, cursor);
            reader.assert_holds_all_of(&store);
        }
        let inner = store.read();
        prop_assert!(inner.log.tombstones() <= max_tombstones);
        let live = inner.state.digests().resource_count();
        prop_assert_eq!(inner.placements.len(), Referable::of(&inner.state).placements.len());
        prop_assert!(inner.log.len() as u64 <= live + inner.log.tombstones() as u64);
        prop_assert!(inner.log.len() <= max_tombstones + max_delta_changes);
    }
}

#[test]
fn readers_on_other_threads_reach_the_state_of_the_store_during_commits() {
    let store = store(Limits {
        max_tombstones: 20,
        delta_cache_bytes: 500,
        max_delta_changes: 40,
        part_bytes: 100,
        split_bytes: 8000,
    });
    let commits = 2000_u16;
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let mut reader = Reader::default();
                let mut cursor = store.cursor(None).1;
                while reader.ends.is_empty() || reader.version < commits.into() {
                    match store.next_frame(&mut cursor) {
                        Some(frame) => reader.read(&frame),
                        None => std::thread::yield_now(),
                    }
                }
                reader.assert_holds_all_of(&store);
            });
        }
        for round in 0..commits {
            let number = u8::try_from(round % 50).unwrap();
            // Every commit has an effect, so the last version is known.
            let change = if round / 50 % 2 == 0 { endpoint(number, 1, round + 1) } else { remove_endpoint(number, 1) };
            store.put([change]);
        }
    });
}
