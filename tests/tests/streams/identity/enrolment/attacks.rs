//! Attacks on enrolment by clients without certificates, and by nodes that an operator denies. Each
//! test also checks those who must not notice the attack.

use std::{
    fs,
    io::Write as _,
    net::{Ipv4Addr, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use headgate_tests::apiserver::{ApiServer, RequestFault, RequestFilter, Token, Verb};
use tokio::{net::TcpSocket, task::JoinSet};

use super::{
    Cluster, FAILURE, add_node,
    requests::{Client, enrol, signing_request},
};
use crate::identity::server::eventually;

/// Waits until the replica knows the Node n1, and gives it certificates.
async fn until_enrolls(cluster: &Cluster, client: &Client, request: &[u8]) {
    let is_enrolled = || async { client.send(request).await.is_ok_and(|answer| answer.starts_with("HTTP/1.1 200")) };
    eventually("the replica knows the Node", is_enrolled).await;
    assert!(cluster.enrolments("success") > 0);
}

/// Clients of one address that send garbage as fast as they can, until they are dropped.
struct Garbage(Arc<AtomicBool>, Vec<thread::JoinHandle<()>>);

impl Garbage {
    fn from(host: Ipv4Addr, cluster: &Cluster, threads: usize) -> Self {
        let (ends, server) = (Arc::new(AtomicBool::new(false)), cluster.enrolment.address());
        let send = |ends: Arc<AtomicBool>| {
            move || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                while !ends.load(Ordering::Relaxed) {
                    let sent = runtime.block_on(async {
                        let socket = TcpSocket::new_v4()?;
                        // Thousands of closed connections would else use up the ports.
                        socket.set_zero_linger()?;
                        socket.bind((host, 0).into())?;
                        let stream = socket.connect(server).await?;
                        stream.try_write(b"GET / HTTP/1.0\r\n\r\n")
                    });
                    // The server may close the connection before the garbage is sent.
                    drop(sent);
                }
            }
        };
        let spawn = |_| thread::spawn(send(Arc::clone(&ends)));
        Self(Arc::clone(&ends), (0..threads).map(spawn).collect())
    }
}

impl Drop for Garbage {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
        self.1.drain(..).for_each(|thread| thread.join().unwrap());
    }
}

/// One pod with three threads. All nodes enrol at their first attempt, and the log names the pod.
#[tokio::test(flavor = "multi_thread")]
async fn garbage_of_one_pod_keeps_no_node_from_enrolling() {
    const NODES: u32 = 50;
    let api = ApiServer::start().unwrap();
    let address = |n: u32| Ipv4Addr::from(0x7f01_0000 + n);
    for n in 0..NODES {
        add_node(&api, &format!("m{n}"), &address(n).to_string());
    }
    let cluster = Cluster::with_api(api, &[]);
    let (client, body) = (Client::of(&cluster), signing_request());
    let request = |n: u32| enrol(&cluster.api.issue_token(Token::of_agent(&format!("m{n}"))), &body);
    until_enrolls(&cluster, &client.with_address(address(0)), &request(0)).await;
    let pod = Ipv4Addr::new(127, 0, 0, 77);
    let _garbage = Garbage::from(pod, &cluster, 3);
    cluster.until_enrolments("tls", 30).await;
    let mut nodes = JoinSet::new();
    for n in 0..NODES {
        let (client, request) = (client.with_address(address(n)), request(n));
        nodes.spawn(async move { client.send(&request).await.unwrap() });
    }
    for answer in nodes.join_all().await {
        assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
    }
    let line = cluster.control_plane.as_ref().unwrap().until_logged(&format!("address={pod}")).unwrap();
    assert!(line.contains("no certificate was given"), "{line}");
}

