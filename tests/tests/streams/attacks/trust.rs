//! Attacks on statements about all nodes: nodes that do not read, do not confirm or come and go,
//! and tenants that name pods of others.

use std::{fs, net::Ipv4Addr, time::Duration};

use bytes::Bytes;
use clap::Parser as _;
use headgate_control_plane::{
    model::{PodChange, Sink as _, Transaction},
    objects::PodId,
    options::Options,
    run::ControlPlane,
    serve::{CancellationToken, Security, Settings},
};
use headgate_core::{Change, Conditions, Endpoint, EndpointPort, Placement, Protocol, ServiceKey};
use headgate_proto::{
    frame,
    v1::{self, agent_message::Body, barrier_answer::Result as Outcome},
};
use tokio::{net::TcpStream, time::timeout};

use crate::{
    barrier::{NEVER, POD, Pair, answer, ask, program, removed, request},
    client::{Client, GUARD, channel, eventually, hello, message},
    replica::{Replica, key, settings},
};

/// A request about a pod that does not exist.
fn unknown_pod(id: u64) -> Body {
    Body::Barrier(v1::BarrierRequest { id, ..request(Ipv4Addr::new(10, 9, 9, 9), 0, 0) })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_reads_no_answers_ends_its_own_stream_and_no_other() {
    let mut pair = Pair::start(Duration::ZERO).await;
    let mut b = pair.agent(0, "b").await;
    let socket = TcpStream::connect(pair.replicas[0].running.local_addr).await.unwrap();
    // Without a window, each answer waits in the replica.
    let (mut requests, connection) =
        h2::client::Builder::new().initial_window_size(0).handshake::<_, Bytes>(socket).await.unwrap();
    let connection = tokio::spawn(connection);
    let request = http::Request::post("http://replica/headgate.v1.Discovery/Sync").body(()).unwrap();
    let (_response, mut body) = requests.send_request(request, false).unwrap();
    body.send_data(frame(&hello("a", None)), false).unwrap();
    for id in 0..2_000 {
        body.send_data(frame(&message(unknown_pod(id))), false).unwrap();
    }
    let ended = || pair.replicas[0].metric("headgate_streams_rejected_total{reason=\"too_many_requests\"}");
    eventually("the stream has ended", async || ended() == 1).await;
    connection.abort();
    pair.change(0, removed());
    program(&pair.replicas[0], &mut b).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn answered_requests_make_room_for_others() {
    let pair = Pair::start(Duration::ZERO).await;
    let mut a = pair.agent(0, "a").await;
    for round in 1..=16 {
        for id in 0..128 {
            a.send(unknown_pod(round * 128 + id)).await;
        }
        a.until(|client| client.barriers.len() as u64 == round * 128).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_window_that_never_opens_ends_the_stream() {
    let settings = Settings { stalled_response_timeout: Duration::from_millis(200), ..settings() };
    let replica = Replica::start_with(settings, Security::Plaintext).await;
    replica.store.synced();
    let mut honest = replica.open("honest").await;
    let socket = TcpStream::connect(replica.running.local_addr).await.unwrap();
    let (mut requests, connection) =
        h2::client::Builder::new().initial_window_size(0).handshake::<_, Bytes>(socket).await.unwrap();
    // The connection answers pings, and the client reads nothing of the stream.
    let connection = tokio::spawn(connection);
    let request = http::Request::post("http://replica/headgate.v1.Discovery/Sync").body(()).unwrap();
    let (_response, mut body) = requests.send_request(request, false).unwrap();
    body.send_data(frame(&hello("hostile", None)), false).unwrap();
    let _ = timeout(GUARD, connection).await.expect("the connection does not end");
    assert_eq!(replica.metric("headgate_connections_untaken_total"), 1);
    assert_eq!(replica.metric("headgate_streams_ended_total{reason=\"untaken\"}"), 1);
    honest.reach(replica.store.version()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_that_asks_again_and_again_reaches_other_replicas_once_a_second() {
    let mut pair = Pair::start(NEVER).await;
    let (mut a, mut b) = (pair.agent(0, "a").await, pair.agent(1, "b").await);
    pair.change_both([removed()]);
    program(&pair.replicas[0], &mut a).await;
    program(&pair.replicas[1], &mut b).await;
    let asked = || pair.replicas[1].metric("headgate_peer_questions_total");
    let before = asked();
    for id in 0..200 {
        a.send(Body::Barrier(v1::BarrierRequest { id, ..request(POD, 0, 0) })).await;
    }
    a.until(|client| client.barriers.len() == 200).await;
    let refused = a.barriers.iter().filter(|answer| answer.reason.contains("once a second")).count();
    // On a very slow machine, the requests take some seconds.
    assert!(refused > 150, "{refused} of 200 did not get a turn");
    assert!(asked() - before <= 200 - refused as u64, "the others cost nothing elsewhere");
    assert!(a.barriers.iter().all(|answer| answer.unconfirmed.is_empty() && answer.not_covered.is_empty()));
}

#[tokio::test(flavor = "multi_thread")]
async fn slices_of_another_namespace_do_not_speak_for_a_pod() {
    let mut pair = Pair::start(NEVER).await;
    let (mut a, mut b, mut c) = (pair.agent(0, "a").await, pair.agent(1, "b").await, pair.agent(1, "c").await);
    let hostile = ServiceKey::new("hostile", "web");
    let port = EndpointPort::new("http", Protocol::Tcp, 8080);
    let ready = Endpoint {
        placement: Placement::on("b").into(),
        conditions: Conditions::READY,
        ..Endpoint::new(POD.into(), [port].into())
    };
    // The slice has the address, the name and the UID of the pod, which stays ready there.
    pair.change_both([Change::Endpoint(hostile.clone(), ready), removed()]);
    for replica in &pair.replicas {
        let pod = Some((PodId::new("pod", "pod").in_namespace("hostile"), Some("b".into())));
        let pods = vec![PodChange { service: hostile.clone(), address: POD.into(), pod }];
        replica.store.commit(Transaction { pods, ..Transaction::default() });
    }
    for (replica, client) in [(0, &mut a), (1, &mut b), (1, &mut c)] {
        program(&pair.replicas[replica], client).await;
    }
    for uid in ["", "pod"] {
        a.send(Body::Barrier(v1::BarrierRequest { pod_uid: uid.into(), ..request(POD, 60_000, 60_000) })).await;
        assert_eq!(answer(&mut a).await.result(), Outcome::Drained, "{uid}");
    }
}

const WEB: &str = "apiVersion: v1
kind: Service
metadata: {name: web, namespace: NAMESPACE}
spec: {clusterIP: ADDRESS, ports: [{port: 80, targetPort: 8080}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, namespace: NAMESPACE, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: '', port: 8080}]
endpoints:
";

/// The same attack from manifests to the answer: a tenant writes EndpointSlices in its own
/// namespace.
#[tokio::test(flavor = "multi_thread")]
async fn a_tenant_cannot_keep_pods_of_others_waiting_or_end_their_wait() {
    let folder = tempfile::tempdir().unwrap();
    let put = |namespace: &str, address: &str, endpoints: &str| {
        let text = WEB.replace("NAMESPACE", namespace).replace("ADDRESS", address) + endpoints;
        fs::write(folder.path().join(format!("{namespace}.yaml")), text).unwrap();
    };
    let stops = "- {addresses: [10.244.1.1], nodeName: a, conditions: {ready: false, terminating: true}, targetRef: {kind: Pod, name: web-1, uid: u1}}\n\
                 - {addresses: [10.244.1.2], nodeName: a, targetRef: {kind: Pod, name: web-2, uid: u2}}\n";
    put("shop", "10.96.0.1", stops);
    let ready = "- {addresses: [10.244.1.1], nodeName: a, targetRef: {kind: Pod, name: web-1, uid: u1}}\n\
                 - {addresses: [10.244.1.9], nodeName: a, targetRef: {kind: Pod, namespace: shop, name: job, uid: u9}}\n";
    put("hostile", "10.96.0.2", ready);
    fs::write(folder.path().join("a.yaml"), "apiVersion: v1\nkind: Node\nmetadata: {name: a}\n").unwrap();
    let source = format!("--source=files:{}", folder.path().display());
    let options = ["", &source, "--insecure-loopback", "--listen=127.0.0.1:0", "--metrics-listen=127.0.0.1:0"];
    let more = ["--peers=none", "--uncovered-after-seconds=0", "--drain-grace-ms=0"];
    let options = Options::try_parse_from(options.into_iter().chain(more)).unwrap();
    let control_plane = ControlPlane::start(&options, CancellationToken::new()).await.unwrap();
    let store = std::sync::Arc::clone(&control_plane.store);
    eventually("the folder is listed", async || store.version() > 0 && store.is_synced()).await;
    let mut a = Client::open(channel(control_plane.running.local_addr).await, "a", None).await.unwrap();
    a.reach(store.version()).await;
    a.ack().await;
    let mut ask = async |id: u64, last: u8, uid: &str| {
        let (pod_namespace, pod_uid) = ("shop".to_owned(), uid.to_owned());
        let request = request(Ipv4Addr::new(10, 244, 1, last), 60_000, 60_000);
        a.send(Body::Barrier(v1::BarrierRequest { id, pod_namespace, pod_uid, ..request })).await;
        answer(&mut a).await
    };
    for (id, uid) in [(1, ""), (2, "u1")] {
        let found = ask(id, 1, uid).await;
        assert_eq!(found.result(), Outcome::Drained, "{uid}: {found:?}");
    }
    // A pod without a Service is told so, although the tenant names its address and UID.
    for (id, uid) in [(3, ""), (4, "u9")] {
        let found = ask(id, 9, uid).await;
        assert!(found.result() == Outcome::Refused && found.reason.contains("no endpoint"), "{uid}: {found:?}");
        assert!(!found.reason.contains("hostile"), "{found:?}");
    }
}

/// Each question has bounds that no test waits for.
async fn asks_for_ever(a: &mut Client) -> v1::BarrierAnswer {
    ask(a, POD, 3_000_000, 3_000_000).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_confirms_nothing_delays_pods_for_a_limited_time_and_cannot_get_it_back() {
    let part = Duration::from_millis(20);
    let mut pair = Pair::start_with(Settings { uncovered_after: NEVER, patience_part: part, ..settings() }).await;
    let (mut a, b, mut c) = (pair.agent(0, "a").await, pair.agent(1, "b").await, pair.agent(1, "c").await);
    pair.change_both([removed()]);
    program(&pair.replicas[0], &mut a).await;
    program(&pair.replicas[1], &mut c).await;
    let found = asks_for_ever(&mut a).await;
    assert_eq!((found.result(), found.unconfirmed_count), (Outcome::Incomplete, 1), "{found:?}");
    let problems = pair.replicas[1].status().await.problems;
    assert!(problems.iter().any(|problem| problem.object == "Node b"), "{problems:?}");
    // Nothing that the node says gives the time back: an old ACK, a failure, or another stream.
    b.send(Body::Ack(v1::Ack { version: 1, ..v1::Ack::default() })).await;
    assert_eq!(asks_for_ever(&mut a).await.result(), Outcome::Incomplete);
    b.send(Body::ApplyFailed(v1::ApplyFailed { version: 1, ..v1::ApplyFailed::default() })).await;
    assert_eq!(asks_for_ever(&mut a).await.result(), Outcome::Incomplete);
    let mut b = pair.replicas[1].open("b").await;
    assert_eq!(asks_for_ever(&mut a).await.result(), Outcome::Incomplete);
    // An honest ACK counts.
    program(&pair.replicas[1], &mut b).await;
    let is_drained = async || asks_for_ever(&mut a).await.result() == Outcome::Drained;
    eventually("the node confirms again", is_drained).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_rejects_everything_or_goes_away_delays_pods_for_a_limited_time() {
    let part = Duration::from_millis(20);
    let mut pair = Pair::start_with(Settings { uncovered_after: NEVER, patience_part: part, ..settings() }).await;
    let (mut a, mut b, mut c) = (pair.agent(0, "a").await, pair.agent(1, "b").await, pair.agent(1, "c").await);
    pair.change_both([removed()]);
    for (replica, client) in [(0, &mut a), (1, &mut b), (1, &mut c)] {
        program(&pair.replicas[replica], client).await;
    }
    b.send(Body::Nack(v1::Nack { version: 1, in_force: u64::MAX, ..v1::Nack::default() })).await;
    let is_incomplete = async || asks_for_ever(&mut a).await.result() == Outcome::Incomplete;
    eventually("the rejection counts", is_incomplete).await;
    drop(c);
    // The replica may notice the end of the stream a moment later.
    let are_missed = async || {
        let found = asks_for_ever(&mut a).await;
        (found.result(), found.unconfirmed_count) == (Outcome::Incomplete, 2)
    };
    eventually("both nodes are missed, and nobody waits for them", are_missed).await;
}

/// Whoever writes a Service that agents reject, and stops pods of it again and again, must not use
/// up the patience with all nodes.
#[tokio::test(flavor = "multi_thread")]
async fn a_service_that_every_node_rejects_costs_no_node_its_patience() {
    let part = Duration::from_millis(20);
    let mut pair = Pair::start_with(Settings { uncovered_after: NEVER, patience_part: part, ..settings() }).await;
    let (mut a, mut b, mut c) = (pair.agent(0, "a").await, pair.agent(1, "b").await, pair.agent(1, "c").await);
    pair.change_both([removed()]);
    let resource = format!("Service {}", key(1));
    let rejection = v1::Rejection { resource: resource.clone(), ..v1::Rejection::default() };
    for (replica, client) in [(0, &mut a), (1, &mut b), (1, &mut c)] {
        let rejections = vec![rejection.clone()];
        client.send(Body::Nack(v1::Nack { version: 1, rejections, in_force: 1, ..v1::Nack::default() })).await;
        program(&pair.replicas[replica], client).await;
    }
    // The answer does not wait for the bound, because waiting longer changes nothing.
    for _ in 0..2 {
        let found = asks_for_ever(&mut a).await;
        assert_eq!((found.result(), found.unconfirmed_count), (Outcome::Incomplete, 3), "{found:?}");
    }
    for replica in &pair.replicas {
        let problems = replica.status().await.problems;
        assert!(!problems.iter().any(|problem| problem.object.starts_with("Node ")), "{problems:?}");
    }
    for client in [&mut a, &mut b, &mut c] {
        let withdrawn = vec![resource.clone()];
        client.send(Body::Nack(v1::Nack { version: 1, withdrawn, ..v1::Nack::default() })).await;
    }
    let is_drained = async || asks_for_ever(&mut a).await.result() == Outcome::Drained;
    eventually("the rejections are withdrawn", is_drained).await;
}

#[tokio::test]
async fn a_large_request_of_a_pod_ends_the_stream_and_is_not_kept() {
    let replica = Replica::start().await;
    let client = replica.open("a").await;
    let large = v1::BarrierRequest { id: 1, address: vec![0; 200 << 10].into(), ..v1::BarrierRequest::default() };
    client.send(Body::Barrier(large)).await;
    let ended = || replica.metric("headgate_streams_rejected_total{reason=\"message_too_large\"}");
    eventually("the stream has ended", async || ended() == 1).await;
}
