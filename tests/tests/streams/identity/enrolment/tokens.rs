//! Which tokens get a certificate, and for which node.

use headgate_tests::apiserver::Token;

use super::{Cluster, put_pod};
use crate::identity::server::eventually;

#[tokio::test(flavor = "multi_thread")]
async fn other_tokens_get_nothing() {
    let cluster = Cluster::start(&[]);
    let good = || Token::of_agent("n1");
    for (name, token, result) in [
        ("other address", Token::of_agent("n2"), "address"),
        ("audience", Token { audience: "https://kubernetes.default.svc".to_owned(), ..good() }, "token_rejected"),
        ("expired", Token { valid_seconds: -1, ..good() }, "token_rejected"),
        ("namespace", Token { namespace: "default".to_owned(), ..good() }, "service_account"),
        ("account", Token { service_account: "default".to_owned(), ..good() }, "service_account"),
        ("no pod", Token { pod: None, node: None, ..good() }, "no_pod"),
        ("pod gone", Token { is_pod_gone: true, ..good() }, "token_rejected"),
        ("unknown node", Token::of_agent("n3"), "unknown_node"),
    ] {
        cluster.refuses(name, token, result).await;
    }
    assert_eq!(cluster.enrolments("success"), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_name_comes_from_the_token() {
    let cluster = Cluster::start(&[]);
    // The agent claims to be n2. It gets a certificate for n1, with which it has no stream as n2.
    let (agent, _) = cluster.agent("n2", Token::of_agent("n1")).await;
    eventually("the stream is refused", || async {
        agent.metric("headgate_agent_stream_errors_total{reason=\"status\"}") > 0
    })
    .await;
    assert_eq!((cluster.enrolments("success"), agent.status()["connected"].as_bool()), (1, Some(false)));
}

#[tokio::test(flavor = "multi_thread")]
async fn if_the_review_names_no_node_the_node_comes_from_the_pod() {
    let cluster = Cluster::start(&[]);
    let token = || Token { node: None, ..Token::of_agent("n1") };
    cluster.refuses("no pod", token(), "no_node").await;
    put_pod(&cluster.api, "uid-of-another", "n1");
    cluster.refuses("another pod of this name", token(), "no_node").await;
    put_pod(&cluster.api, "uid-of-agent-n1", "n2");
    cluster.refuses("the pod is on another node", token(), "address").await;
    put_pod(&cluster.api, "uid-of-agent-n1", "n1");
    let (agent, _) = cluster.agent("n1", token()).await;
    agent.until_connected(true).await;
}
