//! Gives certificates to the agents of nodes, in exchange for service-account tokens. While the API
//! server is unreachable, a valid certificate of the node counts instead of a review of its token.
//!
//! The listener has its own port and its own places, because its clients need no certificate. A
//! connection keeps its place until its answer is written. A client sends one request for each
//! connection: `POST /v1/enrol` with a bearer token, and a certificate signing request (PKCS#10,
//! DER) as the body. The answer is a certificate in PEM, or a sentence that names the fault and the
//! remedy.

mod authority;
mod tokens;

use std::{
    convert::Infallible,
    io,
    net::{IpAddr, SocketAddr},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, SystemTime},
};

use axum::body::{Body, to_bytes};
use headgate_tls::{Denied, Validity, date};
use http::{Method, Request, Response, StatusCode, header};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    time::{Instant, timeout},
};
use tokio_rustls::{TlsAcceptor, rustls::pki_types::CertificateDer};

use self::{
    authority::{Authority, IssueError},
    tokens::{Holder, TokenError, Tokens},
};
use super::{
    context::{Context, EnrolmentSettings, Warning},
    tls::ServerTls,
    transport::{Handshake, Handshakes, Silent, accept},
};
use crate::{
    identity::{self, Identity},
    source::{self, SourceError},
};

/// The longest time for a connection: handshake, request and answer.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(20);

/// How many requests of nodes, and of strangers, ask the API server at the same time. The other
/// requests wait.
const REVIEWS: usize = 8;

/// The maximum size of a token. Tokens of API servers have about 1.5 kB.
const MAX_TOKEN_BYTES: usize = 16 << 10;

/// The maximum size of a certificate signing request. Requests for P-256 keys have about 250 bytes.
const MAX_REQUEST_BYTES: usize = 8 << 10;

/// The tolerated difference between the clocks of two machines.
const CLOCK_TOLERANCE: Duration = Duration::from_secs(3600);

/// How much longer a node may have certificates without a review than the certificate of its last
/// review is valid.
const MAX_UNREVIEWED: Duration = Duration::from_secs(86_400);

/// Why enrolment cannot start. A retry helps only after the cause is corrected.
#[derive(Debug, thiserror::Error)]
pub enum EnrolmentError {
    /// A file cannot be read.
    #[error("{option} {file}: cannot read the file: {error}")]
    File {
        /// The option.
        option: &'static str,
        /// The path.
        file: String,
        /// The error of the operating system.
        error: io::Error,
    },
    /// The authority cannot sign.
    #[error(transparent)]
    Authority(#[from] IssueError),
    /// No API server can be asked about tokens.
    #[error("--enrolment-listen needs an API server that reviews tokens: {0}")]
    ApiServer(#[from] SourceError),
}

/// The server of the enrolment listener.
pub(crate) struct Enrolment {
    context: Arc<Context>,
    settings: EnrolmentSettings,
    tls: Arc<ServerTls>,
    tokens: Tokens,
    /// The permits of strangers, and of clients with the address of a Node.
    reviews: [Semaphore; 2],
    handshakes: Arc<Handshakes>,
}

/// Who asks.
struct EnrolmentClient<'a> {
    address: IpAddr,
    /// The client's certificate, which an authority of its role has issued.
    certificate: Option<CertificateDer<'static>>,
    /// False while the client waits for this side.
    is_clients_turn: &'a AtomicBool,
    /// False once this side has given a certificate, or is responsible for the refusal.
    has_failed: AtomicBool,
}

/// Why a client gets no certificate.
#[derive(Debug, thiserror::Error)]
enum Refusal {
    #[error("no such page; agents send POST /v1/enrol")]
    NotFound,
    #[error("the header Authorization contains no bearer token of at most {MAX_TOKEN_BYTES} bytes")]
    NoToken,
    #[error("the certificate signing request is larger than {MAX_REQUEST_BYTES} bytes, or incomplete")]
    Body,
    #[error("{0}")]
    Token(#[from] TokenError),
    #[error(
        "the API server is unreachable, and the client certificate cannot be renewed without it, because the last review was before {}; try again later",
        date(*.0)
    )]
    TooOld(SystemTime),
    #[error("the control plane does not know the Node {0}; try again later")]
    UnknownNode(String),
    #[error(
        "the certificate or its holder, the node {0}, is denied (--tls-denied); ask the operator of the control plane, and delete the pod of the agent for a new key"
    )]
    Denied(String),
    #[error(
        "the token belongs to the node {0}, and {1} is not an address of this Node; if addresses are translated on the way, start the control plane with --enrolment-any-address"
    )]
    Address(String, IpAddr),
    #[error("{0}")]
    Request(IssueError),
    #[error("the control plane cannot sign: {0}")]
    Authority(#[from] EnrolmentError),
}

