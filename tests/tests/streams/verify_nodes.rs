//! Tests of `Inspect.VerifyNodes` and `headgatectl verify`: simulated agents answer truthfully from
//! the state that they hold, or as the test says.

use std::sync::Arc;

use headgate_control_plane::transaction::{NodeChange, Sink as _, Transaction, TriggeredChange};
use headgate_core::{
    Change, Dirty, Family, Node, NodeFacts, ServiceKey,
    digest::{Digests, service_bucket},
    explain::{Mode, NodeSettings},
    iptables::NodePortAddresses,
    masquerade::MasqueradeConfig,
};
use headgate_proto::{
    NodeView, digests_to_wire,
    v1::{self, agent_message::Body, inspect_client::InspectClient, node_answer, node_query},
};
use headgate_tests::testbed::process::program;
use tokio::{process::Command, task::JoinHandle, time::timeout};
use tonic::{Code, Status};

use crate::client::{Client, GUARD, channel};
use crate::replica::{Replica, cluster, endpoint, key, remove_endpoint, service};

fn view(node: &str) -> NodeView {
    let settings = NodeSettings {
        mode: Mode::Nftables,
        masquerade: MasqueradeConfig::default(),
        node_ports_v4: NodePortAddresses::All,
        node_ports_v6: NodePortAddresses::All,
        localhost_node_ports: false,
    };
    NodeView { facts: NodeFacts::named(node), settings, families: vec![Family::V4] }
}

