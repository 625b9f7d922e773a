//! Passes bytes to the code with which a replica reads the answer of an agent to a query. Makes the
//! corpus of answers, and of the messages of other replicas.

use std::{fs, path::Path, sync::Arc};

use headgate_core::{
    Dirty, Family, NodeFacts, State,
    digest::{Digests, service_bucket},
    explain::{Mode, NodeSettings},
    iptables::NodePortAddresses,
    view::MasqueradeConfig,
};
use headgate_proto::{NodeView, ServiceDigests, digests_from_wire, digests_to_wire, node_from_wire, v1};
use prost::Message as _;
use v1::node_answer::Kind;

use super::{fuzz, streams};

fn state() -> State {
    let mut state = State::default();
    for change in streams::changes() {
        state.apply(change, &mut Dirty::default());
    }
    state
}

/// Reads an answer as a replica does that compares a verification with its own state. Returns
/// whether the whole answer can be used.
fn answer(state: &State, bytes: &[u8]) -> bool {
    let Ok(answer) = v1::Answer::decode(bytes) else { return false };
    match answer.part.and_then(|part| part.kind) {
        Some(Kind::Verification(verification)) => is_usable(state, &verification),
        other => other.is_some(),
    }
}

fn is_usable(state: &State, verification: &v1::Verification) -> bool {
    let Some(Ok(view)) = verification.view.as_ref().map(|view| NodeView::from_wire("node-a", view)) else {
        return false;
    };
    let mut table = Digests::default();
    for (key, _) in state.entries() {
        view.add_table(state, key, true, &mut table);
        // A replica compares these digests with those of the answer.
        let _ = view.digests_of(state, key, service_bucket(key));
    }
    let own_node = verification.view.as_ref().and_then(|view| view.own_node.as_ref()?.node.as_ref());
    let found = verification.table.as_ref().and_then(digests_from_wire);
    let is_held = verification.held.iter().all(|held| ServiceDigests::from_wire(held).is_some());
    found.is_some_and(|found| found == table)
        && verification.resources.as_ref().and_then(digests_from_wire).is_some()
        && own_node.is_none_or(|node| node_from_wire(node).is_ok())
        && is_held
}

/// What a truthful agent answers.
fn truth(state: &State) -> v1::Verification {
    let settings = NodeSettings {
        mode: Mode::Nftables,
        masquerade: MasqueradeConfig::default(),
        node_ports_v4: NodePortAddresses::All,
        node_ports_v6: NodePortAddresses::All,
        localhost_node_ports: false,
    };
    let view = NodeView { facts: NodeFacts::named("node-a"), settings, families: [Family::V4, Family::V6].into() };
    let mut table = Digests::default();
    state.entries().for_each(|(key, _)| view.add_table(state, key, true, &mut table));
    let node = v1::Node { name: "node-a".into(), zone: "zone-1".into(), ..v1::Node::default() };
    v1::Verification {
        run: 1,
        epoch: 7,
        version: 4,
        resources: Some(digests_to_wire(state.digests())),
        resources_version: 4,
        table: Some(digests_to_wire(&table)),
        view: Some(v1::NodeView {
            own_node: Some(v1::OwnNode { revision: 1, node: Some(node), ..v1::OwnNode::default() }),
            failing: state.entries().map(|(key, _)| failing(key)).collect(),
            ..view.to_wire()
        }),
        drift: vec![v1::Drift { service: "shop/web-1".into(), difference: "a rule is missing".into() }],
        drift_count: 1,
        services: state.service_count() as u64,
        frontends: table.resource_count(),
        held: state.entries().map(|(key, _)| view.digests_of(state, key, service_bucket(key)).to_wire(key)).collect(),
        ..v1::Verification::default()
    }
}

/// An address that no Service has, so the table stays as it is.
fn failing(key: &Arc<headgate_core::ServiceKey>) -> v1::FailingEndpoints {
    let service = v1::ServiceKey { namespace: key.namespace.to_string(), name: key.name.to_string() };
    v1::FailingEndpoints { service: Some(service), endpoints: vec![vec![192, 0, 2, 9, 0x1f, 0x90].into()] }
}

