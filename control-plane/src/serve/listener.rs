//! Accepting connections, and TLS handshakes within bounds.

use std::{
    io,
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use rustls::HandshakeKind;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::{Semaphore, mpsc},
    task::JoinHandle,
    time::{sleep, timeout},
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use tokio_util::sync::CancellationToken;
use tonic::transport::server::Connected;

use super::{Security, tls::ServerTls};
use crate::{
    identity::{self, Identity, Peer},
    metrics::Metrics,
};

/// Handshakes at the same time; more wait in the kernel's backlog.
const MAX_HANDSHAKES: usize = 256;

/// Longest time a handshake may take.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// Wait after an accept that failed, as for want of file descriptors, which would fail again at once.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// Accepts connections until `shutdown` is cancelled, and hands them over once they are ready for HTTP/2.
pub(super) fn accept(
    listener: TcpListener,
    security: Security,
    metrics: Arc<Metrics>,
    shutdown: CancellationToken,
) -> (mpsc::Receiver<io::Result<Connection>>, JoinHandle<()>) {
    let (sender, receiver) = mpsc::channel(16);
    let accept = async move {
        tokio::select! {
            () = accept_all(listener, security, metrics, sender) => {}
            () = shutdown.cancelled() => {}
        }
    };
    (receiver, tokio::spawn(accept))
}

async fn accept_all(
    listener: TcpListener,
    security: Security,
    metrics: Arc<Metrics>,
    sender: mpsc::Sender<io::Result<Connection>>,
) {
    let handshakes = Arc::new(Semaphore::new(MAX_HANDSHAKES));
    loop {
        let Ok(permit) = Arc::clone(&handshakes).acquire_owned().await else { return };
        let (stream, address) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "a connection cannot be accepted");
                sleep(ACCEPT_RETRY).await;
                continue;
            }
        };
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%address, %error, "TCP_NODELAY");
        }
        let (security, metrics, sender) = (security.clone(), Arc::clone(&metrics), sender.clone());
        tokio::spawn(async move {
            match secure(stream, address, security, &metrics).await {
                // The server is gone when nobody receives: the connection closes.
                Ok(connection) => drop(sender.send(Ok(connection)).await),
                Err((reason, error)) => {
                    metrics.count_handshake_failed(reason);
                    tracing::warn!(%address, reason, error, "TLS handshake");
                }
            }
            drop(permit);
        });
    }
}

async fn secure(
    stream: TcpStream,
    address: SocketAddr,
    security: Security,
    metrics: &Metrics,
) -> Result<Connection, (&'static str, String)> {
    let Security::Tls(tls) = security else {
        let peer = Peer { address, identity: Identity::Unchecked, not_after: None };
        return Ok(Connection { io: Io::Plain(stream), peer });
    };
    let handshake = timeout(HANDSHAKE_TIMEOUT, TlsAcceptor::from(tls.config()).accept(stream)).await;
    let stream = handshake
        .map_err(|_| ("timeout", format!("not done within {} s", HANDSHAKE_TIMEOUT.as_secs())))?
        .map_err(|error| refusal(&error, &tls))?;
    let session = stream.get_ref().1;
    // Of a resumed session too: the ticket holds what was verified when it was issued.
    let certificate = session.peer_certificates().and_then(<[_]>::first);
    let certificate = certificate.ok_or_else(|| ("no_certificate", "the client showed no certificate".to_owned()))?;
    let (identity, not_after) =
        identity::from_certificate(certificate).map_err(|error| ("malformed_certificate", error))?;
    metrics.count_handshake(session.handshake_kind() == Some(HandshakeKind::Resumed));
    let peer = Peer { address, identity, not_after: Some(not_after) };
    Ok(Connection { io: Io::Tls(Box::new(stream)), peer })
}

/// Label and sentence for a handshake that failed.
fn refusal(error: &io::Error, tls: &ServerTls) -> (&'static str, String) {
    match headgate_tls::explain(error, tls.files()) {
        Some(refusal) => (refusal.reason, refusal.sentence),
        None => ("disconnected", format!("the client went away: {error}")),
    }
}

/// A connection that is ready for HTTP/2.
pub(super) struct Connection {
    io: Io,
    peer: Peer,
}

/// What carries it.
pub(super) enum Io {
    /// No TLS.
    Plain(TcpStream),
    /// After its handshake.
    Tls(Box<TlsStream<TcpStream>>),
}

impl Connection {
    /// Gives up the connection for what carries it.
    pub(super) fn into_io(self) -> Io {
        self.io
    }
}

impl Connected for Connection {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        self.peer.clone()
    }
}

impl AsyncRead for Connection {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().io {
            Io::Plain(io) => Pin::new(io).poll_read(cx, buffer),
            Io::Tls(io) => Pin::new(io).poll_read(cx, buffer),
        }
    }
}

impl AsyncWrite for Connection {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match &mut self.get_mut().io {
            Io::Plain(io) => Pin::new(io).poll_write(cx, bytes),
            Io::Tls(io) => Pin::new(io).poll_write(cx, bytes),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match &mut self.get_mut().io {
            Io::Plain(io) => Pin::new(io).poll_write_vectored(cx, slices),
            Io::Tls(io) => Pin::new(io).poll_write_vectored(cx, slices),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match &self.io {
            Io::Plain(io) => io.is_write_vectored(),
            Io::Tls(io) => io.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().io {
            Io::Plain(io) => Pin::new(io).poll_flush(cx),
            Io::Tls(io) => Pin::new(io).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().io {
            Io::Plain(io) => Pin::new(io).poll_shutdown(cx),
            Io::Tls(io) => Pin::new(io).poll_shutdown(cx),
        }
    }
}
