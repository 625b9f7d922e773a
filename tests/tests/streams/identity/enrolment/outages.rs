//! Enrolment while the API server or the control plane is down.

use std::time::Duration;

use headgate_node_agent::dataplane::in_memory::Call;
use headgate_tests::apiserver::{ApiServer, Restart, Token};

use super::{Cluster, FAILURE, SHORT, SUCCESS, tokens::wrong_tokens};
use crate::identity::{certs::made, server::eventually};

pub(super) const KEYS: &str = "headgate_enrolment_keys_total{result=\"success\"}";

#[tokio::test(flavor = "multi_thread")]
async fn while_the_api_server_is_down_its_last_keys_confirm_tokens() {
    let cluster = Cluster::start(&[]);
    let (first, _) = cluster.agent("n1", Token::of_agent("n1")).await;
    first.until_connected(true).await;
    eventually("the keys are read", || async { cluster.metric(KEYS) > 0 }).await;
    cluster.api.stop();
    for (name, token, result) in wrong_tokens() {
        cluster.refuses(name, token, result).await;
    }
    let other = ApiServer::start().unwrap();
    cluster.refuses_text("another API server", &other.issue_token(Token::of_agent("n1")), "token_rejected").await;
    let (agent, _) = cluster.agent("n1", Token::of_agent("n1")).await;
    cluster.until_enrolments("success_by_keys", 1).await;
    agent.until_connected(true).await;
    cluster.refuses("no node in the token", Token { node: None, ..Token::of_agent("n1") }, "api_server").await;
    assert_eq!((cluster.enrolments("success"), cluster.enrolments("success_by_keys")), (1, 1));

    cluster.api.restart(&Restart::KeepHistory).unwrap();
    let gone = Token { is_pod_gone: true, ..Token::of_agent("n1") };
    let before = cluster.enrolments("token_rejected");
    // The replica asks the API server again within a few seconds.
    tokio::time::sleep(Duration::from_secs(6)).await;
    cluster.refuses("pod gone", gone, "token_rejected").await;
    assert_eq!(cluster.enrolments("token_rejected"), before + 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_keys_of_the_api_server_no_token_is_confirmed() {
    let api = ApiServer::start().unwrap();
    api.stop();
    let cluster = Cluster::with_api(api, &["--enrolment-any-address"]);
    cluster.refuses("no keys", Token::of_agent("n1"), "api_server").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn after_certificates_expired_in_an_outage_agents_keep_their_rules_and_enrol_again() {
    let mut cluster = Cluster::start(&[SHORT]);
    let (agent, _) = cluster.agent("n1", Token::of_agent("n1")).await;
    cluster.add_service(&agent, 1).await;
    let writes = || agent.kernel.calls().iter().filter(|call| **call != Call::Check).count();
    let before_outage = writes();
    cluster.control_plane = None;
    let problem = || agent.status()["tlsProblem"].as_str().unwrap_or_default().to_owned();
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
    let (agent, _) = cluster.agent("n1", Token::of_agent("n1")).await;
    agent.until_connected(true).await;
    cluster.control_plane = None;
    let certs = cluster.path("certs");
    std::fs::remove_dir_all(&certs).unwrap();
    made(&certs, &["--server-ip=127.0.0.1"]);
    cluster.start_control_plane();
    let problem = || agent.status()["tlsProblem"].as_str().unwrap_or_default().to_owned();
    eventually("the status shows that the certificate is rejected", || async {
        problem().contains("rejects the certificate")
    })
    .await;
    agent.until_connected(true).await;
    assert_eq!((agent.metric(SUCCESS), problem().as_str()), (2, ""));
}
