//! Clients without certificates take nothing from streams.

use std::{io::Read as _, net::TcpStream, time::Duration};

use headgate_tests::apiserver::Token;

use super::{Cluster, FAILURE};
use crate::identity::server::eventually;

#[tokio::test(flavor = "multi_thread")]
async fn silent_clients_are_limited_and_end_and_disturb_no_stream() {
    let cluster = Cluster::start(&[]);
    let (agent, _) = cluster.agent("n1", Token::of_agent("n1")).await;
    agent.until_connected(true).await;
    let silent: Vec<TcpStream> = (0..100).map(|_| TcpStream::connect(cluster.enrolment.address()).unwrap()).collect();
    cluster.until_enrolments("busy", 96).await;
    let (late, _) = cluster.agent("n1", Token::of_agent("n1")).await;
    eventually("the agent is asked to wait", || async { late.metric(FAILURE) > 0 }).await;
    cluster.add_service(&agent).await;
    // Each silent connection ends by itself, and then there is place for the agent.
    cluster.until_enrolments("timeout", 4).await;
    for mut stream in silent {
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        assert!(!matches!(stream.read(&mut [0]), Ok(1..)), "the server sent data to a silent client");
    }
    cluster.until_enrolments("success", 2).await;
}
