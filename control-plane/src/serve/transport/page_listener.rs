//! The listener of the HTTP pages, which any client can reach. It limits the number of connections,
//! in all and for each network. When a limit is reached, a new connection replaces an old one:
//!
//! - If the client's network has reached its limit, the connection of this network that has been
//!   silent for longest is closed.
//! - If all connections together have reached the limit, the network with the most connections
//!   loses the connection that has been silent for longest.
//!
//! Without these limits, a client could use up the open files that agents need.

use std::{
    collections::BTreeMap,
    io,
    net::SocketAddr,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, ready},
};

use axum::serve::Listener;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    time::{Instant, sleep},
};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

use super::ACCEPT_RETRY;
use crate::serve::context::Network;

/// The maximum number of open connections: enough for probes and for some programs that collect
/// metrics and keep their connections.
const MAX_CONNECTIONS: usize = 64;

/// The maximum number of open connections of one network.
const MAX_CONNECTIONS_OF_NETWORK: usize = 16;

/// A TCP listener that limits the number of open connections.
pub(crate) struct BoundedListener {
    listener: TcpListener,
    open: Arc<Open>,
    next_number: u64,
}

/// The open connections, by their numbers.
#[derive(Debug, Default)]
struct Open(Mutex<BTreeMap<u64, Entry>>);

#[derive(Debug)]
struct Entry {
    network: Network,
    /// When the client last sent something.
    heard_at: Instant,
    /// Cancelling this token closes the connection.
    closed: CancellationToken,
}

impl Open {
    fn table(&self) -> MutexGuard<'_, BTreeMap<u64, Entry>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a connection, and closes another connection if a limit is reached. Returns a token that
    /// is cancelled when the new connection has to close.
    fn enter(&self, number: u64, network: Network, now: Instant) -> CancellationToken {
        let mut table = self.table();
        let mut counts: BTreeMap<Network, usize> = BTreeMap::new();
        table.values().for_each(|entry| *counts.entry(entry.network).or_default() += 1);
        let crowded = if counts.get(&network).is_some_and(|count| *count >= MAX_CONNECTIONS_OF_NETWORK) {
            Some(network)
        } else if table.len() >= MAX_CONNECTIONS {
            counts.into_iter().max_by_key(|(_, count)| *count).map(|(network, _)| network)
        } else {
            None
        };
        let of_network = table.iter().filter(|(_, entry)| Some(entry.network) == crowded);
        let longest_silent = of_network.min_by_key(|(_, entry)| entry.heard_at).map(|(number, _)| *number);
        if let Some(Entry { closed, .. }) = longest_silent.and_then(|number| table.remove(&number)) {
            closed.cancel();
        }
        let closed = CancellationToken::new();
        table.insert(number, Entry { network, heard_at: now, closed: closed.clone() });
        closed
    }

    /// Records that a client has sent something.
    fn mark_heard(&self, number: u64, now: Instant) {
        if let Some(entry) = self.table().get_mut(&number) {
            entry.heard_at = now;
        }
    }
}

impl BoundedListener {
    pub(crate) fn new(listener: TcpListener) -> Self {
        Self { listener, open: Arc::default(), next_number: 0 }
    }
}

impl Listener for BoundedListener {
    type Io = Connection;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Connection, SocketAddr) {
        loop {
            match self.listener.accept().await {
                Ok((stream, address)) => {
                    let number = self.next_number;
                    self.next_number += 1;
                    let closed = self.open.enter(number, Network::of(address.ip()), Instant::now());
                    let closed = Box::pin(closed.cancelled_owned());
                    return (Connection { stream, number, closed, open: Arc::clone(&self.open) }, address);
                }
                Err(error) => {
                    tracing::debug!(%error, "a connection to the HTTP pages cannot be accepted");
                    sleep(ACCEPT_RETRY).await;
                }
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// One connection to the HTTP pages.
pub(crate) struct Connection {
    stream: TcpStream,
    number: u64,
    closed: Pin<Box<WaitForCancellationFutureOwned>>,
    open: Arc<Open>,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.open.table().remove(&self.number);
    }
}

impl AsyncRead for Connection {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.closed.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buffer))?;
        if buffer.filled().len() > before {
            self.open.mark_heard(self.number, Instant::now());
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        // The token is checked before each write too: while a client does not read its response,
        // the server does not read from the client.
        if self.closed.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn network(host: u8) -> Network {
        Network::of([192, 0, 2, host].into())
    }

    fn closed(entered: &[CancellationToken]) -> Vec<usize> {
        (0..entered.len()).filter(|index| entered[*index].is_cancelled()).collect()
    }

    #[test]
    fn the_longest_silent_connection_of_the_most_crowded_network_is_closed() {
        let (open, start) = (Open::default(), Instant::now());
        let at = |milliseconds| start + Duration::from_millis(milliseconds);
        // The first network has one connection, the next networks have more, and the last network
        // has most.
        let hosts = [1, 2, 3, 4, 5, 6].iter().flat_map(|host| std::iter::repeat_n(*host, 2 * usize::from(*host) - 1));
        let hosts: Vec<u8> = hosts.chain(std::iter::repeat_n(7, MAX_CONNECTIONS_OF_NETWORK)).collect();
        let enter = |(number, host): (usize, &u8)| open.enter(number as u64, network(*host), at(number as u64));
        let mut entered: Vec<_> = hosts.iter().enumerate().map(enter).collect();
        assert_eq!((hosts.len(), closed(&entered)), (52, vec![]));
        let first_of_last = hosts.len() - MAX_CONNECTIONS_OF_NETWORK;
        open.mark_heard(first_of_last as u64, at(1_000));
        entered.push(open.enter(1_000, network(7), at(1_001)));
        assert_eq!(closed(&entered), [first_of_last + 1], "a network at its limit loses a connection");
        entered.extend((2_000..2_012).map(|number| open.enter(number, network(8), at(number))));
        assert_eq!((open.table().len(), closed(&entered).len()), (MAX_CONNECTIONS, 1));
        entered.push(open.enter(3_000, network(1), at(3_000)));
        assert_eq!(
            closed(&entered),
            [first_of_last + 1, first_of_last + 2],
            "the network with the most connections loses a connection"
        );
        assert_eq!(open.table().len(), MAX_CONNECTIONS);
    }
}
