//! Tests that reading a written file gives the same state again. Reading a damaged file must give
//! an error, and must never panic.
#![allow(clippy::unwrap_used)]

use std::{
    collections::BTreeSet,
    fs,
    net::{Ipv6Addr, SocketAddr},
    os::unix::fs::PermissionsExt as _,
    path::Path,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use headgate_core::{Change, Dirty, Family, Node, Protocol, digest::Digests, frontends::Frontend};
use headgate_proto::v1;
use proptest::{prelude::*, sample::Index};
use prost::Message as _;
use sha2::{Digest as _, Sha256};
use tempfile::TempDir;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::{
    Folder, MAGIC, RECORD_BYTES, REPLICAS_FILE, RUN_FILE, STATE_FILE, SaveMetrics, Saver, StateFile, StatePart,
    newer_rules, open, read_from, read_replicas, read_state, remove,
};
use crate::{
    state::{
        AgentState, OwnNode, Restored, Snapshot, StateUpdate, all_buckets,
        progress::{Failure, Programmed, Progress, Target},
    },
    testing::{endpoint, key, no_endpoint, service, service_cidr},
};

/// The state of an agent and its file.
struct Agent {
    folder: TempDir,
    file: StateFile,
    shared: Arc<AgentState>,
    version: u64,
    has_rejections: bool,
}

impl Agent {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut file = file_in(folder.path());
        assert!(file.load().unwrap().is_none());
        let shared = Arc::new(AgentState::new("node-1"));
        Self { folder, file, shared, version: 0, has_rejections: false }
    }

    /// An agent that has received and saved a snapshot.
    fn with_state() -> Self {
        let mut agent = Self::new();
        let mut changes = vec![service("web", 80), service("db", 5432), service_cidr("range", 0)];
        changes.extend((1..=200).map(|last| endpoint("web", last, 8080)));
        agent.snapshot(changes);
        agent.save();
        agent
    }

    fn snapshot(&mut self, changes: Vec<Change>) {
        let snapshot = Some(Snapshot { buckets: all_buckets(), rejected: Default::default() });
        self.step(changes, snapshot);
    }

    fn batch(&mut self, changes: Vec<Change>) {
        self.step(changes, None);
    }

    fn step(&mut self, changes: Vec<Change>, snapshot: Option<Snapshot>) {
        self.version += 1;
        let step = StateUpdate { snapshot, has_rejections: self.has_rejections, ..update(self.version, changes) };
        self.shared.apply(step);
    }

    fn save(&mut self) {
        self.file.write(&self.shared).unwrap();
        self.file.commit().unwrap();
    }

    fn digests(&self) -> Digests {
        self.shared.with_state(|state| state.digests().clone())
    }

    fn bytes(&self) -> Vec<u8> {
        fs::read(self.file.path()).unwrap()
    }

    fn reload(&self) -> Restored {
        read_state(&Folder::new(self.folder.path()), "node-1").unwrap().unwrap()
    }

    /// Asserts that the file holds the agent's current state.
    fn assert_saved(&self) {
        let held = self.reload().held;
        assert_eq!(held.state().digests(), &self.digests());
        let (resume, _, _) = self.shared.begin_stream();
        assert_eq!(held.resume(), resume);
    }
}

fn file_in(folder: &Path) -> StateFile {
    StateFile::new(Box::new(Folder::new(folder)), "node-1".into())
}

fn update(version: u64, changes: Vec<Change>) -> StateUpdate {
    let positions = vec![v1::SourcePosition { kind: 5, position: 1000 + version }];
    StateUpdate { epoch: 7, version, positions, changes, ..StateUpdate::default() }
}

fn with_checksum(content: &[u8]) -> Vec<u8> {
    [content, &Sha256::digest(content)[..]].concat()
}

fn own_node(node: Option<Node>, position: u64) -> OwnNode {
    let position = v1::SourcePosition { kind: v1::source_position::Kind::Nodes.into(), position };
    OwnNode { revision: 1, node, position: Some(position), reserved: reserved() }
}

