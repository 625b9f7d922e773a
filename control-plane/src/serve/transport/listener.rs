//! Accepts connections on both gRPC ports, and runs their TLS handshakes, within limits that the
//! ports share.

use std::{
    future::{pending, poll_fn},
    io,
    net::SocketAddr,
    sync::Arc,
    time::Duration,
};

use futures::future::BoxFuture;
use headgate_listener::{Accept, Io};
use headgate_tls::Denied;
use rustls::HandshakeKind;
use tokio::{
    net::{TcpListener, TcpStream},
    time::{Instant, sleep, timeout},
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use tokio_util::{either::Either, sync::CancellationToken, task::TaskTracker};

use super::{
    ACCEPT_RETRY,
    connection_limits::{Connections, HeldConnection, hold},
    handshakes::{Handshakes, Silent},
};
use crate::{
    identity::{self, Identity, Peer},
    serve::{
        context::{Context, Warning},
        tls::{Security, ServerTls},
    },
};

/// The longest time that a handshake may take.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// What the listeners of both ports share.
#[derive(Clone)]
pub(crate) struct Entrance {
    security: Security,
    context: Arc<Context>,
    handshakes: Arc<Handshakes>,
    connections: Arc<Connections>,
    /// The tasks that serve connections.
    pub(crate) tasks: TaskTracker,
    shutdown: CancellationToken,
}

impl Entrance {
    /// Returns an entrance that is open until `shutdown` is cancelled. Connections that are not
    /// served by then are dropped.
    pub(crate) fn new(security: Security, context: Arc<Context>, shutdown: CancellationToken) -> Self {
        let handshakes = Handshakes::new(Arc::clone(&context), 1, ["active", "waiting"]);
        Self { security, context, handshakes, connections: Arc::default(), tasks: TaskTracker::new(), shutdown }
    }

    /// Accepts connections. `serve` serves each of them after its handshake, in a task of its own.
    pub(crate) async fn accept(self, mut listener: Listener, serve: Serve) {
        while let Some(accepted) = self.shutdown.run_until_cancelled(listener.accept()).await {
            let (stream, address) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    if self.context.warnings.admit(Warning::ConnectionRefused, Instant::now()) {
                        tracing::warn!(%error, "a connection cannot be accepted");
                    }
                    sleep(ACCEPT_RETRY).await;
                    continue;
                }
            };
            match (stream, &self.security) {
                (Either::Left(stream), Security::Tls(tls)) => {
                    self.secure_in_turn(stream, address, Arc::clone(tls), Arc::clone(&serve));
                }
                (stream, _) => {
                    let peer = Peer { address, identity: Identity::Unchecked, not_after: None };
                    self.admit(Connection { io: Either::Left(stream), peer, denied_by: Vec::new() }, &serve);
                }
            }
        }
    }

    /// Starts a task that waits until the limit admits another handshake, and then runs the
    /// handshake of the connection.
    fn secure_in_turn(&self, stream: TcpStream, address: SocketAddr, tls: Arc<ServerTls>, serve: Serve) {
        let network = self.context.network(address.ip());
        let Some(handshake) = self.handshakes.enter(network) else {
            return self.refuse(address, "too_many_handshakes");
        };
        let entrance = self.clone();
        let secure = async move {
            let ended = match handshake.until_heard(stream.peek(&mut [0])).await {
                Ok(()) => handshake.run(|| true, || secure(stream, address, &tls, &entrance.context)).await,
                Err(Silent) => Err(Silent),
            };
            let (reason, error) = match ended {
                Ok(Ok(connection)) => return entrance.admit(connection, &serve),
                Ok(Err(failure)) => failure,
                Err(Silent) => ("silent", "the client sent nothing for too long".to_owned()),
            };
            entrance.context.metrics.handshakes_failed.of([reason]).inc();
            if entrance.context.warnings.admit_from(Some(network), Warning::Handshake, Instant::now()) {
                tracing::warn!(%address, reason, error, "TLS handshake failed");
            }
        };
        tokio::spawn(self.shutdown.clone().run_until_cancelled_owned(secure));
    }

    /// Serves a connection, unless there are too many.
    fn admit(&self, connection: Connection, serve: &Serve) {
        match hold(&self.connections, &connection.peer.identity) {
            Ok(held) => {
                let (address, entrance, entries) =
                    (connection.peer.address, self.clone(), connection.denied_by.clone());
                let served = serve(connection, held);
                self.tasks.spawn(async move {
                    let denied = async {
                        match &entrance.security {
                            Security::Tls(tls) if !entries.is_empty() => tls.denied(&entries).await,
                            _ => pending().await,
                        }
                    };
                    tokio::select! {
                        () = served => {}
                        () = denied => entrance.refuse(address, "denied"),
                    }
                });
            }
            Err(reason) => self.refuse(connection.peer.address, reason),
        }
    }

    /// Counts and logs a connection that is closed because a limit is reached, or because its
    /// client is denied.
    fn refuse(&self, address: SocketAddr, reason: &'static str) {
        self.context.metrics.connections_refused.of([reason]).inc();
        let network = self.context.network(address.ip());
        if self.context.warnings.admit_from(Some(network), Warning::ConnectionRefused, Instant::now()) {
            tracing::warn!(%address, reason, "connection refused");
        }
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
    context: &Context,
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
    let is_resumed = session.handshake_kind() == Some(HandshakeKind::Resumed);
    context.metrics.handshakes.of([if is_resumed { "resumed" } else { "full" }]).inc();
    let denied_by = tls.files().denied.as_ref().map(|_| Denied::entries_of(certificate, identity.uri()));
    let peer = Peer { address, identity, not_after: Some(validity.not_after) };
    Ok(Connection { io: Either::Right(Box::new(stream)), peer, denied_by: denied_by.unwrap_or_default() })
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
    pub(crate) io: Transport,
    pub(crate) peer: Peer,
    /// The entries of `--tls-denied` that end the connection. Empty without this file.
    pub(crate) denied_by: Vec<String>,
}

/// Serves a connection that counts until it ends.
pub(crate) type Serve = Arc<dyn Fn(Connection, HeldConnection) -> BoxFuture<'static, ()> + Send + Sync>;

/// Where connections come from. Only TCP has TLS. A Unix socket needs none: only the user of this
/// process can open it.
pub(crate) enum Listener {
    Tcp(TcpListener),
    Other(Box<dyn Accept>),
}

impl Listener {
    /// Accepts a connection.
    async fn accept(&mut self) -> io::Result<(Plain, SocketAddr)> {
        match self {
            Self::Other(listener) => {
                let (stream, address) = poll_fn(|cx| listener.poll_accept(cx)).await?;
                Ok((Either::Right(stream), address))
            }
            Self::Tcp(listener) => {
                let (stream, address) = listener.accept().await?;
                if let Err(error) = stream.set_nodelay(true) {
                    tracing::debug!(%address, %error, "TCP_NODELAY cannot be set");
                }
                Ok((Either::Left(stream), address))
            }
        }
    }
}

/// The transport of a connection: without TLS, or with TLS after its handshake.
pub(crate) type Transport = Either<Plain, Box<TlsStream<TcpStream>>>;

/// The transport of a connection without TLS, or below it.
pub(crate) type Plain = Either<TcpStream, Box<dyn Io>>;