impl Refusal {
    /// The status code of the answer, and the label `result` of the metric.
    fn kind(&self) -> (StatusCode, &'static str) {
        match self {
            Self::NotFound => (StatusCode::NOT_FOUND, "malformed"),
            Self::NoToken => (StatusCode::UNAUTHORIZED, "malformed"),
            Self::Body => (StatusCode::BAD_REQUEST, "malformed"),
            Self::Request(IssueError::Request(_)) => (StatusCode::BAD_REQUEST, "malformed"),
            // Agents show their certificate after "service unavailable", and try again after this.
            Self::Token(error @ TokenError::Busy(_)) => (StatusCode::TOO_MANY_REQUESTS, error.result()),
            Self::Token(error @ (TokenError::Unreachable(_) | TokenError::Denied(_))) => {
                (StatusCode::SERVICE_UNAVAILABLE, error.result())
            }
            Self::Token(error) => (StatusCode::FORBIDDEN, error.result()),
            Self::TooOld(_) => (StatusCode::SERVICE_UNAVAILABLE, "api_server"),
            Self::UnknownNode(_) => (StatusCode::SERVICE_UNAVAILABLE, "unknown_node"),
            Self::Address(..) => (StatusCode::FORBIDDEN, "address"),
            Self::Denied(_) => (StatusCode::FORBIDDEN, "denied"),
            Self::Request(_) | Self::Authority(_) => (StatusCode::INTERNAL_SERVER_ERROR, "authority"),
        }
    }
}

impl Enrolment {
    /// Checks the authority and the configuration of the API server.
    ///
    /// # Errors
    ///
    /// [`EnrolmentError`].
    pub(crate) async fn new(
        context: Arc<Context>,
        settings: EnrolmentSettings,
        tls: Arc<ServerTls>,
    ) -> Result<Arc<Self>, EnrolmentError> {
        let client = source::kubernetes_client(settings.kubeconfig.as_deref()).await?;
        let (audience, service_account) = (settings.audience.clone(), settings.service_account.clone());
        let tokens = Tokens::new(client, audience, service_account);
        let reviews = [(); 2].map(|()| Semaphore::new(REVIEWS));
        let handshakes = Handshakes::new(Arc::clone(&context), 4, ["enrolling", "waiting_to_enrol"]);
        let enrolment = Self { context, settings, tls, tokens, reviews, handshakes };
        enrolment.authority().await?;
        Ok(Arc::new(enrolment))
    }

    /// Reads the files of the authority. They are read for each certificate, so that a rotation
    /// needs no restart.
    async fn authority(&self) -> Result<Authority, EnrolmentError> {
        let read = async |option, file: &Path| {
            let file_error = |error| EnrolmentError::File { option, file: file.display().to_string(), error };
            tokio::fs::read_to_string(file).await.map_err(file_error)
        };
        let files = self.tls.files();
        let certificates = read("--tls-node-ca", &files.node_ca).await?;
        let key = read("--enrolment-ca-key", &self.settings.ca_key).await?;
        let others = read("--tls-client-ca", &files.ca).await?;
        Ok(Authority::parse(&certificates, &key, &others, SystemTime::now())?)
    }

