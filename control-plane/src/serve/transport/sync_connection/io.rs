//! Reading and writing of a connection, with no buffer of its own where none is needed.

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

/// Bytes that the kernel takes while earlier ones have not left it (`TCP_NOTSENT_LOWAT`, tcp(7)).
/// Without a bound it takes megabytes for a peer that does not read, all of them out of date by the
/// time that it does.
const MAX_UNSENT_BYTES: u32 = 64 << 10;

/// A connection whose handshake is done.
pub(super) struct Io {
    stream: TcpStream,
    tls: Option<Box<ServerConnection>>,
    /// Without TLS: what was to be written and the kernel did not take. TLS keeps its own.
    unwritten: Vec<u8>,
    written_bytes: u64,
    budget: Budget,
}

impl Io {
    pub(super) fn new(stream: TcpStream, tls: Option<ServerConnection>) -> Self {
        if let Err(error) = SockRef::from(&stream).set_tcp_notsent_lowat(MAX_UNSENT_BYTES) {
            tracing::debug!(%error, "TCP_NOTSENT_LOWAT");
        }
        let mut tls = tls.map(Box::new);
        if let Some(tls) = &mut tls {
            // What is written is at most one record, and only once the one before it has left.
            tls.set_buffer_limit(None);
        }
        Self { stream, tls, unwritten: Vec::new(), written_bytes: 0, budget: Budget::new(Instant::now()) }
    }

    /// True while what has come has to wait, since so much has come before.
    pub(super) fn is_paused(&self, now: Instant) -> bool {
        self.budget.pause(now).is_some()
    }

    /// Bytes that the kernel has taken: as this grows, the peer reads.
    pub(super) fn written_bytes(&self) -> u64 {
        self.written_bytes
    }

    /// Reads into `buffer`. 0 is the end. Not to be called while it is paused.
    ///
    /// # Errors
    ///
    /// The connection is broken, or what came is not TLS's.
    pub(super) fn poll_read(&mut self, cx: &mut Context<'_>, buffer: &mut [u8]) -> Poll<io::Result<usize>> {
        let Self { stream, budget, .. } = self;
        let Some(tls) = &mut self.tls else { return poll_socket(stream, budget, cx, buffer) };
        loop {
            match tls.reader().read(buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                // Many clients close without saying so to TLS.
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Poll::Ready(Ok(0)),
                read => return Poll::Ready(read),
            }
            match tls.read_tls(&mut Reader { stream, budget, cx }) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Poll::Pending,
                Err(error) => return Poll::Ready(Err(error)),
            }
            if let Err(error) = tls.process_new_packets() {
                // The alert that says why, if there is room for it.
                let _ = tls.write_tls(&mut Writer(stream));
                return Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, error)));
            }
        }
    }

    /// Writes `bytes`. What the kernel does not take is kept: [`Io::flush`] has to succeed before
    /// the next write.
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

    /// Gives the kernel what it has not taken. True when nothing is left.
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

    /// Ready once the kernel takes more.
    pub(super) fn poll_writable(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream.poll_write_ready(cx)
    }

    /// Says that nothing more is going to be written. To be called when everything is flushed.
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

/// For calls that do not wait.
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
    // Unlike `try_read` this knows that a read that did not fill the buffer has emptied the socket,
    // which spares a second call to the kernel.
    ready!(Pin::new(stream).poll_read(cx, &mut buffer))?;
    budget.spend(buffer.filled().len(), Instant::now());
    Poll::Ready(Ok(buffer.filled().len()))
}

/// The socket as rustls reads it: waiting as the context says.
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

/// The socket as rustls writes it: without waiting.
struct Writer<'a>(&'a mut TcpStream);

impl io::Write for Writer<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.try_write(bytes)
    }

    fn write_vectored(&mut self, slices: &[io::IoSlice<'_>]) -> io::Result<usize> {
        match slices {
            // The usual case, in the cheaper call.
            [slice] => self.0.try_write(slice),
            slices => self.0.try_write_vectored(slices),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
