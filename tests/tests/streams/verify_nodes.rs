//! Tests of `Inspect.VerifyNodes` and `headgatectl verify`: simulated agents answer truthfully from
//! the state that they hold, or as the test says.

use std::sync::Arc;

use futures::TryStreamExt as _;
use headgate_control_plane::{
    model::{NodeChange, Sink as _, Transaction, TriggeredChange},
    objects::SourceKind,
};
use headgate_core::{
    Change, Dirty, Family, Node, NodeFacts, ServiceKey,
    digest::{Digests, service_bucket},
    explain::{Mode, NodeSettings},
    iptables::NodePortAddresses,
    view::MasqueradeConfig,
};
use headgate_proto::{
    NodeView, digests_to_wire,
    v1::{self, agent_message::Body, node_answer, node_query},
};
use tokio::{task::JoinHandle, time::timeout};
use tonic::{Code, Status};

use crate::{
    client::{Client, GUARD},
    replica::{Printed, Replica, cluster, endpoint, headgatectl, key, node, remove_endpoint, service},
};

fn view(node: &str) -> NodeView {
    let settings = NodeSettings {
        mode: Mode::Nftables,
        masquerade: MasqueradeConfig::default(),
        node_ports_v4: NodePortAddresses::All,
        node_ports_v6: NodePortAddresses::All,
        localhost_node_ports: false,
    };
    NodeView { facts: NodeFacts::named(node), settings, families: [Family::V4].into() }
}

/// What a truthful agent answers, whose kernel forwards as its resources require.
pub(crate) fn truth(client: &Client, node: &str, query: &v1::VerifyQuery, run: u64) -> v1::Verification {
    let (state, view) = (&client.held.state, view(node));
    let mut table = Digests::default();
    state.entries().for_each(|(key, _)| view.add_table(state, key, true, &mut table));
    let is_wanted = |bucket: u16| query.buckets.contains(&u32::from(bucket));
    let held = state.entries().filter(|(key, _)| is_wanted(service_bucket(key)));
    v1::Verification {
        run: if query.run == 0 { run } else { query.run },
        epoch: client.held.epoch,
        version: client.held.version,
        resources: Some(digests_to_wire(state.digests())),
        resources_version: client.held.version,
        table: Some(digests_to_wire(&table)),
        view: Some(v1::NodeView { own_node: client.nodes.last().cloned(), ..view.to_wire() }),
        services: state.service_count() as u64,
        frontends: table.resource_count(),
        buckets: query.buckets.clone(),
        held: held.map(|(key, _)| view.digests_of(state, key, service_bucket(key)).to_wire(key)).collect(),
        ..v1::Verification::default()
    }
}

/// An agent that answers in the background. `change` may change its state before the n-th answer,
/// from 1, and then the answer.
struct Agent(JoinHandle<()>);

impl Agent {
    async fn start(
        replica: &Replica,
        node: &'static str,
        change: impl FnMut(usize, &mut Client, Option<&mut v1::Verification>) + Send + 'static,
    ) -> Self {
        Self::answer(replica.agent(node).await, node, usize::MAX, change)
    }

    /// Answers so many queries. The stream ends at the next query.
    fn answer(
        mut client: Client,
        node: &'static str,
        answers: usize,
        mut change: impl FnMut(usize, &mut Client, Option<&mut v1::Verification>) + Send + 'static,
    ) -> Self {
        Self(tokio::spawn(async move {
            for number in 1.. {
                while client.queries.len() < number {
                    if !matches!(client.step().await, Ok(Some(()))) {
                        return;
                    }
                }
                if number > answers {
                    return;
                }
                let v1::Query { id, query } = client.queries[number - 1].clone();
                let Some(node_query::Kind::Verify(query)) = query.unwrap().kind else { panic!("not a verification") };
                change(number, &mut client, None);
                let mut answer = truth(&client, node, &query, number as u64);
                change(number, &mut client, Some(&mut answer));
                let part = v1::NodeAnswer { kind: Some(node_answer::Kind::Verification(answer)) };
                let answer = v1::Answer { id, part: Some(part), is_last: true, ..v1::Answer::default() };
                client.send(Body::Answer(answer)).await;
            }
        }))
    }

