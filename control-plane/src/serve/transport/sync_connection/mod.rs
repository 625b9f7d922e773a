//! A connection to the port for agents, which carries one `Discovery.Sync`. This module implements
//! the parts of HTTP/2 (RFC 9113) that such a connection needs.
//!
//! Such a connection needs little memory and time, for these reasons:
//!
//! - The connection owns no buffers. Reads and writes use scratch memory of the thread.
//! - A change does not wake the task of the connection. [`crate::serve::context::Visits`] calls the
//!   connection directly.
//! - Messages that are ready together are written as one TLS record, with one call to the kernel.
//!
//! A message is taken from the cursor only when the connection can write it. So a slow reader skips
//! to current values.
//!
//! A client that sends further requests receives GOAWAY, which does not affect the stream. The
//! client then opens another connection for these requests.

mod frame;
mod http2;

use std::{
    cell::RefCell,
    io::{self, Error, ErrorKind, Read as _, Write as _},
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Waker, ready},
};

use rustls::ServerConnection;
use socket2::SockRef;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::Instant,
};
use tokio_util::either::Either;

use super::{connection_limits::HeldConnection, listener};
use crate::{
    identity::Peer,
    serve::{
        context::{Budget, Signal, Visit, Visited},
        stream::Streams,
    },
};
use frame::MAX_PAYLOAD_BYTES;
use http2::Http2;

pub(super) use frame::PREFACE;

/// The maximum size of one read, in bytes.
const READ_BYTES: usize = 16 << 10;

/// The maximum size of one write, in bytes of plaintext: one TLS record.
const WRITE_BYTES: usize = MAX_PAYLOAD_BYTES as usize;

/// The maximum number of unsent bytes that the kernel accepts (`TCP_NOTSENT_LOWAT`, tcp(7)).
/// Without this limit, the kernel accepts megabytes for a peer that does not read. These bytes
/// would be out of date when the peer reads them.
const MAX_UNSENT_BYTES: u32 = 64 << 10;

/// The number of bytes that a connection may read, and may write, before other connections are
/// served.
const TURN_BYTES: usize = 128 << 10;

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::new(Scratch { read: vec![0; READ_BYTES].into(), write: Vec::new() });
}

struct Scratch {
    read: Box<[u8]>,
    write: Vec<u8>,
}

/// A connection that carries one stream, over the transport `S`.
struct SyncConnection<S> {
    signal: Arc<Signal>,
    /// `None` after the connection has ended.
    state: Mutex<Option<ConnectionState<S>>>,
    /// Whether the agent was late at the last visit.
    is_late: AtomicBool,
    _held: HeldConnection,
}

struct ConnectionState<S> {
    io: SyncIo<S>,
    http2: Http2,
    /// True while the kernel accepts no more bytes.
    is_blocked: bool,
    /// True while reading pauses because the client sends too fast.
    is_paused: bool,
    /// True after the connection was closed for writing.
    is_closed: bool,
}

/// Returns a future that serves a connection of the listener.
pub(crate) fn serve_accepted(
    streams: &Arc<Streams>,
    listener::Connection { io, peer, .. }: listener::Connection,
    held: HeldConnection,
) -> impl Future<Output = ()> + Send + use<> {
    let (stream, tls) = match io {
        Either::Left(stream) => (stream, None),
        Either::Right(tls) => {
            let (stream, tls) = tls.into_inner();
            (Either::Left(stream), Some(tls))
        }
    };
    if let Either::Left(tcp) = &stream
        && let Err(error) = SockRef::from(tcp).set_tcp_notsent_lowat(MAX_UNSENT_BYTES)
    {
        tracing::debug!(%error, "TCP_NOTSENT_LOWAT cannot be set");
    }
    serve(streams, peer, stream, tls, held)
}

