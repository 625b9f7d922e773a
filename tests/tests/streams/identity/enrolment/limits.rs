//! Clients without certificates take nothing from streams.

use std::{
    io::Read as _,
    net::{Ipv4Addr, TcpStream},
    time::{Duration, Instant},
};

use headgate_tests::apiserver::{ApiServer, Token};
use tokio::task::JoinSet;

use super::{
    Cluster, FAILURE, add_node,
    requests::{Client, enrol, signing_request},
};

#[tokio::test(flavor = "multi_thread")]
async fn silent_clients_are_limited_and_end_and_disturb_no_stream() {
    let cluster = Cluster::start(&[]);
    let (agent, _) = cluster.connected("n1").await;
    let silent: Vec<TcpStream> = (0..100).map(|_| TcpStream::connect(cluster.enrolment.address()).unwrap()).collect();
    cluster.add_service(&agent, 1).await;
    let (late, _) = cluster.agent("n1", Token::of_agent("n1")).await;
    cluster.until_enrolments("success", 2).await;
    assert_eq!(late.metric(FAILURE), 0);
    // Each silent connection ends by itself.
    cluster.until_enrolments("silent", 100).await;
    for mut stream in silent {
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        assert!(!matches!(stream.read(&mut [0]), Ok(1..)), "the server sent data to a silent client");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn many_nodes_enrol_at_once_while_streams_carry_changes() {
    const NODES: u32 = 1000;
    let api = ApiServer::start().unwrap();
    add_node(&api, "n1", "127.0.0.1");
    let address = |n: u32| Ipv4Addr::from(0x7f01_0000 + n);
    for n in 0..NODES {
        add_node(&api, &format!("m{n}"), &address(n).to_string());
    }
    let cluster = Cluster::with_api(api, &[]);
    let (agent, _) = cluster.connected("n1").await;
    let (client, body) = (Client::of(&cluster), signing_request());

    let (begin, mut clients) = (Instant::now(), JoinSet::new());
    for n in 0..NODES {
        let token = cluster.api.issue_token(Token::of_agent(&format!("m{n}")));
        let client = client.with_address(address(n));
        let request = enrol(&token, &body);
        clients.spawn(async move {
            loop {
                match client.send(&request).await {
                    Ok(answer) => break assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}"),
                    // The kernel or the server may have too many connections.
                    Err(_) => tokio::time::sleep(Duration::from_millis(fastrand::u64(500..2000))).await,
                }
            }
        });
    }
    let (mut changes, mut slowest) = (0, Duration::ZERO);
    while cluster.enrolments("success") <= u64::from(NODES) {
        let change = Instant::now();
        cluster.add_service(&agent, changes).await;
        changes = changes.checked_add(1).unwrap();
        slowest = slowest.max(change.elapsed());
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    clients.join_all().await;
    println!("{NODES} nodes enrolled in {:?}; the slowest of {changes} changes took {slowest:?}", begin.elapsed());
}
