//! The state of the source in `Standing`, `Welcome`, `Heartbeat` and probes.

use std::{net::SocketAddr, time::Duration};

use headgate_control_plane::{
    model::Sink as _,
    objects::SourceKind,
    serve::{Security, Settings},
};
use headgate_proto::v1::{
    self, SourceState, agent_message::Body as Asked, discovery_client::DiscoveryClient, server_message::Body,
};
use tonic::{Code, Status, transport::Channel};
use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient};

use crate::{
    client::{channel, eventually, message},
    identity::{authority::Authority, client::Client as TlsClient},
    replica::{Replica, service, settings},
};

use super::get;

/// Asks on a new connection.
async fn standing(address: SocketAddr, node: &str) -> Result<v1::StandingResponse, Status> {
    ask(channel(address).await, node).await
}

async fn ask(channel: Channel, node: &str) -> Result<v1::StandingResponse, Status> {
    let request = message(Asked::Standing(v1::StandingRequest { node_name: node.into() }));
    let mut messages = DiscoveryClient::new(channel).sync(tokio_stream::once(request)).await?.into_inner();
    let Some(Body::Standing(standing)) = messages.message().await?.and_then(|message| message.body) else {
        panic!("the answer is not a standing");
    };
    assert_eq!(messages.message().await?, None);
    Ok(standing)
}

#[tokio::test]
async fn a_replica_sends_its_standing_to_agents_of_other_replicas() {
    let replica = Replica::start_with(settings(), Security::Plaintext).await;
    let address = replica.running.local_addr;
    let unlisted = standing(address, "node-a").await.unwrap();
    assert_eq!((unlisted.source_state(), unlisted.epoch), (SourceState::Unlisted, replica.store.epoch()));
    assert_eq!(unlisted.replica, "replica-1");
    replica.put_at(Some(7), [service(1, 80)]);
    replica.store.synced();
    let following = standing(address, "node-a").await.unwrap();
    assert_eq!(following.source_state(), SourceState::Following);
    let kind = v1::source_position::Kind::Services.into();
    assert_eq!(following.positions, [v1::SourcePosition { kind, position: 7 }]);
    assert_eq!(following.changed_positions, following.positions);
    replica.store.cut_off(Some("on purpose".into()));
    assert_eq!(standing(address, "node-a").await.unwrap().source_state(), SourceState::CutOff);
    let error = standing(address, "Not A Name").await.unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
}

#[tokio::test]
async fn a_node_that_asks_too_often_is_refused_and_others_are_not() {
    let replica = Replica::start().await;
    let address = replica.running.local_addr;
    let mut refused = 0;
    for _ in 0..200 {
        if let Err(error) = standing(address, "node-a").await {
            assert_eq!(error.code(), Code::ResourceExhausted);
            refused += 1;
        }
    }
    assert!(refused > 0);
    standing(address, "node-b").await.unwrap();
    assert_eq!(replica.metric("headgate_streams_rejected_total{reason=\"too_many_streams\"}"), refused);
}

#[tokio::test]
async fn a_node_may_ask_only_in_its_own_name() {
    let authority = Authority::new("authority");
    let replica = Replica::start_with_tls(&authority).await;
    let client = TlsClient::new(&authority, &authority.kubelet("node-a"));
    let connect = async || client.connect(replica.running.local_addr).await.unwrap().channel;
    ask(connect().await, "node-a").await.unwrap();
    assert_eq!(ask(connect().await, "node-b").await.unwrap_err().code(), Code::PermissionDenied);
}

#[tokio::test]
async fn agents_and_probes_see_a_change_of_the_source_state_at_once() {
    // No heartbeat is due during the test.
    let settings = Settings { heartbeat_interval: Duration::from_secs(600), ..settings() };
    let replica = Replica::start_with(settings, Security::Plaintext).await;
    let mut client = replica.open("node-a").await;
    assert_eq!(client.welcome.source_state(), SourceState::Unlisted);
    let ready = async || get(&replica, "/readyz").await;
    // A separate task updates gRPC health, so the test waits for the expected status.
    let mut health = HealthClient::new(channel(replica.running.inspect_addr).await);
    let mut until_health = async |wanted: ServingStatus| {
        let service = "headgate.v1.Discovery".to_owned();
        eventually("gRPC health agrees with /readyz", async || {
            let check = HealthCheckRequest { service: service.clone() };
            health.check(check).await.unwrap().into_inner().status() == wanted
        })
        .await;
    };
    until_health(ServingStatus::NotServing).await;
    replica.store.cut_off(Some("on purpose".into()));
    let (code, body) = ready().await;
    assert_eq!(
        (code.as_str(), body.trim_end()),
        ("HTTP/1.1 503 Service Unavailable", "the source has not been listed yet: on purpose")
    );
    replica.store.heard(SourceKind::Services);
    replica.store.synced();
    client.until(|client| !client.heartbeats.is_empty()).await;
    assert_eq!(client.heartbeats[0].source_state(), SourceState::CutOff);
    until_health(ServingStatus::NotServing).await;
    let (code, body) = ready().await;
    assert_eq!(
        (code.as_str(), body.trim_end()),
        ("HTTP/1.1 503 Service Unavailable", "cut off from the source: on purpose")
    );
    assert_eq!(
        get(&replica, "/healthz").await.0,
        "HTTP/1.1 200 OK",
        "the liveness probe failed, and a restart would lose the state"
    );
    replica.store.cut_off(None);
    client.until(|client| client.heartbeats.len() == 2).await;
    assert_eq!(client.heartbeats[1].source_state(), SourceState::Following);
    assert_eq!(ready().await.0, "HTTP/1.1 200 OK");
    until_health(ServingStatus::Serving).await;
    replica.store.cut_off(Some("again".into()));
    until_health(ServingStatus::NotServing).await;
    replica.store.cut_off(None);
    let states = ["unlisted", "cut_off", "following"];
    let samples = states.map(|state| replica.metric(&format!("headgate_source_state{{state=\"{state}\"}}")));
    assert_eq!(samples, [0, 0, 1]);
}