/// What a truthful agent answers, whose kernel forwards as its resources require.
fn truth(client: &Client, node: &str, query: &v1::VerifyQuery, run: u64) -> v1::Verification {
    let (state, view) = (&client.held.state, view(node));
    let mut table = Digests::default();
    state.entries().for_each(|(key, _)| view.add_table(state, key, &mut table));
    let is_wanted = |bucket: u16| query.buckets.contains(&u32::from(bucket));
    let held = state.entries().filter(|(key, _)| is_wanted(service_bucket(key)));
    v1::Verification {
        run: if query.run == 0 { run } else { query.run },
        epoch: client.held.epoch,
        version: client.held.version,
        resources: Some(digests_to_wire(state.digests())),
        resources_version: client.held.version,
        table: Some(digests_to_wire(&table)),
        view: Some(view.to_wire()),
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
        mut change: impl FnMut(usize, &mut Client, Option<&mut v1::Verification>) + Send + 'static,
    ) -> Self {
        let mut client = Client::open(channel(replica.running.local_addr).await, node, None).await.unwrap();
        client.reach(replica.store.version()).await;
        client.ack().await;
        Self(tokio::spawn(async move {
            for number in 1.. {
                while client.queries.len() < number {
                    if !matches!(client.step().await, Ok(Some(()))) {
                        return;
                    }
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

async fn verify(replica: &Replica, node: &str) -> Result<Vec<v1::VerifyNodesResponse>, Status> {
    let mut inspect = InspectClient::new(channel(replica.running.local_addr).await);
    let asked = async {
        let mut answer = inspect.verify_nodes(v1::VerifyNodesRequest { node: node.into() }).await?.into_inner();
        let mut messages = Vec::new();
        while let Some(message) = answer.message().await? {
            messages.push(message);
        }
        Ok(messages)
    };
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
    replica.running.stop().await;
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
    replica.running.stop().await;
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
        state.entries().for_each(|(key, _)| view.add_table(state, key, &mut table));
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
    replica.running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_agents_own_differences_are_shown_and_a_second_verification_confirms_the_repair() {
    let replica = Replica::start().await;
    replica.put(cluster(3));
    let report = |number, _: &mut Client, answer: Option<&mut v1::Verification>| {
        if let Some(answer) = answer.filter(|_| number == 1) {
            answer.drift = vec![v1::Drift { service: "default/service-1".into(), difference: "is broken".into() }];
            answer.drift_count = 3;
        }
    };
    let _agent = Agent::start(&replica, "a", report).await;
    let found = verify_one(&replica, "a").await;
    assert_eq!((drift(&found), found.drift_count), (vec![("default/service-1", "is broken")], 3));
    assert!(found.is_repaired);
    let mut inspect = InspectClient::new(channel(replica.running.local_addr).await);
    let mut agents = inspect.list_agents(v1::ListAgentsRequest::default()).await.unwrap().into_inner();
    let agent = agents.message().await.unwrap().unwrap();
    assert!(agent.verified_unix_ms > 0 && agent.drift_count == 0, "{agent:?}");
    replica.running.stop().await;
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
    replica.running.stop().await;
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
    replica.running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_an_agent_cannot_verify_is_named() {
    let replica = Replica::start().await;
    replica.put(cluster(3));
    let unreadable = |_, _: &mut Client, answer: Option<&mut v1::Verification>| {
        if let Some(answer) = answer {
            answer.table = None;
            answer.unverified = vec!["the kernel cannot be read; verify again: no permission".into()];
        }
    };
    let _agent = Agent::start(&replica, "a", unreadable).await;
    let found = verify_one(&replica, "a").await;
    assert_eq!(found.result, "unverified");
    assert_eq!(found.unverified, ["the kernel cannot be read; verify again: no permission"]);
    let garbage = |_, _: &mut Client, answer: Option<&mut v1::Verification>| {
        if let Some(answer) = answer {
            answer.view = Some(v1::NodeView { mode: "magic".into(), ..v1::NodeView::default() });
            answer.resources = Some(v1::BucketDigests::default());
        }
    };
    let _other = Agent::start(&replica, "b", garbage).await;
    let found = verify_one(&replica, "b").await;
    assert_eq!(found.result, "unverified");
    assert!(found.unverified.iter().any(|text| text.contains("unknown mode \"magic\"")), "{:?}", found.unverified);
    replica.running.stop().await;
}

async fn headgatectl(replica: &Replica, arguments: &[&str]) -> (Option<i32>, String, String) {
    let mut command = Command::new(program("headgatectl").unwrap());
    command.args(["--server", &format!("http://{}", replica.running.local_addr)]).args(arguments);
    let output = timeout(GUARD, command.output()).await.expect("headgatectl does not end").unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

#[tokio::test(flavor = "multi_thread")]
async fn headgatectl_verifies_all_nodes_and_names_those_without_an_agent() {
    let replica = Replica::start().await;
    replica.put(cluster(3));
    let _one = Agent::honest(&replica, "a").await;
    let _two = Agent::honest(&replica, "b").await;
    let version = replica.store.version();
    let (code, out, err) = headgatectl(&replica, &["verify"]).await;
    let expected = format!(
        "NODE  RESULT    VERSION  SERVICES  FRONTENDS  DIFFERENCES  BACKEND\n\
         a     verified  {version:>7}         3          3            0  none\n\
         b     verified  {version:>7}         3          3            0  none\n\
         2 of 2 nodes verified\n"
    );
    assert_eq!((code, out.as_str(), err.as_str()), (Some(0), expected.as_str(), ""));
    let (code, out, _) = headgatectl(&replica, &["verify", "b", "-o", "json"]).await;
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, &json[0]["node"], &json[0]["result"]), (Some(0), &"b".into(), &"verified".into()));

    let node = Node { name: "c".into(), zone: None, pod_cidrs: Vec::new(), addresses: Vec::new(), going_away: false };
    replica.store.commit(Transaction { nodes: vec![NodeChange::Apply(node)], ..Transaction::default() });
    let (code, out, err) = headgatectl(&replica, &["verify"]).await;
    assert_eq!(code, Some(1));
    assert!(out.ends_with("2 of 3 nodes verified, 1 without a stream\n"), "{out}");
    assert!(err.contains("no stream to any replica that was asked: c: start their agents"), "{err}");
    let (code, _, err) = headgatectl(&replica, &["verify", "c"]).await;
    assert!(code == Some(1) && err.contains("no agent of node c is connected"), "{err}");

    let broken = |_, _: &mut Client, answer: Option<&mut v1::Verification>| {
        if let Some(answer) = answer {
            answer.drift = vec![v1::Drift { service: "default/web".into(), difference: "is broken".into() }];
            answer.drift_count = 1;
        }
    };
    let _broken = Agent::start(&replica, "c", broken).await;
    let (code, out, err) = headgatectl(&replica, &["verify"]).await;
    assert_eq!(code, Some(1));
    let lines: Vec<&str> = out.lines().collect();
    assert!(lines[1].starts_with("c     drift"), "{out}");
    assert_eq!(lines[4], "c: Service default/web: is broken");
    assert!(lines[5].starts_with("c: not repaired: read the log of the agent"), "{out}");
    assert_eq!(lines[6], "2 of 3 nodes verified, 1 with differences");
    assert!(err.contains("differences on 1 of "), "{err}");
    replica.running.stop().await;
}
