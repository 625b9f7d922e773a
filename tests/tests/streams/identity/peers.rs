//! Replicas ask each other about pods that stop, over TLS. Only the certificate of a replica may
//! ask (`discovery.proto`, section 18).

use std::net::Ipv4Addr;

use headgate_control_plane::{
    model::{NodeChange, PodChange, Sink as _, Transaction, TriggeredChange},
    objects::{PodId, SourceKind},
    serve::{PeerSettings, Settings},
};
use headgate_core::{Change, Conditions, Endpoint, EndpointPort, Protocol, ServiceKey};
use headgate_proto::v1::{
    self, BarrierAnswer, DrainPodRequest, GetStatusRequest, barrier_answer::Result as Outcome,
    inspect_client::InspectClient, peers_client::PeersClient,
};
use rcgen::{ExtendedKeyUsagePurpose, SanType};
use tonic::Code;

use super::{
    agent::Agent,
    authority::{Authority, Pair},
    client::Client,
    server::{Server, eventually},
};
use crate::replica::node;

/// A server certificate for 127.0.0.1 that may also be used by a client, with a URI if there is
/// one. Its DNS name makes it the certificate of a replica for agents.
fn certificate(authority: &Authority, uri: Option<&str>) -> Pair {
    authority.server(|params| {
        let name = SanType::DnsName("test.replica.headgate.internal".try_into().unwrap());
        params.subject_alt_names = vec![SanType::IpAddress(Ipv4Addr::LOCALHOST.into()), name];
        params.subject_alt_names.extend(uri.map(|uri| SanType::URI(uri.try_into().unwrap())));
        params.extended_key_usages.push(ExtendedKeyUsagePurpose::ClientAuth);
    })
}

/// Starts a replica with a pod that terminates on node n1. The Node n2 exists.
async fn replica(authority: &Authority, own: &Pair, others: &[&Server]) -> Server {
    let folder = tempfile::tempdir().unwrap();
    own.write(folder.path(), &[authority]);
    let names = others.iter().map(|other| ("127.0.0.1".to_owned(), other.running.inspect_addr.port())).collect();
    std::fs::write(folder.path().join("denied"), "").unwrap();
    let peers = Some(PeerSettings { names, ..PeerSettings::default() });
    let server = Server::in_folder(folder, Settings { peers, ..Settings::default() }).await;
    let service = ServiceKey::new("default", "service-1");
    let endpoint = |host, conditions| {
        let ports = [EndpointPort::new("http", Protocol::Tcp, 8080)];
        let endpoint = Endpoint::new(Ipv4Addr::new(10, 0, 0, host).into(), ports.into());
        Change::Endpoint(service.clone(), Endpoint { conditions, ..endpoint })
    };
    let terminating = Conditions { ready: false, serving: true, terminating: true };
    let changes = [endpoint(1, terminating), endpoint(2, Conditions::READY)];
    let pod = (PodId::new("uid", "web").in_namespace("default"), Some("n1".into()));
    server.store.commit(Transaction {
        changes: changes.map(|change| TriggeredChange { change, trigger_unix_ms: 0 }).into(),
        nodes: vec![NodeChange::Apply(node("n2", None))],
        pods: vec![PodChange { service, address: Ipv4Addr::new(10, 0, 0, 1).into(), pod: Some(pod) }],
        positions: vec![(SourceKind::EndpointSlices, 5)],
        ..Transaction::default()
    });
    server
}

