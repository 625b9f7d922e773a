//! How many connections there may be, and where each goes: to a stream's own server, or to the general one.

use std::{
    collections::HashMap,
    io,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    sync::mpsc,
    task::JoinHandle,
    time::{Instant, Sleep, sleep},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::transport::server::Connected;

use super::{
    Shared,
    budget::Budget,
    closer::Closer,
    first_request::{self, WithoutFirstAck},
    listener::{Connection, Io},
    sync_connection,
    untaken::Caller,
    warnings::Warning,
};
use crate::identity::{Identity, Peer};

/// Connections in all; more are closed at once.
const MAX_CONNECTIONS: usize = 65_536;

/// Connections of one node: one that is going, one that replaces it, and some for people who look.
const MAX_CONNECTIONS_PER_NODE: usize = 16;

/// Connections of one reader, or of all who share a reader's name.
const MAX_CONNECTIONS_PER_READER: usize = 256;

/// Connections of all whose certificates say nothing that we understand: other programs, where the authority is the cluster's.
const MAX_CONNECTIONS_OF_NOBODY: usize = 64;

/// How long the first request is waited for. A connection that is made before there is anything to ask goes to the general server, which keeps it.
const FIRST_REQUEST_WAIT: Duration = Duration::from_secs(10);

/// Connections that are open.
#[derive(Debug, Default)]
pub(super) struct Connections(Mutex<Counts>);

#[derive(Debug, Default)]
struct Counts {
    all: usize,
    by_holder: HashMap<Holder, usize>,
}

/// Whose connections are counted together.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Holder {
    Node(Arc<str>),
    Reader(Arc<str>),
    Nobody,
}

impl Holder {
    /// `None` without TLS, where everybody is the same.
    fn of(identity: &Identity) -> Option<Self> {
        match identity {
            Identity::Node(name) => Some(Self::Node(Arc::clone(name))),
            Identity::Reader(name) => Some(Self::Reader(Arc::clone(name))),
            Identity::Unusable(_) => Some(Self::Nobody),
            Identity::Unchecked => None,
        }
    }

    /// How many it may have, and the label of the bound.
    fn bound(&self) -> (usize, &'static str) {
        match self {
            Self::Node(_) => (MAX_CONNECTIONS_PER_NODE, "too_many_connections_of_node"),
            Self::Reader(_) => (MAX_CONNECTIONS_PER_READER, "too_many_connections_of_reader"),
            Self::Nobody => (MAX_CONNECTIONS_OF_NOBODY, "too_many_connections_of_nobody"),
        }
    }
}

/// One of them, until it is dropped.
#[derive(Debug)]
pub(super) struct Held {
    connections: Arc<Connections>,
    holder: Option<Holder>,
}

impl Connections {
    /// Counts a connection in.
    ///
    /// # Errors
    ///
    /// The bound that it would exceed, as a label.
    fn hold(self: &Arc<Self>, identity: &Identity) -> Result<Held, &'static str> {
        let mut counts = self.counts();
        if counts.all >= MAX_CONNECTIONS {
            return Err("too_many_connections");
        }
        let holder = Holder::of(identity);
        if let Some(holder) = &holder {
            let (most, reason) = holder.bound();
            let count = counts.by_holder.entry(holder.clone()).or_default();
            if *count >= most {
                return Err(reason);
            }
            *count += 1;
        }
        counts.all += 1;
        drop(counts);
        Ok(Held { connections: Arc::clone(self), holder })
    }

    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut counts = self.connections.counts();
        counts.all -= 1;
        if let Some(holder) = &self.holder
            && let Some(count) = counts.by_holder.get_mut(holder)
        {
            *count -= 1;
            if *count == 0 {
                counts.by_holder.remove(holder);
            }
        }
    }
}

/// Sends each connection to where it belongs until `shutdown` is cancelled. Returns those for the general server; the others are served in `tasks`.
pub(super) fn dispatch(
    mut accepted: mpsc::Receiver<io::Result<Connection>>,
    shared: Arc<Shared>,
    tasks: TaskTracker,
    shutdown: CancellationToken,
) -> (mpsc::Receiver<io::Result<General>>, JoinHandle<()>) {
    let (sender, receiver) = mpsc::channel(16);
    let connections = Arc::new(Connections::default());
    let dispatch = async move {
        while let Some(connection) = accepted.recv().await {
            let Ok(connection) = connection else { continue };
            let peer = connection.connect_info();
            let held = match connections.hold(&peer.identity) {
                Ok(held) => held,
                Err(reason) => {
                    shared.metrics.count_connection_refused(reason);
                    if shared.warnings.admit(Warning::ConnectionRefused, Instant::now()) {
                        tracing::warn!(address = %peer.address, identity = ?peer.identity, reason, "connection refused");
                    }
                    continue;
                }
            };
            let first = first_request(connection, peer, Arc::clone(&shared), held, tasks.clone(), sender.clone());
            let shutdown = shutdown.clone();
            tokio::spawn(async move { shutdown.run_until_cancelled(first).await });
        }
    };
    (receiver, tokio::spawn(dispatch))
}

