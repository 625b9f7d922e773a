//! What is written is read again; what is damaged is a whole earlier state or a reason, and never a
//! panic.
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

/// An agent's state and its file.
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

    /// With a snapshot, saved.
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

    /// The file holds exactly what the agent holds.
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
fn what_changes_is_appended_and_read_again() {
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
    assert_eq!(agent.reload().restored.node, Some(node("a")), "it stays");
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
    // A control plane that knows no such node changes nothing; the node that comes back replaces
    // it.
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
    assert_eq!(epoch(&agent), 0, "the log would not bring again what was rejected");
    assert_eq!(agent.shared.position(), Some((7, 2)), "the present program knows what it rejected");
    agent.file.give_up();
    assert_eq!((agent.save(), epoch(&agent)), ("full", 0));
    agent.has_rejections = false;
    agent.batch(vec![endpoint("web", 202, 8080)]);
    assert_eq!((agent.save(), epoch(&agent)), ("append", 7));
}

#[test]
fn a_state_of_another_program_has_no_epoch() {
    let agent = Agent::with_state();
    for other in ["0.0.1", ""] {
        let mut records = records_of(&agent.bytes());
        let (_, point) = records.last_mut().unwrap();
        let written = v1::Resume { agent_version: other.into(), ..v1::Resume::decode(point.as_slice()).unwrap() };
        *point = written.encode_to_vec();
        let records: Vec<_> = records.iter().map(|(kind, payload)| (*kind, payload.as_slice())).collect();
        let loaded = load::read_from(file_of(&records).unwrap().as_slice(), "node-1").unwrap();
        assert_eq!(loaded.restored.held.position(), Some((0, 1)), "it may have used less of what it was sent");
    }
}

#[test]
fn only_root_may_read_it() {
    let agent = Agent::with_state();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&agent.file.path()), 0o600);
    // A folder that is made gets no group and no world either.
    let inner = agent.folder.path().join("made/here");
    drop(StateFile::new(&inner, "node-1".into()).load().unwrap());
    assert_eq!(mode(&inner), 0o700);
}

#[test]
fn the_file_is_written_anew_when_appends_outgrow_it() {
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
fn more_changes_than_are_worth_remembering_write_everything() {
    let mut agent = Agent::with_state();
    for port in 0..100_u8 {
        agent.batch((1..=200).map(|last| endpoint(&format!("many-{port}"), last, 1)).collect());
    }
    assert_eq!(agent.save(), "full");
    agent.assert_saved();
}

#[test]
fn a_restarted_agent_goes_on_with_the_file() {
    let mut agent = Agent::with_state();
    agent.shared.set_node(&own_node(Some(node("a")), 20));
    agent.save();
    let Agent { folder, file, shared, .. } = agent;
    let before = shared.begin_stream().0;
    drop(file);
    let mut file = StateFile::new(folder.path(), "node-1".into());
    let restored = file.load().unwrap().unwrap().restored;
    let shared = AgentState::persistent("node-1", Some(restored));
    assert!(shared.is_unconfirmed());
    assert_eq!(shared.begin_stream().0, before);
    let mut agent = Agent { folder, file, shared, version: 1, has_rejections: false };
    agent.batch(vec![endpoint("web", 201, 8080)]);
    assert!(agent.shared.is_unconfirmed(), "more may follow of what the replica had at the stream's begin");
    assert_eq!(agent.save(), "append");
    agent.assert_saved();
    assert_eq!(agent.reload().restored.node, Some(node("a")));
}

#[test]
fn half_an_append_is_left_out_and_replaced() {
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
    assert_eq!(agent.save(), "full", "nothing is appended behind what cannot be read");
    agent.assert_saved();
}

#[test]
fn others_files_and_formats_are_told_apart() {
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
    assert!(reason(&flipped, "node-1").contains("the checksum does not fit"));
}

#[test]
fn a_pipe_in_the_files_place_holds_up_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let mut file = StateFile::new(folder.path(), "node-1".into());
    assert!(Command::new("mkfifo").arg(file.path()).status().unwrap().success());
    assert_eq!(file.load().map(drop).unwrap_err().to_string(), "is no ordinary file");
}

