//! Reads and writes a connection, with or without TLS. [`Io`] keeps a buffer only for bytes that
//! the kernel has not accepted.

use std::{
    io::{self, Read as _, Write as _},
    pin::Pin,
    task::{Context, Poll, Waker, ready},
};

use rustls::ServerConnection;
use socket2::SockRef;
use tokio::{
    io::{AsyncRead as _, AsyncWrite as _, ReadBuf},
    net::TcpStream,
    time::Instant,
};

use crate::serve::transport::budget::Budget;

/// The maximum number of unsent bytes that the kernel accepts (`TCP_NOTSENT_LOWAT`, tcp(7)).
/// Without this limit, the kernel accepts megabytes for a peer that does not read. These bytes
/// would be out of date when the peer reads them.
const MAX_UNSENT_BYTES: u32 = 64 << 10;

/// A connection whose handshake is done.
pub(super) struct Io {
    stream: TcpStream,
    tls: Option<Box<ServerConnection>>,
    /// Without TLS: bytes that the kernel has not accepted yet. With TLS, rustls stores such bytes.
    unwritten: Vec<u8>,
    written_bytes: u64,
    budget: Budget,
}

impl Io {
    pub(super) fn new(stream: TcpStream, tls: Option<ServerConnection>) -> Self {
        if let Err(error) = SockRef::from(&stream).set_tcp_notsent_lowat(MAX_UNSENT_BYTES) {
            tracing::debug!(%error, "TCP_NOTSENT_LOWAT cannot be set");
        }
        let mut tls = tls.map(Box::new);
        if let Some(tls) = &mut tls {
            // No limit is needed: at most one record is written at a time, and only after the
            // kernel has accepted the record before it.
            tls.set_buffer_limit(None);
        }
        Self { stream, tls, unwritten: Vec::new(), written_bytes: 0, budget: Budget::new(Instant::now()) }
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
    /// not be called while [`Io::is_paused`] returns true.
    ///
    /// # Errors
    ///
    /// The connection is broken, or the bytes violate TLS.
    pub(super) fn poll_read(&mut self, cx: &mut Context<'_>, buffer: &mut [u8]) -> Poll<io::Result<usize>> {
        let Self { stream, budget, .. } = self;
        let Some(tls) = &mut self.tls else { return poll_socket(stream, budget, cx, buffer) };
        loop {
            match tls.reader().read(buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                // Many clients close the connection without a `close_notify` of TLS.
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Poll::Ready(Ok(0)),
                read => return Poll::Ready(read),
            }
            match tls.read_tls(&mut Reader { stream, budget, cx }) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Poll::Pending,
                Err(error) => return Poll::Ready(Err(error)),
            }
            if let Err(error) = tls.process_new_packets() {
                // Sends the TLS alert with the reason, if the kernel accepts it.
                let _ = tls.write_tls(&mut Writer(stream));
                return Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, error)));
            }
        }
    }

    /// Writes `bytes`, and keeps the bytes that the kernel does not accept. [`Io::flush`] must
    /// return true before the next write.
    ///
    /// # Errors
    ///
    /// The connection is broken.
    pub(super) fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        if let Some(tls) = &mut self.tls {
            return tls.writer().write_all(bytes);
        }
        let written = match self.stream.try_write(bytes) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
            written => written?,
        };
        self.written_bytes += written as u64;
        self.unwritten.extend_from_slice(&bytes[written..]);
        Ok(())
    }

    /// Writes bytes that the kernel has not accepted yet. Returns true if no such bytes are left.
    ///
    /// # Errors
    ///
    /// The connection is broken.
    pub(super) fn flush(&mut self) -> io::Result<bool> {
        loop {
            let written = match &mut self.tls {
                Some(tls) if tls.wants_write() => tls.write_tls(&mut Writer(&mut self.stream)),
                None if !self.unwritten.is_empty() => self.stream.try_write(&self.unwritten),
                _ => return Ok(true),
            };
            match written {
                Ok(written) => {
                    self.written_bytes += written as u64;
                    if self.tls.is_none() {
                        self.unwritten.drain(..written);
                        if self.unwritten.is_empty() {
                            self.unwritten = Vec::new();
                        }
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error),
            }
        }
    }

    /// Returns `Ready` once the kernel accepts more bytes.
    pub(super) fn poll_writable(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream.poll_write_ready(cx)
    }

    /// Tells the peer that nothing more will be written. Call this after everything is flushed.
    ///
    /// # Errors
    ///
    /// The connection is broken.
    pub(super) fn close(&mut self) -> io::Result<()> {
        if let Some(tls) = &mut self.tls {
            tls.send_close_notify();
        }
        self.flush()?;
        match Pin::new(&mut self.stream).poll_shutdown(&mut no_context()) {
            Poll::Ready(result) => result,
            Poll::Pending => Ok(()),
        }
    }
}

/// Returns a context that wakes nothing, for calls that do not wait.
fn no_context() -> Context<'static> {
    Context::from_waker(Waker::noop())
}

fn poll_socket(
    stream: &mut TcpStream,
    budget: &mut Budget,
    cx: &mut Context<'_>,
    buffer: &mut [u8],
) -> Poll<io::Result<usize>> {
    let mut buffer = ReadBuf::new(buffer);
    // After a read that does not fill the buffer, tokio's `poll_read` knows that the socket is
    // empty. So `poll_read` makes no second call to the kernel, unlike `try_read`.
    ready!(Pin::new(stream).poll_read(cx, &mut buffer))?;
    budget.spend(buffer.filled().len(), Instant::now());
    Poll::Ready(Ok(buffer.filled().len()))
}

/// The socket for reads by rustls. If no bytes have arrived, the read fails with `WouldBlock`, and
/// the context is woken when bytes arrive.
struct Reader<'a, 'b> {
    stream: &'a mut TcpStream,
    budget: &'a mut Budget,
    cx: &'a mut Context<'b>,
}

impl io::Read for Reader<'_, '_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match poll_socket(self.stream, self.budget, self.cx, buffer) {
            Poll::Ready(read) => read,
            Poll::Pending => Err(io::ErrorKind::WouldBlock.into()),
        }
    }
}

/// The socket for writes by rustls. The writes do not wait.
struct Writer<'a>(&'a mut TcpStream);

impl io::Write for Writer<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.try_write(bytes)
    }

    fn write_vectored(&mut self, slices: &[io::IoSlice<'_>]) -> io::Result<usize> {
        match slices {
            // Usually there is only one slice. A plain write is cheaper than a vectored write.
            [slice] => self.0.try_write(slice),
            slices => self.0.try_write_vectored(slices),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
