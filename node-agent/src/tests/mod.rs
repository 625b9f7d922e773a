//! Tests of the whole agent with the in-memory dataplane. The agent connects over real sockets to a
//! replica that the test controls.
#![allow(clippy::unwrap_used)]

mod moves;
#[expect(unreachable_pub, reason = "the file belongs to the crate of tests, where other modules use it")]
#[path = "../../../tests/src/testbed/port.rs"]
mod port;
mod replica;
mod restart;
pub(crate) mod testing;

use std::time::Duration;

use clap::Parser as _;
use headgate_proto::v1::{self, agent_message::Body, server_message};
use tokio::{task::JoinHandle, time::timeout};
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
    testing::{Replica, endpoint, message, service},
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
    assert_eq!(hello.status.unwrap().backend, "iptables-memory");
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
