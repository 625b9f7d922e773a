//! Attacks with certificates: of a stolen key of the authority of nodes, of a node, and of holders
//! that an operator denies. Each test also checks those who must not notice the attack.

use std::{fs, net::Ipv4Addr, path::Path, process::Command, sync::Arc};

use headgate_control_plane::{
    model::{NodeChange, Sink as _, Transaction},
    serve::Settings,
};
use headgate_tls::explain;
use rcgen::{ExtendedKeyUsagePurpose, SanType};
use rustls::{
    ServerConfig,
    crypto::ring,
    pki_types::{PrivateKeyDer, pem::PemObject as _},
};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;
use tonic::Code;

use super::{
    authority::{Authority, Pair},
    client::{Client, files},
    refusals::agent_error,
    server::Server,
};
use crate::replica::node;

/// A server whose operators and nodes have their own authorities, and whose file of denied holders
/// is empty.
async fn server(operators: &Authority, nodes: &Authority, settings: Settings) -> Server {
    let folder = tempfile::tempdir().unwrap();
    operators.server(|_| {}).write(folder.path(), &[operators]);
    fs::write(folder.path().join("node-ca.crt"), nodes.pem()).unwrap();
    fs::write(folder.path().join("denied"), "").unwrap();
    Server::in_folder(folder, settings).await
}

/// Who takes the key of the authority of nodes from a replica can act as a node, and as nobody
/// else. The authority of operators does not sign for nodes.
#[tokio::test]
async fn the_authority_of_nodes_signs_for_no_reader_and_no_replica() {
    let (operators, nodes) = (Authority::new("operators"), Authority::new("nodes"));
    let server = server(&operators, &nodes, Settings::default()).await;
    let (agents, inspect) = (server.running.local_addr, server.running.inspect_addr);
    let stolen = |uri: &str| nodes.client(&[uri], |_| {});
    for pair in
        [stolen("headgate://reader/me"), stolen("headgate://replica/r1"), stolen("https://x"), operators.node("n1")]
    {
        let client = Client::new(&operators, &pair);
        for address in [agents, inspect] {
            let refusal = explain(&client.refusal(address).await, &files()).unwrap();
            assert!(refusal.sentence.contains("no authority that the control plane knows"), "{refusal:?}");
        }
    }
    server.until_metric("headgate_tls_handshakes_failed_total{reason=\"unknown_authority\"}", 8).await;
    let node = Client::new(&operators, &nodes.node("n1")).connect(agents).await.unwrap();
    node.sync("n1").await.unwrap().until_message_about("service-1").await;
    let reader = Client::new(&operators, &operators.client(&["headgate://reader/me"], |_| {}));
    assert_eq!(reader.connect(inspect).await.unwrap().inspect().await.unwrap().services, 1);
}

/// Makes TLS handshakes with this certificate. Returns the URL.
async fn impostor(pair: &Pair) -> String {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let url = format!("https://{}", listener.local_addr().unwrap());
    let builder = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let builder = builder.with_safe_default_protocol_versions().unwrap().with_no_client_auth();
    let key = PrivateKeyDer::from_pem_slice(pair.key.as_bytes()).unwrap();
    let mut config = builder.with_single_cert(vec![pair.der.clone()], key).unwrap();
    config.alpn_protocols = vec![b"h2".to_vec()];
    let acceptor = TlsAcceptor::from(Arc::new(config));
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            // A client that does not accept the certificate ends the handshake.
            let _ = acceptor.accept(stream).await;
        }
    });
    url
}

/// A server at the right address is no replica because of that: not with the key of the authority
/// of nodes, and not with a certificate of a node or a reader.
#[tokio::test]
async fn an_agent_follows_no_server_that_is_not_a_replica_of_its_operators() {
    let (operators, nodes) = (Authority::new("operators"), Authority::new("nodes"));
    let named = |authority: &Authority, uri: &str| {
        authority.server(|params| params.subject_alt_names[1] = SanType::URI(uri.try_into().unwrap()))
    };
    let only_client = operators.server(|params| params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth]);
    for (pair, reason) in [
        (nodes.server(|_| {}), "is not signed by an authority of --tls-ca"),
        (named(&operators, "headgate://node/n1"), "names no replica"),
        (named(&operators, "headgate://reader/me"), "names no replica"),
        (only_client, "lacks the extended key usage serverAuth"),
    ] {
        let said = agent_error(&impostor(&pair).await, &nodes.node("n1"), &operators).await;
        assert!(said.contains(reason), "{said}");
    }
}

