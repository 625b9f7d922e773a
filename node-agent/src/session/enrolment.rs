//! Gets the agent's certificate for the service-account token of its pod, and renews it. A control
//! plane that cannot have the token reviewed accepts the present certificate instead. The key stays
//! in the file of `--tls-key`, which only its owner can read; it never leaves the node.

use std::{
    fs,
    io::{self, Write as _},
    net::SocketAddr,
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use axum::body::{Body, to_bytes};
use headgate_core::errors::chain;
use headgate_tls::{Denied, FileError, Files, explain, replica_verifier};
use hyper::{Method, Request, StatusCode, client::conn::http1, header};
use hyper_util::rt::TokioIo;
use rcgen::{CertificateParams, KeyPair};
use rustls::{ClientConfig, client::Resumption, crypto::ring, pki_types::ServerName};
use tokio::{net::TcpStream, time::timeout};
use tokio_rustls::TlsConnector;
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};
use tracing::{info, warn};

use super::{metrics::SessionMetrics, replicas::lookup, tls::AgentTls};
use crate::{
    backoff::{Backoff, Jitter, jitter},
    state::{AgentState, blocking},
};

/// The longest time for one attempt.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(30);

/// The maximum size of an answer. A certificate has about 1 kB.
const MAX_ANSWER_BYTES: usize = 64 << 10;

/// An agent that starts with a usable certificate uses it, and gets a new one within this time.
const AFTER_START: Duration = Duration::from_secs(60);

/// The bounds of the pause before the agent replaces a certificate that a control plane rejects. A
/// replica that rejects one certificate may reject the next one, too.
const AFTER_REJECTION: [Duration; 2] = [Duration::from_secs(10), Duration::from_secs(600)];

/// The shortest pause after a success. Certificates near the end of their authority are short.
const SHORTEST_PAUSE: Duration = Duration::from_secs(5);

/// Gets and renews the certificate of this agent.
pub struct Enrolment {
    files: Files,
    token: PathBuf,
    /// `HOST:PORT` of replicas.
    addresses: Vec<String>,
    /// Reserves the addresses, and knows those of other replicas.
    state: Arc<AgentState>,
    metrics: SessionMetrics,
}