async fn first_request(
    mut connection: Connection,
    peer: Peer,
    shared: Arc<Shared>,
    held: Held,
    tasks: TaskTracker,
    general: mpsc::Sender<io::Result<General>>,
) {
    let first = match first_request::read(&mut connection, FIRST_REQUEST_WAIT).await {
        Ok(first) => first,
        Err(error) => {
            if error.kind() == io::ErrorKind::TimedOut {
                shared.metrics.count_connection_refused("no_request");
            }
            tracing::debug!(address = %peer.address, %error, "connection without a request");
            return;
        }
    };
    if !first.is_sync {
        // The server is gone when nobody receives: the connection closes.
        return drop(general.send(Ok(General::new(connection, held, &first.bytes))).await);
    }
    let (stream, tls) = match connection.into_io() {
        Io::Plain(stream) => (stream, None),
        Io::Tls(tls) => {
            let (stream, tls) = tls.into_inner();
            (stream, Some(tls))
        }
    };
    tasks.spawn(sync_connection::serve(&shared, peer, stream, tls, &first.bytes, held));
}

/// A connection for the general server, with what was read of it before.
pub(super) struct General {
    connection: Connection,
    _held: Held,
    unread: Vec<u8>,
    read_bytes: usize,
    filter: WithoutFirstAck,
    closer: Arc<Closer>,
    budget: Budget,
    pause: Option<Pin<Box<Sleep>>>,
}

impl General {
    fn new(connection: Connection, held: Held, read: &[u8]) -> Self {
        let (mut filter, mut unread) = (WithoutFirstAck::new(), Vec::new());
        filter.pass(read, &mut unread);
        let mut budget = Budget::new(Instant::now());
        budget.spend(read.len(), Instant::now());
        Self { connection, _held: held, unread, read_bytes: 0, filter, closer: Arc::default(), budget, pause: None }
    }

    /// Reads from the connection as its budget allows.
    fn poll_connection(&mut self, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if let Some(pause) = &mut self.pause {
            ready!(pause.as_mut().poll(cx));
            self.pause = None;
        }
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.connection).poll_read(cx, buffer))?;
        let now = Instant::now();
        self.budget.spend(buffer.filled().len() - before, now);
        self.pause = self.budget.pause(now).map(|pause| Box::pin(sleep(pause)));
        Poll::Ready(Ok(()))
    }
}

impl Connected for General {
    type ConnectInfo = Caller;

    fn connect_info(&self) -> Caller {
        Caller { peer: self.connection.connect_info(), connection: Arc::clone(&self.closer) }
    }
}

impl AsyncRead for General {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if this.closer.poll_closed(cx) {
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        loop {
            if this.read_bytes < this.unread.len() {
                let unread = &this.unread[this.read_bytes..];
                let bytes = unread.len().min(buffer.remaining());
                buffer.put_slice(&unread[..bytes]);
                this.read_bytes += bytes;
                return Poll::Ready(Ok(()));
            }
            this.unread = Vec::new();
            this.read_bytes = 0;
            if this.filter.is_done() {
                return this.poll_connection(cx, buffer);
            }
            let mut scratch = [0; 4096];
            let mut read = ReadBuf::new(&mut scratch);
            match this.poll_connection(cx, &mut read) {
                Poll::Ready(Ok(())) if read.filled().is_empty() => return Poll::Ready(Ok(())),
                Poll::Ready(Ok(())) => this.filter.pass(read.filled(), &mut this.unread),
                other => return other,
            }
        }
    }
}

impl AsyncWrite for General {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.connection).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.connection).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.connection.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.connection).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.connection).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn connections_of_one_holder_are_bounded_and_counted_out() {
        let connections = Arc::new(Connections::default());
        let (node, reader) = (|name: &str| Identity::Node(name.into()), |name: &str| Identity::Reader(name.into()));
        let nobody = |problem: &str| Identity::Unusable(problem.into());
        let cases = [
            (node("same"), node("same"), MAX_CONNECTIONS_PER_NODE, "too_many_connections_of_node"),
            (reader("same"), reader("same"), MAX_CONNECTIONS_PER_READER, "too_many_connections_of_reader"),
            (nobody("this"), nobody("that"), MAX_CONNECTIONS_OF_NOBODY, "too_many_connections_of_nobody"),
        ];
        let mut held = Vec::new();
        for (identity, next, most, reason) in cases {
            held.extend((0..most).map(|_| connections.hold(&identity).unwrap()));
            assert_eq!(connections.hold(&next).unwrap_err(), reason);
        }
        held.extend(
            [node("other"), reader("other"), Identity::Unchecked].map(|other| connections.hold(&other).unwrap()),
        );
        assert_eq!(connections.counts().all, held.len());
        drop(held);
        let counts = connections.counts();
        assert_eq!((counts.all, counts.by_holder.len()), (0, 0));
    }

    #[test]
    fn connections_are_bounded_in_all() {
        let connections = Arc::new(Connections::default());
        connections.counts().all = MAX_CONNECTIONS;
        assert_eq!(connections.hold(&Identity::Unchecked).unwrap_err(), "too_many_connections");
    }
}
