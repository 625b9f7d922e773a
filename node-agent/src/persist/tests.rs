//! Tests that reading a written file gives the same state again. Reading a damaged file must give a
//! complete earlier state or an error, and must never panic.
#![allow(clippy::unwrap_used)]

use std::{fs, os::unix::fs::PermissionsExt as _, path::Path, process::Command, sync::Arc, time::Duration};

use headgate_core::{Change, Node, digest::Digests};
use headgate_proto::v1;
use proptest::{prelude::*, sample::Index};
use prost::Message as _;
use tempfile::TempDir;

use super::{
    file::{Prepared, StateFile},
    file_of,
    load::{self, Loaded},
    open, records_of, remove,
};
use crate::{
    state::{
        AgentState,
        held::{Buckets, OwnNode, Snapshot, StateUpdate},
    },
    testing::{endpoint, key, no_endpoint, service, service_cidr},
};

/// The state of an agent and its file.
struct Agent {
    folder: TempDir,
    file: StateFile,
    shared: AgentState,
    version: u64,
    has_rejections: bool,
}

impl Agent {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut file = StateFile::new(folder.path(), "node-1".into());
        assert!(file.load().unwrap().is_none());
        Self { folder, file, shared: AgentState::persistent("node-1", None), version: 0, has_rejections: false }
    }

    /// An agent that has received and saved a snapshot.
    fn with_state() -> Self {
        let mut agent = Self::new();
        let mut changes = vec![service("web", 80), service("db", 5432), service_cidr("range", 0)];
        changes.extend((1..=200).map(|last| endpoint("web", last, 8080)));
        agent.snapshot(changes);
        assert_eq!(agent.save(), "full");
        agent
    }

    fn snapshot(&mut self, changes: Vec<Change>) {
        let snapshot = Some(Snapshot { buckets: Buckets::All, rejected: Default::default() });
        self.step(changes, snapshot);
    }

    fn batch(&mut self, changes: Vec<Change>) {
        self.step(changes, None);
    }

    fn step(&mut self, changes: Vec<Change>, snapshot: Option<Snapshot>) {
        self.version += 1;
        let positions = vec![v1::SourcePosition { kind: 5, position: 1000 + self.version }];
        self.shared.apply(StateUpdate {
            epoch: 7,
            version: self.version,
            positions,
            changes,
            snapshot,
            has_rejections: self.has_rejections,
            ..StateUpdate::default()
        });
    }

    fn save(&mut self) -> &'static str {
        let prepared = self.file.prepare(&self.shared).unwrap();
        let kind = prepared.kind();
        self.file.commit(prepared).unwrap();
        kind
    }

    fn digests(&self) -> Digests {
        self.shared.with_state(|state| state.digests().clone())
    }

    fn bytes(&self) -> Vec<u8> {
        fs::read(self.file.path()).unwrap()
    }

    fn reload(&self) -> Loaded {
        load::read(&self.file.path(), "node-1").unwrap().unwrap()
    }

    /// Asserts that the file holds the agent's current state.
    fn assert_saved(&self) {
        let loaded = self.reload();
        assert!(loaded.left_out.is_none(), "{:?}", loaded.left_out);
        let held = loaded.restored.held;
        assert_eq!(held.state().digests(), &self.digests());
        let (resume, _, _) = self.shared.begin_stream();
        assert_eq!(held.resume(), resume);
    }
}

fn own_node(node: Option<Node>, position: u64) -> OwnNode {
    let position = v1::SourcePosition { kind: v1::source_position::Kind::Nodes.into(), position };
    OwnNode { revision: 1, node, position: Some(position) }
}

fn node(zone: &str) -> Node {
    Node {
        name: "node-1".into(),
        zone: Some(zone.into()),
        pod_cidrs: vec!["10.1.0.0/24".parse().unwrap()],
        addresses: vec!["192.0.2.1".parse().unwrap()],
        going_away: false,
    }
}

#[test]
fn changes_are_appended_and_read_again() {
    let mut agent = Agent::with_state();
    agent.assert_saved();
    let whole = agent.bytes().len();
    agent.batch(vec![endpoint("web", 201, 8080), no_endpoint("web", 1), service_cidr("second", 4)]);
    agent.batch(vec![endpoint("db", 7, 5432), Change::RemoveService(key("db"))]);
    assert_eq!(agent.save(), "append");
    agent.assert_saved();
    assert!(agent.bytes().len() - whole < 500, "a few changes took {} bytes", agent.bytes().len() - whole);
    agent.batch(vec![service("db", 5433), Change::RemoveServiceCidr("range".into())]);
    assert_eq!(agent.save(), "append");
    agent.assert_saved();
}