/// Asks a replica about the pod, as `headgatectl drain` does. Silent nodes have so much time.
async fn drain(authority: &Authority, server: &Server, silent_ms: u64) -> BarrierAnswer {
    let reader = authority.client(&["headgate://reader/me"], |_| {});
    let reader = Client::new(authority, &reader).connect(server.running.inspect_addr).await.unwrap();
    let (namespace, name) = ("default".to_owned(), "web".to_owned());
    let request = DrainPodRequest { namespace, name, timeout_ms: 60_000, silent_ms, uid: String::new() };
    let mut answers = InspectClient::new(reader.channel.clone()).drain_pod(request).await.unwrap().into_inner();
    answers.message().await.unwrap().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_answers_only_replicas() {
    let authority = Authority::new("authority");
    let asked = replica(&authority, &certificate(&authority, Some("headgate://replica/r1")), &[]).await;
    let folder = tempfile::tempdir().unwrap();
    authority.node("n2").write(folder.path(), &[&authority]);
    let agent = Agent::of_node("n2", &asked.url(), &folder.path().join("tls"), &folder.path().join("ca.crt"));
    agent.until_connected(true).await;
    // The node is confirmed only by the replica that has its stream.
    let own = certificate(&authority, Some("headgate://replica/r2"));
    let asker = replica(&authority, &own, &[&asked]).await;
    let answer = drain(&authority, &asker, 60_000).await;
    assert_eq!(answer.result(), Outcome::Drained, "{answer:?}");
    asker.stop().await;
    let denied = "headgate_requests_denied_total{reason=\"permission_denied\"}";
    assert_eq!(asked.metric(denied), 0);
    for (count, uri) in [(0, Some("headgate://node/n1")), (1, Some("headgate://reader/me")), (2, None)] {
        let asker = replica(&authority, &certificate(&authority, uri), &[&asked]).await;
        let answer = drain(&authority, &asker, 1_500).await;
        assert_eq!(answer.result(), Outcome::Incomplete, "{uri:?}: {answer:?}");
        assert_eq!(answer.unconfirmed, ["n2"], "{uri:?}");
        assert!(answer.reason.contains("the client certificate"), "{uri:?}: {answer:?}");
        assert!(asked.metric(denied) > count, "{uri:?}");
        asker.stop().await;
    }
}

/// No replica believes what a denied replica says.
#[tokio::test(flavor = "multi_thread")]
async fn a_replica_ends_its_link_to_a_denied_replica() {
    let authority = Authority::new("authority");
    let stolen = replica(&authority, &certificate(&authority, Some("headgate://replica/stolen")), &[]).await;
    let own = certificate(&authority, Some("headgate://replica/r1"));
    let asker = replica(&authority, &own, &[&stolen]).await;
    let reader = authority.client(&["headgate://reader/me"], |_| {});
    let reader = Client::new(&authority, &reader).connect(asker.running.inspect_addr).await.unwrap();
    let until = async |part: &str| {
        eventually(part, async || {
            let mut inspect = InspectClient::new(reader.channel.clone());
            let status = inspect.get_status(GetStatusRequest::default()).await.unwrap().into_inner();
            status.replicas.iter().any(|other| format!("{}: {}", other.state, other.problem).contains(part))
        })
        .await;
    };
    until("joined: ").await;
    std::fs::write(asker.path("denied"), "headgate://replica/stolen\n").unwrap();
    until("the control plane's certificate or its holder is in the file of --tls-denied").await;
    std::fs::write(asker.path("denied"), "").unwrap();
    until("joined: ").await;
}

/// Whoever writes the list cannot send an agent to somebody who is no replica. Here, nobody but the
/// list says where the replicas are.
#[tokio::test(flavor = "multi_thread")]
async fn an_agent_follows_its_list_only_to_replicas() {
    let (authority, stranger) = (Authority::new("authority"), Authority::new("stranger"));
    let imposter = Server::start_with(&stranger.server(|_| {}), &authority, Settings::default()).await;
    let real = Server::start(&authority).await;
    let folder = tempfile::tempdir().unwrap();
    authority.node("n1").write(folder.path(), &[&authority]);
    let options = [format!("--state-dir={}", folder.path().join("state").display())];
    let start = |list: &[&Server]| {
        let list: String = list.iter().map(|server| format!("{}\n", server.running.local_addr)).collect();
        std::fs::create_dir_all(folder.path().join("state")).unwrap();
        std::fs::write(folder.path().join("state/replicas"), list).unwrap();
        let (own, ca) = (folder.path().join("tls"), folder.path().join("ca.crt"));
        Agent::with_options("n1", "https://127.0.0.1:1", &own, &ca, &options)
    };
    let agent = start(&[&imposter]);
    eventually("the agent serves its pages", || async { agent.status().is_object() }).await;
    eventually("the agent refuses the server", || async {
        agent.metric("headgate_agent_stream_errors_total{reason=\"tls\"}") > 1
    })
    .await;
    assert_eq!(imposter.metric("headgate_streams_opened_total"), 0);
    drop(agent);
    let agent = start(&[&imposter, &real]);
    agent.until_connected(true).await;
    assert_eq!(imposter.metric("headgate_streams_opened_total"), 0);
}

#[tokio::test]
async fn agents_and_readers_may_not_ask_as_replicas() {
    let authority = Authority::new("authority");
    let server = replica(&authority, &certificate(&authority, None), &[]).await;
    let join = async |uri: &str| {
        let pair = authority.client(&[uri], |_| {});
        let client = Client::new(&authority, &pair).connect(server.running.inspect_addr).await.unwrap();
        let identity = v1::PeerIdentity { replica: "r1".into(), epoch: 1 };
        let mut rosters = PeersClient::new(client.channel.clone()).join(identity).await?.into_inner();
        rosters.message().await
    };
    for uri in ["headgate://node/n1", "headgate://reader/me"] {
        let status = join(uri).await.unwrap_err();
        assert_eq!(status.code(), Code::PermissionDenied, "{uri}");
        assert!(status.message().contains("headgate://replica/NAME"), "{uri}: {status}");
    }
    let first = join("headgate://replica/r1").await.unwrap();
    assert!(first.unwrap().is_full);
}
