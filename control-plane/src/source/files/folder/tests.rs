#![allow(clippy::unwrap_used)]
use std::{
    fs::File as Writer,
    io::Write as _,
    os::unix::{fs::symlink, net::UnixListener},
    time::UNIX_EPOCH,
};

use headgate_core::{Dirty, State};
use proptest::prelude::*;
use tempfile::TempDir;

use super::*;
use crate::model::{Model, NodeChange, Transaction, TriggeredChange};

/// A replica that reads a folder. Time passes only in [`Replica::scan`].
struct Replica {
    folder: ManifestFolder,
    notices: Notices,
    model: Model,
    state: State,
    nodes: BTreeMap<String, String>,
    problems: BTreeMap<String, Vec<Problem>>,
    parsed_files: usize,
    now: Instant,
}

impl Replica {
    fn new(root: &Path) -> Self {
        let (folder, notices) = (ManifestFolder::new(root.to_owned()), Notices::new(root.to_owned()));
        let (model, state) = (Model::default(), State::default());
        let (nodes, problems, now) = (BTreeMap::new(), BTreeMap::new(), Instant::now());
        Self { folder, notices, model, state, nodes, problems, parsed_files: 0, now }
    }

    fn started(root: &Path) -> Self {
        let mut new = Self::new(root);
        new.scan(Duration::ZERO);
        new
    }

    /// Scans the folder after this time. Returns the names of the objects that have changed, in
    /// order, each with `+` or `-`.
    fn scan(&mut self, after: Duration) -> Vec<String> {
        self.now += after;
        let mut changed = Vec::new();
        let Self { folder, notices, model, problems, parsed_files, now, .. } = self;
        folder.scan(*now, notices, |update| {
            for (location, reason, of_location) in update.problems {
                *parsed_files += usize::from(reason == "malformed_file");
                problems.insert(location, of_location);
            }
            for (event, origin) in update.events {
                let sign = if matches!(event, Event::Delete(_)) { "-" } else { "+" };
                changed.push(format!("{sign}{}", event.key().name));
                model.event(event, &origin);
            }
        });
        let Transaction { changes, nodes, .. } = self.model.take();
        for TriggeredChange { change, .. } in changes {
            self.state.apply(change, &mut Dirty::default());
        }
        for change in nodes {
            match change {
                NodeChange::Apply(node) | NodeChange::ApplyExcluded(node) => {
                    drop(self.nodes.insert(node.name.to_string(), format!("{node:?}")));
                }
                NodeChange::Remove(name) => drop(self.nodes.remove(&*name)),
            }
        }
        changed
    }

    /// Everything that the replica serves.
    fn served(&self) -> BTreeMap<String, String> {
        let text = |entry: &headgate_core::ServiceEntry| format!("{:?} {:?}", entry.service(), entry.endpoints());
        let services = self.state.entries().map(|(key, entry)| (key.to_string(), text(entry)));
        let cidrs = self.state.service_cidrs().map(|cidr| (cidr.name.to_string(), format!("{cidr:?}")));
        services.chain(cidrs).chain(self.nodes.clone()).collect()
    }

    fn serves(&self, name: &str) -> bool {
        self.served().contains_key(&format!("default/{name}"))
    }

    /// Whether a replica that starts with this content begins to serve.
    fn is_ready(&self) -> bool {
        self.folder.doubt().is_none() && self.model.invalid().is_none()
    }

    fn problem_texts(&self) -> Vec<String> {
        self.problems.values().flatten().map(|p| format!("{}: {}: {}", p.origin, p.object, p.message)).collect()
    }
}

fn service(name: &str, address: u8) -> String {
    format!(
        "apiVersion: v1\nkind: Service\nmetadata: {{name: {name}}}\nspec: {{clusterIP: 10.0.0.{address}, ports: [{{port: 80}}]}}\n---\n"
    )
}