#[test]
fn a_second_agent_on_the_folder_does_not_write() {
    let mut agent = Agent::with_state();
    let mut second = StateFile::new(agent.folder.path(), "node-1".into());
    let restored = second.load().unwrap().unwrap().restored;
    let shared = AgentState::persistent("node-1", Some(restored));
    let error = second.prepare(&shared).unwrap_err().to_string();
    assert!(error.contains("is held by another agent"), "{error}");
    second.give_up();
    agent.batch(vec![endpoint("web", 201, 8080)]);
    assert_eq!(agent.save(), "append");
    agent.assert_saved();
    // Once the first has gone, the second writes everything: what it has read is not what is there.
    let Agent { folder, file, shared: first, .. } = agent;
    drop((file, first));
    let mut agent = Agent { folder, file: second, shared, version: 50, has_rejections: false };
    agent.batch(vec![endpoint("web", 202, 8080)]);
    assert_eq!(agent.save(), "full");
    agent.assert_saved();
}

#[test]
fn a_failed_write_is_made_good_by_a_whole_file() {
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
fn a_folder_that_cannot_be_is_an_error_with_its_name() {
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
fn clean_up_removes_the_file() {
    let agent = Agent::with_state();
    // Left by one that was killed while it wrote.
    let half = agent.folder.path().join("state.new");
    std::fs::write(&half, "half").unwrap();
    remove(agent.folder.path()).unwrap();
    assert!(!agent.file.path().exists() && !half.exists());
    remove(agent.folder.path()).unwrap();
}

#[test]
fn what_changes_while_everything_is_written_is_in_it() {
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
        // Reading compares the digests of a moment with what was written over a while.
        assert!(agent.reload().left_out.is_none());
    }
    churn.join().unwrap();
    agent.shared = Arc::try_unwrap(shared).unwrap();
    assert_eq!(agent.save(), "append");
    agent.assert_saved();
}

/// A file with a few appends, and the digests at each of its points.
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

/// Whatever is read of a damaged file is a state that it held.
fn check_damaged(bytes: &[u8], points: &[Digests]) -> Result<(), TestCaseError> {
    if let Ok(loaded) = load::read_from(bytes, "node-1") {
        let digests = loaded.restored.held.state().digests();
        prop_assert!(points.contains(digests), "read a state that never was: {:?}", loaded.left_out);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn arbitrary_bytes_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..4096)) {
        prop_assert!(load::read_from(bytes.as_slice(), "node-1").is_err());
        let mut headed = b"HEADGATE\x02\0\0\0".to_vec();
        headed.extend(&bytes);
        prop_assert!(load::read_from(headed.as_slice(), "node-1").is_err());
    }

    #[test]
    fn damage_never_makes_a_new_state(
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
    fn pieces_that_are_moved_never_make_a_new_state(from in any::<Index>(), to in any::<Index>(), at in any::<Index>()) {
        let (bytes, points) = history();
        let (from, to) = (from.index(bytes.len()), to.index(bytes.len()));
        let piece = bytes[from.min(to)..from.max(to)].to_vec();
        let mut moved = bytes.clone();
        let at = at.index(bytes.len());
        moved.splice(at..at, piece);
        check_damaged(&moved, &points)?;
    }

    /// Payloads that are anything, behind checksums that are right, as from a defective writer.
    #[test]
    fn arbitrary_payloads_do_no_harm(
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
        // A first point with the right digests cannot come about by chance.
        prop_assert!(load::read_from(bytes.as_slice(), "node-1").is_err());
    }
}

#[test]
fn a_length_that_is_claimed_takes_no_memory() {
    let mut bytes = b"HEADGATE\x02\0\0\0".to_vec();
    bytes.extend([1, 0, 0, 0x40, 0]);
    let reason = load::read_from(bytes.as_slice(), "node-1").unwrap_err().to_string();
    assert!(reason.starts_with("ends in the middle"), "{reason}");
    bytes.truncate(12);
    bytes.extend([1, 0xff, 0xff, 0xff, 0xff]);
    let reason = load::read_from(bytes.as_slice(), "node-1").unwrap_err().to_string();
    assert!(reason.contains("cannot be"), "{reason}");
}