/// Returns a future that serves a connection on which nothing has been read or written yet, except
/// the handshake of TLS.
pub(crate) fn serve<S: AsyncRead + AsyncWrite + Send + Unpin + 'static>(
    streams: &Arc<Streams>,
    peer: Peer,
    stream: S,
    tls: Option<ServerConnection>,
    held: HeldConnection,
) -> impl Future<Output = ()> + Send + use<S> {
    let (signal, now) = (Arc::new(Signal::new()), Instant::now());
    let http2 = Http2::new(Arc::clone(streams), peer, Arc::clone(&signal), now);
    let state = ConnectionState {
        io: SyncIo::new(stream, tls, held.budget.clone()),
        http2,
        is_blocked: false,
        is_paused: false,
        is_closed: false,
    };
    let connection = Arc::new(SyncConnection {
        signal,
        state: Mutex::new(Some(state)),
        is_late: AtomicBool::new(false),
        _held: held,
    });
    let visited = streams.context.visits.add(Arc::<SyncConnection<S>>::clone(&connection));
    ServedConnection { connection, _visited: visited }
}

/// The task of a connection. The task reads, and writes when the kernel accepts bytes again. Other
/// writes happen in visits.
struct ServedConnection<S> {
    connection: Arc<SyncConnection<S>>,
    _visited: Visited,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Future for ServedConnection<S> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        self.connection.signal.register(cx.waker());
        let mut slot = self.connection.state();
        let Some(state) = slot.as_mut() else { return Poll::Ready(()) };
        let now = Instant::now();
        let is_over = match SCRATCH.with_borrow_mut(|scratch| state.run(scratch, cx, now)) {
            Ok(()) => state.http2.is_over(),
            Err(error) => {
                state.http2.disconnected(&error, now);
                true
            }
        };
        if !is_over {
            return Poll::Pending;
        }
        let state = slot.take();
        drop(slot);
        // The state is dropped after the lock is released, because dropping the session calls the
        // fleet.
        drop(state);
        Poll::Ready(())
    }
}

impl<S> SyncConnection<S> {
    fn state(&self) -> MutexGuard<'_, Option<ConnectionState<S>>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> ConnectionState<S> {
    /// Reads and writes as much as the kernel allows, up to [`TURN_BYTES`] in each direction.
    fn run(&mut self, scratch: &mut Scratch, cx: &mut Context<'_>, now: Instant) -> Result<(), Error> {
        let mut read = 0;
        while !self.io.is_paused(now)
            && let Poll::Ready(bytes) = self.io.poll_read(cx, &mut scratch.read, now)?
        {
            if bytes == 0 {
                return Err(ErrorKind::UnexpectedEof.into());
            }
            self.http2.heard(now);
            self.http2.receive(&scratch.read[..bytes], now);
            read += bytes;
            if read >= TURN_BYTES {
                cx.waker().wake_by_ref();
                break;
            }
        }
        self.is_paused = self.io.is_paused(now);
        if self.write(&mut scratch.write, cx, now)? == Written::Turn {
            cx.waker().wake_by_ref();
        }
        Ok(())
    }

    /// Writes what is due. If the kernel accepts no more bytes, `cx` is woken once it does.
    fn write(&mut self, scratch: &mut Vec<u8>, cx: &mut Context<'_>, now: Instant) -> Result<Written, Error> {
        let (mut total, mut is_done) = (0, false);
        loop {
            let before = self.io.written_bytes();
            let is_flushed = self.io.flush(cx)?;
            if self.is_blocked && self.io.written_bytes() > before {
                // The kernel accepts bytes again, so the peer is slow, but it reads.
                self.http2.heard(now);
                self.http2.flows();
            }
            self.is_blocked = !is_flushed;
            if self.is_blocked {
                return Ok(Written::Blocked);
            }
            // What is due since then has woken the task of the connection, or causes another visit.
            if is_done {
                return Ok(Written::All);
            }
            if total >= TURN_BYTES {
                return Ok(Written::Turn);
            }
            scratch.clear();
            is_done = self.http2.fill(scratch, WRITE_BYTES, now) && !scratch.is_empty();
            if scratch.is_empty() {
                if self.http2.is_closing() && !self.is_closed {
                    self.is_closed = true;
                    self.io.close(cx)?;
                }
                return Ok(Written::All);
            }
            total += scratch.len();
            self.io.write(cx, scratch)?;
        }
    }
}

