//! Certificates that a client or a server refuses, and the messages on both sides.

use headgate_control_plane::serve::Settings;
use headgate_node_agent::{
    control_planes::ControlPlane as Target,
    session::{connect::ConnectError, metrics::TlsMetrics, tls::AgentTls},
};
use headgate_tls::{Files, Side, explain};
use rcgen::{CertificateParams, ExtendedKeyUsagePurpose, SanType, date_time_ymd};

use super::{
    agent::Agent,
    authority::{Authority, Pair},
    client::{Client, files},
    program::{control_plane, metric},
    server::Server,
};

#[tokio::test(flavor = "multi_thread")]
async fn refused_clients_and_the_servers_log_get_the_reason() {
    let (authority, stranger) = (Authority::new("authority"), Authority::new("stranger"));
    let folder = tempfile::tempdir().unwrap();
    authority.server(|_| {}).write(&folder.path().join("tls"), &[&authority]);
    let control_plane = control_plane(folder.path(), &folder.path().join("tls"));
    let node = |change: fn(&mut CertificateParams)| Some(authority.client(&["headgate://node/n1"], change));
    let cases = [
        (
            Some(stranger.node("n1")),
            "unknown_authority",
            "the client's certificate is not signed by an authority of --tls-client-ca",
            "no authority that the control plane knows signed it; have an authority of its --tls-node-ca",
        ),
        (
            node(|params| params.not_after = date_time_ymd(2020, 1, 1)),
            "certificate_expired",
            "the client's certificate expired at 2020-01-01T00:00:00Z; renew it",
            "it has expired, or is not valid yet; renew it",
        ),
        (
            node(|params| params.not_before = date_time_ymd(2200, 1, 1)),
            "certificate_not_yet_valid",
            "the client's certificate is not valid before 2200-01-01T00:00:00Z; check the clocks",
            "it has expired, or is not valid yet; renew it, and check the clocks",
        ),
        (
            node(|params| params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth]),
            "wrong_usage",
            "the client's certificate lacks the extended key usage clientAuth; issue a new certificate",
            "it is not for clients; issue a new certificate with the extended key usage clientAuth",
        ),
        (
            None,
            "no_certificate",
            "the client presents no certificate; give the client a certificate",
            "the control plane requires a client certificate; pass --tls-cert and --tls-key",
        ),
    ];
    for (pair, reason, server_says, client_says) in cases {
        let client = pair.map_or_else(|| Client::anonymous(&authority), |pair| Client::new(&authority, &pair));
        let error = client.refusal(control_plane.address).await;
        let refusal = explain(&error, &files()).unwrap_or_else(|| panic!("{reason}: {error}"));
        assert_eq!(refusal.reason, "refused_by_control_plane", "{refusal:?}");
        assert!(refusal.sentence.contains(client_says), "{reason}: {}", refusal.sentence);
        let line = control_plane.until_logged(server_says).unwrap();
        assert!(line.contains(reason), "{line}");
        let sample = format!("headgate_tls_handshakes_failed_total{{reason=\"{reason}\"}}");
        assert_eq!(metric(control_plane.metrics, &sample), 1, "{reason}");
    }
    // No refused client completed a handshake. A valid client still connects.
    assert_eq!(metric(control_plane.metrics, "headgate_tls_handshakes_total{kind=\"full\"}"), 0);
    let good = Client::new(&authority, &authority.node("n1")).connect(control_plane.address).await.unwrap();
    good.sync("n1").await.map(drop).unwrap();
}

/// Connects like an agent that trusts this authority, and returns the error.
pub(super) async fn agent_error(url: &str, own: &Pair, trusts: &Authority) -> String {
    let folder = tempfile::tempdir().unwrap();
    own.write(folder.path(), &[trusts]);
    let [cert, key, ca] = ["tls.crt", "tls.key", "ca.crt"].map(|name| folder.path().join(name));
    let tls = AgentTls::new(
        Files { side: Side::Client, cert, key, node_ca: ca.clone(), ca, denied: None },
        TlsMetrics::default(),
    );
    match Target::parse(url, false).unwrap().connect(None, Some(&tls), None).await {
        Err(ConnectError::Refused(refusal)) => refusal.sentence,
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_trusts_only_replicas_of_its_authority_at_whatever_address() {
    let (authority, stranger) = (Authority::new("authority"), Authority::new("stranger"));
    let elsewhere = authority.server(|params| {
        params.subject_alt_names.remove(0);
        params.subject_alt_names.push(SanType::DnsName("headgate.example".try_into().unwrap()));
    });
    let server = Server::start_with(&elsewhere, &authority, Settings::default()).await;
    let said = agent_error(&server.url(), &authority.node("n1"), &stranger).await;
    assert!(said.contains("the control plane's certificate is not signed by an authority of --tls-ca"), "{said}");
    assert!(said.contains("have one of these authorities sign it"), "{said}");
    // With each refusal, the client sends a TLS alert to the server.
    server.until_metric("headgate_tls_handshakes_failed_total{reason=\"refused_by_client\"}", 1).await;
    let folder = tempfile::tempdir().unwrap();
    authority.node("n1").write(folder.path(), &[&authority]);
    let agent = Agent::of_node("n1", &server.url(), &folder.path().join("tls"), &folder.path().join("ca.crt"));
    agent.until_connected(true).await;
}
