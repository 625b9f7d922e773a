//! Tests with clients that the replica refuses. Other agents must not be affected.

use std::{net::Ipv4Addr, time::Duration};

use bytes::Bytes;
use headgate_control_plane::{
    model::Sink as _,
    serve::{Security, Settings},
};
use headgate_proto::v1;
use prost::Message as _;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    time::timeout,
};
use tonic::Code;

use crate::{
    client::{self, Client, GUARD, channel, eventually, hello, refusal},
    replica::{Replica, service, settings},
};

use super::assert_same;

#[tokio::test]
async fn misbehaving_agents_are_refused_and_do_not_affect_others() {
    // Of the agents of this replica, none is silent, however slow the machine is.
    let patient = Settings { hello_timeout: GUARD, ..settings() };
    let replica = Replica::start_with(patient, Security::Plaintext).await;
    replica.store.synced();
    let mut good = replica.open("good").await;
    let address = replica.running.local_addr;
    let bytes = |message: &v1::AgentMessage| Bytes::from(message.encode_to_vec());
    let first = bytes(&hello("bad", None));
    let ack = bytes(&client::message(v1::agent_message::Body::Ack(v1::Ack::default())));
    let digests = v1::BucketDigests { sums: Bytes::from_static(b"short"), counts: vec![1] };
    let odd_resume = v1::Resume { digests: Some(digests), ..v1::Resume::default() };
    let huge = Bytes::from(vec![0; headgate_proto::MAX_AGENT_MESSAGE_BYTES + 1]);
    let garbage = Bytes::from_static(b"\xff\xff\xff garbage");
    let cases: [(&str, Vec<Bytes>, Code, &str); 8] = [
        ("ACK before Hello", vec![ack], Code::InvalidArgument, "no_hello"),
        ("second Hello", vec![first.clone(), first.clone()], Code::InvalidArgument, "second_hello"),
        ("garbage first", vec![garbage.clone()], Code::InvalidArgument, "malformed_message"),
        ("garbage later", vec![first.clone(), garbage], Code::InvalidArgument, "malformed_message"),
        ("huge first", vec![huge.clone()], Code::ResourceExhausted, "message_too_large"),
        ("huge later", vec![first, huge], Code::ResourceExhausted, "message_too_large"),
        ("no name", vec![bytes(&hello("Not A Name", None))], Code::InvalidArgument, "invalid_hello"),
        ("digests", vec![bytes(&hello("bad", Some(odd_resume)))], Code::InvalidArgument, "invalid_hello"),
    ];
    for (what, messages, code, reason) in cases {
        let sample = format!("headgate_streams_rejected_total{{reason=\"{reason}\"}}");
        let before = replica.metric(&sample);
        let status = refusal(channel(address).await, messages).await;
        assert_eq!(status.code(), code, "{what}: {status}");
        assert!(!status.message().is_empty(), "{what}");
        eventually(&format!("{what} is counted as {reason}"), async || replica.metric(&sample) > before).await;
    }
    // This client does not speak HTTP/2.
    let mut socket = tokio::net::TcpStream::connect(address).await.unwrap();
    socket.write_all(b"GET / HTTP/1.1\r\n\r\n\0\0\0").await.unwrap();

    replica.put([service(1, 80)]);
    good.reach(1).await;
    assert_same(&good, &replica);
}

#[tokio::test]
async fn silent_clients_are_refused() {
    let impatient = Settings { hello_timeout: Duration::from_millis(500), ..settings() };
    let replica = Replica::start_with(impatient, Security::Plaintext).await;
    replica.store.synced();
    let no_hello = || replica.metric("headgate_streams_rejected_total{reason=\"no_hello\"}");
    // On a slow machine, the request itself may come too late. Then the connection ends without a
    // status, and another client tries it.
    let is_refused = async || {
        let before = no_hello();
        let status = refusal(channel(replica.running.local_addr).await, vec![]).await;
        status.code() == Code::DeadlineExceeded && !status.message().is_empty() && no_hello() > before
    };
    eventually("a silent agent is refused", is_refused).await;
    // This client says nothing on the other port.
    let mut silent = tokio::net::TcpStream::connect(replica.running.inspect_addr).await.unwrap();
    let mut sent = Vec::new();
    timeout(GUARD, silent.read_to_end(&mut sent)).await.expect("a silent connection stays open").ok();
}

#[tokio::test]
async fn a_newer_stream_of_a_node_replaces_the_older_one() {
    let replica = Replica::start().await;
    let mut first = replica.open("n1").await;
    first.until(|client| !client.ends.is_empty()).await;
    let mut second = replica.open("n1").await;
    assert_eq!(first.status().await.code(), Code::Aborted);
    replica.put([service(1, 80)]);
    second.reach(1).await;
    assert_eq!(replica.metric("headgate_streams_ended_total{reason=\"replaced\"}"), 1);
}

#[tokio::test]
async fn agents_with_one_node_name_that_throw_each_other_out_are_a_problem() {
    let replica = Replica::start().await;
    let open_from = async |host: u8, node: &str| {
        let address = Some(Ipv4Addr::new(127, 0, 0, host).into());
        let endpoint = client::endpoint(replica.running.local_addr).local_address(address);
        Client::open(endpoint.connect().await.unwrap(), node, None).await.unwrap()
    };
    let mut streams = vec![open_from(2, "n2").await];
    // An agent on a bad network replaces its own stream.
    for _ in 0..8 {
        streams.push(open_from(1, "n1").await);
    }
    for count in 1..=4 {
        let status = replica.status().await;
        assert_eq!(status.problems, [], "before stream {count}");
        streams.push(open_from(1 + count % 2, "n1").await);
    }
    let status = replica.status().await;
    let [problem] = &status.problems[..] else { panic!("{status:?}") };
    assert_eq!(problem.object, "Node n1");
    assert!(problem.message.starts_with("4 times in a row, a stream from another address"), "{problem:?}");
    assert!(problem.message.contains("127.0.0.2") && problem.message.contains("--node-name"), "{problem:?}");
    for agent in replica.agents().await {
        assert_eq!(agent.degraded.contains(&problem.message), agent.node == "n1", "{agent:?}");
    }
    // Then one of them has gone.
    streams.push(open_from(1, "n1").await);
    let status = replica.status().await;
    assert_eq!(status.problems, []);
}

#[tokio::test]
async fn a_node_that_opens_streams_too_often_is_refused() {
    let replica = Replica::start().await;
    let mut good = replica.open("good").await;
    let refused = async {
        loop {
            if let Err(status) = Client::open(channel(replica.running.local_addr).await, "bad", None).await {
                return status;
            }
        }
    };
    let status = timeout(GUARD, refused).await.expect("the replica accepts any number of streams");
    assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
    assert!(status.message().contains("node bad opens streams too often"), "{status}");
    assert_eq!(replica.metric("headgate_streams_rejected_total{reason=\"too_many_streams\"}"), 1);
    replica.put([service(1, 80)]);
    good.reach(1).await;
}
