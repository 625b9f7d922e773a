//! What all nodes have programmed, as two replicas know it together (discovery.proto, sections 16
//! and 18). The simulation judges what they say while replicas and agents fail.

use std::{
    net::{IpAddr, Ipv4Addr},
    time::Duration,
};

use headgate_control_plane::{
    model::NodeChange,
    serve::{PeerSettings, Settings},
};
use headgate_core::{Change, Conditions};
use headgate_proto::v1::{self, agent_message::Body, barrier_answer::Result as Outcome};
use headgate_tests::testbed::page;
use tokio::{task::spawn_blocking, time::sleep};

use crate::{
    barrier::{
        NEVER, OTHER, POD, Pair, TERMINATING, apply, ask, ask_until_unconfirmed, endpoint, program, program_all,
        removed,
    },
    client::{Client, channel, eventually},
    replica::{Replica, key, service, settings},
};

/// The nodes that a replica lists, with their states.
async fn agents(replica: &Replica) -> Vec<(String, String)> {
    replica.agents().await.into_iter().map(|agent| (agent.node, agent.state)).collect()
}

/// Waits until a replica lists these nodes in these states.
async fn until_agents(replica: &Replica, wanted: &[(&str, &str)]) {
    let wanted: Vec<_> = wanted.iter().map(|(node, state)| ((*node).to_owned(), (*state).to_owned())).collect();
    eventually(&format!("the nodes are {wanted:?}"), async || agents(replica).await == wanted).await;
}

/// Removes the endpoint at both replicas, whose three agents program it.
async fn all_programmed(pair: &mut Pair) -> [Client; 3] {
    let mut agents = [pair.agent(0, "a").await, pair.agent(1, "b").await, pair.agent(1, "c").await];
    pair.change_both([removed()]);
    for (client, replica) in agents.iter_mut().zip([0, 1, 1]) {
        program(&pair.replicas[replica], client).await;
    }
    agents
}

#[tokio::test(flavor = "multi_thread")]
async fn the_nodes_of_a_replica_that_stops_count_until_they_return() {
    let mut pair = Pair::start(Duration::ZERO).await;
    let [mut a, _b, _c] = all_programmed(&mut pair).await;
    until_agents(&pair.replicas[0], &[("a", "up_to_date"), ("b", "up_to_date"), ("c", "up_to_date")]).await;
    let Pair { replicas: [first, second], .. } = pair;
    second.running.stop().await;
    until_agents(&first, &[("a", "up_to_date"), ("b", "no_agent"), ("c", "no_agent")]).await;
    let found = ask(&mut a, POD, 60_000, 700).await;
    assert_eq!((found.result(), found.unconfirmed_count), (Outcome::Incomplete, 2));
    let fleet = first.status().await.fleet.unwrap();
    assert_eq!((fleet.nodes, fleet.up_to_date, fleet.no_agent), (3, 1, 2));
    // The replica refreshes the page for each request.
    let address = first.running.metrics_addr.unwrap();
    let page = spawn_blocking(move || page::get(address, "/metrics")).await.unwrap().unwrap();
    assert!(page.contains("headgate_control_plane_nodes_absent{reason=\"lost\"} 2"), "{page}");
}

/// As when the pod of a replica leaves its Service, and ends a moment later.
#[tokio::test(flavor = "multi_thread")]
async fn the_nodes_of_a_replica_count_when_no_name_leads_to_it_any_more() {
    let peers = Some(PeerSettings { service: Some(key(9)), ..PeerSettings::default() });
    let mut pair = Pair::start_with(Settings { uncovered_after: Duration::ZERO, peers, ..settings() }).await;
    let hosts = [0, 1].map(|replica| match pair.replicas[replica].running.local_addr.ip() {
        IpAddr::V4(host) => host,
        IpAddr::V6(host) => panic!("{host}"),
    });
    let replica = |host: Ipv4Addr| {
        let Change::Endpoint(_, place) = endpoint(host, "a", Conditions::READY) else { panic!("no endpoint") };
        Change::Endpoint(key(9), place)
    };
    for (replica, node) in pair.replicas.iter().zip(["a", "b"]) {
        let at = replica.running.local_addr;
        let opens = async || Client::open(channel(at).await, node, None).await.is_ok();
        eventually("agents may open streams", opens).await;
    }
    let [_a, _b, _c] = all_programmed(&mut pair).await;
    // From now on the agents read nothing: they would reject endpoints on loopback.
    pair.change_both([service(9, 80), replica(hosts[0]), replica(hosts[1])]);
    let lost = async |replica: &Replica| agents(replica).await.iter().filter(|(_, state)| state == "no_agent").count();
    eventually("the replicas have joined", async || lost(&pair.replicas[0]).await == 0).await;
    pair.change(0, Change::RemoveEndpoint(key(9), hosts[1].into()));
    // A replica looks at the names once a second.
    sleep(Duration::from_secs(2)).await;
    let Pair { replicas: [first, second], .. } = pair;
    second.running.stop().await;
    eventually("the other replica has stopped", async || lost(&first).await == 2).await;
    let asked = v1::DrainPodRequest {
        namespace: "default".into(),
        name: "pod".into(),
        uid: "pod".into(),
        timeout_ms: 700,
        silent_ms: 700,
    };
    let mut said = first.inspect().await.drain_pod(asked).await.unwrap().into_inner();
    let said = said.message().await.unwrap().unwrap();
    assert_eq!(said.result(), Outcome::Incomplete, "{said:?}");
    assert_eq!(said.unconfirmed, ["b", "c"]);
}