#[test]
fn the_node_is_saved_with_the_state() {
    let mut agent = Agent::with_state();
    assert_eq!(agent.reload().restored.node, None);
    agent.shared.set_node(&own_node(Some(node("a")), 20));
    agent.save();
    assert_eq!(agent.reload().restored.node, Some(node("a")));
    agent.assert_saved();
    agent.batch(vec![endpoint("web", 201, 8080)]);
    agent.save();
    assert_eq!(agent.reload().restored.node, Some(node("a")), "an append without a Node keeps the Node");
    agent.assert_saved();
    agent.shared.set_node(&own_node(Some(node("a")), 25));
    agent.save();
    agent.assert_saved();
}

// rows: 107
#[test]
fn row_107_a_deleted_node_is_saved_with_its_last_values_and_stays_ineligible_after_a_restart() {
    let mut agent = Agent::with_state();
    agent.shared.set_node(&own_node(Some(node("a")), 20));
    agent.save();
    agent.shared.set_node(&own_node(None, 30));
    agent.save();
    let gone = Node { going_away: true, ..node("a") };
    agent.assert_saved();
    let restored = agent.reload().restored;
    assert_eq!(restored.node, Some(gone.clone()));
    let restarted = AgentState::persistent("node-1", Some(restored));
    assert_eq!(restarted.node(), Some(gone));
    let is_eligible = || restarted.backlog().health(Duration::from_secs(3600)).is_node_eligible;
    assert!(!is_eligible());
    // A control plane without this Node changes nothing. A Node that is created again replaces the
    // saved Node.
    restarted.set_node(&own_node(None, 31));
    assert!(!is_eligible());
    restarted.set_node(&own_node(Some(node("b")), 32));
    assert!(is_eligible());
    assert_eq!(restarted.node(), Some(node("b")));
}

#[test]
fn a_state_with_rejections_is_saved_without_its_epoch() {
    let mut agent = Agent::with_state();
    let epoch = |agent: &Agent| agent.reload().restored.held.position().unwrap().0;
    assert_eq!(epoch(&agent), 7);
    agent.has_rejections = true;
    agent.batch(vec![endpoint("web", 201, 8080)]);
    assert_eq!(agent.save(), "append");
    assert_eq!(epoch(&agent), 0, "a resume by log would not send the rejected resource again");
    assert_eq!(agent.shared.position(), Some((7, 2)), "the running agent remembers what it rejected");
    agent.file.give_up();
    assert_eq!((agent.save(), epoch(&agent)), ("full", 0));
    agent.has_rejections = false;
    agent.batch(vec![endpoint("web", 202, 8080)]);
    assert_eq!((agent.save(), epoch(&agent)), ("append", 7));
}

#[test]
fn a_state_of_another_program_version_has_no_epoch() {
    let agent = Agent::with_state();
    for other in ["0.0.1", ""] {
        let mut records = records_of(&agent.bytes());
        let (_, point) = records.last_mut().unwrap();
        let written = v1::Resume { agent_version: other.into(), ..v1::Resume::decode(point.as_slice()).unwrap() };
        *point = written.encode_to_vec();
        let records: Vec<_> = records.iter().map(|(kind, payload)| (*kind, payload.as_slice())).collect();
        let loaded = load::read_from(file_of(&records).unwrap().as_slice(), "node-1").unwrap();
        assert_eq!(loaded.restored.held.position(), Some((0, 1)), "the other version may have left out resources");
    }
}

#[test]
fn only_the_owner_may_read_the_file_and_the_folder() {
    let agent = Agent::with_state();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&agent.file.path()), 0o600);
    // A folder that the agent creates gives no access to group and others either.
    let inner = agent.folder.path().join("made/here");
    drop(StateFile::new(&inner, "node-1".into()).load().unwrap());
    assert_eq!(mode(&inner), 0o700);
}