fn node(name: &str) -> String {
    format!("apiVersion: v1\nkind: Node\nmetadata: {{name: {name}}}\n---\n")
}

fn put(folder: &TempDir, name: &str, text: &str) {
    fs::write(folder.path().join(name), text).unwrap();
}

fn remove(folder: &TempDir, name: &str) {
    fs::remove_file(folder.path().join(name)).unwrap();
}

/// Replaces a file by a socket, which cannot be read, even by root.
fn make_unreadable(folder: &TempDir, name: &str) {
    let path = folder.path().join(name);
    drop(fs::remove_file(&path));
    drop(UnixListener::bind(path).unwrap());
}

const NOTHING: [&str; 0] = [];

#[test]
fn only_changed_files_are_parsed_and_reported() {
    let root = tempfile::tempdir().unwrap();
    for number in 0..100 {
        let name = format!("{number}.yaml");
        put(&root, &name, &(node(&format!("a{number}")) + &node(&format!("b{number}"))));
        // A file that has just changed is read again.
        let file = Writer::options().append(true).open(root.path().join(name)).unwrap();
        file.set_modified(UNIX_EPOCH).unwrap();
    }
    let mut replica = Replica::new(root.path());
    assert_eq!(replica.scan(Duration::ZERO).len(), 200);
    assert_eq!(replica.scan(SETTLE), NOTHING);
    assert_eq!(replica.parsed_files, 100);
    put(&root, "7.yaml", &(node("a7") + &node("c7") + &node("b7")));
    assert_eq!(replica.scan(SETTLE), ["+b7", "+c7"], "b7 is now in another document");
    assert_eq!(replica.parsed_files, 101);
}

#[test]
fn objects_that_a_file_no_longer_defines_are_removed_after_a_while() {
    let root = tempfile::tempdir().unwrap();
    put(&root, "a.yaml", &(node("a") + &node("b")));
    let mut replica = Replica::started(root.path());
    put(&root, "a.yaml", &node("a"));
    assert_eq!(replica.scan(Duration::ZERO), NOTHING);
    assert_eq!(replica.folder.next_look, Some(replica.now + SETTLE));
    remove(&root, "a.yaml");
    assert_eq!(replica.scan(SETTLE / 2), NOTHING);
    assert_eq!(replica.scan(SETTLE / 2), ["-b"]);
    // A file that was gone for a short time has lost nothing.
    put(&root, "a.yaml", &node("a"));
    assert_eq!(replica.scan(SETTLE / 4), NOTHING);
    assert_eq!(replica.scan(SETTLE), NOTHING);
    put(&root, "a.yaml", "# nothing\n");
    assert_eq!(replica.scan(SETTLE), NOTHING);
    // While the file is being written, nothing is removed.
    let writer = Writer::create(root.path().join("a.yaml")).unwrap();
    assert_eq!(replica.scan(SETTLE), NOTHING);
    assert_eq!(replica.folder.next_look, None, "the end of the write wakes the reader");
    drop(writer);
    assert_eq!(replica.scan(SETTLE), ["-a"]);
    remove(&root, "a.yaml");
    assert_eq!(replica.scan(SETTLE), NOTHING);
    assert!(replica.folder.files.is_empty() && replica.folder.objects.is_empty());
}

