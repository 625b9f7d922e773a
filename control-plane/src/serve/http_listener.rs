//! The listener of the pages, which everybody reaches: few connections at a time, and when another comes the longest silent one goes.
//!
//! Without a bound whoever opens connections there takes the open files from agents.

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

use super::closer::Closer;

/// Connections at a time: probes, and some programs that collect metrics and keep theirs.
const MAX_CONNECTIONS: usize = 64;

/// Wait after an accept that failed, which would fail again at once.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// See the module.
pub(super) struct BoundedListener {
    listener: TcpListener,
    open: Arc<Open>,
    next_number: u64,
}

/// Connections that are open, and when each was heard last.
#[derive(Debug, Default)]
struct Open(Mutex<BTreeMap<u64, (Instant, Arc<Closer>)>>);

impl Open {
    fn table(&self) -> MutexGuard<'_, BTreeMap<u64, (Instant, Arc<Closer>)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enters a connection. One that is in its place is closed.
    fn enter(&self, number: u64, now: Instant) -> Arc<Closer> {
        let mut table = self.table();
        let longest_silent = table.iter().min_by_key(|(_, (heard, _))| *heard).map(|(number, _)| *number);
        if table.len() >= MAX_CONNECTIONS
            && let Some((_, closer)) = longest_silent.and_then(|number| table.remove(&number))
        {
            closer.close();
        }
        let closer = Arc::<Closer>::default();
        table.insert(number, (now, Arc::clone(&closer)));
        closer
    }

    fn heard(&self, number: u64, now: Instant) {
        if let Some((heard, _)) = self.table().get_mut(&number) {
            *heard = now;
        }
    }
}

impl BoundedListener {
    pub(super) fn new(listener: TcpListener) -> Self {
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
                    let closer = self.open.enter(number, Instant::now());
                    return (Connection { stream, number, closer, open: Arc::clone(&self.open) }, address);
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
pub(super) struct Connection {
    stream: TcpStream,
    number: u64,
    closer: Arc<Closer>,
    open: Arc<Open>,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.open.table().remove(&self.number);
    }
}

impl AsyncRead for Connection {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.closer.poll_closed(cx) {
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
        // Whoever asked and does not read is not being read from either.
        if self.closer.poll_closed(cx) {
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

    #[test]
    fn the_longest_silent_one_goes_when_there_are_too_many() {
        let (open, start) = (Open::default(), Instant::now());
        let at = |milliseconds| start + Duration::from_millis(milliseconds);
        let most = MAX_CONNECTIONS as u64;
        let closers: Vec<_> = (0..most).map(|number| open.enter(number, at(number))).collect();
        open.heard(0, at(most));
        open.enter(most, at(most + 1));
        let cx = Context::from_waker(std::task::Waker::noop());
        let closed: Vec<usize> = (0..closers.len()).filter(|index| closers[*index].poll_closed(&cx)).collect();
        assert_eq!((closed, open.table().len()), (vec![1], MAX_CONNECTIONS));
    }
}
