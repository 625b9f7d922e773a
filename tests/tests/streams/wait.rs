//! Tests of `headgatectl wait` and `headgatectl agents` against replicas in the test's process. The
//! simulated agents send an ACK when the test asks for it.

use headgate_control_plane::serve::Security;
use headgate_proto::v1;
use serde_json::Value;
use tokio::time::timeout;

use crate::{
    client::{Client, GUARD, eventually},
    replica::{Replica, endpoint, headgatectl, remove_endpoint, remove_service, service, settings},
};

async fn acknowledge(client: &mut Client, replica: &Replica) {
    client.reach(replica.store.version()).await;
    replica.acknowledge(client).await;
}

/// Waits until the replica knows which resources these nodes reject.
async fn until_rejected(replica: &Replica, wanted: &[(&str, &[&str])]) {
    let are_known = async || {
        let agents = replica.agents().await;
        wanted.iter().all(|(node, resources)| {
            let agent = agents.iter().find(|agent| agent.node == *node);
            agent.is_some_and(|agent| agent.rejections.iter().map(|rejection| &rejection.object).eq(*resources))
        })
    };
    eventually(&format!("the rejections are {wanted:?}"), are_known).await;
}

fn nack(version: u64, resource: &str) -> v1::agent_message::Body {
    let rejection = v1::Rejection { resource: resource.into(), field: "ports[0]".into(), reason: "no".into() };
    v1::agent_message::Body::Nack(v1::Nack { version, rejections: vec![rejection], ..Default::default() })
}