#[test]
fn the_file_is_replaced_when_the_appended_part_outgrows_the_state() {
    let mut agent = Agent::with_state();
    let mut kinds = Vec::new();
    let mut largest = 0;
    for round in 0..80_u16 {
        let all = ["web", "db", "third", "fourth"].into_iter().flat_map(|name| (1..=200).map(move |last| (name, last)));
        agent.batch(all.map(|(name, last)| endpoint(name, last, 1000 + round)).collect());
        kinds.push(agent.save());
        largest = largest.max(agent.bytes().len());
    }
    let full = kinds.iter().filter(|kind| **kind == "full").count();
    assert!((1..=10).contains(&full), "{full} of {}", kinds.len());
    assert!(largest < 600 << 10, "{largest} bytes for a state of some 20 KiB");
    agent.assert_saved();
    let temporary: Vec<_> =
        fs::read_dir(agent.folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(temporary.len(), 2, "{temporary:?}");
}

#[test]
fn too_many_changes_for_an_append_replace_the_file() {
    let mut agent = Agent::with_state();
    for port in 0..100_u8 {
        agent.batch((1..=200).map(|last| endpoint(&format!("many-{port}"), last, 1)).collect());
    }
    assert_eq!(agent.save(), "full");
    agent.assert_saved();
}

#[test]
fn a_restarted_agent_appends_to_the_file() {
    let mut agent = Agent::with_state();
    agent.shared.set_node(&own_node(Some(node("a")), 20));
    agent.save();
    let Agent { folder, file, shared, .. } = agent;
    let before = shared.begin_stream().0;
    file.record_run(false);
    drop(file);
    let mut file = StateFile::new(folder.path(), "node-1".into());
    let restored = file.load().unwrap().unwrap().restored;
    let shared = AgentState::persistent("node-1", Some(restored));
    assert!(shared.is_unconfirmed());
    assert_eq!(shared.begin_stream().0, before);
    let mut agent = Agent { folder, file, shared, version: 1, has_rejections: false };
    agent.batch(vec![endpoint("web", 201, 8080)]);
    assert!(agent.shared.is_unconfirmed(), "the resume is not complete");
    assert_eq!(agent.save(), "append");
    agent.assert_saved();
    assert_eq!(agent.reload().restored.node, Some(node("a")));
}

#[test]
fn an_incomplete_append_is_ignored_and_the_file_replaced() {
    let mut agent = Agent::with_state();
    let (whole, before) = (agent.bytes().len(), agent.digests());
    agent.batch(vec![endpoint("web", 201, 8080)]);
    agent.save();
    let bytes = agent.bytes();
    let Agent { folder, file, shared, version, .. } = agent;
    for cut in whole + 1..bytes.len() {
        fs::write(file.path(), &bytes[..cut]).unwrap();
        let loaded = load::read(&file.path(), "node-1").unwrap().unwrap();
        assert!(loaded.left_out.is_some(), "cut at {cut}");
        assert_eq!(loaded.restored.held.state().digests(), &before);
        assert_eq!(loaded.restored.held.position(), Some((7, 1)));
    }
    drop(file);
    let mut file = StateFile::new(folder.path(), "node-1".into());
    let restored = file.load().unwrap().unwrap().restored;
    drop(shared);
    let shared = AgentState::persistent("node-1", Some(restored));
    let mut agent = Agent { folder, file, shared, version, has_rejections: false };
    agent.batch(vec![endpoint("web", 202, 8080)]);
    assert_eq!(agent.save(), "full", "a file with an unusable end is replaced");
    agent.assert_saved();
}

#[test]
fn files_of_other_nodes_and_formats_have_distinct_errors() {
    let agent = Agent::with_state();
    let bytes = agent.bytes();
    let reason = |bytes: &[u8], node: &str| load::read_from(bytes, node).unwrap_err().to_string();
    assert_eq!(reason(&bytes, "node-2"), "belongs to node node-1");
    assert_eq!(reason(b"", "node-1"), "is not a state file of Headgate");
    assert_eq!(reason(b"{\"some\": \"json document\"}", "node-1"), "is not a state file of Headgate");
    let mut newer = bytes.clone();
    newer[8] = 99;
    assert_eq!(reason(&newer, "node-1"), "has format version 99, and this program reads version 2");
    assert_eq!(reason(&bytes[..12], "node-1"), "ends before the state in it is complete");
    assert!(reason(&bytes[..bytes.len() - 1], "node-1").starts_with("ends in the middle of the record at byte"));
    let mut flipped = bytes;
    flipped[60] ^= 1;
    assert!(reason(&flipped, "node-1").contains("the checksum does not match"));
}

#[test]
fn a_named_pipe_in_place_of_the_file_does_not_block() {
    let folder = tempfile::tempdir().unwrap();
    let mut file = StateFile::new(folder.path(), "node-1".into());
    assert!(Command::new("mkfifo").arg(file.path()).status().unwrap().success());
    assert_eq!(file.load().map(drop).unwrap_err().to_string(), "is not a regular file");
}

#[test]
fn a_second_agent_with_the_same_folder_does_not_write() {
    let mut agent = Agent::with_state();
    let mut second = StateFile::new(agent.folder.path(), "node-1".into());
    let restored = second.load().unwrap().unwrap().restored;
    let shared = AgentState::persistent("node-1", Some(restored));
    let error = second.prepare(&shared).unwrap_err().to_string();
    assert!(error.contains("is in use by another agent"), "{error}");
    second.give_up();
    agent.batch(vec![endpoint("web", 201, 8080)]);
    assert_eq!(agent.save(), "append");
    agent.assert_saved();
    // After the first agent has ended, the second agent replaces the file, because the file has
    // changed since the second agent read it.
    let Agent { folder, file, shared: first, .. } = agent;
    drop((file, first));
    let mut agent = Agent { folder, file: second, shared, version: 50, has_rejections: false };
    agent.batch(vec![endpoint("web", 202, 8080)]);
    assert_eq!(agent.save(), "full");
    agent.assert_saved();
}

#[test]
fn the_file_is_replaced_after_a_failed_write() {
    let mut agent = Agent::with_state();
    agent.batch(vec![endpoint("web", 201, 8080)]);
    let lost = agent.file.prepare(&agent.shared).unwrap();
    assert!(matches!(lost, Prepared::Append { .. }));
    agent.file.give_up();
    agent.batch(vec![endpoint("web", 202, 8080)]);
    assert_eq!(agent.save(), "full");
    agent.assert_saved();
}

#[test]
fn a_folder_that_cannot_be_created_is_named_in_the_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    fs::write(&path, "in the way").unwrap();
    let (restored, _saver) = open(&path.join("state"), "node-1".into(), Duration::from_secs(1));
    assert!(restored.is_none());
    let mut file = StateFile::new(&path.join("state"), "node-1".into());
    let error = file.prepare(&AgentState::persistent("node-1", None)).unwrap_err().to_string();
    assert!(error.contains(path.to_str().unwrap()), "{error}");
}

