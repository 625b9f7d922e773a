//! Tests of TLS session resumption. Resumption must not skip the checks of a certificate.

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
    let (authority, server) = Server::of_new_authority().await;
    let (address, inspect) = (server.running.local_addr, server.running.inspect_addr);
    let client = Client::new(&authority, &authority.node("n1"));
    let first = client.connect(inspect).await.unwrap();
    assert_eq!(first.kind, HandshakeKind::Full);
    first.health().await.unwrap();
    let second = client.connect(inspect).await.unwrap();
    assert_eq!(second.kind, HandshakeKind::Resumed);
    assert_eq!(second.inspect().await.map(drop).unwrap_err().code(), Code::PermissionDenied);
    // Both ports accept the ticket.
    let third = client.connect(address).await.unwrap();
    third.sync("n1").await.unwrap().until_message_about("service-1").await;
    let fourth = client.connect(address).await.unwrap();
    assert_eq!(fourth.sync("n2").await.err().unwrap().code(), Code::PermissionDenied);
    // A client with another certificate does not resume this session.
    let other = Client::new(&authority, &authority.node("n2")).connect(address).await.unwrap();
    assert_eq!(other.kind, HandshakeKind::Full);
    server.until_metric("headgate_tls_handshakes_total{kind=\"full\"}", 2).await;
    assert_eq!(server.metric("headgate_tls_handshakes_total{kind=\"resumed\"}"), 3);
}

#[tokio::test]
async fn a_session_is_resumed_only_at_the_replica_that_issued_it() {
    let authority = Authority::new("authority");
    let own = authority.server(|_| {});
    let first = Server::start_with(&own, &authority, Settings::default()).await;
    let second = Server::start_with(&own, &authority, Settings::default()).await;
    let client = Client::new(&authority, &authority.node("n1"));
    let connect = async |server: &Server| {
        let connection = client.connect(server.running.local_addr).await.unwrap();
        // The server sends tickets after the handshake.
        connection.sync("n1").await.unwrap().until_message_about("service-1").await;
        connection.kind
    };
    assert_eq!(connect(&first).await, HandshakeKind::Full);
    assert_eq!(connect(&first).await, HandshakeKind::Resumed);
    // Both servers have the same name, so the client offers the first server's ticket. The second
    // server cannot use this ticket.
    assert_eq!(connect(&second).await, HandshakeKind::Full);
    assert_eq!(connect(&second).await, HandshakeKind::Resumed);
    for server in [first, second] {
        assert_eq!(server.metric("headgate_tls_handshakes_total{kind=\"full\"}"), 1);
        assert_eq!(server.metric("headgate_tls_handshakes_total{kind=\"resumed\"}"), 1);
        server.stop().await;
    }
}

#[tokio::test]
async fn streams_of_a_reader_end_when_its_certificate_expires() {
    let (authority, server) = Server::of_new_authority().await;
    let not_after = in_seconds(10);
    let expiring = authority.client(&["headgate://reader/me"], |params| params.not_after = not_after.into());
    let lasting = authority.client(&["headgate://reader/other"], |_| {});
    let connect = async |pair| Client::new(&authority, &pair).connect(server.running.inspect_addr).await.unwrap();
    let (expiring, lasting) = (connect(expiring).await, connect(lasting).await);
    let (mut events, mut progress) = (expiring.watch().await.unwrap(), expiring.wait("service-9").await.unwrap());
    let mut lasting_events = lasting.watch().await.unwrap();
    server.put(2);
    for events in [&mut events, &mut lasting_events] {
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
    let ends = timeout(GUARD, async { tokio::join!(watched, waited) }).await.expect("the streams do not end");
    // The times in certificates have a resolution of one second.
    assert!(
        std::time::SystemTime::now() + Duration::from_secs(1) > not_after,
        "a stream ended before its certificate expired"
    );
    for status in [ends.0.unwrap_err(), ends.1.unwrap_err()] {
        assert_eq!(status.code(), Code::Unauthenticated, "{status}");
        assert!(status.message().contains("the client certificate expired at"), "{status}");
    }
    server.put(3);
    let event = timeout(GUARD, lasting_events.message()).await.unwrap().unwrap().unwrap();
    assert_eq!(event.service.unwrap().name, "service-3");
}

#[tokio::test]
async fn resumption_does_not_bypass_the_removal_of_an_authority() {
    let (old, new) = (Authority::new("old"), Authority::new("new"));
    let own = new.server(|_| {});
    let server = Server::start_with(&own, &old, Settings::default()).await;
    let address = server.running.local_addr;
    let client = Client::new(&new, &old.node("n1"));
    let connection = client.connect(address).await.unwrap();
    let mut stream = connection.sync("n1").await.unwrap();
    stream.until_message_about("service-1").await;
    // The resumed handshake uses one ticket, and the client gets another ticket for later.
    let resumed = client.connect(server.running.inspect_addr).await.unwrap();
    assert_eq!(resumed.kind, HandshakeKind::Resumed);
    resumed.health().await.unwrap();

    fs::write(server.path("ca.crt"), new.pem()).unwrap();
    server.until_metric("headgate_tls_reloads_total{result=\"success\"}", 1).await;
    let error = client.refusal(address).await;
    let refusal = explain(&error, &files()).unwrap();
    assert!(refusal.sentence.contains("no authority that the control plane knows signed it"), "{refusal:?}");
    server.until_metric("headgate_tls_handshakes_failed_total{reason=\"unknown_authority\"}", 1).await;
    assert_eq!(server.metric("headgate_tls_handshakes_total{kind=\"resumed\"}"), 1);
    // The open stream is not closed.
    server.put(2);
    stream.until_message_about("service-2").await;
}

#[tokio::test]
async fn an_expired_certificate_ends_streams_and_makes_sessions_useless() {
    let (authority, server) = Server::of_new_authority().await;
    let (agents, inspect) = (server.running.local_addr, server.running.inspect_addr);
    let not_after = in_seconds(12);
    let expiring = |uri: &str| authority.client(&[uri], |params| params.not_after = not_after.into());
    let node = Client::new(&authority, &expiring("headgate://node/n1"));
    let reader = Client::new(&authority, &expiring("headgate://reader/me"));
    let (followed, looked) = (node.connect(agents).await.unwrap(), reader.connect(inspect).await.unwrap());
    let mut stream = followed.sync("n1").await.unwrap();
    stream.until_message_about("service-1").await;
    looked.inspect().await.unwrap();

    let status = stream.end().await;
    assert_eq!(status.code(), Code::Unauthenticated, "{status}");
    assert!(status.message().contains("the client certificate expired at") && status.message().contains("renew it"));
    server.until_metric("headgate_streams_rejected_total{reason=\"certificate_expired\"}", 1).await;
    // A certificate is valid until the end of its last second.
    let is_over = || async { std::time::SystemTime::now() > not_after + Duration::from_secs(1) };
    eventually("the certificates expire", is_over).await;

    // Open connections and resumed sessions grant no more than a new handshake would.
    assert_eq!(looked.inspect().await.map(drop).unwrap_err().code(), Code::Unauthenticated);
    let (node, reader) = (node.connect(agents).await.unwrap(), reader.connect(inspect).await.unwrap());
    assert_eq!((node.kind, reader.kind), (HandshakeKind::Resumed, HandshakeKind::Resumed));
    for status in [node.sync("n1").await.err().unwrap(), reader.inspect().await.map(drop).unwrap_err()] {
        assert_eq!(status.code(), Code::Unauthenticated, "{status}");
        assert!(status.message().contains("renew it"), "{status}");
    }
}