#[tokio::test(flavor = "multi_thread")]
async fn wait_returns_once_every_node_has_acknowledged() {
    let replica = Replica::start().await;
    replica.put([service(1, 80), endpoint(1, 1, 8080)]);
    let (mut a, mut b) = (replica.agent("a").await, replica.agent("b").await);
    let answer = headgatectl(&[&replica], "wait default/service-1").await;
    assert_eq!((answer.code, answer.err.as_str()), (0, ""));
    assert!(answer.out.starts_with("service default/service-1: 2 nodes have programmed it"), "{}", answer.out);

    replica.put([endpoint(1, 2, 8080)]);
    acknowledge(&mut a, &replica).await;
    b.reach(replica.store.version()).await;
    let answer = headgatectl(&[&replica], "wait service-1 --timeout 500ms").await;
    assert_eq!((answer.code, answer.out.as_str()), (3, ""));
    assert!(answer.err.contains("1 of 2 nodes have programmed it"), "{}", answer.err);
    let behind = "behind: the version was sent, and there is no ACK yet";
    assert!(answer.err.contains("b: at version 1 of 2,") && answer.err.contains(behind), "{}", answer.err);
    assert!(!answer.err.contains("a: at"), "{}", answer.err);

    let waiting = headgatectl(&[&replica], "wait service-1 -o json");
    acknowledge(&mut b, &replica).await;
    let answer = waiting.await;
    assert_eq!((answer.code, &answer.json()["done"]), (0, &Value::Bool(true)));
    // `headgatectl wait` does not wait for later changes of other Services.
    replica.put([service(2, 80)]);
    assert_eq!(headgatectl(&[&replica], "wait service-1 --timeout 50s").await.code, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn wait_returns_once_an_endpoint_is_known_or_removed() {
    let replica = Replica::start().await;
    replica.put([service(1, 80), endpoint(1, 1, 8080)]);
    let mut a = replica.agent("a").await;
    let answer = headgatectl(&[&replica], "wait service-1 --endpoint 10.0.1.2 --timeout 300ms").await;
    assert_eq!(answer.code, 3);
    assert!(answer.err.contains("does not know the endpoint"), "{}", answer.err);

    let waiting = headgatectl(&[&replica], "wait service-1 --endpoint 10.0.1.2");
    replica.put([endpoint(1, 2, 8080)]);
    acknowledge(&mut a, &replica).await;
    assert_eq!(waiting.await.code, 0);

    let waiting = headgatectl(&[&replica], "wait service-1 --endpoint 10.0.1.2 --gone -o json");
    replica.put([remove_endpoint(1, 2)]);
    acknowledge(&mut a, &replica).await;
    let answer = waiting.await;
    assert_eq!((answer.code, &answer.json()["version"]), (0, &3.into()));

    let answer = headgatectl(&[&replica], "wait service-1 --gone --timeout 300ms").await;
    assert!(answer.code == 3 && answer.err.contains("the replica still has the service"), "{}", answer.err);
    replica.put([remove_endpoint(1, 1), remove_service(1)]);
    acknowledge(&mut a, &replica).await;
    assert_eq!(headgatectl(&[&replica], "wait service-1 --gone").await.code, 0);
    assert_eq!(headgatectl(&[&replica], "wait service-1 --endpoint nonsense").await.code, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn wait_names_nodes_that_reject_the_change_or_lose_their_agent() {
    let replica = Replica::start().await;
    replica.put([service(1, 80), endpoint(1, 1, 8080), service(2, 80)]);
    let (a, b) = (replica.agent("a").await, replica.agent("b").await);
    a.send(nack(1, "Endpoint default/service-1 10.0.1.1")).await;
    b.send(nack(1, "Service default/service-2")).await;
    until_rejected(&replica, &[("a", &["Endpoint default/service-1 10.0.1.1"]), ("b", &["Service default/service-2"])])
        .await;
    let answer = headgatectl(&[&replica], "wait service-1 --timeout 500ms").await;
    assert_eq!(answer.code, 3);
    let reason = "a: at version 1 of 1: rejected Endpoint default/service-1 10.0.1.1, ports[0]: no";
    assert!(answer.err.contains(reason) && !answer.err.contains("b: at"), "{}", answer.err);

    let withdrawn = vec!["Endpoint default/service-1 10.0.1.1".to_owned()];
    a.send(v1::agent_message::Body::Nack(v1::Nack { version: 1, withdrawn, ..Default::default() })).await;
    assert_eq!(headgatectl(&[&replica], "wait service-1").await.code, 0);

    replica.put([endpoint(1, 2, 8080)]);
    let mut a = a;
    acknowledge(&mut a, &replica).await;
    drop(b);
    let lost =
        async { while headgatectl(&[&replica], "agents --absent -o json").await.json() == serde_json::json!([]) {} };
    timeout(GUARD, lost).await.unwrap();
    let answer = headgatectl(&[&replica], "wait service-1 --timeout 300ms").await;
    assert_eq!((answer.code, answer.out.as_str()), (4, ""));
    assert!(answer.err.contains("1 of 2 nodes have programmed it\n  b: no agent: "), "{}", answer.err);
    let answer = headgatectl(&[&replica], "wait service-1 --allow-absent").await;
    assert!(answer.code == 0 && answer.out.contains("1 node has programmed it"), "{} {}", answer.out, answer.err);
    assert!(answer.out.contains("\n  b: no agent: "), "{}", answer.out);
}

/// People see the last 64 rejections. The others count as well, also after a withdrawal.
#[tokio::test(flavor = "multi_thread")]
async fn a_rejection_that_nobody_sees_counts() {
    let replica = Replica::start().await;
    replica.put((1..=80).map(|number| service(number, 80)));
    let a = replica.agent("a").await;
    let resource = |number| format!("Service default/service-{number}");
    let rejection = |number| v1::Rejection { resource: resource(number), ..v1::Rejection::default() };
    let first = v1::Nack { rejections: (1..=80).map(rejection).collect(), in_force: 80, ..v1::Nack::default() };
    a.send(v1::agent_message::Body::Nack(first)).await;
    let then = v1::Nack { withdrawn: vec![resource(80)], in_force: 79, ..v1::Nack::default() };
    a.send(v1::agent_message::Body::Nack(then)).await;
    let shown: Vec<String> = (17..80).map(resource).collect();
    until_rejected(&replica, &[("a", &shown.iter().map(String::as_str).collect::<Vec<_>>())]).await;
    assert_eq!(headgatectl(&[&replica], "wait service-80").await.code, 0);
    let answer = headgatectl(&[&replica], "wait service-1 --timeout 500ms").await;
    assert_eq!((answer.code, answer.out.as_str()), (3, ""));
}

#[tokio::test(flavor = "multi_thread")]
async fn wait_without_any_node_succeeds_only_with_allow_absent() {
    let replica = Replica::start().await;
    replica.put([service(1, 80)]);
    let answer = headgatectl(&[&replica], "wait service-1 --timeout 300ms").await;
    assert!(answer.code == 4 && answer.err.contains("no Node and no agent is known"), "{}", answer.err);
    assert_eq!(headgatectl(&[&replica], "wait service-1 --allow-absent").await.code, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn failing_agents_are_listed_first() {
    let replica = Replica::start().await;
    replica.put([service(1, 80)]);
    let (_good, bad, failing) =
        (replica.agent("a-good").await, replica.agent("b-rejecting").await, replica.agent("c-failing").await);
    bad.send(nack(1, "Service default/service-1")).await;
    let failed = v1::ApplyFailed { version: 1, error: "no such table".into(), attempts: 3 };
    failing.send(v1::agent_message::Body::ApplyFailed(failed)).await;
    let both = async {
        loop {
            let answer = headgatectl(&[&replica], "agents --failing -o json").await.json();
            if answer.as_array().unwrap().len() == 2 {
                return answer;
            }
        }
    };
    let answer = timeout(GUARD, both).await.unwrap();
    assert_eq!((&answer[0]["node"], &answer[1]["node"]), (&"c-failing".into(), &"b-rejecting".into()));
    let table = headgatectl(&[&replica], "agents --limit 1").await.out;
    assert!(
        table.contains("... and 2 more: --limit 0 shows all\nfleet: 1 of 3 nodes up to date, 2 failing"),
        "{table}"
    );
    let wide = headgatectl(&[&replica], "agents a-good -o wide").await.out;
    assert!(wide.contains("ADDRESS") && wide.contains("up to date"), "{wide}");
}

#[tokio::test(flavor = "multi_thread")]
async fn agents_of_a_replica_that_never_lists_are_shown_as_waiting() {
    let replica = Replica::start_with(settings(), Security::Plaintext).await;
    let _agent = replica.open("node-0").await;
    let text = headgatectl(&[&replica], "agents").await.out;
    assert!(text.contains("node-0: waiting: the replica has not listed its source; the node holds no state"), "{text}");
    assert!(text.ends_with("fleet: 0 of 1 node up to date, 1 waiting\n"), "{text}");
    let answer = headgatectl(&[&replica], "wait ns/svc-0 --timeout 1s").await;
    assert!(answer.err.contains("the source of the replica is unlisted"), "{} {}", answer.out, answer.err);
}