/// A pod whose connections leave its node with the node's address. Some are silent at once, some
/// within a handshake, and some after it.
#[tokio::test(flavor = "multi_thread")]
async fn idle_connections_of_a_masqueraded_pod_do_not_block_its_node() {
    let cluster = Cluster::start(&[]);
    let (client, request) =
        (Client::of(&cluster), enrol(&cluster.api.issue_token(Token::of_agent("n1")), &signing_request()));
    until_enrolls(&cluster, &client, &request).await;
    let connect = || TcpStream::connect(cluster.enrolment.address()).unwrap();
    let silent: Vec<TcpStream> = (0..200).map(|_| connect()).collect();
    // Most of them are closed for the next one.
    cluster.until_enrolments("silent", 100).await;
    assert!(client.send(&request).await.unwrap().starts_with("HTTP/1.1 200 OK"));
    let mut begun: Vec<TcpStream> = (0..40).map(|_| connect()).collect();
    begun.iter_mut().for_each(|stream| stream.write_all(&[22]).unwrap());
    let finished = futures::future::join_all((0..20).map(|_| client.handshake())).await;
    assert!(client.send(&request).await.unwrap().starts_with("HTTP/1.1 200 OK"));
    drop((silent, begun, finished));
}

/// Tokens that the API server rejects cost their sender, and not the nodes.
#[tokio::test(flavor = "multi_thread")]
async fn wrong_tokens_of_one_pod_make_only_this_pod_wait() {
    let cluster = Cluster::start(&[]);
    let (client, body) = (Client::of(&cluster), signing_request());
    let request = enrol(&cluster.api.issue_token(Token::of_agent("n1")), &body);
    until_enrolls(&cluster, &client, &request).await;
    let (mut attempts, wrong) = (JoinSet::new(), enrol("wrong", &body));
    for _ in 0..200 {
        let (client, wrong) = (client.with_address(Ipv4Addr::new(127, 0, 0, 77)), wrong.clone());
        attempts.spawn(async move { client.send(&wrong).await });
    }
    cluster.until_enrolments("token_rejected", 20).await;
    assert!(client.send(&request).await.unwrap().starts_with("HTTP/1.1 200 OK"));
    assert!(cluster.enrolments("token_rejected") < 200, "nobody had to wait");
    attempts.shutdown().await;
}

/// 429 means that the API server answers. Only its silence lets a certificate renew itself.
#[tokio::test(flavor = "multi_thread")]
async fn a_busy_api_server_is_asked_again_and_not_replaced_by_a_certificate() {
    let cluster = Cluster::start(&[]);
    let (_agent, folder) = cluster.connected("n1").await;
    let thief = Client::of(&cluster).showing(&folder.join("tls"));
    cluster.api.fail_all(RequestFilter::verb(Verb::Other), RequestFault::status(429));
    for _ in 0..3 {
        let answer = thief.enrol_without_token().await;
        assert!(answer.starts_with("HTTP/1.1 429 ") && answer.contains("too busy"), "{answer}");
    }
    let (waiting, _) = cluster.agent("n1", Token::of_agent("n1")).await;
    eventually("the agent is asked to wait", || async { waiting.metric(FAILURE) > 0 }).await;
    cluster.api.clear_faults();
    waiting.until_connected(true).await;
    assert_eq!(cluster.enrolments("success_by_certificate"), 0);
}

/// A denied node loses its stream and gets no certificate, with a good token, until it is allowed
/// again. Another node does not notice.
#[tokio::test(flavor = "multi_thread")]
async fn a_denied_node_loses_its_stream_and_gets_no_certificate() {
    let folder = tempfile::tempdir().unwrap();
    let denied = folder.path().join("denied");
    fs::write(&denied, "").unwrap();
    let cluster = Cluster::start(&[&format!("--tls-denied={}", denied.display()), "--enrolment-any-address"]);
    let (agent, _) = cluster.connected("n1").await;
    let (other, _) = cluster.connected("n2").await;
    fs::write(&denied, "# stolen\nheadgate://node/n1\n").unwrap();
    agent.until_connected(false).await;
    let problem = || agent.tls_problem();
    eventually("the status names the reason", || async { problem().contains("--tls-denied") }).await;
    cluster.refuses("denied", Token::of_agent("n1"), "denied").await;
    fs::write(&denied, "").unwrap();
    agent.until_connected(true).await;
    assert_eq!(other.metric("headgate_agent_reconnects_total"), 0, "another node has lost its stream");
}