#[test]
fn cleanup_removes_the_file_and_the_temporary_file() {
    let agent = Agent::with_state();
    // An agent that was killed during a write leaves this file behind.
    let half = agent.folder.path().join("state.new");
    std::fs::write(&half, "half").unwrap();
    remove(agent.folder.path()).unwrap();
    assert!(!agent.file.path().exists() && !half.exists());
    remove(agent.folder.path()).unwrap();
}

#[test]
fn a_full_write_includes_the_changes_that_arrive_meanwhile() {
    let mut agent = Agent::new();
    let services: Vec<String> = (0..300).map(|number| format!("service-{number}")).collect();
    agent.snapshot(services.iter().flat_map(|name| [service(name, 80), endpoint(name, 1, 8080)]).collect());
    let shared = Arc::new(std::mem::replace(&mut agent.shared, AgentState::new("node-1")));
    let churn = {
        let shared = Arc::clone(&shared);
        std::thread::spawn(move || {
            for version in 2..2_000_u64 {
                let name = &services[usize::try_from(version * 7).unwrap() % services.len()];
                let last = u8::try_from(version % 5 + 1).unwrap();
                let change = if version % 3 == 0 { no_endpoint(name, last) } else { endpoint(name, last, 8080) };
                let gone = Change::RemoveService(key(&services[usize::try_from(version).unwrap() % services.len()]));
                let changes = if version % 11 == 0 { vec![change, gone] } else { vec![change] };
                shared.apply(StateUpdate { epoch: 7, version, changes, ..StateUpdate::default() });
            }
        })
    };
    for _ in 0..20 {
        agent.file.give_up();
        let prepared = agent.file.prepare(&shared).unwrap();
        assert!(matches!(prepared, Prepared::Full { .. }));
        agent.file.commit(prepared).unwrap();
        // The read verifies that the digests match the services, which were written one by one.
        assert!(agent.reload().left_out.is_none());
    }
    churn.join().unwrap();
    agent.shared = Arc::try_unwrap(shared).unwrap();
    assert_eq!(agent.save(), "append");
    agent.assert_saved();
}

