//! Sends mutated requests to enrol, over TLS, to a running replica.

use std::{
    fs,
    io::{self, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    sync::Arc,
    time::{Duration, Instant},
};

use headgate_control_plane::{
    model::Sink as _,
    serve::{EnrolmentSettings, Security, Settings},
};
use headgate_core::ServiceKey;
use headgate_tests::{
    apiserver::{ApiServer, Token},
    fuzz::{Run, mutate},
    testbed::port::ReservedPort,
};
use peakmem_alloc::PeakMemAllocTrait as _;
use rcgen::{CertificateParams, KeyPair};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned, crypto::ring, pki_types::ServerName};
use tokio::task::block_in_place;

use super::{ALLOCATOR, count_panics, served};
use crate::{
    identity::authority::{Authority, load},
    replica::{Replica, settings},
};

/// The number of cases. The listener accepts a limited number of connections each second.
const CASES: u64 = 100;
/// The pause between two connections.
const PAUSE: Duration = Duration::from_millis(6);
/// If the server sends no bytes for this time, it waits for the client.
const QUIET: Duration = Duration::from_millis(30);
/// The longest time of a connection. The server ends connections earlier.
const LONGEST: Duration = Duration::from_secs(60);

/// Sends a request, waits until the server is silent for the time `quiet`, and ends the connection.
/// Returns the answer; empty if there is none.
fn send(config: &Arc<ClientConfig>, server: SocketAddr, request: &[u8], quiet: Duration) -> io::Result<Vec<u8>> {
    let socket = TcpStream::connect(server)?;
    socket.set_read_timeout(Some(quiet))?;
    let name = ServerName::from(server.ip());
    let mut stream =
        StreamOwned::new(ClientConnection::new(Arc::clone(config), name).map_err(io::Error::other)?, socket);
    // The server may answer and close the connection before it has read everything.
    let _ = stream.write_all(request).and_then(|()| stream.flush());
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    stream.conn.send_close_notify();
    let _ = stream.flush();
    stream.sock.set_read_timeout(Some(LONGEST))?;
    match stream.read_to_end(&mut answer) {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Err(error),
        _ => Ok(answer),
    }
}

fn requests(token: &str) -> Vec<Vec<u8>> {
    let signing = CertificateParams::default().serialize_request(&KeyPair::generate().unwrap()).unwrap().der().to_vec();
    let head = |headers: &str| {
        format!("POST /v1/enrol HTTP/1.1\r\nHost: replica\r\nAuthorization: Bearer {token}\r\n{headers}\r\n")
            .into_bytes()
    };
    let plain = [head(&format!("Content-Length: {}\r\n", signing.len())), signing.clone()].concat();
    let length = format!("{:x}\r\n", signing.len()).into_bytes();
    let chunked = [head("Transfer-Encoding: chunked\r\n"), length, signing, b"\r\n0\r\n\r\n".to_vec()].concat();
    vec![plain, chunked]
}

#[tokio::test(flavor = "multi_thread")]
async fn mutated_requests_to_enrol_are_refused_safely() {
    let panics = count_panics();
    let (folder, authority) = (tempfile::tempdir().unwrap(), Authority::new("authority"));
    let api = ApiServer::start().unwrap();
    authority.server(|_| {}).write(folder.path(), &[&authority]);
    let nodes = Authority::new("authority of nodes");
    fs::write(folder.path().join("node-ca.crt"), nodes.pem()).unwrap();
    fs::write(folder.path().join("node-ca.key"), nodes.key()).unwrap();
    fs::write(folder.path().join("kubeconfig"), api.kubeconfig()).unwrap();
    let port = ReservedPort::reserve().unwrap();
    let enrolment = EnrolmentSettings {
        listen: port.address(),
        ca_key: folder.path().join("node-ca.key"),
        audience: "headgate".into(),
        service_account: ServiceKey::new("headgate-system", "headgate-node-agent"),
        any_address: true,
        certificate_lifetime: Duration::from_secs(3_600),
        kubeconfig: Some(folder.path().join("kubeconfig")),
    };
    let settings = Settings { enrolment: Some(enrolment), ..settings() };
    let replica = Replica::start_with(settings, Security::Tls(load(folder.path()))).await;
    replica.store.synced();

    let mut roots = RootCertStore::empty();
    roots.add(authority.der()).unwrap();
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let builder = builder.with_safe_default_protocol_versions().unwrap();
    let config = Arc::new(builder.with_root_certificates(roots).with_no_client_auth());
    let corpus = requests(&api.issue_token(Token::of_agent("n1")));
    for request in &corpus {
        let answer = block_in_place(|| send(&config, port.address(), request, LONGEST)).unwrap();
        let answer = String::from_utf8_lossy(&answer);
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    }
    let words = [
        "\r\n",
        "\r\n\r\n",
        "Bearer ",
        "Content-Length: 0\r\n",
        "Transfer-Encoding: chunked\r\n",
        "HTTP/1.0",
        "ffffffffffffffff\r\n",
    ];
    let mut cases = Run::new("enrolment", CASES);
    while cases.goes_on() {
        let mut request = corpus[cases.rng.usize(0..corpus.len())].clone();
        mutate(&mut cases.rng, &mut request, &corpus, &words);
        ALLOCATOR.reset_peak_memory();
        let began = Instant::now();
        let answer = block_in_place(|| send(&config, port.address(), &request, QUIET));
        let result = served(&panics, request.len()).and_then(|()| match answer {
            // Others are answered, too, if the request is well-formed.
            Ok(answer) => Ok(answer.starts_with(b"HTTP/1.1 ") && !answer.starts_with(b"HTTP/1.1 400 ")),
            Err(error) => Err(format!("the replica keeps the connection open after the client closed it: {error}")),
        });
        cases.count(&request, began, result);
        tokio::time::sleep(PAUSE).await;
    }
    cases.finish();
    replica.running.stop().await;
}