#[test]
fn a_file_that_is_being_written_is_left_out_and_becomes_a_problem() {
    let root = tempfile::tempdir().unwrap();
    put(&root, "a.yaml", &(node("a") + &node("b")));
    let mut replica = Replica::started(root.path());
    let mut writer = Writer::create(root.path().join("a.yaml")).unwrap();
    assert_eq!(replica.scan(SETTLE), NOTHING);
    writer.write_all(node("a").as_bytes()).unwrap();
    assert_eq!(replica.scan(SETTLE), NOTHING);
    assert_eq!((replica.scan(SETTLE), replica.problem_texts()), (Vec::new(), Vec::new()));
    assert_eq!(replica.scan(LONGEST_WRITING), NOTHING);
    let problems = replica.problem_texts().join("\n");
    assert!(problems.contains("/a.yaml: has changes that were not read yet"), "{problems}");
    assert!(problems.ends_with("; what it defined before stays in use"), "{problems}");
    writer.write_all(node("c").as_bytes()).unwrap();
    drop(writer);
    assert_eq!(replica.scan(Duration::ZERO), ["+c"]);
    assert_eq!(replica.problem_texts(), NOTHING);
    assert_eq!(replica.scan(SETTLE), ["-b"]);
    // A replica that starts meanwhile does not know what the file defines.
    let mut replica = Replica::new(root.path());
    replica.notices.begin_scan(replica.now);
    let mut writer = Writer::create(root.path().join("a.yaml")).unwrap();
    replica.scan(Duration::ZERO);
    assert!(!replica.is_ready() && replica.nodes.is_empty());
    writer.write_all(node("d").as_bytes()).unwrap();
    drop(writer);
    assert_eq!(replica.scan(Duration::ZERO), ["+d"]);
    assert!(replica.is_ready());
}

#[test]
fn the_problem_of_a_file_ends_with_the_file_also_if_its_folder_could_not_be_read() {
    let root = tempfile::tempdir().unwrap();
    let sub = root.path().join("sub");
    fs::create_dir(&sub).unwrap();
    put(&root, "sub/a.yaml", "kind: [\n");
    let mut replica = Replica::started(root.path());
    assert_eq!(replica.problem_texts().len(), 1);
    // A symlink to itself cannot be read, even by root.
    fs::rename(&sub, root.path().join(".away")).unwrap();
    symlink("sub", &sub).unwrap();
    replica.scan(SETTLE);
    assert_eq!(replica.problem_texts().len(), 2);
    fs::remove_file(&sub).unwrap();
    put(&root, "b.yaml", &node("b"));
    assert_eq!(replica.scan(SETTLE), ["+b"]);
    assert_eq!(replica.problem_texts(), NOTHING);
}

#[test]
fn a_removal_does_not_wait_for_the_end_of_other_changes() {
    let root = tempfile::tempdir().unwrap();
    put(&root, "a.yaml", &(node("a") + &service("other", 0)));
    let mut replica = Replica::started(root.path());
    let mut removed_after = None;
    for round in 1..10 {
        put(&root, "a.yaml", &service("other", round));
        if replica.scan(SETTLE / 2).contains(&"-a".to_owned()) {
            removed_after.get_or_insert(round);
        }
    }
    assert_eq!(removed_after, Some(3), "a was missing from the first round on");
}

#[test]
fn an_unreadable_document_keeps_only_what_it_names() {
    let root = tempfile::tempdir().unwrap();
    let (x1, x2) = (service("x1", 1), service("x2", 2));
    put(&root, "a.yaml", &(x1.clone() + &x2));
    let mut replica = Replica::started(root.path());
    // The document of x2 becomes unreadable.
    put(&root, "a.yaml", &(x1.clone() + &x2.replace("ports: [", "ports: [[")));
    replica.scan(SETTLE);
    replica.scan(SETTLE * 9);
    assert!(replica.serves("x1") && replica.serves("x2"));
    let problems = replica.problem_texts().join("\n");
    assert!(problems.contains("(1, such as Service default/x2)"), "{problems}");
    assert!(!Replica::started(root.path()).is_ready());
    // The document is removed, while another document still cannot be read.
    put(&root, "a.yaml", &(x1.clone() + "kind: [x2x\n"));
    assert_eq!(replica.scan(SETTLE), NOTHING);
    assert_eq!(replica.scan(SETTLE), ["-x2"]);
    assert!(replica.serves("x1"));
    // The same with other documents that define no object.
    for (other, is_ready) in [("name: {{ .Values.name }}\n", false), ("replicas: 3\n", true)] {
        put(&root, "a.yaml", &(x1.clone() + &x2 + other));
        replica.scan(SETTLE);
        assert!(replica.serves("x2"));
        put(&root, "a.yaml", &(x1.clone() + other));
        replica.scan(SETTLE);
        assert_eq!(replica.scan(SETTLE), ["-x2"], "{other}");
        assert_eq!(Replica::started(root.path()).is_ready(), is_ready, "{other}");
    }
}

