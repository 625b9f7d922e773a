//! Addresses of control planes, and connections to them.

use std::{
    net::SocketAddr,
    sync::{Arc, OnceLock},
    time::{Duration, SystemTime},
};

use futures::future::BoxFuture;
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

/// Time to connect, TLS included.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// A peer that is gone without a word is found after both together.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(20);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(10);

impl ControlPlane {
    /// What was wrong with the URL when a stream did not come about; `None` when it was something
    /// else. Asks the other end, where that may tell.
    pub(super) async fn mistake(&self, status: &Status) -> Option<ConnectError> {
        if status.message().starts_with("grpc-status header missing") {
            return Some(ConnectError::NoControlPlane);
        }
        // What HTTP/2 makes of a TLS alert is one of these, by chance.
        let is_broken = matches!(status.code(), Code::Internal | Code::Unknown | Code::Unavailable | Code::Cancelled);
        if self.uses_tls() || !is_broken {
            return None;
        }
        let (host, port) = self.host_and_port();
        let host = host.to_owned();
        let asked = tokio::task::spawn_blocking(move || headgate_tls::speaks_tls((host.as_str(), port))).await;
        asked.is_ok_and(|speaks_tls| speaks_tls).then_some(ConnectError::SpeaksTls)
    }

    /// The URL of one of its addresses, for TCP alone: TLS goes on asking for the name.
    fn at(&self, address: Option<SocketAddr>) -> Uri {
        let uri = address.and_then(|address| format!("http://{address}").parse().ok());
        uri.unwrap_or_else(|| self.uri().clone())
    }

    /// Connects, to this address of it if one is given. TLS files are read at each call, so that
    /// renewed certificates are used without a restart.
    ///
    /// # Errors
    /// Nobody answers, the peer is not who it should be, or the TLS files cannot be used. Trying
    /// again later may help.
    pub async fn connect(
        &self,
        address: Option<SocketAddr>,
        tls: Option<&Arc<AgentTls>>,
    ) -> Result<Connection, ConnectError> {
        let endpoint = |uri| {
            Endpoint::from(uri)
                .http2_keep_alive_interval(KEEPALIVE_INTERVAL)
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
            // tonic takes the scheme for its own TLS; that of the requests is the origin's.
            let endpoint = endpoint(Uri::from_static("http://control-plane")).origin(self.uri().clone());
            timeout(2 * CONNECT_TIMEOUT, endpoint.connect_with_connector(tower::service_fn(connect))).await
        } else {
            timeout(2 * CONNECT_TIMEOUT, endpoint(self.at(address)).connect_with_connector(tcp())).await
        };
        match connected {
            Ok(Ok(channel)) => Ok(Connection { channel, not_after, refused }),
            Ok(Err(error)) => Err(refused.get().cloned().map_or(ConnectError::Connect(error), ConnectError::Refused)),
            Err(_) => Err(ConnectError::TimedOut),
        }
    }

    /// Makes a TCP connection and a TLS handshake on it.
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

/// Makes TCP connections, to several addresses of a name at a time where it has both families (RFC
/// 8305).
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
pub struct Connection {
    /// For requests.
    pub channel: Channel,
    /// When the certificate expires that it was made with; `None` without TLS.
    pub not_after: Option<SystemTime>,
    refused: Arc<OnceLock<Refusal>>,
}

impl Connection {
    /// Why TLS broke it off, if that is what happened.
    #[must_use]
    pub fn refusal(&self) -> Option<Refusal> {
        self.refused.get().cloned()
    }
}

/// A connection that did not come about.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The TLS files cannot be used.
    #[error(transparent)]
    Files(#[from] FileError),
    /// One of the two ends does not believe the other.
    #[error("{}", .0.sentence)]
    Refused(Refusal),
    /// An https URL without files; the options refuse it earlier.
    #[error("no TLS files for an https URL; pass --tls-cert, --tls-key and --tls-ca")]
    NoTlsFiles,
    /// TCP or the TLS handshake.
    #[error("cannot connect: {}", chain(.0))]
    Connect(tonic::transport::Error),
    /// An http URL of somebody with TLS. Only another URL helps.
    #[error(
        "the control plane speaks TLS, and its URL begins with http://; write https:// in --control-plane, and pass --tls-cert, --tls-key and --tls-ca"
    )]
    SpeaksTls,
    /// A port at which something else answers. Only another URL helps.
    #[error(
        "HTTP is spoken there, and no control plane answers; check the port in --control-plane: it is that of the control plane's --listen"
    )]
    NoControlPlane,
    /// TCP or the TLS handshake takes too long.
    #[error("cannot connect: no answer in {} s", 2 * CONNECT_TIMEOUT.as_secs())]
    TimedOut,
}

/// An error with what caused it, since tonic's errors name their cause nowhere else. What a cause
/// repeats is said once.
pub(crate) fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source()).map(ToString::to_string);
    causes.fold(error.to_string(), |text, cause| if text.contains(&cause) { text } else { format!("{text}: {cause}") })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::path::PathBuf;

    use headgate_tls::{Files, Side};

    use super::*;
    use crate::session::metrics::TlsMetrics;

    #[test]
    fn causes_are_named_once() {
        let file =
            FileError { option: "--tls-key", file: "/k".into(), problem: "bad".into(), remedy: "mend it".into() };
        let error = std::io::Error::other(ConnectError::Files(file));
        assert_eq!(chain(&error), "--tls-key /k: bad; mend it");
    }

    #[tokio::test]
    async fn a_missing_tls_file_is_named() {
        let [cert, key, ca] = ["/nowhere/c", "/nowhere/k", "/nowhere/a"].map(PathBuf::from);
        let tls = AgentTls::new(Files { side: Side::Client, cert, key, ca }, TlsMetrics::default());
        let target = ControlPlane::parse("https://127.0.0.1:1", false).unwrap();
        let error = target.connect(None, Some(&tls)).await.unwrap_err().to_string();
        assert!(error.starts_with("--tls-cert /nowhere/c: cannot read it: No such file"), "{error}");
    }
}
