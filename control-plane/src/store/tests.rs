#![allow(clippy::unwrap_used)]
//! Tests of the store through its cursors, with a reader that behaves like an agent.

mod arrival;
mod reader;

use std::{collections::BTreeSet, net::Ipv4Addr};

use headgate_core::{
    Change, Endpoint, EndpointPort, Node, Placement, Protocol, Service, ServiceKey, ServicePort, digest,
};
use headgate_proto::{PREFIX_BYTES, v1};
use prost::Message as _;
use v1::server_message::Body;

use super::*;
use crate::model::NodeChange;
use reader::{Reader, resume_of};

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
    let (of_log, of_service) = (size_of::<(log::LogPlace, log::LoggedKey)>(), size_of::<(IpAddr, log::LogPlace)>());
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
fn a_new_reader_gets_everything_then_only_changes() {
    let store = store(Limits::default());
    store.put((1..=20).flat_map(|number| [service(number, 80), endpoint(number, 1, 8080), endpoint(number, 2, 8080)]));
    assert_eq!(store.cursor(None).0, ResumeMode::Full);
    let (mut reader, mut cursor) = Reader::following(&store);
    assert_eq!((reader.resources, reader.ends.len(), cursor.snapshots()), (60, 1, 1));
    assert_eq!(cursor.resources(), 60);
    reader.assert_holds_all_of(&store);

    store.put([endpoint(3, 1, 9090)]);
    store.put([remove_endpoint(3, 2)]);
    reader.read_all(&store, &mut cursor);
    assert_eq!((reader.batches, reader.resources, reader.removals), (1, 61, 1));
    reader.assert_holds_all_of(&store);
}

#[test]
fn an_empty_store_sends_an_end_marker() {
    let store = store(Limits::default());
    let mut reader = Reader::default();
    let frames = reader.read_all(&store, &mut store.cursor(None).1);
    assert_eq!((frames.len(), reader.ends[0].resource_count), (1, 0));
}

#[test]
fn the_log_keeps_each_key_once() {
    let store = store(Limits::default());
    for port in 1..=500 {
        store.put([service(1, port), endpoint(1, 1, port)]);
        store.put([remove_endpoint(1, 1)]);
        store.put([remove_endpoint(1, 1)]);
    }
    assert_eq!(store.version(), 1000, "a change without an effect creates no version");
    assert_eq!((store.read().log.len(), store.read().log.tombstones()), (2, 1));
}

#[test]
fn a_slow_reader_skips_to_current_values() {
    let store = store(Limits::default());
    let (mut reader, mut cursor) = Reader::following(&store);
    for port in 1..=1000 {
        store.put([service(1, port), endpoint(1, port % 3, port)]);
    }
    reader.read_all(&store, &mut cursor);
    assert_eq!((reader.batches, reader.resources), (1, 4));
    reader.assert_holds_all_of(&store);
}