fn answers(state: &State) -> Vec<(&'static str, Vec<u8>)> {
    let metrics = v1::MetricsText { text: "headgate_agent_version_programmed 4\n".into() };
    let connection = v1::OpenConnection::default();
    let kinds = [
        ("verification.bin", Kind::Verification(truth(state))),
        ("metrics.bin", Kind::Metrics(metrics)),
        (
            "connections.bin",
            Kind::Connections(v1::Connections { connections: vec![connection; 3], ..Default::default() }),
        ),
        ("status.bin", Kind::Status(v1::NodeStatus { node: "node-a".into(), ..v1::NodeStatus::default() })),
    ];
    let encoded = |kind| {
        let part = Some(v1::NodeAnswer { kind: Some(kind) });
        // This number is no UTF-8, so that no tool takes the file for a text.
        v1::Answer { id: 200, part, is_last: true, ..v1::Answer::default() }.encode_to_vec()
    };
    kinds.into_iter().map(|(name, kind)| (name, encoded(kind))).collect()
}

#[test]
fn mutated_answers_to_queries_are_read_safely() {
    let state = state();
    fuzz("query_answer", &["nftables", "userspace-iptables", "ipvs"], |_, bytes| answer(&state, bytes));
}

/// A message of a replica with its gRPC prefix: a roster (kind 0) or the answer to a question (1).
fn peer_message(kind: u8, body: &impl prost::Message) -> Vec<u8> {
    let body = body.encode_to_vec();
    let length = u32::try_from(body.len() + 1).unwrap().to_be_bytes();
    [&[0], &length[..], &[kind], &body].concat()
}

/// The messages of a replica that has an agent, loses another one and answers two questions.
fn peer_stream() -> Vec<u8> {
    let node = |name: &str, departed_ms| v1::RosterNode { node: name.into(), departed_ms, programmed_version: 3 };
    let first = v1::Roster {
        identity: Some(v1::PeerIdentity { replica: "replica-b".into(), epoch: 8 }),
        number: 200,
        is_full: true,
        uptime_ms: 700_000,
        present: vec![node("node-a", 0), node("node-b", 0)],
        departed: vec![node("node-c", 5_000)],
        agents: "0.0.0.0:7443".into(),
        ..v1::Roster::default()
    };
    let second = v1::Roster {
        identity: first.identity.clone(),
        number: 201,
        departed: vec![node("node-b", 10)],
        forgotten: vec!["node-c".into()],
        ..v1::Roster::default()
    };
    let yes = v1::QuestionAnswer { roster: 200, version: 9, ..v1::QuestionAnswer::default() };
    let laggard = |name: &str, standby: &str| v1::Laggard {
        node: name.into(),
        reason: "its kernel has version 8".into(),
        standby: standby.into(),
        ..v1::Laggard::default()
    };
    let unconfirmed = vec![laggard("node-a", ""), laggard("node-b", "kube-proxy (iptables)")];
    let no = v1::QuestionAnswer { unconfirmed, ..yes.clone() };
    [peer_message(0, &first), peer_message(1, &yes), peer_message(0, &second), peer_message(1, &no)].concat()
}

/// What a sound replica cannot say ends its stream, before anything is kept.
#[test]
fn messages_of_a_faulty_replica_are_refused() {
    let channel = super::control_plane::unused_channel();
    let taken = |stream: &[u8]| {
        let messages = super::messages_of(stream);
        super::control_plane::peer_stream(&channel, messages.iter().map(Vec::as_slice))
    };
    assert_eq!(taken(&peer_stream()), 4);
    let roster = |names: &mut dyn Iterator<Item = String>| {
        let node = |node| v1::RosterNode { node, ..v1::RosterNode::default() };
        let roster = v1::Roster { present: names.map(node).collect(), is_full: true, ..v1::Roster::default() };
        peer_message(0, &roster)
    };
    let most = 1 << 18;
    let numbered = |count: u32| (0..count).map(|number| format!("n{number}"));
    assert_eq!(taken(&roster(&mut numbered(most))), 1);
    assert_eq!(taken(&roster(&mut numbered(most + 1))), 0);
    for bad in ["Node", "a b", &"x".repeat(254)] {
        assert_eq!(taken(&roster(&mut [bad.to_owned()].into_iter())), 0, "{bad}");
    }
}

/// Checks the answers of the corpus. Writes the files, and the messages of replicas, only if
/// `HEADGATE_WRITE_CORPUS=1` is set. Set the variable after a change of the protocol.
#[test]
fn corpus_of_answers_is_written_when_asked_for() {
    let state = state();
    let answers = answers(&state);
    assert!(answers.iter().all(|(_, bytes)| answer(&state, bytes)));
    if std::env::var_os("HEADGATE_WRITE_CORPUS").is_some() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus/query_answer");
        fs::create_dir_all(&folder).unwrap();
        answers.iter().for_each(|(name, bytes)| fs::write(folder.join(name), bytes).unwrap());
        let folder = folder.with_file_name("peer_stream");
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("roster-and-answers.bin"), peer_stream()).unwrap();
    }
}