#[test]
fn json_that_is_cut_off_and_files_that_cannot_be_read_keep_everything() {
    let root = tempfile::tempdir().unwrap();
    let json = r#"{"apiVersion": "v1", "kind": "List", "items": [
        {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}},
        {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n2"}}]}"#;
    put(&root, "a.json", json);
    let mut replica = Replica::started(root.path());
    let mut check = |what: &str, fresh_is_ready: bool| {
        replica.scan(SETTLE);
        replica.scan(SETTLE * 2);
        assert_eq!(replica.nodes.len(), 2, "{what}");
        let fresh = Replica::started(root.path());
        assert_eq!((fresh.is_ready(), fresh.nodes.len() == 2), (fresh_is_ready, fresh_is_ready), "{what}");
    };
    put(&root, "a.json", &json[..json.len() / 2]);
    check("cut off", false);
    make_unreadable(&root, "a.json");
    check("a socket", false);
    remove(&root, "a.json");
    symlink("a.json", root.path().join("a.json")).unwrap();
    check("a loop", false);
    remove(&root, "a.json");
    fs::write(root.path().join("a.json"), b"\xff\xfe{\0}\0").unwrap();
    check("UTF-16", false);
    put(&root, "a.json", json);
    check("whole", true);
    let mut replica = Replica::started(root.path());
    make_unreadable(&root, "a.json");
    replica.scan(SETTLE);
    remove(&root, "a.json");
    replica.scan(SETTLE);
    assert_eq!(replica.scan(SETTLE), ["-n1", "-n2"], "the file is gone");
    assert_eq!(replica.problem_texts(), NOTHING);
}

#[test]
fn a_file_that_disappears_while_its_definition_is_wanted_defines_nothing() {
    let root = tempfile::tempdir().unwrap();
    put(&root, "none.yaml", "apiVersion: v1\nkind: List\nitems: []\n");
    put(&root, "b.yaml", &service("s", 1));
    let mut replica = Replica::started(root.path());
    // The definition in `b.yaml` comes second, and is wanted again when it cannot be read.
    make_unreadable(&root, "b.yaml");
    put(&root, "a.yaml", &service("s", 1));
    replica.scan(SETTLE);
    fs::remove_file(root.path().join("a.yaml")).unwrap();
    replica.scan(SETTLE);
    assert!(replica.serves("s"));
    fs::remove_file(root.path().join("b.yaml")).unwrap();
    replica.scan(SETTLE);
    assert_eq!(replica.scan(SETTLE), ["-s"]);
}

#[test]
fn a_loop_of_symlinks_is_not_followed() {
    let root = tempfile::tempdir().unwrap();
    symlink(".", root.path().join("again")).unwrap();
    put(&root, "a.yaml", &node("a"));
    let mut replica = Replica::new(root.path());
    assert_eq!(replica.scan(Duration::ZERO), ["+a"]);
    assert_eq!(replica.problem_texts(), NOTHING);
}

/// An edit of one of the files.
#[derive(Debug, Clone)]
enum Edit {
    Write(usize, Vec<Part>),
    Remove(usize),
    MakeUnreadable(usize),
    Move(usize, usize),
}

/// A document.
#[derive(Debug, Clone)]
enum Part {
    Service(u8, u8),
    Slice(u8, u8),
    /// Of a wrong type.
    Undecodable(u8),
    /// With a port that does not exist.
    Invalid(u8),
    Unreadable(u8),
    NoManifest,
}

