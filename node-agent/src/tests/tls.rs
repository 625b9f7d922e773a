//! Tests of mutual TLS: which certificates are accepted, and what happens when files change.

use std::path::{Path, PathBuf};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, SanType};
use tempfile::TempDir;
use tonic::transport::{Certificate, Identity, ServerTlsConfig};

use super::*;

struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    fn pem(&self) -> String {
        self.0.pem()
    }

    /// Issues a certificate for a name or address, which also names a replica. Returns the
    /// certificate and its key as PEM.
    fn issue(&self, name: &str) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        params.subject_alt_names.push(SanType::URI("headgate://replica/test".try_into().unwrap()));
        (params.signed_by(&key, &self.0).unwrap().pem(), key.serialize_pem())
    }
}

fn server_tls(server: &Authority, clients: &Authority) -> ServerTlsConfig {
    let (cert, key) = server.issue("127.0.0.1");
    ServerTlsConfig::new().identity(Identity::from_pem(cert, key)).client_ca_root(Certificate::from_pem(clients.pem()))
}

fn write(folder: &Path, name: &str, text: &str) -> PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, text).unwrap();
    path
}

fn write_files(folder: &Path, ca: &Authority, client: &Authority) -> Vec<String> {
    let (cert, key) = client.issue("node-1");
    let files = [("tls-cert", cert), ("tls-key", key), ("tls-ca", ca.pem())];
    files.iter().map(|(name, text)| format!("--{name}={}", write(folder, name, text).display())).collect()
}

fn start(replica: &ScriptedReplica, mut arguments: Vec<String>) -> Agent {
    arguments.push(format!("--control-plane=https://{}", replica.address));
    Agent::start(&arguments)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_of_another_authority_is_refused_until_the_file_changes() {
    let (authority, stranger, folder) = (Authority::new(), Authority::new(), TempDir::new().unwrap());
    let mut replica = ScriptedReplica::start_tls(server_tls(&authority, &authority)).await;
    let agent = start(&replica, write_files(folder.path(), &stranger, &authority));
    assert!(replica.accept_within(Duration::from_millis(500)).await.is_none());
    // The agent reads the files for each connection, so it uses the right authority without a
    // restart.
    write(folder.path(), "tls-ca", &authority.pem());
    let _connection = programmed(&mut replica, &store()).await;
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_with_an_invalid_key_file_keeps_running_until_the_file_is_replaced() {
    let (authority, folder) = (Authority::new(), TempDir::new().unwrap());
    let mut replica = ScriptedReplica::start_tls(server_tls(&authority, &authority)).await;
    let arguments = write_files(folder.path(), &authority, &authority);
    write(folder.path(), "tls-key", "nonsense");
    let agent = start(&replica, arguments.clone());
    assert!(replica.accept_within(Duration::from_millis(500)).await.is_none());
    assert!(!agent.running.is_finished());
    let _ = write_files(folder.path(), &authority, &authority);
    let _connection = programmed(&mut replica, &store()).await;
    agent.stop().await;
}
