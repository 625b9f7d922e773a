//! Enrolment while the API server or the control plane is down.

use std::{fs, time::Duration};

use headgate_tests::{
    apiserver::{ApiServer, Restart, Token},
    in_memory::Call,
};

use super::{Cluster, FAILURE, SHORT, SUCCESS, requests::Client, until_renewed};
use crate::identity::{certs::made, server::eventually};

#[tokio::test(flavor = "multi_thread")]
async fn while_the_api_server_is_down_a_certificate_renews_itself() {
    let cluster = Cluster::start(&[SHORT]);
    let (agent, folder) = cluster.connected("n1").await;
    cluster.api.stop();
    cluster.until_enrolments("success_by_certificate", 1).await;
    until_renewed(&agent, 2).await;
    cluster.refuses("no certificate", Token::of_agent("n1"), "api_server").await;
    let answer = Client::of(&cluster).showing(&folder.join("tls")).enrol_without_token().await;
    assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");

    cluster.api.restart(&Restart::KeepHistory).unwrap();
    // The replica asks the API server again after some seconds without a failure.
    let is_refused = || async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let answer = Client::of(&cluster).showing(&folder.join("tls")).enrol_without_token().await;
        answer.starts_with("HTTP/1.1 403 ")
    };
    eventually("the API server decides, whatever the certificate is", is_refused).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn only_a_recent_certificate_of_an_existing_node_at_its_address_renews_itself() {
    let cluster = Cluster::start(&[]);
    let certs = cluster.path("certs");
    made(&certs, &["--node=n1,n2,n3", "--reader=me"]);
    let (_agent, _) = cluster.connected("n1").await;
    cluster.api.stop();
    let answer = async |holder: &str| Client::of(&cluster).showing(&certs.join(holder)).enrol_without_token().await;
    for (holder, answered) in [
        ("nodes/n1", "HTTP/1.1 200 OK"),
        ("nodes/n2", "is not an address of this Node"),
        ("nodes/n3", "does not know the Node n3"),
        ("readers/me", "the API server is unreachable"),
    ] {
        let answer = answer(holder).await;
        assert!(answer.contains(answered), "{holder}: {answer}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_that_starts_while_the_api_server_is_down_knows_no_node() {
    let api = ApiServer::start().unwrap();
    api.stop();
    let cluster = Cluster::with_api(api, &["--enrolment-any-address"]);
    cluster.refuses("no certificate", Token::of_agent("n1"), "api_server").await;
    let certs = cluster.path("certs");
    made(&certs, &["--node=n1"]);
    let answer = Client::of(&cluster).showing(&certs.join("nodes/n1")).enrol_without_token().await;
    assert!(answer.contains("does not know the Node n1"), "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn after_certificates_expired_in_an_outage_agents_keep_their_rules_and_enrol_again() {
    let mut cluster = Cluster::start(&[SHORT]);
    let (agent, _) = cluster.agent("n1", Token::of_agent("n1")).await;
    cluster.add_service(&agent, 1).await;
    let writes = || agent.kernel.calls().iter().filter(|call| !matches!(call, Call::Check | Call::Verify)).count();
    let before_outage = writes();
    cluster.control_plane = None;
    let problem = || agent.tls_problem();
    eventually("the status shows that the agent cannot enrol", || async { problem().contains("no new certificate") })
        .await;
    tokio::time::sleep(Duration::from_secs(20)).await;
    assert_eq!((agent.status()["connected"].as_bool(), writes()), (Some(false), before_outage));
    assert!(agent.metric(FAILURE) > 0);
    let before = agent.metric(SUCCESS);
    cluster.start_control_plane();
    eventually("the agent enrols again", || async { agent.metric(SUCCESS) > before }).await;
    agent.until_connected(true).await;
    assert_eq!(problem(), "");
}

#[tokio::test(flavor = "multi_thread")]
async fn after_the_authority_was_lost_agents_with_its_certificates_enrol_again() {
    let mut cluster = Cluster::start(&[]);
    let (agent, _) = cluster.connected("n1").await;
    cluster.control_plane = None;
    let certs = cluster.path("certs");
    fs::remove_dir_all(&certs).unwrap();
    made(&certs, &["--server-ip=127.0.0.1"]);
    cluster.start_control_plane();
    let problem = || agent.tls_problem();
    eventually("the status shows that the certificate is rejected", || async {
        problem().contains("rejects the certificate")
    })
    .await;
    agent.until_connected(true).await;
    assert_eq!((agent.metric(SUCCESS), problem().as_str()), (2, ""));
}
