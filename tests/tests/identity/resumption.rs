//! Sessions that are resumed, and that resumption goes around nothing.

use std::{fs, time::Duration};

use headgate_control_plane::serve::Settings;
use headgate_tls::explain;
use rustls::HandshakeKind;
use tonic::Code;

use crate::{
    authority::{Authority, in_seconds},
    client::{Client, files},
    server::{Server, eventually},
};

#[tokio::test]
async fn the_second_handshake_is_resumed_and_keeps_the_identity() {
    let authority = Authority::new("authority");
    let server = Server::start(&authority).await;
    let address = server.running.local_addr;
    let client = Client::new(&authority, &authority.node("n1"));
    let first = client.connect(address).await.unwrap();
    assert_eq!(first.kind, HandshakeKind::Full);
    first.health().await.unwrap();
    let second = client.connect(address).await.unwrap();
    assert_eq!(second.kind, HandshakeKind::Resumed);
    second.sync("n1").await.unwrap().hears_of("service-1").await;
    assert_eq!(second.sync("n2").await.err().unwrap().code(), Code::PermissionDenied);
    assert_eq!(second.inspect().await.map(drop).unwrap_err().code(), Code::PermissionDenied);
    // Somebody else with the same cache but another certificate has no such session.
    let other = Client::new(&authority, &authority.node("n2")).connect(address).await.unwrap();
    assert_eq!(other.kind, HandshakeKind::Full);
    server.until_metric("headgate_tls_handshakes_total{kind=\"full\"}", 2).await;
    assert_eq!(server.metric("headgate_tls_handshakes_total{kind=\"resumed\"}"), 1);
    server.running.stop().await;
}

#[tokio::test]
async fn a_removed_authority_cannot_be_gone_around() {
    let (old, new) = (Authority::new("old"), Authority::new("new"));
    let own = new.server(|_| {});
    let server = Server::start_with(&own, &old, Settings::default()).await;
    let address = server.running.local_addr;
    let client = Client::new(&new, &old.node("n1"));
    let connection = client.connect(address).await.unwrap();
    let mut stream = connection.sync("n1").await.unwrap();
    stream.hears_of("service-1").await;
    // One session is used up, and its handshake brings another for later.
    let resumed = client.connect(address).await.unwrap();
    assert_eq!(resumed.kind, HandshakeKind::Resumed);
    resumed.health().await.unwrap();

    fs::write(server.path("ca.crt"), new.pem()).unwrap();
    server.until_metric("headgate_tls_reloads_total{result=\"success\"}", 1).await;
    let error = client.refusal(address).await;
    let refusal = explain(&error, &files()).unwrap();
    assert!(refusal.sentence.contains("no authority that the control plane knows signed it"), "{refusal:?}");
    server.until_metric("headgate_tls_handshakes_failed_total{reason=\"unknown_authority\"}", 1).await;
    assert_eq!(server.metric("headgate_tls_handshakes_total{kind=\"resumed\"}"), 1);
    // The stream that is there stays.
    server.put(2);
    stream.hears_of("service-2").await;
    server.running.stop().await;
}

#[tokio::test]
async fn an_expired_certificate_keeps_neither_stream_nor_session() {
    let authority = Authority::new("authority");
    let server = Server::start(&authority).await;
    let address = server.running.local_addr;
    let not_after = in_seconds(8);
    let expiring = |uri: &str| authority.client(&[uri], |params| params.not_after = not_after.into());
    let node = Client::new(&authority, &expiring("headgate://node/n1"));
    let reader = Client::new(&authority, &expiring("headgate://reader/me"));
    let (followed, looked) = (node.connect(address).await.unwrap(), reader.connect(address).await.unwrap());
    let mut stream = followed.sync("n1").await.unwrap();
    stream.hears_of("service-1").await;
    looked.inspect().await.unwrap();

    let status = stream.end().await;
    assert_eq!(status.code(), Code::Unauthenticated, "{status}");
    assert!(status.message().contains("the client certificate expired at") && status.message().contains("renew it"));
    server.until_metric("headgate_streams_rejected_total{reason=\"certificate_expired\"}", 1).await;
    // The last second is over only when it has passed.
    let is_over = || async { std::time::SystemTime::now() > not_after + Duration::from_secs(1) };
    eventually("the certificates expire", is_over).await;

    // Connections that are there, and sessions that are resumed, grant no more than a new handshake would.
    assert_eq!(looked.inspect().await.map(drop).unwrap_err().code(), Code::Unauthenticated);
    let (node, reader) = (node.connect(address).await.unwrap(), reader.connect(address).await.unwrap());
    assert_eq!((node.kind, reader.kind), (HandshakeKind::Resumed, HandshakeKind::Resumed));
    for status in [node.sync("n1").await.err().unwrap(), reader.inspect().await.map(drop).unwrap_err()] {
        assert_eq!(status.code(), Code::Unauthenticated, "{status}");
        assert!(status.message().contains("renew it"), "{status}");
    }
    server.running.stop().await;
}
