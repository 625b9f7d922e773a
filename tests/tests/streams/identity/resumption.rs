//! Sessions that are resumed, and that resumption goes around nothing.

use std::{fs, time::Duration};

use headgate_control_plane::serve::Settings;
use headgate_tls::explain;
use rustls::HandshakeKind;
use tokio::time::timeout;
use tonic::{Code, Status};

use super::{
    authority::{Authority, in_seconds},
    client::{Client, files},
    server::{GUARD, Server, eventually},
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
    assert_eq!(second.inspect().await.map(drop).unwrap_err().code(), Code::PermissionDenied);
    // `Sync` has a connection of its own.
    let third = client.connect(address).await.unwrap();
    third.sync("n1").await.unwrap().hears_of("service-1").await;
    let fourth = client.connect(address).await.unwrap();
    assert_eq!(fourth.sync("n2").await.err().unwrap().code(), Code::PermissionDenied);
    // Somebody else with the same cache but another certificate has no such session.
    let other = Client::new(&authority, &authority.node("n2")).connect(address).await.unwrap();
    assert_eq!(other.kind, HandshakeKind::Full);
    server.until_metric("headgate_tls_handshakes_total{kind=\"full\"}", 2).await;
    assert_eq!(server.metric("headgate_tls_handshakes_total{kind=\"resumed\"}"), 3);
    server.running.stop().await;
}

#[tokio::test]
async fn a_session_is_of_one_replica_and_another_one_just_does_without() {
    let authority = Authority::new("authority");
    let own = authority.server(|_| {});
    let first = Server::start_with(&own, &authority, Settings::default()).await;
    let second = Server::start_with(&own, &authority, Settings::default()).await;
    let client = Client::new(&authority, &authority.node("n1"));
    let connect = async |server: &Server| {
        let connection = client.connect(server.running.local_addr).await.unwrap();
        // Tickets come after the handshake.
        connection.sync("n1").await.unwrap().hears_of("service-1").await;
        connection.kind
    };
    assert_eq!(connect(&first).await, HandshakeKind::Full);
    assert_eq!(connect(&first).await, HandshakeKind::Resumed);
    // The ticket is offered, since both have the same name, and is of no use there.
    assert_eq!(connect(&second).await, HandshakeKind::Full);
    assert_eq!(connect(&second).await, HandshakeKind::Resumed);
    for server in [first, second] {
        assert_eq!(server.metric("headgate_tls_handshakes_total{kind=\"full\"}"), 1);
        assert_eq!(server.metric("headgate_tls_handshakes_total{kind=\"resumed\"}"), 1);
        server.running.stop().await;
    }
}

#[tokio::test]
async fn what_a_reader_follows_ends_with_its_certificate() {
    let authority = Authority::new("authority");
    let server = Server::start(&authority).await;
    let not_after = in_seconds(10);
    let expiring = authority.client(&["headgate://reader/me"], |params| params.not_after = not_after.into());
    let lasting = authority.client(&["headgate://reader/other"], |_| {});
    let connect = async |pair| Client::new(&authority, &pair).connect(server.running.local_addr).await.unwrap();
    let (expiring, lasting) = (connect(expiring).await, connect(lasting).await);
    let (mut events, mut progress) = (expiring.watch().await.unwrap(), expiring.wait("service-9").await.unwrap());
    let mut goes_on = lasting.watch().await.unwrap();
    server.put(2);
    for events in [&mut events, &mut goes_on] {
        let event = timeout(GUARD, events.message()).await.unwrap().unwrap().unwrap();
        assert_eq!(event.service.unwrap().name, "service-2");
    }
    let watched = async {
        while events.message().await?.is_some() {}
        Ok::<_, Status>(())
    };
    let waited = async {
        while progress.message().await?.is_some() {}
        Ok::<_, Status>(())
    };
    let ends = timeout(GUARD, async { tokio::join!(watched, waited) }).await.expect("they do not end");
    // A certificate counts in whole seconds.
    assert!(std::time::SystemTime::now() + Duration::from_secs(1) > not_after, "they ended before their time");
    for status in [ends.0.unwrap_err(), ends.1.unwrap_err()] {
        assert_eq!(status.code(), Code::Unauthenticated, "{status}");
        assert!(status.message().contains("the client certificate expired at"), "{status}");
    }
    server.put(3);
    let event = timeout(GUARD, goes_on.message()).await.unwrap().unwrap().unwrap();
    assert_eq!(event.service.unwrap().name, "service-3");
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
    let not_after = in_seconds(12);
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

    // Connections that are there, and sessions that are resumed, grant no more than a new handshake
    // would.
    assert_eq!(looked.inspect().await.map(drop).unwrap_err().code(), Code::Unauthenticated);
    let (node, reader) = (node.connect(address).await.unwrap(), reader.connect(address).await.unwrap());
    assert_eq!((node.kind, reader.kind), (HandshakeKind::Resumed, HandshakeKind::Resumed));
    for status in [node.sync("n1").await.err().unwrap(), reader.inspect().await.map(drop).unwrap_err()] {
        assert_eq!(status.code(), Code::Unauthenticated, "{status}");
        assert!(status.message().contains("renew it"), "{status}");
    }
    server.running.stop().await;
}
