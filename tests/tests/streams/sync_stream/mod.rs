//! Tests of `Discovery.Sync` over real sockets, against the contract at the top of
//! `discovery.proto`.

mod crowd;
mod own_node;
mod refusals;
mod standing;

use std::time::Duration;

use headgate_control_plane::{
    model::Sink as _,
    objects::SourceKind,
    serve::{Security, Settings},
};
use headgate_core::{Change, Service};
use headgate_proto::v1::{self, inspect_client::InspectClient, welcome::ResumeMode};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    time::timeout,
};
use tonic::{Code, transport::Channel};

use crate::{
    client::{Client, GUARD, channel, eventually},
    replica::{Replica, cluster, endpoint, key, remove_endpoint, remove_service, service, settings},
};

fn assert_same(client: &Client, replica: &Replica) {
    assert_eq!(client.held.version, replica.store.version());
    assert!(*client.held.state.digests() == replica.store.digests(), "the agent's state differs from the replica's");
}

async fn agent(channel: Channel, node: &str) -> v1::AgentInfo {
    let request = v1::ListAgentsRequest { node: node.into(), only_this_replica: false };
    let mut agents = InspectClient::new(channel).list_agents(request).await.unwrap().into_inner();
    agents.message().await.unwrap().expect("no such agent")
}

