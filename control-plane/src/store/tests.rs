#![allow(clippy::unwrap_used)]
//! Tests of the store through its cursors, with a reader that behaves like an agent.

mod arrival;
mod reader;

use std::{collections::BTreeSet, net::Ipv4Addr};

use headgate_core::{Change, Endpoint, EndpointPort, Node, Placement, Protocol, Service, ServiceKey, ServicePort};

use super::*;
use crate::model::NodeChange;
use reader::Reader;

fn store(limits: Limits) -> Store {
    let store = Store::new(limits, Arc::new(Metrics::default()));
    Sink::synced(&store);
    store
}

impl Store {
    fn put(&self, changes: impl IntoIterator<Item = Change>) {
        let changes = changes.into_iter().map(|change| TriggeredChange { change, trigger_unix_ms: 7 }).collect();
        self.commit(Transaction { changes, ..Transaction::default() });
    }
}

/// The log holds each endpoint that has changed recently, and by default up to 98,304 keys.
#[test]
fn an_entry_of_the_log_is_small() {
    let (of_log, of_service) = (size_of::<(log::LogPlace, encode::LoggedKey)>(), size_of::<(IpAddr, log::LogPlace)>());
    assert_eq!((of_log, of_service), (56, 40));
}

fn key(service: u8) -> ServiceKey {
    ServiceKey::new("default", &format!("service-{service}"))
}

fn service(number: u8, port: u16) -> Change {
    let port = ServicePort { name: "http".into(), protocol: Protocol::Tcp, port, node_port: 0 };
    Change::from(Service::new(key(number), vec![Ipv4Addr::new(10, 0, 0, number).into()], vec![port]))
}

fn endpoint(service: u8, host: u16, port: u16) -> Change {
    let [high, low] = host.to_be_bytes();
    let ports = [EndpointPort::new("http", Protocol::Tcp, port)];
    let mut endpoint = Endpoint::new(Ipv4Addr::new(10, 1, high, low).into(), Arc::new(ports));
    endpoint.placement = Placement::on(&format!("node-{}", (host + port) % 4)).into();
    Change::Endpoint(key(service), endpoint)
}

fn remove_endpoint(service: u8, host: u16) -> Change {
    let [high, low] = host.to_be_bytes();
    Change::RemoveEndpoint(key(service), Ipv4Addr::new(10, 1, high, low).into())
}

#[test]
fn snapshots_encode_a_bucket_again_only_after_a_change_in_it() {
    let store = store(Limits::default());
    store.put((1..=50).map(|number| service(number, 80)));
    let snapshot = || {
        let mut cursor = store.cursor(None).1;
        std::iter::from_fn(|| store.next_frame(&mut cursor)).collect::<Vec<_>>()
    };
    let before = snapshot();
    store.put([service(7, 81)]);
    let after = snapshot();
    let shared: BTreeSet<_> = before.iter().map(|frame| frame.as_ptr()).collect();
    let fresh = after.iter().filter(|frame| !shared.contains(&frame.as_ptr())).count();
    assert_eq!(fresh, 2, "only the bucket of service 7 and the end marker are encoded again");
}

#[test]
fn who_sees_a_change_also_sees_its_version() {
    let store = store(Limits::default());
    store.put([service(1, 80)]);
    let address = Ipv4Addr::new(10, 1, 0, 1).into();
    std::thread::scope(|scope| {
        let writing = scope.spawn(|| (0..5_000).for_each(|port| store.put([endpoint(1, 1, port)])));
        while !writing.is_finished() {
            let seen = store.ready_since(&key(1), address).unwrap_or_default();
            assert!(seen <= store.version(), "the state has version {seen}");
        }
    });
}

#[test]
fn streams_that_stop_in_split_steps_use_bounded_memory_and_others_receive_buckets() {
    let limits = Limits { part_bytes: 1000, split_bytes: 8 * 30_000, ..Limits::default() };
    let store = store(limits.clone());
    (0..64).for_each(|port| store.put([service(2, port + 1)]));
    let mut readers: Vec<(Reader, Cursor)> = (0..64).map(|_| (Reader::default(), store.cursor(None).1)).collect();
    for (count, (reader, cursor)) in readers.iter_mut().enumerate() {
        reader.read_all(&store, cursor);
        // Each reader begins its step at a different version.
        store.put([service(2, u16::try_from(count).unwrap() + 100)]);
    }
    store.put((0..1000).map(|host| endpoint(1, host, 80)));
    (0..20).for_each(|port| store.put([service(3, port + 1)]));
    for (reader, cursor) in &mut readers {
        reader.read(&store.next_frame(cursor).unwrap());
    }
    let in_steps = readers.iter().filter(|(_, cursor)| cursor.snapshot_buckets().is_none()).count();
    assert!((8..40).contains(&in_steps), "{in_steps} of 64 streams found room for a step in parts");
    for (reader, cursor) in &mut readers {
        reader.read_all(&store, cursor);
        reader.assert_holds_all_of(&store);
    }
    drop(readers);
    // The bound of the cache applies to steps that no stream holds.
    assert!(limits.split_bytes - store.split_budget.free.available_permits() <= limits.delta_cache_bytes);
}

