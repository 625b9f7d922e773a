//! The drain barrier between two replicas, with simulated agents (discovery.proto, section 18).

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
    time::Duration,
};

use headgate_control_plane::{
    model::{NodeChange, PodChange, Sink as _, Transaction, TriggeredChange},
    objects::{PodId, SourceKind},
    serve::{PeerSettings, Security, Settings},
};
use headgate_core::{Change, Conditions, Endpoint, EndpointPort, Placement, Protocol, TrafficPolicy, Weight};
use headgate_proto::v1::{self, agent_message::Body, barrier_answer::Result as Outcome};
use tokio::time::timeout;

use crate::{
    client::{Client, GUARD, eventually},
    replica::{Replica, key, node, service, settings},
};

/// The pod that stops. It is an endpoint of service 1 on node a.
pub(crate) const POD: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);
/// Another endpoint, on node b.
pub(crate) const OTHER: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);
pub(crate) const TERMINATING: Conditions = Conditions { ready: false, serving: true, terminating: true };

/// Two replicas with the same source, and the position of the last change.
pub(crate) struct Pair {
    pub(crate) replicas: [Replica; 2],
    pub(crate) position: u64,
}

pub(crate) fn endpoint(address: Ipv4Addr, node: &str, conditions: Conditions) -> Change {
    let mut endpoint = Endpoint::new(address.into(), Arc::new([EndpointPort::new("http", Protocol::Tcp, 8080)]));
    endpoint.placement = Placement::on(node).into();
    endpoint.conditions = conditions;
    Change::Endpoint(key(1), endpoint)
}

pub(crate) fn removed() -> Change {
    Change::RemoveEndpoint(key(1), POD.into())
}

pub(crate) fn apply(name: &str) -> NodeChange {
    NodeChange::Apply(node(name, None))
}

impl Pair {
    /// Starts two replicas that have joined each other, and whose source has the nodes a, b and c,
    /// and both endpoints.
    pub(crate) async fn start(uncovered_after: Duration) -> Self {
        Self::start_with(Settings { uncovered_after, ..settings() }).await
    }

    /// As [`Self::start`], with these settings. If they name a Service of the replicas, these have
    /// not joined each other yet.
    pub(crate) async fn start_with(settings: Settings) -> Self {
        static NUMBER: AtomicU8 = AtomicU8::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let [high, low] = u16::try_from(std::process::id() % 65_536).unwrap().to_be_bytes();
        let address = |host: u8| SocketAddr::from((Ipv4Addr::new(127, high, low, number * 2 + host), 7443));
        let names = [1, 2].map(|host| (address(host).ip().to_string(), 7444)).to_vec();
        let start = async |host: u8| {
            let names = || PeerSettings { names: names.clone(), ..PeerSettings::default() };
            let peers = Some(settings.peers.clone().unwrap_or_else(names));
            let settings = Settings { replica_name: format!("replica-{host}"), peers, ..settings.clone() };
            let replica = Replica::start_at(address(host), settings, Security::Plaintext).await;
            replica.store.synced();
            replica
        };
        let mut pair = Self { replicas: [start(1).await, start(2).await], position: 0 };
        let ready = [endpoint(POD, "a", Conditions::READY), endpoint(OTHER, "b", Conditions::READY)];
        pair.position = 10;
        for replica in [0, 1] {
            let changes = std::iter::once(service(1, 80)).chain(ready.clone());
            pair.commit(replica, changes.collect(), ["a", "b", "c"].map(apply).to_vec());
            let pod = |address: Ipv4Addr, name, node: &str| PodChange {
                service: key(1),
                address: address.into(),
                pod: Some((PodId::new(name, name).in_namespace("default"), Some(node.into()))),
            };
            let pods = vec![pod(POD, "pod", "a"), pod(OTHER, "other", "b")];
            pair.replicas[replica].store.commit(Transaction { pods, ..Transaction::default() });
        }
        if settings.peers.is_none() {
            // The first replica has tried before the second one listened, and tries again after a
            // pause.
            for replica in &pair.replicas {
                let has_joined = async || replica.status().await.replicas.iter().any(|other| other.state == "joined");
                eventually("the replicas have joined each other", has_joined).await;
            }
        }
        pair
    }