/// Reads the agent's status until the status fulfils a condition.
async fn agent_until(channel: &Channel, node: &str, is_wanted: impl Fn(&v1::AgentInfo) -> bool) -> v1::AgentInfo {
    let ask = async {
        loop {
            let agent = agent(channel.clone(), node).await;
            if is_wanted(&agent) {
                return agent;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(GUARD, ask).await.expect("the agent's status did not become as expected")
}

#[tokio::test]
async fn a_new_agent_receives_everything_and_then_each_change() {
    let replica = Replica::start().await;
    replica.put(cluster(50));
    let mut client = replica.open("n1").await;
    assert_eq!((client.welcome.replica.as_str(), client.welcome.resume()), ("replica-1", ResumeMode::Full));
    assert_ne!(client.welcome.epoch, 0);
    client.reach(1).await;
    assert_eq!((client.resources, client.ends.len()), (150, 1));
    assert_same(&client, &replica);

    replica.put([endpoint(7, 1, 9090)]);
    client.reach(2).await;
    replica.put([remove_endpoint(7, 2), remove_service(8)]);
    client.reach(3).await;
    assert_eq!((client.batches, client.resources, client.removals), (2, 151, 2));
    assert_same(&client, &replica);
}

#[tokio::test]
async fn messages_of_an_agent_appear_in_its_status() {
    let replica = Replica::start().await;
    replica.put(cluster(3));
    let inspect = channel(replica.running.inspect_addr).await;
    let mut client = replica.open("n1").await;
    client.reach(1).await;
    let before = agent(inspect.clone(), "n1").await;
    assert_eq!((before.head_version, before.sent_version, before.programmed_version), (1, 1, 0));
    assert_eq!((before.resume.as_str(), before.resumed_resources, before.backend.as_str()), ("full", 9, "none"));

    client.ack().await;
    let acked = agent_until(&inspect, "n1", |agent| agent.programmed_version == 1).await;
    assert_eq!((acked.lag_ms, acked.apply_microseconds), (0, 42));

    let rejection = v1::Rejection { resource: "Service a/b".into(), field: "ports".into(), reason: "odd".into() };
    let nack = v1::Nack { version: 1, rejections: vec![rejection], in_force: 1, ..v1::Nack::default() };
    client.send(v1::agent_message::Body::Nack(nack)).await;
    let failed = v1::ApplyFailed { version: 1, error: "no such table".into(), attempts: 2 };
    client.send(v1::agent_message::Body::ApplyFailed(failed)).await;
    let status = v1::AgentStatus { backend: "iptables-nft".into(), degraded: vec!["no SCTP".into()], verified: None };
    client.send(v1::agent_message::Body::Status(status)).await;
    let shown = agent_until(&inspect, "n1", |agent| agent.backend == "iptables-nft").await;
    assert_eq!((shown.rejections.len(), shown.rejections[0].object.as_str()), (1, "Service a/b"));
    assert!(shown.last_error.contains("no such table") && shown.degraded == ["no SCTP"]);

    // A rejection stays until the agent withdraws the rejection.
    let withdrawn = |names: &[&str]| {
        let withdrawn = names.iter().map(|name| (*name).to_owned()).collect();
        v1::agent_message::Body::Nack(v1::Nack { version: 1, withdrawn, in_force: 1, ..v1::Nack::default() })
    };
    client.send(withdrawn(&["Service a/c", "Endpoint a/b 10.0.0.1"])).await;
    client.ack().await;
    let acked = agent_until(&inspect, "n1", |agent| agent.last_error.is_empty()).await;
    assert_eq!(acked.rejections.len(), 1);
    client.send(withdrawn(&["Service a/b"])).await;
    agent_until(&inspect, "n1", |agent| agent.rejections.is_empty()).await;

    // An ACK of a version that was not sent is ignored.
    let ack = v1::Ack { version: 99, ..Default::default() };
    client.send(v1::agent_message::Body::Ack(ack)).await;
    let ignored = || replica.metric("headgate_agent_messages_ignored_total{reason=\"version_not_sent\"}");
    eventually("the ACK is ignored", async || ignored() == 1).await;
    assert_eq!(agent(inspect, "n1").await.programmed_version, 1);
}

#[tokio::test]
async fn resuming_by_log_sends_only_later_changes() {
    let replica = Replica::start().await;
    replica.put(cluster(50));
    let mut client = replica.open("n1").await;
    client.reach(1).await;
    client.ack().await;
    let inspect = channel(replica.running.inspect_addr).await;
    agent_until(&inspect, "n1", |agent| agent.programmed_version == 1).await;
    let held = client.held;
    replica.put([remove_endpoint(3, 1), endpoint(4, 3, 8080)]);

    let mut client = replica.resume("n1", held).await;
    assert_eq!(client.welcome.resume(), ResumeMode::Log);
    client.until(|client| client.held.version == 2).await;
    assert_eq!((client.resources, client.removals, client.ends.len()), (1, 1, 0));
    assert_same(&client, &replica);
    let agent = agent_until(&inspect, "n1", |agent| agent.resumed_resources == 2).await;
    // The node may have rebooted and lost its rules, so the earlier ACK does not count.
    assert_eq!((agent.resume.as_str(), agent.programmed_version), ("log", 0));
    client.ack().await;
    agent_until(&inspect, "n1", |agent| agent.programmed_version == 2).await;
}

#[tokio::test]
async fn resuming_at_another_replica_sends_only_buckets_that_differ() {
    let (old, new) = (Replica::start().await, Replica::start().await);
    for replica in [&old, &new] {
        replica.put_at(Some(10), cluster(200));
    }
    let mut client = old.open("n1").await;
    client.reach(1).await;

    // Nothing changed, so no resource is sent.
    let mut client = new.resume("n1", client.held).await;
    assert_eq!(client.welcome.resume(), ResumeMode::Digests);
    client.until(|client| !client.ends.is_empty()).await;
    assert_eq!((client.resources, client.removals, client.ends[0].resource_count), (0, 0, 0));
    assert!(client.bytes < 50, "{} bytes were sent although nothing changed", client.bytes);
    assert_same(&client, &new);
    assert_eq!(new.metric("headgate_resumed_resources_total"), 0);

    // Resources are changed and deleted before the agent resumes.
    new.put([remove_endpoint(9, 1), remove_service(9), service(10, 81)]);
    client.held.epoch = 1;
    let mut client = new.resume("n1", client.held).await;
    assert_eq!(client.welcome.resume(), ResumeMode::Digests);
    client.reach(2).await;
    assert!(client.resources < 20, "{} resources were sent for three changes", client.resources);
    assert_same(&client, &new);

    // Later changes are sent as batches.
    new.put([service(11, 81)]);
    client.reach(3).await;
    assert_same(&client, &new);
}

#[tokio::test]
async fn an_agent_does_not_receive_older_state() {
    let old = Replica::start().await;
    old.put_at(Some(20), [service(1, 82)]);
    let mut client = old.open("n1").await;
    client.reach(1).await;
    let held = client.held;

    let new = Replica::start().await;
    new.put_at(Some(10), [service(1, 80)]);
    let mut client = new.resume("n1", held).await;
    eventually("the agent waits", async || new.metric("headgate_behind_waits_total") > 0).await;
    let wanted = new.store.wanted_positions().borrow().clone();
    assert_eq!(wanted, [(SourceKind::Services, 20)].into(), "the source is not asked for its position");
    new.put_at(Some(15), [service(1, 81)]);
    new.put_at(Some(20), [service(1, 82)]);
    client.reach(3).await;
    assert_eq!((client.resources, new.metric("headgate_behind_waits_expired_total")), (0, 0));
    assert_same(&client, &new);
}

#[tokio::test]
async fn an_agent_receives_older_state_after_the_longest_wait() {
    let old = Replica::start().await;
    old.put_at(Some(20), [service(1, 82)]);
    let mut client = old.open("n1").await;
    client.reach(1).await;

    let patience = Settings { behind_wait: Duration::from_millis(50), ..settings() };
    let restored = Replica::start_with(patience, Security::Plaintext).await;
    restored.put_at(Some(10), [service(1, 80)]);
    restored.store.synced();
    let mut client = restored.resume("n1", client.held).await;
    assert_eq!(client.welcome.behind_wait_ms, 50);
    client.reach(1).await;
    assert_eq!(restored.metric("headgate_behind_waits_expired_total"), 1);
    assert_same(&client, &restored);
}

#[tokio::test]
async fn nothing_is_sent_before_the_source_has_been_listed() {
    let beat = Settings { heartbeat_interval: Duration::from_millis(20), ..settings() };
    let replica = Replica::start_with(beat, Security::Plaintext).await;
    replica.put([service(1, 80)]);
    let mut client = replica.open("n1").await;
    client.until(|client| client.heartbeats.len() >= 3).await;
    assert_eq!((client.ends.len(), client.nodes.len(), client.resources), (0, 0, 0));
    replica.put([service(2, 80)]);
    replica.store.synced();
    client.reach(2).await;
    assert_eq!((client.resources, client.nodes.len()), (2, 1));
    assert_same(&client, &replica);
}

/// The status line and the body of a page.
async fn get(replica: &Replica, path: &str) -> (String, String) {
    let (head, body) = get_with(replica, path, "*/*").await;
    (head.lines().next().unwrap().to_owned(), body)
}

/// The status line with headers, and the body of a page.
async fn get_with(replica: &Replica, path: &str, accept: &str) -> (String, String) {
    let mut socket = tokio::net::TcpStream::connect(replica.running.metrics_addr.unwrap()).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nAccept: {accept}\r\nConnection: close\r\n\r\n");
    socket.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    timeout(GUARD, socket.read_to_string(&mut answer)).await.unwrap().unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.to_owned(), body.to_owned())
}

#[tokio::test]
async fn probes_and_metrics_follow_the_source() {
    let replica = Replica::start_with(settings(), Security::Plaintext).await;
    replica.put(cluster(5));
    assert_eq!(get(&replica, "/healthz").await.0, "HTTP/1.1 200 OK");
    assert!(get(&replica, "/readyz").await.0.contains("503"));
    replica.store.count_error(SourceKind::Services, "watch_expired");
    replica.store.synced();
    assert_eq!(get(&replica, "/readyz").await.0, "HTTP/1.1 200 OK");
    let (_, metrics) = get(&replica, "/metrics").await;
    for sample in [
        "headgate_resources{kind=\"endpoint\"} 10",
        "headgate_source_errors_total{kind=\"services\",reason=\"watch_expired\"} 1",
        "headgate_source_synced 1",
    ] {
        assert!(metrics.contains(sample), "{sample} is not in\n{metrics}");
    }
    assert!(metrics.contains("# TYPE headgate_source_errors_total counter") && !metrics.contains("# EOF"), "{metrics}");
    let (head, metrics) = get_with(&replica, "/metrics", "application/openmetrics-text;version=1.0.0").await;
    assert!(head.contains("content-type: application/openmetrics-text; version=1.0.0"), "{head}");
    assert!(metrics.contains("# TYPE headgate_source_errors counter") && metrics.ends_with("# EOF\n"), "{metrics}");
}

#[tokio::test]
async fn a_stopping_replica_asks_its_agents_to_move() {
    let replica = Replica::start().await;
    let mut staying = replica.open("staying").await;
    let mut leaving = replica.open("leaving").await;
    staying.until(|client| !client.ends.is_empty()).await;
    let stop = tokio::spawn(replica.running.stop());
    leaving.until(|client| !client.drains.is_empty()).await;
    assert_eq!(leaving.drains[0].reconnect_within_ms, 500);
    drop(leaving);
    let status = staying.status().await;
    assert_eq!((status.code(), staying.drains.len()), (Code::Unavailable, 1), "{status}");
    timeout(GUARD, stop).await.expect("the replica does not stop").unwrap();
}

#[tokio::test]
async fn a_watcher_sees_changes() {
    let replica = Replica::start().await;
    replica.put(cluster(2));
    let mut inspect = replica.inspect().await;
    let request = v1::WatchRequest { namespace: "default".into(), name: "service-1".into() };
    let mut events = inspect.watch(request).await.unwrap().into_inner();
    replica.put([endpoint(2, 1, 9), endpoint(1, 1, 9)]);
    let event = timeout(GUARD, events.message()).await.unwrap().unwrap().unwrap();
    let shown = event.endpoint.unwrap();
    assert_eq!(
        (event.action.as_str(), event.version, shown.ports.as_slice()),
        ("changed", 2, &["http 9/TCP".to_owned()][..])
    );
    replica.put([remove_service(1)]);
    let event = timeout(GUARD, events.message()).await.unwrap().unwrap().unwrap();
    assert_eq!((event.action.as_str(), event.service.unwrap().name), ("removed", "service-1".to_owned()));
    replica.running.stop().await;
    assert_eq!(events.message().await.unwrap_err().code(), Code::Unavailable);
}

#[tokio::test]
async fn inspect_lists_in_order_and_shows_conflicts() {
    let replica = Replica::start().await;
    replica.put(cluster(3));
    let Change::Service(original) = service(2, 80) else { unreachable!() };
    let copy = Service { key: headgate_core::ServiceKey::new("other", "copy"), created_unix_seconds: 9, ..*original };
    replica.put([Change::from(copy)]);
    let mut inspect = replica.inspect().await;
    let mut listed = Vec::new();
    let mut services = inspect.list_services(v1::ListServicesRequest::default()).await.unwrap().into_inner();
    while let Some(service) = services.message().await.unwrap() {
        listed.push((service.name, service.endpoints, service.conflicts.len()));
    }
    let named = |name: &str, endpoints, conflicts| (name.to_owned(), endpoints, conflicts);
    let expected = [named("service-1", 2, 0), named("service-2", 2, 0), named("service-3", 2, 0), named("copy", 0, 1)];
    assert_eq!(listed, expected);
    let status = inspect
        .get_status(v1::GetStatusRequest { only_this_replica: true, last_changes: 0 })
        .await
        .unwrap()
        .into_inner();
    let [problem] = status.problems.as_slice() else { panic!("{:?}", status.problems) };
    assert_eq!((problem.object.as_str(), problem.field.as_str()), ("Service other/copy", "spec.clusterIPs"));
    assert!(problem.message.contains("belongs to Service default/service-2"), "{}", problem.message);
    let missing = v1::ListEndpointsRequest { namespace: "default".into(), name: "none".into() };
    assert_eq!(inspect.list_endpoints(missing).await.unwrap_err().code(), Code::NotFound);
    let request = v1::ListEndpointsRequest { namespace: "default".into(), name: key(1).name.to_string() };
    let mut endpoints = inspect.list_endpoints(request).await.unwrap().into_inner();
    let first = endpoints.message().await.unwrap().unwrap();
    assert_eq!((first.address.as_str(), first.node.as_str(), first.ready), ("10.0.1.1", "node-1", true));
}

/// The Service that claims the ClusterIP of another Service is older. The metric counts it, and the
/// status names it, until it is removed.
#[tokio::test]
async fn an_external_ip_that_is_a_cluster_ip_is_counted_and_shown() {
    const LACKING: &str = "headgate_service_conflicts";
    let replica = Replica::start().await;
    replica.put(cluster(1));
    assert_eq!(replica.metric(LACKING), 0);
    let Change::Service(owner) = service(1, 80) else { unreachable!() };
    let key = headgate_core::ServiceKey::new("other", "taker");
    let (cluster_ips, external_ips) = (vec![[10, 96, 9, 9].into()], owner.cluster_ips.clone());
    let taker = Service { key: key.clone(), created_unix_seconds: -1, cluster_ips, external_ips, ..*owner };
    replica.put([Change::from(taker)]);
    assert!(replica.metric(LACKING) > 0);
    let mut inspect = replica.inspect().await;
    let status = inspect
        .get_status(v1::GetStatusRequest { only_this_replica: true, last_changes: 0 })
        .await
        .unwrap()
        .into_inner();
    let [problem] = status.problems.as_slice() else { panic!("{:?}", status.problems) };
    assert_eq!((problem.object.as_str(), problem.field.as_str()), ("Service other/taker", "spec.externalIPs"));
    let expected = "belongs to Service default/service-1, whose ClusterIP it is";
    assert!(problem.message.contains(expected), "{}", problem.message);
    replica.put([Change::RemoveService(key)]);
    assert_eq!(replica.metric(LACKING), 0);
}