    /// Serves connections. Never returns.
    pub(crate) async fn run(self: Arc<Self>, listener: TcpListener) {
        loop {
            let failed = |error: io::Error| self.warn(None, "accept", &error.to_string());
            let (stream, address) = accept(&listener, failed).await;
            match self.handshakes.enter(self.context.network(address.ip())) {
                Some(handshake) => drop(tokio::spawn(Arc::clone(&self).serve_in_turn(handshake, stream, address))),
                None => self.warn(Some(address), "busy", "too many clients of this network wait; agents try again"),
            }
        }
    }

    /// Serves a connection until its answer is written. A client that fails costs its network a
    /// pause.
    async fn serve_in_turn(self: Arc<Self>, handshake: Handshake, stream: TcpStream, address: SocketAddr) {
        let is_clients_turn = AtomicBool::new(true);
        let serve = async |stream| {
            let served = timeout(CONNECTION_TIMEOUT, self.serve(stream, address, &is_clients_turn)).await;
            served.unwrap_or_else(|_| {
                self.warn(Some(address), "timeout", "the connection took too long");
                Err(())
            })
        };
        let served = match handshake.until_heard(stream.peek(&mut [0])).await {
            Ok(()) => handshake.run(|| is_clients_turn.load(Ordering::Relaxed), || serve(stream)).await.map(drop),
            Err(Silent) => Err(Silent),
        };
        if served.is_err() {
            self.warn(Some(address), "silent", "the client sent nothing for too long");
        }
    }

    /// # Errors
    ///
    /// The client has failed.
    async fn serve(&self, stream: TcpStream, address: SocketAddr, is_clients_turn: &AtomicBool) -> Result<(), ()> {
        let accepted = TlsAcceptor::from(self.tls.enrolment_config()).accept(stream).await;
        let stream = accepted.map_err(|error| self.warn(Some(address), "tls", &error.to_string()))?;
        let certificate = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
        let client = EnrolmentClient {
            address: address.ip().to_canonical(),
            certificate: certificate.map(|certificate| certificate.clone().into_owned()),
            is_clients_turn,
            has_failed: AtomicBool::new(true),
        };
        let answer = service_fn(|request| async { Ok::<_, Infallible>(self.answer(request, &client).await) });
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .keep_alive(false)
            .serve_connection(TokioIo::new(stream), answer)
            .await;
        if let Err(error) = connection {
            tracing::debug!(%address, %error, "a connection for enrolment ended with an error");
        }
        if client.has_failed.into_inner() { Err(()) } else { Ok(()) }
    }

    async fn answer(&self, request: Request<Incoming>, client: &EnrolmentClient<'_>) -> Response<Body> {
        let (code, text) = match self.enrol(request, client).await {
            Ok(certificate) => (StatusCode::OK, certificate),
            Err(refusal) => {
                let (code, result) = refusal.kind();
                self.warn(Some(SocketAddr::new(client.address, 0)), result, &refusal.to_string());
                (code, refusal.to_string())
            }
        };
        let is_served = code.is_success() || code.is_server_error() || code == StatusCode::TOO_MANY_REQUESTS;
        client.has_failed.store(!is_served, Ordering::Relaxed);
        client.is_clients_turn.store(true, Ordering::Relaxed);
        let mut response = Response::new(Body::from(text));
        *response.status_mut() = code;
        response
    }

