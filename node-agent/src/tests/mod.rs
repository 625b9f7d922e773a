//! Tests of the whole agent with the in-memory dataplane. The agent connects over real sockets to a
//! replica that the test controls.
#![allow(clippy::unwrap_used)]

mod moves;
mod parts;
#[expect(unreachable_pub, reason = "the file belongs to the crate of tests, where other modules use it")]
#[path = "../../../tests/src/testbed/port.rs"]
mod port;
mod replica;
mod restart;
pub(crate) mod testing;
mod tls;

use std::{net::SocketAddr, time::Duration};

use clap::Parser as _;
use headgate_core::digest::Digests;
use headgate_proto::{
    digests_from_wire,
    v1::{self, agent_message::Body, server_message, welcome::ResumeMode},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    task::JoinHandle,
    time::{sleep, timeout},
};
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::Status;

pub(crate) use self::port::ReservedPort;
use self::replica::{Connection, ScriptedReplica};
use crate::{
    AgentError,
    dataplane::{
        DataplaneError, ErrorKind,
        in_memory::{self, Call, Control},
    },
    options::Options,
    run_with,
    testing::{Replica, batch, endpoint, message, service},
};

/// Longest time that a test waits before it fails.
const GUARD: Duration = Duration::from_secs(30);

struct Agent {
    control: Control,
    shutdown: CancellationToken,
    running: JoinHandle<Result<(), AgentError>>,
    _stops: DropGuard,
}

impl Agent {
    fn start(arguments: &[String]) -> Self {
        // The arguments may contain another --state-dir, which overrides the flag in this list.
        let head = "headgate-node-agent --node-name=node-1 --insecure-loopback --state-dir= --healthz-bind-address=";
        let head: Vec<String> = head.split(' ').map(str::to_owned).collect();
        let metrics = ["--metrics-bind-address=127.0.0.1:0".to_owned()];
        let has_metrics = arguments.iter().any(|argument| argument.starts_with("--metrics"));
        let tail = if has_metrics { &[][..] } else { &metrics[..] };
        let options = Options::try_parse_from(head.iter().chain(arguments).chain(tail)).unwrap();
        let (backend, control) = in_memory::dataplane();
        let shutdown = CancellationToken::new();
        let running = tokio::spawn(run_with(options, Box::new(backend), shutdown.clone()));
        Self { control, _stops: shutdown.clone().drop_guard(), shutdown, running }
    }

    fn of(replicas: &[&ScriptedReplica]) -> Self {
        let urls: Vec<String> = replicas.iter().map(|replica| format!("http://{}", replica.address)).collect();
        Self::start(&[format!("--control-plane={}", urls.join(","))])
    }

    async fn stop(self) {
        self.shutdown.cancel();
        timeout(GUARD, self.running).await.unwrap().unwrap().unwrap();
    }
}

/// A replica, and an agent that connects to it.
async fn started() -> (ScriptedReplica, Agent) {
    let replica = ScriptedReplica::start().await;
    let agent = Agent::of(&[&replica]);
    (replica, agent)
}

fn store() -> Replica {
    store_of(7)
}

fn store_of(epoch: u64) -> Replica {
    let mut store = Replica::new(epoch, 2);
    store.commit(vec![service("web", 80), endpoint("web", 1, 8080), endpoint("web", 2, 8080)]);
    store
}

/// Accepts a stream, serves it from the store, and returns the connection and its `Hello`.
async fn serve(replica: &mut ScriptedReplica, store: &Replica) -> (Connection, v1::Hello) {
    let mut connection = replica.accept().await;
    let hello = connection.hello().await;
    for message in store.stream(hello.resume.as_ref()) {
        connection.send(message).await;
    }
    (connection, hello)
}

/// Like [`serve`], and waits until version 1 is acknowledged.
async fn programmed(replica: &mut ScriptedReplica, store: &Replica) -> (Connection, v1::Hello) {
    let (mut connection, hello) = serve(replica, store).await;
    assert_eq!(connection.ack().await.version, 1);
    (connection, hello)
}