    pub(crate) fn commit(&self, replica: usize, changes: Vec<Change>, nodes: Vec<NodeChange>) {
        let changes = changes.into_iter().map(|change| TriggeredChange { change, trigger_unix_ms: 0 }).collect();
        let positions = vec![(SourceKind::EndpointSlices, self.position)];
        self.replicas[replica].store.commit(Transaction { changes, nodes, positions, ..Transaction::default() });
    }

    /// Makes a change at one replica, whose source is then ahead of the other.
    pub(crate) fn change(&mut self, replica: usize, change: Change) {
        self.position += 1;
        self.commit(replica, vec![change], Vec::new());
    }

    /// Makes the last change at the other replica too.
    pub(crate) fn follow(&self, replica: usize, change: Change) {
        self.commit(replica, vec![change], Vec::new());
    }

    /// Makes changes at both replicas.
    pub(crate) fn change_both(&mut self, changes: impl IntoIterator<Item = Change>) {
        for change in changes {
            self.change(0, change.clone());
            self.follow(1, change);
        }
    }

    /// Changes Nodes at both replicas.
    pub(crate) fn put_nodes(&self, nodes: &[NodeChange]) {
        self.replicas.iter().for_each(|replica| replica.put_nodes(nodes.to_vec()));
    }

    /// Opens the stream of a node that has everything in its kernel.
    pub(crate) async fn agent(&self, replica: usize, node: &str) -> Client {
        self.replicas[replica].agent(node).await
    }
}

/// Programs the newest version of a replica, and waits until the replica has the ACK.
pub(crate) async fn program(replica: &Replica, client: &mut Client) {
    let version = replica.store.version();
    client.until(|client| client.held.version >= version).await;
    replica.acknowledge(client).await;
}

/// Programs the newest version of the replica with this index at each of these agents.
pub(crate) async fn program_all<const N: usize>(pair: &Pair, agents: [(usize, &mut Client); N]) {
    for (replica, client) in agents {
        program(&pair.replicas[replica], client).await;
    }
}

pub(crate) fn request(address: Ipv4Addr, timeout_ms: u64, silent_ms: u64) -> v1::BarrierRequest {
    let (address, pod_namespace) = (address.octets().to_vec().into(), "default".to_owned());
    v1::BarrierRequest { id: 1, address, pod_namespace, timeout_ms, silent_ms, ..v1::BarrierRequest::default() }
}

pub(crate) async fn answer(client: &mut Client) -> v1::BarrierAnswer {
    client.until(|client| !client.barriers.is_empty()).await;
    client.barriers.remove(0)
}

/// Asks about a pod, and waits for the answer.
pub(crate) async fn ask(client: &mut Client, pod: Ipv4Addr, timeout_ms: u64, silent_ms: u64) -> v1::BarrierAnswer {
    client.send(Body::Barrier(request(pod, timeout_ms, silent_ms))).await;
    answer(client).await
}

/// Asks about a pod until all nodes but `count` have confirmed. Each question waits for a short
/// time, in which a slow machine may not bring the answer of the other replica. No answer may say
/// that all nodes have confirmed.
pub(crate) async fn ask_until_unconfirmed(client: &mut Client, pod: Ipv4Addr, count: u64) -> v1::BarrierAnswer {
    let asked = async {
        loop {
            let found = ask(client, pod, 60_000, 1_000).await;
            assert_eq!(found.result(), Outcome::Incomplete, "{found:?}");
            if found.unconfirmed_count == count {
                return found;
            }
        }
    };
    timeout(GUARD, asked).await.unwrap_or_else(|_| panic!("there are never {count} unconfirmed nodes"))
}

/// Asserts that no answer arrives for a while. If an answer came too early, it would come in this
/// time.
pub(crate) async fn assert_waits(client: &mut Client) {
    let early = timeout(Duration::from_millis(400), client.until(|client| !client.barriers.is_empty()));
    assert!(early.await.is_err(), "the barrier answers too early: {:?}", client.barriers);
}

pub(crate) const NEVER: Duration = Duration::from_secs(600);