#[test]
fn streams_at_the_same_version_get_the_same_bytes() {
    let store = store(Limits::default());
    store.put((1..=50).flat_map(|number| [service(number, 80), endpoint(number, 1, 8080)]));
    let mut cursors: Vec<Cursor> = (0..2).map(|_| store.cursor(None).1).collect();
    let mut read = || -> Vec<Vec<*const u8>> {
        let pointers = |cursor: &mut Cursor| {
            let frames = std::iter::from_fn(|| store.next_frame(cursor));
            frames.map(|frame| (frame.as_ptr(), frame)).collect::<Vec<_>>()
        };
        let kept: Vec<_> = cursors.iter_mut().map(pointers).collect();
        kept.iter().map(|frames| frames.iter().map(|(pointer, _)| *pointer).collect()).collect()
    };
    let snapshots = read();
    // Each stream has its own end marker.
    assert_eq!(snapshots[0].len(), snapshots[1].len());
    assert_eq!(snapshots[0][..snapshots[0].len() - 1], snapshots[1][..snapshots[1].len() - 1]);
    store.put([endpoint(1, 1, 9090)]);
    let batches = read();
    assert_eq!((batches[0].len(), &batches[0]), (1, &batches[1]), "both streams receive the same batch");
    for port in 1..=100 {
        store.put([endpoint(1, 1, port)]);
    }
    let skipping = read();
    assert_eq!((skipping[0].len(), &skipping[0]), (1, &skipping[1]), "both streams receive the same step");
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
fn tombstones_are_bounded_and_move_the_floor() {
    let store = store(Limits { max_tombstones: 10, ..Limits::default() });
    store.put((0..100).map(|host| endpoint(1, host, 80)));
    store.put([service(1, 80), service(2, 80)]);
    let (mut readers, mut cursors): (Vec<_>, Vec<_>) = (0..2).map(|_| Reader::following(&store)).unzip();
    (0..10).for_each(|host| store.put([remove_endpoint(1, host)]));
    assert_eq!((store.read().log.floor(), store.read().log.tombstones()), (0, 10));
    readers[0].read_all(&store, &mut cursors[0]);
    (10..15).for_each(|host| store.put([remove_endpoint(1, host)]));
    assert_eq!((store.read().log.floor(), store.read().log.tombstones()), (7, 10));

    let (mode, _) = store.cursor(Some(&resume_of(&readers[0], store.epoch())));
    assert_eq!(mode, ResumeMode::Log);
    let (mode, _) = store.cursor(Some(&resume_of(&readers[1], store.epoch())));
    assert_eq!(mode, ResumeMode::Digests);
    for (reader, cursor) in readers.iter_mut().zip(&mut cursors) {
        reader.read_all(&store, cursor);
        reader.assert_holds_all_of(&store);
    }
    assert_eq!((readers[0].ends.len(), readers[1].ends.len()), (1, 2), "only the cursor below the floor needs buckets");
    assert_eq!(readers[1].ends[1].buckets, [u32::from(digest::service_bucket(&key(1)))]);
}

#[test]
fn a_version_with_more_removals_than_the_log_holds_is_sent_by_buckets() {
    let store = store(Limits { max_tombstones: 3, ..Limits::default() });
    store.put((0..10).map(|host| endpoint(1, host, 80)));
    let (mut reader, mut cursor) = Reader::following(&store);
    store.put((0..10).map(|host| remove_endpoint(1, host)));
    reader.read_all(&store, &mut cursor);
    assert_eq!((reader.batches, reader.ends.len()), (0, 2));
    reader.assert_holds_all_of(&store);
}

#[test]
fn resume_by_the_log_sends_only_later_changes() {
    let store = store(Limits::default());
    store.put((1..=50).map(|number| service(number, 80)));
    let (mut reader, _) = Reader::following(&store);
    let (mode, mut cursor) = reader.resume(&store, store.epoch());
    assert_eq!(mode, ResumeMode::Log);
    assert!(store.next_frame(&mut cursor).is_none());
    store.put([Change::RemoveService(key(4)), service(5, 81)]);
    reader.read_all(&store, &mut cursor);
    assert_eq!((cursor.resources(), reader.removals), (2, 1));
    reader.assert_holds_all_of(&store);
}

#[test]
fn resume_by_digests_sends_only_buckets_that_differ() {
    let (old, new) = (store(Limits::default()), store(Limits::default()));
    let everything = || (1..=200).flat_map(|number| [service(number, 80), endpoint(number, 1, 80)]);
    old.put(everything());
    new.put(everything());
    let (mut reader, _) = Reader::following(&old);

    let (mode, mut cursor) = reader.resume(&new, old.epoch());
    assert_eq!(mode, ResumeMode::Digests);
    let before = reader.resources;
    let frames = reader.read_all(&new, &mut cursor);
    assert_eq!((frames.len(), reader.resources), (1, before), "no bucket differs, so only the end marker is sent");

    new.put([remove_endpoint(9, 1), Change::RemoveService(key(9)), service(10, 81)]);
    let (mode, mut cursor) = reader.resume(&new, 0);
    assert_eq!(mode, ResumeMode::Digests);
    reader.read_all(&new, &mut cursor);
    reader.assert_holds_all_of(&new);
    let expected: BTreeSet<u32> = [9, 10].map(|number| digest::service_bucket(&key(number)).into()).into();
    assert_eq!(reader.ends.last().unwrap().buckets, expected.into_iter().collect::<Vec<_>>());
}

#[test]
fn a_large_step_is_split_and_applied_as_a_whole() {
    let store = store(Limits::default());
    let (mut reader, mut cursor) = Reader::following(&store);
    store.put((0..30_000).map(|host| endpoint(1, host, 80)).chain([service(1, 80)]));
    let mut frames = Vec::new();
    while let Some(frame) = store.next_frame(&mut cursor) {
        assert_eq!(reader.version, 0, "nothing is applied before the last part");
        reader.read(&frame);
        frames.push(frame);
    }
    assert!(frames.len() > 1);
    reader.assert_holds_all_of(&store);
}

#[test]
fn a_stream_in_the_middle_of_a_split_step_receives_the_rest_despite_other_streams() {
    let store = store(Limits { part_bytes: 1000, ..Limits::default() });
    (0..64).for_each(|port| store.put([service(2, port + 1)]));
    let (mut reader, mut cursor) = Reader::following(&store);
    store.put((0..300).map(|host| endpoint(1, host, 80)));
    reader.read(&store.next_frame(&mut cursor).unwrap());
    // New versions make the cached step too old for new streams. After that, a hostile node resumes
    // from every version, including the version of the reader.
    (0..20).for_each(|port| store.put([service(1, port + 1)]));
    for version in 1..=64 {
        let resume = Resume { epoch: store.epoch(), version, ..Resume::default() };
        assert!(store.next_frame(&mut store.cursor(Some(&resume)).1).is_some());
    }
    reader.read_all(&store, &mut cursor);
    reader.assert_holds_all_of(&store);
    assert_eq!((reader.ends.len(), reader.batches), (1, 2), "the split step, and one step with the later changes");
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
fn a_cursor_far_behind_the_head_receives_buckets() {
    let store = store(Limits { max_delta_changes: 100, ..Limits::default() });
    store.put([service(1, 80), service(2, 80)]);
    let (mut reader, mut cursor) = Reader::following(&store);
    store.put((0..101).map(|host| endpoint(1, host, 80)));
    store.put([endpoint(1, 0, 81)]);
    (0..20).for_each(|port| store.put([service(2, port + 1)]));
    reader.read_all(&store, &mut cursor);
    assert_eq!(reader.ends.len(), 2);
    reader.assert_holds_all_of(&store);
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
fn bookmarks_move_the_positions_of_the_replica_and_are_not_sent() {
    let store = store(Limits::default());
    store.put([service(1, 80)]);
    let (mut reader, mut cursor) = Reader::following(&store);
    store.commit(Transaction { bookmarks: vec![(SourceKind::Nodes, 900)], ..Transaction::default() });
    let changes = vec![TriggeredChange { change: service(2, 80), trigger_unix_ms: 0 }];
    let positions = vec![(SourceKind::Services, 901)];
    store.commit(Transaction { changes, positions, ..Transaction::default() });
    reader.read_all(&store, &mut cursor);
    assert_eq!(reader.positions.values().copied().collect::<Vec<_>>(), [901]);
    assert!(!store.changed_positions().contains_key(&SourceKind::Nodes));
    // At another replica, Nodes last changed at position 900. This replica has not missed that
    // change.
    assert_eq!(store.behind(&[(SourceKind::Nodes, 900)].into()), None);
    assert_eq!(store.behind(&[(SourceKind::Nodes, 901)].into()), Some((SourceKind::Nodes, 900, 901)));
}

#[test]
fn a_batch_carries_its_trigger_time() {
    let store = store(Limits::default());
    let (_, mut cursor) = Reader::following(&store);
    store.put([endpoint(1, 1, 80)]);
    let frame = store.next_frame(&mut cursor).unwrap();
    let Some(Body::Batch(batch)) = v1::ServerMessage::decode(&frame[PREFIX_BYTES..]).unwrap().body else { panic!() };
    let changes = batch.changes.unwrap();
    assert_eq!(changes.trigger_unix_ms(&changes.endpoints[0]), 7);
}

#[test]
fn a_reader_at_the_head_receives_references_to_values_that_it_holds() {
    let store = store(Limits::default());
    store.put([service(1, 80), endpoint(1, 1, 80), endpoint(1, 2, 80)]);
    let mut cursor = store.cursor(None).1;
    let mut reader = Reader::default();
    // A change arrives while the snapshot is read, so parts of the snapshot may contain it.
    while reader.ends.is_empty() {
        reader.read(&store.next_frame(&mut cursor).unwrap());
        store.put([endpoint(1, 5, 80)]);
    }
    reader.read_all(&store, &mut cursor);
    assert_eq!(reader.references, 0);
    store.put([endpoint(1, 3, 80)]);
    reader.read_all(&store, &mut cursor);
    assert_eq!(reader.references, 1, "the service is known, the node is new");
    (0..50).for_each(|round| store.put([endpoint(1, 3 + round % 2 * 4, 80), remove_endpoint(1, 6)]));
    reader.read_all(&store, &mut cursor);
    assert_eq!((reader.batches, reader.references), (3, 3), "a step refers only to values older than its start");

    // A service that was removed and added again is sent without references, even to readers that
    // have received the service before.
    store.put([Change::RemoveService(key(1))]);
    reader.read_all(&store, &mut cursor);
    store.put([service(1, 81), endpoint(1, 3, 80)]);
    reader.read_all(&store, &mut cursor);
    assert_eq!(reader.references, 3, "the endpoint has not changed, so it is not sent");
    store.put([service(2, 80), endpoint(2, 9, 80)]);
    reader.read_all(&store, &mut cursor);
    assert_eq!(reader.references, 4, "the node is known, the service is new");
    reader.assert_holds_all_of(&store);
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
fn a_node_has_the_position_at_which_it_changed() {
    let store = store(Limits::default());
    let nodes = SourceKind::Nodes;
    let commit = |nodes, positions, bookmarks| {
        store.commit(Transaction { nodes, positions, bookmarks, ..Transaction::default() });
    };
    let position = |name: &str| store.node(name).position.map(|(kind, position)| (kind == nodes, position));
    assert_eq!(position("n1"), None);
    commit(vec![NodeChange::Apply(node_in("a"))], vec![(nodes, 10)], Vec::new());
    commit(vec![NodeChange::Apply(node_in("a"))], vec![(nodes, 11)], vec![(nodes, 12)]);
    assert_eq!(position("n1"), Some((true, 10)), "the Node did not change at 11");
    let other = Node { name: "n2".into(), ..node_in("a") };
    commit(vec![NodeChange::Apply(other)], vec![(nodes, 13), (SourceKind::Services, 90)], vec![(nodes, 14)]);
    assert_eq!((position("n1"), position("n2")), (Some((true, 10)), Some((true, 13))));
    assert_eq!(position("n3"), Some((true, 13)), "without a Node, the last change of any Node counts");
    commit(vec![NodeChange::Apply(node_in("b"))], Vec::new(), vec![(nodes, 20)]);
    assert_eq!(position("n1"), Some((true, 20)), "without a position, the bookmark counts");
    commit(vec![NodeChange::Remove("n1".into())], vec![(nodes, 21)], Vec::new());
    assert_eq!(position("n1"), Some((true, 21)));
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

#[test]
fn observers_are_notified_of_changed_nodes() {
    let store = store(Limits::default());
    let node = node_in;
    let commit = |change| store.commit(Transaction { nodes: vec![change], ..Transaction::default() });
    let notified = Arc::new(Notified::default());
    let observer: Arc<dyn NodeObserver> = Arc::<Notified>::clone(&notified);
    store.observe_nodes(Arc::downgrade(&observer));
    commit(NodeChange::Apply(node("a")));
    assert_eq!(store.node("n1").node.unwrap().zone.as_deref(), Some("a"));
    commit(NodeChange::Apply(node("a")));
    assert_eq!(*notified.0.lock().unwrap(), ["n1"], "the second commit changes nothing");
    commit(NodeChange::Remove("n1".into()));
    assert!(store.node("n1").node.is_none() && notified.0.lock().unwrap().len() == 2);
    assert_eq!(store.version(), 0, "Nodes create no version");
    drop((notified, observer));
    commit(NodeChange::Apply(node("b")));
    for _ in 0..100 {
        let passing: Arc<dyn NodeObserver> = Arc::new(Notified::default());
        store.observe_nodes(Arc::downgrade(&passing));
    }
    assert!(store.read().nodes.observers().is_empty());
}

#[derive(Default)]
struct Notified(Mutex<Vec<String>>);

impl NodeObserver for Notified {
    fn node_changed(&self, name: &str) {
        self.0.lock().unwrap().push(name.to_owned());
    }

    fn reserved_changed(&self) {
        self.0.lock().unwrap().push("reserved".to_owned());
    }
}

#[test]
fn observers_are_notified_once_of_what_is_reserved() {
    let store = store(Limits::default());
    let notified = Arc::new(Notified::default());
    let observer: Arc<dyn NodeObserver> = Arc::<Notified>::clone(&notified);
    store.observe_nodes(Arc::downgrade(&observer));
    let all = [(Protocol::Udp, ([192, 0, 2, 1], 53).into())].into();
    store.reserve(&all);
    store.reserve(&all);
    assert_eq!(*notified.0.lock().unwrap(), ["reserved"]);
    let reserved = store.reserved();
    assert_eq!((reserved.len(), reserved[0].protocol()), (1, v1::Protocol::Udp));
}

#[test]
fn a_watcher_pages_through_changes_and_skips_to_newest_values() {
    let store = store(Limits::default());
    store.put([service(1, 80)]);
    let place = store.watch_cursor();
    assert!(store.watch_page(place, 10).changes.is_empty());
    for port in 1..=50 {
        store.put([service(1, port), service(2, port)]);
    }
    store.put([Change::RemoveService(key(1))]);
    let first = store.watch_page(place, 1);
    let second = store.watch_page(first.next, 10);
    assert_eq!(first.changes, [(51, service(2, 50))]);
    assert_eq!(second.changes, [(52, Change::RemoveService(key(1)))]);
    assert!(store.watch_page(second.next, 10).changes.is_empty());
}

#[test]
fn the_log_is_bounded_and_reports_missing_changes() {
    let store = store(Limits { max_tombstones: 10, max_delta_changes: 20, ..Limits::default() });
    let place = store.watch_cursor();
    store.put((0..100).map(|host| endpoint(1, host, 80)));
    store.put([service(1, 80)]);
    assert_eq!((store.read().log.len(), store.read().log.floor()), (30, 1));
    assert!(store.watch_page(place, 10).is_incomplete);
    assert!(!store.watch_page(store.watch_cursor(), 10).is_incomplete);
    let versions: BTreeSet<u64> = store.endpoints(&key(1)).into_iter().map(|(_, version)| version).collect();
    assert_eq!((versions, store.version_of(&key(1), None, false)), (BTreeSet::from([1]), Some(2)));
    assert_eq!(store.version_of(&key(9), None, true), Some(1), "the service did not exist at version 1");
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