fn reserved() -> BTreeSet<Frontend> {
    [
        Frontend::Address([192, 0, 2, 9].into(), Protocol::Tcp, 7443),
        Frontend::Address([0x2001, 0xdb8, 0, 0, 0, 0, 0, 9].into(), Protocol::Tcp, 7443),
        Frontend::NodePort(Family::V6, Protocol::Tcp, 7443),
    ]
    .into()
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
fn what_is_reserved_is_read_again() {
    let mut agent = Agent::with_state();
    agent.shared.set_node(&own_node(None, 20));
    agent.save();
    assert_eq!(agent.reload().held.reserved, reserved());
}

// rows: 107
#[test]
fn row_107_a_deleted_node_is_saved_with_its_last_values_and_stays_ineligible_after_a_restart() {
    let mut agent = Agent::with_state();
    agent.shared.set_node(&own_node(Some(node("a")), 20));
    agent.save();
    assert_eq!(agent.reload().node, Some(node("a")));
    agent.shared.set_node(&own_node(None, 30));
    agent.save();
    let gone = Node { going_away: true, ..node("a") };
    agent.assert_saved();
    let restored = agent.reload();
    assert_eq!(restored.node, Some(gone.clone()));
    let restarted = AgentState::restored("node-1", restored);
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
fn a_state_of_another_program_version_has_no_epoch() {
    for other in ["0.0.1", ""] {
        let point = v1::Resume { epoch: 7, version: 1, agent_version: other.into(), ..v1::Resume::default() };
        let part = StatePart { node_name: "node-1".into(), point: Some(point), ..StatePart::default() };
        let bytes = with_checksum(&[MAGIC.to_vec(), part.encode_length_delimited_to_vec()].concat());
        let position = read_from(&bytes, "node-1").unwrap().held.position();
        assert_eq!(position, Some((0, 1)), "the other version may have left out resources");
    }
}

/// Steps that arrive while the file is written. With the steps since the version in the file, which
/// a resume by log sends, the state in the file becomes the state of the agent.
#[test]
fn a_resume_by_log_brings_what_changed_during_a_write() {
    let mut agent = Agent::new();
    let services: Vec<String> = (0..300).map(|number| format!("service-{number}")).collect();
    agent.snapshot(services.iter().flat_map(|name| [service(name, 80), endpoint(name, 1, 8080)]).collect());
    let changes = move |version: u64| {
        let name = &services[usize::try_from(version * 7).unwrap() % services.len()];
        let last = u8::try_from(version % 5 + 1).unwrap();
        let change = if version.is_multiple_of(3) { no_endpoint(name, last) } else { endpoint(name, last, 8080) };
        let other = &services[usize::try_from(version).unwrap() % services.len()];
        let other = if version.is_multiple_of(2) { service(other, 81) } else { Change::RemoveService(key(other)) };
        vec![change, other]
    };
    let writer = {
        let (shared, changes) = (Arc::clone(&agent.shared), changes.clone());
        thread::spawn(move || (2..2_000).for_each(|version| shared.apply(update(version, changes(version)))))
    };
    let mut files = Vec::new();
    while !writer.is_finished() || files.is_empty() {
        agent.save();
        files.push(agent.reload().held);
    }
    writer.join().unwrap();
    for mut held in files {
        let (epoch, version) = held.position().unwrap();
        assert_eq!(epoch, 7);
        let position = held.positions()[0].position;
        assert!(position >= 1000 + version, "the positions are those of the end of the write");
        (version + 1..2_000).for_each(|version| held.apply(update(version, changes(version)), &mut Dirty::default()));
        assert_eq!(held.state().digests(), &agent.digests(), "from version {version}");
    }
}

#[test]
fn a_state_of_two_streams_is_saved_without_its_epoch() {
    let agent = Agent::with_state();
    let (shared, stop) = (Arc::clone(&agent.shared), CancellationToken::new());
    let stopped = stop.clone();
    let streams = thread::spawn(move || {
        while !stopped.is_cancelled() {
            let _ = shared.begin_stream();
        }
    });
    let Agent { mut file, folder, .. } = agent;
    // A write must meet a stream that begins, and the other thread may have its turn late.
    let until = Instant::now() + Duration::from_secs(60);
    let epochs = std::iter::repeat_with(|| {
        file.write(&agent.shared).unwrap();
        file.commit().unwrap();
        read_state(&Folder::new(folder.path()), "node-1").unwrap().unwrap().held.position().unwrap().0
    });
    assert!(epochs.take_while(|_| Instant::now() < until).any(|epoch| epoch == 0));
    stop.cancel();
    streams.join().unwrap();
}

#[test]
fn after_a_crash_the_positions_are_those_that_were_recorded_last() {
    let mut agent = Agent::with_state();
    agent.shared.set_node(&own_node(Some(node("a")), 20));
    agent.save();
    agent.batch(vec![endpoint("web", 201, 8080)]);
    agent.shared.set_node(&own_node(Some(node("a")), 30));
    agent.file.record_run(Some(&agent.shared.positions())).unwrap();
    let before = agent.shared.positions();
    let Agent { folder, file, .. } = agent;
    drop(file);
    let (restored, _file) = open(Box::new(Folder::new(folder.path())), "node-1".into());
    assert!(restored.may_be_behind, "the kernel has newer rules");
    assert_eq!(restored.held.position(), Some((7, 1)), "the replica sends what has changed since the file");
    assert_eq!(restored.held.positions(), before, "no replica that is behind the rules may replace them");
    // A replica that continues with an older source, as after a restore of etcd, sets all of them.
    let shared = AgentState::restored("node-1", restored);
    let epoch = || shared.point().unwrap().epoch;
    shared.program_unconfirmed();
    assert_eq!((shared.is_unconfirmed(), epoch()), (false, 0), "the state lacks changes also while it is programmed");
    assert_eq!(shared.save_point().unwrap().point.epoch, 0);
    shared.confirm();
    assert_eq!(epoch(), 7);
    let older = vec![v1::SourcePosition { kind: 5, position: 3 }];
    shared.apply(StateUpdate { positions: older, ..update(2, Vec::new()) });
    shared.set_node(&own_node(Some(node("a")), 4));
    let position = |kind| shared.positions().iter().find(|source| source.kind == kind).map(|source| source.position);
    assert_eq!((position(5), position(v1::source_position::Kind::Nodes.into())), (Some(3), Some(4)));
}

/// What the last run recorded counts also if its state is missing or damaged.
#[test]
fn without_a_state_the_recorded_positions_count() {
    let mut agent = Agent::with_state();
    let positions = agent.shared.positions();
    agent.file.record_run(Some(&positions)).unwrap();
    let Agent { folder, file, .. } = agent;
    drop(file);
    let path = folder.path().join(STATE_FILE);
    for is_damaged in [true, false] {
        if is_damaged {
            fs::write(&path, "damaged").unwrap();
        } else {
            fs::remove_file(&path).unwrap();
        }
        for _ in 0..2 {
            let (restored, _file) = open(Box::new(Folder::new(folder.path())), "node-1".into());
            assert!(!restored.may_be_behind && restored.held.position().is_none(), "there is no state");
            assert_eq!(restored.held.resume().unwrap().positions, positions, "no replica that is behind may send");
        }
    }
}

#[test]
fn a_start_without_a_record_takes_its_space_and_claims_nothing() {
    let agent = Agent::with_state();
    let (folder, run) = (agent.folder.path().to_owned(), agent.folder.path().join(RUN_FILE));
    let Agent { file, folder: _kept, .. } = agent;
    drop(file);
    let open = || open(Box::new(Folder::new(&folder)), "node-1".into());
    for content in [None, Some("")] {
        let _ = fs::remove_file(&run);
        content.into_iter().for_each(|content| fs::write(&run, content).unwrap());
        for _ in 0..2 {
            assert!(open().0.may_be_behind, "the record is missing");
        }
        assert_eq!(fs::metadata(&run).unwrap().len(), RECORD_BYTES as u64);
    }
    fs::remove_file(folder.join(STATE_FILE)).unwrap();
    fs::remove_file(&run).unwrap();
    let (restored, _file) = open();
    assert!(!restored.may_be_behind && restored.held.resume().is_none());
    assert_eq!(newer_rules(&Folder::new(&folder)), Some(Vec::new()));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_attempt_that_failed_is_recorded_and_the_state_is_not_saved() {
    let mut saving = Saving::start(Agent::new(), Duration::from_millis(100));
    saving.agent.snapshot(vec![service("web", 80)]);
    let stop = CancellationToken::new();
    let running = tokio::spawn(saving.saver.take().unwrap().run(stop.clone()));
    let failure = Failure {
        target: Target { epoch: 7, version: 1, stream: 1, node_revision: 0 },
        is_lost: false,
        error: "IPv6 fails".into(),
        attempts: 1,
    };
    saving.kernel.send_modify(|progress| progress.failure = Some(failure));
    eventually(|| saving.run_record().is_some_and(|record| record.ends_with(" 5:1001"))).await;
    stop.cancel();
    running.await.unwrap().save_last();
    assert_eq!(saving.saved_version(), None);
    assert!(saving.run_record().unwrap().ends_with(" 5:1001"), "the kernel may have a part");
}

#[test]
fn only_the_owner_may_read_the_file_and_the_folder() {
    let agent = Agent::with_state();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&agent.file.path()), 0o600);
    // A folder that the agent creates gives no access to group and others either.
    let inner = agent.folder.path().join("made/here");
    drop(file_in(&inner).load().unwrap());
    assert_eq!(mode(&inner), 0o700);
}

#[test]
fn unusable_files_have_distinct_errors() {
    let agent = Agent::with_state();
    let bytes = agent.bytes();
    let reason = |bytes: &[u8], node: &str| read_from(bytes, node).unwrap_err().to_string();
    assert_eq!(reason(&bytes, "node-2"), "belongs to node node-1");
    for other in [&b""[..], b"{\"some\": \"json document\"}"] {
        assert_eq!(reason(other, "node-1"), "is not a state file of this version of Headgate");
    }
    for end in [MAGIC.len(), bytes.len() - 1] {
        assert_eq!(reason(&bytes[..end], "node-1"), "is damaged: the checksum does not match");
    }
    assert_eq!(reason(&with_checksum(MAGIC), "node-1"), "is damaged: it has no end");
    let long = [MAGIC.to_vec(), vec![0xff, 0xff, 0xff, 0xff, 0x0f]].concat();
    assert!(reason(&with_checksum(&long), "node-1").starts_with("is damaged: "));
}

#[test]
fn a_second_agent_with_the_same_folder_does_not_write() {
    let mut agent = Agent::with_state();
    let mut second = file_in(agent.folder.path());
    let restored = second.load().unwrap().unwrap();
    let shared = Arc::new(AgentState::restored("node-1", restored));
    let error = second.write(&shared).unwrap_err().to_string();
    assert!(error.contains("is in use by another agent"), "{error}");
    agent.batch(vec![endpoint("web", 201, 8080)]);
    agent.save();
    agent.assert_saved();
    let Agent { folder, file, .. } = agent;
    drop(file);
    let mut agent = Agent { folder, file: second, shared, version: 50, has_rejections: false };
    agent.batch(vec![endpoint("web", 202, 8080)]);
    agent.save();
    agent.assert_saved();
}

#[test]
fn cleanup_removes_the_files_of_the_folder() {
    let mut agent = Agent::with_state();
    agent.file.record_run(Some(&[])).unwrap();
    agent.file.write_replicas(replicas(1)).unwrap();
    // An agent that was killed during a write leaves such files behind.
    for half in ["state.new", "replicas.new"] {
        fs::write(agent.folder.path().join(half), "half").unwrap();
    }
    for _ in 0..2 {
        remove(agent.folder.path()).unwrap();
        assert_eq!(fs::read_dir(agent.folder.path()).unwrap().count(), 0);
    }
}

fn replicas(last: u8) -> BTreeSet<SocketAddr> {
    [([192, 0, 2, last], 7443).into(), (Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1), 7443).into()].into()
}