#[tokio::test(flavor = "multi_thread")]
async fn after_an_unknown_reference_the_next_stream_resumes_by_digests() {
    let (mut replica, agent) = started().await;
    let store = store();
    let (mut connection, _) = programmed(&mut replica, &store).await;
    let group = v1::ServiceEndpoints { service: vec![1].into(), ..Default::default() };
    let changes = Some(v1::Changes { endpoints: vec![group], ..Default::default() });
    connection
        .send(message(server_message::Body::Batch(v1::Batch { version: 2, changes, ..Default::default() })))
        .await;
    let (mut connection, hello) = serve(&mut replica, &store).await;
    assert_eq!(hello.resume.unwrap().epoch, 0, "the agent resumes by digests: the log lacks the resource");
    assert_eq!(connection.ack().await.version, 1);
    connection.end(Status::unavailable("the test continues")).await;
    let (_connection, hello) = serve(&mut replica, &store).await;
    assert_eq!(hello.resume.unwrap().epoch, store.epoch, "after that, the agent resumes from the log again");
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_is_acknowledged_after_it_is_programmed() {
    let (mut replica, agent) = started().await;
    let mut store = store();
    let (mut connection, hello) = serve(&mut replica, &store).await;
    assert_eq!(hello.node_name, "node-1");
    assert_eq!(hello.status.unwrap().backend, "memory");
    assert!(hello.resume.is_none());
    let ack = connection.ack().await;
    assert_eq!((ack.version, ack.services_planned), (1, 1));

    agent.control.hold(true);
    store.commit(vec![endpoint("web", 3, 8080)]);
    connection.send(store.batches_after(1).remove(0)).await;
    connection.send(own_node(1, "a")).await;
    assert!(connection.next_within(Duration::from_millis(200)).await.is_none(), "no ACK while the kernel is busy");
    agent.control.hold(false);
    // The agent programs the node's zone together with the batch or after the batch. Both orders
    // are correct.
    loop {
        let ack = connection.ack().await;
        assert_eq!(ack.version, 2);
        if ack.node_revision == 1 {
            break;
        }
    }
    let calls = agent.control.calls();
    let Some(Call::Full(digests, facts)) = calls.last() else { panic!("{calls:?}") };
    assert_eq!((digests, facts.zone.as_deref()), (store.state.digests(), Some("a")));
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broken_stream_is_resumed_from_the_held_state() {
    let (mut replica, agent) = started().await;
    let mut store = store();
    let (connection, _) = programmed(&mut replica, &store).await;
    connection.end(Status::unavailable("bye")).await;
    store.commit(vec![endpoint("web", 4, 8080)]);
    let (mut connection, hello) = serve(&mut replica, &store).await;
    let resume = hello.resume.unwrap();
    assert_eq!((resume.epoch, resume.version), (7, 1));
    assert_eq!(resume.positions[0].position, 1);
    let digests: Digests = digests_from_wire(&resume.digests.unwrap()).unwrap();
    assert_eq!(digests.resource_count(), 3);
    // The replica resumes from the log. The agent may first acknowledge version 1 again.
    while connection.ack().await.version != 2 {}
    // The agent reconnects, and the replica has no new changes. The agent acknowledges at once and
    // writes nothing.
    connection.end(Status::unavailable("bye")).await;
    let written = agent.control.calls().len();
    let (mut connection, _) = serve(&mut replica, &store).await;
    assert_eq!(connection.ack().await.version, 2);
    // A replica with another epoch has the same resources.
    connection.end(Status::unavailable("bye")).await;
    let mut other = Replica::new(8, 4);
    other.commit([&[service("web", 80)][..], &[1, 2, 4].map(|last| endpoint("web", last, 8080))].concat());
    let (mut connection, hello) = serve(&mut replica, &other).await;
    assert_eq!(hello.resume.unwrap().version, 2);
    assert_eq!(connection.ack().await.version, 1);
    assert_eq!(agent.control.calls().len(), written, "nothing is written to the kernel for equal states");
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_apply_is_reported_and_tried_again() {
    let (mut replica, agent) = started().await;
    agent.control.fail_next(DataplaneError::new(ErrorKind::Retry, "locked"));
    let (mut connection, _) = serve(&mut replica, &store()).await;
    // After a quick retry, the agent sends only the ACK.
    match connection.next().await {
        Body::ApplyFailed(failed) => {
            assert_eq!((failed.version, failed.attempts, failed.error.as_str()), (1, 1, "locked"));
            assert_eq!(connection.ack().await.version, 1);
        }
        Body::Ack(ack) => assert_eq!(ack.version, 1),
        other => panic!("{other:?}"),
    }
    assert_eq!(agent.control.calls().len(), 2);
    agent.stop().await;
}

/// The Node of the agent, in this zone.
fn own_node(revision: u64, zone: &str) -> v1::ServerMessage {
    let node = v1::Node { name: "node-1".into(), zone: zone.into(), ..Default::default() };
    message(server_message::Body::OwnNode(v1::OwnNode { revision, node: Some(node), ..v1::OwnNode::default() }))
}

#[tokio::test(flavor = "multi_thread")]
async fn each_new_stream_hears_of_a_failure_before_its_first_ack() {
    let (mut replica, agent) = started().await;
    let store = store();
    let (mut connection, _) = programmed(&mut replica, &store).await;
    (0..1_000).for_each(|_| agent.control.fail_next(DataplaneError::new(ErrorKind::Retry, "locked")));
    // The rules of version 1 have to be written again for the new zone.
    connection.send(own_node(1, "a")).await;
    let failed = |message| match message {
        Body::ApplyFailed(failed) => (failed.version, failed.error),
        other => panic!("{other:?}"),
    };
    assert_eq!(failed(connection.next().await), (1, "locked".to_owned()));
    // The same replica; it resumes by log.
    connection.end(Status::unavailable("bye")).await;
    let (mut connection, hello) = serve(&mut replica, &store).await;
    assert_eq!(hello.resume.unwrap().epoch, store.epoch);
    assert_eq!(failed(connection.next().await), (1, "locked".to_owned()));
    // Another replica with the same resources. The failure concerns no version of this replica.
    connection.end(Status::unavailable("bye")).await;
    let other = store_of(8);
    let mut connection = replica.accept().await;
    let hello = connection.hello().await;
    let mut messages = other.stream(hello.resume.as_ref());
    connection.send(messages.remove(0)).await;
    assert_eq!(failed(connection.next().await), (0, "locked".to_owned()));
    for message in messages {
        connection.send(message).await;
    }
    agent.control.recover();
    // Until it succeeds, an attempt may fail once more, or the last failure may be repeated.
    let ack = loop {
        match connection.next().await {
            Body::ApplyFailed(_) => {}
            Body::Ack(ack) => break ack,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(ack.version, 1);
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_degradation_is_reported_to_the_replica() {
    let (mut replica, agent) = started().await;
    let mut store = store();
    let (mut connection, hello) = serve(&mut replica, &store).await;
    assert!(hello.status.unwrap().degraded.is_empty());
    assert_eq!(connection.ack().await.version, 1);
    agent.control.degrade("the module is missing");
    store.commit(vec![endpoint("web", 3, 8080)]);
    connection.send(store.batches_after(1).remove(0)).await;
    let status = loop {
        match connection.next().await {
            Body::Status(status) => break status,
            Body::Ack(ack) => assert_eq!(ack.version, 2),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!((status.backend.as_str(), status.degraded), ("memory", vec!["the module is missing".to_owned()]));
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_without_heartbeats_is_ended() {
    let (mut replica, agent) = started().await;
    let mut connection = replica.accept().await;
    let _ = connection.hello().await;
    let mut welcome = store().welcome(ResumeMode::Full);
    let Some(server_message::Body::Welcome(wire)) = &mut welcome.body else { unreachable!() };
    wire.heartbeat_interval_ms = 100;
    connection.send(welcome).await;
    // The replica sends nothing more and keeps the connection open.
    let mut second = replica.accept().await;
    assert!(second.hello().await.resume.is_none());
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_moves_from_a_draining_replica_to_another() {
    let (mut one, mut two) = (ScriptedReplica::start().await, ScriptedReplica::start().await);
    let agent = Agent::of(&[&one, &two]);
    let drain = v1::Drain { reconnect_within_ms: 10, reason: "rollout".into(), for_balance: false };
    let store = store();
    let (mut first, second) = tokio::select! {
        connection = one.accept() => (connection, &mut two),
        connection = two.accept() => (connection, &mut one),
    };
    let _ = first.hello().await;
    for message in store.stream(None) {
        first.send(message).await;
    }
    assert_eq!(first.ack().await.version, 1);
    first.send(message(server_message::Body::Drain(drain))).await;
    let (mut connection, hello) = serve(second, &store).await;
    assert!(hello.resume.is_some());
    assert_eq!(connection.ack().await.version, 1);
    assert_eq!(agent.control.calls().len(), 1, "nothing was written again");
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_agent_waits_for_an_absent_control_plane() {
    let reserved = ReservedPort::reserve().unwrap();
    let address = reserved.address();
    let agent = Agent::start(&[format!("--control-plane=http://{address}")]);
    sleep(Duration::from_millis(300)).await;
    assert!(!agent.running.is_finished());
    let mut replica = ScriptedReplica::at(address).await;
    let (_connection, _) = programmed(&mut replica, &store()).await;
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rules_stay_when_the_agent_stops() {
    let (mut replica, agent) = started().await;
    let (mut connection, _) = serve(&mut replica, &store()).await;
    let _ = connection.ack().await;
    let control = agent.control.clone();
    agent.stop().await;
    assert!(!control.calls().contains(&Call::Cleanup));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_answers_queries_about_its_node() {
    let (mut replica, agent) = started().await;
    let (mut connection, _) = serve(&mut replica, &store()).await;
    connection.ack().await;
    let query = |id, kind| {
        let query = Some(v1::NodeQuery { kind });
        message(server_message::Body::Query(v1::Query { id, query }))
    };
    let status = v1::node_query::Kind::Status(v1::NodeStatusQuery {});
    connection.send(query(1, Some(status))).await;
    let metrics = v1::node_query::Kind::Metrics(v1::MetricsQuery { prefix: String::new() });
    connection.send(query(2, Some(metrics))).await;
    connection.send(query(3, None)).await;
    let Body::Answer(answer) = connection.next().await else { panic!("no answer") };
    assert_eq!((answer.id, answer.is_last), (1, true));
    let Some(v1::node_answer::Kind::Status(status)) = answer.part.unwrap().kind else { panic!("no status") };
    assert_eq!((status.node.as_str(), status.backend.as_str()), ("node-1", "memory"));
    assert_eq!((status.received_version, status.programmed_version), (1, 1));
    assert!(status.resident_memory_bytes > 0 && status.synced_unix_ms > 0 && !status.kernel_release.is_empty());
    let (mut text, mut parts) = (String::new(), 0);
    loop {
        let Body::Answer(v1::Answer { id: 2, part: Some(part), is_last, .. }) = connection.next().await else {
            panic!("no part of the second answer")
        };
        let Some(v1::node_answer::Kind::Metrics(v1::MetricsText { text: more })) = part.kind else { panic!("no text") };
        text.push_str(&more);
        parts += 1;
        if is_last {
            break;
        }
    }
    assert!(parts > 0 && text.contains("\nheadgate_agent_connected 1\n"), "{parts} parts: {text}");
    let Body::Answer(unknown) = connection.next().await else { panic!("no answer") };
    assert!(unknown.id == 3 && unknown.error.contains("upgrade"), "a kind that the agent does not know");
    agent.stop().await;
}

async fn get(address: SocketAddr, path: &str) -> Option<String> {
    let mut stream = TcpStream::connect(address).await.ok()?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.ok()?;
    Some(answer)
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_are_served_after_their_address_becomes_free() {
    let reserved = ReservedPort::reserve().unwrap();
    let address = reserved.address();
    let taken = TcpListener::bind(address).await.unwrap();
    let mut replica = ScriptedReplica::start().await;
    let url = format!("--control-plane=http://{}", replica.address);
    let agent = Agent::start(&[url, format!("--metrics-bind-address={address}")]);
    let (mut connection, _) = serve(&mut replica, &store()).await;
    assert_eq!(connection.ack().await.version, 1, "forwarding does not wait for the pages");
    drop(taken);
    let health = timeout(GUARD, async {
        loop {
            if let Some(answer) = get(address, "/status").await {
                return answer;
            }
            sleep(Duration::from_millis(20)).await;
        }
    });
    let health = health.await.unwrap();
    assert!(health.starts_with("HTTP/1.1 200"), "{health}");
    let json: serde_json::Value = serde_json::from_str(health.split("\r\n\r\n").nth(1).unwrap()).unwrap();
    assert_eq!(json["connected"], true);
    assert_eq!((json["version"].as_u64(), json["programmedVersion"].as_u64()), (Some(1), Some(1)));
    assert_eq!(json["backend"], "memory");
    assert!(get(address, "/proxyMode").await.unwrap().ends_with("\r\n\r\nmemory"));
    assert!(get(address, "/metrics").await.unwrap().contains("headgate_agent_connected 1"));
    agent.stop().await;
}
