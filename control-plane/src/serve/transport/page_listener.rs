//! The listener of the HTTP pages, which everybody can reach. It holds few connections, and fewer
//! of one network. When another one comes, the longest silent connection is closed: one of the same
//! network if that has as many as it may, otherwise one of the network that has most.
//!
//! Without this limit, whoever opens connections there takes open files from agents.

use std::{
    collections::BTreeMap,
    io,
    net::SocketAddr,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, ready},
    time::Duration,
};

use axum::serve::Listener;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    time::{Instant, sleep},
};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

use crate::serve::context::Network;

/// Connections at a time: probes, and some programs that collect metrics and keep theirs.
const MAX_CONNECTIONS: usize = 64;

/// Of one network.
const MAX_CONNECTIONS_OF_NETWORK: usize = 16;

/// Wait after an accept that failed, which would fail again at once.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// See the module.
pub(crate) struct BoundedListener {
    listener: TcpListener,
    open: Arc<Open>,
    next_number: u64,
}

/// Connections that are open, by their numbers.
#[derive(Debug, Default)]
struct Open(Mutex<BTreeMap<u64, Entry>>);

#[derive(Debug)]
struct Entry {
    network: Network,
    heard: Instant,
    closed: CancellationToken,
}

impl Open {
    fn table(&self) -> MutexGuard<'_, BTreeMap<u64, Entry>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enters a connection. One that is in its place is closed.
    fn enter(&self, number: u64, network: Network, now: Instant) -> CancellationToken {
        let mut table = self.table();
        let mut counts: BTreeMap<Network, usize> = BTreeMap::new();
        table.values().for_each(|entry| *counts.entry(entry.network).or_default() += 1);
        let too_many = if counts.get(&network).is_some_and(|count| *count >= MAX_CONNECTIONS_OF_NETWORK) {
            Some(network)
        } else if table.len() >= MAX_CONNECTIONS {
            counts.into_iter().max_by_key(|(_, count)| *count).map(|(network, _)| network)
        } else {
            None
        };
        let of_network = table.iter().filter(|(_, entry)| Some(entry.network) == too_many);
        let longest_silent = of_network.min_by_key(|(_, entry)| entry.heard).map(|(number, _)| *number);
        if let Some(Entry { closed, .. }) = longest_silent.and_then(|number| table.remove(&number)) {
            closed.cancel();
        }
        let closed = CancellationToken::new();
        table.insert(number, Entry { network, heard: now, closed: closed.clone() });
        closed
    }

    fn heard(&self, number: u64, now: Instant) {
        if let Some(entry) = self.table().get_mut(&number) {
            entry.heard = now;
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
                    return (
                        Connection {
                            stream,
                            number,
                            closed: Box::pin(closed.cancelled_owned()),
                            open: Arc::clone(&self.open),
                        },
                        address,
                    );
                }
                Err(error) => {
                    tracing::debug!(%error, "a connection for pages cannot be accepted");
                    sleep(ACCEPT_RETRY).await;
                }
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// One connection.
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
            self.open.heard(self.number, Instant::now());
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        // A client that asked and does not read is not read from either.
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
    use super::*;

    fn network(host: u8) -> Network {
        Network::of([192, 0, 2, host].into())
    }

    fn closed(entered: &[CancellationToken]) -> Vec<usize> {
        (0..entered.len()).filter(|index| entered[*index].is_cancelled()).collect()
    }

    #[test]
    fn the_longest_silent_one_of_those_who_have_most_goes() {
        let (open, start) = (Open::default(), Instant::now());
        let at = |milliseconds| start + Duration::from_millis(milliseconds);
        // The first has one, further ones have some, and the last has most.
        let hosts = [1, 2, 3, 4, 5, 6].iter().flat_map(|host| std::iter::repeat_n(*host, 2 * usize::from(*host) - 1));
        let hosts: Vec<u8> = hosts.chain(std::iter::repeat_n(7, MAX_CONNECTIONS_OF_NETWORK)).collect();
        let enter = |(number, host): (usize, &u8)| open.enter(number as u64, network(*host), at(number as u64));
        let mut entered: Vec<_> = hosts.iter().enumerate().map(enter).collect();
        assert_eq!((hosts.len(), closed(&entered)), (52, vec![]));
        let first_of_last = hosts.len() - MAX_CONNECTIONS_OF_NETWORK;
        open.heard(first_of_last as u64, at(1_000));
        entered.push(open.enter(1_000, network(7), at(1_001)));
        assert_eq!(closed(&entered), [first_of_last + 1], "as many as one network may have");
        entered.extend((2_000..2_012).map(|number| open.enter(number, network(8), at(number))));
        assert_eq!((open.table().len(), closed(&entered).len()), (MAX_CONNECTIONS, 1));
        entered.push(open.enter(3_000, network(1), at(3_000)));
        assert_eq!(closed(&entered), [first_of_last + 1, first_of_last + 2], "of those who have most");
        assert_eq!(open.table().len(), MAX_CONNECTIONS);
    }
}