/// The node forwards with its old rules, whatever happens to its Node.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_is_deleted_and_created_again_counts() {
    // No replica is too young to know all nodes, and none forgets one during the test.
    let age = Duration::from_secs(6);
    let mut pair = Pair::start(age).await;
    let (mut a, b, mut c) = (pair.agent(0, "a").await, pair.agent(1, "b").await, pair.agent(1, "c").await);
    sleep(age).await;
    pair.change_both([removed()]);
    program_all(&pair, [(0, &mut a), (1, &mut c)]).await;
    drop(b);
    until_agents(&pair.replicas[0], &[("a", "up_to_date"), ("b", "no_agent"), ("c", "up_to_date")]).await;
    pair.put_nodes(&[NodeChange::Remove("b".into())]);
    pair.put_nodes(&[apply("b")]);
    ask_until_unconfirmed(&mut a, POD, 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn replicas_with_different_nodes_do_not_ask_each_other_without_a_pause() {
    let mut pair = Pair::start(NEVER).await;
    let [mut a, _b, _c] = all_programmed(&mut pair).await;
    // The first replica knows a Node that the second one does not have, and that has no agent.
    pair.replicas[0].put_nodes([apply("only-here")]);
    let messages = || pair.replicas[1].metric("headgate_peer_questions_total");
    let before = messages();
    ask_until_unconfirmed(&mut a, POD, 1).await;
    let asked = messages() - before;
    assert!((1..20).contains(&asked), "{asked} questions");
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_that_the_selector_excludes_are_not_missed() {
    let mut pair = Pair::start(NEVER).await;
    let [mut a, _b, _c] = all_programmed(&mut pair).await;
    let NodeChange::Apply(windows) = apply("windows") else { panic!("not a Node") };
    pair.put_nodes(&[NodeChange::ApplyExcluded(windows)]);
    assert_eq!(ask(&mut a, POD, 60_000, 60_000).await.result(), Outcome::Drained);
    until_agents(&pair.replicas[0], &[("a", "up_to_date"), ("b", "up_to_date"), ("c", "up_to_date")]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn any_replica_answers_queries_about_any_node() {
    let pair = Pair::start(NEVER).await;
    let mut b = pair.agent(1, "b").await;
    until_agents(&pair.replicas[0], &[("a", "no_agent"), ("b", "up_to_date"), ("c", "no_agent")]).await;
    let asking = tokio::spawn({
        let mut client = pair.replicas[0].inspect().await;
        async move {
            let kind = Some(v1::node_query::Kind::Status(v1::NodeStatusQuery {}));
            let query = Some(v1::NodeQuery { kind });
            let request = v1::QueryNodeRequest { node: "b".into(), query, only_this_replica: false };
            client.query_node(request).await?.into_inner().message().await
        }
    });
    b.until(|client| !client.queries.is_empty()).await;
    let status = v1::NodeStatus { node: "b".into(), ..v1::NodeStatus::default() };
    let part = Some(v1::NodeAnswer { kind: Some(v1::node_answer::Kind::Status(status)) });
    let answer = v1::Answer { id: b.queries[0].id, part, is_last: true, ..v1::Answer::default() };
    b.send(Body::Answer(answer)).await;
    let answer = asking.await.unwrap().unwrap().unwrap();
    assert!(matches!(answer.kind, Some(v1::node_answer::Kind::Status(status)) if status.node == "b"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_about_an_unknown_pod_does_not_hurry_the_fleet() {
    let mut pair = Pair::start(Duration::ZERO).await;
    let [mut a, _b, _c] = all_programmed(&mut pair).await;
    until_agents(&pair.replicas[0], &[("a", "up_to_date"), ("b", "up_to_date"), ("c", "up_to_date")]).await;
    assert_eq!(ask(&mut a, Ipv4Addr::new(10, 9, 9, 9), 60_000, 500).await.result(), Outcome::Refused);
    a.urgent.clear();
    pair.change(0, endpoint(OTHER, "b", TERMINATING));
    program(&pair.replicas[0], &mut a).await;
    assert!(a.urgent.is_empty(), "{:?}", a.urgent);
}
