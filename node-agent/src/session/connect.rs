//! Connections to control planes.

use std::{
    net::SocketAddr,
    sync::{Arc, OnceLock},
    time::{Duration, SystemTime},
};

use futures::future::BoxFuture;
use headgate_core::errors::chain;
use headgate_listener::{Carrier, connector};
use headgate_tls::{FileError, Refusal};
use hyper_util::{client::legacy::connect::HttpConnector, rt::TokioIo};
use rustls::ClientConfig;
use tokio::time::timeout;
use tonic::{
    Code, Status,
    transport::{Channel, Endpoint, Uri},
};
use tower::{BoxError, ServiceExt as _};

use super::tls::{AgentTls, Explained};
use crate::control_planes::ControlPlane;

/// Maximum time for the TCP connection. TCP and TLS together may take twice as long.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// A peer that vanished without closing the connection is detected after the sum of
/// [`KEEPALIVE_INTERVAL`] and [`KEEPALIVE_TIMEOUT`].
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(20);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(10);

impl ControlPlane {
    /// Call this function after a stream failed to open. Returns the mistake in the URL, or `None`
    /// if the failure has another reason. May connect to the server to find the mistake.
    pub(super) async fn mistake(&self, status: &Status) -> Option<ConnectError> {
        if status.message().starts_with("grpc-status header missing") {
            return Some(ConnectError::NoControlPlane);
        }
        // When the server answers with a TLS alert, the HTTP/2 client reports one of these codes.
        let is_broken = matches!(status.code(), Code::Internal | Code::Unknown | Code::Unavailable | Code::Cancelled);
        if self.uses_tls() || !is_broken {
            return None;
        }
        let (host, port) = self.host_and_port();
        let host = host.to_owned();
        let asked = tokio::task::spawn_blocking(move || headgate_tls::speaks_tls((host.as_str(), port))).await;
        asked.is_ok_and(|speaks_tls| speaks_tls).then_some(ConnectError::SpeaksTls)
    }

    /// The URL for the TCP connection to one address.
    fn at(&self, address: Option<SocketAddr>) -> Uri {
        let uri = address.and_then(|address| format!("http://{address}").parse().ok());
        uri.unwrap_or_else(|| self.uri().clone())
    }

    /// Connects to `address`, or to any address of the name if `address` is `None`. Reads the TLS
    /// files at each call, so that renewed certificates are used without a restart. Without TLS,
    /// `carrier` takes the place of TCP. Errors: no server answers, one side does not accept the
    /// other side's certificate, or the TLS files cannot be used. The caller should retry.
    pub async fn connect(
        &self,
        address: Option<SocketAddr>,
        tls: Option<&Arc<AgentTls>>,
        carrier: Option<&Arc<dyn Carrier>>,
    ) -> Result<Connected, ConnectError> {
        let endpoint = |uri: Endpoint| {
            uri.http2_keep_alive_interval(KEEPALIVE_INTERVAL)
                .keep_alive_timeout(KEEPALIVE_TIMEOUT)
                .keep_alive_while_idle(true)
        };
        let refused = Arc::new(OnceLock::new());
        let mut not_after = None;
        let connected = if self.uses_tls() {
            let tls = tls.ok_or(ConnectError::NoTlsFiles)?;
            let loaded = tls.load().await?;
            not_after = Some(loaded.validity.not_after);
            let connect =
                self.tls_connector(address, Arc::clone(tls), Arc::clone(&loaded.config), Arc::clone(&refused));
            // An https URL would enable tonic's own TLS. Requests get their scheme from the origin.
            let endpoint = endpoint(Uri::from_static("http://control-plane").into()).origin(self.uri().clone());
            timeout(2 * CONNECT_TIMEOUT, endpoint.connect_with_connector(tower::service_fn(connect))).await
        } else if let Some(socket) = self.socket() {
            let socket = Endpoint::from_shared(socket.to_owned()).map_err(ConnectError::Connect)?;
            timeout(CONNECT_TIMEOUT, endpoint(socket).connect()).await
        } else if let (Some(carrier), Some(to)) = (carrier, address) {
            let connector = connector(Arc::clone(carrier), to);
            timeout(CONNECT_TIMEOUT, endpoint(self.at(address).into()).connect_with_connector(connector)).await
        } else {
            timeout(2 * CONNECT_TIMEOUT, endpoint(self.at(address).into()).connect_with_connector(tcp())).await
        };
        match connected {
            Ok(Ok(channel)) => Ok(Connected { channel, not_after, refused }),
            Ok(Err(error)) => Err(refused.get().cloned().map_or(ConnectError::Connect(error), ConnectError::Refused)),
            Err(_) => Err(ConnectError::TimedOut),
        }
    }