/// Why writing stopped.
#[derive(PartialEq, Eq)]
enum Written {
    /// Everything is written.
    All,
    /// The kernel accepts no more bytes.
    Blocked,
    /// The turn is over.
    Turn,
}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Visit for SyncConnection<S> {
    fn visit(&self, now: Instant) {
        let mut slot = self.state();
        let Some(state) = slot.as_mut() else { return };
        state.http2.keep_time(now);
        state.http2.keep_flowing(state.is_blocked, now);
        // If the connection is blocked, its task waits until the kernel accepts more bytes. If it
        // becomes blocked, the task is woken to wait.
        let cx = &mut Context::from_waker(Waker::noop());
        let written = match state.is_blocked {
            true => Ok(Written::All),
            false => SCRATCH.with_borrow_mut(|scratch| state.write(&mut scratch.write, cx, now)),
        };
        if let Err(error) = &written {
            state.http2.disconnected(error, now);
        }
        self.is_late.store(state.http2.is_late(now), Ordering::Relaxed);
        let is_idle = matches!(written, Ok(Written::All)) && !state.http2.is_over();
        // After a pause, nothing else wakes the task for bytes that have already arrived.
        let reads_again = state.is_paused && !state.io.is_paused(now);
        drop(slot);
        if !is_idle || reads_again {
            self.signal.wake();
        }
    }

    fn is_late(&self) -> bool {
        self.is_late.load(Ordering::Relaxed)
    }

    fn abort(&self) {
        let state = self.state().take();
        drop(state);
        self.signal.wake();
    }
}

// Reads and writes a connection, with or without TLS. [`SyncIo`] keeps a buffer only for bytes
// that the kernel has not accepted.

/// A connection whose handshake is done, over a transport such as a TCP socket.
struct SyncIo<S> {
    stream: S,
    tls: Option<Box<ServerConnection>>,
    /// Without TLS: bytes that the kernel has not accepted yet. With TLS, rustls stores such bytes.
    unwritten: Vec<u8>,
    written_bytes: u64,
    budget: Budget,
}

impl<S: AsyncRead + AsyncWrite + Unpin> SyncIo<S> {
    fn new(stream: S, tls: Option<ServerConnection>, budget: Budget) -> Self {
        let mut tls = tls.map(Box::new);
        if let Some(tls) = &mut tls {
            // No limit is needed: at most one record is written at a time, and only after the
            // kernel has accepted the record before it.
            tls.set_buffer_limit(None);
        }
        Self { stream, tls, unwritten: Vec::new(), written_bytes: 0, budget }
    }

    /// Returns true if reading pauses at `now`, because the peer sends too fast.
    fn is_paused(&self, now: Instant) -> bool {
        self.budget.pause(now).is_some()
    }

    /// Returns how many bytes the kernel has accepted. After the kernel has refused bytes, this
    /// number grows only when the peer reads.
    fn written_bytes(&self) -> u64 {
        self.written_bytes
    }

    /// Reads into `buffer`. Returns the number of bytes; 0 means the end of the connection. Must
    /// not be called while [`SyncIo::is_paused`] returns true.
    ///
    /// # Errors
    ///
    /// The connection is broken, or the bytes violate TLS.
    fn poll_read(&mut self, cx: &mut Context<'_>, buffer: &mut [u8], now: Instant) -> Poll<io::Result<usize>> {
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
    fn write(&mut self, cx: &mut Context<'_>, bytes: &[u8]) -> io::Result<()> {
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
    fn flush(&mut self, cx: &mut Context<'_>) -> io::Result<bool> {
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
    fn close(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
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

#[cfg(test)]
mod size_tests {
    use super::*;
    use crate::serve::{
        fleet::Agent,
        stream::Session,
        transport::listener::{Connection, Plain},
    };

    /// The size of the future that a function returns. The function is not called.
    fn size_of_future<A, F: Future>(_: impl Fn(A) -> F) -> usize {
        size_of::<F>()
    }

    /// A replica has thousands of connections. Each has its task, its state with one HTTP/2 stream,
    /// and the session of its agent.
    #[test]
    fn connections_are_small() {
        type Accepted = (&'static Arc<Streams>, Connection, HeldConnection);
        let task = size_of_future(|(streams, connection, held): Accepted| serve_accepted(streams, connection, held));
        let sizes = [task, size_of::<SyncConnection<Plain>>(), size_of::<Session>(), size_of::<Agent>()];
        let most = [32, 520, 320, 728];
        assert!(sizes.iter().zip(&most).all(|(size, most)| size <= most), "{sizes:?} bytes, and not {most:?}");
    }
}