#[tokio::test(flavor = "multi_thread")]
async fn the_barrier_waits_for_each_node_at_each_replica() {
    let mut pair = Pair::start(NEVER).await;
    let (mut a, mut b, mut c) = (pair.agent(0, "a").await, pair.agent(1, "b").await, pair.agent(1, "c").await);
    a.send(Body::Barrier(request(POD, 60_000, 60_000))).await;
    let waiting = || pair.replicas[0].metric("headgate_barrier_waiting");
    eventually("the replica has the request", async || waiting() == 1).await;
    assert_waits(&mut a).await;
    // Replica 1 sees the removal, and its agent programs it.
    pair.change(0, removed());
    program(&pair.replicas[0], &mut a).await;
    assert!(!a.urgent.is_empty(), "agents acknowledge at once while a pod waits");
    assert_waits(&mut a).await;
    // Replica 2 sees it, and only one of its agents programs it.
    pair.follow(1, removed());
    program(&pair.replicas[1], &mut b).await;
    assert_waits(&mut a).await;
    program(&pair.replicas[1], &mut c).await;
    let answer = answer(&mut a).await;
    assert_eq!((answer.id, answer.result()), (1, Outcome::Drained), "{answer:?}");
    assert_eq!(pair.replicas[0].metric("headgate_barrier_answers_total{result=\"drained\"}"), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn silent_nodes_are_named_after_a_bounded_wait_unless_their_node_is_deleted() {
    let mut pair = Pair::start(NEVER).await;
    let (mut a, b) = (pair.agent(0, "a").await, pair.agent(1, "b").await);
    pair.change_both([removed()]);
    program(&pair.replicas[0], &mut a).await;
    // Node b has a stream and programs nothing. Node c has no stream.
    let incomplete = ask(&mut a, POD, 60_000, 700).await;
    assert_eq!(incomplete.result(), Outcome::Incomplete);
    assert_eq!((incomplete.unconfirmed.len(), incomplete.unconfirmed_count), (0, 2), "a pod learns no names");
    // Node b goes, and both Nodes are deleted.
    drop(b);
    a.send(Body::Barrier(request(POD, 60_000, 60_000))).await;
    assert_waits(&mut a).await;
    pair.put_nodes(&["b", "c"].map(|node| NodeChange::Remove(node.into())));
    assert_eq!(answer(&mut a).await.result(), Outcome::Drained);
}

/// Nodes keep sending to a terminating endpoint if all others have weight 0.
#[tokio::test(flavor = "multi_thread")]
async fn an_endpoint_of_weight_zero_does_not_make_another_one_unused() {
    let mut pair = Pair::start(NEVER).await;
    let (mut a, mut b, mut c) = (pair.agent(0, "a").await, pair.agent(1, "b").await, pair.agent(1, "c").await);
    let Change::Endpoint(service, mut weightless) = endpoint(OTHER, "b", Conditions::READY) else {
        panic!("no endpoint")
    };
    weightless.placement = Placement { weight: Weight::new(0).unwrap(), ..Placement::on("b") }.into();
    let weightless = Change::Endpoint(service, weightless);
    pair.change_both([weightless, endpoint(POD, "a", TERMINATING)]);
    program_all(&pair, [(0, &mut a), (1, &mut b), (1, &mut c)]).await;
    let last = ask(&mut a, POD, 60_000, 60_000).await;
    assert_eq!(last.result(), Outcome::Last, "{last:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_never_had_an_agent_is_not_covered_and_others_are_refused() {
    let mut pair = Pair::start(Duration::ZERO).await;
    let mut a = pair.agent(0, "a").await;
    let b = pair.agent(1, "b").await;
    let knows_b = async || pair.replicas[0].agents().await.iter().any(|agent| agent.replica == "replica-2");
    eventually("the first replica knows node b", knows_b).await;
    pair.change_both([removed()]);
    program(&pair.replicas[0], &mut a).await;
    drop(b);
    let found = ask(&mut a, POD, 60_000, 500).await;
    assert_eq!(found.result(), Outcome::Incomplete, "{found:?}");
    assert_eq!((found.unconfirmed_count, found.not_covered_count), (1, 1));
    // A pod of another node, and an address of no pod.
    for (address, problem) in [(OTHER, "ask the agent of its own node"), (Ipv4Addr::new(10, 9, 9, 9), "no endpoint")] {
        let refused = ask(&mut a, address, 60_000, 500).await;
        assert_eq!(refused.result(), Outcome::Refused);
        assert!(refused.reason.contains(problem), "{refused:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_replica_leaves_its_nodes_unconfirmed() {
    let mut pair = Pair::start(NEVER).await;
    let (mut a, _b, _c) = (pair.agent(0, "a").await, pair.agent(1, "b").await, pair.agent(1, "c").await);
    // Nobody knows whether this node has a stream to a replica that cannot be reached.
    pair.put_nodes(&[apply("d")]);
    pair.change(0, removed());
    program(&pair.replicas[0], &mut a).await;
    let [first, second] = pair.replicas;
    second.running.stop().await;
    let is_silent = async || first.status().await.replicas.iter().any(|other| other.state == "unreachable");
    eventually("the other replica cannot be reached", is_silent).await;
    let found = ask(&mut a, POD, 60_000, 1_000).await;
    assert_eq!(found.result(), Outcome::Incomplete);
    assert_eq!(found.unconfirmed_count, 3);
    assert!(!found.reason.contains("replica"), "{found:?}");
    let asked = v1::DrainPodRequest {
        namespace: "default".into(),
        name: "pod".into(),
        uid: "pod".into(),
        timeout_ms: 500,
        silent_ms: 500,
    };
    let mut said = first.inspect().await.drain_pod(asked).await.unwrap().into_inner();
    let said = said.message().await.unwrap().unwrap();
    assert_eq!(said.unconfirmed, ["b", "c", "d"], "an operator learns the names");
    assert!(said.reason.contains("replica at "), "{said:?}");
    drop(first);
}

/// A Local policy keeps the pod in use on its own node alone, so all other nodes have to confirm.
#[tokio::test(flavor = "multi_thread")]
async fn the_last_endpoint_of_a_node_waits_for_the_other_nodes() {
    let mut pair = Pair::start(NEVER).await;
    let (mut a, mut b, mut c) = (pair.agent(0, "a").await, pair.agent(1, "b").await, pair.agent(1, "c").await);
    let Change::Service(mut local) = service(1, 80) else { panic!("no Service") };
    local.internal_traffic_policy = TrafficPolicy::Local;
    pair.change_both([Change::Service(local), endpoint(POD, "a", TERMINATING)]);
    program_all(&pair, [(0, &mut a), (1, &mut b)]).await;
    a.send(Body::Barrier(request(POD, 60_000, 60_000))).await;
    assert_waits(&mut a).await;
    program_all(&pair, [(1, &mut c)]).await;
    let last = answer(&mut a).await;
    assert_eq!(last.result(), Outcome::Last, "{last:?}");
}

/// A replica that has not listed its source does not know the pod yet.
#[tokio::test(flavor = "multi_thread")]
async fn a_request_waits_until_the_replica_has_listed_its_source() {
    let peers = Some(PeerSettings::default());
    let young = Settings { peers, uncovered_after: Duration::ZERO, ..settings() };
    let replica = Replica::start_with(young, Security::Plaintext).await;
    let mut a = replica.open("a").await;
    a.send(Body::Barrier(request(POD, 60_000, 60_000))).await;
    assert_waits(&mut a).await;
    let changes = [service(1, 80), endpoint(POD, "a", TERMINATING), endpoint(OTHER, "b", Conditions::READY)];
    let changes = changes.into_iter().map(|change| TriggeredChange { change, trigger_unix_ms: 0 }).collect();
    let pod = Some((PodId::new("pod", "pod").in_namespace("default"), Some("a".into())));
    let pods = vec![PodChange { service: key(1), address: POD.into(), pod }];
    replica.store.commit(Transaction { changes, pods, nodes: vec![apply("a")], ..Transaction::default() });
    replica.store.synced();
    program(&replica, &mut a).await;
    let drained = answer(&mut a).await;
    assert_eq!(drained.result(), Outcome::Drained, "{drained:?}");
}
