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
    sync::mpsc,
    task::JoinHandle,
    time::{Instant, MissedTickBehavior, interval, sleep, timeout},
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use tokio_util::sync::CancellationToken;
use tonic::transport::server::Connected;

use super::{Security, Shared, handshakes::Displaced, tls::ServerTls, warnings::Warning};
use crate::{
    identity::{self, Identity, Peer},
    metrics::Metrics,
};

/// Longest time a handshake may take.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// Wait after an accept that failed, as for want of file descriptors, which would fail again at once.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// How often it is looked at whether somebody holds up those who wait.
const ROOM_INTERVAL: Duration = Duration::from_millis(100);

/// Connections that are ready for HTTP/2.
type Ready = mpsc::Sender<io::Result<Connection>>;

/// Accepts connections until `shutdown` is cancelled, and hands them over once they are ready for HTTP/2.
pub(super) fn accept(
    listener: TcpListener,
    security: Security,
    shared: Arc<Shared>,
    shutdown: CancellationToken,
) -> (mpsc::Receiver<io::Result<Connection>>, JoinHandle<()>) {
    let (sender, receiver) = mpsc::channel(16);
    let accept = async move {
        tokio::select! {
            () = accept_all(listener, security, shared, sender) => {}
            () = shutdown.cancelled() => {}
        }
    };
    (receiver, tokio::spawn(accept))
}

async fn accept_all(listener: TcpListener, security: Security, shared: Arc<Shared>, ready: Ready) {
    let handshakes = &shared.handshakes;
    let mut room = interval(ROOM_INTERVAL);
    room.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = room.tick(), if handshakes.is_crowded() => {
                handshakes.make_room(Instant::now());
                continue;
            }
        };
        let (stream, address) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                if shared.warnings.admit(Warning::ConnectionRefused, Instant::now()) {
                    tracing::warn!(%error, "a connection cannot be accepted");
                }
                sleep(ACCEPT_RETRY).await;
                continue;
            }
        };
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%address, %error, "TCP_NODELAY");
        }
        match &security {
            Security::Plaintext => {
                let peer = Peer { address, identity: Identity::Unchecked, not_after: None };
                // The server is gone when nobody receives: the connection closes.
                let _ = ready.send(Ok(Connection { io: Io::Plain(stream), peer })).await;
            }
            Security::Tls(tls) => secure_in_turn(stream, address, tls, &shared, &ready),
        }
    }
}

/// Has a handshake done as soon as it is the address's turn.
fn secure_in_turn(stream: TcpStream, address: SocketAddr, tls: &Arc<ServerTls>, shared: &Arc<Shared>, ready: &Ready) {
    let Some(place) = shared.handshakes.enter(address.ip(), Instant::now()) else {
        return refused(address, shared);
    };
    let (tls, shared, ready) = (Arc::clone(tls), Arc::clone(shared), ready.clone());
    tokio::spawn(async move {
        let secured = place.run(|| secure(stream, address, &tls, &shared.metrics)).await;
        let (reason, error) = match secured {
            // As above.
            Ok(Ok(connection)) => return drop(ready.send(Ok(connection)).await),
            Ok(Err(failure)) => failure,
            Err(Displaced::Waiting) => return refused(address, &shared),
            Err(Displaced::Silent) => ("silent", "silent while others waited for its place".to_owned()),
        };
        shared.metrics.count_handshake_failed(reason);
        if shared.warnings.admit(Warning::Handshake, Instant::now()) {
            tracing::warn!(%address, reason, error, "TLS handshake");
        }
    });
}

/// More connections wait for their handshakes than may.
fn refused(address: SocketAddr, shared: &Shared) {
    let reason = "too_many_handshakes";
    shared.metrics.count_connection_refused(reason);
    if shared.warnings.admit(Warning::ConnectionRefused, Instant::now()) {
        tracing::warn!(%address, reason, "connection refused");
    }
}

async fn secure(
    stream: TcpStream,
    address: SocketAddr,
    tls: &ServerTls,
    metrics: &Metrics,
) -> Result<Connection, (&'static str, String)> {
    let handshake = timeout(HANDSHAKE_TIMEOUT, TlsAcceptor::from(tls.config()).accept(stream)).await;
    let stream = handshake
        .map_err(|_| ("timeout", format!("not done within {} s", HANDSHAKE_TIMEOUT.as_secs())))?
        .map_err(|error| refusal(&error, tls))?;
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
