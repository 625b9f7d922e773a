//! The socket of an HTTP connection. The socket counts sent bytes, and can be closed with a TCP
//! reset.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
};

use super::counters::Counters;

/// The state that a connection shares with its responses.
#[derive(Debug, Default)]
pub(super) struct ConnectionState {
    reset_on_close: AtomicBool,
}

impl ConnectionState {
    /// Makes the connection end with a TCP reset when it is closed.
    pub(super) fn reset_on_close(&self) {
        self.reset_on_close.store(true, Ordering::Relaxed);
    }
}

/// A TCP stream that counts sent bytes.
#[derive(Debug)]
pub(super) struct CountedStream {
    stream: TcpStream,
    state: Arc<ConnectionState>,
    counters: Arc<Counters>,
}

impl CountedStream {
    pub(super) fn new(stream: TcpStream, state: Arc<ConnectionState>, counters: Arc<Counters>) -> Self {
        Self { stream, state, counters }
    }
}

impl Drop for CountedStream {
    fn drop(&mut self) {
        if self.state.reset_on_close.load(Ordering::Relaxed) {
            // With a linger time of 0, close(2) sends RST instead of FIN. If the linger time cannot
            // be set, the peer sees a normal close instead of a reset.
            if let Err(error) = socket2::SockRef::from(&self.stream).set_linger(Some(Duration::ZERO)) {
                tracing::warn!(%error, "could not arm a TCP reset");
            }
        }
    }
}

impl AsyncRead for CountedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for CountedStream {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        if let Poll::Ready(Ok(count)) = written {
            self.counters.add_bytes(count);
        }
        written
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.state.reset_on_close.load(Ordering::Relaxed) {
            // Send no FIN before the reset.
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