/// Why the agent got no certificate. The agent tries again.
#[derive(Debug, thiserror::Error)]
enum EnrolmentError {
    #[error(transparent)]
    Files(#[from] FileError),
    #[error("--enrolment-token {0}: cannot read the file: {1}; mount a projected volume with a token")]
    Token(PathBuf, io::Error),
    #[error("{0} {1}: {2}; the agent creates this file itself, so its folder must be writable")]
    File(&'static str, PathBuf, String),
    #[error("--enrolment-address {0}: write HOST:PORT")]
    Address(String),
    #[error("cannot create a request: {0}")]
    Crypto(String),
    #[error("{0}")]
    Tls(String),
    #[error("the connection failed: {}; check the address, and the control plane's log", chain(.0))]
    Connection(#[from] io::Error),
    #[error("the connection failed: {}; check the control plane's log", chain(.0))]
    Http(#[from] hyper::Error),
    #[error("no answer in {} s", ATTEMPT_TIMEOUT.as_secs())]
    TimedOut,
    #[error("the control plane answers {0}: {1}")]
    Refused(StatusCode, String),
}

/// What one attempt sends, and whom it trusts.
struct Prepared {
    token: String,
    request: Vec<u8>,
    config: ClientConfig,
}

impl Enrolment {
    /// Uses `files`, the token file, and addresses `HOST:PORT` of replicas, which `state` reserves.
    pub fn new(
        files: Files,
        token: PathBuf,
        addresses: Vec<String>,
        state: Arc<AgentState>,
        metrics: SessionMetrics,
    ) -> Self {
        Self { files, token, addresses, state, metrics }
    }

    /// Keeps the certificate valid. Cancels `has_certificate` with the first. Never returns.
    pub async fn run(self, tls: Arc<AgentTls>, has_certificate: CancellationToken) {
        if fs::exists(&self.files.cert).unwrap_or(false) && tls.load().await.is_ok() {
            has_certificate.cancel();
            tokio::time::sleep(jitter(AFTER_START)).await;
        }
        let mut backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(60), Jitter::Half);
        let [first, longest] = AFTER_REJECTION;
        let mut after_rejection = Backoff::new(first, longest, Jitter::Half);
        let mut replica = fastrand::usize(..self.addresses.len().max(1));
        // A control plane closes the connection of a client whose certificate it does not accept,
        // so the certificate is shown only if the token alone does not help.
        let mut shows_certificate = false;
        loop {
            let addresses = self.addresses();
            let address = &addresses[replica % addresses.len()];
            let shown = if shows_certificate { tls.load().await.ok() } else { None };
            let result =
                timeout(ATTEMPT_TIMEOUT, self.enrol(address, shown.as_ref().map(|loaded| &*loaded.config))).await;
            let result = match result.unwrap_or(Err(EnrolmentError::TimedOut)) {
                Ok(()) => tls.load().await.map_err(EnrolmentError::from),
                Err(error) => Err(error),
            };
            // The same replica is asked again, with the certificate.
            shows_certificate = !shows_certificate
                && matches!(result, Err(EnrolmentError::Refused(StatusCode::SERVICE_UNAVAILABLE, _)));
            let problem = result.as_ref().err().map(|error| format!("no new certificate from {address}: {error}"));
            self.metrics.enrolled(problem);
            let has_new = result.is_ok();
            let pause = match result {
                Ok(loaded) => {
                    backoff.reset();
                    has_certificate.cancel();
                    let left = loaded.validity.not_after.duration_since(SystemTime::now()).unwrap_or_default();
                    // Agents that enrol together renew at different times.
                    let pause = (left / 2 + jitter(left / 4)).max(SHORTEST_PAUSE);
                    info!(address, renewal_seconds = pause.as_secs(), "the agent has a new certificate");
                    pause
                }
                Err(error) => {
                    replica += usize::from(!shows_certificate);
                    let pause = backoff.next_pause();
                    warn!(address, %error, pause_ms = pause.as_millis(), "the agent got no new certificate; forwarding continues");
                    pause
                }
            };
            tokio::select! {
                () = tokio::time::sleep(pause) => after_rejection.reset(),
                () = tls.rejected(), if has_new => {
                    let pause = after_rejection.next_pause();
                    warn!(pause_ms = pause.as_millis(), "a control plane rejects the agent's certificate; the agent gets a new one after a pause");
                    tokio::time::sleep(pause).await;
                }
            }
        }
    }

    /// The configured addresses, and those of announced replicas with the port of the first one.
    fn addresses(&self) -> Vec<String> {
        let first = self.addresses.first().and_then(|first| first.rsplit_once(':'));
        let port = first.and_then(|(_, port)| port.parse().ok());
        let announced = self.state.replicas().borrow().clone();
        let announced = announced.into_iter().filter_map(|at| Some(SocketAddr::new(at.ip(), port?).to_string()));
        let others = announced.filter(|address| !self.addresses.contains(address));
        self.addresses.iter().cloned().chain(others).collect()
    }

    /// Gets a certificate from one replica and writes it. `shown` is the configuration of a stream,
    /// whose certificate the agent shows.
    async fn enrol(&self, address: &str, shown: Option<&ClientConfig>) -> Result<(), EnrolmentError> {
        let (files, token) = (self.files.clone(), self.token.clone());
        let prepared = blocking(move || prepare(&files, &token)).await?;
        let mut config = shown.cloned().unwrap_or(prepared.config);
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        config.resumption = Resumption::disabled();
        let invalid = || EnrolmentError::Address(address.to_owned());
        let (host, port) = address.rsplit_once(':').ok_or_else(invalid)?;
        let port = port.parse().map_err(|_| invalid())?;
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let name = ServerName::try_from(host.to_owned()).map_err(|_| invalid())?;
        let stream = TcpStream::connect(&*lookup(host, port, &self.state).await?).await?;
        // The handshake fails before the token is sent, unless an authority of --tls-ca has signed
        // the server's certificate as one of a replica.
        let stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await.map_err(|error| {
            explain(&error, &self.files)
                .map_or(EnrolmentError::Connection(error), |refusal| EnrolmentError::Tls(refusal.sentence))
        })?;
        let (mut sender, connection) = http1::handshake::<_, Body>(TokioIo::new(stream)).await?;
        let request = Request::builder()
            .method(Method::POST)
            .uri("/v1/enrol")
            .header(header::HOST, address)
            .header(header::AUTHORIZATION, format!("Bearer {}", prepared.token))
            .body(Body::from(prepared.request))
            .map_err(|error| EnrolmentError::Crypto(error.to_string()))?;
        let _connection = AbortOnDropHandle::new(tokio::spawn(connection));
        let response = sender.send_request(request).await?;
        let code = response.status();
        let answer = to_bytes(Body::new(response.into_body()), MAX_ANSWER_BYTES).await.map_err(io::Error::other)?;
        if code != StatusCode::OK {
            return Err(EnrolmentError::Refused(code, String::from_utf8_lossy(&answer).into_owned()));
        }
        let file = self.files.cert.clone();
        blocking(move || {
            write(&file, &answer).map_err(|error| EnrolmentError::File("--tls-cert", file, error.to_string()))
        })
        .await
    }
}

/// Reads the token, the authorities and the key. Creates the key if its file does not exist.
fn prepare(files: &Files, token: &Path) -> Result<Prepared, EnrolmentError> {
    let roots = files.read_authorities(SystemTime::now())?;
    let text = fs::read_to_string(token).map_err(|error| EnrolmentError::Token(token.to_owned(), error))?;
    let key_error = |problem: String| EnrolmentError::File("--tls-key", files.key.clone(), problem);
    let crypto = |error: &dyn std::error::Error| EnrolmentError::Crypto(error.to_string());
    let key = match fs::read_to_string(&files.key) {
        Ok(pem) => KeyPair::from_pem(&pem).map_err(|error| key_error(error.to_string()))?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let key = KeyPair::generate().map_err(|error| crypto(&error))?;
            write(&files.key, key.serialize_pem().as_bytes()).map_err(|error| key_error(error.to_string()))?;
            key
        }
        Err(error) => return Err(key_error(error.to_string())),
    };
    // The control plane uses only the public key. It takes the name from the token.
    let request = CertificateParams::default().serialize_request(&key).map_err(|error| crypto(&error))?;
    let provider = Arc::new(ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let builder = builder.map_err(|error| crypto(&error))?;
    let verifier = replica_verifier(roots, Denied::default());
    let config = builder.dangerous().with_custom_certificate_verifier(verifier).with_no_client_auth();
    Ok(Prepared { token: text.trim().to_owned(), request: request.der().to_vec(), config })
}

/// Replaces a file in one step. Only its owner can read the new file.
fn write(file: &Path, content: &[u8]) -> io::Result<()> {
    let mut name = file.as_os_str().to_owned();
    name.push(".new");
    let new = PathBuf::from(name);
    match fs::remove_file(&new) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut open = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new)?;
    open.write_all(content)?;
    drop(open);
    fs::rename(&new, file)
}