#[test]
fn a_broken_list_of_replicas_is_ignored() {
    let mut agent = Agent::with_state();
    let (disk, path) = (Folder::new(agent.folder.path()), agent.folder.path().join(REPLICAS_FILE));
    assert!(read_replicas(&disk).is_empty(), "there is no list");
    agent.file.write_replicas(replicas(1)).unwrap();
    assert_eq!(read_replicas(&disk), replicas(1));
    for broken in [&b"192.0.2.1\n"[..], b"\xff\xfe", b"192.0.2.1:7443\nreplica.example:7443\n"] {
        fs::write(&path, broken).unwrap();
        assert!(read_replicas(&disk).is_empty());
    }
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    assert!(read_replicas(&disk).is_empty());
    agent.assert_saved();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_list_of_replicas_is_saved_when_it_changes() {
    let mut saving = Saving::start(Agent::new(), Duration::from_secs(3_600));
    let stop = CancellationToken::new();
    let running = tokio::spawn(saving.saver.take().unwrap().run(stop.clone()));
    let folder = saving.agent.folder.path().to_owned();
    let is_saved = |last| read_replicas(&Folder::new(&folder)) == replicas(last);
    // Also while the kernel has nothing yet.
    for last in [1, 2] {
        saving.agent.shared.set_replicas(replicas(last));
        eventually(|| is_saved(last)).await;
    }
    saving.agent.snapshot(vec![service("web", 80)]);
    saving.programmed(1);
    eventually(|| saving.run_record() != Some(boot())).await;
    saving.agent.shared.set_replicas(replicas(3));
    eventually(|| is_saved(3)).await;
    stop.cancel();
    let saver = running.await.unwrap();
    saving.agent.shared.set_replicas(replicas(4));
    saver.save_last();
    assert!(is_saved(4));
    assert_eq!(open(Box::new(Folder::new(&folder)), "node-1".into()).1.replicas, replicas(4));
}

/// A saver with a state, whose kernel the test controls.
struct Saving {
    agent: Agent,
    saver: Option<Saver>,
    kernel: watch::Sender<Progress>,
}

impl Saving {
    /// Starts with the file in the folder of `agent`.
    fn start(agent: Agent, interval: Duration) -> Self {
        let Agent { folder, file, version, has_rejections, .. } = agent;
        drop(file);
        let (restored, opened) = open(Box::new(Folder::new(folder.path())), "node-1".into());
        let shared = Arc::new(AgentState::restored("node-1", restored));
        let file = file_in(folder.path());
        let (kernel, progress) = watch::channel(Progress::default());
        let saver = Saver::new(opened, interval, Arc::clone(&shared), SaveMetrics::default(), progress);
        let agent = Agent { folder, file, shared, version, has_rejections };
        Self { agent, saver: Some(saver), kernel }
    }

    /// The kernel has this generation.
    fn programmed(&self, generation: u64) {
        let target = Target { epoch: 7, version: 1, stream: 1, node_revision: 0 };
        let programmed =
            Programmed { target, generation, took: Duration::ZERO, services_planned: 0, objects_written: 0 };
        self.kernel.send_modify(|progress| progress.programmed = Some(programmed));
    }

    fn run_record(&self) -> Option<String> {
        fs::read_to_string(self.agent.folder.path().join("run")).ok().map(|record| record.trim_end().to_owned())
    }

    fn saved_version(&self) -> Option<u64> {
        let restored = read_state(&Folder::new(self.agent.folder.path()), "node-1").unwrap();
        restored.map(|restored| restored.held.position().unwrap().1)
    }
}

fn boot() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap().trim_end().to_owned()
}