/// A file with a few appends, and the digests of the state at each of its points.
fn history() -> (Vec<u8>, Vec<Digests>) {
    let mut agent = Agent::with_state();
    let mut points = vec![agent.digests()];
    for round in 0..5_u8 {
        agent.batch(vec![endpoint("web", 201 + round, 8080), no_endpoint("web", 1 + round)]);
        agent.shared.set_node(&own_node(Some(node(&format!("zone-{round}"))), 20));
        assert_eq!(agent.save(), "append");
        points.push(agent.digests());
    }
    (agent.bytes(), points)
}

/// Checks that reading a damaged file gives an error, or one of the states that the file held
/// before the damage.
fn check_damaged(bytes: &[u8], points: &[Digests]) -> Result<(), TestCaseError> {
    if let Ok(loaded) = load::read_from(bytes, "node-1") {
        let digests = loaded.restored.held.state().digests();
        prop_assert!(points.contains(digests), "read a state that was never saved: {:?}", loaded.left_out);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn arbitrary_bytes_are_an_error(bytes in prop::collection::vec(any::<u8>(), 0..4096)) {
        prop_assert!(load::read_from(bytes.as_slice(), "node-1").is_err());
        let mut headed = b"HEADGATE\x02\0\0\0".to_vec();
        headed.extend(&bytes);
        prop_assert!(load::read_from(headed.as_slice(), "node-1").is_err());
    }

    #[test]
    fn changed_or_truncated_bytes_never_give_a_state_that_was_not_saved(
        flips in prop::collection::vec((any::<Index>(), 0..8_u8), 1..4), cut in any::<Index>(), is_cut in any::<bool>(),
    ) {
        let (mut bytes, points) = history();
        for (at, bit) in flips {
            let at = at.index(bytes.len());
            bytes[at] ^= 1 << bit;
        }
        if is_cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        check_damaged(&bytes, &points)?;
    }

    #[test]
    fn copied_pieces_never_give_a_state_that_was_not_saved(from in any::<Index>(), to in any::<Index>(), at in any::<Index>()) {
        let (bytes, points) = history();
        let (from, to) = (from.index(bytes.len()), to.index(bytes.len()));
        let piece = bytes[from.min(to)..from.max(to)].to_vec();
        let mut moved = bytes.clone();
        let at = at.index(bytes.len());
        moved.splice(at..at, piece);
        check_damaged(&moved, &points)?;
    }

    /// Arbitrary payloads with correct checksums, as a defective writer could produce them.
    #[test]
    fn arbitrary_payloads_are_an_error(
        records in prop::collection::vec((0..4_usize, prop::collection::vec(any::<u8>(), 0..200)), 0..8),
    ) {
        use super::format::{Kind, Writer};
        let kinds = [Kind::Changes, Kind::Node, Kind::Point, Kind::Owner];
        let mut writer = Writer::begin(Vec::new()).unwrap();
        writer.record(Kind::Owner, b"node-1").unwrap();
        for (kind, payload) in &records {
            writer.record(kinds[*kind], payload).unwrap();
        }
        let (bytes, _, _) = writer.finish();
        // Arbitrary bytes never form a first point with the right digests.
        prop_assert!(load::read_from(bytes.as_slice(), "node-1").is_err());
    }
}

#[test]
fn no_memory_is_allocated_for_the_stated_length_of_a_record() {
    let mut bytes = b"HEADGATE\x02\0\0\0".to_vec();
    bytes.extend([1, 0, 0, 0x40, 0]);
    let reason = load::read_from(bytes.as_slice(), "node-1").unwrap_err().to_string();
    assert!(reason.starts_with("ends in the middle"), "{reason}");
    bytes.truncate(12);
    bytes.extend([1, 0xff, 0xff, 0xff, 0xff]);
    let reason = load::read_from(bytes.as_slice(), "node-1").unwrap_err().to_string();
    assert!(reason.contains("is not valid"), "{reason}");
}
