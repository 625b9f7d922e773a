//! Single requests, well-formed and malformed.

use std::{
    fs, io,
    net::{Ipv4Addr, SocketAddr},
    path::Path,
    sync::Arc,
    time::SystemTime,
};

use headgate_tests::apiserver::Token;
use headgate_tls::{Files, Side};
use rcgen::{CertificateParams, KeyPair};
use rustls::{
    ClientConfig,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject as _},
    sign::{CertifiedKey, SingleCertAndKey},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpSocket, TcpStream},
};
use tokio_rustls::{TlsConnector, client::TlsStream};

use super::Cluster;
use crate::identity::server::eventually;

/// A client that makes one request for each connection.
#[derive(Clone)]
pub(super) struct Client {
    address: Ipv4Addr,
    server: SocketAddr,
    config: Arc<ClientConfig>,
}

impl Client {
    /// A client from 127.0.0.1.
    pub(super) fn of(cluster: &Cluster) -> Self {
        let none = cluster.path("none");
        let ca = cluster.path("certs/ca.crt");
        let files = Files { side: Side::Client, cert: none.clone(), key: none, node_ca: ca.clone(), ca, denied: None };
        let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
        let builder = builder.with_safe_default_protocol_versions().unwrap();
        let roots = files.read_authorities(SystemTime::now()).unwrap();
        let config = Arc::new(builder.with_root_certificates(roots).with_no_client_auth());
        Self { address: Ipv4Addr::LOCALHOST, server: cluster.enrolment.address(), config }
    }

    /// The same client from another address.
    pub(super) fn with_address(&self, address: Ipv4Addr) -> Self {
        Self { address, ..self.clone() }
    }

    /// The same client with the certificate in the file `name`.crt.
    pub(super) fn showing(&self, name: &Path) -> Self {
        let chain = CertificateDer::pem_file_iter(name.with_extension("crt")).unwrap().map(Result::unwrap).collect();
        let key = PrivateKeyDer::from_pem_file(name.with_extension("key")).unwrap();
        let mut config = (*self.config).clone();
        let own = CertifiedKey::from_der(chain, key, config.crypto_provider()).unwrap();
        config.client_auth_cert_resolver = Arc::new(SingleCertAndKey::from(own));
        Self { config: Arc::new(config), ..self.clone() }
    }

    /// Asks for a certificate with a token that the API server rejects.
    pub(super) async fn enrol_without_token(&self) -> String {
        self.send(&enrol("garbage", &signing_request())).await.unwrap()
    }

    /// Connects, and makes a TLS handshake.
    pub(super) async fn handshake(&self) -> io::Result<TlsStream<TcpStream>> {
        let socket = TcpSocket::new_v4()?;
        socket.bind((self.address, 0).into())?;
        let stream = socket.connect(self.server).await?;
        let name = ServerName::from(self.server.ip());
        TlsConnector::from(Arc::clone(&self.config)).connect(name, stream).await
    }

    /// Sends a request and returns the answer with its head.
    pub(super) async fn send(&self, request: &[u8]) -> io::Result<String> {
        let mut stream = self.handshake().await?;
        stream.write_all(request).await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        Ok(answer)
    }
}

/// A certificate signing request with a new key.
pub(super) fn signing_request() -> Vec<u8> {
    let request = CertificateParams::default().serialize_request(&KeyPair::generate().unwrap()).unwrap();
    request.der().to_vec()
}

fn request(start: &str, headers: &str, body: &[u8]) -> Vec<u8> {
    let head = format!("{start} HTTP/1.1\r\nHost: test\r\n{headers}Content-Length: {}\r\n\r\n", body.len());
    [head.as_bytes(), body].concat()
}

/// A request to enrol.
pub(super) fn enrol(token: &str, body: &[u8]) -> Vec<u8> {
    request("POST /v1/enrol", &format!("Authorization: Bearer {token}\r\n"), body)
}

#[tokio::test(flavor = "multi_thread")]
async fn every_refusal_names_the_fault_and_is_counted() {
    let cluster = Cluster::start(&[]);
    let (client, token, body) =
        (Client::of(&cluster), cluster.api.issue_token(Token::of_agent("n1")), signing_request());
    let huge = "a".repeat(20 << 10);
    let good = enrol(&token, &body);
    let is_enrolled = || async { client.send(&good).await.unwrap().starts_with("HTTP/1.1 200 OK") };
    eventually("the replica has listed Nodes", is_enrolled).await;
    let malformed = [
        (request("GET /v1/enrol", "", b""), 404, "agents send POST /v1/enrol"),
        (request("POST /", "", b""), 404, "agents send POST /v1/enrol"),
        (request("POST /v1/enrol", "", &body), 401, "contains no bearer token"),
        (request("POST /v1/enrol", "Authorization: Basic eDp5\r\n", &body), 401, "contains no bearer token"),
        (enrol("", &body), 401, "contains no bearer token"),
        (enrol(&huge, &body), 401, "at most 16384 bytes"),
        (enrol(&token, &[0; 9000]), 400, "larger than 8192 bytes"),
        (enrol(&token, b"garbage"), 400, "the certificate signing request cannot be used"),
    ];
    let count = malformed.len() as u64;
    for (request, code, text) in malformed {
        let answer = client.send(&request).await.unwrap();
        assert!(answer.starts_with(&format!("HTTP/1.1 {code} ")) && answer.contains(text), "{answer}");
    }
    assert_eq!(cluster.enrolments("malformed"), count);
    let answer = client.send(&enrol("garbage", &body)).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 403 ") && answer.contains("the API server rejects the token"), "{answer}");
    assert_eq!(cluster.enrolments("token_rejected"), 1);

    let key = cluster.path("certs/node-ca.key");
    let pem = fs::read(&key).unwrap();
    fs::write(&key, "garbage").unwrap();
    let answer = client.send(&good).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 500 ") && answer.contains("--enrolment-ca-key"), "{answer}");
    assert_eq!(cluster.enrolments("authority"), 1);
    fs::write(&key, pem).unwrap();
    assert!(is_enrolled().await);
}
