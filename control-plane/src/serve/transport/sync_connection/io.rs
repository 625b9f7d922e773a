//! Reads and writes a connection, with or without TLS. [`SyncIo`] keeps a buffer only for bytes
//! that the kernel has not accepted.

use std::{
    io::{self, Read as _, Write as _},
    pin::Pin,
    task::{Context, Poll, ready},
};

use rustls::ServerConnection;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::Instant,
};

use crate::serve::transport::budget::Budget;

/// A connection whose handshake is done, over a transport such as a TCP socket.
pub(super) struct SyncIo<S> {
    stream: S,
    tls: Option<Box<ServerConnection>>,
    /// Without TLS: bytes that the kernel has not accepted yet. With TLS, rustls stores such bytes.
    unwritten: Vec<u8>,
    written_bytes: u64,
    budget: Budget,
}

impl<S: AsyncRead + AsyncWrite + Unpin> SyncIo<S> {
    pub(super) fn new(stream: S, tls: Option<ServerConnection>, budget: Budget) -> Self {
        let mut tls = tls.map(Box::new);
        if let Some(tls) = &mut tls {
            // No limit is needed: at most one record is written at a time, and only after the
            // kernel has accepted the record before it.
            tls.set_buffer_limit(None);
        }
        Self { stream, tls, unwritten: Vec::new(), written_bytes: 0, budget }
    }

    /// Returns true if reading pauses at `now`, because the peer sends too fast.
    pub(super) fn is_paused(&self, now: Instant) -> bool {
        self.budget.pause(now).is_some()
    }

    /// Returns how many bytes the kernel has accepted. After the kernel has refused bytes, this
    /// number grows only when the peer reads.
    pub(super) fn written_bytes(&self) -> u64 {
        self.written_bytes
    }

    /// Reads into `buffer`. Returns the number of bytes; 0 means the end of the connection. Must
    /// not be called while [`SyncIo::is_paused`] returns true.
    ///
    /// # Errors
    ///
    /// The connection is broken, or the bytes violate TLS.
    pub(super) fn poll_read(
        &mut self,
        cx: &mut Context<'_>,
        buffer: &mut [u8],
        now: Instant,
    ) -> Poll<io::Result<usize>> {
        let Self { stream, budget, .. } = self;
        let Some(tls) = &mut self.tls else { return poll_stream(stream, budget, cx, buffer, now) };
        loop {
            match tls.reader().read(buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                // Many clients close the connection without a `close_notify` of TLS.
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Poll::Ready(Ok(0)),
                read => return Poll::Ready(read),
            }
            match tls.read_tls(&mut TlsReader { stream, budget, cx, now }) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Poll::Pending,
                Err(error) => return Poll::Ready(Err(error)),
            }
            if let Err(error) = tls.process_new_packets() {
                // Sends the TLS alert with the reason, if the kernel accepts it.
                let _ = tls.write_tls(&mut TlsWriter { stream, cx });
                return Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, error)));
            }
        }
    }

    /// Writes `bytes`, and keeps the bytes that the kernel does not accept. [`SyncIo::flush`] must
    /// return true before the next write.
    ///
    /// # Errors
    ///
    /// The connection is broken.
    pub(super) fn write(&mut self, cx: &mut Context<'_>, bytes: &[u8]) -> io::Result<()> {
        if let Some(tls) = &mut self.tls {
            return tls.writer().write_all(bytes);
        }
        let written = accepted(Pin::new(&mut self.stream).poll_write(cx, bytes))?.unwrap_or(0);
        self.written_bytes += written as u64;
        self.unwritten.extend_from_slice(&bytes[written..]);
        Ok(())
    }

    /// Writes bytes that the kernel has not accepted yet. Returns true if no such bytes are left.
    /// Otherwise, the context is woken once the kernel accepts more bytes.
    ///
    /// # Errors
    ///
    /// The connection is broken.
    pub(super) fn flush(&mut self, cx: &mut Context<'_>) -> io::Result<bool> {
        let Self { stream, tls, unwritten, written_bytes, .. } = self;
        loop {
            let written = match tls {
                Some(tls) if tls.wants_write() => match tls.write_tls(&mut TlsWriter { stream, cx }) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => None,
                    written => Some(written?),
                },
                None if !unwritten.is_empty() => accepted(Pin::new(&mut *stream).poll_write(cx, unwritten))?,
                _ => return Ok(true),
            };
            let Some(written) = written else { return Ok(false) };
            *written_bytes += written as u64;
            if tls.is_none() {
                unwritten.drain(..written);
                if unwritten.is_empty() {
                    *unwritten = Vec::new();
                }
            }
        }
    }

    /// Tells the peer that nothing more will be written. Call this after everything is flushed.
    ///
    /// # Errors
    ///
    /// The connection is broken.
    pub(super) fn close(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        if let Some(tls) = &mut self.tls {
            tls.send_close_notify();
        }
        self.flush(cx)?;
        accepted(Pin::new(&mut self.stream).poll_shutdown(cx)).map(|_| ())
    }
}

/// Returns `None` if the operation has to wait.
fn accepted<T>(polled: Poll<io::Result<T>>) -> io::Result<Option<T>> {
    match polled {
        Poll::Ready(result) => result.map(Some),
        Poll::Pending => Ok(None),
    }
}

fn poll_stream(
    stream: &mut (impl AsyncRead + Unpin),
    budget: &Budget,
    cx: &mut Context<'_>,
    buffer: &mut [u8],
    now: Instant,
) -> Poll<io::Result<usize>> {
    let mut buffer = ReadBuf::new(buffer);
    // After a read that does not fill the buffer, `poll_read` of a socket knows that the socket is
    // empty, and makes no second call to the kernel.
    ready!(Pin::new(stream).poll_read(cx, &mut buffer))?;
    budget.spend(buffer.filled().len(), now);
    Poll::Ready(Ok(buffer.filled().len()))
}

/// The transport for reads by rustls. If no bytes have arrived, the read fails with `WouldBlock`,
/// and the context is woken when bytes arrive.
struct TlsReader<'a, 'b, S> {
    stream: &'a mut S,
    budget: &'a Budget,
    cx: &'a mut Context<'b>,
    now: Instant,
}

impl<S: AsyncRead + Unpin> io::Read for TlsReader<'_, '_, S> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let polled = poll_stream(self.stream, self.budget, self.cx, buffer, self.now);
        accepted(polled)?.ok_or_else(|| io::ErrorKind::WouldBlock.into())
    }
}

/// The transport for writes by rustls. If the kernel accepts no bytes, the write fails with
/// `WouldBlock`, and the context is woken once the kernel accepts bytes.
struct TlsWriter<'a, 'b, S> {
    stream: &'a mut S,
    cx: &'a mut Context<'b>,
}

impl<S: AsyncWrite + Unpin> io::Write for TlsWriter<'_, '_, S> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        accepted(Pin::new(&mut *self.stream).poll_write(self.cx, bytes))?
            .ok_or_else(|| io::ErrorKind::WouldBlock.into())
    }

    fn write_vectored(&mut self, slices: &[io::IoSlice<'_>]) -> io::Result<usize> {
        // Usually there is only one slice. A plain write is cheaper than a vectored write.
        if let [slice] = slices {
            return self.write(slice);
        }
        accepted(Pin::new(&mut *self.stream).poll_write_vectored(self.cx, slices))?
            .ok_or_else(|| io::ErrorKind::WouldBlock.into())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
