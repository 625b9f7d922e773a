//! What all nodes have programmed, as two replicas know it together (discovery.proto, sections 16
//! and 18): cases in which statements were false before replicas knew each other.

use std::{
    net::{Ipv4Addr, SocketAddr},
    time::Duration,
};

use headgate_control_plane::{
    model::{NodeChange, PodChange, Sink as _, Transaction},
    objects::PodId,
    serve::{PeerSettings, Security, Settings},
    store::Limits,
};
use headgate_core::{Change, Conditions, Service, TrafficPolicy};
use headgate_proto::v1::{self, agent_message::Body, barrier_answer::Result as Outcome};

use headgate_tests::testbed::page;
use tokio::task::spawn_blocking;

use crate::{
    barrier::{
        NEVER, OTHER, POD, Pair, TERMINATING, answer, apply, ask, assert_waits, endpoint, program, program_all,
        removed, request,
    },
    client::{Client, eventually},
    replica::{Replica, key, service, settings},
};

fn nack(rejected: &[String], withdrawn: &[String], in_force: usize) -> Body {
    let rejection = |resource: &String| v1::Rejection { resource: resource.clone(), ..v1::Rejection::default() };
    let rejections = rejected.iter().map(rejection).collect();
    Body::Nack(v1::Nack { version: 1, rejections, withdrawn: withdrawn.to_vec(), in_force: in_force as u64 })
}

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
async fn rejections_beyond_those_that_are_shown_prevent_every_statement_about_their_service() {
    let mut pair = Pair::start(NEVER).await;
    let [mut a, b, _c] = all_programmed(&mut pair).await;
    let own = "Service default/service-1".to_owned();
    let others: Vec<String> = (0..79).map(|number| format!("Service default/other-{number}")).collect();
    let all: Vec<String> = std::iter::once(own.clone()).chain(others.iter().cloned()).collect();
    b.send(nack(&all, &[], 80)).await;
    b.send(nack(&[], &others[78..], 79)).await;
    until_agents(&pair.replicas[0], &[("a", "up_to_date"), ("b", "failing"), ("c", "up_to_date")]).await;
    let found = ask(&mut a, POD, 60_000, 700).await;
    assert_eq!((found.result(), found.unconfirmed_count), (Outcome::Incomplete, 1));
    // The agent withdraws it, and rejects more than any replica remembers.
    let many: Vec<String> = (0..5_000).map(|number| format!("Service default/many-{number}")).collect();
    b.send(nack(&many, &[own], 5_078)).await;
    let found = ask(&mut a, POD, 60_000, 700).await;
    assert_eq!((found.result(), found.unconfirmed_count), (Outcome::Incomplete, 1));
    b.send(nack(&[], &many, 78)).await;
    let is_drained = async || ask(&mut a, POD, 60_000, 60_000).await.result() == Outcome::Drained;
    eventually("the rejections are withdrawn", is_drained).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rejection_that_was_lost_on_its_way_prevents_every_statement() {
    let mut pair = Pair::start(NEVER).await;
    let [mut a, b, _c] = all_programmed(&mut pair).await;
    b.send(nack(&[], &[], 1)).await;
    until_agents(&pair.replicas[1], &[("a", "up_to_date"), ("b", "failing"), ("c", "up_to_date")]).await;
    assert_eq!(ask(&mut a, POD, 60_000, 700).await.unconfirmed_count, 1);
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

#[tokio::test(flavor = "multi_thread")]
async fn every_replica_shows_that_two_agents_of_one_replica_replace_each_other() {
    let pair = Pair::start(NEVER).await;
    let mut streams = Vec::new();
    for count in 0..5 {
        let from = Some(Ipv4Addr::new(127, 0, 0, 1 + count % 2).into());
        let endpoint = crate::client::endpoint(pair.replicas[0].running.local_addr).local_address(from);
        streams.push(Client::open(endpoint.connect().await.unwrap(), "a", None).await.unwrap());
    }
    for replica in &pair.replicas {
        let degraded = async || replica.agents().await.into_iter().flat_map(|agent| agent.degraded).collect::<Vec<_>>();
        // The other replica may not have heard of the agents yet.
        let is_shown = async || !replica.status().await.problems.is_empty() && !degraded().await.is_empty();
        eventually("the replica shows the problem", is_shown).await;
        let (status, degraded) = (replica.status().await, degraded().await);
        let [problem] = &status.problems[..] else { panic!("{status:?}") };
        assert_eq!(problem.object, "Node a", "{problem:?}");
        assert_eq!(degraded, [problem.message.as_str()]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_is_deleted_and_created_again_is_remembered() {
    let mut pair = Pair::start(Duration::from_secs(3_600)).await;
    let [mut a, b, _c] = all_programmed(&mut pair).await;
    drop(b);
    until_agents(&pair.replicas[0], &[("a", "up_to_date"), ("b", "no_agent"), ("c", "up_to_date")]).await;
    for change in [NodeChange::Remove("b".into()), apply("b")] {
        pair.put_nodes(&[change]);
    }
    until_agents(&pair.replicas[0], &[("a", "up_to_date"), ("b", "no_agent"), ("c", "up_to_date")]).await;
    let found = ask(&mut a, POD, 60_000, 700).await;
    assert_eq!((found.result(), found.unconfirmed_count), (Outcome::Incomplete, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_that_has_not_listed_does_not_answer_for_a_pod_and_delays_nobody() {
    let mut pair = Pair::start_among(3, NEVER).await;
    let [mut a, _b, _c] = all_programmed(&mut pair).await;
    // A third replica joins. Its source is never listed, and it has no agent.
    let [first, second] = pair.replicas.each_ref().map(|replica| replica.running.local_addr);
    let SocketAddr::V4(mut at) = second else { panic!("not IPv4") };
    at.set_ip(Ipv4Addr::from(u32::from(*at.ip()) + 1));
    let names = [first, second, at.into()].map(|address| (address.ip().to_string(), address.port() + 1)).to_vec();
    let own =
        Settings { replica_name: "replica-3".into(), peers: Some(PeerSettings { names, tls: None }), ..settings() };
    let third = Replica::start_at(at.into(), own, Security::Plaintext, Limits::default()).await;
    let is_joined = |replica: &v1::ReplicaInfo| replica.replica == "replica-3" && replica.state == "joined";
    let has_joined = async || pair.replicas[0].status().await.replicas.iter().any(is_joined);
    eventually("the third replica has joined", has_joined).await;
    // The bounds are longer than the guard of `answer`: the answer does not wait for the replica.
    assert_eq!(ask(&mut a, POD, 3_600_000, 3_600_000).await.result(), Outcome::Drained);
    // It waits until it knows the pod. Before, it refused the request, so the pod ended at once.
    let mut d = third.open("a").await;
    d.send(Body::Barrier(request(POD, 60_000, 300))).await;
    assert_waits(&mut d).await;
    third.put_nodes(["a", "b", "c"].map(apply));
    third.store.synced();
    let found = answer(&mut d).await;
    assert_ne!(found.result(), Outcome::Refused, "{found:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_local_policy_makes_the_barrier_wait_for_the_nodes_that_do_stop() {
    let mut pair = Pair::start(NEVER).await;
    let (mut a, mut b, mut c) = (pair.agent(0, "a").await, pair.agent(1, "b").await, pair.agent(1, "c").await);
    let Change::Service(local) = service(1, 80) else { panic!("not a Service") };
    let local = Change::from(Service { external_traffic_policy: TrafficPolicy::Local, ..(*local).clone() });
    let stops = endpoint(POD, "a", TERMINATING);
    pair.change_both([local, stops]);
    program(&pair.replicas[0], &mut a).await;
    program(&pair.replicas[1], &mut b).await;
    a.send(Body::Barrier(request(POD, 60_000, 60_000))).await;
    // Node c still sends to the pod.
    assert_waits(&mut a).await;
    program(&pair.replicas[1], &mut c).await;
    let last = answer(&mut a).await;
    assert_eq!(last.result(), Outcome::Last);
    assert!(last.reason.contains("10.0.0.1 is the last endpoint of Service default/service-1 on its node"), "{last:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_endpoint_that_may_return_is_not_drained() {
    let mut pair = Pair::start(NEVER).await;
    let (mut a, mut b, mut c) = (pair.agent(0, "a").await, pair.agent(1, "b").await, pair.agent(1, "c").await);
    pair.change_both([endpoint(POD, "a", Conditions { ready: false, serving: false, terminating: false })]);
    program_all(&pair, [(0, &mut a), (1, &mut b), (1, &mut c)]).await;
    let found = ask(&mut a, POD, 900, 900).await;
    assert_eq!(found.result(), Outcome::Incomplete);
    assert!(found.reason.contains("it may become ready again"), "{found:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn removed_endpoints_of_an_older_pod_do_not_answer_for_a_new_pod_of_the_same_name() {
    let mut pair = Pair::start(Duration::ZERO).await;
    let _agents = all_programmed(&mut pair).await;
    pair.put_pod(1, None);
    let ask = |uid: &str| {
        let (uid, timeout_ms) = (uid.to_owned(), 700);
        let (namespace, name) = ("default".to_owned(), "pod".to_owned());
        v1::DrainPodRequest { namespace, name, timeout_ms, silent_ms: timeout_ms, uid }
    };
    let mut client = pair.replicas[0].inspect().await;
    let mut drain = async |uid| {
        let mut answers = client.drain_pod(ask(uid)).await.unwrap().into_inner();
        answers.message().await.unwrap().unwrap()
    };
    let unknown = drain("").await;
    assert_eq!(unknown.result(), Outcome::Incomplete);
    assert!(unknown.reason.contains("give the UID"), "{unknown:?}");
    // In this test, a pod's UID equals its name.
    assert_eq!(drain("pod").await.result(), Outcome::Drained);
    assert_eq!(drain("another").await.result(), Outcome::Refused);
    assert_ne!(PodId::new("pod", "pod"), PodId::new("another", "pod"));
}

#[tokio::test(flavor = "multi_thread")]
async fn replicas_with_different_nodes_do_not_ask_each_other_without_a_pause() {
    let mut pair = Pair::start(NEVER).await;
    let [mut a, _b, _c] = all_programmed(&mut pair).await;
    // The first replica knows a Node that the second one does not have, and that has no agent.
    pair.replicas[0].put_nodes([apply("only-here")]);
    let messages = || pair.replicas[1].metric("headgate_peer_questions_total");
    let before = messages();
    assert_eq!(ask(&mut a, POD, 60_000, 1_000).await.unconfirmed_count, 1);
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

#[tokio::test(flavor = "multi_thread")]
async fn an_endpoint_that_ceases_to_be_the_last_one_during_the_round_is_asked_about() {
    let mut pair = Pair::start(NEVER).await;
    let of = |number: u16, address: Ipv4Addr, node: &str, conditions: Conditions| {
        let Change::Endpoint(_, endpoint) = endpoint(address, node, conditions) else { panic!("not an endpoint") };
        Change::Endpoint(key(number), endpoint)
    };
    let (mut a, mut b, mut c) = (pair.agent(0, "a").await, pair.agent(1, "b").await, pair.agent(1, "c").await);
    // The pod is the last endpoint of Service 2, and not of Service 1.
    pair.change_both([service(2, 81), of(2, POD, "a", TERMINATING), of(1, POD, "a", TERMINATING)]);
    pair.put_pod(2, Some(PodId::new("pod", "pod").in_namespace("default")));
    program(&pair.replicas[0], &mut a).await;
    program(&pair.replicas[1], &mut c).await;
    let version = pair.replicas[1].store.version();
    b.until(|client| client.held.version >= version).await;
    a.send(Body::Barrier(request(POD, 60_000, 60_000))).await;
    assert_waits(&mut a).await;
    // Another endpoint of Service 2 becomes ready. No node has programmed this.
    let witness = of(2, OTHER, "b", Conditions::READY);
    pair.change_both([witness]);
    b.ack().await;
    assert_waits(&mut a).await;
    program_all(&pair, [(0, &mut a), (1, &mut b), (1, &mut c)]).await;
    assert_ne!(answer(&mut a).await.result(), Outcome::Incomplete);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_ack_of_an_agent_wakes_a_question_about_what_its_replica_never_had() {
    let mut pair = Pair::start(NEVER).await;
    let late = Ipv4Addr::new(10, 0, 0, 9);
    let Change::Endpoint(_, shape) = endpoint(late, "a", Conditions::READY) else { panic!("not an endpoint") };
    for change in [service(3, 83), Change::Endpoint(key(3), shape)] {
        pair.change(0, change);
    }
    let pod = Some((PodId::new("late", "late").in_namespace("default"), Some("a".into())));
    let pods = vec![PodChange { service: key(3), address: late.into(), pod }];
    pair.replicas[0].store.commit(Transaction { pods, ..Transaction::default() });
    for change in [Change::RemoveEndpoint(key(3), late.into()), Change::RemoveService(key(3))] {
        pair.change(0, change);
    }
    // The second replica has listed its source later, and has never had the endpoint.
    pair.commit(1, Vec::new(), Vec::new());
    let (mut a, _b) = (pair.agent(0, "a").await, pair.agent(1, "b").await);
    let mut c = pair.replicas[1].open("c").await;
    c.reach(pair.replicas[1].store.version()).await;
    until_agents(&pair.replicas[0], &[("a", "up_to_date"), ("b", "up_to_date"), ("c", "waiting")]).await;
    // Without the wake-up, the answer would come only with the next round.
    a.send(Body::Barrier(request(late, 3_000_000, 3_000_000))).await;
    assert_waits(&mut a).await;
    c.ack().await;
    assert_eq!(answer(&mut a).await.result(), Outcome::Drained);
}
