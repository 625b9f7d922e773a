//! Accepts connections, and runs their TLS handshakes within limits.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use rustls::HandshakeKind;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::mpsc,
    task::JoinHandle,
    time::{Instant, MissedTickBehavior, interval, sleep, timeout},
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use tokio_util::{either::Either, sync::CancellationToken};

use super::{
    ACCEPT_RETRY,
    handshakes::{Evicted, Handshakes},
    tls::{Security, ServerTls},
};
use crate::{
    identity::{self, Identity, Peer},
    metrics::Metrics,
    serve::context::{Context, Warning},
};

/// The longest time that a handshake may take.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// How often silent handshakes are evicted while connections wait.
const EVICTION_INTERVAL: Duration = Duration::from_millis(100);

/// The channel for connections that are ready for HTTP/2.
type Ready = mpsc::Sender<Connection>;

/// Starts a task that accepts connections until `shutdown` is cancelled. Returns the receiver of
/// connections that are ready for HTTP/2, and the task.
pub(crate) fn accept(
    listener: TcpListener,
    security: Security,
    context: Arc<Context>,
    shutdown: CancellationToken,
) -> (mpsc::Receiver<Connection>, JoinHandle<()>) {
    let (sender, receiver) = mpsc::channel(16);
    let accept = async move {
        tokio::select! {
            () = accept_all(listener, security, context, sender) => {}
            () = shutdown.cancelled() => {}
        }
    };
    (receiver, tokio::spawn(accept))
}

async fn accept_all(listener: TcpListener, security: Security, context: Arc<Context>, ready: Ready) {
    let handshakes = Handshakes::new(Arc::clone(&context.metrics), Arc::clone(&context.failures));
    let mut eviction = interval(EVICTION_INTERVAL);
    eviction.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = eviction.tick(), if handshakes.has_waiting() => {
                handshakes.evict_silent(Instant::now());
                continue;
            }
        };
        let (stream, address) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                if context.warnings.admit(Warning::ConnectionRefused, Instant::now()) {
                    tracing::warn!(%error, "a connection cannot be accepted");
                }
                sleep(ACCEPT_RETRY).await;
                continue;
            }
        };
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%address, %error, "TCP_NODELAY cannot be set");
        }
        match &security {
            Security::Plaintext => {
                let peer = Peer { address, identity: Identity::Unchecked, not_after: None };
                // If the receiver no longer exists, the server has stopped. The connection closes.
                let _ = ready.send(Connection { io: Either::Left(stream), peer }).await;
            }
            Security::Tls(tls) => secure_in_turn(stream, address, tls, &handshakes, &context, &ready),
        }
    }
}

/// Starts a task that waits until the limit admits another handshake, and then runs the handshake
/// of the connection.
fn secure_in_turn(
    stream: TcpStream,
    address: SocketAddr,
    tls: &Arc<ServerTls>,
    handshakes: &Arc<Handshakes>,
    context: &Arc<Context>,
    ready: &Ready,
) {
    let Some(handshake) = handshakes.enter(address.ip()) else {
        return refused(address, context);
    };
    let (tls, context, ready) = (Arc::clone(tls), Arc::clone(context), ready.clone());
    tokio::spawn(async move {
        let secured = handshake.run(|| secure(stream, address, &tls, &context.metrics)).await;
        let (reason, error) = match secured {
            // If the receiver no longer exists, the connection closes.
            Ok(Ok(connection)) => return drop(ready.send(connection).await),
            Ok(Err(failure)) => failure,
            Err(Evicted::QueueFull) => return refused(address, &context),
            Err(Evicted::Silent) => {
                ("silent", "the client sent nothing for too long while other connections waited".to_owned())
            }
        };
        context.metrics.count_handshake_failed(reason);
        if context.warnings.admit(Warning::Handshake, Instant::now()) {
            tracing::warn!(%address, reason, error, "TLS handshake failed");
        }
    });
}

/// Counts and logs a connection that was closed because too many connections wait for handshakes.
fn refused(address: SocketAddr, context: &Context) {
    let reason = "too_many_handshakes";
    context.metrics.count_connection_refused(reason);
    if context.warnings.admit(Warning::ConnectionRefused, Instant::now()) {
        tracing::warn!(%address, reason, "connection refused");
    }
}

/// Runs a handshake. Returns the connection with its verified peer.
///
/// # Errors
///
/// The `reason` label for the metric, and a sentence for the log.
async fn secure(
    stream: TcpStream,
    address: SocketAddr,
    tls: &ServerTls,
    metrics: &Metrics,
) -> Result<Connection, (&'static str, String)> {
    let handshake = timeout(HANDSHAKE_TIMEOUT, TlsAcceptor::from(tls.config()).accept(stream)).await;
    let stream = handshake
        .map_err(|_| ("timeout", format!("the handshake took longer than {} s", HANDSHAKE_TIMEOUT.as_secs())))?
        .map_err(|error| refusal(&error, tls))?;
    let session = stream.get_ref().1;
    // A resumed session has a certificate too: the ticket contains the certificate that was
    // verified when the ticket was issued.
    let certificate = session.peer_certificates().and_then(<[_]>::first);
    let certificate = certificate.ok_or_else(|| ("no_certificate", "the client sent no certificate".to_owned()))?;
    let (identity, validity) =
        identity::from_certificate(certificate).map_err(|error| ("malformed_certificate", error))?;
    metrics.count_handshake(session.handshake_kind() == Some(HandshakeKind::Resumed));
    let peer = Peer { address, identity, not_after: Some(validity.not_after) };
    Ok(Connection { io: Either::Right(Box::new(stream)), peer })
}

/// Returns the label and the sentence for a handshake that failed.
fn refusal(error: &io::Error, tls: &ServerTls) -> (&'static str, String) {
    match headgate_tls::explain(error, tls.files()) {
        Some(refusal) => (refusal.reason, refusal.sentence),
        None => ("disconnected", format!("the client disconnected: {error}")),
    }
}

/// A connection that is ready for HTTP/2.
pub(crate) struct Connection {
    pub(crate) io: Io,
    pub(crate) peer: Peer,
}

/// The transport of a connection: plain TCP, or TLS after its handshake.
pub(crate) type Io = Either<TcpStream, Box<TlsStream<TcpStream>>>;
