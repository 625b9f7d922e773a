//! A connection for the general server, whose HTTP/2 is tonic's.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Instant, Sleep, sleep},
};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::transport::server::Connected;

use super::{budget::Budget, connection_limits::Held, first_request::WithoutFirstAck, listener::Connection};
use crate::identity::Peer;

/// Who asks, and the connection that it asks on; found in the extensions of every request.
#[derive(Debug, Clone)]
pub(crate) struct Caller {
    pub(crate) peer: Peer,
    /// Closes the connection when it is cancelled.
    pub(crate) closed: CancellationToken,
}

/// A connection for the general server, with what was read of it before.
pub(crate) struct General {
    connection: Connection,
    _held: Held,
    unread: Vec<u8>,
    read_bytes: usize,
    filter: WithoutFirstAck,
    closed: CancellationToken,
    until_closed: Pin<Box<WaitForCancellationFutureOwned>>,
    budget: Budget,
    pause: Option<Pin<Box<Sleep>>>,
}

impl General {
    pub(crate) fn new(connection: Connection, held: Held, read: &[u8]) -> Self {
        let (mut filter, mut unread) = (WithoutFirstAck::new(), Vec::new());
        filter.pass(read, &mut unread);
        let mut budget = Budget::new(Instant::now());
        budget.spend(read.len(), Instant::now());
        let closed = CancellationToken::new();
        let until_closed = Box::pin(closed.clone().cancelled_owned());
        Self { connection, _held: held, unread, read_bytes: 0, filter, closed, until_closed, budget, pause: None }
    }

    /// Reads from the connection as its budget allows.
    fn poll_connection(&mut self, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if let Some(pause) = &mut self.pause {
            ready!(pause.as_mut().poll(cx));
            self.pause = None;
        }
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.connection.io).poll_read(cx, buffer))?;
        let now = Instant::now();
        self.budget.spend(buffer.filled().len() - before, now);
        self.pause = self.budget.pause(now).map(|pause| Box::pin(sleep(pause)));
        Poll::Ready(Ok(()))
    }
}

impl Connected for General {
    type ConnectInfo = Caller;

    fn connect_info(&self) -> Caller {
        Caller { peer: self.connection.peer.clone(), closed: self.closed.clone() }
    }
}

impl AsyncRead for General {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if this.until_closed.as_mut().poll(cx).is_ready() {
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
        Pin::new(&mut self.connection.io).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.connection.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.connection.io).poll_shutdown(cx)
    }
}