    /// Returns a connector that opens a TCP connection and makes a TLS handshake.
    fn tls_connector(
        &self,
        address: Option<SocketAddr>,
        tls: Arc<AgentTls>,
        config: Arc<ClientConfig>,
        refused: Arc<OnceLock<Refusal>>,
    ) -> impl FnMut(Uri) -> BoxFuture<'static, Result<TokioIo<Explained>, BoxError>> + use<> {
        let (target, host) = (self.at(address), self.uri().host().unwrap_or_default().to_owned());
        move |_| {
            let (tls, config, refused) = (Arc::clone(&tls), Arc::clone(&config), Arc::clone(&refused));
            let (target, host) = (target.clone(), host.clone());
            Box::pin(async move {
                let stream = tcp().oneshot(target).await?.into_inner();
                Ok(TokioIo::new(tls.handshake(config, stream, &host, refused).await?))
            })
        }
    }
}

/// Returns a connector for TCP. If a name has addresses of both families, the connector tries both
/// families at the same time (RFC 8305).
fn tcp() -> HttpConnector {
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    tcp.set_nodelay(true);
    tcp.set_connect_timeout(Some(CONNECT_TIMEOUT));
    tcp.set_keepalive(Some(KEEPALIVE_INTERVAL));
    tcp
}

/// A connection to a control plane.
#[derive(Debug)]
pub struct Connected {
    /// The channel for requests.
    pub channel: Channel,
    /// When the agent's certificate on this connection expires; `None` without TLS.
    pub not_after: Option<SystemTime>,
    refused: Arc<OnceLock<Refusal>>,
}

impl Connected {
    /// Why TLS ended the connection. `None` if TLS did not end the connection.
    pub fn refusal(&self) -> Option<Refusal> {
        self.refused.get().cloned()
    }
}

/// Why a connection could not be made.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The TLS files cannot be used.
    #[error(transparent)]
    Files(#[from] FileError),
    /// One side does not accept the other side's certificate.
    #[error("{}", .0.sentence)]
    Refused(Refusal),
    /// An https URL without TLS files. The options' check normally reports it earlier.
    #[error("no TLS files for an https URL; pass --tls-cert, --tls-key and --tls-ca")]
    NoTlsFiles,
    /// The TCP connection or the TLS handshake failed.
    #[error("cannot connect: {}", chain(.0))]
    Connect(tonic::transport::Error),
    /// The URL begins with http://, but the server uses TLS. The URL has to be corrected.
    #[error(
        "the control plane speaks TLS, and its URL begins with http://; write https:// in --control-plane, and pass --tls-cert, --tls-key and --tls-ca"
    )]
    SpeaksTls,
    /// The server at this port is not a control plane. The URL has to be corrected.
    #[error(
        "the server speaks HTTP, but no control plane answers; check the port in --control-plane: it must be the port of the control plane's --listen"
    )]
    NoControlPlane,
    /// The TCP connection or the TLS handshake took too long.
    #[error("cannot connect: no answer in {} s", 2 * CONNECT_TIMEOUT.as_secs())]
    TimedOut,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repeated_cause_is_named_once() {
        let file =
            FileError { option: "--tls-key", file: "/k".into(), problem: "bad".into(), remedy: "mend it".into() };
        let error = std::io::Error::other(ConnectError::Files(file));
        assert_eq!(chain(&error), "--tls-key /k: bad; mend it");
    }
}