    async fn enrol(&self, request: Request<Incoming>, client: &EnrolmentClient<'_>) -> Result<String, Refusal> {
        if request.method() != Method::POST || request.uri().path() != "/v1/enrol" {
            return Err(Refusal::NotFound);
        }
        let header = request.headers().get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
        let token = header.and_then(|value| value.strip_prefix("Bearer "));
        let token = token.filter(|token| token.len() <= MAX_TOKEN_BYTES).ok_or(Refusal::NoToken)?.to_owned();
        let body = to_bytes(Body::new(request.into_body()), MAX_REQUEST_BYTES).await.map_err(|_| Refusal::Body)?;
        client.is_clients_turn.store(false, Ordering::Relaxed);
        let reviewed = {
            let is_node = self.context.network(client.address).is_node();
            // The semaphore is never closed, so the permit is always there.
            let _permit = self.reviews[usize::from(is_node)].acquire().await;
            self.tokens.holder(&token).await
        };
        let (now, lifetime) = (SystemTime::now(), self.settings.certificate_lifetime);
        let (Holder { node, pod }, validity, result) = match (reviewed, &client.certificate) {
            (Ok(holder), _) => {
                let validity = Validity { not_before: now - CLOCK_TOLERANCE, not_after: now + lifetime };
                (holder, validity, "success")
            }
            (Err(error @ TokenError::Unreachable(_)), Some(held)) => {
                let (holder, held) = self.for_certificate(held, error)?;
                (holder, renewed(held, lifetime, now)?, "success_by_certificate")
            }
            (Err(error), _) => return Err(error.into()),
        };
        let address = client.address;
        if !self.settings.any_address {
            let known = self.context.store.node(&node).node.ok_or_else(|| Refusal::UnknownNode(node.clone()))?;
            if !known.addresses.contains(&address) {
                return Err(Refusal::Address(node, address));
            }
        }
        // Only clients that get a certificate cause this work.
        let authority = self.authority().await?;
        let (certificate, not_after) = authority.issue(&node, &body, validity).map_err(Refusal::Request)?;
        let holder = Identity::Node(node.as_str().into());
        if self.tls.denies(&Denied::entries_of(certificate.der(), holder.uri())) {
            return Err(Refusal::Denied(node));
        }
        self.context.metrics.enrolments.of([result]).inc();
        tracing::info!(node, pod, %address, not_after = date(not_after), result, "a node has enrolled");
        Ok(certificate.pem())
    }

    /// Returns the holder of the certificate of a node, and its validity. It counts instead of a
    /// review, which failed with `error`. The handshake has verified that an authority of nodes has
    /// issued the certificate, and that it is not denied.
    ///
    /// # Errors
    ///
    /// `error` if the certificate is not one of a node. Another refusal if the Node does not exist.
    fn for_certificate(&self, held: &CertificateDer<'_>, error: TokenError) -> Result<(Holder, Validity), Refusal> {
        let Ok((Identity::Node(node), held)) = identity::from_certificate(held) else {
            return Err(error.into());
        };
        if self.context.store.node(&node).node.is_none() {
            return Err(Refusal::UnknownNode(node.to_string()));
        }
        Ok((Holder { node: node.to_string(), pod: None }, held))
    }

    /// Counts and logs an attempt without a certificate.
    fn warn(&self, address: Option<SocketAddr>, result: &'static str, why: &str) {
        self.context.metrics.enrolments.of([result]).inc();
        let network = address.map(|address| self.context.network(address.ip()));
        if self.context.warnings.admit_from(network, Warning::Enrolment, Instant::now()) {
            let address = address.map(|address| tracing::field::display(address.ip()));
            tracing::warn!(address, result, "no certificate was given: {why}");
        }
    }
}

/// Returns the validity of a certificate that replaces `held` without a review. `notBefore` stays
/// the same, so it states the time of the last review however often the certificate was renewed.
fn renewed(held: Validity, lifetime: Duration, now: SystemTime) -> Result<Validity, Refusal> {
    let longest = lifetime + MAX_UNREVIEWED;
    let not_after = (now + lifetime).min(held.not_before + longest);
    if not_after <= now { Err(Refusal::TooOld(now - longest)) } else { Ok(Validity { not_after, ..held }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_review_a_node_has_certificates_for_one_more_day() {
        const HOUR: Duration = Duration::from_secs(3600);
        let (begin, lifetime) = (SystemTime::UNIX_EPOCH, HOUR * 24);
        let mut held = Validity { not_before: begin, not_after: begin + lifetime };
        for hour in 0..48 {
            let renewed = renewed(held, lifetime, begin + HOUR * hour);
            held = renewed.unwrap_or_else(|refusal| panic!("hour {hour}: {refusal}"));
            assert_eq!(held.not_before, begin);
            assert_eq!(held.not_after, begin + HOUR * 48.min(hour + 24));
        }
        let refusal = renewed(held, lifetime, begin + HOUR * 48).map(drop);
        assert!(matches!(refusal, Err(Refusal::TooOld(_))), "{refusal:?}");
    }
}