async fn eventually(is_so: impl Fn() -> bool) {
    let waited = tokio::time::timeout(Duration::from_secs(30), async {
        while !is_so() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
    waited.await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_state_is_saved_only_after_the_kernel_has_it() {
    let mut saving = Saving::start(Agent::new(), Duration::from_millis(100));
    saving.agent.snapshot(vec![service("web", 80)]);
    let stop = CancellationToken::new();
    let (saver, stopped) = (saving.saver.take().unwrap(), stop.clone());
    let running = tokio::spawn(saver.run(stopped));
    tokio::time::sleep(Duration::from_millis(400)).await;
    assert_eq!((saving.saved_version(), saving.run_record()), (None, Some(boot())));
    saving.programmed(1);
    eventually(|| saving.saved_version() == Some(1)).await;
    assert!(saving.run_record().unwrap().ends_with(" 5:1001"));
    // The file is written when the kernel has version 2, and the agent already has version 3.
    saving.agent.batch(vec![service("web", 81)]);
    saving.agent.batch(vec![service("web", 82)]);
    saving.programmed(2);
    tokio::time::sleep(Duration::from_millis(400)).await;
    assert_eq!(saving.saved_version(), Some(1));
    saving.programmed(3);
    eventually(|| saving.saved_version() == Some(3)).await;
    stop.cancel();
    // At the end, the last state is saved.
    let saver = running.await.unwrap();
    saving.agent.batch(vec![service("web", 83)]);
    tokio::task::spawn_blocking(move || saver.save_last()).await.unwrap();
    assert_eq!(saving.saved_version(), Some(4));
    assert_eq!(saving.run_record().as_deref(), Some("saved"));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn changed_or_truncated_files_are_an_error(
        flips in prop::collection::vec((any::<Index>(), 0..8_u8), 0..4), cut in any::<Index>(), is_cut in any::<bool>(),
    ) {
        let original = Agent::with_state().bytes();
        let mut bytes = original.clone();
        for (at, bit) in flips {
            let at = at.index(bytes.len());
            bytes[at] ^= 1 << bit;
        }
        if is_cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        prop_assert_eq!(read_from(&bytes, "node-1").is_ok(), bytes == original);
    }

    /// Arbitrary content with the right checksum, as a defective writer could produce it.
    #[test]
    fn arbitrary_content_gives_no_panic(content in prop::collection::vec(any::<u8>(), 0..4096)) {
        let _ = read_from(&with_checksum(&[MAGIC.to_vec(), content].concat()), "node-1");
    }
}