    async fn honest(replica: &Replica, node: &'static str) -> Self {
        Self::start(replica, node, |_, _, _| {}).await
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// An agent whose answers are changed in this way.
fn changing(
    change: impl Fn(&mut v1::Verification) + Send + 'static,
) -> impl FnMut(usize, &mut Client, Option<&mut v1::Verification>) + Send + 'static {
    move |_, _, answer| answer.into_iter().for_each(&change)
}

/// The answer of an agent that cannot read its kernel.
fn unreadable(_: usize, _: &mut Client, answer: Option<&mut v1::Verification>) {
    if let Some(answer) = answer {
        answer.table = None;
        answer.unverified = vec!["the kernel cannot be read; verify again: no permission".into()];
    }
}

/// The answer of an agent that has found differences, of which it names one.
fn set_drift(answer: &mut v1::Verification, service: &str, count: u64) {
    answer.drift = vec![v1::Drift { service: service.into(), difference: "is broken".into() }];
    answer.drift_count = count;
}

async fn verify(replica: &Replica, node: &str) -> Result<Vec<v1::VerifyNodesResponse>, Status> {
    let mut inspect = replica.inspect().await;
    let request = v1::VerifyNodesRequest { node: node.into(), ..Default::default() };
    let asked = async { inspect.verify_nodes(request).await?.into_inner().try_collect().await };
    timeout(GUARD, asked).await.expect("the verification does not end")
}

async fn verify_one(replica: &Replica, node: &str) -> v1::NodeVerification {
    let mut messages = verify(replica, node).await.unwrap();
    assert_eq!(messages.len(), 1);
    messages.remove(0).verification.unwrap()
}

fn drift(verification: &v1::NodeVerification) -> Vec<(&str, &str)> {
    verification.drift.iter().map(|drift| (drift.service.as_str(), drift.difference.as_str())).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_with_equal_resources_and_an_equal_kernel_is_verified() {
    let replica = Replica::start().await;
    replica.put(cluster(50));
    let _agent = Agent::honest(&replica, "a").await;
    let verified = verify_one(&replica, "a").await;
    let expected = v1::NodeVerification {
        node: "a".into(),
        replica: "replica-1".into(),
        result: "verified".into(),
        backend: "none".into(),
        version: replica.store.version(),
        services: 50,
        frontends: 50,
        ..v1::NodeVerification::default()
    };
    assert_eq!(verified, expected);
    assert_eq!(replica.metric("headgate_node_verifications_total{result=\"verified\"}"), 1);
    let refused = verify(&replica, "b").await.unwrap_err();
    assert_eq!(refused.code(), Code::NotFound);
    assert!(refused.message().contains("node \"b\""), "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_resource_is_named_and_sent_again() {
    let replica = Replica::start().await;
    replica.put(cluster(50));
    let lose = |number, client: &mut Client, answer: Option<&mut v1::Verification>| {
        if number == 1 && answer.is_none() {
            assert!(client.held.state.apply(remove_endpoint(7, 1), &mut Dirty::default()));
        }
    };
    let _agent = Agent::start(&replica, "a", lose).await;
    let found = verify_one(&replica, "a").await;
    let sentence = "the agent holds 2 resources of the Service (itself and its endpoints), and the control plane 3";
    assert_eq!(drift(&found), [("default/service-7", sentence)]);
    assert_eq!((found.result.as_str(), found.drift_count), ("drift", 1));
    // The replica has sent the bucket again, and the third answer was equal.
    assert!(found.is_repaired);
    assert_eq!(replica.metric("headgate_snapshots_total"), 2);
    assert_eq!(verify_one(&replica, "a").await.result, "verified");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kernel_that_differs_is_found_even_if_the_agent_says_that_it_is_equal() {
    let replica = Replica::start().await;
    replica.put(cluster(50));
    // The table of a kernel that sends connections of Service 7 to one endpoint only.
    let lie = |_, client: &mut Client, answer: Option<&mut v1::Verification>| {
        let Some(answer) = answer else { return };
        assert!(client.held.state.apply(remove_endpoint(7, 1), &mut Dirty::default()));
        let (state, view, mut table) = (&client.held.state, view("a"), Digests::default());
        state.entries().for_each(|(key, _)| view.add_table(state, key, true, &mut table));
        answer.table = Some(digests_to_wire(&table));
        client.held.state.apply(endpoint(7, 1, 8080), &mut Dirty::default());
    };
    let _agent = Agent::start(&replica, "a", lie).await;
    let found = verify_one(&replica, "a").await;
    assert_eq!((found.result.as_str(), found.drift_count), ("drift", 1));
    let (service, difference) = drift(&found)[0];
    let name = key(7).to_string();
    assert!(service.is_empty() && difference.starts_with("the kernel forwards otherwise"), "{difference}");
    assert!(difference.split([' ', ',']).any(|word| word == name), "{difference}");
    assert!(!found.is_repaired);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_agents_own_differences_are_shown_and_a_second_verification_confirms_the_repair() {
    let replica = Replica::start().await;
    replica.put(cluster(3));
    let report = |number, _: &mut Client, answer: Option<&mut v1::Verification>| {
        if let Some(answer) = answer.filter(|_| number == 1) {
            set_drift(answer, "default/service-1", 3);
        }
    };
    let _agent = Agent::start(&replica, "a", report).await;
    let found = verify_one(&replica, "a").await;
    assert_eq!((drift(&found), found.drift_count), (vec![("default/service-1", "is broken")], 3));
    assert!(found.is_repaired);
    let agent = agent_info(&replica, "a").await;
    assert!(agent.verified_unix_ms > 0 && agent.drift_count == 0, "{agent:?}");
}

async fn agent_info(replica: &Replica, node: &str) -> v1::AgentInfo {
    replica.agents().await.into_iter().find(|agent| agent.node == node).expect("the node is not listed")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_difference_stays_named_if_the_agent_then_stops() {
    let replica = Replica::start().await;
    replica.put(cluster(3));
    let report = changing(|answer| set_drift(answer, "default/service-1", 1));
    let client = replica.agent("a").await;
    let _agent = Agent::answer(client, "a", 1, report);
    let found = verify_one(&replica, "a").await;
    assert_eq!((found.result.as_str(), drift(&found)), ("drift", vec![("default/service-1", "is broken")]));
    assert!(!found.is_repaired);
    assert_eq!(found.unverified.len(), 1, "the reason why the verification ended early: {found:?}");
    assert_eq!(replica.metric("headgate_node_verifications_total{result=\"drift\"}"), 1);
    // An agent that stops before its first answer is counted, too.
    let _other = Agent::answer(replica.agent("b").await, "b", 0, |_, _, _| {});
    assert_eq!(verify_one(&replica, "b").await.result, "unverified");
    assert_eq!(replica.metric("headgate_node_verifications_total{result=\"unverified\"}"), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rejected_service_is_named_even_if_another_changes_meanwhile() {
    let replica = Replica::start().await;
    replica.put(cluster(50));
    assert_ne!(service_bucket(&key(7)), service_bucket(&key(8)));
    let store = Arc::clone(&replica.store);
    let change = move |number, client: &mut Client, answer: Option<&mut v1::Verification>| match answer {
        // The agent holds an older state of Service 7, which it rejects.
        None if number == 1 => {
            assert!(client.held.state.apply(remove_endpoint(7, 1), &mut Dirty::default()));
        }
        // Another Service changes, so that a second attempt is needed.
        Some(_) if number == 1 => {
            let changes = vec![TriggeredChange { change: endpoint(8, 3, 8080), trigger_unix_ms: 0 }];
            store.commit(Transaction { changes, ..Transaction::default() });
        }
        _ => {}
    };
    let client = replica.agent("a").await;
    let resource = format!("Service {}", key(7));
    let rejection = v1::Rejection { resource, field: "ports".into(), reason: "no such port".into() };
    client.send(Body::Nack(v1::Nack { version: 1, rejections: vec![rejection], ..v1::Nack::default() })).await;
    let _agent = Agent::answer(client, "a", usize::MAX, change);
    let found = verify_one(&replica, "a").await;
    assert_eq!((found.result.as_str(), found.version), ("unverified", replica.store.version()));
    let name = key(7).to_string();
    assert!(found.unverified.iter().any(|text| text.contains(&name)), "{:?}", found.unverified);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_lies_about_the_number_of_differences_is_not_verified() {
    let replica = Replica::start().await;
    replica.put(cluster(3));
    let lie = |number, client: &mut Client, answer: Option<&mut v1::Verification>| match answer {
        None if number == 1 => {
            assert!(client.held.state.apply(remove_endpoint(1, 1), &mut Dirty::default()));
        }
        Some(answer) => answer.drift_count = u64::MAX,
        None => {}
    };
    let _agent = Agent::start(&replica, "a", lie).await;
    let found = verify_one(&replica, "a").await;
    assert_eq!((found.result.as_str(), found.drift_count), ("drift", u64::MAX));
    assert_eq!(found.drift.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_zone_in_each_attempt_and_a_view_without_families_are_not_verified() {
    let replica = Replica::start().await;
    replica.put(cluster(3));
    replica.put_nodes([NodeChange::Apply(node("a", Some("zone-1")))]);
    // The agent of the tests never has a zone.
    let _agent = Agent::honest(&replica, "a").await;
    let found = verify_one(&replica, "a").await;
    assert_eq!(found.result, "drift");
    assert!(drift(&found)[0].1.starts_with("the agent uses no zone as its zone, and the Node has zone-1"), "{found:?}");
    let empty = changing(|answer| {
        answer.view.as_mut().unwrap().families.clear();
        answer.table = Some(digests_to_wire(&Digests::default()));
    });
    let _other = Agent::start(&replica, "b", empty).await;
    let found = verify_one(&replica, "b").await;
    assert_eq!(found.result, "unverified");
    assert!(found.unverified.iter().any(|text| text.contains("families")), "{:?}", found.unverified);
}

#[tokio::test(flavor = "multi_thread")]
async fn stale_addresses_or_pod_ranges_are_a_difference_and_a_node_on_its_way_is_none() {
    let replica = Replica::start().await;
    replica.put(cluster(3));
    let node = |name: &str, last: u8| Node {
        pod_cidrs: vec![format!("10.1.{last}.0/24").parse().unwrap()],
        addresses: vec![[192, 0, 2, last].into()],
        ..node(name, None)
    };
    let put = |node: Node, position: u64| Transaction {
        nodes: vec![NodeChange::Apply(node)],
        positions: vec![(SourceKind::Nodes, position)],
        ..Transaction::default()
    };
    for (position, name) in (1..).zip(["a", "b", "c", "d", "e"]) {
        replica.store.commit(put(node(name, 1), position));
    }
    fn held(answer: &mut v1::Verification) -> &mut v1::OwnNode {
        answer.view.as_mut().unwrap().own_node.as_mut().unwrap()
    }
    let lie = |change: fn(&mut v1::OwnNode)| changing(move |answer| change(held(answer)));
    let addresses = |own: &mut v1::OwnNode| own.node.as_mut().unwrap().addresses = vec![vec![192, 0, 2, 9].into()];
    let _a = Agent::start(&replica, "a", lie(addresses)).await;
    let _b = Agent::start(&replica, "b", lie(|own| own.node.as_mut().unwrap().pod_cidrs.clear())).await;
    let _c = Agent::start(&replica, "c", lie(|own| own.node = None)).await;
    for (node, text) in [
        ("a", "the agent holds the addresses 192.0.2.9 of its Node, and the Node has 192.0.2.1"),
        ("b", "the agent holds the podCIDRs none of its Node, and the Node has 10.1.1.0/24"),
        ("c", "the agent does not hold its Node"),
    ] {
        let found = verify_one(&replica, node).await;
        assert_eq!((found.result.as_str(), found.drift.len()), ("drift", 1), "{found:?}");
        assert!(drift(&found)[0].1.starts_with(text), "{found:?}");
    }
    // The replica is behind the agent.
    let _d = Agent::start(
        &replica,
        "d",
        lie(|own| {
            own.node.as_mut().unwrap().addresses.clear();
            own.position.as_mut().unwrap().position += 100;
        }),
    )
    .await;
    let found = verify_one(&replica, "d").await;
    assert!(found.result == "unverified" && found.unverified[0].contains("newer"), "{found:?}");
    // The Node changes after the agent has computed its first answer.
    let store = Arc::clone(&replica.store);
    let change = move |number, _: &mut Client, answer: Option<&mut v1::Verification>| {
        if answer.is_some() && number == 1 {
            store.commit(put(node("e", 2), 10));
        }
    };
    let _e = Agent::start(&replica, "e", change).await;
    let found = verify_one(&replica, "e").await;
    assert!(found.result == "verified" && found.drift.is_empty(), "{found:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_on_its_way_is_no_difference() {
    let replica = Replica::start().await;
    replica.put(cluster(50));
    let store = Arc::clone(&replica.store);
    // Changes reach the store after the agent has computed its first answer: another endpoint, and
    // an older Service that takes the address of Service 20.
    let change = move |number, _: &mut Client, answer: Option<&mut v1::Verification>| {
        if answer.is_some() && number == 1 {
            let Change::Service(mut thief) = service(20, 80) else { panic!("not a Service") };
            (thief.key, thief.created_unix_seconds) = (ServiceKey::new("default", "thief"), -1);
            let changes = [endpoint(7, 3, 8080), Change::Service(thief)];
            let changes = changes.map(|change| TriggeredChange { change, trigger_unix_ms: 0 }).into();
            store.commit(Transaction { changes, ..Transaction::default() });
        }
    };
    let _agent = Agent::start(&replica, "a", change).await;
    let verified = verify_one(&replica, "a").await;
    assert!(verified.result == "verified" && verified.drift.is_empty(), "{verified:?}");
    assert_eq!(verified.version, replica.store.version());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_verification_that_takes_long_is_awaited() {
    let replica = Replica::start().await;
    replica.put(cluster(3));
    let slow = |number, _: &mut Client, answer: Option<&mut v1::Verification>| {
        // At first the agent still pauses, and then its verification runs for a while.
        if let Some(answer) = answer.filter(|_| number <= 3) {
            let run = if number == 1 { 0 } else { 2 };
            *answer = v1::Verification { run, is_running: true, ..v1::Verification::default() };
        }
    };
    let _agent = Agent::start(&replica, "a", slow).await;
    assert_eq!(verify_one(&replica, "a").await.result, "verified");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_an_agent_cannot_verify_is_named() {
    let replica = Replica::start().await;
    replica.put(cluster(3));
    let _agent = Agent::start(&replica, "a", unreadable).await;
    let found = verify_one(&replica, "a").await;
    assert_eq!(found.result, "unverified");
    assert_eq!(found.unverified, ["the kernel cannot be read; verify again: no permission"]);
    let garbage = changing(|answer| {
        answer.view = Some(v1::NodeView { mode: "magic".into(), ..v1::NodeView::default() });
        answer.resources = Some(v1::BucketDigests::default());
    });
    let _other = Agent::start(&replica, "b", garbage).await;
    let found = verify_one(&replica, "b").await;
    assert_eq!(found.result, "unverified");
    assert!(found.unverified.iter().any(|text| text.contains("unknown mode \"magic\"")), "{:?}", found.unverified);
}

#[tokio::test(flavor = "multi_thread")]
async fn headgatectl_verifies_all_nodes_and_names_those_without_an_agent() {
    let replica = Replica::start().await;
    replica.put(cluster(3));
    let _one = Agent::honest(&replica, "a").await;
    let _two = Agent::honest(&replica, "b").await;
    let version = replica.store.version();
    let Printed { code, out, err } = headgatectl(&[&replica], "verify").await;
    let expected = format!(
        "NODE  RESULT    VERSION  SERVICES  FRONTENDS  DIFFERENCES  BACKEND\n\
         a     verified  {version:>7}         3          3            0  none\n\
         b     verified  {version:>7}         3          3            0  none\n\
         2 of 2 nodes verified\n"
    );
    assert_eq!((code, out.as_str(), err.as_str()), (0, expected.as_str(), ""));
    let Printed { code, out, .. } = headgatectl(&[&replica], "verify b -o json").await;
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, &json[0]["node"], &json[0]["result"]), (0, &"b".into(), &"verified".into()));

    replica.put_nodes([NodeChange::Apply(node("c", None))]);
    let Printed { code, out, err } = headgatectl(&[&replica], "verify").await;
    assert_eq!(code, 4);
    assert!(out.ends_with("2 of 3 nodes verified, 1 without an agent\n"), "{out}");
    assert!(out.contains("\nc     absent ") && out.contains("\nc: no agent: "), "{out}");
    assert!(err.contains("these Nodes have no agent: c: start their agents"), "{err}");
    assert_eq!(headgatectl(&[&replica], "verify --allow-absent").await.code, 0);
    let Printed { out, .. } = headgatectl(&[&replica], "verify -o json").await;
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!((&json[0]["node"], &json[0]["result"]), (&"c".into(), &"absent".into()));
    let Printed { code, err, .. } = headgatectl(&[&replica], "verify ").await;
    assert!(code == 2 && err.contains("value is required"), "{err}");
    let Printed { code, err, .. } = headgatectl(&[&replica], "verify c").await;
    assert!(code == 1 && err.contains("no stream"), "{err}");

    let broken = changing(|answer| set_drift(answer, "default/web", 1));
    let _broken = Agent::start(&replica, "c", broken).await;
    let Printed { code, out, err } = headgatectl(&[&replica], "verify").await;
    assert_eq!(code, 1);
    let lines: Vec<&str> = out.lines().collect();
    assert!(lines[1].starts_with("c     drift"), "{out}");
    assert_eq!(lines[4], "c: Service default/web: is broken");
    assert!(lines[5].starts_with("c: not repaired: read the log of the agent"), "{out}");
    assert_eq!(lines[6], "2 of 3 nodes verified, 1 with differences");
    assert!(err.contains("differences on 1 of "), "{err}");
}
