//! Tests of the requests that each role may send.

use headgate_control_plane::serve::Settings;
use rcgen::DnType;
use tonic::Code;

use super::{authority::Authority, client::Client, server::Server};

#[tokio::test]
async fn nodes_may_follow_readers_may_inspect_and_everyone_may_check_health() {
    let (authority, server) = Server::of_new_authority().await;
    let (agents, inspect) = (server.running.local_addr, server.running.inspect_addr);
    let connect = async |pair, address| Client::new(&authority, &pair).connect(address).await.unwrap();

    let node = connect(authority.node("n1"), inspect).await;
    assert_eq!(node.health().await.unwrap(), 1);
    for pair in [authority.node("n1"), authority.kubelet("n1")] {
        let stream = connect(pair, agents).await;
        stream.sync("n1").await.unwrap().until_message_about("service-1").await;
    }
    let denied = [node.inspect().await.map(drop).unwrap_err(), node.reflection().await.unwrap_err()];
    for status in denied {
        assert_eq!(status.code(), Code::PermissionDenied, "{status}");
        assert!(status.message().contains("node n1's") && status.message().contains("--nodes-may-inspect"), "{status}");
        assert!(status.message().contains("headgate://reader/NAME"), "{status}");
    }
    assert_eq!(server.metric("headgate_requests_denied_total{reason=\"permission_denied\"}"), 2);
    let status = connect(authority.node("n1"), agents).await.sync("n2").await.err().unwrap();
    assert!(status.code() == Code::PermissionDenied && status.message().contains("--node-name n1"), "{status}");

    let in_group = authority.client(&[], |params| {
        params.distinguished_name.push(DnType::OrganizationName, "headgate:readers");
    });
    for pair in [authority.client(&["headgate://reader/me"], |_| {}), in_group] {
        let client = Client::new(&authority, &pair);
        let reader = client.connect(inspect).await.unwrap();
        assert_eq!(reader.inspect().await.unwrap().services, 1);
        reader.reflection().await.unwrap();
        let status = client.connect(agents).await.unwrap().sync("n1").await.err().unwrap();
        assert_eq!(status.code(), Code::PermissionDenied);
        assert!(status.message().contains("headgate://node/n1"), "{status}");
    }
}

#[tokio::test]
async fn nodes_may_inspect_if_the_operator_allows_it() {
    let authority = Authority::new("authority");
    let settings = Settings { nodes_may_inspect: true, ..Settings::default() };
    let server = Server::start_with(&authority.server(|_| {}), &authority, settings).await;
    let address = server.running.inspect_addr;
    let node = Client::new(&authority, &authority.node("n1")).connect(address).await.unwrap();
    assert_eq!(node.inspect().await.unwrap().services, 1);
    node.reflection().await.unwrap();
    // The setting `nodes_may_inspect` does not apply to a certificate that names no node.
    let nobody = Client::new(&authority, &authority.client(&[], |_| {})).connect(address).await.unwrap();
    assert_eq!(nobody.inspect().await.map(drop).unwrap_err().code(), Code::PermissionDenied);
}

#[tokio::test]
async fn an_ambiguous_certificate_grants_no_role() {
    let (authority, server) = Server::of_new_authority().await;
    let (agents, inspect) = (server.running.local_addr, server.running.inspect_addr);
    let named = |name: &str, uris: &[&str]| {
        authority.client(uris, |params| params.distinguished_name.push(DnType::CommonName, name))
    };
    let cases = [
        (named("n1", &["headgate://node/n1", "headgate://node/n2"]), "has two URIs"),
        (named("n1", &["headgate://node/n1", "headgate://reader/n1"]), "has two URIs"),
        (named("n1", &["https://node/n1"]), "names neither a node nor a reader"),
        (named("n1", &["spiffe://node/n1"]), "names neither a node nor a reader"),
        (named("n1", &["headgate://node/N1"]), "\"N1\" is not a valid name"),
        (named("n1", &["HEADGATE://node/n1"]), "which is neither"),
        (named("n1", &["headgate://node/"]), "\"\" is not a valid name"),
        (named("n1", &["headgate://operator/n1"]), "which is neither"),
        (
            named("system:node:n2", &["headgate://node/n1"]),
            "its URI names node n1, but its common name is system:node:n2",
        ),
        (named("system:node:N1", &[]), "\"N1\" is not a valid name"),
        (named("system:node:n1", &[]), "system:node:n1 without the organization system:nodes"),
    ];
    let count = cases.len() as u64;
    for (pair, problem) in cases {
        let client = Client::new(&authority, &pair);
        let nobody = client.connect(inspect).await.unwrap();
        let statuses = [
            nobody.inspect().await.map(drop).unwrap_err(),
            nobody.reflection().await.unwrap_err(),
            client.connect(agents).await.unwrap().sync("n1").await.err().unwrap(),
        ];
        for status in statuses {
            assert_eq!(status.code(), Code::PermissionDenied, "{status}");
            assert!(status.message().contains(problem), "{problem} is not in {status}");
            assert!(status.message().contains("issue it with one URI"), "no remedy: {status}");
        }
        assert_eq!(nobody.health().await.unwrap(), 1);
    }
    server.until_metric("headgate_streams_rejected_total{reason=\"permission_denied\"}", count).await;
}