const FILES: [&str; 4] = ["a.yaml", "b.yaml", "sub/c.yaml", "sub/d.yml"];

fn any_part() -> impl Strategy<Value = Part> {
    prop_oneof![
        12 => (0_u8..4, 1_u8..4).prop_map(|(name, address)| Part::Service(name, address)),
        6 => (0_u8..4, 1_u8..4).prop_map(|(name, address)| Part::Slice(name, address)),
        1 => (0_u8..4).prop_map(Part::Undecodable),
        1 => (0_u8..4).prop_map(Part::Invalid),
        1 => (0_u8..4).prop_map(Part::Unreadable),
        1 => Just(Part::NoManifest),
    ]
}

fn any_edit() -> impl Strategy<Value = Edit> {
    let file = || 0..FILES.len();
    prop_oneof![
        8 => (file(), prop::collection::vec(any_part(), 0..4)).prop_map(|(file, parts)| Edit::Write(file, parts)),
        3 => file().prop_map(Edit::Remove),
        1 => file().prop_map(Edit::MakeUnreadable),
        2 => (file(), file()).prop_map(|(from, to)| Edit::Move(from, to)),
    ]
}

impl Part {
    fn text(&self) -> String {
        match self {
            Self::Service(name, address) => service(&format!("s{name}"), *address),
            Self::Slice(name, address) => format!(
                "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\naddressType: IPv4\nmetadata: {{name: s{name}-1, labels: \
                 {{kubernetes.io/service-name: s{name}}}}}\nports: [{{port: 8080}}]\nendpoints: [{{addresses: [10.1.0.{address}]}}]\n---\n"
            ),
            Self::Undecodable(name) => service(&format!("s{name}"), 1).replace("80", "eighty"),
            Self::Invalid(name) => service(&format!("s{name}"), 1).replace("80", "70000"),
            Self::Unreadable(name) => service(&format!("s{name}"), 1).replace("ports: [", "ports: [["),
            Self::NoManifest => "replicas: 3\n---\n".to_owned(),
        }
    }
}

fn apply(root: &TempDir, edit: &Edit) {
    let at = |file: usize| root.path().join(FILES[file]);
    match edit {
        Edit::Write(file, parts) => {
            drop(fs::remove_file(at(*file)));
            put(root, FILES[*file], &parts.iter().map(Part::text).collect::<String>());
        }
        Edit::Remove(file) => drop(fs::remove_file(at(*file))),
        Edit::MakeUnreadable(file) => make_unreadable(root, FILES[*file]),
        Edit::Move(from, to) => drop(fs::rename(at(*from), at(*to))),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    /// After the edits have settled, a replica serves what a replica serves that starts then, or
    /// the latter is not ready.
    #[test]
    fn what_is_served_is_a_function_of_the_content(
        edits in prop::collection::vec((any_edit(), 0_u64..1500), 1..12),
        last in prop::collection::vec((0..FILES.len(), prop::collection::vec(any_part(), 0..4)), 0..4),
    ) {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("sub")).unwrap();
        put(&root, "none.yaml", "apiVersion: v1\nkind: List\nitems: []\n");
        let mut replica = Replica::started(root.path());
        let last = last.into_iter().map(|(file, parts)| (Edit::Write(file, parts), 0));
        for (edit, after_ms) in edits.into_iter().chain(last) {
            apply(&root, &edit);
            if after_ms > 300 {
                replica.scan(Duration::from_millis(after_ms));
            }
        }
        replica.scan(SETTLE);
        replica.scan(SETTLE);
        replica.scan(SETTLE);
        let fresh = Replica::started(root.path());
        if fresh.is_ready() {
            prop_assert_eq!(replica.served(), fresh.served());
            prop_assert!(replica.is_ready());
            prop_assert_eq!(
                replica.problem_texts().into_iter().collect::<BTreeSet<_>>(),
                fresh.problem_texts().into_iter().collect::<BTreeSet<_>>()
            );
        }
    }
}