#[test]
fn batches_carry_the_positions_of_their_versions() {
    let store = store(Limits::default());
    let commit = |position, changes: Vec<Change>| {
        let changes = changes.into_iter().map(|change| TriggeredChange { change, trigger_unix_ms: 0 }).collect();
        let positions = vec![(SourceKind::Services, position)];
        store.commit(Transaction { changes, positions, ..Transaction::default() });
    };
    commit(5, vec![service(1, 80)]);
    let (mut reader, mut cursor) = Reader::following(&store);
    assert_eq!(reader.positions.values().copied().collect::<Vec<_>>(), [5]);
    commit(6, vec![]);
    assert!(store.next_frame(&mut cursor).is_none(), "a position alone creates no version");
    assert_eq!(store.behind(&[(SourceKind::Services, 7)].into()), Some((SourceKind::Services, 6, 7)));
    assert_eq!(store.behind(&[(SourceKind::Services, 6), (SourceKind::Files, 9)].into()), None);
    commit(8, vec![service(1, 81)]);
    reader.read_all(&store, &mut cursor);
    assert_eq!(reader.positions.values().copied().collect::<Vec<_>>(), [8]);
}

#[test]
fn lag_is_measured_from_the_first_missing_version() {
    let store = store(Limits::default());
    assert_eq!(store.lagging_since(0), None);
    store.put([service(1, 80)]);
    let first = store.lagging_since(0).unwrap();
    store.put([service(1, 81)]);
    assert_eq!(store.lagging_since(0), Some(first));
    assert!(store.lagging_since(1).unwrap() >= first);
    assert_eq!((store.lagging_since(2), store.lagging_since(3)), (None, None));
}

fn node_in(zone: &str) -> Node {
    Node { name: "n1".into(), zone: Some(zone.into()), pod_cidrs: Vec::new(), addresses: Vec::new(), going_away: false }
}

#[test]
fn addresses_of_nodes_are_known_as_long_as_a_node_has_them() {
    let store = store(Limits::default());
    let commit = |change| store.commit(Transaction { nodes: vec![change], ..Transaction::default() });
    let at = |name: &str, hosts: std::ops::Range<u8>| {
        let addresses = hosts.map(|host| [192, 0, 2, host].into()).collect();
        NodeChange::Apply(Node { name: name.into(), addresses, ..node_in("a") })
    };
    let known = || (0..=255).filter(|host| store.is_node_address([192, 0, 2, *host].into())).collect::<Vec<u8>>();
    commit(at("n1", 1..3));
    commit(at("n2", 2..4));
    assert_eq!(known(), [1, 2, 3]);
    commit(at("n1", 5..6));
    assert_eq!(known(), [2, 3, 5]);
    commit(NodeChange::Remove("n2".into()));
    assert_eq!(known(), [5]);
    commit(at("n1", 100..200));
    assert_eq!(known(), (100..108).collect::<Vec<u8>>(), "a Node with many addresses has no more shares");
}

/// Each Service that lacks something counts once, and what is shown has a limit.
#[test]
fn conflicts_of_many_services_are_shown_up_to_a_limit() {
    let store = store(Limits::default());
    let port = ServicePort { name: "".into(), protocol: Protocol::Tcp, port: 80, node_port: 0 };
    let claim = |number: u16, external: [u8; 4]| {
        let [high, low] = number.to_be_bytes();
        let key = ServiceKey::new(&format!("tenant-{:03}", number / 8), &format!("service-{number:04}"));
        let mut service = Service::new(key, vec![Ipv4Addr::new(10, 9, high, low).into()], vec![port.clone()]);
        service.external_ips = vec![external.into()];
        Change::from(service)
    };
    // The ClusterIP of the first Service.
    store.put((0..3).map(|number| claim(number, if number == 0 { [192, 0, 2, 1] } else { [10, 9, 0, 0] })));
    let problems = store.conflict_problems();
    let objects: Vec<&str> = problems.iter().map(|problem| problem.object.as_str()).collect();
    assert_eq!(objects, ["Service tenant-000/service-0001", "Service tenant-000/service-0002"]);
    assert_eq!(problems[0].field, "spec.externalIPs");
    assert!(problems[0].message.starts_with("10.9.0.0 belongs to Service tenant-000/service-0000"), "{problems:?}");
    assert_eq!(store.read().state.frontends().losers().len(), 2);
    store.put((3..1_005).map(|number| claim(number, [10, 9, 0, 0])));
    let problems = store.conflict_problems();
    assert_eq!((problems.len(), problems[1_000].object.as_str()), (1_001, "4 more Services"));
    // A namespace with many of them does not hide the others.
    let mut many = claim(2_000, [10, 9, 0, 0]);
    for number in 2_000..3_000_u16 {
        if let Change::Service(service) = &mut many {
            service.key = ServiceKey::new("a-tenant", &number.to_string());
        }
        store.put([many.clone()]);
    }
    let problems = store.conflict_problems();
    let hidden = problems.iter().filter(|problem| problem.object.starts_with("Service a-tenant/")).count();
    assert_eq!((hidden, problems.len()), (10, 1_001));
}