fn node_at(name: &str, address: Ipv4Addr) -> NodeChange {
    let mut node = node(name, None);
    node.addresses = vec![address.into()];
    NodeChange::Apply(node)
}

/// A certificate that was taken to another machine opens no stream.
#[tokio::test]
async fn a_stolen_certificate_works_only_from_an_address_of_its_node() {
    let (operators, nodes) = (Authority::new("operators"), Authority::new("nodes"));
    let settings = Settings { streams_from_node_address: true, ..Settings::default() };
    let server = server(&operators, &nodes, settings).await;
    let (own, other) = (Ipv4Addr::LOCALHOST, Ipv4Addr::new(127, 0, 0, 77));
    server.store.commit(Transaction { nodes: vec![node_at("n1", own)], ..Transaction::default() });
    let open = async |name: &str, from: Ipv4Addr| {
        let client = Client::new(&operators, &nodes.node(name));
        let connected = client.connect_from(from.into(), server.running.local_addr).await.unwrap();
        connected.sync(name).await.map(drop)
    };
    open("n1", own).await.unwrap();
    let status = open("n1", other).await.unwrap_err();
    assert_eq!(status.code(), Code::PermissionDenied);
    assert!(status.message().contains("no Node n1 with the address 127.0.0.77"), "{status}");
    assert_eq!(open("n2", own).await.unwrap_err().code(), Code::PermissionDenied, "the Node n2 is not known");
    server.store.commit(Transaction { nodes: vec![node_at("n1", other)], ..Transaction::default() });
    open("n1", other).await.unwrap();
}

/// A line that openssl prints about a certificate.
fn openssl(pair: &Pair, folder: &Path, arguments: &[&str]) -> String {
    let file = folder.join("certificate");
    fs::write(&file, &pair.certificate).unwrap();
    let output = Command::new("openssl").args(["x509", "-noout", "-in"]).arg(&file).args(arguments).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Denied holders and certificates lose their connections, and a session that they could resume.
#[tokio::test]
async fn denied_holders_and_certificates_lose_their_connections_and_others_do_not() {
    let (operators, nodes) = (Authority::new("operators"), Authority::new("nodes"));
    let server = server(&operators, &nodes, Settings::default()).await;
    let (agents, inspect) = (server.running.local_addr, server.running.inspect_addr);
    let pairs = ["n1", "n2", "n3", "n4"].map(|name| nodes.node(name));
    let clients = pairs.each_ref().map(|pair| Client::new(&operators, pair));
    let mut streams = Vec::new();
    for (client, name) in clients.iter().zip(["n1", "n2", "n3", "n4"]) {
        let connected = client.connect(agents).await.unwrap();
        let mut stream = connected.sync(name).await.unwrap();
        stream.until_message_about("service-1").await;
        streams.push((connected, stream));
    }
    let reader = Client::new(&operators, &operators.client(&["headgate://reader/me"], |_| {}));
    let connected = reader.connect(inspect).await.unwrap();
    let mut events = connected.watch().await.unwrap();

    let folder = tempfile::tempdir().unwrap();
    let serial = openssl(&pairs[1], folder.path(), &["-serial"]);
    let fingerprint = openssl(&pairs[2], folder.path(), &["-fingerprint", "-sha256"]);
    let text = format!("headgate://node/n1\nheadgate://reader/me\n{serial}{fingerprint}");
    fs::write(server.path("denied"), text).unwrap();
    let (_last, mut last) = streams.pop().unwrap();
    for (_connected, stream) in streams {
        assert_ne!(stream.end().await.code(), Code::Ok);
    }
    while events.message().await.is_ok_and(|event| event.is_some()) {}
    server.until_metric("headgate_connections_refused_total{reason=\"denied\"}", 4).await;
    for client in clients[..3].iter().chain([&reader]) {
        let refusal = explain(&client.refusal(agents).await, &files()).unwrap();
        assert!(refusal.sentence.contains("is in the file of --tls-denied"), "{refusal:?}");
    }
    server.until_metric("headgate_tls_handshakes_failed_total{reason=\"certificate_denied\"}", 4).await;
    server.put(2);
    last.until_message_about("service-2").await;
}
